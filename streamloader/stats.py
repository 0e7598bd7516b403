"""Counting: every stage adds to one `Counters`; `Stats` is a frozen snapshot with a verdict in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from streamloader.errors import UsageError

# Bytes: a cloud store's first byte takes as long as a MiB of the rest, so that shorter requests mostly wait.
SMALL_REQUEST = 1 << 20
# Below this share of waiting, a faster loader would not be noticed.
KEEPS_UP = 0.05
# A stage that works this share of its time is the limit: its threads also wait for each other and for the GIL.
BUSY = 0.6
# Retries in this share of the requests mean that the store throttles or fails, whatever else is slow.
MANY_RETRIES = 0.05
# Bytes: a larger sample takes longer to copy than to find.
SMALL_SAMPLE = 4096
# What is so at the time of a snapshot, and no sum.
_PRESENT = frozenset(["in_flight", "cores", "transformers"])


@dataclass(frozen=True)
class BatchReport:
    """The argument of `on_batch`, which is called in the consuming thread just before a batch is returned.

    `step` counts this consumer's batches from the start of epoch 0, and continues after a resume. `wait_seconds`: the
    training loop waited for this batch; `seconds`: wall time since the one before was handed out, or since the pass
    began. `worker` is the DataLoader worker's number, 0 without workers. With `batch_size=None` a report is about
    the up to 64 samples that are made at once, and comes with the first of them.
    """

    epoch: int
    step: int
    samples: int
    wait_seconds: float
    seconds: float
    worker: int = 0

    @property
    def wait_fraction(self) -> float:
        """The share of this step that the training loop stood still for data, from 0 to 1."""
        return min(1.0, self.wait_seconds / self.seconds) if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """The samples of the batch for each second of this step."""
        return self.samples / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Stats:
    """What one rank's loader did since it was made. Seconds are wall time, bytes are as stored.

    `seconds` from the first batch asked for to the last handed out. `wait_seconds`: the training loop waited for a
    batch; `first_batch_seconds` of them for the first. `fetch_wait_seconds`, `decode_wait_seconds` and
    `transform_wait_seconds` are what the loader itself waited for; they overlap with training. `gather_seconds`: the
    thread that gathers batches was at work, or waited for their plan.
    `request_seconds` and `transform_seconds` are summed over all threads: requests in flight, the caller's transform;
    `unpack_seconds` and `decode_seconds` are processor time: checking and unpacking chunks, decoding images.
    `full_seconds`: the loader was
    ahead and waited for the training loop. `cpu_seconds`: of this whole process, since the first batch. `hedges` are
    second requests for a slow first one. `in_flight` is how many requests may be under way at once now, `cores` how
    many this rank decodes with, `transformers` how many threads or processes run the transform. `client` names the
    data plane and why it was chosen. `waiting_for` is empty, or in an outage of the store says which endpoint the
    loader is waiting for, since when, and the last error.
    """

    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    first_batch_seconds: float = 0.0
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    in_flight: int = 0
    cores: int = 1
    transformers: int = 1
    bytes_fetched: int = 0
    bytes_decoded: int = 0
    buffers_allocated: int = 0
    request_seconds: float = 0.0
    unpack_seconds: float = 0.0
    decode_seconds: float = 0.0
    transform_seconds: float = 0.0
    fetch_wait_seconds: float = 0.0
    gather_seconds: float = 0.0
    decode_wait_seconds: float = 0.0
    transform_wait_seconds: float = 0.0
    full_seconds: float = 0.0
    cpu_seconds: float = 0.0
    client: str = ""
    waiting_for: str = ""

    def since(self, earlier: Stats) -> Stats:
        """Return what was done after the snapshot `earlier` of the same dataset: for a line of the last interval.

        Raises `UsageError` where `earlier` is not earlier.
        """
        if earlier.batches > self.batches or earlier.seconds > self.seconds:
            found, here = (f"{one.batches} batches in {one.seconds:.1f} s" for one in (earlier, self))
            problem = f"since() got stats of {found}, these are of {here}"
            raise UsageError(problem, "take both from the same dataset: later.since(earlier)")
        changes: dict[str, Any] = {
            item.name: getattr(self, item.name) - getattr(earlier, item.name)
            for item in fields(self)
            if item.name not in _PRESENT and item.type != "str"
        }
        return replace(self, **changes)

    @property
    def samples_per_second(self) -> float:
        """Samples handed out per second between the first and the last batch asked for."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def megabytes_per_second(self) -> float:
        """10^6 bytes fetched per second, while the loader was not ahead of the training loop."""
        return quotient(self.bytes_fetched / 1e6, self._active)

    @property
    def wait_fraction(self) -> float:
        """The share of time that the training loop stood still for data, from 0 to 1; after the first batch."""
        steady = self.seconds - self.first_batch_seconds
        if steady <= 0:
            return min(1.0, quotient(self.wait_seconds, self.seconds))
        return min(1.0, quotient(self.wait_seconds - self.first_batch_seconds, steady))

    @property
    def requests_in_flight(self) -> float:
        """How many requests were under way at once on average, while the loader was not ahead."""
        return quotient(self.request_seconds, self._active)

    @property
    def decode_busy(self) -> float:
        """The share of the cores' time that went into unpacking chunks and decoding images, while not ahead."""
        return quotient(self.unpack_seconds + self.decode_seconds, self.cores * self._active)

    @property
    def transform_busy(self) -> float:
        """The share of their time that the threads or processes of the transform were in it, while not ahead."""
        return quotient(self.transform_seconds, self.transformers * self._active)

    @property
    def limit(self) -> str:
        """Which stage is the limit: "network", "gather", "decode", "transform", "consumer"; "" before the first batch.

        A stage that is busy nearly all the time; where none is, the one that batches waited for.
        """
        if not self.batches:
            return ""
        if self.wait_fraction < KEEPS_UP:
            return "consumer"
        busy = {"decode": self.decode_busy, "transform": self.transform_busy}
        stage = max(busy, key=lambda name: busy[name])
        late = self.decode_wait_seconds + self.transform_wait_seconds > self.fetch_wait_seconds
        if busy[stage] >= BUSY or late:
            return stage
        return "gather" if self.gather_seconds > self.fetch_wait_seconds else "network"

    @property
    def verdict(self) -> str:
        """Which stage is the limit, by how much, and what to change."""
        limit = self.limit
        if not limit:
            return "no batch yet"
        reason = getattr(self, f"_{limit}")()
        return f"{limit}-bound: training waited {self.wait_fraction:.0%} of the time; {reason}"

    def __str__(self) -> str:
        return (
            f"{self.samples} samples in {self.batches} batches, {self.samples_per_second:.0f} samples/s, "
            f"{self.bytes_fetched / 1e6:.1f} MB in {self.requests} requests ({self.retries} retries); "
            f"{self.waiting_for or self.verdict}"
        )

    @property
    def _active(self) -> float:
        """Seconds in which the loader was not ahead: what it did is measured against these."""
        return max(self.seconds - self.full_seconds, self.wait_seconds)

    def _network(self) -> str:
        size = self.bytes_fetched / max(1, self.requests)
        flight = self.requests_in_flight
        each = f"{size / 1e6:.3g} MB" if size >= 1e6 else f"{size / 1e3:.3g} kB"
        what = f"{self.megabytes_per_second:.4g} MB/s in {flight:.3g} requests in flight of {each}"
        if self.retries > MANY_RETRIES * self.requests:
            return f"{what}; {self.retries} retries in {self.requests} requests: the store throttles or fails"
        if size < SMALL_REQUEST:
            return f"{what}; they are small: a larger shuffle=Shuffle(block=) makes fewer and longer ones"
        if self.client.startswith("fsspec"):
            return f"{what}; they go through fsspec, the slowest client; stats().client says why"
        if self.cpu_seconds > 0.85 * self.cores * (self.seconds - self.first_batch_seconds):
            return f"{what}; the process keeps its {_count(self.cores, 'core')} busy: give it more"
        if flight < self.in_flight / 2:
            return f"{what} where {self.in_flight} are allowed; more memory= lets more blocks wait for their turn"
        return f"{what}; `streamloader bench` tells whether the endpoint gives more"

    def _gather(self) -> str:
        busy = quotient(self.gather_seconds, self._active)
        size = max(self.bytes_decoded, self.bytes_fetched) / max(1, self.samples)
        small = size < SMALL_SAMPLE
        rate = self.samples_per_second
        what = f"{rate:.3g} samples/s" if small else f"{size * rate / 1e6:.4g} MB/s"
        change = "store several of these small samples as one" if small else "ask for fewer or smaller fields"
        return f"one thread gathers {what}, {busy:.0%} busy; train with more ranks, or {change}"

    def _decode(self) -> str:
        work = self.unpack_seconds + self.decode_seconds
        cores = f"{_count(self.cores, 'core')} {min(1.0, self.decode_busy):.0%} busy"
        if self.unpack_seconds >= self.decode_seconds:
            part = quotient(self.unpack_seconds, work)
            return f"{cores}, {part:.0%} of it unpacking chunks; convert with codec lz4 or none, or give more cores"
        part = quotient(self.decode_seconds, work)
        change = "choose fewer pixels (Decode(size=)), simplejpeg and OpenCV, or more cores"
        return f"{cores}, {part:.0%} of it decoding images; {change}"

    def _transform(self) -> str:
        who = f"{_count(self.transformers, 'transformer')} {min(1.0, self.transform_busy):.0%} busy"
        return f"{who}; set transform_workers= higher, or move work out of the transform"

    def _consumer(self) -> str:
        idle = min(1.0, quotient(self.full_seconds, self.seconds))
        return f"the loader keeps up and was ahead {idle:.0%} of the time"


