"""Batches on a device: the same batches, states and errors as without one, whatever was copied ahead.

`device="cpu"` takes the way of every device, with streams that do nothing; those of `test_device_schedules.py` do.
"""

import gc
import io
import itertools
import pickle
import time
import weakref
from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import streamloader as sl
from streamloader import options as sl_options
from streamloader.engine.arena import Arena, Buffers
from streamloader.engine.engine import Pipeline
from streamloader.errors import DecodeError, UsageError
from streamloader.options import View
from streamloader.pytorch import device as device_module
from streamloader.pytorch.device import Transfers, choose_cast, page_lock, runtime_of
from streamloader.stats import Counters

N = 150
FIELDS = {"image": "bytes:jpeg", "x": "float32[40]", "label": "int64", "name": "text", "tokens": "ragged:int32"}
LAYOUT = sl.Layout(chunk_size=1 << 12, block_size=1 << 13, samples_per_shard=64)
DECODE = sl.Decode(size=(16, 12), crop="random", normalize="imagenet")
# float32: the device computes x * scale + shift, a decoder (x / 255 - mean) / std; both round once or twice
FLOAT32, BFLOAT16 = 2e-6, 2**-6
BAD = 77


@pytest.fixture(autouse=True)
def no_record_stream(monkeypatch):
    """Memory that is used on two streams is held until an event has completed instead."""

    def called(*_: Any) -> None:
        raise AssertionError("record_stream")

    monkeypatch.setattr(torch.Tensor, "record_stream", called)


def write(folder: Any, bad: int | None = None) -> str:
    random = np.random.default_rng(1)
    with sl.Writer(str(folder), FIELDS, layout=LAYOUT, num_samples=N) as out:
        for i in range(N):
            data = io.BytesIO()
            Image.fromarray(random.integers(0, 255, (20 + i % 3, 24, 3), dtype=np.uint8)).save(data, "JPEG")
            image = b"\xff\xd8\xff no image" if i == bad else data.getvalue()
            out.write(
                {
                    **{"image": image, "x": np.full(40, i, np.float32), "label": i, "name": f"sample {i}"},
                    "tokens": np.arange(i % 7, dtype=np.int32),
                }
            )
    return str(folder)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return write(tmp_path_factory.mktemp("device") / "good")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    return write(tmp_path_factory.mktemp("device") / "damaged", bad=BAD)


def same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    """Assert that two columns have the same values, within a tolerance, and the same dtype."""
    if isinstance(one, list):
        assert len(one) == len(other)
        for each, of in zip(one, other, strict=True):
            same(each, of, tolerance)
    elif not isinstance(one, torch.Tensor):
        assert one == other
    elif one.is_nested:
        same(one.values(), other.values(), tolerance)
        same(one.offsets(), other.offsets())
    else:
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.double(), other.double(), atol=tolerance, rtol=0)


def run(url: Any, epochs: int = 2, kind: Any = sl.StreamingDataset, **options: Any) -> list[tuple[Any, Any]]:
    """Return the batches of some epochs, each with the state after it."""
    dataset = kind(url, **{"batch_size": 16, "seed": 3, **options})
    return [(batch, dataset.state_dict()) for _ in range(epochs) for batch in dataset]


