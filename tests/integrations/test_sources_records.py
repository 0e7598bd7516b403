"""TFRecord, MDS, and LitData by its package: what their own tools read, and every input that cannot be converted."""

import bz2
import gzip
import io
import json
import shutil
import struct
import tempfile
import zlib
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path

import crc32c
import numpy as np
import pytest
import zstandard
from datasets import within
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sources import CASES, FORMATS, assert_error, assert_refused, bad_rows, files, kinds_of, opened, read, rows_of

import streamloader as sl
from streamloader.conversion.sources.mds import encoding_of
from streamloader.conversion.sources.tar import open_reader
from streamloader.conversion.sources.tfrecord import parse_example, record_starts
from streamloader.errors import FieldError, SourceError
from streamloader.storage import open_store
from streamloader.storage.objects import ObjectInfo


def samples_in(src):
    return CASES[src].expected()["samples"]


# --- TFRecord ---


def varint(number):
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def tagged(number, wire, data):
    return varint(number << 3 | wire) + (varint(len(data)) if wire == 2 else b"") + data


def ints(*values):
    return tagged(3, 2, tagged(1, 2, b"".join(map(varint, values))))


def floats(*values):
    return tagged(2, 2, tagged(1, 2, struct.pack(f"<{len(values)}f", *values)))


def texts(*values):
    return tagged(1, 2, b"".join(tagged(1, 2, one) for one in values))


def example(**features):
    """An Example by hand, in the encoding of protocol buffers."""
    entries = [tagged(1, 2, tagged(1, 2, key.encode()) + tagged(2, 2, one)) for key, one in features.items()]
    return tagged(1, 2, b"".join(entries))


def masked(data):
    crc = crc32c.crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(records):
    heads = [struct.pack("<Q", len(record)) for record in records]
    pieces = zip(heads, map(masked, heads), records, map(masked, records), strict=True)
    return b"".join(b"".join(piece) for piece in pieces)


def write_records(path, records):
    files({path.name: framed(records)})(path.parent)


def test_files_of_the_usual_names_are_found_and_others_passed_over(tmp_path):
    names = ["a.tfrecord", "b.tfrecords", "c.tfrec", "d.tfrecord-00000-of-00002", "sub/e-00001-of-00002.TFRecord"]
    contents = {name: framed([example(n=ints(number))]) for number, name in enumerate(names)}
    contents["z.tfrecord.gz"] = gzip.compress(framed([example(n=ints(number)) for number in (5, 6, 7)]))
    files({**contents, **dict.fromkeys(("dataset_info.json", "a.index", ".hidden.tfrecord"), b"{}")})(tmp_path)
    source = opened(tmp_path)
    assert [info.path for info in source.files] == [*contents]
    assert rows_of(source) == [{"n": number} for number in range(8)]
    assert rows_of(source, [6]) == [{"n": 6}]


def test_files_without_the_usual_names_are_read_where_the_format_is_named(tmp_path):
    write_records(tmp_path / "train-00000-of-00001", [example(n=ints(1))])
    assert_error(SourceError, "no known format", tmp_path)
    assert rows_of(opened(tmp_path, name="tfrecord")) == [{"n": 1}]
    write_records(tmp_path / "what.ever", [example(n=ints(2))])
    assert rows_of(opened(tmp_path / "what.ever", name="tfrecord")) == [{"n": 2}]
    (tmp_path / "train-00000-of-00001").unlink()
    assert_error(SourceError, r"holds no \.tfrecord", tmp_path, name="tfrecord")


def test_files_without_records_count_for_nothing(tmp_path):
    write_records(tmp_path / "a.tfrecord", [])
    assert_error(SourceError, "holds no sample", tmp_path)
    write_records(tmp_path / "b.tfrecord", [example(n=ints(5))])
    write_records(tmp_path / "c.tfrecord", [])
    assert rows_of(opened(tmp_path)) == [{"n": 5}]


