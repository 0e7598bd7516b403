"""Files of text, in any compression: tables (.csv and .tsv) and lines of JSON (.jsonl and .ndjson).

One pass counts the records of a file and notes where some of them begin. A record is a line, or for CSV what lies
between two line ends outside of quotes (RFC 4180). See formats/csv/MAPPING.md and formats/jsonl/MAPPING.md.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, groupby
from math import isfinite, isinf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.optional import Lazy, need
from streamloader.conversion.sources.arrays import pick
from streamloader.conversion.sources.base import BadSample, OnBad, Source, split_rows, spread_rows
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat, integer_dtype, settle
from streamloader.conversion.sources.files import Listing, field_names, holding, inner_extension, kinds_in, required
from streamloader.conversion.sources.ranged_io import CHANGED, READ_THREADS, Content, Stream, open_content, read_each
from streamloader.conversion.sources.records import RecordPart, open_records, read_records
from streamloader.errors import FieldError, SourceChangedError, SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import to_column
from streamloader.format.writer import Rows
from streamloader.storage.process import run_all
from streamloader.storage.store import ObjectInfo

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as arrow_csv
else:
    pa, pc, arrow_csv = (Lazy(name) for name in ("pyarrow", "pyarrow.compute", "pyarrow.csv"))

MAX_RECORD = 64 << 20  # bytes: a part holds complete records, and parsing takes several times as much
_NEWLINE, _QUOTE = ord("\n"), ord('"')

Bounds = NDArray[np.int64]  # one row for each record: its first byte, the byte after its line end, and its line


@dataclass(frozen=True)
class Style:
    """What a record is: lines of nothing but `blank` are skipped. With `delimiters`, a quote that opens a cell, at the
    beginning of a line or after a delimiter, makes line ends part of the cell, up to the next quote.
    """

    blank: bytes
    delimiters: bytes = b""


def find_records(
    text: bytes | memoryview, style: Style, where: str, start: int, line: int, *, last: bool
) -> tuple[Bounds, int, int]:
    """Return the records of a text, and the byte and the line at which the next one begins.

    The text begins with a record, at byte `start` of the file `where`, in line `line`. Only the `last` text of a file
    may end without a line end. Raises `SourceError` for a record that is too long, and for a quote that is not closed.
    """
    array = np.frombuffer(text, np.uint8)
    newlines = np.flatnonzero(array == _NEWLINE)
    quotes = _cell_quotes(array, style)
    ending = np.flatnonzero(np.searchsorted(quotes, newlines) % 2 == 0) if len(quotes) else np.arange(len(newlines))
    starts, stops = np.append(0, newlines[ending] + 1), np.append(newlines[ending] + 1, len(array))
    bounds = np.stack((start + starts, start + stops, line + np.append(0, ending + 1)), axis=1)
    too_long = np.flatnonzero(stops - starts > MAX_RECORD)
    if len(too_long):
        quote = ", or a quote that is never closed" if style.delimiters else ""
        problem = f"{where} has a record of more than {MAX_RECORD >> 20} MiB in line {bounds[too_long[0], 2]}{quote}"
        raise SourceError(problem, "write one record per line, and store large values in files of their own")
    if last and len(quotes) % 2:
        problem = f"{where} opens a quote in the record of line {bounds[-1, 2]} that is never closed"
        raise SourceError(problem, "close it; a quote in a cell is written twice, in a quoted cell")
    count = len(bounds) if last and starts[-1] < len(array) else len(bounds) - 1
    blanks = np.isin(np.arange(256), list(style.blank))
    filled = ~blanks[array[starts[:count]]]
    if not filled.all():  # in most files no line begins with a blank
        filled = np.logical_or.reduceat(~blanks[array[: stops[count - 1]]], starts[:count]).astype(bool)
    found = bounds[:count][filled]
    return found, int(bounds[-1, 1 if last else 0]), int(bounds[-1, 2]) + (count == len(bounds))


def find_all_records(
    blocks: Iterable[bytes | memoryview], style: Style, where: str, start: int, line: int
) -> Iterator[tuple[Bounds, int, int]]:
    """Yield what `find_records` returns for a text that comes in blocks of any sizes."""
    text, enough = b"", 0
    for block in chain(blocks, [None]):
        text += block or b""
        if block is None or len(text) >= enough:
            found = find_records(text, style, where, start, line, last=block is None)
            text = text[found[1] - start :]
            enough = min(2 * len(text), MAX_RECORD + 1)  # so that a long record is not scanned for each block
            _, start, line = found
            yield found


def _cell_quotes(array: NDArray[np.uint8], style: Style) -> NDArray[np.int64]:
    """Return the quotes that open or close a cell, one after another: some are part of cells without quotes."""
    if not style.delimiters:
        return np.empty(0, np.int64)
    quotes = np.flatnonzero(array == _QUOTE)
    openers = [*style.delimiters, _NEWLINE]
    opening = quotes[::2]
    before = np.where(opening > 0, array[opening - 1], _NEWLINE)
    if np.isin(before, [*openers, _QUOTE]).all():
        return quotes
    found: list[int] = []
    for at in quotes.tolist():
        closes = len(found) % 2 == 1
        if closes or at == 0 or int(array[at - 1]) in openers or (found and at == found[-1] + 1):
            found.append(at)
    return np.array(found, np.int64)


Indexed = TypeVar("Indexed")
MARK_BYTES = 256 << 10  # what reading one record reads; 24 bytes of index each
_COMPANIONS = frozenset({"", "md", "txt", "rst", "json", "yaml", "yml", "csv", "tsv", "jsonl", "ndjson"})
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def mostly_texts(listing: Listing, kinds: Collection[str]) -> bool:
    """Return whether there are files of these extensions, and no other data that they may only be the labels of."""
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


def index_files(
    listing: Listing, kinds: Sequence[str], index: Callable[[Stream, ObjectInfo], Indexed]
) -> tuple[tuple[ObjectInfo, ...], list[Indexed]]:
    """Return the files of these extensions, and what `index` makes of each. Raises `SourceError` for none."""
    infos = required(holding(listing, *kinds), listing, *kinds)
    store, ahead = listing.store, max(1, READ_THREADS // len(infos))
    return infos, run_all(lambda info: index(Stream(open_content(store, info), ahead), info), infos, READ_THREADS)


def begin_text(stream: Stream) -> int:
    """Return where the text begins, after a byte order mark. Raises `SourceError` for UTF-16."""
    head = stream.read(0, len(_BOM))
    if head.startswith(_UTF16):
        raise SourceError(f"{stream.content.where} is text in UTF-16", "write it in UTF-8")
    return len(_BOM) if head == _BOM else 0


def index_text(stream: Stream, style: Style, start: int, line: int = 1) -> TextFile:
    """Return the file with its index; the records begin at byte `start`, in line `line`.

    It holds a block and a record at a time. Raises `SourceError` for a damaged file and what `find_records` raises.
    """
    marks = [np.array([[0, start, line]], np.int64)]
    count, last = 0, start // MARK_BYTES
    blocks = (block for _, block in stream.blocks(start))
    for found, _, next_line in find_all_records(blocks, style, stream.content.where, start, line):
        places = found[:, 0] // MARK_BYTES
        new = np.flatnonzero(np.diff(places, prepend=last))
        new = new[new + count > 0]  # the first has its mark
        marks.append(np.stack((count + new, found[new, 0], found[new, 2]), axis=1))
        count, last = count + len(found), int(places[-1]) if len(found) else last
        end = np.array([[count, stream.at, next_line]], np.int64)
    return TextFile(replace(stream.content, size=stream.at), style, np.concatenate([*marks, end]))


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Some records of one file that lie between two marks: number, first byte and line of a record."""

    content: Content
    style: Style
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    rows: NDArray[np.int64]


