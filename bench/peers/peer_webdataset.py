"""WebDataset: tar shards streamed from S3 by curl, shuffled by shard and by a buffer, batched in the workers.

Large samples (images, JPEGs, mixed) are one record each and pass through `.shuffle(1000)`. Small ones (vectors, tokens)
stand in records of many, as the author advises for them, and a `.compose` stage mixes the samples of many records;
variant "plain" has one record for each of these too, and the stages of the documentation alone.
Arrays are `.ten` members, WebDataset's own encoding, read without a copy. Reasons for each choice: README.md.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds
from blocks import Group, Ragged, as_batch, layout, mixed
from common import Source, Spec, UnsupportedError, main
from crops import jpeg_transform
from measuring import emit_order, measure_loader
from webdataset import tenbin

SHARD_BYTES = 128 << 20
# where the data is small, so that there are still shards to shuffle and to share among workers
LEAST_SHARDS = 8
SHUFFLE = 1000
# samples of a record, about 0.5 MB, and records that are mixed at once
RECORD = {"vectors": 2048, "tokens": 64, "packed": 64}
RECORDS_MIXED = 128
INDEX = "shards.txt"


def address(spec: Spec, name: str) -> str:
    """Return the URL of an object, or its path in a folder."""
    folder = spec.url if spec.is_local else f"{spec.endpoint}/{spec.bucket}/{spec.prefix}"
    return f"{folder}{'/plain' if spec.variant == 'plain' else ''}/{name}"


def curl(*arguments: str) -> str:
    """Return a shell command that talks to S3: curl signs requests, and starts in milliseconds (the AWS CLI: 0.5 s)."""
    keys = '--user "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY" --aws-sigv4 "aws:amz:$AWS_REGION:s3"'
    return " ".join(["curl --silent --fail --connect-timeout 30", keys, *arguments])


def upload(spec: Spec, path: str) -> None:
    """Move a finished file to S3, or to its folder."""
    target = address(spec, Path(path).name)
    if spec.is_local:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    else:
        subprocess.run(curl("--upload-file", path, target), shell=True, check=True)
        Path(path).unlink()


def write(spec: Spec) -> int:
    """Write a range of the records in each of as many processes as there are cores; every full tar is uploaded."""
    _need_curl(spec)
    source, count = Source(spec.source), os.cpu_count() or 1
    with multiprocessing.Pool(count) as pool:
        shards = pool.starmap(write_part, [(spec, part, count) for part in range(count)])
    index_file = Path(spec.cache) / INDEX
    index_file.write_text("".join(f"{name}\n" for names in shards for name in names))
    upload(spec, str(index_file))
    return len(source)


def write_part(spec: Spec, part: int, parts: int) -> list[str]:
    """Write every `parts`-th record from `part` on, into the cache folder; return the names of the tars."""
    source, folder = Source(spec.source), Path(spec.cache)
    total = sum(path.stat().st_size for path in source.folder.iterdir())
    size = min(SHARD_BYTES, max(1 << 20, total // spec.extra.get("shards", LEAST_SHARDS)))
    options = {"maxsize": size, "maxcount": 1 << 40, "post": partial(upload, spec), "verbose": 0, "encoder": False}
    with wds.ShardWriter(f"{folder}/{part}-%06d.tar", **options) as out:
        for index, record in enumerate(records(spec, source, part, parts)):
            out.write({"__key__": f"{part}-{index:09d}", **record})
        shards = out.shard
    return [f"{part}-{number:06d}.tar" for number in range(shards)]


def in_records(spec: Spec) -> bool:
    """Whether a record has many samples: small ones, unless the variant is "plain"."""
    return layout(spec) in RECORD and spec.variant != "plain"


def records(spec: Spec, source: Source, first: int, step: int) -> Iterator[dict[str, bytes | bytearray]]:
    """Yield the members of every `step`-th record from `first` on."""
    if not in_records(spec):
        yield from (one_sample(source.sample(index)) for index in range(first, len(source), step))
        return
    column, size = next(iter(source.columns)), RECORD[layout(spec)]
    rows = source.packed_rows() if spec.variant == "packed" else None
    for start in range(first * size, len(source) if rows is None else len(rows), size * step):
        part = slice(start, start + size)
        if rows is not None:
            arrays = [rows[part]]
        elif source.columns[column] == "ragged":
            ends = source.offsets(column)[start : start + size + 1]
            arrays = [source.array(column)[ends[0] : ends[-1]], np.diff(ends)]
        else:
            arrays = [source.array(name)[part] for name in source.columns]
        yield {"ten": tenbin.encode_buffer([np.ascontiguousarray(array) for array in arrays])}


def one_sample(sample: dict[str, Any]) -> dict[str, bytes | bytearray]:
    """Return the members of one sample: a JPEG and its class, or the arrays in one member and the text."""
    if "jpeg" in sample:
        return {"jpg": sample["jpeg"], "cls": str(sample["label"]).encode()}
    arrays = [np.atleast_1d(value) for value in sample.values() if not isinstance(value, str)]
    members: dict[str, bytes | bytearray] = {"ten": tenbin.encode_buffer(arrays)}
    return members | {"txt": sample["text"].encode()} if "text" in sample else members


def dataset(spec: Spec, urls: list[str]) -> wds.WebDataset:
    """Return the pipeline from shards to batches."""
    source = Source(spec.source)
    split = wds.split_by_node if spec.world > 1 else wds.single_node_only
    data = wds.WebDataset(urls, shardshuffle=100, detshuffle=True, seed=spec.seed, nodesplitter=split)
    if in_records(spec):
        return data.shuffle(RECORDS_MIXED).compose(partial(mixed_records, spec, source.columns))
    data = data.shuffle(SHUFFLE)
    if "jpeg" in source.columns:
        data = data.to_tuple("jpg", "cls").map_tuple(jpeg_transform(spec.variant), int)
    else:
        data = data.map(partial(sample_columns, source.columns))
    collate = partial(wds.filters.default_collation_fn, combine_tensors="tokens" not in source.columns)
    return data.batched(spec.batch, collation_fn=collate)


def sample_columns(kinds: dict[str, str], record: dict[str, Any]) -> tuple[Any, ...]:
    """Decode one sample, its columns in their order."""
    arrays = dict(zip((name for name in kinds if name != "text"), tenbin.decode_buffer(record["ten"]), strict=True))
    if "label" in arrays:
        arrays["label"] = int(arrays["label"][0])
    return tuple(record["txt"].decode() if name == "text" else arrays[name] for name in kinds)


def record_columns(kinds: dict[str, str], record: dict[str, Any]) -> Group:
    """Decode a record of many small samples."""
    arrays = tenbin.decode_buffer(record["ten"])
    if len(kinds) == 1 and len(arrays) == 2:
        return {next(iter(kinds)): Ragged(*arrays)}
    return dict(zip(kinds, arrays, strict=True))


def mixed_records(spec: Spec, kinds: dict[str, str], data: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield batches of samples out of many records."""
    groups = groups_of((record_columns(kinds, record) for record in data), RECORDS_MIXED)
    for group, order in mixed(groups, spec.batch, np.random.default_rng()):
        yield as_batch(group, order, kinds, spec.variant)


