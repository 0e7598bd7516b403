"""The order in which LitData delivers sample numbers, of its own chunks on disk. Runs in its environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import litdata
import numpy as np

WORKERS = 2  # each mixes within the chunk that it is at


def number_of(number: int) -> int:
    """Return what is stored for a number."""
    return number


def main(spec: dict[str, Any]) -> None:
    """Write numbers in chunks, and read them with two workers and batches, as its documentation does."""
    folder = Path(spec["folder"])
    for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
        os.environ[name] = str(folder / "cache")
    litdata.optimize(
        fn=number_of,
        inputs=list(range(spec["samples"])),
        output_dir=str(folder / "data"),
        chunk_size=spec["chunk"],
        num_workers=1,  # in order
        verbose=False,
    )
    options = {"shuffle": True, "seed": spec["seed"], "item_shuffle_window": spec["items"]}
    dataset = litdata.StreamingDataset(str(folder / "data"), **options)
    loader = litdata.StreamingDataLoader(dataset, batch_size=spec["batch"], num_workers=WORKERS)
    np.save(folder / "order.npy", np.concatenate([np.asarray(batch, np.int64) for batch in loader]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
