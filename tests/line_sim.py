"""Stores in a few figures, simulated: how a `Pace` does against one, alone or beside others. No threads, no clock."""

import math
import random
from dataclasses import dataclass, field

from streamloader.engine.pace import Pace

SIZE = 4 << 20


@dataclass(frozen=True)
class Store:
    """`latency` seconds to the first byte (log-normal with sigma `jitter`), then `own` bytes/s for each connection,
    `shared` for all of them; more than `most` requests at once get a 503."""

    latency: float = 0.0
    own: float = 1e12
    shared: float = 1e12
    most: int = 10**9
    jitter: float = 0.2

    def best(self, in_flight: int) -> float:
        """The bytes per second that so many requests get where they come without a gap."""
        alone = self.latency * math.exp(self.jitter**2 / 2) + SIZE / self.own
        return min(self.shared, min(in_flight, self.most) * SIZE / alone)


@dataclass(eq=False)
class Request:
    """One in flight."""

    rank: int
    sent: float
    first_byte: float
    left: float = float(SIZE)


@dataclass
class Race:
    """Ranks with a `Pace` each, all of them always wanting more, against one store."""

    store: Store
    most: tuple[int, ...] = (64,)
    seed: int = 0
    now: float = 0.0
    flying: list[Request] = field(default_factory=list)
    pausing: list[tuple[float, int]] = field(default_factory=list)  # until when, rank: after a 503

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.paces = [Pace(most, clock=lambda: self.now) for most in self.most]

    def run(self, requests: int) -> float:
        """Go on until so many more requests came back; return their bytes per second."""
        begin, done = self.now, 0
        while done < requests:
            self._send()
            done += self._pass_time()
        return done * SIZE / (self.now - begin)

    def _send(self) -> None:
        for rank, pace in enumerate(self.paces):
            used = sum(request.rank == rank for request in self.flying) + sum(r == rank for _, r in self.pausing)
            for _ in range(pace.limit - used):
                if len(self.flying) >= self.store.most:
                    pace.throttled()
                    self.pausing.append((self.now + 0.2 * self.random.random(), rank))
                else:
                    wait = self.store.latency * self.random.lognormvariate(0, self.store.jitter)
                    self.flying.append(Request(rank, self.now, self.now + wait))

    def _pass_time(self) -> int:
        active = [request for request in self.flying if request.first_byte <= self.now]
        rate = min(self.store.own, self.store.shared / max(1, len(active)))
        events = [request.left / rate for request in active]
        events += [request.first_byte - self.now for request in self.flying if request.first_byte > self.now]
        events += [until - self.now for until, _ in self.pausing]
        step = max(min(events), 1e-9)
        self.now += step
        for request in active:
            request.left -= rate * step
        self.pausing = [pause for pause in self.pausing if pause[0] > self.now]
        came = [request for request in active if request.left <= SIZE * 1e-6]
        self.flying = [request for request in self.flying if request not in came]
        for request in came:
            self.paces[request.rank].completed(SIZE, self.now - request.sent, waiting=True)
        return len(came)
