"""What files say of their values, beside the tools that wrote them: packed arrays, nulls, times, fixed-length lists."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import streamloader as sl
from streamloader.cli.main import main
from streamloader.conversion.sources.base import Source, refuse_all
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.wish import parse_wish
from streamloader.errors import SourceError, StreamloaderError


def opened(src: Path | str, fields: Any = None, **options: Any) -> Source:
    return open_source(src, None, {}, parse_wish(fields, **options))[1]


def read(source: Source) -> dict[str, Any]:
    return source.part(np.arange(source.num_samples)).read(refuse_all)


# --- packed arrays

ROWS = 40
# the suffix of the file, how xarray writes and reads it
WRITERS = {
    ".nc": ({"format": "NETCDF4", "engine": "netcdf4"}, {"engine": "netcdf4"}),
    ".h5": ({"format": "NETCDF4", "engine": "netcdf4"}, {"engine": "netcdf4"}),
    "_classic.nc": ({"format": "NETCDF3_64BIT", "engine": "scipy"}, {"engine": "scipy"}),
    "2.zarr": ({"zarr_format": 2}, {"engine": "zarr"}),
    "3.zarr": ({"zarr_format": 3}, {"engine": "zarr"}),
}


def write(path: Path, attributes: dict[str, Any], values: np.ndarray[Any, Any], suffix: str) -> Path:
    """Write stored values with attributes, as they are, by xarray."""
    path = path / f"it{suffix}"
    variable = xr.Variable(("sample", "x"), values, attributes)
    dataset = xr.Dataset({"v": variable, "n": ("sample", np.arange(len(values), dtype="i4"))})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if suffix.endswith(".zarr"):
            dataset.to_zarr(path, **WRITERS[suffix][0], consolidated=False)
        else:
            dataset.to_netcdf(path, **WRITERS[suffix][0])
    return path


def oracle(path: Path, suffix: str, **options: Any) -> np.ndarray[Any, Any]:
    """Return what xarray makes of the values, times as numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"decode_times": False, "decode_timedelta": False, **options, **WRITERS[suffix][1]}
        if suffix.endswith(".zarr"):
            options["consolidated"] = False
        with xr.open_dataset(path, **options) as dataset:
            return np.asarray(dataset["v"].values)


INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "int64")
FACTORS = st.sampled_from([0.01, 0.866, 1e-3, 276.5, 76706.0])


