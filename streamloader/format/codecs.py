"""Encodes and decodes chunks (payload -> codec -> CRC-32C) and shards of chunks.

A shard object is its inner chunks in ascending order, from byte 0 without gaps, followed by Zarr's shard index.

The payload of a fixed-shape field is the little-endian C-order bytes of its samples. Other payloads are Zarr's
`vlen-bytes`: a u32 count, then for each item a u32 length and that many bytes. "lz4" is LZ4 in a blosc frame, "zstd" a
plain Zstandard frame. Compression, checksums and copies release the GIL.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c
import numpy as np
from numcodecs import blosc, zstd
from numpy.typing import NDArray

from streamloader.errors import CorruptError, FieldError
from streamloader.format.manifest import MAX_CHUNK_BYTES, Field, FieldLayout
from streamloader.format.rows import parse_lengths
from streamloader.options import MIB, CodecChoice
from streamloader.storage.buffers import Allocate, Buffer, body_bytes, body_crc32c, empty_buffer

Column = NDArray[Any] | Sequence[bytes]

CRC_BYTES = 4
ABSENT = 2**64 - 1
ZSTD_LEVEL = 3
BLOSC_LEVEL = 5
BLOSC_BLOCK = 1 << 17  # bytes, for each byte of a number: what blosc chooses at that level

# Time to decode 1 GB of samples, relative to the time to transfer 1 GB at 10 Gbit/s: one core decodes about 2.5 GB/s of
# lz4 and 0.8 GB/s of zstd, and four cores share the work.
DECODE_COST = {"none": 0.0, "lz4": 0.1, "zstd": 0.3}
JOINED_BYTES = 64 << 10  # size of joined small items: the memory that freed items leave has no holes for whole chunks
PROBE_PIECE_BYTES = 1 << 20
PROBE_PIECES = 16


def column_size(column: Column) -> int:
    """Return the decoded size of a column, in bytes."""
    return column.nbytes if isinstance(column, np.ndarray) else sum(map(len, column))


@dataclass(frozen=True, eq=False)
class Items:
    """The items of one chunk: item i is `buffer[starts[i]:stops[i]]`."""

    buffer: memoryview
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> memoryview:
        return self.buffer[int(self.starts[index]) : int(self.stops[index])]


def with_checksum(data: bytes) -> bytes:
    """Return `data` followed by its CRC-32C."""
    return data + crc32c.crc32c(data).to_bytes(CRC_BYTES, "little")


def encode_buffers(layout: FieldLayout, column: Column) -> tuple[Sequence[Buffer], bytes]:
    """Return the encoded chunk as consecutive buffers, which may share the column's memory, and its checksum.

    `column` holds at most `layout.chunk` samples; a shorter one is padded with the fill value. The same column gives
    the same bytes. Raises `FieldError` for a chunk of 2 GiB or more.
    """
    body = _payload(layout, column)
    size = body_bytes(body)
    if size > MAX_CHUNK_BYTES:
        problem = f"a chunk of {layout.chunk} samples has {size} bytes, the format allows {MAX_CHUNK_BYTES}"
        raise FieldError(problem, "make samples smaller, or split them")
    if layout.codec != "none":
        payload = body[0] if len(body) == 1 else b"".join(body)
        body = [compress(layout.codec, payload, typesize(layout.field))]
    return body, body_crc32c(body).to_bytes(CRC_BYTES, "little")


def encode_chunk(layout: FieldLayout, column: Column) -> bytes:
    """Return the stored bytes of one chunk, checksum included. Arguments and errors are those of `encode_buffers`."""
    body, checksum = encode_buffers(layout, column)
    return b"".join([*body, checksum])


@dataclass(frozen=True, eq=False)
class EncodedShard:
    """The bytes of a shard object, and its entries of the chunk table.

    `parts` are consecutive buffers; those of an uncompressed field share the memory of its column. `entries` is uint32
    (chunks_per_shard, 2): for each inner chunk its encoded size with the checksum (0 if absent), and its CRC-32C.
    """

    parts: Sequence[Buffer]
    entries: NDArray[np.uint32]

    @property
    def size(self) -> int:
        """The size of the object, in bytes."""
        return body_bytes(self.parts)


def encode_shard(
    layout: FieldLayout,
    column: Column,
    *,
    old: Buffer = b"",
    entries: NDArray[np.uint32] | None = None,
    first: int = 0,
    skips: Mapping[int, int] | None = None,
) -> EncodedShard:
    """Encode up to `layout.shard` samples. Every chunk that holds a sample is stored, even one of fill values only.

    If `column` is a list, its items are replaced by empty ones as they are encoded, to free their memory. To extend a
    shard, pass its bytes before the new chunks (`old`), its `entries` of the chunk table, the number of the `first` new
    chunk, and `skips` as for `encode_index`.
    """
    entries = np.zeros((layout.chunks_per_shard, 2), np.uint32) if entries is None else entries.copy()
    parts: list[Buffer] = [old] if old else []
    for chunk, start in enumerate(range(0, len(column), layout.chunk), first):
        piece = column[start : start + layout.chunk]
        body, checksum = encode_buffers(layout, piece)
        parts += [*body, checksum]
        entries[chunk] = body_bytes(body) + CRC_BYTES, int.from_bytes(checksum, "little")
        if isinstance(column, list):
            column[start : start + layout.chunk] = [b""] * len(piece)
    return EncodedShard([*parts, encode_index(entries, skips)], entries)


def encode_index(entries: NDArray[np.uint32], skips: Mapping[int, int] | None = None) -> bytes:
    """Return the index of a shard with these entries of the chunk table, checksum included.

    `skips` maps a chunk to the number of stale bytes of earlier versions before it.
    """
    sizes = entries[:, 0].astype(np.uint64)
    index = np.full((len(entries), 2), ABSENT, "<u8")
    present = sizes > 0
    index[present, 0] = (np.cumsum(sizes) - sizes)[present]
    index[present, 1] = sizes[present]
    for chunk, size in (skips or {}).items():
        index[chunk:, 0][present[chunk:]] += np.uint64(size)
    return with_checksum(index.tobytes())


def index_size(chunks: int, checksums: int = 1) -> int:
    """Return the size in bytes of the index of a shard of `chunks` inner chunks."""
    return 16 * chunks + CRC_BYTES * checksums


def parse_index(data: Buffer, chunks: int, dtype: str = "<u8", checksums: int = 1) -> NDArray[np.uint64]:
    """Return the index of a shard: uint64 (chunks, 2), offset and nbytes, both 2^64-1 for absent chunks.

    Other writers may choose the byte order and have no checksum. Raises `CorruptError` for another size, and if the
    checksum does not match.
    """
    index, size = memoryview(data), index_size(chunks, checksums)
    if len(index) != size:
        raise CorruptError(f"the index of the shard has {len(index)} bytes, expected {size}")
    for _ in range(checksums):
        index, stored = index[:-CRC_BYTES], index[-CRC_BYTES:]
        if crc32c.crc32c(index) != int.from_bytes(stored, "little"):
            raise CorruptError("the crc32c checksum of the shard's index does not match")
    return np.frombuffer(index, dtype).reshape(chunks, 2).astype(np.uint64)


def decode_fixed(layout: FieldLayout, data: memoryview, out: NDArray[Any]) -> None:
    """Decode the chunk's body `data`, without its checksum, into `out`: C-contiguous (rows, *shape).

    The chunk holds `layout.chunk` rows; those beyond the end of `out` are dropped. Raises `CorruptError` unless the
    body holds exactly one chunk.
    """
    expected = layout.chunk * layout.field.item_bytes
    flat = out.reshape(-1).view(np.uint8)
    if layout.codec == "none":
        if data.nbytes != expected:
            raise CorruptError(f"the chunk has {data.nbytes} bytes, expected {expected}")
        np.copyto(flat, np.frombuffer(data, np.uint8, flat.size))
        return
    whole = flat if flat.size == expected else np.empty(expected, np.uint8)
    decompress_exactly(layout.codec, data, whole)
    if whole is not flat:
        np.copyto(flat, whole[: flat.size])


def decode_items(layout: FieldLayout, data: memoryview, allocate: Allocate = empty_buffer) -> Items:
    """Return the `layout.chunk` items of the chunk's body `data`, without its checksum; items are not copied.

    The items of a field of fixed shape are its samples. A compressed body is decompressed into `allocate(size)`. Raises
    `CorruptError` if lengths and bytes do not agree, or if the frame's header claims more bytes than the whole field
    has.
    """
    least, most = 4, min(MAX_CHUNK_BYTES, layout.nbytes + 4 * layout.chunk + 4)
    if layout.field.fixed:
        least = most = layout.chunk * layout.field.item_bytes
    if layout.codec != "none":
        frame = data
        data = allocate(check_frame(layout.codec, frame, least, most))
        _decompress(layout.codec, frame, data)
    if not layout.field.fixed:
        return parse_items(data, layout.chunk)
    if data.nbytes != most:
        raise CorruptError(f"the chunk has {data.nbytes} bytes, expected {most}")
    starts = np.arange(layout.chunk) * layout.field.item_bytes
    return Items(data, starts, starts + layout.field.item_bytes)


def parse_items(data: memoryview, count: int) -> Items:
    """Parse `vlen-bytes` of exactly `count` items.

    Raises `CorruptError` if the lengths do not add up to the payload, or for a payload over `MAX_CHUNK_BYTES`, whose
    offsets would not fit 32 bits.
    """
    size = data.nbytes
    if size > MAX_CHUNK_BYTES:
        raise CorruptError(f"the chunk has {size} decoded bytes, the format allows at most {MAX_CHUNK_BYTES}")
    edges = parse_lengths(data, count)
    return Items(data, edges[:-1] + 4, edges[1:])


def measure_codec(choice: CodecChoice, field: Field, column: Column) -> tuple[str, float]:
    """Return the codec for a field and the mean stored bytes per sample, measured on the first samples `column`.

    "auto" compresses up to 16 pieces of about 1 MiB and minimises `stored / decoded + DECODE_COST`, the time to
    transfer a GB plus the time to decode it. So lz4 must save 10 %, and zstd another 20 % over lz4. Speeds are
    constants and not measured, because a resumed conversion must make the same choice. Videos are never compressed.
    """
    if field.is_video:  # so that a part of a video can be read
        return "none", column_size(column) / max(1, len(column))
    rows, pieces = _probe_pieces(field, column)
    total = sum(len(piece) for piece in pieces)
    codecs = DECODE_COST if choice == "auto" else (choice,)
    if total == 0:
        return next(iter(codecs)), float(field.item_bytes)
    stored = {codec: sum(len(compress(codec, piece, typesize(field))) for piece in pieces) for codec in codecs}
    best = min(codecs, key=lambda codec: stored[codec] / total + DECODE_COST[codec])
    return best, stored[best] / rows


def compress(codec: str, payload: Buffer, itemsize: int) -> Buffer:
    """Return `payload` compressed into one frame of the codec; "none" returns the payload itself.

    LZ4 shuffles the bytes of numbers that have more than one.
    """
    if codec == "none":
        return payload
    if codec == "zstd":
        return bytes(zstd.compress(payload, ZSTD_LEVEL))
    _use_one_blosc_thread()
    shuffle = blosc.SHUFFLE if itemsize > 1 else blosc.NOSHUFFLE
    return bytes(blosc.compress(payload, b"lz4", BLOSC_LEVEL, shuffle, 0, typesize=itemsize))


def scratch_bytes(layout: FieldLayout, chunk_bytes: int) -> int:
    """Return about what a thread that decompresses chunks holds: buffers of blosc, and what malloc keeps of them.

    Measured were 8.3 of its blocks, of 1 MiB at most.
    """
    block = min(MIB, BLOSC_BLOCK * typesize(layout.field), chunk_bytes)
    return 8 * block if layout.codec == "lz4" else 0


def _use_one_blosc_thread() -> None:
    # A setting of numcodecs for the whole process. With several threads, blosc takes a lock that all callers share, and
    # writes blocks in the order in which they finish, so the same data would give different bytes.
    blosc.use_threads = False


def _decompress(codec: str, data: memoryview, out: NDArray[np.uint8] | memoryview) -> None:
    _use_one_blosc_thread()
    try:
        (zstd if codec == "zstd" else blosc).decompress(data, out)
    except (RuntimeError, ValueError) as error:
        raise CorruptError(f"the chunk's {codec} frame does not decompress ({error})") from error


def decompress_exactly(codec: str, data: memoryview, out: NDArray[np.uint8]) -> None:
    """Decompress a frame that must hold exactly the bytes of `out`. Raises `CorruptError`."""
    check_frame(codec, data, out.size, out.size)
    _decompress(codec, data, out)


def check_frame(codec: str, data: memoryview, least: int, most: int) -> int:
    """Return the decoded size in the frame's header. Raises `CorruptError` unless it is in [least, most]."""
    size = _zstd_size(data) if codec == "zstd" else _blosc_size(data)
    if not least <= size <= most:
        expected = str(most) if least == most else f"{least} to {most}"
        raise CorruptError(f"the chunk's {codec} frame of {data.nbytes} bytes claims {size}, expected {expected}")
    return size


