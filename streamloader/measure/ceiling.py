"""Ceilings: what is possible without shuffle and batch, with the client, requests and decoders of the loader.

read_ceiling("s3://bucket/photos", fields=["image"]).megabytes_per_second
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from streamloader.engine.dataset import Dataset
from streamloader.engine.memory import Buffers
from streamloader.errors import FieldError, UsageError
from streamloader.format.reader import FieldReader, Run
from streamloader.images.decode import ImageDecoder
from streamloader.options import MIB, Decode
from streamloader.order.epoch_order import BlockPermutation
from streamloader.pytorch.arguments import Source, open_dataset
from streamloader.stats import Counters
from streamloader.storage.process import cpu_count, run_all

IN_FLIGHT = 16
# Encoded images that are decoded again and again: more than a core's cache holds, little beside a loader's memory.
IMAGE_BYTES = 64 * MIB
IMAGES = 4096

Advance = Callable[[int, int], None]
Work = Literal["fetch", "decode"]
WORKS: tuple[str, ...] = get_args(Work)


@dataclass(frozen=True)
class Ceiling:
    """What one measurement did: `bytes` as stored, wall `seconds`, and the CPU seconds of this process."""

    name: str
    samples: int
    bytes: int
    seconds: float
    requests: int
    cpu_seconds: float

    @property
    def samples_per_second(self) -> float:
        """Samples for each wall second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def megabytes_per_second(self) -> float:
        """10^6 stored bytes for each wall second."""
        return self.bytes / self.seconds / 1e6 if self.seconds else 0.0

    @property
    def cpu_seconds_per_gigabyte(self) -> float:
        """CPU seconds for each 10^9 stored bytes."""
        return self.cpu_seconds / self.bytes * 1e9 if self.bytes else 0.0


