"""The same tasks on any cluster: how many are under way, what is done again, which failure is raised."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from streamloader.conversion.task import Outcome, Task
from streamloader.errors import EngineError, StreamloaderError
from streamloader.format.threads import SIGNAL_SECONDS

ATTEMPTS = 3  # a worker that is killed three times at one shard will be killed a fourth time
FRAMES = 6  # the innermost ones of a bug's traceback, enough to find it

EXCERPT = 400  # characters of a message that may hold tracebacks of several programs


@dataclass(frozen=True)
class Bug:
    """What a task raised that is no error of ours: in a line with the innermost frames, and the whole traceback."""

    line: str
    text: str


Answer = Outcome | StreamloaderError | Bug


def attempt(task: Task) -> Answer:
    """Do the task in a worker. An error is an answer too: clusters wrap, print or retry those that are raised."""
    try:
        return task.run()
    except StreamloaderError as error:
        return error
    except Exception as error:  # noqa: BLE001 - handed to the caller, whatever it is
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        where = ", ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames))
        return Bug(f"{type(error).__name__}: {error} (at {where})", traceback.format_exc())


@dataclass(frozen=True)
class Cluster:
    """A cluster that does tasks: what an adapter makes of Dask, Ray or Spark, which `name` names.

    `submit` hands a task over; its future ends with the answer, or with an exception of the cluster's own. `deaths`
    says of such an exception how many workers died at the task; 0 if it is something else. `slots` is how many
    tasks the cluster does at a time, now; `ahead` how many it is given for each slot, so that none waits for us; `most`
    how many at the utmost, 0 for no such limit.
    """

    name: str
    submit: Callable[[Task], Future[Answer]]
    deaths: Callable[[BaseException], int]
    slots: Callable[[], int]
    ahead: int = 2
    most: int = 0

    def room(self) -> int:
        """Return how many tasks may be under way now. At least one: clusters that grow begin with no worker."""
        room = max(1, self.slots()) * self.ahead
        return min(room, self.most) if self.most else room


@dataclass
class _Assignment:
    """One task on its way: its number in the order of the tasks, and how many workers died at it."""

    number: int
    task: Task
    deaths: int = 0

    def __str__(self) -> str:
        return f"shard {self.task.shard} of {self.task.store.url}"


def drive(cluster: Cluster, tasks: Iterator[Task], on_done: Callable[[Task, Outcome], None]) -> None:
    """Do all tasks on the cluster, as `engine.py` promises. Raises what the earliest failed task raised."""
    todo = (_Assignment(number, task) for number, task in enumerate(tasks))
    again: list[_Assignment] = []
    under_way: dict[Future[Answer], _Assignment] = {}
    failures: dict[int, StreamloaderError] = {}
    while True:
        room = 0 if failures else cluster.room() - len(under_way)
        while room > 0 and (assigned := again.pop() if again else next(todo, None)):
            under_way[cluster.submit(assigned.task)] = assigned
            room -= 1
        if not under_way:
            break
        for future in wait(under_way, SIGNAL_SECONDS, FIRST_COMPLETED).done:  # short waits, so that Ctrl-C ends them
            assigned = under_way.pop(future)
            answer = _answer(cluster, future, assigned)
            if answer is None:
                again.append(assigned)
            elif isinstance(answer, StreamloaderError):
                failures[assigned.number] = answer
            else:
                on_done(assigned.task, answer)
    if failures:
        raise failures[min(failures)]


def _answer(cluster: Cluster, future: Future[Answer], assigned: _Assignment) -> Outcome | StreamloaderError | None:
    """Return what became of the task; None where it is to be done again."""
    failure = future.exception()
    if failure is None:
        answer = future.result()
        return _bug(answer, assigned) if isinstance(answer, Bug) else answer
    deaths = cluster.deaths(failure)
    if not deaths:
        problem = f"{cluster.name} could not do {assigned}: {type(failure).__name__}: {_short(str(failure))}"
        remedy = "its workers need the same Python, streamloader and packages as this process; see also its log"
        return EngineError(problem, remedy)
    assigned.deaths += deaths
    if assigned.deaths < ATTEMPTS:
        return None
    remedy = "if memory ran out, use fewer workers or a smaller shard size; then run the same command again"
    return EngineError(f"the worker that wrote {assigned} died, {assigned.deaths} times in all", remedy)


def _short(text: str) -> str:
    """Return the beginning and the end of a message, without Java's frames."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith("\tat "))
    return text if len(text) <= 2 * EXCERPT else f"{text[:EXCERPT]} ... {text[-EXCERPT:]}"


def _bug(bug: Bug, assigned: _Assignment) -> EngineError:
    error = EngineError(f"the worker that wrote {assigned} failed: {bug.line}", "this is a bug, please report it")
    error.add_note(bug.text)
    return error
