"""Bad samples: rows of a batch that are masked or replaced, counted, logged, and too many."""

import io
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import fsspec
import numpy as np
import pytest
import transform_tasks
import zarr
from amounts import covering, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

import streamloader as sl
from streamloader import errors
from streamloader.engine.faults import fill, replacements
from streamloader.engine.transform import Ragged
from streamloader.format.opening import open_root
from streamloader.format.reader import FieldReader
from streamloader.loader.dataset import NumpyMixture
from streamloader.order.schedule import BatchPlan
from streamloader.storage import open_store

N = 120
UNDECODABLE = (5, 17, 40, 41, 42, 99)
FIELDS = {"image": "bytes:jpeg", "label": "int64", "name": "text", "tok": "ragged:int32", "vec": "float32[300]"}
FIELDS |= {"large": "float32[5000]", "held": "int64[40]"}  # the last one is held in memory
LAYOUT = sl.Layout(chunk_size=1 << 13, block_size=1 << 15, samples_per_shard=32)
KINDS = ["mask", "replace"]
pytestmark = pytest.mark.usefixtures("two_workers")


def jpeg(i: int) -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(i).integers(0, 255, (24, 20 + i % 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, "JPEG")
    return data.getvalue()


def value(name: str, i: int) -> Any:
    values = {"image": jpeg, "label": np.int64, "name": lambda i: f"sample {i}" + " " * 300}
    values |= {"tok": lambda i: np.full(50 + i % 5, i, np.int32), "vec": lambda i: np.full(300, i, np.float32)}
    values |= {"large": lambda i: np.full(5000, i, np.float32), "held": lambda i: np.full(40, i)}
    return values[name](i)


def write(path: Path, names: Iterable[str], bad: Iterable[int] = ()) -> Path:
    """Write samples whose values are all their number; the images of `bad` ones do not decode."""
    with sl.Writer(path, {name: FIELDS[name] for name in names}, layout=LAYOUT, num_samples=N) as out:
        for i in range(N):
            sample = {name: value(name, i) for name in names}
            if i in bad:
                sample["image"] = sample["image"][: 200 if i % 2 else 3]
            out.write(sample)
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def make(names: tuple[str, ...] = (*FIELDS,), bad: tuple[int, ...] = ()) -> Path:
        return write(tmp_path_factory.mktemp("bad") / "d", names, bad)

    return make


def damage(path: Path, name: str, sample: int, how: str = "flip") -> list[int]:
    """Damage the chunk of a sample of a field, or its object; return the samples that are lost."""
    manifest, store, _ = open_root(open_store(path))
    reader = FieldReader(store, manifest, name)
    (run,) = reader.runs(sample, sample + 1)
    file = path / run.path
    if how == "missing":
        file.unlink()
        first = sample // reader.layout.shard * reader.layout.shard
        return list(range(first, min(N, first + reader.layout.shard)))
    data = bytearray(file.read_bytes())
    data[run.start + 5] ^= 0xFF
    file.write_bytes(data)
    return list(range(run.first_sample, run.first_sample + run.num_samples))


def rows(batch: Mapping[str, Any], column: str) -> list[int]:
    return np.flatnonzero(np.asarray(batch[column])).tolist()


def is_zero(values: Any) -> bool:
    return not np.any(np.asarray(values)) if not isinstance(values, str) else not values


def check_rows(batch: Mapping[str, Any], kind: str, bad: set[int]) -> list[int]:
    """Check every row of a batch of a dataset in which samples are bad; return the valid samples."""
    index, valid = np.asarray(batch["index"]), np.asarray(batch["valid"])
    flags = np.asarray(batch["error" if kind == "mask" else "replaced"])
    for row, number in enumerate(index.tolist()):
        cells = {name: batch[name][row] for name in ("label", "name", "vec", "large", "held") if name in batch}
        if "tok" in batch:
            cells["tok"] = batch["tok"][batch["tok_offsets"][row] : batch["tok_offsets"][row + 1]]
        if number in bad:  # masked, since "replace" changes the number
            assert kind == "mask"
            assert flags[row]
            assert not valid[row]
            assert all(map(is_zero, cells.values())), cells
            assert "image" not in batch or is_zero(batch["image"][row])
            continue
        expected = {name: value(name, number) for name in cells}
        assert all(np.array_equal(cells[name], expected[name]) for name in cells), (number, cells)
        assert flags[row] <= (kind == "replace")
    return index[valid].tolist()


def logged(log: Path) -> list[dict[str, Any]]:
    files = sorted(log.glob("*.jsonl")) if log.is_dir() else [log] * log.exists()
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


DAMAGE = [("vec", "flip"), ("large", "flip"), ("tok", "flip"), ("name", "flip"), ("image", "flip")]
DAMAGE += [("vec", "missing"), ("large", "missing"), ("name", "missing")]


CAUSES = [*map(" ".join, DAMAGE), "decode", "transform"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("cause", "kind", "workers"), covering(CAUSES, KINDS, [0, 2]))
def test_bad_samples_are_left_out_and_all_others_are_as_they_were(cause, kind, workers, written, tmp_path):
    field, _, how = cause.partition(" ")
    path, bad, options = written(), set(UNDECODABLE), {}
    if field == "decode":
        path = written(bad=UNDECODABLE)
    elif field == "transform":
        options["transform"] = transform_tasks.raises_on_undecodable
    else:
        path = Path(copytree(path, tmp_path / "d"))
        bad = {*damage(path, field, 40, how)}
        assert 0 < len(bad) <= 32
    log = tmp_path / "log" / "bad.jsonl"
    dataset = sl.NumpyDataset(
        path,
        **{"batch_size": 40, "decode": sl.Decode(size=(16, 16)), "with_index": True, "seed": 3, "num_workers": workers},
        **{"on_error": kind, "error_log": log, "max_bad": N, **options},
    )
    for epoch in range(2):
        seen = [number for batch in dataset for number in check_rows(batch, kind, bad)]
        assert len(seen) == N - len(bad) * (kind == "mask")
        assert {*seen} == {*range(N)} - bad
        lines = logged(log)[len(bad) * epoch :]
        assert sorted(line["sample"] for line in lines) == sorted(bad)
        assert {line["source"] for line in lines} == {dataset._datasets[0].store.url}
        assert {line["field"] for line in lines} == {{"decode": "image", "transform": None}.get(field, field)}
        for line in lines:
            assert line["epoch"] == epoch
            assert dataset.samples(epoch, line["step"], line["rank"])[line["position"] % 40] == line["sample"]
            assert (
                field == "transform"
                or Path(line["object"]).parent == path / line["field"] / "c"
                or "/c/" in line["object"]
            )
    assert dataset.stats().bad_samples == 2 * len(bad)
    dataset.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_batches_with_bad_samples_resume_exactly_at_any_world_size(kind, written, tmp_path):
    def make(rank: int, size: int) -> Any:
        options = {"decode": sl.Decode(size=(8, 8)), "with_index": True, "max_bad": N, "num_workers": 0}
        return sl.NumpyDataset(
            written(bad=UNDECODABLE), batch_size=24 // size, on_error=kind, world=(rank, size), seed=5, **options
        )

    warnings.simplefilter("ignore", UserWarning)  # 3 ranks do not divide the lanes

    def collect(size: int, skip: int, state: dict[str, Any] | None = None) -> list[Any]:
        steps = []
        for rank in range(size):
            dataset = make(rank, size)
            if state is not None:
                dataset.load_state_dict(state)
            steps.append([batch for _, batch in zip(range(10), dataset, strict=False)][skip:])
        return steps

    for size in (1, 2, 3):
        whole, first = collect(size, 2), make(0, size)
        for _, _ in zip(range(2), first, strict=False):
            pass
        resumed = collect(size, 0, first.state_dict())
        for batches, again in zip(whole, resumed, strict=True):
            for one, other in zip(batches, again, strict=True):
                assert {*one} == {*other}
                assert all(np.array_equal(one[name], other[name]) for name in one)
        masked = {
            number for rank in collect(size, 0) for batch in rank for number in check_rows(batch, kind, {*UNDECODABLE})
        }
        assert masked == {*range(N)} - {*UNDECODABLE}


def test_the_rows_of_masked_samples_are_the_same_at_any_world_size(written):
    seen = []
    for size in (1, 2, 4):
        at = set()
        for rank in range(size):
            dataset = sl.NumpyDataset(
                **{"url": written(bad=UNDECODABLE), "batch_size": 8 // size, "world": (rank, size), "max_bad": N},
                **{"on_error": "mask", "decode": sl.Decode(size=(8, 8)), "with_index": True, "fields": ["image"]},
            )
            for step, batch in enumerate(dataset):
                at |= {(step, int(batch["index"][row])) for row in rows(batch, "error")}
        seen.append(at)
    assert seen[0] == seen[1] == seen[2]
    assert {number for _, number in seen[0]} == {*UNDECODABLE}


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["flip", "missing"])
def test_a_field_that_is_held_in_memory_is_left_out_where_it_is_damaged(how, written, tmp_path):
    path = Path(copytree(written(("held", "vec")), tmp_path / "d"))
    assert len(damage(path, "held", 40, how)) == N  # all are in one chunk
    options = {"batch_size": 30, "shuffle": False, "with_index": True}
    for kind in KINDS:
        batches = iter(sl.NumpyDataset(path, **options, on_error=kind, max_bad=1.0))
        for _ in range(3):
            batch = next(batches)
            assert not batch["valid"].any()
            assert is_zero(batch["held"])
            assert is_zero(batch["vec"])
        with pytest.raises(errors.BadSamplesError, match=r"1\d\d samples in a row"):
            next(batches)
    good = list(sl.NumpyDataset(path, **options, fields=["vec"], on_error="mask"))
    assert all(batch["valid"].all() and not batch["error"].any() for batch in good)


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_small_steps_that_are_gathered_together_replace_within_their_step(workers, written, tmp_path):
    path = Path(copytree(written(("vec", "tok")), tmp_path / "d"))
    bad = {*damage(path, "vec", 40)}
    for pack in (None, {"tok": 16}):
        dataset = sl.NumpyDataset(
            path, batch_size=4, with_index=True, on_error="replace", max_bad=N, pack=pack, num_workers=workers, seed=1
        )
        expected = [dataset.samples(0, step) for step in range(len(dataset))]
        for numbers, batch in zip(expected, dataset, strict=True):
            good = [number for number in numbers.tolist() if number not in bad]
            for row, number in enumerate(numbers.tolist()):
                took = int(batch["index"][row])
                assert took == number or (number in bad and took in good) or not good
                assert batch["replaced"][row] == (number in bad and bool(good))
                assert (batch["vec"][row] == (took if good else 0)).all()
        dataset.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"transform": transform_tasks.raises_on_undecodable}])
