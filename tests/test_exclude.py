"""`exclude=`: the order covers the other samples as if they were the whole dataset, in memory for the excluded ones."""

import json
import pickle
from typing import Any

import commands
import datasets
import numpy as np
import pytest
import torch
from amounts import examples
from datasets import flat, seen, take
from hypothesis import given, settings
from hypothesis import strategies as st

import streamloader as sl
from streamloader.engine.dataset import Dataset, numbers_among_all
from streamloader.errors import NotFoundError, SelectionError, StateError, UsageError
from streamloader.loader.arguments import _count_chunks
from streamloader.loader.dataset import mean_length
from streamloader.options import Shuffle
from streamloader.order.selection import exclude
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.samples import AllBut
from streamloader.storage import open_store

N = 603
BAD = sorted({*range(5, 200, 37), *range(300, 340), 0, 602})
GOOD = [i for i in range(N) if i not in BAD]


@pytest.fixture(scope="module")
def url(data: Any) -> str:
    """A dataset of N samples with every kind of field."""
    return data(N)


def stream(url: str, batch: int = 16, **options: Any) -> StreamingDataset:
    return StreamingDataset(url, batch_size=batch, with_index=True, **{"world": (0, 1), **options})


def lines(*records: Any) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


# ---- the numbers of all samples but some


some_excluded = st.integers(2, 200).flatmap(
    lambda count: st.tuples(
        st.just(count), st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1).map(sorted)
    )
)


@given(some_excluded, st.data())
def test_all_but_some_is_the_array_of_the_others(given_numbers, data):
    count, bad = given_numbers
    expected = np.setdiff1d(np.arange(count), bad)
    found = AllBut(count, np.array(bad, np.int64))
    copy = pickle.loads(pickle.dumps(found))
    start, stop = data.draw(st.integers(-count, 2 * count)), data.draw(st.integers(-count, 2 * count))
    at = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1))), np.int64)
    for key in (slice(None), slice(start, stop), slice(start, None, 3), at):
        for one in (found, copy):
            assert one[key].dtype == np.int64
            assert one[key].tolist() == expected[key].tolist()
    assert len(found) == len(expected)
    assert found.excluded.tolist() == bad
    assert found.nbytes == 8 * len(bad)
    chunk = data.draw(st.integers(1, 30))
    assert _count_chunks(found, chunk) == _count_chunks(expected, chunk) == np.unique(expected // chunk).size


@settings(max_examples=examples(100))
@given(some_excluded, some_excluded)
def test_selections_have_the_same_digest_if_they_are_the_same(one, other):
    def digest(count: int, bad: list[int]) -> Any:
        return Dataset(None, None, (), AllBut(count, np.array(bad, np.int64))).selection_digest  # type: ignore[arg-type]

    assert (digest(*one) == digest(*other)) == (one == other)
    listed = Dataset(None, None, (), np.array(one[1]))  # type: ignore[arg-type]
    assert digest(*one) != listed.selection_digest


@settings(max_examples=examples(100))
@given(some_excluded, st.data())
def test_samples_are_excluded_from_a_selection(given_numbers, data):
    count, bad = given_numbers
    selected = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))), np.int64)
    expected = np.setdiff1d(selected, bad)
    if not expected.size:
        with pytest.raises(SelectionError, match=f"exclude= leaves none of {selected.size} samples"):
            exclude(selected, np.array(bad), count)
        return
    found = exclude(selected, np.array(bad), count)
    assert found is not None
    assert found[:].tolist() == expected.tolist()


def test_a_few_of_many_samples_are_excluded_in_little_memory():
    with datasets.within(1 << 20):
        many = AllBut(10**9, np.array([3, 10**8, 10**9 - 1]))
        assert len(many) == 10**9 - 3
        assert many[10**8 - 3 : 10**8 + 1].tolist() == [10**8 - 2, 10**8 - 1, 10**8 + 1, 10**8 + 2]
        assert many.count_chunks(1 << 10) == -(-(10**9) // (1 << 10))
        assert Dataset(None, None, (), many).selection_digest  # type: ignore[arg-type]


def test_numbers_of_concatenated_datasets_are_among_all_their_samples():
    def dataset(count: int, selection: Any) -> Dataset:
        return Dataset(None, type("M", (), {"num_samples": count, "num_remaining": count})(), (), selection)  # type: ignore[arg-type]

    parts = [dataset(5, AllBut(5, np.array([1]))), dataset(3, None), dataset(4, np.array([0, 3]))]
    assert numbers_among_all(parts)(np.arange(9)).tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 11]


# ---- what comes out


@pytest.mark.long
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_other_sample_comes_once_an_epoch_in_the_order_of_its_selection(url, shuffle):
    without, selected = stream(url, exclude=BAD, shuffle=shuffle), stream(url, where=GOOD, shuffle=shuffle)
    assert without.num_samples == len(GOOD)
    assert without._first.sources[0].params == selected._first.sources[0].params
    for epoch in range(2):
        assert without.samples(epoch, 3).tolist() == selected.samples(epoch, 3).tolist()
        batches = list(without)
        for batch in batches:
            datasets.check_batch(batch, datasets.FIELDS)
        assert seen(batches) == seen(selected)
        assert sorted(seen(batches)) == GOOD


