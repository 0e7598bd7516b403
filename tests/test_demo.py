"""The demo: its checks find what they are for, and its processes end with their starter."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from commands import run
from hypothesis import given
from hypothesis import strategies as st

from streamloader.demo.run import RankStep, check_exactly_once, read_log, reason, repeated_steps
from streamloader.errors import EngineError

STARTER = """
import sys
from streamloader.demo.run import s3_server
with s3_server("bucket") as endpoint:
    print(endpoint, flush=True)
    sys.stdin.read()
"""


def epoch_of(numbers: list[int], epoch: int = 0, batch: int = 4) -> list[RankStep]:
    starts = range(0, len(numbers), batch)
    return [RankStep(epoch, step, tuple(numbers[start : start + batch])) for step, start in enumerate(starts)]


@given(st.permutations(range(23)))
def test_a_permutation_is_exactly_once(numbers):
    check_exactly_once(epoch_of(numbers) + epoch_of(numbers[::-1], epoch=1), 23, epochs=2)


@given(st.permutations(range(23)), st.integers(0, 22), st.integers(0, 22))
def test_a_missed_and_a_repeated_sample_are_found(numbers, place, other):
    if numbers[place] == numbers[other]:
        numbers = [*numbers, numbers[place]]
    else:
        numbers = [numbers[other] if number == numbers[place] else number for number in numbers]
    with pytest.raises(EngineError, match=r"epoch 0 has [12] of 23 samples not exactly once .* \d+: [02]"):
        check_exactly_once(epoch_of(numbers), 23, epochs=1)


MISSING = [(8, 2, "epoch 1 has 8 of 8 samples .* 0: 0, 1: 0"), (9, 1, "has 1 of 8 .* 8: 1")]


@pytest.mark.parametrize(("taken", "epochs", "message"), MISSING)
def test_a_missing_epoch_and_an_unknown_sample_are_found(taken, epochs, message):
    with pytest.raises(EngineError, match=message):
        check_exactly_once(epoch_of(list(range(taken))), 8, epochs)


def test_steps_after_the_checkpoint_must_be_the_same_batches():
    before = epoch_of(list(range(12)))
    assert repeated_steps(before, before, resumed_at=1) == 2
    with pytest.raises(EngineError, match="step 2 has another batch"):
        repeated_steps(before, epoch_of(list(range(12))[::-1]), resumed_at=1)


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    line = json.dumps({"epoch": 0, "step": 0, "index": [1, 2]})
    (tmp_path / "first-rank0.jsonl").write_text(f"{line}\n{line[:20]}")
    assert read_log(tmp_path, "first") == [RankStep(0, 0, (1, 2))]


def test_the_server_ends_with_its_starter_even_if_that_is_killed():
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        endpoint = starter.stdout.readline().strip()
        assert endpoint.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{endpoint}/bucket?list-type=2") as listing:
            assert b"<KeyCount>0</KeyCount>" in listing.read()
        assert not Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
        starter.send_signal(signal.SIGKILL)
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(endpoint)


def test_a_folder_that_is_not_empty_is_an_error(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    assert run(capsys, "demo", "--keep", tmp_path)[:2] == (2, "")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


ABORTED = """
Fatal Python error: Aborted

Current thread 0x00007f268c5f7b80 (most recent call first):
  File "train.py", line 2 in <module>
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
[1]:
  exitcode  : -15 (pid: 16895)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  exitcode  : -6 (pid: 16894)  (SIGABRT)
"""


LOGS = [
    (ABORTED, "Fatal Python error: Aborted; exitcode  : -6 (pid: 16894)  (SIGABRT)"),
    (ABORTED.replace("Fatal Python error: Aborted", ""), "exitcode  : -6 (pid: 16894)  (SIGABRT)"),
    (f"[rank0]: ValueError: no\n{ABORTED}", "[rank0]: ValueError: no; exitcode  : -6 (pid: 16894)  (SIGABRT)"),
    ("hello\nworld", "world"),
    ("", "the log is empty"),
]


@pytest.mark.parametrize(("log", "message"), LOGS)
def test_the_reason_is_the_error_of_a_rank_and_how_it_ended(tmp_path, log, message):
    (tmp_path / "log").write_text(log)
    assert reason(tmp_path / "log") == message
