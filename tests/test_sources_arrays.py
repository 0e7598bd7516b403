"""HDF5, netCDF, Zarr and token files as sources: what their formats say, any rows, any store, and every bad input."""

import json
import pickle
import shutil
import struct
from itertools import combinations
from pathlib import Path

import h5py
import netCDF4
import numcodecs
import numpy as np
import pytest
import xarray as xr
import zarr
from amounts import examples
from datasets import within
from format_data import Counting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import netcdf_file
from sources import FORMATS, TOKENS, assert_error, assert_refused, opened, read

import streamloader as sl
from streamloader.conversion.sources import ranged_io
from streamloader.conversion.sources.fields import parse_selection
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.hdf5 import BLOCK_BYTES, BlockFile
from streamloader.errors import FormatError, SourceChangedError, SourceError, UsageError
from streamloader.storage import open_store
from streamloader.storage.objects import ObjectInfo


def test_the_notes_have_the_meaning_of_values_and_what_is_left_out():
    classic, store = opened(FORMATS / "netcdf/input/classic.nc"), opened(FORMATS / "zarr/input/xarray2.zarr")
    for source in (classic, opened(FORMATS / "netcdf/input/netcdf4.nc"), store):
        assert source.notes["dimension"] == "time"
        assert source.notes["passed_over"] == ["height", "lat", "lon"]
        assert source.notes["attributes"]["t2m"] == {"units": "K"}
        assert source.notes["decoded"] == {"t2m": "int16 * 0.5 + 280.0"}
    assert classic.notes["attributes"]["time"]["units"] == "hours since 2020-01-01"
    tokens = opened(FORMATS / "tokens/input/plain", TOKENS)
    assert dict(tokens.notes) == {"passed_over_values": 3}
    assert opened(FORMATS / "tokens/input/header", TOKENS).notes == {"passed_over_values": 4, "headers": 1}
    assert opened(FORMATS / "zarr/input/v3.zarr").notes["passed_over"] == ["more"]


# HDF5


def h5(path, **arrays):
    """Write a file; a dict holds the arguments of `create_dataset`."""
    with h5py.File(path, "w") as file:
        for name, value in arrays.items():
            if isinstance(value, dict):
                file.create_dataset(name, **value)
            else:
                file[name] = value
    return path


def it(**arrays):
    return lambda root: h5(root / "it.h5", **arrays)


def test_one_dataset_of_a_file_is_one_field(tmp_path):
    path = h5(tmp_path / "it.h5", **{"g/Weights-1": np.arange(6).reshape(3, 2), "g/other": np.zeros(5)})
    source = opened(f"{path}::/g/Weights-1")
    assert {name: str(kind) for name, kind in source.fields.items()} == {"weights_1": "int64[2]"}
    assert read(source, [0, 2])["weights_1"].tolist() == [[0, 1], [4, 5]]


LAYOUTS = [
    {},
    {"chunks": (3, 5)},
    {"chunks": (7, 2), "compression": "gzip", "shuffle": True},
    {"chunks": (100, 5), "compression": "lzf"},
    {"maxshape": (None, 5), "chunks": (1, 5)},
]


@given(
    dtype=st.sampled_from(["i1", "<i2", ">i2", "<u4", ">u8", "<f2", ">f4", "<f8", "bool"]),
    layout=st.sampled_from(LAYOUTS),
    rows=st.sets(st.integers(0, 99), min_size=1),
    userblock=st.sampled_from([0, 512]),
)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hdf5_rows_are_what_h5py_reads(tmp_path, dtype, layout, rows, userblock):
    values = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 100, (100, 5)).astype(dtype)
    with h5py.File(tmp_path / "it.h5", "w", userblock_size=userblock) as file:
        file.create_dataset("x", data=values, **layout)
    chosen = sorted(rows)
    found = read(opened(tmp_path / "it.h5"), chosen)["x"]
    assert found.dtype == np.dtype(dtype).newbyteorder("<")
    assert (found == values[chosen]).all()


def test_numbers_of_one_byte_and_variable_length_may_be_encoded_images(tmp_path):
    with h5py.File(tmp_path / "it.h5", "w") as file:
        images = file.create_dataset("image", (300,), h5py.vlen_dtype(np.uint8), chunks=(16,))
        for n in range(300):
            images[n] = np.frombuffer(b"\xff\xd8\xff" + bytes([n % 256]) * n, np.uint8)
    source = opened(tmp_path / "it.h5", "image=bytes:jpeg")
    assert str(source.fields["image"]) == "bytes:jpeg"
    assert read(source, [0, 7, 8, 299])["image"] == [b"\xff\xd8\xff" + bytes([n % 256]) * n for n in (0, 7, 8, 299)]
    assert str(opened(tmp_path / "it.h5").fields["image"]) == "ragged:uint8"


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i2", ">u8", "<f4", ">f8"])
def test_arrays_of_variable_length_have_the_written_values_in_any_byte_order(dtype, tmp_path):
    rows = [np.arange(n).astype(dtype) for n in range(4)]
    with h5py.File(tmp_path / "it.h5", "w") as file:
        dataset = file.create_dataset("x", (5,), h5py.vlen_dtype(np.dtype(dtype)))
        for n, row in enumerate(rows):  # the last one is never written
            dataset[n] = row
    source = opened(tmp_path / "it.h5")
    assert str(source.fields["x"]) == f"ragged:{np.dtype(dtype).name}"
    little = np.dtype(dtype).newbyteorder("<")
    assert read(source)["x"] == [row.astype(little).tobytes() for row in (*rows, rows[0])]