def cut_rows(files: Sequence[TextFile], rows: NDArray[np.int64]) -> list[BlockRows]:
    """Return what a part needs, block by block."""
    pieces: list[BlockRows] = []
    for number, _, within in split_rows([file.count for file in files], rows):
        file = files[number]
        for block, _, some in split_rows(np.diff(file.marks[:, 0]), within):
            first, last = map(tuple, file.marks[block : block + 2].tolist())
            pieces.append(BlockRows(file.content, file.style, first, last, some))
    return pieces


@dataclass(frozen=True, eq=False)
class Records:
    """Some records of one file: `bounds` in the data that was read. Those of a slice are of the same data."""

    where: str
    style: Style
    data: memoryview
    bounds: Bounds

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, some: slice) -> Records:
        return replace(self, bounds=self.bounds[some])

    def __iter__(self) -> Iterator[tuple[str, memoryview]]:
        """Yield file and line of each, and its bytes, with its line end where it has one."""
        return ((f"{self.where}:{line}", self.data[start:stop]) for start, stop, line in self.bounds.tolist())

    def runs(self) -> list[memoryview]:
        """Return the bytes of all, contiguous ones as one: a join of single records takes longer than to parse them."""
        starts, stops = self.bounds[:, 0], self.bounds[:, 1]
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        ends = zip(starts[[0, *breaks]].tolist(), stops[[*(breaks - 1), -1]].tolist(), strict=True)
        return [self.data[start:stop] for start, stop in ends]


