"""Which samples `where=` of `StreamingDataset` chooses: checked, and read from small fields where it is a condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.resident import load_whole
from streamloader.errors import SelectionError
from streamloader.format.manifest import Manifest
from streamloader.format.reader import FieldReader, field_reader
from streamloader.plan.expression import Condition
from streamloader.plan.selection import Selection
from streamloader.stats import Counters
from streamloader.storage.protocol import Store

# bytes of condition columns and their intermediate results at once, however many samples there are
PIECE_BYTES = 32 << 20
# a condition, a slice of samples, a mask with a bool for each, or their numbers; also as a tensor
WhereChoice = None | str | slice | Sequence[bool] | Sequence[int] | np.ndarray[Any, Any]


def read_where(where: WhereChoice) -> Any:
    """Return a condition parsed, anything else as it is. Raises `SelectionError` for one that cannot be read."""
    return Condition.parse(where) if isinstance(where, str) else where


def choose_selection(where: Any, manifest: Manifest, store: Store) -> Selection | None:
    """Return the samples that are chosen by what `read_where` returned; None for all.

    A condition reads the fields that it names, each of one number a sample, a piece at a time; class names in it are
    those of the manifest. Raises `SelectionError` for a field that is not there or holds no such numbers, before
    anything is read, and for what selects nothing.
    """
    if where is None:
        return None
    if not isinstance(where, Condition):
        return Selection.of(where, manifest.num_samples)
    usable = [name for name, layout in manifest.fields.items() if layout.field.fixed and not layout.field.shape]
    for name in sorted(where.fields - set(usable)):
        found = f"is {manifest.fields[name].field}" if name in manifest.fields else "is no field"
        quotes = (
            f"write the class as '{name}' in quotes; " if any(name in one for one in manifest.classes.values()) else ""
        )
        raise SelectionError(
            f"where={where.text!r} asks for {name!r}, which {found}",
            f"{quotes}fields of one number a sample are {', '.join(usable) or 'none'}; or give a mask or indexes",
        )
    where = where.with_classes(manifest.classes)
    readers = {name: field_reader(store, manifest, name) for name in where.fields}
    return Selection(_matching(where, readers, store, manifest.num_samples), manifest.num_samples)


def _matching(where: Condition, readers: Mapping[str, FieldReader], store: Store, count: int) -> NDArray[np.int64]:
    """Return the numbers of the samples that match. Keeps one bit a sample until their number is known."""
    # a column as stored, once more with 64 bits, and intermediate results
    sample_bytes = sum(reader.layout.field.item_bytes + 8 for reader in readers.values()) + 16
    piece = max(1, PIECE_BYTES // sample_bytes)
    bits, total = [], 0
    for start in range(0, count, piece):
        stop = min(start + piece, count)
        columns = {name: load_whole(reader, store, Counters(), (start, stop)) for name, reader in readers.items()}
        mask = where.mask(columns)
        bits.append(np.packbits(mask))
        total += int(np.count_nonzero(mask))
    found = np.empty(total, np.int64)
    total = 0
    for start, some in zip(range(0, count, piece), bits, strict=True):
        part = np.flatnonzero(np.unpackbits(some, count=min(piece, count - start)))
        np.add(part, start, out=found[total : total + part.size])
        total += part.size
    return found
