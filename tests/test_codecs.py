"""Laws of one chunk: what goes in comes out, the same every time, and damage is an error."""

import json
import struct
import threading

import crc32c
import numpy as np
import pytest
import zarr
from format_data import CODECS, column_of, fields, same
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc, zstd
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from streamloader.errors import CorruptError, FieldError
from streamloader.format.codecs import (
    ABSENT,
    JOINED_BYTES,
    decode_fixed,
    decode_items,
    encode_chunk,
    encode_shard,
    index_size,
    measure_codec,
    pack_items,
    parse_index,
    parse_items,
    seal_chunk,
)
from streamloader.format.manifest import Field, FieldLayout
from streamloader.format.metadata import field_document

UINT8 = Field("tensor", "uint8", (8,))


def layout_of(field, chunk, codec, nbytes=1 << 20):
    return FieldLayout(field, chunk, chunk, codec, resident=False, nbytes=nbytes)


def body_of(layout, column):
    return memoryview(encode_chunk(layout, column))[:-4]


@given(fields, st.sampled_from(CODECS), st.integers(1, 40), st.data())
@settings(max_examples=150, deadline=None)
def test_a_chunk_gives_back_its_samples_and_fill(field, codec, chunk, data):
    rows = data.draw(st.integers(1, chunk))
    layout, column = layout_of(field, chunk, codec), column_of(field, rows)
    stored = encode_chunk(layout, column)
    body = memoryview(stored)[:-4]
    assert int.from_bytes(stored[-4:], "little") == crc32c.crc32c(bytes(body))
    if field.fixed:
        for count in {rows, chunk, max(1, rows - 1)}:
            out = np.ones((count, *field.shape), field.dtype)
            decode_fixed(layout, body, out)
            assert same(out[:rows], column[:count])
            assert not out[rows:].any()
    else:
        items = decode_items(layout, body)
        assert [bytes(items[i]) for i in range(len(items))] == column + [b""] * (chunk - rows)


