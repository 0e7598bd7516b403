"""Windows and patches of arrays: decodes chunks into the region of a block, and gathers samples from regions.

The *region* of a block is the box of elements that its samples read, one array for each column. Chunks are decoded into
it once, whatever the number of samples that share them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from streamloader.format.cf import Unpacking
from streamloader.format.manifest import FieldLayout
from streamloader.format.reader import MAX_REQUEST
from streamloader.format.zarr_metadata import ZarrArray
from streamloader.format.zarr_reader import ABSENT, ArrayReader, ArrayRun
from streamloader.order.anchors import Anchors, Box
from streamloader.storage.buffers import Allocate
from streamloader.storage.store import RangeReader, Store

Ints = NDArray[np.int64]
Bound = tuple[int, ...]  # an element of a region for each dimension
Lease = Callable[[tuple[int, ...], str], NDArray[Any]]
# Rows of a batch are copied one by one from this size on, as slices; smaller ones together, by fancy indexing, which
# first copies them to a temporary array.
LARGE_ROW = 1 << 13
BOX_CACHE = 512
SAMPLED_BLOCKS = 16  # whose sizes are compared to find the memory of a block
ARRAYS = "zarr"  # the codec of a layout whose chunks have the codecs of their own metadata


class Slice(NamedTuple):
    """A slice of an array in a column: the index on each dimension that the column lacks, and its channel's number.

    `channel` is None in a column without channels.
    """

    picks: Mapping[str, int]
    channel: int | None = None


@dataclass(frozen=True, eq=False)
class Member:
    """An array of a column, of which `slices` are read.

    `constant`: values that are repeated for every sample instead of chunks that are read for each block; their
    dimensions are some of the column's.
    """

    dims: tuple[str, ...]
    slices: tuple[Slice, ...] = (Slice({}),)
    array: ZarrArray | None = None
    unpacking: Unpacking | None = None
    constant: NDArray[Any] | None = None


class Part(NamedTuple):
    """Elements of an output along the sample axis: `length` from `offset` after the anchor, `step` apart.

    `at` is the first of them in the output; `length` 0 leaves the axis out.
    """

    at: int
    offset: int
    length: int
    step: int


class Output(NamedTuple):
    """A column of the batch: its name, its shape for one sample, and where its elements are."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class RegionColumn:
    """Arrays that are read together into one region: its dimensions with the channel axis, and what is cut from it.

    `lengths`: of the dimensions. `scales`: by anchored axis, the elements of this column for one of the anchors'.
    `sizes`: by axis of patches, the elements of a patch. `sample_axis`: the dimension that windows lie along, or "".
    """

    name: str
    dims: tuple[str, ...]
    lengths: tuple[int, ...]
    dtype: str
    members: tuple[Member, ...]
    outputs: tuple[Output, ...]
    scales: Mapping[str, Fraction]
    sizes: Mapping[str, int]
    sample_axis: str
    channels: int = 0

    @cached_property
    def channel_axis(self) -> int:
        """The position of the channel axis: after the sample axis."""
        return 1 if self.sample_axis and self.dims[:1] == (self.sample_axis,) else 0

    @property
    def sample_bytes(self) -> int:
        """The bytes of one sample of all outputs."""
        return sum(prod(output.shape) for output in self.outputs) * np.dtype(self.dtype).itemsize

    def region(self, axes: Sequence[str], box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first element and the end of the column's region for a box of the anchors' `axes`."""
        low, high = [0] * len(self.dims), list(self.lengths)
        for axis, first, end in zip(axes, box.low, box.high, strict=True):
            if axis in self.dims:
                at = self.dims.index(axis)
                low[at] = int(first * self.scales[axis])
                high[at] = min(self.lengths[at], -int(-end * self.scales[axis] // 1))
        return tuple(low), tuple(high)

    def shape(self, low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a region, with the channel axis."""
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        if self.channels:
            sizes.insert(self.channel_axis, self.channels)
        return tuple(sizes)


@dataclass(frozen=True, eq=False)
class ArrayFields:
    """The columns of a dataset of arrays, by field, and its samples. `strict`: a missing chunk is an error."""

    columns: Mapping[str, RegionColumn]
    anchors: Anchors
    strict: bool = False

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The names of the anchored axes."""
        return tuple(axis.name for axis in self.anchors.axes)

    @cached_property
    def boxes(self) -> Callable[[int, int], list[Box]]:
        """`Anchors.boxes`, cached: every column asks for the same blocks."""
        return lru_cache(BOX_CACHE)(self.anchors.boxes)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the cache."""
        return {name: value for name, value in self.__dict__.items() if name != "boxes"}

    def indexes(self, samples: Ints) -> dict[str, Ints]:
        """Return the columns of `with_index`: `index`, the first element of each sample along the sample axis.

        `index_y` and so on are those of the other anchored axes, without the offsets of random patches. Without a
        sample axis, `index` is the number of the sample.
        """
        corners = dict(zip(self.axes, self.anchors.corners(samples), strict=True))
        index = corners.pop(next(iter(self.columns.values())).sample_axis, samples)
        return {"index": index, **{f"index_{name}": values for name, values in corners.items()}}


class RegionRun(NamedTuple):
    """A request for chunks of one member, which go to one region of a block."""

    region: int
    member: int
    request: ArrayRun
    first_sample: int
    num_samples: int

    @property
    def start(self) -> int:
        """The first byte that is requested."""
        return self.request.start

    @property
    def stop(self) -> int:
        """The end of the bytes that are requested."""
        return self.request.stop


class RegionReader:
    """Reads one field of a dataset of arrays: the counterpart of `FieldReader`, for regions of blocks; thread-safe."""

    def __init__(self, store: Store, name: str, layout: FieldLayout, fields: ArrayFields) -> None:
        self.name = name
        self.layout = layout
        self.fields = fields
        self.column = fields.columns[name]
        self.num_samples = len(fields.anchors)
        self._readers = [
            None if member.array is None else ArrayReader(store, member.array, strict=fields.strict)
            for member in self.column.members
        ]

    @property
    def request_bytes(self) -> int:
        """The most bytes of a request for one chunk."""
        return max((reader.request_bytes for reader in self._readers if reader is not None), default=1)

    @property
    def kept_bytes(self) -> int:
        """The most bytes of values that are kept for all blocks, and of the indexes of shards."""
        constants = sum(member.constant.nbytes for member in self.column.members if member.constant is not None)
        return constants + sum(reader.kept_bytes for reader in self._readers if reader is not None)

    @property
    def decoded_chunk_bytes(self) -> int:
        """The bytes of the largest decoded chunk, which a thread holds beside the region."""
        return max((reader.array.chunk_bytes for reader in self._readers if reader is not None), default=0)

    def regions(self, start: int, stop: int) -> list[tuple[Bound, Bound]]:
        """Return the bounds of each region of the block of the samples [start, stop)."""
        return [self.column.region(self.fields.axes, box) for box in self.fields.boxes(start, stop)]

    def block_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the regions of a block."""
        sizes = (prod(self.column.shape(low, high)) for low, high in self.regions(start, stop))
        return sum(sizes) * np.dtype(self.column.dtype).itemsize

    def most_bytes(self, block: int) -> int:
        """Return the bytes of the largest of some blocks of `block` samples: the first, the last, others between."""
        firsts = range(0, self.num_samples, block)
        some = {*firsts[:: max(1, len(firsts) // SAMPLED_BLOCKS)], firsts[-1]}
        return max(self.block_bytes(first, min(first + block, self.num_samples)) for first in some)

    def pieces(self, block: int) -> int:
        """Return about the number of requests of a block."""
        stop = min(block, self.num_samples)
        return max(1, self.block_bytes(0, stop) // max(1, self.decoded_chunk_bytes, MAX_REQUEST // 4))

    def runs(self, start: int, stop: int) -> list[RegionRun]:
        """Return the requests for the chunks of the samples [start, stop). Raises as `ArrayReader.runs`."""
        runs = []
        for number, (low, high) in enumerate(self.regions(start, stop)):
            for index, (member, reader) in enumerate(zip(self.column.members, self._readers, strict=True)):
                if reader is None:
                    continue
                requests = reader.runs([self._bounds(member, each, low, high) for each in member.slices])
                runs += [RegionRun(number, index, request, start, stop - start) for request in requests]
        return runs or [RegionRun(0, 0, ArrayRun("", 0, 0, ()), start, stop - start)]

    def fetch(self, reader: RangeReader, run: RegionRun, allocate: Allocate | None = None) -> memoryview:
        """Return the bytes of a run by one request, without retries."""
        array = self._readers[run.member]
        return ABSENT if array is None else array.fetch(reader, run.request, allocate)

    def open_block(self, start: int, stop: int, allocate: Allocate) -> BlockRegions:
        """Return the regions of a block in memory from `allocate`, with the values that are constant."""
        boxes, arrays = self.fields.boxes(start, stop), []
        for low, high in self.regions(start, stop):
            shape, dtype = self.column.shape(low, high), np.dtype(self.column.dtype)
            array = np.frombuffer(allocate(prod(shape) * dtype.itemsize), dtype).reshape(shape)
            for member in self.column.members:
                if member.constant is not None:
                    at = [slice(low[self.column.dims.index(d)], high[self.column.dims.index(d)]) for d in member.dims]
                    wide = [slice(None) if dim in member.dims else None for dim in self.column.dims]
                    self._channel(array, member.slices[0])[...] = member.constant[tuple(at)][tuple(wide)]
            arrays.append(array)
        return BlockRegions(self, start, boxes, arrays)

    def write(self, run: RegionRun, body: memoryview, block: BlockRegions) -> tuple[int, int]:
        """Decode the chunks of a run into the regions of their block; return (missing chunks, decoded bytes).

        Raises `CorruptError`, or `MissingObjectError` for a missing chunk if the dataset is strict.
        """
        reader, member = self._readers[run.member], self.column.members[run.member]
        if reader is None or not run.request.chunks:
            return 0, 0
        low, high = self.regions(block.start, block.start + run.num_samples)[run.region]
        targets = []
        for each in member.slices:
            target = self._channel(block.arrays[run.region], each)
            picked = tuple(axis for axis, dim in enumerate(member.dims) if dim in each.picks)
            targets.append((np.expand_dims(target, picked), self._bounds(member, each, low, high)[0]))
        found = [reader.place(run.request, chunk, body, targets, member.unpacking) for chunk in run.request.chunks]
        return found.count(False), found.count(True) * reader.array.chunk_bytes

    def _bounds(self, member: Member, each: Slice, low: Bound, high: Bound) -> tuple[Bound, Bound]:
        """Return the box of an array that a slice of it has in the region [low, high)."""
        at = [self.column.dims.index(dim) if dim not in each.picks else -1 for dim in member.dims]
        first = tuple(each.picks[dim] if i < 0 else low[i] for dim, i in zip(member.dims, at, strict=True))
        return first, tuple(first[n] + 1 if i < 0 else high[i] for n, i in enumerate(at))

    def _channel(self, region: NDArray[Any], each: Slice) -> NDArray[Any]:
        """Return the part of a region that a slice fills."""
        if each.channel is None:
            return region
        return region[(slice(None),) * self.column.channel_axis + (each.channel,)]


class BlockRegions:
    """The regions of one block of one column, from which rows of batches are copied."""

    def __init__(self, reader: RegionReader, start: int, boxes: Sequence[Box], arrays: Sequence[NDArray[Any]]) -> None:
        self.reader = reader
        self.start = start
        self.arrays = arrays
        self._boxes = boxes
        self._stops = np.array([box.stop - start for box in boxes], np.int64)
        parts = [part for output in reader.column.outputs for part in output.parts]
        self._views = [[self._view(array, part) for part in parts] for array in arrays]

    def copy(self, rows: Ints, into: Ints, outs: Sequence[NDArray[Any]], key: tuple[int, int]) -> None:
        """Copy samples, by their `rows` in the block, to the rows `into` of a batch. `key`: (seed, epoch)."""
        fields, column = self.reader.fields, self.reader.column
        corners = fields.anchors.corners(rows + self.start)
        corners = corners + fields.anchors.moves(rows + self.start, *key)
        region = np.searchsorted(self._stops, rows, side="right")
        for number in np.unique(region).tolist():
            mine = np.flatnonzero(region == number)
            low, _ = column.region(fields.axes, self._boxes[number])
            at = [
                (corners[axis, mine] * column.scales[name].numerator) // column.scales[name].denominator
                - low[column.dims.index(name)]
                for axis, name in enumerate(fields.axes)
                if name in column.dims
            ]
            self._copy(self._views[number], at, into[mine], outs)

    def _copy(
        self, views: Sequence[NDArray[Any]], at: Sequence[Ints], into: Ints, outs: Sequence[NDArray[Any]]
    ) -> None:
        view = iter(views)
        for output, out in zip(self.reader.column.outputs, outs, strict=True):
            axis = self._sample_position()
            for part in output.parts:
                source = next(view)
                target = out
                if part.length:
                    target = out[(slice(None),) * (1 + axis) + (slice(part.at, part.at + part.length),)]
                if not at:
                    target[into] = source
                elif prod(target.shape[1:]) * out.itemsize < LARGE_ROW:
                    target[into] = source[tuple(at)]
                else:
                    for row, *place in zip(into.tolist(), *(column.tolist() for column in at), strict=True):
                        target[row] = source[tuple(place)]

    def _sample_position(self) -> int:
        """Return the position of the sample axis in an output, with the channel axis."""
        column = self.reader.column
        position = column.dims.index(column.sample_axis) if column.sample_axis in column.dims else 0
        return position + int(column.channels > 0 and position > column.channel_axis)

    def _view(self, region: NDArray[Any], part: Part) -> NDArray[Any]:
        """Return a view of a region with an axis for each anchored axis, then the axes of the output."""
        column = self.reader.column
        dims = list(column.dims)
        if column.channels:
            dims.insert(column.channel_axis, "")
        places: dict[str, tuple[int, int]] = {}
        lengths: list[tuple[int, int]] = []
        start = [slice(None)] * len(dims)
        for number, (dim, size, stride) in enumerate(zip(dims, region.shape, region.strides, strict=True)):
            if dim == column.sample_axis and dim:
                start[number] = slice(part.offset, None)
                reach = (max(part.length, 1) - 1) * part.step
                places[dim] = size - part.offset - reach, stride
                lengths += [(part.length, stride * part.step)] if part.length else []
            elif dim in column.sizes:
                places[dim] = size - column.sizes[dim] + 1, stride
                lengths.append((column.sizes[dim], stride))
            else:
                lengths.append((size, stride))
        axes = [places[axis] for axis in self.reader.fields.axes if axis in places] + lengths
        return as_strided(region[tuple(start)], [n for n, _ in axes], [stride for _, stride in axes], writeable=False)


class Regions:
    """The regions of one field in all slots of an arena."""

    def __init__(self, slots: int, block: int) -> None:
        self._block = block
        self._blocks: list[BlockRegions | None] = [None] * slots

    def open(self, slot: int, make: Callable[[], BlockRegions], lock: threading.Lock) -> BlockRegions:
        """Return the regions of a slot, which the first caller makes."""
        with lock:
            block = self._blocks[slot]
            if block is None:
                block = self._blocks[slot] = make()
            return block

    def drop(self, slot: int) -> None:
        """Free the memory of a slot once no copy from it is in progress."""
        self._blocks[slot] = None

    def gather(self, places: Ints, lease: Lease, key: tuple[int, int]) -> dict[str, NDArray[Any]]:
        """Return the columns of a batch, whose rows are at `places` of the arena."""
        slots, rows = np.divmod(places, self._block)
        order = np.argsort(slots, kind="stable")
        used, first = np.unique(slots[order], return_index=True)
        blocks = [block for block in (self._blocks[slot] for slot in used.tolist()) if block is not None]
        outputs = blocks[0].reader.column.outputs
        dtype = blocks[0].reader.column.dtype
        outs = [lease((len(places), *output.shape), dtype) for output in outputs]
        for block, begin, end in zip(blocks, first.tolist(), [*first.tolist()[1:], len(places)], strict=True):
            into = order[begin:end]
            block.copy(rows[into], into, outs, key)
        return {output.name: out for output, out in zip(outputs, outs, strict=True)}
