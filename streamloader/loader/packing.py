"""Opens datasets whose documents are packed into rows of a fixed shape: `pack=` with `fit="best"`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.dataset import Dataset
from streamloader.errors import FieldError, UsageError
from streamloader.loader.arguments import Arguments, lengths_of, lengths_table
from streamloader.options import Pack
from streamloader.order.packing import Packed
from streamloader.order.schedule import Ints

MAX_ELEMENTS = (1 << 31) - 1  # of a batch


def pack_rows(datasets: Sequence[Dataset], packs: Mapping[str, Pack], given: Arguments) -> tuple[Dataset, ...]:
    """Return the datasets with the rows that their documents are packed into, each by itself.

    The lengths of documents are read in pieces from their tables. Raises `UsageError` for options that do not fit
    packed rows; `FieldError` for fields that are not packed alike, or have no table of lengths; `SelectionError` if
    nothing can be packed.
    """
    names, options = [*packs], {replace(pack, pad=0) for pack in packs.values()}
    if len(options) > 1:
        raise UsageError(f"pack={dict(packs)} packs fields differently", "give all fields the same Pack, but for pad=")
    for option, value in (("collate", given.collate), ("bucket_by", given.bucket_by)):
        if value is not None:
            remedy = "leave it out: rows have one shape; Pack(balance='attention') gives steps rows of like cost"
            raise UsageError(f"{option}={value!r:.60} with packed rows", remedy)
    (pack,) = options
    if (elements := (given.batch_size or 1) * pack.length) > MAX_ELEMENTS:
        problem = f"batch_size={given.batch_size} packed rows of {pack.length} have {elements} elements"
        raise UsageError(problem, f"give a batch_size of at most {MAX_ELEMENTS // pack.length}: offsets have 32 bits")
    if pack.balance is not None and given.shuffle is False:
        remedy = "leave one of them out: balancing changes which rows a batch has"
        raise UsageError(f"Pack(balance={pack.balance!r}) with shuffle=False", remedy)
    columns = {f"{names[0]}_{column}" for column in pack.columns}
    if taken := sorted(columns & {*names}):
        raise FieldError(f"the batch has a column {taken[0]!r}, and so has the dataset", "leave it out with fields=")
    return tuple(replace(dataset, packed=_packed(dataset, names, pack)) for dataset in datasets)


def _packed(dataset: Dataset, names: Sequence[str], pack: Pack) -> Packed:
    if others := [name for name in dataset.names if name not in names]:
        problem = f"pack= of {', '.join(names)} with the fields {', '.join(others)}, which have a value per document"
        raise FieldError(problem, f"give fields={names}, or pack the others alike")
    if dataset.weights_digest is not None:
        remedy = "leave weights= out, and weigh sources with sl.Mixture"
        raise UsageError("weights= with packed rows, which have several documents each", remedy)
    lengths = _alike(dataset, names)
    chosen: Any = {"split": pack.split, "packed_from": dataset.selection, "costs": pack.balance is not None}
    return Packed(lengths, pack.length, **chosen)


def _alike(dataset: Dataset, names: Sequence[str]) -> Iterator[NDArray[Any]]:
    """Yield the lengths of the selected documents in pieces. Raises `FieldError` unless all fields have them."""
    first = 0
    for piece, *others in zip(*(_lengths(dataset, name) for name in names), strict=True):
        for name, other in zip(names[1:], others, strict=True):
            if np.any(differ := piece != other):
                at = int(differ.argmax())
                shown = f"{piece[at]} and {other[at]}"
                problem = f"{names[0]!r} and {name!r} of document {first + at} have {shown} elements"
                raise FieldError(problem, "pack fields of equal lengths, like tokens and their loss mask")
        first += piece.size
        yield piece


def _lengths(dataset: Dataset, name: str) -> Iterator[NDArray[Any]]:
    """Yield the lengths of the selected samples of a field in elements, in pieces; of joined datasets in one."""
    if dataset.joined:
        of_all = lengths_of(dataset, name)
        yield of_all if dataset.selection is None else of_all[dataset.selection[:]]
        return
    table, item = lengths_table(dataset, name), dataset.manifest.fields[name].field.item_bytes
    remaining, selection = dataset.remaining, dataset.selection
    stored = first = 0
    excluded: Ints | None = getattr(selection, "excluded", None)
    for page in table.pages():
        lengths = page // np.uint32(item)
        if remaining is not None:
            lengths = np.delete(lengths, _between(remaining.excluded, stored, stored + page.size))
        stored, begin, first = stored + page.size, first, first + lengths.size
        if excluded is not None:
            lengths = np.delete(lengths, _between(excluded, begin, first))
        elif selection is not None:
            lengths = lengths[_between(selection, begin, first)]
        yield lengths


def _between(numbers: Any, start: int, stop: int) -> Ints:
    """Return those of ascending numbers that are in [start, stop), counted from `start`."""
    low, high = np.searchsorted(numbers, [start, stop])
    found: Ints = numbers[low:high] - start
    return found