def read_blocks(pieces: Sequence[BlockRows]) -> Iterator[Records]:
    """Yield the records of all pieces in order, block by block. Raises `SourceChangedError` where they are not those
    that were counted, and what reading raises.
    """
    files = ((content, list(some)) for content, some in groupby(pieces, attrgetter("content")))
    spans = [(content, *np.array([(one.first[1], one.last[1]) for one in some]).T) for content, some in files]
    for piece, data in zip(pieces, read_each(spans), strict=True):
        (number, _, line), where = piece.first, piece.content.where
        found, _, _ = find_records(data, piece.style, where, 0, line, last=True)
        if len(found) != piece.last[0] - number:
            problem = f"{where} has other records than when it was scanned, from line {line} on"
            raise SourceChangedError(problem, CHANGED)
        yield Records(where, piece.style, data, found[piece.rows])


# --- tables: Arrow cuts rows into cells and parses them, a block at a time

# 007 is a code: as a number it would lose its zeros
_WHOLE = re.compile(rb"-?(?:0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(
    rb"[-+]?(?:(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?|nan|inf|infinity)\Z", re.IGNORECASE
)
_LONGEST_WHOLE = 20  # characters: of those of 64 bits
_BOOLS = {b"true": True, b"True": True, b"TRUE": True, b"false": False, b"False": False, b"FALSE": False}
_DIGITS = {b"1": True, b"0": False}
_SHOWN = 40
_TABLES = ("csv", "tsv")
_BLANK = b"\r\n"
_DELIMITERS = ",\t;|"
_HEADER_BYTES = 512 << 10  # of a header at most: less than a block of a stream
_PROBED = 1024  # rows from which the types of columns are inferred