def test_single_samples_are_left_out(options, workers, written):
    dataset = sl.NumpyDataset(
        written() if options else written(bad=UNDECODABLE),
        **{"batch_size": None, "decode": True, "with_index": True, "num_workers": workers, **options},
        **{"on_error": "mask", "max_bad": N},
    )
    samples = list(dataset)
    assert len(samples) == N
    assert sorted(int(sample["index"]) for sample in samples if sample["error"]) == sorted(UNDECODABLE)
    for sample in samples:
        masked = bool(sample["error"])
        assert bool(sample["valid"]) is not masked
        assert sample["label"] == (0 if masked else sample["index"])
        assert sample["name"] == ("" if masked else value("name", sample["index"]))
        assert is_zero(sample["image"]) is masked
    dataset.close()


class Count:
    """A transform that raises for some numbers of samples."""

    def __init__(self, bad: Callable[[int], bool]) -> None:
        self.bad = bad

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self.bad(int(sample["label"])):
            raise ValueError("no")
        return {"label": sample["label"], "text": "x", "vec": np.ones(3, np.float32)}


def test_a_batch_without_a_good_sample_has_the_columns_of_others_or_is_the_error_of_the_first(written):
    options = {"batch_size": 1, "shuffle": False, "num_workers": 0, "on_error": "mask", "max_bad": N}
    batches = list(sl.NumpyDataset(written(), transform=Count(lambda i: i == 7), fields=["label"], **options))
    assert [batch["label"].tolist() for batch in batches[6:9]] == [[6], [0], [8]]
    assert batches[7]["vec"].tolist() == [[0, 0, 0]]
    assert batches[7]["text"] == [""]
    with pytest.raises(errors.TransformError, match="sample 0"):
        list(sl.NumpyDataset(written(), transform=Count(lambda i: i == 0), fields=["label"], **options))


