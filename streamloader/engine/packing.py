"""Gathers packed rows: each item, a document or a piece of one, is copied to its place in a row of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import Buffers
from streamloader.engine.budget import LIVE_BATCHES
from streamloader.engine.dataset import Dataset, first_samples
from streamloader.engine.gather import Copy, flat
from streamloader.engine.residence import Chunks, Gathered
from streamloader.errors import CorruptError
from streamloader.options import Pack
from streamloader.order.schedule import BatchPlan, Ints
from streamloader.samples import distinct

# The columns beside the rows of the first packed field, by what follows its name.
CU_SEQLENS, POSITIONS, DOCUMENTS = "_cu_seqlens", "_positions", "_documents"
# The bytes of an element in them.
ELEMENT_BYTES = 4 + 8
# The documents, the pieces and the edges of rows, as `Packed.items` returns them for their numbers.
Items = tuple[Ints, Ints, Ints]
FindItems = Callable[[Ints], Items]


def items_of(datasets: Sequence[Dataset]) -> FindItems:
    """Return a function from the numbers of rows of concatenated datasets to their items.

    Documents are numbered within their dataset.
    """
    packs = [dataset.packed for dataset in datasets]
    firsts = np.array(first_samples(datasets, selected=True))
    if len(packs) == 1 and packs[0] is not None:
        return packs[0].items

    def find(samples: Ints) -> Items:
        source = np.searchsorted(firsts, samples, side="right") - 1
        present = distinct(source).tolist()
        found = []
        counts = np.zeros(len(samples), np.int64)
        for number in present:
            rows, packed = np.flatnonzero(source == number), packs[number]
            assert packed is not None
            documents, pieces, edges = packed.items(samples[rows] - firsts[number])
            counts[rows] = np.diff(edges)
            found.append((np.repeat(rows, np.diff(edges)), documents, pieces))
        edges = np.concatenate([[0], np.cumsum(counts)])
        if len(found) == 1:
            return found[0][1], found[0][2], edges
        row, documents, pieces = map(np.concatenate, zip(*found, strict=True))
        order = np.argsort(row, kind="stable")
        return documents[order], pieces[order], edges

    return find


def most_segments(datasets: Sequence[Dataset]) -> int:
    """Return the most segments of a row: its items, and the gap at its end."""
    return 1 + max(dataset.packed.most_items(1) for dataset in datasets if dataset.packed is not None)


def rows_of_items(edges: Ints) -> Ints:
    """Return the row of each item."""
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))


def gather_rows(
    fields: Mapping[Chunks, Pack],
    items: Items,
    slot_rows: Ints,
    plan: BatchPlan,
    *,
    numbers: NDArray[Any],
    segments: int,
    buffers: Buffers,
) -> tuple[Gathered, int]:
    """Return the columns of packed rows with what must be copied to them, and the number of elements that are padding.

    `fields`: how each is packed, all alike. `slot_rows`: where the document of each item is, see `residence.py`.
    `numbers`: of the positions of a row, in the arena. `segments`: the most of a row. The document of an item without
    bytes is bad, and the item is left out of its row.

    Raises `DecodeError` for bytes that are invalid for their field, `CorruptError` for documents that do not fit into
    their rows, so that the table of lengths must be wrong.
    """
    (documents, pieces, edges), count = items, len(plan.rows)
    length = next(iter(fields.values())).length
    places = [field.table[slot_rows] for field in fields]
    lengths = [table[:, 1] // field.field.item_bytes for table, field in zip(places, fields, strict=True)]
    for field, table in zip(fields, places, strict=True):
        if np.any(table[:, 1] % field.field.item_bytes):
            field.check(slot_rows, plan._replace(samples=documents))
    sizes = np.clip(lengths[0] - pieces * length, 0, length)
    before = np.concatenate([[0], np.cumsum(sizes)])
    used = np.diff(before[edges])  # of each row
    if used.max(initial=0) > length or any(not np.array_equal(lengths[0], other) for other in lengths[1:]):
        names = ", ".join(repr(field.name) for field in fields)
        bad = int(plan.samples[used.argmax()])
        problem = f"the documents of packed row {bad} of {names} have other lengths than the tables of lengths"
        raise CorruptError(problem, "check the dataset with streamloader verify")
    row = rows_of_items(edges)
    at = row * length + before[:-1] - before[edges[row]]
    gaps = _ranges(np.arange(count) * length + used, length - used)
    columns: dict[str, Any] = {}
    copies = []
    for (field, pack), table in zip(fields.items(), places, strict=True):
        item = field.field.item_bytes
        out = buffers.lease((count, length), field.field.dtype, LIVE_BATCHES)
        out.reshape(-1)[gaps] = pack.pad
        columns[field.name] = out
        copies.append(Copy(flat(out), field.memory, table[:, 0] + pieces * length * item, at * item, sizes * item))
    # a segment is an item, or the gap at the end of a row
    of_segments = np.insert(sizes, edges[1:], length - used)
    documents, nonempty = np.insert(documents, edges[1:], -1), of_segments > 0
    documents, of_segments = documents[nonempty], of_segments[nonempty]
    starts = np.cumsum(of_segments) - of_segments
    name, size = next(iter(fields)).name, numbers.itemsize
    columns[name + POSITIONS] = positions = buffers.lease((count, length), numbers.dtype.name, LIVE_BATCHES)
    positions.reshape(-1)[gaps] = 0
    copies.append(Copy(flat(positions), flat(numbers), np.zeros_like(at), at * size, sizes * size))
    columns[name + DOCUMENTS] = np.repeat(documents, of_segments).reshape(count, length)
    columns[name + CU_SEQLENS] = _cu_seqlens(starts, plan, length, segments)
    return (columns, copies), len(gaps)


def _cu_seqlens(starts: Ints, plan: BatchPlan, length: int, segments: int) -> object:
    """Return where the segments of a step begin in its flattened rows, and then its end, int32.

    There is an entry for the most segments that a step may have, and one more. A tuple has those of several steps.
    """
    rows, step = len(plan.rows), plan.step_rows
    ends = np.minimum(rows - np.arange(0, rows, step), step) * length
    out = np.repeat(ends.astype(np.int32)[:, None], step * segments + 1, axis=1)
    number, inside = np.divmod(starts, step * length)
    out[number, np.arange(len(starts)) - np.searchsorted(number, number)] = inside
    return tuple(out) if rows > step else out[0]


def _ranges(starts: Ints, sizes: Ints) -> Ints:
    """Return the concatenated ranges of numbers from `starts` on."""
    ranges: Ints = np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    return ranges
