"""Verification: whole datasets are, and of a damaged one exactly what is damaged is named."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from amounts import examples
from commands import run
from datasets import encoded, picture
from folder_server import folder_server
from format_data import columns_of, fields, geometry_of, memory_store, objects_of, write_dataset, write_shards
from golden import GOLDEN, V1
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import streamloader as sl
from streamloader.format import tables
from streamloader.format.codecs import index_size
from streamloader.format.metadata import dataset_documents, to_bytes
from streamloader.format.opening import open_root
from streamloader.format.publish import finish, read_receipts, write_split_root
from streamloader.format.tables import encode_pages
from streamloader.maintenance.verify import MAX_PROBLEMS, Problem, Problems, VerifyReport, rows_of
from streamloader.storage import open_store
from streamloader.storage.process import run_all

KINDS = {
    "image": sl.Field.parse("uint8[40,33]"),
    "flag": sl.Field.parse("bool[1100]"),  # bulk, since it is over 1 KiB
    "label": sl.Field.parse("int64"),
    "blob": sl.Field.parse("bytes:jpeg"),
    "words": sl.Field.parse("text"),
    "boxes": sl.Field.parse("ragged:float32[4]"),
}
COUNT = 150
LAYOUT = sl.Layout(samples_per_shard=32, block_size=1 << 12, chunk_size=1 << 8)


def written(columns, kinds=KINDS, layout=LAYOUT):
    """The objects of a dataset of these columns."""
    store = memory_store()
    write_dataset(store, columns, geometry_of(kinds, len(next(iter(columns.values()))), layout))
    return objects_of(store)


@pytest.fixture(scope="module")
def whole():
    return written(columns_of(KINDS, COUNT))


@pytest.fixture(scope="module")
def other():
    """Other values of the same fields."""
    return written(columns_of(KINDS, COUNT, seed=77))


@pytest.fixture(scope="module")
def manifest(whole):
    return open_root(stored(whole)).manifest


def stored(objects):
    """A store with these objects."""
    store = memory_store()
    for path, data in objects.items():
        store.put(path, data)
    return store


def check(objects, **options):
    store = stored(objects)
    try:
        return sl.verify(store.url, **options)
    finally:
        store.delete(objects)  # each listing goes through all that is in memory


def only(report):
    assert len(report.problems) == 1, [problem.problem for problem in report.problems]
    return report.problems[0]


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def shards_of(objects, name):
    paths = [path for path in objects if path.startswith(f"{name}/c/")]
    return sorted(paths, key=lambda path: int(path.split("/")[2]))


def index_of(objects, manifest, path):
    """The begin and the size of each chunk of a shard."""
    size = index_size(manifest.fields[path.split("/", maxsplit=1)[0]].chunks_per_shard)
    return np.frombuffer(objects[path][-size:-4], "<u8").reshape(-1, 2).tolist()


def samples_of(manifest, path):
    """The samples of a shard."""
    shard = manifest.fields[path.split("/", maxsplit=1)[0]].shard
    first = int(path.split("/")[2]) * shard
    return first, min(first + shard, manifest.num_samples)


def test_a_whole_dataset_is_whole(whole, manifest):
    seen = []
    report = check(whole, progress=seen.append)
    assert (report.ok, report.samples, report.others, report.leftovers) == (True, {"": COUNT}, 0, 0)
    assert report.objects == sum(len(shards_of(whole, name)) for name in KINDS) > 20
    assert report.bytes == sum(layout.stored for layout in manifest.fields.values())
    assert (seen[-1].done, seen[-1].total) == (report.bytes, report.bytes)
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert {layout.codec for layout in manifest.fields.values()} == {"none", "lz4", "zstd"}
    assert {layout.resident for layout in manifest.fields.values()} == {True, False}


@pytest.mark.parametrize("name", [path.name for path in GOLDEN.iterdir() if path.is_dir()])
def test_every_golden_dataset_is_whole(name):
    assert sl.verify(GOLDEN / name).problems == ()


@given(data=st.data(), kinds=st.dictionaries(st.sampled_from("abcd"), fields, min_size=1, max_size=3))
@settings(max_examples=examples(20))
def test_any_small_dataset_is_whole(data, kinds):
    count = data.draw(st.integers(0, 40))
    shard, block, chunk = (data.draw(st.sampled_from(sizes)) for sizes in ([1, 4, 16], [1, 256], [1, 64]))
    layout = sl.Layout(samples_per_shard=shard, block_size=block, chunk_size=chunk)
    report = check(written(columns_of(kinds, count, data.draw(st.integers(0, 100))), kinds, layout))
    assert (report.problems, report.samples) == ((), {"": count})


BAD = json.loads((V1 / "bad" / "expected.json").read_text())
UNFIT = {"NotADatasetError", "IncompleteError", "VersionError"}


@pytest.mark.quick(19)
@pytest.mark.parametrize("name", [name for name, expected in BAD.items() if expected["when"] != "decode"])
def test_a_bad_dataset_is_named_or_refused(name):
    """These lack Zarr's own documents, which is reported too. Whether an image decodes is not checked."""
    expected = BAD[name]
    if expected["error"] in UNFIT:
        with pytest.raises(getattr(sl.errors, expected["error"])):
            sl.verify(V1 / "bad" / name)
        return
    report = sl.verify(V1 / "bad" / name)
    found = [one.problem for one in report.problems if "Zarr readers need it" not in one.problem]
    assert [one for one in found if "consolidated_metadata is missing" not in one], report.problems


