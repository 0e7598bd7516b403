"""Finds nuclei in an OME-Zarr image: a small U-Net, trained on random patches that are read in place.

    python examples/tutorials/microscopy.py

Unless there is a store at `--url`, it makes one: bright ellipses in uneven light, half of them out of focus, with the
noise of a camera. The script can be killed at any time: started again, it resumes after the last checkpoint. The page
docs/tutorials/microscopy.md explains each part.
"""

import argparse
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import zarr
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle
from torch import Tensor, nn

import streamloader as sl

IMAGE, LABELS, OVERVIEW = "0", "labels/nuclei/0", "2"  # arrays of the store
TRAIN, TEST = slice(0, 12), slice(12, 14)  # frames
SIZE, MARGIN = 64, 16  # of a patch, in pixels
EPOCHS = 8
SAVE_STEPS = 25  # use thousands in a real run


def make(url: str, frames: int = 14, size: int = 288) -> zarr.Group:
    """Write OME-Zarr 0.5: an image with three levels, and the labels of the nuclei that are in focus."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size]
    light, labels = np.zeros((frames, size, size)), np.zeros((frames, size, size), np.uint16)
    for frame in range(frames):
        light[frame] = 400 + 200 * np.sin(y / 60 + rng.uniform(0, 6)) * np.cos(x / 50 + rng.uniform(0, 6))
        for number, (row, column) in enumerate(rng.uniform(0, size, (70, 2)), start=1):
            angle, wide, high = rng.uniform(0, np.pi), *rng.uniform(6, 12, 2)
            along = (x - column) * np.cos(angle) + (y - row) * np.sin(angle)
            across = (y - row) * np.cos(angle) - (x - column) * np.sin(angle)
            distance = np.hypot(along / wide, across / high)  # 1 at the outline
            sharp = number % 2 == 1
            light[frame] += rng.uniform(120, 240) * (
                1 / (1 + distance**12) if sharp else np.exp(-((distance / 1.5) ** 2))
            )
            labels[frame][(distance < 1) & (labels[frame] == 0) & sharp] = number
    image = (rng.poisson(light) + rng.normal(100, 20, light.shape)).clip(0).astype(np.uint16)

    group, axes, levels = zarr.open_group(url, mode="w"), ("t", "y", "x"), []
    group.create_array(LABELS, data=labels, chunks=(1, 144, 144), dimension_names=axes)
    for level in range(3):
        group.create_array(str(level), data=image, chunks=(1, 144, 144), dimension_names=axes)
        scale = {"type": "scale", "scale": [1, 2**level, 2**level]}
        levels.append({"path": str(level), "coordinateTransformations": [scale]})
        image = image.reshape(frames, image.shape[1] // 2, 2, -1, 2).mean((2, 4)).astype(np.uint16)
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": [{"name": a} for a in axes], "datasets": levels}]}
    return group


def patches(url: str, frames: slice, random: bool) -> sl.StreamingDataset:
    """Return patches of these frames: at random places and shuffled, or as tiles in order."""
    patch = sl.Patch({"y": SIZE, "x": SIZE}, margin=MARGIN, random=random)
    samples = {"sample_axis": "t", "fields": [IMAGE, LABELS], "patches": patch, "with_index": True}
    return sl.StreamingDataset(url, batch_size=16, where=frames, shuffle=random, **samples)


def inside(image: Tensor) -> Tensor:
    """Return images without their margin."""
    return image[..., MARGIN:-MARGIN, MARGIN:-MARGIN]


def prepare(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return images, about 0 to 1, and without margin the masks of nuclei: float32 (batch, 1, h, w)."""
    image, label = batch[IMAGE][:, None], batch[LABELS][:, None]
    return image.float() / 1000, inside(label.int() > 0).float()


