"""Lines of JSON: .jsonl and .ndjson, compressed ones too; each line is an object. See formats/jsonl/MAPPING.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isinf
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import READ_THREADS, BadSample, Refuse
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.conversion.sources.infer import changed_by_numpy, flatten
from streamloader.conversion.sources.records import Origin, RecordSource, open_records
from streamloader.conversion.sources.streams import holding, open_stream
from streamloader.conversion.sources.text.linesindex import (
    FileRows,
    TextFile,
    begin_text,
    cut_rows,
    index_text,
    mostly_texts,
    read_blocks,
)
from streamloader.conversion.sources.text.linesplit import Style
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import FieldError, SourceError
from streamloader.format.threads import run_all
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "jsonl"
_KINDS = ("jsonl", "ndjson")
_BLANKS = " \t\r\n"
_LINES = Style(_BLANKS.encode())
_MAX_KEY = 1024  # characters of nested keys, joined: else a line would become far more than it is
_MAX_NAMES = 1 << 16
_REMEDY = "repair or remove the line"


def matches(listing: Listing) -> bool:
    """Return whether the listing has lines of JSON, and nothing beside them that they may only be labels of."""
    return mostly_texts(listing, _KINDS)


def open_source(listing: Listing, wish: Wish) -> RecordSource:
    """Return the source, after one pass that counts the lines of all files; blank ones are passed over.

    Raises `SourceError` for what cannot be unpacked or cut into lines, and what `open_records` raises.
    """
    infos = holding(listing, *_KINDS)
    if not infos:
        raise SourceError(f"{listing.url} holds no .jsonl or .ndjson", "give a file, a folder, or a glob")
    ahead = max(1, READ_THREADS // len(infos))
    files = run_all(partial(_index, listing.store, ahead), infos, READ_THREADS)
    origin = Origin(listing.url, infos, sum(file.count for file in files))
    return open_records(origin, lambda rows: JsonPart(cut_rows(files, rows), wish), wish)


def _index(store: Store, ahead: int, info: ObjectInfo) -> TextFile:
    stream = open_stream(store, info, ahead)
    return index_text(stream, _LINES, begin_text(stream))


@dataclass(frozen=True, eq=False)
class JsonPart:
    """Some lines of some files, ascending."""

    pieces: tuple[FileRows, ...]
    wish: Wish

    def read(self, refuse: Refuse) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the values of each line by key; one that is no JSON object, or of which no field holds all, is refused.

        Raises `SourceError` or `SourceChangedError`.
        """
        parser = _Parser(self.wish)
        for block in read_blocks(self.pieces):
            for i in range(len(block)):
                line = block.record(i)
                try:
                    values = parser.parse(line)
                except (ValueError, RecursionError) as error:
                    problem, remedy = _told(error)
                    refuse(BadSample(block.position + i, block.name(i), problem, remedy, line))
                else:
                    yield block.position + i, values

    def name(self, position: int) -> str:
        """Return file and line."""
        piece = next(one for one in reversed(self.pieces) if one.position <= position)
        return piece.name(int(piece.rows[position - piece.position]))


def _told(error: Exception) -> tuple[str, str]:
    """Return what is wrong with a line, and what to do."""
    if isinstance(error, FieldError):
        return error.problem, error.remedy
    problem = str(error)
    if isinstance(error, RecursionError):
        problem = "it is nested too deeply"
    elif isinstance(error, UnicodeDecodeError):
        problem = f"it is no UTF-8 text: {error.reason} at byte {error.start + 1}"
    elif isinstance(error, json.JSONDecodeError):
        problem = f"it is no JSON: {error.msg} at character {error.pos + 1}"
    return problem, _REMEDY


class _Parser:
    """Reads lines; it raises ValueError, of which `FieldError` is one, or RecursionError."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._decode = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant).decode
        self._names: dict[str, str] = {}

    def parse(self, line: bytes) -> dict[str, Any]:
        """Return the values of a line by key, those of nested objects by the keys joined with `_`."""
        values: dict[str, Any] = self._decode(line.decode().strip(_BLANKS))
        if not isinstance(values, dict):
            raise FieldError(f"it holds a {type(values).__name__}, where an object belongs", _REMEDY)
        for key, value in values.items():
            if type(value) in (dict, list) and self._is_text(key):
                values[key] = _dump(key, value)
        if dict in map(type, values.values()):
            values = _flat(values)
        for key, value in values.items():
            if type(value) in (int, float, list) and self._wish.wanted(self._name(key)):
                values[key] = _array(key, value) if isinstance(value, list) else _number(key, value)
        return values

    def _is_text(self, key: str) -> bool:
        field = self._wish.fields.get(self._name(key)) if self._wish.fields else None
        return field is not None and field.kind == "text"

    def _name(self, key: str) -> str:
        """Return the field of a key. Keys are few, unless a file is hostile."""
        name = self._names.get(key)
        if name is None:
            self._names = self._names if len(self._names) < _MAX_NAMES else {}
            name = self._names[key] = next(iter(field_names([key], "").values()))
        return name


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it has the key {twice[:100]!r} twice")
    return values


def _refuse_constant(token: str) -> NoReturn:
    raise ValueError(f"it holds {token}, which is no number in JSON")


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    leaves = _count_leaves(values, 0)
    flat = flatten(values)
    if len(flat) != leaves:
        raise ValueError("two of its keys become one where nested keys are joined by '_'")
    return flat


def _count_leaves(values: Mapping[str, Any], length: int) -> int:
    """Return the number of values that are no objects."""
    leaves = 0
    for key, value in values.items():
        if length + len(key) > _MAX_KEY:
            raise ValueError(f"it has keys of more than {_MAX_KEY} characters, those of nested objects joined")
        leaves += _count_leaves(value, length + len(key) + 1) if isinstance(value, dict) else 1
    return leaves


def _dump(key: str, value: Any) -> str:
    """Return a value as JSON again."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise FieldError(f"its {key!r} holds a number that float64 does not hold", _REMEDY) from None


def _number(key: str, value: float) -> float:
    if isinstance(value, float) and isinf(value):  # JSON itself has no infinity
        raise FieldError(f"its {key!r} is a number that float64 does not hold", "store it as text")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise FieldError(f"its {key!r} is a whole number that 64 bits do not hold", "store it as text")
    return value


def _array(key: str, value: list[Any]) -> NDArray[Any]:
    """Return a list of numbers, or of lists of them, as an array."""
    remedy = f"leave it out by naming the fields to keep with --fields, or keep it as JSON with {key}=text there"
    try:
        array = np.asarray(value)
    except ValueError:
        raise FieldError(f"its {key!r} holds lists of different lengths", remedy) from None
    # numpy makes uint64 or floats of whole numbers that int64 does not hold
    large = array.dtype.kind in "uf" and bool(array.size) and float(np.abs(array).max()) >= 2**63
    odd = _odd(value) if large or array.dtype.kind not in "biuf" else ""
    odd = odd or ("a number that float64 does not hold" if large and np.isinf(array).any() else "")
    odd = odd or changed_by_numpy(value, array)
    if odd:
        raise FieldError(f"its {key!r} is a list that holds {odd}", remedy)
    return array


def _odd(value: list[Any]) -> str:
    """Return what in the list makes no array of numbers."""
    for item in value:
        if isinstance(item, list):
            odd = _odd(item)
        elif isinstance(item, int):
            odd = "" if -(2**63) <= item < 2**63 else "a whole number that int64 does not hold"
        else:
            odd = {str: "text", dict: "an object", type(None): "null"}.get(type(item), "")
        if odd:
            return odd
    return ""
