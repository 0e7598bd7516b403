"""Runs the tasks of a conversion: in processes of this machine, or on a Dask, Ray or Spark cluster.

- Tasks are made when they are needed: few exist at any time, and the first runs before the last is made.
- `on_done` is called in the thread that called `run_tasks`, in the order in which tasks end.
- After a failure, no further task is submitted, the submitted ones are finished, and the error of the earliest failed
  task is raised. Any exception except a `StreamloaderError` is a bug; it becomes an `EngineError` with the traceback as
  a note.
- A task whose worker dies is attempted up to `ATTEMPTS` times; then it is an `EngineError` that names the shard. It is
  retried while no other task runs, so that the task at which workers die is known. Dask and Spark retry such tasks
  themselves.
- Ctrl-C and exceptions of `on_done` end the run at once.

Local workers are not forked, since a storage client that was used before a fork hangs. Each is a program of its own,
`python -m streamloader.conversion.executors FD`, and inherits a socket, which has no name. After a kill -9 of any
process, no semaphore and no shared memory is left, and no process either, because the socket closes.

If this process is already connected to Ray or Spark, that connection is used and stays open: a process can have only
one.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from streamloader.conversion.shard_task import Outcome, Task
from streamloader.errors import EngineError, StreamloaderError, UsageError
from streamloader.storage.optional import need
from streamloader.storage.process import SIGNAL_SECONDS, cpu_count, in_thread

ATTEMPTS = 3  # a shard whose worker died three times would fail a fourth time too
FRAMES = 6  # innermost frames of a traceback that a message shows
EXCERPT = 400  # characters from the start and the end of a message, which may contain tracebacks of several programs
ENDING_SECONDS = 10.0  # for a worker to print a traceback and exit

# By default, glibc returns every large array to the system, which clears the pages again for the next shard; without
# this, a conversion is 1.7 times as fast (bench/NOTES.md). With a single arena, also for Arrow, threads and libraries
# reuse each other's memory. A worker holds its peak until it ends; other C libraries ignore these variables.
_ARROW = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
MALLOC_SETTINGS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_ARENA_MAX": "1", **_ARROW}
HOST_AND_PORT = r"(?:\[([^\]]+)\]|([^/,:\[\]]+)):(\d+)"
CONNECT_SECONDS = 10.0

T = TypeVar("T")
Result = Outcome | StreamloaderError
OnDone = Callable[[Task, Outcome], None]


class WorkerDiedError(Exception):
    """The worker died while it ran the task, which may be retried."""


def _wait(futures: Collection[Future[Result]]) -> Collection[Future[Result]]:
    return wait(futures, SIGNAL_SECONDS, FIRST_COMPLETED).done  # briefly, so that Ctrl-C ends it


@dataclass(frozen=True)
class Executor:
    """Runs tasks. `name` is for messages.

    `submit(task)` starts a task. Its future ends with the result, with `WorkerDiedError`, or with an exception
    of the engine. `slots()` is the number of tasks that run at the same time now; `ahead` tasks per slot are submitted,
    so that no slot is idle, and at most `limit` in total (0: no limit). `wait(futures)` waits briefly, and returns the
    futures that have ended.
    """

    name: str
    submit: Callable[[Task], Future[Result]]
    slots: Callable[[], int]
    ahead: int = 2
    limit: int = 0
    wait: Callable[[Collection[Future[Result]]], Collection[Future[Result]]] = _wait

    def capacity(self) -> int:
        """Return the number of tasks that may be submitted now, at least 1: adaptive clusters start without workers."""
        capacity = max(1, self.slots()) * self.ahead
        return min(capacity, self.limit) if self.limit else capacity


def run_tasks(executor: Executor, tasks: Iterator[Task], on_done: OnDone) -> None:
    """Run all tasks, as the module's docstring describes. Raises the error of the earliest failed task."""
    failures = _run_all(executor, tasks, on_done)
    if failures:
        raise failures.pop(min(failures))  # not kept here: its traceback refers to this frame


