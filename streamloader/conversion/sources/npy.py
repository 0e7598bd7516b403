"""NumPy files (.npy, .npz, or a folder of .npy; never unpickled), and binary files of tokens.

See formats/npy/MAPPING.md and formats/tokens/MAPPING.md.
"""

import io
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from streamloader.conversion.sources import arrays
from streamloader.conversion.sources.base import RowSource, damaged
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing, extension, field_names, require
from streamloader.conversion.sources.ranged_io import READ_THREADS, Content, Range, open_file, read_range, read_spans
from streamloader.errors import SourceError, UsageError
from streamloader.format.manifest import Field
from streamloader.storage import ObjectInfo, Store
from streamloader.storage.process import run_all

_HEADER_BYTES = 16 << 10  # longer headers are refused, as numpy does
_PIECE_BYTES = 4 << 20  # decompressed at once
_LOCAL_HEADER = 30  # bytes before the name of a zip member; the last four are the lengths of name and extra field


@dataclass(frozen=True)
class NpyArray:
    """An array whose rows are contiguous from byte `start` of a file, or of its compressed `member` if that is set.

    `dtype` is that of the stored values, `shape` that of a row.
    """

    info: ObjectInfo
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    count: int
    kind: arrays.Kind
    member: str = ""

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.dtype.itemsize * prod(self.shape)


def _read_utf8_header(file: io.BytesIO, max_header_size: int) -> Any:
    """Read the header of version 3, which is that of version 2 in UTF-8."""
    (length,) = struct.unpack("<I", file.read(4))
    text = file.read(length).decode().encode("ascii", "backslashreplace")  # the header is a Python literal
    file = io.BytesIO(struct.pack("<I", len(text)) + text)
    return npy_format.read_array_header_2_0(file, max_header_size=max_header_size)


_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
    (3, 0): _read_utf8_header,
}


def _parse(head: bytes | memoryview, info: ObjectInfo, start: int, size: int, where: str, *, mapped: bool) -> NpyArray:
    """Return the array in the `size` bytes from `start` on, which begin with `head`; `where` names it in messages.

    Raises `SourceError` unless it is a complete, plain array in C order, of a dtype that fields have or `mapped`.
    """
    file = io.BytesIO(head)
    with arrays.reading(f"{where} is not a readable .npy"):
        version = npy_format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"format version {version[0]}.{version[1]}")
        shape, fortran, dtype = _HEADERS[version](file, max_header_size=_HEADER_BYTES)
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {shape}")
    if dtype.hasobject:
        raise SourceError(f"{where} holds pickled objects, which are never read", "save it with allow_pickle=False")
    if fortran and len(shape) > 1:
        problem = f"{where} is in Fortran order: rows are not contiguous"
        raise SourceError(problem, "save numpy.ascontiguousarray(array)")
    kind = arrays.kind_of(partial(arrays.tensor_field, dtype, shape, where), dtype, shape, mapped)
    needed = file.tell() + dtype.itemsize * prod(shape)
    if needed > size:
        raise damaged(f"{where} has {size} bytes, its header says {needed}: it is truncated, or damaged")
    return NpyArray(info, start + file.tell(), dtype, shape[1:], shape[0], kind)


def _npy_arrays(listing: Listing, files: Sequence[ObjectInfo], selection: FieldSelection) -> dict[str, NpyArray]:
    """Return the selected arrays of .npy files by name."""
    stored, store = dict[str, NpyArray](), listing.store
    infos = {info.path.removesuffix(".npy"): info for info in files}
    for name in arrays.pick(infos, selection, listing.url).values():
        info = infos[name]
        head = read_range(store, Range(info.path, 0, min(info.size, _HEADER_BYTES)))
        stored[name] = _parse(head, info, 0, info.size, f"{store.url}/{info.path}", mapped=selection.mapped)
    return stored


