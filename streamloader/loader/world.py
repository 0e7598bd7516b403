"""Rank and world size as launchers set them in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from streamloader.errors import WorldError
from streamloader.order.schedule import World

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
# and those for the number of a process among them
LOCAL_RANKS = (
    *("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    *("MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
)


def read_world(given: Any) -> World:
    """Return (rank, size) as a `World`; None: the rank and size of the launcher, else one rank. Raises `WorldError`."""
    if isinstance(given, World):
        return given
    if given is None:
        return _of_launcher(os.environ)
    try:
        rank, size = given
    except (TypeError, ValueError):
        remedy = "give world=(rank, size), a process group, or (mesh, 'its data-parallel dimension')"
        raise WorldError(f"world={given!r:.200}", remedy) from None
    return World(_parse_int(rank), _parse_int(size))


def _of_launcher(env: Mapping[str, str]) -> World:
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        problem = f"RANK={env.get('RANK')} and WORLD_SIZE={env.get('WORLD_SIZE')} in the environment"
        raise WorldError(problem, "set both or none, or give world=")
    for rank, size in LAUNCHERS:
        if rank in env and size in env:
            return World(_parse_int(env[rank]), _parse_int(env[size]))
    return World(0, 1)


def _parse_int(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise WorldError(f"{value!r} is not a rank or world size", "give integers") from None


def ranks_on_this_machine() -> int:
    """Return the number of ranks that share this machine's memory."""
    text = next((os.environ[name] for name in LOCAL_SIZES if name in os.environ), "1")
    return max([1, *(int(count) for count in re.findall(r"(?:^|,)(\d+)", text))])


def ranks_of_node(world: World) -> tuple[int, ...]:
    """Return the ranks of a world that share this machine's disk with its rank: all if the launcher does not tell.

    Launchers number the processes of a machine one after the other. Each rank of a smaller world, such as the replicas
    of a model that several processes hold, is taken to be as many of these. A rank too many or too few costs requests:
    the cache then keeps blocks that this machine does not read next, or drops some that it does.
    """
    every, env = tuple(range(world.size)), os.environ
    local = next((int(env[name]) for name in LOCAL_RANKS if env.get(name, "").isdecimal()), None)
    if local is None or not any(name in env for name in LOCAL_SIZES):
        return every
    launched, here = _of_launcher(env), ranks_on_this_machine()
    first = launched.rank - local
    found = range(first * world.size // launched.size, -(-(first + here) * world.size // launched.size))
    inside = not launched.size % world.size and world.rank in found and found.stop <= world.size
    return tuple(found) if inside else every
