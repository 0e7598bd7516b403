"""Functions that workers of the engine import; this module imports little."""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np


def run_workers(count: int) -> None:
    """Wait until `count` workers run: before, threads of this process read."""
    from streamloader.engine.executor import Executor

    executor = Executor(count)
    executor.start()
    assert executor._pool is not None
    assert executor._pool.serves.wait(60)
    while len(workers_of(os.getpid())) < count:
        time.sleep(0.01)


def drawing(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Draw from every generator that a sample seeds in workers."""
    return {
        "x": sample["x"][:4] + 1,
        "name": sample["name"],
        "tok": sample["tok"] * 2,
        "drawn": rng.random(3),
        "numpy": np.random.random(2),
        "python": random.random(),
    }


def drawing_own(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Draw from the sample's generator only."""
    return {"x": sample["x"] + rng.random(), "flag": sample["flag"], "raw": [sample["raw"]], "tok": sample["tok"]}


def tensors(sample: dict[str, Any]) -> dict[str, Any]:
    """Return tensors, and draw from torch."""
    import torch

    x = torch.from_numpy(sample["x"][:8])
    return {"x": x.bfloat16(), "drawn": torch.rand(2) + x.mean(), "list": [x, sample["label"]]}


def large(sample: dict[str, Any]) -> dict[str, Any]:
    """Return large arrays: contiguous or not, of several dtypes, of a ragged field, in a list, and of a few samples."""
    x = np.resize(sample["x"], (64, 50))
    optional = x if sample["label"] % 5 else None
    return {
        "x": x,
        "transposed": x.T[::-1],
        "mask": np.resize(x > x.mean(), (100, 100)),
        "complex": x * 1j,
        "label": sample["label"],
        "tok": np.resize(sample["tok"], (4096, *sample["tok"].shape[1:])),
        "list": [x],
        "optional": optional,
        "swapped": x.astype(">f8"),
    }


def large_tensors(sample: dict[str, Any]) -> dict[str, Any]:
    """Return large tensors, also of a dtype that numpy does not have, with gradients, and of a few samples."""
    import torch

    x = torch.from_numpy(np.resize(sample["x"], (64, 50)))
    found = {"x": x, "half": x.T.repeat(2, 1).bfloat16(), "mask": (x > 0).repeat(3, 1), "label": sample["label"]}
    return {**found, "gradients": x.clone().requires_grad_(), "either": x if sample["label"] % 7 else x.numpy()}


class Differing:
    """A transform that returns large arrays, of which that of one sample differs from the others."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        x = np.resize(sample["x"], (64, 50))
        if sample["label"] != 57 - 2**40:
            return {"first": x, "x": x}
        values = {
            "shape": x[1:],
            "dtype": x.astype(np.float64),
            "other dtype": x.astype("M8[s]"),
            "object": x.astype(object),
            "masked": np.ma.array(x, mask=x > 0),
            "integers masked": np.ma.array(x.astype(int), mask=True),
            "none": None,
            "text": "text",
            "number": 1.5,
            "list": [x],
        }
        if self.how == "keys":
            return {"x": x, "first": x}
        return {"x": x} if self.how == "missing" else {"first": x, "x": values[self.how]}


def summed_image(sample: dict[str, Any]) -> dict[str, Any]:
    """Return values of an image of any size."""
    return {"image": sample["image"][:4, :4].copy(), "sum": int(sample["image"].sum()), "label": sample["label"]}


def mean_of_region(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return the mean of each column of an array in place."""
    return {name: np.nanmean(value) + rng.random() for name, value in sample.items()}


def process_id(*_: Any) -> int:
    return os.getpid()


def imported(name: str) -> bool:
    """Whether this process has imported a module."""
    return name in sys.modules


def packages() -> list[str]:
    """What this process has imported besides the standard library."""
    return sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def workers_of(pid: int) -> list[int]:
    """The workers of a process, the oldest first."""
    return sorted(worker for server in servers_of(pid) for worker in servers_of(server))


def servers_of(pid: int) -> list[int]:
    """The processes of the engine that a process has started: one that forks workers, which start none."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            for child in (task / "children").read_text().split():
                if b"streamloader.engine.workers" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def kill_connected() -> None:
    """Kill the worker with the most connections, each of which is a thread of it: without one, nobody misses it yet."""
    os.kill(max(workers_of(os.getpid()), key=lambda pid: len(os.listdir(f"/proc/{pid}/task"))), signal.SIGKILL)  # noqa: PTH208


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_itself() -> None:
    os._exit(3)


def random_numbers() -> tuple[float, float]:
    return random.random(), float(np.random.random())


class KilledOnce:
    """A transform whose process is killed on one sample, the first time, if there are workers."""

    def __init__(self, folder: str, workers: int) -> None:
        self.folder, self.workers = folder, workers

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        mark = Path(self.folder) / "killed"
        if self.workers and sample["label"] == 57 - 2**40 and not mark.exists():
            mark.touch()
            kill_itself()
        return {"x": sample["x"] + 1, "name": sample["name"]}


def stuck(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(1000)
    return sample


class Waiting:
    """A transform that sends SIGUSR1 to a process, and does not return."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        os.kill(self.pid, signal.SIGUSR1)
        return stuck(sample)


class Counting:
    """A transform that changes a large array of its own: every worker has another one."""

    def __init__(self) -> None:
        self.calls = np.zeros(100_000, np.int64)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        return {"label": sample["label"], "process": os.getpid(), "calls": self.calls[-1]}
