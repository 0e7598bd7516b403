"""Turns slots into finished batches: gather, decode, transform, each stage on its own threads."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.memory import LIVE_BATCHES, Buffers, Memory
from streamloader.engine.transform import (
    HeldTransform,
    Ragged,
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
from streamloader.format.manifest import Field, FieldLayout
from streamloader.format.values import from_bytes
from streamloader.images.targets import move_boxes, move_points
from streamloader.options import Pack
from streamloader.order.schedule import BatchPlan, Ints
from streamloader.storage.process import finalize
from streamloader.zarr.columns import ARRAYS

if TYPE_CHECKING:
    from streamloader.images.decode import ImageDecoder

Job = Callable[[], None]
OnError = Callable[[BaseException], None]


class WorkerThreads:
    """Up to `count` daemon threads that run jobs in the order of `submit`; `started` of them start at once.

    Not a `ThreadPoolExecutor`, whose threads are joined at exit: a stalled request would delay it.

    Idle threads hold only the queue, and a closed queue is empty, so a finalizer may hold a `WorkerThreads`.
    """

    def __init__(self, name: str, count: int, started: int | None = None) -> None:
        self._jobs: SimpleQueue[tuple[Job, OnError] | None] = SimpleQueue()
        self._name = name
        self._count = count
        self._closed = False
        self._threads: list[threading.Thread] = []
        self.grow(count if started is None else started)

    def grow(self, count: int) -> None:
        """Start threads until `count`, or the maximum, are running. Not thread-safe."""
        while len(self._threads) < min(count, self._count):
            name = f"streamloader-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, job: Job, on_error: OnError) -> None:
        """Queue a job; its thread calls `on_error` with any exception. After `close`, jobs are dropped."""
        self._jobs.put((job, on_error))
        if self._closed:
            self.close()

    def close(self) -> None:
        """Drop the jobs that have not begun, and let each thread end after its job. Does not wait.

        Takes no lock, since a finalizer may call it in a thread that is inside `submit`. Several threads may close at
        once: each empties the queue, then puts one end marker per thread.
        """
        self._closed = True
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for each thread; return whether all have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)


def _run(jobs: SimpleQueue[tuple[Job, OnError] | None]) -> None:
    while (entry := jobs.get()) is not None:
        job, on_error = entry
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - the consumer must get any error
            on_error(error)
        del entry, job, on_error  # an idle thread must not keep the data of its last job alive


@dataclass
class Batch:
    """A batch in the making: `columns` by field (ndarray, list or `Ragged`), complete or failed once `finished` is set.

    `singles`: the columns of each sample, of one row, if transformed samples are not batched.
    `places`: the number of `READY_BATCHES` that it counts as; more than one if it is much larger than the mean.
    """

    plan: BatchPlan
    columns: dict[str, Any] = field(default_factory=dict)
    singles: Sequence[dict[str, Any]] | None = None
    error: StreamloaderError | None = None
    places: int = 1
    finished: threading.Event = field(default_factory=threading.Event)
    _dropped: bool = False

    def fail(self, error: BaseException) -> None:
        """Finish the batch with its first error; other jobs of it may still be running."""
        first = ", ".join(map(str, self.plan.samples[:3].tolist()))
        self.error = self.error or wrapped(error, f"making the batch of samples {first}, ...")
        if self._dropped:
            self.error = None
        self.finished.set()

    def drop(self) -> None:
        """Ignore past and later errors of the batch: it will not be returned."""
        self._dropped = True
        self.error = None


class PackedSteps(NamedTuple):
    """The packed column of each step of a plan of several steps: a row of values holds samples of one step only."""

    columns: list[Ragged]


def split_steps(batch: Batch) -> Iterator[tuple[BatchPlan, Mapping[str, Any]]]:
    """Yield the plan and the columns of each step of a finished batch. Arrays are views."""
    plan = batch.plan
    if len(plan.rows) <= plan.step_rows:
        yield plan, batch.columns
        return
    for number, step in enumerate(plan.steps()):
        first = number * plan.step_rows
        stop = first + len(step.rows)
        yield step, {name: _of_step(column, number, first, stop) for name, column in batch.columns.items()}


def _of_step(column: Any, number: int, first: int, stop: int) -> Any:
    if isinstance(column, PackedSteps):
        return column.columns[number]
    if not isinstance(column, Ragged):
        return column[first:stop]
    edges = column.offsets[first : stop + 1]
    return Ragged(column.values[edges[0] : edges[-1]], edges - edges[0])


def items_to_column(
    name: str, kind: Field, items: list[memoryview], samples: Ints, buffers: Buffers, *, pack: Pack | None = None
) -> Any:
    """Return the batch column of a variable-size field: a list of bytes or str, or a `Ragged`, packed as `pack` says.

    Raises `DecodeError`, which names the sample, for bytes that are invalid for the field.
    """
    try:
        if kind.kind == "bytes":
            return [bytes(item) for item in items]
        if kind.kind == "text":
            return [str(item, "utf-8") for item in items]
        return _concatenate(kind, items, buffers, pack)
    except ValueError:
        for item, sample in zip(items, samples.tolist(), strict=True):
            from_bytes(name, kind, item, sample)  # raises for the invalid item
        raise


def _concatenate(kind: Field, items: Sequence[memoryview], buffers: Buffers, pack: Pack | None) -> Ragged:
    edges = np.zeros(len(items) + 1, np.int64)  # in bytes
    np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=edges[1:])
    offsets, remainders = np.divmod(edges, kind.item_bytes)
    if remainders.any():
        raise ValueError("a sample ends within a row")
    count = int(offsets[-1])
    if pack is None:
        values = buffers.lease((count, *kind.shape), kind.dtype)
    else:
        values = buffers.lease((-(-count // pack.length), pack.length), kind.dtype)
        values.reshape(-1)[count:] = pack.pad
    into = values.reshape(-1).view(np.uint8).data
    # Slices of memoryviews: slices of arrays take 1.5 times as long, fancy indexing 5 times.
    for item, (begin, end) in zip(items, pairwise(edges.tolist()), strict=True):
        into[begin:end] = item
    return Ragged(values, offsets)


def rows_of(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the samples of a batch: dicts of numpy scalars and arrays, bytes and str."""
    split = dict(columns)
    for name, column in columns.items():
        if isinstance(column, Ragged):
            split[name] = [column.values[a:b] for a, b in pairwise(column.offsets.tolist())]
    return [{name: column[i] for name, column in split.items()} for i in range(count)]


