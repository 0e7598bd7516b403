"""Conditions on fields: they mean what Python means by them, and nothing else is ever understood."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamloader.errors import SelectionError
from streamloader.plan.expression import MOST_CHARACTERS, Condition

COLUMNS = {
    "label": np.array([0, 1, 2, 3, 250, 255, 7, 7], np.uint8),
    "width": np.array([-(2**40), -1, 0, 1, 255, 256, 300, 2**40], np.int64),
    "score": np.array([0.5, -1.5, 0.0, 2.25, 1e30, -1e-30, 3.0, 0.5], np.float32),
    "flag": np.array([True, False, True, True, False, False, True, False]),
}
ROWS = [{name: column[i].item() for name, column in COLUMNS.items()} for i in range(8)]


def numbers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined = st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})")
    divided = st.tuples(inner, st.sampled_from(["/", "//", "%"]), st.integers(1, 9)).map(
        lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
    )
    return joined | divided | inner.map(lambda text: f"(-{text})")


number = st.recursive(
    st.sampled_from(["label", "width", "score", "flag"]) | st.integers(-300, 300).map(str), numbers, max_leaves=4
)
compared = st.tuples(number, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), number).map(" ".join)
chain = st.tuples(number, st.sampled_from(["<", "<="]), number, st.sampled_from(["<", "!="]), number).map(" ".join)
among = st.tuples(
    number, st.sampled_from(["in", "not in"]), st.lists(st.integers(-3, 300), min_size=1, max_size=4)
).map(lambda parts: f"{parts[0]} {parts[1]} {parts[2]}")


def conditions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined = st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})")
    return joined | inner.map(lambda text: f"(not ({text}))")


condition = st.recursive(compared | chain | among | st.just("flag"), conditions, max_leaves=5)


@given(condition)
def test_a_condition_holds_where_it_does_in_python(text: str) -> None:
    try:
        parsed = Condition.parse(text)
    except SelectionError as error:
        assert "names no field" in str(error)
        return
    try:
        found = parsed.mask({name: COLUMNS[name] for name in parsed.fields})
    except SelectionError as error:
        assert "may pass 64 bits" in str(error)
        return
    expected = [bool(eval(text, {"__builtins__": {}}, row)) for row in ROWS]
    assert found.dtype == np.bool_
    assert found.tolist() == expected, text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "cannot be read"),
        ("label ==", "cannot be read"),
        ("label = 1", "cannot be read"),
        ("label == 1; width", "cannot be read"),
        ("label\x00 == 1", "cannot be read"),
        ("(" * 5000 + "label" + ")" * 5000 + " == 1", "cannot be read|characters|nested"),
        ("not " * 3000 + "flag", "nested|characters|cannot be read"),
        ("open('x') == 1", r"open\('x'\)"),
        ("label.real == 1", r"label\.real"),
        ("label[0] == 1", r"label\[0\]"),
        ("label ** 9 == 1", r"label \*\* 9"),
        ("label << 9 == 1", "label << 9"),
        ("(lambda: 1)() == label", "lambda"),
        ("label < 'cat'", "'cat'.*write label == 'cat'"),
        ("label == 'cat' == 1", "otherwise than with one field"),
        ("label + 'cat' == 1", "'cat'"),
        ("label in 'cat'", "otherwise than with one field"),
        ("'cat' in (label, 1)", "otherwise than with one field"),
        ("label in ('cat', width)", "otherwise than with one field"),
        ("label + 1 == 'cat'", "otherwise than with one field"),
        ("'dog' == 'cat'", "otherwise than with one field"),
        ("'cat'", "'cat'"),
        ("label == None", "None"),
        ("label == 1j", "1j"),
        ("f'{label}' == 1", "not understood"),
        ("[x for x in label] == 1", "not understood"),
        ("(x := label) == 1", "not understood"),
        ("label if flag else width", "not understood"),
        ("label is 1", "no list of numbers"),
        ("label in width", "no list of numbers"),
        ("label in (1, width)", "a field inside a list"),
        ("label + 1", "a number, not a condition"),
        ("label + 1 and flag", "a number, not a condition"),
        ("not (label + 1)", "a number, not a condition"),
        ("(label == 1) + 1 == 2", "a condition, not a number"),
        ("1 == 1", "names no field"),
        ("label == " + "1" * MOST_CHARACTERS, "characters"),
    ],
)
def test_what_is_not_understood_is_named(text: str, part: str) -> None:
    with pytest.raises(SelectionError, match=part):
        Condition.parse(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("label", "a number, not a condition"),
        ("label and flag", "'label' in where= is a number, not a condition"),
        ("not width", "'width' in where= is a number"),
        ("label / 0 == 1", "cannot be computed"),
        ("width // label == 1", "cannot be computed"),
        ("width % (label - label) == 1", "cannot be computed"),
        (f"width + {10**30} > 1", "may pass 64 bits"),
        ("width * width * width > 1", "may pass 64 bits"),
    ],
)
def test_what_cannot_be_computed_is_an_error_of_the_same_kind(text: str, part: str) -> None:
    parsed = Condition.parse(text)
    with pytest.raises(SelectionError, match=part):
        parsed.mask({name: COLUMNS[name] for name in parsed.fields})


def test_small_integers_do_not_wrap_and_large_ones_compare_exactly() -> None:
    columns: dict[str, Any] = {"small": np.array([250, 5], np.uint8), "large": np.array([2**64 - 1, 2**63], np.uint64)}
    assert Condition.parse("small + 10 > 255").mask(columns).tolist() == [True, False]
    assert Condition.parse("small - 6 < 0").mask(columns).tolist() == [False, True]
    assert Condition.parse(f"large == {2**64 - 1}").mask(columns).tolist() == [True, False]
    assert Condition.parse(f"small < {10**30}").mask(columns).tolist() == [True, True]


CLASSES = {"label": ["ant", "cat", "dog", "catfish"], "width": ["cat", "narrow"]}


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("label == 'cat'", "label == 1"),
        ("'cat' != label", "label != 1"),
        ("label in ('dog', 'ant', 7)", "label in (2, 0, 7)"),
        ("label not in ['dog', 'ant']", "label not in (2, 0)"),
        ("not (label == 'ant' or width == 'narrow') and flag", "not (label == 0 or width == 1) and flag"),
    ],
)
def test_class_names_stand_for_their_numbers(text: str, same: str) -> None:
    named, plain = Condition.parse(text), Condition.parse(same)
    assert named.fields == plain.fields
    columns = {name: COLUMNS[name] for name in named.fields}
    assert named.with_classes(CLASSES).mask(columns).tolist() == plain.mask(columns).tolist()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("label == 'cats'", "'cats', which is none of its classes; similar names are 'cat', 'catfish'"),
        (
            "label in ('cat', 'zebra')",
            "'zebra', which is none of its classes; its 4 classes are 'ant', 'cat', 'dog', 'catfish' \\[",
        ),
        ("score == 'cat'", "compares 'score' with 'cat', and the dataset has no class names for it; compare it with"),
    ],
)
def test_an_unknown_class_name_is_named_with_those_that_look_like_it(text: str, part: str) -> None:
    with pytest.raises(SelectionError, match=part):
        Condition.parse(text).with_classes(CLASSES)
