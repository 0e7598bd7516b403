"""What files say of their values, beside the tools that wrote them: packed arrays, nulls, times, fixed-length lists."""

import warnings
from datetime import date, datetime, time, timedelta

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
from amounts import examples
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import CASES, READABLE, assert_error, kinds_of, opened, plain, read, write_table

import streamloader as sl
from streamloader.conversion.sources.base import raise_bad
from streamloader.errors import FieldError, SourceError, StreamloaderError


def test_every_source_below_formats_can_be_read_here():
    """tests/test_convert_sources.py leaves out what needs a package that is not installed."""
    assert set(READABLE) == set(CASES)


# --- packed arrays

ROWS = 40
# the suffix of the file, the engine of xarray, and its options
WRITERS = {
    ".nc": ("netcdf4", {"format": "NETCDF4"}),
    ".h5": ("netcdf4", {"format": "NETCDF4"}),
    "_classic.nc": ("scipy", {"format": "NETCDF3_64BIT"}),
    "2.zarr": ("zarr", {"zarr_format": 2}),
    "3.zarr": ("zarr", {"zarr_format": 3}),
}


def write(path, attributes, values, suffix):
    """Write stored values with attributes, as they are, by xarray."""
    path, (engine, options) = path / f"it{suffix}", WRITERS[suffix]
    variable = xr.Variable(("sample", "x"), values, attributes)
    dataset = xr.Dataset({"v": variable, "n": ("sample", np.arange(len(values), dtype="i4"))})
    with warnings.catch_warnings(action="ignore"):
        if engine == "zarr":
            dataset.to_zarr(path, consolidated=False, **options)
        else:
            dataset.to_netcdf(path, engine=engine, **options)
    return path


def oracle(path, suffix, **options):
    """Return what xarray makes of the values, times as numbers."""
    engine, _ = WRITERS[suffix]
    options |= {"consolidated": False} if engine == "zarr" else {}
    times = {"decode_times": False, "decode_timedelta": False}
    with warnings.catch_warnings(action="ignore"), xr.open_dataset(path, engine=engine, **times, **options) as dataset:
        return np.asarray(dataset["v"].values)


INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "int64")
FACTORS = st.sampled_from([0.01, 0.866, 1e-3, 276.5, 76706.0])


