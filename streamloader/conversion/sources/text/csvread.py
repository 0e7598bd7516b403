"""Rows of CSV become columns: parsed by Arrow a block at a time; a row that does not parse is looked for and named."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, isinf
from typing import Any

import numpy as np

from streamloader.conversion.sources.base import BadSample, Refuse
from streamloader.conversion.sources.needs import need
from streamloader.conversion.sources.text.linesindex import Block, FileRows, read_blocks
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.rows import Rows
from streamloader.format.values import to_column

# 007 is a code: as a number it would lose its zeros
WHOLE = re.compile(rb"-?(?:0|[1-9][0-9]*)\Z")
TRUE, FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_BOM = b"\xef\xbb\xbf"  # Arrow takes one from the beginning of what it parses: it must not be a cell's own
_SHOWN = 40


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

    def only(self, name: str) -> Table:
        """Return it with one field alone."""
        fill = {name: self.fill[name]} if name in self.fill else {}
        return Table(self.header, {name: self.originals[name]}, {name: self.fields[name]}, fill, self.digits)


@dataclass(frozen=True, eq=False)
class CsvPart:
    """Some rows of some files, ascending."""

    pieces: tuple[FileRows, ...]
    table: Table

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return one column a field; a row with other cells than the header and the fields say is refused.

        Raises `SourceError`, `SourceChangedError`, or `UsageError` where the package for Arrow is missing.
        """
        rows = Rows(self.table.fields, sum(len(piece.rows) for piece in self.pieces))
        parser = Parser(self.table)
        for block in read_blocks(self.pieces):
            for columns in _columns(parser, block, (0, len(block)), refuse):
                rows.extend(columns, 0, len(next(iter(columns.values()))))
        return rows.columns()


def _columns(parser: Parser, block: Block, rows: tuple[int, int], refuse: Refuse) -> Iterator[dict[str, Column]]:
    """Yield the columns of rows [first, stop): of all, or of halves and halves of those around what does not parse."""
    first, stop = rows
    try:
        columns = parser.parse(block.records(first, stop), block.style.delimiters, stop - first)
    except ValueError:  # Arrow's errors are some, too
        if stop - first == 1:
            problem, remedy = parser.diagnose(block.record(first), block.style.delimiters)
            refuse(BadSample(block.position + first, block.name(first), problem, remedy, block.record(first)))
            return
        middle = (first + stop) // 2
        yield from _columns(parser, block, (first, middle), refuse)
        yield from _columns(parser, block, (middle, stop), refuse)
    else:
        yield columns


