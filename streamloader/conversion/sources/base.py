"""The seam between a conversion and what it reads: numbered rows of one schema, read in parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SourceChangedError, SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.threads import run_all
from streamloader.storage.protocol import ObjectInfo, Store

READ_THREADS = 8  # a small file costs one round trip, so several are under way at once
REQUEST_BYTES = 8 << 20  # the longest request; the memory that one thread holds
GROUP_BYTES = 2 << 20  # small ranges for one thread, one after another: a thread for each costs more than its read
# a file that is in memory takes a tenth of this; one on a disk or across a network more
NEAR_SECONDS, NEAR_BYTES_PER_SECOND = 0.0005, 200e6
GAP_BYTES = 256 << 10  # reading this much for nothing is cheaper than another request


@dataclass(frozen=True)
class BadSample:
    """One sample that cannot be converted. `position` counts the rows of its part; `name` says which sample it is,
    where its adapter knows more than its row; `problem` is what is wrong; `data` what was stored, if that is at hand.
    """

    position: int
    name: str
    problem: str
    remedy: str = "repair or remove it"
    data: bytes = b""


Refuse = Callable[[BadSample], None]


def refuse_all(bad: BadSample) -> None:
    """Raise `SourceError` for a bad sample."""
    raise SourceError(f"{bad.name}: {bad.problem}", f"{bad.remedy}, or leave such samples out with --on-error skip")


def refuse_rows(rows: Sequence[int] | NDArray[np.int64]) -> Refuse:
    """Return a function that raises `SourceError` for a bad sample of a part that holds these rows."""

    def refuse(bad: BadSample) -> None:
        refuse_all(bad if bad.name else replace(bad, name=f"row {rows[bad.position]} of the source"))

    return refuse


class Sieve:
    """Passes bad samples on, and remembers which: the rows of the columns that then come are those that are left."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        self._refused: set[int] = set()

    def __call__(self, bad: BadSample) -> None:
        """Refuse a sample."""
        self._refused.add(bad.position)
        self._refuse(bad)

    def kept(self, count: int) -> NDArray[np.int64]:
        """Return the positions of the `count` rows that were kept, ascending."""
        positions = np.arange(count + len(self._refused), dtype=np.int64)
        return np.setdiff1d(positions, np.fromiter(self._refused, np.int64, len(self._refused)))


def drop_rows(columns: Mapping[str, Column], bad: Container[int]) -> dict[str, Column]:
    """Return the columns without the rows at the positions `bad`."""
    good = [row for row in range(len(next(iter(columns.values())))) if row not in bad]
    return {
        name: column[good] if isinstance(column, np.ndarray) else [column[row] for row in good]
        for name, column in columns.items()
    }


class Part(Protocol):
    """Some rows of a source: small, picklable, and the same columns at every reading."""

    def read(self, refuse: Refuse, /) -> dict[str, Column]:
        """Return one column a field, without the bad samples, each of which is given to `refuse`.

        Raises `SourceError` for what is wrong with a whole file, `SourceChangedError`, and what `refuse` raises.
        """
        ...


class Source(Protocol):
    """What is converted. Opening it costs a listing and the headers; the data are read part by part.

    `files` are all that it is made of, sorted by path: the conversion's identity. `notes` go into the manifest's
    provenance: class names, how many files were passed over.
    """

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        ...

    @property
    def files(self) -> Sequence[ObjectInfo]:
        """The files, with size and etag or modification time."""
        ...

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields of every row."""
        ...

    @property
    def num_samples(self) -> int:
        """The number of rows."""
        ...

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the manifest's provenance tells about the source, without floats."""
        ...

    def part(self, rows: NDArray[np.int64]) -> Part:
        """Return the part that holds these rows, which ascend."""
        ...


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of the file `path`."""

    path: str
    start: int
    stop: int


def spread_rows(num_samples: int, count: int, runs: int = 16) -> NDArray[np.int64]:
    """Return about `count` rows, at least `runs` where there are so many: in runs that are spread evenly, ascending."""
    count = max(count, runs)
    if num_samples <= count:
        return np.arange(num_samples, dtype=np.int64)
    length = count // runs
    starts = np.arange(runs, dtype=np.int64) * (num_samples - length) // (runs - 1)
    return np.unique(starts[:, None] + np.arange(length, dtype=np.int64))


def read_range(store: Store, wanted: Range) -> memoryview:
    """Return the bytes of one range; raises `SourceChangedError` where the file is now too short for it."""
    if wanted.start == wanted.stop:
        return memoryview(b"")
    reader = store.reader()
    data = store.retries.call(lambda: reader.read(wanted.path, wanted.start, wanted.stop))
    if len(data) != wanted.stop - wanted.start:
        end = wanted.start + len(data)
        raise SourceChangedError(
            f"{store.url}/{wanted.path} ends at byte {end}, when it was listed it had at least {wanted.stop}",
            "leave the source alone while it is converted, and start again with --overwrite",
        )
    return data


def read_ranges(store: Store, wanted: Sequence[Range]) -> Iterator[memoryview]:
    """Yield the bytes of each range in order, a few groups of them under way at once.

    Local files that come from memory are read by one thread: several would take turns at the interpreter's lock.
    """
    sizes = np.array([one.stop - one.start for one in wanted], np.int64)
    ends = np.cumsum(sizes)
    groups = [wanted[first:last] for first, last in cut_runs(ends - sizes, ends, GROUP_BYTES, GROUP_BYTES)]
    near = local = store.reader().kind == "file"
    while groups:
        threads = 1 if near else READ_THREADS
        several, groups = groups[:threads], groups[threads:]  # bounds the memory
        patience = sum(NEAR_SECONDS + (one.stop - one.start) / NEAR_BYTES_PER_SECOND for one in chain(*several))
        begin = time.perf_counter()
        found = run_all(lambda group: [read_range(store, one) for one in group], several, threads)
        near = local and time.perf_counter() - begin < patience
        yield from chain.from_iterable(found)


def cut_runs(starts: NDArray[np.int64], stops: NDArray[np.int64], gap: int, longest: int) -> list[tuple[int, int]]:
    """Return index ranges [i, j) of ascending ranges that are worth one request each.

    Neighbours are joined over at most `gap`, up to `longest` from the first start to the last stop.
    """
    breaks = np.append(np.flatnonzero(starts[1:] - stops[:-1] > gap) + 1, len(starts))
    runs: list[tuple[int, int]] = []
    first = 0
    while first < len(starts):
        near = int(breaks[np.searchsorted(breaks, first, side="right")])
        short = int(np.searchsorted(stops, starts[first] + longest, side="right"))
        last = max(first + 1, min(near, short))
        runs.append((first, last))
        first = last
    return runs
