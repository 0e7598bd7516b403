"""Arrays of a Zarr store that others wrote, as columns. See zarrstores.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.tensors.arrays import (
    LEAVE_OUT,
    Into,
    Note,
    add_texts,
    as_truth,
    check_claim,
    row_bytes,
    tensor_field,
)
from streamloader.conversion.sources.tensors.zarrnodes import Node
from streamloader.errors import SourceError, StreamloaderError
from streamloader.format.manifest import Field
from streamloader.storage.protocol import Store

Way = Literal["rows", "bytes", "text"]
PIECE_BYTES = 64 << 20  # decoded, of the chunks that are read at once, unless one is larger


@dataclass(frozen=True)
class ZarrArray:
    """One array at `path` of a store of that Zarr `version`.

    A chunk has `align` rows, which are `block` bytes, those of the chunks beside it included.
    """

    path: str
    version: int
    field: Field
    length: int
    way: Way
    align: int
    block: int


@dataclass(frozen=True)
class ZarrArrays:
    """The arrays of a store, by field. `documents` are their metadata, as they were when it was opened."""

    store: Store
    documents: Mapping[str, bytes]
    arrays: Mapping[str, ZarrArray]

    @property
    def where(self) -> str:
        """The URL, for messages."""
        return self.store.url

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
        for name, array in self.arrays.items():
            where = f"{self.where}/{array.path}".rstrip("/")
            with zarr_errors(f"{where} cannot be read"):
                opened = open_array(self.store, self.documents, array.path, array.version)
                column = into[name]
                if isinstance(column, np.ndarray):
                    _read_tensor(opened, array, rows, column)
                else:
                    _read_items(opened, array, rows, (name, column, note))


def open_array(store: Store, documents: Mapping[str, bytes], path: str, version: int) -> Any:
    """Return zarr-python's array at `path`, which reads from the store. Raises what zarr-python does."""
    import zarr

    from streamloader.conversion.sources.tensors.zarrguard import guarded
    from streamloader.conversion.sources.tensors.zarrview import ZarrView

    view = ZarrView(store, documents)
    return guarded(zarr.open_array(view, path=path, mode="r", zarr_format=3 if version == 3 else 2))


@contextmanager
def zarr_errors(problem: str) -> Iterator[None]:
    """Turn what zarr-python and its codecs say of damaged documents and chunks into a `SourceError`."""
    try:
        yield
    except StreamloaderError:
        raise
    except Exception as error:  # every codec has errors of its own
        said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise SourceError(f"{problem}: {said}", "fetch or make it again") from error


def describe(opened: Any, node: Node, where: str, stored: int) -> ZarrArray:
    """Return what an array of zarr-python is; `stored` are the bytes of its store.

    Raises `SourceError`, which names `where`, for what no field holds.
    """
    dtype, shape = np.dtype(opened.dtype), tuple(int(n) for n in opened.shape)
    if not shape:
        raise SourceError(f"{where} is a single value, not an array of samples", LEAVE_OUT)
    chunks = tuple(int(n) for n in opened.chunks)
    check_claim(where, prod(shape) * dtype.itemsize, stored, prod(chunks) * dtype.itemsize)
    block = row_bytes(dtype.itemsize, shape) * chunks[0]
    way = _way(dtype, node.document)
    if way == "rows":
        if dtype.kind not in "biuf" or dtype.names:
            raise SourceError(f"{where} holds values of {dtype}, which no field holds", LEAVE_OUT)
        field = tensor_field(dtype, shape, where)
        return ZarrArray(node.path, node.version, field, shape[0], way, chunks[0], block)
    if len(shape) != 1:
        raise SourceError(f"{where} holds {way} in the shape {shape}, a field has one for each sample", LEAVE_OUT)
    return ZarrArray(node.path, node.version, Field(way), shape[0], way, chunks[0], block)


def _way(dtype: np.dtype[Any], document: Mapping[str, Any]) -> Way:
    """Return how the values of an array come: by its document, for the dtypes of zarr-python change names."""
    if dtype.kind in "SUT":
        return "text"
    packed = {one.get("id") for one in document.get("filters") or () if isinstance(one, Mapping)}
    said = document.get("data_type", document.get("dtype"))
    if said == "string" or (said == "|O" and "vlen-utf8" in packed):
        return "text"
    if said in ("variable_length_bytes", "bytes") or (said == "|O" and "vlen-bytes" in packed):
        return "bytes"
    return "rows"


def _pieces(array: ZarrArray, rows: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield index ranges [i, j) of rows to read at once: whole chunks, as many as `PIECE_BYTES` allows."""
    if not len(rows):
        return
    chunks = rows // array.align
    touched = np.cumsum(np.diff(chunks, prepend=chunks[0]) > 0) // max(1, PIECE_BYTES // max(1, array.block))
    yield from pairwise([0, *(np.flatnonzero(np.diff(touched)) + 1).tolist(), len(rows)])


def _read_tensor(opened: Any, array: ZarrArray, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    from zarr.core.buffer import default_buffer_prototype

    buffer: Any = default_buffer_prototype().nd_buffer
    rest = [slice(None)] * (out.ndim - 1)
    for i, j in _pieces(array, rows):
        place = buffer.from_ndarray_like(out[i:j])
        span = slice(int(rows[i]), int(rows[j - 1]) + 1)
        if span.stop - span.start == j - i:
            opened.get_basic_selection((span, *rest), out=place)
        else:  # many requests at once, and each chunk decoded once
            opened.get_orthogonal_selection((rows[i:j], *rest), out=place)
    as_truth(out)


def _read_items(opened: Any, array: ZarrArray, rows: NDArray[np.int64], column: tuple[str, list[bytes], Note]) -> None:
    name, into, note = column
    for i, j in _pieces(array, rows):
        span = slice(int(rows[i]), int(rows[j - 1]) + 1)
        whole = span.stop - span.start == j - i
        items = np.asarray(opened[span] if whole else opened.oindex[rows[i:j]]).tolist()

        def noted(field: str, at: int, problem: str, first: int = i) -> None:
            note(field, first + at, problem)

        if array.way == "bytes":
            into.extend(bytes(item) for item in items)
        else:
            texts = [item.encode("utf-8", "surrogatepass") if isinstance(item, str) else bytes(item) for item in items]
            add_texts(name, texts, into, noted)
