"""Lists and mappings in LitData samples: as leaves in its compact binary form, or as values of Arrow rows."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np

_MAX_DEPTH = 50
_SINGLE = {7: 0x11, 8: 0x12, 9: 0x13, 10: 0x14, 11: 0x10}  # tags of single values, and their kinds in records
_LITTLE = {"q": 8, "d": 8, "B": 1}


def plain_value(value: Any) -> Any:
    """Return a value that a field can hold: an array for lists of numbers, and JSON text for other lists and mappings.

    Raises ValueError for what JSON has no form for.
    """
    if isinstance(value, list) and _numeric(value):
        with suppress(ValueError):  # lists that differ in length further inside
            return np.asarray(value)
    if not isinstance(value, list | dict):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError):
        raise ValueError("the list holds what neither an array nor JSON does") from None


def _numeric(value: Any, depth: int = 0) -> bool:
    """Return whether it is a list of numbers, or of such lists which are equally long."""
    if all(isinstance(one, bool | int | float) for one in value):
        return True
    if depth >= 8 or not all(isinstance(one, list) for one in value):
        return False
    return len({len(one) for one in value}) == 1 and all(_numeric(one, depth + 1) for one in value)


def nested_value(data: bytes) -> Any:
    """Return a leaf of lists and mappings, see `plain_value`. Raises ValueError for a damaged one."""
    try:
        if not data or data[0] > 0x20:  # older leaves are plain JSON
            return plain_value(json.loads(data))
        reader = _Reader(data)
        value = reader.value(0)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    if reader.at != len(data):
        raise ValueError(f"its nested value ends at byte {reader.at} of {len(data)}")
    return plain_value(value)


class _Reader:
    """Walks through the binary form: a tag, then what the tag says. Everything is little-endian."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        if size > len(self.data) - self.at:
            raise ValueError("its nested value is cut off")
        self.at += size
        return self.data[self.at - size : self.at]

    def count(self) -> int:
        """Return how many follow; each takes a byte at least."""
        count = int.from_bytes(self.take(4), "little")
        if count > len(self.data) - self.at:
            raise ValueError("its nested value is cut off")
        return count

    def text(self) -> str:
        """Return a text behind its length."""
        return self.take(self.count()).decode()

    def numbers(self, letter: str, count: int) -> list[Any]:
        """Return numbers of one of struct's types."""
        return list(struct.unpack(f"<{count}{letter}", self.take(count * _LITTLE[letter])))

    def value(self, depth: int) -> Any:
        """Return the value that begins here."""
        tag = self.take(1)[0]
        if depth > _MAX_DEPTH:
            raise ValueError("its value is nested too deep")
        if tag == 5:
            return {self.text(): self.value(depth + 1) for _ in range(self.count())}
        if tag == 6:
            return self._records()
        if tag in (7, 8, 9, 10, 11):
            return self._single(_SINGLE[tag])
        return json.loads(self.take(self.count())) if tag == 0 else self._list(tag)

    def _list(self, tag: int) -> list[Any]:
        count = self.count()
        if tag == 1:
            return [self.text() for _ in range(count)]
        if tag in (2, 3):
            return self.numbers("q" if tag == 2 else "d", count)
        if tag == 4:
            return [one != 0 for one in self.numbers("B", count)]
        raise ValueError(f"its nested value has the tag {tag}, which is not known")

    def _records(self) -> list[dict[str, Any]]:
        """Return mappings of the same keys: their number, the keys, then each one's values behind their kinds."""
        rows = self.count()
        keys = [self.text() for _ in range(self.count())]
        if not keys:
            raise ValueError("its nested records have no keys")
        return [{key: self._single(self.take(1)[0]) for key in keys} for _ in range(rows)]

    def _single(self, kind: int) -> Any:
        if kind == 0x10:
            return None
        if kind == 0x11:
            return self.text()
        if kind in (0x12, 0x13):
            return self.numbers("q" if kind == 0x12 else "d", 1)[0]
        if kind == 0x14:
            return self.take(1) != b"\0"
        raise ValueError(f"its nested record has the kind {kind}, which is not known")
