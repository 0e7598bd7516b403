"""Zarr stores, version 2 and 3: the arrays of a group are the fields. See formats/zarr/MAPPING.md.

Groups and arrays are found by their metadata documents in the listing. A streamloader dataset is read as a dataset, to
change its layout, splits, fields or codec.

With `--rechunk`, the fields are rows of arrays, and slices of arrays, `z@500` as `z_500`. Chunks are read as when
arrays are read in place, each once for all slices in it; slices are unpacked to floats. Coordinates, and arrays without
the sample axis, are stored beside the fields (SPEC.md, section 15): the dataset is then read in place as the store is.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import arrays
from streamloader.conversion.sources.base import MAX_DECODED, RowSource
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.conversion.sources.ranged_io import READ_THREADS, read_document
from streamloader.errors import FieldError, FormatError, SourceError, UsageError
from streamloader.format.codecs import with_checksum
from streamloader.format.deleted import Remaining, read_remaining
from streamloader.format.manifest import FORMAT, Field, Manifest
from streamloader.format.metadata import group_document, plain_document
from streamloader.format.opening import open_root
from streamloader.format.reader import FieldReader, Placed, Run
from streamloader.storage.objects import ObjectInfo, join_path
from streamloader.storage.optional import need
from streamloader.storage.process import run_all
from streamloader.storage.store import Store
from streamloader.zarr.cf import Unpacking, unpacking_of
from streamloader.zarr.metadata import ARRAYS, DOCUMENTS, Document, Values, ZarrArray, read_group
from streamloader.zarr.reader import ArrayReader, Target, find_index, parse_channel

Files = Mapping[str, ObjectInfo]


def _files_of(files: Files, path: str) -> tuple[ObjectInfo, ...]:
    """Return the files of a node."""
    return tuple(info for name, info in files.items() if not path or name.startswith(f"{path}/"))


def _children(files: Files, path: str) -> list[str]:
    """Return the sorted names of the members of a group."""
    start = len(path) + 1 if path else 0
    names = (info.path[start:].split("/") for info in _files_of(files, path))
    return sorted({parts[0] for parts in names if len(parts) == 2 and parts[1] in DOCUMENTS})


def _document_at(store: Store, files: Files, path: str) -> Document | None:
    """Return the document of the node at a path, with its attributes; None if there is none.

    Raises `SourceError` for a document that cannot be read.
    """
    key = next((key for name in DOCUMENTS if (key := join_path(path, name)) in files), None)
    if key is None:
        return None
    document = read_document(store, files[key])
    attributes, beside = document.get("attributes"), join_path(path, ".zattrs")
    if not key.endswith("zarr.json"):
        attributes = read_document(store, files[beside]) if beside in files else {}
    kind = "array" if key.endswith(".zarray") else document.get("node_type")
    return {**document, "node_type": kind, "attributes": attributes if isinstance(attributes, dict) else {}}


def _is_array(document: Document) -> bool:
    return bool(document["node_type"] == "array")


def _is_dataset(document: Document) -> bool:
    """Return whether a node is a streamloader dataset, or the root of its splits."""
    return not _is_array(document) and isinstance(document["attributes"].get(FORMAT), Mapping)


@dataclass(frozen=True, eq=False)
class NumpyArray(ZarrArray):
    """An array of values that only a map function gets: complex numbers, structures, times and others of numpy."""

    @cached_property
    def _type(self) -> Any:
        parse_dtype = need("zarr.dtype").parse_dtype
        if self.version == 2:
            return parse_dtype({"name": self.document["dtype"], "object_codec_id": None}, zarr_format=2)
        return parse_dtype(self.document["data_type"], zarr_format=3)

    @cached_property
    def values(self) -> Values:
        """The dtype of numpy. Raises the errors of zarr-python if there is none."""
        return Values("tensor", self._type.to_native_dtype())

    @cached_property
    def fill(self) -> Any:
        """The value of chunks that are missing."""
        value = self.document.get("fill_value")
        zero = np.zeros((), self.values.dtype)[()]
        return zero if value is None else self._type.from_json_scalar(value, zarr_format=self.version)


def _any_values(array: ZarrArray) -> ZarrArray:
    """Return the array for a map function: with the dtype of numpy, if no field holds its values and there is one."""
    with suppress(FormatError):
        if array.values and not array.holds_times:
            return array
    found = NumpyArray(array.path, array.document, array.dims)
    try:
        return array if found.values.dtype.hasobject else found
    except UsageError:
        raise
    except Exception:  # noqa: BLE001 - zarr-python raises several kinds
        return array


def _describe(store: Store, array: ZarrArray, where: str, stored: int, selection: FieldSelection) -> arrays.Kind:
    """Return the field of an array, or the dtype of its rows for a map function.

    `stored` is the size of its store in bytes. Raises `SourceError`, which names `where`, if no field holds its values
    and they are not mapped, and `FormatError` for damaged metadata.
    """
    if not array.shape:
        raise arrays.unfit(f"{where} is a single value, not an array of samples")
    if array.holds_times and not selection.mapped:
        raise arrays.unfit(f"{where} holds values of {array.raw_dtype}, which no field holds")
    ArrayReader(store, array)  # raises for what it cannot read
    dtype = array.values.dtype.newbyteorder("=")
    row = prod(array.shape[1:]) * dtype.itemsize
    claimed, limit = array.shape[0] * row, selection.max_decoded
    arrays.check_claim(where, claimed, stored, limit, row=row, chunk=array.chunk_bytes)
    return arrays.kind_of(partial(_field_of, array, where), dtype, array.shape, selection.mapped)


def _field_of(array: ZarrArray, where: str) -> Field:
    """Return the field of an array. Raises `SourceError`, which names `where`, if no field holds its values."""
    (kind, dtype), shape = array.values, array.shape
    if kind == "tensor":
        return arrays.tensor_field(dtype, shape, where)
    if len(shape) != 1:
        raise arrays.unfit(f"{where} holds {kind} in the shape {shape}, a field has one for each sample")
    return Field(kind)


def _matches(listing: Listing) -> bool:
    """Return whether the folder, or the group at `::/`, has a Zarr document."""
    paths = {join_path(group, name) for group in (listing.inner.strip("/"), "") for name in DOCUMENTS}
    return listing.folder and any(info.path in paths for info in listing.files)


def open_source(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source: the arrays of a group, one array, or a streamloader dataset.

    Raises `SourceError` for damaged documents, arrays that no field holds, and arrays of unequal lengths; `FieldError`
    for a selected field that does not exist; a `FormatError` for a damaged streamloader dataset.
    """
    if selection.rechunk:
        return open_slices(listing, selection)
    store, files = listing.store, {info.path: info for info in listing.files}
    inner = listing.inner.strip("/")
    node = _document_at(store, files, inner)
    if node is None:
        raise SourceError(f"{listing.url} is not a Zarr group or array", "name a folder with a zarr.json or .zgroup")
    parent_path, _, name = inner.rpartition("/")
    parent = _document_at(store, files, parent_path) if inner and _is_array(node) else None
    if parent is not None and _is_dataset(parent):  # the node is one of its fields
        return _open_dataset(listing, files, parent_path, FieldSelection(selection.fields or {name: None}))
    if _is_dataset(node):
        return _open_dataset(listing, files, inner, selection)
    name = name or store.url.rpartition("/")[2].removesuffix(".zarr")
    members = {name: inner} if _is_array(node) else {each: join_path(inner, each) for each in _children(files, inner)}
    originals = arrays.pick(members, selection, listing.url)
    paths = [members[original] for original in originals.values()]
    nodes = zip(originals, paths, run_all(partial(_document_at, store, files), paths, READ_THREADS), strict=True)
    stored = {field: ZarrArray.of(path, node) for field, path, node in nodes if node is not None and _is_array(node)}
    stored = {field: _any_values(array) for field, array in stored.items()} if selection.mapped else stored
    groups = [original for field, original in originals.items() if field not in stored]
    if not stored or (groups and selection.fields):
        problem = f"{listing.url} holds " + (f"the groups {', '.join(groups[:10])}" if groups else "no array")
        raise SourceError(problem, "name the group that holds arrays, as in store.zarr::/group")
    notes: dict[str, Any] = {}
    originals = {field: originals[field] for field in stored}
    dimensions = {originals[field]: array.dims for field, array in stored.items()}
    by_xarray = all(array.has_names for array in stored.values())
    if by_xarray and any(dimensions.values()):
        originals, notes = arrays.along_samples(originals, dimensions, bool(selection.fields), listing.url)
    passed_over = [*notes.pop("passed_over", ()), *groups]
    notes |= {"arrays": originals, **({"passed_over": passed_over} if passed_over else {})}
    used = _files_of(files, inner)
    kept, size = {field: stored[field] for field in originals}, sum(info.size for info in used)
    container = _container(listing, kept, notes, size, selection)
    attributes = {field: stored[field].netcdf_attributes for field in originals}
    return arrays.stack(listing.url, used, [arrays.decoded(container, attributes, selection.raw or not by_xarray)])


