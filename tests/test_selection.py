"""`where=`: conditions mean what Python means by them, and the order over a part of the dataset keeps every law."""

import json
import pickle
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from amounts import examples
from datasets import numbers, seen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import streamloader as sl
from bench.shuffles.quality import _variance_ratio
from streamloader.engine.dataset import Dataset
from streamloader.errors import SelectionError, StateError
from streamloader.format.codecs import pack_items, parse_items
from streamloader.format.conditions import MAX_CHARACTERS, Condition
from streamloader.format.reader import ChunkRows, select_items
from streamloader.measure.forecast import ForecastOptions, forecast
from streamloader.options import Layout, Shuffle
from streamloader.order.selection import select
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.storage.buffers import empty_buffer

N = 603
SOME = sorted({*range(5, 200, 7), *range(300, 340), 602})


@pytest.fixture(scope="module")
def url(data: Any) -> str:
    """A dataset of N samples with every kind of field."""
    return data(N)


def label(i: int) -> int:
    return int(datasets.value("label", i))


def stream(url: str, where: Any, batch: int = 16, **options: Any) -> StreamingDataset:
    return StreamingDataset(url, batch_size=batch, where=where, with_index=True, **{"world": (0, 1), **options})


# ---- which samples


@given(st.integers(1, 300), st.data())
def test_slices_masks_and_numbers_in_any_order_choose_alike(count, data):
    start, stop = data.draw(st.integers(-count, count)), data.draw(st.integers(-count, count))
    step = data.draw(st.integers(-5, 5).filter(bool))
    expected = sorted(range(count)[start:stop:step])
    mask = np.zeros(count, np.bool_)
    mask[expected] = True
    shuffled = data.draw(st.permutations(expected))
    choices = [slice(start, stop, step), mask, mask.tolist(), np.array(shuffled, np.int32), torch.from_numpy(mask)]
    if not expected:
        for choice in choices:
            with pytest.raises(SelectionError, match=f"selects none of {count}"):
                select(choice, count)
        return
    found = [select(choice, count) for choice in choices]
    assert {tuple(one.tolist()) for one in found} == {tuple(expected)}
    assert len({Dataset(None, None, (), one).selection_digest for one in found}) == 1  # type: ignore[arg-type]


INVALID: list[tuple[Any, str]] = [
    (np.zeros(N - 1, np.bool_), f"a mask of {N - 1} bools, the dataset has {N} samples"),
    ([0, N], f"has sample numbers from 0 to {N}"),
    ([-1, 2], "has sample numbers from -1 to 2"),
    ([3, 5, 3], "has sample 3 more than once"),
    ([0.5], "dtype float64"),
    (["label"], "dtype"),
    (np.zeros((2, 2), np.int64), r"shape \(2, 2\)"),
    (7, r"shape \(\)"),
    ([[1], [2, 3]], "is not an array"),
    (np.ma.array(np.ones(N, np.bool_), mask=[1] * N), "masked elements"),
    (np.ma.array([1, 2], mask=[0, 1]), "masked elements"),
    *((nothing, f"selects none of {N} samples") for nothing in ([], "label > 0")),
    ("nope == 1", "'nope', which is not a field.*count, flag, label"),
    ("raw == 1", "'raw', which is bytes"),
    ("x > 1", r"'x', which is float32\[300\]"),
    ("print(label)", "not understood"),
    (slice("a", 3), "is invalid"),
    ("2001-01:2002", "is invalid.* or a condition"),
    *((text, "is not understood") for text in ("slice(1, x)", "slice(0.5)", "slice()")),
    ("2001-01-01T06:30", "cannot be read"),
    ("0:" + "9" * 5000, "cannot be read"),
]


@pytest.mark.parametrize(("choice", "part"), INVALID)
def test_an_invalid_selection_is_an_error(url, choice, part):
    with pytest.raises(SelectionError, match=part):
        stream(url, choice)


def test_an_invalid_condition_is_an_error_before_anything_is_opened():
    with pytest.raises(SelectionError, match="cannot be read"):
        StreamingDataset("s3://no-such-bucket-anywhere/x", batch_size=1, where="label ==")


# ---- what comes out


CHOSEN = [
    (SOME, SOME),
    (slice(100, 400), range(100, 400)),
    (slice(None), range(N)),
    ("100:400", range(100, 400)),
    ("-7:", range(N - 7, N)),
    ("slice(0, 100, 3)", range(0, 100, 3)),
    ([11], [11]),
    ("flag and count < 65500", [i for i in range(N) if i % 3 == 0 and 65535 - i < 65500]),
    (f"{label(7)} <= label < {label(300)}", range(7, 300)),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("where", "expected"), CHOSEN)
