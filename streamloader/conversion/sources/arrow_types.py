"""Arrow's columns as fields: the type of a column's field, and its values, many rows at a time.

Each member of a struct becomes a separate field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import MAX_DECODED, RowNumbers, check_decoded
from streamloader.errors import FieldError
from streamloader.format.codecs import Column
from streamloader.format.manifest import INTS, Field
from streamloader.format.values import exact_in_float
from streamloader.storage.optional import pa, pc

FREE = -1  # the length of a list level that differs from row to row
_JSON = "arrow.json"  # stored as text
_TENSOR = "arrow.fixed_shape_tensor"
_ARRAYS = (  # extension types of Hugging Face and Ray, which describe their shape in JSON
    *(f"datasets.features.features.Array{axes}DExtensionType" for axes in range(2, 6)),
    "ray.data.arrow_tensor",
    "ray.data.arrow_tensor_v2",
)
_SHOWN = 80  # characters of a type in a message: a struct's may be pages


@dataclass(frozen=True)
class Leaf:
    """A column, or a member of a struct: `path` are the names from the column down.

    `extension` is the name of its extension type, `shape` the shape that this type gives (`FREE` for an axis of any
    length). `media` marks the member `bytes` of Hugging Face's images and audio, which represents the struct.
    """

    path: tuple[str, ...]
    type: pa.DataType
    extension: str = ""
    shape: tuple[int, ...] = ()
    media: bool = False

    @property
    def name(self) -> str:
        """The name for messages and fields."""
        return ".".join(self.path[:-1] if self.media else self.path)

    @property
    def kind(self) -> str:
        """The type for messages."""
        shape = str(list(self.shape)) if self.shape else ""
        text = f"extension {self.extension}{shape}" if self.extension else str(self.type)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@dataclass(frozen=True)
class ArrowColumn:
    """The column of a field. `sizes` are the lengths of the list levels around its numbers (or `FREE`).

    `unit` is that of times stored as whole numbers. `fill` replaces nulls; if it is None, nulls are bad. The integers
    of a `widened` column become floats, so that `fill` can be a float, such as NaN. No field holds the values of an
    `unfit` column, which only a map function gets. `max_decoded` is that of the selection.
    """

    leaf: Leaf
    field: Field
    sizes: tuple[int, ...] = ()
    unit: str = ""
    fill: Any = None
    widened: bool = False
    unfit: bool = False
    max_decoded: int = MAX_DECODED


def leaves(schema: pa.Schema) -> list[Leaf]:
    """Return the columns and members that can become fields, in the order of the schema."""
    return [leaf for field in schema for leaf in _walk(field, ())]


def _walk(field: pa.Field, parent: tuple[str, ...]) -> Iterator[Leaf]:
    path = (*parent, field.name)
    kind, extension, shape = _extension(field)
    if not pa.types.is_struct(kind) or not kind.num_fields or extension:
        yield Leaf(path, kind, extension, shape)
        return
    members = [kind.field(number) for number in range(kind.num_fields)]
    types = {member.name: member.type for member in members}
    if types.keys() == {"bytes", "path"} and _is_bytes(types["bytes"]) and _is_text(types["path"]):
        yield Leaf((*path, "bytes"), types["bytes"], media=True)
        return
    for member in members:
        yield from _walk(member, path)


def _extension(field: pa.Field) -> tuple[pa.DataType, str, tuple[int, ...]]:
    """Return the storage type of a field, the name of its extension, and the shape that the extension gives.

    An extension that is not registered in this process is in the field's metadata only.
    """
    kind, metadata = field.type, field.metadata or {}
    name = metadata.get(b"ARROW:extension:name", b"").decode("utf-8", "replace")
    detail = metadata.get(b"ARROW:extension:metadata", b"")
    if isinstance(kind, pa.BaseExtensionType):
        name, kind = kind.extension_name, kind.storage_type
        if name == _TENSOR:
            plain = field.type.permutation in (None, list(range(len(field.type.shape))))
            return kind, name, tuple(field.type.shape) if plain else ()
        detail = field.type.__arrow_ext_serialize__() if name in _ARRAYS else b""
    if name == _JSON:
        return kind, "", ()
    return kind, name, _array_shape(detail) if name in _ARRAYS else ()


def _array_shape(detail: bytes) -> tuple[int, ...]:
    """Return the shape in Hugging Face's `[[2, 3], "float32"]` or in Ray's `[2, 3]`; empty for anything else."""
    document = read_json(detail)
    shape = document[0] if isinstance(document, list) and document and isinstance(document[0], list) else document
    if not isinstance(shape, list) or not all(size is None or type(size) is int for size in shape):
        return ()
    return tuple(FREE if size is None else size for size in shape)


def read_json(data: bytes) -> Any:
    """Return the value of an untrusted JSON document, None if it is invalid."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _is_text(kind: pa.DataType) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _is_bytes(kind: pa.DataType) -> bool:
    return re.match(r"((large_)?binary|binary_view|fixed_size_binary\[\d+\])\Z", str(kind)) is not None


