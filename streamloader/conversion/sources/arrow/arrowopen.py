"""Opening files of tables: one schema for all of them, the fields that are wished, encodings from a few values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.arrow.arrowfields import (
    ArrowColumn,
    Leaf,
    class_names,
    column_of,
    leaves,
    read_json,
    same_column,
)
from streamloader.conversion.sources.arrow.arrowtables import ReadRows, Table, Tables, damaged, path_keys, reading
from streamloader.conversion.sources.base import READ_THREADS
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.conversion.sources.infer import sniff
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import FieldError, SourceError
from streamloader.format.manifest import INTS, Field
from streamloader.format.threads import run_all
from streamloader.storage.protocol import ObjectInfo, Store

if TYPE_CHECKING:
    import pyarrow as pa

_SNIFFED_BLOCKS, _SNIFFED_ROWS = 4, 16
# of lists, whose lengths may differ rarely; and what is decoded at most to see the last one
_MEASURED_BLOCKS, _MEASURED_ROWS, _MEASURED_BYTES = 8, 32, 64 << 20
_MAX_ROWS = 1 << 40  # of one file; headers may lie, and sums must not overflow
_NAMED = 8  # fields that a message lists

Scan = Callable[[Store, ObjectInfo], "tuple[Table, pa.Schema]"]


@dataclass(frozen=True)
class TableFormat:
    """A format of tables: its name for messages, how a file is scanned and how its rows are read."""

    what: str
    scan: Scan
    read_rows: ReadRows


def visible_files(listing: Listing, extensions: frozenset[str]) -> tuple[ObjectInfo, ...]:
    """Return the files with these extensions, without hidden ones; as in Spark a name with `_` in front is hidden too.

    What a user names, by a path or a pattern, need only have the extension.
    """
    return tuple(info for info in listing.of(*extensions) if not listing.folder or not _for_others(info.path))


def _for_others(path: str) -> bool:
    return any(part.startswith("_") and "=" not in part for part in path.split("/"))


def open_tables(
    listing: Listing, infos: Sequence[ObjectInfo], form: TableFormat, wish: Wish, features: Any = None
) -> Tables:
    """Return the source whose tables are the files `infos`, in that order; their headers are read, all at once.

    `features` is what Hugging Face tells about the columns, where it is not in the schema. Raises `SourceError` for
    files of different columns, `FieldError` for columns that no field holds.
    """
    store = listing.store
    first, schema = form.scan(store, infos[0])
    scanned = [(first, schema), *run_all(partial(_scan_like, form.scan, store, schema), infos[1:], READ_THREADS)]
    for table, _ in scanned:
        if sum(table.counts.tolist()) > _MAX_ROWS:
            raise damaged(store, table.info, "claims more rows than any file has")
    filled = [(table, own) for table, own in scanned if table.counts.sum()] or scanned[:1]  # no rows, no types
    (first, schema), others = filled[0], filled[1:]
    described = Described.of(store, first.info, form.what, schema)
    columns, keys = _choose(described.leaves, path_keys(first.info.path), wish, listing.url)
    for table, own in others:
        if own is not schema:
            here = Described.of(store, table.info, form.what, own)
            _check_columns(here, described, columns, only=bool(wish.fields))
        missing = next((key for key in keys.values() if key not in path_keys(table.info.path)), None)
        if missing is not None:
            problem = f"{store.url}/{table.info.path} is in no folder {missing}=..., but {first.info.path} is"
            raise SourceError(problem, "put every file into one, or leave the key out with --fields")
    columns = _filled(columns, keys, wish, listing.url)
    notes = _notes(columns, keys, features or _features(schema), len(listing.files) - len(infos))
    identity = tuple(sorted(infos, key=lambda info: info.path))
    tables = [table for table, _ in scanned]
    source = Tables(listing.url, store, identity, tables, columns, keys, form.what, form.read_rows, notes)
    return _shaped(_sniffed(source, wish), wish)


def _scan_like(scan: Scan, store: Store, schema: pa.Schema, info: ObjectInfo) -> tuple[Table, pa.Schema]:
    """Return the table and its schema: `schema` itself where they are equal, since there may be thousands of them."""
    table, own = scan(store, info)
    same = own.remove_metadata().equals(schema.remove_metadata(), check_metadata=True)  # that of columns remains
    return table, schema if same else own


@dataclass(frozen=True)
class Described:
    """What one file says of its columns."""

    where: str
    leaves: Sequence[Leaf]

    @classmethod
    def of(cls, store: Store, info: ObjectInfo, what: str, schema: pa.Schema) -> Described:
        """Return the leaves of a file's schema. Raises `SourceError` where names are no text."""
        with reading(store, info, what):
            return cls(f"{store.url}/{info.path}", leaves(schema))

    def by_path(self) -> dict[tuple[str, ...], Leaf]:
        """Return each leaf by its path."""
        return {leaf.path: leaf for leaf in self.leaves}


