"""Sources that come as samples rather than as columns: one adapter yields them, everything else is here.

An adapter gives `cut(rows)`, which returns a `RecordPart`: it reads the samples of its rows as mappings of plain
values. Their fields are inferred from a few samples, spread over the source; all samples are checked against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Refuse, spread_rows
from streamloader.conversion.sources.files import field_names
from streamloader.conversion.sources.infer import Settled, infer_field, settle
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import FieldError, SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.rows import Rows
from streamloader.format.values import to_value
from streamloader.storage.protocol import ObjectInfo

PROBED = 64  # samples from which the fields are inferred: enough to see that lists differ in length


class RecordPart(Protocol):
    """Some rows of a source: small, picklable, and the same samples at every reading."""

    def read(self, refuse: Refuse, /) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield position and values of each sample, ascending; those that cannot be read go to `refuse`."""
        ...

    def name(self, position: int) -> str:
        """Return which sample it is, for people: its file and key, or its number."""
        ...


Cut = Callable[[NDArray[np.int64]], RecordPart]


@dataclass(frozen=True)
class Origin:
    """Where samples come from; see `Source` for what each is."""

    url: str
    files: Sequence[ObjectInfo]
    num_samples: int
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordSource:
    """A source of samples."""

    origin: Origin
    found: SampleFields
    cut: Cut

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields of every sample."""
        return self.found.fields

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self.origin.url

    @property
    def files(self) -> Sequence[ObjectInfo]:
        """The files, with size and etag or modification time."""
        return self.origin.files

    @property
    def num_samples(self) -> int:
        """The number of rows."""
        return self.origin.num_samples

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the adapter tells, and the key of each field that had to be renamed."""
        renamed = {name: key for name, key in self.found.originals.items() if name != key}
        return {**self.origin.notes, **({"keys": renamed} if renamed else {})}

    def part(self, rows: NDArray[np.int64]) -> CheckedPart:
        """Return the part that holds these rows, which ascend."""
        return CheckedPart(self.cut(rows), self.found, len(rows))


def open_records(origin: Origin, cut: Cut, wish: Wish) -> RecordSource:
    """Return the source, with fields inferred from some of its samples; `wish` chooses and types them.

    Raises `SourceError` where there is no sample, or none that can be read; `FieldError` for a field that is wished
    but not there, and for values that no field holds.
    """
    if not origin.num_samples:
        raise SourceError(f"{origin.url} holds no sample", "check the path")
    rows = spread_rows(origin.num_samples, PROBED)
    part = cut(rows)
    refused: list[BadSample] = []
    samples = list(part.read(refused.append))
    if not samples:
        first = refused[0]
        raise SourceError(f"{first.name or f'row {rows[first.position]}'}: {first.problem}", first.remedy)
    return RecordSource(origin, infer_fields(origin.url, samples, wish, part.name), cut)


def infer_fields(
    url: str, samples: Sequence[tuple[int, Mapping[str, Any]]], wish: Wish, name_of: Callable[[int], str]
) -> SampleFields:
    """Return the fields of some samples of the source `url`, each with its position; `wish` chooses and types them.

    Raises `FieldError` for a field that is wished but not there, and for values that no field holds.
    """
    names = field_names(list(dict.fromkeys(key for _, sample in samples for key in sample)), url)
    # a key that most samples lack may be in none of these
    names |= {name: name for name, kind in wish.fields.items() if kind and name in wish.fill} if wish.fill else {}
    missing = next((name for name in wish.fields if name not in names.values()), None)
    if missing is not None:
        raise FieldError(f"{url} has no field {missing!r}", f"it has {', '.join(names.values())}")
    kept = {name: key for key, name in names.items() if wish.wanted(name)}
    kept = {name: kept[name] for name in wish.fields} or kept
    fields = {name: wish.fields.get(name) or _infer(name, key, samples, name_of) for name, key in kept.items()}
    typed = frozenset(name for name, kind in wish.fields.items() if kind is not None)
    flags = frozenset(name for name in typed if _is_flag(kept[name], samples))
    return SampleFields(kept, fields, typed, flags, wish.fill_values(fields, url), complete=not wish.fields)


def _is_flag(key: str, samples: Sequence[tuple[int, Mapping[str, Any]]]) -> bool:
    """Return whether the first of some samples that has a value for a key has true or false, or an array of them."""
    for _, sample in samples:
        try:
            found = settle(sample.get(key), "")
        except FieldError:
            continue
        if not isinstance(found, np.ndarray) or found.size:  # an empty list has no dtype of its own
            return isinstance(found, np.ndarray) and found.dtype == np.bool_
    return False


