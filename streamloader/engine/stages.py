"""Turns slots into finished batches: gather, decode, transform, by jobs of the executor.

What touches the bytes of samples is a function at the end of this module, which the executor calls.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise, repeat
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.budget import LIVE_BATCHES
from streamloader.engine.collate import (
    LENGTHS,
    collate,
    collate_rows,
    divided,
    made,
    pad_arrays,
    padded_columns,
    padded_sizes,
    place,
)
from streamloader.engine.executor import Calls, Executor, Job, OnError, Threads, Workers, close_all
from streamloader.engine.faults import Fault, detached, empty_like, fill, fill_samples, replacements
from streamloader.engine.gather import Copy, copy_all, part_of
from streamloader.engine.memory import Memory, Residence
from streamloader.engine.messages import Callback, all_bytes
from streamloader.engine.packing import FindItems, gather_rows
from streamloader.engine.residence import Chunks, Rows
from streamloader.engine.transform import (
    Labels,
    Ragged,
    Sample,
    Transform,
    Transformed,
    apply,
    load_parts,
    rows_of,
    share_transform,
    transform_samples,
)
from streamloader.errors import DecodeError, EngineError, StreamloaderError, message, wrapped
from streamloader.images.targets import move_boxes, move_points
from streamloader.options import MIB, Collate, OnBadSample, Pack, Pad
from streamloader.order.schedule import BatchPlan, Ints
from streamloader.storage.process import Finalizer, finished_before_exit, wait_at_exit

if TYPE_CHECKING:
    from streamloader.images.decode import Header, ImageDecoder


Ended = Callable[[object, BaseException | None], object]  # called with the result of a job, or with its error


@dataclass
class Batch:
    """A batch in the making: `columns` by field, complete or failed once `finished` is set.

    A column is an ndarray, a list or a `Ragged`; a tuple has a packed one for each step. `copied` is set before
    `finished`, once the blocks are not needed.
    `singles`: the columns of each sample, of one row, if transformed samples are not batched.
    `faults`: its bad samples, by row; `blank`: the rows that have no values yet; `masked`: those that get none.
    `permits`: the number of `READY_BATCHES` that it counts as; more than one if it is much larger than the mean.
    `leases`: what keeps the encoded images valid until they are decoded.
    """

    plan: BatchPlan
    columns: dict[str, Any] = field(default_factory=dict)
    singles: Sequence[dict[str, Any]] | None = None
    error: StreamloaderError | None = None
    faults: dict[int, Fault] = field(default_factory=dict)
    blank: set[int] = field(default_factory=set)
    masked: set[int] = field(default_factory=set)
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
        self.faults.setdefault(row, (int(self.plan.samples[row]), name, error, True))
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


# The images of a field: their decoder, where each is in the arena (first byte, size), the arrays that get them decoded
# (of images with views a tuple of these), and for padded ones their sizes (height, width) and how they are padded.
Encoded = tuple["ImageDecoder", Ints, Any, Ints | None, Pad]


def decode_images(
    fields: Sequence[Encoded], rows: tuple[Ints, Ints, Ints], key: tuple[int, int], tolerant: bool
) -> tuple[float, dict[int, tuple[str, StreamloaderError]]]:
    """Decode the images of some rows, those of a row together, since a mask is cropped as its image.

    `rows`: sample numbers, positions, and crops, which the images write and their masks read. `key`: (seed, epoch) of
    random crops. Return the processor time, and the (field, error) of each row that does not decode, if it is
    `tolerant`; otherwise raises the first.
    """
    begin, memory = time.thread_time(), all_bytes().data
    bad: dict[int, tuple[str, StreamloaderError]] = {}
    samples, positions, crops = rows
    columns = [
        zip(
            spans.tolist(),
            decoder.draws(*key, positions) or repeat(()),
            zip(*outs, strict=True) if isinstance(outs, tuple) else outs,
            repeat(None) if sizes is None else sizes.tolist(),
            strict=False,
        )
        for decoder, spans, outs, sizes, _ in fields
    ]
    with finished_before_exit() as stop_if_ending:
        for row, (sample, crop, *images) in enumerate(zip(samples.tolist(), crops, *columns, strict=True)):
            stop_if_ending()
            decoder = fields[0][0]
            try:
                for (decoder, *_, pad), ((start, size), draws, out, inside) in zip(fields, images, strict=True):
                    data = memory[start : start + size]
                    if isinstance(out, tuple):
                        decoder.decode_views(data, sample, out, draws)
                    elif inside is None:
                        decoder.decode(data, sample, out, draws, crop)
                    else:
                        _decode_padded(decoder, (data, sample, draws, crop), out, inside, pad)
            except DecodeError as error:
                if not tolerant:
                    raise
                bad[row], crop[:] = (decoder.name, detached(error)), NO_CROP[: len(crop)]
    return time.thread_time() - begin, bad


def _decode_padded(
    decoder: ImageDecoder, image: tuple[Any, ...], out: NDArray[Any], inside: Sequence[int], pad: Pad
) -> None:
    """Decode an image of the size `inside` into a larger array, and fill what is around it."""
    data, sample, draws, crop = image
    rows, columns = place(pad, inside, out.shape[:2])
    for around in (out[: rows.start], out[rows.stop :], out[rows, : columns.start], out[rows, columns.stop :]):
        around[...] = pad.value
    part = out[rows, columns]
    whole = part.flags.c_contiguous  # decoders write whole images
    pixels = part if whole else decoder.scratch.array("padded", part.nbytes).view(part.dtype).reshape(part.shape)
    decoder.decode(data, sample, pixels, draws, crop)
    if not whole:
        part[...] = pixels


# of an image that does not decode: its first pixel, which no device decodes
NO_CROP = (0, 0, 1, 1, 0, 1, 1, 0, 0, 0)
# The images that a device may decode: where each is in the arena, the pixels of those that were decoded by the CPU, and
# the crops, which tell the two apart; see `ImageDecoder.decode`.
OnDevice = tuple[Ints, NDArray[np.uint8], Ints]


@dataclass(frozen=True)
class LoaderConfig:
    """The options that turn samples into batches, and the memory budget (`memory` in bytes, None for the default).

    `decoders`: the image fields to decode. `packs`: the ragged fields to pack. `rules`: how values of different sizes
    form batches, by field. `collate`: the function that makes batches of samples. `workers` processes do the work,
    threads if 0. `spawns`: they may import the script of this process for its functions; otherwise such a function runs
    in a thread. `on_error`: what takes the place of bad samples, see `faults.py`. `stall_seconds`: a wait for a batch
    that is logged. `tensors`: the module that handles tensors which a transform returns, see `transform.py`. `ahead`:
    batches that are copied to a device at once. `page_lock`: called with new memory of batches.
    """

    decoders: Mapping[str, ImageDecoder] = field(default_factory=dict)
    packs: Mapping[str, Pack] = field(default_factory=dict)
    transform: Transform | None = None
    rules: Mapping[str, Collate] = field(default_factory=dict)
    collate: Transform | None = None
    workers: Workers = 0
    spawns: bool = True
    memory: int | None = None
    on_error: OnBadSample = "raise"
    stall_seconds: float = math.inf
    ranks_here: int = 1
    rank: int = 0
    tensors: str = ""
    ahead: int = 0
    page_lock: Callable[[NDArray[np.uint8]], object] | None = None

    @property
    def pads(self) -> dict[str, Pad]:
        """How ragged fields are padded when they are gathered: not before they are moved, transformed or collated."""
        if self.transform is not None or self.collate is not None:
            return {}
        return {name: rule for name, rule in self.rules.items() if isinstance(rule, Pad) and name not in self.moved}

    @property
    def moved(self) -> set[str | None]:
        """The fields of boxes and key points that move with their images."""
        options = [decoder.options for decoder in self.decoders.values()]
        return {name for each in options for name in (each.boxes, each.keypoints)}

    @property
    def rows(self) -> dict[str, Pack]:
        """How documents are packed into rows of a fixed shape, which are the samples; empty unless they are."""
        return {name: pack for name, pack in self.packs.items() if pack.fit is not None}

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
# Added to the position of the first sample of a batch: the key of the random numbers of its `collate`.
COLLATE = 1 << 63


class Stages:
    """Gathers, decodes and transforms batches, which have the columns `names`, in this order.

    `resident` fields are complete arrays in memory, with functions from samples to their rows; others are in blocks.
    `seed` keys the random numbers of crops and the transform, with the plan's epoch and positions. `batched`: samples
    form batches. `samples_before`: how many samples the run had on all ranks before a plan, for images whose size
    changes.

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
        resident: Mapping[str, tuple[Rows, Callable[[Ints], Ints]]],
        seed: int,
        batched: bool,
    ) -> None:
        self.pads = config.pads
        self._config, self._resident = replace(config, transform=None, collate=None), resident
        self._executor, self._seed, self._batched = executor, seed, batched
        self.runtime = executor.runtime
        self._transform = None if config.transform is None else weakref.ref(config.transform)
        self._collate_function = None if config.collate is None else weakref.ref(config.collate)
        self.transforms = config.transform is not None
        self.stall_seconds, self.rank = config.stall_seconds, config.rank
        self._stack_tensors = resolve_name(f"{config.tensors}:stack_tensors") if config.tensors else None
        # whether the images of a batch are one array, so that they must have one size, unless a rule says otherwise
        self._stacks_images = batched and not self.transforms and config.collate is None
        self._blocks = memory
        self._buffers, self._counters = memory.buffers, memory.counters
        self._threads = executor.workers or memory.budget.cores
        fields, decoders = memory.residences.values(), config.decoders
        columns = [decoders[name].columns if name in decoders else (name,) for name in names]
        self._names = list(chain.from_iterable(columns))
        self._gathered = [field for field in fields if field.name not in decoders]
        self._encoded = {field.name: field for field in fields if isinstance(field, Chunks) and field.name in decoders}
        ragged = [field.name for field in fields if field.field.kind == "ragged"]
        self._ragged = [*ragged, *(f"{name}_valid" for name in config.moved.intersection(ragged))]
        self.decodes = bool(decoders)
        self.finished_at = -math.inf  # when the last batch was finished
        self.more_batches = MORE_BATCHES if executor.workers else 0
        self._decoders = {
            name: [(samples, each, executor.share(each)) for samples, each in decoder.by_samples or [(0, decoder)]]
            for name, decoder in decoders.items()
        }
        self.samples_before: Callable[[BatchPlan], int] = lambda _: 0
        self._shared_transform, self._shared_collate = (
            share_transform(executor, each, spawns=config.spawns) if each is not None and executor.workers else None
            for each in (config.transform, config.collate)
        )
        alone = self._shared_transform is None
        self._counters.note(transformers=1 if alone else executor.workers)
        self._copying = executor.jobs("gather", executor.workers, on_error, begin_here=True)
        self._decoding = executor.jobs("decode", self._threads, on_error)
        # a transform that workers cannot load, and the columns of transformed samples; or images, on a device
        self._here = Threads("transform", 1, on_error, executor.arena, self.runtime)
        self._on_device, self._warned = _device_decoders(config), False
        self._empty_sample: Sample | None = None  # for a batch without good samples
        # bytes of the padded columns of the last transformed batches, and of what the last ones are made of
        self._padded, self._inputs = deque[int](maxlen=LIVE_BATCHES), deque[int](maxlen=2)
        self.needed: Callable[[], int] = int  # the bytes of the blocks in use
        in_workers = not alone or self._shared_collate is not None
        self._transforming = executor.jobs("transform", executor.workers, on_error) if in_workers else self._here
        wait_at_exit()  # for OpenCV and native code of a transform
        Finalizer(self, close_all, *(each for each in (self._decoding, self._here) if isinstance(each, Threads)))

    def variable_bytes(self, plan: BatchPlan) -> tuple[int, int]:
        """Return the bytes of a batch's variable-size columns, and the temporary bytes of decoding its images.

        The blocks must be loaded. Raises `DecodeError` for an image without a valid header.
        """
        slot_rows = self._blocks.locate(plan.tickets, plan.rows)
        size, scratch = sum(each.variable_bytes(slot_rows, plan.step_rows) for each in self._gathered), 0
        for name, decoder in self._config.decoders.items():
            items = self._encoded[name].items(slot_rows)
            unsized = not decoder.is_sized
            rule = self._config.rules.get(name)
            most = 1 if unsized and self._stacks(name) else len(items)  # stacked ones have one size
            headers = list(islice(self._headers(decoder, items, plan), most))
            if unsized:  # otherwise the planned bytes of a batch include them
                pixels = sum(math.prod(header.size) for _, _, header in headers) * (len(items) // max(1, len(headers)))
                if isinstance(rule, Pad) and headers:
                    longest = (max(sizes) for sizes in zip(*(header.size for _, _, header in headers), strict=True))
                    pixels = len(items) * math.prod(rule.padded(size) or 0 for size in longest)
                size += pixels * decoder.options.channels * np.dtype(decoder.dtype).itemsize
            largest = max((decoder.scratch_bytes(item, header) for _, item, header in headers), default=0)
            scratch = max(scratch, self._threads * largest)
        sized = sum(decoder.fixed_bytes or 0 for decoder in self._config.decoders.values() if decoder.is_sized)
        self._inputs.append(size + sized * len(plan.rows))
        return size, scratch

    def padded_bytes(self) -> int:
        """Return the most bytes of padded columns of transformed batches with the columns that they are made of; or 0.

        A batch has both while its columns are made; then the next one may have been decoded already.
        """
        padded, inputs = [*self._padded], [*self._inputs]
        if not any(padded):
            return 0
        return max(sum(padded) + max(inputs, default=0), sum(padded[1 - LIVE_BATCHES :]) + sum(inputs))

    def _headers(
        self, decoder: ImageDecoder, items: Sequence[memoryview], plan: BatchPlan
    ) -> Iterator[tuple[int, memoryview, Header]]:
        """Yield (row, image, header). Raises `DecodeError` for an invalid one, unless bad samples are left out."""
        tolerated = (DecodeError,) if self._config.tolerant else ()
        for row, (item, sample) in enumerate(zip(items, plan.samples.tolist(), strict=True)):
            with suppress(*tolerated):
                yield row, item, decoder.measure(item, sample)

    def describe(self, batch: Batch) -> str:
        """Return what an unfinished batch waits for, in words."""
        samples, workers = ", ".join(map(str, batch.plan.samples[:3].tolist())), self._executor.workers
        works = "decoded or transformed" if self.decodes and self.transforms else "transformed"
        works = works if self.transforms else "decoded"
        state = works if batch.copied.is_set() else "copied"
        return f"samples {samples}, ... are being {state} by {f'{workers} workers' if workers else 'threads'}"

    def _stacks(self, name: str) -> bool:
        """Return whether the images of a field are stacked."""
        return self._stacks_images and name not in self._config.rules

    def start(self, batch: Batch) -> None:
        """Make the columns of the batch, and submit it to the stages, the last of which finishes it.

        Without workers its rows are gathered now. Each job ends in `Batch.finished` or in `Batch.fail`.
        """
        plan = begun = batch.plan
        batch.columns = dict.fromkeys(self._names)
        copies: list[Copy] = []
        name = ""
        try:
            if self._blocks.rows is not None:
                self._copy(batch, self._gather_rows(batch, self._blocks.rows), plan.rows)
                return
            slot_rows = self._blocks.locate(plan.tickets, plan.rows) if self._blocks.residences else plan.rows
            if self._config.tolerant:
                slot_rows = self._leave_out(batch, slot_rows)
                plan = batch.plan
            for residence, at in self._held(plan) + [(residence, slot_rows) for residence in self._gathered]:
                name = residence.name
                try:
                    columns, found = residence.gather(at, plan, self._buffers, self._seed)
                except DecodeError:
                    if not self._mark_invalid(residence, at, plan):
                        raise
                    batch.plan, batch.blank = begun, set()
                    self.start(batch)
                    return
                batch.columns |= columns
                copies += found
            for name in self.pads.keys() & {field.name for field in self._gathered}:
                column, lengths = batch.columns[name], batch.columns[name + LENGTHS]
                steps = column if type(column) is tuple else (column,)
                elements = sum(len(step) * step.shape[1] for step in steps)
                self._counters.add(elements=elements, padding_elements=elements - int(lengths.sum()))
            self._copy(batch, copies, slot_rows)
        except StreamloaderError:
            raise
        except Exception as error:
            raise wrapped(error, f"gathering field {name!r}") from error

    def _held(self, plan: BatchPlan) -> list[tuple[Residence, Ints]]:
        """Return the resident fields, with the row of each sample of a plan."""
        return [(rows, numbers(plan.samples)) for rows, numbers in self._resident.values()]

    def _gather_rows(self, batch: Batch, rows: tuple[FindItems, int, str]) -> Sequence[Copy]:
        """Put the columns of packed rows into the batch; return what must be copied to them.

        A bad document is left out of its row, in "replace" the row of another sample takes the place of the whole.
        """
        chunks = {field.name: field for field in self._gathered if isinstance(field, Chunks)}
        fields = {chunks[name]: pack for name, pack in self._config.rows.items()}
        find, segments, numbers = rows
        given: dict[str, Any] = {"segments": segments, "buffers": self._buffers, "numbers": numbers}
        while True:
            plan = batch.plan
            documents, pieces, edges = items = find(plan.samples)
            slot_rows = self._blocks.locate_documents(plan.tickets, edges, documents)
            bad = _bad_items([*fields], slot_rows) if self._config.tolerant else {}
            for item, (name, error) in bad.items():
                row = int(edges.searchsorted(item, side="right")) - 1
                fault = batch.faults.setdefault(row, (int(plan.samples[row]), name, error, False))
                batch.faults[row] = *fault[:3], bool(fault[3] or pieces[item] == 0)
            if bad and self._config.on_error == "replace" and not batch.masked:
                self._replace_rows(batch)
                continue
            try:
                (columns, copies), padding = gather_rows(fields, items, slot_rows, plan, **given)
                break
            except DecodeError:
                plan = plan._replace(samples=documents)
                if not sum(self._mark_invalid(each, slot_rows, plan) for each in fields):
                    raise
        batch.columns |= columns
        self._counters.add(elements=columns[next(iter(fields)).name].size, padding_elements=padding)
        return copies

    def _replace_rows(self, batch: Batch) -> None:
        """Put other rows of its step into the place of each packed row with bad documents, as far as there are some."""
        plan, source = batch.plan, replacements(batch.plan, batch.faults, self._seed)
        batch.masked = {row for row in batch.faults if source[row] == row}
        valid = plan.valid.copy()
        valid[list(batch.masked)] = False
        moved = {name: getattr(plan, name)[source] for name in ("tickets", "rows", "samples")}
        batch.plan = plan._replace(valid=valid, **moved)

    def _leave_out(self, batch: Batch, slot_rows: Ints) -> Ints:
        """Record the rows without values. Return the slot rows, in "replace" those of other samples in their place."""
        plan = batch.plan
        streamed = self._blocks.residences.values()
        for residence, at in self._held(plan) + [(residence, slot_rows) for residence in streamed]:
            for number, row in enumerate(at.tolist() if residence.bad else ()):
                if (problem := residence.bad.get(row)) is not None:
                    batch.leave_out(number, residence.name, problem)
        if not batch.blank or self._config.on_error != "replace":
            return slot_rows
        source = replacements(plan, batch.blank, self._seed)
        batch.plan = plan._replace(samples=plan.samples[source])
        batch.blank = {row for row in batch.blank if source[row] == row}
        return slot_rows[source]

    def _mark_invalid(self, residence: Residence, at: Ints, plan: BatchPlan) -> bool:
        """Mark the rows that are invalid for their field, unless these end the pass; return whether there are some."""
        errors = residence.invalid(at, plan) if isinstance(residence, Chunks) and self._config.tolerant else {}
        for row, error in errors.items():
            residence.mark([row], detached(error))
        return bool(errors)

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
        least = min(decoder.part for decoder in self._config.decoders.values())
        parts = _divide(len(slot_rows), max(1, min(most, len(slot_rows) // least)))
        decoders = {name: decoder for name, decoder in self._config.decoders.items() if not decoder.mask}
        crops = {
            name: self._buffers.lease((len(slot_rows), 7 if decoder.options.device is None else 10), "int64")
            for name, decoder in decoders.items()
        }
        images = {name: self._images(batch, name, slot_rows) for name in crops}
        left = {
            name: (*images[name][name][1:3], crop)
            for name, crop in crops.items()
            if decoders[name].options.device is not None
        }
        then = partial(self._start_device, batch, crops, left) if left else partial(self._finish_decode, batch, crops)
        ended = _countdown(batch, len(parts) * len(crops), then)
        for name, crop in crops.items():
            for part in parts:
                self._decode_part(batch, images[name], crop, part, ended)

    def _images(self, batch: Batch, name: str, slot_rows: Ints) -> dict[str, Encoded]:
        """Put the columns of an image field and of its masks into the batch; return how to decode them."""
        plan, (decoder, shared), chunks = batch.plan, self._decoder(name, batch.plan), self._encoded[name]
        rule, count = self._config.rules.get(name), len(slot_rows)
        sizes: Ints | None = None
        outs: Any
        batch.leases += chunks.leases(slot_rows)
        batch.columns |= decoder.beside(chunks.items(slot_rows))

        def lease(shape: tuple[int, ...]) -> NDArray[Any]:
            return self._buffers.lease((count, *shape), decoder.dtype, LIVE_BATCHES)

        items = chunks.items(slot_rows)
        if decoder.options.views is not None:
            views = {column: lease(shape) for column, shape in decoder.view_shapes.items()}
            batch.columns |= views
            outs = tuple(views.values())
        elif self._stacks(name) or decoder.is_sized:
            first = next((item for _, item, _ in self._headers(decoder, items, plan)), items[0])
            outs = lease(decoder.shape(first, int(plan.samples[0])))
            batch.columns[name] = outs[..., 0] if decoder.mask else outs
        elif isinstance(rule, Pad):
            sizes = self._sizes(decoder, items, plan)
            outs = lease((*padded_sizes(name, rule, sizes, plan.samples.tolist()), decoder.options.channels))
            batch.columns |= padded_columns(name, outs[..., 0] if decoder.mask else outs, sizes, rule)
        else:
            shapes = [(*size, decoder.options.channels) for size in self._sizes(decoder, items, plan).tolist()]
            whole = self._buffers.lease((sum(map(math.prod, shapes)),), decoder.dtype, LIVE_BATCHES)
            outs = divided(whole, shapes)
            batch.columns[name] = [out[..., 0] for out in outs] if decoder.mask else [*outs]
        pad = rule if isinstance(rule, Pad) else Pad()
        images, masks = (shared, chunks.table[slot_rows], outs, sizes, pad), decoder.options.masks
        return {name: images} | ({} if masks is None else self._images(batch, masks, slot_rows))

    def _decoder(self, name: str, plan: BatchPlan) -> tuple[ImageDecoder, ImageDecoder]:
        """Return the decoder of a field for a batch, and what `executor.share` returned for it."""
        each = self._decoders[name]
        before = self.samples_before(plan) if len(each) > 1 else 0
        return next((decoder, shared) for samples, decoder, shared in reversed(each) if samples <= before)

    def _sizes(self, decoder: ImageDecoder, items: Sequence[memoryview], plan: BatchPlan) -> Ints:
        """Return the (height, width) of images, the (frames, height, width) of clips, and 1 for each of bad ones."""
        found = {row: header.size for row, _, header in self._headers(decoder, items, plan)}
        sizes = np.ones((len(items), len(next(iter(found.values()), (1, 1)))), np.int64)
        for row, size in found.items():
            sizes[row] = size
        return sizes

    def _decode_part(self, batch: Batch, fields: Mapping[str, Encoded], crops: Ints, part: range, ended: Ended) -> None:
        plan, at = batch.plan, slice(part.start, part.stop)

        def done(result: Any, error: BaseException | None) -> None:
            seconds, bad = (0.0, {}) if error is not None else result
            for row, (field_name, problem) in bad.items():
                batch.leave_out(part.start + row, field_name, problem)
            self._counters.add(decode_seconds=seconds)
            ended(None, error)

        images = [
            (decoder, spans[at], _rows_of(outs, at), None if sizes is None else sizes[at], pad)
            for decoder, spans, outs, sizes, pad in fields.values()
        ]
        rows, key = (plan.samples[at], plan.positions[at], crops[at]), (self._seed, plan.epoch)
        self._decoding.submit(Job(decode_images, (images, rows, key, self._config.tolerant), done))

    def _start_device(self, batch: Batch, crops: Mapping[str, Ints], left: Mapping[str, OnDevice]) -> None:
        """Begin to decode on a device what the decode jobs have left to it, in one job for the whole batch."""
        ended = _countdown(batch, 1, partial(self._finish_decode, batch, crops))
        self._here.submit(Job(self._decode_on_device, (batch, left), ended))

    @finished_before_exit()
    def _decode_on_device(self, batch: Batch, left: Mapping[str, OnDevice]) -> None:
        """Put tensors on the device into the batch.

        If that fails for one of the images, the CPU decodes all of a batch, and tells which are bad.
        """
        begin, memory = time.thread_time(), all_bytes()
        for name, images in left.items():
            decoder = self._decoder(name, batch.plan)[0]
            decode, _ = self._on_device[str(decoder.options.device)]
            try:
                batch.columns[name] = decode(memory, images)
            except RuntimeError as error:
                if type(error).__name__ == "OutOfMemoryError":  # torch's
                    raise
                self._decode_here(batch, decoder, images, error)
                batch.columns[name] = decode(memory, images)
            on_cpu = np.flatnonzero(images[2][:, 8] == 0)
            self._counters.add(decoded_on_cpu=len(on_cpu) - len(batch.blank.intersection(on_cpu.tolist())))
        self._counters.add(decode_seconds=time.thread_time() - begin)

    def _decode_here(self, batch: Batch, decoder: ImageDecoder, left: OnDevice, error: RuntimeError) -> None:
        """Decode by the CPU what a device has not decoded, since it raised `error`."""
        (spans, pixels, crops), plan = left, batch.plan
        rows = np.flatnonzero(crops[:, 8])
        own = [(decoder.on_cpu, spans[rows], [pixels[row] for row in rows], None, Pad())]
        of_rows = crops[rows]
        labels = (plan.samples[rows], plan.positions[rows], of_rows), (self._seed, plan.epoch)
        _, bad = decode_images(own, *labels, self._config.tolerant)
        crops[rows] = of_rows
        for row, (name, problem) in bad.items():
            batch.leave_out(int(rows[row]), name, problem)
        if not bad and not self._warned:
            self._warned = True
            text = "%s does not decode a batch of %d images, which the CPU does; later ones are only counted: %s"
            logging.getLogger("streamloader").warning(text, decoder.options.device, len(rows), message(error))

    def _finish_decode(self, batch: Batch, crops: Mapping[str, Ints]) -> None:
        """Move boxes and key points with their images, and add the columns of what is left of them, and of crops."""
        batch.leases = []
        for name, crop_and_size in crops.items():
            decoder, crop = self._decoder(name, batch.plan)[0], crop_and_size[:, :5].copy()
            options, size = decoder.options, decoder.crops[0][0]
            if options.boxes is not None:
                move = partial(move_boxes, size=size, form=options.box_format)
                batch.columns |= _moved(options.boxes, batch.columns, crop, move)
            if options.keypoints is not None:
                batch.columns |= _moved(options.keypoints, batch.columns, crop, partial(move_points, size=size))
            if options.with_crop:
                batch.columns[f"{name}_crop"] = crop
            for moved in {options.boxes, options.keypoints} & self._config.rules.keys():
                self._pad_moved(batch, str(moved))
        self._start_transform(batch)

    def _pad_moved(self, batch: Batch, name: str) -> None:
        """Pad boxes or key points, after they were moved with their images, and the column of what is valid."""
        rule, column, valid = self._config.rules[name], batch.columns[name], batch.columns[f"{name}_valid"]
        if not isinstance(rule, Pad) or not isinstance(column, Ragged) or self.transforms:
            return
        numbers, lease = batch.plan.samples.tolist(), self._buffers.lease
        values, flags = (np.split(each.values, each.offsets[1:-1]) for each in (column, valid))
        batch.columns |= pad_arrays(name, values, numbers, rule, lease)
        padded = pad_arrays(f"{name}_valid", flags, numbers, replace(rule, value=0, mask=False), lease)
        batch.columns[f"{name}_valid"] = padded[f"{name}_valid"]

    def _start_transform(self, batch: Batch) -> None:
        count = len(batch.plan.samples)
        if not count or not (self.transforms or self._collate_function):
            self._finish(batch)
            return
        if not self.transforms:
            self._start_collate(batch, list(rows_of(batch.columns, count)))
            return
        parts = _divide(count, 1 if self._shared_transform is None else self._transforming.count)
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
        (self._here if self._shared_transform is None else self._transforming).submit(job)

    def _apply(self, columns: Mapping[str, Any], labels: Labels) -> Transformed:
        own = rows_of(columns, len(labels[1]))
        return apply(_of_owner(self._transform), own, labels, self._config.tensors)

    def _end_transform(self, batch: Batch, made: Mapping[int, Any], memory: Mapping[str, NDArray[Any]]) -> None:
        parts = [made[first] for first in sorted(made)]
        for first, ((*_, errors), _) in made.items():
            for row, error in errors.items():
                batch.leave_out(first + row, "", error)
        then = self._finish if self._collate_function is None else bool  # which begins with what this makes
        ended = _countdown(batch, 1, partial(then, batch))
        self._here.submit(Job(self._collate, (batch, parts, memory), ended))

    @finished_before_exit()
    def _collate(self, batch: Batch, parts: list[Any], memory: Mapping[str, NDArray[Any]]) -> None:
        """Make the columns of transformed samples. `memory`: of columns, with the large values of parts."""
        numbers, stack = batch.plan.samples.tolist(), self._stack_tensors
        if self._shared_transform is None:
            samples, complete = [one for (part, _), _ in parts for one in part], dict[str, Any]()
        else:
            whole = {
                name: column for name, column in memory.items() if name not in {*self._ragged, *self._config.rules}
            }
            stacked = self._batched and self._collate_function is None
            samples, complete = load_parts(parts, whole if stacked else {})
        samples = self._with_placeholders(batch, samples, complete)
        if self._collate_function is not None:
            self._start_collate(batch, samples)
        elif self._batched:
            self._padded.append(0)
            options: dict[str, Any] = {"rules": self._config.rules, "lease": self._lease_padded}
            batch.columns = collate(samples, numbers, stack, self._ragged, complete, **options)
            for name in batch.columns.keys() & self._config.rules.keys():
                rule = self._config.rules[name]
                if isinstance(rule, Pad):
                    elements = math.prod(batch.columns[name].shape[: 1 + rule.axes])
                    real = int(batch.columns[name + LENGTHS].reshape(-1, rule.axes).prod(axis=1).sum())
                    self._counters.add(elements=elements, padding_elements=elements - real)
        else:
            batch.singles = [collate([one], [number], stack) for one, number in zip(samples, numbers, strict=True)]
            batch.columns = {}

    def _lease_padded(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Return memory for a padded column of transformed samples. Raises `MemoryBudgetError` if it does not fit."""
        budget, bodies = self._blocks.budget, self._blocks.bodies
        self._padded[-1] += math.prod(shape) * np.dtype(dtype).itemsize
        if budget.exact:
            batches = self.padded_bytes()
            budget.check(self.needed(), batches)
            bodies.limit(min(bodies.most, budget.body_bytes - budget.unplanned(batches)))
        return self._buffers.lease(shape, dtype)

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

    def _start_collate(self, batch: Batch, samples: list[Sample]) -> None:
        """Let the function of the user make the columns of a batch of samples."""
        if batch.blank:
            source, blank = self._settle(batch)
            rows = enumerate(source.tolist())
            samples = [samples[row] if row == at else deepcopy(samples[row]) for at, row in rows]  # it may change them
            for row in blank:
                samples[row] = {name: empty_like(value) for name, value in samples[row].items()}
            batch.blank = set()
        plan, tensors = batch.plan, self._config.tensors
        labels = [(self._seed, plan.epoch, COLLATE + int(plan.positions[0]))], plan.samples[:1].tolist(), None

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                batch.columns = made(result)
            ended(None, error)

        ended = _countdown(batch, 1, partial(self._finish, batch))
        if self._shared_collate is not None:
            self._transforming.submit(Job(collate_rows, (self._shared_collate, samples, labels, tensors), done))
        else:
            self._here.submit(Job(self._apply_collate, (samples, labels), done))

    def _apply_collate(self, samples: list[Sample], labels: Labels) -> dict[Any, Any]:
        function, tensors = _of_owner(self._collate_function), self._config.tensors
        (columns,), _ = apply(function, [samples], labels, tensors, what="collate")
        return columns or {}

    def _settle(self, batch: Batch) -> tuple[Ints, list[int]]:
        """Return the source of each row and the rows that stay without values, and note them in the batch's plan."""
        plan, replaces = batch.plan, self._config.on_error == "replace"
        source = replacements(plan, batch.blank, self._seed) if replaces else np.arange(len(plan.rows))
        blank = sorted(row for row in batch.blank if source[row] == row)
        valid = plan.valid.copy()
        valid[blank] = False
        batch.plan = plan._replace(samples=plan.samples[source], valid=valid)
        batch.masked = set(blank)
        return source, blank

    def _finish(self, batch: Batch) -> None:
        """Fill the rows of bad samples, and add the column that tells which they are."""
        if self._config.tolerant:
            if batch.blank:
                source, blank = self._settle(batch)
                batch.columns = fill(batch.columns, source, blank)
                batch.singles = batch.singles and fill_samples(batch.singles, blank)
            masks, bad = self._config.on_error == "mask", np.zeros(len(batch.plan.rows), np.bool_)
            bad[list(batch.faults if masks else batch.faults.keys() - batch.masked)] = True
            batch.columns["error" if masks else "replaced"] = bad
        for _, wait in self._on_device.values():
            wait()
        self.finished_at = self.runtime.clock()
        batch.finished.set()


def _bad_items(fields: Sequence[Chunks], slot_rows: Ints) -> dict[int, tuple[str, StreamloaderError]]:
    """Return the (field, error) of each item that is bad in one of the fields, and mark it as bad in the others."""
    bad: dict[int, tuple[str, StreamloaderError]] = {}
    for chunks in fields:
        for item, slot_row in enumerate(slot_rows.tolist() if chunks.bad else ()):
            if (error := chunks.bad.get(slot_row)) is not None:
                bad.setdefault(item, (chunks.name, error))
    for item, (_, error) in bad.items():
        for chunks in fields:
            chunks.mark([int(slot_rows[item])], error)
    return bad


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


def _device_decoders(config: LoaderConfig) -> dict[str, tuple[Callable[..., Any], Callable[[], object]]]:
    """Return what decodes images on each device, and what waits for that."""
    devices = {decoder.options.device for decoder in config.decoders.values()}
    return {device: resolve_name(f"{config.tensors}:device_decoder")(device) for device in devices if device}


def _rows_of(outs: Any, at: slice) -> Any:
    """Return rows of the arrays of decoded images, or of each of several."""
    return tuple(each[at] for each in outs) if isinstance(outs, tuple) else outs[at]


def _of_owner(function: weakref.ref[Transform] | None) -> Transform:
    held = None if function is None else function()
    if held is None:
        raise EngineError("the dataset of this pass is gone", "keep the dataset while you iterate")
    return held


def _moved(name: str, columns: Mapping[str, Any], crops: Ints, move: Callable[..., Any]) -> dict[str, Any]:
    """Return the moved column of a field of boxes or points, and the column of what is valid."""
    column = columns[name]
    if not isinstance(column, Ragged):
        return dict(zip((name, f"{name}_valid"), move(column, crops), strict=True))
    values, valid = move(column.values, np.repeat(crops, np.diff(column.offsets), axis=0))
    return {name: Ragged(values, column.offsets), f"{name}_valid": Ragged(valid, column.offsets)}


def _divide(count: int, parts: int) -> list[range]:
    """Divide [0, count) into at most `parts` ranges of nearly equal length, none of them empty."""
    parts = min(count, parts)
    edges = [count * i // parts for i in range(parts + 1)] if parts else []
    return [range(a, b) for a, b in pairwise(edges)]