def test_enumerations_and_what_was_never_written_read_as_hdf5_says(tmp_path):
    with h5py.File(tmp_path / "it.h5", "w") as file:
        file["kind"] = np.array([3, 0, 5], h5py.enum_dtype({"a": 0, "b": 3, "c": 5}, "i1"))
        file.create_dataset("blank", (3, 2), "i4", chunks=(1, 2), fillvalue=7)
        file.create_dataset("late", (3,), "i4")
        narrow = h5py.h5t.STD_I16LE.copy()
        narrow.set_precision(12)
        made = h5py.h5d.create(file.id, b"narrow", narrow, h5py.h5s.create_simple((3,)))
        h5py.Dataset(made)[:] = [1, -2, 3]
    found = read(opened(tmp_path / "it.h5"))
    expected = {"kind": [3, 0, 5], "blank": [[7, 7]] * 3, "late": [0, 0, 0], "narrow": [1, -2, 3]}
    assert {name: column.tolist() for name, column in found.items()} == expected


def test_a_text_that_is_not_utf8_is_one_bad_sample(tmp_path):
    texts = np.array([b"a", b"\xff\xfe", b"c", b"\xe4"], "S4")
    for number, rows in enumerate((texts[:2], texts[2:])):
        h5(tmp_path / f"{number}.h5", name=rows, x=np.arange(2) + 2 * number, v=[f"v{number}"] * 2)
    bad = []
    found = read(opened(tmp_path), on_bad=bad.append)
    assert found["name"] == [b"a", b"c"]
    assert found["x"].tolist() == [0, 2]
    assert found["v"] == [b"v0", b"v1"]
    assert [one.position for one in bad] == [1, 3]
    assert bad[1].name == f"row 1 of {tmp_path}/1.h5"
    assert "field 'name' is not UTF-8 text" in bad[1].problem
    assert sl.convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", on_error="skip", workers=0).num_samples == 2


def linked(root):
    h5(root / "elsewhere", **{"x": np.zeros(3), "g/x": np.zeros(3)})
    h5(root / "it.h5", x=np.zeros(3), other=h5py.ExternalLink(str(root / "elsewhere"), "/x"))


def outside(root):
    (root / "secret").write_bytes(b"keep me secret")
    h5(root / "it.h5", raw={"shape": (10,), "dtype": "u1", "external": [(str(root / "secret"), 0, 10)]})


def virtual(root):
    h5(root / "elsewhere", x=np.zeros(3))
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(root / "elsewhere"), "x", (3,))
    with h5py.File(root / "it.h5", "w") as file:
        file.create_virtual_dataset("vds", layout)


def unknown_filter(root):
    with h5py.File(root / "it.h5", "w") as file:
        made = file.create_dataset("x", (4,), "i4", chunks=(4,), compression=305, allow_unknown_filter=True)
        made.id.write_direct_chunk((0,), b"0123")


def chunked(shape, chunks):
    return it(x={"shape": shape, "dtype": "u1", "chunks": chunks})


def two_files(**second):
    def make(root):
        h5(root / "a.h5", x=np.zeros((3, 2), "f4"))
        h5(root / "b.h5", **second)

    return make


def cut(make, to):
    def cut_file(root):
        make(root)
        path = next(root.glob("it.*"))
        path.write_bytes(path.read_bytes()[:to])

    return cut_file


BAD_H5 = {
    "complex": (it(z=np.zeros(3, complex)), "it.h5::/z holds values of complex128"),
    "compound": (it(c=np.zeros(3, [("a", int)])), "it.h5::/c holds compound values"),
    "opaque": (it(o=np.array([b"abc"], "V3")), r"it.h5::/o holds values of \|V3"),
    "references": (it(r={"shape": (3,), "dtype": h5py.ref_dtype}), "it.h5::/r holds references"),
    "long double": (it(l=np.zeros(3, np.longdouble)), "it.h5::/l: dtype 'float128'"),
    "single value": (it(one=np.float32(1)), "it.h5::/one is a single value"),
    "empty": (it(null=h5py.Empty("f4")), "it.h5::/null is empty"),
    "empty axis": (it(x=np.zeros((3, 0))), "it.h5::/x: shape .* has an empty axis"),
    "texts": (it(t={"data": [["a", "b"]] * 2, "dtype": h5py.string_dtype()}), r"it.h5::/t holds texts in .* \(2, 2\)"),
    "unequal": (it(a=np.zeros(3), b=np.zeros(4)), "'/a' has 3 rows, '/b' 4.*fields="),
    "external link": (linked, "'other' of .*it.h5 is a link to .*elsewhere::/x; links are not followed"),
    "soft link": (it(x=np.zeros(3), alias=h5py.SoftLink("/x")), "'alias' of .*it.h5 is a link to /x"),
    "values in another file": (outside, "it.h5::/raw is stored in other files"),
    "virtual dataset": (virtual, "it.h5::/vds is stored in other files"),
    "filter": (unknown_filter, "it.h5::/x is packed with the HDF5 filter 305, which is not installed"),
    "absurd": (chunked((2**60,), (1024,)), "it.h5::/x claims 1152921504606846976 bytes"),
    "large chunks": (chunked((2, 3 << 29), (1, 3 << 29)), "it.h5::/x has chunks of 1610612736 bytes"),
    "wide rows": (chunked((1, 3 << 30), (1, 1 << 20)), "it.h5::/x has rows of 3221225472 bytes"),
    "groups only": (it(**{"g/x": np.zeros(3)}), "it.h5 holds no dataset, but the groups g; .*::/group"),
    "nothing in it": (it(), "it.h5 holds no dataset"),
    "two names, one field": (it(**{"A b": np.zeros(3), "a-b": np.zeros(3)}), "both make the field 'a_b'"),
    "files differ in type": (two_files(x=np.zeros((3, 2))), r"b.h5 holds x=float64\[2\], .*a.h5 x=float32\[2\]"),
    "files differ in fields": (two_files(y=np.zeros(3)), "b.h5 holds y=float64, .*a.h5 x=float32"),
    "no HDF5": (lambda root: (root / "it.h5").write_bytes(b"no"), "it.h5 is not an HDF5 file, or damaged"),
    "no bytes": (lambda root: (root / "it.h5").write_bytes(b""), "it.h5 is not an HDF5 file, or damaged"),
    "truncated": (cut(it(x=np.zeros(5000)), 9000), "it.h5 is not an HDF5 file, or damaged: .*truncated"),
}


