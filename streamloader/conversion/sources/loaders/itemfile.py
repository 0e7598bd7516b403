"""Files of numbered items, as MDS shards and LitData chunks are: u32 count, u32 offsets[count + 1], then the items.

All numbers are little-endian. Something else may stand between the offsets and the first item, and after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Range, Refuse, read_range
from streamloader.conversion.sources.loaders.unpack import file_pieces, unpack
from streamloader.conversion.sources.spans import read_each
from streamloader.conversion.sources.streams import Content
from streamloader.errors import SourceError, StreamloaderError
from streamloader.storage.protocol import ObjectInfo, Store


@dataclass(frozen=True)
class ItemFile:
    """A file of `count` items. Where the whole of it is compressed, `packing` says how, and unpacked it has between
    `least` and `most` bytes.
    """

    info: ObjectInfo
    count: int
    packing: str = ""
    least: int = 0
    most: int = 0


Items = Callable[[Store, ItemFile, NDArray[np.int64]], Iterator[Any]]  # the items of some rows, in order
Decode = Callable[[Any], Mapping[str, Any]]  # raises ValueError for a bad one


def table_bytes(count: int) -> int:
    """Return the bytes of count and offsets."""
    return 4 * (count + 2)


def read_items(store: Store, file: ItemFile, rows: NDArray[np.int64]) -> Iterator[memoryview]:
    """Yield the bytes of the items of these rows, which ascend. Raises `SourceError` that names the file."""
    where = f"{store.url}/{file.info.path}"
    if not file.packing:
        stop = min(table_bytes(int(rows[-1]) + 1), file.info.size)
        table = read_range(store, Range(file.info.path, 0, stop))
        content = Content(store, file.info, "", file.info.size)
        yield from read_each(content, *item_spans(table, file.count, rows, file.info.size, where))
        return
    data = unpack_file(store, file)
    for start, stop in zip(*item_spans(data, file.count, rows, len(data), where), strict=True):
        yield data[int(start) : int(stop)]


def unpack_file(store: Store, file: ItemFile) -> memoryview:
    """Return the whole of a compressed file. Raises `SourceError` unless it has as many bytes as its index says."""
    where = f"{store.url}/{file.info.path}"
    data = unpack(file.packing, file_pieces(store, file.info), file.most, where)
    if len(data) < file.least:
        problem = f"{where} unpacks to {len(data)} bytes, its index says {file.least}: it is truncated"
        raise SourceError(problem, "fetch or make it again")
    return data


def item_spans(
    table: memoryview, count: int, rows: NDArray[np.int64], size: int, where: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the items of these rows start and stop, from a table that may end after the last of them.

    Raises `SourceError` unless the table is one of `count` items that lie one after another within `size` bytes.
    """
    again = "fetch or make it again"
    last = int(rows[-1]) + 1
    if len(table) < table_bytes(last):
        raise SourceError(f"{where} is truncated: it ends within its table of offsets", again)
    found = np.frombuffer(table, "<u4", last + 2)
    if found[0] != count:
        raise SourceError(f"{where} holds {found[0]} samples, its index says {count}", again)
    offsets = found[1:].astype(np.int64)
    if offsets[0] < table_bytes(count) or offsets[-1] > size or (np.diff(offsets) < 0).any():
        raise SourceError(f"{where} is damaged: its offsets do not lie one after another in its {size} bytes", again)
    return offsets[rows], offsets[rows + 1]


@dataclass(frozen=True)
class ItemFiles:
    """The items of several files, numbered through; `items` reads those of one file, `decode` makes samples of them."""

    store: Store
    files: tuple[ItemFile, ...]
    items: Items
    decode: Decode

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The number of each file's first item, and that of all items."""
        return np.cumsum([0, *(file.count for file in self.files)], dtype=np.int64)

    def cut(self, rows: NDArray[np.int64]) -> ItemPart:
        """Return the part of these rows, with the files that they need only."""
        firsts = self.firsts
        used, number = np.unique(np.searchsorted(firsts, rows, side="right") - 1, return_inverse=True)
        files = tuple(self.files[one] for one in used.tolist())
        return ItemPart(self.store, files, number, rows - firsts[used[number]], self.items, self.decode)


@dataclass(frozen=True, eq=False)
class ItemPart:
    """Some items: `number[n]` says in which of `files` item n lies, `row[n]` its number there."""

    store: Store
    files: tuple[ItemFile, ...]
    number: NDArray[np.int64]
    row: NDArray[np.int64]
    items: Items
    decode: Decode

    def read(self, refuse: Refuse) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield position and values of each sample; those that cannot be decoded go to `refuse`."""
        for number, file in enumerate(self.files):
            here = np.flatnonzero(self.number == number)
            items = self.items(self.store, file, self.row[here])
            for position, item in zip(here.tolist(), items, strict=True):
                try:
                    sample = self.decode(item)
                except StreamloaderError:
                    raise
                except ValueError as error:
                    data = bytes(item) if isinstance(item, memoryview) else b""
                    refuse(BadSample(position, self.name(position), str(error), data=data))
                else:
                    yield position, sample

    def name(self, position: int) -> str:
        """Return the file and the number of the sample in it."""
        path = self.files[int(self.number[position])].info.path
        return f"{self.store.url}/{path}: sample {int(self.row[position])}"
