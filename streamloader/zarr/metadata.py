"""The metadata of Zarr arrays that others wrote, version 2 and 3: where each chunk is, and what it decodes to."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from streamloader.errors import AccessError, FieldError, FormatError, NotADatasetError, NotFoundError, StorageError
from streamloader.format.opening import ROOT, get_document, read_object
from streamloader.storage import Store, references_store
from streamloader.storage.objects import join_path
from streamloader.storage.process import run_all

THREADS = 16  # concurrent requests for documents
MAX_AXES = 32
DOCUMENTS = (ROOT, ".zarray", ".zgroup")  # of a node, of version 3 and 2
CONSOLIDATED = ".zmetadata"
SPARSE = ("data", "indices", "indptr")  # the arrays of a matrix in compressed sparse rows
# Columns of AnnData that are groups: their values, and the array beside these.
COLUMNS = {
    "categorical": ("codes", "categories"),
    **dict.fromkeys(("nullable-integer", "nullable-boolean"), ("values", "mask")),
}
# Dtypes of version 3, and filters of version 2, of values of variable length.
VARIABLE: dict[str, Literal["text", "bytes"]] = {
    **dict.fromkeys(("string", "vlen-utf8"), "text"),
    **dict.fromkeys(("variable_length_bytes", "bytes", "vlen-bytes"), "bytes"),
}
FIXED_TEXTS = {"fixed_length_utf32": "U", "null_terminated_bytes": "S"}
TIMES = ("numpy.datetime64", "numpy.timedelta64")
MAX_TEXT = 1 << 30  # bytes of a text of fixed length
PACKING = ("scale_factor", "add_offset", "missing_value")
POSITIONAL = "axis_"  # begins the names of dimensions that have none

ARRAYS = "_streamloader/arrays"  # what `--rechunk` stores beside the fields: SPEC.md, section 15

Document = Mapping[str, Any]
Channel = tuple[str, str, float | None]  # an array, one of its coordinates or "", and the value that selects a slice


class Values(NamedTuple):
    """What an array holds: the kind of its values, and the dtype of decoded chunks, object if their length varies."""

    kind: Literal["tensor", "text", "bytes"]
    dtype: np.dtype[Any]


@dataclass(frozen=True, eq=False)
class ZarrArray:
    """An array: its path in the store, and its metadata document with the attributes in it.

    `dims`: the names of the dimensions, `axis_0` and so on for an array without names; of names that are repeated,
    `("t", "c", "c")`, the second is `c_2`. `order`: these in the order of samples, if they are stored in another.
    Properties raise `FormatError` for invalid metadata.
    """

    path: str
    document: Document
    dims: tuple[str, ...]
    order: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str, document: Document, axes: tuple[str, ...] = ()) -> ZarrArray:
        """Return the array of a document. `axes`: the names of its dimensions if it has none."""
        return cls(path, document, _dimensions(document, axes))

    @property
    def has_names(self) -> bool:
        """Whether the array names its dimensions, as xarray does; true for a single value."""
        return self.document.get("shape") == [] or _names(self.document) != ()

    @property
    def version(self) -> int:
        """The version of the metadata, 2 or 3."""
        return 3 if self.document.get("zarr_format") == 3 else 2

    @property
    def attributes(self) -> Document:
        """The user's attributes."""
        return _mapping(self.document.get("attributes"))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The length of each dimension."""
        return _sizes(self.document.get("shape"), 0, self.path)

    @property
    def lengths(self) -> dict[str, int]:
        """The length of each dimension by name, in `order`."""
        lengths = dict(zip(self.dims, self.shape, strict=True))
        return {dim: lengths[dim] for dim in self.order or self.dims}

    @cached_property
    def stored_chunks(self) -> tuple[int, ...]:
        """The shape of the chunk in one object, which is a shard if the array has shards."""
        grid = _named(self.document.get("chunk_grid"))
        if self.version == 3 and grid.get("name") != "regular":
            problem = f"the array {self.path!r} has the chunk grid {grid.get('name')!r}"
            raise FormatError(problem, "only regular grids are supported: write it with equal chunks")
        sizes = self.document.get("chunks") if self.version == 2 else _configuration(grid).get("chunk_shape")
        return _sizes(sizes, 1, self.path, len(self.shape))

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of objects along each dimension."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.stored_chunks, strict=True))

    @cached_property
    def sharding(self) -> Document | None:
        """The configuration of the codec `sharding_indexed`, or None."""
        codecs = self.document.get("codecs") if self.version == 3 else None
        only = _mapping(codecs[0]) if isinstance(codecs, list) and len(codecs) == 1 else {}
        return _configuration(only) if only.get("name") == "sharding_indexed" else None

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The shape of the smallest chunk that can be read: of an inner chunk if the array has shards."""
        if self.sharding is None:
            return self.stored_chunks
        inner = _sizes(self.sharding.get("chunk_shape"), 1, self.path, len(self.shape))
        if any(outer % size for outer, size in zip(self.stored_chunks, inner, strict=True)):
            problem = f"the inner chunks {inner} of {self.path!r} do not divide its shards {self.stored_chunks}"
            raise FormatError(problem, "write the array again")
        return inner

    @property
    def chunk_bytes(self) -> int:
        """The decoded bytes of a chunk."""
        return prod(self.chunks) * self.values.dtype.itemsize

    @property
    def raw_dtype(self) -> Any:
        """The dtype as the document names it."""
        raw = self.document.get("dtype" if self.version == 2 else "data_type")
        return raw.get("name") if isinstance(raw, Mapping) else raw

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of numpy that the document names, with the unit of times; object if numpy has none."""
        raw, options = self.raw_dtype, _configuration(_named(self.document.get("data_type")))
        try:
            if raw in FIXED_TEXTS:
                size = np.dtype(f"{FIXED_TEXTS[raw]}1").itemsize
                return np.dtype(f"{FIXED_TEXTS[raw]}{options['length_bytes'] // size}")
            if raw in TIMES:
                return np.dtype(f"{raw.removeprefix('numpy.')}[{options.get('scale_factor', 1)}{options['unit']}]")
            return np.dtype(raw if isinstance(raw, str) else object)
        except (TypeError, ValueError, KeyError):
            return np.dtype(object)

    @property
    def holds_times(self) -> bool:
        """Whether the values are times or durations of numpy."""
        return self.numpy_dtype.kind in "mM"

    @cached_property
    def values(self) -> Values:
        """What the array holds. Raises `FormatError` unless it is numbers of up to 64 bits, texts or bytes."""
        raw, filters = self.raw_dtype, self.document.get("filters")
        if raw == "|O" and isinstance(filters, list):
            raw = next((name for item in filters if (name := str(_named(item).get("id"))) in VARIABLE), raw)
        if isinstance(raw, str) and raw in VARIABLE:
            return Values(VARIABLE[raw], np.dtype(object))
        dtype = self.numpy_dtype
        if self.holds_times:
            dtype = np.dtype(np.int64).newbyteorder(dtype.byteorder)
        if dtype.kind not in "biufSU" or not 0 < dtype.itemsize <= (MAX_TEXT if dtype.kind in "SU" else 8):
            problem = f"the array {self.path!r} holds values of {raw!r}, and tensors hold numbers of up to 64 bits"
            raise FormatError(problem, "leave the array out of the fields")
        return Values("text" if dtype.kind in "SU" else "tensor", dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of decoded chunks, with its byte order; times are int64. Raises `FormatError` if it is none."""
        kind, dtype = self.values
        if kind != "tensor":
            problem = f"the array {self.path!r} holds {kind} ({self.raw_dtype}), and tensors hold numbers"
            raise FormatError(problem, "leave the array out of the fields, or convert it with streamloader convert")
        return dtype

    @property
    def holds_numbers(self) -> bool:
        """Whether tensors hold the values."""
        try:
            return self.dtype is not None
        except FormatError:
            return False

    @cached_property
    def fill(self) -> Any:
        """The value of chunks that are missing, as a scalar of the dtype; 0 if version 2 leaves it undefined."""
        value, (kind, dtype) = self.document.get("fill_value"), self.values
        try:
            if kind == "tensor":
                return _fill_value(value, dtype.newbyteorder("="))
            if value is not None and type(value) is not str and value != 0:
                raise TypeError("a text, null or 0")
            return (value or "") if kind == "text" and dtype.kind != "S" else base64.b64decode(value or "")
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            problem = f"the array {self.path!r} has the fill value {value!r} for {dtype}"
            raise FormatError(problem, "write the array again") from error

    @property
    def netcdf_attributes(self) -> Document:
        """The attributes with netCDF's `_FillValue`, as xarray writes it; none for times of numpy, which have NaT.

        In version 2 it is Zarr's fill value, unless there is one. The fill value 0, the default of many writers, counts
        only if other attributes say that values are packed or missing. That of floats may be encoded in base64.
        """
        attributes = {} if self.holds_times else self.attributes
        fill = attributes.get("_FillValue")
        by_xarray = self.version == 2 and "_ARRAY_DIMENSIONS" in attributes
        if fill is None and by_xarray and self.document.get("fill_value") is not None:
            if self.fill or not attributes.keys().isdisjoint(PACKING):
                fill = np.asarray(self.fill).item()
        elif isinstance(fill, str) and self.values.dtype.kind == "f":
            try:
                (fill,) = struct.unpack("<d", base64.b64decode(fill, validate=True))
            except (ValueError, struct.error):
                return attributes
        return attributes if fill is None else {**attributes, "_FillValue": fill}

    def object_key(self, place: tuple[int, ...]) -> str:
        """Return the path of the object with the chunk at these coordinates of the grid, relative to the store."""
        encoding = _named(self.document.get("chunk_key_encoding"))
        configuration = _configuration(encoding)
        if self.version == 2:
            prefixed, separator = False, self.document.get("dimension_separator") or "."
        elif (name := encoding.get("name", "default")) in ("default", "v2"):
            prefixed = name == "default"
            separator = configuration.get("separator", "/" if prefixed else ".")
        else:
            problem = f"the array {self.path!r} has the chunk key encoding {name!r:.80}"
            raise FormatError(problem, "write it with the encoding 'default' or 'v2'")
        parts = (["c"] if prefixed else []) + list(map(str, place or ([] if prefixed else [0])))
        return join_path(self.path, str(separator).join(parts))

    @property
    def digest(self) -> str:
        """The SHA-256 of the metadata that determines the values, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True, default=str).encode()).hexdigest()


def _mapping(value: Any) -> Document:
    """Return a value of a document, empty if it is not a mapping."""
    return value if isinstance(value, Mapping) else {}


def _named(value: Any) -> Document:
    """Return an extension point of version 3, which may be a name alone, as a mapping."""
    return value if isinstance(value, Mapping) else {"name": value} if isinstance(value, str) else {}


def _configuration(point: Document) -> Document:
    """Return the configuration of an extension point, empty if it has none."""
    return _mapping(point.get("configuration"))


def _sizes(value: Any, least: int, path: str, count: int | None = None) -> tuple[int, ...]:
    valid = isinstance(value, list) and all(type(size) is int and least <= size < 2**63 for size in value)
    if not valid or len(value) > MAX_AXES or (count is not None and len(value) != count):
        problem = f"the metadata of the array {path!r} is damaged: sizes {value!r:.80}"
        raise FormatError(problem, "write the array again")
    return tuple(value)


def _fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a fill value of a metadata document, which has special floats as text and bits in hexadecimal."""
    if value is None:
        return dtype.type(0)
    if isinstance(value, str) and value.startswith("0x"):
        return np.frombuffer(bytes.fromhex(value[2:]), dtype.newbyteorder(">"))[0].astype(dtype)
    if isinstance(value, str) and dtype.kind == "f":
        return dtype.type(float(value.replace("Infinity", "inf")))
    if isinstance(value, str):
        return np.int64(np.iinfo(np.int64).min) if value == "NaT" else dtype.type(int(value))
    if not isinstance(value, bool | int | float):
        raise TypeError(f"{value!r}")
    return np.array(value).astype(dtype)[()]


