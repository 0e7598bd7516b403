"""`bench`: ceilings of the user's own dataset, then the loader on it, then what limits it, in words."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from streamloader.decode.image import ENCODINGS
from streamloader.errors import UsageError
from streamloader.format.manifest import Manifest
from streamloader.format.reader import MAX_REQUEST, open_manifest
from streamloader.format.threads import cpu_count
from streamloader.measure.ceiling import Ceiling, Effort, Work, image_ceiling, read_ceiling
from streamloader.measure.meter import Listener, Meter
from streamloader.measure.values import BenchOptions, BenchResult
from streamloader.measure.verdict import Measured, judge
from streamloader.options import MIB, Decode
from streamloader.stats import BatchReport, Stats
from streamloader.storage import open_store
from streamloader.torch_dataset import StreamingDataset

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
    manifest, store = open_manifest(open_store(url, options.storage_options), options.split)
    if not manifest.num_samples:
        raise UsageError(f"{store.url} has no samples", "give a dataset that has some")
    batch_size = options.batch_size or min(BATCH_SIZE, manifest.num_samples)
    images = _image_fields(manifest, options)
    with ExitStack() as ends:
        heard = _Heard(ends.enter_context(_opened(options.trace)) if options.trace else None)
        _take_one(_dataset(url, options, batch_size, images, None))
        levels = _levels(manifest, options)
        meter = Meter(options.seconds, len(levels) + 2 + len(images), progress)
        *fetches, unpack = _drained(url, options, levels, meter)
        decoded = [_decoded(url, options, name, meter) for name in images]
        dataset = ends.enter_context(closing(_dataset(url, options, batch_size, images, heard)))
        loader, stats, first = _stream(dataset, heard, options, meter)
    fetch = max(fetches, key=lambda ceiling: ceiling.megabytes_per_second)
    held = all(manifest.fields[name].resident for name in options.fields or manifest.fields)
    if stats is None:  # the bytes of other processes are not known: what the samples take
        loader = replace(loader, bytes=round(loader.samples * _share(unpack.bytes, unpack.samples)))
    ratio, verdict = judge(Measured(fetch, unpack, decoded, loader, stats, cpu_count(), held))
    ceilings = (*fetches, unpack, *decoded)
    return BenchResult(store.url, manifest.num_samples, batch_size, first, ceilings, loader, stats, ratio, verdict)


def _dataset(
    url: str, options: BenchOptions, batch_size: int, images: list[str], heard: _Heard | None
) -> StreamingDataset:
    return StreamingDataset(
        url,
        batch_size=batch_size,
        fields=options.fields,
        split=options.split,
        remainder="uneven",  # no rows that fill up a batch: samples are counted
        decode=dict.fromkeys(images, Decode(size=options.image_size)),
        with_index=bool(options.workers),
        world=(0, 1),
        memory=options.memory,
        on_batch=None if options.workers else heard,
        storage_options=options.storage_options,
    )


def _take_one(dataset: StreamingDataset) -> None:
    """Take a batch, before all else: what is wrong with the arguments comes out here. The window is freed again."""
    with closing(dataset):
        next(iter(dataset))


def _opened(trace: Path) -> TextIO:
    try:
        return trace.open("w")
    except OSError as error:
        raise UsageError(f"{trace} cannot be written ({error.strerror})", "name a file that can") from error


def _image_fields(manifest: Manifest, options: BenchOptions) -> list[str]:
    if options.image_size is None:
        return []
    found = {name: layout.field for name, layout in manifest.fields.items()}
    images = [name for name, field in found.items() if field.kind == "bytes" and field.encoding in ENCODINGS]
    return [name for name in images if options.fields is None or name in options.fields]


def _levels(manifest: Manifest, options: BenchOptions) -> list[int]:
    """How many requests at once to try: not more than memory has room for, the client's copies included."""
    names = options.fields or list(manifest.fields)
    stored = sum(layout.stored for name, layout in manifest.fields.items() if name in names and not layout.resident)
    request = min(MAX_REQUEST, max(1, stored * manifest.order.block // manifest.num_samples))
    room = max(1, (options.memory or FLIGHT_BYTES) // (3 * request))  # two copies of the body, and what it decodes to
    return sorted({min(level, room) for level in LEVELS})


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
    ceiling = image_ceiling(
        url,
        options.storage_options,
        name,
        Decode(size=options.image_size),
        options.seconds,
        split=options.split,
        advance=meter.begin(f"decode {name}"),
    )
    return replace(ceiling, name=f"decode {name} from memory")


def _stream(
    dataset: StreamingDataset, heard: _Heard, options: BenchOptions, meter: Meter
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
        count = len(batch["index"]) if options.workers else heard.samples - samples
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

        source = DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="forkserver",
            persistent_workers=True,
        )
    while True:
        yield from source


class _Heard:
    """Counts the samples of the batches that it hears of, and writes a line about each where there is a file."""

    def __init__(self, file: TextIO | None) -> None:
        self.samples = 0
        self._file = file

    def __call__(self, report: BatchReport) -> None:
        self.samples += report.samples
        if self._file is not None:
            self._file.write(json.dumps(asdict(report)) + "\n")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
