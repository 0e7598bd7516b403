"""Who am I: rank and world size, which DataLoader worker, and which loader iterates the dataset."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.utils.data import DataLoader, get_worker_info

from streamloader.errors import UsageError, WorldError
from streamloader.plan.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    # a mesh stands with the names of its data-parallel dimensions, unless it has one dimension only
    WorldChoice = tuple[int, int] | World | ProcessGroup | DeviceMesh | tuple[DeviceMesh, str | Sequence[str]] | None

# Where launchers say rank and size, first found first. torchrun; Horovod; Open MPI; MPICH, Intel MPI and srun
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
    Raises `WorldError` where a value cannot be.
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
        raise WorldError(
            f"world={given!r:.200}",
            "give world=(rank, size), a process group, or (mesh, 'its data-parallel dimension')",
        ) from None
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
        raise WorldError(
            f"world= names {what} of a mesh whose dimensions are {shown}",
            "give world=(mesh, 'dp') with the dimension, or a tuple of the dimensions, over which data is split",
        )
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
        raise WorldError(
            f"RANK={env.get('RANK')} and WORLD_SIZE={env.get('WORLD_SIZE')} in the environment",
            "set both or none, or give world=",
        )
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
            raise UsageError(
                f"this DataLoader makes batches, and the dataset yields batches of {batch_size} samples already",
                "use DataLoader(dataset, batch_size=None), or batch_size=None for the dataset and a batch_size for the "
                "DataLoader",
            )
        if size > 1 and type(caller).__name__ in _SPLITTING_LOADERS:
            raise UsageError(
                f"{type(caller).__name__} splits what it reads between ranks, and this dataset yields one rank's part "
                f"of {size} already: samples would be lost",
                "iterate the dataset or its DataLoader without accelerator.prepare, see docs/frameworks.md",
            )


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
        raise WorldError(f"{value!r} is no rank or world size", "give whole numbers") from None
