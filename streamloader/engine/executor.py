"""Runs functions in the threads of this process, or in worker processes on shared memory.

`Executor.call` returns the result of a function. With workers, the calling thread sends the function and its arguments
over a socket of its own to a thread of a worker, and waits for the response. Arrays in the arena are sent by reference,
so functions read and write the same memory in both cases. A function must only write to memory that its caller reserved
for it, and give the same result when it is called again: if a worker is killed, its calls are repeated in another one.

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
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing import current_process, spawn
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import Arena
from streamloader.errors import EngineError, StreamloaderError, message
from streamloader.storage.process import PerProcess

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
    """A function that runs in the calling thread, also if a function in a worker calls it."""

    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.call(*args)


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


class _Pickler(pickle.Pickler):
    """Pickles arrays and buffers in the arena by reference, `Shared` values and `Callback`s by number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: list[Shared] = []
        self.callbacks: list[Callback] = []

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            return _reduced(value)
        if kind is memoryview:
            return _memory, (np.frombuffer(value, np.uint8),)
        if kind is Shared:
            self.shared.append(value)
            return _shared, (value.key,)
        if kind is Callback:
            self.callbacks.append(value)
            return _callback, (len(self.callbacks) - 1,)
        return NotImplemented


def _reduced(value: NDArray[Any]) -> Any:
    """Reduce an array: by reference if it is in the arena, where a large one is copied to, else by value."""
    offset = None if _LOCAL.arena is None else _LOCAL.arena.offset(value)
    if value.dtype.hasobject or value.dtype.names or (offset is not None and not value.size):
        return NotImplemented
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
    """Return the pickle of a value, the shared values in it, and its callbacks after those that are given."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.callbacks += callbacks
    pickler.dump(value)
    return out.getvalue(), pickler.shared, pickler.callbacks


class Executor:
    """Calls functions in this process, or in `workers` worker processes. `on_death`: called after one was replaced.

    Each thread that calls has one thread in a worker, so a worker runs as many functions at once as it has callers.
    """

    def __init__(self, workers: int = 0, on_death: Callable[[], object] = bool) -> None:
        self.workers = workers
        self._on_death = on_death
        self._pool = _POOL.get(_Pool) if workers else None
        self.arena = _ARENA.get(_private_arena) if self._pool is None else self._pool.arena
        self._functions: dict[Callable[..., Any], Any] = {}  # shared
        self._channels = threading.local()
        self._kinds: Counter[str] = Counter()  # threads by name
        self._opened: defaultdict[str, weakref.WeakSet[_Channel]] = defaultdict(weakref.WeakSet)
        self._lock = threading.Lock()

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
        _LOCAL.arena, moved = self.arena, _LOCAL.moved
        _LOCAL.moved = []
        data = _dumps(value)[0]
        _LOCAL.moved, memory = moved, _LOCAL.moved
        return Shared(next(_KEYS), data, None, tuple(memory), tuple(sys.path))  # type: ignore[return-value]

    def share_pickle(self, data: bytes, main: dict[str, Any] | None) -> Any:
        """Return what to pass to `call` for a pickled value, of which each worker has its own. Only with workers."""
        return Shared(next(_KEYS), data, main, (), tuple(sys.path))

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
        if function not in self._functions:
            self._functions[function] = self.share(function)
        while True:
            channel = getattr(self._channels, "channel", None) or self._open()
            try:
                return channel.call([self._functions[function], *args])  # type: ignore[no-any-return]
            except _DisconnectedError:
                if channel.abandoned:
                    raise EngineError("the call was abandoned", "nobody waits for its result") from None
                del self._channels.channel
                if self._pool.replace(channel.worker):
                    self._on_death()
                on_repeat()

    def prepare(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function once in the worker of this thread, so that the time of later calls includes no start."""
        if self._pool is not None and not hasattr(self._channels, "channel"):
            self.call(function, *args)

    def _open(self) -> _Channel:
        """Connect this thread with a worker: threads of the same name are spread over all workers."""
        assert self._pool is not None
        kind = threading.current_thread().name.rstrip("0123456789")
        with self._lock:
            number = self._kinds[kind] % self.workers
            self._kinds[kind] += 1
            channel = self._channels.channel = _Channel(self._pool, number)
            self._opened[kind].add(channel)
        channel.wait_for_start()  # without the lock, which `abandon` takes
        return channel

    def abandon(self, kind: str) -> None:
        """End the calls of threads with this name without waiting for workers, which must not write to the arena."""
        with self._lock:
            for channel in self._opened[kind]:
                channel.abandon()


class _DisconnectedError(Exception):
    """The worker was killed, or its thread ended."""


class _Channel:
    """The connection of one thread of this process with one thread of a worker."""

    def __init__(self, pool: _Pool, number: int) -> None:
        self.worker = pool.workers[number]
        self.abandoned = False
        self._known: set[int] = set()  # keys of shared values that were sent
        self._arena = pool.arena
        self._moved: list[NDArray[np.uint8]] = []
        ours, theirs = socket.socketpair()
        with theirs:
            self.worker.hand_over(theirs)
        self._connection = Connection(ours.detach())

    def wait_for_start(self) -> None:
        """Wait until the worker serves this connection; if it ends before, the first call finds that."""
        with suppress(EOFError, OSError):
            self._connection.recv_bytes()

    def call(self, values: list[Any]) -> Any:
        """Return the result of the function `values[0]` with the others as its arguments.

        Those that are shared or callbacks are sent as numbers, since a method of a pickler takes longer to find them.
        """
        _LOCAL.arena, _LOCAL.moved = self._arena, self._moved  # this thread may call other executors as well
        keys = [(at, value.key) for at, value in enumerate(values) if type(value) is Shared]
        calls = [at for at, value in enumerate(values) if type(value) is Callback]
        plain = [None if type(value) in (Shared, Callback) else value for value in values]
        data, shared, callbacks = _dumps((plain, keys, calls), [values[at] for at in calls])
        shared += [values[at] for at, _ in keys]
        try:
            for value in shared:
                if value.key not in self._known:
                    self._known.add(value.key)
                    self._connection.send_bytes(pickle.dumps(value._replace(memory=())))
            self._connection.send_bytes(data)
            failed, kind, values = self._respond([*callbacks, Callback(self._allocate)])
        except (EOFError, OSError) as error:
            raise _DisconnectedError from error
        finally:
            self._moved.clear()
        try:
            if failed is not None:
                raise failed
            if kind == "done":
                return values[0]
            raise values[0] from values[1]
        finally:
            del failed, values  # the tracebacks of errors hold this frame

    def abandon(self) -> None:
        """Let the thread that waits for a response get an error. The descriptor stays open, since it may be in use."""
        self.abandoned = True
        with socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours, suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)

    def _respond(self, callbacks: Sequence[Callback]) -> tuple[BaseException | None, str, list[Any]]:
        """Answer the callbacks of a call until it ends; return the first error of one, and the last message."""
        failed: BaseException | None = None
        while True:
            kind, *values = pickle.loads(self._connection.recv_bytes())
            if kind != "callback":
                return failed, kind, values
            number, given = values
            try:
                response = True, callbacks[number](*given)
            except BaseException as error:  # noqa: BLE001 - raised by the caller, once the worker has ended the call
                failed, response = error, (False, None)
            self._connection.send_bytes(_dumps(response)[0])

    def _allocate(self, size: int) -> tuple[int, NDArray[np.uint8]]:
        """Return memory for a large array of the result, and its number."""
        self._moved.append(self._arena.allocate(size))
        return len(self._moved) - 1, self._moved[-1]


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
        connection.send_bytes(b"ready")
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