class UNet(nn.Module):
    """A network of images (batch, 1, h, w) -> logits (batch, 1, h, w), which sees about 16 pixels to each side."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = layer(1, width), layer(width, 2 * width)
        self.middle = nn.Sequential(layer(2 * width, 4 * width), layer(4 * width, 2 * width))
        self.up2, self.up1, self.last = layer(4 * width, width), layer(2 * width, width), nn.Conv2d(width, 1, 1)
        self.smaller, self.larger = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down1(image)
        coarse = self.down2(self.smaller(fine))
        middle = self.middle(self.smaller(coarse))
        coarse = self.up2(torch.cat([coarse, self.larger(middle)], dim=1))
        return self.last(self.up1(torch.cat([fine, self.larger(coarse)], dim=1)))


def layer(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("microscopy"), help="folder for all files that are written")
    parser.add_argument("--url", help="the store; default: nuclei.zarr in that folder")
    parser.add_argument("--kill-at", type=int, help="kill the process at this step")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    url = arguments.url or str(arguments.out / "nuclei.zarr")
    try:
        store = zarr.open_group(url, mode="r")
    except FileNotFoundError:
        store = make(url)

    train = patches(url, TRAIN, random=True)
    print(f"{train.num_samples} patches an epoch of {url}", flush=True)

    torch.set_num_threads(1)  # the loader has threads of its own, and a small network gains nothing from more
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []  # of each step

    checkpoint = arguments.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train.load_state_dict(saved["data"])
        losses = saved["losses"]
        print(f"resumed at step {len(losses)}, in epoch {train.epoch + 1}", flush=True)

    while train.epoch < EPOCHS:
        for batch in train:
            image, mask = prepare(batch)
            loss = nn.functional.binary_cross_entropy_with_logits(inside(model(image)), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == arguments.kill_at:
                os._exit(1)  # nothing is saved, closed or waited for
            if len(losses) % SAVE_STEPS == 0:
                parts = {"model": model, "optimizer": optimizer, "data": train}
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save(states | {"losses": losses}, checkpoint.with_suffix(".unfinished"))
                checkpoint.with_suffix(".unfinished").replace(checkpoint)
        print(f"epoch {train.epoch}: loss {np.mean(losses[-len(train) :]):.3f}", flush=True)

    images, truth, found = predict(model, store[IMAGE].shape[1:], url)
    simple = local_threshold(images, truth)
    masks = {"local threshold": simple[0], "U-Net": found[0]}
    draw(arguments.out / "microscopy.png", store[OVERVIEW][TEST.start], truth[0], masks)
    print(f"test score {dice(found, truth):.3f}, local threshold {dice(simple, truth):.3f}")


@torch.no_grad()
def predict(model: UNet, shape: tuple[int, int], url: str) -> np.ndarray:
    """Return images, masks and predicted masks of the test frames: float32 (3, frames, y, x)."""
    frames = np.zeros((3, TEST.stop - TEST.start, *shape), np.float32)
    for batch in patches(url, TEST, random=False):
        image, mask = prepare(batch)
        tiles = torch.cat([inside(image), mask, inside(model(image)) > 0], dim=1).numpy()
        places = zip(batch["index"], batch["index_y"], batch["index_x"], strict=True)
        for tile, (t, y, x) in zip(tiles, places, strict=True):
            inner = frames[:, t - TEST.start, y + MARGIN :, x + MARGIN :]
            inner[:, :SIZE, :SIZE] = tile
    return inside(frames)


def local_threshold(images: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return where images are brighter than around, with the threshold that is best for this truth."""
    stack = torch.from_numpy(images)
    near, around = (nn.functional.avg_pool2d(stack, n, 1, n // 2, count_include_pad=False) for n in (5, 31))
    masks = [(near - around > level).numpy() for level in np.arange(0, 0.2, 0.005)]
    return max(masks, key=lambda mask: dice(mask, truth))


def dice(mask: np.ndarray, truth: np.ndarray) -> float:
    return float(2 * (mask * truth).sum() / (mask.sum() + truth.sum()))


def draw(path: Path, overview: np.ndarray, truth: np.ndarray, masks: dict[str, np.ndarray]) -> None:
    """Draw the tiles on the overview of a frame, and where masks are right, miss a nucleus, and are wrong."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.8), layout="constrained")
    end, colours = len(truth) + MARGIN, {"wrong": "tab:red", "missed": "tab:blue", "found": "tab:green"}
    for axes in panels:
        axes.imshow(overview, cmap="gray", extent=(0, end + MARGIN, end + MARGIN, 0))
        axes.set_axis_off()
    panels[0].set_title("tiles, and one with its margin")
    for y, x in np.ndindex(len(truth) // SIZE, len(truth) // SIZE):
        corner = (x * SIZE + MARGIN, y * SIZE + MARGIN)
        panels[0].add_patch(Rectangle(corner, SIZE, SIZE, fill=False, color="white", lw=0.7))
    panels[0].add_patch(Rectangle((SIZE, SIZE), *2 * [SIZE + 2 * MARGIN], fill=False, color="tab:orange", lw=2))
    for axes, (name, mask) in zip(panels[1:], masks.items(), strict=True):
        kinds = np.ma.masked_equal(mask + 2 * truth, 0)  # 1 to 3, as in colours
        axes.imshow(kinds, ListedColormap(list(colours.values())), alpha=0.7, extent=(MARGIN, end, end, MARGIN))
        axes.set_title(f"{name}: Dice {dice(mask, truth):.2f}")
    figure.legend([Patch(color=c) for c in colours.values()], colours, ncols=3, loc="outside lower right")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
