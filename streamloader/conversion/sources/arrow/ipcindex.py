"""Where the messages of an Arrow IPC file or stream stand, and how many rows each has: from their headers alone.

A stream is a run of messages: four bytes FF, a length, that many bytes of metadata, then a body, whose length the
metadata tell. The metadata are a flatbuffer, of which two tables matter here: Message (version, type, header, length of
the body) and RecordBatch (length, ...). A file is a stream between its magic and a footer, which repeats what is here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SourceError

MAGIC = b"ARROW1"
_AFTER_MAGIC = 8
_FEATHER_1 = b"FEA1"
_CONTINUES = b"\xff\xff\xff\xff"
_METADATA_BYTES = 64 << 20  # more than any schema has: a length that lies must not fill the memory
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_AGAIN = "fetch or make it again"


@dataclass(frozen=True, eq=False)
class IpcIndex:
    """The messages of one file: `schema`, `dictionaries` and `batches` are their (start, stop) in bytes, in order, and
    `rows` counts those of each batch. `footer` tells a file from a stream.
    """

    schema: tuple[int, int]
    dictionaries: NDArray[np.int64]
    batches: NDArray[np.int64]
    rows: NDArray[np.int64]
    footer: bool


def index_messages(file: BinaryIO, size: int, where: str) -> IpcIndex:
    """Return the index of a file of `size` bytes; bodies are passed over.

    Raises `SourceError`, which names `where`, for what is no Arrow file or stream, and for one that ends too early.
    """
    head = file.read(len(MAGIC))
    if head.startswith(_FEATHER_1):
        raise SourceError(f"{where} is a Feather file of version 1", "write it again with pyarrow.feather, version 2")
    footer = head == MAGIC
    found: dict[int, list[tuple[int, int]]] = {_SCHEMA: [], _DICTIONARY: [], _BATCH: []}
    rows: list[int] = []
    for kind, start, stop, count in _messages(file, _AFTER_MAGIC if footer else 0, size, where):
        if kind not in found or (kind == _SCHEMA) != (not found[_SCHEMA]):
            raise SourceError(f"{where} holds a message of type {kind} at byte {start}, which no table has", _AGAIN)
        found[kind].append((start, stop))
        if kind == _BATCH:
            rows.append(count)
    if not found[_SCHEMA]:
        raise SourceError(f"{where} has no schema", _AGAIN)
    dictionaries, batches = (np.array(found[kind], np.int64).reshape(-1, 2) for kind in (_DICTIONARY, _BATCH))
    return IpcIndex(found[_SCHEMA][0], dictionaries, batches, np.array(rows, np.int64), footer)


def _messages(file: BinaryIO, start: int, size: int, where: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield type, start, stop and number of rows of each message, up to the mark of the end."""
    while True:
        file.seek(start)
        prefix = file.read(8)
        continues = prefix[:4] == _CONTINUES  # before version 0.15 of the library there was only the length
        skipped, length = (8, prefix[4:8]) if continues else (4, prefix[:4])
        number = int.from_bytes(length, "little", signed=True)
        if len(length) == 4 and number == 0:
            return
        if len(length) < 4 or start + skipped + number > size:
            remedy = f"{_AGAIN}; its writer must be closed"
            raise SourceError(f"{where} is truncated: it ends at byte {size}, in the middle of a table", remedy)
        if not 0 < number <= _METADATA_BYTES:
            raise SourceError(f"{where} is no Arrow file, or damaged, at byte {start}", _AGAIN)
        file.seek(start + skipped)
        try:
            kind, body, rows = _parse(file.read(number))
        except (struct.error, ValueError):
            raise SourceError(f"{where} is no Arrow file, or damaged, at byte {start}", _AGAIN) from None
        stop = start + skipped + number + body
        if stop > size:
            problem = f"{where} is truncated: it has {size} bytes, the message at byte {start} goes on to {stop}"
            raise SourceError(problem, _AGAIN)
        yield kind, start, stop, rows
        start = stop


def _parse(data: bytes) -> tuple[int, int, int]:
    """Return type, length of the body and number of rows that a message's metadata tell; raises ValueError."""
    message = _number(data, 0, "<I")
    kind = _slot(data, message, 1)
    body = _slot(data, message, 3)
    header = _slot(data, message, 2)
    sizes = (_number(data, body, "<q") if body else 0, 0)
    number = _number(data, kind, "<B") if kind else 0
    if number == _BATCH and header:
        length = _slot(data, header + _number(data, header, "<I"), 0)
        sizes = (sizes[0], _number(data, length, "<q") if length else 0)
    if min(sizes) < 0:
        raise ValueError("a negative length")
    return number, *sizes


def _slot(data: bytes, table: int, number: int) -> int:
    """Return where the value of a flatbuffer table's slot stands, or 0 where it has its default."""
    layout = table - _number(data, table, "<i")
    at = 4 + 2 * number
    offset = _number(data, layout + at, "<H") if at < _number(data, layout, "<H") else 0
    return table + offset if offset else 0


def _number(data: bytes, at: int, form: str) -> int:
    if at < 0:  # struct would count it from the end
        raise ValueError(f"byte {at}")
    found: int = struct.unpack_from(form, data, at)[0]
    return found
