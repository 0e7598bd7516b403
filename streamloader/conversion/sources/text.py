"""Text files, compressed or not: tables (.csv and .tsv) and lines of JSON (.jsonl and .ndjson).

One pass counts the records of a file and indexes the position of some of them. A record is a line; line ends within
quotes do not end a record of CSV (RFC 4180). See formats/csv/MAPPING.md and formats/jsonl/MAPPING.md.
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
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.arrays import pick
from streamloader.conversion.sources.arrow_types import numbers_of
from streamloader.conversion.sources.base import (
    MAX_DECODED,
    BadSample,
    Fragment,
    OnBad,
    RowSource,
    check_shard,
    split_rows,
    spread_rows,
)
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat, integer_dtype, settle
from streamloader.conversion.sources.files import Listing, field_names, inner_extension, require
from streamloader.conversion.sources.ranged_io import CHANGED, READ_THREADS, Content, Stream, open_content, read_spans
from streamloader.conversion.sources.records import RecordFragment, open_records, read_records
from streamloader.errors import FieldError, SourceChangedError, SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import to_column
from streamloader.format.writer import RowBuffer
from streamloader.storage.objects import ObjectInfo
from streamloader.storage.optional import arrow_csv, need, pa, pc
from streamloader.storage.process import run_all

MAX_RECORD = 64 << 20  # bytes: records are held in memory, and parsing takes several times as much
_NEWLINE, _QUOTE = ord("\n"), ord('"')

Bounds = NDArray[np.int64]  # (records, 3): first byte, the byte after the line end, and the line number
Found = tuple[Bounds, int, int]  # some records, and the byte and the line where the next record begins


@dataclass(frozen=True)
class Style:
    """The syntax of records. Lines that consist of `blank` characters are skipped.

    With `delimiters`, a quote at the beginning of a line or after a delimiter opens a cell, which may contain line
    ends up to the closing quote.
    """

    blank: bytes
    delimiters: bytes = b""


def find_records(text: bytes | memoryview, style: Style, where: str, start: int, line: int, *, last: bool) -> Found:
    """Return the records of a text, and the byte and the line where the next record begins.

    The text begins with a record, at byte `start` and line `line` of the file `where`. Only the `last` text of a file
    may end without a line end. Raises `SourceError` for a record that is too long, and for an unclosed quote.
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
    return bounds[:count][filled], int(bounds[-1, 1 if last else 0]), int(bounds[-1, 2]) + (count == len(bounds))


def find_all_records(blocks: Iterable[bytes], style: Style, where: str, start: int, line: int) -> Iterator[Found]:
    """Yield the results of `find_records` for a text in blocks of any sizes."""
    text, enough = b"", 0
    for block in chain(blocks, [None]):
        text += block or b""
        if block is None or len(text) >= enough:
            bounds, stop, line = find_records(text, style, where, start, line, last=block is None)
            text, start = text[stop - start :], stop
            enough = min(2 * len(text), MAX_RECORD + 1)  # avoids scanning a long record again for each block
            yield bounds, start, line


def _cell_quotes(array: NDArray[np.uint8], style: Style) -> NDArray[np.int64]:
    """Return the positions of quotes that open or close a cell; other quotes are part of unquoted cells."""
    if not style.delimiters:
        return np.empty(0, np.int64)
    quotes = np.flatnonzero(array == _QUOTE)
    openers = [*style.delimiters, _NEWLINE]
    opening = quotes[::2]
    before = np.where(opening > 0, array[opening - 1], _NEWLINE)
    if np.isin(before, [*openers, _QUOTE]).all():
        return quotes
    positions: list[int] = []
    for at in quotes.tolist():
        closes = len(positions) % 2 == 1
        if closes or at == 0 or int(array[at - 1]) in openers or (positions and at == positions[-1] + 1):
            positions.append(at)
    return np.array(positions, np.int64)


