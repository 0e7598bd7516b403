"""Which epoch comes next, known to the parent and to DataLoader workers alike.

Workers pass over copies of the dataset, so the parent would never learn that an epoch is over, and persistent
workers would never learn of `set_epoch`. A few bytes of anonymous shared memory (torch unlinks its name at once:
nothing is left after a kill) hold, for each worker, how many epochs it has completed.
"""

from __future__ import annotations

import torch

_UNUSED = -1
MAX_WORKERS = 512


class SharedEpochs:
    """The epoch at which the next pass starts, and the completed passes of each worker."""

    def __init__(self) -> None:
        self._completed = torch.full((MAX_WORKERS,), _UNUSED, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def next_epoch(self, at_least: int) -> int:
        """Return the epoch that every worker is through to; `at_least` where none has said anything.

        Counting only what all workers completed keeps a worker that starts late in the epoch of the others.
        """
        used = self._completed[self._completed != _UNUSED]
        return max(at_least, int(used.min())) if len(used) else at_least

    def begin(self, worker: int, epoch: int) -> None:
        """Note that a worker starts a pass of `epoch`."""
        self._completed[worker] = epoch

    def complete(self, worker: int, epoch: int) -> None:
        """Note that a worker has completed its pass of `epoch`."""
        self._completed[worker] = epoch + 1

    def reset(self) -> None:
        """Forget all passes: the caller set the epoch, or loaded a state."""
        self._completed.fill_(_UNUSED)
