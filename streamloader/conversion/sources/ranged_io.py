"""Reads byte ranges of files, plain or decompressed, as blocks, spans, rows or a file object.

A compressed file can only be read from its beginning. To avoid decompressing it again for each fragment, a process
keeps a few streams open at the position where a fragment ended, and a later fragment continues there.
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import damaged
from streamloader.errors import SourceChangedError
from streamloader.storage.buffers import empty_buffer
from streamloader.storage.objects import ObjectInfo, cut_runs
from streamloader.storage.optional import Lazy
from streamloader.storage.process import PerProcess, in_thread, result_of, run_all
from streamloader.storage.store import Store

BLOCK = 1 << 20  # bytes that are decompressed at once
MAGIC_BYTES = 16
CHANGED = "leave the source alone while it is converted, and start again with overwrite=True (--overwrite)"
_FEED = 64 << 10  # input bytes at a time: zlib returns a copy of unused input, so small pieces are copied less
_FEED_ZSTD = 512  # zstandard does not limit its output; 4 bytes can encode a block of 128 KiB, so this gives <= 16 MiB
_XZ_MEMORY = 256 << 20  # xz -9 needs 65 MiB, a header may request 4 GiB
_ZSTD_WINDOW = 128 << 20  # the default limit of the zstd tool

_MAGIC = (
    ("gzip", re.compile(rb"\x1f\x8b\x08")),
    ("bzip2", re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")),  # "BZh" alone may be text
    ("xz", re.compile(rb"\xfd7zXZ\0")),
    ("zstd", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")),  # the second is a skippable frame
)

zstandard: Any = Lazy("zstandard")
_DECOMPRESSORS: dict[str, tuple[Callable[[], Any], type[BaseException]]] = {  # the factory, and the error it raises
    "gzip": (partial(zlib.decompressobj, wbits=31), zlib.error),
    "bzip2": (bz2.BZ2Decompressor, OSError),
    "xz": (partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_XZ_MEMORY), lzma.LZMAError),
}


def compression_of(head: bytes) -> str:
    """Return the compression of a file, such as "gzip", from its first `MAGIC_BYTES`; "" if it is not compressed."""
    return next((name for name, magic in _MAGIC if magic.match(head)), "")


def decompressed(compression: str, pieces: Iterable[memoryview], where: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of all members of a file, in blocks of about 1 MiB and at most 18 MiB.

    Raises `SourceError`, with the position of the failure, for a truncated or damaged file; `UsageError` if zstandard
    is not installed.
    """
    block = bytearray()
    for data in _members(compression, pieces, where) if compression else _cut(pieces, BLOCK):
        block += data
        if len(block) >= BLOCK:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _cut(pieces: Iterable[memoryview], size: int) -> Iterator[bytes]:
    return (bytes(piece[at : at + size]) for piece in pieces for at in range(0, len(piece), size))


def _members(compression: str, pieces: Iterable[memoryview], where: str) -> Iterator[bytes]:
    decoder, bound = None, [BLOCK] if compression != "zstd" else []
    if bound:
        new, error_type = _DECOMPRESSORS[compression]
    else:
        new, error_type = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj, zstandard.ZstdError
    consumed = produced = members = 0
    for data in _cut(pieces, _FEED if bound else _FEED_ZSTD):
        consumed += len(data)
        remaining, needs_input = data, True
        while remaining or not needs_input:
            if decoder is None:
                remaining = remaining.lstrip(b"\0") if members else remaining  # zeros may pad a file to tape blocks
                if not remaining:
                    break
                decoder, members = new(), members + 1
            try:
                out = decoder.decompress(remaining, *bound)
            except error_type as error:
                problem = f"{where} is damaged, or not {compression} to its end, within its first {consumed} bytes"
                raise damaged(f"{problem}, {produced} unpacked: {error}") from error
            remaining = decoder.unused_data if decoder.eof else getattr(decoder, "unconsumed_tail", b"")
            needs_input = decoder.eof or getattr(decoder, "needs_input", not remaining)
            decoder = None if decoder.eof else decoder
            produced += len(out)
            if out:
                yield out
    if decoder is not None:
        problem = f"its {compression} data end early, after {consumed} bytes, {produced} unpacked"
        raise damaged(f"{where} is truncated: {problem}")


