"""Turns slots into finished batches: gather, decode, transform, by jobs of the executor.

What touches the bytes of samples is a function at the end of this module, which the executor calls.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise, repeat, starmap
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.budget import LIVE_BATCHES
from streamloader.engine.executor import Calls, Executor, Job, OnError, Threads, Workers
from streamloader.engine.faults import Fault, detached, empty_like, fill, fill_samples, replacements
from streamloader.engine.gather import Copy, copy_all, part_of
from streamloader.engine.memory import Memory, Residence
from streamloader.engine.messages import Callback, all_bytes
from streamloader.engine.residence import Chunks, Rows
from streamloader.engine.transform import (
    Labels,
    Ragged,
    Sample,
    Transform,
    Transformed,
    apply,
    collate,
    load_parts,
    rows_of,
    share_transform,
    transform_samples,
)
from streamloader.errors import DecodeError, EngineError, StreamloaderError, wrapped
from streamloader.images.targets import move_boxes, move_points
from streamloader.options import MIB, OnBadSample, Pack
from streamloader.order.schedule import BatchPlan, Ints
from streamloader.storage.process import finalize

if TYPE_CHECKING:
    from streamloader.images.decode import Header, ImageDecoder


Ended = Callable[[object, BaseException | None], object]  # called with the result of a job, or with its error


@dataclass
class Batch:
    """A batch in the making: `columns` by field, complete or failed once `finished` is set.

    A column is an ndarray, a list or a `Ragged`; a tuple has a packed one for each step. `copied` is set before
    `finished`, once the blocks are not needed.
    `singles`: the columns of each sample, of one row, if transformed samples are not batched.
    `faults`: its bad samples, by row, and `blank` the rows that have no values.
    `permits`: the number of `READY_BATCHES` that it counts as; more than one if it is much larger than the mean.
    `leases`: what keeps the encoded images valid until they are decoded.
    """

    plan: BatchPlan
    columns: dict[str, Any] = field(default_factory=dict)
    singles: Sequence[dict[str, Any]] | None = None
    error: StreamloaderError | None = None
    faults: dict[int, Fault] = field(default_factory=dict)
    blank: set[int] = field(default_factory=set)
    permits: int = 1
    leases: list[Any] = field(default_factory=list)
    copied: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    _dropped: bool = False

    def fail(self, error: BaseException) -> None:
        """Finish the batch with its first error; other jobs of it may still be running."""
        first = ", ".join(map(str, self.plan.samples[:3].tolist()))
        self.error = self.error or wrapped(error, f"making the batch of samples {first}, ...")
        self.leases = []
        if self._dropped:
            self.error = None
        self.copied.set()
        self.finished.set()

    def leave_out(self, row: int, name: str, error: StreamloaderError) -> None:
        """Record that the sample of a row is bad in a field, or "" for the transform, so the row has no values."""
        self.faults.setdefault(row, (int(self.plan.samples[row]), name, error))
        self.blank.add(row)

    def drop(self) -> None:
        """Ignore past and later errors of the batch: it will not be returned."""
        self._dropped = True
        self.error = None


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
    return column[number] if type(column) is tuple else _of_rows(column, first, stop)


def _of_rows(column: Any, first: int, stop: int) -> Any:
    if not isinstance(column, Ragged):
        return column[first:stop]
    edges = column.offsets[first : stop + 1]
    return Ragged(column.values[edges[0] : edges[-1]], edges - edges[0])


# The images of a field: their decoder, where each is in the arena (first byte, size), and the array that gets them
# decoded, None if their sizes differ; of images with views an array for each name of these.
Encoded = tuple["ImageDecoder", Ints, "NDArray[Any] | tuple[NDArray[Any], ...] | None"]


def decode_images(
    fields: Sequence[Encoded],
    rows: tuple[Ints, Ints, Ints],
    key: tuple[int, int],
    allocate: Callable[..., NDArray[Any]],
    tolerant: bool,
) -> tuple[float, dict[int, tuple[str, StreamloaderError]]]:
    """Decode the images of some rows, those of a row together, since a mask is cropped as its image.

    `rows`: sample numbers, positions, and crops, which the images write and their masks read. `key`: (seed, epoch) of
    random crops. Images of different sizes are decoded into memory from `allocate(shape, dtype)`. Return the processor
    time, and the (field, error) of each row that does not decode, if it is `tolerant`; otherwise raises the first.
    """
    begin, memory = time.thread_time(), all_bytes().data
    bad: dict[int, tuple[str, StreamloaderError]] = {}
    samples, positions, crops = rows
    columns = [
        zip(
            spans.tolist(),
            decoder.draws(*key, positions) or repeat(()),
            repeat(None) if out is None else zip(*out, strict=True) if isinstance(out, tuple) else out,
            strict=False,
        )
        for decoder, spans, out in fields
    ]
    for row, (sample, crop, *images) in enumerate(zip(samples.tolist(), crops, *columns, strict=True)):
        decoder, begun = fields[0][0], 0
        try:
            for (decoder, _, _), ((start, size), draws, out) in zip(fields, images, strict=True):
                data = memory[start : start + size]
                target = allocate(decoder.shape(data, sample), decoder.dtype) if out is None else out
                begun += 1
                if isinstance(target, tuple):
                    decoder.decode_views(data, sample, target, draws)
                else:
                    decoder.decode(data, sample, target, draws, crop)
        except DecodeError as error:
            if not tolerant:
                raise
            bad[row], crop[:] = (decoder.name, detached(error)), NO_CROP
            for decoder, _, out in fields[begun:]:
                if out is None:
                    allocate((1, 1, decoder.options.channels), decoder.dtype)
    return time.thread_time() - begin, bad


# of an image that does not decode: its first pixel
NO_CROP = (0, 0, 1, 1, 0, 1, 1)


@dataclass(frozen=True)
class LoaderConfig:
    """The options that turn samples into batches, and the memory budget (`memory` in bytes, None for the default).

    `decoders`: the image fields to decode. `packs`: the ragged fields to pack. `workers` processes do the work, threads
    if 0. `spawns`: they may import the script of this process for its transform; otherwise such a transform runs in a
    thread. `on_error`: what takes the place of bad samples, see `faults.py`. `stall_seconds`: a wait for a batch that
    is logged. `tensors`: the module that handles tensors which a transform returns, see `transform.py`.
    """

    decoders: Mapping[str, ImageDecoder] = field(default_factory=dict)
    packs: Mapping[str, Pack] = field(default_factory=dict)
    transform: Transform | None = None
    workers: Workers = 0
    spawns: bool = True
    memory: int | None = None
    on_error: OnBadSample = "raise"
    stall_seconds: float = math.inf
    ranks_here: int = 1
    rank: int = 0
    tensors: str = ""

    @property
    def tolerant(self) -> bool:
        """Whether bad samples do not end the pass."""
        return self.on_error != "raise"


# Batches in the making beside the usual ones, for workers that would wait for the slowest part of the one before.
MORE_BATCHES = 2
# With workers, the bytes of a batch that a thread copies at least.
PART_BYTES = 8 * MIB
# Fewer bytes are copied here: a message to a worker and its result take longer.
SMALL_BYTES = 64 << 10
# Images that a thread decodes at least, one after another.
PART_IMAGES = 16
# How long the interpreter's exit waits for the image or the transform that a thread is running.
EXIT_SECONDS = 5.0


class Stages:
    """Gathers, decodes and transforms batches, which have the columns `names`, in this order.

    `resident` fields are complete arrays in memory; others are in blocks. `seed` keys the random numbers of crops and
    the transform, with the plan's epoch and positions. `batched`: samples form batches.

    Threads hold this object, never the `Engine`, and a weak reference to the transform, so they do not keep its owner
    alive.
    """

    def __init__(
        self,
        config: LoaderConfig,
        names: Sequence[str],
        memory: Memory,
        executor: Executor,
        on_error: OnError,
        *,
        resident: Mapping[str, Rows],
        seed: int,
        batched: bool,
    ) -> None:
        self._config, self._resident = replace(config, transform=None), resident
        self._executor, self._seed, self._batched = executor, seed, batched
        self._transform = None if config.transform is None else weakref.ref(config.transform)
        self.transforms = config.transform is not None
        self.stall_seconds, self.rank = config.stall_seconds, config.rank
        self._stack_tensors = resolve_name(f"{config.tensors}:stack_tensors") if config.tensors else None
        # whether the images of a batch are one array, so that they must have one size, and not a list of arrays
        self._stacks_images = batched and not self.transforms
        self._blocks = memory
        self._buffers = memory.buffers
        self._counters = memory.counters
        self._threads = executor.workers or memory.budget.cores
        fields, decoders = memory.residences.values(), config.decoders
        columns = [decoders[name].columns if name in decoders else (name,) for name in names]
        self._names = list(chain.from_iterable(columns))
        self._gathered = [field for field in fields if field.name not in decoders]
        self._encoded = {field.name: field for field in fields if isinstance(field, Chunks) and field.name in decoders}
        self._ragged = [field.name for field in fields if field.field.kind == "ragged"]
        self.decodes = bool(decoders)
        self.more_batches = MORE_BATCHES if executor.workers else 0
        self._decoders = {name: executor.share(decoder) for name, decoder in decoders.items()}
        self._shared_transform: Transform | None = None
        if config.transform is not None and executor.workers:
            self._shared_transform = share_transform(executor, config.transform, spawns=config.spawns)
        alone = self._shared_transform is None
        self._counters.note(transformers=1 if alone else executor.workers)
        self._copying = executor.jobs("gather", executor.workers, on_error, begin_here=True)
        self._decoding = executor.jobs("decode", self._threads, on_error)
        # a transform that workers cannot load, and the columns of transformed samples
        self._here = Threads("transform", 1, on_error)
        self._empty_sample: Sample | None = None  # for a batch without good samples
        self._transforming = self._here if alone else executor.jobs("transform", executor.workers, on_error)
        # OpenCV, and most native code of a transform, aborts the process if it returns to an interpreter that has
        # ended, so the exit waits for these threads. The finalizer must not hold a reference to this object.
        finalize(self, _join_at_exit, [each for each in (self._decoding, self._here) if isinstance(each, Threads)])

    def variable_bytes(self, plan: BatchPlan) -> tuple[int, int]:
        """Return the bytes of a batch's variable-size columns, and the temporary bytes of decoding its images.

        The blocks must be loaded. Raises `DecodeError` for an image without a valid header.
        """
        slot_rows = self._blocks.locate(plan.tickets, plan.rows)
        size, scratch = sum(residence.variable_bytes(slot_rows) for residence in self._gathered), 0
        for name, decoder in self._config.decoders.items():
            items = self._encoded[name].items(slot_rows)
            unsized = decoder.fixed_bytes is None
            most = 1 if unsized and self._stacks_images else len(items)  # stacked ones have one size
            headers = list(islice(self._headers(decoder, items, plan), most))
            if unsized:  # otherwise the planned bytes of a batch include them
                pixels = sum(math.prod(header.size) for _, header in headers) * (len(items) // max(1, len(headers)))
                size += pixels * decoder.options.channels * np.dtype(decoder.dtype).itemsize
            scratch = max(scratch, self._threads * max(starmap(decoder.scratch_bytes, headers), default=0))
        return size, scratch

    def _headers(
        self, decoder: ImageDecoder, items: Sequence[memoryview], plan: BatchPlan
    ) -> Iterator[tuple[memoryview, Header]]:
        """Yield images with their headers. Raises `DecodeError` for an invalid one, unless bad samples are left out."""
        tolerated = (DecodeError,) if self._config.tolerant else ()
        for item, sample in zip(items, plan.samples.tolist(), strict=True):
            with suppress(*tolerated):
                yield item, decoder.measure(item, sample)

    def describe(self, batch: Batch) -> str:
        """Return what an unfinished batch waits for, in words."""
        samples, workers = ", ".join(map(str, batch.plan.samples[:3].tolist())), self._executor.workers
        works = "decoded or transformed" if self.decodes and self.transforms else "transformed"
        works = works if self.transforms else "decoded"
        state = works if batch.copied.is_set() else "copied"
        return f"samples {samples}, ... are being {state} by {f'{workers} workers' if workers else 'threads'}"

    def start(self, batch: Batch) -> None:
        """Make the columns of the batch, and submit it to the stages, the last of which finishes it.

        Without workers its rows are gathered now. Each job ends in `Batch.finished` or in `Batch.fail`.
        """
        plan = batch.plan
        batch.columns = dict.fromkeys(self._names)
        copies: list[Copy] = []
        name = ""
        try:
            slot_rows = self._blocks.locate(plan.tickets, plan.rows) if self._blocks.residences else plan.rows
            if self._config.tolerant:
                slot_rows = self._leave_out(batch, slot_rows)
                plan = batch.plan
            fields: list[tuple[Residence, Ints]] = [(rows, plan.samples) for rows in self._resident.values()]
            for residence, at in fields + [(residence, slot_rows) for residence in self._gathered]:
                name = residence.name
                columns, found = residence.gather(at, plan, self._buffers, self._seed)
                batch.columns |= columns
                copies += found
            self._copy(batch, copies, slot_rows)
        except StreamloaderError:
            raise
        except Exception as error:
            raise wrapped(error, f"gathering field {name!r}") from error

    def _leave_out(self, batch: Batch, slot_rows: Ints) -> Ints:
        """Record the rows without values. Return the slot rows, in "replace" those of other samples in their place."""
        plan = batch.plan
        for chunks in self._gathered:
            if isinstance(chunks, Chunks) and chunks.field.kind in ("text", "ragged"):
                for row, error in chunks.invalid(slot_rows, plan).items():
                    chunks.mark([row], detached(error))
        fields: list[tuple[Residence, Ints]] = [(rows, plan.samples) for rows in self._resident.values()]
        for residence, at in fields + [(residence, slot_rows) for residence in self._blocks.residences.values()]:
            for number, row in enumerate(at.tolist() if residence.bad else ()):
                if (problem := residence.bad.get(row)) is not None:
                    batch.leave_out(number, residence.name, problem)
        if not batch.blank or self._config.on_error != "replace":
            return slot_rows
        source = replacements(plan, batch.blank, self._seed)
        batch.plan = plan._replace(samples=plan.samples[source])
        batch.blank = {row for row in batch.blank if source[row] == row}
        return slot_rows[source]

    def close(self) -> None:
        """Let the threads end."""
        for jobs in (self._copying, self._decoding, self._here):
            jobs.close()
        if isinstance(self._transforming, Calls):
            self._transforming.close(wait=False)  # a slow one, unless it has ended and its results are copied

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for each kind of work; return whether all has ended."""
        return all(jobs.join(seconds) for jobs in (self._copying, self._decoding, self._here))

    def _copy(self, batch: Batch, copies: Sequence[Copy], slot_rows: Ints) -> None:
        """Copy the rows of a batch, with workers in parts and later unless it is small; then begin the next stage."""
        workers = self._executor.workers
        if not workers or (size := sum(copy.out.nbytes for copy in copies)) < SMALL_BYTES:
            copy_all(copies)
            self._copied(batch, slot_rows)
            return
        count = max(1, min(workers, size // PART_BYTES))
        ended = _countdown(batch, count, partial(self._copied, batch, slot_rows))
        for number in range(count):
            self._copying.submit(Job(copy_all, [part_of(copies, number, count)], ended))

    def _copied(self, batch: Batch, slot_rows: Ints) -> None:
        if self.decodes and len(slot_rows):
            self._start_decode(batch, slot_rows)
        else:
            self._start_transform(batch)
        batch.copied.set()

    def _start_decode(self, batch: Batch, slot_rows: Ints) -> None:
        # each part is two messages for a worker, which other batches keep busy
        most = self._threads if self._executor.workers else 4 * self._threads
        parts = _divide(len(slot_rows), max(1, min(most, len(slot_rows) // PART_IMAGES)))
        names = [name for name, decoder in self._config.decoders.items() if not decoder.mask]
        crops = {name: self._buffers.lease((len(slot_rows), 7), "int64") for name in names}
        ended = _countdown(batch, len(parts) * len(crops), partial(self._finish_decode, batch, crops))
        for fields, crop in [(self._images(batch, name, slot_rows), crop) for name, crop in crops.items()]:
            for part in parts:
                self._decode_part(batch, fields, crop, part, ended)

    def _images(self, batch: Batch, name: str, slot_rows: Ints) -> dict[str, Encoded]:
        """Put the columns of an image field and of its masks into the batch; return how to decode them."""
        plan, decoder, chunks = batch.plan, self._config.decoders[name], self._encoded[name]
        count, spans, out = len(slot_rows), chunks.table[slot_rows], None
        batch.leases += chunks.leases(slot_rows)

        def lease(shape: tuple[int, ...]) -> NDArray[Any]:
            return self._buffers.lease((count, *shape), decoder.dtype, LIVE_BATCHES)

        if decoder.options.views is not None:
            views = {column: lease(shape) for column, shape in decoder.view_shapes.items()}
            batch.columns |= views
            return {name: (self._decoders[name], spans, tuple(views.values()))}
        if self._stacks_images or decoder.options.size is not None:
            items = chunks.items(slot_rows)
            first = next(self._headers(decoder, items, plan), (items[0],))[0]
            out = lease(decoder.shape(first, int(plan.samples[0])))
        batch.columns[name] = [None] * count if out is None else out[..., 0] if decoder.mask else out
        images, masks = (self._decoders[name], spans, out), decoder.options.masks
        return {name: images} | ({} if masks is None else self._images(batch, masks, slot_rows))

    def _decode_part(self, batch: Batch, fields: Mapping[str, Encoded], crops: Ints, part: range, ended: Ended) -> None:
        plan, at = batch.plan, slice(part.start, part.stop)
        made: list[NDArray[Any]] = []

        def allocate(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
            made.append(self._buffers.lease(shape, dtype))
            return made[-1]

        def done(result: Any, error: BaseException | None) -> None:
            seconds, bad = (0.0, {}) if error is not None else result
            for row, (field_name, problem) in bad.items():
                batch.leave_out(part.start + row, field_name, problem)
            unsized = [name for name, (_, _, out) in fields.items() if out is None]
            for number, name in enumerate(unsized if error is None else ()):
                arrays = made[number :: len(unsized)]
                mask = self._config.decoders[name].mask
                batch.columns[name][at] = [array[..., 0] if mask else array for array in arrays]
            self._counters.add(decode_seconds=seconds)
            ended(None, error)

        images = [(decoder, spans[at], _rows_of(out, at)) for decoder, spans, out in fields.values()]
        rows, key = (plan.samples[at], plan.positions[at], crops[at]), (self._seed, plan.epoch)
        arguments = images, rows, key, Callback(allocate), self._config.tolerant
        self._decoding.submit(Job(decode_images, arguments, done, repeats=made.clear))

    def _finish_decode(self, batch: Batch, crops: Mapping[str, Ints]) -> None:
        """Move boxes and key points with their images, and add the columns of what is left of them, and of crops."""
        batch.leases = []
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

    def _start_transform(self, batch: Batch) -> None:
        count = len(batch.plan.samples)
        if not self.transforms or not count:
            self._finish(batch)
            return
        parts = _divide(count, self._transforming.count)
        made: dict[int, Any] = {}
        memory: dict[str, NDArray[Any]] = {}
        ended = _countdown(batch, len(parts), partial(self._end_transform, batch, made, memory))
        for part in parts:
            self._transform_part(batch, part, made, memory, ended)

    def _transform_part(
        self, batch: Batch, part: range, made: dict[int, Any], memory: dict[str, NDArray[Any]], ended: Ended
    ) -> None:
        """Begin to transform a part of a batch, which gives `made`, by its first row, its samples and their memory.

        Those of workers are a `Part`, whose large values are in rows of the columns `memory`. The seconds include those
        in which a transform waits for others of its worker.
        """
        columns = {name: _of_rows(column, part.start, part.stop) for name, column in batch.columns.items()}
        plan = batch.plan.part(part.start, part.stop, 0)
        blank = [row - part.start for row in batch.blank if row in part] if self._config.tolerant else None
        labels = [(self._seed, plan.epoch, at) for at in plan.positions.tolist()], plan.samples.tolist(), blank
        tensors, lease, begin = self._config.tensors, self._buffers.lease, 0.0
        rows: dict[str, NDArray[Any]] = {}

        def begins() -> None:
            nonlocal begin
            begin = time.perf_counter()

        def allocate(wanted: Sequence[tuple[str, tuple[int, ...], str]]) -> list[NDArray[Any]]:
            for name, shape, dtype in wanted:
                if name not in memory:
                    memory[name] = lease((len(batch.plan.samples), *shape), dtype, LIVE_BATCHES)
                of_column = memory[name][part.start : part.stop]
                alike = of_column.shape[1:] == shape and of_column.dtype == dtype
                rows[name] = of_column if alike else lease((len(part), *shape), dtype)
            return [rows[name] for name, *_ in wanted]

        def done(result: Any, error: BaseException | None) -> None:
            made[part.start] = result, rows
            self._counters.add(transform_seconds=time.perf_counter() - begin)
            ended(None, error)

        if self._shared_transform is not None:
            arguments = self._shared_transform, columns, labels, tensors, Callback(allocate)
            job = Job(transform_samples, arguments, done, begins)
        else:
            job = Job(self._apply, (columns, labels), done, begins)
        self._transforming.submit(job)

    def _apply(self, columns: Mapping[str, Any], labels: Labels) -> Transformed:
        own = rows_of(columns, len(labels[1]))
        return apply(self._transform_of_owner(), own, labels, self._config.tensors)

    def _end_transform(self, batch: Batch, made: Mapping[int, Any], memory: Mapping[str, NDArray[Any]]) -> None:
        parts = [made[first] for first in sorted(made)]
        for first, ((*_, errors), _) in made.items():
            for row, error in errors.items():
                batch.leave_out(first + row, "", error)
        ended = _countdown(batch, 1, partial(self._finish, batch))
        self._here.submit(Job(self._collate, (batch, parts, memory), ended))

    def _transform_of_owner(self) -> Transform:
        held = None if self._transform is None else self._transform()
        if held is None:
            raise EngineError("the dataset of this pass is gone", "keep the dataset while you iterate")
        return held

    def _collate(self, batch: Batch, parts: list[Any], memory: Mapping[str, NDArray[Any]]) -> None:
        """Make the columns of transformed samples. `memory`: of columns, with the large values of parts."""
        numbers, stack = batch.plan.samples.tolist(), self._stack_tensors
        if self._shared_transform is None:
            samples, complete = [one for (part, _), _ in parts for one in part], dict[str, Any]()
        else:
            whole = {name: column for name, column in memory.items() if name not in self._ragged}
            samples, complete = load_parts(parts, whole if self._batched else {})
        samples = self._with_placeholders(batch, samples, complete)
        if self._batched:
            batch.columns = collate(samples, numbers, stack, self._ragged, complete)
        else:
            batch.singles = [collate([one], [number], stack) for one, number in zip(samples, numbers, strict=True)]
            batch.columns = {}

    def _with_placeholders(
        self, batch: Batch, samples: Sequence[Sample | None], complete: Mapping[str, Any]
    ) -> list[Sample]:
        """Return the samples with others in place of missing ones, which `_finish` removes.

        Raises the error of the first bad sample if there never was another one.
        """
        row = next((row for row, sample in enumerate(samples) if sample is not None), None)
        other = self._empty_sample if row is None else samples[row]
        if other is None:
            raise batch.faults[min(batch.faults)][2]
        if self._config.tolerant and self._empty_sample is None:
            columns = {name: complete[name][row] for name in complete}
            self._empty_sample = {name: empty_like(value) for name, value in (other | columns).items()}
        return [other if sample is None else sample for sample in samples]

    def _finish(self, batch: Batch) -> None:
        """Fill the rows of bad samples, and add the column that tells which they are."""
        kind, plan = self._config.on_error, batch.plan
        if kind != "raise":
            source, bad = np.arange(len(plan.rows)), np.zeros(len(plan.rows), np.bool_)
            if batch.blank:
                source = replacements(plan, batch.blank, self._seed) if kind == "replace" else source
                blank = sorted(row for row in batch.blank if source[row] == row)
                batch.columns = fill(batch.columns, source, blank)
                batch.singles = batch.singles and fill_samples(batch.singles, blank)
                batch.blank, valid = set(blank), plan.valid.copy()
                valid[blank] = False
                batch.plan = plan._replace(samples=plan.samples[source], valid=valid)
            bad[list(batch.faults if kind == "mask" else batch.faults.keys() - batch.blank)] = True
            batch.columns["error" if kind == "mask" else "replaced"] = bad
        batch.finished.set()


def _countdown(batch: Batch, count: int, then: Callable[[], object]) -> Ended:
    """Return what ends `count` jobs of a batch: the last one calls `then`, and an error fails the batch."""
    left = iter(range(count - 1, -1, -1))  # `next` of it is atomic

    def end(_: object, error: BaseException | None) -> None:
        try:
            if error is None and not next(left):
                then()
        except BaseException as problem:  # noqa: BLE001 - the consumer waits for the batch, so it must finish
            error = problem
        if error is not None:
            batch.fail(error)
        del error  # its traceback may hold this frame

    return end


def _rows_of(out: Any, at: slice) -> Any:
    """Return rows of an array of decoded images, or of each of several."""
    return tuple(each[at] for each in out) if isinstance(out, tuple) else None if out is None else out[at]


def _moved(name: str, columns: Mapping[str, Any], crops: Ints, move: Callable[..., Any]) -> dict[str, Any]:
    """Return the moved column of a field of boxes or points, and the column of what is valid."""
    column = columns[name]
    if not isinstance(column, Ragged):
        return dict(zip((name, f"{name}_valid"), move(column, crops), strict=True))
    values, valid = move(column.values, np.repeat(crops, np.diff(column.offsets), axis=0))
    return {name: Ragged(values, column.offsets), f"{name}_valid": Ragged(valid, column.offsets)}


def _join_at_exit(here: Sequence[Threads]) -> None:
    for threads in here:
        threads.close()
    if threading.main_thread().ident == threading.get_ident():  # at exit: a deleted object has no running threads
        for threads in here:
            threads.join(EXIT_SECONDS)


def _divide(count: int, parts: int) -> list[range]:
    """Divide [0, count) into at most `parts` ranges of nearly equal length, none of them empty."""
    parts = min(count, parts)
    edges = [count * i // parts for i in range(parts + 1)] if parts else []
    return [range(a, b) for a, b in pairwise(edges)]