def test_samples_are_excluded_after_where_by_their_numbers_in_the_dataset(url):
    found = stream(url, where=slice(100, 400), exclude=[300, 5, 120])
    assert sorted(seen(found)) == [i for i in range(100, 400) if i not in (120, 300)]
    assert found.state_dict()["excluded"] == 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*blocks are read about")
def test_every_world_size_has_the_same_steps_and_resumes_at_the_others_states(url):
    options: dict[str, Any] = {"exclude": BAD, "fields": ["tok", "label"], "shuffle": Shuffle(lanes=2)}
    alone = stream(url, 12, **options)
    whole = [sorted(step) for step in take(alone)]
    state = json.loads(json.dumps(alone.state_dict(batches=2)))
    for size in (2, 3):
        ranks = [stream(url, 12 // size, world=(rank, size), **options) for rank in range(size)]
        for rank in ranks:
            rank.load_state_dict(state)
        assert [sorted(flat(step)) for step in zip(*map(take, ranks), strict=True)] == whole[2:]


def test_sources_of_a_mixture_exclude_their_own_samples(url, data):
    other = data(200)
    sources = {sl.Source(url, exclude=BAD): 3, sl.Source(other, exclude=torch.tensor([7, 7, 3])): 1}
    mixture = sl.Mixture(sources, batch_size=16, fields=["tok", "label"], with_index=True, stop="last", world=(0, 1))
    found: dict[int, set[int]] = {0: set(), 1: set()}
    for batch in mixture:
        for source, index in zip(batch["source"].tolist(), batch["index"].tolist(), strict=True):
            found[source].add(index)
    assert found == {0: set(GOOD), 1: set(range(200)) - {3, 7}}
    state = mixture.state_dict()
    assert [source["excluded"] for source in state["sources"]] == [len(BAD), 2]
    with pytest.raises(StateError, match="'excluded': 48"):
        plain = sl.Mixture({url: 3, other: 1}, batch_size=16, fields=["tok", "label"], stop="last", world=(0, 1))
        plain.load_state_dict(state)


def test_the_mean_length_is_that_of_the_others(url):
    (dataset,) = stream(url, exclude=BAD)._datasets
    assert mean_length(dataset, "tok") * len(GOOD) == sum(i % 7 for i in GOOD)


# ---- states


@pytest.mark.long
def test_a_run_resumes_with_the_same_excluded_samples_only(url):
    whole = seen(stream(url, exclude=BAD))
    ds = stream(url, exclude=np.array(BAD[::-1] + BAD))
    begin = flat(take(iter(ds))[:2])
    state = json.loads(json.dumps(stream(url, exclude=BAD).state_dict(batches=2)))
    assert state["excluded"] == len(BAD)
    ds = stream(url, exclude=BAD)
    ds.load_state_dict(state)
    assert begin + seen(ds) == whole
    for other, shown in ((None, f"excluded {len(BAD)} instead of 0"), (BAD[1:], f"excluded {len(BAD)} instead of")):
        with pytest.raises(StateError, match=f"selection '.*{shown}.*; skip_steps= leaves out steps"):
            stream(url, exclude=other).load_state_dict(state)
    with pytest.raises(StateError, match=r"selection None instead of '.*excluded 0 instead of 48"):
        stream(url, exclude=BAD).load_state_dict(stream(url).state_dict())
    with pytest.raises(StateError, match="excluded is 'x'"):
        ds.load_state_dict({**state, "excluded": "x"})


def test_nothing_excluded_is_a_run_without_exclude(url, tmp_path):
    (tmp_path / "none.jsonl").write_bytes(b"\n")
    plain = stream(url)
    for nothing in ([], np.zeros(0), tmp_path / "none.jsonl"):
        ds = stream(url, exclude=nothing)
        assert ds.state_dict() == plain.state_dict()
        assert "excluded" not in ds.state_dict()
        assert ds._datasets[0].selection is None
    ds.load_state_dict(plain.state_dict())


# ---- files


@pytest.mark.long
def test_a_file_has_a_number_or_json_in_each_line(url, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b"7\n\n  3\r\n" + lines({"sample": 9, "error": "x", "epoch": 1}, {"sample": 9}) + b"12")
    for name in (file, str(file), f"file://{file}"):
        assert sorted(seen(stream(url, exclude=name))) == [i for i in range(N) if i not in (3, 7, 9, 12)]


def test_a_folder_has_files_of_them(url, tmp_path):
    for name, data in {"a.jsonl": lines({"sample": 1}), "b/c.jsonl": lines({"sample": 5}), "note.txt": b"x"}.items():
        (tmp_path / "log" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "log" / name).write_bytes(data)
    assert stream(url, exclude=f"{tmp_path}/log/")._datasets[0].selection.excluded.tolist() == [1, 5]  # type: ignore[union-attr]


def test_a_file_on_s3_is_read_with_the_options_of_the_dataset(moto, url, tmp_path):
    store, options = moto.url(), moto.storage_options
    datasets.write(store, 20, ["label"], options=options)
    open_store(store, options).put("bad.jsonl", lines({"sample": 4}))
    ds = stream(store, 4, exclude=f"{store}/bad.jsonl", storage_options=options)
    assert sorted(seen(ds)) == [i for i in range(20) if i != 4]
    (tmp_path / "local.jsonl").write_text("5")
    local = stream(store, 4, exclude=tmp_path / "local.jsonl", storage_options=options)
    assert local.num_samples == 19


def test_lines_of_other_splits_are_left_out(tmp_path):
    rows = [{"n": i} for i in range(40)]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    sl.convert(tmp_path / "rows.jsonl", tmp_path / "out", split={"train": 0.5, "val": 0.5}, workers=0)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(lines({"sample": 1, "split": "train"}, {"sample": 10**6, "split": "val"}, {"sample": 2}))
    ds = sl.NumpyDataset(tmp_path / "out", batch_size=1, split="train", exclude=bad)
    assert ds._datasets[0].excluded == 2


def test_sources_of_a_mixture_take_their_own_lines_of_one_file(url, data, tmp_path):
    other, log = data(200), tmp_path / "log.jsonl"
    log.write_bytes(lines({"sample": 600, "source": url}, {"sample": 2, "source": other}, {"sample": 7}))
    sources = {sl.Source(each, exclude=log): 1 for each in (url, other)}
    first, second = sl.Mixture(sources, batch_size=16, world=(0, 1))._datasets
    assert [dataset.selection.excluded.tolist() for dataset in (first, second)] == [[7, 600], [2, 7]]  # type: ignore[union-attr]


def test_a_log_of_another_dataset_excludes_nothing_and_warns(url, data, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines({"sample": 3, "source": data(200)}))
    with pytest.warns(UserWarning, match=f"exclude={log}: all lines are of other datasets, so no sample of {url} is"):
        assert stream(url, exclude=log).num_samples == stream(url).num_samples


WRONG: list[tuple[bytes, str]] = [
    (b"3\n603\n", r"bad, line 2: 603 is out of range: the dataset has 603 samples"),
    (lines({"sample": -1}), "line 1: .*-1.* is out of range"),
    (b"3\nseven\n", "line 2: seven has no sample number"),
    (b"1.5", "has no sample number"),
    (b"true", "has no sample number"),
    (b"[1, 2]", "has no sample number"),
    (b"\xff\xfe", "has no sample number"),
    (lines({"number": 3}), "has no sample number.*write a number, or JSON"),
]


@pytest.mark.parametrize(("content", "shown"), WRONG)
def test_a_wrong_line_is_an_error_with_its_file_and_number(url, tmp_path, content, shown):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(SelectionError, match=f"{tmp_path}/?" + r".*" + shown):
        stream(url, exclude=tmp_path / "bad")


INVALID: list[tuple[Any, str]] = [
    ([0, N], f"exclude= has sample numbers from 0 to {N}, the dataset has {N}"),
    ([-1], "from -1 to -1"),
    (np.ones(N, np.bool_), "exclude= has the dtype bool"),
    ([0.5], "dtype float64"),
    (7, r"exclude= has the shape \(\)"),
    (range(N), f"exclude= leaves none of {N} samples"),
    (np.ma.array([1, 2], mask=[0, 1]), "masked elements"),
]


@pytest.mark.parametrize(("choice", "shown"), INVALID)
def test_invalid_numbers_are_an_error(url, choice, shown):
    with pytest.raises(SelectionError, match=shown):
        stream(url, exclude=choice)


def test_a_missing_file_or_folder_is_an_error(url, tmp_path):
    with pytest.raises(NotFoundError, match=r"nothing\.jsonl"):
        stream(url, exclude=tmp_path / "nothing.jsonl")
    with pytest.raises(NotFoundError, match=r"nothing/ has no \*.jsonl"):
        stream(url, exclude=f"{tmp_path}/nothing/")


def test_arrays_in_place_take_where_instead(url):
    with pytest.raises(UsageError, match=r"exclude= of arrays in place; .*where="):
        stream(url, sample_axis="sample", fields=["x"], exclude=[1])


def test_a_plan_is_that_of_the_others(url, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_bytes(lines(*({"sample": i} for i in BAD)))
    options = ["--batch-size", "8", "--json", "--exclude", str(tmp_path / "bad.jsonl")]
    status, out, _ = commands.run(capsys, "plan", url, *options)
    assert (status, json.loads(out)["num_samples"]) == (0, len(GOOD))
