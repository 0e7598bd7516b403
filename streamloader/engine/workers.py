"""Worker processes: how they are started, replaced and ended, and what runs in them.

A server, which is started by exec, imports what workers need, once, and forks them. All executors of a process share
its `Pool` of workers. Each thread of a worker serves one connection, whose calls it runs one after another. The server
and the workers end with the process.
"""

from __future__ import annotations

import atexit
import gc
import mmap
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from streamloader.engine.arena import Arena, MappedMemory
from streamloader.engine.messages import Shared, dump, dump_error, load_call, receive, refer_to, serve, share
from streamloader.errors import EngineError

MAX_DEATHS = 3  # of workers within DEATH_SECONDS, then a call fails
DEATH_SECONDS = 60.0
EXIT_SECONDS = 1.0
MESSAGE_BYTES = 32  # at most, of messages to and from the server that forks workers
# That server starts by this code: `serve_forks` is imported with the parent's sys.path.
_CODE = (
    "import gc, sys, signal; gc.disable(); signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[6:]; "
    "from streamloader.engine.workers import serve_forks; serve_forks(*map(int, sys.argv[1:5]))"
)
# What the server imports, or calls, if this process has imported the other module.
_PRELOADED = {
    **{f"streamloader.engine.{name}": __name__ for name in ("fetcher", "gather", "stages")},
    "streamloader.storage.generic": "streamloader.storage.generic",
    "streamloader.storage.s3:load_models": "streamloader.storage.s3",
    **dict.fromkeys(["streamloader.images.decode", "simplejpeg", "cv2"], "streamloader.images.decode"),
}


# ---- in the process that has workers. A worker is referred to by the socket that hands connections over to it.


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

    def fork(self, index: int) -> socket.socket:
        """Start a worker, unless the server has ended."""
        worker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, suppress(OSError):
            socket.send_fds(self._requests, [b"%d" % index], [theirs.fileno()])
        return worker

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


def _await_end(worker: socket.socket, seconds: float = 0.0) -> None:
    """Wait until a worker, which was killed, has ended. Not longer, since a process that it forked may live on."""
    with worker, suppress(OSError):
        worker.settimeout(seconds)
        worker.recv(1)


class Pool:
    """The worker processes of this process, and the memory that they share. `serves`: once a first job has ended."""

    def __init__(self) -> None:
        self.serves = threading.Event()
        self.arena = Arena(shared=True)
        self._workers: list[socket.socket] = []
        self._server: _ForkServer  # once there are workers
        self._functions: dict[Callable[..., Any], Shared] = {}
        self._receivers: dict[int, Callable[[], None]] = {}  # by descriptor
        self._poll = select.epoll()
        self._thread: threading.Thread | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._ended = False
        atexit.register(self._end)

    def grow(self, count: int) -> None:
        """Start workers until there are `count`."""
        with self._lock:
            if not self._workers and count:
                self._server = _ForkServer(self.arena)
            while len(self._workers) < count:
                self._workers.append(self._server.fork(len(self._workers)))

    def replace(self, worker: socket.socket) -> bool:
        """Start another worker in place of one that has ended; return False if that was done before.

        Raises `EngineError` after `MAX_DEATHS` of them within `DEATH_SECONDS`.
        """
        with self._lock:
            if self._ended:
                raise EngineError("the process ends", "end iteration before")
            if worker not in self._workers:
                return False
            code = self._renew(self._workers.index(worker))
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
            _await_end(self._workers[index])
            self._workers[index] = self._server.fork(index)
            return code
        code = self._server.end()
        for worker in self._workers:
            _await_end(worker, EXIT_SECONDS)
        self._server = _ForkServer(self.arena)
        self._workers = [self._server.fork(index) for index in range(len(self._workers))]
        return code

    def shared(self, function: Callable[..., Any]) -> Shared:
        """Return what is sent to workers for a function."""
        if function not in self._functions:
            self._functions[function] = share(function, self.arena)
        return self._functions[function]

    def connect(self, number: int) -> tuple[socket.socket, Connection]:
        """Return a worker, and a connection with a new thread of it, which does not respond if it has ended."""
        worker = self._workers[number]
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):
            socket.send_fds(worker, [b"c"], [theirs.fileno()])
        return worker, Connection(ours.detach())

    def watch(self, connection: Connection, receive: Callable[[], None]) -> None:
        """Call `receive` for each message of a connection, in the thread that receives those of all."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._receive, name="workers of streamloader", daemon=True)
                self._thread.start()
        self._receivers[connection.fileno()] = receive
        self._poll.register(connection.fileno(), select.EPOLLIN)

    receive = staticmethod(receive)

    def shut(self, connection: Connection) -> None:
        """End both directions of a connection. Raises `OSError` if it is closed."""
        with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    def forget(self, connection: Connection) -> None:
        """Close a connection, in the thread that receives."""
        self._poll.unregister(connection.fileno())
        del self._receivers[connection.fileno()]
        connection.close()

    def _receive(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                self._receivers[descriptor]()

    def _end(self) -> None:
        if os.getpid() == self._pid:
            self._ended = True
            if self._workers:
                self._server.end()
            for worker in self._workers:
                _await_end(worker)


# ---- in the server


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
    arena = MappedMemory(mmap.mmap(memory, size, flags=mmap.MAP_SHARED))
    os.close(memory)
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
                work(descriptors[0], arena, parents)
            os.close(descriptors[0])
    os.killpg(0, signal.SIGKILL)


# ---- in a worker


def work(control: int, arena: MappedMemory, parents: list[int]) -> None:
    """Serve connections until the parent of the server ends: the main function of a worker."""
    threading.Thread(target=_end_with, args=(parents,), daemon=True).start()
    with socket.socket(fileno=control) as orders:
        while True:
            _, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
            if not descriptors:
                os._exit(0)
            threading.Thread(target=_serve, args=(Connection(descriptors[0]), arena), daemon=True).start()


def _end_with(parents: list[int]) -> None:
    """End this process with another one, even if a process that was forked from that keeps its end of a socket."""
    if parents:
        select.select(parents, [], [])
        os._exit(0)


def _serve(connection: Connection, arena: MappedMemory) -> None:
    """Run the functions that one thread of the parent calls, one after another."""
    serve(connection, arena)
    with suppress(OSError):
        connection.send_bytes(dump(("ready",))[0])
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            values = load_call(request)
            if not values:
                continue
            values = [values[0](*values[1:])]
            refer_to(arena)  # the function may have used an executor of its own
            response = dump(("done", values[0]))[0]
        except BaseException as error:  # noqa: BLE001 - the caller gets any error
            refer_to(arena)
            response = dump_error(error)
            del error
        try:
            connection.send_bytes(response)
        except OSError:
            return
        values = []  # hold no memory of this call
        del request, response
