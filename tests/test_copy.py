"""`sl.copy` and `streamloader cp`: the same bytes at another store, or nothing that opens; and `streamloader ls`."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from added import FIELDS, SMALL, base_columns, given_columns, written
from amounts import longer
from commands import run
from conversions import Stop, contents, dying, meanwhile
from folder_server import folder_server
from zarr_stores import PLAIN, url_of

import streamloader as sl
from streamloader import errors
from streamloader.format import opening
from streamloader.maintenance.cleanup import find_incomplete
from streamloader.maintenance.copy import _earlier, copy
from streamloader.maintenance.listing import list_datasets
from streamloader.storage import open_store
from streamloader.storage.objects import TEMPORARY_SUFFIX
from streamloader.testing import Fault, FaultProxy

GOLDEN = Path(__file__).parent.parent / "formats/streamloader/v1/golden"
BAD = GOLDEN.with_name("bad")
NOTES = ("parts/", "receipts/", "quarantine", "conversion.json")  # what conversions leave, and a copy does not have


def plain(folder):
    written(folder, FIELDS, base_columns(0, 50))


def splits(folder):
    folder.parent.mkdir(parents=True, exist_ok=True)
    np.save(folder.with_suffix(".npy"), np.arange(90_000).reshape(300, 300))
    sl.convert(folder.with_suffix(".npy"), folder, workers=0, layout=SMALL, split="train=0.8,val=0.2")


def empty(folder):
    written(folder, FIELDS, base_columns(0, 0))


def more(folder, start, stop):
    """Append samples."""
    part = folder.with_name(f"{folder.name}-{start}")
    sl.export(written(part, FIELDS, base_columns(start, stop)), f"{part}.out", format="parquet")
    sl.append(folder, f"{part}.out", workers=0)


def versions(folder):
    """Stale chunks of two appends, deleted samples, added fields, and statistics."""
    written(folder, FIELDS, base_columns(0, 5))
    more(folder, 5, 7)
    more(folder, 7, 50)
    sl.delete(folder, where="n in (3, 20)")
    sl.add_columns(folder, given_columns(48), workers=0)
    (folder / "_streamloader" / "statistics.json").write_text(json.dumps({"statistics": {}}))


def erased(folder):
    plain(folder)
    sl.delete(folder, where="n in (3, 20)", erase=True)


def arrays(folder):
    sl.convert(url_of(PLAIN[0]), folder, rechunk="t2m,z@500", workers=0)


MADE = [plain, splits, empty, versions, erased, arrays]


@pytest.fixture(params=MADE, ids=lambda make: make.__name__)
def data(request, tmp_path):
    """A dataset of each kind."""
    request.param(tmp_path / "data")
    return tmp_path / "data"


def objects(folder):
    """The objects of a dataset."""
    paths = contents(folder).items()
    return {path: found for path, found in paths if not path.rpartition("_streamloader/")[2].startswith(NOTES)}


def test_a_copy_has_the_same_bytes_and_every_version_opens(data, tmp_path):
    report = copy(data, tmp_path / "out")
    assert contents(tmp_path / "out") == objects(data)
    assert (report.objects, report.bytes) == (len(objects(data)), sum(map(len, objects(data).values())))
    assert sl.verify(tmp_path / "out").ok
    for split in [each or None for each in report.samples]:
        logs = [sl.log(each, split=split) for each in (data, tmp_path / "out")]
        assert [version.to_dict() | {"published": 0} for version in logs[0]] == [
            version.to_dict() | {"published": 0} for version in logs[1]
        ]
    again = copy(data, tmp_path / "out")
    assert (again.objects, again.digests) == (0, report.digests), "it is there already"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if (path / "zarr.json").exists()))
def test_golden_datasets_of_every_version_are_copied(name, tmp_path):
    copy(GOLDEN / name, tmp_path / "out")
    assert contents(tmp_path / "out") == objects(GOLDEN / name)


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [splits, versions, arrays], ids=lambda make: make.__name__)
def test_to_a_bucket_and_back(make, moto, tmp_path):
    make(tmp_path / "data")
    url, options = moto.url("copied"), moto.storage_options
    report = copy(tmp_path / "data", url, target_options=options)
    assert report.digests == copy(url, tmp_path / "back", storage_options=options).digests
    assert contents(tmp_path / "back") == objects(tmp_path / "data")
    assert copy(url, moto.url("other"), storage_options=options).objects == report.objects, "options for both"


@pytest.mark.quick(2)
def test_a_plain_web_server_that_lists_nothing_is_a_source(data, tmp_path):
    with folder_server(data.parent) as server:
        copy(f"{server.url}/data", tmp_path / "out")
    assert contents(tmp_path / "out") == objects(data)


def test_shards_of_several_pieces_are_copied_and_those_that_are_cut_off_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("streamloader.maintenance.copy.PIECE_BYTES", 100)
    plain(tmp_path / "data")
    copy(tmp_path / "data", tmp_path / "out")
    assert contents(tmp_path / "out") == objects(tmp_path / "data")
    shard = tmp_path / "data/x/c/1/0"
    for size in (468, 300, 99, 0):
        shard.write_bytes(shard.read_bytes()[:size])
        with pytest.raises(errors.CorruptError, match=f"/x/c/1/0 has {size} bytes, its chunks and index have"):
            copy(tmp_path / "data", tmp_path / f"out{size}")
        never_opens(tmp_path / f"out{size}")


# --- damage


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", sorted(path.name for path in BAD.iterdir() if path.is_dir()))
def test_a_dataset_that_readers_refuse_is_an_error_or_stays_what_it_is(name, tmp_path):
    """Some are bad for other reasons than their bytes; what follows from the manifest is repaired."""
    try:
        copy(BAD / name, tmp_path / "out")
    except errors.StreamloaderError:
        with pytest.raises(errors.StreamloaderError):
            sl.open(tmp_path / "out")
    else:
        assert sl.open(tmp_path / "out").manifest == sl.open(BAD / name).manifest


def test_a_manifest_of_another_dataset_is_no_earlier_version(tmp_path):
    versions(tmp_path / "data")
    written(tmp_path / "huge", {"n": "int64"}, {"n": np.arange(10_000)})
    manifest = sl.open(tmp_path / "huge").manifest.to_json()
    (tmp_path / "data/_streamloader/chunks/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(errors.FormatError, match="is not of an earlier version"):
        copy(tmp_path / "data", tmp_path / "out")


def test_versions_that_nobody_kept_are_not_looked_for_one_by_one(tmp_path):
    plain(tmp_path / "data")
    opened = opening.open_root(open_store(tmp_path / "data"))
    later = opened._replace(manifest=replace(opened.manifest, generation=1 << 60))
    assert _earlier(later) == []


def test_bits_that_flip_on_the_way_are_read_again(moto, tmp_path):
    versions(tmp_path / "data")
    url, options = moto.url("flipped"), moto.storage_options
    copy(tmp_path / "data", url, target_options=options)
    flips = [Fault("flip", first=1, path=r"/(c|deleted|statistics|manifest)", method="GET")]
    with FaultProxy(moto.endpoint, flips) as proxy:
        copy(url, tmp_path / "back", storage_options={**options, "endpoint_url": proxy.endpoint})
        assert proxy.counts["flip"] > 20
    assert contents(tmp_path / "back") == objects(tmp_path / "data")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def never_opens(folder):
    with pytest.raises(errors.IncompleteError, match="run the same cp command again"):
        sl.open(folder)


DAMAGED = {
    "a chunk": (plain, "x/c/1/0", "the chunk at byte 0 of .*/x/c/1/0 is damaged: its crc32c"),
    "a chunk that only an earlier version reads": (versions, "t/c/0", "the chunk at byte 0 of .*/t/c/0 is damaged"),
    "the chunk table": (plain, "_streamloader/chunks/x/c/0/0/0", "chunk table"),
    "the table of lengths": (plain, "_streamloader/lengths/t/c/1", "table of lengths"),
    "the list of deleted samples": (versions, "_streamloader/deleted.4", "deleted"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_source_is_an_error_and_nothing_opens(case, tmp_path):
    make, path, message = DAMAGED[case]
    make(tmp_path / "data")
    flip(tmp_path / "data" / path, 10)
    with pytest.raises(errors.FormatError, match=message):
        copy(tmp_path / "data", tmp_path / "out")
    never_opens(tmp_path / "out")
    (tmp_path / "data" / path).unlink()
    with pytest.raises(errors.FormatError, match="is missing"):
        copy(tmp_path / "data", tmp_path / "out")
    never_opens(tmp_path / "out")


def test_damaged_indexes_and_documents_follow_from_the_manifest(tmp_path):
    plain(tmp_path / "data")
    before = objects(tmp_path / "data")
    flip(tmp_path / "data/x/c/0/0", -1)
    (tmp_path / "data/x/zarr.json").write_text("{}")
    copy(tmp_path / "data", tmp_path / "out")
    assert contents(tmp_path / "out") == before


# --- kills


@pytest.mark.parametrize("step", [19, longer(1)])
def test_a_copy_that_dies_at_any_change_never_opens_and_is_resumed(step, tmp_path, monkeypatch):
    versions(tmp_path / "data")
    monkeypatch.setattr("streamloader.maintenance.copy.THREADS", 1)
    for changes in range(0, 200, step):
        out, ended = tmp_path / f"out{changes}", False
        with monkeypatch.context() as patch, suppress(Stop):
            dying(patch, changes)
            copy(tmp_path / "data", out)
            ended = True
        if not ended and not (out / "zarr.json").exists() and changes:
            never_opens(out)
        report = copy(tmp_path / "data", out)
        assert contents(out) == objects(tmp_path / "data")
        if ended:
            assert changes > 60
            return
        assert report.kept_objects >= max(0, changes - 4) or not report.objects
    raise AssertionError("more than 200 changes")


SLOW = """
import sys, time
from pathlib import Path
import streamloader.maintenance.copy as copies
copies.RECEIPT_SHARDS = 4
def hold(progress):
    if progress.done > 60_000:
        print(progress.done, flush=True)
        time.sleep(300)
