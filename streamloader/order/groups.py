"""Batches of samples of like length: the samples of a few steps exchange their positions (rule 12). No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.order.epoch_order import EpochOrder, permute
from streamloader.samples import distinct

Ints = NDArray[np.int64]
Lengths = Callable[[Ints], Ints]  # the lengths of samples by their number in the order
# The steps of a window, the positions of a step, and the lengths.
Bucket = tuple[int, int, Lengths]
# Where some windows begin and end, what returns the numbers of the steps of positions in them, for a lane at once since
# all take much memory, and the steps of a window: those of the window w have the numbers from w times as many on.
Windows = tuple[int, int, Callable[[Ints], Ints], int]


def window_bounds(steps: int, group: int, num_samples: int, position: int) -> tuple[int, int]:
    """Return the first position of the window that has a position, and the one after its last.

    The last window has the steps that are left, of which the last one may be incomplete.
    """
    size = steps * group
    if position >= num_samples:
        return position, position
    begin = position // size * size
    return begin, min(begin + size, num_samples)


def number_steps(bucket: tuple[int, int, Any], keys: EpochOrder, num_samples: int, positions: Ints) -> tuple[int, Ints]:
    """Return the first position of the windows that have some positions, and the numbers of their steps.

    The steps of a window are permuted, by the key w[2] of the epoch of `keys` plus the number of the window.
    """
    steps, group, _ = bucket
    first, last = int(positions.min()) // (steps * group), int(positions.max()) // (steps * group)
    parts = []
    for window in range(first, last + 1):
        begin, end = window_bounds(steps, group, num_samples, window * steps * group)
        count = -(-(end - begin) // group)
        parts.append((window - first) * steps + permute(np.arange(count), count, keys.group_key(window)))
    return first * steps * group, np.concatenate(parts)


def exchanged(bucket: Bucket, order: EpochOrder, positions: Ints) -> tuple[Ints, Ints]:
    """Return the positions whose samples some positions get, and the lengths of these."""
    steps, group, lengths = bucket
    if not positions.size:
        return positions, positions
    begin, numbers = number_steps(bucket, order, order.num_samples, positions)
    end = begin + numbers.size * group
    return exchanged_in_lanes(order, lengths, (begin, end, lambda at: numbers[(at - begin) // group], steps), positions)


def exchanged_in_lanes(order: EpochOrder, lengths: Lengths, windows: Windows, positions: Ints) -> tuple[Ints, Ints]:
    """Return the positions whose samples some positions of windows get, and the lengths of these samples.

    Positions of N or more are of later epochs.

    The positions of a window in a lane of an epoch, sorted by the number of their step, ties by position, get the
    samples of these positions, sorted by length, ties by position.
    """
    (first, last, number, steps), count, stride = windows, order.num_samples, order.lanes
    out, keys = np.empty((2, positions.size), np.int64), positions // count * stride + positions % count % stride
    for key in distinct(keys).tolist():
        later, lane = divmod(key, stride)
        before = later * count
        begin, end = max(first - before, 0), min(last - before, count)
        # the windows of a lane together, since finding samples costs as much as the shuffle's window is long
        places = np.arange(begin + (lane - begin) % stride, end, stride)
        low = int(places[0]) // stride
        epoch = replace(order, epoch=order.epoch + later)
        found = lengths(epoch.samples(epoch.emit(lane, low, low + places.size)))
        of_place = number(places + before)
        window = of_place // steps
        edges = (np.flatnonzero(np.diff(window)) + 1).tolist()
        ranked = [at + _argsort(part) for at, part in zip([0, *edges], np.split(found, edges), strict=True)]
        taken, source = np.empty_like(places), np.concatenate(ranked)
        taken[_argsort(of_place)] = source
        mine = np.flatnonzero(keys == key)
        source = taken[(positions[mine] - before) // stride - low]
        out[:, mine] = before + places[source], found[source]
    return out[0], out[1]


def _argsort(values: NDArray[Any]) -> Ints:
    small = values.max(initial=0) < 1 << 16  # numpy sorts 16 bits by radix
    return np.argsort(values.astype(np.uint16) if small else values, kind="stable")
