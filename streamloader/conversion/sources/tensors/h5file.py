"""One HDF5 file of arrays, read row by row or by ranges. See hdf5.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import cut_runs
from streamloader.conversion.sources.rowreads import read_rows
from streamloader.conversion.sources.tensors.arrays import Into, Note, add_texts, as_truth
from streamloader.conversion.sources.tensors.blockfile import BlockFile
from streamloader.conversion.sources.tensors.h5arrays import H5Array, h5_errors, open_h5
from streamloader.conversion.sources.tensors.h5groups import descend, is_dataset
from streamloader.errors import SourceChangedError
from streamloader.format.manifest import Field
from streamloader.storage.protocol import ObjectInfo, Store

PIECE_BYTES = 16 << 20  # what is read of a dataset at once, unless a chunk is larger
Texts = tuple[str, list[bytes], Note]
Named = tuple[str, "NDArray[Any] | list[bytes]", Note]
PIECE_ITEMS = 256  # of variable size, which nobody knows before


@dataclass(frozen=True)
class H5File:
    """The arrays of one file, by field."""

    store: Store
    info: ObjectInfo
    arrays: Mapping[str, H5Array]

    @property
    def where(self) -> str:
        """The URL, for messages."""
        return f"{self.store.url}/{self.info.path}"

    @property
    def num_samples(self) -> int:
        """The length of every array."""
        return next(iter(self.arrays.values())).length

    @property
    def fields(self) -> Mapping[str, Field]:
        """One field for each array."""
        return {name: array.field for name, array in self.arrays.items()}

    def read(self, rows: NDArray[np.int64], into: Into, note: Note) -> None:
        """Fill the columns; see `Container`."""
        inside: dict[str, H5Array] = {}
        for name, array in self.arrays.items():
            column = into[name]
            if array.way == "raw" and isinstance(column, np.ndarray):
                self._read_raw(array, rows, column)
            else:
                inside[name] = array
        if not inside:
            return
        with open_h5(BlockFile(self.store, self.info).warm()) as file:
            for name, array in inside.items():
                with h5_errors(f"{self.where}::{array.path} cannot be read"):
                    self._read_inside(file, array, rows, (name, into[name], note))

    def _read_inside(self, file: Any, array: H5Array, rows: NDArray[np.int64], column: Named) -> None:
        dataset = descend(file, array.path, self.where)
        size = np.dtype(object).itemsize if array.way == "ragged" else array.dtype.itemsize
        if not is_dataset(dataset) or (dataset.shape[0], dataset.dtype.itemsize) != (array.length, size):
            remedy = "leave the source alone while it is converted, and start again with --overwrite"
            raise SourceChangedError(f"{self.where}::{array.path} is another array than when it was listed", remedy)
        name, into, note = column
        if not isinstance(into, list):
            _read_tensor(dataset, array, rows, into)
        elif array.way == "ragged":
            _read_ragged(dataset, array, rows, into)
        else:
            _read_texts(dataset, array, rows, (name, into, note))

    def _read_raw(self, array: H5Array, rows: NDArray[np.int64], column: NDArray[Any]) -> None:
        raw = column.reshape(len(rows), -1).view(np.uint8).reshape(len(rows), array.row_bytes)
        read_rows(self.store, self.info.path, array.start + rows * array.row_bytes, raw)
        if array.dtype.byteorder == ">":
            column.byteswap(inplace=True)
        as_truth(column)


def _pieces(array: H5Array, rows: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield index ranges [i, j) of rows to read at once: no whole chunk between them is read for nothing."""
    first = rows // array.align * array.align
    most = max(array.align, PIECE_BYTES // array.row_bytes)
    yield from cut_runs(first, first + array.align, 0, most) if len(rows) else ()


def _read_tensor(dataset: Any, array: H5Array, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    for i, j in _pieces(array, rows):
        span = slice(int(rows[i]), int(rows[j - 1]) + 1)
        if span.stop - span.start == j - i:
            dataset.read_direct(out, span, slice(i, j))
        else:
            np.take(dataset[span], rows[i:j] - rows[i], axis=0, out=out[i:j], mode="clip")
    as_truth(out)


def _read_texts(dataset: Any, array: H5Array, rows: NDArray[np.int64], column: Texts) -> None:
    name, into, note = column
    pieces = _pieces(array, rows) if array.dtype.kind == "S" else _few(rows)
    for i, j in pieces:
        span = slice(int(rows[i]), int(rows[j - 1]) + 1)
        block = dataset[span][rows[i:j] - rows[i]]
        if array.way == "chars":
            block = np.ascontiguousarray(block).view(f"S{block.shape[1]}").reshape(-1)

        def noted(field: str, at: int, problem: str, first: int = i) -> None:
            note(field, first + at, problem)

        add_texts(name, block.tolist(), into, noted)


def _read_ragged(dataset: Any, array: H5Array, rows: NDArray[np.int64], into: list[bytes]) -> None:
    for i, j in _few(rows):
        block = dataset[int(rows[i]) : int(rows[j - 1]) + 1]
        into.extend(np.asarray(item, array.dtype).tobytes() for item in block)


def _few(rows: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield index ranges [i, j) of neighbouring rows, few at once: nothing is read for nothing."""
    edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    for low, high in pairwise(edges if len(rows) else []):
        for i in range(low, high, PIECE_ITEMS):
            yield i, min(i + PIECE_ITEMS, high)
