"""Where the members of a tar lie, from its headers alone: nothing is extracted, links and paths are only text."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from streamloader.conversion.sources.base import Range, read_range
from streamloader.conversion.sources.packing import MAGIC_BYTES, packing_of
from streamloader.conversion.sources.streams import Content, Span, Stream, read_spans
from streamloader.errors import SourceError
from streamloader.storage.protocol import ObjectInfo, Store

_BLOCK = tarfile.BLOCKSIZE
_MAX_NAME = 1 << 20  # a hostile header must not make us read gigabytes for a name
_NAMING = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE)
# links, folders and devices: whatever size their header states, no data follow
_WITHOUT_DATA = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
_NEAR = 512 << 10  # where headers are nearer than this, reading what lies between is cheaper than a request each
_WIDE, _NARROW = 4 << 20, 16 << 10


@dataclass(frozen=True)
class Member:
    """One regular file in a tar: its data are the bytes [start, stop) of the tar."""

    name: str
    start: int
    stop: int


class Walk(Protocol):
    """An ascending walk through the bytes of a tar: of a file as it is, or, by a `Stream`, of what it unpacks to."""

    @property
    def size(self) -> int:
        """The bytes that there are; -1 as long as that is not known."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), fewer at the end."""
        ...

    def finish(self) -> int:
        """Go to the end; return the bytes that there are."""
        ...


class _Headers:
    """The walk through a file as it is: its reads are wide while headers are near each other, else narrow."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self.store, self.info = store, info
        self.first, self.data = 0, memoryview(b"")
        self.walked = self.count = 0

    @property
    def size(self) -> int:
        """The file's size."""
        return self.info.size

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), fewer at the tar's end."""
        stop, size = min(stop, self.info.size), stop - start
        if stop <= start:
            return b""
        if not self.first <= start or stop > self.first + len(self.data):
            near = self.count and (start - self.walked) / self.count < _NEAR
            wanted = max(size, _WIDE if near else _NARROW)
            self.first, self.walked, self.count = start, start, 0
            self.data = read_range(self.store, Range(self.info.path, start, min(start + wanted, self.info.size)))
        self.count += 1
        return bytes(self.data[start - self.first : stop - self.first])

    def finish(self) -> int:
        """Return the file's size: what lies behind the tar is none of its business."""
        return self.info.size


def open_tar(store: Store, info: ObjectInfo) -> tuple[Content, Walk]:
    """Return what the file holds, and a walk through it; its first bytes say whether it is compressed."""
    headers = _Headers(store, info)
    packing = packing_of(headers.read(0, MAGIC_BYTES))
    content = Content(store, info, packing, -1 if packing else info.size)
    return content, Stream(content) if packing else headers


def members(walk: Walk, where: str) -> Iterator[Member]:
    """Yield the regular files of a tar in order; links, folders and devices are passed over.

    Raises `SourceError` that names the tar where it is truncated (also where its end marker is missing) or damaged.
    """
    offset = stop = 0
    name = renamed = ""
    while True:
        block = walk.read(offset, offset + _BLOCK)
        if 0 <= walk.size < stop:
            raise _truncated(where, f"its member {name} goes on to byte {stop}, the file ends at {walk.size}")
        header = _header(block, offset, where)
        if header is None:
            return
        name, start, stop = printable(header.name), offset + _BLOCK, offset + _BLOCK + header.size
        offset = start + -(-header.size // _BLOCK) * _BLOCK
        if header.type in _NAMING:
            renamed = _long_name(walk, header, start, where) or renamed
            continue
        if header.isreg():
            if header.type == tarfile.GNUTYPE_SPARSE:
                raise SourceError(f"{where} holds {name} as a sparse file", "make the tar without --sparse")
            yield Member(printable(renamed) if renamed else name, start, stop)
        renamed = ""


def _header(block: bytes, offset: int, where: str) -> tarfile.TarInfo | None:
    """Return the header, or None for the end marker."""
    if len(block) < _BLOCK:
        raise _truncated(where, f"it ends at byte {offset + len(block)} without the end marker of a tar")
    if not any(block):
        return None
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise SourceError(f"{where} is no tar, or damaged, at byte {offset} ({error})", "make it again") from None
    if header.size < 0:
        raise SourceError(
            f"{where} has a member of {header.size} bytes at byte {offset}", "it is damaged: make it again"
        )
    if header.type in _WITHOUT_DATA:
        header.size = 0
    return header


def _long_name(walk: Walk, header: tarfile.TarInfo, start: int, where: str) -> str:
    """Return the name that a header gives to the member after it, or nothing."""
    if header.size > _MAX_NAME:
        raise SourceError(f"{where} has a name of {header.size} bytes at byte {start}", "it is damaged: make it again")
    data = walk.read(start, start + header.size)
    return _pax_path(data, where) if header.type == tarfile.XHDTYPE else _text(data.rstrip(b"\0"))


def _pax_path(data: bytes, where: str) -> str:
    """Return the `path` of a pax header, or nothing. Records are `<length> <key>=<value>\\n`."""
    found, at = "", 0
    while at < len(data):
        space = data.find(b" ", at)
        digits = data[at:space]
        length = int(digits) if space > at and digits.isdigit() and len(digits) < 12 else 0
        record = data[space + 1 : at + length - 1]
        key, equals, value = record.partition(b"=")
        if not length or not equals or at + length > len(data):
            raise SourceError(f"{where} has a damaged pax header", "make the tar again")
        if key in (b"size", b"GNU.sparse.major"):
            raise SourceError(
                f"{where} holds a file of 8 GiB or more, or a sparse one", "make a tar with smaller, plain members"
            )
        found = _text(value) if key == b"path" else found
        at += length
    return found


def _truncated(where: str, how: str) -> SourceError:
    return SourceError(f"the tar {where} is truncated: {how}", "fetch or make it again")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def printable(name: str) -> str:
    """Return the name with bytes that are no UTF-8 replaced, so that it can be printed and stored."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def member_name(content: Content, start: int) -> str:
    """Return the name in the header before the member that starts at byte `start`, cut at 100 bytes: for messages."""
    (block,) = read_spans([Span(content, start - _BLOCK, start)])
    try:
        header = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return f"the member at byte {start}"
    return printable(header.name)
