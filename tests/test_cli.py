"""The command line: what it prints, how it fails, and a kill -9 at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from servers import S3Server, free_ports

from streamloader.cli.main import main
from streamloader.cli.options import parse_options, show_bytes
from streamloader.errors import UsageError

COMMAND = [sys.executable, "-m", "streamloader.cli.main"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 images of about 2 KB in three classes."""
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("cli") / "photos"
    for name in ("ant", "bee", "cat"):
        (root / name).mkdir(parents=True)
        for i in range(100):
            Image.fromarray(rng.integers(0, 256, (24, 24 + i % 7, 3), dtype=np.uint8)).save(root / name / f"{i:03}.png")
    return root


@pytest.fixture(scope="module")
def dataset(photos: Path) -> Path:
    """The photos as a dataset without splits, to be copied before it is damaged."""
    out = photos.parent / "dataset"
    done = subprocess.run(
        [*COMMAND, "convert", str(photos), str(out), "--shard-size", "200KiB", "--quiet"], check=False
    )
    assert done.returncode == 0
    return out


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def fails(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command that must fail in the one way that is allowed; return what it says."""
    status, _, err = run(capsys, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith(("scan:", "write:", "finish:"))]
    assert status == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_convert_and_inspect_tell_what_there_is(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status, told, err = run(capsys, "convert", photos, out, "--split", "train=0.9,val=0.1", "--workers", "1")
    assert status == 0
    assert "converted 300 samples (train 270, val 30)" in told
    assert "scan: imagefolder: 300 samples in 300 files" in err
    assert "write: 300 of 300 samples" in err
    status, told, err = run(capsys, "inspect", out)
    assert (status, err) == (0, "")
    for word in (
        "split train",
        "270 samples",
        "split val",
        "bytes:png",
        "int64",
        "in memory",
        "ant, bee, cat",
        "PNG 2",
    ):
        assert word in told
    status, told, _ = run(capsys, "inspect", out, "--split", "val", "--json")
    (facts,) = json.loads(told)["datasets"]
    assert (facts["split"], facts["num_samples"]) == ("val", 30)
    image = facts["fields"]["image"]
    assert (image["kind"], image["encoding"], image["codec"]) == ("bytes", "png", "none")
    assert image["nbytes"] < image["stored"]
    assert facts["fields"]["label"]["resident"]
    assert facts["sample"]["image"].startswith("PNG 24x24 RGB, ") or "x24 RGB" in facts["sample"]["image"]


def test_quiet_says_nothing(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "convert", photos, tmp_path / "out", "--quiet", "--workers", "0") == (0, "", "")


def test_a_bucket_is_reached_by_storage_options(
    photos: Path, seaweedfs: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--storage-option={name}={as_text(value)}" for name, value in seaweedfs.storage_options.items()]
    url = seaweedfs.url("photos")
    assert run(capsys, "convert", photos, url, "--workers", "1", *options)[0] == 0
    status, told, _ = run(capsys, "inspect", url, *options)
    assert (status, url in told, "300 samples" in told) == (0, True, True)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_a_terminal_gets_a_bar(photos: Path, tmp_path: Path) -> None:
    master, slave = os.openpty()
    command = [*COMMAND, "convert", str(photos), str(tmp_path / "out"), "--shard-size", "100KiB", "--workers", "1"]
    terminal = {**environment(tmp_path), "CI": "", "TERM": "xterm"}
    with subprocess.Popen(command, stderr=slave, stdout=subprocess.DEVNULL, env=terminal) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is closed when the process has ended
            while data := os.read(master, 65536):
                shown += data
    os.close(master)
    assert process.returncode == 0
    assert b"samples/s" in shown
    assert b"300/300" in shown


def test_help_and_version_are_quick_and_load_little() -> None:
    code = (
        "import sys\nfrom streamloader.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numpy', 'fsspec', 'rich', 'zarr'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "convert" in done.stdout
    assert "inspect" in done.stdout
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("streamloader, version ")


def test_options_are_read_as_json_or_text() -> None:
    assert parse_options(["a=1", "b=true", 'c={"d": [1]}', "e=x=y", "f="]) == {
        **{"a": 1, "b": True, "c": {"d": [1]}, "e": "x=y", "f": ""}
    }
    with pytest.raises(UsageError, match="name=value"):
        parse_options(["nothing"])
    assert [show_bytes(size) for size in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5 GiB"]


# --- bad input: one line, exit code 2, no traceback


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document["attributes"]["streamloader"])
    path.write_text(json.dumps(document))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


DAMAGED: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "not there": (shutil.rmtree, ["there is no dataset at"]),
    "a foreign Zarr": (
        lambda root: (root / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}'),
        ["not a streamloader dataset"],
    ),
    "damaged JSON": (lambda root: (root / "zarr.json").write_text('{"attributes": '), ["zarr.json is damaged"]),
    "too new": (lambda root: edit(root / "zarr.json", lambda m: m.update(version=99)), ["version 99", "upgrade"]),
    "requires": (lambda root: edit(root / "zarr.json", lambda m: m.update(requires=["magic"])), ["requires magic"]),
    "edited": (lambda root: edit(root / "zarr.json", lambda m: m["order"].update(lanes=7)), ["digest"]),
    "missing shard": (lambda root: (root / "image" / "c" / "0").unlink(), ["image/c/0"]),
    "truncated": (lambda root: (root / "image" / "c" / "0").write_bytes(b"x" * 50), ["image/c/0", "chunk 0"]),
    "bit flip": (lambda root: flip(root / "image" / "c" / "0"), ["image/c/0", "chunk 0"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_inspect_tells_what_is_wrong_in_one_line(
    case: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(dataset, tmp_path / "copy"))
    DAMAGED[case][0](copy)
    told = fails(capsys, "inspect", copy)
    assert all(word in told for word in DAMAGED[case][1]), told


def test_inspect_of_an_unknown_split_names_those_there_are(
    photos: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no splits" in fails(capsys, "inspect", dataset, "--split", "test")
    run(capsys, "convert", photos, tmp_path / "out", "--split", "train=0.9,val=0.1", "--workers", "0", "--quiet")
    assert "train, val" in fails(capsys, "inspect", tmp_path / "out", "--split", "test")


def bad_image(root: Path) -> Path:
    (root / "a").mkdir()
    (root / "a" / "x.png").write_bytes(b"no image")
    return root


def hollow_class(root: Path) -> Path:
    shutil.copytree(bad_image(root) / "a", root / "b")
    (root / "hollow").mkdir()
    return root


def unequal_arrays(root: Path) -> Path:
    np.save(root / "xs.npy", np.zeros(3))
    np.save(root / "ys.npy", np.zeros(4))
    return root


BAD_SOURCES: dict[str, tuple[Callable[[Path], Path], list[str], list[str]]] = {
    "nothing": (lambda root: root / "nowhere", [], ["nothing is at", "nowhere"]),
    "an image that does not decode": (bad_image, [], ["a/x.png: the image cannot be decoded"]),
    "a class folder without images": (hollow_class, [], ["hollow holds no image"]),
    "arrays of unequal length": (unequal_arrays, [], ["'xs' has 3 rows, 'ys' 4"]),
    "an unknown format": (unequal_arrays, ["--format", "nothing"], ["'nothing'", "choose one of"]),
    "splits that do not sum to 1": (unequal_arrays, ["--split", "train=0.9"], ["sum to 0.9"]),
    "no size": (unequal_arrays, ["--shard-size", "big"], ["'big' is not a size"]),
    "no codec": (unequal_arrays, ["--codec", "gzip"], ["'gzip'"]),
    "no option": (unequal_arrays, ["--storage-option", "anon"], ["name=value"]),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_convert_tells_what_is_wrong_in_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, options, words = BAD_SOURCES[case]
    (tmp_path / "src").mkdir()
    told = fails(capsys, "convert", make(tmp_path / "src"), tmp_path / "out", "--workers", "0", *options)
    assert all(word in told for word in words), told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_what_a_store_refuses_is_told_in_one_line(
    command: str, photos: Path, seaweedfs: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    url = seaweedfs.url("out")
    (port,) = free_ports(1)
    good = seaweedfs.storage_options
    cases: dict[str, tuple[str, dict[str, Any], str]] = {
        "wrong secret": (url, {**good, "secret": "wrong"}, "SL202"),
        "wrong endpoint": (url, {**good, "endpoint_url": f"http://127.0.0.1:{port}"}, f"127.0.0.1:{port}"),
        "no such bucket": ("s3://streamloader-no-such-bucket/x", good, "streamloader-no-such-bucket"),
        "no such protocol": ("nosuch://x/y", {}, "nosuch"),
    }
    for target, given, word in cases.values():
        options = [f"--storage-option={name}={as_text(value)}" for name, value in given.items()]
        places = [target] if command == "inspect" else [str(photos), target, "--workers", "1"]
        assert word in fails(capsys, command, *places, *options)


def test_a_real_process_fails_the_same_way(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "inspect", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: there is no dataset at")


def test_other_exceptions_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamloader.cli.convert.parse_size", lambda text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["convert", "a", "b"])


# --- kills


def environment(tmp_path: Path) -> dict[str, str]:
    """Temporary files go where the test can see that none is left."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp")}


