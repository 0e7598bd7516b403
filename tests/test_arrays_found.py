"""What a review of arrays in place found: each of these gave wrong values, or an error that did not help."""

import asyncio
import json
import operator

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr_stores import STORES, samples_of, url_of, values_of

import streamloader as sl
from streamloader import errors
from streamloader.measure.statistics import fit
from streamloader.storage import open_store, references_url
from streamloader.storage.store import Store

COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def write(path, version=3, attributes=None, **arrays):
    """A group of one-dimensional arrays along `time`, unless a value has more dimensions."""
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, values in ((name, np.asarray(given)) for name, given in arrays.items()):
        made = group.create_array(name, data=values, chunks=(4, *values.shape[1:]))
        dims = ["time", "y", "x"][: values.ndim]
        made.attrs.update({"_ARRAY_DIMENSIONS": dims, **(attributes or {}).get(name, {})})
    return str(path)


def test_a_reference_to_a_file_that_is_gone_is_an_error_and_no_fill_value(tmp_path):
    document = json.loads((STORES / "kerchunk.json").read_text())
    document["templates"]["u"] = "gone.nc"
    (tmp_path / "moved.json").write_text(json.dumps(document))
    with pytest.raises(errors.StorageError, match=r"is a range of gone\.nc, which cannot be found"):
        list(sl.StreamingDataset(tmp_path / "moved.json", batch_size=4, sample_axis="time", fields=["t2m"]))
    assert open_store(references_url(url_of("kerchunk.json"))).head("z/9.9.9.9") is None


def test_times_groups_and_conditions_are_exact_despite_a_fill_value(tmp_path):
    seconds = 1_600_000_000 + 3600 * np.arange(200)
    runs = np.repeat([20200303, 20200304], 100).astype("i4")
    fills = {"time": {"_FillValue": -(2**62), "units": "seconds since 1970-01-01"}, "run": {"_FillValue": -1}}
    url = write(tmp_path / "x.zarr", 3, fills, time=seconds, run=runs, a=np.arange(200.0))
    options = {"batch_size": 1, "sample_axis": "time", "fields": ["a"]}
    assert sl.StreamingDataset(url, windows=sl.Window("6h"), **options).num_samples == 195
    assert sl.StreamingDataset(url, windows=sl.Window(5, group="run"), **options).num_samples == 192
    assert sl.StreamingDataset(url, where="run == 20200303", **options).num_samples == 100


@pytest.mark.parametrize("packing", [{"scale_factor": 0.5}, {"add_offset": 10}, {"scale_factor": 2, "_FillValue": -1}])
def test_packed_times_are_unpacked_exactly(packing, tmp_path):
    stored = 2**26 + np.arange(50)
    attributes = {"time": {**packing, "units": "hours since 1970-01-01"}}
    url = write(tmp_path / "x.zarr", 3, attributes, time=stored, a=np.arange(50.0))
    hours = packing.get("scale_factor", 1)
    windows = sl.Window(f"{2 * hours:g}h" if hours >= 1 else "60min")
    assert sl.StreamingDataset(url, batch_size=1, sample_axis="time", windows=windows).num_samples == 49


