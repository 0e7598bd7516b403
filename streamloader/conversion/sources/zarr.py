"""Zarr stores, version 2 and 3: the arrays of a group are the fields. See formats/zarr/MAPPING.md.

Groups and arrays are found by their metadata documents in the listing. A streamloader dataset is read as a dataset, to
change its layout, splits, fields or codec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import arrays
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.ranged_io import READ_THREADS, read_document
from streamloader.conversion.sources.zarr_slices import Member, open_slices, read_members
from streamloader.errors import FieldError, FormatError, SourceError
from streamloader.format.manifest import FORMAT, Field, Manifest
from streamloader.format.opening import open_root
from streamloader.format.reader import FieldReader, Placed, Run
from streamloader.storage.objects import ObjectInfo, join_path
from streamloader.storage.process import run_all
from streamloader.storage.store import Store
from streamloader.zarr.metadata import ARRAYS, DOCUMENTS, Document, Values, ZarrArray
from streamloader.zarr.reader import ArrayReader

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
        from zarr.dtype import parse_dtype

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
    except Exception:  # noqa: BLE001 - zarr-python raises several kinds
        return array


def _describe(store: Store, array: ZarrArray, where: str, stored: int, mapped: bool) -> arrays.Kind:
    """Return the field of an array, or the dtype of its rows for a map function.

    `stored` is the size of its store in bytes. Raises `SourceError`, which names `where`, if no field holds its values
    and they are not `mapped`, and `FormatError` for damaged metadata.
    """
    if not array.shape:
        raise arrays.unfit(f"{where} is a single value, not an array of samples")
    if array.holds_times and not mapped:
        raise arrays.unfit(f"{where} holds values of {array.raw_dtype}, which no field holds")
    ArrayReader(store, array)  # raises for what it cannot read
    dtype = array.values.dtype.newbyteorder("=")
    arrays.check_claim(where, prod(array.shape) * dtype.itemsize, stored, array.chunk_bytes)
    return arrays.kind_of(partial(_field_of, array, where), dtype, array.shape, mapped)


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


def open_source(listing: Listing, selection: FieldSelection) -> Source:
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
    container = _container(listing, {field: stored[field] for field in originals}, notes, used, selection.mapped)
    attributes = {field: stored[field].netcdf_attributes for field in originals}
    return arrays.stack(listing.url, used, [arrays.decoded(container, attributes, selection.raw or not by_xarray)])


def _container(
    listing: Listing,
    stored: Mapping[str, ZarrArray],
    notes: Mapping[str, Any],
    files: Sequence[ObjectInfo],
    mapped: bool,
) -> arrays.Container:
    """Return the container of arrays, as stored in the given files."""
    store, size = listing.store, sum(info.size for info in files)
    kinds: dict[str, arrays.Kind] = {}
    lengths: dict[str, int] = {}
    for name, array in stored.items():
        where = f"{store.url}/{array.path}".rstrip("/")
        problem = f"the array {where} cannot be opened"
        with arrays.reading(problem):
            kinds[name] = _describe(store, array, where, size, mapped)
            lengths[notes["arrays"][name]] = array.shape[0]
    read = partial(read_members, store, tuple(Member(array, None, {name: {}}) for name, array in stored.items()))
    return arrays.Container(store.url, arrays.common_length(lengths, listing.url), kinds, read, notes)


def _open_dataset(listing: Listing, files: Files, path: str, selection: FieldSelection) -> Source:
    """Return the source of a streamloader dataset, with its fields."""
    store = listing.store.child(path) if path else listing.store
    try:
        manifest, store, _ = open_root(store)
    except FieldError as error:  # the root of splits
        raise SourceError(error.problem.partition(";")[0], f"name one of them, as in {store.url}::/NAME") from error
    fields = {name: manifest.fields[name].field for name in arrays.pick(manifest.fields, selection, store.url)}
    kept = {key: value for key, value in manifest.provenance.items() if key in ("beside", "classes")}
    notes = {**kept, "recut": {"digest": manifest.digest, "provenance": dict(manifest.provenance)}}
    read = partial(_read_dataset, store, manifest)
    container = arrays.Container(store.url, manifest.num_samples, fields, read, notes)
    source = arrays.stack(listing.url, _files_of(files, path), [container])
    return replace(source, beside=partial(_read_beside, store)) if "beside" in kept else source


def _read_beside(store: Store) -> dict[str, bytes]:
    """Return the objects beside the fields of a dataset that `--rechunk` wrote, by path."""
    return {info.path: store.get(info.path) for info in store.list(ARRAYS)}


def _read_dataset(store: Store, manifest: Manifest, rows: NDArray[np.int64], into: arrays.Into) -> None:
    """Read rows with all checks of streaming: a missing shard is an error, not a fill value. Raises a `FormatError`."""
    for name, column in into.items():
        reader = FieldReader(store, manifest, name)
        runs = reader.runs_of(rows)
        for first in range(0, len(runs), READ_THREADS):  # bounds the memory
            load = partial(_load, reader, None if isinstance(column, list) else column)
            for placed in run_all(load, runs[first : first + READ_THREADS], READ_THREADS):
                if isinstance(column, list):
                    column.extend(bytes(items[i]) for _, items in placed for i in range(len(items)))


def _load(reader: FieldReader, out: NDArray[Any] | None, run: Run) -> list[Placed]:
    return reader.load(run, reader.request(run), out, 0) or []


FORMATS = (SourceFormat("zarr", _matches, open_source, marked=True),)
