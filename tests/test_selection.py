"""`where=`: the order over a part of the dataset keeps every law, and what is not wanted is not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import streamloader as sl
from bench.shuffles.quality import _variance_ratio
from streamloader.errors import SelectionError, StateError
from streamloader.format.codecs import pack_items, parse_items
from streamloader.format.runs import Part, chosen
from streamloader.measure.forecast import ForecastOptions, forecast
from streamloader.options import Layout, Shuffle
from streamloader.plan.selection import Selection
from streamloader.torch_dataset import StreamingDataset

N = 603
SOME = sorted({*range(5, 200, 7), *range(300, 340), 602})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of N samples with every kind of field."""
    path = tmp_path_factory.mktemp("selected") / "all"
    datasets.write(path, N)
    return str(path)


def label(i: int) -> int:
    return int(datasets.value("label", i))


def stream(url: str, where: Any, batch: int = 16, **options: Any) -> StreamingDataset:
    return StreamingDataset(url, batch_size=batch, where=where, with_index=True, **{"world": (0, 1), **options})


def seen(ds: Any) -> list[int]:
    return [i for batch in ds for i in numbers(batch)]


# ---- which samples


@given(st.integers(1, 300), st.data())
def test_slices_masks_and_numbers_in_any_order_choose_alike(count: int, data: st.DataObject) -> None:
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
                Selection.of(choice, count)
        return
    found = [Selection.of(choice, count) for choice in choices]
    assert {tuple(one.samples.tolist()) for one in found} == {tuple(expected)}
    assert len({one.digest for one in found}) == 1


@pytest.mark.parametrize(
    ("choice", "part"),
    [
        (np.zeros(N - 1, np.bool_), f"a mask of {N - 1} bools, the dataset has {N} samples"),
        ([0, N], f"names the samples 0 to {N}"),
        ([-1, 2], "names the samples -1 to 2"),
        ([3, 5, 3], "names sample 3 more than once"),
        ([0.5], "dtype float64"),
        (["label"], "dtype"),
        (np.zeros((2, 2), np.int64), r"shape \(2, 2\)"),
        (7, r"shape \(\)"),
        ([[1], [2, 3]], "is no array"),
        ([], f"selects none of {N} samples"),
        ("label > 0", f"selects none of {N} samples"),
        ("nope == 1", "'nope', which is no field.*count, flag, label"),
        ("raw == 1", "'raw', which is bytes"),
        ("x > 1", r"'x', which is float32\[300\]"),
        ("print(label)", "not understood"),
        (slice("a", 3), "cannot be"),
    ],
)
def test_what_cannot_be_chosen_is_refused(url: str, choice: Any, part: str) -> None:
    with pytest.raises(SelectionError, match=part):
        stream(url, choice)


def test_a_condition_that_cannot_be_read_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(SelectionError, match="cannot be read"):
        StreamingDataset("s3://no-such-bucket-anywhere/x", batch_size=1, where="label ==")


# ---- what comes out


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (SOME, SOME),
        (slice(100, 400), range(100, 400)),
        (slice(None), range(N)),
        ([11], [11]),
        ("flag and count < 65500", [i for i in range(N) if i % 3 == 0 and 65535 - i < 65500]),
        (f"{label(7)} <= label < {label(300)}", range(7, 300)),
    ],
)
def test_every_selected_sample_comes_once_an_epoch_and_no_other(
    url: str, where: Any, expected: Any, shuffle: bool
) -> None:
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
    ds.close()


