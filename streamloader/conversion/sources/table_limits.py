"""Limits what pyarrow decodes, by the headers in the bytes that it reads.

pyarrow decompresses a page of Parquet, or a buffer of Arrow IPC, to the size that its header declares, and repeats runs
of equal values and values of a dictionary without a limit: a few bytes can become any number of gigabytes. The files
here are given to pyarrow. They pass the bytes on once the headers in them have been checked.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import check_decoded, damaged
from streamloader.conversion.sources.ranged_io import RangeFile
from streamloader.errors import SourceError
from streamloader.storage import ObjectInfo, Store

Fields = dict[tuple[int, int], Any]
Data = bytes | memoryview
Observe = Callable[[int, bytes], None]  # takes the first byte and the bytes of each read, in order

VALUE_BYTES = 8  # of a value in memory, at most; texts and bytes count by the size of their page
_MAX_HEADER = 16 << 20  # bytes of the header of a page, as in pyarrow


class ObservedFile(io.BufferedReader):
    """An object as a file that pyarrow reads; `observe`, if set, may raise an error before pyarrow has the bytes."""

    def __init__(self, store: Store, info: ObjectInfo, buffer: int, observe: Observe | None = None) -> None:
        super().__init__(RangeFile(store, info), buffer)
        self.observe = observe
        self.refused: SourceError | None = None  # the error of `observe`, of which pyarrow may keep the text only

    def read(self, size: int | None = -1) -> bytes:
        """Return the next `size` bytes, fewer at the end."""
        at = self.tell()
        data = super().read(size)
        try:
            if self.observe is not None:
                self.observe(at, data)
        except SourceError as error:
            self.refused = error
            raise
        return data


class TooManyRowsError(Exception):
    """The rows that are decoded at once may take too much memory: `rows` of them do not."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


@dataclass
class _Chunk:
    """A column of a row group: where its next page begins, the bytes of its header so far, and its values so far."""

    next: int
    head: bytes = b""
    values: int = 0


class Pages:
    """Checks the pages of a Parquet file.

    pyarrow reads each column of a row group from its first page to its last one. So a read that does not begin where
    another one ended begins with the header of a page, which tells where the next one is.
    """

    def __init__(self, where: str, limit: int) -> None:
        self.where, self.limit = where, limit
        self._rows = 0
        self._chunks: dict[int, _Chunk] = {}  # by the end of the last read

    def begin(self, rows: int) -> None:
        """Begin a row group, of which so many rows are decoded at once."""
        self._rows = rows
        self._chunks.clear()

    def decoded(self) -> None:
        """Count the values of the next rows anew."""
        for chunk in self._chunks.values():
            chunk.values = 0

    def observe(self, at: int, data: bytes) -> None:
        """Check the headers in the bytes of a read.

        Raises `SourceError` for a page that decodes to more than the limit, and `TooManyRowsError`.
        """
        stop = at + len(data)
        chunk = self._chunks.pop(at, None) or _Chunk(at)
        while chunk.next < stop:
            held = len(chunk.head)
            head, first = (chunk.head + data, 0) if held else (data, chunk.next - at)
            try:
                fields, end = read_struct(head, first)
            except IndexError:
                chunk.head = bytes(head[first:])
                if len(chunk.head) > _MAX_HEADER:
                    raise damaged(f"{self.where} has no page at byte {chunk.next}") from None
                break
            except ValueError as error:
                raise damaged(f"{self.where} has no page at byte {chunk.next}: {error}") from None
            chunk.head = b""
            self._check(chunk, fields)
            chunk.next += end - first + fields[3, _I32]
        self._chunks[stop] = chunk

    def _check(self, chunk: _Chunk, fields: Fields) -> None:
        size, compressed = fields.get((2, _I32), -1), fields.get((3, _I32), -1)
        if min(size, compressed) < 0:
            raise damaged(f"{self.where} has no page at byte {chunk.next}")
        check_decoded(f"{self.where} has a page of", size, self.limit)
        # a dictionary: each row may have its largest value
        if (7, _STRUCT) in fields and self._rows * size > self.limit:
            raise TooManyRowsError(self.limit // size)
        headers = [fields.get((key, _STRUCT), {}) for key in (5, 8)]  # of the two versions of data pages
        chunk.values += max(header.get((1, _I32), 0) for header in headers)
        check_decoded(f"{self.where} has, for few rows, values of", chunk.values * VALUE_BYTES, self.limit)


_I32, _STRUCT = 5, 12
_DEPTH = 8  # of structs and lists within each other
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8, 13: 16}  # bytes of the types of Thrift's compact protocol that have no varint