def _npz_arrays(listing: Listing, info: ObjectInfo, selection: FieldSelection) -> dict[str, NpyArray]:
    """Return the selected arrays of an .npz by name. Raises `SourceError` if it is not a zip of plain arrays."""
    stored, store = dict[str, NpyArray](), listing.store
    with _opened(store, info) as archive:
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        for name in arrays.pick(entries, selection, listing.url).values():
            entry, where = entries[name], f"{store.url}/{info.path}:{name}"
            if name == entry.filename:
                raise SourceError(f"{store.url}/{info.path} holds {name!r}", "an .npz holds .npy members only")
            with archive.open(entry) as file:
                head = file.read(_HEADER_BYTES)
            if entry.compress_type == zipfile.ZIP_STORED:
                start = entry.header_offset + _LOCAL_HEADER
                start += sum(struct.unpack("<HH", read_range(store, Range(info.path, start - 4, start))))
                size = min(entry.file_size, info.size - start)
                stored[name] = _parse(head, info, start, size, where, mapped=selection.mapped)
            else:
                array = _parse(head, info, 0, entry.file_size, where, mapped=selection.mapped)
                claimed = array.row_bytes * array.count
                limit = selection.max_decoded
                arrays.check_claim(where, claimed, entry.compress_size, limit, row=array.row_bytes)
                stored[name] = replace(array, member=entry.filename)
    return stored


@contextmanager
def _opened(store: Store, info: ObjectInfo) -> Iterator[zipfile.ZipFile]:
    problem = f"{store.url}/{info.path} is not an .npz, or is damaged"
    with arrays.reading(problem), zipfile.ZipFile(open_file(store, info)) as archive:
        yield archive