class Parser:
    """Arrow's parser, told what the columns are. Raises `UsageError` where its package is missing."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._arrow, self._csv = need("pyarrow", "arrow"), need("pyarrow.csv", "arrow")
        self._options = self._csv.ConvertOptions(
            column_types={table.originals[name]: self._type(field) for name, field in table.fields.items()},
            include_columns=list(table.originals.values()),
            null_values=[""] if table.fill else [],
            strings_can_be_null=bool(table.fill),
            true_values=[*TRUE, "1"] if table.digits else TRUE,
            false_values=[*FALSE, "0"] if table.digits else FALSE,
        )

    def parse(self, records: Iterable[bytes | memoryview], delimiter: bytes, count: int) -> dict[str, Column]:
        """Return the columns of `count` records. Raises ValueError unless each is a row that fits the fields."""
        data = b"".join([_BOM, *records, b"\n"])  # of empty lines Arrow takes no notice
        options = self._csv.ReadOptions(
            use_threads=False, block_size=len(data) + 1, column_names=list(self._table.header)
        )
        parsing = self._csv.ParseOptions(delimiter=delimiter.decode(), newlines_in_values=True)
        found = self._csv.read_csv(self._arrow.BufferReader(data), options, parsing, self._options)
        if found.num_rows != count:
            raise ValueError(f"{found.num_rows} rows")
        columns = {name: self._column(name, found.column(original)) for name, original in self._table.originals.items()}
        floats = [name for name, column in columns.items() if _is_large(column)]
        if floats:
            self._check_whole_numbers(floats, data, options, parsing)
        return columns

    def _check_whole_numbers(self, names: Iterable[str], data: bytes, options: Any, parsing: Any) -> None:
        """Raise ValueError for a cell in a float column that is a whole number which the column does not hold."""
        originals = {name: self._table.originals[name] for name in names}
        texts = self._csv.ConvertOptions(
            column_types=dict.fromkeys(originals.values(), self._arrow.binary()),
            include_columns=list(originals.values()),
        )
        cells = self._csv.read_csv(self._arrow.BufferReader(data), options, parsing, texts)
        for name, original in originals.items():
            for cell in cells.column(original).to_pylist():
                if not is_held(cell, self._table.fields[name]):
                    raise ValueError(f"{cell!r} in {name}")

    def diagnose(self, record: bytes, delimiter: bytes) -> tuple[str, str]:
        """Return what is wrong with a record, and what to do."""
        header = self._table.header
        every = {str(number): name for number, name in enumerate(header)}
        cells = Parser(Table(header, every, dict.fromkeys(every, Field("bytes"))))
        try:
            found = cells.parse([record], delimiter, 1)
        except ValueError:
            return _shape_problem(record, delimiter, len(header))
        for name, original in self._table.originals.items():
            try:
                Parser(self._table.only(name)).parse([record], delimiter, 1)
            except ValueError:
                return _cell_problem(bytes(found[str(header.index(original))][0]), name, self._table)
        return "it cannot be parsed", "repair or remove it"

    def _type(self, field: Field) -> Any:
        if not field.fixed:
            return self._arrow.string() if field.kind == "text" else self._arrow.binary()
        if field.dtype == "bool":
            return self._arrow.bool_()
        # Arrow has no float16 here, and of a float32 that is too large it makes infinity
        return self._arrow.float64() if field.dtype.startswith("float") else getattr(self._arrow, field.dtype)()

    def _column(self, name: str, column: Any) -> Column:
        field, fill = self._table.fields[name], self._table.fill.get(name)
        if not field.fixed:
            values: list[bytes] = column.cast(self._arrow.binary()).to_pylist()
            fill = fill.encode() if isinstance(fill, str) else fill or b""
            return [fill if value is None else value for value in values] if column.null_count else values
        if column.null_count:
            if fill is None:
                raise ValueError(f"an empty cell in {name}")
            column = column.fill_null(self._arrow.scalar(fill.item(), column.type))
        return to_column(name, field, column.to_numpy(), 0)


def _is_large(column: Column) -> bool:
    """Return whether a column has floats so large that whole numbers near them may not be among its values."""
    if not isinstance(column, np.ndarray) or column.dtype.kind != "f":
        return False
    with np.errstate(invalid="ignore"):
        return bool((np.abs(column) >= 1 << (np.finfo(column.dtype).nmant + 1)).any())


def is_held(cell: bytes, field: Field) -> bool:
    """Return whether a float field holds the number in a cell: a whole one exactly, others not as infinity."""
    number = cell.strip()
    if not _is_float(number):
        return True
    with np.errstate(over="ignore"):
        value = float(np.dtype(field.dtype).type(float(number)))
    if WHOLE.match(number):
        return isfinite(value) and int(value) == int(number)
    return not isinf(value) or b"inf" in number.lower()


def _shape_problem(record: bytes, delimiter: bytes, count: int) -> tuple[str, str]:
    sign = delimiter.decode()
    remedy = f"give each row one cell a column; what has a {sign!r}, a quote or a line end in it stands in quotes"
    try:
        rows = list(csv.reader(io.StringIO(record.decode("utf-8", "replace"), newline=""), delimiter=sign))
    except csv.Error:
        rows = []
    if len(rows) == 1:
        return f"it has {len(rows[0])} cells, the header {count}", remedy
    return "it cannot be cut into cells, or a carriage return alone ends a line in it", remedy


def _cell_problem(cell: bytes, name: str, table: Table) -> tuple[str, str]:
    column, field = f"its column {table.originals[name]!r}", table.fields[name]
    if field.kind == "text":
        return f"{column} is no UTF-8 text", f"write it in UTF-8, or keep its bytes with {name}=bytes in --fields"
    if not cell.strip():
        remedy = f"give empty cells a value with --fill {name}=VALUE, or keep the column as text with {name}=text in "
        return f"{column} is empty", f"{remedy}--fields"
    shown = cell[:_SHOWN].decode("utf-8", "replace") + ("..." if len(cell) > _SHOWN else "")
    if field.dtype.startswith("float") and not is_held(cell, field):
        return f"{column} holds {shown}, which {field} does not hold exactly", f"say {name}=text in --fields"
    other = "float64" if field.dtype != "float64" and _is_float(cell) else "text"
    return f"{column} holds {shown!r}, which is no {field}", f"correct it, or say {name}={other} in --fields"


def _is_float(cell: bytes) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