@pytest.mark.parametrize("suffix", WRITERS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_packed_values_are_those_that_xarray_gives(
    suffix: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    classic = suffix == "_classic.nc"
    kinds = ["int8", "int16", "int32", "float32", "float64"] if classic else [*INTEGERS, "float32", "float64"]
    dtype = np.dtype(data.draw(st.sampled_from(kinds)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    low, high = (0, 100) if dtype.kind == "u" else (-100, 100)
    values = rng.integers(low, high, (ROWS, 3)).astype(dtype)
    attributes: dict[str, Any] = {}
    for name in ("scale_factor", "add_offset"):
        if data.draw(st.booleans()):
            attributes[name] = data.draw(st.sampled_from([np.float32, np.float64]))(data.draw(FACTORS))
    unsigned = dtype == np.int8 and data.draw(st.booleans())
    if unsigned:
        attributes["_Unsigned"] = "true"
    for name in ("_FillValue",) if unsigned else ("_FillValue", "missing_value"):
        if data.draw(st.booleans()):
            attributes[name] = values[data.draw(st.integers(0, 5)), 0]
    path = write(tmp_path_factory.mktemp("packed"), attributes, values, suffix)
    expected = oracle(path, suffix)
    source = opened(path, "v,n")
    found = read(source)["v"]
    assert str(source.fields["v"]) == f"{expected.dtype}[3]", source.notes
    assert np.array_equal(found, expected, equal_nan=expected.dtype.kind == "f")
    raw = read(opened(path, "v,n", raw=True))["v"]
    assert np.array_equal(raw, oracle(path, suffix, mask_and_scale=False))


@pytest.mark.parametrize("suffix", WRITERS)
def test_raw_keeps_what_is_stored_and_the_schema_says_what_was_decoded(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.arange(-60, 60, dtype="i2").reshape(ROWS, 3)
    attributes = {"scale_factor": 0.25, "add_offset": 280.0, "_FillValue": np.int16(7), "units": "K"}
    path = write(tmp_path, attributes, values, suffix)
    sl.convert(path, tmp_path / "out", fields="v,n", workers=0)
    ds = sl.open(tmp_path / "out")
    expected = oracle(path, suffix)
    assert np.isnan(expected).sum() == 1
    assert np.array_equal(ds.read("v", 0, ROWS), expected, equal_nan=True)
    assert ds.manifest.provenance["decoded"] == {"v": "int16 * 0.25 + 280.0, NaN for 7"}
    assert ds.manifest.provenance["attributes"]["v"] == {"units": "K"}
    sl.convert(path, tmp_path / "raw", fields="v", workers=0, raw=True)
    ds = sl.open(tmp_path / "raw")
    assert np.array_equal(ds.read("v", 0, ROWS), values)
    assert str(ds.fields["v"]) == "int16[3]"
    assert ds.manifest.provenance["attributes"]["v"]["scale_factor"] == "0.25"
    assert "decoded" not in ds.manifest.provenance
    command = ["convert", str(path), str(tmp_path / "no"), "--fields", "v", "--dry-run"]
    assert "float64[3]  lz4   " in shown(command, capsys)
    assert "(int16 * 0.25 + 280.0, NaN for 7)" in shown(command, capsys)
    assert "NaN" not in shown([*command, "--raw"], capsys)


def shown(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints."""
    with pytest.raises(SystemExit) as end:
        main(command)
    assert not end.value.code
    return capsys.readouterr().out


def test_files_that_are_packed_in_different_ways_are_one_dataset_unless_raw(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        attributes = {"scale_factor": 0.5 + number, "add_offset": 1.0, "_FillValue": np.int16(3 + number)}
        write(folder, attributes, np.arange(ROWS * 3, dtype="i2").reshape(ROWS, 3), ".nc")
        (folder / "it.nc").rename(tmp_path / f"{number}.nc")
    expected = np.concatenate([oracle(tmp_path / f"{number}.nc", ".nc") for number in range(2)])
    assert np.array_equal(read(opened(tmp_path))["v"], expected, equal_nan=True)
    with pytest.raises(SourceError, match=r"'v' of .*0\.nc and .*1\.nc is packed in different ways; leave --raw out"):
        opened(tmp_path, raw=True)


def test_bools_that_xarray_wrote_to_netcdf_are_bools(tmp_path: Path) -> None:
    flags = np.arange(ROWS) % 3 == 0
    xr.Dataset({"v": ("sample", flags)}).to_netcdf(tmp_path / "it.nc", engine="netcdf4")
    assert str(opened(tmp_path).fields["v"]) == "bool"
    assert np.array_equal(read(opened(tmp_path))["v"], flags)


def test_times_are_numbers_in_the_unit_that_the_notes_tell(tmp_path: Path) -> None:
    times = np.datetime64("2020-01-01T00", "h") + np.arange(ROWS)
    xr.Dataset({"v": ("sample", times.astype("datetime64[ns]"))}).to_netcdf(tmp_path / "it.nc", engine="netcdf4")
    source = opened(tmp_path)
    assert np.array_equal(read(source)["v"], np.arange(ROWS))
    assert source.notes["attributes"]["v"]["units"].startswith("hours since 2020-01-01")
    assert source.notes["attributes"]["v"]["calendar"] == "proleptic_gregorian"


def test_a_whole_number_that_decoding_would_round_is_a_bad_sample(tmp_path: Path) -> None:
    values = np.arange(ROWS * 3).reshape(ROWS, 3)
    values[5, 1] = 2**53 + 1
    path = write(tmp_path, {"_FillValue": np.int64(4)}, values, ".nc")
    with pytest.raises(SourceError, match=r"row 5 of .*it\.nc: its field 'v' holds .* keep it with --raw"):
        read(opened(path))
    assert np.array_equal(read(opened(path, raw=True))["v"], values)


@pytest.mark.parametrize("factor", [[0.1, 0.2], "0.1"])
def test_a_scale_that_is_not_a_number_is_refused(factor: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"scale_factor": factor}, np.ones((ROWS, 3), "i2"), ".nc")
    with pytest.raises(StreamloaderError, match=r"'v' has the scale_factor '0\.1.*', which is not one number; .*--raw"):
        opened(path)


def test_attributes_of_an_hdf5_that_no_netcdf_library_wrote_change_nothing(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "it.h5", "w") as file:
        file["v"] = np.arange(5, dtype="i2")
        file["v"].attrs["scale_factor"] = 0.5
    assert str(opened(tmp_path).fields["v"]) == "int16"
    assert opened(tmp_path).notes["attributes"]["v"] == {"scale_factor": "0.5"}
