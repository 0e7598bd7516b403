"""Trains with Ray Train, which starts the ranks, and keeps their checkpoints.

    python examples/ray_train.py s3://my-bucket/photos --ranks 2 --epochs 3

Each rank takes its part by torch.distributed, which `TorchTrainer` sets up. You can stop the script at any time and
start it again, with any number of ranks that divides the batch: it resumes after the last checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ddp_train import DECODE, GLOBAL_BATCH, SAVE_STEPS, network, pixels
from ray.train.torch import TorchTrainer, prepare_model
from step_log import log_step
from torch import nn

import streamloader as sl


def train(given: dict[str, Any]) -> None:
    """Train on one rank, and report checkpoints."""
    context = ray.train.get_context()
    batch_size = GLOBAL_BATCH // context.get_world_size()
    data = sl.StreamingDataset(
        given["url"], split="train", batch_size=batch_size, decode=DECODE, with_index=True, device=given["device"]
    )
    torch.manual_seed(0)
    model = prepare_model(network())
    device = next(model.parameters()).device
    optimizer, step = torch.optim.Adam(model.parameters()), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "saved.pt", map_location=device, weights_only=True)
        getattr(model, "module", model).load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["data"])
        step = saved["step"]
    while data.epoch < given["epochs"] and step != given["steps"]:
        for batch in data:
            loss = nn.functional.cross_entropy(
                model(pixels(batch, device)), batch["label"].to(device), reduction="none"
            )
            optimizer.zero_grad()
            (loss * batch["valid"].to(device)).mean().backward()
            optimizer.step()
            step += 1
            log_step(given["step_log"], step, data.epoch, batch)
            if step % SAVE_STEPS == 0 or step == given["steps"]:
                states = {
                    "model": getattr(model, "module", model).state_dict(),  # also of one rank, which is not wrapped
                    "optimizer": optimizer.state_dict(),
                }
                report(step, data.epoch, states | {"data": data.state_dict(), "step": step})
            if step == given["steps"]:
                break


def report(step: int, epoch: int, saved: dict[str, Any]) -> None:
    """Report the step on all ranks, with the checkpoint of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(saved, Path(folder) / "saved.pt")
        first = ray.train.get_context().get_world_rank() == 0
        checkpoint = ray.train.Checkpoint.from_directory(folder) if first else None
        ray.train.report({"step": step, "epoch": epoch}, checkpoint=checkpoint)


def main() -> None:
    """Start the ranks, and print how far they came."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop after this number of steps in total")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/ray"))
    parser.add_argument("--device", help="where the dataset returns batches, such as cuda, by default on the CPU")
    parser.add_argument("--step-log", type=Path, help="folder for a log of the samples of each step")
    arguments = parser.parse_args()

    # ranks run in another folder
    url = arguments.url if "://" in arguments.url else str(Path(arguments.url).resolve())
    given = {**vars(arguments), "url": url, "step_log": arguments.step_log and arguments.step_log.resolve()}
    trainer = TorchTrainer(
        train,
        train_loop_config=given,
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.ranks, use_gpu=torch.cuda.is_available()),
        # a run of the same name goes on from the checkpoints of the one before
        run_config=ray.train.RunConfig(name="photos", storage_path=str(arguments.checkpoints.resolve())),
    )
    reported = trainer.fit().metrics
    print(f"end at step {reported['step']}, epoch {reported['epoch']}")


if __name__ == "__main__":
    main()