def _run_all(executor: Executor, tasks: Iterator[Task], on_done: OnDone) -> dict[int, StreamloaderError]:
    """Run the tasks until one fails; return the errors by the number of the task."""
    pending = ((number, task, 0) for number, task in enumerate(tasks))
    retries: list[tuple[int, Task, int]] = []  # each with the number of workers that died
    submitted: dict[Future[Result], tuple[int, Task, int]] = {}
    failures: dict[int, StreamloaderError] = {}
    while True:
        free = 0 if failures else 1 if retries else executor.capacity()
        while len(submitted) < free and (numbered := retries.pop() if retries else next(pending, None)):
            submitted[executor.submit(numbered[1])] = numbered
            free = 1 if numbered[2] else free
        if not submitted:
            return failures
        for future in executor.wait(submitted.keys()):
            number, task, deaths = submitted.pop(future)
            error = future.exception()
            if isinstance(error, WorkerDiedError) and deaths + 1 < ATTEMPTS:
                retries.append((number, task, deaths + 1))
                continue
            result = future.result() if error is None else _failure(executor, task, error)
            if isinstance(result, StreamloaderError):
                failures[number] = result
            else:
                on_done(task, result)


def _failure(executor: Executor, task: Task, error: BaseException) -> EngineError:
    memory = "if memory ran out, use fewer workers or a smaller shard size; then run the same command again"
    if isinstance(error, WorkerDiedError):
        return EngineError(f"the worker that wrote {task} {error}, {ATTEMPTS} times in all", memory)
    text = "\n".join(line for line in str(error).splitlines() if not line.startswith("\tat "))  # Java's frames
    text = text if len(text) <= 2 * EXCERPT else f"{text[:EXCERPT]} ... {text[-EXCERPT:]}"
    remedy = f"its workers need this process's Python, streamloader and packages; see also its log; {memory}"
    return EngineError(f"{executor.name} could not run {task}: {type(error).__name__}: {text}", remedy)


def attempt(task: Task, work: Callable[[], T]) -> T | StreamloaderError:
    """Call `work` in a worker, and return its errors: clusters wrap, print or retry errors that are raised."""
    try:
        return work()
    except StreamloaderError as error:
        return error
    except Exception as error:  # noqa: BLE001 - returned to the caller
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        where = ", ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames))
        problem = f"the worker that wrote {task} failed: {type(error).__name__}: {error} (at {where})"
        failure = EngineError(problem, "this is a bug, please report it")
        failure.add_note(traceback.format_exc())
        return failure


def attempt_task(task: Task) -> Result:
    """Run a task in a worker of a cluster."""
    return attempt(task, task.run)


@contextmanager
def open_local(workers: int) -> Iterator[Executor]:
    """Start `workers` processes, each of which reads a task while it writes another; 0 runs tasks in this process."""
    if not workers:
        yield Executor("local", _run_here, lambda: 1, ahead=1)
        return
    pool = WorkerPool(workers)
    try:
        pool.start()
        yield Executor("local", pool.submit, lambda: workers, wait=pool.wait)
    finally:
        for worker in pool.workers:
            worker.close()


def _run_here(task: Task) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(task.run())
    return future


def _in_threads(run: Callable[[Task], Result]) -> Callable[[Task], Future[Result]]:
    """Return a `submit` that calls `run`, which waits for the result of a cluster, in a thread for each task.

    These threads are not joined: after Ctrl-C, a cluster may no longer respond.
    """
    return lambda task: in_thread(partial(run, task), "streamloader-task")


def send(channel: connection.Connection, value: Any) -> None:
    """Do what `channel.send` does, which prints a `BufferError` if Ctrl-C ends it (Python 3.13).

    The traceback keeps the view of a `BytesIO`, which the garbage collector then closes.
    """
    channel.send_bytes(bytes(ForkingPickler.dumps(value)))


