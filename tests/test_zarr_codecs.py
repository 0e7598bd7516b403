"""Laws of codecs of foreign chunks: they give what was written, in no more memory than the metadata declares."""

import bz2
import gzip
import json
import lzma
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numcodecs.registry import get_codec

from streamloader import errors
from streamloader.storage import open_store
from streamloader.zarr.codecs import chunk_codec
from streamloader.zarr.metadata import ZarrArray, read_group
from streamloader.zarr.reader import ArrayReader

SHAPE = (6, 4)
SIZE = 6 * 4 * 4
BOMB = 16 << 20  # bytes; the chunk has 96
ALLOWED = 4 << 20


def array(version=3, dtype="<f4", shape=SHAPE, **document):
    """An array of one chunk, by its metadata."""
    if version == 2:
        given = {"zarr_format": 2, "shape": [*shape], "chunks": [*shape], "dtype": dtype, "compressor": None}
    else:
        grid = {"name": "regular", "configuration": {"chunk_shape": [*shape]}}
        given = {"zarr_format": 3, "node_type": "array", "shape": [*shape], "data_type": "float32", "chunk_grid": grid}
        given |= {"chunk_key_encoding": {"name": "default"}, "fill_value": 0}
    return ZarrArray.of("a", {**given, **document})


def decoded(given, body):
    return chunk_codec(given).decode(memoryview(body))


def codec(name, **configuration):
    return {"name": name, "configuration": configuration}


LITTLE, BIG = codec("bytes", endian="little"), codec("bytes", endian="big")
INDEX = (LITTLE, codec("crc32c"))


def shards(*codecs, shape=(3, 2), location="end", index=INDEX):
    inner = {"chunk_shape": [*shape], "codecs": [*codecs], "index_codecs": [*index], "index_location": location}
    return codec("sharding_indexed", **inner)


def in_a_shard(chunk):
    """A shard of four chunks, of which the first is there."""
    index = np.full((4, 2), 2**64 - 1, "<u8")
    index[0] = 0, len(chunk)
    return chunk + index.tobytes()


BOMBS = {
    "bz2": bz2.compress(bytes(BOMB)),
    "lzma": lzma.compress(bytes(BOMB), preset=0),
    "gzip": gzip.compress(bytes(BOMB)),
    "zlib": zlib.compress(bytes(BOMB)),
    "zstd": zstandard.ZstdCompressor().compress(bytes(BOMB)),
    "lz4": get_codec({"id": "lz4"}).encode(bytes(BOMB)),
    "blosc": get_codec({"id": "blosc"}).encode(bytes(BOMB)),
}
STREAMS = {
    "bz2": bz2.compress(bytes(1 << 20)) * 16,
    "lzma": lzma.compress(bytes(1 << 20), preset=0) * 16,
    "gzip": gzip.compress(bytes(1 << 20)) * 16,
    "zstd": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(BOMB)),
}
SECOND = zstandard.ZstdCompressor().compress(bytes(SIZE)) + STREAMS["zstd"]  # the first frame has the right size


def bombs():
    for name, body in BOMBS.items():
        yield f"v2 {name}", array(2, compressor={"id": name}), body
        filters = [{"id": "delta", "dtype": "<f4"}]
        yield f"v2 {name} below a filter", array(2, compressor={"id": name}, filters=filters), body
        yield f"v3 {name}", array(codecs=[codec("bytes"), codec(f"numcodecs.{name}")]), body
        inner = shards(codec("bytes"), codec(f"numcodecs.{name}"), index=[codec("bytes")])
        yield f"v3 {name} in shards of shards", array(codecs=[shards(inner, shape=SHAPE)]), in_a_shard(body)
        compressed = array(codecs=[inner, codec("gzip")])
        yield f"v3 {name} in shards that are compressed", compressed, gzip.compress(in_a_shard(body))
    for name, body in STREAMS.items():
        yield f"v2 {name} of many parts", array(2, compressor={"id": name}), body
    yield "zstd, two frames", array(2, compressor={"id": "zstd"}), SECOND
    for name in ("bz2", "lzma", "zlib"):
        once = get_codec({"id": name} | ({"preset": 0} if name == "lzma" else {}))  # its dictionary is small
        twice = once.encode(BOMBS[name])
        yield f"v2 {name}, nested", array(2, compressor={"id": name}, filters=[{"id": name}]), twice
        thrice = once.encode(twice)
        filters = [{"id": name}, {"id": name}]
        yield f"v2 {name}, nested twice", array(2, compressor={"id": name}, filters=filters), thrice
    wide = {"id": "astype", "encode_dtype": "|u1", "decode_dtype": "<U1000000"}
    yield "a filter to wide texts", array(2, filters=[wide]), bytes(SIZE)
    labels = {"id": "categorize", "labels": ["a"], "dtype": "<U1000000", "astype": "|u1"}
    yield "a filter to labels", array(2, filters=[labels]), bytes(SIZE)
    yield "packed bits", array(2, filters=[{"id": "packbits"}] * 3), bytes(1 << 20)


