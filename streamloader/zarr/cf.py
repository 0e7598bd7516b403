"""Unpacks values of arrays by netCDF's CF conventions: scale, offset, fill values and valid range.

Section 8.1 of the CF conventions (packed data), and section 2.5.1 (missing data, valid and actual range). Integers of
up to 16 bits become float32, wider ones float64, which holds all of 32 bits; floats keep their width. Missing values
are NaN.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FormatError

PIECE_ELEMENTS = 1 << 16  # unpacked at once, so that temporary float64 values fit in a core's cache
# Limits in unpacked units are rounded by up to this share of a step: scale, offset and limits may have been float32.
ROUNDED = 0.01
_DIGITS = 300  # of a whole number in a text, more than any dtype has
_LONGEST = 500  # items of an attribute that are shown
_NUMBER = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf)", re.IGNORECASE)


@dataclass(frozen=True)
class Unpacking:
    """How stored values become floats: those in `fills` or outside `valid` become NaN, others value * scale + offset.

    With `_Unsigned` alone, they become integers of the other sign.

    `valid` limits the values before they are scaled. `stored`: the native dtype of stored values. `view`: the dtype
    they have by the attribute `_Unsigned`. `dtype`: that of unpacked values. `wide`: whether they are computed as
    float64, and rounded once.
    """

    stored: np.dtype[Any]
    view: np.dtype[Any]
    dtype: str
    scale: Any = None
    offset: Any = None
    fills: tuple[float, ...] = ()
    valid: tuple[float, float] | None = None
    wide: bool = True

    def __str__(self) -> str:
        scale = "" if self.scale is None else f" * {self.scale}"
        offset = "" if self.offset is None else f" + {self.offset}"
        fills = f", NaN for {' and '.join(map(str, self.fills))}" if self.fills else ""
        return f"{self.view.name}{scale}{offset}{fills}"

    def apply(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return the unpacked values."""
        with np.errstate(over="ignore"):
            return self.unpack(stored, "float64" if self.wide else self.dtype).astype(self.dtype, copy=False)

    def unpack(self, stored: NDArray[Any], dtype: str = "float64") -> NDArray[Any]:
        """Return the unpacked values, computed in a dtype."""
        out = stored.view(self.view).astype(dtype)
        if self.scale is not None:
            out *= self.scale
        if self.offset is not None:
            out += self.offset
        if self.fills or self.valid is not None:
            out[self.missing(stored)] = np.nan
        return out

    def missing(self, stored: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which values are missing: fill values, and those outside the valid range."""
        values, missing = stored.view(self.view), np.zeros(stored.shape, np.bool_)
        for fill in self.fills:
            missing |= (values == fill) | (stored == fill)
        if self.valid is not None:
            missing |= (values < self.valid[0]) | (values > self.valid[1])
        return missing

    @cached_property
    def _table(self) -> NDArray[Any] | None:
        """The unpacked value of every stored value of up to 16 bits, by its bits; None for wider ones."""
        size = self.stored.itemsize
        if size > 2 or self.stored.kind == "f":
            return None
        return self.apply(np.arange(1 << 8 * size, dtype=f"u{size}").view(self.stored))

    def write(self, stored: NDArray[Any], out: NDArray[Any]) -> None:
        """Unpack values into `out`, which has the same shape."""
        stored = stored.astype(self.stored, copy=False)
        if self._table is not None:
            bits = stored.view(f"u{self.stored.itemsize}")
            if out.flags.c_contiguous and out.dtype == self._table.dtype:
                np.take(self._table, bits, out=out, mode="clip")  # the only mode that does not buffer `out`
            else:
                out[...] = self._table[bits]
            return
        stored, out = np.atleast_1d(stored, out)
        rows = max(1, PIECE_ELEMENTS * len(stored) // max(1, stored.size))
        for first in range(0, len(stored), rows):
            out[first : first + rows] = self.apply(np.ascontiguousarray(stored[first : first + rows]))


def unpacking_of(
    attributes: Mapping[str, Any], dtype: np.dtype[Any], where: str, *, as_xarray: bool = False
) -> Unpacking | None:
    """Return how the values of an array with these attributes are unpacked; None if they are kept as they are.

    `as_xarray`: as its `mask_and_scale` does, which has no valid range, and computes in the dtype that it returns.
    Raises `FormatError` for an attribute that is not a number.
    """
    stored = dtype.newbyteorder("=")
    if stored.kind not in "iuf":
        return None
    sign = {"true": "u", "false": "i"}.get(attribute_text(attributes.get("_Unsigned", "")).lower(), stored.kind)
    view = np.dtype(f"{sign}{stored.itemsize}") if stored.kind in "iu" else stored
    scale, offset = (_factor(attributes, name, where, texts=not as_xarray) for name in ("scale_factor", "add_offset"))
    fills = _fills(attributes, stored, where)
    limits = None if as_xarray else _valid_limits(attributes, view, scale, offset)
    scaled = scale is not None or offset is not None
    changes = scaled or fills or limits is not None
    name = stored.name if stored.kind == "f" else "float32" if stored.itemsize <= 2 else "float64"
    if as_xarray and scaled:
        name = _scaled_dtype(attributes, stored, scale, offset, fills)
    elif not changes:
        changes, name = view != stored, view.name  # integers of the other sign stay integers
        if as_xarray and attribute_text(attributes.get("dtype")) == "bool":  # how xarray stores bools in netCDF
            changes, name = True, "bool"
    wide = not as_xarray and name.startswith("float")
    return Unpacking(stored, view, name, scale, offset, fills, limits, wide) if changes else None


def _scaled_dtype(
    attributes: Mapping[str, Any], stored: np.dtype[Any], scale: Any, offset: Any, fills: Collection[float]
) -> str:
    """Return the dtype that xarray chooses for packed values."""
    if stored.kind == "f" and not fills and not attributes.keys().isdisjoint(("_FillValue", "missing_value")):  # NaN
        return stored.name
    types = {np.asarray(factor).dtype.name for factor in (scale, offset) if factor is not None}
    wide = stored.kind in "iu" and stored.itemsize == 4 and offset is not None
    return "float32" if types == {"float32"} and scale is not None and not wide else "float64"


def _valid_limits(
    attributes: Mapping[str, Any], view: np.dtype[Any], scale: float | None, offset: float | None
) -> tuple[float, float] | None:
    """Return the least and the greatest valid value before scaling, None if the attributes limit none.

    `view`: the dtype of stored values. Limits that are floats where these are integers are of unpacked values. What is
    no number, or no range, is ignored.
    """
    given = [_limits(attributes, "valid_min", 1) or [-np.inf], _limits(attributes, "valid_max", 1) or [np.inf]]
    low, high = _limits(attributes, "valid_range", 2) or [limit for (limit,) in given]
    unpacked = any(isinstance(limit, float) and isfinite(limit) for limit in (low, high))
    if unpacked and view.kind in "iu" and (scale is not None or offset is not None):
        # as Python's floats: numpy's integers overflow, and its float32 would round the limits
        step = float(scale or 1)
        low, high = ((float(limit) - float(offset or 0)) / step for limit in (low, high))
        low, high = (low - ROUNDED, high + ROUNDED) if step > 0 else (high - ROUNDED, low + ROUNDED)
    elif "_Unsigned" in attributes and view.kind in "iu":
        low, high = (_reinterpreted(limit, view) for limit in (low, high))
    return None if low > high or (low, high) == (-np.inf, np.inf) else (float(low), float(high))


def _limits(attributes: Mapping[str, Any], name: str, count: int) -> list[float]:
    """Return the numbers of a limit, a list or a text; empty unless it has `count`. Those without a point are int."""
    found = [number.lower() for number in _NUMBER.findall(str(attributes.get(name)))]
    if len(found) != count:
        return []
    # Python refuses to read whole numbers of many digits
    return [float(x) if set(x) & set(".ei") or len(x) > _DIGITS else int(x) for x in found]


def _reinterpreted(limit: float, view: np.dtype[Any]) -> float:
    """Return a limit of values of the other sign as that of `view`, with the same bits."""
    least, size = int(np.iinfo(view).min), 1 << 8 * view.itemsize
    return (limit - least) % size + least if -size // 2 <= limit < size else limit


def attribute_text(value: Any) -> str:
    """Return an attribute as text; of many numbers, the first ones."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray | list | tuple):
        items = value.reshape(-1) if isinstance(value, np.ndarray) else value
        return ", ".join(attribute_text(item) for item in items[:_LONGEST])
    return str(value)


def _numbers(attributes: Mapping[str, Any], name: str, where: str) -> list[Any]:
    """Return the numbers of an attribute: one, a list or an array, as Python numbers; texts are read."""
    try:
        values = np.ravel(np.asarray(attributes.get(name, []))).tolist()
        found = [value if type(value) in (int, float) else float(value) for value in values if value is not None]
        list(map(float, found))  # no array can have what is beyond all floats
    except (TypeError, ValueError, OverflowError) as error:
        raise _not_a_number(attributes, name, where) from error
    return found


def _not_a_number(attributes: Mapping[str, Any], name: str, where: str) -> FormatError:
    problem = f"{where} has the {name} {attribute_text(attributes[name])!r:.60}, which is not one number"
    return FormatError(problem, "read it as it is stored with decode_cf=False")


def _factor(attributes: Mapping[str, Any], name: str, where: str, *, texts: bool) -> Any:
    """Return a scale or an offset, None if there is none: a numpy scalar of its dtype, or a Python number.

    With the latter, as JSON has it, numpy computes in the dtype of the array, as xarray does. `texts`: they are read.
    """
    value, numbers = attributes.get(name), _numbers(attributes, name, where)
    if len(numbers) > 1 or (isinstance(value, str | bytes) and not texts):
        raise _not_a_number(attributes, name, where)
    if numbers and isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "iuf":
        return np.ravel(value.astype(value.dtype.newbyteorder("=")))[0]
    return numbers[0] if numbers else None


def _fills(attributes: Mapping[str, Any], dtype: np.dtype[Any], where: str) -> tuple[float, ...]:
    """Return the values that represent missing ones, as Python numbers; NaN needs no unpacking."""
    fills: dict[float, None] = {}  # a set in order
    for number in (number for name in ("_FillValue", "missing_value") for number in _numbers(attributes, name, where)):
        if dtype.kind == "f" and not isnan(number):  # a fill value may have another width than the array
            with np.errstate(over="ignore"):
                cast = float(dtype.type(number))
            if isfinite(cast) == isfinite(number):
                fills[cast] = None
        elif not isnan(number):
            fills[int(number) if number == number // 1 else number] = None
    return tuple(fills)
