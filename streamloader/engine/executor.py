"""Runs functions in the threads of this process, or in worker processes on shared memory.

`Executor.jobs` returns what runs jobs: `Threads`, or `Calls` with workers. `Calls` sends a job's function and arguments
over a socket to a thread of a worker, which runs one job at a time. One thread of this process receives the results of
all jobs, and calls what their owners want to be called. Arrays in the arena are sent by reference, so functions read
and write the same memory in both cases. A function must only write to memory that its caller reserved for it, and give
the same result when it is called again: if a worker is killed, its jobs are repeated in another one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import Arena
from streamloader.engine.messages import Callback, Shared, dump, dump_call, dump_shared, load, refer_to, share
from streamloader.engine.workers import Pool
from streamloader.errors import EngineError
from streamloader.storage.process import RUNTIME, Finalizer, PerProcess, Runtime, join_at_exit, take

Result = TypeVar("Result")
Workers = int | Literal["auto"]

# A rank with fewer cores keeps them busy with threads of one process.
LEAST_CORES = 4
# More workers only read and copy faster than the parent plans: on 16 cores 8 of them are faster than 15.
MOST_COPYING = 8
# Seconds of a transform of one sample that pay for sending it to another process and back.
SLOW_TRANSFORM = 3e-4
NO_SHARED_MEMORY = "this system has no anonymous shared memory (memfd_create)"


def choose_workers(
    choice: Workers,
    cores: int,
    urls: Iterable[str] = (),
    *,
    in_worker: bool = False,
    private: bool = False,
    computes: bool = False,
    transform_seconds: float = 0.0,
) -> tuple[int, str]:
    """Return the number of worker processes for a rank with this many cores that reads these URLs, and the reason.

    `in_worker`: this process is a worker of a DataLoader. `private`: only this process can get credentials.
    `computes`: images are decoded, chunks decompressed or samples transformed. `transform_seconds`: what the transform
    of a sample has taken so far.
    """
    obstacles = {
        "DataLoader workers have none of their own": in_worker,
        "other processes cannot read memory:// URLs": any(url.startswith("memory:") for url in urls),
        "other processes cannot load the credential_provider: define it in a module that you import": private,
        NO_SHARED_MEMORY: sys.platform != "linux" or not hasattr(os, "memfd_create"),
    }
    if reasons := [reason for reason, found in obstacles.items() if found]:
        return 0, reasons[0]
    if choice != "auto":
        return choice, "num_workers= says so"
    if 1 < cores < LEAST_CORES and transform_seconds >= SLOW_TRANSFORM:
        return cores, f"the transform takes {1e3 * transform_seconds:.1f} ms for each sample, on {cores} cores"
    if cores < LEAST_CORES:
        return 0, f"threads of one process keep {cores} core{'s' * (cores > 1)} busy"
    if cores > MOST_COPYING and not computes:
        return MOST_COPYING, f"more of the {cores} cores would only wait, since nothing is decoded or transformed"
    return cores - 1, f"this rank has {cores} cores, and one is for training"


@dataclass(slots=True, eq=False)
class Job:
    """A call of `function(*args)`, which ends with `done(result, None)` or `done(None, error)`.

    `begins`: called when the function is called. `repeats`: called before it is called again in another worker, since
    its worker was killed. These functions must not wait: one thread calls those of all jobs in workers.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    done: Callable[[Any, BaseException | None], object]
    begins: Callable[[], object] = bool
    repeats: Callable[[], object] = bool