@pytest.mark.parametrize(("given", "body"), [case[1:] for case in bombs()], ids=[case[0] for case in bombs()])
def test_a_chunk_takes_no_more_memory_than_its_metadata_declares(given, body):
    opened = chunk_codec(given)
    tracemalloc.start()
    try:
        with pytest.raises(errors.CorruptError):
            opened.decode(memoryview(body))
        assert tracemalloc.get_traced_memory()[1] < ALLOWED
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
@pytest.mark.parametrize("version", [2, 3])
def test_an_element_size_that_is_none_is_an_error(size, version):
    given = array(2, filters=[{"id": "shuffle", "elementsize": size}])
    if version == 3:
        given = array(codecs=[codec("bytes"), codec("numcodecs.shuffle", elementsize=size)])
    with pytest.raises(errors.FormatError, match="shuffle' of the array 'a' has the element size"):
        chunk_codec(given)


@pytest.mark.parametrize("name", ["json2", "msgpack2", "vlen-array"])
def test_codecs_of_objects_are_refused(name):
    refused = array(2, filters=[{"id": name}]), array(codecs=[codec(name)]), array(codecs=[codec(f"numcodecs.{name}")])
    for each in refused:
        with pytest.raises(errors.FormatError, match=f"has the codec '(numcodecs.)?{name}', for objects"):
            chunk_codec(each)


def test_shards_that_are_nested_without_end_are_an_error():
    inner = codec("bytes")
    for _ in range(300):
        inner = shards(inner, shape=SHAPE)
    with pytest.raises(errors.FormatError, match="nested too deep"):
        chunk_codec(array(codecs=[inner, codec("crc32c")]))


VALUES = np.random.default_rng(0).normal(0, 100, SHAPE).round(1).astype("f4")
STREAM = st.sampled_from(["bz2", "lzma", "gzip", "zlib"])
FILTERS = [
    {"id": "delta", "dtype": "<f4", "astype": "<f8"},
    {"id": "fixedscaleoffset", "dtype": "<f4", "astype": "<i4", "scale": 10, "offset": 3},
    {"id": "quantize", "dtype": "<f4", "digits": 3},
    {"id": "bitround", "keepbits": 9},
    {"id": "astype", "decode_dtype": "<f4", "encode_dtype": "<f8"},
]
BYTES = [
    *({"id": name} for name in ("zlib", "gzip", "bz2", "lzma", "zstd", "lz4", "blosc")),
    *({"id": name} for name in ("crc32", "adler32", "fletcher32", "jenkins_lookup3", "crc32c", "base64")),
    {"id": "shuffle", "elementsize": 4},
    {"id": "lzma", "format": lzma.FORMAT_RAW, "filters": [{"id": lzma.FILTER_LZMA2, "preset": 1}]},
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(FILTERS), max_size=1), st.lists(st.sampled_from(BYTES), max_size=4), st.booleans())
def test_any_codecs_of_numcodecs_give_back_what_they_encoded(filters, others, cut):
    steps = [get_codec(options) for options in [*filters, *others]]
    data = VALUES
    for step in steps:
        # what a compressor returns has any number of bytes, which cannot be shuffled by four
        assume(step.codec_id != "shuffle" or memoryview(data).nbytes % 4 == 0)
        data = step.encode(data)
    body = data.tobytes() if isinstance(data, np.ndarray) else bytes(data)
    wanted = VALUES if not filters else np.asarray(steps[0].decode(steps[0].encode(VALUES))).reshape(SHAPE)
    given = array(2, filters=[*filters, *others[:-1]], compressor=others[-1] if others else None)
    if cut:
        with pytest.raises(errors.CorruptError):
            decoded(given, body[:-1])
        return
    np.testing.assert_array_equal(decoded(given, body), wanted)


@pytest.mark.parametrize("padding", [b"", bytes(512)])
@pytest.mark.parametrize("name", ["gzip", "bz2", "lzma"])
def test_streams_may_have_parts_and_zeros_at_their_end(name, padding):
    data = VALUES.tobytes()
    parts = [get_codec({"id": name}).encode(part) for part in (data[:40], data[40:])]
    np.testing.assert_array_equal(decoded(array(2, compressor={"id": name}), b"".join(parts) + padding), VALUES)


