"""A description of a run is JSON, and opens the same batches again."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamloader as sl
from streamloader.errors import StateError, UsageError
from streamloader.loader.dataset import NumpyMixture
from streamloader.loader.describe import from_json, read_description, to_json
from streamloader.options import CenterCrop, RandomResizedCrop, View
from streamloader.view.run import Run, RunOptions

NAMES = st.text("abcxyz_", min_size=1, max_size=6)
SIZES = st.tuples(st.integers(1, 999), st.integers(1, 999))
CROPS = st.sampled_from([None, "random", "center", RandomResizedCrop(scale=(0.5, 1.0), flip=0.5), CenterCrop(0.9)])
OPTIONS = st.one_of(
    st.builds(sl.Shuffle, lanes=st.none() | st.integers(1, 64)),
    st.builds(sl.Decode, size=SIZES, crop=CROPS, normalize=st.sampled_from([None, "imagenet"])),
    st.builds(sl.Decode, size=st.builds(lambda a, b: {0: a, 500: b}, SIZES, SIZES)),
    st.builds(sl.Decode, views=st.builds(lambda s: {"a": View(s, "random", count=2)}, SIZES)),
    st.builds(sl.Pack, st.integers(1, 9999), fit=st.sampled_from([None, "best"])),
    st.builds(sl.Pad, value=st.integers(-5, 5)),
    st.builds(sl.Window, history=st.sampled_from([6, "12h"]), lead=st.sampled_from([1, "6h", ("6h", "24h")])),
    st.builds(sl.Patch, st.dictionaries(NAMES, st.integers(1, 99), min_size=1)),
    st.lists(NAMES, min_size=1, unique=True).map(lambda names: sl.Channels(*names)),
)


def plain(value):
    """What a description keeps of a value: tuples for lists."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


@given(st.recursive(OPTIONS | st.none() | st.booleans() | st.integers() | NAMES, st.lists))
def test_what_is_described_reads_back_as_the_same_value(value):
    assert from_json(json.loads(json.dumps(to_json(value)))) == plain(value)


@given(st.dictionaries(NAMES | st.integers(), OPTIONS))
def test_dicts_keep_the_types_of_their_keys(value):
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


@given(st.integers(0, 9), st.integers(0, 9))
def test_slices_and_arrays_read_back(first, last):
    assert from_json(to_json(slice(first, last))) == slice(first, last)
    numbers = np.arange(first, last)
    assert np.array_equal(from_json(to_json(numbers)), numbers)


@pytest.mark.parametrize(
    "document",
    [
        *(None, [], {}, {"sources": 3}, {"sources": [3], "arguments": {}}),
        {"sources": [{"url": {"type": "os.system", "value": "ls"}}], "arguments": {}},
        {"sources": [], "arguments": {"decode": {"type": "Decode", "size": "x"}}},
    ],
)
def test_other_documents_are_state_errors(document):
    with pytest.raises(StateError, match=r"description of a run"):
        read_description(document)


def halved(sample):
    return {"x": sample["x"] / 2}


def same(run, loader, epoch, step, rank):
    ours, (expected,) = run.batch(run.place(step, epoch, rank)), list(loader.replay(epoch, [step], rank=rank))
    assert np.array_equal(ours["index"], expected["index"])
    for name in expected:
        assert np.array_equal(np.asarray(ours[name], object), np.asarray(expected[name], object)), name


@pytest.mark.parametrize(
    "given",
    [
        {"where": "label < -1099511627700", "shuffle": sl.Shuffle(lanes=2, window=64)},
        {"where": np.arange(100, 300), "seed": 9, "remainder": "drop"},
        {"skip_steps": {0: range(3)}, "exclude": [1, 2, 3]},
        {"shuffle": False, "fields": ["label", "tok"], "collate": {"tok": sl.Pad(mask=True)}},
        {"bucket_by": "tok", "bucket_steps": 4, "collate": "pad", "fields": ["tok"]},
        {"pack": {"tok": sl.Pack(17, fit="best")}, "fields": ["tok"]},
        {"weights": {"count": {65535: 2.0, 65534: 1.0}}, "fields": ["count"]},
    ],
    ids="-".join,
)
def test_a_described_run_has_the_same_batches(given, data):
    loader = sl.NumpyDataset(data(400), batch_size=8, with_index=True, world=(1, 2), num_workers=0, **given)
    description = json.loads(json.dumps(loader.describe()))
    assert not description["left_out"]
    run = Run(RunOptions(None, description=description))
    for epoch, step, rank in [(0, 2, 1), (1, 0, 0), (3, 4, 1)]:
        same(run, loader, epoch, step, rank)


def test_a_described_mixture_has_the_same_batches(data):
    whole = data(400)
    a, b = sl.Source(whole, where=slice(0, 150)), sl.Source(whole, where=slice(150, 400))
    options = {"batch_size": 8, "with_index": True, "num_workers": 0, "seed": 4, "world": (0, 2)}
    loader = NumpyMixture({a: 0.7, b: 0.3}, schedule={5: {a: 0.2, b: 0.8}}, stop="last", **options)
    run = Run(RunOptions(None, description=json.loads(json.dumps(loader.describe()))))
    for epoch, step, rank in [(0, 2, 1), (0, 9, 0), (1, 1, 1)]:
        same(run, loader, epoch, step, rank)


