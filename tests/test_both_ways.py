"""`to_xarray()` and `to_dask()`: the values of `sl.open(url)[a:b]`, lazily, with its errors and its options.

`test_oracles.py` has the readers of others, of datasets with several shards: xarray, dask, TensorStore, zarrs and
zarr-python.
"""

import pickle
import subprocess
import sys
import uuid

import dask
import numpy as np
import pytest
import xarray
from datasets import FIELDS, SMALL, value, write
from format_data import Counting
from golden import assert_same

import streamloader as sl
from streamloader.format.dataset import Dataset
from streamloader.format.opening import Opened, open_root
from streamloader.storage import open_store

COUNT = 150  # three shards of `x`


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(scope="module", params=["file", "memory", "s3"])
def stored(request, tmp_path_factory):
    """A dataset of every field kind, and its storage options."""
    if request.param == "s3":
        server = request.getfixturevalue("moto")
        url, options = server.url(), server.storage_options
    else:
        folder = {"file": tmp_path_factory.mktemp("both").as_uri(), "memory": f"memory://{uuid.uuid4().hex}"}
        url, options = f"{folder[request.param]}/data", None
    write(url, COUNT, options=options)
    return url, options


def counted(url):
    """Open a dataset with a store that keeps the ranges it is asked for."""
    opened = open_root(open_store(url))
    counting = Counting(opened.store)
    return Dataset(Opened(opened.manifest, counting, ())), counting  # type: ignore[arg-type]


def shards_read(counting):
    return sorted({path for path, _, _ in counting.reads})


@pytest.mark.quick(2)
def test_both_have_the_values_of_every_field(stored):
    url, options = stored
    ds = sl.open(url, storage_options=options)
    wanted, arrays, lazy = ds[:], ds.to_dask(), ds.to_xarray()
    assert ds.manifest.fields["x"].num_shards(COUNT) == 3
    assert set(arrays) == set(lazy.data_vars) == set(FIELDS)
    assert lazy.sizes["sample"] == COUNT
    for name, column in wanted.items():
        shard = min(ds.manifest.fields[name].shard, COUNT)
        assert arrays[name].chunks[0][0] == lazy[name].chunks[0][0] == shard
        for found in (arrays[name].compute(), lazy[name].values):
            assert found.dtype == arrays[name].dtype == lazy[name].dtype
            assert_same(found if ds.fields[name].fixed else found.tolist(), column)


@pytest.mark.parametrize(
    "index",
    [slice(60, 70), slice(0, 0), slice(3, 140, 7), slice(None, None, -9), 5, -1, [1, 70, 2], [], slice(64, 128)],
)
def test_an_index_selects_as_numpy_does(index, data):
    ds = sl.open(data(COUNT))
    arrays = ds.to_dask()
    for name in ("x", "label", "raw", "tok"):
        column = np.fromiter((value(name, i) for i in range(COUNT)), object, COUNT)
        found = arrays[name][index].compute()
        if isinstance(index, int):
            fixed = ds.fields[name].fixed
            assert_same(found if fixed else found.item(), np.asarray(column[index]) if fixed else column[index])
        else:
            assert found.dtype == arrays[name].dtype
            assert found.shape == (len(column[index]), *ds.fields[name].shape[: name == "x"])
            assert_same(list(found), list(column[index]))
    wide = np.stack([value("wide", i) for i in range(COUNT)])
    assert_same(arrays["wide"][index, 3, 2:9:2].compute(), wide[index, 3, 2:9:2])


def test_xarray_has_dimensions_attributes_and_equal_blocks(tmp_path):
    fields = {"clip": "bytes:flac", "mel": "float32[8,200]", "label": "int8", "boxes": "ragged:float32[4]"}
    with sl.Writer(tmp_path / "d", fields, layout=SMALL, provenance={"classes": {"label": ["cat", "dog"]}}) as out:
        for i in range(COUNT):
            out.write({"clip": b"x", "mel": np.full((8, 200), i), "label": i % 2, "boxes": np.zeros((i % 3, 4))})
    lazy = sl.open(tmp_path / "d").to_xarray()
    plain = xarray.open_zarr(tmp_path / "d")
    assert {name: one.dims for name, one in lazy.items()} == {name: one.dims for name, one in plain.items()}
    assert lazy["mel"].dims == ("sample", "mel_0", "mel_1")
    assert lazy["clip"].attrs == {"kind": "bytes", "encoding": "flac"}
    assert lazy["label"].attrs == {"kind": "tensor", "classes": ["cat", "dog"]}
    assert lazy["boxes"].attrs == {"kind": "ragged"}
    assert len(lazy["mel"].chunks[0]) > len(lazy["label"].chunks[0]) == 1
    even = lazy.unify_chunks()
    assert even["label"].chunks[0] == even["mel"].chunks[0] == even.chunks["sample"]
    assert float((even["mel"][:, 0, 0] * even["label"]).sum()) == sum(range(1, COUNT, 2))


