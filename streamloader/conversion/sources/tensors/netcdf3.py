"""The header of a netCDF file of the classic formats (CDF-1, CDF-2, CDF-5): which bytes are which rows."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from streamloader.conversion.sources.tensors.blockfile import BlockFile
from streamloader.conversion.sources.tensors.dimensions import ATTRIBUTES
from streamloader.errors import SourceError

MAX_HEADER = 64 << 20
_CHAR = 2
_TYPES = {
    **{1: ">i1", _CHAR: "S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8"},
    **{7: ">u1", 8: ">u2", 9: ">u4", 10: ">i8", 11: ">u8"},
}
_DIMENSIONS, _VARIABLES, _ATTRIBUTES = 10, 11, 12


@dataclass(frozen=True)
class Variable:
    """One variable: row r begins at byte `start` + r * `stride` of the file; `shape` with the length of the records."""

    dimensions: tuple[str, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stride: int
    attributes: Mapping[str, Any]
    record: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * prod(self.shape[1:])


@dataclass(frozen=True)
class Header:
    """The variables by name; `unlimited` is the dimension of the records, if there is one."""

    variables: Mapping[str, Variable]
    unlimited: str


def is_classic(raw: BlockFile) -> bool:
    """Return whether the file begins as one of the classic formats does."""
    raw.seek(0)
    head = raw.read(4)
    return bool(head) and head[:3] == b"CDF" and head[3:] in (b"\x01", b"\x02", b"\x05")


def read_header(raw: BlockFile, size: int) -> Header:
    """Return the header of a file of `size` bytes. Raises `SourceError` for one that is damaged, or truncated."""
    try:
        return _Parser(raw, size).header()
    except (struct.error, ValueError, IndexError, KeyError, OverflowError) as error:
        raise SourceError(f"the header of {raw.name} is damaged: {error}", "fetch or make it again") from error


class _Parser:
    """Reads a header from its first byte on; counts are 4 or 8 bytes, offsets too, by the version."""

    def __init__(self, raw: BlockFile, size: int) -> None:
        self._raw, self._size = raw, size
        raw.seek(3)
        self._version = self._take(1)[0]
        self._count = ">q" if self._version == 5 else ">i"
        self._offset = ">i" if self._version == 1 else ">q"

    def header(self) -> Header:
        streaming = struct.pack(self._count, -1)
        stated = self._take(len(streaming))
        records = -1 if stated == streaming else self._natural(struct.unpack(self._count, stated)[0])
        dimensions = [(self._name(), self._number()) for _ in range(self._list(_DIMENSIONS))]
        self._attributes()
        found = [self._variable(dimensions) for _ in range(self._list(_VARIABLES))]
        if len({name for name, _ in found}) < len(found):
            raise ValueError("a variable stands twice")
        unlimited = next((name for name, length in dimensions if length == 0), "")
        return Header(self._placed(dict(found), records), unlimited)

    def _variable(self, dimensions: list[tuple[str, int]]) -> tuple[str, Variable]:
        name = self._name()
        own = [dimensions[self._number()] for _ in range(self._number())]
        attributes = self._attributes()
        code = self._int()
        if code not in _TYPES:
            raise ValueError(f"{name!r} is of type {code}, which there is not")
        self._take(struct.calcsize(self._count))  # its size, which a large variable's does not fit: computed instead
        start = self._natural(struct.unpack(self._offset, self._take(struct.calcsize(self._offset)))[0])
        lengths = tuple(length for _, length in own)
        if 0 in lengths[1:]:
            raise ValueError(f"{name!r} has the dimension of the records behind another")
        record = lengths[:1] == (0,)
        names = tuple(dimension for dimension, _ in own)
        dtype = np.dtype(_TYPES[code])
        stride = dtype.itemsize * prod(lengths[1:])
        return name, Variable(names, dtype, lengths, start, stride, attributes, record)

    def _placed(self, found: dict[str, Variable], records: int) -> dict[str, Variable]:
        """Return the variables with the records' length and distance; each must end within the file."""
        recorded = [variable for variable in found.values() if variable.record]
        # every variable's share of a record is padded to 4 bytes, unless it is the only one
        step = sum(-(-variable.stride // 4) * 4 for variable in recorded)
        step = recorded[0].stride if len(recorded) == 1 else step
        if records < 0:  # written as a stream: as many as there are
            first = min((variable.start for variable in recorded), default=self._size)
            records = max(0, self._size - first) // max(step, 1)
        out = {}
        for name, variable in found.items():
            shape = (records, *variable.shape[1:]) if variable.record else variable.shape
            stride = step if variable.record else variable.stride
            length = shape[0] if shape else 1
            end = variable.start + (length - 1) * stride + variable.stride if length else 0
            if end > self._size:
                ends = f"its variable {name!r} ends at byte {end}, the file has {self._size}"
                raise SourceError(f"{self._raw.name} is truncated: {ends}", "fetch or make it again")
            out[name] = Variable(
                variable.dimensions, variable.dtype, shape, variable.start, stride, variable.attributes, variable.record
            )
        return out

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes that are told."""
        out: dict[str, Any] = {}
        for _ in range(self._list(_ATTRIBUTES)):
            name, code, count = self._name(), self._int(), self._number()
            dtype = np.dtype(_TYPES[code])
            values = self._padded(count * dtype.itemsize)
            if name in ATTRIBUTES:
                out[name] = values if code == _CHAR else np.frombuffer(values, dtype)
        return out

    def _list(self, tag: int) -> int:
        """Return the length of a list; an absent one is two zeros."""
        found, count = self._int(), self._number()
        if found != tag and (found, count) != (0, 0):
            raise ValueError(f"the tag {found} where {tag} belongs")
        return count

    def _name(self) -> str:
        return self._padded(self._number()).decode("utf-8")

    def _int(self) -> int:
        return int(struct.unpack(">i", self._take(4))[0])

    def _number(self) -> int:
        return self._natural(struct.unpack(self._count, self._take(struct.calcsize(self._count)))[0])

    def _natural(self, number: int) -> int:
        if number < 0:
            raise ValueError(f"the number {number} before byte {self._raw.tell()}")
        return number

    def _padded(self, size: int) -> bytes:
        return self._take(-(-size // 4) * 4)[:size]

    def _take(self, size: int) -> bytes:
        if self._raw.tell() + size > min(self._size, MAX_HEADER):
            raise ValueError(f"it goes on for {size} bytes from byte {self._raw.tell()} on")
        return self._raw.read(size) or b""
