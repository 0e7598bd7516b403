"""Splits: exact counts, every row once, and nothing but seed and row number decides."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamloader.conversion.splits import assign, parse_splits, row_keys, split_sizes
from streamloader.errors import UsageError

fractions = st.lists(st.integers(1, 1000), min_size=1, max_size=5).map(
    lambda parts: {f"s{i}": Fraction(part, sum(parts)) for i, part in enumerate(parts)}
)


@given(fractions, st.integers(5000, 6000))
def test_splits_hold_every_row_exactly_once_in_ascending_order(splits: dict[str, Fraction], rows: int) -> None:
    dealt = assign(rows, splits)
    found = [dealt.rows(name) for name in splits]
    assert sorted(np.concatenate(found).tolist()) == list(range(rows))
    assert all((np.diff(part) > 0).all() for part in found)


@given(fractions, st.integers(5000, 6000))
def test_split_sizes_are_exact_to_less_than_one_sample(splits: dict[str, Fraction], rows: int) -> None:
    sizes = split_sizes(rows, splits)
    assert sum(sizes.values()) == rows
    assert all(abs(sizes[name] - rows * share) < 1 for name, share in splits.items())
    dealt = assign(rows, splits)
    assert {name: len(dealt.rows(name)) for name in splits} == sizes


def test_largest_remainders_are_rounded_up() -> None:
    assert split_sizes(10, parse_splits("a=0.55,b=0.26,c=0.19")) == {"a": 5, "b": 3, "c": 2}
    assert split_sizes(3, parse_splits("a=0.5,b=0.5")) == {"a": 2, "b": 1}


def test_a_split_is_no_tail_cut_but_takes_from_everywhere() -> None:
    rows = assign(100_000, parse_splits("train=0.9,val=0.1")).rows("val")
    per_tenth = np.histogram(rows, bins=10, range=(0, 100_000))[0]
    assert per_tenth.min() > 900  # 1000 expected, its standard deviation is 30
    assert per_tenth.max() < 1100


def test_the_assignment_is_pinned_and_depends_on_the_seed() -> None:
    assert assign(20, parse_splits("a=0.5,b=0.5")).rows("b").tolist() == PINNED
    assert assign(20, parse_splits("a=0.5,b=0.5"), seed=1).rows("b").tolist() != PINNED


PINNED = [0, 1, 2, 5, 8, 9, 10, 15, 17, 19]  # by a transcription with Python integers


def test_row_keys_do_not_depend_on_where_the_range_begins_and_never_tie() -> None:
    keys = row_keys(0, 100_000, 0)
    assert (row_keys(50_000, 100_000, 0) == keys[50_000:]).all()
    assert len(np.unique(keys)) == len(keys)


def test_splits_parse_from_text_and_mapping_alike() -> None:
    assert parse_splits("train=0.9, val=0.1") == parse_splits({"train": 0.9, "val": 0.1})
    assert parse_splits("a=1/3,b=2/3") == {"a": Fraction(1, 3), "b": Fraction(2, 3)}
    assert parse_splits(None) == {}
    assert sum(split_sizes(1000, parse_splits("a=0.333,b=0.333,c=0.334")).values()) == 1000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train=0.9,val=0.2", "sum to 1.1"),
        ("train=0.9,train=0.1", "stands twice"),
        ("Train=1", "no name of a split"),
        ("../x=1", "no name of a split"),
        ("train", "no fraction"),
        ("train=nine", "no fraction"),
        ("train=1,val=0", "more than 0"),
        ("train=1/0", "no fraction"),
        ("", "no name of a split"),
    ],
)
def test_wrong_splits_are_told(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_splits(text)


def test_a_split_without_samples_is_refused_unless_the_source_is_empty() -> None:
    with pytest.raises(UsageError, match=r"val=0\.01 of 10 samples is empty"):
        assign(10, parse_splits("train=0.99,val=0.01"))
    assert assign(0, parse_splits("train=0.99,val=0.01")).sizes == {"train": 0, "val": 0}
