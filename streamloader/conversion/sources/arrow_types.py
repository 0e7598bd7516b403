"""Arrow's columns as fields: which field a column becomes, and its values, many rows at a time.

Each member of a struct becomes a field of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.optional import Lazy
from streamloader.errors import FieldError
from streamloader.format.codecs import Column
from streamloader.format.manifest import INTS, Field
from streamloader.format.values import exact_in_float

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    pa, pc = Lazy("pyarrow"), Lazy("pyarrow.compute")

FREE = -1  # a list level whose length differs from row to row
_JSON = "arrow.json"  # text by another name
_TENSOR = "arrow.fixed_shape_tensor"
_ARRAYS = (  # those of Hugging Face and of Ray, which state their shape in JSON
    *(f"datasets.features.features.Array{axes}DExtensionType" for axes in range(2, 6)),
    "ray.data.arrow_tensor",
    "ray.data.arrow_tensor_v2",
)
_SHOWN = 80  # characters of a type in a message: a struct's may be pages


@dataclass(frozen=True)
class Leaf:
    """A column, or a member of a struct: `path` leads there, from the column down.

    `extension` names its extension type, and `shape` is what that type says of the shape (`FREE` for an axis of any
    length). `media` is the member `bytes` of Hugging Face's images and sounds, which represents the struct.
    """

    path: tuple[str, ...]
    type: pa.DataType
    extension: str = ""
    shape: tuple[int, ...] = ()
    media: bool = False

    @property
    def name(self) -> str:
        """The name that a person knows it by."""
        return ".".join(self.path[:-1] if self.media else self.path)

    @property
    def kind(self) -> str:
        """Its type, for messages."""
        shape = str(list(self.shape)) if self.shape else ""
        text = f"extension {self.extension}{shape}" if self.extension else str(self.type)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@dataclass(frozen=True)
class ArrowColumn:
    """The column of a field, and the length that each list level has around its numbers (or `FREE`).

    `unit` says what the whole numbers of a time count. `fill` replaces a null; None refuses it. The integers of a
    column that is `widened` become floats, so that `fill` can be one, such as NaN.
    """

    leaf: Leaf
    field: Field
    sizes: tuple[int, ...] = ()
    unit: str = ""
    fill: Any = None
    widened: bool = False


def leaves(schema: pa.Schema) -> list[Leaf]:
    """Return what can become a field, in the order of the schema."""
    return [leaf for field in schema for leaf in _walk(field, ())]


def _walk(field: pa.Field, above: tuple[str, ...]) -> Iterator[Leaf]:
    path = (*above, field.name)
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
    """Return the storage type of a field, its extension's name, and the shape that this states.

    An extension that this process does not know is in the field's metadata only.
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
    """Return the shape in `[[2, 3], "float32"]`, as Hugging Face describes it, or in Ray's `[2, 3]`, if it is there."""
    found = read_json(detail)
    shape = found[0] if isinstance(found, list) and found and isinstance(found[0], list) else found
    if not isinstance(shape, list) or not all(one is None or type(one) is int for one in shape):
        return ()
    return tuple(FREE if one is None else one for one in shape)


def read_json(data: bytes) -> Any:
    """Return what JSON of unknown origin says, or None where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _is_text(kind: pa.DataType) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _is_bytes(kind: pa.DataType) -> bool:
    return re.match(r"((large_)?binary|binary_view|fixed_size_binary\[\d+\])\Z", str(kind)) is not None


def column_of(leaf: Leaf, wanted: Field | None, times: bool = False) -> ArrowColumn:
    """Return how a leaf becomes a field. `wanted` has the lengths of lists that have one, whether strings are text or
    bytes, and that the storage of an unknown extension type is what is wanted. With `times`, times are always whole
    numbers.

    Raises `FieldError`, with the leaf's name and type as problem, where no field of the format holds it.
    """
    problem = f"{leaf.name!r} ({leaf.kind})"
    if leaf.extension and not leaf.shape and wanted is None:
        raise FieldError(problem)
    sizes, kind = _levels(leaf.type)
    if not sizes and (_is_text(kind) or _is_bytes(kind)):
        chosen = wanted.kind if wanted is not None and wanted.kind in ("text", "bytes") else None
        return ArrowColumn(leaf, Field(chosen or ("text" if _is_text(kind) else "bytes")))
    types, unit = pa.types, _unit_of(kind)
    if unit and not times and (wanted is None or wanted.dtype not in INTS):
        raise FieldError(problem, "store times as whole numbers")
    if not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or unit):
        raise FieldError(problem)
    dtype = f"int{kind.bit_width}" if unit else np.dtype(kind.to_pandas_dtype()).name
    shape = sizes
    asked: tuple[int, ...] = ()
    if wanted is not None and wanted.kind in ("tensor", "ragged"):
        asked = wanted.shape if wanted.fixed else (FREE, *wanted.shape)
    stated = leaf.shape
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
    """Return what the whole numbers count that times of this type are stored as; nothing for other types."""
    found = _TIME.match(str(kind))
    if found is None:
        return ""
    name, unit, zone = found.groups()
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
    """Return whether lists of these lengths may have that shape."""
    return len(sizes) == len(shape) > 0 and all(have in (FREE, want) for have, want in zip(sizes, shape, strict=True))


def same_column(leaf: Leaf, column: ArrowColumn) -> bool:
    """Return whether a leaf of another file has the values that the column has in the first."""
    try:
        found = column_of(leaf, column.field)
    except FieldError:
        return False
    plain = replace(column.field, encoding="", dtype=found.field.dtype if column.widened else column.field.dtype)
    return found.field == plain and found.sizes == column.sizes and found.unit == column.unit


def class_names(features: Any, path: Sequence[str]) -> list[str]:
    """Return the class names that Hugging Face's description of the features has for a column, or nothing."""
    for member in path:
        features = features.get(member) if isinstance(features, dict) else None
    while isinstance(features, dict) and "feature" in features:  # a list of labels
        features = features["feature"]
    if not isinstance(features, dict) or features.get("_type") != "ClassLabel":
        return []
    names = features.get("names")
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