class Threads:
    """Runs functions on up to `count` daemon threads of this process, in order; `on_error` gets their exceptions.

    Not a `ThreadPoolExecutor`, whose threads are joined at exit: a stalled request would delay it.

    Idle threads hold only the queue, and a closed queue is empty, so a finalizer may hold a `Threads`.
    """

    def __init__(
        self, name: str, count: int, on_error: OnError, arena: Arena | None = None, runtime: Runtime = RUNTIME
    ) -> None:
        self._name, self.count, self._on_error, self._arena = name, count, on_error, arena
        self._queue: SimpleQueue[tuple[Callable[[], object], OnError] | None] = runtime.queue()
        self.threads: list[threading.Thread] = []
        self._idle, self._starting, self._thread = runtime.semaphore(0), runtime.lock(), runtime.thread
        self._closed = False

    def submit(self, job: Job) -> None:
        """Queue a job. The thread whose job has submitted it runs it next."""
        self.run(partial(self._run, job))

    def run(self, function: Callable[[], object]) -> None:
        """Queue a function. After `close`, functions are dropped."""
        mine = getattr(_NEXT, "functions", None)
        if mine is not None and _NEXT.queue is self._queue and not mine:
            mine.append((function, self._on_error))
            return
        with self._starting:
            if not self._idle.acquire(blocking=False) and len(self.threads) < self.count:
                name = f"streamloader-{self._name}-{len(self.threads)}"
                thread = self._thread(target=_run_all, args=(self._queue, self._idle), name=name, daemon=True)
                self.threads.append(thread)
                thread.start()
        self._queue.put((function, self._on_error))
        if self._closed:
            self.close()

    def _run(self, job: Job) -> None:
        if self._arena is not None:
            refer_to(self._arena)
        job.begins()
        try:
            result = job.function(*job.args)
        except BaseException as error:  # noqa: BLE001 - the job's owner gets any error
            job.done(None, error)
        else:
            job.done(result, None)

    def close(self) -> None:
        """Drop what has not begun, and let each thread end after its function. Does not wait.

        Takes no lock, since a finalizer may call it in a thread that is inside `run`. Several threads may close at
        once: each empties the queue, then puts one end marker per thread.
        """
        self._closed, self._on_error = True, bool  # whose object may own this one
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        for _ in self.threads:
            self._queue.put(None)

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for each thread; return whether all have ended."""
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(seconds)
        return not any(thread.is_alive() for thread in self.threads)


def close_all(*each: Threads) -> None:
    """Close threads: a finalizer, see `join_at_exit`."""
    for threads in each:
        threads.close()
    join_at_exit([thread for threads in each for thread in threads.threads])


OnError = Callable[[BaseException], object]
_NEXT = threading.local()  # of a thread of `Threads`: its queue, and what it runs next


def _run_all(queue: SimpleQueue[Any], idle: threading.Semaphore) -> None:
    _NEXT.queue, _NEXT.functions = queue, deque[Any]()
    while (entry := queue.get()) is not None:
        while entry is not None:
            function, on_error = entry
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - the consumer must get any error
                on_error(error)
            del entry, function, on_error  # an idle thread must not keep the data of its last job alive
            entry = _NEXT.functions.popleft() if _NEXT.functions else None
        idle.release()


class Executor:
    """Calls functions in this process, or in `workers` worker processes. `on_death`: called after one was replaced.

    `runtime`: of its threads, and of what uses it. `pool`: has the workers, by default those of this process.
    """

    def __init__(
        self,
        workers: int = 0,
        on_death: Callable[[], object] = bool,
        runtime: Runtime = RUNTIME,
        pool: Pool | None = None,
    ) -> None:
        self.workers, self.runtime = workers, runtime
        self._on_death = on_death
        self._pool = pool or _POOL.get(Pool) if workers else None
        self.arena = _ARENA.get(_private_arena) if self._pool is None else self._pool.arena
        self._calls: Calls | None = None
        if self._pool is not None:
            self._calls = Calls(self._pool, workers, CALLERS, on_error=bool, on_death=on_death, runtime=runtime)
            Finalizer(self, self._calls.close)

    def start(self) -> None:
        """Start the workers that are missing; calls wait until they are ready."""
        pool = self._pool
        if pool is None or self._calls is None:
            return
        pool.grow(self.workers)
        if not pool.serves.is_set():
            # also if it failed: then the jobs of workers raise the error
            self._calls.submit(Job(len, ("",), lambda *_: pool.serves.set()))

    def share(self, value: Result) -> Result:
        """Return what to pass to `call` for a value that is the same in many calls: it is sent once.

        Workers have its large arrays in common, and must not change them.
        """
        if self._pool is None:
            return value
        return share(value, self.arena)  # type: ignore[return-value]

    def jobs(
        self, name: str, count: int, on_error: OnError, prepare: Sequence[Any] = (), *, begin_here: bool = False
    ) -> Threads | Calls:
        """Return what runs up to `count` jobs at once, in threads of this process or of workers.

        `on_error` gets exceptions of `done`. `prepare`: a function and its arguments, which each thread of a worker
        calls before its first job, so that the time of jobs includes no start. `begin_here`: threads of this process
        run the jobs that come before a worker serves. Shared values are arguments of these, not inside of them.
        """
        threads = Threads(name, count, on_error, self.arena, self.runtime)
        if self._pool is None:
            return threads
        calls = partial(Calls, self._pool, self.workers, count, on_error=on_error, on_death=self._on_death)
        return calls(prepare=prepare, here=threads if begin_here else None, runtime=self.runtime)

    def call(
        self,
        function: Callable[..., Result],
        *args: Any,
        on_repeat: Callable[[], None] = bool,  # type: ignore[assignment]
    ) -> Result:
        """Return `function(*args)`. Raises its error.

        With workers, `function` is imported by its name; results and arguments are pickled, except for arrays in the
        arena, and for values by `share` and `Callback`. `on_repeat` is called before the function is called again in
        another worker, since its worker was killed. Raises `EngineError` if workers are killed again and again.
        """
        if self._calls is None:
            return self._here(function, *args)
        return _begin(self._calls, function, args, on_repeat)()  # type: ignore[no-any-return]

    def _here(self, function: Callable[..., Result], *args: Any) -> Result:
        refer_to(self.arena)
        return function(*args)

    def map(self, function: Callable[..., Result], arguments: Iterable[Sequence[Any]], ahead: int) -> Iterator[Result]:
        """Yield `function(*args)` for each of the arguments, in order. Workers compute up to `ahead` of them at once.

        Those that are needed before a worker serves are computed here. Arguments are taken from the iterable when their
        call begins, and are not shared values.
        """
        begun: deque[Callable[[], Any]] = deque()
        for args in arguments:
            if self._pool is None or self._calls is None or not self._pool.serves.is_set():
                yield self._here(function, *args)
                continue
            begun.append(_begin(self._calls, function, args))
            if len(begun) >= ahead:
                yield begun.popleft()()
        while begun:
            yield begun.popleft()()


def _begin(
    calls: Calls, function: Callable[..., Any], args: Sequence[Any], on_repeat: Callable[[], object] = bool
) -> Callable[[], Any]:
    """Begin a call in a worker, and return a function that waits for its result and returns it."""
    ended: SimpleQueue[tuple[Any, BaseException | None]] = calls.runtime.queue()
    calls.submit(Job(function, args, lambda *end: ended.put(end), repeats=on_repeat))

    def wait() -> Any:
        result, error = take(ended)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return result

    return wait


CALLERS = 64  # threads that may call at once


class Calls:
    """Runs jobs in workers, up to `count` at once, each in a thread of a worker of its own.

    `on_error` gets exceptions of `done`. `on_death` is called after a worker was replaced. `prepare` is that of
    `Executor.jobs`. `here`: runs the jobs that come before a worker serves.
    """

    def __init__(
        self,
        pool: Pool,
        workers: int,
        count: int,
        *,
        on_error: OnError,
        on_death: Callable[[], object],
        prepare: Sequence[Any] = (),
        here: Threads | None = None,
        runtime: Runtime = RUNTIME,
    ) -> None:
        self._pool, self._workers, self.count, self.prepare = pool, workers, count, prepare
        self.runtime = runtime
        self.on_error, self._on_death, self._here = on_error, on_death, here
        self._jobs: deque[Job] = deque()
        self._idle: deque[_Channel] = deque()
        self._busy: dict[_Channel, None] = {}
        self._opened = 0  # channels
        self._closed = False
        self._changed = runtime.condition()  # reentrant: a finalizer may close in a thread that has it

    def submit(self, job: Job) -> None:
        """Begin a job, or queue it. After `close`, jobs are dropped."""
        if self._here is not None and not self._pool.serves.is_set():
            args = [arg.here if type(arg) is Shared else arg for arg in job.args]
            self._here.submit(replace(job, args=args))
            return
        with self._changed:
            if self._closed:
                return
            if self._idle:
                channel = self._idle.popleft()
            elif len(self._busy) < self.count:
                channel = _Channel(self, self._pool, self._opened % self._workers)
                self._opened += 1
            else:
                self._jobs.append(job)
                return
            self._busy[channel] = None
        channel.begin(job)

    def ended(self, channel: _Channel) -> None:
        """Begin the next job on a channel whose job has ended."""
        with self._changed:
            job = self._jobs.popleft() if self._jobs else None
            if job is None:
                self._busy.pop(channel, None)
                self._changed.notify_all()
                if not self._closed:
                    self._idle.append(channel)
        if job is not None:
            channel.begin(job)
        elif self._closed:
            channel.close()

    def lost(self, channel: _Channel, job: Job | None) -> None:
        """Replace the worker of a channel that has ended, and run its job again, if it had one."""
        with self._changed:
            self._busy.pop(channel, None)
            self._changed.notify_all()
            # all of this worker: the end of another one may not be known yet, and a job must not begin there
            self._idle = deque(one for one in self._idle if one.worker is not channel.worker)
        if job is None and self._closed:
            return
        try:
            if self._pool.replace(channel.worker):
                self._on_death()
            if job is not None:
                job.repeats()
                self.submit(job)
        except EngineError as error:
            if job is None:
                self.on_error(error)
            else:
                job.done(None, error)

    def close(self, *, wait: bool = True) -> None:
        """Drop the jobs that have not begun. Those that may write to the arena end: with `wait`, all that run.

        Without, only those that have called back for memory.
        """
        with self._changed:
            self._closed, self.on_error = True, bool  # whose object may own this one
            self._jobs.clear()
            unused, self._idle = [*self._idle, *(() if wait else self._busy)], deque()
        if self._here is not None:
            self._here.close()
        for channel in unused:
            channel.close_unless_given()

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` until no job runs; return whether none does."""
        if self._here is not None and not self._here.join(seconds):
            return False
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, seconds)


