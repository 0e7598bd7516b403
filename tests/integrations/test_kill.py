"""Processes that are interrupted or killed: they end at once, and nothing of them stays behind."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import datasets
import pytest
from folder_server import folder_server
from promises import LOST, RELOADED, REPLACED, RESTARTED, promise, record
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

def working(sample):
    sum(range(20_000))
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


@pytest.mark.quick(1)
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


@pytest.mark.quick(1)
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


@pytest.mark.long
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


def killed(url: Path, folder: Path, attempt: int, ranks: int, steps: int | None) -> tuple[bool, float, float]:
    """Start the run once more; kill all of it after so many steps, if it gets there.

    Return whether it ended, when all ranks had their first batch, and when the run was killed.
    """
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
        times = [time.monotonic() for _ in islice(run.stdout, steps)]
        if ended := steps is None or len(times) < steps:
            assert run.wait(300) == 0, (folder / f"stderr-{attempt}").read_text()[-6000:]
        kill_all([] if ended else [run.pid, *descendants(run.pid)])
        end = time.monotonic()
    return ended, times[0] if times else end, end


def taken(folder: Path, attempt: int) -> dict[Place, list[int]]:
    """The samples of each step of an attempt, over all ranks, by where the run stands after it."""
    found: dict[Place, list[int]] = {}
    for entry in entries(folder.glob(f"{attempt}-*.jsonl")):
        found.setdefault(tuple(entry["after"]), []).extend(entry["samples"])
    return found


@pytest.mark.long
@pytest.mark.parametrize("kills_wanted", [3, 12])
def test_a_run_killed_again_and_again_sees_each_sample_once_in_each_epoch(kills_wanted, tmp_path):
    datasets.write(tmp_path / "data", SAMPLES, ["x"])
    draw = random.Random(0)
    kept: dict[Place, list[int]] = {}
    saved, kills, end = tmp_path / "state.json", 0, 0.0
    restarted: list[float] = []
    for attempt in count():
        state = json.loads(saved.read_text()) if saved.exists() else {"epoch": 0, "position": 0}
        begin = state["epoch"], state["position"]
        kept = {place: samples for place, samples in kept.items() if place <= begin}  # later steps are run again
        ranks = draw.choice(WORLDS)
        steps = draw.randint(1, MOST_STEPS) if attempt < kills_wanted else None
        before = end
        ended, first, end = killed(tmp_path / "data", tmp_path, attempt, ranks, steps)
        restarted += [round(first - before, 2)] if attempt else []
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
    wrong = sum(abs(samples.count(sample) - 1) for samples in seen.values() for sample in range(SAMPLES))
    wrong += sum(len(set(samples) - set(range(SAMPLES))) for samples in seen.values())
    record(kills=kills, wrong=wrong, restarted=restarted)
    assert wrong == promise(LOST) == 0
    if kills_wanted > 3:  # else other tests run beside this one, and at most 4 ranks start on their cores
        assert max(restarted) <= promise(RESTARTED)


WORKERS_KILLED = 2  # a third one within a minute would be an error


@pytest.mark.long
@pytest.mark.parametrize("rounds", [1, 6])
def test_a_killed_worker_costs_no_sample_and_its_step_does_not_wait_long(rounds, tmp_path, folder):
    replaced: list[float] = []
    for number in range(rounds):
        (tmp_path / f"{number}").mkdir()
        child = Child(
            tmp_path / f"{number}",
            f"""
            import warnings
            from conversions import wait_for
            from datasets import numbers
            from worker_tasks import kill_connected, run_workers

            warnings.simplefilter("ignore")  # it says that a worker was killed
            run_workers(2)
            waits = []
            options = {{"fields": ["x", "label"], "transform": working, "with_index": True, "num_workers": 2}}
            options["on_batch"] = lambda report: waits.append(report.wait_seconds)
            ds = StreamingDataset(url, batch_size=4, **options)
            for epoch in range(1 + {WORKERS_KILLED}):  # in the first one they import what the transform needs
                seen = []
                waits.clear()
                for step, batch in enumerate(ds):
                    assert batch["label"].tolist() == [i - 2**40 for i in numbers(batch)]
                    seen += numbers(batch)
                    if epoch and step == {3 + 7 * number}:
                        kill_connected()
                        waits.clear()
                wait_for(lambda: ds.stats().workers_replaced >= epoch)  # another worker may have done the work
                say(max(waits), seen)
            """,
            str(folder),
        )
        for epoch in range(1 + WORKERS_KILLED):
            longest, seen = child.read_line()
            assert sorted(seen) == list(range(N))
            replaced += [round(longest, 3)] if epoch else []
        assert child.end(300) == (0, "")
    record(kills=len(replaced), wrong=0, replaced=replaced)
    assert rounds == 1 or max(replaced) <= promise(REPLACED)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_run_goes_on_after_the_kill_of_a_worker_of_a_dataloader(rounds, folder):
    """torch ends the loop with an error; the run counts its batches, and begins the next loop after them."""
    reloaded: list[float] = []
    for number in range(rounds):
        # of a short name, which the addresses of multiprocessing's sockets have within 108 bytes
        with tempfile.TemporaryDirectory() as temporary:
            child = Child(
                Path(temporary),
                f"""
                import multiprocessing, time, warnings
                from datasets import numbers
                from torch.utils.data import DataLoader

                warnings.simplefilter("ignore")  # batches differ with DataLoader workers
                multiprocessing.set_forkserver_preload(["streamloader.pytorch.dataset"])
                ds = StreamingDataset(url, batch_size=8, fields=["label"], with_index=True)
                seen, waited, killed_at = [], [], 0.0
                for stop in ({2 + 3 * number}, 9, -1):
                    before = len(seen)
                    batches = iter(DataLoader(ds, batch_size=None, num_workers=2, multiprocessing_context="forkserver"))
                    try:
                        for batch in batches:
                            assert batch["label"][batch["valid"]].tolist() == [i - 2**40 for i in numbers(batch)]
                            seen.append(numbers(batch))
                            if len(seen) == before + 1 and killed_at:
                                waited.append(time.monotonic() - killed_at)
                            if len(seen) == before + stop:
                                killed_at = time.monotonic()
                                os.kill(batches._workers[0].pid, signal.SIGKILL)
                    except (RuntimeError, OSError, EOFError):  # its worker has ended, maybe while it handed on a tensor
                        assert len(seen) == before + stop or killed_at
                        ds.load_state_dict(ds.state_dict(batches=len(seen) - before, workers=2))
                say(waited, seen)
                """,
                str(folder),
            )
            waited, seen = child.read_line()
            assert child.end(300)[0] == 0  # its workers warn that batches differ with their number
            assert sorted(sample for batch in seen for sample in batch) == list(range(N))
            assert len(waited) == 2
            reloaded += [round(seconds, 2) for seconds in waited]
    record(kills=len(reloaded), wrong=0, reloaded=reloaded)
    assert rounds == 1 or max(reloaded) <= promise(RELOADED)
