"""The order oracle of `streamloader.testing`: it agrees with real runs, and finds whatever a run does otherwise."""

from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamloader as sl
from streamloader.testing.order import Order, OrderError, check_epoch, rank_batches

ORDER = Order(131, 8, 4, 16, seed=5, epoch=2)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "d"
    layout = sl.Layout(shard_size=1 << 16, block_size=1 << 13, chunk_size=1 << 12, codec="none")
    with sl.Writer(path, {"x": "float32[300]"}, layout=layout) as out:
        out.write_batch({"x": np.zeros((131, 300), "float32")})
    return str(path)


def loaders(url, size, remainder):
    return [
        sl.NumpyDataset(
            url, batch_size=6, seed=5, fields=["x"], with_index=True, world=(rank, size), remainder=remainder
        )
        for rank in range(size)
    ]


@pytest.mark.quick(2)
@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:3 consumers do not divide")
def test_runs_have_the_order_of_their_states_from_wherever_they_resume(url, size, remainder):
    for epoch, resumed_at in ((0, 0), (1, 0), (0, 3)):
        if not epoch:
            ranks = loaders(url, size, remainder)
        for each in ranks:
            each.load_state_dict({**each.state_dict(), "position": resumed_at * 6 * size})
        state = ranks[0].state_dict()
        assert (state["epoch"], state["position"], state["samples"]) == (epoch, resumed_at * 6 * size, 131)
        batches = [list(each) for each in ranks]
        check_epoch(Order.of_state(state), batches, batch=6, remainder=remainder, start=state["position"])


def correct(size=2, remainder="pad"):
    """The batches of all ranks as a run has them."""
    steps = rank_batches(ORDER, 6, size, remainder)
    return [
        [
            {"index": np.array([i for i, _ in step[rank]]), "valid": np.array([v for _, v in step[rank]])}
            for step in steps
        ]
        for rank in range(size)
    ]


def test_the_batches_of_the_order_pass_as_columns_arrays_and_lists():
    check_epoch(ORDER, correct(), batch=6)
    check_epoch(ORDER, [[each["index"] for each in rank] for rank in correct()], batch=6)
    check_epoch(ORDER, [[each["index"].tolist() for each in rank] for rank in correct()], batch=6)
    check_epoch(ORDER, [iter(rank) for rank in correct()], batch=6)


def test_without_padding_the_order_has_each_sample_once():
    for size in (1, 2, 3):
        rows = [row for step in rank_batches(ORDER, 6, size) for rank in step for row in rank]
        assert sorted(sample for sample, valid in rows if valid) == list(range(131))


def repeat(ranks):
    ranks[1][3]["index"][2] = ranks[0][0]["index"][0]


def swap(ranks):
    ranks[0][2]["index"][[0, 1]] = ranks[0][2]["index"][[1, 0]]


def exchange(ranks):
    ranks[0][4], ranks[1][4] = ranks[1][4], ranks[0][4]


def lose(ranks):
    del ranks[1][-1]


def add(ranks):
    ranks[0].append(ranks[0][0])


def shorten(ranks):
    ranks[0][1] = {name: column[:-1] for name, column in ranks[0][1].items()}


def mark(ranks):
    ranks[1][0]["valid"][3] = False


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (repeat, r"rank 1, batch 3: .*1 samples are missing \[\d+\], 1 come too often \[\d+\]"),
        (swap, r"rank 0, batch 2: .*0 samples are missing \[\], 0 come too often \[\]"),
        (exchange, r"rank 0, batch 4: .*rank 1, batch 4: .*2 differences in all; 0 samples are missing"),
        (lose, r"rank 1 has 10 batches instead of 11.*[1-6] samples are missing"),
        (add, r"rank 0 has 12 batches instead of 11.*6 come too often"),
        (shorten, r"rank 0, batch 1: .*1 samples are missing"),
        (mark, r"rank 1, batch 0: .*\(\d+\).*1 samples are missing"),
    ],
)
def test_each_difference_is_found_and_named(change, text):
    ranks = correct()
    change(ranks)
    with pytest.raises(OrderError, match=text):
        check_epoch(ORDER, ranks, batch=6)


@given(st.data())
def test_a_run_of_any_other_parameter_is_another_order(data):
    other = data.draw(st.sampled_from([{"seed": 6}, {"epoch": 3}, {"block": 9}, {"lanes": 5}, {"shuffle": False}]))
    order = Order(**{**vars(ORDER), **other})
    with pytest.raises(OrderError):
        check_epoch(order, correct(), batch=6)


def test_ranks_at_a_position_have_what_is_left_of_the_epoch():
    steps = rank_batches(ORDER, 6, 2)
    for done in range(len(steps)):
        assert rank_batches(ORDER, 6, 2, start=done * 12) == steps[done:]
    assert all(a == b for a, b in zip_longest(steps, rank_batches(ORDER, 6, 2)))