@dataclass(frozen=True, eq=False)
class ZarrGroup:
    """A group: its arrays by name, and its attributes. An array on its own is a group of one.

    `store`: has its chunks; that of references, if the URL is that of a folder of them.
    `sparse`: the names of groups in it that are matrices in compressed sparse rows, as AnnData writes them. Arrays of
    these, such as `X/data`, `X/indices` and `X/indptr`, belong to the group too.

    `groups`: the kinds of the groups in it that AnnData's attribute `encoding-type` states. Columns of AnnData that are
    groups are arrays, of their values or codes; `parts` has the array beside these by its path: `NAME/mask`, which says
    what is missing, or `NAME/categories`, the names of the codes.

    Of a dataset that `--rechunk` wrote: its `sample_axis`, and the names of the arrays that are `slices` of others.
    """

    store: Store
    arrays: Mapping[str, ZarrArray]
    attributes: Document
    sparse: frozenset[str] = frozenset()
    sample_axis: str = ""
    slices: Mapping[Channel, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, ZarrArray] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The URL."""
        return self.store.url

    @property
    def dense(self) -> dict[str, ZarrArray]:
        """The arrays that are no parts of sparse matrices, by name."""
        return {name: array for name, array in self.arrays.items() if name.rpartition("/")[0] not in self.sparse}

    def beside(self, name: str, other: str) -> str | None:
        """Return the name of the array `other` in the group of the array `name`, or in the nearest one above."""
        folders = name.split("/")[:-1]
        paths = ("/".join([*folders[:count], other]) for count in range(len(folders), -1, -1))
        return next((path for path in paths if path in self.arrays), None)

    def array(self, name: str) -> ZarrArray:
        """Return an array. Raises `FieldError` if there is none of this name."""
        kind = "" if name in self.arrays else self.groups.get(name)
        if kind == "csc_matrix":
            raise FormatError(f"the matrix {name!r} is stored by columns", "write it by rows: matrix.tocsr()")
        if kind:
            raise FieldError(f"{name!r} of {self.url} is a group, a {kind}", "name an array, or a column of numbers")
        if name not in self.arrays:
            names = [*sorted(self.sparse), *self.dense]
            raise FieldError(f"{self.url} has no array {name!r}", f"its arrays are {', '.join(names) or 'none'}")
        return self.arrays[name]


def read_group(
    store: Store,
    named: Collection[str] = (),
    beside: Collection[str] = (),
    *,
    zarr_format: int | None = None,
    listing: bool = True,
) -> ZarrGroup:
    """Return the arrays directly in the group at the store's URL, from its consolidated metadata if it has any.

    Otherwise the documents of all members are read, without `listing` only those of `named`: arrays and sparse
    matrices, in groups below it too, such as `layers/counts`, which belong to the group too, as do the coordinates of
    these arrays and the arrays `beside` them. `zarr_format`: only documents of this version are asked for. Raises
    `NotADatasetError` if there is no Zarr metadata, and `FormatError` if it is damaged.
    """
    names = [name for name in DOCUMENTS if zarr_format is None or (name == ROOT) == (zarr_format == 3)]
    store, root, documents = _read_root(store, names)
    if "shape" in root:
        name = store.url.rstrip("/").rpartition("/")[2].partition(".")[0] or "data"
        return ZarrGroup(store, {name: ZarrArray.of("", root)}, {})
    read, complete = partial(_read_nodes, store, names), documents is not None or listing
    documents = read(store.children()) if documents is None and listing else documents or {}
    documents |= read([name for name in named if "shape" not in documents.get(name, {})])
    if not complete and not all(name in documents for name in named):
        with suppress(StorageError):  # the error says what there is
            documents = {**read(store.children()), **documents}
    others = _paths_beside(documents, beside, below=complete)
    documents |= read([path for path in sorted(others) if path not in documents])
    groups = {name: _encoding(document) for name, document in documents.items() if "shape" not in document}
    sparse = frozenset(name for name, kind in groups.items() if kind == "csr_matrix")
    columns = {name: [f"{name}/{part}" for part in COLUMNS[kind]] for name, kind in groups.items() if kind in COLUMNS}
    found = read([path for paths in columns.values() for path in paths])
    columns = {name: paths for name, paths in columns.items() if found.keys() >= set(paths)}
    documents |= read([f"{name}/{part}" for name in sparse for part in SPARSE])
    documents |= {name: found[values] for name, (values, _) in columns.items()}
    attributes = _mapping(root.get("attributes"))
    axes, stored = _image_axes(attributes), {name: each for name, each in documents.items() if "shape" in each}
    arrays = {name: ZarrArray.of(columns.get(name, [name])[0], stored[name], axes) for name in stored}
    parts = {path: ZarrArray.of(path, found[path]) for _, path in columns.values()}
    return ZarrGroup(store, arrays, attributes, sparse, groups=groups, parts=parts)


def read_rechunked(store: Store, group: ZarrGroup, named: Collection[str]) -> ZarrGroup:
    """Return the group of a dataset that `--rechunk` wrote, with the names and coordinates of the store it came from.

    `named`: the arrays that are stored beside the fields. Raises `FormatError` if these are damaged.
    """
    beside = read_group(store.child(ARRAYS), [name for name in named if "/" in name])
    arrays = {name: replace(array, path=join_path(ARRAYS, name)) for name, array in beside.arrays.items()}
    slices: dict[Channel, str] = {}
    try:
        axis, fields = beside.attributes["sample_axis"], beside.attributes["fields"]
        for path in fields.keys() & group.arrays.keys():
            name, dims, channels = (fields[path][key] for key in ("name", "dims", "channels"))
            document, stored = {**group.arrays[path].document, **fields[path]}, [dim for dim in dims if dim != axis]
            arrays[name] = ZarrArray(path, document, (axis, *stored), tuple(dims))
            slices |= dict.fromkeys(map(tuple, channels), name)
        return ZarrGroup(store, dict(sorted(arrays.items())), group.attributes, frozenset(), axis, slices)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{store.url}/{ARRAYS}/zarr.json is damaged ({error!r})"
        raise FormatError(problem, "copy or convert the dataset again") from error


def _paths_beside(documents: Mapping[str, Document], beside: Collection[str], *, below: bool) -> set[str]:
    """Return the paths of coordinates of arrays, and of other arrays: beside them, or above.

    With `below`, those in groups below the root only.
    """
    paths = set()
    for name, document in documents.items():
        folders = name.split("/")[:-1]
        dims = _names(document) if "shape" in document else ()
        levels = range(int(below), len(folders) + 1)
        paths |= {"/".join([*folders[:level], other]) for level in levels for other in (*dims, *beside)}
    return paths


def _encoding(document: Document) -> str:
    """Return the kind of a group that AnnData's attribute states, "" if there is none."""
    return str(_mapping(document.get("attributes")).get("encoding-type", ""))


