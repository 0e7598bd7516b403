"""The command line: what it prints, how it fails, its progress, and kills of a conversion."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import rich.progress
from commands import COMMAND, on_a_terminal, run
from conversions import contents, converting, errors_of, group, wait_for, write_photos
from datasets import assert_threads_end, encoded, picture, write, write_images
from zarr_stores import url_of

import streamloader as sl
from streamloader.cli.main import main
from streamloader.cli.options import parse_options
from streamloader.cli.show import Display, show_bytes, time_left
from streamloader.errors import UsageError


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """120 images of about 2 KB in three classes."""
    root = tmp_path_factory.mktemp("cli") / "photos"
    return write_photos(root, {"ant": 40, "bee": 40, "cat": 40}, lambda i: (24, 24 + i % 7))


def fails(capsys, *arguments):
    """Run a command that must fail in the one way that is allowed; return its line."""
    status, out, err = run(capsys, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith(("scan:", "write:", "finish:"))]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_convert_and_inspect_print_what_there_is(photos, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    status, shown, err = run(capsys, "convert", photos, out, "--split", "train=0.9,val=0.1", "--workers", "0")
    assert status == 0
    assert "converted 120 samples (train 108, val 12)" in shown
    assert "scan: imagefolder: 120 samples in 120 files" in err
    assert "write: 120 of 120 samples" in err
    status, shown, err = run(capsys, "inspect", out)
    assert (status, err) == (0, "")
    words = ("split train", "108 samples", "split val", "bytes:png", "int64", "in memory", "ant, bee, cat", "PNG 2")
    words += ("lengths of image: 1",)
    assert all(word in shown for word in words)
    status, shown, _ = run(capsys, "inspect", out, "--split", "val", "--json")
    (facts,) = json.loads(shown)["datasets"]
    assert (facts["split"], facts["num_samples"]) == ("val", 12)
    image = facts["fields"]["image"]
    assert (image["kind"], image["encoding"], image["codec"]) == ("bytes", "png", "none")
    assert image["nbytes"] < image["stored"]
    assert image["lengths"]["min"] <= image["lengths"]["median"] <= image["lengths"]["max"] <= image["nbytes"]
    assert facts["fields"]["label"]["lengths"] is None
    (out / "val/_streamloader/lengths/image/c/0").unlink()
    assert "lengths of image: the table is damaged" in run(capsys, "inspect", out, "--split", "val")[1]
    monkeypatch.setattr("streamloader.cli.datasets.MOST_LENGTHS", 11)
    assert "lengths of" not in run(capsys, "inspect", out, "--split", "val")[1]
    assert facts["fields"]["label"]["resident"]
    assert re.match(r"PNG \d\dx24 RGB, ", facts["sample"]["image"])
    assert "train, val" in fails(capsys, "inspect", out, "--split", "test")


def test_quiet_prints_nothing(photos, tmp_path, capsys):
    assert run(capsys, "convert", photos, tmp_path / "out", "--quiet", "--workers", "0") == (0, "", "")
    assert "has no splits" in fails(capsys, "inspect", tmp_path / "out", "--split", "test")


def test_an_append_with_reversed_arguments_names_the_order(numbers, photos, tmp_path, capsys):
    sl.convert(photos, tmp_path / "split", split="train=0.5,val=0.5", workers=0)
    for dataset in (numbers, tmp_path / "split"):
        line = fails(capsys, "append", photos, dataset)
        assert line.startswith("error: there is no dataset at")
        assert f"; {dataset} is a dataset: to append to it, give it before the source [SL301]" in line
    assert "convert something to it [SL301]" in fails(capsys, "append", tmp_path / "nothing", photos)


def storage(options):
    """Return the arguments that give these storage options."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return [f"--storage-option={name}={value}" for name, value in texts.items()]


