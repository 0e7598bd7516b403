"""Ceilings: what is possible without shuffle and batch, with the same client, ranges and decoders as the loader.

read_ceiling("s3://bucket/photos", fields=["image"]).megabytes_per_second
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from streamloader.decode.image import ImageDecoder, Scratch
from streamloader.errors import FieldError, UsageError
from streamloader.format.reader import FieldReader
from streamloader.format.threads import cpu_count, run_all
from streamloader.measure.ranges import Ranges
from streamloader.options import MIB, Decode

IN_FLIGHT = 16
# Encoded images that are decoded again and again: more than a core's cache holds, little beside a loader's memory.
IMAGE_BYTES = 64 * MIB
IMAGES = 4096

Advance = Callable[[int, int], None]
Work = Literal["fetch", "obstore", "decode"]
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


@dataclass(frozen=True)
class Effort:
    """How hard and how long: requests at once, `passes` over the dataset, cut short after `seconds` (0: never).

    `advance(samples, bytes)` is called with what each request added, from the threads that made them.
    """

    in_flight: int = IN_FLIGHT
    seconds: float = 0.0
    passes: int = 1
    advance: Advance | None = None

    def __post_init__(self) -> None:
        if self.in_flight < 1 or self.passes < 1 or self.seconds < 0:
            raise UsageError(
                f"in_flight={self.in_flight}, passes={self.passes}, seconds={self.seconds}",
                "give in_flight and passes of at least 1, and seconds of at least 0",
            )


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

    "fetch": ask for the ranges that the loader fetches with its client, and drop the bytes. "obstore": the same with
    obstore, whichever client the loader would take. "decode": with the loader's client, and check and decode every
    chunk into memory that is used again; encoded images stay encoded. Resident fields come first, and once.

    Raises a `StreamloaderError` as opening and reading do, `CorruptError` for damaged bytes ("decode"), and
    `UnsupportedError` where obstore cannot serve the URL.
    """
    if work not in WORKS:
        raise UsageError(f"work={work!r} is none of {', '.join(WORKS)}", "choose one of them")
    ranges = Ranges.of(url, storage_options, fields, split, obstore=work == "obstore")
    return _drain(work, ranges, effort or Effort())


def image_ceiling(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    field: str = "image",
    decode: Decode | None = None,
    seconds: float = 5.0,
    *,
    split: str | None = None,
    advance: Advance | None = None,
) -> Ceiling:
    """Decode images of the dataset from memory for so long, one thread for each core; each image at least once.

    Random crops are drawn beforehand, one for each image.

    Raises `FieldError` where the field holds no encoded images, and `DecodeError` for a damaged one.
    """
    decoder = ImageDecoder.choose(decode or Decode())
    images = _images(Ranges.of(url, storage_options, [field], split))
    if not images:
        return Ceiling("image decode", 0, 0, 0.0, 0, 0.0)
    threads = cpu_count()
    numbers = decoder.draws(0, 0, np.array([sample for sample, _ in images]))
    drawn: Sequence[Sequence[float] | None] = numbers or [None] * len(images)
    scratch = Scratch()
    done: list[tuple[int, int]] = []
    with _clock() as clock:

        def work(first: int) -> None:
            turn, out = first, _room_of(decoder)
            while turn < len(images) or clock.elapsed() < seconds:
                sample, data = images[turn % len(images)]
                decoder.decode(data, sample, out, drawn[turn % len(images)], scratch)
                done.append((1, len(data)))
                if advance is not None:
                    advance(1, len(data))
                turn += threads

        run_all(work, range(threads), threads)
    samples, size = (sum(amounts) for amounts in zip(*done, strict=True))
    return Ceiling("image decode", samples, size, clock.seconds, 0, clock.cpu_seconds)


class _Clock:
    def __init__(self) -> None:
        self._cpu, self._begin = time.process_time(), time.perf_counter()
        self.seconds = self.cpu_seconds = 0.0

    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def stop(self) -> None:
        self.seconds, self.cpu_seconds = self.elapsed(), time.process_time() - self._cpu


@contextmanager
def _clock() -> Iterator[_Clock]:
    clock = _Clock()
    try:
        yield clock
    finally:
        clock.stop()


def _drain(work: Work, ranges: Ranges, effort: Effort) -> Ceiling:
    """Let threads take request after request until none is left or the time is over."""
    runs, lock, stop = ranges.runs(effort.passes), threading.Lock(), threading.Event()
    done: list[tuple[int, int]] = []

    def take(_: int) -> None:
        memory = _Memory()
        while not stop.is_set() and not (effort.seconds and clock.elapsed() >= effort.seconds):
            with lock:
                task = next(runs, None)
            if task is None:
                return
            field, run, samples = task
            read = partial(ranges.plane.read, run.path, run.start, run.stop, memory.body)
            body = ranges.retries.call(read)
            if work == "decode":
                field.decode(run, body, memory.rows(field, run.num_samples))
            done.append((samples, len(body)))
            if effort.advance is not None:
                effort.advance(samples, len(body))

    with _clock() as clock:
        try:
            run_all(take, range(effort.in_flight), effort.in_flight + 1)  # never on the main thread, for Ctrl-C
        finally:
            stop.set()
    samples = sum(samples for samples, _ in done)
    return Ceiling(work, samples, sum(size for _, size in done), clock.seconds, len(done), clock.cpu_seconds)


class _Memory:
    """What one thread reads and decodes into, allocated once: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._body = np.empty(0, np.uint8)
        self._rows: dict[str, NDArray[Any]] = {}

    def body(self, size: int) -> memoryview:
        """Return room for a body, for planes that put bytes where they are told."""
        if len(self._body) < size:
            self._body = np.empty(size, np.uint8)
        return memoryview(self._body)[:size]  # type: ignore[arg-type]

    def rows(self, field: FieldReader, count: int) -> NDArray[Any] | None:
        """Return room for so many samples; None for a field of variable size."""
        layout = field.layout
        if not layout.field.fixed:
            return None
        if field.name not in self._rows or len(self._rows[field.name]) < count:
            self._rows[field.name] = np.empty((count, *layout.field.shape), layout.field.dtype)
        return self._rows[field.name][:count]


def _room_of(decoder: ImageDecoder) -> NDArray[Any] | None:
    size = decoder.options.size
    return None if size is None else np.empty((*size, decoder.channels), decoder.dtype)


def _images(ranges: Ranges) -> list[tuple[int, memoryview]]:
    """Return images with their sample numbers, from random blocks, as many as are kept in memory."""
    images: list[tuple[int, memoryview]] = []
    size = 0
    for field, run, _ in ranges.runs(1):
        if field.layout.field.kind != "bytes":
            raise FieldError(f"field {field.name!r} is {field.layout.field}", "name a field of encoded images")
        chunks = field.decode(run, ranges.retries.call(partial(field.fetch, ranges.plane, run))) or []
        found = [items[i] for _, items in chunks for i in range(len(items))]
        for number, data in enumerate(found, run.first_sample):
            images.append((number, data))
            size += len(data)
        if size >= IMAGE_BYTES or len(images) >= IMAGES:
            break
    return images