@pytest.mark.parametrize("case", BAD_H5)
def test_hdf5_that_cannot_be_converted_is_named_when_it_is_opened(case, tmp_path):
    assert_refused(BAD_H5[case], tmp_path, name="" if case.startswith("files differ") else "it.h5")


def test_a_dataset_that_is_not_selected_may_be_anything(tmp_path):
    for case in ("external link", "soft link", "filter", "absurd"):
        BAD_H5[case][0](tmp_path)
        with h5py.File(tmp_path / "it.h5", "a") as file:
            file["y"] = np.arange(3)
            file["z"] = np.zeros(7, complex)
        assert read(opened(tmp_path / "it.h5", "y"))["y"].tolist() == [0, 1, 2]


def test_a_path_in_a_file_that_is_not_there_or_a_link_is_named(tmp_path):
    path = h5(tmp_path / "it.h5", **{"g/x": np.zeros(3)})
    assert_error(SourceError, r"it.h5 has no /g/y; its /g holds x", f"{path}::/g/y")
    assert_error(SourceError, r"has no /g/x/y; its /g/x holds nothing", f"{path}::/g/x/y")
    linked(tmp_path)
    h5(path, g=h5py.ExternalLink(str(tmp_path / "elsewhere"), "/g"))
    assert_error(SourceError, r"'g' of .*is a link to .*elsewhere::/g", f"{path}::/g/x")


def test_damaged_chunks_are_named_with_their_dataset(tmp_path):
    values = np.random.default_rng(0).integers(0, 99, 5000)
    h5(tmp_path / "it.h5", packed={"data": values, "chunks": (500,), "compression": "gzip"})
    with h5py.File(tmp_path / "it.h5") as file:
        where = file["packed"].id.get_chunk_info(3)
    data = bytearray((tmp_path / "it.h5").read_bytes())
    data[where.byte_offset : where.byte_offset + where.size] = bytes(where.size)
    (tmp_path / "it.h5").write_bytes(data)
    source = opened(tmp_path / "it.h5")
    assert (read(source, range(1500))["packed"] == values[:1500]).all()
    assert_error(SourceError, r"it.h5::/packed cannot be read", source, [1600])


def test_a_file_that_changes_after_it_was_listed_is_named(tmp_path):
    path = h5(tmp_path / "it.h5", x=np.zeros(1000))
    source = opened(path)
    path.write_bytes(path.read_bytes()[:4000])
    assert_error(SourceChangedError, r"it\.h5 ends at byte 4000", source)
    source = opened(h5(path, x={"data": np.zeros(10), "chunks": (5,)}))
    h5(path, x={"data": np.zeros(9), "chunks": (5,)}, pad=np.zeros(1000))
    assert_error((SourceChangedError, SourceError), r"it.h5", source)


@pytest.mark.long
def test_reading_few_rows_of_a_large_file_takes_little_memory(tmp_path):
    with h5py.File(tmp_path / "it.h5", "w") as file:
        file.create_dataset("flat", (400_000, 250), "f4")[::1000] = 1  # 400 MB, mostly a hole
        file.create_dataset("cut", (400_000, 25), "f4", chunks=(1000, 25), compression="lzf")[::1000] = 1
    source = opened(tmp_path / "it.h5")
    with within(64 << 20):
        found = read(source, range(0, 400_000, 1000))
    assert all((column == 1).all() for column in found.values())


def test_blocks_are_read_once_and_ahead_where_they_follow_each_other(tmp_path):
    data = np.random.default_rng(0).bytes(20 * BLOCK_BYTES + 17)
    (tmp_path / "it").write_bytes(data)
    store = Counting(open_store(tmp_path))
    file = BlockFile(store, ObjectInfo("it", len(data)))
    assert store.reads == [("it", 0, BLOCK_BYTES)]
    assert file.read(100) == data[:100]
    assert len(store.reads) == 1
    file.seek(BLOCK_BYTES - 50)
    assert file.read(100) == data[BLOCK_BYTES - 50 : BLOCK_BYTES + 50]
    assert len(store.reads) == 1 + ranged_io.READ_THREADS
    file.seek(3 * BLOCK_BYTES + 5)
    assert file.read(4 * BLOCK_BYTES) == data[3 * BLOCK_BYTES + 5 : 7 * BLOCK_BYTES + 5]
    assert store.reads[-1] == ("it", 3 * BLOCK_BYTES + 5, 7 * BLOCK_BYTES + 5)
    file.seek(len(data) - 7)
    assert file.read(100) == data[-7:]
    assert file.read(1) == b""
    file.seek(len(data) + 9)
    assert file.read(1) == b""
    with pytest.raises(OSError, match="byte -1"):
        file.seek(-1)


