"""Arrays in place: how often each chunk is read, as a web server counts it, and what `plan` says."""

import json
import re
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import zarr
from amounts import covering, examples
from commands import run
from folder_server import folder_server
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr_stores import url_of

import streamloader as sl
from streamloader import errors
from streamloader.engine import engine
from streamloader.engine.budget import Budget
from streamloader.engine.executor import Executor
from streamloader.engine.regions import Regions
from streamloader.measure.forecast import ForecastOptions, forecast
from streamloader.options import Sampling
from streamloader.order.schedule import BlockRef
from streamloader.storage.buffers import empty_buffer
from streamloader.zarr.columns import RegionReader

pytestmark = pytest.mark.usefixtures("two_workers")
DIGEST = "190ca8886b8751338d24bebdc7dee7d5b8842761faa2ff6909b9addc9ffe6d95"
STEPS, COUNT = 4, 160  # of a chunk of `a`, of the axis
PLANE = (8, 16)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Small worlds and many lanes are the subject of other tests, and so are their warnings."""
    warnings.filterwarnings("ignore", message=".*(lanes|blocks are read|begins anew)")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two arrays of unlike chunks, one without the sample axis, and one whose levels are chunks; (folder, values)."""
    folder, rng = tmp_path_factory.mktemp("reads") / "x.zarr", np.random.default_rng(0)
    group = zarr.open_group(folder, mode="w", zarr_format=3)
    values = {"a": rng.random((COUNT, *PLANE)), "b": rng.random((COUNT, *PLANE)), "o": rng.random(PLANE)}
    values = {name: array.astype("f4") for name, array in values.items()}
    for name, chunks in {"a": (STEPS, *PLANE), "b": (2 * STEPS, 8, 8), "o": PLANE}.items():
        dims = ("time", "y", "x")[-len(chunks) :]
        group.create_array(name, data=values[name], chunks=chunks, dimension_names=dims)
    group.create_array("level", data=np.array([500, 850]), chunks=(2,), dimension_names=["level"])
    levels = np.stack([values["a"], values["b"]], axis=1)
    group.create_array("l", data=levels, chunks=(STEPS, 1, *PLANE), dimension_names=["time", "level", "y", "x"])
    return folder, values


@contextmanager
def served(folder):
    """A web server of a store; yields (URL, a function that counts the reads of each chunk since it was called)."""
    with folder_server(folder) as server:
        # or headers wait 40 ms for the acknowledgement of the client
        server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"disable_nagle_algorithm": True})

        def chunks() -> Counter[str]:
            paths, server.paths = server.paths, []
            return Counter(path for path in paths if "/c/" in path)

        yield server.url, chunks


def check(batch, values, offsets=(0,), names=("a", "b")):
    """Compare a batch with the values of the store."""
    for name in names:
        wanted = values[name][batch["index"][:, None] + np.array(offsets)]
        np.testing.assert_array_equal(batch[name], wanted[:, 0] if len(offsets) == 1 else wanted)


@pytest.fixture(autouse=True)
def no_hedges(monkeypatch):
    """They are more requests, on a machine that is slow for a moment."""
    monkeypatch.setattr("streamloader.engine.pace.LEAST_SAMPLES", 10**9)


SAMPLES = {  # with the offsets of the elements of each
    "elements": ({}, [0]),
    "windows": ({"windows": sl.Window(6)}, range(6)),
    "forecasts": ({"windows": sl.Window(history=2, lead=(3, 9))}, range(2)),
    "elements that are apart": ({"where": slice(None, None, 9)}, [0]),
    "parts": ({"where": np.arange(COUNT) % 50 < 20, "windows": sl.Window(3)}, range(3)),
}
ORDERS = {"default": True, "in order": False, "large": sl.Shuffle(block=40, lanes=4), "lanes": sl.Shuffle(lanes=5)}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("samples", "order", "workers"), covering(SAMPLES, ORDERS, [0, 2]))
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
            stats = dataset.stats()
            assert stats.requests == sum(read.values()) == planned.requests
            assert stats.chunks_read == stats.chunks == len(read), "each chunk was read once in all epochs"
        dataset.close()
    assert planned.kept


