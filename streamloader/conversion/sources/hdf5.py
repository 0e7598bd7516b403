"""HDF5 and netCDF files: the datasets of a group are the fields, their first axis is the samples.

See formats/hdf5/MAPPING.md and formats/netcdf/MAPPING.md. No link is followed, so that no other file is opened:
h5py's `in`, `get` and `[]` open the file that an external link names, and a dataset may be stored in any file.

NetCDF 4 is HDF5. The classic formats (CDF-1, CDF-2, CDF-5) are read without a library: the header gives the first byte
and the stride of the rows of each variable. The rows of record variables are interleaved.
"""

import gc
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import arrays, ranged_io
from streamloader.conversion.sources.base import RowNumbers, RowSource, check_decoded, damaged
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing, require
from streamloader.conversion.sources.ranged_io import Content
from streamloader.errors import FieldError, SourceChangedError, SourceError
from streamloader.format.manifest import Field
from streamloader.storage.buffers import LRUCache
from streamloader.storage.objects import ObjectInfo, cut_runs
from streamloader.storage.optional import Lazy
from streamloader.storage.process import run_all
from streamloader.storage.store import Store

h5py: Any = Lazy("h5py")
BLOCK_BYTES = 1 << 20
BLOCKS = 3 * ranged_io.READ_THREADS  # kept: the blocks read ahead, and some with the HDF5 library's tables
PIECE_BYTES = 16 << 20  # read from a dataset at once, unless a chunk is larger
HEAP_BYTES = 64 << 10  # of a collection of values of variable length that are read at once: most are smaller
HEAP_HEAD = 16  # bytes of the head of a collection, and of each value in it
PIECE_ITEMS = 256  # items of variable length that are read at once
# the netCDF library's mark of a dimension without values
_NO_VALUES = b"This is a netCDF dimension but not a netCDF variable"
_NO_COORDINATE = "_nc4_non_coord_"  # its prefix for a variable with the name of a dimension that it does not have first
MAX_HEADER = 64 << 20
RECORDS_BYTES = 32 << 20  # of records that are read at once
_TYPES = ("", ">i1", "S1", ">i2", ">i4", ">f4", ">f8", ">u1", ">u2", ">u4", ">i8", ">u8")  # by their code
_DIMENSIONS, _VARIABLES, _ATTRIBUTES = 10, 11, 12

Item = TypeVar("Item")


