"""Laws of one chunk: what goes in comes out, the same every time, and damage is an error."""

import struct
from concurrent.futures import ThreadPoolExecutor

import crc32c
import numpy as np
import pytest
from amounts import examples
from format_data import CODECS, column_of, fields, same
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc, zstd

from streamloader.errors import CorruptError, FieldError
from streamloader.format import codecs
from streamloader.format.codecs import JOINED_BYTES
from streamloader.format.manifest import Field, FieldLayout

UINT8 = Field("tensor", "uint8", (8,))


def layout_of(field, chunk, codec, nbytes=1 << 20):
    return FieldLayout(field, chunk, chunk, codec, resident=False, nbytes=nbytes)


def body_of(layout, column):
    return memoryview(codecs.encode_chunk(layout, column))[:-4]


@given(fields, st.sampled_from(CODECS), st.integers(1, 40), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_a_chunk_gives_back_its_samples_and_fill(field, codec, chunk, data):
    rows = data.draw(st.integers(1, chunk))
    layout, column = layout_of(field, chunk, codec), column_of(field, rows)
    stored = codecs.encode_chunk(layout, column)
    body = memoryview(stored)[:-4]
    assert int.from_bytes(stored[-4:], "little") == crc32c.crc32c(bytes(body))
    if field.fixed:
        for count in {rows, chunk, max(1, rows - 1)}:
            out = np.ones((count, *field.shape), field.dtype)
            codecs.decode_fixed(layout, body, out)
            assert same(out[:rows], column[:count])
            assert not out[rows:].any()
    else:
        items = codecs.decode_items(layout, body)
        assert [bytes(items[i]) for i in range(len(items))] == column + [b""] * (chunk - rows)


@pytest.mark.parametrize("extra", [-5, -1, 0, 1])
def test_items_of_any_size_are_packed_end_to_end_and_large_ones_are_not_copied(extra):
    sizes = [0, JOINED_BYTES + extra, 7, JOINED_BYTES // 2, JOINED_BYTES // 2 + extra, 3 * JOINED_BYTES, 0]
    items = [bytes([i]) * size for i, size in enumerate(sizes)]
    expected = b"".join([len(items).to_bytes(4, "little"), *(len(one).to_bytes(4, "little") + one for one in items)])
    assert b"".join(codecs.pack_items(items)) == expected
    layout = FieldLayout(Field("bytes"), chunk=len(items), shard=len(items), codec="none", resident=False)
    body, seal = codecs.encode_buffers(layout, items)
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
    unshuffled = blosc.compress(b"".join(codecs.pack_items(column)), b"lz4", 5, blosc.NOSHUFFLE)
    assert len(body) < 0.8 * len(unshuffled)
    # a frame without shuffle, as other writers may make it, is read as well: the frame itself says which
    for frame in (body, memoryview(unshuffled)):
        items = codecs.decode_items(layout, frame)
        assert [bytes(items[i]) for i in range(len(items))] == column


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_items_are_unpacked_where_there_is_room_for_them(codec):
    layout, column = layout_of(Field("bytes"), 8, codec), column_of(Field("bytes"), 8)
    memory = []

    def allocate(size):
        memory.append(bytearray(size))
        return memoryview(memory[-1])

    items = codecs.decode_items(layout, body_of(layout, column), allocate)
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
    here = codecs.encode_chunk(layout, column)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: codecs.encode_chunk(layout, column), range(8))) == {here}


@given(st.sampled_from(CODECS), st.booleans(), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_damaged_bodies_are_errors_or_other_values_but_never_a_crash(codec, variable, data):
    field = Field("bytes") if variable else UINT8
    layout = layout_of(field, 32, codec)
    body = bytearray(body_of(layout, column_of(field, 32)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = memoryview(bytes(body))[: data.draw(st.integers(0, len(body)))]
    try:
        if variable:
            items = codecs.decode_items(layout, cut)
            assert len(items) == 32 and sum(len(items[i]) for i in range(32)) <= 2 * layout.nbytes
        else:
            codecs.decode_fixed(layout, cut, np.empty((32, 8), np.uint8))
    except CorruptError:
        pass


@given(st.binary(max_size=200), st.integers(0, 20))
def test_lengths_beyond_the_buffer_are_errors(data, count):
    try:
        items = codecs.parse_items(memoryview(data), count)
    except CorruptError:
        return
    assert b"".join(codecs.pack_items([bytes(items[i]) for i in range(count)])) == data


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_frame_whose_header_does_not_fit_its_bytes_and_geometry_is_not_unpacked(codec):
    bomb = np.zeros(64 << 20, np.uint8)
    packed = zstd.compress(bomb, 3) if codec == "zstd" else blosc.compress(bomb, b"lz4", 5, 0, typesize=1)
    layout = layout_of(Field("bytes"), 4, codec, nbytes=1000)
    with pytest.raises(CorruptError, match="claims 67108864"):
        codecs.decode_items(layout, memoryview(packed))
    beyond = bytearray(body_of(layout_of(UINT8, 32, "lz4"), column_of(UINT8, 32)))
    struct.pack_into("<I", beyond, 12, 1 << 30)  # blosc's header points beyond its bytes
    without_size = bytes.fromhex("28b52ffd00") + bytes(10)
    for frame, size in ((packed, 67108864), (beyond if codec == "lz4" else without_size, -1)):
        with pytest.raises(CorruptError, match=f"claims {size}"):
            codecs.decode_fixed(layout_of(UINT8, 4, codec), memoryview(frame), np.empty((4, 8), np.uint8))


def test_items_of_two_gigabytes_are_an_error():
    with pytest.raises(FieldError, match="2147483648 bytes"):
        codecs.pack_items([bytes(2**31)])  # zero pages: no memory is touched


def test_auto_leaves_noise_alone_and_compresses_what_pays():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (4096, 512), np.uint8)
    field = Field("tensor", "uint8", (512,))
    assert codecs.measure_codec("auto", field, noise) == ("none", 512.0)
    assert codecs.measure_codec("auto", field, np.zeros_like(noise))[0] == "lz4"
    repeated = np.repeat(noise[:, :8], 64, axis=1)  # runs: lz4 saves most of it
    assert codecs.measure_codec("auto", field, repeated)[0] == "lz4"
    letters = rng.integers(0, 4, (4096, 512), np.uint8)  # two bits in each byte: only entropy coding sees it
    assert codecs.measure_codec("auto", field, letters)[0] == "zstd"
    assert codecs.measure_codec("auto", Field("bytes"), [rng.bytes(1000) for _ in range(100)])[0] == "none"
    assert codecs.measure_codec("zstd", field, noise)[0] == "zstd"


def test_chunks_of_fill_values_are_stored_too():
    layout = FieldLayout(Field.parse("int32"), 4, 16, "none", resident=False)
    encoded = codecs.encode_shard(layout, np.zeros(9, np.int32))
    assert (encoded.entries[:3, 0] == 20).all() and (encoded.entries[3, 0] == 0)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_index_is_an_error(data):
    layout = FieldLayout(Field.parse("int32"), 1, 8, "none", resident=False)
    tail = bytearray(b"".join(codecs.encode_shard(layout, np.arange(5, dtype=np.int32)).parts)[-codecs.index_size(8) :])
    at = data.draw(st.integers(0, len(tail) - 1))
    tail[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError, match="does not match"):
        codecs.parse_index(bytes(tail), 8)
    with pytest.raises(CorruptError, match="131 bytes"):
        codecs.parse_index(bytes(tail[:-1]), 8)
