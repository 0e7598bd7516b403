"""Fields that are added to a dataset: new versions have them, and what was there stays as it is."""

import json
import shutil

import jsonschema
import naive_reader
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import transform_tasks
from added import COUNT, FIELDS, SMALL, add, base_columns, given_columns, new_columns, written
from amounts import examples
from commands import run
from conversions import Stop, contents, dying, meanwhile
from golden import V1, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import streamloader as sl
from streamloader.errors import DestinationError, FieldError, SourceError, UsageError
from streamloader.format.geometry import Geometry, Schema, add_layouts
from streamloader.format.manifest import Field, FieldLayout, Manifest, OrderPin
from streamloader.format.publish import (
    Extension,
    clean_append,
    erase,
    finish,
    finish_fields,
    prepare_shard,
    publish,
    write_shard,
)
from streamloader.maintenance import columns as columns_module
from streamloader.maintenance.append import abandon
from streamloader.maintenance.columns import match_rows
from streamloader.storage import open_store

PINNED = "e0bb81bc0206ffffc6d996531df1867066e22155c52f04bcb701324cd4ceb5ec"


@pytest.fixture
def data(tmp_path):
    return written(tmp_path / "data", FIELDS, base_columns(0, COUNT))


@pytest.mark.long
@settings(max_examples=5)
@given(steps=st.lists(st.sampled_from([0, 1, 7, 20]), min_size=1, max_size=4), first=st.sampled_from([1, 15, 16, 33]))
def test_fields_and_samples_add_up_and_every_version_stays_readable(tmp_path_factory, steps, first):
    """A step of 0 adds a field, any other one that many samples."""
    folder = tmp_path_factory.mktemp("law")
    fields, wanted, opened = {"n": "int64"}, [], []

    def column(name, stop, start=0):
        numbers = np.arange(start, stop)
        return numbers if name == "n" else [f"{name}{i}" for i in numbers]

    count, url = first, folder / "data"
    written(url, fields, {"n": column("n", count)})
    for step in [None, *steps]:
        if step:
            part = {name: column(name, count + step, count) for name in fields}
            sl.append(url, written(folder / f"part{len(opened)}", fields, part), workers=0)
            count += step
        elif step == 0:
            name = f"f{len(fields)}"
            sl.add_columns(url, {name: column(name, count)}, workers=0)
            fields |= {name: "text"}
        wanted.append({name: column(name, count) for name in fields})
        opened.append(sl.open(url))
    for number, (ds, columns) in enumerate(zip(opened, wanted, strict=True), 1):
        for found in (ds, sl.open(url, version=number)):
            assert set(found.fields) == set(columns)
            for name, values in found[:].items():
                assert_same(values, columns[name])
    for name, values in naive_reader.read(url)[1].items():
        assert_same(values, wanted[-1][name])
    assert sl.verify(url).problems == ()
    shutil.rmtree(folder)


def test_the_digest_of_a_version_with_added_fields_is_that_of_the_specification(tmp_path):
    """Pinned, since data that was published is read by every later version; nothing is compressed."""
    store, order = open_store(tmp_path), OrderPin(4, 1, 16)
    sizes = {"wave": (4, 8, False), "boxes": (2, 8, False), "label": (8, 16, True)}
    kinds = {"wave": "int16[3]", "boxes": "ragged:int32[2]", "label": "uint32"}
    layouts = {
        name: FieldLayout(Field.parse(kinds[name]), *pair, "none", held) for name, (*pair, held) in sizes.items()
    }
    values = {
        "wave": np.arange(33, dtype="int16").reshape(11, 3),
        "boxes": [np.arange(i % 3 * 2, dtype="int32").tobytes() for i in range(11)],
        "label": np.arange(11, dtype="uint32") * 13,
    }
    first = Geometry(8, order, {"wave": layouts.pop("wave")}, SMALL)
    shards = {shard: {name: column[8 * shard : 8 * shard + 8] for name, column in values.items()} for shard in range(2)}
    receipts = {shard: write_shard(store, first, shard, {"wave": part.pop("wave")}) for shard, part in shards.items()}
    base = finish(store, first, receipts, {})
    extension = Extension(Manifest(0, 8, layouts, base.order), 11)
    for shard, part in shards.items():
        receipts[shard] = prepare_shard(store, extension.geometry, shard, part, extension=extension)()
    publish(store, base.digest, finish_fields(store, base, extension, receipts, {}))
    clean_append(store)
    found, columns = naive_reader.read(tmp_path)
    assert_same(columns["wave"], values["wave"])
    assert [item.tobytes() for item in columns["boxes"]] == values["boxes"]
    assert_same(columns["label"], values["label"])
    assert (found["requires"], set(found["lengths"])) == (["append"], {"boxes"})
    jsonschema.Draft202012Validator(json.loads((V1 / "manifest.schema.json").read_text())).validate(found)
    assert found["digest"] == sl.open(tmp_path).digest == PINNED


