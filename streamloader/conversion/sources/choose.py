"""The fields that the user keeps of a source that comes as columns, and the types that they shall have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Part, Refuse, Sieve, Source, drop_rows
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import FieldError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import from_bytes, to_column, to_value
from streamloader.storage.protocol import ObjectInfo


def choose(source: Source, wish: Wish) -> Source:
    """Return the source with the fields that are wished, in that order; itself where it has just those.

    Raises `FieldError` for a field that is not there, or that cannot become what is wished.
    """
    there = source.fields
    unknown = next((name for name in wish.fill if name not in there), None)
    if unknown is not None:
        raise FieldError(f"fill names the field {unknown!r}, which {source.url} lacks", f"it has {', '.join(there)}")
    fields = {name: kind or there.get(name) for name, kind in wish.fields.items()} or dict(there)
    if list(fields.items()) == list(there.items()):
        return source
    for name, wanted in fields.items():
        if wanted is None or name not in there:
            raise FieldError(f"{source.url} has no field {name!r}", f"it has {', '.join(there)}")
        _check(name, there[name], wanted)
    return ChosenSource(source, {name: kind for name, kind in fields.items() if kind})


def _check(name: str, have: Field, wanted: Field) -> None:
    numbers = {"tensor", "ragged"}
    if (have.kind in numbers) != (wanted.kind in numbers):
        problem = f"field {name!r} is {have} in the source, which cannot become {wanted}"
        raise FieldError(problem, "choose another type, or make it so with --map")
    inner = {have.shape[1:] if have.fixed else have.shape, wanted.shape[1:] if wanted.fixed else wanted.shape}
    if have.kind in numbers and (len(inner) > 1 or (have.fixed and wanted.fixed and have.shape != wanted.shape)):
        raise FieldError(f"field {name!r} is {have} in the source, which cannot become {wanted}", "keep its shape")


@dataclass(frozen=True)
class ChosenSource:
    """Some fields of a source, some of them cast."""

    source: Source
    fields: Mapping[str, Field]

    @property
    def url(self) -> str:
        """Where it is."""
        return self.source.url

    @property
    def files(self) -> Sequence[ObjectInfo]:
        """The source's files."""
        return self.source.files

    @property
    def num_samples(self) -> int:
        """The source's number of rows."""
        return self.source.num_samples

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the source tells."""
        return self.source.notes

    def part(self, rows: NDArray[np.int64]) -> ChosenPart:
        """Return the part that holds these rows."""
        there = {name: self.source.fields[name] for name in self.fields}
        return ChosenPart(self.source.part(rows), there, self.fields)


@dataclass(frozen=True)
class ChosenPart:
    """Some rows: `have` is what the fields are in the source, `fields` what they become."""

    part: Part
    have: Mapping[str, Field]
    fields: Mapping[str, Field]

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return the columns of the fields that are kept; a value that does not fit its type is refused."""
        sieve = Sieve(refuse)
        columns = self.part.read(sieve)
        bad: dict[int, FieldError] = {}
        out = {name: self._column(name, columns[name], bad) for name in self.fields}
        if not bad:
            return out
        kept = sieve.kept(len(columns[next(iter(self.fields))])).tolist()
        for position, error in sorted(bad.items()):
            refuse(BadSample(kept[position], "", error.problem, error.remedy))
        return drop_rows(out, bad)

    def _column(self, name: str, column: Column, bad: dict[int, FieldError]) -> Column:
        have, wanted = self.have[name], self.fields[name]
        if have == wanted or (have.kind == wanted.kind == "bytes"):
            return column
        if have.fixed and wanted.fixed:
            try:
                return to_column(name, wanted, column, 0)
            except FieldError:
                pass  # row by row, to find out which
        blank = np.zeros(wanted.shape, wanted.dtype) if wanted.fixed else b""  # stands in for what is refused
        values: list[Any] = [blank] * len(column)
        for position in range(len(column)):
            try:
                values[position] = to_value(name, wanted, _value(name, have, wanted, column[position]), position)
            except FieldError as error:
                bad.setdefault(position, error)
        return np.array(values, wanted.dtype).reshape(-1, *wanted.shape) if wanted.fixed else values


def _value(name: str, have: Field, wanted: Field, item: Any) -> Any:
    if have.fixed:
        return item
    if wanted.kind == "bytes":
        return bytes(item)
    if wanted.kind == "text":
        try:
            return bytes(item).decode()
        except UnicodeDecodeError as error:
            raise FieldError(f"field {name!r} is no UTF-8 text: {error.reason}", "keep it as bytes") from None
    return from_bytes(name, have, memoryview(item), 0)
