"""Tasks on Ray: each is one call of a remote function."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from streamloader.conversion.engines.drive import Cluster, attempt
from streamloader.conversion.engines.house import Scratch, kill_all, own_environment, own_signals, scratch
from streamloader.conversion.sources.needs import need
from streamloader.errors import EngineError, UsageError
from streamloader.format.threads import cpu_count

OBJECTS = 100 << 20  # bytes: what travels are tasks and receipts
LONGEST_FOLDER = 17  # a socket's path has at most 103 characters: 86 are of our folder and of Ray's below it


@contextmanager
def open_ray(address: str, workers: int) -> Iterator[Cluster]:
    """Connect to the cluster at `address`, or start one here with `workers` processes for as long as the block.

    Where this process is connected already, that is the cluster: there can be but one connection. It stays open.
    Raises `UsageError` where it is connected and another address is given.
    """
    ray: Any = need("ray", "ray")
    errors = ray.exceptions
    died = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)
    with ExitStack() as stack:
        connected = ray.is_initialized()
        if connected and address not in ("", "auto"):
            raise UsageError(f"this process is connected to Ray, so not to {address}", "write ray, without an address")
        if not connected:
            cluster = _connected(ray, {"address": address}) if address else _started(ray, workers or cpu_count())
            stack.enter_context(cluster)
        # no attempt of Ray's own: we count, and a failed task's errors are answers
        remote = ray.remote(attempt).options(max_retries=0, num_cpus=1)

        def slots() -> int:
            return int(ray.cluster_resources().get("CPU", 0))

        yield Cluster(
            "Ray",
            lambda task: remote.remote(task).future(),
            lambda error: int(isinstance(error, died)),
            slots,
            most=workers if address else 0,
        )


@contextmanager
def _connected(ray: Any, options: dict[str, Any]) -> Iterator[None]:
    with own_environment():
        try:
            _connect(ray, options)
            yield
        finally:
            ray.shutdown()


def _connect(ray: Any, options: dict[str, Any]) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # a conversion tells nobody
    try:
        with own_signals():
            ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        problem = f"no Ray cluster at {options['address']}: {error}"
        raise EngineError(problem, "see that it runs, and its log") from error


@contextmanager
def _started(ray: Any, workers: int) -> Iterator[None]:
    """Start a cluster here. When its processes are killed rather than asked, some would go on for a minute or more."""
    psutil = need("psutil", "ray")
    short = len(tempfile.gettempdir()) <= LONGEST_FOLDER or not Path("/tmp").is_dir()
    with scratch(None if short else "/tmp") as here, own_environment():
        try:
            _connect(ray, _options(here.folder, workers))
            here.kill_with_us(process.pid for process in _family(psutil, here))
            yield
        finally:
            with own_signals():  # an end that Ctrl-C cuts would be made up for at exit, with new files
                family = _family(psutil, here)  # now: Ctrl-C may have come while it started
                ray.shutdown()
                kill_all(psutil, family)
                kill_all(psutil, _orphans(psutil, here))


def _options(folder: Path, workers: int) -> dict[str, Any]:
    """Return the options of a cluster on this machine. Ray itself asks for a token on whatever it listens."""
    return {
        "address": "local",  # not the one of RAY_ADDRESS
        "num_cpus": workers,
        "num_gpus": 0,
        "include_dashboard": False,
        "object_store_memory": OBJECTS,
        "_temp_dir": str(folder),
    }


def _family(psutil: ModuleType, here: Scratch) -> list[Any]:
    """Return the processes of the cluster that has its files there."""
    children = [one for one in psutil.Process().children() if one.pid != here.guard.pid]
    roots = [one for one in children if str(here.folder) in " ".join(one.cmdline())]
    return [process for root in roots for process in (root, *root.children(recursive=True))]


def _orphans(psutil: ModuleType, here: Scratch) -> Iterator[Any]:
    """Yield what the cluster started while it ended: processes of nobody that write their logs there."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.pid == os.getpid() or process.ppid() == os.getpid()
            if not ours and any(Path(one.path).is_relative_to(here.folder) for one in process.open_files()):
                yield process
