"""Tables of text: .csv and .tsv, compressed ones too; each row is a sample. See formats/csv/MAPPING.md."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import READ_THREADS, BadSample, spread_rows
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.conversion.sources.needs import need
from streamloader.conversion.sources.streams import holding, inner_extension, open_stream
from streamloader.conversion.sources.text.csvread import FALSE, TRUE, WHOLE, CsvPart, Table, is_held
from streamloader.conversion.sources.text.linesindex import (
    TextFile,
    begin_text,
    cut_rows,
    index_text,
    mostly_texts,
)
from streamloader.conversion.sources.text.linesplit import Splitter, Style
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import FieldError, SourceError
from streamloader.format.manifest import Field
from streamloader.format.threads import run_all
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "csv"
_KINDS = ("csv", "tsv")
_DELIMITERS = ",\t;|"
_HEADER_BYTES = 512 << 10  # of a header at most: less than a block of a stream
_PROBED = 1024  # rows that tell what the columns hold
_WORDS = frozenset(word.encode() for word in (*TRUE, *FALSE))
_FLOAT = re.compile(
    rb"[-+]?(?:(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?|nan|inf|infinity)\Z", re.IGNORECASE
)


def matches(listing: Listing) -> bool:
    """Return whether the listing has tables, and nothing beside them that they may only be labels of."""
    return mostly_texts(listing, _KINDS)


def open_source(listing: Listing, wish: Wish) -> CsvFiles:
    """Return the source, after one pass that counts the rows of all files; types come from rows here and there.

    Raises `SourceError` for files without a header or with different ones, and what cannot be unpacked or cut into
    rows; `FieldError` for a type that no cell has; `UsageError` where the package for Arrow is missing.
    """
    need("pyarrow.csv", "arrow")
    infos = holding(listing, *_KINDS)
    if not infos:
        raise SourceError(f"{listing.url} holds no .csv or .tsv", "give a file, a folder, or a glob")
    ahead = max(1, READ_THREADS // len(infos))
    found = run_all(partial(_index, listing.store, ahead), infos, READ_THREADS)
    files, header = tuple(file for file, _ in found), found[0][1]
    for file, other in found:
        if other != header:
            raise SourceError(
                f"{file.content.where} has the header {_shown(other)}, {files[0].content.where} {_shown(header)}",
                "give all files one header, or convert them on their own",
            )
    names = {name: original for original, name in field_names(list(header), listing.url).items()}
    names = {name: names[name] for name in wish.fields if name in names} or names
    fields = _fields(listing.url, files, header, names, wish)
    digits = any(kind is not None and kind.dtype == "bool" for kind in wish.fields.values())
    table = Table(header, names, fields, wish.fill_values(fields, listing.url), digits)
    return CsvFiles(listing.url, infos, files, table)


def _shown(header: Sequence[str]) -> str:
    text = ",".join(header)
    return text if len(text) < 200 else f"{text[:200]}... ({len(header)} columns)"


def _index(store: Store, ahead: int, info: ObjectInfo) -> tuple[TextFile, tuple[str, ...]]:
    """Return one file, counted, and its header."""
    stream = open_stream(store, info, ahead)
    content = stream.content
    start = begin_text(stream)
    head = stream.read(start, _HEADER_BYTES)
    splitter = Splitter(Style(b"\r\n", True, _DELIMITERS.encode()), content.where, start)
    found = splitter.feed(head)
    whole = len(head) < _HEADER_BYTES - start
    if not len(found) and whole:
        found = splitter.finish()
    if not len(found):
        problem = "is empty" if whole else "has a first line that is far too long"
        raise SourceError(f"{content.where} {problem}: it should hold the columns' names", "write a header line")
    stop, line = int(found.stops[0]), int(found.lines[0])
    record = head[int(found.starts[0]) - start : stop - start]
    delimiter, header = _read_header(
        record, "\t" if inner_extension(info.path) == "tsv" else _DELIMITERS, content.where
    )
    next_line = line + max(1, record.count(b"\n"))
    return index_text(stream, Style(b"\r\n", True, delimiter.encode()), stop, next_line), header


def _read_header(record: bytes, delimiters: str, where: str) -> tuple[str, tuple[str, ...]]:
    """Return the delimiter that makes most of the header, and the names. Raises `SourceError`."""
    try:
        text = record.decode()
        parsed = {sign: list(csv.reader(io.StringIO(text, newline=""), delimiter=sign)) for sign in delimiters}
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(
            f"the header of {where} cannot be read: {error}", "begin with one of names, in UTF-8"
        ) from None
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
    url: str, files: Sequence[TextFile], header: tuple[str, ...], names: Mapping[str, str], wish: Wish
) -> dict[str, Field]:
    """Return the field of each column: what is wished, else what some rows tell."""
    for name, field in wish.fields.items():
        if field and (field.shape or field.kind == "ragged"):
            raise FieldError(f"field {name!r} is a cell of {url}, which cannot become {field}", "choose one value")
    rows = spread_rows(sum(file.count for file in files), _PROBED)
    if not len(rows):
        raise SourceError(f"{url} holds no row", "check the path")
    every = Table(header, names, dict.fromkeys(names, Field("bytes")))
    refused: list[BadSample] = []
    cells = CsvPart(cut_rows(files, rows), every).read(refused.append)
    if len(refused) == len(rows):
        raise SourceError(f"{refused[0].name}: {refused[0].problem}", refused[0].remedy)
    return {name: wish.fields.get(name) or _infer([bytes(cell) for cell in cells[name]]) for name in names}


def _infer(cells: Sequence[bytes]) -> Field:
    """Return the field that holds all of these cells and loses nothing; empty ones do not count."""
    filled = [cell.strip(b" \t") for cell in cells if cell.strip(b" \t")]
    if filled and _WORDS.issuperset(cells):
        return Field("tensor", "bool")
    if filled and all(WHOLE.match(cell) for cell in filled):
        low, high = min(map(int, filled)), max(map(int, filled))
        if np.iinfo(np.int64).min <= low and high <= np.iinfo(np.int64).max:
            return Field("tensor", "int64")
        signed = high > np.iinfo(np.uint64).max or any(cell.startswith(b"-") for cell in filled)
        return Field("text") if signed else Field("tensor", "uint64")
    numbers = Field("tensor", "float64")
    if filled and all(_FLOAT.match(cell) and is_held(cell, numbers) for cell in filled):
        return numbers
    return Field("text")


@dataclass(frozen=True)
class CsvFiles:
    """The rows of all files, in the order of their paths."""

    url: str
    files: Sequence[ObjectInfo]
    texts: Sequence[TextFile]
    table: Table

    @property
    def fields(self) -> Mapping[str, Field]:
        """One field for each column that is kept."""
        return self.table.fields

    @property
    def num_samples(self) -> int:
        """The rows of all files."""
        return sum(text.count for text in self.texts)

    @property
    def notes(self) -> Mapping[str, Any]:
        """The column that each field comes from."""
        return {"columns": dict(self.table.originals)}

    def part(self, rows: NDArray[np.int64]) -> CsvPart:
        """Return these rows."""
        return CsvPart(cut_rows(self.texts, rows), self.table)
