"""Zarr stores, version 2 and 3: the arrays of a group are the fields. See formats/zarr/MAPPING.md.

Groups and arrays are found by their metadata documents in the listing; zarr-python decodes chunks. A streamloader
dataset is read as a dataset, to change its layout, splits, fields or codec.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import arrays
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.ranged_io import READ_THREADS, read_document
from streamloader.conversion.sources.zarr_slices import open_slices
from streamloader.errors import FieldError, SourceError
from streamloader.format.manifest import FORMAT, Field, Manifest
from streamloader.format.opening import open_root
from streamloader.format.reader import FieldReader, Placed, Run
from streamloader.storage.process import run_all
from streamloader.storage.store import ObjectInfo, Store

PIECE_BYTES = 64 << 20  # decoded bytes of the chunks that are read at once, unless one is larger
DOCUMENTS = ("zarr.json", ".zarray", ".zgroup")  # version 3 takes precedence
_PICKLE = re.compile(r'"(id|name)": "([^"]*\.)?pickle"', re.IGNORECASE)

Files = Mapping[str, ObjectInfo]


@dataclass(frozen=True)
class Node:
    """A group or array at `path`: its document, parsed and as `stored` at `key`, and its attributes."""

    path: str
    key: str
    stored: bytes
    document: Mapping[str, Any]
    attributes: Mapping[str, Any]

    @property
    def is_array(self) -> bool:
        """Whether the node is an array."""
        return self.key.endswith(".zarray") or self.document.get("node_type") == "array"

    @property
    def is_dataset(self) -> bool:
        """Whether the node is a streamloader dataset, or the root of its splits."""
        return not self.is_array and isinstance(self.attributes.get(FORMAT), Mapping)

    @property
    def dimensions(self) -> tuple[str, ...] | None:
        """The names of an array's dimensions, as xarray writes them; None if it has no names."""
        names = self.document.get("dimension_names") or self.attributes.get("_ARRAY_DIMENSIONS")
        shape = self.document.get("shape")
        if shape == []:
            return ()
        if not isinstance(names, list) or not isinstance(shape, list) or len(names) != len(shape):
            return None
        return tuple(names) if all(isinstance(name, str) for name in names) else None

    @property
    def netcdf_attributes(self) -> Mapping[str, Any]:
        """The attributes with netCDF's `_FillValue`.

        In version 2, xarray writes it as Zarr's fill value; in version 3, it encodes that of floats in base64.
        """
        fill = self.attributes.get("_FillValue")
        if self.key.endswith(".zarray"):
            fill = self.document.get("fill_value") if fill is None and self.dimensions else fill
        elif isinstance(fill, str) and str(self.document.get("data_type")).startswith("float"):
            try:
                (fill,) = struct.unpack("<d", base64.b64decode(fill, validate=True))
            except (ValueError, struct.error):
                return self.attributes
        return self.attributes if fill is None else {**self.attributes, "_FillValue": fill}

    @property
    def kind(self) -> Literal["tensor", "text", "bytes"]:
        """The kind of values, from the document: zarr-python has renamed its dtypes."""
        filters = {item.get("id") for item in self.document.get("filters") or () if isinstance(item, Mapping)}
        dtype = self.document.get("data_type", self.document.get("dtype"))
        if dtype == "string" or (dtype == "|O" and "vlen-utf8" in filters):
            return "text"
        variable = dtype in ("variable_length_bytes", "bytes") or (dtype == "|O" and "vlen-bytes" in filters)
        return "bytes" if variable else "tensor"


def _below(path: str, name: str) -> str:
    """Return the path of the member `name` of the group at `path`; the root's path is empty."""
    return f"{path}/{name}" if path else name


def _files_of(files: Files, path: str) -> tuple[ObjectInfo, ...]:
    """Return the files of a node."""
    return tuple(info for name, info in files.items() if not path or name.startswith(f"{path}/"))


