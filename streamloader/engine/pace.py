"""How many requests may be in flight: fewer after a 503, one more again while all goes well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Halving more often than once a second would answer one burst of 503s many times.
DECREASE_SECONDS = 1.0


class Pace:
    """A gate for requests with additive increase and multiplicative decrease (Chiu and Jain, 1989)."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._limit = float(most)
        self._clock = clock
        self._decreased = -DECREASE_SECONDS
        self._flying = 0
        self._gate = threading.Condition()

    @property
    def limit(self) -> int:
        """The requests that may be in flight now."""
        return int(self._limit)

    @contextmanager
    def flight(self) -> Iterator[None]:
        """Hold a place in flight for the length of the block; wait for one first."""
        with self._gate:
            while self._flying >= int(self._limit):
                self._gate.wait()
            self._flying += 1
        try:
            yield
        finally:
            with self._gate:
                self._flying -= 1
                self._gate.notify()

    def succeeded(self) -> None:
        """A request came back well: one more in flight for each round of the present limit."""
        if self._limit < self._most:
            with self._gate:
                self._limit = min(self._most, self._limit + 1 / self._limit)
                self._gate.notify()

    def throttled(self) -> None:
        """The store said slow down: half as many, at most once a second."""
        with self._gate:
            now = self._clock()
            if now - self._decreased >= DECREASE_SECONDS:
                self._decreased = now
                self._limit = max(1.0, self._limit / 2)
