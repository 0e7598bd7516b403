"""Matrices in compressed sparse rows, as AnnData writes them: each sample is a row, whatever the chunks cut."""

import json
import shutil

import numpy as np
import pytest
import torch
import zarr
from amounts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr_stores import STORES, all_ranks

import streamloader as sl
from streamloader import errors
from streamloader.measure.statistics import fit

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.* consumers .* lanes"),
]
TABLES = [STORES / "anndata2.zarr", STORES / "anndata3.zarr"]
FIELDS = ["X", "layers/counts", "obs/kind/codes", "obs/depth"]
EXPECTED = {"X": "X", "layers/counts": "counts", "obs/kind/codes": "kind", "obs/depth": "depth"}


@pytest.fixture(scope="module")
def tables():
    with np.load(STORES / "tables.npz") as stored:
        return {field: stored[name] for field, name in EXPECTED.items()}


def dense(batch, field, columns):
    """The rows of a sparse field, as the documentation shows it."""
    count = len(batch[f"{field}_offsets"]) - 1
    rows = batch[f"{field}_offsets"], batch[f"{field}_indices"].long(), batch[field]
    return torch.sparse_csr_tensor(*rows, (count, columns), check_invariants=True).to_dense().numpy()


def check(batch, tables):
    rows = batch["index"].numpy()
    for field, expected in tables.items():
        found = dense(batch, field, expected.shape[1]) if expected.ndim == 2 else batch[field].numpy()
        np.testing.assert_array_equal(found, expected[rows])
    return rows[batch["valid"].numpy()].tolist()


@pytest.mark.quick(1)
@pytest.mark.parametrize("store", TABLES, ids=lambda path: path.name)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_rows_have_the_values_of_anndata_at_any_world_size_and_across_a_resume(store, world, tables):
    options = {"fields": FIELDS, "sample_axis": 0, "batch_size": 2, "seed": 3}
    before, state = all_ranks(str(store), world, steps=1, **options)
    after, _ = all_ranks(str(store), 3, state=state, **options)
    seen = [row for step in before + after for batch in step if batch is not None for row in check(batch, tables)]
    assert sorted(seen) == list(range(37))


@pytest.mark.long
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_matrices_are_read_back(tmp_path, data):
    """Rows of any length, chunks of any size, shards or none, any selection, twice: blocks are kept."""
    lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=60)))
    rows = np.concatenate([[0], np.cumsum(lengths)])
    total, chunk, shard = int(rows[-1]), data.draw(st.integers(1, 40)), data.draw(st.sampled_from([None, 1, 3]))
    shutil.rmtree(tmp_path / "t.zarr", ignore_errors=True)
    root = zarr.open_group(tmp_path / "t.zarr", mode="w", zarr_format=3)
    group = root.create_group("X", attributes={"encoding-type": "csr_matrix", "shape": [len(lengths), 10]})
    values = {
        "data": np.arange(1, total + 1, dtype="f8"),
        "indices": np.concatenate([np.arange(n) for n in lengths]).astype("i8"),
        "indptr": rows,
    }
    for name, array in values.items():
        group.create_array(name, data=array, chunks=(chunk,), shards=None if shard is None else (chunk * shard,))
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    keep[data.draw(st.integers(0, len(lengths) - 1))] = True
    expected = np.zeros((len(lengths), 10))
    expected[np.repeat(np.arange(len(lengths)), lengths), values["indices"]] = values["data"]
    # chunks of zeros are not stored, and may be all of them
    options = {"fields": ["X"], "sample_axis": 0, "where": keep, "with_index": True, "strict": False}
    dataset = sl.StreamingDataset(
        tmp_path / "t.zarr", batch_size=data.draw(st.integers(1, min(9, int(keep.sum())))), **options
    )
    for _ in range(2):
        seen = [row for batch in dataset for row in check(batch, {"X": expected})]
        assert sorted(seen) == np.flatnonzero(keep).tolist()


def test_single_rows_transforms_packs_and_mixtures_of_tables(tables):
    options = {"fields": ["X"], "sample_axis": 0, "with_index": True}
    for sample in sl.StreamingDataset(TABLES[0], batch_size=None, **options):
        row = tables["X"][int(sample["index"])]
        np.testing.assert_array_equal(sample["X"].numpy(), row[sample["X_indices"].numpy()])
        assert len(sample["X"]) == np.count_nonzero(row)

    def densify(sample):
        row = np.zeros(29, np.float32)
        row[sample["X_indices"]] = sample["X"]
        return {"row": row}

    for batch in sl.StreamingDataset(TABLES[1], batch_size=4, transform=densify, **options):
        np.testing.assert_array_equal(batch["row"].numpy(), tables["X"][batch["index"].numpy()])
    sources = {sl.Source(str(path), sample_axis=0): 1 for path in TABLES}
    mixture = sl.Mixture(sources, batch_size=8, unit=1, fields=["X"], with_index=True)
    batch = next(iter(mixture))
    assert set(batch["source"].tolist()) == {0, 1}
    np.testing.assert_array_equal(dense(batch, "X", 29), tables["X"][batch["index"].numpy()])


