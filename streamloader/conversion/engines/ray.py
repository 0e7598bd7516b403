"""Tasks on Ray: each is one call of a remote function."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from streamloader.conversion.engines.drive import Cluster, attempt
from streamloader.conversion.engines.house import own_environment, own_signals, scratch
from streamloader.conversion.sources.needs import need
from streamloader.errors import EngineError, UsageError
from streamloader.format.threads import cpu_count

OBJECTS = 100 << 20  # bytes: what travels are tasks and receipts
LONGEST_FOLDER = 40  # Ray's sockets lie below it, and a socket's path has at most 103 characters


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
            stack.enter_context(own_environment())
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # a conversion tells nobody
            options = {"address": address} if address else _options(stack, workers or cpu_count())
            stack.callback(ray.shutdown)
            try:
                with own_signals():
                    ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
            except (OSError, RuntimeError, ValueError, errors.RayError) as error:
                where = f"no Ray cluster answers at {address}" if address else "Ray does not start here"
                raise EngineError(f"{where}: {error}", "see that it runs, and its log") from error
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


def _options(stack: ExitStack, workers: int) -> dict[str, Any]:
    """Return the options of a cluster on this machine. Ray itself asks for a token on whatever it listens."""
    short = len(tempfile.gettempdir()) <= LONGEST_FOLDER or not Path("/tmp").is_dir()
    folder = stack.enter_context(scratch(None if short else "/tmp"))
    return {
        "address": "local",  # not the one of RAY_ADDRESS
        "num_cpus": workers,
        "num_gpus": 0,
        "include_dashboard": False,
        "object_store_memory": OBJECTS,
        "_temp_dir": str(folder),
    }