def _container(
    listing: Listing, stored: Mapping[str, ZarrArray], notes: Mapping[str, Any], size: int, selection: FieldSelection
) -> arrays.Container:
    """Return the container of arrays, as stored in files of `size` bytes."""
    store = listing.store
    kinds: dict[str, arrays.Kind] = {}
    lengths: dict[str, int] = {}
    for name, array in stored.items():
        where = f"{store.url}/{array.path}".rstrip("/")
        problem = f"the array {where} cannot be opened"
        with arrays.reading(problem):
            kinds[name] = _describe(store, array, where, size, selection)
            lengths[notes["arrays"][name]] = array.shape[0]
    read = partial(read_members, store, tuple(Member(array, None, {name: {}}) for name, array in stored.items()))
    return arrays.Container(store.url, arrays.common_length(lengths, listing.url), kinds, read, notes)


def _open_dataset(listing: Listing, files: Files, path: str, selection: FieldSelection) -> RowSource:
    """Return the source of a streamloader dataset, with its fields."""
    store = listing.store.child(path) if path else listing.store
    try:
        manifest, store, _ = open_root(store)
    except FieldError as error:  # the root of splits
        raise SourceError(error.problem.partition(";")[0], f"name one of them, as in {store.url}::/NAME") from error
    fields = {name: manifest.fields[name].field for name in arrays.pick(manifest.fields, selection, store.url)}
    kept = {key: value for key, value in manifest.provenance.items() if key in ("beside", "classes")}
    notes = {**kept, "recut": {"digest": manifest.digest, "provenance": dict(manifest.provenance)}}
    read = partial(_read_dataset, store, manifest, read_remaining(store, manifest))
    container = arrays.Container(store.url, manifest.num_remaining, fields, read, notes)
    source = arrays.stack(listing.url, _files_of(files, path), [container])
    return replace(source, beside=partial(_read_beside, store)) if "beside" in kept else source


