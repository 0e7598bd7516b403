"""The leaves of LitData samples: how the bytes of each data format are read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.loaders.litnested import nested_value
from streamloader.conversion.sources.loaders.rawimage import image, raw_image

ReadLeaf = Callable[[bytes], Any]  # raises ValueError

# LitData numbers dtypes; torch has several names for some. The others are complex, or no numbers at all
_TORCH = {
    **{0: "float32", 1: "float32", 2: "float64", 3: "float64", 8: "float16", 9: "float16", 10: "bfloat16"},
    **{11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64"},
    **{19: "bool", 20: "uint16"},
}
_NUMPY = {
    **{0: "int8", 1: "int16", 2: "int32", 3: "int64", 4: "uint8", 5: "uint16", 6: "uint32", 7: "uint64"},
    **{8: "float16", 9: "float32", 10: "float64", 13: "bool"},
}
_FILES = ("bytes", "tifffile", "tiff", "file", "video", "audio", "nifti", "mesh", "pdf")  # kept byte for byte
_MAX_AXES = 30  # as many as a field may have
REFUSED = {
    "pickle": "pickles, which are never read",
    "graph": "graphs, which may hold pickles",
    "jpeg_array": "several images a sample",
}


def leaf_reader(data_format: str) -> ReadLeaf:
    """Return what reads the leaves of a data format such as `int` or `no_header_numpy:3`.

    Raises ValueError, which says why, for one that is not read.
    """
    name, _, detail = data_format.partition(":")
    if name in REFUSED:
        raise ValueError(REFUSED[name])
    if name in ("no_header_tensor", "no_header_numpy"):
        return partial(_row, dtype=_dtype(_TORCH if name == "no_header_tensor" else _NUMPY, detail))
    readers: dict[str, ReadLeaf] = {
        **dict.fromkeys(_FILES, bytes),
        **{"str": _text, "text": _text, "json": nested_value, "jpeg": image, "image": image, "pil": raw_image},
        **{"int": _int, "float": _float, "bool": _bool, "tensor": _tensor, "numpy": _numpy},
    }
    if name not in readers:
        raise ValueError("a data format that is not known")
    return readers[name]


def _dtype(table: dict[int, str], number: str | int) -> str:
    try:
        return table[int(number)]
    except (ValueError, KeyError):
        raise ValueError(f"an array of the dtype number {number}, which has no dtype here") from None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is no UTF-8: {error.reason} at byte {error.start}") from None


def _int(data: bytes) -> Any:
    return _numbers(data, "int64", ())


def _float(data: bytes) -> Any:
    return _numbers(data, "float64", ())


def _bool(data: bytes) -> Any:
    return _numbers(data, "bool", ())


def _row(data: bytes, dtype: str) -> NDArray[Any]:
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return _numbers(data, dtype, (len(data) // size,))


def _tensor(data: bytes) -> NDArray[Any]:
    """A tensor's header is big-endian; that of LitData's first releases, like a NumPy array's, little-endian."""
    return _with_header(data, _TORCH, ">" if data[:3] == b"\0\0\0" else "<")


def _numpy(data: bytes) -> NDArray[Any]:
    return _with_header(data, _NUMPY, "<")


def _with_header(data: bytes, dtypes: dict[int, str], order: str) -> NDArray[Any]:
    """Return an array: u32 dtype, u32 number of axes, u32 size of each, the values."""
    if len(data) < 8:
        raise ValueError(f"the array has {len(data)} bytes, too few for its header")
    number, axes = struct.unpack_from(f"{order}II", data)
    if axes > _MAX_AXES or len(data) < 8 + 4 * axes:
        raise ValueError(f"the array's {len(data)} bytes do not hold its {axes} axes")
    return _numbers(data[8 + 4 * axes :], _dtype(dtypes, number), struct.unpack_from(f"{order}{axes}I", data, 8))


def _numbers(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the values, which are little-endian; bfloat16 as float32, which holds each of its values."""
    kind = np.dtype("<u2" if dtype == "bfloat16" else dtype).newbyteorder("<")
    if len(data) != kind.itemsize * prod(shape):
        raise ValueError(f"it is {dtype}{list(shape)}, and has {len(data)} bytes")
    values: NDArray[Any] = np.frombuffer(data, np.uint8 if dtype == "bool" else kind).reshape(shape)
    if dtype == "bool":
        values = np.not_equal(values, 0)
    if dtype == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    return values
