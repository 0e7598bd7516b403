"""Files of tables, cut into blocks of known length (row groups, record batches), as one source of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.arrow.arrowarrays import Trouble, to_rows, troubles, values_at
from streamloader.conversion.sources.arrow.arrowfields import ArrowColumn, leaves, same_column
from streamloader.conversion.sources.arrow.ipcindex import IpcIndex
from streamloader.conversion.sources.base import READ_THREADS, REQUEST_BYTES, BadSample, Refuse
from streamloader.conversion.sources.localfiles import file_info, local_path
from streamloader.conversion.sources.needs import need
from streamloader.errors import SourceChangedError, SourceError, StreamloaderError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.rows import Rows
from streamloader.format.threads import run_all
from streamloader.storage.protocol import ObjectInfo, Store

if TYPE_CHECKING:
    import pyarrow as pa

BEGIN_BYTES = 4 << 20  # decoded, of each of several files that are read at once
AGAIN = "fetch or make it again"
CHANGED = "leave the source alone while it is converted, and start again with --overwrite"


@dataclass(frozen=True, eq=False)
class Table:
    """One file: the rows of each of its blocks, and where these stand if the format needs that."""

    info: ObjectInfo
    counts: NDArray[np.int64]
    index: IpcIndex | None = None


# yields batches that hold all of these rows, ascending, each with the number of its first row within the file
ReadRows = Callable[[Store, Table, NDArray[np.int64], Sequence[ArrowColumn]], "Iterator[tuple[int, pa.RecordBatch]]"]


def by_block(counts: NDArray[np.int64], rows: NDArray[np.int64]) -> list[tuple[int, int, NDArray[np.int64]]]:
    """Return number, first row, and the rows within, of each block that has some of the `rows`, which ascend."""
    edges = np.concatenate(([0], np.cumsum(counts)))
    places = np.searchsorted(rows, edges)
    found = []
    for number in np.flatnonzero(np.diff(places)).tolist():
        first = int(edges[number])
        found.append((number, first, rows[places[number] : places[number + 1]] - first))
    return found


@contextmanager
def reading(store: Store, info: ObjectInfo, what: str) -> Iterator[None]:
    """Make what Arrow raises about a file a `SourceError`, or `SourceChangedError` where it was written again."""
    pa = need("pyarrow", "arrow")
    try:
        yield
    except StreamloaderError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        remedy = "decrypt it first" if "crypt" in str(error) else AGAIN
        if isinstance(error, pa.ArrowNotImplementedError):
            remedy = f"try a later version of pyarrow than {pa.__version__}, or write it in another way"
        raise damaged(store, info, f"cannot be read as {what}: {error}", remedy) from error


def damaged(store: Store, info: ObjectInfo, problem: str, remedy: str = AGAIN) -> SourceError | SourceChangedError:
    """Return what to raise for a file that is not as it should be: perhaps since it was written again."""
    root = local_path(store)
    now = store.head(info.path) if root is None else file_info(root, info.path)
    where = f"{store.url}/{info.path}"
    if now is None or (now.size, now.etag or info.etag) != (info.size, info.etag or now.etag):
        return SourceChangedError(f"{where} is another one than when the conversion began", CHANGED)
    return SourceError(f"{where} {problem}", remedy)


@dataclass(frozen=True, eq=False)
class Tables:
    """The rows of all files, one after another. `columns` gives each field its column, `keys` those that are the same
    for a whole file: the key in its path, as in `label=cat/x.parquet`.
    """

    url: str
    store: Store
    files: Sequence[ObjectInfo]
    tables: Sequence[Table]
    columns: Mapping[str, ArrowColumn]
    keys: Mapping[str, str]
    what: str
    read_rows: ReadRows
    notes: Mapping[str, Any]

    @property
    def fields(self) -> Mapping[str, Field]:
        """One field for each column, then one for each key."""
        return {name: column.field for name, column in self.columns.items()} | dict.fromkeys(self.keys, Field("text"))

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The rows of each file."""
        return np.array([int(table.counts.sum()) for table in self.tables], np.int64)

    @property
    def num_samples(self) -> int:
        """The rows of all files."""
        return int(self.counts.sum())

    def part(self, rows: NDArray[np.int64]) -> TablePart:
        """Return these rows, with the files that they need only."""
        found = ((self.tables[number], within) for number, _, within in by_block(self.counts, rows))
        cuts = tuple(Cut(table, within, path_keys(table.info.path)) for table, within in found)
        return TablePart(self.store, cuts, self.columns, self.keys, self.what, self.read_rows)


