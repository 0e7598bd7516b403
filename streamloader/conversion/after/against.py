"""A dataset beside the source that it was made from: every sample compared, bit by bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.after.stored import StoredColumns
from streamloader.conversion.after.subject import Subject
from streamloader.conversion.recipe import Recipe
from streamloader.conversion.rows import SampleRows
from streamloader.conversion.sources.base import BadSample, Sieve, Source
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.wish import Wish
from streamloader.conversion.splits import assign, own_rows, parse_splits
from streamloader.errors import FieldError, FormatError, SampleError, UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field, Manifest
from streamloader.format.threads import cpu_count, run_all

_MOST_THREADS = 4  # each holds a shard twice: as it is stored, and as the source gives it


@dataclass(frozen=True)
class Against:
    """The source to compare with. `options` are those of its store; None takes the dataset's, if both URLs have one
    protocol.

    `recipe` is what the conversion was told to make of it: only what makes samples out of rows counts here. Without
    fields in it the source is asked for those of the dataset, with their types.
    """

    src: str | os.PathLike[str]
    format: str | None = None
    options: Mapping[str, Any] | None = None
    recipe: Recipe = field(default_factory=Recipe)

    def open(self, manifest: Manifest) -> Source:
        """Return the source. Raises what `open_source` raises."""
        wish = self.recipe.wish
        if not wish.fields:
            wish = Wish.again({name: one.field for name, one in manifest.fields.items()}, manifest.provenance)
        recipe = replace(self.recipe, wish=wish)
        return recipe.apply(open_source(self.src, self.format, self.options or {}, recipe.opening)[1])


def rows_of(manifest: Manifest, num_samples: int) -> SampleRows:
    """Return the row of a source of `num_samples` rows for each sample, as if none had been left out.

    What decides stands in the manifest's provenance. Raises `UsageError` where that does not say enough.
    """
    rows: NDArray[np.int64] | range = range(num_samples)
    split, shuffle = manifest.provenance.get("split"), manifest.provenance.get("shuffle")
    own = manifest.provenance.get("splits")
    if isinstance(own, Mapping) and isinstance(split, Mapping) and split.get("name") in own:
        if sum(own.values()) == num_samples:
            rows = own_rows(own, split["name"])
    elif split is not None:
        dealt, name = _told(split, "of", str), _told(split, "name", str)
        rows = assign(num_samples, parse_splits(dealt), _told(split, "seed", int)).rows(name)
    return SampleRows.of(rows, None if shuffle is None else _told(shuffle, "seed", int))


def _told(told: Any, key: str, kind: type) -> Any:
    value = told.get(key) if isinstance(told, Mapping) else None
    if not isinstance(value, kind):
        problem = f"the manifest does not say how rows were dealt to samples: its provenance has no {key!r}"
        raise UsageError(problem, "compare datasets that streamloader convert made")
    return value


def compare(subject: Subject, against: Against, count: Callable[[int], None]) -> int:
    """Note every sample that differs from its row of the source, and return how many were compared.

    Samples in damaged chunks are passed over: they are named elsewhere. `count` is told how many are done.
    """
    try:
        source = against.open(subject.manifest)
    except FieldError as error:
        subject.add(f"{subject.store.url} differs from {against.src}: {error.problem}", "")
        return 0
    fields = _same_fields(subject, source)
    rows = rows_of(subject.manifest, source.num_samples)
    if subject.manifest.provenance.get("left_out"):
        rows = rows.without(_bad_rows(source, rows, subject.manifest.samples_per_shard))
    if rows.count != subject.manifest.num_samples:
        problem = f"{subject.store.url} has {subject.manifest.num_samples} samples, {source.url} has {rows.count}"
        of = f" for the split {subject.split!r}" if subject.split else ""
        subject.add(f"{problem}{of}", "")
        if {"split", "shuffle"} & set(subject.manifest.provenance):
            return 0  # rows are dealt out otherwise then: every sample would differ
    comparison = _Comparison(subject, source, rows, StoredColumns(subject.opened, fields))
    size, stop = subject.manifest.samples_per_shard, min(rows.count, subject.manifest.num_samples)

    def check(start: int) -> int:
        if subject.problems.full:
            return 0
        done = comparison.check(start, min(start + size, stop))
        count(done)
        return done

    return sum(run_all(check, range(0, stop, size), min(cpu_count(), _MOST_THREADS)))


def _same_fields(subject: Subject, source: Source) -> list[str]:
    """Return the fields that both have alike, and note the others; an encoding is only a hint."""
    alike: list[str] = []
    for name, layout in subject.manifest.fields.items():
        there = source.fields.get(name)
        if there is not None and _kind(there) == _kind(layout.field):
            alike.append(name)
        else:
            problem = f"field {name!r} is {layout.field} in {subject.store.url}, and {there} in {source.url}"
            subject.add(problem, "", name)
    return alike


def _kind(one: Field) -> Field:
    return replace(one, encoding="")


def _bad_rows(source: Source, rows: SampleRows, size: int) -> set[int]:
    """Return the rows that cannot be converted, by reading all of them."""
    bad: set[int] = set()
    for start in range(0, rows.count, size):
        here = np.sort(rows.read(start, start + size))
        source.part(here).read(lambda one: bad.add(int(here[one.position])))  # noqa: B023 - called here
    return bad


@dataclass(frozen=True, eq=False)
class _Comparison:
    """What is compared: the samples of `subject` with the rows of `source`."""

    subject: Subject
    source: Source
    rows: SampleRows
    stored: StoredColumns

    def check(self, start: int, stop: int) -> int:
        """Compare the samples [start, stop), and return how many were."""
        rows = self.rows.read(start, stop)
        ascending = np.sort(rows)
        refused: list[BadSample] = []
        sieve = Sieve(refused.append)
        columns = self.source.part(ascending).read(sieve)
        for bad in refused:
            row = int(ascending[bad.position])
            sample = start + int(np.flatnonzero(rows == row)[0])
            problem = f"sample {sample} of {self.subject.store.url}: row {row} of {self.source.url} is bad"
            self.subject.add(f"{problem} ({bad.problem})", "", samples=(sample, sample + 1))
        kept = ascending[sieve.kept(len(next(iter(columns.values()))))]
        there = np.flatnonzero(np.isin(rows, kept))
        places = np.searchsorted(kept, rows[there])
        try:
            ours = self.stored.read(start, stop)
        except (FormatError, SampleError):
            return 0  # a damaged chunk: it has a problem of its own
        for name, column in ours.items():
            for i in _differing(column, there, columns[name], places):
                sample, row = start + int(there[i]), int(rows[there[i]])
                problem = f"field {name!r} of sample {sample} of {self.subject.store.url} differs from row {row} of"
                self.subject.add(f"{problem} {self.source.url}", "", name, samples=(sample, sample + 1))
        return len(there)


def _differing(ours: Column, here: NDArray[np.int64], theirs: Column, there: NDArray[np.int64]) -> list[int]:
    """Return which of the pairs (ours[here[i]], theirs[there[i]]) differ, bit by bit."""
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        left, right = (_bytes(column[chosen]) for column, chosen in ((ours, here), (theirs, there)))
        return np.flatnonzero((left != right).any(axis=1)).tolist()
    pairs = enumerate(zip(here.tolist(), there.tolist(), strict=True))
    return [i for i, (mine, other) in pairs if ours[mine] != theirs[other]]


def _bytes(rows: NDArray[Any]) -> NDArray[np.uint8]:
    little = np.ascontiguousarray(rows, rows.dtype.newbyteorder("<"))
    return little.reshape(len(rows), -1).view(np.uint8) if rows.size else np.zeros((len(rows), 1), np.uint8)
