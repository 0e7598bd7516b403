"""Rank and world size, DataLoader workers, and the loader that iterates the dataset.

`SharedEpochs`: workers iterate copies of the dataset, so the parent would not notice the end of an epoch, and
persistent workers would not notice `set_epoch` and `load_state_dict`. A few bytes of anonymous shared memory (torch
unlinks its name at once, so nothing is left after a kill) hold the epoch that was set last, the process and epoch of
the last pass, the position that the parent set last, and the next epoch of each worker.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from socket import socket
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

import torch
import torch.distributed
from torch.utils.data import DataLoader, get_worker_info

from streamloader.errors import UsageError, WorldError
from streamloader.order.schedule import World
from streamloader.order.state import ORDER_NAMES, PROGRESS_NAMES
from streamloader.storage.process import lock_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# a mesh with several dimensions comes with the names of its data-parallel dimensions
WorldChoice: TypeAlias = (
    "tuple[int, int] | World | ProcessGroup | DeviceMesh | tuple[DeviceMesh, str | Sequence[str]] | None"
)

# The variables of launchers for rank and size; the first pair that is set is used. torchrun; Horovod; Open MPI; MPICH,
# Intel MPI and srun --mpi=pmi2; MVAPICH2; srun. Slurm sets SLURM_PROCID in batch scripts too, SLURM_STEP_NUM_TASKS only
# in steps.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
# The variables for the number of processes on this machine; Slurm lists it for each node, as "4(x2),3".
LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    *("MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
)

# Packages whose frames may be between a dataset and the loader that iterates it; any other frame ends the search.
_LOADER_PACKAGES = ("torch.utils.data.", "torchdata.", "accelerate.", "transformers.", "multiprocessing.")
# The loaders of Accelerate and transformers that split the samples they read between ranks.
_SPLITTING_LOADERS = ("DataLoaderDispatcher", "IterableDatasetShard")


def resolve_world(given: WorldChoice) -> World:
    """Return the rank and size of the argument, else of torch.distributed, else of the launcher, else of one rank.

    `given`: (rank, size), a process group of the replicas, or a `DeviceMesh` with its data-parallel dimensions:
    processes that differ only in other dimensions have the same rank, and get the same batches. Does not communicate.
    Raises `WorldError` for an invalid value.
    """
    if isinstance(given, World):
        return given
    if given is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return World(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return _of_launcher(os.environ)
    if torch.distributed.is_available() and (world := _of_torch(given)) is not None:
        return world
    try:
        rank, size = given  # type: ignore[misc]
    except (TypeError, ValueError):
        remedy = "give world=(rank, size), a process group, or (mesh, 'its data-parallel dimension')"
        raise WorldError(f"world={given!r:.200}", remedy) from None
    return World(_parse_int(rank), _parse_int(size))


def _of_torch(given: Any) -> World | None:
    """Return the world of a process group or a mesh, or None for other values."""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(given, torch.distributed.ProcessGroup):
        rank = torch.distributed.get_rank(given)
        if rank < 0:
            raise WorldError("this process is not in the process group of world=", "give a group that contains it")
        return World(rank, torch.distributed.get_world_size(given))
    mesh, chosen = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if isinstance(mesh, DeviceMesh):
        return _of_mesh(mesh, [chosen] if isinstance(chosen, str) else chosen)
    return None


def _of_mesh(mesh: DeviceMesh, chosen: Sequence[str] | None) -> World:
    """Return the world whose ranks are the data-parallel coordinates, numbered row by row in the order of the mesh."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    unknown = [name for name in chosen or () if name not in names]
    if unknown or (chosen is not None and not chosen) or (chosen is None and mesh.ndim != 1):
        shown = ", ".join(map(repr, names)) if any(names) else f"{mesh.ndim} without names"
        invalid = ", ".join(map(repr, unknown)) if chosen else "no dimension"
        remedy = "give world=(mesh, 'dp') with the dimension, or a tuple of the dimensions, over which data is split"
        raise WorldError(f"world= names {invalid} of a mesh whose dimensions are {shown}", remedy)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WorldError("this process is not in the mesh of world=", "give a mesh that contains it")
    rank, size = 0, 1
    for dim, name in enumerate(names):
        if chosen is None or name in chosen:
            rank, size = rank * mesh.size(dim) + int(coordinate[dim]), size * mesh.size(dim)
    return World(rank, size)


def _of_launcher(env: Mapping[str, str]) -> World:
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        problem = f"RANK={env.get('RANK')} and WORLD_SIZE={env.get('WORLD_SIZE')} in the environment"
        raise WorldError(problem, "set both or none, or give world=")
    for rank, size in LAUNCHERS:
        if rank in env and size in env:
            return World(_parse_int(env[rank]), _parse_int(env[size]))
    return World(0, 1)


def ranks_on_this_machine() -> int:
    """Return the number of loaders that share this machine's memory: local ranks times DataLoader workers."""
    text = next((os.environ[name] for name in LOCAL_SIZES if name in os.environ), "1")
    counts = [int(count) for count in re.findall(r"(?:^|,)(\d+)", text)]
    return max([1, *counts]) * worker()[1]