def _read_root(store: Store, names: Sequence[str]) -> tuple[Store, Document, dict[str, Document] | None]:
    """Return the store of the group, the document of its root, and those of its members if they are consolidated."""
    root = _parsed(store, ROOT) if ROOT in names else None
    if root is not None:
        nodes = _mapping(root.get("consolidated_metadata")).get("metadata")
        if nodes is None:
            return store, root, None
        return store, root, {name: node for name, node in _nodes(nodes, store, ROOT).items() if "/" not in name}
    consolidated = _parsed(store, CONSOLIDATED) if names[-1] != ROOT else None
    if consolidated is None:
        document = _read_node(store, names, "")
        if document is None:
            problem = f"there is no Zarr metadata at {store.url}"
            remedy = "check the URL and the storage_options: it must be that of a Zarr group or array"
            try:
                get_document(store, names[-1])  # an `AccessError`, if the store hides what there is
            except NotFoundError as error:
                raise NotADatasetError(problem, remedy) from error
        return store, document or {}, None
    nodes = _nodes(consolidated.get("metadata"), store, CONSOLIDATED)
    if "record_size" in consolidated:
        store = references_store(store)
    members: dict[str, Document] = {}
    for key, node in nodes.items():
        name, _, kind = key.rpartition("/")
        if name and "/" not in name and kind in (".zarray", ".zgroup"):
            members[name] = {**node, "attributes": nodes.get(f"{name}/.zattrs", {})}
    return store, {"attributes": nodes.get(".zattrs", {})}, members


