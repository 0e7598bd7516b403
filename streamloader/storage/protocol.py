"""The seam between storage and everything to its right: objects by path, bytes by range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import crc32c
import numpy as np

from streamloader.storage.policy import Retrier

Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]  # several buffers are one object, end to end
Room = Callable[[int], memoryview]


@dataclass(frozen=True)
class ObjectInfo:
    """One stored object: `path` is relative to its store, `size` in bytes, `etag` empty where unknown."""

    path: str
    size: int
    etag: str = ""


class RangeReader(Protocol):
    """The data plane: blocking ranged reads, from any thread, without a retry of its own.

    `kind` names the client (`http`, `obstore` or `fsspec`) and `reason` says why it was chosen.
    """

    kind: str
    reason: str

    def below(self, path: str) -> RangeReader:
        """Return the reader of the folder `path`, over the same connections."""
        ...

    def read(self, path: str, start: int, stop: int, room: Room | None = None) -> memoryview:
        """Return bytes [start, stop) of the object; shorter where the object ends before `stop`.

        `room` gives writable memory of a size, for a plane that puts bytes where it is told; one whose client
        makes bodies of its own does not call it. Raises a `StorageError`: `NotFoundError`, `AccessError`,
        `EndpointError`, `ThrottledError`, or `TransientError` for what may pass.
        """
        ...


def room_for(size: int) -> memoryview:
    """Return writable memory of so many bytes, not cleared; none for a negative size."""
    return memoryview(np.empty(max(0, size), np.uint8))  # type: ignore[arg-type]


def buffers_of(body: Body) -> list[memoryview]:
    """Return the buffers of a body as bytes, without the empty ones."""
    parts = [body] if isinstance(body, Buffer) else body
    return [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]


def body_bytes(body: Body) -> int:
    """Return the size of a body."""
    return sum(part.nbytes for part in buffers_of(body))


def body_crc32c(body: Body) -> int:
    """Return the CRC-32C of a body."""
    crc = 0
    for part in buffers_of(body):
        crc = crc32c.crc32c(part, crc)
    return crc


class Store(Protocol):
    """The control plane: whole objects below one URL. Paths are relative, with `/`.

    A store is cheap, holds no connection until its first call, and pickles as its URL and options.
    Every failure is a `StorageError` that names the URL.
    """

    @property
    def url(self) -> str:
        """The URL that the paths are below, without a trailing slash and without credentials."""
        ...

    @property
    def retries(self) -> Retrier:
        """What sends this process's requests to the store, again where they fail; for those of `reader` too."""
        ...

    def child(self, path: str) -> Store:
        """Return the store below `path`."""
        ...

    def get(self, path: str) -> bytes:
        """Return the whole object. Raises `NotFoundError` where there is none."""
        ...

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        ...

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes."""
        ...

    def head(self, path: str) -> ObjectInfo | None:
        """Return the object's size and etag, or None where there is none."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder `prefix`, recursively, in no promised order."""
        ...

    def put(self, path: str, data: Body) -> ObjectInfo:
        """Write the object in one request where the store allows; it appears whole or not at all."""
        ...

    def create(self, path: str, data: Buffer) -> ObjectInfo:
        """Write the object unless there is one: then raise `ObjectExistsError`."""
        ...

    def replace(self, path: str, data: Buffer, before: Buffer) -> ObjectInfo:
        """Write the object if it still is `before`, or is `data` already: else raise `ObjectExistsError`."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects; those that are not there are passed over."""
        ...

    def remove_leftovers(self) -> int:
        """Remove what killed writers left below (unfinished uploads, temporary files); return how many.

        Only while nobody else writes here.
        """
        ...

    def reader(self) -> RangeReader:
        """Return this process's data plane, started at the first call."""
        ...
