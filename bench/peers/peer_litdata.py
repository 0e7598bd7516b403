"""LitData: `optimize` into chunks of about 64 MB, `StreamingDataset(shuffle=True)` and its loader. Reasons: README.md.

Variants: "packed" writes and reads tokens through its `TokensLoader`; "pillow" and "fast" choose the JPEG transform.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import litdata
import numpy as np
import torch
from common import PACKED_ROW, SMALL_SHARD_BYTES, Source, Spec, main
from crops import jpeg_transform
from litdata.streaming import downloader
from measuring import emit_order, measure_loader

# it fetches chunks with obstore, and has no option by which obstore may speak to an endpoint without TLS
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
CHUNK_BYTES = 64 << 20  # its default
TOKENS_PER_CHUNK = PACKED_ROW * 8012  # what its page on pre-training shows: 64 MB


def layout(spec: Spec) -> str:
    """Return the name of the written form: the workload, or "packed"."""
    return "packed" if spec.variant == "packed" else spec.workload


def remote(spec: Spec) -> str:
    """Return the URL of the dataset."""
    return f"{spec.url}/{layout(spec)}"


def options(spec: Spec) -> dict[str, str]:
    """Return the options of its S3 client."""
    keys = {"aws_access_key_id": spec.key, "aws_secret_access_key": spec.secret, "region_name": "us-east-1"}
    return {**keys, "endpoint_url": spec.endpoint}


def write(spec: Spec) -> int:
    """Write with a process for each core; a task is the samples of a chunk, since a task for each sample is slow."""
    source, packed = Source(spec.source), spec.variant == "packed"
    size = sum(source.array(name).nbytes for name in source.columns)
    small = size // SMALL_SHARD_BYTES if spec.variant == "small-shards" else None
    step = samples_per_chunk(len(source), size, spec.extra.get("shards", small))
    tokens: dict[str, Any] = {"chunk_size": TOKENS_PER_CHUNK, "item_loader": litdata.TokensLoader()}
    with tempfile.TemporaryDirectory(dir=spec.cache or None) as folder, stdout_to_stderr():
        for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
            os.environ[name] = folder
        litdata.optimize(
            fn=partial(documents if packed else records, spec.source),
            inputs=[(start, min(start + step, len(source))) for start in range(0, len(source), step)],
            output_dir=remote(spec),
            num_workers=os.cpu_count(),
            reorder_files=False,
            storage_options=options(spec),
            verbose=False,
            mode="overwrite",
            **(tokens if packed else {"chunk_size": step}),
        )
    return len(source)


def samples_per_chunk(samples: int, total_bytes: int, chunks: int | None = None) -> int:
    """Return the samples of chunks of about 64 MB, an even number of equal chunks where the samples allow it.

    `chunks`: about how many instead.

    Then no two of two workers share a chunk: of a shared one, 0.2.76 reads the whole file for each sample.
    """
    ideal = chunks or max(2, round(total_bytes / CHUNK_BYTES / 2) * 2)
    counts = [count for count in range(2, 2 * ideal + 1, 2) if samples % count == 0 and count >= ideal / 2]
    return -(-samples // min(counts, key=lambda count: abs(count - ideal), default=ideal))


def records(folder: str, bounds: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield samples; tensors are its cheapest arrays to read, since it does not copy them."""
    source = Source(folder)
    for index in range(*bounds):
        yield {name: stored(value) for name, value in source.sample(index).items()}


def documents(folder: str, bounds: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Yield the tokens of documents, which its writer puts end to end."""
    source = Source(folder)
    for index in range(*bounds):
        yield stored(source.sample(index)["tokens"])


def stored(value: Any) -> Any:
    """Return a value in the type whose serializer is meant."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    return int(value) if isinstance(value, np.integer) else value


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what this process and its children print to standard error."""
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


class Decode:
    """Its `transform` of a sample: the JPEG becomes a tensor."""

    def __init__(self, variant: str) -> None:
        self.crop: Callable[[bytes], Any] = jpeg_transform(variant)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": torch.from_numpy(self.crop(sample["jpeg"])), "label": sample["label"]}


def collate(samples: list[Any]) -> dict[str, Any]:
    """Collate as it does by default; documents stay lists, and packed rows get a name."""
    if isinstance(samples[0], torch.Tensor):
        return {"tokens": torch.stack(samples)}
    if "tokens" in samples[0]:
        return {"tokens": [sample["tokens"] for sample in samples]}
    batch: dict[str, Any] = torch.utils.data.default_collate(samples)
    return batch


def loader(spec: Spec, drop_last: bool | None = None) -> litdata.StreamingDataLoader:
    """Open the dataset, and make its loader."""
    dataset = litdata.StreamingDataset(
        remote(spec),
        cache_dir=spec.cache,
        **({"max_cache_size": spec.extra["cache_bytes"]} if "cache_bytes" in spec.extra else {}),
        shuffle=True,
        seed=spec.seed,
        drop_last=drop_last,
        storage_options=options(spec),
        item_loader=litdata.TokensLoader(block_size=PACKED_ROW) if spec.variant == "packed" else None,
        transform=Decode(spec.variant) if spec.workload == "jpeg" else None,
    )
    workers: dict[str, Any] = {"num_workers": spec.workers, "persistent_workers": spec.workers > 0}
    return litdata.StreamingDataLoader(dataset, batch_size=spec.batch, collate_fn=collate, **workers)


def read(spec: Spec) -> None:
    """Measure the epochs."""
    tempfile.tempdir = spec.cache or None
    measure_loader(lambda: loader(spec), spec)


def order(spec: Spec) -> None:
    """Print the order of one rank; a state is refused where `drop_last` differs, whose default depends on the ranks."""
    tempfile.tempdir = spec.cache or None
    made = loader(spec, drop_last=True)
    if spec.state is not None:
        made.load_state_dict(spec.state)
    emit_order(made, spec, made.state_dict)


if __name__ == "__main__":
    main(write=write, read=read, order=order)