def _read_beside(store: Store) -> dict[str, bytes]:
    """Return the objects beside the fields of a dataset that `--rechunk` wrote, by path."""
    return {info.path: store.get(info.path) for info in store.list(ARRAYS)}


def _read_dataset(
    store: Store, manifest: Manifest, remaining: Remaining | None, rows: NDArray[np.int64], into: arrays.Into
) -> None:
    """Read rows with all checks of streaming: a missing shard is an error, not a fill value. Raises a `FormatError`."""
    for name, column in into.items():
        reader = FieldReader(store, manifest, name, remaining)
        runs = reader.runs_of(rows)
        for first in range(0, len(runs), READ_THREADS):  # bounds the memory
            load = partial(_load, reader, None if isinstance(column, list) else column)
            for placed in run_all(load, runs[first : first + READ_THREADS], READ_THREADS):
                if isinstance(column, list):
                    column.extend(bytes(items[i]) for _, items in placed for i in range(len(items)))


def _load(reader: FieldReader, out: NDArray[Any] | None, run: Run) -> list[Placed]:
    return reader.load(run, reader.request(run), out, 0) or []


_COORDINATE = re.compile("@[^=]*=")  # in `z@level=500`, which becomes `z_500`


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
    def axes(self) -> list[tuple[str, int]]:
        """The name and the length of each dimension: that of the rows first, as in a field."""
        axes = list(zip(self.array.dims, self.array.shape, strict=True))
        return [axes.pop(self.axis), *axes]

    def field(self, name: str) -> Field:
        """Return the type of one of the fields."""
        inner = [length for dim, length in self.axes[1:] if dim not in self.picks[name]]
        return Field("tensor", self.array.dtype.name if self.unpacking is None else self.unpacking.dtype, tuple(inner))

    def read(self, store: Store, rows: NDArray[np.int64], into: arrays.Into) -> None:
        """Read ascending rows of every field; lists are extended by UTF-8 texts or bytes. Each chunk is read once."""
        if not len(rows):
            return
        dtype = self.array.values.dtype.newbyteorder("=")
        found = {name: np.empty(len(rows), dtype) if isinstance(c, list) else c for name, c in into.items()}
        targets = [self._target(name, out, rows) for name, out in found.items()]
        ArrayReader(store, self.array).read_into(targets, self.unpacking)
        for name, column in into.items():
            if isinstance(column, list):
                items = found[name].tolist()
                column.extend(x.encode("utf-8", "surrogatepass") if isinstance(x, str) else bytes(x) for x in items)

    def _target(self, name: str, out: NDArray[Any], rows: NDArray[np.int64]) -> Target:
        """Return what `out`, the rows of a field, is of the array."""
        picks, first = self.picks[name], int(rows[0])
        origin = [picks.get(dim, 0) for dim, _ in self.axes[1:]]
        origin.insert(self.axis, first)
        picked = tuple(n for n, (dim, _) in enumerate(self.axes) if n and dim in picks)
        part = np.moveaxis(np.expand_dims(out, picked), 0, self.axis)
        dense = int(rows[-1]) - first + 1 == len(rows)
        return Target(part, tuple(origin), rows=None if dense else rows, axis=self.axis)


