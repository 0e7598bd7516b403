"""MosaicML Streaming: MDS shards, `StreamingDataset` with shuffling, `StreamingDataLoader`. Reasons: README.md.

Variants: "" is tuned as Mosaic's pages on shuffling and performance advise, "plain" only says `shuffle=True`; "packed"
reads tokens that were written as rows; "pillow" and "fast" choose the JPEG transform.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from typing import Any

import numpy as np
import torch
from common import PACKED_ROW, SMALL_SHARD_BYTES, Source, Spec, main
from crops import jpeg_transform
from measuring import HELD, emit_order, measure_loader

# an old torchvision, which Streaming imports for its vision datasets and nothing here uses, says that it has no codecs
warnings.filterwarnings("ignore", "Failed to load image Python extension")
# arrays decoded from bytes are read-only; collating copies them
warnings.filterwarnings("ignore", "The given NumPy array is not writable")

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory, merge_index  # noqa: E402

# fixed dtype and shape where they are fixed: "Writing ndarrays to MDS format" calls these the most efficient
COLUMNS = {
    "images": {"image": "ndarray:uint8:224,224,3", "label": "int64"},
    "vectors": {"vector": "ndarray:float32:64", "label": "int64"},
    "jpeg": {"jpeg": "bytes", "label": "int64"},
    "tokens": {"tokens": "ndarray:int32"},
    "packed": {"tokens": f"ndarray:int32:{PACKED_ROW}"},
    "mixed": {"image": "ndarray:uint8:96,96,3", "label": "int64", "vector": "ndarray:float32:16", "text": "str"},
}
# "at least 10x" the samples of a shard are shuffled together, see `shuffle_block_size` in "Shuffling"; both at most
# `HELD` of the data
SHARDS_PER_BLOCK = 10
BATCHES_AHEAD = 16


def layout(spec: Spec) -> str:
    """Return which columns are meant: the workload, or "packed"."""
    return "packed" if spec.variant == "packed" else spec.workload


def remote(spec: Spec) -> str:
    """Return the URL of the dataset."""
    return f"{spec.url}/{layout(spec)}"


def write(spec: Spec) -> int:
    """Write a range of samples in each of as many processes as there are cores, and merge their indexes."""
    source = Source(spec.source)
    total = len(source.packed_rows()) if spec.variant == "packed" else len(source)
    count = os.cpu_count() or 1
    bounds = [total * i // count for i in range(count + 1)]
    tempfile.tempdir = spec.cache or None
    with tempfile.TemporaryDirectory() as folder:
        tasks = [(spec, folder, i, bounds[i], bounds[i + 1]) for i in range(count) if bounds[i] < bounds[i + 1]]
        with multiprocessing.Pool(len(tasks)) as pool:
            pool.starmap(write_part, tasks)
        merge_index((folder, remote(spec)), keep_local=True)
    return total


def write_part(spec: Spec, folder: str, part: int, start: int, stop: int) -> None:
    """Write the samples from `start` to `stop`; shards have the default size of 64 MB and no compression."""
    limit = {"size_limit": SMALL_SHARD_BYTES} if spec.variant == "small-shards" else {}
    source = Source(spec.source)
    out = (f"{folder}/{part}", f"{remote(spec)}/{part}")
    with MDSWriter(out=out, columns=COLUMNS[layout(spec)], keep_local=True, **limit) as writer:
        if spec.variant == "packed":
            for row in source.packed_rows()[start:stop]:
                writer.write({"tokens": row})
        else:
            for index in range(start, stop):
                writer.write(source.sample(index))


class JpegDataset(StreamingDataset):
    """Decodes in `__getitem__`, as Streaming's guides do."""

    def __init__(self, variant: str, **options: Any) -> None:
        super().__init__(**options)
        self.transform = jpeg_transform(variant)

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return {"image": torch.from_numpy(self.transform(sample["jpeg"])), "label": sample["label"]}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack what has one shape; documents and texts stay lists."""
    return {name: column([sample[name] for sample in samples]) for name in samples[0]}


def column(values: list[Any]) -> Any:
    """Return the values of a column as a batch has them."""
    if isinstance(values[0], str):
        return values
    if isinstance(values[0], np.ndarray) and any(value.shape != values[0].shape for value in values):
        return list(map(torch.from_numpy, values))
    return torch.utils.data.default_collate(values)


def dataset(spec: Spec) -> StreamingDataset:
    """Open the dataset."""
    options: dict[str, Any] = {
        "remote": remote(spec),
        "local": f"{spec.cache}/shards",
        "batch_size": spec.batch,
        "shuffle": True,
        "shuffle_seed": spec.seed,
    }
    if "cache_bytes" in spec.extra:
        options["cache_limit"] = spec.extra["cache_bytes"]
    if spec.variant != "plain":
        source = Source(spec.source)
        most = int(HELD * len(source.packed_rows() if spec.variant == "packed" else source))
        options["predownload"] = min(BATCHES_AHEAD * spec.batch, max(spec.batch, most))
        options["shuffle_block_size"] = min(shuffle_block(spec), most)
    result = JpegDataset(spec.variant, **options) if spec.workload == "jpeg" else StreamingDataset(**options)
    for stream in result.streams:
        # the client that read the index would be shared by forked workers: one of two then waits for its time-out, 60 s
        stream._downloader.clean_up()
    return result


def shuffle_block(spec: Spec) -> int:
    """Return the samples in `SHARDS_PER_BLOCK` shards of the default size."""
    source = Source(spec.source)
    sizes = {"packed": PACKED_ROW * 4.0}
    sample_bytes = sizes.get(layout(spec)) or sum(source.array(name).nbytes for name in source.columns) / len(source)
    return int(SHARDS_PER_BLOCK * (1 << 26) / sample_bytes)


def loader_of(spec: Spec) -> StreamingDataLoader:
    """Open the dataset, and make its loader."""
    workers: dict[str, Any] = {"num_workers": spec.workers, "persistent_workers": spec.workers > 0}
    return StreamingDataLoader(dataset(spec), batch_size=spec.batch, collate_fn=collate, **workers)


def read(spec: Spec) -> None:
    """Measure the epochs."""
    tempfile.tempdir = spec.cache or None  # for its lock files, which it leaves
    end(measure_loader(lambda: loader_of(spec), spec))


def order(spec: Spec) -> None:
    """Print the order of one rank."""
    tempfile.tempdir = spec.cache or None
    loader = loader_of(spec)
    if spec.state is not None:
        loader.load_state_dict(spec.state)
    emit_order(loader, spec, loader.state_dict)
    end(loader)


def end(loader: StreamingDataLoader) -> None:
    """End its threads, which wait for an epoch that was stopped early, and remove its shared memory."""
    iterator = getattr(loader.dataset, "_iterator", None)
    if iterator is not None:
        iterator.exit()
    clean_stale_shared_memory()


if __name__ == "__main__":
    main(write=write, read=read, order=order)
