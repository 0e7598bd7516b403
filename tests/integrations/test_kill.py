"""Processes that are interrupted or killed: they end at once, and nothing of them stays behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import datasets
import pytest
from folder_server import folder_server
from servers import seaweedfs_server
from torchrun import command, environment

N = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kill") / "data"
    datasets.write(path, N, ["x", "label", "name"])
    return path


BEGIN = """
import json, os, signal, sys, threading
from streamloader.torch_dataset import StreamingDataset

def busy(sample):
    return {"label": sample["label"]}

def stuck(sample):
    say("stuck")
    threading.Event().wait()

def say(*what):
    print(json.dumps(what), flush=True)

if __name__ == "__main__":
    url = sys.argv[1]
"""


class Child:
    """A Python process that runs a script; every line that it prints is JSON."""

    def __init__(self, tmp_path: Path, code: str, *arguments: str) -> None:
        script = tmp_path / "script.py"
        script.write_text(BEGIN + indent(dedent(code), "    "))
        self.temporary = tmp_path / "temporary"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**environment(), "TMPDIR": str(self.temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def heard(self) -> Any:
        """The next line that the process prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def end(self, seconds: float) -> tuple[int, str]:
        """(exit status, standard error) of a process that ends within these seconds."""
        try:
            _, error = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode, error


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in children for each in (int(child), *descendants(int(child)))]


def assert_all_end(pids: Iterable[int], seconds: float = 20) -> None:
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([handle], [], [], seconds)[0], f"process {pid} is still there"
        finally:
            os.close(handle)


def shared_memory(pids: Iterable[int]) -> list[Path]:
    """What is left in shared memory of these processes, or of the project."""
    marks = ["streamloader", *(f"_{pid}_" for pid in pids)]
    folder = Path("/dev/shm")
    return [path for path in folder.iterdir() if any(mark in path.name for mark in marks)] if folder.is_dir() else []


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("fields", ["x", "label"])
def test_ctrl_c_ends_a_process_that_waits_for_a_stalled_server(tmp_path: Path, folder: Path, fields: str) -> None:
    with folder_server(folder) as server:
        server.behave = "stall"  # "label" is loaded whole, before the first batch
        child = Child(
            tmp_path,
            f"""
            ds = StreamingDataset(url, batch_size=8, fields=["{fields}"])
            say("opened")
            for batch in ds:
                say("batch")
            """,
            server.url,
        )
        assert child.heard() == ["opened"]
        assert server.met.wait(60)
        begin = time.monotonic()
        child.process.send_signal(signal.SIGINT)
        status, error = child.end(20)
        assert time.monotonic() - begin < 5
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in error


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("wish", ["fields=['x']", "fields=['label']", "transform=stuck, transform_workers=1"])
def test_a_signal_that_interrupts_no_wait_is_heard_all_the_same(tmp_path: Path, folder: Path, wish: str) -> None:
    # as one does that comes between the interpreter's look for signals and its wait
    stalls = "transform" not in wish
    with folder_server(folder) as server:
        server.behave = "stall" if stalls else ""
        child = Child(
            tmp_path,
            f"""
            def signal_itself():
                sys.stdin.readline()
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)

            threading.Thread(target=signal_itself, daemon=True).start()
            ds = StreamingDataset(url, batch_size=8, {wish})
            say("opened")
            for batch in ds:
                say("batch")
            """,
            server.url,
        )
        assert child.heard() == ["opened"]
        assert child.heard() == ["stuck"] if not stalls else server.met.wait(60)
        begin = time.monotonic()
        assert child.process.stdin is not None
        child.process.stdin.write("now\n")
        child.process.stdin.flush()
        status, error = child.end(20)
        assert time.monotonic() - begin < 5
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in error


