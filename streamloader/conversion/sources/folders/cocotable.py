"""Columns of what COCO's entries hold, each value checked: a wrong one is a problem of its image, not of the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.folders.packed import Packed, Values, edges
from streamloader.format.manifest import Field

_LARGEST = float(np.finfo(np.float32).max)
_INT64 = np.iinfo(np.int64)
_SHOWN = 60  # characters of a wrong value

Item = dict[str, Any]
Numbers = Sequence[float | int]
Parse = Callable[[Any], Numbers]  # raises ValueError, which says what was expected


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of the file, and the row of the image that each belongs to. `noun` is what messages call one."""

    noun: str
    items: Sequence[Item]
    rows: NDArray[np.int64]

    def holds(self, key: str) -> bool:
        """Return whether any of them has the key."""
        return any(key in item for item in self.items)


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of `num_rows` images that were made so far; `problems`, by row, grow as values are looked at."""

    num_rows: int
    problems: dict[int, str]
    fields: dict[str, Field] = field(default_factory=dict)
    columns: dict[str, Values] = field(default_factory=dict)

    def tensor(self, name: str, entries: Entries, dtype: str, parse: Parse) -> None:
        """Add the numbers that entries, one for each image, have under the key `name`."""
        values = self._numbers(entries, name, parse, 1).astype(dtype)
        self.fields[name], self.columns[name] = Field("tensor", dtype), values[:, 0]

    def ragged(self, name: str, kind: Field, entries: Entries, key: str, parse: Parse) -> None:
        """Add the numbers that entries have under a key, in the order of the file."""
        width = int(np.prod(kind.shape, dtype=np.int64))
        values = self._numbers(entries, key, parse, width)
        packed = values[np.argsort(entries.rows, kind="stable")].astype(np.dtype(kind.dtype).newbyteorder("<"))
        counts = np.bincount(entries.rows, minlength=self.num_rows).astype(np.int64)
        self.fields[name], self.columns[name] = kind, Packed(packed.tobytes(), edges(counts * kind.item_bytes))

    def texts(self, name: str, entries: Entries, texts: Sequence[str]) -> None:
        """Add a text for each entry, all of them JSON, as one JSON list an image; an empty one is a problem."""
        for row, text in zip(entries.rows.tolist(), texts, strict=True):
            if not text:
                self.problems.setdefault(row, f"numbers that are not finite stand in its {name}")
        order = np.argsort(entries.rows, kind="stable").tolist()
        bounds = edges(np.bincount(entries.rows, minlength=self.num_rows).astype(np.int64)).tolist()
        lists = ([texts[i] for i in order[start:stop]] for start, stop in pairwise(bounds))
        self.fields[name] = Field("text")
        self.columns[name] = Packed.of(f"[{','.join(some)}]".encode() for some in lists)

    def _numbers(self, entries: Entries, key: str, parse: Parse, width: int) -> NDArray[Any]:
        """Return (entries, width) numbers; those that do not parse are zeros, and noted."""
        found: list[Numbers] = []
        zeros = (0,) * width
        for item, row in zip(entries.items, entries.rows.tolist(), strict=True):
            value = item.get(key)
            try:
                found.append(parse(value))
            except ValueError as error:
                told = f"has {key} {shown(value)}" if key in item else f"has no {key}"
                whose = f"its {entries.noun} {shown(item.get('id'))}"
                self.problems.setdefault(row, f"{whose} {told}: {error}")
                found.append(zeros)
        return np.array(found).reshape(len(found), width)


def whole(value: Any) -> Numbers:
    """Return a whole number of 64 bits; raise ValueError for anything else."""
    if type(value) is not int or not _INT64.min <= value <= _INT64.max:
        raise ValueError("expected a whole number of 64 bits")
    return (value,)


def flag(value: Any) -> Numbers:
    """Return 0 or 1, 0 for None; raise ValueError for anything else."""
    if value is not None and (type(value) not in (int, bool) or value not in (0, 1)):
        raise ValueError("expected 0 or 1")
    return (int(value or 0),)


def number(value: Any) -> Numbers:
    """Return a number; raise ValueError for what is none, or not finite in float32."""
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:  # NaN is not less
        raise ValueError("expected a number that float32 holds")
    return (float(value),)


def numbers(count: int) -> Parse:
    """Return the parser of a list of so many numbers."""

    def parse(value: Any) -> Numbers:
        if type(value) is not list or len(value) != count:
            raise ValueError(f"expected {count} numbers")
        return [number(one)[0] for one in value]

    return parse


def shown(value: Any) -> str:
    """Return a value as messages show it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
