"""Appending: what comes behind is there, and what was there stays as it is for whoever has opened it."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial

import naive_reader
import numpy as np
import pytest
from added import kill_at_each_change
from commands import run
from conversions import Stop, contents, dying, meanwhile, write_photos
from golden import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import streamloader as sl
from streamloader.errors import DestinationError, FieldError, SourceError, UsageError
from streamloader.format import manifest
from streamloader.format.codecs import index_size
from streamloader.format.metadata import dataset_documents, to_bytes
from streamloader.format.publish import (
    CLAIM,
    clean_append,
    erase,
    finish_extension,
    plan_extension,
    prepare_shard,
    publish,
    undo_extension,
)
from streamloader.format.tables import LENGTHS, lengths_path
from streamloader.format.values import to_columns
from streamloader.maintenance import append as append_module
from streamloader.maintenance.append import abandon
from streamloader.storage import open_store
from streamloader.testing import Fault, FaultProxy

SMALL = sl.Layout(
    shard_size=1 << 14, block_size=1 << 11, chunk_size=1 << 11
)  # chunks of 2 of 4 samples in shards of 16
FIELDS = {"n": "int64", "x": "float32[260]", "raw": "bytes", "t": "text", "r": "ragged:int16[2]"}


def columns_of(start, stop):
    numbers = range(start, stop)
    return {
        "n": np.arange(start, stop),
        "x": np.arange(start, stop, dtype="float32")[:, None] * np.arange(260, dtype="float32"),
        "raw": [bytes([i % 256]) * (i % 7 * 40) for i in numbers],
        "t": [f"{i}é" * (i % 5) for i in numbers],
        "r": [np.arange(i % 4 * 2, dtype="int16").reshape(-1, 2) + i for i in numbers],
    }


def assert_holds(found, stop):
    for name, column in columns_of(0, stop).items():
        assert_same(found[name], column)


def written(url, stop, layout, start=0):
    with sl.Writer(url, FIELDS, layout=layout, workers=1) as out:
        out.write_batch(columns_of(start, stop))
    return sl.open(url).manifest


def unpublished(url, stop):
    """Write all samples up to `stop` by the format's own functions; return store, old digest and new manifest."""
    store, base = open_store(url), sl.open(url).manifest
    fields, first = {name: sl.Field.parse(spec) for name, spec in FIELDS.items()}, base.num_samples
    extension = plan_extension(store, base, stop - first)
    receipts = {}
    for shard in reversed(extension.shards):
        low, high = extension.samples(shard)
        part = to_columns(fields, columns_of(first + low, first + high), 0)[1]
        receipts[shard] = prepare_shard(store, extension.geometry, shard, part, extension=extension)()
    return store, base.digest, finish_extension(store, extension, receipts, base.provenance)


def extended(url, stop):
    """Append all samples up to `stop`."""
    store, before, manifest = unpublished(url, stop)
    publish(store, before, manifest)
    clean_append(store)


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=2, max_size=4),
    layout=st.builds(
        sl.Layout,
        samples_per_shard=st.sampled_from([1, 4, 16, 64]),
        block_size=st.sampled_from([1 << 10, 1 << 13]),
        chunk_size=st.sampled_from([1, 1 << 11, 1 << 13]),
        codec=st.sampled_from(["auto", "none", "lz4", "zstd"]),
    ),
)
def test_appends_add_up_and_every_version_stays_readable(tmp_path_factory, sizes, layout):
    folder = tmp_path_factory.mktemp("law") / "data"
    stops = np.cumsum(sizes).tolist()
    written(folder, stops[0], layout)
    opened = [sl.open(folder)]
    for stop in stops[1:]:
        if stop > opened[-1].manifest.num_samples:
            extended(folder, stop)
            opened.append(sl.open(folder))
    for ds in opened:  # their tables and shards are read only now
        assert_holds(ds[:], len(ds))
        assert ds.lengths("r").tolist() == [len(one) for one in columns_of(0, len(ds))["r"]]
    last = opened[-1]
    assert (len(last), last.manifest.generation) == (stops[-1], len(opened))
    for i in range(0, len(last), 7):
        assert last[i]["n"] == i
        assert last[i]["t"] == f"{i}é" * (i % 5)
    manifest, columns = naive_reader.read(folder)
    assert manifest["digest"] == last.digest
    assert_holds(columns, len(last))
    for name, layout_of in last.manifest.fields.items():
        objects = [path.stat().st_size for path in (folder / name / "c").rglob("*") if path.is_file()]
        assert sum(objects) == layout_of.stored
    shutil.rmtree(folder)


