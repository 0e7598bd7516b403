"""`streamloader bench`: measures ceilings on the user's dataset, then the loader, and names what limits it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from streamloader.errors import UsageError
from streamloader.format.manifest import Manifest
from streamloader.format.opening import open_root
from streamloader.format.reader import MAX_REQUEST
from streamloader.images.decode import ENCODINGS
from streamloader.measure.ceiling import Advance, Ceiling, Effort, Work, image_ceiling, read_ceiling
from streamloader.options import MIB, Decode
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.stats import BUSY, BatchReport, Stats, quotient
from streamloader.storage import open_store
from streamloader.storage.process import cpu_count


@dataclass(frozen=True)
class BenchOptions:
    """Options of `bench`. Raises `UsageError` for invalid values.

    `batch_size`: 256 by default, or all samples of a smaller dataset. `seconds`: the duration of each stage. `workers`:
    DataLoader workers of the loader stage. `memory`: bytes, as in `StreamingDataset`. `image_size`: (height, width) to
    which encoded images are decoded; None leaves them encoded. `trace`: a file for the `BatchReport` of each batch of
    the loader, a JSON line each; only without workers.
    """

    batch_size: int | None = None
    fields: tuple[str, ...] | None = None
    split: str | None = None
    seconds: float = 10.0
    workers: int = 0
    memory: int | None = None
    image_size: tuple[int, int] | None = (224, 224)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    trace: Path | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.workers < 0:
            problem = f"seconds={self.seconds}, workers={self.workers}"
            raise UsageError(problem, "give seconds above 0, and workers of at least 0")
        if self.fields == ():
            raise UsageError("fields=() leaves nothing to measure", "name a field, or leave fields out")
        if self.trace is not None and self.workers:
            raise UsageError("trace= with workers=, whose batches are made in other processes", "leave one of them out")


@dataclass(frozen=True)
class BenchResult:
    """The ceilings of the dataset at `url`, the loader's rates, and a `verdict`, whose first word is the limit.

    `loader.bytes`: the bytes that were fetched; with workers, an estimate from the number of samples. `stats`: those of
    the loader, None with workers. `ratio`: the share of the lowest ceiling that the loader reached.
    """

    url: str
    num_samples: int
    batch_size: int
    first_batch_seconds: float
    ceilings: tuple[Ceiling, ...]
    loader: Ceiling
    stats: Stats | None
    ratio: float
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, with the rates of each stage."""
        values = asdict(self)
        del values["ceilings"], values["loader"]
        rates = ("samples_per_second", "megabytes_per_second")
        stages = (*self.ceilings, self.loader)
        return values | {"stages": [asdict(stage) | {name: getattr(stage, name) for name in rates} for stage in stages]}


TICK_SECONDS = 0.1


@dataclass(frozen=True)
class BenchProgress:
    """The progress of a bench: the current stage and its rates so far, and the seconds of all stages together."""

    stage: str
    done_seconds: float
    total_seconds: float
    samples_per_second: float
    megabytes_per_second: float


Listener = Callable[[BenchProgress], None]


class Meter:
    """Adds up the samples and bytes of each stage, and reports progress to a listener every `TICK_SECONDS`."""

    def __init__(self, seconds: float, stages: int, listen: Listener | None) -> None:
        self._listen, self._seconds, self._total = listen, seconds, seconds * stages
        self._lock = threading.Lock()
        self._number = -1

    def begin(self, stage: str) -> Advance:
        """Begin the next stage. Returns a function that counts its samples and bytes."""
        self._stage, self._number = stage, self._number + 1
        self._samples = self._bytes = 0
        self._begin, self._reported = time.perf_counter(), 0.0
        self._advance(0, 0)
        return self._advance

    def _advance(self, samples: int, size: int) -> None:
        with self._lock:
            self._samples, self._bytes, now = self._samples + samples, self._bytes + size, time.perf_counter()
            if self._listen is None or now - self._reported < TICK_SECONDS:
                return
            self._reported, elapsed = now, now - self._begin
            done = self._number * self._seconds + min(elapsed, self._seconds)
            rates = quotient(self._samples, elapsed), quotient(self._bytes / 1e6, elapsed)
            self._listen(BenchProgress(self._stage, done, self._total, *rates))


# Unpacking chunks is the limit if its rate is below this share of fetching alone and it keeps the cores busy. If the
# cores are not busy, other programs caused the difference.
UNPACKING_SHARE = 0.8
# A loader below this share of its ceiling is itself the limit.
LOADER_SHARE = 0.7


