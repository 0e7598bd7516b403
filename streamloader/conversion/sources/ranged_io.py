"""Bytes of files by range: plain or unpacked, as blocks, as records, as rows, or as a file object.

A compressed file can only be read from its beginning. So that the parts of one file do not unpack it again and again,
this process keeps a few streams where the last part left them, and a later part continues there.
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
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.optional import Lazy
from streamloader.conversion.sources.base import damaged
from streamloader.errors import SourceChangedError
from streamloader.storage.process import PerProcess, run_all, take
from streamloader.storage.store import ObjectInfo, Store, cut_runs

BLOCK = 1 << 20  # what is unpacked at once
MAGIC_BYTES = 16
CHANGED = "leave the source alone while it is converted, and start again with --overwrite"
_FEED = 64 << 10  # zlib hands back what it did not need: small pieces are copied less
_FEED_ZSTD = 512  # its package bounds no output, but a block of 128 KiB takes four bytes: so 16 MiB at most
_XZ_MEMORY = 256 << 20  # xz -9 needs 65 MiB, a header may ask for 4 GiB
_ZSTD_WINDOW = 128 << 20  # as much as the zstd tool itself accepts unasked

_MAGIC = (
    ("gzip", re.compile(rb"\x1f\x8b\x08")),
    ("bzip2", re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")),  # "BZh" alone may be text
    ("xz", re.compile(rb"\xfd7zXZ\0")),
    ("zstd", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")),  # the second is a frame to be skipped
)

zstandard: Any = Lazy("zstandard")
_DECOMPRESSORS: dict[str, tuple[Callable[[], Any], type[BaseException]]] = {  # what makes one, and what it raises
    "gzip": (partial(zlib.decompressobj, wbits=31), zlib.error),
    "bzip2": (bz2.BZ2Decompressor, OSError),
    "xz": (partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_XZ_MEMORY), lzma.LZMAError),
}


def compression_of(head: bytes) -> str:
    """Return how the file that begins with these `MAGIC_BYTES` is compressed, such as "gzip"; "" where it is not."""
    return next((name for name, magic in _MAGIC if magic.match(head)), "")


def decompressed(compression: str, pieces: Iterable[memoryview], where: str) -> Iterator[bytes]:
    """Yield the plain bytes of a file, all of its members, in blocks of about a MiB and never more than 18.

    Raises `SourceError`, which says how far it got, where the file is truncated or damaged; `UsageError` where the
    package for zstd is missing.
    """
    block = bytearray()
    for out in _members(compression, pieces, where) if compression else _cut(pieces, BLOCK):
        block += out
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
    fed = given = members = 0
    for data in _cut(pieces, _FEED if bound else _FEED_ZSTD):
        fed += len(data)
        rest, hungry = data, True
        while rest or not hungry:
            if decoder is None:
                rest = rest.lstrip(b"\0") if members else rest  # files may be padded, to complete blocks of a tape
                if not rest:
                    break
                decoder, members = new(), members + 1
            try:
                out = decoder.decompress(rest, *bound)
            except error_type as error:
                problem = f"{where} is damaged, or not {compression} to its end, within its first {fed} bytes"
                raise damaged(f"{problem}, {given} unpacked: {error}") from error
            rest = decoder.unused_data if decoder.eof else getattr(decoder, "unconsumed_tail", b"")
            hungry = decoder.eof or getattr(decoder, "needs_input", not rest)
            decoder = None if decoder.eof else decoder
            given += len(out)
            if out:
                yield out
    if decoder is not None:
        ends = f"its {compression} data break off after {fed} bytes, {given} unpacked"
        raise damaged(f"{where} is truncated: {ends}")


KEPT = 4  # streams; each holds two requests and its decompressor's window


@dataclass(frozen=True)
class Content:
    """What one file holds. `compression` is its kind, "" where there is none; `size` is that of what it holds once the
    file was read, in bytes, else -1.
    """

    store: Store
    info: ObjectInfo
    compression: str = ""
    size: int = -1

    @property
    def where(self) -> str:
        """The file's URL, for messages."""
        return f"{self.store.url}/{self.info.path}"


# bytes [start, stop) of what a file holds, for each of these; they ascend, and may begin where the last one did
Spans = tuple[Content, NDArray[np.int64], NDArray[np.int64]]


def read_each(wanted: Sequence[Spans]) -> Iterator[memoryview]:
    """Yield the bytes of each span of each file, in order; neighbours share a request.

    Raises `SourceError` for a damaged file, `SourceChangedError` for one that now ends sooner.
    """
    for compressed, group in groupby(wanted, lambda spans: bool(spans[0].compression)):
        runs = [
            (content, starts[i:j], stops[i:j])
            for content, starts, stops in group
            for i, j in cut_runs(starts, stops, GAP_BYTES, REQUEST_BYTES)
        ]
        ranges = [Range(content.info.path, int(starts[0]), int(stops[-1])) for content, starts, stops in runs]
        data = _read_streams(runs) if compressed else read_ranges(wanted[0][0].store, ranges)
        for (_, starts, stops), found in zip(runs, data, strict=True):
            for start, stop in zip((starts - starts[0]).tolist(), (stops - starts[0]).tolist(), strict=True):
                yield found[start:stop]


