"""Sources of samples rather than columns, such as lines of JSON.

A format gives `cut(rows)`, which returns a `RecordFragment` that yields the samples of these rows as mappings of plain
values. Fields are inferred from a few samples, spread over the source; all samples are checked against them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.arrays import pick
from streamloader.conversion.sources.base import (
    MAX_DECODED,
    BadSample,
    Fragment,
    OnBad,
    RowSource,
    check_shard,
    split_rows,
    spread_rows,
)
from streamloader.conversion.sources.fields import ANY, FieldSelection, Settled, infer_field, settle
from streamloader.conversion.sources.files import field_names
from streamloader.errors import FieldError, SourceError, StreamloaderError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import to_value
from streamloader.format.writer import RowBuffer
from streamloader.storage.objects import ObjectInfo

PROBED = 64  # samples from which fields are inferred: enough to notice lists of different lengths


def parse_number(kind: type[np.int64] | type[np.float64], data: bytes) -> np.int64 | np.float64:
    """Return a number from its decimal text. Raises ValueError for other text, and for a number that is too large."""
    try:
        value = kind(float(data) if kind is np.float64 else int(data[:33]))
        if (np.isinf(value) and b"inf" not in data.lower()) or (kind is np.int64 and len(data) > 32):
            raise OverflowError
        return value
    except (ValueError, OverflowError):
        raise ValueError(f"{data[:32]!r} is not a number of {kind.__name__}") from None


Sample = tuple[int, str, Mapping[str, Any]]  # position in the fragment, name for messages, values
# Reads some rows of a source: small, picklable. It yields the same samples at every call, in ascending order, and
# passes bad samples to its argument.
RecordFragment = Callable[[OnBad], Iterator[Sample]]
Cut = Callable[[NDArray[np.int64]], RecordFragment]
Notes = Mapping[str, Any] | None


def open_records(
    url: str, files: Sequence[ObjectInfo], count: int, cut: Cut, selection: FieldSelection, *, notes: Notes = None
) -> RowSource:
    """Return the source, with fields inferred from some of its samples; `selection` selects and types them.

    Its notes are `notes` and the key of each renamed field. Raises `SourceError` if there is no sample, or none that
    can be read; `FieldError` for a selected field that does not exist, and for values that no field holds.
    """
    if not count:
        raise SourceError(f"{url} holds no sample", "check the path")
    rows = spread_rows(count, PROBED)
    bad: list[BadSample] = []
    samples = list(cut(rows)(bad.append))
    if not samples:
        first = bad[0]
        raise SourceError(f"{first.name or f'row {rows[first.position]}'}: {first.problem}", first.remedy)
    inferred = infer_fields(url, samples, selection)
    notes = {**(notes or {}), **inferred.notes}
    return RowSource(url, files, inferred.fields, count, notes, lambda rows: inferred.fragment(cut(rows), len(rows)))


def infer_fields(url: str, samples: Sequence[Sample], selection: FieldSelection) -> "SampleFields":
    """Return the fields of some samples of the source `url`; `selection` selects and types them.

    Raises `SourceError` if no sample has a value; `FieldError` for a selected field that does not exist, and for values
    that no field holds.
    """
    keys = dict.fromkeys(key for _, _, sample in samples for key in sample)
    names = field_names(list(keys), url).values()
    # none of these samples may have a key that most samples lack
    may_lack = selection.fields if selection.mapped else selection.fill
    keys |= {name: None for name, field in selection.fields.items() if field and name in may_lack.keys() - names}
    if not keys:
        raise SourceError(f"the samples of {url} are empty", "give each at least one value; a map function too")
    kept = pick(keys, selection, url)
    fields: dict[str, Field] = {}
    flags: set[str] = set()
    for name, key in kept.items():
        values = [(_unmasked(sample.get(key)), f"the field {name!r} of {where}") for _, where, sample in samples]
        values = [pair for pair in values if pair[0] is not None] if selection.mapped else values
        try:
            fields[name], flag = _infer(name, selection.fields.get(name), values, strict=selection.mapped)
        except FieldError:
            if not selection.mapped:
                raise
            fields[name], flag = ANY, False
        flags |= {name} if flag else set()
    typed = frozenset(name for name, field in selection.fields.items() if field is not None)
    fill = selection.fill_values(fields, url)
    return SampleFields(
        kept, fields, typed, frozenset(flags), fill, not selection.fields, selection.mapped, selection.max_decoded
    )


def _unmasked(value: Any) -> Any:
    """Return the data of a masked array, which tell its type though some or all elements are masked."""
    return value.data if isinstance(value, np.ma.MaskedArray) and value is not np.ma.masked else value


def _infer(name: str, selected: Field | None, values: Sequence[tuple[Any, str]], *, strict: bool) -> tuple[Field, bool]:
    """Return the `selected` field, else the one inferred from the values and their names; and whether its numbers are
    made of bools.

    Raises `FieldError` if no field holds any of the values, or, if `strict`, each of them.
    """
    settled: list[Settled] = []
    first_error: FieldError | None = None
    for value, where in values:
        try:
            settled.append(settle(value, where))
        except FieldError as error:
            first_error = first_error or error
    filled = [value for value in settled if not isinstance(value, np.ndarray) or value.size]  # [] has no dtype
    if selected:
        flags = [isinstance(value, np.ndarray) and value.dtype == np.bool_ for value in filled]
        return selected, selected.dtype != "bool" and bool(flags) and all(flags)
    if first_error and (strict or not settled):
        reason = f"({first_error.problem}; {first_error.remedy})"
        remedy = f"leave it out by naming the fields to keep with fields=, or convert it with map= {reason}"
        raise FieldError(f"no field of the format holds the field {name!r}", remedy)
    try:
        return infer_field(name, settled), False
    except FieldError as error:
        remedy = f"{error.remedy}; declare it with fields=, or convert it with map="
        raise FieldError(error.problem, remedy) from None


@dataclass(frozen=True)
class SampleFields:
    """The fields of samples. `originals` has the key of each field in the samples.

    The user has given the types of the `typed` fields: floats are rounded to them. Samples hold only bools in the
    fields that are `flags`, and numbers are made of them. `fill` has the values that replace missing ones. If the
    fields are `complete`, a sample with another key is bad. If they are `mapped`, a map function gets their values,
    also those that no field holds. `max_decoded` is that of the selection.
    """

    originals: Mapping[str, str]
    fields: Mapping[str, Field]
    typed: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    fill: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False
    mapped: bool = False
    max_decoded: int = MAX_DECODED

    @property
    def notes(self) -> dict[str, Any]:
        """The key of each field that had to be renamed, for the manifest's provenance."""
        renamed = {name: key for name, key in self.originals.items() if name != key}
        return {"keys": renamed} if renamed else {}

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(self.originals.values())

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype[Any] | None]:  # computing the name of a dtype is slow
        return {name: np.dtype(field.dtype) if field.dtype else None for name, field in self.fields.items()}

    def settled(self, sample: Mapping[str, Any], name: str) -> dict[str, Settled]:
        """Return the value of each field, as arrays, text or bytes. Raises `FieldError`, which names the sample."""
        self._check_keys(sample)
        return {field: self._settle(field, sample.get(key), name) for field, key in self.originals.items()}

    def _settle(self, name: str, value: Any, sample: str) -> Any:
        if not isinstance(value, bytes | str) and type(value) is not np.ndarray:
            if (value is None or value is np.ma.masked) and name in self.fill:
                field, fill = self.fields[name], self.fill[name]
                return np.full(field.shape if field.fixed else (0, *field.shape), fill) if field.dtype else fill
            value = settle(self._unmasked(name, value), f"field {name!r} of sample {sample}")
        if isinstance(value, np.ndarray) and (value.dtype != self._dtypes[name] or name in self.flags):
            self._check_dtype(name, value, sample)
        return value

    def _unmasked(self, name: str, value: Any) -> Any:
        """Return the value with masked elements filled, a masked float as NaN."""
        fill = self.fill.get(name)
        if value is np.ma.masked and self.fields[name].dtype.startswith("float"):
            return np.nan
        if np.ma.is_masked(value) and fill is not None and np.can_cast(fill.dtype, value.dtype, "same_kind"):
            return np.where(value.mask, fill, value.data)
        return value

    def _check_keys(self, sample: Mapping[str, Any]) -> None:
        """Raise `FieldError` if the sample has a value for a key from which no field was inferred."""
        if not self.complete or sample.keys() <= self._keys:
            return
        key = next((key for key, value in sample.items() if key not in self._keys and value is not None), None)
        if key is not None:
            name = field_names([key], "")[key]
            names = ",".join(list(self.fields)[:8])
            problem = f"it has {key!r}, which is in none of the {PROBED} samples that the fields were inferred from"
            if self.mapped:
                raise FieldError(problem, f'name the fields that the map function gets, as in columns="{names},{name}"')
            fill = f'fill={{"{name}": VALUE}} (--fill {name}=VALUE)'
            remedy = f'name the fields to keep, as in fields="{names}"; to add it, {name}=TYPE there'
            raise FieldError(problem, f"{remedy} and {fill} for the samples that lack it")

    def _check_dtype(self, name: str, value: NDArray[Any], sample: str) -> None:
        """Raise `FieldError` for bools among numbers, and for floats that an inferred type would round."""
        expected = self.fields[name].dtype
        if not expected or not value.size:
            return
        problem = f"field {name!r} of sample {sample} is {value.dtype}, expected {expected}"
        if (value.dtype.kind == "b") != (name in self.flags):
            raise FieldError(problem, "give all samples one kind of value")
        if value.dtype.kind == "f" and expected.startswith("float") and name not in self.typed:
            with np.errstate(over="ignore"):
                same = np.array_equal(value.astype(expected), value, equal_nan=True)
            if not same:
                raise FieldError(f"{problem}, which does not hold its values", f'choose with fields="{name}=TYPE"')

    def values(self, sample: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the value of each field, as columns hold it. Raises `FieldError`, which names the sample."""
        if self.mapped:
            self._check_keys(sample)
            return {field: self._given(field, sample.get(key)) for field, key in self.originals.items()}
        settled = self.settled(sample, name)
        return {key: to_value(key, field, settled[key], name) for key, field in self.fields.items()}

    def _given(self, name: str, value: Any) -> Any:
        """Return a value for a map function: as its field holds it, else unchanged."""
        with suppress(FieldError):
            value = to_value(name, self.fields[name], self._settle(name, value, ""), "")
        return value[()] if isinstance(value, np.ndarray) else value

    def bad_sample(self, sample: Mapping[str, Any], position: int, name: str) -> BadSample | None:
        """Return the sample as a bad one if it does not fit the fields, else None."""
        try:
            self.values(sample, name)
        except FieldError as error:
            remedy, shaped = error.remedy, error.problem.startswith
            for key, field in self.fields.items():
                if field.fixed and field.shape and shaped(f"field {key!r} of sample {name} has shape"):
                    ragged = Field("ragged", field.dtype, field.shape[1:])
                    remedy = f'samples of several lengths are ragged: fields="{key}={ragged}"'
            return BadSample(position, name, error.problem, remedy)
        return None

    def fragment(self, records: RecordFragment, capacity: int) -> Fragment:
        """Return a fragment that gives samples as columns; a sample that does not fit the fields is bad."""
        return partial(_read_checked, records, self, capacity)


def _read_checked(records: RecordFragment, fields: SampleFields, capacity: int, on_bad: OnBad) -> dict[str, Column]:
    rows = RowBuffer(fields.fields, capacity, fields.mapped)
    for position, name, sample in records(on_bad):
        try:
            rows.add(fields.values(sample, name))
            check_shard(rows.list_bytes, name, fields.max_decoded)
        except FieldError:
            bad = fields.bad_sample(sample, position, name)
            assert bad is not None
            on_bad(bad)
    return rows.columns()


Named = Iterator[tuple[str, memoryview]]  # the name of each record, and its bytes
Decode = Callable[[memoryview], Mapping[str, Any]]  # raises ValueError for a damaged record


def read_records(pieces: Sequence[Callable[[], Named]], decode: Decode, on_bad: OnBad) -> Iterator[Sample]:
    """Yield the samples that `decode` makes from the records of files; damaged records go to `on_bad`."""
    for position, (name, data) in enumerate(record for piece in pieces for record in piece()):
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
    """A file of `count` records. `cut(rows)` returns a picklable function that yields the bytes of ascending rows."""

    where: str
    count: int
    cut: Callable[[NDArray[np.int64]], Callable[[], Iterator[memoryview]]]


def cut_files(files: Sequence[RecordFile], decode: Decode) -> Cut:
    """Return a function that cuts fragments from the concatenated files. Names of records are file and number in it."""
    counts = [file.count for file in files]

    def cut(rows: NDArray[np.int64]) -> RecordFragment:
        pieces = [(files[number], within) for number, _, within in split_rows(counts, rows)]
        named = [partial(_numbered, file.where, within, file.cut(within)) for file, within in pieces]
        return partial(read_records, named, decode)

    return cut


def _numbered(where: str, rows: NDArray[np.int64], read: Callable[[], Iterator[memoryview]]) -> Named:
    for row, data in zip(rows.tolist(), read(), strict=True):
        yield f"{where}: sample {row}", data
