"""A virtual environment for each peer, made on demand from bench/peers/requirements/<peer>.txt.

A first line `# python 3.12` names an interpreter, which must be on the PATH. `<peer>.nodeps.txt`, where there is one,
is installed afterwards without its dependencies: of a package that would bring several GB which the bench does not use.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.workloads import ROOT

VENVS = ROOT / "bench" / ".venvs"
REQUIREMENTS = ROOT / "bench" / "peers" / "requirements"


def python_of(peer: str) -> Path:
    """Return the interpreter of the peer's environment."""
    return VENVS / peer / "bin" / "python"


def requirements_of(peer: str) -> list[Path]:
    """Return the peer's files of requirements, in the order of their installation."""
    files = [REQUIREMENTS / f"{peer}.txt", REQUIREMENTS / f"{peer}.nodeps.txt"]
    return [path for path in files if path.exists()]


def make(peer: str, say: Callable[[str], None]) -> str:
    """Make the environment unless it is there as its requirements are now; return what went wrong, or nothing."""
    files = requirements_of(peer)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    stamp = VENVS / peer / "requirements.sha256"
    if stamp.exists() and stamp.read_text() == digest:
        return ""
    say(f"installing {peer} into bench/.venvs/{peer}")
    if not python_of(peer).exists():
        named = re.match(r"# python (\S+)", files[0].read_text())
        interpreter = shutil.which(f"python{named[1]}") if named else sys.executable
        if interpreter is None:
            return f"{peer} needs python{named[1] if named else ''} on the PATH"
        subprocess.run([interpreter, "-m", "venv", str(VENVS / peer)], check=True)
    for path in files:
        options = ["--no-deps"] if path.name.endswith(".nodeps.txt") else []
        command = [str(python_of(peer)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*command, *options, "-r", str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"pip could not install {path.name}: {done.stderr.strip().splitlines()[-1:]}"
    stamp.write_text(digest)
    return ""


def versions(peer: str) -> str:
    """Return the pinned versions as the requirements name them: the peer first asked for comes last."""
    names = [line.strip() for path in requirements_of(peer) for line in path.read_text().splitlines()]
    return ", ".join(line for line in names if line and not line.startswith(("#", "-")))
