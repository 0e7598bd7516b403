"""Laws of random access: what numpy slicing would give, few requests, and one clear error for anything broken."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from amounts import examples
from format_data import ALL_KINDS, Counting, columns_of, equal, geometry_of, memory_store, public, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader import errors
from streamloader.format import tables
from streamloader.format.dataset import Dataset
from streamloader.format.dataset import open as open_dataset
from streamloader.format.manifest import Field
from streamloader.format.opening import Opened, open_root
from streamloader.format.publish import write_split_root
from streamloader.options import Layout
from streamloader.storage import open_store
from streamloader.storage.store import Store

LAYOUT = Layout(samples_per_shard=16, chunk_size=256, block_size=512)
COUNT = 77


def public_columns(count: int) -> dict[str, Any]:
    return {name: public(ALL_KINDS[name], column) for name, column in columns_of(ALL_KINDS, count).items()}


def make(count: int = COUNT, fields: dict[str, Field] = ALL_KINDS) -> Store:
    store = memory_store()
    write_dataset(store, columns_of(fields, count), geometry_of(fields, count, LAYOUT))
    return store


STORE = make()
COLUMNS = public_columns(COUNT)
DATASET = open_dataset(STORE.url)


@given(st.integers(-COUNT, COUNT - 1))
@settings(max_examples=30, deadline=None)
def test_a_sample_is_the_row_of_every_column(index):
    sample = DATASET[index]
    assert set(sample) == set(ALL_KINDS)
    for name, value in sample.items():
        assert equal(value, COLUMNS[name][index]), name


@given(st.one_of(st.none(), st.integers(-100, 100)), st.one_of(st.none(), st.integers(-100, 100)))
@settings(max_examples=examples(30), deadline=None)
def test_a_slice_is_the_slice_of_every_column(start, stop):
    found = DATASET[start:stop]
    for name, column in found.items():
        assert equal(column, COLUMNS[name][start:stop]), name


def test_samples_have_the_types_that_are_documented():
    sample = DATASET[np.int64(3)]
    assert isinstance(sample["scalar"], np.int64) and isinstance(sample["image"], np.ndarray)
    assert isinstance(sample["blob"], bytes) and isinstance(sample["words"], str)
    assert sample["boxes"].shape[1:] == (4,) and sample["boxes"].dtype == np.float32
    assert sample["tokens"].ndim == 1
    sample["image"][:] = 7
    assert equal(DATASET[3]["image"], COLUMNS["image"][3])  # a caller's changes stay the caller's


def test_values_that_no_writer_of_ours_writes_name_field_and_sample():
    fields = {"t": Field("text"), "r": Field.parse("ragged:int32[2]")}
    store = memory_store()
    broken = {"t": [b"fine", b"\xff"], "r": [b"12345678", b"12345"]}
    write_dataset(store, broken, geometry_of(fields, None, LAYOUT))
    ds = open_dataset(store.url)
    assert ds[0]["t"] == "fine" and ds[0]["r"].shape == (1, 2)
    for read in (lambda: ds[1], lambda: ds.read("t", 0, 2), lambda: ds.read("r", 0, 2)):
        with pytest.raises(errors.DecodeError, match=r"field '[tr]' of sample 1 is not"):
            read()


def test_a_dataset_has_length_fields_url_digest_and_repr():
    assert len(DATASET) == COUNT and DATASET.fields == {name: ALL_KINDS[name] for name in sorted(ALL_KINDS)}
    assert DATASET.url == STORE.url and DATASET.splits == () and DATASET.digest == DATASET.manifest.digest
    assert f"{COUNT} samples" in repr(DATASET)
    assert [int(sample["scalar"]) for sample in DATASET] == COLUMNS["scalar"].tolist()  # by IndexError at the end


@pytest.mark.parametrize("pages", [1, 256])
def test_lengths_are_those_of_the_samples_in_rows_or_bytes(pages, monkeypatch):
    monkeypatch.setattr(tables, "PAGES", pages)
    assert {name for name, field in ALL_KINDS.items() if not field.fixed} == set(DATASET.manifest.lengths)
    for name in DATASET.manifest.lengths:
        wanted = [len(one.encode() if isinstance(one, str) else one) for one in COLUMNS[name]]
        assert equal(DATASET.lengths(name), np.array(wanted, np.int64)), name


def test_a_table_of_lengths_that_is_damaged_is_its_error_and_is_not_needed_for_samples():
    store, page = make(), "_streamloader/lengths/words/c/1"
    data, other = store.get(page), store.get("_streamloader/lengths/boxes/c/1")
    damaged = (
        *((data[:size], errors.CorruptError) for size in (0, 3, 4, 5, len(data) - 1)),
        (None, errors.MissingObjectError),
    )
    for damage, kind in ((other, errors.ModifiedError), (data + b"x", errors.CorruptError), *damaged):
        store.delete([page]) if damage is None else store.put(page, damage)
        with pytest.raises(kind, match=r"the table of lengths .*/lengths/words"):
            open_dataset(store.url).lengths("words")
        assert equal(open_dataset(store.url)[20]["words"], COLUMNS["words"][20])


def test_wrong_reads_are_errors():
    for index in (COUNT, -COUNT - 1, 10**20):
        with pytest.raises(IndexError):
            DATASET[index]
    with pytest.raises(errors.FieldError, match="no field 'nope'"):
        DATASET.read("nope", 0, 1)
    with pytest.raises(errors.FieldError, match="no field 'nope'"):
        DATASET.lengths("nope")
    with pytest.raises(errors.FieldError, match=r"of field 'image'; its samples all have the shape \(40, 33\)"):
        DATASET.lengths("image")
    with pytest.raises(errors.FieldError, match="of field 'words'; run streamloader lengths URL"):
        Dataset(Opened(replace(DATASET.manifest, lengths={}), STORE, ())).lengths("words")
    with pytest.raises(IndexError):
        DATASET.read("image", 0, COUNT + 1)
    with pytest.raises(errors.UsageError, match="step 2"):
        DATASET[::2]
    with pytest.raises(TypeError):
        DATASET["image"]  # type: ignore[index]


@pytest.mark.quick(1)
@pytest.mark.parametrize("count", [0, 1])
def test_nothing_and_one_sample_can_be_read(count):
    ds = open_dataset(make(count).url)
    assert len(ds) == count and len(list(ds)) == count
    assert equal(ds[:]["boxes"], public_columns(count)["boxes"]) and ds[:]["image"].shape == (count, 40, 33)
    assert ds.lengths("boxes").tolist() == [len(one) for one in ds[:]["boxes"]]


def counted(store: Store, flip: int = 0) -> tuple[Dataset, Counting]:
    opened = open_root(store)
    counting = Counting(store, flip)
    return Dataset(Opened(opened.manifest, counting, ())), counting  # type: ignore[arg-type]


def test_neighbouring_samples_cost_one_request_a_chunk():
    ds, counting = counted(STORE)
    for i in range(COUNT):
        ds[i]
    assert len(counting.reads) == sum(-(-COUNT // layout.chunk) for layout in ds.manifest.fields.values())
    counting.reads.clear()
    ds.read("image", 0, 16)
    assert len(counting.reads) == 1


def test_a_transfer_that_was_damaged_once_is_fetched_again():
    ds, counting = counted(STORE, flip=1)
    assert equal(ds.read("image", 0, 16), COLUMNS["image"][:16]) and len(counting.reads) == 2
    ds, counting = counted(STORE, flip=3)
    with pytest.raises(errors.CorruptError, match="image/c/0/0/0"):
        ds.read("image", 0, 16)


def test_threads_may_share_a_dataset():
    ds, wrong = open_dataset(STORE.url), list[int]()

    def look(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(0, COUNT, 30).tolist():
            if any(not equal(value, COLUMNS[name][i]) for name, value in ds[i].items()):
                wrong.append(i)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(look, range(4)))
    assert wrong == []


def test_a_dataset_survives_pickling_before_and_after_use(tmp_path):
    write_dataset(open_store(tmp_path), columns_of(ALL_KINDS, COUNT), geometry_of(ALL_KINDS, COUNT, LAYOUT))
    ds = open_dataset(tmp_path)
    for _ in range(2):
        again = pickle.loads(pickle.dumps(ds))
        assert again.digest == ds.digest and equal(again[5]["words"], COLUMNS["words"][5])
        ds[5]


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:this process was forked")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_reads_with_clients_of_its_own(s3):
    url, options = s3.url(), s3.storage_options
    fields = {"image": ALL_KINDS["image"]}
    columns = columns_of(fields, COUNT)
    write_dataset(open_store(url, options), columns, geometry_of(fields, COUNT, LAYOUT))
    ds = open_dataset(url, storage_options=options)
    assert equal(ds[3]["image"], columns["image"][3])
    child = os.fork()
    if child == 0:
        right = False
        try:
            right = equal(ds[40]["image"], columns["image"][40]) and equal(ds[3:9]["image"], columns["image"][3:9])
        finally:
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert equal(ds[50]["image"], columns["image"][50])


@pytest.mark.quick(3)
def test_splits_open_by_name(store_url):
    url, options = store_url
    store, fields = open_store(url, options), {"x": Field.parse("int64"), "t": Field("text")}
    manifests = {
        split: write_dataset(store.child(split), columns_of(fields, count), geometry_of(fields, count, LAYOUT))
        for split, count in (("train", 20), ("val", 5))
    }
    write_split_root(store, manifests)
    ds = open_dataset(url, split="val", storage_options=options)
    assert ds.splits == ("train", "val") and len(ds) == 5 and ds.url.endswith("/val")
    assert equal(ds[:]["x"], columns_of(fields, 5)["x"])
    for wrong, split, message in (
        (url, None, "splits train, val; no split was given"),
        (url, "test", "'test' is not one of them"),
        (f"{url}/train", "train", "has no splits, but split='train' was given"),
    ):
        with pytest.raises(errors.FieldError, match=message):
            open_dataset(wrong, split=split, storage_options=options)


@pytest.mark.quick(2)
def test_broken_datasets_are_one_clear_error_on_every_store(store_url):
    url, options = store_url
    with pytest.raises(errors.NotADatasetError, match="no dataset at") as missing:
        open_dataset(url, storage_options=options)
    assert str(missing.value).count("zarr.json") == 1 or url.startswith("memory:")  # fsspec's text
    fields = {"image": Field.parse("uint8[1100]")}
    store = open_store(url, options)
    write_dataset(store, columns_of(fields, 64), geometry_of(fields, None, LAYOUT, "none"))
    shard = store.get("image/c/1/0")
    flipped = bytearray(shard)
    flipped[5000] ^= 16
    page = "_streamloader/chunks/image/c/0/0/0"
    table = store.get(page)
    for path, data, kind, message in (
        ("image/c/1/0", shard[:3000], errors.CorruptError, "image/c/1/0"),
        ("image/c/1/0", b"", errors.CorruptError, "image/c/1/0"),
        ("image/c/1/0", bytes(flipped), errors.CorruptError, r"chunk 4 of .*image/c/1/0 \(samples 20 to 20\)"),
        ("image/c/1/0", None, errors.MissingObjectError, "image/c/1/0"),
        *((page, data, errors.CorruptError, page) for data in (table[:-9], b"", table + b"x")),
        (page, None, errors.MissingObjectError, page),
    ):
        if data is None:
            store.delete([path])
        else:
            store.put(path, data)
        ds = open_dataset(url, storage_options=options)
        assert path == page or ds[0]["image"].shape == (1100,)
        reads = (lambda ds=ds: ds[20], lambda ds=ds: ds[0:64], lambda ds=ds: ds.read("image", 10, 30))
        for read in reads[: 1 if path == page else 3]:
            with pytest.raises(kind, match=message) as caught:
                read()
            assert isinstance(caught.value, errors.StreamloaderError) and "\n" not in str(caught.value)
