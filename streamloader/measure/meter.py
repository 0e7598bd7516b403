"""How far a bench has come: what its stages add up, told now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

TICK_SECONDS = 0.1


@dataclass(frozen=True)
class BenchProgress:
    """Where a bench stands: the stage, seconds of all stages together, and the rates of this stage so far."""

    stage: str
    done_seconds: float
    total_seconds: float
    samples_per_second: float
    megabytes_per_second: float


Listener = Callable[[BenchProgress], None]


class Meter:
    """Adds up what the stages advance, and tells the listener now and then."""

    def __init__(self, seconds: float, stages: int, listen: Listener | None) -> None:
        self._listen = listen
        self._seconds = seconds
        self._total = seconds * stages
        self._lock = threading.Lock()
        self._stage = ""
        self._number = -1
        self._begin = self._told = 0.0
        self._samples = self._bytes = 0

    def begin(self, stage: str) -> Callable[[int, int], None]:
        """Begin the next stage; return what takes its samples and bytes."""
        self._stage, self._number = stage, self._number + 1
        self._samples = self._bytes = 0
        self._begin = time.perf_counter()
        self._told = 0.0
        self.advance(0, 0)
        return self.advance

    def advance(self, samples: int, size: int) -> None:
        """Count, and tell the listener unless it was told just before."""
        with self._lock:
            self._samples += samples
            self._bytes += size
            now = time.perf_counter()
            if self._listen is None or now - self._told < TICK_SECONDS:
                return
            self._told = now
            elapsed = now - self._begin
            self._listen(
                BenchProgress(
                    self._stage,
                    self._number * self._seconds + min(elapsed, self._seconds),
                    self._total,
                    _share(self._samples, elapsed),
                    _share(self._bytes / 1e6, elapsed),
                )
            )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
