"""Says how far training is, notes which samples a rank trained on, and ends its process group in order."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist


def note(folder: Path | None, step: int, epoch: int, batch: dict[str, Any]) -> None:
    """Print the step on rank 0, and append the sample numbers of the batch to a file of this process in the folder.

    Rows that only fill up the batch are left out.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}", flush=True)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    index = batch["index"][batch["valid"]].tolist()
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "epoch": epoch, "index": index}) + "\n")


def leave() -> None:
    """End the process group, when no model is left that uses it.

    A thread of gloo that still holds the tensors of its last collective when the interpreter ends aborts the process
    ("terminate called without an active exception", torch 2.13); while garbage is collected it lets go of them.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
