"""Numbers of samples: ranges of them as text, and all but some, by a selection or what a version deleted. No I/O."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_TIME = r"[+-]?\d{4,6}-\d\d?(?:-\d\d?)?(?:T\d\d(?::\d\d){0,2})?"
_NUMBER = r"[+-]?\d{1,18}"
_RANGE = re.compile(rf"\s*({_TIME}|{_NUMBER})?\s*:\s*({_TIME}|{_NUMBER})?\s*")
_SLICE = re.compile(r"\s*slice\((.{0,200})\)\s*")


@dataclass(frozen=True)
class Numbers:
    """A range of whole numbers as `text`, such as `0:800`: they count samples, but may be years to an axis of times."""

    text: str
    chosen: slice


def parse_range(text: str) -> slice | Numbers | None:
    """Parse `2001-01:2017-12`, `0:800` or `slice(0, 800)`; return None for what is none of these.

    Times stay text, and a number beside one is a year.
    """
    if match := _SLICE.fullmatch(text):
        return _python_slice(match[1])
    match = _RANGE.fullmatch(text)
    ends = () if match is None else match.groups()
    given = [end for end in ends if end is not None]
    numbers = [end for end in given if re.fullmatch(_NUMBER, end)]
    if len(numbers) == len(given) and ends:
        return Numbers(text.strip(), slice(*(None if end is None else int(end) for end in ends)))
    # 2001-01-01T06:30 is a time rather than a range up to the year 30
    return slice(*ends) if ends and all(len(end) >= 4 for end in numbers) else None


def _python_slice(arguments: str) -> slice | None:
    try:
        values = ast.literal_eval(f"[{arguments}]")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    known = 1 <= len(values) <= 3 and {type(value) for value in values} <= {int, str, type(None)}
    return slice(*values) if known else None


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
