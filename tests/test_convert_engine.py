"""The local engine: tasks in processes that may be killed at any moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamloader.conversion.engines.local import ATTEMPTS, run_tasks, starting
from streamloader.conversion.sources.base import Refuse
from streamloader.conversion.task import Task
from streamloader.errors import EngineError, SourceError
from streamloader.format.geometry import Geometry, choose_layouts
from streamloader.format.manifest import Field
from streamloader.format.sink import Receipt
from streamloader.options import Layout
from streamloader.storage import open_store

ROWS = 4


@dataclass(frozen=True)
class Numbers:
    """A part that does as `manner` says, leaving a file in `folder` for each time that it is read."""

    folder: Path
    shard: int
    manner: str = ""

    def read(self, refuse: Refuse) -> dict[str, Any]:
        times = len(list(self.folder.glob(f"{self.shard}-*")))
        (self.folder / f"{self.shard}-{times}-{os.getpid()}").touch()
        if self.manner == "always killed" or (self.manner == "killed once" and times == 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.manner == "bad":
            raise SourceError(f"row {self.shard} is bad", "remove it")
        if self.manner == "bug":
            raise KeyError("a bug of ours")
        if self.manner == "endless":
            time.sleep(1000)
        return {"x": np.full(ROWS, self.shard, np.int64)}


def geometry() -> Geometry:
    return choose_layouts(
        {"x": Field("tensor", "int64")}, {"x": 8.0}, {"x": "none"}, 1000, Layout(samples_per_shard=ROWS)
    )


def run(tmp_path: Path, manners: dict[int, str], count: int = 10, workers: int = 2) -> dict[int, Receipt]:
    reads = tmp_path / "reads"
    reads.mkdir()
    done: dict[int, Receipt] = {}

    def tasks() -> Iterator[Task]:
        for shard in range(count):
            part = Numbers(reads, shard, manners.get(shard, ""))
            yield Task(part, open_store(tmp_path / "out"), geometry(), shard, range(64))

    def note(task: Task, receipt: Receipt) -> None:
        assert task.shard == receipt.shard
        done[task.shard] = receipt

    try:
        run_tasks(tasks(), workers, note)
    finally:
        processes = {int(path.name.split("-")[2]) for path in reads.iterdir()} - {os.getpid()}
        assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()], "a worker is left"
    return done


def reads_of(tmp_path: Path, shard: int) -> int:
    return len(list((tmp_path / "reads").glob(f"{shard}-*")))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_task_is_done_once(workers: int, tmp_path: Path) -> None:
    done = run(tmp_path, {}, count=100, workers=workers)
    assert sorted(done) == list(range(100))
    assert all(receipt.num_samples == ROWS for receipt in done.values())
    assert len(list((tmp_path / "reads").iterdir())) == 100


def test_a_task_whose_worker_is_killed_is_done_again(tmp_path: Path) -> None:
    done = run(tmp_path, {0: "killed once", 3: "killed once", 9: "killed once"})
    assert sorted(done) == list(range(10))
    assert [reads_of(tmp_path, shard) for shard in (0, 1, 3, 9)] == [2, 1, 2, 2]


def test_a_task_that_always_kills_its_worker_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"shard 3 of .*out was ended by SIGKILL, 3 times in all.*fewer workers"):
        run(tmp_path, {3: "always killed"})
    assert reads_of(tmp_path, 3) == ATTEMPTS


def test_the_failure_of_the_earliest_task_is_raised_and_others_under_way_are_kept(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="row 2 is bad; remove it"):
        run(tmp_path, {2: "bad", 3: "bad"})
    assert [reads_of(tmp_path, shard) for shard in (0, 1, 2)] == [1, 1, 1]
    assert reads_of(tmp_path, 9) == 0, "tasks were begun after a failure"
    kept = {path.name for path in (tmp_path / "out" / "_streamloader" / "receipts").iterdir()}
    assert {"0.json", "1.json"} <= kept


def test_a_bug_in_a_worker_is_an_engine_error_with_its_traceback_on_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineError, match="failed with status 1"):
        run(tmp_path, {1: "bug"})
    assert "KeyError: 'a bug of ours'" in capfd.readouterr().err


def test_workers_end_with_a_failure_of_the_caller(tmp_path: Path) -> None:
    reads = tmp_path / "reads"
    reads.mkdir()

    def note(task: Task, receipt: Receipt) -> None:
        raise KeyboardInterrupt

    tasks = (
        Task(
            Numbers(reads, shard, "endless" if shard else ""),
            open_store(tmp_path / "out"),
            geometry(),
            shard,
            range(64),
        )
        for shard in range(4)
    )
    with pytest.raises(KeyboardInterrupt):
        run_tasks(tasks, 2, note)
    processes = {int(path.name.split("-")[2]) for path in reads.iterdir()}
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]


@dataclass(frozen=True)
class Meeting:
    """A task: the write of the first and the reading of the second wait for each other, at a pipe."""

    folder: Path
    number: int

    def prepare(self) -> Callable[[], int]:
        if self.number == 1:
            (self.folder / "pipe").write_text("read")
        return self._write

    def _write(self) -> int:
        if self.number == 0:
            assert (self.folder / "pipe").read_text() == "read"
        return self.number


def test_a_shard_is_read_while_the_one_before_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done: list[Any] = []
    tasks: Any = iter([Meeting(tmp_path, 0), Meeting(tmp_path, 1)])
    run_tasks(tasks, 1, lambda _, outcome: done.append(outcome))
    assert done == [0, 1]


def test_processes_that_were_begun_before_are_taken_and_the_others_end(tmp_path: Path) -> None:
    (tmp_path / "reads").mkdir()
    with starting(3) as spare:
        begun = {worker.pid for worker in spare}
        tasks = [
            Task(Numbers(tmp_path / "reads", i), open_store(tmp_path / "out"), geometry(), i, range(64)) for i in (0, 1)
        ]
        run_tasks(iter(tasks), 2, lambda *_: None, spare)
        assert len(spare) == 1
    assert {int(path.name.split("-")[2]) for path in (tmp_path / "reads").iterdir()} <= begun
    assert not [pid for pid in begun if Path(f"/proc/{pid}").exists()]
