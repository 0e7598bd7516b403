"""What commands write to real terminals, dumb ones, narrow ones, those without Unicode, and to pipes."""

import fcntl
import os
import re
import struct
import subprocess
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from commands import COMMAND, run
from datasets import encoded, picture
from hypothesis import given
from hypothesis import strategies as st

import streamloader as sl
from streamloader.cli.show import print_table, printable
from streamloader.cli.terminal import has_colors, has_unicode, progress_line, redraws

COLOR = re.compile(r"\x1b\[[\d;]*m")
ESCAPE = re.compile(r"\x1b\[[?\d;]*[a-zA-Z]")
UTF = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
OURS = ("CI", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LC_CTYPE", "LANG", "PYTHONUTF8")


def on_terminal(arguments, env, columns=80):
    """Run a command in a process whose output and errors are a terminal; return its status and what it wrote there."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    with ThreadPoolExecutor(1) as pool, os.fdopen(master, "rb", buffering=0) as file:
        shown = pool.submit(read_all, file)
        command = [*COMMAND, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**clean, **env})
        os.close(slave)
        status = process.wait(300)
        return status, shown.result().decode()


def read_all(file):
    shown = b""
    try:
        while data := file.read(65536):
            shown += data
    except OSError:  # the other end is closed
        pass
    return shown


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    np.save(folder / "rows.npy", np.random.default_rng(0).integers(0, 256, (640, 1024), np.uint8))
    return folder


def convert(rows, name, env, columns=80):
    arguments = "convert", rows / "rows.npy", rows / name, "--workers", "0", "--shard-size", "32KiB"
    status, shown = on_terminal(arguments, env, columns)
    assert status == 0, shown
    return shown


def frames(shown):
    """The lines that were drawn, without what moves the cursor and colours."""
    return [ESCAPE.sub("", line) for line in re.split(r"[\r\n]+", shown)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("columns", [24, 80, 12, 40, 200])
def test_a_bar_is_one_line_of_the_terminal_however_narrow_it_is(columns, rows):
    shown = convert(rows, f"w{columns}", UTF, columns)
    bars = [line for line in frames(shown) if line.startswith(("write", "finish"))]
    assert bars
    assert max(map(len, bars)) < columns
    assert ("━" in shown) == (columns >= 40)
    assert COLOR.search(shown) and "\x1b[?25h" in shown, "the cursor is shown again"


def test_a_terminal_without_unicode_gets_ascii(rows):
    shown = convert(rows, "ascii", {**UTF, "LC_ALL": "C"})
    assert "###" in shown and shown.isascii()
    status, shown = on_terminal(["inspect", rows / "ascii"], {**UTF, "LC_ALL": "POSIX"}, 120)
    assert status == 0 and shown.isascii() and "+---" in shown


def test_a_table_that_is_too_wide_is_printed_as_rows_below_each_other(rows):
    convert(rows, "table", UTF)
    wide, narrow = (on_terminal(["inspect", rows / "table"], {**UTF, "NO_COLOR": "1"}, size)[1] for size in (120, 40))
    assert "━" in wide and "━" not in narrow
    assert "field: rows\r\n  kind: uint8[1024]\r\n  decoded: 640.0 KiB\r\n" in narrow


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"CI": "true"}], ids=str)
def test_dumb_terminals_and_ci_get_lines_without_escapes(env, rows):
    shown = convert(rows, "-".join(env), {**UTF, **env})
    assert "\x1b" not in shown
    assert "write: 640 of 640 samples" in shown


def test_no_color_leaves_the_bar(rows):
    shown = convert(rows, "plain", {**UTF, "NO_COLOR": "1"})
    assert "━" in shown and not COLOR.search(shown)


def test_errors_and_verdicts_are_coloured_on_a_terminal_and_never_in_a_pipe(rows, tmp_path):
    sl.convert(rows / "rows.npy", tmp_path / "d", workers=0)
    assert on_terminal(["verify", tmp_path / "d", "--quiet"], UTF)[1].count("\x1b[32m\x1b[1mOK\x1b[0m") == 1
    (shard,) = [path for path in (tmp_path / "d/rows/c").rglob("*") if path.is_file()]
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    status, shown = on_terminal(["verify", tmp_path / "d", "--quiet"], UTF)
    assert status == 1 and "\x1b[31mproblem:\x1b[0m" in shown and "\x1b[31m\x1b[1m1 problem\x1b[0m" in shown
    status, shown = on_terminal(["inspect", tmp_path / "nothing"], UTF)
    assert status == 2 and shown.startswith("\x1b[31m\x1b[1merror:\x1b[0m there is no dataset")
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    for arguments in (["verify", tmp_path / "d"], ["inspect", tmp_path / "nothing"], ["inspect", tmp_path / "d"]):
        done = subprocess.run([*COMMAND, *map(str, arguments)], env={**clean, **UTF}, capture_output=True, check=False)
        assert b"\x1b" not in done.stdout + done.stderr
    forced = subprocess.run(done.args, env={**clean, "FORCE_COLOR": "1"}, capture_output=True, check=False)
    assert forced.stderr.startswith(b"\x1b[31m\x1b[1merror:")


TTY_CASES = [
    ({}, True),
    ({"NO_COLOR": "1"}, False),
    ({"NO_COLOR": ""}, True),
    ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ({"TERM": "dumb"}, False),
    ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ({"CI": "true"}, False),
    ({"CI": "false"}, True),
    ({"CI": "1", "CLICOLOR_FORCE": "1"}, True),
    ({"CLICOLOR": "0"}, False),
    ({"FORCE_COLOR": "0"}, True),
]


@pytest.mark.parametrize(("env", "expected"), TTY_CASES, ids=str)
def test_colours_follow_the_conventions_of_the_environment(env, expected):
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal, os.fdopen(master), Path(os.devnull).open("w") as file:
        assert has_colors(terminal, env) == expected
        forced = {"FORCE_COLOR", "CLICOLOR_FORCE"} & {name for name, value in env.items() if value == "1"}
        assert has_colors(file, env) == (bool(forced) and expected)
        assert not redraws(file, env)
        assert has_unicode(terminal, {"LANG": "de_DE.UTF-8"}, posix=True)
        assert not has_unicode(terminal, {"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, posix=True)
        assert has_unicode(file, {}, posix=True)


@given(
    st.integers(1, 250),
    st.booleans(),
    st.one_of(st.none(), st.floats(-1, 2)),
    st.lists(st.text("abc 123/", max_size=30), max_size=4),
)
def test_a_line_of_progress_fits_and_begins_with_the_phase(width, unicode, share, details):
    before, bar, after = progress_line(width, unicode, share, "write", *details)
    line = before + bar + after
    assert len(line) < width or (width == 1 and not line)
    assert line.startswith("write"[: width - 1])
    assert unicode or line.isascii()
    assert not bar or 10 <= len(bar) <= 40


def test_what_a_dataset_has_does_not_reach_the_terminal_as_a_command(capsys):
    print_table(("field",), [("\x1b]0;title\x07\x9b2J",)], ())
    assert r"\x1b]0;title\x07\x9b2J" in capsys.readouterr().out
    assert printable("é\n") == r"é\x0a"
    assert (
        printable("sa\u200bfe \u202e\u2066\u2028\ufeff\U000e0041") == r"sa\u200bfe \u202e\u2066\u2028\ufeff\U000e0041"
    )
    assert printable("été, 写真, سلام, צילום") == "été, 写真, سلام, צילום"


def test_names_of_files_do_not_reach_the_terminal_as_commands(tmp_path, capsys):
    name = "\x1b]0;title\x07"
    folder = tmp_path / "files" / f"class{name}"
    folder.mkdir(parents=True)
    (folder / "good.png").write_bytes(encoded(picture(0), "png"))
    (folder / f"bad{name}.png").write_bytes(b"nothing")
    data = tmp_path / f"data{name}"
    outputs = [run(capsys, "convert", tmp_path / "files", data, "--on-error", "skip", "--workers", "1")]
    outputs += [run(capsys, command, data) for command in ("inspect", "verify", "plan", "ls")]
    assert [status for status, *_ in outputs] == [3, 0, 0, 0, 0]
    for _, out, err in outputs:
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out + err)
    assert r"bad\x1b]0;title\x07.png" in outputs[0][2]
