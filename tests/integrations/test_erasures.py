"""The bytes of deleted samples are erased: on every kind of store, with kills at any moment."""

import shutil
from contextlib import suppress

import naive_reader
import numpy as np
import pytest
from added import COUNT, FIELDS, SMALL, base_columns, given_columns
from commands import run
from conversions import Stop, contents, dying

import streamloader as sl
from streamloader.errors import CorruptError, DestinationError, ModifiedError, StateError, UsageError
from streamloader.maintenance.append import abandon
from streamloader.maintenance.erase import BEGUN

GONE = [0, 3, 17, 18, 30, 49]
LEFT = [n for n in range(COUNT) if n not in GONE]
SECRET = b"SECRET"


def secrets(numbers):
    """Samples of which those in `GONE` have a secret in every field, which no codec hides."""
    columns = base_columns(numbers[0], numbers[-1] + 1)
    for row, number in enumerate(numbers):
        if number in GONE:
            columns["t"][row] = f"SECRET{number}"
            columns["x"][row].view("S8")[:] = SECRET
    columns["n"][:] = [int.from_bytes(SECRET, "little") + n if n in GONE else n for n in numbers]
    return columns


@pytest.fixture
def data(tmp_path):
    """Two versions, the second of which stores the last chunk of the first again; nothing is compressed."""
    layout = sl.Layout(shard_size=1 << 14, block_size=1 << 11, chunk_size=1 << 13, samples_per_shard=16, codec="none")
    with sl.Writer(tmp_path / "data", FIELDS, layout=layout, workers=1) as out:
        out.write_batch(secrets(range(19)))
    with sl.Writer(tmp_path / "more", FIELDS, layout=layout, workers=1) as out:
        out.write_batch(secrets(range(19, COUNT)))
    sl.append(tmp_path / "data", tmp_path / "more", workers=0)
    return tmp_path / "data"


def check(url):
    """Check that the samples in `LEFT` are whole, and that no object has a secret."""
    ds, want = sl.open(url), base_columns(0, COUNT)
    assert ds[:]["n"].tolist() == LEFT
    assert np.array_equal(ds[:]["x"], want["x"][LEFT])
    assert ds[:]["t"] == [want["t"][n] for n in LEFT]
    assert ds.lengths("t").tolist() == [len(want["t"][n]) for n in LEFT]
    assert sl.verify(url).ok
    assert naive_reader.read(url)[1]["t"] == ds[:]["t"]
    assert not [path for path, body in contents(url).items() if SECRET in body]


def test_no_object_has_the_bytes_of_erased_samples(data, capsys):
    assert sum(SECRET in body for body in contents(data).values()) > 5
    old, state = sl.open(data), sl.NumpyDataset(data, batch_size=4)
    next(iter(state))
    old[:]
    sl.delete(data, ids=GONE[:2])
    assert sum(SECRET in body for body in contents(data).values()) > 5
    sl.delete(data, where="t in ('SECRET17', 'SECRET18', 'SECRET30', 'SECRET49')")
    report = sl.delete(data, erase=True)
    assert (report.deleted, report.erased, report.manifest.generation) == (0, len(GONE), 5)
    assert SECRET in (data / "zarr.json").read_bytes(), "the condition is in the provenance"
    assert next(one.change for one in sl.log(data)) == "erased 6 deleted samples, and all earlier versions"
    assert all("not kept" in one.change for one in sl.log(data)[1:])
    with pytest.raises(ModifiedError):
        old[:]
    with pytest.raises(UsageError, match="not kept"):
        sl.open(data, version=2)
    fresh = sl.NumpyDataset(data, batch_size=4)
    with pytest.raises(StateError):
        fresh.load_state_dict(state.state_dict())
    assert run(capsys, "delete", data, "--erase")[0] == 0, "nothing is left to erase"


