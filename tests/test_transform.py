"""The caller's transform: reproducible at any world size, the same in processes, and its failures named."""

import datetime
import os
import random
import subprocess
import sys
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from conversions import Exported, OnDevice
from datasets import before_error, numbers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchrun import environment
from transform_tasks import NoMessage, Odd, Raising, draws_from_torch, kills_itself, noisy, summed, unpicklable
from worker_tasks import Counting

from streamloader.engine.collate import collate
from streamloader.engine.transform import rng_of, takes_rng
from streamloader.errors import EngineError, TransformError, UsageError
from streamloader.loader.dataset import NumpyDataset
from streamloader.pytorch.dataset import StreamingDataset

pytestmark = pytest.mark.usefixtures("two_workers")
N = 203


@pytest.fixture(scope="module")
def url(data: Any) -> str:
    return data(N, "x", "label", "name", "tok")


def by_number(ds: StreamingDataset) -> dict[int, tuple[Any, ...]]:
    found = {}
    for batch in ds:
        for row, i in enumerate(numbers(batch)):  # the invalid ones are the last
            assert batch["name"][row] == datasets.value("name", i) + "!"
            assert batch["y"][row].tolist() == (datasets.value("x", i)[:4] + 1).tolist()
            assert batch["label"][row].item() == datasets.value("label", i)
            found[i] = tuple(batch["noise"][row].tolist())
    return found


@pytest.mark.long
def test_random_numbers_are_those_of_the_sample_at_any_world_size_and_batch(url):
    arguments: dict[str, Any] = {"transform": noisy, "with_index": True, "seed": 11}
    alone = by_number(StreamingDataset(url, batch_size=16, **arguments))
    assert len(alone) == N == len(set(alone.values()))
    two = {}
    for rank in range(2):
        two |= by_number(StreamingDataset(url, batch_size=5, world=(rank, 2), **arguments))
    assert two == alone
    resumed = StreamingDataset(url, batch_size=16, **arguments)
    resumed.load_state_dict(resumed.state_dict(batches=4))
    rest = by_number(resumed)
    assert len(rest) == N - 64
    assert rest.items() <= alone.items()
    next_epoch = by_number(resumed)
    assert next_epoch.keys() == alone.keys()
    assert not set(next_epoch.values()) & set(alone.values())


@pytest.mark.long
def test_processes_give_what_this_process_gives(url):
    arguments: dict[str, Any] = {"batch_size": 16, "transform": noisy, "with_index": True, "seed": 11}
    here = StreamingDataset(url, **arguments)
    there = StreamingDataset(url, num_workers=2, **arguments)
    batches = list(zip(here, there, strict=True))
    assert len(batches) == 13
    for ours, theirs in batches:
        assert list(ours) == list(theirs) == ["y", "noise", "name", "label", "index", "valid"]
        for name in ("y", "noise", "label", "index", "valid"):
            assert ours[name].dtype == theirs[name].dtype
            assert ours[name].tolist() == theirs[name].tolist()
        assert ours["name"] == theirs["name"]