def _choose(
    found: Sequence[Leaf], path: Mapping[str, str], wish: Wish, url: str
) -> tuple[dict[str, ArrowColumn], dict[str, str]]:
    """Return the column, or the key of the path, of each field that is kept."""
    known = {leaf.name for leaf in found}
    pairs = [(leaf.name, leaf) for leaf in found] + [(key, None) for key in path if key not in known]
    named = [(field_names([original], url)[original], original, leaf) for original, leaf in pairs]
    names = [name for name, _, _ in named]
    missing = next((name for name in wish.fields if name not in names), None)
    if missing is not None:
        raise FieldError(f"{url} has no field {missing!r}", f"it has {', '.join(names)}")
    if not found:
        raise SourceError(f"{url} has no column", "give tables with columns")
    kept = [(name, original, leaf) for name, original, leaf in named if wish.wanted(name)]
    field_names([original for _, original, _ in kept], url)  # no two of one name
    columns: dict[str, ArrowColumn] = {}
    refused: list[str] = []
    times: list[str] = []
    for name, _, leaf in kept:
        if leaf is None:
            continue
        try:
            columns[name] = column_of(leaf, wish.fields.get(name), wish.mapped)
        except FieldError as error:
            refused.append(error.problem)
            times += [f"{name}=int64"] if error.remedy else []
    keys = {name: original for name, original, leaf in kept if leaf is None}
    if refused:
        _refuse_columns(refused, [*columns, *keys], times, url, wish.mapped)
    return columns, keys


def _refuse_columns(refused: list[str], others: list[str], times: list[str], url: str, mapped: bool) -> None:
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    named = f"{','.join(others[:_NAMED])}{',...' if len(others) > _NAMED else ''}" or "a,b"
    problem = f"no field of the format holds {', '.join(refused[:3])}{more} of {url}"
    if mapped:
        raise FieldError(problem, "a map function gets every column: write the table without it, or with another type")
    if times:
        kept = ",".join([*others[:_NAMED], *times[:_NAMED]])
        raise FieldError(problem, f"store times as whole numbers in their unit, --fields {kept}, or leave them out")
    lists = ", lists of lists of one shape be tensors with --fields x=float32[2,3]" if "list" in problem else ""
    raise FieldError(problem, f"leave it out by naming the fields to keep, --fields {named}{lists}")


def _check_columns(here: Described, first: Described, columns: Mapping[str, ArrowColumn], only: bool) -> None:
    """Raise `SourceError` unless a file has the columns of the first; with `only` it may have others beside them."""
    remedy = "give all files one schema, or name the fields that they share with --fields"
    own, others = here.by_path(), first.by_path()
    for column in columns.values():
        expected = others[column.path]
        leaf = own.get(column.path)
        if leaf is None:
            problem = f"{here.where} lacks the column {column.name!r}, which is {expected.kind} in {first.where}"
            raise SourceError(problem, remedy)
        if not same_column(leaf, column):
            problem = f"the column {column.name!r} is {leaf.kind} in {here.where}, but {expected.kind} in {first.where}"
            raise SourceError(problem, remedy)
    more = next((leaf for path, leaf in own.items() if path not in others), None)
    if more is not None and not only:
        problem = f"{here.where} has a column {more.name!r} ({more.kind}), which {first.where} lacks"
        raise SourceError(problem, remedy)


def _features(schema: pa.Schema) -> Any:
    """Return what Hugging Face wrote about its columns into a schema, if anything."""
    told = read_json((schema.metadata or {}).get(b"huggingface", b""))
    info = told.get("info") if isinstance(told, dict) else None
    return info.get("features") if isinstance(info, dict) else None


def _notes(
    columns: Mapping[str, ArrowColumn], keys: Mapping[str, str], features: Any, passed_over: int
) -> dict[str, Any]:
    originals = {name: column.name for name, column in columns.items()} | dict(keys)
    renamed = {name: original for name, original in originals.items() if name != original}
    classes = {name: class_names(features, column.path) for name, column in columns.items()}
    classes = {name: names for name, names in classes.items() if names}
    units = {name: column.unit for name, column in columns.items() if column.unit}
    notes: dict[str, Any] = {"columns": renamed, "classes": classes, "keys": list(keys), "passed_over": passed_over}
    notes["units"] = units
    return {what: told for what, told in notes.items() if told}


