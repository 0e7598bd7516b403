"""What is compressed as a whole: unpacked into memory, up to a bound that is known before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamloader.conversion.sources.base import REQUEST_BYTES, Range, read_range
from streamloader.conversion.sources.packing import unpacked
from streamloader.errors import SourceError
from streamloader.storage.protocol import ObjectInfo, Store

MAX_UNPACKED = 1 << 30  # no shard of a format that we unpack whole is meant to be this large


def unpack(packing: str, pieces: Iterable[memoryview], limit: int, where: str) -> memoryview:
    """Return the plain bytes of what is compressed; memory grows with what is there, to some MiB beyond `limit`.

    Raises `SourceError`, which names `where`, for damaged or truncated data and for more than `limit` bytes;
    `UsageError` where the package for zstd is missing.
    """
    data = bytearray()
    for block in unpacked(packing, pieces, where):
        data += block
        if len(data) > limit:
            raise SourceError(f"{where} unpacks to more than {limit} bytes", "it is damaged: fetch or make it again")
    return memoryview(data)


def file_pieces(store: Store, info: ObjectInfo) -> Iterator[memoryview]:
    """Yield a whole file, request by request."""
    for start in range(0, info.size, REQUEST_BYTES):
        yield read_range(store, Range(info.path, start, min(start + REQUEST_BYTES, info.size)))
