"""Windows and patches of arrays: the memory of the regions of blocks, and samples gathered from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from streamloader.engine.arena import Arena, Buffers
from streamloader.engine.budget import LIVE_BATCHES, MAX_THREADS, Demand
from streamloader.engine.faults import BadRows, forget
from streamloader.engine.gather import Copy, copy_boxes
from streamloader.engine.residence import Chunks, Gathered
from streamloader.errors import FormatError, StreamloaderError
from streamloader.format.codecs import Items
from streamloader.format.manifest import MAX_CHUNK_BYTES, Field
from streamloader.options import MIB, Pack, Pad
from streamloader.order.schedule import BatchPlan, BlockRef
from streamloader.storage.buffers import Allocate
from streamloader.zarr.columns import BlockArrays, Bound, ChunkPlaces, Part, RegionColumn, RegionReader, common_box
from streamloader.zarr.reader import ArrayRun, StoredChunk

if TYPE_CHECKING:
    from streamloader.images.decode import ImageDecoder

Ints = NDArray[np.int64]
BatchRow = tuple["BatchRows", int]  # a row of a batch in the making
# Requests for chunks of arrays may be large. Fewer in flight take less memory; 16 of 85 MB/s each fill 10 Gbit/s.
# The size of a compressed chunk is unknown, and counts as decoded.
IN_FLIGHT_BYTES = 1024 * MIB
LEAST_THREADS = 16


class BlockRegions:
    """The regions of the samples [start, stop), a block, of one column: their memory, without values.

    Of each region: `stops`, the row after its last one; `bounds`, its first element and its end. `memory`: has
    the regions, or allocates them, or is `batch`, the row of a batch that is the only region.
    `targets`: what chunks are decoded into. `has_constants`: whether the values that are constant were written.
    """

    def __init__(self, reader: RegionReader, start: int, stop: int, memory: Allocate | KeptArrays | BatchRow) -> None:
        self.reader = reader
        self.start = start
        self.has_constants = False
        self.stops = [end - start for end, _, _ in reader.fields.boxes(start, stop)]
        self.bounds = reader.regions(start, stop)
        self.batch = memory if isinstance(memory, tuple) else None
        column, dtype = reader.column, np.dtype(reader.column.dtype)
        shapes = [column.shape(low, high) for low, high in self.bounds]
        if isinstance(memory, KeptArrays):
            views = [memory.view(low, high) for low, high in self.bounds]
            self.arrays = [array for array, _, _ in views]
            self.targets = BlockArrays([run for _, run, _ in views], [bounds for _, _, bounds in views])
            return
        if isinstance(memory, tuple):
            self.arrays = [memory[0].columns(column)[0][memory[1]].reshape(shapes[0])]
        else:
            self.arrays = [np.frombuffer(memory(prod(n) * dtype.itemsize), dtype).reshape(n) for n in shapes]
        self.targets = BlockArrays(self.arrays, self.bounds)

    @cached_property
    def cuts(self) -> list[list[NDArray[Any]]]:
        """What the parts of the outputs are cut from, for each region: see `_cut`."""
        column, axes = self.reader.column, self.reader.fields.axes
        parts = [part for output in column.outputs for part in output.parts]
        return [[_cut(column, axes, array, part) for part in parts] for array in self.arrays]

    @cached_property
    def items(self) -> list[tuple[int, Items]]:
        """Return the sparse rows of each region, with the row of the block that is its first; empty for other columns.

        Raises `FormatError` for a region above 2 GiB.
        """
        column, items = self.reader.column, []
        if column.rows is None:
            return []
        size = np.dtype(column.dtype).itemsize
        for first, stop, array, (low, _) in zip([0, *self.stops], self.stops, self.arrays, self.bounds, strict=False):
            if array.nbytes > MAX_CHUNK_BYTES:
                problem = f"rows of {self.reader.name!r} have {array.nbytes} bytes in one block"
                raise FormatError(problem, f"write it in chunks of fewer elements: at most {MAX_CHUNK_BYTES} bytes fit")
            elements = self.reader.fields.anchors.corners(np.arange(self.start + first, self.start + stop))[0]
            begins, ends = ((column.rows[elements + end] - low[0]) * size for end in (0, 1))
            items.append((first, Items(array.view(np.uint8).data, begins, ends)))
        return items

    @property
    def origins(self) -> list[list[int]]:
        """The first element of each region on the anchored axes that the column has."""
        dims, axes = self.reader.column.dims, self.reader.fields.axes
        return [[low[dims.index(axis)] for axis in axes if axis in dims] for low, _ in self.bounds]


def _lease_outputs(column: RegionColumn, count: int, buffers: Buffers) -> list[NDArray[Any]]:
    """Return memory for `count` samples of each output of a column."""
    return [buffers.lease((count, *output.shape), column.dtype, LIVE_BATCHES) for output in column.outputs]


def _cut(column: RegionColumn, anchored: Sequence[str], region: NDArray[Any], part: Part) -> NDArray[Any]:
    """Return a view of a region from a part's first element on.

    It has an axis for each anchored axis, then the axes of the output.
    """
    dims = list(column.dims)
    if column.channels:
        dims.insert(column.channel_axis, "")
    starts: dict[str, tuple[int, int]] = {}
    lengths: list[tuple[int, int]] = []
    begin = [slice(None)] * len(dims)
    for axis, (dim, size, stride) in enumerate(zip(dims, region.shape, region.strides, strict=True)):
        if dim == column.sample_axis and dim:
            begin[axis] = slice(part.offset, None)
            reach = (max(part.length, 1) - 1) * part.step
            starts[dim] = size - part.offset - max(0, reach), stride
            lengths += [(part.length, stride * part.step)] if part.length else []
        elif dim in column.sizes:
            starts[dim] = size - column.sizes[dim] + 1, stride
            lengths.append((column.sizes[dim], stride))
        else:
            lengths.append((size, stride))
    axes = [starts[axis] for axis in anchored if axis in starts] + lengths
    shape, strides = [n for n, _ in axes], [stride for _, stride in axes]
    return as_strided(region[tuple(begin)], shape, strides, writeable=False)


class BatchRows:
    """The columns of a batch in the making, leased once its first block is opened.

    Blocks of one sample are decoded into their rows of it. `rows`: the first row of each ticket, but for blocks that
    another batch needs too: its consumer may have changed this one by then.
    """

    def __init__(self, plan: BatchPlan, buffers: Buffers) -> None:
        self.count = len(plan.rows)
        tickets, rows = np.unique(plan.tickets, return_index=True)
        alone = {ref.ticket for ref in plan.needs} & set(plan.done)
        self.rows = {key: row for key, row in zip(tickets.tolist(), rows.tolist(), strict=True) if key in alone}
        self._buffers = buffers
        self._columns: dict[str, list[NDArray[Any]]] = {}

    def columns(self, column: RegionColumn) -> list[NDArray[Any]]:
        """Return the memory of the outputs of a column, for which one thread at a time may ask."""
        if column.name not in self._columns:
            self._columns[column.name] = _lease_outputs(column, self.count, self._buffers)
        return self._columns[column.name]


class KeptArrays:
    """All elements of a column in chunks that samples read, in memory that is kept for later epochs.

    The first block that needs a chunk claims it, and decodes it for all. Blocks are claimed, and waited for, in the
    order of their tickets: when a block is complete, so are the chunks that earlier ones claimed.
    """

    def __init__(self, reader: RegionReader, arena: Arena, block: int) -> None:
        self.reader, self._block = reader, block
        self._ends = np.cumsum(np.diff(reader.kept_runs))
        shape = reader.column.shape(*reader.bounds_of(0, int(self._ends[-1])))
        dtype = np.dtype(reader.column.dtype)
        self._array = np.ndarray(shape, dtype, arena.allocate(prod(shape) * dtype.itemsize, huge=False).data)
        arrays = {number: array.array for number, array in reader.arrays.items()}
        self._claimed = {
            number: np.zeros([-(-n // size) for n, size in zip(array.shape, array.chunks, strict=True)], np.bool_)
            for number, array in arrays.items()
        }
        self._chunks = {number: array.chunks for number, array in arrays.items()}
        self.damaged: list[tuple[ArrayRun, StreamloaderError]] = []  # claimed chunks without values
        self._opened: dict[tuple[int, int], BlockRegions] = {}  # not parts: lanes divide other blocks in another epoch

    def view(self, low: Bound, high: Bound) -> tuple[NDArray[Any], NDArray[Any], tuple[Bound, Bound]]:
        """Return the elements [low, high), and the run of elements that they are in, with its bounds."""
        column, axis, runs = self.reader.column, self.reader.first_axis, self.reader.kept_runs
        number = np.searchsorted(runs[:, 0], low[axis], side="right") - 1 if low else 0
        (first, stop), end = runs[number].tolist(), int(self._ends[number])
        bounds = self.reader.bounds_of(first, stop)
        run = [slice(None)] * axis + [slice(end - (stop - first), end)] if low else list[slice]()
        if column.channels:
            run.insert(column.channel_axis, slice(None))
        array = self._array[tuple(run)]
        return array[column.inside(bounds[0], low, high)], array, bounds

    def open(self, start: int, stop: int) -> tuple[BlockRegions, list[ChunkPlaces]]:
        """Return the regions of the samples [start, stop), and the chunks that it claims: no block did before."""
        if (block := self._opened.get((start, stop))) is not None:
            return block, []
        block = BlockRegions(self.reader, start, stop, self)
        if start % self._block == 0 and stop == min(start + self._block, self.reader.num_samples):
            self._opened[start, stop] = block
        found = (
            ChunkPlaces(region, member, [place for box in boxes for place in self._claim(member, *box)])
            for region, member, boxes in self.reader.boxes(start, stop)
        )
        return block, [chunks for chunks in found if chunks.places]

    def _claim(self, member: int, low: Bound, high: Bound) -> list[tuple[int, ...]]:
        bounds = zip(low, high, self._chunks[member], strict=True)
        at = tuple(slice(a // size, -(-b // size)) for a, b, size in bounds)
        places = np.argwhere(~self._claimed[member][at]) + [part.start for part in at]
        self._claimed[member][at] = True
        return list(map(tuple, places.tolist()))

    def give_back(self, claims: Sequence[ChunkPlaces]) -> None:
        """Let the chunks that an incomplete block claimed be read again, for other blocks that need them too."""
        self._opened.clear()
        for _, member, places in claims:
            self._claimed[member][tuple(np.array(places).T)] = False


class Regions:
    """A field of arrays that others wrote: the regions of the blocks in all slots.

    Samples are windows, patches or sparse rows in them. `shape`: the number of slots, and of samples in each. `pack`:
    how sparse rows are packed or padded.
    """

    def __init__(
        self, name: str, field: Field, arena: Arena, shape: tuple[int, int], pack: Pack | Pad | None = None
    ) -> None:
        self.name, self.field = name, field
        self._arena, (slots, self._block) = arena, shape
        self._opening = threading.Lock()
        self._blocks: list[BlockRegions | None] = [None] * slots
        self._kept: dict[RegionReader, KeptArrays] = {}
        self.bad: BadRows = {}
        self._claims: dict[int, list[ChunkPlaces]] = {}  # of the incomplete blocks in slots
        self.rows = None if field.fixed else Chunks(name, field, arena, shape, pack)  # where sparse rows are

    @staticmethod
    def demand(readers: Sequence[RegionReader], block: int, rows: int, _decoder: ImageDecoder | None = None) -> Demand:
        """Return the memory that a pass needs for the field, read by one of these readers from each dataset."""
        regions = max(reader.most_bytes(block) for reader in readers)
        request = max(reader.request_bytes for reader in readers)
        return Demand(
            slot_bytes=regions,
            item_bytes=regions,
            uneven_bytes=0 if readers[0].layout.field.fixed else regions,
            kept_bytes=sum(reader.all_bytes for reader in readers),
            batch_bytes=int(rows * max(reader.sample_bytes for reader in readers)),
            request_bytes=request,
            scratch_bytes=max(reader.scratch_bytes for reader in readers),
            pieces=min(reader.pieces(block) for reader in readers),
            most_threads=max(LEAST_THREADS, min(MAX_THREADS, IN_FLIGHT_BYTES // request)),
            fills_batches=block == 1 and all(reader.fills_rows for reader in readers),
        )

    def open(self, slot: int, ref: BlockRef, reader: RegionReader, memory: Allocate | BatchRow) -> BlockArrays:
        """Return what `RegionReader.write` decodes a block into, which its first response makes, with its constants.

        `memory`: allocates the regions, or is the row of a batch that is the only one.
        """
        with self._opening:
            block = self._blocks[slot]
            if block is None:
                block = self._blocks[slot] = BlockRegions(reader, ref.start, ref.stop, memory)
            first, block.has_constants = not block.has_constants, True
        if first:  # the block is complete only after this response
            reader.write_constants(BlockArrays(block.arrays, block.bounds))
            self._place_rows(slot, block)
        return block.targets

    def open_kept(self, slot: int, reader: RegionReader, start: int, stop: int) -> bool:
        """Open the regions of a block in memory that is kept; return whether something is missing there."""
        if reader not in self._kept:
            self._kept[reader] = KeptArrays(reader, self._arena, self._block)
        block, self._claims[slot] = self._kept[reader].open(start, stop)
        self._blocks[slot] = block
        self._place_rows(slot, block)
        return bool(self._claims[slot]) or (reader.has_constants and not block.has_constants)

    def _place_rows(self, slot: int, block: BlockRegions) -> None:
        """Store where the sparse rows of a block are, if the field has any."""
        if self.rows is not None:
            for row, items in block.items:
                self.rows.put(slot, row, items)

    def claims(self, slot: int) -> list[ChunkPlaces]:
        """Return the chunks to read for the block in a slot, where memory is kept for all."""
        return self._claims.get(slot, [])

    def in_slots(self, slots: Sequence[int]) -> list[BlockRegions]:
        """Return the blocks in these slots, without those that have bad samples."""
        bad = {row // self._block for row in list(self.bad)}
        return [block for slot in slots if (block := self._blocks[slot]) is not None and slot not in bad]

    def fill_from(
        self, slot: int, ref: BlockRef, source: tuple[RegionReader, Allocate], others: Sequence[BlockRegions]
    ) -> list[ChunkPlaces] | None:
        """Copy what other blocks, which are loaded, have of a block in a slot; return the chunks left to read.

        None if these are all. `source`: reads the block, and allocates its regions.
        """
        reader, allocate = source
        found = [
            ((region, *box), array[reader.column.inside(low, *box)])
            for region, bounds in enumerate(reader.regions(ref.start, ref.stop))
            for other in others
            if other.reader is reader
            for array, (low, high) in zip(other.arrays, other.bounds, strict=True)
            if (box := common_box(bounds, (low, high)))
        ]
        left, used = reader.chunks_outside(ref.start, ref.stop, [box for box, _ in found])
        if not used:
            return None
        targets = self.open(slot, ref, reader, allocate)
        for number in used:
            (region, low, high), elements = found[number]
            targets.arrays[region][reader.column.inside(targets.bounds[region][0], low, high)] = elements
        return left

    def mark(self, slot_rows: Sequence[int], error: StreamloaderError) -> None:
        """Record that slot rows have no values, because of an error."""
        self.bad |= dict.fromkeys(slot_rows, error)
        if self.rows is not None:
            self.rows.mark(slot_rows, error)

    def mark_chunks(self, slot: int, run: ArrayRun | None, error: StreamloaderError) -> None:
        """Mark the samples of an open block that need the chunks of a run, or all of them.

        Other blocks rely on the chunks that a block has claimed in arrays that are kept: see `complete`.
        """
        block = self._blocks[slot]
        assert block is not None
        if (kept := self._kept.get(block.reader)) is not None:
            claimed = [
                ArrayRun("", 0, 0, tuple(StoredChunk(place, -1, -1) for place in places), member)
                for _, member, places in self.claims(slot)
            ]
            kept.damaged += [(each, error) for each in (claimed if run is None else [run])]
        self._mark_rows(slot, block, run, error)

    def _mark_rows(self, slot: int, block: BlockRegions, run: ArrayRun | None, error: StreamloaderError) -> None:
        stop = block.start + block.stops[-1]
        rows = range(block.stops[-1]) if run is None else block.reader.bad_rows(run, block.start, stop)
        self.mark([slot * self._block + row for row in rows], error)

    def complete(self, slot: int) -> None:
        """Keep the chunks that the block in a slot claimed, which has been loaded; mark what needs damaged ones."""
        self._claims.pop(slot, None)
        block = self._blocks[slot]
        if block is not None:
            for run, error in self._kept[block.reader].damaged:
                self._mark_rows(slot, block, run, error)

    def drop(self, slot: int) -> None:
        """Free the memory of the regions of a slot once no copy is in progress, unless it is kept."""
        block, self._blocks[slot] = self._blocks[slot], None
        forget(self.bad, slot * self._block, (slot + 1) * self._block)
        if (claims := self._claims.pop(slot, None)) and block is not None:
            self._kept[block.reader].give_back(claims)
        if self.rows is not None:
            self.rows.drop(slot)

    def variable_bytes(self, slot_rows: Ints, step_rows: int) -> int:
        """Return the total number of bytes of sparse rows, 0 for other columns."""
        return 0 if self.rows is None else self.rows.variable_bytes(slot_rows, step_rows)

    def gather(self, slot_rows: Ints, plan: BatchPlan, buffers: Buffers, seed: int) -> Gathered:
        """Return the columns of a batch, and what must be copied to them: the samples at `slot_rows`."""
        if self.rows is not None:
            return self.rows.gather(slot_rows, plan, buffers)
        slots, rows = np.divmod(slot_rows, self._block)
        used, number = np.unique(slots, return_inverse=True)
        blocks = [block for block in (self._blocks[slot] for slot in used.tolist()) if block is not None]
        column = blocks[0].reader.column
        filled = [block.batch for block in blocks if block.batch is not None and block.batch[0].count == len(slot_rows)]
        outs = filled[0][0].columns(column) if filled else _lease_outputs(column, len(slot_rows), buffers)
        missing, copies = np.ones(len(slot_rows), np.bool_), list[Copy]()
        missing[[row for _, row in filled]] = False
        readers = {block.reader: None for block in blocks} if missing.any() else {}  # several in a mixture
        for reader in readers:
            mine = np.array([block.reader is reader for block in blocks])
            of_reader = np.flatnonzero(mine[number] & missing)
            local = (np.cumsum(mine) - 1)[number[of_reader]]
            chosen = [block for block in blocks if block.reader is reader]
            region, at = _locate(chosen, local, rows[of_reader], (seed, plan.epoch))
            copies += _copies(chosen, (region, at), (outs, of_reader), self._arena.bytes)
        return {output.name: out for output, out in zip(column.outputs, outs, strict=True)}, copies


def _locate(blocks: Sequence[BlockRegions], number: Ints, rows: Ints, key: tuple[int, int]) -> tuple[Ints, list[Ints]]:
    """Return the region of samples, counted over all blocks, and where they begin in it on the anchored axes.

    `number` and `rows`: the block of each sample, and its row there.
    """
    fields, column = blocks[0].reader.fields, blocks[0].reader.column
    samples = np.array([block.start for block in blocks])[number] + rows
    corners = fields.anchors.corners(samples, key)
    region = number
    if any(len(block.stops) > 1 for block in blocks):
        most = max(block.stops[-1] for block in blocks)
        ends = np.concatenate([np.array(block.stops) + n * most for n, block in enumerate(blocks)])
        region = np.searchsorted(ends, number * most + rows, side="right")
    origins = np.array([origin for block in blocks for origin in block.origins], np.int64).T
    scales = [column.scales[axis] for axis in fields.axes if axis in column.dims]
    used = [corners[n] for n, axis in enumerate(fields.axes) if axis in column.dims]
    return region, [
        (corner * scale.numerator // scale.denominator if scale != 1 else corner) - origin[region]
        for corner, scale, origin in zip(used, scales, origins, strict=True)
    ]


def _copies(
    blocks: Sequence[BlockRegions],
    found: tuple[Ints, list[Ints]],
    into: tuple[Sequence[NDArray[Any]], Ints],
    memory: NDArray[np.uint8],
) -> Iterator[Copy]:
    """Yield the copies of samples, which are `found` by `_locate`, to the given rows of the outputs."""
    (region, at), (outs, rows) = found, into
    column, regions = blocks[0].reader.column, [cuts for block in blocks for cuts in block.cuts]
    parts = [(out, part) for output, out in zip(column.outputs, outs, strict=True) for part in output.parts]
    for position, (out, part) in enumerate(parts):
        target = out
        if part.length:
            target = out[(slice(None),) * (1 + column.sample_position) + (slice(part.at, part.at + part.length),)]
        cuts = [each[position] for each in regions]
        strides = np.array([cut.strides for cut in cuts], np.int64).reshape(len(cuts), -1)
        starts = np.array([cut.__array_interface__["data"][0] for cut in cuts], np.int64)[region]
        starts -= memory.__array_interface__["data"][0]
        for axis, first in enumerate(at):
            starts += first * strides[region, axis]
        inner, kind = np.unique(strides[:, len(at) :], axis=0, return_inverse=True)
        for number, each in enumerate(inner.tolist()):  # regions at a border may have other strides
            mine = kind.reshape(-1)[region] == number
            yield copy_boxes(memory, starts[mine], each, (out, target), rows[mine])