def check(url: Any, tolerance: float = 0.0, on_device: Any = None, **options: Any) -> None:
    expected = run(url, **options)
    found = run(url, **options, device="cpu", **(on_device or {}))
    assert len(expected) == len(found)
    for (batch, state), (moved, state_then) in zip(expected, found, strict=True):
        assert state == state_then
        assert list(batch) == list(moved)
        for name, column in batch.items():
            same(column, moved[name], tolerance if name.startswith("image") else 0.0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_device_gets_the_same_batches_and_the_state_counts_those_that_were_returned(url, ahead, workers):
    check(url, FLOAT32, {"ahead": ahead}, decode=DECODE, num_workers=workers)


FORMS: dict[str, dict[str, Any]] = {
    "lists": {"collate": {"tokens": "list"}, "fields": ["tokens", "name"]},
    "nested": {"collate": "nested", "fields": ["tokens", "label"]},
    "padded": {"collate": "pad", "fields": ["tokens"]},
    "packed": {"pack": {"tokens": sl.Pack(8, fit="best")}, "fields": ["tokens"]},
    "images of different sizes": {"decode": sl.Decode(), "collate": {"image": "list"}},
    "padded images": {"decode": sl.Decode(normalize="imagenet"), "collate": {"image": "pad"}},
    "views": {"decode": sl.Decode(normalize="imagenet", views={"a": View((8, 8), "random", count=2)})},
    "a transform": {"decode": DECODE, "transform": lambda sample: {"image": sample["image"] * 2}},
    "height and width last": {"decode": sl.Decode(size=(9, 9), normalize="imagenet", layout="HWC")},
    "small batches": {"fields": ["label"], "batch_size": 2},
    "no padding": {"remainder": "uneven", "fields": ["x"], "with_index": True},
    "buckets": {"bucket_by": "tokens", "fields": ["tokens"], "max_tokens": 30, "collate": "pad"},
    "a budget of memory": {"memory": "64MiB", "decode": DECODE},
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_batches_is_the_same_on_a_device(url, form):
    check(url, FLOAT32, {"ahead": 3}, **FORMS[form])


def test_images_travel_as_bytes_and_are_normalised_there(url):
    dataset = sl.StreamingDataset(url, batch_size=16, decode=DECODE, device="cpu")
    sent = []
    transfers = dataset._open_transfers()
    send, transfers.send = (
        transfers.send,
        lambda batch, masked: (sent.append(batch["image"].dtype), send(batch, masked))[1],
    )
    batch = next(iter(dataset))
    assert set(sent) == {torch.uint8}
    assert batch["image"].dtype == torch.float32
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.quick(1)
@pytest.mark.parametrize("cast", ["bfloat16", torch.float16, {"image": "bfloat16"}, {"label": torch.int32}])
def test_values_are_cast_alike_with_and_without_a_device(url, cast):
    tolerance = FLOAT32 if isinstance(cast, dict) and "label" in cast else BFLOAT16
    plain = run(url, decode=DECODE, epochs=1)[0][0]
    for device in (None, "cpu"):
        batch = run(url, decode=DECODE, epochs=1, cast=cast, device=device)[0][0]
        wanted = choose_cast(cast)
        for name, column in batch.items():
            if isinstance(column, torch.Tensor):
                dtype = wanted.get(name) if isinstance(wanted, dict) else wanted
                floats = plain[name].is_floating_point() or isinstance(wanted, dict)
                assert column.dtype == (dtype if dtype is not None and floats else plain[name].dtype)
                same(plain[name].to(column.dtype), column, tolerance if name == "image" else 0.0)


def test_values_of_bfloat16_differ_from_those_of_the_host_by_one_unit_in_the_last_place_at_most(url):
    options: dict[str, Any] = {"decode": DECODE, "cast": "bfloat16", "epochs": 1}
    pairs = list(zip(run(url, **options), run(url, device="cpu", **options), strict=True))
    for (host, _), (moved, _) in pairs:
        for name in ("image", "x"):
            assert host[name].dtype == moved[name].dtype == torch.bfloat16
        units = [batch["image"].contiguous().view(torch.int16).int() for batch in (host, moved)]
        assert (units[0] - units[1]).abs().max() <= 1
        one, other = host["image"].double(), moved["image"].double()
        assert ((one - other).abs() <= 2**-8 * one.abs()).all()
        same(host["x"], moved["x"])


MEAN, STD = (120.0, 110.5, 90.0), (58.0, 57.5, 60.0)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    pixels = np.random.default_rng(2).integers(0, 256, (N, 10, 12, 3), dtype=np.uint8)
    with sl.Writer(str(folder), {"image": "uint8[10,12,3]", "label": "int64"}, layout=LAYOUT, num_samples=N) as out:
        out.write_batch({"image": pixels, "label": np.arange(N)})
    return str(folder), pixels


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("workers", [0, 2])
def test_stored_pixels_are_normalised_by_channel_as_they_are_in_numpy(raw, device, workers):
    url, pixels = raw
    for values in ((MEAN, STD), "imagenet"):
        dataset = sl.StreamingDataset(
            url, batch_size=16, normalize={"image": values}, device=device, num_workers=workers, with_index=True
        )
        mean, std = np.array(sl_options.IMAGENET) * 255 if values == "imagenet" else np.array(values)
        for batch in dataset:
            expected = (pixels[batch["index"]] - mean) / std
            assert batch["image"].dtype == torch.float32
            np.testing.assert_allclose(batch["image"], expected, atol=FLOAT32, rtol=0)
            same(batch["label"], batch["index"])
    assert list(DataLoader(sl.StreamingDataset(url, batch_size=16, normalize={"image": "imagenet"}), batch_size=None))


def test_values_by_channel_must_fit_their_field(raw):
    url, _ = raw
    for given, message in (
        ({"image": ((1.0, 2.0), (1.0, 1.0))}, "has 2 channels of 'image', which is"),
        ({"image": ((1.0, 2.0, 3.0), (1.0, 0.0, 1.0))}, "std above 0"),
        ({"image": ((1.0,), (1.0, 2.0, 3.0))}, "std above 0"),
        ({"nothing": "imagenet"}, "not fetched"),
        ({"label": "imagenet"}, "which is int64"),
    ):
        with pytest.raises(UsageError, match=message):
            sl.StreamingDataset(url, batch_size=16, normalize=given)
    with pytest.raises(UsageError, match="by channel with batch_size=None"):
        sl.StreamingDataset(url, batch_size=None, normalize={"image": "imagenet"})
    with pytest.raises(UsageError, match="by channel with transform="):
        sl.StreamingDataset(url, batch_size=16, normalize={"image": "imagenet"}, transform=dict)
    with pytest.raises(UsageError, match="without torch"):
        sl.NumpyDataset(url, batch_size=16, normalize={"image": "imagenet"})
    sources = [sl.Source(url, normalize={"image": "imagenet"}), sl.Source(url)]
    with pytest.raises(UsageError, match="differs between the sources"):
        sl.Mixture(dict.fromkeys(sources, 0.5), batch_size=16)


@pytest.mark.quick(1)
@pytest.mark.parametrize("on_error", ["mask", "replace"])
def test_bad_samples_are_masked_and_replaced_alike(damaged, on_error):
    check(damaged, FLOAT32, {"ahead": 3}, decode=DECODE, on_error=on_error)


@pytest.mark.quick(2)
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_an_error_is_raised_once_at_its_batch_after_all_before_it(damaged, ahead):
    def until_error(**options: Any) -> tuple[int, Any]:
        dataset = sl.StreamingDataset(damaged, batch_size=16, seed=3, decode=DECODE, **options)
        batches, count = iter(dataset), 0
        with pytest.raises(DecodeError, match=f"sample {BAD} "):
            for _ in batches:
                count += 1
        state = dataset.state_dict()
        with pytest.raises(sl.errors.EngineError, match="ended with an error"):
            next(batches)
        return count, state

    assert until_error() == until_error(device="cpu", ahead=ahead)


def counted(transfers: Transfers) -> list[Any]:
    """Return what `transfers` begins to copy from now on."""
    sent, send = [], transfers.send

    def sending(batch: Any, masked: Any = ()) -> Any:
        sent.append(batch)
        return send(batch, masked)

    transfers.send = sending  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_batches_that_are_ready_are_copied_before_they_are_asked_for(url, ahead, monkeypatch):
    ready = Pipeline.is_ready

    def waited(pipeline: Pipeline) -> bool:
        stop = time.monotonic() + 20
        while not ready(pipeline) and time.monotonic() < stop:
            time.sleep(0.001)
        return ready(pipeline)

    monkeypatch.setattr(Pipeline, "is_ready", waited)
    dataset = sl.StreamingDataset(url, batch_size=16, fields=["label"], device="cpu", ahead=ahead, num_workers=0)
    sent = counted(dataset._open_transfers())
    for number, _ in enumerate(dataset, 1):
        assert len(sent) == min(number + ahead - 1, len(dataset))
    assert number == len(dataset)
    transfers = sl.to_device([torch.ones(2) for _ in range(8)], "cpu", ahead)
    sent = counted(transfers)
    for number, _ in enumerate(transfers, 1):
        assert len(sent) == min(number + ahead - 1, 8)
    assert number == 8


def test_a_run_that_is_left_goes_on_where_it_was_and_not_where_copies_were(url):
    options: dict[str, Any] = {"batch_size": 16, "seed": 3, "with_index": True, "fields": ["label"]}
    whole = [batch["index"].tolist() for batch in sl.StreamingDataset(url, **options)]
    for stop in (1, 4, 9):
        dataset = sl.StreamingDataset(url, **options, device="cpu", ahead=4)
        seen = [batch["index"].tolist() for batch in itertools.islice(dataset, stop)]
        again = sl.StreamingDataset(url, **options, device="cpu", ahead=3)
        again.load_state_dict(dataset.state_dict())
        assert seen + [batch["index"].tolist() for batch in again] == whole


def test_iterations_of_some_steps_cross_epochs_alike(url):
    for options in ({"steps_per_epoch": 7}, {"skip_steps": {0: range(2, 5), 1: [0]}}):
        check(url, 0.0, {"ahead": 3}, fields=["label"], with_index=True, epochs=4, **options)


def test_mixtures_and_new_weights_are_the_same_on_a_device(url, damaged):
    def batches(**options: Any) -> list[Any]:
        mixture = sl.Mixture({url: 0.5, damaged: 0.5}, batch_size=16, fields=["label"], with_index=True, **options)
        out = []
        for number, batch in enumerate(mixture):
            out.append((batch["source"].tolist(), batch["index"].tolist()))
            if number == 3:
                mixture.set_weights({url: 0.9, damaged: 0.1})
        return out

    assert batches() == batches(device="cpu", ahead=3)


def test_graphs_get_the_same_tensors_with_new_values(url):
    expected = run(url, decode=DECODE, fields=["image", "label"], epochs=2)
    dataset = sl.StreamingDataset(
        url, batch_size=16, seed=3, decode=DECODE, fields=["image", "label"], device="cpu", graph_buffers=True
    )
    addresses, count = set(), 0
    for epoch in range(2):
        for number, batch in enumerate(dataset):
            addresses.add((batch["image"].data_ptr(), batch["label"].data_ptr()))
            same(expected[epoch * len(dataset) + number][0]["image"], batch["image"], FLOAT32)
            same(expected[epoch * len(dataset) + number][0]["label"], batch["label"])
            count += 1
    assert (len(addresses), count) == (1, len(expected))
    ragged = sl.StreamingDataset(url, batch_size=16, fields=["tokens"], device="cpu", graph_buffers=True)
    with pytest.raises(UsageError, match="graph_buffers=True, and the first batch"):
        list(ragged)


@dataclass
class Pair:
    one: torch.Tensor
    name: str


Named = namedtuple("Named", ["first", "second"])


def test_to_device_keeps_the_structure_of_batches():
    values = torch.arange(12.0)
    parts = list(torch.unsafe_split_with_sizes(values, [3, 4, 5]))
    batch = {
        **{"a": values, "b": [values[:2], (values[1:3], "text")], "c": Named(values[::2], 5), "d": Pair(values, "p")},
        **{"e": UserDict(x=values), "f": parts, "g": None, "h": values.reshape(3, 4).T, "i": torch.tensor(3)},
        "j": torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 12])),
        "k": torch.eye(3).to_sparse(),
    }
    (moved,) = sl.to_device([batch], "cpu")
    assert list(moved) == list(batch)
    assert [type(each) for each in moved.values()] == [type(each) for each in batch.values()]
    same(moved["a"], values)
    assert moved["a"].data_ptr() != values.data_ptr()
    assert moved["b"][1][1] == "text"
    same(moved["b"][1][0], values[1:3])
    same(moved["c"].first, values[::2].contiguous())
    same(moved["d"].one, values)
    same(moved["e"]["x"], values)
    same(moved["f"], parts)
    assert moved["f"][0].untyped_storage().data_ptr() == moved["f"][2].untyped_storage().data_ptr(), "copied together"
    same(moved["h"], batch["h"])
    same(moved["j"], batch["j"])
    assert torch.equal(moved["k"].to_dense(), torch.eye(3))
    assert batch["d"].one is values, "the batch that was given is as it was"


