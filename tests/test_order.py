"""The order of an epoch: exactly once, entered anywhere, delayed by at most a window, and its hash and permutation."""

import hashlib
import json

import numpy as np
import pytest
import reference_order as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import UsageError
from streamloader.order.epoch_order import BlockPermutation, EpochOrder, OrderParams, _stable_argsort, mix, order_keys
from streamloader.order.schedule import Share, World

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


def test_golden_file_is_what_the_reference_writes():
    assert reference.ORDERS.read_text(encoding="utf-8") == reference.text()


@pytest.mark.parametrize("golden", GOLDEN["orders"], ids=lambda golden: golden["name"])
def test_order_equals_the_golden_order(golden):
    case = next(case for case in reference.CASES if case.name == golden["name"])
    samples = order_of(case).samples_at(0, case.num_samples)
    if "samples" in golden:
        assert samples.tolist() == golden["samples"]
    else:
        assert hashlib.sha256(samples.astype("<u8").tobytes()).hexdigest() == golden["samples_u64le_sha256"]


@pytest.mark.parametrize("golden", GOLDEN["shares"], ids=lambda g: f"{g['order']}-{g['ranks']}-{g['remainder']}")
def test_shares_equal_the_golden_shares(golden):
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
def test_order_equals_the_reference(case):
    assert order_of(case).samples_at(0, case.num_samples).tolist() == reference.samples(case)


@settings(max_examples=150, deadline=None)
@given(cases(most=5000))
def test_order_covers_every_sample_exactly_once(case):
    assert np.bincount(order_of(case).samples_at(0, case.num_samples)).tolist() == [1] * case.num_samples


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_entry_at_any_position_equals_the_tail(case, data):
    order = order_of(case)
    start = data.draw(st.integers(0, case.num_samples))
    stop = data.draw(st.integers(start, case.num_samples))
    assert order.samples_at(start, stop).tolist() == order.samples_at(0, case.num_samples)[start:stop].tolist()


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_lane_entered_at_any_index_emits_its_tail(case, data):
    order = order_of(case)
    lane = data.draw(st.integers(0, order.lanes - 1))
    length = order.lane_bounds(lane)[1]
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert order.emit(lane, start, stop).tolist() == order.emit(lane, 0, length)[start:stop].tolist()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_sample_leaves_less_than_a_window_from_where_it_arrived(case):
    order = order_of(case)
    for lane in range(order.lanes):
        begin, length = order.lane_bounds(lane)
        moved = order.emit(lane, 0, length) - begin - np.arange(length)
        assert np.abs(moved).max(initial=0) < case.window


@settings(max_examples=100, deadline=None)
@given(cases())
def test_located_blocks_are_contiguous_and_only_the_last_block_is_short(case):
    order = order_of(case)
    arrived, row = order.locate(np.arange(case.num_samples))
    first = order.first_arrivals(np.arange(order.num_blocks + 1))
    assert first[-1] == case.num_samples
    assert (first[arrived] + row == np.arange(case.num_samples)).all()
    for j, size in enumerate(np.diff(first).tolist()):
        last = order.block_numbers(np.array([j]))[0] == order.num_blocks - 1
        assert size == (case.num_samples - (order.num_blocks - 1) * case.block if last else case.block)


@given(cases())
def test_lanes_cut_the_arrivals_into_runs_of_equal_length_or_one_more(case):
    order = order_of(case)
    bounds = [order.lane_bounds(lane) for lane in range(order.lanes)]
    assert [begin for begin, _ in bounds] == np.cumsum([0] + [length for _, length in bounds])[:-1].tolist()
    assert sum(length for _, length in bounds) == case.num_samples
    assert max(length for _, length in bounds) - min(length for _, length in bounds) <= 1


