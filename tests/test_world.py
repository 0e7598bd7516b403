"""Which rank a process is, by a mesh or a launcher, and which positions a rank takes: every position once."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from streamloader.errors import BatchError, UsageError, WorldError
from streamloader.loader.world import LAUNCHERS, LOCAL_SIZES, ranks_on_this_machine
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import Share, World
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.pytorch.distributed import resolve_world
from streamloader.testing import order as reference

sizes = st.integers(1, 7)
remainders = st.sampled_from(("pad", "drop", "uneven"))


def taken(share: Share, position: int) -> list[list[int]]:
    """The positions of every rank in the step from `position`."""
    size = share.world.size
    return [replace(share, world=World(rank, size)).positions(position).tolist() for rank in range(size)]


def share_of(num_samples: int, lanes: int, *rest: Any) -> Share:
    return Share(EpochOrder(num_samples, OrderParams(1, lanes, 2), 0, 0), *rest)


@st.composite
def shares(draw: st.DrawFn) -> Share:
    size = draw(sizes)
    world = World(draw(st.integers(0, size - 1)), size)
    num_samples, lanes, batch = (draw(st.integers(*bounds)) for bounds in ((0, 300), (1, 9), (1, 12)))
    return share_of(num_samples, lanes, batch, world, draw(remainders))


@settings(max_examples=examples(200), deadline=None)
@given(shares(), st.data())
def test_positions_equal_the_reference(share, data):
    start = data.draw(st.integers(0, share.num_samples))
    case = reference.Order(share.num_samples, 1, share.order.lanes, 2)
    expected = reference.steps(case, share.batch, share.world.size, share.remainder, start)
    assert [taken(share, start + i * share.global_batch) for i in range(len(expected))] == expected
    assert share.global_steps(start) == len(expected)
    mine = [step[share.world.rank] for step in expected]
    assert share.num_steps(start) == sum(1 for rows in mine if rows)
    assert share.positions_of_steps(start, share.num_steps(start)).tolist() == [p for rows in mine for p in rows]


@settings(max_examples=100, deadline=None)
@given(shares())
def test_world_that_divides_the_lanes_reads_each_lane_once(share):
    read = {
        (rank, p % share.order.lanes)
        for i in range(share.global_steps(0))
        for rank, rows in enumerate(taken(share, i * share.global_batch))
        for p in rows
        if p < share.num_samples // share.global_batch * share.global_batch
    }
    assert len(read) <= share.read_factor * share.order.lanes + 1e-9
    if share.divides:
        assert share.read_factor == 1.0
        assert share.lanes_read == share.order.lanes // share.world.size
        assert len(read) == len({lane for _, lane in read})
    assert max(len({lane for rank, lane in read if rank == r}) for r in range(share.world.size)) <= share.lanes_read


@settings(max_examples=100, deadline=None)
@given(shares(), st.integers(1, 400))
def test_padding_repeats_the_position_a_step_earlier(share, beyond):
    positions = np.arange(share.num_samples + 1 if share.num_samples else 0)
    source = share.source(positions)
    assert source[: share.num_samples].tolist() == positions[: share.num_samples].tolist()
    if share.num_samples:
        p = share.num_samples + beyond % share.global_batch
        expected = p % share.num_samples if share.num_samples < share.global_batch else p - share.global_batch
        assert share.source(np.array([p])).tolist() == [expected]
        assert 0 <= expected < share.num_samples


def test_read_factor_of_three_ranks_on_sixteen_lanes_is_small():
    assert 1.0 < share_of(10**6, 16, 256, World(0, 3), "pad").read_factor < 1.3


@given(sizes, st.integers(1, 5))
def test_consumers_of_all_ranks_are_a_world_of_their_own(size, workers):
    consumers = [World(rank, size).consumer(i, workers) for i in range(workers) for rank in range(size)]
    assert consumers == [World(i, size * workers) for i in range(size * workers)]


@pytest.mark.parametrize(("number", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_an_impossible_world_or_worker_is_an_error_with_both_numbers(number, count):
    with pytest.raises(WorldError, match=f"rank {number} is invalid for world size {count}"):
        World(number, count)
    with pytest.raises(WorldError, match=f"worker {number} is invalid for {count} workers"):
        World(0, 1).consumer(number, count)


def test_an_impossible_share_is_an_error():
    with pytest.raises(BatchError, match="batch of 0 "):
        share_of(10, 1, 0, World(0, 1), "pad")
    with pytest.raises(UsageError, match="remainder='wrap'; choose one of pad, drop, uneven"):
        share_of(10, 1, 1, World(0, 1), "wrap")


NAMES = ("a", "b", "c")


@contextmanager
def rank_of(rank: int, shape: tuple[int, ...], names: tuple[str, ...] | None = NAMES) -> Iterator[DeviceMesh]:
    """This process as one rank of a mesh; a fake backend replaces the others."""
    dist.init_process_group("fake", rank=rank, world_size=math.prod(shape), store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)] if names else None)
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*(name for pair in LAUNCHERS for name in pair), *LOCAL_SIZES} & os.environ.keys():
        monkeypatch.delenv(name)


@settings(max_examples=examples(25))
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
def test_a_mesh_without_a_known_data_dimension_is_an_error(choose, shown):
    with rank_of(0, (2, 2)) as mesh, pytest.raises(WorldError, match=shown) as caught:
        resolve_world(choose(mesh))
    assert "over which data is split" in str(caught.value)


def test_a_mesh_without_this_process_is_an_error():
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


def test_torchrun_takes_precedence_over_slurm_whose_batch_script_is_a_world_of_its_own(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert resolve_world(None) == World(0, 1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert resolve_world(None) == World(1, 2)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert resolve_world(None) == World(5, 8)


LOCAL = [
    ("LOCAL_WORLD_SIZE", "4", 4),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 2),
    ("SLURM_STEP_TASKS_PER_NODE", "4(x2),3", 4),
    ("SLURM_STEP_TASKS_PER_NODE", "1,16", 16),
    ("LOCAL_WORLD_SIZE", "", 1),
    ("MPI_LOCALNRANKS", "0", 1),
]


@pytest.mark.parametrize(("name", "text", "count"), LOCAL)
def test_the_ranks_of_this_machine_share_its_memory(name, text, count, monkeypatch):
    assert ranks_on_this_machine() == 1
    monkeypatch.setenv(name, text)
    assert ranks_on_this_machine() == count


def test_a_dataset_with_a_mesh_can_be_pickled_for_workers(data):
    with rank_of(3, (2, 2)) as mesh:
        ds = StreamingDataset(data(64, "label"), batch_size=8, world=(mesh, "a"))
        assert ds.__getstate__()["_world"] == World(1, 2)
        assert len(ds) == 4
