"""State of one process, its threads and its number of cores.

After a fork, the child does not use clients that it inherits: `PerProcess` keeps a value for each process, and `Owner`
raises in another process. One fact is global: whether obstore was used. Its runtime hangs in a child that is forked
afterwards, even with a new store. A process that uses it records its id; an id of another process was inherited by a
fork.

Threads: `run_all` does the same work on many items, `in_thread` calls one function, and `wait_for`, `take` and
`result_of` are waits that Ctrl-C ends. `Runtime` has what the engine makes its threads of.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import math
import os
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import cached_property
from operator import is_, methodcaller
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from streamloader.errors import ForkError

Made = TypeVar("Made")


class Runtime(NamedTuple):
    """The clock in seconds, and what makes threads, locks and queues. Tests replace them by a seeded scheduler."""

    clock: Callable[[], float] = time.perf_counter
    thread: Callable[..., threading.Thread] = threading.Thread
    lock: Callable[[], Any] = threading.RLock
    condition: Callable[[], threading.Condition] = threading.Condition  # with a lock that its owner may take again
    event: Callable[[], threading.Event] = threading.Event
    semaphore: Callable[[int], threading.Semaphore] = threading.Semaphore
    queue: Callable[[], SimpleQueue[Any]] = SimpleQueue
    future: Callable[[], Future[Any]] = Future


RUNTIME = Runtime()


class PerProcess(Generic[Made]):
    """A value that each process creates once for itself. Thread-safe; pickled without values."""

    def __init__(self) -> None:
        self._made: dict[int, Made] = {}
        self._locks: dict[int, threading.RLock] = {}  # per process, since a child may inherit a locked one

    def get(self, make: Callable[[], Made]) -> Made:
        """Return the value of this process, which the first call creates by `make()`."""
        pid = os.getpid()
        if pid not in self._made:
            with self._locks.setdefault(pid, threading.RLock()):
                if pid not in self._made:
                    self._made[pid] = make()
        return self._made[pid]

    def __reduce__(self) -> tuple[Any, ...]:
        return (PerProcess, ())

    def all(self) -> Iterable[Made]:
        """Return the values of this process and the inherited ones, which may only be inspected."""
        return list(self._made.values())


def lock_name(name: str) -> socket.socket | None:
    """Return a socket that locks a name on this machine until it is closed; None if the name is locked.

    The kernel closes it with its process, however that ends. On systems other than Linux nothing is locked.
    """
    if not sys.platform.startswith("linux"):
        return socket.socket()
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0streamloader-{name}")  # an abstract name, not in the file system
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            lock.close()
            return None
    return lock  # even if this system refuses to bind it for another reason


class Owner:
    """The process that created this object."""

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, os.getpid()

    @property
    def here(self) -> bool:
        """Whether it is the current process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `ForkError` in another process."""
        if not self.here:
            raise ForkError(f"the {self._what} belong to another process", "call Store.reader in this process")


class _Watch(weakref.ref[Any]):
    """A weak reference whose callback can start a thread without Python code, by `methodcaller`."""

    start = staticmethod(start_new_thread)


class Finalizer:
    """Calls a function once: in a thread when an object is gone, or when it is called itself, or else at exit.

    What a signal handler raises inside a callback of a weak reference is lost. It raises in the main thread only, and
    the callback of this reference runs no Python code. A forked child has no threads and may have locked locks: it
    calls nothing. The exit of `weakref.finalize` fails with "dictionary changed size during iteration" if another
    thread creates or calls one meanwhile; this one does not.
    """

    def __init__(self, watched: object, call: Callable[..., None], *held: Any) -> None:
        self.atexit = True  # whether the function is called at exit
        watch = _Watch(watched, methodcaller("start", self, ()))
        _FINALIZERS[self] = (watch, Owner("objects"), call, held)

    def __call__(self) -> None:
        if (found := _FINALIZERS.pop(self, None)) is not None:
            _, owner, call, held = found
            if owner.here:
                call(*held)
            else:
                _INHERITED.append(held)

    def detach(self) -> None:
        """Let nobody call the function."""
        _FINALIZERS.pop(self, None)


def _finalize_all() -> None:
    # Python 3.12 and later start no thread after this, and would print that of each watched object that ends with it
    _Watch.start = is_  # type: ignore[assignment]
    for each in reversed(list(_FINALIZERS)):
        if each.atexit:
            try:
                each()
            except Exception:  # noqa: BLE001 - the others are called too
                sys.excepthook(*sys.exc_info())


_FINALIZERS: dict[Finalizer, tuple[Any, ...]] = {}  # what was not called, in the order of creation
atexit.register(_finalize_all)
_INHERITED: list[object] = []  # never freed: that would touch resources that the parent uses


def _unlock_properties() -> None:
    for name in [name for name in sys.modules if name.startswith("streamloader.")]:
        for kind in [kind for kind in vars(sys.modules[name]).values() if isinstance(kind, type)]:
            for value in vars(kind).values():
                if isinstance(value, cached_property):
                    vars(value)["lock"] = threading.RLock()


# Python 3.11 locks a cached property of all objects of a class while it is computed, maybe in a thread of the parent.
if sys.platform != "win32" and sys.version_info < (3, 12):
    os.register_at_fork(after_in_child=_unlock_properties)

# Descriptors of locked files. A forked child closes them, else their locks would outlive the parent.
_LOCKING: set[int] = set()
_LOCKING_LOCK = threading.RLock()


def open_to_lock(path: str, flags: int, folder: int) -> int:
    """Open a file of the folder with the descriptor `folder`; its locks end with this process, also if it has forked.

    Close it by `close_locked`.
    """
    with _LOCKING_LOCK:
        descriptor = os.open(path, flags, 0o600, dir_fd=folder)  # which no program inherits
        _LOCKING.add(descriptor)
    return descriptor


def close_locked(descriptor: int) -> None:
    """Close a file that `open_to_lock` has opened, which ends its locks."""
    with _LOCKING_LOCK:
        _LOCKING.discard(descriptor)
        os.close(descriptor)


def _close_inherited() -> None:
    for descriptor in _LOCKING:
        os.close(descriptor)
    _LOCKING.clear()
    _LOCKING_LOCK.release()


if sys.platform != "win32":
    os.register_at_fork(
        before=_LOCKING_LOCK.acquire, after_in_parent=_LOCKING_LOCK.release, after_in_child=_close_inherited
    )

_OBSTORE_USERS: set[int] = set()  # ids of this process and of those that it was forked from
_WARNED: set[int] = set()


def note_obstore_use() -> None:
    """Record that this process has used obstore."""
    _OBSTORE_USERS.add(os.getpid())


def forked_after_obstore() -> bool:
    """Return whether this process was forked after obstore was used. If so, warn once and name better start methods."""
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


DROP_SECONDS = 2.0
EXIT_SECONDS = 10.0  # that the end of the interpreter waits for calls in other threads


class _Calls:
    """The calls of this process that its end waits for."""

    def __init__(self) -> None:
        self.changed, self.running, self.ending = threading.Condition(), 0, False
        self.stopped: set[threading.Thread] = set()  # which do nothing any more
        self.until = 0.0  # when the end waits for no other thread any more
        self._owner = Owner("calls")
        atexit.register(self._finish)

    def stop_if_ending(self) -> None:
        """Let the interpreter end, once it does, instead of returning to a daemon thread whose call is counted."""
        if self.ending and threading.current_thread().daemon:
            with self.changed:
                self.running -= 1
                self.stopped.add(threading.current_thread())
                self.changed.notify_all()
                self.changed.wait_for(lambda: False)  # the end of the process

    def _finish(self) -> None:
        if self._owner.here:  # a forked child has no such threads
            until = time.monotonic() + EXIT_SECONDS
            with self.changed:
                self.ending = True
                while (self.running or _are_delivering()) and time.monotonic() < until:
                    self.changed.wait(0.01)


def _are_delivering() -> bool:
    """Return whether a thread of native code passes a result to an event loop, which may have used it already."""
    stacks = [list(traceback.walk_stack(frame)) for frame in sys._current_frames().values()]
    # the outermost call: threads of Python begin with another one
    return any(stack[-1][0].f_code.co_name == "call_soon_threadsafe" for stack in stacks)


_CALLS: PerProcess[_Calls] = PerProcess()


def wait_at_exit() -> _Calls:
    """Let the end of this process wait for `finished_before_exit`, also if the first such block begins during it."""
    return _CALLS.get(_Calls)


def join_at_exit(threads: Iterable[threading.Thread]) -> None:
    """At the end of the interpreter wait until threads have ended, and hold nothing, for `DROP_SECONDS` in all.

    To free a tensor of torch takes the interpreter's lock, without which a thread aborts the process.
    """
    calls = wait_at_exit()
    if calls.ending and threading.current_thread() is threading.main_thread():
        calls.until = calls.until or time.monotonic() + DROP_SECONDS
        while time.monotonic() < calls.until and any(each.is_alive() and each not in calls.stopped for each in threads):
            time.sleep(0.001)


@contextmanager
def finished_before_exit() -> Iterator[Callable[[], None]]:
    """Keep the interpreter from ending during the block, for up to `EXIT_SECONDS`.

    For native code that runs Python code, or has threads that do: when a daemon thread of this kind needs the
    interpreter after its end, the process aborts or hangs. Yields a function that a long block calls between its parts:
    there, the interpreter may end.
    """
    calls = wait_at_exit()
    with calls.changed:
        calls.running += 1
    try:
        calls.stop_if_ending()
        yield calls.stop_if_ending
    finally:
        with calls.changed:
            calls.running -= 1
            calls.changed.notify_all()


Item = TypeVar("Item")
Result = TypeVar("Result")

# The interpreter checks for signals before a wait, and then releases the GIL, which takes long if other threads compete
# for it. A signal in between does not end the wait, so a long wait consists of short ones.
SIGNAL_SECONDS = 0.5


def wait_for(wait: Callable[[float], bool]) -> None:
    """Call `wait(seconds)` until it returns True; Ctrl-C ends the wait."""
    while not wait(SIGNAL_SECONDS):
        pass


def take(queue: SimpleQueue[Item], waiting: Callable[[], object] = bool) -> Item:
    """Wait for the next item of a queue and return it; Ctrl-C ends the wait, and calls `waiting` now and then."""
    while True:
        with suppress(Empty):
            return queue.get(timeout=SIGNAL_SECONDS)
        waiting()


def in_thread(work: Callable[[], Result], name: str = "streamloader-io") -> Future[Result]:
    """Call `work` in a daemon thread: one of an executor would keep the interpreter from exiting while it waits."""
    future: Future[Result] = Future()
    threading.Thread(target=_do, args=(work, future), name=name, daemon=True).start()
    return future


def _do(work: Callable[[], Result], future: Future[Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised by the caller
        future.set_exception(error)
    finally:
        del future  # a cycle: the traceback of the error has this frame


def result_of(future: Future[Result]) -> Result:
    """Wait for the result of work, and return it or raise its error; Ctrl-C ends the wait."""
    try:
        while not future.done():
            with suppress(TimeoutError):
                return future.result(SIGNAL_SECONDS)
        return future.result()
    finally:
        del future  # a cycle: the traceback of an error has this frame


def run_all(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Return `[work(item) for item in items]`, computed by up to `threads` threads.

    After a failure no further item is started; a failure is raised when the started ones have ended. The
    threads are daemons, since an executor's would keep the interpreter from exiting while a request stalls. A single
    item gets a thread too, since Ctrl-C cannot interrupt a client's call on the main thread.
    """
    numbered = list(enumerate(items))
    if threads <= 1 or not numbered:
        return [work(item) for _, item in numbered]
    todo = iter(numbered)  # threads may share the iterator of a list
    results: dict[int, Result] = {}

    def consume() -> None:
        try:
            for index, item in todo:
                results[index] = work(item)
        except BaseException:
            list(todo)  # the others end after their current items
            raise

    futures: list[Future[None]] = []
    try:
        for _ in range(min(threads, len(numbered))):
            futures.append(in_thread(consume))
        wait_for(lambda seconds: not wait(futures, seconds).not_done)
    finally:
        list(todo)  # Ctrl-C
    while futures:
        result_of(futures.pop())
    return [results[index] for index, _ in numbered]


