"""The examples that read arrays in place: they train on data in a bucket, resume exactly, and beat their baselines."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path

import pytest
from servers import S3Server
from test_kill import descendants, entries
from torchrun import TESTS, run_python, stopping_at

EXAMPLES = TESTS.parent / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]


@pytest.fixture
def keys(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server whose keys are in the environment, and whose endpoint is not."""
    for name, value in seaweedfs.env.items():
        if name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)
    return seaweedfs


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+: loss (\S+)", printed)]


def figures_of(printed: str, baseline: str) -> list[tuple[float, float]]:
    """The figures on held-out data: of the baseline, and of the model."""
    found = re.findall(rf"held-out .*{baseline} (\S+), model (\S+)", printed)
    return [(float(simple), float(model)) for simple, model in found]


def indexes_of(log: Path) -> dict[tuple[int, int], list[int]]:
    """The sample numbers of each (epoch, step) of a run, over all ranks."""
    found: dict[tuple[int, int], list[int]] = {}
    for entry in entries(sorted(log.glob("*.jsonl"))):
        found.setdefault((entry["epoch"], entry["step"]), []).extend(entry["index"])
    return {step: sorted(index) for step, index in found.items()}


@pytest.mark.long
@pytest.mark.parametrize(("example", "baseline", "factor"), [("tokens", "entropy", 1 / 4)])
def test_an_example_resumes_and_is_better_than_its_baseline(example, baseline, factor, keys, tmp_path):
    arguments = [EXAMPLES / f"{example}.py", "--url", keys.url(example), "--endpoint", keys.endpoint]
    arguments += ["--checkpoint", tmp_path / "checkpoint.pt"]
    first = run_python(*arguments, "--make", "--epochs", 1, cwd=tmp_path).stdout
    assert first.startswith("begin at step 0, epoch 0\n")
    second = run_python(*arguments, cwd=tmp_path).stdout
    assert re.match(r"begin at step [1-9]\d*, epoch 1\n", second)
    losses = losses_of(first + second)
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    [(simple, model)] = figures_of(second, baseline)
    assert model > factor * simple if factor > 1 else model < factor * simple


@pytest.mark.long
def test_the_weather_of_two_killed_ranks_is_resumed_by_three(keys, tmp_path):
    epochs = 4

    def command(ranks: int, log: str, *more: str) -> list[str]:
        script = [str(EXAMPLES / "weather.py"), "--url", url, "--endpoint", keys.endpoint, "--epochs", str(epochs)]
        given = ["--checkpoint", str(tmp_path / "weather.pt"), "--step-log", str(tmp_path / log), *more]
        return [*TORCHRUN, f"--nproc-per-node={ranks}", *script, *given]

    url = keys.url("weather.zarr")
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(
            [sys.executable, *command(2, "first", "--make")],
            env=stopping_at(tmp_path / "stop", "step 50"),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=tmp_path,
        ) as process,
    ):
        # an epoch has 31 steps, and the last checkpoint is of step 45: step 50 is not finished
        lines = list(takewhile(lambda line: line != "step 48\n", process.stdout))
        for pid in [process.pid, *descendants(process.pid)]:
            os.kill(pid, signal.SIGKILL)
    assert "begin at step 0, epoch 0, world size 2\n" in lines, (tmp_path / "stderr").read_text()[-6000:]

    printed = run_python(*command(3, "second"), cwd=tmp_path).stdout
    assert "begin at step 45, epoch 1, world size 3\n" in printed
    before, after = indexes_of(tmp_path / "first"), indexes_of(tmp_path / "second")
    assert min(after) == (1, 46)
    again = {step: index for step, index in before.items() if step in after}
    assert again
    for step, index in again.items():
        assert index == after[step] or step == max(before)  # only one rank may have logged the last one
    taken = {step: index for step, index in before.items() if step < min(after)} | after
    for epoch in range(epochs):
        count = Counter(number for step, index in taken.items() if step[0] == epoch for number in index)
        assert count == Counter(range(4 * 181 - 2)), epoch  # windows of 3 states in 181 days

    losses = losses_of("".join(lines) + printed)
    assert losses[-1] < losses[0] / 3
    figures = figures_of(printed, "persistence")
    assert len(figures) == 3
    for persistence, model in figures:
        assert model < 0.7 * persistence
