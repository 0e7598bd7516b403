"""Deleted samples: the numbers of those that remain, in every reader, over several versions."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import naive_reader
import numpy as np
import pytest
from added import FIELDS, SMALL, base_columns, given_columns, new_columns, written
from commands import run
from golden import assert_same
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import streamloader as sl
from streamloader.errors import (
    CorruptError,
    FieldError,
    FormatError,
    MissingObjectError,
    ModifiedError,
    SelectionError,
    StateError,
    UsageError,
    VersionError,
)
from streamloader.format import manifest as manifests
from streamloader.format.deleted import Remaining

COUNT = 50


@pytest.fixture
def data(tmp_path):
    return written(tmp_path / "data", FIELDS, base_columns(0, COUNT))


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=n))))
def test_remaining_samples_have_the_numbers_that_they_have_in_a_list(case):
    num_stored, deleted = case
    numbers = np.array(sorted(deleted), np.int64)
    remaining, naive = Remaining(num_stored, numbers), [i for i in range(num_stored) if i not in deleted]
    assert len(remaining) == len(naive)
    assert remaining.excluded.tolist() == sorted(deleted)
    assert remaining[np.arange(len(naive))].tolist() == naive
    assert remaining[:].tolist() == naive
    found, left = remaining.find(np.arange(num_stored))
    assert (found.tolist(), np.flatnonzero(left).tolist()) == (list(range(len(naive))), naive)
    for start in range(num_stored):
        first, stop = remaining.within(start, num_stored)
        assert naive[first:stop] == [i for i in naive if i >= start]
    assert remaining.nbytes == 8 * len(deleted)


def test_numbers_of_a_version_delete_nothing_from_a_later_one(data, tmp_path, capsys):
    version = sl.open(data).manifest.generation
    sl.delete(data, ids=[0, 3], version=version)
    with pytest.raises(
        SelectionError, match=rf"ids= of version {version}: .* is version {version + 1} by now; .*where="
    ):
        sl.delete(data, ids=[0, 3], version=version)
    (tmp_path / "ids.txt").write_text("0\n3\n")
    status, _, shown = run(capsys, "delete", data, "--ids", tmp_path / "ids.txt", "--version", version)
    assert (status, f"is version {version + 1} by now" in " ".join(shown.split())) == (2, True)
    check(data, [i for i in range(COUNT) if i not in (0, 3)])


def test_numbers_of_two_versions_are_two_deletions_even_if_the_first_was_killed_at_its_end(data, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("streamloader.maintenance.append.end_published", lambda *_: None)
        sl.delete(data, ids=[5], version=1)
    sl.delete(data, ids=[5], version=2)
    check(data, [i for i in range(COUNT) if i not in (5, 6)])


def check(url: Path, numbers: list[int], **fields: Any) -> None:
    """Check that every reader has the samples with these values of `n`, in this order, and nothing else."""
    ds, count = sl.open(url), len(numbers)
    whole, rows = {**base_columns(0, max(numbers) + 1), **fields}, np.array(numbers)
    columns = {name: c[rows] if isinstance(c, np.ndarray) else [c[i] for i in numbers] for name, c in whole.items()}
    assert (len(ds), sl.log(url)[0].num_samples) == (count, count)
    for name, column in columns.items():
        assert_same(ds[:][name], column)
        assert_same(ds.read(name, count // 3, count // 2), column[count // 3 : count // 2])
    assert [int(ds[i]["n"]) for i in range(count)] == numbers
    assert int(ds[-1]["n"]) == numbers[-1]
    assert [ds[i]["t"] for i in range(count)] == columns["t"]
    assert ds.lengths("t").tolist() == list(map(len, columns["t"]))
    assert ds.to_dask()["n"].compute().tolist() == numbers
    for shuffle in (True, False):
        loader = sl.NumpyDataset(url, batch_size=7, shuffle=shuffle, with_index=True, remainder="uneven")
        rows = [(int(i), int(n), t) for b in loader for i, n, t in zip(b["index"], b["n"], b["t"], strict=True)]
        assert sorted(rows) == [(i, n, columns["t"][i]) for i, n in enumerate(numbers)]
        assert [i for i, *_ in rows][:7] == loader.samples(0, 0).tolist()[:7]
    report = sl.verify(url)
    assert (report.ok, report.samples) == (True, {"": count}), report.problems
    assert_same(naive_reader.read(url)[1]["n"], columns["n"])


STEP = st.tuples(st.sampled_from(["delete", "append", "where"]), st.sets(st.integers(0, 99), min_size=1, max_size=30))


@pytest.mark.long
@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.lists(STEP, min_size=1, max_size=4))
def test_versions_are_what_lists_become(tmp_path_factory, steps):
    root = tmp_path_factory.mktemp("versions")
    url, numbers = written(root / "data", FIELDS, base_columns(0, COUNT)), list(range(COUNT))
    history, total = [list(numbers)], COUNT
    for number, (what, ids) in enumerate(steps):
        if what == "append":
            source = written(root / f"{number}", FIELDS, base_columns(total, total + len(ids)))
            report = sl.append(url, source, workers=0)
            assert (report.before, report.added) == (len(numbers), len(ids))
            numbers, total = numbers + list(range(total, total + len(ids))), total + len(ids)
        elif what == "where":
            last = max(ids)
            gone = [n for n in numbers if n % 100 == last]
            assert sl.delete(url, where=f"n % 100 == {last}").deleted == len(gone)
            if not gone:
                continue
            numbers = [n for n in numbers if n not in gone]
        else:
            places = sorted({i % len(numbers) for i in ids})[: len(numbers) - 1]
            if not places:
                continue
            report = sl.delete(url, ids=places[::-1])
            assert (report.before, report.deleted) == (len(numbers), len(places))
            numbers = [n for i, n in enumerate(numbers) if i not in places]
        history.append(list(numbers))
    check(url, numbers)
    for version, then in enumerate(history, 1):
        assert sl.open(url, version=version)[:]["n"].tolist() == then
        assert sl.NumpyDataset(url, version=version, batch_size=2).num_samples == len(then)


@pytest.mark.long
def test_fields_are_added_to_the_samples_that_remain(data):
    sl.delete(data, ids=[0, *range(16, 34), 49])
    left = [n for n in range(COUNT) if n not in (0, *range(16, 34), 49)]

    def double(batch):
        return {"double": batch["n"] * 2}

    values = new_columns(COUNT)
    given_values = {
        key: c[np.array(left)] if isinstance(c, np.ndarray) else [c[n] for n in left]
        for key, c in given_columns(COUNT).items()
    }
    report = sl.add_columns(data, {**given_values, "double": double}, workers=0)
    assert (report.before, report.manifest.deleted.count) == (len(left), COUNT - len(left))
    check(data, left, double=np.arange(COUNT) * 2, **values)
    with pytest.raises(FieldError, match=f"has {len(left)} samples"):
        sl.add_columns(data, {"more": np.arange(COUNT)}, workers=0)
    sl.delete(data, where="double < 10")
    check(data, left[4:], double=np.arange(COUNT) * 2, **values)


def test_selections_and_states_count_the_samples_of_the_version(data, tmp_path):
    before = sl.NumpyDataset(data, batch_size=4, seed=1)
    next(batches := iter(before))
    old = before.state_dict()
    then = [batch["n"].tolist() for batch in batches]
    sl.delete(data, ids=np.arange(0, COUNT, 5))
    left = [n for n in range(COUNT) if n % 5]
    manifest = sl.open(data).manifest
    options: dict[str, Any] = {"batch_size": 4, "seed": 1, "with_index": True, "remainder": "uneven"}
    for selection in (
        {"where": [0, 3, 39]},
        {"where": "n in (1, 4, 49)"},
        {"exclude": [i for i in range(40) if i not in (0, 3, 39)]},
    ):
        batches = list(sl.NumpyDataset(data, **options, **selection))
        rows = sorted((int(i), int(n)) for batch in batches for i, n in zip(batch["index"], batch["n"], strict=True))
        assert rows == [(0, 1), (3, 4), (39, 49)]
    weights = np.arange(len(left)) % 2
    drawn = sl.NumpyDataset(data, batch_size=4, weights=weights)
    assert {int(n) for batch in drawn for n in batch["n"]} <= set(left[1::2])
    with pytest.raises(SelectionError, match="40 samples"):
        sl.NumpyDataset(data, batch_size=4, weights=np.ones(COUNT))
    with pytest.raises(SelectionError, match="has 40"):
        sl.NumpyDataset(data, batch_size=4, where=[40])
    loader = sl.NumpyDataset(data, **options)
    params = loader._first.sources[0].params
    assert (params.block, params.lanes, params.window) == tuple(vars(manifest.order).values())
    batches = iter(loader)
    seen = [next(batches) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch["n"].tolist() for batch in batches]
    resumed = sl.NumpyDataset(data, **options)
    resumed.load_state_dict(state)
    assert [batch["n"].tolist() for batch in resumed] == rest
    assert sorted(chain(*(batch["n"].tolist() for batch in seen), *rest)) == left
    going_on = sl.NumpyDataset(data, batch_size=4, seed=1)
    going_on.load_state_dict(old)
    assert [batch["n"].tolist() for batch in going_on] == then, "a run goes on on the version before"


def test_states_of_erased_versions_are_errors_that_say_so(data):
    state = sl.NumpyDataset(data, batch_size=4).state_dict()
    sl.delete(data, ids=[3], erase=True)
    for force in (False, True):
        with pytest.raises(StateError, match=r"open version 1, .*; if it was erased, start without the state"):
            sl.NumpyDataset(data, batch_size=4).load_state_dict(state, force=force)


def test_after_an_erasure_a_run_goes_on_from_memory_and_cannot_read_what_was_written(data):
    kept, streamed = (sl.NumpyDataset(data, batch_size=4, memory=memory) for memory in ("64MB", None))
    held, opened = sl.NumpyDataset(data, batch_size=4, fields=["n"]), sl.open(data)
    masked = sl.NumpyDataset(data, batch_size=4, on_error="mask", max_bad=1.0)
    for run_before in (kept, streamed, held, opened, masked):
        assert len(list(run_before)) > 0
    sl.delete(data, ids=[3], erase=True)
    for _ in range(2):
        for memory_only in (kept, held):
            assert {int(n) for batch in memory_only for n in batch["n"]} == {*range(COUNT)}, "also 3"
    assert (opened[3]["n"], opened[3]["t"]) == (3, base_columns(3, 4)["t"][0])
    for read in (lambda: list(streamed), lambda: opened[:], lambda: opened.lengths("t")):
        with pytest.raises((ModifiedError, MissingObjectError), match="open the dataset again if samples were erased"):
            read()
    valid = {int(n) for batch in masked for n in batch["n"][batch["valid"]]}
    assert valid < {*range(COUNT)} - {3}


def test_exports_and_conversions_have_the_samples_that_remain(data, tmp_path):
    sl.delete(data, where="n >= 10 and n < 40")
    left = [*range(10), *range(40, 50)]
    sl.export(data, tmp_path / "out", format="npz", fields="n,x")
    assert np.load(tmp_path / "out" / "part-00000.npz")["n"].tolist() == left
    sl.convert(data, tmp_path / "again", layout=SMALL, workers=0)
    assert sl.open(tmp_path / "again")[:]["n"].tolist() == left
    assert sl.open(tmp_path / "again")[:]["t"] == sl.open(data)[:]["t"]
    assert sl.verify(data, against=tmp_path / "again").problems
    with pytest.raises(FieldError, match="deleted"):
        sl.NumpyDataset(data, batch_size=2, fields=["x"], sample_axis="sample")


def test_files_of_numbers_are_those_that_exclude_takes(data, tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jsonl").write_text('{"sample": 3}\n7\n')
    (tmp_path / "bad" / "b.jsonl").write_text(
        f'{{"sample": 9, "source": "{sl.open(data).url}"}}\n{{"sample": 1, "split": "val"}}\n'
    )
    assert sl.delete(data, ids=f"{tmp_path}/bad/").deleted == 3
    assert sl.open(data)[:]["n"].tolist() == [n for n in range(COUNT) if n not in (3, 7, 9)]
    status, out, _ = run(capsys, "delete", data, "--ids", tmp_path / "bad" / "a.jsonl")
    assert status == 0 and "deleted 2 samples" in out and "version 3 has 45" in out
    status, out, _ = run(capsys, "delete", data, "--where", "n > 100")
    assert status == 0 and "no sample matches" in out
    status, out, _ = run(capsys, "delete", data, "--where", "n == 20", "--quiet")
    assert (status, out) == (0, "")
    assert [one.change for one in sl.log(data)] == [
        "deleted 1 sample",
        "deleted 2 samples",
        "deleted 3 samples",
        "created",
    ]
    assert (sl.diff(data, 1, 4).samples_deleted, sl.diff(data, 4, 2).samples_added) == (6, 3)
    assert "44 samples and 6 deleted" in run(capsys, "inspect", data)[1]


def test_what_cannot_be_deleted_is_an_error_and_changes_nothing(data):
    before = sl.open(data).digest
    for wrong in ({}, {"where": "n == 1", "ids": [1]}):
        with pytest.raises(UsageError, match="where= or ids="):
            sl.delete(data, **wrong)
    for ids in ([50], [-1], [0.5], [[1]], [True], "missing.jsonl"):
        with pytest.raises((SelectionError, sl.errors.NotFoundError)):
            sl.delete(data, ids=ids)
    for where in ("nothing == 1", "x > 1", "n ="):
        with pytest.raises(SelectionError):
            sl.delete(data, where=where)
    with pytest.raises(UsageError, match="all 50 samples"):
        sl.delete(data, where="n >= 0")
    assert sl.delete(data, ids=[]).deleted == 0
    assert sl.open(data).digest == before and not (data / "_streamloader" / "append.json").exists()


def test_a_list_of_deleted_samples_that_is_damaged_is_an_error(data, monkeypatch):
    sl.delete(data, ids=[3, 4])
    path = data / manifests.deleted_path(2)
    whole = path.read_bytes()
    for damaged, error in (
        (whole[:-1], CorruptError),
        (whole[:5] + b"\0" + whole[6:], CorruptError),
        (None, MissingObjectError),
    ):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(error, match=r"deleted\.2"):
            sl.open(data)
        report = sl.verify(data)
        assert [problem.path for problem in report.problems] == ["_streamloader/deleted.2"]
    other = written(data.parent / "other", FIELDS, base_columns(0, COUNT))
    sl.delete(other, ids=[3, 5])
    path.write_bytes((other / manifests.deleted_path(2)).read_bytes())
    with pytest.raises(ModifiedError, match=r"deleted\.2"):
        sl.NumpyDataset(data, batch_size=2)
    path.write_bytes(whole)
    monkeypatch.setattr(manifests, "KNOWN_REQUIREMENTS", frozenset({"append"}))
    with pytest.raises(VersionError, match="delete"):
        sl.open(data)


@pytest.mark.parametrize(
    "change",
    [
        {"deleted": {"generation": 3, "count": 2, "sha256": "0" * 64}},
        {"deleted": {"generation": 2, "count": 50, "sha256": "0" * 64}},
        {"deleted": {"generation": 2, "count": 0, "sha256": "0" * 64}},
        {"deleted": {"generation": 2, "count": 2, "sha256": "x"}},
        {"deleted": None},
        {"requires": ["append"]},
    ],
)
def test_manifests_of_impossible_deletions_are_refused(data, change):
    sl.delete(data, ids=[3, 4])
    document = json.loads((data / "zarr.json").read_text())
    ours = document["attributes"]["streamloader"]
    with pytest.raises(FormatError, match="damaged"):
        manifests.read_manifest({**ours, **change}, "memory://x")