def quotient(part: float, total: float) -> float:
    """Return `part` / `total`, 0 of nothing."""
    return part / total if total > 0 else 0.0


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


class Counters:
    """Thread-safe sums behind `Stats`; the names are those of its fields."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self.client = ""  # which data plane serves, and why
        self.outages: Callable[[], Iterable[str]] = tuple  # of the stores, as text; empty texts stand for none
        self._begin: float | None = None
        self._end = 0.0
        self._cpu_begin = self._cpu_end = 0.0

    def add(self, **amounts: float) -> None:
        """Add to the named sums."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount

    def note(self, **values: float) -> None:
        """Set the named fields: what is so now, such as `in_flight`, not what adds up."""
        with self._lock:
            self._sums.update(values)

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
        now, cpu = time.perf_counter(), time.process_time()
        if self._begin is None:
            self._begin, self._cpu_begin = asked, cpu
            self.add(first_batch_seconds=now - asked)
        self._end, self._cpu_end = now, cpu
        self.add(batches=1, samples=samples, wait_seconds=now - asked)

    def snapshot(self) -> Stats:
        """Return the sums so far."""
        with self._lock:
            known: dict[str, Any] = {
                item.name: round(self._sums[item.name]) if item.type == "int" else self._sums[item.name]
                for item in fields(Stats)
                if item.name in self._sums
            }
        seconds = self._end - self._begin if self._begin is not None else 0.0
        known |= {"client": self.client, "waiting_for": "; ".join(filter(None, self.outages()))}
        return Stats(**known, seconds=seconds, cpu_seconds=self._cpu_end - self._cpu_begin)
