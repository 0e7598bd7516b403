"""Arrays in place: how often each chunk is read, as a web server counts it, and what `plan` says."""

import warnings
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import zarr
from folder_server import folder_server

import streamloader as sl
from streamloader.measure.forecast import ForecastOptions, forecast
from streamloader.options import Sampling

STEPS, COUNT = 4, 160  # of a chunk of `a`, of the axis
PLANE = (8, 16)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Small worlds and many lanes are the subject of other tests, and so are their warnings."""
    warnings.filterwarnings("ignore", message=".*(lanes|blocks are read|begins anew)")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two arrays of unlike chunks, and one without the sample axis; (folder, values)."""
    folder, rng = tmp_path_factory.mktemp("reads") / "x.zarr", np.random.default_rng(0)
    group = zarr.open_group(folder, mode="w", zarr_format=3)
    values = {"a": rng.random((COUNT, *PLANE)), "b": rng.random((COUNT, *PLANE)), "o": rng.random(PLANE)}
    values = {name: array.astype("f4") for name, array in values.items()}
    for name, chunks in {"a": (STEPS, *PLANE), "b": (2 * STEPS, 8, 8), "o": PLANE}.items():
        dims = ("time", "y", "x")[-len(chunks) :]
        group.create_array(name, data=values[name], chunks=chunks, dimension_names=dims)
    return folder, values


@contextmanager
def served(folder):
    """A web server of a store; yields (URL, a function that counts the reads of each chunk since it was called)."""
    with folder_server(folder) as server:

        def chunks() -> Counter[str]:
            paths, server.paths = server.paths, []
            return Counter(path for path in paths if "/c/" in path)

        yield server.url, chunks


def check(batch, values, offsets=(0,), names=("a", "b")):
    """Compare a batch with the values of the store."""
    for name in names:
        wanted = values[name][batch["index"][:, None] + np.array(offsets)]
        np.testing.assert_array_equal(batch[name], wanted[:, 0] if len(offsets) == 1 else wanted)


SAMPLES = {  # with the offsets of the elements of each
    "elements": ({}, [0]),
    "windows": ({"windows": sl.Window(6)}, range(6)),
    "forecasts": ({"windows": sl.Window(history=2, lead=(3, 9))}, range(2)),
    "elements that are apart": ({"where": slice(None, None, 9)}, [0]),
    "parts": ({"where": np.arange(COUNT) % 50 < 20, "windows": sl.Window(3)}, range(3)),
}
ORDERS = {"default": True, "in order": False, "large": sl.Shuffle(block=40, lanes=4), "lanes": sl.Shuffle(lanes=5)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("samples", SAMPLES)
def test_chunks_that_are_kept_are_read_once_in_all_epochs_as_planned(store, samples, order, workers):
    folder, values = store
    declared, offsets = SAMPLES[samples]
    options = {"shuffle": ORDERS[order], "batch_size": 8, "fields": ("a", "b"), "where": None} | declared
    sampling = Sampling(sample_axis="time", windows=options.pop("windows", None))
    with served(folder) as (url, chunks):
        planned = forecast(url, ForecastOptions(**options, sampling=sampling))
        dataset = sl.NumpyDataset(url, **options, **vars(sampling), with_index=True, num_workers=workers)
        read = Counter[str]()
        for _ in range(3):
            for batch in dataset:
                check(batch, values, offsets)
            read += chunks()
            assert set(read.values()) == {1}
            assert dataset.stats().requests == sum(read.values()) == planned.requests
        dataset.close()
    assert planned.kept


def test_each_rank_reads_once_what_it_keeps(store):
    folder, _ = store
    options = {"batch_size": 8, "fields": ("a",), "shuffle": sl.Shuffle(block=8, lanes=2)}
    sampling = Sampling(sample_axis="time", windows=sl.Window(6))
    with served(folder) as (url, chunks):
        planned = forecast(url, ForecastOptions(**options, world_size=2, sampling=sampling))
        datasets = [sl.NumpyDataset(url, **options, **vars(sampling), world=(rank, 2)) for rank in range(2)]
        first, read = 0, Counter[str]()
        for _ in range(8):
            for dataset in datasets:
                for _ in dataset:
                    pass
            read += chunks()
            first = first or sum(read.values())
        for dataset in datasets:
            dataset.close()
    assert first == pytest.approx(planned.requests, rel=0.1)
    assert set(read.values()) == {2}


def test_chunks_of_a_pass_that_ended_early_are_read_again_only_if_their_blocks_were_in_use(store):
    folder, values = store
    with served(folder) as (url, chunks):
        options = {"batch_size": 4, "shuffle": sl.Shuffle(block=STEPS, lanes=1), "windows": sl.Window(6)}
        dataset = sl.NumpyDataset(url, **options, sample_axis="time", fields=["a"], with_index=True)
        for step, _ in enumerate(dataset):
            if step == 20:
                break
        before = chunks()
        for _ in range(2):
            for batch in dataset:
                check(batch, values, range(6), ["a"])
        again = chunks()
        dataset.close()
    assert set(again.values()) == {1}
    assert len(again.keys() & before.keys()) < len(before)
    assert len(again.keys() | before.keys()) == COUNT // STEPS


@pytest.mark.parametrize("shuffle", [True, sl.Shuffle(lanes=3)])
def test_constants_and_patches_are_right_in_memory_that_is_kept(store, shuffle):
    folder, values = store
    patches = sl.Patch({"y": 3, "x": 5}, stride=2)
    for patch in (None, patches):
        options = {"channels": sl.Channels("a", "o", "b"), "windows": sl.Window(3), "patches": patch}
        dataset = sl.NumpyDataset(folder, batch_size=5, sample_axis="time", **options, shuffle=shuffle, with_index=True)
        for _ in range(2):
            for batch in dataset:
                for number, first in enumerate(batch["index"]):
                    y, x = (0, 0) if patch is None else (batch[f"index_{axis}"][number] for axis in "yx")
                    found = batch["channels"][number]
                    for channel, name in enumerate("aob"):
                        plane = values[name] if name == "o" else values[name][first : first + 3]
                        wanted = plane[..., y : y + found.shape[-2], x : x + found.shape[-1]]
                        np.testing.assert_array_equal(
                            found[:, channel], np.broadcast_to(wanted, found[:, channel].shape)
                        )
        dataset.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_whose_first_dimension_is_not_the_sample_axis_are_kept(tmp_path, workers):
    values = np.random.default_rng(0).random((3, 60, 6)).astype("f4")
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("a", data=values, chunks=(1, 4, 6), dimension_names=["level", "time", "x"])
    mask = np.arange(60) % 20 < 7
    options = {"sample_axis": "time", "windows": sl.Window(3), "where": mask, "num_workers": workers}
    dataset = sl.NumpyDataset(tmp_path / "x.zarr", batch_size=4, **options, with_index=True)
    for _ in range(2):
        for batch in dataset:
            for number, first in enumerate(batch["index"]):
                np.testing.assert_array_equal(batch["a"][number], values[:, first : first + 3])
    assert dataset.stats().requests == 3 * 6
    dataset.close()