def _children(files: Files, path: str) -> list[str]:
    """Return the sorted names of the members of a group."""
    start = len(path) + 1 if path else 0
    names = (info.path[start:].split("/") for info in _files_of(files, path))
    return sorted({parts[0] for parts in names if len(parts) == 2 and parts[1] in DOCUMENTS})


def _node_at(store: Store, files: Files, path: str) -> Node | None:
    """Return the node at a path, None if there is none. Raises `SourceError` for a document that cannot be read."""
    key = next((key for name in DOCUMENTS if (key := _below(path, name)) in files), None)
    if key is None:
        return None
    data, document = read_document(store, files[key])
    attributes, beside = document.get("attributes"), _below(path, ".zattrs")
    if not key.endswith("zarr.json"):
        attributes = read_document(store, files[beside])[1] if beside in files else {}
    return Node(path, key, data, document, attributes if isinstance(attributes, dict) else {})


def _open_array(store: Store, documents: Mapping[str, bytes], path: str) -> Any:
    """Return zarr-python's array at `path`, which reads from the store. Raises zarr-python's errors."""
    from streamloader.conversion.sources import zarr_codecs

    return zarr_codecs.open_array(store, documents, path)


def _describe(opened: Any, node: Node, where: str, stored: int) -> Field:
    """Return the field of an array of zarr-python; `stored` is the size of its store in bytes.

    Raises `SourceError`, which names `where`, if no field holds its values.
    """
    dtype, shape = np.dtype(opened.dtype), tuple(int(n) for n in opened.shape)
    if not shape:
        raise arrays.unfit(f"{where} is a single value, not an array of samples")
    arrays.check_claim(where, prod(shape) * dtype.itemsize, stored, prod(opened.chunks) * dtype.itemsize)
    kind = "text" if dtype.kind in "SUT" else node.kind
    if kind == "tensor":
        if dtype.kind not in "biuf" or dtype.names:
            raise arrays.unfit(f"{where} holds values of {dtype}, which no field holds")
        return arrays.tensor_field(dtype, shape, where)
    if len(shape) != 1:
        raise arrays.unfit(f"{where} holds {kind} in the shape {shape}, a field has one for each sample")
    return Field(kind)


def _read_arrays(
    store: Store, documents: Mapping[str, bytes], paths: Mapping[str, str], rows: NDArray[np.int64], into: arrays.Into
) -> None:
    for name, path in paths.items():
        where = f"{store.url}/{path}".rstrip("/")
        with arrays.reading(f"{where} cannot be read"):
            _read_array(_open_array(store, documents, path), rows, into[name])


def _read_array(array: Any, rows: NDArray[np.int64], column: NDArray[Any] | list[bytes]) -> None:
    """Read rows by complete chunks, as many at once as `PIECE_BYTES` allows."""
    chunk = array.chunks[0]
    chunk_bytes = chunk * prod(array.shape[1:]) * np.dtype(array.dtype).itemsize
    new = np.diff(rows // chunk, prepend=rows[:1] // chunk) > 0
    piece = np.cumsum(new) // max(1, PIECE_BYTES // max(1, chunk_bytes))
    edges = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(rows)]
    for i, j in pairwise(edges if len(rows) else []):
        first, stop = int(rows[i]), int(rows[j - 1]) + 1
        # both send many requests at once, and decode each chunk once
        values = array[first:stop] if stop - first == j - i else array.oindex[rows[i:j]]
        if isinstance(column, np.ndarray):
            column[i:j] = values
        else:
            items = np.asarray(values).tolist()
            column.extend(x.encode("utf-8", "surrogatepass") if isinstance(x, str) else bytes(x) for x in items)