def test_every_selected_sample_comes_once_an_epoch_and_no_other(url, where, expected, shuffle):
    ds = stream(url, where, batch=min(16, len(expected)), shuffle=shuffle)
    assert ds.num_samples == len(expected)
    orders = []
    for _ in range(3):
        batches = list(ds)
        assert len(batches) == len(ds)
        for batch in batches:
            datasets.check_batch(batch, datasets.FIELDS)
        orders.append(seen(batches))
        assert sorted(orders[-1]) == list(expected)
    if shuffle and len(expected) > 16:
        assert orders[0] != orders[1] != orders[2]
    elif not shuffle:
        assert orders[0] == list(expected)


@pytest.mark.filterwarnings("ignore:.*blocks are read about")
@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_the_order_is_the_same_at_every_world_size(url, data):
    chosen = sorted(data.draw(st.sets(st.integers(0, N - 1), min_size=30, max_size=200)))
    batch, size = 24, data.draw(st.sampled_from([2, 3, 4]))
    options: dict[str, Any] = {"fields": ["tok", "label"], "shuffle": Shuffle(lanes=4)}
    alone = stream(url, chosen, batch=batch, **options)
    steps = [sorted(batch["index"].tolist()) for batch in alone]
    ranks = [stream(url, chosen, batch=batch // size, world=(r, size), **options) for r in range(size)]
    assert [sorted(torch.cat([b["index"] for b in parts]).tolist()) for parts in zip(*ranks, strict=True)] == steps
    assert [sorted(alone.samples(0, step).tolist()) for step in range(len(steps))] == steps


def test_a_run_resumes_with_the_same_selection_only(url):
    ds = stream(url, SOME)
    whole = seen(ds)
    ds = stream(url, np.isin(np.arange(N), SOME))
    begin = datasets.flat(datasets.take(iter(ds), 2))
    state = json.loads(json.dumps(ds.state_dict()))
    other = stream(url, SOME, batch=8)
    other.load_state_dict(state)
    assert begin + seen(other) == whole
    for where in (None, SOME[:-1]):
        with pytest.raises(StateError, match="selection"):
            stream(url, where).load_state_dict(state)
    every = stream(url, None).state_dict()
    assert "selection" not in every  # as states were before there were selections
    with pytest.raises(StateError, match="selection"):
        stream(url, SOME).load_state_dict(every)
    with pytest.raises(StateError, match="selection is 7"):
        stream(url, SOME).load_state_dict({**state, "selection": 7})


@pytest.mark.filterwarnings("ignore:2 DataLoader workers on each rank")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_deliver_the_selection_once(url):
    ds = pickle.loads(pickle.dumps(stream(url, "flag", fields=["label", "name"])))  # as workers that are spawned get it
    loader = DataLoader(ds, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(i for batch in loader for i in numbers(batch)) == list(range(0, N, 3))


def test_padded_rows_repeat_samples_of_the_selection(url):
    (batch,) = list(stream(url, [3, 500, 7], batch=2, world=(0, 2)))
    assert set(batch["index"].tolist()) <= {3, 7, 500}


# ---- what is read


def test_blocks_without_a_selected_sample_are_not_read(data):
    path = data(4000, "x", layout=Layout(1 << 18, 1 << 16, 1 << 13, codec="none"))
    half, one = stream(path, slice(1000, 3000)), stream(path, [1234], batch=1)
    seen(half)
    assert half.stats().bytes_fetched < 0.6 * 4000 * 1200
    assert seen(one) == [1234]
    assert one.stats().bytes_fetched < 20_000


@pytest.fixture(scope="module")
def large(data: Any) -> str:
    """A dataset of 8000 samples of 1200 bytes."""
    return data(8000, "x", layout=Layout(1 << 22, 1 << 18, 1 << 14, codec="none"))


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:8 ranks are more than")
@pytest.mark.parametrize("where", [slice(1000, 3000), slice(1001, 3333), slice(0, 40_000, 3)])
def test_eight_ranks_each_read_about_their_share_of_a_selection(large, where):
    whole = 1200 * len(range(*where.indices(8000)))
    every, fetched = [], []
    for rank in range(8):
        ds = stream(large, where, world=(rank, 8), remainder="uneven")
        every += seen(ds)
        fetched.append(ds.stats().bytes_fetched)
    assert sorted(every) == list(range(*where.indices(8000)))
    dense = whole if where.step is None else 1200 * 8000
    assert sum(fetched) <= 2.2 * dense  # blocks of a selection do not begin where chunks do
    assert max(fetched) <= 2 * min(fetched)


def test_the_forecast_of_a_selection_is_that_of_its_own_order(large):
    options = ForecastOptions(world_size=8, batch_size=32, where=slice(1001, 3333))
    planned = forecast(large, options)
    ds = stream(large, options.where, batch=256, shuffle=Shuffle(lanes=planned.lanes))
    classes = 16
    labels = np.concatenate([ds.samples(epoch, step).numpy() for epoch in range(8) for step in range(8)])
    found = _variance_ratio((labels.reshape(-1, 256) - 1001) * classes // 2332, classes)
    assert planned.read_factor == 1
    assert found - 1 <= planned.together.design_effect <= found + 3


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=30), st.data())
def test_samples_selected_of_a_chunk_keep_at_most_twice_their_bytes(values, data):
    """A window of rare samples would else keep the chunks that they come from."""
    wanted = sorted(data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1)))
    items = parse_items(memoryview(b"".join(pack_items(values))), len(values))
    found = select_items(items, ChunkRows(len(values), 0, np.array(wanted)), empty_buffer)
    assert [bytes(found[i]) for i in range(len(found))] == [values[i] for i in wanted]
    if len(wanted) < len(values):
        assert len(found.buffer) <= 2 * sum(len(values[i]) for i in wanted)