@pytest.mark.parametrize("extra", [-5, -1, 0, 1])
def test_items_of_any_size_are_packed_end_to_end_and_large_ones_are_not_copied(extra):
    sizes = [0, JOINED_BYTES + extra, 7, JOINED_BYTES // 2, JOINED_BYTES // 2 + extra, 3 * JOINED_BYTES, 0]
    items = [bytes([i]) * size for i, size in enumerate(sizes)]
    expected = b"".join([len(items).to_bytes(4, "little"), *(len(one).to_bytes(4, "little") + one for one in items)])
    assert pack_items(items) == expected
    layout = FieldLayout(Field("bytes"), chunk=len(items), shard=len(items), codec="none", resident=False)
    body, seal = seal_chunk(layout, items)
    assert b"".join(body) == expected
    assert int.from_bytes(seal, "little") == crc32c.crc32c(expected)
    assert any(part is items[5] for part in body)


@pytest.mark.parametrize("dtype", ["int32", "uint64", "float64"])
def test_numbers_of_ragged_samples_are_shuffled_before_lz4(dtype):
    """Small numbers in wide ones: the bytes of each significance lie together, which is what LZ4 can use."""
    field = Field("ragged", dtype)
    rng = np.random.default_rng(0)
    column = [rng.integers(0, 50_000, count).astype(dtype).tobytes() for count in range(160, 200)]
    layout = layout_of(field, len(column), "lz4")
    body = body_of(layout, column)
    payload = pack_items(column)
    unshuffled = blosc.compress(payload, b"lz4", 5, blosc.NOSHUFFLE)
    assert len(body) < 0.8 * len(unshuffled)
    # a frame without shuffle, as other writers may make it, is read as well: the frame itself says which
    for frame in (body, memoryview(unshuffled)):
        items = decode_items(layout, frame)
        assert [bytes(items[i]) for i in range(len(items))] == column


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_items_are_unpacked_where_there_is_room_for_them(codec):
    layout, column = layout_of(Field("bytes"), 8, codec), column_of(Field("bytes"), 8)
    memory = []

    def allocate(size):
        memory.append(bytearray(size))
        return memoryview(memory[-1])

    items = decode_items(layout, body_of(layout, column), allocate)
    assert [bytes(items[i]) for i in range(8)] == column
    if codec == "none":
        assert not memory
    else:
        memory[0][:] = bytes(len(memory[0]))
        assert not any(any(items[i]) for i in range(8))


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_samples_give_the_same_bytes_on_every_thread(codec):
    column = column_of(Field("tensor", "float32", (64,)), 4096)
    layout = layout_of(Field("tensor", "float32", (64,)), 4096, codec)
    found = [encode_chunk(layout, column)]
    threads = [threading.Thread(target=lambda: found.append(encode_chunk(layout, column))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 5 and len(set(found)) == 1


@given(st.sampled_from(CODECS), st.booleans(), st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_bodies_are_errors_or_other_values_but_never_a_crash(codec, variable, data):
    field = Field("bytes") if variable else UINT8
    layout = layout_of(field, 32, codec)
    body = bytearray(body_of(layout, column_of(field, 32)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = memoryview(bytes(body))[: data.draw(st.integers(0, len(body)))]
    try:
        if variable:
            items = decode_items(layout, cut)
            assert len(items) == 32 and sum(len(items[i]) for i in range(32)) <= 2 * layout.nbytes
        else:
            decode_fixed(layout, cut, np.empty((32, 8), np.uint8))
    except CorruptError:
        pass


@given(st.binary(max_size=200), st.integers(0, 20))
def test_lengths_beyond_the_buffer_are_errors(data, count):
    try:
        items = parse_items(memoryview(data), count)
    except CorruptError:
        return
    assert pack_items([bytes(items[i]) for i in range(count)]) == data


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_frame_that_claims_more_than_its_geometry_is_not_unpacked(codec):
    bomb = np.zeros(64 << 20, np.uint8)
    packed = zstd.compress(bomb, 3) if codec == "zstd" else blosc.compress(bomb, b"lz4", 5, 0, typesize=1)
    layout = layout_of(Field("bytes"), 4, codec, nbytes=1000)
    with pytest.raises(CorruptError, match="claims 67108864"):
        decode_items(layout, memoryview(packed))
    with pytest.raises(CorruptError, match="claims 67108864"):
        decode_fixed(layout_of(UINT8, 4, codec), memoryview(packed), np.empty((4, 8), np.uint8))


def test_a_blosc_header_that_points_beyond_its_bytes_is_refused():
    layout = layout_of(UINT8, 32, "lz4")
    body = bytearray(body_of(layout, column_of(UINT8, 32)))
    struct.pack_into("<I", body, 12, 1 << 30)
    with pytest.raises(CorruptError, match="claims -1"):
        decode_fixed(layout, memoryview(body), np.empty((32, 8), np.uint8))


def test_a_zstd_frame_without_its_size_is_refused():
    layout = layout_of(UINT8, 1, "zstd")
    body = bytes.fromhex("28b52ffd00") + bytes(10)
    with pytest.raises(CorruptError):
        decode_fixed(layout, memoryview(body), np.empty((1, 8), np.uint8))


def test_items_of_two_gigabytes_are_refused():
    with pytest.raises(FieldError, match="2147483648 bytes"):
        pack_items([bytes(2**31)])  # zero pages: no memory is touched


def test_auto_leaves_noise_alone_and_compresses_what_pays():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (4096, 512), np.uint8)
    field = Field("tensor", "uint8", (512,))
    assert measure_codec("auto", field, noise) == ("none", 512.0)
    assert measure_codec("auto", field, np.zeros_like(noise))[0] == "lz4"
    repeated = np.repeat(noise[:, :8], 64, axis=1)  # runs: lz4 saves most of it
    assert measure_codec("auto", field, repeated)[0] == "lz4"
    letters = rng.integers(0, 4, (4096, 512), np.uint8)  # two bits in each byte: only entropy coding sees it
    assert measure_codec("auto", field, letters)[0] == "zstd"
    assert measure_codec("auto", Field("bytes"), [rng.bytes(1000) for _ in range(100)])[0] == "none"
    assert measure_codec("zstd", field, noise)[0] == "zstd"


@pytest.mark.parametrize("spec", ["int64", "bytes", "text", "ragged:int32[2]", "uint8[4]"])
def test_auto_has_an_answer_for_no_samples(spec):
    field = Field.parse(spec)
    column = column_of(field, 0)
    codec, size = measure_codec("auto", field, column)
    assert codec == "none" and size == field.item_bytes


# shards: chunks ascending and gapless, the index last


@given(fields, st.sampled_from(CODECS), st.integers(0, 3), st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_zarr_python_reads_every_shard(field, codec, chunk_bits, more_bits, data):
    layout = FieldLayout(field, 1 << chunk_bits, 1 << (chunk_bits + more_bits), codec, resident=False)
    count = data.draw(st.integers(1, layout.shard))
    column = column_of(field, count)
    encoded = encode_shard(layout, column.copy())
    buffer = default_buffer_prototype().buffer
    objects = {
        "zarr.json": buffer.from_bytes(json.dumps(field_document("x", layout, count)).encode()),
        layout.shard_key("x", 0)[2:]: buffer.from_bytes(b"".join(encoded.parts)),
    }
    found = zarr.open_array(MemoryStore(objects), mode="r")[:]
    if field.fixed:
        assert same(np.asarray(found), column)
    else:
        assert [one.encode() if isinstance(one, str) else one for one in found.tolist()] == column


@given(st.integers(0, 3), st.integers(0, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_chunks_lie_ascending_and_gapless_and_the_index_last(chunk_bits, more_bits, data):
    field = Field("bytes")
    layout = FieldLayout(field, 1 << chunk_bits, 1 << (chunk_bits + more_bits), "none", resident=False)
    count = data.draw(st.integers(0, layout.shard))
    encoded = encode_shard(layout, column_of(field, count))
    index = parse_index(b"".join(encoded.parts), layout.chunks_per_shard)
    stored = -(-count // layout.chunk)
    sizes = encoded.entries[:, 0].astype(np.uint64)
    assert (index[stored:] == ABSENT).all() and not encoded.entries[stored:].any()
    assert (index[:stored, 1] == sizes[:stored]).all()
    assert (index[:stored, 0] == np.cumsum(sizes[:stored]) - sizes[:stored]).all()
    assert sizes.sum() + index_size(layout.chunks_per_shard) == len(b"".join(encoded.parts))
    for (offset, size), (_, crc) in zip(index[:stored].tolist(), encoded.entries[:stored].tolist(), strict=True):
        assert int.from_bytes(b"".join(encoded.parts)[offset + size - 4 : offset + size], "little") == crc


def test_chunks_of_fill_values_are_stored_too():
    layout = FieldLayout(Field.parse("int32"), 4, 16, "none", resident=False)
    encoded = encode_shard(layout, np.zeros(9, np.int32))
    assert (encoded.entries[:3, 0] == 20).all() and (encoded.entries[3, 0] == 0)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_index_is_an_error(data):
    layout = FieldLayout(Field.parse("int32"), 1, 8, "none", resident=False)
    tail = bytearray(b"".join(encode_shard(layout, np.arange(5, dtype=np.int32)).parts)[-index_size(8) :])
    at = data.draw(st.integers(0, len(tail) - 1))
    tail[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError, match="does not match"):
        parse_index(bytes(tail), 8)
    with pytest.raises(CorruptError, match="131 bytes"):
        parse_index(bytes(tail[:-1]), 8)
