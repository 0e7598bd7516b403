"""What files hold, by range: their bytes as they are, or unpacked where they are compressed.

A compressed file can only be read from its beginning. So that the parts of one file do not unpack it again and again,
this process keeps a few streams where the last part left them, and the next part, which lies behind it, goes on there.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from queue import SimpleQueue
from threading import Thread

from streamloader.conversion.sources.base import REQUEST_BYTES, Range, read_range, read_ranges
from streamloader.conversion.sources.files import Listing, extension
from streamloader.conversion.sources.packing import MAGIC_BYTES, packing_of, unpacked
from streamloader.errors import SourceChangedError
from streamloader.format.threads import take
from streamloader.storage.protocol import ObjectInfo, Store

KEPT = 4  # streams; each holds two requests and its decompressor's window
_NOTHING = memoryview(b"")
_PACKED = ("gz", "bz2", "xz", "zst", "zstd")
_SHORT = {"tgz": "tar", "tbz2": "tar", "txz": "tar", "tzst": "tar"}


def inner_extension(path: str) -> str:
    """Return the extension of what a file holds, by its name: `csv` of `a.csv.gz`, `tar` of `b.tgz`."""
    last = extension(path)
    return extension(path[: -len(last) - 1]) if last in _PACKED else _SHORT.get(last, last)


def holding(listing: Listing, *kinds: str) -> tuple[ObjectInfo, ...]:
    """Return the visible files that hold one of these kinds, compressed ones too, sorted by path."""
    return tuple(info for info in listing.of(*kinds, *_PACKED, *_SHORT) if inner_extension(info.path) in kinds)


def kinds_in(listing: Listing) -> set[str]:
    """Return the extensions of what the visible files hold."""
    plain = {_SHORT.get(name, name) for name in listing.by_extension if name not in _PACKED}
    return plain | {inner_extension(info.path) for info in listing.of(*_PACKED)}


@dataclass(frozen=True)
class Content:
    """What one file holds. `packing` is how it is compressed, "" where it is not; `size` is that of what it holds, in
    bytes, -1 where only unpacking would tell.
    """

    store: Store
    info: ObjectInfo
    packing: str
    size: int

    @property
    def where(self) -> str:
        """The file's URL, for messages."""
        return f"{self.store.url}/{self.info.path}"

    def sized(self, size: int) -> Content:
        """Return it with its size."""
        return replace(self, size=size)


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of what a file holds; the next span may begin at `again`, or else where this one stops."""

    content: Content
    start: int
    stop: int
    again: int | None = None


def read_spans(wanted: Sequence[Span]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of each span in order; those of one file ascend, and stand together.

    Raises `SourceError` for a damaged file, `SourceChangedError` for one that now ends sooner.
    """
    for content, group in groupby(wanted, lambda span: span.content if span.content.packing else None):
        spans = list(group)
        if content is None:
            store = spans[0].content.store
            yield from read_ranges(store, [Range(span.content.info.path, span.start, span.stop) for span in spans])
        else:
            yield from _read_stream(content, spans)


def _read_stream(content: Content, spans: Sequence[Span]) -> Iterator[bytes]:
    stream = _take(content, spans[0].start)
    for span in spans:
        data = stream.read(span.start, span.stop, span.again)
        if len(data) != span.stop - span.start:
            raise SourceChangedError(
                f"{content.where} ends at byte {stream.at} unpacked, when it was scanned it had {content.size}",
                "leave the source alone while it is converted, and start again with --overwrite",
            )
        yield data
    if stream.at == content.size:
        stream.finish()  # its decompressor goes; what it holds may be read again
    _keep(stream)