@dataclass(frozen=True)
class LoaderConfig:
    """The options that turn samples into batches, and the memory budget (`memory` in bytes, None for the default).

    `decoders`: the image fields to decode. `packs`: the ragged fields to pack. `tensors` handles tensors that a
    transform returns.
    """

    decoders: Mapping[str, ImageDecoder] = field(default_factory=dict)
    packs: Mapping[str, Pack] = field(default_factory=dict)
    transform: Transform | None = None
    transform_workers: int = 0
    memory: int | None = None
    ranks_here: int = 1
    tensors: Tensors | None = None


class StageOptions(NamedTuple):
    """The options of `Stages` for one pass. A batch has the columns `names`, in this order.

    `streamed` fields come from the arena; `resident` fields are complete arrays in memory. `batched`: samples form
    batches. `seed` keys the random numbers of the transform, with the plan's epoch and positions.
    """

    config: LoaderConfig
    names: tuple[str, ...]
    streamed: Mapping[str, FieldLayout]
    resident: Mapping[str, NDArray[Any]]
    batched: bool
    transform: weakref.ref[HeldTransform] | None
    seed: int

    @property
    def stack_images(self) -> bool:
        """Whether the images of a batch are one array, so that they must have one size, and not a list of arrays."""
        return self.batched and self.transform is None


