"""Parquet files: one, a glob, or a folder of them. See formats/parquet/MAPPING.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.arrow.arrowfields import ArrowColumn
from streamloader.conversion.sources.arrow.arrowopen import TableFormat, open_tables, visible_files
from streamloader.conversion.sources.arrow.arrowtables import Table, Tables, by_block, damaged, reading
from streamloader.conversion.sources.base import GAP_BYTES
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.needs import need
from streamloader.conversion.sources.rangefile import BUFFER_BYTES, open_file
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.storage.protocol import ObjectInfo, Store

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

NAME = "parquet"
_EXTENSIONS = frozenset({"parquet"})
_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}  # folders of tables of which not every file counts

# Of a row group that is fetched whole; of a larger one each column is read in pieces, which are as much together. A
# request over a network takes long whatever it asks for, so there it is worth the memory.
_NEAR_BYTES, _FAR_BYTES = 2 << 20, 64 << 20
_SMALLEST_PIECE, _LARGEST_PIECE = 256 << 10, 4 << 20
_BATCH_BYTES, _BATCH_ROWS = 1 << 20, 1 << 16  # larger ones leave larger holes between what is kept of them
# Of the first batch: only decoding says how large rows are, since a dictionary has each value once.
_FIRST_ROWS = 128


def matches(listing: Listing) -> bool:
    """Return whether the listing holds a .parquet."""
    return bool(visible_files(listing, _EXTENSIONS))


def open_source(listing: Listing, wish: Wish) -> Tables:
    """Return the source, with every file's footer read; rows are in the order of the sorted files.

    Raises `SourceError` for files of different columns, for what is no Parquet, and for the tables of a lake, whose
    log says which files count; `FieldError` for columns that no field holds.
    """
    files = visible_files(listing, _EXTENSIONS) or (() if listing.folder else listing.files)
    if not files:
        raise SourceError(f"{listing.url} holds no .parquet", "give a .parquet, a folder of them, or a glob")
    for info in listing.files:
        folders = info.path.split("/")[:-1]
        lake = next((_LOGS[one] for one in folders if one in _LOGS), "")
        if lake or info.path.endswith(".metadata.json"):
            problem = f"{listing.url} is a {lake or 'Iceberg'} table, not all of whose files count ({info.path})"
            raise SourceError(problem, "write its rows as plain Parquet, or name the files that count")
    return open_tables(listing, files, TableFormat("Parquet", scan, read_rows), wish)


def scan(store: Store, info: ObjectInfo) -> tuple[Table, pa.Schema]:
    """Return the row groups of a file, and its schema, from its footer. Raises `SourceError`."""
    pq = need("pyarrow.parquet", "arrow")
    with reading(store, info, "Parquet"):
        file = pq.ParquetFile(open_file(store, info))
        metadata, schema = file.metadata, file.schema_arrow
        counts = np.array([metadata.row_group(one).num_rows for one in range(metadata.num_row_groups)], np.int64)
    if sum(counts.tolist()) != metadata.num_rows or (counts < 0).any():
        raise damaged(store, info, "has row groups that do not sum up to its rows")
    return Table(info, counts), schema


def read_rows(
    store: Store, table: Table, rows: NDArray[np.int64], columns: Sequence[ArrowColumn]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches with these rows, of these columns only. A row group is read up to the last row that is asked for.

    Of a row group of up to 64 MiB the columns are fetched whole, of a larger one in pieces; of local files less.
    """
    pq = need("pyarrow.parquet", "arrow")
    metadata = pq.read_metadata(open_file(store, table.info))
    groups = [metadata.row_group(one) for one in range(metadata.num_row_groups)]
    if [group.num_rows for group in groups] != table.counts.tolist():
        raise damaged(store, table.info, "has other row groups than before")
    names = [".".join(column.path) for column in columns]
    blocks = by_block(table.counts, rows)
    whole = _NEAR_BYTES if store.reader().kind == "file" else _FAR_BYTES
    plans = [_plan(groups[number], len(names), int(within[-1]) + 1, whole) for number, _, within in blocks]
    piece = min((piece for piece, _ in plans if piece), default=0)
    few = 2 * len(names) < metadata.num_columns  # then what lies between them is passed over
    source = open_file(store, table.info, piece or (GAP_BYTES if few else BUFFER_BYTES))
    options = {"buffer_size": piece, "pre_buffer": False, "page_checksum_verification": True}
    file = pq.ParquetFile(source, metadata=metadata, **options)
    size, near = _FIRST_ROWS, whole == _NEAR_BYTES
    for (number, start, within), (_, most) in zip(blocks, plans, strict=True):
        at, stop = 0, int(within[-1]) + 1
        while at < stop:  # more than once where the size of batches changes: the group is then decoded from its start
            count, before = min(size, most), at
            batches = file.iter_batches(count, row_groups=[number], columns=names, use_threads=False)
            for first, batch in _from_row(batches, at):
                yield start + first, batch
                at = first + batch.num_rows
                size = min(_next_size(count, batch), most)
                if at >= stop or size < count or (near and size > count):  # from afar the next group is soon enough
                    break
            if at == before:
                break  # the group is shorter than it says, which the caller notices


def _from_row(batches: Iterator[pa.RecordBatch], row: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield what the batches of a row group hold from a row on, with the number of the first row of each."""
    first = 0
    for batch in batches:
        stop = first + batch.num_rows
        if stop > row:
            skipped = max(0, row - first)
            yield first + skipped, batch.slice(skipped)
        first = stop


def _next_size(size: int, batch: pa.RecordBatch) -> int:
    """Return how many rows to decode at a time after a batch: other than so far where that is far from 1 MiB."""
    fitting = max(1, _BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1))
    far = fitting < size // 4 or (size == _FIRST_ROWS and fitting > size)
    return min(fitting, _BATCH_ROWS) if far else size


def _plan(group: pq.RowGroupMetaData, columns: int, stop: int, whole: int) -> tuple[int, int]:
    """Return the bytes to read of a column at a time, 0 for all of it, and the rows to decode at a time.

    The rows up to `stop` are asked for, and about `whole` bytes read at a time. Only sizes of the group are looked at:
    what is wrong in the metadata of a column ends the process where pyarrow is asked for it, while reading it raises.
    """
    few = stop < group.num_rows // 4  # the rest would be read for nothing
    piece = min(_LARGEST_PIECE, max(_SMALLEST_PIECE, whole // max(columns, 4)))
    batch = _BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
    return piece if few or group.total_byte_size > whole else 0, min(_BATCH_ROWS, max(batch, 1))
