"""kill -9 of a whole conversion at 24 random moments, and the same command again: the same bytes in the end."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conversions import contents, write_photos

import streamloader as sl

KILLS = 24
COMMAND = [sys.executable, "-m", "streamloader.cli.main", "convert"]
# options of conversions that change what is written when; 4 KiB make some hundred shards of what is here
OPTIONS = (
    [],
    ["--shuffle", "7", "--on-error", "quarantine"],
    ["--split", "train=0.8,val=0.2", "--on-error", "skip", "--resize", "12"],
)
REFUSED = 2
LEFT_OUT = 3  # exit status: whole, but bad samples are not in it


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """600 small images in three classes."""
    root = tmp_path_factory.mktemp("source") / "photos"
    return write_photos(root, {"ant": 200, "bee": 200, "cat": 200}, lambda i: (16 + i % 8, 16))


def command(src, dst, options):
    """The command that every attempt runs."""
    return [*COMMAND, str(src), str(dst), *options, "--shard-size", "4KiB", "--workers", "2", "--quiet"]


@contextlib.contextmanager
def converting(src, dst, options, temporary):
    """A conversion in a process group of its own, which is gone afterwards."""
    log = temporary.with_name("stderr")  # a file: nobody reads while we wait
    with log.open("w") as errors:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        line = command(src, dst, options)
        process = subprocess.Popen(line, env=environment, start_new_session=True, stderr=errors, text=True)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_ended(status, dst, photos, options, temporary):
    """Make sure that the conversion ended well; after a kill behind its last write it says that it is finished."""
    told = temporary.with_name("stderr").read_text()
    if status == REFUSED and "holds a dataset" in told and "--resume" in told:
        status = subprocess.run([*command(photos, dst, options), "--resume"], check=False).returncode
    assert status in (0, LEFT_OUT), told


def spoil(photos, options):
    """Make some images bad, or good again: for the options that leave such samples out."""
    for name in ("ant/050.png", "bee/199.png", "cat/000.png", "cat/199.png"):
        path, kept = photos / name, (photos / name).with_suffix(".kept")
        if "--on-error" in options and not kept.exists():
            path.rename(kept)
            path.write_bytes(b"no image")
        os.utime(path, (1, 1))  # the same file for every conversion


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shuffled, with a quarantine", "splits, resized, skipping"])
def test_kills_at_random_moments_change_nothing(options, photos, tmp_path):
    spoil(photos, options)
    rng = random.Random(int(os.environ.get("STREAMLOADER_TEST_SEED", "0")) + len(options))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    begin = time.monotonic()
    with converting(photos, tmp_path / "whole", options, temporary) as process:
        check_ended(process.wait(300), tmp_path / "whole", photos, options, temporary)
    took = time.monotonic() - begin
    wanted, out, kills, finished = contents(tmp_path / "whole"), tmp_path / "out", 0, 0
    goal = -(-KILLS // len(OPTIONS))
    while kills < goal or not finished:
        with converting(photos, out, options, temporary) as process:
            moment = rng.random() * took
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(moment if kills < goal else 300)
                check_ended(status, out, photos, options, temporary)
                assert contents(out) == wanted
                finished += 1
                out = tmp_path / f"out{finished}"  # begin another one, there are kills left
                continue
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        assert not list(temporary.iterdir()), "a kill left something behind"
    splits = ("train", "val") if "--split" in options else (None,)
    digests = {sl.open(tmp_path / "whole", split=split).digest for split in splits}
    assert {sl.open(tmp_path / "out", split=split).digest for split in splits} == digests
    assert kills >= goal


def test_the_same_command_twice_at_once_leaves_one_complete_dataset(tmp_path):
    src = tmp_path / "x.npy"
    np.save(src, np.random.default_rng(0).random((1000, 64)))
    sl.convert(src, tmp_path / "whole", layout=sl.Layout(shard_size=4 << 10), workers=2)
    expected, ended = contents(tmp_path / "whole"), set()
    dst = tmp_path / "out"
    for attempt in range(6):
        line = [*command(src, dst, []), *(["--overwrite"] if attempt % 4 else [])]
        delay = random.Random(attempt).uniform(0, 0.5) if attempt % 2 else 0.0
        runs = []
        for _ in range(2):
            runs.append(subprocess.Popen(line, stderr=subprocess.PIPE, text=True))
            time.sleep(delay)
        told = [(run.communicate(timeout=300)[1], run.returncode) for run in runs]
        assert any(status == 0 for _, status in told) or attempt == 4, told  # there is a dataset already
        for text, status in told:
            assert status == 0 or re.search("another run|holds a dataset|unfinished dataset", text), text
            ended.add(status)
        assert contents(dst) == expected
    assert 0 in ended
