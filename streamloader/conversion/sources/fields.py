"""Which fields of a source are kept, and of which type: selected by the user, or inferred from values."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, OnBad, Part, Source, drop_rows, read_kept
from streamloader.conversion.sources.files import Listing
from streamloader.errors import FieldError, UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field, check_name
from streamloader.format.values import exact_in_float, from_bytes, to_column, to_value

Value = TypeVar("Value")
_BETWEEN = re.compile(r",(?![^\[]*\])")  # not the commas of a shape


@dataclass(frozen=True)
class FieldSelection:
    """`fields` are those to keep, in order, each with the type that it shall have or None for that of the source;
    none keeps all as they are. Names are those of fields, not those in the files.

    `fill` gives fields the value that replaces a missing one. `raw` keeps packed values as they are stored. `mapped`:
    a map function gets the fields, so times come as whole numbers without being asked for.
    """

    fields: Mapping[str, Field | None] = field(default_factory=dict)
    fill: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False
    mapped: bool = False

    @property
    def notes(self) -> dict[str, Any]:
        """What the manifest's provenance keeps of it, so that an append or a comparison reads its source alike."""
        fill = {
            name: value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            for name, value in self.fill.items()
        }
        return {key: value for key, value in (("fill", fill), ("raw", self.raw)) if value}

    @classmethod
    def again(cls, fields: Mapping[str, Field | None], provenance: Mapping[str, Any]) -> FieldSelection:
        """Return the selection of these fields, with the `notes` that are in a provenance."""
        fill = provenance.get("fill")
        return cls(fields, dict(fill) if isinstance(fill, Mapping) else {}, provenance.get("raw") is True)

    def wanted(self, name: str) -> bool:
        """Return whether the field is to be kept."""
        return not self.fields or name in self.fields

    def pick(self, there: Mapping[str, Value], where: str) -> dict[str, Value]:
        """Return what is there for the fields to keep, in order. Raises `FieldError` for a field that is not there."""
        missing = next((name for name in self.fields if name not in there), None)
        if missing is not None:
            raise FieldError(f"{where} has no field {missing!r}", f"it has {', '.join(there) or 'no array'}")
        return {name: there[name] for name in self.fields} or dict(there)

    def check_fill(self, fields: Mapping[str, Field], where: str) -> None:
        """Raise `FieldError` for a fill value of a field that is not there."""
        unknown = self.fill.keys() - fields.keys()
        if unknown:
            raise FieldError(f"fill names {min(unknown)!r}, which {where} lacks", f"its fields are {', '.join(fields)}")

    def fill_values(self, fields: Mapping[str, Field], where: str) -> dict[str, Any]:
        """Return the fill values as str, bytes, or numpy scalars of the dtype of their fields.

        Raises `FieldError` for a field that is not there, and for a value that its type does not hold.
        """
        self.check_fill(fields, where)
        return {name: _fill_value(name, fields[name], given) for name, given in self.fill.items()}


def _fill_value(name: str, kind: Field, given: Any) -> Any:
    """Return a fill value as a str for text, bytes for bytes, else as a numpy scalar of the field's dtype.

    Numbers may be given as text, as on the command line. Raises `FieldError` for a value that the type does not hold.
    """
    if kind.kind in ("text", "bytes"):
        if isinstance(given, str):
            return given if kind.kind == "text" else given.encode()
        if isinstance(given, bytes) and kind.kind == "bytes":
            return given
        raise FieldError(f"the fill value {given!r} of the field {name!r} is not {kind.kind}", f"give {kind.kind}")
    value = _number(given) if isinstance(given, str) else given
    try:
        if isinstance(value, bool) != (kind.dtype == "bool"):
            raise FieldError("")
        return np.asarray(to_value(name, Field("tensor", kind.dtype), value, ""))[()]
    except FieldError:
        problem = f"the fill value {given!r} of the field {name!r} is not a value of {kind.dtype}"
        raise FieldError(problem, f"give one that {kind.dtype} holds, or another type with fields") from None


