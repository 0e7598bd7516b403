"""The order in which MosaicML Streaming delivers sample numbers, of its own shards on disk. Runs in its environment."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

warnings.filterwarnings("ignore", "Failed to load image Python extension")

from streaming import MDSWriter, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


def main(spec: dict[str, Any]) -> None:
    """Write numbers in shards of the size that is asked for, and read them as one process without workers does."""
    folder = Path(spec["folder"])
    with MDSWriter(out=str(folder / "data"), columns={"id": "int64"}) as writer:
        bytes_of_shard = writer.extra_bytes_per_shard + spec["shard"] * (8 + writer.extra_bytes_per_sample)
        writer.size_limit = bytes_of_shard
        for number in range(spec["samples"]):
            writer.write({"id": number})
    index = json.loads((folder / "data" / "index.json").read_text())
    sizes = {shard["samples"] for shard in index["shards"]}
    assert sizes == {spec["shard"]}, sizes
    dataset = StreamingDataset(
        local=str(folder / "data"),
        batch_size=spec["batch"],
        shuffle=True,
        shuffle_algo=spec["algorithm"],
        shuffle_block_size=spec["block"] or None,
        shuffle_seed=spec["seed"],
    )
    np.save(folder / "order.npy", np.array([sample["id"] for sample in dataset], np.int64))
    clean_stale_shared_memory()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
