"""Conversions: what goes in comes out, on every store; and what happens to one that does not end."""

import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from conversions import SMALL, call_at, contents, interrupted, write_photos

import streamloader as sl
from streamloader.conversion import job as jobs
from streamloader.errors import DestinationError, IncompleteError, SourceChangedError, SourceError
from streamloader.storage import open_store


@pytest.fixture
def photos(tmp_path):
    """48 images in three classes."""
    return write_photos(tmp_path / "photos", {"ant": 16, "bee": 16, "cat": 16}, lambda i: (8 + i, 9), "{:02}.png")


@pytest.fixture
def expected(photos, tmp_path):
    """The files of a conversion that nothing disturbed."""
    sl.convert(photos, tmp_path / "expected", layout=SMALL, workers=0)
    return contents(tmp_path / "expected")


def columns_of(src):
    paths = sorted(src.glob("*/*.png"))
    classes = sorted(path.name for path in src.iterdir())
    return [path.read_bytes() for path in paths], [classes.index(path.parent.name) for path in paths]


@pytest.mark.quick(2)
def test_images_come_back_byte_for_byte_on_every_store(photos, store_url):
    url, options = store_url
    report = sl.convert(photos, url, layout=replace(SMALL, shard_size=8192), workers=0, storage_options=options)
    ds = sl.open(url, storage_options=options)
    images, labels = columns_of(photos)
    assert ds.read("image", 0, 48) == images
    assert ds.read("label", 0, 48).tolist() == labels
    assert report.manifests[""].digest == ds.digest
    assert report.num_samples == len(ds) == 48
    assert report.shards == 3
    assert ds.manifest.provenance["classes"] == {"label": ["ant", "bee", "cat"]}
    left = {info.path for info in open_store(url, options).list() if "_streamloader/" in info.path}
    assert all("/c/" in path or path.endswith("zarr.json") for path in left), left


@pytest.mark.long
def test_bytes_do_not_depend_on_workers(photos, tmp_path):
    for workers in (0, None):
        sl.convert(
            photos, tmp_path / str(workers), split={"a": 0.5, "b": 0.5}, shuffle=3, layout=SMALL, workers=workers
        )
    assert contents(tmp_path / "0") == contents(tmp_path / "None")


@pytest.mark.quick(1)
@pytest.mark.parametrize("split", [None, "train=0.75,val=0.25"])
@pytest.mark.parametrize("shards", [0, 1, 5])
def test_an_interrupted_conversion_is_resumed_to_the_same_bytes(shards, split, photos, tmp_path):
    whole = sl.convert(photos, tmp_path / "whole", split=split, layout=SMALL, workers=0)
    interrupted(photos, tmp_path / "out", shards, split=split)
    with pytest.raises(IncompleteError, match=f"has {shards} of {whole.shards} shards; run the same"):
        sl.open(tmp_path / "out", split=split and "train")
    report = sl.convert(photos, tmp_path / "out", split=split, layout=SMALL, workers=0)
    assert (report.shards, report.shards_kept) == (whole.shards, shards)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("overwrite", [False, True])
def test_finished_shards_are_not_written_again(overwrite, photos, tmp_path):
    interrupted(photos, tmp_path / "out", 4)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "image").rglob("*") if path.is_file()}
    assert len(before) == 4
    report = sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0, overwrite=overwrite)
    assert report.shards_kept == 4
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("damage", ["deleted", "cut", "receipt"])
def test_a_shard_unlike_its_receipt_is_written_again(damage, photos, tmp_path, expected):
    interrupted(photos, tmp_path / "out", 3)
    shard = tmp_path / "out" / "image" / "c" / "1"
    if damage == "deleted":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (tmp_path / "out" / "_streamloader" / "receipts" / "1.json").write_text("{")
    report = sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert report.shards_kept == 2
    assert contents(tmp_path / "out") == expected


@pytest.mark.quick(1)
@pytest.mark.parametrize("split", [None, "train=0.75,val=0.25"])
def test_a_conversion_killed_in_its_last_steps_is_resumed(split, photos, tmp_path):
    out = tmp_path / "out"
    sl.convert(photos, tmp_path / "whole", split=split, layout=SMALL, workers=0)
    interrupted(photos, out, 0, "finish", split=split)
    before = contents(out)
    receipts = sum("/receipts/" in path for path in before)
    steps = ["before the root", "before the job file goes"]
    if split:
        shutil.copytree(out / "val", tmp_path / "val")
        steps += ["after the splits", "between the splits"]
    for killed in steps:
        if killed != "before the root":
            (out / "_streamloader" / "job.json").write_bytes(before["_streamloader/job.json"])
        if killed in ("after the splits", "between the splits"):
            (out / "zarr.json").unlink()
        if killed == "between the splits":
            shutil.rmtree(out / "val")
            shutil.move(tmp_path / "val", out / "val")
            for path in before:  # of the split that was published, and whose temporary objects are still there
                if path.startswith("train/_streamloader/") and not (out / path).exists():
                    (out / path).parent.mkdir(parents=True, exist_ok=True)
                    (out / path).write_bytes(before[path])
        report = sl.convert(photos, out, split=split, layout=SMALL, workers=0)
        assert report.shards_kept == receipts, killed
        assert contents(out) == contents(tmp_path / "whole"), killed


