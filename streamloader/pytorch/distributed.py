"""Who am I: rank and world size, which DataLoader worker, and which loader iterates the dataset.

`SharedEpochs`: workers iterate over copies of the dataset, so the parent would never learn that an epoch is over, and
persistent workers would never learn of `set_epoch` and `load_state_dict`. A few bytes of anonymous shared memory (torch
unlinks its name at once: nothing is left after a kill) hold the epoch that was set last, who began the last pass and of
which epoch, the place that the parent chose last, and, for each worker, the epoch that it does next.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed
from torch.utils.data import DataLoader, get_worker_info

from streamloader.errors import UsageError, WorldError
from streamloader.order.schedule import World
from streamloader.order.state import ORDER_NAMES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# a mesh stands with the names of its data-parallel dimensions, unless it has one dimension only
WorldChoice: TypeAlias = (
    "tuple[int, int] | World | ProcessGroup | DeviceMesh | tuple[DeviceMesh, str | Sequence[str]] | None"
)

# Where launchers put rank and size, first found first. torchrun; Horovod; Open MPI; MPICH, Intel MPI and srun
# --mpi=pmi2; MVAPICH2; srun. Slurm's batch script itself has SLURM_PROCID, but no step: it is not rank 0 of many.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
# The same for the processes of this machine; Slurm lists them for each node, as "4(x2),3".
LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    *("MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
)

# Packages whose code stands between a dataset and the loader that iterates it; any other caller ends the search.
_LOADER_PACKAGES = ("torch.utils.data.", "torchdata.", "accelerate.", "transformers.", "multiprocessing.")
# The loaders of Accelerate and transformers that give each rank a part of what they read.
_SPLITTING_LOADERS = ("DataLoaderDispatcher", "IterableDatasetShard")


def resolve_world(given: WorldChoice) -> World:
    """Return the argument's rank and size, else torch.distributed's, else the launcher's, else one rank.

    `given`: (rank, size), a process group of the replicas, or a `DeviceMesh` with its data-parallel dimensions: ranks
    that differ in other dimensions only are one rank here, and get the same batches. Nothing is communicated.
    Raises `WorldError` for an invalid value.
    """
    if isinstance(given, World):
        return given
    if given is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return World(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return _of_launcher(os.environ)
    if torch.distributed.is_available():
        found = _of_torch(given)
        if found is not None:
            return found
    try:
        rank, size = given  # type: ignore[misc]
    except (TypeError, ValueError):
        remedy = "give world=(rank, size), a process group, or (mesh, 'its data-parallel dimension')"
        raise WorldError(f"world={given!r:.200}", remedy) from None
    return World(_whole(rank), _whole(size))


def _of_torch(given: Any) -> World | None:
    """The world of a process group or a mesh; None for anything else."""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(given, torch.distributed.ProcessGroup):
        rank = torch.distributed.get_rank(given)
        if rank < 0:
            raise WorldError("this process is not in the process group of world=", "give the group that it is in")
        return World(rank, torch.distributed.get_world_size(given))
    if isinstance(given, DeviceMesh):
        return _of_mesh(given, given.mesh_dim_names or ("",) * given.ndim, chosen=None)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], DeviceMesh):
        mesh, chosen = given
        return _of_mesh(mesh, mesh.mesh_dim_names or (), [chosen] if isinstance(chosen, str) else list(chosen))
    return None


def _of_mesh(mesh: DeviceMesh, names: Sequence[str], chosen: Sequence[str] | None) -> World:
    """Number the data-parallel coordinates of this process row by row, in the order of the mesh."""
    unknown = [name for name in chosen or () if name not in names]
    if unknown or (chosen is not None and not chosen) or (chosen is None and mesh.ndim != 1):
        shown = ", ".join(map(repr, names)) if any(names) else f"{mesh.ndim} without names"
        what = "no dimension" if not chosen else ", ".join(map(repr, unknown))
        remedy = "give world=(mesh, 'dp') with the dimension, or a tuple of the dimensions, over which data is split"
        raise WorldError(f"world= names {what} of a mesh whose dimensions are {shown}", remedy)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WorldError("this process is not in the mesh of world=", "give the mesh that it is in")
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
            return World(_whole(env[rank]), _whole(env[size]))
    return World(0, 1)


def ranks_on_this_machine() -> int:
    """Return how many loaders share this machine's memory: local ranks times DataLoader workers."""
    text = next((os.environ[name] for name in LOCAL_SIZES if name in os.environ), "1")
    counts = [int(count) for count in re.findall(r"(?:^|,)(\d+)", text)]
    return max(1, *counts, 1) * worker()[1]


