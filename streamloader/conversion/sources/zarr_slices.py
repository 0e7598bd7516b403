"""Rows of Zarr arrays, and slices of arrays as fields, `z@500` as `z_500`: the source of `--rechunk`.

Chunks are read as when arrays are read in place, each once for all slices in it; slices are unpacked to floats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import arrays
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.fields import FieldSelection
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.errors import FormatError, SourceError
from streamloader.format.cf import Unpacking, unpacking_of
from streamloader.format.manifest import Field
from streamloader.format.zarr_metadata import ZarrArray, read_group
from streamloader.format.zarr_reader import ArrayReader, Target, find_index
from streamloader.storage.store import Store

_COORDINATE = re.compile("@[^=]*=")  # in `z@level=500`, which becomes `z_500`
PIECE_BYTES = 64 << 20  # decoded bytes of the rows that are read at once, unless those of one chunk are more


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

    def read(self, store: Store, rows: NDArray[np.int64], into: arrays.Into) -> None:
        """Read ascending rows of every field; lists are extended by UTF-8 texts or bytes.

        Each chunk is read once, in pieces of neighbouring chunks of up to `PIECE_BYTES`.
        """
        reader, chunk = ArrayReader(store, self.array), self.array.chunks[0]
        number = rows // chunk
        steps, most = np.diff(number), max(1, PIECE_BYTES // (max(1, self._row_bytes) * chunk))
        cuts = np.flatnonzero((steps > 1) | ((steps == 1) & (number[1:] % most == 0))) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(rows)] if len(rows) else []):
            dtype = self.array.values.dtype.newbyteorder("=")
            piece = {
                name: np.empty(high - low, dtype) if isinstance(column, list) else column[low:high]
                for name, column in into.items()
            }
            self._read_piece(reader, rows[low:high], piece)
            for name, column in into.items():
                if isinstance(column, list):
                    items = piece[name].tolist()
                    column.extend(x.encode("utf-8", "surrogatepass") if isinstance(x, str) else bytes(x) for x in items)

    @property
    def _row_bytes(self) -> int:
        return prod(self.array.shape[1:]) * self.array.values.dtype.itemsize

    def _read_piece(self, reader: ArrayReader, rows: NDArray[np.int64], into: Mapping[str, NDArray[Any]]) -> None:
        """Read rows of neighbouring chunks. If some are left out, in boxes of about `PIECE_BYTES` with all rows."""
        first, count = int(rows[0]), int(rows[-1] - rows[0]) + 1
        dense, inner = count == len(rows), self.array.shape[1:]
        for low, high in [((0,) * len(inner), inner)] if dense else self._boxes(count):
            found: dict[str, tuple[tuple[slice, ...], NDArray[Any]]] = {}
            targets = []
            for name, column in into.items():
                part = self._part(name, low, high)
                if part is None:
                    continue
                out = column if dense else np.empty((count, *(each.stop - each.start for each in part)), column.dtype)
                found[name] = part, out
                picks, dims = self.picks[name], self.array.dims
                origin = (first, *(picks.get(dim, at) for dim, at in zip(dims[1:], low, strict=True)))
                picked = tuple(axis for axis, dim in enumerate(dims) if axis and dim in picks)
                targets.append(Target(np.expand_dims(out, picked), origin))
            reader.read_into(targets, self.unpacking)
            for name, (part, out) in found.items() if not dense else ():
                into[name][(slice(None), *part)] = out[rows - first]

    def _part(self, name: str, low: Sequence[int], high: Sequence[int]) -> tuple[slice, ...] | None:
        """Return the part of a field inside a box of the inner dimensions, None if its slice is outside."""
        part = []
        for dim, a, b in zip(self.array.dims[1:], low, high, strict=True):
            pick = self.picks[name].get(dim)
            if pick is None:
                part.append(slice(a, b))
            elif not a <= pick < b:
                return None
        return tuple(part)

    def _boxes(self, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield boxes [low, high) of whole chunks of the inner dimensions, of which `count` rows fit into a piece."""
        inner, chunks = self.array.shape[1:], self.array.chunks[1:]
        steps = list(inner)
        for axis, chunk in enumerate(chunks):
            if count * prod(steps) * self.array.values.dtype.itemsize > PIECE_BYTES:
                steps[axis] = chunk
        for low in product(*(range(0, n, step) for n, step in zip(inner, steps, strict=True))):
            yield low, tuple(min(a + step, n) for a, step, n in zip(low, steps, inner, strict=True))


def read_members(store: Store, members: Sequence[Member], rows: NDArray[np.int64], into: arrays.Into) -> None:
    """Read rows of the fields of each array. Raises `SourceError`, which names the array, for damaged chunks."""
    for member in members:
        columns = {name: into[name] for name in member.picks if name in into}
        if columns:
            with named(f"{store.url}/{member.array.path}".rstrip("/") + " cannot be read"):
                member.read(store, rows, columns)


@contextmanager
def named(problem: str) -> Iterator[None]:
    """Raise a `FormatError` of the reader as `SourceError`, with the problem."""
    try:
        yield
    except FormatError as error:
        raise SourceError(f"{problem}: {error.problem}", error.remedy) from error


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
    read = partial(read_members, store, tuple(members.values()))
    container = arrays.Container(
        store.url, arrays.common_length(lengths, listing.url), fields, read, {"arrays": channels}
    )
    files = tuple(info for info in listing.files if not inner or info.path.startswith(f"{inner}/"))
    return arrays.stack(listing.url, files, [container])
