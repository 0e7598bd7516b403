"""Commands of `streamloader`: in this process, or in one of their own with a terminal."""

import contextlib
import os
import subprocess
import sys

import pytest

from streamloader.cli.main import main

COMMAND = [sys.executable, "-m", "streamloader.cli.main"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command here; return its status and what it wrote to stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def on_a_terminal(*command: object, **environment: str) -> tuple[int, str]:
    """Run a command whose stderr is a terminal; return its status and what it showed there."""
    master, slave = os.openpty()
    variables = {**os.environ, "TERM": "xterm", "CI": "", **environment}
    arguments = [*COMMAND, *map(str, command)]
    with subprocess.Popen(arguments, stderr=slave, stdout=subprocess.DEVNULL, env=variables) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is closed when the process has ended
            while data := os.read(master, 65536):
                shown += data
    os.close(master)
    return process.returncode, shown.decode()
