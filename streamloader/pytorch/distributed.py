"""Rank and world size, DataLoader workers, and the loader that iterates the dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import currentframe
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.utils.data import DataLoader, get_worker_info

from streamloader.errors import UsageError, WorldError
from streamloader.loader.epochs import SHARED, Epochs
from streamloader.loader.world import read_world
from streamloader.order.schedule import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Packages whose frames may be between a dataset and the loader that iterates it; any other frame ends the search.
_LOADER_PACKAGES = ("torch.utils.data.", "torchdata.", "accelerate.", "transformers.", "multiprocessing.")
# The loaders of Accelerate and transformers that split the samples they read between ranks.
_SPLITTING_LOADERS = ("DataLoaderDispatcher", "IterableDatasetShard")


def resolve_world(given: Any) -> World:
    """Return the rank and size of the argument, else of torch.distributed, else of the launcher, else of one rank.

    `given`: (rank, size), a process group of the replicas, or a `DeviceMesh` with its data-parallel dimensions:
    processes that differ only in other dimensions have the same rank, and get the same batches. Does not communicate.
    Raises `WorldError` for an invalid value.
    """
    if torch.distributed.is_available():
        if given is None and torch.distributed.is_initialized():
            return World(torch.distributed.get_rank(), torch.distributed.get_world_size())
        if not isinstance(given, World | None) and (world := _of_torch(given)) is not None:
            return world
    return read_world(given)


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


def worker() -> tuple[int, int] | None:
    """Return (number, count) of this DataLoader worker, None outside of workers."""
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers)


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
            raise UsageError(problem, "give it no DataLoader: accelerator.prepare(dataset)")


def loader_asking_for_length() -> DataLoader[Any] | None:
    """Return the DataLoader whose `len` calls this, or None."""
    callers = (caller for name, caller in _loader_frames() if name == "__len__")
    return next((caller for caller in callers if isinstance(caller, DataLoader)), None)


def _loader_frames() -> Iterator[tuple[str, Any]]:
    """Yield function name and `self` of the loader frames that call this, innermost first."""
    for frame, _ in walk_stack(currentframe()):
        module = f"{frame.f_globals.get('__name__', '')}."
        if module.startswith(_LOADER_PACKAGES):
            yield frame.f_code.co_name, frame.f_locals.get("self")
        elif not module.startswith("streamloader."):
            return


def _collates(collate_fn: Any) -> bool:
    """Return whether this is a function of torch or transformers, which stacks samples."""
    return (getattr(collate_fn, "__module__", None) or "").partition(".")[0] in ("torch", "transformers")


def shared_epochs() -> Epochs:
    """Return epochs in memory that pickled copies of the dataset share, in any process of this machine.

    The memory is anonymous: torch unlinks its name at once, so nothing is left after a kill.
    """
    return Epochs(torch.zeros(SHARED.itemsize // 8, dtype=torch.int64).share_memory_())  # type: ignore[no-untyped-call]
