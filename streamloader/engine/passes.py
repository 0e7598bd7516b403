"""Which batches are made: those of one pass over the data, or of pass after pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from streamloader.plan.order import EpochOrder
from streamloader.plan.schedule import BatchPlan, schedule
from streamloader.plan.selection import Selection
from streamloader.plan.world import Share


@dataclass(frozen=True)
class PassPlan:
    """One rank's part of an epoch from a global position on. `unit`: samples fetched at once without shuffle.

    With a `selection`, all of these count the selected samples.
    """

    order: EpochOrder
    share: Share
    position: int
    unit: int | None
    steps_at_once: int
    selection: Selection | None = None

    def following(self) -> PassPlan:
        """Return the pass over the epoch after this one, from its beginning."""
        return replace(self, order=replace(self.order, epoch=self.order.epoch + 1), position=0)

    def batches(self, first_ticket: int = 0) -> Iterator[BatchPlan]:
        """Plan the pass, with tickets from `first_ticket` on; `samples` are the dataset's numbers."""
        made = schedule(self.order, self.share, self.position, self.unit, self.steps_at_once, first_ticket=first_ticket)
        if self.selection is None:
            return made
        numbers = self.selection.samples
        return (replace(plan, samples=numbers[plan.samples]) for plan in made)


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
