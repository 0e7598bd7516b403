"""What the engine executes: the order, replayed with blocks that are fetched once and held no longer than needed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import UsageError
from streamloader.order import schedule as planner
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import BatchPlan, BlockRef, Share, World


@contextmanager
def spans(*, short: bool) -> Iterator[None]:
    """Small cases must also cross the borders of spans, which long runs meet every few thousand rows."""
    with pytest.MonkeyPatch.context() as patch:
        if short:
            patch.setattr(planner, "FIRST_STEPS", 1)
            patch.setattr(planner, "_MIN_ROWS", 1)
        yield


@st.composite
def runs(draw: st.DrawFn) -> tuple[Share, int]:
    """The share of one rank, and the position where it starts."""
    block = draw(st.sampled_from((1, 2, 3, 4, 7, 16, 32)))
    params = OrderParams(block, draw(st.sampled_from((1, 2, 3, 4, 8, 12))), block * draw(st.integers(2, 5)))
    num_samples = draw(st.integers(0, 60) | st.integers(0, 3000))
    shuffle = draw(st.sampled_from((True, True, False)))
    order = EpochOrder(num_samples, params, draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 9)), shuffle)
    size = draw(st.integers(1, 8))
    world = World(draw(st.integers(0, size - 1)), size)
    batch, unit = draw(st.sampled_from((1, 2, 3, 8, 40, 100))), draw(st.integers(1, 50))
    share = Share(order, batch, world, draw(st.sampled_from(("pad", "drop", "uneven"))), unit)
    return share, draw(st.just(0) | st.integers(0, num_samples))


def share_of(num_samples: int, params: OrderParams, batch: int, world: World, remainder: Any = "pad") -> Share:
    """The share of a shuffled order."""
    return Share(EpochOrder(num_samples, params, seed=3, epoch=0), batch, world, remainder)


class Engine:
    """A fake that only remembers: checks that every row lies in a live block, and counts the live ones."""

    def __init__(self) -> None:
        self.live: dict[int, BlockRef] = {}
        self.fetched: list[BlockRef] = []
        self.most_live = 0

    def run(self, plans: Iterator[BatchPlan]) -> Iterator[BatchPlan]:
        for plan in plans:
            for ref in plan.needs:
                assert ref.ticket == len(self.fetched)
                self.fetched.append(ref)
                self.live[ref.ticket] = ref
            self.most_live = max(self.most_live, len(self.live))
            assert list(dict.fromkeys(t for t in plan.tickets.tolist() if t in {r.ticket for r in plan.needs})) == [
                ref.ticket for ref in plan.needs
            ]
            for ticket, row, sample in zip(
                plan.tickets.tolist(), plan.rows.tolist(), plan.samples.tolist(), strict=True
            ):
                assert self.live[ticket].start + row == sample < self.live[ticket].stop
            yield plan
            for ticket in plan.done:
                del self.live[ticket]
        assert not self.live


def check_replay(share: Share, start: int, steps_at_once: int = 1) -> Engine:
    """Replays the plans against `Share.positions` and `EpochOrder.samples_at`."""
    order, engine, steps = share.order, Engine(), 0
    truth = order.samples_at(0, order.num_samples)
    taken: list[tuple[int, int]] = []
    for plan in engine.run(share.plans(start, None, steps_at_once)):
        assert plan.step == steps
        places = [start + step * share.global_batch for step in range(steps, share.num_steps(start))][:steps_at_once]
        positions = np.concatenate([share.positions(place) for place in places])
        assert positions.size
        assert plan.positions.tolist() == positions.tolist()
        assert plan.valid.tolist() == (positions < order.num_samples).tolist()
        assert plan.samples.tolist() == truth[share.source(positions)].tolist()
        if steps < 3 * steps_at_once or steps + len(places) == share.num_steps(start):
            assert plan.samples.tolist() == [i for place in places for i in share.samples(place).tolist()]
        steps += len(places)
        firsts = [int(plan.positions[np.flatnonzero(plan.tickets == ref.ticket)[0]]) for ref in plan.needs]
        taken += [(first % order.lanes, ref.start) for first, ref in zip(firsts, plan.needs, strict=True)]
    assert steps == share.num_steps(start)
    assert share.remainder == "pad" or len(set(taken)) == len(taken)  # no unit and no lane's block is fetched twice
    assert engine.most_live <= share.slots_needed(steps_at_once)
    with pytest.raises(UsageError, match="no step starts at position"):
        share.samples(start + share.global_steps(start) * share.global_batch)
    return engine


@pytest.mark.long
@settings(max_examples=examples(300), deadline=None)
@given(runs(), st.just(1) | st.integers(2, 9), st.booleans())
def test_replay_gives_the_samples_of_the_positions_within_the_slots(run, steps_at_once, short):
    share, start = run
    with spans(short=short):
        engine = check_replay(share, start, steps_at_once)
    if not share.order.shuffle:
        unit, end = share.unit, share.num_samples
        assert all(ref.start % unit == 0 and ref.stop == min(ref.start + unit, end) for ref in engine.fetched)


@settings(max_examples=40, deadline=None)
@given(runs(), st.integers(1, 4))
def test_plans_of_resident_fields_name_no_blocks_and_the_same_samples(run, steps_at_once):
    share, start = run
    for plain, held in zip(
        *(share.plans(start, None, steps_at_once, resident=resident) for resident in (False, True)), strict=True
    ):
        assert (held.step, held.needs, held.done) == (plain.step, (), ())
        for name in ("samples", "positions", "valid"):
            assert getattr(held, name).tolist() == getattr(plain, name).tolist()


@settings(max_examples=80, deadline=None)
@given(runs())
def test_padding_fetches_nothing_that_the_rank_has_read_a_step_before(run):
    share, start = run
    if not (share.divides and share.num_samples - start > share.global_batch):
        return  # else padded rows may repeat what no rank or another rank delivered
    fetched = [
        [ref for plan in replace(share, remainder=remainder).plans(start) for ref in plan.needs]
        for remainder in ("pad", "uneven")
    ]
    assert fetched[0] == fetched[1]


@settings(max_examples=60, deadline=None)
@given(runs())
def test_ranks_together_fetch_each_sample_once(run):
    share = replace(run[0], remainder="uneven")
    if not share.divides:
        return
    ranks = [replace(share, world=World(rank, share.world.size)) for rank in range(share.world.size)]
    fetched = [(ref.start, ref.stop) for rank in ranks for plan in rank.plans(0) for ref in plan.needs]
    assert sorted(i for start, stop in fetched for i in range(start, stop)) == list(range(share.num_samples))


@pytest.mark.parametrize(
    ("order", "batch", "world", "remainder"),
    [
        (EpochOrder(45, OrderParams(8, 32, 16), 2564031480, 0), 64, World(5, 16), "pad"),
        (EpochOrder(422, OrderParams(32, 8, 64), 1054913783104, 0), 32, World(0, 6), "uneven"),
    ],
    ids=["smaller than a global batch", "ranks that do not divide the lanes"],
)
def test_last_step_may_touch_other_lanes_and_still_has_its_slots(order, batch, world, remainder):
    share = Share(order, batch, world, remainder)
    engine = check_replay(share, 0)
    assert share.lanes_read * 4 + share.batch // order.params.block + 1 < engine.most_live


def test_slots_are_the_same_on_every_rank_and_no_more_than_the_dataset():
    params = OrderParams(16, 8, 64)
    assert len({share_of(10**6, params, 32, World(rank, 3)).slots_needed() for rank in range(3)}) == 1
    assert share_of(100, params, 32, World(0, 1)).slots_needed() == 7 + 7
    assert share_of(0, params, 32, World(0, 1)).slots_needed() >= 1
    assert share_of(10**6, params, 32, World(0, 2)).slots_needed() == 4 * (4 + 2) + 2 + 1


LONG = [
    (10**9, OrderParams(2**14, 64, 2**16), 1.0),
    (10**9, OrderParams(2**16, 64, 2**18), 2.0),  # as datasets of short rows were cut before
    (10**10, OrderParams(2**10, 64, 2**12), 0.05),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("num_samples", "params", "seconds"), LONG)
def test_an_epoch_of_many_short_rows_is_entered_anywhere_in_little_time(num_samples, params, seconds):
    share = share_of(num_samples, params, 256, World(0, 1))
    next(share.plans(0))  # numpy is warm
    for position in (0, num_samples // 512 * 256, num_samples - 256 * 100 - 1):
        spent = []
        for _ in range(3):
            begin = time.thread_time()
            plan = next(share.plans(position))
            spent.append(time.thread_time() - begin)
        assert plan.samples.tolist() == share.order.samples_at(position, position + 256).tolist()
        assert min(spent) < 2 * seconds  # the machine is shared


def test_a_lane_can_be_entered_anywhere():
    """Where the window fills, moves and empties, and where bounds of keys are guessed wrong."""
    for length, window in ((50_000, 4096), (5000, 4096), (4000, 4096), (70, 64), (3000, 6)):
        order = EpochOrder(length, OrderParams(2, 1, window), 5, 0)
        whole = order.emit(0, 0, length)
        assert sorted(whole.tolist()) == list(range(length))
        for start in (0, 1, 17, window // 2, length // 2, length - 40, length - 1):
            stop = min(length, start + 33)
            for margin in (None, 1):
                where = (0, start, stop)
                found = order.examine(*where) if margin is None else order._examine_within(margin, *where)
                if found is None:
                    continue
                first, offsets, later = found
                assert (offsets + first).tolist() == whole[start:stop].tolist()
                behind, arrived = np.flatnonzero(later), range(later.size)
                assert set((whole[stop:] - first).tolist()) & set(arrived) == set(behind.tolist())
