"""What a dataset of an HDF5 file is: the field that holds its rows, and how they are read. See hdf5.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from streamloader.conversion.sources.needs import need
from streamloader.conversion.sources.tensors.arrays import LEAVE_OUT, check_claim, row_bytes, tensor_field
from streamloader.conversion.sources.tensors.blockfile import BlockFile
from streamloader.errors import FieldError, SourceError, StreamloaderError
from streamloader.format.manifest import Field

Way = Literal["raw", "rows", "ragged", "text", "chars"]


@dataclass(frozen=True)
class H5Array:
    """One dataset. `way`: `raw` rows lie in the file one after another from byte `start` on and need no library;
    `rows` are read by it, as are `ragged` ones, `text`, and `chars`, texts that are rows of single characters.
    `align` is how many rows a chunk has, `dtype` what is stored, or what an item of a ragged row is.
    """

    path: str
    field: Field
    length: int
    way: Way
    dtype: np.dtype[Any]
    row_bytes: int
    align: int = 1
    start: int = 0


@contextmanager
def open_h5(raw: BlockFile) -> Iterator[Any]:
    """Open a file with h5py, and close it. Raises `SourceError` for what is no HDF5."""
    h5py = need("h5py", "hdf5")
    with h5_errors(f"{raw.name} is no HDF5 file, or damaged"), h5py.File(raw, "r") as file:
        yield file


@contextmanager
def h5_errors(problem: str) -> Iterator[None]:
    """Turn what h5py says of a damaged file into a `SourceError`."""
    try:
        yield
    except StreamloaderError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError, OverflowError) as error:
        raise SourceError(f"{problem}: {' '.join(str(error).split())}", "fetch or make it again") from error


def describe(dataset: Any, where: str, size: int, wanted: Field | None) -> H5Array:
    """Return what an h5py dataset is; `wanted` is the field that the user asks for, if any.

    `where` names it, `size` is that of its file. Raises `SourceError` for what no field holds, and for what is
    packed with a filter that is not there.
    """
    h5py = need("h5py", "hdf5")
    created = dataset.id.get_create_plist()
    for number in range(created.get_nfilters()):
        code, _, _, name = created.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            called = f"{code} ({name.decode(errors='replace')})" if name else str(code)
            problem = f"{where} is packed with the HDF5 filter {called}, which is not installed here"
            raise SourceError(problem, f"install its plugin (hdf5plugin has many), repack the file, or {LEAVE_OUT}")
    if dataset.shape is None:
        raise SourceError(f"{where} is empty, without a shape", LEAVE_OUT)
    try:
        dtype = dataset.dtype
    except TypeError as error:
        raise SourceError(f"{where} holds values that no field holds: {error}", LEAVE_OUT) from None
    shape = tuple(int(n) for n in dataset.shape)
    stored = dataset.id.get_type().get_size()
    check_claim(where, prod(shape) * stored, size, prod(dataset.chunks or ()) * stored)
    align = int(dataset.chunks[0]) if dataset.chunks else 1
    if h5py.check_string_dtype(dtype) is not None:
        return _text(dataset, dtype, where, align)
    items = h5py.check_vlen_dtype(dtype)
    if items is not None:
        field = _ragged(items, shape, where, wanted)
        return H5Array(dataset.name, field, shape[0], "ragged", np.dtype(items).newbyteorder("<"), stored, align)
    if dtype.kind not in "biuf" or dtype.subdtype is not None:
        what = "references" if dtype.kind == "O" else "compound values" if dtype.names else f"values of {dtype}"
        raise SourceError(f"{where} holds {what}, which no field holds", LEAVE_OUT)
    field = tensor_field(dtype, shape, where)
    wide = row_bytes(dtype.itemsize, shape)
    start = _start(dataset, dtype, size, wide * shape[0], where)
    way: Way = "rows" if start is None else "raw"
    return H5Array(dataset.name, field, shape[0], way, dtype, wide, align, start or 0)


def _text(dataset: Any, dtype: np.dtype[Any], where: str, align: int) -> H5Array:
    shape = dataset.shape
    if len(shape) == 2 and dtype.kind == "S" and dtype.itemsize == 1:
        wide = tensor_field(np.dtype(np.uint8), shape, where).item_bytes
        return H5Array(dataset.name, Field("text"), shape[0], "chars", dtype, wide, align)
    if len(shape) != 1:
        raise SourceError(f"{where} holds texts in the shape {shape}, a field has one for each sample", LEAVE_OUT)
    wide = tensor_field(np.dtype(np.uint8), (shape[0], dtype.itemsize), where).item_bytes
    return H5Array(dataset.name, Field("text"), shape[0], "text", dtype, wide, align)


def _ragged(items: Any, shape: tuple[int, ...], where: str, wanted: Field | None) -> Field:
    if len(shape) != 1:
        raise SourceError(f"{where} holds arrays in the shape {shape}, a field has one for each sample", LEAVE_OUT)
    if wanted is not None and wanted.kind == "bytes" and np.dtype(items).itemsize == 1:
        return wanted  # encoded images are often stored as numbers of one byte
    try:
        return Field("ragged", np.dtype(items).newbyteorder("=").name)
    except (FieldError, TypeError):
        raise SourceError(f"{where} holds arrays of {items}, which no field holds", LEAVE_OUT) from None


def _start(dataset: Any, dtype: np.dtype[Any], size: int, nbytes: int, where: str) -> int | None:
    """Return the byte where the rows begin, if they lie in the file as they are in memory, else None."""
    h5py = need("h5py", "hdf5")
    start = dataset.id.get_offset()
    same = h5py.h5t.py_create(dtype).equal(dataset.id.get_type())  # else e.g. 12 bits of 16: left to the library
    if start is None or dataset.chunks or not same:
        return None
    if start + nbytes > size:
        problem = f"{where} ends at byte {start + nbytes} of its file, which has {size}: it is truncated"
        raise SourceError(problem, "fetch or make it again")
    return int(start)