class BlockFile(ranged_io.RangeFile):
    """An object as a seekable file that caches up to 24 blocks of 1 MiB.

    The constructor reads the first block, which usually has all metadata of the file. Small reads use the blocks;
    after a read of the preceding block, eight are fetched at once. Large reads bypass the blocks. Reads raise
    `SourceChangedError` or a `StorageError`.
    """

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        super().__init__(store, info)
        self.name = f"{store.url}/{info.path}"
        self._blocks = LRUCache[int, memoryview](BLOCKS * BLOCK_BYTES)
        self.checked = set[int]()  # addresses of collections of values of variable length
        if info.size:
            self._block(0)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; return the number of bytes written to it."""
        start, stop = self.at, min(self.at + len(buffer), self.info.size)
        with _no_collection():
            if stop - start >= BLOCK_BYTES:
                out = np.frombuffer(buffer, np.uint8)[: stop - start]
                ranged_io.read_rows(self.store, self.info.path, np.array([start]), out.reshape(1, -1))
                self.at = stop
            while self.at < stop:
                first = self.at // BLOCK_BYTES * BLOCK_BYTES
                data = self._block(first)[self.at - first : stop - first]
                buffer[self.at - start : self.at - start + len(data)] = data
                self.at += len(data)
        return max(0, stop - start)

    def _block(self, start: int) -> memoryview:
        cached = self._blocks.get(start)
        if cached is not None:
            return cached
        ahead = ranged_io.READ_THREADS if self._blocks.get(start - BLOCK_BYTES) is not None else 1
        stop = min(start + ahead * BLOCK_BYTES, self.info.size)
        starts = [at for at in range(start, stop, BLOCK_BYTES) if self._blocks.get(at) is None]
        ranges = [ranged_io.Range(self.info.path, at, min(at + BLOCK_BYTES, stop)) for at in starts]
        blocks = dict(zip(starts, ranged_io.read_ranges(self.store, ranges), strict=True))
        for at, block in blocks.items():
            self._blocks.add(at, block, len(block))
        return blocks[start]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection in all threads, to avoid a deadlock.

    h5py calls `readinto` with its lock held, and takes the lock to free its objects: a thread of the request that we
    wait for would wait for us.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


Scan = Callable[[BlockFile, str, FieldSelection], arrays.Container]


def _open_files(listing: Listing, selection: FieldSelection, extensions: tuple[str, ...], scan: Scan) -> RowSource:
    """Return the source of all files with the extensions, sorted by path; `scan` reads the metadata of each.

    Raises `SourceError` for a file, group or array that cannot be read or that no field holds, for arrays of unequal
    lengths, and for files that differ; `FieldError` for a selected field that does not exist; `UsageError` without
    h5py.
    """
    files, threads = require(listing.of(*extensions), listing, *extensions), ranged_io.READ_THREADS
    containers: list[arrays.Container] = []
    for first in range(0, len(files), threads):
        group = run_all(partial(BlockFile, listing.store), files[first : first + threads], threads)
        containers += [scan(raw, listing.inner, selection) for raw in group]
    return arrays.stack(listing.url, files, containers, selection.raw)


def _format(name: str, extensions: tuple[str, ...], scan: Scan) -> SourceFormat:
    opener = partial(_open_files, extensions=extensions, scan=scan)
    return SourceFormat(name, lambda listing: bool(listing.of(*extensions)), opener)


def _scan_hdf5(raw: BlockFile, inner: str, selection: FieldSelection, netcdf: bool = False) -> arrays.Container:
    """Return the datasets of a group of a file, or the dataset at `inner`. Raises as `_open_files`.

    For `netcdf`, only the datasets along the samples' dimension are returned. Packed values of files that a netCDF
    library wrote are decoded, unless the selection is `raw`.
    """
    with _opened(raw) as file:
        node = _descend(file, inner, raw.name)
        where = f"{raw.name}::{node.name}" if inner else raw.name
        single = isinstance(node, h5py.Dataset)
        if single and netcdf:
            raise SourceError(f"{where} is a variable", "give its group, and name it with fields=")
        names, groups = ([node.name.rpartition("/")[2]], []) if single else _names_in(node)
        names.sort(key=lambda name: name.startswith(_NO_COORDINATE))  # the dimension's own dataset has no values
        stored = {name.removeprefix(_NO_COORDINATE): name for name in names}
        originals = arrays.pick(stored, selection, where)
        datasets = {field: node if single else _child(node, stored[name], where) for field, name in originals.items()}
        notes: dict[str, Any] = {"passed_over": groups} if groups else {}
        if netcdf:
            originals = {field: name for field, name in originals.items() if not _lacks_values(datasets[field])}
            dimensions = {name: _dimensions(datasets[field]) for field, name in originals.items()}
            axes = (zip(dimensions[name], datasets[field].maxshape, strict=False) for field, name in originals.items())
            unlimited = {dimension for pairs in axes for dimension, longest in pairs if longest is None}
            originals, notes = arrays.along_samples(originals, dimensions, bool(selection.fields), where, unlimited)
            notes["passed_over"] += groups
            datasets = {field: datasets[field] for field in originals}
        if not datasets:
            content = f"no dataset, but the groups {', '.join(groups[:10])}" if groups else "no dataset"
            raise SourceError(f"{where} holds {content}", "name the group that holds them, as in file.h5::/group")
        netcdf = netcdf or _is_netcdf(file, datasets)
        return _container(raw, datasets, selection, {**notes, "arrays": originals}, netcdf)


def _container(
    raw: BlockFile, datasets: Mapping[str, Any], selection: FieldSelection, notes: Mapping[str, Any], netcdf: bool
) -> arrays.Container:
    stored: dict[str, H5Array] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for name, dataset in datasets.items():
        where, selected = f"{raw.name}::{dataset.name}", selection.fields.get(name)
        stored[name] = _describe(dataset, where, raw.info.size, selected, selection)
        present = set(dataset.attrs)  # other attributes may have types that h5py cannot read
        attributes[name] = {key: dataset.attrs[key] for key in arrays.ATTRIBUTES if key in present}
    length = arrays.common_length({array.path: array.shape[0] for array in stored.values()}, raw.name)
    kinds = {name: array.kind for name, array in stored.items()}
    read = partial(_read_file, Content(raw.store, raw.info), stored)
    container = arrays.Container(raw.name, length, kinds, read, notes)
    return arrays.decoded(container, attributes, selection.raw or not netcdf)


def _is_netcdf(file: Any, datasets: Mapping[str, Any]) -> bool:
    """Return whether a netCDF library wrote the file: only then is the meaning of `scale_factor` and others defined."""
    scales = {"DIMENSION_LIST", "CLASS", "_Netcdf4Dimid"}
    return "_NCProperties" in file.attrs or any(not scales.isdisjoint(dataset.attrs) for dataset in datasets.values())


def _is_scale(variable: Any) -> bool:
    return bool(h5py.h5ds.is_scale(variable.id))


def _lacks_values(variable: Any) -> bool:
    name = variable.attrs.get("NAME", b"") if _is_scale(variable) else b""
    return bool((name.encode() if isinstance(name, str) else bytes(name)).startswith(_NO_VALUES))


def _dimensions(variable: Any) -> tuple[str, ...]:
    """Return the paths of a variable's dimensions; a coordinate is its own dimension."""
    name = str(variable.name).removeprefix("/")
    unnamed = [f"{name}[{axis}]" for axis in range(variable.ndim)]
    if _is_scale(variable):
        return (name, *unnamed[1:])
    paths = [str(scales[0].name).removeprefix("/") if len(scales) else "" for scales in variable.dims]
    return tuple(path or default for path, default in zip(paths, unnamed, strict=True))


