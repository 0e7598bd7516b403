"""Tasks on Dask: each is one call of `Client.submit`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any

from streamloader.conversion.engines.drive import Answer, Cluster, attempt
from streamloader.conversion.engines.house import LOG_TAIL, deaf_to_ctrl_c, kill_all, scratch
from streamloader.conversion.sources.needs import need
from streamloader.conversion.task import Task
from streamloader.errors import EngineError
from streamloader.format.threads import cpu_count


@contextmanager
def open_dask(address: str, workers: int) -> Iterator[Cluster]:
    """Connect to the scheduler at `address`, or start one here with `workers` processes for as long as the block."""
    distributed = need("distributed", "dask")
    with ExitStack() as stack:
        scheduler = address or stack.enter_context(_started(workers or cpu_count()))
        try:
            client = stack.enter_context(distributed.Client(scheduler, set_as_default=False))
        except (OSError, ValueError) as error:
            raise EngineError(f"no Dask scheduler answers at {scheduler}: {error}", "see that it runs") from error

        def submit(task: Task) -> Future[Answer]:
            ended: Future[Answer] = Future()
            client.loop.add_callback(_hand_over, client.submit(attempt, task, pure=False, retries=0), ended)
            return ended

        def deaths(error: BaseException) -> int:
            return error.allowed_failures + 1 if isinstance(error, distributed.KilledWorker) else 0

        def slots() -> int:
            try:
                return sum(client.nthreads().values())
            except OSError as error:
                raise EngineError(f"the Dask scheduler at {scheduler} is gone: {error}", "see its log") from error

        # One for each slot: Dask gives a killed worker's waiting tasks the same blame as the one that it was at.
        yield Cluster("Dask", submit, deaths, slots, 1, workers if address else 0)


async def _hand_over(its: Any, ours: Future[Answer]) -> None:
    """End our future as Dask's ends, in the client's loop: a thread that asks for a result waits for ever at Ctrl-C."""
    try:
        ours.set_result(await its)
    except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
        ours.set_exception(error)


@contextmanager
def _started(workers: int) -> Iterator[str]:
    """Start a cluster with so many processes, and yield its scheduler's address."""
    with scratch() as here, (here.folder / "log").open("w+b") as log:
        with deaf_to_ctrl_c():
            house = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "streamloader.conversion.engines.dask_house",
                    str(workers),
                    str(here.folder),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                text=True,
            )
        try:
            assert house.stdout is not None
            address = house.stdout.readline().strip()
            if not address:
                said = (here.folder / "log").read_text(errors="replace")[-LOG_TAIL:]
                raise EngineError(f"Dask does not start here: {said}", "see what it says")
            yield address
        finally:
            _kill(need("psutil", "dask"), house.pid)
            house.communicate()


def _kill(psutil: ModuleType, pid: int) -> None:
    with suppress(psutil.NoSuchProcess):  # it has died before
        house = psutil.Process(pid)
        house.suspend()  # so that it starts no worker in place of those that die now
        family = [*house.children(recursive=True), house]
        # multiprocessing's tracker ends last, by itself, and removes their semaphores
        trackers = [one for one in family if "resource_tracker" in str(one.cmdline())]
        kill_all(psutil, [one for one in family if one not in trackers])
        psutil.wait_procs(trackers)