def _nodes(nodes: Any, store: Store, path: str) -> Mapping[str, Document]:
    """Return the documents in consolidated metadata. Raises `FormatError` for what is none."""
    if not isinstance(nodes, Mapping) or not all(isinstance(node, Mapping) for node in nodes.values()):
        raise FormatError(f"{store.url}/{path} is damaged", "consolidate the metadata again")
    return nodes


def _read_nodes(store: Store, names: Sequence[str], paths: Sequence[str]) -> dict[str, Document]:
    """Return the documents of the nodes that exist."""
    found = run_all(partial(_read_node, store, names), paths, THREADS)
    return {path: document for path, document in zip(paths, found, strict=True) if document is not None}


def _read_node(store: Store, names: Sequence[str], path: str) -> Document | None:
    """Return the document of a node, with one of these names and its attributes, or None if there is no node."""
    for name in names:
        document = _parsed(store, join_path(path, name))
        if document is not None:
            beside = None if name == ROOT else _parsed(store, join_path(path, ".zattrs"))
            return document if name == ROOT else {**document, "attributes": beside or {}}
    return None


def _parsed(store: Store, path: str) -> dict[str, Any] | None:
    """Return a document, None if it does not exist. A store that must not be listed answers 403 then."""
    try:
        return read_object(store, path, "write the metadata again")
    except NotFoundError:
        return None
    except AccessError as error:
        if not error.may_be_missing:
            raise
        return None