@contextmanager
def _opened(raw: BlockFile) -> Iterator[Any]:
    """Open a file with h5py, and close it. Raises `SourceError` if it is not HDF5."""
    with arrays.reading(f"{raw.name} is not an HDF5 file, or damaged"), h5py.File(raw, "r") as file:
        yield file


def _names_in(group: Any) -> tuple[list[str], list[str]]:
    """Return the names of the datasets and links in an h5py group, and of its groups and types, both sorted."""

    def is_dataset(name: str) -> bool:
        key = name.encode("utf-8", "surrogateescape")
        if group.id.links.get_info(key).type != h5py.h5l.TYPE_HARD:
            return True
        return bool(h5py.h5o.get_info(group.id, key).type == h5py.h5o.TYPE_DATASET)

    datasets = list(filter(is_dataset, sorted(group)))
    return datasets, sorted(set(group) - set(datasets))


def _child(group: Any, name: str, where: str) -> Any:
    """Return a member of a group. Raises `SourceError` for a link, and for a dataset stored in other files."""
    links, key = group.id.links, name.encode("utf-8", "surrogateescape")
    if links.get_info(key).type != h5py.h5l.TYPE_HARD:
        target = links.get_val(key)
        parts = [target] if isinstance(target, bytes) else target
        shown = "::".join(part.decode("utf-8", "replace") for part in parts)
        raise arrays.unfit(f"{name!r} of {where} is a link to {shown}; links are not followed", "give its target")
    node = group[name]
    created = node.id.get_create_plist() if isinstance(node, h5py.Dataset) else None
    if created and (created.get_layout() == h5py.h5d.VIRTUAL or created.get_external_count()):
        raise arrays.unfit(f"{where}::{node.name} is stored in other files, which are not read", "give those files")
    return node


def _descend(file: Any, inner: str, where: str) -> Any:
    """Return the group or dataset at the path `inner`. Raises `SourceError` if it does not exist, or for a link."""
    node = file
    for name in filter(None, inner.split("/")):
        names = sorted(node) if isinstance(node, h5py.Group) else []
        if name not in names:
            content = ", ".join(names[:10]) or "nothing"
            raise SourceError(f"{where} has no {inner}", f"its {node.name} holds {content}")
        node = _child(node, name, where)
    return node


@dataclass(frozen=True)
class H5Array:
    """A dataset. `dtype` is that of the stored values, or of the items of a row; `limit` is `max_decoded`."""

    path: str
    kind: arrays.Kind
    shape: tuple[int, ...]
    dtype: str
    limit: int


def _dtype(dataset: Any) -> Any:
    """Return the dtype of a dataset, that of its items for a dataset of variable length."""
    items = h5py.check_vlen_dtype(dataset.dtype)
    return dataset.dtype if items is None else items


