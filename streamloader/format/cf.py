"""Unpacks values of arrays by netCDF's CF conventions: scale, offset, fill values and valid range.

Section 8.1 of the CF conventions (packed data), and section 2.5.1 (missing data, valid and actual range). Unpacked
values are float32, floats keep their width, and missing values are NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FormatError

PIECE_ELEMENTS = 1 << 16  # unpacked at once, so that temporary float64 values fit in a core's cache


@dataclass(frozen=True)
class Unpacking:
    """How stored values become floats: those in `fills` or outside `valid` become NaN, others value * scale + offset.

    `stored`: the native dtype of stored values. `view`: the dtype they have by the attribute `_Unsigned`.
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
        return self.stored.name if self.stored.kind == "f" else "float32"

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
    valid = _numbers(attributes, "valid_range", where)
    low = _number(attributes, "valid_min", where)
    high = _number(attributes, "valid_max", where)
    bounds = (-np.inf if low is None else low, np.inf if high is None else high)
    if len(valid) == 2:
        bounds = valid[0], valid[1]
    limited = bounds != (-np.inf, np.inf)
    if scale is None and offset is None and not fills and not limited:
        return None
    return Unpacking(stored, view, scale, offset, tuple(dict.fromkeys(fills)), bounds if limited else None)


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