def column_of(leaf: Leaf, selected: Field | None, times: bool = False) -> ArrowColumn:
    """Return the column for a leaf. The `selected` field, if any, gives the lengths of lists, whether strings are text
    or bytes, and that an unknown extension type is read as its storage type. With `times`, times become whole numbers
    in any case.

    Raises `FieldError`, with the leaf's name and type as problem, if no field of the format holds it.
    """
    problem = f"{leaf.name!r} ({leaf.kind})"
    if leaf.extension and not leaf.shape and selected is None:
        raise FieldError(problem)
    sizes, kind = _levels(leaf.type)
    if not sizes and (_is_text(kind) or _is_bytes(kind)):
        field = Field("text" if _is_text(kind) else "bytes")
        return ArrowColumn(leaf, Field(selected.kind) if selected and not selected.dtype else field)
    types, unit = pa.types, _unit_of(kind)
    if unit and not times and (selected is None or selected.dtype not in INTS):
        raise FieldError(problem, "store times as whole numbers")
    if not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or unit):
        raise FieldError(problem)
    dtype = f"int{kind.bit_width}" if unit else np.dtype(kind.to_pandas_dtype()).name
    asked: tuple[int, ...] = ()
    if selected is not None and selected.kind in ("tensor", "ragged"):
        asked = selected.shape if selected.fixed else (FREE, *selected.shape)
    shape, stated = sizes, leaf.shape
    if _fits(sizes, asked) or _fits(sizes, stated):
        sizes = shape = asked if _fits(sizes, asked) else stated
    elif stated and FREE not in stated and _fits(sizes, (prod(stated),)):  # one list of all values
        sizes, shape = (prod(stated),), stated
    if FREE in shape[1:]:
        raise FieldError(problem)
    try:
        field = Field("ragged", dtype, shape[1:]) if FREE in shape else Field("tensor", dtype, shape)
    except FieldError as error:
        raise FieldError(f"{leaf.name!r} ({leaf.kind}: {error.problem})") from None
    return ArrowColumn(leaf, field, sizes, unit)


_TIME = re.compile(r"(date|time|timestamp|duration)\d*\[(\w+)(, tz=)?")
_UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "day": "days"}
_SINCE = {"date": " since 1970-01-01", "time": " since midnight", "duration": ""}


def _unit_of(kind: pa.DataType) -> str:
    """Return the unit of the whole numbers that represent times of a type; "" for other types."""
    time = _TIME.match(str(kind))
    if time is None:
        return ""
    name, unit, zone = time.groups()
    zoned = f" since 1970-01-01 00:00{' UTC' if zone else ', without a time zone'}"
    return _UNITS[unit] + _SINCE.get(name, zoned)


def _levels(kind: pa.DataType) -> tuple[tuple[int, ...], pa.DataType]:
    """Return the length of each list level, and the type of the values within."""
    types = pa.types
    sizes: list[int] = []
    while True:
        if types.is_fixed_size_list(kind):
            sizes.append(kind.list_size)
        elif str(kind).startswith(("list<", "large_list<", "list_view<", "large_list_view<")):
            sizes.append(FREE)
        elif not types.is_dictionary(kind):
            return tuple(sizes), kind
        kind = kind.value_type


