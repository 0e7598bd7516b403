"""MosaicML streaming datasets (MDS): shards of samples and their index.json. See formats/mds/MAPPING.md.

A shard is, little-endian: u32 count, u32 offsets[count + 1], the columns as JSON, the samples.
"""

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import AGAIN, RowSource, check_decoded, damaged
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.conversion.sources.media import image_bytes
from streamloader.conversion.sources.ranged_io import Content, Range, Stream, read_document, read_range, read_spans
from streamloader.conversion.sources.records import RecordFile, cut_files, open_records, parse_number
from streamloader.errors import SourceError
from streamloader.format.manifest import natural
from streamloader.storage import ObjectInfo, Store

NAME = "mds"
VERSION = 2
INDEX = "index.json"
MAX_INDEX_BYTES = 256 << 20  # some 300,000 shards
_CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bzip2"}
_SHARD = re.compile(r"\.mds(\.\w+)?\Z")
# by the code that an array has if its dtype is not in the column's encoding
_SMALL_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16"}
_DTYPES = {**_SMALL_DTYPES, 32: "uint32", 33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"}
_SCALARS = {"int": "int64", **{name: name for name in _DTYPES.values()}}
_MAX_AXES = 30  # of a field
_REFUSED = {
    "pkl": "pickles, which are never read",
    "str_decimal": "decimal numbers, which no dtype holds",
    **dict.fromkeys(("jpeg_array", "jpegarray", "list[jpeg]", "list[png]", "list[pil]"), "several images a sample"),
}
_IMAGE_HEAD = struct.Struct("<III")  # width, height, length of the mode's name
_PIXEL_BYTES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "I;16": 2}  # of the modes that PNG stores without loss

Read = Callable[[bytes], Any]  # raises ValueError for an invalid value


def has_index(listing: Listing, shard_name: re.Pattern[str]) -> bool:
    """Return whether there are an index.json and a file with such a name, in any folder."""
    if all(info.path.rpartition("/")[2] != INDEX for info in listing.of("json")):
        return False
    return any(shard_name.search(info.path.rpartition("/")[2]) for info in listing.visible)


