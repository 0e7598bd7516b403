"""Exports: the tools of each format read back every sample, and `convert` makes the same dataset of the files again."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import webdataset
import xarray
import zarr
from commands import run
from conversions import contents
from datasets import encoded, picture
from format_data import column_of, equal, public

import streamloader as sl
from streamloader.cli.datasets import FORMATS as CHOICES
from streamloader.format.manifest import DTYPES
from streamloader.maintenance.export import FORMATS, suffix_of
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
COUNT = 50
FIELDS = {name: sl.Field.parse(kind) for name, kind in KINDS.items()}
FIXED = [name for name, field in FIELDS.items() if field.fixed]
COLUMNS = {name: public(field, column_of(field, COUNT)) for name, field in FIELDS.items()}
COLUMNS["image"] = [encoded(picture(i), "jpeg") for i in range(COUNT)]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A dataset of every kind of field in four shards."""
    place = tmp_path_factory.mktemp("export") / "data"
    with sl.Writer(place, KINDS, layout=sl.Layout(samples_per_shard=16, chunk_size=2048), num_samples=COUNT) as out:
        out.write_batch(COLUMNS)
    return str(place)


@pytest.fixture
def piecewise(monkeypatch):
    """Pieces as small as a shard."""
    monkeypatch.setattr("streamloader.maintenance.export.MIN_BYTES", 0)


def assert_same(found, source, names=None):
    """Assert that every sample is the same; `names` gives a field of the source the name that it has now."""
    assert len(found) == len(source)
    for i in range(len(source)):
        one, other = source[i], found[i]
        for name in source.fields if names is None else names:
            assert equal(one[name], other[(names or {}).get(name, name)]), (name, i)


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")  # its own
@pytest.mark.usefixtures("piecewise")
def test_webdataset_reads_every_sample(url, tmp_path):
    done = sl.export(url, tmp_path / "out", format="webdataset")
    assert (done.files, done.num_samples) == (4, COUNT)
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
            assert equal(np.asarray(COLUMNS[name][i]), sample[f"{name}.npy"])
        for member in ("caption.txt", "label.cls", "raw.bin", "image.jpg"):
            assert sample[member] == COLUMNS[member.split(".")[0]][i]


def test_a_converted_tar_gives_the_same_samples(url, tmp_path):
    sl.export(url, tmp_path / "tars", format="webdataset")
    ragged = {"tokens_npy": "ragged:uint16", "boxes_npy": "ragged:float32[4]"}  # the first sample alone does not tell
    others = ["image_jpg", "caption_txt", "label_cls", "raw_bin", "small_npy", "big_npy", "v_float16_npy"]
    fields = ragged | dict.fromkeys(others)
    sl.convert(tmp_path / "tars", tmp_path / "back", fields=fields, workers=0)
    back = sl.open(tmp_path / "back")
    assert_same(back, sl.open(url), {name.rpartition("_")[0]: name for name in back.fields})
    assert (str(back.fields["image_jpg"]), str(back.fields["label_cls"])) == ("bytes:jpeg", "int64")


def test_fields_that_have_the_names_of_members_keep_them(tmp_path):
    kinds = {"jpg": "bytes:jpeg", "cls": "int64", "txt": "text", "seg_png": "bytes:png"}
    kinds |= {"id": "int64", "emb_npy": "float32[2]"}
    with sl.Writer(tmp_path / "data", kinds) as out:
        for i in range(9):
            image = {"jpg": encoded(picture(i), "jpeg"), "seg_png": encoded(picture(i), "png")}
            out.write({**image, "cls": i, "txt": f"{i}", "id": -i, "emb_npy": np.full(2, i, np.float32)})
    sl.export(tmp_path / "data", tmp_path / "tars", format="webdataset")
    sl.convert(tmp_path / "tars", tmp_path / "back", workers=0)
    back = sl.open(tmp_path / "back")
    assert back.fields == sl.open(tmp_path / "data").fields
    assert_same(back, sl.open(tmp_path / "data"))


SUFFIXES = [
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
]


@pytest.mark.parametrize(("name", "kind", "suffix"), SUFFIXES)
def test_suffixes_of_members(name, kind, suffix):
    assert suffix_of(name, sl.Field.parse(kind)) == suffix