def test_a_fill_value_of_0_masks_only_what_attributes_say_is_packed_or_missing(tmp_path):
    """It is the default of zarr-python 2, kerchunk and tifffile; other fill values of version 2 are netCDF's."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    cases = {
        "image": ("u1", 0, {}, [0, 1, 2]),
        "floats": ("f4", 0, {}, [0, 1, 2]),
        "signed": ("i2", 0, {"_Unsigned": "false"}, [0, 1, 2]),
        "chosen": ("i2", 2, {}, [0, 1, np.nan]),
        "packed": ("i2", 0, {"scale_factor": 0.5}, [np.nan, 0.5, 1]),
        "offset": ("i2", 0, {"add_offset": 1}, [np.nan, 2, 3]),
        "missing": ("i4", 0, {"missing_value": 1}, [np.nan, np.nan, 2]),
        "named": ("i4", 0, {"_FillValue": 0}, [np.nan, 1, 2]),
    }
    for name, (dtype, fill, attributes, _) in cases.items():
        array = group.create_array(name, shape=(3,), dtype=dtype, fill_value=fill)
        array[:] = np.arange(3)
        array.attrs.update({"_ARRAY_DIMENSIONS": ["n"], **attributes})
    (batch,) = sl.StreamingDataset(tmp_path / "x.zarr", batch_size=3, sample_axis="n", shuffle=False)
    for name, (dtype, _, _, wanted) in cases.items():
        np.testing.assert_array_equal(batch[name].numpy(), wanted, err_msg=name)
        assert np.isnan(wanted).any() or batch[name].numpy().dtype == dtype


def test_times_of_numpy_keep_the_epoch_despite_a_fill_value_of_0(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    dates = np.array(["1970-01-01", "2020-03-03", "NaT"], "datetime64[s]")
    group.create_array("dates", data=dates, fill_value=0).attrs.update({"_ARRAY_DIMENSIONS": ["n"], "_FillValue": 0})
    (batch,) = sl.StreamingDataset(tmp_path / "x.zarr", batch_size=3, sample_axis="n", fields=["dates"], shuffle=False)
    np.testing.assert_array_equal(batch["dates"].numpy(), dates.astype("i8"))


def test_arrays_are_unpacked_by_choice_of_each(tmp_path):
    packing = {"scale_factor": 0.5, "_FillValue": 3}
    stored = np.arange(4, dtype="i2")
    url = write(tmp_path / "x.zarr", attributes={"a": packing, "b": packing}, a=stored, b=stored)
    options = {"batch_size": 4, "sample_axis": "time", "shuffle": False}
    (batch,) = sl.StreamingDataset(url, decode_cf={"a": False}, **options)
    np.testing.assert_array_equal(batch["a"].numpy(), stored)
    np.testing.assert_array_equal(batch["b"].numpy(), [0, 0.5, 1, np.nan])
    with pytest.raises(errors.FieldError, match="has no array 'c'"):
        sl.StreamingDataset(url, decode_cf={"c": False}, **options)
    for wrong in ("a", ["a"], {"a": 1}, {5: True}, None):
        with pytest.raises(errors.UsageError, match="give True, False, or a dict of these by array"):
            sl.StreamingDataset(url, decode_cf=wrong, **options)


@pytest.mark.parametrize("codec", ["lz4", "gzip", "zlib", "zstd"])
def test_a_chunk_that_decodes_to_fewer_bytes_is_an_error(codec, tmp_path):
    from numcodecs.registry import get_codec

    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    compressor = get_codec({"id": codec})
    group.create_array("a", data=np.ones(8, "f4"), chunks=(8,), compressors=compressor)
    (tmp_path / "x.zarr" / "a" / "0").write_bytes(compressor.encode(np.ones(4, "f4")))
    with pytest.raises(errors.CorruptError):
        list(sl.StreamingDataset(tmp_path / "x.zarr", batch_size=8, sample_axis=0))


def test_names_in_normalize_that_match_nothing_are_an_error(tmp_path):
    url = write(tmp_path / "x.zarr", a=np.arange(8.0))
    (tmp_path / "s.json").write_text('{"statistics": {"z@500": {"mean": 0, "std": 1}}}')
    for given in ({"b": (0, 1)}, str(tmp_path / "s.json")):
        with pytest.raises(errors.UsageError, match="normalize= has"):
            sl.StreamingDataset(url, batch_size=1, sample_axis="time", normalize=given)
    for given in ({"a": 3}, {"a": (1,)}):
        with pytest.raises(errors.UsageError, match="normalize= has"):
            sl.StreamingDataset(url, batch_size=1, sample_axis="time", normalize=given)
    sl.StreamingDataset(url, batch_size=1, sample_axis="time", normalize={"a": (np.float32(0), np.float32(1))})


def test_months_have_no_length_and_are_no_times_to_select_by(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    times = np.arange("2001-01", "2003-01", dtype="datetime64[M]")
    group.create_array("time", data=times).attrs["_ARRAY_DIMENSIONS"] = ["time"]
    group.create_array("a", data=np.arange(24.0)).attrs["_ARRAY_DIMENSIONS"] = ["time"]
    options = {"batch_size": 1, "sample_axis": "time"}
    with pytest.raises(errors.UsageError, match="not a coordinate of times"):
        sl.StreamingDataset(tmp_path / "x.zarr", where=slice("1970-01", "1970-12"), **options)
    assert sl.StreamingDataset(tmp_path / "x.zarr", windows=sl.Window(3), **options).num_samples == 22


def test_channels_of_one_dimension_are_read(tmp_path):
    url = write(tmp_path / "x.zarr", p=np.arange(8.0), q=np.arange(8.0) * 2)
    dataset = sl.StreamingDataset(
        url, batch_size=2, sample_axis="time", channels=sl.Channels("p", "q"), with_index=True, memory="64MiB"
    )
    for sample in samples_of(list(dataset)):
        np.testing.assert_array_equal(sample["channels"], [sample["index"], 2 * sample["index"]])


def test_a_coordinate_of_names_does_not_keep_the_store_from_being_read(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    group.create_array("station", data=np.array([b"a", b"b", b"c"])).attrs["_ARRAY_DIMENSIONS"] = ["station"]
    group.create_array("a", data=np.arange(3.0)).attrs["_ARRAY_DIMENSIONS"] = ["station"]
    options = {"batch_size": 1, "sample_axis": "station", "windows": sl.Window(2)}
    assert sl.StreamingDataset(tmp_path / "x.zarr", **options).num_samples == 2


def test_a_part_that_ascends_can_be_selected(tmp_path):
    url = write(tmp_path / "x.zarr", time=[0, 1, 2, 3, 4, 2, 3, 4, 5, 6], a=np.arange(10.0))
    options = {"batch_size": 1, "sample_axis": "time", "windows": sl.Window(2)}
    with pytest.raises(errors.UsageError, match="elements 4 and 5 are 4 and 2"):
        sl.StreamingDataset(url, **options)
    assert sl.StreamingDataset(url, where=slice(0, 5), **options).num_samples == 4
    assert sl.StreamingDataset(url, where=[0, 1, 2, 3, 4, 6, 7, 8], **options).num_samples == 6


def test_a_patch_that_a_finer_level_cannot_hold_is_an_error(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("0", data=np.zeros((511, 4)), dimension_names=["y", "x"])
    group.create_array("1", data=np.zeros((256, 2)), dimension_names=["y", "x"])
    with pytest.raises(errors.UsageError, match="which has 255 in all arrays"):
        sl.StreamingDataset(tmp_path / "x.zarr", batch_size=1, patches=sl.Patch({"y": 256}), fields=["1", "0"])
    group.create_array("none", data=np.zeros((4, 0)), dimension_names=["t", "z"])
    with pytest.raises(errors.UsageError, match="along 'z', which has 0"):
        sl.StreamingDataset(tmp_path / "x.zarr", batch_size=1, patches=sl.Patch({"z": 1}), fields=["none"])


def test_filters_that_store_wider_values_are_read(tmp_path):
    from numcodecs import AsType

    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    filters = [AsType("<f8", "<f4")]
    values = np.arange(2**18, dtype="f4")
    group.create_array("a", data=values, chunks=(2**18,), filters=filters, compressors=None)
    (batch,) = sl.StreamingDataset(tmp_path / "x.zarr", batch_size=2**18, sample_axis=0, shuffle=False)
    np.testing.assert_array_equal(batch["a"], values)


def test_the_largest_blocks_are_those_of_the_tail(tmp_path):
    shape = (400, 64, 64)
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("a", shape=shape, chunks=(20, 32, 32), dtype="f4", dimension_names=["t", "y", "x"])
    mask = np.ones(400, bool)
    mask[360:] = np.random.default_rng(0).random(40) < 0.1
    patches = sl.Patch({"y": 16, "x": 16}, stride=8)
    dataset = sl.StreamingDataset(tmp_path / "x.zarr", batch_size=8, sample_axis="t", patches=patches, where=mask)
    (data,) = dataset._datasets
    reader, block = data.region_readers["a"], data.manifest.order.block
    firsts = range(0, dataset.num_samples, block)
    most = max(reader.block_bytes(first, min(first + block, dataset.num_samples)) for first in firsts)
    assert reader.most_bytes(block) == most


def test_arrays_without_the_patched_dimensions_are_repeated(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("a", data=np.arange(64.0).reshape(8, 8), dimension_names=["lat", "lon"])
    group.create_array("lat", data=np.arange(8.0), dimension_names=["lat"])
    channels, patches = sl.Channels("a", "lat"), sl.Patch({"lat": 4, "lon": 4})
    for batch in sl.StreamingDataset(tmp_path / "x.zarr", batch_size=1, patches=patches, channels=channels):
        np.testing.assert_array_equal(batch["channels"][0, 1], batch["channels"][0, 0] // 8)


def test_an_icechunk_repository_is_read_inside_a_running_event_loop():
    async def read():
        return list(sl.StreamingDataset(url_of("icechunk"), batch_size=23, sample_axis="time", fields=["run"]))

    (batch,) = asyncio.run(read())
    assert sorted(batch["run"].tolist()) == sorted(values_of("icechunk", "run").tolist())


def test_a_single_array_is_opened_without_a_listing(monkeypatch):
    monkeypatch.setattr(Store, "children", None)
    dataset = sl.StreamingDataset(STORES / "python3.zarr" / "run", batch_size=23, sample_axis="time")
    (batch,) = dataset
    assert sorted(batch["run"].tolist()) == sorted(values_of("python3.zarr", "run").tolist())


def test_extension_points_may_be_named_by_text(tmp_path):
    zarr.create_array(
        tmp_path / "x", data=np.arange(9, dtype="u1"), chunks=(4,), compressors=(), dimension_names=["time"]
    )
    path = tmp_path / "x" / "zarr.json"
    document = json.loads(path.read_text())
    document |= {"codecs": ["bytes"], "chunk_key_encoding": "default"}
    path.write_text(json.dumps(document))
    (batch,) = sl.StreamingDataset(tmp_path / "x", batch_size=9, sample_axis="time", shuffle=False)
    assert batch["x"].tolist() == list(range(9))


@pytest.mark.quick(1)
@pytest.mark.parametrize("version", [2, 3])
def test_arrays_without_dimensions_are_channels(version, tmp_path):
    """xarray's scalar coordinates: indexing such an array gives a copy, which stayed unread."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    group.create_array("a", data=np.arange(1.0, 9)).attrs["_ARRAY_DIMENSIONS"] = ["time"]
    for name, value in (("height", np.float32(2)), ("packed", np.int16(7)), ("wide", np.int64(9))):
        array = group.create_array(name, shape=(), dtype=value.dtype)
        array[()] = value
        array.attrs.update({"_ARRAY_DIMENSIONS": []} | ({} if name == "height" else {"scale_factor": 0.5}))
    group.create_array("missing", shape=(), dtype="f4", fill_value=6)
    names = ("height", "packed", "wide", "missing")
    channels = {"x": sl.Channels("a", *names), "alone": sl.Channels(*names)}
    options = {"sample_axis": "time", "normalize": {**dict.fromkeys(("a", *names), (0, 1)), "wide": (0.5, 2)}}
    dataset = sl.StreamingDataset(tmp_path / "x.zarr", batch_size=8, channels=channels, shuffle=False, **options)
    (batch,) = dataset
    assert batch["x"][:, 0].tolist() == list(range(1, 9))
    for found in (batch["x"][:, 1:], batch["alone"]):
        np.testing.assert_array_equal(found, [[2, 3.5, 2, 6]] * 8)
    found = fit(sl.Source(tmp_path / "x.zarr", sample_axis="time", channels=sl.Channels("a", *names)))
    assert [found[name]["mean"] for name in names] == [2, 3.5, 4.5, 6]


