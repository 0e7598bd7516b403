"""The order of an epoch: exactly once, entered anywhere, delayed by at most a window, pinned for ever."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import reference_order as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import UsageError
from streamloader.plan.order import EpochOrder, OrderParams, _stable_argsort
from streamloader.plan.world import Share, World

GOLDEN = json.loads(reference.ORDERS.read_text(encoding="utf-8"))


@st.composite
def cases(draw: st.DrawFn, most: int = 900) -> reference.Case:
    block = draw(st.integers(1, 24))
    return reference.Case(
        "drawn",
        num_samples=draw(st.integers(0, most)),
        block=block,
        lanes=draw(st.integers(1, 9)),
        window=block * draw(st.integers(2, 6)),
        seed=draw(st.integers(0, 2**64 - 1)),
        epoch=draw(st.integers(0, 1000)),
        shuffle=draw(st.sampled_from((True, True, True, False))),
    )


def order_of(case: reference.Case) -> EpochOrder:
    params = OrderParams(case.block, case.lanes, case.window)
    return EpochOrder(case.num_samples, params, case.seed, case.epoch, case.shuffle)


def test_golden_file_is_what_the_reference_writes() -> None:
    assert reference.ORDERS.read_text(encoding="utf-8") == reference.text()


@pytest.mark.parametrize("golden", GOLDEN["orders"], ids=lambda golden: golden["name"])
def test_order_equals_the_golden_order(golden: dict[str, object]) -> None:
    case = next(case for case in reference.CASES if case.name == golden["name"])
    samples = order_of(case).samples_at(0, case.num_samples)
    if "samples" in golden:
        assert samples.tolist() == golden["samples"]
    else:
        assert hashlib.sha256(samples.astype("<u8").tobytes()).hexdigest() == golden["samples_u64le_sha256"]


@pytest.mark.parametrize("golden", GOLDEN["shares"], ids=lambda g: f"{g['order']}-{g['ranks']}-{g['remainder']}")
def test_shares_equal_the_golden_shares(golden: dict[str, object]) -> None:
    order = order_of(next(case for case in reference.CASES if case.name == golden["order"]))
    samples = order.samples_at(0, order.num_samples)
    batch, ranks, start = golden["batch"], golden["ranks"], golden["position"]
    for step, (positions, taken) in enumerate(zip(golden["positions"], golden["samples"], strict=True)):
        for rank in range(ranks):
            share = Share(order.num_samples, order.lanes, batch, World(rank, ranks), golden["remainder"])
            mine, valid = share.positions(start + step * share.global_batch)
            assert mine.tolist() == positions[rank]
            assert valid.tolist() == [p < order.num_samples for p in positions[rank]]
            assert samples[share.source(mine)].tolist() == taken[rank]
    assert share_steps(order, golden) == len(golden["positions"])


def share_steps(order: EpochOrder, golden: dict[str, object]) -> int:
    world = World(0, golden["ranks"])
    return Share(order.num_samples, order.lanes, golden["batch"], world, golden["remainder"]).global_steps(
        golden["position"]
    )


@settings(max_examples=120, deadline=None)
@given(cases())
def test_order_equals_the_reference(case: reference.Case) -> None:
    assert order_of(case).samples_at(0, case.num_samples).tolist() == reference.samples(case)


@settings(max_examples=150, deadline=None)
@given(cases(most=5000))
def test_order_covers_every_sample_exactly_once(case: reference.Case) -> None:
    assert np.bincount(order_of(case).samples_at(0, case.num_samples)).tolist() == [1] * case.num_samples


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_entry_at_any_position_equals_the_tail(case: reference.Case, data: st.DataObject) -> None:
    order = order_of(case)
    start = data.draw(st.integers(0, case.num_samples))
    stop = data.draw(st.integers(start, case.num_samples))
    assert order.samples_at(start, stop).tolist() == order.samples_at(0, case.num_samples)[start:stop].tolist()


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_lane_entered_at_any_index_emits_its_tail(case: reference.Case, data: st.DataObject) -> None:
    order = order_of(case)
    lane = data.draw(st.integers(0, order.lanes - 1))
    length = order.lane_bounds(lane)[1]
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert order.emit(lane, start, stop).tolist() == order.emit(lane, 0, length)[start:stop].tolist()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_sample_leaves_less_than_a_window_from_where_it_arrived(case: reference.Case) -> None:
    order = order_of(case)
    for lane in range(order.lanes):
        begin, length = order.lane_bounds(lane)
        moved = order.emit(lane, 0, length) - begin - np.arange(length)
        assert np.abs(moved).max(initial=0) < case.window


@settings(max_examples=100, deadline=None)
@given(cases())
def test_located_blocks_are_contiguous_and_only_the_last_block_is_short(case: reference.Case) -> None:
    order = order_of(case)
    arrived, row = order.locate(np.arange(case.num_samples))
    first = order.first_arrivals(np.arange(order.num_blocks + 1))
    assert first[-1] == case.num_samples
    assert (first[arrived] + row == np.arange(case.num_samples)).all()
    for j, size in enumerate(np.diff(first).tolist()):
        last = order.block_numbers(np.array([j]))[0] == order.num_blocks - 1
        assert size == (case.num_samples - (order.num_blocks - 1) * case.block if last else case.block)


@given(cases())
def test_lanes_cut_the_arrivals_into_runs_of_equal_length_or_one_more(case: reference.Case) -> None:
    order = order_of(case)
    bounds = [order.lane_bounds(lane) for lane in range(order.lanes)]
    assert [begin for begin, _ in bounds] == np.cumsum([0] + [length for _, length in bounds])[:-1].tolist()
    assert sum(length for _, length in bounds) == case.num_samples
    assert max(length for _, length in bounds) - min(length for _, length in bounds) <= 1


def test_scattered_arrivals_give_the_same_samples_as_all() -> None:
    order = EpochOrder(10**6 + 7, OrderParams(64, 8, 256), seed=1, epoch=0)
    some = np.array([0, 999_999, 500_000, 3, 1_000_006])
    everything = order.samples(np.arange(order.num_samples))
    assert order.samples(some).tolist() == everything[some].tolist()
    assert sorted(everything.tolist()) == list(range(order.num_samples))


def test_epochs_and_seeds_differ() -> None:
    order = EpochOrder(500, OrderParams(4, 2, 8), seed=1, epoch=0)
    orders = {tuple(replace(order, seed=s, epoch=e).samples_at(0, 500).tolist()) for s in (1, 2) for e in (0, 1)}
    assert len(orders) == 4


def test_order_can_be_entered_deep_in_ten_trillion_samples() -> None:
    n = 10**13
    order = EpochOrder(n, OrderParams(1024, 64, 4096), seed=7, epoch=3)
    there = order.samples_at(n // 2, n // 2 + 500)
    assert there[100:].tolist() == order.samples_at(n // 2 + 100, n // 2 + 500).tolist()
    assert len(set(there.tolist())) == 500
    assert order.samples_at(n - 1, n).size == 1


@given(st.lists(st.integers(0, 9), max_size=60))
def test_argsort_keeps_the_order_of_equal_keys(values: list[int]) -> None:
    keys = np.array(values, np.uint64)
    assert _stable_argsort(keys).tolist() == np.argsort(keys, kind="stable").tolist()


def test_argsort_keeps_the_order_of_equal_keys_in_long_arrays() -> None:
    keys = np.random.default_rng(1).integers(0, 5000, 20_000).astype(np.uint64)
    assert (_stable_argsort(keys) == np.argsort(keys, kind="stable")).all()


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ((0, 1, 2), "block=0 .*set block="),
        ((1, 0, 2), "lanes=0 .*set lanes="),
        ((4, 1, 4), "window=4 .*block=4 .*set window=8"),
        ((4, 1, 10), "window=10 .*block=4 .*set window=12"),
        ((2**30, 1, 2**31), "window=2147483648 .*2\\*\\*31"),
        ((4, 1.5, 8), "lanes=1.5 "),
    ],
)
def test_impossible_params_are_refused_with_the_value_and_the_remedy(
    params: tuple[int, int, int], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        OrderParams(*params)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_outside_u64_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match=f"seed={seed} "):
        EpochOrder(5, OrderParams(1, 1, 2), seed, 0)
    with pytest.raises(UsageError, match="epoch=-1 "):
        EpochOrder(5, OrderParams(1, 1, 2), 0, -1)


def test_window_too_wide_for_its_keys_is_refused_before_anything_is_allocated() -> None:
    order = EpochOrder(2**40, OrderParams(2**29, 1, 3 * 2**29), 0, 0)
    with pytest.raises(UsageError, match="smaller window="):
        order.emit(0, 2**33, 2**33 + 2**32)
