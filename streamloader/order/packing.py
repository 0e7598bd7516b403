"""Rows of a fixed length that documents are packed into (`pack=`): a function of their lengths alone. No I/O.

It implements rule 13 of section 8 of SPEC.md. Documents are packed in groups of neighbours, so that a few rows need few
documents. A document that is longer than a row is cut into full rows and a remainder. The remainders of a group go, by
decreasing size, into the row with the least free space that is enough (best-fit decreasing).

The C extension `_packing.c` packs remainders, and finds and places items, without the GIL and without Python for each
item. Where it was not compiled, the functions at the end do the same, `_pack` 50 times as slow, and tests compare the
two.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SelectionError
from streamloader.samples import distinct

if TYPE_CHECKING:
    from streamloader.samples import AllBut

__all__ = ["Packed", "find", "locate", "pack", "place"]

Ints = NDArray[np.int64]
Sizes = NDArray[np.uint32]
Documents = NDArray[np.uint16]  # by their numbers in their groups
Rows = tuple[Documents, Sizes, Ints, Sizes]
GroupPlan = tuple[Documents, Documents, Sizes, Sizes, Ints]

GROUP_ROWS = 256
GROUP_DOCUMENTS = 1 << 16  # so that the number of a document in its group has 16 bits
PIECE = 1 << 19  # documents that are packed together
USUAL_ITEMS = 8  # of a row, on average: for more, items are found twice

_LABEL = b"streamloader/packing/1"


class Packed:
    """The rows of `length` elements that documents with these lengths are packed into.

    `lengths`: the elements of each document, below 2**32, in arrays that follow one another. Empty documents are left
    out. With `split`, a document that is longer than a row is cut; without, it is left out and counted in `dropped`.
    They are the lengths of the samples `packed_from`, or of all samples of the dataset if it is None. With `costs`,
    `costs_of` knows what attention to each row costs.

    `real` counts the elements in all rows, the rest of which is padding. It takes 2 bytes for each document and each
    row that is a full piece of one, and 4 for each other row. The costs of these take 2 more, or 4 if `length` is
    65,536 or more. Raises `SelectionError` if nothing can be packed.
    """

    def __init__(
        self,
        lengths: Iterable[NDArray[Any]],
        length: int,
        *,
        split: bool = True,
        packed_from: Ints | AllBut | None = None,
        costs: bool = False,
    ) -> None:
        self.length, self.packed_from, self.dropped, self.real, self._most = length, packed_from, 0, 0, 1
        digest = hashlib.sha256(_LABEL + struct.pack("<Q?", length, split))
        # bytearrays grow in place: with arrays that are concatenated, the most memory would be twice what rows take
        cost_type: Any = np.uint16 if length < 1 << 16 else np.uint32  # a row costs `length` at most
        full, items, ends, spread, sums = bytearray(), bytearray(), bytearray(4), bytearray(), [np.zeros((4, 1), int)]
        for sizes, edges in _groups(self._count(lengths, split, digest.update), GROUP_ROWS * length):
            plan = _pack_groups(sizes, edges, length, costs=costs)
            full += plan[0].data
            items += plan[1].data
            ends += plan[2].data
            spread += plan[3].astype(cost_type).data
            sums.append(plan[4])
            self._most = max(self._most, int(plan[2].max(initial=1)))
        if not self.real:
            problem = f"pack= has no document to pack: {self.dropped} have more than {length} elements, the others none"
            raise SelectionError(problem, "give a larger length, or split=True")
        self.digest, self.costs = digest.hexdigest(), np.frombuffer(spread, cost_type) if costs else None
        # The full pieces come first in a group. Of each, and of each item of the other rows: its document, by its
        # number in the group. The items of these rows end at `_ends`, modulo 2**32.
        self._full, self._items = np.frombuffer(full, np.uint16), np.frombuffer(items, np.uint16)
        self._ends = np.frombuffer(ends, np.uint32)
        np.cumsum(self._ends, dtype=np.uint32, out=self._ends)
        # before each group, and in all: documents, full pieces, items, other rows
        self._groups = np.concatenate(sums, axis=1).cumsum(axis=1)
        self._rows = self._groups[1] + self._groups[3]

    def _count(self, lengths: Iterable[NDArray[Any]], split: bool, update: Callable[[Any], None]) -> Iterator[Sizes]:
        """Yield the sizes of documents in small arrays, 0 for what is left out; count what is packed and left out."""
        for array in lengths:
            for start in range(0, array.size, PIECE):
                sizes = array[start : start + PIECE].astype("<u4")
                update(sizes)
                if not split:
                    self.dropped += int(np.count_nonzero(sizes > self.length))
                    sizes[sizes > self.length] = 0
                self.real += int(sizes.sum(dtype=np.int64))
                yield sizes

    def __len__(self) -> int:
        return int(self._rows[-1])

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        arrays = (self._full, self._items, self._ends, self._groups, self._rows, self.packed_from, self.costs)
        return sum(array.nbytes for array in arrays if array is not None)

    def items(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """Return (documents, pieces, edges) of some rows: row i has the items edges[i] : edges[i + 1].

        `documents` has their numbers among all samples of the dataset, ascending within a row. Piece k of a document
        has its elements from k * length on, up to (k + 1) * length or its end.
        """
        documents, pieces, edges = self._find(rows)
        return documents if self.packed_from is None else self.packed_from[documents], pieces, edges

    def documents(self, start: int, stop: int) -> Ints:
        """Return the documents of the rows [start, stop) among all samples of the dataset, ascending and distinct."""
        documents = self._find(np.arange(start, stop))[0]
        first = int(documents.min())
        present = np.zeros(int(documents.max()) - first + 1, np.bool_)  # they are dense: this takes less than sorting
        present[documents - first] = True
        found: Ints = np.flatnonzero(present) + first
        return found if self.packed_from is None else self.packed_from[found]

    def _find(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the items of some rows, whose documents are numbered among the packed ones."""
        rows, edges = np.ascontiguousarray(rows, np.int64), np.empty(len(rows) + 1, np.int64)
        tables, room = (self._rows, self._groups, self._full, self._items, self._ends), USUAL_ITEMS * len(rows)
        found = np.empty((2, room), np.int64)
        if (count := find(rows, tables, (edges, *found))) > room:
            found = np.empty((2, count), np.int64)
            find(rows, tables, (edges, *found))
        return found[0, :count], found[1, :count], edges

    def costs_of(self, rows: Ints) -> NDArray[Any]:
        """Return the costs of attention to some rows, each the sum of the squares of its items divided by `length`.

        They are rounded down. Only those that are not full pieces have one in `costs`, the others cost `length`.
        """
        assert self.costs is not None
        group = np.searchsorted(self._rows, rows, side="right")
        number = rows - self._groups[1][group]  # among the rows that are not full pieces, if it is one
        mixed = number >= self._groups[3][group - 1]
        found = np.full(rows.shape, self.length, self.costs.dtype)
        found[mixed] = self.costs[number[mixed]]
        return found

    def most_items(self, block: int) -> int:
        """Return the most items that rows [k * block, (k + 1) * block) have, over all k. No fewer than documents."""
        if block == 1:
            return self._most
        rows = np.append(np.arange(0, len(self), block), len(self))
        groups = np.searchsorted(self._rows[:-1], rows, side="right") - 1
        full = np.minimum(self._groups[1][groups] + rows - self._rows[groups], self._groups[1][groups + 1])
        before = self._groups[2][groups]
        return int(np.diff(full + before + (self._ends[rows - full] - before.astype(np.uint32))).max())


