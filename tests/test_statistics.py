"""`streamloader stats` fits what `normalize=` takes: normalised arrays have the mean 0 and the standard deviation 1."""

import json

import numpy as np
import pytest
from commands import run
from zarr_stores import url_of, values_of

import streamloader as sl
from streamloader import errors
from streamloader.measure.statistics import Moments, fit
from streamloader.options import Sampling


def test_moments_of_parts_merge_to_those_of_the_whole():
    values = np.random.default_rng(0).normal(1e6, 3, 1000)
    values[::7] = np.nan
    whole, merged = Moments.of(values), Moments()
    for part in np.array_split(values, 13):
        merged += Moments.of(part)
    assert merged.count == whole.count == np.isfinite(values).sum()
    np.testing.assert_allclose([merged.mean, merged.squares], [np.nanmean(values), np.nanvar(values) * whole.count])


def test_statistics_are_those_of_the_selected_elements():
    sampling = Sampling("time", channels=sl.Channels("z@500", "t2m", "orog"))
    found = fit(url_of("xarray3.zarr"), sampling, where=slice(2, 20))
    for name, values in (
        ("z@500", values_of("xarray3.zarr", "z")[2:20, 0]),
        ("t2m", values_of("xarray3.zarr", "t2m")[2:20]),
        ("orog", values_of("xarray3.zarr", "orog")),
    ):
        np.testing.assert_allclose(found[name]["mean"], np.nanmean(values.astype("f8")), rtol=1e-6)
        np.testing.assert_allclose(found[name]["std"], np.nanstd(values.astype("f8")), rtol=1e-5)
        assert found[name]["max"] == np.nanmax(values)


def test_the_command_writes_what_normalize_reads(tmp_path, capsys):
    url, file = url_of("python2_codecs.zarr"), tmp_path / "statistics.json"
    assert (
        run(capsys, "stats", url, "--sample-axis", "time", "--where", "2001-01:2001-02", "--output", str(file))[0] == 0
    )
    assert json.loads(file.read_text())["where"] == "2001-01:2001-02"
    (batch,) = sl.StreamingDataset(url, batch_size=23, sample_axis="time", normalize=str(file))
    for name in ("t2m", "z", "count", "run"):
        values = batch[name].numpy().astype("f8")
        assert batch[name].dtype.is_floating_point
        np.testing.assert_allclose([np.nanmean(values), np.nanstd(values)], [0, 1], atol=1e-5)


def test_statistics_saved_in_a_dataset_are_read_with_true(tmp_path, capsys):
    url = str(tmp_path / "flat")
    with sl.Writer(url, {"x": "float32[3]"}) as writer:
        writer.write_batch({"x": np.arange(300, dtype=np.float32).reshape(100, 3)})
    assert run(capsys, "stats", url, "--sample-axis", "sample", "--save")[0] == 0
    (batch,) = sl.StreamingDataset(url, batch_size=100, sample_axis="sample", normalize=True)
    np.testing.assert_allclose([batch["x"].mean(), batch["x"].std(correction=0)], [0, 1], atol=1e-5)
    assert sl.verify(url).ok


def test_normalize_of_a_dataset_that_is_not_read_as_arrays_is_an_error(tmp_path):
    with sl.Writer(str(tmp_path / "d"), {"x": "float32"}) as writer:
        writer.write_batch({"x": np.arange(8, dtype=np.float32)})
    with pytest.raises(errors.UsageError, match="give sample_axis="):
        sl.StreamingDataset(tmp_path / "d", batch_size=1, normalize={"x": (0, 1)})


def test_channels_and_targets_are_normalised_each_by_its_own():
    scales = {"z@500": (5000.0, 7.0), "orog": (450.0, 300.0)}
    dataset = sl.StreamingDataset(
        url_of("xarray3.zarr"),
        batch_size=1,
        sample_axis="time",
        windows=sl.Window(history=1, lead=1),
        channels=sl.Channels("z@500", "z@1000", "orog"),
        normalize=scales,
        shuffle=False,
        with_index=True,
    )
    batch = next(iter(dataset))
    z, orography = values_of("xarray3.zarr", "z"), values_of("xarray3.zarr", "orog")
    at = int(batch["index"])
    np.testing.assert_allclose(batch["channels"][0, 0, 0], (z[at, 0] - 5000) / 7, rtol=1e-5)
    np.testing.assert_array_equal(batch["channels"][0, 0, 1], z[at, 2])
    np.testing.assert_allclose(batch["channels_target"][0, 0, 0], (z[at + 1, 0] - 5000) / 7, rtol=1e-5)
    np.testing.assert_allclose(batch["channels"][0, 0, 2], (orography - 450) / 300, rtol=1e-5)


@pytest.mark.parametrize("given", [{"t2m": (280, 0)}, {"t2m": (1, 2, 3)}, {"t2m": ("a", 1)}, {"t2m": {"mean": 1}}])
def test_invalid_statistics_are_a_usage_error(given):
    with pytest.raises(errors.UsageError, match="normalize= has"):
        sl.StreamingDataset(url_of("xarray3.zarr"), batch_size=1, sample_axis="time", normalize=given)
