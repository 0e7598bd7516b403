"""Counters of the loader: every stage adds to one `Counters`; `Stats` is a snapshot of it, with a verdict in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

from streamloader.errors import UsageError

# Bytes. A cloud store needs as long for the first byte as for a further MiB: shorter requests mostly wait.
SMALL_REQUEST = 1 << 20
# If training waits for less than this share of the time, a faster loader makes no difference.
KEEPS_UP = 0.05
# A stage that is busy for this share of the time is the limit: its threads also wait for each other and for the GIL.
BUSY = 0.6
# More retries per request than this mean that the store throttles or fails, whatever else is slow.
MANY_RETRIES = 0.05
# Cores that threads of one process do not keep busy.
MANY_CORES = 4
# Bytes. Copying a larger sample takes longer than finding it.
SMALL_SAMPLE = 4096
# Fields that hold the value at the time of the snapshot; all others are sums.
_CURRENT = {
    *("in_flight", "cores", "transformers", "workers", "workers_reason", "client", "chunks", "waiting_for"),
    *("rank", "world_size", "worker", "url", "epoch", "step", "ready_batches", "ready_batches_limit"),
    *("ready_blocks", "ready_blocks_limit", "memory_bytes", "memory_limit"),
}


@dataclass(frozen=True)
class BatchReport:
    """The argument of `on_batch`, which is called in the consuming thread just before a batch is returned.

    `step` counts this consumer's batches from the start of epoch 0, and continues after a resume; with `max_tokens=`,
    where epochs have different numbers of them, from the start of its epoch. `wait_seconds` is how
    long the training loop waited for this batch, and `seconds` the wall time since the previous batch was returned, or
    since the pass began. `worker` is the number of the DataLoader worker, 0 without workers. With `batch_size=None`
    one report covers up to 64 samples, which are made together, and comes with the first of them.
    """

    epoch: int
    step: int
    samples: int
    wait_seconds: float
    seconds: float
    worker: int = 0

    @property
    def wait_fraction(self) -> float:
        """The share of this step for which the training loop waited for data, from 0 to 1."""
        return min(1.0, quotient(self.wait_seconds, self.seconds))

    @property
    def samples_per_second(self) -> float:
        """The samples of the batch per second of this step."""
        return quotient(self.samples, self.seconds)


@dataclass(frozen=True)
class Stats:
    """Statistics of one rank's loader since it was created. Seconds are wall time, and bytes are as stored.

    `seconds` runs from the request for the first batch to the return of the last. `wait_seconds`: the training loop
    waited for a batch; `first_batch_seconds` of them for the first. `fetch_wait_seconds`, `decode_wait_seconds` and
    `transform_wait_seconds`: the loader itself waited for these stages; they overlap with training. `gather_seconds`:
    the thread that gathers batches was busy, or waited for their plan. `full_seconds`: the loader was ahead: as many
    batches as it makes ahead were finished, and it waited for the training loop.

    `samples` includes padded rows (`remainder="pad"`). `bytes_fetched` includes blocks of the next epoch, which are
    loaded ahead from the second epoch on. With `batch_size=None` each sample counts as a batch.

    `request_seconds` (requests in flight) and `transform_seconds` (your transform) are sums over all threads.
    `unpack_seconds` (checking and decompressing chunks), `decode_seconds` (decoding images) and `cpu_seconds` (this
    whole process, since the first batch) are CPU time. `hedges` counts second requests for a slow first one.
    `requests` counts these, retries, and what a client sends again because the response begins late. `cache_hits`, of
    `cache_bytes` in all, were read from the cache on local disk instead (`cache=`), and are no requests.

    Of arrays: `chunks` is the number of chunks that the samples of an epoch are in, at all ranks, and `chunks_read` how
    many were read, those that several blocks need for each of them unless they are kept in memory. `missing_chunks` of
    them do not exist, and their elements have the fill value.

    `device_wait_seconds`: with `device=`, the device had nothing to do until a batch was there. It is measured on the
    device, of the batches that it has reached.

    With `Decode(device=)`, `decoded_on_cpu` counts the images that the CPU decoded, since the device cannot.

    `bad_samples` were masked or replaced (`on_error=`). Padded fields have `elements` in all (`collate="pad"`), of
    which `padding_elements` are padding.

    `in_flight` is the current limit of concurrent requests, `cores` the number of cores that this rank decodes with,
    and `transformers` the number of threads or processes that run the transform. `workers` is the number of worker
    processes, 0 for threads, and `workers_reason` says why; `workers_replaced` of them were killed, and their work was
    repeated. `cpu_seconds` does not include them. `client` names the data plane and why
    it was chosen. `waiting_for` is empty except during an outage of the store, when it names the endpoint, how long the
    loader has waited for it, and the last error; and while the store asks for a long wait (Retry-After).

    `rank` of `world_size` ranks, and `worker` of those of a DataLoader, has read `url`, up to `step` of `epoch`, the
    numbers that `BatchReport` has, -1 before the first batch. `ready_batches` are finished and wait for training, of
    `ready_batches_limit` that may; `ready_blocks` are loaded, and no batch has needed them yet, of
    `ready_blocks_limit`, the blocks that fit. If both are near 0, this rank holds up the others. `memory_bytes` of
    blocks and batches are allocated, those of other datasets of the process included, and `memory_limit` is the most
    that this loader may use.
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
    workers: int = 0
    workers_replaced: int = 0
    bytes_fetched: int = 0
    cache_hits: int = 0
    cache_bytes: int = 0
    bytes_decoded: int = 0
    chunks: int = 0
    chunks_read: int = 0
    missing_chunks: int = 0
    bad_samples: int = 0
    decoded_on_cpu: int = 0
    elements: int = 0
    padding_elements: int = 0
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
    device_wait_seconds: float = 0.0
    cpu_seconds: float = 0.0
    workers_reason: str = ""
    client: str = ""
    waiting_for: str = ""
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    url: str = ""
    epoch: int = -1
    step: int = -1
    ready_batches: int = 0
    ready_batches_limit: int = 0
    ready_blocks: int = 0
    ready_blocks_limit: int = 0
    memory_bytes: int = 0
    memory_limit: int = 0

    def since(self, earlier: Stats) -> Stats:
        """Return the statistics of the interval since `earlier`, a snapshot of the same dataset.

        Raises `UsageError` if `earlier` is later than this snapshot.
        """
        if earlier.batches > self.batches or earlier.seconds > self.seconds:
            before, now = (f"{stats.batches} batches in {stats.seconds:.1f} s" for stats in (earlier, self))
            problem = f"since() got stats of {before}, these are of {now}"
            raise UsageError(problem, "take both from the same dataset: later.since(earlier)")
        sums = (item.name for item in fields(self) if item.name not in _CURRENT)
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in sums})

    @property
    def samples_per_second(self) -> float:
        """Samples returned per second, from the request for the first batch to the return of the last."""
        return quotient(self.samples, self.seconds)

    @property
    def active_seconds(self) -> float:
        """Seconds in which the loader was not ahead: the denominator of its rates, at least `wait_seconds`."""
        return max(self.seconds - self.full_seconds, self.wait_seconds)

    @property
    def megabytes_per_second(self) -> float:
        """Megabytes (10^6 bytes) fetched per second while the loader was not ahead of the training loop."""
        return quotient(self.bytes_fetched / 1e6, self.active_seconds)

    @property
    def wait_fraction(self) -> float:
        """The share of the time after the first batch for which the training loop waited for data, from 0 to 1."""
        first = self.first_batch_seconds if self.first_batch_seconds < self.seconds else 0.0  # a single batch counts
        return min(1.0, quotient(self.wait_seconds - first, self.seconds - first))

    @property
    def padding_share(self) -> float:
        """The share of padding among the elements of padded fields, from 0 to 1."""
        return quotient(self.padding_elements, self.elements)

    @property
    def process_share(self) -> float:
        """The share of a core that this process took since the first batch, its workers not included; 2.0 for two."""
        return quotient(self.cpu_seconds, self.seconds - self.first_batch_seconds)

    @property
    def requests_in_flight(self) -> float:
        """The mean number of concurrent requests while the loader was not ahead."""
        return quotient(self.request_seconds, self.active_seconds)

    @property
    def decode_busy(self) -> float:
        """The share of the cores' time spent on unpacking chunks and decoding images while the loader was not ahead."""
        return quotient(self.unpack_seconds + self.decode_seconds, self.cores * self.active_seconds)

    @property
    def transform_busy(self) -> float:
        """The share of time that the transform's threads or processes were busy while the loader was not ahead."""
        return quotient(self.transform_seconds, self.transformers * self.active_seconds)

    @property
    def limit(self) -> str:
        """The limiting stage: "network", "gather", "decode", "transform" or "consumer"; "" before the first batch.

        It is the stage that is busy nearly all the time, or, if none is, the one that batches waited for.
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
        """The limiting stage, how long training waited, and what to change, as text."""
        limit = self.limit
        if not limit:
            return "no batch yet"
        reason = getattr(self, f"_{limit}")()
        device = self.device_wait_seconds and f" and the device {quotient(self.device_wait_seconds, self.seconds):.1%}"
        return f"{limit}-bound: training waited {self.wait_fraction:.0%}{device or ''} of the time; {reason}"

    def __str__(self) -> str:
        return (
            f"{self.samples} samples in {self.batches} batches, {self.samples_per_second:.0f} samples/s, "
            f"{self.bytes_fetched / 1e6:.1f} MB in {self.requests} requests ({self.retries} retries); "
            f"{self._cached()}"
            f"{_count(self.bad_samples, 'bad sample') + '; ' if self.bad_samples else ''}"
            f"{self.waiting_for or self.verdict}"
        )

    def _cached(self) -> str:
        share = quotient(self.cache_hits, self.cache_hits + self.requests)
        return f"{self.cache_bytes / 1e6:.1f} MB from the cache ({share:.0%} hits); " if self.cache_hits else ""

    def _network(self) -> str:
        if self.cache_hits <= self.requests:
            return self._requests()
        disk = quotient(self.cache_bytes / 1e6, self.active_seconds)
        return f"{disk:.4g} MB/s from the cache, with {self.requests} requests beside it; a faster disk may help"

    def _requests(self) -> str:
        size = self.bytes_fetched / max(1, self.requests)
        flight = self.requests_in_flight
        mean_size = f"{size / 1e6:.3g} MB" if size >= 1e6 else f"{size / 1e3:.3g} kB"
        rate = f"{self.megabytes_per_second:.4g} MB/s in {flight:.3g} requests in flight of {mean_size}"
        if self.retries > MANY_RETRIES * self.requests:
            return f"{rate}; {self.retries} retries in {self.requests} requests: the store throttles or fails"
        if size < SMALL_REQUEST:
            return f"{rate}; they are small: a larger shuffle=Shuffle(block=) makes fewer and longer ones"
        if self.client.startswith("fsspec"):
            return f"{rate}; they go through fsspec, the slowest client; stats().client says why"
        if self.cpu_seconds > 0.85 * self.cores * (self.seconds - self.first_batch_seconds):
            return f"{rate}; the process keeps its {_count(self.cores, 'core')} busy: give it more"
        if flight < self.in_flight / 2:
            return f"{rate}; {self.in_flight} are allowed: more memory= lets the loader fetch more blocks ahead"
        return f"{rate}; `streamloader bench` shows whether the endpoint is faster"

    def _gather(self) -> str:
        busy = quotient(self.gather_seconds, self.active_seconds)
        size = max(self.bytes_decoded, self.bytes_fetched) / max(1, self.samples)
        small = size < SMALL_SAMPLE
        rate = self.samples_per_second
        throughput = f"{rate:.3g} samples/s" if small else f"{size * rate / 1e6:.4g} MB/s"
        change = "store several of these small samples as one" if small else "read fewer or smaller fields"
        if not self.workers and self.cores >= MANY_CORES:
            return (
                f"one process gathers {throughput}, {busy:.0%} busy; give it more workers: num_workers={self.cores - 1}"
            )
        if self.workers and self.process_share > BUSY:
            workers = _count(self.workers, "worker")
            busy_process = f"this process takes {self.process_share:.0%} of a core to direct {workers}"
            return f"{throughput}; {busy_process}: give it fewer workers, train with more ranks, or {change}"
        return f"one thread gathers {throughput}, {busy:.0%} busy; train with more ranks, or {change}"

    def _decode(self) -> str:
        unpack = quotient(self.unpack_seconds, self.unpack_seconds + self.decode_seconds)
        cores = f"{_count(self.cores, 'core')} {min(1.0, self.decode_busy):.0%} busy"
        if self.unpack_seconds >= self.decode_seconds:
            return f"{cores}, {unpack:.0%} of it unpacking chunks; convert with codec lz4 or none, or give more cores"
        if self.decode_busy < BUSY / 2:
            return f"{cores}: training or other processes probably use them; give the loader cores of its own"
        return f"{cores}, {1 - unpack:.0%} of it decoding images; {faster_decoding()}"

    def _transform(self) -> str:
        busy = f"{_count(self.transformers, 'transformer')} {min(1.0, self.transform_busy):.0%} busy"
        if self.transformers == 1 < self.workers:
            return f"{busy}; other processes cannot load it: define it in a module, a .py file, that you import"
        return f"{busy}; increase num_workers=, or move work out of the transform"

    def _consumer(self) -> str:
        ahead = min(1.0, quotient(self.full_seconds, self.seconds))
        return f"the loader keeps up and was ahead {ahead:.0%} of the time"


def quotient(part: float, total: float) -> float:
    """Return `part` / `total`, or 0 if `total` is 0 or less."""
    return part / total if total > 0 else 0.0


def faster_decoding() -> str:
    """Return what makes the decoding of images faster, with the decoders that are not installed."""
    packages = {"simplejpeg": "simplejpeg", "cv2": "opencv-python-headless"}
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    install = f", pip install {' '.join(missing)}," if missing else ""
    return f"choose fewer pixels (Decode(size=)){install} or more cores"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


class Counters:
    """Thread-safe sums behind `Stats`, named like its fields."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self.workers_reason = ""
        self.client = ""  # the data plane, and why it was chosen
        self.outages: Callable[[], Iterable[str]] = tuple  # a text for each store, empty without an outage
        self._begin = self._end = self._cpu_begin = self._cpu_end = 0.0

    def add(self, **amounts: float) -> None:
        """Add to the named sums."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount

    def note(self, **values: float) -> None:
        """Set fields that hold a current value, such as `in_flight`."""
        with self._lock:
            self._sums.update(values)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the wall time of the `with` block to the named sum."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{name: time.perf_counter() - begin})

    def delivered(self, samples: int, batches: int, requested: float) -> None:
        """Count batches, small ones together, that were requested at `requested` (`time.perf_counter`)."""
        now, cpu = time.perf_counter(), time.process_time()
        with self._lock:
            if first := not self._end:
                self._begin, self._cpu_begin = requested, cpu
            self._end, self._cpu_end = now, cpu
        waited = now - requested
        self.add(batches=batches, samples=samples, wait_seconds=waited, first_batch_seconds=waited if first else 0.0)

    def failed(self, requested: float) -> None:
        """Count the time that a batch was waited for which did not come, unless it is the first one."""
        now, cpu = time.perf_counter(), time.process_time()
        with self._lock:
            if not self._end:
                return
            self._end, self._cpu_end = now, cpu
        self.add(wait_seconds=now - requested)

    def snapshot(self, **current: Any) -> Stats:
        """Return the sums so far, with the `current` values of other fields."""
        with self._lock:
            values: dict[str, Any] = dict(self._sums)
            values |= {"seconds": self._end - self._begin, "cpu_seconds": self._cpu_end - self._cpu_begin}
        values |= {"workers_reason": self.workers_reason, "client": self.client, **current}
        return Stats(**values, waiting_for="; ".join(filter(None, self.outages())))
