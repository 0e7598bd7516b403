"""Which epoch comes next and where it begins, known to the parent and to DataLoader workers alike.

Workers pass over copies of the dataset, so the parent would never learn that an epoch is over, and persistent
workers would never learn of `set_epoch` and `load_state_dict`. A few bytes of anonymous shared memory (torch unlinks
its name at once: nothing is left after a kill) hold the epoch that was set last, who began the last pass and of which
epoch, the place that the parent chose last, and, for each worker, the epoch that it does next.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

MAX_WORKERS = 512


class Place(NamedTuple):
    """The values of a cursor that change as a run goes on."""

    epoch: int
    position: int
    extra: int
    workers: int
    ranks: int
    batch: int
    pin: int
    block: int
    lanes: int
    window: int


class SharedEpochs:
    """The epoch of the next pass: the least that any worker of the last pass does next, or what was set since."""

    def __init__(self) -> None:
        shared = torch.zeros(15 + MAX_WORKERS, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._chosen, self._workers, self._reader, self._begun = shared[:1], shared[1:2], shared[2:3], shared[3:4]
        self._choices, self._place = shared[4:5], shared[5:15]
        self._next = shared[15:]
        self._heard = 0  # of the parent's choices, by this copy

    def next_epoch(self) -> int:
        """Return the epoch at which the next pass starts."""
        workers = int(self._workers)
        return int(self._next[:workers].min()) if workers else int(self._chosen)

    @property
    def read_elsewhere(self) -> bool:
        """Whether the last pass was begun by another process."""
        return int(self._reader) not in (0, os.getpid())

    @property
    def begun(self) -> int:
        """The epoch of the pass that was begun last, or what was set since."""
        return int(self._begun)

    def begin(self, worker: int, workers: int, epoch: int) -> None:
        """Note that one of so many workers starts a pass of `epoch`.

        The first one also speaks for those that are still starting: it may be through before they have begun.
        """
        if int(self._workers) != workers:
            self._next[:workers] = epoch
            self._workers.fill_(workers)
        self._next[worker] = epoch
        self._begun.fill_(epoch)
        self._reader.fill_(os.getpid())

    def complete(self, worker: int, epoch: int) -> None:
        """Note that a worker has completed its pass of `epoch`; nothing, if another epoch was set meanwhile."""
        if int(self._next[worker]) == epoch:
            self._next[worker] = epoch + 1

    def choose(self, epoch: int) -> None:
        """Let the next pass be of this epoch: the caller set it, or loaded a state, perhaps in each worker."""
        self._begun.fill_(epoch)
        self._reader.zero_()
        if self.next_epoch() != epoch:
            self._workers.zero_()
            self._chosen.fill_(epoch)

    def tell(self, place: Place) -> None:
        """Tell the workers, which may run already, where the next pass begins."""
        self._place.copy_(torch.tensor(place))
        self._heard = int(self._choices) + 1
        self._choices.fill_(self._heard)

    def news(self) -> Place | None:
        """Return where the parent wants the next pass to begin, if it said so since this copy last heard."""
        if self._heard == int(self._choices):
            return None
        self._heard = int(self._choices)
        return Place(*self._place.tolist())
