"""How many requests may be in flight, and which are late: two classes without threads and I/O.

`Pace` allows more requests while that pays, and half as many after a 503. A *round* measures one limit: requests that
began under the previous limit are skipped, the next ones give bytes per second and mean seconds. An increase is kept if
it pays (`_pays`), else undone and retried with half the step; if no step pays, the limit stays for a while. Rounds
count only while requests wait for a place, since a limit that is not reached cannot be measured.

`Hedging` follows Dean and Barroso, The Tail at Scale (2013): a second request after the 95th percentile of the usual
time costs little and cuts the tail. Requests differ in size, so times are divided by the expected time of the size:
first byte + bytes / rate is proportional to FIRST_BYTE + bytes, with FIRST_BYTE in bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

# The initial limit saturates a server on the same machine; three rounds later it may be 64.
FIRST = 16
# The minimum of a round, so that neither one slow request nor one short moment decides.
ROUND_REQUESTS = 16
ROUND_SECONDS = 0.1
# A step pays if it gains this share of what it would gain if requests did not share bandwidth.
OWN_SPEED = 0.7
# It also pays if it gains this much, unless requests take this many times their shortest mean time: then half of them
# queue, as at twice the bandwidth-delay product (Cardwell et al., BBR, 2016), and one rank gains what another loses.
LEAST_GAIN = 0.05
MOST_QUEUEING = 2.0
# Rounds without an attempt after no step paid; a round takes about three times as long as a request.
HOLD_ROUNDS = 16
# The minimum time between two decreases, so that a burst of 503s counts once. A store counts as throttling for as long.
DECREASE_SECONDS = 1.0
# After a 503 the limit stays below this share of the limit that caused it, for this many seconds.
BELOW_THROTTLE = 0.9
THROTTLE_MEMORY_SECONDS = 30.0


class Pace:
    """The limit of requests in flight, from 1 to `most`. Thread-safe; passes share it, so the next one starts well.

    Increases by measured steps, decreases multiplicatively (Chiu and Jain, 1989) at most once a second.
    """

    def __init__(self, most: int, first: int = FIRST, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._most = most
        self._first = first
        self._limit = min(first, most)
        self._kept = self._limit  # the limit before the present step, and its bytes per second
        self._kept_rate = 1.0
        self._step = self._limit
        self._hold = 0
        self._best_seconds = float("inf")
        self._decreased_at = self._throttled_at = -THROTTLE_MEMORY_SECONDS
        self._ceiling = most
        self._succeeded = True  # since the last decrease
        self._new_round()

    @property
    def limit(self) -> int:
        """The number of requests that may be in flight."""
        return self._limit

    @property
    def throttling(self) -> bool:
        """Whether the store throttled a request within the last second."""
        return self._clock() - self._throttled_at < DECREASE_SECONDS

    def allow(self, most: int) -> None:
        """Set the maximum that memory allows."""
        with self._lock:
            self._most = most
            if self._limit > most:
                self._set_limit(most)

    def completed(self, size: int, seconds: float, waiting: bool) -> None:
        """Record a request of `size` bytes that took `seconds`; `waiting`: others wait for its place."""
        with self._lock:
            self._succeeded = True
            if not waiting:
                self._new_round()
                return
            if self._skipped < self._limit:
                self._skipped += 1
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
        """Halve the limit after a throttled request, at most once a second.

        Not again before a request succeeds: failures of an outage do not show how many requests the store accepts.
        """
        with self._lock:
            now = self._throttled_at = self._clock()
            if not self._succeeded or now - self._decreased_at < DECREASE_SECONDS:
                return
            self._decreased_at, self._succeeded = now, False
            self._ceiling = max(1, int(self._limit * BELOW_THROTTLE))
            self._set_limit(max(1, self._limit // 2))
            self._step = max(1, self._limit // 2)
            self._new_round()

    def _new_round(self) -> None:
        self._skipped = 0
        self._begin = 0.0
        self._count = 0
        self._bytes = 0
        self._seconds = 0.0

    def _judge(self, rate: float, seconds: float) -> None:
        """End a round: keep or undo the step that it measured, and begin the next step."""
        if self._limit >= self._first:
            self._best_seconds = min(self._best_seconds, seconds)
        if self._limit == self._kept:
            self._kept_rate = max(1.0, rate)
            self._hold = max(0, self._hold - 1)
            if not self._hold:
                self._increase()
        elif self._pays(rate, seconds):
            self._set_limit(self._limit)
            self._kept_rate = max(1.0, rate)
            self._step *= 2
            self._increase()
        else:
            self._set_limit(self._kept)
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

    def _increase(self) -> None:
        most = self._most
        if self._clock() - self._decreased_at < THROTTLE_MEMORY_SECONDS:
            most = min(most, self._ceiling)
        self._limit = max(self._kept, min(most, self._kept + self._step))

    def _set_limit(self, limit: int) -> None:
        self._limit = self._kept = limit


# The latency in bytes of transfer: 30 ms at 70 MB/s. For a store with a lower or higher value, small or large requests
# count as late later than they should, never earlier.
FIRST_BYTE = 2 << 20
# The number of times before any request counts as late, and the number of recent times that are kept.
LEAST_SAMPLES = 100
SAMPLES = 512
# The quantile is computed again after this many times.
REFRESH = 32
QUANTILE = 0.95
# By definition 5 % of all requests exceed the quantile; hedging these would leave no hedges for requests that stall.
MARGIN = 2.0
# Shorter delays come from this machine, not from the store.
LEAST_SECONDS = 0.5
# This many requests earn one hedge, and at most this many hedges are saved up.
REQUESTS_A_HEDGE = 30
MOST_SAVED = 10.0


class Hedging:
    """The usual time of a request, and the number of hedges saved up. Thread-safe; passes share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[float] = deque(maxlen=SAMPLES)  # seconds / (FIRST_BYTE + bytes)
        self._count = 0
        self._usual = float("inf")
        self._saved = 0.0

    def completed(self, size: int, seconds: float) -> None:
        """Record a request of `size` bytes that took `seconds`."""
        with self._lock:
            self._samples.append(seconds / (FIRST_BYTE + size))
            self._count += 1
            self._saved = min(MOST_SAVED, self._saved + 1 / REQUESTS_A_HEDGE)
            if self._count == LEAST_SAMPLES or (self._count > LEAST_SAMPLES and self._count % REFRESH == 0):
                self._usual = sorted(self._samples)[int(QUANTILE * len(self._samples))]

    def deadline(self, size: int) -> float:
        """Return the seconds after which a request of `size` bytes is late; infinity before 100 requests."""
        return max(LEAST_SECONDS, MARGIN * self._usual * (FIRST_BYTE + size))

    def withdraw(self) -> bool:
        """Use one hedge; return False if none is saved up."""
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            return True
