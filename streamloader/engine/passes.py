"""Which batches are made: those of one pass over the data, or of pass after pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from streamloader.plan.gaps import NO_GAPS, Gaps
from streamloader.plan.order import EpochOrder
from streamloader.plan.schedule import BatchPlan, schedule
from streamloader.plan.selection import Selection
from streamloader.plan.world import Share


@dataclass(frozen=True)
class PassPlan:
    """One rank's part of an epoch from a global position on. `unit`: samples fetched at once without shuffle.

    `gaps` are the steps that are left out, of this epoch and of later ones. With a `selection`, all of these count the
    selected samples.
    """

    order: EpochOrder
    share: Share
    position: int
    unit: int | None
    steps_at_once: int
    selection: Selection | None = None
    gaps: Gaps = NO_GAPS

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
        at_once = self.steps_at_once
        for start, stop in self.gaps.parts(self.order.epoch, self.position):
            place = min(start, self.order.num_samples)
            for plan in schedule(self.order, self.share, place, self.unit, at_once, first_ticket=ticket, stop=stop):
                ticket += len(plan.needs)
                yield plan


def plans(first: PassPlan, *, endless: bool) -> Iterator[BatchPlan | None]:
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