KEPT_STREAMS = 4  # each holds two requests and its decompressor's window


@dataclass(frozen=True)
class Content:
    """A file to read. `compression` is "" if it is not compressed; `size` is its decompressed size in bytes, -1 until
    it is known.
    """

    store: Store
    info: ObjectInfo
    compression: str = ""
    size: int = -1

    @property
    def where(self) -> str:
        """The file's URL, for messages."""
        return f"{self.store.url}/{self.info.path}"


# the starts and stops of decompressed byte ranges of a file; starts ascend, and may be equal
Spans = tuple[Content, NDArray[np.int64], NDArray[np.int64]]


def read_spans(files: Sequence[Spans]) -> Iterator[memoryview]:
    """Yield the bytes of each span of each file, in order; adjacent spans share a request.

    Raises `SourceError` for a damaged file, `SourceChangedError` for one that is shorter than before.
    """
    for compressed, group in groupby(files, lambda spans: bool(spans[0].compression)):
        runs = [(file, a[i:j], b[i:j]) for file, a, b in group for i, j in cut_runs(a, b, GAP_BYTES, REQUEST_BYTES)]
        ranges = [Range(content.info.path, int(starts[0]), int(stops[-1])) for content, starts, stops in runs]
        data = _read_streams(runs) if compressed else read_ranges(files[0][0].store, ranges)
        for (_, starts, stops), view in zip(runs, data, strict=True):
            for start, stop in zip((starts - starts[0]).tolist(), (stops - starts[0]).tolist(), strict=True):
                yield view[start:stop]


# Streams that are not being read, by URL, file, and the first byte that each can still return. This is module state,
# since a fragment arrives in its process as plain data and continues where another fragment stopped. A stream is
# removed while it is read, so that no two threads share one; each step is one operation on a dict, which needs no lock.
_kept: PerProcess[dict[tuple[str, ObjectInfo, int], Stream]] = PerProcess()


def _read_streams(runs: Sequence[Spans]) -> Iterator[memoryview]:
    for content, group in groupby(runs, lambda run: run[0]):
        spans = [(int(starts[0]), int(stops[-1]), int(starts[-1])) for _, starts, stops in group]
        kept, file = _kept.get(dict), (content.store.url, content.info)
        candidates = [key for key in list(kept) if key[:2] == file and key[2] <= spans[0][0]]
        stream = (kept.pop(max(candidates), None) if candidates else None) or Stream(content)
        for start, stop, last in spans:
            data = stream.read(start, stop, last)  # the next fragment may begin with the last span again
            if len(data) != stop - start:
                problem = f"{content.where} ends at byte {stream.at} unpacked"
                raise SourceChangedError(f"{problem}, when it was scanned it had {content.size}", CHANGED)
            yield memoryview(data)
        if stream.at == content.size:
            stream.finish()  # frees its decompressor; the bytes that it holds may be read again
        kept[(*file, stream.first)] = stream
        for oldest in list(kept)[:-KEPT_STREAMS]:
            kept.pop(oldest, None)


