"""`--rechunk` converts arrays and slices of them to fields that are read without waste; plan and inspect name it."""

import json
import shutil

import numpy as np
import pytest
import xarray as xr
import zarr
from commands import run
from torchrun import run_python
from zarr_stores import PLAIN, url_of, values_of

import streamloader as sl
from streamloader import errors
from streamloader.conversion.sources.zarr import Member, read_members
from streamloader.storage import open_store
from streamloader.zarr.metadata import read_group
from streamloader.zarr.reader import ArrayReader


@pytest.mark.quick(2)
@pytest.mark.parametrize("store", PLAIN)
def test_slices_become_fields_with_the_values_of_xarray(store, tmp_path):
    report = sl.convert(url_of(store), tmp_path / "out", rechunk="t2m,z@500,z@level=850,run", workers=0)
    dataset = sl.open(tmp_path / "out")
    assert {"run", "t2m", "z_500", "z_850"} <= set(dataset.fields)
    assert report.num_samples == len(dataset) == 23
    found, z = dataset[:], values_of(store, "z")
    np.testing.assert_allclose(found["t2m"], values_of(store, "t2m"), rtol=1e-6)
    np.testing.assert_array_equal(found["z_500"], z[:, 0])
    np.testing.assert_array_equal(found["z_850"], z[:, 1])
    assert dataset.manifest.provenance["rechunk"] == ["t2m", "z@500", "z@level=850", "run"]


def samples_by_index(url, **options):
    """All samples of a URL, in the order of their indexes."""
    batches = list(sl.StreamingDataset(url, batch_size=3, remainder="uneven", with_index=True, **options))
    columns = {name: np.concatenate([batch[name].numpy() for batch in batches]) for name in batches[0]}
    order = np.lexsort([values for name, values in columns.items() if name.startswith("index")])
    return {name: values[order] for name, values in columns.items()}


def assert_same_samples(store, dataset, **options):
    """The same declarations give the same samples, gaps and counts of both."""
    expected, found = samples_by_index(store, **options), samples_by_index(dataset, **options)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert values.dtype == found[name].dtype
        np.testing.assert_array_equal(values, found[name], err_msg=name)


