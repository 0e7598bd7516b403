"""TensorStore in a plain torch dataset: Zarr v3 arrays through its S3 driver, read in shuffled blocks.

All reads of a group of blocks are started at once as futures; TensorStore runs them on its own threads. Reasons for
each choice: README.md.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorstore as ts
from blocks import arrays_to_write, read, stored_as
from common import Source, Spec, main

CACHE_BYTES = 128 << 20
CHUNKS_PER_SHARD = 16
REQUESTS = 64


class TensorStoreArrays:
    """The arrays of a dataset, opened when they are first read."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.context = context()
        self.arrays: dict[str, ts.TensorStore] = {}

    def array(self, name: str) -> ts.TensorStore:
        """Return an open array."""
        if name not in self.arrays:
            self.arrays[name] = ts.open(array_spec(self.spec, name), context=self.context, open=True).result()
        return self.arrays[name]

    def submit(self, name: str, start: int, stop: int) -> ts.Future[Any]:
        """Start to read rows of an array."""
        return self.array(name)[start:stop].read(order="C")

    def rows(self, name: str) -> int:
        """The length of an array."""
        return int(self.array(name).shape[0])


def context() -> ts.Context:
    """Return the resources: chunks that two blocks share are kept, and many requests are in flight."""
    return ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}, "s3_request_concurrency": {"limit": REQUESTS}})


def array_spec(spec: Spec, name: str) -> dict[str, Any]:
    """Return what TensorStore needs to find an array."""
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "s3",
            "bucket": spec.bucket,
            "path": f"{spec.prefix}/{stored_as(spec)}/{name}/",
            "endpoint": spec.endpoint,
            "aws_region": "us-east-1",
            "aws_credentials": {"type": "environment"},
        },
    }


def open_arrays(spec: Spec) -> TensorStoreArrays:
    """Open the arrays when they are needed."""
    if spec.ca:
        os.environ["TENSORSTORE_CA_BUNDLE"] = spec.ca
    return TensorStoreArrays(spec)


def write(spec: Spec) -> int:
    """Write the arrays, many chunks at a time."""
    for plan in arrays_to_write(spec):
        chunk = [plan.chunk, *plan.values.shape[1:]]
        shard = [plan.chunk * CHUNKS_PER_SHARD, *chunk[1:]]
        array = ts.open(
            array_spec(spec, plan.name),
            create=True,
            delete_existing=True,
            dtype=ts.dtype(plan.values.dtype),
            shape=plan.values.shape,
            chunk_layout=ts.ChunkLayout(read_chunk_shape=chunk, write_chunk_shape=shard)
            if spec.variant == "sharded"
            else ts.ChunkLayout(chunk_shape=chunk),
            context=context(),
        ).result()
        for start in range(0, len(plan.values), shard[0]):
            rows = np.ascontiguousarray(plan.values[start : start + shard[0]])
            array[start : start + len(rows)].write(rows).result()
    return len(Source(spec.source))


if __name__ == "__main__":
    main(write=write, read=lambda spec: read(spec, open_arrays))
