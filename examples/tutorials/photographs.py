"""Trains a classifier on photographs in folders, one folder for each class, and shows those that it finds hardest.

    python examples/tutorials/photographs.py

Without `--photos FOLDER` it makes photographs of its own: scikit-learn's 1,797 handwritten digits, each drawn on a
part of one of scikit-learn's two photographs. The script can be killed at any time: started again, it resumes after the
last checkpoint. The page docs/tutorials/photographs.md explains each part.
"""

import argparse
import io
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from torch import nn

import streamloader as sl
from streamloader.options import CenterCrop, RandomResizedCrop

SAVE_STEPS = 20  # use thousands in a real run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("photographs"), help="folder for all files that are written")
    parser.add_argument("--photos", type=Path, help="your folder of photographs, FOLDER/CLASS/IMAGE")
    parser.add_argument("--url", help="where the dataset is written, such as s3://my-bucket/photographs")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--kill-at", type=int, help="kill the process at this step")
    arguments = parser.parse_args()
    photos = arguments.photos or make_photographs(arguments.out / "photos")
    url = arguments.url or str(arguments.out / "dataset")

    splits = {"train": 0.8, "val": 0.2}
    report = sl.convert(photos, url, fields="image,label,path", split=splits, on_error="skip", resume=True)
    print(f"{report.num_samples} photographs in {url}", flush=True)
    if report.num_left_out:
        print(f"bad files skipped: {report.num_left_out}", flush=True)

    crops = sl.Decode(size=(32, 32), crop=RandomResizedCrop(scale=(0.6, 1), flip=0), normalize="imagenet")
    train = sl.StreamingDataset(url, split="train", batch_size=64, decode=crops, seed=7, with_index=True)
    whole = sl.Decode(size=(32, 32), crop=CenterCrop(1.0), normalize="imagenet")
    val = sl.StreamingDataset(url, split="val", batch_size=64, decode=whole, shuffle=False, with_index=True)
    classes = train.classes["label"]

    torch.set_num_threads(1)  # the loader has threads of its own, and a small network gains nothing from more
    torch.manual_seed(0)
    model = network(len(classes)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses, accuracies = load(arguments.out / "checkpoint.pt", model, optimizer, train)
    log = sl.LossLog(train, arguments.out / "losses.jsonl")
    while train.epoch < arguments.epochs:
        model.train()
        for batch in train:
            of_each = nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="none")
            log(batch, of_each)
            loss = of_each[batch["valid"]].mean()  # the last batch of an epoch is padded
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == arguments.kill_at:
                os._exit(1)  # nothing is saved, closed or waited for
            if len(losses) % SAVE_STEPS == 0:
                save(arguments.out / "checkpoint.pt", model, optimizer, train, losses=losses, accuracies=accuracies)
        accuracies.append(accuracy_of(evaluate(model, val)))
        loss = np.mean(losses[-len(train) :])
        print(f"epoch {train.epoch}: loss {loss:.3f}, accuracy {accuracies[-1]:.3f}", flush=True)

    log.close()
    result = evaluate(model, val)
    images = hardest(url, result, classes)
    draw(arguments.out / "photographs.png", losses, accuracies, [(image, title) for _, image, title in images])
    for path, _, title in images[:3]:
        print(f"{path}: {title}", flush=True)
    frequent = np.bincount(result["label"]).max() / len(result["label"])
    print(f"test accuracy {accuracy_of(result):.3f}, most frequent class {frequent:.3f}")


def make_photographs(folder: Path) -> Path:
    """Write the digits as FOLDER/DIGIT/NUMBER.jpg, white on 96 x 96 pixels of a photograph."""
    from sklearn.datasets import load_digits, load_sample_images

    random = np.random.default_rng(0)
    digits, photographs = load_digits(), load_sample_images().images
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        photograph = photographs[random.integers(len(photographs))]
        top, left = random.integers(0, np.array(photograph.shape[:2]) - 96)
        image = Image.fromarray(photograph[top : top + 96, left : left + 96] // 2)
        ink = Image.fromarray((pixels * 15).astype(np.uint8)).resize((64, 64), Image.Resampling.BICUBIC)
        image.paste((255, 255, 255), tuple(random.integers(8, 24, 2).tolist()), ink)
        shown = label if number % 60 else (label + 3) % 10  # 30 are in a wrong folder, as in many real collections
        path = folder / str(shown) / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            image.save(path, quality=90)
    return folder


def network(classes: int) -> nn.Module:
    """Return a network of images (b, 3, 32, 32) -> logits (b, classes)."""
    layers, channels = [], 3
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(64 * 9, classes))


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, data: sl.StreamingDataset, **more) -> None:
    """Write a checkpoint. A kill leaves the old one or the new one, never half of one."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
    torch.save(states | more, path.with_suffix(".unfinished"))
    path.with_suffix(".unfinished").replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, data: sl.StreamingDataset):
    """Load the checkpoint, if there is one, and return the loss of each step and the accuracy of each epoch."""
    if not path.exists():
        return [], []
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    data.load_state_dict(saved["data"])
    print(f"resumed at step {len(saved['losses'])}, in epoch {data.epoch + 1}", flush=True)
    return saved["losses"], saved["accuracies"]


@torch.no_grad()
def evaluate(model: nn.Module, data: sl.StreamingDataset) -> dict[str, np.ndarray]:
    """Return loss, prediction, label and number (index) of each sample of the dataset."""
    model.eval()
    parts = []
    for batch in data:
        logits = model(batch["image"])
        loss = nn.functional.cross_entropy(logits, batch["label"], reduction="none")
        columns = {"loss": loss, "predicted": logits.argmax(1), "label": batch["label"], "index": batch["index"]}
        parts.append({name: values[batch["valid"]].numpy() for name, values in columns.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def accuracy_of(result: dict[str, np.ndarray]) -> float:
    return (result["predicted"] == result["label"]).mean().item()


def hardest(url: str, result: dict[str, np.ndarray], classes: tuple[str, ...]) -> list[tuple[str, bytes, str]]:
    """Return path, encoded image, and classes as text, of the eight samples with the highest loss."""
    stored, found = sl.open(url, split="val"), []
    for place in result["loss"].argsort()[::-1][:8]:
        label, predicted = (classes[result[name][place]] for name in ("label", "predicted"))
        sample = stored[result["index"][place]]
        found.append((sample["path"], sample["image"], f"{label}, predicted {predicted}"))
    return found


def draw(path: Path, losses: list[float], accuracies: list[float], images: list[tuple[bytes, str]]) -> None:
    """Draw the loss of each step, the accuracy of each epoch, and eight encoded images with their titles."""
    figure = plt.figure(figsize=(9, 3.2), layout="constrained")
    curves, samples = figure.subfigures(1, 2, width_ratios=(1, 1.3))
    axes = curves.subplots()
    axes.plot(losses, color="tab:blue", linewidth=1)
    axes.set(xlabel="step", ylabel="training loss")
    axes.yaxis.label.set_color("tab:blue")
    right = axes.twinx()
    steps = len(losses) / len(accuracies)
    right.plot(np.arange(1, len(accuracies) + 1) * steps, accuracies, "o-", color="tab:orange")
    right.set(ylabel="accuracy on val", ylim=(0, 1))
    right.yaxis.label.set_color("tab:orange")
    samples.suptitle("Highest losses on val")
    for place, (image, title) in zip(samples.subplots(2, 4).flat, images, strict=False):
        place.imshow(Image.open(io.BytesIO(image)).resize((32, 32)))  # the size that the network sees
        place.set_title(title, fontsize=8)
        place.axis("off")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