@pytest.mark.long
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("damaged", [1, 3])
def test_blocks_that_share_chunks_of_a_pass_that_ended_early_are_right(tmp_path, damaged):
    """A block whose chunks earlier blocks claimed reads those that these could not read."""
    values = np.random.default_rng(0).random((64, 8)).astype("f4")
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("a", data=values, chunks=(8, 8), dimension_names=["time", "x"])
    chunk = tmp_path / "x.zarr" / "a" / "c" / str(damaged) / "0"
    stored = chunk.read_bytes()
    options = {"sample_axis": "time", "windows": sl.Window(9), "with_index": True, "shuffle": sl.Shuffle(block=8)}
    for seed in range(8):
        chunk.write_bytes(b"damaged")
        dataset = sl.NumpyDataset(tmp_path / "x.zarr", batch_size=4, **options, seed=seed)
        with pytest.raises(errors.CorruptError):
            list(dataset)
        chunk.write_bytes(stored)
        dataset.set_epoch(1)  # other blocks come first
        for batch in dataset:
            check(batch, {"a": values}, range(9), ["a"])
        dataset.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_chunk_that_was_damaged_is_read_again_in_memory_that_is_kept(tmp_path, workers):
    values = np.random.default_rng(0).random((40, 8)).astype("f4")
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("a", data=values, chunks=(4, 8), dimension_names=["time", "x"])
    chunk = tmp_path / "x.zarr" / "a" / "c" / "5" / "0"
    stored = chunk.read_bytes()
    options = {"sample_axis": "time", "windows": sl.Window(3), "with_index": True, "num_workers": workers}
    dataset = sl.NumpyDataset(tmp_path / "x.zarr", batch_size=4, **options)
    for _ in range(2):
        chunk.write_bytes(b"damaged")
        with pytest.raises(errors.CorruptError, match="20:24"):
            for batch in dataset:
                check(batch, {"a": values}, range(3), ["a"])
    chunk.write_bytes(stored)
    for _ in range(2):
        for batch in dataset:
            check(batch, {"a": values}, range(3), ["a"])
    dataset.close()


@pytest.mark.long
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


BLOCKS = {  # the fields of blocks, and the samples
    "elements": ("a", {}),
    "windows": ("a", {"windows": sl.Window(6)}),
    "windows of wide chunks": ("b", {"windows": sl.Window(12, stride=3)}),
    "forecasts": ("b", {"windows": sl.Window(history=2, lead=(3, 9))}),
    "parts": ("a", {"where": np.arange(COUNT) % 50 < 20, "windows": sl.Window(3)}),
    "channels": ("channels", {"channels": sl.Channels("a", "o", "b"), "windows": sl.Window(5)}),
    "levels": ("channels", {"channels": sl.Channels("l@level=850", "a", "l@level=500"), "windows": sl.Window(5)}),
    "patches": ("a", {"windows": sl.Window(3), "patches": sl.Patch({"y": 3, "x": 5}, stride=2)}),
}


def load(regions, slot, ref, reader, chosen=None):
    """Load the chunks of a block into a slot; return its arrays."""
    target = regions.open(slot, ref, reader, empty_buffer)
    for each in reader.runs(ref.start, ref.stop, chosen):
        store = next(iter(reader.arrays.values()))._store
        reader.write(each, reader.fetch(store.reader(), each), target, empty_buffer)
    return target.arrays


def covered(reader, ref, others):
    """The chunks of which one of the other blocks has all elements that a block needs, found by masks of elements."""
    for region, number, boxes in reader.boxes(ref.start, ref.stop):
        array, member = reader.arrays[number], reader.column.members[number]
        for place in array.places(boxes):
            at = tuple(slice(n * size, (n + 1) * size) for n, size in zip(place, array.array.chunks, strict=True))
            needed = np.zeros(array.array.shape, np.bool_)
            for low, high in boxes:
                needed[tuple(map(slice, low, high))] = True
            for low, high in (bounds for other in others for bounds in reader.regions(other.start, other.stop)):
                had = np.zeros(array.array.shape, np.bool_)
                for box in reader.boxes_of(member, low, high):
                    had[tuple(map(slice, *box))] = True
                if not (needed & ~had)[at].any():
                    yield region, number, place


