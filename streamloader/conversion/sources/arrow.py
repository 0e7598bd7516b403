"""Files of tables, which consist of row groups or record batches of known length, as one source of rows.

Parquet, Arrow IPC files and streams (including Feather version 2), and Hugging Face datasets that `save_to_disk`
wrote: see the MAPPING pages of formats/parquet, formats/arrow and formats/huggingface.

The headers of IPC messages are parsed in this module, since pyarrow reads every body to get to the next header. A
stream is a sequence of messages: four bytes FF, a length, metadata of this length, and a body, whose length is in the
metadata. The metadata are a flatbuffer with two relevant tables: Message (version, type, header, length of the body)
and RecordBatch (length, ...). A file is a stream between its magic and a footer, which repeats these headers.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, takewhile
from typing import Any, BinaryIO, NoReturn
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import arrow_types, ranged_io
from streamloader.conversion.sources.arrow_types import FREE, ArrowColumn, Leaf, read_json, same_column
from streamloader.conversion.sources.base import (
    AGAIN,
    MAX_DECODED,
    BadSample,
    OnBad,
    RowSource,
    check_shard,
    split_rows,
)
from streamloader.conversion.sources.fields import ANY, FieldSelection, SourceFormat, common_encoding
from streamloader.conversion.sources.files import Listing, field_names, head, require
from streamloader.conversion.sources.table_limits import (
    BATCH,
    DICTIONARY,
    SCHEMA,
    Buffers,
    ObservedFile,
    Pages,
    TooManyRowsError,
    number_at,
    slot_at,
)
from streamloader.errors import FieldError, SourceChangedError, SourceError, StreamloaderError
from streamloader.format.codecs import Column
from streamloader.format.manifest import INTS, Field
from streamloader.format.writer import RowBuffer
from streamloader.storage import ObjectInfo, Store
from streamloader.storage.optional import ipc, pa, pq
from streamloader.storage.process import run_all

BEGIN_BYTES = 4 << 20  # decoded bytes of each of several files that are read at once


@dataclass(frozen=True, eq=False)
class Table:
    """A file. `counts` are the rows of its blocks: row groups or record batches. `messages` (n, 3) are type, start and
    stop of all Arrow IPC messages, in order.
    """

    info: ObjectInfo
    counts: NDArray[np.int64]
    messages: NDArray[np.int64]


_NO_MESSAGES = np.empty((0, 3), np.int64)
Cut = tuple[Table, NDArray[np.int64]]  # ascending rows of a file, counted from its first row
Batches = Iterator[tuple[int, "pa.RecordBatch"]]  # the number of its first row in the file, and a batch


@dataclass(frozen=True)
class TableFormat:
    """A format of tables. `noun` names it in messages; `scan` reads the metadata of a file.

    `read_rows` yields batches that contain all rows of a cut, with at least the given columns. Its last argument is the
    option `max_decoded`.
    """

    noun: str
    extensions: tuple[str, ...]
    scan: Callable[[Store, ObjectInfo], tuple[Table, pa.Schema]]
    read_rows: Callable[[Store, Cut, Sequence[ArrowColumn], int], Batches]

    def files(self, listing: Listing) -> tuple[ObjectInfo, ...]:
        """Return the visible files with the extensions; names with a leading `_` are hidden in folders, as in Spark."""
        return tuple(info for info in listing.of(*self.extensions) if not (listing.folder and _is_hidden(info.path)))

    def open(self, listing: Listing, selection: FieldSelection) -> RowSource:
        """Return the source, with the headers of all files read; rows are in the order of the sorted files.

        A file that the user names may have any extension. Raises `SourceError` if there is no file, and what
        `open_tables` raises.
        """
        files = self.files(listing) or (() if listing.folder else listing.files)
        return open_tables(listing, require(files, listing, *self.extensions), self, selection)


def _is_hidden(path: str) -> bool:
    return any(part.startswith("_") and "=" not in part for part in path.split("/"))


@contextmanager
def reading(store: Store, info: ObjectInfo, noun: str) -> Iterator[None]:
    """Raise Arrow's errors about a file as `SourceError`, or as `SourceChangedError` if the file has changed."""
    try:
        yield
    except StreamloaderError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        remedy = "decrypt it first" if "crypt" in str(error) else AGAIN
        if isinstance(error, pa.ArrowNotImplementedError):
            remedy = f"try a later version of pyarrow than {pa.__version__}, or write it in another way"
        raise damaged(store, info, f"cannot be read as {noun}: {error}", remedy) from error