def _describe(dataset: Any, where: str, size: int, selected: Field | None, selection: FieldSelection) -> H5Array:
    """Return the description of an h5py dataset; `selected` is the field that the user gives for it, if any.

    `where` names it, `size` is that of its file in bytes. Raises `SourceError` for values that no field holds, unless
    they are mapped, and for a compression filter that is not installed.
    """
    created = dataset.id.get_create_plist()
    filters = [created.get_filter(number) for number in range(created.get_nfilters())]
    for code, _, _, name in filters:
        if not h5py.h5z.filter_avail(code):
            label = f"{code} ({name.decode(errors='replace')})" if name else str(code)
            problem = f"{where} is packed with the HDF5 filter {label}, which is not installed here"
            raise arrays.unfit(problem, "install its plugin (hdf5plugin has many), repack the file")
    packers = [code for code, *_ in filters if code not in _KEEP_SIZE]
    if len(packers) > 1:  # each may multiply the size by a thousand
        raise arrays.unfit(f"{where} is packed by several filters, {packers}", "repack the file with one")
    if dataset.shape is None:
        raise arrays.unfit(f"{where} is empty, without a shape")
    try:
        dtype, items = dataset.dtype, _dtype(dataset)
    except TypeError as error:
        raise arrays.unfit(f"{where} holds values that no field holds: {error}") from None
    shape = tuple(int(n) for n in dataset.shape)
    value, chunks = dataset.id.get_type().get_size(), dataset.chunks
    decoded = {"row": value * prod(shape[1:]), "chunk": value * prod(chunks)} if chunks else {}
    arrays.check_claim(where, prod(shape) * value, size, selection.max_decoded, **decoded)
    kind = arrays.kind_of(partial(_field_of, dtype, shape, where, selected), dtype, shape, selection.mapped)
    return H5Array(dataset.name, kind, shape, str(items), selection.max_decoded)


def _field_of(dtype: np.dtype[Any], shape: tuple[int, ...], where: str, selected: Field | None) -> Field:
    """Return the field of a dataset of h5py's dtype. Raises `SourceError` for values that no field holds."""
    items = h5py.check_vlen_dtype(dtype)
    if h5py.check_string_dtype(dtype) is not None:
        chars = len(shape) == 2 and dtype.kind == "S" and dtype.itemsize == 1
        if len(shape) != 1 and not chars:
            raise arrays.unfit(f"{where} holds texts in the shape {shape}, a field has one for each sample")
        arrays.tensor_field(np.dtype(np.uint8), shape if chars else (*shape, dtype.itemsize), where)  # checks sizes
        return Field("text")
    if items is not None:
        return _ragged(items, shape, where, selected)
    if dtype.kind not in "biuf" or dtype.subdtype is not None:
        values = "references" if dtype.kind == "O" else "compound values" if dtype.names else f"values of {dtype}"
        raise arrays.unfit(f"{where} holds {values}, which no field holds")
    return arrays.tensor_field(dtype, shape, where)


def _ragged(items: Any, shape: tuple[int, ...], where: str, selected: Field | None) -> Field:
    if len(shape) != 1:
        raise arrays.unfit(f"{where} holds arrays in the shape {shape}, a field has one for each sample")
    if selected is not None and selected.kind == "bytes" and np.dtype(items).itemsize == 1:
        return selected  # encoded images are often stored as numbers of 1 byte
    try:
        return Field("ragged", np.dtype(items).newbyteorder("=").name)
    except (FieldError, TypeError):
        raise arrays.unfit(f"{where} holds arrays of {items}, which no field holds") from None


def _read_file(content: Content, stored: Mapping[str, H5Array], rows: RowNumbers, into: arrays.Into) -> None:
    """Read rows of the arrays of a file."""
    raw = BlockFile(content.store, content.info)
    with _opened(raw) as file:
        for name, array in stored.items():
            where = f"{content.where}::{array.path}"
            with arrays.reading(f"{where} cannot be read"):
                dataset = _descend(file, array.path, content.where)
                same = isinstance(dataset, h5py.Dataset)
                if not same or (dataset.shape, str(_dtype(dataset))) != (array.shape, array.dtype):
                    raise SourceChangedError(f"{where} changed since it was listed", ranged_io.CHANGED)
                check = partial(_check_items, raw) if dataset.dtype.hasobject else _check_chunks
                _read_dataset(dataset, rows, into[name], partial(check, dataset, where, limit=array.limit))


_DEFLATE, _SHUFFLE, _LZF = 1, 2, 32000  # filters of HDF5
_KEEP_SIZE = (2, 3, 5, 6)  # shuffle, Fletcher's checksum, and two that pack bits
_RATIOS = {_DEFLATE: 1032, _LZF: 88}  # the greatest of decoded to stored bytes


