"""`streamloader stats` fits what `normalize=` takes: normalised arrays have the mean 0 and the standard deviation 1."""

import io
import json

import numpy as np
import pytest
from commands import run
from PIL import Image
from zarr_stores import url_of, values_of

import streamloader as sl
from streamloader import errors
from streamloader.measure.statistics import Moments, fit
from streamloader.options import Sampling

KINDS = {"x": "float32[2]", "y": "float32", "label": "int64", "text": "text"}
DECLARED = [{"sample_axis": "sample"}, {"normalize": {"x": (0, 1)}}, {"windows": sl.Window(2)}]


def test_moments_of_parts_merge_to_those_of_the_whole():
    values = np.random.default_rng(0).normal(1e6, 3, 1000)
    values[::7] = np.nan
    whole, merged = Moments.of(values), Moments()
    for part in np.array_split(values, 13):
        merged += Moments.of(part)
    assert merged.count == whole.count == np.isfinite(values).sum()
    np.testing.assert_allclose([merged.mean, merged.squares], [np.nanmean(values), np.nanvar(values) * whole.count])


def test_statistics_are_those_of_the_selected_elements():
    sampling = Sampling(sample_axis="time", channels=sl.Channels("z@500", "t2m", "orog"))
    found = fit(sl.Source(url_of("xarray3.zarr"), where=slice(2, 20), **vars(sampling)))
    for name, values in (
        ("z@500", values_of("xarray3.zarr", "z")[2:20, 0]),
        ("t2m", values_of("xarray3.zarr", "t2m")[2:20]),
        ("orog", values_of("xarray3.zarr", "orog")),
    ):
        np.testing.assert_allclose(found[name]["mean"], np.nanmean(values.astype("f8")), rtol=1e-6)
        np.testing.assert_allclose(found[name]["std"], np.nanstd(values.astype("f8")), rtol=1e-5)
        assert found[name]["max"] == np.nanmax(values)


def test_normalize_takes_what_fit_returns():
    source = sl.Source(url_of("xarray3.zarr"), sample_axis="time", where="2001-01:2001-02", windows=sl.Window(3))
    found = fit(source, fields=["t2m"])
    assert found["t2m"] == fit(sl.Source(url_of("xarray3.zarr"), sample_axis="time", where=source.where))["t2m"]
    options = {"sample_axis": "time", "where": source.where, "fields": ["t2m"]}
    (batch,) = sl.NumpyDataset(source.url, batch_size=23, remainder="uneven", normalize=found, **options)
    np.testing.assert_allclose([np.nanmean(batch["t2m"]), np.nanstd(batch["t2m"])], [0, 1], atol=1e-5)


def test_statistics_of_a_url_count_each_sample_once(mixed):
    assert fit(mixed[0])["label"] == fit(sl.Source(mixed[0], weights="y"))["label"]


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


@pytest.fixture
def mixed(tmp_path):
    """A dataset of numbers, texts, and sequences; and in splits."""
    x = np.random.default_rng(0).normal(5, 3, (60, 2)).astype("f4")
    columns = {"x": x, "y": np.arange(60, dtype="f4"), "label": np.arange(60) % 3, "text": list(map(str, range(60)))}
    with sl.Writer(tmp_path / "mixed", {**KINDS, "ids": "ragged:int32"}) as out:
        out.write_batch({**columns, "ids": [np.arange(i % 4, dtype="i4") for i in range(60)]})
    sl.convert(tmp_path / "mixed", tmp_path / "splits", split="train=0.5,val=0.5", workers=0)
    return tmp_path / "mixed", tmp_path / "splits"


def test_normalize_needs_no_sample_axis(mixed):
    options = {"fields": ["x", "label"], "batch_size": 60, "shuffle": False}
    (raw,) = sl.StreamingDataset(mixed[0], **options)
    (scaled,) = sl.StreamingDataset(mixed[0], normalize={"x": (5.0, 3.0)}, **options)
    np.testing.assert_allclose(scaled["x"], (raw["x"] - 5) / 3, rtol=1e-6)
    np.testing.assert_array_equal(scaled["label"], raw["label"])
    with pytest.raises(errors.UsageError, match="has no sample axis; give sample_axis=, one of time"):
        sl.StreamingDataset(url_of("xarray3.zarr"), batch_size=1, normalize={"t2m": (0, 1)})