def path_keys(path: str) -> dict[str, str]:
    """Return the keys of a path such as `year=2024/label=cat/x.parquet`."""
    pairs = (part.partition("=") for part in path.split("/")[:-1] if "=" in part)
    return {key: unquote(value) for key, _, value in pairs if key}


@dataclass(frozen=True, eq=False)
class Cut:
    """Some rows of one file, counted within it and ascending, and the keys of its path."""

    table: Table
    rows: NDArray[np.int64]
    keys: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class TablePart:
    """Some rows, ascending."""

    store: Store
    cuts: tuple[Cut, ...]
    columns: Mapping[str, ArrowColumn]
    keys: Mapping[str, str]
    what: str
    read_rows: ReadRows

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return one column a field; a row with a null, or with lists of another shape, is refused.

        Holds one block of a file at most, beside the columns. Raises `SourceError` or `SourceChangedError`.
        """
        fields = {name: column.field for name, column in self.columns.items()} | dict.fromkeys(self.keys, Field("text"))
        found = Rows(fields, 0)
        position = 0
        for cut, first, batch in self._batches():
            start, stop = np.searchsorted(cut.rows, (first, first + batch.num_rows)).tolist()
            rows = cut.rows[start:stop]
            if not len(rows):
                continue
            with reading(self.store, cut.table.info, self.what):
                columns, bad = self._convert(batch, rows - first)
            for place, trouble in bad.items():
                name = f"{self.store.url}/{cut.table.info.path}: row {rows[place]}"
                refuse(BadSample(position + place, name, trouble.problem, trouble.remedy))
            left = len(rows) - len(bad)
            columns |= {name: [cut.keys[key].encode(errors="replace")] * left for name, key in self.keys.items()}
            if not len(found):  # what was read proves the size of a row, which a schema alone does not
                found = Rows(fields, sum(len(one.rows) for one in self.cuts))
            found.extend(columns, 0, left)
            position += len(rows)
        return found.columns()

    def _convert(self, batch: pa.RecordBatch, rows: NDArray[np.int64]) -> tuple[dict[str, Column], dict[int, Trouble]]:
        """Return the columns of some rows of a batch, and those rows that had to be left out, by position in `rows`."""
        first, places = int(rows[0]), rows - rows[0]
        count = int(places[-1]) + 1
        arrays = {name: values_at(batch, column, first, count) for name, column in self.columns.items()}
        found: dict[int, Trouble] = {}
        for name, column in self.columns.items():
            found = troubles(arrays[name], column) | found  # of one row the first
        bad: dict[int, Trouble] = {}
        if found:
            bad = {i: found[place] for i, place in enumerate(places.tolist()) if place in found}
            places = np.delete(places, list(bad))
        return {name: to_rows(arrays[name], column, places) for name, column in self.columns.items()}, bad

    def _batches(self) -> Iterator[tuple[Cut, int, pa.RecordBatch]]:
        """Yield the batches of all cuts: of small files, a few are read at once."""
        at = 0
        while at < len(self.cuts):
            stop = at
            while stop < min(len(self.cuts), at + READ_THREADS) and self.cuts[stop].table.info.size <= REQUEST_BYTES:
                stop += 1
            if stop > at + 1:
                group = self.cuts[at:stop]
                found = run_all(self._begin, group, READ_THREADS)
                for cut, batches in zip(group, found, strict=True):
                    yield from ((cut, first, batch) for first, batch in batches)
            else:
                stop = at + 1
                yield from ((self.cuts[at], first, batch) for first, batch in self._read(self.cuts[at]))
            at = stop

    def _begin(self, cut: Cut) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Return the batches of one file, of which the first few MiB are read now: a small file may decode to much."""
        batches, read, size = self._read(cut), [], 0
        for first, batch in batches:
            read.append((first, batch))
            size += batch.nbytes
            if size > BEGIN_BYTES:
                break
        return chain(read, batches)

    def _read(self, cut: Cut) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the batches of one file. Raises `SourceChangedError` where its columns or rows are others now."""
        info, checked = cut.table.info, False
        left = len(cut.rows)
        with reading(self.store, info, self.what):
            for first, batch in self.read_rows(self.store, cut.table, cut.rows, list(self.columns.values())):
                if not checked:
                    here = {leaf.path: leaf for leaf in leaves(batch.schema)}
                    same = (one.path in here and same_column(here[one.path], one) for one in self.columns.values())
                    if not all(same):
                        raise damaged(self.store, info, "has other columns than its schema says")
                    checked = True
                left -= int(np.diff(np.searchsorted(cut.rows, (first, first + batch.num_rows)))[0])
                yield first, batch
        if left:
            raise damaged(self.store, info, "lacks rows that it promises")
