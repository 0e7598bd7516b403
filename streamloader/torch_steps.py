"""The steps of an epoch that a user names: to leave them out, to see what they delivered, to have them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError
from streamloader.plan.cursor import Standing
from streamloader.plan.gaps import NO_GAPS, Gaps
from streamloader.plan.ledger import step_samples
from streamloader.plan.order import EpochOrder
from streamloader.plan.world import Part, Share

# by epoch, the numbers of steps: {3: range(100, 120)}
StepChoice = None | Mapping[int, Iterable[int]]


def read_steps(name: str, choice: StepChoice) -> dict[int, tuple[int, ...]]:
    """Return the steps of each epoch, ascending. Raises `UsageError` for what is no number of an epoch or step."""
    if choice is None:
        return {}
    if not isinstance(choice, Mapping):
        raise UsageError(f"{name}={choice!r:.60}", f"give steps by epoch: {name}={{0: range(100, 120)}}")
    found: dict[int, tuple[int, ...]] = {}
    for epoch, steps in choice.items():
        numbers = list(steps) if isinstance(steps, Iterable) else [None]
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in (epoch, *numbers)):
            raise UsageError(f"{name}={{{epoch!r}: {steps!r:.60}}}", "give whole numbers of at least 0")
        found[epoch] = tuple(sorted(set(numbers)))
    return found


def choose_gaps(skips: Mapping[int, Sequence[int]], start: Standing, share: Part) -> Gaps:
    """Return where the steps to leave out lie, from the epoch of `start` on.

    Raises `UsageError` for a step that the epoch does not have, for an epoch of which nothing is left, and where
    several DataLoader workers read: each batch of theirs is a part of several steps.
    """
    if skips and start.workers > 1:
        remedy = "use num_workers=0; transform_workers= runs slow transforms"
        raise UsageError(f"skip_steps with {start.workers} DataLoader workers", remedy)
    gaps = NO_GAPS
    for epoch in sorted(epoch for epoch in skips if epoch >= start.epoch and skips[epoch]):
        offset = start.position % share.global_batch if epoch == start.epoch else 0
        count, last = share.global_steps(offset), skips[epoch][-1]
        if last >= count:
            raise UsageError(f"skip_steps names step {last} of epoch {epoch}, which has {count}", "leave it away")
        if len(skips[epoch]) == count:
            raise UsageError(f"skip_steps leaves nothing of epoch {epoch}", f"begin with epoch {epoch + 1}: set_epoch")
        gaps += Gaps.of_steps(epoch, skips[epoch], offset, share.global_batch)
    return gaps


def only(steps: Sequence[int], epoch: int, offset: int, share: Part) -> Gaps:
    """Return what is left out where only these steps of an epoch are wanted. Raises `UsageError` for one not there."""
    count = share.global_steps(offset)
    if not steps or steps[-1] >= count:
        raise UsageError(f"steps {list(steps)[-3:]} of epoch {epoch}, which has {count}", "name some of those")
    return Gaps.of_all_but(epoch, steps, count, offset, share.global_batch)


def samples_of(order: EpochOrder, shares: Iterable[Share], start: int, turn: int) -> NDArray[np.int64]:
    """Return the samples of round `turn` of an epoch that a run entered at `start`, one share after the other."""
    return np.concatenate(
        [step_samples(order, share, start % share.global_batch + turn * share.global_batch) for share in shares]
    )
