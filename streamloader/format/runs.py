"""Requests of a field, and what is wanted of the chunks that they bring. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from streamloader.format.codecs import Items

__all__ = ["Part", "Placed", "Run", "chosen", "parts_of"]

Placed = tuple[int, Items]  # the row of the first item, and a chunk's items


@dataclass(frozen=True, eq=False)
class Run:
    """Whole, neighbouring chunks of one shard: one ranged request of bytes [start, stop) of the object `path`.

    `chunk` is the first of them within the shard, `sizes` (bytes, with checksum) and `crcs` are per chunk.
    `num_samples` counts those that exist: the dataset's last chunk may be partly padding. Where only some of them are
    wanted, `picks` has their numbers, ascending, and `place` counts those that were asked for before them.
    """

    path: str
    start: int
    stop: int
    shard: int
    chunk: int
    sizes: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    first_sample: int
    num_samples: int
    picks: NDArray[np.int64] | None = None
    place: int = 0

    @property
    def share(self) -> float:
        """The part of the samples that is wanted."""
        return 1.0 if self.picks is None else len(self.picks) / self.num_samples


@dataclass(frozen=True, eq=False)
class Part:
    """What is wanted of a chunk of so many `rows`: all, or the rows `wanted`; `row` is where the first of them goes."""

    rows: int
    row: int
    wanted: NDArray[np.int64] | None = None

    @property
    def count(self) -> int:
        """How many rows are wanted."""
        return self.rows if self.wanted is None else len(self.wanted)


def chosen(items: Items, part: Part) -> Items:
    """Return what is wanted of a chunk's items; where that is less than half of it, in memory of its own."""
    if part.wanted is None:
        few = part.rows < len(items)
        return Items(items.buffer, items.starts[: part.rows], items.stops[: part.rows]) if few else items
    starts, stops = items.starts[part.wanted], items.stops[part.wanted]
    edges = np.concatenate([[0], np.cumsum(stops - starts)])
    if 2 * edges[-1] >= len(items.buffer):
        return Items(items.buffer, starts, stops)
    joined = b"".join(items[i] for i in part.wanted.tolist())
    return Items(memoryview(joined), edges[:-1], edges[1:])


def parts_of(run: Run, chunk: int, first: int | None) -> Iterator[Part]:
    """Yield what is wanted of each chunk of `chunk` samples; row 0 is `first`, by default the run's first."""
    stop = run.first_sample + run.num_samples
    starts = range(run.first_sample, stop, chunk)
    if run.picks is None:
        base = run.first_sample if first is None else first
        yield from (Part(min(chunk, stop - start), start - base) for start in starts)
        return
    base = run.place if first is None else first
    edges = np.searchsorted(run.picks, [*starts, stop]).tolist()
    for start, (low, high) in zip(starts, pairwise(edges), strict=True):
        rows = min(chunk, stop - start)
        yield Part(rows, run.place + low - base, None if high - low == rows else run.picks[low:high] - start)
