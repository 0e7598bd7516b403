"""`bench`: ceilings of the user's own dataset, then the loader on it, then what limits it, in words."""

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
from streamloader.measure.ceiling import Ceiling, Effort, Work, image_ceiling, read_ceiling
from streamloader.options import MIB, Decode
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.stats import BUSY, BatchReport, Stats, quotient
from streamloader.storage import open_store
from streamloader.storage.process import cpu_count


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and for how long: `seconds` per stage.

    `batch_size`: 256 by default, or all samples of a smaller dataset. `workers`: DataLoader workers of the loader
    stage. `memory`: as `StreamingDataset` takes it. `image_size`: (height, width) that encoded images are decoded
    to; None leaves them encoded. `trace`: a file that gets one JSON line for each batch of the loader, its
    `BatchReport`; without workers only.
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
            given = f"seconds={self.seconds}, workers={self.workers}"
            raise UsageError(given, "give seconds above 0, and workers of at least 0")
        if self.fields == ():
            raise UsageError("fields=() leaves nothing to measure", "name a field, or leave fields out")
        if self.trace is not None and self.workers:
            raise UsageError("trace= with workers=, which are other processes", "leave one of them out")


@dataclass(frozen=True)
class BenchResult:
    """What was measured of `url`: ceilings, the loader, and the `verdict`, whose first word is the limit.

    `loader.bytes` are those fetched; with workers, what the samples take. `stats` are the loader's; None with workers.
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
        """Return the result as JSON-able values, rates included."""
        found = asdict(self)
        del found["ceilings"], found["loader"]
        rates = ("samples_per_second", "megabytes_per_second")
        rows = (*self.ceilings, self.loader)
        return found | {"stages": [asdict(row) | {name: getattr(row, name) for name in rates} for row in rows]}


TICK_SECONDS = 0.1


@dataclass(frozen=True)
class BenchProgress:
    """How far a bench is: the stage, seconds of all stages together, and the rates of this stage so far."""

    stage: str
    done_seconds: float
    total_seconds: float
    samples_per_second: float
    megabytes_per_second: float


Listener = Callable[[BenchProgress], None]


class Meter:
    """Adds up what the stages report, and passes it on to the listener now and then."""

    def __init__(self, seconds: float, stages: int, listen: Listener | None) -> None:
        self._listen, self._seconds, self._total = listen, seconds, seconds * stages
        self._lock = threading.Lock()
        self._stage, self._number = "", -1
        self._begin = self._reported = 0.0
        self._samples = self._bytes = 0

    def begin(self, stage: str) -> Callable[[int, int], None]:
        """Begin the next stage; return what takes its samples and bytes."""
        self._stage, self._number = stage, self._number + 1
        self._samples = self._bytes = 0
        self._begin, self._reported = time.perf_counter(), 0.0
        self.advance(0, 0)
        return self.advance

    def advance(self, samples: int, size: int) -> None:
        """Count, and report it unless a report was just before."""
        with self._lock:
            self._samples, self._bytes, now = self._samples + samples, self._bytes + size, time.perf_counter()
            if self._listen is None or now - self._reported < TICK_SECONDS:
                return
            self._reported, elapsed = now, now - self._begin
            done = self._number * self._seconds + min(elapsed, self._seconds)
            rates = quotient(self._samples, elapsed), quotient(self._bytes / 1e6, elapsed)
            self._listen(BenchProgress(self._stage, done, self._total, *rates))


# Unpacking chunks is the limit where it takes the ceiling below this share of fetching alone and keeps the cores busy:
# else other programs took the difference.
UNPACKING_COSTS = 0.8
# A loader below this share of its ceiling is itself the limit.
NEAR = 0.7


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
    """Return the share of the lowest ceiling that the loader reached, and one sentence: the limit, how far, what helps.

    Of bytes, where they are the limit: samples of the shuffle window that is still being filled were fetched, but
    not handed out. `fetch` and `unpack` are ceilings of the same bytes, `images` of decoding alone. `held`: every field
    is held in memory, so that only the first epoch fetched. `stats` are the loader's, if known.
    """
    if held:
        rate = f"{loader.samples_per_second:,.0f} samples/s"
        return 1.0, f"memory-bound: every field is held in memory after the first epoch; {rate} from there"
    busy = f"{cores} core{'' if cores == 1 else 's'} busy"
    decoding = quotient(1.0, sum(quotient(1.0, image.samples_per_second) for image in images))  # all images of a sample
    slower = unpack.megabytes_per_second < UNPACKING_COSTS * fetch.megabytes_per_second
    if images and decoding < unpack.samples_per_second:
        limit, ratio = "decode", quotient(loader.samples_per_second, decoding)
        reached = f"{ratio:.2f} of what decoding the images alone gives; {busy}"
        change = "choose fewer pixels, simplejpeg and OpenCV, or more cores"
    elif slower and unpack.cpu_seconds >= BUSY * cores * unpack.seconds:
        limit, ratio = "decode", quotient(loader.megabytes_per_second, unpack.megabytes_per_second)
        reached = f"{ratio:.2f} of what fetching and unpacking chunks give; {busy}"
        change = "choose codec lz4 or none, or more cores"
    else:
        limit, ratio = "network", quotient(loader.megabytes_per_second, fetch.megabytes_per_second)
        flight = f"; {stats.requests_in_flight:.3g} requests in flight" if stats is not None else ""
        reached = f"{ratio:.2f} of what this endpoint gives{flight}"
        change = "a faster endpoint or network, or fewer bytes per sample, gives more"
    if ratio >= NEAR:
        return ratio, f"{limit}-bound: {reached}; {change}"
    inside = f"; what it waited for: {stats.verdict}" if stats is not None else ""
    return ratio, f"loader-bound: {reached}{inside}"


BATCH_SIZE = 256
# Requests at once that are tried for the endpoint's ceiling: enough for a near server, and for a far one.
LEVELS = (16, 64)
# What the ceilings may hold in flight unless `memory` says otherwise; the client keeps each body twice.
FLIGHT_BYTES = 1024 * MIB
FOREVER = 10**9


def bench(url: str, options: BenchOptions | None = None, progress: Listener | None = None) -> BenchResult:
    """Measure what the endpoint and this machine give, and what the loader makes of it.

    A stage ends with the request or batch that is under way when its time is over. `progress` is called a few times
    a second, from several threads, one at a time. Raises a `StreamloaderError` as `StreamingDataset` does, and
    `UsageError` for a dataset without samples.
    """
    options = options or BenchOptions()
    manifest, store, _ = open_root(open_store(url, options.storage_options), options.split)
    if not manifest.num_samples:
        raise UsageError(f"{store.url} has no samples", "give a dataset that has some")
    batch_size = options.batch_size or min(BATCH_SIZE, manifest.num_samples)
    images = _image_fields(manifest, options)
    with ExitStack() as ends:
        counter = _BatchCounter(ends.enter_context(_opened(options.trace)) if options.trace else None)
        with closing(_dataset(url, options, batch_size, images, None)) as tried:
            next(iter(tried))  # before all else: what is wrong with the arguments is raised here
        levels = _levels(manifest, options)
        meter = Meter(options.seconds, len(levels) + 2 + len(images), progress)
        *fetches, unpack = _drained(url, options, levels, meter)
        decoded = [_decoded(url, options, name, meter) for name in images]
        dataset = ends.enter_context(closing(_dataset(url, options, batch_size, images, counter)))
        loader, stats, first = _stream(dataset, counter, options, meter)
    fetch = max(fetches, key=lambda ceiling: ceiling.megabytes_per_second)
    held = all(manifest.fields[name].resident for name in options.fields or manifest.fields)
    if stats is None:  # the bytes of other processes are not known: what the samples take
        loader = replace(loader, bytes=round(loader.samples * quotient(unpack.bytes, unpack.samples)))
    ratio, verdict = judge(
        fetch=fetch, unpack=unpack, images=decoded, loader=loader, stats=stats, cores=cpu_count(), held=held
    )
    ceilings = (*fetches, unpack, *decoded)
    return BenchResult(store.url, manifest.num_samples, batch_size, first, ceilings, loader, stats, ratio, verdict)


def _dataset(
    url: str, options: BenchOptions, batch_size: int, images: list[str], counter: _BatchCounter | None
) -> StreamingDataset:
    return StreamingDataset(
        url,
        batch_size=batch_size,
        fields=options.fields,
        split=options.split,
        remainder="uneven",  # no rows that fill up a batch: samples are counted
        decode=dict.fromkeys(images, Decode(size=options.image_size)),
        with_index=bool(options.workers),  # else a field may have that name
        world=(0, 1),
        memory=options.memory,
        on_batch=None if options.workers else counter,
        storage_options=options.storage_options,
    )


def _opened(trace: Path) -> TextIO:
    try:
        return trace.open("w")
    except OSError as error:
        raise UsageError(f"{trace} cannot be written ({error.strerror})", "name a file that can") from error


def _image_fields(manifest: Manifest, options: BenchOptions) -> list[str]:
    if options.image_size is None:
        return []
    names = manifest.fields if options.fields is None else options.fields
    found = {name: layout.field for name, layout in manifest.fields.items() if name in names}
    return [name for name, field in found.items() if field.kind == "bytes" and field.encoding in ENCODINGS]


def _levels(manifest: Manifest, options: BenchOptions) -> list[int]:
    """How many requests at once to try: not more than fit in memory, the client's copies included."""
    names = options.fields or list(manifest.fields)
    stored = sum(layout.stored for name, layout in manifest.fields.items() if name in names and not layout.resident)
    request = min(MAX_REQUEST, max(1, stored * manifest.order.block // manifest.num_samples))
    fitting = max(1, (options.memory or FLIGHT_BYTES) // (3 * request))  # two bodies, and what they decode to
    return sorted({min(level, fitting) for level in LEVELS})


def _drained(url: str, options: BenchOptions, levels: list[int], meter: Meter) -> list[Ceiling]:
    """Return the ceiling of fetching at each level, and that of decoding too, at the best of them."""

    def drain(work: Work, name: str, in_flight: int) -> Ceiling:
        effort = Effort(in_flight, options.seconds, FOREVER, meter.begin(name))
        measured = read_ceiling(url, options.storage_options, options.fields, work, effort, split=options.split)
        return replace(measured, name=name)

    fetches = [drain("fetch", f"fetch, {level} at once", level) for level in levels]
    best = max(zip(fetches, levels, strict=True), key=lambda pair: pair[0].megabytes_per_second)[1]
    return [*fetches, drain("decode", f"fetch and unpack, {best} at once", best)]


def _decoded(url: str, options: BenchOptions, name: str, meter: Meter) -> Ceiling:
    """Return the ceiling of decoding one field of images from memory."""
    decode, access = Decode(size=options.image_size), options.storage_options
    advance = meter.begin(f"decode {name}")
    found = image_ceiling(url, access, name, decode, options.seconds, split=options.split, advance=advance)
    return replace(found, name=f"decode {name} from memory")


def _stream(
    dataset: StreamingDataset, counter: _BatchCounter, options: BenchOptions, meter: Meter
) -> tuple[Ceiling, Stats | None, float]:
    """Stream for so long; return that, its stats where they are known, and the seconds to the first batch.

    From the start of the pass, since what is fetched before the first batch counts too. With workers, whose
    processes take seconds to start, from the first batch; their bytes are not known here.
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
    source: Iterable[dict[str, Any]] = dataset
    if workers:
        from torch.utils.data import DataLoader

        kept: dict[str, Any] = {"multiprocessing_context": "forkserver", "persistent_workers": True}
        source = DataLoader(dataset, batch_size=None, num_workers=workers, **kept)
    while True:
        yield from source


class _BatchCounter:
    """Counts the samples of the batches, and writes a line about each where there is a file."""

    def __init__(self, file: TextIO | None) -> None:
        self.samples, self._file = 0, file

    def __call__(self, report: BatchReport) -> None:
        self.samples += report.samples
        if self._file is not None:
            self._file.write(json.dumps(asdict(report)) + "\n")
