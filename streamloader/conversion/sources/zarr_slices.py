"""Rows of Zarr arrays, and slices of arrays as fields, `z@500` as `z_500`: the source of `--rechunk`.

Chunks are read as when arrays are read in place, each once for all slices in it; slices are unpacked to floats.
Coordinates, and arrays without the sample axis, are stored beside the fields (SPEC.md, section 15): the dataset is then
read in place as the store is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import arrays
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.fields import FieldSelection
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.errors import SourceError
from streamloader.format.codecs import with_checksum
from streamloader.format.manifest import Field
from streamloader.format.metadata import group_document, plain_document
from streamloader.storage.store import Store
from streamloader.zarr.cf import Unpacking, unpacking_of
from streamloader.zarr.metadata import ARRAYS, ZarrArray, read_group
from streamloader.zarr.reader import ArrayReader, Target, find_index, parse_channel

_COORDINATE = re.compile("@[^=]*=")  # in `z@level=500`, which becomes `z_500`
PIECE_BYTES = 64 << 20  # decoded bytes of the rows that are read at once, unless those of one chunk are more


@dataclass(frozen=True, eq=False)
class Member:
    """An array, and the index on other dimensions than that of the rows of each field that is cut from it.

    `axis`: the dimension of the rows.
    """

    array: ZarrArray
    unpacking: Unpacking | None
    picks: Mapping[str, Mapping[str, int]]
    axis: int = 0

    @cached_property
    def axes(self) -> list[tuple[str, int, int]]:
        """The name, the length and the chunk of each dimension: that of the rows first, as in a field."""
        axes = list(zip(self.array.dims, self.array.shape, self.array.chunks, strict=True))
        return [axes.pop(self.axis), *axes]

    @property
    def inner(self) -> tuple[int, ...]:
        """The lengths of the other dimensions."""
        return tuple(length for _, length, _ in self.axes[1:])

    def field(self, name: str) -> Field:
        """Return the type of one of the fields."""
        inner = [length for dim, length, _ in self.axes[1:] if dim not in self.picks[name]]
        return Field("tensor", self.array.dtype.name if self.unpacking is None else self.unpacking.dtype, tuple(inner))

    def read(self, store: Store, rows: NDArray[np.int64], into: arrays.Into) -> None:
        """Read ascending rows of every field; lists are extended by UTF-8 texts or bytes.

        Each chunk is read once, in pieces of neighbouring chunks of up to `PIECE_BYTES`.
        """
        reader, chunk = ArrayReader(store, self.array), self.axes[0][2]
        number, row_bytes = rows // chunk, prod(self.inner) * self.array.values.dtype.itemsize
        steps, most = np.diff(number), max(1, PIECE_BYTES // (max(1, row_bytes) * chunk))
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

    def _read_piece(self, reader: ArrayReader, rows: NDArray[np.int64], into: Mapping[str, NDArray[Any]]) -> None:
        """Read rows of neighbouring chunks. If some are left out, in boxes of about `PIECE_BYTES` with all rows."""
        first, count = int(rows[0]), int(rows[-1] - rows[0]) + 1
        dense, inner = count == len(rows), self.inner
        for low, high in [((0,) * len(inner), inner)] if dense else self._boxes(count):
            found: dict[str, tuple[tuple[slice, ...], NDArray[Any]]] = {}
            targets = []
            for name, column in into.items():
                part = self._part(name, low, high)
                if part is None:
                    continue
                out = column if dense else np.empty((count, *(each.stop - each.start for each in part)), column.dtype)
                found[name] = part, out
                picks = self.picks[name]
                origin = [picks.get(dim, at) for (dim, *_), at in zip(self.axes[1:], low, strict=True)]
                origin.insert(self.axis, first)
                picked = tuple(n for n, (dim, *_) in enumerate(self.axes) if n and dim in picks)
                targets.append(Target(np.moveaxis(np.expand_dims(out, picked), 0, self.axis), tuple(origin)))
            reader.read_into(targets, self.unpacking)
            for name, (part, out) in found.items() if not dense else ():
                into[name][(slice(None), *part)] = out[rows - first]

    def _part(self, name: str, low: Sequence[int], high: Sequence[int]) -> tuple[slice, ...] | None:
        """Return the part of a field inside a box of the inner dimensions, None if its slice is outside."""
        part = []
        for (dim, *_), a, b in zip(self.axes[1:], low, high, strict=True):
            pick = self.picks[name].get(dim)
            if pick is None:
                part.append(slice(a, b))
            elif not a <= pick < b:
                return None
        return tuple(part)

    def _boxes(self, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield boxes [low, high) of whole chunks of the inner dimensions, of which `count` rows fit into a piece."""
        steps = list(self.inner)
        for axis, (*_, chunk) in enumerate(self.axes[1:]):
            if count * prod(steps) * self.array.values.dtype.itemsize > PIECE_BYTES:
                steps[axis] = chunk
        for low in product(*(range(0, n, step) for n, step in zip(self.inner, steps, strict=True))):
            yield low, tuple(min(a + step, n) for a, step, n in zip(low, steps, self.inner, strict=True))


def read_members(store: Store, members: Sequence[Member], rows: NDArray[np.int64], into: arrays.Into) -> None:
    """Read rows of the fields of each array. Raises `SourceError`, which names the array, for damaged chunks."""
    for member in members:
        columns = {name: into[name] for name in member.picks if name in into}
        if columns:
            with arrays.reading(f"{store.url}/{member.array.path}".rstrip("/") + " cannot be read"):
                member.read(store, rows, columns)


