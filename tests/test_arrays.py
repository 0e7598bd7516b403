"""Zarr stores by many writers are read in place: the values of xarray, in the order of every streamloader dataset."""

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from amounts import covering, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr_stores import GRIDS, PLAIN, STORES, TIMES, all_ranks, anchors, expected, samples_of, url_of, values_of

import streamloader as sl
from streamloader import errors
from streamloader.engine.budget import Budget

VARIABLES = ("t2m", "z", "count", "run")


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Small worlds and many lanes are the subject of other tests, and so are their warnings."""
    warnings.filterwarnings("ignore", message=".*(lanes|blocks are read)")


@pytest.mark.quick(2)
@pytest.mark.parametrize("store", PLAIN)
def test_the_expected_values_are_those_of_xarray(store):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = xr.open_zarr(STORES / store, decode_times=False, consolidated=None)
        for name in VARIABLES:
            wanted = opened[name].values.astype("f4")
            if name == "count":  # xarray masks the fill value 0 of version 2
                wanted = np.nan_to_num(wanted)
            np.testing.assert_allclose(wanted, values_of(store, name).astype("f4"), rtol=1e-6)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("store", "world"), covering(GRIDS, [1, 2, 3, 8]))
def test_windows_have_the_values_of_xarray_at_any_world_size_and_across_a_resume(store, world):
    options = {"sample_axis": "time", "windows": sl.Window(3), "batch_size": 2, "seed": 5}
    before, state = all_ranks(url_of(store), world, steps=1, **options)
    after, _ = all_ranks(url_of(store), world, state, **options)
    found = samples_of([batch for step in [*before, *after] for batch in step])
    assert sorted(int(sample["index"]) for sample in found) == anchors(3, 1)
    for sample in found:
        first = int(sample["index"])
        for name in VARIABLES:
            wanted = values_of(store, name)[first : first + 3]
            assert sample[name].dtype == wanted.dtype
            np.testing.assert_allclose(sample[name], wanted, rtol=1e-6)


@st.composite
def samplings(draw):
    """Windows, patches, and a part of the time axis."""
    step = draw(st.integers(1, 2))
    if draw(st.booleans()):
        window = sl.Window(draw(st.integers(1, 6)), draw(st.integers(1, 7)), step)
        offsets = [step * i for i in range(window.length)]
        leads = []
    else:
        history, lead = draw(st.integers(1, 3)), draw(st.one_of(st.integers(1, 2), st.sampled_from([(1, 3), (2,)])))
        window = sl.Window(history=history, lead=lead, stride=draw(st.integers(1, 4)), step=step)
        offsets = [step * i for i in range(history)]
        leads = [offsets[-1] + (x if isinstance(lead, tuple) else step * x) for x in _leads(lead)]
    patch = None
    if draw(st.booleans()):
        size = {"lat": draw(st.integers(1, 12)), "lon": draw(st.integers(1, 20))}
        patch = sl.Patch(size, stride=draw(st.one_of(st.none(), st.integers(1, 9))), random=draw(st.booleans()))
    return window, offsets, leads, patch, draw(st.sampled_from([None, slice(2, 20), slice(15, None)]))


def _leads(lead):
    return lead if isinstance(lead, tuple) else range(1, lead + 1)


@pytest.mark.long
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(store=st.sampled_from(GRIDS), sampling=samplings(), data=st.data())
def test_random_windows_and_patches_have_the_values_of_xarray(store, sampling, data):
    window, offsets, leads, patch, where = sampling
    extent = max([*offsets, *leads]) + 1
    wanted = anchors(extent, window.stride, range(TIMES)[where or slice(None)])
    names = data.draw(st.lists(st.sampled_from(["t2m", "z", "count"]), min_size=1, unique=True))
    options = {"sample_axis": "time", "windows": window, "patches": patch, "where": where, "fields": names}
    options |= {"batch_size": data.draw(st.integers(1, 3)), "seed": data.draw(st.integers(0, 9))}
    options["shuffle"] = data.draw(st.booleans())
    if not wanted:
        with pytest.raises(errors.UsageError, match="windows of"):
            sl.StreamingDataset(url_of(store), **options)
        return
    first, second = data.draw(st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 3, 8])))
    try:
        before, state = all_ranks(url_of(store), first, steps=data.draw(st.integers(1, 3)), **options)
    except errors.BatchError:  # fewer samples than a batch
        return
    after = [] if state["epoch"] else all_ranks(url_of(store), second, state, **options)[0]
    found = samples_of([batch for step in [*before, *after] for batch in step])
    corners = Counter((int(s["index"]), int(s.get("index_lat", 0)), int(s.get("index_lon", 0))) for s in found)
    assert set(corners.values()) == {1}
    assert sorted({corner[0] for corner in corners}) == wanted
    for sample in found:
        for name in names:
            _check(sample, name, values_of(store, name), offsets, patch)
            if leads:
                _check(sample, name, values_of(store, name), leads, patch, "_target")


def _check(sample, name, values, offsets, patch, suffix=""):
    times = [int(sample["index"]) + offset for offset in offsets]
    wanted = values[times]
    if patch is None:
        np.testing.assert_allclose(sample[name + suffix], wanted, rtol=1e-6)
        return
    lat, lon = int(sample["index_lat"]), int(sample["index_lon"])
    height, width = patch.size["lat"], patch.size["lon"]
    moves = [(0, 0)]
    if patch.random:  # by an offset, which the sample does not state
        moves = [(y, x) for y in range(13 - lat - height) for x in range(21 - lon - width)]
    boxes = (wanted[..., lat + y : lat + y + height, lon + x : lon + x + width] for y, x in moves)
    found = sample[name + suffix]
    assert any(box.shape == found.shape and np.allclose(box, found, rtol=1e-6, equal_nan=True) for box in boxes)


@pytest.mark.parametrize("store", ["multiscale.zarr", "multiscale3.zarr"])
def test_patches_of_the_levels_of_an_image_show_the_same_region(store):
    patch = sl.Patch({"y": 16, "x": 24}, stride=8, margin=4)
    dataset = sl.StreamingDataset(
        url_of(store), batch_size=5, sample_axis="c", patches=patch, fields=["0", "1", "2"], with_index=True
    )
    assert dataset.num_samples == 2 * 10 * 13
    for sample in samples_of(list(dataset)):
        c, y, x = (int(sample[name]) for name in ("index", "index_y", "index_x"))
        for level in range(3):
            at = [slice(first >> level, (first >> level) + (size >> level)) for first, size in ((y, 24), (x, 32))]
            np.testing.assert_array_equal(sample[str(level)], expected()[f"image{level}"][c][tuple(at)])


def test_random_patches_move_in_each_epoch_and_stay_registered():
    patch = sl.Patch({"y": 16, "x": 16}, random=True)
    options = {"batch_size": 4, "sample_axis": "c", "patches": patch, "fields": ["0", "1"], "with_index": True}
    dataset = sl.StreamingDataset(url_of("multiscale.zarr"), **options)
    epochs = [
        {tuple(map(int, (s["index"], s["index_y"], s["index_x"]))): s for s in samples_of(list(dataset))}
        for _ in range(2)
    ]
    assert epochs[0].keys() == epochs[1].keys()
    moved = [not np.array_equal(epochs[0][corner]["0"], epochs[1][corner]["0"]) for corner in epochs[0]]
    assert sum(moved) > len(moved) / 2
    again = samples_of(list(sl.StreamingDataset(url_of("multiscale.zarr"), **options)))
    for sample in again:
        corner = tuple(map(int, (sample["index"], sample["index_y"], sample["index_x"])))
        np.testing.assert_array_equal(sample["0"], epochs[0][corner]["0"])
        np.testing.assert_array_equal(sample["0"][::2, ::2], sample["1"])


def test_channels_stack_arrays_levels_static_arrays_and_times():
    channels = sl.Channels("z@500", "t2m", "z@level=1000", "orog", "lat", "time_of_day")
    dataset = sl.StreamingDataset(
        url_of("xarray3.zarr"),
        batch_size=3,
        sample_axis="time",
        windows=sl.Window(history="12h", lead=("6h", "12h")),
        channels={"x": channels},
        with_index=True,
    )
    assert str(dataset.fields["x"]) == "float32[2,6,12,20]"
    values = {name: values_of("xarray3.zarr", name).astype(np.float32) for name in ("z", "t2m", "orog", "lat", "time")}
    for sample in samples_of(list(dataset)):
        for name, offsets in (("x", (0, 1)), ("x_target", (2, 3))):
            for row, at in enumerate(int(sample["index"]) + offset for offset in offsets):
                found = sample[name][row]
                np.testing.assert_array_equal(found[0], values["z"][at, 0])
                np.testing.assert_allclose(found[1], values["t2m"][at], rtol=1e-6)
                np.testing.assert_array_equal(found[2], values["z"][at, 2])
                np.testing.assert_array_equal(found[3], values["orog"])
                np.testing.assert_array_equal(found[4], np.repeat(values["lat"][:, None], 20, 1))
                np.testing.assert_allclose(found[5], values["time"][at] % 24 / 24)


def test_times_select_elements_and_windows_stay_inside_them():
    options = {"sample_axis": "time", "windows": sl.Window("18h"), "batch_size": 1, "with_index": True}
    days = sl.StreamingDataset(url_of("xarray2.zarr"), where=slice("2001-01-02", "2001-01-03"), **options)
    assert sorted(int(s["index"]) for s in samples_of(list(days))) == [4, 5, 6, 7, 8, 9]
    runs = sl.StreamingDataset(url_of("xarray2.zarr"), where="run == 2", **options)
    assert sorted(int(s["index"]) for s in samples_of(list(runs))) == [8, 9, 10, 11, 12]
    grouped = options | {"windows": sl.Window("18h", group="run")}
    found = samples_of(list(sl.StreamingDataset(url_of("xarray2.zarr"), **grouped)))
    assert sorted(int(s["index"]) for s in found) == [*range(6), *range(8, 13), *range(15, 21)]


def test_missing_chunks_are_counted_and_an_error_if_strict():
    options = {"sample_axis": "time", "fields": ["count"], "batch_size": 4}
    dataset = sl.StreamingDataset(url_of("xarray2.zarr"), **options)
    list(dataset)
    assert dataset.stats().missing_chunks == 3
    with pytest.raises(errors.MissingObjectError, match=r"the chunk \[.*\] in .*count/.* is missing"):
        list(sl.StreamingDataset(url_of("xarray2.zarr"), strict=True, **options))


def test_raw_values_are_those_stored():
    dataset = sl.StreamingDataset(url_of("xarray2.zarr"), batch_size=23, sample_axis="time", decode_cf=False)
    (batch,) = dataset
    assert str(batch["t2m"].dtype) == "torch.int16"
    assert batch["t2m"].min() == -32767


def test_each_chunk_is_fetched_once_an_epoch_if_samples_do_not_cross_blocks():
    dataset = sl.StreamingDataset(url_of("xarray2.zarr"), batch_size=4, sample_axis="time", fields=["z"])
    list(dataset)
    chunks = 4 * 2 * 2 * 2
    assert dataset.stats().requests == chunks


def chunks_of_one(folder: Path, count: int) -> dict[str, np.ndarray]:
    """Write two arrays whose chunks are samples, one of them packed, and return their values."""
    rng = np.random.default_rng(1)
    values = {"plain": rng.normal(size=(count, 6, 5)).astype("f4"), "packed": rng.integers(0, 99, (count, 7), "i2")}
    group = zarr.open_group(folder, mode="w", zarr_format=3)
    for name, array in values.items():
        chunks, attributes = (1, *array.shape[1:]), {"scale_factor": 0.5} if name == "packed" else {}
        dims = ["time", "y", "x"][: array.ndim]
        group.create_array(name, data=array, chunks=chunks, dimension_names=dims, attributes=attributes)
    return {"plain": values["plain"], "packed": values["packed"].astype("f4") / 2}


@pytest.mark.quick(2)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_samples_that_are_chunks_stay_right_if_the_consumer_changes_its_batches(tmp_path, world):
    """They are decoded into their batch, and padding repeats samples of an earlier one."""
    values = chunks_of_one(tmp_path / "x.zarr", 13)
    options = {"batch_size": 5, "sample_axis": "time", "with_index": True, "remainder": "pad"}
    datasets = [sl.StreamingDataset(tmp_path / "x.zarr", world=(rank, world), **options) for rank in range(world)]
    for _ in range(3):
        seen: list[int] = []
        for batch in (batch for dataset in datasets for batch in dataset):
            index = batch["index"].numpy()
            for name, truth in values.items():
                np.testing.assert_array_equal(batch[name].numpy(), truth[index])
                batch[name].fill_(-1)
            seen += index[batch["valid"].numpy()].tolist()
        assert sorted(seen) == list(range(13))


@pytest.mark.quick(1)
@pytest.mark.parametrize("patches", [None, sl.Patch({"lat": 5, "lon": 6}, random=True)])
def test_blocks_that_fit_in_memory_are_kept_and_read_once(patches, tmp_path, monkeypatch):
    monkeypatch.setattr(Budget, "reuses_blocks", False)  # the next epoch would use blocks of the window
    url, rng = tmp_path / "x.zarr", np.random.default_rng(0)
    group = zarr.open_group(url, mode="w")
    for name, shape in {"z": (96, 3, 12, 24), "t2m": (96, 12, 24)}.items():
        dims = ["time", "level", "lat", "lon"] if name == "z" else ["time", "lat", "lon"]
        group.create_array(name, data=rng.random(shape), chunks=(4, *shape[1:-1], 12), dimension_names=dims)
    options = {"batch_size": 4, "sample_axis": "time", "patches": patches, "with_index": True, "fields": ["z", "t2m"]}
    options["shuffle"] = sl.Shuffle(lanes=1)  # the window is a part of the arrays
    with pytest.raises(errors.MemoryBudgetError) as needed:
        iter(sl.StreamingDataset(url, memory=100_000, **options))
    least = int(str(needed.value).split("memory=")[1].split()[0])
    small = sl.StreamingDataset(url, memory=least, **options)
    dataset = sl.StreamingDataset(url, **options)
    next(iter(dataset))  # the blocks of a pass that ends early are incomplete
    requests = []
    for _ in range(4):
        for mine, other in zip(dataset, small, strict=True):
            for name, column in mine.items():
                np.testing.assert_array_equal(column.numpy(), other[name].numpy())
            mine["z"].fill_(-1)  # the memory of batches is not that of blocks
        requests.append((dataset.stats().requests, small.stats().requests))
    (once, each), *_, (after, every) = requests
    assert after == once
    assert every >= 4 * each > 0


def test_ranks_keep_the_blocks_that_they_read_in_any_epoch():
    datasets = [
        sl.StreamingDataset(url_of("xarray2.zarr"), batch_size=2, sample_axis="time", fields=["z"], world=(rank, 2))
        for rank in range(2)
    ]
    for _ in range(12):
        for dataset in datasets:
            assert sum(len(batch["z"]) for batch in dataset) == 12
    chunks = 4 * 2 * 2 * 2
    assert all(dataset.stats().requests <= chunks + 8 for dataset in datasets)


@pytest.mark.long
def test_a_damaged_chunk_that_is_a_sample_fails_its_own_step_only(tmp_path):
    """Single samples are decoded many steps together; those before the damaged one are returned."""
    values = chunks_of_one(tmp_path / "x.zarr", 96)
    (tmp_path / "x.zarr" / "plain" / "c" / "40" / "0" / "0").write_bytes(b"damaged")
    dataset = sl.StreamingDataset(tmp_path / "x.zarr", batch_size=None, sample_axis="time", with_index=True)
    order = [int(dataset.samples(0, step)[0]) for step in range(96)]
    found = []
    with pytest.raises(errors.CorruptError, match=r"the chunk \[40:41"):
        for sample in dataset:
            found.append(int(sample["index"]))
            for name, truth in values.items():
                np.testing.assert_array_equal(sample[name].numpy(), truth[found[-1]])
    assert found == order[: order.index(40)]


def test_a_mixture_of_two_stores_has_their_shares():
    sources = {
        sl.Source(url_of("xarray3.zarr"), sample_axis="time", windows=sl.Window(2)): 1,
        sl.Source(url_of("zarr2.zarr"), sample_axis="time", windows=sl.Window(2)): 1,
    }
    mixture = sl.Mixture(sources, batch_size=4, unit=1, fields=["t2m", "z"], with_index=True)
    batch = next(iter(mixture))
    assert sorted(batch["source"].tolist()) == [0, 0, 1, 1]
    for source, first, found in zip(*(batch[name].numpy() for name in ("source", "index", "z")), strict=True):
        np.testing.assert_array_equal(found, values_of(GRIDS[source], "z")[first : first + 2])


def test_windows_of_a_flat_array_of_tokens(tmp_path):
    tokens = np.arange(10_000, dtype=np.int32)
    with sl.Writer(str(tmp_path / "tokens"), {"tokens": "int32"}) as writer:
        writer.write_batch({"tokens": tokens})
    windows = sl.Window(129, stride=128)
    dataset = sl.StreamingDataset(str(tmp_path / "tokens"), batch_size=7, windows=windows, with_index=True)
    found = samples_of(list(dataset))
    assert sorted(int(sample["index"]) for sample in found) == list(range(0, 10_000 - 128, 128))
    for sample in found:
        np.testing.assert_array_equal(sample["tokens"], tokens[int(sample["index"]) :][:129])


BAD = {
    "no such dimension": ({"sample_axis": "step"}, errors.FieldError, "no array .* along step"),
    "unequal lengths": ({"sample_axis": "time", "fields": ["t2m", "orog"]}, errors.FieldError, "lacks time"),
    "window longer than the array": ({"sample_axis": "time", "windows": sl.Window(24)}, errors.UsageError, "has 15"),
    "patch larger": ({"sample_axis": "time", "patches": sl.Patch({"lat": 13})}, errors.UsageError, "has 12"),
    "patch of no dimension": (
        {"sample_axis": "time", "patches": sl.Patch({"y": 3})},
        errors.FieldError,
        "along time, y",
    ),
    "unknown array": ({"sample_axis": "time", "fields": ["tas"]}, errors.FieldError, "has no array 'tas'"),
    "no sample axis": ({"windows": sl.Window(2)}, errors.UsageError, "give sample_axis=, one of"),
    "a duration that does not fit": (
        {"sample_axis": "time", "windows": sl.Window("7h")},
        errors.UsageError,
        "1.16667 times 21600 s",
    ),
    "a chunk above memory=": (
        {"sample_axis": "time", "memory": 1000},
        errors.MemoryBudgetError,
        "a chunk of the array .* has 4032 bytes, and memory=1000",
    ),
    "a level that is not there": (
        {"sample_axis": "time", "channels": sl.Channels("z@700")},
        errors.FieldError,
        "no coordinate of level, lat, lon has 700",
    ),
    "channels of other dimensions": (
        {"sample_axis": "time", "channels": sl.Channels("z", "t2m")},
        errors.FieldError,
        "select one element of other dimensions",
    ),
    "a patch along the sample axis": (
        {"sample_axis": "time", "patches": sl.Patch({"time": 2})},
        errors.UsageError,
        "patches along 'time', the sample axis; give windows=",
    ),
    "patches without their class": ({"patches": {"y": 2}}, errors.UsageError, r"give a Patch\(\.\.\.\)"),
    "channels without their class": ({"channels": {"a": ["t2m"]}}, errors.UsageError, r"give Channels\(.*, or a dict"),
    "statistics in a list": ({"normalize": [1, 2]}, errors.UsageError, r"give \(mean, std\) by name in a dict"),
    "a negative sample axis": ({"sample_axis": -1}, errors.UsageError, "give the name or the number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_declarations_are_clear_errors_before_data_is_read(case):
    options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        sl.StreamingDataset(url_of("xarray2.zarr"), batch_size=1, **options)


def test_patches_are_of_axes_by_name():
    with pytest.raises(errors.UsageError, match="for each axis by name"):
        sl.Patch({1: 2})


NO_URLS = [["a", "b"], xr.Dataset({"x": ("t", [1])}), None, 3, b"a", ""]


@pytest.mark.parametrize("url", NO_URLS, ids=[type(url).__name__ for url in NO_URLS])
def test_what_is_no_url_is_a_clear_error_wherever_a_url_is_taken(url, tmp_path):
    takers = [
        lambda: sl.StreamingDataset(url, batch_size=1),
        lambda: sl.StreamingDataset(url, batch_size=1, sample_axis="time"),
        lambda: sl.open(url),
        lambda: sl.verify(url),
        lambda: sl.append(url, tmp_path),
        lambda: sl.Writer(url, {"x": "int8"}),
    ]
    for take in takers:
        with pytest.raises(errors.UsageError, match=r"is not a URL; give a URL .* sl\.Mixture reads several"):
            take()


@pytest.mark.parametrize(
    "url", ["icechunk:///path", "icechunk://", "icechunk://::", "reference://", "reference:///x.json"]
)
def test_a_repository_or_references_without_their_url_are_a_clear_error(url):
    for options in ({}, {"sample_axis": "time"}):
        with pytest.raises(errors.UsageError, match=r"names no store; write (icechunk|reference)://:: and its URL"):
            sl.StreamingDataset(url, batch_size=1, **options)


@pytest.mark.parametrize("store", ["xarray3.zarr", "xarray2.zarr", "gdal2.zarr"])
def test_a_foreign_store_without_a_sample_axis_names_the_argument(store):
    with pytest.raises(errors.NotADatasetError, match="sample_axis="):
        sl.StreamingDataset(url_of(store), batch_size=1)


def test_constant_channels_are_a_column_of_their_own():
    channels = {"x": sl.Channels("t2m"), "fixed": sl.Channels("orog", "lat")}
    windows = sl.Window(history=2, lead=1)
    dataset = sl.StreamingDataset(
        url_of("xarray3.zarr"), batch_size=2, sample_axis="time", windows=windows, channels=channels
    )
    batch = next(iter(dataset))
    assert {name: tuple(column.shape[1:]) for name, column in batch.items() if name != "valid"} == {
        "x": (2, 1, 12, 20),
        "x_target": (1, 1, 12, 20),
        "fixed": (2, 12, 20),
    }
    np.testing.assert_array_equal(batch["fixed"][1, 0], values_of("xarray3.zarr", "orog"))


def test_arrays_of_groups_below_are_named_by_their_path(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("0", data=np.arange(48).reshape(12, 4), chunks=(4, 4), dimension_names=["y", "x"])
    group.create_array(
        "labels/cells/0", data=np.arange(48).reshape(12, 4) % 7, chunks=(3, 2), dimension_names=["y", "x"]
    )
    dataset = sl.StreamingDataset(tmp_path / "x.zarr", batch_size=4, sample_axis="y", fields=["0", "labels/cells/0"])
    for batch in dataset:
        np.testing.assert_array_equal(batch["0"] % 7, batch["labels/cells/0"])


def test_labels_outside_the_times_are_an_error_that_names_them():
    with pytest.raises(errors.SelectionError, match=r"selects none of the times 2001-01-01T00.* to 2001-01-07"):
        sl.StreamingDataset(url_of("xarray3.zarr"), batch_size=1, sample_axis="time", where=slice("2002-01", "2002-03"))


@pytest.mark.quick(2)
@pytest.mark.parametrize("rounded", ["up", "down"])
@pytest.mark.parametrize("random", [False, True])
def test_levels_of_an_image_of_odd_size_are_registered(rounded, random, tmp_path):
    image = np.arange(101 * 67).reshape(101, 67)
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    for level in range(3):
        values = image[:: 2**level, :: 2**level]
        if rounded == "down":
            values = values[: 101 >> level, : 67 >> level]
        group.create_array(str(level), data=values, chunks=(16, 16), dimension_names=["y", "x"])
    patch = sl.Patch({"y": 16, "x": 8}, random=random)
    dataset = sl.StreamingDataset(tmp_path / "x.zarr", batch_size=3, patches=patch, fields=["0", "1", "2"])
    assert dataset.num_samples == 6 * 8
    for batch in dataset:
        for level in (1, 2):
            np.testing.assert_array_equal(batch["0"][:, :: 2**level, :: 2**level], batch[str(level)])


def test_single_samples_and_a_transform_get_inputs_and_targets():
    options = {"sample_axis": "time", "windows": sl.Window(history=2, lead=1), "fields": ["z"], "with_index": True}
    for sample in sl.StreamingDataset(url_of("xarray3.zarr"), batch_size=None, **options):
        first = int(sample["index"])
        np.testing.assert_array_equal(sample["z_target"], values_of("xarray3.zarr", "z")[first + 2 : first + 3])

    def change(sample):
        return {"difference": sample["z_target"] - sample["z"][-1:]}

    z = values_of("xarray3.zarr", "z")
    for batch in sl.StreamingDataset(url_of("xarray3.zarr"), batch_size=4, transform=change, **options):
        for first, difference in zip(batch["index"].tolist(), batch["difference"].numpy(), strict=True):
            np.testing.assert_array_equal(difference, z[first + 2 : first + 3] - z[first + 1 : first + 2])


def test_a_mixture_of_windows_of_other_targets_is_an_error():
    sources = {
        sl.Source(url_of("xarray3.zarr"), sample_axis="time", windows=sl.Window(history=2, lead=n)): 1 for n in (1, 2)
    }
    with pytest.raises(errors.MixtureError, match="mix datasets with the same fields"):
        sl.Mixture(sources, batch_size=4, fields=["z"])
