"""The fields of a source and their types: selected by the user, or inferred from values."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import (
    MAX_DECODED,
    Bad,
    BadSample,
    Columns,
    Fragment,
    OnBad,
    RowSource,
    drop_rows,
    read_kept,
)
from streamloader.conversion.sources.files import Listing
from streamloader.errors import FieldError, UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field, check_name
from streamloader.format.values import as_array, exact_in_float, from_bytes, leaves, sniff, to_column, to_value
from streamloader.options import is_whole
from streamloader.zarr.metadata import POSITIONAL

ANY = Field("bytes")  # of a column for a map function: a list that may hold any Python values
Value = TypeVar("Value")
_COMMA = re.compile(r",(?![^\[]*\])")  # not within a shape


@dataclass(frozen=True)
class FieldSelection:
    """The fields to keep, in order, each with its type or None for the source's type. Without any, all are kept.

    Names are those of fields, not those in the files. `fill` has the values that replace missing ones. `raw` keeps
    packed values as stored. `mapped` says that a map function gets the fields: times become whole numbers without a
    type for them, and values that no field holds come as they are. `columns`: what to read for a map function, as
    `fields`. `rechunk`: the arrays of a Zarr store, and slices of them, that become fields along the dimension
    `sample_axis`, "" for their first one. `max_decoded`: the bytes that what is decompressed at once may have.
    """

    fields: Mapping[str, Field | None] = field(default_factory=dict)
    fill: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False
    mapped: bool = False
    rechunk: tuple[str, ...] = ()
    sample_axis: str = ""
    columns: Mapping[str, Field | None] = field(default_factory=dict)
    max_decoded: int = MAX_DECODED

    @property
    def notes(self) -> dict[str, Any]:
        """The options for the manifest's provenance, with which an append or a comparison reads its source."""
        fill = {key: v.decode(errors="replace") if isinstance(v, bytes) else str(v) for key, v in self.fill.items()}
        notes = {"fill": fill, "raw": self.raw, "rechunk": list(self.rechunk), "sample_axis": self.sample_axis}
        notes["read"] = [f"{name}={kind}" if kind else name for name, kind in self.columns.items()]
        return {key: value for key, value in notes.items() if value}

    @classmethod
    def from_provenance(cls, fields: Mapping[str, Field | None], provenance: Mapping[str, Any]) -> "FieldSelection":
        """Return the selection of the given fields, with the `notes` of a provenance."""
        fill = provenance.get("fill")
        raw, lists = provenance.get("raw") is True, (provenance.get("rechunk"), provenance.get("read"))
        names, read = (tuple(map(str, each)) if isinstance(each, list) else () for each in lists)
        fills, axis = dict(fill) if isinstance(fill, Mapping) else {}, str(provenance.get("sample_axis", ""))
        return cls(fields, fills, raw, False, names, axis, parse_selection(read).fields)

    def includes(self, name: str) -> bool:
        """Return whether the field is kept."""
        return not self.fields or name in self.fields

    def pick(self, available: Mapping[str, Value], where: str) -> dict[str, Value]:
        """Return the values of the kept fields, in order. Raises `FieldError` for a field that is not available."""
        missing = next((name for name in self.fields if name not in available), None)
        if missing is not None:
            raise FieldError(f"{where} has no field {missing!r}", f"it has {', '.join(available) or 'no array'}")
        return {name: available[name] for name in self.fields} or dict(available)

    def check_fill(self, fields: Mapping[str, Field], where: str) -> None:
        """Raise `FieldError` for a fill value of a field that does not exist."""
        unknown = self.fill.keys() - fields.keys()
        if unknown:
            raise FieldError(f"fill names {min(unknown)!r}, which {where} lacks", f"its fields are {', '.join(fields)}")

    def fill_values(self, fields: Mapping[str, Field], where: str) -> dict[str, Any]:
        """Return the fill values: str for text, bytes for bytes, else numpy scalars of the field's dtype.

        Raises `FieldError` for a field that does not exist, and for a value that is invalid for its type.
        """
        self.check_fill(fields, where)
        return {name: _fill_value(name, fields[name], value) for name, value in self.fill.items()}


