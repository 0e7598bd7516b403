"""The planner of mixtures: exact shares in every window, whole epochs, the same steps at any world size."""

import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from amounts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_schedule import Engine, spans

from streamloader.errors import MixtureError
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.mixture import MAX_PARTS, Mix, MixShare, Phase, whole_weights
from streamloader.order.schedule import World
from streamloader.order.state import RunState, SourceIdentity

WEIGHTS = st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any)


WHOLE = [
    ([0.7, 0.3], (7, 3)),
    ([1, 1], (1, 1)),
    ([2, 4, 0], (1, 2, 0)),
    ([Fraction(1, 3), Fraction(2, 3)], (1, 2)),
    ([0.1, 0.2], (1, 2)),
    ([1.0], (1,)),
    (np.array([0.7, 0.3], np.float32), (7, 3)),
    (np.array([6, 2]), (3, 1)),
]


@pytest.mark.parametrize(("weights", "whole"), WHOLE)
def test_weights_become_whole_numbers_exactly(weights, whole):
    assert whole_weights(weights) == whole


@settings(max_examples=examples(100))
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(any))
def test_weights_that_need_many_parts_are_rounded(weights):
    whole = whole_weights(weights)
    assert sum(whole) <= MAX_PARTS + len(weights)
    for weight, one in zip(weights, whole, strict=True):
        assert bool(weight) == bool(one)
        assert abs(one / sum(whole) - weight / sum(weights)) <= (len(weights) + 1) / MAX_PARTS


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan")], ["many"], [float("inf"), 1]])
def test_invalid_weights_are_errors(weights):
    with pytest.raises(MixtureError, match=r"weight"):
        whole_weights(weights)  # type: ignore[arg-type]


@settings(max_examples=examples(100))
@given(WEIGHTS)
def test_turns_are_those_of_the_specification(weights):
    """SPEC.md, rule 10 of section 8, one turn at a time in fractions."""
    period, slack, had = sum(weights), max(1, 2 * sum(map(bool, weights)) - 2), [0] * len(weights)
    for turn, source in enumerate(Phase.of_all(0, 1, tuple(weights)).turns(0, period).tolist()):
        behind = [slack * (weight * (turn + 1) - period * count) for weight, count in zip(weights, had, strict=True)]
        late = {
            i: Fraction((slack - 1) * period - behind[i], weight)
            for i, weight in enumerate(weights)
            if weight and behind[i] >= period
        }
        assert source == min(late, key=lambda i: (late[i], i))
        had[source] += 1


@settings(max_examples=examples(100))
@given(WEIGHTS)
def test_every_beginning_and_so_every_window_has_exact_shares(weights):
    phase, period = Phase.of_all(0, 1, tuple(weights)), sum(weights)
    total = 3 * period
    counts = np.zeros(len(weights), np.int64)
    for turn, source in enumerate(phase.turns(0, total).tolist()):
        assert phase.counts(turn, len(weights)).tolist() == counts.tolist()
        counts[source] += 1
        assert phase.end_of(source, int(counts[source])) == turn + 1
        for weight, count in zip(weights, counts.tolist(), strict=True):
            assert abs(Fraction(weight * (turn + 1), period) - count) < 1
    assert [phase.end_of(i, 1) is None for i in range(len(weights))] == [not weight for weight in weights]


@st.composite
def phases_of(draw: st.DrawFn, sources: int) -> tuple[Phase, ...]:
    unit, start, phases = draw(st.sampled_from((1, 2, 4))), 0, list[Phase]()
    for _ in range(draw(st.integers(1, 3))):
        weights = tuple(draw(st.lists(st.integers(0, 4), min_size=sources, max_size=sources).filter(any)))
        phases.append(Phase.of_all(start, unit, weights))
        start += unit * draw(st.integers(1, 30))
    last = phases[-1]
    if not all(last.weights):
        phases[-1] = replace(last, weights=tuple(max(1, weight) for weight in last.weights))
    return tuple(phases)


