"""The header of an .npy: what the array is and where its rows lie. Nothing is unpickled."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from streamloader.conversion.sources.base import Range, read_range
from streamloader.conversion.sources.tensors.arrays import tensor_field
from streamloader.errors import SourceError
from streamloader.format.manifest import Field
from streamloader.storage.protocol import ObjectInfo, Store

HEADER_BYTES = 16 << 10  # numpy refuses to evaluate a longer header too
_SHOWN = 200  # characters of numpy's message, which may hold the header


def row_field(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Field:
    """Return the tensor field that holds the rows of an array of that dtype, in any byte order, and shape."""
    return Field("tensor", dtype.newbyteorder("=").name, shape[1:])


@dataclass(frozen=True)
class StoredArray:
    """An array whose rows lie one after another in a file, from byte `start` on."""

    path: str
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def field(self) -> Field:
        """The tensor field that holds it."""
        return row_field(self.dtype, self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.field.item_bytes


def read_array_header(store: Store, info: ObjectInfo, start: int, stop: int, name: str) -> StoredArray:
    """Return the array that stands in bytes [start, stop) of a file; `name` is how messages call it.

    Raises `SourceError` unless it is a plain array of a known dtype, in C order, and whole.
    """
    stop = min(stop, info.size)
    head = read_range(store, Range(info.path, start, max(start, min(stop, start + HEADER_BYTES))))
    where = f"{store.url}/{name}"
    shape, dtype, length = parse_header(bytes(head), where)
    array = StoredArray(info.path, start + length, dtype, shape)
    check_size(length + array.row_bytes * shape[0], stop - start, where)
    return array


def check_size(needed: int, size: int, where: str) -> None:
    """Raise `SourceError` for an array of `size` bytes with its header whose header says more."""
    if needed > size:
        problem = f"{where} has {size} bytes, its header says {needed}: it is truncated, or damaged"
        raise SourceError(problem, "fetch or make it again")


def parse_header(head: bytes, where: str) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape, dtype and the header's length in bytes. Raises `SourceError`, which names `where`."""
    file = io.BytesIO(head)
    readers: dict[tuple[int, int], Callable[..., Any]] = {
        (1, 0): npy_format.read_array_header_1_0,
        (2, 0): npy_format.read_array_header_2_0,
    }
    try:
        version = npy_format.read_magic(file)
        if version not in readers:
            raise ValueError(f"format version {version[0]}.{version[1]}, which only structured arrays use")
        shape, fortran, dtype = readers[version](file, max_header_size=HEADER_BYTES)
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {shape}")
    except Exception as error:  # numpy parses the header as Python: damaged, it raises whatever that does
        said = " ".join((str(error) or type(error).__name__).split())[:_SHOWN]
        raise SourceError(f"{where} is no .npy that can be read: {said}", "write it with numpy.save") from error
    if dtype.hasobject:
        raise SourceError(
            f"{where} holds pickled objects, which are never read", "save plain arrays (allow_pickle=False)"
        )
    if not shape:
        raise SourceError(f"{where} is a single value, not an array of samples", "give arrays with a first axis")
    if fortran and len(shape) > 1:
        raise SourceError(
            f"{where} is in Fortran order: its rows do not lie together", "save numpy.ascontiguousarray(it)"
        )
    tensor_field(dtype, tuple(shape), where)
    return tuple(shape), dtype, file.tell()