@pytest.mark.long
def test_a_bucket_is_reached_by_storage_options(photos, seaweedfs, capsys):
    options, url = storage(seaweedfs.storage_options), seaweedfs.url("photos")
    assert run(capsys, "convert", photos, url, "--workers", "1", *options)[0] == 0
    status, shown, _ = run(capsys, "inspect", url, *options)
    assert (status, url in shown, "120 samples" in shown) == (0, True, True)


def test_help_and_version_are_quick_and_load_little():
    code = (
        "import sys\nfrom streamloader.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numpy', 'fsspec', 'rich', 'zarr'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "convert" in done.stdout and "inspect" in done.stdout
    for command in (COMMAND, [sys.executable, "-m", "streamloader"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("streamloader, version ")


def test_the_list_of_commands_has_whole_sentences(capsys):
    _, shown, _ = run(capsys, "--help")
    assert "..." not in shown.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nonsense"], "No such command 'nonsense'; see streamloader --help [SL100]"),
        (["convert", "x"], "Missing argument 'DST'; see streamloader convert --help [SL100]"),
        (["plan", "x", "--batch-size", "a"], "not a valid integer; see streamloader plan --help [SL100]"),
        (
            ["inspect", "x", "--zarr-format", "two"],
            "not a valid integer range; see streamloader inspect --help [SL100]",
        ),
        (["inspect", "x", "--sample-axis", "t", "--patch", "y=\u00b2"], "write it as y=256,x=256 [SL100]"),
        (["bench", "x", "--image-size", "\u00b2"], "write it as 224, as 192x256 (height x width), or 0 [SL100]"),
        (["stats", "x", "--output", "{0}/none/s.json"], "name a file in a folder that exists and is writable [SL503]"),
        (["stats", "x", "--output", "{0}"], "name a file in a folder that exists and is writable [SL503]"),
        (["plan", "x", "--plot", "{0}/none/p.png"], "name a file in a folder that exists and is writable [SL503]"),
        (["demo", "--keep", "{0}/file/demo"], "give --keep another folder [SL503]"),
        (["stats", "{0}/none.npy"], "[SL301]"),
        (["inspect", url_of("xarray3.zarr"), "--split", "a"], "give the URL of the group that has them [SL100]"),
    ],
)
def test_wrong_arguments_are_errors_with_a_remedy_and_a_code(arguments, line, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert fails(capsys, *(part.format(tmp_path) for part in arguments)).endswith(line)


def test_what_has_no_samples_has_no_statistics(tmp_path, capsys):
    write(tmp_path / "empty", 0, ["x"])
    assert "empty has no samples; give a dataset with samples" in fails(capsys, "stats", tmp_path / "empty")


def test_a_range_is_no_condition_by_which_samples_are_deleted(numbers, capsys):
    line = fails(capsys, "delete", numbers, "--where", "0:10")
    assert "where='0:10' is a range of samples; write a condition on a field, or name a file" in line


def test_a_missing_dataset_is_named_once(tmp_path, capsys):
    assert fails(capsys, "inspect", tmp_path / "none").count(str(tmp_path / "none")) == 1


def test_a_closed_pipe_ends_a_command_without_a_message(numbers):
    command = [*COMMAND, "inspect", str(numbers), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.communicate(timeout=300)[1], process.returncode) == (b"", 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full, of Linux")
@pytest.mark.parametrize("arguments", [["inspect", "{0}", "--json"], ["stats", "{0}", "--output", "/dev/full"]])
def test_a_full_disk_below_a_result_is_one_line(arguments, numbers):
    command = [*COMMAND, *(argument.format(numbers) for argument in arguments)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    problem = "error: the result cannot be written: [Errno 28] No space left on device; free some space"
    assert (done.returncode, done.stderr.count("\n"), done.stderr[: len(problem)]) == (2, 1, problem)


def test_options_are_read_as_json_or_text():
    assert parse_options(["a=1", "b=true", 'c={"d": [1]}', "e=x=y", "f="]) == {
        **{"a": 1, "b": True, "c": {"d": [1]}, "e": "x=y", "f": ""}
    }
    with pytest.raises(UsageError, match="name=value"):
        parse_options(["nothing"])
    sizes = {0: "0 B", 999: "999 B", 1010 << 10: "1.0 MiB", 1536: "1.5 KiB", 5 << 30: "5.0 GiB"}
    assert {size: show_bytes(size) for size in sizes} == sizes


# --- bad input: one line, exit code 2, no traceback


def bad_image(root):
    (root / "a").mkdir()
    (root / "a" / "x.png").write_bytes(b"no image")
    return root


def empty_class(root):
    (bad_image(root) / "empty").mkdir()
    return root


def unequal_arrays(root):
    np.save(root / "xs.npy", np.zeros(3))
    np.save(root / "ys.npy", np.zeros(4))
    return root


def npz(root):
    np.savez(root / "x.npz", x=np.zeros(3))
    return root


BAD_SOURCES = {
    "nothing": (lambda root: root / "nowhere", [], ["nothing exists at", "nowhere"]),
    "an image that does not decode": (bad_image, [], ["a/x.png: the image cannot be decoded"]),
    "a class folder without images": (empty_class, [], ["empty holds no image"]),
    "arrays of unequal length": (unequal_arrays, [], ["'xs' has 3 rows, 'ys' 4"]),
    "an .npz in a folder": (npz, ["--format", "npy"], ["holds no .npy;"]),
    "an unknown format": (unequal_arrays, ["--format", "nothing"], ["'nothing'", "choose one of"]),
    "splits that do not sum to 1": (unequal_arrays, ["--split", "train=0.9"], ["sum to 0.9"]),
    "no size": (unequal_arrays, ["--shard-size", "big"], ["--shard-size 'big' is not a size"]),
    "no codec": (unequal_arrays, ["--codec", "gzip"], ["'gzip'"]),
    "no option": (unequal_arrays, ["--storage-option", "anon"], ["name=value"]),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_failed_conversion_prints_one_line(case, tmp_path, capsys):
    make, options, words = BAD_SOURCES[case]
    (tmp_path / "src").mkdir()
    line = fails(capsys, "convert", make(tmp_path / "src"), tmp_path / "out", "--workers", "0", *options)
    assert all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


@pytest.mark.quick(1)
@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_the_error_of_a_store_is_one_line(command, photos, seaweedfs, capsys):
    url = seaweedfs.url("out")
    good = seaweedfs.storage_options
    with socket.socket() as closed:  # bound, so that nobody listens there meanwhile
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        cases = {
            "wrong secret": (url, {**good, "secret": "wrong"}, "SL202"),
            "wrong endpoint": (url, {**good, "endpoint_url": f"http://127.0.0.1:{port}"}, f"127.0.0.1:{port}"),
            "no such bucket": ("s3://streamloader-no-such-bucket/x", good, "streamloader-no-such-bucket"),
            "no such protocol": ("nosuch://x/y", {}, "nosuch"),
        }
        for target, given, word in cases.values():
            places = [target] if command == "inspect" else [photos, target, "--workers", "0"]
            assert word in fails(capsys, command, *places, *storage(given))


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

SMALL = ["--shard-size", "2KiB", "--split", "train=0.8,val=0.2", "--workers", "2"]


def receipts(out):
    return sum(1 for _ in out.glob("*/_streamloader/receipts/*.json"))


def maps_shared_memory(pid):
    """Whether a process has shared memory or a semaphore with a name; numcodecs has one whose name is gone."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return any("/dev/shm" in line and not line.endswith(" (deleted)") for line in lines)


@pytest.mark.long
def test_killed_processes_leave_nothing_and_the_same_command_resumes(photos, tmp_path):
    """Of a conversion the process that leads it is killed, and of the one that resumes it a worker."""
    sl.convert(photos, tmp_path / "whole", layout=sl.Layout(shard_size=2 << 10), split="train=0.8,val=0.2", workers=0)
    rng, out = random.Random(int(os.environ.get("STREAMLOADER_TEST_SEED", "0"))), tmp_path / "out"
    goal, held = rng.randrange(3, 12), tmp_path / "held"
    held.touch()
    with converting(photos, out, *SMALL, held=held) as process:
        wait_for(lambda: len(group(process.pid)) == 3)
        wait_for(lambda: receipts(out) >= goal)
        assert not any(maps_shared_memory(pid) for pid in group(process.pid))
        process.kill()
        process.wait()
        wait_for(lambda: not group(process.pid))
    with converting(photos, out, *SMALL, held=held) as process:
        wait_for(lambda: len(group(process.pid)) == 3)
        os.kill(min(set(group(process.pid)) - {process.pid}), signal.SIGKILL)
        held.unlink()
        assert process.wait(300) == 0, errors_of(out)
    assert "of 120 samples" in errors_of(out) and "kept from before" in errors_of(out)
    assert contents(out) == contents(tmp_path / "whole")


def blocks_sigint(pid):
    blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(blocked and int(blocked[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.long
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_prints_how_to_resume(photos, tmp_path):
    out, held = tmp_path / "out", tmp_path / "held"
    held.touch()
    with converting(photos, out, *SMALL, held=held) as process:
        wait_for(lambda: len(group(process.pid)) == 3)  # the workers may still be importing
        assert all(blocks_sigint(pid) for pid in group(process.pid) if pid != process.pid)
        wait_for(lambda: receipts(out) >= 3)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(300) == 130
        wait_for(lambda: not group(process.pid))
    *_, last = errors_of(out).splitlines()
    assert last.startswith("interrupted: finished shards are kept, run the same command again")
    assert "Traceback" not in errors_of(out)


# --- `bench`, and progress: a bar on a terminal, plain lines in a pipe or CI

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\x1b]")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """700 samples of three fields."""
    folder = tmp_path_factory.mktemp("bench") / "data"
    write(folder, 700, ["x", "label", "tok"])
    return folder


def test_bench_prints_a_table_and_a_verdict(numbers, capsys, monkeypatch):
    monkeypatch.setattr("streamloader.cli.show.LINE_SECONDS", 0.0)
    status, shown, err = run(capsys, "bench", numbers, "--seconds", "0.2", "--batch-size", "32", "--fields", "x,label")
    assert status == 0
    lines = shown.splitlines()
    assert re.search(r"700 samples, batches of 32, the first after \d+\.\d\d s$", lines[0])
    for word in ("fetch, 16 at once", "fetch and unpack", "loader", "samples/s", "MB/s", "CPU s/GB"):
        assert word in shown
    assert re.match(r"(network|decode|loader)-bound: \d\.\d\d of what ", lines[-1])
    assert not CONTROL.search(shown + err)
    assert re.match(r"fetch, 16 at once: 0 of 1 s", err)
    assert re.search(r"^fetch, \d+ at once: .* MB/s", err, re.MULTILINE)
    assert re.search(r"^loader: .* samples/s", err, re.MULTILINE)


def test_bench_prints_json(numbers, capsys):
    status, shown, _ = run(capsys, "bench", numbers, "--seconds", "0.1", "--memory", "64MiB", "--json")
    assert status == 0
    result = json.loads(shown)
    assert (result["num_samples"], result["batch_size"]) == (700, 256)
    assert [stage["name"] for stage in result["stages"]][-1] == "loader"
    assert result["verdict"].split("-")[0] in ("network", "decode", "loader")


def test_bench_decodes_images_to_the_given_size(tmp_path, capsys):
    write_images(tmp_path / "images", (encoded(picture(i), "jpeg") for i in range(40)))
    for size, decoded in (("16x20", True), ("0", False)):
        shown = run(capsys, "bench", tmp_path / "images", "--seconds", "0.1", "--image-size", size)[1]
        assert ("decode image from memory" in shown) == decoded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no dataset at"),
        (["no://such/store"], "no"),
        (["{data}", "--fields", "x,nope"], "there is no field 'nope'"),
        (["{data}", "--split", "train"], "has no splits"),
        (["{data}", "--batch-size", "0"], "--batch-size"),
        (["{data}", "--seconds", "0"], "seconds=0"),
        (["{data}", "--memory", "much"], "--memory 'much' is not a size"),
        (["{data}", "--memory", "1000"], "but memory=1000; give memory="),
        (["{data}", "--memory", "1000"], " or more, or a smaller batch_size or shuffle"),
        (["{data}", "--image-size", "big"], "--image-size 'big'"),
        (["{data}", "--storage-option", "x"], "name=value"),
        (["{empty}"], "has no samples"),
    ],
)
def test_a_failed_bench_prints_one_line(arguments, message, numbers, tmp_path, capsys):
    write(tmp_path / "empty", 0, ["x"])
    filled = [part.format(data=numbers, empty=tmp_path / "empty") for part in arguments]
    assert message in fails(capsys, "bench", *filled)


@pytest.mark.long
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_bench_at_once(numbers, capsys, monkeypatch):
    shown = threading.Event()
    monkeypatch.setattr(Display, "show", lambda *_: shown.set())

    def interrupt():
        shown.wait(300)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert run(capsys, "bench", numbers, "--seconds", "10000") == (130, "", "interrupted\n")
    assert_threads_end()


def test_progress_of_a_conversion_is_lines_in_a_pipe_or_ci_and_a_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("streamloader.cli.show.MIN_ESTIMATE_SECONDS", 0.0)
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 256, (640, 1024), np.uint8))
    # else a thread shows what there is at its own times
    monkeypatch.setattr(rich.progress.Progress, "update", partialmethod(rich.progress.Progress.update, refresh=True))
    monkeypatch.chdir(tmp_path)
    options = ["--workers", "0", "--shard-size", "32KiB"]
    convert = partial(on_a_terminal, "convert", "rows.npy")
    status, _, err = run(capsys, "convert", "rows.npy", "a", *options)
    in_ci = convert("b", *options, CI="true")
    assert (status, in_ci[0]) == (0, 0)
    for lines in (err, in_ci[1].replace("\r\n", "\n")):
        assert not CONTROL.search(lines)
        assert re.search(r"^write: 640 of 640 samples, [\d,]+ samples/s, [\d,.]+ MB/s$", lines, re.MULTILINE)
        assert len(lines.splitlines()) <= 20
    status, shown = convert("c", *options)
    assert status == 0
    for word in ("\x1b[", "samples/s", "MB/s", "640/640 samples", " left"):
        assert word in shown


def test_lines_come_at_the_start_of_a_phase_now_and_then_and_at_its_end(capsys, monkeypatch):
    now = iter([99.0, 100.0, 100.5, 102.0, 105.0, 106.0, 106.1, 106.2, 107.0])
    monkeypatch.setattr("streamloader.cli.show.time", SimpleNamespace(monotonic=lambda: next(now)))
    lines = Display()
    for done in (0, 10, 40, 50, 100, 100, 100):
        lines.show("write", done, 100, "samples", "9 samples/s")
    lines.show("finish", 100, 100, "samples")
    assert capsys.readouterr().err.splitlines() == [
        "write: 0 of 100 samples, 9 samples/s",
        "write: 50 of 100 samples, 9 samples/s, 0:00:05 left",
        "write: 100 of 100 samples, 9 samples/s",
        "finish: 100 of 100 samples",
    ]


def test_the_time_left_does_not_count_what_was_kept():
    assert time_left(600, 1000, kept=500, elapsed=10) == "0:00:40 left"
    assert time_left(500, 1000, kept=500, elapsed=10) == ""
    assert time_left(1, 3601, kept=0, elapsed=1) == "1:00:00 left"
