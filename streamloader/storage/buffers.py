"""The bytes of objects: buffers, bodies of several buffers, their sizes and checksums, and a cache with a limit."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from typing import Generic, NamedTuple, TypeVar

import crc32c
import numpy as np

K = TypeVar("K")
V = TypeVar("V")

Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]  # the content of an object; several buffers are concatenated
Allocate = Callable[[int], memoryview]  # returns writable memory of a size in bytes


def empty_buffer(size: int) -> memoryview:
    """Return `size` bytes of writable memory, uninitialized; no bytes for a negative size."""
    return memoryview(np.empty(max(0, size), np.uint8))  # type: ignore[arg-type]


class Receiver(NamedTuple):
    """What the response to a read needs of its caller: `allocate(size)` returns the memory for its bytes.

    `on_repeat()` is called when the request is sent again, because its response is late.
    """

    allocate: Allocate = empty_buffer
    on_repeat: Callable[[], object] = bool


RECEIVER = Receiver()
RESIDENT = -1.0  # the next use of what loaders hold in memory, and of tables: dropped after all other ranges


class Use(NamedTuple):
    """How a range that is read will be used again: what its cache needs to know of its reader.

    `next_use`: when it is read next, in epochs, such as 3.25 for a quarter of epoch 3; `inf` if that is unknown, and
    `RESIDENT`. `now`: the time of this read. `wait`: wait for another process that fetches the range; False for a
    request that is repeated because it is late. `fresh`: do not look into the cache, and replace what it has, since a
    body was damaged. `content`: identifies the bytes among those of the versions of a dataset; "" for the dataset's
    digest.
    """

    next_use: float = inf
    now: float = 0.0
    wait: bool = True
    fresh: bool = False
    content: str = ""


USE = Use()


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


class LRUCache(Generic[K, V]):
    """The most recently used values: up to `limit` bytes of them, but at least `least` values; thread-safe."""

    def __init__(self, limit: int, least: int = 1) -> None:
        self._limit, self._least, self._bytes = limit, least, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Return the value of a key, None if it is not cached."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def values(self) -> list[V]:
        """Return all values."""
        with self._lock:
            return [value for value, _ in self._values.values()]

    def add(self, key: K, value: V, size: int, *, replace: bool = False) -> V:
        """Cache a value of `size` bytes, unless the key has one and `replace` is False; return the value of the key."""
        with self._lock:
            if replace or key not in self._values:
                self._bytes += size - self._values.get(key, (value, 0))[1]
                self._values[key] = value, size
            self._values.move_to_end(key)
            while self._bytes > self._limit and len(self._values) > self._least:
                self._bytes -= self._values.popitem(last=False)[1][1]
            return self._values[key][0]