def test_samples_come_as_arrays_bytes_and_str_and_lists_stay_lists(url):
    for batch in StreamingDataset(url, batch_size=16, transform=summed, with_index=True):
        for row, i in enumerate(batch["index"].tolist()):
            expected = datasets.value("tok", i)
            assert batch["tok"][row] == expected.tolist()
            assert batch["sum"][row].item() == expected.sum()


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("transform", "workers", "cause", "shown"),
    [
        (Raising(KeyError, "colour"), 0, KeyError, "the transform raised KeyError on sample 57: 'colour'"),
        (Raising(KeyError, "colour"), 1, KeyError, "the transform raised KeyError on sample 57: 'colour'"),
        (Raising(SystemExit, 3), 0, SystemExit, "the transform raised SystemExit on sample 57: 3"),
        (Raising(KeyboardInterrupt), 0, KeyboardInterrupt, "the transform raised KeyboardInterrupt on sample 57"),
        (Raising(Odd, 1, 2), 0, Odd, "the transform raised Odd on sample 57: 1 and 2"),
        (Raising(Odd, 1, 2), 1, RuntimeError, "the transform raised Odd on sample 57: 1 and 2"),
        (Raising(NoMessage), 0, NoMessage, "the transform raised NoMessage on sample 57: its message raises Zero"),
        (Raising(NoMessage), 1, NoMessage, "the transform raised NoMessage on sample 57: its message raises Zero"),
        (unpicklable, 1, Exception, r"the result of the transform for one of \[56, 57, 58, 59\]... cannot be sent"),
    ],
)
def test_whatever_a_transform_raises_comes_at_its_batch_with_its_cause(url, transform, workers, cause, shown):
    arguments = {"transform": transform, "num_workers": workers, "shuffle": False, "with_index": True}
    ds = StreamingDataset(url, batch_size=8, **arguments)
    seen, error = before_error(ds, TransformError, shown)
    assert seen == list(range(56))
    assert ds.state_dict()["position"] == 56
    assert isinstance(error.__cause__, cause)
    if workers:
        assert "in the worker process" in error.__cause__.__notes__[0]


def all_dtypes(sample: dict[str, Any]) -> dict[str, Any]:
    number = torch.tensor([float(sample["label"] + 2**40)])
    weight = torch.ones(1, requires_grad=True)
    return {
        "bfloat16": number.bfloat16(),
        "float8": number.clamp(0, 16).to(torch.float8_e4m3fn),
        "leaf": weight,
        "graph": weight * number,
        "conj": (number + 1j).conj(),
        "float32": number,
        "list": [number.bfloat16()],
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize(("workers", "batch_size"), [(0, 8), (0, None), (1, 8)])
def test_tensors_keep_the_dtypes_that_numpy_lacks_and_lose_their_graphs(url, workers, batch_size):
    ds = StreamingDataset(url, batch_size=batch_size, transform=all_dtypes, num_workers=workers, shuffle=False)
    batch = next(iter(ds))
    count = [8] if batch_size else []
    kinds = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn, "conj": torch.complex64}
    for name in ("bfloat16", "float8", "leaf", "graph", "conj", "float32"):
        assert batch[name].dtype == kinds.get(name, torch.float32)
        assert batch[name].shape == (*count, 1)
        assert not batch[name].requires_grad
    if batch_size:
        assert batch["bfloat16"].float().flatten().tolist() == list(range(8))
        assert batch["float8"].float().flatten().tolist() == list(range(8))
        assert batch["graph"].flatten().tolist() == list(range(8))
        assert batch["list"][3][0].dtype == torch.bfloat16