def _fits(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether lists of these lengths can have a shape."""
    return len(sizes) == len(shape) > 0 and all(a in (FREE, b) for a, b in zip(sizes, shape, strict=True))


def same_column(leaf: Leaf, column: ArrowColumn) -> bool:
    """Return whether a leaf of another file is read in the same way as the column of the first file."""
    if column.unfit:
        return bool(leaf.type == column.leaf.type)
    try:
        other = column_of(leaf, column.field)
    except FieldError:
        return False
    expected = replace(column.field, encoding="", dtype=other.field.dtype if column.widened else column.field.dtype)
    return (other.field, other.sizes, other.unit) == (expected, column.sizes, column.unit)


def class_names(features: Any, path: Sequence[str]) -> list[str]:
    """Return the class names of a column from Hugging Face's description of the features, empty if it has none."""
    for member in path:
        features = features.get(member) if isinstance(features, dict) else None
    while isinstance(features, dict) and "feature" in features:  # a list of labels
        features = features["feature"]
    if not isinstance(features, dict) or features.get("_type") != "ClassLabel":
        return []
    names = features.get("names")
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


_FILL = 'give nulls a value with fill={"NAME": VALUE} (--fill NAME=VALUE), or name the fields to keep with fields='


class BadRows(dict[int, tuple[str, str]]):
    """The first problem of each bad row, and its remedy."""

    def add(self, rows: NDArray[np.int64], column: ArrowColumn, problem: str, remedy: str) -> None:
        """Add a problem of several rows."""
        for row in rows.tolist():
            self.setdefault(row, (f"the column {column.leaf.name!r} {problem}", remedy))


# the columns of some rows without the bad ones, and the problem and the remedy of each bad row, by index
Values = tuple[dict[str, Column], dict[int, tuple[str, str]]]


def read_columns(batch: pa.RecordBatch, columns: Mapping[str, ArrowColumn], rows: RowNumbers) -> Values:
    """Return the columns of some rows of a batch, without bad rows; and the problem and remedy of bad rows, by index.

    Arrays are validated, so that no offset points outside of its buffer. Raises an `ArrowException`.
    """
    first, positions = int(rows[0]), rows - rows[0]
    count, bad_rows = int(positions[-1]) + 1, BadRows()
    arrays = {name: _checked(batch, column, (first, count), bad_rows) for name, column in columns.items()}
    bad = {index: bad_rows[position] for index, position in enumerate(positions.tolist()) if position in bad_rows}
    kept = np.delete(positions, list(bad))
    return {name: _to_rows(array, columns[name], kept) for name, array in arrays.items()}, bad


def read_values(batch: pa.RecordBatch, columns: Mapping[str, ArrowColumn], rows: RowNumbers) -> Values:
    """Return the columns of some rows as `read_columns` does, for a map function: no row is bad.

    A value that its field does not hold is a Python value: a null is None. Raises an `ArrowException`.
    """
    return {name: _values(batch, column, rows) for name, column in columns.items()}, {}


def _values(batch: pa.RecordBatch, column: ArrowColumn, rows: NDArray[np.int64]) -> Column:
    stored, bad = ({"": []}, range(len(rows))) if column.unfit else read_columns(batch, {"": column}, rows)
    if not bad:
        return stored[""]
    array, values = _member(batch, column.leaf), iter(stored[""])
    array = array if column.unfit else _plain(array, column)  # texts as bytes, times as numbers
    return [array[row].as_py() if index in bad else next(values) for index, row in enumerate(rows.tolist())]


def _member(batch: pa.RecordBatch, leaf: Leaf) -> pa.Array:
    array = batch.column(leaf.path[0])
    array.validate()
    for member in leaf.path[1:]:
        array = pc.struct_field(array, [member])
    return array


def _checked(batch: pa.RecordBatch, column: ArrowColumn, rows: tuple[int, int], bad: BadRows) -> pa.Array:
    """Return a column of some rows, first and count, as `_plain` does, with fill values for nulls; add bad rows."""
    array = _plain(_member(batch, column.leaf).slice(*rows), column)
    if column.widened:
        dtype = np.dtype(column.field.dtype)
        numbers, nulls = numbers_of(array.fill_null(0)), _nulls(array)
        problem = f"is a whole number that {dtype} does not hold exactly"
        bad.add(np.flatnonzero(~exact_in_float(numbers, dtype)), column, problem, "choose another type")
        floats = numbers.astype(dtype)
        floats[nulls] = column.fill
        return _from_numpy(floats)
    array = _with_fill(array, column, 0)
    problem, remedy = "is null", _FILL
    if column.leaf.media:
        problem = "has no bytes: the file itself is not in the dataset, at most its path"
        remedy = "embed the files when the dataset is saved, as save_to_disk does"
    bad.add(_nulls(array), column, problem, remedy)
    if column.field.kind == "text":
        _check_text(array, column, bad)
    edges = np.arange(len(array) + 1)
    for (inner, lengths, next_edges), size in zip(_inner_values(array, column), column.sizes, strict=True):
        if size != FREE:
            remedy = _shape_remedy(column.field)
            rows_of_wrong = _rows_of(np.flatnonzero(lengths != size), edges)
            bad.add(rows_of_wrong, column, f"is not a list of the shape {list(column.field.shape)}", remedy)
        bad.add(_rows_of(_nulls(inner), next_edges), column, "holds a null", _FILL)
        edges = next_edges
    return array


def _plain(array: pa.Array, column: ArrowColumn) -> pa.Array:
    """Return the values without extension, dictionary and view; strings as bytes, since they may not be UTF-8."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(array.storage, column)
    if pa.types.is_dictionary(kind):
        values = _plain(array.dictionary, column)
        binary = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
        sizes = pc.binary_length(values) if binary else pa.scalar(values.nbytes // max(len(values), 1))
        taken = pc.sum(sizes.take(array.indices)).as_py() if binary else len(array) * sizes.as_py()
        check_decoded(f"the values of {column.leaf.name!r} have", taken or 0, column.max_decoded)
        return pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    if _is_text(kind):
        binary = {"string": pa.binary(), "large_string": pa.large_binary()}
        array = array.view(binary.get(str(kind)) or pa.binary_view())
    array.validate(full=True)
    if _unit_of(kind):
        return array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    return array.cast(pa.large_binary()) if pa.types.is_binary_view(array.type) else array


def _with_fill(array: pa.Array, column: ArrowColumn, level: int) -> pa.Array:
    """Return the array of a list level with the column's fill value for nulls.

    A null list is filled with values if its level has a fixed length, else it becomes empty.
    """
    if column.fill is None or not array.null_count:
        return array
    value = column.fill.encode() if isinstance(column.fill, str) else column.fill
    value = value.item() if isinstance(value, np.generic) else value
    for size in reversed(column.sizes[level:]):
        value = [] if size == FREE else [value] * size
    return array.fill_null(pa.scalar(value, array.type))


def _inner_values(array: pa.Array, column: ArrowColumn) -> Iterator[tuple[pa.Array, RowNumbers, RowNumbers]]:
    """Yield, for each list level, outermost first: the inner values, the lengths of the lists, and the edges of rows.

    The inner values of row r are those from `edges[r]` to `edges[r + 1]`.
    """
    edges = np.arange(len(array) + 1)
    for level in range(1, len(column.sizes) + 1):
        lengths = numbers_of(pc.list_value_length(array).fill_null(0)).astype(np.int64, copy=False)
        edges = np.concatenate(([0], np.cumsum(lengths)))[edges]
        array = _with_fill(_plain(array.flatten(), column), column, level)  # flatten omits the values of null lists
        yield array, lengths, edges


def _rows_of(positions: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.unique(np.searchsorted(edges, positions, side="right") - 1)


def _nulls(array: pa.Array) -> NDArray[np.int64]:
    """Return the positions of nulls."""
    return np.flatnonzero(numbers_of(array.is_null())) if array.null_count else np.zeros(0, np.int64)


def _check_text(array: pa.Array, column: ArrowColumn, bad: BadRows) -> None:
    try:
        array.cast(pa.large_string() if pa.types.is_large_binary(array.type) else pa.string())
    except pa.ArrowInvalid:
        values = [value or b"" for value in array.to_pylist()]
        rows = [row for row, value in enumerate(values) if value.decode(errors="ignore").encode() != value]
        remedy = "repair it, or read the column as bytes with fields="
        bad.add(np.array(rows, np.int64), column, "is not UTF-8 text", remedy)


def _shape_remedy(field: Field) -> str:
    ragged = Field("ragged", field.dtype, field.shape[1:])
    remedy = "give all rows that shape"
    return f"{remedy}, or declare rows of any length, {ragged}, with fields=" if field.fixed else remedy


def _to_rows(array: pa.Array, column: ArrowColumn, kept: NDArray[np.int64]) -> Column:
    """Return the values at the positions `kept`, which are not bad, as a column of the field."""
    if column.field.kind in ("bytes", "text"):
        items: list[bytes] = (array.take(_from_numpy(kept)) if len(kept) < len(array) else array).to_pylist()
        return items
    edges, flat = np.arange(len(array) + 1), array
    for inner, _, inner_edges in _inner_values(array, column):
        flat, edges = inner, inner_edges
    numbers = numbers_of(flat)
    numbers = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    if column.field.kind == "ragged":
        data, size = numbers.view(np.uint8).data, numbers.itemsize
        pairs = zip((edges[kept] * size).tolist(), (edges[kept + 1] * size).tolist(), strict=True)
        return [bytes(data[start:stop]) for start, stop in pairs]
    if len(kept) < len(array):  # not `take`: pyarrow 26 takes wrong rows from a slice of an array of lists of lists
        windows = np.lib.stride_tricks.sliding_window_view
        numbers = windows(numbers, prod(column.field.shape))[edges[kept]] if len(kept) else numbers[:0]
    return numbers.reshape(-1, *column.field.shape)


def numbers_of(array: pa.Array) -> NDArray[Any]:
    """Return the values of an array of numbers or bools; numbers as a view. The value of a null is arbitrary.

    pyarrow's own conversions import pandas if it is installed, which takes 0.4 s and 50 MB.
    """
    data = array.buffers()[1] or b""
    if array.type.bit_width == 1:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(np.bool_)
        return bits[array.offset : array.offset + len(array)]
    count = len(data) * 8 // array.type.bit_width  # the buffer of a damaged file may end within a number
    numbers: NDArray[Any] = np.frombuffer(data, array.type.to_pandas_dtype(), count)
    return numbers[array.offset : array.offset + len(array)]


def _from_numpy(numbers: NDArray[Any]) -> pa.Array:
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(numbers)])