@given(data=st.data(), size=st.integers(1, 300), gap=st.integers(0, 400))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_at_any_bytes_are_read_into_place_by_every_plane(tmp_path, monkeypatch, data, size, gap):
    monkeypatch.setattr(ranged_io, "GAP_BYTES", gap)
    monkeypatch.setattr(ranged_io, "REQUEST_BYTES", 256)
    content = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    (tmp_path / "it").write_bytes(content.tobytes())
    starts = np.array(sorted(data.draw(st.sets(st.integers(0, 5000 // size - 1)))), np.int64) * size
    starts += data.draw(st.integers(0, 5000 % size))
    wanted = [content[start : start + size].tolist() for start in starts.tolist()]
    for store in (open_store(tmp_path), Counting(open_store(tmp_path))):
        out = np.zeros((len(starts), size), np.uint8)
        ranged_io.read_rows(store, "it", starts, out)
        assert out.tolist() == wanted


# netCDF


@given(
    rows=st.sets(st.integers(0, 8)),
    variables=st.lists(
        st.tuples(st.sampled_from(["i1", ">i2", ">i4", ">f4", ">f8", "S1"]), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    version=st.sampled_from([1, 2]),
    selected=st.booleans(),
)
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_classic_files_read_as_scipy_wrote_them(tmp_path, rows, variables, version, selected):
    rng = np.random.default_rng(0)
    written = {}
    with netcdf_file(tmp_path / "it.nc", "w", version=version) as file:
        for name, length in (("time", None), ("step", 9), ("y", 3), ("x", 5)):
            file.createDimension(name, length)
        for number, (dtype, axes, record) in enumerate(variables):
            behind = 1 if dtype == "S1" and axes else axes
            shape = (9, *(3, 5)[:behind])
            values = rng.integers(97, 120, shape).astype("u1").view("S1") if dtype == "S1" else None
            values = rng.integers(-9, 99, shape).astype(dtype) if values is None else values
            dims = ("time" if record else "step", *("y", "x")[:behind])
            made = file.createVariable(f"v{number}", np.dtype(dtype), dims)
            made[:] = values
            made.units = "K"
            written[f"v{number}"] = (record, values)
    kinds = [record for record, _ in written.values()]
    if not selected and 2 * sum(kinds) == len(kinds):  # the unlimited dimension wins
        kinds = [True] * len(kinds)
    chosen = kinds[0] if selected else 2 * sum(kinds) >= len(kinds)
    kept = {name: values for name, (record, values) in written.items() if record == chosen}
    found = read(opened(tmp_path / "it.nc", ",".join(kept) if selected else None), sorted(rows))
    assert found.keys() == kept.keys()
    for name, values in kept.items():
        picked = values[sorted(rows)]
        if values.dtype.kind == "S":
            assert found[name] == [row.tobytes() for row in picked]
        else:
            assert found[name].tolist() == picked.tolist()


def nc(path, variables, **how):
    xr.Dataset(variables).to_netcdf(path, **how)


TIE = {"a": (("t",), np.zeros(3)), "b": (("u",), np.zeros(4))}


@pytest.mark.parametrize("how", [{"format": "NETCDF3_CLASSIC", "engine": "scipy"}, {"engine": "netcdf4"}])
def test_where_two_dimensions_are_as_frequent_the_unlimited_one_or_the_user_decides(how, tmp_path):
    nc(tmp_path / "it.nc", TIE, **how)
    assert_error(SourceError, r"as many variables of .*it.nc have 't' as have 'u'.*fields=", tmp_path / "it.nc")
    assert opened(tmp_path / "it.nc", "b").num_samples == 4
    assert_error(SourceError, "as many variables", tmp_path / "it.nc", "a,b")
    nc(tmp_path / "it.nc", TIE, unlimited_dims=["u"], **how)
    assert opened(tmp_path / "it.nc").num_samples == 4
    nc(tmp_path / "it.nc", {**TIE, "c": (("t", "u"), np.zeros((3, 4)))}, **how)
    assert set(opened(tmp_path / "it.nc").fields) == {"a", "c"}
    assert_error(SourceError, r"'b' of .*it.nc has the dimensions u, the samples' is 't'", tmp_path / "it.nc", "a,b,c")


def test_a_single_value_that_is_a_dimension_scale_is_passed_over(tmp_path):
    with h5py.File(tmp_path / "it.nc", "w") as file:
        file["x"] = np.arange(6).reshape(3, 2)
        file["scale"] = 3.0
        file["scale"].make_scale()
    source = opened(tmp_path / "it.nc")
    assert (set(source.fields), source.notes["passed_over"]) == ({"x"}, ["scale"])


def test_groups_of_netcdf4_are_named_in_the_url(tmp_path):
    with netCDF4.Dataset(tmp_path / "it.nc", "w") as file:
        file.createDimension("time", None)
        group = file.createGroup("inner")
        group.createDimension("x", 2)
        group.createVariable("v", "i4", ("time", "x"))[:] = [[1, 2], [3, 4], [5, 6]]
        group.createVariable("lonely", "i4", ("x",))[:] = 0
        group.createVariable("name", str, ("time",))[:] = np.array(["a", "b", "ä"], object)
    source = opened(f"{tmp_path / 'it.nc'}::/inner")
    assert read(source, [0, 2])["v"].tolist() == [[1, 2], [5, 6]]
    assert read(source)["name"] == [b"a", b"b", "ä".encode()]
    assert_error(SourceError, "holds no variable with a dimension", tmp_path / "it.nc")
    assert_error(SourceError, "is a variable", f"{tmp_path / 'it.nc'}::/inner/v")


def test_a_netcdf4_variable_with_the_name_of_another_dimension_has_its_own_name(tmp_path):
    with netCDF4.Dataset(tmp_path / "it.nc", "w") as file:
        file.createDimension("time", 3)
        file.createDimension("level", 2)
        file.createVariable("level", "i4", ("time", "level"))[:] = [[1, 2], [3, 4], [5, 6]]
    assert read(opened(tmp_path / "it.nc", "level"))["level"].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_a_netcdf4_variable_shorter_than_its_unlimited_dimension_is_refused(tmp_path):
    with netCDF4.Dataset(tmp_path / "it.nc", "w") as file:
        file.createDimension("time", None)
        file.createVariable("a", "i4", ("time",))[:] = [1, 2, 3]
        file.createVariable("b", "i4", ("time",))[:] = [1]
    assert_error(SourceError, "'/a' has 3 rows, '/b' 1", tmp_path / "it.nc")


def classic(root):
    nc(root / "it.nc", {"v": (("t", "x"), np.zeros((50, 4)))}, format="NETCDF3_CLASSIC", engine="scipy")
    return bytearray((root / "it.nc").read_bytes())


def test_damaged_classic_headers_are_named(tmp_path):
    data = classic(tmp_path)
    source = opened(tmp_path / "it.nc")
    place = bytes(data).index(b"\0\0\0\1t") + 8
    for at, value, message in (
        (place, 2**31 - 1, "is truncated: its variable 'v' ends at byte 68719476"),
        (12, 2**31 - 1, "the header of .*it.nc is damaged"),
        (8, 99, "the header of .*it.nc is damaged: .*the tag 99 where 10 belongs"),
        (12, -1, "the header of .*it.nc is damaged: .*the number -1"),
        (place, 0, r"the header of .*it.nc is damaged|holds no|is truncated"),
    ):
        broken = bytearray(data)
        broken[at : at + 4] = struct.pack(">i", value)
        (tmp_path / "it.nc").write_bytes(broken)
        if at == place and value == 0:  # no fixed axis but records, of which the header counts none
            assert opened(tmp_path / "it.nc").num_samples == 0
            continue
        assert_error(SourceError, message, tmp_path / "it.nc")
    for length in (5, 20, 60, 100, len(data) - 1):
        (tmp_path / "it.nc").write_bytes(data[:length])
        assert_error(SourceError, r"it.nc (is damaged|is truncated)", tmp_path / "it.nc")
    assert_error(SourceChangedError, r"it.nc ends at byte", source)


def test_a_stream_of_records_has_as_many_as_there_are(tmp_path):
    variables = {"v": (("t",), np.arange(6, dtype="i1"))}  # alone: its records are not padded
    nc(tmp_path / "it.nc", variables, format="NETCDF3_CLASSIC", engine="netcdf4", unlimited_dims=["t"])
    data = bytearray((tmp_path / "it.nc").read_bytes())
    assert read(opened(tmp_path / "it.nc"))["v"].tolist() == [0, 1, 2, 3, 4, 5]
    data[4:8] = b"\xff" * 4
    (tmp_path / "it.nc").write_bytes(data)
    assert read(opened(tmp_path / "it.nc"))["v"].tolist()[:6] == [0, 1, 2, 3, 4, 5]


def test_netcdf4_that_is_damaged_or_has_links_is_named(tmp_path):
    (tmp_path / "it.nc").write_bytes((FORMATS / "netcdf/input/netcdf4.nc").read_bytes()[:9000])
    assert_error(SourceError, r"it.nc is not an HDF5 file, or damaged", tmp_path / "it.nc")
    linked(tmp_path)
    (tmp_path / "it.h5").rename(tmp_path / "it.nc")
    assert_error(SourceError, r"'other' of .*it.nc is a link", tmp_path / "it.nc")
    assert_error(SourceError, "has no groups", f"{FORMATS}/netcdf/input/classic.nc::/group")


# Zarr


def group(path, version=3, **arrays):
    made = zarr.open_group(path, mode="w", zarr_format=version)
    for name, given_values in arrays.items():
        values = np.asarray(given_values)
        chunks = tuple(min(2, n) for n in values.shape) or "auto"
        made.create_array(name, data=values, chunks=chunks)
    return path


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@given(data=st.data())
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_zarr_rows_are_what_zarr_reads(tmp_path, data):
    dtype = data.draw(st.sampled_from(["bool", "i1", ">i4", "<u8", "f2", ">f8"]))
    shape = (data.draw(st.integers(1, 30)), *data.draw(st.lists(st.integers(1, 4), max_size=2)))
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    version = data.draw(st.sampled_from([2, 3]))
    shards = tuple(2 * n for n in chunks) if version == 3 and data.draw(st.booleans()) else None
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 99, shape).astype(dtype)
    shutil.rmtree(tmp_path / "it.zarr", ignore_errors=True)
    layout = {"chunks": chunks, "shards": shards, "zarr_format": version}
    zarr.create_array(tmp_path / "it.zarr", shape=shape, dtype=dtype, **layout)[:] = values
    source = opened(tmp_path / "it.zarr")
    rows = sorted(data.draw(st.sets(st.integers(0, shape[0] - 1))))
    found = read(source, rows)["it"]
    assert found.dtype == np.dtype(dtype).newbyteorder("<")
    assert (found == values[rows]).all()


def test_strings_and_bytes_of_every_kind_are_read(tmp_path):
    from zarr.dtype import VariableLengthBytes

    for version in (2, 3):
        made = zarr.open_group(tmp_path / f"{version}.zarr", mode="w", zarr_format=version)
        made.create_array("u", data=np.array(["ä", "", "abc"]), chunks=(2,))
        made.create_array("s", data=np.array([b"a", b"", b"abc"]), chunks=(2,))
        blobs = made.create_array("b", shape=(3,), dtype=VariableLengthBytes(), chunks=(2,))
        blobs[:2] = np.array([b"\x00\xff", b"x"], object)  # the second chunk is never written
        found = read(opened(tmp_path / f"{version}.zarr"))
        assert found == {"u": ["ä".encode(), b"", b"abc"], "s": [b"a", b"", b"abc"], "b": [b"\x00\xff", b"x", b""]}


def test_texts_may_be_long_and_the_fill_value_may_end_with_nul(tmp_path):
    made = zarr.open_group(tmp_path / "it.zarr", mode="w")
    made.create_array("u", shape=(2,), chunks=(1,), dtype="<U300000")[:1] = ["a" * 10]
    made.create_array("s", shape=(2,), chunks=(1,), dtype="str", fill_value="a\0")[:1] = np.array(["b\0"], object)
    assert read(opened(tmp_path / "it.zarr")) == {"u": [b"a" * 10, b""], "s": [b"b\0", b"a\0"]}


def test_chunks_may_be_larger_than_what_they_decode_to(tmp_path):
    values = np.random.default_rng(0).integers(0, 2**62, 200_000)
    layout = {"chunks": (200_000,), "zarr_format": 2, "compressors": numcodecs.Base64()}
    zarr.create_array(tmp_path / "it.zarr", data=values, **layout)
    assert (read(opened(tmp_path / "it.zarr"))["it"] == values).all()


def test_dimensions_may_be_named_like_those_without_a_name(tmp_path):
    made = zarr.open_group(tmp_path / "it.zarr", mode="w")
    attributes = {"scale_factor": 0.5}
    made.create_array("x", data=np.arange(3, dtype="i2"), dimension_names=["axis_0"], attributes=attributes)
    assert read(opened(tmp_path / "it.zarr"))["x"].tolist() == [0, 0.5, 1]


def test_a_chunk_that_is_not_there_is_the_fill_value(tmp_path):
    group(tmp_path / "it.zarr", x=np.arange(5))
    (tmp_path / "it.zarr/x/c/1").unlink()
    edit(tmp_path / "it.zarr" / "x" / "zarr.json", fill_value=7)
    assert read(opened(tmp_path / "it.zarr"))["x"].tolist() == [0, 1, 7, 7, 4]


def test_the_identity_of_a_group_is_what_lies_below_it_and_a_path_without_one_is_an_error(tmp_path):
    made = zarr.open_group(tmp_path / "it.zarr", mode="w")
    for name in ("a", "ab"):
        made.create_group(name).create_array("x", data=np.arange(3), chunks=(3,))
    source = opened(f"{tmp_path / 'it.zarr'}::/a")
    assert [info.path for info in source.files] == ["a/x/c/0", "a/x/zarr.json", "a/zarr.json"]
    assert_error(SourceError, "holds the groups a, ab; name the group", tmp_path / "it.zarr")
    assert_error(SourceError, r"it.zarr::/nope is not a Zarr group or array", f"{tmp_path / 'it.zarr'}::/nope")


def hostile_pickle(root):
    group(root / "it.zarr", 2, x=np.arange(3))
    edit(root / "it.zarr/x/.zarray", dtype="|O", filters=[{"id": "pickle", "protocol": 5}], fill_value=None)

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (root / "bomb",))

    for chunk in ("0", "1"):
        (root / "it.zarr/x" / chunk).write_bytes(pickle.dumps([Bomb(), 1]))


def with_document(**changes):
    def make(root):
        group(root / "it.zarr", x=np.arange(5), y=np.arange(5))
        edit(root / "it.zarr/x/zarr.json", **changes)

    return make


def with_text(name, text):
    return lambda root: (group(root / "it.zarr", x=np.arange(5)) / name).write_text(text)


def of(version=3, **arrays):
    return lambda root: group(root / "it.zarr", version, **arrays)


HUGE = {"name": "regular", "configuration": {"chunk_shape": [2**50]}}
BAD_ZARR = {
    "pickles": (hostile_pickle, "it.zarr/x cannot be opened: .*holds pickled objects, which are never read"),
    "complex": (of(z=np.zeros(3, complex)), "it.zarr/z cannot be opened: .*holds values of 'complex128'"),
    "datetime in v2": (of(2, d=np.zeros(3, "M8[s]")), r"it.zarr/d holds values of <M8\[s\]"),
    "structured": (of(s=np.zeros(3, [("a", int)])), "it.zarr/s cannot be opened: .*holds values of"),
    "raw": (of(r=np.zeros(3, "V4")), r"it.zarr/r cannot be opened: .*holds values of 'raw_bytes'"),
    "single value": (of(one=np.float32(1)), "it.zarr/one is a single value"),
    "table of texts": (of(t=np.array([["a"], ["b"]])), "it.zarr/t holds text in the shape"),
    "unequal": (of(a=np.zeros(3), b=np.zeros(4)), "'a' has 3 rows, 'b' 4"),
    "nothing in it": (of(), "it.zarr holds no array"),
    "no document": (with_text("x/zarr.json", "{"), "it.zarr/x/zarr.json is not a JSON object"),
    "deep document": (with_text("zarr.json", "[" * 100_000), "it.zarr/zarr.json is not a JSON object"),
    "no object": (with_text("x/zarr.json", "[]"), "it.zarr/x/zarr.json is not a JSON object"),
    "absurd shape": (with_document(shape=[2**60]), "it.zarr/x claims 9223372036854775808 bytes of which .* are"),
    "absurd chunks": (with_document(chunk_grid=HUGE), "it.zarr/x has chunks of 9007199254740992 bytes"),
    "unknown codec": (with_document(codecs=[{"name": "nope"}]), "the array .*it.zarr/x cannot be opened"),
    "shape that is none": (with_document(shape="abc"), "the array .*it.zarr/x cannot be opened"),
    "negative shape": (with_document(shape=[-5]), "the array .*it.zarr/x cannot be opened"),
    "bad fill value": (with_document(fill_value="x"), "cannot be .*: the array 'x' has the fill value 'x' for int64"),
    "list as fill value": (with_document(fill_value=[]), "has the fill value \\[\\] for int64"),
    "huge fill value": (with_document(fill_value=2**70), "has the fill value .* for int64"),
    "damaged grid": (with_document(chunk_grid={"name": "regular", "configuration": 5}), "it.zarr/x cannot be opened"),
    "unknown type": (with_document(data_type="int7"), "the array .*it.zarr/x cannot be opened"),
}


@pytest.mark.quick(13)
@pytest.mark.parametrize("case", BAD_ZARR)
def test_zarr_that_cannot_be_converted_is_named_when_it_is_opened(case, tmp_path):
    assert_refused(BAD_ZARR[case], tmp_path, name="it.zarr")
    assert not (tmp_path / "bomb").exists()


def test_an_array_that_is_not_selected_may_be_anything(tmp_path):
    BAD_ZARR["unknown codec"][0](tmp_path)
    assert read(opened(tmp_path / "it.zarr", "y"))["y"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("damage", ["size", "bytes", "cut", "plain size"])
def test_a_chunk_that_does_not_decode_to_its_size_is_named(damage, tmp_path):
    made = zarr.open_group(tmp_path / "it.zarr", mode="w")
    packed = None if damage == "plain size" else "auto"
    for name, length in (("x", 6), ("other", 4)):
        made.create_array(name, data=np.arange(length) * 7, chunks=(length,), compressors=packed or ())
    chunk = tmp_path / "it.zarr/x/c/0"
    data = chunk.read_bytes()
    other = (tmp_path / "it.zarr/other/c/0").read_bytes()
    chunk.write_bytes({"size": other, "plain size": other, "bytes": b"\0" * len(data), "cut": data[:-3]}[damage])
    with pytest.raises(SourceError, match=r"it.zarr/x cannot be read"):
        read(opened(tmp_path / "it.zarr", "x"))


@pytest.mark.parametrize("how", ["v2", "v3", "shards"])
def test_a_damaged_count_of_strings_is_an_error_before_memory_is_allocated(how, tmp_path):
    version, shards = (2 if how == "v2" else 3), ((4,) if how == "shards" else None)
    packed = None if version == 2 else ()
    values = np.array(["a", "b", "c", "d"], object)
    layout = {"chunks": (2,), "shards": shards, "compressors": packed, "zarr_format": version}
    zarr.create_array(tmp_path / "it.zarr", shape=(4,), dtype="str", **layout)[:] = values
    assert read(opened(tmp_path / "it.zarr"))["it"] == [b"a", b"b", b"c", b"d"]
    chunk = tmp_path / "it.zarr" / {"v2": "0", "v3": "c/0", "shards": "c/0"}[how]
    data = bytearray(chunk.read_bytes())
    data[data.index(b"\2\0\0\0\1\0\0\0a") + 3] = 0x7F
    chunk.write_bytes(data)
    with pytest.raises(SourceError, match=r"it.zarr cannot be read: .*a chunk of 2 items declares 2130706434"):
        read(opened(tmp_path / "it.zarr"))


def dataset(path):
    fields = {"x": "float32[3]", "image": "bytes:png", "t": "text", "r": "ragged:int16[2]", "flag": "bool"}
    layout = sl.Layout(shard_size=64 << 10, chunk_size=4 << 10, block_size=16 << 10)
    with sl.Writer(path, fields, layout=layout) as writer:
        for n in range(200):
            ragged = np.arange(2 * (n % 4)).reshape(-1, 2)
            row = {"x": [n, 0, 1], "image": bytes([n]) * 9 * n, "t": f"Nº {n}", "r": ragged, "flag": n % 2 == 0}
            writer.write(row)
    return sl.open(path)


def test_a_dataset_of_streamloader_is_converted_again_with_its_own_fields(tmp_path):
    before = dataset(tmp_path / "ds")
    source = opened(tmp_path / "ds")
    assert dict(source.fields) == before.fields
    assert source.notes["recut"]["digest"] == before.digest
    for rows in ([], [0], [3, 4, 150, 199], range(60, 140)):
        found = read(source, rows)
        for i, row in enumerate(rows):
            sample = before[row]
            assert found["x"][i].tolist() == sample["x"].tolist()
            assert (found["image"][i], found["t"][i].decode()) == (sample["image"], sample["t"])
            assert found["r"][i] == np.asarray(sample["r"], "<i2").tobytes()
    sl.convert(tmp_path / "ds", tmp_path / "again", split="a=0.5,b=0.5", fields="t,image,flag", workers=0)
    assert [len(sl.open(tmp_path / "again", split=name)) for name in "ab"] == [100, 100]
    assert_error(SourceError, "again has the splits a, b", tmp_path / "again")
    split = opened(f"{tmp_path / 'again'}::/b")
    assert (list(split.fields), split.num_samples) == (["flag", "image", "t"], 100)
    one = opened(f"{tmp_path / 'ds'}::/image")
    assert [str(field) for field in one.fields.values()] == ["bytes:png"]
    assert read(one, [5])["image"] == [before[5]["image"]]


def test_what_is_missing_in_a_dataset_of_streamloader_is_an_error_and_not_a_fill_value(tmp_path):
    dataset(tmp_path / "ds")
    source = opened(tmp_path / "ds", "image")
    next((tmp_path / "ds/image/c").iterdir()).unlink()
    assert_error(FormatError, r"image/c/.* is missing", source)


# tokens


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    row=st.integers(1, 9),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "uint32", "float64"]),
    data=st.data(),
)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_token_rows_are_what_numpy_reads(tmp_path, lengths, row, dtype, data):
    shutil.rmtree(tmp_path / "bins", ignore_errors=True)
    (tmp_path / "bins").mkdir()
    rows = []
    for number, length in enumerate(lengths):
        values = np.random.default_rng(number).integers(0, 99, length).astype(np.dtype(dtype).newbyteorder("<"))
        values.tofile(tmp_path / "bins" / f"{number}.bin")
        rows += values[: length // row * row].reshape(-1, row).tolist()
    if not rows:
        assert_error(SourceError, "holds a row of", tmp_path / "bins", f"t={dtype}[{row}]")
        return
    source = opened(tmp_path / "bins", f"t={dtype}[{row}]")
    assert source.notes["passed_over_values"] == sum(length % row for length in lengths)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1))))
    assert read(source)["t"].tolist() == rows
    assert read(source, chosen)["t"].tolist() == [rows[one] for one in chosen]


