"""Maps the samples of a dataset to rows of the source: in order, in splits, shuffled, without bad samples.

Splits are random, have exact sizes, and are a pure function of (seed, row number).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError
from streamloader.format.manifest import NAME

SEED = 0
_TOLERANCE = Fraction(1, 10**6)  # for floats such as 1 / 3

Splits = Mapping[str, Fraction]


def parse_splits(split: str | Mapping[str, float] | None) -> Splits:
    """Return the fractions of `"train=0.9,val=0.1"` or `{"train": 0.9, "val": 0.1}`; an empty mapping for None.

    Raises `UsageError` unless the names are valid, the fractions are positive, and their sum is 1.
    """
    if split is None:
        return {}
    pairs = [part.partition("=")[::2] for part in split.split(",")] if isinstance(split, str) else list(split.items())
    fractions: dict[str, Fraction] = {}
    remedy = "write it like train=0.9,val=0.1"
    for text, value in pairs:
        name = text.strip()
        if not NAME.match(name) or name in fractions:
            problem = "is a duplicate" if name in fractions else "is not a valid name"
            raise UsageError(f"split {name!r} of {split!r} {problem}", remedy)
        try:
            fractions[name] = Fraction(str(value).strip())
        except (ValueError, ZeroDivisionError):
            raise UsageError(f"split {name}={value!r} is not a fraction", remedy) from None
        if fractions[name] <= 0:
            raise UsageError(f"split {name}={value!r} is not positive", "give every split more than 0")
    total = sum(fractions.values(), Fraction(0))
    if abs(total - 1) > _TOLERANCE:
        raise UsageError(f"the splits of {split!r} sum to {float(total):g}", "give fractions that sum to 1")
    return fractions


def split_sizes(num_samples: int, splits: Splits) -> dict[str, int]:
    """Return the number of samples of each split, by the largest remainder method; the earlier split wins a tie.

    Raises `UsageError` if a split would be empty, unless the source is.
    """
    total = sum(splits.values(), Fraction(0))
    exact = {name: num_samples * fraction / total for name, fraction in splits.items()}
    sizes = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(splits, key=lambda name: sizes[name] - exact[name])  # stable
    for name in by_remainder[: num_samples - sum(sizes.values())]:
        sizes[name] += 1
    for name, size in sizes.items():
        if num_samples and not size:
            given = f"split {name}={float(splits[name]):g} of {num_samples} samples"
            raise UsageError(f"{given} is empty", "give it a larger share")
    return sizes


def own_rows(sizes: Mapping[str, int], name: str) -> range:
    """Return the rows of one of the source's own splits, which follow each other in the order of their names."""
    start = sum(size for split, size in sizes.items() if split < name)
    return range(start, start + sizes[name])


def assign(num_samples: int, splits: Splits, seed: int = SEED) -> dict[str, NDArray[np.int64]]:
    """Return the ascending rows of each split, assigned by a keyed hash; takes 17 bytes of memory per row.

    The hash is a bijection of 64 bits, so rows have different hashes, and the thresholds give exact sizes. Consecutive
    rows would not do, because a source is often sorted: its first 90 % may lack whole classes.
    """
    sizes = split_sizes(num_samples, splits)
    keys, last = row_keys(0, num_samples, seed), np.cumsum(list(sizes.values()))[:-1] - 1
    thresholds = np.partition(keys, last)[last] if num_samples else keys
    numbers = np.searchsorted(thresholds, keys)
    del keys  # 8 bytes a row
    return {name: np.flatnonzero(numbers == i).astype(np.int64, copy=False) for i, name in enumerate(sizes)}


def row_keys(start: int, stop: int, seed: int) -> NDArray[np.uint64]:
    """Return a key for each of the rows [start, stop): two splitmix64 steps (Steele et al. 2014), keyed by the seed."""
    key = _splitmix(np.array([seed], np.uint64))
    return _splitmix(_splitmix(np.arange(start, stop, dtype=np.uint64)) ^ key)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_SHUFFLE = 1 << 63  # so that a shuffle has other keys than the splits


@dataclass(frozen=True, eq=False)
class SampleRows:
    """The source rows of `count` samples: `base[sample]`, except for the samples `moved`.

    `moved`, ascending, are the samples whose row in `base` is bad. `moved_rows` replace these rows; they are from the
    end of `base`, so that no other sample changes and no other shard has to be written again.
    """

    base: NDArray[np.int64] | range
    count: int
    moved: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    moved_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, rows: NDArray[np.int64] | range, shuffle: int | None) -> "SampleRows":
        """Return the rows in their order; with `shuffle` in a random order that depends on this seed and the rows only.

        A shuffle takes 24 bytes per row, its result 8.
        """
        if shuffle is None:
            return cls(rows, len(rows))
        if isinstance(rows, range):
            keys = row_keys(rows.start, rows.stop, _SHUFFLE | shuffle)
            return cls(np.argsort(keys, kind="stable") + rows.start, len(rows))
        keys = row_keys(0, int(rows.max(initial=-1)) + 1, _SHUFFLE | shuffle)[rows]
        return cls(rows[np.argsort(keys, kind="stable")], len(rows))

    def without(self, bad_rows: Collection[int]) -> "SampleRows":
        """Return all rows of `base` except the bad ones.

        A pure function of the set: the samples of bad rows, ascending, get the last good rows, descending.
        """
        bad = self.find(bad_rows)
        count = len(self.base) - len(bad)
        holes = bad[bad < count]
        last = np.setdiff1d(np.arange(count, len(self.base)), bad, assume_unique=True)[::-1]
        rows = last + self.base.start if isinstance(self.base, range) else self.base[last]
        return SampleRows(self.base, count, holes, rows)

    def find(self, rows: Collection[int]) -> NDArray[np.int64]:
        """Return the samples of `base` that come from these rows, ascending."""
        numbers = np.fromiter(rows, np.int64, len(rows))
        if isinstance(self.base, range):
            return np.unique(numbers[(numbers >= self.base.start) & (numbers < self.base.stop)]) - self.base.start
        return np.flatnonzero(np.isin(self.base, numbers))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows of the samples [start, stop)."""
        stop = max(start, min(stop, self.count))
        base = self.base[start:stop]
        rows = np.arange(base.start, base.stop, dtype=np.int64) if isinstance(base, range) else base.copy()
        low, high = np.searchsorted(self.moved, (start, stop))
        rows[self.moved[low:high] - start] = self.moved_rows[low:high]
        return rows
