"""Other people's Zarr readers read what we write: zarr-python, zarrs, xarray, dask and TensorStore.

zarr-python, xarray and dask read every field. zarrs' own decoder and TensorStore read those of fixed shape; the
errors that they give for the others are pinned, so that the day they learn it is noticed.
"""

from typing import Any

import dask.array
import fsspec
import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from folder_server import folder_server
from golden import EXPECTED, GOLDEN, assert_same, expected_column
from zarr.storage import LocalStore, WrapperStore
from zarrs.pipeline import UnsupportedDataTypeError

import streamloader as sl

NAMES = sorted(EXPECTED)


def spec_of(name, field):
    return EXPECTED[name]["fields"][field]["spec"]


def is_fixed(name, field):
    return not spec_of(name, field).startswith(("bytes", "text", "ragged"))


def foreign(name, field):
    """Return an expected column as plain Zarr readers see it: ragged samples are their bytes."""
    column = expected_column(name, field)
    return [one.tobytes() for one in column] if spec_of(name, field).startswith("ragged") else column


def assert_foreign(name, field, found):
    """Fail unless what a Zarr reader gave is the expected column."""
    assert_same(found if is_fixed(name, field) else found.tolist(), foreign(name, field))


@pytest.mark.parametrize("name", NAMES)
def test_zarr_python_reads_every_field(name):
    group = zarr.open_consolidated(str(GOLDEN / name))
    for field in EXPECTED[name]["fields"]:
        array = group[field]
        assert_foreign(name, field, array[:])
        assert_foreign(name, field, zarr.open_array(str(GOLDEN / name / field), mode="r")[:])  # its own document
        assert array.metadata.dimension_names[0] == "sample"


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NAMES)
def test_zarr_python_reads_the_chunk_tables(name):
    """The tables are plain arrays: what they say adds up to the bytes that are stored."""
    group = zarr.open_consolidated(str(GOLDEN / name))
    manifest = group.attrs["streamloader"]
    for field, layout in manifest["fields"].items():
        generation = manifest.get("generation", 1)
        table = group[f"_streamloader/chunks{'' if generation == 1 else f'.{generation}'}/{field}"][:]
        chunks = layout["shard"] // layout["chunk"]
        indexes = len(table) * (16 * chunks + 4) + sum(size for _, _, size in layout.get("skips", []))
        assert table.shape == (-(-manifest["num_samples"] // layout["shard"]), chunks, 2)
        assert int(table[..., 0].sum()) + indexes == layout["stored"]


@pytest.mark.quick(21)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_zarrs_reads_every_field_of_fixed_shape_and_the_others_by_its_fallback(name, strict):
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": strict}):
        group = zarr.open_consolidated(str(GOLDEN / name))
        for field in EXPECTED[name]["fields"]:
            if not strict or is_fixed(name, field) or EXPECTED[name]["num_samples"] == 0:
                assert_foreign(name, field, group[field][:])
            else:
                with pytest.raises(UnsupportedDataTypeError):
                    group[field][:]


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", NAMES)
def test_xarray_reads_every_field(name):
    with xarray.open_zarr(GOLDEN / name, consolidated=True) as ds:
        assert set(ds.data_vars) == set(EXPECTED[name]["fields"])
        assert ds.sizes["sample"] == EXPECTED[name]["num_samples"]
        for field in EXPECTED[name]["fields"]:
            assert_foreign(name, field, ds[field].values)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", NAMES)
def test_dask_reads_every_field(name):
    for field in EXPECTED[name]["fields"]:
        lazy = dask.array.from_zarr(str(GOLDEN / name), component=field)
        assert_foreign(name, field, lazy.compute(scheduler="synchronous"))


@pytest.mark.parametrize("name", NAMES)
def test_tensorstore_reads_every_field_of_fixed_shape(name):
    for field in EXPECTED[name]["fields"]:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{GOLDEN / name / field}/"}}
        if is_fixed(name, field):
            found = tensorstore.open(spec).result()
            assert found.domain.labels[0] == "sample"
            assert_foreign(name, field, found.read().result())
        else:
            with pytest.raises(ValueError, match=r"\"data_type\": (string|(variable_length_)?bytes) data type is not"):
                tensorstore.open(spec).result()


def test_a_root_of_splits_is_one_tree_of_groups():
    root = zarr.open_consolidated(str(GOLDEN / "splits"))
    assert sorted(root.group_keys()) == ["train", "val"]
    for name in ("train", "val"):
        assert_foreign(f"splits/{name}", "label", root[f"{name}/label"][:])
        assert root[name].attrs["streamloader"]["digest"] == root.attrs["streamloader"]["splits"][name]["digest"]


@pytest.mark.long
def test_zarr_python_and_xarray_read_from_s3(moto):
    url = moto.url("golden")
    fs = fsspec.filesystem("s3", **moto.storage_options)
    for name in ("mixed", "variable"):
        fs.put(f"{GOLDEN / name}/", f"{url}/{name}/", recursive=True)
        group = zarr.open_group(f"{url}/{name}", mode="r", storage_options=moto.storage_options)
        for field in EXPECTED[name]["fields"]:
            assert_foreign(name, field, group[field][:])
    with xarray.open_zarr(f"{url}/mixed", storage_options=moto.storage_options) as ds:
        assert_foreign("mixed", "signal", ds["signal"].values)


class Counted(WrapperStore[Any]):
    """A store that keeps the keys it was asked for."""

    def __init__(self, store):
        super().__init__(store)
        self.keys = []

    async def get(self, key, prototype, byte_range=None):
        self.keys.append(key)
        return await super().get(key, prototype, byte_range)


def test_zarr_python_opens_a_dataset_and_all_its_arrays_by_one_get():
    store = Counted(LocalStore(GOLDEN / "tensors", read_only=True))
    group = zarr.open_group(store, mode="r", zarr_format=3, use_consolidated=True)
    assert len(list(group.arrays())) == 12
    assert group["a_int8"].shape == (5, 3)
    assert store.keys == ["zarr.json"]


def test_we_open_a_dataset_or_a_split_by_one_get():
    with folder_server(GOLDEN) as server:
        assert len(sl.open(f"{server.url}/tensors")) == 5
        assert len(sl.open(f"{server.url}/splits", split="val")) == 3
        assert server.paths == ["/tensors/zarr.json", "/splits/zarr.json"]


def test_every_kind_of_number_keeps_its_bits_in_all_readers():
    """NaN, -0.0 and subnormals are compared by their bytes above; this shows that they are in the data."""
    halves = expected_column("tensors", "a_float16")
    assert np.isnan(halves[0])
    assert np.signbit(halves[3])
    assert 0 < halves[4] < np.finfo("float16").tiny