def run(path: Path, bad: Callable[[int], bool], **options: Any) -> int:
    dataset = sl.NumpyDataset(
        **{"url": path, "batch_size": 10, "fields": ["label"], "shuffle": False, "num_workers": 0, "on_error": "mask"},
        **{"transform": Count(bad), **options},
    )
    return sum(1 for _ in dataset)


def test_more_bad_samples_than_max_bad_end_the_run_at_the_step_that_has_them(written, tmp_path):
    assert run(written(), lambda i: i % 10 == 3, max_bad=12) == 12
    log = tmp_path / "bad.jsonl"
    with pytest.raises(
        errors.BadSamplesError, match=r"12 of 120 samples of rank 0 are bad, more than max_bad=11"
    ) as raised:
        run(written(), lambda i: i % 10 == 3, max_bad=11, error_log=log)
    assert isinstance(raised.value.__cause__, errors.TransformError)
    assert [line["sample"] for line in logged(log)] == list(range(3, N, 10))  # those of the last step too
    assert run(written(), lambda i: i % 12 == 3) == 12  # a share is that of 1000 samples at least
    with pytest.raises(errors.BadSamplesError, match=r"11 of 20 .* more than max_bad=0.01"):
        run(written(), lambda i: 3 <= i < 14)


def test_a_hundred_bad_samples_in_a_row_end_the_run_whatever_max_bad_is(data, tmp_path):
    path = data(300, "label")

    def bad(numbers: range) -> Callable[[int], bool]:
        return lambda label: label + 2**40 in numbers

    assert run(path, bad(range(20, 119)), max_bad=1.0) == 30
    assert run(path, lambda label: bad(range(20, 250))(label) and (label + 2**40) % 50 > 0, max_bad=1.0) == 30
    with pytest.raises(errors.BadSamplesError, match="100 samples in a row of rank 0 are bad"):
        run(path, bad(range(20, 120)), max_bad=1.0)


