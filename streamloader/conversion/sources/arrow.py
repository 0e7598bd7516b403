"""Files of tables, cut into blocks of known length (row groups, record batches), as one source of rows.

Parquet, Arrow IPC files and streams (Feather version 2 among them), and Hugging Face datasets that `save_to_disk`
wrote: see the MAPPING pages of formats/parquet, formats/arrow and formats/huggingface.

The headers of IPC messages are parsed here, since pyarrow reads every body to get to the next header. A stream is a run
of messages: four bytes FF, a length, that many bytes of metadata, then a body, whose length the metadata tell. The
metadata are a flatbuffer, of which two tables matter: Message (version, type, header, length of the body) and
RecordBatch (length, ...). A file is a stream between its magic and a footer, which repeats what is here.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.optional import Lazy
from streamloader.conversion.sources import arrow_types, ranged_io
from streamloader.conversion.sources.arrow_types import FREE, ArrowColumn, Leaf, read_json, same_column
from streamloader.conversion.sources.base import AGAIN, BadSample, OnBad, Source, split_rows
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat, sniff
from streamloader.conversion.sources.files import Listing, field_names, file_info, local_path, required
from streamloader.errors import FieldError, SourceChangedError, SourceError, StreamloaderError
from streamloader.format.codecs import Column
from streamloader.format.manifest import INTS, Field
from streamloader.format.writer import Rows
from streamloader.storage.process import run_all
from streamloader.storage.store import ObjectInfo, Store

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import ipc
else:
    pa, ipc, pq = (Lazy(name) for name in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"))

BEGIN_BYTES = 4 << 20  # decoded, of each of several files that are read at once


@dataclass(frozen=True, eq=False)
class Table:
    """One file: the rows of each of its blocks; of Arrow IPC also type, start and stop of all messages, in order."""

    info: ObjectInfo
    counts: NDArray[np.int64]
    messages: NDArray[np.int64]


_NO_MESSAGES = np.empty((0, 3), np.int64)
Cut = tuple[Table, NDArray[np.int64]]  # some rows of one file, counted within it and ascending
Batches = Iterator[tuple[int, "pa.RecordBatch"]]  # each with the number of its first row within the file


@dataclass(frozen=True)
class TableFormat:
    """A format of tables: its name for messages, how a file is scanned and how its rows are read.

    `read_rows` yields batches that hold all of the rows of a cut, of these columns at least.
    """

    what: str
    extensions: tuple[str, ...]
    scan: Callable[[Store, ObjectInfo], tuple[Table, pa.Schema]]
    read_rows: Callable[[Store, Cut, Sequence[ArrowColumn]], Batches]

    def files(self, listing: Listing) -> tuple[ObjectInfo, ...]:
        """Return the files with these extensions, without hidden ones; as in Spark a name with `_` in front is hidden
        too. What a user names, by a path or a pattern, need only have the extension.
        """
        return tuple(info for info in listing.of(*self.extensions) if not (listing.folder and _is_hidden(info.path)))

    def open(self, listing: Listing, selection: FieldSelection) -> Source:
        """Return the source, with the headers of all files read; rows are in the order of the sorted files.

        A file that the user names may have any extension. Raises `SourceError` for none, and what `open_tables` raises.
        """
        files = self.files(listing) or (() if listing.folder else listing.files)
        return open_tables(listing, required(files, listing, *self.extensions), self, selection)


def _is_hidden(path: str) -> bool:
    return any(part.startswith("_") and "=" not in part for part in path.split("/"))


@contextmanager
def reading(store: Store, info: ObjectInfo, what: str) -> Iterator[None]:
    """Make what Arrow raises about a file a `SourceError`, or `SourceChangedError` where it was written again."""
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
        return SourceChangedError(f"{where} changed since the conversion began", ranged_io.CHANGED)
    return SourceError(f"{where} {problem}", remedy)


@dataclass(frozen=True, eq=False)
class Tables:
    """The rows of all files, one after another, or those of `cuts`, which ascend. `columns` gives each field its
    column, `keys` those that are the same for a whole file: the key in its path, as in `label=cat/x.parquet`.
    """

    store: Store
    form: TableFormat
    tables: Sequence[Table]
    columns: Mapping[str, ArrowColumn]
    keys: Mapping[str, str]
    cuts: Sequence[Cut] = ()

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the columns, and then of the keys."""
        return {name: column.field for name, column in self.columns.items()} | dict.fromkeys(self.keys, Field("text"))

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The rows of each file."""
        return np.array([int(table.counts.sum()) for table in self.tables], np.int64)

    def part(self, rows: NDArray[np.int64]) -> Tables:
        """Return these rows, with the files that they need only."""
        cuts = [(self.tables[number], within) for number, _, within in split_rows(self.counts, rows)]
        return replace(self, tables=(), cuts=cuts)

    def sample(self, columns: Mapping[str, ArrowColumn], rows: NDArray[np.int64]) -> dict[str, Column]:
        """Return some columns of these rows, without those rows that are bad."""
        return replace(self, columns=columns, keys={}).part(rows)(lambda _: None) if columns else {}

    def blocks(self, most: int) -> list[tuple[int, int]]:
        """Return the first row and the number of rows of some blocks, spread evenly."""
        counts = np.concatenate([table.counts for table in self.tables])
        starts = (np.cumsum(counts) - counts)[counts > 0]
        counts = counts[counts > 0]
        if not len(counts):
            return []
        chosen = np.unique(np.linspace(0, len(counts) - 1, most).astype(np.int64))
        return [(int(starts[one]), int(counts[one])) for one in chosen]

    def __call__(self, on_bad: OnBad) -> dict[str, Column]:
        """Return one column a field; a row with a null, or with lists of another shape, is refused.

        Holds one block of a file at most, beside the columns. Raises `SourceError` or `SourceChangedError`.
        """
        store, keys = self.store, self.keys
        found = Rows(self.fields, 0)
        position = 0
        for (table, wanted), first, batch in self._batches():
            start, stop = np.searchsorted(wanted, (first, first + batch.num_rows)).tolist()
            rows = wanted[start:stop]
            if not len(rows):
                continue
            with reading(store, table.info, self.form.what):
                columns, bad = arrow_types.read_columns(batch, self.columns, rows - first)
            for index, (problem, remedy) in bad.items():
                name = f"{store.url}/{table.info.path}: row {rows[index]}"
                on_bad(BadSample(position + index, name, problem, remedy))
            left, here = len(rows) - len(bad), path_keys(table.info.path) if keys else {}
            columns |= {name: [here[key].encode(errors="replace")] * left for name, key in keys.items()}
            if not len(found):  # what was read proves the size of a row, which a schema alone does not
                found = Rows(self.fields, sum(len(rows) for _, rows in self.cuts))
            found.extend(columns, 0, left)
            position += len(rows)
        return found.columns()

    def _batches(self) -> Iterator[tuple[Cut, int, pa.RecordBatch]]:
        """Yield the batches of all cuts: of small files, a few are read at once."""
        left = list(self.cuts)
        while left:
            some = left[: ranged_io.READ_THREADS]
            small = list(takewhile(lambda cut: cut[0].info.size <= ranged_io.REQUEST_BYTES, some))
            group, begin = (small, self._begin) if len(small) > 1 else (left[:1], self._read)
            left = left[len(group) :]
            for cut, batches in zip(group, run_all(begin, group, ranged_io.READ_THREADS), strict=True):
                yield from ((cut, first, batch) for first, batch in batches)

    def _begin(self, cut: Cut) -> Batches:
        """Return the batches of one file, of which the first few MiB are read now: a small file may decode to much."""
        batches, read, size = self._read(cut), [], 0
        for first, batch in batches:
            read.append((first, batch))
            size += batch.get_total_buffer_size()  # nbytes follows offsets, which nothing has checked yet
            if size > BEGIN_BYTES:
                break
        return chain(read, batches)

    def _read(self, cut: Cut) -> Batches:
        """Yield the batches of one file. Raises `SourceChangedError` where its columns or rows are others now."""
        (table, rows), schema = cut, None
        columns, left = list(self.columns.values()), len(rows)
        with reading(self.store, table.info, self.form.what):
            for first, batch in self.form.read_rows(self.store, cut, columns):
                if schema is None:
                    schema = batch.schema
                    here = {leaf.path: leaf for leaf in arrow_types.leaves(schema)}
                    if not all(one.leaf.path in here and same_column(here[one.leaf.path], one) for one in columns):
                        raise damaged(self.store, table.info, "has other columns than its schema says")
                left -= int(np.diff(np.searchsorted(rows, (first, first + batch.num_rows)))[0])
                yield first, batch
        if left:
            raise damaged(self.store, table.info, "lacks rows that it promises")


def path_keys(path: str) -> dict[str, str]:
    """Return the keys of a path such as `year=2024/label=cat/x.parquet`."""
    pairs = (part.partition("=") for part in path.split("/")[:-1] if "=" in part)
    return {key: unquote(value) for key, _, value in pairs if key}


# of the values that an encoding is inferred from
_SNIFFED_BLOCKS, _SNIFFED_ROWS = 4, 16
# of lists, whose lengths may differ rarely; and what is decoded at most to see the last one
_MEASURED_BLOCKS, _MEASURED_ROWS, _MEASURED_BYTES = 8, 32, 64 << 20
_MAX_ROWS = 1 << 40  # of one file; headers may lie, and sums must not overflow
_NAMED = 8  # fields that a message lists


def open_tables(
    listing: Listing, infos: Sequence[ObjectInfo], form: TableFormat, selection: FieldSelection, features: Any = None
) -> Source:
    """Return the source whose tables are the files `infos`, in that order; their headers are read, all at once.

    `features` describes the columns, as Hugging Face does where the schema does not. Raises `SourceError` for
    files of different columns, `FieldError` for columns that no field holds.
    """
    store = listing.store
    table, schema = form.scan(store, infos[0])

    def scan(info: ObjectInfo) -> tuple[Table, pa.Schema]:
        table, own = form.scan(store, info)
        same = own.remove_metadata().equals(schema.remove_metadata(), check_metadata=True)  # that of columns remains
        return table, schema if same else own  # there may be thousands of them

    scanned = [(table, schema), *run_all(scan, infos[1:], ranged_io.READ_THREADS)]
    for table, _ in scanned:
        if sum(table.counts.tolist()) > _MAX_ROWS:
            raise damaged(store, table.info, "claims more rows than any file has")
    filled = [(table, own) for table, own in scanned if table.counts.sum()] or scanned[:1]  # no rows, no types
    first, main = filled[0][0].info, filled[0][1]
    columns, keys = _choose(_leaves(store, first, form, main), path_keys(first.path), selection, listing.url)
    for table, own in filled[1:]:
        where = f"{store.url}/{table.info.path}"
        if own is not main:
            here = _leaves(store, table.info, form, own)
            _check_columns(here, where, columns, f"{store.url}/{first.path}", bool(selection.fields))
        missing = next((key for key in keys.values() if key not in path_keys(table.info.path)), None)
        if missing is not None:
            problem = f"{where} is in no folder {missing}=..., but {first.path} is"
            raise SourceError(problem, "put every file into one, or leave the key out with --fields")
    tables = Tables(store, form, [table for table, _ in scanned], columns, keys)
    tables = replace(tables, columns=_filled(tables, selection, listing.url))
    notes = _notes(tables, features or _features(main), len(listing.files) - len(infos))
    untyped = {name: column for name, column in tables.columns.items() if selection.fields.get(name) is None}
    tables = replace(tables, columns={**tables.columns, **_sniffed(tables, untyped), **_shaped(tables, untyped)})
    identity = tuple(sorted(infos, key=lambda info: info.path))
    return Source(listing.url, identity, tables.fields, int(tables.counts.sum()), notes, tables.part)


def _leaves(store: Store, info: ObjectInfo, form: TableFormat, schema: pa.Schema) -> list[Leaf]:
    """Return the leaves of a file's schema. Raises `SourceError` where names are no text."""
    with reading(store, info, form.what):
        return arrow_types.leaves(schema)