@dataclass(frozen=True)
class Table:
    """What a row is: the `header` of all columns, and those that are read: their `originals` in it, by field name.

    `fill` has the value of an empty cell, for the fields that have one. With `digits` 1 and 0 are bools, too.
    """

    header: tuple[str, ...]
    originals: Mapping[str, str]
    fields: Mapping[str, Field]
    fill: Mapping[str, Any] = field(default_factory=dict)
    digits: bool = True

    def columns(self, records: Sequence[bytes | memoryview], delimiter: bytes, count: int) -> dict[str, Column]:
        """Return the columns of `count` records, which may be joined.

        Raises `FieldError` unless each is a row that fits the fields; with one record its problem and remedy are those
        of the record.
        """
        try:
            cells = self._cells(records, delimiter, count)
        except ValueError as error:  # Arrow's errors are some, too
            remedy = f"give each row one cell a column; quote cells with {delimiter.decode()!r}, quotes or line ends"
            raise FieldError(f"it cannot be cut into cells: {str(error).strip()}", remedy) from None
        found: dict[str, Column] = {}
        for name, column in cells.items():
            try:
                found[name] = self._column(name, column)
            except ValueError:
                raise self._cell_error(name, column[0].as_py()) from None
        return found

    def _cells(self, records: Sequence[bytes | memoryview], delimiter: bytes, count: int) -> dict[str, pa.Array]:
        data = b"".join([_BOM, *records, b"\n"])  # Arrow takes a mark from what it parses, and ignores empty lines
        names = list(self.originals.values())
        read = arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=list(self.header))
        parse = arrow_csv.ParseOptions(delimiter=delimiter.decode(), newlines_in_values=True)
        types = dict.fromkeys(names, pa.binary())
        convert = arrow_csv.ConvertOptions(column_types=types, include_columns=names, null_values=[])
        table = arrow_csv.read_csv(pa.BufferReader(data), read, parse, convert)
        if table.num_rows != count:
            raise ValueError("a carriage return alone ends a line in it")
        return {name: table.column(original).combine_chunks() for name, original in self.originals.items()}

    def _column(self, name: str, cells: pa.Array) -> Column:
        """Return the column of a field. Raises ValueError for a cell that does not fit the field."""
        wanted = self.fields[name]
        if name in self.fill:
            fill = self.fill[name]
            text = fill if isinstance(fill, bytes) else str(fill).encode()
            cells = pc.if_else(pc.equal(pc.binary_length(cells), 0), pa.scalar(text, pa.binary()), cells)
        if not wanted.fixed:
            if wanted.kind == "text":
                cells.cast(pa.string())  # checks that it is UTF-8
            values: list[bytes] = cells.to_pylist()
            return values
        if wanted.dtype == "bool":
            words = _BOOLS | _DIGITS if self.digits else _BOOLS
            found = pc.index_in(cells, value_set=pa.array(words))
            if found.null_count:
                raise ValueError("a cell that is not a bool")
            places: NDArray[np.int32] = found.to_numpy()
            return np.array(list(words.values()))[places]
        floats = wanted.dtype.startswith("float")  # Arrow makes infinity of a float32 that is too large
        kind = pa.float64() if floats else getattr(pa, wanted.dtype)()
        numbers = pc.ascii_trim(cells.view(pa.string()), " \t").cast(kind).to_numpy()
        # smaller whole numbers are all held
        large = floats and bool((np.abs(numbers) >= 1 << (np.finfo(wanted.dtype).nmant + 1)).any())
        if large and not all(_is_held(cell, wanted) for cell in cells.to_pylist()):
            raise ValueError(f"a number that {wanted} does not hold")
        return to_column(name, wanted, numbers, 0)

    def _cell_error(self, name: str, cell: bytes) -> FieldError:
        wanted = self.fields[name]
        shown = cell[:_SHOWN].decode("utf-8", "replace") + ("..." if len(cell) > _SHOWN else "")
        other = "float64" if wanted.dtype != "float64" and _FLOAT.match(cell.strip()) else "text"
        problem, remedy = f"holds {shown!r}, which is not {wanted}", f"correct it, or say {name}={other} in --fields"
        if wanted.kind == "text":
            problem, remedy = "is not UTF-8 text", f"write it in UTF-8, or keep its bytes with {name}=bytes in --fields"
        elif not cell.strip():
            problem = "is empty"
            remedy = f"give empty cells a value with --fill {name}=VALUE, or keep them with {name}=text in --fields"
        elif wanted.dtype.startswith("float") and not _is_held(cell, wanted):
            problem, remedy = f"holds {shown}, which {wanted} does not hold exactly", f"say {name}=text in --fields"
        return FieldError(f"its column {self.originals[name]!r} {problem}", remedy)


def _is_held(cell: bytes, wanted: Field) -> bool:
    """Return whether a float field holds the number in a cell: a whole one exactly, others not as infinity."""
    try:
        number = float(cell)
    except ValueError:
        return True
    with np.errstate(over="ignore"):
        value = float(np.dtype(wanted.dtype).type(number))
    digits = cell.strip().lstrip(b"+-0")
    if digits.isdigit():
        return isfinite(value) and abs(int(value)) == int(digits)
    return not isinf(value) or b"inf" in cell.lower()


def read_table(pieces: Sequence[BlockRows], table: Table, on_bad: OnBad) -> dict[str, Column]:
    """Return one column a field; a row with other cells than the header and the fields have is a bad sample.

    Raises `SourceError`, `SourceChangedError`, or `UsageError` where the package for Arrow is missing.
    """
    rows = Rows(table.fields, sum(len(piece.rows) for piece in pieces))
    position = 0
    for records in read_blocks(pieces):
        for columns in _good_columns(records, table, position, on_bad):
            rows.extend(columns, 0, len(next(iter(columns.values()))))
        position += len(records)
    return rows.columns()


def _good_columns(records: Records, table: Table, position: int, on_bad: OnBad) -> Iterator[dict[str, Column]]:
    """Yield the columns of all records, or of halves and halves of those around a bad one."""
    try:
        yield table.columns(records.runs(), records.style.delimiters, len(records))
    except FieldError as error:
        if len(records) == 1:
            ((name, data),) = records
            on_bad(BadSample(position, name, error.problem, error.remedy, bytes(data)))
            return
        middle = len(records) // 2
        yield from _good_columns(records[:middle], table, position, on_bad)
        yield from _good_columns(records[middle:], table, position + middle, on_bad)