@pytest.mark.filterwarnings("ignore:.*blocks are read about")
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_order_is_the_same_at_every_world_size(url: str, data: st.DataObject) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, N - 1), min_size=30, max_size=200)))
    batch, size = 24, data.draw(st.sampled_from([2, 3, 4]))
    options: dict[str, Any] = {"fields": ["tok", "label"], "shuffle": Shuffle(lanes=4)}
    alone = stream(url, chosen, batch=batch, **options)
    steps = [sorted(batch["index"].tolist()) for batch in alone]
    ranks = [stream(url, chosen, batch=batch // size, world=(r, size), **options) for r in range(size)]
    together = [sorted(torch.cat([b["index"] for b in parts]).tolist()) for parts in zip(*ranks, strict=True)]
    assert together == steps
    for step, expected in enumerate(steps):
        assert sorted(alone.samples(0, step).tolist()) == expected
    for ds in (alone, *ranks):
        ds.close()


def test_a_run_goes_on_where_its_state_stands_and_not_with_another_selection(url: str) -> None:
    ds = stream(url, SOME)
    whole = seen(ds)
    ds = stream(url, np.isin(np.arange(N), SOME))
    run = iter(ds)
    begin = [i for _ in range(2) for i in numbers(next(run))]
    state = json.loads(json.dumps(ds.state_dict()))
    ds.close()
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
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_deliver_the_selection_once(url: str, context: str) -> None:
    ds = stream(url, "flag", fields=["label", "name"])
    loader = DataLoader(ds, batch_size=None, num_workers=2, multiprocessing_context=context)
    assert sorted(i for batch in loader for i in numbers(batch)) == list(range(0, N, 3))


def test_padded_rows_repeat_samples_of_the_selection(url: str) -> None:
    ds = stream(url, [3, 500, 7], batch=2, world=(0, 2))
    (batch,) = list(ds)
    assert set(batch["index"].tolist()) <= {3, 7, 500}
    ds.close()


# ---- what is read


def test_blocks_without_a_selected_sample_are_not_read(tmp_path: Path) -> None:
    layout = Layout(shard_size=1 << 18, block_size=1 << 16, chunk_size=1 << 13, codec="none")
    datasets.write(tmp_path / "d", 4000, ["x"], layout)
    every = stream(str(tmp_path / "d"), None)
    seen(every)
    half = stream(str(tmp_path / "d"), slice(1000, 3000))
    seen(half)
    assert half.stats().bytes_fetched < 0.6 * every.stats().bytes_fetched
    one = stream(str(tmp_path / "d"), [1234], batch=1)
    assert seen(one) == [1234]
    assert one.stats().bytes_fetched < 20_000
    for ds in (every, half, one):
        ds.close()


@pytest.mark.filterwarnings("ignore:8 ranks are more than")
@pytest.mark.parametrize("where", [slice(1000, 3000), slice(1001, 3333), slice(0, 40_000, 3)])
def test_eight_ranks_each_read_about_their_share_of_a_selection(tmp_path: Path, where: slice) -> None:
    layout = Layout(shard_size=1 << 22, block_size=1 << 18, chunk_size=1 << 14, codec="none")
    datasets.write(tmp_path / "d", 8000, ["x"], layout)
    whole = 1200 * len(range(*where.indices(8000)))
    every, fetched = [], []
    for rank in range(8):
        ds = stream(str(tmp_path / "d"), where, world=(rank, 8), remainder="uneven")
        every += seen(ds)
        fetched.append(ds.stats().bytes_fetched)
        ds.close()
    assert sorted(every) == list(range(*where.indices(8000)))
    dense = whole if where.step is None else 1200 * 8000
    assert sum(fetched) <= 2.2 * dense  # blocks of a selection do not begin where chunks do
    assert max(fetched) <= 2 * min(fetched)


def test_the_forecast_of_a_selection_is_that_of_its_own_order(tmp_path: Path) -> None:
    layout = Layout(shard_size=1 << 22, block_size=1 << 18, chunk_size=1 << 14, codec="none")
    datasets.write(tmp_path / "d", 8000, ["x"], layout)
    options = ForecastOptions(world_size=8, batch_size=32, where=slice(1001, 3333))
    told = forecast(str(tmp_path / "d"), options)
    ds = stream(str(tmp_path / "d"), options.where, batch=256, shuffle=Shuffle(lanes=told.lanes))
    classes = 16
    labels = np.concatenate([ds.samples(epoch, step).numpy() for epoch in range(8) for step in range(8)])
    found = _variance_ratio((labels.reshape(-1, 256) - 1001) * classes // 2332, classes)
    assert told.read_factor == 1
    assert found - 1 <= told.together.design_effect(1.0) <= found + 3
    ds.close()


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=30), st.data())
def test_what_is_chosen_of_a_chunk_holds_at_most_twice_its_bytes(values: list[bytes], data: st.DataObject) -> None:
    """A window of rare samples would else keep the chunks that they come from."""
    wanted = sorted(data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1)))
    items = parse_items(memoryview(pack_items(values)), len(values))
    found = chosen(items, Part(len(values), 0, np.array(wanted)))
    assert [bytes(found[i]) for i in range(len(found))] == [values[i] for i in wanted]
    if len(wanted) < len(values):
        assert len(found.buffer) <= 2 * sum(len(values[i]) for i in wanted)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_rare_samples_of_variable_size_come_out_whole(tmp_path: Path, codec: Any) -> None:
    layout = Layout(shard_size=1 << 20, block_size=1 << 14, chunk_size=1 << 14, codec=codec)
    datasets.write(tmp_path / "d", 5000, ["tok", "raw", "name"], layout)
    chosen = list(range(0, 5000, 97))
    ds = stream(str(tmp_path / "d"), chosen, shuffle=Shuffle(lanes=1))
    batches = list(ds)
    for batch in batches:
        datasets.check_batch(batch, ["tok", "raw", "name"])
    assert sorted(seen(batches)) == chosen
    ds.close()


def test_classes_are_those_of_the_conversion_and_name_what_takes_part(tmp_path: Path) -> None:
    for number, name in enumerate(("ant", "bee", "cat")):
        for i in range(4 + number):
            path = tmp_path / "photos" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(datasets.encoded(datasets.picture(i), "png"))
    sl.convert(tmp_path / "photos", tmp_path / "whole")
    sl.convert(tmp_path / "photos", tmp_path / "split", split={"train": 0.5, "val": 0.5})
    classes = {"label": ("ant", "bee", "cat")}
    assert sl.open(tmp_path / "whole").classes == classes
    assert sl.open(tmp_path / "split", split="val").classes == classes
    animals = StreamingDataset(tmp_path / "whole", batch_size=1, where="label in ('ant', 'cat')")
    assert animals.classes == classes
    assert animals.num_samples == 4 + 6
    assert {int(batch["label"]) for batch in animals} == {0, 2}
    with pytest.raises(SelectionError, match="similar names are 'bee'"):
        StreamingDataset(tmp_path / "whole", batch_size=1, where="label == 'beee'")
    with pytest.raises(SelectionError, match="'bee', which is no field; write the class as 'bee' in quotes; fields"):
        StreamingDataset(tmp_path / "whole", batch_size=1, where="label == bee")
    datasets.write(tmp_path / "plain", 3, ["label"])
    assert sl.open(tmp_path / "plain").classes == {}
    with pytest.raises(SelectionError, match="has no class names for it"):
        StreamingDataset(tmp_path / "plain", batch_size=1, where="label == 'bee'")
    mixed = sl.Mixture({tmp_path / "whole": 1, sl.Source(tmp_path / "split", "train"): 1}, batch_size=2)
    assert mixed.classes == classes
    assert sl.Mixture({tmp_path / "whole": 1, tmp_path / "plain": 1}, batch_size=2, fields=["label"]).classes == {}
