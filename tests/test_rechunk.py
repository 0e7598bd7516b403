"""`--rechunk` converts arrays and slices of them to fields that are read without waste; plan and inspect name it."""

import json

import numpy as np
import pytest
import zarr
from commands import run
from torchrun import run_python
from zarr_stores import PLAIN, url_of, values_of

import streamloader as sl
from streamloader import errors
from streamloader.conversion.sources import zarr_slices
from streamloader.conversion.sources.zarr_slices import Member, read_members
from streamloader.format.zarr_metadata import read_group
from streamloader.format.zarr_reader import ArrayReader
from streamloader.storage import open_store


@pytest.mark.parametrize("store", PLAIN)
def test_slices_become_fields_with_the_values_of_xarray(store, tmp_path):
    report = sl.convert(url_of(store), tmp_path / "out", rechunk="t2m,z@500,z@level=850,run", workers=0)
    dataset = sl.open(tmp_path / "out")
    assert list(dataset.fields) == ["run", "t2m", "z_500", "z_850"]
    assert report.num_samples == len(dataset) == 23
    found, z = dataset[:], values_of(store, "z")
    np.testing.assert_allclose(found["t2m"], values_of(store, "t2m"), rtol=1e-6)
    np.testing.assert_array_equal(found["z_500"], z[:, 0])
    np.testing.assert_array_equal(found["z_850"], z[:, 1])
    assert dataset.manifest.provenance["rechunk"] == ["t2m", "z@500", "z@level=850", "run"]
    windows = sl.Window(history=2, lead=1)
    (batch,) = sl.StreamingDataset(tmp_path / "out", batch_size=21, windows=windows, shuffle=False)
    np.testing.assert_array_equal(batch["z_500_target"][:, 0].numpy(), z[2:, 0])


def test_a_slice_is_named_by_its_value_whatever_its_coordinate(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    values = np.arange(24.0).reshape(4, 2, 3)
    group.create_array("q", data=values, dimension_names=["time", "pressure", "x"])
    group.create_array("pressure", data=np.array([300, 500]), dimension_names=["pressure"])
    sl.convert(tmp_path / "x.zarr", tmp_path / "out", rechunk="q@pressure=500", workers=0)
    np.testing.assert_array_equal(sl.open(tmp_path / "out")[:]["q_500"], values[:, 1])


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


@pytest.mark.parametrize("piece", [1 << 20, 400])
def test_a_chunk_is_fetched_once_for_all_rows_and_slices_that_are_read_of_it(piece, tmp_path, monkeypatch):
    """With pieces of 400 bytes, rows between which others are left out are read in boxes of one chunk."""
    monkeypatch.setattr(zarr_slices, "PIECE_BYTES", piece)
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


def test_rows_that_are_left_out_take_little_memory(tmp_path):
    """Chunks have all rows of a few columns: the rows between two would be the whole array, 256 MiB."""
    script = """
import resource, sys, numpy as np, zarr
from streamloader.conversion.sources import zarr_slices
from streamloader.conversion.sources.zarr_slices import Member, read_members
from streamloader.format.zarr_metadata import read_group
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
        ("t2m,orog", errors.SourceError, "orog"),
    ],
)
def test_slices_that_do_not_exist_are_clear_errors(rechunk, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        sl.convert(url_of("xarray3.zarr"), tmp_path / "out", rechunk=rechunk, workers=0)


def test_inspect_and_plan_name_the_conversion_if_little_of_what_is_read_is_used(capsys):
    url = url_of("xarray2.zarr")
    arguments = (url, "--sample-axis", "time", "--channels", "z@500,t2m", "--length", "3")
    for command in (("inspect", *arguments), ("plan", *arguments, "--batch-size", "4")):
        status, out, _ = run(capsys, *command)
        assert status == 0
        assert "z: reads 110.2 KiB" in out
        assert "5.1 times" in out
        assert f"streamloader convert {url} DST --rechunk z@500,t2m" in out
        assert "an epoch then takes" in out
    facts = json.loads(run(capsys, "inspect", *arguments, "--json")[1])
    assert facts["rechunking"]["after"]["bytes"] < facts["rechunking"]["before"]["bytes"] / 2
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
