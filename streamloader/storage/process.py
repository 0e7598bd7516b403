"""What belongs to one process: after a fork, nothing that a child inherits is used by it.

`PerProcess` keeps a value for each process, `Owner` refuses another process. One fact is global: whether obstore was
used. Its runtime hangs in a child that was forked after it had been used, even with a new store. The process that first
uses it notes its id; a process with another id has inherited the note by a fork.

Then its plain threads: the same work on many items (`run_all`), and waits that a signal ends; and its cores.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from streamloader.errors import ForkError

FORKED_REASON = "forked after obstore was used; use forkserver or spawn"

Made = TypeVar("Made")


class PerProcess(Generic[Made]):
    """A value that each process makes for itself, once. Thread-safe; pickles without values."""

    def __init__(self) -> None:
        self._made: dict[int, Made] = {}
        self._locks: dict[int, threading.RLock] = {}  # a child may inherit one that was held

    def get(self, make: Callable[[], Made]) -> Made:
        """Return this process's value, made at the first call."""
        pid = os.getpid()
        if pid not in self._made:
            with self._locks.setdefault(pid, threading.RLock()):
                if pid not in self._made:
                    self._made[pid] = make()
        return self._made[pid]

    def __reduce__(self) -> tuple[Any, ...]:
        return (PerProcess, ())

    def all(self) -> Iterable[Made]:
        """Return the values of this process and those that it inherited, which are only to be looked at."""
        return list(self._made.values())


class Owner:
    """The process in which this was made."""

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, os.getpid()

    @property
    def here(self) -> bool:
        """Whether that is this process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `ForkError` in another process."""
        if not self.here:
            raise ForkError(f"the {self._what} are of another process", "ask the store for a reader in this process")


def finalize(watched: object, call: Callable[..., None], *held: Any) -> weakref.finalize[..., Any]:
    """As `weakref.finalize`, but not in a child that is forked: it has no such threads, and perhaps held locks."""
    return weakref.finalize(watched, _call_here, Owner("objects"), call, *held)


def _call_here(owner: Owner, call: Callable[..., None], *held: Any) -> None:
    if owner.here:
        call(*held)


_INHERITED: list[object] = []  # never freed: that would touch what the parent still uses


def keep(value: object) -> None:
    """Keep a value of the parent process until this process ends."""
    _INHERITED.append(value)


_OBSTORE_USERS: set[int] = set()  # processes: this one, or one that it was forked from
_WARNED: set[int] = set()


def note_obstore_use() -> None:
    """Remember that this process uses obstore from now on."""
    _OBSTORE_USERS.add(os.getpid())


def forked_after_obstore() -> bool:
    """Return whether a process that had used obstore forked this one; warn once, with a better start method."""
    if not _OBSTORE_USERS - {os.getpid()}:
        return False
    if os.getpid() not in _WARNED:
        _WARNED.add(os.getpid())
        warnings.warn(
            "this process was forked after obstore was used: it reads through fsspec, which is slower; "
            "start processes with forkserver or spawn, e.g. DataLoader(multiprocessing_context='forkserver')",
            RuntimeWarning,
            stacklevel=2,
        )
    return True


Item = TypeVar("Item")
Result = TypeVar("Result")

# The interpreter looks for signals before it begins to wait, and then gives its lock away, which takes long where other
# threads want it. A signal that comes in between wakes nobody: so a wait is of short waits, with a look between them.
SIGNAL_SECONDS = 0.5


def wait_for(wait: Callable[[float], bool]) -> None:
    """Call `wait(seconds)` until it returns True, so that Ctrl-C ends the wait whenever it comes."""
    while not wait(SIGNAL_SECONDS):
        pass


def take(queue: SimpleQueue[Item]) -> Item:
    """Return the next item of a queue once there is one; Ctrl-C ends the wait."""
    while True:
        with suppress(Empty):
            return queue.get(timeout=SIGNAL_SECONDS)


def join(threads: Iterable[threading.Thread]) -> None:
    """Wait until all of the threads have ended; Ctrl-C ends the wait."""
    for thread in threads:
        while thread.is_alive():
            thread.join(SIGNAL_SECONDS)


def run_all(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Return `[work(item) for item in items]`, done by up to `threads` threads.

    The first failure is raised when the items in work have ended; no further ones are begun. The threads are
    daemons: an executor's would keep the interpreter from leaving while a request stalls. A single item gets one
    too, since Ctrl-C waits for a client's call on the main thread.
    """
    todo = list(enumerate(items))
    if threads <= 1 or not todo:
        return [work(item) for _, item in todo]
    todo.reverse()
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def consume() -> None:
        while not failures:
            try:
                index, item = todo.pop()  # atomic
            except IndexError:
                return
            try:
                results[index] = work(item)
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                failures.append(error)

    count = len(todo)
    pool = [threading.Thread(target=consume, name="streamloader-io", daemon=True) for _ in range(min(threads, count))]
    try:
        for thread in pool:
            thread.start()
        join(pool)
    except BaseException:  # Ctrl-C: the threads stop after the item they are at
        todo.clear()
        raise
    try:
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # its traceback has this frame
    return [results[index] for index in range(count)]


def cpu_count() -> int:
    """Return the cores that this process may use: its affinity, or the control group's quota if less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))