@pytest.mark.quick(2)
@settings(max_examples=examples(25), deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", BLOCKS)
def test_what_other_blocks_have_is_copied_and_only_the_rest_is_read(store, kind, data):
    field, options = BLOCKS[kind]
    options = options if "channels" in options else {**options, "fields": [field]}
    dataset = sl.NumpyDataset(store[0], batch_size=4, sample_axis="time", **options)
    (reader,) = dataset._datasets[0].region_readers.values()
    block = data.draw(st.integers(1, 30))
    refs = [
        BlockRef(first // block, first, min(first + block, reader.num_samples), first, 0)
        for first in range(0, reader.num_samples, block)
    ]
    number = data.draw(st.integers(0, len(refs) - 1))
    mine = refs[number]
    others = data.draw(st.lists(st.sampled_from(refs[max(0, number - 2) : number + 3]), max_size=3, unique=True))
    regions = Regions(reader.name, reader.layout.field, Executor().arena, (len(others) + 2, block))
    for slot, ref in enumerate(others):
        load(regions, slot, ref, reader)
    expected = load(regions, len(others), mine, reader)
    beside = regions.in_slots(range(len(others)))
    left = regions.fill_from(len(others) + 1, mine, (reader, empty_buffer), beside)
    found = load(regions, len(others) + 1, mine, reader, left)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    every = {
        (n, number, at)
        for n, number, boxes in reader.boxes(mine.start, mine.stop)
        for at in reader.arrays[number].places(boxes)
    }
    chosen = every if left is None else {(n, number, at) for n, number, places in left for at in places}
    assert chosen == every - set(covered(reader, mine, others))


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "block"), [("windows", 8), ("channels", 8), ("patches", 144)])
def test_blocks_in_memory_save_chunks_of_others(store, kind, block, workers, monkeypatch):
    """With `memory=`, of which half of the blocks are kept."""
    field, options = BLOCKS[kind]
    options = options if "channels" in options else {**options, "fields": [field]}
    allot, reads, batches = engine.allot, [], []

    def half(demand, *args):
        demand = replace(demand, kept_bytes=0)
        return allot(demand, *args)._replace(kept_slots=demand.blocks // 2)

    monkeypatch.setattr(engine, "allot", half)
    for reach in (lambda *_: -1, RegionReader.reach):  # first without
        monkeypatch.setattr(RegionReader, "reach", reach)
        order = {"shuffle": sl.Shuffle(block=block, lanes=1), "memory": 1 << 28, "num_workers": workers}
        dataset = sl.NumpyDataset(store[0], batch_size=4, sample_axis="time", **options, **order)
        batches.append([batch[field].tobytes() for _ in range(4) for batch in dataset])
        reads.append(dataset.stats().chunks_read)
        dataset.close()
    assert batches[0] == batches[1]
    assert reads[1] < reads[0]  # by how much depends on what was loaded when


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """An array whose chunks are single steps; (folder, values)."""
    folder = tmp_path_factory.mktemp("steps") / "x.zarr"
    values = np.arange(1, 513, dtype="f4")[:, None, None] * np.ones((128, 128), "f4")
    group = zarr.open_group(folder, mode="w", zarr_format=3)
    group.create_array("a", data=values, chunks=(1, 128, 128), dimension_names=["time", "y", "x"])
    return folder, {"a": values}


@pytest.mark.long
@pytest.mark.parametrize(("shuffle", "workers"), covering([False, sl.Shuffle(lanes=1)], [0, 2]))
def test_windows_that_are_not_kept_read_a_chunk_at_most_1_15_times_as_planned(steps, shuffle, workers, monkeypatch):
    folder, values = steps
    monkeypatch.setattr(Budget, "reuses_blocks", False)
    options = {"shuffle": shuffle, "batch_size": 8, "fields": ("a",), "memory": 38_000_000}
    sampling = Sampling(sample_axis="time", windows=sl.Window(4))
    with served(folder) as (url, chunks):
        planned = forecast(url, ForecastOptions(**options, sampling=sampling))
        dataset = sl.NumpyDataset(url, **options, **vars(sampling), with_index=True, num_workers=workers)
        read, stats = list[int](), None
        for _ in range(3):
            for batch in dataset:
                check(batch, values, range(4), ["a"])
            read.append(sum(chunks().values()))
            stats = stats or dataset.stats()
        dataset.close()
    assert not planned.kept
    assert stats.requests == planned.requests + stats.hedges
    assert (stats.chunks_read, stats.chunks) == (planned.requests, len(values["a"]))
    assert planned.requests <= read[0] <= stats.requests  # later passes load some of the next one
    assert len(values["a"]) < planned.requests <= 1.15 * len(values["a"])
    assert sum(read[1:]) <= 1.15 * 2 * len(values["a"]) + 8 * 35


@pytest.mark.long
def test_several_ranks_in_order_read_what_their_batches_need(steps):
    folder, _ = steps
    options = {"shuffle": False, "batch_size": 16, "fields": ("a",), "memory": 38_000_000}
    sampling = Sampling(sample_axis="time", windows=sl.Window(4))
    planned = forecast(str(folder), ForecastOptions(**options, world_size=2, sampling=sampling))
    with served(folder) as (url, chunks):
        for rank in range(2):
            dataset = sl.NumpyDataset(url, **options, **vars(sampling), world=(rank, 2))
            for _ in dataset:
                pass
            dataset.close()
        assert sum(chunks().values()) == pytest.approx(planned.requests, rel=0.02)
    assert planned.requests <= 512 * (16 + 3) / 16 + 19  # a unit is a batch


def declared(folder, chunk, count, **options):
    """A dataset of an array without stored chunks, 4 MiB a step."""
    if not folder.exists():
        group = zarr.open_group(folder, mode="w")
        names = ["time", "y", "x"]
        group.create_array(
            "a", shape=(count, 1024, 1024), chunks=(chunk, 1024, 1024), dtype="f4", dimension_names=names
        )
    return sl.NumpyDataset(folder, batch_size=64, sample_axis="time", **options)


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("chunk", "windows", "order"),
    [
        (1, None, (1, 64, 4)),
        (8, None, (8, 32, 16)),
        (40, None, (40, 4, 160)),
        (1, sl.Window(8), (64, 2, 256)),
        (8, sl.Window(8), (64, 2, 256)),
        (40, sl.Window(8), (80, 2, 240)),
    ],
)
def test_the_default_order_has_lanes_that_fit_and_blocks_as_long_as_windows_need(chunk, windows, order, tmp_path):
    datasets = [
        declared(tmp_path / "x.zarr", chunk, 8760, windows=windows, memory=memory, world=(0, world))
        for memory, world in ((None, 1), ("64GiB", 1), (None, 2))
    ]
    for dataset in datasets:
        params = dataset._first_share().order.params
        assert (params.block, params.lanes, params.window) == order