def test_sparse_matrices_are_fields_unless_others_are_named():
    for store in TABLES:
        assert list(sl.StreamingDataset(store, batch_size=2, sample_axis=0).fields) == ["X", "X_indices"]


def test_a_sparse_matrix_and_an_array_do_not_share_a_name(tmp_path):
    shutil.copytree(TABLES[1], tmp_path / "t.zarr")
    group = zarr.open_group(tmp_path / "t.zarr", mode="a")
    group.create_array("X_indices", data=np.arange(37))
    for fields in (["X", "X_indices"], ["X_indices", "X"]):
        with pytest.raises(errors.FieldError, match="'X_indices' is an array or a column, and the indices of"):
            sl.StreamingDataset(tmp_path / "t.zarr", batch_size=2, sample_axis=0, fields=fields)
    dataset = sl.StreamingDataset(TABLES[0], batch_size=2, sample_axis=0, fields=["X", "X_indices"])
    assert list(dataset.fields) == ["X", "X_indices"]


def test_a_sparse_matrix_that_is_incomplete_is_no_field_unless_it_is_named(tmp_path):
    shutil.copytree(TABLES[1], tmp_path / "t.zarr")
    shutil.rmtree(tmp_path / "t.zarr" / "X" / "indptr")
    zarr.open_group(tmp_path / "t.zarr", mode="a").create_array("y", data=np.arange(37))
    assert list(sl.StreamingDataset(tmp_path / "t.zarr", batch_size=2, sample_axis=0).fields) == ["y"]
    with pytest.raises(errors.FieldError, match="X/indptr"):
        sl.StreamingDataset(tmp_path / "t.zarr", batch_size=2, sample_axis=0, fields=["X"])


def test_sparse_matrices_have_no_statistics(tmp_path):
    with pytest.raises(errors.UsageError, match="'X' is a sparse matrix, which has no mean"):
        fit(sl.Source(TABLES[0], sample_axis=0))


@pytest.mark.long
def test_memory_counts_the_rows_of_a_batch(tmp_path):
    """Few rows have nearly all elements: a batch of them is 100 times a mean one."""
    lengths = np.ones(2000, np.int64)
    lengths[:5] = 4_000_000
    rows = np.concatenate([[0], np.cumsum(lengths)])
    root = zarr.open_group(tmp_path / "t.zarr", mode="w", zarr_format=3)
    group = root.create_group("X", attributes={"encoding-type": "csr_matrix", "shape": [2000, 4_000_000]})
    for name, dtype in (("data", "f4"), ("indices", "i4")):
        group.create_array(name, data=np.zeros(rows[-1], dtype), chunks=(50_000,))
    group.create_array("indptr", data=rows)
    options = {"fields": ["X"], "sample_axis": 0, "batch_size": 10, "shuffle": False, "strict": False}
    with pytest.raises(errors.MemoryBudgetError, match="needs memory=") as caught:
        iter(sl.StreamingDataset(tmp_path / "t.zarr", memory=150_000_000, **options))
    needed = int(str(caught.value).split("needs memory=")[1].split()[0])
    dataset = sl.StreamingDataset(tmp_path / "t.zarr", memory=needed, **options)
    assert sum(len(batch["X_offsets"]) - 1 for batch in dataset) == 2000


@pytest.mark.parametrize("store", TABLES, ids=lambda path: path.name)
def test_categories_are_codes_with_class_names_and_select_rows(store, tables):
    names = zarr.open_group(store, mode="r")["obs/kind/categories"][:].tolist()
    options = {"sample_axis": 0, "batch_size": 1, "with_index": True}
    dataset = sl.StreamingDataset(store, fields=["X", "obs/kind"], **options)
    assert dataset.classes == {"obs/kind": tuple(names)}
    for batch in dataset:
        assert batch["obs/kind"] == tables["obs/kind/codes"][batch["index"]]
    depth = tables["obs/depth"]
    where = f"'obs/kind' == '{names[1]}' and 'obs/depth' >= {np.median(depth)}"
    some = sl.StreamingDataset(store, fields=["X"], where=where, **options)
    expected = np.flatnonzero((tables["obs/kind/codes"] == 1) & (depth >= np.median(depth)))
    assert sorted(int(batch["index"]) for batch in some) == expected.tolist()
    with pytest.raises(errors.SelectionError, match=f"none of its classes; .*'{names[0]}'"):
        sl.StreamingDataset(store, fields=["X"], where="'obs/kind' == 'no such'", **options)


