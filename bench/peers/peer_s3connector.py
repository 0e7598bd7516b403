"""AWS's connector for PyTorch: shards of tensors, written and read through it, mixed in groups. Reasons: README.md.

It brings objects to PyTorch and leaves their format, shuffling and batches to the user. A shard is a dict of tensors, a
few hundred to some ten thousand samples, stored with `torch.save` as its page shows for checkpoints: an object for each
sample would be a request for each sample. Shards come in a random order, and groups of them are mixed sample by sample.

Variants: "packed" writes and reads tokens as rows; "pillow" and "fast" choose the JPEG transform.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from blocks import GROUP, Group, Ragged, as_batch, layout, mixed
from common import Source, Spec, main
from measuring import measure_loader
from numpy.typing import NDArray
from s3torchconnector import S3Checkpoint, S3ClientConfig, S3IterableDataset, S3Reader
from torch.utils.data import DataLoader, IterableDataset

SHARDS_PER_GROUP = 4
REGION = "us-east-1"


def remote(spec: Spec) -> str:
    """Return the URL of the shards' folder."""
    return f"{spec.url}/{layout(spec)}/"


def client(spec: Spec) -> dict[str, Any]:
    """Return the options of its S3 client, which finds keys and certificates in the environment."""
    return {"region": REGION, "endpoint": spec.endpoint, "s3client_config": S3ClientConfig(force_path_style=True)}


def write(spec: Spec) -> int:
    """Write shards of a quarter of a group, 15 to 40 MB."""
    source, step = Source(spec.source), GROUP[layout(spec)] // SHARDS_PER_GROUP
    total = len(source.packed_rows()) if spec.variant == "packed" else len(source)
    checkpoint = S3Checkpoint(**client(spec))
    for start in range(0, total, step):
        with checkpoint.writer(f"{remote(spec)}{start:012d}.pt") as writer:
            torch.save(shard(source, spec.variant, start, min(start + step, total)), writer)
    return total


def shard(source: Source, variant: str, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return samples as tensors: a column, or its values end to end and the length of each."""
    if variant == "packed":
        return {"tokens": tensor(source.packed_rows()[start:stop])}
    found = {}
    for name, kind in source.columns.items():
        if kind == "tensor":
            found[name] = tensor(source.array(name)[start:stop])
        else:
            ends = source.offsets(name)[start : stop + 1]
            found[name] = tensor(source.array(name)[ends[0] : ends[-1]])
            found[f"{name}_lengths"] = tensor(np.diff(ends))
    return found


def tensor(values: NDArray[Any]) -> torch.Tensor:
    """Return a copy in memory of mapped values."""
    return torch.from_numpy(np.array(values))


class ShardDataset(IterableDataset[dict[str, Any]]):
    """Yields batches: shards in a random order, mixed in groups; the shards of the next group are on their way."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.columns = Source(spec.source).columns
        self.epoch = -1
        self.urls: list[str] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.epoch += 1
        options = client(self.spec)
        if not self.urls:
            listed = S3IterableDataset.from_prefix(remote(self.spec), **options)
            self.urls = [f"s3://{reader.bucket}/{reader.key}" for reader in listed]
        order = np.random.default_rng((self.spec.seed, self.epoch)).permutation(len(self.urls))
        # sharding gives each DataLoader worker its own part of the list
        objects = S3IterableDataset.from_objects([self.urls[i] for i in order], enable_sharding=True, **options)
        rng = np.random.default_rng((self.spec.seed, self.epoch, 1))
        for group, rows in mixed(groups(iter(objects)), self.spec.batch, rng):
            yield as_batch(group, rows, self.columns, self.spec.variant)


def groups(readers: Iterator[S3Reader]) -> Iterator[list[Group]]:
    """Yield the shards of each group, once those of the next are requested."""
    following = started(readers)
    while following:
        pending, following = following, started(readers)
        yield [loaded(reader) for reader in pending]


def started(readers: Iterator[S3Reader]) -> list[S3Reader]:
    """Request the objects of the next group."""
    found = list(islice(readers, SHARDS_PER_GROUP))
    for reader in found:
        reader.prefetch()
    return found


def loaded(reader: S3Reader) -> Group:
    """Read a shard; its columns are views of what was read."""
    columns = torch.load(io.BytesIO(reader.read()), weights_only=True)
    return {
        name: Ragged(values.numpy(), columns[f"{name}_lengths"].numpy())
        if f"{name}_lengths" in columns
        else values.numpy()
        for name, values in columns.items()
        if not name.endswith("_lengths")
    }


def read(spec: Spec) -> None:
    """Measure the epochs."""
    workers: dict[str, Any] = {"num_workers": spec.workers, "persistent_workers": spec.workers > 0}
    measure_loader(lambda: DataLoader(ShardDataset(spec), batch_size=None, **workers), spec)


if __name__ == "__main__":
    main(write=write, read=read)
