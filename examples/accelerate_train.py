"""Trains with Hugging Face Accelerate, which prepares model, optimizer and dataset, and checkpoints them.

    torchrun --nproc-per-node=2 examples/accelerate_train.py s3://my-bucket/photos --epochs 3

Pass the dataset to `accelerator.prepare`, not a DataLoader of it, whose batches it would split between ranks again, so
that samples were lost. You can stop the script at any time and start it again, with any number of ranks that
divides the batch: it resumes after the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from ddp_train import DECODE, GLOBAL_BATCH, SAVE_STEPS, leave, network, pixels
from step_log import log_step
from torch import nn

import streamloader as sl


class Progress:
    """The number of trained steps, for the checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the step."""
        self.step = state["step"]


def main() -> None:
    """Train, and save checkpoints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop after this number of steps in total")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/accelerate"))
    parser.add_argument("--device", help="where the dataset returns batches, such as cuda, by default on the CPU")
    parser.add_argument("--step-log", type=Path, help="folder for a log of the samples of each step")
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device, ranks = accelerator.device, accelerator.num_processes
    data = sl.StreamingDataset(
        arguments.url,
        split="train",
        batch_size=GLOBAL_BATCH // ranks,
        decode=DECODE,
        with_index=True,
        device=arguments.device,
    )
    model = network()
    model, optimizer, data = accelerator.prepare(model, torch.optim.Adam(model.parameters()), data)
    progress = Progress()
    accelerator.register_for_checkpointing(data, progress)
    saved = sorted(arguments.checkpoints.glob("step-*[0-9]"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    accelerator.print(f"begin at step {progress.step}, epoch {data.epoch}, world size {ranks}")
    while data.epoch < arguments.epochs and progress.step != arguments.steps:
        for batch in data:
            labels = batch["label"].to(device)
            loss = nn.functional.cross_entropy(model(pixels(batch, device)), labels, reduction="none")
            optimizer.zero_grad()
            accelerator.backward((loss * batch["valid"].to(device)).mean())
            optimizer.step()
            progress.step += 1
            log_step(arguments.step_log, progress.step, data.epoch, batch)
            if progress.step % SAVE_STEPS == 0:
                save(accelerator, arguments.checkpoints / f"step-{progress.step:08d}")
            if progress.step == arguments.steps:
                break
    accelerator.print(f"end at step {progress.step}, epoch {data.epoch}")


def save(accelerator: Accelerator, folder: Path) -> None:
    """Write a checkpoint to a temporary folder and rename that, so that a kill never leaves a partial checkpoint."""
    unfinished = folder.with_name(f"{folder.name}-unfinished")
    accelerator.save_state(str(unfinished), safe_serialization=False)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unfinished.rename(folder)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    leave()
