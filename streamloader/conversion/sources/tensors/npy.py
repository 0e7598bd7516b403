"""NumPy files: one .npy, one .npz, or a folder of .npy; each array is a field. See formats/npy/MAPPING.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import Refuse
from streamloader.conversion.sources.files import Listing, extension, field_names
from streamloader.conversion.sources.rowreads import read_rows
from streamloader.conversion.sources.tensors.npyheader import StoredArray, read_array_header
from streamloader.conversion.sources.tensors.npz import PackedArray, npz_arrays
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "npy"


def matches(listing: Listing) -> bool:
    """Return whether the listing is an .npy or .npz, or a folder with some .npy right in it."""
    return bool(_files(listing))


def open_source(listing: Listing, _wish: Wish) -> NpyArrays:
    """Return the source; row n of every array is sample n.

    Raises `SourceError` for arrays of unequal length, for what is no plain array (pickled, object, complex, ...),
    and for Fortran order, whose rows do not lie together.
    """
    files = _files(listing)
    if not files:
        raise SourceError(
            f"{listing.url} holds no .npy or .npz", "give a file, or a folder with .npy files right in it"
        )
    found: dict[str, Stored] = {}
    for info in files:
        if extension(info.path) == "npz":
            if len(files) > 1:
                raise SourceError(
                    f"{listing.url} holds {len(files)} files, {info.path} among them", "give one .npz at a time"
                )
            found |= npz_arrays(listing.store, info)
        else:
            found[info.path[: -len(".npy")]] = read_array_header(listing.store, info, 0, info.size, info.path)
    if not found:
        raise SourceError(f"{listing.url} holds no array", "add arrays to it")
    names = field_names(list(found), listing.url)
    first, length = next((name, stored.shape[0]) for name, stored in found.items())
    for name, stored in found.items():
        if stored.shape[0] != length:
            raise SourceError(
                f"arrays of {listing.url} differ in length: {first!r} has {length} rows, {name!r} {stored.shape[0]}",
                "give all arrays one length",
            )
    arrays = {names[name]: stored for name, stored in found.items()}
    return NpyArrays(listing.url, listing.store, files, arrays, {names[name]: name for name in found})


Stored = StoredArray | PackedArray


def _files(listing: Listing) -> tuple[ObjectInfo, ...]:
    if not listing.folder:
        return listing.of("npy", "npz")
    return tuple(info for info in listing.of("npy") if "/" not in info.path)


@dataclass(frozen=True)
class NpyArrays:
    """Arrays of one length. `originals` gives each field the name of its array."""

    url: str
    store: Store
    files: Sequence[ObjectInfo]
    arrays: Mapping[str, Stored]
    originals: Mapping[str, str]

    @property
    def fields(self) -> Mapping[str, Field]:
        """One tensor field for each array."""
        return {name: stored.field for name, stored in self.arrays.items()}

    @property
    def num_samples(self) -> int:
        """The length of the arrays."""
        return next(iter(self.arrays.values())).shape[0]

    @property
    def notes(self) -> Mapping[str, Any]:
        """The array that each field comes from."""
        return {"arrays": dict(self.originals)}

    def part(self, rows: NDArray[np.int64]) -> NpyPart:
        """Return these rows of every array."""
        return NpyPart(self.store, self.arrays, rows)


@dataclass(frozen=True, eq=False)
class NpyPart:
    """Some rows, ascending."""

    store: Store
    arrays: Mapping[str, Stored]
    rows: NDArray[np.int64]

    def read(self, _refuse: Refuse) -> dict[str, Column]:
        """Return one array a field, little-endian: no row is bad by itself.

        Raises `SourceError` or `SourceChangedError`.
        """
        return {name: self._column(stored) for name, stored in self.arrays.items()}

    def _column(self, stored: Stored) -> NDArray[Any]:
        out = np.empty((len(self.rows), *stored.shape[1:]), stored.dtype)
        if isinstance(stored, PackedArray):
            stored.read_rows(self.store, self.rows, out)
        else:
            flat = out.reshape(-1).view(np.uint8).reshape(len(self.rows), stored.row_bytes)
            read_rows(self.store, stored.path, stored.start + self.rows * stored.row_bytes, flat)
        return out.astype(out.dtype.newbyteorder("<"), copy=False)
