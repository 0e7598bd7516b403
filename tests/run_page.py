"""Runs the code of one page of the documentation, in order, as a reader would; a script, not a test.

run_page.py page.json out.json: page.json holds [[language, line, code], ...]; out.json gets what each block printed.
Python blocks share one namespace. One that begins with `# <name>.py` is a file: it is written, and may be imported
by what follows. A failure is a traceback with the page's own line numbers, and exit code 1.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
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


def main() -> None:
    """Run the page in the present folder."""
    page, out = map(Path, sys.argv[1:])
    sys.path.insert(0, "")
    names: dict[str, Any] = {"__name__": "page"}
    printed = [run(language, page.stem, line, code, names) for language, line, code in json.loads(page.read_text())]
    out.write_text(json.dumps(printed))


if __name__ == "__main__":
    main()