copies.copy(*sys.argv[1:3], target_options=eval(sys.argv[3]), progress=hold)
"""


def test_a_killed_process_leaves_nothing_that_opens_and_the_same_command_resumes(moto, tmp_path, capsys):
    splits(tmp_path / "data")
    url, options = moto.url("killed"), moto.storage_options
    command = [sys.executable, "-c", SLOW, str(tmp_path / "data"), url, repr(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline(), "it has copied some"
        with pytest.raises(errors.DestinationError, match="is being written by another run"):
            copy(tmp_path / "data", url, target_options=options)
        process.kill()
    with pytest.raises(errors.IncompleteError):
        sl.open(url, split="train", storage_options=options)
    given = [f"--target-option={name}={json.dumps(value)}" for name, value in options.items()]
    with FaultProxy(moto.endpoint) as proxy:
        given.append(f"--target-option=endpoint_url={proxy.endpoint}")
        status, out, err = run(capsys, "cp", tmp_path / "data", url, *given, "--json")
    assert status == 0, err
    report = json.loads(out)
    assert report["kept_objects"] > 4 and report["kept_bytes"] > 20_000
    assert "kept from before" in err
    assert sl.verify(url, storage_options=options).ok
    assert report["objects"] + report["kept_objects"] == len(objects(tmp_path / "data"))


def interrupted_copy(folder, monkeypatch):
    """Copy all but some objects; return the paths of the shards that are there."""
    with monkeypatch.context() as patch, suppress(Stop):
        patch.setattr("streamloader.maintenance.copy.THREADS", 1)
        dying(patch, len(objects(folder / "data")) - 10)
        copy(folder / "data", folder / "out")
    return [path for path in (folder / "out").glob("*/c/**/*") if path.is_file() and "_streamloader" not in path.parts]


def stop(*_, **__):
    raise Stop


@pytest.mark.parametrize("last", ["_Copy._publish", "publish.clean"])  # before, and after the root document is written
def test_parts_of_files_and_uploads_of_a_killed_copy_are_removed(last, moto, tmp_path, monkeypatch):
    plain(tmp_path / "data")
    url, client = moto.url("leftovers"), moto.client()
    bucket, _, key = url.removeprefix("s3://").partition("/")
    for target, options in ((tmp_path / "out", {}), (url, moto.storage_options)):
        with monkeypatch.context() as patch, suppress(Stop):
            patch.setattr(f"streamloader.maintenance.copy.{last}", stop)
            copy(tmp_path / "data", target, target_options=options)
    (tmp_path / "out" / f".part{TEMPORARY_SUFFIX}").write_bytes(b"part")
    client.create_multipart_upload(Bucket=bucket, Key=f"{key}/part")
    copy(tmp_path / "data", tmp_path / "out")
    copy(tmp_path / "data", url, target_options=moto.storage_options)
    assert contents(tmp_path / "out") == objects(tmp_path / "data")
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket, Prefix=f"{key}/")
    client.close()


def test_what_was_damaged_at_the_destination_meanwhile_is_copied_again(tmp_path, monkeypatch):
    versions(tmp_path / "data")
    shards = interrupted_copy(tmp_path, monkeypatch)
    assert shards
    flip(shards[0], 5)
    flip(tmp_path / "out/x/zarr.json", 5)
    copy(tmp_path / "data", tmp_path / "out")
    assert contents(tmp_path / "out") == objects(tmp_path / "data")


def test_a_resumed_copy_has_no_objects_of_versions_that_were_erased_meanwhile(tmp_path, monkeypatch):
    versions(tmp_path / "data")
    assert interrupted_copy(tmp_path, monkeypatch)
    (tmp_path / "out/note").write_text("mine")
    sl.delete(tmp_path / "data", where="n in (10, 11)", erase=True)
    copy(tmp_path / "data", tmp_path / "out")
    assert contents(tmp_path / "out") == {**objects(tmp_path / "data"), "note": b"mine"}
    assert sl.verify(tmp_path / "out").ok


def test_what_is_left_is_removed_and_nothing_else(tmp_path, monkeypatch, capsys):
    versions(tmp_path / "data")
    with monkeypatch.context() as patch, suppress(Stop):
        dying(patch, 50)
        copy(tmp_path / "data", tmp_path / "out")
    (tmp_path / "out" / "note").write_text("mine")
    with pytest.raises(errors.DestinationError, match="unfinished"):
        sl.convert(np.arange(4), tmp_path / "out", workers=0)
    found = find_incomplete(open_store(tmp_path / "out"))
    assert found.kind == "unfinished" and "the copy to" in found.message
    assert run(capsys, "rm-incomplete", tmp_path / "out", "--yes")[0] == 0
    assert contents(tmp_path / "out") == {"note": b"mine"}


MEMORY = """
import resource, sys
import streamloader.maintenance.copy as copies
copies.MEMORY = 16 << 20
copies.copy(sys.argv[1], sys.argv[3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
copies.copy(sys.argv[2], sys.argv[4])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_dataset(tmp_path):
    layout = sl.Layout(shard_size=4 << 20, codec="none")
    for name, count in (("small", 64), ("large", 4096)):
        with sl.Writer(tmp_path / name, {"x": "uint8[65536]"}, layout=layout, workers=1) as out:
            for _ in range(count // 64):
                out.write_batch({"x": np.ones((64, 65536), np.uint8)})
    command = [sys.executable, "-c", MEMORY, *(tmp_path / name for name in ("small", "large", "a", "b"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64, "MiB, for 256 MiB"


# --- changes of the source meanwhile


def test_an_append_meanwhile_does_not_change_the_copy(tmp_path):
    plain(tmp_path / "data")
    before = objects(tmp_path / "data")
    copy(tmp_path / "data", tmp_path / "out", progress=meanwhile("copy", lambda: more(tmp_path / "data", 50, 90)))
    same = {path for path, data in contents(tmp_path / "out").items() if before[path] != data}
    assert same <= {f"_streamloader/lengths/t/c/{shard}" for shard in range(9)}, "readers use the first lengths"
    assert sl.verify(tmp_path / "out").ok
    assert len(sl.open(tmp_path / "out")) == 50
    assert len(sl.open(tmp_path / "data")) == 90


def test_samples_that_are_erased_meanwhile_end_the_copy_and_the_next_one_lacks_them(tmp_path):
    plain(tmp_path / "data")

    def erase():
        sl.delete(tmp_path / "data", where="n >= 0 and n < 49", erase=True)

    with pytest.raises(errors.SourceChangedError, match=r"was changed while it was copied.*run the same"):
        copy(tmp_path / "data", tmp_path / "out", progress=meanwhile("copy", erase))
    copy(tmp_path / "data", tmp_path / "out")
    assert contents(tmp_path / "out") == objects(tmp_path / "data")


def test_a_resumed_copy_is_of_the_version_that_is_there_then(tmp_path, monkeypatch):
    plain(tmp_path / "data")
    with monkeypatch.context() as patch, suppress(Stop):
        dying(patch, 12)
        copy(tmp_path / "data", tmp_path / "out")
    more(tmp_path / "data", 50, 60)
    assert copy(tmp_path / "data", tmp_path / "out").kept_objects
    assert contents(tmp_path / "out") == objects(tmp_path / "data")


# --- what is not overwritten


def other_dataset(out):
    written(out, {"n": "int64"}, {"n": np.arange(3)})


def earlier_version(out):
    shutil.copytree(out.with_name("data"), out)
    more(out.with_name("data"), 50, 51)


def something(out):
    out.mkdir()
    (out / "note").write_text("mine")


def zarr_of_others(out):
    zarr.save_array(out, np.arange(3))


def open_writer(out):
    sl.Writer(out, {"n": "int64"})


def copy_of_another(out):
    other_dataset(out.with_name("other"))
    copy(out.with_name("other"), out)
    (out / "zarr.json").unlink()
    (out / "_streamloader/job.json").write_text(json.dumps({"by": "copy", "fields": ["n"], "digests": {"": "1"}}))


THERE = {
    other_dataset: "holds another dataset, or another version: its digest is",
    earlier_version: "holds another dataset, or another version: its digest is",
    something: "is not empty: it has note",
    zarr_of_others: "holds Zarr data that streamloader did not write",
    open_writer: "holds another unfinished dataset",
    copy_of_another: "holds another unfinished dataset",
}


@pytest.mark.parametrize("make", THERE, ids=lambda make: make.__name__)
def test_what_is_there_is_not_overwritten(make, tmp_path):
    plain(tmp_path / "data")
    make(tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(errors.DestinationError, match=THERE[make]):
        copy(tmp_path / "data", tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_copy_into_the_dataset_itself_is_refused_and_onto_itself_nothing_is_done(tmp_path):
    plain(tmp_path / "data")
    with pytest.raises(errors.DestinationError, match="is inside the dataset"):
        copy(tmp_path / "data", tmp_path / "data" / "copy")
    assert copy(tmp_path / "data", tmp_path / "data").objects == 0


@pytest.mark.parametrize("name", ["link", "file://"])
def test_a_copy_into_the_dataset_by_another_name_is_refused(name, tmp_path):
    plain(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data", target_is_directory=True)
    before, inside = contents(tmp_path / "data"), tmp_path / "data" / "_streamloader" / "copy"
    target = f"file://{inside}" if name == "file://" else tmp_path / name / "copy"
    with pytest.raises(errors.DestinationError, match="is inside the dataset"):
        copy(tmp_path / "data", target)
    with pytest.raises(errors.DestinationError, match="is inside the dataset"):
        copy(tmp_path / "link", inside)
    assert contents(tmp_path / "data") == before


def test_no_dataset_is_the_error_of_open(tmp_path):
    with pytest.raises(errors.NotADatasetError, match="there is no dataset at"):
        copy(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- ls


def test_ls_shows_datasets_unfinished_ones_and_zarr_of_others(tmp_path, capsys):
    splits(tmp_path / "deep/er/data")
    plain(tmp_path / "plain")
    versions(tmp_path / "v/versions")
    sl.Writer(tmp_path / "left", {"n": "int64"})
    zarr.save_array(tmp_path / "zarr3", np.arange(3))
    zarr.open_group(tmp_path / "v/zarr2", mode="w", zarr_format=2).create_array("a", data=np.arange(3))
    shutil.copytree(tmp_path / "plain", tmp_path / "damaged")
    (tmp_path / "damaged/zarr.json").write_text("{")
    shutil.copytree(tmp_path / "plain", tmp_path / "later")
    document = json.loads((tmp_path / "later/zarr.json").read_text())
    document["attributes"]["streamloader"]["version"] = 99
    (tmp_path / "later/zarr.json").write_text(json.dumps(document))
    (tmp_path / "photos/ant").mkdir(parents=True)
    (tmp_path / "photos/ant/1.png").touch()
    found = {each.path: each for each in list_datasets(tmp_path)}
    kinds = {path: each.kind for path, each in found.items() if not path.startswith("v/versions-")}
    assert kinds == {
        **{"deep/er/data": "dataset", "plain": "dataset", "v/versions": "dataset", "left": "unfinished"},
        **{"zarr3": "zarr", "v/zarr2": "zarr", "damaged": "damaged", "later": "unsupported"},
    }
    assert (found["deep/er/data"].splits, found["deep/er/data"].num_samples) == ({"train": 240, "val": 60}, 300)
    assert (found["v/versions"].num_samples, found["v/versions"].version, found["v/zarr2"].arrays) == (48, 5, 1)
    status, shown, _ = run(capsys, "ls", tmp_path)
    assert status == 0
    for words in ("deep/er/data", "train 240, val 60", "zarr: 1 array", "unfinished: ", "damaged: ", "unsupported: "):
        assert words in shown
    assert "has format version 99" in re.sub(r"[\s│|]+", " ", shown)  # the table folds it
    status, shown, _ = run(capsys, "ls", tmp_path / "plain", "--json")
    (only,) = json.loads(shown)["datasets"]
    assert (only["path"], only["num_samples"]) == ("", 50)
    assert "there is no dataset below" in run(capsys, "ls", tmp_path / "photos")[1]


def test_ls_of_a_bucket_lists_folders_and_no_shards(moto, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((200, 300), np.float32))
    url, options = moto.url("many"), moto.storage_options
    layout = sl.Layout(samples_per_shard=2, chunk_size=1024, block_size=1024)
    sl.convert(tmp_path / "x.npy", f"{url}/a/x", layout=layout, workers=0, storage_options=options)
    assert sum(1 for _ in open_store(f"{url}/a/x", options).list()) > 100
    with FaultProxy(moto.endpoint) as proxy:
        (found,) = list_datasets(url, {**options, "endpoint_url": proxy.endpoint})
        assert (found.path, found.num_samples) == ("a/x", 200)
        assert proxy.counts["requests"] < 20
    with pytest.raises(errors.NotFoundError):
        list_datasets("s3://streamloader-no-such-bucket", options)