def _matches(listing: Listing) -> bool:
    """Return whether the folder, or the group at `::/`, has a Zarr document."""
    paths = {_below(group, name) for group in (listing.inner.strip("/"), "") for name in DOCUMENTS}
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
    node = _node_at(store, files, inner)
    if node is None:
        raise SourceError(f"{listing.url} is not a Zarr group or array", "name a folder with a zarr.json or .zgroup")
    parent_path, _, name = inner.rpartition("/")
    parent = _node_at(store, files, parent_path) if inner and node.is_array else None
    if parent is not None and parent.is_dataset:  # the node is one of its fields
        return _open_dataset(listing, files, parent_path, FieldSelection(selection.fields or {name: None}))
    if node.is_dataset:
        return _open_dataset(listing, files, inner, selection)
    name = name or store.url.rpartition("/")[2].removesuffix(".zarr")
    members = {name: inner} if node.is_array else {child: _below(inner, child) for child in _children(files, inner)}
    originals = arrays.pick(members, selection, listing.url)
    paths = [members[original] for original in originals.values()]
    nodes = dict(zip(originals, run_all(partial(_node_at, store, files), paths, READ_THREADS), strict=True))
    stored = {field: node for field, node in nodes.items() if node is not None and node.is_array}
    groups = [original for field, original in originals.items() if field not in stored]
    if not stored or (groups and selection.fields):
        problem = f"{listing.url} holds " + (f"the groups {', '.join(groups[:10])}" if groups else "no array")
        raise SourceError(problem, "name the group that holds arrays, as in store.zarr::/group")
    notes: dict[str, Any] = {}
    originals = {field: originals[field] for field in stored}
    dimensions = {originals[field]: node.dimensions or () for field, node in stored.items()}
    by_xarray = all(node.dimensions is not None for node in stored.values())
    if by_xarray and any(dimensions.values()):
        originals, notes = arrays.along_samples(originals, dimensions, bool(selection.fields), listing.url)
    passed_over = [*notes.pop("passed_over", ()), *groups]
    notes |= {"arrays": originals, **({"passed_over": passed_over} if passed_over else {})}
    used = _files_of(files, inner)
    container = _container(listing, {field: stored[field] for field in originals}, notes, used)
    attributes = {field: stored[field].netcdf_attributes for field in originals}
    return arrays.stack(listing.url, used, [arrays.decoded(container, attributes, selection.raw or not by_xarray)])


def _container(
    listing: Listing, nodes: Mapping[str, Node], notes: Mapping[str, Any], files: Sequence[ObjectInfo]
) -> arrays.Container:
    """Return the container of arrays, as stored in the given files."""
    store, stored = listing.store, sum(info.size for info in files)
    documents = {node.key: node.stored for node in nodes.values()}
    fields: dict[str, Field] = {}
    lengths: dict[str, int] = {}
    for name, node in nodes.items():
        where = f"{store.url}/{node.path}".rstrip("/")
        with arrays.reading(f"the array {where} cannot be opened"):
            if _PICKLE.search(json.dumps(node.document)):  # as the name of a codec
                raise SourceError(f"{where} holds pickled objects, which are never read", "store plain values")
            opened = _open_array(store, documents, node.path)
            fields[name] = _describe(opened, node, where, stored)
            lengths[notes["arrays"][name]] = opened.shape[0]
    read = partial(_read_arrays, store, documents, {name: node.path for name, node in nodes.items()})
    return arrays.Container(store.url, arrays.common_length(lengths, listing.url), fields, read, notes)


def _open_dataset(listing: Listing, files: Files, path: str, selection: FieldSelection) -> Source:
    """Return the source of a streamloader dataset, with its fields."""
    store = listing.store.child(path) if path else listing.store
    try:
        manifest, store, _ = open_root(store)
    except FieldError as error:  # the root of splits
        raise SourceError(error.problem.partition(";")[0], f"name one of them, as in {store.url}::/NAME") from error
    fields = {name: manifest.fields[name].field for name in arrays.pick(manifest.fields, selection, store.url)}
    classes = {key: value for key, value in manifest.provenance.items() if key == "classes"}
    notes = {**classes, "recut": {"digest": manifest.digest, "provenance": dict(manifest.provenance)}}
    read = partial(_read_dataset, store, manifest)
    container = arrays.Container(store.url, manifest.num_samples, fields, read, notes)
    return arrays.stack(listing.url, _files_of(files, path), [container])


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