def _dimensions(document: Document, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of an array's dimensions: its own, those of the image it belongs to, or positional ones."""
    rank = _rank(document)
    named = _names(document) or (axes if len(axes) == rank else ())
    return _distinct(named) or tuple(f"{POSITIONAL}{number}" for number in range(rank))


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names with `_2`, `_3` and so on after those that repeat an earlier one, as a covariance's do."""
    found: list[str] = []
    for name in names:
        others = (f"{name}_{number}" for number in count(2))
        found.append(name if name not in found else next(each for each in others if each not in {*names, *found}))
    return tuple(found)


def _names(document: Document) -> tuple[str, ...]:
    """Return the names that a document has for all of its dimensions, empty if it has none."""
    beside = _mapping(document.get("attributes")).get("_ARRAY_DIMENSIONS")
    for names in (document.get("dimension_names"), beside):
        if isinstance(names, list) and len(names) == _rank(document) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()


def _rank(document: Document) -> int:
    shape = document.get("shape")
    return len(shape) if isinstance(shape, list) else 0


def _image_axes(attributes: Document) -> tuple[str, ...]:
    """Return the names of the axes of an OME-Zarr image, version 0.4 or 0.5; empty for other groups."""
    scales = (_mapping(attributes.get("ome")) or attributes).get("multiscales")
    axes = _mapping(scales[0]).get("axes") if isinstance(scales, list) and scales else None
    names = [axis.get("name") if isinstance(axis, Mapping) else axis for axis in axes] if isinstance(axes, list) else []
    return tuple(map(str, names)) if all(isinstance(name, str) for name in names) else ()