def _choose(
    found: Sequence[Leaf], path: Mapping[str, str], selection: FieldSelection, url: str
) -> tuple[dict[str, ArrowColumn], dict[str, str]]:
    """Return the column, or the key of the path, of each field that is kept."""
    if not found:
        raise SourceError(f"{url} has no column", "give tables with columns")
    known = {leaf.name for leaf in found}
    originals = [(leaf.name, leaf) for leaf in found] + [(key, None) for key in path if key not in known]
    named = [(field_names([original], url)[original], original, leaf) for original, leaf in originals]
    missing = selection.fields.keys() - {name for name, _, _ in named}
    if missing:
        raise FieldError(f"{url} has no field {min(missing)!r}", f"it has {', '.join(name for name, _, _ in named)}")
    kept = [(name, original, leaf) for name, original, leaf in named if selection.wanted(name)]
    field_names([original for _, original, _ in kept], url)  # no two of one name
    columns: dict[str, ArrowColumn] = {}
    refused: dict[str, FieldError] = {}
    for name, _, leaf in kept:
        try:
            columns |= {name: arrow_types.column_of(leaf, selection.fields.get(name), selection.mapped)} if leaf else {}
        except FieldError as error:
            refused[name] = error
    keys = {name: original for name, original, leaf in kept if leaf is None}
    if refused:
        _raise_unsupported(refused, [*columns, *keys], url, selection.mapped)
    return columns, keys


