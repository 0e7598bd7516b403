"""A run that is killed with -9 at random moments, and goes on at random world sizes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from itertools import count, islice
from pathlib import Path

import datasets
import pytest
from test_kill import descendants
from torchrun import command, environment

N = 1003
EPOCHS = 3
KILLS = 12
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
        heard = list(islice(run.stdout, steps))
        if steps is None or len(heard) < steps:
            assert run.wait(60) == 0, (folder / f"stderr-{attempt}").read_text()[-6000:]
            return True
        for pid in [run.pid, *descendants(run.pid)]:
            os.kill(pid, signal.SIGKILL)
    return False


def place_of(folder: Path) -> Place:
    """Where the saved state stands."""
    if not (folder / "state.json").exists():
        return 0, 0
    state = json.loads((folder / "state.json").read_text())
    return state["epoch"], state["position"]


def taken(folder: Path, attempt: int) -> dict[Place, list[int]]:
    """The samples of each step of an attempt, over all ranks, by where the run stands after it."""
    found: dict[Place, list[int]] = {}
    for path in folder.glob(f"{attempt}-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may have been cut by the kill
                entry = json.loads(line)
                found.setdefault(tuple(entry["after"]), []).extend(entry["samples"])
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0])
def test_a_run_killed_again_and_again_sees_each_sample_once_in_each_epoch(tmp_path: Path, seed: int) -> None:
    datasets.write(tmp_path / "data", N, ["x"])
    draw = random.Random(seed)
    kept: dict[Place, list[int]] = {}
    kills = 0
    for attempt in count():
        begin = place_of(tmp_path)
        kept = {place: samples for place, samples in kept.items() if place <= begin}  # later steps are run again
        ranks = draw.choice(WORLDS)
        steps = draw.randint(1, MOST_STEPS) if attempt < KILLS else None
        ended = killed(tmp_path / "data", tmp_path, attempt, ranks, steps)
        steps_taken = taken(tmp_path, attempt)
        assert all(place > begin for place in steps_taken)
        kept |= steps_taken
        kills += not ended
        if ended:
            break
    assert kills >= KILLS // 2
    seen: dict[int, list[int]] = {}
    for (epoch, position), samples in kept.items():
        seen.setdefault(epoch if position else epoch - 1, []).extend(samples)
    assert set(seen) == set(range(EPOCHS))
    for samples in seen.values():
        assert sorted(samples) == list(range(N))
