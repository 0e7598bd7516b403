"""Trains with the Trainer of Hugging Face transformers: the dataset is its loader, and a callback saves its state.

    torchrun --nproc-per-node=2 examples/transformers_train.py s3://my-bucket/photos --epochs 3

By default the Trainer wraps a dataset in its own loader, lets Accelerate split the samples between ranks again, and
after a resume reads and discards every trained batch. Here `get_train_dataloader` returns the dataset itself, and
with `ignore_data_skip` the position comes from the dataset's own state, which each checkpoint folder contains.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from ddp_train import DECODE, GLOBAL_BATCH, SAVE_STEPS, leave, network, pixels
from step_log import log_step
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

import streamloader as sl

STATE = "streamloader.json"


class Classifier(nn.Module):
    """The network of ddp_train.py; `forward` returns the loss, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, image: Tensor, label: Tensor, valid: Tensor, **_: Any) -> dict[str, Tensor]:
        """Return the mean loss of a batch; padding counts as 0."""
        loss = nn.functional.cross_entropy(
            self.network(pixels({"image": image}, image.device)), label, reduction="none"
        )
        return {"loss": (loss * valid).mean()}


class StreamingTrainer(Trainer):
    """A Trainer whose loader is the dataset."""

    log_folder: Path | None = None

    def get_train_dataloader(self) -> sl.StreamingDataset:
        """Return the dataset, which yields the batches of this rank."""
        return self.train_dataset

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
        """Train on a batch, and log its samples."""
        log_step(self.log_folder, self.state.global_step + 1, self.train_dataset.epoch, inputs)
        return super().training_step(model, inputs, *args)


class SaveState(TrainerCallback):
    """Writes the dataset's state into each checkpoint, which makes it complete."""

    def __init__(self, data: sl.StreamingDataset) -> None:
        self.data = data

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write the state on rank 0; it is the same on all ranks."""
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
            part = path.with_suffix(".part")
            part.write_text(json.dumps(self.data.state_dict()))
            part.replace(path)


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint: a run may be killed between the Trainer's files and the dataset's state."""
    complete = [path.parent for path in folder.glob(f"checkpoint-*/{STATE}")]
    return max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)


def main() -> None:
    """Train, and save checkpoints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=-1, help="stop after this number of steps in total")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/transformers"))
    parser.add_argument("--device", help="where the dataset returns batches, such as cuda, by default on the CPU")
    parser.add_argument("--step-log", type=Path, help="folder for a log of the samples of each step")
    arguments = parser.parse_args()

    options = TrainingArguments(
        output_dir=str(arguments.checkpoints),
        num_train_epochs=arguments.epochs,
        max_steps=arguments.steps,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        ignore_data_skip=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    data = sl.StreamingDataset(
        arguments.url,
        split="train",
        batch_size=GLOBAL_BATCH // options.world_size,
        decode=DECODE,
        with_index=True,
        device=arguments.device,
    )
    last = last_checkpoint(arguments.checkpoints)
    if last:
        data.load_state_dict(json.loads((last / STATE).read_text()))
    trainer = StreamingTrainer(Classifier(), options, train_dataset=data, callbacks=[SaveState(data)])
    trainer.log_folder = arguments.step_log
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    if trainer.is_world_process_zero():
        print(f"end at step {trainer.state.global_step}, epoch {data.epoch}")


if __name__ == "__main__":
    main()
    leave()
