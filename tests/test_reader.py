"""Laws of reading: requests cover the samples exactly, and nothing damaged, missing or hostile gets through."""

import copy
import hashlib
import json
from dataclasses import replace

import crc32c
import numpy as np
import pytest
from amounts import examples
from format_data import (
    CODECS,
    StoreProxy,
    columns_of,
    geometry_of,
    memory_store,
    read_column,
    read_picks,
    same,
    some_fields,
    write_dataset,
    write_shards,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader import errors
from streamloader.format.manifest import Field, FieldLayout, Manifest, OrderPin, read_manifest
from streamloader.format.opening import open_root
from streamloader.format.publish import begin, job_document
from streamloader.format.reader import FieldReader
from streamloader.format.tables import encode_pages, rows_per_page
from streamloader.options import Layout
from streamloader.storage.buffers import LRUCache

SMALL = Layout(samples_per_shard=16, chunk_size=64, block_size=256)
IMAGES = {"image": Field.parse("uint8[1100]"), "blob": Field.parse("bytes")}


def dataset(count=50, fields=None, codec="none"):
    store, fields = memory_store(), fields or IMAGES
    return store, write_dataset(store, columns_of(fields, count), geometry_of(fields, None, SMALL, codec))


def edit(store, change):
    """Change the manifest, and state the digest that fits, as an attacker would."""
    document = json.loads(store.get("zarr.json"))
    attributes = document["attributes"]["streamloader"]
    change(attributes)
    try:
        read_manifest(copy.deepcopy(attributes), store.url)
    except errors.FormatError as error:
        found = str(error).rsplit("its content gives ", 1)
        if len(found) == 2:
            attributes["digest"] = found[1][:64]
    store.put("zarr.json", json.dumps(document).encode())


@pytest.mark.long
@given(some_fields, st.integers(0, 70), st.sampled_from(CODECS), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_any_range_and_any_choice_of_samples_read_as_they_were_written(fields, count, codec, gaps, data):
    store, columns = memory_store(), columns_of(fields, count)
    layout = Layout(samples_per_shard=data.draw(st.sampled_from([1, 4, 16, 64])), chunk_size=40, block_size=200)
    known = data.draw(st.sampled_from([None, count]))
    manifest = write_dataset(store, columns, geometry_of(fields, known, layout, codec))
    assert open_root(store).manifest == manifest
    kinds = st.sampled_from((st.sets, st.lists))  # each once, or perhaps several times
    picks = np.array(sorted(data.draw(data.draw(kinds)(st.integers(0, count - 1), min_size=1)))) if count else []
    with pytest.MonkeyPatch.context() as patch:
        if not gaps:  # else all of them are so small that they are read along
            patch.setattr("streamloader.format.reader.GAP_BYTES", 0)
        for name, column in columns.items():
            start = data.draw(st.integers(0, count))
            stop = data.draw(st.integers(start, count))
            assert same(read_column(store, name, start, stop, data.draw(st.integers(1, 400))), column[start:stop])
            if count:
                expected = column[picks] if isinstance(column, np.ndarray) else [column[i] for i in picks]
                assert same(read_picks(store, name, picks), expected)


def test_chunks_without_a_chosen_sample_are_read_only_where_they_are_small():
    store, manifest = dataset(200)
    (name, layout), *_ = manifest.fields.items()
    reader = FieldReader(store, manifest, name)
    far = np.array([0, 199])
    assert sum(run.num_samples for run in reader.runs_of(far)) > 2 * layout.chunk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamloader.format.reader.GAP_BYTES", 0)
        assert all(run.num_samples <= layout.chunk for run in reader.runs_of(far))
        assert [run.first_row for run in reader.runs_of(far, 7)] == [7, 8]
    assert reader.runs_of(np.array([], np.int64)) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_no_damaged_bit_states_much_more_memory_than_the_samples_need(codec):
    store, manifest = dataset(fields={"blob": Field.parse("bytes")}, codec=codec)
    reader = FieldReader(store, manifest, "blob")
    (run,) = reader.runs(0, 16, 1 << 20)
    body = bytes(reader.request(run)())
    needed = reader.decoded_bytes(run, memoryview(body))
    assert needed > 0
    for bit in range(8 * len(body)):
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        assert reader.decoded_bytes(run, memoryview(damaged)) <= 2 * max(needed, reader.decoded_size([run]))


@given(st.integers(1, 200), st.integers(1, 3000), st.data())
@settings(max_examples=examples(30), deadline=None)
def test_runs_are_complete_adjacent_chunks_within_the_limit(count, max_bytes, data):
    store, manifest = dataset(count)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    for name, layout in manifest.fields.items():
        runs = FieldReader(store, manifest, name).runs(start, stop, max_bytes)
        first, last = runs[0].first_sample, runs[-1].first_sample + runs[-1].num_samples
        assert first == start - start % layout.chunk and stop <= last < stop + layout.chunk
        assert sum(run.num_samples for run in runs) == last - first
        assert all(run.stop - run.start == run.sizes.sum() for run in runs)
        assert all(run.stop - run.start <= max_bytes or len(run.sizes) == 1 for run in runs)


def test_a_table_that_claims_more_than_the_field_has_is_an_error_before_any_request():
    store, manifest = dataset()
    layout = manifest.fields["image"]
    entries = np.full((4, layout.chunks_per_shard, 2), 2**32 - 1, "<u4").tobytes()
    path = "_streamloader/chunks/image/c/0/0/0"
    for table, error, message in (
        (entries, errors.FormatError, "the whole field has"),
        (bytes(len(entries)), errors.MissingObjectError, "absent"),
    ):
        store.put(path, table + crc32c.crc32c(table).to_bytes(4, "little"))
        with pytest.raises(errors.ModifiedError, match=path):
            FieldReader(store, manifest, "image").runs(0, 1)
        hostile = replace(manifest, tables={**manifest.tables, "image": hashlib.sha256(table).hexdigest()})
        with pytest.raises(error, match=message):
            FieldReader(store, hostile, "image").runs(0, 1)


def test_table_pages_are_read_once_and_only_those_that_are_needed():
    asked = []

    class Counting(StoreProxy):
        def get_fixed(self, path, size, *, fresh):
            asked.append(path)
            return self.store.get_fixed(path, size, fresh=fresh)

    count = 1024 * 130  # 8 KiB of table a shard: 128 shards a page
    layout = FieldLayout(Field("bytes"), 1, 1024, "none", resident=False, stored=2**40)
    entries = np.full((130, 1024, 2), 8, np.uint32)
    store = memory_store()
    for i, page in enumerate(encode_pages(entries, rows_per_page(layout, count))):
        store.put(f"_streamloader/chunks/x/c/{i}/0/0", page)
    reader = FieldReader(Counting(store), Manifest(count, 1024, {"x": layout}, OrderPin(1, 1, 2)), "x")
    assert asked == []
    for start in (0, 5000, 1024 * 127):
        reader.runs(start, start + 10)
    assert asked == ["_streamloader/chunks/x/c/0/0/0"]
    reader.runs(1024 * 129, 1024 * 130)
    assert asked[1:] == ["_streamloader/chunks/x/c/1/0/0"]


def test_shards_of_finished_and_unfinished_splits_are_counted_together():
    store = memory_store()
    begin(store, job_document("convert", IMAGES, splits=["train", "val"], shards=5))
    write_dataset(store.child("train"), columns_of(IMAGES, 48), geometry_of(IMAGES, None, SMALL))
    write_shards(store.child("val"), geometry_of(IMAGES, None, SMALL), columns_of(IMAGES, 16))
    with pytest.raises(errors.IncompleteError, match="has 4 of 5 shards"):
        open_root(store)


def _field(attributes, **change):
    attributes["fields"]["image"].update(change)


HOSTILE = {  # further ones are in formats/streamloader/v1/bad
    "true samples": lambda a: a.update(num_samples=True),
    "fields as a list": lambda a: a.update(fields=[]),
    "a chunk of nothing": lambda a: _field(a, chunk=0),
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
    "requires as text": lambda a: a.update(requires="x"),
    "splits as a list": lambda a: a.update(splits=[1]),
}


@pytest.mark.quick(9)
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_one_clear_error(what):
    store, _ = dataset(5)
    edit(store, HOSTILE[what])
    with pytest.raises((errors.FormatError, errors.FieldError)) as caught:
        open_root(store, "train" if "splits" in what else None)
    assert store.url in str(caught.value) and "\n" not in str(caught.value)


ROOT_STORE, ROOT_MANIFEST = dataset(5)


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_a_root_with_any_value_replaced_opens_as_it_was_or_is_an_error(data):
    store = memory_store()
    document = json.loads(ROOT_STORE.get("zarr.json"))
    node = document
    while isinstance(node, dict) and node:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or data.draw(st.integers(0, 3)) == 0:
            junk = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
            node[key] = data.draw(junk)
            break
        node = node[key]
    store.put("zarr.json", json.dumps(document).encode())
    try:
        assert open_root(store).manifest.digest == ROOT_MANIFEST.digest
    except errors.StreamloaderError as error:
        assert isinstance(error, errors.FormatError), error


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=40), st.integers(1, 10), st.integers(1, 3))
def test_a_cache_holds_the_values_used_last_that_fit_its_limit(uses, limit, least):
    cache, kept = LRUCache[int, int](limit, least), dict[int, int]()  # with its size, least recently used first
    for key, size in uses:
        kept[key] = kept.pop(key, size)
        assert cache.add(key, size, size) == kept[key]
        while sum(kept.values()) > limit and len(kept) > least:
            del kept[next(iter(kept))]
    assert [cache.get(key) for key in range(6)] == [kept.get(key) for key in range(6)]
    for key in list(kept)[:1]:
        assert cache.add(key, 9, 9, replace=True) == 9 and cache.get(key) == 9