@pytest.mark.long
def test_a_split_gets_fields_and_the_others_stay(tmp_path, data):
    sl.convert(data, tmp_path / "parts", split="a=0.6,b=0.4", layout=SMALL, workers=0)
    before = sl.open(tmp_path / "parts", split="b").digest
    sl.add_columns(tmp_path / "parts", {"score": np.arange(30)}, split="a", workers=0)
    assert sl.open(tmp_path / "parts", split="a")[:]["score"].tolist() == list(range(30))
    assert sl.open(tmp_path / "parts", split="b").digest == before
    assert naive_reader.read(tmp_path / "parts", "a")[0]["generation"] == 2
    assert sl.verify(tmp_path / "parts").ok


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", [None, ["x"]])
def test_a_state_from_before_fields_were_added_goes_on_without_them(fields, data):
    options = {"batch_size": 8, "with_index": True, "num_workers": 0, "fields": fields and iter(fields)}
    before = sl.NumpyDataset(data, **options)
    batches = iter(before)
    next(batches)
    state, left = before.state_dict(), list(batches)
    sl.add_columns(data, given_columns(COUNT), workers=0)
    after = sl.NumpyDataset(data, **options | {"fields": fields})
    assert ("score" in after.fields) is (fields is None)
    after.load_state_dict(state)
    again = list(after)
    assert len(again) == len(left)
    for one, other in zip(again, left, strict=True):
        assert {*one} == {*other}
        assert all(np.array_equal(one[name], other[name]) for name in one if not isinstance(one[name], list))


@pytest.mark.long
def test_samples_that_are_appended_later_have_the_added_fields(data, tmp_path):
    sl.add_columns(data, given_columns(COUNT), workers=0)
    fields = FIELDS | {name: str(field) for name, field in sl.open(data).fields.items()}
    more = written(tmp_path / "more", fields, {**base_columns(50, 75), **new_columns(75, 50)})
    sl.append(data, more, workers=0)
    for name, column in {**base_columns(0, 75), **new_columns(75)}.items():
        assert_same(sl.open(data)[:][name], column)
    with pytest.raises(FieldError, match="caption"):
        sl.append(data, written(tmp_path / "old", FIELDS, base_columns(0, 5)), workers=0)
    changes = [version.change for version in sl.log(data)]
    assert changes == ["appended 25 samples", "columns added: caption, raw, score, tokens, vector", "created"]


def test_the_rest_of_a_dataset_still_compares_with_its_source(tmp_path):
    np.save(tmp_path / "n.npy", np.arange(9))
    sl.convert(tmp_path / "n.npy", tmp_path / "data", workers=0)
    sl.add_columns(tmp_path / "data", {"score": np.arange(9)}, workers=0)
    report = sl.verify(tmp_path / "data", against=tmp_path / "n.npy")
    assert (report.ok, report.compared) == (True, 9)


# --- files


def table(path, **columns):
    pa.parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.long