def test_half_written_files_of_a_kill_are_removed(photos, tmp_path):
    interrupted(photos, tmp_path / "out", 2)
    (tmp_path / "out" / "image" / "c" / ".0123.streamloader-tmp").write_bytes(b"half")
    sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert not list((tmp_path / "out").rglob(".*"))


def touch(photos):
    path = photos / "bee" / "03.png"
    path.write_bytes(path.read_bytes())


CHANGES = {
    "new": (lambda root: shutil.copy(root / "ant" / "00.png", root / "ant" / "zz.png"), "ant/zz.png is new"),
    "gone": (lambda root: (root / "cat" / "05.png").unlink(), "cat/05.png is gone"),
    "size": (lambda root: shutil.copy(root / "ant" / "09.png", root / "bee" / "01.png"), r"bee/01.png had \d+ bytes"),
    "touched": (touch, "bee/03.png was written again"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("change", "finishing"), [*((one, False) for one in CHANGES), ("gone", True), ("size", True), ("touched", True)]
)
def test_a_changed_source_is_named(change, finishing, photos, tmp_path):
    """It changes after an interruption, or while it is converted."""
    apply, message = CHANGES[change]
    if not finishing:
        interrupted(photos, tmp_path / "out", 2)
        apply(photos)
    with pytest.raises(SourceChangedError, match=f"while it was converted: {message}" if finishing else message):
        listener = call_at(0, lambda: apply(photos), "finish") if finishing else None
        sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0, progress=listener)
    with pytest.raises(IncompleteError):
        sl.open(tmp_path / "out")
    sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0, overwrite=True)
    assert sl.open(tmp_path / "out").read("image", 0, 3) == columns_of(photos)[0][:3]


@pytest.mark.parametrize("damage", [{"options": [1]}, {"options": None}, {"plans": 7}, {"source": "x"}])
def test_a_damaged_job_file_is_another_job(damage, photos, tmp_path):
    interrupted(photos, tmp_path / "out", 2)
    write_document(tmp_path / "out", document(tmp_path / "out") | damage)
    with pytest.raises((DestinationError, SourceChangedError)):
        sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0)


def test_a_finished_dataset_is_replaced_by_overwrite_only(photos, tmp_path, expected):
    out = tmp_path / "out"
    sl.convert(photos, out, layout=SMALL, workers=0, split="train=0.5,val=0.5")
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(DestinationError, match="holds a dataset"):
        sl.convert(photos, out, layout=SMALL, workers=0)
    assert contents(out) == before
    sl.convert(photos, out, layout=SMALL, workers=0, overwrite=True)
    assert contents(out) == expected | {"notes.txt": b"mine"}


def test_a_destination_with_other_objects_is_left_alone(photos, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(DestinationError, match=r"is not empty: it has thesis.txt"):
        sl.convert(photos, tmp_path / "out", workers=0)
    (tmp_path / "out" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    for overwrite in (False, True):
        with pytest.raises(DestinationError, match="Zarr data that streamloader did not write"):
            sl.convert(photos, tmp_path / "out", workers=0, overwrite=overwrite)
    with pytest.raises(DestinationError, match="is inside the source"):
        sl.convert(photos, photos / "out", workers=0)


def test_a_bad_sample_loses_nothing_that_was_finished_and_leaves_the_source_alone(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "PROBE_BYTES", 1)  # else so small a source is read whole for choosing codecs
    (photos / "cat" / "14.png").write_bytes(b"no image")
    before = contents(photos)
    with pytest.raises(SourceError, match=r"cat/14\.png: the image cannot be decoded"):
        sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert contents(photos) == before
    assert len(list((tmp_path / "out" / "_streamloader" / "receipts").iterdir())) == 5


# --- two runs at once


def document(out):
    return json.loads((out / "_streamloader" / "job.json").read_text())


def write_document(out, job):
    (out / "_streamloader" / "job.json").write_text(json.dumps(job, sort_keys=True, indent=1))


def take_over(out):
    """Make the run at `out` look like one of another machine, which cannot be seen from here."""
    job = document(out)
    write_document(out, {**job, "run": {**job["run"], "id": "elsewhere"}})


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"overwrite": True, "split": "a=0.5,b=0.5"}])
def test_a_second_run_at_one_destination_fails_while_the_first_is_alive(options, photos, tmp_path, expected):
    out = tmp_path / "out"

    def again():
        with pytest.raises(DestinationError, match=r"is being written by another run, process \d+ of this machine"):
            sl.convert(photos, out, layout=SMALL, workers=0, **options)
        with pytest.raises(DestinationError, match="is being written by another run"):
            sl.Writer(out, {"x": "int64"}, overwrite=True)

    for phase in ("write", "finish"):
        sl.convert(photos, out, layout=SMALL, workers=0, overwrite=True, progress=call_at(0, again, phase))
        assert contents(out) == expected


