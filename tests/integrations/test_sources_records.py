"""TFRecord, MDS and LitData as sources: what their own tools read, and every input that cannot be converted."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import pickle
import shutil
import struct
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_convert_sources import FORMATS, plain

import streamloader as sl
from streamloader.conversion.job import convert
from streamloader.conversion.sources.base import BadSample, Source, refuse_all
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.loaders.littree import leaf_names
from streamloader.conversion.sources.loaders.litvalues import leaf_reader
from streamloader.conversion.sources.loaders.mdsvalues import encoding_of
from streamloader.conversion.sources.loaders.tfexample import BytesList, parse_example, unpack_varints
from streamloader.conversion.sources.loaders.tfrecord import record_starts
from streamloader.conversion.sources.tars.tarindex import open_tar
from streamloader.conversion.sources.wish import parse_wish
from streamloader.errors import ConvertError, FieldError, SourceError, UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import from_bytes
from streamloader.storage import open_store
from streamloader.storage.protocol import ObjectInfo

EXPECTED = {
    "tfrecord/input": ("tfrecord", None),
    "tfrecord/input/*.tfrecord-*": ("tfrecord", None),
    "mds/input/plain": ("mds", None),
    "mds/input/zstd": ("mds", None),
    "litdata/input/plain": ("litdata", None),
    "litdata/input/frames": ("litdata", None),
    "litdata/input/samples": ("litdata", None),
    "litdata/input/chunks": ("litdata", None),
    "litdata/input/rows": ("litdata", "rows"),
    "litdata/input/tokens": ("litdata", "tokens"),
}


def opened(src: Path | str, fields: str | None = None, name: str | None = None, **options: Any) -> Source:
    return open_source(src, name, options, parse_wish(fields))[1]


def expected(src: str) -> Any:
    name, part = EXPECTED[src]
    said = json.loads((FORMATS / name / "expected.json").read_text())
    return said[part] if part else said


def value(field: Field, item: Any) -> Any:
    """A value as expected.json has it: images that were stored as pixels are compared by these."""
    if not field.fixed:
        item = from_bytes("", field, memoryview(item), 0)
    return plain(item)


def rows_of(source: Source, rows: Sequence[int], refuse: Any = refuse_all) -> list[dict[str, Any]]:
    columns = source.part(np.array(rows, np.int64)).read(refuse)
    return samples_of(source.fields, columns)


def samples_of(fields: Mapping[str, Field], columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    named = {name: [value(fields[name], item) for item in column] for name, column in columns.items()}
    if "pixels" in columns:
        named["pixels"] = [np.asarray(Image.open(io.BytesIO(item))).tolist() for item in columns["pixels"]]
    return [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]


def all_rows(source: Source, refuse: Any = refuse_all) -> list[dict[str, Any]]:
    return rows_of(source, range(source.num_samples), refuse)


@pytest.mark.parametrize("src", EXPECTED)
def test_a_source_reads_what_its_own_tool_reads(src: str) -> None:
    said = expected(src)
    name, source = open_source(FORMATS / src, None, {}, parse_wish(None))
    assert name == EXPECTED[src][0]
    assert {field: str(kind) for field, kind in source.fields.items()} == said["fields"]
    assert all_rows(source) == said["samples"]


@pytest.mark.parametrize("src", EXPECTED)
@given(data=st.data())
@settings(max_examples=15)
def test_any_rows_read_alone_or_after_pickling_are_the_same(src: str, data: st.DataObject) -> None:
    source = opened(FORMATS / src)
    samples = expected(src)["samples"]
    chosen = sorted(data.draw(st.sets(st.integers(0, len(samples) - 1))))
    assert rows_of(source, chosen) == [samples[row] for row in chosen]
    part = pickle.loads(pickle.dumps(source.part(np.array(chosen, np.int64))))
    assert samples_of(source.fields, part.read(refuse_all)) == [samples[row] for row in chosen]


def test_a_source_is_the_same_below_every_url(store_url: tuple[str, dict[str, Any]]) -> None:
    url, options = store_url
    store = open_store(url, options)
    for src in ("tfrecord/input", "mds/input/plain", "litdata/input/frames", "litdata/input/chunks"):
        for path in sorted((FORMATS / src).iterdir()):
            store.put(path.relative_to(FORMATS).as_posix(), path.read_bytes())
        source = opened(f"{url}/{src}", **options)
        assert all_rows(source) == expected(src)["samples"]
        assert not source.url.startswith("/")


@pytest.mark.parametrize("src", EXPECTED)
def test_a_conversion_gives_the_same_samples(src: str, tmp_path: Path) -> None:
    report = convert(FORMATS / src, tmp_path / "out", workers=0)
    assert report.format == EXPECTED[src][0]
    dataset = sl.open(str(tmp_path / "out"))
    said = expected(src)
    assert len(dataset) == len(said["samples"])
    for number, sample in enumerate(said["samples"]):
        found = {name: plain(one) for name, one in dataset[number].items()}
        if "pixels" in found:
            found["pixels"] = np.asarray(Image.open(io.BytesIO(dataset[number]["pixels"]))).tolist()
        assert found == sample


def test_bad_samples_are_left_out_of_a_conversion(tmp_path: Path) -> None:
    write_records(tmp_path / "in" / "x.tfrecord", [example(n=ints(7)), b"\xff", example(n=ints(9))])
    report = convert(tmp_path / "in", tmp_path / "out", workers=0, on_error="skip")
    assert [int(sample["n"]) for sample in sl.open(report.url)] == [7, 9]


# --- TFRecord ---


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def tagged(number: int, wire: int, data: bytes) -> bytes:
    return varint(number << 3 | wire) + (varint(len(data)) if wire == 2 else b"") + data


def ints(*values: int) -> bytes:
    return tagged(3, 2, tagged(1, 2, b"".join(map(varint, values))))


def floats(*values: float) -> bytes:
    return tagged(2, 2, tagged(1, 2, struct.pack(f"<{len(values)}f", *values)))


def texts(*values: bytes) -> bytes:
    return tagged(1, 2, b"".join(tagged(1, 2, one) for one in values))


def example(**features: bytes) -> bytes:
    """An Example by hand, as the protocol buffers' encoding says."""
    entries = [tagged(1, 2, tagged(1, 2, key.encode()) + tagged(2, 2, one)) for key, one in features.items()]
    return tagged(1, 2, b"".join(entries))


def masked(data: bytes) -> bytes:
    crc = crc32c.crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(records: Sequence[bytes]) -> bytes:
    heads = [struct.pack("<Q", len(record)) for record in records]
    pieces = zip(heads, map(masked, heads), records, map(masked, records), strict=True)
    return b"".join(b"".join(piece) for piece in pieces)


