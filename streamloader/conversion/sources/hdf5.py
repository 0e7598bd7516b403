"""HDF5 and netCDF files: the datasets of a group are the fields, their first axis the samples.

See formats/hdf5/MAPPING.md and formats/netcdf/MAPPING.md. No link is followed, so that only what lies in the file
itself is ever opened: h5py's own `in`, `get` and `[]` open the file that an external link names, and a dataset too may
lie in any file.

NetCDF 4 is HDF5. Files of its classic formats (CDF-1, CDF-2, CDF-5) need no library: their header says which bytes are
which rows, at a distance of each other, those of records interleaved.
"""

from __future__ import annotations

import gc
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.optional import Lazy
from streamloader.conversion.sources import arrays, ranged_io
from streamloader.conversion.sources.base import Source, damaged
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing, required
from streamloader.errors import FieldError, SourceChangedError, SourceError
from streamloader.format.manifest import Field
from streamloader.storage.process import run_all
from streamloader.storage.store import ObjectInfo, Store, cut_runs

h5py: Any = Lazy("h5py")
BLOCK_BYTES = 1 << 20
BLOCKS = 3 * ranged_io.READ_THREADS  # kept: those that are read ahead, and some for a library's own tables
PIECE_BYTES = 16 << 20  # what is read of a dataset at once, unless a chunk is larger
PIECE_ITEMS = 256  # the same for items whose size is not known before
# how the netCDF library marks a dimension that has no values of its own
_NO_VALUES = b"This is a netCDF dimension but not a netCDF variable"
MAX_HEADER = 64 << 20
RECORDS_BYTES = 32 << 20  # of records that are read together at once
_CHAR = 2
_TYPES = {
    **{1: ">i1", _CHAR: "S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8"},
    **{7: ">u1", 8: ">u2", 9: ">u4", 10: ">i8", 11: ">u8"},
}
_DIMENSIONS, _VARIABLES, _ATTRIBUTES = 10, 11, 12