def _number(text: str) -> Any:
    """Return the bool, int or float that a text stands for, or the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


FieldsOption = str | Iterable[str] | Mapping[str, str | Field | None] | None


def parse_selection(fields: FieldsOption, fill: Mapping[str, Any] | None = None, raw: bool = False) -> FieldSelection:
    """Return the selection of `"image,label"`, `["image", "tokens=ragged:int32"]` or `{"image": None, "x": "int32"}`.

    Raises `FieldError` for an unknown type, `UsageError` for an invalid or duplicate name.
    """
    pairs: list[tuple[str, str | Field | None]] = []
    if isinstance(fields, Mapping):
        pairs = list(fields.items())
    elif fields is not None:
        texts = [fields] if isinstance(fields, str) else list(fields)
        parts = [part.partition("=") for text in texts for part in _BETWEEN.split(text)]
        pairs = [(name.strip(), kind.strip() or None) for name, _, kind in parts]
    for name in [*(fill or {}), *(name for name, _ in pairs)]:
        check_name(name)
    twice = next((name for name, count in Counter(name for name, _ in pairs).items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"the field {twice!r} is named twice", "name each field once")
    kinds = {name: None if kind is None else Field.parse(kind) for name, kind in pairs}
    return FieldSelection(kinds, dict(fill or {}), raw)


@dataclass(frozen=True)
class SourceFormat:
    """A format that can be converted. Each module of `sources` lists its own in `FORMATS`.

    `matches` looks at names only; `open` reads headers and checks the schema, and may apply the selection itself.
    `marked` formats are known by a file of their own, such as an index: they win over those that match file types
    only. Values may be missing in those that are `nullable`.
    """

    name: str
    matches: Callable[[Listing], bool]
    open: Callable[[Listing, FieldSelection], Source]
    marked: bool = False
    nullable: bool = False


Settled = NDArray[Any] | bytes | str

# the first bytes of encodings that decoders and people know by name
_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
)
_RIFF = {b"WEBP": "webp", b"WAVE": "wav"}
_NUMBERS = frozenset({bool, int, float, np.int64, np.float64})
_KINDS = "give numbers, text, bytes or arrays, or leave the field out"


def settle(value: Any, where: str) -> Settled:
    """Return a value as bytes, str, or an array: of numbers, lists of them, anything with `__dlpack__` or `__array__`.

    A PIL image becomes the bytes of a PNG, which lose nothing. Raises `FieldError`, which names `where`.
    """
    if type(value) in _NUMBERS and (number := np.asarray(value)).dtype != object:  # else beyond 64 bits
        return number
    if isinstance(value, str):
        return str(value)  # also of numpy's own str_
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if value is None:
        raise FieldError(f"{where} is missing", "give every sample a value, or fill it in with --fill")
    if isinstance(value, Mapping):
        raise FieldError(f"{where} is a {type(value).__name__}", "give each value a field of its own")
    if hasattr(value, "save") and hasattr(value, "getbands"):
        out = io.BytesIO()
        value.save(out, format="PNG")
        return out.getvalue()
    array = _array(value, where)
    if array.dtype.kind in "mM":
        raise FieldError(f"{where} holds {array.dtype}", "store times as whole numbers, values.astype('int64')")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        what = type(value).__name__ if array.dtype == object else f"{type(value).__name__} of {array.dtype}"
        what = "list that holds other values than numbers" if isinstance(value, list) else what
        what = "whole number that 64 bits do not hold" if isinstance(value, int) else what
        raise FieldError(f"{where} is a {what}", _KINDS)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def infer_field(name: str, values: Sequence[Settled]) -> Field:
    """Return the field that holds these values of different samples.

    Arrays of one shape give a tensor, of different lengths a ragged field; numbers of several dtypes the one that
    holds all. Raises `FieldError` for values that no field holds together.
    """
    kinds = {type(value) if isinstance(value, bytes | str) else np.ndarray for value in values}
    if kinds == {str}:
        return Field("text")
    if kinds == {bytes}:
        encodings = {sniff(value) for value in values}  # type: ignore[arg-type]
        return Field("bytes", encoding=encodings.pop() if len(encodings) == 1 else "")
    if kinds != {np.ndarray}:
        found = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise FieldError(f"the field {name!r} holds {found} in different samples", "give all samples one kind of value")
    arrays: list[NDArray[Any]] = list(values)  # type: ignore[arg-type]
    filled = [array for array in arrays if array.size] or arrays  # an empty list has no dtype of its own
    dtype = _common_dtype(name, filled).name
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1 and arrays[0].size:
        return Field("tensor", dtype, arrays[0].shape)
    inner = {array.shape[1:] for array in filled}
    if len(inner) == 1 and all(array.ndim for array in arrays):
        return Field("ragged", dtype, inner.pop())
    several = ", ".join(map(str, sorted(shapes)[:3]))
    raise FieldError(f"the field {name!r} has samples of the shapes {several}", "give all one shape, or store bytes")


def _common_dtype(name: str, arrays: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return the dtype that holds the values of all arrays. Raises `FieldError` where none does."""
    dtypes = {array.dtype for array in arrays}
    kinds = {dtype.kind for dtype in dtypes}
    if "b" in kinds and len(kinds) > 1:
        raise FieldError(f"the field {name!r} holds bool and numbers in different samples", "give all samples one kind")
    dtype = np.result_type(*dtypes)
    if dtype.kind == "f" and "f" not in kinds:  # int64 and uint64: numpy would round both to float64
        low, high = min(int(array.min()) for array in arrays), max(int(array.max()) for array in arrays)
        found = integer_dtype(low, high)
        if not found:
            problem = f"the field {name!r} holds whole numbers from {low} to {high}, which no integer type holds"
            raise FieldError(problem, "store them as text")
        return np.dtype(found)
    return dtype


