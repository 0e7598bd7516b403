"""Sources that come as samples rather than as columns: one adapter yields them, everything else is here.

An adapter gives `cut(rows)`, which returns a `RecordPart`: it reads the samples of its rows as mappings of plain
values. Their fields are inferred from a few samples, spread over the source; all samples are checked against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from math import isinf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.arrays import pick
from streamloader.conversion.sources.base import BadSample, OnBad, Part, Source, split_rows, spread_rows
from streamloader.conversion.sources.fields import FieldSelection, Settled, infer_field, settle
from streamloader.conversion.sources.files import field_names
from streamloader.errors import FieldError, SourceError, StreamloaderError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import to_value
from streamloader.format.writer import Rows
from streamloader.storage.store import ObjectInfo

PROBED = 64  # samples from which the fields are inferred: enough to see that lists differ in length


def parse_number(kind: type[np.int64] | type[np.float64], data: bytes) -> np.int64 | np.float64:
    """Return the number that is written in decimal digits. Raises ValueError for what is not, or too large."""
    try:
        value = kind(float(data) if kind is np.float64 else int(data[:33]))
        if (isinf(value) and b"inf" not in data.lower()) or (kind is np.int64 and len(data) > 32):
            raise OverflowError
        return value
    except (ValueError, OverflowError):
        raise ValueError(f"{data[:32]!r} is not a number of {kind.__name__}") from None


Sample = tuple[int, str, Mapping[str, Any]]  # its position in the part, its name for messages, and its values
# Some rows of a source: small, picklable. Yields the same samples at every call, ascending; those that cannot be read
# go to `on_bad`.
RecordPart = Callable[[OnBad], Iterator[Sample]]
Cut = Callable[[NDArray[np.int64]], RecordPart]
Notes = Mapping[str, Any] | None


def open_records(
    url: str, files: Sequence[ObjectInfo], count: int, cut: Cut, selection: FieldSelection, *, notes: Notes = None
) -> Source:
    """Return the source, with fields inferred from some of its samples; `selection` chooses and types them.

    Its notes are `notes` and the key of each field that was renamed. Raises `SourceError` where there is no sample, or
    none that can be read; `FieldError` for a selected field that does not exist, and for values that no field holds.
    """
    if not count:
        raise SourceError(f"{url} holds no sample", "check the path")
    rows = spread_rows(count, PROBED)
    part = cut(rows)
    bad: list[BadSample] = []
    samples = list(part(bad.append))
    if not samples:
        first = bad[0]
        raise SourceError(f"{first.name or f'row {rows[first.position]}'}: {first.problem}", first.remedy)
    found = infer_fields(url, samples, selection)
    notes = {**(notes or {}), **found.notes}
    return Source(url, files, found.fields, count, notes, lambda rows: found.part(cut(rows), len(rows)))


def infer_fields(url: str, samples: Sequence[Sample], selection: FieldSelection) -> SampleFields:
    """Return the fields of some samples of the source `url`; `selection` chooses them.

    Raises `FieldError` for a selected field that does not exist, and for values that no field holds.
    """
    keys = dict.fromkeys(key for _, _, sample in samples for key in sample)
    names = field_names(list(keys), url).values()
    # a key that most samples lack may be in none of these
    keys |= {name: None for name, kind in selection.fields.items() if kind and name in selection.fill.keys() - names}
    kept = pick(keys, selection, url)
    fields: dict[str, Field] = {}
    flags: set[str] = set()
    for name, key in kept.items():
        values = [(sample.get(key), f"the field {name!r} of {which}") for _, which, sample in samples]
        fields[name], flag = _infer(name, selection.fields.get(name), values)
        flags |= {name} if flag else set()
    typed = frozenset(name for name, kind in selection.fields.items() if kind is not None)
    fill = selection.fill_values(fields, url)
    for name in [name for name in fill if fields[name].dtype]:
        kind = fields[name]
        fill[name] = np.full(kind.shape if kind.fixed else (0, *kind.shape), fill[name])
    return SampleFields(kept, fields, typed, frozenset(flags), fill, complete=not selection.fields)


def _infer(name: str, wanted: Field | None, values: Sequence[tuple[Any, str]]) -> tuple[Field, bool]:
    """Return the `wanted` field, or that of the values, each with its name; and whether its numbers are made of bools.

    A value that no field holds is a bad sample when it is read, unless all are such.
    """
    settled: list[Settled] = []
    wrong: FieldError | None = None
    for value, where in values:
        try:
            settled.append(settle(value, where))
        except FieldError as error:
            wrong = wrong or error
    filled = [value for value in settled if not isinstance(value, np.ndarray) or value.size]  # [] has no dtype
    if wanted:
        flags = [isinstance(value, np.ndarray) and value.dtype == np.bool_ for value in filled]
        return wanted, wanted.dtype != "bool" and bool(flags) and all(flags)
    if wrong and not settled:
        why = f"({wrong.problem}; {wrong.remedy})"
        others = f"leave it out by naming the fields to keep with --fields, or convert it with --map {why}"
        raise FieldError(f"no field of the format holds the field {name!r}", others)
    try:
        return infer_field(name, settled), False
    except FieldError as error:
        kinds = "declare it with --fields, or convert it with --map"
        raise FieldError(error.problem, f"{error.remedy}; {kinds}") from None


@dataclass(frozen=True)
class SampleFields:
    """The fields of samples. `originals` gives each the key that it has in them.

    The user has named the types of the `typed` fields: floats are rounded to them. `flags` are those that hold only
    bools, of which numbers are made. `fill` has what replaces a missing value. Where the fields are `complete`, a
    sample with another key does not fit.
    """

    originals: Mapping[str, str]
    fields: Mapping[str, Field]
    typed: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    fill: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False

    @property
    def notes(self) -> dict[str, Any]:
        """The key of each field that had to be renamed, for the manifest's provenance."""
        renamed = {name: key for name, key in self.originals.items() if name != key}
        return {"keys": renamed} if renamed else {}

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(self.originals.values())

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype[Any] | None]:  # a dtype's own name is slow
        return {name: np.dtype(kind.dtype) if kind.dtype else None for name, kind in self.fields.items()}

    def settled(self, sample: Mapping[str, Any], name: str) -> dict[str, Settled]:
        """Return the value of each field, as arrays, text or bytes. Raises `FieldError`, which names the sample."""
        out: dict[str, Settled] = {}
        if self.complete and not sample.keys() <= self._keys:
            self._check_keys(sample)
        for field_name, key in self.originals.items():
            value = sample.get(key)
            if value is None and field_name in self.fill:
                out[field_name] = self.fill[field_name]
                continue
            if not isinstance(value, bytes | str | np.ndarray):
                value = settle(value, f"field {field_name!r} of sample {name}")
            if isinstance(value, np.ndarray) and (value.dtype != self._dtypes[field_name] or field_name in self.flags):
                self._check_dtype(field_name, value, name)
            out[field_name] = value
        return out

    def _check_keys(self, sample: Mapping[str, Any]) -> None:
        """Raise `FieldError` for a value of a key that none of the samples had from which the fields were inferred."""
        key = next((key for key, value in sample.items() if key not in self._keys and value is not None), None)
        if key is not None:
            name = field_names([key], "")[key]
            names = ",".join(list(self.fields)[:8])
            problem = f"it has {key!r}, which is in none of the {PROBED} samples that the fields were inferred from"
            add = f"to add it, {name}=TYPE there and --fill {name}=VALUE for the samples that lack it"
            raise FieldError(problem, f"name the fields to keep, as in --fields {names}; {add}")

    def _check_dtype(self, name: str, value: NDArray[Any], sample: str) -> None:
        """Raise `FieldError` for bools among numbers, and for floats that would be rounded unasked."""
        wanted = self.fields[name].dtype
        if not wanted or not value.size:
            return
        problem = f"field {name!r} of sample {sample} is {value.dtype}, expected {wanted}"
        if (value.dtype.kind == "b") != (name in self.flags):
            raise FieldError(problem, "give all samples one kind of value")
        if value.dtype.kind == "f" and wanted.startswith("float") and name not in self.typed:
            with np.errstate(over="ignore"):
                same = np.array_equal(value.astype(wanted), value, equal_nan=True)
            if not same:
                raise FieldError(f"{problem}, which does not hold its values", f"choose with --fields {name}=TYPE")

    def values(self, sample: Mapping[str, Any], name: str) -> dict[str, NDArray[Any] | bytes]:
        """Return the value of each field as columns have them. Raises `FieldError`, which names the sample."""
        settled = self.settled(sample, name)
        return {field: to_value(field, kind, settled[field], name) for field, kind in self.fields.items()}

    def bad_sample(self, sample: Mapping[str, Any], position: int, name: str) -> BadSample | None:
        """Return why the sample does not fit the fields; None where it does."""
        try:
            self.values(sample, name)
        except FieldError as error:
            remedy = error.remedy
            for key, kind in self.fields.items():
                if kind.fixed and kind.shape and error.problem.startswith(f"field {key!r} of sample {name} has shape"):
                    ragged = Field("ragged", kind.dtype, kind.shape[1:])
                    remedy = f"samples of several lengths are ragged: --fields {key}={ragged}"
            return BadSample(position, name, error.problem, remedy)
        return None

    def part(self, part: RecordPart, capacity: int) -> Part:
        """Return a part whose samples become columns; one that lacks a field, or does not fit, is bad."""
        return partial(_read_checked, part, self, capacity)


