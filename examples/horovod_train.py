"""Trains on the ranks that Horovod starts.

    horovodrun -np 2 python examples/horovod_train.py s3://my-bucket/photos --epochs 3

The dataset takes rank and world size from the environment that `horovodrun` sets. You can stop the script at any time
and start it again, with any number of ranks that divides the batch: it resumes after the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from ddp_train import DECODE, GLOBAL_BATCH, SAVE_STEPS, network, pixels
from step_log import log_step
from torch import nn

import streamloader as sl


def main() -> None:
    """Train and save checkpoints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop after this number of steps in total")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/horovod"))
    parser.add_argument("--device", help="where the dataset returns batches, such as cuda, by default on the CPU")
    parser.add_argument("--step-log", type=Path, help="folder for a log of the samples of each step")
    arguments = parser.parse_args()

    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch_size = GLOBAL_BATCH // hvd.size()
    data = sl.StreamingDataset(
        arguments.url, split="train", batch_size=batch_size, decode=DECODE, with_index=True, device=arguments.device
    )
    torch.manual_seed(0)
    model = network().to(device)
    # an optimizer of its own, with its own state: the one that it is given takes no steps
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), named_parameters=model.named_parameters()
    )
    step = load(arguments.checkpoints / "saved.pt", model, optimizer, data)
    while data.epoch < arguments.epochs and step != arguments.steps:
        for batch in data:
            loss = nn.functional.cross_entropy(
                model(pixels(batch, device)), batch["label"].to(device), reduction="none"
            )
            optimizer.zero_grad()
            (loss * batch["valid"].to(device)).mean().backward()
            optimizer.step()
            step += 1
            log_step(arguments.step_log, step, data.epoch, batch)
            if step % SAVE_STEPS == 0 or step == arguments.steps:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(arguments.checkpoints / "saved.pt", states | {"data": data.state_dict(), "step": step})
            if step == arguments.steps:
                break
    if hvd.rank() == 0:
        print(f"end at step {step}, epoch {data.epoch}")
    hvd.shutdown()


def save(path: Path, saved: dict[str, Any]) -> None:
    """Write a checkpoint on rank 0: to a temporary file, which is renamed."""
    if hvd.rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        torch.save(saved, unfinished)
        unfinished.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, data: sl.StreamingDataset) -> int:
    """Load the checkpoint on all ranks, which rank 0 reads, if it exists, and return its step, or 0."""
    own = hvd.rank() == 0 and path.exists()
    saved = hvd.broadcast_object(torch.load(path, map_location="cpu", weights_only=True) if own else None, 0)
    if saved is None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return 0
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    data.load_state_dict(saved["data"])
    return int(saved["step"])


if __name__ == "__main__":
    main()
