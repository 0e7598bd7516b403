"""From slots to finished batches: gather, then decode, then transform; each stage on threads of its own."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.decode.image import ImageDecoder, Scratch
from streamloader.engine.arena import Memory
from streamloader.engine.batch import Batch, items_to_column, rows_of
from streamloader.engine.budget import LIVE_BATCHES
from streamloader.engine.crew import Crew
from streamloader.engine.transform import (
    HeldTransform,
    RngKey,
    Sample,
    Tensors,
    Transform,
    TransformProcess,
    apply,
    collate,
    takes_rng,
)
from streamloader.errors import EngineError, StreamloaderError, wrapped
from streamloader.format.manifest import FieldLayout
from streamloader.options import Pack
from streamloader.plan.booking import BatchPlan
from streamloader.stats import Counters


@dataclass(frozen=True)
class Recipe:
    """What a batch is made of: the columns `names`, in that order.

    `streamed` fields come from the arena, `resident` ones are whole arrays in memory; `decoders` names the
    image fields to decode, `packs` the ragged fields to cut in rows. `alike` says that the images of a batch must have
    one size; where a transform makes them alike, or samples are handed out singly, they are kept apart. `seed` keys the
    random numbers of the transform, with the plan's epoch and positions; `tensors` knows those that it may return.
    """

    names: tuple[str, ...]
    streamed: Mapping[str, FieldLayout]
    resident: Mapping[str, NDArray[Any]]
    decoders: Mapping[str, ImageDecoder]
    alike: bool
    transform: weakref.ref[HeldTransform] | None
    transform_workers: int
    seed: int
    packs: Mapping[str, Pack] = field(default_factory=dict)
    tensors: Tensors | None = None


# How long the interpreter's exit waits for the image, or the part of a batch in a transform, that a thread is at.
EXIT_SECONDS = 5.0


class Stages:
    """Runs batches through the recipe. Threads hold this object, never the pipeline's handle."""

    def __init__(self, recipe: Recipe, memory: Memory, threads: int, counters: Counters) -> None:
        self._recipe = recipe
        self._arena = memory.arena
        self._buffers = memory.buffers
        self._counters = counters
        self._threads = threads
        self._variable = [
            name for name, of in recipe.streamed.items() if not of.field.fixed and name not in recipe.decoders
        ]
        self._processes: list[TransformProcess] = []
        if recipe.transform is not None:
            transform = self._held_transform()
            self._processes = [TransformProcess(transform, recipe.tensors) for _ in range(recipe.transform_workers)]
            self._with_rng = takes_rng(transform)
        self._scratch = Scratch()
        self._closed = False
        self._decode = Crew("decode", threads if recipe.decoders else 0)
        self._transform = [Crew("transform", 1) for _ in range(max(1, len(self._processes)) if recipe.transform else 0)]
        # OpenCV, and most of what a transform may call, aborts the process when its thread comes back from it to an
        # interpreter that has ended: the exit waits. Threads that wait for a process of their own end as they are.
        # What a finalizer holds lives as long as this object: nothing that leads back here.
        here = [self._decode] if self._processes else [self._decode, *self._transform]
        weakref.finalize(self, _leave, here, os.getpid())

    def variable_bytes(self, plan: BatchPlan) -> int:
        """Return the bytes of a batch's variable-size columns, once its blocks are there."""
        return sum(self._arena.item_bytes(name, plan.tickets, plan.rows) for name in self._variable)

    def start(self, batch: Batch) -> None:
        """Gather the batch now, and hand it to the later stages, the last of which finishes it.

        Each part of that work, whatever it raises, ends in `Batch.finish` or `Batch.fail`.
        """
        plan = batch.plan
        count = len(plan.samples)
        images: dict[str, list[memoryview]] = {}
        batch.columns = dict.fromkeys(self._recipe.names)
        name = ""
        try:
            for name, layout in self._recipe.streamed.items():
                self._gather(batch, name, layout, images)
            for name, values in self._recipe.resident.items():
                out = self._buffers.lease((count, *values.shape[1:]), values.dtype.str, LIVE_BATCHES)
                batch.columns[name] = np.take(values, plan.samples, axis=0, out=out, mode="clip")
        except StreamloaderError:
            raise
        except Exception as error:
            raise wrapped(error, f"gathering field {name!r}") from error
        if images and count:
            self._start_decode(batch, images)
        else:
            self._start_transform(batch)

    def close(self) -> None:
        """Let threads and processes end."""
        self._closed = True
        for crew in (self._decode, *self._transform):
            crew.close()
        for process in self._processes:
            process.close()

    def join(self, seconds: float) -> bool:
        """Wait for the threads; return whether all have ended."""
        return all(crew.join(seconds) for crew in (self._decode, *self._transform))

    def _gather(self, batch: Batch, name: str, layout: FieldLayout, images: dict[str, list[memoryview]]) -> None:
        """Put a field's column into the batch, or its items into `images` where they are to be decoded."""
        plan, field = batch.plan, layout.field
        if field.fixed:
            out = self._buffers.lease((len(plan.samples), *field.shape), field.dtype, LIVE_BATCHES)
            self._arena.take(name, plan.tickets, plan.rows, out)
            batch.columns[name] = out
            return
        items = self._arena.items(name, plan.tickets, plan.rows)
        if name in self._recipe.decoders:
            images[name] = items
        else:
            pack = self._recipe.packs.get(name)
            batch.columns[name] = items_to_column(name, field, items, plan.samples, self._buffers, pack=pack)

    def _start_decode(self, batch: Batch, images: Mapping[str, Sequence[memoryview]]) -> None:
        parts = _cut(len(batch.plan.samples), 4 * self._threads)
        left = _Countdown(len(parts) * len(images), partial(self._start_transform, batch))
        for column in [self._images(batch.plan, name, items) for name, items in images.items()]:
            batch.columns[column.name] = column.out
            for part in parts:
                self._decode.submit(partial(self._decode_part, column, part, left), batch.fail)

    def _images(self, plan: BatchPlan, name: str, items: Sequence[memoryview]) -> _Images:
        decoder, samples = self._recipe.decoders[name], plan.samples.tolist()
        out: list[NDArray[Any] | None] | NDArray[Any] = [None] * len(items)
        if self._recipe.alike or decoder.options.size is not None:
            shape = decoder.shape(items[0], samples[0])
            out = self._buffers.lease((len(items), *shape), decoder.dtype, LIVE_BATCHES)
        draws = decoder.draws(self._recipe.seed, plan.epoch, plan.positions)
        return _Images(name, decoder, items, samples, draws or [[]] * len(items), out)

    def _decode_part(self, images: _Images, part: range, left: _Countdown) -> None:
        begin = time.thread_time()
        for i in part:
            if self._closed:
                return
            image = images.decoder.decode(
                images.items[i], images.samples[i], images.out[i], images.draws[i], self._scratch
            )
            if isinstance(images.out, list):
                images.out[i] = image
        self._counters.add(decode_seconds=time.thread_time() - begin)
        left.down()

    def _start_transform(self, batch: Batch) -> None:
        count = len(batch.plan.samples)
        if self._recipe.transform is None or not count:
            batch.finish()
            return
        samples = rows_of(batch.columns, count)
        parts = _cut(count, len(self._transform))
        done: list[list[Sample]] = [[] for _ in parts]
        left = _Countdown(len(parts), partial(self._finish_transform, batch, done))
        for i, part in enumerate(parts):
            self._transform[i].submit(
                partial(self._transform_part, batch.plan, samples, part, (i, done, left)), batch.fail
            )

    def _transform_part(
        self, plan: BatchPlan, samples: Sequence[Sample], part: range, into: tuple[int, list[list[Sample]], _Countdown]
    ) -> None:
        i, done, left = into
        recipe = self._recipe
        keys = [RngKey(recipe.seed, plan.epoch, int(plan.positions[j])) for j in part]
        numbers = [int(plan.samples[j]) for j in part]
        chosen = [samples[j] for j in part]
        begin = time.perf_counter()
        if self._processes:
            done[i] = self._processes[i].run(chosen, keys, numbers)
        else:
            done[i] = apply(self._held_transform(), self._with_rng, chosen, keys, numbers)
        self._counters.add(transform_seconds=time.perf_counter() - begin)
        left.down()

    def _held_transform(self) -> Transform:
        held = None if self._recipe.transform is None else self._recipe.transform()
        if held is None:
            raise EngineError("the dataset of this pass is gone", "keep the dataset while you iterate")
        return held.call

    def _finish_transform(self, batch: Batch, done: list[list[Sample]]) -> None:
        samples = [sample for part in done for sample in part]
        batch.columns = collate(samples, batch.plan.samples.tolist(), self._recipe.tensors)
        batch.finish()


def _leave(crews: Sequence[Crew], process: int) -> None:
    if os.getpid() == process:  # a forked child has no such threads
        for crew in crews:
            crew.close()
        for crew in crews:
            crew.join(EXIT_SECONDS)


@dataclass(frozen=True)
class _Images:
    """A batch's images of one field, what decodes them, their samples and random numbers, and where they go to.

    `out` is an array, or a list for images of their own sizes.
    """

    name: str
    decoder: ImageDecoder
    items: Sequence[memoryview]
    samples: Sequence[int]
    draws: Sequence[Sequence[float]]
    out: list[NDArray[Any] | None] | NDArray[Any]


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
