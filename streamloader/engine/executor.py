"""Runs functions in the threads of this process, or in worker processes on shared memory.

`Executor.jobs` returns what runs jobs: `Threads`, or `Calls` with workers. `Calls` sends a job's function and arguments
over a socket to a thread of a worker, which runs one job at a time. One thread of this process receives the results of
all jobs, and calls what their owners want to be called. Arrays in the arena are sent by reference, so functions read
and write the same memory in both cases. A function must only write to memory that its caller reserved for it, and give
the same result when it is called again: if a worker is killed, its jobs are repeated in another one.

Workers are shared by all executors of a process, and end with it. A server, which is started by exec, forks them.
"""

from __future__ import annotations

import atexit
import gc
import io
import mmap
import os
import pickle
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import current_process, spawn
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import Arena
from streamloader.errors import EngineError, StreamloaderError, message
from streamloader.storage.process import PerProcess, finalize, result_of, take

Result = TypeVar("Result")
Workers = int | Literal["auto"]

ALLOCATE = -1  # the number of the last callback, which returns memory for a large array of a result
MOVED_BYTES = 1 << 16  # of an array that is sent through the arena
MAX_DEATHS = 3  # of workers within DEATH_SECONDS, then a call fails
DEATH_SECONDS = 60.0
EXIT_SECONDS = 1.0
MESSAGE_BYTES = 32  # at most, of messages to and from the server that forks workers
# That server starts by this code: `serve_forks` is imported with the parent's sys.path.
_CODE = (
    "import gc, sys, signal; gc.disable(); signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[6:]; "
    "from streamloader.engine.executor import serve_forks; serve_forks(*map(int, sys.argv[1:5]))"
)
# What the server imports, or calls, if this process has imported the other module.
_PRELOADED = {
    **{f"streamloader.engine.{name}": "streamloader.engine.executor" for name in ("fetcher", "gather", "stages")},
    "streamloader.storage.generic": "streamloader.storage.generic",
    "streamloader.storage.s3:load_models": "streamloader.storage.s3",
    **dict.fromkeys(["streamloader.images.decode", "simplejpeg", "cv2"], "streamloader.images.decode"),
}


# A rank with fewer cores keeps them busy with threads of one process.
LEAST_CORES = 4


def choose_workers(
    choice: Workers, cores: int, urls: Iterable[str] = (), *, in_worker: bool = False
) -> tuple[int, str]:
    """Return the number of worker processes for a rank with this many cores that reads these URLs, and the reason.

    `in_worker`: this process is a worker of a DataLoader.
    """
    if in_worker:
        return 0, "DataLoader workers have none of their own"
    if any(url.startswith("memory:") for url in urls):
        return 0, "other processes cannot read memory:// URLs"
    if not hasattr(os, "memfd_create"):
        return 0, "this system has no anonymous shared memory (memfd_create)"
    if choice != "auto":
        return choice, "num_workers= says so"
    if cores < LEAST_CORES:
        return 0, f"threads of one process keep {cores} cores busy"
    return cores - 1, f"this rank has {cores} cores, and one is for training"


class Shared(NamedTuple):
    """A value that is sent to each worker once. `main`: what workers need to import the script of this process.

    `memory`: of its large arrays, in the arena. `path`: where modules are imported from.
    """

    key: int
    data: bytes
    main: dict[str, Any] | None = None
    memory: tuple[NDArray[np.uint8], ...] = ()
    path: tuple[str, ...] = ()


class Callback(NamedTuple):
    """A function that runs in this process, also if a function in a worker calls it.

    It must not wait: it may return a `Future` instead, whose result its caller gets. Memory that it returns is valid
    until the caller calls a callback again, or has ended.
    """

    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the function, and wait for its result."""
        value = self.call(*args)
        return result_of(value) if isinstance(value, Future) else value


class Aborted(BaseException):
    """Ends a function in a worker after a callback of it has failed; the callback's error is raised by the caller."""


