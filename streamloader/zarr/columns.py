"""The columns that are read from arrays, and the chunks and boxes of elements that the samples of a block read.

The *region* of a block is the box of elements that its samples read, one array for each column. Chunks are decoded into
it once, whatever the number of samples that share them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from math import lcm, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.format.manifest import FieldLayout, OrderPin
from streamloader.order.anchors import Anchors, count_unused, runs_of
from streamloader.storage.buffers import Allocate, empty_buffer
from streamloader.storage.store import RangeReader, Store
from streamloader.zarr.cf import Unpacking
from streamloader.zarr.metadata import ZarrArray
from streamloader.zarr.reader import ABSENT, ArrayReader, ArrayRun, Place, Target

Ints = NDArray[np.int64]
Bound = tuple[int, ...]  # an element of a region for each dimension
RegionBox = tuple[int, Bound, Bound]  # the elements [low, high) of the region with this number
BOX_CACHE = 512
SAMPLED_BLOCKS = 64  # whose sizes are compared to find the memory of a block
REREAD = 1.15  # how often chunks are read, at most, if blocks may be wide enough


class Slice(NamedTuple):
    """A slice of an array in a column: the index on each dimension that the column lacks, and its channel's number.

    `channel` is None in a column without channels. `affine`: (mean, std) of the normalisation.
    """

    picks: Mapping[str, int]
    channel: int | None = None
    affine: tuple[float, float] | None = None


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

    @property
    def dtype(self) -> str:
        """The dtype of the array's values, unpacked."""
        assert self.array is not None
        return self.array.dtype.name if self.unpacking is None else self.unpacking.dtype


class Part(NamedTuple):
    """Elements of an output along the sample axis: `length` from `offset` after the anchor, `step` apart, below 0
    if times descend.

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

    `lengths`: of the dimensions, in their order. `sample_axis`: the dimension that windows lie along, or "". What is
    known once the samples are: `outputs`; `scales`, by anchored axis, the elements of this column for one of the
    anchors'; `sizes`, by axis of patches, the elements of a patch.

    `rows`: the first element of each row of a matrix in compressed sparse rows, and the end of the last one; int64
    (rows + 1,). Its samples are the elements of a row, in no `outputs`.
    """

    name: str
    lengths: Mapping[str, int]
    dtype: str
    members: tuple[Member, ...]
    sample_axis: str
    channels: int = 0
    rows: Ints | None = None
    outputs: tuple[Output, ...] = ()
    scales: Mapping[str, Fraction] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The names of the dimensions, without the channel axis."""
        return tuple(self.lengths)

    @cached_property
    def channel_axis(self) -> int:
        """The position of the channel axis: after the sample axis."""
        return 1 if self.sample_axis and self.dims[:1] == (self.sample_axis,) else 0

    @cached_property
    def sample_position(self) -> int:
        """The position of the sample axis in an output."""
        position = self.dims.index(self.sample_axis) if self.sample_axis in self.dims else 0
        return position + int(self.channels > 0 and position > self.channel_axis)

    @property
    def mean_row(self) -> float:
        """The mean number of elements of a sparse row, 1 for other columns."""
        return 1.0 if self.rows is None else float(self.rows[-1]) / max(1, self.rows.size - 1)

    @property
    def sample_bytes(self) -> int:
        """The bytes of one sample of all outputs, of sparse rows the mean."""
        values = sum(prod(output.shape) for output in self.outputs) if self.rows is None else self.mean_row
        return int(values * np.dtype(self.dtype).itemsize)

    def region(self, axes: Sequence[str], first: Bound, end: Bound) -> tuple[Bound, Bound]:
        """Return the first element and the end of the column's region for a box [first, end) of the anchors' `axes`."""
        if self.rows is not None:
            return (int(self.rows[first[0]]),), (int(self.rows[end[0]]),)
        low, high = dict.fromkeys(self.lengths, 0), dict(self.lengths)
        for axis, start, stop in zip(axes, first, end, strict=True):
            if axis in self.lengths:
                low[axis] = int(start * self.scales[axis])
                high[axis] = min(self.lengths[axis], -int(-stop * self.scales[axis] // 1))
        return tuple(low.values()), tuple(high.values())

    def shape(self, low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a region, with the channel axis."""
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        if self.channels:
            sizes.insert(self.channel_axis, self.channels)
        return tuple(sizes)

    def inside(self, first: Bound, low: Bound, high: Bound) -> tuple[slice, ...]:
        """Return the index of the elements [low, high) in a region that begins at `first`."""
        at = [slice(a - begin, b - begin) for a, b, begin in zip(low, high, first, strict=True)]
        if self.channels:
            at.insert(self.channel_axis, slice(None))
        return tuple(at)


