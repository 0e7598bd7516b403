"""One rank of the demo's training, started by torchrun. It uses only the public API.

Each rank logs the numbers of the samples that it trains on to a file of its own, and reports events as JSON lines on
standard output. The run resumes from `checkpoint.pt` if that exists.
"""

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

GLOBAL_BATCH = 96
CHECKPOINT_STEPS = 7
IMAGES = sl.Decode(mode="L")


def main() -> None:
    """Train, then evaluate on the val split; the arguments are URL, folder, name of the run, and epochs."""
    url, folder, run, epochs = sys.argv[1:]
    threading.Thread(target=exit_with_starter, daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    trainer = Trainer(url, Path(folder))
    with (Path(folder) / f"{run}-rank{dist.get_rank()}.jsonl").open("w", buffering=1) as log:
        trainer.train(int(epochs), log)
    right, count = evaluate(trainer.model.module, url)
    if dist.get_rank() == 0:
        report("evaluated", right=right, count=count)
    dist.destroy_process_group()
    # This skips the interpreter's shutdown, in which a thread of gloo that still holds the tensors of its last
    # collective aborts the process (torch 2.13, "terminate called without an active exception").
    os._exit(0)


def exit_with_starter() -> None:
    """Exit as soon as standard input is closed, as it is when the starter ends in any way."""
    while os.read(0, 4096):  # not sys.stdin, whose lock would abort the interpreter if it is held at exit
        pass
    os._exit(1)


def report(event: str, **values: Any) -> None:
    """Report an event to the starter, in one write, so that the lines of two ranks do not mix."""
    os.write(1, f"{json.dumps({'event': event, **values})}\n".encode())


def network() -> nn.Sequential:
    """Return a small convolutional network: (b, 1, 8, 8) pixels from 0 to 1 -> (b, 10) logits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(1024, 10)),
    )


class Trainer:
    """The model, the optimizer and the dataset, which a checkpoint saves together."""

    def __init__(self, url: str, folder: Path) -> None:
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(network())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        batch_size = GLOBAL_BATCH // dist.get_world_size()
        self.data = sl.StreamingDataset(url, split="train", batch_size=batch_size, decode=IMAGES, with_index=True)
        self.step = 0
        self.checkpoint = folder / "checkpoint.pt"
        report("started", rank=self.rank, pid=os.getpid())
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.model.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.data.load_state_dict(saved["data"])
            self.step = saved["step"]

    def train(self, epochs: int, log: TextIO) -> None:
        """Train until `epochs` epochs are complete; rank 0 writes a checkpoint every few steps."""
        begin = self.data.state_dict()
        report("begun", rank=self.rank, step=self.step, epoch=begin["epoch"], position=begin["position"])
        for epoch in range(begin["epoch"], epochs):
            for batch in self.data:
                # logged before gradients are reduced: at a checkpoint, every rank has logged all steps before it
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
        report("trained", rank=self.rank, verdict=stats.verdict, client=stats.client, **measured)

    def _save(self) -> None:
        state = self.data.state_dict()
        saved = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        unfinished = self.checkpoint.with_suffix(".unfinished")
        torch.save({**saved, "data": state, "step": self.step}, unfinished)
        unfinished.replace(self.checkpoint)
        report("checkpoint", step=self.step, epoch=state["epoch"], position=state["position"])


def pixels(batch: dict[str, Tensor]) -> Tensor:
    """Return the images of a batch: uint8 (b, h, w, 1) -> float32 (b, 1, h, w) in [0, 1]."""
    return batch["image"].permute(0, 3, 1, 2).float() / 255


@torch.no_grad()
def evaluate(model: nn.Module, url: str) -> tuple[int, int]:
    """Return the number of correct samples and of all samples of the val split, over all ranks."""
    model.eval()
    batch_size = GLOBAL_BATCH // dist.get_world_size()
    data = sl.StreamingDataset(url, split="val", batch_size=batch_size, shuffle=False, decode=IMAGES)
    totals = torch.zeros(2, dtype=torch.int64)
    for batch in data:
        right = (model(pixels(batch)).argmax(1) == batch["label"]) & batch["valid"]
        totals += torch.stack([right.sum(), batch["valid"].sum()])
    dist.all_reduce(totals)
    return int(totals[0]), int(totals[1])


if __name__ == "__main__":
    main()