def _fill_value(name: str, field: Field, value: Any) -> Any:
    """Return the fill value of one field; see `fill_values`. Numbers may be text, as on the command line."""
    if field.kind in ("text", "bytes"):
        if isinstance(value, str):
            return value if field.kind == "text" else value.encode()
        if isinstance(value, bytes) and field.kind == "bytes":
            return value
        raise FieldError(f"the fill value {value!r} of the field {name!r} is not {field.kind}", f"give {field.kind}")
    number = _number(value) if isinstance(value, str) else value
    try:
        if isinstance(number, bool | np.bool_) != (field.dtype == "bool"):
            raise FieldError("")
        return np.asarray(to_value(name, Field("tensor", field.dtype), number, ""))[()]
    except FieldError:
        problem = f"the fill value {value!r} of the field {name!r} is not a value of {field.dtype}"
        raise FieldError(problem, f"give one that {field.dtype} holds, or another type with fields") from None


def _number(text: str) -> Any:
    """Return the bool, int or float that a text represents, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


FieldsOption = str | Iterable[str] | Mapping[str, str | Field | None] | None


def parse_selection(
    fields: FieldsOption,
    fill: Mapping[str, Any] | None = None,
    raw: bool = False,
    rechunk: str | Sequence[str] | None = None,
    sample_axis: str | int | None = None,
    *,
    columns: FieldsOption = None,
) -> FieldSelection:
    """Return the selection of `"image,label"`, `["image", "tokens=ragged:int32"]` or `{"image": None, "x": "int32"}`.

    Raises `FieldError` for an unknown type, `UsageError` for an invalid or duplicate name.
    """
    pairs: list[tuple[str, str | Field | None]] = []
    if isinstance(fields, Mapping):
        pairs = list(fields.items())
    elif fields is not None:
        texts = [fields] if isinstance(fields, str) else list(fields)
        parts = [part.partition("=") for text in texts for part in _COMMA.split(text)]
        pairs = [(name.strip(), kind.strip() or None) for name, _, kind in parts]
    for name in [*(fill or {}), *(name for name, _ in pairs)]:
        check_name(name)
    twice = next((name for n, (name, _) in enumerate(pairs) if name in dict(pairs[:n])), None)
    if twice is not None:
        raise UsageError(f"the field {twice!r} is named twice", "name each field once")
    kinds = {name: None if kind is None else Field.parse(kind) for name, kind in pairs}
    names = tuple(part.strip() for part in rechunk.split(",")) if isinstance(rechunk, str) else tuple(rechunk or ())
    if sample_axis is not None and not names:
        raise UsageError(f"sample_axis={sample_axis!r} without rechunk", "give both: rechunk= names the arrays")
    axis = f"{POSITIONAL}{sample_axis}" if is_whole(sample_axis, 0) else str(sample_axis or "")
    read = parse_selection(columns).fields if columns else {}
    return FieldSelection(kinds, dict(fill or {}), raw, rechunk=names, sample_axis=axis, columns=read)


@dataclass(frozen=True)
class SourceFormat:
    """A source format. Each module of `sources` lists its formats in `FORMATS`.

    `matches` tests file names only. `open` reads headers, checks the schema, and may apply the selection itself.
    `marked` formats are detected by a file such as an index, and take precedence over formats that only match file
    types. Values of `nullable` formats may be missing.
    """

    name: str
    matches: Callable[[Listing], bool]
    open: Callable[[Listing, FieldSelection], RowSource]
    marked: bool = False
    nullable: bool = False


Settled = NDArray[Any] | bytes | str

_NUMBERS = frozenset({bool, int, float, np.int64, np.float64})
_KINDS = "give numbers, text, bytes or arrays, or leave the field out"


def settle(value: Any, where: str) -> Settled:
    """Return a value as bytes, str or an array.

    Numbers, lists of numbers, and objects with `__dlpack__` or `__array__` become arrays, a PIL image the bytes of a
    PNG or TIFF. Raises `FieldError`, which names `where`.
    """
    if type(value) in _NUMBERS and (number := np.asarray(value)).dtype != object:  # object: more than 64 bits
        return number
    if isinstance(value, str):
        return str(value)  # numpy.str_ too
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if value is None or value is np.ma.masked:
        raise FieldError(f"{where} is missing", "give every sample a value, or fill it in with fill=")
    if isinstance(value, Mapping):
        raise FieldError(f"{where} is a {type(value).__name__}", "give each value a field of its own")
    if hasattr(value, "save") and hasattr(value, "getbands"):
        from streamloader.images.pillow import encode

        try:
            return encode(value)
        except (OSError, ValueError, SyntaxError, SystemError) as error:  # also of a file that is read only now
            raise FieldError(f"{where} is an image that cannot be stored: {error}", "repair or remove it") from None
    array = _array(value, where)
    if array.dtype.kind in "mM":
        raise FieldError(f"{where} holds {array.dtype}", "store times as whole numbers, values.astype('int64')")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        noun = type(value).__name__ if array.dtype == object else f"{type(value).__name__} of {array.dtype}"
        noun = "list that holds other values than numbers" if isinstance(value, list) else noun
        noun = "whole number that 64 bits do not hold" if isinstance(value, int) else noun
        raise FieldError(f"{where} is a {noun}", _KINDS)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def infer_field(name: str, values: Sequence[Settled]) -> Field:
    """Return the field for the values of several samples.

    Arrays of one shape give a tensor, arrays of different lengths a ragged field. Several dtypes give one that holds
    all values. Raises `FieldError` if no field holds all values.
    """
    kinds = {type(value) if isinstance(value, bytes | str) else np.ndarray for value in values}
    if kinds == {str}:
        return Field("text")
    if kinds == {bytes}:
        return Field("bytes", encoding=common_encoding(values))  # type: ignore[arg-type]
    if kinds != {np.ndarray}:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise FieldError(f"the field {name!r} holds {names} in different samples", "give all samples one kind of value")
    arrays: list[NDArray[Any]] = list(values)  # type: ignore[arg-type]
    filled = [array for array in arrays if array.size] or arrays  # an empty list has no meaningful dtype
    dtype = _common_dtype(name, filled).name
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1 and arrays[0].size:
        return Field("tensor", dtype, arrays[0].shape)
    inner = {array.shape[1:] for array in filled}
    if len(inner) == 1 and all(array.ndim for array in arrays):
        return Field("ragged", dtype, inner.pop())
    examples = ", ".join(map(str, sorted(shapes)[:3]))
    raise FieldError(f"the field {name!r} has samples of the shapes {examples}", "give all one shape, or store bytes")


def _common_dtype(name: str, arrays: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return the dtype that holds the values of all arrays. Raises `FieldError` if none does."""
    dtypes = {array.dtype for array in arrays}
    kinds = {dtype.kind for dtype in dtypes}
    if "b" in kinds and len(kinds) > 1:
        raise FieldError(f"the field {name!r} holds bool and numbers in different samples", "give all samples one kind")
    dtype = np.result_type(*dtypes)
    if dtype.kind == "f" and "f" not in kinds:  # int64 and uint64: numpy would round both to float64
        low, high = min(int(array.min()) for array in arrays), max(int(array.max()) for array in arrays)
        integer = integer_dtype(low, high)
        if not integer:
            problem = f"the field {name!r} holds whole numbers from {low} to {high}, which no integer type holds"
            raise FieldError(problem, "store them as text")
        return np.dtype(integer)
    return dtype


