"""The encodings of MDS columns: how many bytes a value has, and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isinf, prod
from typing import Any

import numpy as np

from streamloader.conversion.sources.loaders.rawimage import image, raw_image

ReadValue = Callable[[bytes], Any]  # raises ValueError
_SCALARS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
# how an array that does not have its dtype in the column's encoding names it
_DTYPES = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"},
    **{64: "uint64", 65: "int64", 66: "float64"},
}
_MAX_AXES = 30  # as many as a field may have
REFUSED = {
    "pkl": "pickles, which are never read",
    "str_decimal": "decimal numbers, which no dtype holds",
    **dict.fromkeys(("jpeg_array", "jpegarray", "list[jpeg]", "list[png]", "list[pil]"), "several images a sample"),
}


@dataclass(frozen=True)
class Encoding:
    """How the values of a column are read; `size` is their number of bytes, None where it differs."""

    read: ReadValue
    size: int | None = None


def encoding_of(name: str) -> Encoding:
    """Return the encoding of that name. Raises ValueError, which says why, for one that is not read."""
    if name in REFUSED:
        raise ValueError(REFUSED[name])
    if name == "ndarray" or name.startswith("ndarray:"):
        return _array_encoding(name)
    if name in _SCALARS:
        return Encoding(partial(_scalar, dtype=name), np.dtype(name).itemsize)
    if name == "int":
        return Encoding(partial(_scalar, dtype="int64"), 8)
    readers: dict[str, ReadValue] = {
        **{"bytes": bytes, "jpeg": image, "png": image, "str": _text, "json": _text, "pil": raw_image},
        **{"str_int": _digits, "str_float": _float},
    }
    if name not in readers:
        raise ValueError("an encoding that is not known")
    return Encoding(readers[name])


def _array_encoding(name: str) -> Encoding:
    _, dtype, sizes = (*name.split(":"), "", "")[:3]
    if name.count(":") > 2 or (dtype and dtype not in _SCALARS):
        raise ValueError("an encoding that is not known")
    shape = tuple(int(size) for size in sizes.split(",")) if sizes else None
    if shape and min(shape) < 1:
        raise ValueError("an array with an axis of no length")
    if shape is None or not dtype:
        return Encoding(partial(_array, dtype=dtype, shape=shape))
    return Encoding(partial(_array, dtype=dtype, shape=shape), np.dtype(dtype).itemsize * prod(shape))


def _scalar(data: bytes, dtype: str) -> Any:
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), 1).reshape(())


def _array(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> Any:
    """Return an array: u8 dtype unless the column says it; u8 axes * 4 + log2 of the bytes of a size and the sizes
    unless the column says them; the values.
    """
    at = 0
    if not dtype:
        dtype = _DTYPES.get(data[0] if data else -1, "")
        if not dtype:
            raise ValueError("the array has no dtype that is known")
        at = 1
    if shape is None:
        head = data[at] if len(data) > at else 0
        axes, width = head >> 2, 1 << (head & 3)
        if not 0 < axes <= _MAX_AXES or len(data) < at + 1 + axes * width:
            raise ValueError(f"the array's {len(data)} bytes do not hold its shape")
        shape = tuple(np.frombuffer(data, f"<u{width}", axes, at + 1).tolist())
        at += 1 + axes * width
    kind = np.dtype(dtype).newbyteorder("<")
    if len(data) - at != kind.itemsize * prod(shape):
        raise ValueError(f"the array is {dtype}{list(shape)}, and has {len(data) - at} bytes")
    return np.frombuffer(data, kind, offset=at).reshape(shape)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is no UTF-8: {error.reason} at byte {error.start}") from None


def _digits(data: bytes) -> Any:
    try:
        if len(data) > 32:
            raise OverflowError
        return np.int64(int(data))
    except (ValueError, OverflowError):
        raise ValueError(f"the number {data[:32]!r} is no int64") from None


def _float(data: bytes) -> Any:
    try:
        value = float(data)
        if isinf(value) and b"inf" not in data.lower():
            raise OverflowError
        return np.float64(value)
    except (ValueError, OverflowError):
        raise ValueError(f"the number {data[:32]!r} is no float64") from None
