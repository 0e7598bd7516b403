"""Sources that decode to gigabytes: each is an error with its remedy, or read in parts, in memory that is bounded."""

import bz2
import functools
import gzip
import io
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from functools import partial

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import feather
from test_security import bomb

import streamloader as sl
from streamloader.conversion.sources.tfrecord import _masked_crc
from streamloader.errors import SourceError, UsageError

MIB, GIB = 1 << 20, 1 << 30
ZEROS = (64 << 20) + 5 * 8  # bytes
PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}


def packed(kind, head=b"", size=8 * GIB, value=b"a"):
    """The bytes of `head` and `size` times `value`, compressed: members that decompressors read as one file."""
    return (PACKED[kind](head) if head else b"") + member(kind, value) * (size // (16 * MIB))


@functools.cache
def member(kind, value):
    return PACKED[kind](value * (16 * MIB))


def inflating(size):
    """A stream of zlib that decompresses to `size` zeros, and has a wrong checksum after them."""
    packer = zlib.compressobj(9)
    first = packer.compress(bytes(64 * MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    more = packer.compress(bytes(64 * MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + more * (size // (64 * MIB) - 1) + packer.flush()


def text(root, name, kind, head):
    (root / f"{name}.{kind}").write_bytes(packed(kind, head))


def lines(root):
    """Lines of which a few are long, between those that are read first."""
    rows = ["a" * (MIB // 4 if number % 66 in range(30, 40) else 1) for number in range(1000)]
    (root / "a.jsonl.gz").write_bytes(gzip.compress("".join(f'{{"x": "{row}"}}\n' for row in rows).encode()))


def tar(root, kind):
    header = tarfile.TarInfo("a.bin")
    header.size = 8 * GIB
    (root / f"a.tar.{kind}").write_bytes(packed(kind, header.tobuf(), value=b"\0"))


def tfrecord(root, length, suffix=""):
    head = struct.pack("<Q", length)
    head += struct.pack("<I", _masked_crc(head))
    (root / f"a.tfrecord{suffix}").write_bytes(packed("gz", head, 2 * GIB) if suffix else head + bytes(100))


def npz(root, shape, size):
    """An .npz whose array is said to have a shape, and has `size` zeros."""
    with zipfile.ZipFile(root / "a.npz", "w", zipfile.ZIP_DEFLATED) as out, out.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": shape})
        member.write(bytes(size))


def hdf5(root, shape, chunks, stored=b""):
    with h5py.File(root / "a.h5", "w") as file:
        array = file.create_dataset("x", shape, "u1", chunks=chunks, compression="gzip")
        if stored:
            array.id.write_direct_chunk((0,) * len(shape), stored)


def hdf5_texts(root, change, **layout):
    """Eight texts in HDF5, whose bytes `change` changes: those of the first row, and of the collection of the texts."""
    with h5py.File(root / "a.h5", "w") as file:
        file.create_dataset("x", (8,), h5py.string_dtype(), ["value"] * 8, **layout)
    data = bytearray((root / "a.h5").read_bytes())
    heap = data.index(b"GCOL")
    if change is None:
        row = struct.pack("<IQI", 1 << 31, heap, 1)
        packed = zlib.compress(np.frombuffer(row * 3, np.uint8).reshape(3, 16).T.tobytes())
        with h5py.File(root / "a.h5", "r+") as file:
            file["x"].id.write_direct_chunk((0,), packed)
        return
    change(memoryview(data)[data.index(struct.pack("<IQ", 5, heap)) :], memoryview(data)[heap:])
    (root / "a.h5").write_bytes(data)


def longer(row, heap):
    row[:4] = struct.pack("<I", 1 << 31)


def emptied(row, heap):
    heap[16 + 8] = 0  # the size of the first text: HDF5 takes the bytes after it for a head


def shared(root):
    """Eight texts of 8 MiB, of which all rows refer to the first."""
    with h5py.File(root / "a.h5", "w") as file:
        file.create_dataset("x", (8,), h5py.string_dtype(), ["v" * (8 * MIB), *["v"] * 7])
        at = file["x"].id.get_offset()
    data = bytearray((root / "a.h5").read_bytes())
    data[at : at + 8 * 16] = bytes(data[at : at + 16]) * 8
    (root / "a.h5").write_bytes(data)


def twice(root):
    with h5py.File(root / "a.h5", "w") as file:
        created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        created.set_chunk((8,))
        for _ in range(2):
            created.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (9,))
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((8,)), created)


def zarr(root):
    array = {"shape": [8], "chunks": [8], "dtype": "|u1", "order": "C", "fill_value": 0, "filters": None}
    (root / "a.zarr" / "x").mkdir(parents=True)
    (root / "a.zarr" / ".zgroup").write_text('{"zarr_format": 2}')
    document = {**array, "compressor": {"id": "gzip", "level": 1}, "zarr_format": 2}
    (root / "a.zarr" / "x" / ".zarray").write_text(json.dumps(document))
    (root / "a.zarr" / "x" / "0").write_bytes(packed("gz"))


def mds(root, said):
    data = packed("zst")
    (root / "shard.0.mds.zstd").write_bytes(data)
    columns = {"column_names": ["x"], "column_encodings": ["bytes"], "column_sizes": [None]}
    files = {"raw_data": {"basename": "shard.0.mds", "bytes": said}, "samples": 4, "compression": "zstd"}
    files["zip_data"] = {"basename": "shard.0.mds.zstd", "bytes": len(data)}
    document = {"version": 2, "shards": [{"format": "mds", **columns, **files}]}
    (root / "index.json").write_text(json.dumps(document))


def parquet(root, table, **options):
    pq.write_table(pa.table(table), root / "a.parquet", compression="zstd", **options)


def page(root):
    parquet(root, {"x": ["a" * (40 * MIB)] * 2}, use_dictionary=False)


def runs(root):
    """A list of four million equal numbers, in a few bytes."""
    values = pa.array(np.zeros(4_000_000, np.int64))
    parquet(root, {"x": pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)})


def dictionary(root):
    parquet(root, {"x": pa.array(["a" * (4 * MIB)] * 40)})


def footer(root):
    """A Parquet file whose footer says that it has more bytes than the file."""
    parquet(root, {"x": [1]})
    data = bytearray((root / "a.parquet").read_bytes())
    data[-8:-4] = struct.pack("<I", 2 * GIB)
    (root / "a.parquet").write_bytes(data)


def arrow(root, kind, said):
    """A file, or a stream, of `ZEROS` bytes, that says that they are more."""
    table = pa.table({"x": np.zeros(ZEROS // 8)})
    if kind == "stream":
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(root / "a.arrow", table.schema, options=options) as out:
            out.write_table(table)
    else:
        feather.write_feather(table, root / "a.arrow", compression=kind, chunksize=len(table))
    data, size = (root / "a.arrow").read_bytes(), struct.pack("<q", ZEROS)
    assert data.count(size) == 1
    (root / "a.arrow").write_bytes(data.replace(size, struct.pack("<q", said)))


def arrow_dictionary(root):
    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4000, np.int32)), ["a" * (2 * MIB)])
    feather.write_feather(pa.table({"x": values}), root / "a.arrow", compression="uncompressed")


def images(root, kind):
    (root / "a").mkdir()
    data = ztxt() if kind == "ztxt" else bomb(kind, 16_383 if kind == "webp" else 60_000)
    (root / "a" / f"x.{'png' if kind in ('gray', 'ztxt') else kind}").write_bytes(data)


def ztxt():
    """An image of one pixel with a text of 256 MiB."""
    out = io.BytesIO()
    from PIL import Image

    Image.new("L", (1, 1)).save(out, "PNG")
    chunk = b"zTXta\0\0" + inflating(256 * MIB)
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return out.getvalue()[:33] + chunk + out.getvalue()[33:]


LINE = "a record of more than 64 MiB in line 1"
# what makes each source, what limits it instead of 1 GiB, and the error; an empty one for a source that is converted
CASES = {
    "lines in gzip": (partial(text, name="a.jsonl", kind="gz", head=b'{"x": "'), {}, LINE),
    "lines in bzip2": (partial(text, name="a.jsonl", kind="bz2", head=b'{"x": "'), {}, LINE),
    "lines in xz": (partial(text, name="a.jsonl", kind="xz", head=b'{"x": "'), {}, LINE),
    "lines in zstd": (partial(text, name="a.jsonl", kind="zst", head=b'{"x": "'), {}, LINE),
    "a table in gzip": (
        partial(text, name="a.csv", kind="gz", head=b"x,y\n"),
        {},
        "a record of more than 64 MiB in line 2",
    ),
    "lines that differ": (lines, {"max_decoded": "4MiB"}, r"the samples of a shard, up to .*jsonl\.gz:\d+, have \d+ b"),
    "a tar in gzip": (partial(tar, kind="gz"), {}, "the sample 'a' of .* has 8589934592 bytes, at most 1073741824"),
    "a tar in zstd": (partial(tar, kind="zst"), {}, "the sample 'a' of .* has 8589934592 bytes, at most 1073741824"),
    "records in gzip": (
        partial(tfrecord, length=2 * GIB - 1, suffix=".gz"),
        {},
        "at byte 0 a record of 2147483647 bytes",
    ),
    "records": (partial(tfrecord, length=1 << 62), {}, "a record of 4611686018427387904 bytes at byte 0"),
    "a shape in npz": (partial(npz, shape=(1 << 40,), size=9), {}, "its header says 1099511627"),
    "rows of npz": (partial(npz, shape=(2, 32 * MIB), size=64 * MIB), {"max_decoded": "16MiB"}, "has rows of 33554432"),
    "values of HDF5": (partial(hdf5, shape=(1 << 40,), chunks=(8,)), {}, "claims 1099511627776 bytes"),
    "chunks of HDF5": (
        partial(hdf5, shape=(1, 3 * GIB // 2), chunks=(1, 3 * GIB // 2)),
        {},
        "has chunks of 1610612736",
    ),
    "rows of HDF5": (
        partial(hdf5, shape=(1, 3 * GIB // 2), chunks=(1, 9)),
        {},
        "has rows of 1610612736 bytes, at most",
    ),
    "a chunk of HDF5": (
        lambda root: hdf5(root, (8,), (8,), inflating(4 * GIB)),
        {},
        r"unpacks to more than its 8 bytes",
    ),
    "a length in HDF5": (partial(hdf5_texts, change=longer), {}, "a value states 2147483648 bytes, the file has"),
    "a length in a chunk of HDF5": (partial(hdf5_texts, change=longer, chunks=(3,)), {}, "a value states 2147483648 b"),
    "a packed length in HDF5": (
        partial(hdf5_texts, change=None, chunks=(3,), shuffle=True, compression="gzip"),
        {},
        "a value states 2147483648 b",
    ),
    "a collection of HDF5": (partial(hdf5_texts, change=emptied), {}, r"collection of values at byte \d+ is damaged"),
    "a text of many rows in HDF5": (shared, {"max_decoded": "16MiB"}, "has 8 values of 67108864 bytes, at most"),
    "HDF5 packed twice": (twice, {}, r"is packed by several filters, \[1, 1\]"),
    "a chunk of Zarr": (zarr, {}, "bytes were received, and a chunk of this array has fewer"),
    "a shard of MDS": (partial(mds, said=8 * GIB), {}, "unpacks to 8589934592 bytes, at most 1073741824"),
    "a longer shard of MDS": (partial(mds, said=1000), {}, "unpacks to more than the 1000 bytes of its index"),
    "a page of Parquet": (page, {"max_decoded": "16MiB"}, r"a\.parquet has a page of \d+ bytes, at most 16777216"),
    "runs in Parquet": (runs, {"max_decoded": "16MiB"}, r"has, for few rows, values of 3\d+ bytes, at most 16777216"),
    "a dictionary of Parquet": (dictionary, {"max_decoded": "64MiB"}, ""),
    "a footer of Parquet": (footer, {}, "cannot be read as Parquet"),
    "a buffer of Arrow": (
        partial(arrow, kind="zstd", said=ZEROS),
        {"max_decoded": "16MiB"},
        "a record batch of 67108904",
    ),
    "a large buffer of Arrow": (partial(arrow, kind="lz4", said=1 << 40), {}, "a record batch of 1099511627776 bytes"),
    "a buffer of a stream": (partial(arrow, kind="stream", said=1 << 40), {}, "a record batch of 1099511627776 bytes"),
    "a dictionary of Arrow": (arrow_dictionary, {}, r"values of 'x' have 8388608000 bytes, at most 1073741824"),
    **{f"an image in {kind}": (partial(images, kind=kind), {}, "exceeds limit") for kind in ("png", "bmp")},
    "an image in WebP": (partial(images, kind="webp"), {}, "cannot be decoded"),
    "a text in PNG": (partial(images, kind="ztxt"), {}, "too large"),
}
GROWTH = 400 * MIB

# converts each source, and says with which error, and by how much the resident memory grew
PROGRAM = """
import json, resource, sys
import streamloader as sl
def status(name): return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))  # for what has no limit
for name, source, options in json.load(open(sys.argv[1])):
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins anew
    before, code, problem = status("VmRSS"), "", ""
    try:
        sl.convert(source, source + ".out", workers=0, source_options=options)
    except sl.errors.StreamloaderError as error:
        code, problem = error.code, str(error)
    except BaseException as error:
        problem = repr(error)
    print(json.dumps([name, code, problem, status("VmHWM") - before]), flush=True)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Code, text and memory of the conversion of each source, in a process of their own."""
    folder, sources = tmp_path_factory.mktemp("bombs"), []
    for number, (name, (make, options, _)) in enumerate(CASES.items()):
        (folder / f"{number}").mkdir()
        make(folder / f"{number}")
        only = [*(folder / f"{number}").iterdir()]
        sources.append((name, str(only[0] if only[0].suffix in (".npz", ".zarr") else folder / f"{number}"), options))
    (folder / "sources.json").write_text(json.dumps(sources))
    command = [sys.executable, "-c", PROGRAM, str(folder / "sources.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: result for name, *result in map(json.loads, done.stdout.splitlines())}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_source_that_decodes_to_gigabytes_takes_bounded_memory(name, results):
    code, problem, grown = results[name]
    expected = CASES[name][2]
    assert (code, bool(re.search(expected, problem))) == ("SL501" if expected else "", True), problem
    assert grown < GROWTH, f"{grown >> 20} MiB; {problem}"


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [page, runs, partial(arrow, kind="zstd", said=ZEROS)])
def test_what_the_limit_refuses_is_converted_with_the_option_of_the_message(make, tmp_path):
    (tmp_path / "src").mkdir()
    make(tmp_path / "src")
    with pytest.raises(SourceError, match="if you trust it, give source_options=") as error:
        sl.convert(tmp_path / "src", tmp_path / "out", workers=0, source_options={"max_decoded": "16MiB"})
    value = int(re.search(r"--source-option max_decoded=(\d+)", error.value.remedy)[1])
    report = sl.convert(tmp_path / "src", tmp_path / "out", workers=0, source_options={"max_decoded": value})
    assert report.num_samples in (1, 2, ZEROS // 8)


def test_the_limit_is_a_size(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(UsageError, match="max_decoded: 'lots' is not a size"):
        sl.convert(tmp_path / "x.npy", tmp_path / "out", workers=0, source_options={"max_decoded": "lots"})


NESTED = {
    "a table": ((8, 3), h5py.vlen_dtype(np.uint8)),
    "records": ((8,), np.dtype([("n", "<i2"), ("name", h5py.string_dtype()), ("x", h5py.string_dtype(), (2,))])),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", NESTED)
def test_a_length_in_hdf5_that_only_a_map_function_reads_is_checked(kind, chunked, tmp_path):
    shape, dtype = NESTED[kind]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"] = np.arange(8)
        array = file.create_dataset("x", shape, dtype, chunks=(3, 2)[: len(shape)] if chunked else None)
        for place in np.ndindex(shape):
            array[place] = np.arange(5) if dtype.names is None else (1, "name", ["value", "value"])
    data = bytearray((tmp_path / "a.h5").read_bytes())
    last = data.rindex(struct.pack("<IQ", 5, data.index(b"GCOL")))
    options = {"map": lambda sample: {"y": sample["y"]}, "workers": 0}
    assert sl.convert(tmp_path / "a.h5", tmp_path / "good", **options).num_samples == 8
    data[last : last + 4] = struct.pack("<I", 1 << 31)
    (tmp_path / "a.h5").write_bytes(data)
    with pytest.raises(SourceError, match="a value states 2147483648 bytes, the file has"):
        sl.convert(tmp_path / "a.h5", tmp_path / "out", **options)


def test_a_value_in_hdf5_that_all_parts_of_a_record_share_counts_for_each(tmp_path):
    dtype = np.dtype([(f"part {number}", h5py.string_dtype()) for number in range(8)])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"] = [1]
        file.create_dataset("x", (1,), dtype)[0] = ("v" * (8 * MIB), *["v"] * 7)
        at = file["x"].id.get_offset()
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[at : at + 8 * 16] = bytes(data[at : at + 16]) * 8
    (tmp_path / "a.h5").write_bytes(data)
    options = {"map": lambda sample: {"y": sample["y"]}, "workers": 0}
    with pytest.raises(SourceError, match="values of 25165824 bytes, at most 16777216 are decoded"):
        sl.convert(tmp_path / "a.h5", tmp_path / "out", **options, source_options={"max_decoded": "16MiB"})
    assert sl.convert(tmp_path / "a.h5", tmp_path / "out", **options).num_samples == 1


def test_a_chunk_of_packed_texts_of_hdf5_may_be_larger_than_a_small_limit(tmp_path):
    texts = [f"{number}" for number in range(4096)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4096,), h5py.string_dtype(), texts, chunks=(4096,), compression="gzip")
    sl.convert(tmp_path / "a.h5", tmp_path / "out", workers=0, source_options={"max_decoded": "1MiB"})
    assert list(sl.open(tmp_path / "out").read("x", 0, 4096)) == texts