def integer_dtype(low: int, high: int) -> str:
    """Return int64 or uint64, the first that holds `low` to `high`; "" if neither does."""
    dtypes = (dtype for dtype in ("int64", "uint64") if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return next(dtypes, "")


def _array(value: Any, where: str) -> NDArray[Any]:
    items, kinds = leaves(value) if isinstance(value, list | tuple) else ([], set())
    if any(issubclass(kind, str | bytes) for kind in kinds):  # numpy would allocate the longest length for each
        raise FieldError(f"{where} is a list that holds other values than numbers", _KINDS)
    try:
        array = as_array(value)
    except (ValueError, TypeError) as error:
        raise FieldError(f"{where} is not an array: {error}", _KINDS) from None
    if changed := _changed_by_numpy(items, kinds, array):
        raise FieldError(f"{where} is a list that holds {changed}", "give numbers of one type, or an array")
    return array


def _changed_by_numpy(items: Sequence[Any], kinds: set[type], array: NDArray[Any]) -> str:
    """Describe the numbers of a list whose values differ in `array`, which numpy made from it; "" if there are none."""
    if kinds == {int} and array.dtype.kind in "fO":
        return "whole numbers that no integer type holds together"
    if len(kinds) <= 1 and kinds != {np.ndarray}:
        return ""
    if kinds & {bool, np.bool_} and kinds - {bool, np.bool_}:
        return "true or false beside numbers"
    if array.dtype.kind != "f":
        return ""
    for item in items:
        number = np.asarray(item)
        if number.dtype.kind in "iu" and not exact_in_float(number, array.dtype).all():
            return f"{item} beside fractions, which {array.dtype} does not hold"
    return ""


def common_encoding(values: Iterable[bytes]) -> str:
    """Return the encoding of all values, "mixed" if they have several, "" if one is unknown or there is no value."""
    encodings = {sniff(value) for value in values} or {""}
    return "" if "" in encodings else encodings.pop() if len(encodings) == 1 else "mixed"


def flatten(sample: Any) -> dict[str, Any]:
    """Return a sample as a flat mapping: nested keys are joined by `_`, items of a tuple or list are named by position.

    Any other value is named `data`.
    """
    if isinstance(sample, tuple | list):
        sample = sample._asdict() if hasattr(sample, "_asdict") else dict(enumerate(sample))
    elif not isinstance(sample, Mapping):
        return {"data": sample}
    out: dict[str, Any] = {}
    for key, value in sample.items():
        if isinstance(value, Mapping):
            out |= {f"{key}_{inner}": item for inner, item in flatten(value).items()}
        else:
            out[str(key)] = value
    return out


def choose(source: RowSource, selection: FieldSelection) -> RowSource:
    """Return the source with the selected fields, in their order; the source itself if they are all of its fields.

    Raises `FieldError` for a field that does not exist, or that cannot be cast to its type.
    """
    selection.check_fill(source.fields, source.url)
    stored = selection.pick(source.fields, source.url)
    types = {} if selection.mapped else selection.fields  # a map function casts its own values, some of which are None
    fields = {name: types.get(name) or field for name, field in stored.items()}
    if list(fields.items()) == list(source.fields.items()):
        return source
    for name, target in fields.items():
        _check_cast(name, stored[name], target)
    return transform_source(source, partial(_cast, stored, fields), fields=fields)


def _check_cast(name: str, stored: Field, target: Field) -> None:
    problem = f"field {name!r} is {stored} in the source, which cannot become {target}"
    numbers = {"tensor", "ragged"}
    if (stored.kind in numbers) != (target.kind in numbers):
        raise FieldError(problem, "choose another type, or convert it with map=")
    inner, target_inner = (field.shape[1:] if field.fixed else field.shape for field in (stored, target))
    if inner != target_inner or (stored.fixed and target.fixed and stored.shape != target.shape):
        raise FieldError(problem, "keep its shape")


# A picklable function of columns. It adds bad samples, by position, to its second argument.
Transform = Callable[[Columns, Bad], Columns]


def transform_source(source: RowSource, transform: Transform, **changes: Any) -> RowSource:
    """Return a source with the given changes, whose fragments apply a function to their columns."""
    return replace(source, **changes, fragment=lambda rows: partial(_transform, source.fragment(rows), transform))


def _transform(fragment: Fragment, transform: Transform, on_bad: OnBad) -> Columns:
    bad: Bad = {}
    stored, kept = read_kept(fragment, on_bad)
    columns = transform(stored, bad)
    for position, sample in sorted(bad.items()):
        on_bad(replace(sample, position=kept[position]))
    return drop_rows(columns, bad) if bad else columns


def _cast(stored: Mapping[str, Field], fields: Mapping[str, Field], columns: Columns, bad: Bad) -> Columns:
    """Return the columns cast from their `stored` fields to `fields`; a sample that cannot be cast is bad."""
    return {name: _cast_column(name, stored[name], target, columns[name], bad) for name, target in fields.items()}


def _cast_column(name: str, stored: Field, target: Field, column: Column, bad: Bad) -> Column:
    if stored == target or (stored.kind == target.kind == "bytes"):
        return column
    if stored.fixed and target.fixed:
        with suppress(FieldError):  # the loop below finds the bad rows
            return to_column(name, target, column, 0)
    blank = np.zeros(target.shape, target.dtype) if target.fixed else b""  # the value of a bad row
    values: list[Any] = [blank] * len(column)
    for position in range(len(column)):
        try:
            values[position] = to_value(name, target, _value(name, stored, target, column[position]), position)
        except FieldError as error:
            bad.setdefault(position, BadSample(position, "", error.problem, error.remedy))
    return np.array(values, target.dtype).reshape(-1, *target.shape) if target.fixed else values


def _value(name: str, stored: Field, target: Field, item: Any) -> Any:
    if stored.fixed:
        return item
    if target.kind == "bytes":
        return bytes(item)
    if target.kind == "text":
        try:
            return bytes(item).decode()
        except UnicodeDecodeError as error:
            raise FieldError(f"field {name!r} is not UTF-8 text: {error.reason}", "keep it as bytes") from None
    return from_bytes(name, stored, memoryview(item), 0)