def _blosc_size(data: memoryview) -> int:
    # blosc trusts the `cbytes` in the header, so a wrong value would make it read beyond the buffer
    if data.nbytes < 16:
        return -1
    nbytes, blocksize, cbytes = struct.unpack_from("<III", data, 4)
    return nbytes if cbytes == data.nbytes and blocksize <= max(nbytes, 1) else -1


def has_zstd_size(data: memoryview) -> bool:
    """Return whether a zstd frame states its decoded size; frames that streamloader does not write may not."""
    return data.nbytes < 6 or bool(data[4] >> 6 or data[4] >> 5 & 1)


def _zstd_size(data: memoryview) -> int:
    # RFC 8878, 3.1.1: magic, descriptor, [window], [dictionary], content size. Frames without a size are refused,
    # because numcodecs would then grow its output without a limit.
    if data.nbytes < 6 or bytes(data[:4]) != b"\x28\xb5\x2f\xfd":
        return -1
    descriptor = data[4]
    single = descriptor >> 5 & 1
    width = (single, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    if width == 0 or data.nbytes < at + width:
        return -1
    return int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0)


def typesize(field: Field) -> int:
    """Return the bytes of one number of the field, or 1 for bytes and text. LZ4 shuffles by this size.

    The u32 lengths between ragged items keep numbers of up to 4 bytes aligned, and larger ones within an item.
    """
    return np.dtype(field.dtype).itemsize if field.fixed or field.kind == "ragged" else 1