def _decompress_rows(store: Store, array: NpyArray, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Fill `out` with ascending rows of a compressed member, which is decompressed from its beginning, 4 MiB at a time.

    Raises `SourceError` for a damaged or truncated member.
    """
    size = array.row_bytes
    per_piece = max(1, _PIECE_BYTES // size)
    with _opened(store, array.info) as archive, archive.open(array.member) as file:
        file.read(array.start)
        last = int(rows[-1]) + 1 if len(rows) else 0
        for first in range(0, last, per_piece):
            stop = min(first + per_piece, last)
            data = file.read((stop - first) * size)
            if len(data) != (stop - first) * size:
                raise damaged(f"{store.url}/{array.info.path}: {array.member} is truncated")
            i, j = np.searchsorted(rows, (first, stop))
            out[i:j] = np.frombuffer(data, array.dtype).reshape(-1, *array.shape)[rows[i:j] - first]


def _read(store: Store, stored: Mapping[str, NpyArray], rows: NDArray[np.int64], into: arrays.Into) -> None:
    for name, array in stored.items():
        if array.member:
            _decompress_rows(store, array, rows, into[name])
        else:
            arrays.read_column(store, array.info.path, array.start + rows * array.row_bytes, array.dtype, into[name])


def open_npy(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source; row n of every array is sample n.

    Raises `SourceError` for arrays of unequal length, for arrays that are not plain (pickled, object, complex, ...),
    and for Fortran order, in which rows are not contiguous.
    """
    files = require(_files(listing), listing, "npy", *(() if listing.folder else ("npz",)))
    if len(files) > 1 and listing.of("npz"):
        raise SourceError(f"{listing.url} holds {len(files)} files, .npz among them", "give one .npz at a time")
    if extension(files[0].path) == "npz":
        by_name = _npz_arrays(listing, files[0], selection)
    else:
        by_name = _npy_arrays(listing, files, selection)
    if not by_name:
        raise SourceError(f"{listing.url} holds no array", "add arrays to it")
    originals = {field: name for name, field in field_names(list(by_name), listing.url).items()}
    count = arrays.common_length({name: array.count for name, array in by_name.items()}, listing.url)
    stored = {field: by_name[name] for field, name in originals.items()}
    kinds, read = {name: array.kind for name, array in stored.items()}, partial(_read, listing.store, stored)
    return arrays.stack(listing.url, files, [arrays.Container(listing.url, count, kinds, read, {"arrays": originals})])


def _files(listing: Listing) -> tuple[ObjectInfo, ...]:
    if not listing.folder:
        return listing.of("npy", "npz")
    return tuple(info for info in listing.of("npy") if "/" not in info.path)


CUT = 4096  # values of a ragged sample: the files do not tell where documents begin

# the header of llm.c: 256 int32 that begin with a magic number, a version, and the number of tokens
_TOKENS_AT = 1024
_TOKEN_MAGIC = {20240520: 2, 20240801: 4}  # with the bytes of a token


def open_tokens(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source: samples cut from the values of each .bin, file by file, sorted by path.

    Raises `UsageError` unless one field is selected, with the type of the values; `SourceError` for a file that does
    not hold a whole number of values, or if no file holds a sample.
    """
    files, store = require(listing.of("bin"), listing, "bin"), listing.store
    name, field = _token_field(listing, selection)
    dtype = np.dtype(field.dtype).newbyteorder("<")
    starts = run_all(lambda info: _tokens_at(store, info, dtype.itemsize), files, READ_THREADS)
    containers: list[arrays.Container] = []
    unused = 0
    for info, start in zip(files, starts, strict=True):
        where = f"{store.url}/{info.path}"
        values, remainder = divmod(info.size - start, dtype.itemsize)
        if remainder:
            problem = f"{where} has {info.size} bytes, which is not a whole number of {field.dtype} values"
            raise SourceError(problem, "check the type in fields=, or fetch the file again")
        count = -(-values // CUT)
        if field.fixed:
            count, remainder = divmod(values, field.item_bytes // dtype.itemsize)
            unused += remainder
        array = NpyArray(info, start, dtype, field.shape, count, field)
        read = partial(_read, store, {name: array}) if field.fixed else partial(_read_cuts, store, array)
        containers.append(arrays.Container(where, count, {name: field}, read))
    if not any(container.num_samples for container in containers):
        raise SourceError(f"no file of {listing.url} holds a row of {field}", "give shorter rows with fields=")
    headers = sum(start > 0 for start in starts)
    notes = {"passed_over_values": unused, **({"headers": headers} if headers else {})}
    return replace(arrays.stack(listing.url, files, containers), notes=notes)


def _token_field(listing: Listing, selection: FieldSelection) -> tuple[str, Field]:
    """Return the name and the type of the one selected field. Raises `UsageError` with examples."""
    name, field = next(iter(selection.fields.items()), ("", None))
    if len(selection.fields) == 1 and field and field.dtype not in ("", "bool") and (field.fixed or not field.shape):
        return name, field
    selected = ", ".join(name if field is None else f"{name}={field}" for name, field in selection.fields.items())
    selected = f"; asked for {selected}" if selected else ""
    problem = f"a .bin such as {listing.files[0].path} does not describe its values{selected}"
    examples = 'rows of one length with fields="tokens=uint16[2048]", or pieces of up to 4096 values'
    remedy = f'name one field and the type of its values: {examples} with fields="tokens=ragged:uint16"'
    raise UsageError(problem, remedy)


def _tokens_at(store: Store, info: ObjectInfo, item: int) -> int:
    """Return the byte where the values begin: the first, unless the file begins with a header that fits its size."""
    if info.size < _TOKENS_AT:
        return 0
    magic, _, count = np.frombuffer(read_range(store, Range(info.path, 0, 12)), "<i4").tolist()
    return _TOKENS_AT if _TOKEN_MAGIC.get(magic) == item and _TOKENS_AT + count * item == info.size else 0


def _read_cuts(store: Store, array: NpyArray, rows: NDArray[np.int64], into: arrays.Into) -> None:
    """Read ragged samples of `CUT` values; the last one may have fewer."""
    (column,) = into.values()
    size = CUT * array.dtype.itemsize
    starts = array.start + rows * size
    spans = Content(store, array.info), starts, np.minimum(starts + size, array.info.size)
    column.extend(map(bytes, read_spans([spans])))


FORMATS = (
    SourceFormat("npy", lambda listing: bool(_files(listing)), open_npy),
    # a folder with other files, such as an index, is another format
    SourceFormat("tokens", lambda listing: list(listing.by_extension) == ["bin"], open_tokens),
)