def damaged(store: Store, info: ObjectInfo, problem: str, remedy: str = AGAIN) -> SourceError | SourceChangedError:
    """Return the error for a damaged file, `SourceChangedError` if it has changed since it was listed."""
    now = head(store, info.path)
    where = f"{store.url}/{info.path}"
    if now is None or (now.size, now.etag or info.etag) != (info.size, info.etag or now.etag):
        return SourceChangedError(f"{where} changed since the conversion began", ranged_io.CHANGED)
    return SourceError(f"{where} {problem}", remedy)


@dataclass(frozen=True, eq=False)
class Tables:
    """The rows of all files, in order, or of the ascending `cuts`, which is a fragment.

    `columns` has the column of each field. `keys` has the path key of each field that is constant for a file, such as
    `label` in `label=cat/x.parquet`. `max_decoded` is that of the selection.
    """

    store: Store
    table_format: TableFormat
    tables: Sequence[Table]
    columns: Mapping[str, ArrowColumn]
    keys: Mapping[str, str]
    cuts: Sequence[Cut] = ()
    mapped: bool = False
    max_decoded: int = MAX_DECODED

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the columns, followed by those of the keys."""
        return {name: column.field for name, column in self.columns.items()} | dict.fromkeys(self.keys, Field("text"))

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The number of rows of each file."""
        return np.array([int(table.counts.sum()) for table in self.tables], np.int64)

    def fragment(self, rows: NDArray[np.int64]) -> Tables:
        """Return the fragment of the given rows, with the files that it needs only."""
        cuts = [(self.tables[number], within) for number, _, within in split_rows(self.counts, rows)]
        return replace(self, tables=(), cuts=cuts)

    def sample(self, columns: Mapping[str, ArrowColumn], rows: NDArray[np.int64]) -> dict[str, Column]:
        """Return the given columns and rows, without bad rows."""
        return replace(self, columns=columns, keys={}, mapped=False).fragment(rows)(lambda _: None) if columns else {}

    def blocks(self, count: int) -> list[tuple[int, int]]:
        """Return the first row and the number of rows of up to `count` evenly spread blocks."""
        counts = np.concatenate([table.counts for table in self.tables])
        starts = (np.cumsum(counts) - counts)[counts > 0]
        counts = counts[counts > 0]
        if not len(counts):
            return []
        chosen = np.unique(np.linspace(0, len(counts) - 1, count).astype(np.int64))
        return list(zip(starts[chosen].tolist(), counts[chosen].tolist(), strict=True))

    def __call__(self, on_bad: OnBad) -> dict[str, Column]:
        """Return one column for each field; a row with a null, or with lists of another shape, is bad.

        Holds up to one block of a file besides the columns. Raises `SourceError` or `SourceChangedError`.
        """
        store, keys = self.store, self.keys
        read = arrow_types.read_values if self.mapped else arrow_types.read_columns
        out = RowBuffer(self.fields, 0, self.mapped)
        position = 0
        for (table, selected), first, batch in self._batches():
            start, stop = np.searchsorted(selected, (first, first + batch.num_rows)).tolist()
            rows = selected[start:stop]
            if not len(rows):
                continue
            with reading(store, table.info, self.table_format.noun):
                columns, bad = read(batch, self.columns, rows - first)
            for index, (problem, remedy) in bad.items():
                name = f"{store.url}/{table.info.path}: row {rows[index]}"
                on_bad(BadSample(position + index, name, problem, remedy))
            good, values = len(rows) - len(bad), path_keys(table.info.path) if keys else {}
            columns |= {name: [values[key].encode(errors="replace")] * good for name, key in keys.items()}
            if not len(out):  # reserved only now: the schema alone does not prove the size of a row
                out = RowBuffer(self.fields, sum(len(rows) for _, rows in self.cuts), self.mapped)
            out.extend(columns, 0, good)
            check_shard(out.list_bytes, f"{store.url}/{table.info.path}", self.max_decoded)
            position += len(rows)
        return out.columns()

    def _batches(self) -> Iterator[tuple[Cut, int, pa.RecordBatch]]:
        """Yield the batches of all cuts; several small files are read at the same time."""
        remaining = list(self.cuts)
        while remaining:
            candidates = remaining[: ranged_io.READ_THREADS]
            small = list(takewhile(lambda cut: cut[0].info.size <= ranged_io.REQUEST_BYTES, candidates))
            group, begin = (small, self._begin) if len(small) > 1 else (remaining[:1], self._read)
            remaining = remaining[len(group) :]
            for cut, batches in zip(group, run_all(begin, group, ranged_io.READ_THREADS), strict=True):
                yield from ((cut, first, batch) for first, batch in batches)

    def _begin(self, cut: Cut) -> Batches:
        """Return the batches of a file; up to 4 MiB are decoded now, since a small file may decode to many MiB."""
        batches, read, size = self._read(cut), [], 0
        for first, batch in batches:
            read.append((first, batch))
            size += batch.get_total_buffer_size()  # nbytes would follow offsets that are not yet validated
            if size > BEGIN_BYTES:
                break
        return chain(read, batches)

    def _read(self, cut: Cut) -> Batches:
        """Yield the batches of a file. Raises `SourceChangedError` if its columns or rows have changed."""
        (table, rows), schema = cut, None
        columns, remaining = list(self.columns.values()), len(rows)
        with reading(self.store, table.info, self.table_format.noun):
            for first, batch in self.table_format.read_rows(self.store, cut, columns, self.max_decoded):
                if schema is None:
                    schema = batch.schema
                    leaves = {leaf.path: leaf for leaf in arrow_types.leaves(schema)}
                    if not all(c.leaf.path in leaves and same_column(leaves[c.leaf.path], c) for c in columns):
                        raise damaged(self.store, table.info, "has other columns than its schema says")
                remaining -= int(np.diff(np.searchsorted(rows, (first, first + batch.num_rows)))[0])
                yield first, batch
        if remaining:
            raise damaged(self.store, table.info, "lacks rows that it promises")


