"""Copies rows of bytes between buffers, and parses the lengths of variable-length items.

The C extension `_rows.c` does both without the GIL and without Python for each row. Where it was not compiled,
`_copy` and `_parse` do the same, and tests compare the two.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import CorruptError

Ints = NDArray[np.int64]


def copy_rows(
    source: Any,
    starts: Ints,
    sizes: Ints | int,
    target: Any,
    at: Ints | None = None,
    *,
    padding: tuple[Any, int, int] = (b"", 0, 0),
) -> None:
    """Copy row i, `source[starts[i] : starts[i] + sizes[i]]`, to `target` from byte `at[i]` on, in the order of i.

    `source` and `target` are C-contiguous buffers, measured in bytes, and may share memory. `sizes` may be one size for
    all rows. Without `at`, rows are concatenated from byte 0 on. No other thread may change the arrays meanwhile.
    `padding`: (bytes, first, stop). If it has bytes, the first ones of them are copied to each gap that ascending rows
    leave in the bytes [first, stop) of the target. They may not share memory with it, nor may `source` then.
    Raises `ValueError`, before anything is copied, for a row that is not within both buffers, and for a longer gap.
    """
    count = len(starts)
    size_array = sizes if isinstance(sizes, np.ndarray) else np.array([sizes], np.int64)
    for name, values in (("starts", starts), ("sizes", sizes), ("at", at)):
        if isinstance(values, np.ndarray) and (values.dtype != np.int64 or values.shape != (count,)):
            raise ValueError(f"{name} is {values.dtype}{list(values.shape)}, expected int64[{count}]")
    row = copy(source, starts, size_array, target, at, *padding)
    if row >= 0:
        ends = f"a source of {memoryview(source).nbytes} and a target of {memoryview(target).nbytes} bytes"
        if longest := memoryview(padding[0]).nbytes:
            ends += f", or at most {longest} bytes after byte {padding[1]} and the row before it"
        if row == count:
            raise ValueError(f"the end of the padding, byte {padding[2]}, is not within {ends}")
        size = size_array[row if size_array.size > 1 else 0]
        to = f"at byte {at[row]}" if at is not None else "after the rows before it"
        raise ValueError(f"row {row} of {size} bytes, from byte {starts[row]} to {to}, is not within {ends}")


def parse_lengths(data: memoryview, count: int) -> Ints:
    """Return the byte at which each of `count` items of `vlen-bytes` begins with its length, and the size of `data`.

    Raises `CorruptError` if `data` does not begin with `count`, or the lengths do not add up to its size.
    """
    size = data.nbytes
    if size < 4 + 4 * count or int.from_bytes(data[:4], "little") != count:
        raise CorruptError(f"the chunk of {size} bytes does not hold {count} items")
    edges = np.empty(count + 1, np.int64)
    parsed = parse(data, edges)
    if parsed < count:
        raise CorruptError(f"item {parsed} of the chunk begins at byte {edges[parsed]} of {size}")
    if edges[count] != size:
        raise CorruptError(f"the items of the chunk end at byte {edges[count]} of {size}")
    return edges


def _copy(source: Any, starts: Ints, sizes: Ints, target: Any, at: Ints | None, *padding: Any) -> int:
    """Copy rows; `sizes` has one item for each row, or one for all. Return the first row out of bounds, or -1.

    It is the number of rows if the padding after the last one is out of bounds.
    """
    given, first, stop = padding
    read, write = np.frombuffer(source, np.uint8).data, np.frombuffer(target, np.uint8).data
    sizes = np.broadcast_to(sizes, starts.shape)
    if at is None:
        at = np.cumsum(sizes) - sizes  # wraps only after a row that is out of bounds
    # the differences do not overflow, except for a negative size
    bad = (starts < 0) | (sizes < 0) | (at < 0) | (starts > len(read) - sizes) | (at > len(write) - sizes)
    filler, begins = np.frombuffer(given, np.uint8).data, sizes[:0]
    gaps = begins
    if len(filler):
        begins = np.append(first, at + sizes)
        gaps = np.append(at, stop) - begins
        bad = np.append(bad, stop > len(write)) | (begins < 0) | (gaps < 0) | (gaps > len(filler))
    if bad.any():
        return int(bad.argmax())
    for begin, gap in zip(begins.tolist(), gaps.tolist(), strict=False):
        write[begin : begin + gap] = filler[:gap]
    # Slices of memoryviews: slices of arrays take 1.5 times as long, fancy indexing 5 times.
    for start, size, to in zip(starts.tolist(), sizes.tolist(), at.tolist(), strict=True):
        write[to : to + size] = read[start : start + size]
    return -1


def _parse(data: memoryview, edges: Ints) -> int:
    """Fill `edges` with the bytes at which items begin, and the end. Return the item that the data lacks, or all."""
    length_at = struct.Struct("<I").unpack_from
    stops = [4]
    try:
        for _ in range(len(edges) - 1):
            stops.append(stops[-1] + 4 + length_at(data, stops[-1])[0])
    except struct.error:
        pass
    edges[: len(stops)] = stops
    return len(stops) - 1


try:
    from streamloader.format._rows import copy, parse
except ImportError:  # no C compiler
    copy, parse = _copy, _parse
