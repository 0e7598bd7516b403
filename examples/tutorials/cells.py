"""Classifies single cells by their genes, from the sparse rows of AnnData's Zarr, with rare types as often as others.

    python examples/tutorials/cells.py

Unless there is a store at `--url`, it writes one with anndata: random counts of seven types, of which some are rare and
some alike, in five donors that differ. The page docs/tutorials/cells.md explains each part.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import zarr
from torch import Tensor, nn

import streamloader as sl

FIELDS = ["X", "obs/cell_type"]
TRAIN, TEST = "'obs/donor' != 'donor5'", "'obs/donor' == 'donor5'"
STEPS = 150


def make(url: str, cells: int = 20_000, genes: int = 800) -> zarr.Group:
    """Write counts (cells, genes) as AnnData does, with the type and the donor of each cell."""
    import anndata
    import pandas
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(0)
    shares = {
        "CD4 T": 0.5,
        "CD8 T": 0.25,
        "B": 0.13,
        "NK": 0.09,
        "monocyte": 0.02,
        "dendritic": 0.005,
        "platelet": 0.005,
    }
    like = {"CD8 T": "CD4 T", "NK": "CD8 T", "dendritic": "monocyte"}  # others are like none
    profiles = {None: rng.lognormal(0, 1.5, genes)}  # of each type, how much there is of each gene
    for name in shares:
        profiles[name] = profiles[like.get(name)].copy()
        profiles[name][rng.choice(genes, 40, replace=False)] *= 4
    types = rng.choice(len(shares), cells, p=list(shares.values()))
    donors = np.sort(rng.integers(0, 5, cells))
    rates = np.stack([profiles[name] for name in shares])[types] * rng.lognormal(0, 0.4, (5, genes))[donors]
    depths = rng.lognormal(np.log(400), 0.5, (cells, 1))  # counts of a cell
    counts = rng.poisson(depths * rates / rates.sum(1, keepdims=True)).astype(np.float32)

    def texts(values: list[str]) -> pandas.Index:  # anndata 0.12 does not write what pandas 3 makes of them by default
        return pandas.Index(values, dtype=object)

    obs = pandas.DataFrame(index=texts([f"cell{number}" for number in range(cells)]))
    obs["cell_type"] = pandas.Categorical.from_codes(types, texts(list(shares)))
    obs["donor"] = pandas.Categorical.from_codes(donors, texts([f"donor{number}" for number in range(1, 6)]))
    var = pandas.DataFrame(index=texts([f"gene{number}" for number in range(genes)]))
    anndata.AnnData(csr_matrix(counts), obs, var).write_zarr(url)
    return zarr.open_group(url, mode="r")


class Classifier(nn.Module):
    """A network of a batch of sparse rows -> logits (batch, types)."""

    def __init__(self, genes: int, types: int, width: int = 64) -> None:
        super().__init__()
        # nn.Linear of sparse rows
        self.genes = nn.EmbeddingBag(genes, width, mode="sum", include_last_offset=True)
        nn.init.normal_(self.genes.weight, std=0.03)
        self.dropout = nn.Dropout(0.3)
        self.types = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, types))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        counts, offsets, genes = batch["X"], batch["X_offsets"], batch["X_indices"].long()
        totals = torch.segment_reduce(counts, "sum", offsets=offsets)
        values = torch.log1p(10_000 * counts / totals.repeat_interleave(offsets.diff()))
        return self.types(self.genes(genes, offsets, self.dropout(values)))


def train(data: sl.StreamingDataset | sl.Mixture, model: Classifier) -> Classifier:
    """Train a model with the steps of an epoch of the data."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in data:
        loss = nn.functional.cross_entropy(model(batch), batch["obs/cell_type"].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def confusion(model: Classifier, data: sl.StreamingDataset) -> np.ndarray:
    """Return which share of the cells of each type (row) the model takes for each type (column)."""
    counts = np.zeros(2 * [len(data.classes["obs/cell_type"])])
    for batch in data:
        valid = batch["valid"]  # the last batch is filled up with cells that were there already
        np.add.at(counts, (batch["obs/cell_type"][valid].long(), model(batch).argmax(1)[valid]), 1)
    return counts / counts.sum(1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("cells"), help="folder for all files that are written")
    parser.add_argument("--url", help="the store; default: cells.zarr in that folder")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    url = arguments.url or str(arguments.out / "cells.zarr")
    try:
        store = zarr.open_group(url, mode="r")
    except FileNotFoundError:
        store = make(url)
    cells, genes = store["X"].attrs["shape"]
    print(f"{cells} cells x {genes} genes in {url}: {store['X/data'].size / cells / genes:.0%} are not 0", flush=True)

    rows = {"sample_axis": 0, "fields": FIELDS}
    test = sl.StreamingDataset(url, batch_size=256, where=TEST, shuffle=False, **rows)
    steps = {"batch_size": 64, "steps_per_epoch": STEPS}
    as_stored = sl.StreamingDataset(url, where=TRAIN, **rows, **steps)
    types = test.classes["obs/cell_type"]

    conditions = [f"{TRAIN} and 'obs/cell_type' == '{name}'" for name in types]
    each = [sl.Source(url, sample_axis=0, where=condition) for condition in conditions]
    balanced = sl.Mixture(dict.fromkeys(each, 1), fields=FIELDS, **steps)

    torch.set_num_threads(1)  # the loader has threads of its own, and a small network gains nothing from more
    shares = {}
    for name, data in (("as stored", as_stored), ("balanced", balanced)):
        torch.manual_seed(0)
        shares[name] = confusion(train(data, Classifier(genes, len(types))), test)
        recalls = zip(types, shares[name].diagonal(), strict=True)
        print(f"{name}:", ", ".join(f"{kind} {recall:.2f}" for kind, recall in recalls), flush=True)
    draw(arguments.out / "cells.png", types, shares)
    simple, accuracy = (matrix.diagonal().mean() for matrix in shares.values())
    print(f"test balanced accuracy {accuracy:.3f}, as stored {simple:.3f}")


def draw(path: Path, types: tuple[str, ...], shares: dict[str, np.ndarray]) -> None:
    """Draw the confusion matrices side by side."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.6), sharey=True, layout="constrained")
    for axes, (name, matrix) in zip(panels, shares.items(), strict=True):
        axes.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
        for (row, column), share in np.ndenumerate(matrix):
            label, colour = f"{share:.2f}" if share >= 0.005 else "", "white" if share > 0.5 else "black"
            axes.text(column, row, label, color=colour, ha="center", va="center", size=8)
        axes.set(title=f"batches {name}", xlabel="predicted", xticks=range(len(types)), yticks=range(len(types)))
        axes.set_xticklabels(types, rotation=45, ha="right")
        axes.set_yticklabels(types)
    panels[0].set_ylabel("type of the cell")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