def integer_dtype(low: int, high: int) -> str:
    """Return int64 or uint64, the first that holds these whole numbers; nothing where neither does."""
    fitting = (dtype for dtype in ("int64", "uint64") if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return next(fitting, "")


def _array(value: Any, where: str) -> NDArray[Any]:
    items, kinds = _leaves(value) if isinstance(value, list | tuple) else ([], set())
    if any(issubclass(kind, str | bytes) for kind in kinds):  # numpy would give each the memory of the longest
        raise FieldError(f"{where} is a list that holds other values than numbers", _KINDS)
    array = from_dlpack(value) if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__") else None
    try:
        array = np.asarray(value) if array is None else array
    except (ValueError, TypeError) as error:
        raise FieldError(
            f"{where} is not an array of one shape ({error})", "give numbers, text, bytes or arrays"
        ) from None
    if changed := _changed_by_numpy(items, kinds, array):
        raise FieldError(f"{where} is a list that holds {changed}", "give numbers of one type, or an array")
    return array


def _leaves(items: Sequence[Any]) -> tuple[Sequence[Any], set[type]]:
    """Return the items of a list, or of the lists in it, and their types."""
    for _ in range(64):  # as many dimensions as numpy has
        if not (kinds := set(map(type, items))) or not kinds <= {list, tuple}:
            break
        items = list(chain.from_iterable(items))
    return items, kinds


def _changed_by_numpy(items: Sequence[Any], kinds: set[type], array: NDArray[Any]) -> str:
    """Return what in a list of numbers, or of such lists, has another value in `array`, which numpy made of it."""
    if kinds == {int} and array.dtype.kind in "fO":
        return "whole numbers that no integer type holds together"
    if len(kinds) <= 1 and kinds != {np.ndarray}:
        return ""
    if kinds & {bool, np.bool_} and kinds - {bool, np.bool_}:
        return "true or false beside numbers"
    if array.dtype.kind != "f":
        return ""
    for item in items:
        whole = np.asarray(item)
        if whole.dtype.kind in "iu" and not exact_in_float(whole, array.dtype).all():
            return f"{item} beside fractions, which {array.dtype} does not hold"
    return ""


def sniff(data: bytes) -> str:
    """Return the encoding that the first bytes tell, such as "jpeg"; nothing where they are not known."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12], "")
    return next((encoding for magic, encoding in _MAGIC if data.startswith(magic)), "")


def flatten(sample: Any) -> dict[str, Any]:
    """Return a sample as one mapping: nested ones joined by `_`, positions of a tuple as names, else `data`."""
    if isinstance(sample, tuple | list):
        sample = sample._asdict() if hasattr(sample, "_asdict") else dict(enumerate(sample))
    elif not isinstance(sample, Mapping):
        return {"data": sample}
    out: dict[str, Any] = {}
    for key, value in sample.items():
        if isinstance(value, Mapping):
            out |= {f"{key}_{inner}": one for inner, one in flatten(value).items()}
        else:
            out[str(key)] = value
    return out


def from_dlpack(value: Any) -> NDArray[Any] | None:
    """Return what any array library holds, also on a device; torch's own way where its tensor needs a gradient."""
    value = value.detach() if hasattr(value, "detach") else value
    try:
        return np.from_dlpack(value, device="cpu", copy=None)
    except (BufferError, RuntimeError, TypeError, ValueError, AttributeError):
        return None  # an exporter of before DLPack 1.0, or a dtype that it has no name for


def choose(source: Source, selection: FieldSelection) -> Source:
    """Return the source with the selected fields, in that order; itself where it has just those.

    Raises `FieldError` for a field that is not there, or that cannot be cast to its type.
    """
    selection.check_fill(source.fields, source.url)
    have = selection.pick(source.fields, source.url)
    fields = {name: selection.fields.get(name) or kind for name, kind in have.items()}
    if list(fields.items()) == list(source.fields.items()):
        return source
    for name, wanted in fields.items():
        _check(name, have[name], wanted)
    return transform_source(source, partial(_cast, have, fields), fields=fields)


def _check(name: str, have: Field, wanted: Field) -> None:
    problem = f"field {name!r} is {have} in the source, which cannot become {wanted}"
    numbers = {"tensor", "ragged"}
    if (have.kind in numbers) != (wanted.kind in numbers):
        raise FieldError(problem, "choose another type, or convert it with --map")
    inner, wanted_inner = (one.shape[1:] if one.fixed else one.shape for one in (have, wanted))
    if inner != wanted_inner or (have.fixed and wanted.fixed and have.shape != wanted.shape):
        raise FieldError(problem, "keep its shape")


Transform = Callable[[dict[str, Column], dict[int, BadSample]], dict[str, Column]]


def transform_source(source: Source, transform: Transform, **changes: Any) -> Source:
    """Return a source with these changes, and with what a picklable function makes of the columns of each part."""
    return replace(source, **changes, part=lambda rows: partial(_transform_part, source.part(rows), transform))


def _transform_part(part: Part, transform: Transform, on_bad: OnBad) -> dict[str, Column]:
    """Return the columns that the function makes, without the samples that it notes as bad, by position."""
    bad: dict[int, BadSample] = {}
    found, kept = read_kept(part, on_bad)
    columns = transform(found, bad)
    for position, one in sorted(bad.items()):
        on_bad(replace(one, position=kept[position]))
    return drop_rows(columns, bad) if bad else columns


def _cast(
    have: Mapping[str, Field], fields: Mapping[str, Field], columns: dict[str, Column], bad: dict[int, BadSample]
) -> dict[str, Column]:
    """Return the columns of `fields`, which are `have` in the source; a value that does not fit its type is bad."""
    return {name: _cast_column(name, have[name], wanted, columns[name], bad) for name, wanted in fields.items()}


def _cast_column(name: str, have: Field, wanted: Field, column: Column, bad: dict[int, BadSample]) -> Column:
    if have == wanted or (have.kind == wanted.kind == "bytes"):
        return column
    if have.fixed and wanted.fixed:
        with suppress(FieldError):  # then row by row, to find out which
            return to_column(name, wanted, column, 0)
    blank = np.zeros(wanted.shape, wanted.dtype) if wanted.fixed else b""  # stands in for what is bad
    values: list[Any] = [blank] * len(column)
    for position in range(len(column)):
        try:
            values[position] = to_value(name, wanted, _value(name, have, wanted, column[position]), position)
        except FieldError as error:
            bad.setdefault(position, BadSample(position, "", error.problem, error.remedy))
    return np.array(values, wanted.dtype).reshape(-1, *wanted.shape) if wanted.fixed else values


def _value(name: str, have: Field, wanted: Field, item: Any) -> Any:
    if have.fixed:
        return item
    if wanted.kind == "bytes":
        return bytes(item)
    if wanted.kind == "text":
        try:
            return bytes(item).decode()
        except UnicodeDecodeError as error:
            raise FieldError(f"field {name!r} is not UTF-8 text: {error.reason}", "keep it as bytes") from None
    return from_bytes(name, have, memoryview(item), 0)