def test_a_pass_that_bad_samples_ended_yields_nothing_more(written):
    dataset = sl.NumpyDataset(
        **{"url": written(), "batch_size": 10, "fields": ["label"], "shuffle": False, "num_workers": 0},
        **{"on_error": "mask", "transform": Count(lambda i: i >= 12), "max_bad": 0},
    )
    batches = iter(dataset)
    next(batches)
    with pytest.raises(errors.BadSamplesError):
        next(batches)
    with pytest.raises(errors.PassEndedError):
        next(batches)


@pytest.mark.quick(1)
@pytest.mark.parametrize("place", ["folder", "s3"])
def test_a_log_in_a_store_has_an_object_for_each_step_and_a_resumed_run_writes_it_again(place, written, tmp_path, moto):
    if place == "s3":
        root, options = moto.url(), moto.storage_options
        log, path = f"{root}/log", f"{root}/data"
        fsspec.filesystem("s3", **options).put(str(written(bad=UNDECODABLE)), path, recursive=True)
    else:
        log, options, path = f"{tmp_path}/log/", None, str(written(bad=UNDECODABLE))

    def read(state: dict[str, Any] | None = None, count: int = 100) -> dict[str, Any]:
        dataset = sl.NumpyDataset(
            **{"url": path, "batch_size": 20, "decode": sl.Decode(size=(8, 8)), "storage_options": options},
            **{"on_error": "mask", "error_log": log, "max_bad": N, "num_workers": 0},
        )
        if state is not None:
            dataset.load_state_dict(state)
        for _, _ in zip(range(count), dataset, strict=False):
            pass
        state = dataset.state_dict()
        dataset.close()
        return state

    state = read(count=3)
    read()
    store = open_store(log, options)
    first = {info.path: store.get(info.path) for info in store.list()}
    read(state)
    assert {info.path: store.get(info.path) for info in store.list()} == first
    lines = [json.loads(line) for data in first.values() for line in data.splitlines()]
    assert sorted(line["sample"] for line in lines) == sorted(UNDECODABLE)
    assert {f"{line['epoch']:06}-{line['step']:08}-{line['rank']:05}.jsonl" for line in lines} == {*first}