@pytest.mark.parametrize("behave", ["", "stall"])
def test_a_process_ends_with_its_main_thread_whatever_is_in_flight(tmp_path: Path, folder: Path, behave: str) -> None:
    with folder_server(folder) as server:
        server.behave, server.spare = behave, "/c/0"
        child = Child(
            tmp_path,
            """
            ds = StreamingDataset(url, batch_size=8, fields=["x"], shuffle=False)
            iterator = iter(ds)
            next(iterator)
            say("one batch")
            sys.stdin.read()
            """,
            server.url,
        )
        assert child.heard() == ["one batch"]
        assert not behave or server.met.wait(60)
        status, error = child.end(20)
    assert (status, error) == (0, "")


def test_a_killed_process_leaves_no_transform_process_and_no_file(tmp_path: Path, folder: Path) -> None:
    child = Child(
        tmp_path,
        """
        ds = StreamingDataset(url, batch_size=8, transform=busy, transform_workers=2)
        iterator = iter(ds)
        next(iterator)
        say("running")
        while True:
            for batch in ds:
                pass
        """,
        str(folder),
    )
    assert child.heard() == ["running"]
    pids = [child.process.pid, *descendants(child.process.pid)]
    assert len(pids) >= 3
    child.process.kill()
    assert child.end(20)[0] == -signal.SIGKILL
    assert_all_end(pids)
    assert shared_memory(pids) == []
    assert list(child.temporary.iterdir()) == []


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short path: a socket's, in which torch's workers put theirs, ends at 107."""
    with tempfile.TemporaryDirectory(prefix="kill") as path:
        yield Path(path)


def test_a_killed_rank_ends_the_others_and_leaves_nothing(tmp_path: Path, folder: Path, temporary: Path) -> None:
    case = {"name": "forever", "workers": 2, "context": "fork", "forever": True}
    (tmp_path / "job.json").write_text(json.dumps({"url": str(folder), "options": None, "cases": [case]}))
    run = subprocess.Popen(
        command(2, "ranks.py", str(tmp_path / "job.json"), log=tmp_path / "logs"),
        env={**environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    try:
        ranks = [int(run.stdout.readline()) for _ in range(2)]
        pids = [run.pid, *descendants(run.pid)]
        assert len(pids) >= 7  # torchrun, two ranks, four workers
        os.kill(ranks[1], signal.SIGKILL)
        run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            for pid in [*descendants(run.pid), run.pid]:
                os.kill(pid, signal.SIGKILL)
            run.communicate()
    assert run.returncode != 0
    assert_all_end(pids)
    left = shared_memory(pids)
    for path in left:
        path.unlink()
    # torch's worker opens a segment, fills it with zeros, and takes its name away (MapAllocator.cpp); one that is ended
    # between these calls leaves the segment it was at, whatever the dataset
    owners = [path.name.removeprefix("torch_").split("_")[0] for path in left]
    assert set(owners) <= {str(pid) for pid in pids} and len(set(owners)) == len(owners)
    # the sockets over which torch's workers hand on file descriptors, whatever the dataset
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("pymp-")] == []


def test_a_killed_server_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with seaweedfs_server() as server:
        url = server.url("kill")
        datasets.write(url, N, ["x", "label", "name"], options=server.storage_options)
        child = Child(
            tmp_path,
            """
            options = json.loads(sys.argv[2]) | {"retry": {"outage_seconds": 1.0, "probe_seconds": 0.1}}
            ds = StreamingDataset(url, batch_size=8, storage_options=options)
            iterator = iter(ds)
            next(iterator)
            say("running")
            sys.stdin.readline()
            try:
                while True:
                    for batch in ds:
                        pass
            except BaseException as error:
                say(type(error).__name__, str(error))
            """,
            url,
            json.dumps(server.storage_options),
        )
        assert child.heard() == ["running"]
        os.killpg(server.pid, signal.SIGKILL)
        assert child.process.stdin is not None
        child.process.stdin.write("go on\n")
        child.process.stdin.flush()
    kind, shown = child.heard()
    assert kind in ("EndpointError", "TransientError")
    assert "s3://" in shown
    status, error = child.end(20)
    assert (status, error) == (0, "")
    assert shared_memory([child.process.pid]) == []
    assert list(child.temporary.iterdir()) == []
