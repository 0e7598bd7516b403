"""Starts the ranks of a training run with torchrun, hears what they say, and kills them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamloader.errors import EngineError

RUN_SECONDS = 240.0

Event = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A training: the dataset, the folder of its checkpoint and logs, its last epoch, the whole environment."""

    url: str
    folder: Path
    epochs: int
    env: Mapping[str, str]

    def command(self, run: str, ranks: int) -> list[str]:
        """Return the command that trains with so many processes; nothing but the loopback device is used."""
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--log-dir={self.folder}/tmp",
        ]
        script = ["-m", "streamloader.demo.train", self.url, str(self.folder), run, str(self.epochs)]
        return [sys.executable, *torchrun, f"--nproc-per-node={ranks}", *script]


class Ranks:
    """A run in progress: iterate over what its ranks say."""

    def __init__(self, process: subprocess.Popen[str], run: str) -> None:
        self.process = process
        self.run = run
        self.pids: list[int] = []

    def __iter__(self) -> Iterator[Event]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                event: Event = json.loads(line)
                if event["event"] == "started":
                    self.pids.append(event["pid"])
                yield event

    def kill(self) -> None:
        """Send SIGKILL to every rank, and wait until torchrun has given up. Raises `EngineError` if it was content."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in self:
            pass
        if self.process.wait(RUN_SECONDS) == 0:
            raise EngineError("the training had ended before it was killed", "run the demo again")


@contextmanager
def ranks(job: Job, run: str, count: int) -> Iterator[Ranks]:
    """Start `count` ranks; none is left at the end of the block, nor if this process is killed before.

    Raises `EngineError` where a run that was not killed failed.
    """
    log = job.folder / f"{run}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            job.command(run, count),
            stdin=subprocess.PIPE,  # its end tells the ranks that this process has ended
            stdout=subprocess.PIPE,
            stderr=errors,
            env=dict(job.env),
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    watchdog = threading.Timer(RUN_SECONDS, _end, [process])
    watchdog.daemon = True
    watchdog.start()
    started = Ranks(process, run)
    try:
        yield started
    finally:
        watchdog.cancel()
        _end(process)
        process.wait()
        process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    """Kill torchrun; its ranks end when their standard input does."""
    process.kill()
    assert process.stdin is not None
    process.stdin.close()


def finish(running: Ranks, log: Path) -> list[Event]:
    """Return everything that the ranks still say. Raises `EngineError` if they fail."""
    events = list(running)
    code = running.process.wait(RUN_SECONDS)
    if code:
        raise EngineError(f"training ended with exit code {code}: {reason(log)}", f"see {log}")
    return events


def reason(log: Path) -> str:
    """Return the line of the log that says most, and how the rank ended that failed first.

    That line is a rank's own error, or another process's, or the last one; torchrun's own error only says that a rank
    failed, and its summary ends with the first.
    """
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if "ChildFailedError" not in line]
    ends = [line for line in lines if line.startswith("exitcode")]
    for says in (
        lambda line: line.startswith("[rank") and "Error" in line,
        lambda line: "Error" in line or line.startswith(("Fatal Python error", "what():", "terminate called", "FATAL")),
    ):
        for line in filter(says, said):
            return "; ".join([line, *ends[-1:]])
    return (ends or lines or ["it said nothing"])[-1]