def groups_of(records: Iterable[Group], size: int) -> Iterator[list[Group]]:
    """Yield lists of so many records."""
    waiting: list[Group] = []
    for record in records:
        waiting.append(record)
        if len(waiting) == size:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def loader(spec: Spec) -> wds.WebLoader:
    """Open the dataset, and make its loader."""
    if spec.is_local:
        urls = [address(spec, name) for name in Path(address(spec, INDEX)).read_text().split()]
    else:
        shards = subprocess.run(curl(address(spec, INDEX)), shell=True, check=True, capture_output=True, text=True)
        urls = [f"pipe:{curl(address(spec, name))}" for name in shards.stdout.split()]
    kept = bool(spec.workers)
    return wds.WebLoader(dataset(spec, urls), batch_size=None, num_workers=spec.workers, persistent_workers=kept)


def read(spec: Spec) -> None:
    """Measure the epochs."""
    _need_curl(spec)
    measure_loader(lambda: loader(spec), spec, names=list(Source(spec.source).columns))


def order(spec: Spec) -> None:
    """Print the order of one rank; it has no state."""
    _need_curl(spec)
    emit_order(loader(spec), spec, names=list(Source(spec.source).columns))


def _need_curl(spec: Spec) -> None:
    if not spec.is_local and not shutil.which("curl"):
        raise UnsupportedError("WebDataset reads S3 through a command, here curl (7.75 or later), and there is none")


if __name__ == "__main__":
    main(write=write, read=read, order=order)
