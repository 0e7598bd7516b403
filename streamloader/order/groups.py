"""Batches of samples of like length: the samples of a few steps exchange their positions (rule 12). No I/O."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from streamloader.order.epoch_order import EpochOrder, distinct, permute

Ints = NDArray[np.int64]
# The steps of a window, the positions of a step, and the lengths of samples by their number in the order.
Bucket = tuple[int, int, Callable[[Ints], Ints]]


def window_bounds(bucket: Bucket, order: EpochOrder, position: int) -> tuple[int, int]:
    """Return the first position of the window that has a position, and the one after its last.

    The last window has the steps that are left; the positions of an incomplete step after it are none of any window.
    """
    steps, group, _ = bucket
    size, whole = steps * group, order.num_samples // group * group
    if position >= whole:
        return position, position
    begin = position // size * size
    return begin, min(begin + size, whole)


def exchanged(bucket: Bucket, order: EpochOrder, positions: Ints) -> Ints:
    """Return the positions whose samples some positions get.

    In each window the samples of each lane are sorted by length, ties by position, and take the lane's positions in
    this order, so that each step has samples of like length. Then the steps of the window are permuted, by the key
    w[2] of the epoch plus the number of the window.
    """
    steps, group, lengths = bucket
    out = positions.copy()
    for window in distinct(positions // (steps * group)).tolist():
        begin, end = window_bounds(bucket, order, window * steps * group)
        rows = np.flatnonzero((positions >= begin) & (positions < end))
        if not rows.size:
            continue
        count = (end - begin) // group
        step, place = np.divmod(positions[rows] - begin, group)
        moved = begin + permute(np.arange(count), count, order.group_key(window))[step] * group + place
        lanes = moved % order.lanes
        for lane in distinct(lanes).tolist():
            mine = np.flatnonzero(lanes == lane)
            first = begin + (lane - begin) % order.lanes
            low, high = first // order.lanes, first // order.lanes + -(-(end - first) // order.lanes)
            ranked = np.argsort(lengths(order.samples(order.emit(lane, low, high))), kind="stable")
            out[rows[mine]] = first + ranked[(moved[mine] - first) // order.lanes] * order.lanes
    return out
