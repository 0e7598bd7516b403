"""How many requests may be in flight: more while that pays, half as many after a 503. No threads, no I/O.

A *round* measures one limit: the requests that were begun under the limit before are passed over, the next ones
give bytes per second and mean seconds. A step up is kept if it pays (`_pays`), else undone and tried again half as
long; when no step pays, the limit holds for a while. Rounds count only while requests wait for a place: a limit that
is not reached says nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# In flight at first: saturates a server on the same machine; three rounds later it may be 64.
FIRST = 16
# The least a round measures, so that neither one slow request nor one short moment decides.
ROUND_REQUESTS = 16
ROUND_SECONDS = 0.1
# A step pays without more ado if it brings this part of what it would bring where every request has its own speed.
OWN_SPEED = 0.7
# It also pays if it brings this much more, unless requests take this many times as long as they did at best: then
# half of them queue, as at twice the bandwidth-delay product (Cardwell et al., BBR, 2016), and what one rank gains
# another loses.
LEAST_GAIN = 0.05
MOST_QUEUEING = 2.0
# Rounds without an attempt after none paid; a round is about three times as long as a request takes.
HOLD_ROUNDS = 16
# Halving more often would answer one burst of 503s many times; it also is how long a store counts as throttling.
DECREASE_SECONDS = 1.0
# After a 503 the limit stays this far below where it came, for so long.
BELOW_THROTTLE = 0.9
THROTTLE_MEMORY_SECONDS = 30.0


class Pace:
    """The limit of requests in flight, from 1 to `most`. Thread-safe; survives a pass, so that the next starts well.

    Increase by measured steps, multiplicative decrease (Chiu and Jain, 1989) at most once a second.
    """

    def __init__(self, most: int, first: int = FIRST, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._most = most
        self._first = first
        self._limit = min(first, most)
        self._kept = self._limit  # the limit that the last step started from, and its bytes per second
        self._kept_rate = 1.0
        self._step = self._limit
        self._hold = 0
        self._best_seconds = float("inf")
        self._decreased_at = self._throttled_at = -THROTTLE_MEMORY_SECONDS
        self._ceiling = most
        self._new_round()

    @property
    def limit(self) -> int:
        """The requests that may be in flight now."""
        return self._limit

    @property
    def calm(self) -> bool:
        """Whether the store has not said slow down within the last second."""
        return self._clock() - self._throttled_at >= DECREASE_SECONDS

    def allow(self, most: int) -> None:
        """Set the most that memory allows from now on."""
        with self._lock:
            self._most = most
            if self._limit > most:
                self._settle(most)

    def came(self, size: int, seconds: float, waiting: bool) -> None:
        """A request of `size` bytes came back well after `seconds`; `waiting`: others wait for its place."""
        with self._lock:
            if not waiting:
                self._new_round()
                return
            if self._passed_over < self._limit:
                self._passed_over += 1
                self._begin = self._clock()
                return
            self._bytes += size
            self._seconds += seconds
            self._count += 1
            elapsed = self._clock() - self._begin
            if self._count >= max(ROUND_REQUESTS, 2 * self._limit) and elapsed >= ROUND_SECONDS:
                self._judge(self._bytes / elapsed, self._seconds / self._count)
                self._new_round()

    def throttled(self) -> None:
        """The store said slow down: half as many, at most once a second."""
        with self._lock:
            now = self._throttled_at = self._clock()
            if now - self._decreased_at < DECREASE_SECONDS:
                return
            self._decreased_at = now
            self._ceiling = max(1, int(self._limit * BELOW_THROTTLE))
            self._settle(max(1, self._limit // 2))
            self._step = max(1, self._limit // 2)
            self._new_round()

    def _new_round(self) -> None:
        self._passed_over = 0
        self._begin = 0.0
        self._count = 0
        self._bytes = 0
        self._seconds = 0.0

    def _judge(self, rate: float, seconds: float) -> None:
        """End a round: keep or undo the step that it measured, and try the next."""
        if self._limit >= self._first:
            self._best_seconds = min(self._best_seconds, seconds)
        if self._limit == self._kept:
            self._kept_rate = max(1.0, rate)
            self._hold = max(0, self._hold - 1)
            if not self._hold:
                self._raise()
        elif self._pays(rate, seconds):
            self._settle(self._limit)
            self._kept_rate = max(1.0, rate)
            self._step *= 2
            self._raise()
        else:
            self._settle(self._kept)
            self._step //= 2
            if self._step < max(1, self._kept // 8):
                self._hold = HOLD_ROUNDS
                self._step = max(1, self._kept // 4)

    def _pays(self, rate: float, seconds: float) -> bool:
        if self._limit <= self._first:
            return True
        gain = rate / self._kept_rate - 1
        if gain >= OWN_SPEED * (self._limit / self._kept - 1):
            return True
        return gain >= LEAST_GAIN and seconds <= MOST_QUEUEING * self._best_seconds

    def _raise(self) -> None:
        most = self._most
        if self._clock() - self._decreased_at < THROTTLE_MEMORY_SECONDS:
            most = min(most, self._ceiling)
        self._limit = max(self._kept, min(most, self._kept + self._step))

    def _settle(self, limit: int) -> None:
        self._limit = self._kept = limit