def _payload(layout: FieldLayout, column: Column) -> Sequence[Buffer]:
    missing = layout.chunk - len(column)
    if not layout.field.fixed:
        return pack_items([*column, *[b""] * missing])
    flat: NDArray[np.uint8] = np.ascontiguousarray(column, layout.field.stored_dtype).reshape(-1).view(np.uint8)
    if missing:
        flat = np.concatenate([flat, np.zeros(missing * layout.field.item_bytes, np.uint8)])
    return [flat.data]


def pack_items(items: Sequence[bytes]) -> list[bytes]:
    """Return `vlen-bytes` of the items as consecutive buffers; items of `JOINED_BYTES` or more are not copied.

    Raises `FieldError` for an item of 2 GiB or more.
    """
    pieces: list[bytes] = []
    parts, size = [len(items).to_bytes(4, "little")], 0
    for item in items:
        if len(item) > MAX_CHUNK_BYTES:
            raise FieldError(f"an item has {len(item)} bytes", f"the format allows at most {MAX_CHUNK_BYTES}")
        parts.append(len(item).to_bytes(4, "little"))
        size += len(item)
        if size < JOINED_BYTES:
            parts.append(item)
            continue
        pieces += [b"".join(parts), item] if len(item) >= JOINED_BYTES else [b"".join([*parts, item])]
        parts, size = [], 0
    return [*pieces, b"".join(parts)] if parts else pieces


def _probe_pieces(field: Field, column: Column) -> tuple[int, list[bytes]]:
    """Return the number of samples in up to 16 pieces of about 1 MiB, spread evenly over the column, and the pieces."""
    if len(column) == 0:
        return 0, []
    mean = field.item_bytes if field.fixed else column_size(column) / len(column) + 4
    rows = max(1, int(PROBE_PIECE_BYTES // mean))
    starts = range(0, len(column), rows)
    step = -(-len(starts) // PROBE_PIECES)
    pieces = [column[start : start + rows] for start in starts[::step]]
    count = sum(len(piece) for piece in pieces)
    if field.fixed:
        return count, [np.asarray(piece).tobytes() for piece in pieces]
    return count, [b"".join(pack_items(list(piece))) for piece in pieces]