def test_two_fields_of_one_suffix_are_an_error(tmp_path):
    with sl.Writer(tmp_path / "data", {"a": "int64", "a_cls": "int64"}) as out:
        out.write({"a": 1, "a_cls": 2})
    with pytest.raises(sl.errors.FieldError, match=r"'a' and 'a_cls' would both have members named \.a\.cls"):
        sl.export(tmp_path / "data", tmp_path / "tars", format="webdataset")
    assert not (tmp_path / "tars").exists()
    assert sl.export(tmp_path / "data", tmp_path / "tars", format="webdataset", fields="a").num_samples == 1


def test_exports_are_the_same_bytes_each_time(url, tmp_path):
    for kind in ("webdataset", "npz", "parquet", "zarr"):
        names = FIXED if kind == "npz" else None
        one, two = (tmp_path / kind / place for place in ("one", "two"))
        for place in (one, two):
            sl.export(url, place, format=kind, fields=names)
        assert contents(one) == contents(two) != {}
    with tarfile.open(tmp_path / "webdataset" / "one" / "shard-000000.tar") as tar:
        assert {(member.mtime, member.uid, member.uname) for member in tar} == {(0, 0, "")}


@pytest.mark.usefixtures("piecewise")
def test_parquet_has_every_sample(url, tmp_path):
    assert sl.export(url, tmp_path / "out", format="parquet").files == 4
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
            wanted = COLUMNS[name][i]
            assert found == (wanted.tolist() if isinstance(wanted, np.ndarray | np.generic) else wanted), (name, i)


READABLE = [("parquet", None, "out"), ("npz", FIXED, "out/part-00000.npz"), ("zarr", [*FIXED, "caption"], "out")]


@pytest.mark.parametrize(("kind", "names", "path"), READABLE)
def test_a_converted_export_gives_the_same_samples(kind, names, path, url, tmp_path):
    sl.export(url, tmp_path / "out", format=kind, fields=names)
    sl.convert(tmp_path / path, tmp_path / "back", workers=0)
    back = sl.open(tmp_path / "back")
    if names is None:
        assert {name: str(field) for name, field in back.fields.items()} == KINDS
    assert_same(back, sl.open(url), names and {name: name for name in names})


@pytest.mark.usefixtures("piecewise")
def test_npz_has_the_fields_of_fixed_shape_and_refuses_others(url, tmp_path):
    with pytest.raises(sl.errors.FieldError, match=r"'boxes' is ragged:float32\[4\].*fields=.big,label,small,v_bool"):
        sl.export(url, tmp_path / "out", format="npz")
    assert not (tmp_path / "out").exists()
    sl.export(url, tmp_path / "out", format="npz", fields=FIXED)
    parts = [np.load(path) for path in sorted((tmp_path / "out").iterdir())]
    assert len(parts) == 4
    for name in FIXED:
        assert equal(np.concatenate([part[name] for part in parts]), COLUMNS[name])


def test_an_array_may_be_called_as_an_argument_of_numpy(tmp_path):
    with sl.Writer(tmp_path / "data", {"file": "int64", "allow_pickle": "int64"}) as out:
        out.write({"file": 1, "allow_pickle": 2})
    sl.export(tmp_path / "data", tmp_path / "out", format="npz")
    assert dict(np.load(tmp_path / "out" / "part-00000.npz")) == {"allow_pickle": [2], "file": [1]}


@pytest.mark.usefixtures("piecewise")
def test_zarr_python_and_xarray_read_a_zarr(url, tmp_path, monkeypatch):
    monkeypatch.setattr("streamloader.maintenance.export.CHUNK_BYTES", 8192)
    sl.export(url, tmp_path / "out", format="zarr")
    group = zarr.open_group(tmp_path / "out", mode="r")
    assert sorted(group.array_keys()) == sorted(KINDS)
    assert (group["big"].chunks, group["big"].shards) == ((2, 4, 5, 30), None)
    for name in KINDS:
        found = group[name][:]
        assert len(found) == COUNT
        for i in range(COUNT):
            wanted = COLUMNS[name][i]
            if name in ("boxes", "tokens"):
                assert found[i] == wanted.tobytes()
                assert dict(group[name].attrs)["streamloader"]["dtype"] == wanted.dtype.name
            else:
                assert equal(wanted, found[i]), name
    with xarray.open_zarr(tmp_path / "out") as opened:
        assert opened.sizes["sample"] == COUNT
        assert equal(opened["big"].values, COLUMNS["big"])