def test_erased_datasets_can_be_appended_to_and_erased_again(data, tmp_path, capsys):
    status, out, _ = run(capsys, "delete", data, "--ids", _file(tmp_path, GONE), "--erase")
    assert status == 0 and "deleted 6 samples" in out and "the bytes of 6 deleted samples are erased" in out
    check(data)
    assert next(one.change for one in sl.log(data)).startswith("deleted 6 samples; erased 6 deleted samples")
    sl.add_columns(data, given_columns(len(LEFT)), workers=0)
    sl.append(data, data, workers=0)
    sl.delete(data, ids=[0, len(LEFT)], erase=True)
    assert sl.open(data)[:]["n"].tolist() == LEFT[1:] * 2
    assert sl.verify(data).ok


def _file(folder, numbers):
    (folder / "ids").write_text("\n".join(map(str, numbers)))
    return folder / "ids"


def test_samples_are_erased_on_every_store(store_url):
    url, options = store_url
    sl.convert(base_columns(0, COUNT), url, layout=SMALL, workers=0, storage_options=options)
    before = sl.NumpyDataset(url, batch_size=4, storage_options=options)
    next(iter(before))
    assert sl.delete(url, ids=GONE, erase=True, storage_options=options).erased == len(GONE)
    assert sl.open(url, storage_options=options)[:]["n"].tolist() == LEFT
    assert sl.verify(url, storage_options=options).ok


def test_a_state_loads_with_force_after_its_version_was_erased(data):
    sl.delete(data, ids=GONE)
    loader = sl.NumpyDataset(data, batch_size=4, seed=2)
    next(batches := iter(loader))
    state, rest = loader.state_dict(), [batch["n"].tolist() for batch in batches]
    sl.delete(data, erase=True)
    again = sl.NumpyDataset(data, batch_size=4, seed=2)
    with pytest.raises(StateError):
        again.load_state_dict(state)
    again.load_state_dict(state, force=True)
    assert [batch["n"].tolist() for batch in again] == rest


def test_a_damaged_shard_is_not_erased_and_the_run_can_be_abandoned(data):
    before, path = contents(data), data / "x" / "c" / "0" / "0"
    body = bytearray(path.read_bytes())
    body[5000] ^= 1
    path.write_bytes(body)
    with pytest.raises(CorruptError, match="x/c/0/0"):
        sl.delete(data, ids=[1, 2], erase=True)
    if not (data / BEGUN).exists():
        assert abandon(data)
    path.write_bytes(before["x/c/0/0"])
    sl.delete(data, ids=[1, 2], erase=True)
    assert sl.verify(data).ok


@pytest.mark.quick(1)
@pytest.mark.parametrize("split", [None, "train"])
def test_an_erasure_that_is_killed_at_any_change_goes_on_to_the_same_bytes(split, data, tmp_path, monkeypatch):
    if split:
        shutil.rmtree(data)
        sl.convert(secrets(range(COUNT)), data, layout=SMALL, split="train=4/5,val=1/5", workers=0)
    shutil.copytree(data, tmp_path / "whole")
    count = len(sl.open(data, split=split))
    gone = [i for i, n in enumerate(sl.open(data, split=split)[:]["n"]) if n > COUNT]
    sl.delete(tmp_path / "whole", ids=gone, erase=True, split=split)
    whole, first, ended, changes, refused = contents(tmp_path / "whole"), contents(data), False, 0, 0
    while not ended:
        there = tmp_path / f"killed{changes}"
        shutil.copytree(data, there)
        with monkeypatch.context() as patch, suppress(Stop):
            dying(patch, changes)
            sl.delete(there, ids=gone, erase=True, split=split)
            ended = True
        published = len(sl.open(there, split=split)) < count
        folder = there / split if split else there
        if not ended and changes % 2:
            if (folder / BEGUN).exists() and not published:
                with pytest.raises(DestinationError, match="cannot be undone"):
                    abandon(there, split=split)
                refused += 1
            else:
                assert abandon(there, split=split) == (changes > 0)
                assert contents(there) == (whole if published else first)
        if not ended and not (changes % 2 and published):
            assert sl.delete(there, ids=gone, erase=True, split=split).erased == len(gone)
        assert contents(there) == whole
        shutil.rmtree(there)
        changes += 5 if split else 1
    assert changes > 20 and refused > 1
    assert sl.verify(tmp_path / "whole").ok