class _Local(threading.local):
    """What a thread unpickles references with: the arena, shared values, and the connection for callbacks."""

    def __init__(self) -> None:
        self.arena: Arena | _View | None = None
        self.shared: dict[int, Any] = {}
        self.connection: Connection | None = None
        self.moved: list[NDArray[np.uint8]] = []  # the memory of large arrays of a result


_LOCAL = _Local()


class _View(NamedTuple):
    """The arena of the parent in a worker."""

    bytes: NDArray[np.uint8]
    base: int

    def offset(self, array: NDArray[Any]) -> int | None:
        """Return where the memory of an array begins in the mapping, None if it is elsewhere."""
        offset = int(array.__array_interface__["data"][0]) - self.base
        return offset if 0 <= offset < self.bytes.size else None


def in_worker() -> bool:
    """Return whether a function is called in a worker process."""
    return _LOCAL.connection is not None


def caller() -> Connection | None:
    """Return the connection with the thread that has called a function in a worker."""
    return _LOCAL.connection


def arena_bytes(start: int, size: int) -> memoryview:
    """Return bytes of the arena, in a function that an executor calls."""
    return all_bytes().data[start : start + size]


def all_bytes() -> NDArray[np.uint8]:
    """Return the arena, in a function that an executor calls."""
    assert _LOCAL.arena is not None
    return _LOCAL.arena.bytes


def _values(data: bytes, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def _array(offset: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: str) -> NDArray[Any]:
    assert _LOCAL.arena is not None
    for memory in _LOCAL.moved:  # a result may be a large argument, whose memory is free without it
        start = _LOCAL.arena.offset(memory)
        if start is not None and start <= offset < start + memory.nbytes:
            return np.ndarray(shape, dtype, memory.data, offset - start, strides)
    return np.ndarray(shape, dtype, _LOCAL.arena.bytes, offset, strides)


def _memory(array: NDArray[np.uint8]) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]


