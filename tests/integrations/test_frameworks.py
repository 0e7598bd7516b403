"""Training frameworks, as docs/frameworks.md uses them: a run that is stopped or killed loses and repeats no sample."""

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from amounts import covering, longer
from test_kill import descendants, entries
from torch.utils.data import DataLoader
from torchrun import TESTS, environment, run_python, stopping_at

import streamloader as sl
from streamloader.cli.main import main as streamloader
from streamloader.demo.run import write_photographs

EXAMPLES = TESTS.parent / "examples"
EPOCHS = 3
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch", "--gloo"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of 164 photographs to train on, and 18 more."""
    folder = tmp_path_factory.mktemp("frameworks")
    write_photographs(folder / "photos")
    with pytest.raises(SystemExit) as ended:
        streamloader(["convert", str(folder / "photos"), str(folder / "data"), "--split", "train=0.9,val=0.1"])
    assert not ended.value.code
    return str(folder / "data")


class Runs:
    """The runs of one example in one folder: each goes on from the checkpoints of the one before."""

    def __init__(self, framework: str, url: str, folder: Path, temporary: str = "") -> None:
        self.folder, self._temporary = folder, temporary or str(folder)
        self._framework, self._url = framework, url
        self._count = 0

    def start(self, ranks: int, *more: str, until: str = "") -> subprocess.Popen[str]:
        """Start a run with so many ranks, which gets no further than a line, if one is given."""
        self._count += 1
        log = self.folder / f"log-{self._count}"
        options = ["--checkpoints", str(self.folder / "checkpoints"), "--step-log", str(log), "--epochs", str(EPOCHS)]
        script = str(EXAMPLES / f"{self._framework}_train.py")
        given = stopping_at(self.folder / "stop", until) if until else environment()
        given |= {"HOME": str(self.folder), "PYTHONPATH": os.pathsep.join([str(EXAMPLES), given["PYTHONPATH"]])}
        launchers = {
            "ray": [sys.executable, script, f"--ranks={ranks}"],
            "horovod": [*HOROVODRUN, "-np", str(ranks), sys.executable, script],
        }
        torchrun = [sys.executable, *TORCHRUN, f"--nproc-per-node={ranks}", script]
        with (self.folder / f"stderr-{self._count}").open("w") as errors:
            return subprocess.Popen(
                [*launchers.get(self._framework, torchrun), self._url, *options, *more],
                env=given | {"PYTHONWARNINGS": "default", "TMPDIR": self._temporary},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=self.folder,
            )

    def run(self, ranks: int, *more: str) -> str:
        """Run to the end, and return what was printed."""
        with self.start(ranks, *more) as process:
            output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, (self.folder / f"stderr-{self._count}").read_text()[-6000:]
        return output

    def logged(self, number: int) -> dict[int, list[int]]:
        """Return the sample numbers of each step of a run, over all ranks; of steps that every rank has logged."""
        found: dict[int, list[int]] = {}
        for entry in entries(sorted((self.folder / f"log-{number}").glob("*.jsonl"))):
            found.setdefault(entry["step"], []).extend(entry["index"])
        return found


def assert_exactly_once(runs: list[dict[int, list[int]]], url: str) -> None:
    """Each step counts in the last run that took it; together they are every sample once in each epoch."""
    last: dict[int, list[int]] = {}
    for run in runs:
        if run:
            last = {step: index for step, index in last.items() if step < min(run)} | run
    count = Counter(number for index in last.values() for number in index)
    assert set(count) == set(range(len(sl.open(url, split="train"))))
    assert set(count.values()) == {EPOCHS}


ON_DEVICE = ("--device", "cpu")  # batches are copied ahead, by the steps of a GPU


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "more"),
    [
        ("lightning", ()),
        ("lightning", ON_DEVICE),
        ("accelerate", ()),
        ("accelerate", ON_DEVICE),
        ("transformers", ()),
        ("transformers", ON_DEVICE),
    ],
)
def test_a_run_that_ends_between_checkpoints_goes_on_at_another_world_size(framework, more, url, tmp_path):
    check_run_that_ends(Runs(framework, url, tmp_path), url, *more)


@pytest.mark.long
def test_a_run_of_ray_train_goes_on_at_another_world_size(url, tmp_path):
    with tempfile.TemporaryDirectory(
        prefix="sl-", ignore_cleanup_errors=True
    ) as short:  # Ray's sockets need a short path
        runs = Runs("ray", os.path.relpath(url, tmp_path), tmp_path, temporary=short)  # ranks run in another folder
        check_run_that_ends(runs, url)


