"""What a device is given, and what is said of it: arguments, statistics, and values that look like others."""

import time
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import streamloader as sl
from streamloader.errors import UsageError
from streamloader.pytorch import device as device_module
from streamloader.pytorch.device import Transfers

N = 640


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("arguments") / "d")
    with sl.Writer(folder, {"image": "uint8[4,4,3]", "x": "float32[4]"}, num_samples=N) as out:
        out.write_batch({"image": np.zeros((N, 4, 4, 3), np.uint8), "x": np.ones((N, 4), np.float32)})
    return folder


def test_tensors_of_one_memory_that_are_conjugated_or_negated_keep_their_values():
    x = torch.tensor([1 + 2j, 2j, 3j, 4j])
    y = torch.arange(4.0)
    batch = {"a": x, "b": x.conj(), "c": [x[:2].conj(), x[2:]], "d": [torch._neg_view(y[:2]), y[2:]]}
    (moved,) = sl.to_device([batch], "cpu")
    for name, column in batch.items():
        for one, other in zip(torch.atleast_1d(column), torch.atleast_1d(moved[name]), strict=True):
            assert torch.equal(one, other), name


def test_mappings_that_cannot_be_changed_are_left_as_they_are():
    batch = MappingProxyType({"a": torch.ones(2)})
    (moved,) = sl.to_device([(batch, torch.ones(1))], "cpu")
    assert moved[0] is batch


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize(
    ("cast", "message"),
    [
        ({"imge": "bfloat16"}, "names imge, and the columns are image, x"),
        ({"x": None}, "cast="),
        ({"x": {"y": "bfloat16"}}, "cast="),
        ({}, "cast="),
        ("int64", "'image', which is normalised"),
        ({"image": "int64"}, "'image', which is normalised"),
    ],
)
def test_a_cast_that_cannot_be_done_is_an_error(url, device, cast, message):
    with pytest.raises(UsageError, match=message):
        next(iter(sl.StreamingDataset(url, batch_size=8, cast=cast, device=device, normalize={"image": "imagenet"})))


@pytest.mark.parametrize("device", ["cuda", "cuda:99", "bogus:3", "gpu", "meta", 5.0])
def test_a_device_that_is_not_there_is_an_error_of_the_constructor(url, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(UsageError, match="device="):
        sl.StreamingDataset(url, batch_size=8, device=device)


def test_values_by_channel_may_be_arrays_and_lists(url):
    mean, std = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0])
    forms: list[Any] = [(mean, std), np.stack([mean, std]), [mean.tolist(), std.tolist()]]
    for form in forms:
        batch = next(iter(sl.StreamingDataset(url, batch_size=8, normalize={"image": form})))
        np.testing.assert_allclose(batch["image"][0, 0, 0], -mean / std, rtol=1e-6)
    sources = [
        sl.Source(url, where=slice(start, start + 300), normalize={"image": form})
        for start, form in zip((0, 300), forms, strict=False)
    ]
    assert next(iter(sl.Mixture(dict.fromkeys(sources, 0.5), batch_size=8)))["image"].dtype == torch.float32


@pytest.mark.quick(2)
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_statistics_count_the_batches_that_were_returned(url, ahead):
    for device in (None, "cpu"):
        dataset = sl.StreamingDataset(url, batch_size=64, seed=1, device=device, ahead=ahead)
        batches = iter(dataset)
        next(batches), next(batches)
        if device is not None:  # the other one takes small batches together
            assert (dataset.stats().samples, dataset.stats().batches) == (128, 2)
        for _ in batches:
            pass
        for _ in dataset:
            pass
        assert dataset.stats().samples == 2 * N


class Slow:
    """An event of a device that is always 20 ms behind."""

    def record(self, _: Any = None) -> None:
        self.end = time.monotonic() + 0.02

    def query(self) -> bool:
        return time.monotonic() >= self.end

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.001)


def test_the_wait_of_a_batch_does_not_count_room_on_the_device(url, monkeypatch):
    runtime_of = device_module.runtime_of

    def slow_runtime(device: torch.device) -> Any:
        runtime = runtime_of(device)
        runtime.Event = Slow
        return runtime

    monkeypatch.setattr(device_module, "runtime_of", slow_runtime)
    reports: list[Any] = []
    dataset = sl.StreamingDataset(url, batch_size=64, device="cpu", on_batch=reports.append, num_workers=0)
    for _ in range(3):
        for _ in dataset:
            pass
    later = reports[2 * len(dataset) :]
    assert sum(report.seconds for report in later) > 0.01 * len(later)
    assert sum(report.wait_seconds for report in later) < 0.5 * sum(report.seconds for report in later)


def test_the_end_of_a_script_does_not_wait_for_a_device_that_hangs(monkeypatch):
    monkeypatch.setattr(device_module, "END_SECONDS", 0.1)
    transfers = Transfers("cpu")
    stuck = Slow()
    stuck.end = float("inf")
    held = [(stuck, torch.ones(1))]
    begin = time.monotonic()
    device_module._end(torch.device("cpu"), held)  # type: ignore[arg-type] # in the main thread, as at the end
    assert time.monotonic() - begin < 5
    assert held, "what a device may still use is not freed"
    transfers.close()


def test_memory_is_watched_only_for_a_device_that_locks_it(url, monkeypatch):
    for device in (None, "cpu"):
        dataset = sl.StreamingDataset(url, batch_size=64, device=device, num_workers=0)
        arena = dataset._engine().executor.arena
        before = len(arena.references)
        assert len(list(dataset)) == len(dataset)
        assert len(arena.references) == before
    watched: list[Any] = []
    monkeypatch.setattr(device_module, "page_lock_of", lambda _: watched.append)
    assert list(sl.StreamingDataset(url, batch_size=64, device="cpu", num_workers=0))
    assert watched
