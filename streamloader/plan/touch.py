"""Which blocks the rows of some steps touch, in lanes (shuffled) or in units (in order of the samples)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.plan.order import EpochOrder

__all__ = ["Ints", "Key", "Span", "Touched", "lane_samples", "touch_lanes", "touch_nothing", "touch_units"]

Ints = NDArray[np.int64]
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
    block: Ints  # index into the above
    row: Ints  # counted from that start


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


def touch_lanes(order: EpochOrder, source: Ints, span: Span, live: Collection[Key]) -> Touched[Key]:
    """The blocks of a shuffled order at the positions `source`, those of `live` included.

    Every lane with a row or a live block is read from the span's first position to its end.
    """
    lane, index = source % order.lanes, source // order.lanes
    used = np.zeros(order.lanes, np.bool_)
    used[lane] = True
    used[[key[0] for key in live]] = True
    lanes = np.flatnonzero(used)
    low = int(index.min(initial=span.begin // order.lanes))  # padding may repeat what came before the span
    stops = -((lanes - span.end) // order.lanes)
    width = int(stops.max()) - low
    table = np.empty((2, lanes.size, width), np.int64)
    keys: list[Key] = []
    parts: list[_LanePart] = []
    for slot, (number, stop) in enumerate(zip(lanes.tolist(), stops.tolist(), strict=True)):
        part = _read_lane(order, number, low, stop)
        np.add(part.block, len(keys), out=table[0, slot, : stop - low])
        table[1, slot, : stop - low] = part.row
        keys += [(number, part.first + i) for i in range(part.finished.size)]
        parts.append(part)
    slots = np.cumsum(used) - 1
    at = slots[lane] * width + (index - low)
    start = order.block_numbers(np.array([key[1] for key in keys], np.int64)) * order.params.block
    start += np.concatenate([part.below for part in parts])
    return Touched(
        keys=keys,
        start=start,
        stop=start + np.concatenate([part.size for part in parts]),
        finished=np.concatenate([part.finished for part in parts]) | span.last,
        block=table[0].ravel()[at],
        row=table[1].ravel()[at],
    )


def lane_samples(order: EpochOrder, source: Ints) -> Ints:
    """Return the samples of a shuffled order at some positions, by way of the lanes that they are in."""
    if not source.size:
        return source
    lane, index = source % order.lanes, source // order.lanes
    lanes, slot = np.unique(lane, return_inverse=True)
    low = int(index.min())
    emitted = np.zeros((lanes.size, int(index.max()) + 1 - low), np.int64)
    for row, number in zip(emitted, lanes.tolist(), strict=True):
        stop = min(low + row.size, order.lane_bounds(number)[1])
        row[: stop - low] = order.emit(number, low, stop)
    return order.samples(emitted[slot, index - low])


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
