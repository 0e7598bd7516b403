"""Gathers packed rows: each item, a document or a piece of one, is copied to its place in a row of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import Buffers
from streamloader.engine.budget import LIVE_BATCHES
from streamloader.engine.dataset import Dataset, first_samples
from streamloader.engine.gather import Copy, flat
from streamloader.engine.residence import Chunks, Gathered
from streamloader.errors import CorruptError
from streamloader.options import PACKED_COLUMNS, Pack
from streamloader.order.packing import place
from streamloader.order.schedule import BatchPlan, Ints
from streamloader.samples import distinct

# In the place of columns that are not written.
NOTHING: NDArray[Any] = np.empty(0, np.int32)
# The documents, the pieces and the edges of rows, as `Packed.items` returns them for their numbers.
Items = tuple[Ints, Ints, Ints]
FindItems = Callable[[Ints], Items]


def row_items(datasets: Sequence[Dataset]) -> tuple[FindItems, int, str]:
    """Return what finds the items of packed rows, the most segments of one, and the dtype of the documents' numbers.

    The segments of a row are its items, and the gap at its end. Documents are numbered within their dataset, by int32
    unless one has more.
    """
    most = max(dataset.packed.most_items(1) for dataset in datasets if dataset.packed is not None)
    last = max(dataset.manifest.num_remaining for dataset in datasets) - 1
    return _items_of(datasets), 1 + most, "int32" if last <= np.iinfo(np.int32).max else "int64"


def _items_of(datasets: Sequence[Dataset]) -> FindItems:
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


def element_bytes(pack: Pack) -> int:
    """Return the bytes of an element in the columns beside the rows, but for documents with numbers of 64 bits."""
    return 4 * len({"documents", "positions"}.intersection(pack.columns))


def gather_rows(
    fields: Mapping[Chunks, Pack],
    items: Items,
    slot_rows: Ints,
    plan: BatchPlan,
    *,
    numbers: str,
    segments: int,
    buffers: Buffers,
) -> tuple[Gathered, int]:
    """Return the columns of packed rows with what must be copied to them, and the number of elements that are padding.

    `fields`: how each is packed, all alike. `slot_rows`: where the document of each item is, see `residence.py`.
    `numbers`: the dtype of the numbers of documents. `segments`: the most of a row. The document of an item without
    bytes is bad, and the item is left out of its row.

    Raises `DecodeError` for bytes that are invalid for their field, `CorruptError` for documents that do not fit into
    their rows, so that the table of lengths must be wrong.
    """
    (documents, pieces, edges), count = items, len(plan.rows)
    length, name = next(iter(fields.values())).length, next(iter(fields)).name
    step_rows, lease = min(plan.step_rows, count), partial(buffers.lease, usual=LIVE_BATCHES)
    wanted, steps = {*next(iter(fields.values())).columns}, -(-count // step_rows)
    beside = [
        lease((count, length), numbers) if "documents" in wanted else NOTHING,
        lease((count, length), "int32") if "positions" in wanted else NOTHING,
        np.empty((steps, step_rows * segments + 1), np.int32) if "cu_seqlens" in wanted else NOTHING,
    ]
    made = zip(PACKED_COLUMNS, (*beside[:2], tuple(beside[2]) if steps > 1 else beside[2].reshape(-1)), strict=True)
    columns: dict[str, Any] = {f"{name}_{column}": array for column, array in made if column in wanted}
    copies: list[Copy] = []
    for field, pack in fields.items():
        item_bytes, placed, gaps = field.field.item_bytes, _ints(3, documents.size), _ints(2, count)
        given = (edges, documents, pieces, slot_rows, field.table), (length, step_rows, item_bytes)
        if (bad := place(*given, (placed, gaps, *beside))) >= 0:
            field.check(slot_rows, plan._replace(samples=documents))
            raise _misfit(fields, int(plan.samples[bad]))
        columns[field.name] = rows = lease((count, length), field.field.dtype)
        copies.append(Copy(flat(rows), field.memory, *placed))
        if padding := int(gaps[1].sum()) // item_bytes:
            pad = np.full(int(gaps[1].max()) // item_bytes, pack.pad, field.field.dtype)
            copies.append(Copy(flat(rows), flat(pad), np.zeros_like(gaps[0]), *gaps))
        beside = [NOTHING] * 3
    lengths = [field.table[slot_rows, 1] // field.field.item_bytes for field in fields] if len(fields) > 1 else []
    for other in lengths[1:]:
        if np.any(differ := other != lengths[0]):
            raise _misfit(fields, int(plan.samples[edges.searchsorted(differ.argmax(), side="right") - 1]))
    return (columns, copies), padding


def _misfit(fields: Iterable[Chunks], row: int) -> CorruptError:
    """Return the error of a row whose documents do not fit into it."""
    names = ", ".join(repr(field.name) for field in fields)
    problem = f"the documents of packed row {row} of {names} have other lengths than the tables of lengths"
    return CorruptError(problem, "check the dataset with streamloader verify")


def _ints(*shape: int) -> Ints:
    """Return an uninitialized array."""
    return np.empty(shape, np.int64)
