"""Where the members of a tar lie, from its headers alone: nothing is unpacked, links and paths are only text."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from streamloader.conversion.sources.base import Range, read_range
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


class _Headers:
    """Reads of an ascending walk through one tar: wide while headers are near each other, else narrow."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self.store, self.info = store, info
        self.first, self.data = 0, memoryview(b"")
        self.walked = self.count = 0

    def read(self, start: int, size: int) -> bytes:
        """Return bytes [start, start + size), fewer at the tar's end."""
        stop = min(start + size, self.info.size)
        if stop <= start:
            return b""
        if not self.first <= start or stop > self.first + len(self.data):
            near = self.count and (start - self.walked) / self.count < _NEAR
            wanted = max(size, _WIDE if near else _NARROW)
            self.first, self.walked, self.count = start, start, 0
            self.data = read_range(self.store, Range(self.info.path, start, min(start + wanted, self.info.size)))
        self.count += 1
        return bytes(self.data[start - self.first : stop - self.first])


def members(store: Store, info: ObjectInfo) -> Iterator[Member]:
    """Yield the regular files of a tar in order; links, folders and devices are passed over.

    Raises `SourceError` that names the tar where it is truncated (also where its end marker is missing),
    damaged, or compressed.
    """
    where = f"{store.url}/{info.path}"
    headers = _Headers(store, info)
    offset, renamed = 0, ""
    while True:
        header = _header(headers.read(offset, _BLOCK), offset, where)
        if header is None:
            return
        start, stop = offset + _BLOCK, offset + _BLOCK + header.size
        offset = start + -(-header.size // _BLOCK) * _BLOCK
        if stop > info.size:
            raise _truncated(
                where, f"its member {printable(header.name)} goes on to byte {stop}, the file ends at {info.size}"
            )
        if header.type in _NAMING:
            renamed = _long_name(headers, header, start, where) or renamed
            continue
        if header.isreg():
            if header.type == tarfile.GNUTYPE_SPARSE:
                raise SourceError(
                    f"{where} holds {printable(header.name)} as a sparse file", "make the tar without --sparse"
                )
            yield Member(printable(renamed or header.name), start, stop)
        renamed = ""


def _header(block: bytes, offset: int, where: str) -> tarfile.TarInfo | None:
    """Return the header, or None for the end marker."""
    if offset == 0 and block[:2] == b"\x1f\x8b":
        raise SourceError(
            f"{where} is compressed, so its samples cannot be read on their own", "unpack it with gunzip first"
        )
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


def _long_name(headers: _Headers, header: tarfile.TarInfo, start: int, where: str) -> str:
    """Return the name that a header gives to the member after it, or nothing."""
    if header.size > _MAX_NAME:
        raise SourceError(f"{where} has a name of {header.size} bytes at byte {start}", "it is damaged: make it again")
    data = headers.read(start, header.size)
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


def member_name(store: Store, path: str, start: int) -> str:
    """Return the name in the header before the member that starts at byte `start`, cut at 100 bytes: for messages."""
    block = bytes(read_range(store, Range(path, start - _BLOCK, start)))
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return f"the member at byte {start}"
    return printable(header.name)