Indexed = TypeVar("Indexed")
MARK_BYTES = 256 << 10  # between marks: what reading a single record reads; a mark takes 24 bytes
_COMPANIONS = frozenset({"", "md", "txt", "rst", "json", "yaml", "yml", "csv", "tsv", "jsonl", "ndjson"})
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def mostly_texts(listing: Listing, kinds: Collection[str]) -> bool:
    """Return whether there are files with these extensions, and no data files for which they may be labels."""
    extensions = listing.inner_extensions()
    return bool(extensions & set(kinds)) and extensions <= _COMPANIONS


@dataclass(frozen=True, eq=False)
class TextFile:
    """A file of records. `marks` (n, 3) has number, first byte and line of a record every `MARK_BYTES`; the last mark
    is that of a record after the end.
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
    """Return the files with these extensions, and the results of `index`. Raises `SourceError` if there is none."""
    infos = require(listing.of_inner(*kinds), listing, *kinds)
    store, ahead = listing.store, max(1, READ_THREADS // len(infos))
    return infos, run_all(lambda info: index(Stream(open_content(store, info), ahead), info), infos, READ_THREADS)


def begin_text(stream: Stream) -> int:
    """Return the position of the text, after a byte order mark. Raises `SourceError` for UTF-16."""
    head = stream.read(0, len(_BOM))
    if head.startswith(_UTF16):
        raise SourceError(f"{stream.content.where} is text in UTF-16", "write it in UTF-8")
    return len(_BOM) if head == _BOM else 0


def index_text(stream: Stream, style: Style, start: int, line: int = 1) -> TextFile:
    """Return the file with its index; the records begin at byte `start`, in line `line`.

    Holds a block and a record at a time. Raises `SourceError` for a damaged file, and what `find_records` raises.
    """
    marks = [np.array([[0, start, line]], np.int64)]
    count, last = 0, start // MARK_BYTES
    blocks = (block for _, block in stream.blocks(start))
    for bounds, _, next_line in find_all_records(blocks, style, stream.content.where, start, line):
        numbers = bounds[:, 0] // MARK_BYTES
        new = np.flatnonzero(np.diff(numbers, prepend=last))
        new = new[new + count > 0]  # the first record has a mark
        marks.append(np.stack((count + new, bounds[new, 0], bounds[new, 2]), axis=1))
        count, last = count + len(bounds), int(numbers[-1]) if len(bounds) else last
        end = np.array([[count, stream.at, next_line]], np.int64)
    return TextFile(replace(stream.content, size=stream.at), style, np.concatenate([*marks, end]))


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Some records of a file between two marks: number, first byte and line of a record."""

    content: Content
    style: Style
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    rows: NDArray[np.int64]


def cut_rows(files: Sequence[TextFile], rows: NDArray[np.int64]) -> list[BlockRows]:
    """Return the given rows of the concatenated files, block by block."""
    pieces: list[BlockRows] = []
    for number, _, within in split_rows([file.count for file in files], rows):
        file = files[number]
        for block, _, selected in split_rows(np.diff(file.marks[:, 0]), within):
            first, last = map(tuple, file.marks[block : block + 2].tolist())
            pieces.append(BlockRows(file.content, file.style, first, last, selected))
    return pieces


@dataclass(frozen=True, eq=False)
class Records:
    """Some records of a file: their `bounds` in the bytes `data`, which slices share."""

    where: str
    style: Style
    data: memoryview
    bounds: Bounds

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, selected: slice) -> Records:
        return replace(self, bounds=self.bounds[selected])

    def __iter__(self) -> Iterator[tuple[str, memoryview]]:
        """Yield file and line of each record, and its bytes with the line end, if it has one."""
        return ((f"{self.where}:{line}", self.data[start:stop]) for start, stop, line in self.bounds.tolist())

    def runs(self) -> list[memoryview]:
        """Return the bytes of contiguous records together: to join single records takes longer than to parse them."""
        starts, stops = self.bounds[:, 0], self.bounds[:, 1]
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        ends = zip(starts[[0, *breaks]].tolist(), stops[[*(breaks - 1), -1]].tolist(), strict=True)
        return [self.data[start:stop] for start, stop in ends]


