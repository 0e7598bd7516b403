"""Which batches are made: those of one pass over the data, or of pass after pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from streamloader.plan.booking import BatchPlan
from streamloader.plan.gaps import NO_GAPS, Gaps
from streamloader.plan.mixture import MixShare, mix_schedule
from streamloader.plan.order import EpochOrder, OrderParams
from streamloader.plan.schedule import schedule, slots_needed, span_rows
from streamloader.plan.selection import Selection
from streamloader.plan.world import Share

# Rows in the queue of plans, and rows whose blocks are looked for ahead of the batch that is assembled.
PLANNED_ROWS = 1 << 18
LOOK_AHEAD_ROWS = 1 << 20
# Bytes of a row that is planned; of a row in the making, with the span before it: peaks of processes that planned
# 20 million rows in spans of 4 million.
ROW_BYTES = 33
SPAN_BYTES = 40
HELD_SPAN_BYTES = 12
MIX_SPAN_BYTES = 140


@dataclass(frozen=True)
class Need:
    """What a pass needs at once: `slots` blocks of at most `block` samples, and plans of `rows` rows.

    Planning takes `plan_bytes`, and `held_plan_bytes` where every field is held whole.
    """

    block: int
    slots: int
    rows: int
    plan_bytes: int
    held_plan_bytes: int

    @classmethod
    def of(cls, params: OrderParams, share: Share, steps_at_once: int = 1) -> Need:
        """Return what one rank needs of a dataset; without shuffle give OrderParams(unit, 1, 2 * unit)."""
        slots, rows = slots_needed(params, share, steps_at_once), span_rows(params, share)
        ahead = _ahead_bytes(share)
        plans = ahead + SPAN_BYTES * rows, ahead + HELD_SPAN_BYTES * rows
        return cls(params.block, slots, steps_at_once * share.batch, *plans)


def _ahead_bytes(share: Share | MixShare) -> int:
    return ROW_BYTES * min(PLANNED_ROWS + LOOK_AHEAD_ROWS, 2 * (share.num_samples // share.world.size + share.batch))


class Course(Protocol):
    """One rank's part of an epoch from some position on, `steps_at_once` steps in each plan."""

    @property
    def steps_at_once(self) -> int:
        """Steps in each plan."""
        ...

    @property
    def seed(self) -> int:
        """What keys the random numbers of crops and transforms, with epoch and position."""
        ...

    @property
    def need(self) -> Need:
        """What it takes of memory."""
        ...

    def following(self) -> Course:
        """Return the pass over the epoch after this one, from its beginning."""
        ...

    def without_blocks(self) -> Course:
        """Return the same pass where every field is held whole: plans name samples and no blocks."""
        ...

    def batches(self, first_ticket: int = 0) -> Iterator[BatchPlan]:
        """Plan the pass, with tickets from `first_ticket` on; `samples` are numbers through all datasets."""
        ...


@dataclass(frozen=True)
class PassPlan:
    """A pass over one dataset. `unit`: samples fetched at once without shuffle.

    `gaps` are the steps that are left out, of this epoch and of later ones. With a `selection`, all of these count the
    selected samples.
    """

    order: EpochOrder
    share: Share
    position: int
    unit: int
    steps_at_once: int
    selection: Selection | None = None
    gaps: Gaps = NO_GAPS
    held: bool = False

    def without_blocks(self) -> PassPlan:
        """Return the same pass where every field is held whole: plans name samples and no blocks."""
        return replace(self, held=True)

    @property
    def seed(self) -> int:
        """The order's."""
        return self.order.seed

    @property
    def need(self) -> Need:
        """What it takes of memory."""
        params = self.order.params if self.order.shuffle else OrderParams(self.unit, 1, 2 * self.unit)
        return Need.of(params, self.share, self.steps_at_once)

    def following(self) -> PassPlan:
        """Return the pass over the epoch after this one, from its beginning."""
        order, gaps = replace(self.order, epoch=self.order.epoch + 1), self.gaps.after(self.order.epoch)
        return replace(self, order=order, position=0, gaps=gaps)

    def batches(self, first_ticket: int = 0) -> Iterator[BatchPlan]:
        """Plan the pass, with tickets from `first_ticket` on; `samples` are the dataset's numbers."""
        made = self._parts(first_ticket)
        if self.selection is None:
            return made
        numbers = self.selection.samples
        return (replace(plan, samples=numbers[plan.samples]) for plan in made)

    def _parts(self, ticket: int) -> Iterator[BatchPlan]:
        """One schedule for each part between gaps: blocks on both sides of a gap are read for both."""
        at_once, unit = self.steps_at_once, None if self.order.shuffle else self.unit
        for start, stop in self.gaps.parts(self.order.epoch, self.position):
            place = min(start, self.order.num_samples)
            for plan in schedule(
                self.order, self.share, place, unit, at_once, first_ticket=ticket, stop=stop, held=self.held
            ):
                ticket += len(plan.needs)
                yield plan


@dataclass(frozen=True)
class Numbers:
    """Numbers of samples of several datasets, end to end: the first of each, of those that take part and of all."""

    selections: tuple[Selection | None, ...]
    chosen_from: tuple[int, ...]
    all_from: tuple[int, ...]

    def of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers among all samples of numbers among those that take part."""
        if not any(self.selections):
            return samples
        source = np.searchsorted(self.chosen_from, samples, side="right") - 1
        found = samples - np.array(self.chosen_from)[source]
        for number, selection in enumerate(self.selections):
            if selection is not None:
                mine = source == number
                found[mine] = selection.samples[found[mine]]
        return np.asarray(found + np.array(self.all_from)[source], np.int64)


@dataclass(frozen=True)
class MixPass:
    """A pass over a mixture."""

    share: MixShare
    position: int
    steps_at_once: int
    seed: int
    numbers: Numbers
    gaps: Gaps = NO_GAPS
    held: bool = False

    def without_blocks(self) -> MixPass:
        """Return the same pass where every field is held whole: plans name samples and no blocks."""
        return replace(self, held=True)

    @property
    def need(self) -> Need:
        """What it takes of memory."""
        block = max(stream.fetched.block for stream in self.share.mix.streams)
        plans = _ahead_bytes(self.share) + MIX_SPAN_BYTES * self.share.span_rows
        rows = self.steps_at_once * self.share.batch
        return Need(block, self.share.slots_needed(self.steps_at_once), rows, plans, plans)

    def following(self) -> MixPass:
        """Return the pass over the epoch after this one, from its beginning."""
        share, gaps = replace(self.share, epoch=self.share.epoch + 1), self.gaps.after(self.share.epoch)
        return replace(self, share=share, position=0, gaps=gaps)

    def batches(self, first_ticket: int = 0) -> Iterator[BatchPlan]:
        """Plan the pass, with tickets from `first_ticket` on; samples are numbered through all datasets."""
        ticket = first_ticket
        for start, stop in self.gaps.parts(self.share.epoch, self.position):
            place = min(start, self.share.num_samples)
            for plan in mix_schedule(self.share, place, stop, self.steps_at_once, first_ticket=ticket, held=self.held):
                ticket += len(plan.needs)
                yield replace(plan, samples=self.numbers.of(plan.samples))


def plans(first: Course, *, endless: bool) -> Iterator[BatchPlan | None]:
    """Yield the plans of a pass, then None; where `endless`, those of the next epoch, then None, and so on."""
    tickets = 0
    now = first
    while True:
        for plan in now.batches(tickets):
            tickets += len(plan.needs)
            yield plan
        yield None
        if not endless:
            return
        now = now.following()
