"""One shard object: inner chunks, ascending and gapless from 0, then Zarr's shard index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import CorruptError
from streamloader.format.codecs import CRC_BYTES, Chunk, Column, seal_chunk
from streamloader.format.manifest import FieldLayout
from streamloader.storage.protocol import Buffer, body_bytes

ABSENT = 2**64 - 1


@dataclass(frozen=True, eq=False)
class EncodedShard:
    """A shard object's bytes, and its rows of the chunk table.

    `parts`: buffers that stand end to end; those of a field that is not compressed are memory of its column. `entries`:
    uint32 (chunks_per_shard, 2): the encoded bytes of each inner chunk with its checksum (0: absent), and the crc32c
    that stands at the chunk's end.
    """

    parts: Sequence[Buffer]
    entries: NDArray[np.uint32]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return body_bytes(self.parts)


def encode_shard(layout: FieldLayout, column: Column, *, spend: bool = False) -> EncodedShard:
    """Encode up to `layout.shard` samples. Every chunk that holds a sample is stored, also one of fill values.

    With `spend` a list is emptied on the way: its items and what is encoded are then not held both.
    """
    chunks = seal_chunks(layout, column, spend=spend)
    entries = np.zeros((layout.chunks_per_shard, 2), np.uint32)
    entries[: len(chunks)] = chunk_entries(chunks)
    return EncodedShard([*stored(chunks), encode_index(entries)], entries)


def seal_chunks(layout: FieldLayout, column: Column, *, spend: bool = False) -> list[Chunk]:
    """Return the parts of the chunks that hold these samples; `spend` as for `encode_shard`."""
    chunks: list[Chunk] = []
    for start in range(0, len(column), layout.chunk):
        piece = column[start : start + layout.chunk]
        chunks.append(seal_chunk(layout, piece))
        if spend and isinstance(column, list):
            column[start : start + layout.chunk] = [b""] * len(piece)
    return chunks


def stored(chunks: Sequence[Chunk]) -> Iterator[Buffer]:
    """Yield the buffers of stored chunks, end to end."""
    return chain.from_iterable((*body, seal) for body, seal in chunks)


def chunk_entries(chunks: Sequence[Chunk]) -> NDArray[np.uint32]:
    """Return the rows of the chunk table of stored chunks, uint32 (len(chunks), 2)."""
    rows = [(body_bytes(body) + CRC_BYTES, int.from_bytes(seal, "little")) for body, seal in chunks]
    return np.array(rows, np.uint32).reshape(-1, 2)


def encode_index(entries: NDArray[np.uint32], skips: Iterable[tuple[int, int]] = ()) -> bytes:
    """Return the sealed index of a shard with these rows of the chunk table.

    `skips` are (chunk, bytes): so many bytes stand before that chunk.
    """
    sizes = entries[:, 0].astype(np.uint64)
    index = np.full((len(entries), 2), ABSENT, "<u8")
    held = sizes > 0
    index[held, 0] = (np.cumsum(sizes) - sizes)[held]
    index[held, 1] = sizes[held]
    for chunk, size in skips:
        index[chunk:, 0][held[chunk:]] += np.uint64(size)
    data = index.tobytes()
    return data + crc32c.crc32c(data).to_bytes(CRC_BYTES, "little")


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
