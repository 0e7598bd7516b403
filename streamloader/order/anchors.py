"""Samples that are windows and patches of arrays: which there are, and which sample is where. Pure arithmetic.

An *anchor* is the first element of a window along the sample axis, or of a patch along another axis. Along each axis,
anchors lie in *segments*, runs of elements that no window leaves. A *cell* is a box of stored chunks. The samples of a
cell have consecutive numbers, and most cells have the same number of samples, which is the block of the order: a block
then needs the chunks of one cell, and those that its last windows and patches reach beyond it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from streamloader.order.epoch_order import mix
from streamloader.samples import distinct

Ints = NDArray[np.int64]

# A block reads at most this many times the chunks of its cell, if `CELL_BYTES` and `LEAST_CELLS` allow: larger cells
# read fewer chunks twice, and take more memory.
HALO = 1.25
CELL_BYTES = 32 << 20  # decoded, of all fields, unless one chunk is larger
LEAST_CELLS = 64  # of an epoch, so that the permutation of blocks mixes it
# Cells of less than these bytes grow along the first axis, if many are left: the work per block would be most of all.
SMALL_CELL = 1 << 20
MANY_CELLS = 4096


@dataclass(frozen=True, eq=False)
class Axis:
    """The anchors along one axis: those of segment i are `first[i] + j * stride` for j in [0, `count[i]`).

    A sample reads elements in [a, a + extent) of its anchor a: those at the ascending `offsets` from it, all if that is
    None. With `jitter` above 1, the anchor of a sample moves by a random multiple of `snap` below `jitter`, the last
    anchor by one below `last_jitter`. `length` is that of the axis and `cell` that of a cell, in elements.
    """

    name: str
    length: int
    first: Ints
    count: Ints
    stride: int
    extent: int
    cell: int
    jitter: int = 1
    last_jitter: int = 1
    snap: int = 1
    offsets: Ints | None = None

    @property
    def num_anchors(self) -> int:
        """The number of anchors."""
        return int(self.count.sum())

    @property
    def num_cells(self) -> int:
        """The number of cells along the axis."""
        return max(1, -(-self.length // self.cell))

    @property
    def reach(self) -> int:
        """The elements from an anchor to the last element that its sample may read."""
        return self.extent + max(self.jitter, self.last_jitter) - 1

    @cached_property
    def ends(self) -> Ints:
        """The number of anchors up to the end of each segment."""
        return np.cumsum(self.count)

    @cached_property
    def cell_bounds(self) -> tuple[Ints, Ints]:
        """The first element that the samples of each cell with anchors read, and the end of the last one."""
        cells = np.flatnonzero(np.diff(self.before_cell))
        first, last = (self.elements(self.before_cell[cells + end] - end) for end in (0, 1))
        return first, np.minimum(last + self.reach, self.length)

    @cached_property
    def before_cell(self) -> Ints:
        """The number of anchors before each cell, and their total; shape (cells + 1,)."""
        edges = np.arange(self.num_cells + 1, dtype=np.int64) * self.cell
        last = np.searchsorted(self.first, edges, side="left") - 1  # the segment that begins before each edge
        inside = np.maximum(last, 0)
        partial = np.minimum(-(-(edges - self.first[inside]) // self.stride), self.count[inside])
        return np.where(last < 0, 0, self.ends[inside] - self.count[inside] + partial)

    def elements(self, anchors: Ints) -> Ints:
        """Return the first element of the anchors with these numbers."""
        segment = np.searchsorted(self.ends, anchors, side="right")
        return self.first[segment] + (anchors - self.ends[segment] + self.count[segment]) * self.stride


@dataclass(frozen=True, eq=False)
class Anchors:
    """The samples of arrays: one for each combination of anchors of the axes, numbered cell by cell.

    `aligned`: cells with the most samples come first, so that all but the last blocks are whole cells; otherwise cells
    are in the order of their elements, the first axis slowest.
    """

    axes: tuple[Axis, ...]
    aligned: bool = True

    def __len__(self) -> int:
        return prod(axis.num_anchors for axis in self.axes)

    @cached_property
    def _counts(self) -> tuple[Ints, ...]:
        return tuple(np.diff(axis.before_cell) for axis in self.axes)

    @cached_property
    def _cells(self) -> tuple[Ints, Ints]:
        """The number of each cell that has samples, in their order, and the number of samples up to its end."""
        counts = np.ones(1, np.int64)
        for part in self._counts:
            counts = np.multiply.outer(counts, part).reshape(-1)
        cells = np.flatnonzero(counts)
        if self.aligned and cells.size:
            cells = cells[np.argsort(counts[cells] < counts.max(), kind="stable")]
        return cells, np.cumsum(counts[cells])

    @property
    def block(self) -> int:
        """The most samples of a cell, at least 1."""
        return max(1, prod(int(counts.max(initial=0)) for counts in self._counts))

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return the index of each sample's cell, in the order of samples, and its anchors; shapes (n,), (axes, n)."""
        cells, ends = self._cells
        index = np.searchsorted(ends, samples, side="right")
        coordinates = np.unravel_index(cells[index], tuple(axis.num_cells for axis in self.axes))
        counts = [count[at] for count, at in zip(self._counts, coordinates, strict=True)]
        rest = samples - ends[index] + prod(counts)
        anchors = np.empty((len(self.axes), samples.size), np.int64)
        for number in range(len(self.axes) - 1, -1, -1):
            rest, local = np.divmod(rest, counts[number])
            anchors[number] = self.axes[number].before_cell[coordinates[number]] + local
        return index, anchors

    def corners(self, samples: Ints, key: tuple[int, int] | None = None) -> Ints:
        """Return the first element of each sample on each axis; shape (axes, n).

        With `key`, (seed, epoch), random patches are moved, by a function of the key and the sample.
        """
        anchors = self.locate(samples)[1]
        corners = np.stack([axis.elements(row) for axis, row in zip(self.axes, anchors, strict=True)])
        if key is not None and any(axis.reach > axis.extent for axis in self.axes):
            corners += self._moves(samples, anchors, *key)
        return corners

    def _moves(self, samples: Ints, anchors: Ints, seed: int, epoch: int) -> Ints:
        moves = np.zeros_like(anchors)
        key = mix(mix(np.array([seed], np.uint64)) ^ np.uint64(epoch))
        for number, axis in enumerate(self.axes):
            drawn = mix(mix(samples.astype(np.uint64) ^ key) + np.uint64(number))
            limits = np.where(anchors[number] < axis.num_anchors - 1, axis.jitter, axis.last_jitter)
            steps = -(-limits // axis.snap)
            moves[number] = (drawn % steps.astype(np.uint64)).astype(np.int64) * axis.snap
        return moves

    def boxes(self, start: int, stop: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Return (end, low, high) of the boxes that the samples [start, stop) read, in order. O(stop - start).

        The samples from the end of the previous box to `end` lie in one cell, and read the elements [low, high).
        Cells that follow each other along the first axis without a gap, with the same index on the others, share a box.
        """
        samples = np.arange(start, stop, dtype=np.int64)
        index, anchors = self.locate(samples)
        cells = self._cells[0][index]
        inner = prod(axis.num_cells for axis in self.axes[1:])
        step, apart = np.diff(cells), np.zeros(max(0, samples.size - 1), np.bool_)
        if self.axes:
            apart = np.diff(self.axes[0].elements(anchors[0])) > self.axes[0].reach
        edges = [0, *(np.flatnonzero((step != 0) & ((step != inner) | apart)) + 1).tolist(), samples.size]
        boxes = []
        for low, high in pairwise(edges):
            corners = [axis.elements(row[low:high]) for axis, row in zip(self.axes, anchors, strict=True)]
            last = [int(part.max()) + axis.reach for axis, part in zip(self.axes, corners, strict=True)]
            ends = tuple(min(axis.length, end) for axis, end in zip(self.axes, last, strict=True))
            boxes.append((start + high, tuple(int(part.min()) for part in corners), ends))
        return boxes


def segment_anchors(segments: Ints, extent: int, stride: int) -> tuple[Ints, Ints]:
    """Return the first anchor of each segment and the number of its anchors, without segments that have none.

    `segments`: the first element and the end of each, int64 (n, 2). A sample's elements [a, a + extent) stay inside.
    """
    count = (segments[:, 1] - segments[:, 0] - extent) // stride + 1
    kept = count > 0
    return segments[kept, 0], count[kept]


def expand_anchors(first: Ints, count: Ints, stride: int) -> tuple[Ints, Ints]:
    """Return every anchor of segments, and the first one of its segment; shapes (n,)."""
    starts = np.repeat(first, count)
    return starts + stride * (np.arange(starts.size) - np.repeat(np.cumsum(count) - count, count)), starts


def anchor_runs(anchors: Ints, stride: int) -> tuple[Ints, Ints]:
    """Return the first and the number of the anchors in each run of ascending ones that are `stride` apart."""
    edges = np.flatnonzero(np.diff(anchors, prepend=-stride - 1, append=-1) != stride)
    return anchors[edges[:-1]], np.diff(edges)


def split_segments(segments: Ints, borders: Ints) -> Ints:
    """Return the segments, cut before each of the ascending elements `borders`."""
    starts = distinct(np.concatenate([segments[:, 0], borders]))
    owner = np.searchsorted(segments[:, 0], starts, side="right") - 1
    inside = (owner >= 0) & (starts < segments[np.maximum(owner, 0), 1])
    starts, owner = starts[inside], owner[inside]
    following = np.append(starts[1:], np.iinfo(np.int64).max)
    return np.stack([starts, np.minimum(following, segments[owner, 1])], axis=1)


def runs_of(elements: Ints) -> Ints:
    """Return the runs of consecutive numbers in ascending `elements` as segments, int64 (n, 2)."""
    if not elements.size:
        return np.zeros((0, 2), np.int64)
    cuts = np.flatnonzero(np.diff(elements) != 1) + 1
    edges = np.concatenate([[0], cuts, [elements.size]])
    return np.stack([elements[edges[:-1]], elements[edges[1:] - 1] + 1], axis=1)


def choose_cells(axes: Sequence[Axis], element_bytes: float) -> tuple[int, ...]:
    """Return the elements of a cell along each axis, whose `cell` is one chunk at first: multiples of that.

    `element_bytes`: decoded bytes of all fields in a box of one element of every axis. A cell grows along the axis that
    saves most chunks, while it reads more than `HALO` times its chunks and the limits of this module allow it; cells
    of windows are also multiples of the stride, so that they have the same number of samples.
    """
    cells = [min(axis.length, axis.cell) for axis in axes]

    def allowed(trial: Sequence[int], most: int = CELL_BYTES, least: int = LEAST_CELLS) -> bool:
        count = prod(-(-axis.length // cell) for axis, cell in zip(axes, trial, strict=True))
        return prod(trial) * element_bytes <= most and count >= least

    for number, axis in enumerate(axes):
        whole = lcm(axis.cell, axis.stride)
        trial = [*cells[:number], whole, *cells[number + 1 :]]
        if whole < axis.length and allowed(trial):
            cells = trial
    while _read_factor(axes, cells) > HALO:
        larger = [min(axis.length, 2 * cell) for axis, cell in zip(axes, cells, strict=True)]
        trials = [[*cells[:n], larger[n], *cells[n + 1 :]] for n in range(len(axes)) if larger[n] > cells[n]]
        trials = [trial for trial in trials if allowed(trial)]
        if not trials:
            break
        cells = min(trials, key=lambda trial: _read_factor(axes, trial))
    while cells[0] < axes[0].length and allowed([2 * cells[0], *cells[1:]], SMALL_CELL, MANY_CELLS):
        cells[0] *= 2
    return tuple(cells)


def _read_factor(axes: Sequence[Axis], cells: Sequence[int]) -> float:
    """Return how many times its own chunks a cell reads, with those that its windows and patches reach beyond it.

    The `cell` of each axis is one chunk.
    """
    factor = 1.0
    for axis, cell in zip(axes, cells, strict=True):
        own = -(-cell // axis.cell)
        last = (cell - 1) // axis.stride * axis.stride + axis.reach  # elements from the first anchor of the cell on
        factor *= min(-(-last // axis.cell), -(-axis.length // axis.cell)) / own
    return factor


def count_unused(axis: Axis) -> int:
    """Return the number of elements of an axis that no sample reads, without jitter."""
    offsets = np.arange(axis.extent) if axis.offsets is None else axis.offsets
    anchors = axis.elements(np.arange(axis.num_anchors))
    change = np.zeros(axis.length + 1, np.int64)  # of the number of samples that read an element, from one to the next
    for low, high in runs_of(offsets).tolist():
        change[anchors + low] += 1
        change[anchors + high] -= 1
    return axis.length - int(np.count_nonzero(np.cumsum(change)))