# --- whole appends, from sources


def arrays(folder, start, stop):
    """A source with the rows [start, stop)."""
    folder.mkdir(parents=True)
    numbers = np.arange(start, stop)
    np.save(folder / "n.npy", numbers)
    np.save(folder / "x.npy", numbers[:, None] * np.ones((1, 130)))
    return folder


@pytest.fixture
def grow(tmp_path):
    """Append the rows [start, stop)."""

    def add(url, start, stop, **options):
        place = tmp_path / f"from{start}to{stop}"
        return sl.append(url, place if place.exists() else arrays(place, start, stop), **{"workers": 0, **options})

    return add


@pytest.fixture
def data(tmp_path):
    """A dataset of 50 rows."""
    sl.convert(arrays(tmp_path / "first", 0, 50), tmp_path / "data", layout=SMALL, workers=0)
    return tmp_path / "data"


def rows(ds):
    assert np.array_equal(ds[:]["x"][:, 7], ds[:]["n"])
    return ds[:]["n"].tolist()


@pytest.mark.quick(3)
def test_an_append_is_visible_to_new_readers_only(tmp_path, grow, store_url):
    url, options = store_url
    sl.convert(arrays(tmp_path / "a", 0, 50), url, layout=SMALL, workers=0, storage_options=options)
    before = sl.open(url, storage_options=options)
    loader = sl.StreamingDataset(url, batch_size=5, seed=3, storage_options=options)
    batches = iter(loader)
    seen, state = [next(batches)["n"] for _ in range(3)], loader.state_dict()
    report = grow(url, 50, 120, storage_options=options)
    assert (report.before, report.added, report.manifest.generation) == (50, 70, 2)
    seen += [batch["n"] for batch in batches]
    assert sorted(np.concatenate(seen).tolist()) == list(range(50))
    assert rows(before) == list(range(50))
    after = sl.open(url, storage_options=options)
    assert rows(after) == list(range(120))
    assert after.digest == report.manifest.digest != before.digest
    left = {info.path for info in open_store(url, options).list("_streamloader")}
    assert not [path for path in left if "append" in path]
    resumed = sl.StreamingDataset(url, batch_size=5, seed=3, storage_options=options)
    resumed.load_state_dict(state)
    assert [batch["n"].tolist() for batch in resumed] == [numbers.tolist() for numbers in seen[3:]]
    stream = sl.StreamingDataset(url, batch_size=8, seed=3, storage_options=options)
    assert sorted(np.concatenate([batch["n"] for batch in stream]).tolist()) == list(range(120))


def test_selections_read_over_stale_bytes(tmp_path):
    url = tmp_path / "data"
    written(url, 21, SMALL)
    extended(url, 26)
    extended(url, 47)
    assert any(layout.skips for layout in sl.open(url).manifest.fields.values() if not layout.resident)
    stream = sl.StreamingDataset(url, batch_size=1, where="n % 3 == 0", shuffle=False)
    assert [int(batch["n"][0]) for batch in stream] == list(range(0, 47, 3))


def test_the_new_samples_may_be_shuffled(data, grow):
    grow(data, 50, 120, shuffle=4)
    found = rows(sl.open(data))
    assert found[:50] == list(range(50))
    assert sorted(found[50:]) == list(range(50, 120)) != found[50:]


def test_an_empty_source_changes_nothing(data, grow):
    before, report = contents(data), grow(data, 0, 0)
    assert (report.added, report.manifest.num_samples) == (0, 50)
    assert contents(data) == before


def test_an_empty_dataset_is_cut_as_a_conversion_of_what_comes(tmp_path):
    with sl.Writer(tmp_path / "data", {"n": "int64", "x": "float64[130]"}):
        pass
    source = arrays(tmp_path / "b", 0, 2000)
    sl.append(tmp_path / "data", source, workers=0)
    sl.convert(source, tmp_path / "converted", workers=0)
    ds, converted = sl.open(tmp_path / "data"), sl.open(tmp_path / "converted").manifest
    assert rows(ds) == list(range(2000))
    assert (ds.manifest.samples_per_shard, ds.manifest.generation) == (converted.samples_per_shard, 2)
    assert ds.manifest.order == converted.order
    assert converted.order.window > 4 * converted.order.block, "small data is shuffled whole"
    naive_reader.read(tmp_path / "data")