def test_classes_are_those_of_the_conversion_and_select_samples(tmp_path):
    for number, name in enumerate(("ant", "bee", "cat")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(4 + number):
            (tmp_path / "photos" / name / f"{i}.png").write_bytes(datasets.encoded(datasets.picture(i), "png"))
    sl.convert(tmp_path / "photos", tmp_path / "whole", workers=0)
    sl.convert(tmp_path / "photos", tmp_path / "split", split={"train": 0.5, "val": 0.5}, workers=0)
    classes = {"label": ("ant", "bee", "cat")}
    assert sl.open(tmp_path / "whole").classes == classes
    assert sl.open(tmp_path / "split", split="val").classes == classes
    animals = StreamingDataset(tmp_path / "whole", batch_size=1, where="label in ('ant', 'cat')")
    assert animals.classes == classes
    assert animals.num_samples == 4 + 6
    assert {int(batch["label"]) for batch in animals} == {0, 2}
    datasets.write(tmp_path / "plain", 3, ["label"])
    assert sl.open(tmp_path / "plain").classes == {}
    for name, where, part in (
        ("whole", "label == 'beee'", "similar names are 'bee'"),
        ("whole", "label == bee", "'bee', which is not a field; write the class as 'bee' in quotes; fields"),
        ("plain", "label == 'bee'", "has no class names for it"),
    ):
        with pytest.raises(SelectionError, match=part):
            StreamingDataset(tmp_path / name, batch_size=1, where=where)
    mixed = sl.Mixture({tmp_path / "whole": 1, sl.Source(tmp_path / "split", "train"): 1}, batch_size=2)
    assert mixed.classes == classes
    assert sl.Mixture({tmp_path / "whole": 1, tmp_path / "plain": 1}, batch_size=2, fields=["label"]).classes == {}


# ---- conditions

COLUMNS = {
    "label": np.array([0, 1, 2, 3, 250, 255, 7, 7], np.uint8),
    "width": np.array([-(2**40), -1, 0, 1, 255, 256, 300, 2**40], np.int64),
    "score": np.array([0.5, -1.5, 0.0, 2.25, 1e30, -1e-30, 3.0, 0.5], np.float32),
    "flag": np.array([True, False, True, True, False, False, True, False]),
}
ROWS = [{name: column[i].item() for name, column in COLUMNS.items()} for i in range(8)]


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined = st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})")
    divided = st.tuples(inner, st.sampled_from(["/", "//", "%"]), st.integers(1, 9)).map(
        lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
    )
    return joined | divided | inner.map(lambda text: f"(-{text})")


