"""Tasks on Spark: each is a job of one partition."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from streamloader.conversion.engines.drive import Answer, Cluster, attempt
from streamloader.conversion.engines.house import LOG_TAIL, own_environment, own_signals, scratch
from streamloader.conversion.sources.needs import need
from streamloader.conversion.task import Task
from streamloader.errors import EngineError, UsageError
from streamloader.format.threads import cpu_count, wait_for

DIED = ("Python worker exited unexpectedly", "ExecutorLostFailure")
ENDING_SECONDS = 10.0  # for what ends by itself when it is asked to


@contextmanager
def open_spark(address: str, workers: int) -> Iterator[Cluster]:
    """Connect to the master at `address`, or run Spark here with `workers` processes for as long as the block.

    Where this process has a context already, that is the cluster: there can be but one. It stays open.
    Raises `UsageError` where it has one and another address is given.
    """
    pyspark: Any = need("pyspark", "spark")
    with ExitStack() as stack:
        context = pyspark.SparkContext._active_spark_context
        if context is not None and address not in ("", context.master):
            problem = f"this process has a Spark context at {context.master}, so none at {address}"
            raise UsageError(problem, "write spark, without an address")
        if context is None:
            stack.enter_context(own_environment())
            context = stack.enter_context(_context(pyspark, address or f"local[{workers or cpu_count()}]"))

        # in a context of another's making Spark itself may do a task again before it tells us
        attempts = int(
            context.getConf().get("spark.task.maxFailures", "1" if context.master.startswith("local") else "4")
        )
        jobs = stack.enter_context(closing(_Jobs(context)))
        yield Cluster(
            "Spark",
            jobs.submit,
            lambda error: attempts if any(reason in str(error) for reason in DIED) else 0,
            lambda: jobs.slots,
            most=workers if address else 0,
        )


class _Jobs:
    """Jobs of one task each. A thread for each that is under way waits for it, and counts the places anew.

    Only these threads talk to Java while tasks are under way: a conversation that Ctrl-C cuts cannot be taken up again.
    """

    def __init__(self, context: Any) -> None:
        self.slots = int(context.defaultParallelism)
        self._context, self._group = context, f"streamloader-{uuid.uuid4().hex}"
        self._todo: SimpleQueue[tuple[Task, Future[Answer]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, task: Task) -> Future[Answer]:
        future: Future[Answer] = Future()
        self._todo.put((task, future))
        if not self._idle.acquire(blocking=False):
            # a daemon: nobody waits for it when Java does not answer any more
            thread = threading.Thread(target=self._work, name="streamloader-spark", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Cancel what is under way."""
        with suppress(OSError, need("py4j.protocol", "spark").Py4JError):  # its Java machine has died
            self._context.cancelJobGroup(self._group)
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join(ENDING_SECONDS)

    def _work(self) -> None:
        while item := self._todo.get():
            task, future = item
            try:
                self._context.setJobGroup(self._group, "a conversion of streamloader")
                answer = self._context.parallelize([task], 1).map(attempt).collect()[0]
                self.slots = int(self._context.defaultParallelism)
                future.set_result(answer)
            except Exception as error:  # noqa: BLE001 - handed to the caller, whatever it is
                future.set_exception(error)
            self._idle.release()


@contextmanager
def _context(pyspark: Any, master: str) -> Iterator[Any]:
    """Start a context and its Java machine, and end both."""
    home = pyspark.SparkContext
    with scratch() as here:
        conf = pyspark.SparkConf()
        for name, value in _settings(master, here.folder).items():
            conf.set(name, value)
        log = here.folder / "log"
        with ExitStack() as stack:
            try:
                # where there is a Java machine already, it stays
                gateway = stack.enter_context(_java(home, conf, log)) if home._gateway is None else None
                with own_signals():
                    context = home(conf=conf, gateway=gateway)
            except Exception as error:
                tail = log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else ""
                problem = f"Spark does not start with the master {master}: {str(error)[:LOG_TAIL]} {tail}"
                raise EngineError(problem, "see that the master runs, and that Java 17 or later is here") from error
            stack.callback(_stop, context)
            context.pythonExec = os.environ.get("PYSPARK_PYTHON", sys.executable)
            yield context


@contextmanager
def _java(home: Any, conf: Any, log: Path) -> Iterator[Any]:
    """Start a Java machine, and end it. A thread starts it: one whose start Ctrl-C cuts would go on for ever."""
    launch: Callable[..., Any] = need("pyspark.java_gateway", "spark").launch_gateway
    started: Future[Any] = Future()

    def work() -> None:
        try:
            with log.open("wb") as output:
                started.set_result(launch(conf, {"stdout": output, "stderr": subprocess.STDOUT}))
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            started.set_exception(error)

    threading.Thread(target=work, name="streamloader-spark", daemon=True).start()
    try:
        wait_for(lambda seconds: bool(wait([started], seconds).done))
        yield started.result()
    finally:
        wait_for(lambda seconds: bool(wait([started], seconds).done))
        if not started.exception():
            _end(home, started.result())


def _settings(master: str, folder: Path) -> dict[str, str]:
    settings = {
        "spark.master": master,
        "spark.app.name": "streamloader",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder),
        "spark.task.maxFailures": "1",  # we count
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder} -XX:-UsePerfData",
    }
    if master.startswith("local"):  # its workers are on this machine
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executorEnv.PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
    return settings


def _stop(context: Any) -> None:
    with suppress(OSError, need("py4j.protocol", "spark").Py4JError):  # its Java machine has died
        context.stop()


def _end(home: Any, gateway: Any) -> None:
    """End the Java machine that was started for this run, so that a later context starts a new one."""
    with suppress(OSError, need("py4j.protocol", "spark").Py4JError):
        gateway.shutdown()
    home._gateway = home._jvm = home._active_spark_context = None
    if gateway.proc is not None:  # None: this program was started by spark-submit
        gateway.proc.stdin.close()  # at which it ends
        with suppress(subprocess.TimeoutExpired):
            gateway.proc.wait(ENDING_SECONDS)
        gateway.proc.kill()
        gateway.proc.wait()
