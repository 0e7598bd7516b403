"""Which epoch comes next, known to the parent and to DataLoader workers alike.

Workers pass over copies of the dataset, so the parent would never learn that an epoch is over, and persistent
workers would never learn of `set_epoch`. A few bytes of anonymous shared memory (torch unlinks its name at once:
nothing is left after a kill) hold the epoch that was set last, who began the last pass and of which epoch, and, for
each worker, the epoch that it does next.
"""

from __future__ import annotations

import os

import torch

MAX_WORKERS = 512


class SharedEpochs:
    """The epoch of the next pass: the least that any worker of the last pass does next, or what was set since."""

    def __init__(self) -> None:
        shared = torch.zeros(4 + MAX_WORKERS, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._chosen, self._workers, self._reader, self._begun = shared[:1], shared[1:2], shared[2:3], shared[3:4]
        self._next = shared[4:]

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
