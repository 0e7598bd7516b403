"""The epoch of the next pass, and the position that the parent of DataLoader workers sets for them.

Workers iterate copies of the dataset, so the parent would not notice the end of an epoch, and persistent workers would
not notice `set_epoch` and `load_state_dict`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from socket import socket
from typing import Any
from uuid import uuid4

import numpy as np

from streamloader.order.state import ORDER_NAMES, PROGRESS_NAMES
from streamloader.storage.process import lock_name

MAX_WORKERS = 512
LOCKED_SECONDS = 0.001  # between attempts to lock
# `chosen`: the epoch that was set last. `workers`: their number in the last pass, 0 if an epoch was set since.
# `reader`, `begun`: the process and the epoch of the last pass. `again`: ~epoch, and how often worker 0 has begun it
# anew. `position`: the progress, the pin, and the order of a state, set `version` times. `next`, `loaded`: the next
# epoch of each worker, and that of the state that it has loaded.
SHARED = np.dtype(
    [(name, np.int64) for name in ("chosen", "workers", "reader", "begun", "version")]
    + [("again", np.int64, 2), ("position", np.int64, len(PROGRESS_NAMES) + 2 + len(ORDER_NAMES))]
    + [("next", np.int64, MAX_WORKERS), ("loaded", np.int64, MAX_WORKERS)]
)


class Epochs:
    """The epoch of the next pass: the minimum over the workers of the last pass, or the epoch that was set since.

    `shared`: zeros of int64, with the bytes of `SHARED`, in memory that pickled copies share; None without workers.
    """

    def __init__(self, shared: Any = None) -> None:
        self._shared = np.zeros(SHARED.itemsize // 8, np.int64) if shared is None else shared
        self._seen_version = 0  # of the published position, by this copy
        self._name = uuid4().hex

    @property
    def _now(self) -> Any:
        """The values of `SHARED`, to read and to write."""
        return np.asarray(self._shared).view(SHARED)[0]

    def next_epoch(self) -> int:
        """Return the epoch at which the next pass starts."""
        now = self._now
        workers = int(now["workers"])
        return int(now["next"][:workers].min()) if workers else int(now["chosen"])

    @property
    def begun_elsewhere(self) -> bool:
        """Whether another process began the last pass."""
        return int(self._now["reader"]) not in (0, os.getpid())

    @property
    def begun(self) -> int:
        """The epoch of the pass that was begun last, or the epoch that was set since."""
        return int(self._now["begun"])

    @contextmanager
    def choosing(self, workers: int) -> Iterator[None]:
        """Let one of several workers at a time choose its epoch, from `next_epoch` to `begin`.

        Otherwise another one could complete the last pass and begin the next epoch between the two.
        """
        lock: socket | None = None
        while workers > 1 and (lock := lock_name(f"epochs-{self._name}")) is None:
            time.sleep(LOCKED_SECONDS)
        try:
            yield
        finally:
            if lock is not None:
                lock.close()

    def begin(self, worker: int, workers: int, epoch: int) -> int:
        """Record that a worker, one of `workers`, starts a pass of `epoch`; return how often it has begun anew before.

        The first one to start records it for all, since it may finish before others have started.
        """
        now = self._now
        if not worker:
            before, again = now["again"].tolist()
            now["again"] = ~epoch, again + 1 if before == ~epoch else 0
        if int(now["workers"]) != workers:
            now["next"][:workers] = epoch
            now["workers"] = workers
        now["next"][worker] = epoch
        now["begun"] = epoch
        now["reader"] = os.getpid()
        return int(now["again"][1])

    def load(self, worker: int, workers: int, epoch: int) -> None:
        """Record that a worker, one of `workers`, has loaded a state of `epoch`."""
        with self.choosing(workers):
            self.begin(worker, workers, epoch)
            self._now["again"] = 0
        self._now["loaded"][worker] = epoch

    def first_loaded(self, workers: int) -> int:
        """Return the first epoch of the states that the workers have loaded."""
        return int(self._now["loaded"][:workers].min())

    def complete(self, worker: int, epoch: int) -> None:
        """Record that a worker has completed its pass of `epoch`, unless another epoch was set since."""
        following = self._now["next"]
        if following[worker] == epoch:
            following[worker] = epoch + 1

    def choose(self, epoch: int) -> None:
        """Set the epoch of the next pass: the user set it, or loaded a state."""
        now = self._now
        now["begun"], now["reader"], now["again"], now["chosen"] = epoch, 0, 0, epoch
        now["workers"] = 0  # also if the epoch is the same: workers that read ahead may complete it meanwhile

    def publish(self, position: Sequence[int]) -> None:
        """Tell workers, which may be running, where the next pass begins: the values of `position`."""
        now = self._now
        now["position"] = position
        self._seen_version = int(now["version"]) + 1
        now["version"] = self._seen_version

    def update(self) -> list[int] | None:
        """Return the position that the parent published since the last call of this copy, or None."""
        now = self._now
        if self._seen_version == int(now["version"]):
            return None
        self._seen_version = int(now["version"])
        values: list[int] = now["position"].tolist()
        return values