def test_the_rows_of_a_file_are_the_samples_in_order(data, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(COUNT))
    sl.add_columns(data, {"other": tmp_path / "a.npy"}, workers=0)
    two = table(tmp_path / "two.parquet", a=range(COUNT), b=[f"b{i}" for i in range(COUNT)], c=range(COUNT))
    sl.add_columns(data, {"a=float32": two, "b": str(two), "here": np.arange(COUNT)}, workers=0)
    ds = sl.open(data)
    assert (str(ds.fields["a"]), set(ds.fields)) == ("float32", {*FIELDS, "other", "a", "b", "here"})
    assert all((sample["n"], f"b{i}") == (i, sample["b"]) for i, sample in enumerate(ds[i] for i in range(COUNT)))
    for name in ("a", "other", "here"):
        assert ds[:][name].tolist() == list(range(COUNT))


KEYS = {
    "a number": ("n", lambda i: i),
    "text": ("t", lambda i: f"s{i}" * (i % 3 + 1)),
    "the sample number": ("index", lambda i: i),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in KEYS), ("text", 2)])
def test_a_file_is_joined_by_a_key(kind, workers, data, tmp_path):
    on, key = KEYS[kind]
    numbers = np.random.default_rng(1).permutation(COUNT + 20).tolist()
    columns = {on: [key(i) for i in numbers], "v": [i * 10 for i in numbers], "w": [f"w{i}" for i in numbers]}
    path = table(tmp_path / "t.parquet", **columns)
    sl.add_columns(data, {"v": path, "w": path}, on=on, workers=workers)
    assert sl.open(data)[:]["v"].tolist() == [i * 10 for i in range(COUNT)]
    assert sl.open(data)[:]["w"] == [f"w{i}" for i in range(COUNT)]
    assert sl.open(data).manifest.provenance["columns_added"][0]["on"] == on


@pytest.mark.long
def test_samples_with_equal_keys_get_the_same_row(tmp_path):
    sl.convert({"k": np.arange(40) % 3}, tmp_path / "data", workers=0)
    path = table(tmp_path / "t.parquet", k=[2, 0, 1], name=["two", "zero", "one"])
    sl.add_columns(tmp_path / "data", {"name": path}, on="k", workers=0)
    assert sl.open(tmp_path / "data")[:]["name"] == [("zero", "one", "two")[i % 3] for i in range(40)]


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 30)), st.permutations(range(31)), st.booleans())
def test_each_key_gets_its_row(wanted, found, text):
    keys = [
        np.array([f"{i}".encode() if text else i for i in each], object if text else np.int64)
        for each in (wanted, found)
    ]
    rows = match_rows(*keys, "the key")
    assert [found[row] for row in rows] == wanted


def test_keys_are_compared_without_rounding():
    large = np.array([2**60, 2**60 + 1], np.uint64)
    assert match_rows(large.astype(np.int64), large[::-1], "the key").tolist() == [1, 0]


def keyed(keys):
    return lambda folder: ({"v": table(folder / "t.parquet", n=keys, v=range(len(keys)))}, {"on": "n"})