def test_a_log_that_cannot_be_written_is_a_warning(written, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(
        RuntimeWarning, match="bad samples are missing in error_log=: NotADirectoryError|FileExistsError"
    ):
        assert run(written(), lambda i: i == 3, error_log=tmp_path / "file" / "bad.jsonl") == 12


@pytest.mark.long
def test_workers_of_a_dataloader_log_their_bad_samples(written, tmp_path):
    log = tmp_path / "bad.jsonl"
    dataset = sl.StreamingDataset(
        **{"url": written(bad=UNDECODABLE), "batch_size": 10, "decode": sl.Decode(size=(8, 8)), "with_index": True},
        **{"on_error": "mask", "error_log": log, "max_bad": N},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="forkserver")
        seen = [number for batch in loader for number in check_rows(batch, "mask", {*UNDECODABLE})]
    assert {*seen} == {*range(N)} - {*UNDECODABLE}
    assert sorted(line["sample"] for line in logged(log)) == sorted(UNDECODABLE)


def test_a_mixture_names_the_source_of_a_bad_sample(written, tmp_path):
    good, bad = str(written()), str(written(bad=UNDECODABLE))
    log = tmp_path / "bad.jsonl"
    mixture = NumpyMixture(
        **{"sources": {good: 1, bad: 1}, "batch_size": 16, "decode": sl.Decode(size=(8, 8)), "fields": ["image"]},
        **{"with_index": True, "on_error": "mask", "error_log": log, "max_bad": N},
    )
    masked = {(int(b["source"][row]), int(b["index"][row])) for b in mixture for row in rows(b, "error")}
    lines = logged(log)
    assert masked == {(1, line["sample"]) for line in lines} == {(1, number) for number in UNDECODABLE}
    assert {line["source"] for line in lines} == {bad}
    assert all(line["object"].startswith(f"{bad}/image/c/") for line in lines)


@pytest.mark.quick(2)
@pytest.mark.parametrize("memory", [None, "64MB"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("windows", [None, sl.Window(3), sl.Window(history=2, lead=2)])
@pytest.mark.parametrize("shard", [None, (20, 4)])
def test_samples_of_arrays_that_need_a_damaged_chunk_are_left_out(shard, windows, workers, memory, tmp_path):
    values = (np.arange(1, 101, dtype=np.float32)[:, None] * np.ones(4, np.float32)).astype(np.float32)
    group = zarr.create_group(tmp_path / "a.zarr")
    options = {"chunks": (5, 4), "shards": shard, "dimension_names": ("time", "x")}
    group.create_array("t", data=values, compressors=zarr.codecs.ZstdCodec(checksum=True), **options)
    group.create_array("u", data=values[:, 0], chunks=(10,), dimension_names=("time",))
    file = tmp_path / "a.zarr" / "t" / "c" / ("2/0" if shard else "8/0")  # elements 40 to 44
    content = bytearray(file.read_bytes())
    content[len(content) // 8 if shard else len(content) // 2] ^= 0xFF
    file.write_bytes(content)

    def read(**given: Any) -> Any:
        return sl.NumpyDataset(
            **{"url": tmp_path / "a.zarr", "sample_axis": "time", "windows": windows, "batch_size": 8, "seed": 2},
            **{"with_index": True, "num_workers": workers, "memory": memory, **given},
        )

    with pytest.raises(errors.FormatError):
        list(read())
    dataset = read(on_error="mask", max_bad=1.0)
    for _ in range(2):
        bad = set()
        for batch in dataset:
            for row, number in enumerate(batch["index"].tolist()):
                length = 1 if windows is None else windows.length or 4
                needs = range(number, number + length)
                if set(needs) & set(range(40, 45)):
                    assert batch["error"][row]
                    assert not batch["valid"][row]
                    assert is_zero(batch["t"][row])
                    bad.add(number)
                    continue
                first = batch["t"][row].reshape(-1)[0]
                assert not batch["error"][row]
                assert first == number + 1
                assert batch["u"][row].reshape(-1)[0] == number + 1
        assert len(bad) == 5 + length - 1
    dataset.close()


@settings(max_examples=examples(100))
@given(st.data())
def test_a_replacement_is_another_good_row_of_the_step_and_a_function_of_seed_epoch_and_position(data):
    count, step_rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    blank = data.draw(st.sets(st.integers(0, count - 1)))
    positions = np.array(data.draw(st.lists(st.integers(0, 2**40), min_size=count, max_size=count)), np.int64)
    zeros = np.zeros(count, np.int64)
    plan = BatchPlan(3, 0, step_rows, zeros, zeros, zeros, positions, zeros == 0, (), ())
    source = replacements(plan, blank, 7)
    for row in range(count):
        good = [r for r in range(count) if r // step_rows == row // step_rows and r not in blank]
        assert source[row] == row if row not in blank or not good else source[row] in good
    steps = [
        replacements(step, {row - first for row in blank if first <= row < first + step_rows}, 7) + first
        for step, first in zip(plan.steps(), range(0, count, step_rows), strict=True)
    ]
    assert np.array_equal(source, np.concatenate(steps))


@given(st.data())
def test_filled_columns_have_the_values_of_their_source_and_nothing_of_blank_rows(data):
    count = data.draw(st.integers(1, 9))
    blank = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    source = np.array([row if row in blank else data.draw(st.integers(0, count - 1)) for row in range(count)])
    numbers = np.arange(1, count + 1)
    sizes = numbers % 3
    columns = {
        "array": numbers[:, None] * np.ones(2),
        "list": [f"{n}" for n in numbers],
        "ragged": Ragged(np.repeat(numbers, sizes), np.concatenate([[0], np.cumsum(sizes)])),
    }
    filled = fill(columns, source, blank)
    for row in range(count):
        expected = 0 if row in blank else int(numbers[source[row]])
        offsets = filled["ragged"].offsets
        assert filled["array"][row].tolist() == [expected] * 2
        assert filled["list"][row] == (str(expected) if expected else "")
        assert filled["ragged"].values[offsets[row] : offsets[row + 1]].tolist() == [expected] * (expected % 3)


@pytest.mark.parametrize(
    "given", [{"on_error": "skip"}, {"max_bad": -1}, {"max_bad": 1.5}, {"max_bad": True}, {"error_log": "x.jsonl"}]
)
def test_invalid_options_are_usage_errors(given, written):
    with pytest.raises(errors.UsageError, match=next(iter(given))):
        sl.NumpyDataset(**{"url": written(), "batch_size": 4, **given})


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_tell_which_samples_are_bad_do_not_meet_fields(kind, tmp_path):
    name = "error" if kind == "mask" else "replaced"
    with sl.Writer(tmp_path / "d", {name: "int64"}) as out:
        out.write({name: 1})
    with pytest.raises(errors.FieldError, match=name):
        sl.NumpyDataset(tmp_path / "d", batch_size=1, on_error=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_no_utf8_is_a_bad_sample(kind):
    path = Path(__file__).parent.parent / "formats" / "streamloader" / "v1" / "bad" / "text_that_is_no_utf8"
    with pytest.raises(errors.DecodeError):
        list(sl.NumpyDataset(path, batch_size=2, num_workers=0))
    dataset = sl.NumpyDataset(path, batch_size=2, with_index=True, num_workers=0, on_error=kind, max_bad=1.0)
    for _ in range(2):
        batches = list(dataset)
        flag = "error" if kind == "mask" else "replaced"
        assert sum(batch[flag].sum() for batch in batches) + sum((~batch["valid"]).sum() for batch in batches) > 0
        (name,) = [name for name, field in dataset.fields.items() if field.kind == "text"]
        assert all(isinstance(text, str) for batch in batches for text in batch[name])
    assert dataset.stats().bad_samples == 2


class NotUtf8(str):
    """A text that is written as other bytes."""

    def encode(self, *_: Any) -> bytes:
        return b"caf\xe9"


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fields_of_a_sample_stay_together_where_texts_are_invalid_beside_a_damaged_chunk(kind, tmp_path):
    count, invalid = 1100, {*range(5, 1100, 50)}
    with sl.Writer(tmp_path / "d", {"name": "text", "held": "int64[128]"}, num_samples=count) as out:
        names = [NotUtf8() if i in invalid else str(i) for i in range(count)]
        out.write_batch({"name": names, "held": np.arange(count)[:, None] + np.zeros(128, np.int64)})
    assert sl.open(tmp_path / "d").manifest.fields["held"].resident
    damaged = damage(tmp_path / "d", "held", 1050)
    bad = invalid | {*damaged}
    assert len(damaged) == 76
    options: dict[str, Any] = {"batch_size": 100, "with_index": True, "on_error": kind, "max_bad": 1.0}
    seen = set[int]()
    for batch in sl.NumpyDataset(tmp_path / "d", num_workers=0, **options):
        for row in rows(batch, "valid"):
            assert batch["name"][row] == str(batch["index"][row])
            assert (batch["held"][row] == batch["index"][row]).all()
            seen.add(int(batch["index"][row]))
    assert seen == {*range(count)} - bad


def doubled(samples: list[dict[str, Any]]) -> dict[str, Any]:
    for sample in samples:
        sample["label"] = sample["label"] * 2
    return {"label": np.array([sample["label"] for sample in samples])}


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_replaces_another_shares_nothing_with_it(written, workers):
    url = written(("image", "label"), UNDECODABLE)
    options = {"batch_size": 12, "on_error": "replace", "max_bad": N, "with_index": True, "num_workers": workers}
    options |= {"decode": sl.Decode()}
    for batch in sl.NumpyDataset(url, collate={"image": "list"}, **options):
        for row in rows(batch, "replaced"):
            others = [image for other, image in enumerate(batch["image"]) if other != row]
            assert not any(np.shares_memory(batch["image"][row], image) for image in others)
    for batch in sl.NumpyDataset(url, collate=doubled, **options):
        assert batch["label"].tolist() == (2 * batch["index"]).tolist()