@pytest.mark.parametrize("packed", [False, True])
@given(cut=st.integers(1, 158))
@settings(max_examples=30)
def test_a_truncated_file_of_records_is_an_error(packed, cut):
    records = [example(n=ints(number), raw=texts(bytes(10))) for number in range(3)]
    data = framed(records)
    size = len(framed(records[:1]))
    assert len(data) == 159 == 3 * size
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x.tfrecord").write_bytes(gzip.compress(data[:cut]) if packed else data[:cut])
        if cut % size == 0:
            assert opened(folder).num_samples == cut // size
            return
        message = rf"x\.tfrecord is truncated: it ends at byte {cut}, within .* {cut // size * size}"
        assert_error(SourceError, message, folder)


def spoiled(at):
    """A file of two records, with one byte changed."""
    data = bytearray(framed([example(n=ints(1)), example(n=ints(2))]))
    data[at] ^= 1
    return files({"x.tfrecord": bytes(data)})


def written(*records):
    return files({"x.tfrecord": framed(records)})


def sequence():
    return example(n=ints(1)) + tagged(2, 2, tagged(1, 2, tagged(1, 2, b"frames")))


ONE = framed([example(n=ints(1))])
SIZE = len(ONE)
LONG = struct.pack("<Q", 1 << 40)
GZIPPED = gzip.compress(np.random.default_rng(0).bytes(3000))
BROKEN = GZIPPED[:1000] + bytes(100) + GZIPPED[1100:]
BAD_RECORDS = {
    "length": (spoiled(0), r"x\.tfrecord is not a TFRecord file, or damaged: the checksum of the length at byte 0"),
    "second length": (spoiled(SIZE + 2), f"the checksum of the length at byte {SIZE} "),
    "checksum of a length": (spoiled(9), "the checksum of the length at byte 0"),
    "text": (files({"x.tfrecord": b"not a record at all"}), "is not a TFRecord file"),
    "zlib": (files({"x.tfrecord": zlib.compress(ONE)}), r"x\.tfrecord is not a TFRecord file.*compressed with zlib"),
    "broken gzip": (files({"x.tfrecord.gz": BROKEN}), r"x\.tfrecord\.gz is damaged"),
    "too long": (files({"x.tfrecord": LONG + masked(LONG)}), "has a record of 1099511627776 bytes at byte 0"),
    "a head cut off": (
        files({"x.tfrecord": ONE + b"\xff" * 9}),
        rf"x\.tfrecord is truncated: it ends at byte {SIZE + 9}, within .* {SIZE}",
    ),
    "sequences": (written(sequence()), r"x\.tfrecord: sample 0: it is a tf.train.SequenceExample"),
    "no Example": (written(b"\xff\xff"), r"x\.tfrecord: sample 0: it is not a tf.train.Example, or damaged"),
    "lists of bytes": (written(example(x=texts(b"a", b"b"))), "no field of the format holds the field 'x'"),
    "nothing in a feature": (written(example(x=b"")), "no field of the format holds the field 'x'"),
    "names that meet": (written(example(**{"a/b": ints(1), "a_b": ints(1)})), "both make the field 'a_b'"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_invalid_records_are_an_error_when_opened(case, tmp_path):
    assert_refused(BAD_RECORDS[case], tmp_path, (SourceError, FieldError))


GOOD = example(n=ints(4), x=floats(0.5), t=texts(b"a"), v=ints(1, 2))
REFUSED_RECORDS = {
    "missing": (example(n=ints(4), x=floats(0.5), t=texts(b"a")), "'v'.*is missing"),
    "without a value": (example(n=ints(4), x=floats(0.5), t=b"", v=ints(1, 2)), "'t' .*is missing"),
    "an empty list": (example(n=ints(), x=floats(0.5), t=texts(b"a"), v=ints(1, 2)), r"'n' .*has shape \(0,\)"),
    "several for one": (example(n=ints(1, 2), x=floats(0.5), t=texts(b"a"), v=ints(1, 2)), r"'n' .*has shape \(2,\)"),
    "other kind": (example(n=floats(4), x=floats(0.5), t=texts(b"a"), v=ints(1, 2)), "'n' .*is float32, expected int"),
    "several texts": (example(n=ints(4), x=floats(0.5), t=texts(b"a", b"b"), v=ints(1, 2)), "'t' .*is a list"),
    "a sequence": (sequence(), "it is a tf.train.SequenceExample"),
    "no Example": (b"\x0a\xff", "it is not a tf.train.Example, or damaged"),
    "half a float": (example(n=tagged(2, 2, tagged(1, 2, b"abc"))), "it is not a tf.train.Example, or damaged"),
}


@pytest.mark.parametrize("case", REFUSED_RECORDS)
def test_a_bad_record_is_the_only_bad_sample(case, tmp_path):
    record, message = REFUSED_RECORDS[case]
    many = 500  # so that the bad one is not among those that are looked at first
    write_records(tmp_path / "x.tfrecord", [GOOD] * 7 + [record] + [GOOD] * (many - 8))
    source = opened(tmp_path)
    good, refused = bad_rows(source)
    assert len(good) == many - 1
    assert [bad.position for bad in refused] == [7]
    assert refused[0].name.endswith("x.tfrecord: sample 7")
    assert_error(SourceError, message, source)


def test_a_record_of_a_wrong_checksum_is_the_only_bad_sample(tmp_path):
    spoiled(12)(tmp_path)
    good, refused = bad_rows(opened(tmp_path))
    assert good == [{"n": 2}]
    assert refused[0].problem == "it is damaged: its data do not match their checksum"
    assert refused[0].data


def test_bytes_become_text_where_that_is_selected(tmp_path):
    write_records(tmp_path / "x.tfrecord", [example(c=texts("é".encode())), example(c=texts(b"\xff"))])
    good, refused = bad_rows(opened(tmp_path, "c=text"))
    assert good == [{"c": "é"}]
    assert "'c' is not UTF-8" in refused[0].problem
    assert str(opened(tmp_path).fields["c"]) == "bytes"


def test_lists_become_the_selected_types(tmp_path):
    write_records(tmp_path / "x.tfrecord", [example(a=ints(n), b=floats(n)) for n in range(3)])
    assert kinds_of(opened(tmp_path)) == {"a": "int64", "b": "float32"}
    assert rows_of(opened(tmp_path, "b=float32[1],a=ragged:int32")) == [{"b": [n], "a": [n]} for n in range(3)]
    assert rows_of(opened(tmp_path, "a=uint8")) == [{"a": n} for n in range(3)]
    write_records(tmp_path / "x.tfrecord", [example(a=ints(n), b=texts(b"x", b"y")) for n in range(3)])
    assert rows_of(opened(tmp_path, "a")) == [{"a": n} for n in range(3)], "no field holds b"


def test_numbers_are_read_packed_and_one_by_one():
    values = [-(1 << 63), -1, 0, 300, (1 << 63) - 1]
    single = tagged(3, 2, b"".join(tagged(1, 0, varint(number)) for number in values))
    halves = tagged(3, 2, tagged(1, 2, b"".join(map(varint, values[:3])))) + ints(*values[3:])
    fractions = tagged(2, 2, b"".join(tagged(1, 5, struct.pack("<f", number)) for number in (0.5, -2.0)))
    read = [(feature, np.int64, values) for feature in (ints(*values), single, halves)]
    for feature, dtype, wanted in [*read, (fractions, np.float32, [0.5, -2.0]), (floats(0.5), np.float32, [0.5])]:
        found = parse_example(memoryview(example(x=feature)))["x"]
        assert (found.dtype, found.tolist()) == (dtype, wanted)


def test_messages_are_merged_as_protocol_buffers_are():
    later = example(a=ints(1)) + example(b=ints(2), a=ints(3))
    assert {key: one.tolist() for key, one in parse_example(memoryview(later)).items()} == {"a": [3], "b": [2]}
    assert parse_example(memoryview(example(a=ints(1) + texts(b"x")))) == {"a": b"x"}
    assert parse_example(memoryview(example(a=texts(b"x", b"y")))) == {"a": [b"x", b"y"]}
    unknown = tagged(9, 2, b"later versions") + tagged(8, 1, bytes(8)) + tagged(7, 5, bytes(4)) + tagged(6, 0, b"\1")
    assert parse_example(memoryview(unknown + example(a=texts(b"x")))) == {"a": b"x"}
    assert parse_example(memoryview(b"")) == {}


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader_of_examples(data):
    for wrapped in (data, tagged(1, 2, data), example(x=data)):
        with suppress(ValueError):
            parse_example(memoryview(wrapped))


def test_huge_records_are_found_without_reading_them(tmp_path):
    head = struct.pack("<Q", 1 << 30)
    with (tmp_path / "x.tfrecord").open("wb") as file:  # sparse
        for _ in range(3):
            file.write(head + masked(head))
            file.seek((1 << 30) + 4, io.SEEK_CUR)
        file.write(framed([example(n=ints(1))]))
    info = ObjectInfo("x.tfrecord", (tmp_path / "x.tfrecord").stat().st_size, "")
    with within(16 << 20):
        starts = record_starts(open_reader(open_store(tmp_path), info))
    assert starts[:4].tolist() == [number * ((1 << 30) + 16) for number in range(4)]


# --- both formats with an index ---


def copied(src, root):
    shutil.copytree(FORMATS / src, root / "data")
    return root / "data"


def change_index(folder, change):
    index = json.loads((folder / "index.json").read_text())
    changed = change(index)
    (folder / "index.json").write_text(json.dumps(index if changed is None else changed))


def setting(*path, to):
    """Change one value of the index."""
    return lambda index: reduce(getitem, path[:-1], index).__setitem__(path[-1], to)


def column(name, encoding, size=None):
    """Change a column of all shards."""

    def change(index):
        for shard in index["shards"]:
            at = shard["column_names"].index(name)
            shard["column_encodings"][at], shard["column_sizes"][at] = encoding, size

    return change


SHARD = ("shards", 0)
BAD_MDS = {
    "version": (setting("version", to=3), "index.json is of version 3, only 2"),
    "no shards": (setting("shards", to=[]), "index.json lists no shard"),
    "no list": (setting("shards", to={"a": 1}), "index.json lists no shard"),
    "JSON shards": (setting(*SHARD, "format", to="json"), "shards of the format 'json'"),
    "no name": (setting(*SHARD, "raw_data", to=None), "does not describe shard 0"),
    "an odd name": (setting(*SHARD, "raw_data", "basename", to=["x"]), r"names the file \['x'\]"),
    "a climbing name": (
        setting(*SHARD, "raw_data", "basename", to="../data/shard.00000.mds"),
        r"names the file '\.\./data/shard.00000.mds': only files in its own folder",
    ),
    "an absolute name": (setting(*SHARD, "raw_data", "basename", to="/etc/passwd"), "names the file '/etc/passwd'"),
    "a backslash": (setting(*SHARD, "raw_data", "basename", to="..\\x.mds"), "only files in its own folder"),
    "a missing file": (setting(*SHARD, "raw_data", "basename", to="no.mds"), "'no.mds', which does not exist"),
    "a file twice": (lambda i: {**i, "shards": [i["shards"][0]] * 2}, "names the file 'shard.00000.mds' twice"),
    "the index as a shard": (setting(*SHARD, "raw_data", "basename", to="index.json"), "has 1110 bytes, it has"),
    "another size": (setting(*SHARD, "raw_data", "bytes", to=99), r"shard.00000.mds has 99 bytes, it has 1110"),
    "a negative size": (setting(*SHARD, "raw_data", "bytes", to=-1), "does not describe shard 0 .*-1"),
    "a size that is not a number": (setting(*SHARD, "raw_data", "bytes", to="9"), "does not describe shard 0"),
    "negative samples": (setting(*SHARD, "samples", to=-1), "does not describe shard 0"),
    "too many samples": (setting(*SHARD, "samples", to=10**12), "says that .*has 1000000000000 samples in 1110 bytes"),
    "brotli (zstd)": (setting(*SHARD, "compression", to="br:11"), "the compression 'br', only zstd"),
    "a huge shard (zstd)": (
        setting(*SHARD, "raw_data", "bytes", to=2**31),
        "unpacks to 2147483648 bytes, at most 1073741824",
    ),
    "other columns": (setting("shards", 1, "column_names", 0, to="x"), "shard 1 of .* has other column_names"),
    "other encodings": (setting("shards", 1, "column_encodings", 0, to="bytes"), "other column_encodings"),
    "no columns": (lambda i: {**i, "shards": [{"format": "mds"}]}, "does not list its columns .*column_names"),
    "too few sizes": (
        lambda i: [s["column_sizes"].pop() for s in i["shards"]] and i,
        "does not list its columns .*argument 3 is shorter",
    ),
    "a negative column": (column("count", "int", -8), "does not list its columns .*-8"),
    "a column of another size": (column("count", "int", 4), "says 4 bytes of the column 'count', 'int' has 8"),
    "a sized varying column": (column("raw", "bytes", 4), "says 4 bytes of the column 'raw', 'bytes' has varying"),
    "pickles": (column("raw", "pkl"), "has the column 'raw' of 'pkl': pickles, which are never read"),
    "lists of images": (column("raw", "list[jpeg]"), "of 'list.jpeg.': several images a sample"),
    "decimals": (column("raw", "str_decimal"), "decimal numbers"),
    "unknown": (column("raw", "later"), "of 'later': an encoding that is not known"),
    "an array of no length": (column("raw", "ndarray:int8:0"), "no length"),
    "an array of objects": (column("raw", "ndarray:object:2"), "an encoding that is not known"),
}


@pytest.mark.parametrize("case", BAD_MDS)
def test_an_invalid_index_is_an_error_when_opened(case, tmp_path):
    change, message = BAD_MDS[case]
    folder = copied(f"mds/input/{'zstd' if case.endswith('(zstd)') else 'plain'}", tmp_path)
    change_index(folder, change)
    assert_error(SourceError, message, folder)


NOT_JSON = ["{", "[" * 100_000, '{"version": 2, "shards": [' + "9" * 5000 + "]}", "\xff", "null"]


@pytest.mark.parametrize("text", NOT_JSON)
def test_an_index_that_is_not_json_is_an_error(text, tmp_path):
    files({"index.json": text.encode("latin-1"), "a.mds": b""})(tmp_path)
    assert_error(SourceError, r"index\.json is not (a )?JSON", tmp_path)


def test_folders_with_an_index_each_are_listed(tmp_path):
    for split in ("train", "val"):
        shutil.copytree(FORMATS / "mds/input/plain", tmp_path / split)
    assert_error(SourceError, r"holds no index.json, its folders train, val do; convert each: .*/train", tmp_path)
    assert opened(tmp_path / "val").num_samples == len(samples_in("mds/input/plain"))
    assert_error(SourceError, "is not a folder; name the folder", tmp_path / "val" / "index.json", name="mds")
    (tmp_path / "val" / "index.json").unlink()
    assert_error(SourceError, r"holds no index\.json", tmp_path / "val", name="mds")


def test_the_source_is_made_of_the_index_and_what_it_names(tmp_path):
    folder = copied("mds/input/plain", tmp_path)
    named = sorted(path.name for path in folder.iterdir())
    (folder / "leftover.bin").write_bytes(b"x")
    assert [info.path for info in opened(folder).files] == named


def test_what_is_not_read_can_be_left_out(tmp_path):
    folder = copied("mds/input/plain", tmp_path)
    change_index(folder, column("raw", "pkl"))
    assert_error(SourceError, r"pickles, which are never read.*fields=", folder)
    wanted = [{name: sample[name] for name in ("caption", "count")} for sample in samples_in("mds/input/plain")]
    assert rows_of(opened(folder, "caption,count")) == wanted


def first_file(folder):
    return next(path for path in sorted(folder.iterdir()) if path.name != "index.json")


def poke(at, number):
    return lambda data: data[:at] + struct.pack("<I", number) + data[at + 4 :]


DAMAGED = {
    "MDS count": ("mds/input/plain", poke(0, 3), r"shard.00000.mds holds 3 samples, its index says 2"),
    "MDS offset beyond": ("mds/input/plain", poke(12, 10**6), r"shard.00000.mds is damaged: its offsets"),
    "MDS offset in the table": ("mds/input/plain", poke(4, 3), "its offsets are not ascending within its size"),
    "MDS offsets descending": ("mds/input/plain", poke(8, 400_000), "its offsets are not ascending within its size"),
    "MDS zstd": ("mds/input/zstd", poke(20, 12345), r"shard.00000.mds.zstd is damaged"),
}
for name in ("plain", "zstd"):
    for cut in (5, 30, -1):
        DAMAGED[f"{name} cut at {cut}"] = f"mds/input/{name}", lambda data, cut=cut: data[:cut], r"shard\.00000\.mds"


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_an_error(case, tmp_path):
    src, damage, message = DAMAGED[case]
    folder = copied(src, tmp_path)
    path = first_file(folder)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=message):
        rows_of(opened(folder))


def test_a_sample_of_wrong_sizes_is_the_only_bad_one(tmp_path):
    folder = copied("mds/input/plain", tmp_path)
    path = first_file(folder)
    data = path.read_bytes()
    path.write_bytes(poke(struct.unpack_from("<I", data, 8)[0], 2**31)(data))
    samples = samples_in("mds/input/plain")
    good, refused = bad_rows(opened(folder))
    assert good == [samples[0], *samples[2:]]
    assert [bad.position for bad in refused] == [1]
    assert refused[0].name.endswith(f"{path.name}: sample 1")
    assert "bytes, its " in refused[0].problem


# --- MDS ---


def mds_shard(samples):
    offsets = np.cumsum([4 * (len(samples) + 2), *map(len, samples)]).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + b"".join(samples)


def entry_of(name, shard, count, columns):
    """The entry of a shard in an index; each column has an encoding and a size."""
    encodings, sizes = zip(*columns.values(), strict=True)
    of_columns = {"column_names": list(columns), "column_encodings": encodings, "column_sizes": sizes}
    return {"format": "mds", "samples": count, "raw_data": {"basename": name, "bytes": len(shard)}, **of_columns}


def write_mds(root, encoding, values, packed=None):
    """A dataset of one column `x`, by hand, in one shard; `packed` has how it is compressed, truly or not."""
    root.mkdir(exist_ok=True)
    size = encoding_of(encoding)[1]
    shard = mds_shard([(b"" if size else struct.pack("<I", len(one))) + one for one in values])
    entry = entry_of("a.mds", shard, len(values), {"x": (encoding, size or None)})
    name, data = "a.mds", shard
    if packed:
        name, data = "a.mds.z", packed["pack"](shard)
        entry |= {"zip_data": {"basename": name, "bytes": len(data)}, "compression": packed["codec"]}
        entry["raw_data"] = {"basename": "a.mds", "bytes": packed.get("bytes", len(shard))}
    (root / name).write_bytes(data)
    (root / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    return root


PACKED = {"gz:5": gzip.compress, "bz2": bz2.compress, "zstd:3": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("codec", PACKED)
def test_shards_are_unpacked_up_to_their_stated_size(codec, tmp_path):
    values = [bytes([number]) * 100_000 for number in range(30)]  # several pieces of what is unpacked
    folder = write_mds(tmp_path / "x", "bytes", values, {"codec": codec, "pack": PACKED[codec]})
    assert read(opened(folder, name="mds"), [0, 9, 29])["x"] == [values[0], values[9], values[29]]
    for stated, message in ((3_000_000, "more than the 3000000 bytes"), (3_000_300, "less than the 3000300 bytes")):
        packing = {"codec": codec, "pack": PACKED[codec], "bytes": stated}
        with pytest.raises(SourceError, match=rf"a\.mds\.z.*{message}"):
            opened(write_mds(tmp_path / "x", "bytes", values, packing), name="mds")


def test_a_bomb_is_not_unpacked(tmp_path):
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(200 << 20))
    assert len(bomb) < 100_000
    folder = write_mds(tmp_path / "x", "bytes", [b"a"], {"codec": "zstd", "pack": lambda _: bomb})
    with within(64 << 20), pytest.raises(SourceError, match="unpacks to more than the"):
        opened(folder, name="mds")


def test_an_unpacked_shard_beside_a_compressed_one_is_taken(tmp_path):
    folder = copied("mds/input/zstd", tmp_path)
    packed = first_file(folder)
    packed.with_suffix("").write_bytes(zstandard.ZstdDecompressor().decompress(packed.read_bytes()))
    packed.write_bytes(b"never looked at")
    source = opened(folder)
    assert rows_of(source) == samples_in("mds/input/zstd")
    assert "shard.00000.mds" in [info.path for info in source.files]


def array_of(dtype, shape, data, width=0):
    return bytes([dtype, len(shape) << 2 | width]) + b"".join(n.to_bytes(1 << width, "little") for n in shape) + data


VALUES = {
    "int": ("int", struct.pack("<q", -3), np.int64(-3)),
    "float64": ("float64", struct.pack("<d", 0.5), np.float64(0.5)),
    "uint64": ("uint64", b"\xff" * 8, np.uint64(2**64 - 1)),
    "array of bytes": ("ndarray", array_of(8, [2, 1], b"\1\2"), np.array([[1], [2]], np.uint8)),
    "wide shape": ("ndarray", array_of(8, [2], b"\1\2", width=3), np.array([1, 2], np.uint8)),
    "known dtype": ("ndarray:int16", array_of(0, [2], b"\1\0\2\0")[1:], np.array([1, 2], np.int16)),
    "known shape": ("ndarray:int16:2,1", b"\1\0\2\0", np.array([[1], [2]], np.int16)),
    "digits": ("str_int", b"-12", np.int64(-12)),
    "decimal point": ("str_float", b"2.5e3", np.float64(2500)),
    "bytes": ("bytes", b"\xff", b"\xff"),
    "JSON": ("json", b'{"a": 1}', '{"a": 1}'),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_of_mds_are_read_by_their_encoding(case):
    encoding, data, wanted = VALUES[case]
    found = encoding_of(encoding)[0](data)
    assert np.asarray(found).dtype == np.asarray(wanted).dtype
    assert np.array_equal(found, wanted)


WRONG_VALUES = {
    "no UTF-8": ("str", b"\xff", "codec can't decode byte 0xff"),
    "no number": ("str_int", b"x", "is not a number of int64"),
    "too large": ("str_int", b"9" * 30, "is not a number of int64"),
    "millions of digits": ("str_int", b"9" * 10_000_000, "is not a number of int64"),
    "no float": ("str_float", b"x", "is not a number of float64"),
    "infinite float": ("str_float", b"1e400", "is not a number of float64"),
    "no dtype": ("ndarray", b"", "no dtype that is known"),
    "unknown dtype": ("ndarray", array_of(200, [1], b"\1"), "no dtype that is known"),
    "no shape": ("ndarray", b"\x08", "do not hold its shape"),
    "no axes": ("ndarray", array_of(8, [], b"\1"), "do not hold its shape"),
    "half a shape": ("ndarray", b"\x08\x0c\1", "do not hold its shape"),
    "many axes": ("ndarray", array_of(8, [1] * 60, b"\1"), "do not hold its shape"),
    "too short": ("ndarray", array_of(8, [255, 255], b"\1"), r"uint8\[255, 255\], and has 1 bytes"),
    "too long": ("ndarray:int8:2", b"\1\2\3", r"int8\[2\], and has 3"),
    "overflowing": ("ndarray", array_of(8, [2**63] * 3, b"", width=3), "and has 0 bytes"),
    "no image": ("png", b"x", "no known image header"),
    "no pixels": ("pil", b"", "too few for its header"),
    "few pixels": ("pil", struct.pack("<III", 9, 9, 3) + b"RGB" + bytes(5), "9 x 9 pixels needs 243 bytes, it has 5"),
    "an image of no size": ("pil", struct.pack("<III", 0, 9, 3) + b"RGB", "0 x 9 pixels"),
    "a huge image": ("pil", struct.pack("<III", 2**32 - 1, 2**32 - 1, 1) + b"L", "it has 0"),
    "inks": ("pil", struct.pack("<III", 1, 1, 4) + b"CMYK" + bytes(4), "the mode 'CMYK'"),
    "a palette": ("pil", struct.pack("<III", 1, 1, 1) + b"P" + bytes(1), "the mode 'P'"),
    "a long mode": ("pil", struct.pack("<III", 1, 1, 2**31) + b"L", "the mode '\\?'"),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_an_invalid_value_of_mds_is_an_error(case, tmp_path):
    encoding, data, message = WRONG_VALUES[case]
    with pytest.raises(ValueError, match=message):
        encoding_of(encoding)[0](data)
    if len(data) < 1000 and encoding_of(encoding)[1] == 0:
        with pytest.raises(SourceError, match=f"a.mds: sample 0: column 'x': .*{message}"):
            opened(write_mds(tmp_path / "x", encoding, [data]), name="mds")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "I;16"])
def test_images_of_pixels_become_png_without_loss(mode):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    image = Image.fromarray(pixels, "RGBA").convert(mode if mode != "I;16" else "L")
    if mode == "I;16":
        image = Image.frombytes("I;16", (7, 5), pixels[..., :2].tobytes())
    stored = struct.pack("<III", *image.size, len(mode)) + mode.encode() + image.tobytes()
    found = encoding_of("pil")[0](stored)
    assert (found.mode, found.size, found.tobytes()) == (mode, image.size, image.tobytes())
    out = io.BytesIO()
    found.save(out, "PNG")
    assert Image.open(out).convert(mode).tobytes() == image.tobytes()


def test_shards_in_folders_below_are_found(tmp_path):
    """As streaming merges indexes."""
    folder = copied("mds/input/plain", tmp_path)
    (folder / "0").mkdir()
    for number, path in enumerate(sorted(folder.glob("*.mds"))):
        path.rename(folder / "0" / path.name)
        change_index(folder, setting("shards", number, "raw_data", "basename", to=f"0/{path.name}"))
    assert rows_of(opened(folder)) == samples_in("mds/input/plain")


def test_many_samples_of_several_shards_are_read_by_row(tmp_path):
    counts, entries = (1000, 0, 3, 700), []
    for number, count in enumerate(counts):
        shard = mds_shard([struct.pack("<q", 10_000 * number + i) + bytes(900) for i in range(count)])
        (tmp_path / f"{number}.mds").write_bytes(shard)
        entries.append(entry_of(f"{number}.mds", shard, count, {"n": ("int", 8), "x": ("ndarray:uint8:900", 900)}))
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    source = opened(tmp_path)
    rows = [0, 999, 1000, 1002, 1003, 1702]
    assert [sample["n"] for sample in rows_of(source, rows)] == [0, 999, 20000, 20002, 30000, 30699]


# --- LitData ---


class LitDataSamples:
    """The samples of a LitData dataset by number; lists as fields hold them, see formats/litdata/MAPPING.md."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        sample = self.dataset[number]
        if isinstance(sample, dict) and "meta" in sample:
            sample["meta"] = json.dumps(sample["meta"])
        elif isinstance(sample, dict):
            right = sample["nested"].pop("right")
            sample["nested"] |= {f"right_{place}": value for place, value in enumerate(right)}
        return sample


@pytest.mark.parametrize("variant", ["plain", "frames", "samples", "chunks", "rows", "tokens"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # LitData leaves files open
def test_litdata_is_converted_through_its_own_package(variant, tmp_path):
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.serializers import BytesSerializer

    expected = json.loads((FORMATS / "litdata/expected.json").read_text())
    expected = expected[variant] if variant in ("rows", "tokens") else expected
    options = {"serializers": {"jpeg": BytesSerializer()}}  # images as they are stored
    wanted = expected["samples"]
    if variant == "tokens":
        options = {"item_loader": litdata.TokensLoader(block_size=1)}
        wanted = [{"data": [token]} for sample in expected["samples"] for token in sample["data"]]
    folder = copied(f"litdata/input/{variant}", tmp_path)  # LitData deletes local chunks that it has unpacked
    samples = LitDataSamples(litdata.StreamingDataset(str(folder), cache_dir=str(tmp_path / "cache"), **options))
    dataset = sl.open(sl.convert(samples, tmp_path / "out", workers=0).url)
    assert rows_of(opened(dataset.url)) == wanted
    if variant != "tokens":
        assert {name: str(field) for name, field in dataset.fields.items()} == expected["fields"]


@pytest.mark.parametrize("variant", ["plain", "frames", "samples", "chunks", "rows", "tokens"])
def test_a_folder_of_litdata_names_the_way_to_convert_it(variant):
    assert_error(SourceError, r"is a LitData dataset.*sl\.convert\(DATASET, DST\)", FORMATS / "litdata/input" / variant)