def _check_chunks(dataset: Any, where: str, start: int, stop: int, *, limit: int) -> None:
    """Raise `SourceError` for a chunk of the rows [start, stop) that unpacks to much more than its values.

    HDF5 unpacks a chunk to its end, however long it is.
    """
    created = dataset.id.get_create_plist()
    codes = [created.get_filter(number)[0] for number in range(created.get_nfilters())]
    place = next((number for number, code in enumerate(codes) if code in _RATIOS), -1)
    if place < 0 or not dataset.size:
        return
    size = prod(dataset.chunks) * _stored_dtype(dataset.file, dataset.id.get_type()).itemsize
    for corner in _corners(dataset, start, stop):
        info = dataset.id.get_chunk_info_by_coord(corner)
        if info.byte_offset is None or info.filter_mask >> place & 1 or _RATIOS[codes[place]] * info.size <= limit:
            continue
        if codes[place] == _LZF:
            check_decoded(f"{where} has a chunk of up to", _RATIOS[_LZF] * info.size, limit)
        elif len(zlib.decompressobj().decompress(dataset.id.read_direct_chunk(corner)[1], size + 5)) > size + 4:
            raise damaged(f"{where}: the chunk at {corner} unpacks to more than its {size} bytes")


def _check_items(raw: BlockFile, dataset: Any, where: str, start: int, stop: int, *, limit: int) -> None:
    """Raise `SourceError` for values of variable length of the rows [start, stop) that HDF5 would not read in time.

    It allocates what a row states, up to 4 GiB of items, before it looks for the value, and reads a damaged collection
    of values for ever.
    """
    _check_chunks(dataset, where, start, stop, limit=limit)
    size, count, total = raw.info.size, 0, 0
    for items, item in _stored_items(raw, dataset, start, stop):
        stated = items["length"].astype(np.int64) * item
        if (stated > size).any():
            raise damaged(f"{where}: a value states {stated.max()} bytes, the file has {size}")
        count, total = count + len(stated), total + int(stated.sum())
        if total > size:  # several rows, and parts of a record, may share a value
            check_decoded(f"{where} has {count} values of", total, limit)
        for address in {*items["collection"][items["length"] > 0].tolist()} - raw.checked:
            _check_collection(raw, dataset.file, where, address)
            raw.checked.add(address)


def _check_collection(raw: BlockFile, file: Any, where: str, address: int) -> None:
    """Raise `SourceError` if the sizes of the values in a collection of the global heap do not add up to its own."""

    def read() -> bytes:
        raw.seek(at)
        return raw.read(HEAP_BYTES)

    at = first = address + file.userblock_size
    unpack = struct.Struct("<H6x" + {2: "H", 4: "I", 8: "Q"}[file.id.get_create_plist().get_sizes()[1]]).unpack_from
    data, good = read(), False
    if data[:4] == b"GCOL" and len(data) >= HEAP_HEAD:
        end = at + unpack(data)[1]
        at, good = at + HEAP_HEAD, at + HEAP_HEAD <= end <= raw.info.size
    while good and at + HEAP_HEAD <= end:
        if at + HEAP_HEAD > first + len(data):
            first, data = at, read()
        number, size = unpack(data, at - first)
        step = HEAP_HEAD + (size + 7 & ~7) if number else size  # number 0 is the rest, with its head
        at += step
        good = step >= HEAP_HEAD and at <= end
    if not good:
        raise damaged(f"{where}: the collection of values at byte {address} is damaged")


def _stored_items(raw: BlockFile, dataset: Any, start: int, stop: int) -> Iterator[tuple[NDArray[Any], int]]:
    """Yield what rows store for values of variable length, and the bytes of an item of these.

    Chunks that other filters have packed are left out.
    """
    for rows in _stored_rows(raw, dataset, start, stop):
        yield from _variable_parts(dataset.id.get_type(), rows)


def _variable_parts(kind: Any, values: NDArray[Any]) -> Iterator[tuple[NDArray[Any], int]]:
    """Yield the parts of values that are of variable length, and the bytes of an item of these."""
    if isinstance(kind, h5py.h5t.TypeArrayID):
        yield from _variable_parts(kind.get_super(), values)
    elif isinstance(kind, h5py.h5t.TypeVlenID):
        yield values.ravel(), kind.get_super().get_size()
    elif isinstance(kind, h5py.h5t.TypeCompoundID):
        for number in range(kind.get_nmembers()):
            yield from _variable_parts(kind.get_member_type(number), values[f"{number}"])
    elif values.dtype.names:
        yield values.ravel(), 1  # text