@pytest.mark.parametrize("kind", ["webdataset", "parquet", "npz", "zarr"])
def test_a_dataset_without_samples_is_exported_too(kind, tmp_path):
    sl.Writer(tmp_path / "data", {"x": "float32[2]", "y": "int64"}).close()
    out = tmp_path / "out"
    assert sl.export(tmp_path / "data", out, format=kind).num_samples == 0
    if kind == "parquet":
        assert pyarrow.parquet.read_table(out).to_pydict() == {"x": [], "y": []}
    elif kind == "webdataset":
        with tarfile.open(out / "shard-000000.tar") as tar:
            assert tar.getnames() == []
    else:
        arrays = zarr.open_group(out, mode="r") if kind == "zarr" else np.load(out / "part-00000.npz")
        assert arrays["x"].shape == (0, 2)


def test_a_destination_that_is_not_empty_is_an_error(url, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(sl.errors.DestinationError, match="not empty"):
        sl.export(url, tmp_path / "out", format="zarr")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    with pytest.raises(sl.errors.DestinationError, match="is inside the dataset"):
        sl.export(url, f"{url}/export", format="zarr")
    with pytest.raises(sl.errors.UsageError):
        sl.export(url, tmp_path / "other", format="csv")
    with pytest.raises(sl.errors.FieldError, match="no field 'z'"):
        sl.export(url, tmp_path / "other", format="zarr", fields=["z"])


def test_a_damaged_dataset_is_an_error_that_names_the_chunk(tmp_path):
    with sl.Writer(tmp_path / "data", {"t": "text"}) as out:
        out.write({"t": "abc"})
    path = tmp_path / "data" / "t" / "c" / "0"
    path.write_bytes(path.read_bytes().replace(b"abc", b"abd"))
    with pytest.raises(sl.errors.CorruptError, match="chunk 0 of"):
        sl.export(tmp_path / "data", tmp_path / "out", format="webdataset")


def test_a_split_is_exported_from_a_bucket_to_a_bucket(moto, tmp_path):
    np.savez(tmp_path / "it.npz", x=np.arange(100))
    url, options = moto.url(), moto.storage_options
    sl.convert(tmp_path / "it.npz", f"{url}/data", split="train=0.75,val=0.25", workers=0, storage_options=options)
    seen = []
    with pytest.raises(sl.errors.FieldError, match="splits train, val"):
        sl.export(f"{url}/data", f"{url}/out", format="npz", storage_options=options)
    npz = {"format": "npz", "storage_options": options}
    done = sl.export(f"{url}/data", f"{url}/out", split="val", progress=seen.append, **npz)
    assert (done.num_samples, seen[-1].done, seen[-1].bytes) == (25, 25, done.bytes)
    store = open_store(f"{url}/out", options)
    (info,) = store.list()
    stored = np.load(io.BytesIO(store.get(info.path)))["x"]
    assert stored.tolist() == sl.open(f"{url}/data", split="val", storage_options=options)[:]["x"].tolist()
    local = sl.export(f"{url}/data", tmp_path / "local", format="npz", split="train", storage_options=options)
    assert local.num_samples == 75


def test_the_command_has_every_format():
    assert set(CHOICES) == set(FORMATS)


def test_the_command_exports_and_prints_a_summary(url, tmp_path, capsys):
    place, options = tmp_path / "out", ("--format", "npz", "--fields")
    status, out, err = run(capsys, "export", url, place, *options, "label, small")
    assert (status, "export: 50 of 50 samples" in err) == (0, True)
    assert out.startswith(f"exported {COUNT} samples to {place}: ")
    status, out, err = run(capsys, "export", url, place, *options, "label")
    assert (status, out, err.startswith("error: "), "is not empty" in err) == (2, "", True, True)
    assert run(capsys, "export", url, tmp_path / "other", *options, "label", "--quiet") == (0, "", "")
    assert set(np.load(tmp_path / "out" / "part-00000.npz")) == {"label", "small"}