@dataclass(frozen=True, eq=False)
class ArrayFields:
    """The columns of a dataset of arrays, by field, and its samples. `strict`: a missing chunk is an error.

    `first`: the element of a window that comes first in time, from its anchor on. `left_out`: the number of windows
    have other durations than those that were asked for. `order`: that of new runs, by default.
    """

    columns: Mapping[str, RegionColumn]
    anchors: Anchors
    strict: bool | None = False
    first: int = 0
    left_out: int = 0
    order: OrderPin | None = None

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The names of the anchored axes."""
        return tuple(axis.name for axis in self.anchors.axes)

    @cached_property
    def boxes(self) -> Callable[[int, int], list[tuple[int, Bound, Bound]]]:
        """`Anchors.boxes`, cached: every column asks for the same blocks."""
        return lru_cache(BOX_CACHE)(self.anchors.boxes)

    @property
    def unused(self) -> dict[str, int]:
        """The number of elements of each anchored axis that no sample reads; random patches count as not moved."""
        return {axis.name: count_unused(axis) for axis in self.anchors.axes}

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
        return {"index": index + self.first, **{f"index_{name}": values for name, values in corners.items()}}


class ChunkPlaces(NamedTuple):
    """The chunks that a region of a block needs, of the array of the column's member with this number."""

    region: int
    member: int
    places: Sequence[Place]


class BlockArrays(NamedTuple):
    """The memory of the regions of a block: of each its array, and `bounds`, its first element and its end."""

    arrays: Sequence[NDArray[Any]]
    bounds: Sequence[tuple[Bound, Bound]]


def common_box(one: tuple[Bound, Bound], other: tuple[Bound, Bound]) -> tuple[Bound, Bound] | None:
    """Return the bounds of the elements that two boxes have in common, None if there are none."""
    low, high = tuple(map(max, one[0], other[0])), tuple(map(min, one[1], other[1]))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


