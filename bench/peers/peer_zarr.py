"""zarr-python in a plain torch dataset: arrays on S3 through its obstore store, read in shuffled blocks.

Each block is one `array[start:stop]` in a thread; zarr runs them on its own event loop. Chunks are objects of 1 to 5 MB
without compression: zarr-python 3.1 reads the inner chunks of a shard one after another, each with a request for the
shard's index, which is slower ("sharded" measures that). Reasons for each choice: README.md.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zarr
from blocks import arrays_to_write, read, stored_as
from common import Source, Spec, main
from obstore.store import S3Store
from zarr.storage import ObjectStore

# blocks that are read at once
THREADS = 16
CHUNKS_PER_SHARD = 16


class ZarrArrays:
    """The arrays of a group, and the threads that read them."""

    def __init__(self, group: zarr.Group) -> None:
        self.arrays = dict(group.arrays())
        self.threads = ThreadPoolExecutor(THREADS)

    def submit(self, name: str, start: int, stop: int) -> Future[Any]:
        """Start to read rows of an array."""
        return self.threads.submit(self.arrays[name].__getitem__, slice(start, stop))

    def rows(self, name: str) -> int:
        """The length of an array."""
        return int(self.arrays[name].shape[0])


def store(spec: Spec, read_only: bool) -> ObjectStore[S3Store]:
    """Return the store of the dataset."""
    options: dict[str, Any] = {"allow_http": True}
    if spec.ca:
        options["root_certificate"] = Path(spec.ca).read_bytes()
    objects = S3Store(
        spec.bucket,
        prefix=f"{spec.prefix}/{stored_as(spec)}",
        endpoint=spec.endpoint,
        access_key_id=spec.key,
        secret_access_key=spec.secret,
        region="us-east-1",
        client_options=options,
    )
    return ObjectStore(objects, read_only=read_only)


def open_arrays(spec: Spec) -> ZarrArrays:
    """Open the arrays; their metadata is consolidated: one request."""
    return ZarrArrays(zarr.open_group(store(spec, read_only=True), mode="r"))


def write(spec: Spec) -> int:
    """Write the arrays, many chunks at a time."""
    target = store(spec, read_only=False)
    group = zarr.create_group(target, overwrite=True)
    for plan in arrays_to_write(spec):
        chunk = (plan.chunk, *plan.values.shape[1:])
        array = group.create_array(
            plan.name,
            shape=plan.values.shape,
            dtype=plan.values.dtype,
            chunks=chunk,
            shards=(plan.chunk * CHUNKS_PER_SHARD, *chunk[1:]) if spec.variant == "sharded" else None,
            compressors=None,
        )
        for start in range(0, len(plan.values), plan.chunk * CHUNKS_PER_SHARD):
            rows = slice(start, start + plan.chunk * CHUNKS_PER_SHARD)
            array[rows] = plan.values[rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that Zarr v3 does not specify consolidated metadata yet
        zarr.consolidate_metadata(target)
    return len(Source(spec.source))


if __name__ == "__main__":
    main(write=write, read=lambda spec: read(spec, open_arrays))
