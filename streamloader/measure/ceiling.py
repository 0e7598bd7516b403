"""Ceilings: the rates of the loader's client, requests and decoders, without shuffle and batches.

read_ceiling("s3://bucket/photos", fields=["image"]).megabytes_per_second
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from streamloader.engine.arena import Arena, Buffers
from streamloader.engine.dataset import Dataset
from streamloader.errors import FieldError, UsageError
from streamloader.format.reader import FieldReader, Run
from streamloader.images.decode import ImageDecoder
from streamloader.loader.arguments import Source
from streamloader.loader.opening import open_dataset
from streamloader.options import MIB, Decode
from streamloader.order.epoch_order import permute
from streamloader.stats import Counters, quotient
from streamloader.storage.process import cpu_count, finished_before_exit, run_all

IN_FLIGHT = 16
MANY_PASSES = 10**9  # until the time is over
# Limits of the encoded images that are decoded repeatedly: more than a core's cache, little compared with a loader.
IMAGE_BYTES = 64 * MIB
IMAGES = 4096


@dataclass(frozen=True)
class Ceiling:
    """The totals of a measurement: `bytes` as stored, wall `seconds`, and the CPU seconds of this process."""

    name: str
    samples: int
    bytes: int
    seconds: float
    requests: int
    cpu_seconds: float

    @property
    def samples_per_second(self) -> float:
        """Samples per wall second, 0 for no time."""
        return quotient(self.samples, self.seconds)

    @property
    def megabytes_per_second(self) -> float:
        """10^6 stored bytes per wall second, 0 for no time."""
        return quotient(self.bytes / 1e6, self.seconds)


class Tally:
    """Adds up samples, bytes and requests from any thread, and the time since it was made.

    `watch(tally)` is called after each addition, one at a time.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        self.samples = self.bytes = self.requests = 0
        self._watch, self._lock = watch, threading.Lock()
        self._cpu, self._begin = time.process_time(), time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds since the tally was made."""
        return time.perf_counter() - self._begin

    def add(self, samples: int, size: int) -> None:
        """Count the samples and bytes of a request."""
        with self._lock:
            self.samples, self.bytes, self.requests = self.samples + samples, self.bytes + size, self.requests + 1
            if self._watch is not None:
                self._watch(self)

    def ceiling(self, name: str) -> Ceiling:
        """Return the totals."""
        return Ceiling(name, self.samples, self.bytes, self.seconds, self.requests, time.process_time() - self._cpu)


Watch = Callable[[Tally], None]


def read_ceiling(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    fields: Sequence[str] | None = None,
    *,
    unpack: bool = False,
    split: str | None = None,
    in_flight: int = IN_FLIGHT,
    seconds: float | None = None,
    watch: Watch | None = None,
) -> Ceiling:
    """Measure reading a dataset in random order of its blocks, without shuffle and batches.

    Makes `in_flight` concurrent requests, for one pass or, if given, for `seconds`. `watch`: as in `Tally`.

    Requests the ranges that the loader would request, with its client, and drops the bytes. `unpack`: also checks and
    decodes every chunk into reused memory; encoded images stay encoded. Resident fields are read first, and once.

    Raises a `StreamloaderError` as opening and reading do, and `CorruptError` for damaged bytes with `unpack`.
    """
    if in_flight < 1:
        raise UsageError(f"in_flight={in_flight}", "give 1 or more")
    dataset = open_dataset(Source(url, split, storage_options=storage_options), fields)
    client, retries = dataset.store.reader(), dataset.store.retries
    memory = Buffers(Arena(shared=False), Counters(), keep=in_flight)  # fresh pages cost more than the copy itself
    runs = _runs(dataset, passes=1 if seconds is None else MANY_PASSES)
    lock, stop, tally = threading.Lock(), threading.Event(), Tally(watch)

    def read_runs(_: int) -> None:
        while not stop.is_set() and (seconds is None or tally.seconds < seconds):
            with lock:
                task = next(runs, None)
            if task is None:
                return
            reader, run, samples = task
            body = retries.call(partial(reader.fetch, client, run, memory.allocate))
            if unpack:
                field = reader.layout.field
                out = memory.lease((run.num_samples, *field.shape), field.dtype) if field.fixed else None
                reader.decode(run, body, out)
                del out
            tally.add(samples, len(body))
            del body  # frees its memory for the next request

    try:
        run_all(read_runs, range(in_flight), in_flight + 1)  # never on the main thread, for Ctrl-C
    finally:
        stop.set()
    return tally.ceiling("fetch and unpack" if unpack else "fetch")


def image_ceiling(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    field: str = "image",
    decode: Decode | None = None,
    seconds: float = 5.0,
    *,
    split: str | None = None,
    watch: Watch | None = None,
) -> Ceiling:
    """Measure decoding images of the dataset from memory, with one thread for each core.

    It takes `seconds`, or longer until each image is decoded once. Random crops are drawn beforehand, one per image.

    Raises `FieldError` if the field does not have encoded images, and `DecodeError` for a damaged image.
    """
    decoder = ImageDecoder.choose(decode or Decode())
    images = _load_images(open_dataset(Source(url, split, storage_options=storage_options), [field]))
    numbers = decoder.draws(0, 0, np.array([sample for sample, _ in images], np.int64))
    draws: Sequence[Sequence[float] | None] = numbers or [None] * len(images)
    threads, size = cpu_count(), decoder.options.size
    tally = Tally(watch)

    def decode_images(index: int) -> None:
        out = None if size is None else np.empty((*size, decoder.options.channels), decoder.dtype)
        with finished_before_exit() as stop_if_ending:  # OpenCV must not end with the interpreter, after Ctrl-C
            while index < len(images) or tally.seconds < seconds:
                stop_if_ending()
                sample, data = images[index % len(images)]
                decoder.decode(data, sample, out, draws[index % len(images)])
                tally.add(1, len(data))
                index += threads

    run_all(decode_images, range(threads) if images else (), threads)
    return replace(tally.ceiling("image decode"), requests=0)


def _runs(dataset: Dataset, passes: int) -> Iterator[tuple[FieldReader, Run, int]]:
    """Yield (reader, run, samples) of each request: the samples that are complete after it."""
    count, block = dataset.num_samples, dataset.manifest.order.block
    readers = [reader for reader in dataset.readers.values() if isinstance(reader, FieldReader)]  # none of arrays
    resident = [reader for reader in readers if reader.layout.resident]
    streamed = [reader for reader in readers if not reader.layout.resident]
    yield from _block_runs(resident, 0, count, 0 if streamed else count)  # resident fields are read once
    blocks = -(-count // block) if streamed else 0
    for number in range(passes if blocks else 0):
        for start in (permute(np.arange(blocks), blocks, number) * block).tolist():
            stop = min(start + block, count)
            yield from _block_runs(streamed, start, stop, stop - start)


def _block_runs(
    readers: Sequence[FieldReader], start: int, stop: int, samples: int
) -> Iterator[tuple[FieldReader, Run, int]]:
    """Yield the requests of a block; its samples are complete after the last one."""
    runs = [(reader, run) for reader in readers for run in reader.runs(start, stop)]
    for number, (reader, run) in enumerate(runs, 1):
        yield reader, run, samples if number == len(runs) else 0


def _load_images(dataset: Dataset) -> list[tuple[int, memoryview]]:
    """Return (sample, image) pairs from random blocks, up to about `IMAGES` and `IMAGE_BYTES`.

    Raises `FieldError` for a field of another kind.
    """
    images: list[tuple[int, memoryview]] = []
    size = 0
    for reader, run, _ in _runs(dataset, passes=1):
        if reader.layout.field.kind != "bytes":
            raise FieldError(f"field {reader.name!r} is {reader.layout.field}", "name a field of encoded images")
        chunks = reader.decode(run, reader.request(run)()) or []
        encoded = [items[i] for _, items in chunks for i in range(len(items))]
        images += enumerate(encoded, run.first_sample)
        size += sum(map(len, encoded))
        if size >= IMAGE_BYTES or len(images) >= IMAGES:
            break
    return images
