"""A seeded scheduler: threads run one at a time, on a virtual clock, and a seed decides which one goes on.

`Scheduler.runtime` takes the place of `streamloader.storage.process.RUNTIME`: its locks, conditions, events, queues and
threads are switch points, at which another thread may go on. Time passes when all threads wait, now and then before, as
if some were slow. The same seed gives the same schedule.

It finds deadlocks, waits that end by their timeout only (lost wake-ups), threads that do not end, and what `check`
raises, which is called between steps.
"""

from _thread import allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty
from random import Random
from typing import Any

from streamloader.storage.process import Runtime
from streamloader.testing.clock import VirtualClock

SWITCHES = 0.25  # the probability that another thread goes on at a switch point
EARLY = 0.01  # the probability that time passes there although a thread can run
LIMIT_SECONDS = 500.0  # of virtual time: what takes longer makes no progress


class Violation(Exception):
    """A law that does not hold under a schedule."""


class Stopped(BaseException):
    """Ends a thread: its schedule has failed, or it belongs to a worker that was killed."""


class _Runner:
    """A thread of the system, which runs tasks one after another: to start one takes longer than a schedule."""

    def __init__(self) -> None:
        self.gate = allocate_lock()
        self.gate.acquire()
        self.task: Task
        start_new_thread(self._run, ())

    def _run(self) -> None:
        while True:
            self.gate.acquire()
            self.task.run(self)


IDLE: list[_Runner] = []


class Task:
    """A thread of a schedule, with the interface of `threading.Thread`."""

    def __init__(
        self, scheduler: "Scheduler", target: Callable[..., Any], args: Any = (), name: str = "", daemon: bool = True
    ) -> None:
        assert daemon, "a thread must not keep the interpreter from exiting"
        self._scheduler, self._call, self.name = scheduler, (target, args), name
        self.gate: Any = None
        self.waiting: list[Task] | None = None  # the tasks that wait for the same as it does
        self.woken = self.late = self.ended = self.killed = False
        self._joining: list[Task] = []

    def start(self) -> None:
        runner = IDLE.pop() if IDLE else _Runner()
        runner.task, self.gate = self, runner.gate
        self._scheduler.tasks.append(self)
        self._scheduler.ready.append(self)
        self._scheduler.point()

    def run(self, runner: _Runner) -> None:
        scheduler = self._scheduler
        target, args = self._call
        try:
            if not (scheduler.failure or self.killed):
                target(*args)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the schedule fails
            scheduler.fail(error)
        del target, args, self._call
        self.ended = True
        scheduler.tasks.remove(self)
        for task in self._joining:
            scheduler.wake(task)
        IDLE.append(runner)
        scheduler.leave(self)

    def join(self, timeout: float | None = None) -> None:
        if not self.ended:
            self._scheduler.block(self._joining, timeout)

    def is_alive(self) -> bool:
        return not self.ended


class Scheduler:
    """Runs a function and the threads that it starts. `check` is called between steps; what it raises is a failure."""

    def __init__(self, seed: int, check: Callable[[], None] = bool) -> None:
        self.random, self.clock, self.steps = Random(seed), VirtualClock(), 0
        self._draw, self.check = self.random.random, check
        self.main = Task(self, bool)
        self.main.gate = allocate_lock()
        self.main.gate.acquire()
        self.running = self.main
        self.tasks: list[Task] = []  # that have not ended
        self.ready = [self.main]
        self.failure: BaseException | None = None
        self.over = False
        self.runtime = Runtime(
            clock=self.clock.time,
            thread=lambda **given: Task(self, **given),  # type: ignore[arg-type, return-value]
            lock=lambda: Condition(self),
            condition=lambda: Condition(self),  # type: ignore[arg-type, return-value]
            event=lambda: Event(self),  # type: ignore[arg-type, return-value]
            semaphore=lambda value: Semaphore(self, value),  # type: ignore[arg-type, return-value]
            queue=lambda: Queue(self),  # type: ignore[arg-type, return-value]
            future=self._future,
        )

    def _future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future._condition = Condition(self, polls=True)  # type: ignore[assignment]
        return future

    def run(self, function: Callable[[], Any]) -> None:
        """Call the function, then wait until all threads have ended. Raises the first failure."""
        try:
            function()
            while self.tasks:
                self.tasks[0].join()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised below, once all threads have ended
            self.fail(error)
        if self.tasks:
            self.running = self.tasks[0]
            self.running.gate.release()
            self.main.gate.acquire()
        self.over = True
        failure, self.failure = self.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure

    def fail(self, error: BaseException) -> None:
        """End the schedule: each thread is stopped where it waits."""
        self.failure = self.failure or error

    # ---- called by the running thread

    def point(self) -> None:
        """Let another thread go on, perhaps."""
        if self._draw() < SWITCHES and not (self.over or self.failure):
            if self._draw() < EARLY:
                self.clock.advance()
            self._switch()

    def sleep(self, seconds: float) -> None:
        """Wait for some virtual seconds."""
        self.block([], seconds)

    def block(self, waiting: list[Task], timeout: float | None = None) -> bool:
        """Wait until the task is woken, which the list is to lead to, or at most `timeout`; return whether it was."""
        task = self.running
        if self.failure or self.over or task.killed:
            raise Stopped
        task.woken, task.late, task.waiting = False, False, waiting
        waiting.append(task)
        self.ready.remove(task)
        timer = None if timeout is None else self.clock.call_later(timeout, partial(self._let_go, task))
        try:
            self._switch()
        finally:
            if timer is not None:
                timer.cancel()
            if not task.woken:
                waiting.remove(task)
            task.waiting = None
        return task.woken

    def wake(self, task: Task) -> None:
        """End the wait of a task."""
        if not task.woken and task.waiting is not None:
            task.woken = True
            task.waiting.remove(task)
            if not task.late:
                self.ready.append(task)

    def kill(self, task: Task) -> None:
        """End a thread where it waits or could be interrupted: it does nothing any more."""
        task.killed = True
        if task.waiting is not None:
            self._let_go(task)

    def _let_go(self, task: Task) -> None:
        if not (task.woken or task.late):
            task.late = True
            self.ready.append(task)

    def _switch(self) -> None:
        task, chosen = self.running, self._choose()
        if chosen is not task:
            self.running = chosen
            chosen.gate.release()
            task.gate.acquire()
        if self.failure or task.killed:
            raise Stopped

    def leave(self, task: Task) -> None:
        """Let another thread go on in place of one that has ended."""
        if task in self.ready:
            self.ready.remove(task)
        left = self.tasks[0] if self.tasks else self.main
        chosen = left if self.failure else self._choose()
        self.running = chosen
        chosen.gate.release()

    def _choose(self) -> Task:
        """Return the thread that goes on. If none can, time passes; if none ever can, this is a failure."""
        self.steps += 1
        try:
            self.check()
            while not self.ready:
                if not self.clock.advance():
                    raise Violation(f"deadlock: {self.describe()}")
                if self.clock.time() > LIMIT_SECONDS:
                    raise Violation(f"no progress in {LIMIT_SECONDS:g} s: {self.describe()}")
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self.fail(error)
            return self.main if self.running.ended else self.running
        return self.ready[int(self._draw() * len(self.ready))]

    def describe(self) -> str:
        """Return which threads have not ended."""
        names = [task.name for task in self.tasks]
        return f"{', '.join([*names, 'the consumer'])} wait at {self.clock.time():.2f} s"