@pytest.mark.long
@pytest.mark.skipif(find_spec("horovod") is None, reason="make test-horovod builds it")
def test_a_run_of_horovod_goes_on_at_another_world_size(url, tmp_path):
    check_run_that_ends(Runs("horovod", url, tmp_path), url)
    saved = torch.load(tmp_path / "checkpoints" / "saved.pt", weights_only=True)
    steps = {int(state["step"]) for state in saved["optimizer"]["state"].values()}
    assert steps == {saved["step"]}, "the optimizer's state is that of the optimizer that took the steps"


def check_run_that_ends(runs: Runs, url: str, *more: str) -> None:
    """Stop a run of two ranks between two checkpoints, and go on with one rank to the end."""
    assert "end at step 9, epoch 1" in runs.run(2, "--steps", "9", *more)
    assert f"epoch {EPOCHS}" in runs.run(1, *more)
    first, second = runs.logged(1), runs.logged(2)
    assert set(first) == set(range(1, 10))
    assert min(second) in (9, 10)  # a framework may save once more when it ends
    assert_exactly_once([first, second], url)
    again = {step: sorted(index) for step, index in first.items() if step in second}
    assert again == {step: sorted(second[step]) for step in again}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("framework", "more"),
    [
        ("accelerate", ()),
        ("transformers", ()),
        ("transformers", ON_DEVICE),
        longer("lightning", ()),
        longer("lightning", ON_DEVICE),
    ],
)
def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(framework, more, url, tmp_path):
    runs = Runs(framework, url, tmp_path)
    with runs.start(2, *more, until="step 14") as process:  # of 18: a run that has ended is not resumed
        assert process.stdout is not None
        assert "step 8\n" in process.stdout, (tmp_path / "stderr-1").read_text()[-6000:]  # reads up to it
        for pid in [process.pid, *descendants(process.pid)]:
            os.kill(pid, signal.SIGKILL)
    assert f"epoch {EPOCHS}" in runs.run(2, *more)
    second = runs.logged(2)
    assert min(second) > 1
    assert_exactly_once([runs.logged(1), second], url)


@pytest.mark.long
def test_ranks_that_share_no_folder_go_on_from_the_checkpoint_of_rank_0(url, tmp_path):
    def train(folder: str, steps: int) -> str:
        work = tmp_path / folder
        work.mkdir(exist_ok=True)
        script = f'mkdir -p "$RANK" && cd "$RANK" && exec "{sys.executable}" "{EXAMPLES}/ddp_train.py" "$@"'
        arguments = [*TORCHRUN, "--nproc-per-node=2", "--no-python", "bash", "-c", script, "", url, "--steps", steps]
        return run_python(*arguments, cwd=work).stdout.split(";")[0]

    assert "begin at step 0, epoch 0, world size 2" in train("nodes", 4)
    assert (tmp_path / "nodes/0/checkpoint.pt").exists()
    assert not (tmp_path / "nodes/1/checkpoint.pt").exists()
    begun, ended = train("nodes", 8).splitlines()
    assert begun == "begin at step 4, epoch 0, world size 2"
    assert ended == train("whole", 8).splitlines()[-1]


@pytest.mark.parametrize(
    ("dispatch", "workers", "batch_size"), covering([True, False], ["", "fork", "spawn"], [16, None])
)
def test_accelerate_that_would_split_a_part_of_the_ranks_is_refused(url, batch_size, workers, dispatch):
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": workers} if workers else {}

    def prepared(world: tuple[int, int]) -> DataLoader[Any]:
        ds = sl.StreamingDataset(url, split="train", batch_size=batch_size, fields=["label"], world=world)
        loader = DataLoader(ds, batch_size=None if batch_size else 16, **options)
        if dispatch:  # as `accelerator.prepare` does where it splits; here in one process
            return prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=True)
        shard = IterableDatasetShard(ds, batch_size=loader.batch_size or 1, num_processes=2, process_index=0)
        return DataLoader(shard, batch_size=loader.batch_size, **options)

    with pytest.raises(sl.errors.UsageError, match=r"one rank's part of 2 already; .*accelerator.prepare\(dataset\)"):
        next(iter(prepared((0, 2))))
    assert len(next(iter(prepared((0, 1))))["label"]) == 16  # every rank reads everything: nothing is lost
