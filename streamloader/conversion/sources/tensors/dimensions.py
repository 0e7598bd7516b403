"""Arrays with named dimensions and attributes, as xarray and netCDF write them: which dimension is the samples', what
is told, and how packed values are decoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.tensors.arrays import LEAVE_OUT, Container, Into, Note
from streamloader.errors import SourceError
from streamloader.format.manifest import Field
from streamloader.format.values import exact_in_float

# what one needs to understand the values
PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "dtype")
ATTRIBUTES = (
    *("_FillValue", "add_offset", "calendar", "dtype", "flag_meanings", "flag_values", "long_name", "missing_value"),
    *("scale_factor", "standard_name", "units", "valid_max", "valid_min", "valid_range", "_Unsigned"),
)
_LONGEST = 500  # characters of an attribute that are kept
_DECODED_BYTES = 16 << 20  # of the values that are decoded at once

Dimensions = Mapping[str, tuple[str, ...]]


def sample_dimension(dimensions: Dimensions, where: str, unlimited: Collection[str] = ()) -> str:
    """Return the dimension of the samples: the one that most of the variables have first, of equal ones an unlimited.

    Coordinates of a dimension count only where there is nothing else. Raises `SourceError` where two are as frequent.
    """
    along = {name: own for name, own in dimensions.items() if own}
    data = {name: own for name, own in along.items() if own != (name,)} or along
    if not data:
        raise SourceError(
            f"{where} holds no variable with a dimension", "name the group that holds them, as in ::/group"
        )
    counts = Counter(own[0] for own in data.values())
    leaders = [name for name, count in counts.items() if count == max(counts.values())]
    leaders = [name for name in leaders if name in unlimited] or leaders
    if len(leaders) > 1:
        problem = f"as many variables of {where} have {leaders[0]!r} as have {leaders[1]!r} for their first dimension"
        raise SourceError(problem, "name the fields of one of them with --fields")
    return leaders[0]


def along(dimensions: Dimensions, dimension: str, wished: bool, where: str) -> tuple[list[str], list[str]]:
    """Return the variables whose first dimension it is, and the others.

    Raises `SourceError` for the first of the others where all are `wished`.
    """
    kept = [name for name, own in dimensions.items() if own and own[0] == dimension]
    others = [name for name in dimensions if name not in kept]
    if wished and others:
        own = dimensions[others[0]]
        has = f"has the dimensions {', '.join(own)}" if own else "has no dimension"
        raise SourceError(f"{others[0]!r} of {where} {has}, the samples' is {dimension!r}", LEAVE_OUT)
    return kept, others


def told(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Return the attributes that say how the values of an array are meant, as text: provenance holds no floats."""
    return {name: _text(attributes[name])[:_LONGEST] for name in ATTRIBUTES if name in attributes}


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray | list | tuple):
        items = value.reshape(-1) if isinstance(value, np.ndarray) else value
        return ", ".join(_text(item) for item in items[:_LONGEST])
    return str(value)