class Stream:
    """Reads the decompressed bytes of a file from beginning to end, for one thread at a time.

    It holds the last block that it read, and `ahead` further requests. `at` is the number of bytes decompressed so
    far, `size` the total, -1 until the end is reached.
    """

    def __init__(self, content: Content, ahead: int = 1) -> None:
        self.content, self.at, self.size = content, 0, -1
        self._tail = b""  # the last of the bytes up to `at`
        pieces = _pieces(content, 1 if content.compression else ahead)  # decompression is slower than one request
        self._blocks = decompressed(content.compression, pieces, content.where)

    @property
    def first(self) -> int:
        """The first byte that can be read without starting from the beginning."""
        return self.at - len(self._tail)

    def read(self, start: int, stop: int, keep: int | None = None) -> bytes:
        """Return bytes [start, stop), fewer at the end of the file; bytes from `keep` on are held for the next read.

        `start` must be at least `first`. Raises `SourceError` for a damaged file, `SourceChangedError`, or a
        `StorageError`.
        """
        if start < self.first:
            raise ValueError(f"byte {start} lies before {self.first}")
        blocks = self.blocks(start, stop, stop if keep is None else keep)
        return b"".join(block[: max(0, stop - at)] for at, block in blocks)

    def finish(self) -> int:
        """Read to the end, which checks the complete file; return its decompressed size in bytes."""
        for _ in self.blocks(self.at):
            pass
        return self.at

    def blocks(self, start: int, stop: int | None = None, keep: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks from byte `start` to the one that contains `stop`, each with the position of its start."""
        if start < self.at:
            yield max(self.first, start), self._tail[max(0, start - self.first) :]
        while self.size < 0 and (stop is None or self.at < stop):
            block = next(self._blocks, b"")
            if not block:
                self.size = self.at
                return
            at = self.at
            self._tail = block if keep is None or keep >= at else self._tail[keep - at :] + block
            self.at += len(block)
            if self.at > start:
                yield max(at, start), block[max(0, start - at) :]


def open_content(store: Store, info: ObjectInfo) -> Content:
    """Return the content of a file. Its first bytes, not its name, tell whether it is compressed."""
    compression = compression_of(bytes(read_range(store, Range(info.path, 0, min(MAGIC_BYTES, info.size)))))
    return Content(store, info, compression, -1 if compression else info.size)


def _pieces(content: Content, ahead: int) -> Iterator[memoryview]:
    """Yield a file request by request, with `ahead` further requests in flight."""
    size, pending = content.info.size, deque[Future[memoryview]]()
    for start in range(0, size, REQUEST_BYTES):
        request = Range(content.info.path, start, min(start + REQUEST_BYTES, size))
        pending.append(in_thread(partial(read_range, content.store, request)))
        if len(pending) > ahead:
            yield result_of(pending.popleft())
    while pending:
        yield result_of(pending.popleft())


READ_THREADS = 8  # a small file costs one round trip, so several are read at the same time
REQUEST_BYTES = 8 << 20  # the longest request; the memory that one thread holds
GROUP_BYTES = 2 << 20  # small ranges that one thread reads in turn: a thread for each costs more than its read
# a file in memory takes a tenth of this, a file on a disk or across a network takes more
NEAR_SECONDS, NEAR_BYTES_PER_SECOND = 0.0005, 200e6
MAX_DOCUMENT = 64 << 20  # bytes of a JSON document, which is read at once
GAP_BYTES = 256 << 10  # reading this many unused bytes is cheaper than another request


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of the file `path`."""

    path: str
    start: int
    stop: int


def read_range(store: Store, request: Range, out: memoryview | None = None) -> memoryview:
    """Return the bytes of one range, in `out` if it is given.

    Raises `SourceChangedError` if the file is now too short, or a `StorageError`.
    """
    if request.start == request.stop:
        return memoryview(b"")
    allocate = empty_buffer if out is None else lambda size: out[:size]
    data = store.read(request.path, request.start, request.stop, allocate)
    if len(data) != request.stop - request.start:
        problem = f"{store.url}/{request.path} ends at byte {request.start + len(data)}"
        raise SourceChangedError(f"{problem}, when it was listed it had at least {request.stop}", CHANGED)
    if out is not None and data.obj is not out.obj:  # the client allocated the body itself
        out[:] = data
    return data


def read_document(store: Store, info: ObjectInfo, limit: int = MAX_DOCUMENT) -> dict[str, Any]:
    """Return the object of a JSON document of at most `limit` bytes. Raises `SourceError` for anything else."""
    where = f"{store.url}/{info.path}"
    if info.size > limit:
        raise damaged(f"{where} has {info.size} bytes, at most {limit} are read")
    data = bytes(read_range(store, Range(info.path, 0, info.size)))
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(f"{where} is not a JSON object: {error}") from None
    if not isinstance(document, dict):
        raise damaged(f"{where} is not a JSON object")
    return document


def read_ranges(store: Store, requests: Sequence[Range]) -> Iterator[memoryview]:
    """Yield the bytes of each range in order; a few groups of ranges are read at the same time.

    One thread reads local files that are in the page cache: several would contend for the interpreter's lock.
    """
    sizes = np.array([request.stop - request.start for request in requests], np.int64)
    ends = np.cumsum(sizes)
    groups = [requests[first:last] for first, last in cut_runs(ends - sizes, ends, GROUP_BYTES, GROUP_BYTES)]
    near = local = store.reader().kind == "file"
    while groups:
        threads = 1 if near else READ_THREADS
        current, groups = groups[:threads], groups[threads:]  # bounds the memory
        near_seconds = sum(NEAR_SECONDS + (r.stop - r.start) / NEAR_BYTES_PER_SECOND for r in chain(*current))
        begin = time.perf_counter()
        bodies = run_all(lambda group: [read_range(store, request) for request in group], current, threads)
        near = local and time.perf_counter() - begin < near_seconds
        yield from chain.from_iterable(bodies)


BUFFER_BYTES = 1 << 20


def open_file(store: Store, info: ObjectInfo, buffer: int = BUFFER_BYTES) -> BinaryIO:
    """Return an object as a buffered, seekable file. Its reads raise `SourceChangedError` or a `StorageError`."""
    return cast(BinaryIO, io.BufferedReader(RangeFile(store, info), buffer))


class RangeFile(io.RawIOBase):
    """An object as a seekable, unbuffered file. A read returns fewer bytes than requested only at the end."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self.store, self.info, self.at = store, info, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte, relative to the start, the current position or the end; return the new position."""
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.info.size}[whence]
        if at < 0:  # zipfile does this in a file that is shorter than its end record
            raise OSError(f"byte {at}")
        self.at = at
        return at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; return the number of bytes written to it."""
        stop = min(self.at + len(buffer), self.info.size)
        data = read_range(self.store, Range(self.info.path, self.at, max(stop, self.at)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def read_rows(store: Store, path: str, starts: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Fill the C-contiguous `out` (rows, bytes of a row) with the rows that begin at the bytes `starts`.

    `starts` ascend, and rows do not overlap. Several requests are in flight at once; only requests for rows that are
    not contiguous need a buffer, of up to 8 MiB. Raises `SourceChangedError` if the file is now too short, or a
    `StorageError`.
    """
    size = out.shape[1]

    def gather(i: int, j: int) -> None:
        data = read_range(store, Range(path, int(starts[i]), int(starts[j - 1]) + size))
        rows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), size)
        out[i:j] = rows[starts[i:j] - starts[i]]  # np.take would copy every window

    tasks: list[Callable[[], object]] = []
    for i, j in cut_runs(starts, starts + size, GAP_BYTES, REQUEST_BYTES):
        if starts[j - 1] - starts[i] > size * (j - i - 1):
            tasks.append(partial(gather, i, j))
            continue
        flat, first = memoryview(out[i:j].reshape(-1)), int(starts[i])  # type: ignore[arg-type]
        for at in range(0, len(flat), REQUEST_BYTES):  # one row may be longer than a request
            piece = flat[at : at + REQUEST_BYTES]
            tasks.append(partial(read_range, store, Range(path, first + at, first + at + len(piece)), piece))
    run_all(lambda task: task(), tasks, READ_THREADS)
