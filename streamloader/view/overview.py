"""The whole array that patches are cut from, small, with the patches of a batch."""

from __future__ import annotations

from collections.abc import Mapping
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

    `boxes`: (x, y, width, height, row) of each patch. `text`: what is shown.
    """

    image: media.Media | None
    size: tuple[int, int]
    boxes: tuple[tuple[int, int, int, int, int], ...]
    text: str


def draw(loader: Loader, batch: Mapping[str, Any]) -> Overview | None:
    """Return where the patches of a batch are in their array; None if samples are no patches of two dimensions."""
    dataset = loader._datasets[0]
    assert dataset.arrays is not None
    column = next((each for each in dataset.arrays.columns.values() if len(each.sizes) >= 2), None)
    if column is None:
        return None
    vertical, horizontal = [dim for dim in column.dims if dim in column.sizes][-2:]
    places = [to_numpy(batch.get(f"index_{dim}", batch.get("index"))) for dim in (vertical, horizontal)]
    if any(each is None for each in places):
        return None
    height, width = (column.sizes[dim] for dim in (vertical, horizontal))
    ys, xs = (np.asarray(each).tolist() for each in places)
    boxes = tuple((x, y, width, height, row) for row, (y, x) in enumerate(zip(ys, xs, strict=True)))
    size = column.lengths[horizontal], column.lengths[vertical]
    values, source = _read(dataset.store, column, (vertical, horizontal))
    image = None if values is None else media.heat_map(values)
    return Overview(image, size, boxes, source)


def _read(store: Store, column: RegionColumn, dims: tuple[str, str]) -> tuple[NDArray[Any] | None, str]:
    """Return the array of a column, or a smaller one of its group with the same dimensions, thinned out."""
    own = next((member.array for member in column.members if member.array is not None), None)
    if own is None:
        return None, "no array"
    try:
        others = list(read_group(store).arrays.values())
    except StreamloaderError:
        others = []
    like = [each for each in others if each.dims == own.dims and each.dtype == own.dtype]
    for array in sorted([own, *like], key=lambda each: -prod(each.shape)):
        axes = [array.dims.index(dim) for dim in dims]
        high = [length if axis in axes else 1 for axis, length in enumerate(array.shape)]
        if prod(high) * array.dtype.itemsize * _waste(array, high) <= MOST_BYTES:
            out = np.empty(high, array.dtype)
            ArrayReader(store, array, strict=False).read_into([Target(out, (0,) * out.ndim)])
            plane = out.reshape([out.shape[axis] for axis in sorted(axes)])
            plane = plane if axes == sorted(axes) else plane.T
            step = max(1, -(-max(plane.shape) // SIDE))
            return plane[::step, ::step], f"{array.path or 'array'}: {plane.shape[0]:,} x {plane.shape[1]:,}"
    return None, f"the array is too large to be read for an overview: {' x '.join(map(str, own.shape))}"


def _waste(array: ZarrArray, high: list[int]) -> float:
    """Return how many times the elements are read that are shown, since chunks are read as a whole."""
    return prod(max(1.0, chunk / end) for chunk, end in zip(array.chunks, high, strict=True))
