"""Which samples a step delivers, told from the order alone: nothing is read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError
from streamloader.plan.order import EpochOrder
from streamloader.plan.world import Part, Share

__all__ = ["check_step", "step_samples"]


def check_step(share: Part, position: int) -> None:
    """Raise `UsageError` unless a step starts at a position of the epoch."""
    if not position >= 0 or not share.global_steps(position):
        raise UsageError(
            f"no step starts at position {position} of {share.num_samples} samples, {share.global_batch} at once",
            f"ask for a step below {share.global_steps(0)}",
        )


def step_samples(order: EpochOrder, share: Share, position: int) -> NDArray[np.int64]:
    """Return the sample numbers of the share's rank in the step that starts at a global position, padded rows too.

    Shape (rows,): what `index` holds in that batch. O(G + window * lanes) for G positions of a step, at any place of
    the epoch. Raises `UsageError` where no step starts there.
    """
    check_step(share, position)
    source = share.source(share.positions(position)[0])
    if not source.size:  # "uneven": other ranks have the rest
        return source
    low = int(source.min())
    return order.samples_at(low, int(source.max()) + 1)[source - low]