def _groups(arrays: Iterable[Sizes], most: int) -> Iterator[tuple[Sizes, Ints]]:
    """Yield (sizes, edges) of whole groups: group g has the documents edges[g] : edges[g + 1] of these.

    A group ends with the document with which it has `most` elements, or `GROUP_DOCUMENTS` documents.
    """
    rest = np.zeros(0, np.uint32)
    for array in arrays:
        sizes = np.concatenate([rest, array])
        sums, edges, before = np.cumsum(sizes, dtype=np.int64), [0], 0
        while (end := min(int(sums.searchsorted(before + most)) + 1, edges[-1] + GROUP_DOCUMENTS)) <= sizes.size:
            edges.append(end)
            before = int(sums[end - 1])
        if edges[-1]:
            yield sizes[: edges[-1]], np.array(edges)
        rest = sizes[edges[-1] :]
    if rest.size:
        yield rest, np.array([0, rest.size])


def _pack_groups(sizes: Sizes, edges: Ints, length: int, *, costs: bool) -> GroupPlan:
    """Return what `Packed` has of some groups: full pieces, items, how many each other row has, its cost, and sums.

    The sums are documents, full pieces, items and other rows of each group, of shape (4, groups).
    """
    pieces = sizes // np.uint32(length)
    rests = sizes - pieces * np.uint32(length)
    long, first = np.flatnonzero(pieces), edges[:-1]
    inside = (long - first[np.searchsorted(edges, long, side="right") - 1]).astype(np.uint16)
    full, count = np.repeat(inside, pieces[long]), np.count_nonzero(rests)
    items, others = np.empty(count, np.uint16), np.empty(first.size, np.int64)
    counts, cost = np.empty(count, np.uint32), np.empty(count if costs else 0, np.uint32)
    rows = pack(rests, edges, length, (items, counts, others, cost))
    of_groups = [np.add.reduceat(values, first, dtype=np.int64) for values in (pieces, rests > 0)]
    return full, items, counts[:rows], cost[:rows], np.stack([np.diff(edges), *of_groups, others])


