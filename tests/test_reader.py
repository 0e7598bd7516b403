"""Laws of reading: requests cover the samples exactly, and nothing damaged, missing or hostile gets through."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import replace
from typing import Any

import crc32c
import numpy as np
import pytest
from format_data import (
    ALL_KINDS,
    CODECS,
    columns_of,
    fields,
    geometry_of,
    memory_store,
    read_column,
    read_picks,
    same,
    write_dataset,
    write_shards,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import (
    CorruptError,
    FieldError,
    FormatError,
    IncompleteError,
    MissingObjectError,
    ModifiedError,
    NotADatasetError,
    StreamloaderError,
    VersionError,
)
from streamloader.format.destination import write_job
from streamloader.format.manifest import Field, FieldLayout, Manifest
from streamloader.format.parse import manifest_from_json
from streamloader.format.reader import FieldReader, field_reader, open_manifest
from streamloader.format.table import ChunkTable, encode_pages, rows_per_page
from streamloader.options import Layout
from streamloader.storage.protocol import Store

SMALL = Layout(samples_per_shard=16, chunk_size=64, block_size=256)
IMAGES = {"image": Field.parse("uint8[1100]"), "blob": Field.parse("bytes")}


def dataset(count: int = 50, fields: dict[str, Field] | None = None, codec: str = "none") -> tuple[Store, Manifest]:
    store, fields = memory_store(), fields or IMAGES
    geometry = geometry_of(fields, None, SMALL, codec)
    return store, write_dataset(store, columns_of(fields, count), geometry)


def poke(store: Store, path: str, at: int, flip: int = 1) -> None:
    data = bytearray(store.get(path))
    data[at] ^= flip
    store.put(path, bytes(data))


def edit(store: Store, change: Any) -> None:
    """Change the manifest, and state the digest that fits, as an attacker would."""
    document = json.loads(store.get("zarr.json"))
    attributes = document["attributes"]["streamloader"]
    change(attributes)
    try:
        open_manifest_of(attributes, store)
    except FormatError as error:
        found = str(error).rsplit("its content gives ", 1)
        if len(found) == 2:
            attributes["digest"] = found[1][:64]
    store.put("zarr.json", json.dumps(document).encode())


def open_manifest_of(attributes: dict[str, Any], store: Store) -> Manifest:
    return manifest_from_json(copy.deepcopy(attributes), store.url)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), fields, min_size=1),
    st.integers(0, 70),
    st.sampled_from(CODECS),
    st.one_of(st.none(), st.just(0)),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_range_of_any_field_reads_as_it_was_written(
    fields: dict[str, Field], count: int, codec: str, known: int | None, data: st.DataObject
) -> None:
    store, columns = memory_store(), columns_of(fields, count)
    layout = Layout(samples_per_shard=data.draw(st.sampled_from([1, 4, 16, 64])), chunk_size=40, block_size=200)
    manifest = write_dataset(store, columns, geometry_of(fields, known if known is None else count, layout, codec))
    assert open_manifest(store)[0] == manifest
    for name in fields:
        start = data.draw(st.integers(0, count))
        stop = data.draw(st.integers(start, count))
        assert same(read_column(store, name, start, stop, data.draw(st.integers(1, 400))), columns[name][start:stop])


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), fields, min_size=1),
    st.integers(1, 70),
    st.sampled_from(CODECS),
    st.booleans(),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_choice_of_samples_reads_as_it_was_written(
    fields: dict[str, Field], count: int, codec: str, gaps: bool, data: st.DataObject
) -> None:
    store, columns = memory_store(), columns_of(fields, count)
    layout = Layout(samples_per_shard=data.draw(st.sampled_from([4, 16, 64])), chunk_size=40, block_size=200)
    write_dataset(store, columns, geometry_of(fields, count, layout, codec))
    picks = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    with pytest.MonkeyPatch.context() as patch:
        if not gaps:  # else all of them are so small that they are read along
            patch.setattr("streamloader.format.reader.GAP_BYTES", 0)
        for name, column in columns.items():
            expected = column[picks] if isinstance(column, np.ndarray) else [column[i] for i in picks]
            assert same(read_picks(store, name, picks), expected)


def test_chunks_without_a_chosen_sample_are_read_only_where_they_are_small() -> None:
    store, manifest = dataset(200)
    (name, layout), *_ = manifest.fields.items()
    reader = field_reader(store, manifest, name)
    far = np.array([0, 199])
    assert sum(run.num_samples for run in reader.runs_of(far)) > 2 * layout.chunk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamloader.format.reader.GAP_BYTES", 0)
        assert all(run.num_samples <= layout.chunk for run in reader.runs_of(far))
        assert [run.place for run in reader.runs_of(far, 7)] == [7, 8]
    assert reader.runs_of(np.array([], np.int64)) == []


@given(st.integers(1, 200), st.integers(1, 3000), st.data())
@settings(max_examples=30, deadline=None)
def test_runs_are_whole_neighbouring_chunks_within_the_limit(count: int, max_bytes: int, data: st.DataObject) -> None:
    store, manifest = dataset(count)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    for name, layout in manifest.fields.items():
        runs = field_reader(store, manifest, name).runs(start, stop, max_bytes)
        assert runs[0].first_sample <= start < runs[0].first_sample + layout.chunk
        assert runs[-1].first_sample + runs[-1].num_samples >= stop
        for run, after in zip(runs, [*runs[1:], None], strict=True):
            assert run.stop - run.start == run.sizes.sum() and run.first_sample % layout.chunk == 0
            assert run.stop - run.start <= max_bytes or len(run.sizes) == 1
            if after is not None:
                assert after.first_sample == run.first_sample + run.num_samples
                assert after.shard != run.shard or after.start == run.stop
                assert after.shard != run.shard or run.stop - run.start + after.sizes[0] > max_bytes


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_byte_of_a_chunk_is_an_error_that_names_object_and_chunk(codec: str) -> None:
    store, manifest = dataset(codec=codec)
    for name, layout in manifest.fields.items():
        path = layout.shard_key(name, 1)
        size = len(store.get(path)) - 16 * layout.chunks_per_shard - 4
        for at in {*range(0, size, max(1, size // 25)), size - 1}:
            poke(store, path, at)
            with pytest.raises(CorruptError, match=rf"chunk \d+ of {store.url}/{path} \(samples \d+ to \d+\)"):
                read_column(store, name, 0, 50)
            poke(store, path, at)
    assert same(read_column(store, "image", 0, 50), columns_of(IMAGES, 50)["image"])


def test_a_truncated_shard_is_an_error_that_names_it() -> None:
    store, manifest = dataset()
    path = manifest.fields["image"].shard_key("image", 1)
    store.put(path, store.get(path)[:500])
    with pytest.raises(CorruptError, match=rf"{path} .*500 of 17664 bytes came"):
        read_column(store, "image", 16, 32)


def test_a_missing_shard_is_an_error_and_never_zeros() -> None:
    store, manifest = dataset()
    path = manifest.fields["image"].shard_key("image", 2)
    store.delete([path])
    with pytest.raises(MissingObjectError, match=path):
        read_column(store, "image", 0, 50)
    assert len(read_column(store, "image", 0, 32)) == 32


def test_a_shard_of_another_conversion_is_called_modified() -> None:
    store, manifest = dataset()
    other, _ = dataset(64)
    for name in IMAGES:
        path = manifest.fields[name].shard_key(name, 1)
        store.put(path, other.get(manifest.fields[name].shard_key(name, 2)))
        with pytest.raises(ModifiedError, match=rf"{path}.*modified"):
            read_column(store, name, 16, 32)


def test_a_table_that_is_missing_cut_or_damaged_is_an_error() -> None:
    store, _ = dataset()
    path = "_streamloader/chunks/image/c/0/0/0"
    whole = store.get(path)
    poke(store, path, 3)
    with pytest.raises(CorruptError, match=path):
        read_column(store, "image", 0, 1)
    for data in (whole[:-1], whole + b"x", b""):
        store.put(path, data)
        with pytest.raises(CorruptError, match=path):
            read_column(store, "image", 0, 1)
    store.delete([path])
    with pytest.raises(MissingObjectError, match=path):
        read_column(store, "image", 0, 1)


def test_a_table_that_claims_more_than_the_field_has_is_refused_before_any_request() -> None:
    store, manifest = dataset()
    layout = manifest.fields["image"]
    entries = np.full((4, layout.chunks_per_shard, 2), 2**32 - 1, "<u4").tobytes()
    path = "_streamloader/chunks/image/c/0/0/0"
    for table, error, said in (
        (entries, FormatError, "the whole field has"),
        (bytes(len(entries)), MissingObjectError, "absent"),
    ):
        store.put(path, table + crc32c.crc32c(table).to_bytes(4, "little"))
        with pytest.raises(ModifiedError, match=path):
            field_reader(store, manifest, "image").runs(0, 1)
        hostile = replace(manifest, tables={**manifest.tables, "image": hashlib.sha256(table).hexdigest()})
        with pytest.raises(error, match=said):
            field_reader(store, hostile, "image").runs(0, 1)


def test_table_pages_are_read_once_and_only_those_that_are_needed() -> None:
    class Counting:
        def __init__(self, store: Store) -> None:
            self.store, self.url, self.asked = store, store.url, list[str]()

        def get_range(self, path: str, start: int, stop: int) -> bytes:
            self.asked.append(path)
            return self.store.get_range(path, start, stop)

    count = 1024 * 130  # 8 KiB of table a shard: 128 shards a page
    layout = FieldLayout(Field("bytes"), 1, 1024, "none", resident=False, stored=2**40)
    entries = np.full((130, 1024, 2), 8, np.uint32)
    store = memory_store()
    for i, page in enumerate(encode_pages(entries, rows_per_page(layout, count))):
        store.put(f"_streamloader/chunks/x/c/{i}/0/0", page)
    counting = Counting(store)
    table = ChunkTable(counting, "x", layout, count)  # type: ignore[arg-type]
    reader = FieldReader(store, "x", layout, count, table)
    assert counting.asked == []
    for start in (0, 5000, 1024 * 127):
        reader.runs(start, start + 10)
    assert counting.asked == ["_streamloader/chunks/x/c/0/0/0"]
    reader.runs(1024 * 129, 1024 * 130)
    assert counting.asked[1:] == ["_streamloader/chunks/x/c/1/0/0"]


def test_unknown_fields_and_ranges_are_refused() -> None:
    store, manifest = dataset()
    with pytest.raises(FieldError, match=r"'nope'.*blob, image"):
        field_reader(store, manifest, "nope")
    with pytest.raises(IndexError):
        field_reader(store, manifest, "image").runs(0, 51)


def test_nothing_a_foreign_zarr_and_damaged_json_are_told_apart() -> None:
    store = memory_store()
    with pytest.raises(NotADatasetError, match="no dataset at memory://"):
        open_manifest(store)
    store.put("zarr.json", b'{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(NotADatasetError, match="not a streamloader dataset"):
        open_manifest(store)
    for damaged in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        store.put("zarr.json", damaged)
        with pytest.raises(FormatError, match="damaged"):
            open_manifest(store)


def test_an_unfinished_conversion_says_how_far_it_is_and_how_to_go_on() -> None:
    store = memory_store()
    write_job(store, "convert", IMAGES, shards=12)
    geometry = geometry_of(IMAGES, None, SMALL)
    write_shards(store, geometry, columns_of(IMAGES, 48))
    with pytest.raises(IncompleteError, match=r"has 3 of 12 shards.*same convert command"):
        open_manifest(store)
    other = memory_store()
    write_job(other, "writer", IMAGES)
    with pytest.raises(IncompleteError, match=r"has 0 shards.*overwrite"):
        open_manifest(other)


def test_shards_of_finished_and_unfinished_splits_are_counted_together() -> None:
    store = memory_store()
    write_job(store, "convert", IMAGES, splits=["train", "val"], shards=5)
    write_dataset(store.child("train"), columns_of(IMAGES, 48), geometry_of(IMAGES, None, SMALL))
    write_shards(store.child("val"), geometry_of(IMAGES, None, SMALL), columns_of(IMAGES, 16))
    with pytest.raises(IncompleteError, match="has 4 of 5 shards"):
        open_manifest(store)


def test_later_versions_and_unknown_requirements_are_refused() -> None:
    for change, said in (
        ({"version": 2}, "format version 2, this streamloader reads up to 1"),
        ({"requires": ["generations"]}, "requires generations"),
    ):
        store, _ = dataset(5)
        edit(store, lambda attributes, change=change: attributes.update(change))
        with pytest.raises(VersionError, match=said):
            open_manifest(store)
    store, manifest = dataset(5)
    edit(store, lambda attributes: attributes.update({"later": 1}))
    assert open_manifest(store)[0] == manifest  # other unknown keys are ignored


def _field(attributes: dict[str, Any], **change: Any) -> None:
    attributes["fields"]["image"].update(change)


HOSTILE = {
    "many samples": lambda a: a.update(num_samples=10**18),
    "samples as text": lambda a: a.update(num_samples="50"),
    "true samples": lambda a: a.update(num_samples=True),
    "no fields": lambda a: a.pop("fields"),
    "fields as a list": lambda a: a.update(fields=[]),
    "a climbing name": lambda a: (
        a["fields"].update({"../../etc": a["fields"]["image"]}),
        a["tables"].update({"../../etc": a["tables"]["image"]}),
    ),
    "an absolute name": lambda a: (
        a["fields"].update({"/etc": a["fields"]["image"]}),
        a["tables"].update({"/etc": a["tables"]["image"]}),
    ),
    "a huge chunk": lambda a: _field(a, chunk=2**40, shard=2**40),
    "a huge shard": lambda a: (_field(a, chunk=1, shard=2**40), a.update(samples_per_shard=2**40)),
    "a chunk of nothing": lambda a: _field(a, chunk=0),
    "a chunk that does not divide": lambda a: _field(a, chunk=3),
    "another shard": lambda a: _field(a, shard=64),
    "a huge shape": lambda a: _field(a, shape=[2**31, 2**31]),
    "a negative shape": lambda a: _field(a, shape=[-1]),
    "an object dtype": lambda a: _field(a, dtype="object"),
    "an unknown codec": lambda a: _field(a, codec="pickle"),
    "an unknown kind": lambda a: _field(a, kind="pickle"),
    "kind as a list": lambda a: _field(a, kind=[]),
    "codec as a list": lambda a: _field(a, codec=[]),
    "resident as a number": lambda a: _field(a, resident=1),
    "wrong bytes": lambda a: _field(a, nbytes=7),
    "a table too many": lambda a: a["tables"].update({"other": "0" * 64}),
    "a table hash as a number": lambda a: a["tables"].update({"image": 7}),
    "no order": lambda a: a.pop("order"),
    "a block of 0": lambda a: a["order"].update(block=0),
    "no digest": lambda a: a.pop("digest"),
    "a surrogate": lambda a: _field(a, encoding="\ud800"),
    "a float": lambda a: a.update(samples_per_shard=1e300),
    "requires as text": lambda a: a.update(requires="x"),
    "splits as a list": lambda a: a.update(splits=[1]),
    "climbing splits": lambda a: a.update(splits={"..": {}}),
    "splits of nothing": lambda a: a.update(splits={"train": {}}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_one_clear_error(what: str) -> None:
    store, _ = dataset(5)
    edit(store, HOSTILE[what])
    with pytest.raises((FormatError, FieldError)) as caught:
        open_manifest(store, "train" if "splits" in what else None)
    assert store.url in str(caught.value) and "\n" not in str(caught.value)


def _root() -> tuple[bytes, Manifest]:
    store, manifest = dataset(5)
    return store.get("zarr.json"), manifest


ROOT = _root()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_root_with_any_value_replaced_opens_as_it_was_or_is_an_error(data: st.DataObject) -> None:
    store, manifest = memory_store(), ROOT[1]
    document = json.loads(ROOT[0])
    node: Any = document
    while isinstance(node, dict) and node:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or data.draw(st.integers(0, 3)) == 0:
            junk = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
            node[key] = data.draw(junk)
            break
        node = node[key]
    store.put("zarr.json", json.dumps(document).encode())
    try:
        assert open_manifest(store)[0].digest == manifest.digest
    except StreamloaderError as error:
        assert isinstance(error, FormatError), error


def test_an_edited_manifest_is_refused_with_both_digests() -> None:
    store, manifest = dataset(5)
    text = store.get("zarr.json").replace(b'"num_samples": 5', b'"num_samples": 4').replace(b"5500", b"4400")
    store.put("zarr.json", text)
    with pytest.raises(FormatError, match=f"says digest {manifest.digest}, its content gives"):
        open_manifest(store)


def test_every_kind_reads_through_every_path() -> None:
    store, _ = dataset(77, ALL_KINDS)
    columns = columns_of(ALL_KINDS, 77)
    for name in ALL_KINDS:
        assert same(read_column(store, name, 0, 77), columns[name]), name
        assert same(read_column(store, name, 15, 33), columns[name][15:33]), name
