"""Transforms that processes load: this module imports little, since each of them imports it."""

import os
import signal
import time
from typing import Any

import numpy as np

BAD = 57 - 2**40  # the label of sample 57


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"y": sample["x"][:4] + 1, "noise": rng.random(3), "name": sample["name"] + "!", "label": sample["label"]}


def summed(sample: dict[str, Any]) -> dict[str, Any]:
    return {"sum": sample["tok"].sum(), "tok": [*sample["tok"].tolist()], "name": sample["name"]}


def measured(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "size": np.array([len(text) for text in batch["t"]]),
        "twice": batch["n"] * 2,
        "batch": [len(batch["n"])] * len(batch["n"]),
    }


class Raising:
    """A transform that raises an error on sample 57, and that processes can load."""

    def __init__(self, kind: type[BaseException], *arguments: Any) -> None:
        self.kind, self.arguments = kind, arguments

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == BAD:
            raise self.kind(*self.arguments)
        return {"label": sample["label"]}


def kills_itself(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] == BAD:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"label": sample["label"]}


class Odd(BaseException):
    """Neither an Exception, nor one that pickle can load again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class NoMessage(Exception):
    """An error whose message cannot be formatted."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def draws_from_torch(sample: dict[str, Any]) -> dict[str, Any]:
    import torch  # as a transform does whose module must be cheap to import

    return {"drawn": torch.rand(2), "label": sample["label"]}


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.01)
    return {"label": sample["label"]}


def unpicklable(sample: dict[str, Any]) -> dict[str, Any]:
    return {"values": [lambda: 1] if sample["label"] == BAD else [1]}


def raises_on_undecodable(sample: dict[str, Any]) -> dict[str, Any]:
    """Raises on the samples whose images do not decode in `test_bad_samples.py`."""
    if int(sample["label"]) in (5, 17, 40, 41, 42, 99):
        raise ValueError("bad")
    return sample


def mean_of_views(sample: dict[str, Any]) -> dict[str, Any]:
    local = sample["image_local"]
    return {"shape": np.array(local.shape), "mean": local.mean((1, 2, 3))}
