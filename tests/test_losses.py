"""`LossLog` and what reads it: a log is read whatever ended the process that wrote it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import write

import streamloader as sl
from streamloader.errors import StateError
from streamloader.storage.json_lines import JsonLines
from streamloader.view import losses as reader
from streamloader.view.losses import read_losses

SCRIPT = """
import sys
import numpy as np
import streamloader as sl

url, where, batches, end = sys.argv[1:]
loader = sl.NumpyDataset(url, batch_size=4, num_workers=0, with_index=True)
log = sl.LossLog(loader, where)
for step, batch in enumerate(loader):
    if step == int(batches):
        break
    log(batch, np.full(4, step))
{}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("losses") / "d"
    write(folder, 40, ["x", "label"])
    return str(folder)


def logged(url, where, steps, first=0):
    """Log the number of each step as its loss."""
    loader = sl.NumpyDataset(url, batch_size=4, num_workers=0)
    with sl.LossLog(loader, where) as log:
        for step, batch in enumerate(loader):
            if first <= step < first + steps:
                log(batch, np.full(4, step))


def steps(where):
    """The mean loss of each step of epoch 0."""
    return {step: mean for (_, step), mean in read_losses(str(where), {}).means.items()}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_a_killed_process_has_begun_is_left_out_and_those_after_it_are_read(cut, url, tmp_path):
    where = tmp_path / "l.jsonl"
    logged(url, where, 4)
    os.truncate(where, where.stat().st_size - cut)
    assert list(steps(where)) == [0, 1, 2]
    logged(url, where, 3, first=5)
    whole = [3] if cut == 1 else []  # the line lacked only its end
    assert list(steps(where)) == [0, 1, 2, *whole, 5, 6, 7]
    assert read_losses(str(where), {}).damaged == 1 - len(whole)


def test_a_disk_that_was_full_for_a_while_costs_the_losses_of_that_time(url, tmp_path):
    where = tmp_path / "l.jsonl"
    logged(url, where, 3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (where.stat().st_size + 100, before[1]))
    try:
        with pytest.warns(RuntimeWarning, match="losses are missing in LossLog: OSError"):
            logged(url, where, 2, first=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    logged(url, where, 2, first=6)
    assert list(steps(where)) == [0, 1, 2, 6, 7]


@pytest.mark.parametrize("end", ["raise FloatingPointError('loss is nan')", "sys.exit(3)", ""])
def test_a_folder_has_the_losses_until_training_ended_by_an_exception(end, url, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(end))
    subprocess.run([sys.executable, script, url, f"{tmp_path}/log/", "7", end], timeout=120, check=False)
    assert steps(f"{tmp_path}/log/") == {step: step for step in range(7)}


def test_the_name_of_a_dataset_may_have_any_bytes(tmp_path):
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/\xff"), "d")
    write(folder, 40, ["x", "label"])
    logged(str(folder), tmp_path / "l.jsonl", 3)
    found = read_losses(str(tmp_path / "l.jsonl"), {})
    assert found.run["sources"][0]["url"] == str(folder)


LINE = {"epoch": 0, "step": 0, "rank": 0, "row": [0], "loss": [1.0]}
OTHERS = [
    "x" * 1000,
    "[" * 100_000,
    "3",
    json.dumps(LINE | {"epoch": "x"}),
    json.dumps(LINE | {"step": None}),
    '{"epoch": 1e999, "step": 0, "rank": 0}',
    json.dumps(LINE | {"row": ["x"]}),
    json.dumps(LINE | {"row": 3}),
    json.dumps(LINE | {"loss": ["x"]}),
    json.dumps(LINE | {"loss": [1, 2]}),
    json.dumps(LINE | {"index": [None]}),
    json.dumps(LINE | {"loss": [10**400]}),
]


@pytest.mark.parametrize("line", OTHERS, ids=lambda line: line[:60])
def test_lines_of_anything_else_are_an_error(line, tmp_path):
    (tmp_path / "l.jsonl").write_text(f"{line}\n")
    with pytest.raises(StateError):
        read_losses(str(tmp_path / "l.jsonl"), {})


def test_losses_that_are_not_finite_come_first(tmp_path):
    text = json.dumps(LINE | {"row": [0, 1, 2, 3], "loss": [1, float("nan"), None, float("-inf")]})
    (tmp_path / "l.jsonl").write_text(f"{text}\n")
    assert [each.loss for each in read_losses(str(tmp_path / "l.jsonl"), {}).largest] == [np.inf] * 3 + [1]


def test_a_log_is_read_in_pieces_and_a_line_is_limited(url, tmp_path, monkeypatch):
    logged(url, tmp_path / "l.jsonl", 9)
    whole = read_losses(str(tmp_path / "l.jsonl"), {})
    monkeypatch.setattr(reader, "PIECE", 37)
    assert read_losses(str(tmp_path / "l.jsonl"), {}) == whole
    monkeypatch.setattr(reader, "MOST_LINE", 200)
    with pytest.raises(StateError, match="a line of over"):
        read_losses(str(tmp_path / "l.jsonl"), {})


def test_a_store_that_takes_no_object_is_one_warning_for_a_log(tmp_path):
    (tmp_path / "log").mkdir()
    log = JsonLines(f"{tmp_path}/log/", None, "lines are missing")
    (tmp_path / "log").rmdir()
    (tmp_path / "log").touch()
    with pytest.warns(RuntimeWarning, match="lines are missing: .*; later failures are not shown") as warned:
        for number in range(40):
            log.write(f"{number}.jsonl", [{"a": 1}])
        log.close()
    assert len(warned) == 1