@given(data=st.data())
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_of_a_shard_names_its_chunk_or_its_index(data, whole, manifest):
    path = data.draw(st.sampled_from([path for name in KINDS for path in shards_of(whole, name)]))
    at = data.draw(st.integers(0, len(whole[path]) - 1))
    problem = only(check({**whole, path: flipped(whole[path], at)}))
    assert (problem.path, problem.field) == (path, path.split("/")[0])
    layout, (first, stop) = manifest.fields[problem.field], samples_of(manifest, path)
    places = enumerate(index_of(whole, manifest, path))
    chunk = next((i for i, (start, size) in places if start <= at < start + size), None)
    assert problem.chunk == chunk
    if chunk is None:
        assert "index" in problem.problem
        assert problem.samples == (first, stop)
    else:
        begin = first + chunk * layout.chunk
        assert problem.samples == (begin, min(begin + layout.chunk, stop))
        assert f"chunk {chunk} of" in problem.problem


@given(data=st.data())
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_shard_is_named_once_with_the_samples_that_are_gone(data, whole, manifest):
    path = data.draw(st.sampled_from([path for name in KINDS for path in shards_of(whole, name)]))
    size = data.draw(st.integers(0, len(whole[path]) - 1))
    problem = only(check({**whole, path: whole[path][:size]}))
    assert problem.path == path
    assert f"has {size} bytes" in problem.problem
    layout, (first, stop) = manifest.fields[problem.field], samples_of(manifest, path)
    places = enumerate(index_of(whole, manifest, path))
    cut = next((i for i, (start, length) in places if start + length > size), None)
    used = -(-(stop - first) // layout.chunk)
    if cut is None or cut >= used:
        assert (problem.chunk, problem.samples) == (None, (first, stop))
        assert "index is cut off" in problem.problem
    else:
        assert (problem.chunk, problem.samples) == (cut, (first + cut * layout.chunk, stop))


def with_another_index(whole, _):
    size = index_size(open_root(stored(whole)).manifest.fields["words"].chunks_per_shard)
    return whole["words/c/0"][:-size] + whole["words/c/1"][-size:]


TABLE = "_streamloader/chunks/blob/c/0/0/0"
LENGTHS = "_streamloader/lengths/blob/c/1"
REPLACED = {
    "lengths": (LENGTHS, lambda whole, _: flipped(whole[LENGTHS], 9), "damaged: its checksum does not match"),
    "longer": ("blob/c/1", lambda whole, _: whole["blob/c/1"] + b"more", "something was appended"),
    "another index": ("words/c/0", with_another_index, "does not match its chunks"),
    "another table": (TABLE, lambda _, other: other[TABLE], "is intact, but does not match the manifest"),
    **{
        path: (path, lambda *_: b"x", "is orphaned")
        for path in (
            *("blob/c/99", "blob/c/01", "image/c/9/0/0", "image/c/7/0", "words/x", TABLE.replace("0", "1", 1)),
            *(f"{LENGTHS}9", "_streamloader/lengths/x/zarr.json", "_streamloader/lengths/other"),
        )
    },
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("case", REPLACED)
def test_an_object_that_is_wrong_as_a_whole_is_named_once(case, whole, other):
    path, data, text = REPLACED[case]
    problem = only(check({**whole, path: data(whole, other)}))
    assert (problem.path, problem.chunk, text in problem.problem) == (path, None, True)


@pytest.mark.long
def test_every_missing_object_is_named_and_nothing_else(whole, manifest):
    first = {path for name in KINDS for path in shards_of(whole, name)[:-1]}
    for path in sorted(set(whole) - first - {"zarr.json"}):
        problem = only(check({key: data for key, data in whole.items() if key != path}))
        assert problem.path == path
        assert "missing" in problem.problem
        if "/c/" in path and "chunks" not in path:
            assert problem.samples == samples_of(manifest, path.removeprefix("_streamloader/lengths/"))
    with pytest.raises(sl.errors.NotADatasetError):
        check({key: data for key, data in whole.items() if key != "zarr.json"})


def test_lengths_of_other_samples_are_named_by_chunk_and_as_a_whole(whole, other):
    problems = check({**whole, LENGTHS: other[LENGTHS]}).problems
    assert {problem.path for problem in problems} == {LENGTHS, "_streamloader/lengths/blob"}
    assert "does not match the manifest" in problems[0].problem and problems[1].samples[0] in range(32, 64)


def test_a_manifest_with_another_hash_of_the_lengths_is_named(whole):
    document = json.loads(whole["zarr.json"])
    lengths = document["attributes"]["streamloader"]["lengths"]
    lengths["blob"] = lengths["words"]
    problem = only(check({**whole, "zarr.json": json.dumps(document).encode()}))
    assert problem.path == "_streamloader/lengths/blob" and "does not match the manifest" in problem.problem


def test_a_field_of_which_an_earlier_release_wrote_a_shard_has_no_table_of_lengths(whole):
    """As after a conversion that it began and this one resumed: the pages of later shards are no problem."""
    store, columns = memory_store(), columns_of(KINDS, COUNT)
    geometry = geometry_of(KINDS, COUNT, LAYOUT)
    write_shards(store, geometry, columns)
    receipts = read_receipts(store)
    del receipts[2].objects["_streamloader/lengths/blob/c/2"]
    receipts[2].fields["blob"] = replace(receipts[2].fields["blob"], lengths="")
    assert set(finish(store, geometry, receipts, {}).lengths) == {"words", "boxes"}
    assert set(objects_of(store)) < set(whole) and sl.verify(store.url).ok


def test_publishing_reads_no_page_of_lengths(whole, manifest):
    store, geometry = memory_store(), geometry_of(KINDS, COUNT, LAYOUT)
    write_shards(store, geometry, columns_of(KINDS, COUNT))
    store.delete(path for path in whole if path.startswith("_streamloader/lengths/"))
    assert finish(store, geometry, read_receipts(store), {}).lengths == manifest.lengths


def test_other_things_and_leftovers_below_the_url_are_counted_and_no_problem(whole):
    others = {"NOTES.md": b"x", "other/c/0": b"x"}
    left = {"_streamloader/job.json": b"{}", "_streamloader/receipts/0.json": b"x", "_streamloader/parts/0": b"x"}
    report = check({**whole, **others, **left, "_streamloader/quarantine.jsonl": b"{}"})
    assert (report.ok, report.others, report.leftovers) == (True, 2, 3)


def test_a_replaced_shard_is_one_problem(whole, other, manifest):
    for name in ("image", "blob", "words", "boxes"):
        path = shards_of(whole, name)[2]
        assert whole[path] != other[path]
        report = check({**whole, path: other[path]})
        assert {problem.path for problem in report.problems} == {path}
        assert all("modified after the conversion" in problem.problem for problem in report.problems)
        if len(whole[path]) != len(other[path]):
            assert only(report).samples == samples_of(manifest, path)
    one, two = shards_of(whole, "words")[:2]
    report = check({**whole, one: whole[two], two: whole[one]})
    assert [problem.path for problem in report.problems] == [one, two]


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_page_of_a_table_is_named_and_the_shards_are_read_by_their_own_index(name, whole):
    path = f"_streamloader/chunks/{name}/c/0/0/0"
    damaged = {**whole, path: flipped(whole[path], 5)}
    problem = only(check(damaged))
    assert (problem.path, problem.field, problem.samples) == (path, name, (0, COUNT))
    shard = shards_of(whole, name)[-1]
    report = check({**damaged, shard: flipped(whole[shard], 3)})
    assert sorted(problem.path for problem in report.problems) == [path, shard]
    report = check({**damaged, shard: flipped(whole[shard], len(whole[shard]) - 1)})
    assert "cannot be located" in next(one.problem for one in report.problems if one.path == shard)


def test_a_table_of_many_pages_is_checked_page_by_page_and_as_a_whole(monkeypatch):
    monkeypatch.setattr(tables, "PAGE_BYTES", 1)  # a page for each shard
    kinds = {"blob": KINDS["blob"]}
    objects = written(columns_of(kinds, COUNT), kinds)
    page, other = (f"_streamloader/chunks/blob/c/{i}/0/0" for i in (1, 3))
    assert check(objects).ok
    problem = only(check({**objects, page: flipped(objects[page], 0)}))
    assert (problem.path, problem.samples) == (page, (32, 64))
    entries = np.frombuffer(objects[page][:-4], "<u4").reshape(1, -1, 2).copy()
    entries[0, 0, 1] ^= 1  # the checksum of a chunk; the page's own is made anew
    problem = only(check({**objects, page: next(encode_pages(entries, 1))}))
    assert (problem.path, "SHA-256" in problem.problem) == ("_streamloader/chunks/blob", True)
    problem = only(check({path: data for path, data in objects.items() if path != other}))
    assert problem.path == other


def edited(whole, change):
    document = json.loads(whole["zarr.json"])
    change(document)
    return {**whole, "zarr.json": json.dumps(document).encode()}


EDITS = [
    (lambda root: root["attributes"]["streamloader"].update(num_samples=COUNT - 1), "bytes"),
    (
        lambda root: root["consolidated_metadata"]["metadata"]["image"].update(shape=[COUNT, 40, 34]),
        "consolidated_metadata.metadata.image.shape.2 is 34, expected 33",
    ),
]


@pytest.mark.parametrize(("change", "text"), EDITS)
def test_an_edited_root_is_named_with_what_differs(change, text, whole):
    problem = only(check(edited(whole, change)))
    assert (problem.path, text in problem.problem) == ("zarr.json", True)


@pytest.mark.parametrize("folder", ["image", "_streamloader/chunks/blob", "_streamloader"])
def test_an_edited_document_is_named_with_what_differs(folder, whole):
    path = f"{folder}/zarr.json"
    other = whole[path].replace(b'format": 3', b'format": 2')
    for data, text in ((other, "zarr_format is 2, expected 3"), (b"{", "damaged")):
        problem = only(check({**whole, path: data}))
        assert (problem.path, text in problem.problem) == (path, True)


@pytest.mark.parametrize("key", ["nbytes", "stored"])
def test_sizes_that_the_shards_do_not_have_name_the_manifest(key, whole, manifest):
    size = getattr(manifest.fields["words"], key)
    layout = replace(manifest.fields["words"], **{key: size + 1})
    other = replace(manifest, fields={**manifest.fields, "words": layout})
    problem = only(check({**whole, "zarr.json": to_bytes(dataset_documents(other)[""])}))
    assert (problem.path, f"{key} {size + 1}" in problem.problem) == ("zarr.json", True)


def test_what_readers_pass_over_is_no_problem(whole):
    assert check(edited(whole, lambda root: root["attributes"].update(title="it"))).ok
    assert check(edited(whole, lambda root: root["attributes"]["streamloader"].update(later=1))).ok


def test_values_that_no_writer_writes_are_named_with_their_sample():
    columns = columns_of(KINDS, COUNT)
    columns["words"][70] = b"ab\xffc"
    columns["words"][71] = b""
    columns["boxes"][149] = b"123456789"
    columns["flag"] = columns["flag"].copy()
    columns["flag"].view(np.uint8)[5, 1] = 7
    report = check(written(columns))
    found = {problem.field: problem.samples for problem in report.problems}
    assert found == {"words": (70, 71), "boxes": (149, 150), "flag": (5, 6)}
    assert any("invalid start byte at byte 2" in problem.problem for problem in report.problems)


@pytest.mark.long
def test_no_more_than_a_thousand_problems_are_collected():
    kinds = {"blob": KINDS["blob"]}
    objects = written(columns_of(kinds, 1010), kinds, sl.Layout(samples_per_shard=1, block_size=1, chunk_size=1))
    report = check({path: data for path, data in objects.items() if "blob/c/" not in path or path.startswith("_")})
    shards = [int(problem.path.removeprefix("blob/c/")) for problem in report.problems]
    assert len(shards) == len(set(shards)) == MAX_PROBLEMS
    assert shards == sorted(shards)
    assert shards[:3] == [0, 1, 2]


def test_threads_that_add_problems_together_do_not_exceed_the_limit():
    interval, found = sys.getswitchinterval(), Problems()
    sys.setswitchinterval(1e-6)
    try:
        run_all(lambda number: [found.add(Problem(f"{number} {i}")) for i in range(400)], range(8), 8)
    finally:
        sys.setswitchinterval(interval)
    assert len(found.sorted()) == MAX_PROBLEMS


@pytest.fixture
def splits(tmp_path):
    """A dataset of two splits, of 150 and 50 rows."""
    np.savez(tmp_path / "it.npz", x=np.arange(200, dtype=np.int32), y=np.random.default_rng(0).random((200, 400)))
    sl.convert(tmp_path / "it.npz", tmp_path / "data", split="train=0.75,val=0.25", layout=LAYOUT, workers=0)
    return tmp_path / "data"


def damage(path, at=20):
    path.write_bytes(flipped(path.read_bytes(), at))


def edit_root(splits, change):
    root = json.loads((splits / "zarr.json").read_text())
    change(root["consolidated_metadata"]["metadata"])
    (splits / "zarr.json").write_text(json.dumps(root))


def test_all_splits_are_verified_or_the_one_that_is_asked_for(splits):
    assert sl.verify(splits).samples == {"train": 150, "val": 50}
    damage(splits / "val" / "y" / "c" / "0" / "0")
    problem = only(sl.verify(splits))
    assert (problem.split, problem.path, problem.chunk) == ("val", "val/y/c/0/0", 0)
    assert sl.verify(splits, split="train").ok
    assert not sl.verify(splits, split="val").ok
    with pytest.raises(sl.errors.FieldError):
        sl.verify(splits, split="test")


def test_a_split_whose_manifest_is_damaged_is_named_and_the_others_are_verified(splits):
    edit_root(splits, lambda nodes: nodes["val"]["attributes"]["streamloader"].update(num_samples=49))
    damage(splits / "val" / "y" / "c" / "0" / "0")
    found = {(problem.split, problem.path) for problem in sl.verify(splits).problems}
    assert found == {("val", "zarr.json"), ("val", "val/y/c/0/0")}


def test_the_root_of_splits_must_be_what_they_imply(splits):
    edit_root(splits, lambda nodes: nodes["val/y"].update(shape=[51, 400]))
    problem = only(sl.verify(splits))
    assert (problem.path, "metadata.val/y.shape.0 is 51" in problem.problem) == ("zarr.json", True)
    edit_root(splits, lambda nodes: nodes.update({"val/y": float("nan")}))
    assert "metadata.val/y is nan" in only(sl.verify(splits)).problem
    write_split_root(open_store(splits), {"train": open_root(open_store(splits), "train").manifest})
    assert not sl.verify(splits, split="train").problems


@pytest.mark.long
def test_a_web_server_that_does_not_list_is_verified_but_for_objects_too_many(whole, tmp_path):
    for path, data in whole.items():
        open_store(tmp_path).put(path, data)
    gone, bad = shards_of(whole, "words")[0], shards_of(whole, "boxes")[0]
    (tmp_path / gone).unlink()
    damage(tmp_path / bad)
    (tmp_path / "blob" / "c" / "99").write_bytes(b"x")
    with folder_server(tmp_path) as server:
        report = sl.verify(server.url)
    assert not report.listed
    assert {problem.path for problem in report.problems} == {gone, bad}


ANY = [
    "zarr.json",
    "boxes/zarr.json",
    "_streamloader/chunks/boxes",
    "boxes/c/0",
    "words/c/0",
    "_streamloader/lengths/words/c/0",
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("fault", ["short", "flip", "404"])
@pytest.mark.parametrize("path", ANY)
def test_what_was_damaged_or_missing_once_on_its_way_is_no_problem(path, fault, whole, tmp_path):
    for name, data in whole.items():
        open_store(tmp_path).put(name, data)
    with folder_server(tmp_path) as server:
        server.faults[f"/{path}"] = [fault]
        report = sl.verify(server.url)
        assert not server.faults[f"/{path}"]
    assert report.ok, report.problems


def test_the_command_prints_problems_and_exits_with_1(splits, capsys):
    status, out, err = run(capsys, "verify", splits)
    assert (status, out.count("\n")) == (0, 1)
    assert "OK; 200 samples (train 150, val 50)" in out
    assert "verify:" in err
    damage(splits / "train" / "y" / "c" / "1" / "0")
    status, out, _ = run(capsys, "verify", splits)
    assert status == 1
    assert f"problem: chunk 0 of {splits}/train/y/c/1/0 (samples 32 to 3" in out
    assert "1 problem; 200 samples" in out
    status, out, err = run(capsys, "verify", splits, "--json", "--quiet")
    assert (status, err) == (1, "")
    assert json.loads(out)["problems"][0]["chunk"] == 0
    status, _, err = run(capsys, "verify", splits.parent)
    assert (status, err.startswith("error: ")) == (2, True)
    status, _, err = run(capsys, "verify", splits, "--format", "npy")
    assert (status, "against=" in err) == (2, True)
    status, out, err = run(capsys, "verify", splits, "--against", splits.parent / "it.npz", "--format", "npy")
    assert (status, f"{200 - 32} compared with the source" in out, "compare: " in err) == (1, True, True)
    assert "1 problem; " in out, "its samples are not compared"


IMAGES = {"image": sl.Field.parse("bytes:jpeg"), "png": sl.Field.parse("bytes:png"), "label": sl.Field.parse("int64")}
CODECS = {"image": "jpeg", "png": "png"}
CUT = {7: "image", 8: "png", 64: "image", 65: "image", 120: "png"}


@pytest.fixture(scope="module")
def pictures():
    """The columns of a dataset of images, some of which are cut off."""
    columns = {name: [encoded(picture(i, 40, 56), kind) for i in range(COUNT)] for name, kind in CODECS.items()}
    for sample, name in CUT.items():
        columns[name][sample] = columns[name][sample][: len(columns[name][sample]) // 2]
    columns["image"][9] = b""
    return {**columns, "label": np.arange(COUNT)}


def test_images_that_do_not_decode_are_named_by_sample_and_only_if_they_are_decoded(pictures):
    objects = written(pictures, IMAGES)
    assert check(objects).ok
    report = check(objects, decode=True)
    expected = set(CUT.items()) | {(9, "image")}
    assert {(problem.samples[0], problem.field) for problem in report.problems} == expected
    assert all(problem.samples == (problem.samples[0], problem.samples[0] + 1) for problem in report.problems)
    assert all(problem.path.startswith(f"{problem.field}/c/") for problem in report.problems)
    assert (report.decoded, report.complete, report.bad) == (2 * COUNT, True, len(expected))
    problem = next(problem for problem in report.problems if problem.samples == (64, 65))
    assert "sample 64 of field 'image' does not decode as an image" in problem.problem
    assert f", in chunk {problem.chunk} of memory://" in problem.problem


def test_each_invalid_value_is_named_with_decode():
    columns = columns_of(KINDS, COUNT)
    columns["words"][70:73] = [b"\xff", b"ok", b"\xfe"]
    columns["boxes"][148:150] = [b"1", b"12"]
    kinds = {**KINDS, "blob": sl.Field.parse("bytes")}
    report = check(written(columns, kinds), decode=True)
    assert [problem.samples[0] for problem in report.problems] == [148, 149, 70, 72]
    assert report.decoded == 0


@pytest.mark.long
def test_more_bad_images_than_problems_are_all_named_and_a_limit_is_said(monkeypatch):
    kinds, count = {"image": IMAGES["image"]}, MAX_PROBLEMS + 200
    objects = written({"image": [b"none"] * count}, kinds, sl.Layout())
    report = check(objects, decode=True)
    assert [problem.samples[0] for problem in report.problems] == list(range(count))
    assert report.complete
    monkeypatch.setattr("streamloader.maintenance.verify.MAX_BAD_VALUES", 1100)
    report = check(objects, decode=True)
    assert (len(report.problems), report.complete) == (1100, False)


def test_an_image_that_takes_all_of_the_memory_is_decoded_alone(pictures, monkeypatch):
    """No image fits, so each waits until no other is decoded."""
    monkeypatch.setattr("streamloader.maintenance.verify.DECODE_BYTES", 1000)
    assert check(written(pictures, IMAGES), decode=True).bad == len(CUT) + 1


@pytest.mark.long
def test_training_excludes_the_listed_samples_and_meets_no_error(pictures, tmp_path, capsys):
    objects = written(pictures, IMAGES)
    path = shards_of(objects, "image")[1]
    objects[path] = flipped(objects[path], 20)
    store = open_store(tmp_path / "data")
    for name, data in objects.items():
        store.put(name, data)
    bad = tmp_path / "bad.jsonl"
    status, _, err = run(capsys, "verify", store.url, "--decode", "--bad", bad, "--quiet")
    lines = [json.loads(line) for line in bad.read_text().splitlines()]
    samples = [line["sample"] for line in lines]
    damaged = next(p for p in sl.verify(store.url, decode=True).problems if "is damaged" in p.problem).samples
    assert (status, err) == (1, "")
    assert samples == sorted(samples)
    assert set(samples) == {*CUT, 9, *range(*damaged)}
    assert 0 < len(range(*damaged)) < 32
    first = lines[samples.index(7)]
    assert (first["split"], first["field"], first["object"]) == (None, "image", "image/c/0")
    assert "does not decode as an image" in first["error"]
    options = {"decode": True, "batch_size": 8, "with_index": True, "world": (0, 1)}
    with pytest.raises(sl.errors.StreamloaderError):
        list(sl.NumpyDataset(store.url, **options))
    found = [i for batch in sl.NumpyDataset(store.url, exclude=bad, **options) for i in batch["index"][batch["valid"]]]
    assert sorted(found) == sorted(set(range(COUNT)) - set(samples))


def test_the_list_is_empty_without_problems_and_has_the_split_of_each_sample(splits, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    status, _, _ = run(capsys, "verify", splits, "--bad", bad, "--quiet")
    assert (status, bad.read_bytes()) == (0, b"")
    for shard in ("val/y/c/1/0", "train/y/c/2/0", "train/y/c/1/0"):
        damage(splits / shard)
    assert run(capsys, "verify", splits, "--bad", bad, "--quiet")[0] == 1
    lines = [json.loads(line) for line in bad.read_text().splitlines()]
    assert [(line["split"], line["sample"]) for line in lines] == [("train", 32), ("train", 64), ("val", 32)]
    for split, count in (("train", 150), ("val", 50)):
        named = sum(line["split"] == split for line in lines)
        assert sl.NumpyDataset(splits, split=split, batch_size=1, exclude=bad).num_samples == count - named < count


def test_a_list_of_overlapping_problems_ascends_and_is_cut_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("streamloader.maintenance.verify.MAX_BAD_LINES", 5)
    spans = {"a": (2, 10**12), "b": (0, 3), "c": (1, 2)}
    problems = tuple(Problem(f"bad {name}", field=name, samples=samples) for name, samples in spans.items())
    counts = {"objects": 0, "bytes": 0, "compared": 0, "leftovers": 0, "others": 0}
    report = VerifyReport(str(tmp_path), {}, **counts, listed=True, appending=False, problems=problems)
    assert (report.write_bad(tmp_path / "bad.jsonl"), report.bad) == (5, 10**12 + 2)
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [(line["sample"], line["field"]) for line in lines] == [(0, "b"), (1, "b"), (1, "c"), (2, "a"), (2, "b")]


def test_a_list_that_is_not_complete_is_said_and_a_folder_is_none(splits, tmp_path, capsys, monkeypatch):
    for shard in ("train/y/c/2/0", "train/y/c/1/0"):
        damage(splits / shard)
    monkeypatch.setattr("streamloader.maintenance.verify.MAX_BAD_LINES", 1)
    status, _, err = run(capsys, "verify", splits, "--bad", tmp_path / "bad.jsonl", "--quiet")
    assert (status, "the list of bad samples is not complete, it has 1 line" in err) == (1, True)
    status, _, err = run(capsys, "verify", splits, "--bad", f"{tmp_path}/", "--quiet")
    assert (status, "is a folder; give" in err) == (2, True)


def arrays(path, **changes):
    """An .npz of 100 rows."""
    columns = {"x": np.arange(100, dtype=np.int32), "y": np.arange(100 * 400, dtype=np.float64).reshape(100, 400)}
    np.savez(path, **{**columns, **changes})
    return path


def converted(tmp_path, **options):
    """A source, and its dataset."""
    src = arrays(tmp_path / "it.npz")
    sl.convert(src, tmp_path / "data", layout=LAYOUT, workers=0, **options)
    return src, tmp_path / "data"


@pytest.mark.parametrize("shuffle", [None, 7])
def test_a_sample_that_differs_from_its_source_is_named(shuffle, tmp_path):
    src, data = converted(tmp_path, shuffle=shuffle)
    report = sl.verify(data, against=src)
    assert (report.problems, report.compared) == ((), 100)
    y = np.arange(100 * 400, dtype=np.float64).reshape(100, 400)
    y[63, 7] = -1
    problem = only(sl.verify(data, against=arrays(tmp_path / "it.npz", y=y)))
    assert f"differs from row 63 of {src}" in problem.problem
    assert (problem.field, problem.samples) == ("y", (63, 64)) or shuffle is not None
    sample = problem.samples[0] if problem.samples else -1
    assert sl.open(data)[sample]["x"] == 63


def test_another_number_of_rows_and_a_missing_field_are_named(tmp_path):
    src, data = converted(tmp_path)
    shorter = arrays(tmp_path / "it.npz", x=np.arange(99, dtype=np.int32), y=np.zeros((99, 400)))
    report = sl.verify(data, against=shorter)
    assert "has 100 samples" in report.problems[0].problem
    assert len(report.problems) == 1 + 99  # and every row of y but none of x
    np.savez(src, x=np.arange(100, dtype=np.int32))
    assert "has no field 'y'" in only(sl.verify(data, against=src)).problem


def test_fields_that_were_chosen_and_cast_are_compared_as_they_became(tmp_path):
    src, data = converted(tmp_path, fields="x=int64")
    assert sl.verify(data, against=src).ok
    problem = only(sl.verify(data, against=arrays(tmp_path / "it.npz", x=np.r_[0:99, 5].astype(np.int32))))
    assert (problem.field, problem.samples) == ("x", (99, 100))


def test_bad_samples_that_were_left_out_are_left_out_of_the_comparison_too(tmp_path):
    for i in range(40):
        path = tmp_path / "photos" / "abcd"[i // 10] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(path)
    for i in (3, 17, 39):
        (tmp_path / "photos" / "abcd"[i // 10] / f"{i:02}.png").write_bytes(b"no image")
    layout = sl.Layout(samples_per_shard=2)  # the last shard goes, with its page of lengths
    sl.convert(tmp_path / "photos", tmp_path / "data", layout=layout, workers=0, on_error="skip", shuffle=1)
    report = sl.verify(tmp_path / "data", against=tmp_path / "photos")
    assert (report.problems, report.compared) == ((), 37)
    assert len(list((tmp_path / "data/_streamloader/lengths/image/c").iterdir())) == 19
    (tmp_path / "photos" / "b" / "12.png").write_bytes(b"no image either")
    assert "has 37 samples" in only(sl.verify(tmp_path / "data", against=tmp_path / "photos")).problem


def test_an_appended_dataset_is_whole_and_so_is_one_whose_append_was_broken_off(tmp_path):
    src, data = converted(tmp_path)
    sl.append(data, src, workers=0)
    report = sl.verify(data)
    assert (report.problems, report.samples, report.leftovers, report.appending) == ((), {"": 200}, 0, False)

    def stop(progress):
        if progress.phase == "write" and progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sl.append(data, src, workers=0, progress=stop)
    report = sl.verify(data)
    assert (report.problems, report.samples, report.appending) == ((), {"": 200}, True)
    assert report.leftovers > 2
    damage(data / "y" / "c" / "6" / "0")  # the last one, which has grown
    assert only(sl.verify(data)).path == "y/c/6/0"


def test_the_rows_of_a_split_are_found_again(splits):
    src = splits.parent / "it.npz"
    report = sl.verify(splits, against=src)
    assert (report.problems, report.compared) == ((), 200)
    np.savez(src, x=np.r_[0:199, 7].astype(np.int32), y=np.random.default_rng(0).random((200, 400)))
    assert "differs from row 199" in only(sl.verify(splits, against=src)).problem


@pytest.mark.parametrize("split", [{"of": "a=0.5,b=0.5", "seed": 0, "name": "c"}, {"of": "a=0.5,b=0.5", "seed": 0}, 3])
def test_a_provenance_that_does_not_say_the_rows_is_an_error(split, manifest):
    with pytest.raises(sl.errors.UsageError, match="does not record the source rows of its samples"):
        rows_of(replace(manifest, provenance={"split": split}), 40)
