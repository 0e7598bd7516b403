"""Trains a classifier on a table in Parquet: columns of numbers, an embedding for each row, and a rare class.

    python examples/tutorials/tables.py

Without `--table PATH`, a Parquet file or a folder of them with the same columns, it makes a table with scikit-learn.
The page docs/tutorials/tables.md explains each part.
"""

import argparse
import json
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sklearn.datasets import make_classification
from torch import Tensor, nn

import streamloader as sl

NUMBERS = [f"x{i}" for i in range(12)]  # the columns that the model takes beside the embedding
CLASSES = 4
TRAIN, TEST = "day < 300", "day >= 300"
EPOCHS = 6


def make_table(folder: Path) -> Path:
    """Write 24,000 rows as four Parquet files, ordered by day: columns in units of their own, and an embedding."""
    if folder.exists():
        return folder
    random = np.random.default_rng(0)
    shares = [0.85, 0.1, 0.035, 0.015]
    values, labels = make_classification(
        24_000, 44, n_informative=16, n_classes=CLASSES, weights=shares, class_sep=0.7, flip_y=0, random_state=0
    )
    units = 10.0 ** random.integers(-2, 4, len(NUMBERS))
    columns = {"day": np.sort(random.integers(0, 365, len(labels))), "label": labels}
    columns |= dict(zip(NUMBERS, (values[:, :12] * units + 5 * units).astype(np.float32).T, strict=True))
    embedding = pa.FixedSizeListArray.from_arrays(values[:, 12:].astype(np.float32).ravel(), 32)
    table = pa.table({**columns, "embedding": embedding})
    folder.mkdir(parents=True)
    for part in range(4):
        pq.write_table(table.slice(6000 * part, 6000), folder / f"part-{part}.parquet")
    return folder


class Classifier(nn.Module):
    """Batches -> logits (b, CLASSES). It normalises the columns itself, so whoever uses the model need not."""

    def __init__(self, statistics: dict[str, dict[str, float]]) -> None:
        super().__init__()
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor([statistics[column][name] for column in NUMBERS]))
        self.layers = nn.Sequential(
            nn.Linear(44, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits."""
        numbers = torch.stack([batch[column] for column in NUMBERS], dim=1)
        return self.layers(torch.cat([(numbers - self.mean) / self.std, batch["embedding"]], dim=1))


def train(model: nn.Module, data: sl.StreamingDataset) -> list[float]:
    """Train for some epochs, and return the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    while data.epoch < EPOCHS:
        for batch in data:
            loss = nn.functional.cross_entropy(model(batch), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, data: sl.StreamingDataset) -> np.ndarray:
    """Return how many rows of each class (the rows of the result) were predicted as each class (its columns)."""
    counts = np.zeros((CLASSES, CLASSES), int)
    for batch in data:
        np.add.at(counts, (batch["label"].numpy(), model(batch).argmax(1).numpy()), 1)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("tables"), help="folder for all files that are written")
    parser.add_argument("--table", type=Path, help="your table: a Parquet file, or a folder of them")
    parser.add_argument("--url", help="where the dataset is written, such as s3://my-bucket/tables")
    arguments = parser.parse_args()
    table = arguments.table or make_table(arguments.out / "table")
    url = arguments.url or str(arguments.out / "dataset")
    torch.set_num_threads(1)  # the loader has threads of its own, and a small network gains nothing from more

    report = sl.convert(table, url, fields=["day", "label", *NUMBERS, "embedding"], resume=True)
    print(f"{report.num_samples} rows in {url}", flush=True)

    statistics = arguments.out / "statistics.json"
    command = ["streamloader", "stats", url, "--fields", ",".join(NUMBERS), "--where", TRAIN]
    subprocess.run([*command, "--output", str(statistics)], check=True)
    fitted = json.loads(statistics.read_text())["statistics"]

    test = sl.StreamingDataset(url, batch_size=1024, where=TEST, shuffle=False, remainder="uneven")
    losses, recalls = {}, {}
    for weights in (None, "balanced:label"):
        data = sl.StreamingDataset(url, batch_size=128, where=TRAIN, weights=weights, remainder="drop")
        torch.manual_seed(0)
        model = Classifier(fitted)
        losses[weights] = train(model, data)
        counts = evaluate(model, test)
        recalls[weights] = (counts.diagonal() / counts.sum(1)).round(3)
        print(
            f"weights={weights}: accuracy {counts.trace() / counts.sum():.3f}, recalls {recalls[weights]}", flush=True
        )

    draw(arguments.out / "tables.png", losses, recalls, counts.sum(1))
    print(f"test balanced accuracy {recalls['balanced:label'].mean():.3f}, one class for all {1 / CLASSES:.3f}")


def draw(
    path: Path, losses: dict[str | None, list[float]], recalls: dict[str | None, np.ndarray], rows: np.ndarray
) -> None:
    """Draw the losses, and the recall of each class, with and without weights."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for place, weights in enumerate(losses):
        left.plot(np.convolve(losses[weights], np.ones(20) / 20, "valid"), label=f"weights={weights}")
        right.bar(np.arange(CLASSES) + 0.4 * place - 0.2, recalls[weights], 0.4)
    left.set(xlabel="step", ylabel="training loss, mean of 20")
    left.legend()
    right.set(ylabel="recall on the test days", ylim=(0, 1))
    right.set_xticks(range(CLASSES), [f"class {label}\n{count} rows" for label, count in enumerate(rows)])
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