@pytest.mark.quick(1)
@pytest.mark.parametrize("write", ["dimension_names", "_ARRAY_DIMENSIONS"])
def test_repeated_dimension_names_are_dimensions_of_their_own(write, tmp_path):
    values = np.arange(4.0 * 6 * 6 * 5).reshape(4, 6, 6, 5)
    group, dims = zarr.open_group(tmp_path / "x.zarr", mode="w"), ["t", "c", "c", "c_2"]
    named = {write: dims} if write == "dimension_names" else {"attributes": {write: dims}}
    group.create_array("v", data=values, chunks=(2, 3, 3, 5), **named)
    group.create_array("c", data=np.arange(6.0) * 10, dimension_names=["c"])
    options = {"batch_size": 4, "sample_axis": "t", "with_index": True, "shuffle": False}
    (batch,) = sl.StreamingDataset(tmp_path / "x.zarr", **options)
    np.testing.assert_array_equal(batch["v"], values[batch["index"]])
    (batch,) = sl.StreamingDataset(tmp_path / "x.zarr", **options, channels=sl.Channels("v@20", "v@c=50"))
    np.testing.assert_array_equal(batch["channels"], values[batch["index"]][:, [2, 5]])
    for patch, width in ((sl.Patch({"c": 4}), 6), (sl.Patch({"c": 4, "c_3": 2}, stride=1), 2)):
        for sample in samples_of(list(sl.StreamingDataset(tmp_path / "x.zarr", **options, patches=patch))):
            t, y, x = (int(sample.get(name, 0)) for name in ("index", "index_c", "index_c_3"))
            np.testing.assert_array_equal(sample["v"], values[t, y : y + 4, x : x + width])


