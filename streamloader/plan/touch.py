"""Which blocks the rows of some steps touch, in lanes (shuffled) or in units (in order of the samples)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.plan.order import EpochOrder

__all__ = [
    "Ints",
    "Key",
    "Parts",
    "Span",
    "Touched",
    "lane_samples",
    "touch_lanes",
    "touch_nothing",
    "touch_units",
]

Ints = NDArray[np.int64]
Parts = Callable[
    [], Iterator[Ints]
]  # the positions of a span's rows, some at a time, from the first again at each call
Key = tuple[int, int]  # (lane, j): the j-th block to arrive; (0, j): the j-th unit
K = TypeVar("K")


@dataclass(frozen=True)
class Span:
    """`steps` steps from `first_step` on, over the positions [begin, end); `last` when no step follows them."""

    first_step: int
    steps: int
    begin: int
    end: int
    last: bool


@dataclass(frozen=True, eq=False)
class Touched(Generic[K]):
    """Blocks that a span may touch, and where in them its rows lie. `block` and `row` have an entry for each row."""

    keys: list[K]
    start: Ints  # first sample of each block, or of the part of it that is the lane's
    stop: Ints
    finished: NDArray[np.bool_]  # no later step uses the block
    block: NDArray[Any]  # integers: index into the above
    row: NDArray[Any]  # counted from that start


@dataclass(frozen=True, eq=False)
class _LanePart:
    """What one lane emits at some indexes: `block` counts the lane's examined blocks from the `first` one on.

    Where a block stands across two lanes, each has a part: the rows [below, below + size) of it; `row` counts from
    `below`.
    """

    first: int
    below: Ints
    size: Ints
    finished: NDArray[np.bool_]
    block: Ints
    row: Ints


def touch_lanes(order: EpochOrder, sources: Parts, span: Span, live: Collection[Key]) -> Touched[Key]:
    """The blocks of a shuffled order at some positions, a part at a time, those of `live` included.

    Every lane with a row or a live block is read from the span's first position to its end.
    """
    used, low, count = _used_lanes(order, sources, span)
    used[[key[0] for key in live]] = True
    lanes = np.flatnonzero(used)
    stops = -((lanes - span.end) // order.lanes)
    width = int(stops.max()) - low
    dtype = np.int32 if order.params.block < 2**31 else np.int64
    table = np.empty((2, lanes.size * width), dtype)
    keys: list[Key] = []
    parts: list[_LanePart] = []
    for begin, number, stop in zip(range(0, table[0].size, width), lanes.tolist(), stops.tolist(), strict=True):
        part = _read_lane(order, number, low, stop)
        np.add(part.block, len(keys), out=table[0, begin : begin + stop - low], casting="same_kind")
        table[1, begin : begin + stop - low] = part.row
        keys += [(number, part.first + i) for i in range(part.finished.size)]
        parts.append(part)
    start = order.block_numbers(np.array([key[1] for key in keys], np.int64)) * order.params.block
    start += np.concatenate([part.below for part in parts])
    offsets = (np.cumsum(used) - 1) * width - low
    found, done = np.empty((2, count), dtype), 0
    for source in sources():
        at = offsets[source % order.lanes] + source // order.lanes
        for values, out in zip(table, found[:, done : done + at.size], strict=True):
            np.take(values, at, out=out, mode="clip")
        done += at.size
    return Touched(
        keys=keys,
        start=start,
        stop=start + np.concatenate([part.size for part in parts]),
        finished=np.concatenate([part.finished for part in parts]) | span.last,
        block=found[0],
        row=found[1],
    )


def _used_lanes(order: EpochOrder, sources: Parts, span: Span) -> tuple[NDArray[np.bool_], int, int]:
    """Return the lanes that some positions are in, the first index among them, and how many there are."""
    used, low, count = np.zeros(order.lanes, np.bool_), span.begin // order.lanes, 0
    for source in sources():
        used[source % order.lanes] = True
        low = min(low, int(source.min(initial=span.begin)) // order.lanes)  # padding may repeat what came before
        count += source.size
    return used, low, count


def lane_samples(order: EpochOrder, sources: Parts, span: Span) -> Iterator[Ints]:
    """Yield the samples of a shuffled order at some positions, a part at a time, by way of the lanes they are in."""
    used, low, _ = _used_lanes(order, sources, span)
    lanes = np.flatnonzero(used)
    width = -(-span.end // order.lanes) - low
    emitted = np.zeros(lanes.size * width, np.int64)
    for begin, number in zip(range(0, emitted.size, max(1, width)), lanes.tolist(), strict=True):
        stop = min(low + width, order.lane_bounds(number)[1])
        emitted[begin : begin + stop - low] = order.emit(number, low, stop)
    offsets = (np.cumsum(used) - 1) * width - low
    for source in sources():
        yield order.samples(emitted[offsets[source % order.lanes] + source // order.lanes])


def touch_nothing(samples: Ints) -> Touched[Any]:
    """Return rows of these samples that are taken from no block."""
    nothing = np.zeros(1, np.int64)
    return Touched([(0, 0)], nothing, nothing, np.zeros(1, np.bool_), np.zeros(samples.size, np.int64), samples)


def _read_lane(order: EpochOrder, lane: int, low: int, stop: int) -> _LanePart:
    """The indexes [low, stop) of a lane. A block is finished unless an arrival of it is emitted at `stop` or later."""
    found = order.examine(lane, low, stop)
    begin, length = order.lane_bounds(lane)
    start = begin + found.first
    end = start + found.later.size
    first_block, last_block = order.locate(np.array([start, end - 1]))[0].tolist()
    edges = order.first_arrivals(np.arange(first_block, last_block + 2))
    of_lane = edges.clip(begin, begin + length)
    later = np.logical_or.reduceat(found.later, edges[:-1].clip(start) - start)
    emitted = found.offsets + start
    block = order.locate(emitted)[0] - first_block
    finished = ~later & (of_lane[1:] <= end)
    below, size = (of_lane - edges)[:-1], of_lane[1:] - of_lane[:-1]
    return _LanePart(first_block, below, size, finished, block, emitted - of_lane[block])


def touch_units(
    num_samples: int, unit: int, source: Ints, onward: int, *, last: bool, live: Collection[Key] = ()
) -> Touched[Key]:
    """The units of `unit` consecutive samples at the positions `source`, where a position is a sample; and live ones.

    Later rows of this rank begin at the position `onward`, unless these steps are the `last`.
    """
    held = np.fromiter((key[1] for key in live), np.int64, len(live))
    units, block = np.unique(np.concatenate([source // unit, held]), return_inverse=True)
    block = block[: source.size]
    start = units * unit
    stop = np.minimum(start + unit, num_samples)
    return Touched(
        keys=[(0, number) for number in units.tolist()],
        start=start,
        stop=stop,
        finished=(stop <= onward) | last,
        block=block,
        row=source - start[block],
    )
