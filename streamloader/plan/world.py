"""Which positions of an epoch a rank takes (rules 6, 7, 8 and 10)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import BatchError, UsageError, WorldError
from streamloader.options import REMAINDERS, Remainder

__all__ = ["Part", "Share", "World"]


@dataclass(frozen=True)
class World:
    """Rank `rank` of `size`. Raises WorldError for a rank or size that cannot be."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise WorldError(
                f"rank {self.rank} of a world of {self.size} cannot be", "give world=(rank, size) with 0 <= rank < size"
            )

    def consumer(self, worker: int, workers: int) -> World:
        """What DataLoader worker `worker` of `workers` acts as: rank + size * worker of size * workers (rule 10)."""
        if workers < 1 or not 0 <= worker < workers:
            raise WorldError(f"worker {worker} of {workers} cannot be", "give 0 <= worker < workers")
        return World(self.rank + self.size * worker, self.size * workers)


class Part(Protocol):
    """One rank's part of an epoch, as far as steps are counted: of a dataset (`Share`), or of a mixture."""

    @property
    def batch(self) -> int:
        """Rows of the rank in a step."""
        ...

    @property
    def world(self) -> World:
        """The rank."""
        ...

    @property
    def num_samples(self) -> int:
        """Positions of the epoch."""
        ...

    @property
    def remainder(self) -> Remainder:
        """What the last, incomplete step does."""
        ...

    @property
    def global_batch(self) -> int:
        """G: the positions of a step, over all ranks."""
        ...

    def global_steps(self, position: int) -> int:
        """Steps left from a position, over all ranks."""
        ...

    def num_steps(self, position: int) -> int:
        """Steps left from a position in which this rank has a row."""
        ...

    def costs(self, *, fresh: bool, shuffle: bool) -> str:
        """Say what is read more than once at this world size, and what to do; nothing where all is read once."""
        ...