def test_to_device_reads_a_dataloader_again_and_again_and_raises_its_error_in_its_place(url):
    loader = DataLoader(sl.StreamingDataset(url, batch_size=16, fields=["label"]), batch_size=None)
    moved = sl.to_device(loader, "cpu", ahead=3)
    epochs = [[batch["label"].tolist() for batch in moved] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert len(moved) == len(loader) == len(epochs[0])

    def failing() -> Any:
        yield torch.ones(1)
        yield torch.ones(2)
        raise OSError("the disk is gone")

    batches = iter(sl.to_device(failing(), "cpu", ahead=4))
    assert [len(next(batches)), len(next(batches))] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:99"}, r"device='cuda:99'.*give 'cuda'"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": "cpu", "ahead": 0}, "ahead=0"),
        ({"device": "cpu", "batch_size": None}, "sl.to_device"),
        ({"cast": "float"}, None),
        ({"cast": "nothing"}, "cast='nothing'"),
        ({"graph_buffers": True}, "graph_buffers=True without device="),
    ],
)
def test_an_invalid_argument_is_an_error_with_its_remedy(url, options, message):
    if message is None:
        assert run(url, epochs=1, fields=["x"], **options)[0][0]["x"].dtype == torch.float32
        return
    with pytest.raises(UsageError, match=message):
        list(sl.StreamingDataset(url, **{"batch_size": 16, **options}))
    if "device" in options and options.get("batch_size", 1) and "ahead" not in options:
        with pytest.raises(UsageError, match="device="):
            sl.to_device([], options["device"])


