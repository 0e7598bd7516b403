"""Bad sources, each of which gives a dataset in the end, or one error that names what is wrong."""

import random
import shutil
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversions import contents
from sources import CASES, FORMATS, files, kinds_of, npy_bytes, opened, plain, tar_bytes

import streamloader as sl
from streamloader.errors import FieldError, StreamloaderError


def table(**columns):
    """Make a Parquet file of these columns."""
    return lambda root: pq.write_table(pa.table(columns), root / "it.parquet")


def tarred(members):
    return files({"it.tar": tar_bytes(members)})


class Trap:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return open, ("sprung", "w")


def zipped(*names, link=False):
    """Make an .npz with members of these names; a link has the mode of one, and its target as its bytes."""

    def make(root):
        with zipfile.ZipFile(root / "it.npz", "w") as file:
            for name in names:
                info = zipfile.ZipInfo(name)
                info.external_attr = (0o120777 if link else 0o100644) << 16
                file.writestr(info, b"/etc/passwd" if link else npy_bytes(np.arange(2)))

    return make


def placed(make, folder):
    """Make the source in a new folder and return what is to be converted: an .npz is one by itself."""
    folder.mkdir(parents=True)
    make(folder)
    return folder / "it.npz" if (folder / "it.npz").exists() else folder


REFUSED = {
    "an empty folder": (lambda root: None, "nothing exists at .*src"),
    "an empty tar": (tarred({}), "src hold no sample"),
    "an npy of nothing": (files({"it.npy": b""}), r"it\.npy is not a readable \.npy"),
    "a cell is empty": (files({"it.csv": b"a,b\n1,2\n3,\n"}), r"it\.csv:3: its column 'b' is empty"),
    "lines without values": (files({"it.jsonl": b'{}\n{"a": {}}\n'}), "the samples of .* are empty"),
    "pickled objects": (files({"it.npy": npy_bytes(np.array([Trap()], object))}), r"it\.npy holds pickled objects"),
    "a link in a zip": (zipped("a.npy", link=True), r"it\.npz:a is not a readable \.npy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_named_and_nothing_is_written(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a pickle would write
    make, message = REFUSED[case]
    src = placed(make, tmp_path / "src")
    before = contents(tmp_path)
    with pytest.raises(StreamloaderError, match=message) as error:
        sl.convert(src, tmp_path / "out", workers=0)
    assert error.value.remedy
    assert contents(tmp_path) == before


CONVERTED = {
    "an npy without rows": (files({"x.npy": npy_bytes(np.zeros((0, 3)))}), {}, {"x": "float64[3]"}, []),
    "a parquet without rows": (table(x=pa.array([], pa.int64())), {}, {"x": "int64"}, []),
    "shapes in a ragged field": (
        tarred({f"{i}.npy": npy_bytes(np.full(i + 1, i, np.float32)) for i in range(2)}),
        {"fields": "npy=ragged:float32"},
        {"npy": "ragged:float32"},
        [{"npy": [0.0]}, {"npy": [1.0, 1.0]}],
    ),
    "a struct": (table(s=[{"a": 1, "b": {"c": ""}}]), {}, {"s_a": "int64", "s_b_c": "text"}, [{"s_a": 1, "s_b_c": ""}]),
    "climbing names in a zip": (
        zipped("../up.npy", "/etc/abs.npy"),
        {},
        {"up": "int64", "etc_abs": "int64"},
        [{"up": 0, "etc_abs": 0}, {"up": 1, "etc_abs": 1}],
    ),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_what_can_be_converted_is_there_and_nothing_else_is_written(case, tmp_path):
    make, options, fields, samples = CONVERTED[case]
    src = placed(make, tmp_path / "a" / "src")
    before = contents(tmp_path)
    sl.convert(src, tmp_path / "a" / "out", workers=0, **options)
    ds = sl.open(tmp_path / "a" / "out")
    assert kinds_of(ds) == fields
    assert [{name: plain(value) for name, value in ds[i].items()} for i in range(len(ds))] == samples
    assert {path: data for path, data in contents(tmp_path).items() if not path.startswith("a/out/")} == before


@pytest.mark.parametrize("samples", [[], iter(())], ids=["list", "iterator"])
def test_an_iterable_without_samples_is_an_error_and_nothing_is_written(samples, tmp_path):
    with pytest.raises(StreamloaderError, match=r"has no samples?; give at least one"):
        sl.convert(samples, tmp_path / "out", workers=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("samples", "options"),
    [([{}, {}], {}), ([(), ()], {}), (iter([{}]), {}), ([{"x": 1}], {"map": lambda sample: {}})],
    ids=["dicts", "tuples", "iterator", "map"],
)
def test_samples_without_values_are_an_error_and_nothing_is_written(samples, options, tmp_path):
    with pytest.raises(StreamloaderError, match=r"the samples of .* are empty; give each at least one value"):
        sl.convert(samples, tmp_path / "out", workers=0, **options)
    assert not list(tmp_path.iterdir())


DAMAGED = {
    **dict.fromkeys(("npy/input/folder", "npy/input/stored.npz", "npy/input/compressed.npz", "parquet/input"), 100),
    **dict.fromkeys(("netcdf/input/classic.nc", "netcdf/input/fixed.nc", "netcdf/input/data.cdf"), 100),
    **dict.fromkeys(("arrow/input", "huggingface/input/train"), 300),
    **dict.fromkeys(("webdataset/input", "tfrecord/input", "mds/input/plain", "mds/input/zstd"), 40),
    **dict.fromkeys(("csv/input", "jsonl/input", "coco/input::/annotations/instances_train2017.json"), 40),
    **dict.fromkeys(("zarr/input/v2.zarr", "zarr/input/v3.zarr"), 20),
}


def damaged(data, rng):
    """Return data that are truncated, or have other bytes or numbers: mostly where headers and footers are."""

    start, stop = rng.choice([(0, len(data)), (0, len(data)), (0, 128), (len(data) - 200, len(data))])
    places = range(max(0, start), min(stop, len(data)))
    changed, at = bytearray(data), rng.choice(places)
    match rng.choice(["cut", "gap", "number", "bytes", "bytes"]):
        case "cut":
            del changed[at:]
        case "gap":
            del changed[at : at + rng.randrange(1, 40)]
        case "number":
            size = min(rng.choice([2, 4, 8]), len(data) - at)
            changed[at : at + size] = rng.choice([b"\xff", b"\0", b"\x7f"]) * size
        case "bytes":
            for _ in range(rng.choice([1, 1, 3, 20])):
                changed[rng.choice(places)] = rng.randrange(256)
    return bytes(changed)


@pytest.mark.quick(1)
@pytest.mark.parametrize("src", DAMAGED)
def test_damage_to_any_file_of_a_source_is_at_most_an_error_that_names_it(src, tmp_path):
    path, mark, inner = src.partition("::")
    copy = tmp_path / path.rpartition("/")[2]
    (shutil.copytree if (FORMATS / path).is_dir() else shutil.copy)(FORMATS / path, copy)
    whole = [(one, one.read_bytes()) for one in sorted([copy, *copy.rglob("*")]) if one.is_file()]
    errors = 0
    for seed in range(DAMAGED[src]):
        rng = random.Random(seed)
        file, data = rng.choice([(one, data) for one, data in whole if data])
        file.write_bytes(damaged(data, rng))
        try:
            source = opened(f"{copy}{mark}{inner}", CASES[src].fields)
            source.fragment(np.arange(min(source.num_samples, 1000)))(lambda _: None)
        except StreamloaderError as error:
            assert str(copy) in str(error) or isinstance(error, FieldError)  # which names the field
            assert error.remedy
            errors += 1
        file.write_bytes(data)
    assert errors > DAMAGED[src] / 20