def worker() -> tuple[int, int]:
    """Return (number, count) of this DataLoader worker; (0, 1) outside of one."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def in_worker() -> bool:
    """Return whether this process is a DataLoader worker."""
    return get_worker_info() is not None


def check_loader(batch_size: int | None, size: int) -> None:
    """Raise `UsageError` if the loader that asks for an iterator would batch batches, or split a rank's part again.

    `batch_size` is the dataset's, `size` its world size. A `collate_fn` of the user's own may take batches.
    """
    for _, caller in _loader_frames():
        if batch_size is not None and getattr(caller, "auto_collation", False) and _collates(caller.collate_fn):
            problem = f"this DataLoader makes batches, and the dataset yields batches of {batch_size} samples already"
            remedy = (
                "use DataLoader(dataset, batch_size=None), or batch_size=None for the dataset and a batch_size for it"
            )
            raise UsageError(problem, remedy)
        if size > 1 and type(caller).__name__ in _SPLITTING_LOADERS:
            name = type(caller).__name__
            problem = f"{name} splits what it reads between ranks, which is one rank's part of {size} already"
            raise UsageError(problem, "iterate without accelerator.prepare, see docs/frameworks.md")


def loader_asking_for_length() -> DataLoader[Any] | None:
    """Return the DataLoader whose `len` calls this, if one does."""
    callers = (caller for name, caller in _loader_frames() if name == "__len__")
    return next((caller for caller in callers if isinstance(caller, DataLoader)), None)


def _loader_frames() -> Iterator[tuple[str, Any]]:
    """Yield function name and `self` of each method below which this is called, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        if module.startswith(_LOADER_PACKAGES):
            yield frame.f_code.co_name, frame.f_locals.get("self")
        elif not module.startswith("streamloader."):
            return
        frame = frame.f_back


def _collates(collate_fn: Any) -> bool:
    """Whether this is one of the functions that stack samples."""
    return (getattr(collate_fn, "__module__", None) or "").partition(".")[0] in ("torch", "transformers")


def _whole(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise WorldError(f"{value!r} is not a rank or world size", "give integers") from None


MAX_WORKERS = 512
# The values of a state that change as a run continues.
PLACE = ("epoch", "position", "extra", "workers", "ranks", "batch", "pin", *ORDER_NAMES)


class SharedEpochs:
    """The epoch of the next pass: the least that any worker of the last pass does next, or what was set since."""

    def __init__(self) -> None:
        sizes = (1, 1, 1, 1, 1, len(PLACE), MAX_WORKERS)
        shared = torch.zeros(sum(sizes), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        fields = shared.split(sizes)
        self._chosen, self._workers, self._reader, self._begun, self._choices, self._place, self._next = fields
        self._seen = 0  # of the parent's choices, by this copy

    def next_epoch(self) -> int:
        """Return the epoch at which the next pass starts."""
        workers = int(self._workers)
        return int(self._next[:workers].min()) if workers else int(self._chosen)

    @property
    def read_elsewhere(self) -> bool:
        """Whether the last pass was begun by another process."""
        return int(self._reader) not in (0, os.getpid())

    @property
    def begun(self) -> int:
        """The epoch of the pass that was begun last, or what was set since."""
        return int(self._begun)

    def begin(self, worker: int, workers: int, epoch: int) -> None:
        """Note that one of so many workers starts a pass of `epoch`.

        The first one also speaks for those that are still starting: it may be through before they have begun.
        """
        if int(self._workers) != workers:
            self._next[:workers] = epoch
            self._workers.fill_(workers)
        self._next[worker] = epoch
        self._begun.fill_(epoch)
        self._reader.fill_(os.getpid())

    def complete(self, worker: int, epoch: int) -> None:
        """Note that a worker has completed its pass of `epoch`; nothing, if another epoch was set meanwhile."""
        if int(self._next[worker]) == epoch:
            self._next[worker] = epoch + 1

    def choose(self, epoch: int) -> None:
        """Let the next pass be of this epoch: the caller set it, or loaded a state, perhaps in each worker."""
        self._begun.fill_(epoch)
        self._reader.zero_()
        if self.next_epoch() != epoch:
            self._workers.zero_()
            self._chosen.fill_(epoch)

    def publish(self, place: Sequence[int]) -> None:
        """Let the workers, which may run already, know where the next pass begins: the values of `PLACE`."""
        self._place.copy_(torch.tensor(place))
        self._seen = int(self._choices) + 1
        self._choices.fill_(self._seen)

    def update(self) -> dict[str, int] | None:
        """Return where the next pass begins, if the parent published it since the last call of this copy."""
        if self._seen == int(self._choices):
            return None
        self._seen = int(self._choices)
        return dict(zip(PLACE, self._place.tolist(), strict=True))
