"""The local engine: tasks in processes that may be killed at any moment."""

import os
import traceback
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from pathlib import Path

import pytest
from engine_tasks import ROWS, Run
from leaks import uncollected

from streamloader.conversion.executors import ATTEMPTS, Executor, WorkerPool, open_local, run_tasks, send
from streamloader.errors import EngineError, SourceError
from streamloader.format.publish import Receipt


@pytest.fixture
def local(tmp_path):
    """Runs tasks with two workers, which are gone afterwards."""

    def run(failures, count=10, workers=2, kind=Run):
        tasks = kind(tmp_path, failures, count)
        try:
            return tasks.run("local", workers)
        finally:
            processes = tasks.workers() - {os.getpid()}
            assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()], "a worker is left"

    return run


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_task_runs_once(workers, local):
    run = local({}, count=100, workers=workers)
    assert sorted(run.done) == list(range(100))
    assert all(isinstance(one, Receipt) and one.num_samples == ROWS for one in run.done.values())
    assert all(run.reads(shard) == 1 for shard in range(100))


def test_a_task_whose_worker_is_killed_is_retried(local):
    run = local({0: "killed once", 9: "killed once"})
    assert sorted(run.done) == list(range(10))
    assert (run.reads(0), run.reads(9)) == (2, 2)


def test_a_task_that_always_kills_its_worker_fails(local, tmp_path):
    with pytest.raises(EngineError, match=r"shard 3 of .*out was ended by SIGKILL, 3 times in all.*fewer workers"):
        local({3: "always killed"})
    assert Run(tmp_path).reads(3) == ATTEMPTS


def test_a_task_that_ends_its_worker_fails(local, tmp_path):
    with pytest.raises(EngineError, match=r"shard 3 of .*out failed with status 3, 3 times in all"):
        local({3: "exits"})
    assert Run(tmp_path).reads(3) == ATTEMPTS


def test_the_failure_of_the_earliest_task_is_raised_and_finished_ones_are_kept(local, tmp_path):
    with pytest.raises(SourceError, match="row 2 is bad; remove it"):  # whichever of the bad ones ends first
        local(dict.fromkeys(range(2, 10), "bad"))
    assert [Run(tmp_path).reads(shard) for shard in (0, 1, 2)] == [1, 1, 1]
    assert Run(tmp_path).reads(9) == 0, "tasks were begun after a failure"
    kept = {path.name for path in (tmp_path / "out" / "_streamloader" / "receipts").iterdir()}
    assert {"0.json", "1.json"} <= kept


def test_the_failure_of_a_task_is_freed_without_garbage_collection(tmp_path):
    class BadRow(SourceError, code="SL501"):
        """One that a weak reference can watch."""

    kept = []

    def submit(task):
        future = Future()
        future.set_result(BadRow(f"row {task.shard} is bad"))
        kept.append(weakref.ref(future.result()))
        return future

    with uncollected():
        with pytest.raises(SourceError, match="row 0 is bad"):
            run_tasks(Executor("a fake", submit, lambda: 1), Run(tmp_path, count=1).tasks(), print)
        assert [error() for error in kept] == [None]


def test_a_bug_in_a_worker_is_an_engine_error_with_its_traceback(local):
    message = r"shard 1 of .*KeyError: 'a bug of ours' \(at .*in __call__.*report it"
    with pytest.raises(EngineError, match=message) as caught:
        local({1: "bug"})
    assert any("Traceback" in note and "a bug of ours" in note for note in caught.value.__notes__)


class Interrupted(Run):
    """Ctrl-C comes when the first task ends."""

    def note(self, task, outcome):
        raise KeyboardInterrupt


def test_workers_end_with_a_failure_of_the_caller(local):
    with pytest.raises(KeyboardInterrupt):
        local(dict.fromkeys((1, 2, 3), "endless"), count=4, kind=Interrupted)


@dataclass(frozen=True)
class Meeting:
    """A task: the write of the first and the reading of the second wait for each other, at a pipe."""

    folder: Path
    number: int

    def prepare(self):
        if self.number == 1:
            (self.folder / "pipe").write_text("read")
        return self._write

    def _write(self):
        if self.number == 0:
            assert (self.folder / "pipe").read_text() == "read"
        return self.number


def test_a_shard_is_read_while_the_one_before_is_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    done = []
    tasks = iter([Meeting(tmp_path, 0), Meeting(tmp_path, 1)])
    with open_local(1) as executor:
        run_tasks(executor, tasks, lambda _, outcome: done.append(outcome))
    assert done == [0, 1]


def test_processes_start_with_the_executor_and_end_with_it(tmp_path):
    run = Run(tmp_path, count=2)
    with open_local(3) as executor:
        pool = executor.wait.__self__
        assert isinstance(pool, WorkerPool)
        begun = {worker.process.pid for worker in pool.workers}
        assert len(begun) == 3
        run_tasks(executor, run.tasks(), run.note)
    assert run.workers() <= begun
    assert not [pid for pid in begun if Path(f"/proc/{pid}").exists()]


@pytest.mark.python
def test_ctrl_c_while_a_task_is_sent_leaves_no_view_of_a_buffer_that_is_closed_later(monkeypatch):
    """Python 3.13 would print the `BufferError` of closing it after the message that tells how to resume."""

    def interrupt(*_):
        raise KeyboardInterrupt

    ours, theirs = Pipe()
    monkeypatch.setattr(connection.Connection, "_send", interrupt)
    with ours, theirs, pytest.raises(KeyboardInterrupt) as caught:
        send(ours, "task")
    values = [value for frame, _ in traceback.walk_tb(caught.tb) for value in frame.f_locals.values()]
    views = [value for value in values if isinstance(value, memoryview)]
    assert {type(view.obj) for view in views} == {bytes}