def _stored_dtype(file: Any, kind: Any) -> np.dtype[Any]:
    """Return what a file stores for a value of a type, with the parts of variable length; the others are of kind V.

    HDF5 states sizes and offsets in memory, where a text is a pointer. Source: HDF5 File Format Specification, version
    3.0, III.E and IV.B.
    """
    if isinstance(kind, h5py.h5t.TypeVlenID) or (isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str()):
        address = file.id.get_create_plist().get_sizes()[0]
        return np.dtype([("length", "<u4"), ("collection", f"<u{address}"), ("number", "<u4")])
    if isinstance(kind, h5py.h5t.TypeArrayID):
        return np.dtype((_stored_dtype(file, kind.get_super()), kind.get_array_dims()))
    if not isinstance(kind, h5py.h5t.TypeCompoundID):
        return np.dtype((np.void, kind.get_size()))
    numbers = sorted(range(kind.get_nmembers()), key=kind.get_member_offset)
    members = [kind.get_member_type(number) for number in numbers]
    stored = [_stored_dtype(file, member) for member in members]
    grown = [0, *accumulate(of.itemsize - member.get_size() for of, member in zip(stored, members, strict=True))]
    return np.dtype({
        "names": [f"{number}" for number in numbers],
        "formats": stored,
        "offsets": [kind.get_member_offset(number) + more for number, more in zip(numbers, grown[:-1], strict=True)],
        "itemsize": kind.get_size() + grown[-1],
    })  # fmt: skip


