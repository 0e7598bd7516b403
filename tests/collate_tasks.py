"""Transforms and functions that make batches, which workers load: this module imports little."""

from typing import Any

import numpy as np
import torch


def sizes(sample: dict[str, Any]) -> dict[str, Any]:
    """Values of sizes that depend on the label, one of them large."""
    label = int(sample["label"])
    wave = np.full(3000 + label % 7, label, np.float32)
    grid = np.full((1 + label % 3, 1 + label % 4), label + 1)
    parts, jagged = torch.full((label % 5, 2), label), np.full((label % 6, 3), label, np.int32)
    return {"label": sample["label"], "wave": wave, "grid": grid, "parts": parts, "jagged": jagged}


def sizes_or_error(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["label"]) in (7, 30, 31, 88):
        raise ValueError("bad")
    return sizes(sample)


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "tokens": sample["tokens"] * 2}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    labels = np.array([row["label"] for row in rows])
    return {
        "total": np.array([row["tokens"].sum() for row in rows]),
        "targets": [{"label": torch.tensor(int(row["label"]))} for row in rows],
        "shapes": [row["image"].shape for row in rows],
        "stacked": torch.from_numpy(np.repeat(labels, 150).reshape(-1, 3, 50)),
    }


def noise(rows: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
    return {"rng": rng.random(3), "torch": torch.rand(2)}


def of_waves(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"label": np.array([row["label"] for row in rows]), "wave": [row["wave"] for row in rows]}
