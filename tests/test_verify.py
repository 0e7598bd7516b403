"""Verification: whole datasets are, and of a damaged one exactly what is damaged is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folder_server import folder_server
from format_data import (
    columns_of,
    fields,
    geometry_of,
    memory_store,
    objects_of,
    write_dataset,
)
from golden import GOLDEN, V1
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from servers import S3Server

from streamloader import dataset, errors
from streamloader.cli.main import main
from streamloader.conversion.after.against import Against
from streamloader.conversion.after.append import append
from streamloader.conversion.after.problems import MOST, Problem
from streamloader.conversion.after.stored import bad_item
from streamloader.conversion.after.verify import Checked, VerifyReport, verify
from streamloader.conversion.job import convert
from streamloader.conversion.progress import Progress
from streamloader.format import table
from streamloader.format.codecs import pack_items, parse_items
from streamloader.format.manifest import Field, Manifest
from streamloader.format.metadata import dataset_documents, to_bytes
from streamloader.format.opening import open_manifest
from streamloader.format.shard import index_size
from streamloader.format.sink import write_split_root
from streamloader.format.table import encode_pages
from streamloader.options import Layout
from streamloader.storage import open_store
from streamloader.storage.protocol import Store

KINDS = {
    "image": Field.parse("uint8[40,33]"),
    "flag": Field.parse("bool[1100]"),  # bulk, since it is over 1 KiB
    "label": Field.parse("int64"),
    "blob": Field.parse("bytes:jpeg"),
    "words": Field.parse("text"),
    "boxes": Field.parse("ragged:float32[4]"),
}
COUNT = 150
LAYOUT = Layout(samples_per_shard=32, block_size=1 << 12, chunk_size=1 << 8)
Objects = Mapping[str, bytes]


def written(
    columns: Mapping[str, Any], kinds: Mapping[str, Field] = KINDS, layout: Layout = LAYOUT
) -> dict[str, bytes]:
    """The objects of a dataset of these columns."""
    store = memory_store()
    count = len(next(iter(columns.values())))
    write_dataset(store, columns, geometry_of(kinds, count, layout))
    return objects_of(store)


@pytest.fixture(scope="module")
def whole() -> Objects:
    return written(columns_of(KINDS, COUNT))


@pytest.fixture(scope="module")
def manifest(whole: Objects) -> Manifest:
    return open_manifest(stored(whole))[0]


def stored(objects: Objects) -> Store:
    """A store with these objects."""
    store = memory_store()
    for path, data in objects.items():
        store.put(path, data)
    return store


def check(objects: Objects, **options: Any) -> VerifyReport:
    store = stored(objects)
    try:
        return verify(store.url, **options)
    finally:
        store.delete(objects)  # each listing goes through all that is in memory


def only(report: VerifyReport) -> Problem:
    assert len(report.problems) == 1, [problem.problem for problem in report.problems]
    return report.problems[0]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def shards_of(objects: Objects, name: str) -> list[str]:
    paths = [path for path in objects if path.startswith(f"{name}/c/")]
    return sorted(paths, key=lambda path: int(path.split("/")[2]))


def samples_of(manifest: Manifest, path: str) -> tuple[int, int]:
    """The samples of a shard."""
    shard = manifest.fields[path.split("/", maxsplit=1)[0]].shard
    first = int(path.split("/")[2]) * shard
    return first, min(first + shard, manifest.num_samples)


def test_a_whole_dataset_is_whole(whole: Objects, manifest: Manifest) -> None:
    seen: list[Checked] = []
    report = check(whole, progress=seen.append)
    assert (report.whole, report.samples, report.others, report.leftovers) == (True, {"": COUNT}, 0, 0)
    assert report.objects == sum(len(shards_of(whole, name)) for name in KINDS) > 20
    assert report.bytes == sum(layout.stored for layout in manifest.fields.values())
    assert (seen[-1].done, seen[-1].total) == (report.bytes, report.bytes)
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert {layout.codec for layout in manifest.fields.values()} == {"none", "lz4", "zstd"}
    assert {layout.resident for layout in manifest.fields.values()} == {True, False}


@pytest.mark.parametrize("name", [path.name for path in GOLDEN.iterdir() if path.is_dir()])
def test_every_golden_dataset_is_whole(name: str) -> None:
    assert verify(GOLDEN / name).problems == ()


@given(data=st.data(), kinds=st.dictionaries(st.sampled_from("abcd"), fields, min_size=1, max_size=3))
@settings(max_examples=30)
def test_any_small_dataset_is_whole(data: st.DataObject, kinds: dict[str, Field]) -> None:
    count = data.draw(st.integers(0, 40))
    layout = Layout(
        samples_per_shard=data.draw(st.sampled_from([1, 4, 16])),
        block_size=data.draw(st.sampled_from([1, 256])),
        chunk_size=data.draw(st.sampled_from([1, 64])),
    )
    columns = columns_of(kinds, count, data.draw(st.integers(0, 100)))
    report = check(written(columns, kinds, layout))
    assert (report.problems, report.samples) == ((), {"": count})


BAD: dict[str, Any] = json.loads((V1 / "bad" / "expected.json").read_text())
UNFIT = {"NotADatasetError", "IncompleteError", "VersionError"}


@pytest.mark.parametrize("name", [name for name, said in BAD.items() if said["when"] != "decode"])
def test_a_bad_dataset_is_named_or_refused(name: str) -> None:
    """These are without Zarr's own documents, which is said too. That an image does not decode is not looked for."""
    said = BAD[name]
    if said["error"] in UNFIT:
        with pytest.raises(getattr(errors, said["error"])):
            verify(V1 / "bad" / name)
        return
    report = verify(V1 / "bad" / name)
    found = [one.problem for one in report.problems if "Zarr readers need it" not in one.problem]
    assert [one for one in found if "consolidated_metadata is missing" not in one], report.problems


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_of_a_shard_names_its_chunk_or_its_index(
    data: st.DataObject, whole: Objects, manifest: Manifest
) -> None:
    path = data.draw(st.sampled_from([path for name in KINDS for path in shards_of(whole, name)]))
    at = data.draw(st.integers(0, len(whole[path]) - 1))
    problem = only(check({**whole, path: flipped(whole[path], at)}))
    assert (problem.path, problem.field) == (path, path.split("/")[0])
    layout, (first, stop) = manifest.fields[problem.field], samples_of(manifest, path)
    index = np.frombuffer(whole[path][-index_size(layout.chunks_per_shard) : -4], "<u8").reshape(-1, 2)
    chunk = next((i for i, (start, size) in enumerate(index.tolist()) if start <= at < start + size), None)
    assert problem.chunk == chunk
    if chunk is None:
        assert "index" in problem.problem
        assert problem.samples == (first, stop)
    else:
        begin = first + chunk * layout.chunk
        assert problem.samples == (begin, min(begin + layout.chunk, stop))
        assert f"chunk {chunk} of" in problem.problem


