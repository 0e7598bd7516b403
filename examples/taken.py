"""Prints the progress of training, and records the samples that a rank trained on, for tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def note(folder: Path | None, step: int, epoch: int, batch: dict[str, Any]) -> None:
    """Print the step on rank 0, and append the sample numbers of the batch to a file of this process in the folder.

    Padding is not included.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}", flush=True)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    index = batch["index"][batch["valid"]].tolist()
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "epoch": epoch, "index": index}) + "\n")
