"""What a map function gets: every value of the source, also those that no field holds, and None for a missing one."""

import io
import json
import tarfile
from decimal import Decimal
from typing import Any

import h5py
import netCDF4
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zarr
from amounts import covering
from commands import run
from torchrun import run_python

import streamloader as sl
from streamloader.errors import FieldError, SourceError, UsageError

ROWS: list[dict[str, Any]] = [
    {"id": 1, "tags": ["a", "b"], "note": None, "size": [1, 2], "boxes": [{"x": 1}, {"x": 2}], "name": "one"},
    {"id": 2, "tags": [], "note": None, "size": [3, 4], "boxes": [], "name": None},
    {"id": None, "tags": None, "note": None, "size": [5, None], "boxes": None, "name": "three"},
    {"id": 4, "tags": ["c"], "note": None, "size": None, "boxes": [{"x": 3}], "name": "four"},
]
SCHEMA = pa.schema(
    {
        **{"id": pa.int32(), "tags": pa.list_(pa.string()), "note": pa.null(), "size": pa.list_(pa.int16())},
        **{"boxes": pa.list_(pa.struct({"x": pa.int64()})), "name": pa.string()},
    }
)


def source(kind: str, root: Any) -> Any:
    table, path = pa.Table.from_pylist(ROWS, SCHEMA), root / f"it.{kind}"
    match kind:
        case "parquet":
            pq.write_table(table, path, row_group_size=2)
        case "feather":
            feather.write_feather(table, path, chunksize=3)
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case "objects":
            return ROWS
    return path


def as_json(sample: dict[str, Any]) -> dict[str, str]:
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items()}
    return {"seen": json.dumps(plain)}


def batch_as_json(batch: dict[str, Any]) -> dict[str, list[str]]:
    rows = zip(*batch.values(), strict=True)
    return {"seen": [as_json(dict(zip(batch, row, strict=True)))["seen"] for row in rows]}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "batch", "workers"), covering(["parquet", "feather", "jsonl", "objects"], [None, 3], [0, 2])
)
def test_a_map_function_gets_what_no_field_holds_and_none_for_nulls(kind, batch, workers, tmp_path):
    function = as_json if batch is None else batch_as_json
    sl.convert(source(kind, tmp_path), tmp_path / "out", map=function, map_batch=batch, workers=workers)
    ds = sl.open(tmp_path / "out")
    assert [json.loads(ds[i]["seen"]) for i in range(len(ds))] == ROWS


def test_values_that_a_field_holds_are_numbers_and_arrays_of_its_type(tmp_path):
    seen: list[Any] = []
    src = source("parquet", tmp_path)
    sl.convert(src, tmp_path / "out", map=lambda sample: seen.append(sample) or {"n": 1}, workers=0)
    assert isinstance(seen[-1]["id"], np.int32)
    assert (seen[-4]["size"].dtype, seen[-4]["size"].tolist()) == (np.int16, [1, 2])
    seen.clear()
    columns = {"x": np.arange(6, dtype="f4").reshape(3, 2), "n": [1, 2, None]}
    sl.convert(
        columns, tmp_path / "two", map=lambda batch: seen.append(batch) or {"n": [1] * 3}, map_batch=3, workers=0
    )
    assert np.array_equal(seen[-1]["x"], columns["x"])
    assert (seen[-1]["x"].dtype, seen[-1]["n"]) == (np.float32, [1, 2, None])