# Module state, since a part arrives in its process as plain data, and its reading continues where another part stopped:
# streams that are not being read, by URL, file, and the first byte that each still has. A stream is removed while
# it is read, so no two threads share one; each step is one operation on a dict, which needs no lock.
_kept: PerProcess[dict[tuple[str, ObjectInfo, int], Stream]] = PerProcess()


def _read_streams(runs: Sequence[Spans]) -> Iterator[memoryview]:
    for content, group in groupby(runs, itemgetter(0)):
        spans = [(int(starts[0]), int(stops[-1]), int(starts[-1])) for _, starts, stops in group]
        kept, file = _kept.get(dict), (content.store.url, content.info)
        fitting = [key for key in list(kept) if key[:2] == file and key[2] <= spans[0][0]]
        stream = (kept.pop(max(fitting), None) if fitting else None) or Stream(content)
        for start, stop, last in spans:
            data = stream.read(start, stop, last)  # the next part may begin with the last again
            if len(data) != stop - start:
                ends = f"{content.where} ends at byte {stream.at} unpacked"
                raise SourceChangedError(f"{ends}, when it was scanned it had {content.size}", CHANGED)
            yield memoryview(data)
        if stream.at == content.size:
            stream.finish()  # its decompressor goes; what it holds may be read again
        kept[(*file, stream.first)] = stream
        for oldest in list(kept)[:-KEPT]:
            kept.pop(oldest, None)


