"""Starts tests/ranks.py under torchrun and collects what the ranks wrote."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def environment() -> dict[str, str]:
    """The environment of a child process: imports what this one does, warns of nothing that is not asked for."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


STOP = """
import builtins, os, signal

def stop(*words, show=print, **how):
    show(*words, **how)
    if words == ({line!r},):
        os.kill(os.getpid(), signal.SIGSTOP)

builtins.print = stop
"""


def stopping_at(folder: Path, line: str) -> dict[str, str]:
    """The environment of a run that gets no further than this line, which it prints, until it is killed."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STOP.format(line=line))
    given = environment()
    return given | {"PYTHONPATH": os.pathsep.join([str(folder), given["PYTHONPATH"]])}


def command(ranks: int, script: str, *arguments: str, log: Path) -> list[str]:
    """torchrun of a script of this folder, on a port of its own choice, with its log in a folder that is given."""
    options = ["--nnodes=1", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    options.append(f"--log-dir={log}")
    return [sys.executable, "-m", "torch.distributed.run", *options, str(TESTS / script), *arguments]


def run_python(*arguments: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and further environment variables, and assert that its exit code is 0."""
    command, given = [sys.executable, *map(str, arguments)], environment() | variables
    done = subprocess.run(command, env=given, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done


def run_ranks(folder: Path, ranks: int, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each rank wrote for each case of the job; `folder` keeps their standard error."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    done = run_python(*command(ranks, "ranks.py", str(folder / "job.json"), log=folder / "logs")[1:])
    (folder / "stderr").write_text(done.stderr)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