class BlockFile(ranged_io.RangeFile):
    """One object as a seekable file in memory of at most 24 MiB; the first MiB, which mostly holds all that describes
    the file, is read at once.

    Small reads come from blocks of 1 MiB; where the block before is there too, eight are fetched at once. Large reads
    go past the blocks. Its reads raise `SourceChangedError` and `StorageError`.
    """

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        super().__init__(store, info)
        self.name = f"{store.url}/{info.path}"
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        if info.size:
            self._block(0)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; return how many bytes were left to do so."""
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
        if start not in self._blocks:
            ahead = ranged_io.READ_THREADS if start - BLOCK_BYTES in self._blocks else 1
            stop = min(start + ahead * BLOCK_BYTES, self.info.size)
            starts = [one for one in range(start, stop, BLOCK_BYTES) if one not in self._blocks]
            ranges = [ranged_io.Range(self.info.path, one, min(one + BLOCK_BYTES, stop)) for one in starts]
            self._blocks.update(zip(starts, ranged_io.read_ranges(self.store, ranges), strict=True))
            while len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(start)
        return self._blocks[start]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep other threads from collecting garbage: h5py calls us with its lock held, and takes it to free its objects.

    A thread of the request that we wait for would wait for us.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


Scan = Callable[[BlockFile, str, FieldSelection], arrays.Container]


def _open_files(listing: Listing, selection: FieldSelection, extensions: tuple[str, ...], scan: Scan) -> Source:
    """Return the source of all files with these extensions, sorted by path; `scan(file, inner, selection)` reads what
    describes each.

    Raises `SourceError` for a file, group or array that cannot be read or that no field holds, for arrays of unequal
    lengths, and for files that differ; `FieldError` for a selected field that does not exist; `UsageError` without
    h5py.
    """
    files, threads = required(listing.of(*extensions), listing, *extensions), ranged_io.READ_THREADS
    containers: list[arrays.Container] = []
    for first in range(0, len(files), threads):
        some = run_all(partial(BlockFile, listing.store), files[first : first + threads], threads)
        containers += [scan(raw, listing.inner, selection) for raw in some]
    return arrays.stack(listing.url, files, containers, selection.raw)


def _format(name: str, extensions: tuple[str, ...], scan: Scan) -> SourceFormat:
    """Return the format of files with these extensions; see `_open_files`."""
    opener = partial(_open_files, extensions=extensions, scan=scan)
    return SourceFormat(name, lambda listing: bool(listing.of(*extensions)), opener)


def _scan_hdf5(raw: BlockFile, inner: str, selection: FieldSelection, netcdf: bool = False) -> arrays.Container:
    """Return the datasets right in a group of a file, or the one at `inner`. Raises as `_open_files`.

    Of `netcdf` they are those along the samples' dimension. Packed values of files that a netCDF library wrote are
    decoded, unless the user wants them as stored.
    """
    with _opened(raw) as file:
        node = _descend(file, inner, raw.name)
        where = f"{raw.name}::{node.name}" if inner else raw.name
        alone = isinstance(node, h5py.Dataset)
        if alone and netcdf:
            raise SourceError(f"{where} is a variable", "give its group, and name it with --fields")
        names, groups = ([node.name.rpartition("/")[2]], []) if alone else _names_in(node)
        named = arrays.pick(names, selection, where)
        datasets = {field: node if alone else _child(node, name, where) for field, name in named.items()}
        notes: dict[str, Any] = {"passed_over": groups} if groups else {}
        if netcdf:
            named = {field: named[field] for field, dataset in datasets.items() if not _lacks_values(dataset)}
            dimensions = {name: _dimensions(datasets[field]) for field, name in named.items()}
            axes = ((dimensions[name], datasets[field].maxshape) for field, name in named.items())
            unlimited = {own[i] for own, longest in axes for i, most in enumerate(longest) if most is None}
            named, notes = arrays.along_samples(named, dimensions, bool(selection.fields), where, unlimited)
            notes["passed_over"] += groups
            datasets = {field: datasets[field] for field in named}
        if not datasets:
            held = f"no dataset, but the groups {', '.join(groups[:10])}" if groups else "no dataset"
            raise SourceError(f"{where} holds {held}", "name the group that holds them, as in file.h5::/group")
        netcdf = netcdf or _is_netcdf(file, datasets)
        return _container(raw, datasets, selection, {**notes, "arrays": named}, netcdf)


def _container(
    raw: BlockFile, datasets: Mapping[str, Any], selection: FieldSelection, notes: Mapping[str, Any], netcdf: bool
) -> arrays.Container:
    stored: dict[str, H5Array] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for name, dataset in datasets.items():
        stored[name] = _describe(dataset, f"{raw.name}::{dataset.name}", raw.info.size, selection.fields.get(name))
        present = set(dataset.attrs)  # these only: others may be of types that nothing reads
        attributes[name] = {key: dataset.attrs[key] for key in arrays.ATTRIBUTES if key in present}
    length = arrays.one_length({array.path: array.shape[0] for array in stored.values()}, raw.name)
    fields = {name: array.field for name, array in stored.items()}
    read = partial(_read_file, ranged_io.Content(raw.store, raw.info), stored)
    container = arrays.Container(raw.name, length, fields, read, notes)
    return arrays.decoded(container, attributes, selection.raw or not netcdf)


def _is_netcdf(file: Any, datasets: Mapping[str, Any]) -> bool:
    """Return whether a netCDF library wrote the file: only there do attributes such as `scale_factor` have a meaning
    that everybody shares.
    """
    scales = {"DIMENSION_LIST", "CLASS", "_Netcdf4Dimid"}
    return "_NCProperties" in file.attrs or any(not scales.isdisjoint(one.attrs) for one in datasets.values())


def _is_scale(variable: Any) -> bool:
    return bool(h5py.h5ds.is_scale(variable.id))


def _lacks_values(variable: Any) -> bool:
    name = variable.attrs.get("NAME", b"") if _is_scale(variable) else b""
    return bool((name.encode() if isinstance(name, str) else bytes(name)).startswith(_NO_VALUES))


def _dimensions(variable: Any) -> tuple[str, ...]:
    """Return the paths of a variable's dimensions; a coordinate is its own."""
    name = str(variable.name).removeprefix("/")
    own = [f"{name}[{axis}]" for axis in range(variable.ndim)]
    if _is_scale(variable):
        return (name, *own[1:])
    named = [str(scales[0].name).removeprefix("/") if len(scales) else "" for scales in variable.dims]
    return tuple(path or alone for path, alone in zip(named, own, strict=True))


