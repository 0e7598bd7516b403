"""Text files of records, in any compression: one pass counts them and notes where every some of them begin."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import base
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.streams import Content, Span, Stream, kinds_in, read_spans
from streamloader.conversion.sources.text.linesplit import Bounds, Splitter, Style
from streamloader.errors import SourceChangedError, SourceError

MARK_BYTES = 256 << 10  # what reading one record reads; 24 bytes of index each
_COMPANIONS = frozenset({"", "md", "txt", "rst", "json", "yaml", "yml", "csv", "tsv", "jsonl", "ndjson"})
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def mostly_texts(listing: Listing, kinds: Collection[str]) -> bool:
    """Return whether there are files of these extensions, and nothing that they may only be the labels of."""
    there = kinds_in(listing)
    return bool(there & set(kinds)) and there <= _COMPANIONS


@dataclass(frozen=True, eq=False)
class TextFile:
    """One file of records. `marks` has the number, first byte and line of one record every `MARK_BYTES`, and last what
    a further record would have.
    """

    content: Content
    style: Style
    marks: NDArray[np.int64]

    @property
    def count(self) -> int:
        """The number of records."""
        return int(self.marks[-1, 0])

    def cut(self, rows: NDArray[np.int64], position: int) -> FileRows:
        """Return these records, which ascend; the first is at `position` of its part."""
        first, last = np.searchsorted(self.marks[:, 0], rows[[0, -1]], side="right")
        return FileRows(self.content, self.style, self.marks[first - 1 : last + 1].copy(), rows, position)


def begin_text(stream: Stream) -> int:
    """Return where the text begins, behind a byte order mark. Raises `SourceError` for UTF-16."""
    head = stream.read(0, len(_BOM))
    if head.startswith(_UTF16):
        raise SourceError(f"{stream.content.where} is text in UTF-16", "write it in UTF-8")
    return len(_BOM) if head == _BOM else 0


def index_text(stream: Stream, style: Style, start: int, line: int = 1) -> TextFile:
    """Return the file with its index; the records begin at byte `start`, in line `line`.

    It holds a block at a time. Raises `SourceError` for a damaged file, a record far too long, or an open quote.
    """
    splitter = Splitter(style, stream.content.where, start, line)
    marks = [np.array([[0, start, line]], np.int64)]
    count, last = 0, start // MARK_BYTES
    for found in _all_bounds(splitter, stream, start):
        if len(found):
            places = found.starts // MARK_BYTES
            new = np.flatnonzero(np.diff(places, prepend=last))
            new = new[new + count > 0]  # the first has its mark
            marks.append(np.stack((count + new, found.starts[new], found.lines[new]), axis=1))
            count, last = count + len(found), int(places[-1])
    marks.append(np.array([[count, stream.at, splitter.line]], np.int64))
    return TextFile(stream.content.sized(stream.at), style, np.concatenate(marks))


def _all_bounds(splitter: Splitter, stream: Stream, start: int) -> Iterator[Bounds]:
    for _, block in stream.blocks(start):
        yield splitter.feed(block)
    yield splitter.finish()


@dataclass(frozen=True, eq=False)
class Block:
    """Records that were read together, with their bounds in the data; record i is at `position + i` of its part."""

    where: str
    style: Style
    data: bytes | memoryview
    bounds: Bounds
    position: int

    def __len__(self) -> int:
        return len(self.bounds)

    def record(self, i: int) -> bytes:
        """Return the bytes of a record, with its line end where it has one."""
        return bytes(self.data[int(self.bounds.starts[i]) : int(self.bounds.stops[i])])

    def records(self, first: int, stop: int) -> list[memoryview]:
        """Return the bytes of the records [first, stop), those that lie together as one."""
        starts, stops = self.bounds.starts[first:stop], self.bounds.stops[first:stop]
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        data = memoryview(self.data)
        ends = zip(starts[[0, *breaks]].tolist(), stops[[*(breaks - 1), -1]].tolist(), strict=True)
        return [data[start:end] for start, end in ends]

    def name(self, i: int) -> str:
        """Return file and line of a record."""
        return f"{self.where}:{self.bounds.lines[i]}"


@dataclass(frozen=True, eq=False)
class FileRows:
    """Some records of one file, ascending, with the marks that they lie between."""

    content: Content
    style: Style
    marks: NDArray[np.int64]
    rows: NDArray[np.int64]
    position: int

    def runs(self) -> list[_Run]:
        """Return what to read for them, ascending."""
        between = np.searchsorted(self.marks[:, 0], self.rows, side="right") - 1
        used, firsts = np.unique(between, return_index=True)
        runs = base.cut_runs(self.marks[used, 1], self.marks[used + 1, 1], base.GAP_BYTES, base.REQUEST_BYTES)
        return [_Run(self, int(used[i]), int(used[j - 1]) + 1, int(firsts[i])) for i, j in runs]

    def name(self, row: int) -> str:
        """Return file and line of a record: without reading it, where no blank line is near it."""
        i = int(np.searchsorted(self.marks[:, 0], row, side="right")) - 1
        (number, _, line), (end, _, end_line) = self.marks[i].tolist(), self.marks[i + 1].tolist()
        if end_line - line == end - number:
            return f"{self.content.where}:{line + row - number}"
        alone = FileRows(self.content, self.style, self.marks[i : i + 2], np.array([row], np.int64), 0)
        (block,) = read_blocks([alone])
        return block.name(0)


@dataclass(frozen=True, eq=False)
class _Run:
    """One read for a piece: from its mark `first` to its mark `last`; `row` is the first of its rows there."""

    piece: FileRows
    first: int
    last: int
    row: int

    @property
    def span(self) -> Span:
        """What it reads; the rows that come next may begin behind its last mark but one."""
        start, again, stop = self.piece.marks[[self.first, self.last - 1, self.last], 1].tolist()
        return Span(self.piece.content, start, stop, again)

    def block(self, data: bytes | memoryview) -> Block:
        """Return the records of the read. Raises `SourceChangedError` where they are not those that were counted."""
        piece, end = self.piece, int(self.piece.marks[self.last, 0])
        number, at, line = piece.marks[self.first].tolist()
        splitter = Splitter(piece.style, piece.content.where, at, line)
        found = splitter.feed(data).joined(splitter.finish())
        if len(found) != end - number:
            raise SourceChangedError(
                f"{piece.content.where} has other records than when it was scanned, from line {line} on",
                "leave the source alone while it is converted, and start again with --overwrite",
            )
        rows = piece.rows[self.row : int(np.searchsorted(piece.rows, end))] - number
        bounds = Bounds(found.starts[rows] - at, found.stops[rows] - at, found.lines[rows])
        return Block(piece.content.where, piece.style, data, bounds, piece.position + self.row)


def read_blocks(pieces: Sequence[FileRows]) -> Iterator[Block]:
    """Yield the records of all pieces in order. Raises what reading raises."""
    runs = [run for piece in pieces for run in piece.runs()]
    for run, data in zip(runs, read_spans([run.span for run in runs]), strict=True):
        yield run.block(data)


def cut_rows(files: Sequence[TextFile], rows: NDArray[np.int64]) -> tuple[FileRows, ...]:
    """Return the pieces of a part, one for each file that it needs."""
    ends = np.cumsum([file.count for file in files])
    used, first = np.unique(np.searchsorted(ends, rows, side="right"), return_index=True)
    return tuple(
        files[number].cut(mine - (int(ends[number]) - files[number].count), int(position))
        for number, position, mine in zip(used.tolist(), first, np.split(rows, first[1:]), strict=False)
    )
