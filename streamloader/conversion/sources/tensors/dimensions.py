"""Arrays with named dimensions, as xarray and netCDF write them: which dimension is the samples', and what is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from streamloader.conversion.sources.tensors.arrays import LEAVE_OUT
from streamloader.errors import SourceError

# what one needs to understand values that are kept as stored
ATTRIBUTES = (
    *("_FillValue", "add_offset", "calendar", "flag_meanings", "flag_values", "long_name", "missing_value"),
    *("scale_factor", "standard_name", "units", "valid_max", "valid_min", "valid_range", "_Unsigned"),
)
_LONGEST = 500  # characters of an attribute that are kept

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