def path_keys(path: str) -> dict[str, str]:
    """Return the keys of a path such as `year=2024/label=cat/x.parquet`."""
    pairs = (part.partition("=") for part in path.split("/")[:-1] if "=" in part)
    return {key: unquote(value) for key, _, value in pairs if key}


# the number of blocks, and of rows of each, from which an encoding is inferred
_SNIFFED_BLOCKS, _SNIFFED_ROWS = 4, 16
# the same for the lengths of lists, which may differ rarely; and the bytes that are decoded at most for the last row
_MEASURED_BLOCKS, _MEASURED_ROWS, _MEASURED_BYTES = 8, 32, 64 << 20
_MAX_ROWS = 1 << 40  # of a file: sums of rows must not overflow, whatever headers declare
_NAMED = 8  # fields that a message lists


def open_tables(
    listing: Listing, infos: Sequence[ObjectInfo], form: TableFormat, selection: FieldSelection, features: Any = None
) -> RowSource:
    """Return the source of the tables `infos`, in that order; the headers of all files are read.

    `features` is Hugging Face's description of the columns, if the schema lacks it. Raises `SourceError` for files
    with different columns, `FieldError` for columns that no field holds.
    """
    store = listing.store
    table, first_schema = form.scan(store, infos[0])

    def scan(info: ObjectInfo) -> tuple[Table, pa.Schema]:
        table, schema = form.scan(store, info)
        # compares the metadata of columns, not of the schema; thousands of files then share one schema
        same = schema.remove_metadata().equals(first_schema.remove_metadata(), check_metadata=True)
        return table, first_schema if same else schema

    scanned = [(table, first_schema), *run_all(scan, infos[1:], ranged_io.READ_THREADS)]
    for table, _ in scanned:
        if sum(table.counts.tolist()) > _MAX_ROWS:
            raise damaged(store, table.info, "claims more rows than any file has")
    filled = [(table, schema) for table, schema in scanned if table.counts.sum()] or scanned[:1]  # no rows, no types
    first, expected = filled[0][0].info, filled[0][1]
    columns, keys = _choose(_leaves(store, first, form, expected), path_keys(first.path), selection, listing.url)
    for table, schema in filled[1:]:
        where = f"{store.url}/{table.info.path}"
        if schema is not expected:
            leaves = _leaves(store, table.info, form, schema)
            _check_columns(leaves, where, columns.values(), f"{store.url}/{first.path}", bool(selection.fields))
        missing = next((key for key in keys.values() if key not in path_keys(table.info.path)), None)
        if missing is not None:
            problem = f"{where} is in no folder {missing}=..., but {first.path} is"
            raise SourceError(problem, "put every file into one, or leave the key out with fields=")
    read = [table for table, _ in scanned]
    tables = Tables(store, form, read, columns, keys, mapped=selection.mapped, max_decoded=selection.max_decoded)
    tables = replace(tables, columns=_with_fill(tables, selection, listing.url))
    notes = _notes(tables, features or _features(expected), len(listing.files) - len(infos))
    untyped = {name: c for name, c in tables.columns.items() if selection.fields.get(name) is None and not c.unfit}
    tables = replace(tables, columns={**tables.columns, **_sniffed(tables, untyped), **_shaped(tables, untyped)})
    identity = tuple(sorted(infos, key=lambda info: info.path))
    return RowSource(listing.url, identity, tables.fields, int(tables.counts.sum()), notes, tables.fragment)