@dataclass(frozen=True)
class Decoding:
    """How the values of an array are decoded, as xarray does (`decode_cf`, `mask_and_scale`): the stored ones become
    `dtype`, times `scale`, plus `offset`; those that are one of `fills` become NaN.

    `view` is the dtype that the stored values are taken for, where an attribute says that their sign is another.
    """

    stored: Field
    dtype: str
    scale: Any = None
    offset: Any = None
    fills: tuple[Any, ...] = ()
    view: str = ""

    @property
    def field(self) -> Field:
        """The field of the decoded values."""
        return replace(self.stored, dtype=self.dtype)

    def __str__(self) -> str:
        scale = "" if self.scale is None else f" * {self.scale}"
        offset = "" if self.offset is None else f" + {self.offset}"
        fills = f", NaN for {' and '.join(map(str, self.fills))}" if self.fills else ""
        return f"{self.view or self.stored.dtype}{scale}{offset}{fills}"

    def apply(self, stored: NDArray[Any], out: NDArray[Any]) -> NDArray[np.int64]:
        """Fill `out` with the decoded values; return the rows with one that `out` does not hold exactly."""
        inexact: list[NDArray[np.int64]] = []
        step = max(1, _DECODED_BYTES // max(1, self.field.item_bytes))
        for first in range(0, len(stored), step):
            some = slice(first, first + step)
            inexact.append(first + self._apply(stored[some], out[some]))
        return np.concatenate([np.empty(0, np.int64), *inexact])

    def _apply(self, stored: NDArray[Any], out: NDArray[Any]) -> NDArray[np.int64]:
        values = stored.view(self.view) if self.view else stored
        missing = np.zeros(stored.shape, np.bool_)
        for fill in self.fills:
            missing |= (stored == fill) | (values == fill)
        out[...] = values
        inexact = np.empty(0, np.int64)
        masked = self.scale is None and self.offset is None and out.dtype.kind == "f"
        if masked and values.dtype.kind in "iu" and values.dtype.itemsize == 8:
            rounded = ~exact_in_float(values, out.dtype) & ~missing
            inexact = np.flatnonzero(rounded.reshape(len(rounded), -1).any(axis=1))
        if self.scale is not None:
            out *= self.scale
        if self.offset is not None:
            out += self.offset
        if self.fills:
            out[missing] = np.nan
        return inexact


def decoding_of(attributes: Mapping[str, Any], stored: Field, where: str) -> Decoding | None:
    """Return how an array with these attributes is decoded; None where its values are as stored.

    Raises `SourceError`, which names `where`, for a scale or an offset that is not one number.
    """
    kind = np.dtype(stored.dtype).kind if stored.fixed else ""
    if not kind or kind == "b":
        return None
    fills = _fills(attributes, stored.dtype)
    scale, offset = (_factor(attributes.get(name), name, where) for name in ("scale_factor", "add_offset"))
    sign = {"true": "u", "false": "i"}.get(_text(attributes.get("_Unsigned", "")), "")
    view = f"{sign}{np.dtype(stored.dtype).itemsize}" if sign and kind in "iu" and kind != sign else ""
    decoding = Decoding(stored, "", scale, offset, fills, np.dtype(view).name if view else "")
    if scale is not None or offset is not None:
        if kind == "f" and not fills and not attributes.keys().isdisjoint(("_FillValue", "missing_value")):
            return replace(decoding, dtype=stored.dtype)  # with a fill value of NaN xarray keeps the dtype
        return replace(decoding, dtype=_scaled_dtype(np.dtype(stored.dtype), scale, offset))
    if fills:
        promoted = "float32" if np.dtype(stored.dtype).itemsize <= 2 else "float64"
        return replace(decoding, dtype=stored.dtype if kind == "f" else promoted)
    if _text(attributes.get("dtype", "")) == "bool":  # how xarray stores bools in netCDF
        return replace(decoding, dtype="bool", view="")
    return replace(decoding, dtype=decoding.view) if view else None


def _fills(attributes: Mapping[str, Any], dtype: str) -> tuple[Any, ...]:
    """Return the values that stand for missing ones, as Python's numbers; NaN needs no decoding."""
    found: dict[Any, None] = {}
    kind = np.dtype(dtype)
    values = [np.ravel(np.asarray(attributes.get(name, []))).tolist() for name in ("_FillValue", "missing_value")]
    for value in (one for some in values for one in some):
        number = float(value) if value in ("Infinity", "-Infinity") else value  # as Zarr writes them
        if type(number) not in (int, float) or isnan(number):
            continue
        if kind.kind == "f":  # one of another width is meant to be a value of the array
            with np.errstate(over="ignore"):
                cast = float(kind.type(number))
            if isfinite(cast) == isfinite(number):
                found[cast] = None
        else:
            found[int(number) if number == number // 1 else number] = None
    return tuple(found)


def _factor(value: Any, name: str, where: str) -> Any:
    """Return a scale or an offset as a numpy scalar of its own dtype, or None.

    A Python number, as from JSON, stays one: with it numpy computes in the dtype of the array, as xarray does.
    """
    if value is None or type(value) in (int, float):
        return value
    array = np.ravel(np.asarray(value))
    if array.size != 1 or array.dtype.kind not in "iuf":
        shown = _text(value)[:_LONGEST]
        raise SourceError(f"{where} has the {name} {shown!r}, which is not one number", "keep it as stored with --raw")
    return array.astype(array.dtype.newbyteorder("="))[0]


def _scaled_dtype(stored: np.dtype[Any], scale: Any, offset: Any) -> str:
    """Return the dtype that xarray chooses for packed values."""
    types = {np.asarray(factor).dtype.name for factor in (scale, offset) if factor is not None}
    wide = stored.kind in "iu" and stored.itemsize == 4 and offset is not None
    same = len(types) == 1 and (scale is not None) and not wide
    return "float32" if same and types == {"float32"} else "float64"


@dataclass(frozen=True)
class Decoded:
    """A container whose packed arrays are decoded; see `Container`."""

    container: Container
    decodings: Mapping[str, Decoding]

    @property
    def where(self) -> str:
        """The URL, for messages."""
        return self.container.where

    @property
    def num_samples(self) -> int:
        """The length of every array."""
        return self.container.num_samples

    @property
    def fields(self) -> Mapping[str, Field]:
        """One field for each array, of its decoded values."""
        return {**self.container.fields, **{name: one.field for name, one in self.decodings.items()}}

    def read(self, rows: NDArray[np.int64], into: Into, note: Note) -> None:
        """Fill the columns; see `Container`."""
        stored: dict[str, NDArray[Any]] = {
            name: np.empty((len(rows), *one.stored.shape), np.dtype(one.stored.dtype).newbyteorder("<"))
            for name, one in self.decodings.items()
        }
        self.container.read(rows, {**into, **stored}, note)
        for name, one in self.decodings.items():
            column = into[name]
            assert isinstance(column, np.ndarray)
            for row in one.apply(stored.pop(name), column).tolist():
                note(name, row, f"holds a whole number that {one.dtype} does not hold exactly: keep it with --raw")


def decoded(
    container: Container, attributes: Mapping[str, Mapping[str, Any]], raw: bool
) -> tuple[Container, dict[str, Any]]:
    """Return the container with its packed arrays decoded, unless they are kept `raw`, and what the notes tell.

    `attributes` are those of each field. Raises `SourceError` as `decoding_of`.
    """
    decodings: dict[str, Decoding] = {}
    for name, field in container.fields.items():
        one = None if raw else decoding_of(attributes.get(name, {}), field, f"{container.where}: {name!r}")
        if one is not None:
            decodings[name] = one
    notes = {name: told(some) for name, some in attributes.items()}
    for name in decodings:
        notes[name] = {key: value for key, value in notes[name].items() if key not in PACKING}
    notes = {name: some for name, some in notes.items() if some}
    said: dict[str, Any] = {"attributes": notes} if notes else {}
    if not decodings:
        return container, said
    return Decoded(container, decodings), {**said, "decoded": {name: str(one) for name, one in decodings.items()}}


def check_packing(scans: Sequence[tuple[Container, Mapping[str, Any]]]) -> None:
    """Raise `SourceError` where files whose values are kept as stored are packed in different ways."""
    first, notes = scans[0]
    ours = _packing(notes)
    for other, theirs in scans[1:]:
        name = next((name for name, packing in _packing(theirs).items() if packing != ours.get(name, {})), None)
        if name is not None:
            problem = f"{name!r} of {first.where} and {other.where} is packed in different ways"
            raise SourceError(problem, "leave --raw out, or convert the files on their own")


def _packing(notes: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    attributes: Mapping[str, Mapping[str, str]] = notes.get("attributes", {})
    return {name: {key: some[key] for key in PACKING if key in some} for name, some in attributes.items()}
