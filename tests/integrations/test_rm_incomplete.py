"""`rm-incomplete`: what unfinished conversions left goes, all of it; finished datasets and other things stay."""

import json
from contextlib import closing, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from commands import run
from conversions import contents, interrupted, wait_for

import streamloader as sl
from streamloader.cli import datasets
from streamloader.format.opening import read_job
from streamloader.format.publish import check_not_running
from streamloader.maintenance.cleanup import find_incomplete, remove_incomplete
from streamloader.storage import open_store

SMALL = sl.Layout(samples_per_shard=8)
SPLITS = [None, "train=0.75,val=0.25"]


@pytest.fixture
def src(tmp_path):
    """100 rows."""
    np.savez(tmp_path / "it.npz", x=np.arange(100), y=np.random.default_rng(0).random((100, 300)))
    return tmp_path / "it.npz"


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("phase", "after"), [("write", 0), ("write", 5), ("finish", 0)])
def test_all_objects_of_an_unfinished_conversion_are_removed(split, phase, after, src, tmp_path, capsys):
    out = tmp_path / "out"
    interrupted(src, out, after, phase, layout=SMALL, split=split)
    (out / "_streamloader" / f".{'0' * 32}.streamloader-tmp").write_bytes(b"half of it")
    (out / "NOTES.md").write_text("mine")
    there = contents(out)
    size = sum(len(data) for path, data in there.items() if path != "NOTES.md" and "-tmp" not in path)
    found = find_incomplete(open_store(out))
    assert (found.kind, len(found.objects), found.bytes) == ("unfinished", len(there) - 2, size)
    assert contents(out) == there, "looking changes nothing"
    status, printed, _ = run(capsys, "rm-incomplete", out, "--yes")
    assert status == 0
    assert f"removed {len(there) - 2} objects" in printed
    assert printed.endswith("unfinished uploads: 1\n")
    assert contents(out) == {"NOTES.md": b"mine"}


def test_the_objects_of_an_unclosed_writer_are_removed(tmp_path):
    out = sl.Writer(tmp_path / "out", {"x": "int64"}, layout=sl.Layout(samples_per_shard=2))
    for i in range(10):
        out.write({"x": i})
    store = open_store(tmp_path / "out")
    found = find_incomplete(store)
    assert (found.kind, "was not closed" in found.message) == ("unfinished", True)
    with pytest.raises(sl.errors.DestinationError, match=r"is being written by another run, process \d+ of this"):
        remove_incomplete(store, found)
    del out
    wait_for(lambda: not_running(store))  # a thread closes the socket of the run
    remove_incomplete(store, found)
    assert contents(tmp_path / "out") == {}


def not_running(store):
    """Whether no run of this machine writes there."""
    with suppress(sl.errors.DestinationError):
        check_not_running(store, read_job(store))
        return True
    return False


@pytest.mark.parametrize("split", SPLITS)
def test_of_a_finished_dataset_only_leftovers_are_removed(split, src, tmp_path, capsys):
    out = tmp_path / "out"
    sl.convert(src, out, split=split, layout=SMALL, workers=0)
    whole = contents(out)
    child = out / "val" if split else out
    left = ["job.json", "receipts/3.json", "parts/3", "bad/1.json"]
    for path in left:
        (child / "_streamloader" / path).parent.mkdir(exist_ok=True)
        (child / "_streamloader" / path).write_bytes(b"{}")
    (out / "_streamloader").mkdir(exist_ok=True)
    (out / "_streamloader" / "files").write_bytes(b"x")
    (child / "y" / f".{'0' * 32}.streamloader-tmp").write_bytes(b"half of it")
    (out / "_streamloader" / "quarantine.jsonl").write_bytes(b"kept")
    assert sl.verify(out).leftovers == len(left) + 1
    status, printed, _ = run(capsys, "rm-incomplete", out, "--yes")
    assert (status, "is finished, and stays" in printed, "removed 5 objects" in printed) == (0, True, True)
    assert contents(out) == {**whole, "_streamloader/quarantine.jsonl": b"kept"}
    assert sl.verify(out).ok
    assert run(capsys, "rm-incomplete", out, "--yes")[1].endswith("removed 0 objects, 0 B\n")
    assert contents(out) == {**whole, "_streamloader/quarantine.jsonl": b"kept"}


