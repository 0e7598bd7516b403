"""What a cluster that is started on this machine needs here: a folder, and a process that is afterwards as before."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

LOG_TAIL = 400  # characters: the end of what a program printed before it gave up

REMOVALS = 3  # what a dying process still writes makes one fail

# Reads numbers of processes until the pipe's other end is closed, then kills them, and removes the folder as long as
# dying processes put something into it.
GUARD = """while read -r pid; do pids="$pids $pid"; done
[ -z "$pids" ] || kill -9 $pids
for _ in 1 2 3 4 5 6 7 8 9 10; do rm -rf "$0"; sleep 1; [ -e "$0" ] || exit 0; done"""


@dataclass(frozen=True)
class Scratch:
    """An empty folder for temporary files, and the shell that removes it when this process is killed."""

    folder: Path
    guard: subprocess.Popen[str]

    def kill_with_us(self, pids: Iterable[int]) -> None:
        """Have these processes killed too when this process is killed."""
        assert self.guard.stdin is not None
        self.guard.stdin.writelines(f"{pid}\n" for pid in pids)
        self.guard.stdin.flush()


@contextlib.contextmanager
def scratch(parent: str | None = None) -> Iterator[Scratch]:
    """Make a folder, and remove it in the end, also when this process is killed.

    A shell of its own holds the reading end of a pipe: it hears when the writing end, which only this process has, is
    closed, in whatever way that comes about.
    """
    folder = Path(tempfile.mkdtemp(prefix="streamloader-", dir=parent))
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal does not reach it
        text=True,
    )
    try:
        yield Scratch(folder, guard)
    finally:
        for _ in range(REMOVALS):
            shutil.rmtree(folder, ignore_errors=True)
        guard.kill()
        guard.communicate()


def kill_all(psutil: ModuleType, family: Iterable[Any]) -> None:
    """Kill processes, as psutil knows them, and wait until all of them are gone."""
    family = list(family)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family)


@contextlib.contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Start a program here, and SIGINT is blocked in it from its first instruction on.

    Ctrl-C in a terminal reaches the whole process group: the starter decides. An interpreter that is still importing
    would print a traceback. To this process it comes at the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Keep the handlers of SIGINT and SIGTERM: Ray and Spark set theirs, which outlive their clusters.

    Ctrl-C comes at the end of the block: a client of Ray whose start it cuts would crash. The second one comes at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    if before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Keep the environment variables and the module path, to which Ray and Spark add theirs."""
    before, path = dict(os.environ), list(sys.path)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        sys.path[:] = path