def _leaves(store: Store, info: ObjectInfo, form: TableFormat, schema: pa.Schema) -> list[Leaf]:
    """Return the leaves of a file's schema. Raises `SourceError` if names are not text."""
    with reading(store, info, form.noun):
        return arrow_types.leaves(schema)


def _choose(
    leaves: Sequence[Leaf], path: Mapping[str, str], selection: FieldSelection, url: str
) -> tuple[dict[str, ArrowColumn], dict[str, str]]:
    """Return the column, or the key of the path, of each field that is kept."""
    if not leaves:
        raise SourceError(f"{url} has no column", "give tables with columns")
    names = {leaf.name for leaf in leaves}
    originals = [(leaf.name, leaf) for leaf in leaves] + [(key, None) for key in path if key not in names]
    named = [(field_names([original], url)[original], original, leaf) for original, leaf in originals]
    selection.pick({name: leaf for name, _, leaf in named}, url)  # raises for a field that does not exist
    kept = [(name, original, leaf) for name, original, leaf in named if selection.includes(name)]
    field_names([original for _, original, _ in kept], url)  # raises if two fields have one name
    columns: dict[str, ArrowColumn] = {}
    refused: dict[str, FieldError] = {}
    for name, _, leaf in kept:
        if leaf is None:
            continue
        try:
            column = arrow_types.column_of(leaf, selection.fields.get(name), selection.mapped)
            columns[name] = replace(column, max_decoded=selection.max_decoded)
        except FieldError as error:
            if selection.mapped:
                columns[name] = ArrowColumn(leaf, ANY, unfit=True)
            else:
                refused[name] = error
    keys = {name: original for name, original, leaf in kept if leaf is None}
    if refused:
        _raise_unsupported(refused, [*columns, *keys], url)
    return columns, keys


def _raise_unsupported(refused: Mapping[str, FieldError], accepted: list[str], url: str) -> NoReturn:
    types = ", ".join([error.problem for error in refused.values()][:3])
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    problem = f"no field of the format holds {types}{more} of {url}"
    times = [f"{name}=int64" for name, error in refused.items() if error.remedy]
    named = ",".join([*accepted[:_NAMED], *times[:_NAMED], *(["..."] if len(accepted) > _NAMED else [])]) or "a,b"
    if times:
        raise FieldError(problem, f'store times as whole numbers in their unit, fields="{named}", or leave them out')
    lists = ', or read lists of lists of one shape with fields="x=float32[2,3]"' if "list" in problem else ""
    raise FieldError(problem, f'leave it out by naming the fields to keep, fields="{named}"{lists}')


def _check_columns(leaves: Sequence[Leaf], where: str, columns: Iterable[ArrowColumn], first: str, more: bool) -> None:
    """Raise `SourceError` unless the file `where` has the columns of the file `first`, and `more` only if allowed."""
    remedy = "give all files one schema, or name the fields that they share with fields="
    by_path = {leaf.path: leaf for leaf in leaves}
    for column in columns:
        name, expected = column.leaf.name, f"{column.leaf.kind} in {first}"
        leaf = by_path.pop(column.leaf.path, None)
        if leaf is None:
            raise SourceError(f"{where} lacks the column {name!r}, which is {expected}", remedy)
        if not same_column(leaf, column):
            raise SourceError(f"column {name!r} is {leaf.kind} in {where}, {expected}", remedy)
    if by_path and not more:
        extra = next(iter(by_path.values()))
        raise SourceError(f"{where} has a column {extra.name!r} ({extra.kind}), which {first} lacks", remedy)


def _features(schema: pa.Schema) -> Any:
    """Return Hugging Face's description of the columns in a schema's metadata, None if there is none."""
    document = read_json((schema.metadata or {}).get(b"huggingface", b""))
    info = document.get("info") if isinstance(document, dict) else None
    return info.get("features") if isinstance(info, dict) else None


def _notes(tables: Tables, features: Any, passed_over: int) -> dict[str, Any]:
    originals = {name: column.leaf.name for name, column in tables.columns.items()} | dict(tables.keys)
    classes = {name: arrow_types.class_names(features, column.leaf.path) for name, column in tables.columns.items()}
    notes: dict[str, Any] = {
        "columns": {name: original for name, original in originals.items() if name != original},
        "classes": {name: names for name, names in classes.items() if names},
        "keys": list(tables.keys),
        "passed_over": passed_over,
        "units": {name: column.unit for name, column in tables.columns.items() if column.unit},
    }
    return {key: value for key, value in notes.items() if value}


