"""Joins two datasets: the left one, with the fields that the right one has for each of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.dataset import Dataset
from streamloader.errors import FieldError, SelectionError, UsageError
from streamloader.format.keys import check_found, find_rows, read_keys
from streamloader.format.manifest import check_name
from streamloader.format.reader import GAP_BYTES
from streamloader.loader.arguments import choose_fields
from streamloader.options import MIB, Join
from streamloader.order.schedule import Ints
from streamloader.samples import distinct

# What is warned of: an epoch that reads more than this many times the bytes of a joined field, and so many bytes more.
TIMES, BYTES = 4, 256 * MIB
BLOCKS = 32  # blocks of a dataset that are looked at


def join_datasets(
    join: Join, left: Dataset, right: Dataset, fields: Sequence[str] | None, columns: Sequence[str]
) -> Dataset:
    """Return the left dataset with fields of both; the arguments are those of `open_dataset`. Raises as `Join`."""
    nested = bool(left.joined)
    rows = _match(join, left, right)
    own = left.layouts if nested else left.manifest.fields
    offered = _offered(join, right)
    taken = [name for name in offered if name in own and (fields is None or name in fields)]
    if taken:
        problem = f"{left.store.url} and {right.store.url} both have the fields {', '.join(taken)}"
        renamed = ", ".join(f"{offered[name]!r}: '{name}_right'" for name in taken)
        remedy = "name those of the right dataset to read in Join(fields=), without these, or rename them"
        remedy = f"{remedy}: Join(fields={{{renamed}, ...}})"
        raise FieldError(problem, remedy)
    layouts = {name: right.manifest.fields[stored] for name, stored in offered.items()}
    names = choose_fields({**own, **layouts}, fields, columns)
    right = replace(right, names=tuple(name for name in names if name not in own), renamed=offered)
    if rows is not None and join.missing == "drop":
        left = _without(left, rows < 0)
    if rows is not None and np.array_equal(rows, np.arange(len(rows))):
        rows = None
    return replace(left, names=names, joined=(*left.joined, (replace(right, selection=None), rows)))


def _offered(join: Join, right: Dataset) -> dict[str, str]:
    """Return the fields of the right dataset that are offered: their names in batches, and in the dataset."""
    known = right.manifest.fields
    if join.fields is None:
        return {name: name for name in known if name not in join.keys[1:]}
    names = join.fields if isinstance(join.fields, Mapping) else dict(zip(join.fields, join.fields, strict=True))
    chosen = choose_fields(known, tuple(join.fields), ())
    for name in names.values():
        check_name(name)
    return {names[name]: name for name in chosen}


def _match(join: Join, left: Dataset, right: Dataset) -> Ints | None:
    """Return the number in the right dataset of each sample of the left one, -1 if it has none; None: the same."""
    if not join.keys:
        counts = left.manifest.num_remaining, right.manifest.num_remaining
        if right.selection is not None:
            raise UsageError(f"where= or exclude= of {right.store.url} in a Join without on=", "give them to the left")
        if counts[0] != counts[1]:
            problem = f"{left.store.url} has {counts[0]} samples, {right.store.url} has {counts[1]}"
            raise FieldError(problem, "join them by a key: Join(on=)")
        deleted = [side.remaining.excluded for side in (left, right) if side.remaining is not None]
        same = len(deleted) < 2 or deleted[0].size != deleted[1].size or np.array_equal(deleted[0], deleted[1])
        if not same:
            problem = f"other samples are deleted from {left.store.url} than from {right.store.url}"
            raise FieldError(problem, "join them by a key: Join(on=)")
        return None
    wanted, found = (_keys(dataset, key) for dataset, key in zip((left, right), join.keys, strict=True))
    selected = None if right.selection is None else right.selection[:]
    where = f"field {join.keys[1]!r} of {right.store.url}"
    rows = find_rows(wanted, found if selected is None else found[selected], where)
    if join.missing == "raise":
        numbers = _numbers(left)
        chosen = slice(None) if numbers is None else numbers[:]
        check_found(wanted[chosen][rows[chosen] < 0], where, 'give every sample a row, or Join(missing="drop")')
    if selected is not None:
        rows[rows >= 0] = selected[rows[rows >= 0]]
    return rows


def _keys(dataset: Dataset, key: str) -> NDArray[Any]:
    """Return the key of each sample, which may be a field that is joined to it; any key if it has no row there."""
    side, rows, stored = dataset.side(key)
    keys = read_keys(side.store, side.manifest, stored, side.remaining)
    return keys if rows is None else keys[rows]


def describe_reads(dataset: Dataset, block: int) -> str:
    """Return a warning if blocks of `block` samples read far more of joined datasets than their samples have, else "".

    It looks at some of the blocks. Those of packed rows read the samples that are their documents, which several blocks
    may have parts of.
    """
    count = dataset.num_samples
    starts = np.linspace(0, max(0, count - block), min(BLOCKS, -(-count // block))).astype(np.int64).tolist()
    numbers = [_of_block(dataset, at, min(at + block, count)) for at in starts]
    for name in dataset.names:
        right, rows, stored = dataset.side(name)
        layout = right.manifest.fields[stored]
        if rows is None or layout.resident:
            continue
        whole, samples = min(layout.chunk, right.manifest.num_samples), right.manifest.num_samples
        largest = max(map(len, numbers)) // whole  # a request has no more chunks, with the two beside the gap
        gap = min(GAP_BYTES * samples // max(1, layout.stored) // whole, max(0, largest - 2))
        chunks = sum(_chunks_read(rows[each] // layout.chunk, gap) for each in numbers) / len(starts)
        times = chunks * whole * count / min(block, count) / dataset.num_documents
        if times > TIMES and (times - 1) * layout.stored / samples * dataset.num_documents > BYTES:
            return (
                f"blocks of {block} samples of {dataset.store.url} read {chunks:.0f} chunks of {name!r}, with {whole} "
                f"samples each, from {right.store.url}, which has another order: an epoch reads about {times:.0f} "
                "times the bytes of its samples; add the field to the dataset with sl.add_columns, or write it in "
                "the same order"
            )
    return ""


def _of_block(dataset: Dataset, start: int, stop: int) -> Ints:
    """Return the samples that a block of the order reads, by their numbers in the left dataset."""
    if dataset.packed is not None:
        return dataset.packed.documents(start, stop)
    return np.arange(start, stop) if dataset.selection is None else dataset.selection[start:stop]


def _chunks_read(chunks: Ints, gap: int) -> int:
    """Return how many chunks are read for some: those between them too, in gaps of up to `gap`."""
    needed = distinct(chunks)
    between = np.diff(needed) - 1
    return needed.size + int(between[between <= gap].sum())


def _numbers(left: Dataset) -> Any:
    """Return the selected samples, also if epochs draw from these."""
    return getattr(left.selection, "drawn_from", left.selection)


def _without(left: Dataset, unmatched: NDArray[np.bool_]) -> Dataset:
    """Return a dataset without the unmatched samples. Raises `SelectionError` if none is left."""
    if not unmatched.any():
        return left
    if left.weights_digest is not None:
        problem = f'Join(missing="drop") after one whose left side {left.store.url} has weights='
        raise UsageError(problem, "put the join with missing= inside")
    numbers = np.flatnonzero(~unmatched)
    if left.selection is not None:
        numbers = left.selection[:]
        numbers = numbers[~unmatched[numbers]]
    if not numbers.size:
        problem = f"none of {left.num_samples} samples of {left.store.url} has a key of the right dataset"
        raise SelectionError(problem, "join by other fields")
    return replace(left, selection=numbers)
