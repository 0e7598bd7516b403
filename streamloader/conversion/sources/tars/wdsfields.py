"""What the extension of a WebDataset member says about its field, and how a column of members is read."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.folders.images import ENCODINGS, image_problem
from streamloader.errors import FieldError, SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field

INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})  # as webdataset's own decoder reads them
TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn"})

Bad = Callable[[int, str, str], None]  # row, problem and remedy of a member
NPY_REMEDY = "pickled arrays are refused; write it again"


def field_of(suffix: str, first: bytes, name: str) -> Field:
    """Return the field of an extension (`jpg`, `seg.png`, ...); an .npy's shape and dtype are those of the `first`."""
    last = suffix.rpartition(".")[2]
    if last in ENCODINGS:
        return Field("bytes", encoding=ENCODINGS[last])
    if last in INTEGERS:
        return Field("tensor", "int64")
    if last in TEXTS:
        return Field("text")
    if last != "npy":
        return Field("bytes", encoding=last if last.isalnum() and last.isascii() else "")
    try:
        array = _load_npy(first)
    except ValueError as error:
        raise SourceError(f"{name}: {error}", NPY_REMEDY) from None
    try:
        return Field("tensor", array.dtype.name, array.shape)
    except FieldError as error:
        raise SourceError(f"{name}: {error.problem}", error.remedy) from error


def decode_column(suffix: str, field: Field, members: Sequence[bytes], bad: Bad) -> Column:
    """Return the column of one field: an array for tensors, else bytes; a member that is not what its suffix says goes
    to `bad`, and something stands in for it.
    """
    last = suffix.rpartition(".")[2]
    if last == "npy":
        return _arrays(field, members, bad)
    if last in INTEGERS:
        return _integers(members, bad)
    for row, data in enumerate(members):
        if last in ENCODINGS:
            problem = image_problem(data)
            if problem:
                bad(row, f"the image cannot be decoded: {problem}", "repair or remove it")
        elif field.kind == "text":
            _check_text(data, row, bad)
    return members


def _check_text(data: bytes, row: int, bad: Bad) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        remedy = "store it in UTF-8, or give it an extension such as .bin"
        bad(row, f"it is no UTF-8 text: {error.reason} at byte {error.start}", remedy)


def _integers(members: Sequence[bytes], bad: Bad) -> NDArray[np.int64]:
    column = np.zeros(len(members), np.int64)
    for row, data in enumerate(members):
        try:
            column[row] = int(data)
        except (ValueError, OverflowError):
            shown = data[:40].decode("utf-8", "replace")
            bad(row, f"it holds {shown!r}, which is no int64", "write it as digits, or as .txt")
    return column


def _arrays(field: Field, members: Sequence[bytes], bad: Bad) -> Column:
    dtype, inner = np.dtype(field.dtype), field.shape if field.fixed else (None, *field.shape)
    column: list[NDArray[Any]] = []
    for row, data in enumerate(members):
        array = np.zeros([size or 0 for size in inner], dtype)
        try:
            found = _load_npy(data)
        except ValueError as error:
            bad(row, str(error), NPY_REMEDY)
        else:
            fits = len(inner) == found.ndim and all(n in (None, m) for n, m in zip(inner, found.shape, strict=True))
            if fits and found.dtype == dtype:
                array = found
            else:
                ragged = Field("ragged", field.dtype, field.shape[1:]) if field.fixed else field
                remedy = (
                    f"give all samples one shape and dtype, or say that they differ in length, {ragged}, with --fields"
                )
                bad(row, f"it holds {found.dtype.name}{list(found.shape)}, the field is {field}", remedy)
        column.append(array)
    if field.fixed:
        return np.stack(column) if column else np.empty((0, *field.shape), dtype)
    return [array.astype(dtype.newbyteorder("<")).tobytes() for array in column]


def _load_npy(data: bytes) -> NDArray[Any]:
    """Return the array. Raises ValueError for what is no plain .npy."""
    try:
        array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    except Exception as error:  # numpy parses the header as Python: damaged, it raises whatever that does
        raise ValueError(f"it is no .npy that can be read: {str(error) or type(error).__name__}") from error