class Stream:
    """What a file holds, from its beginning to its end; for one thread at a time.

    It holds `ahead` requests more than the one that it is at, and the block that it read last. `head` are the first
    bytes of the file, if they were read before.
    """

    def __init__(self, content: Content, ahead: int = 1, head: memoryview = _NOTHING) -> None:
        self.content = content
        self.at = 0  # the bytes that were unpacked up to now
        self._held: deque[bytes] = deque()  # the last of them
        self._ended = False
        pieces = chain([head], _pieces(content, len(head), ahead))
        self._blocks = unpacked(content.packing, pieces, content.where)

    @property
    def first(self) -> int:
        """The first byte that can be read without beginning anew."""
        return self.at - sum(map(len, self._held))

    @property
    def size(self) -> int:
        """The bytes that there are; -1 as long as the end was not reached."""
        return self.at if self._ended else -1

    def read(self, start: int, stop: int, again: int | None = None) -> bytes:
        """Return bytes [start, stop), fewer at the end; those from `again` on are held, for the next read.

        `start` must not lie before `first`. Raises `SourceError` for what is damaged, `SourceChangedError`, or a
        `StorageError`.
        """
        if start < self.first:
            raise ValueError(f"byte {start} lies before {self.first}")
        walk = self._walk(start, stop, stop if again is None else again)
        return b"".join(block[: max(0, stop - at)] for at, block in walk)

    def blocks(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield all that comes from byte `start` on, each block with where it begins."""
        return self._walk(start, None, None)

    def finish(self) -> int:
        """Read to the end, so that all of the file is checked; return the bytes that there are."""
        for _ in self.blocks(self.at):
            pass
        return self.at

    def _walk(self, start: int, stop: int | None, again: int | None) -> Iterator[tuple[int, bytes]]:
        at = self.first
        for block in list(self._held):
            if at + len(block) > start:
                yield max(at, start), block[max(0, start - at) :]
            at += len(block)
        while not self._ended and (stop is None or self.at < stop):
            more = next(self._blocks, b"")
            if not more:
                self._ended = True
                return
            at = self.at
            self.at += len(more)
            self._held.append(more)
            while len(self._held) > 1 and (again is None or self.first + len(self._held[0]) <= again):
                self._held.popleft()
            if self.at > start:
                yield max(at, start), more[max(0, start - at) :]


def open_stream(store: Store, info: ObjectInfo, ahead: int) -> Stream:
    """Return a file as a stream: its first bytes say whether it is compressed, whatever its name is.

    `ahead` is for one that is not: unpacking keeps up with one request. Raises what reading raises.
    """
    head = read_range(store, Range(info.path, 0, min(REQUEST_BYTES, info.size)))
    packing = packing_of(bytes(head[:MAGIC_BYTES]))
    return Stream(Content(store, info, packing, -1 if packing else info.size), 1 if packing else ahead, head)


def _pieces(content: Content, first: int, ahead: int) -> Iterator[memoryview]:
    """Yield a file from byte `first` on, request by request, a few of them under way."""
    waiting: deque[Callable[[], memoryview]] = deque()
    size = content.info.size
    for start in range(first, size, REQUEST_BYTES):
        wanted = Range(content.info.path, start, min(start + REQUEST_BYTES, size))
        waiting.append(_later(partial(read_range, content.store, wanted)))
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def _later(work: Callable[[], memoryview]) -> Callable[[], memoryview]:
    """Begin work in a thread of its own, and return what waits for its result; nobody has to wait for it."""
    done: SimpleQueue[memoryview | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
            done.put(error)

    def result() -> memoryview:
        found = take(done)
        if isinstance(found, BaseException):
            raise found
        return found

    Thread(target=run, name="streamloader-io", daemon=True).start()
    return result


_Key = tuple[str, ObjectInfo]


@dataclass
class _Kept:
    """The streams of this process that nobody reads now, by file and the first byte that each still has."""

    process: int = 0
    streams: dict[tuple[_Key, int], Stream] = field(default_factory=dict)


# Module state that changes, since a part arrives in its process as plain data, and what it reads goes on where another
# part stopped. A stream is taken out while it is read, so no two threads share one; each step is one operation on a
# dict, which needs no lock that a fork could leave locked. A forked child, whose threads are gone, begins anew.
_kept = _Kept()


def _key(content: Content) -> _Key:
    return content.store.url, content.info


def _take(content: Content, start: int) -> Stream:
    """Return a stream that has not passed `start` yet, the one that is nearest where there are several."""
    if _kept.process != os.getpid():
        _kept.process, _kept.streams = os.getpid(), {}
    here = [key for key in list(_kept.streams) if key[0] == _key(content) and key[1] <= start]
    found = _kept.streams.pop(max(here, key=lambda key: key[1]), None) if here else None
    return found or Stream(content)


def _keep(stream: Stream) -> None:
    _kept.streams[_key(stream.content), stream.first] = stream
    for oldest in list(_kept.streams)[:-KEPT]:
        _kept.streams.pop(oldest, None)