@contextmanager
def _opened(raw: BlockFile) -> Iterator[Any]:
    """Open a file with h5py, and close it. Raises `SourceError` for what is not HDF5."""
    with arrays.reading(f"{raw.name} is not an HDF5 file, or damaged"), h5py.File(raw, "r") as file:
        yield file


def _names_in(group: Any) -> tuple[list[str], list[str]]:
    """Return the names of the datasets and links right in an h5py group, and those of groups and types, sorted."""

    def is_dataset(name: str) -> bool:
        key = name.encode("utf-8", "surrogateescape")
        if group.id.links.get_info(key).type != h5py.h5l.TYPE_HARD:
            return True
        return bool(h5py.h5o.get_info(group.id, key).type == h5py.h5o.TYPE_DATASET)

    datasets = list(filter(is_dataset, sorted(group)))
    return datasets, sorted(set(group) - set(datasets))


def _child(group: Any, name: str, where: str) -> Any:
    """Return the members of a group. Raises `SourceError` for a link, and for a dataset stored in other files."""
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
    """Return the group or dataset at the path `inner`. Raises `SourceError` where there is none, or a link leads."""
    node, group = file, h5py.Group
    for name in filter(None, inner.split("/")):
        names = sorted(node) if isinstance(node, group) else []
        if name not in names:
            held = ", ".join(names[:10]) or "nothing"
            raise SourceError(f"{where} has no {inner}", f"its {node.name} holds {held}")
        node = _child(node, name, where)
    return node


@dataclass(frozen=True)
class H5Array:
    """One dataset. Rows that lie in the file as they are in memory, from byte `start` on, need no library; others, of
    which it has none, are read by it. `dtype` is that of the stored values, or of the items of a row.
    """

    path: str
    field: Field
    shape: tuple[int, ...]
    dtype: str
    start: int | None = None


def _dtype(dataset: Any) -> Any:
    """Return the dtype of the items of a dataset of variable length, else its own."""
    items = h5py.check_vlen_dtype(dataset.dtype)
    return dataset.dtype if items is None else items


def _describe(dataset: Any, where: str, size: int, selected: Field | None) -> H5Array:
    """Return what an h5py dataset is; `selected` is the field that the user asks for, if any.

    `where` names it, `size` is that of its file. Raises `SourceError` for what no field holds, and for what is
    compressed with a filter that is not installed.
    """
    created = dataset.id.get_create_plist()
    for number in range(created.get_nfilters()):
        code, _, _, name = created.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            called = f"{code} ({name.decode(errors='replace')})" if name else str(code)
            problem = f"{where} is packed with the HDF5 filter {called}, which is not installed here"
            raise arrays.unfit(problem, "install its plugin (hdf5plugin has many), repack the file")
    if dataset.shape is None:
        raise arrays.unfit(f"{where} is empty, without a shape")
    try:
        dtype, items = dataset.dtype, _dtype(dataset)
    except TypeError as error:
        raise arrays.unfit(f"{where} holds values that no field holds: {error}") from None
    shape = tuple(int(n) for n in dataset.shape)
    stored = dataset.id.get_type().get_size()
    arrays.check_claim(where, prod(shape) * stored, size, prod(dataset.chunks or ()) * stored)
    start = None
    if h5py.check_string_dtype(dtype) is not None:
        field = Field("text")
        chars = len(shape) == 2 and dtype.kind == "S" and dtype.itemsize == 1
        if len(shape) != 1 and not chars:
            raise arrays.unfit(f"{where} holds texts in the shape {shape}, a field has one for each sample")
        arrays.tensor_field(np.dtype(np.uint8), shape if chars else (*shape, dtype.itemsize), where)  # for its sizes
    elif h5py.check_vlen_dtype(dtype) is not None:
        field = _ragged(items, shape, where, selected)
    else:
        if dtype.kind not in "biuf" or dtype.subdtype is not None:
            what = "references" if dtype.kind == "O" else "compound values" if dtype.names else f"values of {dtype}"
            raise arrays.unfit(f"{where} holds {what}, which no field holds")
        field = arrays.tensor_field(dtype, shape, where)
        start = _start(dataset, size, field.item_bytes * shape[0], where)
    return H5Array(dataset.name, field, shape, str(items), start)


