"""Deletions on every kind of store, fenced, with kills at any moment, and under runs of several ranks."""

import shutil
from contextlib import suppress
from itertools import chain

import numpy as np
import pytest
from added import COUNT, FIELDS, SMALL, base_columns, kill_at_each_change, written
from conversions import Stop, dying

import streamloader as sl
from streamloader.errors import DestinationError
from streamloader.storage import open_store

LEFT = [n for n in range(COUNT) if n % 3]


@pytest.fixture
def data(tmp_path):
    return written(tmp_path / "data", FIELDS, base_columns(0, COUNT))


@pytest.mark.quick(3)
def test_deletions_are_visible_to_new_readers_only(store_url):
    url, options = store_url
    sl.convert(base_columns(0, COUNT), url, layout=SMALL, workers=0, storage_options=options)
    before = sl.open(url, storage_options=options)
    loader = sl.StreamingDataset(url, batch_size=5, seed=3, storage_options=options)
    batches = iter(loader)
    next(batches)
    report = sl.delete(url, where="n % 3 == 0", storage_options=options)
    assert (report.before, report.deleted, report.manifest.generation) == (COUNT, COUNT - len(LEFT), 2)
    assert sum(len(batch["n"]) for batch in batches) == COUNT - 5
    assert before[:]["n"].tolist() == list(range(COUNT))
    assert sl.open(url, storage_options=options)[:]["n"].tolist() == LEFT
    assert sl.open(url, version=1, storage_options=options)[:]["n"].tolist() == list(range(COUNT))
    fresh = sl.StreamingDataset(url, batch_size=4, remainder="uneven", storage_options=options)
    assert sorted(chain(*(batch["n"].tolist() for batch in fresh))) == LEFT
    assert sl.verify(url, storage_options=options).ok
    assert not [info for info in open_store(url, options).list("_streamloader") if "append" in info.path]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_remaining_sample_comes_once_at_every_world_size_also_after_a_resume(world, data):
    sl.delete(data, where="n % 3 == 0")
    options = {"batch_size": 2, "seed": 5, "remainder": "uneven", "shuffle": sl.Shuffle(lanes=6)}
    ranks = [sl.NumpyDataset(data, world=(rank, world), **options) for rank in range(world)]
    seen: list[int] = []
    passes = [iter(rank) for rank in ranks]
    for _ in range(2):
        seen += chain(*(next(batches)["n"].tolist() for batches in passes))
    state = ranks[0].state_dict()
    resumed = [sl.NumpyDataset(data, world=(rank, world % 3 + 1), **options) for rank in range(world % 3 + 1)]
    for rank in resumed:
        rank.load_state_dict(state)
        seen += chain(*(batch["n"].tolist() for batch in rank))
    assert sorted(seen) == LEFT


def test_deletions_and_appends_exclude_each_other(data, monkeypatch):
    with monkeypatch.context() as patch, suppress(Stop):
        dying(patch, 1)
        sl.delete(data, ids=[1])
    for other in (lambda: sl.delete(data, ids=[2]), lambda: sl.append(data, data, workers=0)):
        with pytest.raises(DestinationError, match="in progress"):
            other()
    assert sl.delete(data, ids=[1]).deleted == 1
    assert sl.delete(data, ids=[1]).deleted == 1, "the next deletion counts the samples that remain"
    assert sl.open(data)[:]["n"].tolist() == [0, *range(3, COUNT)]


@pytest.mark.parametrize("split", [None, "train"])
def test_a_deletion_that_is_killed_at_any_change_goes_on_to_the_same_bytes(split, data, tmp_path, monkeypatch):
    if split:
        written(tmp_path / "source", FIELDS, base_columns(0, 60))
        shutil.rmtree(data)
        sl.convert(tmp_path / "source", data, layout=SMALL, split="train=5/6,val=1/6", workers=0)
    sl.delete(data, ids=[7], split=split)
    count, gone = len(sl.open(data, split=split)), np.arange(0, 40, 3)

    def delete(url):
        assert sl.delete(url, ids=gone, split=split).deleted == len(gone)
        assert len(sl.open(url, split=split)) == count - len(gone)

    assert kill_at_each_change(delete, data, split, monkeypatch, 3 if split else 1) > 10