def test_anything_but_an_unfinished_conversion_is_an_error_and_stays(src, tmp_path, capsys):
    other, zarr, damaged = (tmp_path / name for name in ("other", "zarr", "damaged"))
    (other / "_streamloader" / "receipts").mkdir(parents=True)
    (other / "_streamloader" / "receipts" / "0.json").write_text("{}")
    (other / "photo.jpg").write_bytes(b"x")
    zarr.mkdir()
    (zarr / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    interrupted(src, damaged, 5, layout=SMALL)
    (damaged / "_streamloader" / "job.json").write_bytes(b'{"by"')
    for folder in (other, zarr, damaged):
        before = contents(folder)
        status, printed, err = run(capsys, "rm-incomplete", folder, "--yes")
        assert (status, printed, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: ")
        assert contents(folder) == before


def test_an_edited_or_later_dataset_or_one_under_append_is_an_error_and_stays(src, tmp_path):
    out = tmp_path / "out"
    sl.convert(src, out, layout=SMALL, workers=0)
    claim = out / "_streamloader" / "append.json"
    claim.write_text("{}")
    with pytest.raises(sl.errors.DestinationError, match="append"):
        find_incomplete(open_store(out))
    claim.unlink()
    root = json.loads((out / "zarr.json").read_text())
    for key, value, error in (("version", 2, sl.errors.VersionError), ("num_samples", 99, sl.errors.FormatError)):
        changed = json.loads(json.dumps(root))
        changed["attributes"]["streamloader"][key] = value
        (out / "zarr.json").write_text(json.dumps(changed))
        before = contents(out)
        with pytest.raises(error):
            find_incomplete(open_store(out))
        assert contents(out) == before


def test_a_conversion_that_ended_meanwhile_is_not_removed(src, tmp_path):
    out = tmp_path / "out"
    interrupted(src, out, 5, layout=SMALL)
    store = open_store(out)
    found = find_incomplete(store)
    sl.convert(src, out, layout=SMALL, workers=0)
    with pytest.raises(sl.errors.DestinationError, match="changed in the meantime"):
        remove_incomplete(store, found)
    assert len(sl.open(out)) == 100


@pytest.mark.parametrize("answer", ["y", "n"])
def test_the_command_asks_for_confirmation(answer, src, tmp_path, capsys, monkeypatch):
    interrupted(src, tmp_path / "out", 5, layout=SMALL)
    before = contents(tmp_path / "out")
    terminal = SimpleNamespace(isatty=lambda: True, readline=lambda: f"{answer}\n")
    monkeypatch.setattr(datasets.sys, "stdin", terminal)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: answer)
    status, printed, _ = run(capsys, "rm-incomplete", tmp_path / "out")
    assert status == 0
    assert f"to be removed: {len(before)} objects" in printed
    assert printed.count("\n  ") == 6, "five of them by name, and how many more there are"
    assert contents(tmp_path / "out") == ({} if answer == "y" else before)


def test_without_a_terminal_the_command_needs_yes(src, tmp_path, capsys):
    status, out, err = run(capsys, "rm-incomplete", tmp_path / "out")
    assert (status, out.startswith("there is nothing at"), err) == (0, True, "")
    interrupted(src, tmp_path / "out", 5, layout=SMALL)
    before = contents(tmp_path / "out")
    status, _, err = run(capsys, "rm-incomplete", tmp_path / "out")
    assert (status, "--yes" in err) == (2, True)
    assert contents(tmp_path / "out") == before


def test_unfinished_uploads_are_removed(src, moto):
    options, url = moto.storage_options, moto.url()
    interrupted(src, url, 5, layout=SMALL, storage_options=options)
    bucket, _, key = url.removeprefix("s3://").partition("/")
    with closing(moto.client()) as client:
        client.create_multipart_upload(Bucket=bucket, Key=f"{key}/y/c/9/0")
    store = open_store(url, options)
    found = find_incomplete(store)
    assert found.kind == "unfinished"
    assert found.bytes == sum(info.size for info in store.list()) > 10_000
    assert remove_incomplete(store, found) == 1
    assert list(store.list()) == []
    assert store.remove_leftovers() == 0
