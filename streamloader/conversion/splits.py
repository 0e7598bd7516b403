"""Which rows belong to which split: random, exact in number, and a pure function of (seed, row number)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError
from streamloader.format.manifest import NAME

SEED = 0
_PIECE = 1 << 22  # rows hashed at a time
_TOLERANCE = Fraction(1, 10**6)  # so that 0.333, 0.333, 0.334 and floats are taken

Splits = Mapping[str, Fraction]


def parse_splits(split: str | Mapping[str, float] | None) -> Splits:
    """Return the fractions of `"train=0.9,val=0.1"` or `{"train": 0.9, "val": 0.1}`; none for None.

    Raises `UsageError` unless the names can be folders, the fractions are positive and their sum is 1.
    """
    if split is None:
        return {}
    pairs = [part.partition("=")[::2] for part in split.split(",")] if isinstance(split, str) else list(split.items())
    found: dict[str, Fraction] = {}
    for written, value in pairs:
        name = written.strip()
        if not NAME.match(name) or name in found:
            problem = "stands twice" if name in found else "is no name of a split"
            raise UsageError(f"split {name!r} of {split!r} {problem}", "write it like train=0.9,val=0.1")
        try:
            found[name] = Fraction(str(value).strip())
        except (ValueError, ZeroDivisionError):
            raise UsageError(f"split {name}={value!r} is no fraction", "write it like train=0.9,val=0.1") from None
        if found[name] <= 0:
            raise UsageError(f"split {name}={value!r}", "give every split more than 0")
    total = sum(found.values(), Fraction(0))
    if abs(total - 1) > _TOLERANCE:
        raise UsageError(f"the splits of {split!r} sum to {float(total):g}", "let them sum to 1")
    return found


def split_sizes(num_samples: int, splits: Splits) -> dict[str, int]:
    """Return how many samples each split gets: largest remainder, the earlier name at a tie.

    Raises `UsageError` where a split of a source with samples would be empty.
    """
    total = sum(splits.values(), Fraction(0))
    exact = {name: num_samples * fraction / total for name, fraction in splits.items()}
    sizes = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(splits, key=lambda name: sizes[name] - exact[name])  # stable
    for name in by_remainder[: num_samples - sum(sizes.values())]:
        sizes[name] += 1
    empty = next((name for name, size in sizes.items() if not size), None)
    if empty is not None and num_samples:
        given = f"{float(splits[empty]):g}"
        raise UsageError(f"split {empty}={given} of {num_samples} samples is empty", "give it a larger share")
    return sizes


def own_rows(sizes: Mapping[str, int], name: str) -> range:
    """Return the rows of a split of a source that has splits of its own: they follow each other in order of name."""
    start = sum(size for other, size in sizes.items() if other < name)
    return range(start, start + sizes[name])


@dataclass(frozen=True, eq=False)
class Assignment:
    """The rows of every split. `sizes` in samples; `numbers[row]` is the split's position in `sizes`."""

    sizes: Mapping[str, int]
    numbers: NDArray[np.uint8]

    def rows(self, name: str) -> NDArray[np.int64]:
        """Return the split's rows, ascending."""
        return np.flatnonzero(self.numbers == list(self.sizes).index(name)).astype(np.int64, copy=False)


def assign(num_samples: int, splits: Splits, seed: int = SEED) -> Assignment:
    """Deal the rows out by a keyed hash; 8 bytes of memory a row.

    The hash is a bijection of 64 bits, so no two rows tie and the thresholds give exact counts. A source is
    often sorted by class: the first 90 % would lack whole classes. Raises `UsageError` for over 255 splits.
    """
    if len(splits) > np.iinfo(np.uint8).max:
        raise UsageError(f"{len(splits)} splits", "give at most 255")
    sizes = split_sizes(num_samples, splits)
    numbers = np.empty(num_samples, np.uint8)
    if num_samples:
        keys = row_keys(0, num_samples, seed)
        last = np.cumsum(list(sizes.values()))[:-1] - 1
        keys.partition(np.unique(np.append(last, num_samples - 1)))
        thresholds = keys[last].copy()
        for first in range(0, num_samples, _PIECE):
            stop = min(first + _PIECE, num_samples)
            numbers[first:stop] = np.searchsorted(thresholds, row_keys(first, stop, seed))
    return Assignment(sizes, numbers)


def row_keys(start: int, stop: int, seed: int) -> NDArray[np.uint64]:
    """Return a key for each of the rows [start, stop): two splitmix64 steps (Steele et al. 2014), keyed by the seed."""
    key = _splitmix(np.array([seed], np.uint64))
    return _splitmix(_splitmix(np.arange(start, stop, dtype=np.uint64)) ^ key)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
