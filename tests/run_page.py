"""Runs the code of one page of the documentation, in order, as a reader would, in the process that calls it."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = re.compile(r"# ([a-z_]+\.py)\n")


def run(language: str, where: str, line: int, code: str, names: dict[str, Any]) -> str:
    """Run one block and return what it printed on standard output."""
    if language == "bash":
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{where}:{line}: bash ended with {done.returncode}\n{done.stdout}")
        return done.stdout
    file = FILE.match(code)
    if file:
        Path(file[1]).write_text(code)
        return ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile("\n" * (line - 1) + code, where, "exec"), names)
    return printed.getvalue()


def run_page(blocks: Sequence[tuple[str, int, str]], out: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Run blocks (language, line, code) in a folder; `out` gets what each printed, and `out`.log standard error.

    Python blocks share one namespace. One that begins with `# <name>.py` is a file: it is written, and may be imported
    by what follows. A failure is a traceback with the page's own line numbers.
    """
    with out.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "wb", closefd=False), write_through=True)
    warnings.simplefilter("default")  # in the tests they are errors
    os.chdir(folder)
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    names: dict[str, Any] = {"__name__": "page"}
    out.write_text(json.dumps([run(language, out.stem, line, code, names) for language, line, code in blocks]))
