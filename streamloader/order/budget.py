"""Steps whose padded batches fit into a budget: the steps of buckets, cut into parts (rule 12). No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
# The most elements of a padded batch; what returns the lengths to which values of some lengths are padded; and what
# returns where the steps of a share start, see `EpochShare.budget_starts`, which takes as long as planning the epoch.
Budget = tuple[int, Callable[[Ints], Ints], Callable[[Any], Ints]]
# Parts of a step of the buckets, on average: the last of them are filled half. Their lengths are alike, so more of them
# mix less.
PARTS = 8


def step_scale(batch: int, fitting: float, *, whole: bool) -> tuple[int, int]:
    """Return (n, d): a step of the buckets has n / d times the samples of a step of `batch` samples on each rank.

    It then has about `PARTS` parts, if `fitting` samples of the mean length fit into the budget. n or d is 1, the other
    one a power of two, d divides the batch, and is 1 if steps must be `whole`.
    """
    wanted = PARTS * min(1.0, fitting / batch)
    if wanted >= 1:
        return 1 << int(wanted).bit_length() - 1, 1
    least = batch & -batch  # the largest power of two that divides it
    return 1, 1 if whole else min(least, 1 << int(1 / wanted).bit_length() - 1)


def cut(longest: Ints, most: int, rows: int) -> tuple[Ints, Ints]:
    """Return (piece, row) of the start of each part of some pieces, in order.

    `longest`, of shape (pieces, rows): the length to which the rows up to each one are padded. From the start of a
    piece on, each part takes as many rows as have at most `most` elements with their padding, at least one and at most
    `rows`.
    """
    pieces, units = longest.shape
    left, begin, found = np.arange(pieces), np.zeros(pieces, np.int64), []
    while left.size:
        found.append(left * units + begin)
        low, high = begin + 1, np.minimum(begin + rows, units)
        while np.any(low < high):
            middle = (low + high + 1) // 2
            fits = longest[left, middle - 1] * (middle - begin) <= most
            low, high = np.where(fits, middle, low), np.where(fits, high, np.maximum(low, middle - 1))
        some = low < units
        left, begin = left[some], low[some]
    starts = np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)
    return starts // max(1, units), starts % max(1, units)