def judge(
    *,
    fetch: Ceiling,
    unpack: Ceiling,
    images: Sequence[Ceiling],
    loader: Ceiling,
    stats: Stats | None,
    cores: int,
    held: bool = False,
) -> tuple[float, str]:
    """Return the share of the lowest ceiling that the loader reached, and a verdict that explains it in a sentence.

    `fetch` and `unpack` are ceilings of the same bytes, `images` of decoding alone. If fetching or unpacking is the
    limit, the ratio is of bytes: samples of the shuffle window that is still being filled were fetched, but not
    delivered. `stats`: those of the loader, if known. `held`: whether every field is held in memory, so that only the
    first epoch fetches.
    """
    if held:
        rate = f"{loader.samples_per_second:,.0f} samples/s"
        return 1.0, f"memory-bound: every field is held in memory after the first epoch; {rate} from there"
    busy = f"{cores} core{'' if cores == 1 else 's'} busy"
    decoding = quotient(1.0, sum(quotient(1.0, image.samples_per_second) for image in images))  # all images of a sample
    slower = unpack.megabytes_per_second < UNPACKING_SHARE * fetch.megabytes_per_second
    if images and decoding < unpack.samples_per_second:
        limit, ratio = "decode", quotient(loader.samples_per_second, decoding)
        reached = f"{ratio:.2f} of what decoding the images alone gives; {busy}"
        remedy = "choose fewer pixels, simplejpeg and OpenCV, or more cores"
    elif slower and unpack.cpu_seconds >= BUSY * cores * unpack.seconds:
        limit, ratio = "decode", quotient(loader.megabytes_per_second, unpack.megabytes_per_second)
        reached = f"{ratio:.2f} of what fetching and unpacking chunks give; {busy}"
        remedy = "choose codec lz4 or none, or more cores"
    else:
        limit, ratio = "network", quotient(loader.megabytes_per_second, fetch.megabytes_per_second)
        in_flight = f"; {stats.requests_in_flight:.3g} requests in flight" if stats is not None else ""
        reached = f"{ratio:.2f} of what this endpoint gives{in_flight}"
        remedy = "a faster endpoint or network, or fewer bytes per sample, gives more"
    if ratio >= LOADER_SHARE:
        return ratio, f"{limit}-bound: {reached}; {remedy}"
    waits = f"; what it waited for: {stats.verdict}" if stats is not None else ""
    return ratio, f"loader-bound: {reached}{waits}"


BATCH_SIZE = 256
# Concurrent requests that are tried for the endpoint's ceiling: enough for a near server, and for a far one.
CONCURRENCIES = (16, 64)
# Limit of the bytes in flight for ceilings without `memory`. The client keeps each body twice.
FLIGHT_BYTES = 1024 * MIB
MANY_PASSES = 10**9  # until the time is over


def bench(url: str, options: BenchOptions | None = None, progress: Listener | None = None) -> BenchResult:
    """Measure the ceilings of the endpoint and this machine, and the loader, on the dataset at `url`.

    Each stage ends with the request or batch that is in progress when its time is over. `progress` is called up to ten
    times a second, from several threads, one at a time. Raises a `StreamloaderError` as `StreamingDataset` does, and
    `UsageError` for a dataset without samples.
    """
    options = options or BenchOptions()
    manifest, store, _ = open_root(open_store(url, options.storage_options), options.split)
    if not manifest.num_samples:
        raise UsageError(f"{store.url} has no samples", "give a dataset with samples")
    batch_size = options.batch_size or min(BATCH_SIZE, manifest.num_samples)
    images = _image_fields(manifest, options)
    with ExitStack() as stack:
        counter = _BatchCounter(stack.enter_context(_open_trace(options.trace)) if options.trace else None)
        with closing(_open_dataset(url, options, batch_size, images, None)) as dataset:
            next(iter(dataset))  # raises errors of the arguments before anything is measured
        concurrencies = _choose_concurrencies(manifest, options)
        meter = Meter(options.seconds, len(concurrencies) + 2 + len(images), progress)
        *fetches, unpack = _measure_reading(url, options, concurrencies, meter)
        decoded = [_measure_decoding(url, options, name, meter) for name in images]
        dataset = stack.enter_context(closing(_open_dataset(url, options, batch_size, images, counter)))
        loader, stats, first = _measure_loader(dataset, counter, options, meter)
    fetch = max(fetches, key=lambda ceiling: ceiling.megabytes_per_second)
    held = all(manifest.fields[name].resident for name in options.fields or manifest.fields)
    if stats is None:  # the bytes of the worker processes are not known: estimate them from the samples
        loader = replace(loader, bytes=round(loader.samples * quotient(unpack.bytes, unpack.samples)))
    ratio, verdict = judge(
        fetch=fetch, unpack=unpack, images=decoded, loader=loader, stats=stats, cores=cpu_count(), held=held
    )
    ceilings = (*fetches, unpack, *decoded)
    return BenchResult(store.url, manifest.num_samples, batch_size, first, ceilings, loader, stats, ratio, verdict)


