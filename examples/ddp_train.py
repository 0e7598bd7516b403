"""Trains a small classifier on an image dataset in a bucket, on all ranks that torchrun starts.

    torchrun --nproc-per-node=2 examples/ddp_train.py s3://my-bucket/photos --epochs 3

The dataset needs the fields `image` (encoded images) and `label`, and the splits train and val. This makes it from
a folder with a subfolder for each class: `streamloader convert FOLDER URL --split train=0.9,val=0.1`. You can stop
the script at any time and start it again, with any number of ranks that divides the batch: it resumes after the last
checkpoint. Only rank 0 reads and writes the checkpoint.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import streamloader as sl

GLOBAL_BATCH = 32
DECODE = sl.Decode(size=(64, 64))
SAVE_STEPS = 2  # use thousands in a real run


def main() -> None:
    """Train, save checkpoints, evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop after this number of steps in total")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device("cuda" if cuda else "cpu")
    batch_size = GLOBAL_BATCH // dist.get_world_size()
    train = sl.StreamingDataset(arguments.url, split="train", batch_size=batch_size, decode=DECODE)
    val = sl.StreamingDataset(arguments.url, split="val", batch_size=batch_size, decode=DECODE, shuffle=False)

    torch.manual_seed(0)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.Adam(model.parameters())
    step = load(arguments.checkpoint, model, optimizer, train)
    if dist.get_rank() == 0:
        print(f"begin at step {step}, epoch {train.epoch}, world size {dist.get_world_size()}", flush=True)
    while train.epoch < arguments.epochs and step != arguments.steps:
        for batch in train:
            loss = nn.functional.cross_entropy(
                model(pixels(batch, device)), batch["label"].to(device), reduction="none"
            )
            optimizer.zero_grad()
            (loss * batch["valid"].to(device)).mean().backward()  # padding in the last batch does not count
            optimizer.step()
            step += 1
            if step % SAVE_STEPS == 0 and dist.get_rank() == 0:
                save(arguments.checkpoint, model, optimizer, train, step)
            if step == arguments.steps:
                break
    right, count = evaluate(model.module, val, device)
    if dist.get_rank() == 0:
        print(f"end at step {step}, epoch {train.epoch}: {right} of {count} right; {train.stats().verdict}")


def network() -> nn.Module:
    """Return a network of (b, 3, 64, 64) floats -> (b, 16) logits: enough for 16 classes."""
    layers = [nn.Conv2d(3, 16, 5, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1568, 16))


def pixels(batch: dict[str, Tensor], device: torch.device) -> Tensor:
    """Return the images: uint8 (b, h, w, 3) -> float32 (b, 3, h, w) in [0, 1], converted on the device."""
    return batch["image"].to(device).permute(0, 3, 1, 2).float() / 255


def save(
    path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, data: sl.StreamingDataset, step: int
) -> None:
    """Write a checkpoint to a temporary file and rename that: a kill leaves the old checkpoint or the new one."""
    saved = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "data": data.state_dict(),  # the same on every rank
        "step": step,
    }
    unfinished = path.with_suffix(".unfinished")
    torch.save(saved, unfinished)
    unfinished.replace(path)


def load(
    path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, data: sl.StreamingDataset
) -> int:
    """Load the checkpoint, if it exists, and return its step, or 0.

    Rank 0 reads it for all ranks: on several nodes the others may not have access to the file.
    """
    saved = [None]
    if dist.get_rank() == 0 and path.exists():
        saved = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(saved)
    if saved[0] is None:
        return 0
    model.module.load_state_dict(saved[0]["model"])
    optimizer.load_state_dict(saved[0]["optimizer"])
    data.load_state_dict(saved[0]["data"])
    return int(saved[0]["step"])


@torch.no_grad()
def evaluate(model: nn.Module, data: sl.StreamingDataset, device: torch.device) -> tuple[int, int]:
    """Return the number of correct samples and of all samples, over all ranks."""
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    for batch in data:
        valid = batch["valid"].to(device)
        right = (model(pixels(batch, device)).argmax(1) == batch["label"].to(device)) & valid
        totals += torch.stack([right.sum(), valid.sum()])
    dist.all_reduce(totals)
    return int(totals[0]), int(totals[1])


def leave() -> None:
    """Destroy the process group after the models that use it are deleted.

    A thread of gloo that still holds the tensors of its last collective when the interpreter ends aborts the process
    ("terminate called without an active exception", torch 2.13); garbage collection releases them.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