def test_tokens_without_documents_are_cut_every_4096(tmp_path):
    values = [np.arange(3 * 4096 + 5, dtype="<u2"), np.arange(4096, dtype="<u2"), np.arange(9, dtype="<u2")]
    pieces = []
    for number, some in enumerate(values):
        some.tofile(tmp_path / f"{number}.bin")
        pieces += [some[at : at + 4096].tobytes() for at in range(0, len(some), 4096)]
    source = opened(tmp_path, "tokens=ragged:uint16")
    assert source.num_samples == len(pieces) == 6
    for count in range(7):
        for rows in combinations(range(6), count):
            assert read(source, rows)["tokens"] == [pieces[row] for row in rows]


@pytest.mark.parametrize("fields", [None, "t", "a=uint16[8],b=uint16[8]", "t=text", "t=bool[8]", "t=ragged:int8[2]"])
def test_tokens_without_a_type_are_an_error_that_shows_how_to_give_one(fields, tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "it.bin")
    message = r"it.bin does not describe its values.*tokens=uint16\[2048\].*tokens=ragged:uint16"
    assert_error(UsageError, message, tmp_path, fields)


def test_token_files_that_are_no_whole_number_of_values_or_change_are_named(tmp_path):
    (tmp_path / "it.bin").write_bytes(b"x" * 4001)
    with pytest.raises(SourceError, match=r"it.bin has 4001 bytes, which is not a whole number of uint16 values"):
        opened(tmp_path, "t=uint16[8]")
    (tmp_path / "it.bin").write_bytes(b"x" * 4000)
    source = opened(tmp_path, "t=uint16[8]")
    (tmp_path / "it.bin").write_bytes(b"x" * 1000)
    assert_error(SourceChangedError, r"it.bin ends at byte 1000", source)