def _raise_unsupported(refused: Mapping[str, FieldError], others: list[str], url: str, mapped: bool) -> NoReturn:
    types = ", ".join([error.problem for error in refused.values()][:3])
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    problem = f"no field of the format holds {types}{more} of {url}"
    if mapped:
        raise FieldError(problem, "a map function gets every column: write the table without it, or with another type")
    times = [f"{name}=int64" for name, error in refused.items() if error.remedy]
    named = ",".join([*others[:_NAMED], *times[:_NAMED], *(["..."] if len(others) > _NAMED else [])]) or "a,b"
    if times:
        raise FieldError(problem, f"store times as whole numbers in their unit, --fields {named}, or leave them out")
    lists = ", or read lists of lists of one shape with --fields x=float32[2,3]" if "list" in problem else ""
    raise FieldError(problem, f"leave it out by naming the fields to keep, --fields {named}{lists}")


def _check_columns(own: Sequence[Leaf], here: str, columns: Mapping[str, ArrowColumn], first: str, only: bool) -> None:
    """Raise `SourceError` unless the file `here` has the columns of the `first`; with `only` it may have more."""
    remedy = "give all files one schema, or name the fields that they share with --fields"
    there = {leaf.path: leaf for leaf in own}
    for column in columns.values():
        expected = column.leaf
        leaf = there.pop(expected.path, None)
        if leaf is None:
            raise SourceError(f"{here} lacks the column {expected.name!r}, which is {expected.kind} in {first}", remedy)
        if not same_column(leaf, column):
            raise SourceError(f"column {expected.name!r} is {leaf.kind} in {here}, {expected.kind} in {first}", remedy)
    if there and not only:
        more = next(iter(there.values()))
        raise SourceError(f"{here} has a column {more.name!r} ({more.kind}), which {first} lacks", remedy)