def test_the_url_of_one_dataset_takes_no_place_in_a_mixture(data):
    whole = data(400)
    a, b = sl.Source(whole, where=slice(0, 150)), sl.Source(whole, where=slice(150, 400))
    description = NumpyMixture({a: 1, b: 1}, batch_size=8, num_workers=0).describe()
    with pytest.raises(UsageError, match=r"a run over 2 datasets"):
        Run(RunOptions(whole, description=description))


def test_a_run_opens_by_its_state_alone_but_for_the_batch_size(data):
    url, state_of = data(400), {"batch_size": 4, "with_index": True, "num_workers": 0}
    loader = sl.NumpyDataset(url, seed=7, shuffle=sl.Shuffle(lanes=4), world=(0, 2), **state_of)
    batches = iter(loader)
    seen = [next(batches) for _ in range(5)]
    state = json.loads(json.dumps(loader.state_dict()))
    run = Run(RunOptions(url, state=state, given={"batch_size": 4}, world_size=2))
    assert np.array_equal(run.batch(run.place(3, None, 0))["index"], seen[3]["index"])
    same(run, loader, 1, 3, 1)
    with pytest.raises(StateError, match=r"another run"):
        Run(RunOptions(url, state=state, given={"seed": 8}))


def test_what_cannot_be_described_is_named_and_may_be_given(data, monkeypatch):
    loader = sl.NumpyDataset(data(50), batch_size=4, fields=["x"], transform=halved, num_workers=0, with_index=True)
    description = loader.describe()
    assert description["left_out"] == {"transform": "test_describe:halved"}
    run = Run(RunOptions(None, description=description))
    assert run.left_out == description["left_out"]
    (expected,) = loader.replay(0, [1])
    assert np.array_equal(run.batch(run.place(1, 0, 0))["x"], expected["x"] * 2)
    given = Run(RunOptions(None, description=description, transform="test_describe:halved"))
    assert given.left_out == {}
    assert np.array_equal(given.batch(given.place(1, 0, 0))["x"], expected["x"])


def test_single_samples_are_shown_one_by_one(data):
    loader = sl.NumpyDataset(data(50), batch_size=None, num_workers=0, with_index=True, world=(0, 2))
    run = Run(RunOptions(None, description=loader.describe()))
    for step, sample in zip(range(3), loader, strict=False):
        assert run.batch(run.place(step, 0, 0))["index"].tolist() == [sample["index"]]


def test_paths_are_described_as_absolute_ones(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(data(50)).parent))
    monkeypatch.setenv("USERPROFILE", str(Path(data(50)).parent))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "left-out").mkdir()
    (tmp_path / "left-out" / "a.jsonl").write_text("1\n2\n")
    url = f"~/{Path(data(50)).name}"
    source = sl.Source(url, exclude="left-out/")
    description = NumpyMixture({source: 1}, batch_size=4, num_workers=0).describe()
    joined = to_json(sl.Join("a/", Path("b"), on="id"))
    monkeypatch.chdir("/")
    assert Run(RunOptions(None, description=description)).loader._datasets[0].num_samples == 48
    assert (joined["left"], joined["right"]) == (f"{tmp_path}/a/", str(tmp_path / "b"))


def test_a_condition_with_a_secret_is_left_out_and_no_other_one_takes_its_place(data):
    where = "name == 'https://me:hush@host/x?token=3' or label < 0"
    description = sl.NumpyDataset(data(50), batch_size=4, num_workers=0, where=where).describe()
    assert "where" not in description["sources"][0]
    assert "label < 0" in description["left_out"]["where"]
    assert "hush" not in json.dumps(description)


def test_a_description_has_no_secrets(data):
    secret = {"key": "AKIAWHATEVER", "secret": "hush-hush", "client_kwargs": {"region_name": "eu-west-1"}}
    source = sl.Source("https://me:hush-2@host/data?X-Amz-Signature=abcdef", storage_options=secret)
    text = json.dumps(to_json(source))
    assert "hush" not in text
    assert "AKIA" not in text
    assert "abcdef" not in text


@given(st.integers(0, 400), st.integers(0, 3))
def test_a_step_counts_from_the_beginning_of_epoch_0_unless_its_epoch_is_named(run_of_13, step, rank):
    run, steps = run_of_13, 13
    place = run.place(step, None, rank)
    assert (place.epoch, place.step, place.total) == (step // steps, step % steps, step)
    assert run.place(place.step, place.epoch, rank) == place


@pytest.fixture(scope="module")
def run_of_13(data):
    return Run(RunOptions(data(400), given={"batch_size": 8}, world_size=4))


def test_the_last_step_is_that_of_the_batch_that_was_returned(data):
    loader = sl.NumpyDataset(data(400), batch_size=8, with_index=True, num_workers=0, world=(1, 2), fields=["label"])
    with pytest.raises(StateError, match=r"last_step\(\) before the first batch"):
        loader.last_step()
    for epoch in range(2):
        for step, batch in enumerate(loader):
            assert loader.last_step() == {"epoch": epoch, "step": step, "rank": 1}
            if step in (2, 20):
                (again,) = sl.NumpyDataset(loader._datasets[0].store.url, batch_size=8, with_index=True, world=(1, 2),
                                           num_workers=0, fields=["label"]).replay(epoch, [step])  # fmt: skip
                assert np.array_equal(again["index"], batch["index"])
