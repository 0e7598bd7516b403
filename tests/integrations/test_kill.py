"""Processes that are interrupted or killed: they end at once, and nothing of them stays behind."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import datasets
import pytest
from amounts import longer
from folder_server import folder_server
from servers import seaweedfs_server
from torchrun import command, environment

N = 600


@pytest.fixture(scope="module")
def folder(data: Any) -> Path:
    return Path(data(N, "x", "label", "name"))


BEGIN = """
import json, os, signal, sys, threading
from streamloader import RetryPolicy, StreamingDataset

patient = {"retry": RetryPolicy(response_seconds=6000)}  # what waits for a response waits for ever

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

    def read_line(self) -> Any:
        """The next line that the process prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def write(self, line: str) -> None:
        """Give the process a line to read."""
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

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
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return []
    return [each for child in children for each in (int(child), *descendants(int(child)))]


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def entries(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The lines of JSON of these files, without a last one that a kill has cut."""
    lines = (line for path in paths for line in path.read_text().splitlines(keepends=True))
    return (json.loads(line) for line in lines if line.endswith("\n"))


def assert_all_end(pids: Iterable[int], seconds: float = 300) -> None:
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
    """The segments of shared memory that carry the id of one of these processes in their names, as torch names them."""
    marks = [f"_{pid}_" for pid in pids]
    folder = Path("/dev/shm")
    return [path for path in folder.iterdir() if any(mark in path.name for mark in marks)] if folder.is_dir() else []


# "label" is loaded whole, before the first batch
WAITS = ["fields=['x']", "fields=['label']", "transform=stuck, num_workers=1"]


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("options", WAITS)
def test_ctrl_c_ends_a_process_that_waits(tmp_path, folder, options, inside):
    """`inside`: the signal interrupts no wait, as one that comes between the look for signals and the wait."""
    stalls = "transform" not in options
    with folder_server(folder) as server:
        server.behave = "stall" if stalls else ""
        child = Child(
            tmp_path,
            f"""
            def signal_itself():
                sys.stdin.readline()
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)

            threading.Thread(target=signal_itself, daemon=True).start()
            ds = StreamingDataset(url, batch_size=8, storage_options=patient, {options})
            say("opened")
            for batch in ds:
                say("batch")
            """,
            server.url,
        )
        assert child.read_line() == ["opened"]
        assert child.read_line() == ["stuck"] if not stalls else server.met.wait(300)
        if inside:
            child.write("now\n")
        else:
            child.process.send_signal(signal.SIGINT)
        status, error = child.end(300)
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in error


@pytest.mark.parametrize("behave", ["", "stall"])
def test_a_process_ends_with_its_main_thread_whatever_is_in_flight(tmp_path, folder, behave):
    with folder_server(folder) as server:
        server.behave, server.spare = behave, "/c/0"
        child = Child(
            tmp_path,
            """
            ds = StreamingDataset(url, batch_size=8, fields=["x"], shuffle=False, storage_options=patient)
            iterator = iter(ds)
            next(iterator)
            say("one batch")
            sys.stdin.read()
            """,
            server.url,
        )
        assert child.read_line() == ["one batch"]
        assert not behave or server.met.wait(300)
        status, error = child.end(300)
    assert (status, error) == (0, "")