def open_source(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source: the samples of all shards, in the order of the index.

    Raises `SourceError` for an index that does not match its files, for shards of different columns, and for a selected
    column with an unsupported encoding (pickles, lists of images, ...).
    """
    index = read_index(listing)
    columns = _columns(index)
    names = field_names([column.key for column in columns], index.where)
    read = {column.key: _reader(column, index) for column in columns if selection.includes(names[column.key])}
    shards = [_shard(listing.store, index, entry, f"shard {number}") for number, entry in enumerate(index.entries)]
    for shard in shards:
        if shard.content.compression:
            check_decoded(f"{shard.content.where} unpacks to", shard.content.size, selection.max_decoded)
    infos = [index.files[INDEX], *(shard.content.info for shard in shards)]
    path, times = Counter(info.path for info in infos).most_common(1)[0]
    if times > 1:
        raise index.error(f"names the file {path!r} twice")
    notes = {"encodings": {names[column.key]: column.encoding for column in columns}}
    files = tuple(sorted(infos))
    records = [RecordFile(shard.content.where, shard.count, partial(partial, shard.samples)) for shard in shards]
    cut, count = cut_files(records, partial(decode_sample, columns, read)), sum(shard.count for shard in shards)
    return open_records(listing.url, files, count, cut, selection, notes=notes)


FORMATS = (SourceFormat(NAME, partial(has_index, shard_name=_SHARD), open_source, marked=True),)


@dataclass(frozen=True)
class Index:
    """An index.json: its URL, the files in its folder by path, and its entries, one for each shard."""

    where: str
    files: Mapping[str, ObjectInfo]
    entries: Sequence[Mapping[str, Any]] = ()

    def file(self, name: Any) -> ObjectInfo:
        """Return the file of a name. Raises `SourceError` if it does not exist, or is not in the index's folder."""
        if not isinstance(name, str) or name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise self.error(f"names the file {name!r}: only files in its own folder are read")
        if name not in self.files:
            raise self.error(f"names the file {name!r}, which does not exist")
        return self.files[name]

    def error(self, problem: str, remedy: str = "fetch or make the dataset again") -> SourceError:
        """Return the error for a problem of the index."""
        return SourceError(f"{self.where} {problem}", remedy)


def read_index(listing: Listing) -> Index:
    """Return the index of the folder. Raises `SourceError` if there is none, or if it does not list MDS shards."""
    if not listing.folder:
        raise SourceError(f"{listing.url} is not a folder", f"name the folder that holds {INDEX}")
    index = Index(f"{listing.store.url}/{INDEX}", {info.path: info for info in listing.files})
    if INDEX not in index.files:
        folders = [info.path[: -len(INDEX) - 1] for info in listing.files if info.path.endswith(f"/{INDEX}")]
        if not folders:
            raise SourceError(f"{listing.url} holds no {INDEX}", "check the path, and that its writer was closed")
        names = ", ".join(folders[:5]) + (", ..." if len(folders) > 5 else "")
        remedy = f"convert each: {listing.url}/{folders[0]}"
        raise SourceError(f"{listing.url} holds no {INDEX}, its folders {names} do", remedy)
    document = read_document(listing.store, index.files[INDEX], MAX_INDEX_BYTES)
    version, entries = document.get("version"), document.get("shards")
    if version != VERSION:
        remedy = "write the dataset again with a current streaming package"
        raise index.error(f"is of version {version!r}, only {VERSION} is known", remedy)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise index.error("lists no shard")
    for entry in entries:
        if entry.get("format") != NAME:
            problem = f"lists shards of the format {entry.get('format')!r}, only 'mds' is read"
            raise index.error(problem, "convert the JSON or CSV files themselves, or write MDS")
    return replace(index, entries=entries)


@dataclass(frozen=True)
class Column:
    """A column of all samples. `size` is the number of bytes of its values, 0 if it varies."""

    key: str
    encoding: str
    size: int


def _columns(index: Index) -> list[Column]:
    """Return the columns, which all shards must share."""
    keys = ("column_names", "column_encodings", "column_sizes")
    first = index.entries[0]
    for number, entry in enumerate(index.entries):
        differing = next((key for key in keys if entry.get(key) != first.get(key)), None)
        if differing:
            problem = f"shard {number} of {index.where} has other {differing} than the first"
            raise SourceError(problem, "give all shards the same columns, or convert them separately")
    try:
        rows = zip(*(first[key] for key in keys), strict=True)
        columns = [Column(name, encoding, natural(size or 0)) for name, encoding, size in rows]
        if not all(isinstance(column.key, str) and isinstance(column.encoding, str) for column in columns):
            raise ValueError("names and encodings are text")
        if not columns or len({column.key for column in columns}) < len(columns):
            raise ValueError("each column has its own name")
    except (KeyError, TypeError, ValueError) as error:
        raise index.error(f"does not list its columns ({type(error).__name__}: {error})") from None
    return columns


def _reader(column: Column, index: Index) -> Read:
    """Return the function that reads the values of a column. Raises `SourceError` for an unsupported encoding."""
    try:
        read, size = encoding_of(column.encoding)
    except ValueError as error:
        remedy = "leave it out: name the fields to keep with fields=, or those that a map function gets with columns="
        raise index.error(f"has the column {column.key!r} of {column.encoding!r}: {error}", remedy) from None
    if size != column.size:
        declared = f"says {column.size or 'varying'} bytes of the column {column.key!r}"
        raise index.error(f"{declared}, {column.encoding!r} has {size or 'varying'}")
    return read


def decode_sample(columns: Sequence[Column], read: Mapping[str, Read], data: memoryview) -> Mapping[str, Any]:
    """Return the values of a sample by column, None for a column without a reader.

    A sample consists of the u32 sizes of its values in columns of varying size, and the values. Raises ValueError if
    it is damaged.
    """
    sizes = [column.size for column in columns]
    varying = [i for i, size in enumerate(sizes) if not size]
    at = 4 * len(varying)
    if len(data) < at:
        raise ValueError(f"it has {len(data)} bytes, the sizes of its columns alone {at}")
    for i, size in zip(varying, struct.unpack_from(f"<{len(varying)}I", data), strict=True):
        sizes[i] = size
    if at + sum(sizes) != len(data):
        raise ValueError(f"it has {len(data)} bytes, its columns {at + sum(sizes)}")
    values: dict[str, Any] = {}
    for column, size in zip(columns, sizes, strict=True):
        try:
            values[column.key] = read[column.key](bytes(data[at : at + size])) if column.key in read else None
        except ValueError as error:
            raise ValueError(f"column {column.key!r}: {error}") from None
        at += size
    return values


@dataclass(frozen=True)
class Shard:
    """A file of `count` samples; the size of its content is that of the index."""

    content: Content
    count: int

    def samples(self, rows: NDArray[np.int64]) -> Iterator[memoryview]:
        """Yield the bytes of the samples of ascending rows. Raises `SourceError`, which names the file."""
        content, size = self.content, self.content.size
        if not content.compression:
            table = read_range(content.store, Range(content.info.path, 0, min(4 * (int(rows[-1]) + 3), size)))
            yield from read_spans([(content, *self._spans(table, rows))])
            return
        data = memoryview(Stream(content).read(0, size + 1))
        if len(data) != size:
            problem = f"{'more' if len(data) > size else 'less'} than the {size} bytes of its index"
            raise damaged(f"{content.where} unpacks to {problem}")
        for start, stop in zip(*self._spans(data, rows), strict=True):
            yield data[int(start) : int(stop)]

    def _spans(self, table: memoryview, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the starts and stops of the samples of rows, from a table that may end after the last of them.

        Raises `SourceError` unless the table lists `count` consecutive samples within the shard.
        """
        last, where = int(rows[-1]) + 1, self.content.where
        if len(table) < 4 * (last + 2):
            raise damaged(f"{where} is truncated: it ends within its table of offsets")
        entries = np.frombuffer(table, "<u4", last + 2)
        if entries[0] != self.count:
            raise damaged(f"{where} holds {entries[0]} samples, its index says {self.count}")
        offsets = entries[1:].astype(np.int64)
        if offsets[0] < 4 * (self.count + 2) or offsets[-1] > self.content.size or (np.diff(offsets) < 0).any():
            raise damaged(f"{where} is damaged: its offsets are not ascending within its size")
        return offsets[rows], offsets[rows + 1]


def _shard(store: Store, index: Index, entry: Mapping[str, Any], name: str) -> Shard:
    """Return a shard: the plain file if it exists, else the compressed one."""
    try:
        count, raw, packed = natural(entry["samples"]), entry["raw_data"], entry.get("zip_data")
        size, compression = natural(raw["bytes"]), entry.get("compression")
        file, codec = raw, ""
        if packed and compression and raw["basename"] not in index.files:
            file, codec = packed, str(compression).partition(":")[0]
        info, stored = index.file(file["basename"]), natural(file["bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise index.error(f"does not describe {name} ({type(error).__name__}: {error})") from None
    checks = (
        (info.size == stored, f"{stored} bytes, it has {info.size}", AGAIN),
        (4 * (count + 2) <= size, f"{count} samples in {size} bytes", AGAIN),
        (codec in ("", *_CODECS), f"the compression {codec!r}, only {', '.join(_CODECS)} are read", "unpack it"),
    )
    for good, problem, remedy in checks:
        if not good:
            raise index.error(f"says that {info.path} has {problem}", remedy)
    return Shard(Content(store, info, _CODECS.get(codec, ""), size), count)


def encoding_of(name: str) -> tuple[Read, int]:
    """Return the function that reads the values of an encoding, and their size in bytes, 0 if it varies.

    Raises ValueError, with the reason, for an unsupported encoding.
    """
    if name in _REFUSED:
        raise ValueError(_REFUSED[name])
    readers: dict[str, Read] = {"bytes": bytes, "jpeg": image_bytes, "png": image_bytes, "pil": _raw_image}
    readers |= {"str": bytes.decode, "json": bytes.decode, "str_int": partial(parse_number, np.int64)}
    readers |= {"str_float": partial(parse_number, np.float64)}
    if name in readers:
        return readers[name], 0
    if name in _SCALARS:
        return partial(_array, _SCALARS[name], ()), np.dtype(_SCALARS[name]).itemsize
    kind, *rest = name.split(":")
    dtype, sizes = (*rest, "", "")[:2]
    if kind != "ndarray" or len(rest) > 2 or (dtype and dtype not in _DTYPES.values()):
        raise ValueError("an encoding that is not known")
    shape = tuple(int(size) for size in sizes.split(",")) if sizes else None
    if shape and min(shape) < 1:
        raise ValueError("an array with an axis of no length")
    return partial(_array, dtype, shape), np.dtype(dtype).itemsize * prod(shape) if shape and dtype else 0


def _array(dtype: str, shape: tuple[int, ...] | None, data: bytes) -> Any:
    """Return an array from its bytes: u8 dtype, u8 axes * 4 + log2 of the bytes of a size, the sizes, the values.

    The dtype, or the axes and sizes, are absent if the column's encoding has them.
    """
    at = 0
    if not dtype:
        dtype, at = _DTYPES.get(data[0] if data else -1, ""), 1
        if not dtype:
            raise ValueError("the array has no dtype that is known")
    if shape is None:
        head = data[at] if len(data) > at else 0
        axes, width = head >> 2, 1 << (head & 3)
        if not 0 < axes <= _MAX_AXES or len(data) < at + 1 + axes * width:
            raise ValueError(f"the array's {len(data)} bytes do not hold its shape")
        shape = tuple(np.frombuffer(data, f"<u{width}", axes, at + 1).tolist())
        at += 1 + axes * width
    kind = np.dtype(dtype).newbyteorder("<")
    if len(data) - at != kind.itemsize * prod(shape):
        raise ValueError(f"the array is {dtype}{list(shape)}, and has {len(data) - at} bytes")
    return np.frombuffer(data, kind, offset=at).reshape(shape)


def _raw_image(data: bytes) -> Any:
    """Return a Pillow image from u32 width, height and length of the mode, the mode, and the pixels.

    Raises ValueError if it is damaged, and for a mode that PNG cannot store without loss.
    """
    if len(data) < _IMAGE_HEAD.size:
        raise ValueError(f"the image has {len(data)} bytes, too few for its header")
    width, height, length = _IMAGE_HEAD.unpack_from(data)
    mode = data[_IMAGE_HEAD.size : _IMAGE_HEAD.size + length].decode("ascii", "replace") if length <= 8 else "?"
    if mode not in (*_PIXEL_BYTES, "1"):
        modes = ", ".join((*_PIXEL_BYTES, "1"))
        raise ValueError(f"the image has the mode {mode!r}, only {modes} become PNG without loss")
    pixels = data[_IMAGE_HEAD.size + length :]
    needed = height * ((width + 7) // 8 if mode == "1" else width * _PIXEL_BYTES[mode])
    if len(pixels) != needed or not needed or max(width, height) >> 31:
        raise ValueError(f"the image of {width} x {height} pixels needs {needed} bytes, it has {len(pixels)}")
    from PIL import Image

    return Image.frombytes(mode, (width, height), pixels)
