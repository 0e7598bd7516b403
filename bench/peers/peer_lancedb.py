"""LanceDB: a table, and its `StreamingDataset`: splits of shuffled runs of rows, fetched and transformed by threads.

Variants: "packed" has rows of tokens packed when written; "pillow", "fast" and "uint8" choose the JPEG transform.
Reasons for each choice: README.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import torch
from common import Source, Spec, UnsupportedError, main
from crops import jpeg_transform
from lancedb.streaming import StreamingDataset
from measuring import HELD, count_of, ids_of, measure_epochs
from numpy.typing import NDArray
from torch.utils.data import DataLoader

TABLE = "samples"
WRITE_BYTES = 64 << 20  # of a record batch
SPLITS = 32
# rows that are shuffled, fetched and transformed together: 0.6 to 2.4 MB
RUN = {"images": 16, "vectors": 4096, "jpeg": 16, "tokens": 128, "packed": 128, "mixed": 64}
READ_AHEAD = 4  # its default


def options(spec: Spec) -> dict[str, str]:
    """Return the options of its S3 client."""
    keys = {"aws_access_key_id": spec.key, "aws_secret_access_key": spec.secret, "aws_region": "us-east-1"}
    client = {"aws_endpoint": spec.endpoint, "allow_http": "true", "aws_virtual_hosted_style_request": "false"}
    return {} if spec.is_local else {**keys, **client}


def write(spec: Spec) -> int:
    """Write the table from record batches of 64 MB."""
    source = Source(spec.source)
    if spec.variant == "packed":
        columns = {"tokens": source.packed_rows()}
        count, take = len(columns["tokens"]), lambda name, rows: tensor_column(columns[name][rows])
    else:
        count, take = len(source), partial(column, source)
    names = list(source.columns)
    rows = max(1, int(WRITE_BYTES / (sum(source.array(name).nbytes for name in names) / count)))

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            yield pa.RecordBatch.from_arrays([take(name, part) for name in names], names)

    schema = next(batches()).schema
    connection = lancedb.connect(spec.url, storage_options=options(spec))
    connection.create_table(TABLE, data=pa.RecordBatchReader.from_batches(schema, batches()), mode="overwrite")
    return len(source)


def column(source: Source, name: str, rows: slice) -> pa.Array:
    """Return rows of a column: fixed-size lists, binary, text or lists."""
    kind, values = source.columns[name], source.array(name)
    if kind == "tensor":
        return tensor_column(values[rows])
    ends = source.offsets(name)[rows.start : rows.stop + 1]
    part, offsets = np.ascontiguousarray(values[ends[0] : ends[-1]]), pa.array((ends - ends[0]).astype(np.int64))
    if kind == "ragged":
        return pa.LargeListArray.from_arrays(offsets, pa.array(part))
    kinds = {"bytes": pa.large_binary(), "text": pa.large_string()}
    return pa.Array.from_buffers(kinds[kind], len(ends) - 1, [None, offsets.buffers()[1], pa.py_buffer(part)])


def tensor_column(values: NDArray[Any]) -> pa.Array:
    """Return an array of numbers, or of fixed-size lists."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, math.prod(values.shape[1:]))


class Rows:
    """Its `transform` of a record batch: a row for each sample, of views where there is nothing to decode."""

    def __init__(self, source: Source, variant: str) -> None:
        self.shapes = {name: source.array(name).shape[1:] for name, kind in source.columns.items() if kind == "tensor"}
        self.crop: Callable[[bytes], Any] = jpeg_transform(variant)

    def __call__(self, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
        return list(zip(*(self.values(name, batch.column(name)) for name in batch.schema.names), strict=True))

    def values(self, name: str, values: pa.Array) -> Iterable[Any]:
        """Return the values of a column, one for each row."""
        if name == "jpeg":
            return [self.crop(value.as_py()) for value in values]
        if pa.types.is_large_string(values.type):
            return list(values.to_pylist())
        if pa.types.is_large_list(values.type):
            flat, ends = values.values.to_numpy(), values.offsets.to_numpy()
            return [flat[begin:end] for begin, end in pairwise(ends)]
        if pa.types.is_fixed_size_list(values.type):
            shape = self.shapes.get(name) or (values.type.list_size,)
            return values.flatten().to_numpy().reshape(len(values), *shape)
        return values.to_numpy()


def collate(names: list[str], lists: bool, rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Return a batch of tensors; text stays a list, and so do documents."""
    batch: dict[str, Any] = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if isinstance(values[0], str):
            batch[name] = list(values)
        elif lists:
            batch[name] = [torch.from_numpy(np.array(value)) for value in values]
        else:
            batch[name] = torch.from_numpy(np.stack(values))
    return batch


def read(spec: Spec) -> None:
    """Measure the epochs; each is a dataset of its own, as its page shows."""
    if spec.workers:
        raise UnsupportedError("its threads fetch and decode, and its workers cannot stay alive between epochs")
    source = Source(spec.source)
    packed = spec.variant == "packed"
    table = None

    def epoch(number: int) -> DataLoader[Any]:
        nonlocal table
        if table is None:
            table = lancedb.connect(spec.url, storage_options=options(spec)).open_table(TABLE)
        run = RUN["packed" if packed else spec.workload]
        held = int(HELD * table.count_rows() / SPLITS)  # by a split
        dataset = StreamingDataset(
            table,
            num_splits=SPLITS,
            shuffle_seed=spec.seed,
            epoch=number,
            shuffle_clump_size=min(run, max(1, held)),
            read_batch_size=min(run, max(1, held)),
            io_queue_depth=max(1, min(READ_AHEAD, held // run)),
            transform=Rows(source, spec.variant),
            transform_queue_depth=1,
        )
        columns = list(table.schema.names)
        lists = spec.workload == "tokens" and not packed
        return DataLoader(dataset, batch_size=spec.batch, collate_fn=partial(collate, columns, lists))

    measure_epochs(epoch, spec, count_of, ids_of)


if __name__ == "__main__":
    main(write=write, read=read)
