"""Steps that a run leaves out: where the others lie, and what was passed over."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from streamloader.plan.world import Part

__all__ = ["NO_GAPS", "Gap", "Gaps"]


@dataclass(frozen=True, order=True)
class Gap:
    """The global positions [start, stop) of an epoch: whole steps of the run that leaves them out."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Gaps:
    """Gaps of one or more epochs, in their order; between two of an epoch there is a step at least."""

    each: tuple[Gap, ...] = ()

    @classmethod
    def of_steps(cls, epoch: int, steps: Collection[int], offset: int, global_batch: int) -> Gaps:
        """Return the gaps in place of some steps of an epoch; step i starts at `offset` + i * `global_batch`."""
        found: list[Gap] = []
        for step in sorted(set(steps)):
            start = offset + step * global_batch
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(Gap(epoch, start, offset + (step + 1) * global_batch))
        return cls(tuple(found))

    @classmethod
    def of_all_but(cls, epoch: int, steps: Collection[int], count: int, offset: int, global_batch: int) -> Gaps:
        """Return the gaps that leave only these of an epoch's `count` steps."""
        wanted = sorted(set(steps))
        bounds = zip([0, *(step + 1 for step in wanted)], [*wanted, count], strict=True)
        edges = [(offset + first * global_batch, offset + stop * global_batch) for first, stop in bounds]
        return cls(tuple(Gap(epoch, start, stop) for start, stop in edges if start < stop))

    def __add__(self, other: Gaps) -> Gaps:
        return Gaps(self.each + other.each)

    def after(self, epoch: int) -> Gaps:
        """Return those of later epochs."""
        return Gaps(tuple(gap for gap in self.each if gap.epoch > epoch))

    def parts(self, epoch: int, position: int) -> Iterator[tuple[int, int | None]]:
        """Yield what is left of an epoch from a position on: (start, stop) of each part, None for the epoch's end."""
        for gap in self._of(epoch, position):
            if position < gap.start:
                yield position, gap.start
            position = gap.stop
        yield position, None  # perhaps beyond the end, where the last step is left out

    def walk(self, epoch: int, position: int, steps: int, global_batch: int) -> int:
        """Return where the next step starts after so many from a position on; the epoch's end or more, if none does."""
        for gap in self._of(epoch, position):
            before = max(0, gap.start - position) // global_batch
            if steps < before:
                break
            steps -= before
            position = gap.stop
        return position + steps * global_batch

    def steps(self, share: Part, epoch: int, position: int) -> int:
        """Return how many steps with a row of the share's rank are left from a position on."""
        return sum(
            share.num_steps(start) if stop is None else (stop - start) // share.global_batch
            for start, stop in self.parts(epoch, position)
        )

    def passed(self, epoch: int, start: int, stop: int | None) -> tuple[Gap, ...]:
        """Return the gaps that a run left out on its way from `start` to `stop`, None for the end."""
        return tuple(gap for gap in self._of(epoch, start) if stop is None or gap.stop <= stop)

    def _of(self, epoch: int, position: int) -> Iterator[Gap]:
        """The gaps of an epoch that do not lie before a position."""
        return (gap for gap in self.each if gap.epoch == epoch and gap.stop > position)


NO_GAPS = Gaps()
