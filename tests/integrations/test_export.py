"""Exports: the tools of each format read back every sample, and `convert` makes the same dataset of the files again."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import webdataset
import xarray
import zarr
from datasets import encoded, picture
from servers import S3Server

from streamloader import dataset, errors
from streamloader.cli import export as cli_export
from streamloader.cli.main import main
from streamloader.conversion.after.export import FORMATS, Exported, export
from streamloader.conversion.after.exports.webdataset import suffix_of
from streamloader.conversion.job import convert
from streamloader.dataset import Dataset
from streamloader.format.manifest import DTYPES, Field
from streamloader.format.writer import Writer
from streamloader.options import Layout
from streamloader.storage import open_store

KINDS = {
    **{f"v_{dtype}": f"{dtype}[3]" for dtype in DTYPES},
    "big": "float32[4,5,30]",
    "boxes": "ragged:float32[4]",
    "caption": "text",
    "image": "bytes:jpeg",
    "label": "int64",
    "raw": "bytes",
    "small": "uint8",
    "tokens": "ragged:uint16",
}
FIXED = [name for name, kind in KINDS.items() if Field.parse(kind).fixed]
COUNT = 50


def value(name: str, i: int) -> Any:
    """The value of a field of sample i."""
    rng = np.random.default_rng([i, len(name)])
    if name.startswith("v_"):
        return (np.arange(3) * i % 100 > 30) if name == "v_bool" else (np.arange(3) * i % 100).astype(name[2:])
    return {
        "big": lambda: rng.random((4, 5, 30), np.float32),
        "boxes": lambda: rng.random(((i + 1) % 4, 4), np.float32),
        "caption": lambda: f"caption ä {i}" if i % 7 else "",
        "image": lambda: encoded(picture(i), "jpeg"),
        "label": lambda: np.int64(i - 2**40),
        "raw": lambda: bytes([i]) * (i % 5),
        "small": lambda: np.uint8(i),
        "tokens": lambda: np.arange(i % 6 + 1, dtype=np.uint16),
    }[name]()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of every kind of field in four shards."""
    place = tmp_path_factory.mktemp("export") / "data"
    with Writer(place, KINDS, layout=Layout(samples_per_shard=16, chunk_size=2048), num_samples=COUNT) as out:
        for i in range(COUNT):
            out.write({name: value(name, i) for name in KINDS})
    return str(place)


