"""Numbers of samples: those that callers give, and those of which some are left out, as deleted ones are. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SelectionError

Ints = NDArray[np.int64]


def distinct(values: Ints) -> Ints:
    """Return the distinct values, ascending.

    `np.unique(values)` alone hashes them in C++ code (numpy 2.3), which aborts the process if the interpreter ends
    meanwhile, as it may for the daemon threads of a pass.
    """
    return np.unique(values, return_counts=True)[0]


def as_array(choice: Any, name: str, remedy: str) -> NDArray[Any]:
    """Return the argument `name` as an array of one axis. Raises `SelectionError`."""
    if np.ma.is_masked(choice):
        mask = choice.dtype == np.bool_
        other = f"fill them: {name}.filled(False)" if mask else f"leave them out: {name}.compressed()"
        raise SelectionError(f"{name}= has masked elements", other)
    try:
        values = np.asarray(choice)
    except (TypeError, ValueError) as error:  # rows of different lengths, a tensor on a GPU
        raise SelectionError(f"{name}= is not an array: {error}", remedy) from error
    if values.ndim != 1:
        raise SelectionError(f"{name}= has the shape {values.shape}", remedy)
    return values


def whole_numbers(choice: Any, name: str) -> NDArray[Any]:
    """Return the argument `name` as an array of whole numbers, of shape (numbers,). Raises `SelectionError`."""
    values = as_array(choice, name, remedy := "give sample numbers, or the path or URL of a file of them")
    if values.dtype.kind not in "iu" and values.size:
        raise SelectionError(f"{name}= has the dtype {values.dtype}", remedy)
    return values


def in_range(numbers: NDArray[Any], num_samples: int, name: str) -> NDArray[np.int64]:
    """Return sample numbers as int64. Raises `SelectionError` for one below 0, or not below `num_samples`."""
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < num_samples:
        problem = f"{name}= has sample numbers from {numbers.min()} to {numbers.max()}, the dataset has {num_samples}"
        raise SelectionError(problem, f"give numbers in [0, {num_samples})")
    return numbers.astype(np.int64)


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
