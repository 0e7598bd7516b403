"""Arrow IPC files and streams, Feather version 2 among them. See formats/arrow/MAPPING.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.arrow.arrowfields import ArrowColumn
from streamloader.conversion.sources.arrow.arrowopen import TableFormat, open_tables, visible_files
from streamloader.conversion.sources.arrow.arrowtables import Table, Tables, by_block, damaged, reading
from streamloader.conversion.sources.arrow.ipcindex import IpcIndex, index_messages
from streamloader.conversion.sources.base import GAP_BYTES, REQUEST_BYTES, Range, read_range, read_ranges
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.needs import need
from streamloader.conversion.sources.rangefile import BUFFER_BYTES, open_file
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.storage.protocol import ObjectInfo, Store, room_for

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "arrow"
_EXTENSIONS = frozenset({"arrow", "feather", "ipc"})
_HEADERS_BYTES = 64 << 10  # read at a time while headers are looked for: bodies lie between them


def matches(listing: Listing) -> bool:
    """Return whether the listing holds an .arrow, .feather or .ipc."""
    return bool(visible_files(listing, _EXTENSIONS))


def open_source(listing: Listing, wish: Wish) -> Tables:
    """Return the source, with the headers of every record batch read; rows are in the order of the sorted files.

    Raises `SourceError` for files of different columns, for what is no Arrow file or stream, and for a truncated one;
    `FieldError` for columns that no field holds.
    """
    files = visible_files(listing, _EXTENSIONS) or (() if listing.folder else listing.files)
    if not files:
        raise SourceError(f"{listing.url} holds no .arrow, .feather or .ipc", "give one, a folder of them, or a glob")
    return open_tables(listing, files, IPC, wish)


def scan(store: Store, info: ObjectInfo) -> tuple[Table, pa.Schema]:
    """Return the record batches of a file or stream, and its schema. Raises `SourceError`."""
    with reading(store, info, "Arrow"):
        index = index_messages(open_file(store, info, _HEADERS_BYTES), info.size, f"{store.url}/{info.path}")
        return Table(info, index.rows, index), _schema(store, info, index)


def _schema(store: Store, info: ObjectInfo, index: IpcIndex) -> pa.Schema:
    pa, ipc = need("pyarrow", "arrow"), need("pyarrow.ipc", "arrow")
    return ipc.read_schema(pa.py_buffer(read_range(store, Range(info.path, *index.schema))))


def read_rows(
    store: Store, table: Table, rows: NDArray[np.int64], columns: Sequence[ArrowColumn]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the record batches with these rows, one in memory at a time: of a file these columns only."""
    ipc = need("pyarrow.ipc", "arrow")
    index = table.index
    assert index is not None
    blocks = by_block(table.counts, rows)
    numbers = [number for number, _, _ in blocks]
    names = {column.path[0] for column in columns}
    there = _schema(store, table.info, index).names
    wanted = [number for number, name in enumerate(there) if name in names]
    options = ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    if index.footer:
        few = 2 * len(wanted) < len(there)  # then what lies between them is passed over
        file = ipc.open_file(open_file(store, table.info, GAP_BYTES if few else BUFFER_BYTES), options=options)
        if file.num_record_batches != len(table.counts):
            raise damaged(store, table.info, "has other record batches than its footer says")
        batches: Iterator[pa.RecordBatch] = (file.get_batch(number) for number in numbers)
    else:
        spliced = Splice(store, table.info.path, _needed(index, numbers))
        batches = iter(ipc.open_stream(spliced, options=options))
    for (number, start, _), batch in zip(blocks, batches, strict=False):  # whoever reads them notices what is lacking
        if batch.num_rows != table.counts[number]:
            raise damaged(store, table.info, "has other record batches than its headers say")
        yield start, batch


def _needed(index: IpcIndex, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, stop) of the messages that decode these batches: dictionaries hold for what follows them."""
    batches = index.batches[numbers]
    before = index.dictionaries[index.dictionaries[:, 0] < batches[-1, 0]]
    found = [index.schema, *sorted(map(tuple, np.concatenate([before, batches]).tolist()))]
    return [(int(start), int(stop)) for start, stop in found]


IPC = TableFormat("Arrow", scan, read_rows)


class Splice:
    """Spans of one object, one after another, as a file that is read once, from its start. A few requests are under way
    at once.
    """

    def __init__(self, store: Store, path: str, spans: Sequence[tuple[int, int]]) -> None:
        self._pieces = read_ranges(store, list(_requests(path, spans)))
        self._left = memoryview(b"")
        self._at = 0
        self.closed = False

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return False."""
        return False

    def writable(self) -> bool:
        """Return False."""
        return False

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._at

    def close(self) -> None:
        """Give back what was fetched."""
        self._pieces = iter(())
        self._left = memoryview(b"")
        self.closed = True

    def read(self, size: int) -> memoryview:
        """Return the next `size` bytes, fewer at the end: nothing is copied where they came with one request."""
        if not self._left:
            self._left = next(self._pieces, self._left)
        data = self._left[:size]
        if len(data) < size:
            whole = room_for(size)
            filled = 0
            while data:
                whole[filled : filled + len(data)] = data
                filled += len(data)
                self._left = self._left[len(data) :] or next(self._pieces, memoryview(b""))
                data = self._left[: size - filled]
            self._at += filled
            return whole[:filled]
        self._left = self._left[size:]
        self._at += size
        return data


def _requests(path: str, spans: Sequence[tuple[int, int]]) -> Iterator[Range]:
    """Yield the spans as requests: neighbours together, but none too long."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        first = joined.pop()[0] if joined and joined[-1][1] == start else start
        joined.append((first, stop))
    for start, stop in joined:
        yield from (Range(path, at, min(at + REQUEST_BYTES, stop)) for at in range(start, stop, REQUEST_BYTES))
