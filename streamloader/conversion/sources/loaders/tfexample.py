"""tf.train.Example without TensorFlow: a reader of the few protocol buffer messages that it is made of.

Example     { Features features = 1; }
Features    { map<string, Feature> feature = 1; }
Feature     { BytesList bytes_list = 1, FloatList float_list = 2 or Int64List int64_list = 3; }
each list   { repeated value = 1; }
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_MAX_VARINT = 10
_FEW_BYTES = 64  # packed integers of no more bytes are read faster one by one


@dataclass(frozen=True)
class BytesList:
    """A feature of several byte strings, which no field holds."""

    count: int


Feature = NDArray[Any] | bytes | BytesList | None


def parse_example(data: memoryview) -> dict[str, Feature]:
    """Return the features by name: int64 and float32 arrays of one axis, bytes, or None for one without a value.

    Raises ValueError for what is no tf.train.Example.
    """
    entries: dict[str, memoryview] = {}
    for number, value in _fields(data):
        if number == 2 and isinstance(value, memoryview):
            raise ValueError("it is a tf.train.SequenceExample, which is not read")
        if number != 1:
            continue
        for inner, entry in _fields(_message(value)):
            if inner == 1:
                key, feature = _entry(_message(entry))
                entries[key] = feature  # of a key that comes twice the last one counts
    return {key: _feature(value) for key, value in entries.items()}


def _entry(data: memoryview) -> tuple[str, memoryview]:
    """Return key and value of an entry of a map."""
    key, feature = "", memoryview(b"")
    for number, value in _fields(data):
        if number == 1:
            key = bytes(_message(value)).decode()
        elif number == 2:
            feature = _message(value)
    return key, feature


def _feature(data: memoryview) -> Feature:
    kind, lists = 0, list[memoryview]()
    for number, value in _fields(data):
        if number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
            lists = [*lists, _message(value)] if number == kind else [_message(value)]  # one of: the last kind counts
            kind = number
    if kind == _FLOAT_LIST:
        return _join([_floats(value) for one in lists for value in _values(one)], "<f4")
    if kind == _INT64_LIST:
        return _join([_int64s(value) for one in lists for value in _values(one)], "<i8")
    found = [_message(value) for one in lists for value in _values(one)]
    if len(found) > 1:
        return BytesList(len(found))
    return bytes(found[0]) if found else None


def _values(data: memoryview) -> Iterator[int | memoryview]:
    return (value for number, value in _fields(data) if number == 1)


def _join(parts: list[NDArray[Any]], dtype: str) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _floats(value: int | memoryview) -> NDArray[Any]:
    """Return packed floats, or the single one of four bytes."""
    data = _message(value)
    if len(data) % 4:
        raise ValueError(f"its floats have {len(data)} bytes")
    return np.frombuffer(data, "<f4")


def _int64s(value: int | memoryview) -> NDArray[Any]:
    """Return packed integers, or a single one."""
    if isinstance(value, int):
        return np.array([value], np.uint64).view("<i8")
    if len(value) > _FEW_BYTES:
        return unpack_varints(value)
    found, at = [], 0
    while at < len(value):
        one, at = _varint(value, at)
        found.append(one)
    return np.array(found, np.uint64).view("<i8")


def unpack_varints(data: memoryview) -> NDArray[Any]:
    """Return packed varints as int64. Raises ValueError for one that is cut off or longer than ten bytes."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 128)
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts + 1
    if not len(ends) or ends[-1] != len(raw) - 1 or lengths.max() > _MAX_VARINT:
        raise ValueError("its integers are damaged")
    values = np.zeros(len(ends), np.uint64)
    for place in range(int(lengths.max())):
        there = lengths > place
        values[there] |= (raw[starts[there] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
    return values.view("<i8")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands where bytes belong")
    return value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field: integers for varints, else the bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif not size:
            raise ValueError(f"it has a field of the wire type {wire}, which no message here has")
        if not number or size > len(data) - at:
            raise ValueError(f"its field {number} of {size} bytes goes beyond its end")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint that begins at a byte, modulo 2^64, and where the next byte is."""
    value = 0
    for place in range(_MAX_VARINT):
        if at + place >= len(data):
            break
        byte = data[at + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value & ((1 << 64) - 1), at + place + 1
    raise ValueError("it is cut off, or damaged, within a number")
