"""A file over ranges for libraries that jump about: blocks that were read are kept, and read ahead in a row."""

from __future__ import annotations

import gc
import io
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamloader.conversion.sources.base import READ_THREADS, REQUEST_BYTES, Range, read_ranges
from streamloader.storage.protocol import ObjectInfo, Store

BLOCK_BYTES = 1 << 20
BLOCKS = 3 * READ_THREADS  # kept: those that are read ahead, and room for a library's own tables


class BlockFile(io.RawIOBase):
    """One object as a seekable file in memory of at most 24 MiB.

    Small reads come from blocks of 1 MiB; where the block before is there too, eight are fetched at once. Large reads
    go past the blocks. Its reads raise `SourceChangedError` and `StorageError`.
    """

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self._store, self._info, self._at = store, info, 0
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()

    @property
    def name(self) -> str:
        """The URL, for messages."""
        return f"{self._store.url}/{self._info.path}"

    def warm(self) -> BlockFile:
        """Read the first block, and return the file."""
        if self._info.size:
            self._block(0)
        return self

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, from the start, here, or the end; return its number from the start."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._info.size}[whence]
        if origin + offset < 0:
            raise OSError(f"byte {origin + offset}")
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        """Return the number of the byte that is read next."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; return how many bytes were left to do so."""
        with _no_collection():
            return self._fill(buffer)

    def _fill(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._info.size)
        start = self._at
        if stop - start >= BLOCK_BYTES:
            ranges = [
                Range(self._info.path, at, min(at + REQUEST_BYTES, stop)) for at in range(start, stop, REQUEST_BYTES)
            ]
            for wanted, data in zip(ranges, read_ranges(self._store, ranges), strict=True):
                buffer[wanted.start - start : wanted.stop - start] = data
            self._at = stop
        while self._at < stop:
            first = self._at // BLOCK_BYTES * BLOCK_BYTES
            data = self._block(first // BLOCK_BYTES)[self._at - first : stop - first]
            buffer[self._at - start : self._at - start + len(data)] = data
            self._at += len(data)
        return max(0, stop - start)

    def _block(self, number: int) -> memoryview:
        if number not in self._blocks:
            ahead = READ_THREADS if number - 1 in self._blocks else 1
            last = -(-self._info.size // BLOCK_BYTES)
            numbers = [one for one in range(number, min(number + ahead, last)) if one not in self._blocks]
            for one, data in zip(numbers, read_ranges(self._store, [self._range(one) for one in numbers]), strict=True):
                self._blocks[one] = data
            while len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]

    def _range(self, number: int) -> Range:
        start = number * BLOCK_BYTES
        return Range(self._info.path, start, min(start + BLOCK_BYTES, self._info.size))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep other threads from collecting garbage: h5py calls us with its lock held, and takes it to free its objects.

    A thread of the request that we wait for would wait for us.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