@pytest.fixture(scope="module", params=[2, 3])
def weather(request, tmp_path_factory):
    """A store with packed values, a gap in its times, and an array whose first dimension is another; and rechunked."""
    folder, rng = tmp_path_factory.mktemp("weather"), np.random.default_rng(0)
    times = np.datetime64("2001-01-01", "ns") + 6 * np.delete(np.arange(40), range(18, 25)) * np.timedelta64(1, "h")
    count = times.size
    store = xr.Dataset(
        {
            "T2M": (("time", "lat", "lon"), rng.normal(280, 10, (count, 4, 6))),
            "z": (("time", "level", "lat", "lon"), rng.normal(0, 1, (count, 3, 4, 6)).astype("f4")),
            "w": (("level", "time", "lat", "lon"), rng.normal(0, 1, (3, count, 4, 6)).astype("f4")),
            "orography": (("lat", "lon"), rng.normal(0, 1, (4, 6)).astype("f4")),
            "height": ((), 2.0),
            "run": (("time",), np.repeat(np.arange(3), count // 3)),
        },
        {"time": times, "level": [500, 850, 1000], "lat": np.linspace(-55, 55, 4), "lon": np.arange(0, 360, 60.0)},
    )
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32767, "chunks": (20, 4, 6)}
    encoding = {"T2M": packed, "z": {"chunks": (20, 3, 4, 6)}}
    url, out = str(folder / "store.zarr"), str(folder / "out")
    store.to_zarr(url, encoding=encoding, consolidated=request.param == 2, zarr_format=request.param)
    chosen = "T2M,z@500,z@level=850,w,w@1000,orography,height"
    sl.convert(url, out, rechunk=chosen, sample_axis="time", workers=0)
    return url, out


PATCH = sl.Patch({"lat": 2, "lon": 3})
STACK = sl.Channels("z@500", "z@level=850", "T2M", "w@1000", "orography", "height", "lat", "time_of_day", "run")
DECLARATIONS = {
    "fields": {"fields": ["T2M", "w", "run"]},
    "an axis that is not the first": {"fields": ["w"], "windows": sl.Window(3, step=2)},
    "durations and gaps": {"fields": ["T2M"], "windows": sl.Window("12h", stride="6h")},
    "leads": {"channels": sl.Channels("z@500"), "windows": sl.Window(history="12h", lead=("6h", "1d"))},
    "channels": {"channels": STACK, "windows": sl.Window(2)},
    "where by times": {"channels": {"a": STACK}, "where": slice("2001-01-02", "2001-01-08T06")},
    "where by values": {"fields": ["w", "T2M"], "where": "run == 1", "windows": sl.Window(2, group="run")},
    "where by numbers": {"fields": ["T2M"], "where": slice(3, 30, 4)},
    "levels of an array": {"channels": sl.Channels("w@500", "w@level=850")},
    "normalize": {"channels": sl.Channels("z@500.0", "T2M"), "normalize": {"z@500.0": (1.0, 2.0), "T2M": (280.0, 5.0)}},
    "patches": {"channels": sl.Channels("w@1000", "T2M"), "patches": PATCH},
    "patches of windows": {"fields": ["w", "T2M"], "patches": PATCH, "windows": sl.Window(2)},
    "patches only": {"fields": ["w", "T2M"], "patches": PATCH, "sample_axis": None},
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("declaration", DECLARATIONS.values(), ids=DECLARATIONS)
def test_a_rechunked_dataset_takes_the_same_declarations_with_the_same_values(declaration, weather):
    assert_same_samples(*weather, **{"sample_axis": "time", **declaration})


@pytest.mark.quick(2)
@pytest.mark.parametrize("store", PLAIN)
def test_stores_of_every_kind_are_rechunked_with_their_coordinates(store, tmp_path):
    url = url_of(store)
    sl.convert(url, tmp_path / "out", rechunk="t2m,z", workers=0)
    axis = read_group(open_store(url)).array("t2m").dims[0]
    assert_same_samples(url, tmp_path / "out", sample_axis=axis, fields=["t2m", "z", "run"], windows=sl.Window(3))


@pytest.mark.quick(1)
def test_each_split_and_a_dataset_made_of_another_keep_times_and_coordinates(weather, tmp_path):
    url, out = weather
    channels = sl.Channels("z@500", "lat", "time_of_year")
    for name, options in (("again", {}), ("split", {"split": "a=0.5,b=0.5"})):
        sl.convert(out, tmp_path / name, workers=0, **options)
        assert sl.verify(tmp_path / name).ok
    assert_same_samples(url, tmp_path / "again", sample_axis="time", channels=channels, windows=sl.Window("12h"))
    shares = [samples_by_index(tmp_path / "split", split=split, channels=channels) for split in "ab"]
    whole = samples_by_index(url, sample_axis="time", channels=channels)["channels"]
    found = np.concatenate([share["channels"] for share in shares])
    np.testing.assert_array_equal(found[np.argsort(found[:, 2, 0, 0])], whole)


@pytest.mark.quick(1)
@pytest.mark.parametrize("version", [2, 3])
def test_times_without_units_and_values_that_are_kept_as_stored(version, tmp_path):
    """numpy's times have their unit in the dtype; what `--raw` keeps packed is unpacked when it is read."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    times = np.datetime64("2001-01-01", "h") + 6 * np.arange(8) * np.timedelta64(1, "h")
    group.create_array("time", data=times.astype("M8[s]"), attributes={"_ARRAY_DIMENSIONS": ["time"]}, fill_value="NaT")
    packed = {"scale_factor": 0.5, "_FillValue": 3, "_ARRAY_DIMENSIONS": ["time", "x"]}
    values = np.arange(16, dtype="i2").reshape(8, 2)
    group.create_array("v", data=values, attributes=packed)
    sl.convert(tmp_path / "x.zarr", tmp_path / "raw", rechunk="v", raw=True, workers=0)
    sl.convert(tmp_path / "x.zarr", tmp_path / "out", rechunk="v", workers=0)
    declared = {
        "sample_axis": "time",
        "fields": ["v"],
        "windows": sl.Window("12h"),
        "where": slice("2001-01-01T06", None),
    }
    for out in ("raw", "out"):
        assert_same_samples(tmp_path / "x.zarr", tmp_path / out, **declared)
    assert_same_samples(tmp_path / "x.zarr", tmp_path / "raw", decode_cf=False, **declared)
    with pytest.raises(errors.UsageError, match="unpacked 'v'; convert with rechunk= and raw=True"):
        sl.StreamingDataset(tmp_path / "out", batch_size=1, decode_cf=False, **declared)


@pytest.mark.quick(1)
def test_an_append_needs_the_same_coordinates_and_units(weather, tmp_path):
    url, out = weather
    shutil.copytree(out, tmp_path / "out")
    for name in ("lat", "time"):
        shutil.copytree(url, tmp_path / name)
        changed = zarr.open_group(tmp_path / name, use_consolidated=False)
        if name == "lat":
            changed["lat"][0] = 1
        else:
            changed["time"].attrs["units"] = "days since 1900-01-01"
            if (tmp_path / name / ".zmetadata").exists():
                (tmp_path / name / ".zmetadata").unlink()
        with pytest.raises(errors.FieldError, match=r"other coordinates, units or attributes than "):
            sl.append(tmp_path / "out", tmp_path / name, workers=0)
    sl.append(tmp_path / "out", url, workers=0)
    assert len(sl.open(tmp_path / "out")) == 66
    assert sl.verify(tmp_path / "out").ok


@pytest.mark.quick(1)
def test_mapped_fields_are_not_the_arrays_of_the_store(weather, tmp_path):
    rechunk, half = {"rechunk": "T2M", "sample_axis": "time"}, lambda sample: {"t2m": sample["t2m"] / 2}
    sl.convert(weather[0], tmp_path / "out", map=half, workers=0, **rechunk)
    assert sl.verify(tmp_path / "out").ok
    (batch,) = sl.StreamingDataset(tmp_path / "out", batch_size=32, windows=sl.Window(2), shuffle=False)
    assert list(batch) == ["t2m", "valid"]


def test_damage_beside_the_fields_is_found(weather, tmp_path):
    shutil.copytree(weather[1], tmp_path / "out")
    place, root = tmp_path / "out/_streamloader/arrays/lat/c/0", tmp_path / "out/_streamloader/arrays/zarr.json"
    place.write_bytes(place.read_bytes()[:-1] + b"x")
    (problem,) = sl.verify(tmp_path / "out").problems
    assert "arrays/lat/c/0 is damaged" in problem.problem
    unnamed = json.loads(root.read_bytes())
    unnamed["attributes"]["fields"]["t2m"]["name"] = True
    for damaged in (
        json.dumps(unnamed).encode(),
        b"{}",
        b'{"node_type": "group", "attributes": {"sample_axis": "time", "fields": {"t2m": []}}}',
        b"[",
    ):
        root.write_bytes(damaged)
        with pytest.raises(errors.FormatError, match=r"arrays/zarr\.json is damaged"):
            sl.StreamingDataset(tmp_path / "out", batch_size=1, sample_axis="time")
    root.unlink()
    with pytest.raises(errors.FormatError, match=r"no Zarr metadata at .*arrays"):
        sl.StreamingDataset(tmp_path / "out", batch_size=1, sample_axis="time")


def test_all_objects_beside_the_fields_are_removed_with_the_dataset(weather, tmp_path):
    shutil.copytree(weather[1], tmp_path / "out")
    with sl.Writer(tmp_path / "out", {"x": "int64"}, overwrite=True) as out:
        out.write({"x": 1})
    assert not [path for path in (tmp_path / "out/_streamloader/arrays").rglob("*") if path.is_file()]


def test_a_slice_is_named_by_its_value_whatever_its_coordinate(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    values = np.arange(24.0).reshape(4, 2, 3)
    group.create_array("q", data=values, dimension_names=["time", "pressure", "x"])
    group.create_array("pressure", data=np.array([300, 500]), dimension_names=["pressure"])
    sl.convert(tmp_path / "x.zarr", tmp_path / "out", rechunk="q@pressure=500", workers=0)
    np.testing.assert_array_equal(sl.open(tmp_path / "out")[:]["q_500"], values[:, 1])


@pytest.mark.long
def test_arrays_of_groups_below_keep_their_coordinates(tmp_path):
    root = zarr.open_group(tmp_path / "x.zarr", mode="w")
    root.create_array("g/time", data=np.array([0, 1, 2, 10, 11, 12]), dimension_names=["time"]).attrs["units"] = (
        "hours since 2001-01-01"
    )
    root.create_array("g/level", data=np.array([500, 850]), dimension_names=["level"])
    values = np.arange(24).reshape(6, 2, 2)
    root.create_array("g/z", data=values, dimension_names=["time", "level", "x"])
    sl.convert(tmp_path / "x.zarr", str(tmp_path / "y"), rechunk=["g/z"])
    options = {"sample_axis": "time", "windows": sl.Window("2h"), "channels": sl.Channels("g/z@850")}
    for name in ("x.zarr", "y"):
        dataset = sl.StreamingDataset(tmp_path / name, batch_size=4, with_index=True, **options)
        (batch,) = dataset
        for first, found in zip(batch["index"].tolist(), batch["channels"].numpy(), strict=True):
            np.testing.assert_array_equal(found[:, 0], values[first : first + 2, 1])
        assert sorted(batch["index"].tolist()) == [0, 1, 3, 4]


@pytest.mark.long
def test_a_conversion_in_processes_and_a_shuffled_one_hold_the_same_rows(tmp_path):
    for name, options in (("a", {"workers": 2}), ("b", {"workers": 0, "shuffle": 3})):
        sl.convert(
            url_of("python3.zarr"),
            tmp_path / name,
            rechunk="z@500,run",
            layout=sl.Layout(samples_per_shard=4),
            **options,
        )
    a, b = sl.open(tmp_path / "a")[:], sl.open(tmp_path / "b")[:]
    np.testing.assert_array_equal(a["z_500"], values_of("python3.zarr", "z")[:, 0])
    assert sorted(a["run"].tolist()) == sorted(b["run"].tolist())
    assert {row.tobytes() for row in a["z_500"]} == {row.tobytes() for row in b["z_500"]}


def test_a_chunk_is_fetched_once_for_all_rows_and_slices_that_are_read_of_it(tmp_path, monkeypatch):
    """Also of rows between which others are left out."""
    values = np.arange(30.0 * 3 * 6).reshape(30, 3, 6)
    zarr.create_array(tmp_path / "z", data=values, chunks=(5, 3, 4), dimension_names=["time", "level", "x"])
    store, fetched, fetch = open_store(str(tmp_path / "z")), [], ArrayReader.fetch
    monkeypatch.setattr(ArrayReader, "fetch", lambda *args: fetched.append(args[2].path) or fetch(*args))
    member = Member(read_group(store).array("z"), None, {"z_0": {"level": 0}, "z_2": {"level": 2}})
    rows = np.array([1, 3, 7, 8, 9, 22, 29])
    into = {name: np.empty((rows.size, 6)) for name in member.picks}
    read_members(store, [member], rows, into)
    np.testing.assert_array_equal(into["z_0"], values[rows, 0])
    np.testing.assert_array_equal(into["z_2"], values[rows, 2])
    assert sorted(fetched) == [f"c/{n}/0/{x}" for n in (0, 1, 4, 5) for x in (0, 1)]


@pytest.mark.long
def test_rows_that_are_left_out_take_little_memory(tmp_path):
    """Chunks have all rows of a few columns: the rows between two would be the whole array, 256 MiB."""
    script = """
import resource, sys, numpy as np, zarr
from streamloader.conversion.sources.zarr import Member, read_members
from streamloader.zarr.metadata import read_group
from streamloader.storage import open_store
store = open_store(sys.argv[1])
member, peak = Member(read_group(store).array("z"), None, {"z": {}}), lambda: resource.getrusage(0).ru_maxrss
before, out = peak(), np.ones((2, 512, 256), "f4")
read_members(store, [member], np.array([0, 511]), {"z": out})
assert not out.any()
print((peak() - before) << 10)
"""
    zarr.create_array(tmp_path / "z", shape=(512, 512, 256), chunks=(512, 32, 32), dtype="f4", fill_value=1)[:] = 0
    assert int(run_python("-c", script, tmp_path / "z").stdout) < 150 << 20


@pytest.mark.parametrize(
    ("rechunk", "kind", "message"),
    [
        ("tas", errors.FieldError, "has no array 'tas'"),
        ("z@700", errors.FieldError, "no coordinate of level, lat, lon has 700"),
        ("t2m,orog", errors.SourceError, "first dimensions are time of t2m, lat of orog; .* sample_axis="),
    ],
)
def test_slices_that_do_not_exist_are_clear_errors(rechunk, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        sl.convert(url_of("xarray3.zarr"), tmp_path / "out", rechunk=rechunk, workers=0)


def test_inspect_and_plan_name_the_conversion_if_little_of_what_is_read_is_used(capsys):
    url = url_of("xarray2.zarr")
    arguments = (url, "--sample-axis", "time", "--channels", "z@500,t2m", "--length", "3")
    # blocks share chunks, which a plan that keeps them reads once
    apart = (*arguments[:-1], "1", "--stride", "6", "--batch-size", "4")
    for command, reads, ratio in (
        (("inspect", *arguments), "z: reads 110.2 KiB", "5.1 times, each chunk 1.75 times"),
        (("plan", *apart), "z: reads 63.0 KiB", "16.8 times\n"),
    ):
        status, out, _ = run(capsys, *command)
        assert status == 0
        assert reads in out
        assert ratio in out
        assert f"streamloader convert {url} DST --rechunk z@500,t2m --sample-axis time\n" in out
        assert "an epoch then reads about" in out
    facts = json.loads(run(capsys, "inspect", *arguments, "--json")[1])
    assert facts["rechunking"]["after"] < facts["rechunking"]["before"] / 2
    planned = json.loads(run(capsys, "plan", *arguments, "--batch-size", "4", "--world-size", "3", "--json")[1])
    assert planned["bytes"] == round(planned["read_factor"] * sum(each["stored"] for each in planned["arrays"]))
    whole = (url, "--sample-axis", "time")
    assert "--rechunk" not in run(capsys, "inspect", *whole)[1]


def test_inspect_shows_why_an_array_cannot_be_read(tmp_path, capsys):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    group.create_array("complex", data=np.zeros(3, np.complex64))
    group.create_array("plain", data=np.zeros(3, np.float32))
    status, out, _ = run(capsys, "inspect", tmp_path / "x.zarr", "--json")
    problems = {array["name"]: array["problem"] for array in json.loads(out)["arrays"]}
    assert status == 0
    assert "tensors hold numbers" in problems["complex"]
    assert not problems["plain"]


def test_a_slice_of_an_array_without_the_sample_axis_is_read_from_the_array_beside(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("v", data=np.arange(24.0).reshape(4, 2, 3), dimension_names=["time", "lev", "x"])
    group.create_array("mask", data=np.arange(6.0).reshape(3, 2), dimension_names=["x", "lev"])
    group.create_array("lev", data=np.array([1, 2]), dimension_names=["lev"])
    chosen = {"rechunk": "v@lev=2,mask@2", "sample_axis": "time"}
    report = sl.convert(tmp_path / "x.zarr", tmp_path / "out", workers=0, **chosen)
    assert report.num_samples == 4
    channels = sl.Channels("v@lev=2", "mask@2")
    assert_same_samples(tmp_path / "x.zarr", tmp_path / "out", sample_axis="time", channels=channels)


def test_attributes_without_a_json_number_keep_their_meaning_in_strict_json(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("v", data=np.arange(4.0), dimension_names=["time"])
    mask = group.create_array("mask", data=np.array([1, np.inf, 3]), dimension_names=["x"])
    mask.attrs.update({"_FillValue": np.nan, "missing_value": np.inf})
    time = group.create_array("time", data=np.arange(4.0), dimension_names=["time"])
    time.attrs.update({"_FillValue": np.nan, "valid_min": -np.inf})
    sl.convert(tmp_path / "x.zarr", tmp_path / "out", rechunk="v,mask", sample_axis="time", workers=0)
    for document in (tmp_path / "out/_streamloader/arrays").rglob("zarr.json"):
        json.loads(document.read_text(), parse_constant=pytest.fail)
    channels = sl.Channels("v", "time")
    assert_same_samples(tmp_path / "x.zarr", tmp_path / "out", sample_axis="time", channels=channels)
    fields = {"sample_axis": "x", "fields": ["mask"]}
    (found,) = sl.StreamingDataset(tmp_path / "out/_streamloader/arrays", batch_size=3, shuffle=False, **fields)
    np.testing.assert_array_equal(found["mask"], [1, np.nan, 3])