def test_scattered_arrivals_give_the_same_samples_as_all():
    order = EpochOrder(10**6 + 7, OrderParams(64, 8, 256), seed=1, epoch=0)
    some = np.array([0, 999_999, 500_000, 3, 1_000_006])
    everything = order.samples(np.arange(order.num_samples))
    assert order.samples(some).tolist() == everything[some].tolist()
    assert sorted(everything.tolist()) == list(range(order.num_samples))


def test_order_can_be_entered_deep_in_ten_trillion_samples():
    n = 10**13
    order = EpochOrder(n, OrderParams(1024, 64, 4096), seed=7, epoch=3)
    there = order.samples_at(n // 2, n // 2 + 500)
    assert there[100:].tolist() == order.samples_at(n // 2 + 100, n // 2 + 500).tolist()
    assert len(set(there.tolist())) == 500
    assert order.samples_at(n - 1, n).size == 1


@given(st.lists(st.integers(0, 9), max_size=60))
def test_argsort_keeps_the_order_of_equal_keys(values):
    keys = np.array(values, np.uint64)
    assert _stable_argsort(keys).tolist() == np.argsort(keys, kind="stable").tolist()


def test_argsort_keeps_the_order_of_equal_keys_in_long_arrays():
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
def test_impossible_params_are_refused_with_the_value_and_the_remedy(params, problem):
    with pytest.raises(UsageError, match=problem):
        OrderParams(*params)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_outside_u64_is_refused(seed):
    with pytest.raises(UsageError, match=f"seed={seed} "):
        EpochOrder(5, OrderParams(1, 1, 2), seed, 0)
    with pytest.raises(UsageError, match="epoch=-1 "):
        EpochOrder(5, OrderParams(1, 1, 2), 0, -1)


def test_window_too_wide_for_its_keys_is_refused_before_anything_is_allocated():
    order = EpochOrder(2**40, OrderParams(2**29, 1, 3 * 2**29), 0, 0)
    with pytest.raises(UsageError, match="smaller window="):
        order.emit(0, 2**33, 2**33 + 2**32)


u64 = st.integers(0, 2**64 - 1)


@given(st.lists(u64, max_size=20))
def test_mix_is_the_reference_hash_and_leaves_its_input(values):
    x = np.array(values, np.uint64)
    assert mix(x).tolist() == [reference.mix(value) for value in values]
    assert x.tolist() == values


def test_mix_is_splitmix64_as_published():
    # the first two outputs of the generator with seed 0
    assert mix(np.array([0, 0x9E3779B97F4A7C15], np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_mix_of_a_scalar_wraps_without_a_warning():
    assert int(mix(np.array(2**64 - 1, np.uint64))) == reference.mix(2**64 - 1)


@given(u64, u64, u64, u64, u64)
def test_keys_are_the_reference_keys(seed, epoch, n, block, lanes):
    case = reference.Case("", n, block, lanes, 2 * block, seed, epoch)
    assert list(order_keys(seed, epoch, n, block, lanes)) == reference.keys(case)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 700), u64)
def test_permutation_is_a_bijection_and_inverse_undoes_it(num_blocks, key):
    permutation = BlockPermutation(num_blocks, key)
    every = np.arange(num_blocks)
    blocks = permutation.forward(every)
    assert sorted(blocks.tolist()) == every.tolist()
    assert permutation.inverse(blocks).tolist() == every.tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**62), u64, st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_permutation_equals_the_reference_at_any_size(num_blocks, key, numbers):
    arrivals = [number % num_blocks for number in numbers]
    permutation = BlockPermutation(num_blocks, key)
    blocks = permutation.forward(np.array(arrivals))
    assert blocks.tolist() == [reference.permuted(j, num_blocks, key) for j in arrivals]
    assert permutation.inverse(blocks).tolist() == arrivals


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_permutation_of_no_or_one_block(num_blocks):
    every = np.arange(num_blocks)
    assert BlockPermutation(num_blocks, 5).forward(every).tolist() == every.tolist()


def test_permutation_keeps_the_shape():
    assert BlockPermutation(6, 5).forward(np.arange(6).reshape(2, 3)).shape == (2, 3)