def test_decimals_and_late_lists_reach_a_map_function(tmp_path):
    rows = [{"price": Decimal("1.50"), "x": [1, 2]}] * 200 + [{"price": None, "x": [1, 2, 3]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "it.parquet")

    def priced(sample: dict[str, Any]) -> dict[str, Any]:
        return {"price": float("nan" if sample["price"] is None else sample["price"]), "count": len(sample["x"])}

    sl.convert(tmp_path / "it.parquet", tmp_path / "out", map=priced, workers=0)
    ds = sl.open(tmp_path / "out")
    assert ds[0] == {"price": 1.5, "count": 2}
    assert (np.isnan(ds[200]["price"]), ds[200]["count"]) == (True, 3)


def test_an_empty_cell_of_numbers_is_none_and_a_wrong_one_is_bad(tmp_path):
    path = tmp_path / "it.csv"
    path.write_text("n,name\n1,a\n,\n3,c\n")
    sl.convert(path, tmp_path / "out", map=as_json, workers=0)
    ds = sl.open(tmp_path / "out")
    found = [json.loads(ds[i]["seen"]) for i in range(3)]
    assert found == [{"n": 1, "name": "a"}, {"n": None, "name": ""}, {"n": 3, "name": "c"}]
    path.write_text("n\n" + "1\n" * 5000 + "x\n" + "1\n" * 5000)
    with pytest.raises(SourceError, match=r"it\.csv:5002: its column 'n' holds 'x', which is not int64"):
        sl.convert(path, tmp_path / "bad", map=as_json, workers=0)
    sl.convert(path, tmp_path / "texts", map=as_json, columns="n=text", workers=0)
    assert sl.open(tmp_path / "texts")[5000]["seen"] == '{"n": "x"}'


def test_workers_import_a_module_of_the_folder_that_a_notebook_runs_in(tmp_path):
    (tmp_path / "own.py").write_text("def double(sample):\n    return {'x': 2 * int(sample['x'])}\n")
    np.save(tmp_path / "x.npy", np.arange(6))
    # as in a notebook, sys.path has "" for the current folder
    run_python(
        "-c", "import own, streamloader as sl; sl.convert('x.npy', 'd', map=own.double, workers=1)", cwd=tmp_path
    )
    assert sl.open(tmp_path / "d")[:]["x"].tolist() == [0, 2, 4, 6, 8, 10]


def test_fields_are_required_of_what_a_map_function_returns(tmp_path):
    src = source("jsonl", tmp_path)
    with pytest.raises(FieldError, match="no field of the format holds the field 'note'"):
        sl.convert(src, tmp_path / "out", map=dict, workers=0)
    sl.convert(src, tmp_path / "out", map=lambda sample: {**sample, "n": 1}, fields="n=int8", workers=0)
    assert str(sl.open(tmp_path / "out").fields["n"]) == "int8"


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "objects"])
def test_columns_chooses_what_is_read_also_for_appends(kind, tmp_path, monkeypatch):
    src, out = source(kind, tmp_path), tmp_path / "out"
    sl.convert(src, out, map=as_json, columns=["name", "id=int64"], workers=0)
    expected = [{"name": row["name"], "id": row["id"]} for row in ROWS]
    if kind != "objects":
        sl.append(out, src, map=as_json, workers=0)
        expected *= 2
    ds = sl.open(out)
    assert [json.loads(ds[i]["seen"]) for i in range(len(ds))] == expected
    with pytest.raises(FieldError, match="has no field 'nope'"):
        sl.convert(src, tmp_path / "no", map=as_json, columns="nope", workers=0)
    with pytest.raises(UsageError, match=r"columns without map; give a map function"):
        sl.convert(src, tmp_path / "no", columns="id", workers=0)


