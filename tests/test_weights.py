"""Draws by weights: how often an epoch has each sample and each class, and which ones come from epoch to epoch."""

import json
import pickle
from typing import Any

import datasets
import numpy as np
import pytest
import reference_order as golden_orders
from amounts import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamloader.errors import SelectionError
from streamloader.order.weights import Drawn, scale_weights
from streamloader.samples import AllBut
from streamloader.testing import order as reference

GOLDEN = json.loads(golden_orders.ORDERS.read_text(encoding="utf-8"))["weights"]

numbers = st.one_of(st.integers(0, 9), st.floats(0, 1e6), st.floats(0, 1e-300), st.sampled_from([0.1, 1e300, 1 / 3]))


@st.composite
def weighted(draw: st.DrawFn) -> reference.Weighted:
    """Weights of samples, or of classes that have samples if their weight is above 0."""
    weights = draw(st.lists(numbers, min_size=1, max_size=40).filter(any))
    options = draw(st.booleans()), draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**40))
    if draw(st.booleans()):
        return reference.Weighted(tuple(weights), None, *options)
    others = draw(st.lists(st.integers(-1, len(weights) - 1), max_size=60))
    classes = draw(st.permutations(others + [c for c, weight in enumerate(weights) if weight]))
    return reference.Weighted(tuple(weights), tuple(classes), *options)


def drawn(case: reference.Weighted, base: Any = None) -> Drawn:
    classes = None if case.classes is None else np.array(case.classes, np.int64)
    count = len(case.weights if case.classes is None else case.classes)
    return Drawn(count, np.array(case.weights), case.seed, classes, base, replacement=case.replacement)


def epoch_of(found: Drawn, epoch: int) -> list[int]:
    return found[epoch * len(found) : (epoch + 1) * len(found)].tolist()


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["name"])
def test_draws_equal_the_golden_draws(golden):
    case = golden_orders.WEIGHTED[golden["name"]]
    assert epoch_of(drawn(case), case.epoch) == golden["draws"]


@settings(max_examples=examples(300), deadline=None)
@given(weighted())
def test_draws_equal_the_reference(case):
    found = drawn(case)
    assert len(found) == reference.num_draws(case)
    assert epoch_of(found, case.epoch) == reference.draws(case)


@settings(max_examples=examples(200), deadline=None)
@given(weighted())
def test_each_sample_and_each_class_come_as_often_as_expected_exact_to_one_draw(case):
    a, found = np.array(reference.whole(case.weights), object), drawn(case)
    total, count = sum(a), len(found)
    times = np.bincount(epoch_of(found, case.epoch), minlength=found._begins.size)
    assert times.sum() == count
    classes = np.arange(a.size) if case.classes is None else np.array(case.classes)
    for c, weight in enumerate(a):
        members = times[classes == c]
        assert count * weight // total <= members.sum() <= -(-count * weight // total)
        if members.size:
            share = total * members.size
            assert count * weight // share <= members.min() <= members.max() <= -(-count * weight // share)
    assert not times[classes < 0].any()
    if not case.replacement:
        assert times.max() == 1


@settings(max_examples=examples(100), deadline=None)
@given(weighted(), st.data())
def test_draws_are_an_array_that_can_be_read_at_any_slice_and_index(case, data):
    found, epochs = drawn(case), data.draw(st.lists(st.integers(0, 2**30), min_size=1, max_size=3))
    whole, size = {epoch: epoch_of(found, epoch) for epoch in epochs}, len(found)
    assert all(samples == sorted(samples) for samples in whole.values())
    at = data.draw(st.lists(st.tuples(st.sampled_from(epochs), st.integers(0, size - 1)), max_size=20))
    key = np.array([epoch * size + number for epoch, number in at], np.int64)
    copy = pickle.loads(pickle.dumps(found))
    for one in (found, copy):
        assert one[key].dtype == np.int64
        assert one[key].tolist() == [whole[epoch][number] for epoch, number in at]
    start, stop = data.draw(st.integers(0, size)), data.draw(st.integers(0, size + 9))
    first = epochs[0] * size
    if start < size:  # a slice ends at the end of its epoch
        assert copy[first + start : first + stop].tolist() == whole[epochs[0]][start:stop]
    assert found[:].tolist() == epoch_of(found, 0)


@settings(max_examples=50, deadline=None)
@given(weighted(), st.integers(0, 40))
def test_the_draws_of_a_selection_are_its_samples(case, gap):
    found = drawn(case)
    count = found._begins.size
    chosen = np.arange(count) * 3 + gap
    for base in (chosen, AllBut(3 * count + gap, np.setdiff1d(np.arange(3 * count + gap), chosen))):
        selected = drawn(case, base)
        assert selected[:].tolist() == chosen[found[:]].tolist()
        assert selected[np.arange(len(found))].tolist() == chosen[found[:]].tolist()
        assert selected.nbytes == found.nbytes + base.nbytes