def _with_fill(tables: Tables, selection: FieldSelection, url: str) -> dict[str, ArrowColumn]:
    """Return the columns with their fill values. Raises `FieldError` for a value that is invalid for its column.

    A column of integers that is selected as floats may have a float as fill value.
    """
    columns = dict(tables.columns)
    for name in selection.fill.keys() & columns.keys():
        selected, column = selection.fields.get(name), columns[name]
        integers = column.field.dtype in INTS and not column.sizes and not column.unit
        if integers and selected is not None and selected.dtype.startswith("float"):
            columns[name] = replace(column, field=replace(column.field, dtype=selected.dtype), widened=True)
    values = selection.fill_values(replace(tables, columns=columns).fields, url)
    return {name: replace(column, fill=values.get(name)) for name, column in columns.items()}


def _shaped(tables: Tables, columns: Mapping[str, ArrowColumn]) -> dict[str, ArrowColumn]:
    """Return the columns whose lists have one length in a few rows, as tensors: a row of another length is then bad."""
    ragged = {name: c for name, c in columns.items() if c.field.kind == "ragged" and FREE not in c.leaf.shape}
    blocks = tables.blocks(_MEASURED_BLOCKS)
    if not ragged or not blocks:
        return {}
    lengths = _lengths(tables, ragged, _first_rows(blocks, _MEASURED_ROWS))
    types = {name: ragged[name].field for name, sizes in lengths.items() if len(sizes) == 1 and min(sizes)}
    fields = {name: Field("tensor", f.dtype, (min(lengths[name]), *f.shape)) for name, f in types.items()}
    start, count = blocks[-1]  # its last row is often the one that is shorter
    cheap = {name: ragged[name] for name, field in fields.items() if count * field.item_bytes <= _MEASURED_BYTES}
    last = _lengths(tables, cheap, np.array([start + count - 1]))
    kept = {name: field for name, field in fields.items() if last.get(name, set()) <= lengths[name]}
    return {name: replace(ragged[name], field=field, sizes=field.shape) for name, field in kept.items()}