class RegionReader:
    """Reads one field of a dataset of arrays: the counterpart of `FieldReader`, for regions of blocks; thread-safe."""

    def __init__(self, store: Store, name: str, layout: FieldLayout, fields: ArrayFields) -> None:
        self.name = name
        self.store = store
        self.layout = layout
        self.fields = fields
        self.column = fields.columns[name]
        self.num_samples = len(fields.anchors)
        self.arrays = {  # by the number of the member
            number: ArrayReader(store, member.array, strict=fields.strict)
            for number, member in enumerate(self.column.members)
            if member.array is not None
        }

    @property
    def sample_bytes(self) -> float:
        """The bytes of a sample, of sparse rows the mean."""
        return float(self.column.sample_bytes)

    @property
    def has_constants(self) -> bool:
        """Whether some values are repeated for every sample, instead of read for each block."""
        return any(member.constant is not None for member in self.column.members)

    @property
    def fills_rows(self) -> bool:
        """Whether the region of one sample is a row of a batch: see `BatchRows`."""
        outputs = self.column.outputs
        if len(outputs) != 1 or len(outputs[0].parts) != 1 or outputs[0].parts[0].step != 1:
            return False
        ((low, high),) = self.regions(0, 1)
        return prod(self.column.shape(low, high)) == prod(outputs[0].shape)

    @property
    def request_bytes(self) -> int:
        """The most bytes of a request for one chunk."""
        return max((reader.codec.most_stored for reader in self.arrays.values()), default=1)

    @property
    def kept_bytes(self) -> int:
        """The most bytes of values that are kept for all blocks, and of the indexes of shards."""
        constants = sum(member.constant.nbytes for member in self.column.members if member.constant is not None)
        constants += 0 if self.column.rows is None else self.column.rows.nbytes
        return constants + sum(reader.kept_bytes for reader in self.arrays.values())

    @property
    def scratch_bytes(self) -> int:
        """The most bytes that a thread holds beside body and region: a decoded chunk, and one that is converted."""
        sizes = [
            reader.array.chunk_bytes * (1 if reader.codec.plain and member.unpacking is None else 2)
            for member, reader in self.members()
        ]
        return max(sizes, default=0)

    def members(self) -> list[tuple[Member, ArrayReader]]:
        """Return the members whose chunks are read, each with its reader."""
        return [(self.column.members[number], reader) for number, reader in self.arrays.items()]

    def boxes_of(self, member: Member, low: Bound, high: Bound) -> list[tuple[Bound, Bound]]:
        """Return the box of an array that each of its slices has in the region [low, high)."""
        return [self._bounds(member, each, low, high) for each in member.slices]

    def regions(self, start: int, stop: int) -> list[tuple[Bound, Bound]]:
        """Return the bounds of each region of the block of the samples [start, stop)."""
        return [self.column.region(self.fields.axes, low, high) for _, low, high in self.fields.boxes(start, stop)]

    def block_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the regions of a block."""
        sizes = (prod(self.column.shape(low, high)) for low, high in self.regions(start, stop))
        return sum(sizes) * np.dtype(self.column.dtype).itemsize

    def most_bytes(self, block: int) -> int:
        """Return the bytes of the largest of some blocks of `block` samples: the first, the last, others between."""
        firsts = range(0, self.num_samples, block)
        # cells with fewer samples come last, and a block has several of them
        some = {*firsts[:: max(1, len(firsts) // SAMPLED_BLOCKS)], *firsts[-SAMPLED_BLOCKS:]}
        return max(self.block_bytes(first, min(first + block, self.num_samples)) for first in some)

    def pieces(self, block: int) -> int:
        """Return about the number of requests of a block: neighbouring chunks of a shard are read by one."""
        pieces = 0
        for _, member, boxes in self.boxes(0, min(block, self.num_samples)):
            pieces += self.arrays[member].count_requests(boxes)
        return max(1, pieces)

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, int, list[tuple[Bound, Bound]]]]:
        """Yield the boxes of elements that the samples [start, stop) read: (region, number of the member, boxes)."""
        for region, (low, high) in enumerate(self.regions(start, stop)):
            for member in self.arrays:
                yield region, member, self.boxes_of(self.column.members[member], low, high)

    def reach(self, block: int) -> int:
        """Return how many blocks of `block` samples, on either side of one, may have some of its elements."""
        return max((1 + axis.reach // (axis.stride * block) for axis in self.fields.anchors.axes[:1]), default=0)

    def chunks_outside(self, start: int, stop: int, boxes: Sequence[RegionBox]) -> tuple[list[ChunkPlaces], list[int]]:
        """Return the chunks of the samples [start, stop) without those that boxes have all elements of.

        And the numbers of the boxes that have these. Elements that the region of a chunk does not have do not count.
        """
        left, used = list[ChunkPlaces](), set[int]()
        for region, number, wanted in self.boxes(start, stop):
            places, chunks = self.arrays[number].places(wanted), self.arrays[number].array.chunks
            mine = [n for n, (of, _, _) in enumerate(boxes) if of == region]
            first = np.array(places, np.int64).reshape(len(places), -1) * chunks
            has = np.ones((len(mine), len(places)), np.bool_)
            for each, (low, high) in zip(self.column.members[number].slices, wanted, strict=True):
                begin, end = np.maximum(first, low), np.minimum(first + chunks, high)
                for row, n in enumerate(mine):
                    a, b = self._bounds(self.column.members[number], each, *boxes[n][1:])
                    has[row] &= ((begin >= a) & (end <= b)).all(axis=1)
            used |= {mine[row] for row in np.flatnonzero(has.any(axis=1)).tolist()}
            left.append(ChunkPlaces(region, number, [places[at] for at in np.flatnonzero(~has.any(axis=0)).tolist()]))
        return [each for each in left if each.places], sorted(used)

    def runs(self, start: int, stop: int, chosen: Sequence[ChunkPlaces] | None = None) -> list[ArrayRun]:
        """Return the requests for the `chosen` chunks of the samples [start, stop), or for all.

        Raises as `ArrayReader.runs`.
        """
        if chosen is None:
            chosen = [ChunkPlaces(n, member, self.arrays[member].places(b)) for n, member, b in self.boxes(start, stop)]
        found: list[ArrayRun] = []
        for region, member, places in chosen:
            runs = self.arrays[member].runs(places)
            found += [ArrayRun(*run[:4], member, region, start, stop - start) for run in runs]
        return found or [ArrayRun("", 0, 0, (), first_sample=start, num_samples=stop - start)]

    def bad_rows(self, run: ArrayRun, start: int, stop: int) -> list[int]:
        """Return which of the samples [start, stop), counted from 0, may have elements of the chunks of a run."""
        bad = {chunk.place for chunk in run.chunks}
        rows = []
        for sample in range(start, stop):
            boxes = (boxes for _, member, boxes in self.boxes(sample, sample + 1) if member == run.member)
            if any(place in bad for each in boxes for place in self.arrays[run.member].places(each)):
                rows.append(sample - start)
        return rows

    def split(self, run: ArrayRun) -> list[ArrayRun]:
        """Return a request for each chunk of a run."""
        return [
            run._replace(
                start=run.start + max(0, chunk.start),
                stop=run.start + max(0, chunk.stop),
                chunks=(chunk._replace(start=min(chunk.start, 0), stop=chunk.stop - max(0, chunk.start)),),
            )
            for chunk in run.chunks
        ]

    @cached_property
    def extent(self) -> tuple[Bound, Bound]:
        """The bounds of all elements that samples read."""
        bounds = [axis.cell_bounds for axis in self.fields.anchors.axes]
        low, high = (tuple(int(ends[n]) for ends in ((a.min(), b.max()) for a, b in bounds)) for n in (0, 1))
        return self.column.region(self.fields.axes, low, high)

    @cached_property
    def first_axis(self) -> int:
        """The dimension of `runs_read`: that of the sample axis, if the column has it."""
        dims = self.column.dims
        return dims.index(self.column.sample_axis) if self.column.sample_axis in dims else 0

    def runs_read(self, chunk: int) -> Ints:
        """Return the runs of elements along `first_axis` in chunks of this size that samples read; int64 (runs, 2)."""
        column, low, high = self.column, *(bound[self.first_axis] for bound in self.extent)
        first, end = np.array([low]), np.array([high])
        if column.rows is not None or column.sample_axis in column.dims:
            first, end = self.fields.anchors.axes[0].cell_bounds
        if column.rows is not None:
            first, end = column.rows[first], column.rows[end]
        change = np.zeros(-(-high // chunk) + 1, np.int64)
        np.add.at(change, first // chunk, 1)
        np.add.at(change, -(-end // chunk), -1)
        runs = runs_of(np.flatnonzero(np.cumsum(change)))
        return np.minimum(runs * chunk, column.lengths[column.dims[self.first_axis]])

    @cached_property
    def kept_runs(self) -> Ints:
        """The runs of elements along `first_axis` in chunks of any member that samples read, at least one."""
        if not self.column.dims:  # a single value, repeated
            return np.array([[0, 1]], np.int64)
        dim = self.column.dims[self.first_axis]
        sizes = [reader.array.chunks[member.dims.index(dim)] for member, reader in self.members()]
        runs = self.runs_read(max(1, min(self.column.lengths[dim], lcm(*sizes))))
        return runs if runs.size else np.zeros((1, 2), np.int64)

    def bounds_of(self, first: int, stop: int) -> tuple[Bound, Bound]:
        """Return the bounds of the elements that samples read in [first, stop) along `first_axis`."""
        low, high = map(list, self.extent)
        if low:
            low[self.first_axis], high[self.first_axis] = first, stop
        return tuple(low), tuple(high)

    @property
    def all_bytes(self) -> int:
        """The bytes of all elements in `kept_runs`."""
        total = int(np.diff(self.kept_runs).sum())
        return prod(self.column.shape(*self.bounds_of(0, total))) * np.dtype(self.column.dtype).itemsize

    def read_bytes(self, start: int, stop: int) -> int:
        """Return the decoded bytes of the chunks that the samples [start, stop) read, as one block."""
        found = ((self.arrays[member], boxes) for _, member, boxes in self.boxes(start, stop))
        return sum(len(array.places(boxes)) * array.array.chunk_bytes for array, boxes in found)

    @cached_property
    def num_chunks(self) -> int:
        """The number of chunks that samples read."""
        return sum(self.count_chunks(member, array) for member, array in self.members())

    def count_chunks(self, member: Member, array: ArrayReader) -> int:
        """Return the number of chunks of a member that samples read."""
        first = self.extent[0][self.first_axis]
        across = len(array.places(self.boxes_of(member, *self.bounds_of(first, first + 1))))
        chunk = array.array.chunks[member.dims.index(self.column.dims[self.first_axis])]
        along: int = sum(-(-stop // chunk) - low // chunk for low, stop in self.runs_read(chunk).tolist())
        return across * along

    def fetch(self, reader: RangeReader, run: ArrayRun, allocate: Allocate = empty_buffer) -> memoryview:
        """Return the bytes of a run by one request, without retries; `ABSENT` if its object does not exist.

        If a chunk is missing, others of its array are asked for. Raises as `ArrayReader.check_exists`.
        """
        array = self.arrays.get(run.member) if run.chunks else None
        if array is None:
            return ABSENT
        body = array.fetch(reader, run, allocate)
        if body is ABSENT or run.chunks[0].start < 0:
            array.check_exists()
        return body

    def write_constants(self, block: BlockArrays) -> None:
        """Write the values that are constant to the regions of a block."""
        dims = self.column.dims
        for member in self.column.members:
            if member.constant is None:
                continue
            wide = tuple(slice(None) if dim in member.dims else None for dim in dims)
            for array, (low, high) in zip(block.arrays, block.bounds, strict=True):
                at = tuple(slice(low[dims.index(dim)], high[dims.index(dim)]) for dim in member.dims)
                self._channel(array, member.slices[0])[...] = member.constant[at][wide]

    def write(self, run: ArrayRun, body: memoryview, block: BlockArrays, allocate: Allocate) -> tuple[int, int]:
        """Decode the chunks of a run into the regions of their block; return (missing chunks, decoded bytes).

        Chunks that lie in a region only in part are decoded into memory from `allocate` first.

        Raises `CorruptError`, or `MissingObjectError` for a missing chunk if the dataset is strict.
        """
        reader, member = self.arrays.get(run.member), self.column.members[run.member]
        if reader is None or not run.chunks:
            return 0, 0
        low, high = block.bounds[run.region]
        targets = []
        for each in member.slices:
            target = self._channel(block.arrays[run.region], each)
            target = target.transpose([self.column.dims.index(dim) for dim in member.dims if dim not in each.picks])
            picked = tuple(axis for axis, dim in enumerate(member.dims) if dim in each.picks)
            first = self._bounds(member, each, low, high)[0]
            targets.append(Target(np.expand_dims(target, picked), first, each.affine))
        decode = partial(reader.decode_into, run, allocate=allocate)
        found = [decode(chunk, body, targets, member.unpacking) for chunk in run.chunks]
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
        return region[(slice(None),) * self.column.channel_axis + (each.channel, ...)]  # a view, of one element too


def wider_block(readers: Collection[RegionReader], block: int, allowed: Callable[[int], bool]) -> int:
    """Return `block`, doubled as far as it is `allowed` and lets windows that reach beyond blocks read fewer chunks."""
    samples = max(reader.num_samples for reader in readers)
    least = sum(
        r.count_chunks(member, array) * array.array.chunk_bytes for r in readers for member, array in r.members()
    )

    def factor(block: int) -> float:
        stop = min(block, samples)
        return sum(reader.read_bytes(0, stop) for reader in readers) * samples / max(1, stop * least)

    now = factor(block)
    while now > REREAD and allowed(2 * block) and (wider := factor(2 * block)) < now:
        block, now = 2 * block, wider
    return block
