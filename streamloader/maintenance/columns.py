"""Adds fields to a finished dataset, as a new version: from arrays, from files, or computed from its samples.

The values of each kind are a source with a row for each sample. The steps are those of an append.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion import job
from streamloader.conversion.api import default_options
from streamloader.conversion.executors import parse_engine
from streamloader.conversion.sources.base import (
    Bad,
    Columns,
    Fragment,
    OnBad,
    RowNumbers,
    RowSource,
    raise_bad_rows,
    take_rows,
)
from streamloader.conversion.sources.fields import FieldSelection, choose, parse_selection, transform_source
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.objects import NAME as PYTHON
from streamloader.conversion.sources.objects import as_samples, open_object
from streamloader.conversion.transforms import index_source, parse_map
from streamloader.errors import FieldError, UsageError
from streamloader.format import publish
from streamloader.format.deleted import Remaining, read_remaining
from streamloader.format.geometry import EXPANSION, add_layouts
from streamloader.format.keys import as_keys, check_key, match_rows, read_keys
from streamloader.format.manifest import Field, Manifest, class_names
from streamloader.format.opening import Opened, open_root
from streamloader.format.reader import FieldReader, read_columns
from streamloader.maintenance.append import GROWTH, Addition, AppendReport, entries, with_entry
from streamloader.options import Layout
from streamloader.storage import Store, open_store

BATCH = 64  # samples that a function gets at once
ROWS = 1 << 16  # keys that are read at once
ADDED = "columns_added"  # in the provenance
UNNAMED = ("npy", "tokens")  # formats whose arrays have the names of their files
FORMAT = "streamloader"  # the format of the samples that a function gets

Selected = Mapping[str, Field | None]
Part = tuple[str, RowSource]  # the name of a source's format, and the source


@dataclass(frozen=True)
class ColumnOptions:
    """How the values of new fields are found: the key field `on` of files, their `format` and the options of their
    store, and the number of samples of a `batch` for functions.
    """

    on: str | None = None
    format: str | None = None
    source_options: Mapping[str, Any] | None = None
    batch: int = BATCH


def add_columns(
    url: str | os.PathLike[str],
    columns: Mapping[str, Any],
    *,
    split: str | None = None,
    on: str | None = None,
    batch_size: int = BATCH,
    engine: str = "local",
    workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> AppendReport:
    """Add fields to the finished dataset at `url`, or to one `split` of it, as a new version.

    `columns` maps the names of the new fields, optionally with a type as in `"tokens=ragged:int32"`, to their values:

    - an array or list with one value for each sample, in the order of the dataset;
    - the path or URL of a file of any format that `convert` reads, with a column of this name. Its rows are the
      samples in order, or joined by a key: `on` names a field of the dataset with one number or text for each sample,
      and the file's column with the same values. `on="index"` joins a column `index` of sample numbers;
    - a function that gets `batch_size` samples, a dict of columns, and returns a dict of new columns. It is called
      once for all fields that it is given for, in the processes of the `engine`, as the function of `convert` is.

    Readers see the earlier version until the fields are published, and those that opened it keep reading it. To resume
    an interrupted call, repeat it: it writes the same bytes. `engine`, `workers` and `storage_options` are those of
    `convert`; the options also apply to files with the same protocol.

    Raises `UsageError` for a field that exists and for other arguments, `FieldError` for keys that are missing or not
    unique and for values that do not fit, `SourceError` for a file or a function that fails, `DestinationError` if an
    append is in progress or was published in the meantime, the errors of `open`, and `StorageError`.
    """
    run_options = job.RunOptions(workers, "raise", job.ignore, parse_engine(engine))
    options = ColumnOptions(on, batch=batch_size)
    return run_addition(url, columns, options, run_options, split=split, storage_options=storage_options)


def run_addition(
    url: str | os.PathLike[str],
    columns: Mapping[str, Any],
    options: ColumnOptions,
    run_options: job.RunOptions,
    *,
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> AppendReport:
    """Add fields to a dataset; see `add_columns`."""
    root = open_store(url, storage_options)
    opened = open_root(root, split)
    if not opened.manifest.num_samples:
        raise UsageError(f"{opened.store.url} has no samples", "convert samples that have the new fields")
    remaining = read_remaining(opened.store, opened.manifest)
    opener = _Opener(opened, remaining, options, run_options, storage_options)
    parts = [opener.open(value, selected) for value, selected in _groups(columns)]
    run_options.check(job.TransformOptions(), opened.store.url, *(source.url for _, source in parts))
    source = index_source(_side_by_side([source for _, source in parts]))
    formats = "+".join(name for name, _ in parts)
    stored = source if remaining is None else _with_blanks(source, remaining)
    common = root, opened, split, formats, stored, job.TransformOptions(), run_options
    report = _Columns(*common, tuple(parts), options.on).run()
    run_options.listener(job.Progress("finish", source.num_samples, source.num_samples))
    return report


def _groups(columns: Mapping[str, Any]) -> list[tuple[Any, dict[str, Field | None]]]:
    """Return what is opened together, with the names and types of its fields: all arrays, each file, each function.

    Arrays are a dict by name. Raises `UsageError`.
    """
    if not isinstance(columns, Mapping) or not columns or not all(isinstance(name, str) for name in columns):
        raise UsageError(
            f"columns={columns!r:.80}", "give a dict of names, with an array, a file or a function for each"
        )
    selected = parse_selection(list(columns)).fields
    if len(selected) != len(columns):
        raise UsageError(f"the columns {list(columns)} are not one name each", "give each field an entry of its own")
    groups: dict[Any, tuple[Any, dict[str, Field | None]]] = {}
    for (name, kind), value in zip(selected.items(), columns.values(), strict=True):
        is_path = isinstance(value, str | os.PathLike)
        key = os.fspath(value) if is_path else id(value) if _is_function(value) else None
        opened, kinds = groups.setdefault(key, ({} if key is None else value, {}))
        kinds[name] = kind
        if key is None:
            opened[name] = value
    return list(groups.values())


def _is_function(value: Any) -> bool:
    return callable(value) and not hasattr(value, "__array__") and not hasattr(value, "__len__")


@dataclass(frozen=True)
class _Opener:
    """Opens the sources of new fields of a dataset."""

    opened: Opened
    remaining: Remaining | None
    options: ColumnOptions
    run_options: job.RunOptions
    storage_options: Mapping[str, Any] | None

    def open(self, value: Any, selected: Selected) -> Part:
        """Return the source of arrays by name, of a function or of a file, with the selected fields."""
        url, selection = self.opened.store.url, FieldSelection(selected)
        if isinstance(value, str | os.PathLike):
            return self._open_file(value, selection)
        if isinstance(value, dict):
            samples = as_samples(value)
            self._check_count(len(samples), f"the columns have {len(samples)} values")
            return PYTHON, open_object(samples, selection, self.run_options.uses_processes(url))
        transforms = job.TransformOptions(selection, mapper=parse_map(value, self.options.batch))
        self.run_options.check(transforms, url)
        return FORMAT, transforms.apply(_samples(self.opened, self.remaining))

    def _open_file(self, path: str | os.PathLike[str], selection: FieldSelection) -> Part:
        store_options = default_options(self.options.source_options, path, self.storage_options, self.opened.store.url)
        opener, on = partial(open_source, path, self.options.format, store_options), self.options.on
        try:
            name, source = opener(selection)
        except FieldError:
            name, source = opener(FieldSelection())
            if on is not None or name not in UNNAMED or len(selection.fields) != 1 or len(source.fields) != 1:
                raise
            source = choose(_renamed(source, *selection.fields), selection)
        if source.notes.get("splits"):
            raise UsageError(f"{source.url} has splits of its own", "give the file of the split that it belongs to")
        if on is None:
            self._check_count(source.num_samples, f"{source.url} has {source.num_samples} rows")
            return name, source
        keys = opener(FieldSelection({on: None}))[1]
        rows = match_rows(self._dataset_keys(on), _read_keys(keys, on), f"{on!r} of {source.url}")
        return name, _reordered(source, rows)

    def _check_count(self, count: int, problem: str) -> None:
        """Raise `FieldError` unless `count` is the number of samples."""
        samples = self.opened.manifest.num_remaining
        if count != samples:
            remedy = "give one for each sample in order, or join a file by a key with on="
            raise FieldError(f"{problem}, {self.opened.store.url} has {samples} samples", remedy)

    def _dataset_keys(self, on: str) -> NDArray[Any]:
        """Return the key of each sample."""
        return read_keys(self.opened.store, self.opened.manifest, on, self.remaining)


def _read_keys(source: RowSource, on: str) -> NDArray[Any]:
    """Return the keys of all rows of a source."""
    check_key(source.fields[on], f"column {on!r} of {source.url}")
    pieces = [np.arange(first, min(first + ROWS, source.num_samples)) for first in range(0, source.num_samples, ROWS)]
    columns = [source.fragment(rows)(raise_bad_rows(rows))[on] for rows in pieces]
    return np.concatenate(list(map(as_keys, columns)))


def _samples(opened: Opened, remaining: Remaining | None) -> RowSource:
    """Return the samples of a dataset as a source."""
    store, manifest = opened.store, opened.manifest
    fields = {name: layout.field for name, layout in manifest.fields.items()}
    read = partial(_read, store, manifest, remaining)
    return RowSource(store.url, (), fields, manifest.num_remaining, {}, lambda rows: partial(read, rows))


def _read(store: Store, manifest: Manifest, remaining: Remaining | None, rows: RowNumbers, _on_bad: OnBad) -> Columns:
    """Return these samples of a dataset, ascending, by columns."""
    readers = {name: FieldReader(store, manifest, name, remaining) for name in manifest.fields}
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    parts = [read_columns(readers, int(run[0]), int(run[-1]) + 1) for run in runs]
    if len(parts) == 1:
        return parts[0]
    columns: Columns = {}
    for name, layout in manifest.fields.items():
        pieces: list[Any] = [part[name] for part in parts]
        columns[name] = np.concatenate(pieces) if layout.field.fixed else list(chain.from_iterable(pieces))
    return columns


def _renamed(source: RowSource, name: str) -> RowSource:
    """Return a source of one field with another name for it."""
    ((old, field),) = source.fields.items()
    return transform_source(source, partial(_rename, old, name), fields={name: field})


def _rename(old: str, new: str, columns: Columns, _: Bad) -> Columns:
    return {new: columns[old]}


def _reordered(source: RowSource, rows: RowNumbers) -> RowSource:
    """Return a source of these rows of another one, in this order."""

    def cut(numbers: RowNumbers) -> Fragment:
        wanted, places = np.unique(rows[numbers], return_inverse=True)
        return partial(_take, source.fragment(wanted), wanted, places)

    return replace(source, num_samples=len(rows), fragment=cut)


def _take(fragment: Fragment, wanted: RowNumbers, places: RowNumbers, _on_bad: OnBad) -> Columns:
    return take_rows(fragment(raise_bad_rows(wanted)), places)


def _with_blanks(source: RowSource, remaining: Remaining) -> RowSource:
    """Return a source with a row for each stored sample: zeros, or an empty item, for a deleted one."""

    def cut(stored: RowNumbers) -> Fragment:
        rows, left = remaining.find(stored)
        fragment = source.fragment(rows) if len(rows) else None
        return partial(_spread, fragment, rows, left, source.fields)

    return replace(source, num_samples=remaining.num_samples, fragment=cut)


def _spread(
    fragment: Fragment | None, rows: RowNumbers, left: NDArray[np.bool_], fields: Mapping[str, Field], _on_bad: OnBad
) -> Columns:
    columns = {} if fragment is None else fragment(raise_bad_rows(rows))
    spread: Columns = {}
    for name, field in fields.items():
        blanks = np.zeros((len(left), *field.shape), field.dtype) if field.fixed else np.full(len(left), b"", object)
        if name in columns:
            column = columns[name]
            blanks[left] = column if field.fixed else np.fromiter(column, object, len(column))
        spread[name] = blanks if field.fixed else blanks.tolist()
    return spread


def _side_by_side(sources: Sequence[RowSource]) -> RowSource:
    """Return a source of the fields of all sources, which have as many rows."""
    first = min(sources, key=lambda source: not source.url.startswith("memory:"))  # it decides where tasks run
    fields = {name: field for source in sources for name, field in source.fields.items()}
    files = [info for source in sources for info in source.files]
    return replace(
        first,
        fields=fields,
        files=files,
        fragment=lambda rows: partial(_read_all, [source.fragment(rows) for source in sources]),
        beside=dict,
    )


def _read_all(fragments: Sequence[Fragment], on_bad: OnBad) -> Columns:
    return {name: column for fragment in fragments for name, column in fragment(on_bad).items()}


@dataclass(frozen=True, eq=False)
class _Columns(Addition):
    """An addition of fields, whose values are side by side in the sources of `parts`; files are joined by `on`."""

    parts: tuple[Part, ...]
    on: str | None

    @cached_property
    def _sources(self) -> list[dict[str, Any]]:
        """The description of each source, for claim and provenance."""
        described = []
        for name, source in self.parts:
            fields = {field: str(kind) for field, kind in source.fields.items()}
            function = {"map": source.notes["map"]} if "map" in source.notes else {}
            described.append({**job.describe_source(source, name), "fields": fields, **function})
        return described

    @cached_property
    def details(self) -> Mapping[str, Any]:
        """The fields and their sources."""
        return {"by": "columns", "fields": list(self.source.fields), "sources": self._sources, "on": self.on}

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the old manifest, with the new fields, their sources and their classes."""
        old = self.opened.manifest.provenance
        new = {name: names for _, source in self.parts for name, names in class_names(source.notes).items()}
        classes = class_names(old) | {name: names for name, names in new.items() if name in self.source.fields}
        entry = {"fields": list(self.source.fields), "sources": self._sources, **({"on": self.on} if self.on else {})}
        return {**with_entry(old, ADDED, entry), **({"classes": classes} if classes else {})}

    def plan(self) -> Callable[[], publish.Extension]:
        """Choose the layout of the fields. Raises `UsageError` for fields that exist, or are too large for a shard."""
        base, url = self.opened.manifest, self.opened.store.url
        if existing := [name for name in self.source.fields if name in base.fields]:
            problem = f"{url} has {'the fields' if len(existing) > 1 else 'a field'} {', '.join(existing)} already"
            raise UsageError(problem, "choose another name: the values of a field are never replaced")
        options, schema = Layout(), job.probe(self.source, Layout(), False)
        target = add_layouts(base, schema)
        count, limit = min(target.samples_per_shard, base.num_samples), GROWTH * EXPANSION * options.shard_size
        for name, layout in target.fields.items():
            size = schema.decoded[name] * count
            if count > 1 and size > limit and not layout.resident:
                problem = f"field {name!r} has {schema.decoded[name]:.0f} bytes per sample: a shard of {count} samples"
                remedy = "convert all samples again with this field, which chooses smaller shards"
                raise UsageError(f"{problem} would decode to {size:.0f} bytes, the limit is {limit}", remedy)
        return partial(publish.Extension, target, base.num_samples)

    def finish(self, extension: publish.Extension, receipts: publish.Receipts) -> Manifest:
        """Write small fields and the tables of all fields."""
        return publish.finish_fields(self.opened.store, self.opened.manifest, extension, receipts, self.provenance)

    def report(self, manifest: Manifest) -> AppendReport:
        """Return the report of the addition that made this manifest."""
        count, shards = manifest.num_remaining, -(-manifest.num_samples // manifest.samples_per_shard)
        names = tuple(self.source.fields)
        return AppendReport(self.opened.store.url, self.format, manifest, count, 0, shards, shards, names)


def added_fields(provenance: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields that were added to a dataset."""
    return {name for entry in entries(provenance, ADDED) if isinstance(entry, dict) for name in entry.get("fields", ())}