def _filled(
    columns: Mapping[str, ArrowColumn], keys: Mapping[str, str], wish: Wish, url: str
) -> dict[str, ArrowColumn]:
    """Return the columns with their fill values. Raises `FieldError` for a value that its column does not hold.

    Of a column of integers that is wished as floats, it may be a float.
    """
    fields = {name: column.field for name, column in columns.items()} | dict.fromkeys(keys, Field("text"))
    widened: set[str] = set()
    for name in wish.fill.keys() & columns.keys():
        wanted = wish.fields.get(name)
        floats = wanted is not None and wanted.dtype.startswith("float")
        if floats and not columns[name].sizes and fields[name].dtype in INTS and not columns[name].unit:
            widened.add(name)
            fields[name] = replace(fields[name], dtype="float64")
    values = wish.fill_values(fields, url)
    return {
        name: replace(column, field=fields[name], fill=values.get(name), widened=name in widened)
        for name, column in columns.items()
    }


def _shaped(source: Tables, wish: Wish) -> Tables:
    """Return the source with tensors for lists that have one length, as far as a few of them tell; a row with another
    length is a bad sample then.
    """
    kept = {name: column for name, column in source.columns.items() if column.field.kind == "ragged"}
    kept = {name: column for name, column in kept.items() if wish.fields.get(name) is None and not column.open}
    blocks = _blocks(source, _MEASURED_BLOCKS)
    if not kept or not blocks:
        return source
    rows = np.concatenate([start + np.arange(min(count, _MEASURED_ROWS)) for start, count in blocks])
    found = _lengths(source, kept, rows)
    shapes = {
        name: (min(some), *kept[name].field.shape) for name, some in found.items() if len(some) == 1 and min(some)
    }
    start, count = blocks[-1]  # its last row is often the one that is shorter
    items = {name: prod(shape) * np.dtype(kept[name].field.dtype).itemsize for name, shape in shapes.items()}
    near = {name: kept[name] for name, size in items.items() if count * size <= _MEASURED_BYTES}
    last = _lengths(source, near, np.array([start + count - 1]))
    columns = dict(source.columns)
    for name, shape in shapes.items():
        if last.get(name, set()) <= {shape[0]}:
            columns[name] = replace(kept[name], field=Field("tensor", kept[name].field.dtype, shape), sizes=shape)
    return replace(source, columns=columns)


def _lengths(source: Tables, columns: Mapping[str, ArrowColumn], rows: NDArray[np.int64]) -> dict[str, set[int]]:
    """Return the lengths that the lists of these rows have; rows with a null that is not filled do not count."""
    if not columns:
        return {}
    read = replace(source, columns=columns, keys={}).part(rows).read(lambda _: None)
    return {name: {len(one) // column.field.item_bytes for one in read[name]} for name, column in columns.items()}


def _blocks(source: Tables, most: int) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of some blocks of the source, spread evenly."""
    counts = np.concatenate([table.counts for table in source.tables])
    starts = (np.cumsum(counts) - counts)[counts > 0]
    counts = counts[counts > 0]
    if not len(counts):
        return []
    chosen = np.unique(np.linspace(0, len(counts) - 1, most).astype(np.int64)).tolist()
    return [(int(starts[one]), int(counts[one])) for one in chosen]


def _sniffed(source: Tables, wish: Wish) -> Tables:
    """Return the source with the encoding that a few values of each column of bytes have, but where the user tells."""
    kept = {name: column for name, column in source.columns.items() if column.field.kind == "bytes"}
    kept = {name: column for name, column in kept.items() if wish.fields.get(name) is None}
    blocks = _blocks(source, _SNIFFED_BLOCKS)
    if not kept or not blocks:
        return source
    rows = np.concatenate([start + np.arange(min(count, _SNIFFED_ROWS)) for start, count in blocks])
    values = replace(source, columns=kept, keys={}).part(rows).read(lambda _: None)
    columns = dict(source.columns)
    for name, column in kept.items():
        encodings = {sniff(value) for value in values[name]}
        encoding = encodings.pop() if len(encodings) == 1 else ""
        columns[name] = replace(column, field=Field("bytes", encoding=encoding))
    return replace(source, columns=columns)
