"""Where records of a text begin and end: lines, or for CSV those line ends that stand in no quotes (RFC 4180)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SourceError

MAX_RECORD = 64 << 20  # bytes: a part holds whole records, and what is parsed takes several times as much
_NEWLINE, _QUOTE = ord("\n"), ord('"')
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Style:
    """What a record is: lines of nothing but `blank` are none. With `quoted`, a quote that opens a cell, at the
    beginning of a line or behind one of the `delimiters`, makes line ends belong to the cell, up to the next quote.
    """

    blank: bytes
    quoted: bool = False
    delimiters: bytes = b""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Record n is the bytes [starts[n], stops[n]), its line end included, and begins in the line `lines[n]`."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    lines: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def joined(self, other: Bounds) -> Bounds:
        """Return these and then the others."""
        both = ((self.starts, other.starts), (self.stops, other.stops), (self.lines, other.lines))
        return Bounds(*map(np.concatenate, both))


class Splitter:
    """Finds the records of a text that comes in blocks, of any sizes; it holds no byte of them.

    The text begins at byte `at` of the file `where`, in its line `line`, outside of quotes.
    """

    def __init__(self, style: Style, where: str, at: int = 0, line: int = 1) -> None:
        self._style, self._where = style, where
        self._at, self._line = at, line  # of the block that comes next
        self._start, self._start_line = at, line  # of the record that is open
        self._solid = False  # whether it holds more than blanks yet
        self._inside = False  # whether the block begins in quotes
        self._before = _NEWLINE  # the byte before the block; a quote only where it has just closed a cell
        self._openers = np.zeros(256, bool)
        self._openers[[*style.delimiters, _NEWLINE, _QUOTE]] = True
        self._blanks = np.zeros(256, bool)
        self._blanks[list(style.blank)] = True

    @property
    def line(self) -> int:
        """The line where the text stands now, from 1 on."""
        return self._line

    def feed(self, block: bytes | memoryview) -> Bounds:
        """Return the records that end in this block. Raises `SourceError` for one that is far too long."""
        array = np.frombuffer(block, np.uint8)
        newlines = np.flatnonzero(array == _NEWLINE)
        ending = np.flatnonzero(self._outside(array, newlines)) if self._style.quoted else np.arange(len(newlines))
        found = Bounds(_NONE, _NONE, _NONE)
        if len(ending):
            stops = newlines[ending] + 1
            next_lines = self._line + 1 + ending
            starts = np.concatenate(([self._start - self._at], stops[:-1]))
            lines = np.concatenate(([self._start_line], next_lines[:-1]))
            solid = self._are_solid(array[: stops[-1]], np.maximum(starts, 0))
            solid[0] |= self._solid
            found = Bounds(self._at + starts[solid], self._at + stops[solid], lines[solid])
            self._start, self._start_line = self._at + int(stops[-1]), int(next_lines[-1])
            self._solid = False
        rest = array[max(0, self._start - self._at) :]
        self._solid |= not bool(self._blanks[rest].all())
        self._at += len(array)
        self._line += len(newlines)
        self._check(found)
        return found

    def finish(self) -> Bounds:
        """Return the last record, where the text ends without a line end. Raises `SourceError` for an open quote."""
        if self._inside:
            raise SourceError(
                f"{self._where} opens a quote in the record of line {self._start_line} that is never closed",
                "close it; a quote in a cell is written twice, in a cell that stands in quotes",
            )
        last = [(self._start, self._at, self._start_line)] if self._solid else []
        self._line += self._solid  # that line counts too
        self._start, self._solid = self._at, False
        return Bounds(*np.array(last, np.int64).reshape(-1, 3).T)

    def _are_solid(self, array: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each line, from its start to that of the next, holds more than blanks."""
        solid: NDArray[np.bool_] = ~self._blanks[array[starts]]
        if solid.all():  # in most files no line begins with a blank
            return solid
        return np.asarray(np.logical_or.reduceat(~self._blanks[array], starts), bool)

    def _outside(self, array: NDArray[np.uint8], newlines: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the newlines stand in no quotes."""
        quotes = np.flatnonzero(array == _QUOTE)
        opening = quotes[1:][::2] if self._inside else quotes[::2]
        before = np.where(opening > 0, array[opening - 1], self._before)
        if not self._openers[before].all():
            quotes = self._real_quotes(array, quotes)
        outside: NDArray[np.bool_] = ((np.searchsorted(quotes, newlines) + self._inside) & 1) == 0
        self._inside ^= bool(len(quotes) & 1)
        if len(array):
            closed = len(quotes) and quotes[-1] == len(array) - 1
            self._before = int(array[-1]) if array[-1] != _QUOTE or closed else 0
        return outside

    def _real_quotes(self, array: NDArray[np.uint8], quotes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the quotes that open or close a cell, one after another: some stand in cells without quotes."""
        real: list[int] = []
        inside, closed = self._inside, -1 if self._before == _QUOTE else -2
        for at in quotes.tolist():
            if inside:
                inside, closed = False, at
            elif at == closed + 1 or self._opens(int(array[at - 1]) if at else self._before):
                inside = True
            else:
                continue
            real.append(at)
        return np.array(real, np.int64)

    def _opens(self, before: int) -> bool:
        return before != _QUOTE and bool(self._openers[before])

    def _check(self, found: Bounds) -> None:
        lengths = found.stops - found.starts
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > MAX_RECORD or self._at - self._start > MAX_RECORD:
            line = int(found.lines[lengths.argmax()]) if longest > MAX_RECORD else self._start_line
            quote = ", or a quote that is never closed" if self._style.quoted else ""
            raise SourceError(
                f"{self._where} has a record of more than {MAX_RECORD >> 20} MiB in line {line}{quote}",
                "make one record a line, and store what is so large in a file of its own",
            )
