"""Trains with Lightning: the dataset is the train dataloader, and Lightning saves its state in its own checkpoints.

    torchrun --nproc-per-node=2 examples/lightning_train.py s3://my-bucket/photos --epochs 3

The dataset has `state_dict`, `load_state_dict` and a length, which Lightning needs to resume in the middle of an
epoch; a DataLoader around it would hide them. You can stop the script at any time and start it again,
with any number of ranks that divides the batch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from ddp_train import DECODE, GLOBAL_BATCH, SAVE_STEPS, leave, network, pixels
from lightning.pytorch.callbacks import ModelCheckpoint
from step_log import log_step
from torch import Tensor, nn

import streamloader as sl


class Classifier(lightning.LightningModule):
    """The network of ddp_train.py as a LightningModule."""

    def __init__(self, data: sl.StreamingDataset, log_folder: Path | None) -> None:
        super().__init__()
        self.network = network()
        self.data, self.log_folder = data, log_folder

    def training_step(self, batch: dict[str, Any], _: int) -> Tensor:
        """Return the mean loss of a batch; padding counts as 0."""
        log_step(self.log_folder, self.global_step + 1, self.data.epoch, batch)
        loss = nn.functional.cross_entropy(self.network(pixels(batch, self.device)), batch["label"], reduction="none")
        return (loss * batch["valid"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters())


def main() -> None:
    """Train, and save checkpoints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=-1, help="stop after this number of steps in total")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/lightning"))
    parser.add_argument("--device", help="where the dataset returns batches, such as cuda, by default on the CPU")
    parser.add_argument("--step-log", type=Path, help="folder for a log of the samples of each step")
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    saving = ModelCheckpoint(arguments.checkpoints, every_n_train_steps=SAVE_STEPS, save_top_k=1, filename="{step}")
    trainer = lightning.Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices="auto" if cuda else int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # set by torchrun
        strategy="ddp",
        max_epochs=arguments.epochs,
        max_steps=arguments.steps,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = sl.StreamingDataset(
        arguments.url,
        split="train",
        batch_size=GLOBAL_BATCH // trainer.world_size,
        decode=DECODE,
        with_index=True,
        device=arguments.device,
    )
    saved = sorted(arguments.checkpoints.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    trainer.fit(Classifier(data, arguments.step_log), data, ckpt_path=saved[-1] if saved else None)
    if trainer.is_global_zero:
        print(f"end at step {trainer.global_step}, epoch {data.epoch}")


if __name__ == "__main__":
    main()
    leave()
