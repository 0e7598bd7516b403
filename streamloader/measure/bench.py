"""`streamloader bench`: measures ceilings on the user's dataset, then the loader, and names what limits it."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, repeat
from typing import Any

from streamloader.errors import UsageError
from streamloader.format.manifest import Manifest
from streamloader.format.opening import open_root
from streamloader.format.reader import MAX_REQUEST
from streamloader.images.decode import ENCODINGS
from streamloader.loader.dataset import NumpyDataset
from streamloader.measure.ceiling import Ceiling, Tally, Watch, image_ceiling, read_ceiling
from streamloader.options import MIB, Decode
from streamloader.stats import BUSY, BatchReport, Stats, faster_decoding, quotient
from streamloader.storage import open_store
from streamloader.storage.process import cpu_count


@dataclass(frozen=True)
class BenchOptions:
    """Options of `bench`. Raises `UsageError` for invalid values.

    `batch_size`: 256 by default, or all samples of a smaller dataset. `seconds`: the duration of each stage. `memory`:
    bytes, as in `StreamingDataset`. `image_size`: (height, width) to which encoded images are decoded; None leaves them
    encoded.
    """

    batch_size: int | None = None
    fields: tuple[str, ...] | None = None
    split: str | None = None
    seconds: float = 10.0
    memory: int | None = None
    image_size: tuple[int, int] | None = (224, 224)
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"seconds={self.seconds}", "give seconds above 0")
        if self.fields == ():
            raise UsageError("fields=() leaves nothing to measure", "name a field, or leave fields out")


@dataclass(frozen=True)
class BenchResult:
    """The ceilings of the dataset at `url`, the loader's rates and `stats`, and a `verdict`.

    `verdict`: its first word is the limit. `ratio`: the share of the lowest ceiling that the loader reached.
    """

    url: str
    num_samples: int
    batch_size: int
    first_batch_seconds: float
    ceilings: tuple[Ceiling, ...]
    loader: Ceiling
    stats: Stats
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
    """Reports the progress of one stage after the other to a listener, at most every `TICK_SECONDS`."""

    def __init__(self, seconds: float, stages: int, listen: Listener | None) -> None:
        self._listen, self._seconds, self._total = listen, seconds, seconds * stages
        self._number = -1

    def begin(self, stage: str) -> Watch:
        """Begin the next stage. Returns the function that watches its tally."""
        self._stage, self._number, self._next = stage, self._number + 1, 0.0
        self._watch(Tally())
        return self._watch

    def _watch(self, tally: Tally) -> None:
        seconds = tally.seconds
        if self._listen is not None and seconds >= self._next:
            self._next = seconds + TICK_SECONDS
            done = self._number * self._seconds + min(seconds, self._seconds)
            rates = quotient(tally.samples, seconds), quotient(tally.bytes / 1e6, seconds)
            self._listen(BenchProgress(self._stage, done, self._total, *rates))


# Unpacking chunks is the limit if its rate is below this share of fetching alone and it keeps the cores busy. If the
# cores are not busy, other programs caused the difference.
UNPACKING_SHARE = 0.8
# A loader below this share of its ceiling is itself the limit.
LOADER_SHARE = 0.7


def judge(
    *, fetch: Ceiling, unpack: Ceiling, images: list[Ceiling], loader: Ceiling, stats: Stats, cores: int, resident: bool
) -> tuple[float, str]:
    """Return the share of the lowest ceiling that the loader reached, and a verdict that explains it in a sentence.

    `fetch` and `unpack` are ceilings of the same bytes, `images` of decoding alone. If fetching or unpacking is the
    limit, the ratio is of bytes: samples of the shuffle window that is still being filled were fetched, but not
    delivered. `stats`: those of the loader. `resident`: whether every field is held in memory, so that only the
    first epoch fetches.
    """
    if resident:
        rate = f"{loader.samples_per_second:,.0f} samples/s"
        return 1.0, f"memory-bound: every field is held in memory after the first epoch; {rate} from there"
    busy = f"{cores} core{'' if cores == 1 else 's'} busy"
    decoding = quotient(1.0, sum(quotient(1.0, image.samples_per_second) for image in images))  # all images of a sample
    slower = unpack.megabytes_per_second < UNPACKING_SHARE * fetch.megabytes_per_second
    if images and decoding < unpack.samples_per_second:
        limit, ratio = "decode", quotient(loader.samples_per_second, decoding)
        reached = f"{ratio:.2f} of what decoding the images alone gives; {busy}"
        remedy = faster_decoding()
    elif slower and unpack.cpu_seconds >= BUSY * cores * unpack.seconds:
        limit, ratio = "decode", quotient(loader.megabytes_per_second, unpack.megabytes_per_second)
        reached = f"{ratio:.2f} of what fetching and unpacking chunks give; {busy}"
        remedy = "choose codec lz4 or none, or more cores"
    else:
        limit, ratio = "network", quotient(loader.megabytes_per_second, fetch.megabytes_per_second)
        in_flight = f"{stats.requests_in_flight:.3g} requests in flight"
        reached = f"{ratio:.2f} of what this endpoint gives; {in_flight}"
        remedy = "a faster endpoint or network, or fewer bytes per sample, gives more"
    if ratio >= LOADER_SHARE:
        return ratio, f"{limit}-bound: {reached}; {remedy}"
    return ratio, f"loader-bound: {reached}; what it waited for: {stats.verdict}"


BATCH_SIZE = 256
# Concurrent requests that are tried for the endpoint's ceiling: enough for a near server, and for a far one.
CONCURRENCIES = (16, 64)
# Limit of the bytes in flight for ceilings without `memory`. The client keeps each body twice.
FLIGHT_BYTES = 1024 * MIB


def bench(url: str, options: BenchOptions | None = None, progress: Listener | None = None) -> BenchResult:
    """Measure the ceilings of the endpoint and this machine, and the loader, on the dataset at `url`.

    Each stage ends with the request or batch that is in progress when its time is over. `progress` is called up to ten
    times a second, from several threads, one at a time. Raises a `StreamloaderError` as `StreamingDataset` does, and
    `UsageError` for a dataset without samples.
    """
    options = options or BenchOptions()
    manifest, store, _ = open_root(open_store(url, options.storage_options), options.split)
    if not manifest.num_remaining:
        raise UsageError(f"{store.url} has no samples", "give a dataset with samples")
    options = replace(options, batch_size=options.batch_size or min(BATCH_SIZE, manifest.num_remaining))
    images = _image_fields(manifest, options)
    with closing(_open_dataset(url, options, images)) as dataset:
        next(iter(dataset))  # raises errors of the arguments before anything is measured
    concurrencies = _choose_concurrencies(manifest, options)
    meter = Meter(options.seconds, len(concurrencies) + 2 + len(images), progress)
    *fetches, unpack = _measure_reading(url, options, concurrencies, meter)
    decoded = [_measure_decoding(url, options, name, meter) for name in images]
    with closing(_open_dataset(url, options, images, lambda batch: tally.add(batch.samples, 0))) as dataset:
        tally = Tally(meter.begin("loader"))
        first = _run_loader(dataset, tally, options.seconds)
        loader, stats = tally.ceiling("loader"), dataset.stats()
    # bytes that are fetched before the first batch count too, and so does the time from the start of the pass
    loader = replace(loader, samples=stats.samples, bytes=stats.bytes_fetched, requests=stats.requests)
    fetch = max(fetches, key=lambda ceiling: ceiling.megabytes_per_second)
    resident = all(manifest.fields[name].resident for name in options.fields or manifest.fields)
    figures: dict[str, Any] = {"fetch": fetch, "unpack": unpack, "images": decoded, "loader": loader}
    ratio, verdict = judge(**figures, stats=stats, cores=cpu_count(), resident=resident)
    ceilings = (*fetches, unpack, *decoded)
    counts = manifest.num_remaining, options.batch_size or 0
    return BenchResult(store.url, *counts, first, ceilings, loader, stats, ratio, verdict)


def _run_loader(dataset: NumpyDataset, tally: Tally, seconds: float) -> float:
    """Iterate over epochs, one after the other, for `seconds`; return the time of the first batch."""
    first = 0.0
    for _ in chain.from_iterable(repeat(dataset)):
        first = first or tally.seconds
        if tally.seconds >= seconds:
            break
    return first


def _open_dataset(
    url: str, options: BenchOptions, images: list[str], on_batch: Callable[[BatchReport], None] | None = None
) -> NumpyDataset:
    shared = {name: getattr(options, name) for name in ("batch_size", "fields", "split", "memory", "storage_options")}
    shared["decode"] = dict.fromkeys(images, Decode(size=options.image_size, with_crop=True))
    # uneven, since padded rows would count as samples
    return NumpyDataset(url, remainder="uneven", world=(0, 1), on_batch=on_batch, **shared)


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

    def measure(name: str, in_flight: int, unpack: bool = False) -> Ceiling:
        shared: dict[str, Any] = {"split": options.split, "seconds": options.seconds, "watch": meter.begin(name)}
        source = url, options.storage_options, options.fields
        return replace(read_ceiling(*source, unpack=unpack, in_flight=in_flight, **shared), name=name)

    fetches = {count: measure(f"fetch, {count} at once", count) for count in concurrencies}
    best = max(fetches, key=lambda count: fetches[count].megabytes_per_second)
    return [*fetches.values(), measure(f"fetch and unpack, {best} at once", best, unpack=True)]


def _measure_decoding(url: str, options: BenchOptions, name: str, meter: Meter) -> Ceiling:
    """Return the ceiling of decoding one field of images from memory."""
    decode, storage_options = Decode(size=options.image_size), options.storage_options
    watch = meter.begin(f"decode {name}")
    ceiling = image_ceiling(url, storage_options, name, decode, options.seconds, split=options.split, watch=watch)
    return replace(ceiling, name=f"decode {name} from memory")