@dataclass(frozen=True)
class Share:
    """One rank's part of an epoch of `num_samples` positions over `lanes` lanes, in batches of `batch` rows.

    `lanes` is `EpochOrder.lanes`, so 1 without shuffle. `remainder` says what the last, incomplete step does: "pad"
    fills it with samples that came before (marked as not valid), "drop" leaves it out, "uneven" deals it out as far
    as it goes. Steps are counted from the position where a run starts.
    """

    num_samples: int
    lanes: int
    batch: int
    world: World
    remainder: Remainder

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise BatchError(f"a batch of {self.batch} samples cannot be", "set batch_size= to 1 or more")
        if self.remainder not in REMAINDERS:
            raise UsageError(
                f"remainder={self.remainder!r} is not one of {', '.join(REMAINDERS)}", "set remainder= to one of them"
            )
        if self.lanes < 1 or self.num_samples < 0:
            raise UsageError(f"{self.lanes} lanes of {self.num_samples} samples cannot be", "give lanes >= 1")

    @property
    def global_batch(self) -> int:
        """G: the positions of a step, over all ranks."""
        return self.world.size * self.batch

    @property
    def divides(self) -> bool:
        """Whether the world size divides the lanes, so that every lane is read by one rank."""
        return self.lanes % self.world.size == 0

    def global_steps(self, position: int) -> int:
        """Steps left from a global position, over all ranks."""
        left = max(0, self.num_samples - position)
        return left // self.global_batch if self.remainder == "drop" else -(-left // self.global_batch)

    def num_steps(self, position: int) -> int:
        """Steps left from a global position in which this rank has a row: all of them, but with "uneven" perhaps
        not the last."""
        steps = self.global_steps(position)
        if self.remainder == "uneven" and steps:
            return steps - (self.positions(position + (steps - 1) * self.global_batch)[0].size == 0)
        return steps

    def costs(self, *, fresh: bool, shuffle: bool) -> str:
        """Say how often blocks are read; nothing where each lane is read by one rank. `fresh`: lanes may be chosen."""
        size, lanes = self.world.size, self.lanes
        if self.divides or not shuffle or (lanes == 1 and self.global_steps(0) < 2):
            return ""
        if not fresh or size <= lanes:
            return f"{size} consumers do not divide {lanes} lanes: blocks are read about {self.read_factor:.1f} times"
        return (
            f"{size} consumers share {lanes} lanes: blocks are read about {self.read_factor:.1f} times; "
            f"set shuffle=Shuffle(lanes={-(-lanes // size) * size})"
        )

    def positions(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(p, valid): the positions of this rank's rows in the step that starts at `position`.

        A padded row keeps its own p >= N and is not valid; `source` tells which position it repeats.
        """
        count = min(self.global_batch, max(0, self.num_samples - position))
        if self.remainder == "pad" and count:
            count = self.global_batch
        elif self.remainder == "drop" and count < self.global_batch:
            count = 0
        p = self._strided(position, count) if self.divides else self._run(position, count)
        return p, p < self.num_samples

    def positions_of_steps(self, position: int, steps: int) -> NDArray[np.int64]:
        """The positions of this rank's rows in `steps` steps from `position` on, one step after the other."""
        full = max(0, steps - 1) if self.divides else 0
        parts = [self._strided(position, full * self.global_batch)]
        parts += [self.positions(position + i * self.global_batch)[0] for i in range(full, steps)]
        return np.concatenate(parts)

    def _strided(self, position: int, count: int) -> NDArray[np.int64]:
        """The positions = rank (mod size) of [position, position + count)."""
        size = self.world.size
        first = position + (self.world.rank - position) % size
        return np.arange(first, max(first, position + count), size, dtype=np.int64)

    def _run(self, position: int, count: int) -> NDArray[np.int64]:
        """This rank's run of the positions [position, position + count) in the order of (p mod lanes, p)."""
        first = position + (np.arange(self.lanes, dtype=np.int64) - position) % self.lanes
        ends = np.cumsum(_per_lane(position, count, self.lanes))
        run = np.arange(self.world.rank * self.batch, min((self.world.rank + 1) * self.batch, count), dtype=np.int64)
        lane = np.searchsorted(ends, run, side="right")
        before = np.concatenate(([0], ends))[lane]
        return first[lane] + (run - before) * self.lanes

    def source(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position whose sample stands at each of `positions`: itself, or the one that a padded row repeats."""
        n, step = self.num_samples, self.global_batch
        return np.where(positions < n, positions, positions % n if n < step else positions - step)

    @cached_property
    def _lanes_by_rank(self) -> NDArray[np.int64]:
        """How many neighbouring lanes each rank reads in full steps, wherever they start; shape (size,)."""
        if self.divides:
            return np.full(self.world.size, self.lanes // self.world.size, np.int64)
        first_row = np.arange(self.world.size, dtype=np.int64) * self.batch
        lowest = np.full(self.world.size, self.lanes, np.int64)
        highest = np.zeros(self.world.size, np.int64)
        for start in range(self.lanes):
            ends = np.cumsum(_per_lane(start, self.global_batch, self.lanes))
            np.minimum(lowest, np.searchsorted(ends, first_row, side="right"), out=lowest)
            np.maximum(highest, np.searchsorted(ends, first_row + self.batch - 1, side="right"), out=highest)
        return highest - lowest + 1

    @property
    def lanes_read(self) -> int:
        """The most lanes that any rank reads: L / R where R divides L. The same on every rank."""
        return int(self._lanes_by_rank.max())

    @property
    def read_factor(self) -> float:
        """About how often a block is read, over all ranks: 1.0 where the world size divides the lanes."""
        return 1.0 if self.divides else float(self._lanes_by_rank.sum()) / self.lanes


def _per_lane(position: int, count: int, lanes: int) -> NDArray[np.int64]:
    """How many of the positions [position, position + count) fall on each lane; shape (lanes,)."""
    turn = (np.arange(lanes, dtype=np.int64) - position) % lanes
    return count // lanes + (turn < count % lanes)