def _read_checked(part: RecordPart, found: SampleFields, capacity: int, on_bad: OnBad) -> dict[str, Column]:
    rows = Rows(found.fields, capacity)
    for position, name, sample in part(on_bad):
        try:
            rows.add(found.values(sample, name))
        except FieldError:
            bad = found.bad_sample(sample, position, name)
            assert bad is not None
            on_bad(bad)
    return rows.columns()


Named = Iterator[tuple[str, memoryview]]  # the name of each record, and its bytes
Decode = Callable[[memoryview], Mapping[str, Any]]  # raises ValueError for what is damaged


def read_records(pieces: Sequence[Callable[[], Named]], decode: Decode, on_bad: OnBad) -> Iterator[Sample]:
    """Yield samples that are records of files, each made from its bytes by `decode`; damaged ones go to `on_bad`."""
    for position, (name, data) in enumerate(chain.from_iterable(piece() for piece in pieces)):
        try:
            sample = decode(data)
        except FieldError as error:
            on_bad(BadSample(position, name, error.problem, error.remedy, bytes(data)))
        except StreamloaderError:
            raise
        except ValueError as error:
            on_bad(BadSample(position, name, str(error), data=bytes(data)))
        else:
            yield position, name, sample


@dataclass(frozen=True, eq=False)
class RecordFile:
    """One file of `count` records. `cut(rows)` returns what yields the bytes of these, which ascend: picklable."""

    where: str
    count: int
    cut: Callable[[NDArray[np.int64]], Callable[[], Iterator[memoryview]]]


def cut_files(files: Sequence[RecordFile], decode: Decode) -> Cut:
    """Return what cuts parts from files, one after another. A record is named by its file and its number there."""
    counts = [file.count for file in files]

    def cut(rows: NDArray[np.int64]) -> RecordPart:
        pieces = [(files[number], within) for number, _, within in split_rows(counts, rows)]
        named = [partial(_numbered, file.where, some, file.cut(some)) for file, some in pieces]
        return partial(read_records, named, decode)

    return cut


def _numbered(where: str, rows: NDArray[np.int64], read: Callable[[], Iterator[memoryview]]) -> Named:
    for row, data in zip(rows.tolist(), read(), strict=True):
        yield f"{where}: sample {row}", data