def test_unused_counts_the_elements_that_windows_step_over_and_that_no_patch_of_all_levels_covers(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("v", data=np.arange(24.0), dimension_names=["t"])
    group.create_array("0", data=np.zeros((33, 49)), dimension_names=["y", "x"])
    group.create_array("1", data=np.zeros((16, 24)), dimension_names=["y", "x"])

    def unused(**options):
        return sl.StreamingDataset(tmp_path / "x.zarr", batch_size=1, **options).unused

    windows = {sl.Window(2, step=6, stride=6): 20, sl.Window(history=1, lead=(3, 5), stride=9): 15, sl.Window(5): 0}
    for window, wanted in windows.items():
        assert unused(sample_axis="t", fields=["v"], windows=window) == {"t": wanted}
    assert unused(patches=sl.Patch({"y": 16, "x": 16}), fields=["0", "1"]) == {"y": 1, "x": 1}


def test_unsigned_values_are_the_same_in_place_and_rechunked(tmp_path):
    stored = np.array([0, -1, -56, 4], np.int8)
    url = write(tmp_path / "x.zarr", 3, {"a": {"_Unsigned": "true"}}, a=stored)
    sl.convert(url, tmp_path / "out", rechunk="a", workers=0)
    for each in (url, tmp_path / "out"):
        (batch,) = sl.StreamingDataset(each, batch_size=4, sample_axis="time", fields=["a"], shuffle=False)
        assert batch["a"].numpy().dtype == np.uint8
        assert batch["a"].tolist() == [0, 255, 200, 4]


def test_a_slice_is_at_the_unpacked_value_of_its_coordinate(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("z", data=np.arange(6.0).reshape(3, 2), dimension_names=["time", "lev"])
    level = group.create_array("lev", data=np.array([100, 200], "i2"), dimension_names=["lev"])
    level.attrs["add_offset"] = -100
    channels, url = sl.Channels("z@100"), str(tmp_path / "x.zarr")
    (batch,) = sl.StreamingDataset(url, batch_size=3, sample_axis="time", channels=channels, shuffle=False)
    assert batch["channels"][:, 0].tolist() == [1, 3, 5]
    sl.convert(url, tmp_path / "out", rechunk="z@100", workers=0)
    assert sl.open(tmp_path / "out")[:]["z_100"].tolist() == [1, 3, 5]


@pytest.mark.parametrize("constant", [2, 20200303])
def test_integers_beside_a_constant_channel_are_exact(constant, tmp_path):
    """float32 rounds integers above 2 ** 24; smaller ones, and floats, stay float32."""
    arrays = {"a": np.array([20200303, 20200305], "i4"), "small": np.array([1, 2], "u1"), "f": np.ones(2, "f4")}
    url = write(tmp_path / "x.zarr", **arrays)
    height = zarr.open_group(url).create_array("h", shape=(), dtype="i4")
    height[()] = constant
    columns = {name: sl.Channels(name, "h") for name in arrays}
    options = {"batch_size": 2, "sample_axis": "time", "channels": columns, "shuffle": False}
    (batch,) = sl.StreamingDataset(url, **options)
    for name, values in arrays.items():
        assert batch[name].tolist() == [[value, constant] for value in values.tolist()]
        wide = name == "a" or constant > 2**24
        assert batch[name].numpy().dtype == ("f8" if wide else "f4")
    options |= {"fields": ["a"], "channels": sl.Channels("a", "f"), "normalize": {"a": (20200300, 1), "f": (0, 1)}}
    (batch,) = sl.StreamingDataset(url, **options)
    assert batch["a"].tolist() == batch["channels"][:, 0].tolist() == [3, 5]


@pytest.mark.long
def test_missing_values_satisfy_no_comparison_but_inequality(tmp_path):
    """As in xarray, to which fill values and NaT are missing."""
    stored = xr.Dataset(
        {
            "v": ("time", np.array([3, -1, 2, 9], "i4"), {"_FillValue": 2}),
            "u": ("time", np.array([1, -1, 2, 3], "i1"), {"_FillValue": 2, "_Unsigned": "true"}),
            "t": ("time", np.array([3, -1, 24, 30]), {"_FillValue": -1, "units": "hours since 2000-01-03"}),
            "d": ("time", np.array(["2000-01-02", "NaT", "2000-01-04", "2000-01-05"], "M8[s]")),
        }
    )
    attributes = {name: array.attrs for name, array in stored.items()}
    url = write(tmp_path / "x.zarr", 3, attributes, **{name: array.values for name, array in stored.items()})
    options = {"batch_size": None, "sample_axis": "time", "fields": ["v"], "with_index": True, "shuffle": False}
    for name, column in xr.decode_cf(stored).items():
        value = np.datetime64("2000-01-04") if column.dtype.kind == "M" else 3
        for sign, compare in COMPARISONS.items():
            text = f"{name} {sign} {value if value == 3 else repr(str(value))}"
            found = [int(sample["index"]) for sample in sl.StreamingDataset(url, **options, where=text)]
            assert found == np.flatnonzero(compare(column, value)).tolist(), text


def test_times_and_conditions_are_unsigned_as_their_attribute_says(tmp_path):
    stored = {
        "time": np.array([120, 124, 128, 132], "u1").view("i1"),
        "run": np.array([1, 200, 200, 4], "u1").view("i1"),
    }
    attributes = {"time": {"_Unsigned": "true", "units": "hours since 2000-01-01"}, "run": {"_Unsigned": "true"}}
    url = write(tmp_path / "x.zarr", 3, attributes, **stored, a=np.arange(4.0))
    options = {"batch_size": 1, "sample_axis": "time", "fields": ["a"]}
    assert sl.StreamingDataset(url, where="run == 200", **options).num_samples == 2
    assert sl.StreamingDataset(url, windows=sl.Window("8h"), **options).num_samples == 3


def test_samples_without_elements_are_an_error_that_names_the_array(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    for name, width in (("a", 3), ("none", 0)):
        group.create_array(name, data=np.ones((4, width)), dimension_names=["t", f"{name}_k"])
    with pytest.raises(errors.FieldError, match=r"samples of 'none' have the shape \(0,\), without elements; leave it"):
        sl.StreamingDataset(tmp_path / "x.zarr", batch_size=1, sample_axis="t")