@pytest.fixture
def piecewise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces as small as a shard."""
    monkeypatch.setattr("streamloader.conversion.after.export.FEW_BYTES", 0)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray | np.generic):
        one, other = np.asarray(one), np.asarray(other)
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


def assert_same(found: Dataset, source: Dataset, names: dict[str, str] | None = None) -> None:
    """Assert that every sample is the same; `names` gives a field of the source the name that it has now."""
    assert len(found) == len(source)
    for i in range(len(source)):
        one, other = source[i], found[i]
        for name in source.fields if names is None else names:
            assert equal(one[name], other[(names or {}).get(name, name)]), (name, i)


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")  # its own
@pytest.mark.usefixtures("piecewise")
def test_webdataset_reads_every_sample(url: str, tmp_path: Path) -> None:
    done = export(url, tmp_path / "out", format="webdataset")
    assert (done.files, done.done, done.total) == (4, COUNT, COUNT)
    tars = sorted(map(str, (tmp_path / "out").iterdir()))
    assert [Path(tar).name for tar in tars] == [f"shard-{i:06}.tar" for i in range(4)]
    assert done.bytes == sum(Path(tar).stat().st_size for tar in tars)
    samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == [f"{i:09}" for i in range(COUNT)]
    for i, sample in enumerate(samples):
        assert set(sample) - {"__key__", "__url__", "__local_path__"} == {
            *(f"{name}.npy" for name in KINDS if name.startswith("v_")),
            *("big.npy", "boxes.npy", "tokens.npy", "small.npy"),
            *("caption.txt", "image.jpg", "label.cls", "raw.bin"),
        }
        for name in ("big", "boxes", "tokens", "small", "v_bool", "v_float16", "v_uint64"):
            assert equal(np.asarray(value(name, i)), sample[f"{name}.npy"])
        assert sample["caption.txt"] == value("caption", i)
        assert sample["label.cls"] == value("label", i)
        assert sample["raw.bin"] == value("raw", i)
        assert sample["image.jpg"] == value("image", i)


def test_a_converted_tar_gives_the_same_samples(url: str, tmp_path: Path) -> None:
    export(url, tmp_path / "tars", format="webdataset")
    ragged = {"tokens_npy": "ragged:uint16", "boxes_npy": "ragged:float32[4]"}  # the first sample alone does not tell
    others = ["image_jpg", "caption_txt", "label_cls", "raw_bin", "small_npy", "big_npy", "v_float16_npy"]
    fields = ragged | dict.fromkeys(others)
    convert(tmp_path / "tars", tmp_path / "back", fields=fields, workers=0)
    back = dataset.open(tmp_path / "back")
    names = {name.rpartition("_")[0]: name for name in back.fields}
    assert_same(back, dataset.open(url), names)
    assert (str(back.fields["image_jpg"]), str(back.fields["label_cls"])) == ("bytes:jpeg", "int64")


def test_fields_that_have_the_names_of_members_keep_them(tmp_path: Path) -> None:
    kinds = {
        "jpg": "bytes:jpeg",
        "cls": "int64",
        "txt": "text",
        "seg_png": "bytes:png",
        "id": "int64",
        "emb_npy": "float32[2]",
    }
    with Writer(tmp_path / "data", kinds) as out:
        for i in range(9):
            image = {"jpg": encoded(picture(i), "jpeg"), "seg_png": encoded(picture(i), "png")}
            out.write({**image, "cls": i, "txt": f"{i}", "id": -i, "emb_npy": np.full(2, i, np.float32)})
    export(tmp_path / "data", tmp_path / "tars", format="webdataset")
    convert(tmp_path / "tars", tmp_path / "back", workers=0)
    back = dataset.open(tmp_path / "back")
    assert back.fields == dataset.open(tmp_path / "data").fields
    assert_same(back, dataset.open(tmp_path / "data"))


@pytest.mark.parametrize(
    ("name", "kind", "suffix"),
    [
        ("image", "bytes:jpeg", "image.jpg"),
        ("jpeg", "bytes:jpeg", "jpeg"),
        ("photo_jpeg", "bytes:jpeg", "photo.jpeg"),
        ("a__b_png", "bytes:png", "a__b_png.png"),  # a__b.png would come back as a_b_png
        ("png", "bytes:jpeg", "png.jpg"),
        ("sound", "bytes:flac", "sound.flac"),
        ("raw", "bytes", "raw.bin"),
        ("notes", "bytes:json", "notes.bin"),  # .json would come back as text
        ("json", "text", "json"),
        ("label", "int64", "label.cls"),
        ("label", "int32", "label.npy"),
        ("index", "int64", "index"),
        ("tokens", "ragged:int32", "tokens.npy"),
    ],
)
def test_suffixes_of_members(name: str, kind: str, suffix: str) -> None:
    assert suffix_of(name, Field.parse(kind)) == suffix


def test_two_fields_of_one_suffix_are_refused(tmp_path: Path) -> None:
    with Writer(tmp_path / "data", {"a": "int64", "a_cls": "int64"}) as out:
        out.write({"a": 1, "a_cls": 2})
    with pytest.raises(errors.FieldError, match=r"'a' and 'a_cls' would both have members \.a\.cls"):
        export(tmp_path / "data", tmp_path / "tars", format="webdataset")
    assert not (tmp_path / "tars").exists()
    assert export(tmp_path / "data", tmp_path / "tars", format="webdataset", fields=["a"]).done == 1


def test_exports_are_the_same_bytes_each_time(url: str, tmp_path: Path) -> None:
    for kind in ("webdataset", "npz", "parquet", "zarr"):
        names = FIXED if kind == "npz" else None
        for place in ("one", "two"):
            export(url, tmp_path / kind / place, format=kind, fields=names)
        files = [sorted((tmp_path / kind / place).rglob("*")) for place in ("one", "two")]
        pairs = [(one, two) for one, two in zip(*files, strict=True) if one.is_file()]
        assert pairs
        assert all(one.read_bytes() == two.read_bytes() for one, two in pairs)
    with tarfile.open(tmp_path / "webdataset" / "one" / "shard-000000.tar") as tar:
        assert {(member.mtime, member.uid, member.uname) for member in tar} == {(0, 0, "")}


@pytest.mark.usefixtures("piecewise")
def test_parquet_has_every_sample(url: str, tmp_path: Path) -> None:
    done = export(url, tmp_path / "out", format="parquet")
    assert done.files == 4
    table = pyarrow.parquet.read_table(tmp_path / "out")
    assert table.num_rows == COUNT
    kinds = {name: str(table.schema.field(name).type) for name in ("big", "boxes", "caption", "raw", "v_bool", "label")}
    assert kinds == {
        "big": "fixed_size_list<element: fixed_size_list<element: fixed_size_list<element: float>[30]>[5]>[4]",
        "boxes": "list<element: fixed_size_list<element: float>[4]>",
        "caption": "string",
        "raw": "binary",
        "v_bool": "fixed_size_list<element: bool>[3]",
        "label": "int64",
    }
    for i, row in enumerate(table.to_pylist()):
        for name, found in row.items():
            wanted = value(name, i)
            assert found == (wanted.tolist() if isinstance(wanted, np.ndarray | np.generic) else wanted), (name, i)


def test_a_converted_parquet_gives_the_same_samples(url: str, tmp_path: Path) -> None:
    export(url, tmp_path / "out", format="parquet")
    convert(tmp_path / "out", tmp_path / "back", workers=0)
    back = dataset.open(tmp_path / "back")
    assert {name: str(kind) for name, kind in back.fields.items()} == {name: KINDS[name] for name in sorted(KINDS)}
    assert_same(back, dataset.open(url))


@pytest.mark.usefixtures("piecewise")
def test_npz_has_the_fields_of_fixed_shape_and_refuses_others(url: str, tmp_path: Path) -> None:
    with pytest.raises(errors.FieldError, match=r"'boxes' is ragged:float32\[4\].*--fields big,label,small,v_bool"):
        export(url, tmp_path / "out", format="npz")
    assert not (tmp_path / "out").exists()
    export(url, tmp_path / "out", format="npz", fields=FIXED)
    parts = [np.load(path) for path in sorted((tmp_path / "out").iterdir())]
    assert len(parts) == 4
    for name in FIXED:
        assert equal(np.concatenate([part[name] for part in parts]), np.stack([value(name, i) for i in range(COUNT)]))


def test_a_dataset_that_is_small_becomes_one_npz_that_converts_again(url: str, tmp_path: Path) -> None:
    export(url, tmp_path / "out", format="npz", fields=FIXED)
    convert(tmp_path / "out" / "part-00000.npz", tmp_path / "back", workers=0)
    assert_same(dataset.open(tmp_path / "back"), dataset.open(url), {name: name for name in FIXED})


def test_an_array_may_be_called_as_an_argument_of_numpy(tmp_path: Path) -> None:
    with Writer(tmp_path / "data", {"file": "int64", "allow_pickle": "int64"}) as out:
        out.write({"file": 1, "allow_pickle": 2})
    export(tmp_path / "data", tmp_path / "out", format="npz")
    assert dict(np.load(tmp_path / "out" / "part-00000.npz")) == {"allow_pickle": [2], "file": [1]}


@pytest.mark.usefixtures("piecewise")
def test_zarr_python_and_xarray_read_a_zarr(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamloader.conversion.after.exports.zarr.CHUNK_BYTES", 8192)
    export(url, tmp_path / "out", format="zarr")
    group = zarr.open_group(tmp_path / "out", mode="r")
    assert sorted(group.array_keys()) == sorted(KINDS)
    assert (group["big"].chunks, group["big"].shards) == ((2, 4, 5, 30), None)
    for name in KINDS:
        found = group[name][:]
        assert len(found) == COUNT
        for i in range(COUNT):
            wanted = value(name, i)
            if name in ("boxes", "tokens"):
                assert found[i] == wanted.tobytes()
                assert dict(group[name].attrs)["streamloader"]["dtype"] == wanted.dtype.name
            else:
                assert equal(wanted, found[i]), name
    with xarray.open_zarr(tmp_path / "out") as opened:
        assert opened.sizes["sample"] == COUNT
        assert equal(opened["big"].values, np.stack([value("big", i) for i in range(COUNT)]))


def test_a_converted_zarr_gives_the_same_samples(url: str, tmp_path: Path) -> None:
    names = [*FIXED, "caption"]
    export(url, tmp_path / "out.zarr", format="zarr", fields=names)
    convert(tmp_path / "out.zarr", tmp_path / "back", workers=0)
    assert_same(dataset.open(tmp_path / "back"), dataset.open(url), {name: name for name in names})


@pytest.mark.parametrize("kind", ["webdataset", "parquet", "npz", "zarr"])
def test_a_dataset_without_samples_is_exported_too(kind: str, tmp_path: Path) -> None:
    Writer(tmp_path / "data", {"x": "float32[2]", "y": "int64"}).close()
    assert export(tmp_path / "data", tmp_path / "out", format=kind).total == 0
    if kind == "parquet":
        table = pyarrow.parquet.read_table(tmp_path / "out")
        assert (table.num_rows, table.column_names) == (0, ["x", "y"])
    elif kind == "zarr":
        assert zarr.open_group(tmp_path / "out", mode="r")["x"].shape == (0, 2)
    elif kind == "npz":
        assert np.load(tmp_path / "out" / "part-00000.npz")["x"].shape == (0, 2)
    else:
        with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
            assert tar.getnames() == []


def test_a_place_that_is_not_empty_is_left_alone(url: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(errors.DestinationError, match="not empty"):
        export(url, tmp_path / "out", format="zarr")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    with pytest.raises(errors.DestinationError, match="lies in the dataset"):
        export(url, f"{url}/export", format="zarr")
    with pytest.raises(errors.UsageError):
        export(url, tmp_path / "other", format="csv")
    with pytest.raises(errors.FieldError, match="no field 'z'"):
        export(url, tmp_path / "other", format="zarr", fields=["z"])


def test_a_damaged_dataset_is_an_error_that_names_the_chunk(tmp_path: Path) -> None:
    with Writer(tmp_path / "data", {"t": "text"}) as out:
        out.write({"t": "abc"})
    path = tmp_path / "data" / "t" / "c" / "0"
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.CorruptError, match="chunk 0 of"):
        export(tmp_path / "data", tmp_path / "out", format="webdataset")


def test_a_split_is_exported_from_a_bucket_to_a_bucket(moto: S3Server, tmp_path: Path) -> None:
    np.savez(tmp_path / "it.npz", x=np.arange(100))
    url, options = moto.url(), moto.storage_options
    convert(tmp_path / "it.npz", f"{url}/data", split="train=0.75,val=0.25", workers=0, storage_options=options)
    seen: list[Exported] = []
    with pytest.raises(errors.FieldError, match="splits train, val"):
        export(f"{url}/data", f"{url}/out", format="npz", storage_options=options)
    done = export(f"{url}/data", f"{url}/out", format="npz", split="val", storage_options=options, progress=seen.append)
    assert (done.total, seen[-1]) == (25, done)
    store = open_store(f"{url}/out", options)
    (info,) = store.list()
    stored = np.load(io.BytesIO(store.get(info.path)))["x"]
    assert stored.tolist() == dataset.open(f"{url}/data", split="val", storage_options=options)[:]["x"].tolist()
    local = export(f"{url}/data", tmp_path / "local", format="npz", split="train", storage_options=options)
    assert local.total == 75


def test_the_command_knows_every_format() -> None:
    assert set(cli_export.FORMATS) == set(FORMATS)


def test_the_command_exports_and_says_so(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in (
        ([url, str(tmp_path / "out"), "--format", "npz", "--fields", "label, small"], 0),
        ([url, str(tmp_path / "out"), "--format", "npz", "--fields", "label"], 2),
        ([url, str(tmp_path / "other"), "--format", "npz", "--fields", "label", "--quiet"], 0),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["export", *arguments])
        assert int(ended.value.code or 0) == status
        out, err = capsys.readouterr()
        if "--quiet" in arguments:
            assert (out, err) == ("", "")
        elif status:
            assert (out, err.startswith("error: "), "is not empty" in err) == ("", True, True)
        else:
            assert out.startswith(f"exported {COUNT} samples to {tmp_path / 'out'}: ")
            assert "export: 50 of 50 samples" in err
    assert set(np.load(tmp_path / "out" / "part-00000.npz")) == {"label", "small"}