def _open_dataset(
    url: str, options: BenchOptions, batch_size: int, images: list[str], counter: _BatchCounter | None
) -> StreamingDataset:
    return StreamingDataset(
        url,
        batch_size=batch_size,
        fields=options.fields,
        split=options.split,
        remainder="uneven",  # padded rows would count as samples
        decode=dict.fromkeys(images, Decode(size=options.image_size, with_crop=True)),
        with_index=bool(options.workers),  # only then, since a field may have that name
        world=(0, 1),
        memory=options.memory,
        on_batch=None if options.workers else counter,
        storage_options=options.storage_options,
    )


def _open_trace(trace: Path) -> TextIO:
    try:
        return trace.open("w")
    except OSError as error:
        raise UsageError(f"{trace} cannot be written ({error.strerror})", "name a writable file") from error


def _image_fields(manifest: Manifest, options: BenchOptions) -> list[str]:
    if options.image_size is None:
        return []
    names = options.fields or manifest.fields
    fields = {name: layout.field for name, layout in manifest.fields.items() if name in names}
    return [name for name, field in fields.items() if field.kind == "bytes" and field.encoding in ENCODINGS]


def _choose_concurrencies(manifest: Manifest, options: BenchOptions) -> list[int]:
    """Return the numbers of concurrent requests to try, limited so that their bodies fit in memory."""
    layouts = [manifest.fields[name] for name in options.fields or manifest.fields]
    stored = sum(layout.stored for layout in layouts if not layout.resident)
    request = min(MAX_REQUEST, max(1, stored * manifest.order.block // manifest.num_samples))
    limit = max(1, (options.memory or FLIGHT_BYTES) // (3 * request))  # two copies of a body, and its decoded bytes
    return sorted({min(concurrency, limit) for concurrency in CONCURRENCIES})


def _measure_reading(url: str, options: BenchOptions, concurrencies: list[int], meter: Meter) -> list[Ceiling]:
    """Return the ceiling of fetching at each concurrency, then that of fetching and unpacking at the fastest one."""

    def measure(work: Work, name: str, in_flight: int) -> Ceiling:
        effort = Effort(in_flight, options.seconds, MANY_PASSES, meter.begin(name))
        ceiling = read_ceiling(url, options.storage_options, options.fields, work, effort, split=options.split)
        return replace(ceiling, name=name)

    fetches = {count: measure("fetch", f"fetch, {count} at once", count) for count in concurrencies}
    best = max(fetches, key=lambda count: fetches[count].megabytes_per_second)
    return [*fetches.values(), measure("decode", f"fetch and unpack, {best} at once", best)]


def _measure_decoding(url: str, options: BenchOptions, name: str, meter: Meter) -> Ceiling:
    """Return the ceiling of decoding one field of images from memory."""
    decode, storage_options = Decode(size=options.image_size), options.storage_options
    advance = meter.begin(f"decode {name}")
    ceiling = image_ceiling(url, storage_options, name, decode, options.seconds, split=options.split, advance=advance)
    return replace(ceiling, name=f"decode {name} from memory")


def _measure_loader(
    dataset: StreamingDataset, counter: _BatchCounter, options: BenchOptions, meter: Meter
) -> tuple[Ceiling, Stats | None, float]:
    """Return the loader's rates, its stats (None with workers), and the seconds to the first batch.

    Time counts from the start of the pass, since bytes that are fetched before the first batch count too. With workers,
    whose processes take seconds to start, it counts from the first batch, and their bytes are not known.
    """
    advance = meter.begin("loader")
    cpu, begin = time.process_time(), time.perf_counter()
    first, samples = 0.0, 0
    batches = _batches(dataset, options.workers)
    for batch in batches:
        now = time.perf_counter()
        if not first:
            first = now - begin
            if options.workers:
                begin = now
                continue
        count = len(batch["index"]) if options.workers else counter.samples - samples
        samples += count
        advance(count, 0)
        if now - begin >= options.seconds:
            break
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    stats = dataset.stats()
    batches.close()
    if options.workers:
        return Ceiling("loader", samples, 0, seconds, 0, 0.0), None, first
    return Ceiling("loader", stats.samples, stats.bytes_fetched, seconds, stats.requests, cpu), stats, first


def _batches(dataset: StreamingDataset, workers: int) -> Generator[dict[str, Any]]:
    """Yield batches, epoch after epoch."""
    loader: Iterable[dict[str, Any]] = dataset
    if workers:
        from torch.utils.data import DataLoader

        context: dict[str, Any] = {"multiprocessing_context": "forkserver", "persistent_workers": True}
        loader = DataLoader(dataset, batch_size=None, num_workers=workers, **context)
    while True:
        yield from loader


class _BatchCounter:
    """Counts the samples of the batches, and writes each report to a file, if there is one, as a JSON line."""

    def __init__(self, file: TextIO | None) -> None:
        self.samples, self._file = 0, file

    def __call__(self, report: BatchReport) -> None:
        self.samples += report.samples
        if self._file is not None:
            self._file.write(json.dumps(asdict(report)) + "\n")