def _ragged(items: Any, shape: tuple[int, ...], where: str, selected: Field | None) -> Field:
    if len(shape) != 1:
        raise arrays.unfit(f"{where} holds arrays in the shape {shape}, a field has one for each sample")
    if selected is not None and selected.kind == "bytes" and np.dtype(items).itemsize == 1:
        return selected  # encoded images are often stored as numbers of one byte
    try:
        return Field("ragged", np.dtype(items).newbyteorder("=").name)
    except (FieldError, TypeError):
        raise arrays.unfit(f"{where} holds arrays of {items}, which no field holds") from None


def _start(dataset: Any, size: int, nbytes: int, where: str) -> int | None:
    """Return the byte where the rows begin, if they lie in the file as they are in memory, else None."""
    start = dataset.id.get_offset()
    same = h5py.h5t.py_create(dataset.dtype).equal(dataset.id.get_type())  # else e.g. 12 bits of 16
    if start is None or dataset.chunks or not same:
        return None
    if start + nbytes > size:
        raise damaged(f"{where} ends at byte {start + nbytes} of its file, which has {size}: it is truncated")
    return int(start)


def _read_file(
    content: ranged_io.Content, stored: Mapping[str, H5Array], rows: NDArray[np.int64], into: arrays.Into
) -> None:
    """Read rows of the arrays of a file, those that need the library with the file opened once."""
    for name, array in stored.items():
        if array.start is not None:
            starts = array.start + rows * array.field.item_bytes
            arrays.read_column(content.store, content.info.path, starts, np.dtype(array.dtype), into[name])
    inside = {name: array for name, array in stored.items() if array.start is None}
    if not inside:
        return
    with _opened(BlockFile(content.store, content.info)) as file:
        for name, array in inside.items():
            where = f"{content.where}::{array.path}"
            with arrays.reading(f"{where} cannot be read"):
                dataset = _descend(file, array.path, content.where)
                same = isinstance(dataset, h5py.Dataset)
                if not same or (dataset.shape, str(_dtype(dataset))) != (array.shape, array.dtype):
                    raise SourceChangedError(f"{where} changed since it was listed", ranged_io.CHANGED)
                _read_dataset(dataset, rows, into[name])