def test_bins_beside_an_index_are_not_token_files(tmp_path):
    (tmp_path / "it.bin").write_bytes(b"x" * 4000)
    (tmp_path / ".hidden").write_text("")
    assert open_source(tmp_path, None, {}, parse_selection(TOKENS))[0] == "tokens"
    (tmp_path / "it.idx").write_text("")
    assert_error(SourceError, "no known format fits", tmp_path, TOKENS)


@pytest.mark.long
def test_contiguous_rows_of_tokens_take_no_memory_but_their_own(tmp_path):
    with (tmp_path / "it.bin").open("wb") as file:
        file.truncate(64 << 20)
    source = opened(tmp_path, "t=uint16[2048]")
    with within(68 << 20):
        assert read(source)["t"].nbytes == 64 << 20


@pytest.mark.quick(4)
@pytest.mark.parametrize("layout", [{}, {"chunks": (7,)}, {"chunks": (7,), "compression": "gzip", "shuffle": True}])
@pytest.mark.parametrize(("size", "before"), [(2, 0), (4, 512), (8, 1024)])
def test_values_of_variable_length_are_read_whatever_the_sizes_of_addresses_and_the_layout(
    size, before, layout, tmp_path
):
    created = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    created.set_sizes(size, size)
    created.set_userblock(before)  # bytes of others, from whose end addresses count
    rows = [np.arange(row % 9, dtype=np.float64) for row in range(50)]
    path = tmp_path / "a.h5"
    with h5py.File(h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, created)) as file:
        file.create_dataset("texts", (50,), h5py.string_dtype(), ["é" * (7 * len(row)) for row in rows], **layout)
        file.create_dataset("numbers", (50,), h5py.vlen_dtype("f8"), **layout)
        for number, row in enumerate(rows):
            file["numbers"][number] = row
    sl.convert(path, tmp_path / "out", workers=0)
    (batch,) = sl.NumpyDataset(tmp_path / "out", batch_size=50, shuffle=False)
    np.testing.assert_array_equal(batch["numbers"], np.concatenate(rows))
    assert batch["texts"] == ["é" * (7 * len(row)) for row in rows]
