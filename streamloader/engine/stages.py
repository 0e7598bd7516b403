"""From slots to finished batches: gather, then decode, then transform; each stage on threads of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.decode.image import ImageDecoder
from streamloader.engine.arena import Memory
from streamloader.engine.batch import Batch, items_to_column, rows_of
from streamloader.engine.crew import Crew
from streamloader.engine.transform import RngKey, Sample, Transform, TransformProcess, apply, collate, takes_rng
from streamloader.errors import StreamloaderError
from streamloader.format.manifest import FieldLayout
from streamloader.stats import Counters


@dataclass(frozen=True)
class Recipe:
    """What a batch is made of: the columns `names`, in that order.

    `streamed` fields come from the arena, `resident` ones are whole arrays in memory; `decoders` names the
    image fields to decode. `alike` says that the images of a batch must have one size; where a transform makes
    them alike, or samples are handed out singly, they are kept apart. `seed` and `epoch` key the random numbers of
    the transform.
    """

    names: tuple[str, ...]
    streamed: Mapping[str, FieldLayout]
    resident: Mapping[str, NDArray[Any]]
    decoders: Mapping[str, ImageDecoder]
    alike: bool
    transform: Transform | None
    transform_workers: int
    seed: int
    epoch: int


class Stages:
    """Runs batches through the recipe. Threads hold this object, never the pipeline's handle."""

    def __init__(
        self, recipe: Recipe, memory: Memory, threads: int, counters: Counters, fail: Callable[[BaseException], None]
    ) -> None:
        self._recipe = recipe
        self._arena = memory.arena
        self._buffers = memory.buffers
        self._counters = counters
        self._threads = threads
        self._processes: list[TransformProcess] = []
        if recipe.transform is not None:
            self._processes = [TransformProcess(recipe.transform) for _ in range(recipe.transform_workers)]
            self._with_rng = takes_rng(recipe.transform)
        self._decode = Crew("decode", threads if recipe.decoders else 0, fail)
        self._transform = [
            Crew("transform", 1, fail) for _ in range(max(1, len(self._processes)) if recipe.transform else 0)
        ]

    def start(self, batch: Batch) -> None:
        """Gather the batch now, and hand it to the later stages, the last of which finishes it."""
        plan = batch.plan
        count = len(plan.samples)
        images: dict[str, list[memoryview]] = {}
        batch.columns = dict.fromkeys(self._recipe.names)
        for name, layout in self._recipe.streamed.items():
            if layout.field.fixed:
                out = self._buffers.lease((count, *layout.field.shape), layout.field.dtype)
                self._arena.take(name, plan.tickets, plan.rows, out)
                batch.columns[name] = out
                continue
            items = self._arena.items(name, plan.tickets, plan.rows)
            if name in self._recipe.decoders:
                images[name] = items
            else:
                batch.columns[name] = items_to_column(name, layout.field, items, plan.samples)
        for name, values in self._recipe.resident.items():
            out = self._buffers.lease((count, *values.shape[1:]), str(values.dtype))
            np.take(values, plan.samples, axis=0, out=out, mode="clip")
            batch.columns[name] = out
        if images and count:
            self._start_decode(batch, images)
        else:
            self._start_transform(batch)

    def close(self) -> None:
        """Let threads and processes end."""
        for crew in (self._decode, *self._transform):
            crew.close()
        for process in self._processes:
            process.close()

    def join(self, seconds: float) -> bool:
        """Wait for the threads; return whether all have ended."""
        return all(crew.join(seconds) for crew in (self._decode, *self._transform))

    def _start_decode(self, batch: Batch, images: Mapping[str, Sequence[memoryview]]) -> None:
        numbers = batch.plan.samples.tolist()
        parts = _cut(len(numbers), 4 * self._threads)
        left = _Countdown(len(parts) * len(images), partial(self._start_transform, batch))
        try:
            for name, items in images.items():
                decoder = self._recipe.decoders[name]
                if not self._recipe.alike and decoder.options.size is None:
                    out: Any = [None] * len(items)
                else:
                    out = self._buffers.lease((len(items), *decoder.shape(items[0], numbers[0])), "uint8")
                batch.columns[name] = out
                for part in parts:
                    self._decode.submit(partial(self._decode_part, batch, name, items, part, left))
        except StreamloaderError as error:
            batch.finish(error)

    def _decode_part(self, batch: Batch, name: str, items: Sequence[memoryview], part: range, left: _Countdown) -> None:
        decoder, out, numbers = self._recipe.decoders[name], batch.columns[name], batch.plan.samples
        begin = time.perf_counter()
        try:
            for i in part:
                if isinstance(out, list):
                    out[i] = decoder.decode(items[i], int(numbers[i]))
                else:
                    decoder.decode(items[i], int(numbers[i]), out[i])
        except StreamloaderError as error:
            batch.error = batch.error or error
        self._counters.add(decode_seconds=time.perf_counter() - begin)
        left.down()

    def _start_transform(self, batch: Batch) -> None:
        if self._recipe.transform is None or batch.error is not None:
            batch.finish()
            return
        count = len(batch.plan.samples)
        samples = rows_of(batch.columns, count)
        parts = _cut(count, len(self._transform))
        done: list[list[Sample]] = [[] for _ in parts]
        left = _Countdown(len(parts), partial(self._finish_transform, batch, done))
        for i, part in enumerate(parts):
            self._transform[i].submit(partial(self._transform_part, batch, samples, part, (i, done, left)))
        if not parts:
            batch.finish()

    def _transform_part(
        self, batch: Batch, samples: Sequence[Sample], part: range, into: tuple[int, list[list[Sample]], _Countdown]
    ) -> None:
        i, done, left = into
        plan, recipe = batch.plan, self._recipe
        keys = [RngKey(recipe.seed, recipe.epoch, int(plan.positions[j])) for j in part]
        numbers = [int(plan.samples[j]) for j in part]
        chosen = [samples[j] for j in part]
        begin = time.perf_counter()
        try:
            if self._processes:
                done[i] = self._processes[i].run(chosen, keys, numbers)
            else:
                assert recipe.transform is not None
                done[i] = apply(recipe.transform, self._with_rng, chosen, keys, numbers)
        except StreamloaderError as error:
            batch.error = batch.error or error
        self._counters.add(transform_seconds=time.perf_counter() - begin)
        left.down()

    def _finish_transform(self, batch: Batch, done: list[list[Sample]]) -> None:
        if batch.error is None:
            try:
                batch.columns = collate([sample for part in done for sample in part])
            except StreamloaderError as error:
                batch.error = error
        batch.finish()


class _Countdown:
    """Calls `then` once it was counted down to 0, in the thread that did so."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left = count
        self._then = then
        self._lock = threading.Lock()

    def down(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()


def _cut(count: int, parts: int) -> list[range]:
    """Return [0, count) as at most `parts` ranges of nearly equal length, none of them empty."""
    parts = min(count, parts)
    edges = [count * i // parts for i in range(parts + 1)] if parts else []
    return [range(a, b) for a, b in pairwise(edges)]
