"""Numbers of samples, of which some are left out: by a selection, or because a version deleted them. No I/O."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def distinct(values: Ints) -> Ints:
    """Return the distinct values, ascending.

    `np.unique(values)` alone hashes them in C++ code (numpy 2.3), which aborts the process if the interpreter ends
    meanwhile, as it may for the daemon threads of a pass.
    """
    return np.unique(values, return_counts=True)[0]


class AllBut:
    """The numbers of all `num_samples` samples of a dataset but those in `excluded`, ascending and distinct.

    It is what an int64 array of the selected numbers is to its users: it has a length and `nbytes`, and returns the
    selected numbers at a slice, or at an array of indexes >= 0. It takes 8 bytes for each excluded sample.
    """

    def __init__(self, num_samples: int, excluded: Ints) -> None:
        self.num_samples = num_samples
        self._before = excluded - np.arange(excluded.size)  # the number of selected samples before each excluded one

    def __len__(self) -> int:
        return self.num_samples - self._before.size

    def __getitem__(self, key: slice | Ints) -> Ints:
        indexes = np.arange(*key.indices(len(self))) if isinstance(key, slice) else key
        return indexes + np.searchsorted(self._before, indexes, side="right")

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return self._before.nbytes

    @property
    def excluded(self) -> Ints:
        """The excluded samples."""
        return self._before + np.arange(self._before.size)

    def count_chunks(self, chunk: int) -> int:
        """Return the number of chunks of `chunk` samples with some selected ones."""
        chunks, counts = np.unique(self.excluded // chunk, return_counts=True)
        empty = counts == np.minimum(chunk, self.num_samples - chunks * chunk)
        return -(-self.num_samples // chunk) - int(np.count_nonzero(empty))

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the indexes of the selected samples that are in [start, stop), as [first, last + 1)."""
        return start - self._excluded_before(start), stop - self._excluded_before(stop)

    def find(self, samples: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the indexes of the selected ones of some ascending samples, and which these are."""
        excluded = np.append(self.excluded, -1)
        before = np.searchsorted(excluded[:-1], samples)
        selected = excluded[before] != samples
        return (samples - before)[selected], selected

    def _excluded_before(self, sample: int) -> int:
        return bisect_left(range(self._before.size), sample, key=lambda index: int(self._before[index]) + index)
