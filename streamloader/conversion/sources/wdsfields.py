"""What the extension of a WebDataset member says about its field, and how a column of members is read."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.images import ENCODINGS, image_problem, refuse_image
from streamloader.errors import FieldError, SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field

INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})  # as webdataset's own decoder reads them
TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn"})

Namer = Callable[[int], str]  # the name of the member of row n: looked up only for an error


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
    array = _load_npy(first, 0, lambda _: name)
    try:
        return Field("tensor", array.dtype.name, array.shape)
    except FieldError as error:
        raise SourceError(f"{name}: {error.problem}", error.remedy) from error


def decode_column(suffix: str, field: Field, members: Sequence[bytes], name: Namer) -> Column:
    """Return the column of one field: an array for tensors, else bytes. Raises `SourceError` naming the member."""
    last = suffix.rpartition(".")[2]
    if last == "npy":
        return _arrays(field, members, name)
    if last in INTEGERS:
        return _integers(members, name)
    for row, data in enumerate(members):
        if last in ENCODINGS:
            problem = image_problem(data)
            if problem:
                refuse_image(name(row), problem)
        elif field.kind == "text":
            _check_text(data, row, name)
    return members


def _check_text(data: bytes, row: int, name: Namer) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        remedy = "store it in UTF-8, or give it an extension such as .bin"
        raise SourceError(f"{name(row)} is no UTF-8 text: {error.reason} at byte {error.start}", remedy) from None


def _integers(members: Sequence[bytes], name: Namer) -> NDArray[np.int64]:
    column = np.empty(len(members), np.int64)
    for row, data in enumerate(members):
        try:
            column[row] = int(data)
        except (ValueError, OverflowError):
            shown = data[:40].decode("utf-8", "replace")
            raise SourceError(
                f"{name(row)} holds {shown!r}, which is no int64", "write it as digits, or as .txt"
            ) from None
    return column


def _arrays(field: Field, members: Sequence[bytes], name: Namer) -> NDArray[Any]:
    column = np.empty((len(members), *field.shape), field.dtype)
    for row, data in enumerate(members):
        array = _load_npy(data, row, name)
        if array.shape != field.shape or array.dtype != column.dtype:
            here, there = f"{array.dtype.name}{list(array.shape)}", f"{field.dtype}{list(field.shape)}"
            raise SourceError(
                f"{name(row)} holds {here}, the first sample {there}", "give all samples one shape and dtype"
            )
        column[row] = array
    return column


def _load_npy(data: bytes, row: int, name: Namer) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        remedy = "pickled arrays are refused; write it again"
        raise SourceError(f"{name(row)} is no .npy that can be read: {error}", remedy) from None
    return array.astype(array.dtype.newbyteorder("="), copy=False)
