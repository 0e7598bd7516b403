"""Copies of rows to the columns of a batch, without Python for each row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.format.rows import copy_rows

Ints = NDArray[np.int64]
# Runs of bytes of a box: each takes 24 bytes to describe.
MAX_RUNS = 1 << 10


class Copy(NamedTuple):
    """Rows to copy to a column of a batch: the rows `starts` of the array `source`.

    With `at`, `starts` are bytes of `source`. Row i has `sizes[i]` bytes, which are copied to byte `at[i]` of `out`;
    `sizes` may be one size for all rows. With `strides`, row i is a box of elements, which is copied to the row `at[i]`
    of `out`: for boxes that consist of many short runs of bytes. `padded`: the first of the bytes of `out`, and the end
    of those, that are filled with `value` where no row is, and the most of them that are next to each other; rows are
    in ascending order then.
    """

    out: NDArray[Any]
    source: NDArray[Any]
    starts: Ints
    at: Ints | None = None
    sizes: Ints | int = 0
    strides: tuple[int, ...] | None = None
    padded: tuple[int, int, int] = (0, 0, 0)
    value: int | float = 0

    def part(self, first: int, stop: int, starts: Ints) -> Copy:
        """Return the copy of the rows [first, stop), whose `starts` are given."""
        if self.at is None:
            return Copy(self.out[first:stop], self.source, starts)
        sizes = self.sizes if isinstance(self.sizes, int) else self.sizes[first:stop]
        padded = self.padded
        if padded[2]:  # what is between the rows of two parts is filled by the first one
            begin, end, longest = padded
            begin, end = int(self.at[first]) if first else begin, int(self.at[stop]) if stop < len(self.at) else end
            padded = begin, end, longest
        return Copy(self.out, self.source, starts, self.at[first:stop], sizes, self.strides, padded, self.value)

    def run(self) -> None:
        """Copy the rows."""
        if self.at is None:
            np.take(self.source, self.starts, axis=0, out=self.out, mode="clip")
        elif self.strides is None:
            first, stop, longest = self.padded
            padding = np.full(longest // self.out.itemsize, self.value, self.out.dtype) if longest else b""
            copy_rows(self.source, self.starts, self.sizes, self.out, self.at, padding=(padding, first, stop))
        else:
            dtype, shape = self.out.dtype, self.out.shape[1:]
            for row, start in zip(self.at.tolist(), self.starts.tolist(), strict=True):
                self.out[row] = np.ndarray(shape, dtype, self.source.data, start, self.strides)


def part_of(copies: Sequence[Copy], number: int, count: int) -> list[Copy]:
    """Return one of `count` parts of copies; those with the same `starts` share them, which are sent once."""
    parts, seen = list[Copy](), dict[int, Ints]()
    for copy in copies:
        first, stop = len(copy.starts) * number // count, len(copy.starts) * (number + 1) // count
        parts.append(copy.part(first, stop, seen.setdefault(id(copy.starts), copy.starts[first:stop])))
    return parts


def copy_all(copies: Sequence[Copy]) -> None:
    """Copy rows to the columns of a batch."""
    for copy in copies:
        copy.run()


def flat(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of a C-contiguous array, as a view."""
    return array.reshape(-1).view(np.uint8)


def copy_boxes(
    source: NDArray[np.uint8],
    starts: Ints,
    strides: Sequence[int],
    target: tuple[NDArray[Any], NDArray[Any]],
    rows: Ints,
) -> Copy:
    """Return the copy of boxes of elements to rows of the target: an array that is C-contiguous, and the view of it.

    `starts`: the byte of `source` at which each box begins. `strides`: of its axes, those of the view but for the
    first. A box is divided into runs of bytes that are contiguous in both, unless they are many.
    """
    out, view = target
    shape, into = view.shape[1:], view.strides[1:]
    size, axes = view.itemsize, len(shape)
    while axes and (shape[axes - 1] == 1 or strides[axes - 1] == into[axes - 1] == size):
        axes -= 1
        size *= shape[axes]
    if prod(shape[:axes]) > MAX_RUNS:
        return Copy(view, source, starts, rows, strides=tuple(strides))
    index = np.indices(shape[:axes]).reshape(axes, prod(shape[:axes]))
    first = view.__array_interface__["data"][0] - out.__array_interface__["data"][0]
    begins = starts[:, None] + np.asarray(strides[:axes], np.int64) @ index
    ends = (first + rows * view.strides[0])[:, None] + np.asarray(into[:axes], np.int64) @ index
    return Copy(flat(out), source, begins.reshape(-1), ends.reshape(-1), size)