@pytest.mark.parametrize("declared", DECLARED)
def test_fields_that_are_not_read_as_arrays_are_an_error_that_names_them(declared, mixed):
    message = r"has ids \(ragged:int32\), text \(text\).* leave them out: fields=\['label', 'x', 'y'\]"
    with pytest.raises(errors.FieldError, match=message):
        sl.StreamingDataset(mixed[0], batch_size=1, **declared)


def test_splits_are_named_if_none_is_given(mixed):
    with pytest.raises(errors.FieldError, match="has the splits train, val; no split was given"):
        sl.StreamingDataset(mixed[1], batch_size=1, fields=["x"], normalize={"x": (0, 1)})


def test_floats_without_statistics_are_named_in_a_warning(mixed):
    with pytest.warns(UserWarning, match=r"deviation of y, which stay as they are: give \(0, 1\)"):
        sl.StreamingDataset(mixed[0], batch_size=1, fields=["x", "y", "label"], normalize={"x": (0, 1)})
    channels = sl.Channels("z@500", "t2m", "orog", "time_of_day")
    options = {"batch_size": 1, "sample_axis": "time", "channels": channels}
    with pytest.warns(UserWarning, match="deviation of t2m, orog, which"):
        sl.StreamingDataset(url_of("xarray3.zarr"), normalize={"z@500": (0, 1)}, **options)
    given = {"z@500": (1, 2), "t2m": (0, 1), "orog": (0, 1)}
    sl.StreamingDataset(url_of("xarray3.zarr"), normalize=given, **options)  # no warning


def test_texts_have_no_statistics_and_splits_have_their_own(mixed, capsys):
    whole, splits = map(str, mixed)
    assert run(capsys, "stats", whole, "--fields", "text")[2].startswith("error: 'text' is text, which has no mean")
    assert set(json.loads(run(capsys, "stats", whole)[1])["statistics"]) == {"x", "y", "label"}
    with pytest.raises(errors.UsageError, match=f"no statistics; fit .*: streamloader stats {splits} --save"):
        sl.StreamingDataset(splits, split="val", batch_size=1, fields=["x"], normalize=True)
    assert run(capsys, "stats", splits, "--split", "train", "--save")[0] == 0
    document = json.loads((mixed[1] / "_streamloader/statistics.json").read_text())
    values = sl.open(splits, split="train")[:]["x"]
    assert document["split"] == "train"
    np.testing.assert_allclose(document["statistics"]["x"]["mean"], values.mean())
    options = {"split": "val", "batch_size": 25, "fields": ["x"], "shuffle": False}
    scaled = next(iter(sl.StreamingDataset(splits, normalize=True, **options)))["x"]
    expected = (sl.open(splits, split="val")[:25]["x"] - values.mean()) / values.std()
    np.testing.assert_allclose(scaled, expected, rtol=1e-5)
    assert sl.verify(splits).ok


def test_images_have_the_mean_and_the_deviation_of_each_channel(tmp_path, capsys):
    rng, encoded = np.random.default_rng(0), []
    pixels = [rng.integers(0, 256, (5 + i, 4, 3), np.uint8) for i in range(6)]
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png")
        encoded.append(file.getvalue())
    with sl.Writer(tmp_path / "images", {"image": "bytes:png", "label": "int64"}) as out:
        out.write_batch({"image": encoded, "label": np.arange(6)})
    found = json.loads(run(capsys, "stats", str(tmp_path / "images"))[1])["statistics"]
    every = np.concatenate([image.reshape(-1, 3) for image in pixels]) / 255
    np.testing.assert_allclose(found["image"]["mean"], every.mean(0))
    np.testing.assert_allclose(found["image"]["std"], every.std(0))
    assert found["label"]["mean"] == 2.5
    sl.Decode(normalize=(tuple(found["image"]["mean"]), tuple(found["image"]["std"])))


def test_channels_and_targets_are_normalised_each_by_its_own():
    scales = {"z@500": (5000.0, 7.0), "orog": (450.0, 300.0), "z@1000": (0, 1)}
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