@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_shard_is_named_once_with_the_samples_that_are_gone(
    data: st.DataObject, whole: Objects, manifest: Manifest
) -> None:
    path = data.draw(st.sampled_from([path for name in KINDS for path in shards_of(whole, name)]))
    size = data.draw(st.integers(0, len(whole[path]) - 1))
    problem = only(check({**whole, path: whole[path][:size]}))
    assert problem.path == path
    assert f"has {size} bytes" in problem.problem
    layout, (first, stop) = manifest.fields[problem.field], samples_of(manifest, path)
    index = np.frombuffer(whole[path][-index_size(layout.chunks_per_shard) : -4], "<u8").reshape(-1, 2)
    cut = next((i for i, (start, length) in enumerate(index.tolist()) if start + length > size), None)
    used = -(-(stop - first) // layout.chunk)
    if cut is None or cut >= used:
        assert (problem.chunk, problem.samples) == (None, (first, stop))
        assert "index is cut off" in problem.problem
    else:
        assert (problem.chunk, problem.samples) == (cut, (first + cut * layout.chunk, stop))


def test_what_is_appended_to_a_shard_is_noticed(whole: Objects) -> None:
    path = shards_of(whole, "blob")[1]
    problem = only(check({**whole, path: whole[path] + b"more"}))
    assert (problem.path, problem.chunk, "appended" in problem.problem) == (path, None, True)


def test_every_missing_object_is_named_and_nothing_else(whole: Objects, manifest: Manifest) -> None:
    first = {path for name in KINDS for path in shards_of(whole, name)[:-1]}
    for path in sorted(set(whole) - first - {"zarr.json"}):
        problem = only(check({key: data for key, data in whole.items() if key != path}))
        assert problem.path == path
        assert "missing" in problem.problem
        if "/c/" in path and not path.startswith("_"):
            assert problem.samples == samples_of(manifest, path)
    with pytest.raises(errors.NotADatasetError):
        check({key: data for key, data in whole.items() if key != "zarr.json"})


@pytest.mark.parametrize(
    "path", ["blob/c/99", "blob/c/01", "image/c/9/0/0", "image/c/7/0", "words/x", "_streamloader/chunks/blob/c/1/0/0"]
)
def test_an_object_too_many_is_named(path: str, whole: Objects) -> None:
    problem = only(check({**whole, path: b"x"}))
    assert (problem.path, "one too many" in problem.problem) == (path, True)


def test_other_things_and_leftovers_below_the_url_are_counted_and_no_problem(whole: Objects) -> None:
    others = {"NOTES.md": b"x", "other/c/0": b"x"}
    left = {"_streamloader/job.json": b"{}", "_streamloader/receipts/0.json": b"x", "_streamloader/parts/0": b"x"}
    report = check({**whole, **others, **left, "_streamloader/quarantine.jsonl": b"{}"})
    assert (report.whole, report.others, report.leftovers) == (True, 2, 3)


def test_a_replaced_shard_is_one_problem(whole: Objects, manifest: Manifest) -> None:
    other = written(columns_of(KINDS, COUNT, seed=77))
    for name in ("image", "blob", "words", "boxes"):
        path = shards_of(whole, name)[2]
        assert whole[path] != other[path]
        report = check({**whole, path: other[path]})
        assert {problem.path for problem in report.problems} == {path}
        assert all("modified after the conversion" in problem.problem for problem in report.problems)
        if len(whole[path]) != len(other[path]):
            assert only(report).samples == samples_of(manifest, path)


def test_two_swapped_shards_are_both_named(whole: Objects) -> None:
    one, two = shards_of(whole, "words")[:2]
    report = check({**whole, one: whole[two], two: whole[one]})
    assert [problem.path for problem in report.problems] == [one, two]


def test_an_intact_index_that_is_not_the_shards_own_is_named_alone(whole: Objects) -> None:
    one, two = shards_of(whole, "words")[:2]
    tail = index_size(len(whole[one]) and open_manifest(stored(whole))[0].fields["words"].chunks_per_shard)
    data = whole[one][:-tail] + whole[two][-tail:]
    problem = only(check({**whole, one: data}))
    assert (problem.path, "does not say where its chunks are" in problem.problem) == (one, True)


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_page_of_a_table_is_named_and_the_shards_are_read_by_their_own_index(
    name: str, whole: Objects
) -> None:
    path = f"_streamloader/chunks/{name}/c/0/0/0"
    damaged = {**whole, path: flipped(whole[path], 5)}
    problem = only(check(damaged))
    assert (problem.path, problem.field, problem.samples) == (path, name, (0, COUNT))
    shard = shards_of(whole, name)[-1]
    report = check({**damaged, shard: flipped(whole[shard], 3)})
    assert sorted(problem.path for problem in report.problems) == [path, shard]
    report = check({**damaged, shard: flipped(whole[shard], len(whole[shard]) - 1)})
    assert "where its chunks are cannot be told" in next(one.problem for one in report.problems if one.path == shard)


def test_a_table_that_is_intact_but_another_is_named_alone(whole: Objects) -> None:
    other = written(columns_of(KINDS, COUNT, seed=5))
    path = "_streamloader/chunks/blob/c/0/0/0"
    problem = only(check({**whole, path: other[path]}))
    assert (problem.path, "not the one that the manifest was written for" in problem.problem) == (path, True)


def test_a_table_of_many_pages_is_checked_page_by_page_and_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PAGE_BYTES", 1)  # a page for each shard
    columns = columns_of({"blob": KINDS["blob"]}, COUNT)
    objects = written(columns, {"blob": KINDS["blob"]})
    page, other = (f"_streamloader/chunks/blob/c/{i}/0/0" for i in (1, 3))
    assert check(objects).whole
    problem = only(check({**objects, page: flipped(objects[page], 0)}))
    assert (problem.path, problem.samples) == (page, (32, 64))
    entries = np.frombuffer(objects[page][:-4], "<u4").reshape(1, -1, 2).copy()
    entries[0, 0, 1] ^= 1  # the checksum of a chunk; the page's own is made anew
    problem = only(check({**objects, page: next(encode_pages(entries, 1))}))
    assert (problem.path, "SHA-256" in problem.problem) == ("_streamloader/chunks/blob", True)
    problem = only(check({path: data for path, data in objects.items() if path != other}))
    assert problem.path == other


def edited(whole: Objects, change: Callable[[dict[str, Any]], None], path: str = "zarr.json") -> dict[str, bytes]:
    document = json.loads(whole[path])
    change(document)
    return {**whole, path: json.dumps(document).encode()}


def test_an_edited_count_of_samples_names_the_manifest(whole: Objects) -> None:
    def fewer(document: dict[str, Any]) -> None:
        document["attributes"]["streamloader"]["num_samples"] -= 1

    problem = only(check(edited(whole, fewer)))
    assert (problem.path, "digest" in problem.problem or "bytes" in problem.problem) == ("zarr.json", True)


@pytest.mark.parametrize("key", ["nbytes", "stored"])
def test_sizes_that_the_shards_do_not_have_name_the_manifest(key: str, whole: Objects, manifest: Manifest) -> None:
    size = getattr(manifest.fields["words"], key)
    layout = replace(manifest.fields["words"], **{key: size + 1})
    other = replace(manifest, fields={**manifest.fields, "words": layout})
    problem = only(check({**whole, "zarr.json": to_bytes(dataset_documents(other)[""])}))
    assert (problem.path, f"{key} {size + 1}" in problem.problem) == ("zarr.json", True)


@pytest.mark.parametrize("path", ["image/zarr.json", "_streamloader/chunks/blob/zarr.json", "_streamloader/zarr.json"])
def test_an_edited_document_is_named_with_what_differs(path: str, whole: Objects) -> None:
    def taller(document: dict[str, Any]) -> None:
        document["zarr_format"] = 2

    problem = only(check(edited(whole, taller, path)))
    assert (problem.path, "zarr_format is 2, expected 3" in problem.problem) == (path, True)
    problem = only(check({**whole, path: b"{"}))
    assert (problem.path, "damaged" in problem.problem) == (path, True)


def test_an_edited_copy_of_a_document_in_the_root_is_named(whole: Objects) -> None:
    def wider(document: dict[str, Any]) -> None:
        document["consolidated_metadata"]["metadata"]["image"]["shape"][2] = 34

    problem = only(check(edited(whole, wider)))
    assert problem.path == "zarr.json"
    assert "consolidated_metadata.metadata.image.shape[2] is 34, expected 33" in problem.problem


def test_what_readers_pass_over_is_no_problem(whole: Objects) -> None:
    def more(document: dict[str, Any]) -> None:
        document["attributes"]["streamloader"]["later"] = 1
        document["attributes"]["title"] = "it"

    assert check(edited(whole, more)).whole


def test_values_that_no_writer_writes_are_named_with_their_sample() -> None:
    columns = columns_of(KINDS, COUNT)
    columns["words"][70] = b"ab\xffc"
    columns["words"][71] = b""
    columns["boxes"][149] = b"123456789"
    columns["flag"] = columns["flag"].copy()
    columns["flag"].view(np.uint8)[5, 1] = 7
    report = check(written(columns))
    found = {problem.field: (problem.samples, problem.problem) for problem in report.problems}
    assert {name: samples for name, (samples, _) in found.items()} == {
        "words": (70, 71),
        "boxes": (149, 150),
        "flag": (5, 6),
    }
    assert "invalid start byte at byte 2" in found["words"][1]


@given(st.lists(st.one_of(st.text(max_size=3).map(str.encode), st.binary(max_size=3)), min_size=1, max_size=20))
def test_text_is_checked_as_python_does(items: list[bytes]) -> None:
    def is_text(item: bytes) -> bool:
        try:
            item.decode()
        except UnicodeDecodeError:
            return False
        return True

    bad = bad_item(Field("text"), parse_items(memoryview(pack_items(items)), len(items)))
    assert (bad and bad[0]) == next((row for row, item in enumerate(items) if not is_text(item)), None)


def test_no_more_than_a_thousand_problems_are_collected() -> None:
    kinds = {"blob": KINDS["blob"]}
    objects = written(columns_of(kinds, 1010), kinds, Layout(samples_per_shard=1, block_size=1, chunk_size=1))
    report = check({path: data for path, data in objects.items() if "blob/c/" not in path or path.startswith("_")})
    assert len(report.problems) == MOST
    assert [problem.path for problem in report.problems[:3]] == ["blob/c/0", "blob/c/1", "blob/c/2"]


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    """A dataset of two splits, of 150 and 50 rows."""
    np.savez(tmp_path / "it.npz", x=np.arange(200, dtype=np.int32), y=np.random.default_rng(0).random((200, 400)))
    convert(tmp_path / "it.npz", tmp_path / "data", split="train=0.75,val=0.25", layout=LAYOUT, workers=0)
    return tmp_path / "data"


def damage(path: Path, at: int = 20) -> None:
    path.write_bytes(flipped(path.read_bytes(), at))


def test_all_splits_are_verified_or_the_one_that_is_asked_for(splits: Path) -> None:
    assert verify(splits).samples == {"train": 150, "val": 50}
    damage(splits / "val" / "y" / "c" / "0" / "0")
    problem = only(verify(splits))
    assert (problem.split, problem.path, problem.chunk) == ("val", "val/y/c/0/0", 0)
    assert verify(splits, split="train").whole
    assert not verify(splits, split="val").whole
    with pytest.raises(errors.FieldError):
        verify(splits, split="test")


def test_a_split_whose_manifest_is_damaged_is_named_and_the_others_are_verified(splits: Path) -> None:
    root = json.loads((splits / "zarr.json").read_text())
    root["consolidated_metadata"]["metadata"]["val"]["attributes"]["streamloader"]["num_samples"] = 49
    (splits / "zarr.json").write_text(json.dumps(root))
    damage(splits / "val" / "y" / "c" / "0" / "0")
    report = verify(splits)
    assert {(problem.split, problem.path) for problem in report.problems} == {
        ("val", "zarr.json"),
        ("val", "val/y/c/0/0"),
    }


def test_the_root_of_splits_must_be_what_they_imply(splits: Path) -> None:
    root = json.loads((splits / "zarr.json").read_text())
    root["consolidated_metadata"]["metadata"]["val/y"]["shape"] = [51, 400]
    (splits / "zarr.json").write_text(json.dumps(root))
    problem = only(verify(splits))
    assert (problem.path, "metadata.val/y.shape[0] is 51" in problem.problem) == ("zarr.json", True)
    write_split_root(open_store(splits), {"train": open_manifest(open_store(splits), "train")[0]})
    assert not verify(splits, split="train").problems


def test_a_damaged_object_is_named_on_s3(moto: S3Server) -> None:
    kinds = {name: KINDS[name] for name in ("blob", "words")}
    objects = written(columns_of(kinds, 64), kinds)
    store = open_store(moto.url(), moto.storage_options)
    for path, data in objects.items():
        store.put(path, data)
    assert verify(store.url, storage_options=moto.storage_options).whole
    path, gone = shards_of(objects, "words")[0], shards_of(objects, "blob")[1]
    store.put(path, flipped(objects[path], 9))
    store.delete([gone])
    report = verify(store.url, storage_options=moto.storage_options)
    assert [(one.path, "missing" in one.problem) for one in report.problems] == [(gone, True), (path, False)]


def test_a_web_server_that_does_not_list_is_verified_but_for_objects_too_many(whole: Objects, tmp_path: Path) -> None:
    for path, data in whole.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    gone, bad = shards_of(whole, "words")[0], shards_of(whole, "boxes")[0]
    (tmp_path / gone).unlink()
    damage(tmp_path / bad)
    (tmp_path / "blob" / "c" / "99").write_bytes(b"x")
    with folder_server(tmp_path) as server:
        report = verify(server.url)
    assert not report.listed
    assert {problem.path for problem in report.problems} == {gone, bad}


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_command_says_what_is_wrong_and_ends_with_1(splits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, splits)
    assert (status, out.count("\n")) == (0, 1)
    assert "whole; 200 samples (train 150, val 50)" in out
    assert "verify:" in err
    damage(splits / "train" / "y" / "c" / "1" / "0")
    status, out, _ = run(capsys, splits)
    assert status == 1
    assert f"problem: chunk 0 of {splits}/train/y/c/1/0 (samples 32 to 3" in out
    assert "1 problem; 200 samples" in out
    status, out, err = run(capsys, splits, "--json", "--quiet")
    assert (status, err) == (1, "")
    assert json.loads(out)["problems"][0]["chunk"] == 0
    status, _, err = run(capsys, splits.parent)
    assert (status, err.startswith("error: ")) == (2, True)
    status, _, err = run(capsys, splits, "--format", "npy")
    assert (status, "--against" in err) == (2, True)


def arrays(path: Path, **changes: Any) -> Path:
    """An .npz of 100 rows."""
    columns = {"x": np.arange(100, dtype=np.int32), "y": np.arange(100 * 400, dtype=np.float64).reshape(100, 400)}
    np.savez(path, **{**columns, **changes})
    return path


def against(folder: Path, src: Path, **options: Any) -> VerifyReport:
    return verify(folder, against=Against(str(src), **options))


@pytest.mark.parametrize("shuffle", [None, 7])
def test_a_sample_that_differs_from_its_source_is_named(shuffle: int | None, tmp_path: Path) -> None:
    src = arrays(tmp_path / "it.npz")
    convert(src, tmp_path / "data", layout=LAYOUT, workers=0, shuffle=shuffle)
    report = against(tmp_path / "data", src)
    assert (report.problems, report.compared) == ((), 100)
    y = np.arange(100 * 400, dtype=np.float64).reshape(100, 400)
    y[63, 7] = -1
    problem = only(against(tmp_path / "data", arrays(tmp_path / "it.npz", y=y)))
    assert f"differs from row 63 of {src}" in problem.problem
    assert (problem.field, problem.samples) == ("y", (63, 64)) or shuffle is not None
    sample = problem.samples[0] if problem.samples else -1
    assert dataset.open(tmp_path / "data")[sample]["x"] == 63


def test_another_number_of_rows_and_a_missing_field_are_named(tmp_path: Path) -> None:
    src = arrays(tmp_path / "it.npz")
    convert(src, tmp_path / "data", layout=LAYOUT, workers=0)
    shorter = arrays(tmp_path / "it.npz", x=np.arange(99, dtype=np.int32), y=np.zeros((99, 400)))
    report = against(tmp_path / "data", shorter)
    assert "has 100 samples" in report.problems[0].problem
    assert len(report.problems) == 1 + 99  # and every row of y but none of x
    np.savez(src, x=np.arange(100, dtype=np.int32))
    assert "has no field 'y'" in only(against(tmp_path / "data", src)).problem


def test_fields_that_were_chosen_and_cast_are_compared_as_they_became(tmp_path: Path) -> None:
    src = arrays(tmp_path / "it.npz")
    convert(src, tmp_path / "data", fields="x=int64", layout=LAYOUT, workers=0)
    assert against(tmp_path / "data", src).whole
    problem = only(against(tmp_path / "data", arrays(tmp_path / "it.npz", x=np.r_[0:99, 5].astype(np.int32))))
    assert (problem.field, problem.samples) == ("x", (99, 100))


def test_samples_in_a_damaged_chunk_are_named_once(tmp_path: Path) -> None:
    src = arrays(tmp_path / "it.npz")
    convert(src, tmp_path / "data", layout=LAYOUT, workers=0)
    damage(tmp_path / "data" / "y" / "c" / "1" / "0")
    report = against(tmp_path / "data", src)
    assert only(report).path == "y/c/1/0"
    assert report.compared == 100 - 32


def test_bad_samples_that_were_left_out_are_left_out_of_the_comparison_too(tmp_path: Path) -> None:
    for i in range(40):
        path = tmp_path / "photos" / "abcd"[i // 10] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(path)
    for i in (3, 17, 39):
        (tmp_path / "photos" / "abcd"[i // 10] / f"{i:02}.png").write_bytes(b"no image")
    layout = Layout(samples_per_shard=8)
    convert(tmp_path / "photos", tmp_path / "data", layout=layout, workers=0, on_error="skip", shuffle=1)
    report = against(tmp_path / "data", tmp_path / "photos")
    assert (report.problems, report.compared) == ((), 37)
    (tmp_path / "photos" / "b" / "12.png").write_bytes(b"no image either")
    said = [problem.problem for problem in against(tmp_path / "data", tmp_path / "photos").problems]
    assert len(said) == 1
    assert "has 37 samples" in said[0]


def test_an_appended_dataset_is_whole_and_so_is_one_whose_append_was_broken_off(tmp_path: Path) -> None:
    convert(arrays(tmp_path / "it.npz"), tmp_path / "data", layout=LAYOUT, workers=0)
    append(tmp_path / "data", tmp_path / "it.npz", workers=0)
    report = verify(tmp_path / "data")
    assert (report.problems, report.samples, report.leftovers, report.appending) == ((), {"": 200}, 0, False)

    def stop(progress: Progress) -> None:
        if progress.phase == "write" and progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        append(tmp_path / "data", tmp_path / "it.npz", workers=0, progress=stop)
    report = verify(tmp_path / "data")
    assert (report.problems, report.samples, report.appending) == ((), {"": 200}, True)
    assert report.leftovers > 2
    damage(tmp_path / "data" / "y" / "c" / "6" / "0")  # the last one, which has grown
    assert only(verify(tmp_path / "data")).path == "y/c/6/0"


def test_the_rows_of_a_split_are_found_again(splits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = splits.parent / "it.npz"
    report = against(splits, src)
    assert (report.problems, report.compared) == ((), 200)
    np.savez(src, x=np.r_[0:199, 7].astype(np.int32), y=np.random.default_rng(0).random((200, 400)))
    assert "differs from row 199" in only(against(splits, src)).problem


def test_the_command_compares_with_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = arrays(tmp_path / "it.npz")
    convert(src, tmp_path / "data", layout=LAYOUT, workers=0)
    status, out, err = run(capsys, tmp_path / "data", "--against", src, "--format", "npy")
    assert (status, "100 compared with the source" in out, "compare: " in err) == (0, True, True)