class Stream:
    """What a file holds, from its beginning to its end; for one thread at a time.

    It holds `ahead` requests more than the one that it is at, and the block that it read last. `at` counts the
    bytes that were unpacked up to now, `size` those that there are, -1 as long as the end was not reached.
    """

    def __init__(self, content: Content, ahead: int = 1) -> None:
        self.content, self.at, self.size = content, 0, -1
        self._held = b""  # the last of the bytes up to `at`
        pieces = _pieces(content, 1 if content.compression else ahead)  # unpacking keeps up with few requests
        self._blocks = decompressed(content.compression, pieces, content.where)

    @property
    def first(self) -> int:
        """The first byte that can be read without starting again."""
        return self.at - len(self._held)

    def read(self, start: int, stop: int, again: int | None = None) -> bytes:
        """Return bytes [start, stop), fewer at the end; those from `again` on are held, for the next read.

        `start` must not lie before `first`. Raises `SourceError` for what is damaged, `SourceChangedError`, or a
        `StorageError`.
        """
        if start < self.first:
            raise ValueError(f"byte {start} lies before {self.first}")
        blocks = self.blocks(start, stop, stop if again is None else again)
        return b"".join(block[: max(0, stop - at)] for at, block in blocks)

    def finish(self) -> int:
        """Read to the end, so that all of the file is checked; return the bytes that there are."""
        for _ in self.blocks(self.at):
            pass
        return self.at

    def blocks(self, start: int, stop: int | None = None, again: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield what comes from byte `start` on, each block with where it begins, up to the one that holds `stop`."""
        if start < self.at:
            yield max(self.first, start), self._held[max(0, start - self.first) :]
        while self.size < 0 and (stop is None or self.at < stop):
            more = next(self._blocks, b"")
            if not more:
                self.size = self.at
                return
            at = self.at
            self._held = more if again is None or again >= at else self._held[again - at :] + more
            self.at += len(more)
            if self.at > start:
                yield max(at, start), more[max(0, start - at) :]


def open_content(store: Store, info: ObjectInfo) -> Content:
    """Return what a file holds: its first bytes say whether it is compressed, whatever its name is."""
    compression = compression_of(bytes(read_range(store, Range(info.path, 0, min(MAGIC_BYTES, info.size)))))
    return Content(store, info, compression, -1 if compression else info.size)


def _pieces(content: Content, ahead: int) -> Iterator[memoryview]:
    """Yield a file request by request, `ahead` of them under way while one is used."""
    size, waiting = content.info.size, deque[Callable[[], memoryview]]()
    for start in range(0, size, REQUEST_BYTES):
        wanted = Range(content.info.path, start, min(start + REQUEST_BYTES, size))
        waiting.append(_later(partial(read_range, content.store, wanted)))
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def _later(work: Callable[[], memoryview]) -> Callable[[], memoryview]:
    """Start work in a thread of its own, and return a function that waits for its result."""
    done: SimpleQueue[memoryview | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
            done.put(error)

    def result() -> memoryview:
        found = take(done)
        try:
            if isinstance(found, BaseException):
                raise found
            return found
        finally:
            del found  # its traceback has this frame

    Thread(target=run, name="streamloader-io", daemon=True).start()
    return result


READ_THREADS = 8  # a small file costs one round trip, so several are under way at once
REQUEST_BYTES = 8 << 20  # the longest request; the memory that one thread holds
GROUP_BYTES = 2 << 20  # small ranges for one thread, one after another: a thread for each costs more than its read
# a file that is in memory takes a tenth of this; one on a disk or across a network more
NEAR_SECONDS, NEAR_BYTES_PER_SECOND = 0.0005, 200e6
MAX_DOCUMENT = 64 << 20  # bytes of a JSON document: it is read whole
GAP_BYTES = 256 << 10  # reading this much for nothing is cheaper than another request


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of the file `path`."""

    path: str
    start: int
    stop: int


def read_range(store: Store, wanted: Range, out: memoryview | None = None) -> memoryview:
    """Return the bytes of one range, in `out` where it is given. Raises `SourceChangedError` where the file is now too
    short for it, or a `StorageError`.
    """
    if wanted.start == wanted.stop:
        return memoryview(b"")
    allocate = None if out is None else lambda size: out[:size]
    data = store.read(wanted.path, wanted.start, wanted.stop, allocate)
    if len(data) != wanted.stop - wanted.start:
        ends = f"{store.url}/{wanted.path} ends at byte {wanted.start + len(data)}"
        raise SourceChangedError(f"{ends}, when it was listed it had at least {wanted.stop}", CHANGED)
    if out is not None and data.obj is not out.obj:  # of a plane whose client makes bodies of its own
        out[:] = data
    return data


def read_document(store: Store, info: ObjectInfo, most: int = MAX_DOCUMENT) -> tuple[bytes, dict[str, Any]]:
    """Return a JSON document of up to `most` bytes, and the object in it. Raises `SourceError` for anything else."""
    where = f"{store.url}/{info.path}"
    if info.size > most:
        raise damaged(f"{where} has {info.size} bytes, at most {most} are read")
    data = bytes(read_range(store, Range(info.path, 0, info.size)))
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(f"{where} is not a JSON object: {error}") from None
    if not isinstance(document, dict):
        raise damaged(f"{where} is not a JSON object")
    return data, document


def read_ranges(store: Store, wanted: Sequence[Range]) -> Iterator[memoryview]:
    """Yield the bytes of each range in order, a few groups of them under way at once.

    Local files that come from memory are read by one thread: several would take turns at the interpreter's lock.
    """
    sizes = np.array([one.stop - one.start for one in wanted], np.int64)
    ends = np.cumsum(sizes)
    groups = [wanted[first:last] for first, last in cut_runs(ends - sizes, ends, GROUP_BYTES, GROUP_BYTES)]
    near = local = store.reader().kind == "file"
    while groups:
        threads = 1 if near else READ_THREADS
        several, groups = groups[:threads], groups[threads:]  # bounds the memory
        patience = sum(NEAR_SECONDS + (one.stop - one.start) / NEAR_BYTES_PER_SECOND for one in chain(*several))
        begin = time.perf_counter()
        found = run_all(lambda group: [read_range(store, one) for one in group], several, threads)
        near = local and time.perf_counter() - begin < patience
        yield from chain.from_iterable(found)


BUFFER_BYTES = 1 << 20


def open_file(store: Store, info: ObjectInfo, buffer: int = BUFFER_BYTES) -> BinaryIO:
    """Return the object as a buffered, seekable file. Its reads raise `SourceChangedError` and `StorageError`."""
    return cast(BinaryIO, io.BufferedReader(RangeFile(store, info), buffer))


class RangeFile(io.RawIOBase):
    """One object as a seekable, unbuffered file. A read fills what was asked for, but at the end."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self.store, self.info, self.at = store, info, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, from the start, here, or the end; return its number from the start."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.info.size}[whence]
        if origin + offset < 0:  # what zipfile tries on a file shorter than its end record
            raise OSError(f"byte {origin + offset}")
        self.at = origin + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; return how many bytes were left to do so."""
        stop = min(self.at + len(buffer), self.info.size)
        data = read_range(self.store, Range(self.info.path, self.at, max(stop, self.at)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def read_rows(store: Store, path: str, starts: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Fill `out` (rows, bytes of a row), C-contiguous, with the rows that begin at the ascending bytes `starts`
    and do not overlap.

    Several requests are under way at once; only those of rows that are not contiguous take memory of their own, 8 MiB
    each. Raises `SourceChangedError` where the file is now too short, or a `StorageError`.
    """
    size = out.shape[1]

    def gather(i: int, j: int) -> None:
        found = read_range(store, Range(path, int(starts[i]), int(starts[j - 1]) + size))
        rows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(found, np.uint8), size)
        out[i:j] = rows[starts[i:j] - starts[i]]  # np.take would copy every window

    tasks: list[Callable[[], object]] = []
    for i, j in cut_runs(starts, starts + size, GAP_BYTES, REQUEST_BYTES):
        if starts[j - 1] - starts[i] > size * (j - i - 1):
            tasks.append(partial(gather, i, j))
            continue
        flat, first = memoryview(out[i:j].reshape(-1)), int(starts[i])  # type: ignore[arg-type]
        for at in range(0, len(flat), REQUEST_BYTES):  # one row may be longer than a request
            some = flat[at : at + REQUEST_BYTES]
            tasks.append(partial(read_range, store, Range(path, first + at, first + at + len(some)), some))
    run_all(lambda task: task(), tasks, READ_THREADS)