def _lengths(tables: Tables, columns: Mapping[str, ArrowColumn], rows: NDArray[np.int64]) -> dict[str, set[int]]:
    """Return the lengths of the lists in the given rows, without bad rows."""
    lists = tables.sample(columns, rows)
    return {name: {len(item) // columns[name].field.item_bytes for item in column} for name, column in lists.items()}


def _first_rows(blocks: Sequence[tuple[int, int]], limit: int) -> NDArray[np.int64]:
    return np.concatenate([start + np.arange(min(count, limit)) for start, count in blocks])


def _sniffed(tables: Tables, columns: Mapping[str, ArrowColumn]) -> dict[str, ArrowColumn]:
    """Return the columns of bytes, with the encoding that their values have in a few rows."""
    raw = {name: column for name, column in columns.items() if column.field.kind == "bytes"}
    blocks = tables.blocks(_SNIFFED_BLOCKS)
    values = tables.sample(raw, _first_rows(blocks, _SNIFFED_ROWS)) if blocks else {}
    fields = {name: Field("bytes", encoding=common_encoding(column)) for name, column in values.items()}
    return {name: replace(raw[name], field=field) for name, field in fields.items()}


_MAGIC, _AFTER_MAGIC = b"ARROW1", 8
_FEATHER_1 = b"FEA1"
_CONTINUES = b"\xff\xff\xff\xff"
_METADATA_BYTES = 64 << 20  # more than any schema has: a damaged length must not exhaust the memory
_HEADERS_BYTES = 64 << 10  # read at a time to find headers, which have bodies between them


def scan_arrow(store: Store, info: ObjectInfo) -> tuple[Table, pa.Schema]:
    """Return the record batches of a file or stream, and its schema; bodies are skipped.

    Raises `SourceError` for a file that is not Arrow, and for a truncated one.
    """
    where = f"{store.url}/{info.path}"
    with reading(store, info, "Arrow"):
        file = ranged_io.open_file(store, info, _HEADERS_BYTES)
        magic = file.read(len(_MAGIC))
        if magic.startswith(_FEATHER_1):
            raise SourceError(f"{where} is a Feather file of version 1", "write it with pyarrow.feather, version 2")
        headers: list[tuple[int, int, int, int]] = []
        for kind, start, stop, rows in _messages(file, _AFTER_MAGIC if magic == _MAGIC else 0, info.size, where):
            if kind not in (SCHEMA, DICTIONARY, BATCH) or (kind == SCHEMA) != (not headers):
                raise SourceError(f"{where} holds a message of type {kind} at byte {start}, which no table has", AGAIN)
            headers.append((kind, start, stop, rows))
        if not headers:
            raise SourceError(f"{where} has no schema", AGAIN)
        messages = np.array(headers, np.int64)
        table = Table(info, messages[messages[:, 0] == BATCH, 3], messages[:, :3])
        return table, _schema(store, table)


def _schema(store: Store, table: Table) -> pa.Schema:
    start, stop = table.messages[0, 1:].tolist()
    return ipc.read_schema(pa.py_buffer(ranged_io.read_range(store, ranged_io.Range(table.info.path, start, stop))))


def _messages(file: BinaryIO, start: int, size: int, where: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield type, start, stop and number of rows of each message, up to the end marker."""
    while True:
        file.seek(start)
        prefix = file.read(8)
        continues = prefix[:4] == _CONTINUES  # Arrow before 0.15 wrote only the length
        prefix_size, length = (8, prefix[4:8]) if continues else (4, prefix[:4])
        number = int.from_bytes(length, "little", signed=True)
        if len(length) == 4 and number == 0:
            return
        if len(length) < 4 or start + prefix_size + number > size:
            remedy = f"{AGAIN}; its writer must be closed"
            raise SourceError(f"{where} is truncated: it ends at byte {size}, in the middle of a table", remedy)
        file.seek(start + prefix_size)
        try:
            if not 0 < number <= _METADATA_BYTES:
                raise ValueError(f"{number} bytes of metadata")
            kind, body, rows = _parse(file.read(number))
        except (struct.error, ValueError):
            raise SourceError(f"{where} is not an Arrow file, or is damaged, at byte {start}", AGAIN) from None
        stop = start + prefix_size + number + body
        if stop > size:
            raise SourceError(f"{where} is truncated: it has {size} bytes, one message extends to {stop}", AGAIN)
        yield kind, start, stop, rows
        start = stop


def _parse(data: bytes) -> tuple[int, int, int]:
    """Return type, length of the body in bytes, and number of rows from a message's metadata. Raises ValueError."""
    message = number_at(data, 0, "<I")
    kind, body = (slot_at(data, message, at, layout)[1] for at, layout in ((6, "<B"), (10, "<q")))
    header = sum(slot_at(data, message, 8, "<I"))  # a table, at this distance from the slot
    rows = slot_at(data, header, 4, "<q")[1] if kind == BATCH and header else 0
    if min(body, rows) < 0:
        raise ValueError("a negative length")
    return kind, body, rows


def read_arrow_rows(store: Store, cut: Cut, columns: Sequence[ArrowColumn], limit: int) -> Batches:
    """Yield the record batches with the given rows, one in memory at a time; from a file, with these columns only."""
    table, rows = cut
    blocks = split_rows(table.counts, rows)
    numbers = [number for number, _, _ in blocks]
    selected, names = {column.leaf.path[0] for column in columns}, _schema(store, table).names
    included = [number for number, name in enumerate(names) if name in selected]
    options = ipc.IpcReadOptions(included_fields=included, use_threads=False)
    buffers = Buffers(f"{store.url}/{table.info.path}", limit)
    if table.messages[0, 1]:  # a file, which begins with its magic; a stream begins with the schema
        few = 2 * len(included) < len(names)  # the columns between them are then skipped
        buffer = ranged_io.GAP_BYTES if few else ranged_io.BUFFER_BYTES
        source = ObservedFile(store, table.info, buffer, buffers.observe)
        file = ipc.open_file(source, options=options)
        if file.num_record_batches != len(table.counts):
            raise damaged(store, table.info, "has other record batches than its footer says")
        batches: Iterator[pa.RecordBatch] = (_batch(file, source, number) for number in numbers)
    else:
        needed = table.messages[:, 0] != BATCH
        chosen = np.flatnonzero(~needed)[numbers]
        needed[chosen] = True
        needed[chosen[-1] + 1 :] = False  # dictionaries apply to the batches that follow them
        spans = _Spans(store, table.info, table.messages[needed, 1:], buffers)
        batches = iter(ipc.open_stream(spans, options=options))
    for (number, start, _), batch in zip(blocks, batches, strict=False):  # `Tables` checks that no row is missing
        if batch.num_rows != table.counts[number]:
            raise damaged(store, table.info, "has other record batches than its headers say")
        yield start, batch
        buffers.begin()


def _batch(file: Any, source: ObservedFile, number: int) -> pa.RecordBatch:
    try:
        return file.get_batch(number)
    except (pa.ArrowException, OSError) as error:
        raise source.refused or error from None


IPC = TableFormat("Arrow", ("arrow", "feather", "ipc"), scan_arrow, read_arrow_rows)


class _Spans(io.RawIOBase):
    """The concatenated spans (start, stop) of an object, as a file that is read once from its start."""

    def __init__(self, store: Store, info: ObjectInfo, spans: NDArray[np.int64], buffers: Buffers) -> None:
        self._buffers, self._at = buffers, 0
        step, last = ranged_io.REQUEST_BYTES, spans[:, 1]
        starts = np.array([at for start, stop in spans.tolist() for at in range(start, stop, step)], np.int64)
        stops = np.minimum(starts + step, last[np.searchsorted(last, starts, side="right")])
        self._pieces = ranged_io.read_spans([(ranged_io.Content(store, info), starts, stops)])
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> memoryview:
        """Return the next `size` bytes, fewer at the end; they are copied only if they span several pieces."""
        parts: list[memoryview] = []
        while size > 0:
            self._piece = self._piece or next(self._pieces, self._piece)
            if not self._piece:
                break
            parts.append(self._piece[:size])
            self._piece = self._piece[size:]
            size -= len(parts[-1])
        data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        self._buffers.observe(self._at, data)
        self._at += len(data)
        return data


_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}  # folders with the log of a table

# Row groups of up to this size, from local files and from elsewhere, are fetched at once; the columns of a larger one
# are read in pieces of this size together. The latency of a network makes large requests worth their memory.
_NEAR_BYTES, _FAR_BYTES = 2 << 20, 64 << 20
_SMALLEST_PIECE, _LARGEST_PIECE = 256 << 10, 4 << 20
_BATCH_BYTES, _BATCH_ROWS = 1 << 20, 1 << 16  # memory of larger batches is more fragmented by the rows kept
# Rows of the first batch: only decoding tells how large rows are, since a dictionary has each value once.
_FIRST_ROWS = 128


def open_parquet(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source. Raises what `TableFormat.open` raises, and `SourceError` for a table whose log selects files,
    such as Delta Lake's.
    """
    for info in listing.files:
        lake = next((_LOGS[folder] for folder in info.path.split("/")[:-1] if folder in _LOGS), "")
        if lake or info.path.endswith(".metadata.json"):
            problem = f"{listing.url} is a {lake or 'Iceberg'} table, not all of whose files count ({info.path})"
            raise SourceError(problem, "write its rows as plain Parquet, or name the files that count")
    return PARQUET.open(listing, selection)


def scan_parquet(store: Store, info: ObjectInfo) -> tuple[Table, pa.Schema]:
    """Return the row groups of a file, and its schema, from its footer. Raises `SourceError`."""
    with reading(store, info, "Parquet"):
        file = pq.ParquetFile(ranged_io.open_file(store, info))
        metadata, schema = file.metadata, file.schema_arrow
        counts = np.array([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], np.int64)
    if sum(counts.tolist()) != metadata.num_rows or (counts < 0).any():
        raise damaged(store, info, "has row groups that do not sum up to its rows")
    return Table(info, counts, _NO_MESSAGES), schema


def read_parquet_rows(store: Store, cut: Cut, columns: Sequence[ArrowColumn], limit: int) -> Batches:
    """Yield batches with the given rows and columns. A row group is read up to its last selected row.

    The columns of a row group of up to 64 MiB, 2 MiB for local files, are fetched at once, of a larger one in pieces.
    """
    table, rows = cut
    metadata = pq.read_metadata(ranged_io.open_file(store, table.info))
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    if [group.num_rows for group in groups] != table.counts.tolist():
        raise damaged(store, table.info, "has other row groups than before")
    names = [".".join(column.leaf.path) for column in columns]
    blocks = split_rows(table.counts, rows)
    near = store.reader().kind == "file"
    at_once = _NEAR_BYTES if near else _FAR_BYTES
    plans = [_plan(groups[number], len(names), int(within[-1]) + 1, at_once) for number, _, within in blocks]
    piece = min((piece for piece, _ in plans if piece), default=0)
    few = 2 * len(names) < metadata.num_columns  # the columns between them are then skipped
    pages = Pages(f"{store.url}/{table.info.path}", limit)
    buffer = piece or (ranged_io.GAP_BYTES if few else ranged_io.BUFFER_BYTES)
    source = ObservedFile(store, table.info, buffer, pages.observe)
    options = {"buffer_size": piece, "pre_buffer": False, "page_checksum_verification": True}
    file = pq.ParquetFile(source, metadata=metadata, **options)
    size = _FIRST_ROWS
    for (number, start, within), (_, longest) in zip(blocks, plans, strict=True):
        at, stop = 0, int(within[-1]) + 1
        while at < stop:  # repeats if the batch size changes: the group is then decoded from its start
            count, before = min(size, longest), at
            pages.begin(count)
            try:
                batches = file.iter_batches(count, row_groups=[number], columns=names, use_threads=False)
                for first, batch in _from_row(batches, at, pages):
                    yield start + first, batch
                    at = first + batch.num_rows
                    size = min(_next_size(count, batch), longest)
                    # a remote group is not fetched again to grow
                    if at >= stop or size < count or (near and size > count):
                        break
            except TooManyRowsError as found:
                size = found.rows
                continue
            if at == before:
                break  # the group is shorter than declared; `Tables` raises for missing rows


def _from_row(batches: Iterator[pa.RecordBatch], row: int, pages: Pages) -> Batches:
    """Yield the batches of a row group from a row on, each with the number of its first row."""
    first = 0
    for batch in batches:
        pages.decoded()
        stop = first + batch.num_rows
        if stop > row:
            skipped = max(0, row - first)
            yield first + skipped, batch.slice(skipped)
        first = stop


def _next_size(size: int, batch: pa.RecordBatch) -> int:
    """Return the number of rows to decode at a time after a batch: `size`, unless it gives far from 1 MiB."""
    fitting = max(1, _BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1))
    far = fitting < size // 4 or (size == _FIRST_ROWS and fitting > size)
    return min(fitting, _BATCH_ROWS) if far else size


def _plan(group: pq.RowGroupMetaData, columns: int, stop: int, limit: int) -> tuple[int, int]:
    """Return the bytes of a column to read at a time, 0 for all, and the rows to decode at a time.

    Rows up to `stop` are read, about `limit` bytes at a time. Only sizes of the group are used: asking pyarrow for
    damaged metadata of a column aborts the process, while reading the column raises.
    """
    few = stop < group.num_rows // 4  # most of the group is not needed
    piece = min(_LARGEST_PIECE, max(_SMALLEST_PIECE, limit // max(columns, 4)))
    batch = _BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
    return piece if few or group.total_byte_size > limit else 0, min(_BATCH_ROWS, max(batch, 1))


PARQUET = TableFormat("Parquet", ("parquet",), scan_parquet, read_parquet_rows)

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_SAVE_AGAIN = "save the dataset again with save_to_disk"


def matches_hugging_face(listing: Listing) -> bool:
    """Return whether the folder is a saved dataset, or a saved dictionary of splits."""
    paths = {info.path for info in listing.files}
    return listing.folder and ({_STATE, _INFO} <= paths or _SPLITS in paths)


def open_hugging_face(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source, with the headers of every record batch read; rows are in the order of the dataset.

    Raises `SourceError`, with their names, for a folder of splits; for missing or damaged files; and for a dataset
    with an indices mapping. Raises `FieldError` for columns that no field holds.
    """
    files = {info.path: info for info in listing.files}
    if _STATE not in files:
        splits = sorted(path.split("/")[0] for path in files if path.endswith(f"/{_STATE}") and path.count("/") == 1)
        if not splits:
            raise SourceError(f"{listing.url} holds no {_STATE}", "give a folder that save_to_disk has written")
        raise SourceError(f"{listing.url} holds the splits {', '.join(splits)}", f"choose {listing.url}/{splits[0]}")
    state = ranged_io.read_document(listing.store, files[_STATE])
    if any(state.get(key) for key in ("_indices_data_files", "_indices_files")):
        raise SourceError(f"{listing.url} is a selection of its rows", "save dataset.flatten_indices() instead")
    listed = state.get("_data_files")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    names = [str(entry.get("filename")) for entry in entries]
    if not names:
        raise SourceError(f"{listing.store.url}/{_STATE} names no files", _SAVE_AGAIN)
    missing = next((name for name in names if name not in files), None)
    if missing is not None:
        raise SourceError(f"{listing.url} lacks the file {missing!r}, which its {_STATE} names", _SAVE_AGAIN)
    described = [files[name] for name in (_STATE, _INFO) if name in files]
    info = ranged_io.read_document(listing.store, files[_INFO]) if _INFO in files else {}
    source = open_tables(listing, [files[name] for name in names], IPC, selection, info.get("features"))
    identity = tuple(sorted([*source.files, *described], key=lambda info: info.path))
    notes = {key: value for key, value in source.notes.items() if key != "passed_over"}
    return replace(source, files=identity, notes=notes)


FORMATS = (
    SourceFormat("parquet", lambda listing: bool(PARQUET.files(listing)), open_parquet, nullable=True),
    SourceFormat("arrow", lambda listing: bool(IPC.files(listing)), IPC.open, nullable=True),
    SourceFormat("huggingface", matches_hugging_face, open_hugging_face, marked=True, nullable=True),
)