def worker() -> tuple[int, int]:
    """Return (number, count) of this DataLoader worker, or (0, 1) outside of a worker."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def in_worker() -> bool:
    """Return whether this process is a DataLoader worker."""
    return get_worker_info() is not None


def check_loader(batch_size: int | None, size: int) -> None:
    """Raise `UsageError` if the loader that iterates would batch batches, or split a rank's part again.

    `batch_size` and the world size `size` are those of the dataset. A custom `collate_fn` may accept batches.
    """
    for _, caller in _loader_frames():
        if batch_size is not None and getattr(caller, "auto_collation", False) and _collates(caller.collate_fn):
            problem = f"this DataLoader makes batches, and the dataset yields batches of {batch_size} samples already"
            remedy = "use DataLoader(dataset, batch_size=None), or batch_size=None for the dataset only"
            raise UsageError(problem, remedy)
        if size > 1 and (name := type(caller).__name__) in _SPLITTING_LOADERS:
            problem = f"{name} splits samples between ranks, and the dataset yields one rank's part of {size} already"
            raise UsageError(problem, "iterate without accelerator.prepare, see docs/frameworks.md")


def loader_asking_for_length() -> DataLoader[Any] | None:
    """Return the DataLoader whose `len` calls this, or None."""
    callers = (caller for name, caller in _loader_frames() if name == "__len__")
    return next((caller for caller in callers if isinstance(caller, DataLoader)), None)


def _loader_frames() -> Iterator[tuple[str, Any]]:
    """Yield function name and `self` of the loader frames that call this, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        if module.startswith(_LOADER_PACKAGES):
            yield frame.f_code.co_name, frame.f_locals.get("self")
        elif not module.startswith("streamloader."):
            return
        frame = frame.f_back


def _collates(collate_fn: Any) -> bool:
    """Return whether this is a function of torch or transformers, which stacks samples."""
    return (getattr(collate_fn, "__module__", None) or "").partition(".")[0] in ("torch", "transformers")


def _parse_int(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise WorldError(f"{value!r} is not a rank or world size", "give integers") from None


MAX_WORKERS = 512
LOCKED_SECONDS = 0.001  # between attempts to lock
# of a position: the progress, the pin, and the order of a state
POSITION_VALUES = len(PROGRESS_NAMES) + 1 + len(ORDER_NAMES)


class SharedEpochs:
    """The epoch of the next pass: the minimum over the workers of the last pass, or the epoch that was set since."""

    def __init__(self) -> None:
        sizes = (1, 1, 1, 1, 2, 1, POSITION_VALUES, MAX_WORKERS, MAX_WORKERS)
        shared = torch.zeros(sum(sizes), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        fields = shared.split(sizes)
        self._chosen, self._workers, self._reader, self._begun, self._again, self._version, *others = fields
        self._position, self._next, self._loaded = others
        self._seen_version = 0  # of the published position, by this copy
        self._name = uuid4().hex

    def next_epoch(self) -> int:
        """Return the epoch at which the next pass starts."""
        workers = int(self._workers)
        return int(self._next[:workers].min()) if workers else int(self._chosen)

    @property
    def begun_elsewhere(self) -> bool:
        """Whether another process began the last pass."""
        return int(self._reader) not in (0, os.getpid())

    @property
    def begun(self) -> int:
        """The epoch of the pass that was begun last, or the epoch that was set since."""
        return int(self._begun)

    @contextmanager
    def choosing(self, workers: int) -> Iterator[None]:
        """Let one of several workers at a time choose its epoch, from `next_epoch` to `begin`.

        Otherwise another one could complete the last pass and begin the next epoch between the two.
        """
        lock: socket | None = None
        while workers > 1 and (lock := lock_name(f"epochs-{self._name}")) is None:
            time.sleep(LOCKED_SECONDS)
        try:
            yield
        finally:
            if lock is not None:
                lock.close()

    def begin(self, worker: int, workers: int, epoch: int) -> int:
        """Record that a worker, one of `workers`, starts a pass of `epoch`; return how often it has begun anew before.

        The first one to start records it for all, since it may finish before others have started.
        """
        if not worker:
            before, again = self._again.tolist()
            self._again.copy_(torch.tensor([~epoch, again + 1 if before == ~epoch else 0]))
        if int(self._workers) != workers:
            self._next[:workers] = epoch
            self._workers.fill_(workers)
        self._next[worker] = epoch
        self._begun.fill_(epoch)
        self._reader.fill_(os.getpid())
        return int(self._again[1])

    def load(self, worker: int, workers: int, epoch: int) -> None:
        """Record that a worker, one of `workers`, has loaded a state of `epoch`."""
        with self.choosing(workers):
            self.begin(worker, workers, epoch)
            self._again.zero_()
        self._loaded[worker] = epoch

    def first_loaded(self, workers: int) -> int:
        """Return the first epoch of the states that the workers have loaded."""
        return int(self._loaded[:workers].min())

    def complete(self, worker: int, epoch: int) -> None:
        """Record that a worker has completed its pass of `epoch`, unless another epoch was set since."""
        if int(self._next[worker]) == epoch:
            self._next[worker] = epoch + 1

    def choose(self, epoch: int) -> None:
        """Set the epoch of the next pass: the user set it, or loaded a state."""
        self._begun.fill_(epoch)
        self._reader.zero_()
        self._again.zero_()
        self._chosen.fill_(epoch)
        self._workers.zero_()  # also if the epoch is the same: workers that read ahead may complete it meanwhile

    def publish(self, position: Sequence[int]) -> None:
        """Tell workers, which may be running, where the next pass begins: `POSITION_VALUES` numbers."""
        self._position.copy_(torch.tensor(position))
        self._seen_version = int(self._version) + 1
        self._version.fill_(self._seen_version)

    def update(self) -> list[int] | None:
        """Return the position that the parent published since the last call of this copy, or None."""
        if self._seen_version == int(self._version):
            return None
        self._seen_version = int(self._version)
        values: list[int] = self._position.tolist()
        return values