def open_slices(listing: Listing, selection: FieldSelection) -> Source:
    """Return the source of the arrays and slices `selection.rechunk`, along the sample axis.

    Arrays along that axis alone become fields too, and coordinates and arrays without it are stored beside the fields.
    Raises `FieldError` for an unknown array or value, and `SourceError` if it is unknown which axis that is.
    """
    inner = listing.inner.strip("/")
    store = listing.store.child(inner) if inner else listing.store
    group = read_group(store, [channel.partition("@")[0] for channel in selection.rechunk])
    store = group.store
    chosen = {channel: group.array(channel.partition("@")[0]) for channel in selection.rechunk}
    firsts = {array.dims[:1]: channel for channel, array in chosen.items()}
    axis = selection.sample_axis or "".join(next(iter(firsts)))
    if not any(axis in array.dims for array in chosen.values()) or not (selection.sample_axis or len(firsts) == 1):
        found = ", ".join(f"{''.join(dim) or 'none'} of {channel}" for dim, channel in firsts.items())
        problem = f"the samples of {store.url} lie along {axis or 'no dimension'!r}, and first dimensions are {found}"
        raise SourceError(problem, "name the dimension of the samples with sample_axis= (--sample-axis)")
    used = {dim for array in chosen.values() for dim in array.dims}
    kept = {name: array for name, array in group.dense.items() if array.holds_numbers and name not in chosen}
    others = [(dim,) for dim in used - {axis}]
    coordinates = {n: a for n, a in kept.items() if a.dims == (n.rpartition("/")[2],) and a.dims in others}
    along = {name: array for name, array in chosen.items() if axis in array.dims}
    along |= {name: array for name, array in kept.items() if array.dims == (axis,)}  # `where=` compares them
    beside = coordinates | {name.partition("@")[0]: array for name, array in chosen.items() if name not in along}
    short = field_names([_COORDINATE.sub("@", name) for name in along], listing.url).values()
    names = dict(zip(short, along, strict=True))
    members: dict[str, Member] = {}
    for name, channel in names.items():
        source, array = channel.partition("@")[0], along[channel]
        raw = selection.raw or channel == axis or channel in kept  # it is unpacked when it is read in place
        unpacking = None if raw else unpacking_of(array.netcdf_attributes, array.dtype, f"{store.url}/{source}")
        known = members.get(source, Member(array, unpacking, {}, array.dims.index(axis)))
        picks = find_index(group, channel, {axis})
        members[source] = replace(known, picks={**known.picks, name: picks})
    lengths = {channel: array.lengths[axis] for channel, array in along.items()}
    fields = {name: members[channel.partition("@")[0]].field(name) for name, channel in names.items()}
    described = {name: _describe(name, channel, members[channel.partition("@")[0]]) for name, channel in names.items()}
    read, notes = partial(read_members, store, tuple(members.values())), {"arrays": names, "beside": sorted(beside)}
    container = arrays.Container(store.url, arrays.common_length(lengths, listing.url), fields, read, notes)
    files = tuple(info for info in listing.files if not inner or info.path.startswith(f"{inner}/"))
    attributes = {"sample_axis": axis, "fields": described}
    return replace(arrays.stack(listing.url, files, [container]), beside=partial(_beside, store, attributes, beside))


def _describe(name: str, channel: str, member: Member) -> dict[str, Any]:
    """Return what the metadata of a field lacks to read it in place as the array or the slice that it was."""
    array, picks = member.array, member.picks[name]
    source, *_, value = parse_channel(channel)
    described: dict[str, Any] = {
        "name": name if picks else channel,
        "channels": [[source, dim, value] for dim in ("", *picks)] if picks else [],
        "dims": [dim for dim in array.dims if dim not in picks],
        "unpacked": member.unpacking is not None,
        "attributes": dict(array.netcdf_attributes) if member.unpacking is None else {},
    }
    times = array.document.get("data_type", array.document.get("dtype")) if array.holds_times else None
    return described if times is None else {**described, "data_type": times}


def _beside(store: Store, attributes: Mapping[str, Any], found: Mapping[str, ZarrArray]) -> dict[str, bytes]:
    """Return the objects of a Zarr group with the arrays beside the fields, by path."""
    objects, nodes = dict[str, bytes](), dict[str, Any]()
    for name, array in found.items():
        where, size = f"{store.url}/{array.path}", prod(array.shape) * array.dtype.itemsize
        if size > arrays.MAX_STORED_CHUNK:
            problem = f"{where} has {size} bytes, and is stored whole, since it lacks the sample axis"
            others = f"give another sample_axis= (--sample-axis), one of {', '.join(array.dims)}"
            raise SourceError(problem, f"leave it out, or {others}")
        with arrays.reading(f"{where} cannot be read"):
            values = ArrayReader(store, array).read_all()
        nodes[name] = plain_document(values.shape, array.dtype, array.dims, array.netcdf_attributes)
        data = values.astype(values.dtype.newbyteorder("<")).tobytes()
        objects["/".join([name, "c", *("0" for _ in values.shape)])] = with_checksum(data)
    nodes[""] = group_document(attributes, nodes)
    for name, node in nodes.items():
        strict = json.loads(json.dumps(node), parse_constant=str)  # JSON has no NaN; attributes may be texts
        objects[f"{name}/zarr.json".lstrip("/")] = json.dumps(strict, sort_keys=True, allow_nan=False).encode()
    return {f"{ARRAYS}/{path}": data for path, data in objects.items()}