class Worker:
    """A process, and the futures of its tasks."""

    def __init__(self) -> None:
        self.channel, theirs = Pipe()
        # Ctrl-C in a terminal reaches the whole process group, but the parent decides what happens. SIGINT is blocked
        # from the start, because an interpreter that is still importing would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            end, null = theirs.fileno(), subprocess.DEVNULL
            command = [sys.executable, "-P", "-m", "streamloader.conversion.executors", str(end)]
            # "" is the current folder, where a notebook imports modules from
            env = {**MALLOC_SETTINGS, **os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
            self.process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=(end,), env=env)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.assigned: deque[Future[Result]] = deque()
        self.ready = True  # for another task

    def assign(self, task: Task, future: Future[Result]) -> None:
        """Send a task to the process."""
        self.assigned.append(future)
        self.ready = False
        with suppress(ConnectionError):  # the process has died: `WorkerPool.wait` finds the closed channel
            send(self.channel, task)

    def close(self) -> int:
        """Kill the process if it still runs, and return its status."""
        self.process.kill()
        self.channel.close()
        return self.process.wait()

    def fail(self) -> list[Future[Result]]:
        """Fail the futures of the worker, which closed its channel, and return them."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING_SECONDS)
        status = self.close()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"
        for future in self.assigned:
            future.set_exception(WorkerDiedError(how))
        return list(self.assigned)


class WorkerPool:
    """Worker processes on this machine. Only the thread that calls `wait` sends tasks and receives results."""

    def __init__(self, count: int) -> None:
        self.workers: list[Worker] = []
        self._count = count
        self._queue: deque[tuple[Task, Future[Result]]] = deque()

    def start(self) -> None:
        """Start missing workers."""
        while len(self.workers) < self._count:
            self.workers.append(Worker())

    def submit(self, task: Task) -> Future[Result]:
        """Add a task to the queue."""
        future: Future[Result] = Future()
        self._queue.append((task, future))
        return future

    def wait(self, _: Collection[Future[Result]]) -> list[Future[Result]]:
        """Assign tasks to workers, wait briefly for messages, and return the futures that have ended."""
        self.start()
        while self._queue and (free := [worker for worker in self.workers if worker.ready]):
            free[0].assign(*self._queue.popleft())
        busy: dict[object, Worker] = {w.channel: w for w in self.workers if w.assigned or not w.ready}
        done = [self._receive(busy[channel]) for channel in connection.wait(list(busy), SIGNAL_SECONDS)]  # type: ignore[arg-type]
        return [future for futures in done for future in futures]

    def _receive(self, worker: Worker) -> list[Future[Result]]:
        try:
            message: Result | None = worker.channel.recv()
        except (EOFError, OSError):  # OSError: it was killed in the middle of a message
            self.workers.remove(worker)
            return worker.fail()
        if message is None:
            worker.ready = True
            return []
        future = worker.assigned.popleft()
        future.set_result(message)
        return [future]


def main(descriptor: int) -> None:
    """Run tasks from the socket `descriptor` until the other end is closed, which also a kill -9 of the parent does.

    A shard is read while the previous one is written, because a write needs little CPU time. The worker sends None when
    it can take another task, and a result for each task, in their order.
    """
    tasks: SimpleQueue[Task] = SimpleQueue()
    writing: Future[None] | None = None
    # not closed here: the thread that reads it would end this process, with another status than a task that exits
    channel = connection.Connection(descriptor)
    with ThreadPoolExecutor(1) as writer:
        threading.Thread(target=_receive_tasks, args=(channel, tasks), daemon=True).start()
        send_lock = threading.Lock()

        def write(task: Task, prepared: Callable[[], Outcome] | StreamloaderError) -> None:
            result = prepared if isinstance(prepared, StreamloaderError) else attempt(task, prepared)
            with send_lock:
                send(channel, result)

        def read(task: Task) -> Future[None]:
            """Read a task, and start to write it. As a function, so that only the writer refers to the shard."""
            prepared = attempt(task, task.prepare)
            if writing is not None:
                writing.result()  # so that at most two shards are in memory
            return writer.submit(write, task, prepared)

        while True:
            writing = read(tasks.get())
            with send_lock:
                send(channel, None)


def _receive_tasks(channel: connection.Connection, tasks: SimpleQueue[Task]) -> None:
    try:
        while True:
            tasks.put(channel.recv())
    except (EOFError, OSError):
        pass  # the parent has ended
    except Exception:  # noqa: BLE001 - a task that cannot be unpickled
        traceback.print_exc()
    os._exit(1)


class EngineChoice(NamedTuple):
    """The name of an engine, and the address of its cluster; an empty address is the engine's local mode."""

    name: str = "local"
    address: str = ""


