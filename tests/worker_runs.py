"""Scenarios in a process of its own, which kill workers, fork, or are killed: `worker_runs.py NAME ARGUMENT...`.

Each prints lines of JSON.
"""

import faulthandler
import gc
import hashlib
import json
import multiprocessing.spawn
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import worker_tasks
from conversions import wait_for
from folder_server import folder_server
from worker_tasks import kill_connected, run_workers, servers_of, workers_of

import streamloader as sl
from streamloader.engine import workers as processes
from streamloader.engine.arena import Arena
from streamloader.engine.executor import Executor, Job
from streamloader.errors import EngineError, ForkError


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def digest(batch: dict[str, Any]) -> str:
    parts = [(name, item.tobytes() if isinstance(item, np.ndarray) else item) for name, item in batch.items()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def killed(moment: str, url: str, folder: str) -> None:
    """Kill workers in the middle of an epoch, and compare its batches with those of threads."""
    kinds: dict[str, Callable[[Any, int], Any]] = {
        "fetching": lambda at, n: sl.NumpyDataset(at, batch_size=16, num_workers=n),
        "decoding": lambda at, n: sl.NumpyDataset(at, batch_size=4, decode=True, num_workers=n),
        "transforming": lambda at, n: sl.NumpyDataset(
            at, batch_size=4, transform=worker_tasks.KilledOnce(folder, n), num_workers=n
        ),
    }
    opened = kinds[moment]
    threads = [digest(batch) for batch in opened(url, 0)]
    run_workers(2)
    with warnings.catch_warnings(record=True) as caught, folder_server(Path(url)) as server:
        warnings.simplefilter("always")
        ds, count = opened(server.url if moment == "fetching" else url, 2), 1
        if moment == "fetching":
            server.behave, server.every, server.seconds, server.times = "stall", 15, 0.5, 2
            server.delay = 0.005
            threading.Thread(target=lambda: server.met.wait() and kill(0), daemon=True).start()
        found = []
        for number, batch in enumerate(ds):
            found.append(digest(batch))
            if moment == "decoding" and number in (0, 9):
                kill_connected()
                count = 1 + (number > 0)
        wait_for(lambda: ds.stats().workers_replaced >= count)  # another worker may have done the work
    stats = ds.stats()
    shown = [str(warning.message).rpartition(";")[0] for warning in caught if "worker" in str(warning.message)]
    say({"same": found == threads, "replaced": stats.workers_replaced, "killed": count, "warnings": shown})


def kill(number: int) -> None:
    os.kill(workers_of(os.getpid())[number], signal.SIGKILL)


def server_killed(url: str) -> None:
    """Kill the process that forks workers, then one of them, in the middle of an epoch, and compare its batches."""
    threads = [digest(batch) for batch in sl.NumpyDataset(url, batch_size=2)]
    run_workers(3)
    ds = sl.NumpyDataset(url, batch_size=2, num_workers=3)
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, batch in enumerate(ds):
            found.append(digest(batch))
            if number == 3:
                before = workers_of(os.getpid())
                handles = [os.pidfd_open(pid) for pid in before]
                os.kill(*servers_of(os.getpid()), signal.SIGKILL)
            if number == 9:
                os.kill(before[0], signal.SIGKILL)
    ended = [bool(select.select([handle], [], [], 60)[0]) for handle in handles]
    shown = [str(warning.message).rpartition(";")[0] for warning in caught if "worker" in str(warning.message)]
    counts = {"replaced": ds.stats().workers_replaced, "workers": len(workers_of(os.getpid()))}
    say({"same": found == threads, "ended": ended, "warnings": shown, **counts})


def unserved(url: str, program: str) -> None:
    """Iterate while workers start for ever, and close."""
    multiprocessing.spawn.set_executable(program)
    options: dict[str, Any] = {"batch_size": 5, "memory": "64MB"}  # blocks are kept
    threads = sl.NumpyDataset(url, **options)
    ds = sl.NumpyDataset(url, num_workers=2, **options)
    same = [[digest(batch) for batch in ds] == [digest(batch) for batch in threads] for _ in range(3)]
    ds.close()
    say({"same": same, "requests": ds.stats().requests == threads.stats().requests, "workers": ds.stats().workers})


def imports(url: str, arguments: str) -> None:
    """Iterate with a worker, start another one, and show the packages that each of them has imported."""
    ds = sl.StreamingDataset(url, batch_size=16, num_workers=1, **json.loads(arguments))
    run_workers(1)
    for _ in ds:
        pass
    executor, found = Executor(2), []
    executor.start()
    for number in range(2):
        thread = threading.Thread(target=lambda: found.append(executor.call(worker_tasks.packages)), name=f"as{number}")
        thread.start()
        thread.join()
    (server,) = servers_of(os.getpid())
    say({"packages": found, "threads": len(list(Path(f"/proc/{server}/task").iterdir()))})


def deaths(name: str, *seconds: str) -> None:
    """Call a function that ends its worker, at these times of the clock, until that is an error."""
    left, ended = iter(seconds), SimpleQueue[Any]()
    processes.time = SimpleNamespace(monotonic=map(float, left).__next__)  # type: ignore[assignment]
    executor = Executor(2)
    executor.start()
    for _ in range(8):  # workers that end have idle connections
        executor._calls.submit(Job(len, ("",), lambda *end: ended.put(end)))
    for _ in range(8):
        ended.get(timeout=60)
    repeats: list[int] = []
    warnings.simplefilter("ignore")
    try:
        executor.call(getattr(worker_tasks, name), on_repeat=lambda: repeats.append(1))
    except EngineError as error:
        say({"error": str(error), "repeated": len(repeats), "deaths": len(seconds) - len([*left])})


def lost() -> None:
    """Begin a job on a connection whose worker has just been killed, and one on a new connection to it."""
    warnings.simplefilter("ignore")
    executor = Executor(1)
    executor.start()
    executor.call(len, "")
    channel, ended = executor._calls._idle[0], SimpleQueue[Any]()
    kill(0)
    while not channel._lost:
        time.sleep(0.001)
    for _ in range(2):
        channel.begin(Job(len, ("abc",), lambda *end: ended.put(end)))
    say([ended.get(timeout=60)[0] for _ in range(2)])


def killed_while_sending() -> None:
    """Kill a worker while a thread sends it a job, and show whether the connection was closed meanwhile."""
    warnings.simplefilter("ignore")
    executor = Executor(1)
    executor.start()
    executor.call(len, "")
    channel, ended, closed = executor._calls._idle[0], SimpleQueue[Any](), []
    send = channel.connection.send_bytes

    def send_slowly(data: bytes) -> None:
        kill(0)
        time.sleep(0.3)  # in which the thread that receives finds the end of the connection
        closed.append(channel.connection.closed)
        send(data)

    channel.connection.send_bytes = send_slowly
    channel.begin(Job(len, ("abc",), lambda *end: ended.put(end)))
    say({"result": ended.get(timeout=60)[0], "closed": closed})


def forked(url: str) -> None:
    """Use a pass of the parent and a new dataset in a forked child; the parent goes on."""
    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"batch_size": 5, "num_workers": 2}
    run_workers(2)
    expected = [digest(batch) for batch in sl.NumpyDataset(url, **options)]
    parents = workers_of(os.getpid())
    ds = sl.NumpyDataset(url, **options)
    iterator = iter(ds)
    begun = [digest(next(iterator))]
    reader, writer = os.pipe()
    if not os.fork():
        try:
            next(iterator)
            refused = ""
        except ForkError as error:
            refused = type(error).__name__
        same = [digest(batch) for batch in sl.NumpyDataset(url, **options)] == expected
        shown = {"refused": refused, "same": same, "own": workers_of(os.getpid()), "parents": parents}
        os.write(writer, json.dumps(shown).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as out:
        found = json.loads(out.read())
    os.wait()
    say(found | {"after": begun + [digest(batch) for batch in iterator] == expected})


def endless(work: str, url: str) -> None:
    """Iterate, or wait in a transform, until the process is killed, with a forked child that lives on."""
    transform = worker_tasks.stuck if work == "transforming" else None
    run_workers(2)
    ds = sl.NumpyDataset(url, batch_size=5, num_workers=2, transform=transform)
    iterator = iter(ds)
    if transform is None:
        next(iterator)
    else:
        threading.Thread(target=next, args=(iterator,), daemon=True).start()
    while len(workers_of(os.getpid())) < 2:
        time.sleep(0.01)
    others = []
    if work == "forked":
        child = os.fork()
        if not child:
            while True:
                signal.pause()
        others.append(child)
    workers = workers_of(os.getpid())
    if work == "without server":
        os.kill(*servers_of(os.getpid()), signal.SIGKILL)
        os.wait()
    say({"workers": workers, "servers": servers_of(os.getpid()), "others": others})
    while transform is None:
        for _ in ds:
            pass
    time.sleep(1000)


def interrupted(work: str, url: str) -> None:
    """Iterate, or wait in a transform, until Ctrl-C; then go on with another dataset."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    transform = worker_tasks.stuck if work == "transforming" else None
    run_workers(2)
    ds = sl.NumpyDataset(url, batch_size=5, num_workers=2, transform=transform)
    try:
        iterator = iter(ds)
        say({"workers": workers_of(os.getpid())})
        next(iterator)
        while True:
            for _ in ds:
                pass
    except KeyboardInterrupt:
        ds.close()
    again = sl.NumpyDataset(url, batch_size=5, num_workers=2)
    batches = sum(1 for _ in again)
    found = {"workers": workers_of(os.getpid()), "batches": batches, "replaced": again.stats().workers_replaced}
    say(found)


def closed(url: str) -> None:
    """Close a dataset whose transform waits in a worker, and look what is left."""
    options: dict[str, Any] = {"batch_size": 5, "num_workers": 2}
    run_workers(2)
    arena = Executor(2).arena
    wait_until_free(arena)
    ds = sl.NumpyDataset(url, transform=worker_tasks.Waiting(os.getpid()), **options)
    waiting = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: waiting.set())
    iterator = iter(ds)
    while not waiting.wait(0.1):
        pass
    ds.close()
    del iterator, ds
    left = [thread for thread in threading.enumerate() if thread.name.startswith("streamloader")]
    for thread in left:
        thread.join(60)
    wait_until_free(arena)
    say({"threads": [thread.name for thread in left if thread.is_alive()], "memory": arena.allocated})


def wait_until_free(arena: Arena) -> None:
    """Wait until jobs that nobody waits for have ended."""
    until = time.monotonic() + 60
    while arena.allocated and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)


def after_a_hang(url: str) -> None:
    """Close a dataset whose transform hangs, and iterate another one with a transform."""
    faulthandler.dump_traceback_later(20, exit=True)
    waiting = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: waiting.set())
    ds = sl.NumpyDataset(url, batch_size=5, num_workers=1, transform=worker_tasks.Waiting(os.getpid()))
    iterator = iter(ds)
    while not waiting.wait(0.1):
        pass
    ds.close()
    del iterator
    say(len(list(sl.NumpyDataset(url, batch_size=5, num_workers=1, transform=worker_tasks.drawing_own))))


def hedges(url: str) -> None:
    """Iterate with two workers that run, then with 8 of which 6 start meanwhile."""
    found = []
    run_workers(2)
    for workers in (2, 8):
        ds = sl.NumpyDataset(url, batch_size=16, num_workers=workers)
        list(ds)
        found.append(ds.stats().hedges)
    say(found)


def interrupted_start(url: str) -> None:
    """Send Ctrl-C to the process group at several moments of the start of workers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    replaced, running = 0, 0
    for seconds in (0.0, 0.01, 0.02, 0.03, 0.05):
        running += 2
        started = sl.NumpyDataset(url, batch_size=5, num_workers=running)
        try:
            iterator = iter(started)
            time.sleep(seconds)
            os.killpg(0, signal.SIGINT)
            next(iterator)
            time.sleep(60)
        except KeyboardInterrupt:
            started.close()
        ds = sl.NumpyDataset(url, batch_size=5, num_workers=running)
        list(ds)
        replaced += ds.stats().workers_replaced
    say(replaced)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