def read_blocks(pieces: Sequence[BlockRows]) -> Iterator[Records]:
    """Yield the records of all pieces in order, block by block.

    Raises `SourceChangedError` if their number has changed since the file was indexed, and what `read_spans` raises.
    """
    files = groupby(pieces, lambda piece: piece.content)
    spans = [(content, *np.array([(piece.first[1], piece.last[1]) for piece in group]).T) for content, group in files]
    for piece, data in zip(pieces, read_spans(spans), strict=True):
        (number, _, line), where = piece.first, piece.content.where
        bounds, _, _ = find_records(data, piece.style, where, 0, line, last=True)
        if len(bounds) != piece.last[0] - number:
            problem = f"{where} has other records than when it was scanned, from line {line} on"
            raise SourceChangedError(problem, CHANGED)
        yield Records(where, piece.style, data, bounds[piece.rows])


# --- tables: Arrow splits rows into cells and parses them, a block at a time

# not 007, which would lose its zeros as a number
_WHOLE = re.compile(rb"-?(?:0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(
    rb"[-+]?(?:(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?|nan|inf|infinity)\Z", re.IGNORECASE
)
_LONGEST_WHOLE = 20  # characters of an integer of 64 bits
_BOOLS = {b"true": True, b"True": True, b"TRUE": True, b"false": False, b"False": False, b"FALSE": False}
_DIGITS = {b"1": True, b"0": False}
_SHOWN = 40
_TABLES = ("csv", "tsv")
_BLANK = b"\r\n"
_DELIMITERS = ",\t;|"
_HEADER_BYTES = 512 << 10  # the longest header: less than a block of a stream
_PROBED = 1024  # rows from which the types of columns are inferred


@dataclass(frozen=True)
class Table:
    """The columns of a table: the complete `header`, and the `originals` in it of the columns that are read, by field.

    `fill` has the values of empty cells, by field; for a map function, `mapped`, they are None. With `digits`, 1 and 0
    are bools too. `max_decoded` is that of the selection.
    """

    header: tuple[str, ...]
    originals: Mapping[str, str]
    fields: Mapping[str, Field]
    fill: Mapping[str, Any] = field(default_factory=dict)
    digits: bool = True
    mapped: bool = False
    max_decoded: int = MAX_DECODED

    def columns(self, records: Sequence[bytes | memoryview], delimiter: bytes, count: int) -> dict[str, Column]:
        """Return the columns of `count` records, which may be concatenated.

        Raises `FieldError` unless every record is a row that fits the fields. Its problem and remedy describe the
        first record, so they are exact for a single one.
        """
        try:
            cells = self._cells(records, delimiter, count)
        except ValueError as error:  # Arrow's errors are subclasses
            remedy = f"give each row one cell a column; quote cells with {delimiter.decode()!r}, quotes or line ends"
            raise FieldError(f"it cannot be cut into cells: {str(error).strip()}", remedy) from None
        columns: dict[str, Column] = {}
        for name, column in cells.items():
            try:
                columns[name] = self._column(name, column)
            except ValueError:
                empty = pc.equal(pc.binary_length(column), 0)
                if not self.mapped or not pc.any(empty).as_py():
                    raise self._cell_error(name, column[0].as_py()) from None
                filled = iter(self._column(name, column.filter(pc.invert(empty))))
                values: list[Any] = [None if skip else next(filled) for skip in empty.to_pylist()]
                columns[name] = values
        return columns

    def _cells(self, records: Sequence[bytes | memoryview], delimiter: bytes, count: int) -> dict[str, pa.Array]:
        data = b"".join([_BOM, *records, b"\n"])  # Arrow would remove a mark of the data; it ignores empty lines
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
        target = self.fields[name]
        if name in self.fill:
            fill = self.fill[name]
            text = fill if isinstance(fill, bytes) else str(fill).encode()
            cells = pc.if_else(pc.equal(pc.binary_length(cells), 0), pa.scalar(text, pa.binary()), cells)
        if not target.fixed:
            if target.kind == "text":
                cells.cast(pa.string())  # checks UTF-8
            values: list[bytes] = cells.to_pylist()
            return values
        if target.dtype == "bool":
            words = _BOOLS | _DIGITS if self.digits else _BOOLS
            indices = pc.index_in(cells, value_set=pa.array(words))
            if indices.null_count:
                raise ValueError("a cell that is not a bool")
            bools: NDArray[np.bool_] = np.array(list(words.values()))[numbers_of(indices)]
            return bools
        floats = target.dtype.startswith("float")  # parsed as float64: Arrow makes large values of float32 infinite
        kind = pa.float64() if floats else getattr(pa, target.dtype)()
        numbers = numbers_of(pc.ascii_trim(cells.view(pa.string()), " \t").cast(kind))
        # smaller whole numbers are all exact
        large = floats and bool((np.abs(numbers) >= 1 << (np.finfo(target.dtype).nmant + 1)).any())
        if large and not all(_fits(cell, target) for cell in cells.to_pylist()):
            raise ValueError(f"a number that {target} does not hold")
        return to_column(name, target, numbers, 0)

    def _cell_error(self, name: str, cell: bytes) -> FieldError:
        target = self.fields[name]
        shown = cell[:_SHOWN].decode("utf-8", "replace") + ("..." if len(cell) > _SHOWN else "")
        other = "float64" if target.dtype != "float64" and _FLOAT.match(cell.strip()) else "text"
        problem, remedy = f"holds {shown!r}, which is not {target}", f"correct it, or say {name}={other} in fields="
        if target.kind == "text":
            problem, remedy = "is not UTF-8 text", f"write it in UTF-8, or keep its bytes with {name}=bytes in fields="
        elif not cell.strip():
            problem = "is empty"
            remedy = f'give empty cells a value with fill={{"{name}": VALUE}} (--fill {name}=VALUE), or keep them'
            remedy += f" with {name}=text in fields="
        elif target.dtype.startswith("float") and not _fits(cell, target):
            problem, remedy = f"holds {shown}, which {target} does not hold exactly", f"say {name}=text in fields="
        return FieldError(f"its column {self.originals[name]!r} {problem}", remedy)


