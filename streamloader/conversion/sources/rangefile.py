"""An object of a store as a file: for libraries that want one. Every read is a request, so give it a buffer."""

from __future__ import annotations

import io
from typing import Any, BinaryIO, cast

from streamloader.conversion.sources.base import Range, read_range
from streamloader.storage.protocol import ObjectInfo, Store

BUFFER_BYTES = 1 << 20


def open_file(store: Store, info: ObjectInfo, buffer: int = BUFFER_BYTES) -> BinaryIO:
    """Return the object as a buffered, seekable file. Its reads raise `SourceChangedError` and `StorageError`."""
    return cast(BinaryIO, io.BufferedReader(RangeFile(store, info), buffer))


class RangeFile(io.RawIOBase):
    """One object as a seekable, unbuffered file. A read fills what was asked for, but at the end."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self._store, self._info, self._at = store, info, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, from the start, here, or the end; return its number from the start."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._info.size}[whence]
        if origin + offset < 0:  # what zipfile tries on a file shorter than its end record
            raise OSError(f"byte {origin + offset}")
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        """Return the number of the byte that is read next."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; return how many bytes were left to do so."""
        stop = min(self._at + len(buffer), self._info.size)
        data = read_range(self._store, Range(self._info.path, self._at, max(stop, self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