@pytest.mark.long
def test_a_state_keeps_the_order_that_it_was_saved_with(tmp_path):
    options = {"sample_axis": "time", "windows": sl.Window(8), "with_index": True, "strict": False}
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("a", shape=(800, 256, 256), chunks=(1, 256, 256), dtype="f4", dimension_names=["time", "y", "x"])
    before = sl.NumpyDataset(
        tmp_path / "x.zarr", batch_size=8, shuffle=sl.Shuffle(block=8, lanes=2, window=32), **options
    )
    batches = iter(before)
    next(batches)
    after = sl.NumpyDataset(tmp_path / "x.zarr", batch_size=8, **options)
    assert after._first_share().order.params.block > 8
    after.load_state_dict(before.state_dict())
    for mine, other in zip(after, batches, strict=True):
        np.testing.assert_array_equal(mine["index"], other["index"])


def test_the_digest_of_samples_is_that_of_earlier_versions():
    """States name it: a default of the order may change, and the digest may not."""
    dataset = sl.NumpyDataset(url_of("xarray3.zarr"), batch_size=2, sample_axis="time", windows=sl.Window(3))
    assert dataset._datasets[0].manifest.digest == DIGEST


def test_plan_says_what_better_mixing_costs(tmp_path, capsys):
    declared(tmp_path / "x.zarr", 40, 8760)
    arguments = (tmp_path / "x.zarr", "--sample-axis", "time", "--batch-size", 64, "--memory", "20GiB")
    status, out, _ = run(capsys, "plan", *arguments)
    assert status == 0
    assert re.search(r"with --lanes 16 that of a rank is at most 1\.\d+ times, in 17.0 GiB at least\n", out)
    assert "for smaller blocks, which mix better: streamloader convert" in out
    better = json.loads(run(capsys, "plan", *arguments, "--json")[1])["better"]
    lanes = json.loads(run(capsys, "plan", *arguments, "--lanes", better["lanes"], "--json")[1])
    assert (lanes["rank"]["design_effect"], lanes["least_memory"]) == (better["design_effect"], better["memory"])
    assert lanes["better"] is None