def _features(schema: pa.Schema) -> Any:
    """Return what Hugging Face wrote about its columns into a schema, if anything."""
    found = read_json((schema.metadata or {}).get(b"huggingface", b""))
    info = found.get("info") if isinstance(found, dict) else None
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


def _filled(tables: Tables, selection: FieldSelection, url: str) -> dict[str, ArrowColumn]:
    """Return the columns with their fill values. Raises `FieldError` for a value that its column does not hold.

    Of a column of integers that is selected as floats, it may be a float.
    """
    columns = dict(tables.columns)
    for name in selection.fill.keys() & columns.keys():
        wanted, column = selection.fields.get(name), columns[name]
        integers = column.field.dtype in INTS and not column.sizes and not column.unit
        if integers and wanted is not None and wanted.dtype.startswith("float"):
            columns[name] = replace(column, field=replace(column.field, dtype=wanted.dtype), widened=True)
    values = selection.fill_values(replace(tables, columns=columns).fields, url)
    return {name: replace(column, fill=values.get(name)) for name, column in columns.items()}


def _shaped(tables: Tables, columns: Mapping[str, ArrowColumn]) -> dict[str, ArrowColumn]:
    """Return those columns of lists that have one length, as far as a few rows tell, as tensors; a row with another
    length is a bad sample then.
    """
    kept = {name: one for name, one in columns.items() if one.field.kind == "ragged" and FREE not in one.leaf.shape}
    blocks = tables.blocks(_MEASURED_BLOCKS)
    if not kept or not blocks:
        return {}
    found = _lengths(tables, kept, _first_rows(blocks, _MEASURED_ROWS))
    types = {name: kept[name].field for name, lengths in found.items() if len(lengths) == 1 and min(lengths)}
    fields = {name: Field("tensor", one.dtype, (min(found[name]), *one.shape)) for name, one in types.items()}
    start, count = blocks[-1]  # its last row is often the one that is shorter
    near = {name: kept[name] for name, field in fields.items() if count * field.item_bytes <= _MEASURED_BYTES}
    last = _lengths(tables, near, np.array([start + count - 1]))
    return {
        name: replace(kept[name], field=field, sizes=field.shape)
        for name, field in fields.items()
        if last.get(name, set()) <= found[name]
    }


