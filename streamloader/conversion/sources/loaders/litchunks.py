"""The chunks of a LitData dataset: plain, compressed as a whole or in frames, or a table of Arrow at their end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import REQUEST_BYTES, Range, read_range, read_ranges
from streamloader.conversion.sources.loaders.itemfile import ItemFile, read_items, table_bytes
from streamloader.conversion.sources.loaders.unpack import MAX_UNPACKED, unpack
from streamloader.conversion.sources.needs import need
from streamloader.conversion.sources.spans import read_each
from streamloader.conversion.sources.streams import Content
from streamloader.errors import SourceError
from streamloader.storage.protocol import Store

_FRAMED = b"LDFZ01\0\0"
_FRAMED_HEAD = 24  # magic, u16 version, u16 flags, u32 items, u32 items of a frame, u32 frames
_FRAME = np.dtype([("first", "<u4"), ("count", "<u4"), ("start", "<u8"), ("packed", "<u4"), ("unpacked", "<u4")])
_ARROW = b"LDARW01\0"
_ARROW_TAIL = 12  # u32 bytes of the Arrow file before it, magic
_AGAIN = "fetch or make it again"


def read_chunk(store: Store, file: ItemFile, rows: NDArray[np.int64]) -> Iterator[Any]:
    """Yield the items of these rows, which ascend: bytes, or a mapping of values where the chunk holds Arrow.

    Raises `SourceError` that names the chunk, `UsageError` where a package is not installed.
    """
    if file.packing:
        yield from read_items(store, file, rows)
        return
    head = bytes(read_range(store, Range(file.info.path, 0, min(file.info.size, _FRAMED_HEAD))))
    if head.startswith(_FRAMED):
        yield from _framed_items(store, file, rows, head)
    elif _is_arrow(head, file.count):
        yield from _arrow_rows(store, file, rows)
    else:
        yield from read_items(store, file, rows)


def _is_arrow(head: bytes, count: int) -> bool:
    """Return whether the first item is empty: the smallest that is none has four bytes a leaf, or a token."""
    return count > 0 and len(head) >= 12 and head[4:8] == head[8:12] == table_bytes(count).to_bytes(4, "little")


@dataclass(frozen=True, eq=False)
class _Frames:
    """The frames of a chunk: where each lies and how long it is, its first item (and the number of items, at the end),
    and the offsets of the items in all frames unpacked.
    """

    starts: NDArray[np.int64]
    packed: NDArray[np.int64]
    unpacked: NDArray[np.int64]
    firsts: NDArray[np.int64]
    offsets: NDArray[np.int64]


def _read_frames(store: Store, file: ItemFile, head: bytes, where: str) -> _Frames:
    """Return the frames of a chunk: behind its head, u32 offsets[items + 1], then the frames' table."""
    version, count = int.from_bytes(head[8:10], "little"), int.from_bytes(head[12:16], "little")
    frames = int.from_bytes(head[20:24], "little")
    if len(head) < _FRAMED_HEAD or version != 1 or count != file.count:
        expected = f"expected are version 1 and {file.count} samples"
        raise SourceError(f"{where} is of version {version} with {count} samples, {expected}", _AGAIN)
    middle = 4 * (count + 1)
    end = _FRAMED_HEAD + middle + _FRAME.itemsize * frames
    if 0 < frames <= count and end <= file.info.size:
        table = read_range(store, Range(file.info.path, _FRAMED_HEAD, end))
        offsets = np.frombuffer(table, "<u4", count + 1).astype(np.int64)
        found = np.frombuffer(table, _FRAME, frames, offset=middle)
        if (found["start"] <= file.info.size).all():
            starts, packed, unpacked = (found[name].astype(np.int64) for name in ("start", "packed", "unpacked"))
            firsts = np.append(found["first"].astype(np.int64), count)
            after = np.append(end, starts + packed)  # each frame begins behind the one before
            fits = (np.append(starts, file.info.size) >= after).all() and (np.diff(offsets) >= 0).all()
            whole = firsts[0] == 0 and (np.diff(firsts) > 0).all() and (np.diff(firsts) == found["count"]).all()
            if fits and whole and (np.diff(offsets[firsts]) == unpacked).all():
                return _Frames(starts, packed, unpacked, firsts, offsets)
    raise SourceError(f"{where} is damaged: its table of frames does not fit its samples and bytes", _AGAIN)


def _framed_items(store: Store, file: ItemFile, rows: NDArray[np.int64], head: bytes) -> Iterator[memoryview]:
    """Yield items of a chunk of Zstandard frames; each frame that is needed is unpacked once."""
    where = f"{store.url}/{file.info.path}"
    frames = _read_frames(store, file, head, where)
    used, number = np.unique(np.searchsorted(frames.firsts, rows, side="right") - 1, return_inverse=True)
    content = Content(store, file.info, "", file.info.size)
    spans = read_each(content, frames.starts[used], (frames.starts + frames.packed)[used])
    for i, data in enumerate(spans):
        frame = int(used[i])
        size = int(frames.unpacked[frame])
        items = unpack("zstd", [data], size, f"{where}: its frame {frame}")
        if len(items) < size:
            raise SourceError(f"{where} is damaged: its frame {frame} has {len(items)} bytes, not {size}", _AGAIN)
        offsets = frames.offsets - frames.offsets[frames.firsts[frame]]
        for row in rows[number == i].tolist():
            yield items[int(offsets[row]) : int(offsets[row + 1])]


def _arrow_rows(store: Store, file: ItemFile, rows: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    """Yield rows of the Arrow file that stands at the end of a chunk; it is read whole."""
    where, size = f"{store.url}/{file.info.path}", file.info.size
    tail = bytes(read_range(store, Range(file.info.path, max(0, size - _ARROW_TAIL), size)))
    stop = size - _ARROW_TAIL
    start = stop - int.from_bytes(tail[:4], "little")
    if tail[4:] != _ARROW or start < table_bytes(file.count):
        raise SourceError(f"{where} holds empty samples, and no rows of Arrow at its end", _AGAIN)
    if stop - start > MAX_UNPACKED:
        raise SourceError(f"{where} holds {stop - start} bytes of Arrow, at most {MAX_UNPACKED} are read", _AGAIN)
    arrow = need("pyarrow", "arrow")
    bounds = [*range(start, stop, REQUEST_BYTES), stop]
    pieces = [Range(file.info.path, bounds[i], bounds[i + 1]) for i in range(len(bounds) - 1)]
    data = b"".join(read_ranges(store, pieces))
    try:
        reader = (arrow.ipc.open_file if data[:6] == b"ARROW1" else arrow.ipc.open_stream)(arrow.py_buffer(data))
        table = reader.read_all()
        table.validate(full=True)
        if table.num_rows != file.count:
            raise SourceError(f"{where} holds {table.num_rows} rows, its index says {file.count} samples", _AGAIN)
        batches = table.take(rows).to_batches(max_chunksize=1024)
        if sum(map(len, batches)) != len(rows):
            raise SourceError(f"{where} holds rows of Arrow without columns", _AGAIN)
        for batch in batches:
            yield from batch.to_pylist()
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise SourceError(f"{where} is damaged: {error}", _AGAIN) from error
