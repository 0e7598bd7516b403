"""Fields that are added to datasets on every kind of store, by processes and engines, and with kills at any moment."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import transform_tasks
from added import COUNT, FIELDS, SMALL, base_columns, given_columns, kill_at_each_change, new_columns, written
from conversions import contents
from golden import assert_same

import streamloader as sl
from streamloader.storage import open_store

HERE = Path(__file__).parent


@pytest.fixture
def data(tmp_path):
    return written(tmp_path / "data", FIELDS, base_columns(0, COUNT))


@pytest.mark.quick(2)
def test_added_fields_are_visible_to_new_readers_only(tmp_path, store_url):
    url, options = store_url
    sl.convert(base_columns(0, COUNT), url, layout=SMALL, workers=0, storage_options=options)
    before = sl.open(url, storage_options=options)
    loader = sl.StreamingDataset(url, batch_size=5, seed=3, storage_options=options)
    batches = iter(loader)
    seen, state = [next(batches) for _ in range(3)], loader.state_dict()
    report = sl.add_columns(url, given_columns(COUNT), workers=0, storage_options=options)
    assert (report.before, report.added, report.manifest.generation) == (COUNT, 0, 2)
    assert set(report.fields) == set(new_columns(1))
    seen += list(batches)
    assert not any("score" in batch for batch in seen)
    assert set(before[3]) == set(FIELDS)
    after = sl.open(url, storage_options=options)
    for name, column in {**base_columns(0, COUNT), **new_columns(COUNT)}.items():
        assert_same(after[:][name], column)
        assert np.array_equal(after[7][name], column[7])
    assert after.lengths("tokens").tolist() == [i % 5 for i in range(COUNT)]
    assert sl.verify(url, storage_options=options).ok
    assert not [info for info in open_store(url, options).list("_streamloader") if "append" in info.path]
    fresh = sl.StreamingDataset(url, batch_size=5, seed=3, storage_options=options)
    numbers = [batch["n"].tolist() for batch in seen]
    assert [batch["n"].tolist() for batch in fresh] == numbers, "the order of an epoch stays"
    assert all((batch["score"] * 2 == batch["n"]).all() for batch in fresh)
    resumed = sl.StreamingDataset(url, batch_size=5, seed=3, fields=list(FIELDS), storage_options=options)
    resumed.load_state_dict(state)
    assert [batch["n"].tolist() for batch in resumed] == numbers[3:]


def test_processes_write_the_same_bytes(data, tmp_path):
    shutil.copytree(data, tmp_path / "other")
    for url, workers in ((data, 0), (tmp_path / "other", 2)):
        columns = {"size": transform_tasks.measured, **given_columns(COUNT)}
        sl.add_columns(url, columns, workers=workers)
    ours, theirs = (
        {path: body for path, body in contents(url).items() if path != "zarr.json"}
        for url in (data, tmp_path / "other")
    )
    assert ours == theirs
    assert sl.verify(data).ok


PROGRAM = """
import sys, streamloader as sl, transform_tasks
sl.add_columns(sys.argv[1], {"size": transform_tasks.measured}, engine=sys.argv[2], workers=2)
"""


@pytest.mark.quick(2)
@pytest.mark.parametrize("engine", ["local", "dask", "ray", "spark"])
def test_engines_compute_fields(engine, data):
    """In a program of its own, with which what the engine starts ends."""
    path = os.pathsep.join(map(str, (HERE.parent, HERE.parent.parent)))
    environment = os.environ | {"PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    subprocess.run([sys.executable, "-c", PROGRAM, data, engine], check=True, timeout=300, env=environment)
    assert sl.open(data)[:]["size"].tolist() == [len(text) for text in base_columns(0, COUNT)["t"]]


@pytest.mark.long
@pytest.mark.parametrize("split", [None, "train"])
def test_an_addition_that_is_killed_at_any_change_goes_on_to_the_same_bytes(split, data, tmp_path, monkeypatch):
    if split:
        written(tmp_path / "source", FIELDS, base_columns(0, 60))
        shutil.rmtree(data)
        sl.convert(tmp_path / "source", data, layout=SMALL, split="train=5/6,val=1/6", workers=0)
    columns = {key: given_columns(COUNT)[key] for key in ("score", "vector", "caption")}
    add = partial(sl.add_columns, columns=columns, split=split, workers=0)
    assert kill_at_each_change(add, data, split, monkeypatch) > 15
