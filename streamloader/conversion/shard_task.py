"""One task: fixed rows of the source become one shard of one split. Pure but for the two stores.

Bad samples: a shard that has some is not written, but lists them at the destination; the quarantine keeps them.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Fragment, Source, raise_bad_rows, take_rows
from streamloader.format.codecs import Column
from streamloader.format.geometry import Geometry
from streamloader.format.opening import read_lines, read_pieces
from streamloader.format.publish import BAD, Receipt, prepare_shard
from streamloader.storage.process import run_all
from streamloader.storage.store import Store

OnError = Literal["raise", "skip", "quarantine"]
ON_ERROR: tuple[OnError, ...] = ("raise", "skip", "quarantine")
QUARANTINE = "_streamloader/quarantine.jsonl"  # further files are quarantine-1.jsonl, quarantine-2.jsonl, ...
QUARANTINE_BYTES = 32 << 20  # of one file, unless one sample is larger
MAX_DATA = 16 << 20  # bytes kept of one bad sample
MAX_LINE = 2 * MAX_DATA  # in base64 a third more, beside its name and problem
_THREADS = 16


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """One sample that was left out: its row in the source, which it is, and why.

    `data` is what was stored, in base64, where it was at hand and is not over 16 MiB.
    """

    row: int
    name: str
    problem: str
    data: str = ""

    def without_data(self) -> SkippedSample:
        """Return what is kept in memory of a sample: of those of one problem the text of it once."""
        return SkippedSample(self.row, self.name, sys.intern(self.problem))


def packed(data: bytes) -> str:
    """Return the data as `SkippedSample` keeps them."""
    return base64.b64encode(data).decode() if len(data) <= MAX_DATA else ""


def write_skipped(store: Store, job: str, shard: int, samples: Sequence[SkippedSample]) -> tuple[SkippedSample, ...]:
    """Keep the bad samples of a shard at the destination for a later run, and return them without data.

    The same samples, the same bytes.
    """
    documents = ({"shard": shard, "job": job}, *map(asdict, samples))
    store.put(f"{BAD}/{shard}.json", [json.dumps(one, sort_keys=True).encode() + b"\n" for one in documents])
    return tuple(one.without_data() for one in samples)


def read_skipped(store: Store, job: str, most: int) -> dict[int, SkippedSample]:
    """Return the bad samples that earlier runs of the job found, by row, without data; of each shard `most` at most.

    What does not parse is found again. Raises `FormatError` for a longer line than those of a sample.
    """

    def read(path: str) -> list[SkippedSample]:
        return [one.without_data() for one in islice(_samples(store, path, job), most)]

    return {one.row: one for samples in run_all(read, _paths(store), _THREADS) for one in samples}


def _paths(store: Store) -> list[str]:
    paths = [info.path for info in store.list(BAD) if info.path.endswith(".json")]
    return sorted(paths, key=lambda path: (len(path), path))  # shards ascending


def _samples(store: Store, path: str, job: str) -> Iterator[SkippedSample]:
    """Yield what a shard of the job left, of which there may be gigabytes: a piece at a time, until it does not parse.

    Raises `FormatError` for a line that is too long.
    """
    try:
        lines = read_lines(read_pieces(store, path), MAX_LINE, f"{store.url}/{path}")
        if json.loads(next(lines))["job"] == job:
            yield from (SkippedSample(**json.loads(line)) for line in lines)
    except (KeyError, TypeError, ValueError, RecursionError, StopIteration):
        return


class Quarantine:
    """Writes a line of JSON for each sample that `job` left out, to files of about 32 MiB, one in memory at a time."""

    def __init__(self, store: Store, job: str = "") -> None:
        self._store, self._job = store, job
        self._lines: list[bytes] = []
        self._bytes = self._files = 0

    def add(self, sample: SkippedSample, split: str = "") -> None:
        """Add a sample of a split ("" where there is none)."""
        line = json.dumps({"split": split, **asdict(sample)}, sort_keys=True).encode() + b"\n"
        if self._lines and self._bytes + len(line) > QUARANTINE_BYTES:
            self.flush()
        self._lines.append(line)
        self._bytes += len(line)

    def add_all(self, split: str, store: Store, skipped: Mapping[int, SkippedSample]) -> None:
        """Add the samples of a split: with data where its `store` has what their shards left there."""
        left = dict(skipped)
        for path in _paths(store):
            for sample in _samples(store, path, self._job):
                if left.pop(sample.row, None) is not None:
                    self.add(sample, split)
        for _, sample in sorted(left.items()):
            self.add(sample, split)

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._lines:
            name = QUARANTINE if not self._files else QUARANTINE.replace(".", f"-{self._files}.")
            self._store.put(name, self._lines)
            self._lines, self._bytes, self._files = [], 0, self._files + 1


Outcome = Receipt | tuple[SkippedSample, ...]  # the bad samples of a shard, which is then not written


@dataclass(frozen=True, eq=False)
class Task:
    """What a worker needs, picklable. Doing it twice writes the same bytes. `store` is the split's.

    `fragment` holds the ascending `rows`; the samples of the shard, in order, are its rows `order`, or all of them.
    With `keep_bad` a shard that holds bad samples is not written, but says which; else the first of them is an error.
    What is left of the shard names the `job`.
    """

    fragment: Fragment
    store: Store
    geometry: Geometry
    shard: int
    rows: NDArray[np.int64] | range
    order: NDArray[np.int64] | None = None
    keep_bad: bool = False
    job: str = ""

    @classmethod
    def of(
        cls, source: Source, rows: NDArray[np.int64], store: Store, geometry: Geometry, shard: int, **more: Any
    ) -> Self:
        """Return the task that writes these rows of the source, in their order, as one shard."""
        order = None if bool(np.all(rows[1:] > rows[:-1])) else np.argsort(np.argsort(rows))
        rows = np.sort(rows)
        return cls(source.fragment(rows), store, geometry, shard, rows, order, **more)

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.store.url}"

    def run(self) -> Outcome:
        """Read, encode and write the shard. Raises what the source or the store raise."""
        return self.prepare()()

    def prepare(self) -> Callable[[], Outcome]:
        """Read and encode the shard; return what writes it, and raises what the store raises.

        Raises what the source raises.
        """
        bad: list[BadSample] = []
        columns = self.fragment(bad.append if self.keep_bad else raise_bad_rows(self.rows))
        if bad:
            skipped = [self._skipped(one) for one in bad]
            return partial(write_skipped, self.store, self.job, self.shard, skipped)
        if self.order is not None:
            for name in columns:  # one after another: a field twice is held, not all of them
                columns |= take_rows({name: columns[name]}, self.order)
        return self.encode(columns)

    def encode(self, columns: dict[str, Column]) -> Callable[[], Outcome]:
        """Encode the columns of the shard; return what writes it."""
        return prepare_shard(self.store, self.geometry, self.shard, columns, job=self.job)

    def _skipped(self, bad: BadSample) -> SkippedSample:
        row = int(self.rows[bad.position])
        return SkippedSample(row, bad.name or f"row {row}", bad.problem, packed(bad.data))