def test_a_killed_process_leaves_no_transform_process_and_no_file(tmp_path, folder):
    child = Child(
        tmp_path,
        """
        ds = StreamingDataset(url, batch_size=8, transform=busy, num_workers=2)
        iterator = iter(ds)
        next(iterator)
        say("running")
        while True:
            for batch in ds:
                pass
        """,
        str(folder),
    )
    assert child.read_line() == ["running"]
    pids = [child.process.pid, *descendants(child.process.pid)]
    assert len(pids) >= 3
    child.process.kill()
    assert child.end(300)[0] == -signal.SIGKILL
    assert_all_end(pids)
    assert shared_memory(pids) == []
    assert list(child.temporary.iterdir()) == []


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short path: a socket's, in which torch's workers put theirs, ends at 107."""
    with tempfile.TemporaryDirectory(prefix="kill") as path:
        yield Path(path)


def test_a_killed_rank_ends_the_others_and_leaves_nothing(tmp_path, folder, temporary):
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
        run.communicate(timeout=300)
    finally:
        if run.poll() is None:
            kill_all([*descendants(run.pid), run.pid])
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


def test_a_killed_server_is_an_error_and_leaves_nothing(tmp_path):
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
        assert child.read_line() == ["running"]
        os.killpg(server.pid, signal.SIGKILL)
        child.write("go on\n")
    kind, shown = child.read_line()
    assert kind in ("EndpointError", "TransientError")
    assert "s3://" in shown
    status, error = child.end(300)
    assert (status, error) == (0, "")
    assert [*shared_memory([child.process.pid]), *child.temporary.iterdir()] == []


# --- a run that is killed with -9 at random moments, and goes on at random world sizes

SAMPLES = 1003
EPOCHS = 3
WORLDS = (1, 2, 3, 4)  # 3 does not divide the lanes
MOST_STEPS = 20  # of one rank there are 378

Place = tuple[int, int]


def killed(url: Path, folder: Path, attempt: int, ranks: int, steps: int | None) -> bool:
    """Start the run once more; kill all of it after so many steps, if it gets there. Return whether it ended."""
    script = [str(url), str(folder), str(EPOCHS), str(attempt)]
    with (
        (folder / f"stderr-{attempt}").open("w") as errors,
        subprocess.Popen(
            command(ranks, "integrations/killed_ranks.py", *script, log=folder / "logs"),
            env=environment() | {"PYTHONWARNINGS": "ignore", "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as run,
    ):
        assert run.stdout is not None
        lines = list(islice(run.stdout, steps))
        if steps is None or len(lines) < steps:
            assert run.wait(300) == 0, (folder / f"stderr-{attempt}").read_text()[-6000:]
            return True
        kill_all([run.pid, *descendants(run.pid)])
    return False


def taken(folder: Path, attempt: int) -> dict[Place, list[int]]:
    """The samples of each step of an attempt, over all ranks, by where the run stands after it."""
    found: dict[Place, list[int]] = {}
    for entry in entries(folder.glob(f"{attempt}-*.jsonl")):
        found.setdefault(tuple(entry["after"]), []).extend(entry["samples"])
    return found


@pytest.mark.parametrize("kills_wanted", [3, longer(12)])
def test_a_run_killed_again_and_again_sees_each_sample_once_in_each_epoch(kills_wanted, tmp_path):
    datasets.write(tmp_path / "data", SAMPLES, ["x"])
    draw = random.Random(0)
    kept: dict[Place, list[int]] = {}
    saved, kills = tmp_path / "state.json", 0
    for attempt in count():
        state = json.loads(saved.read_text()) if saved.exists() else {"epoch": 0, "position": 0}
        begin = state["epoch"], state["position"]
        kept = {place: samples for place, samples in kept.items() if place <= begin}  # later steps are run again
        ranks = draw.choice(WORLDS)
        steps = draw.randint(1, MOST_STEPS) if attempt < kills_wanted else None
        ended = killed(tmp_path / "data", tmp_path, attempt, ranks, steps)
        steps_taken = taken(tmp_path, attempt)
        assert all(place > begin for place in steps_taken)
        kept |= steps_taken
        kills += not ended
        if ended:
            break
    assert kills >= 2  # on a busy machine a run may end before its kill
    seen: dict[int, list[int]] = {}
    for (epoch, position), samples in kept.items():
        seen.setdefault(epoch if position else epoch - 1, []).extend(samples)
    assert set(seen) == set(range(EPOCHS))
    for samples in seen.values():
        assert sorted(samples) == list(range(SAMPLES))