def _infer(
    name: str, key: str, samples: Sequence[tuple[int, Mapping[str, Any]]], name_of: Callable[[int], str]
) -> Field:
    """Return the field of a key; a sample without it, or with what no field holds, is one of those that are refused
    later, unless all are.
    """
    values: list[Settled] = []
    wrong: FieldError | None = None
    for position, sample in samples:
        try:
            values.append(settle(sample.get(key), f"the field {name!r} of {name_of(position)}"))
        except FieldError as error:
            wrong = wrong or error
    if wrong and not values:
        why = f"({wrong.problem}; {wrong.remedy})"
        others = f"leave it out by naming the fields to keep with --fields, or make it so with --map {why}"
        raise FieldError(f"no field of the format holds the field {name!r}", others)
    try:
        return infer_field(name, values)
    except FieldError as error:
        kinds = "say what it is with --fields, or make it so with --map"
        raise FieldError(error.problem, f"{error.remedy}; {kinds}") from None


@dataclass(frozen=True)
class SampleFields:
    """The fields of samples. `originals` gives each the key that it has in them.

    The user has named the types of the `typed` fields: floats are rounded to them. Those of them that are `flags` hold
    bools in the samples. `fill` has what stands for a missing value. Where the fields are `complete`, a sample with
    another key does not fit.
    """

    originals: Mapping[str, str]
    fields: Mapping[str, Field]
    typed: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    fill: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(self.originals.values())

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype[Any] | None]:
        return {name: np.dtype(kind.dtype) if kind.dtype else None for name, kind in self.fields.items()}

    def settled(self, sample: Mapping[str, Any], name: str) -> dict[str, Settled]:
        """Return the value of each field, as arrays, text or bytes. Raises `FieldError`, which names the sample."""
        out: dict[str, Settled] = {}
        if self.complete and not sample.keys() <= self._keys:
            self._check_keys(sample)
        for field_name, key in self.originals.items():
            value = sample.get(key)
            if value is None and field_name in self.fill:
                value = self._filled(field_name)
            if not isinstance(value, bytes | str | np.ndarray):
                value = settle(value, f"field {field_name!r} of sample {name}")
            if isinstance(value, np.ndarray) and value.dtype != self._dtypes[field_name]:
                self._check_dtype(field_name, value, name)
            out[field_name] = value
        return out

    def _check_keys(self, sample: Mapping[str, Any]) -> None:
        """Raise `FieldError` for a value of a key that none of the samples had from which the fields were inferred."""
        key = next((key for key, value in sample.items() if key not in self._keys and value is not None), None)
        if key is not None:
            name = field_names([key], "")[key]
            names = ",".join(list(self.fields)[:8])
            raise FieldError(
                f"it has {key!r}, which is in none of the {PROBED} samples that the fields were inferred from",
                f"name the fields to keep, as in --fields {names}, and keep it with {name}=TYPE there and a value for "
                f"the samples that lack it, --fill {name}=VALUE",
            )

    def _filled(self, name: str) -> Settled:
        kind, value = self.fields[name], self.fill[name]
        if kind.kind in ("text", "bytes"):
            return value  # type: ignore[no-any-return]
        return np.full(kind.shape if kind.fixed else (0, *kind.shape), value)

    def _check_dtype(self, name: str, value: NDArray[Any], sample: str) -> None:
        """Raise `FieldError` for bools among numbers, and for floats that would be rounded unasked."""
        wanted = self.fields[name].dtype
        if not wanted or not value.size:
            return
        problem = f"field {name!r} of sample {sample} is {value.dtype}, expected {wanted}"
        if wanted != "bool" and (value.dtype.kind == "b") != (name in self.flags):
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

    def refusal(self, sample: Mapping[str, Any], position: int, name: str) -> BadSample | None:
        """Return why the sample does not fit the fields; None where it does."""
        try:
            self.values(sample, name)
        except FieldError as error:
            return BadSample(position, name, error.problem, self._remedy(error))
        return None

    def _remedy(self, error: FieldError) -> str:
        fixed = next((name for name, kind in self.fields.items() if kind.shape and f"{name!r}" in error.problem), None)
        if fixed is None or "has shape" not in error.problem or not self.fields[fixed].fixed:
            return error.remedy
        kind = self.fields[fixed]
        ragged = Field("ragged", kind.dtype, kind.shape[1:])
        return f"samples of several lengths are ragged: --fields {fixed}={ragged}"


@dataclass(frozen=True)
class CheckedPart:
    """Samples that become columns, each checked against the fields."""

    part: RecordPart
    found: SampleFields
    capacity: int

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return one column a field; a sample that lacks one, or does not fit, is refused."""
        rows = Rows(self.found.fields, self.capacity)
        for position, sample in self.part.read(refuse):
            try:
                rows.add(self.found.values(sample, str(position)))
            except FieldError:
                bad = self.found.refusal(sample, position, self.part.name(position))
                assert bad is not None
                refuse(bad)
        return rows.columns()