@contextlib.contextmanager
def converting(photos: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A conversion of its own process group, with many small shards."""
    command = [*COMMAND, "convert", str(photos), str(tmp_path / "out"), *SMALL]
    process = subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


SMALL = ["--shard-size", "8KiB", "--split", "train=0.8,val=0.2", "--workers", "2"]


def wait_for(happened: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return what `happened` returns once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = happened()
        if found:
            return found
        time.sleep(0.002)
    raise AssertionError("it did not happen")


def receipts(tmp_path: Path) -> int:
    return sum(1 for _ in (tmp_path / "out").glob("*/_streamloader/receipts/*.json"))


def group(pgid: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == pgid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def maps_shared_memory(pid: int) -> bool:
    """Whether a process has shared memory or a semaphore with a name; numcodecs has one whose name is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return any("/dev/shm" in line and not line.endswith(" (deleted)") for line in lines)
    return False


@pytest.fixture(scope="module")
def undisturbed(photos: Path) -> dict[str, bytes]:
    out = photos.parent / "undisturbed"
    done = subprocess.run([*COMMAND, "convert", str(photos), str(out), *SMALL, "--quiet"], check=False)
    assert done.returncode == 0
    return contents(out)


def assert_nothing_is_left(tmp_path: Path) -> None:
    assert not list((tmp_path / "tmp").iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {"tmp", "out"}


def test_a_kill_of_the_group_at_any_moment_leaves_nothing_and_is_resumed_to_the_same_bytes(
    photos: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    rng = random.Random(int(os.environ.get("STREAMLOADER_TEST_SEED", "0")))
    kept = 0
    for _ in range(3):
        goal = kept + rng.randrange(1, 12)
        with converting(photos, tmp_path) as process:
            wait_for(lambda goal=goal: receipts(tmp_path) >= goal)
            time.sleep(rng.random() * 0.02)  # anywhere within a shard
            assert not any(maps_shared_memory(pid) for pid in group(process.pid))
            os.killpg(process.pid, signal.SIGKILL)
            wait_for(lambda pid=process.pid: not group(pid))
        assert_nothing_is_left(tmp_path)
        kept = receipts(tmp_path)
    with converting(photos, tmp_path) as process:
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 0, told
    assert "of 300 samples" in told
    assert "kept from before" in told
    assert contents(tmp_path / "out") == undisturbed
    assert_nothing_is_left(tmp_path)


def test_workers_die_with_a_killed_starter(photos: Path, tmp_path: Path) -> None:
    with converting(photos, tmp_path) as process:
        wait_for(lambda: receipts(tmp_path) >= 3)
        assert len(group(process.pid)) == 3
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not group(process.pid), seconds=10)
    assert_nothing_is_left(tmp_path)


def test_a_killed_worker_is_replaced(photos: Path, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    with converting(photos, tmp_path) as process:
        wait_for(lambda: receipts(tmp_path) >= 3)
        worker = next(pid for pid in group(process.pid) if pid != process.pid)
        os.kill(worker, signal.SIGKILL)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 0, told
    assert contents(tmp_path / "out") == undisturbed


def deaf_to_ctrl_c(pid: int) -> bool:
    blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(blocked and int(blocked[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_says_how_to_go_on(photos: Path, tmp_path: Path) -> None:
    with converting(photos, tmp_path) as process:
        wait_for(lambda: len(group(process.pid)) == 3)  # the workers may still be importing
        assert all(deaf_to_ctrl_c(pid) for pid in group(process.pid) if pid != process.pid)
        wait_for(lambda: receipts(tmp_path) >= 3)
        os.killpg(process.pid, signal.SIGINT)
        told = process.communicate(timeout=60)[1]
        wait_for(lambda: not group(process.pid), 5)  # they closed their outputs, and are about to end
    assert process.returncode == 130
    assert told.splitlines()[-1].startswith("interrupted: finished shards are kept, run the same command again")
    assert "Traceback" not in told
    assert_nothing_is_left(tmp_path)
