"""Which row of the source each sample of a dataset comes from: in order, dealt out, shuffled, and without bad ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.splits import row_keys

_SHUFFLE = 1 << 63  # keys of the shuffle are others than those that deal rows out to splits


@dataclass(frozen=True, eq=False)
class SampleRows:
    """The source row of each sample: `base[sample]`, unless `moved` says otherwise.

    `count` samples are left. `moved` are those whose own row was bad, ascending, and `moved_rows` what took its place:
    rows from the end, so that no other sample changes and no other shard is written again.
    """

    base: NDArray[np.int64] | range
    count: int
    moved: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    moved_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, rows: NDArray[np.int64] | range, shuffle: int | None) -> SampleRows:
        """Return the rows in their order, or in a random one that is a function of the seed and their numbers alone.

        Takes 24 bytes a row while it shuffles, and 8 afterwards.
        """
        if shuffle is None:
            return cls(rows, len(rows))
        if isinstance(rows, range):
            keys = row_keys(rows.start, rows.stop, _SHUFFLE | shuffle)
            return cls(np.argsort(keys, kind="stable") + rows.start, len(rows))
        keys = row_keys(0, int(rows.max(initial=-1)) + 1, _SHUFFLE | shuffle)[rows]
        return cls(rows[np.argsort(keys, kind="stable")], len(rows))

    def without(self, bad_rows: Collection[int]) -> SampleRows:
        """Return all rows of `base` but the bad ones.

        A pure function of the set: the holes, ascending, are filled with the last good ones, descending.
        """
        bad = self.find(bad_rows)
        count = len(self.base) - len(bad)
        holes = bad[bad < count]
        last = np.setdiff1d(np.arange(count, len(self.base)), bad, assume_unique=True)[::-1]
        rows = last + self.base.start if isinstance(self.base, range) else self.base[last]
        return SampleRows(self.base, count, holes, rows)

    def find(self, rows: Collection[int]) -> NDArray[np.int64]:
        """Return the samples of `base` that come from these rows, ascending."""
        wanted = np.fromiter(rows, np.int64, len(rows))
        if isinstance(self.base, range):
            return np.unique(wanted[(wanted >= self.base.start) & (wanted < self.base.stop)]) - self.base.start
        return np.flatnonzero(np.isin(self.base, wanted))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows of the samples [start, stop)."""
        stop = max(start, min(stop, self.count))
        rows = self.base[start:stop]
        found = np.arange(rows.start, rows.stop, dtype=np.int64) if isinstance(rows, range) else rows.copy()
        low, high = np.searchsorted(self.moved, (start, stop))
        found[self.moved[low:high] - start] = self.moved_rows[low:high]
        return found