number = st.recursive(
    st.sampled_from(["label", "width", "score", "flag"]) | st.integers(-300, 300).map(str), combined, max_leaves=4
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
def test_a_condition_is_true_where_it_is_in_python(text):
    try:
        parsed = Condition.parse(text)
    except SelectionError as error:
        assert "names no field" in str(error)
        return
    try:
        found = parsed.mask({name: COLUMNS[name] for name in parsed.fields})
    except SelectionError as error:
        assert "may exceed 64 bits" in str(error)
        return
    expected = [bool(eval(text, {"__builtins__": {}}, row)) for row in ROWS]
    assert found.dtype == np.bool_
    assert found.tolist() == expected, text


def test_small_integers_do_not_wrap_and_large_ones_compare_exactly():
    columns: dict[str, Any] = {"small": np.array([250, 5], np.uint8), "large": np.array([2**64 - 1, 2**63], np.uint64)}
    assert Condition.parse("small + 10 > 255").mask(columns).tolist() == [True, False]
    assert Condition.parse("small - 6 < 0").mask(columns).tolist() == [False, True]
    assert Condition.parse(f"large == {2**64 - 1}").mask(columns).tolist() == [True, False]
    assert Condition.parse(f"small < {10**30}").mask(columns).tolist() == [True, True]


def test_differences_and_negatives_of_64_bits_do_not_wrap():
    columns = {
        "id": np.array([5, 7], np.uint64),
        "least": np.array([-(2**63), 3]),
        "large": np.array([2**63], np.uint64),
    }
    assert Condition.parse("id - 6 < 0").mask(columns).tolist() == [True, False]
    assert Condition.parse("-id < -6").mask(columns).tolist() == [False, True]
    assert Condition.parse(f"least == -{2**63}").mask(columns).tolist() == [True, False]
    for text in ("-least > 0", "-large < 0", "large - 1 > 0"):
        with pytest.raises(SelectionError, match="may exceed 64 bits"):
            Condition.parse(text).mask(columns)


CLASSES = {"label": ["ant", "cat", "dog", "catfish"], "width": ["cat", "narrow"]}


SAME = [
    ("label == 'cat'", "label == 1"),
    ("'cat' != label", "label != 1"),
    ("label in ('dog', 'ant', 7)", "label in (2, 0, 7)"),
    ("label not in ['dog', 'ant']", "label not in (2, 0)"),
    ("not (label == 'ant' or width == 'narrow') and flag", "not (label == 0 or width == 1) and flag"),
]


@pytest.mark.parametrize(("text", "same"), SAME)
def test_class_names_stand_for_their_numbers(text, same):
    named, plain = Condition.parse(text), Condition.parse(same)
    assert named.fields == plain.fields
    columns = {name: COLUMNS[name] for name in named.fields}
    assert named.with_values(CLASSES).mask(columns).tolist() == plain.mask(columns).tolist()


ONE_FIELD = (
    *("label == width == 'cat'", "label in 'cat'", "label in ('cat', width)"),
    *("label == ('cat', 'dog')", "label != 1 + 1 == 'cat'"),
)
WRONG = [
    *((text, "cannot be read") for text in ("", "label ==", "label == 1; width", "label\x00 == 1")),
    ("(" * 5000 + "label" + ")" * 5000 + " == 1", "cannot be read|characters|nested"),
    ("not " * 3000 + "flag", "nested|characters|cannot be read"),
    ("label == " + "1" * MAX_CHARACTERS, "characters"),
    ("open('x') == 1", r"open\('x'\)"),
    ("label.real == 1", r"label\.real"),
    ("label[0] == 1", r"label\[0\]"),
    ("label ** 9 == 1", r"label \*\* 9"),
    ("label == None", "None"),
    ("label == 1j", "1j"),
    ("(x := label) == 1", "not understood"),
    ("label < 'cat'", "compares 'label' with 'cat' by order"),
    ("label == 'cat' == 1", "compares 'label' with 'cat' by order"),
    ("'cat' in (label, 1)", "has a field inside a list"),
    *((text, "with something other than one field") for text in ONE_FIELD),
    *((text, "not a list of numbers") for text in ("label is 1", "label in width")),
    ("label in (1, width)", "has a field inside a list"),
    *((text, "a number, not a condition") for text in ("label", "not (label + 1)")),
    ("label and flag", "'label' in where= is a number, not a condition"),
    ("not width", "'width' in where= is a number"),
    ("(label == 1) + 1 == 2", "a condition, not a number"),
    ("1 == 1", "names no field"),
    *((f"{text} == 1", "cannot be computed") for text in ("label / 0", "width // label", "width % (label - label)")),
    *((f"{text} > 1", "may exceed 64 bits") for text in (f"width + {10**30}", "width * width * width")),
    ("label == 'cats'", "'cats', which is none of its classes; similar names are 'cat', 'catfish'"),
    ("label in ('cat', 'zebra')", r"'zebra', which is none of its .* 4 classes are 'ant', 'cat', 'dog', 'catfish' \["),
    ("score == 'cat'", "compares 'score' with 'cat', and the dataset has no class names for it; compare it with"),
]


PATHS = {"obs/cells": np.array([1, 5, 9]), "obs/kind": np.array([0, 1, 1]), "ok": np.array([True, True, False])}
QUOTED = [
    ("'obs/cells' > 3", [1, 2]),
    ("1 < 'obs/cells' < 9 and ok", [1]),
    ("'obs/kind' == 'T/B'", [1, 2]),
    ("'obs/kind' not in ('T/B', 7)", [0]),
    ("not ('obs/cells' + 'obs/kind' == 6) and 'ok'", [0]),
]


@pytest.mark.parametrize(("text", "rows"), QUOTED)
def test_a_text_that_is_no_value_is_the_name_of_a_field(text, rows):
    condition = Condition.parse(text).with_values({"obs/kind": ["no", "T/B"]})
    assert np.flatnonzero(condition.mask(PATHS)).tolist() == rows


def test_texts_and_times_select_samples(tmp_path):
    times = pd.date_range("2024-05-30", periods=60, freq="7h")
    rows = pd.DataFrame(
        {"country": ["de", "fr", "ü", ""] * 15, "ts": times.astype("M8[us]"), "day": times.date, "n": range(60)}
    )
    rows.assign(zoned=rows.ts.dt.tz_localize("UTC")).to_parquet(tmp_path / "rows.parquet")
    types = {"country": None, "ts": "int64", "zoned": "int64", "day": "int32", "n": None}
    sl.convert(tmp_path / "rows.parquet", tmp_path / "out", fields=types, workers=0)
    sl.convert(tmp_path / "rows.parquet", tmp_path / "mapped", fields=types, map=dict, workers=0)
    with pytest.raises(SelectionError, match="compares 'ts' with '2024-06-01' by order"):
        StreamingDataset(tmp_path / "mapped", batch_size=1, where="ts > '2024-06-01'")  # a map may have changed them
    country, ts, june = rows.country, rows.ts, pd.Timestamp("2024-06-01")
    cases = {
        "country == 'de'": country == "de",
        "country not in ('de', 'ü') and n < 30": ~country.isin(["de", "ü"]) & (rows.n < 30),
        "country != ''": country != "",
        "ts >= '2024-06-01'": ts >= june,
        "day > '2024-06-01T06:00'": ts.dt.normalize() > june,
        "zoned < '2024-06-01T06:00' or day == '2024-06-03'": (ts < june + pd.Timedelta("6h")) | (ts.dt.day == 3),
        "'2024-06-01' <= ts < '2024-06-10'": (ts >= june) & (ts < pd.Timestamp("2024-06-10")),
        "ts == '2024-05-30'": ts == times[0],
        f"ts > '2024-06-01' and ts < {times[40].value // 1000}": (ts > june) & (ts < times[40]),
    }
    for where, expected in cases.items():
        found = StreamingDataset(tmp_path / "out", batch_size=1, fields=["n"], where=where, shuffle=False)
        assert [int(batch["n"]) for batch in found] == np.flatnonzero(expected).tolist(), where
    in_place = StreamingDataset(
        tmp_path / "out", batch_size=1, fields=["n"], sample_axis="sample", where="ts < '2024-06-01' and country == 'ü'"
    )
    expected = np.flatnonzero((ts < june) & (country == "ü")).tolist()
    assert sorted(int(batch["n"]) for batch in in_place) == expected
    for where, part in (
        ("country < 'de'", "by order"),
        ("ts >= 'June'", "'June' is not a date; write times as"),
        ("n == 'de'", "has no class names"),
        *((text, "'country' in where= is a text; compare it with texts") for text in ("country == 3", "country > n")),
        ("country and n > 3", "is a number, not a condition"),
        ("'de' == 'fr'", "uses 'de', which is not a field"),
    ):
        with pytest.raises(SelectionError, match=part):
            StreamingDataset(tmp_path / "out", batch_size=1, where=where)


def test_missing_times_satisfy_no_comparison_but_inequality():
    times = np.array([np.iinfo(np.int64).min, 3, 9])
    for text, wanted in (("ts < '5'", [False, True, False]), ("ts != '3'", [True, False, True])):
        condition = Condition.parse(text).with_values({}, times={"ts": int})
        assert condition.mask({"ts": times}).tolist() == wanted


@pytest.mark.parametrize(("text", "part"), WRONG)
def test_an_invalid_condition_is_an_error_that_names_its_part(text, part):
    with pytest.raises(SelectionError, match=part):
        Condition.parse(text).with_values(CLASSES).mask(COLUMNS)
