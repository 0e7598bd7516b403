"""Laws of writing: the same bytes again and again, the manifest last, and every Zarr reader agrees."""

import json
from typing import Any

import numpy as np
import pytest
import zarr
from amounts import examples
from format_data import (
    ALL_KINDS,
    CODECS,
    StoreProxy,
    columns_of,
    geometry_of,
    memory_store,
    objects_of,
    read_column,
    same,
    some_fields,
    write_dataset,
    write_shards,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader import errors
from streamloader.format import opening, publish
from streamloader.format.manifest import Field
from streamloader.format.opening import JOB, ROOT, get_document, open_root
from streamloader.maintenance.append import read_claim
from streamloader.options import Layout
from streamloader.storage import open_store
from streamloader.storage.store import Store

LAYOUT = Layout(samples_per_shard=16, chunk_size=64, block_size=256)
MIXED = {"image": Field.parse("uint8[1100]"), "label": Field.parse("int64"), "name": Field("text")}


def decoded(array: Any, field: Field) -> Any:
    """What zarr-python gives for a field, as our column."""
    values = array[:]
    if field.fixed:
        return np.asarray(values)
    return [one.encode() if isinstance(one, str) else bytes(one) for one in values.tolist()]


def assert_equal(group: Any, fields: dict[str, Field], columns: dict[str, Any]) -> None:
    for name, field in fields.items():
        assert same(decoded(group[name], field), columns[name]), name


@pytest.mark.quick(2)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100])
@pytest.mark.parametrize("codec", CODECS)
def test_zarr_python_reads_every_kind_of_field(count, codec, tmp_path):
    store, columns = open_store(tmp_path), columns_of(ALL_KINDS, count)
    write_dataset(store, columns, geometry_of(ALL_KINDS, count, LAYOUT, codec))
    group = zarr.open_consolidated(str(tmp_path))
    assert_equal(group, ALL_KINDS, columns)
    for name, field in ALL_KINDS.items():
        assert group[name].metadata.dimension_names[0] == "sample"
        assert same(decoded(zarr.open_array(str(tmp_path / name), mode="r"), field), columns[name]), name  # alone
        table = group[f"_streamloader/chunks/{name}"][:]
        assert table.shape[2] == 2 and (table[..., 0] > 0).sum() == -(-count // group[name].chunks[0])
    assert dict(group["boxes"].attrs) == {"streamloader": {"kind": "ragged", "dtype": "float32", "shape": [4]}}
    assert dict(group["blob"].attrs) == {"streamloader": {"kind": "bytes", "encoding": "jpeg"}}


@given(some_fields, st.integers(0, 60), st.sampled_from([1, 4, 32]), st.booleans())
@settings(max_examples=examples(25), deadline=None)
def test_zarr_python_reads_random_geometries(fields, count, shard, known):
    store, columns = memory_store(), columns_of(fields, count)
    layout = Layout(samples_per_shard=shard, chunk_size=50, block_size=150)
    write_dataset(store, columns, geometry_of(fields, count if known else None, layout))
    assert_equal(zarr.open_consolidated(zarr.storage.FsspecStore.from_url(store.url)), fields, columns)


def test_a_dataset_is_the_same_for_any_number_of_threads_and_order_of_shards_also_written_twice(monkeypatch):
    columns, geometry, found = columns_of(ALL_KINDS, 100), geometry_of(ALL_KINDS, None, LAYOUT), []
    for threads, shards in ((1, range(7)), (4, [3, 0, 6, 5, 1, 2, 0, 4])):
        store = memory_store()
        monkeypatch.setattr(publish, "FINISH_THREADS", threads)
        for index in shards:
            part = {name: column[index * 16 : index * 16 + 16] for name, column in columns.items()}
            publish.write_shard(store, geometry, index, part)
        publish.finish(store, geometry, publish.read_receipts(store), {"source": "x"})
        found.append(objects_of(store))
    assert found[0] == found[1]


class CrashingStore(StoreProxy):
    """A store whose n-th write or deletion never happens, as if the process had been killed there."""

    def __init__(self, store: Store, after: int) -> None:
        super().__init__(store)
        self.left = after

    def put(self, path: str, data: bytes) -> Any:
        self._spend()
        return self.store.put(path, data)

    def delete(self, paths: Any) -> None:
        self._spend()
        self.store.delete(paths)

    def _spend(self) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1


def test_a_crash_at_any_write_of_finish_is_repaired_by_finishing_again(monkeypatch):
    monkeypatch.setattr(publish, "FINISH_THREADS", 1)
    columns, geometry = columns_of(MIXED, 40), geometry_of(MIXED, None, LAYOUT)
    undisturbed = memory_store()
    publish.begin(undisturbed, publish.job_document("convert", MIXED, shards=3))
    write_dataset(undisturbed, columns, geometry)
    expected, crashes = objects_of(undisturbed), 0
    ours = {path.split("/")[1] for path in expected if path.startswith("_streamloader/")}
    assert ours == {"chunks", "lengths", "zarr.json"}
    for after in range(40):
        store = memory_store()
        publish.begin(store, publish.job_document("convert", MIXED, shards=3))
        write_shards(store, geometry, columns)
        try:
            publish.finish(CrashingStore(store, after), geometry, publish.read_receipts(store), {})  # type: ignore[arg-type]
        except KeyboardInterrupt:
            crashes += 1
            if store.head("zarr.json") is None:
                with pytest.raises(errors.IncompleteError, match="3 of 3 shards"):
                    open_root(store)
                publish.finish(store, geometry, publish.read_receipts(store), {})
            else:
                publish.clean(store)
        assert objects_of(store) == expected
    assert 10 < crashes < 40


def test_columns_that_would_be_stored_as_something_else_are_errors():
    store, geometry = memory_store(), geometry_of(MIXED, None, LAYOUT)
    good = columns_of(MIXED, 10)
    for change, message in (
        ({"label": good["label"][:9]}, "lengths"),
        ({"label": good["label"].astype("f8")}, "'label' has float64"),
        ({"image": good["image"][:, :9]}, "'image' has uint8"),
        ({"more": good["label"]}, "columns .*more"),
        (columns_of(MIXED, 17), "lengths"),
        (columns_of(MIXED, 0), "lengths"),
    ):
        with pytest.raises(errors.FieldError, match=message):
            publish.write_shard(store, geometry, 0, good | change)
    assert objects_of(store) == {}


def test_finish_raises_for_missing_shards_and_changed_parts():
    store, geometry = memory_store(), geometry_of(MIXED, None, LAYOUT)
    write_shards(store, geometry, columns_of(MIXED, 40))
    receipts = publish.read_receipts(store)
    with pytest.raises(errors.IncompleteError):
        publish.finish(store, geometry, {i: receipts[i] for i in (0, 2)}, {})
    store.put("_streamloader/parts/1", bytes(len(store.get("_streamloader/parts/1"))))
    with pytest.raises(errors.FormatError, match="parts/1"):
        publish.finish(store, geometry, receipts, {})
    store.delete(["_streamloader/parts/1"])
    with pytest.raises(errors.MissingObjectError, match="parts/1"):
        publish.finish(store, geometry, receipts, {})


def test_small_fields_that_do_not_fit_together_become_aligned_shards(monkeypatch):
    fields = {"vector": Field.parse("float32[64]"), "label": Field.parse("int64"), "image": Field.parse("uint8[1100]")}
    store, columns, geometry = memory_store(), columns_of(fields, 100), geometry_of(fields, None, LAYOUT)
    # the law is about the sum, whatever the limit; the real one would need 256 MB of test data
    monkeypatch.setattr("streamloader.format.geometry.RESIDENT_TOTAL", 1000)
    manifest = write_dataset(store, columns, geometry)
    assert manifest.fields["label"].resident and not manifest.fields["vector"].resident
    assert manifest.fields["vector"].shard == manifest.fields["image"].shard == 16
    for name in fields:
        assert same(read_column(store, name, 0, 100), columns[name])


def test_the_root_of_splits_lists_them_for_zarr_with_their_digests():
    store = memory_store()
    parts = {"train": 50, "val": 7}
    publish.begin(store, publish.job_document("convert", MIXED, splits=parts, shards=5))
    manifests = {
        split: write_dataset(store.child(split), columns_of(MIXED, count), geometry_of(MIXED, count, LAYOUT))
        for split, count in parts.items()
    }
    publish.write_split_root(store, manifests)
    assert store.head("_streamloader/job.json") is None
    for split, count in parts.items():
        assert open_root(store, split).manifest == manifests[split]
        assert open_root(store.child(split)).manifest.num_samples == count
    group = zarr.open_consolidated(zarr.storage.FsspecStore.from_url(store.url))
    assert group["train/label"].shape == (50,) and group["val/label"].shape == (7,)
    document = json.loads(store.get("zarr.json"))
    document["attributes"]["streamloader"]["splits"]["val"]["digest"] = "0" * 64
    store.put("zarr.json", json.dumps(document).encode())
    with pytest.raises(errors.FormatError, match="its manifest gives"):
        open_root(store, "val")


@pytest.mark.parametrize("state", ["finished", "unfinished", "splits", "unfinished splits"])
def test_erasing_takes_a_dataset_and_nothing_else(state):
    store, geometry = memory_store(), geometry_of(MIXED, None, LAYOUT)
    others = dict.fromkeys(("photo.jpg", "image/notes.txt", "other/image/c/0/0", "c/0"), b"x")
    others["other/zarr.json"] = b"{}"
    for path, data in others.items():
        store.put(path, data)
    splits = ["train", "val"] if "splits" in state else []
    publish.begin(store, publish.job_document("convert", MIXED, splits=splits)).close()  # else a thread closes it
    for child in [store.child(split) for split in splits] or [store]:
        write_shards(child, geometry, columns_of(MIXED, 40))
        if not state.startswith("unfinished"):
            publish.finish(child, geometry, publish.read_receipts(child), {})
    if state == "splits":
        publish.write_split_root(store, {split: open_root(store.child(split)).manifest for split in splits})
    with pytest.raises(errors.DestinationError, match="overwrite"):
        publish.check_free(store)
    try:
        publish.erase(CrashingStore(store, 2))  # type: ignore[arg-type]
    except KeyboardInterrupt:
        with pytest.raises((errors.IncompleteError, errors.NotADatasetError)):
            open_root(store)
    publish.begin(store, publish.job_document("writer", MIXED), overwrite=True)
    assert set(objects_of(store)) == {*others, JOB}, "who overwrites holds the place until it writes"
    publish.erase(store)
    assert objects_of(store) == others
    publish.check_free(store)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_zarr_of_others_is_never_overwritten(overwrite):
    store = memory_store()
    store.put("zarr.json", b'{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(errors.DestinationError, match="did not write"):
        publish.begin(store, publish.job_document("writer", MIXED), overwrite)


def test_a_second_writer_at_one_destination_is_an_error():
    store = memory_store()
    claim = publish.begin(store, publish.job_document("writer", MIXED))
    for second in (publish.begin, lambda store, job: publish.Claim(store, job, None)):
        with pytest.raises(errors.DestinationError, match="another run"):
            second(store, publish.job_document("writer", MIXED))
    claim.close()


def test_a_damaged_response_is_not_taken_for_another_run(monkeypatch):
    store, calls = memory_store(), []
    claim = publish.begin(store, publish.job_document("writer", MIXED))

    def damaged(store: Store, path: str) -> bytes:
        calls.append(path)
        found = get_document(store, path)
        return found if len(calls) > 2 else found.replace(b"writer", b"write%d" % len(calls))

    monkeypatch.setattr(publish, "get_document", damaged)
    claim.check()
    assert calls == [JOB] * 3
    store.put(JOB, b"{}")
    assert not claim.held()
    assert calls == [JOB] * 5  # what is there twice is no damage
    store.delete([JOB])
    assert not claim.held()
    claim.close()


@pytest.mark.parametrize(
    ("path", "text", "changed", "read"),
    [
        (JOB, b"x", b"X", opening.read_job),
        (publish.CLAIM, b"generation", b"generatioo", read_claim),
        (ROOT, b"}", b"]", lambda store: opening.read_object(store, ROOT)),
    ],
)
def test_a_damaged_document_is_read_again(path, text, changed, read, monkeypatch):
    store, calls = memory_store(), []
    store.create(path, json.dumps({"generation": 2, "fields": ["x"]}).encode())
    damages = [lambda data: b"\xff" + data[1:], lambda data: data.replace(text, changed)]

    def damaged(store: Store, path: str) -> bytes:
        calls.append(path)
        found = get_document(store, path)
        return damages[len(calls) - 1](found) if len(calls) <= len(damages) else found

    monkeypatch.setattr(opening, "get_document", damaged)
    assert read(store)["fields"] == ["x"]
    del calls[:]
    damages[1:] = [damages[0]] * 2
    with pytest.raises(errors.FormatError, match=rf"{path} is damaged"):
        read(store)
    assert calls == [path] * 3


def test_a_run_that_begins_while_another_overwrites_is_not_taken_over(monkeypatch):
    store, job, claims = memory_store(), publish.job_document("writer", MIXED), []

    def begins(store: Store) -> dict[str, Any]:  # just after the job file was read, which there was not
        monkeypatch.undo()
        claims.append(publish.begin(store, job))
        return {}

    monkeypatch.setattr(publish, "_job", begins)
    with pytest.raises(errors.DestinationError, match="another run"):
        publish.begin(store, job, overwrite=True)
    assert claims[0].held()
    claims[0].close()