def parse_engine(text: str) -> EngineChoice:
    """Return the engine that `text` names: `local`, or `dask`, `ray` or `spark`, optionally with `=ADDRESS`.

    Raises `UsageError`.
    """
    name, equals, address = (part.strip() for part in text.partition("="))
    if name not in ("local", *CLUSTERS):
        example = CLUSTERS["dask"].example
        raise UsageError(f"there is no engine {text!r}", f"choose local, {', '.join(CLUSTERS)}, or e.g. {example}")
    if equals and name == "local":
        remedy = "local is this machine; workers= sets its number of processes"
        raise UsageError(f"the engine {text!r} has an address", remedy)
    if address.startswith("sc://"):
        raise UsageError(f"{address} is Spark Connect, which cannot run tasks", "give the URL of the master")
    if equals and not re.match(CLUSTERS[name].pattern, address):
        raise UsageError(f"the engine {text!r} has no address", f"write {name}, or e.g. {CLUSTERS[name].example}")
    return EngineChoice(name, address)


def open_executor(choice: EngineChoice, workers: int) -> AbstractContextManager[Executor]:
    """Return a context manager that starts or connects to an engine.

    `workers` is the number of processes on this machine; 0 is this process for `local`, and all cores for the others.
    On a cluster with an address it is the maximum number of tasks at a time; 0 is the number of its slots. Raises
    `EngineError` if the engine fails, and `UsageError` if its package is missing.
    """
    if choice.name == "local":
        return open_local(workers)
    failures = []
    for bracketed, plain, port in re.findall(HOST_AND_PORT, choice.address):  # clients take minutes to fail
        try:
            socket.create_connection((bracketed or plain, int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:  # a port above 65535
            failures.append(str(error))
        else:
            failures.clear()
            break
    if failures:
        raise EngineError(f"no connection to {choice.address}: {failures[0]}", f"check that {choice.name} runs there")
    return CLUSTERS[choice.name].open(choice.address, workers)


@contextmanager
def _open_dask(address: str, workers: int) -> Iterator[Executor]:
    distributed: Any = need("distributed")
    with ExitStack() as stack:
        try:
            # no memory limit: tasks are bounded already, and Dask would pause or restart workers
            size = {"n_workers": workers or cpu_count(), "threads_per_worker": 1, "memory_limit": 0}
            cluster = address or stack.enter_context(distributed.LocalCluster(**size, dashboard_address=None))
            client = stack.enter_context(distributed.Client(cluster, set_as_default=False))
        except (OSError, ValueError) as error:
            raise EngineError(f"no Dask scheduler at {address or 'this machine'}: {error}", "see its log") from error

        def run(task: Task) -> Any:
            return client.submit(attempt_task, task, pure=False, retries=0).result()

        def slots() -> int:
            try:
                return sum(client.nthreads().values())
            except OSError as error:
                raise EngineError(f"the Dask scheduler at {address} has ended: {error}", "see its log") from error

        # one task per slot: if a worker is killed, Dask counts the failure for its waiting tasks, too
        yield Executor("Dask", _in_threads(run), slots, 1, workers if address else 0)


@contextmanager
def _open_ray(address: str, workers: int) -> Iterator[Executor]:
    ray: Any = need("ray")
    with ExitStack() as stack:
        if not ray.is_initialized():
            size = {} if address else {"num_cpus": workers or cpu_count(), "include_dashboard": False}
            stack.callback(ray.shutdown)
            try:
                ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **size)
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise EngineError(f"no Ray cluster at {address or 'this machine'}: {error}", "see its log") from error
        elif address not in ("", "auto"):
            problem = f"this process is already connected to Ray, and cannot connect to {address}"
            raise UsageError(problem, "write ray, without an address")
        # no retries by Ray: they are unlimited if memory runs out
        remote = ray.remote(attempt_task).options(max_retries=0, num_cpus=1)
        died = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError)

        def run(task: Task) -> Any:
            try:
                return ray.get(remote.remote(task))
            except died:
                raise WorkerDiedError("died") from None

        def slots() -> int:
            return int(ray.cluster_resources().get("CPU", 0))

        yield Executor("Ray", _in_threads(run), slots, limit=workers if address else 0)