class _Channel:
    """The connection with one thread of a worker, and the job that it runs."""

    def __init__(self, calls: Calls, pool: Pool, number: int) -> None:
        self.worker, self.connection = pool.connect(number)
        self.calls, self._pool = calls, pool
        self._known: set[int] = set()  # keys of shared values that were sent
        self._moved: list[NDArray[np.uint8]] = []
        self._given: Any = None  # the result of the last callback
        self._job: Job | None = None
        self._callbacks: list[Callback] = []
        self._failed: BaseException | None = None  # the first error of a callback
        self._prepare = calls.prepare
        self._ready = self._closed = self._lost = False
        # Of the descriptor too: one that is closed while another thread sends may be that of a new connection by then.
        self._lock = calls.runtime.lock()
        pool.watch(self.connection, self.receive)

    def begin(self, job: Job) -> None:
        """Begin a job, once the worker serves this connection."""
        with self._lock:
            lost, ready = self._lost, self._ready
            if not lost:
                self._job = job
        if lost:
            self.calls.lost(self, job)
        elif ready:
            self._send(job)

    def _send(self, job: Job) -> None:
        """Send a job. If the worker has ended, the thread that receives finds that."""
        try:
            function = self._pool.shared(job.function)
            refer_to(self._pool.arena, self._moved)  # this thread may use other executors as well
            data, shared, callbacks = dump_call([function, *job.args])
        except Exception as error:  # noqa: BLE001 - a class of the user may raise anything when it is pickled
            self._end(None, error)
            return
        self._callbacks = [*callbacks, Callback(self._allocate)]
        job.begins()
        with self._lock, suppress(OSError):
            for value in shared:
                if value.key not in self._known:
                    self._known.add(value.key)
                    self.connection.send_bytes(dump_shared(value))
            self.connection.send_bytes(data)

    def receive(self) -> None:
        """Read a message of the worker: an answer, a question, or the end of the connection."""
        try:
            self._receive()
        except BaseException as error:  # noqa: BLE001 - the job's owner gets any error
            self.calls.on_error(error)

    def _receive(self) -> None:
        refer_to(self._pool.arena, self._moved)
        try:
            kind, *values = load(self._pool.receive(self.connection))
        except (EOFError, OSError):
            with self._lock:  # a thread may begin a job right now
                self._lost, job, self._job = True, self._job, None
                self._pool.forget(self.connection)
            self.calls.lost(self, job)
            return
        except Exception as error:  # noqa: BLE001 - a class of the user may raise anything when it is loaded
            self._end(None, error)
            return
        if self._closed:
            return
        if kind == "callback":
            self._call(*values)
        elif not self._ready:
            self._become_ready()
        elif self._failed is not None:
            self._end(None, self._failed)
        elif kind == "done":
            self._end(values[0], None)
        else:
            values[0].__cause__ = values[1]
            self._end(None, values[0])

    def _become_ready(self) -> None:
        if self._prepare:
            function, *args = self._prepare
            self._prepare = ()
            self._send(Job(function, args, bool))  # type: ignore[arg-type]
            return
        with self._lock:
            self._ready = True
            job = self._job
        if job is not None:
            self._send(job)

    def _end(self, result: Any, error: BaseException | None) -> None:
        job, self._job, self._failed, self._callbacks, self._given = self._job, None, None, [], None
        self._moved.clear()
        if job is not None:  # not closed by another thread
            self.calls.ended(self)
            job.done(result, error)

    def _call(self, number: int, args: Sequence[Any]) -> None:
        """Call a callback, and send its result, now or once the future that it returns is done."""
        try:
            result = self._callbacks[number].call(*args)
        except BaseException as error:  # noqa: BLE001 - raised by the caller, once the worker has ended the call
            self._failed = error
            self._answer(False, None)
            return
        if isinstance(result, Future):
            result.add_done_callback(self._answer_later)
        else:
            self._answer(True, result)

    def _answer_later(self, future: Future[Any]) -> None:
        self._failed = future.exception()
        self._answer(self._failed is None, None if self._failed else future.result())

    def _answer(self, ok: bool, value: Any) -> None:
        refer_to(self._pool.arena, self._moved)
        data = dump((ok, value))[0]
        with self._lock, suppress(OSError):
            if not self._closed:
                self._given = value
                self.connection.send_bytes(data)

    def _allocate(self, size: int) -> tuple[int, NDArray[np.uint8]]:
        """Return memory for a large array of the result, and its number."""
        self._moved.append(self._pool.arena.allocate(size))
        return len(self._moved) - 1, self._moved[-1]

    def close_unless_given(self) -> None:
        """End the connection, but not while the worker may write to memory that a callback has returned."""
        with self._lock:
            if self._given is None:
                self.close()

    def close(self) -> None:
        """End the connection; the worker's thread ends after its call, whose result is dropped.

        The thread that receives closes the descriptor, which it may be reading.
        """
        self._closed, self._job, self._callbacks, self._given = True, None, [], None
        with self._lock, suppress(OSError):
            self._pool.shut(self.connection)


def _private_arena() -> Arena:
    return Arena(shared=False)


_POOL: PerProcess[Pool] = PerProcess()
_ARENA: PerProcess[Arena] = PerProcess()
