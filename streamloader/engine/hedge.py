"""Which requests are late, and how many of them may be sent a second time. No threads, no I/O.

Dean and Barroso, The Tail at Scale (2013): a second request after the 95th percentile of the usual time costs little
and cuts the tail. Requests differ in size, so times are compared after division by the time that the size explains:
first byte + bytes / rate is proportional to FIRST_BYTE + bytes, with FIRST_BYTE in bytes.
"""

from __future__ import annotations

import threading

# Bytes that a connection moves while another waits for its first: 30 ms at 70 MB/s. Where it is less or more, small
# requests, or large ones, wait longer before they are late, never shorter than they should.
FIRST_BYTE = 2 << 20
# Samples before anything is late, and how many of the latest are kept.
LEAST_SAMPLES = 100
SAMPLES = 512
# How many samples come before the quantile is computed anew.
REFRESH = 32
QUANTILE = 0.95
# By definition 5 % of all requests exceed the quantile: hedged, they would take the whole budget from those that stall.
MARGIN = 2.0
# A shorter delay is this machine's, not the store's.
LEAST_SECONDS = 0.5
# So many requests earn one hedge; so many may be saved up.
REQUESTS_A_HEDGE = 30
MOST_SAVED = 10.0


class Hedging:
    """The usual time of a request and the budget of second ones; thread-safe, survives a pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: list[float] = []  # seconds / (FIRST_BYTE + bytes), a ring
        self._count = 0
        self._usual = float("inf")
        self._saved = 0.0

    def came(self, size: int, seconds: float) -> None:
        """A request of `size` bytes came back well after `seconds`."""
        with self._lock:
            normalised = seconds / (FIRST_BYTE + size)
            if len(self._samples) < SAMPLES:
                self._samples.append(normalised)
            else:
                self._samples[self._count % SAMPLES] = normalised
            self._count += 1
            self._saved = min(MOST_SAVED, self._saved + 1 / REQUESTS_A_HEDGE)
            if self._count == LEAST_SAMPLES or (self._count > LEAST_SAMPLES and self._count % REFRESH == 0):
                self._usual = sorted(self._samples)[int(QUANTILE * len(self._samples))]

    def deadline(self, size: int) -> float:
        """Return after how many seconds a request of `size` bytes is late; infinity before 100 samples."""
        return max(LEAST_SECONDS, MARGIN * self._usual * (FIRST_BYTE + size))

    def withdraw(self) -> bool:
        """Take one hedge; False where none is saved."""
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            return True

    def give_back(self) -> None:
        """Give back a hedge that was not sent."""
        with self._lock:
            self._saved += 1
