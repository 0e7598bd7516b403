"""The caller's own function between source and dataset: of one sample, or of a batch of them."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.function_digest import FunctionDigest, function_digest
from streamloader.conversion.sources.base import BadSample, Part, Refuse, Sieve, Source
from streamloader.conversion.sources.infer import flatten, settle
from streamloader.conversion.sources.records import Origin, RecordSource, open_records
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import from_bytes

Function = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Mapper:
    """A function from samples to samples. `batch` None gives it one sample at a time, as a mapping of values; a number
    gives it so many at once, as a mapping of columns, and as many must come back. `identity` is made before the
    function is first called, which may change its state.
    """

    function: Function
    name: str
    batch: int | None = None
    identity: FunctionDigest = field(default=FunctionDigest(""), repr=False)

    def options(self) -> dict[str, Any]:
        """Return what tells this function from another. Where that is not known, no two calls return the same."""
        told = {"function": self.name, "source": self.identity.digest, "batch": self.batch}
        if self.identity.unknown:
            told |= {"unknown": self.identity.unknown, "call": uuid.uuid4().hex}
        return told


def parse_map(given: str | Function | None, batch: int | None) -> Mapper | None:
    """Return the function that `module:function` names, or that is given. The working directory is searched too.

    Raises `UsageError` where there is none.
    """
    if batch is not None and (batch < 1 or given is None):
        raise UsageError(f"map_batch={batch} with map={given!r}", "give a function and at least 1 sample")
    if given is None:
        return None
    if callable(given):
        name = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__qualname__)}"
        return Mapper(given, name, batch, function_digest(given))
    module, colon, name = given.partition(":")
    if not (module and colon and name):
        raise UsageError(f"map={given!r}", "write it as module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # where `python -m` looks, and a console script does not
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"map={given!r} cannot be imported: {error}", "run where its module lies, or install it"
        ) from error
    if not callable(function):
        raise UsageError(f"map={given!r} is a {type(function).__name__}", "name a function")
    return Mapper(function, given, batch, function_digest(function))


def map_source(source: Source, mapper: Mapper, wish: Wish) -> RecordSource:
    """Return the source of what the function makes of each sample. Raises what `open_records` raises."""

    def cut(rows: NDArray[np.int64]) -> MappedPart:
        return MappedPart(source.part(rows), dict(source.fields), mapper)

    notes = {**source.notes, "map": mapper.name}
    return open_records(Origin(source.url, source.files, source.num_samples, notes), cut, wish)


@dataclass(frozen=True)
class MappedPart:
    """Some samples, each as the function makes it."""

    part: Part
    fields: Mapping[str, Field]
    mapper: Mapper

    def name(self, position: int) -> str:  # noqa: ARG002 - what it was made of is told by its row
        """Return nothing: the row is all that is known."""
        return ""

    def read(self, refuse: Refuse) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield what the function returns. A sample for which it raises is refused, alone of its batch."""
        sieve = Sieve(refuse)
        columns = self.part.read(sieve)
        count = len(next(iter(columns.values())))
        kept: list[int] = sieve.kept(count).tolist()
        size = self.mapper.batch or 1
        for first in range(0, count, size):
            positions = range(first, min(first + size, count))
            try:
                yield from zip((kept[i] for i in positions), self._call(columns, positions), strict=True)
            except Exception as error:  # noqa: BLE001 - the caller's code
                if len(positions) == 1:
                    refuse(_refusal(kept[first], error))
                    continue
                yield from self._one_by_one(columns, positions, kept, refuse)

    def _one_by_one(
        self, columns: Mapping[str, Column], positions: range, kept: list[int], refuse: Refuse
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for position in positions:
            try:
                (sample,) = self._call(columns, range(position, position + 1))
            except Exception as error:  # noqa: BLE001 - the caller's code
                refuse(_refusal(kept[position], error))
            else:
                yield kept[position], sample

    def _call(self, columns: Mapping[str, Column], positions: range) -> list[dict[str, Any]]:
        """Return the samples that the function makes of those at `positions`."""
        if self.mapper.batch is None:
            sample = {name: _value(name, field, columns[name], positions[0]) for name, field in self.fields.items()}
            return [flatten(self.mapper.function(sample))]
        batch = {name: _values(name, field, columns[name], positions) for name, field in self.fields.items()}
        made = self.mapper.function(batch)
        if not isinstance(made, Mapping) or {len(column) for column in made.values()} != {len(positions)}:
            found = {name: len(column) for name, column in made.items()} if isinstance(made, Mapping) else type(made)
            raise UsageError(f"it returned {found} for {len(positions)} samples", "return a column of as many values")
        here = {name: _here(column, f"the column {name!r}") for name, column in made.items()}
        return [flatten({name: column[i] for name, column in here.items()}) for i in range(len(positions))]


def _here(column: Any, where: str) -> Any:
    """Return a column of another array library, which may be on a device, as one array."""
    return settle(column, where) if hasattr(column, "__dlpack__") else column


def _refusal(position: int, error: Exception) -> BadSample:
    return BadSample(position, "", f"the map function failed: {type(error).__name__}: {error}", "repair the function")


def _value(name: str, field: Field, column: Column, position: int) -> Any:
    return column[position] if field.fixed else from_bytes(name, field, memoryview(column[position]), position)


def _values(name: str, field: Field, column: Column, positions: range) -> Any:
    if field.fixed:
        return column[positions.start : positions.stop]
    return [_value(name, field, column, position) for position in positions]
