"""Hugging Face datasets: Parquet on S3, streamed, shuffled by file and by a buffer, batched as Arrow tables.

Reading is `load_dataset("parquet", streaming=True)`, `.shuffle(...)`, `.with_format("arrow")`, `.batch(...)` in a
DataLoader whose `collate_fn` turns each table into tensors. Reasons for each choice: README.md.
"""

from __future__ import annotations

import json
import os
import warnings
from functools import partial
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: nothing but the S3 server is asked
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import datasets
import datasets.distributed
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import s3fs
import torch
from common import PACKED_ROW, Source, Spec, main
from crops import jpeg_transform
from measuring import count_of, emit_order, ids_of, measure_epochs
from torch.utils.data import DataLoader

FILE_BYTES = 128 << 20
LEAST_FILES = 16
INDEX = "files.json"
ROW_GROUP_BYTES = 16 << 20
# about 150 MB of images, 64 MB of the others
SHUFFLE = {"images": 1000, "vectors": 200_000, "jpeg": 1000, "tokens": 8000, "mixed": 2000}


def storage_options(spec: Spec) -> dict[str, Any]:
    """Return the options of s3fs."""
    # Arrow asks for whole column chunks: s3fs need not read ahead of it
    return {**spec.s3fs_options, "default_cache_type": "none"}


def scan_options() -> pyarrow.dataset.ParquetFragmentScanOptions:
    """Return what the documentation of streaming advises: larger requests, and the next one started early."""
    cache = pa.CacheOptions(prefetch_limit=1, range_size_limit=128 << 20)
    return pyarrow.dataset.ParquetFragmentScanOptions(cache_options=cache)


def features(source: Source) -> datasets.Features:
    """Return the features: raw bytes for arrays and tokens, which Parquet decodes several times faster than lists."""
    kinds = {"bytes": datasets.Image(decode=False), "text": datasets.Value("string")}
    found = {}
    for name, kind in source.columns.items():
        scalar = kind == "tensor" and source.array(name).ndim == 1
        found[name] = datasets.Value("int64") if scalar else kinds.get(kind, datasets.Value("binary"))
    return datasets.Features(found)


def write(spec: Spec) -> int:
    """Write Parquet files with pyarrow, their schema with the features."""
    source, packed = Source(spec.source), spec.variant == "packed"
    schema = features(source).arrow_schema
    count = len(source.packed_rows()) if packed else len(source)
    total = sum(path.stat().st_size for path in source.folder.iterdir())
    size = min(FILE_BYTES, max(1 << 20, total // LEAST_FILES))
    per_file, per_group = (-(-count * part // total) for part in (size, min(size, ROW_GROUP_BYTES)))
    files = s3fs.S3FileSystem(**storage_options(spec))
    paths: list[str] = []
    for number, start in enumerate(range(0, count, per_file)):
        path = f"{spec.bucket}/{spec.prefix}/{number:06d}.parquet"
        paths.append(path)
        stop = min(start + per_file, count)
        options = {"compression": "none", "use_dictionary": False}
        with files.open(path, "wb") as out, pq.ParquetWriter(out, schema, **options) as to:
            for first in range(start, stop, per_group):
                to.write_table(table(source, schema, slice(first, min(first + per_group, stop)), packed))
    files.pipe_file(f"{spec.bucket}/{spec.prefix}/{INDEX}", json.dumps(paths).encode())
    return len(source)


def table(source: Source, schema: pa.Schema, rows: slice, packed: bool) -> pa.Table:
    """Return the samples of a row group."""
    columns: list[Any] = []
    for name, kind in source.columns.items():
        if packed:
            columns.append([row.tobytes() for row in source.packed_rows()[rows]])
        elif kind == "tensor":
            values = source.array(name)[rows]
            columns.append(values if values.ndim == 1 else [row.tobytes() for row in values])
        else:
            ends = source.offsets(name)[rows.start : rows.stop + 1].tolist()
            parts = [source.array(name)[ends[i] : ends[i + 1]].tobytes() for i in range(len(ends) - 1)]
            columns.append([{"bytes": part, "path": None} for part in parts] if kind == "bytes" else parts)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def as_batch(spec: Spec, shapes: dict[str, tuple[str, Any, tuple[int, ...]]], row: pa.Table) -> dict[str, Any]:
    """Turn a batch, one row of lists, into tensors."""
    found: dict[str, Any] = {}
    for name, (kind, dtype, shape) in shapes.items():
        column = row[name].combine_chunks().flatten()
        if kind == "bytes":
            transform = jpeg_transform(spec.variant)
            found[name] = torch.from_numpy(np.stack([transform(item.as_py()) for item in column.field("bytes")]))
        elif kind == "text":
            found[name] = column.to_pylist()
        elif pa.types.is_binary(column.type):
            offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
            flat = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].view(dtype)
            values = torch.from_numpy(flat)
            if kind == "ragged":
                found[name] = list(torch.split(values, (np.diff(offsets) // flat.itemsize).tolist()))
            else:
                found[name] = values.reshape(len(column), *shape)
        else:
            found[name] = torch.from_numpy(column.to_numpy())
    return found


def loader(spec: Spec) -> tuple[Any, DataLoader]:
    """Open the dataset, and make its loader; return both."""
    # tensors are views of Arrow's memory, as `datasets` itself makes them
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    # it waits 5 s at the end of each pass, for a crash of older Arrow versions when a process ends
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    source = Source(spec.source)
    shapes = {
        name: ("tensor", np.int32, (PACKED_ROW,))
        if spec.variant == "packed"
        else (kind, source.array(name).dtype, source.array(name).shape[1:])
        for name, kind in source.columns.items()
    }
    # a list of names, not a pattern: a server of static files cannot list
    files = s3fs.S3FileSystem(**storage_options(spec))
    names = [f"s3://{path}" for path in json.loads(files.cat_file(f"{spec.bucket}/{spec.prefix}/{INDEX}"))]
    data = datasets.load_dataset(
        "parquet",
        data_files=names,
        split="train",
        streaming=True,
        storage_options=storage_options(spec),
        fragment_scan_options=scan_options(),
        cache_dir=spec.cache,
    )
    if spec.world > 1:
        data = datasets.distributed.split_dataset_by_node(data, spec.rank, spec.world)
    data = data.shuffle(seed=spec.seed, buffer_size=SHUFFLE[spec.workload]).with_format("arrow").batch(spec.batch)
    options: dict[str, Any] = {"num_workers": spec.workers, "persistent_workers": spec.workers > 0}
    return data, DataLoader(data, batch_size=None, collate_fn=partial(as_batch, spec, shapes), **options)


def read(spec: Spec) -> None:
    """Measure the epochs."""
    made: list[Any] = []

    def epoch(number: int) -> Any:
        if not made:
            made.extend(loader(spec))
        made[0].set_epoch(number)
        return made[1]

    measure_epochs(epoch, spec, count_of, ids_of)


def order(spec: Spec) -> None:
    """Print the order of one rank."""
    data, batches = loader(spec)
    if spec.state is not None:
        data.load_state_dict(spec.state)
    emit_order(batches, spec, data.state_dict)


if __name__ == "__main__":
    main(write=write, read=read, order=order)
