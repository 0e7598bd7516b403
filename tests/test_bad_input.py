"""Bad sources, by `sl.convert` on real files: each is a dataset in the end, or one error that names what is wrong."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversions import contents
from sources import npy_bytes, tar

import streamloader as sl
from streamloader.errors import StreamloaderError

Make = Callable[[Path], Any]


def table(**columns):
    """Make a Parquet file of these columns."""
    return lambda root: pq.write_table(pa.table(columns), root / "it.parquet")


def text(name, content):
    return lambda root: (root / name).write_text(content)


def tarred(members, cut=None):
    def make(root):
        tar(root / "it.tar", members)
        (root / "it.tar").write_bytes((root / "it.tar").read_bytes()[:cut])

    return make


def vectors(*lengths):
    """Return members of a tar: one vector of each length."""
    return {f"{i}.npy": npy_bytes(np.full(length, i, np.float32)) for i, length in enumerate(lengths)}


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return open, (self._path, "w")


def pickled(root):
    np.save(root / "it.npy", np.array([Trap(root.parent / "sprung")], object), allow_pickle=True)


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


MAP = pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))

REFUSED = {
    "an empty folder": (lambda root: None, "nothing is at .*src"),
    "an empty tar": (tarred({}), "src hold no sample"),
    "a csv of nothing": (text("it.csv", ""), r"it\.csv is empty"),
    "a csv of names alone": (text("it.csv", "a,b\n"), "src holds no row"),
    "an empty jsonl": (text("it.jsonl", ""), "src holds no sample"),
    "a parquet of nothing": (text("it.parquet", ""), r"it\.parquet cannot be read as Parquet"),
    "an npy of nothing": (text("it.npy", ""), r"it\.npy is not a readable \.npy"),
    "shapes in a tar": (tarred(vectors(3, 4)), r"it\.tar: 1: field 'npy' .*\(4,\), expected \(3,\); .*ragged:float32"),
    "a tar's sample lacks a field": (
        tarred({"1.cls": b"1", "1.txt": b"a", "2.cls": b"2"}),
        r"sample '2' of .*it\.tar has \.cls; the first sample has",
    ),
    "a line lacks a field": (text("it.jsonl", '{"a": 1, "b": 2}\n{"a": 1}\n'), "'b' of .* is missing"),
    "a cell is empty": (text("it.csv", "a,b\n1,2\n3,\n"), r"it\.csv:3: its column 'b' is empty"),
    "a null": (table(x=[1, None]), "'x'.* null"),
    "a key twice": (tarred({"1.cls": b"1", "2.cls": b"2", "1.CLS": b"3"}), r"key '1' occurs twice, .*it\.tar"),
    "a tar cut in a member": (tarred({"1.bin": b"x" * 9000}, 5000), r"it\.tar is truncated: its member 1\.bin"),
    "a tar cut between members": (tarred({"1.cls": b"1", "2.cls": b"2"}, 1024), r"it\.tar is truncated: it ends at"),
    "a map": (table(m=MAP), r"holds 'm' \(map<.*leave it out"),
    "a list of lists": (table(x=[[[1], [2, 3]]]), r"holds 'x' \(list<.*fields=.x=float32\[2,3\]"),
    "a list of structs": (table(x=[[{"a": 1}]]), r"holds 'x' \(list<.*struct"),
    "pickled objects": (pickled, r"it\.npy holds pickled objects"),
    "pickled objects in a tar": (tarred({"1.npy": npy_bytes(np.array([{}], object))}), r"1\.npy: it is not an \.npy"),
    "a link in a zip": (zipped("a.npy", link=True), r"it\.npz:a is not a readable \.npy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_named_and_nothing_is_written(case, tmp_path):
    make, told = REFUSED[case]
    src = placed(make, tmp_path / "src")
    before = contents(tmp_path)
    with pytest.raises(StreamloaderError, match=told) as error:
        sl.convert(src, tmp_path / "out", workers=0)
    assert error.value.remedy
    assert contents(tmp_path) == before


def zeros(root):
    np.save(root / "x.npy", np.zeros((0, 3)))


CONVERTED = {
    "an npy without rows": (zeros, {}, {"x": "float64[3]"}, []),
    "a parquet without rows": (table(x=pa.array([], pa.int64())), {}, {"x": "int64"}, []),
    "shapes in a ragged field": (
        tarred(vectors(1, 2)),
        {"fields": "npy=ragged:float32"},
        {"npy": "ragged:float32"},
        [{"npy": [0.0]}, {"npy": [1.0, 1.0]}],
    ),
    "a struct": (table(s=[{"a": 1, "b": {"c": ""}}]), {}, {"s_a": "int64", "s_b_c": "text"}, [{"s_a": 1, "s_b_c": ""}]),
    "a list": (table(x=[[1, 2], [3]]), {}, {"x": "ragged:int64"}, [{"x": [1, 2]}, {"x": [3]}]),
    "beside a map": (table(m=MAP, y=[7]), {"fields": "y"}, {"y": "int64"}, [{"y": 7}]),
    "climbing names in a zip": (
        zipped("../up.npy", "/etc/abs.npy"),
        {},
        {"up": "int64", "etc_abs": "int64"},
        [{"up": 0, "etc_abs": 0}, {"up": 1, "etc_abs": 1}],
    ),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_what_can_be_converted_is_there_and_nothing_beside_it(case, tmp_path):
    make, options, fields, samples = CONVERTED[case]
    src = placed(make, tmp_path / "a" / "src")
    before = contents(tmp_path)
    sl.convert(src, tmp_path / "a" / "out", workers=0, **options)
    ds = sl.open(tmp_path / "a" / "out")
    assert {name: str(field) for name, field in ds.fields.items()} == fields
    assert [{name: plain(value) for name, value in ds[i].items()} for i in range(len(ds))] == samples
    assert {path: data for path, data in contents(tmp_path).items() if not path.startswith("a/out/")} == before


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@pytest.mark.parametrize("samples", [[], iter(())], ids=["list", "iterator"])
def test_an_iterable_without_samples_is_refused_and_nothing_is_written(samples, tmp_path):
    with pytest.raises(StreamloaderError, match=r"(has|gives) no sample; give at least one"):
        sl.convert(samples, tmp_path / "out", workers=0)
    assert not list(tmp_path.iterdir())