WRONG = {
    "missing keys": (keyed(range(5, 50)), FieldError, "'n' of .* lacks the keys 0, 1, 2 and 2 more"),
    "a key twice": (keyed([*range(50), 7]), FieldError, "has the key 7 in several rows"),
    "another type": (keyed([f"{i}" for i in range(50)]), FieldError, "text on one side and a number on the other"),
    "no such key": (lambda f: (keyed(range(50))(f)[0], {"on": "id"}), FieldError, "no field 'id'"),
    "no key": (
        lambda f: ({"v": table(f / "t.parquet", x=[0.5] * 50, v=range(50))}, {"on": "x"}),
        FieldError,
        r"field 'x' of .* is float32\[260\].*one number or text",
    ),
    "too few rows": (
        lambda f: ({"v": table(f / "t.parquet", v=range(49))}, {}),
        FieldError,
        "49 rows, .* has 50 samples",
    ),
    "too few values": (lambda f: ({"v": np.arange(49)}, {}), FieldError, "49 values, .* has 50 samples"),
    "a field that exists": (lambda f: ({"x": np.arange(50)}, {}), UsageError, "has a field x already"),
    "a name twice": (lambda f: ({"v": [1] * 50, "v=int8": [1] * 50}, {}), UsageError, "named twice"),
    "two names in one": (lambda f: ({"v,w": [1] * 50}, {}), UsageError, "one name each"),
    "a wrong name": (lambda f: ({"V": [1] * 50}, {}), FieldError, "'V' is invalid"),
    "no column": (lambda f: ({}, {}), UsageError, "a dict of names"),
    "another value": (lambda f: ({"v": 3}, {}), UsageError, "'v' is a value of type int"),
    "a column that the file lacks": (
        lambda f: ({"v": table(f / "t.parquet", a=range(50), b=range(50))}, {}),
        FieldError,
        "'v'",
    ),
    "another column than the only one": (
        lambda f: ({"v": table(f / "t{}.parquet", a=range(50))}, {}),
        FieldError,
        "'v'",
    ),
    "braces in a name": (lambda f: ({"v": table(f / "t{}.parquet", v=range(9))}, {}), FieldError, r"t{}\S* has 9 rows"),
    "a function that raises": (lambda f: ({"v": lambda batch: 1 / 0}, {}), SourceError, "ZeroDivisionError"),
    "a function without the field": (lambda f: ({"v": lambda batch: {"w": batch["n"]}}, {}), FieldError, "'v'"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_added_is_an_error_and_changes_nothing(case, data, tmp_path):
    make, kind, message = WRONG[case]
    columns, options = make(tmp_path)
    before = contents(data)
    with pytest.raises(kind, match=message):
        add(data, columns, **options)
    assert contents(data) == before


def test_an_empty_dataset_gets_no_fields(tmp_path):
    with sl.Writer(tmp_path / "data", FIELDS):
        pass
    with pytest.raises(UsageError, match="has no samples"):
        sl.add_columns(tmp_path / "data", {"v": []})


# --- functions


@pytest.mark.long
def test_a_function_computes_fields_from_batches_of_samples(data, tmp_path):
    calls = []

    def measured(batch):
        calls.append(len(batch["n"]))
        return transform_tasks.measured(batch)

    sl.add_columns(data, {"size": measured, "twice": measured, "batch": measured}, batch_size=6, workers=0)
    ds = sl.open(data)
    assert ds[:]["size"].tolist() == [len(text) for text in base_columns(0, COUNT)["t"]]
    assert ds[:]["twice"].tolist() == [2 * i for i in range(COUNT)]
    assert ds[:]["batch"].tolist() == [6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 4, 4, 4, 4] * 3 + [2, 2]
    assert max(calls) == 6


# --- geometry


def planned(base, size, kind="float32"):
    field = Field("tensor", kind, (size // 4,))
    schema = Schema({"new": field}, {"new": "none"}, {"new": float(size)}, {"new": float(size)})
    return add_layouts(base, schema)


def manifest_of(samples, size, chunk, shard, block):
    layout = FieldLayout(Field("bytes"), chunk, shard, "none", False, samples * size, samples * size)
    return Manifest(samples, shard, {"old": layout}, OrderPin(block, 1, 4 * block))


def test_a_field_that_changes_little_keeps_the_blocks():
    base = manifest_of(1 << 20, 4096, 256, 1 << 14, 1 << 10)  # blocks of 4 MiB
    assert planned(base, 2048).order == base.order
    assert planned(base, 2048).fields["new"].shard == 1 << 14


def test_blocks_shrink_for_a_field_that_is_much_larger_as_far_as_chunks_allow():
    base = manifest_of(1 << 20, 256, 1 << 12, 1 << 18, 1 << 14)
    assert planned(base, 8).order.block == 1 << 14, "it is in memory"
    new = planned(base, 1 << 14)
    assert new.order.block == 1 << 12
    assert new.order.block % new.fields["new"].chunk == 0


def test_shards_of_a_dataset_in_memory_are_chosen_for_the_new_field():
    resident = FieldLayout(Field("tensor", "int64"), 1 << 17, 1 << 20, "none", True, 8 << 20, 8 << 20)
    base = Manifest(1 << 20, 1 << 23, {"old": resident}, OrderPin(1, 64, 4))
    new = planned(base, 4096)
    assert (new.samples_per_shard, new.order.block) == (1 << 14, 1 << 10)
    assert planned(base, 8).samples_per_shard == 1 << 23, "it is in memory too"


def test_what_readers_hold_in_memory_stays_within_its_limit():
    resident = FieldLayout(Field("tensor", "uint8", (250,)), 64, 64, "none", True, 250 * 10**6, 1)
    base = Manifest(10**6, 64, {"old": resident}, OrderPin(1, 1, 4))
    assert not planned(base, 8).fields["new"].resident
    assert planned(base, 4).fields["new"].resident


def test_a_field_that_is_too_large_for_the_shards_is_an_error(data, monkeypatch):
    monkeypatch.setattr(columns_module, "GROWTH", 0.0001)
    before = contents(data)
    with pytest.raises(
        UsageError, match=r"'v' has 8000 bytes per sample: a shard of 16 samples would decode to 128000"
    ):
        sl.add_columns(data, {"v": np.zeros((COUNT, 1000))}, workers=0)
    assert contents(data) == before


# --- kills, and several at once


def test_one_addition_or_append_at_a_time(data, tmp_path):
    more = written(tmp_path / "more", FIELDS, base_columns(50, 60))

    def second():
        for other in (lambda: sl.append(data, more, workers=0), lambda: add(data, {"other": np.arange(COUNT)})):
            with pytest.raises(DestinationError, match=r"another append to .* is in progress.*--abandon"):
                other()

    add(data, {"score": np.arange(COUNT)}, meanwhile("write", second, 1))
    assert set(sl.open(data).fields) == {*FIELDS, "score"}


def test_the_same_addition_twice_at_once_is_one(data):
    columns, inner = {"score": np.arange(COUNT)}, []
    report = add(data, columns, meanwhile("write", lambda: inner.append(add(data, columns))))
    assert report.manifest.digest == inner[0].manifest.digest == sl.open(data).digest
    assert not [path for path in contents(data) if "append" in path]


def test_an_addition_that_lost_its_claim_does_not_publish(data):
    def take_over():
        assert abandon(data)
        add(data, {"other": np.arange(COUNT)})

    with pytest.raises(DestinationError, match="another run ended the append"):
        add(data, {"score": np.arange(COUNT)}, meanwhile("write", take_over, 1))
    assert (set(sl.open(data).fields), sl.open(data).manifest.generation) == ({*FIELDS, "other"}, 2)


def test_erase_removes_what_an_addition_has_written(data, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Stop):
        dying(patch, 9)
        sl.add_columns(data, given_columns(COUNT), workers=0)
    assert any(path.startswith("vector/") for path in contents(data))
    erase(open_store(data))
    assert not contents(data)


def test_a_claim_of_anybody_removes_nothing_else(data):
    (data / "mine" / "c").mkdir(parents=True)
    (data / "mine" / "note.txt").write_text("x")
    claim = {"generation": 2, "fields": ["mine", "n", "../up", 3]}
    (data / "_streamloader" / "append.json").write_text(json.dumps(claim))
    before = {path: body for path, body in contents(data).items() if "append" not in path}
    assert abandon(data)
    assert contents(data) == before


# --- the command


def test_the_command_adds_the_columns_of_a_file(data, tmp_path, capsys):
    path = table(tmp_path / "t.parquet", n=range(COUNT), a=range(COUNT), b=[f"{i}" for i in range(COUNT)])
    status, out, err = run(capsys, "append", data, path, "--fields", "a=int16,b", "--on", "n", "--workers", 0)
    assert (status, "added the fields a, b to" in out, "version 2 has 50" in out) == (0, True, True), err
    assert str(sl.open(data).fields["a"]) == "int16"
    assert "columns added: a, b" in run(capsys, "log", data)[1]
    assert "--on without --fields" in run(capsys, "append", data, path, "--on", "n")[2]
    assert "--shuffle with --fields" in run(capsys, "append", data, path, "--fields", "a", "--shuffle", 1)[2]