def read_struct(data: bytes, at: int, depth: int = 0) -> tuple[Fields, int]:
    """Return the 32-bit integers and the structs in a struct of Thrift's compact protocol, and the byte after it.

    They are by number and type. As in pyarrow, other types are skipped, and the last of several fields with one number
    counts. Raises IndexError if the data end within the struct, ValueError for types that no header of a page has.
    """
    fields: Fields = {}
    key = 0
    while kind := data[at]:
        at += 1
        delta, kind = kind >> 4, kind & 15
        if delta:
            key += delta
        else:
            key, at = _integer(data, at, 16)
        if kind == _STRUCT and depth < _DEPTH:
            fields[key, kind], at = read_struct(data, at, depth + 1)
        elif kind == _I32:
            fields[key, kind], at = _integer(data, at, 32)
        else:
            at = _skip(data, at, kind, depth)
    return fields, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift > 70:
            return value, at


def _integer(data: bytes, at: int, bits: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    value &= (1 << bits) - 1
    return (value >> 1) ^ -(value & 1), at


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the end of a value that is skipped. Raises as `read_struct`."""
    if kind in _FIXED:
        return at + _FIXED[kind]
    if kind in (4, _I32, 6):
        return _varint(data, at)[1]
    if kind == 8:
        size, at = _varint(data, at)
        return at + size
    if kind in (9, 10) and depth < _DEPTH:
        head, at = data[at], at + 1
        count, inner = head >> 4, head & 15
        if count == 15:
            count, at = _varint(data, at)
        if inner in (1, 2, 3):
            return at + count
        for _ in range(count):
            if at >= len(data):
                raise IndexError
            at = _skip(data, at, inner, depth + 1)
        return at
    if kind == _STRUCT and depth < _DEPTH:
        return read_struct(data, at, depth + 1)[1]
    raise ValueError(f"a value of type {kind}")


def compressed_buffers(data: Data) -> NDArray[np.int64]:
    """Return where the compressed buffers of an Arrow IPC message begin, counted from the start of `data`.

    These are its metadata, with or without the bytes before them, or the message. Empty for any other data.
    """
    prefixes = (8,) if data[:4] == b"\xff\xff\xff\xff" and len(data) > 8 else (0, 4)  # 4 before Arrow 0.15
    for prefix in prefixes:
        body = prefix + int.from_bytes(data[prefix - 4 : prefix], "little") if prefix else len(data)
        starts = _offsets(memoryview(data)[prefix:])
        if len(starts):
            return starts + body
    return np.zeros(0, np.int64)


def _offsets(flat: memoryview) -> NDArray[np.int64]:
    """Return the offsets of the compressed buffers in the body of a message from its metadata."""
    try:
        message = number_at(flat, 0, "<I")
        kind, header = slot_at(flat, message, 6, "<B")[1], sum(slot_at(flat, message, 8, "<I"))
        if kind == DICTIONARY:
            header = sum(slot_at(flat, header, 6, "<I"))
        elif kind != BATCH:
            return np.zeros(0, np.int64)
        if not slot_at(flat, header, 10, "<I")[1]:  # no compression
            return np.zeros(0, np.int64)
        at = sum(slot_at(flat, header, 8, "<I"))
        count = number_at(flat, at, "<I") if at else 0
        found = np.frombuffer(flat, "<i8", 2 * count, at + 4).reshape(-1, 2)
    except (struct.error, ValueError):
        return np.zeros(0, np.int64)
    starts: NDArray[np.int64] = found[found[:, 1] > 0, 0]
    return starts


class Buffers:
    """Checks the compressed buffers of an Arrow IPC file or stream, each of which begins with its decoded size."""

    def __init__(self, where: str, limit: int) -> None:
        self.where, self.limit = where, limit
        self.begin()

    def begin(self) -> None:
        """Begin a record batch: all reads since then count together."""
        self._starts, self._claimed = np.zeros(0, np.int64), 0

    def observe(self, at: int, data: Data) -> None:
        """Check the buffers in the bytes of a read. Raises `SourceError` if those of a batch decode to too much.

        Each read may be metadata: which are, a damaged file does not tell.
        """
        self._starts = np.concatenate((self._starts, compressed_buffers(data) + at))
        for start in self._starts[(self._starts >= at) & (self._starts <= at + len(data) - 8)].tolist():
            self._claimed += max(0, number_at(data, start - at, "<q"))  # -1 for one that is not compressed
        check_decoded(f"{self.where} has a record batch of", self._claimed, self.limit)


SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # types of messages


def number_at(data: Data, at: int, layout: str = "<i") -> int:
    """Return a number in a flatbuffer. Raises `struct.error` and ValueError if it is not within the data."""
    if at < 0:  # struct would count it from the end
        raise ValueError(f"byte {at}")
    return int(struct.unpack_from(layout, data, at)[0])


def slot_at(data: Data, table: int, at: int, layout: str) -> tuple[int, int]:
    """Return the position and the value of the slot at byte `at` of a table's vtable; zeros for its default."""
    vtable = table - number_at(data, table)
    offset = number_at(data, vtable + at, "<H") if at < number_at(data, vtable, "<H") else 0
    return (table + offset, number_at(data, table + offset, layout)) if offset else (0, 0)
