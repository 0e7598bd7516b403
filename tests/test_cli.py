"""The command line: what it prints, how it fails, its progress, and a kill -9 at any moment."""

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
from pathlib import Path

import numpy as np
import pytest
from commands import COMMAND, on_a_terminal, run
from conversions import contents, write_photos
from datasets import encoded, picture, write, write_images
from servers import free_ports

from streamloader.cli.main import main
from streamloader.cli.options import Display, Step, parse_options, show_bytes
from streamloader.errors import UsageError


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """300 images of about 2 KB in three classes."""
    root = tmp_path_factory.mktemp("cli") / "photos"
    return write_photos(root, {"ant": 100, "bee": 100, "cat": 100}, lambda i: (24, 24 + i % 7))


@pytest.fixture(scope="module")
def dataset(photos):
    """The photos as a dataset without splits, to be copied before it is damaged."""
    out = photos.parent / "dataset"
    subprocess.run([*COMMAND, "convert", str(photos), str(out), "--shard-size", "200KiB", "--quiet"], check=True)
    return out


def fails(capsys, *arguments):
    """Run a command that must fail in the one way that is allowed; return what it says."""
    status, _, err = run(capsys, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith(("scan:", "write:", "finish:"))]
    assert status == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_convert_and_inspect_tell_what_there_is(photos, tmp_path, capsys):
    out = tmp_path / "out"
    status, told, err = run(capsys, "convert", photos, out, "--split", "train=0.9,val=0.1", "--workers", "1")
    assert status == 0
    assert "converted 300 samples (train 270, val 30)" in told
    assert "scan: imagefolder: 300 samples in 300 files" in err
    assert "write: 300 of 300 samples" in err
    status, told, err = run(capsys, "inspect", out)
    assert (status, err) == (0, "")
    words = ("split train", "270 samples", "split val", "bytes:png", "int64", "in memory", "ant, bee, cat", "PNG 2")
    assert all(word in told for word in words)
    status, told, _ = run(capsys, "inspect", out, "--split", "val", "--json")
    (facts,) = json.loads(told)["datasets"]
    assert (facts["split"], facts["num_samples"]) == ("val", 30)
    image = facts["fields"]["image"]
    assert (image["kind"], image["encoding"], image["codec"]) == ("bytes", "png", "none")
    assert image["nbytes"] < image["stored"]
    assert facts["fields"]["label"]["resident"]
    assert re.match(r"PNG \d\dx24 RGB, ", facts["sample"]["image"])


def test_quiet_says_nothing(photos, tmp_path, capsys):
    assert run(capsys, "convert", photos, tmp_path / "out", "--quiet", "--workers", "0") == (0, "", "")


def test_a_bucket_is_reached_by_storage_options(photos, seaweedfs, capsys):
    options = [f"--storage-option={name}={as_text(value)}" for name, value in seaweedfs.storage_options.items()]
    url = seaweedfs.url("photos")
    assert run(capsys, "convert", photos, url, "--workers", "1", *options)[0] == 0
    status, told, _ = run(capsys, "inspect", url, *options)
    assert (status, url in told, "300 samples" in told) == (0, True, True)


def as_text(value):
    return value if isinstance(value, str) else json.dumps(value)


def test_a_terminal_gets_a_bar(photos, tmp_path):
    command = ["convert", photos, tmp_path / "out", "--shard-size", "100KiB", "--workers", "1"]
    status, shown = on_a_terminal(*command, TMPDIR=environment(tmp_path)["TMPDIR"])
    assert status == 0
    assert "samples/s" in shown
    assert "300/300" in shown


def test_help_and_version_are_quick_and_load_little():
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


def test_options_are_read_as_json_or_text():
    assert parse_options(["a=1", "b=true", 'c={"d": [1]}', "e=x=y", "f="]) == {
        **{"a": 1, "b": True, "c": {"d": [1]}, "e": "x=y", "f": ""}
    }
    with pytest.raises(UsageError, match="name=value"):
        parse_options(["nothing"])
    sizes = {0: "0 B", 999: "999 B", 1010 << 10: "1.0 MiB", 1536: "1.5 KiB", 5 << 30: "5.0 GiB"}
    assert {size: show_bytes(size) for size in sizes} == sizes


# --- bad input: one line, exit code 2, no traceback