def _fits(cell: bytes, field: Field) -> bool:
    """Return whether a float field holds the number in a cell: whole numbers exactly, others without overflow."""
    try:
        number = float(cell)
    except ValueError:
        return True
    with np.errstate(over="ignore"):
        value = float(np.dtype(field.dtype).type(number))
    digits = cell.strip().lstrip(b"+-0")
    if digits.isdigit():
        return isfinite(value) and abs(int(value)) == int(digits)
    return not isinf(value) or b"inf" in cell.lower()


def read_table(pieces: Sequence[BlockRows], table: Table, on_bad: OnBad) -> dict[str, Column]:
    """Return one column for each field; a row that does not fit the header and the fields is bad.

    Raises `SourceError`, `SourceChangedError`, or `UsageError` if pyarrow is not installed.
    """
    rows = RowBuffer(table.fields, sum(len(piece.rows) for piece in pieces), table.mapped)
    position = 0
    for records in read_blocks(pieces):
        for columns in _good_columns(records, table, position, on_bad):
            rows.extend(columns, 0, len(next(iter(columns.values()))))
            check_shard(rows.list_bytes, records.where, table.max_decoded)
        position += len(records)
    return rows.columns()


def _good_columns(records: Records, table: Table, position: int, on_bad: OnBad) -> Iterator[dict[str, Column]]:
    """Yield the columns of the good records; a bad one is found by bisection."""
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


