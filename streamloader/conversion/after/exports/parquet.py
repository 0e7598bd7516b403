"""Export to Parquet: a file for each piece, a column for each field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamloader.conversion.after.exports.base import File, Piece, Task
from streamloader.conversion.sources.needs import need
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field

OVERHEAD = 16
GROUP_BYTES = 32 << 20  # of a row group, decoded: what a reader holds to read any of its rows


@dataclass(frozen=True)
class ParquetExport:
    """Writes `fields` in row groups of so many rows."""

    fields: Mapping[str, Field]
    group_rows: int

    def files(self, piece: Piece) -> Iterator[File]:
        """Yield one file. Raises `UsageError` where pyarrow is missing."""
        arrow, parquet = need("pyarrow", "arrow"), need("pyarrow.parquet", "arrow")
        columns = {name: _column(arrow, self.fields[name], column) for name, column in piece.columns.items()}
        sink = arrow.BufferOutputStream()
        parquet.write_table(arrow.table(columns), sink, row_group_size=self.group_rows, compression="zstd")
        yield f"part-{piece.number:05}.parquet", memoryview(sink.getvalue())

    def last_files(self) -> Iterator[File]:
        """Yield nothing."""
        yield from ()


def plan(task: Task) -> ParquetExport:
    """Return the exporter. Raises `UsageError` where pyarrow is missing."""
    need("pyarrow.parquet", "arrow")
    row = sum(layout.nbytes for layout in task.layouts.values()) / max(1, task.num_samples)
    return ParquetExport(task.fields, max(1, int(GROUP_BYTES / max(1.0, row))))


def _column(arrow: Any, field: Field, column: Column) -> Any:
    """Return a column as Arrow has it: numbers, fixed-size lists in lists, lists, binary or string."""
    if field.fixed:
        flat = np.ascontiguousarray(column).reshape(-1)
        return _shaped(arrow, arrow.array(flat), field.shape)
    if field.kind in ("bytes", "text"):
        binary = arrow.array(column, arrow.binary())  # chunked where it has 2 GiB or more
        return binary.cast(arrow.string()) if field.kind == "text" else binary
    rows = np.array([len(item) // field.item_bytes for item in column], np.int64)
    stops = np.concatenate([[0], np.cumsum(rows)])
    flat = np.frombuffer(b"".join(column), np.dtype(field.dtype).newbyteorder("<"))
    kind = arrow.ListArray if stops[-1] < 2**31 else arrow.LargeListArray
    offsets = stops.astype(np.int32 if kind is arrow.ListArray else np.int64)
    return kind.from_arrays(arrow.array(offsets), _shaped(arrow, arrow.array(flat), field.shape))


def _shaped(arrow: Any, values: Any, shape: tuple[int, ...]) -> Any:
    for axis in reversed(shape):
        values = arrow.FixedSizeListArray.from_arrays(values, axis)
    return values