def test_a_key_that_no_sampled_line_has_is_named_with_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text("def f(sample):\n    return {'late': sample.get('late') is not None}\n")
    rows = [{"x": 1}] * 5000
    rows[77] = {"x": 1, "late": 2}
    (tmp_path / "it.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("convert", tmp_path / "it.jsonl", tmp_path / "out", "--map", "made:f", "--workers", 0)
    assert 'as in columns="x,late"' in run(capsys, *arguments)[2]
    assert run(capsys, *arguments, "--columns", "x,late=int64")[0] == 0
    assert np.flatnonzero(sl.open(tmp_path / "out").read("late", 0, 5000)).tolist() == [77]


def test_an_append_gives_a_map_function_the_class_numbers_of_the_dataset(tmp_path):
    for number, names in enumerate((["cat", "dog"], ["dog", "emu", "cat"])):
        features = {"label": {"_type": "ClassLabel", "names": names}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        labels = pa.schema({"label": pa.int64()}, metadata)
        pq.write_table(pa.table({"label": [0, None, len(names) - 1]}, labels), tmp_path / f"{number}.parquet")

    def known(sample: dict[str, Any]) -> dict[str, Any]:
        return {"label": np.int64(-1) if sample["label"] is None else sample["label"]}

    sl.convert(tmp_path / "0.parquet", tmp_path / "out", map=known, workers=0)
    sl.append(tmp_path / "out", tmp_path / "1.parquet", map=known, workers=0)
    ds = sl.open(tmp_path / "out")
    assert ds.read("label", 0, 6).tolist() == [0, -1, 1, 1, -1, 0]
    assert ds.classes == {"label": ("cat", "dog", "emu")}


def test_a_missing_image_reaches_a_map_function_beside_resized_ones(tmp_path):
    from PIL import Image

    rows = [{"image": Image.new("RGB", (20, 10))}, {"image": None}]
    made = {"map": lambda sample: {"size": len(sample["image"] or b"")}, "resize": 5, "workers": 0}
    sl.convert(rows, tmp_path / "out", **made)
    sizes = sl.open(tmp_path / "out").read("size", 0, 2).tolist()
    assert sizes[0] > 0 == sizes[1]


FEW = 5
RECORDS = np.zeros(FEW, [("n", "<i4"), ("at", "<f8", (2,)), ("name", "S3")])
RECORDS["n"], RECORDS["at"], RECORDS["name"] = np.arange(FEW), np.arange(2 * FEW).reshape(FEW, 2), b"abc"
TIMES = np.arange("2024-01-01", "2024-01-06", dtype="M8[D]").astype("M8[s]")
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "records": RECORDS,
    "big": RECORDS.astype([("n", ">i4"), ("at", ">f8", (2,)), ("name", "S3")]),
    "times": TIMES,
    "big_times": TIMES.astype(">M8[s]"),
    "durations": TIMES - TIMES[0],
    "complex": np.arange(2 * FEW).reshape(FEW, 2) * 1j,
    "wide": np.arange(FEW, dtype=np.longdouble) / 3,
    "texts": np.array([["a", "bc"]] * FEW),
    "raw": np.arange(FEW, dtype="<u4").view("V4"),
    "other": np.zeros(FEW, [("\u4e2d", "i4")]),
}
X = np.arange(FEW, dtype=np.int16)


def mapped(src: Any, root: Any, **options: Any) -> list[dict[str, Any]]:
    """Return what a map function gets of each sample, also of those that it drops."""
    seen: list[dict[str, Any]] = []
    sl.convert(src, root / "out", map=lambda sample: seen.append(sample) or {"x": sample["x"]}, workers=0, **options)
    assert sl.open(root / "out").read("x", 0, FEW).tolist() == X.tolist()
    return seen[-FEW:]


def assert_gets(src: Any, root: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    for name in arrays:
        with pytest.raises(SourceError):
            sl.convert(src, root / "no", fields=["x", name], dry_run=True, workers=0)
    samples = mapped(src, root)
    for name, rows in arrays.items():
        for sample, row in zip(samples, rows, strict=True):
            assert np.asarray(sample[name]).dtype == np.asarray(row).dtype
            assert str(sample[name]) == str(row)


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
@pytest.mark.parametrize("kind", ["npy", "npz", "compressed npz"])
def test_a_map_function_gets_the_rows_of_numpy_files_that_no_field_holds(kind, tmp_path):
    src = tmp_path / ("it" if kind == "npy" else "it.npz")
    if kind == "npy":
        src.mkdir()
        for name, array in {"x": X, **ARRAYS}.items():
            np.save(src / f"{name}.npy", array)
    else:
        (np.savez if kind == "npz" else np.savez_compressed)(src, x=X, **ARRAYS)
    assert_gets(src, tmp_path, ARRAYS)


def test_columns_and_fields_choose_among_the_arrays_of_numpy_files(tmp_path):
    np.savez(tmp_path / "it.npz", x=X, objects=np.array([None] * FEW))
    with pytest.raises(SourceError, match="pickled objects"):
        mapped(tmp_path / "it.npz", tmp_path)
    assert [list(sample) for sample in mapped(tmp_path / "it.npz", tmp_path, columns="x")] == [["x"]] * FEW
    sl.convert(tmp_path / "it.npz", tmp_path / "x", fields="x", workers=0)


@pytest.mark.parametrize("chunks", [None, True])
def test_a_map_function_gets_the_rows_of_hdf5_that_no_field_holds(chunks, tmp_path):
    arrays = {name: ARRAYS[name] for name in ("records", "big", "complex", "wide", "raw")}
    arrays["nested"] = np.arange(FEW * 3, dtype="<i4").reshape(FEW, 3)
    with h5py.File(tmp_path / "it.h5", "w") as file:
        for name, array in {"x": X, **arrays}.items():
            dtype = np.dtype(("<i4", (3,))) if name == "nested" else array.dtype
            file.create_dataset(name, (FEW,) if name == "nested" else array.shape, dtype, chunks=chunks)[...] = array
    assert_gets(tmp_path / "it.h5", tmp_path, arrays)


def test_arrays_of_variable_length_in_hdf5_reach_a_map_function_in_their_byte_order(tmp_path):
    items = h5py.vlen_dtype(np.dtype(">i4"))
    dtype = np.dtype([("n", "<i4"), ("items", items), ("name", h5py.string_dtype())])
    with h5py.File(tmp_path / "it.h5", "w") as file:
        file["x"] = X
        records = file.create_dataset("records", (FEW,), dtype=dtype)
        table = file.create_dataset("table", (FEW, 2), dtype=items)
        references = file.create_dataset("reference", (FEW,), dtype=h5py.ref_dtype)
        for row in range(FEW):
            records[row] = (row, np.arange(row, dtype=">i4"), "é")
            table[row] = [np.arange(row, dtype=">i4"), np.arange(2, dtype=">i4")]
            references[row] = file["x"].ref
    for row, sample in enumerate(mapped(tmp_path / "it.h5", tmp_path)):
        record = sample["records"]
        assert (record["n"], record["items"].tolist(), record["name"]) == (row, list(range(row)), "é".encode())
        assert [item.tolist() for item in sample["table"]] == [list(range(row)), [0, 1]]
        assert isinstance(sample["reference"], h5py.Reference)


@pytest.mark.parametrize("classic", [True, False])
def test_a_map_function_gets_the_variables_of_netcdf_that_no_field_holds(classic, tmp_path):
    with netCDF4.Dataset(tmp_path / "it.nc", "w", format="NETCDF3_CLASSIC" if classic else "NETCDF4") as file:
        for name, size in {"t": None, "y": 2, "z": 3}.items():
            file.createDimension(name, size)
        file.createVariable("x", "i2", ("t",))[:] = X
        values = np.full((FEW, 2, 3), b"x")
        if not classic:
            values = RECORDS[["n"]].astype([("n", "<i4")])
        kind = "S1" if classic else file.createCompoundType(values.dtype, "kind")
        file.createVariable("a", kind, ("t", "y", "z") if classic else ("t",))[:] = values
    assert_gets(tmp_path / "it.nc", tmp_path, {"a": values})


@pytest.mark.filterwarnings("ignore:The data type")
@pytest.mark.parametrize("version", [2, 3])
def test_a_map_function_gets_the_rows_of_zarr_that_no_field_holds(version, tmp_path):
    names = ("times", "big_times", "durations", "complex", "texts", "raw")
    arrays = {**{name: ARRAYS[name] for name in names}, "one": RECORDS[["n"]].astype([("n", "<i4")])}
    group = zarr.open_group(tmp_path / "it.zarr", mode="w", zarr_format=version)
    group.create_array("x", data=X)
    for name, array in arrays.items():
        stored = group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(2, 2)[: array.ndim])
        stored[:3] = array[:3]  # the last chunk is missing
        arrays[name] = stored[...]
    assert_gets(tmp_path / "it.zarr", tmp_path, arrays)


def test_a_map_function_gets_the_arrays_of_a_tar_that_no_field_holds(tmp_path):
    names = ("records", "times", "complex", "texts")
    with tarfile.open(tmp_path / "it.tar", "w") as tar:
        for row in range(FEW):
            members = {"cls": str(X[row]).encode()}
            for name in names:
                array = io.BytesIO()
                np.save(array, ARRAYS[name][: row + 1])
                members[f"{name}.npy"] = array.getvalue()
            for suffix, data in members.items():
                member = tarfile.TarInfo(f"{row}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with pytest.raises(SourceError, match="dtype 'complex128'"):
        sl.convert(tmp_path / "it.tar", tmp_path / "no", workers=0)
    seen: list[Any] = []
    sl.convert(tmp_path / "it.tar", tmp_path / "out", map=lambda sample: seen.append(sample) or {"x": 1}, workers=0)
    for row, sample in enumerate(seen[-FEW:]):
        assert all(np.array_equal(sample[f"{name}_npy"], ARRAYS[name][: row + 1]) for name in names)


def test_members_of_a_tar_that_are_not_chosen_are_not_read(tmp_path, monkeypatch):
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}, None], object))
    with tarfile.open(tmp_path / "it.tar", "w") as tar:
        for row in range(FEW):
            for suffix, data in {"bin": bytes(300_000), "cls": str(X[row]).encode(), "npy": pickled.getvalue()}.items():
                member = tarfile.TarInfo(f"{row}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with pytest.raises(SourceError, match=r"0\.npy: it is not an \.npy"):
        sl.convert(tmp_path / "it.tar", tmp_path / "no", workers=0)
    sl.convert(tmp_path / "it.tar", tmp_path / "out", map=dict, columns="cls", workers=0)
    sl.convert(tmp_path / "it.tar", tmp_path / "x", fields="cls=int16", workers=0)
    assert sl.open(tmp_path / "x").read("cls", 0, FEW).tolist() == X.tolist()
    with pytest.raises(FieldError, match="has no field 'nope'; it has bin, cls, npy"):
        sl.convert(tmp_path / "it.tar", tmp_path / "no", fields="nope", workers=0)


def test_files_whose_rows_differ_in_dtype_are_not_joined_for_a_map_function(tmp_path):
    for number, dtype in enumerate(([("n", "<i4")], [("n", "<i8")])):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["a"] = np.zeros(FEW, dtype)
    with pytest.raises(SourceError, match=r"a=\[\('n', '<i8'\)\].* a=\[\('n', '<i4'\)\]"):
        mapped(tmp_path / "*.h5", tmp_path)


def test_several_byte_strings_of_a_tfrecord_reach_a_map_function(tmp_path):
    from streamloader.conversion.sources.tfrecord import parse_example

    strings = b"\x0a\x01a\x0a\x02bc"
    value = b"\x0a" + bytes([len(strings)]) + strings
    entry = b"\x0a\x01s\x12" + bytes([len(value)]) + value
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert parse_example(memoryview(b"\x0a" + bytes([len(features)]) + features)) == {"s": [b"a", b"bc"]}