@pytest.mark.long
def test_a_numpy_dataset_and_a_worker_of_a_dataloader_have_no_device(url):
    with pytest.raises(UsageError, match="without torch"):
        sl.NumpyDataset(url, batch_size=16, device="cpu")
    dataset = sl.StreamingDataset(url, batch_size=16, fields=["label"], device="cpu", num_workers=0)
    with pytest.raises(UsageError, match="in a worker of a DataLoader"):
        list(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="forkserver"))
    assert len(list(DataLoader(dataset, batch_size=None))) == len(dataset)
    assert len(list(pickle.loads(pickle.dumps(dataset)))) == len(dataset)


def test_a_loader_with_a_device_is_freed_at_once_when_it_is_dropped(url):
    dataset = sl.StreamingDataset(url, batch_size=16, fields=["label"], device="cpu", num_workers=0)
    batches = iter(dataset)
    next(batches)
    gone = weakref.ref(dataset)
    gc.disable()
    try:
        del dataset, batches
        assert gone() is None
    finally:
        gc.enable()


# ---- page-locked memory, by a double of the driver


class Driver:
    """Counts what is registered, and refuses what is registered twice or unregistered before it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.calls, self.code = 0, code
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert flags == 1
        assert all(start + size <= other or other + of <= start for other, of in self.locked.items())
        self.calls += 1
        if not self.code:
            self.locked[start] = size
        return self.code

    def cudaHostUnregister(self, start: int) -> int:
        del self.locked[start]
        return 0


def test_memory_is_page_locked_once_and_unlocked_before_its_pages_are_free(monkeypatch):
    driver, arena = Driver(monkeypatch), Arena(shared=False)
    buffers = Buffers(arena, Counters())
    buffers.prepare = lambda memory: page_lock(torch.device("cuda", 0), memory)
    for _ in range(5):
        array = buffers.lease((1 << 20,), "uint8")
        assert driver.locked[array.ctypes.data] >= 1 << 20
        small = buffers.lease((100,), "uint8")
        assert small.ctypes.data not in driver.locked
        del array, small
    assert driver.calls == 1, "reused"
    del buffers
    assert not driver.locked
    again = Buffers(arena, Counters())
    again.prepare = lambda memory: page_lock(torch.device("cuda", 0), memory)
    batch = again.lease((1 << 20,), "uint8")
    del again
    gc.collect()
    assert driver.locked, "the batch is still there"
    del batch
    assert not driver.locked


def test_memory_that_the_driver_refuses_to_lock_is_used_without(monkeypatch):
    driver, arena = Driver(monkeypatch, code=1), Arena(shared=False)
    memory = arena.allocate(1 << 20)
    page_lock(torch.device("cuda", 0), memory)
    memory[:] = 1
    del memory
    assert not driver.locked
    assert arena.allocated == 0


def test_a_loader_locks_the_memory_of_its_batches(url, monkeypatch):
    locked = []
    monkeypatch.setattr(device_module, "page_lock_of", lambda _: lambda memory: locked.append(memory.nbytes))
    dataset = sl.StreamingDataset(url, batch_size=64, decode=sl.Decode(size=(64, 64)), device="cpu", num_workers=0)
    batches = list(dataset)
    assert max(locked) >= batches[0]["image"].nbytes
    before = len(locked)
    list(dataset)
    list(dataset)
    assert len(locked) <= before + 8


def timer() -> type:
    """Return the class of a timer, each of which is recorded 10 ms after the one before."""
    now = itertools.count()

    class Timer:
        def __init__(self) -> None:
            self.at, self.done = 0, False

        def record(self, _: Any) -> None:
            self.at, self.done = next(now) * 10, True

        def query(self) -> bool:
            return self.done

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    return Timer


def test_the_time_that_a_device_waits_is_counted_once_it_is_known():
    transfers = Transfers("cpu")
    transfers._runtime.timer = timer()
    for _ in range(3):
        transfers.begin_wait()
        transfers.receive(transfers.send(torch.ones(3)))
    assert transfers.counters.snapshot().device_wait_seconds == pytest.approx(0.03)


def test_a_loader_counts_the_time_that_a_device_waits_for_each_batch(url):
    dataset = sl.StreamingDataset(url, batch_size=16, fields=["label"], device="cpu")
    dataset._open_transfers()._runtime.timer = timer()
    for _ in dataset:
        pass
    assert dataset.stats().device_wait_seconds == pytest.approx(0.01 * len(dataset))


def test_copies_to_a_gpu_are_asynchronous_and_of_page_locked_memory(monkeypatch):
    device = torch.device("cuda", 1)

    def made(name: str) -> Any:
        return lambda *given, **options: (name, given, options)

    names = ("Stream", "Event", "stream", "current_stream")
    module = SimpleNamespace(**{name: made(name) for name in names})
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    runtime = runtime_of(device)
    assert runtime.Stream() == ("Stream", (device,), {})
    assert runtime.current_stream() == ("current_stream", (device,), {})
    assert runtime.Event() == ("Event", (), {"blocking": True})
    assert runtime.timer() == ("Event", (), {"enable_timing": True})
    monkeypatch.setattr(torch, "empty_like", made("empty_like"))
    host, locked = torch.ones(3), torch.ones(3)
    assert runtime_of(device).empty_like(host) == ("empty_like", (host,), {"device": device})
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is locked)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: locked if tensor is host else None)
    assert runtime.source(host) is locked
    assert runtime.source(locked) is locked
    monkeypatch.setattr(torch.Tensor, "copy_", made("copy_"))
    assert runtime.copy(host, locked) == ("copy_", (host, locked), {"non_blocking": True})