_FILL = "give nulls a value with --fill NAME=VALUE, or leave the column out by naming the fields to keep with --fields"


class Troubles(dict[int, tuple[str, str]]):
    """What is wrong with rows, and what to do: by row, for each the first that is found."""

    def note(self, rows: NDArray[np.int64], column: ArrowColumn, problem: str, remedy: str) -> None:
        """Note the same for several rows."""
        for row in rows.tolist():
            self.setdefault(row, (f"the column {column.leaf.name!r} {problem}", remedy))


def read_columns(
    batch: pa.RecordBatch, columns: Mapping[str, ArrowColumn], rows: NDArray[np.int64]
) -> tuple[dict[str, Column], dict[int, tuple[str, str]]]:
    """Return the columns of some rows of a batch, and problem and remedy of those that are left out, by their index.

    Everything is checked so far that nothing points outside of its buffers. Raises an `ArrowException`.
    """
    first, places = int(rows[0]), rows - rows[0]
    count, troubles = int(places[-1]) + 1, Troubles()
    arrays = {name: _examined(batch, column, (first, count), troubles) for name, column in columns.items()}
    bad = {index: troubles[place] for index, place in enumerate(places.tolist()) if place in troubles}
    kept = np.delete(places, list(bad))
    return {name: _to_rows(array, columns[name], kept) for name, array in arrays.items()}, bad


def _examined(batch: pa.RecordBatch, column: ArrowColumn, rows: tuple[int, int], troubles: Troubles) -> pa.Array:
    """Return a column of some rows, first and count, with fill values for nulls, as `_plain` does; note bad rows."""
    array = batch.column(column.leaf.path[0])
    array.validate()
    array = array.slice(*rows)
    for member in column.leaf.path[1:]:
        array = pc.struct_field(array, [member])
    array = _plain(array)
    if column.widened:
        dtype = np.dtype(column.field.dtype)
        numbers, nulls = _numbers(array.fill_null(0)), _nulls(array)
        problem = f"is a whole number that {dtype} does not hold exactly"
        troubles.note(np.flatnonzero(~exact_in_float(numbers, dtype)), column, problem, "choose another type")
        floats = numbers.astype(dtype)
        floats[nulls] = column.fill
        return _from_numpy(floats)
    array = _filled(array, column, 0)
    problem, remedy = "is null", _FILL
    if column.leaf.media:
        problem = "has no bytes: the file itself is not in the dataset, at most its path"
        remedy = "embed the files when the dataset is saved, as save_to_disk does"
    troubles.note(_nulls(array), column, problem, remedy)
    if column.field.kind == "text":
        _note_no_text(array, column, troubles)
    edges = np.arange(len(array) + 1)
    for (inner, lengths, next_edges), size in zip(_inner_values(array, column), column.sizes, strict=True):
        if size != FREE:
            remedy = _other_shape(column.field)
            wrong = _rows_of(np.flatnonzero(lengths != size), edges)
            troubles.note(wrong, column, f"is not a list of the shape {list(column.field.shape)}", remedy)
        troubles.note(_rows_of(_nulls(inner), next_edges), column, "holds a null", _FILL)
        edges = next_edges
    return array


