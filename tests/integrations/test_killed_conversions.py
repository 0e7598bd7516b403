"""kill -9 of a conversion at random moments, and the same command again: the same bytes in the end."""

import os
import random
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from amounts import longer
from commands import COMMAND
from conversions import contents, converting, errors_of, group, wait_for, write_photos

import streamloader as sl

ALWAYS = ("--shard-size", "4KiB", "--workers", "2", "--quiet")  # some hundred shards of what is here
# options of conversions that change what is written when
OPTIONS = (
    [],
    ["--shuffle", "7", "--on-error", "quarantine"],
    ["--split", "train=0.8,val=0.2", "--on-error", "skip", "--resize", "12"],
)
FAILED = 2
LEFT_OUT = 3  # exit status: complete, but without bad samples


@pytest.fixture
def photos(tmp_path):
    """600 small images in three classes, some of which the test may spoil."""
    root = tmp_path / "source" / "photos"
    return write_photos(root, {"ant": 200, "bee": 200, "cat": 200}, lambda i: (16 + i % 8, 16))


def check_ended(status, photos, dst, options):
    """Assert that the conversion ended well; after a kill behind its last write the next one finds it finished."""
    if status == FAILED and re.search("holds a dataset.*--resume", errors_of(dst)):
        with converting(photos, dst, *options, *ALWAYS, "--resume") as process:
            status = process.wait(300)
    assert status in (0, LEFT_OUT), errors_of(dst)


def spoil(photos, options):
    """Make some images bad, for the options that leave such samples out."""
    for name in ("ant/050.png", "bee/199.png", "cat/000.png", "cat/199.png"):
        if "--on-error" in options:
            (photos / name).write_bytes(b"no image")
        os.utime(photos / name, (1, 1))  # the same file for every conversion


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shuffled, with a quarantine", "splits, resized, skipping"])
@pytest.mark.parametrize("goal", [2, longer(8)])
def test_kills_at_random_moments_change_nothing(goal, options, photos, tmp_path):
    spoil(photos, options)
    rng = random.Random(int(os.environ.get("STREAMLOADER_TEST_SEED", "0")) + len(options))
    begin = time.monotonic()
    with converting(photos, tmp_path / "whole", *options, *ALWAYS) as process:
        check_ended(process.wait(300), photos, tmp_path / "whole", options)
    took = time.monotonic() - begin
    wanted, out, kills, finished = contents(tmp_path / "whole"), tmp_path / "out", 0, 0
    while kills < goal or not finished:
        with converting(photos, out, *options, *ALWAYS) as process:
            try:
                status = process.wait(rng.random() * took if kills < goal else 300)
            except subprocess.TimeoutExpired:
                kill = os.kill if kills % 2 else os.killpg  # the process that leads, or all
                kill(process.pid, signal.SIGKILL)
                process.wait()
                wait_for(lambda pid=process.pid: not group(pid))
                kills += 1
                continue
        check_ended(status, photos, out, options)
        assert contents(out) == wanted
        finished += 1
        out = tmp_path / f"out{finished}"  # begin another one, there are kills left
    splits = ("train", "val") if "--split" in options else (None,)
    for split in splits:
        assert sl.open(tmp_path / "out", split=split).digest == sl.open(tmp_path / "whole", split=split).digest


@pytest.mark.long
@pytest.mark.parametrize("attempts", [2, 6])
def test_the_same_command_twice_at_once_leaves_one_complete_dataset(attempts, tmp_path):
    src, dst = tmp_path / "x.npy", tmp_path / "out"
    np.save(src, np.random.default_rng(0).random((1000, 64)))
    sl.convert(src, tmp_path / "whole", layout=sl.Layout(shard_size=4 << 10), workers=2)
    expected = contents(tmp_path / "whole")
    for attempt in range(attempts):
        command = [*COMMAND, "convert", str(src), str(dst), *ALWAYS, *(["--overwrite"] if attempt % 4 else [])]
        delay = random.Random(attempt).uniform(0, 0.5) if attempt % 2 else 0.0
        runs = []
        for _ in range(2):
            runs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            time.sleep(delay)
        ended = [(run.communicate(timeout=300)[1], run.returncode) for run in runs]
        assert any(status == 0 for _, status in ended) or attempt == 4, ended  # there is a dataset already
        for text, status in ended:
            assert status == 0 or re.search("another run|holds a dataset|unfinished dataset", text), text
        assert contents(dst) == expected
