"""The order in which WebDataset delivers sample numbers: shards shuffled, then its buffer. Runs in its environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds


def main(spec: dict[str, Any]) -> None:
    """Write numbers in tar shards, and read them through a buffer that is full before the first sample leaves it."""
    folder = Path(spec["folder"])
    with wds.ShardWriter(f"{folder}/%06d.tar", maxcount=spec["shard"], verbose=0) as writer:
        for number in range(spec["samples"]):
            writer.write({"__key__": f"{number:09d}", "txt": ""})
    shards = sorted(map(str, folder.glob("*.tar")))
    buffer = spec["buffer"]
    data = wds.WebDataset(shards, shardshuffle=len(shards), detshuffle=True, seed=spec["seed"])
    data = data.shuffle(buffer, initial=buffer, seed=spec["seed"])
    np.save(folder / "order.npy", np.array([int(sample["__key__"]) for sample in data], np.int64))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
