"""`streamloader bench`, and the progress that commands show: a bar on a terminal, plain lines in a pipe or CI."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import encoded, picture, write, write_images

from streamloader.cli.main import main
from streamloader.cli.progress import Lines, Step

COMMAND = [sys.executable, "-m", "streamloader.cli.main"]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\x1b]")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """700 samples of three fields."""
    folder = tmp_path_factory.mktemp("bench") / "data"
    write(folder, 700, ["x", "label", "tok"])
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *(str(argument) for argument in arguments)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def on_a_terminal(*command: str | Path, **environment: str) -> tuple[int, str]:
    """Run a command whose stderr is a terminal; return its status and what it showed there."""
    master, slave = os.openpty()
    variables = {**os.environ, "TERM": "xterm", "CI": "", **environment}
    with subprocess.Popen([*COMMAND, *command], stderr=slave, stdout=subprocess.DEVNULL, env=variables) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is closed when the process has ended
            while data := os.read(master, 65536):
                shown += data
    os.close(master)
    return process.returncode, shown.decode()


def test_bench_prints_a_table_and_a_sentence(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, told, err = run(capsys, dataset, "--seconds", "0.2", "--batch-size", "32", "--fields", "x,label")
    assert status == 0
    lines = told.splitlines()
    assert re.search(r"700 samples, batches of 32, the first after \d+\.\d\d s$", lines[0])
    for word in ("fetch, 16 at once", "fetch and unpack", "loader", "samples/s", "MB/s", "CPU s/GB"):
        assert word in told
    assert re.match(r"(network|decode|loader)-bound: \d\.\d\d of what ", lines[-1])
    assert not CONTROL.search(told + err)
    assert re.match(r"fetch, 16 at once: 0 of 1 s", err)


def test_bench_prints_json(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    status, told, _ = run(capsys, dataset, "--seconds", "0.2", "--memory", "64MiB", "--json", "--trace", trace)
    assert status == 0
    result = json.loads(told)
    assert (result["num_samples"], result["batch_size"]) == (700, 256)
    assert [stage["name"] for stage in result["stages"]][-1] == "loader"
    assert result["verdict"].split("-")[0] in ("network", "decode", "loader")
    assert all(set(json.loads(line)) >= {"step", "wait_seconds"} for line in trace.read_text().splitlines())


def test_bench_decodes_images_to_the_size_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "images", (encoded(picture(i), "jpeg") for i in range(40)))
    told = run(capsys, tmp_path / "images", "--seconds", "0.1", "--image-size", "16x20")[1]
    assert "decode image from memory" in told
    told = run(capsys, tmp_path / "images", "--seconds", "0.1", "--image-size", "0")[1]
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
def test_bad_input_is_one_line(
    arguments: list[str], says: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "empty", 0, ["x"])
    filled = [part.format(data=dataset, empty=tmp_path / "empty") for part in arguments]
    status, out, err = run(capsys, *filled)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert says in err


def test_a_bench_on_a_terminal_shows_a_bar_with_rate_and_time_left(dataset: Path) -> None:
    status, shown = on_a_terminal("bench", str(dataset), "--seconds", "0.7")
    assert status == 0
    assert "\x1b[" in shown
    for word in ("loader", "samples/s", "MB/s", " left"):
        assert word in shown


def test_ci_gets_plain_lines_even_on_a_terminal(dataset: Path) -> None:
    status, shown = on_a_terminal("bench", str(dataset), "--seconds", "0.2", CI="true")
    assert status == 0
    assert not CONTROL.search(shown.replace("\r\n", "\n"))
    assert "loader: " in shown


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_bench_at_once(dataset: Path) -> None:
    command = [*COMMAND, "bench", str(dataset), "--seconds", "100"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "fetch, 16 at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted"


def test_a_conversion_tells_its_rate_and_the_time_left(tmp_path: Path) -> None:
    # forty shards of 0.03 s at least: the time left is not guessed before half a second
    (tmp_path / "slowly.py").write_text("import time\ndef same(batch):\n    time.sleep(0.03)\n    return batch\n")
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 256, (1280, 1024), np.uint8))
    command = ["convert", str(tmp_path / "rows.npy")]
    options = ["--workers", "1", "--shard-size", "32KiB", "--map", "slowly:same", "--map-batch", "32"]
    path = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*COMMAND, *command, str(tmp_path / "a"), *options],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **path},
    )
    assert not CONTROL.search(done.stderr)
    assert re.search(r"^write: 1280 of 1280 samples, [\d,]+ samples/s, [\d,.]+ MB/s$", done.stderr, re.MULTILINE)
    assert len(done.stderr.splitlines()) <= 20
    status, shown = on_a_terminal(*command, str(tmp_path / "b"), *options, **path)
    assert status == 0
    assert "\x1b[" in shown
    for word in ("samples/s", "MB/s", "1280/1280 samples", " left"):
        assert word in shown


def test_lines_come_at_the_start_of_a_phase_now_and_then_and_at_its_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 100.5, 102.0, 105.0, 106.0, 106.1, 106.2, 107.0])
    monkeypatch.setattr("streamloader.cli.progress.time.monotonic", lambda: next(now))
    lines = Lines()
    for done in (0, 10, 40, 50, 100, 100, 100):
        lines.show(Step("write", done, 100, "samples", "9 samples/s"))
    lines.show(Step("finish", 100, 100, "samples"))
    assert capsys.readouterr().err.splitlines() == [
        "write: 0 of 100 samples, 9 samples/s",
        "write: 50 of 100 samples, 9 samples/s, 0:00:05 left",
        "write: 100 of 100 samples, 9 samples/s",
        "finish: 100 of 100 samples",
    ]


def test_the_time_left_does_not_count_what_was_kept() -> None:
    resumed = Step("write", 600, 1000, "samples", begun=500)
    assert resumed.left(10) == "0:00:40 left"
    assert Step("write", 500, 1000, "samples", begun=500).left(10) == ""
    assert Step("write", 1, 3601, "samples").left(1) == "1:00:00 left"
