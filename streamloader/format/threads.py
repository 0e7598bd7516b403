"""Plain threads: the same work on many items, and waits that a signal ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

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
    crew = [threading.Thread(target=consume, name="streamloader-io", daemon=True) for _ in range(min(threads, count))]
    try:
        for thread in crew:
            thread.start()
        join(crew)
    except BaseException as error:
        failures.append(error)  # Ctrl-C: the others stop after the item they are at
        raise
    if failures:
        raise failures[0]
    return [results[index] for index in range(count)]


def cpu_count() -> int:
    """Return the cores that this process may use: its affinity, or the control group's quota if less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))
