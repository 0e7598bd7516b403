"""Sources: formats/*/expected*.json of every format, and inputs of the first three that are bad."""

import io
import pickle
import sys
import tarfile
import uuid
import zipfile
from itertools import pairwise
from urllib.parse import parse_qs

import numpy as np
import pytest
from amounts import examples
from faulty import QuietHandler, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import (
    CASES,
    FORMATS,
    READABLE,
    assert_refused,
    files,
    image_bytes,
    kinds_of,
    npy_bytes,
    opened,
    png,
    read,
    recorded,
    rows_of,
    samples_of,
    tar,
    tar_bytes,
    written_as,
)

import streamloader as sl
from streamloader.conversion.sources import formats
from streamloader.conversion.sources import tar as tar_source
from streamloader.conversion.sources.base import raise_bad
from streamloader.conversion.sources.files import expand_braces, field_names, list_source
from streamloader.errors import SourceError, StreamloaderError, UsageError
from streamloader.storage import open_store
from streamloader.storage.objects import cut_runs
from streamloader.storage.process import run_all


def test_every_format_has_its_cases():
    folders = {path.name for path in FORMATS.iterdir()} - {"streamloader", "python", "litdata"}
    assert folders == {case.format for case in CASES.values()} == set(formats.FORMATS)  # litdata: by its own package


@pytest.mark.quick(1)
@pytest.mark.parametrize("src", READABLE)
@given(data=st.data())
@settings(max_examples=examples(12))
def test_any_rows_read_alone_or_after_pickling_are_the_same(src, data):
    source, every = opened(f"{FORMATS}/{src}", CASES[src].fields), CASES[src].expected()["samples"]
    paths = [info.path for info in source.files]
    assert paths == sorted(paths) or CASES[src].format == "audiofolder"  # which has a clip before the text beside it
    chosen = sorted(data.draw(st.sets(st.integers(0, len(every) - 1))))
    wanted = [every[row] for row in chosen]
    part = source.fragment(np.array(chosen, np.int64))
    for one in (part, pickle.loads(pickle.dumps(part))):
        columns = one(raise_bad)
        assert all(column.dtype.byteorder in "=|<" for column in columns.values() if isinstance(column, np.ndarray))
        assert written_as(samples_of(source, columns), wanted) == wanted


# of S3's servers one: that they answer alike is what the tests of storage show
@pytest.mark.quick(1)
@pytest.mark.parametrize("root_url", ["memory", "file", "seaweedfs"], indirect=True)
def test_a_source_is_the_same_below_every_url(store_url):
    url, options = store_url
    store = open_store(url, options)
    paths = [path for path in [*FORMATS.glob("*/input/**/*"), *FORMATS.glob("*/compressed/*")] if path.is_file()]
    run_all(lambda path: store.put(path.relative_to(FORMATS).as_posix(), path.read_bytes()), paths, 8)
    for src in [src for src in READABLE if not url.startswith("s3:") or not CASES[src].again]:
        source, every = opened(f"{url}/{src}", CASES[src].fields, storage=options), CASES[src].expected()["samples"]
        assert written_as(samples_of(source, read(source)), every) == every
        assert written_as(samples_of(source, read(source, [1])), every[1:2]) == every[1:2]
        assert not source.url.startswith("/")


@pytest.mark.parametrize("src", [src for src, case in CASES.items() if case.needs])
def test_a_missing_package_is_an_error_with_the_command_to_install_it(src, monkeypatch):
    package = CASES[src].needs
    for module in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"{package} is not installed here; install it with pip install {package}"):
        opened(f"{FORMATS}/{src}", CASES[src].fields)


OTHER_PROCESSES = ("csv/input", "jsonl/input", "webdataset/compressed", "zarr/input/xarray2.zarr", "parquet/input")
OTHER_PROCESSES += ("hdf5/input/parts",)


@pytest.mark.quick(4)
@pytest.mark.parametrize("src", READABLE)
def test_a_conversion_has_the_same_samples(src, tmp_path):
    message = CASES[src].expected()
    for workers in (0, 2) if src in OTHER_PROCESSES else (0,):
        report = sl.convert(f"{FORMATS}/{src}", tmp_path / f"{workers}", fields=CASES[src].fields, workers=workers)
        assert report.format == CASES[src].format
        dataset = sl.open(tmp_path / f"{workers}")
        assert kinds_of(dataset) == message["fields"] | message.get("beside", {})
        samples = [{name: dataset[i][name] for name in message["fields"]} for i in range(len(dataset))]
        assert written_as(samples, message["samples"]) == message["samples"]
        if "classes" in message:
            assert dataset.manifest.provenance["classes"] == {"label": message["classes"]}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1), st.integers(0, 40), st.integers(1, 200))