def _moved(number: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return a large array of a result, which a worker wrote to memory that the caller had allocated."""
    return _LOCAL.moved[number].view(dtype).reshape(shape)


def _shared(key: int) -> Any:
    """Return a shared value, which is loaded at its first use: once for all threads of a worker."""
    value = _LOCAL.shared[key]
    if type(value) is not Shared:
        return value
    with _LOADING:
        loaded = _LOADED.get(key)
        if loaded is None:
            loaded = _load(value)
            with suppress(TypeError):  # a value without weak references
                _LOADED[key] = loaded
    _LOCAL.shared[key] = loaded
    return loaded


def _load(value: Shared) -> Any:
    sys.path += [path for path in value.path if path not in sys.path]  # added since the worker started
    if value.main is not None and not _Main.ready:
        _Main.ready = True
        process = current_process()
        process._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.prepare(value.main)
        finally:
            del process._inheriting  # type: ignore[attr-defined]
    return pickle.loads(value.data)


_LOADING = threading.RLock()
_LOADED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _Main:
    """Whether a worker has imported the script of its parent."""

    ready = False


def _callback(number: int) -> Callback:
    return Callback(partial(_ask, number))


def _ask(number: int, *args: Any) -> Any:
    """Call a callback of the parent. Raises `Aborted` if it failed there."""
    connection = _LOCAL.connection
    assert connection is not None
    connection.send_bytes(_dumps(("callback", number, args))[0])
    ok, answer = pickle.loads(connection.recv_bytes())
    if not ok:
        raise Aborted
    return answer


def _reduced(value: NDArray[Any]) -> Any:
    """Reduce an array: by reference if it is in the arena, where a large one is copied to, else by value."""
    offset = None if _LOCAL.arena is None else _LOCAL.arena.offset(value)
    if value.dtype.hasobject or value.dtype.names or (offset is not None and not value.size):
        return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if offset is not None:
        return _array, (offset, value.shape, None if value.flags.c_contiguous else value.strides, value.dtype.str)
    if value.nbytes < MOVED_BYTES or _LOCAL.arena is None:
        return _values, (value.tobytes(), value.shape, value.dtype.str)  # 3 times as fast as numpy's own way
    if isinstance(_LOCAL.arena, Arena):
        number, memory = -1, _LOCAL.arena.allocate(value.nbytes)
        _LOCAL.moved.append(memory)
    else:
        number, memory = _ask(ALLOCATE, value.nbytes)
    moved = memory.view(value.dtype).reshape(value.shape)
    moved[...] = value
    return _reduced(moved) if number < 0 else (_moved, (number, value.shape, value.dtype.str))


def _dumps(value: Any, callbacks: Sequence[Callback] = ()) -> tuple[bytes, list[Shared], list[Callback]]:
    """Return the pickle of a value, the shared values in it, and its callbacks after those that are given.

    Arrays and buffers in the arena are pickled by reference, `Shared` values and `Callback`s by number.
    """
    out, shared, called = io.BytesIO(), list[Shared](), [*callbacks]

    def share(found: Shared) -> Any:
        shared.append(found)
        return _shared, (found.key,)

    def call(found: Callback) -> Any:
        called.append(found)
        return _callback, (len(called) - 1,)

    pickler = pickle.Pickler(out, pickle.HIGHEST_PROTOCOL)
    # faster than `reducer_override`, which is called for functions and classes too
    pickler.dispatch_table = _REDUCERS | {Shared: share, Callback: call}
    pickler.dump(value)
    return out.getvalue(), shared, called


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _reduced,
    memoryview: lambda value: (_memory, (np.frombuffer(value, np.uint8),)),
}


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

    def __init__(self, name: str, count: int, on_error: OnError, arena: Arena | None = None) -> None:
        self._name, self.count, self._on_error, self._arena = name, count, on_error, arena
        self._queue: SimpleQueue[tuple[Callable[[], object], OnError] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._starting = threading.RLock()
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
            if not self._idle.acquire(blocking=False) and len(self._threads) < self.count:
                name = f"streamloader-{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=_run_all, args=(self._queue, self._idle), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put((function, self._on_error))
        if self._closed:
            self.close()

    def _run(self, job: Job) -> None:
        _LOCAL.arena = self._arena
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
        for _ in self._threads:
            self._queue.put(None)

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for each thread; return whether all have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)


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
    """Calls functions in this process, or in `workers` worker processes. `on_death`: called after one was replaced."""

    def __init__(self, workers: int = 0, on_death: Callable[[], object] = bool) -> None:
        self.workers = workers
        self._on_death = on_death
        self._pool = _POOL.get(_Pool) if workers else None
        self.arena = _ARENA.get(_private_arena) if self._pool is None else self._pool.arena
        self._calls = self.jobs("call", CALLERS, bool)
        if self._pool is not None:
            finalize(self, self._calls.close)

    def start(self) -> None:
        """Start the workers that are missing; calls wait until they are ready."""
        if self._pool is not None:
            self._pool.grow(self.workers)

    def share(self, value: Result) -> Result:
        """Return what to pass to `call` for a value that is the same in many calls: it is sent once.

        Workers have its large arrays in common, and must not change them.
        """
        if self._pool is None:
            return value
        return _share(value, self.arena)  # type: ignore[return-value]

    def share_pickle(self, data: bytes, main: dict[str, Any] | None) -> Any:
        """Return what to pass to `call` for a pickled value, of which each worker has its own. Only with workers."""
        return Shared(next(_KEYS), data, main, (), tuple(sys.path))

    def jobs(self, name: str, count: int, on_error: OnError, prepare: Sequence[Any] = ()) -> Threads | Calls:
        """Return what runs up to `count` jobs at once, in threads of this process or of workers.

        `on_error` gets exceptions of `done`. `prepare`: a function and its arguments, which each thread of a worker
        calls before its first job, so that the time of jobs includes no start.
        """
        if self._pool is None:
            return Threads(name, count, on_error, self.arena)
        return Calls(self._pool, (self.workers, count), (on_error, self._on_death), prepare)

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
        if self._pool is None:
            _LOCAL.arena = self.arena
            return function(*args)
        return self._begin(function, args, on_repeat)()  # type: ignore[no-any-return]

    def map(self, function: Callable[..., Result], arguments: Iterable[Sequence[Any]], ahead: int) -> Iterator[Result]:
        """Yield `function(*args)` for each of the arguments, in order. Workers compute up to `ahead` of them at once.

        Arguments are taken from the iterable when their call begins.
        """
        begun: deque[Callable[[], Any]] = deque()
        for args in arguments:
            begun.append(partial(self.call, function, *args) if self._pool is None else self._begin(function, args))
            if len(begun) >= ahead or self._pool is None:
                yield begun.popleft()()
        while begun:
            yield begun.popleft()()

    def _begin(
        self, function: Callable[..., Any], args: Sequence[Any], on_repeat: Callable[[], object] = bool
    ) -> Callable[[], Any]:
        """Begin a call in a worker, and return a function that waits for its result and returns it."""
        ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._calls.submit(Job(function, args, lambda *end: ended.put(end), repeats=on_repeat))

        def wait() -> Any:
            result, error = take(ended)
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame
            return result

        return wait


def _share(value: Any, arena: Arena) -> Shared:
    _LOCAL.arena, moved = arena, _LOCAL.moved
    _LOCAL.moved = []
    data = _dumps(value)[0]
    _LOCAL.moved, memory = moved, _LOCAL.moved
    return Shared(next(_KEYS), data, None, tuple(memory), tuple(sys.path))


CALLERS = 64  # threads that may call at once


class Calls:
    """Runs jobs in workers, up to `count` at once, each in a thread of a worker of its own.

    `limits`: the number of workers, and `count`. `told`: called with exceptions of `done`, and after a worker died.
    """

    def __init__(
        self,
        pool: _Pool,
        limits: tuple[int, int],
        told: tuple[OnError, Callable[[], object]],
        prepare: Sequence[Any] = (),
    ) -> None:
        self._pool, self.prepare = pool, prepare
        self._workers, self.count = limits
        self.on_error, self._on_death = told
        self._jobs: deque[Job] = deque()
        self._idle: deque[_Channel] = deque()
        self._busy: set[_Channel] = set()
        self._opened = 0
        self._closed = False
        self._changed = threading.Condition(threading.RLock())  # a finalizer may close in a thread that has it

    def submit(self, job: Job) -> None:
        """Begin a job, or queue it. After `close`, jobs are dropped."""
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
            self._busy.add(channel)
        channel.begin(job)

    def ended(self, channel: _Channel) -> None:
        """Begin the next job on a channel whose job has ended."""
        with self._changed:
            job = self._jobs.popleft() if self._jobs else None
            if job is None:
                self._busy.discard(channel)
                self._changed.notify_all()
                if not self._closed:
                    self._idle.append(channel)
        if job is not None:
            channel.begin(job)
        elif self._closed:
            channel.close()

    def lost(self, channel: _Channel, job: Job | None) -> None:
        """Replace the worker of a channel, and run its job again."""
        with self._changed:
            self._busy.discard(channel)
            self._changed.notify_all()
            with suppress(ValueError):
                self._idle.remove(channel)
        if job is None:
            return
        try:
            if self._pool.replace(channel.worker):
                self._on_death()
            job.repeats()
        except EngineError as error:
            job.done(None, error)
        else:
            self.submit(job)

    def close(self, *, wait: bool = True) -> None:
        """Drop the jobs that have not begun. With `wait`, those that run end: they may write to the arena."""
        with self._changed:
            self._closed, self.on_error = True, bool  # whose object may own this one
            self._jobs.clear()
            unused, self._idle = [*self._idle, *(() if wait else self._busy)], deque()
        for channel in unused:
            channel.close()

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` until no job runs; return whether none does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, seconds)


class _Channel:
    """The connection with one thread of a worker, and the job that it runs."""

    def __init__(self, calls: Calls, pool: _Pool, number: int) -> None:
        self.worker = pool.workers[number]
        self.calls, self._pool = calls, pool
        self._known: set[int] = set()  # keys of shared values that were sent
        self._moved: list[NDArray[np.uint8]] = []
        self._given: Any = None  # the result of the last callback
        self._job: Job | None = None
        self._callbacks: list[Callback] = []
        self._failed: BaseException | None = None  # the first error of a callback
        self._prepare = calls.prepare
        self._ready = self._closed = self._lost = False
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            self.worker.hand_over(theirs)
        self.connection = Connection(ours.detach())
        pool.watch(self)

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
        """Send a job. Arguments that are shared or callbacks are sent as numbers: a pickler takes longer to find them.

        If the worker has ended, the thread that receives finds that.
        """
        _LOCAL.arena, _LOCAL.moved = self._pool.arena, self._moved  # this thread may use other executors as well
        try:
            values: list[Any] = [self._pool.shared(job.function), *job.args]
            keys = [(at, value.key) for at, value in enumerate(values) if type(value) is Shared]
            calls = [at for at, value in enumerate(values) if type(value) is Callback]
            plain = [None if type(value) in (Shared, Callback) else value for value in values]
            data, shared, callbacks = _dumps((plain, keys, calls), [values[at] for at in calls])
        except Exception as error:  # noqa: BLE001 - a class of the user may raise anything when it is pickled
            self._end(None, error)
            return
        self._callbacks = [*callbacks, Callback(self._allocate)]
        shared += [values[at] for at, _ in keys]
        job.begins()
        with suppress(OSError):
            for value in shared:
                if value.key not in self._known:
                    self._known.add(value.key)
                    self.connection.send_bytes(pickle.dumps(value._replace(memory=())))
            self.connection.send_bytes(data)

    def receive(self) -> None:
        """Read a message of the worker: an answer, a question, or the end of the connection."""
        _LOCAL.arena, _LOCAL.moved = self._pool.arena, self._moved
        try:
            kind, *values = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            with self._lock:  # a thread may begin a job right now
                self._lost, job, self._job = True, self._job, None
            self._pool.forget(self)
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
        _LOCAL.arena, _LOCAL.moved, self._given = self._pool.arena, self._moved, value
        with suppress(OSError):
            self.connection.send_bytes(_dumps((ok, value))[0])

    def _allocate(self, size: int) -> tuple[int, NDArray[np.uint8]]:
        """Return memory for a large array of the result, and its number."""
        self._moved.append(self._pool.arena.allocate(size))
        return len(self._moved) - 1, self._moved[-1]

    def close(self) -> None:
        """End the connection; the worker's thread ends after its call, whose result is dropped.

        The thread that receives closes the descriptor, which it may be reading.
        """
        self._closed, self._job, self._callbacks, self._given = True, None, [], None
        with suppress(OSError), socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours:
            ours.shutdown(socket.SHUT_RDWR)


class _ForkServer:
    """A process without threads, which imports what workers need, once, and forks them. Calls must not overlap."""

    def __init__(self, arena: Arena) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = theirs.fileno(), arena.descriptor
            numbers = map(str, (*fds, arena.size, os.getpid()))
            modules = ",".join(name for name, since in _PRELOADED.items() if since in sys.modules)
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            command = [os.fsdecode(spawn.get_executable()), *flags, "-c", _CODE, *numbers, modules, *sys.path]
            # in a process group of its own: a terminal sends it no Ctrl-C, and workers can be killed without their ids
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, process_group=0)

    def fork(self, index: int, end: socket.socket) -> None:
        """Start a worker with one end of its control socket. Does nothing if the server has ended."""
        with suppress(OSError):
            socket.send_fds(self._requests, [b"%d" % index], [end.fileno()])

    def kill(self, index: int) -> int | None:
        """End a worker if it has not ended, and return its exit code; None if the server has ended."""
        with suppress(OSError):
            self._requests.send(b"%d" % index)
            code = self._requests.recv(MESSAGE_BYTES)
            return int(code) if code else None
        return None

    def end(self) -> int:
        """Kill the server and all workers, and return the exit code of the server."""
        self._requests.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


class _Worker:
    """A worker process, and the socket that hands connections over to it."""

    def __init__(self, server: _ForkServer, index: int) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            server.fork(index, theirs)

    def hand_over(self, connection: socket.socket) -> None:
        """Let the worker serve the other end of a connection. Does nothing if it has ended."""
        with suppress(OSError):
            socket.send_fds(self._control, [b"c"], [connection.fileno()])

    def close(self, seconds: float = 0.0) -> None:
        """Wait until the process, which was killed, has ended. Not longer, since one that it forked may live on."""
        self._control.settimeout(seconds)
        with suppress(OSError):
            self._control.recv(1)
        self._control.close()


class _Pool:
    """The worker processes of this process, and the memory that they share."""

    def __init__(self) -> None:
        self.arena = Arena(shared=True)
        self.workers: list[_Worker] = []
        self._server: _ForkServer  # once there are workers
        self._functions: dict[Callable[..., Any], Shared] = {}
        self._channels: dict[int, _Channel] = {}  # by descriptor
        self._poll = select.epoll()
        self._receiver: threading.Thread | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._ended = False
        atexit.register(self._end)

    def grow(self, count: int) -> None:
        """Start workers until there are `count`."""
        with self._lock:
            if not self.workers and count:
                self._server = _ForkServer(self.arena)
            while len(self.workers) < count:
                self.workers.append(_Worker(self._server, len(self.workers)))

    def replace(self, worker: _Worker) -> bool:
        """Start another worker in place of one that has ended; return False if that was done before.

        Raises `EngineError` after `MAX_DEATHS` of them within `DEATH_SECONDS`.
        """
        with self._lock:
            if self._ended:
                raise EngineError("the process ends", "end iteration before")
            if worker not in self.workers:
                return False
            code = self._renew(self.workers.index(worker))
            now = time.monotonic()
            self._deaths.append(now)
            often = len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATH_SECONDS
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        in_use = f"{self.arena.allocated} bytes of shared memory are in use"
        if often:
            problem = f"worker processes ended {MAX_DEATHS} times within {DEATH_SECONDS:.0f} s, the last one {how}; "
            remedy = "give a smaller memory=, fewer num_workers=, or look for a crash in the transform or a decoder"
            raise EngineError(problem + in_use, remedy)
        warnings.warn(f"a worker process ended {how}; its work is repeated; {in_use}", RuntimeWarning, stacklevel=2)
        return True

    def _renew(self, index: int) -> int:
        """Replace a worker, all of them if their server has ended; return the exit code of the one that has ended."""
        code = self._server.kill(index)
        if code is not None:
            self.workers[index].close()
            self.workers[index] = _Worker(self._server, index)
            return code
        code = self._server.end()
        for worker in self.workers:
            worker.close(EXIT_SECONDS)
        self._server = _ForkServer(self.arena)
        self.workers = [_Worker(self._server, index) for index in range(len(self.workers))]
        return code

    def shared(self, function: Callable[..., Any]) -> Shared:
        """Return what is sent to workers for a function."""
        if function not in self._functions:
            self._functions[function] = _share(function, self.arena)
        return self._functions[function]

    def watch(self, channel: _Channel) -> None:
        """Receive the messages of a channel, in the thread that receives those of all."""
        with self._lock:
            if self._receiver is None:
                self._receiver = threading.Thread(target=self._receive, name="workers of streamloader", daemon=True)
                self._receiver.start()
        self._channels[channel.connection.fileno()] = channel
        self._poll.register(channel.connection.fileno(), select.EPOLLIN)

    def forget(self, channel: _Channel) -> None:
        """Close a channel, in the thread that receives."""
        self._poll.unregister(channel.connection.fileno())
        del self._channels[channel.connection.fileno()]
        channel.connection.close()

    def _receive(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                channel = self._channels[descriptor]
                try:
                    channel.receive()
                except BaseException as error:  # noqa: BLE001 - the job's owner gets any error
                    channel.calls.on_error(error)
                del channel

    def _end(self) -> None:
        if os.getpid() == self._pid:
            self._ended = True
            if self.workers:
                self._server.end()
            for worker in self.workers:
                worker.close()


def _private_arena() -> Arena:
    return Arena(shared=False)


_KEYS = count()
_POOL: PerProcess[_Pool] = PerProcess()
_ARENA: PerProcess[Arena] = PerProcess()


def script_of_this_process() -> dict[str, Any]:
    """Return what another process needs to import the script of this one, as `multiprocessing` does with spawn."""
    values = spawn.get_preparation_data("streamloader-worker")
    return {name: value for name, value in values.items() if name != "authkey"}  # for connections of multiprocessing


def serve_forks(requests: int, memory: int, size: int, parent: int) -> None:
    """Fork and kill workers as the parent requests, until it ends: the main function of the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may ignore it, which is inherited
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a process in the background may print
    for name in sys.argv[5].split(","):
        with suppress(ImportError):  # a package that is not installed
            found = pkgutil.resolve_name(name)
            if callable(found):
                found()
    sys.argv = [""]
    data = np.frombuffer(mmap.mmap(memory, size, flags=mmap.MAP_SHARED), np.uint8)
    os.close(memory)
    view = _View(data, int(data.__array_interface__["data"][0]))
    parents, ready = [], select.poll()
    with suppress(AttributeError, OSError):  # a system without pidfd_open
        parents.append(os.pidfd_open(parent))
    if os.getppid() != parent:
        return
    for descriptor in (requests, *parents):
        ready.register(descriptor, select.POLLIN)
    gc.freeze()  # the collector would write to each page that workers share
    gc.enable()  # imports take a fifth less time without it
    workers: dict[bytes, int] = {}
    with socket.socket(fileno=requests) as connection:
        while [descriptor for descriptor, _ in ready.poll()] == [requests]:
            index, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
            if not index:
                break
            if not descriptors:
                os.kill(workers[index], signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(workers[index], 0)[1])
                with suppress(OSError):
                    connection.send(b"%d" % code)
                continue
            workers[index] = os.fork()
            if not workers[index]:
                connection.close()
                work(descriptors[0], view, parents)
            os.close(descriptors[0])
    os.killpg(0, signal.SIGKILL)


def work(control: int, view: _View, parents: list[int]) -> None:
    """Serve connections until the parent of the server ends: the main function of a worker."""
    threading.Thread(target=_end_with, args=(parents,), daemon=True).start()
    with socket.socket(fileno=control) as orders:
        while True:
            _, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
            if not descriptors:
                os._exit(0)
            threading.Thread(target=_serve, args=(Connection(descriptors[0]), view), daemon=True).start()


def _end_with(parents: list[int]) -> None:
    """End this process with another one, even if a process that was forked from that keeps its end of a socket."""
    if parents:
        select.select(parents, [], [])
        os._exit(0)


def _portable(error: BaseException, depth: int = 3) -> tuple[BaseException, BaseException | None]:
    """Return a copy of an exception that another process can load, and one of its cause.

    Its traceback, unless it is one of ours, is a note.
    """
    cause = error.__cause__ and _portable(error.__cause__, depth - 1)[0] if depth else None
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a class of the user may raise anything when it is pickled
        copy = RuntimeError(f"{type(error).__name__}: {message(error)}")
    if not isinstance(error, StreamloaderError):
        copy.add_note("in the worker process:\n" + "".join(traceback.format_exception(error)))
    return copy, cause


def _serve(connection: Connection, view: _View) -> None:
    """Run the functions that one thread of the parent calls, one after another."""
    _LOCAL.arena, _LOCAL.connection = view, connection
    with suppress(OSError):
        connection.send_bytes(pickle.dumps(("ready",)))
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            value = pickle.loads(request)
            if type(value) is Shared:
                _LOCAL.shared[value.key] = value
                continue
            values, keys, calls = value
            for at, key in keys:
                values[at] = _shared(key)
            for number, at in enumerate(calls):
                values[at] = _callback(number)
            response = _dumps(("done", values[0](*values[1:])))[0]
        except BaseException as error:  # noqa: BLE001 - the caller gets any error
            response = _dumps(("error", *_portable(error)))[0]
            del error
        try:
            connection.send_bytes(response)
        except OSError:
            return
        values = []  # hold no memory of this call
        del request, value, response