def _pack(rests: Sizes, edges: Ints, length: int, out: Rows) -> int:
    """Pack the remainders of each group, 0 for a document without one, by best-fit decreasing. Return the rows of all.

    `out` gets the documents of the rows by their numbers in the group, how many each row has, the rows of each group,
    and, unless the last array is empty, the cost of each row, see `Packed.costs_of`.
    """
    items, counts, rows, costs = out
    item = row = 0
    for group in range(edges.size - 1):
        sizes = rests[edges[group] : edges[group + 1]]
        free: dict[int, list[list[int]]] = {}  # rows by their free space
        spaces: list[int] = []  # all of these, ascending
        packed: list[list[int]] = []
        for document in np.argsort(-sizes.astype(np.int64), kind="stable")[: np.count_nonzero(sizes)].tolist():
            size = int(sizes[document])
            at = bisect_left(spaces, size)
            if at == len(spaces):
                packed.append(into := [])
                space = length
            else:
                space = spaces[at]
                into = free[space].pop()
                if not free[space]:
                    del free[space], spaces[at]
            into.append(document)
            if space > size:
                if space - size not in free:
                    insort(spaces, space - size)
                free.setdefault(space - size, []).append(into)
        for documents in sorted(map(sorted, packed)):
            if costs.size:
                costs[row] = sum(int(size) ** 2 for size in sizes[documents]) // length
            counts[row], row = len(documents), row + 1
            items[item : item + len(documents)] = documents
            item += len(documents)
        rows[group] = len(packed)
    return row


def _find(rows: Ints, tables: tuple[Any, ...], out: tuple[Ints, Ints, Ints]) -> int:
    """Return the number of items of some rows, and write their edges, and also the items if `out` has room for them.

    `tables`: what `Packed` has of all rows. `out`: edges, documents and pieces as `Packed.items` returns them, but
    documents are numbered among the packed ones. Raises `ValueError` for a row that does not exist.
    """
    bounds, (documents_before, full_before, items_before, _), full, items, ends = tables
    edges, documents, pieces = out
    if rows.size and not 0 <= rows.min() <= rows.max() < bounds[-1]:
        raise ValueError("arrays and numbers do not match")
    groups = np.searchsorted(bounds, rows, side="right") - 1
    begin, end = full_before[groups], full_before[groups + 1]
    places = rows - bounds[groups] + begin  # among the full pieces: not of a row that is none
    others = np.flatnonzero(places >= end)
    number = (rows - end)[others]  # among the rows that are not full pieces
    counts = np.ones(rows.size, np.int64)
    counts[others] = ends[number + 1] - ends[number]
    edges[0], edges[1:] = 0, np.cumsum(counts)
    if len(documents) < edges[-1]:
        return int(edges[-1])
    before = items_before[groups[others]]
    starts = np.zeros(rows.size, np.int64)
    starts[others] = before + (ends[number] - before.astype(np.uint32))
    whole, groups, begin, end, places = (np.repeat(each, counts) for each in (places < end, groups, begin, end, places))
    at = np.repeat(starts - edges[:-1], counts) + np.arange(edges[-1])
    inside = np.empty(edges[-1], np.int64)
    inside[whole], inside[~whole] = full[places[whole]], items[at[~whole]]
    documents[: edges[-1]] = documents_before[groups] + inside
    # a piece has the number of the pieces of its document before it, all of which are full
    first = _search(full, begin, end, inside)
    pieces[: edges[-1]] = np.where(whole, places, _search(full, first, end, inside + 1)) - first
    return int(edges[-1])


