"""One rank of the demo's training; torchrun starts them. Only the public API is used here.

Each rank writes the numbers of the samples it takes to a log of its own, and says what happens as JSON lines on
standard output. The run goes on from `checkpoint.pt` where there is one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import streamloader as sl
from streamloader.demo.story import DIGIT_SCALE

GLOBAL_BATCH = 96
CHECKPOINT_STEPS = 7
IMAGES = sl.Decode(mode="L")


def main() -> None:
    """Train, then evaluate on the val split; the arguments are URL, folder, name of the run, and epochs."""
    url, folder, run, epochs = sys.argv[1:]
    threading.Thread(target=end_with_starter, daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    trainer = Trainer(url, Path(folder))
    with (Path(folder) / f"{run}-rank{dist.get_rank()}.jsonl").open("w", buffering=1) as log:
        trainer.train(int(epochs), log)
    right, count = evaluate(trainer.model.module, url)
    if dist.get_rank() == 0:
        say("evaluated", right=right, count=count)
    dist.destroy_process_group()
    # Not through the interpreter: a thread of gloo that still holds the tensors of its last collective when that ends
    # aborts the process (torch 2.13, "terminate called without an active exception").
    os._exit(0)


def end_with_starter() -> None:
    """Block until standard input is closed, which the end of its other side does however it came; then end at once."""
    while os.read(0, 4096):  # not sys.stdin: its lock, held at exit, would abort the interpreter
        pass
    os._exit(1)


def say(event: str, **values: Any) -> None:
    """Write one event for the starter: at once, so that the lines of two ranks do not mix."""
    os.write(1, f"{json.dumps({'event': event, **values})}\n".encode())


def network() -> nn.Sequential:
    """Return a small convolutional network: (b, 1, 32, 32) pixels from 0 to 1 -> (b, 10) logits."""
    return nn.Sequential(
        nn.AvgPool2d(DIGIT_SCALE),
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(1024, 10)),
    )


class Trainer:
    """The model, its optimizer and the stream of batches: what a checkpoint holds."""

    def __init__(self, url: str, folder: Path) -> None:
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(network())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        batch_size = GLOBAL_BATCH // dist.get_world_size()
        self.data = sl.StreamingDataset(url, split="train", batch_size=batch_size, decode=IMAGES, with_index=True)
        self.step = 0
        self.checkpoint = folder / "checkpoint.pt"
        say("started", rank=self.rank, pid=os.getpid())
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.model.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.data.load_state_dict(saved["data"])
            self.step = saved["step"]

    def train(self, epochs: int, log: TextIO) -> None:
        """Train up to the given epoch; rank 0 writes a checkpoint every few steps."""
        first = self.data.state_dict()
        say("begun", rank=self.rank, step=self.step, epoch=first["epoch"], position=first["position"])
        for epoch in range(first["epoch"], epochs):
            for batch in self.data:
                # written before the gradients meet: a checkpoint implies that every rank wrote the steps before it
                index = batch["index"][batch["valid"]].tolist()
                log.write(json.dumps({"epoch": epoch, "step": self.step, "index": index}) + "\n")
                loss = nn.functional.cross_entropy(self.model(pixels(batch)), batch["label"], reduction="none")
                self.optimizer.zero_grad()
                (loss * batch["valid"]).mean().backward()
                self.optimizer.step()
                self.step += 1
                if self.rank == 0 and self.step % CHECKPOINT_STEPS == 0:
                    self._save()
        stats = self.data.stats()
        measured = {"rate": stats.samples_per_second, "waited": stats.wait_fraction}
        say("trained", rank=self.rank, verdict=stats.verdict, client=stats.client, **measured)

    def _save(self) -> None:
        state = self.data.state_dict()
        saved = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        unfinished = self.checkpoint.with_suffix(".unfinished")
        torch.save({**saved, "data": state, "step": self.step}, unfinished)
        unfinished.replace(self.checkpoint)
        say("checkpoint", step=self.step, epoch=state["epoch"], position=state["position"])


def pixels(batch: dict[str, Tensor]) -> Tensor:
    """Return the images of a batch as the network takes them: uint8 (b, h, w, 1) -> float32 (b, 1, h, w)."""
    return batch["image"].permute(0, 3, 1, 2).float() / 255


@torch.no_grad()
def evaluate(model: nn.Module, url: str) -> tuple[int, int]:
    """Return how many samples of the val split, over all ranks, the model gets right, and how many there are."""
    model.eval()
    batch_size = GLOBAL_BATCH // dist.get_world_size()
    data = sl.StreamingDataset(url, split="val", batch_size=batch_size, shuffle=False, decode=IMAGES)
    right_and_count = torch.zeros(2, dtype=torch.int64)
    for batch in data:
        right = (model(pixels(batch)).argmax(1) == batch["label"]) & batch["valid"]
        right_and_count += torch.stack([right.sum(), batch["valid"].sum()])
    dist.all_reduce(right_and_count)
    return int(right_and_count[0]), int(right_and_count[1])


if __name__ == "__main__":
    main()