def open_csv(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source, after one pass that counts the rows of all files; types are inferred from some rows.

    Raises `SourceError` for files without a header or with different headers, and for files that cannot be decompressed
    or split into rows; `FieldError` for a type that a cell cannot have; `UsageError` if pyarrow is not installed.
    """
    need("pyarrow.csv")
    infos, indexed = index_files(listing, _TABLES, _index)
    files, header = tuple(file for file, _ in indexed), indexed[0][1]
    for file, names in indexed:
        if names != header:
            where, first = file.content.where, files[0].content.where
            problem = f"{where} has the header {_shown(names)}, {first} {_shown(header)}"
            raise SourceError(problem, "give all files one header, or convert them on their own")
    originals = pick(header, selection, listing.url)
    raw = Table(header, originals, dict.fromkeys(originals, Field("bytes")))
    fields = _fields(listing.url, files, raw, selection)
    digits = any(field is not None and field.dtype == "bool" for field in selection.fields.values())
    fill = selection.fill_values(fields, listing.url)
    table = Table(header, originals, fields, fill, digits, selection.mapped, selection.max_decoded)

    def fragment(rows: NDArray[np.int64]) -> Fragment:
        return partial(read_table, cut_rows(files, rows), table)

    return RowSource(listing.url, infos, fields, sum(file.count for file in files), {"columns": originals}, fragment)


def _shown(header: Sequence[str]) -> str:
    text = ",".join(header)
    return text if len(text) < 200 else f"{text[:200]}... ({len(header)} columns)"


def _index(stream: Stream, info: ObjectInfo) -> tuple[TextFile, tuple[str, ...]]:
    """Return a file with its index, and its header."""
    where, start = stream.content.where, begin_text(stream)
    head = stream.read(start, _HEADER_BYTES)
    complete = len(head) < _HEADER_BYTES - start
    bounds, _, _ = find_records(head, Style(_BLANK, _DELIMITERS.encode()), where, start, 1, last=complete)
    if not len(bounds):
        problem = "is empty" if complete else "has a first line that is far too long"
        raise SourceError(f"{where} {problem}: it should hold the columns' names", "write a header line")
    first, stop, line = bounds[0].tolist()
    record = head[first - start : stop - start]
    delimiter, header = _read_header(record, "\t" if inner_extension(info.path) == "tsv" else _DELIMITERS, where)
    return index_text(stream, Style(_BLANK, delimiter.encode()), stop, line + max(1, record.count(b"\n"))), header


def _read_header(record: bytes, delimiters: str, where: str) -> tuple[str, tuple[str, ...]]:
    """Return the delimiter that splits the header into most cells, and the names. Raises `SourceError`."""
    try:
        text = record.decode()
        parsed = {char: list(csv.reader(io.StringIO(text, newline=""), delimiter=char)) for char in delimiters}
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"the header of {where} cannot be read: {error}", "begin with a header in UTF-8") from None
    delimiter = max(delimiters, key=lambda char: len(parsed[char][0]))
    header = tuple(name.strip() for name in parsed[delimiter][0])
    if len(parsed[delimiter]) > 1:
        raise SourceError(f"{where} has lines that end in a carriage return alone", "end its lines in a line feed")
    if "" in header:
        problem = f"column {header.index('') + 1} of {where} has no name"
        raise SourceError(problem, "name it in the header, or leave it out (pandas: to_csv with index=False)")
    if all(_FLOAT.match(name.encode()) for name in header) and header != tuple(map(str, range(len(header)))):
        raise SourceError(f"{where} begins with the numbers {_shown(header)}", "put a line of column names before them")
    return delimiter, header


def _fields(url: str, files: Sequence[TextFile], raw: Table, selection: FieldSelection) -> dict[str, Field]:
    """Return the field of each column: the selected one, else the one inferred from some rows of the `raw` table."""
    for name, selected in selection.fields.items():
        if selected and (selected.shape or selected.kind == "ragged"):
            raise FieldError(f"field {name!r} is a cell of {url}, which cannot become {selected}", "choose one value")
    rows = spread_rows(sum(file.count for file in files), _PROBED)
    if not len(rows):
        raise SourceError(f"{url} holds no row", "check the path")
    bad: list[BadSample] = []
    cells = read_table(cut_rows(files, rows), raw, bad.append)
    if len(bad) == len(rows):
        raise SourceError(f"{bad[0].name}: {bad[0].problem}", bad[0].remedy)
    return {name: selection.fields.get(name) or infer_cells(list(map(bytes, cells[name]))) for name in raw.fields}


def infer_cells(cells: Sequence[bytes]) -> Field:
    """Return the field that holds all cells without loss; empty cells are ignored."""
    filled = [cell.strip(b" \t") for cell in cells if cell.strip(b" \t")]
    if not filled:
        return Field("text")
    if _BOOLS.keys() >= set(cells):
        return Field("tensor", "bool")
    if all(_WHOLE.match(cell) for cell in filled):
        integers = [int(cell) for cell in filled if len(cell) <= _LONGEST_WHOLE]
        dtype = integer_dtype(min(integers), max(integers)) if len(integers) == len(filled) else ""
        minus_zero = dtype == "uint64" and b"-0" in filled  # which Arrow does not parse as unsigned
        return Field("tensor", dtype) if dtype and not minus_zero else Field("text")
    numbers = Field("tensor", "float64")
    return numbers if all(_FLOAT.match(cell) and _fits(cell, numbers) for cell in filled) else Field("text")


# --- lines of JSON

_BLANKS = " \t\r\n"
_LINES = ("jsonl", "ndjson")
_MAX_KEY = 1024  # characters of joined nested keys, whose total may be far larger than the line
_MAX_KEYS = 1 << 16  # whose field names are cached


def open_jsonl(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source, after one pass that counts the lines of all files; blank lines are skipped.

    Raises `SourceError` for files that cannot be decompressed or split into lines, and what `open_records` raises.
    """
    style = Style(_BLANKS.encode())
    infos, files = index_files(listing, _LINES, lambda stream, _: index_text(stream, style, begin_text(stream)))
    parse, count = partial(parse_line, selection), sum(file.count for file in files)

    def cut(rows: NDArray[np.int64]) -> RecordFragment:
        return partial(read_records, [partial(read_lines, cut_rows(files, rows))], parse)

    return open_records(listing.url, infos, count, cut, selection)


def read_lines(pieces: Sequence[BlockRows]) -> Iterator[tuple[str, memoryview]]:
    """Yield file and line of each record, and its bytes. Raises as `read_blocks`."""
    return chain.from_iterable(read_blocks(pieces))


def parse_line(selection: FieldSelection, line: memoryview) -> dict[str, Any]:
    """Return the values of a line by key; keys of nested objects are joined with `_`. Raises ValueError."""
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
        if type(value) in (int, float, list) and selection.includes(_name(key)) and not selection.mapped:
            values[key] = _to_array(key, value)
    return values


@lru_cache(_MAX_KEYS)
def _name(key: str) -> str:
    return field_names([key], "")[key]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {key[:100]!r} twice")
    return values


def _refuse_constant(token: str) -> NoReturn:
    raise ValueError(f"it holds {token}, which is not a number in JSON")


_DECODE = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant).decode


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the values that are not objects, with their keys joined by `_`."""
    for inner, value in values.items():
        key = f"{prefix}{inner}"
        if len(key) > _MAX_KEY:
            raise ValueError(f"it has keys of more than {_MAX_KEY} characters, those of nested objects joined")
        if isinstance(value, dict):
            yield from _flat(value, f"{key}_")
        else:
            yield key, value


def _dump(key: str, value: Any) -> str:
    """Return a value as JSON text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError(f"its {key!r} holds a number that float64 does not hold") from None


def _to_array(key: str, value: Any) -> NDArray[Any]:
    """Return a number or nested lists of numbers as an array."""
    is_list = isinstance(value, list)
    if not is_list and -(2**63) <= value < 2**64:  # most numbers
        return np.asarray(value)
    try:
        array = settle(value, f"its {key!r}")
        if isinstance(array, np.ndarray) and not (array.dtype.kind == "f" and np.isinf(array).any()):
            return array
        problem = f"its {key!r} is a {'list that holds a ' if is_list else ''}number that float64 does not hold"
    except FieldError as error:
        problem = error.problem
    json_text = f"leave it out by naming the fields to keep with fields=, or keep it as JSON with {key}=text there"
    raise FieldError(problem, json_text if is_list else "store it as text")


FORMATS = (
    SourceFormat("csv", partial(mostly_texts, kinds=_TABLES), open_csv, nullable=True),
    SourceFormat("jsonl", partial(mostly_texts, kinds=_LINES), open_jsonl, nullable=True),
)