class Broken:
    """What numpy asks for an array."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no array")


@pytest.mark.long
def test_a_killed_transform_process_is_an_error_at_its_batch(url):
    ds = StreamingDataset(url, batch_size=8, transform=kills_itself, num_workers=1, shuffle=False, with_index=True)
    with pytest.warns(RuntimeWarning, match="a worker process ended by SIGKILL; its work is repeated"):
        problem = "worker processes ended 3 times within 60 s, the last one by SIGKILL"
        assert before_error(ds, EngineError, problem)[0] == list(range(56))
    assert ds.stats().workers_replaced == 2


@pytest.mark.long
def test_a_transform_that_processes_cannot_load_is_an_error(url):
    with pytest.raises(UsageError, match="num_workers=1 with a transform that other processes cannot load"):
        iter(StreamingDataset(url, batch_size=8, transform=lambda sample: sample, num_workers=1))
    datasets.assert_threads_end()


LIST = r"value.tolist\(\), which is returned as a list"


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.empty(2, device="meta"), "'y' of sample 57 as a meta tensor"),
        (torch.zeros(2).to_sparse(), "'y' of sample 57 as a sparse_coo tensor"),
        (torch.zeros(3), r"'y' in shapes \(2,\), \(3,\)"),
        (np.zeros(3), r"'y' in shapes \(2,\), \(3,\)"),
        (np.ma.array([1, 2], mask=[0, 1]), "MaskedArray as 'y' of sample 57, .* elements of int64 are masked"),
        (Broken(), r"Broken as 'y' of sample 57, which is not an array \(ZeroDivisionError"),
        (np.array(["2026-11-23"] * 2, "M8[D]"), r"'y' of sample 57 as an array of datetime64.*astype\('int64'\)"),
        (np.timedelta64(3, "s"), r"'y' of sample 57 as an array of timedelta64\[s\].*astype\('int64'\)"),
        (np.array(["a", "bc"]), rf"'y' of sample 57 as an array of <U2.*{LIST}"),
        (np.array([{}, None]), rf"'y' of sample 57 as an array of object.*{LIST}"),
    ],
)
@pytest.mark.parametrize("batch_size", [8, None])
def test_a_value_that_cannot_be_stacked_is_named(url, value, shown, batch_size):
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {"y": value if sample["label"] == datasets.value("label", 57) else torch.zeros(2)}

    ds = StreamingDataset(url, batch_size=batch_size, transform=transform, shuffle=False)
    if batch_size is None and "in shapes" in shown:
        assert [tuple(sample["y"].shape) for sample in ds] == [(2 + (i == 57),) for i in range(N)]
        return
    with pytest.raises(TransformError, match=shown):
        list(ds)


def many_sizes(sample: dict[str, Any]) -> dict[str, Any]:
    i = int(sample["label"]) + 2**40
    tensor = torch.full((2, 1 + i % 3), i)
    return {"array": sample["x"][: i % 5], "tensor": tensor, "number": i, "name": sample["name"], f"only{i % 2}": b"x"}


def test_without_a_batch_samples_of_any_sizes_and_keys_come_as_they_are(url):
    ds = StreamingDataset(url, batch_size=None, transform=many_sizes, with_index=True)
    seen = []
    for sample in ds:
        i = int(sample["index"])
        seen.append(i)
        assert sample["array"].tolist() == datasets.value("x", i)[: i % 5].tolist()
        assert sample["tensor"].tolist() == [[i] * (1 + i % 3)] * 2
        assert (sample["number"].item(), sample["name"]) == (i, datasets.value("name", i))
        assert sample[f"only{i % 2}"] == b"x"
        assert sample["valid"].item()
    assert sorted(seen) == list(range(N))
    loader = DataLoader(ds, batch_size=8, collate_fn=lambda samples: samples)
    assert [len(samples) for samples in loader] == [8] * 25 + [3]


@pytest.mark.quick(6)
@pytest.mark.parametrize("library", [Exported, OnDevice])
@pytest.mark.parametrize("batch_size", [16, None])
@pytest.mark.parametrize("kind", [StreamingDataset, NumpyDataset])
def test_arrays_of_other_libraries_are_taken_by_dlpack(kind, batch_size, library, url):
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {"y": library(sample["x"] * 2), "label": sample["label"]}

    options = {"batch_size": batch_size, "fields": ["x", "label"], "with_index": True, "num_workers": 0}
    for got in kind(url, transform=transform, **options):
        for i, row in zip(np.atleast_1d(got["index"]).tolist(), got["y"].reshape(-1, 300), strict=True):
            np.testing.assert_array_equal(np.asarray(row), datasets.value("x", i) * 2)


def test_an_array_that_its_library_does_not_copy_to_the_cpu_is_an_error_of_the_field(url):
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {"y": OnDevice(sample["x"], copies=False)}

    with pytest.raises(TransformError, match=r"OnDevice as 'y' of sample \d+.*is on a device.*copy it to the CPU"):
        next(iter(NumpyDataset(url, transform=transform, batch_size=16, fields=["x"], num_workers=0)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch_size", [16, None])
def test_a_ragged_field_stays_ragged_through_a_transform(url, batch_size):
    def cut(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "tok": sample["tok"][:2], "few": sample["tok"][:0]}

    for change in (lambda sample: sample, cut):
        plain = StreamingDataset(url, batch_size=batch_size)
        for expected, found in zip(plain, StreamingDataset(url, batch_size=batch_size, transform=change), strict=True):
            if change is not cut:
                assert {name: str(value) for name, value in found.items()} == {
                    name: str(value) for name, value in expected.items()
                }
            elif batch_size:
                lengths = torch.diff(expected["tok_offsets"]).clamp(max=2)
                assert torch.diff(found["tok_offsets"]).tolist() == lengths.tolist()
                assert found["few"].shape == (16, 0)
            else:
                assert found["tok"].tolist() == expected["tok"][:2].tolist()


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        (np.ma.array([1, 2], mask=[1, 0]), np.ones(1, int), "'tok' of sample 7, .* elements of int64 are masked"),
        (np.ones(1, int), np.array(["2026-11-23"], "M8[D]"), r"'tok' of sample 8 as an array of datetime64"),
        (np.array([{}]), np.array([]), r"'tok' of sample 7 as an array of object"),
        (np.ones(2, np.int32), np.array([]), "'tok' of sample 8 as an array of float64 after one of int32"),
    ],
)
def test_a_ragged_value_that_cannot_be_concatenated_is_named(first, second, shown):
    with pytest.raises(TransformError, match=shown):
        collate([{"tok": first}, {"tok": second}], [7, 8], ragged=["tok"])


def test_masked_floats_of_a_ragged_field_are_nan():
    masked = np.ma.array([1, 2, 3], "f4", mask=[1, 0, 0])
    values, offsets = collate([{"tok": masked}, {"tok": masked[:1]}], [7, 8], ragged=["tok"])["tok"]
    assert np.array_equal(values, [np.nan, 2, 3, np.nan], equal_nan=True)
    assert (type(values), values.dtype, offsets.tolist()) == (np.ndarray, np.dtype("f4"), [0, 3, 4])


def process_id(sample: dict[str, Any]) -> dict[str, Any]:
    return {"process": os.getpid()}


@pytest.mark.long
def test_each_worker_has_large_arrays_of_a_transform_of_its_own(url):
    calls: dict[int, list[int]] = {}
    for batch in StreamingDataset(url, batch_size=16, remainder="uneven", transform=Counting(), num_workers=2):
        for process, call in zip(batch["process"].tolist(), batch["calls"].tolist(), strict=True):
            calls.setdefault(process, []).append(call)
    assert len(calls) == 2
    assert all(sorted(numbers) == list(range(1, len(numbers) + 1)) for numbers in calls.values())


@pytest.mark.long
def test_workers_are_started_once_for_all_epochs_and_datasets(url):
    ds = StreamingDataset(url, batch_size=16, transform=process_id, num_workers=2)
    epochs = [{int(i) for batch in ds for i in batch["process"]} for _ in range(4)]
    assert all(epoch == epochs[0] for epoch in epochs)
    assert len(epochs[0]) == 2
    ds.close()
    again = StreamingDataset(url, batch_size=16, transform=process_id, num_workers=2)
    assert {int(i) for batch in again for i in batch["process"]} == epochs[0]


@pytest.mark.parametrize(
    ("transform", "shown"),
    [
        (lambda sample: None, "the transform returned NoneType for sample"),
        (lambda sample: {"a" if sample["name"] else "b": 1}, "returned keys"),
    ],
)
def test_a_result_that_is_no_sample_is_an_error(url, transform, shown):
    with pytest.raises(TransformError, match=shown):
        list(StreamingDataset(url, batch_size=16, transform=transform))


def test_python_objects_come_as_a_list(url):
    day = datetime.date(2020, 1, 1)
    batch = next(iter(StreamingDataset(url, batch_size=4, transform=lambda sample: {"day": day, "x": sample["x"]})))
    assert batch["day"] == [day] * 4


UNGUARDED = """
import sys
import datasets
import streamloader as sl