class Quota:
    """Bytes that threads reserve for a while; one that needs more than there are waits until it has all of them."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes during the block; wait until they are free."""
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def trim_heaps() -> None:
    """Return the free memory of the C library's heaps to the system, where that library is glibc.

    Each thread allocates in a heap of its own, of up to 64 MiB, which stays as large as the thread has made it.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def is_interactive() -> bool:
    """Return whether a notebook or an interactive session runs, whose functions other processes cannot import."""
    return not hasattr(sys.modules["__main__"], "__file__")


CPU_GROUPS = ("cpu", "cpu,cpuacct")  # names of the controller of version 1


def affinity() -> int:
    """Return the number of cores that this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cpu_quota(folder: str | os.PathLike[str] = "/sys/fs/cgroup") -> float | None:
    """Return the cores that the control group (version 1 or 2) allows to use; None without a limit."""
    readings = (("cpu.max",), *((f"{name}/cpu.cfs_quota_us", f"{name}/cpu.cfs_period_us") for name in CPU_GROUPS))
    for names in readings:
        try:
            quota, period = " ".join(Path(folder, name).read_text("ascii") for name in names).split()
            return int(quota) / int(period) if int(quota) > 0 else None
        except (OSError, ValueError):  # the other version, or "max"
            continue
    return None


def cpu_count() -> int:
    """Return the number of cores that this process may use: its affinity, or its cgroup quota if that is less."""
    quota = cpu_quota()
    return affinity() if quota is None else max(1, min(affinity(), math.ceil(quota)))
