"""Who am I: rank and world size, and which DataLoader worker."""

from __future__ import annotations

import os

import torch.distributed
from torch.utils.data import get_worker_info

from streamloader.errors import WorldError
from streamloader.plan.world import World


def resolve_world(given: tuple[int, int] | World | None) -> World:
    """Return the argument, else torch.distributed's rank and size, else torchrun's environment, else one rank.

    Raises `WorldError` where a value cannot be.
    """
    if isinstance(given, World):
        return given
    if given is not None:
        try:
            rank, size = given
        except (TypeError, ValueError):
            raise WorldError(f"world={given!r}", "give world=(rank, size)") from None
        return World(_whole(rank), _whole(size))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return World(torch.distributed.get_rank(), torch.distributed.get_world_size())
    rank_text, size_text = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank_text is None and size_text is None:
        return World(0, 1)
    if rank_text is None or size_text is None:
        raise WorldError(
            f"RANK={rank_text} and WORLD_SIZE={size_text} in the environment", "set both or none, or give world="
        )
    return World(_whole(rank_text), _whole(size_text))


def ranks_on_this_machine() -> int:
    """Return how many loaders share this machine's memory: local ranks times DataLoader workers."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text) if text.isdigit() else 1) * worker()[1]


def worker() -> tuple[int, int]:
    """Return (number, count) of this DataLoader worker; (0, 1) outside of one."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def in_worker() -> bool:
    """Return whether this process is a DataLoader worker."""
    return get_worker_info() is not None


def _whole(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise WorldError(f"{value!r} is no rank or world size", "give whole numbers") from None
