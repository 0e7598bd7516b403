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
    size, whole = steps * group, order.num_samples // group * group
    out, rows = positions.copy(), np.flatnonzero(positions < whole)
    moved = positions[rows]
    windows = moved // size
    for window in distinct(windows).tolist():
        inside, begin = windows == window, window * size
        count = (min(begin + size, whole) - begin) // group
        step, place = np.divmod(moved[inside] - begin, group)
        moved[inside] = begin + permute(np.arange(count), count, order.group_key(window))[step] * group + place
    # the windows of a lane together, since finding samples costs as much as the shuffle's window is long
    begin, end = int(windows.min(initial=0)) * size, min((int(windows.max(initial=-1)) + 1) * size, whole)
    lanes = moved % order.lanes
    for lane in distinct(lanes).tolist():
        mine = np.flatnonzero(lanes == lane)
        first = begin + (lane - begin) % order.lanes
        low, high = first // order.lanes, first // order.lanes + -(-(end - first) // order.lanes)
        keys = lengths(order.samples(order.emit(lane, low, high)))
        keys = keys.astype(np.uint16) if keys.max(initial=0) < 1 << 16 else keys  # numpy sorts 16 bits by radix
        edges = [-((first - at) // order.lanes) for at in range(begin + size, end, size)]
        ranked = [
            at + np.argsort(part, kind="stable") for at, part in zip([0, *edges], np.split(keys, edges), strict=True)
        ]
        out[rows[mine]] = first + np.concatenate(ranked)[(moved[mine] - first) // order.lanes] * order.lanes
    return out