@contextmanager
def _open_spark(address: str, workers: int) -> Iterator[Executor]:
    pyspark: Any = need("pyspark")
    context = pyspark.SparkContext._active_spark_context
    with ExitStack() as stack:
        group = f"streamloader-{uuid.uuid4().hex}"
        if context is None:
            context = _spark_context(pyspark, address, workers or cpu_count())
            stack.callback(context.stop)
        elif address in ("", context.master):
            stack.callback(context.cancelJobGroup, group)
        else:
            problem = f"this process already has a Spark context at {context.master}, and cannot have one at {address}"
            raise UsageError(problem, "write spark, without an address")
        slots = [int(context.defaultParallelism)]

        def run(task: Task) -> Any:  # not in the main thread: Ctrl-C during a call to Java breaks the connection
            context.setJobGroup(group, "a conversion of streamloader")
            (result,) = context.parallelize([task], 1).map(attempt_task).collect()
            slots[0] = int(context.defaultParallelism)
            return result

        yield Executor("Spark", _in_threads(run), lambda: slots[0], limit=workers if address else 0)


def _spark_context(pyspark: Any, address: str, workers: int) -> Any:
    master = address or f"local[{workers},4]"  # 4 attempts at each task, as on a cluster
    conf = pyspark.SparkConf().setMaster(master).setAppName("streamloader")
    conf.set("spark.ui.enabled", "false").set("spark.ui.showConsoleProgress", "false")
    if master.startswith("local"):  # its workers are on this machine
        conf.set("spark.driver.host", "127.0.0.1").set("spark.driver.bindAddress", "127.0.0.1")
        conf.set("spark.executorEnv.PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    try:
        context = pyspark.SparkContext(conf=conf)
    except Exception as error:  # py4j's and Java's, of many classes
        problem = f"Spark does not start with the master {master}: {error}"
        raise EngineError(problem, "check that the master runs, and that Java 17 or later is installed") from error
    context.pythonExec = os.environ.get("PYSPARK_PYTHON", sys.executable)
    return context


class _Cluster(NamedTuple):
    """A function that opens an engine, the pattern of its addresses, and an example."""

    open: Callable[[str, int], AbstractContextManager[Executor]]
    pattern: str
    example: str


CLUSTERS = {
    "dask": _Cluster(_open_dask, r"(tcp|tls|ucx|ws|wss)://.+:\d+$", "dask=tcp://host:8786"),
    "ray": _Cluster(_open_ray, r"auto$|(ray://)?[^/]+:\d+$", "ray=ray://host:10001"),
    "spark": _Cluster(_open_spark, r"local(-cluster)?(\[.+\])?$|yarn$|(spark|k8s)://.+", "spark=spark://host:7077"),
}


if __name__ == "__main__":
    main(int(sys.argv[1]))
