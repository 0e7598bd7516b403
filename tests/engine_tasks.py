"""Tasks that fail as a test asks, and a program that runs them on an engine: `engine_tasks.py ENGINE FOLDER JSON`.

A module of its own, since the workers of clusters import it.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import streamloader as sl
from streamloader.conversion.executors import open_executor, parse_engine, run_tasks
from streamloader.conversion.shard_task import Outcome, Task
from streamloader.conversion.sources.base import OnBad
from streamloader.errors import SourceError
from streamloader.format.geometry import Geometry, choose_layouts
from streamloader.format.publish import Receipt
from streamloader.storage import open_store

ROWS = 4


@dataclass(frozen=True)
class Numbers:
    """A part that fails as `failure` says, and leaves a file in `folder` for each time that it is read."""

    folder: Path
    shard: int
    failure: str = ""

    def __call__(self, on_bad: OnBad) -> dict[str, Any]:
        times = len(list(self.folder.glob(f"{self.shard}-*")))
        (self.folder / f"{self.shard}-{times}-{os.getpid()}").touch()
        if self.failure == "always killed" or (self.failure == "killed once" and times == 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.failure == "bad":
            raise SourceError(f"row {self.shard} is bad", "remove it")
        if self.failure == "bug":
            raise KeyError("a bug of ours")
        if self.failure == "exits":
            sys.exit(3)
        if self.failure == "endless":
            time.sleep(1000)
        return {"x": np.arange(self.shard, self.shard + ROWS, dtype=np.int64), "name": [b"%d" % self.shard] * ROWS}


def geometry() -> Geometry:
    fields = {"x": sl.Field("tensor", "int64"), "name": sl.Field("bytes")}
    sizes = {"x": 8.0, "name": 2.0}
    return choose_layouts(fields, sizes, {"x": "none", "name": "none"}, 1000, sl.Layout(samples_per_shard=ROWS))


class Run:
    """Tasks on an engine: what is made, what is done, and what was begun."""

    def __init__(self, folder: Path, failures: dict[int, str] | None = None, count: int = 10, url: str = "") -> None:
        self.folder, self.failures, self.count = folder, failures or {}, count
        self.url = url or str(folder / "out")
        self.made = 0
        self.made_at_first = 0
        self.done: dict[int, Outcome] = {}
        (folder / "reads").mkdir(parents=True, exist_ok=True)

    def run(self, engine: str, workers: int = 0) -> "Run":
        with open_executor(parse_engine(engine), workers) as executor:
            run_tasks(executor, self.tasks(), self.note)
        return self

    def tasks(self) -> Iterator[Task]:
        for shard in range(self.count):
            self.made += 1
            part = Numbers(self.folder / "reads", shard, self.failures.get(shard, ""))
            yield Task(part, open_store(self.url), geometry(), shard, range(shard * ROWS, (shard + 1) * ROWS))

    def note(self, task: Task, outcome: Outcome) -> None:
        assert isinstance(outcome, Receipt) and task.shard == outcome.shard
        self.made_at_first = self.made_at_first or self.made
        self.done[task.shard] = outcome

    def reads(self, shard: int) -> int:
        """How often the shard's task was begun."""
        return len(list((self.folder / "reads").glob(f"{shard}-*")))

    def workers(self) -> set[int]:
        """The processes that began tasks."""
        return {int(path.name.split("-")[2]) for path in (self.folder / "reads").iterdir()}


if __name__ == "__main__":
    failures = {int(shard): failure for shard, failure in json.loads(sys.argv[3]).items()}
    Run(Path(sys.argv[2]), failures).run(sys.argv[1], workers=2)
