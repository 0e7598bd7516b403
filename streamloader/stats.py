"""Counting: every stage adds to one `Counters`; `Stats` is a frozen snapshot with a verdict in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

# Bytes: a cloud store's first byte takes as long as a MiB of the rest, so that shorter requests mostly wait.
SMALL_REQUEST = 1 << 20


@dataclass(frozen=True)
class Stats:
    """What one rank's loader did since it was made. Seconds are wall time, bytes are as stored.

    `wait_seconds`: the training loop waited for a batch. `fetch_wait_seconds`, `decode_wait_seconds` and
    `transform_wait_seconds` say for what the loader itself waited; they overlap with training.
    `request_seconds`, `unpack_seconds`, `decode_seconds` and `transform_seconds` are summed over all threads: requests
    in flight, checking and unpacking chunks, decoding images, the caller's transform. `full_seconds`: the loader was
    ahead and waited for the training loop. `client` names the data plane and why it was chosen.
    """

    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    first_batch_seconds: float = 0.0
    requests: int = 0
    retries: int = 0
    bytes_fetched: int = 0
    bytes_decoded: int = 0
    buffers_allocated: int = 0
    request_seconds: float = 0.0
    unpack_seconds: float = 0.0
    decode_seconds: float = 0.0
    transform_seconds: float = 0.0
    fetch_wait_seconds: float = 0.0
    decode_wait_seconds: float = 0.0
    transform_wait_seconds: float = 0.0
    full_seconds: float = 0.0
    client: str = ""

    @property
    def samples_per_second(self) -> float:
        """Samples handed out per second between the first and the last batch asked for."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def wait_fraction(self) -> float:
        """The share of time that the training loop stood still for data, from 0 to 1."""
        return min(1.0, self.wait_seconds / self.seconds) if self.seconds else 0.0

    @property
    def verdict(self) -> str:
        """Which stage is the limit, with the figure and what to change."""
        if not self.batches:
            return "no batch yet"
        share = f"training waited {self.wait_fraction:.0%} of the time"
        if self.wait_fraction < 0.05:
            return f"consumer-bound: {share}; the loader keeps up"
        stages = {
            "network": self.fetch_wait_seconds,
            "decode": self.decode_wait_seconds,
            "transform": self.transform_wait_seconds,
        }
        stage = max(stages, key=lambda name: stages[name])
        rate = self.bytes_fetched / self.seconds / 1e6 if self.seconds else 0.0
        size = self.bytes_fetched / max(1, self.requests)
        change = "more memory= keeps more of them in flight"
        if size < SMALL_REQUEST:
            change = "they are small: a larger shuffle=Shuffle(block=) makes fewer and longer ones"
        advice = {
            "network": f"{rate:.1f} MB/s in {self.requests} requests of {size / 1e6:.3g} MB; {change}",
            "decode": "give it more cores, the simplejpeg extra, or store smaller images",
            "transform": "set transform_workers=, or move work out of the transform",
        }
        return f"{stage}-bound: {share}; {advice[stage]}"

    def __str__(self) -> str:
        return (
            f"{self.samples} samples in {self.batches} batches, {self.samples_per_second:.0f} samples/s, "
            f"{self.bytes_fetched / 1e6:.1f} MB in {self.requests} requests ({self.retries} retries); {self.verdict}"
        )


class Counters:
    """Thread-safe sums behind `Stats`; the names are those of its fields."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._client = ""
        self._begin: float | None = None
        self._end = 0.0

    def add(self, **amounts: float) -> None:
        """Add to the named sums."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount

    def describe_client(self, client: str) -> None:
        """Say which data plane serves, and why."""
        self._client = client

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the block to the named sum."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{name: time.perf_counter() - begin})

    def delivered(self, samples: int, asked: float) -> None:
        """Count a batch that was asked for at `asked` (`time.perf_counter`) and is handed out now."""
        now = time.perf_counter()
        with self._lock:
            first = self._begin is None
            self._begin = asked if self._begin is None else self._begin
            self._end = now
        self.add(
            batches=1, samples=samples, wait_seconds=now - asked, first_batch_seconds=now - asked if first else 0.0
        )

    def snapshot(self) -> Stats:
        """Return the sums so far."""
        with self._lock:
            known: dict[str, Any] = {
                item.name: round(self._sums[item.name]) if item.type == "int" else self._sums[item.name]
                for item in fields(Stats)
                if item.name in self._sums
            }
            begin = self._begin
        return Stats(**known, seconds=self._end - begin if begin is not None else 0.0, client=self._client)