def _plain(array: pa.Array) -> pa.Array:
    """Return the values without extension, dictionary and view, strings as the bytes that they may not be UTF-8 of."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(array.storage)
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, _plain(array.dictionary)).dictionary_decode()
    if _is_text(kind):
        bytes_of = {"string": pa.binary(), "large_string": pa.large_binary()}
        array = array.view(bytes_of.get(str(kind)) or pa.binary_view())
    array.validate(full=True)
    if _unit_of(kind):
        return array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    return array.cast(pa.large_binary()) if pa.types.is_binary_view(array.type) else array


def _filled(array: pa.Array, column: ArrowColumn, level: int) -> pa.Array:
    """Return an array, which lies within so many lists, with the column's fill value for nulls: as a list where lists
    have one length, else as an empty one.
    """
    if column.fill is None or not array.null_count:
        return array
    value = column.fill.encode() if isinstance(column.fill, str) else column.fill
    value = value.item() if isinstance(value, np.generic) else value
    for size in reversed(column.sizes[level:]):
        value = [] if size == FREE else [value] * size
    return array.fill_null(pa.scalar(value, array.type))


def _inner_values(
    array: pa.Array, column: ArrowColumn
) -> Iterator[tuple[pa.Array, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield, for each list level from the outer one on: the values within, the lengths of its lists, and where in the
    values those of each row begin, and those of the last one end.
    """
    edges = np.arange(len(array) + 1)
    for level in range(1, len(column.sizes) + 1):
        lengths = _numbers(pc.list_value_length(array).fill_null(0)).astype(np.int64, copy=False)
        edges = np.concatenate(([0], np.cumsum(lengths)))[edges]
        array = _filled(_plain(array.flatten()), column, level)  # flatten leaves out what a null hides
        yield array, lengths, edges


def _rows_of(places: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.unique(np.searchsorted(edges, places, side="right") - 1)


def _nulls(array: pa.Array) -> NDArray[np.int64]:
    """Return the positions of nulls."""
    return np.flatnonzero(_numbers(array.is_null())) if array.null_count else np.zeros(0, np.int64)


def _note_no_text(array: pa.Array, column: ArrowColumn, troubles: Troubles) -> None:
    try:
        array.cast(pa.large_string() if pa.types.is_large_binary(array.type) else pa.string())
    except pa.ArrowInvalid:
        values = [value or b"" for value in array.to_pylist()]
        bad = [row for row, value in enumerate(values) if value.decode(errors="ignore").encode() != value]
        remedy = "repair it, or read the column as bytes with --fields"
        troubles.note(np.array(bad, np.int64), column, "is not UTF-8 text", remedy)


def _other_shape(field: Field) -> str:
    ragged = Field("ragged", field.dtype, field.shape[1:])
    differ = f", or say that they differ in length, {ragged}, with --fields" if field.fixed else ""
    return f"give all rows that shape{differ}"


def _to_rows(array: pa.Array, column: ArrowColumn, kept: NDArray[np.int64]) -> Column:
    """Return the values at the positions that are `kept`, none of which is bad, as a column of the field."""
    if column.field.kind in ("bytes", "text"):
        items: list[bytes] = (array.take(_from_numpy(kept)) if len(kept) < len(array) else array).to_pylist()
        return items
    edges, flat = np.arange(len(array) + 1), array
    for inner, _, inner_edges in _inner_values(array, column):
        flat, edges = inner, inner_edges
    numbers = _numbers(flat)
    numbers = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    if column.field.kind == "ragged":
        data, size = numbers.view(np.uint8).data, numbers.itemsize
        pairs = zip((edges[kept] * size).tolist(), (edges[kept + 1] * size).tolist(), strict=True)
        return [bytes(data[start:stop]) for start, stop in pairs]
    if len(kept) < len(array):  # pyarrow 26 takes wrong rows of a part of an array of lists of lists
        windows = np.lib.stride_tricks.sliding_window_view
        numbers = windows(numbers, prod(column.field.shape))[edges[kept]] if len(kept) else numbers[:0]
    return numbers.reshape(-1, *column.field.shape)


def _numbers(array: pa.Array) -> NDArray[Any]:
    """Return the values of an array of numbers or bools, any for a null; of numbers a view.

    pyarrow's own conversions import pandas where that is installed: 0.4 s and 50 MB.
    """
    data = array.buffers()[1] or b""
    if array.type.bit_width == 1:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(np.bool_)
        return bits[array.offset : array.offset + len(array)]
    whole = len(data) * 8 // array.type.bit_width  # a damaged file may have part of a number more
    numbers: NDArray[Any] = np.frombuffer(data, array.type.to_pandas_dtype(), whole)
    return numbers[array.offset : array.offset + len(array)]


def _from_numpy(numbers: NDArray[Any]) -> pa.Array:
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(numbers)])