def _lengths(tables: Tables, columns: Mapping[str, ArrowColumn], rows: NDArray[np.int64]) -> dict[str, set[int]]:
    """Return the lengths that the lists of these rows have; rows with a null that is not filled do not count."""
    read = tables.sample(columns, rows)
    return {name: {len(one) // columns[name].field.item_bytes for one in column} for name, column in read.items()}


def _first_rows(blocks: Sequence[tuple[int, int]], most: int) -> NDArray[np.int64]:
    return np.concatenate([start + np.arange(min(count, most)) for start, count in blocks])


def _sniffed(tables: Tables, columns: Mapping[str, ArrowColumn]) -> dict[str, ArrowColumn]:
    """Return the columns of bytes whose values have one encoding, as far as a few of them tell."""
    kept = {name: column for name, column in columns.items() if column.field.kind == "bytes"}
    blocks = tables.blocks(_SNIFFED_BLOCKS)
    values = tables.sample(kept, _first_rows(blocks, _SNIFFED_ROWS)) if blocks else {}
    encodings = {name: {sniff(value) for value in column} for name, column in values.items()}
    return {
        name: replace(kept[name], field=Field("bytes", encoding=min(found)))
        for name, found in encodings.items()
        if len(found) == 1
    }


_MAGIC, _AFTER_MAGIC = b"ARROW1", 8
_FEATHER_1 = b"FEA1"
_CONTINUES = b"\xff\xff\xff\xff"
_METADATA_BYTES = 64 << 20  # more than any schema has: a length that lies must not fill the memory
_HEADERS_BYTES = 64 << 10  # read at a time while headers are looked for: bodies lie between them
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


def scan_arrow(store: Store, info: ObjectInfo) -> tuple[Table, pa.Schema]:
    """Return the record batches of a file or stream, and its schema; bodies are skipped.

    Raises `SourceError` for what is not an Arrow file or stream, and for one that ends too early.
    """
    where = f"{store.url}/{info.path}"
    with reading(store, info, "Arrow"):
        file = ranged_io.open_file(store, info, _HEADERS_BYTES)
        head = file.read(len(_MAGIC))
        if head.startswith(_FEATHER_1):
            raise SourceError(f"{where} is a Feather file of version 1", "write it with pyarrow.feather, version 2")
        found: list[tuple[int, int, int, int]] = []
        for kind, start, stop, rows in _messages(file, _AFTER_MAGIC if head == _MAGIC else 0, info.size, where):
            if kind not in (_SCHEMA, _DICTIONARY, _BATCH) or (kind == _SCHEMA) != (not found):
                raise SourceError(f"{where} holds a message of type {kind} at byte {start}, which no table has", AGAIN)
            found.append((kind, start, stop, rows))
        if not found:
            raise SourceError(f"{where} has no schema", AGAIN)
        messages = np.array(found, np.int64)
        table = Table(info, messages[messages[:, 0] == _BATCH, 3], messages[:, :3])
        return table, _schema(store, table)


def _schema(store: Store, table: Table) -> pa.Schema:
    start, stop = table.messages[0, 1:].tolist()
    return ipc.read_schema(pa.py_buffer(ranged_io.read_range(store, ranged_io.Range(table.info.path, start, stop))))


def _messages(file: BinaryIO, start: int, size: int, where: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield type, start, stop and number of rows of each message, up to the mark of the end."""
    while True:
        file.seek(start)
        prefix = file.read(8)
        continues = prefix[:4] == _CONTINUES  # before version 0.15 of the library there was only the length
        skipped, length = (8, prefix[4:8]) if continues else (4, prefix[:4])
        number = int.from_bytes(length, "little", signed=True)
        if len(length) == 4 and number == 0:
            return
        if len(length) < 4 or start + skipped + number > size:
            remedy = f"{AGAIN}; its writer must be closed"
            raise SourceError(f"{where} is truncated: it ends at byte {size}, in the middle of a table", remedy)
        if not 0 < number <= _METADATA_BYTES:
            raise SourceError(f"{where} is not an Arrow file, or is damaged, at byte {start}", AGAIN)
        file.seek(start + skipped)
        try:
            kind, body, rows = _parse(file.read(number))
        except (struct.error, ValueError):
            raise SourceError(f"{where} is not an Arrow file, or is damaged, at byte {start}", AGAIN) from None
        stop = start + skipped + number + body
        if stop > size:
            raise SourceError(f"{where} is truncated: it has {size} bytes, one message extends to {stop}", AGAIN)
        yield kind, start, stop, rows
        start = stop


def _parse(data: bytes) -> tuple[int, int, int]:
    """Return type, length of the body and number of rows that a message's metadata tell; raises ValueError."""
    message = _number(data, 0, "<I")
    kind, body, rows = _value(data, message, 1, "<B"), _value(data, message, 3, "<q"), 0
    header = _slot(data, message, 2)
    if kind == _BATCH and header:
        rows = _value(data, header + _number(data, header, "<I"), 0, "<q")
    if min(body, rows) < 0:
        raise ValueError("a negative length")
    return kind, body, rows


def _value(data: bytes, table: int, slot: int, form: str) -> int:
    place = _slot(data, table, slot)
    return _number(data, place, form) if place else 0


def _slot(data: bytes, table: int, number: int) -> int:
    """Return where the value of a flatbuffer table's slot is, or 0 where it has its default."""
    layout = table - _number(data, table, "<i")
    at = 4 + 2 * number
    offset = _number(data, layout + at, "<H") if at < _number(data, layout, "<H") else 0
    return table + offset if offset else 0


def _number(data: bytes, at: int, form: str) -> int:
    if at < 0:  # struct would count it from the end
        raise ValueError(f"byte {at}")
    found: int = struct.unpack_from(form, data, at)[0]
    return found


def read_arrow_rows(store: Store, cut: Cut, columns: Sequence[ArrowColumn]) -> Batches:
    """Yield the record batches with these rows, one in memory at a time: of a file these columns only."""
    table, rows = cut
    blocks = split_rows(table.counts, rows)
    numbers = [number for number, _, _ in blocks]
    names, there = {column.leaf.path[0] for column in columns}, _schema(store, table).names
    wanted = [number for number, name in enumerate(there) if name in names]
    options = ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    if table.messages[0, 1]:  # a file: its magic comes first
        few = 2 * len(wanted) < len(there)  # then what is between them is skipped
        buffer = ranged_io.GAP_BYTES if few else ranged_io.BUFFER_BYTES
        file = ipc.open_file(ranged_io.open_file(store, table.info, buffer), options=options)
        if file.num_record_batches != len(table.counts):
            raise damaged(store, table.info, "has other record batches than its footer says")
        batches: Iterator[pa.RecordBatch] = (file.get_batch(number) for number in numbers)
    else:
        needed = table.messages[:, 0] != _BATCH
        chosen = np.flatnonzero(~needed)[numbers]
        needed[chosen] = True
        needed[chosen[-1] + 1 :] = False  # dictionaries hold for what follows them
        batches = iter(ipc.open_stream(_Spans(store, table.info, table.messages[needed, 1:]), options=options))
    for (number, start, _), batch in zip(blocks, batches, strict=False):  # the caller notices what is missing
        if batch.num_rows != table.counts[number]:
            raise damaged(store, table.info, "has other record batches than its headers say")
        yield start, batch


IPC = TableFormat("Arrow", ("arrow", "feather", "ipc"), scan_arrow, read_arrow_rows)


class _Spans(io.RawIOBase):
    """Spans (start, stop) of one object, one after another, as a file that is read once, from its start."""

    def __init__(self, store: Store, info: ObjectInfo, spans: NDArray[np.int64]) -> None:
        step, last = ranged_io.REQUEST_BYTES, spans[:, 1]
        starts = np.array([at for start, stop in spans.tolist() for at in range(start, stop, step)], np.int64)
        stops = np.minimum(starts + step, last[np.searchsorted(last, starts, side="right")])
        self._pieces = ranged_io.read_each([(ranged_io.Content(store, info), starts, stops)])
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> memoryview:
        """Return the next `size` bytes, fewer at the end: nothing is copied where they came in one piece."""
        parts: list[memoryview] = []
        while size > 0:
            self._left = self._left or next(self._pieces, self._left)
            if not self._left:
                break
            parts.append(self._left[:size])
            self._left = self._left[size:]
            size -= len(parts[-1])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}  # folders of tables of which not every file counts

# Of a row group that is fetched whole; of a larger one each column is read in pieces, which are as much together. A
# request over a network takes long whatever it asks for, so there it is worth the memory.
_NEAR_BYTES, _FAR_BYTES = 2 << 20, 64 << 20
_SMALLEST_PIECE, _LARGEST_PIECE = 256 << 10, 4 << 20
_BATCH_BYTES, _BATCH_ROWS = 1 << 20, 1 << 16  # larger ones leave larger holes between what is kept of them
# Of the first batch: only decoding says how large rows are, since a dictionary has each value once.
_FIRST_ROWS = 128


def open_parquet(listing: Listing, selection: FieldSelection) -> Source:
    """Return the source. Raises what `TableFormat.open` raises, and `SourceError` for the tables of a lake, whose log
    says which files count.
    """
    for info in listing.files:
        lake = next((_LOGS[one] for one in info.path.split("/")[:-1] if one in _LOGS), "")
        if lake or info.path.endswith(".metadata.json"):
            problem = f"{listing.url} is a {lake or 'Iceberg'} table, not all of whose files count ({info.path})"
            raise SourceError(problem, "write its rows as plain Parquet, or name the files that count")
    return PARQUET.open(listing, selection)


def scan_parquet(store: Store, info: ObjectInfo) -> tuple[Table, pa.Schema]:
    """Return the row groups of a file, and its schema, from its footer. Raises `SourceError`."""
    with reading(store, info, "Parquet"):
        file = pq.ParquetFile(ranged_io.open_file(store, info))
        metadata, schema = file.metadata, file.schema_arrow
        counts = np.array([metadata.row_group(one).num_rows for one in range(metadata.num_row_groups)], np.int64)
    if sum(counts.tolist()) != metadata.num_rows or (counts < 0).any():
        raise damaged(store, info, "has row groups that do not sum up to its rows")
    return Table(info, counts, _NO_MESSAGES), schema


def read_parquet_rows(store: Store, cut: Cut, columns: Sequence[ArrowColumn]) -> Batches:
    """Yield batches with these rows, of these columns only. A row group is read up to the last row that is asked for.

    Of a row group of up to 64 MiB the columns are fetched whole, of a larger one in pieces; of local files less.
    """
    table, rows = cut
    metadata = pq.read_metadata(ranged_io.open_file(store, table.info))
    groups = [metadata.row_group(one) for one in range(metadata.num_row_groups)]
    if [group.num_rows for group in groups] != table.counts.tolist():
        raise damaged(store, table.info, "has other row groups than before")
    names = [".".join(column.leaf.path) for column in columns]
    blocks = split_rows(table.counts, rows)
    whole = _NEAR_BYTES if store.reader().kind == "file" else _FAR_BYTES
    plans = [_plan(groups[number], len(names), int(within[-1]) + 1, whole) for number, _, within in blocks]
    piece = min((piece for piece, _ in plans if piece), default=0)
    few = 2 * len(names) < metadata.num_columns  # then what is between them is skipped
    source = ranged_io.open_file(store, table.info, piece or (ranged_io.GAP_BYTES if few else ranged_io.BUFFER_BYTES))
    options = {"buffer_size": piece, "pre_buffer": False, "page_checksum_verification": True}
    file = pq.ParquetFile(source, metadata=metadata, **options)
    size, near = _FIRST_ROWS, whole == _NEAR_BYTES
    for (number, start, within), (_, most) in zip(blocks, plans, strict=True):
        at, stop = 0, int(within[-1]) + 1
        while at < stop:  # more than once where the size of batches changes: the group is then decoded from its start
            count, before = min(size, most), at
            batches = file.iter_batches(count, row_groups=[number], columns=names, use_threads=False)
            for first, batch in _from_row(batches, at):
                yield start + first, batch
                at = first + batch.num_rows
                size = min(_next_size(count, batch), most)
                if at >= stop or size < count or (near and size > count):  # from afar the next group is soon enough
                    break
            if at == before:
                break  # the group is shorter than it says, which the caller notices


def _from_row(batches: Iterator[pa.RecordBatch], row: int) -> Batches:
    """Yield what the batches of a row group hold from a row on, with the number of the first row of each."""
    first = 0
    for batch in batches:
        stop = first + batch.num_rows
        if stop > row:
            skipped = max(0, row - first)
            yield first + skipped, batch.slice(skipped)
        first = stop


def _next_size(size: int, batch: pa.RecordBatch) -> int:
    """Return how many rows to decode at a time after a batch: other than so far where that is far from 1 MiB."""
    fitting = max(1, _BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1))
    far = fitting < size // 4 or (size == _FIRST_ROWS and fitting > size)
    return min(fitting, _BATCH_ROWS) if far else size


def _plan(group: pq.RowGroupMetaData, columns: int, stop: int, whole: int) -> tuple[int, int]:
    """Return the bytes to read of a column at a time, 0 for all of it, and the rows to decode at a time.

    The rows up to `stop` are asked for, and about `whole` bytes read at a time. Only sizes of the group are looked at:
    what is wrong in the metadata of a column ends the process where pyarrow is asked for it, while reading it raises.
    """
    few = stop < group.num_rows // 4  # the rest would be read for nothing
    piece = min(_LARGEST_PIECE, max(_SMALLEST_PIECE, whole // max(columns, 4)))
    batch = _BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
    return piece if few or group.total_byte_size > whole else 0, min(_BATCH_ROWS, max(batch, 1))


PARQUET = TableFormat("Parquet", ("parquet",), scan_parquet, read_parquet_rows)

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_SAVE_AGAIN = "save the dataset again with save_to_disk"


def matches_hugging_face(listing: Listing) -> bool:
    """Return whether the folder is a saved dataset, or several saved as splits."""
    paths = {info.path for info in listing.files}
    return listing.folder and ({_STATE, _INFO} <= paths or _SPLITS in paths)


def open_hugging_face(listing: Listing, selection: FieldSelection) -> Source:
    """Return the source, with the headers of every record batch read; rows are in the order of the dataset.

    Raises `SourceError` for a folder of splits, naming them, for files that are missing or damaged, and for a dataset
    that is a selection of what is stored; `FieldError` for columns that no field holds.
    """
    files = {info.path: info for info in listing.files}
    if _STATE not in files:
        splits = sorted(path.split("/")[0] for path in files if path.endswith(f"/{_STATE}") and path.count("/") == 1)
        if not splits:
            raise SourceError(f"{listing.url} holds no {_STATE}", "give a folder that save_to_disk has written")
        raise SourceError(f"{listing.url} holds the splits {', '.join(splits)}", f"choose {listing.url}/{splits[0]}")
    _, state = ranged_io.read_document(listing.store, files[_STATE])
    if any(state.get(key) for key in ("_indices_data_files", "_indices_files")):
        raise SourceError(f"{listing.url} is a selection of its rows", "save dataset.flatten_indices() instead")
    listed = state.get("_data_files")
    names = [str(one.get("filename")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if not names:
        raise SourceError(f"{listing.store.url}/{_STATE} names no files", _SAVE_AGAIN)
    missing = next((name for name in names if name not in files), None)
    if missing is not None:
        raise SourceError(f"{listing.url} lacks the file {missing!r}, which its {_STATE} names", _SAVE_AGAIN)
    described = [files[name] for name in (_STATE, _INFO) if name in files]
    info = ranged_io.read_document(listing.store, files[_INFO])[1] if _INFO in files else {}
    source = open_tables(listing, [files[name] for name in names], IPC, selection, info.get("features"))
    identity = tuple(sorted([*source.files, *described], key=lambda info: info.path))
    notes = {key: value for key, value in source.notes.items() if key != "passed_over"}
    return replace(source, files=identity, notes=notes)


FORMATS = (
    SourceFormat("parquet", lambda listing: bool(PARQUET.files(listing)), open_parquet, nullable=True),
    SourceFormat("arrow", lambda listing: bool(IPC.files(listing)), IPC.open, nullable=True),
    SourceFormat("huggingface", matches_hugging_face, open_hugging_face, marked=True, nullable=True),
)