def _stored_rows(raw: BlockFile, dataset: Any, start: int, stop: int) -> Iterator[NDArray[Any]]:
    """Yield the stored values of the rows [start, stop) in pieces."""
    dtype = _stored_dtype(dataset.file, dataset.id.get_type())
    if not dataset.chunks:
        at, row_bytes = dataset.id.get_offset(), prod(dataset.shape[1:]) * dtype.itemsize
        if at is not None:
            raw.seek(at + start * row_bytes)
            data = raw.read((stop - start) * row_bytes)
            yield np.frombuffer(data, dtype, len(data) // dtype.itemsize)
        return
    for corner in _corners(dataset, start, stop):
        if dataset.id.get_chunk_info_by_coord(corner).byte_offset is not None:
            size = prod(dataset.chunks) * dtype.itemsize
            data = _unpacked(dataset, corner, size, dtype.itemsize)
            if len(data) >= size:
                block = np.frombuffer(data, dtype, prod(dataset.chunks)).reshape(dataset.chunks)
                inside = tuple(slice(0, n - i) for n, i in zip(dataset.shape[1:], corner[1:], strict=True))
                yield block[max(0, start - corner[0]) : stop - corner[0], *inside]


def _corners(dataset: Any, start: int, stop: int) -> Iterator[tuple[int, ...]]:
    """Return the first indices of the chunks that hold the rows [start, stop)."""
    starts = (start // dataset.chunks[0] * dataset.chunks[0], *[0] * (dataset.ndim - 1))
    ends = (stop, *dataset.shape[1:])
    return product(*map(range, starts, ends, dataset.chunks))


def _unpacked(dataset: Any, corner: tuple[int, ...], size: int, width: int) -> bytes:
    """Return a chunk of `size` bytes of items of `width` bytes; nothing if filters other than these have packed it."""
    created = dataset.id.get_create_plist()
    mask, data = dataset.id.read_direct_chunk(corner)
    for number in reversed(range(created.get_nfilters())):
        code = created.get_filter(number)[0]
        if mask >> number & 1:
            continue
        if code == _DEFLATE:
            data = zlib.decompressobj().decompress(data, size + 4)
        elif code == _SHUFFLE:
            data = np.frombuffer(data, np.uint8, size).reshape(width, -1).T.tobytes()
        else:
            return b""
    return bytes(data)


def _read_dataset(
    dataset: Any, rows: NDArray[np.int64], column: NDArray[Any] | list[bytes], check: Callable[[int, int], None]
) -> None:
    text = h5py.check_string_dtype(dataset.dtype) is not None
    step, longest, gap = 1, PIECE_ITEMS, 0
    if not dataset.dtype.hasobject:
        row_bytes = dataset.dtype.itemsize * prod(dataset.shape[1:])
        step, gap = (int(dataset.chunks[0]), 0) if dataset.chunks else (1, ranged_io.GAP_BYTES // row_bytes)
        longest = max(step, PIECE_BYTES // row_bytes)
    first = rows // step * step
    for i, j in cut_runs(first, first + step, gap, longest):  # a run spans no chunk without a selected row
        check(int(rows[i]), int(rows[j - 1]) + 1)
        block = dataset[int(rows[i]) : int(rows[j - 1]) + 1]
        if len(block) != j - i:
            block = block[rows[i:j] - rows[i]]
        _restore_items(block, dataset.dtype)
        if isinstance(column, np.ndarray):
            column[i:j] = block
        elif text:
            texts = np.ascontiguousarray(block).view(f"S{block.shape[1]}") if block.ndim == 2 else block
            column.extend(texts.reshape(-1).tolist())
        else:
            column.extend(item.astype(item.dtype.newbyteorder("<"), copy=False).tobytes() for item in block)


def _restore_items(values: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Give the arrays in values of h5py's dtype their own dtype: h5py keeps stored bytes, with the machine's dtype."""
    items = h5py.check_vlen_dtype(dtype)
    if isinstance(items, np.dtype) and not items.hasobject:
        for index, item in np.ndenumerate(values):
            values[index] = item.view(items)
    for name in dtype.names or ():
        _restore_items(values[name], dtype[name])


def _scan_netcdf(raw: BlockFile, inner: str, selection: FieldSelection) -> arrays.Container:
    """Return the variables of a netCDF file; its first bytes tell whether it is a classic one."""
    raw.seek(0)
    if raw.read(4) not in (b"CDF\x01", b"CDF\x02", b"CDF\x05"):
        return _scan_hdf5(raw, inner, selection, netcdf=True)
    if inner:
        raise SourceError(f"{raw.name} is of a classic format, which has no groups", f"leave ::{inner} out")
    with arrays.reading(f"the header of {raw.name} is damaged"):
        stored, unlimited = _Header(raw).read()
    dimensions = {name: variable.dimensions for name, variable in sorted(stored.items())}
    originals = arrays.pick(dimensions, selection, raw.name)
    originals, notes = arrays.along_samples(originals, dimensions, bool(selection.fields), raw.name, {unlimited})
    variables = {field: stored[name] for field, name in originals.items()}
    kinds: dict[str, arrays.Kind] = {}
    for field, variable in variables.items():
        describe = partial(_field, variable, f"{raw.name}::/{originals[field]}")
        kinds[field] = arrays.kind_of(describe, variable.dtype, variable.shape, selection.mapped)
    length = next(iter(variables.values())).shape[0]
    read = partial(_read_classic, Content(raw.store, raw.info), variables)
    attributes = {field: variable.attributes for field, variable in variables.items()}
    container = arrays.Container(raw.name, length, kinds, read, {**notes, "arrays": originals})
    return arrays.decoded(container, attributes, selection.raw)


@dataclass(frozen=True)
class Variable:
    """A variable of a classic file. Row r begins at byte `start` + r * `stride`; `shape` includes the rows.

    `record` tells whether its rows are in records.
    """

    dimensions: tuple[str, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stride: int
    attributes: Mapping[str, Any]
    record: bool

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The dtype of one row; the characters along one dimension are one text."""
        shape = self.shape[1:]
        text = self.dtype.kind == "S" and len(shape) < 2
        return np.dtype(f"S{prod(shape)}") if text else np.dtype((self.dtype, shape))


class _Header:
    """Parses the header of a classic file. Counts and offsets have 4 or 8 bytes, depending on the version."""

    def __init__(self, raw: BlockFile) -> None:
        self._raw = raw
        raw.seek(3)
        version = raw.read(1)
        self._count, self._offset = (8 if version == b"\5" else 4), (4 if version == b"\1" else 8)

    def read(self) -> tuple[dict[str, Variable], str]:
        """Return the variables by name, and the dimension of the records, "" if there is none.

        Raises `SourceError` if the file is truncated; ValueError and others for a damaged header.
        """
        records = self._number(least=-1)  # -1 if it was written as a stream
        dimensions = self._list(_DIMENSIONS, self._number)
        self._list(_ATTRIBUTES, self._attribute)
        variables = self._list(_VARIABLES, partial(self._variable, list(dimensions.items())))
        recorded = [variable for variable in variables.values() if variable.record]
        # each variable of a record is padded to 4 bytes, unless it is the only one
        step = sum(-(-variable.stride // 4) * 4 for variable in recorded)
        step = recorded[0].stride if len(recorded) == 1 else step
        if records < 0:  # as many as the file holds
            first = min((variable.start for variable in recorded), default=self._raw.info.size)
            records = max(0, self._raw.info.size - first) // max(step, 1)
        for name, variable in variables.items():
            if variable.record:
                variables[name] = replace(variable, shape=(records, *variable.shape[1:]), stride=step)
            rows = next(iter(variables[name].shape), 1)
            end = variable.start + (rows - 1) * variables[name].stride + variable.stride if rows else 0
            if end > self._raw.info.size:
                problem = f"its variable {name!r} ends at byte {end}, the file has {self._raw.info.size}"
                raise damaged(f"{self._raw.name} is truncated: {problem}")
        return variables, next((name for name, length in dimensions.items() if length == 0), "")

    def _variable(self, dimensions: list[tuple[str, int]]) -> Variable:
        axes = [dimensions[self._number()] for _ in range(self._number())]
        attributes, dtype = self._list(_ATTRIBUTES, self._attribute), self._dtype()
        self._take(self._count)  # the stored size is wrong for large variables
        names, lengths = tuple(name for name, _ in axes), tuple(length for _, length in axes)
        if 0 in lengths[1:]:
            raise ValueError(f"the dimension of the records is behind another, {', '.join(names)}")
        start, stride = self._number(self._offset), dtype.itemsize * prod(lengths[1:])
        described = {key: value for key, value in attributes.items() if key in arrays.ATTRIBUTES}
        return Variable(names, dtype, lengths, start, stride, described, lengths[:1] == (0,))

    def _attribute(self) -> Any:
        dtype, count = self._dtype(), self._number()
        values = self._take(count * dtype.itemsize)
        return values if dtype.kind == "S" else np.frombuffer(values, dtype)

    def _list(self, tag: int, item: Callable[[], Item]) -> dict[str, Item]:
        """Return the items of a list by name; an absent list is two zeros."""
        actual, count = self._number(4), self._number()
        if actual != tag and (actual, count) != (0, 0):
            raise ValueError(f"the tag {actual} where {tag} belongs")
        items = {self._take(self._number()).decode(): item() for _ in range(count)}
        if len(items) < count:
            raise ValueError(f"one of the names {', '.join(items)[:200]} is there twice")
        return items

    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(_TYPES[self._number(4)])

    def _number(self, size: int = 0, least: int = 0) -> int:
        number = int.from_bytes(self._take(size or self._count), signed=True)
        if number < least:
            raise ValueError(f"the number {number} before byte {self._raw.tell()}")
        return number

    def _take(self, size: int) -> bytes:
        """Return the next `size` bytes, which are padded to 4."""
        padded = -(-size // 4) * 4
        if self._raw.tell() + padded > min(self._raw.info.size, MAX_HEADER):
            raise ValueError(f"{size} bytes from byte {self._raw.tell()} on are beyond its end")
        return (self._raw.read(padded) or b"")[:size]


def _field(variable: Variable, where: str) -> Field:
    """Return the field of a variable's rows. Raises `SourceError`, which names `where`, if no field holds them."""
    if variable.dtype.kind != "S":
        return arrays.tensor_field(variable.dtype, variable.shape, where)
    if len(variable.shape) > 2:
        raise arrays.unfit(f"{where} holds characters in the shape {variable.shape}, a field has one text a sample")
    arrays.tensor_field(np.dtype(np.uint8), variable.shape, where)  # checks sizes
    return Field("text")


def _read_classic(content: Content, variables: Mapping[str, Variable], rows: RowNumbers, into: arrays.Into) -> None:
    """Read rows of variables: of record variables together, if most of the bytes of a record are selected."""
    records = [variable for variable in variables.values() if variable.record]
    selected = sum(variable.row_dtype.itemsize for variable in records)
    most = min(RECORDS_BYTES, 2 * selected, *(variable.stride for variable in records))
    joined = [name for name in variables if variables[name].record]
    joined = joined if joined and _layout(variables, joined)[1].itemsize <= most else []
    groups = [[name] for name in variables if name not in joined]
    for names in [*groups, joined] if joined else groups:
        start, layout = _layout(variables, names)
        step = max(1, RECORDS_BYTES // layout.itemsize)
        for first in range(0, len(rows), step):
            starts = start + rows[first : first + step] * variables[names[0]].stride
            raw = np.empty((len(starts), layout.itemsize), np.uint8)
            ranged_io.read_rows(content.store, content.info.path, starts, raw)
            for name in names:
                column, values = into[name], raw.view(layout).reshape(-1)[name]
                if isinstance(column, list):
                    column.extend(values.tolist())
                else:
                    column[first : first + step] = values


def _layout(variables: Mapping[str, Variable], names: Sequence[str]) -> tuple[int, np.dtype[Any]]:
    """Return the first byte of the first rows of some variables, and the dtype of these rows together."""
    chosen = [variables[name] for name in names]
    start = min(variable.start for variable in chosen)
    formats, offsets = [each.row_dtype for each in chosen], [each.start - start for each in chosen]
    layout: Any = {"names": names, "formats": formats, "offsets": offsets}
    return start, np.dtype(layout)


FORMATS = (_format("hdf5", ("h5", "hdf5"), _scan_hdf5), _format("netcdf", ("nc", "nc4", "cdf"), _scan_netcdf))
