"""LitData optimized datasets: chunks of samples and their index.json. See formats/litdata/MAPPING.md."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamloader.conversion.sources.files import Listing, field_names
from streamloader.conversion.sources.infer import flatten
from streamloader.conversion.sources.loaders.itemfile import ItemFile, ItemFiles, read_items, table_bytes
from streamloader.conversion.sources.loaders.jsonindex import Index, has_index, read_index, sorted_files
from streamloader.conversion.sources.loaders.litchunks import read_chunk
from streamloader.conversion.sources.loaders.litnested import plain_value
from streamloader.conversion.sources.loaders.littree import leaf_names
from streamloader.conversion.sources.loaders.litvalues import ReadLeaf, leaf_reader
from streamloader.conversion.sources.loaders.unpack import MAX_UNPACKED, unpack
from streamloader.conversion.sources.records import Origin, RecordSource, open_records
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.format.manifest import natural

NAME = "litdata"
_CHUNK = re.compile(r"\Achunk-.*\.bin\Z")
_TREES, _TOKENS = "PyTreeLoader", "TokensLoader"
_OTHERS = {
    "ParquetLoader": "convert the Parquet files themselves: --format parquet",
    "TemporalArrayLoader": "write its records with the loader of plain samples",
}


def matches(listing: Listing) -> bool:
    """Return whether the listing holds an index.json and chunks."""
    return has_index(listing, _CHUNK)


def open_source(listing: Listing, wish: Wish) -> RecordSource:
    """Return the source: the samples of all chunks, in the order of the index.

    Raises `SourceError` for an index that does not fit its files, for encrypted chunks, and for a leaf that is wished
    and whose data format is not read (pickles, graphs, ...).
    """
    index = read_index(listing)
    config, chunks = index.document.get("config"), index.document.get("chunks")
    if not isinstance(config, dict) or not isinstance(chunks, list):
        raise index.wrong("is not that of a LitData dataset: it has no config and chunks")
    formats = config.get("data_format")
    if not isinstance(formats, list) or not formats or not all(isinstance(one, str) for one in formats):
        raise index.wrong("does not say the data format of its samples")
    loader = _loader(config, index.where)
    packed = _packed_samples(config, index.where)
    files = tuple(_item_file(index, chunk, number) for number, chunk in enumerate(chunks))
    keys = leaf_names(config.get("data_spec"), len(formats))
    names = field_names(keys, index.where)
    leaves = [
        Leaf(key, _reader(key, one, index.where) if wish.wanted(names[key]) else None)
        for key, one in zip(keys, formats, strict=True)
    ]
    sample = LitSample(tuple(leaves), packed, loader == _TOKENS)
    items = ItemFiles(listing.store, files, read_items if loader == _TOKENS else read_chunk, sample)
    notes = {"formats": {names[key]: one for key, one in zip(keys, formats, strict=True)}}
    found = sorted_files(index, [file.info for file in files])
    origin = Origin(listing.url, found, sum(file.count for file in files), notes)
    return open_records(origin, items.cut, wish)


@dataclass(frozen=True)
class Leaf:
    """A value of every sample; without `read` it is passed over."""

    key: str
    read: ReadLeaf | None


@dataclass(frozen=True)
class LitSample:
    """Reads a sample: u32 size of each leaf, then the leaves. A `packed` one is a Zstandard frame, one of `tokens` is
    its only leaf.
    """

    leaves: tuple[Leaf, ...]
    packed: bool
    tokens: bool

    def __call__(self, item: memoryview | Mapping[str, Any]) -> Mapping[str, Any]:
        """Return its values by key, None for those passed over. Raises ValueError for a damaged one."""
        if isinstance(item, Mapping):  # a row of Arrow
            return {key: plain_value(value) for key, value in flatten(item).items()}
        data = self._unpacked(item) if self.packed else item
        at = 0 if self.tokens else 4 * len(self.leaves)
        if len(data) < at:
            raise ValueError(f"it has {len(data)} bytes, the sizes of its leaves alone {at}")
        sizes = (len(data),) if self.tokens else struct.unpack_from(f"<{len(self.leaves)}I", data)
        if at + sum(sizes) != len(data):
            raise ValueError(f"it has {len(data)} bytes, its leaves {at + sum(sizes)}")
        values: dict[str, Any] = {}
        for leaf, size in zip(self.leaves, sizes, strict=True):
            values[leaf.key] = _value(leaf, bytes(data[at : at + size]))
            at += size
        return values

    def _unpacked(self, item: memoryview) -> memoryview:
        try:
            return unpack("zstd", [item], MAX_UNPACKED, "it")
        except SourceError as error:
            raise ValueError(error.problem) from None


def _value(leaf: Leaf, data: bytes) -> Any:
    try:
        return leaf.read(data) if leaf.read else None
    except ValueError as error:
        raise ValueError(f"{leaf.key!r}: {error}") from None


def _reader(key: str, data_format: str, where: str) -> ReadLeaf:
    try:
        return leaf_reader(data_format)
    except ValueError as error:
        problem = f"{key!r} of {where} is {data_format!r}: {error}"
        raise SourceError(problem, "leave it out by naming the fields to keep with --fields") from None


def _loader(config: Mapping[str, Any], where: str) -> str:
    """Return the loader that wrote the chunks, one of those that are known."""
    if config.get("encryption"):
        raise SourceError(f"{where} says that its chunks are encrypted", "write the dataset again without encryption")
    loader = config.get("item_loader") or _TREES  # the first releases had no other
    if loader not in (_TREES, _TOKENS):
        remedy = _OTHERS.get(str(loader), f"write the dataset again with {_TREES}")
        raise SourceError(f"{where} says that its chunks are those of {loader}, which are not read", remedy)
    return str(loader)


def _packed_samples(config: Mapping[str, Any], where: str) -> bool:
    """Return whether each sample is compressed on its own. Raises `SourceError` for what is no Zstandard."""
    compression = config.get("compression")
    if compression and str(compression).partition(":")[0] != "zstd":
        problem = f"{where} says that its chunks are compressed with {compression!r}, only zstd is read"
        raise SourceError(problem, "write the dataset again with compression='zstd'")
    return bool(compression) and config.get("compression_level") == "sample"


def _item_file(index: Index, chunk: Any, number: int) -> ItemFile:
    """Return the file of a chunk. Its stated bytes are those of the file, without its table in the first releases;
    unpacked ones where its name says that it is compressed as a whole.
    """
    try:
        info, count, size = index.file(chunk["filename"]), natural(chunk["chunk_size"]), natural(chunk["chunk_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise index.wrong(f"does not say what chunk {number} is ({type(error).__name__}: {error})") from None
    most = size + table_bytes(count)
    if ".zstd" in info.path:
        if most > MAX_UNPACKED:
            problem = f"{info.path} of {index.where} unpacks to {size} bytes, at most {MAX_UNPACKED} are unpacked whole"
            raise SourceError(problem, "write smaller chunks")
        return ItemFile(info, count, "zstd", size, most)
    if not size <= info.size <= most:
        problem = f"{index.where} says that {info.path} has {size} bytes, it has {info.size}"
        raise SourceError(problem, "fetch or make it again")
    if 4 * count > info.size:
        raise index.wrong(f"says that {info.path} holds {count} samples in {info.size} bytes")
    return ItemFile(info, count)