def ignore(samples: int, size: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Effort:
    """How hard and how long: requests at once, `passes` over the dataset, cut short after `seconds` (0: never).

    `advance(samples, bytes)` is called with what each request added, from the threads that made them.
    """

    in_flight: int = IN_FLIGHT
    seconds: float = 0.0
    passes: int = 1
    advance: Advance = ignore

    def __post_init__(self) -> None:
        if self.in_flight < 1 or self.passes < 1 or self.seconds < 0:
            given = f"in_flight={self.in_flight}, passes={self.passes}, seconds={self.seconds}"
            raise UsageError(given, "give in_flight and passes of at least 1, and seconds of at least 0")


def read_ceiling(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    fields: Sequence[str] | None = None,
    work: Work = "fetch",
    effort: Effort | None = None,
    *,
    split: str | None = None,
) -> Ceiling:
    """Do the `work` of reading an epoch, blocks mixed, without shuffle and batch.

    "fetch": ask for the ranges that the loader fetches with its client, and drop the bytes. "decode": also check and
    decode every chunk into memory that is used again; encoded images stay encoded. Resident fields come first, and
    once.

    Raises a `StreamloaderError` as opening and reading do, and `CorruptError` for damaged bytes ("decode").
    """
    if work not in WORKS:
        raise UsageError(f"work={work!r} is none of {', '.join(WORKS)}", "choose one of them")
    effort, dataset = effort or Effort(), _open(url, storage_options, fields, split)
    client, retries = dataset.store.reader(), dataset.store.retries
    memory = Buffers(Counters(), keep=effort.in_flight)  # fresh pages cost more than the copy itself
    runs, lock, stop, tally = _runs(dataset, effort.passes), threading.Lock(), threading.Event(), _Tally(effort.advance)

    def take(_: int) -> None:
        while not stop.is_set() and not (effort.seconds and tally.elapsed() >= effort.seconds):
            with lock:
                task = next(runs, None)
            if task is None:
                return
            field, run, samples = task
            body = retries.call(partial(field.fetch, client, run, memory.allocate))
            if work == "decode":
                kind = field.layout.field
                out = memory.lease((run.num_samples, *kind.shape), kind.dtype) if kind.fixed else None
                field.decode(run, body, out)
                del out
            tally.add(samples, len(body))
            del body  # its memory is for the next one

    try:
        run_all(take, range(effort.in_flight), effort.in_flight + 1)  # never on the main thread, for Ctrl-C
    finally:
        stop.set()
    return tally.ceiling(work, len(tally.done))


def image_ceiling(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    field: str = "image",
    decode: Decode | None = None,
    seconds: float = 5.0,
    *,
    split: str | None = None,
    advance: Advance = ignore,
) -> Ceiling:
    """Decode images of the dataset from memory for so long, one thread for each core; each image at least once.

    Random crops are drawn beforehand, one for each image.

    Raises `FieldError` where the field holds no encoded images, and `DecodeError` for a damaged one.
    """
    decoder = ImageDecoder.choose(decode or Decode())
    images = _images(_open(url, storage_options, [field], split))
    numbers = decoder.draws(0, 0, np.array([sample for sample, _ in images], np.int64))
    drawn: Sequence[Sequence[float] | None] = numbers or [None] * len(images)
    threads, size = cpu_count(), decoder.options.size
    tally = _Tally(advance)

    def work(turn: int) -> None:
        out = None if size is None else np.empty((*size, decoder.options.channels), decoder.dtype)
        while turn < len(images) or tally.elapsed() < seconds:
            sample, data = images[turn % len(images)]
            decoder.decode(data, sample, out, drawn[turn % len(images)])
            tally.add(1, len(data))
            turn += threads

    run_all(work, range(threads) if images else (), threads)
    return tally.ceiling("image decode", 0)


def _open(url: str, options: Mapping[str, Any] | None, fields: Sequence[str] | None, split: str | None) -> Dataset:
    return open_dataset(Source(url, split, storage_options=options), None, fields)


def _runs(dataset: Dataset, passes: int) -> Iterator[tuple[FieldReader, Run, int]]:
    """Yield each request with how many samples are complete after it."""
    count, block = dataset.num_samples, dataset.manifest.order.block
    resident = [reader for reader in dataset.readers.values() if reader.layout.resident]
    streamed = [reader for reader in dataset.readers.values() if not reader.layout.resident]
    yield from _last_counts(resident, 0, count, 0 if streamed else count)  # held fields are read once
    blocks = -(-count // block) if streamed else 0
    for number in range(passes if blocks else 0):
        order = BlockPermutation(blocks, number)
        for arrival in range(blocks):
            start = int(order.forward(np.array([arrival]))[0]) * block
            stop = min(start + block, count)
            yield from _last_counts(streamed, start, stop, stop - start)


def _last_counts(
    readers: Sequence[FieldReader], start: int, stop: int, samples: int
) -> Iterator[tuple[FieldReader, Run, int]]:
    runs = [(reader, run) for reader in readers for run in reader.runs(start, stop)]
    for left, (reader, run) in enumerate(runs, 1 - len(runs)):
        yield reader, run, samples if left == 0 else 0


class _Tally:
    """Counts samples and bytes from any thread, and the time since it was made."""

    def __init__(self, advance: Advance) -> None:
        self.done: list[tuple[int, int]] = []
        self._advance = advance
        self._cpu, self._begin = time.process_time(), time.perf_counter()

    def add(self, samples: int, size: int) -> None:
        """Count what was done."""
        self.done.append((samples, size))
        self._advance(samples, size)

    def elapsed(self) -> float:
        """Return the seconds since the beginning."""
        return time.perf_counter() - self._begin

    def ceiling(self, name: str, requests: int) -> Ceiling:
        """Return what was done until now."""
        seconds, cpu = self.elapsed(), time.process_time() - self._cpu
        samples, size = sum(samples for samples, _ in self.done), sum(size for _, size in self.done)
        return Ceiling(name, samples, size, seconds, requests, cpu)


def _images(dataset: Dataset) -> list[tuple[int, memoryview]]:
    """Return images with their sample numbers, from random blocks, as many as are kept in memory."""
    images: list[tuple[int, memoryview]] = []
    size = 0
    for field, run, _ in _runs(dataset, 1):
        if field.layout.field.kind != "bytes":
            raise FieldError(f"field {field.name!r} is {field.layout.field}", "name a field of encoded images")
        placed = field.decode(run, field.request(run)()) or []
        found = [items[i] for _, items in placed for i in range(len(items))]
        images += enumerate(found, run.first_sample)
        size += sum(map(len, found))
        if size >= IMAGE_BYTES or len(images) >= IMAGES:
            break
    return images