def test_runs_cover_all_ranges_once_and_keep_their_limits(pieces, gap, longest):
    ends = np.cumsum([number for piece in pieces for number in piece])
    stops, sizes = ends[1::2], np.array([size for _, size in pieces])
    runs = cut_runs(stops - sizes, stops, gap, longest)
    assert [i for first, last in runs for i in range(first, last)] == list(range(len(pieces)))
    for first, last in runs:
        assert last - first == 1 or stops[last - 1] - (stops - sizes)[first] <= longest
        assert all((stops - sizes)[i + 1] - stops[i] <= gap for i in range(first, last - 1))


def test_braces_expand_like_webdatasets():
    assert list(expand_braces("a-{008..011}.tar")) == ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
    assert list(expand_braces("{a,b}/{0..1}")) == ["a/0", "a/1", "b/0", "b/1"]
    with pytest.raises(SourceError, match="at most a million"):
        list(expand_braces("{0..99999999999}"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("scheme", ["memory", "s3", "file"])
def test_a_name_with_brackets_is_meant_literally_where_it_exists_and_else_a_pattern(scheme, moto, tmp_path):
    options = moto.storage_options if scheme == "s3" else {}
    url = {"memory": f"memory://{uuid.uuid4().hex}/a", "s3": moto.url(), "file": tmp_path.as_uri()}[scheme]
    store = open_store(url, options)
    names = [
        "data1/t.npy",
        "data[1]/t.npy",
        "data[1]/u3.npy",
        "data[1]/u[0-9].npy",
        "what?.npy",
        "whatx.npy",
        "a{b}.npy",
    ]
    for name in names:
        store.put(name, b"x")

    def listed(pattern):
        found = list_source(f"{url}/{pattern}", options)
        root = found.store.url.removeprefix(store.url).strip("/")
        return [f"{root}/{info.path}".strip("/") for info in found.files]

    for name in names:
        assert listed(name) == [name]
    assert listed("data[1]") == names[1:4]
    assert listed("data[1]/*.npy") == names[1:4]
    assert listed("data[1-1]/t.npy") == ["data1/t.npy"]
    assert listed("what[a-z].npy") == ["whatx.npy"]
    assert listed("*/t.npy") == names[:2]


@pytest.mark.long
def test_the_query_of_a_presigned_url_is_no_pattern(tmp_path):
    """And no message has it."""
    seen = []

    class Presigned(QuietHandler):
        def do_GET(self):
            seen.append(self.path)
            path, _, query = self.path.partition("?")
            if parse_qs(query) != {"X-Amz-Signature": ["se/cret+"], "X-Amz-Credential": ["b"]}:
                self.respond(403)
            elif self.command == "GET" and path == "/a/x.npy":  # the signature is for GET
                self.respond_range(body.getvalue())
            else:
                self.respond(403 if self.command == "HEAD" else 404)

        do_HEAD = do_GET

    body = io.BytesIO()
    np.save(body, np.arange(5))
    with serving(Presigned) as server:
        query = "?X-Amz-Signature=se%2Fcret%2B&X-Amz-Credential=b"
        sl.convert(f"{server.endpoint}/a/x.npy{query}", tmp_path / "d", workers=1)
        with pytest.raises(StreamloaderError) as raised:
            sl.convert(f"{server.endpoint}/a/y.npy{query}", tmp_path / "e", workers=1)
    assert len(sl.open(tmp_path / "d")) == 5
    assert "cret" not in str(raised.value)
    assert all("cret" not in path.read_text() for path in tmp_path.rglob("*.json"))


def test_names_become_field_names_or_an_error():
    assert field_names(["A b-C", "1st", "*"], "x") == {"A b-C": "a_b_c", "1st": "f_1st", "*": "f"}
    with pytest.raises(SourceError, match="both make the field 'a'"):
        field_names(["a", "A"], "x")


def saved(array, cut=None):
    return files({"it.npy": npy_bytes(array)[:cut]})


def tarred(members, cut=None):
    return files({"it.tar": tar_bytes(members)[:cut]})


def pax_member(name, size, **records):
    """Return the headers of a member: its pax records, and a header with the size 0."""
    info = tarfile.TarInfo(name)
    info.pax_headers = {"size": str(size), **{key.replace("_", "."): value for key, value in records.items()}}
    return info.tobuf(tarfile.PAX_FORMAT)


def zipped(damage):
    file = io.BytesIO()
    np.savez_compressed(file, x=np.random.default_rng(0).random(1000))
    return files({"it.npz": damage(file.getvalue())})


PNG, XS = image_bytes(), np.zeros(3)
TWO, TEXT = tar_bytes({"1.cls": b"1", "2.cls": b"2"}), tar_bytes({"1.txt": b"1"})
DAMAGED_TAR = TWO[:1124] + bytes([TWO[1124] ^ 1]) + TWO[1125:]
BAD = {
    "no known format": (files({"x.doc": b"1,2"}), "no known format fits .*x.doc"),
    "no class folders": (files({"x.png": PNG, "y.png": PNG}), "put images into a folder for each class"),
    "two formats": (files({"a/x.png": PNG, "x.npy": npy_bytes(np.zeros(3))}), "fits the formats imagefolder and npy"),
    "split without classes": (files({"train/ant/x.png": PNG, "test/x.png": PNG}), "splits, .* but test has no class"),
    "empty class folder": (files({"a/x.png": PNG, "hollow/": b""}), "the class folder .*hollow holds no image"),
    "class folder of texts": (files({"a/x.png": PNG, "texts/x.txt": b"no image"}), "folder .*texts holds no image"),
    "unequal arrays": (files({"xs.npy": npy_bytes(XS), "ys.npy": npy_bytes(np.zeros(4))}), "'xs' has 3 rows, 'ys' 4"),
    "pickled": (saved(np.array([{}, {}], object)), "it.npy holds pickled objects"),
    "complex": (saved(np.zeros(3, complex)), "it.npy: dtype 'complex128'"),
    "text": (saved(np.array(["a", "b"])), "it.npy: dtype 'str32'"),
    "datetime": (saved(np.zeros(3, "datetime64[s]")), r"it.npy: dtype 'datetime64\[s\]'"),
    "structured": (saved(np.zeros(3, [("a", int)])), "it.npy: dtype 'void64'"),
    "single value": (saved(np.float32(1)), "it.npy is a single value"),
    "Fortran order": (saved(np.asfortranarray(np.zeros((3, 4)))), "Fortran order"),
    "empty axis": (saved(np.zeros((3, 0))), "empty axis"),
    "truncated npy": (saved(np.zeros(1000), -1), "has 8127 bytes, its header says 8128: it is truncated"),
    "damaged npy": (files({"it.npy": b"\x93NUMPY, and no header"}), "it.npy is not a readable .npy"),
    "few fields": (tarred({"1.cls": b"1", "1.txt": b"", "2.cls": b""}), "'2' .* has .cls; the first .* has .cls, .txt"),
    "many fields": (
        tarred({"1.cls": b"1", "2.cls": b"", "2.txt": b""}),
        "'2' .* has .cls, .txt; the first .* has .cls;",
    ),
    "tars differ": (files({"a.tar": TWO, "b.tar": TEXT}), r"'1' of .*b.tar has .txt; the first sample has .cls"),
    "key twice": (tarred({"1.cls": b"1", "2.cls": b"2", "1.CLS": b"3"}), "key '1' occurs again .*it.tar"),
    "member twice": (tarred({"1.cls": b"1", "1.CLS": b"3"}), "key '1' has two members .cls"),
    "no samples": (tarred({"noext": b"1"}), "hold no sample"),
    "cut in a member": (tarred({"1.bin": b"x" * 9000}, cut=5000), "it.tar is truncated: its member 1.bin extends to"),
    "cut between members": (files({"it.tar": TWO[:1024]}), "it.tar is truncated: it ends at byte 1024"),
    "cut in a header": (files({"it.tar": TWO[:1100]}), "it.tar is truncated: it ends at byte 1100"),
    "damaged tar": (files({"it.tar": DAMAGED_TAR}), "it.tar is not a tar, or damaged, at byte 1024"),
    "size in pax": (files({"it.tar": pax_member("1.cls", "two")}), "it.tar is not a tar, or damaged, at byte 1024"),
    "negative size": (files({"it.tar": pax_member("1.cls", -1)}), "it.tar has a member of -1 bytes at byte 1024"),
    "sparse file": (files({"it.tar": pax_member("1.cls", 0, GNU_sparse_map="0,1")}), "holds 1.cls as a sparse file"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_source_is_an_error_when_opened(case, tmp_path):
    assert_refused(BAD[case], tmp_path, (SourceError, UsageError))


UNREADABLE = {
    "text as png": (files({"a/x.png": b"no image"}), "a/x.png: .* its 8 bytes have no known image header"),
    "empty file": (files({"a/x.png": b""}), "a/x.png: the image cannot be decoded: the file is empty"),
    "truncated png": (files({"a/x.png": image_bytes(64)[:-30]}), "a/x.png: the image cannot be decoded"),
    "truncated jpeg": (files({"a/x.jpg": image_bytes(64, "jpeg")[:-20]}), "a/x.jpg: the image .*end marker"),
    "png in a tar": (tarred({"k/7.png": b"no image"}), "it.tar: k/7.png: the image cannot be decoded"),
    "no integer": (tarred({"1.cls": b"1", "2.cls": b"two"}), "it.tar: 2.cls: b'two' is not a number of int64"),
    "too large": (tarred({"1.cls": b"9" * 30}), "it.tar: 1.cls: b'9+' is not a number of int64"),
    "no utf-8": (tarred({"1.txt": b"", "2.txt": b"\xff"}), "2.txt: 'utf-8' codec can't decode byte 0xff in position 0"),
    "shapes differ": (
        tarred({"1.npy": npy_bytes(XS), "2.npy": npy_bytes(np.zeros(4))}),
        r"it.tar: 2: field 'npy' .*has shape \(4,\), expected \(3,\); .*npy=ragged:float64",
    ),
    "npz cut": (zipped(lambda data: data[:-40]), r"it\.npz is not an \.npz, or is damaged"),
    "npz spoiled": (zipped(lambda data: data[:2000] + bytes(100) + data[2100:]), r"it\.npz is not an \.npz, or is dam"),
    "pickle in a tar": (tarred({"1.npy": npy_bytes(np.array([{}], object))}), "it.tar: 1.npy: it is not an .npy"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_bad_sample_is_an_error_when_read(case, tmp_path):
    make, message = UNREADABLE[case]
    make(tmp_path)
    with pytest.raises(SourceError, match=message):
        read(opened(tmp_path / "it.npz" if case.startswith("npz") else tmp_path))


def test_links_and_climbing_names_in_a_tar_are_only_text(tmp_path):
    tar(tmp_path / "it.tar", {"../../up.txt": b"1", "/etc/abs.txt": b"2", "__meta__/x.txt": b"3"})
    with tarfile.open(tmp_path / "it.tar", "a") as file:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("evil.txt")
            link.type, link.linkname = kind, "/etc/passwd"
            file.addfile(link)
    source = opened(tmp_path)
    assert rows_of(source, [0, 1]) == [{"txt": "1"}, {"txt": "2"}]
    assert source.notes["passed_over"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["it.tar"]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_and_foreign_names_are_read_in_every_tar_dialect(kind, tmp_path):
    folder = "d" * 90 if kind == tarfile.USTAR_FORMAT else "ü" * 150
    tar(tmp_path / "it.tar", {f"{folder}/{i}.{ext}": b"%d" % i for i in range(3) for ext in ("cls", "txt")}, kind)
    assert rows_of(opened(tmp_path), [0, 1, 2]) == [{"cls": i, "txt": str(i)} for i in range(3)]


def test_the_size_in_pax_records_is_that_of_the_member(tmp_path):
    with (tmp_path / "it.tar").open("wb") as file:
        file.write(pax_member("no_sample", 9 << 30))  # 9 GiB, which a ustar header does not hold
        file.seek(9 << 30, 1)
        file.write(pax_member("1.cls", 2) + b"42".ljust(tarfile.BLOCKSIZE, b"\0") + tar_bytes({"2.cls": b"7"}))
    source = opened(tmp_path)
    assert rows_of(source, [0, 1]) == [{"cls": 42}, {"cls": 7}]
    assert source.notes["passed_over"] == 1


def test_a_tar_of_large_and_small_members_is_scanned_once_by_its_headers(tmp_path, monkeypatch):
    members = {f"{i:03}.{ext}": bytes(size) for i in range(40) for ext, size in (("bin", 1_200_000), ("raw", i))}
    tar(tmp_path / "it.tar", members)
    scanned = recorded(monkeypatch, tar_source)
    source = opened(tmp_path)
    assert source.num_samples == 40
    assert 40 <= len(scanned) <= 41
    assert all(one.stop <= following.start for one, following in pairwise(scanned))
    assert scanned.drain() < (tmp_path / "it.tar").stat().st_size / 50
    columns = read(source, [0, 7, 39])
    assert [len(one) for one in columns["bin"]] == [1_200_000] * 3
    assert [len(one) for one in columns["raw"]] == [0, 7, 39]
    assert not scanned


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_byte_of_a_bool_that_is_not_0_is_true(save, tmp_path):
    save(tmp_path / "it.npz", x=np.array([0, 2, 1], np.uint8).view(np.bool_))
    assert read(opened(tmp_path / "it.npz"))["x"].view(np.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize("compressed", [False, True])
def test_wide_rows_far_apart_are_read_right(compressed, tmp_path):
    array = np.arange(500 * 1000, dtype=">i4").reshape(500, 1000)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "it.npz", x=array)
    rows = np.array([0, 1, 250, 499])
    found = read(opened(tmp_path / "it.npz"), rows)["x"]
    assert found.dtype == np.dtype("<i4")
    assert (found == array[rows]).all()


def headed(header, version=1):
    """Return an .npy of 1000 zero bytes with this header."""
    line = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(line).to_bytes(2 * version, "little") + line + bytes(1000)


def shaped(shape, descr="<i4"):
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
def test_an_npy_with_a_damaged_header_is_an_error(case, kind, tmp_path):
    data = headed(DAMAGED_HEADERS[case], 3 if case == "another version" else 1)
    message = r"it\.npy (is not a readable \.npy|has)"
    if kind == "npy":
        (tmp_path / "it.npy").write_bytes(data)
    elif kind == "tar":
        message = r"1\.npy: it is not an \.npy that can be read"
        tar(tmp_path / "it.tar", {"1.npy": data})
    else:
        message = r"it\.npz:x (is not a readable \.npy|has|claims)"
        with zipfile.ZipFile(tmp_path / "it.npz", "w", zipfile.ZIP_STORED if kind == "stored" else 8) as file:
            file.writestr("x.npy", data)
    with pytest.raises(SourceError, match=message) as error:
        opened(tmp_path if kind == "tar" else next(tmp_path.iterdir()))
    assert error.value.remedy


def test_an_unknown_format_is_an_error(tmp_path):
    with pytest.raises(StreamloaderError, match="choose one of imagefolder, audiofolder, videofolder, webdataset"):
        opened(tmp_path, name="nothing")


def test_links_to_files_and_folders_are_followed_but_not_in_circles(tmp_path):
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
    for name, other in ("de", "ed"):
        png(root / name / "z.png", 6)
        (root / name / f"to_{other}").symlink_to(root / other)
    (root / ".cache").symlink_to(tmp_path)
    source = opened(root)
    circle = sorted(f"{folder}/z.png" for folder in ("d", "d/to_e", "d/to_e/to_d", "e", "e/to_d", "e/to_d/to_e"))
    assert [info.path for info in source.files] == ["a/x.png", "b/y.png", "c/y.png", *circle]
    assert read(source)["image"] == [(root / info.path).read_bytes() for info in source.files]


@pytest.mark.parametrize("name", ["bee", "ant/y.png", "ant/deep"])
def test_a_link_that_leads_out_of_the_source_is_not_followed(name, tmp_path):
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


def test_a_broken_link_is_an_error(tmp_path):
    png(tmp_path / "a" / "x.png")
    (tmp_path / "a" / "y.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(SourceError, match=r"a/y\.png cannot be read: No such file"):
        opened(tmp_path)


def test_a_folder_with_the_marks_of_a_pattern_in_its_name_is_a_folder(tmp_path):
    png(tmp_path / "photos [1] {2}" / "a" / "x.png")
    assert opened(tmp_path / "photos [1] {2}").num_samples == 1
    with pytest.raises(SourceError, match="pattern for its bucket"):
        opened("s3://{a,b}/x.tar")


def test_a_source_that_does_not_exist_is_an_error(tmp_path):
    png(tmp_path / "a" / "x.png")
    for src in (tmp_path / "nowhere", tmp_path / "a" / "x.npy", tmp_path / "*.tar", tmp_path / "{1..3}.npy"):
        with pytest.raises(SourceError, match=r"nothing exists at|no file exists at"):
            opened(src)