def test_processes_write_the_same_bytes(data, grow, tmp_path):
    shutil.copytree(data, tmp_path / "other")
    grow(data, 50, 120)
    grow(tmp_path / "other", 50, 120, workers=2)
    assert contents(data) == contents(tmp_path / "other")


def test_types_are_cast_other_fields_left_out_and_the_provenance_lists_each_append(data, grow, tmp_path):
    first = sl.open(data).manifest.provenance["source"]
    grow(data, 50, 60)
    source = arrays(tmp_path / "b", 60, 61)
    np.save(source / "n.npy", np.arange(60, 61, dtype="int16"))
    np.save(source / "other.npy", np.arange(1))
    sl.append(data, source, workers=0)
    assert rows(sl.open(data)) == list(range(61))
    provenance = sl.open(data).manifest.provenance
    assert provenance["source"] == first
    assert [one["num_samples"] for one in provenance["appended"]] == [10, 1]
    assert provenance["appended"][1]["source"]["url"] == f"{source}"


# --- fields and classes


def saved(name, array):
    return lambda folder: np.save(folder / f"{name}.npy", array)


WRONG = {
    "missing": (lambda folder: (folder / "x.npy").unlink(), "no field 'x'"),
    "another shape": (saved("x", np.zeros((10, 131))), r"float64\[131\].*cannot become float64\[130\]"),
    "another kind": (saved("n", np.zeros(10)), "'n'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_fields_that_do_not_agree_are_named_and_nothing_is_written(case, data, tmp_path):
    change, message = WRONG[case]
    source = arrays(tmp_path / "b", 50, 60)
    change(source)
    before = contents(data)
    with pytest.raises((FieldError, SourceError), match=message):
        sl.append(data, source, workers=0)
    assert {path: data for path, data in contents(data).items() if "append" not in path} == before
    assert rows(sl.open(data)) == list(range(50))


def test_a_source_that_is_not_a_url_is_an_error_with_its_type(data, tmp_path):
    samples = ({"n": i} for i in range(3))
    calls = (
        lambda: sl.append(data, samples),
        lambda: sl.verify(data, against=samples),
        lambda: sl.export(data, samples, format="npz"),
    )
    for call in calls:
        with pytest.raises(UsageError, match=r"builtins\.generator .* path or a URL .* dataset of their own"):
            call()


def photos(root, kind="png", **classes):
    return write_photos(root, classes, lambda i: (8, 8 + i), f"{{}}.{kind}")


def test_classes_keep_their_numbers_and_new_ones_come_behind(tmp_path):
    sl.convert(photos(tmp_path / "a", bee=2, cat=3), tmp_path / "data", workers=0)
    sl.append(tmp_path / "data", photos(tmp_path / "b", ant=1, cat=2), workers=0)
    ds = sl.open(tmp_path / "data")
    assert ds[:]["label"].tolist() == [0, 0, 1, 1, 1, 2, 1, 1]
    assert ds.manifest.provenance["classes"] == {"label": ["bee", "cat", "ant"]}
    sl.append(tmp_path / "data", photos(tmp_path / "c", ant=1, bee=1), workers=0)
    assert sl.open(tmp_path / "data")[8:]["label"].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("dataset", "source", "numbers"),
    [
        (["crane", "boat", "crane"], ["crane", "boat", "crane"], [0, 1, 2]),
        (["crane", "boat", "crane"], ["boat", "ant"], [1, 3]),
        (["crane", "boat", "crane"], ["boat", "crane", "crane"], None),
        (["crane", "boat", "crane"], ["boat", "crane"], None),
        (["boat", "crane"], ["crane", "boat", "crane"], None),
        (["boat"], ["crane", "boat", "crane"], None),
        (["boat"], ["boat", "crane", "crane"], [0, 1, 2]),
    ],
)
def test_classes_that_share_a_name_are_an_error_unless_their_numbers_are_equal(dataset, source, numbers, tmp_path):
    for name, classes in (("data", dataset), ("source", source)):
        with sl.Writer(tmp_path / name, {"label": "int64"}, provenance={"classes": {"label": classes}}) as out:
            out.write_batch({"label": np.arange(len(classes))})
    if numbers is None:
        with pytest.raises(FieldError, match=r"'label' differ, and several of them are called 'crane'"):
            sl.append(tmp_path / "data", tmp_path / "source", workers=0)
        assert len(sl.open(tmp_path / "data")) == len(dataset)
    else:
        sl.append(tmp_path / "data", tmp_path / "source", workers=0)
        assert sl.open(tmp_path / "data")[len(dataset) :]["label"].tolist() == numbers


def test_images_of_another_format_are_an_error_unless_they_are_encoded_alike(tmp_path):
    sl.convert(photos(tmp_path / "a", "jpg", bee=2), tmp_path / "data", workers=0)
    source = photos(tmp_path / "b", bee=2)
    with pytest.raises(FieldError, match=r"bytes:png .* the dataset has bytes:jpeg"):
        sl.append(tmp_path / "data", source, workers=0)
    sl.append(tmp_path / "data", source, workers=0, quality=90)
    assert all(one.startswith(b"\xff\xd8") for one in sl.open(tmp_path / "data")[:]["image"])
    sl.convert(photos(photos(tmp_path / "c", "jpg", bee=2), "png", cat=2), tmp_path / "mixed", workers=0)
    sl.append(tmp_path / "mixed", source, workers=0)  # any format joins several
    assert sl.open(tmp_path / "mixed").manifest.fields["image"].field.encoding == "mixed"
    assert [one[:4] for one in sl.open(tmp_path / "mixed")[4:]["image"]] == [b"\x89PNG"] * 2


def test_more_than_readers_hold_in_memory_is_an_error(data, grow, monkeypatch):
    monkeypatch.setattr(append_module, "RESIDENT_TOTAL", 450)
    with pytest.raises(DestinationError, match="480 bytes in small fields"):
        grow(data, 50, 60)
    assert not (data / CLAIM).exists()


def test_samples_that_are_too_large_for_the_shards_are_an_error_before_anything_is_written(tmp_path, monkeypatch):
    for name, count, size in (("small", 4096, 50), ("large", 128, 2000), ("larger", 128, 8000), ("one", 1, 600_000)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "x.jsonl").open("w") as file:
            file.writelines(f'{{"t": "{"ab" * (size // 2)}"}}\n' for _ in range(count))
    data = tmp_path / "data"
    sl.convert(tmp_path / "small", data, layout=sl.Layout(samples_per_shard=4096), workers=0)
    before = contents(data)
    monkeypatch.setattr(append_module, "Layout", lambda: replace(sl.Layout(), shard_size=1 << 16))
    message = r"8000 bytes per sample .*, and 50 in the dataset: .* 128 samples would decode to 1024000 bytes, the"
    with pytest.raises(UsageError, match=rf"{message} limit is 524288; .*Mixture"):
        sl.append(data, tmp_path / "larger", workers=0)
    assert contents(data) == before
    assert sl.append(data, tmp_path / "large", workers=0).added == 128
    assert sl.append(data, tmp_path / "one", workers=0).added == 1


# --- splits


def test_one_split_grows_and_the_others_stay(tmp_path, grow):
    data = tmp_path / "data"
    sl.convert(arrays(tmp_path / "a", 0, 50), data, layout=SMALL, split="train=0.8,val=0.2", workers=0)
    before = {name: sl.open(data, split=name) for name in ("train", "val")}
    grow(data, 50, 60, split="train")
    assert sl.open(data, split="train")[:]["n"].tolist()[40:] == list(range(50, 60))
    assert sl.open(data, split="val").digest == before["val"].digest
    assert len(before["train"][:]["n"]) == 40
    for name in ("train", "val"):
        naive_reader.read(data, name)
    with pytest.raises(FieldError, match="splits train, val"):
        grow(data, 50, 60)


# --- kills


@pytest.mark.long
@pytest.mark.parametrize("split", [None, "train"])
def test_an_append_that_is_killed_at_any_change_goes_on_to_the_same_bytes(split, tmp_path, monkeypatch):
    splits = "train=0.8,val=0.2" if split else None
    source = tmp_path / "b"
    written(tmp_path / "a", 50, SMALL), written(source, 75, SMALL, start=50)
    sl.convert(tmp_path / "a", tmp_path / "data", layout=SMALL, split=splits, workers=0)
    shutil.copytree(tmp_path / "data", tmp_path / "whole")
    report = sl.append(tmp_path / "whole", source, split=split, workers=0)
    assert set(report.manifest.lengths) == {"raw", "t", "r"} and sl.verify(tmp_path / "whole").ok
    before, after = (sl.open(tmp_path / name, split=split)[:]["n"].tolist() for name in ("data", "whole"))
    assert (after[: len(before)], len(after)) == (before, len(before) + 25)
    shutil.rmtree(tmp_path / "whole")
    append = partial(sl.append, src=source, split=split, workers=0)
    assert kill_at_each_change(append, tmp_path / "data", split, monkeypatch) > 15


def test_a_kill_of_the_abandoning_is_repaired_by_doing_it_again(data, grow, monkeypatch):
    first = contents(data)
    for changes in range(30):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            dying(patch, 12)
            grow(data, 50, 75)
        killed = True
        with monkeypatch.context() as patch, suppress(Stop):
            dying(patch, changes)
            abandon(data)
            killed = False
        if not killed:
            break
        assert abandon(data)
        assert contents(data) == first
    assert changes > 2
    assert contents(data) == first
    assert not abandon(data)


# --- several at once


def test_a_second_append_raises_and_does_not_disturb_the_first(data, grow):
    def second():
        with pytest.raises(DestinationError, match=r"another append to .* is in progress.*--abandon"):
            grow(data, 50, 60)

    grow(data, 50, 75, progress=meanwhile("write", second, 1))
    assert rows(sl.open(data)) == list(range(75))
    grow(data, 75, 85)
    assert rows(sl.open(data)) == list(range(85))


@pytest.mark.parametrize("phase", ["write", "finish"])
def test_the_same_append_twice_at_once_is_one_append(phase, data, grow):
    inner = []
    report = grow(data, 50, 75, progress=meanwhile(phase, lambda: inner.append(grow(data, 50, 75))))
    assert report.manifest.digest == inner[0].manifest.digest == sl.open(data).digest
    assert (report.before, report.added) == (50, 25)
    assert rows(sl.open(data)) == list(range(75))
    assert not [path for path in contents(data) if "append" in path]


def test_an_append_that_lost_its_claim_does_not_publish(data, grow):
    def take_over():
        assert abandon(data)
        grow(data, 50, 60)

    with pytest.raises(DestinationError, match="another run ended the append"):
        grow(data, 50, 75, progress=meanwhile("write", take_over, 1))
    ds = sl.open(data)
    assert (len(ds), ds.manifest.generation) == (60, 2)


def test_an_append_to_a_version_that_was_replaced_raises(data, grow):
    """The claim is free again, but the dataset is another one than when the append began."""
    with pytest.raises(DestinationError, match=sl.open(data).digest):
        grow(data, 50, 75, progress=meanwhile("scan", lambda: grow(data, 50, 60)))
    assert rows(sl.open(data)) == list(range(60))
    assert not (data / CLAIM).exists()


def test_a_root_that_changed_is_not_replaced(tmp_path):
    written(tmp_path / "data", 10, SMALL)
    store, before, manifest = unpublished(tmp_path / "data", 11)
    with pytest.raises(DestinationError, match=before):
        publish(store, "0" * 64, manifest)
    publish(store, before, manifest)
    publish(store, before, manifest)  # safe to repeat
    assert len(sl.open(tmp_path / "data")) == 11


# --- damage, removal, earlier readers


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda data: data[:-40] + data[-39:], sl.errors.CorruptError),
        (lambda data: b"", sl.errors.CorruptError),
        (lambda data: None, sl.errors.MissingObjectError),
    ],
)
def test_a_damaged_last_shard_is_named_and_nothing_is_published(harm, error, tmp_path):
    url = tmp_path / "data"
    base = written(url, 21, SMALL)
    name = "raw"
    path = url / base.fields[name].shard_key(name, 21 // base.samples_per_shard)
    tail = plan_extension(open_store(url), base, 1).tails[name]
    damaged = harm(path.read_bytes()[: tail.size - index_size(tail.layout.chunks_per_shard)])
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(error, match=f"{name}/c"):
        extended(url, 30)
    assert sl.open(url).digest == base.digest


@pytest.mark.parametrize(("shard", "harm"), [(0, "other"), (1, "flipped"), (1, "missing"), (1, "other")])
def test_a_damaged_table_of_lengths_is_left_out_of_the_new_version(shard, harm, tmp_path):
    url, name = tmp_path / "data", "raw"
    base = written(url, 21, replace(SMALL, samples_per_shard=16))
    page = url / lengths_path(name, shard)
    good, other = page.read_bytes(), (url / lengths_path("t", shard)).read_bytes()
    damaged = {"flipped": good[:-1] + bytes([good[-1] ^ 1]), "other": other, "missing": None}[harm]
    page.unlink() if damaged is None else page.write_bytes(damaged)
    before = contents(url)
    unpublished(url, 40)
    undo_extension(open_store(url), base, False)
    clean_append(open_store(url))
    assert contents(url) == before
    for stop in (40, 41):
        extended(url, stop)
        ds, report = sl.open(url), sl.verify(url)
        assert_holds(ds[:], stop)
        assert (set(ds.manifest.lengths), report.problems) == ({"t", "r"}, ())
        assert ds.lengths("t").tolist() == [len(text.encode()) for text in columns_of(0, stop)["t"]]
    naive_reader.read(url)


def test_a_dataset_without_lengths_gets_none_from_an_append_unless_it_is_empty(tmp_path):
    for count, lengths in ((21, {}), (0, {"raw", "t", "r"})):
        url = tmp_path / f"{count}"
        base = written(url, count, SMALL)
        shutil.rmtree(url / LENGTHS, ignore_errors=True)
        (url / "zarr.json").write_bytes(to_bytes(dataset_documents(replace(base, lengths={}))[""]))
        assert sl.verify(url).ok
        extended(url, 30)
        assert set(sl.open(url).manifest.lengths) == set(lengths)
        assert sl.verify(url).ok and (url / LENGTHS).exists() == bool(lengths)


def test_erase_removes_all_versions_and_an_append_under_way(data, grow, monkeypatch):
    grow(data, 50, 60)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        dying(patch, 9)
        grow(data, 60, 90)
    assert (data / CLAIM).exists()
    assert rows(sl.open(data)) == list(range(60))
    erase(open_store(data))
    assert not contents(data)


def test_an_appended_dataset_is_an_error_for_earlier_readers(data, grow, monkeypatch):
    grow(data, 50, 60)
    monkeypatch.setattr(manifest, "KNOWN_REQUIREMENTS", frozenset())
    with pytest.raises(sl.errors.VersionError, match="requires append"):
        sl.open(data)


def test_too_many_skips_are_an_error(data, grow):
    grow(data, 50, 60)
    raw = json.loads((data / "zarr.json").read_text())["attributes"]["streamloader"]
    raw["fields"]["x"]["skips"] = [[shard, 0, 1] for shard in range(manifest.MAX_SKIPS + 1)]
    with pytest.raises(sl.errors.FormatError, match=f"{manifest.MAX_SKIPS + 1} skips of x"):
        manifest.read_manifest(raw, "here")


# --- the command


def test_the_command_appends_and_prints_the_new_version(data, tmp_path, capsys):
    source = arrays(tmp_path / "b", 50, 75)
    status, out, _ = run(capsys, "append", data, source, "--workers", 0)
    assert (status, "appended 25 samples" in out, "version 2 has 75" in out) == (0, True, True)
    assert "version 2, 75 samples" in run(capsys, "inspect", data)[1]
    assert "no append is under way" in run(capsys, "append", data, "--abandon")[1]
    for wrong in ([data], [data, source, "--abandon"]):
        assert "SRC, or --abandon" in run(capsys, "append", *wrong)[2]


PASSING = ["500", "503", "reset", "lost"]


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_an_append_and_a_conversion_outlive_a_fault_of_each_conditional_put(fault, header, moto, tmp_path):
    """Of the claim and of the root: after a lost response, what is stored decides."""
    np.save(tmp_path / "x.npy", np.arange(40))
    url = moto.url()
    with FaultProxy(moto.endpoint) as proxy:
        options = {**moto.storage_options, "endpoint_url": proxy.endpoint, "retry": {"base_seconds": 0.01}}
        if header == "If-None-Match":
            proxy.faults = [Fault(fault, header=header, times=1)]
        sl.convert(tmp_path / "x.npy", url, storage_options=options, workers=1)
        converted = proxy.counts[fault]
        assert converted or header == "If-Match", "no such request was made"
        proxy.faults = [Fault(fault, header=header, times=1)]
        report = sl.append(url, tmp_path / "x.npy", storage_options=options, workers=1)
        assert proxy.counts[fault] > converted, "no such request was made"
    assert (report.before, report.added) == (40, 40)
    found = sl.open(url, storage_options=moto.storage_options)
    np.testing.assert_array_equal(np.concatenate([found[i]["x"][None] for i in range(80)]), [*range(40)] * 2)
