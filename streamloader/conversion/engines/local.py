"""Tasks in processes of this machine.

Workers are started as programs of their own, not forked: an object client that was used before a fork hangs.
They inherit a socket and the reading end of a pipe, nothing with a name: so a kill -9 of any process leaves no
semaphore, no shared memory and, since the pipe then closes, no process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from streamloader.conversion.engines.drive import ATTEMPTS
from streamloader.conversion.engines.house import deaf_to_ctrl_c
from streamloader.conversion.task import Outcome, Task
from streamloader.errors import EngineError, StreamloaderError

ENDING_SECONDS = 10.0  # for printing a traceback and leaving the interpreter

# glibc gives every large array back to the system at once, and the next shard's pages are cleared again: 1.7 times as
# fast without (bench/NOTES.md). One arena, also for Arrow: what one thread or library lets go another takes. A worker
# holds its peak until it ends; other C libraries ignore these.
KEPT_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_ARENA_MAX": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}

OnDone = Callable[[Task, Outcome], None]


def run_tasks(tasks: Iterator[Task], workers: int, on_done: OnDone, spare: list[Worker] | None = None) -> None:
    """Do all tasks in `workers` processes, each of which reads one while it writes another; 0 does them in this one.

    Those of `spare`, which `starting` began, are taken first.

    `on_done` is called here, in the order in which tasks end. After a failure no further task is begun, those
    under way are finished, and the failure of the earliest task is raised. A task whose worker is killed
    is done again, `ATTEMPTS` times in all; then, or when a worker fails in a way of its own, `EngineError`.
    """
    if workers == 0:
        for task in tasks:
            on_done(task, task.run())
        return
    crew = _Crew(tasks, on_done, [] if spare is None else spare)
    try:
        crew.run(workers)
    finally:
        crew.close()
    if crew.failures:
        raise crew.failures[min(crew.failures)]


@contextlib.contextmanager
def starting(count: int) -> Iterator[list[Worker]]:
    """Begin to start so many processes, which takes some tenths of a second; end those that nobody took."""
    spare: list[Worker] = []
    try:
        for _ in range(count):
            spare.append(Worker())
        yield spare
    finally:
        for worker in spare:
            worker.close()


@dataclass
class _Assignment:
    """One task on its way: its number in the order of the tasks, and how often it was begun."""

    number: int
    task: Task
    attempts: int = 0


class Worker:
    """One process with the tasks that it is at."""

    def __init__(self) -> None:
        self.channel, theirs = Pipe()
        hear, self._lifeline = os.pipe()
        command = [
            sys.executable,
            "-P",
            "-m",
            "streamloader.conversion.engines.worker",
            str(theirs.fileno()),
            str(hear),
        ]
        with deaf_to_ctrl_c():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), hear),
                env={**KEPT_MEMORY, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        theirs.close()
        os.close(hear)
        self.assigned: deque[_Assignment] = deque()
        self.ready = True  # for another task

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def begin(self, assigned: _Assignment) -> None:
        """Hand it a task."""
        assigned.attempts += 1
        self.assigned.append(assigned)
        self.ready = False
        with contextlib.suppress(ConnectionError):  # it has died: its closed channel is noticed in any case
            self.channel.send(assigned.task)

    def wait(self) -> int:
        """Return the status of a process that closed its channel, so that it is ending: -n where signal n ended it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        return self.close()

    def close(self) -> int:
        """End the process, at once where it still runs, and return its status."""
        self._process.kill()  # does nothing to one that has ended
        self.channel.close()
        os.close(self._lifeline)
        return self._process.wait()


class _Crew:
    """The workers of one run, and what is left to do."""

    def __init__(self, tasks: Iterator[Task], on_done: OnDone, spare: list[Worker]) -> None:
        self.failures: dict[int, StreamloaderError] = {}
        self._todo = (_Assignment(number, task) for number, task in enumerate(tasks))
        self._again: list[_Assignment] = []
        self._on_done = on_done
        self._spare = spare
        self._workers: list[Worker] = []

    def run(self, count: int) -> None:
        """Work until nothing is left, or until those under way have ended after a failure."""
        while True:
            while len(self._workers) < count and (assigned := self._next()):
                worker = self._spare.pop() if self._spare else Worker()
                self._workers.append(worker)
                worker.begin(assigned)
            busy: dict[Connection, Worker] = {w.channel: w for w in self._workers if w.assigned or not w.ready}
            if not busy:
                return
            for channel in wait(list(busy)):
                self._hear(busy[channel])  # type: ignore[index]  # it is one of those that we gave

    def close(self) -> None:
        """End every worker, at once."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _next(self, beside: Collection[_Assignment] = ()) -> _Assignment | None:
        """Return what is to be begun in a worker that is at the tasks `beside`.

        What a worker died at is done alone: so it is known in the end at which task they die.
        """
        if self.failures or any(one.attempts > 1 for one in beside):
            return None
        if self._again:
            return None if beside else self._again.pop()
        return next(self._todo, None)

    def _hear(self, worker: Worker) -> None:
        try:
            answer: Outcome | StreamloaderError | None = worker.channel.recv()
        except (EOFError, OSError):  # OSError: killed in the middle of its answer
            self._workers.remove(worker)
            self._bury(worker)
            return
        if answer is None:
            worker.ready = True
        elif isinstance(answer, StreamloaderError):
            self.failures[worker.assigned.popleft().number] = answer
        else:
            self._on_done(worker.assigned.popleft().task, answer)
        if worker.ready and (following := self._next(worker.assigned)):
            worker.begin(following)

    def _bury(self, worker: Worker) -> None:
        status = worker.wait()
        for assigned in reversed(worker.assigned):
            what = f"the worker that wrote shard {assigned.task.shard} of {assigned.task.store.url}"
            if status >= 0:
                raise EngineError(
                    f"{what} failed with status {status}", "its error stands above; this is a bug, please report it"
                )
            if assigned.attempts >= ATTEMPTS:
                name = signal.Signals(-status).name
                remedy = "if memory ran out, use fewer workers or a smaller shard size; then run the same command again"
                raise EngineError(f"{what} was ended by {name}, {assigned.attempts} times in all", remedy)
            self._again.append(assigned)