@settings(max_examples=60, deadline=None)
@given(weighted())
def test_over_many_epochs_each_sample_comes_in_proportion(case):
    """The points move by the golden ratio, so that the error grows with the logarithm of the epochs."""
    found, epochs = drawn(case), 200
    counts = sum(np.bincount(epoch_of(found, epoch), minlength=found._begins.size) for epoch in range(epochs))
    assert np.abs(counts - epochs * (found._masses / 2**24)).max() < 4


def test_samples_that_an_epoch_has_no_room_for_come_in_turn():
    classes = np.arange(1000) % 10 == 0  # 100 of class 1, 900 of class 0
    found = Drawn(1000, np.array([1, 1]), 3, classes.astype(np.int64), replacement=False)
    epochs = [set(epoch_of(found, epoch)) for epoch in range(50)]
    assert all(len(epoch) == len(found) == 200 for epoch in epochs)
    assert all(len({i for i in epoch if classes[i]}) == 100 for epoch in epochs)
    for first in range(30):  # a ninth of the larger class in each epoch
        assert epochs[first] != epochs[first + 1]
        assert len(set.union(*epochs[first : first + 20])) == 1000


def test_equal_weights_are_no_weights():
    for weights, classes in ((np.full(999, 0.3), None), (np.array([666, 333]), np.arange(999) % 3 % 2)):
        for replacement in (True, False):
            found = Drawn(999, weights, 1, classes, replacement=replacement)
            assert found[:].tolist() == list(range(999))


@given(st.lists(numbers, min_size=1, max_size=50).filter(any), st.integers(-300, 300))
def test_weights_become_integers_that_differ_by_a_power_of_two_at_most(weights, power):
    scaled = scale_weights(np.array(weights))
    assert scaled.tolist() == reference.whole(tuple(map(float, weights)))
    assert 2**44 < sum(scaled.tolist()) < 2**48
    with np.errstate(all="ignore"):
        larger = np.ldexp(np.array(weights, float), power)
        assume(np.isfinite(larger).all() and (np.ldexp(larger, -power) == weights).all())
    assert scale_weights(larger).tolist() == scaled.tolist()


def test_proportions_of_integers_are_exact():
    scaled = scale_weights(np.array([1, 2, 3, 1000, 0, 10**9]))
    assert (scaled % scaled[0] == 0).all()
    assert (scaled // scaled[0]).tolist() == [1, 2, 3, 1000, 0, 10**9]


def test_other_weights_have_another_digest():
    classes = np.array([0, 0, 1, 1])
    digests = [
        *(Drawn(4, np.array(w), 1).digest for w in ([1, 1, 1, 1], [1, 1, 1, 2])),
        Drawn(4, np.array([1, 1]), 1, classes).digest,
        Drawn(4, np.array([1, 2]), 1, classes).digest,
        Drawn(4, np.array([1, 2]), 1, classes, replacement=False).digest,
        Drawn(4, np.array([1, 2]), 1, classes[::-1]).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert Drawn(4, np.array([2.0, 4]), 7, classes).digest == digests[3]


@pytest.mark.long
def test_many_samples_are_drawn_in_ten_bytes_each_and_found_anywhere():
    count = 1 << 20
    weights = np.random.default_rng(1).integers(0, 9, count)
    found = Drawn(count, weights, 1)
    assert found.nbytes < 10.3 * count
    with datasets.within(4 << 20):
        samples = found[count + 10**6 : count + 10**6 + 5].tolist()
        assert found[np.arange(count + 10**6, count + 10**6 + 5)].tolist() == samples
    assert min(weights[samples]) > 0


INVALID: list[tuple[list[float], Any, str]] = [
    ([1, -2], None, r"weights= has -2\.0 at 1; give finite numbers of at least 0"),
    ([1, float("nan")], None, "has nan at 1"),
    ([float("inf")], None, "has inf at 0"),
    ([0, 0, 0], None, "3 weights, and all are 0"),
    ([1, 2], [0, 0, -1], "class 1 of weights= has no sample"),
]


@pytest.mark.parametrize(("weights", "classes", "shown"), INVALID)
def test_invalid_weights_are_an_error(weights, classes, shown):
    with pytest.raises(SelectionError, match=shown):
        Drawn(3, np.array(weights), 1, None if classes is None else np.array(classes))