def _read_dataset(dataset: Any, rows: NDArray[np.int64], column: NDArray[Any] | list[bytes]) -> None:
    text = h5py.check_string_dtype(dataset.dtype) is not None
    step, most = 1, PIECE_ITEMS  # of items of variable length a few neighbours at once
    if dataset.dtype.kind != "O":
        step = int(dataset.chunks[0]) if dataset.chunks else 1
        most = max(step, PIECE_BYTES // (dataset.dtype.itemsize * prod(dataset.shape[1:])))
    first = rows // step * step
    for i, j in cut_runs(first, first + step, 0, most):  # no complete chunk between them is read for nothing
        block = dataset[int(rows[i]) : int(rows[j - 1]) + 1]
        if len(block) != j - i:
            block = block[rows[i:j] - rows[i]]
        if isinstance(column, np.ndarray):
            column[i:j] = block
        elif text:
            texts = np.ascontiguousarray(block).view(f"S{block.shape[1]}") if block.ndim == 2 else block
            column.extend(texts.reshape(-1).tolist())
        else:
            items = np.dtype(_dtype(dataset)).newbyteorder("<")
            column.extend(np.asarray(item, items).tobytes() for item in block)


def _scan_netcdf(raw: BlockFile, inner: str, selection: FieldSelection) -> arrays.Container:
    """Return the variables of a netCDF file; its first bytes say of which format it is."""
    raw.seek(0)
    if raw.read(4) not in (b"CDF\x01", b"CDF\x02", b"CDF\x05"):
        return _scan_hdf5(raw, inner, selection, netcdf=True)
    if inner:
        raise SourceError(f"{raw.name} is of a classic format, which has no groups", f"leave ::{inner} out")
    with arrays.reading(f"the header of {raw.name} is damaged"):
        found, unlimited = _Header(raw).read()
    dimensions = {name: variable.dimensions for name, variable in sorted(found.items())}
    named = arrays.pick(dimensions, selection, raw.name)
    named, notes = arrays.along_samples(named, dimensions, bool(selection.fields), raw.name, {unlimited})
    variables = {field: found[name] for field, name in named.items()}
    fields = {field: _field(found[name], f"{raw.name}::/{name}") for field, name in named.items()}
    length = next(iter(variables.values())).shape[0]
    read = partial(_read_classic, ranged_io.Content(raw.store, raw.info), variables)
    attributes = {field: variable.attributes for field, variable in variables.items()}
    container = arrays.Container(raw.name, length, fields, read, {**notes, "arrays": named})
    return arrays.decoded(container, attributes, selection.raw)


@dataclass(frozen=True)
class Variable:
    """One variable: row r begins at byte `start` + r * `stride` of the file; `shape` with the length of the records."""

    dimensions: tuple[str, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stride: int
    attributes: Mapping[str, Any]
    record: bool

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The dtype of one row; characters are one text."""
        shape = self.shape[1:]
        return np.dtype(f"S{prod(shape)}") if self.dtype.kind == "S" else np.dtype((self.dtype, shape))


class _Header:
    """Reads a header from its first byte on; counts are 4 or 8 bytes, offsets too, by the version."""

    def __init__(self, raw: BlockFile) -> None:
        self._raw, self._size = raw, raw.info.size
        raw.seek(3)
        version = self._take(1)[0]
        self._count, self._offset = (">q" if version == 5 else ">i"), (">i" if version == 1 else ">q")

    def read(self) -> tuple[dict[str, Variable], str]:
        """Return the variables by name, and the dimension of the records, "" where there is none.

        Raises `SourceError` where the file is truncated; ValueError and others for a damaged header.
        """
        records = self._unpack(self._count)  # -1 where it was written as a stream
        dimensions = [(self._name(), self._natural()) for _ in range(self._list(_DIMENSIONS))]
        self._attributes()
        found: dict[str, Variable] = {}
        for _ in range(self._list(_VARIABLES)):
            name = self._name()
            if name in found:
                raise ValueError(f"the variable {name!r} is there twice")
            found[name] = self._variable(name, dimensions)
        unlimited = next((name for name, length in dimensions if length == 0), "")
        if records < -1:
            raise ValueError(f"it has {records} records")
        return self._placed(found, records), unlimited

    def _variable(self, name: str, dimensions: list[tuple[str, int]]) -> Variable:
        own = [dimensions[self._natural()] for _ in range(self._natural())]
        attributes = self._attributes()
        code = self._unpack(">i")
        if code not in _TYPES:
            raise ValueError(f"{name!r} has the unknown type {code}")
        self._unpack(self._count)  # its size, which a large variable's does not fit: computed instead
        lengths = tuple(length for _, length in own)
        if 0 in lengths[1:]:
            raise ValueError(f"{name!r} has the dimension of the records behind another")
        dtype, start = np.dtype(_TYPES[code]), self._natural(self._offset)
        stride, names = dtype.itemsize * prod(lengths[1:]), tuple(dimension for dimension, _ in own)
        return Variable(names, dtype, lengths, start, stride, attributes, lengths[:1] == (0,))

    def _placed(self, found: dict[str, Variable], records: int) -> dict[str, Variable]:
        """Return the variables with the records' length and distance; each must end within the file."""
        recorded = [variable for variable in found.values() if variable.record]
        # every variable's share of a record is padded to 4 bytes, unless it is the only one
        step = sum(-(-variable.stride // 4) * 4 for variable in recorded)
        step = recorded[0].stride if len(recorded) == 1 else step
        if records < 0:  # as many as there are
            first = min((variable.start for variable in recorded), default=self._size)
            records = max(0, self._size - first) // max(step, 1)
        for name, variable in found.items():
            if variable.record:
                found[name] = replace(variable, shape=(records, *variable.shape[1:]), stride=step)
            length = found[name].shape[0] if variable.shape else 1
            end = variable.start + (length - 1) * found[name].stride + variable.stride if length else 0
            if end > self._size:
                ends = f"its variable {name!r} ends at byte {end}, the file has {self._size}"
                raise damaged(f"{self._raw.name} is truncated: {ends}")
        return found

    def _attributes(self) -> dict[str, Any]:
        """Return those of the attributes that say what values mean."""
        out: dict[str, Any] = {}
        for _ in range(self._list(_ATTRIBUTES)):
            name, code, count = self._name(), self._unpack(">i"), self._natural()
            dtype = np.dtype(_TYPES[code])
            values = self._padded(count * dtype.itemsize)
            if name in arrays.ATTRIBUTES:
                out[name] = values if code == _CHAR else np.frombuffer(values, dtype)
        return out

    def _list(self, tag: int) -> int:
        """Return the length of a list; an absent one is two zeros."""
        found, count = self._unpack(">i"), self._natural()
        if found != tag and (found, count) != (0, 0):
            raise ValueError(f"the tag {found} where {tag} belongs")
        return count

    def _name(self) -> str:
        return self._padded(self._natural()).decode("utf-8")

    def _natural(self, layout: str = "") -> int:
        number = self._unpack(layout or self._count)
        if number < 0:
            raise ValueError(f"the number {number} before byte {self._raw.tell()}")
        return number

    def _unpack(self, layout: str) -> int:
        return int(struct.unpack(layout, self._take(struct.calcsize(layout)))[0])

    def _padded(self, size: int) -> bytes:
        return self._take(-(-size // 4) * 4)[:size]

    def _take(self, size: int) -> bytes:
        if self._raw.tell() + size > min(self._size, MAX_HEADER):
            raise ValueError(f"{size} bytes from byte {self._raw.tell()} on are beyond its end")
        return self._raw.read(size) or b""


def _field(variable: Variable, where: str) -> Field:
    """Return the field of a variable's rows. Raises `SourceError`, which names `where`, for what no field holds."""
    if variable.dtype.kind != "S":
        return arrays.tensor_field(variable.dtype, variable.shape, where)
    if len(variable.shape) > 2:
        raise arrays.unfit(f"{where} holds characters in the shape {variable.shape}, a field has one text a sample")
    arrays.tensor_field(np.dtype(np.uint8), variable.shape, where)  # for its sizes
    return Field("text")


def _read_classic(
    content: ranged_io.Content, variables: Mapping[str, Variable], rows: NDArray[np.int64], into: arrays.Into
) -> None:
    """Read rows of variables: those of records together, where most of the bytes of a record are wanted."""
    records = {name: variable for name, variable in variables.items() if variable.record}
    wanted = sum(variable.row_dtype.itemsize for variable in records.values())
    if _extent(records) > min(RECORDS_BYTES, 2 * wanted, *(variable.stride for variable in records.values())):
        records = {}
    groups = [{name: variable} for name, variable in variables.items() if name not in records]
    for group in [*groups, records] if records else groups:
        start, stride = min(variable.start for variable in group.values()), next(iter(group.values())).stride
        offsets = [variable.start - start for variable in group.values()]
        formats = [variable.row_dtype for variable in group.values()]
        layout: Any = {"names": list(group), "formats": formats, "offsets": offsets, "itemsize": _extent(group)}
        some = max(1, RECORDS_BYTES // _extent(group))
        for first in range(0, len(rows), some):
            raw = np.empty((len(rows[first : first + some]), _extent(group)), np.uint8)
            ranged_io.read_rows(content.store, content.info.path, start + rows[first : first + some] * stride, raw)
            values = raw.view(np.dtype(layout)).reshape(-1)
            for name in group:
                column = into[name]
                if isinstance(column, list):
                    column.extend(values[name].tolist())
                else:
                    column[first : first + some] = values[name]


def _extent(variables: Mapping[str, Variable]) -> int:
    """Return the bytes from where the first row of the first variable begins to where that of the last one ends."""
    stop = max((variable.start + variable.row_dtype.itemsize for variable in variables.values()), default=0)
    return stop - min((variable.start for variable in variables.values()), default=0)


FORMATS = (_format("hdf5", ("h5", "hdf5"), _scan_hdf5), _format("netcdf", ("nc", "nc4", "cdf"), _scan_netcdf))
