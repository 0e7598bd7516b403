"""What the columns of an Arrow schema are to the format: a field each, one for every member of a struct."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from streamloader.conversion.sources.needs import need
from streamloader.errors import FieldError
from streamloader.format.manifest import INTS, Field

if TYPE_CHECKING:
    import pyarrow as pa

FREE = -1  # a list level whose length differs from row to row
_JSON = "arrow.json"  # text by another name
_TENSOR = "arrow.fixed_shape_tensor"
_ARRAYS = (  # those of Hugging Face and of Ray, which tell their shape in JSON
    *(f"datasets.features.features.Array{axes}DExtensionType" for axes in range(2, 6)),
    "ray.data.arrow_tensor",
    "ray.data.arrow_tensor_v2",
)
_SHOWN = 80  # characters of a type in a message: a struct's may be pages


@dataclass(frozen=True)
class Leaf:
    """A column, or a member of a struct: `path` leads there, from the column down.

    `extension` names its extension type, and `shape` is what that type says of the shape (`FREE` for an axis of any
    length). `media` is the member `bytes` of Hugging Face's images and sounds, which stands for the whole struct.
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
    """How a field stands in a table: where, and the length that each list level has around its numbers (or `FREE`).

    The type of a column that is `open` says that its lists differ in length. `unit` says what the whole numbers of a
    time count. `fill` stands for a null; None refuses it. The integers of a column that is `widened` become float64, so
    that a fill value of NaN has a place.
    """

    path: tuple[str, ...]
    field: Field
    sizes: tuple[int, ...] = ()
    media: bool = False
    open: bool = False
    unit: str = ""
    fill: Any = None
    widened: bool = False

    @property
    def name(self) -> str:
        """The name that a person knows it by."""
        return ".".join(self.path[:-1] if self.media else self.path)


def leaves(schema: pa.Schema) -> list[Leaf]:
    """Return what can become a field, in the order of the schema."""
    return [leaf for field in schema for leaf in _walk(field, ())]


def _walk(field: pa.Field, above: tuple[str, ...]) -> Iterator[Leaf]:
    pa = need("pyarrow", "arrow")
    path = (*above, field.name)
    kind, extension, shape = _extension(field)
    if not pa.types.is_struct(kind) or not kind.num_fields or extension:
        yield Leaf(path, kind, extension, shape)
        return
    members = {kind.field(number).name: kind.field(number).type for number in range(kind.num_fields)}
    if members.keys() == {"bytes", "path"} and is_bytes(members["bytes"]) and is_text(members["path"]):
        yield Leaf((*path, "bytes"), members["bytes"], media=True)
        return
    for number in range(kind.num_fields):
        yield from _walk(kind.field(number), path)


def _extension(field: pa.Field) -> tuple[pa.DataType, str, tuple[int, ...]]:
    """Return the storage type of a field, its extension's name, and the shape that this tells.

    An extension that this process does not know stands in the field's metadata only.
    """
    pa = need("pyarrow", "arrow")
    kind, told = field.type, field.metadata or {}
    name = told.get(b"ARROW:extension:name", b"").decode("utf-8", "replace")
    detail = told.get(b"ARROW:extension:metadata", b"")
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
    told = read_json(detail)
    shape = told[0] if isinstance(told, list) and told and isinstance(told[0], list) else told
    if not isinstance(shape, list) or not all(one is None or type(one) is int for one in shape):
        return ()
    return tuple(FREE if one is None else one for one in shape)


def read_json(data: bytes) -> Any:
    """Return what JSON of unknown origin says, or None where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def is_text(kind: pa.DataType) -> bool:
    """Return whether the values are strings, in any of the layouts for them."""
    types = need("pyarrow", "arrow").types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether the values are bytes, in any of the layouts for them."""
    types = need("pyarrow", "arrow").types
    several = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(several or types.is_fixed_size_binary(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether the values are lists whose lengths differ, in any of the layouts for them."""
    types = need("pyarrow", "arrow").types
    plain = types.is_list(kind) or types.is_large_list(kind)
    return bool(plain or types.is_list_view(kind) or types.is_large_list_view(kind))


def column_of(leaf: Leaf, wished: Field | None, times: bool = False) -> ArrowColumn:
    """Return how a leaf becomes a field. `wished` tells the lengths of lists that have one, whether strings are text or
    bytes, and that the storage of an unknown extension type is what is wanted. With `times`, times are whole numbers
    unasked.

    Raises `FieldError`, with the leaf's name and type as problem, where no field of the format holds it.
    """
    refused = FieldError(f"{leaf.name!r} ({leaf.kind})")
    if leaf.extension and not leaf.shape and wished is None:
        raise refused
    sizes, kind = _levels(leaf.type)
    if not sizes and (is_text(kind) or is_bytes(kind)):
        asked_as = wished.kind if wished is not None and wished.kind in ("text", "bytes") else None
        field = Field(asked_as or ("text" if is_text(kind) else "bytes"))
        return ArrowColumn(leaf.path, field, media=leaf.media)
    types = need("pyarrow", "arrow").types
    unit = unit_of(kind)
    if unit and not times and (wished is None or wished.dtype not in INTS):
        raise FieldError(refused.problem, "store times as whole numbers")
    if not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or unit):
        raise refused
    dtype = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    dtype = f"int{kind.bit_width}" if unit else dtype
    shape = sizes
    asked: tuple[int, ...] = ()
    if wished is not None and wished.kind in ("tensor", "ragged"):
        asked = wished.shape if wished.fixed else (FREE, *wished.shape)
    if _fits(sizes, asked):
        sizes = shape = asked
    elif _fits(sizes, leaf.shape):
        sizes = shape = leaf.shape
    elif leaf.shape and FREE not in leaf.shape and _fits(sizes, (prod(leaf.shape),)):  # one list of all values
        sizes, shape = (prod(leaf.shape),), leaf.shape
    if FREE in shape[1:]:
        raise refused
    try:
        field = Field("ragged", dtype, shape[1:]) if FREE in shape else Field("tensor", dtype, shape)
    except FieldError as error:
        raise FieldError(f"{leaf.name!r} ({leaf.kind}: {error.problem})") from None
    return ArrowColumn(leaf.path, field, sizes, open=FREE in leaf.shape, unit=unit)


def unit_of(kind: pa.DataType) -> str:
    """Return what the whole numbers count that times of this type are stored as; nothing for other types."""
    types = need("pyarrow", "arrow").types
    if types.is_date(kind):
        return "days since 1970-01-01" if types.is_date32(kind) else "milliseconds since 1970-01-01"
    if not (types.is_timestamp(kind) or types.is_time(kind) or types.is_duration(kind)):
        return ""
    unit = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}[kind.unit]
    if types.is_timestamp(kind):
        return f"{unit} since 1970-01-01 00:00{' UTC' if kind.tz else ', without a time zone'}"
    return f"{unit} since midnight" if types.is_time(kind) else unit


def _levels(kind: pa.DataType) -> tuple[tuple[int, ...], pa.DataType]:
    """Return the length of each list level, and the type of the values within."""
    pa = need("pyarrow", "arrow")
    sizes: list[int] = []
    while True:
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        elif pa.types.is_fixed_size_list(kind):
            sizes.append(kind.list_size)
            kind = kind.value_type
        elif is_list(kind):
            sizes.append(FREE)
            kind = kind.value_type
        else:
            return tuple(sizes), kind


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
