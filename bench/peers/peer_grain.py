"""Grain: ArrayRecord files, copied from S3 to the cache first, since it reads files; a shuffled `MapDataset`.

Variants: "packed" has rows of tokens packed when written; "pillow", "fast" and "uint8" choose the JPEG transform.
Reasons for each choice: README.md.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np
import obstore
import torch
from array_record.python.array_record_module import ArrayRecordWriter
from common import Source, Spec, main
from crops import jpeg_transform
from measuring import HELD, measure_loader
from obstore.store import LocalStore, S3Store

FILES = 64
INDEX = "files.txt"
DOWNLOADS = 16
THREADS = 16  # its default; each makes a batch
PART = 8 << 20  # of a file that is copied: written as it comes


def store(spec: Spec) -> Any:
    """Return the client of the dataset."""
    if spec.is_local:
        return LocalStore(spec.url, mkdir=True)
    options: Any = {"allow_http": True, **({"root_certificate": Path(spec.ca).read_bytes()} if spec.ca else {})}
    keys = {"access_key_id": spec.key, "secret_access_key": spec.secret, "region": "us-east-1"}
    return S3Store(spec.bucket, prefix=spec.prefix, endpoint=spec.endpoint, client_options=options, **keys)


def write(spec: Spec) -> int:
    """Write and upload the files in as many processes as there are cores."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        names = pool.map(partial(write_file, spec), range(FILES))
    obstore.put(store(spec), INDEX, "".join(f"{name}\n" for name in names).encode())
    return len(Source(spec.source))


def write_file(spec: Spec, number: int) -> str:
    """Write the records of one file: the columns of a sample, one after another."""
    source, name = Source(spec.source), f"{number:03}.array_record"
    rows = source.packed_rows() if spec.variant == "packed" else None
    count = len(source) if rows is None else len(rows)
    path = Path(spec.cache) / name
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for index in range(count * number // FILES, count * (number + 1) // FILES):
        writer.write(rows[index].tobytes() if rows is not None else record(source.sample(index)))
    writer.close()
    obstore.put(store(spec), name, path)
    path.unlink()
    return name


def record(sample: dict[str, Any]) -> bytes:
    """Return the bytes of a sample: fixed ones first, then the one whose size differs."""
    last = {name: value for name, value in sample.items() if isinstance(value, (bytes, str))}
    fixed = b"".join(np.asarray(value).tobytes() for name, value in sample.items() if name not in last)
    return fixed + b"".join(value.encode() if isinstance(value, str) else value for value in last.values())


class Parse:
    """Turns a record into the arrays of a sample."""

    def __init__(self, spec: Spec) -> None:
        source = Source(spec.source)
        self.fixed = {
            name: (source.array(name).dtype, source.array(name).shape[1:])
            for name, kind in source.columns.items()
            if kind == "tensor"
        }
        self.last = [name for name, kind in source.columns.items() if kind != "tensor"]
        self.variant = spec.variant

    def __call__(self, data: bytes) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        start = 0
        for name, (dtype, shape) in self.fixed.items():
            count = int(np.prod(shape, dtype=np.int64))
            sample[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
            start += count * dtype.itemsize
        for name in self.last:
            if name == "tokens":
                sample[name] = np.frombuffer(data, np.int32, -1, start)
            else:
                rest = data[start:]
                sample[name] = jpeg_transform(self.variant)(rest) if name == "jpeg" else rest.decode()
        return sample


def collate(samples: list[dict[str, Any]], lists: bool) -> dict[str, Any]:
    """Return a batch: arrays, lists of text, and of documents."""
    return {
        name: [sample[name] for sample in samples]
        if isinstance(value, str) or (lists and name == "tokens")
        else np.stack([sample[name] for sample in samples])
        for name, value in samples[0].items()
    }


class Loader:
    """Copies the files in the first epoch; an iteration is an epoch of one iterator, whose workers stay alive."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.batches = 0
        self.iterator: Iterator[dict[str, Any]] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.iterator is None:
            self.iterator = self.start()
        for _ in range(self.batches):
            batch = next(self.iterator)
            yield {name: tensors(column) for name, column in batch.items()}

    def start(self) -> Iterator[dict[str, Any]]:
        """Return the batches of all epochs."""
        spec = self.spec
        source = grain.sources.ArrayRecordDataSource(copied(spec))
        lists = spec.workload == "tokens" and spec.variant != "packed"
        dataset = grain.MapDataset.source(source).seed(spec.seed).shuffle().map(Parse(spec))
        dataset = dataset.batch(spec.batch, drop_remainder=False, batch_fn=partial(collate, lists=lists))
        self.batches = len(dataset)
        ahead = max(1, min(THREADS, int(HELD * self.batches)) // max(1, spec.workers))
        batches = dataset.repeat().to_iter_dataset(grain.ReadOptions(num_threads=ahead, prefetch_buffer_size=ahead))
        if spec.workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=spec.workers))
        return iter(batches)


def copied(spec: Spec) -> list[str]:
    """Return the files, copied into the cache unless they are local."""
    remote = store(spec)
    names = bytes(obstore.get(remote, INDEX).bytes()).decode().split()
    if spec.is_local:
        return [f"{spec.url}/{name}" for name in names]

    def copy(name: str) -> str:
        path = Path(spec.cache) / name
        with path.open("wb") as file:
            for part in obstore.get(remote, name).stream(PART):
                file.write(part)
        return str(path)

    with ThreadPoolExecutor(DOWNLOADS) as pool:
        return list(pool.map(copy, names))


def tensors(column: Any) -> Any:
    """Return tensors that are views of a column's arrays."""
    if isinstance(column, list):
        return [value if isinstance(value, str) else torch.from_numpy(np.array(value)) for value in column]
    return torch.from_numpy(column)


def read(spec: Spec) -> None:
    """Measure the epochs."""
    measure_loader(lambda: Loader(spec), spec)


if __name__ == "__main__":
    main(write=write, read=read)
