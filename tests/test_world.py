"""Which positions each rank takes: every position once, whatever the world."""

import numpy as np
import pytest
import reference_order as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import BatchError, UsageError, WorldError
from streamloader.order.schedule import Share, World

sizes = st.integers(1, 7)
remainders = st.sampled_from(("pad", "drop", "uneven"))


def taken(share: Share, position: int) -> list[list[int]]:
    """The positions of every rank in the step from `position`."""
    size = share.world.size
    ranks = (Share(share.num_samples, share.lanes, share.batch, World(r, size), share.remainder) for r in range(size))
    return [rank.positions(position)[0].tolist() for rank in ranks]


@st.composite
def shares(draw: st.DrawFn) -> Share:
    size = draw(sizes)
    world = World(draw(st.integers(0, size - 1)), size)
    return Share(draw(st.integers(0, 300)), draw(st.integers(1, 9)), draw(st.integers(1, 12)), world, draw(remainders))


@settings(max_examples=200, deadline=None)
@given(shares(), st.data())
def test_positions_equal_the_reference(share, data):
    start = data.draw(st.integers(0, share.num_samples))
    case = reference.Case("", share.num_samples, 1, share.lanes, 2)
    expected = reference.steps(case, share.batch, share.world.size, share.remainder, start)
    assert [taken(share, start + i * share.global_batch) for i in range(len(expected))] == expected
    assert share.global_steps(start) == len(expected)
    mine = [step[share.world.rank] for step in expected]
    assert share.num_steps(start) == sum(1 for rows in mine if rows)
    flat = share.positions_of_steps(start, share.num_steps(start))
    assert flat.tolist() == [p for rows in mine for p in rows]


@settings(max_examples=200, deadline=None)
@given(shares(), st.data())
def test_epoch_delivers_every_position_exactly_once(share, data):
    start = data.draw(st.integers(0, share.num_samples))
    steps = share.global_steps(start)
    seen = [p for i in range(steps) for rows in taken(share, start + i * share.global_batch) for p in rows]
    end = start + steps * share.global_batch
    valid = [p for p in seen if p < share.num_samples]
    assert sorted(valid) == list(range(start, min(end, share.num_samples)))
    if share.remainder == "pad":
        assert len(seen) == steps * share.global_batch
        assert end >= share.num_samples
    if share.remainder == "uneven":
        assert valid == seen
        assert len(seen) == share.num_samples - start
    if share.remainder == "drop":
        assert valid == seen
        assert share.num_samples - start - len(seen) < share.global_batch


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 300), st.integers(1, 9), st.sampled_from((12, 24, 60)), remainders, st.data())
def test_union_of_the_ranks_is_the_same_global_batch_for_every_world(num_samples, lanes, global_batch, remainder, data):
    start = data.draw(st.integers(0, num_samples))
    unions = set()
    for size in (1, 2, 3, 4, 6, 12):
        share = Share(num_samples, lanes, global_batch // size, World(0, size), remainder)
        unions.add(tuple(sorted(p for rows in taken(share, start) for p in rows)))
    assert len(unions) == 1


@settings(max_examples=100, deadline=None)
@given(shares())
def test_world_that_divides_the_lanes_reads_each_lane_once(share):
    read = {
        (rank, p % share.lanes)
        for i in range(share.global_steps(0))
        for rank, rows in enumerate(taken(share, i * share.global_batch))
        for p in rows
        if p < share.num_samples // share.global_batch * share.global_batch
    }
    assert len(read) <= share.read_factor * share.lanes + 1e-9
    if share.divides:
        assert share.read_factor == 1.0
        assert share.lanes_read == share.lanes // share.world.size
        assert len(read) == len({lane for _, lane in read})
    by_rank = [len({lane for rank, lane in read if rank == r}) for r in range(share.world.size)]
    assert max(by_rank) <= share.lanes_read


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
    assert 1.0 < Share(10**6, 16, 256, World(0, 3), "pad").read_factor < 1.3


@given(sizes, st.integers(1, 5))
def test_consumers_of_all_ranks_are_a_world_of_their_own(size, workers):
    consumers = [World(rank, size).consumer(i, workers) for i in range(workers) for rank in range(size)]
    assert consumers == [World(i, size * workers) for i in range(size * workers)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.sampled_from((1, 2, 3)), st.integers(1, 4), remainders)
def test_workers_deliver_the_same_samples_as_none(num_samples, workers, batch, remainder):
    rank, lanes = World(1, 2), 12
    seen = []
    for worker in range(workers):
        share = Share(num_samples, lanes, batch, rank.consumer(worker, workers), remainder)
        seen += share.positions_of_steps(0, share.num_steps(0)).tolist()
    alone = Share(num_samples, lanes, batch, rank, "uneven")
    everything = alone.positions_of_steps(0, alone.num_steps(0)).tolist()
    if remainder == "drop":
        everything = [p for p in everything if p < num_samples // (2 * batch * workers) * 2 * batch * workers]
    assert sorted(p for p in seen if p < num_samples) == sorted(everything)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_impossible_world_is_refused_with_both_numbers(rank, size):
    with pytest.raises(WorldError, match=f"rank {rank} is invalid for world size {size}"):
        World(rank, size)


@pytest.mark.parametrize(("worker", "workers"), [(-1, 1), (2, 2), (0, 0)])
def test_impossible_worker_is_refused(worker, workers):
    with pytest.raises(WorldError, match=f"worker {worker} is invalid for {workers} workers"):
        World(0, 1).consumer(worker, workers)


def test_impossible_share_is_refused():
    with pytest.raises(BatchError, match="batch of 0 "):
        Share(10, 1, 0, World(0, 1), "pad")
    with pytest.raises(UsageError, match="remainder='wrap'; choose one of pad, drop, uneven"):
        Share(10, 1, 1, World(0, 1), "wrap")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="0 lanes"):
        Share(10, 0, 1, World(0, 1), "pad")
