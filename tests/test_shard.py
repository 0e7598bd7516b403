"""Laws of a shard object: chunks ascending and gapless, the index last, and zarr-python agrees."""

from __future__ import annotations

import json

import numpy as np
import pytest
import zarr
from format_data import CODECS, column_of, fields, same
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from streamloader.errors import CorruptError
from streamloader.format.manifest import Field, FieldLayout
from streamloader.format.metadata import field_document
from streamloader.format.shard import ABSENT, encode_shard, index_size, parse_index


@given(fields, st.sampled_from(CODECS), st.integers(0, 3), st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_zarr_python_reads_every_shard(
    field: Field, codec: str, chunk_bits: int, more_bits: int, data: st.DataObject
) -> None:
    layout = FieldLayout(field, 1 << chunk_bits, 1 << (chunk_bits + more_bits), codec, resident=False)
    count = data.draw(st.integers(1, layout.shard))
    column = column_of(field, count)
    encoded = encode_shard(layout, column)
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
def test_chunks_lie_ascending_and_gapless_and_the_index_last(
    chunk_bits: int, more_bits: int, data: st.DataObject
) -> None:
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


def test_chunks_of_fill_values_are_stored_too() -> None:
    layout = FieldLayout(Field.parse("int32"), 4, 16, "none", resident=False)
    encoded = encode_shard(layout, np.zeros(9, np.int32))
    assert (encoded.entries[:3, 0] == 20).all() and (encoded.entries[3, 0] == 0)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_index_is_an_error(data: st.DataObject) -> None:
    layout = FieldLayout(Field.parse("int32"), 1, 8, "none", resident=False)
    tail = bytearray(b"".join(encode_shard(layout, np.arange(5, dtype=np.int32)).parts)[-index_size(8) :])
    at = data.draw(st.integers(0, len(tail) - 1))
    tail[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError, match="does not match"):
        parse_index(bytes(tail), 8)
    with pytest.raises(CorruptError, match="131 bytes"):
        parse_index(bytes(tail[:-1]), 8)