def read_members(store: Store, members: Sequence[Member], rows: NDArray[np.int64], into: arrays.Into) -> None:
    """Read rows of the fields of each array. Raises `SourceError`, which names the array, for damaged chunks."""
    for member in members:
        columns = {name: into[name] for name in member.picks if name in into}
        if columns:
            with arrays.reading(f"{store.url}/{member.array.path}".rstrip("/") + " cannot be read"):
                member.read(store, rows, columns)


def open_slices(listing: Listing, selection: FieldSelection) -> RowSource:
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
    described = {name: _described(name, channel, members[channel.partition("@")[0]]) for name, channel in names.items()}
    read, notes = partial(read_members, store, tuple(members.values())), {"arrays": names, "beside": sorted(beside)}
    container = arrays.Container(store.url, arrays.common_length(lengths, listing.url), fields, read, notes)
    files = tuple(info for info in listing.files if not inner or info.path.startswith(f"{inner}/"))
    attributes = {"sample_axis": axis, "fields": described}
    return replace(arrays.stack(listing.url, files, [container]), beside=partial(_beside, store, attributes, beside))


def _described(name: str, channel: str, member: Member) -> dict[str, Any]:
    """Return what the metadata of a field lacks to read it in place as the array or the slice that it was."""
    array, picks = member.array, member.picks[name]
    source, *_, value = parse_channel(channel)
    unpacked, dims = member.unpacking is not None, [dim for dim in array.dims if dim not in picks]
    described: dict[str, Any] = {"name": name if picks else channel, "dims": dims, "unpacked": unpacked}
    described["channels"] = [[source, dim, value] for dim in ("", *picks)] if picks else []
    described["attributes"] = {} if unpacked else dict(array.netcdf_attributes)
    times = array.document.get("data_type", array.document.get("dtype")) if array.holds_times else None
    return described if times is None else {**described, "data_type": times}


def _beside(store: Store, attributes: Mapping[str, Any], found: Mapping[str, ZarrArray]) -> dict[str, bytes]:
    """Return the objects of a Zarr group with the arrays beside the fields, by path."""
    objects, nodes = dict[str, bytes](), dict[str, Any]()
    for name, array in found.items():
        where, size = f"{store.url}/{array.path}", prod(array.shape) * array.dtype.itemsize
        if size > MAX_DECODED:
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


FORMATS = (SourceFormat("zarr", _matches, open_source, marked=True),)
