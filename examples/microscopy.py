"""Trains a segmentation of cells on random patches of an OME-Zarr image in a bucket.

    python examples/microscopy.py --url s3://my-bucket/cells.zarr --make

The image has the axes t, y, x and a pyramid of levels; "cells" is the label image of level 0. A patch has the same
region of both levels and of the labels, with a margin in which the network sees what is around it. Training uses the
first frames; the Dice score on the last ones is compared with that of the best threshold. You can stop the script at
any time and start it again without `--make`: it resumes after the last checkpoint. `--make` first writes frames of
its own, spots on an uneven background; leave it out for your data. Keys of S3 come from the environment.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import streamloader as sl

FIELDS = ["0", "1", "cells"]
TRAIN, HELD_OUT = slice(0, 12), slice(12, 16)  # frames
SIZE, MARGIN = 64, 8
THRESHOLDS = torch.arange(0, 8000, 100)  # the baseline takes the best of these
SAVE_STEPS = 10  # use thousands in a real run


def main() -> None:
    """Train, save checkpoints, evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--endpoint", help="URL of the S3 server; default AWS's")
    parser.add_argument("--make", action="store_true", help="write the data first")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, default=Path("microscopy.pt"))
    arguments = parser.parse_args()
    storage = {"endpoint_url": arguments.endpoint} if arguments.endpoint else {}
    if arguments.make:
        make(arguments.url, storage)

    torch.set_num_threads(1)  # the loader has threads of its own, and a small network gains nothing from more
    frames = {"sample_axis": "t", "fields": FIELDS, "storage_options": storage}
    random = sl.Patch({"y": SIZE, "x": SIZE}, random=True, margin=MARGIN)
    tiles = sl.Patch({"y": SIZE, "x": SIZE}, margin=MARGIN)
    train = sl.StreamingDataset(arguments.url, batch_size=16, patches=random, where=TRAIN, **frames)
    held_out = sl.StreamingDataset(arguments.url, batch_size=16, patches=tiles, where=HELD_OUT, shuffle=False, **frames)

    torch.manual_seed(0)
    model, step = network(), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train.load_state_dict(saved["data"])
        step = saved["step"]
    print(f"begin at step {step}, epoch {train.epoch}", flush=True)
    while train.epoch < arguments.epochs:
        epoch, losses = train.epoch, []
        for batch in train:
            valid = batch["valid"]  # padding in the last batch does not count
            logits, truth = model(levels(batch))[valid], inside(batch["cells"].int() > 0)[valid]
            loss = nn.functional.binary_cross_entropy_with_logits(inside(logits[:, 0]), truth.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(loss.item())
            if step % SAVE_STEPS == 0 or train.epoch > epoch:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": train.state_dict()}
                unfinished = arguments.checkpoint.with_suffix(".unfinished")
                torch.save(states | {"step": step}, unfinished)
                unfinished.replace(arguments.checkpoint)  # a kill leaves the old checkpoint or the new one
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)
    threshold, score = evaluate(model, held_out)
    print(f"held-out Dice score: threshold {threshold:.3f}, model {score:.3f}")


def network() -> nn.Module:
    """Return a network of two levels (b, 2, h, w) -> logits (b, 1, h, w), which sees 8 pixels to each side."""
    layers = [nn.Conv2d(2, 16, 3, padding=1), nn.ReLU()]
    for dilation in (2, 4):
        layers += [nn.Conv2d(16, 16, 3, padding=dilation, dilation=dilation), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 1, 3, padding=1))


def levels(batch: dict[str, Tensor]) -> Tensor:
    """Return both levels at the resolution of the first: uint16 (b, h, w) and (b, h/2, w/2) -> float32 (b, 2, h, w)."""
    fine, coarse = (batch[name][:, None].float() / 4000 for name in ("0", "1"))
    return torch.cat([fine, nn.functional.interpolate(coarse, scale_factor=2)], dim=1) - 0.5


def inside(patches: Tensor) -> Tensor:
    """Return patches without their margin: (b, h, w) -> (b, SIZE, SIZE)."""
    return patches[:, MARGIN:-MARGIN, MARGIN:-MARGIN]


@torch.no_grad()
def evaluate(model: nn.Module, data: sl.StreamingDataset) -> tuple[float, float]:
    """Return the Dice score of the best threshold of level 1, which has less noise, and that of the model."""
    hits, sums = torch.zeros(len(THRESHOLDS) + 1), torch.zeros(len(THRESHOLDS) + 1)
    for batch in data:
        valid, images = batch["valid"], levels(batch)
        truth = inside(batch["cells"].int() > 0)[valid]
        brightness = inside((images[:, 1] + 0.5) * 4000)[valid]
        found = [brightness > threshold for threshold in THRESHOLDS] + [inside(model(images)[:, 0] > 0)[valid]]
        hits += torch.stack([(mask & truth).sum() for mask in found])
        sums += torch.stack([mask.sum() + truth.sum() for mask in found])
    scores = 2 * hits / sums
    return scores[:-1].max().item(), scores[-1].item()


def make(url: str, storage: dict[str, str]) -> None:
    """Write 16 frames of 512 x 512 as OME-Zarr 0.5 with three levels, and the labels of level 0."""
    import zarr

    random = np.random.default_rng(0)
    y, x = np.mgrid[:512, :512]
    frames, labels = np.zeros((16, 512, 512)), np.zeros((16, 512, 512), np.uint16)
    for frame, cells in zip(frames, labels, strict=True):
        frame[:] = 1500 + 1000 * np.sin(y / 90 + random.uniform(0, 6)) * np.cos(x / 70 + random.uniform(0, 6))
        for number, (row, column) in enumerate(random.integers(0, 512, (120, 2)), 1):
            radius = random.uniform(5, 12)
            cell = (y - row) ** 2 + (x - column) ** 2 < radius**2
            frame[cell & (cells == 0)] += random.uniform(500, 900)
            cells[cell] = number
    image = (frames + random.normal(0, 400, frames.shape)).clip(0, 65535).astype(np.uint16)

    group = zarr.open_group(url, mode="w", storage_options=storage or None)
    names, axes = ("t", "y", "x"), [{"name": "t", "type": "time"}, *({"name": n, "type": "space"} for n in "yx")]
    datasets = []
    for level in range(3):
        chunks = (1, *(min(256, n) for n in image.shape[1:]))
        group.create_array(str(level), data=image, chunks=chunks, dimension_names=names)
        scale = [{"type": "scale", "scale": [1, 2**level, 2**level]}]
        datasets.append({"path": str(level), "coordinateTransformations": scale})
        image = image.reshape(len(image), image.shape[1] // 2, 2, -1, 2).mean((2, 4)).astype(np.uint16)
    group.create_array("cells", data=labels, chunks=(1, 256, 256), dimension_names=names)
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}


if __name__ == "__main__":
    main()
