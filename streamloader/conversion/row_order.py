"""Which row of the source each sample of a dataset comes from: in order, in splits, shuffled, without bad ones.

Splits are random, exact in number, and a pure function of (seed, row number).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError
from streamloader.format.manifest import NAME

SEED = 0
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
    remedy = "write it like train=0.9,val=0.1"
    for written, value in pairs:
        name = written.strip()
        if not NAME.match(name) or name in found:
            problem = "is a duplicate" if name in found else "is not a valid name"
            raise UsageError(f"split {name!r} of {split!r} {problem}", remedy)
        try:
            found[name] = Fraction(str(value).strip())
        except (ValueError, ZeroDivisionError):
            raise UsageError(f"split {name}={value!r} is not a fraction", remedy) from None
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
    for name, size in sizes.items():
        if num_samples and not size:
            given = f"split {name}={float(splits[name]):g} of {num_samples} samples"
            raise UsageError(f"{given} is empty", "give it a larger share")
    return sizes


def own_rows(sizes: Mapping[str, int], name: str) -> range:
    """Return the rows of a split of a source that has splits of its own: they follow each other in order of name."""
    start = sum(size for other, size in sizes.items() if other < name)
    return range(start, start + sizes[name])


def assign(num_samples: int, splits: Splits, seed: int = SEED) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each split, ascending, by a keyed hash; 17 bytes of memory a row.

    The hash is a bijection of 64 bits, so no two rows tie and the thresholds give exact counts. A source is
    often sorted by class: the first 90 % would lack whole classes.
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


_SHUFFLE = 1 << 63  # the keys of the shuffle differ from those that assign rows to splits


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