@pytest.mark.quick(1)
@pytest.mark.parametrize("phase", ["write", "finish"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True, "split": "a=0.5,b=0.5"}])
def test_a_run_that_another_machine_takes_over_stops_and_changes_nothing(options, phase, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "CLAIM_SECONDS", 0.0)
    sl.convert(photos, tmp_path / "whole", layout=SMALL, workers=0, **options)
    out = tmp_path / "out"

    def elsewhere():
        take_over(out)
        if phase == "write":
            interrupted(photos, out, 1, **options)
        else:
            sl.convert(photos, out, layout=SMALL, workers=0, **options)

    with pytest.raises(DestinationError, match=r"another run writes to .* now.*this one stops"):
        listener = call_at(3 if phase == "write" else 0, elsewhere, phase)
        sl.convert(photos, out, layout=SMALL, workers=0, overwrite=True, progress=listener)
    report = sl.convert(photos, out, layout=SMALL, workers=0, resume=True, **{**options, "overwrite": False})
    assert report.shards_kept >= 1
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("close", [True, False])
def test_a_writer_that_another_machine_takes_over_from_removes_nothing_of_the_other_s(close, tmp_path):
    out = tmp_path / "out"
    first = sl.Writer(out, {"x": "int64"})
    first.write({"x": 1})
    take_over(out)
    with sl.Writer(out, {"x": "int64"}, overwrite=True) as second:
        second.write({"x": 2})
        if close:
            with pytest.raises(DestinationError, match="another run writes to"):
                first.close()
        else:
            first.abort()
    assert sl.open(out).read("x", 0, 1).tolist() == [2]


def test_two_runs_that_begin_together_leave_one_complete_dataset(photos, tmp_path, expected):
    for overwrite in (False, True, True):
        gate = threading.Barrier(2)

        def work(overwrite=overwrite, gate=gate):
            gate.wait(300)
            try:
                sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0, overwrite=overwrite)
            except DestinationError as error:
                return error.problem
            return "complete"

        with ThreadPoolExecutor(2) as pool:
            ended = [one.result() for one in [pool.submit(work), pool.submit(work)]]
        assert "complete" in ended, ended
        assert all(re.search("complete|another run|holds a dataset|unfinished", one) for one in ended), ended
        assert contents(tmp_path / "out") == expected


def test_a_run_that_begins_just_before_another_names_it(photos, tmp_path, monkeypatch):
    def begins(*_, **__):
        monkeypatch.undo()
        interrupted(photos, tmp_path / "out", 1)

    monkeypatch.setattr(jobs.publish, "check_free", begins)
    report = sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert report.shards_kept == 1, "it is resumed, not mistaken for other objects"


def test_a_run_that_ends_just_before_it_would_be_resumed_is_named(photos, tmp_path, monkeypatch, expected):
    def ends(*_):
        monkeypatch.undo()
        sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0)

    interrupted(photos, tmp_path / "out", 1)
    monkeypatch.setattr(jobs.publish, "check_not_running", ends)
    with pytest.raises(DestinationError, match="another run has ended what is resumed"):
        sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert contents(tmp_path / "out") == expected


def test_receipts_of_another_job_are_never_taken(photos, tmp_path, expected):
    interrupted(photos, tmp_path / "out", 4)
    receipts = tmp_path / "out" / "_streamloader" / "receipts"
    for shard, other in ((0, {"job": "another"}), (1, {})):  # those of earlier versions name none
        kept = json.loads((receipts / f"{shard}.json").read_text())
        del kept["job"]
        (receipts / f"{shard}.json").write_text(json.dumps(kept | other))
    assert sl.convert(photos, tmp_path / "out", layout=SMALL, workers=0).shards_kept == 2
    assert contents(tmp_path / "out") == expected
