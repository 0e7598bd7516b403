"""Prints the steps of training and logs their samples, for tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def log_step(folder: Path | None, step: int, epoch: int, batch: dict[str, Any]) -> None:
    """Print the step on rank 0, and append the sample numbers of the batch, without padding, to a log in `folder`."""
    if os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")) == "0":
        print(f"step {step}", flush=True)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    index = batch["index"][batch["valid"]].tolist()
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "epoch": epoch, "index": index}) + "\n")
