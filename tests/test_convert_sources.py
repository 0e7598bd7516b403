"""Sources: what formats/*/expected.json says, and every input that cannot be converted."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from streamloader.conversion.sources.base import Range, Source, cut_runs, read_range, refuse_all
from streamloader.conversion.sources.files import expand_braces, field_names
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.tars import tarindex
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceChangedError, SourceError, StreamloaderError, UsageError
from streamloader.storage.protocol import Store

FORMATS = Path(__file__).parent.parent / "formats"
EXPECTED = {
    "imagefolder/input": "imagefolder",
    "webdataset/input": "webdataset",
    "webdataset/input/*.tar": "webdataset",
    "webdataset/input/shard-{000..001}.tar": "webdataset",
    "npy/input/folder": "npy",
    "npy/input/stored.npz": "npy",
    "npy/input/compressed.npz": "npy",
}


def opened(src: Path | str) -> Source:
    return open_source(src, None, {}, Wish())[1]


def plain(value: Any) -> Any:
    """A value as expected.json writes it."""
    if isinstance(value, bytes):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def rows_of(source: Source, rows: list[int]) -> list[dict[str, Any]]:
    columns = source.part(np.array(rows, np.int64)).read(refuse_all)
    texts = {name for name, field in source.fields.items() if field.kind == "text"}
    named = {name: [one.decode() for one in column] if name in texts else column for name, column in columns.items()}
    return [{name: plain(column[i]) for name, column in named.items()} for i in range(len(rows))]


@pytest.mark.parametrize("src", EXPECTED)
def test_source_reads_what_the_format_says(src: str) -> None:
    expected = json.loads((FORMATS / EXPECTED[src] / "expected.json").read_text())
    name, source = open_source(FORMATS / src, None, {}, Wish())
    assert name == EXPECTED[src]
    assert {field: str(kind) for field, kind in source.fields.items()} == expected["fields"]
    assert source.num_samples == len(expected["samples"])
    assert rows_of(source, list(range(source.num_samples))) == expected["samples"]
    if "classes" in expected:
        assert source.notes == {"classes": {"label": expected["classes"]}, "passed_over": expected["passed_over"]}


@pytest.mark.parametrize("src", EXPECTED)
@given(data=st.data())
@settings(max_examples=10)
def test_any_rows_read_alone_or_after_pickling_are_the_same(src: str, data: st.DataObject) -> None:
    source = opened(FORMATS / src)
    chosen = sorted(data.draw(st.sets(st.integers(0, source.num_samples - 1))))
    every = rows_of(source, list(range(source.num_samples)))
    assert rows_of(source, chosen) == [every[row] for row in chosen]
    part = pickle.loads(pickle.dumps(source.part(np.array(chosen, np.int64))))
    assert len(next(iter(part.read(refuse_all).values()))) == len(chosen)


def test_a_source_is_the_same_below_every_url(store_url: tuple[str, dict[str, Any]]) -> None:
    from streamloader.storage import open_store

    url, options = store_url
    store = open_store(url, options)
    for path in sorted(FORMATS.glob("*/input/**/*")):
        if path.is_file():
            store.put(path.relative_to(FORMATS).as_posix(), path.read_bytes())
    for src, name in EXPECTED.items():
        expected = json.loads((FORMATS / name / "expected.json").read_text())["samples"]
        source = open_source(f"{url}/{src}", None, options, Wish())[1]
        assert rows_of(source, list(range(len(expected)))) == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1), st.integers(0, 40), st.integers(1, 200))
def test_runs_cover_all_ranges_once_and_keep_their_limits(
    pieces: list[tuple[int, int]], gap: int, longest: int
) -> None:
    ends = np.cumsum([number for piece in pieces for number in piece])
    stops, sizes = ends[1::2], np.array([size for _, size in pieces])
    runs = cut_runs(stops - sizes, stops, gap, longest)
    assert [i for first, last in runs for i in range(first, last)] == list(range(len(pieces)))
    for first, last in runs:
        assert last - first == 1 or stops[last - 1] - (stops - sizes)[first] <= longest
        assert all((stops - sizes)[i + 1] - stops[i] <= gap for i in range(first, last - 1))


def test_braces_expand_like_webdatasets() -> None:
    assert list(expand_braces("a-{008..011}.tar")) == ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
    assert list(expand_braces("{a,b}/{0..1}")) == ["a/0", "a/1", "b/0", "b/1"]
    with pytest.raises(SourceError, match="at most a million"):
        list(expand_braces("{0..99999999999}"))


def test_names_become_field_names_or_are_told_apart() -> None:
    assert field_names(["A b-C", "1st", "*"], "x") == {"A b-C": "a_b_c", "1st": "f_1st", "*": "f"}
    with pytest.raises(SourceError, match="both make the field 'a'"):
        field_names(["a", "A"], "x")


def png(path: Path, size: int = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.arange(size * size * 3, dtype=np.uint8).reshape(size, size, 3)).save(path)


def tar(path: Path, members: Mapping[str, bytes], kind: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=kind) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


def split_without_classes(root: Path) -> None:
    png(root / "train" / "ant" / "x.png")
    png(root / "test" / "x.png")


def empty_class(root: Path) -> None:
    png(root / "a" / "x.png")
    (root / "hollow").mkdir()


def class_without_images(root: Path) -> None:
    png(root / "a" / "x.png")
    (root / "texts").mkdir()
    (root / "texts" / "x.txt").write_text("no image")


def unequal(root: Path) -> None:
    np.save(root / "xs.npy", np.zeros(3))
    np.save(root / "ys.npy", np.zeros(4))


def saved(array: Any) -> Callable[[Path], None]:
    return lambda root: np.save(root / "it.npy", array, allow_pickle=True)


def short_npy(root: Path) -> None:
    np.save(root / "it.npy", np.zeros(1000))
    data = (root / "it.npy").read_bytes()
    (root / "it.npy").write_bytes(data[:-1])


def no_npy(root: Path) -> None:
    (root / "it.npy").write_bytes(b"\x93NUMPY, or so it says")


def two_kinds(root: Path) -> None:
    png(root / "a" / "x.png")
    np.save(root / "x.npy", np.zeros(3))


def tarred(
    members: Mapping[str, bytes], cut: int | None = None, kind: int = tarfile.PAX_FORMAT
) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        tar(root / "it.tar", members, kind)
        (root / "it.tar").write_bytes((root / "it.tar").read_bytes()[:cut])

    return make


def cut_gzip(root: Path) -> None:
    tar(root / "it.tar", {"1.cls": b"1"})
    (root / "it.tar").write_bytes(gzip.compress((root / "it.tar").read_bytes())[:-9])


def damaged_tar(root: Path) -> None:
    tar(root / "it.tar", {"1.cls": b"1", "2.cls": b"2"})
    data = bytearray((root / "it.tar").read_bytes())
    data[1024 + 100] ^= 1
    (root / "it.tar").write_bytes(data)


def two_tars(root: Path) -> None:
    tar(root / "a.tar", {"1.cls": b"1"})
    tar(root / "b.tar", {"1.txt": b"1"})


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda root: None, "nothing is at"),
    "no known format": (lambda root: (root / "x.doc").write_text("1,2"), "no known format fits .*x.doc"),
    "two formats": (two_kinds, "fits the formats imagefolder and npy"),
    "split without classes": (split_without_classes, "looks like splits, test, train, but test has no class folder"),
    "empty class folder": (empty_class, "the class folder .*hollow holds no image"),
    "class folder without images": (class_without_images, "the class folder .*texts holds no image"),
    "unequal arrays": (unequal, "'xs' has 3 rows, 'ys' 4"),
    "pickled": (saved(np.array([{}, {}], object)), "it.npy holds pickled objects"),
    "complex": (saved(np.zeros(3, complex)), "it.npy: dtype 'complex128'"),
    "text": (saved(np.array(["a", "b"])), "it.npy: dtype 'str32'"),
    "datetime": (saved(np.zeros(3, "datetime64[s]")), r"it.npy: dtype 'datetime64\[s\]'"),
    "structured": (saved(np.zeros(3, [("a", int)])), "it.npy: dtype 'void64'"),
    "single value": (saved(np.float32(1)), "it.npy is a single value"),
    "Fortran order": (saved(np.asfortranarray(np.zeros((3, 4)))), "Fortran order"),
    "empty axis": (saved(np.zeros((3, 0))), "empty axis"),
    "truncated npy": (short_npy, "has 8127 bytes, its header says 8128: it is truncated"),
    "damaged npy": (no_npy, "it.npy is no .npy that can be read"),
    "lacks a field": (tarred({"1.cls": b"1", "1.txt": b"a", "2.cls": b"2"}), r"sample '2' of .*it.tar lacks .txt"),
    "a field too many": (tarred({"1.cls": b"1", "2.cls": b"2", "2.txt": b"a"}), r"'2' of .*it.tar alone has .txt"),
    "tars differ": (two_tars, r"sample '1' of .*b.tar lacks .cls"),
    "key twice": (tarred({"1.cls": b"1", "2.cls": b"2", "1.CLS": b"3"}), "key '1' stands twice in .*it.tar"),
    "member twice": (tarred({"1.cls": b"1", "1.CLS": b"3"}), "key '1' has two members .cls"),
    "no samples": (tarred({"noext": b"1"}), "hold no sample"),
    "cut in a member": (tarred({"1.bin": b"x" * 9000}, cut=5000), "it.tar is truncated: its member 1.bin goes on"),
    "cut between members": (
        tarred({"1.cls": b"1", "2.cls": b"2"}, cut=1024),
        "it.tar is truncated: it ends at byte 1024",
    ),
    "cut in a header": (tarred({"1.cls": b"1", "2.cls": b"2"}, cut=1100), "it.tar is truncated: it ends at byte 1100"),
    "cut compressed tar": (cut_gzip, "it.tar is truncated: its gzip data break off after"),
    "damaged tar": (damaged_tar, "it.tar is no tar, or damaged, at byte 1024"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_converted_is_named_when_it_is_opened(case: str, tmp_path: Path) -> None:
    make, told = BAD[case]
    make(tmp_path)
    with pytest.raises((SourceError, UsageError), match=told):
        opened(tmp_path)


def cut_png(root: Path) -> None:
    png(root / "a" / "x.png", 64)
    (root / "a" / "x.png").write_bytes((root / "a" / "x.png").read_bytes()[:-30])


def cut_jpeg(root: Path) -> None:
    (root / "a").mkdir()
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(root / "a" / "x.jpg")
    (root / "a" / "x.jpg").write_bytes((root / "a" / "x.jpg").read_bytes()[:-20])


def text_as_png(root: Path) -> None:
    (root / "a").mkdir()
    (root / "a" / "x.png").write_text("no image")


def npy_bytes(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


UNREADABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "text as png": (text_as_png, "a/x.png: the image cannot be decoded: its 8 bytes have no known image header"),
    "truncated png": (cut_png, "a/x.png: the image cannot be decoded"),
    "truncated jpeg": (cut_jpeg, "a/x.jpg: the image cannot be decoded: .*end marker"),
    "png in a tar": (tarred({"k/7.png": b"no image"}), "it.tar: k/7.png: the image cannot be decoded"),
    "no integer": (tarred({"1.cls": b"1", "2.cls": b"two"}), "it.tar: 2.cls: it holds 'two', which is no int64"),
    "too large": (tarred({"1.cls": b"9" * 30}), "it.tar: 1.cls: it holds .* which is no int64"),
    "no utf-8": (tarred({"1.txt": b"a", "2.txt": b"\xff"}), "it.tar: 2.txt: it is no UTF-8"),
    "shapes differ": (
        tarred({"1.npy": npy_bytes(np.zeros(3)), "2.npy": npy_bytes(np.zeros(4))}),
        r"2.npy: it holds float64\[4\], the field is float64\[3\]; .* ragged:float64",
    ),
    "pickle in a tar": (tarred({"1.npy": npy_bytes(np.array([{}], object))}), "it.tar: 1.npy: it is no .npy"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_bad_sample_is_named_when_it_is_read(case: str, tmp_path: Path) -> None:
    make, told = UNREADABLE[case]
    make(tmp_path)
    with pytest.raises(SourceError, match=told):
        source = opened(tmp_path)
        source.part(np.arange(source.num_samples)).read(refuse_all)


def test_a_tar_that_is_compressed_whatever_its_name_is_read_like_a_plain_one(tmp_path: Path) -> None:
    tar(tmp_path / "it.tar", {f"{i}.{ext}": b"%d" % i for i in range(30) for ext in ("cls", "txt")})
    (tmp_path / "it.tar").write_bytes(gzip.compress((tmp_path / "it.tar").read_bytes()))
    assert rows_of(opened(tmp_path), [0, 7, 29]) == [{"cls": i, "txt": str(i)} for i in (0, 7, 29)]


def test_links_and_climbing_names_in_a_tar_are_only_text(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "it.tar", "w") as file:
        for name, data in {"../../up.txt": b"1", "/etc/abs.txt": b"2", "__meta__/x.txt": b"3"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("evil.txt")
            link.type, link.linkname = kind, "/etc/passwd"
            file.addfile(link)
    source = opened(tmp_path)
    assert rows_of(source, [0, 1]) == [{"txt": "1"}, {"txt": "2"}]
    assert source.notes["passed_over"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["it.tar"]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_and_foreign_names_are_read_in_every_tar_dialect(kind: int, tmp_path: Path) -> None:
    folder = "d" * 90 if kind == tarfile.USTAR_FORMAT else "ü" * 150
    tar(tmp_path / "it.tar", {f"{folder}/{i}.{ext}": b"%d" % i for i in range(3) for ext in ("cls", "txt")}, kind)
    assert rows_of(opened(tmp_path), [0, 1, 2]) == [{"cls": i, "txt": str(i)} for i in range(3)]


def test_a_tar_of_large_and_small_members_is_scanned_once_by_its_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"{i:03}.{ext}": bytes(size) for i in range(40) for ext, size in (("bin", 1_200_000), ("raw", i))}
    tar(tmp_path / "it.tar", members)
    scanned: list[Range] = []

    def note(store: Store, wanted: Range) -> memoryview:
        scanned.append(wanted)
        return read_range(store, wanted)

    monkeypatch.setattr(tarindex, "read_range", note)
    source = opened(tmp_path)
    assert source.num_samples == 40
    assert 40 <= len(scanned) <= 41
    assert all(one.stop <= following.start for one, following in pairwise(scanned))
    assert sum(one.stop - one.start for one in scanned) < (tmp_path / "it.tar").stat().st_size / 50
    scanned.clear()
    columns = source.part(np.array([0, 7, 39])).read(refuse_all)
    assert [len(one) for one in columns["bin"]] == [1_200_000] * 3
    assert [len(one) for one in columns["raw"]] == [0, 7, 39]
    assert not scanned


@pytest.mark.parametrize("compressed", [False, True])
def test_wide_rows_far_apart_are_read_right(compressed: bool, tmp_path: Path) -> None:
    array = np.arange(500 * 5000, dtype=">i4").reshape(500, 5000)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "it.npz", x=array)
    rows = np.array([0, 1, 250, 499])
    found = opened(tmp_path / "it.npz").part(rows).read(refuse_all)["x"]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.dtype("<i4")
    assert (found == array[rows]).all()


@pytest.mark.parametrize("damage", ["cut", "zip"])
def test_a_damaged_npz_is_named(damage: str, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "it.npz", x=np.random.default_rng(0).random(1000))
    data = bytearray((tmp_path / "it.npz").read_bytes())
    if damage == "cut":
        data = data[:-40]
    else:
        data[2000:2100] = bytes(100)
    (tmp_path / "it.npz").write_bytes(data)
    with pytest.raises(SourceError, match=r"it\.npz is no \.npz, or damaged"):
        opened(tmp_path / "it.npz").part(np.arange(1000)).read(refuse_all)


def headed(header: str, version: int = 1) -> bytes:
    """Return an .npy of 1000 zero bytes with this header."""
    line = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(line).to_bytes(2 * version, "little") + line + bytes(1000)


def shaped(shape: str, descr: str = "<i4") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"


DAMAGED_HEADERS = {
    "no python": "a b",
    "cut": shaped("(2, 3)")[:40],
    "deep": "(" * 3000,
    "an expression": "1" + "+1" * 3000,
    "a NUL": "\0",
    "a negative shape": shaped("(-5, 3)"),
    "a shape of no numbers": shaped("('a', 3)"),
    "no dtype": shaped("(5, 3)", "<q9"),
    "more rows than bytes": shaped("(1000000000000000000, 3)"),
    "more rows than numbers": shaped("(99999999999999999999999, 3)"),
    "rows of gigabytes": shaped("(2, 4000000000)"),
    "rows of more": shaped("(2, 40000000000000000000000)"),
    "another version": shaped("(5, 3)"),
}


@pytest.mark.parametrize("kind", ["npy", "stored", "compressed", "tar"])
@pytest.mark.parametrize("case", DAMAGED_HEADERS)
def test_an_npy_with_a_damaged_header_is_named(case: str, kind: str, tmp_path: Path) -> None:
    data = headed(DAMAGED_HEADERS[case], 3 if case == "another version" else 1)
    told = r"it\.npy (is no \.npy|has)"
    if kind == "npy":
        (tmp_path / "it.npy").write_bytes(data)
    elif kind == "tar":
        told = r"1\.npy: it is no \.npy that can be read"
        tar(tmp_path / "it.tar", {"1.npy": data})
    else:
        told = r"it\.npz:x (is no \.npy|has|claims)"
        with zipfile.ZipFile(tmp_path / "it.npz", "w", zipfile.ZIP_STORED if kind == "stored" else 8) as file:
            file.writestr("x.npy", data)
    with pytest.raises(SourceError, match=told) as error:
        opened(tmp_path if kind == "tar" else next(tmp_path.iterdir()))
    assert error.value.remedy


@pytest.mark.parametrize("kind", ["npy", "stored", "compressed"])
def test_a_damaged_npy_or_npz_is_read_or_named_whatever_the_damage(kind: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / ("it.npy" if kind == "npy" else "it.npz")
    if kind == "npy":
        np.save(path, np.arange(60).reshape(20, 3))
    else:
        arrays = {"x": np.arange(60).reshape(20, 3), "y": np.random.default_rng(1).random(20)}
        (np.savez if kind == "stored" else np.savez_compressed)(path, **arrays)
    whole = path.read_bytes()
    for number in range(600):
        data = bytearray(whole)
        at = rng.randrange(len(data))
        if number % 3 == 0:  # the zip's directory, or the header's beginning
            at = rng.randrange(min(len(data), 128)) if kind == "npy" else len(data) - 1 - rng.randrange(200)
        if number % 5 == 0:
            del data[at:]
        elif number % 5 == 1:
            del data[at : at + rng.randint(1, 40)]
        else:
            data[at : at + rng.randint(1, 4)] = rng.randbytes(rng.randint(1, 4))
        path.write_bytes(data)
        try:
            source = opened(path)
            source.part(np.arange(source.num_samples)).read(refuse_all)
        except StreamloaderError as error:
            assert path.name in str(error)
            assert error.remedy


def test_a_file_that_shrinks_after_it_was_listed_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "it.npy", np.zeros(1000))
    source = opened(tmp_path)
    (tmp_path / "it.npy").write_bytes((tmp_path / "it.npy").read_bytes()[:4000])
    with pytest.raises(SourceChangedError, match=r"it\.npy ends at byte 4000"):
        source.part(np.arange(1000)).read(refuse_all)


def test_an_unknown_format_is_told(tmp_path: Path) -> None:
    with pytest.raises(StreamloaderError, match="choose one of imagefolder, webdataset, npy"):
        open_source(tmp_path, "nothing", {}, Wish())


def test_links_to_files_and_folders_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    real = tmp_path / "real"
    root = tmp_path / "root"
    root.symlink_to(real)
    png(real / ".store" / "x.png")
    png(real / ".store" / "more" / "y.png", 5)
    (root / "a").mkdir(parents=True)
    (root / "a" / "x.png").symlink_to(real / ".store" / "x.png")
    for name in "bc":
        (root / name).symlink_to(root / ".store" / "more")
    (root / "a" / "loop").symlink_to(root)
    (root / "a" / "up").symlink_to(tmp_path)
    (root / ".cache").symlink_to(tmp_path)
    source = opened(root)
    assert [info.path for info in source.files] == ["a/x.png", "b/y.png", "c/y.png"]
    found = source.part(np.arange(3)).read(refuse_all)
    assert found["image"] == [(root / info.path).read_bytes() for info in source.files]


@pytest.mark.parametrize("name", ["bee", "ant/y.png", "ant/deep"])
def test_a_link_that_leads_out_of_the_source_is_not_followed(name: str, tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    png(root / "ant" / "x.png")
    png(secret / "x.png")
    np.save(root / "x.npy", np.zeros(3))
    (root / name).symlink_to(secret if not name.endswith("png") else secret / "x.png")
    with pytest.raises(SourceError, match=rf"root/{name} is a link to {secret}.*outside of {root}; copy"):
        opened(root)
    assert opened(f"{root}/*.npy").num_samples == 3, "a pattern that does not name it"
    with pytest.raises(SourceError, match="is a link to"):
        opened(f"{root}/{name[0]}*/*/*.png" if name == "ant/deep" else f"{root}/*/*.png")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    png(tmp_path / "a" / "x.png")
    png(tmp_path / "b" / "y.png")
    (tmp_path / "a" / "to_b").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "to_a").symlink_to(tmp_path / "a")
    assert len(opened(tmp_path).files) == 6


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    png(tmp_path / "a" / "x.png")
    (tmp_path / "a" / "y.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(SourceError, match=r"a/y\.png cannot be read: No such file"):
        opened(tmp_path)


def test_a_folder_with_the_marks_of_a_pattern_in_its_name_is_a_folder(tmp_path: Path) -> None:
    png(tmp_path / "photos [1] {2}" / "a" / "x.png")
    assert opened(tmp_path / "photos [1] {2}").num_samples == 1
    with pytest.raises(SourceError, match="pattern for its bucket"):
        opened("s3://{a,b}/x.tar")


def test_a_source_that_cannot_be_reached_is_told(tmp_path: Path) -> None:
    png(tmp_path / "a" / "x.png")
    for src in (tmp_path / "nowhere", tmp_path / "a" / "x.npy", tmp_path / "*.tar", tmp_path / "{1..3}.npy"):
        with pytest.raises(SourceError, match=r"nothing is at|no file is"):
            opened(src)