# How long the interpreter's exit waits for the image or the transform that a thread is running.
EXIT_SECONDS = 5.0


class Stages:
    """Gathers, decodes and transforms batches. Threads hold this object, never the `Pipeline`."""

    def __init__(self, options: StageOptions, memory: Memory, processes: Sequence[TransformProcess]) -> None:
        self._options, self._config = options, options.config
        self.transforms = options.transform is not None
        self._arena = memory.arena
        self._buffers = memory.buffers
        self._counters = memory.counters
        self._threads = memory.budget.cores
        self._variable = [
            name for name, of in options.streamed.items() if not of.field.fixed and name not in options.config.decoders
        ]
        self._ragged = [name for name, of in options.streamed.items() if of.field.kind == "ragged"]
        self.decodes = bool(options.config.decoders)
        self._processes = list(processes)
        if options.transform is not None:
            transform = self._held_transform()
            for _ in range(options.config.transform_workers - len(processes)):
                self._processes.append(TransformProcess(transform, options.config.tensors))
            self._with_rng = takes_rng(transform)
        self._closed = False
        self._decode = WorkerThreads("decode", self._threads if options.config.decoders else 0)
        self._transform = [
            WorkerThreads("transform", 1) for _ in range(max(1, len(self._processes)) if options.transform else 0)
        ]
        # OpenCV, and most native code of a transform, aborts the process if it returns to an interpreter that has
        # ended, so the exit waits for these threads. Threads that wait for a transform process need no wait.
        # The finalizer must not hold a reference to this object.
        finalize(self, _join_at_exit, [self._decode] if self._processes else [self._decode, *self._transform])

    def variable_bytes(self, plan: BatchPlan) -> tuple[int, int]:
        """Return the bytes of a batch's variable-size columns, and the temporary bytes of decoding its images.

        The blocks must be loaded. Raises `DecodeError` for an image without a valid header.
        """
        places = self._arena.locate(plan.tickets, plan.rows)
        size, scratch = sum(self._arena.chunks[name].item_bytes(places) for name in self._variable), 0
        for name, decoder in self._config.decoders.items():
            items = self._arena.chunks[name].items(places)
            unsized = decoder.options.size is None
            headers = items[:1] if unsized and self._options.stack_images else items  # stacked ones have one size
            sizes = list(map(decoder.measure, headers, plan.samples.tolist()))
            if unsized:  # otherwise the planned bytes of a batch include them
                pixels = sum(map(math.prod, (header.size for header in sizes))) * (len(items) // max(1, len(headers)))
                size += pixels * decoder.options.channels * np.dtype(decoder.dtype).itemsize
            scratch = max(scratch, self._threads * max(map(decoder.scratch_bytes, headers, sizes), default=0))
        return size, scratch

    def start(self, batch: Batch) -> None:
        """Gather the batch now, and submit it to the later stages, the last of which finishes it.

        Every job ends in `Batch.finished` or `Batch.fail`, whatever it raises.
        """
        plan = batch.plan
        count = len(plan.samples)
        images: dict[str, list[memoryview]] = {}
        batch.columns = dict.fromkeys(self._options.names)
        name = ""
        try:
            places = self._arena.locate(plan.tickets, plan.rows) if self._options.streamed else plan.rows
            for name, layout in self._options.streamed.items():
                self._gather(batch, name, layout, places, images)
            for name, values in self._options.resident.items():
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
        """Let the threads and processes end."""
        self._closed = True
        for threads in (self._decode, *self._transform):
            threads.close()
        for process in self._processes:
            process.close()

    def release_processes(self) -> list[TransformProcess]:
        """Return the transform processes after the last batch, for the next pass; `close` does not end them."""
        processes, self._processes = self._processes, []
        return processes

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for each thread; return whether all have ended."""
        return all(threads.join(seconds) for threads in (self._decode, *self._transform))

    def _gather(
        self, batch: Batch, name: str, layout: FieldLayout, places: Ints, images: dict[str, list[memoryview]]
    ) -> None:
        """Put the column of a field into the batch, or its encoded items into `images`."""
        plan, field = batch.plan, layout.field
        if layout.codec == ARRAYS and field.fixed:
            lease = partial(self._buffers.lease, usual=LIVE_BATCHES)
            batch.columns |= self._arena.regions[name].gather(places, lease, (self._options.seed, plan.epoch))
            return
        if field.fixed:
            out = self._buffers.lease((len(plan.samples), *field.shape), field.dtype, LIVE_BATCHES)
            self._arena.take(name, places, out)
            batch.columns[name] = out
            return
        items = self._arena.chunks[name].items(places)
        if name in self._config.decoders:
            images[name] = items
        else:
            column = partial(items_to_column, name, field, buffers=self._buffers, pack=self._config.packs.get(name))
            if name not in self._config.packs or len(items) <= plan.step_rows:
                batch.columns[name] = column(items, plan.samples)
                return
            steps = (slice(at, at + plan.step_rows) for at in range(0, len(items), plan.step_rows))
            batch.columns[name] = PackedSteps([column(items[step], plan.samples[step]) for step in steps])

    def _start_decode(self, batch: Batch, images: Mapping[str, Sequence[memoryview]]) -> None:
        parts = _divide(len(batch.plan.samples), 4 * self._threads)
        crops = {name: np.zeros((len(items), 7), np.int64) for name, items in images.items() if not self._is_mask(name)}
        finish_part = _countdown(len(parts) * len(crops), partial(self._finish_decode, batch, crops))
        for decode in [self._image_decoder(batch, name, images, crop) for name, crop in crops.items()]:
            for part in parts:
                self._decode.submit(partial(self._decode_part, decode, part, finish_part), batch.fail)

    def _is_mask(self, name: str) -> bool:
        return self._config.decoders[name].mask

    def _image_decoder(
        self, batch: Batch, name: str, images: Mapping[str, Sequence[memoryview]], crops: Ints
    ) -> Callable[[int], None]:
        """Put the column of an image field into the batch, and that of its masks.

        Returns a function that decodes the image of one row, and its mask with the same crop.
        """
        plan, decoder, items = batch.plan, self._config.decoders[name], images[name]
        samples = plan.samples.tolist()
        out: list[NDArray[Any] | None] | NDArray[Any] = [None] * len(items)
        if self._options.stack_images or decoder.options.size is not None:
            shape = decoder.shape(items[0], samples[0])
            out = self._buffers.lease((len(items), *shape), decoder.dtype, LIVE_BATCHES)
        draws = decoder.draws(self._options.seed, plan.epoch, plan.positions) or [[]] * len(items)
        batch.columns[name] = out[..., 0] if decoder.mask and isinstance(out, np.ndarray) else out
        masks = decoder.options.masks
        decode_mask = None if masks is None else self._image_decoder(batch, masks, images, crops)

        def decode(i: int) -> None:
            image = decoder.decode(items[i], samples[i], out[i], draws[i], crops[i])
            if isinstance(out, list):
                out[i] = image[..., 0] if decoder.mask else image
            if decode_mask is not None:
                decode_mask(i)

        return decode

    def _finish_decode(self, batch: Batch, crops: Mapping[str, Ints]) -> None:
        """Move boxes and key points with their images, and add the columns of what is left of them, and of crops."""
        for name, crop_and_size in crops.items():
            options, crop = self._config.decoders[name].options, crop_and_size[:, :5].copy()
            if options.boxes is not None:
                move = partial(move_boxes, size=options.size, form=options.box_format)
                batch.columns |= _moved(options.boxes, batch.columns, crop, move)
            if options.keypoints is not None:
                batch.columns |= _moved(options.keypoints, batch.columns, crop, partial(move_points, size=options.size))
            if options.with_crop:
                batch.columns[f"{name}_crop"] = crop
        self._start_transform(batch)

    def _decode_part(self, decode: Callable[[int], None], part: range, finish_part: Job) -> None:
        begin = time.thread_time()
        for i in part:
            if self._closed:
                return
            decode(i)
        self._counters.add(decode_seconds=time.thread_time() - begin)
        finish_part()

    def _start_transform(self, batch: Batch) -> None:
        count = len(batch.plan.samples)
        if self._options.transform is None or not count:
            batch.finished.set()
            return
        samples = rows_of(batch.columns, count)
        parts = _divide(count, len(self._transform))
        finish_part = _countdown(len(parts), partial(self._finish_transform, batch, samples))
        for worker, part in enumerate(parts):
            job = partial(self._transform_part, batch.plan, samples, part, worker, finish_part)
            self._transform[worker].submit(job, batch.fail)

    def _transform_part(
        self, plan: BatchPlan, samples: list[Sample], part: range, worker: int, finish_part: Job
    ) -> None:
        """Replace the samples of a part by the transformed ones."""
        rows = slice(part.start, part.stop)
        keys = [RngKey(self._options.seed, plan.epoch, position) for position in plan.positions[rows].tolist()]
        numbers = plan.samples[rows].tolist()
        begin = time.perf_counter()
        if self._processes:
            samples[rows] = self._processes[worker].run(samples[rows], keys, numbers)
        else:
            generator = "" if self._config.tensors is None else self._config.tensors.generator
            transform, with_rng = self._held_transform(), self._with_rng
            samples[rows] = apply(transform, samples[rows], keys, numbers, generator, with_rng=with_rng)
        self._counters.add(transform_seconds=time.perf_counter() - begin)
        finish_part()

    def _held_transform(self) -> Transform:
        held = None if self._options.transform is None else self._options.transform()
        if held is None:
            raise EngineError("the dataset of this pass is gone", "keep the dataset while you iterate")
        return held.call

    def _finish_transform(self, batch: Batch, samples: Sequence[Sample]) -> None:
        numbers, tensors = batch.plan.samples.tolist(), self._config.tensors
        if self._options.batched:
            batch.columns = collate(samples, numbers, tensors, self._ragged)
        else:
            batch.singles = [collate([one], [number], tensors) for one, number in zip(samples, numbers, strict=True)]
        batch.finished.set()


def _moved(name: str, columns: Mapping[str, Any], crops: Ints, move: Callable[..., Any]) -> dict[str, Any]:
    """Return the moved column of a field of boxes or points, and the column of what is valid."""
    column = columns[name]
    if not isinstance(column, Ragged):
        return dict(zip((name, f"{name}_valid"), move(column, crops), strict=True))
    values, valid = move(column.values, np.repeat(crops, np.diff(column.offsets), axis=0))
    return {name: Ragged(values, column.offsets), f"{name}_valid": Ragged(valid, column.offsets)}


def _join_at_exit(workers: Sequence[WorkerThreads]) -> None:
    for threads in workers:
        threads.close()
    if threading.main_thread().ident == threading.get_ident():  # at exit: a deleted object has no running threads
        for threads in workers:
            threads.join(EXIT_SECONDS)


def _countdown(count: int, callback: Job) -> Job:
    """Return a function whose `count`-th call calls `callback`, in the same thread."""
    remaining = iter(range(count - 1, -1, -1))  # `next` of it is atomic

    def count_down() -> None:
        if not next(remaining):
            callback()

    return count_down


def _divide(count: int, parts: int) -> list[range]:
    """Divide [0, count) into at most `parts` ranges of nearly equal length, none of them empty."""
    parts = min(count, parts)
    edges = [count * i // parts for i in range(parts + 1)] if parts else []
    return [range(a, b) for a, b in pairwise(edges)]
