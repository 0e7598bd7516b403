"""One shard object: inner chunks, ascending and gapless from 0, then Zarr's shard index."""

from __future__ import annotations

from dataclasses import dataclass

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import CorruptError
from streamloader.format.codecs import CRC_BYTES, Column, encode_chunk
from streamloader.format.manifest import FieldLayout

ABSENT = 2**64 - 1


@dataclass(frozen=True, eq=False)
class EncodedShard:
    """A shard object's bytes, and its rows of the chunk table.

    `entries`: uint32 (chunks_per_shard, 2): the encoded bytes of each inner chunk with its checksum (0: absent),
    and the crc32c that stands at the chunk's end.
    """

    data: bytes
    entries: NDArray[np.uint32]


def encode_shard(layout: FieldLayout, column: Column) -> EncodedShard:
    """Encode up to `layout.shard` samples. Every chunk that holds a sample is stored, also one of fill values."""
    chunks = [
        encode_chunk(layout, column[start : start + layout.chunk]) for start in range(0, len(column), layout.chunk)
    ]
    sizes = np.array([len(chunk) for chunk in chunks], np.uint64)
    index = np.full((layout.chunks_per_shard, 2), ABSENT, "<u8")
    index[: len(chunks), 0] = np.cumsum(sizes) - sizes
    index[: len(chunks), 1] = sizes
    entries = np.zeros((layout.chunks_per_shard, 2), np.uint32)
    entries[: len(chunks), 0] = sizes
    entries[: len(chunks), 1] = [int.from_bytes(chunk[-CRC_BYTES:], "little") for chunk in chunks]
    tail = index.tobytes()
    return EncodedShard(b"".join([*chunks, tail, crc32c.crc32c(tail).to_bytes(CRC_BYTES, "little")]), entries)


def index_size(chunks: int) -> int:
    """Return the bytes of a shard index of `chunks` inner chunks."""
    return 16 * chunks + CRC_BYTES


def parse_index(tail: bytes, chunks: int) -> NDArray[np.uint64]:
    """Return the index at the end of `tail`: uint64 (chunks, 2) of offset and nbytes, 2^64-1 for absent chunks.

    Raises `CorruptError` where `tail` is too short or the index' own checksum does not match.
    """
    size = index_size(chunks)
    if len(tail) < size:
        raise CorruptError(f"the shard ends with {len(tail)} bytes, its index has {size}")
    index = tail[len(tail) - size : -CRC_BYTES]
    if crc32c.crc32c(index) != int.from_bytes(tail[-CRC_BYTES:], "little"):
        raise CorruptError("the checksum of the shard's index does not match")
    return np.frombuffer(index, "<u8").reshape(chunks, 2).astype(np.uint64)
