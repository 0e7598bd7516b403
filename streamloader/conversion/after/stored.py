"""A finished dataset as columns, as the format holds them: for what compares or copies it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import DecodeError
from streamloader.format.codecs import Column, Items
from streamloader.format.manifest import FORMAT, Field
from streamloader.format.opening import Opened
from streamloader.format.reader import FieldReader, Placed, Run, field_reader
from streamloader.format.threads import run_all
from streamloader.options import MIB

THREADS = 4  # requests of one column at once
REQUEST_BYTES = 8 * MIB


def split_names(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the splits that a root document lists; none for a dataset without splits."""
    attributes = document.get("attributes")
    ours = attributes.get(FORMAT) if isinstance(attributes, dict) else None
    listed = ours.get("splits") if isinstance(ours, dict) else None
    return tuple(listed) if isinstance(listed, dict) else ()


class StoredColumns:
    """Reads columns of one dataset; thread-safe. `names` chooses fields, all by default."""

    def __init__(self, opened: Opened, names: Iterable[str] | None = None) -> None:
        wanted = opened.manifest.fields if names is None else names
        self._readers = {name: field_reader(opened.store, opened.manifest, name) for name in wanted}
        self._plane, self._retries = opened.store.reader(), opened.store.retries

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that are read."""
        return {name: reader.layout.field for name, reader in self._readers.items()}

    def read(self, start: int, stop: int) -> dict[str, Column]:
        """Return the samples [start, stop) of each field: arrays, or lists of bytes.

        Raises a `FormatError` or `DecodeError`, which name the object or the sample, or a `StorageError`.
        """
        return {name: self._column(reader, start, stop) for name, reader in self._readers.items()}

    def _column(self, reader: FieldReader, start: int, stop: int) -> Column:
        runs = reader.runs(start, stop, REQUEST_BYTES)
        field = reader.layout.field
        if field.fixed:
            out = np.empty((stop - start, *field.shape), field.dtype)
            run_all(lambda run: self._load(reader, run, out, start), runs, THREADS)
            return out
        column: list[bytes] = []
        for placed in run_all(lambda run: self._load(reader, run), runs, THREADS):
            for number, items in placed:
                bad = bad_item(field, items)
                if bad is not None:
                    problem = f"field {reader.name!r} of sample {number + bad[0]} is not {field}: {bad[1]}"
                    raise DecodeError(problem, "look at the dataset with streamloader verify")
                low, high = max(start - number, 0), min(stop - number, len(items))
                edges = zip(items.starts[low:high].tolist(), items.stops[low:high].tolist(), strict=True)
                column.extend(bytes(items.buffer[first:last]) for first, last in edges)
        return column

    def _load(self, reader: FieldReader, run: Run, out: NDArray[Any] | None = None, first: int = 0) -> list[Placed]:
        request = partial(reader.fetch, self._plane, run)
        return reader.load(run, lambda: self._retries.call(request), out, first) or []


def bad_item(field: Field, items: Items) -> tuple[int, str] | None:
    """Return the first item that is no value of a variable-size field, and why; None where all are."""
    if field.kind == "ragged":
        sizes = items.stops - items.starts
        wrong = np.flatnonzero(sizes % field.item_bytes)
        if not len(wrong):
            return None
        return int(wrong[0]), f"{sizes[wrong[0]]} bytes are no whole rows of {field.item_bytes}"
    if field.kind != "text" or not len(items):
        return None
    # Every item has its length of four bytes in front. With an ASCII character in their place the whole buffer is
    # UTF-8 exactly where each item is, since no sequence of several bytes holds one.
    first, last = int(items.starts[0]), int(items.stops[-1])
    text = np.frombuffer(items.buffer[first:last], np.uint8).copy()
    between = items.starts[1:, None] - first + np.arange(-4, 0)
    text[between.ravel()] = ord("\n")
    try:
        text.tobytes().decode()
    except UnicodeDecodeError as error:
        row = int(np.searchsorted(items.starts, first + error.start, side="right")) - 1
        return row, f"{error.reason} at byte {first + error.start - int(items.starts[row])}"
    return None
