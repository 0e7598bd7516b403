"""The bytes of objects: buffers, bodies of several buffers, their sizes and checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import crc32c
import numpy as np

Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]  # the content of an object; several buffers are concatenated
Allocate = Callable[[int], memoryview]  # returns writable memory of a size in bytes


def empty_buffer(size: int) -> memoryview:
    """Return `size` bytes of writable memory, uninitialized; no bytes for a negative size."""
    return memoryview(np.empty(max(0, size), np.uint8))  # type: ignore[arg-type]


def buffers_of(body: Body) -> list[memoryview]:
    """Return the buffers of a body that are not empty, as views of bytes."""
    parts = [body] if isinstance(body, Buffer) else body
    return [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]


def body_bytes(body: Body) -> int:
    """Return the size of a body in bytes."""
    return sum(part.nbytes for part in buffers_of(body))


def body_crc32c(body: Body) -> int:
    """Return the CRC-32C of a body."""
    crc = 0
    for part in buffers_of(body):
        crc = crc32c.crc32c(part, crc)
    return crc