@pytest.mark.parametrize("name", ["zlib", "bz2"])
@pytest.mark.parametrize("rest", [b"another", b"x", bytes(3) + b"another"])
def test_what_begins_no_stream_is_ignored_after_one_as_numcodecs_does(name, rest):
    codec = get_codec({"id": name})
    body = codec.encode(VALUES.tobytes())
    assert codec.decode(body + rest) == VALUES.tobytes()
    np.testing.assert_array_equal(decoded(array(2, compressor={"id": name}), body + rest), VALUES)
    with pytest.raises(errors.CorruptError):
        decoded(array(2, compressor={"id": name}), body[:-1])
    with pytest.raises(errors.CorruptError):
        decoded(array(2, compressor={"id": name}), rest)


@pytest.mark.parametrize("name", ["gzip", "lzma"])
def test_what_begins_no_stream_is_an_error_in_other_codecs_as_in_numcodecs(name):
    codec = get_codec({"id": name})
    body = codec.encode(VALUES.tobytes()) + b"another"
    with pytest.raises((gzip.BadGzipFile, lzma.LZMAError)):
        codec.decode(body)
    with pytest.raises(errors.CorruptError):
        decoded(array(2, compressor={"id": name}), body)


def written_by_zarr_python(path, codecs, values=VALUES):
    """What is read of an array that zarr-python wrote with these codecs."""
    document = array(shape=values.shape).document | {"codecs": codecs}
    grid = {"name": "regular", "configuration": {"chunk_shape": [values.shape[0] // 2, *values.shape[1:]]}}
    (path / "x").mkdir()
    (path / "x" / "zarr.json").write_text(json.dumps({**document, "chunk_grid": grid, "attributes": {}}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that codecs of numcodecs have no specification
        zarr.open_array(path / "x", mode="r+")[...] = values
    store = open_store(str(path / "x"))
    return ArrayReader(store, read_group(store).array("x")).read_all()


TURNED = codec("transpose", order=[1, 0])
FIXED = codec("numcodecs.fixedscaleoffset", scale=10, offset=3, dtype="<f4", astype="<i2")
ONE = (3, 4)  # the shape of a chunk
CHAINS = {
    **{f"numcodecs.{name}": [LITTLE, codec(f"numcodecs.{name}")] for name in (*BOMBS, "adler32", "fletcher32")},
    "shuffle": [LITTLE, codec("numcodecs.shuffle"), codec("numcodecs.bz2")],
    "a filter": [FIXED, LITTLE, codec("numcodecs.zlib")],
    "a filter, big-endian": [FIXED, BIG, codec("zstd", level=1, checksum=False)],
    "two filters": [FIXED, codec("numcodecs.delta", dtype="<i2"), LITTLE],
    "bits": [codec("numcodecs.bitround", keepbits=9), BIG],
    "to wider numbers": [codec("numcodecs.astype", encode_dtype="<f8", decode_dtype="<f4"), LITTLE],
    "transposed": [TURNED, BIG, codec("numcodecs.lzma", preset=1), codec("crc32c")],
    "nested shards": [shards(shards(BIG, codec("numcodecs.bz2"), shape=(1, 2)), shape=(3, 2))],
    "nested shards, the index first": [shards(shards(LITTLE, shape=(3, 1), location="start"), shape=(3, 2))],
    "transposed nested shards": [shards(TURNED, shards(LITTLE, shape=(2, 3)), shape=ONE)],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_codecs_of_version_3_give_what_zarr_python_wrote(chain, tmp_path):
    found = written_by_zarr_python(tmp_path, CHAINS[chain])
    lossy = {"rtol": 2e-3, "atol": 0.1} if any(name in chain for name in ("filter", "bits")) else {"rtol": 0}
    np.testing.assert_allclose(found, VALUES, **lossy)


def test_missing_chunks_of_nested_shards_have_the_fill_value(tmp_path):
    values = np.zeros((8, 4), "f4")
    values[:2] = 5
    found = written_by_zarr_python(tmp_path, [shards(shards(LITTLE, shape=(1, 2)), shape=(2, 4))], values)
    np.testing.assert_array_equal(found, values)


def test_codecs_of_numcodecs_have_their_own_names_too_as_zarrs_writes_them():
    steps = [get_codec({"id": "shuffle", "elementsize": 4}), get_codec({"id": "bz2"})]
    body = steps[1].encode(steps[0].encode(VALUES))
    chain = [LITTLE, codec("shuffle"), codec("bz2", level=1)]
    np.testing.assert_array_equal(decoded(array(codecs=chain), body), VALUES)


@pytest.mark.parametrize("chain", [[LITTLE, codec("flipped")], [shards(LITTLE, shape=(3, 2)), codec("flipped")]])
def test_an_unknown_codec_is_named(chain):
    with pytest.raises(errors.FormatError, match="the codec 'flipped', which cannot be used here"):
        chunk_codec(array(codecs=chain))
