"""Keys that join the samples of a dataset to others: the values of a field, or the numbers of the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError
from streamloader.format.codecs import Column
from streamloader.format.deleted import Remaining
from streamloader.format.manifest import Field, Manifest
from streamloader.format.reader import FieldReader, read_columns
from streamloader.storage.store import Store

INDEX = "index"  # the numbers of the samples, unless the dataset has a field of this name
NAMED = 3  # keys that are named in an error


def read_keys(store: Store, manifest: Manifest, on: str, remaining: Remaining | None) -> NDArray[Any]:
    """Return the key of each sample: its value of the field `on`, or its number for "index".

    Raises `FieldError` if there is no such field, or if it is no key, and as `read_columns`.
    """
    if on == INDEX and on not in manifest.fields:
        return np.arange(manifest.num_remaining)
    reader, where = FieldReader(store, manifest, on, remaining), f"field {on!r} of {store.url}"
    check_key(reader.layout.field, where)
    return as_keys(read_columns({on: reader}, 0, manifest.num_remaining)[on])


def check_key(field: Field, where: str) -> None:
    """Raise `FieldError` for a field that is no key."""
    if not (field.kind in ("text", "bytes") or (field.fixed and field.shape == ())):
        raise FieldError(f"{where} is {field}", "join by a field with one number or text for each sample")


def as_keys(column: Column) -> NDArray[Any]:
    """Return keys as an array of numbers, or of bytes objects."""
    return column if isinstance(column, np.ndarray) else np.fromiter(column, object, len(column))


def find_rows(wanted: NDArray[Any], found: NDArray[Any], where: str) -> NDArray[np.int64]:
    """Return for each of the keys `wanted` its row in `found`, -1 if that lacks it.

    Raises `FieldError` if `found`, which `where` names, has a key twice, or keys of another type.
    """
    if (wanted.dtype == object) != (found.dtype == object):
        raise FieldError(f"{where} is text on one side and a number on the other", "give both one type")
    if wanted.dtype.kind != found.dtype.kind and np.result_type(wanted, found).kind == "f":
        wanted, found = wanted.astype(object), found.astype(object)  # integers beside others, which numpy would round
    order = np.argsort(found, kind="stable")
    ordered = found[order]
    if len(twice := ordered[1:][ordered[1:] == ordered[:-1]]):
        raise FieldError(f"{where} has {_named(twice)} in several rows", "give each key one row")
    places = np.searchsorted(ordered, wanted)
    known = places < len(ordered)
    known[known] = ordered[places[known]] == wanted[known]
    rows = np.full(len(wanted), -1, np.int64)
    rows[known] = order[places[known]]
    return rows


def match_rows(wanted: NDArray[Any], found: NDArray[Any], where: str) -> NDArray[np.int64]:
    """Return for each of the keys `wanted` its row in `found`, as `find_rows`; if one is missing raise `FieldError`."""
    rows = find_rows(wanted, found, where)
    check_found(wanted[rows < 0], where)
    return rows


def check_found(missing: NDArray[Any], where: str, remedy: str = "give every sample a row") -> None:
    """Raise `FieldError` if there are keys that `where` lacks."""
    if len(missing):
        raise FieldError(f"{where} lacks {_named(missing)}", remedy)


def _named(keys: NDArray[Any]) -> str:
    """Name some keys for a message."""
    shown = [key.decode(errors="replace") if isinstance(key, bytes) else str(key) for key in keys[:NAMED].tolist()]
    more = f" and {len(keys) - NAMED:,} more" if len(keys) > NAMED else ""
    return f"the keys {', '.join(shown)}{more}" if len(keys) > 1 else f"the key {shown[0]}"
