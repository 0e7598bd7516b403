"""How far a consumer is in a pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from streamloader.order.state import NO_GAPS, Gaps, RunState

if TYPE_CHECKING:
    from streamloader.order.mixture import EpochShare


class Cursor(NamedTuple):
    """How far a consumer is: the state `start`, and the `steps` delivered since, in a pass over `share` if one began.

    DataLoader workers are consumers like ranks. `ahead`: the number of steps by which this one is ahead of the state.
    `before`: the steps of the run before `start`. `loaded`: `start` is a state that was loaded.
    """

    start: RunState
    before: int = 0
    loaded: bool = False
    share: EpochShare | None = None
    ahead: int = 0
    gaps: Gaps = NO_GAPS
    steps: int = 0

    @property
    def total(self) -> int:
        """The steps of the run."""
        return self.before + self.steps

    @property
    def share_begun(self) -> EpochShare:
        """The share of a pass that began."""
        assert self.share is not None
        return self.share

    @property
    def position(self) -> int:
        """The global position of this consumer's next step."""
        size = self.share_begun.global_batch
        return self.gaps.walk(self.start.epoch, self.start.position + self.ahead * size, self.steps, size)

    @property
    def steps_left(self) -> int:
        """The number of steps of all ranks from this consumer's next one on."""
        share, size = self.share_begun, self.share_begun.global_batch
        parts = self.gaps.parts(self.start.epoch, self.position)
        return sum(share.global_steps(start) if stop is None else (stop - start) // size for start, stop in parts)

    @property
    def state(self) -> RunState:
        """The state here; with workers, only this worker resumes there."""
        if not self.steps:
            return self.start
        share, position = self.share_begun, self.position
        if self.ahead and share.global_steps(position):
            position -= self.ahead * share.global_batch
        state = self.start.moved(position, share, self.gaps)
        if self.start.workers == 1:
            return state
        return replace(state, inside=True, ranks=share.world.size // self.start.workers, batch=share.batch)