def same(sample):
    return sample

for batch in sl.StreamingDataset(sys.argv[1], batch_size=16, fields=["label"], transform=same, num_workers=1):
    pass
"""


@pytest.mark.long
def test_a_script_without_a_main_guard_gets_an_error_that_names_it(url, tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), url]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if line.startswith("streamloader.errors.")][-1]
    assert "iterates a dataset on import; put the training code below `if __name__ == '__main__':`" in last


def test_what_a_transform_keeps_is_not_written_again(url):
    kept: list[dict[str, Any]] = []

    def keep(sample: dict[str, Any]) -> dict[str, Any]:
        kept.append(sample)
        return {"label": sample["label"]}

    for _ in StreamingDataset(url, batch_size=4, transform=keep, fields=["x", "label"]):
        pass
    for sample in kept:
        i = int(sample["label"]) + 2**40
        assert np.array_equal(sample["x"], datasets.value("x", i))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3), st.data())
def test_keys_that_differ_give_other_numbers(key, data):
    other = list(key)
    other[data.draw(st.integers(0, 2))] ^= data.draw(st.integers(1, 2**64 - 1))
    first, same = rng_of(key).random(4).tolist(), rng_of(key).random(4).tolist()
    assert first == same
    assert first != rng_of(tuple(other)).random(4).tolist()


def test_the_generator_is_a_second_positional_argument():
    def keyword(sample: Any, *, rng: Any = None) -> None: ...
    def optional(sample: Any, rng: Any = None) -> None: ...
    def other(sample: Any, size: int = 3) -> None: ...

    found = {function: takes_rng(function) for function in (noisy, optional, summed, other, keyword, dict)}
    assert found == {noisy: True, optional: True, summed: False, other: False, keyword: False, dict: False}


def test_collating_keeps_dtypes_and_stacks_numbers():
    samples = [{"a": np.float16(i), "b": np.full((2, 2), i, np.uint16), "c": i, "d": None, "e": b"x"} for i in (1, 2)]
    batch = collate(samples, [0, 1])
    assert batch["a"].dtype == np.float16
    assert (batch["b"].dtype, batch["b"].shape) == (np.uint16, (2, 2, 2))
    assert batch["c"].tolist() == [1, 2]
    assert batch["d"] == [None, None]
    assert batch["e"] == [b"x", b"x"]
    assert collate([], []) == {}


def test_a_column_with_none_or_a_text_is_a_list_wherever_it_stands():
    for values in ([None, 1.5], [1.5, None], [np.zeros(2), None], ["a", 1], [1, "a"], [1, b"a"]):
        assert collate([{"a": value} for value in values], [0, 1]) == {"a": values}
    with pytest.raises(TransformError, match="sample 1 as an array of <U1, which tensors do not have"):
        collate([{"a": 1}, {"a": np.array("a")}], [0, 1])


def test_masked_floats_of_a_transform_are_nan():
    rows = np.ma.array([[1, 2], [3, 4]], "f4", mask=[[0, 1], [0, 0]])
    batch = collate([{"row": row, "last": row[1]} for row in rows], [0, 1])
    assert np.array_equal(batch["row"], [[1, np.nan], [3, 4]], equal_nan=True)
    assert np.array_equal(batch["last"], [np.nan, 4], equal_nan=True)
    assert {column.dtype for column in batch.values()} == {np.dtype("f4")}
    with pytest.raises(TransformError, match=r"field 'n' of samples 7, ... .* elements of int64 are masked"):
        collate([{"n": 1}, {"n": np.ma.masked}], [7, 8])


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    """What libraries of augmentations do: they draw from the generator of torch, without giving one."""
    x = torch.from_numpy(sample["x"])
    dropped = torch.nn.functional.dropout(x[:8] + 1)
    drawn = [torch.rand(2), torch.randn(2), torch.randint(2**40, (2,)), torch.rand_like(x[:2]), torch.randperm(5)]
    return {"drawn": torch.cat([*drawn, dropped, x[:2].clone().uniform_(3, 4)]), "label": sample["label"]}


def drawn_by_label(url: str, **arguments: Any) -> dict[int, list[float]]:
    ds = StreamingDataset(url, transform=augmented, seed=3, fields=["x", "label"], **arguments)
    found: dict[int, list[float]] = {}
    for batch in ds:
        found |= rows(batch)
    ds.close()
    return found


def rows(batch: dict[str, Any]) -> dict[int, list[float]]:
    """What the samples of a batch have drawn, by label."""
    valid = batch["valid"]
    return dict(zip(batch["label"][valid].tolist(), batch["drawn"][valid].tolist(), strict=True))


@pytest.mark.long
def test_torch_draws_the_numbers_of_a_sample_and_leaves_the_training_loop_its_own(url):
    torch.manual_seed(7)
    expected = torch.rand(50).tolist()
    torch.manual_seed(7)
    found, loop = {}, []
    ds = StreamingDataset(url, batch_size=16, transform=augmented, seed=3, fields=["x", "label"])
    for batch in ds:
        found |= rows(batch)
        loop += [torch.rand(1).item() for _ in range(3)]  # while other batches are transformed
    assert loop == expected[: len(loop)]
    assert len(loop) == 39
    assert len({tuple(row) for row in found.values()}) == N
    assert found == drawn_by_label(url, batch_size=5)
    two = [drawn_by_label(url, batch_size=16, world=(rank, 2)) for rank in (0, 1)]
    assert two[0] | two[1] == found
    assert drawn_by_label(url, batch_size=16, num_workers=2) == found


def global_numbers(sample: dict[str, Any]) -> dict[str, Any]:
    return {"label": sample["label"], "numpy": np.random.random(2), "python": random.random()}


@pytest.mark.long
def test_processes_seed_numpy_and_python_for_each_sample(url):
    found = []
    for workers, batch_size in ((1, 16), (2, 5)):
        ds = StreamingDataset(url, batch_size=batch_size, transform=global_numbers, num_workers=workers)
        columns = [[batch[name][batch["valid"]].tolist() for name in ("label", "numpy", "python")] for batch in ds]
        found.append({label: (*two, one) for batch in columns for label, two, one in zip(*batch, strict=True)})
        ds.close()
    assert found[0] == found[1]
    assert len({number for numbers in found[0].values() for number in numbers}) == 3 * N
    state, numpys = random.getstate(), np.random.get_state()[1].tolist()
    list(StreamingDataset(url, batch_size=16, transform=augmented, fields=["x", "label"]))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (state, numpys)


@pytest.mark.long
def test_a_transform_that_imports_torch_itself_draws_the_same_numbers_from_the_first_sample_on(url):
    found = []
    for workers in (0, 1):
        ds = StreamingDataset(url, batch_size=16, transform=draws_from_torch, num_workers=workers, shuffle=False)
        found.append(rows(next(iter(ds))))
        ds.close()
    assert found[0] == found[1]


def test_a_dataloader_worker_keeps_the_global_generators_of_its_collate_fn(url):
    def seeded(worker: int) -> None:
        random.seed(5)
        np.random.seed(5)

    ds = StreamingDataset(url, batch_size=16, transform=lambda sample: {"label": sample["label"]})
    drawn = list(DataLoader(ds, None, num_workers=1, worker_init_fn=seeded, collate_fn=draw))
    python, numpys = random.Random(5), np.random.RandomState(5)
    assert drawn == [(python.random(), numpys.random()) for _ in drawn]


def draw(batch: dict[str, Any]) -> tuple[float, float]:
    return random.random(), np.random.random()