def test_inspect_of_an_unknown_split_names_those_there_are(photos, dataset, tmp_path, capsys):
    assert "has no splits" in fails(capsys, "inspect", dataset, "--split", "test")
    run(capsys, "convert", photos, tmp_path / "out", "--split", "train=0.9,val=0.1", "--workers", "0", "--quiet")
    assert "train, val" in fails(capsys, "inspect", tmp_path / "out", "--split", "test")


def bad_image(root):
    (root / "a").mkdir()
    (root / "a" / "x.png").write_bytes(b"no image")
    return root


def hollow_class(root):
    shutil.copytree(bad_image(root) / "a", root / "b")
    (root / "hollow").mkdir()
    return root


def unequal_arrays(root):
    np.save(root / "xs.npy", np.zeros(3))
    np.save(root / "ys.npy", np.zeros(4))
    return root


BAD_SOURCES = {
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
def test_convert_tells_what_is_wrong_in_one_line(case, tmp_path, capsys):
    make, options, words = BAD_SOURCES[case]
    (tmp_path / "src").mkdir()
    told = fails(capsys, "convert", make(tmp_path / "src"), tmp_path / "out", "--workers", "0", *options)
    assert all(word in told for word in words), told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_what_a_store_refuses_is_told_in_one_line(command, photos, seaweedfs, capsys):
    url = seaweedfs.url("out")
    (port,) = free_ports(1)
    good = seaweedfs.storage_options
    cases = {
        "wrong secret": (url, {**good, "secret": "wrong"}, "SL202"),
        "wrong endpoint": (url, {**good, "endpoint_url": f"http://127.0.0.1:{port}"}, f"127.0.0.1:{port}"),
        "no such bucket": ("s3://streamloader-no-such-bucket/x", good, "streamloader-no-such-bucket"),
        "no such protocol": ("nosuch://x/y", {}, "nosuch"),
    }
    for target, given, word in cases.values():
        options = [f"--storage-option={name}={as_text(value)}" for name, value in given.items()]
        places = [target] if command == "inspect" else [str(photos), target, "--workers", "1"]
        assert word in fails(capsys, command, *places, *options)


def test_a_real_process_fails_the_same_way(tmp_path):
    done = subprocess.run([*COMMAND, "inspect", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: there is no dataset at")


def test_other_exceptions_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("streamloader.cli.datasets.Layout", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["convert", "a", "b"])


# --- kills


def environment(tmp_path):
    """Temporary files go where the test can see that none is left."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp")}


@contextlib.contextmanager
def converting(photos, tmp_path):
    """A conversion of its own process group, with many small shards."""
    command = [*COMMAND, "convert", str(photos), str(tmp_path / "out"), *SMALL]
    options = {"stderr": subprocess.PIPE, "text": True, "env": environment(tmp_path)}
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


SMALL = ["--shard-size", "2KiB", "--split", "train=0.8,val=0.2", "--workers", "2"]


def wait_for(happened, seconds=300.0):
    """Return what `happened` returns once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = happened()
        if found:
            return found
        time.sleep(0.002)
    raise AssertionError("it did not happen")


def receipts(tmp_path):
    return sum(1 for _ in (tmp_path / "out").glob("*/_streamloader/receipts/*.json"))


def group(pgid):
    """The processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == pgid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def maps_shared_memory(pid):
    """Whether a process has shared memory or a semaphore with a name; numcodecs has one whose name is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return any("/dev/shm" in line and not line.endswith(" (deleted)") for line in lines)
    return False


@pytest.fixture(scope="module")
def undisturbed(photos):
    out = photos.parent / "undisturbed"
    subprocess.run([*COMMAND, "convert", str(photos), str(out), *SMALL, "--quiet"], check=True)
    return contents(out)


def assert_nothing_is_left(tmp_path):
    assert not list((tmp_path / "tmp").iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {"tmp", "out"}


def test_a_kill_at_any_moment_ends_the_workers_and_is_resumed_to_the_same_bytes(photos, tmp_path, undisturbed):
    rng = random.Random(int(os.environ.get("STREAMLOADER_TEST_SEED", "0")))
    kept = 0
    for kill in (os.killpg, os.kill, os.killpg):  # the group, or the starter alone
        goal = kept + rng.randrange(3, 12)
        with converting(photos, tmp_path) as process:
            wait_for(lambda goal=goal, process=process: receipts(tmp_path) >= goal or process.poll() is not None)
            time.sleep(rng.random() * 0.02)  # anywhere within a shard
            assert len(group(process.pid)) <= 3
            assert not any(maps_shared_memory(pid) for pid in group(process.pid))
            with contextlib.suppress(ProcessLookupError):  # on a busy machine the kill may come too late
                kill(process.pid, signal.SIGKILL)
            finished = process.wait() == 0
            wait_for(lambda pid=process.pid: not group(pid))
        assert_nothing_is_left(tmp_path)
        if finished:
            shutil.rmtree(tmp_path / "out")
        kept = receipts(tmp_path)
    with converting(photos, tmp_path) as process:
        told = process.communicate(timeout=300)[1]
    assert process.returncode == 0, told
    assert "of 300 samples" in told
    assert ("kept from before" in told) == (kept > 0)
    assert contents(tmp_path / "out") == undisturbed
    assert_nothing_is_left(tmp_path)


def test_a_killed_worker_is_replaced(photos, tmp_path, undisturbed):
    with converting(photos, tmp_path) as process:
        wait_for(lambda: receipts(tmp_path) >= 3)
        worker = next(pid for pid in group(process.pid) if pid != process.pid)
        os.kill(worker, signal.SIGKILL)
        told = process.communicate(timeout=300)[1]
    assert process.returncode == 0, told
    assert contents(tmp_path / "out") == undisturbed


def deaf_to_ctrl_c(pid):
    blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(blocked and int(blocked[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_says_how_to_go_on(photos, tmp_path):
    with converting(photos, tmp_path) as process:
        wait_for(lambda: len(group(process.pid)) == 3)  # the workers may still be importing
        assert all(deaf_to_ctrl_c(pid) for pid in group(process.pid) if pid != process.pid)
        wait_for(lambda: receipts(tmp_path) >= 3)
        os.killpg(process.pid, signal.SIGINT)
        told = process.communicate(timeout=300)[1]
        wait_for(lambda: not group(process.pid))  # they closed their outputs, and are about to end
    assert process.returncode == 130
    assert told.splitlines()[-1].startswith("interrupted: finished shards are kept, run the same command again")
    assert "Traceback" not in told
    assert_nothing_is_left(tmp_path)


# --- `bench`, and progress: a bar on a terminal, plain lines in a pipe or CI

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\x1b]")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """700 samples of three fields."""
    folder = tmp_path_factory.mktemp("bench") / "data"
    write(folder, 700, ["x", "label", "tok"])
    return folder


def test_bench_prints_a_table_and_a_sentence(numbers, capsys):
    status, told, err = run(capsys, "bench", numbers, "--seconds", "0.2", "--batch-size", "32", "--fields", "x,label")
    assert status == 0
    lines = told.splitlines()
    assert re.search(r"700 samples, batches of 32, the first after \d+\.\d\d s$", lines[0])
    for word in ("fetch, 16 at once", "fetch and unpack", "loader", "samples/s", "MB/s", "CPU s/GB"):
        assert word in told
    assert re.match(r"(network|decode|loader)-bound: \d\.\d\d of what ", lines[-1])
    assert not CONTROL.search(told + err)
    assert re.match(r"fetch, 16 at once: 0 of 1 s", err)


def test_bench_prints_json(numbers, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    status, told, _ = run(capsys, "bench", numbers, "--seconds", "0.2", "--memory", "64MiB", "--json", "--trace", trace)
    assert status == 0
    result = json.loads(told)
    assert (result["num_samples"], result["batch_size"]) == (700, 256)
    assert [stage["name"] for stage in result["stages"]][-1] == "loader"
    assert result["verdict"].split("-")[0] in ("network", "decode", "loader")
    assert all(set(json.loads(line)) >= {"step", "wait_seconds"} for line in trace.read_text().splitlines())


def test_bench_decodes_images_to_the_size_that_is_asked_for(tmp_path, capsys):
    write_images(tmp_path / "images", (encoded(picture(i), "jpeg") for i in range(40)))
    told = run(capsys, "bench", tmp_path / "images", "--seconds", "0.1", "--image-size", "16x20")[1]
    assert "decode image from memory" in told
    told = run(capsys, "bench", tmp_path / "images", "--seconds", "0.1", "--image-size", "0")[1]
    assert "decode image" not in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "there is no dataset at"),
        (["no://such/store"], "no"),
        (["{data}", "--fields", "x,nope"], "there is no field 'nope'"),
        (["{data}", "--split", "train"], "has no splits"),
        (["{data}", "--batch-size", "701"], "batch_size=701 is more than the 700 samples"),
        (["{data}", "--batch-size", "0"], "--batch-size"),
        (["{data}", "--seconds", "0"], "seconds=0"),
        (["{data}", "--memory", "much"], "'much' is not a size"),
        (["{data}", "--memory", "1000"], "the shuffle window needs memory="),
        (["{data}", "--image-size", "big"], "--image-size 'big'"),
        (["{data}", "--trace", "{data}/no/where"], "cannot be written"),
        (["{data}", "--storage-option", "x"], "name=value"),
        (["{empty}"], "has no samples"),
    ],
)
def test_bad_input_is_one_line(arguments, says, numbers, tmp_path, capsys):
    write(tmp_path / "empty", 0, ["x"])
    filled = [part.format(data=numbers, empty=tmp_path / "empty") for part in arguments]
    status, out, err = run(capsys, "bench", *filled)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert says in err


def test_a_bench_on_a_terminal_shows_a_bar_with_rate_and_time_left(numbers):
    status, shown = on_a_terminal("bench", str(numbers), "--seconds", "0.7")
    assert status == 0
    assert "\x1b[" in shown
    for word in ("loader", "samples/s", "MB/s", " left"):
        assert word in shown


def test_ci_gets_plain_lines_even_on_a_terminal(numbers):
    status, shown = on_a_terminal("bench", str(numbers), "--seconds", "0.2", CI="true")
    assert status == 0
    assert not CONTROL.search(shown.replace("\r\n", "\n"))
    assert "loader: " in shown


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_bench_at_once(numbers):
    command = [*COMMAND, "bench", str(numbers), "--seconds", "10000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert "fetch, 16 at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted"


def test_a_conversion_tells_its_rate_and_the_time_left(tmp_path):
    # forty shards of 0.03 s at least: the time left is not guessed before half a second
    (tmp_path / "slowly.py").write_text("import time\ndef same(batch):\n    time.sleep(0.03)\n    return batch\n")
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 256, (1280, 1024), np.uint8))
    command = ["convert", str(tmp_path / "rows.npy")]
    options = ["--workers", "1", "--shard-size", "32KiB", "--map", "slowly:same", "--map-batch", "32"]
    path, place = {"PYTHONPATH": str(tmp_path)}, str(tmp_path / "a")
    env = {**os.environ, **path}
    done = subprocess.run([*COMMAND, *command, place, *options], capture_output=True, text=True, check=True, env=env)
    assert not CONTROL.search(done.stderr)
    assert re.search(r"^write: 1280 of 1280 samples, [\d,]+ samples/s, [\d,.]+ MB/s$", done.stderr, re.MULTILINE)
    assert len(done.stderr.splitlines()) <= 20
    status, shown = on_a_terminal(*command, str(tmp_path / "b"), *options, **path)
    assert status == 0
    assert "\x1b[" in shown
    for word in ("samples/s", "MB/s", "1280/1280 samples", " left"):
        assert word in shown


def test_lines_come_at_the_start_of_a_phase_now_and_then_and_at_its_end(capsys, monkeypatch):
    now = iter([99.0, 100.0, 100.5, 102.0, 105.0, 106.0, 106.1, 106.2, 107.0])
    monkeypatch.setattr("streamloader.cli.options.time.monotonic", lambda: next(now))
    lines = Display()
    for done in (0, 10, 40, 50, 100, 100, 100):
        lines.show(Step("write", done, 100, "samples", "9 samples/s"))
    lines.show(Step("finish", 100, 100, "samples"))
    assert capsys.readouterr().err.splitlines() == [
        "write: 0 of 100 samples, 9 samples/s",
        "write: 50 of 100 samples, 9 samples/s, 0:00:05 left",
        "write: 100 of 100 samples, 9 samples/s",
        "finish: 100 of 100 samples",
    ]


def test_the_time_left_does_not_count_what_was_kept():
    resumed = Step("write", 600, 1000, "samples", kept=500)
    assert resumed.left(10) == "0:00:40 left"
    assert Step("write", 500, 1000, "samples", kept=500).left(10) == ""
    assert Step("write", 1, 3601, "samples").left(1) == "1:00:00 left"
