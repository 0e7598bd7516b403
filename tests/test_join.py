"""`sl.Join`: the samples of one dataset with the fields that another one has for them, as joined by hand."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import commands
import numpy as np
import pytest
import torch
import videos
from added import SMALL
from amounts import examples
from datasets import flat, seen, take
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bad_samples import damage, jpeg

import streamloader as sl
from streamloader.errors import FieldError, MixtureError, SelectionError, StateError, UsageError
from streamloader.format.keys import find_rows
from streamloader.format.reader import FieldReader
from streamloader.loader import join as join_module
from streamloader.loader.dataset import NumpyMixture
from streamloader.pytorch.dataset import StreamingDataset

N = 96
LANES = sl.Shuffle(lanes=6)  # for 1, 2 and 3 ranks
LEFT = {"id": "int64", "name": "text", "x": "float32[260]"}
RIGHT = {
    **{"id": "int64", "key": "text", "score": "float64", "vector": "float32[300]", "large": "float32[5000]"},
    **{"caption": "text", "tokens": "ragged:int32", "image": "bytes:jpeg"},
}
pytestmark = pytest.mark.usefixtures("two_workers")


def left_value(name: str, i: int) -> Any:
    return {"id": i, "name": f"k{i}", "x": np.full(260, i, np.float32)}[name]


def right_value(name: str, i: int) -> Any:
    values: dict[str, Callable[[], Any]] = {
        **{"id": lambda: i, "key": lambda: f"k{i}", "score": lambda: i / 2},
        **{"vector": lambda: np.full(300, i, np.float32), "large": lambda: np.full(5000, i, np.float32)},
        **{"caption": lambda: f"{i}é" * (i % 4), "tokens": lambda: np.full(i % 5, i, np.int32)},
        "image": lambda: jpeg(i),
    }
    return values[name]()


def write(path: Path, fields: Mapping[str, str], value: Callable[[str, int], Any], ids: Any) -> Path:
    with sl.Writer(path, dict(fields), layout=SMALL, workers=1) as out:
        for i in map(int, ids):
            out.write({name: value(name, i) for name in fields})
    return path


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples 0 to N - 1, in order."""
    return write(tmp_path_factory.mktemp("join") / "left", LEFT, left_value, range(N))


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples and some more in another order, with fields of every kind."""
    order = np.random.default_rng(3).permutation(N + 20)
    return write(tmp_path_factory.mktemp("join") / "right", RIGHT, right_value, order)


def check_values(batch: Mapping[str, Any]) -> list[int]:
    """Check that each row has the values of its sample on both sides; return the valid samples."""
    ids = np.asarray(batch["id"]).tolist()
    for row, i in enumerate(ids):
        for name in LEFT.keys() & batch.keys():
            assert np.array_equal(batch[name][row], left_value(name, i)), (name, i)
        for name in RIGHT.keys() & batch.keys() - {"tokens", "id"}:
            assert np.array_equal(batch[name][row], right_value(name, i)), (name, i)
    if "tokens" in batch:
        parts = np.split(np.asarray(batch["tokens"]), np.asarray(batch["tokens_offsets"])[1:-1])
        assert [part.tolist() for part in parts] == [[i] * (i % 5) for i in ids]
    valid = np.asarray(batch.get("valid", np.ones(len(ids), bool)))
    return [i for i, each in zip(ids, valid, strict=True) if each]


def stream(url: Any, batch: int = 16, **options: Any) -> StreamingDataset:
    return StreamingDataset(url, batch_size=batch, with_index=True, **{"world": (0, 1), **options})


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on", ["id", ("name", "key")])
def test_each_sample_has_the_fields_of_its_key_on_both_sides(on, workers, left, right):
    names = None if on == "id" else [name for name in RIGHT if name not in ("id", "key")]
    ds = stream(sl.Join(left, right, on=on, fields=names), num_workers=workers)
    assert ds.fields.keys() == LEFT.keys() | RIGHT.keys() - ({"key"} if names else set())
    for _ in range(2):
        assert sorted(flat(map(check_values, ds))) == [*range(N)]
    assert ds.stats().samples == 2 * N
    ds.close()


keys = st.sampled_from([("int64", int), ("uint8", int), ("text", str), ("bytes", lambda i: b"%d" % i)])


@settings(max_examples=examples(12), deadline=None)
@given(
    keys,
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.permutations(range(41)),
    st.sampled_from([None, slice(None, None, 2), "n < 20"]),
    st.sets(st.integers(0, 59), max_size=9),
    st.booleans(),
)
def test_any_keys_join_as_by_hand(tmp_path_factory, key, ids, order, where, excluded, shuffle):
    """Several samples of the left side may have one key, and not all of the right one are used."""
    folder, (kind, make) = tmp_path_factory.mktemp("law"), key
    with sl.Writer(folder / "a", {"k": kind, "n": "int64"}, layout=SMALL, workers=1) as out:
        out.write_batch({"k": [make(i) for i in ids], "n": np.arange(len(ids))})
    with sl.Writer(folder / "b", {"k": kind, "v": "float32[300]", "t": "text"}, layout=SMALL, workers=1) as out:
        out.write_batch(
            {
                "k": [make(i) for i in order],
                "v": np.array(order, np.float32)[:, None] * np.ones(300, np.float32),
                "t": [f"t{i}" for i in order],
            }
        )
    numbers = range(20) if where == "n < 20" else range(0, len(ids), 1 if where is None else 2)
    numbers = [n for n in numbers if n < len(ids)]
    expected = [(n, f"t{ids[n]}", ids[n]) for n in numbers if n not in excluded]
    given_options = {"where": where, "exclude": sorted(excluded & {*range(len(ids))}), "shuffle": shuffle}
    if not expected:
        return
    ds = sl.NumpyDataset(
        sl.Join(folder / "a", folder / "b", on="k"), batch_size=7, remainder="uneven", num_workers=0, **given_options
    )
    rows = [
        (int(n), text, int(vector[299]))
        for batch in ds
        for n, text, vector in zip(batch["n"], batch["t"], batch["v"], strict=True)
    ]
    assert sorted(rows) == expected
    if not shuffle:
        assert rows == expected


@settings(max_examples=examples(100))
@given(st.data())
def test_rows_of_samples_in_any_order_are_those_of_reading_them_one_by_one(right, data):
    from streamloader.format.opening import open_root
    from streamloader.storage import open_store

    manifest, store, _ = open_root(open_store(right))
    reader = FieldReader(store, manifest, data.draw(st.sampled_from(["vector", "score"])))
    samples = np.array(data.draw(st.lists(st.integers(0, N + 19), min_size=1, max_size=50)))
    first = data.draw(st.integers(0, 9))
    out = np.zeros((len(samples), *reader.layout.field.shape), reader.layout.field.dtype)
    runs, rows = reader.runs_at(samples, first), list[int]()
    if data.draw(st.booleans()):
        runs = [part for run in runs for part in reader.split(run)]
    for run in runs:
        reader.load(run, reader.request(run), out, first)
        rows += reader.bad_rows(run, first, first + len(samples))
    assert sorted(rows) == list(range(len(samples)))
    assert np.array_equal(out, reader.read(0, N + 20)[samples])  # type: ignore[index]


def test_without_a_key_sample_i_is_joined_to_sample_i(left, tmp_path):
    right = write(tmp_path / "right", {"score": "float64", "caption": "text"}, right_value, range(N))
    ds = stream(sl.Join(left, right))
    assert flat(map(check_values, ds)) == seen(stream(left))
    assert ds._datasets[0].joined[0][1] is None
    same = stream(sl.Join(left, right, on="index"))
    assert same._datasets[0].joined[0][1] is None  # the numbers are those of the left side, which take no memory
    short = write(tmp_path / "short", {"score": "float64"}, right_value, range(N - 1))
    with pytest.raises(FieldError, match=rf"left has {N} samples, .*short has {N - 1}; join them by a key"):
        stream(sl.Join(left, short))


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"where": "id >= 30", "exclude": [50, 60]}, {"weights": np.arange(N) + 1}])
def test_every_world_size_has_the_same_global_batches_and_resumes_at_the_others_states(options, left, right):
    join, options = sl.Join(left, right, on="id", fields=["score", "caption"]), {"shuffle": LANES, **options}
    ds = stream(join, 24, **options)
    expected, state = take(ds, 2), ds.state_dict()
    rest = take(stream(join, 24, **options))[2:]
    for size in (2, 3):
        ranks = [stream(join, 24 // size, world=(rank, size), **options) for rank in range(size)]
        batches = [[check_values(batch) for batch in rank] for rank in ranks]
        steps = [sorted(flat(each)) for each in zip(*batches, strict=True)]
        assert steps == list(map(sorted, expected + rest))
        assert sorted(flat(rank.samples(0, 1).tolist() for rank in ranks[:1])) == sorted(expected[1])
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(state)))
        batches = [[check_values(batch) for batch in rank] for rank in ranks]
        assert [sorted(flat(each)) for each in zip(*batches, strict=True)] == list(map(sorted, rest))
    again = stream(join, 24, **options)
    assert take(again.replay(0, [1])) == [expected[1]]
    assert take(stream(join, 24, skip_steps={0: [0, 1]}, **options)) == rest


def test_a_copy_for_another_process_reads_both_sides(left, right):
    ds = pickle.loads(pickle.dumps(stream(sl.Join(left, right, on="id"), 8)))
    assert sorted(flat(map(check_values, ds))) == list(range(N))


@pytest.mark.long
def test_images_text_and_sequences_of_the_right_side_are_decoded_packed_and_put_in_buckets(left, right):
    join = sl.Join(left, right, on="id")
    for batch in stream(join, decode=sl.Decode(size=(16, 16)), collate={"tokens": "pad"}, bucket_by="tokens"):
        assert batch["image"].shape[1:] == (16, 16, 3)
        assert batch["tokens_lengths"].tolist() == [i % 5 for i in batch["id"].tolist()]
    plain = sl.Decode(size=(16, 16))
    direct = {int(b["id"][k]): b["image"][k] for b in stream(right, decode=plain) for k in range(len(b["id"]))}
    for batch in stream(join, decode=plain, pack={"tokens": 8}):
        assert all(torch.equal(direct[i], image) for i, image in zip(batch["id"].tolist(), batch["image"], strict=True))
        assert batch["tokens"].shape[1] == 8
    ds = stream(join, bucket_by=lambda lengths: lengths["caption"])
    assert sorted(flat(map(check_values, ds))) == list(range(N))


@pytest.mark.long
def test_selections_hold_on_both_sides_and_missing_samples_are_an_error_or_left_out(left, right):
    some = sl.Source(right, where="score < 20", exclude=[0])
    gone = int(sl.open(right)[0]["id"])
    kept = [i for i in range(40) if i != gone]
    with pytest.raises(FieldError, match=rf"'id' of .*right lacks the keys .* and {N - len(kept) - 3} more.*missing="):
        stream(sl.Join(left, some, on="id"))
    ds = stream(sl.Join(left, some, on="id", missing="drop"), shuffle=False)
    assert (ds.num_samples, flat(map(check_values, ds))) == (len(kept), kept)
    assert flat(map(check_values, stream(sl.Join(left, some, on="id"), where=kept, shuffle=False))) == kept
    ds = stream(sl.Join(sl.Source(left, where=slice(0, None, 2)), some, on="id", missing="drop"), shuffle=False)
    assert flat(map(check_values, ds)) == [i for i in kept if i % 2 == 0]
    weighted = stream(sl.Join(left, some, on="id", missing="drop"), weights="id")
    assert set(flat(map(check_values, weighted))) <= set(kept) - {0}
    with pytest.raises(SelectionError, match=r"none of 10 samples .* has a key"):
        stream(sl.Join(sl.Source(left, where=slice(60, 70)), some, on="id", missing="drop"))


@pytest.mark.long
def test_deletions_on_either_side_leave_samples_out(left, right, tmp_path):
    a, b = (Path(copytree(url, tmp_path / url.name)) for url in (left, right))
    state = stream(sl.Join(a, b, on="id")).state_dict()
    sl.delete(a, where="id >= 10 and id < 30")
    kept = [i for i in range(N) if not 10 <= i < 30]
    assert flat(map(check_values, stream(sl.Join(a, b, on="id"), shuffle=False))) == kept
    sl.delete(b, where="score >= 5 and score < 20")  # 10 to 39
    with pytest.raises(FieldError, match=r"lacks the keys 30, 31, 32 and 7 more"):
        stream(sl.Join(a, b, on="id"))
    ds = stream(sl.Join(a, b, on="id", missing="drop"), shuffle=False)
    assert flat(map(check_values, ds)) == [i for i in range(N) if not 10 <= i < 40]
    ds.load_state_dict(ds.state_dict())
    first = stream(sl.Join(sl.Source(a, version=1), sl.Source(b, version=1), on="id"))
    first.load_state_dict(state)
    assert sorted(flat(map(check_values, first))) == list(range(N))


def test_a_state_opens_the_versions_of_both_sides_and_knows_what_was_joined(left, right, tmp_path):
    a, b = (Path(copytree(url, tmp_path / url.name)) for url in (left, right))
    join = sl.Join(a, b, on="id", fields=["score"])
    ds = stream(join)
    expected = take(ds)
    (begin := stream(join)).load_state_dict(stream(join).state_dict())
    it = iter(begin)
    next(it)
    state = json.loads(json.dumps(begin.state_dict()))
    assert len(state["joined"]) == 1
    sl.delete(b, where=f"id >= {N} and id < {N + 5}")
    sl.delete(a, where="id < 9")
    now = stream(join)
    assert now.num_samples == N - 9
    now.load_state_dict(state)
    assert (now.num_samples, take(now)) == (N, expected[1:])
    with pytest.raises(StateError, match=r"joined \(\) instead of"):
        stream(sl.Join(sl.Source(a, version=1), sl.Source(b, version=1), on="id")).load_state_dict(
            stream(left).state_dict()
        )
    with pytest.raises(StateError, match="joined"):
        stream(left).load_state_dict(state)
    with pytest.raises(StateError, match="matched"):
        stream(left).load_state_dict(state, force=True)
    with pytest.raises(StateError, match="invalid"):
        stream(join).load_state_dict({**state, "joined": [[1, 2]]})
    copied = Path(copytree(right, tmp_path / "copy"))
    stream(sl.Join(left, copied, on="id", fields=["score"])).load_state_dict(state, force=True)


@pytest.mark.quick(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["vector", "large", "caption", "score"])
def test_samples_whose_chunk_of_the_right_side_is_damaged_are_masked_and_named(name, workers, left, right, tmp_path):
    b = Path(copytree(right, tmp_path / "right"))
    ids = [int(i) for i in sl.open(b)[:]["id"]]
    lost = {ids[i] for i in damage(b, name, ids.index(40)) if ids[i] < N}
    log = tmp_path / "bad.jsonl"
    options = {"on_error": "mask", "max_bad": 1.0, "error_log": log, "num_workers": workers, "fields": ["id", name]}
    ds = stream(sl.Join(left, b, on="id"), **options)
    found = flat(batch["id"][batch["valid"]].tolist() for batch in ds)
    assert sorted(found) == [i for i in range(N) if i not in lost]
    assert ds.stats().bad_samples == len(lost)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["sample"] for line in lines} == lost
    assert {line["field"] for line in lines} == {name}
    assert {line["object"].startswith(f"{b}/") for line in lines} == {True}
    ds.close()


def test_a_mixture_has_joins_as_sources_and_fields_that_are_held_on_both_sides(left, right, tmp_path):
    whole = write(tmp_path / "whole", {"id": "int64", "score": "float64"}, right_value, range(N, 2 * N))
    join = sl.Join(left, right, on="id", fields=["score", "caption"])
    mix = NumpyMixture({whole: 0.5, join: 0.5}, batch_size=16, fields=["id", "score"], with_index=True)
    for batch in mix:
        assert batch["score"].tolist() == [i / 2 for i in batch["id"].tolist()]
        assert batch["source"].tolist() == [int(i < N) for i in batch["id"].tolist()]
    other = sl.Source(sl.Join(left, right, on="id"), where=slice(0, 20))
    mix = NumpyMixture({join: 1, other: 1}, batch_size=8, fields=["id", "caption"], weigh="caption")
    assert mix.shares("caption") == {source: pytest.approx(0.5, abs=0.01) for source in mix.sources}
    assert len(flat(map(check_values, mix))) > 20
    with pytest.raises(MixtureError, match="give a URL, a Source, a Join"):
        NumpyMixture({3: 1}, batch_size=8)


def test_a_join_may_be_joined_to_a_third_dataset(left, right, tmp_path):
    values = {"id": lambda i: i, "extra": lambda i: 3 * i}
    fields = {"id": "int64", "extra": "float64"}
    third = write(tmp_path / "third", fields, lambda name, i: values[name](i), range(N))
    ds = stream(sl.Join(sl.Join(left, right, on="id", fields=["score"]), third, on="id"), where="id < 50")
    assert sorted(ds.fields) == ["extra", "id", "name", "score", "x"]
    rows = [(i, e) for batch in ds for i, e in zip(batch["id"].tolist(), batch["extra"].tolist(), strict=True)]
    assert {(i, e) for i, e in rows} == {(i, 3 * i) for i in range(50)}
    assert len(ds.state_dict()["joined"]) == 2


RENAMED = {name: f"{name}_right" for name in RIGHT if name != "key"}


def same(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, list) else np.array_equal(one, other)


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_renamed_fields_have_the_values_of_the_right_side_beside_those_of_the_left(workers, right):
    ds = stream(sl.Join(right, right, on="key", fields=RENAMED), decode=sl.Decode(size=(16, 16)), num_workers=workers)
    assert ds.fields == {**(own := sl.open(right).fields), **{RENAMED[name]: own[name] for name in RENAMED}}
    for batch in ds:
        assert all(same(batch[name], batch[RENAMED[name]]) for name in RENAMED)
        assert same(batch["tokens_offsets"], batch["tokens_right_offsets"])
        assert batch["image_right"].shape[1:] == (16, 16, 3)
    ds.close()


@pytest.mark.long
def test_options_name_renamed_fields_as_batches_do(left, right, tmp_path):
    join = sl.Join(left, right, on="id", fields=RENAMED)
    for batch in stream(join, collate={"tokens_right": "pad"}, bucket_by="tokens_right", fields=["id", "tokens_right"]):
        assert batch["tokens_right_lengths"].tolist() == [i % 5 for i in batch["id"].tolist()]
    for batch in stream(join, pack={"tokens_right": 8}):
        assert batch["tokens_right"].shape[1] == 8
    rows, renamed = (
        [batch[name].tolist() for batch in stream(each, pack={name: sl.Pack(8, fit="best")}, fields=[name])]
        for each, name in ((sl.Join(left, right, on="id"), "tokens"), (join, "tokens_right"))
    )
    assert rows == renamed
    ds = stream(join, bucket_by=lambda lengths: lengths["caption_right"], fields=["id", "caption_right"])
    for batch in ds:
        assert batch["caption_right"] == [right_value("caption", i) for i in batch["id"].tolist()]
    mix = NumpyMixture({join: 1, sl.Source(join, where=slice(0, 20)): 1}, batch_size=8, weigh="caption_right")
    assert mix.shares("caption_right") == {source: pytest.approx(0.5, abs=0.01) for source in mix.sources}
    damaged = Path(copytree(right, tmp_path / "right"))
    damage(damaged, "caption", 40)
    bad = {"on_error": "mask", "max_bad": 1.0, "error_log": tmp_path / "bad.jsonl"}
    list(stream(sl.Join(left, damaged, on="id", fields=RENAMED), **bad))
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert {(line["field"], line["object"].startswith(f"{damaged}/caption/")) for line in lines} == {
        ("caption_right", True)
    }


@pytest.mark.long
def test_names_of_fields_are_no_part_of_order_and_state(left, right):
    plain, renamed = (sl.Join(left, right, on="id", fields=fields) for fields in (["score"], {"score": "points"}))
    for size in (1, 2, 3):
        one, other = (stream(join, 24 // size, world=(0, size), shuffle=LANES) for join in (plain, renamed))
        assert take(other, 2) == take(one, 2) and other.state_dict() == one.state_dict()
        state = json.loads(json.dumps(other.state_dict()))
        one.load_state_dict(state), other.load_state_dict(state)
        for batch, again in zip(one, other, strict=True):
            assert same(batch["score"], again["points"]) and same(batch["id"], again["id"])


def test_two_right_sides_with_the_same_fields_are_renamed_apart(left, right, tmp_path):
    classes = {"provenance": {"classes": {"kind": ["cat", "dog"]}}}
    with sl.Writer(tmp_path / "kinds", {"id": "int64", "kind": "int64"}, **classes) as out:
        out.write_batch({"id": np.arange(N), "kind": np.arange(N) % 2})
    inner = sl.Join(left, right, on="id", fields={"caption": "caption_en", "score": "kind"})
    join = sl.Join(inner, tmp_path / "kinds", on="id", fields={"kind": "species", "id": "again"})
    join = sl.Join(join, right, on="id", fields={"caption": "caption_de"})
    ds = stream(join)
    assert sorted(ds.fields) == ["again", "caption_de", "caption_en", "id", "kind", "name", "species", "x"]
    assert ds.classes == {"species": ("cat", "dog")}
    for batch in ds:
        assert batch["caption_en"] == batch["caption_de"] == [right_value("caption", i) for i in batch["id"].tolist()]
        assert same(batch["again"], batch["id"]) and same(batch["kind"] * 2, batch["id"])
        assert same(batch["species"], batch["id"] % 2)


@pytest.mark.long
def test_a_third_dataset_is_joined_by_a_field_of_the_second(left, right, tmp_path):
    """Also where samples of the left side have no row in the second one, which is left out."""
    kinds = {"kind": "text", "size": "int64"}
    with sl.Writer(tmp_path / "kinds", kinds, layout=SMALL, workers=1) as out:
        out.write_batch(
            {"kind": [f"{i}é" * (i % 4) for i in range(N) if i % 4], "size": [i for i in range(N) if i % 4]}
        )
    some = sl.Source(right, where="score < 40")  # 0 to 79
    for key in ("caption", "text"):
        inner = sl.Join(left, some, on="id", fields={"caption": key}, missing="drop")
        ds = stream(sl.Join(inner, tmp_path / "kinds", on=(key, "kind"), missing="drop"))
        for batch in ds:
            assert check_values(batch) and batch["size"].tolist() == batch["id"].tolist()
        ids = [check_values(batch) for batch in ds]
        assert sorted(flat(ids)) == [i for i in range(80) if i % 4]
        state = stream(sl.Join(left, right, on="id")).state_dict()
        with pytest.raises(StateError, match="joined"):
            ds.load_state_dict(state)


def test_memory_is_bounded_and_counts_the_numbers_of_joined_samples(left, right):
    from datasets import least_memory

    join = sl.Join(left, right, on="id", fields=["vector", "caption"])
    least = least_memory(join, batch_size=8, num_workers=0)
    ds = stream(join, 8, memory=least, num_workers=0)
    assert sorted(flat(map(check_values, ds))) == list(range(N))
    assert ds._datasets[0].selection_bytes >= 8 * N


def test_what_cannot_be_joined_is_an_error(left, right, tmp_path):
    twice = write(tmp_path / "twice", {"id": "int64", "x": "float64"}, lambda _, i: i % 50, range(N))
    for join, kind, shown in (
        (sl.Join(left, twice, on="id", fields=[]), FieldError, r"has the keys 0, 1, 2 and \d+ more in several rows"),
        (sl.Join(left, right, on=("name", "key")), FieldError, r"both have the fields id; .*Join\(fields=\)"),
        (
            sl.Join(left, right, on=("name", "key")),
            FieldError,
            r"rename them: Join\(fields=\{'id': 'id_right', \.\.\.\}",
        ),
        (sl.Join(left, right, on="id", fields={"score": "x"}), FieldError, r"fields x; .*\{'score': 'x_right', \.\.\."),
        (sl.Join(left, right, on="id", fields={"score": "X"}), FieldError, "field name 'X' is invalid"),
        (
            sl.Join(left, right, on="id", fields={"points": "score"}),
            FieldError,
            "there is no field 'points'; choose from",
        ),
        (sl.Join(left, right, on="nope"), FieldError, "left has no field 'nope'"),
        (sl.Join(left, right, on=("id", "nope")), FieldError, "right has no field 'nope'"),
        (sl.Join(left, right, on=("id", "key")), FieldError, "text on one side and a number on the other"),
        (sl.Join(left, right, on=("x", "id")), FieldError, r"is float32\[260\]; join by"),
        (sl.Join(left, right, on="id", fields=["nope"]), FieldError, "there is no field 'nope'"),
        (sl.Join(left, sl.Source(right, weights="score"), on="id"), UsageError, "give weights= to the left side"),
        (sl.Join(left, sl.Source(left, where=[1])), UsageError, "without on=; give them to the left"),
        (sl.Join(sl.Source(left, sample_axis=0), right, on="id"), UsageError, "read as arrays in place; convert"),
        (sl.Join(left, 3, on="id"), UsageError, "3 is not a URL"),
    ):
        with pytest.raises(kind, match=shown):
            stream(join)
    for make, shown in (
        (lambda: sl.Join(left, right, on=3), "on=3"),
        (lambda: sl.Join(left, right, on="id", fields="score"), "give a list of names"),
        (lambda: sl.Join(left, right, on="id", fields={"score": 3}), "give a list of names, or a dict"),
        (lambda: sl.Join(left, right, on="id", fields={"score": "a", "key": "a"}), "each field a name of its own"),
        (lambda: sl.Join(left, right, missing="drop"), "give on="),
        (lambda: sl.Join(left, right, on="id", missing="x"), "choose"),
        (lambda: sl.Join(left, sl.Join(left, right, on="id")), "one after the other"),
        (lambda: sl.Join(left, sl.Source(sl.Join(left, right, on="id"))), "one after the other"),
        (lambda: stream(sl.Join(sl.Source(left), right, on="id"), where="id < 3"), "where of a Join whose left side"),
    ):
        with pytest.raises(UsageError, match=shown):
            make()
    with pytest.raises(FieldError, match=r"there is no field 'nope'; choose from id, name, x, .*score"):
        stream(sl.Join(left, right, on="id"), fields=["nope"])


@pytest.mark.long
def test_blocks_are_those_of_the_side_with_the_larger_samples_and_may_cut_the_chunks_of_the_other(left, tmp_path):
    """Blocks of samples that are all held in memory have one sample, which would read a chunk for each."""
    held = write(tmp_path / "held", {"id": "int64", "score": "float64"}, right_value, reversed(range(N)))
    large = write(tmp_path / "large", {"id": "int64", "large": "float32[5000]"}, right_value, range(N))
    blocks = {url: sl.open(url).manifest.order.block for url in (left, large)}
    assert blocks[large] < blocks[left]
    for side, other, block in ((held, left, blocks[left]), (left, large, blocks[large]), (large, left, blocks[large])):
        ds = stream(sl.Join(side, other, on="id"))
        assert ds._first.sources[0].params.block == block
        assert sorted(flat(map(check_values, ds))) == list(range(N))
        assert flat(map(check_values, stream(sl.Join(side, other, on="id"), shuffle=False))) == [
            int(i) for i in sl.open(side)[:]["id"]
        ]
    assert sorted(flat(map(check_values, stream(sl.Join(left, large, on="id"), shuffle=sl.Shuffle(block=3))))) == [
        *range(N)
    ]


def test_the_first_pass_warns_of_a_right_side_that_is_read_many_times(tmp_path, monkeypatch):
    """The factor that it names is that of the bytes that are read."""
    monkeypatch.setattr(join_module, "BYTES", 0)
    ids = {"a": np.arange(512), "b": np.random.default_rng(4).permutation(512)}
    for name, order in ids.items():
        fields = {"id": "int64", f"{name}_vector": "uint8[1500]"}
        with sl.Writer(tmp_path / name, fields, layout=SMALL, workers=1) as out:
            vectors = np.random.default_rng(5).integers(0, 256, (512, 1500), dtype=np.uint8)
            out.write_batch({"id": order, f"{name}_vector": vectors})
    options = {"fields": ["b_vector"], "num_workers": 0, "shuffle": sl.Shuffle(block=64)}
    ds = stream(sl.Join(tmp_path / "a", tmp_path / "b", on="id"), **options)
    with pytest.warns(UserWarning, match=r"blocks of 64 samples of .*a read \d+ chunks of 'b_vector'") as caught:
        assert len(list(ds)) == 32
    times = int(str(caught[0].message).split("about ")[1].split()[0])
    assert 6 < times < 10
    assert ds.stats().bytes_fetched == pytest.approx(times * 512 * 1500, rel=0.2)
    aligned = stream(sl.Join(tmp_path / "a", tmp_path / "b", on="index"), **options)
    assert not join_module.describe_reads(aligned._datasets[0], 64)


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_clips_of_videos_have_the_fields_that_are_joined_to_their_video(workers, tmp_path):
    with sl.Writer(tmp_path / "videos", {"video": "video", "label": "int64"}) as out:
        for i in range(4):
            out.write({"video": videos.encode("h264", frames=16 + 4 * i, seed=i), "label": i})
    right = write(tmp_path / "right", RIGHT, right_value, (3, 1, 0, 2))
    join = sl.Join(tmp_path / "videos", right, on=("label", "id"), fields=["score", "caption", "vector"])
    clips = {"clips": {"video": sl.Clips(4, step=4)}, "num_workers": workers}
    alone, count = stream(tmp_path / "videos", 4, **clips), 0
    assert alone.num_samples == stream(join, 4, **clips).num_samples == 4 + 5 + 6 + 7
    for batch in stream(join, 4, **clips):
        assert check_values({**batch, "id": batch["label"]}) == batch["label"][batch["valid"]].tolist()
        count += int(batch["valid"].sum())
    assert count == alone.num_samples


def test_versions_with_other_deleted_samples_are_not_joined_by_number(tmp_path):
    for name in ("a", "b"):
        with sl.Writer(tmp_path / name, {name: "int64"}) as out:
            out.write_batch({name: np.arange(20)})
    sl.delete(tmp_path / "a", ids=[3])
    sl.delete(tmp_path / "b", ids=[7])
    with pytest.raises(FieldError, match=r"other samples are deleted from .*by a key"):
        sl.NumpyDataset(sl.Join(tmp_path / "a", tmp_path / "b"), batch_size=4)


def test_an_integer_has_the_key_of_an_equal_float_only():
    wanted, found = np.array([2**53 + 1, 2**53, 3]), np.array([2.0**53, 3.0])
    assert find_rows(wanted, found, "field 'key'").tolist() == [-1, 0, 1]


def test_a_field_that_is_no_key_is_refused_before_it_is_read(tmp_path):
    with sl.Writer(tmp_path / "a", {"key": "int64", "image": "uint8[64,64,3]"}) as out:
        out.write_batch({"key": np.arange(20), "image": np.zeros((20, 64, 64, 3), np.uint8)})
    for file in (tmp_path / "a" / "image").rglob("c/*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(FieldError, match=r"'image' of .* is uint8.*join by a field with one number"):
        sl.NumpyDataset(sl.Join(tmp_path / "a", tmp_path / "a", on=("image", "key"), fields=["key"]), batch_size=4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [1, 2])
def test_a_plan_of_a_join_has_the_requests_and_bytes_of_the_epoch_that_follows(left, right, size, capsys):
    arguments = left, "--join", right, "--on", "id", "--batch-size", 8, "--world-size", size, "--lanes", 6
    planned = json.loads(commands.run(capsys, "plan", *arguments, "--json")[1])
    source = sl.Join(left, right, on="id")
    ranks = [StreamingDataset(source, batch_size=8, shuffle=LANES, world=(rank, size)) for rank in range(size)]
    assert {len(list(ds)) for ds in ranks} == {planned["steps"]}
    assert sum(ds.stats().requests for ds in ranks) == pytest.approx(planned["requests"], rel=0.1)
    assert sum(ds.stats().bytes_fetched for ds in ranks) == pytest.approx(planned["bytes"], rel=0.1)
    status, _, err = commands.run(capsys, "plan", left, "--on", "id")
    assert status == 2
    assert "on='id' without join=; give the URL" in err