def open_csv(listing: Listing, selection: FieldSelection) -> Source:
    """Return the source, after one pass that counts the rows of all files; types come from rows here and there.

    Raises `SourceError` for files without a header or with different ones, and what cannot be unpacked or cut into
    rows; `FieldError` for a type that no cell has; `UsageError` where the package for Arrow is missing.
    """
    need("pyarrow.csv")
    infos, found = index_files(listing, _TABLES, _index)
    files, header = tuple(file for file, _ in found), found[0][1]
    for file, other in found:
        if other != header:
            here, first = file.content.where, files[0].content.where
            problem = f"{here} has the header {_shown(other)}, {first} {_shown(header)}"
            raise SourceError(problem, "give all files one header, or convert them on their own")
    names = pick(header, selection, listing.url)
    fields = _fields(listing.url, files, header, names, selection)
    digits = any(kind is not None and kind.dtype == "bool" for kind in selection.fields.values())
    table = Table(header, names, fields, selection.fill_values(fields, listing.url), digits)
    count, notes = sum(file.count for file in files), {"columns": names}
    return Source(
        listing.url, infos, fields, count, notes, lambda rows: partial(read_table, cut_rows(files, rows), table)
    )


def _shown(header: Sequence[str]) -> str:
    text = ",".join(header)
    return text if len(text) < 200 else f"{text[:200]}... ({len(header)} columns)"


def _index(stream: Stream, info: ObjectInfo) -> tuple[TextFile, tuple[str, ...]]:
    """Return one file, counted, and its header."""
    where, start = stream.content.where, begin_text(stream)
    head = stream.read(start, _HEADER_BYTES)
    complete = len(head) < _HEADER_BYTES - start
    found, _, _ = find_records(head, Style(_BLANK, _DELIMITERS.encode()), where, start, 1, last=complete)
    if not len(found):
        problem = "is empty" if complete else "has a first line that is far too long"
        raise SourceError(f"{where} {problem}: it should hold the columns' names", "write a header line")
    first, stop, line = found[0].tolist()
    record = head[first - start : stop - start]
    delimiter, header = _read_header(record, "\t" if inner_extension(info.path) == "tsv" else _DELIMITERS, where)
    style = Style(_BLANK, delimiter.encode())
    return index_text(stream, style, stop, line + max(1, record.count(b"\n"))), header


def _read_header(record: bytes, delimiters: str, where: str) -> tuple[str, tuple[str, ...]]:
    """Return the delimiter that makes most of the header, and the names. Raises `SourceError`."""
    try:
        text = record.decode()
        parsed = {sign: list(csv.reader(io.StringIO(text, newline=""), delimiter=sign)) for sign in delimiters}
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"the header of {where} cannot be read: {error}", "begin with a header in UTF-8") from None
    delimiter = max(delimiters, key=lambda sign: len(parsed[sign][0]))
    header = tuple(name.strip() for name in parsed[delimiter][0])
    if len(parsed[delimiter]) > 1:
        raise SourceError(f"{where} has lines that end in a carriage return alone", "end its lines in a line feed")
    if "" in header:
        problem = f"column {header.index('') + 1} of {where} has no name"
        raise SourceError(problem, "name it in the header, or leave it out (pandas: to_csv with index=False)")
    if all(_FLOAT.match(name.encode()) for name in header) and header != tuple(map(str, range(len(header)))):
        raise SourceError(f"{where} begins with the numbers {_shown(header)}", "put a line of column names before them")
    return delimiter, header


def _fields(
    url: str, files: Sequence[TextFile], header: tuple[str, ...], names: Mapping[str, str], selection: FieldSelection
) -> dict[str, Field]:
    """Return the field of each column: the selected one, else the one inferred from some rows."""
    for name, wanted in selection.fields.items():
        if wanted and (wanted.shape or wanted.kind == "ragged"):
            raise FieldError(f"field {name!r} is a cell of {url}, which cannot become {wanted}", "choose one value")
    rows = spread_rows(sum(file.count for file in files), _PROBED)
    if not len(rows):
        raise SourceError(f"{url} holds no row", "check the path")
    refused: list[BadSample] = []
    table = Table(header, names, dict.fromkeys(names, Field("bytes")))
    cells = read_table(cut_rows(files, rows), table, refused.append)
    if len(refused) == len(rows):
        raise SourceError(f"{refused[0].name}: {refused[0].problem}", refused[0].remedy)
    return {name: selection.fields.get(name) or infer_cells([bytes(cell) for cell in cells[name]]) for name in names}


