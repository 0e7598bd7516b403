"""Unpacks values of arrays by netCDF's CF conventions: scale, offset, fill values and valid range.

Section 8.1 of the CF conventions (packed data), and section 2.5.1 (missing data, valid and actual range). Integers of
up to 16 bits become float32, wider ones float64, which holds all of 32 bits; floats keep their width. Missing values
are NaN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
_NUMBER = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf)", re.IGNORECASE)


@dataclass(frozen=True)
class Unpacking:
    """How stored values become floats: those in `fills` or outside `valid` become NaN, others value * scale + offset.

    `valid` limits the values before they are scaled. `stored`: the native dtype of stored values. `view`: the dtype
    they have by the attribute `_Unsigned`.
    """

    stored: np.dtype[Any]
    view: np.dtype[Any]
    scale: float | None = None
    offset: float | None = None
    fills: tuple[float, ...] = ()
    valid: tuple[float, float] | None = None

    @property
    def dtype(self) -> str:
        """The dtype of unpacked values."""
        return self.stored.name if self.stored.kind == "f" else "float32" if self.stored.itemsize <= 2 else "float64"

    def apply(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return the unpacked values. They are computed as float64 and rounded once."""
        with np.errstate(over="ignore"):
            return self.unpack(stored).astype(self.dtype)

    def unpack(self, stored: NDArray[Any]) -> NDArray[np.float64]:
        """Return the unpacked values as float64."""
        values = stored.view(self.view)
        out = values.astype(np.float64)
        missing = np.zeros(stored.shape, np.bool_)
        for fill in self.fills:
            missing |= (values == fill) | (stored == fill)
        if self.valid is not None:
            missing |= (values < self.valid[0]) | (values > self.valid[1])
        if self.scale is not None:
            out *= self.scale
        if self.offset is not None:
            out += self.offset
        out[missing] = np.nan
        return out

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


def unpacking_of(attributes: Mapping[str, Any], dtype: np.dtype[Any], where: str) -> Unpacking | None:
    """Return how the values of an array with these attributes are unpacked; None if they are kept as they are.

    Raises `FormatError` for an attribute that is not a number.
    """
    stored = dtype.newbyteorder("=")
    if stored.kind not in "iuf":
        return None
    sign = {"true": "u", "false": "i"}.get(str(attributes.get("_Unsigned", "")).lower(), stored.kind)
    view = np.dtype(f"{sign}{stored.itemsize}") if stored.kind in "iu" else stored
    scale, offset = (_number(attributes, name, where) for name in ("scale_factor", "add_offset"))
    fills = [*_numbers(attributes, "_FillValue", where), *_numbers(attributes, "missing_value", where)]
    fills = [stored.type(fill).item() for fill in fills if not isnan(fill)] if stored.kind == "f" else fills
    limits = _valid_limits(attributes, view, scale, offset)
    if scale is None and offset is None and not fills and limits is None:
        return None
    return Unpacking(stored, view, scale, offset, tuple(dict.fromkeys(fills)), limits)


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
        low, high = ((limit - (offset or 0)) / (scale or 1) for limit in (low, high))
        low, high = (low - ROUNDED, high + ROUNDED) if (scale or 1) > 0 else (high - ROUNDED, low + ROUNDED)
    elif "_Unsigned" in attributes and view.kind in "iu":
        low, high = (_reinterpreted(limit, view) for limit in (low, high))
    return None if low > high or (low, high) == (-np.inf, np.inf) else (float(low), float(high))


def _limits(attributes: Mapping[str, Any], name: str, count: int) -> list[float]:
    """Return the numbers of a limit, a list or a text; empty unless it has `count`. Those without a point are int."""
    found = [number.lower() for number in _NUMBER.findall(str(attributes.get(name)))]
    return [float(x) if set(x) & set(".ei") else int(x) for x in found] if len(found) == count else []


def _reinterpreted(limit: float, view: np.dtype[Any]) -> float:
    """Return a limit of values of the other sign as that of `view`, with the same bits."""
    least, size = int(np.iinfo(view).min), 1 << 8 * view.itemsize
    return (limit - least) % size + least if -size // 2 <= limit < size else limit


def _numbers(attributes: Mapping[str, Any], name: str, where: str) -> list[float]:
    value = attributes.get(name)
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    try:
        return [float(item.replace("Infinity", "inf")) if isinstance(item, str) else float(item) for item in items]
    except (TypeError, ValueError) as error:
        problem = f"{where} has the {name} {value!r:.60}, which is not a number"
        raise FormatError(problem, "read it as it is stored with decode_cf=False") from error


def _number(attributes: Mapping[str, Any], name: str, where: str) -> float | None:
    numbers = _numbers(attributes, name, where)
    if len(numbers) > 1:
        problem = f"{where} has {len(numbers)} numbers as {name}"
        raise FormatError(problem, "read it as it is stored with decode_cf=False")
    return numbers[0] if numbers else None
