"""Which engine does the tasks of a conversion, and what every engine promises.

- Tasks are made as they are needed: the first of them runs before the last is made, and few are held at any time.
- `on_done` is called in the thread that called `run_tasks`, in the order in which tasks end.
- After a failure no further task is handed over, those handed over are finished, and the failure of the earliest task
  is raised, as the error that it was where it happened.
- A task whose worker dies is done again, three times in all; then it is an `EngineError` that names the shard. A bug,
  any exception but a `StreamloaderError`, is an `EngineError` too.
- Ctrl-C, or whatever else `on_done` raises, ends the run at once.
- A cluster that is started here is ended with the run and leaves no process and no file, not even when this process is
  killed. One that is reached by an address is left as it was, and so is a connection to Ray or Spark that this process
  has already: it can have but one, which is then used.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from streamloader.conversion.engines import local
from streamloader.conversion.engines.drive import Cluster, drive
from streamloader.conversion.task import Outcome, Task
from streamloader.errors import EngineError, UsageError

# how an address begins, and an example of one
CLUSTERS = {
    "dask": (r"(tcp|tls|ucx|ws|wss)://.+:\d+$", "dask=tcp://host:8786"),
    "ray": (r"auto$|(ray://)?[^/]+:\d+$", "ray=ray://host:10001"),
    "spark": (r"local(-cluster)?(\[.+\])?$|yarn$|(spark|k8s)://.+", "spark=spark://host:7077"),
}
HOST_AND_PORT = r"(?:\[([^\]]+)\]|([^/,:\[\]]+)):(\d+)"
CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class EngineChoice:
    """An engine's name, and the address of the cluster; empty: one is started on this machine."""

    name: str = "local"
    address: str = ""


def parse_engine(text: str) -> EngineChoice:
    """Return the engine that `text` names: `local`, or `dask`, `ray`, `spark`, each with `=ADDRESS` if wanted."""
    name, equals, address = (part.strip() for part in text.partition("="))
    if name not in ("local", *CLUSTERS):
        example = CLUSTERS["dask"][1]
        raise UsageError(f"there is no engine {text!r}", f"choose local, {', '.join(CLUSTERS)}, or e.g. {example}")
    if equals and name == "local":
        raise UsageError(f"the engine {text!r} has an address", "local is this machine; --workers says how many")
    if address.startswith("sc://"):
        raise UsageError(f"{address} is Spark Connect, which cannot run tasks", "give the URL of the master")
    if equals and not re.match(CLUSTERS[name][0], address):
        raise UsageError(f"the engine {text!r} has no address", f"write {name}, or e.g. {CLUSTERS[name][1]}")
    return EngineChoice(name, address)


def check_url(choice: EngineChoice, url: str) -> None:
    """Raise `UsageError` where `url` lies in the memory of this process: no worker of a cluster reaches it."""
    if choice.name != "local" and url.startswith("memory:"):
        raise UsageError(
            f"{url} lies in the memory of this process, where the workers of {choice.name} cannot reach it",
            "use the local engine, or another store",
        )


def run_tasks(
    choice: EngineChoice,
    tasks: Iterator[Task],
    workers: int,
    on_done: Callable[[Task, Outcome], None],
    spare: list[local.Worker] | None = None,
) -> None:
    """Do all tasks on the chosen engine, as the module says; `spare` are processes for `local` that were begun before.

    `workers` are processes on this machine; 0 is, for `local`, this process itself, and for the others all cores. On a
    cluster with an address they are the most tasks at a time; 0 is as many as it has places for.
    Raises what tasks raise, `EngineError` where the engine fails, `UsageError` where its package is missing.
    """
    if choice.name == "local":
        local.run_tasks(tasks, workers, on_done, spare)
        return
    _call_at(choice)
    with _open(choice, workers) as cluster:
        drive(cluster, _checked(choice, tasks), on_done)


def _call_at(choice: EngineChoice) -> None:
    """Raise `EngineError` where nobody listens at the address: the clusters' own ways to say so take minutes."""
    refusals = []
    for bracketed, plain, port in re.findall(HOST_AND_PORT, choice.address):
        try:
            socket.create_connection((bracketed or plain, int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:  # a port above 65535
            refusals.append(str(error))
        else:
            return
    if refusals:
        raise EngineError(f"nobody answers at {choice.address}: {refusals[0]}", f"see that {choice.name} runs there")


def _open(choice: EngineChoice, workers: int) -> AbstractContextManager[Cluster]:
    if choice.name == "dask":
        from streamloader.conversion.engines.dask import open_dask

        return open_dask(choice.address, workers)
    if choice.name == "ray":
        from streamloader.conversion.engines.ray import open_ray

        return open_ray(choice.address, workers)
    from streamloader.conversion.engines.spark import open_spark

    return open_spark(choice.address, workers)


def _checked(choice: EngineChoice, tasks: Iterator[Task]) -> Iterator[Task]:
    for task in tasks:
        check_url(choice, task.store.url)
        yield task
