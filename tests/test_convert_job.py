"""Conversions: what goes in comes out, on every store; and what happens to one that does not end."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from streamloader import dataset
from streamloader.conversion import run, schema
from streamloader.conversion.job import convert
from streamloader.conversion.progress import Progress, Report
from streamloader.errors import (
    DestinationError,
    IncompleteError,
    SourceChangedError,
    SourceError,
    StreamloaderError,
    UsageError,
)
from streamloader.format.writer import Writer
from streamloader.options import Layout
from streamloader.storage import open_store

FORMATS = Path(__file__).parent.parent / "formats"
SMALL = Layout(shard_size=4096, block_size=1024, chunk_size=512)  # many shards of little


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """48 images in three classes."""
    rng = np.random.default_rng(0)
    root = tmp_path / "photos"
    for name in ("ant", "bee", "cat"):
        (root / name).mkdir(parents=True)
        for i in range(16):
            pixels = rng.integers(0, 256, (8 + i, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:02}.png")
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def interrupt_after(shards: int, phase: str = "write") -> Callable[[Progress], None]:
    """A listener that ends the conversion as Ctrl-C does, when so many shards are written."""
    seen = 0

    def listen(progress: Progress) -> None:
        nonlocal seen
        seen += progress.phase == phase
        if seen > shards:
            raise KeyboardInterrupt

    return listen


def begin(src: Path, dst: Path, shards: int, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(src, dst, layout=SMALL, workers=0, progress=interrupt_after(shards), **options)


def columns_of(src: Path) -> tuple[list[bytes], list[int]]:
    paths = sorted(src.glob("*/*.png"))
    classes = sorted(path.name for path in src.iterdir())
    return [path.read_bytes() for path in paths], [classes.index(path.parent.name) for path in paths]


def test_images_come_back_byte_for_byte_on_every_store(photos: Path, store_url: tuple[str, dict[str, Any]]) -> None:
    url, options = store_url
    layout = Layout(shard_size=8192, block_size=1024, chunk_size=512)
    report = convert(photos, url, layout=layout, workers=1, storage_options=options)
    ds = dataset.open(url, storage_options=options)
    images, labels = columns_of(photos)
    assert ds.read("image", 0, 48) == images
    assert ds.read("label", 0, 48).tolist() == labels
    assert report.manifests[""].digest == ds.digest
    assert report.num_samples == len(ds) == 48
    assert report.shards == 3
    assert ds.manifest.provenance["classes"] == {"label": ["ant", "bee", "cat"]}
    left = {info.path for info in open_store(url, options).list() if "_streamloader/" in info.path}
    assert all("_streamloader/chunks" in path or path.endswith("zarr.json") for path in left), left


def test_splits_come_back_whole_and_apart(photos: Path, tmp_path: Path) -> None:
    report = convert(photos, tmp_path / "out", split="train=0.75,val=0.25", layout=SMALL, workers=2)
    assert {name: manifest.num_samples for name, manifest in report.manifests.items()} == {"train": 36, "val": 12}
    images, _ = columns_of(photos)
    numbers: list[int] = []
    for name, count in (("train", 36), ("val", 12)):
        ds = dataset.open(tmp_path / "out", split=name)
        found = [images.index(image) for image in ds.read("image", 0, count)]
        assert found == sorted(found), "the source's order is kept within a split"
        assert len(set(ds.read("label", 0, count).tolist())) == 3, "a split must not lack a class"
        numbers += found
    assert sorted(numbers) == list(range(48))


@pytest.mark.parametrize("src", ["webdataset/input", "npy/input/folder", "npy/input/stored.npz", "imagefolder/input"])
def test_a_converted_format_holds_what_it_says(src: str, tmp_path: Path) -> None:
    from test_convert_sources import plain

    convert(FORMATS / src, tmp_path / "out", workers=0)
    ds = dataset.open(tmp_path / "out")
    expected = json.loads((FORMATS / src.split("/", maxsplit=1)[0] / "expected.json").read_text())
    assert {name: str(field) for name, field in ds.fields.items()} == expected["fields"]
    assert [{name: plain(value) for name, value in ds[i].items()} for i in range(len(ds))] == expected["samples"]


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_single_sources_become_datasets(rows: int, tmp_path: Path) -> None:
    np.savez(tmp_path / "it.npz", x=np.arange(rows, dtype=np.int32), y=np.ones((rows, 500)))
    convert(tmp_path / "it.npz", tmp_path / "out", workers=0)
    ds = dataset.open(tmp_path / "out")
    assert len(ds) == rows
    assert ds.read("y", 0, rows).shape == (rows, 500)


def test_a_large_array_in_many_shards_comes_back(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((3000, 200), np.float32)
    np.save(tmp_path / "it.npy", array)
    report = convert(tmp_path / "it.npy", tmp_path / "out", split="a=0.5,b=0.5", layout=Layout(shard_size=1 << 18))
    assert report.shards > 8
    found = [dataset.open(tmp_path / "out", split=name).read("it", 0, 1500) for name in "ab"]
    assert sorted(map(bytes, np.concatenate(found))) == sorted(map(bytes, array))


def test_bytes_do_not_depend_on_workers(photos: Path, tmp_path: Path) -> None:
    for workers in (0, 1, 3):
        convert(photos, tmp_path / str(workers), split={"a": 0.5, "b": 0.5}, layout=SMALL, workers=workers)
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "3")


@pytest.mark.parametrize("split", [None, "train=0.75,val=0.25"])
@pytest.mark.parametrize("shards", [0, 1, 5])
def test_an_interrupted_conversion_goes_on_to_the_same_bytes(
    shards: int, split: str | None, photos: Path, tmp_path: Path
) -> None:
    whole = convert(photos, tmp_path / "whole", split=split, layout=SMALL, workers=0)
    begin(photos, tmp_path / "out", shards, split=split)
    with pytest.raises(IncompleteError, match=f"has {shards} of {whole.shards} shards; run the same"):
        dataset.open(tmp_path / "out", split=split and "train")
    report = convert(photos, tmp_path / "out", split=split, layout=SMALL, workers=0)
    assert (report.shards, report.shards_kept) == (whole.shards, shards)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_finished_shards_are_not_written_again(photos: Path, tmp_path: Path) -> None:
    begin(photos, tmp_path / "out", 4)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "image").rglob("*") if path.is_file()}
    assert len(before) == 4
    convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("damage", ["deleted", "cut", "receipt"])
def test_a_shard_that_is_not_as_its_receipt_says_is_done_again(damage: str, photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "whole", layout=SMALL, workers=0)
    begin(photos, tmp_path / "out", 3)
    shard = tmp_path / "out" / "image" / "c" / "1"
    if damage == "deleted":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (tmp_path / "out" / "_streamloader" / "receipts" / "1.json").write_text("{")
    report = convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert report.shards_kept == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_kill_in_the_last_steps_is_healed(photos: Path, tmp_path: Path) -> None:
    split = "train=0.75,val=0.25"
    convert(photos, tmp_path / "whole", split=split, layout=SMALL, workers=0)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(photos, out, split=split, layout=SMALL, workers=0, progress=interrupt_after(0, "finish"))
    job = (out / "_streamloader" / "job.json").read_bytes()
    before = contents(out)

    def heal() -> Report:
        report = convert(photos, out, split=split, layout=SMALL, workers=0)
        assert contents(out) == contents(tmp_path / "whole")
        return report

    assert heal().shards_kept == heal_count(before)
    (out / "_streamloader" / "job.json").write_bytes(job)  # killed between the root and the job file's removal
    assert heal().shards_kept == heal_count(before)
    (out / "_streamloader" / "job.json").write_bytes(job)  # killed between the splits and the root
    (out / "zarr.json").unlink()
    heal()
    (out / "_streamloader" / "job.json").write_bytes(job)  # one split is finished, the other is not
    (out / "zarr.json").unlink()
    shutil.rmtree(out / "val")
    for path, data in before.items():
        if path.startswith("val/"):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_bytes(data)
    heal()


def heal_count(unfinished: dict[str, bytes]) -> int:
    return sum("/receipts/" in path for path in unfinished)


def test_half_written_files_of_a_kill_are_removed(photos: Path, tmp_path: Path) -> None:
    begin(photos, tmp_path / "out", 2)
    (tmp_path / "out" / "image" / "c" / ".0123.streamloader-tmp").write_bytes(b"half")
    convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert not list((tmp_path / "out").rglob(".*"))


def touch(photos: Path) -> None:
    path = photos / "bee" / "03.png"
    path.write_bytes(path.read_bytes())


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "new": (lambda root: shutil.copy(root / "ant" / "00.png", root / "ant" / "zz.png"), "ant/zz.png is new"),
    "gone": (lambda root: (root / "cat" / "05.png").unlink(), "cat/05.png is gone"),
    "size": (lambda root: shutil.copy(root / "ant" / "09.png", root / "bee" / "01.png"), r"bee/01.png had \d+ bytes"),
    "touched": (touch, "bee/03.png was written again"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_source_is_named(change: str, photos: Path, tmp_path: Path) -> None:
    begin(photos, tmp_path / "out", 2)
    CHANGES[change][0](photos)
    with pytest.raises(SourceChangedError, match=CHANGES[change][1]):
        convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    convert(photos, tmp_path / "out", layout=SMALL, workers=0, overwrite=True)
    assert dataset.open(tmp_path / "out").read("image", 0, 3) == columns_of(photos)[0][:3]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"layout": Layout(shard_size=8192, block_size=1024, chunk_size=512)},
            "shard_size is 4096 there and 8192 here",
        ),
        ({"layout": SMALL, "split": "a=0.5,b=0.5"}, "split is '' there and 'a=1/2,b=1/2' here"),
    ],
)
def test_another_job_does_not_go_on_with_this_one(options: Any, told: str, photos: Path, tmp_path: Path) -> None:
    begin(photos, tmp_path / "out", 2)
    before = contents(tmp_path / "out")
    with pytest.raises(DestinationError, match=f"{told}.*overwrite=True"):
        convert(photos, tmp_path / "out", workers=0, **options)
    assert contents(tmp_path / "out") == before
    convert(photos, tmp_path / "out", workers=0, overwrite=True, **options)
    convert(photos, tmp_path / "whole", workers=0, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_overwrite_goes_on_with_the_same_job(photos: Path, tmp_path: Path) -> None:
    begin(photos, tmp_path / "out", 3)
    assert convert(photos, tmp_path / "out", layout=SMALL, workers=0, overwrite=True).shards_kept == 3


def test_a_finished_dataset_is_replaced_by_overwrite_only(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(photos, out, layout=SMALL, workers=0, split="train=0.5,val=0.5")
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(DestinationError, match="holds a dataset"):
        convert(photos, out, layout=SMALL, workers=0)
    assert contents(out) == before
    convert(photos, out, layout=SMALL, workers=0, overwrite=True)
    convert(photos, tmp_path / "whole", layout=SMALL, workers=0)
    assert contents(out) == contents(tmp_path / "whole") | {"notes.txt": b"mine"}


def test_a_place_with_other_things_is_left_alone(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(DestinationError, match=r"is not empty \(thesis.txt is there\)"):
        convert(photos, tmp_path / "out", workers=0)
    (tmp_path / "out" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    for overwrite in (False, True):
        with pytest.raises(DestinationError, match="Zarr that streamloader did not write"):
            convert(photos, tmp_path / "out", workers=0, overwrite=overwrite)
    with pytest.raises(DestinationError, match="lies in the source"):
        convert(photos, photos / "out", workers=0)


def test_a_bad_sample_loses_nothing_that_was_finished_and_leaves_the_source_alone(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "PROBE_BYTES", 1)  # else so small a source is read whole for choosing codecs
    (photos / "cat" / "14.png").write_bytes(b"no image")
    before = contents(photos)
    with pytest.raises(SourceError, match=r"cat/14\.png: the image cannot be decoded"):
        convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert contents(photos) == before
    assert len(list((tmp_path / "out" / "_streamloader" / "receipts").iterdir())) == 5


def test_wrong_arguments_are_told_before_anything_is_written(photos: Path, tmp_path: Path) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"workers": -1}, {"split": "train=2"}, {"format": "csv"})
    for options in wrong:
        with pytest.raises(UsageError):
            convert(photos, tmp_path / "out", **options)
    with pytest.raises(StreamloaderError):
        convert(photos, "nosuch://x/y")
    assert not (tmp_path / "out").exists()


# --- two runs at once


def document(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "_streamloader" / "job.json").read_text())
    return found


def write_document(out: Path, job: dict[str, Any]) -> None:
    (out / "_streamloader" / "job.json").write_text(json.dumps(job, sort_keys=True, indent=1))


def call_at(shards: int, act: Callable[[], Any], phase: str = "write") -> Callable[[Progress], None]:
    """A listener that calls `act` once, when so many shards are written."""
    seen = 0

    def listen(progress: Progress) -> None:
        nonlocal seen
        seen += progress.phase == phase
        if seen == shards + 1:
            seen += 1
            act()

    return listen


def seize(out: Path) -> None:
    """Make the run at `out` look like one of another machine, which cannot be seen from here."""
    job = document(out)
    write_document(out, {**job, "run": {**job["run"], "id": "elsewhere"}})


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"overwrite": True, "split": "a=0.5,b=0.5"}])
def test_a_second_run_at_one_place_is_refused_while_the_first_is_alive(
    options: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    convert(photos, tmp_path / "whole", layout=SMALL, workers=0)
    out = tmp_path / "out"

    def again() -> None:
        with pytest.raises(DestinationError, match=r"is being written by another run, process \d+ of this machine"):
            convert(photos, out, layout=SMALL, workers=0, **options)
        with pytest.raises(DestinationError, match="is being written by another run"):
            Writer(out, {"x": "int64"}, overwrite=True)

    for phase in ("write", "finish"):
        convert(photos, out, layout=SMALL, workers=0, overwrite=True, progress=call_at(0, again, phase))
        assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("phase", ["write", "finish"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True, "split": "a=0.5,b=0.5"}])
def test_a_run_that_another_machine_takes_over_stops_and_leaves_the_other_s_alone(
    options: dict[str, Any], phase: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CLAIM_SECONDS", 0.0)
    convert(photos, tmp_path / "whole", layout=SMALL, workers=0, **options)
    out = tmp_path / "out"

    def elsewhere() -> None:
        seize(out)
        if phase == "write":
            with pytest.raises(KeyboardInterrupt):
                convert(photos, out, layout=SMALL, workers=0, progress=interrupt_after(1), **options)
        else:
            convert(photos, out, layout=SMALL, workers=0, **options)

    with pytest.raises(DestinationError, match=r"another run writes to .* now.*this one stops"):
        listener = call_at(3 if phase == "write" else 0, elsewhere, phase)
        convert(photos, out, layout=SMALL, workers=0, overwrite=True, progress=listener)
    report = convert(photos, out, layout=SMALL, workers=0, resume=True, **{**options, "overwrite": False})
    assert report.shards_kept >= 1
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("close", [True, False])
def test_a_writer_that_another_machine_takes_over_from_removes_nothing_of_the_other_s(
    close: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = Writer(out, {"x": "int64"})
    first.write({"x": 1})
    seize(out)
    with Writer(out, {"x": "int64"}, overwrite=True) as second:
        second.write({"x": 2})
        if close:
            with pytest.raises(DestinationError, match="another run writes to"):
                first.close()
        else:
            first.abort()
    assert dataset.open(out).read("x", 0, 1).tolist() == [2]


def test_two_runs_that_begin_at_the_same_moment_leave_one_whole_dataset(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "whole", layout=SMALL, workers=0)
    for overwrite in (False, True, True):
        gate = threading.Barrier(2)

        def work(overwrite: bool = overwrite, gate: threading.Barrier = gate) -> str:
            gate.wait(10)
            try:
                convert(photos, tmp_path / "out", layout=SMALL, workers=0, overwrite=overwrite)
            except DestinationError as error:
                return error.problem
            return "whole"

        with ThreadPoolExecutor(2) as pool:
            told = [one.result() for one in [pool.submit(work), pool.submit(work)]]
        assert "whole" in told, told
        assert all(re.search("whole|another run|holds a dataset|unfinished", one) for one in told), told
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_receipts_of_another_job_are_never_taken(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "whole", layout=SMALL, workers=0)
    begin(photos, tmp_path / "out", 4)
    receipts = tmp_path / "out" / "_streamloader" / "receipts"
    for shard, job in ((0, {"job": "another"}), (1, {})):  # those of earlier versions name none
        kept = json.loads((receipts / f"{shard}.json").read_text())
        del kept["job"]
        (receipts / f"{shard}.json").write_text(json.dumps(kept | job))
    assert convert(photos, tmp_path / "out", layout=SMALL, workers=0).shards_kept == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("change", ["gone", "size", "touched"])
def test_a_source_that_changes_while_it_is_converted_is_named(change: str, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceChangedError, match=f"while it was converted: {CHANGES[change][1]}"):
        listener = call_at(0, lambda: CHANGES[change][0](photos), "finish")
        convert(photos, tmp_path / "out", layout=SMALL, workers=0, progress=listener)
    with pytest.raises(IncompleteError):
        dataset.open(tmp_path / "out")
    convert(photos, tmp_path / "out", layout=SMALL, workers=0, overwrite=True)
    assert dataset.open(tmp_path / "out").read("image", 0, 3) == columns_of(photos)[0][:3]