def test_a_slice_across_blocks_reads_only_the_chunks_that_it_needs(data):
    ds, counting = counted(data(COUNT))
    lazy = ds.to_xarray()
    assert counting.reads == []
    (first, second, _), chunk = lazy["x"].chunks[0], ds.manifest.fields["x"].chunk
    assert first > chunk
    assert_same(lazy["x"][first - 1 : first + 1].values, np.stack([value("x", first - 1), value("x", first)]))
    layout = ds.manifest.fields["x"]
    assert shards_read(counting) == ["x/c/0/0", "x/c/1/0"]
    assert sum(stop - start for _, start, stop in counting.reads) == 2 * (chunk * layout.field.item_bytes + 4)
    counting.reads.clear()
    ds.to_dask()["x"][first : first + second].compute()
    assert shards_read(counting) == ["x/c/1/0"]


def test_a_missing_or_damaged_shard_is_an_error_and_never_zeros(tmp_path):
    write(tmp_path / "d", COUNT, ["x", "name"])
    (tmp_path / "d/x/c/1/0").unlink()
    ds = sl.open(tmp_path / "d")
    lazy = ds.to_xarray()
    assert_same(lazy["x"][3].values, value("x", 3))
    with pytest.raises(sl.errors.MissingObjectError, match="x/c/1/0 is missing"):
        lazy["x"].sum().compute()
    with pytest.raises(sl.errors.MissingObjectError):
        ds.to_dask()["x"][64:].compute(scheduler="threads", num_workers=2)
    assert (xarray.open_zarr(tmp_path / "d")["x"][70] == 0).all()  # which is why
    path = tmp_path / "d/name/c/0"
    path.write_bytes(b"\xff" * 40 + path.read_bytes()[40:])
    with pytest.raises(sl.errors.CorruptError, match="name/c/0"):
        lazy["name"].compute()


OTHER_PROCESS = """
import pickle, sys
arrays, lazy = pickle.load(sys.stdin.buffer)
print([len(one) for one in arrays["raw"][60:70].compute(scheduler="synchronous")])
print(float(lazy["x"].isel(sample=slice(60, 70)).max().compute(scheduler="synchronous")))
"""


@pytest.mark.quick(1)
def test_another_process_computes_what_was_pickled(stored):
    url, options = stored
    ds = sl.open(url, storage_options=options)
    ds[0]
    again, lazy = pickle.loads(pickle.dumps((ds.to_dask(), ds.to_xarray())))
    assert {name: array.name for name, array in again.items()} == {name: a.name for name, a in ds.to_dask().items()}
    assert_same(again["tok"][60:70].compute().tolist(), ds.read("tok", 60, 70))
    if not url.startswith("memory"):  # which is that of one process
        command = [sys.executable, "-c", OTHER_PROCESS]
        done = subprocess.run(command, input=pickle.dumps((again, lazy)), capture_output=True, check=True, timeout=300)
        lengths, largest = done.stdout.decode().splitlines()
        assert lengths == str([len(value("raw", i)) for i in range(60, 70)])
        assert float(largest) == float(value("x", 69).max())


def test_an_empty_dataset_has_empty_arrays(tmp_path):
    write(tmp_path / "d", 0, ["x", "name"])
    lazy = sl.open(tmp_path / "d").to_xarray().load()
    assert (lazy["x"].shape, lazy["x"].dtype, lazy["name"].shape) == ((0, 300), np.float32, (0,))


@pytest.mark.parametrize("missing", ["dask", "xarray"])
def test_a_missing_package_is_an_error_with_its_remedy(missing, data, monkeypatch):
    ds = sl.open(data(COUNT))
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(missing), *sys.meta_path])
    with pytest.raises(sl.errors.UsageError, match=rf"{missing}.* not installed here; .* 'dask\[array\]' xarray"):
        ds.to_xarray()


class Absent:
    """A finder that says that a package is not installed."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
