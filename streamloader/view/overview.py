"""The whole array that patches are cut from, small, with the patches of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import StreamloaderError
from streamloader.loader.base import Loader
from streamloader.show import media
from streamloader.show.cells import to_numpy
from streamloader.storage.store import Store
from streamloader.zarr.columns import RegionColumn
from streamloader.zarr.metadata import ZarrArray, read_group
from streamloader.zarr.reader import ArrayReader, Target

MOST_BYTES = 64 << 20  # of the chunks that are read for an overview
SIDE = 512  # pixels of its longer side


class Overview(NamedTuple):
    """`image`: of the array, None if it is too large to be read. `size`: its (width, height) in elements.

    `dims`: the names of its vertical and its horizontal dimension, along which patches have the `patch` (width,
    height). `text`: what is shown.
    """

    image: media.Media | None
    size: tuple[int, int]
    dims: tuple[str, str]
    patch: tuple[int, int]
    text: str


def read(loader: Loader) -> Overview | None:
    """Return the array of the first field of patches; None if a loader has no patches of two dimensions."""
    dataset = loader._datasets[0]
    columns = {} if dataset.arrays is None else dataset.arrays.columns
    column = next((each for name, each in columns.items() if name in loader.fields and len(each.sizes) >= 2), None)
    if column is None:
        return None
    vertical, horizontal = [dim for dim in column.dims if dim in column.sizes][-2:]
    values, text = _read(dataset.store, column, (vertical, horizontal))
    size, patch = ((of[horizontal], of[vertical]) for of in (column.lengths, column.sizes))
    return Overview(None if values is None else media.heat_map(values), size, (vertical, horizontal), patch, text)


def patches(array: Overview, batch: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Return the corner of each patch of a batch, and its row: (x, y, row). Of a mixture, those of its first source."""
    vertical, horizontal = (to_numpy(batch.get(f"index_{dim}", batch.get("index"))) for dim in array.dims)
    if vertical is None or horizontal is None:
        return []
    sources = np.asarray(to_numpy(batch.get("source", np.zeros(len(vertical)))))
    return [(int(horizontal[row]), int(vertical[row]), row) for row in np.flatnonzero(sources == 0).tolist()]


def _read(store: Store, column: RegionColumn, dims: tuple[str, str]) -> tuple[NDArray[Any] | None, str]:
    """Return the array of a column, or a smaller level of it in its group, thinned out, and what it is."""
    own = next((member.array for member in column.members if member.array is not None), None)
    if own is None:
        return None, "no array"
    axes = [own.dims.index(dim) for dim in dims]
    for array in [own, *_smaller(store, own, axes)]:
        high = [length if axis in axes else 1 for axis, length in enumerate(array.shape)]
        if prod(high) * array.dtype.itemsize * _waste(array, high) <= MOST_BYTES:
            out = np.empty(high, array.dtype)
            ArrayReader(store, array, strict=False).read_into([Target(out, (0,) * out.ndim)])
            plane = out.reshape([out.shape[axis] for axis in sorted(axes)])
            plane = plane if axes == sorted(axes) else plane.T
            step = max(1, -(-max(plane.shape) // SIDE))
            rest = ", ".join(dim for dim in own.dims if dim not in dims)
            text = f"{array.path or 'array'}: {plane.shape[0]:,} x {plane.shape[1]:,}"
            return plane[::step, ::step], text + (rest and f", the first of {rest}")
    return None, f"the array is too large to be read for an overview: {' x '.join(map(str, own.shape))}"


def _smaller(store: Store, own: ZarrArray, axes: Sequence[int]) -> list[ZarrArray]:
    """Return the arrays of a group that are smaller along `axes`, and like an array otherwise; larger ones first."""
    try:
        others = read_group(store).arrays.values()
    except StreamloaderError:
        return []
    like = [each for each in others if each.dims == own.dims and each.holds_numbers and each.dtype == own.dtype]
    sizes = [(each, list(zip(own.shape, each.shape, strict=True))) for each in like]
    found = [each for each, pairs in sizes if all((a > b) if i in axes else a == b for i, (a, b) in enumerate(pairs))]
    return sorted(found, key=lambda each: -prod(each.shape))


def _waste(array: ZarrArray, high: list[int]) -> float:
    """Return how many times the elements are read that are shown, since chunks are read as a whole."""
    return prod(max(1.0, chunk / end) for chunk, end in zip(array.chunks, high, strict=True))
