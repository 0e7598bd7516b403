"""Who a rank is: by a mesh of any shape, by every launcher's environment, and what is refused."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import datasets
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from streamloader.errors import WorldError
from streamloader.order.schedule import World
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.pytorch.distributed import LAUNCHERS, LOCAL_SIZES, ranks_on_this_machine, resolve_world

NAMES = ("a", "b", "c")


@contextmanager
def rank_of(rank: int, shape: tuple[int, ...], names: tuple[str, ...] | None = NAMES) -> Iterator[DeviceMesh]:
    """This process as one rank of a mesh; a backend that says yes to everything stands for the others."""
    dist.init_process_group("fake", rank=rank, world_size=math.prod(shape), store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)] if names else None)
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*(name for pair in LAUNCHERS for name in pair), *LOCAL_SIZES} & os.environ.keys():
        monkeypatch.delenv(name)


@settings(max_examples=25)
@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), data=st.data())
def test_ranks_are_split_over_the_named_dimensions_and_alike_over_the_others(shape, data):
    names = NAMES[: len(shape)]
    chosen = tuple(data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))
    worlds = {}
    for rank, coordinate in enumerate(product(*map(range, shape))):
        with rank_of(rank, shape) as mesh:
            worlds[coordinate] = resolve_world((mesh, chosen))
    of_replica: dict[tuple[int, ...], set[int]] = {}
    for coordinate, world in worlds.items():
        key = tuple(part for part, name in zip(coordinate, names, strict=True) if name in chosen)
        of_replica.setdefault(key, set()).add(world.rank)
    size = math.prod(length for length, name in zip(shape, names, strict=True) if name in chosen)
    assert {world.size for world in worlds.values()} == {size}
    assert sorted(ranks.pop() for ranks in of_replica.values() if len(ranks) == 1) == list(range(size))


def test_a_mesh_of_one_dimension_and_a_group_need_no_name():
    with rank_of(5, (2, 3)) as mesh:
        assert resolve_world(mesh["b"]) == resolve_world((mesh, "b")) == World(2, 3)
        assert resolve_world(mesh.get_group("a")) == resolve_world((mesh, ["a"])) == World(1, 2)
        assert resolve_world(None) == resolve_world(dist.group.WORLD) == World(5, 6)
    with rank_of(1, (4,), None) as unnamed:
        assert resolve_world(unnamed) == World(1, 4)


REFUSED: list[tuple[Callable[[DeviceMesh], Any], str]] = [
    (lambda mesh: mesh, "no dimension of a mesh whose dimensions are 'a', 'b'"),
    (lambda mesh: (mesh, ()), "no dimension of a mesh"),
    (lambda mesh: (mesh, "dp"), "'dp' of a mesh whose dimensions are 'a', 'b'"),
    (lambda mesh: (mesh, ("a", "x")), "'x' of a mesh"),
]


@pytest.mark.parametrize(("choose", "shown"), REFUSED)
def test_a_mesh_whose_dimensions_are_not_clear_is_refused(choose, shown):
    with rank_of(0, (2, 2)) as mesh, pytest.raises(WorldError, match=shown) as caught:
        resolve_world(choose(mesh))
    assert "over which data is split" in str(caught.value)


def test_a_process_outside_of_what_it_gives_is_told_so():
    with rank_of(3, (4,)):
        part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",), _init_backend=False)
        with pytest.raises(WorldError, match="this process is not in the mesh"):
            resolve_world((part, "a"))


@pytest.mark.parametrize(("rank", "size"), LAUNCHERS)
def test_every_launcher_is_understood(rank, size, monkeypatch):
    monkeypatch.setenv(rank, "2")
    monkeypatch.setenv(size, "3")
    assert resolve_world(None) == World(2, 3)
    monkeypatch.setenv(size, "2")
    with pytest.raises(WorldError, match="rank 2 is invalid for world size 2"):
        resolve_world(None)
    assert resolve_world((0, 4)) == World(0, 4)


def test_torchrun_comes_before_what_it_was_started_by(monkeypatch):
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "5", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert resolve_world(None) == World(5, 8)


def test_the_script_of_a_slurm_job_is_not_one_rank_of_many(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert resolve_world(None) == World(0, 1)


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("LOCAL_WORLD_SIZE", "4", 4),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 2),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x2),3", 4),
        ("SLURM_STEP_TASKS_PER_NODE", "1,16", 16),
        ("LOCAL_WORLD_SIZE", "", 1),
        ("MPI_LOCALNRANKS", "0", 1),
    ],
)
def test_the_ranks_of_this_machine_share_its_memory(name, text, count, monkeypatch):
    assert ranks_on_this_machine() == 1
    monkeypatch.setenv(name, text)
    assert ranks_on_this_machine() == count


def test_a_dataset_with_a_mesh_travels_to_workers(tmp_path):
    datasets.write(tmp_path / "d", 64, ["label"])
    with rank_of(3, (2, 2)) as mesh:
        ds = StreamingDataset(tmp_path / "d", batch_size=8, world=(mesh, "a"))
        assert ds.__getstate__()["_world"] == World(1, 2)
        assert len(ds) == 4
