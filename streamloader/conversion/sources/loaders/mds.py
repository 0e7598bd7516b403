"""MosaicML streaming datasets (MDS): shards of samples and their index.json. See formats/mds/MAPPING.md."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamloader.conversion.sources.files import Listing, field_names
from streamloader.conversion.sources.loaders.itemfile import ItemFile, ItemFiles, read_items, table_bytes
from streamloader.conversion.sources.loaders.jsonindex import Index, has_index, read_index, sorted_files
from streamloader.conversion.sources.loaders.mdsvalues import Encoding, encoding_of
from streamloader.conversion.sources.loaders.unpack import MAX_UNPACKED
from streamloader.conversion.sources.records import Origin, RecordSource, open_records
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.format.manifest import natural

NAME = "mds"
VERSION = 2
_PACKINGS = {"zstd": "zstd", "gz": "gzip", "bz2": "bzip2"}
_SHARD = re.compile(r"\.mds(\.\w+)?\Z")


def matches(listing: Listing) -> bool:
    """Return whether the listing holds an index.json and shards."""
    return has_index(listing, _SHARD)


def open_source(listing: Listing, wish: Wish) -> RecordSource:
    """Return the source: the samples of all shards, in the order of the index.

    Raises `SourceError` for an index that does not fit its files, for shards of different columns, and for a column
    that is wished and whose encoding is not read (pickles, lists of images, ...).
    """
    index = read_index(listing)
    shards = _shards(index)
    columns = _columns(index, shards)
    files = [_item_file(index, shard, f"shard {number}") for number, shard in enumerate(shards)]
    names = field_names([column.key for column in columns], index.where)
    chosen = [_chosen(column, names[column.key], wish, index.where) for column in columns]
    items = ItemFiles(listing.store, tuple(files), read_items, MdsSample(tuple(chosen)))
    encodings = {names[column.key]: column.encoding for column in columns}
    found = sorted_files(index, [file.info for file in files])
    origin = Origin(listing.url, found, sum(file.count for file in files), {"encodings": encodings})
    return open_records(origin, items.cut, wish)


@dataclass(frozen=True)
class Column:
    """A column of every sample. `size` is the number of bytes of its values, 0 where each states its own; without
    `value` it is passed over.
    """

    key: str
    encoding: str
    size: int
    value: Encoding | None = None


@dataclass(frozen=True)
class MdsSample:
    """Reads a sample: u32 size of each value of a column without a fixed one, then the values."""

    columns: tuple[Column, ...]

    def __call__(self, item: memoryview) -> Mapping[str, Any]:
        """Return its values by column, None for those passed over. Raises ValueError for a damaged one."""
        sizes = [column.size for column in self.columns]
        varying = [i for i, size in enumerate(sizes) if not size]
        at = 4 * len(varying)
        if len(item) < at:
            raise ValueError(f"it has {len(item)} bytes, the sizes of its columns alone {at}")
        for i, size in zip(varying, struct.unpack_from(f"<{len(varying)}I", item), strict=True):
            sizes[i] = size
        if at + sum(sizes) != len(item):
            raise ValueError(f"it has {len(item)} bytes, its columns {at + sum(sizes)}")
        values: dict[str, Any] = {}
        for column, size in zip(self.columns, sizes, strict=True):
            data = item[at : at + size]
            values[column.key] = _value(column, bytes(data)) if column.value else None
            at += size
        return values


def _value(column: Column, data: bytes) -> Any:
    assert column.value is not None
    try:
        return column.value.read(data)
    except ValueError as error:
        raise ValueError(f"column {column.key!r}: {error}") from None


def _shards(index: Index) -> list[Mapping[str, Any]]:
    if index.document.get("version") != VERSION:
        problem = f"{index.where} is of version {index.document.get('version')!r}, only {VERSION} is known"
        raise SourceError(problem, "write the dataset again with a current streaming package")
    shards = index.document.get("shards")
    if not isinstance(shards, list) or not shards or not all(isinstance(shard, dict) for shard in shards):
        raise index.wrong("lists no shard")
    for shard in shards:
        if shard.get("format") != NAME:
            problem = f"{index.where} lists shards of the format {shard.get('format')!r}, only 'mds' is read"
            raise SourceError(problem, "convert the JSON or CSV files themselves, or write MDS")
    return shards


def _columns(index: Index, shards: list[Mapping[str, Any]]) -> list[Column]:
    """Return the columns, which all shards must share."""
    keys = ("column_names", "column_encodings", "column_sizes")
    first = [shards[0].get(key) for key in keys]
    for number, shard in enumerate(shards):
        other = next((key for key, value in zip(keys, first, strict=True) if shard.get(key) != value), None)
        if other:
            problem = f"shard {number} of {index.where} has other {other} than the first"
            raise SourceError(problem, "give all shards the same columns, or convert them apart")
    names, encodings, sizes = first
    if not (isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list) and names):
        raise index.wrong("does not list its columns")
    if not len(names) == len(encodings) == len(sizes) or len(set(map(str, names))) < len(names):
        raise index.wrong("lists columns without one name, encoding and size each")
    if not all(isinstance(one, str) for one in (*names, *encodings)):
        raise index.wrong("names columns or encodings by what is no text")
    columns = []
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        try:
            columns.append(Column(name, encoding, natural(size or 0)))
        except ValueError as error:
            raise index.wrong(f"gives column {name!r} the size {error}") from None
    return columns


def _chosen(column: Column, name: str, wish: Wish, where: str) -> Column:
    """Return the column with how it is read, as it is where it is not wished."""
    if not wish.wanted(name):
        return column
    try:
        encoding = encoding_of(column.encoding)
    except ValueError as error:
        problem = f"the column {column.key!r} of {where} is {column.encoding!r}: {error}"
        raise SourceError(problem, "leave it out by naming the fields to keep with --fields") from None
    if (encoding.size or 0) != column.size:
        said = f"says {column.size or 'varying'} bytes of the column {column.key!r}"
        raise SourceError(f"{where} {said}, {column.encoding!r} has {encoding.size or 'varying'}", "make it again")
    return Column(column.key, column.encoding, column.size, encoding)


def _item_file(index: Index, shard: Mapping[str, Any], which: str) -> ItemFile:
    """Return the file of a shard: the unpacked one where it is there, else the compressed one."""
    try:
        count, raw, packed = natural(shard["samples"]), shard["raw_data"], shard.get("zip_data")
        size, compression = natural(raw["bytes"]), shard.get("compression")
        if packed and compression and raw["basename"] not in index.files:
            info, codec, stored = index.file(packed["basename"]), str(compression).partition(":")[0], packed["bytes"]
        else:
            info, codec, stored = index.file(raw["basename"]), "", size
        natural(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise index.wrong(f"does not say what {which} is ({type(error).__name__}: {error})") from None
    if info.size != stored:
        problem = f"{index.where} says that {info.path} has {stored} bytes, it has {info.size}"
        raise SourceError(problem, "fetch or make it again")
    if table_bytes(count) > size:
        raise index.wrong(f"says that {info.path} holds {count} samples in {size} bytes")
    if not codec:
        return ItemFile(info, count)
    if codec not in _PACKINGS:
        problem = f"{info.path} of {index.where} is compressed with {codec!r}, only {', '.join(_PACKINGS)} are read"
        raise SourceError(problem, "write it again with compression='zstd'")
    if size > MAX_UNPACKED:
        problem = f"{info.path} of {index.where} unpacks to {size} bytes, at most {MAX_UNPACKED} are unpacked whole"
        raise SourceError(problem, "write smaller shards, or unpack it")
    return ItemFile(info, count, _PACKINGS[codec], size, size)
