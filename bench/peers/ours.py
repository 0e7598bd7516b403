"""The project itself, with its default settings for every workload, but for lanes: the data of the bench is small, and
all lanes together must hold a quarter of it at most. Runs in the project's own environment.

`spec.extra` may name `memory` and `num_workers`, arguments of `StreamingDataset`, `batches` (stop an epoch after so
many), and `cache_bytes`, the limit of a cache on local disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice, pairwise
from typing import Any

import obstore  # noqa: F401 - the time to the first batch is counted from here on, as that of every peer
import s3fs  # noqa: F401
import torch
from common import PACKED_ROW, Source, Spec, emit, main
from crops import CROP
from measuring import HELD, emit_order, ids_of, measure_epochs

import streamloader as sl
from streamloader import StreamingDataset

WRITE_ROWS = 4096


def crop(variant: str = "") -> sl.Decode:
    """Return the transform of `crops.jpeg_transform` in the loader's words."""
    return sl.Decode(size=(CROP, CROP), crop="random", normalize=None if variant == "uint8" else "imagenet")


def field_of(source: Source, name: str, kind: str) -> str:
    """Return the field of a column as `Writer` spells it."""
    values = source.array(name)
    if kind == "tensor":
        return f"{values.dtype}[{','.join(map(str, values.shape[1:]))}]"
    return {"bytes": f"bytes:{name}", "text": "text", "ragged": f"ragged:{values.dtype}"}[kind]


def columns_of(source: Source, start: int, stop: int) -> dict[str, Any]:
    """Return the rows of every column, as `Writer.write_batch` takes them."""
    columns: dict[str, Any] = {}
    for name, kind in source.columns.items():
        if kind == "tensor":
            columns[name] = source.array(name)[start:stop]
            continue
        ends = source.offsets(name)[start : stop + 1].tolist()
        parts = [source.array(name)[a:b] for a, b in pairwise(ends)]
        convert = {"ragged": lambda part: part, "bytes": bytes, "text": lambda part: bytes(part).decode()}[kind]
        columns[name] = [convert(part) for part in parts]
    return columns


def write(spec: Spec) -> int:
    """Write the dataset with `Writer` and its default layout."""
    source = Source(spec.source)
    fields = {name: field_of(source, name, kind) for name, kind in source.columns.items()}
    with sl.Writer(spec.url, fields, num_samples=len(source), overwrite=True, storage_options=spec.s3fs_options) as out:
        for start in range(0, len(source), WRITE_ROWS):
            out.write_batch(columns_of(source, start, min(start + WRITE_ROWS, len(source))))
    return len(source)


def read(spec: Spec) -> None:
    """Stream the epochs; what the loader counted follows in a line of its own."""
    datasets: list[StreamingDataset] = []

    def epoch_of(_: int) -> Iterable[Any]:
        if not datasets:
            datasets.append(open_dataset(spec))
        batches = first_of(datasets[0], spec.extra.get("batches"))
        return as_lists(batches) if spec.workload == "tokens" and spec.variant != "packed" else batches

    measure_epochs(epoch_of, spec, count_tokens if spec.workload == "tokens" else count_samples, ids_of)
    stats = datasets[0].stats()
    emit({"stats": {**asdict(stats), "verdict": stats.verdict}})
    datasets[0].close()


def order(spec: Spec) -> None:
    """Print the order of one rank."""
    with closing(open_dataset(spec)) as dataset:
        if spec.state is not None:
            dataset.load_state_dict(spec.state)
        emit_order(dataset, spec, dataset.state_dict)


def open_dataset(spec: Spec, shuffle: sl.Shuffle | bool | None = None) -> StreamingDataset:
    """Return the dataset: one rank unless `extra` says otherwise, no DataLoader workers."""
    kinds: dict[str, Any] = {name: spec.extra[name] for name in ("memory", "num_workers") if name in spec.extra}
    if "cache_bytes" in spec.extra:
        kinds["cache"] = sl.Cache(spec.cache, limit=spec.extra["cache_bytes"], free=0)
    if spec.workload == "jpeg":
        kinds["decode"] = crop(spec.variant)
    if spec.variant == "packed":
        kinds["pack"] = {"tokens": PACKED_ROW}
    return StreamingDataset(
        spec.url,
        batch_size=spec.batch,
        seed=spec.seed,
        world=(spec.rank, spec.world),
        shuffle=sl.Shuffle(lanes=lanes_of(spec)) if shuffle is None else shuffle,
        storage_options=spec.s3fs_options,
        **kinds,
    )


def lanes_of(spec: Spec) -> int:
    """Return how many of the dataset's lanes hold `HELD` of it at most, a power of two."""
    dataset = sl.open(spec.url, storage_options=spec.s3fs_options)
    pin, lanes = dataset.manifest.order, dataset.manifest.order.lanes
    while lanes > 1 and lanes * pin.window > HELD * dataset.manifest.num_samples:
        lanes //= 2
    return lanes


def first_of(dataset: Iterable[Any], count: int | None) -> Iterator[Any]:
    """Yield so many batches, or all. `islice` alone would begin the pass at once, before the clock."""
    yield from islice(dataset, count)


def as_lists(batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Turn values and offsets into one tensor for each document, without a copy."""
    for batch in batches:
        sizes = batch["tokens_offsets"].diff().tolist()
        yield {**batch, "tokens": list(torch.split(batch["tokens"], sizes))}


def count_samples(batch: dict[str, Any]) -> int:
    """Return the samples of a batch without the rows that fill up the last one."""
    return int(batch["valid"].sum())


def count_tokens(batch: dict[str, Any]) -> int:
    """Return the tokens of a batch without those rows."""
    return int(batch["tokens_offsets"][count_samples(batch)])


if __name__ == "__main__":
    main(write=write, read=read, order=order)