def infer_cells(cells: Sequence[bytes]) -> Field:
    """Return the field that holds all of these cells and loses nothing; empty ones do not count."""
    filled = [cell.strip(b" \t") for cell in cells if cell.strip(b" \t")]
    if not filled:
        return Field("text")
    if _BOOLS.keys() >= set(cells):
        return Field("tensor", "bool")
    if all(_WHOLE.match(cell) for cell in filled):
        if max(map(len, filled)) > _LONGEST_WHOLE:
            return Field("text")
        dtype = integer_dtype(min(map(int, filled)), max(map(int, filled)))
        minus_zero = dtype == "uint64" and b"-0" in filled
        return Field("tensor", dtype) if dtype and not minus_zero else Field("text")
    numbers = Field("tensor", "float64")
    return numbers if all(_FLOAT.match(cell) and _is_held(cell, numbers) for cell in filled) else Field("text")


# --- lines of JSON

_BLANKS = " \t\r\n"
_LINES = ("jsonl", "ndjson")
_MAX_KEY = 1024  # characters of nested keys, joined: else a line would become far more than it is
_MAX_KEYS = 1 << 16  # that are seen again


def open_jsonl(listing: Listing, selection: FieldSelection) -> Source:
    """Return the source, after one pass that counts the lines of all files; blank ones are skipped.

    Raises `SourceError` for what cannot be unpacked or cut into lines, and what `open_records` raises.
    """
    style = Style(_BLANKS.encode())
    infos, files = index_files(listing, _LINES, lambda stream, _: index_text(stream, style, begin_text(stream)))
    parse, count = partial(parse_line, selection), sum(file.count for file in files)

    def cut(rows: NDArray[np.int64]) -> RecordPart:
        return partial(read_records, [partial(read_lines, cut_rows(files, rows))], parse)

    return open_records(listing.url, infos, count, cut, selection)


def read_lines(pieces: Sequence[BlockRows]) -> Iterator[tuple[str, memoryview]]:
    """Yield file and line of each record, and its bytes. Raises what `read_blocks` raises."""
    for records in read_blocks(pieces):
        yield from records


def parse_line(selection: FieldSelection, line: memoryview) -> dict[str, Any]:
    """Return the values of a line by key, those of nested objects by the keys joined with `_`. Raises ValueError."""
    try:
        values: dict[str, Any] = _DECODE(str(line, "utf-8").strip(_BLANKS))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, expected an object")
        for key, value in values.items():
            field = selection.fields.get(_name(key)) if selection.fields and type(value) in (dict, list) else None
            if field is not None and field.kind == "text":
                values[key] = _dump(key, value)
        if dict in map(type, values.values()):
            values = _object(list(_flat(values, "")))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error.reason} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from None
    for key, value in values.items():
        if type(value) in (int, float, list) and selection.wanted(_name(key)):
            values[key] = _to_array(key, value)
    return values


@lru_cache(_MAX_KEYS)
def _name(key: str) -> str:
    return field_names([key], "")[key]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {twice[:100]!r} twice")
    return values


def _refuse_constant(token: str) -> NoReturn:
    raise ValueError(f"it holds {token}, which is not a number in JSON")


_DECODE = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant).decode


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the values that are no objects, with their keys joined by `_`."""
    for inner, value in values.items():
        key = f"{prefix}{inner}"
        if len(key) > _MAX_KEY:
            raise ValueError(f"it has keys of more than {_MAX_KEY} characters, those of nested objects joined")
        if isinstance(value, dict):
            yield from _flat(value, f"{key}_")
        else:
            yield key, value


def _dump(key: str, value: Any) -> str:
    """Return a value as JSON again."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError(f"its {key!r} holds a number that float64 does not hold") from None


def _to_array(key: str, value: Any) -> NDArray[Any]:
    """Return a number, a list of numbers, or of such lists, as an array."""
    several = isinstance(value, list)
    if not several and -(2**63) <= value < 2**64:  # as nearly all are
        return np.asarray(value)
    try:
        array = settle(value, f"its {key!r}")
        if isinstance(array, np.ndarray) and not (array.dtype.kind == "f" and np.isinf(array).any()):
            return array
        problem = f"its {key!r} is a {'list that holds a ' if several else ''}number that float64 does not hold"
    except FieldError as error:
        problem = error.problem
    json_text = f"leave it out by naming the fields to keep with --fields, or keep it as JSON with {key}=text there"
    raise FieldError(problem, json_text if several else "store it as text")


FORMATS = (
    SourceFormat("csv", partial(mostly_texts, kinds=_TABLES), open_csv, nullable=True),
    SourceFormat("jsonl", partial(mostly_texts, kinds=_LINES), open_jsonl, nullable=True),
)
