"""Commands of `streamloader`: in this process, where stderr may be a terminal, or in one of their own."""

import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

from streamloader.cli.main import main

COMMAND = [sys.executable, "-m", "streamloader.cli.main"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command here; return its status and what it wrote to stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def on_a_terminal(*arguments: object, **environment: str) -> tuple[int, str]:
    """Run a command here with a terminal as stderr; return its status and what it wrote there."""
    master, slave = os.openpty()
    with ThreadPoolExecutor(1) as pool:
        shown = pool.submit(_read, master)
        with (
            os.fdopen(slave, "w") as terminal,
            patch.dict(os.environ, {"TERM": "xterm", "CI": "", **environment}),
            contextlib.redirect_stderr(terminal),
            pytest.raises(SystemExit) as ended,
        ):
            main([str(argument) for argument in arguments])
        return int(ended.value.code or 0), shown.result()


def _read(master: int) -> str:
    shown = b""
    with (
        contextlib.suppress(OSError),
        os.fdopen(master, "rb", buffering=0) as file,
    ):  # an error: the other end is closed
        while data := file.read(65536):
            shown += data
    return shown.decode()