@settings(max_examples=examples(100))
@given(st.integers(1, 4).flatmap(phases_of), st.data())
def test_an_order_of_sources_can_be_entered_anywhere(phases, data):
    unit, count = phases[0].unit, len(phases[0].weights)
    mix = Mix((EpochOrder(10, OrderParams(1, 1, 2), 0, 0),) * count, (1,) * count, phases, "first")
    stop = unit * data.draw(st.integers(1, 150))
    source, place, position, size = mix.turns(0, stop)
    assert position.tolist() == list(range(0, stop, unit))
    assert set(size.tolist()) == {unit}
    given_ = [0] * count
    for number, at, begin in zip(source.tolist(), place.tolist(), position.tolist(), strict=True):
        assert mix.counts(begin).tolist() == given_
        assert at == given_[number]
        given_[number] += unit
        assert mix.end_of(number, given_[number]) == begin + unit
    start = unit * data.draw(st.integers(0, stop // unit))
    later = mix.turns(start, stop)
    assert [part.tolist() for part in later] == [
        part[start // unit :].tolist() for part in (source, place, position, size)
    ]


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    count, orders, units = draw(st.integers(1, 3)), [], []
    seed = draw(st.integers(0, 2**64 - 1))
    for _ in range(count):
        block = draw(st.sampled_from((1, 2, 5, 8)))
        params = OrderParams(block, draw(st.sampled_from((1, 2, 4, 8))), block * draw(st.integers(2, 4)))
        num_samples = draw(st.integers(1, 40) | st.integers(40, 300))
        order = EpochOrder(num_samples, params, seed, 0, draw(st.booleans()))
        orders.append(order)
        units.append(draw(st.sampled_from((1, 3, 8))))
    return Mix(tuple(orders), tuple(units), draw(phases_of(count)), draw(st.sampled_from(("first", "last"))))


@st.composite
def shares(draw: st.DrawFn) -> tuple[MixShare, int]:
    """One rank's part of an epoch, and the step where it starts."""
    mix = draw(mixes())
    unit = mix.phases[0].unit
    size = draw(st.integers(1, 4))
    batch = unit * draw(st.sampled_from((1, 2, 5, 9)))
    world = World(draw(st.integers(0, size - 1)), size)
    share = MixShare(mix, draw(st.integers(0, 2)), batch, world, draw(st.sampled_from(("pad", "drop"))))
    return share, draw(st.integers(0, max(0, share.global_steps(0) - 1)))


def naive(mix: Mix, start: int, stop: int) -> Iterator[int]:
    """The samples of the run, one at a time."""

    @cache
    def samples(source: int, epoch: int) -> list[int]:
        order = replace(mix.orders[source], epoch=epoch)
        return [i + mix.firsts[source] for i in order.samples_at(0, order.num_samples).tolist()]

    for source, place, _, size in zip(*(part.tolist() for part in mix.turns(0, stop)), strict=True):
        for at in range(place, place + size):
            epoch, position = divmod(at, mix.orders[source].num_samples)
            yield samples(source, epoch)[position]


def undivided(order: EpochOrder, fetch: int, turn: int, batch: int, size: int) -> tuple[MixShare, int]:
    """One source whose one lane `size` ranks do not divide."""
    mix = Mix((order,), (fetch,), (Phase.of_all(0, turn, (1,)),), "first")
    return MixShare(mix, 0, batch, World(0, size), "pad"), 0


# Turns that the ranks divide: the rows of a rank are spread over the whole step, so most are in blocks of their own.
UNSHUFFLED = undivided(EpochOrder(145, OrderParams(1, 1, 2), 0, 0, shuffle=False), 3, turn=4, batch=36, size=4)
SHUFFLED = undivided(EpochOrder(2000, OrderParams(16, 1, 32), 0, 0), 1, turn=8, batch=64, size=8)
# Single samples in plans of many steps: they are spread over the plan, whatever the turns.
SINGLE = undivided(EpochOrder(145, OrderParams(1, 1, 2), 0, 0, shuffle=False), 3, turn=1, batch=1, size=4)

# Short spans in which other ranks have rows of the rare source, and this one only a block that is still live.
RARE = [EpochOrder(n, OrderParams(2, 8, 4), 2, 0) for n in (100, 30)]
RARE_MIX = Mix(tuple(RARE), (1, 1), (Phase.of_all(0, 2, (8, 1)),), "first")


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(run=shares(), steps_at_once=st.sampled_from((1, 3)), short=st.booleans())
@example(run=UNSHUFFLED, steps_at_once=1, short=False)
@example(run=SHUFFLED, steps_at_once=1, short=False)
@example(run=SINGLE, steps_at_once=36, short=False)
@example(run=(MixShare(RARE_MIX, 0, 2, World(2, 3), "pad"), 0), steps_at_once=1, short=True)
def test_replay_gives_the_rows_of_the_mixture_within_the_slots(run, steps_at_once, short):
    share, first = run
    with spans(short=short):
        begin = share.bounds[0]
        engine, steps = Engine(), first
        for plan in engine.run(share.plans(first * share.global_batch, None, steps_at_once)):
            count = min(steps_at_once, share.num_steps(0) - steps)
            assert plan.samples.size == count * share.batch
            for step in range(count):
                rows = slice(step * share.batch, (step + 1) * share.batch)
                position = (steps + step) * share.global_batch
                assert plan.samples[rows].tolist() == share.samples(position).tolist()
                assert plan.positions[rows].tolist() == share.rows(position, 1)[2].tolist()
            assert plan.valid.tolist() == (plan.positions < share.num_samples).tolist()
            steps += count
        assert steps == share.num_steps(0)
        assert engine.most_live <= share.slots_needed(steps_at_once)
        assert begin == share.mix.bounds(share.epoch)[0]


@settings(max_examples=examples(30), deadline=None)
@given(shares())
def test_all_ranks_together_deliver_the_steps_of_one(run):
    share, step = run
    if not share.global_steps(0):
        return
    begin, position = share.bounds[0], step * share.global_batch
    ranks = [replace(share, world=World(rank, share.world.size)) for rank in range(share.world.size)]
    seen = [i for one in ranks for i in one.samples(position).tolist()]
    alone = replace(share, batch=share.global_batch, world=World(0, 1))
    assert sorted(seen) == sorted(alone.samples(position).tolist())
    expected = list(naive(share.mix, 0, begin + position + share.global_batch))[begin + position :]
    assert alone.samples(position).tolist() == expected


@settings(max_examples=examples(40), deadline=None)
@given(mixes())
def test_an_epoch_ends_with_one_of_its_sources_and_no_sample_is_lost(mix):
    bounds = [mix.bounds(epoch) for epoch in range(3)]
    assert bounds[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    for epoch, (_, end) in enumerate(bounds):
        given_ = mix.counts(end).tolist()
        over = [count // order.num_samples > epoch for count, order in zip(given_, mix.orders, strict=True)]
        assert any(over) if mix.stop == "first" else all(over)
    samples = list(naive(mix, 0, bounds[1][1]))
    for order, first in zip(mix.orders, mix.firsts, strict=True):
        mine = [i - first for i in samples if 0 <= i - first < order.num_samples]
        for at in range(0, len(mine) - order.num_samples + 1, order.num_samples):
            assert sorted(mine[at : at + order.num_samples]) == list(range(order.num_samples))


def test_ranks_that_divide_turns_and_lanes_read_each_block_once():
    orders = EpochOrder(4000, OrderParams(8, 8, 32), 1, 0), EpochOrder(1000, OrderParams(8, 4, 16), 1, 0)
    mix = Mix(orders, (8, 8), (Phase.of_all(0, 4, (7, 3)),), "last")
    parts = [MixShare(mix, 0, 32, World(rank, 4), "pad") for rank in range(4)]
    assert all(part.divides for part in parts)
    rows = sum(ref.stop - ref.start for part in parts for plan in part.plans(0) for ref in plan.needs)
    assert rows <= 1.05 * parts[0].num_samples  # blocks that two lanes share have two parts; the last step's padding


@settings(max_examples=examples(100))
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.integers(0, 5), st.booleans())
def test_weights_of_later_steps_start_where_a_turn_ends_at_any_batch_size(batch, other_batch, workers, taken, keep):
    sources = tuple(SourceIdentity(name, None, None, 900, OrderParams(4, 2, 8)) for name in "ab")
    first = RunState(sources=sources, shuffle=True, remainder="pad", seed=0, stop="first", batches="homogeneous")
    first = replace(first, weights_by_step=((0, (1, 1)), (6, (1, 3)), (7, (1, 2))))
    run = first.settled(batch, workers).with_workers(workers, 1, batch)[0]
    run = run.advance(taken, run.share(batch, World(0, workers)))
    resuming = first if keep else replace(first, weights_by_step=((0, (2, 1)), (8, (1, 2))))
    resumed = resuming.resumed(run.to_dict(), other_batch).with_workers(1, 1, other_batch)[0].settled(other_batch)
    assert resumed.phases
    assert all((after.start - before.start) % before.unit == 0 for before, after in pairwise(resumed.phases))
    share = resumed.share(other_batch, World(0, 1))
    assert share.rows(0, 12)[2].tolist() == list(range(12 * other_batch))
    assert resuming.resumed(resumed.to_dict(), other_batch) == resumed


def often_changed(count: int) -> list[Mix]:
    """The mixtures of a run after each change, with weights whose turns repeat after 4,096."""
    orders = (EpochOrder(10**6, OrderParams(8, 4, 16), 0, 0),) * 5
    drawn = np.random.default_rng(count).random((count, 5)).tolist()
    phases = [Phase.of_all(8000 * number, 8, whole_weights(weights)) for number, weights in enumerate(drawn)]
    return [Mix(orders, (1,) * 5, tuple(phases[: number + 1]), "first") for number in range(count)]


def test_a_state_of_many_changes_is_loaded_fast():
    mix, begun = often_changed(200)[-1], time.perf_counter()
    assert mix.bounds(0)[1] > 10**6
    assert sum(mix.counts(8000 * 200 + 8).tolist()) == 8000 * 200 + 8
    assert time.perf_counter() - begun < 2


@pytest.mark.long
def test_tables_of_a_phase_do_not_stay_after_it():
    changed = often_changed(20)
    tracemalloc.start()
    try:
        for number, mix in enumerate(changed):
            assert mix.turns(8000 * number + 80, 8000 * number + 800)[0].size == 90
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 500_000
