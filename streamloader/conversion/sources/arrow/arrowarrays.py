"""From Arrow arrays to columns: whole blocks at a time, and which of their rows cannot be converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.arrow.arrowfields import FREE, ArrowColumn, is_text, unit_of
from streamloader.conversion.sources.needs import need
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import exact_in_float

if TYPE_CHECKING:
    import pyarrow as pa

FILL = "give nulls a value with --fill NAME=VALUE, or leave the column out by naming the fields to keep with --fields"

Mark = Callable[[NDArray[np.bool_], str, str], None]  # rows, problem and remedy


@dataclass(frozen=True)
class Trouble:
    """Why a row cannot be converted, and what to do."""

    problem: str
    remedy: str


def values_at(batch: pa.RecordBatch, column: ArrowColumn, first: int, count: int) -> pa.Array:
    """Return `count` values of a column from row `first` on: of a plain type, text as bytes.

    They are checked so far that nothing of them points outside of their buffers. Raises an `ArrowException`.
    """
    pc = need("pyarrow.compute", "arrow")
    array = batch.column(column.path[0])
    array.validate()
    array = array.slice(first, count)
    for member in column.path[1:]:
        array = pc.struct_field(array, [member])
    return _filled(_plain(array), column, 0)


def _filled(array: pa.Array, column: ArrowColumn, level: int) -> pa.Array:
    """Return an array, which lies within so many lists, with the column's fill value for nulls: as a list where lists
    have one length, else as an empty one.
    """
    if column.fill is None or column.widened or not array.null_count:
        return array
    pa = need("pyarrow", "arrow")
    value = column.fill.encode() if isinstance(column.fill, str) else column.fill
    value = value.item() if isinstance(value, np.generic) else value
    for size in reversed(column.sizes[level:]):
        value = [] if size == FREE else [value] * size
    return array.fill_null(pa.scalar(value, array.type))


def _plain(array: pa.Array) -> pa.Array:
    """Return the values without extension, dictionary and view, strings as the bytes that they may not be UTF-8 of."""
    pa = need("pyarrow", "arrow")
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(array.storage)
    if pa.types.is_dictionary(kind):
        values = _plain(array.dictionary)
        return pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    if is_text(kind):
        views = pa.types.is_string_view(kind)
        array = array.view(
            pa.binary_view() if views else pa.binary() if pa.types.is_string(kind) else pa.large_binary()
        )
    array.validate(full=True)
    if unit_of(kind):
        return array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    return array.cast(pa.large_binary()) if pa.types.is_binary_view(array.type) else array


def troubles(array: pa.Array, column: ArrowColumn) -> dict[int, Trouble]:
    """Return what is wrong with each row that cannot be converted, by its position."""
    found: dict[int, Trouble] = {}

    def mark(mask: NDArray[np.bool_], problem: str, remedy: str) -> None:
        for position in np.flatnonzero(mask).tolist():
            found.setdefault(position, Trouble(f"the column {column.name!r} {problem}", remedy))

    if column.media:
        remedy = "embed the files when the dataset is saved, as save_to_disk does"
        mark(_nulls(array), "has no bytes: the file itself is not in the dataset, at most its path", remedy)
    elif column.widened:
        rounded = ~exact_in_float(_numbers(array.fill_null(0)), np.dtype(column.field.dtype))
        mark(rounded, f"is a whole number that {column.field.dtype} does not hold exactly", "choose another type")
    else:
        mark(_nulls(array), "is null", FILL)
    if column.field.kind == "text":
        _mark_no_text(array, mark)
    elif column.field.kind != "bytes":
        _mark_lists(array, column, mark)
    return found


def _nulls(array: pa.Array) -> NDArray[np.bool_]:
    if not array.null_count:
        return np.zeros(0, np.bool_)
    return _numbers(array.is_null())


def _mark_no_text(array: pa.Array, mark: Mark) -> None:
    pa = need("pyarrow", "arrow")
    try:
        array.cast(pa.large_string() if pa.types.is_large_binary(array.type) else pa.string())
    except pa.ArrowInvalid:
        remedy = "repair it, or read the column as bytes with --fields"
        mark(np.array([not _is_utf8(value) for value in array.to_pylist()]), "is no UTF-8 text", remedy)


def _is_utf8(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _mark_lists(array: pa.Array, column: ArrowColumn, mark: Mark) -> None:
    """Mark the rows whose lists hold a null, or have another length than they should; from the outer lists inwards."""
    ends: list[NDArray[np.int64]] = []
    count = len(array)

    def mark_rows(mask: NDArray[np.bool_], problem: str, remedy: str) -> None:
        places = np.flatnonzero(mask)
        for level in reversed(ends):
            places = np.searchsorted(level, places, side="right")
        mark(np.bincount(places, minlength=count) > 0, problem, remedy)

    for level, size in enumerate(column.sizes, 1):
        lengths = _lengths(array)
        if size != FREE and (lengths != size).any():
            mark_rows(
                lengths != size, f"is no list of the shape {list(column.field.shape)}", _other_shape(column.field)
            )
        ends.append(np.cumsum(lengths))
        # what a null stands before is left out, and its length is 0
        array = _filled(_plain(array.flatten()), column, level)
        if array.null_count:
            mark_rows(_nulls(array), "holds a null", FILL)


def _other_shape(field: Field) -> str:
    ragged = Field("ragged", field.dtype, field.shape[1:])
    differ = f", or say that they differ in length, {ragged}, with --fields" if field.fixed else ""
    return f"give all rows that shape{differ}"


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    pc = need("pyarrow.compute", "arrow")
    lengths = _numbers(pc.list_value_length(lists).fill_null(0))
    return lengths.astype(np.int64, copy=False)


def to_rows(array: pa.Array, column: ArrowColumn, picked: NDArray[np.int64]) -> Column:
    """Return the values at the positions that are `picked`, which must be without trouble, as a column of the field."""
    if column.field.kind in ("bytes", "text"):
        array = array if len(picked) == len(array) else array.take(picked)
        return _items(array)
    pa = need("pyarrow", "arrow")
    count, edges = len(array), np.arange(len(array) + 1)
    if column.widened:
        floats = _numbers(array.fill_null(0)).astype(column.field.dtype)
        floats[_nulls(array)] = column.fill
        return floats[picked]
    # Arrow's own take() gives wrong numbers for a slice of fixed-size lists in such lists
    for level in range(1, len(column.sizes) + 1):
        edges = np.concatenate(([0], np.cumsum(_lengths(array))))[edges]
        array = _filled(_plain(array.flatten()), column, level)
    if array.null_count:  # in rows that are not picked
        array = array.fill_null(pa.array(np.zeros(1, column.field.dtype))[0])
    numbers = _numbers(array)
    numbers = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    starts, stops = edges[picked], edges[picked + 1]
    if column.field.kind == "ragged":
        data, size = numbers.view(np.uint8).data, numbers.itemsize
        pairs = zip((starts * size).tolist(), (stops * size).tolist(), strict=True)
        return [bytes(data[start:stop]) for start, stop in pairs]
    each = prod(column.field.shape)
    if len(numbers) == each * count and (starts == each * picked).all():
        rows = numbers.reshape(count, *column.field.shape)
        return rows if len(picked) == count else rows[picked]
    apart: NDArray[Any] = numbers[starts[:, None] + np.arange(each)]
    return apart.reshape(-1, *column.field.shape)


def _numbers(array: pa.Array) -> NDArray[Any]:
    """Return the values of an array without nulls; of whole and floating numbers a view.

    For what it can do without it does not ask pyarrow, which imports pandas where that is installed: 0.4 s and 50 MB.
    """
    types = need("pyarrow.types", "arrow")
    first, last = array.offset, array.offset + len(array)
    if types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(array.buffers()[1] or b"", np.uint8), bitorder="little")
        return bits[first:last].view(np.bool_)
    if types.is_integer(array.type) or types.is_floating(array.type):
        return np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype())[first:last]
    numbers: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def _items(array: pa.Array) -> list[bytes]:
    """Return the items of an array of bytes without nulls; see `_numbers`."""
    types = need("pyarrow.types", "arrow")
    large = types.is_large_binary(array.type)
    if not large and not types.is_binary(array.type):
        values: list[bytes] = array.to_pylist()
        return values
    _, edges, data = array.buffers()
    numbers = np.frombuffer(edges or b"", np.int64 if large else np.int32)[array.offset : array.offset + len(array) + 1]
    view = memoryview(data or b"")
    return [bytes(view[start:stop]) for start, stop in pairwise(numbers.tolist())]