def write_records(path: Path, records: Sequence[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(framed(records))
    return path


def test_files_of_the_usual_names_are_found_and_others_passed_over(tmp_path: Path) -> None:
    names = ["a.tfrecord", "b.tfrecords", "c.tfrec", "d.tfrecord-00000-of-00002", "sub/e-00001-of-00002.TFRecord"]
    for number, name in enumerate(names):
        write_records(tmp_path / name, [example(n=ints(number))])
    for name in ("dataset_info.json", "a.index", ".hidden.tfrecord"):
        (tmp_path / name).write_text("{}")
    source = opened(tmp_path)
    assert [info.path for info in source.files] == names
    assert [sample["n"] for sample in all_rows(source)] == [0, 1, 2, 3, 4]


def test_files_without_the_usual_names_are_read_where_the_format_is_named(tmp_path: Path) -> None:
    write_records(tmp_path / "train-00000-of-00001", [example(n=ints(1))])
    with pytest.raises(SourceError, match="no known format"):
        opened(tmp_path)
    assert all_rows(opened(tmp_path, name="tfrecord")) == [{"n": 1}]
    write_records(tmp_path / "what.ever", [example(n=ints(2))])
    assert all_rows(opened(tmp_path / "what.ever", name="tfrecord")) == [{"n": 2}]
    (tmp_path / "train-00000-of-00001").unlink()
    with pytest.raises(SourceError, match="names no TFRecord file"):
        opened(tmp_path, name="tfrecord")


def test_gzipped_records_are_read_like_others(tmp_path: Path) -> None:
    plain_file = FORMATS / "tfrecord/input/data.tfrecord-00000-of-00002"
    (tmp_path / "x.tfrecord.gz").write_bytes(gzip.compress(plain_file.read_bytes()))
    source = opened(tmp_path)
    samples = expected("tfrecord/input")["samples"]
    assert all_rows(source) == samples[:3]
    assert rows_of(source, [1]) == [samples[1]]


def test_files_without_records_count_for_nothing(tmp_path: Path) -> None:
    write_records(tmp_path / "a.tfrecord", [])
    with pytest.raises(SourceError, match="holds no sample"):
        opened(tmp_path)
    write_records(tmp_path / "b.tfrecord", [example(n=ints(5))])
    write_records(tmp_path / "c.tfrecord", [])
    assert all_rows(opened(tmp_path)) == [{"n": 5}]


@pytest.mark.parametrize("packed", [False, True])
@given(cut=st.integers(1, 158))
@settings(max_examples=30)
def test_a_truncated_file_of_records_is_named(packed: bool, cut: int) -> None:
    records = [example(n=ints(number), raw=texts(bytes(10))) for number in range(3)]
    data = framed(records)
    size = len(framed(records[:1]))
    assert len(data) == 159 == 3 * size
    with tempfile.TemporaryDirectory() as folder:
        part = gzip.compress(data[:cut]) if packed else data[:cut]
        (Path(folder) / "x.tfrecord").write_bytes(part)
        if cut % size == 0:
            assert opened(folder).num_samples == cut // size
            return
        with pytest.raises(
            SourceError, match=rf"x\.tfrecord is truncated: it ends at byte {cut}, within .* {cut // size * size}"
        ):
            opened(folder)


def spoiled(at: int) -> Callable[[Path], None]:
    """A file of two records, with one byte changed."""

    def make(root: Path) -> None:
        data = bytearray(framed([example(n=ints(1)), example(n=ints(2))]))
        data[at] ^= 1
        (root / "x.tfrecord").write_bytes(data)

    return make


def written(*records: bytes) -> Callable[[Path], Any]:
    return lambda root: write_records(root / "x.tfrecord", records)


def zlibbed(root: Path) -> None:
    (root / "x.tfrecord").write_bytes(zlib.compress(framed([example(n=ints(1))])))


def broken_gzip(root: Path) -> None:
    data = bytearray(gzip.compress(os.urandom(3000)))
    data[1000:1100] = bytes(100)
    (root / "x.tfrecord.gz").write_bytes(data)


def long_record(root: Path) -> None:
    head = struct.pack("<Q", 1 << 40)
    (root / "x.tfrecord").write_bytes(head + masked(head) + bytes(100))


def sequence() -> bytes:
    return example(n=ints(1)) + tagged(2, 2, tagged(1, 2, tagged(1, 2, b"frames")))


SIZE = len(framed([example(n=ints(1))]))
BAD_RECORDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "length": (spoiled(0), r"x\.tfrecord is no TFRecord, or damaged: the checksum of the length at byte 0"),
    "second length": (spoiled(SIZE + 2), f"the checksum of the length at byte {SIZE} "),
    "checksum of a length": (spoiled(9), "the checksum of the length at byte 0"),
    "text": (lambda root: (root / "x.tfrecord").write_text("not a record at all"), "is no TFRecord"),
    "zlib": (zlibbed, r"x\.tfrecord is compressed with zlib"),
    "broken gzip": (broken_gzip, r"x\.tfrecord\.gz is damaged"),
    "longer than any Example": (long_record, r"x\.tfrecord has a record of 1099511627776 bytes at byte 0"),
    "a head cut off": (
        lambda root: (root / "x.tfrecord").write_bytes(framed([example(n=ints(1))]) + b"\xff" * 9),
        rf"x\.tfrecord is truncated: it ends at byte {SIZE + 9}, within the record that begins at byte {SIZE}",
    ),
    "sequences": (written(sequence()), r"x\.tfrecord: record 0: it is a tf.train.SequenceExample"),
    "no Example": (written(b"\xff\xff"), r"x\.tfrecord: record 0: it is cut off, or damaged"),
    "groups": (written(b"\x0b\x0c"), "a field of the wire type 3"),
    "lists of bytes": (written(example(x=texts(b"a", b"b"))), "no field of the format holds the field 'x'"),
    "nothing in a feature": (written(example(x=b"")), "no field of the format holds the field 'x'"),
    "names that meet": (written(example(**{"a/b": ints(1), "a_b": ints(1)})), "both make the field 'a_b'"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_records_that_cannot_be_converted_are_named_when_they_are_opened(case: str, tmp_path: Path) -> None:
    make, told = BAD_RECORDS[case]
    make(tmp_path)
    with pytest.raises((SourceError, FieldError), match=told):
        opened(tmp_path)


GOOD = example(n=ints(4), x=floats(0.5), t=texts(b"a"), v=ints(1, 2))
REFUSED_RECORDS: dict[str, tuple[bytes, str]] = {
    "missing": (example(n=ints(4), x=floats(0.5), t=texts(b"a")), "'v' of .*record 7 is missing|'v'.*is missing"),
    "without a value": (example(n=ints(4), x=floats(0.5), t=b"", v=ints(1, 2)), "'t' .*is missing"),
    "an empty list": (example(n=ints(), x=floats(0.5), t=texts(b"a"), v=ints(1, 2)), r"'n' .*has shape \(0,\)"),
    "several for one": (example(n=ints(1, 2), x=floats(0.5), t=texts(b"a"), v=ints(1, 2)), r"'n' .*has shape \(2,\)"),
    "too few": (example(n=ints(4), x=floats(0.5), t=texts(b"a"), v=ints(1)), r"'v' .*has shape \(1,\)"),
    "another kind": (
        example(n=floats(4), x=floats(0.5), t=texts(b"a"), v=ints(1, 2)),
        "'n' .*is float32, expected int",
    ),
    "several texts": (example(n=ints(4), x=floats(0.5), t=texts(b"a", b"b"), v=ints(1, 2)), "'t' .*is a BytesList"),
    "a sequence": (sequence(), "it is a tf.train.SequenceExample"),
    "no Example": (b"\x0a\xff", "it is cut off, or damaged"),
    "a length too long": (b"\x0a\x09abc", "goes beyond its end"),
    "half a float": (example(n=tagged(2, 2, tagged(1, 2, b"abc"))), "floats have 3 bytes"),
    "a long varint": (example(n=tagged(3, 2, tagged(1, 2, b"\xff" * 80))), "its integers are damaged"),
}


@pytest.mark.parametrize("case", REFUSED_RECORDS)
def test_a_bad_record_is_refused_alone(case: str, tmp_path: Path) -> None:
    record, told = REFUSED_RECORDS[case]
    many = 500  # so that the bad one is not among those that are looked at first
    write_records(tmp_path / "x.tfrecord", [GOOD] * 7 + [record] + [GOOD] * (many - 8))
    source = opened(tmp_path)
    refused: list[BadSample] = []
    assert len(all_rows(source, refused.append)) == many - 1
    assert [bad.position for bad in refused] == [7]
    assert refused[0].name.endswith("x.tfrecord: record 7")
    with pytest.raises(SourceError, match=told):
        all_rows(source)


def test_a_record_of_a_wrong_checksum_is_refused_alone(tmp_path: Path) -> None:
    spoiled(12)(tmp_path)
    refused: list[BadSample] = []
    assert all_rows(opened(tmp_path), refused.append) == [{"n": 2}]
    assert refused[0].problem == "it is damaged: its data do not match their checksum"
    assert refused[0].data


def test_texts_are_decoded_where_they_are_wished(tmp_path: Path) -> None:
    write_records(tmp_path / "x.tfrecord", [example(c=texts("é".encode())), example(c=texts(b"\xff"))])
    source = opened(tmp_path, "c=text")
    refused: list[BadSample] = []
    assert all_rows(source, refused.append) == [{"c": "é"}]
    assert "'c' is no UTF-8" in refused[0].problem
    assert str(opened(tmp_path).fields["c"]) == "bytes"


def test_lists_become_what_is_wished(tmp_path: Path) -> None:
    write_records(tmp_path / "x.tfrecord", [example(a=ints(n), b=floats(n)) for n in range(3)])
    assert {name: str(kind) for name, kind in opened(tmp_path).fields.items()} == {"a": "int64", "b": "float32"}
    assert all_rows(opened(tmp_path, "b=float32[1],a=ragged:int32")) == [{"b": [n], "a": [n]} for n in range(3)]
    assert all_rows(opened(tmp_path, "a=uint8")) == [{"a": n} for n in range(3)]
    with pytest.raises(FieldError, match="no field 'z'; it has a, b"):
        opened(tmp_path, "z")


def test_features_that_no_field_holds_can_be_left_out(tmp_path: Path) -> None:
    write_records(tmp_path / "x.tfrecord", [example(a=ints(n), b=texts(b"x", b"y")) for n in range(3)])
    assert all_rows(opened(tmp_path, "a")) == [{"a": n} for n in range(3)]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_integers_are_read_packed_and_one_by_one(values: list[int]) -> None:
    one_by_one = tagged(3, 2, b"".join(tagged(1, 0, varint(number)) for number in values))
    halves = tagged(3, 2, tagged(1, 2, b"".join(map(varint, values[:3])))) + ints(*values[3:])
    for feature in (ints(*values), one_by_one, halves):
        found = parse_example(memoryview(example(x=feature)))["x"]
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.int64
        assert found.tolist() == values
    if values:
        assert unpack_varints(memoryview(b"".join(map(varint, values)))).tolist() == values


def test_floats_are_read_packed_and_one_by_one() -> None:
    single = tagged(2, 2, b"".join(tagged(1, 5, struct.pack("<f", number)) for number in (0.5, -2.0)))
    for feature in (single, floats(0.5, -2.0)):
        found = parse_example(memoryview(example(x=feature)))["x"]
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.tolist()) == (np.float32, [0.5, -2.0])


def test_messages_are_merged_as_protocol_buffers_are() -> None:
    later = example(a=ints(1)) + example(b=ints(2), a=ints(3))
    assert {key: one.tolist() for key, one in parse_example(memoryview(later)).items()} == {"a": [3], "b": [2]}  # type: ignore[union-attr]
    assert parse_example(memoryview(example(a=ints(1) + texts(b"x")))) == {"a": b"x"}
    assert parse_example(memoryview(example(a=texts(b"x", b"y")))) == {"a": BytesList(2)}
    unknown = tagged(9, 2, b"later versions") + tagged(8, 1, bytes(8)) + tagged(7, 5, bytes(4)) + tagged(6, 0, b"\1")
    assert parse_example(memoryview(unknown + example(a=texts(b"x")))) == {"a": b"x"}
    assert parse_example(memoryview(b"")) == {}


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader_of_examples(data: bytes) -> None:
    for wrapped in (data, tagged(1, 2, data), example(x=data)):
        with suppress(ValueError):
            parse_example(memoryview(wrapped))


def test_huge_records_are_found_without_reading_them(tmp_path: Path) -> None:
    head = struct.pack("<Q", 1 << 30)
    with (tmp_path / "x.tfrecord").open("wb") as file:  # sparse
        for _ in range(3):
            file.write(head + masked(head))
            file.seek((1 << 30) + 4, io.SEEK_CUR)
        file.write(framed([example(n=ints(1))]))
    tracemalloc.start()
    try:
        content, walk = open_tar(
            open_store(tmp_path), ObjectInfo("x.tfrecord", (tmp_path / "x.tfrecord").stat().st_size, "")
        )
        starts = record_starts(walk, content.where)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert starts[:4].tolist() == [number * ((1 << 30) + 16) for number in range(4)]
    assert peak < 16 << 20


# --- both formats with an index ---


def copied(src: str, root: Path) -> Path:
    shutil.copytree(FORMATS / src, root / "data")
    return root / "data"


def change_index(folder: Path, change: Callable[[Any], Any]) -> None:
    index = json.loads((folder / "index.json").read_text())
    changed = change(index)
    (folder / "index.json").write_text(json.dumps(index if changed is None else changed))


Change = Callable[[Any], Any]


def setting(*path: Any, to: Any) -> Change:
    def change(index: Any) -> None:
        for key in path[:-1]:
            index = index[key]
        index[path[-1]] = to

    return change


def column(name: str, encoding: str, size: int | None = None) -> Change:
    """Change a column of all shards."""

    def change(index: Any) -> None:
        for shard in index["shards"]:
            at = shard["column_names"].index(name)
            shard["column_encodings"][at], shard["column_sizes"][at] = encoding, size

    return change


SHARD = ("shards", 0)
BAD_MDS: dict[str, tuple[str, Change, str]] = {
    "version": ("plain", setting("version", to=3), "index.json is of version 3, only 2"),
    "no shards": ("plain", setting("shards", to=[]), "index.json lists no shard"),
    "no list": ("plain", setting("shards", to={"a": 1}), "index.json lists no shard"),
    "no object": ("plain", lambda _: [], "index.json is no JSON object"),
    "JSON shards": ("plain", setting(*SHARD, "format", to="json"), "shards of the format 'json'"),
    "no name": ("plain", setting(*SHARD, "raw_data", to=None), "does not say what shard 0 is"),
    "an odd name": ("plain", setting(*SHARD, "raw_data", "basename", to=["x"]), r"names the file \['x'\]"),
    "a number for a name": ("plain", setting(*SHARD, "raw_data", "basename", to=7), "names the file 7"),
    "a climbing name": (
        "plain",
        setting(*SHARD, "raw_data", "basename", to="../data/shard.00000.mds"),
        r"names the file '\.\./data/shard.00000.mds': only files in its own folder",
    ),
    "an absolute name": (
        "plain",
        setting(*SHARD, "raw_data", "basename", to="/etc/passwd"),
        "names the file '/etc/passwd'",
    ),
    "a missing file": ("plain", setting(*SHARD, "raw_data", "basename", to="no.mds"), "'no.mds', which is not there"),
    "a file twice": (
        "plain",
        lambda i: {**i, "shards": [i["shards"][0]] * 2},
        "names the file 'shard.00000.mds' twice",
    ),
    "the index as a shard": (
        "plain",
        setting(*SHARD, "raw_data", "basename", to="index.json"),
        "has 1110 bytes, it has",
    ),
    "another size": (
        "plain",
        setting(*SHARD, "raw_data", "bytes", to=99),
        r"shard.00000.mds has 99 bytes, it has 1110",
    ),
    "a negative size": ("plain", setting(*SHARD, "raw_data", "bytes", to=-1), "does not say what shard 0 is .*-1"),
    "a size that is no number": ("plain", setting(*SHARD, "raw_data", "bytes", to="9"), "does not say what shard 0 is"),
    "negative samples": ("plain", setting(*SHARD, "samples", to=-1), "does not say what shard 0 is"),
    "too many samples": ("plain", setting(*SHARD, "samples", to=10**12), "holds 1000000000000 samples in 1110 bytes"),
    "brotli": ("zstd", setting(*SHARD, "compression", to="br:11"), "is compressed with 'br'"),
    "snappy": ("zstd", setting(*SHARD, "compression", to="snappy"), "is compressed with 'snappy'"),
    "a huge shard": ("zstd", setting(*SHARD, "raw_data", "bytes", to=2**31), "unpacks to 2147483648 bytes, at most"),
    "other columns": ("plain", setting("shards", 1, "column_names", 0, to="x"), "shard 1 of .* has other column_names"),
    "other encodings": ("plain", setting("shards", 1, "column_encodings", 0, to="bytes"), "other column_encodings"),
    "no columns": ("plain", lambda i: {**i, "shards": [{"format": "mds"}]}, "does not list its columns"),
    "too few sizes": ("plain", lambda i: [s["column_sizes"].pop() for s in i["shards"]] and i, "one name, encoding"),
    "a negative column": ("plain", column("count", "int", -8), "gives column 'count' the size -8"),
    "a lying column": ("plain", column("count", "int", 4), "says 4 bytes of the column 'count', 'int' has 8"),
    "a lying varying column": (
        "plain",
        column("raw", "bytes", 4),
        "says 4 bytes of the column 'raw', 'bytes' has varying",
    ),
    "pickles": ("plain", column("raw", "pkl"), "the column 'raw' of .* is 'pkl': pickles, which are never read"),
    "lists of images": ("plain", column("raw", "list[jpeg]"), "is 'list.jpeg.': several images a sample"),
    "arrays of images": ("plain", column("raw", "jpeg_array"), "several images a sample"),
    "decimals": ("plain", column("raw", "str_decimal"), "decimal numbers"),
    "unknown": ("plain", column("raw", "later"), "is 'later': an encoding that is not known"),
    "an array of no length": ("plain", column("raw", "ndarray:int8:0"), "no length"),
    "an array of objects": ("plain", column("raw", "ndarray:object:2"), "an encoding that is not known"),
}
CONFIG = ("config",)
CHUNK = ("chunks", 0)
BAD_LITDATA: dict[str, tuple[str, Change, str]] = {
    "no config": ("plain", lambda i: {"chunks": i["chunks"]}, "is not that of a LitData dataset"),
    "no chunks": ("plain", lambda i: {"config": i["config"]}, "is not that of a LitData dataset"),
    "no formats": ("plain", setting(*CONFIG, "data_format", to=None), "does not say the data format"),
    "formats of numbers": ("plain", setting(*CONFIG, "data_format", to=[1]), "does not say the data format"),
    "encrypted": ("plain", setting(*CONFIG, "encryption", to={"a": 1}), "its chunks are encrypted"),
    "Parquet": (
        "plain",
        setting(*CONFIG, "item_loader", to="ParquetLoader"),
        "those of ParquetLoader.*--format parquet",
    ),
    "time series": ("plain", setting(*CONFIG, "item_loader", to="TemporalArrayLoader"), "those of TemporalArrayLoader"),
    "a loader of the user's": (
        "plain",
        setting(*CONFIG, "item_loader", to="Mine"),
        "those of Mine, which are not read",
    ),
    "lz4": ("plain", setting(*CONFIG, "compression", to="lz4"), "compressed with 'lz4', only zstd"),
    "pickles": (
        "plain",
        setting(*CONFIG, "data_format", 0, to="pickle"),
        "'count' of .* is 'pickle': pickles, which are never",
    ),
    "graphs": ("plain", setting(*CONFIG, "data_format", 0, to="graph:a"), "graphs, which may hold pickles"),
    "many images": ("plain", setting(*CONFIG, "data_format", 0, to="jpeg_array"), "several images a sample"),
    "unknown": ("plain", setting(*CONFIG, "data_format", 0, to="mine"), "'mine': a data format that is not known"),
    "complex": ("plain", setting(*CONFIG, "data_format", 0, to="no_header_numpy:11"), "dtype number 11"),
    "no dtype": ("plain", setting(*CONFIG, "data_format", 0, to="no_header_tensor"), "dtype number , which"),
    "no object": ("plain", setting(*CHUNK, to=[]), "does not say what chunk 0 is"),
    "a climbing name": ("plain", setting(*CHUNK, "filename", to="../x.bin"), r"names the file '\.\./x.bin'"),
    "a backslash": ("plain", setting(*CHUNK, "filename", to="..\\x.bin"), "only files in its own folder"),
    "a missing file": ("plain", setting(*CHUNK, "filename", to="x.bin"), "'x.bin', which is not there"),
    "a file twice": ("plain", lambda i: {**i, "chunks": [i["chunks"][0]] * 2}, "names the file 'chunk-0-0.bin' twice"),
    "a negative count": ("plain", setting(*CHUNK, "chunk_size", to=-1), "does not say what chunk 0 is"),
    "too many": ("plain", setting(*CHUNK, "chunk_size", to=10**9), "holds 1000000000 samples in 1806 bytes"),
    "a smaller size": ("plain", setting(*CHUNK, "chunk_bytes", to=100), "has 100 bytes, it has 1806"),
    "a larger size": ("plain", setting(*CHUNK, "chunk_bytes", to=2000), "has 2000 bytes, it has 1806"),
    "a huge chunk": ("chunks", setting(*CHUNK, "chunk_bytes", to=2**31), "unpacks to 2147483648 bytes, at most"),
}
INDEXED = {
    **{f"mds {k}": ("mds", v) for k, v in BAD_MDS.items()},
    **{f"litdata {k}": ("litdata", v) for k, v in BAD_LITDATA.items()},
}


@pytest.mark.parametrize("case", INDEXED)
def test_an_index_that_is_wrong_is_named_when_it_is_opened(case: str, tmp_path: Path) -> None:
    name, (variant, change, told) = INDEXED[case]
    folder = copied(f"{name}/input/{variant}", tmp_path)
    change_index(folder, change)
    with pytest.raises(SourceError, match=told):
        opened(folder)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"version": 2, "shards": [' + "9" * 5000 + "]}", "\xff", "null"])
def test_an_index_that_is_no_json_is_named(text: str, tmp_path: Path) -> None:
    folder = copied("mds/input/plain", tmp_path)
    (folder / "index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=r"index\.json is no JSON"):
        opened(folder)


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_folders_with_an_index_each_are_told_apart(name: str, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(FORMATS / name / "input/plain", tmp_path / split)
    with pytest.raises(SourceError, match=r"holds no index.json, its folders train, val do; convert each: .*/train"):
        opened(tmp_path)
    assert opened(tmp_path / "val").num_samples == len(expected(f"{name}/input/plain")["samples"])
    with pytest.raises(SourceError, match="is no folder; name the folder"):
        opened(tmp_path / "val" / "index.json", name=name)
    (tmp_path / "val" / "index.json").unlink()
    with pytest.raises(SourceError, match=r"holds no index\.json"):
        opened(tmp_path / "val", name=name)


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_the_source_is_made_of_the_index_and_what_it_names(name: str, tmp_path: Path) -> None:
    folder = copied(f"{name}/input/plain", tmp_path)
    before = [info.path for info in opened(folder).files]
    (folder / "leftover.bin").write_bytes(b"x")
    assert [info.path for info in opened(folder).files] == before
    assert len(before) == len(list((FORMATS / name / "input/plain").iterdir()))


COLUMNS = [
    ("mds/input/plain", column("raw", "pkl"), "caption,count"),
    ("litdata/input/plain", setting("config", "data_format", 9, to="pickle"), "count,text"),
]


@pytest.mark.parametrize(("src", "change", "fields"), COLUMNS)
def test_what_is_not_read_can_be_left_out(src: str, change: Change, fields: str, tmp_path: Path) -> None:
    folder = copied(src, tmp_path)
    change_index(folder, change)
    with pytest.raises(SourceError, match=r"pickles, which are never read.*--fields"):
        opened(folder)
    chosen = fields.split(",")
    wanted = [{name: sample[name] for name in chosen} for sample in expected(src)["samples"]]
    assert all_rows(opened(folder, fields)) == wanted
    with pytest.raises(FieldError, match=r"no field 'nothing'; it has .*raw"):
        opened(folder, "nothing")


def first_file(folder: Path) -> Path:
    return next(path for path in sorted(folder.iterdir()) if path.name != "index.json")


def poke(at: int, number: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + struct.pack("<I", number) + data[at + 4 :]


DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "MDS count": ("mds/input/plain", poke(0, 3), r"shard.00000.mds holds 3 samples, its index says 2"),
    "MDS offset beyond": ("mds/input/plain", poke(12, 10**6), r"shard.00000.mds is damaged: its offsets"),
    "MDS offset in the table": ("mds/input/plain", poke(4, 3), "its offsets do not lie one after another"),
    "MDS offsets descending": ("mds/input/plain", poke(8, 400_000), "its offsets do not lie one after another"),
    "MDS zstd": ("mds/input/zstd", poke(20, 12345), r"shard.00000.mds.zstd is damaged"),
    "LitData count": ("litdata/input/plain", poke(0, 3), "chunk-0-0.bin holds 3 samples, its index says 2"),
    "LitData offset beyond": ("litdata/input/plain", poke(12, 10**6), "chunk-0-0.bin is damaged: its offsets"),
    "LitData zstd": ("litdata/input/chunks", poke(0, 12345), "chunk-0-0.zstd.bin is damaged"),
    "frames' version": ("litdata/input/frames", poke(8, 2), "is of version 2 with 2 samples, expected are version 1"),
    "frames' count": ("litdata/input/frames", poke(12, 3), "with 3 samples, expected .* 2 samples"),
    "number of frames": ("litdata/input/frames", poke(20, 10**9), "its table of frames does not fit"),
    "no frame": ("litdata/input/frames", poke(20, 0), "its table of frames does not fit"),
    "frames' offsets": ("litdata/input/frames", poke(28, 2**31), "its table of frames does not fit"),
    "frames' items": ("litdata/input/frames", poke(40, 1), "its table of frames does not fit"),
    "a frame's place": ("litdata/input/frames", poke(44, 2**31), "its table of frames does not fit"),
    "a frame far away": ("litdata/input/frames", poke(48, 2**31), "its table of frames does not fit"),
    "a frame's size": ("litdata/input/frames", poke(52, 2**31), "its table of frames does not fit"),
    "what a frame holds": ("litdata/input/frames", poke(56, 17), "its table of frames does not fit"),
    "a frame": ("litdata/input/frames", poke(60, 12345), "its frame 0 is damaged"),
    "Arrow's magic": ("litdata/input/rows", lambda data: data[:-8] + bytes(8), "no rows of Arrow at its end"),
    "Arrow's length": (
        "litdata/input/rows",
        lambda data: data[:-12] + struct.pack("<I", 2**31) + data[-8:],
        "no rows of Arrow at its end",
    ),
    "Arrow's footer": ("litdata/input/rows", lambda data: data[:-200] + bytes(150) + data[-50:], "bin is damaged"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(case: str, tmp_path: Path) -> None:
    src, damage, told = DAMAGED[case]
    folder = copied(src, tmp_path)
    path = first_file(folder)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=told):
        all_rows(opened(folder))


@pytest.mark.parametrize("src", [src for src in EXPECTED if not src.startswith("tfrecord")])
def test_a_truncated_file_of_an_index_is_named(src: str, tmp_path: Path) -> None:
    folder = copied(src, tmp_path)
    path = first_file(folder)
    for cut in (5, 30, -1):
        path.write_bytes((FORMATS / src / path.name).read_bytes()[:cut])
        with pytest.raises(SourceError, match=path.name.replace(".", r"\.")):
            all_rows(opened(folder))


@pytest.mark.parametrize("src", ["mds/input/plain", "litdata/input/plain"])
def test_a_sample_whose_sizes_lie_is_refused_alone(src: str, tmp_path: Path) -> None:
    folder = copied(src, tmp_path)
    path = first_file(folder)
    data = path.read_bytes()
    second = struct.unpack_from("<I", data, 8)[0]
    path.write_bytes(poke(second, 2**31)(data))
    refused: list[BadSample] = []
    source = opened(folder)
    samples = expected(src)["samples"]
    assert all_rows(source, refused.append) == [samples[0], *samples[2:]]
    assert [bad.position for bad in refused] == [1]
    assert refused[0].name.endswith(f"{path.name}: sample 1")
    assert "bytes, its " in refused[0].problem


def test_a_sample_that_does_not_unpack_is_refused_alone(tmp_path: Path) -> None:
    folder = copied("litdata/input/samples", tmp_path)
    path = first_file(folder)
    data = path.read_bytes()
    start = struct.unpack_from("<I", data, 8)[0]
    path.write_bytes(data[:start] + bytes(8) + data[start + 8 :])
    refused: list[BadSample] = []
    samples = expected("litdata/input/samples")["samples"]
    assert all_rows(opened(folder), refused.append) == [samples[0], *samples[2:]]
    assert "it is damaged, or not zstd" in refused[0].problem


NEEDED = {"mds/input/zstd": "zstandard", "litdata/input/samples": "zstandard", "litdata/input/chunks": "zstandard"}
NEEDED |= {"litdata/input/frames": "zstandard", "litdata/input/rows": "pyarrow"}


@pytest.mark.parametrize("src", NEEDED)
def test_a_package_that_is_missing_is_named(src: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NEEDED[src], None)
    with pytest.raises(UsageError, match=f"the package {NEEDED[src]} is not installed"):
        opened(FORMATS / src)


FUZZED = ["tfrecord/input", "mds/input/plain", "mds/input/zstd", "litdata/input/plain", "litdata/input/frames"]
FUZZED += ["litdata/input/samples", "litdata/input/chunks", "litdata/input/tokens"]


@pytest.mark.parametrize("src", FUZZED)
@given(data=st.data())
@settings(max_examples=30)
def test_damage_anywhere_gives_an_error_that_is_ours_or_samples(src: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(FORMATS / src, folder, dirs_exist_ok=True)
        files = sorted(Path(folder).iterdir())
        path = files[data.draw(st.integers(0, len(files) - 1))]
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.integers(0, 255))
        else:
            del content[at:]
        path.write_bytes(content)
        with suppress(ConvertError, UsageError):
            all_rows(opened(folder, name=EXPECTED[src][0]), lambda bad: None)


# --- MDS ---


def mds_shard(samples: Sequence[bytes]) -> bytes:
    start = 4 * (len(samples) + 2)
    offsets = np.cumsum([start, *map(len, samples)]).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + b"".join(samples)


def write_mds(root: Path, encoding: str, values: Sequence[bytes], packed: Mapping[str, Any] | None = None) -> Path:
    """A dataset of one column `x`, by hand, in one shard; `packed` compresses it, or says it does."""
    root.mkdir(exist_ok=True)
    size = encoding_of(encoding).size
    shard = mds_shard([(b"" if size else struct.pack("<I", len(one))) + one for one in values])
    entry = {"column_names": ["x"], "column_encodings": [encoding], "column_sizes": [size], "format": "mds"}
    entry |= {"samples": len(values), "raw_data": {"basename": "a.mds", "bytes": len(shard)}, "version": 2}
    name, data = "a.mds", shard
    if packed:
        name, data = "a.mds.z", packed["pack"](shard)
        entry |= {"zip_data": {"basename": name, "bytes": len(data)}, "compression": packed["says"]}
        entry["raw_data"] = {"basename": "a.mds", "bytes": packed.get("bytes", len(shard))}
    (root / name).write_bytes(data)
    (root / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    return root


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz:5": gzip.compress,
    "bz2": bz2.compress,
    "zstd:3": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("says", PACKED)
def test_shards_are_unpacked_up_to_the_size_that_they_state(says: str, tmp_path: Path) -> None:
    values = [bytes([number]) * 100_000 for number in range(30)]  # several pieces of what is unpacked
    folder = write_mds(tmp_path / "x", "bytes", values, {"says": says, "pack": PACKED[says]})
    assert opened(folder, name="mds").part(np.array([0, 9, 29])).read(refuse_all)["x"] == [
        values[0],
        values[9],
        values[29],
    ]
    for stated, told in ((3_000_000, "unpacks to more than 3000000 bytes"), (3_000_300, "its index says 3000300")):
        packing = {"says": says, "pack": PACKED[says], "bytes": stated}
        with pytest.raises(SourceError, match=rf"a\.mds\.z.*{told}"):
            opened(write_mds(tmp_path / "x", "bytes", values, packing), name="mds")


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(200 << 20))
    assert len(bomb) < 100_000
    packing = {"says": "zstd", "pack": lambda _: bomb}
    folder = write_mds(tmp_path / "x", "bytes", [b"a"], packing)
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="unpacks to more than"):
            opened(folder, name="mds")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_an_unpacked_shard_beside_a_compressed_one_is_taken(tmp_path: Path) -> None:
    folder = copied("mds/input/zstd", tmp_path)
    packed = first_file(folder)
    raw = zstandard.ZstdDecompressor().decompress(packed.read_bytes())
    packed.with_suffix("").write_bytes(raw)
    packed.write_bytes(b"never looked at")
    source = opened(folder)
    assert all_rows(source) == expected("mds/input/zstd")["samples"]
    assert "shard.00000.mds" in [info.path for info in source.files]


def array_of(dtype: int, shape: Sequence[int], data: bytes, width: int = 0) -> bytes:
    return bytes([dtype, len(shape) << 2 | width]) + b"".join(n.to_bytes(1 << width, "little") for n in shape) + data


VALUES: dict[str, tuple[str, bytes, Any]] = {
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
def test_values_of_mds_are_read_by_their_encoding(case: str) -> None:
    encoding, data, wanted = VALUES[case]
    found = encoding_of(encoding).read(data)
    assert np.asarray(found).dtype == np.asarray(wanted).dtype
    assert np.array_equal(found, wanted)


WRONG_VALUES: dict[str, tuple[str, bytes, str]] = {
    "no UTF-8": ("str", b"\xff", "no UTF-8"),
    "no number": ("str_int", b"x", "is no int64"),
    "too large": ("str_int", b"9" * 30, "is no int64"),
    "millions of digits": ("str_int", b"9" * 10_000_000, "is no int64"),
    "no float": ("str_float", b"x", "is no float64"),
    "infinite float": ("str_float", b"1e400", "is no float64"),
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
def test_a_value_of_mds_that_is_not_what_it_should_be_is_refused(case: str, tmp_path: Path) -> None:
    encoding, data, told = WRONG_VALUES[case]
    with pytest.raises(ValueError, match=told):
        encoding_of(encoding).read(data)
    if len(data) < 1000 and encoding_of(encoding).size is None:
        with pytest.raises(SourceError, match=f"a.mds: sample 0: column 'x': .*{told}"):
            opened(write_mds(tmp_path / "x", encoding, [data]), name="mds")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "I;16"])
def test_images_of_pixels_become_png_without_loss(mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    image = Image.fromarray(pixels, "RGBA").convert(mode if mode != "I;16" else "L")
    if mode == "I;16":
        image = Image.frombytes("I;16", (7, 5), pixels[..., :2].tobytes())
    stored = struct.pack("<III", *image.size, len(mode)) + mode.encode() + image.tobytes()
    found = encoding_of("pil").read(stored)
    assert (found.mode, found.size, found.tobytes()) == (mode, image.size, image.tobytes())
    out = io.BytesIO()
    found.save(out, "PNG")
    assert Image.open(out).convert(mode).tobytes() == image.tobytes()


def test_shards_in_folders_below_are_found(tmp_path: Path) -> None:
    """As streaming merges indexes."""
    folder = copied("mds/input/plain", tmp_path)
    (folder / "0").mkdir()
    for path in list(folder.glob("*.mds")):
        path.rename(folder / "0" / path.name)

    def move(index: Any) -> None:
        for shard in index["shards"]:
            shard["raw_data"]["basename"] = f"0/{shard['raw_data']['basename']}"

    change_index(folder, move)
    assert all_rows(opened(folder)) == expected("mds/input/plain")["samples"]


def test_many_samples_of_several_shards_are_read_by_row(tmp_path: Path) -> None:
    counts, entries = (1000, 0, 3, 700), []
    for number, count in enumerate(counts):
        shard = mds_shard([struct.pack("<q", 10_000 * number + i) + bytes(900) for i in range(count)])
        (tmp_path / f"{number}.mds").write_bytes(shard)
        entry = {"column_names": ["n", "x"], "column_encodings": ["int", "ndarray:uint8:900"], "format": "mds"}
        raw = {"basename": f"{number}.mds", "bytes": len(shard)}
        entries.append(entry | {"column_sizes": [8, 900], "samples": count, "raw_data": raw})
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    source = opened(tmp_path)
    rows = [0, 999, 1000, 1002, 1003, 1702]
    assert [sample["n"] for sample in rows_of(source, rows)] == [0, 999, 20000, 20002, 30000, 30699]


# --- LitData ---

LEAVES: dict[str, tuple[str, bytes, Any]] = {
    "int": ("int", struct.pack("<q", -3), np.int64(-3)),
    "bool": ("bool", b"\1", np.True_),
    "numpy": ("numpy", struct.pack("<IIII", 1, 2, 1, 2) + b"\1\0\2\0", np.array([[1, 2]], np.int16)),
    "empty numpy": ("numpy", struct.pack("<IIII", 1, 2, 0, 2), np.zeros((0, 2), np.int16)),
    "tensor": ("tensor", struct.pack(">IIII", 14, 2, 1, 2) + b"\1\0\2\0", np.array([[1, 2]], np.int16)),
    "old tensor": ("tensor", struct.pack("<IIII", 14, 2, 1, 2) + b"\1\0\2\0", np.array([[1, 2]], np.int16)),
    "tensor of no axis": ("tensor", struct.pack(">II", 1, 0) + struct.pack("<f", 0.5), np.float32(0.5)),
    "bools": ("no_header_tensor:19", b"\1\0", np.array([True, False])),
    "bfloat16": ("no_header_tensor:10", b"\x80\x3f\x00\xc0", np.array([1, -2], np.float32)),
    "no numbers": ("no_header_numpy:10", b"", np.zeros(0)),
    "file": ("file:xyz", b"abc", b"abc"),
    "old JSON": ("json", b'["a", 1]', '["a", 1]'),
    "old numbers": ("json", b"[[1, 2], [3, 4]]", np.array([[1, 2], [3, 4]])),
    "lists that differ": ("json", b"[[1, 2], [3]]", "[[1, 2], [3]]"),
    "texts": ("json", b"\1\2\0\0\0\1\0\0\0a\2\0\0\0bc", '["a", "bc"]'),
    "integers": ("json", b"\2\1\0\0\0" + struct.pack("<q", 7), np.array([7])),
    "floats": ("json", b"\3\1\0\0\0" + struct.pack("<d", 0.5), np.array([0.5])),
    "flags": ("json", b"\4\2\0\0\0\1\0", np.array([True, False])),
    "mapping": ("json", b"\5\1\0\0\0\1\0\0\0a" + b"\x08" + struct.pack("<q", 7), '{"a": 7}'),
    "records": (
        "json",
        b"\6\2\0\0\0\1\0\0\0\1\0\0\0k" + b"\x11\1\0\0\0v" + b"\x10",
        '[{"k": "v"}, {"k": null}]',
    ),
    "a text": ("json", b"\7\1\0\0\0a", "a"),
    "nothing": ("json", b"\x0b", None),
    "JSON inside": ("json", b'\0\x08\0\0\0[1, "a"]', '[1, "a"]'),
}


@pytest.mark.parametrize("case", LEAVES)
def test_leaves_of_litdata_are_read_by_their_format(case: str) -> None:
    data_format, data, wanted = LEAVES[case]
    found = leaf_reader(data_format)(data)
    assert np.asarray(found).dtype == np.asarray(wanted).dtype
    assert np.array_equal(found, wanted)


WRONG_LEAVES: dict[str, tuple[str, bytes, str]] = {
    "short int": ("int", b"\1", r"int64\[\], and has 1 bytes"),
    "no UTF-8": ("str", b"\xff", "no UTF-8"),
    "short header": ("numpy", b"\1\0\0\0", "too few for its header"),
    "many axes": ("numpy", struct.pack("<II", 1, 2**31), "do not hold its 2147483648 axes"),
    "few axes": ("numpy", struct.pack("<II", 1, 3), "do not hold its 3 axes"),
    "overflowing": ("tensor", struct.pack(">II4I", 14, 4, *[2**32 - 1] * 4), "and has 0 bytes"),
    "objects": ("numpy", struct.pack("<III", 14, 1, 1) + bytes(8), "dtype number 14"),
    "complex": ("tensor", struct.pack(">III", 4, 1, 1) + bytes(8), "dtype number 4"),
    "half a number": ("no_header_numpy:3", bytes(9), "has 9 bytes"),
    "no image": ("jpeg", b"x", "no known image header"),
    "no value": ("json", b"", "Expecting value"),
    "unknown tag": ("json", b"\x1f\1\0\0\0a", "the tag 31"),
    "unknown kind": ("json", b"\6\1\0\0\0\1\0\0\0\1\0\0\0k\x20", "the kind 32"),
    "more than there is": ("json", b"\2\xff\xff\xff\xffaaaa", "is cut off"),
    "records without keys": ("json", b"\6\1\0\0\0\0\0\0\0", "is cut off|no keys"),
    "something behind": ("json", b"\x0b\x0b", "ends at byte 1 of 2"),
    "nested deep": ("json", b"\5\1\0\0\0\0\0\0\0" * 5000, "nested too deep"),
    "JSON nested deep": ("json", b"[" * 100_000, "nested too deep"),
}


@pytest.mark.parametrize("case", WRONG_LEAVES)
def test_a_leaf_that_is_not_what_it_should_be_is_refused(case: str) -> None:
    data_format, data, told = WRONG_LEAVES[case]
    with pytest.raises(ValueError, match=told):
        leaf_reader(data_format)(data)


@given(st.binary(max_size=80))
def test_no_bytes_break_the_readers_of_leaves(data: bytes) -> None:
    for name in ("json", "numpy", "tensor", "pil", "no_header_tensor:10", "str", "bool"):
        for one in (data, data[:1] + struct.pack("<I", len(data) // 4) + data[1:]):
            with suppress(ValueError):
                leaf_reader(name)(one)


def spec(*children: Any, kind: str | None = "builtins.dict", keys: Sequence[str] | None = None) -> dict[str, Any]:
    return {"type": kind, "context": json.dumps(keys), "children_spec": list(children)}


LEAF = {"type": None, "context": None, "children_spec": []}
TREES: dict[str, tuple[Any, list[str]]] = {
    "bare": (json.dumps([1, LEAF]), ["data"]),
    "tuple": (json.dumps([1, spec(LEAF, LEAF, kind="builtins.tuple")]), ["0", "1"]),
    "nested": (json.dumps([1, spec(spec(LEAF, kind="builtins.list"), LEAF, keys=["a", "b"])]), ["a_0", "b"]),
    "unknown": (json.dumps([1, spec(LEAF, LEAF, kind="collections.namedtuple")]), ["0", "1"]),
    "wrong count": (json.dumps([1, spec(LEAF, keys=["a"])]), ["0", "1"]),
    "wrong keys": (json.dumps([1, spec(LEAF, LEAF, keys=["a"])]), ["0", "1"]),
    "the same twice": (json.dumps([1, spec(spec(LEAF, keys=["b"]), LEAF, keys=["a", "a_b"])]), ["0", "1"]),
    "later protocol": (json.dumps([2, spec(LEAF, LEAF, keys=["a", "b"])]), ["0", "1"]),
    "no JSON": ("x", ["0", "1"]),
    "nothing": (None, ["0", "1"]),
    "no tree": ("[1, 2]", ["0", "1"]),
    "deep": ("[1, " + '{"type": "builtins.list", "children_spec": [' * 3000, ["0", "1"]),
}


@pytest.mark.parametrize("case", TREES)
def test_leaves_are_called_as_in_the_tree_or_numbered(case: str) -> None:
    tree, names = TREES[case]
    assert leaf_names(tree, len(names)) == names


def test_chunks_of_the_first_releases_state_their_bytes_without_the_table(tmp_path: Path) -> None:
    for variant in ("plain", "chunks"):
        folder = copied(f"litdata/input/{variant}", tmp_path / variant)

        def smaller(index: Any) -> None:
            for chunk in index["chunks"]:
                chunk["chunk_bytes"] -= 4 * (chunk["chunk_size"] + 2)
            for key in ("item_loader", "compression_level", "types"):
                index["config"].pop(key)

        change_index(folder, smaller)
        assert all_rows(opened(folder)) == expected("litdata/input/plain")["samples"]


def test_rows_of_arrow_that_are_compressed_inside_are_read(tmp_path: Path) -> None:
    import pyarrow as pa

    folder = copied("litdata/input/rows", tmp_path)

    def pack(index: Any) -> None:
        for chunk in index["chunks"]:
            path = folder / chunk["filename"]
            data = path.read_bytes()
            length = struct.unpack_from("<I", data, len(data) - 12)[0]
            head = data[: len(data) - 12 - length]
            out = io.BytesIO()
            table = pa.ipc.open_file(data[len(head) : len(data) - 12]).read_all()
            with pa.ipc.new_stream(out, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
                writer.write_table(table, max_chunksize=1)
            stored = out.getvalue()
            path.write_bytes(head + stored + struct.pack("<I", len(stored)) + b"LDARW01\0")
            chunk["chunk_bytes"] = path.stat().st_size

    change_index(folder, pack)
    assert all_rows(opened(folder)) == expected("litdata/input/rows")["samples"]


def test_a_document_without_tokens_is_an_empty_row(tmp_path: Path) -> None:
    documents = [np.zeros(0, np.int64), np.arange(3), np.zeros(0, np.int64)]
    data = mds_shard([document.tobytes() for document in documents])  # the same shape of file
    (tmp_path / "chunk-0-0.bin").write_bytes(data)
    config = {"data_format": ["no_header_numpy:3"], "data_spec": None, "item_loader": "TokensLoader"}
    chunks = [{"filename": "chunk-0-0.bin", "chunk_size": 3, "chunk_bytes": len(data), "dim": 3}]
    (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    assert all_rows(opened(tmp_path)) == [{"data": []}, {"data": [0, 1, 2]}, {"data": []}]
