"""Class numbers of a further source, as a dataset that has classes already counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import Part, Refuse, Source
from streamloader.errors import FieldError
from streamloader.format.codecs import Column
from streamloader.format.manifest import INTS, Field
from streamloader.storage.protocol import ObjectInfo

Classes = Mapping[str, Sequence[str]]


def classes_of(notes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the class names by field that a source's notes or a manifest's provenance tell."""
    found = notes.get("classes")
    listed = found.items() if isinstance(found, Mapping) else ()
    return {name: list(names) for name, names in listed if isinstance(names, Sequence) and not isinstance(names, str)}


def merged_classes(there: Classes, new: Classes) -> dict[str, list[str]]:
    """Return the names that the dataset has, each list with the new ones behind."""
    return {name: [*names, *(one for one in new.get(name, ()) if one not in names)] for name, names in there.items()}


def relabel(source: Source, there: Classes) -> Source:
    """Return the source with the class numbers of a dataset whose class names are `there`; new names come behind them.

    Raises `FieldError` for a field that cannot hold so many classes.
    """
    here = classes_of(source.notes)
    merged = merged_classes(there, here)
    numbers: dict[str, tuple[int, ...]] = {}
    for name, names in here.items():
        if name not in there or name not in source.fields or names == list(merged[name][: len(names)]):
            continue
        field = source.fields[name]
        if field.dtype not in INTS or (not field.fixed and field.shape):
            raise FieldError(f"the classes of {name!r} differ and {field} is no number of a class", "use --map")
        numbers[name] = tuple(merged[name].index(one) for one in names)
        if max(numbers[name], default=0) > np.iinfo(field.dtype).max:
            raise FieldError(f"{len(merged[name])} classes of {name!r} do not fit {field}", "convert all of it anew")
    return RelabelledSource(source, numbers) if numbers else source


@dataclass(frozen=True)
class RelabelledSource:
    """A source whose class numbers are replaced: number i of a field becomes `numbers[field][i]`."""

    source: Source
    numbers: Mapping[str, tuple[int, ...]]

    @property
    def url(self) -> str:
        """Where it is."""
        return self.source.url

    @property
    def files(self) -> Sequence[ObjectInfo]:
        """The source's files."""
        return self.source.files

    @property
    def fields(self) -> Mapping[str, Field]:
        """The source's fields."""
        return self.source.fields

    @property
    def num_samples(self) -> int:
        """The source's number of rows."""
        return self.source.num_samples

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the source tells."""
        return self.source.notes

    def part(self, rows: NDArray[np.int64]) -> RelabelledPart:
        """Return the part that holds these rows."""
        dtypes = {name: self.fields[name].dtype for name in self.numbers}
        return RelabelledPart(self.source.part(rows), self.numbers, dtypes)


@dataclass(frozen=True)
class RelabelledPart:
    """Some rows of a relabelled source."""

    part: Part
    numbers: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return the columns; numbers that are no class, such as -1, stay as they are."""
        columns = self.part.read(refuse)
        for name, numbers in self.numbers.items():
            dtype = np.dtype(self.dtypes[name]).newbyteorder("<")
            column, table = columns[name], np.array(numbers, dtype)
            if isinstance(column, np.ndarray):
                columns[name] = _replaced(column, table)
            else:
                columns[name] = [_replaced(np.frombuffer(item, dtype), table).tobytes() for item in column]
        return columns


def _replaced(values: NDArray[Any], table: NDArray[Any]) -> NDArray[Any]:
    known = (values >= 0) & (values < len(table))
    return np.where(known, table[np.where(known, values, 0)], values).astype(values.dtype)