class Condition:
    """A reentrant lock, and a condition with it. `polls`: threads may give up their wait."""

    def __init__(self, scheduler: Scheduler, *, polls: bool = False) -> None:
        self._scheduler, self._polls = scheduler, polls
        self._owner: Task | None = None
        self._depth = 0
        self._entering: list[Task] = []
        self._waiting: list[Task] = []
        self._left_late: Task | None = None  # whose wait ended by its timeout, while it has the lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if self._owner is not scheduler.running:
            scheduler.point()
            if self._owner is not None and not blocking:
                return False
            self._enter()
        self._depth += 1
        return True

    def _enter(self) -> None:
        while self._owner is not None:
            self._scheduler.block(self._entering)
        self._owner = self._scheduler.running

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            if self._left_late is not None:
                self._left_late = None
                self._scheduler.fail(Violation(f"lost wake-up: {self._scheduler.running.name or 'the consumer'}"))
            self._leave()
            self._scheduler.point()

    def _leave(self) -> None:
        self._owner = None
        if self._entering:
            self._scheduler.wake(self._entering[0])

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def free(self) -> bool:
        """Whether no thread has the lock."""
        return self._owner is None

    def wait(self, timeout: float | None = None) -> bool:
        task, depth = self._scheduler.running, self._depth
        assert self._owner is task, "a wait without the lock"
        self._left_late, self._depth = None, 0
        self._leave()
        try:
            woken = self._scheduler.block(self._waiting, timeout)
        except Stopped:
            self._owner, self._depth = task, depth
            raise
        changed = self._owner is not None  # by a thread that has the lock, which may not have notified yet
        self._enter()
        self._depth = depth
        self._left_late = None if woken or changed or self._polls else task
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._scheduler.clock.time() + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._scheduler.clock.time()
            if left is not None and left <= 0:
                self._left_late = None
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        assert self._owner is self._scheduler.running or self._scheduler.failure, "a notification without the lock"
        for task in self._waiting[:n]:
            self._scheduler.wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """An event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set = scheduler, False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in [*self._waiting]:
            self._scheduler.wake(task)
        self._scheduler.point()

    def wait(self, timeout: float | None = None) -> bool:
        self._scheduler.point()
        if not self._set:
            self._scheduler.block(self._waiting, timeout)
        return self._set


class Semaphore:
    """A semaphore."""

    def __init__(self, scheduler: Scheduler, value: int) -> None:
        self._scheduler, self._value = scheduler, value
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        self._scheduler.point()
        if not self._value and not blocking:
            return False
        while not self._value:
            if not self._scheduler.block(self._waiting, timeout) and timeout is not None:
                return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        assert n > 0
        self._value += n
        for task in self._waiting[:n]:
            self._scheduler.wake(task)
        self._scheduler.point()


class Queue:
    """A `SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()
        self._waiting: list[Task] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._scheduler.wake(self._waiting[0])
        self._scheduler.point()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._scheduler.point()
        while not self._items:
            if not block or (not self._scheduler.block(self._waiting, timeout) and timeout is not None):
                raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items
