"""Tasks, each of which converts fixed rows of the source to one shard of one split, and the lists of bad samples.

Instead of a shard that has bad samples, a task writes a list of them to the destination.
"""

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Fragment, RowNumbers, RowSource, raise_bad_rows, take_rows
from streamloader.format.codecs import Column
from streamloader.format.geometry import Geometry
from streamloader.format.opening import read_lines
from streamloader.format.publish import BAD, Receipt, prepare_shard
from streamloader.storage.process import run_all
from streamloader.storage.store import Store

OnError = Literal["raise", "skip", "quarantine"]
ON_ERROR: tuple[OnError, ...] = ("raise", "skip", "quarantine")
QUARANTINE = "_streamloader/quarantine.jsonl"  # further files are quarantine-1.jsonl, quarantine-2.jsonl, ...
QUARANTINE_BYTES = 32 << 20  # maximum per file, unless one sample is larger
MAX_DATA = 16 << 20  # bytes of a bad sample: the data of larger ones are not kept
MAX_LINE = 2 * MAX_DATA  # base64 adds a third, then there are its name and problem
_THREADS = 16


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A bad sample that was skipped: its row in the source, its name for messages, and the problem.

    `data` are its stored bytes in base64; "" if they are unavailable or larger than 16 MiB.
    """

    row: int
    name: str
    problem: str
    data: str = ""

    @classmethod
    def of(cls, bad: BadSample, row: int) -> "SkippedSample":
        """Return a bad sample at this row of the source."""
        data = base64.b64encode(bad.data).decode() if len(bad.data) <= MAX_DATA else ""
        return cls(row, bad.name or f"row {row}", bad.problem, data)

    def without_data(self) -> "SkippedSample":
        """Return the sample without data, as kept in memory; equal problems share one string."""
        return SkippedSample(self.row, self.name, sys.intern(self.problem))


def write_skipped(store: Store, job: str, shard: int, samples: Sequence[SkippedSample]) -> tuple[SkippedSample, ...]:
    """Write the list of the bad samples of a shard, and return them without data.

    The same samples give the same bytes.
    """
    documents = ({"shard": shard, "job": job}, *map(asdict, samples))
    store.put(f"{BAD}/{shard}.json", [json.dumps(entry, sort_keys=True).encode() + b"\n" for entry in documents])
    return tuple(sample.without_data() for sample in samples)


def read_skipped(store: Store, job: str, limit: int) -> dict[int, SkippedSample]:
    """Return the bad samples that earlier runs of the job found, by row, without data; at most `limit` per shard.

    Lists that do not parse are ignored: their shards are read again. Raises `FormatError` for a line that is too long.
    """

    def read(path: str) -> list[SkippedSample]:
        return [sample.without_data() for sample in islice(_samples(store, path, job), limit)]

    return {sample.row: sample for samples in run_all(read, _paths(store), _THREADS) for sample in samples}


def _paths(store: Store) -> list[str]:
    paths = [info.path for info in store.list(BAD) if info.path.endswith(".json")]
    return sorted(paths, key=lambda path: (len(path), path))  # shards ascending


def _samples(store: Store, path: str, job: str) -> Iterator[SkippedSample]:
    """Yield the bad samples in a list of the job, up to a line that does not parse. A list may have gigabytes.

    Raises `FormatError` for a line that is too long.
    """
    try:
        lines = read_lines(store, path, MAX_LINE)
        if json.loads(next(lines))["job"] == job:
            yield from (SkippedSample(**json.loads(line)) for line in lines)
    except (KeyError, TypeError, ValueError, RecursionError, StopIteration):
        return


class Quarantine:
    """Writes a line of JSON for each sample that `job` skipped, to files of about 32 MiB; holds one file in memory."""

    def __init__(self, store: Store, job: str = "") -> None:
        self._store, self._job = store, job
        self._lines: list[bytes] = []
        self._bytes = self._files = 0

    def add(self, sample: SkippedSample, split: str = "") -> None:
        """Add a sample of a split ("" for a dataset without splits)."""
        line = json.dumps({"split": split, **asdict(sample)}, sort_keys=True).encode() + b"\n"
        if self._lines and self._bytes + len(line) > QUARANTINE_BYTES:
            self.flush()
        self._lines.append(line)
        self._bytes += len(line)

    def add_all(self, split: str, store: Store, skipped: Mapping[int, SkippedSample]) -> None:
        """Add the samples of a split; those in the lists in its `store` have data."""
        listed = chain.from_iterable(_samples(store, path, self._job) for path in _paths(store))
        remaining = dict(skipped)
        for sample in chain(listed, (skipped[row] for row in sorted(skipped))):
            if remaining.pop(sample.row, None) is not None:
                self.add(sample, split)

    def flush(self) -> None:
        """Write the samples added since the last file."""
        if self._lines:
            name = QUARANTINE if not self._files else QUARANTINE.replace(".", f"-{self._files}.")
            self._store.put(name, self._lines)
            self._lines, self._bytes, self._files = [], 0, self._files + 1


Outcome = Receipt | tuple[SkippedSample, ...]  # of a shard: its receipt, or its bad samples if it was not written


@dataclass(frozen=True, eq=False)
class Task:
    """A task for a worker, picklable. Running it twice writes the same bytes.

    `store` is that of the split. `fragment` has the ascending `rows` of the source; `order` has their positions in the
    order of the shard's samples, or None if they are equal. With `keep_bad`, the bad samples of a shard are listed
    instead of writing it; otherwise the first one is an error. Receipt and list have the id `job`.
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
        cls, source: RowSource, rows: RowNumbers, store: Store, geometry: Geometry, shard: int, **options: Any
    ) -> Self:
        """Return the task that writes these rows of the source, in this order, as one shard."""
        order = None if bool(np.all(rows[1:] > rows[:-1])) else np.argsort(np.argsort(rows))
        rows = np.sort(rows)
        return cls(source.fragment(rows), store, geometry, shard, rows, order, **options)

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.store.url}"

    def run(self) -> Outcome:
        """Read, encode and write the shard. Raises the errors of the source and of the store."""
        return self.prepare()()

    def prepare(self) -> Callable[[], Outcome]:
        """Read and encode the shard; return a function that writes it.

        Raises the errors of the source; the function raises those of the store.
        """
        bad: list[BadSample] = []
        columns = self.fragment(bad.append if self.keep_bad else raise_bad_rows(self.rows))
        if bad:
            skipped = [SkippedSample.of(sample, int(self.rows[sample.position])) for sample in bad]
            return partial(write_skipped, self.store, self.job, self.shard, skipped)
        if self.order is not None:
            for name in columns:  # one after another, so that only one field is held twice
                columns |= take_rows({name: columns[name]}, self.order)
        return self.encode(columns)

    def encode(self, columns: dict[str, Column]) -> Callable[[], Outcome]:
        """Encode the columns of the shard; return a function that writes it."""
        return prepare_shard(self.store, self.geometry, self.shard, columns, job=self.job)
