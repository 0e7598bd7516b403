"""Slices of Zarr arrays as fields, `z@500` as `z_500`: the source of `--rechunk`.

Chunks are read by our own reader, each once for all slices in it, and unpacked to float32 as when arrays are read in
place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import arrays
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.fields import FieldSelection
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.errors import SourceError
from streamloader.format.cf import Unpacking, unpacking_of
from streamloader.format.manifest import Field
from streamloader.format.zarr_metadata import ZarrArray, read_group
from streamloader.format.zarr_reader import ArrayReader, Target, find_index
from streamloader.storage.store import Store

_COORDINATE = re.compile("@[^=]*=")  # in `z@level=500`, which becomes `z_500`
PIECE_BYTES = 256 << 20  # decoded bytes of rows that are read at once


@dataclass(frozen=True, eq=False)
class Member:
    """An array, and the index on other dimensions than the first of each field that is cut from it."""

    array: ZarrArray
    unpacking: Unpacking | None
    picks: Mapping[str, Mapping[str, int]]

    def field(self, name: str) -> Field:
        """Return the type of one of the fields."""
        inner = [
            n for dim, n in zip(self.array.dims[1:], self.array.shape[1:], strict=True) if dim not in self.picks[name]
        ]
        return Field("tensor", self.array.dtype.name if self.unpacking is None else self.unpacking.dtype, tuple(inner))

    def read(self, store: Store, rows: NDArray[np.int64], into: Mapping[str, NDArray[Any]]) -> None:
        """Read ascending rows of every field, by runs of neighbouring ones."""
        reader, dims = ArrayReader(store, self.array), self.array.dims
        row_bytes = max(1, sum(prod(column.shape[1:]) * column.itemsize for column in into.values()))
        most = max(1, PIECE_BYTES // row_bytes // self.array.chunks[0]) * self.array.chunks[0]
        cuts = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] % most == 0)) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(rows)] if len(rows) else []):
            targets = []
            for name, column in into.items():
                picks = self.picks[name]
                first = (int(rows[low]), *(picks.get(dim, 0) for dim in dims[1:]))
                picked = tuple(axis for axis, dim in enumerate(dims) if axis and dim in picks)
                targets.append(Target(np.expand_dims(column[low:high], picked), first))
            reader.read_into(targets, self.unpacking)


def open_slices(listing: Listing, selection: FieldSelection) -> Source:
    """Return the source of the slices `selection.rechunk`, along the first dimension of their arrays.

    Raises `FieldError` for an unknown array or value, and `SourceError` for arrays of unequal first dimensions.
    """
    inner = listing.inner.strip("/")
    store = listing.store.child(inner) if inner else listing.store
    names = field_names([_COORDINATE.sub("@", name) for name in selection.rechunk], listing.url)
    channels = dict(zip(names.values(), selection.rechunk, strict=True))
    group = read_group(store, [channel.partition("@")[0] for channel in channels.values()])
    members: dict[str, Member] = {}
    lengths: dict[str, int] = {}
    for name, channel in channels.items():
        source = channel.partition("@")[0]
        array = group.array(source)
        if not array.dims:
            raise SourceError(f"{store.url}/{source} is a single value", "leave it out")
        picks = find_index(store, group, channel, {array.dims[0]})
        lengths[source] = array.shape[0]
        unpacking = (
            None if selection.raw else unpacking_of(array.netcdf_attributes, array.dtype, f"{store.url}/{source}")
        )
        known = members.get(source, Member(array, unpacking, {}))
        members[source] = Member(array, unpacking, {**known.picks, name: picks})
    fields = {name: member.field(name) for member in members.values() for name in member.picks}
    fields = {name: fields[name] for name in channels}
    read = partial(_read, store, tuple(members.values()))
    container = arrays.Container(
        store.url, arrays.common_length(lengths, listing.url), fields, read, {"arrays": channels}
    )
    files = tuple(info for info in listing.files if not inner or info.path.startswith(f"{inner}/"))
    return arrays.stack(listing.url, files, [container])


def _read(store: Store, members: tuple[Member, ...], rows: NDArray[np.int64], into: arrays.Into) -> None:
    for member in members:
        columns = {name: into[name] for name in member.picks if name in into}
        if columns:
            member.read(store, rows, columns)