@pytest.mark.parametrize("version", [2, 3])
def test_missing_values_of_nullable_columns_are_nan(version, tmp_path):
    root = zarr.open_group(tmp_path / "t.zarr", mode="w", zarr_format=version)
    root.create_array("X", data=np.arange(24.0).reshape(8, 3), chunks=(3, 3))
    columns = {"genes": np.arange(8), "passed": np.arange(8) % 2 == 0}
    missing = np.arange(8) % 3 == 1
    for name, values in columns.items():
        kind = "nullable-boolean" if values.dtype == bool else "nullable-integer"
        group = root.create_group(f"obs/{name}", attributes={"encoding-type": kind})
        group.create_array("values", data=values)
        group.create_array("mask", data=missing)
    text = root.create_array("obs/donor", shape=(8,), dtype=str)
    text[:] = np.array(list("aabbaabb"), dtype=object)
    options = {"sample_axis": 0, "batch_size": 8, "shuffle": False, "remainder": "uneven", "with_index": True}
    (batch,) = sl.StreamingDataset(tmp_path / "t.zarr", fields=["X", "obs/genes", "obs/passed"], **options)
    for name, values in columns.items():
        np.testing.assert_array_equal(batch[f"obs/{name}"], np.where(missing, np.nan, values))
    scaled = {"fields": ["obs/genes"], "normalize": {"obs/genes": (1, 2)}}
    (alone,) = sl.StreamingDataset(tmp_path / "t.zarr", **scaled, **options)
    np.testing.assert_allclose(alone["obs/genes"], (np.where(missing, np.nan, np.arange(8)) - 1) / 2)
    where = "'obs/genes' > 1 and 'obs/donor' == 'b'"
    some = sl.StreamingDataset(tmp_path / "t.zarr", fields=["X"], where=where, **{**options, "batch_size": 1})
    assert [int(batch["index"]) for batch in some] == [2, 3, 6]


def test_a_matrix_in_columns_is_an_error_without_fields_too(tmp_path):
    root = zarr.open_group(tmp_path / "t.zarr", mode="w")
    root.create_group("X", attributes={"encoding-type": "csc_matrix", "shape": [8, 3]})
    root.create_array("y", data=np.arange(8))
    with pytest.raises(errors.FormatError, match=r"'X' is stored by columns; write it by rows: matrix\.tocsr\(\)"):
        sl.StreamingDataset(tmp_path / "t.zarr", batch_size=1, sample_axis=0)


BAD = {
    "columns": ({"fields": ["layers/by_column"]}, errors.FormatError, "stored by columns"),
    "windows": ({"fields": ["X"], "windows": sl.Window(2)}, errors.UsageError, "'X', a sparse matrix"),
    "patches": ({"fields": ["X"], "patches": sl.Patch({"axis_1": 2})}, errors.UsageError, "'X', a sparse matrix"),
    "normalize": ({"fields": ["X"], "normalize": {"X": (0, 2)}}, errors.UsageError, "'X', a sparse matrix"),
    "lengths": ({"fields": ["X", "var/_index/mask"]}, errors.FieldError, "different lengths"),
    "columns as samples": (
        {"fields": ["X"], "sample_axis": 1},
        errors.UsageError,
        "sample_axis=1 of 'X', a sparse matrix",
    ),
    "no such axis": ({"fields": ["X"], "sample_axis": "obs"}, errors.UsageError, "sample_axis='obs' of 'X'"),
    "unknown": ({"fields": ["Y"]}, errors.FieldError, "no array 'Y'"),
    "group": ({"fields": ["obs"]}, errors.FieldError, "'obs' of .* is a group, a dataframe"),
    "texts": ({"fields": ["var/_index/values"]}, errors.FormatError, r"holds text \((string|variable_length_utf8)\)"),
    "nullable texts": ({"fields": ["var/_index"]}, errors.FieldError, "is a group, a nullable-string-array"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_declarations_of_tables_are_clear_errors(case):
    options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        sl.StreamingDataset(TABLES[1], batch_size=2, **{"sample_axis": 0, **options})


@pytest.mark.parametrize("change", ["descends", "begins above 0", "ends too late", "is gone", "has other indices"])
def test_damaged_matrices_are_clear_errors(tmp_path, change):
    shutil.copytree(TABLES[0], tmp_path / "t.zarr")
    group = zarr.open_group(tmp_path / "t.zarr" / "X", mode="a")
    rows = group["indptr"][:]
    if change == "is gone":
        shutil.rmtree(tmp_path / "t.zarr" / "X" / "indptr")
    elif change == "has other indices":
        metadata = tmp_path / "t.zarr" / "X" / "indices" / ".zarray"
        metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "shape": [191]}))
    else:
        at, value = {"descends": (5, rows[-1]), "begins above 0": (0, 1), "ends too late": (-1, rows[-1] + 1)}[change]
        group["indptr"][at] = value
    with pytest.raises((errors.FormatError, errors.FieldError), match="X"):
        sl.StreamingDataset(tmp_path / "t.zarr", batch_size=2, sample_axis=0, fields=["X"])
