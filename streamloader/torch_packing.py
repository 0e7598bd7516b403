"""Which ragged fields become rows of one length, as `pack=` of `StreamingDataset` says it: checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from streamloader.errors import FieldError, UsageError
from streamloader.format.manifest import Field
from streamloader.options import Pack

PackChoice = None | Mapping[str, "Pack | int"]


def choose_packs(
    fields: Mapping[str, Field], choice: PackChoice, *, batch_size: int | None, transformed: bool
) -> dict[str, Pack]:
    """Return how each field that `choice` names is packed; a number is the length of the rows.

    Raises `UsageError` where batches cannot be packed, or for a length below 1, and `FieldError` for a field that is
    not fetched, that holds no plain sequences of numbers, or whose dtype does not hold the padding.
    """
    if choice is None:
        return {}
    if not isinstance(choice, Mapping):
        raise UsageError(f"pack={choice!r} names no field", "give a dict, like pack={'tokens': 2049}")
    if choice and batch_size is None:
        raise UsageError(
            f"pack={dict(choice)} with batch_size=None", "give a batch_size: the rows are cut from a batch"
        )
    if choice and transformed:
        raise UsageError(f"pack={dict(choice)} with a transform", "leave one of them out: a transform gets documents")
    return {name: _pack(name, fields.get(name), wish) for name, wish in choice.items()}


def _pack(name: str, field: Field | None, wish: Pack | int) -> Pack:
    pack = wish if isinstance(wish, Pack) else Pack(wish)
    if field is None or field.kind != "ragged" or field.shape:
        found = "is no field that is fetched" if field is None else f"is {field}"
        raise FieldError(f"pack names {name!r}, which {found}", "name a field of documents, like ragged:int32")
    if not _holds(np.dtype(field.dtype), pack.pad):
        raise FieldError(f"pack fills {name!r} with {pack.pad}, which is no {field.dtype}", "give another Pack(pad=)")
    return pack


def _holds(dtype: np.dtype[Any], pad: int | float) -> bool:
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        return -most <= pad <= most or pad in (math.inf, -math.inf) or math.isnan(pad)
    low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return low <= pad <= high and pad == int(pad)