@pytest.mark.quick(3)
@pytest.mark.parametrize("suffix", WRITERS)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_packed_values_are_those_that_xarray_gives(suffix, data, tmp_path_factory):
    classic = suffix == "_classic.nc"
    kinds = ["int8", "int16", "int32", "float32", "float64"] if classic else [*INTEGERS, "float32", "float64"]
    dtype = np.dtype(data.draw(st.sampled_from(kinds)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    low, high = (0, 100) if dtype.kind == "u" else (-100, 100)
    values = rng.integers(low, high, (ROWS, 3)).astype(dtype)
    attributes = {}
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
@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("fill", [{}, {"_FillValue": np.float32(np.nan)}])
def test_scaled_float32_is_computed_in_the_precision_that_xarray_computes_in(suffix, kind, fill, tmp_path):
    values = np.random.default_rng(0).integers(-100, 100, (ROWS, 3)).astype(np.float32)
    path = write(tmp_path, {"scale_factor": kind(0.01), "add_offset": kind(0.866), **fill}, values, suffix)
    expected, found = oracle(path, suffix), read(opened(path, "v,n"))["v"]
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("suffix", WRITERS)
def test_raw_keeps_what_is_stored_and_the_schema_says_what_was_decoded(suffix, tmp_path, capsys):
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
    command = ["convert", path, tmp_path / "no", "--fields", "v", "--dry-run"]
    shown = run(capsys, *command)[1]
    assert "float64[3]  lz4   " in shown and "(int16 * 0.25 + 280.0, NaN for 7)" in shown
    status, shown, _ = run(capsys, *command, "--raw")
    assert status == 0 and "NaN" not in shown


def test_files_that_are_packed_in_different_ways_are_one_dataset_unless_raw(tmp_path):
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        attributes = {"scale_factor": 0.5 + number, "add_offset": 1.0, "_FillValue": np.int16(3 + number)}
        write(folder, attributes, np.arange(ROWS * 3, dtype="i2").reshape(ROWS, 3), ".nc")
        (folder / "it.nc").rename(tmp_path / f"{number}.nc")
    expected = np.concatenate([oracle(tmp_path / f"{number}.nc", ".nc") for number in range(2)])
    assert np.array_equal(read(opened(tmp_path))["v"], expected, equal_nan=True)
    with pytest.raises(SourceError, match=r"'v' of .*0\.nc and .*1\.nc is packed in different ways; leave raw=True"):
        opened(tmp_path, raw=True)


def test_bools_that_xarray_wrote_to_netcdf_are_bools(tmp_path):
    flags = np.arange(ROWS) % 3 == 0
    xr.Dataset({"v": ("sample", flags)}).to_netcdf(tmp_path / "it.nc", engine="netcdf4")
    assert str(opened(tmp_path).fields["v"]) == "bool"
    assert np.array_equal(read(opened(tmp_path))["v"], flags)


def test_times_are_numbers_in_the_unit_that_the_notes_have(tmp_path):
    times = np.datetime64("2020-01-01T00", "h") + np.arange(ROWS)
    xr.Dataset({"v": ("sample", times.astype("datetime64[ns]"))}).to_netcdf(tmp_path / "it.nc", engine="netcdf4")
    source = opened(tmp_path)
    assert np.array_equal(read(source)["v"], np.arange(ROWS))
    assert source.notes["attributes"]["v"]["units"].startswith("hours since 2020-01-01")
    assert source.notes["attributes"]["v"]["calendar"] == "proleptic_gregorian"


def test_a_whole_number_that_decoding_would_round_is_a_bad_sample(tmp_path):
    values = np.arange(ROWS * 3).reshape(ROWS, 3)
    values[5, 1] = 2**53 + 1
    path = write(tmp_path, {"_FillValue": np.int64(4)}, values, ".nc")
    with pytest.raises(SourceError, match=r"row 5 of .*it\.nc: its field 'v' holds .* keep it with raw=True"):
        read(opened(path))
    assert np.array_equal(read(opened(path, raw=True))["v"], values)


@pytest.mark.parametrize("factor", [[0.1, 0.2], "0.1"])
def test_a_scale_that_is_not_a_number_is_refused(factor, tmp_path):
    path = write(tmp_path, {"scale_factor": factor}, np.ones((ROWS, 3), "i2"), ".nc")
    assert_error(StreamloaderError, r"'v' has the scale_factor '0\.1.*', which is not one number; .*--raw", path)


def test_a_fill_value_that_is_not_a_number_is_refused(tmp_path):
    path = write(tmp_path, {"missing_value": "none"}, np.ones((ROWS, 3), "i2"), ".nc")
    assert_error(StreamloaderError, r"'v' has the missing_value 'none', which is not one number; .*--raw", path)


def test_attributes_of_an_hdf5_that_no_netcdf_library_wrote_change_nothing(tmp_path):
    with h5py.File(tmp_path / "it.h5", "w") as file:
        file["v"] = np.arange(5, dtype="i2")
        file["v"].attrs["scale_factor"] = 0.5
    assert str(opened(tmp_path).fields["v"]) == "int16"
    assert opened(tmp_path).notes["attributes"]["v"] == {"scale_factor": "0.5"}


# --- tables of Arrow: lists of one length, nulls, times


@pytest.fixture(params=["parquet", "file", "stream"])
def written(request, tmp_path):
    """Write columns as a table in one of the formats; return its folder."""

    def make(**columns):
        folder = tmp_path / "src"
        folder.mkdir(exist_ok=True)
        table = pa.table(columns)
        write_table(folder, table, request.param, max(1, len(table) // 7))
        return folder

    return make


def test_lists_of_one_length_become_tensors(written, tmp_path):
    count = 1000
    rng = np.random.default_rng(0)
    flat = rng.integers(0, 100, (count, 3))
    inner = pa.array([[[1.0, 2.0], [3.0, float(i)]] for i in range(count)], pa.list_(pa.list_(pa.float32(), 2)))
    large = pa.array([[True] * 4] * count, pa.large_list(pa.bool_()))
    empty = pa.array([[]] * count, pa.list_(pa.int8()))
    uneven = [[1] * (1 + i % 2) for i in range(count)]
    src = written(x=flat.tolist(), i=inner, l=large, r=uneven, e=empty, n=range(count))
    sl.convert(src, tmp_path / "out", fields="x,i,l,r,n", workers=0)
    ds = sl.open(tmp_path / "out")
    assert kinds_of(ds) == {"x": "int64[3]", "i": "float32[2,2]", "l": "bool[4]", "n": "int64", "r": "ragged:int64"}
    assert np.array_equal(ds.read("x", 0, count), flat)
    assert ds.read("i", 0, count)[:, 1, 1].tolist() == list(range(count))
    source = opened(src, "x=ragged:int64,i=ragged:float32[2],l,e")
    assert [*kinds_of(source).values()] == ["ragged:int64", "ragged:float32[2]", "bool[4]", "ragged:int8"]


@pytest.mark.parametrize("late", [[1, 2], [1, 2, 3, 4], []])
def test_a_list_of_another_length_is_a_bad_sample(late, written):
    lists = [[i, 2, 3] for i in range(1000)]
    lists[135] = late
    source = opened(written(x=lists))
    assert str(source.fields["x"]) == "int64[3]"
    bad = []
    found = source.fragment(np.arange(1000))(bad.append)["x"]
    assert np.array_equal(found, lists[:135] + lists[136:])
    assert [one.position for one in bad] == [135]
    assert bad[0].problem == "the column 'x' is not a list of the shape [3]"
    assert "ragged:int64, with fields=" in bad[0].remedy


def test_a_shorter_last_list_keeps_lists_ragged(written):
    for last in ([1], []):
        source = opened(written(x=[[1, 2, 3]] * 1000 + [last]))
        assert str(source.fields["x"]) == "ragged:int64"
        assert source.fragment(np.array([1000]))(raise_bad)["x"] == [np.array(last, "<i8").tobytes()]


NESTED = pa.array([[[1], None], None, [[2], [None]]], pa.list_(pa.list_(pa.int8(), 1), 2))
NULLS = {
    "int": (pa.array([1, None, 3], pa.int8()), "", -1, [1, -1, 3]),
    "float": (pa.array([0.5, None], pa.float32()), "", "nan", [0.5, float("nan")]),
    "bool": (pa.array([True, None]), "", False, [True, False]),
    "text": (pa.array(["a", None, ""]), "", "none", ["a", "none", ""]),
    "bytes": (pa.array([b"a", None]), "", "", [b"a", b""]),
    "dictionary": (pa.array(["a", None]).dictionary_encode(), "", "b", ["a", "b"]),
    "view": (pa.array(["a", None], pa.string_view()), "", "b", ["a", "b"]),
    "int as float": (pa.array([1, None]), "float32", "nan", [1.0, float("nan")]),
    "int as int": (pa.array([1, None], pa.int64()), "int8", 7, [1, 7]),
    "time": (pa.array([1, None], pa.timestamp("ms")), "int64", -1, [1, -1]),
    "list": (pa.array([[1], None, [2, 3]]), "", 0, [[1], [], [2, 3]]),
    "in a list": (pa.array([[1], [None, 5], [2, 7, 3]]), "", 0, [[1], [0, 5], [2, 7, 3]]),
    "list of one length": (pa.array([[1, 2], [4, None], [6, 3]]), "", 9, [[1, 2], [4, 9], [6, 3]]),
    "null list as tensor": (pa.array([[1, 2], None, [None, 3]]), "int64[2]", 9, [[1, 2], [9, 9], [9, 3]]),
    "fixed list": (pa.array([[1, 2], None, [None, 3]], pa.list_(pa.int8(), 2)), "", 9, [[1, 2], [9, 9], [9, 3]]),
    "list in a list": (NESTED, "", 4, [[[1], [4]], [[4], [4]], [[2], [4]]]),
}


@pytest.mark.quick(18)
@pytest.mark.parametrize("case", NULLS)
def test_nulls_are_refused_or_filled(case, written, tmp_path):
    array, kind, fill, expected = NULLS[case]
    src = written(x=array, y=list(range(len(array))))
    fields = f"y,x={kind}" if kind else "y,x"
    with pytest.raises(SourceError, match=r"row [01]: the column 'x' (is|holds a) null; .*--fill NAME=VALUE"):
        read(opened(src, fields))
    sl.convert(src, tmp_path / "out", fields=fields, fill={"x": fill}, workers=0)
    ds = sl.open(tmp_path / "out")
    values = [ds[i]["x"] for i in range(len(ds))]
    assert str([one if isinstance(one, bytes) else plain(one) for one in values]) == str(expected)
    assert ds.manifest.provenance["fill"] == {"x": str(fill)}
    if kind:
        assert str(ds.fields["x"]) == kind


UNFIT = [
    (pa.array([1, None]), None, {"x": "nan"}, "'nan' of the field 'x' is not a value of int64"),
    (pa.array(["a", None]), None, {"x": 5}, "5 of the field 'x' is not text"),
    (pa.array([2**53 + 1, None]), "x=float64", {"x": "nan"}, "row 0: .* does not hold exactly"),
    (pa.array([2**24, None, 2**24 + 1]), "x=float32", {"x": "nan"}, "row 2: .* that float32 does not hold exactly"),
]


@pytest.mark.parametrize(("array", "fields", "fill", "message"), UNFIT)
def test_a_fill_value_that_its_column_does_not_hold_is_refused(array, fields, fill, message, written):
    with pytest.raises(StreamloaderError, match=message):
        read(opened(written(x=array), fields, fill=fill))


MOMENT = datetime(2024, 2, 29, 12, 30)
TIMES = {
    "us": (pa.array([MOMENT], pa.timestamp("us")), "microseconds since 1970-01-01 00:00, without a time zone"),
    "ns": (pa.array([MOMENT], pa.timestamp("ns", "Europe/Berlin")), "nanoseconds since 1970-01-01 00:00 UTC"),
    "date": (pa.array([MOMENT.date()]), "days since 1970-01-01"),
    "ms": (pa.array([MOMENT.date()], pa.date64()), "milliseconds since 1970-01-01"),
    "time": (pa.array([time(1, 2, 3)], pa.time32("s")), "seconds since midnight"),
    "time64": (pa.array([time(1, 2, 3)], pa.time64("us")), "microseconds since midnight"),
    "duration": (pa.array([timedelta(hours=2)], pa.duration("s")), "seconds"),
}


def later(sample):
    return {"x": sample["x"], "later": sample["when"] + 1}


@pytest.mark.parametrize("case", TIMES)
def test_times_are_an_error_unless_they_are_selected_as_whole_numbers_or_mapped(case, tmp_path, capsys):
    array, unit = TIMES[case]
    (tmp_path / "src").mkdir()
    src = write_table(tmp_path / "src", pa.table({"when": array, "x": [1]}), "file")
    assert_error(FieldError, r"'when' \(.*\) of .*; store times as .*fields=.x,when=int64", src)
    sl.convert(src, tmp_path / "out", fields="x,when=int64", workers=0)
    sl.convert(src, tmp_path / "mapped", map=later, workers=0)
    ds, mapped = sl.open(tmp_path / "out"), sl.open(tmp_path / "mapped")
    count = array.view(pa.int64() if array.type.bit_width == 64 else pa.int32())[0].as_py()
    assert (ds[0]["when"], str(ds.fields["when"]), mapped[0]["later"]) == (count, "int64", count + 1)
    assert ds.manifest.provenance["units"] == mapped.manifest.provenance["units"] == {"when": unit}
    assert f"({unit})" in run(capsys, "convert", src, tmp_path / "no", "--fields", "x,when=int64", "--dry-run")[1]
    if case == "us":
        assert count == int((MOMENT - datetime(1970, 1, 1)).total_seconds() * 1_000_000)
    if case == "date":
        assert count == (MOMENT.date() - date(1970, 1, 1)).days


def test_files_whose_times_have_different_units_are_refused(tmp_path):
    for unit in ("ms", "us"):
        pq.write_table(pa.table({"when": pa.array([MOMENT], pa.timestamp(unit))}), tmp_path / f"{unit}.parquet")
    pattern = r"'when' is timestamp\[us\] in .*us\.parquet, timestamp\[ms\] in"
    assert_error(SourceError, pattern, tmp_path, "when=int64")


def test_lists_of_times_are_numbers_too(written):
    src = written(when=pa.array([[1, 2], [3, 4]], pa.list_(pa.timestamp("ms"))))
    assert read(opened(src, "when=int64[2]"))["when"].tolist() == [[1, 2], [3, 4]]
    assert str(opened(src, "when=ragged:int64").fields["when"]) == "ragged:int64"


def test_an_append_and_a_comparison_read_their_source_as_the_dataset_was_made(tmp_path):
    values = np.arange(-60, 60, dtype="i2").reshape(ROWS, 3)
    packed = write(tmp_path, {"scale_factor": 0.25, "_FillValue": np.int16(7)}, values, ".nc")
    filled = tmp_path / "it.parquet"
    pq.write_table(pa.table({"x": [1, None, 3]}), filled)
    for number, (src, options) in enumerate([(packed, {}), (packed, {"raw": True}), (filled, {"fill": {"x": 0}})]):
        out = tmp_path / f"out{number}"
        sl.convert(src, out, workers=0, **options)
        before = len(sl.open(out))
        assert sl.verify(str(out), against=src).problems == ()
        sl.append(out, src, workers=0)
        ds = sl.open(out)
        assert len(ds) == 2 * before
        for name in ds.fields:
            assert ds.read(name, 0, before).tobytes() == ds.read(name, before, 2 * before).tobytes()


# --- masked arrays: a masked float is NaN, any other masked value is missing

MASKED = np.ma.array([[1, 2], [3, 4], [5, 6]], mask=[[0, 0], [0, 1], [1, 1]])


def both_ways(column):
    """Return the column of a field, as one of a dict and as samples."""
    return {"x": column}, [{"x": column[row]} for row in range(len(column))]


@pytest.mark.parametrize("column", [MASKED.astype(float), MASKED[:, 1].astype("f4")], ids=["rows", "numbers"])
def test_masked_floats_are_nan_and_filled_if_asked(column, tmp_path):
    for number, samples in enumerate(both_ways(column)):
        for fill, missing in (({}, np.nan), ({"x": -1}, -1)):
            out = tmp_path / f"{number}{missing}"
            sl.convert(samples, out, workers=0, fill=fill)
            expected = column.filled(missing)
            assert np.array_equal(sl.open(out).read("x", 0, 3), expected, equal_nan=True)


@pytest.mark.parametrize("column", [MASKED, MASKED[:, 1], MASKED > 2], ids=["rows", "numbers", "bools"])
def test_other_masked_values_are_bad_samples_unless_filled(column, tmp_path):
    for number, samples in enumerate(both_ways(column)):
        with pytest.raises(SourceError, match=r"are masked|is missing"):
            sl.convert(samples, tmp_path / "out", workers=0)
        assert sl.convert(samples, tmp_path / f"skip{number}", workers=0, on_error="skip").num_left_out == 2
        fill = {"x": column.dtype.type(9)}
        sl.convert(samples, tmp_path / f"fill{number}", workers=0, fill=fill)
        assert np.array_equal(sl.open(tmp_path / f"fill{number}").read("x", 0, 3), column.filled(fill["x"]))


def test_a_masked_value_of_an_iterable_or_a_map_is_no_number(tmp_path):
    with pytest.raises(SourceError, match=r"field 'x' .* is not an array: elements of int64 are masked"):
        sl.convert(iter([{"x": row} for row in MASKED]), tmp_path / "out")
    columns = {"n": np.arange(3)}
    for batch, function in {None: lambda s: {"x": MASKED[s["n"]]}, 3: lambda b: {"x": MASKED[b["n"]]}}.items():
        with pytest.raises(SourceError, match=r"row 1 of the source: field 'x' .* elements of int64 are masked"):
            sl.convert(columns, tmp_path / "out", map=function, map_batch=batch, workers=0)


def test_masked_texts_are_missing(tmp_path):
    texts = np.ma.array(["a", "b"], mask=[0, 1])
    sl.convert({"t": texts}, tmp_path / "out", workers=0, fill={"t": "none"})
    assert sl.open(tmp_path / "out").read("t", 0, 2) == ["a", "none"]
    with pytest.raises(SourceError, match=r"'t' of sample .* is missing"):
        sl.convert({"t": texts}, tmp_path / "again", workers=0)


def test_lists_of_masked_arrays_keep_their_masks(tmp_path):
    sl.convert([{"x": [MASKED[0].astype(float), MASKED[1].astype(float)]}], tmp_path / "out", workers=0)
    assert np.array_equal(sl.open(tmp_path / "out")[0]["x"], [[1, 2], [3, np.nan]], equal_nan=True)
    with pytest.raises(FieldError, match="elements of int64 are masked"):
        sl.convert([{"x": [MASKED[0], MASKED[1]]}], tmp_path / "again", workers=0)