def _search(values: NDArray[np.uint16], low: Ints, high: Ints, keys: Ints) -> Ints:
    """Return for each key the first index in [low, high) of a value that is not less, or `high`. Values ascend."""
    low, high = low.copy(), high.copy()
    while (left := np.flatnonzero(low < high)).size:
        middle = (low[left] + high[left]) // 2
        less = values[middle] < keys[left]
        low[left[less]] = middle[less] + 1
        high[left[~less]] = middle[~less]
    return low


def _locate(known: Ints, block: int, items: tuple[Ints, Ints, Ints], out: Ints) -> int:
    """Write where the documents of rows are in their slots. Return the first item whose document is not there, or -1.

    `items`: firsts, edges and documents. Row i has the documents edges[i] : edges[i + 1]. Its slot has ascending
    documents, `block` of `known` from firsts[i] on.
    """
    firsts, edges, documents = items
    slot = np.repeat(firsts, np.diff(edges))
    for first in distinct(firsts).tolist():
        found = np.flatnonzero(slot == first)
        at = np.searchsorted(known[first : first + block], documents[found])
        out[found] = first + np.minimum(at, block - 1)
    missing = np.flatnonzero(known[out] != documents)
    return int(missing[0]) if missing.size else -1


def _place(items: tuple[Ints, ...], sizes: tuple[int, int, int], out: tuple[Any, ...]) -> int:
    """Place the items of rows one after the other. Return the first row whose items do not fit into it, or -1.

    `items`: the edges of rows; of each item its document, its piece, and the row of the table that has its document;
    and this table, the first byte and the bytes of documents. `sizes`: the elements of a row, the rows of a step, and
    the bytes of an element.

    `out`: int64 of shape (3, items), the first byte of each item, the byte of all rows that it goes to, and its bytes;
    of shape (2, rows), the byte that the padding of each row goes to, and its bytes. Three columns follow, of which
    those that are empty are not written: of each element its document, -1 for padding, as int32 or int64, and its
    position in its item, 0 for padding, as int32; of each step where its segments begin, which are items and padding,
    as often as there is room followed by the end, as int32. Items without elements, which are left out, are no
    segments. Items with a part of an element do not fit.
    """
    (edges, documents, pieces, slot_rows, table), (length, step_rows, item_bytes) = items, sizes
    copies, gaps, *columns = out
    starts, size = table[slot_rows].T
    lengths = np.clip(size // item_bytes - pieces * length, 0, length)
    before = np.concatenate([[0], np.cumsum(lengths)])
    used = np.diff(before[edges])  # of each row
    count = len(used)
    row = np.repeat(np.arange(count), np.diff(edges))
    bad = [*np.flatnonzero(used > length)[:1].tolist(), *row[size % item_bytes > 0][:1].tolist()]
    if bad:
        return int(min(bad))
    at = row * length + before[:-1] - before[edges[row]]
    copies[:] = starts + pieces * (length * item_bytes), at * item_bytes, lengths * item_bytes
    gaps[:] = (np.arange(count) * length + used) * item_bytes, (length - used) * item_bytes
    pairs = (lengths, length - used), (documents, -1)
    of_segments, of_documents = (np.insert(of_items, edges[1:], of_gaps) for of_items, of_gaps in pairs)
    of_documents, of_segments = of_documents[of_segments > 0], of_segments[of_segments > 0]
    _write_columns(of_documents, of_segments, length * step_rows, columns)
    return -1


def _write_columns(documents: Ints, segments: Ints, step: int, columns: Sequence[Any]) -> None:
    """Write the columns of segments that follow one another, given their sizes. `step`: the elements of a step."""
    numbers, positions, cu_seqlens = columns
    starts, end = np.cumsum(segments) - segments, int(segments.sum())
    if numbers.size:
        numbers.reshape(-1)[:] = np.repeat(documents, segments)
    if positions.size:
        inside = np.arange(end) - np.repeat(starts, segments)
        positions.reshape(-1)[:] = np.where(np.repeat(documents < 0, segments), 0, inside)
    if cu_seqlens.size:
        cu_seqlens[:] = np.minimum(end - np.arange(0, end, step), step)[:, None]
        number, inside = np.divmod(starts, step)
        cu_seqlens[number, np.arange(len(starts)) - np.searchsorted(number, number)] = inside


try:
    from streamloader.order._packing import find, locate, pack, place
except ImportError:  # no C compiler
    find, locate, pack, place = _find, _locate, _pack, _place
