"""The order of an epoch: exactly once, entered anywhere, delayed by at most a window, and its hash and permutation."""

import hashlib
import json

import numpy as np
import pytest
import reference_order as golden_orders
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import UsageError
from streamloader.order.epoch_order import EpochOrder, OrderParams, _stable_argsort, mix, permute
from streamloader.order.schedule import Share, World
from streamloader.testing import order as reference

GOLDEN = json.loads(golden_orders.ORDERS.read_text(encoding="utf-8"))


@st.composite
def cases(draw: st.DrawFn, most: int = 900) -> reference.Order:
    block = draw(st.integers(1, 24))
    return reference.Order(
        num_samples=draw(st.integers(0, most)),
        block=block,
        lanes=draw(st.integers(1, 9)),
        window=block * draw(st.integers(2, 6)),
        seed=draw(st.integers(0, 2**64 - 1)),
        epoch=draw(st.integers(0, 1000)),
        shuffle=draw(st.sampled_from((True, True, True, False))),
    )


def order_of(case: reference.Order) -> EpochOrder:
    params = OrderParams(case.block, case.lanes, case.window)
    return EpochOrder(case.num_samples, params, case.seed, case.epoch, case.shuffle)


def test_golden_file_is_what_the_reference_writes():
    assert golden_orders.ORDERS.read_text(encoding="utf-8") == golden_orders.text()


@pytest.mark.parametrize("golden", GOLDEN["orders"], ids=lambda golden: golden["name"])
def test_order_equals_the_golden_order(golden):
    case = golden_orders.CASES[golden["name"]]
    samples = order_of(case).samples_at(0, case.num_samples)
    if "samples" in golden:
        assert samples.tolist() == golden["samples"]
    else:
        assert hashlib.sha256(samples.astype("<u8").tobytes()).hexdigest() == golden["samples_u64le_sha256"]


@pytest.mark.parametrize("golden", GOLDEN["shares"], ids=lambda g: f"{g['order']}-{g['ranks']}-{g['remainder']}")
def test_shares_equal_the_golden_shares(golden):
    order = order_of(golden_orders.CASES[golden["order"]])
    samples = order.samples_at(0, order.num_samples)
    start, size = golden["position"], golden["ranks"]
    shares = [Share(order, golden["batch"], World(rank, size), golden["remainder"]) for rank in range(size)]
    for step, (positions, taken) in enumerate(zip(golden["positions"], golden["samples"], strict=True)):
        for rank, share in enumerate(shares):
            mine = share.positions(start + step * share.global_batch)
            assert mine.tolist() == positions[rank]
            assert samples[share.source(mine)].tolist() == taken[rank]
    assert shares[0].global_steps(start) == len(golden["positions"])


@settings(max_examples=examples(120), deadline=None)
@given(cases())
def test_order_equals_the_reference(case):
    assert order_of(case).samples_at(0, case.num_samples).tolist() == reference.samples(case)


@settings(max_examples=examples(150), deadline=None)
@given(cases(most=3000), st.data())
def test_order_covers_every_sample_once_and_can_be_entered_at_any_position(case, data):
    order = order_of(case)
    whole = order.samples_at(0, case.num_samples)
    assert np.bincount(whole).tolist() == [1] * case.num_samples
    start = data.draw(st.integers(0, case.num_samples))
    stop = data.draw(st.integers(start, case.num_samples))
    assert order.samples_at(start, stop).tolist() == whole[start:stop].tolist()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_sample_leaves_less_than_a_window_from_where_it_arrived(case):
    order = order_of(case)
    for lane in range(order.lanes):
        begin, length = order.lane_bounds(lane)
        assert np.abs(order.emit(lane, 0, length) - begin - np.arange(length)).max(initial=0) < case.window


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


def test_argsort_keeps_the_order_of_equal_keys():
    for count, most in ((0, 1), (60, 10), (60, 1), (20_000, 5000)):  # numpy sorts short arrays in another way
        keys = np.random.default_rng(1).integers(0, most, count).astype(np.uint64)
        assert _stable_argsort(keys).tolist() == np.argsort(keys, kind="stable").tolist()


INVALID = [
    (lambda: OrderParams(0, 1, 2), "block=0 .*set block="),
    (lambda: OrderParams(1, 0, 2), "lanes=0 .*set lanes="),
    (lambda: OrderParams(4, 1.5, 8), "lanes=1.5 "),
    (lambda: OrderParams(4, 1, 4), "window=4 .*block=4 .*set window=8"),
    (lambda: OrderParams(4, 1, 10), "window=10 .*block=4 .*set window=12"),
    (lambda: OrderParams(2**30, 1, 2**31), "window=2147483648 .*2\\*\\*31"),
    (lambda: EpochOrder(5, OrderParams(1, 1, 2), -1, 0), "seed=-1 "),
    (lambda: EpochOrder(5, OrderParams(1, 1, 2), 2**64, 0), f"seed={2**64} "),
    (lambda: EpochOrder(5, OrderParams(1, 1, 2), 0, -1), "epoch=-1 "),
    # before anything is allocated
    (lambda: EpochOrder(2**40, OrderParams(2**29, 1, 3 * 2**29), 0, 0).emit(0, 2**33, 2**34), "smaller window="),
]


@pytest.mark.parametrize(("make", "problem"), INVALID)
def test_invalid_parameters_are_errors_with_the_value_and_the_remedy(make, problem):
    with pytest.raises(UsageError, match=problem):
        make()


u64 = st.integers(0, 2**64 - 1)


@given(st.lists(u64, max_size=20))
def test_mix_is_the_reference_hash_and_leaves_its_input(values):
    x = np.array(values, np.uint64)
    assert mix(x).tolist() == [reference.mix(value) for value in values]
    assert x.tolist() == values


def test_mix_is_splitmix64_as_published():
    # the first two outputs of the generator with seed 0
    assert mix(np.array([0, 0x9E3779B97F4A7C15], np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 700) | st.integers(1, 2**62), u64, st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_permutation_equals_the_reference_at_any_size_and_inverse_undoes_it(num_blocks, key, numbers):
    arrivals = [number % num_blocks for number in numbers]
    blocks = permute(np.array(arrivals), num_blocks, key)
    assert blocks.tolist() == [reference.permuted(j, num_blocks, key) for j in arrivals]
    assert permute(blocks, num_blocks, key, inverse=True).tolist() == arrivals
