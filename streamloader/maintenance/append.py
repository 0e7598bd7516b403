"""Appends the samples of a source to a finished dataset: scan, check, write, publish.

A claim, one object in the dataset, excludes other appends: only its holder writes. An `Addition` has the steps that an
append shares with the addition of fields (`columns.py`).
"""

import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion import job
from streamloader.conversion.api import default_options
from streamloader.conversion.executors import open_executor, parse_engine, run_tasks
from streamloader.conversion.row_order import SampleRows
from streamloader.conversion.shard_task import Outcome, Task
from streamloader.conversion.sources.base import Bad, Columns, RowNumbers, RowSource
from streamloader.conversion.sources.fields import FieldSelection, choose, transform_source
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.transforms import parse_map, parse_recode
from streamloader.errors import DestinationError, FieldError, FormatError, NotFoundError, ObjectExistsError, UsageError
from streamloader.format import publish
from streamloader.format.codecs import Column
from streamloader.format.geometry import EXPANSION, settle
from streamloader.format.manifest import INTS, RESIDENT_TOTAL, Manifest, class_names
from streamloader.format.opening import Opened, open_root, read_object, read_version
from streamloader.format.video import without_index
from streamloader.maintenance.erase import BEGUN
from streamloader.options import Layout
from streamloader.storage import Store, open_store
from streamloader.storage.store import reads
from streamloader.storage.url import redact

ROUNDS = 5  # of writing again the shards that something else deletes or overwrites
# A shard of new samples decodes to at most so many times the bytes that a conversion allows, or that the dataset's own
# shards have: conversions round to a power of two, which is a factor of up to 1.4, and sizes of samples vary.
GROWTH = 2
_AGAIN = "convert all samples again"
LENGTHS = "lengths"  # in the claim of an addition of tables of lengths
MIXED = "mixed"  # the encoding of a field whose images have several: images of any encoding can be appended

Classes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class AppendReport:
    """The result of an append: the new manifest of the dataset or split.

    `added` samples follow the earlier `before` samples; it is 0 if the source is empty. `fields` are the names of added
    fields. `deleted` is the number of samples that a deletion leaves out, and `erased` that of all deleted samples if
    it erased their bytes. `shards` is the number of written shards, of which an earlier, interrupted run wrote
    `shards_kept`. Of tables of lengths, `fields` are those that got one.
    """

    url: str
    format: str
    manifest: Manifest
    before: int
    added: int = 0
    shards: int = 0
    shards_kept: int = 0
    fields: tuple[str, ...] = ()
    deleted: int = 0
    erased: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        manifest = self.manifest
        version = {"version": manifest.generation, "num_samples": manifest.num_remaining, "digest": manifest.digest}
        own = {name: value for name, value in vars(self).items() if name != "manifest"}
        return {**own, **version, "fields": list(self.fields)}


def append(
    url: str | os.PathLike[str],
    src: str | os.PathLike[str],
    *,
    split: str | None = None,
    format: str | None = None,  # noqa: A002 - the name in `convert`
    map: str | Callable[[dict[str, Any]], Any] | None = None,  # noqa: A002 - the name in `convert`
    map_batch: int | None = None,
    cache_key: str | None = None,
    resize: str | int | tuple[int, int] | None = None,
    quality: int | None = None,
    shuffle: int | None = None,
    engine: str = "local",
    workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    progress: job.Listener | None = None,
) -> AppendReport:
    """Append the samples of `src` to the finished dataset at `url`, or to one `split` of it.

    `format`, `map`, `map_batch`, `cache_key`, `resize`, `quality`, `shuffle`, `engine`, `workers` and the options of
    the stores are those of `convert`. The source must have every field of the dataset, with a type that can be cast
    without loss; other fields are left out. Class numbers are changed to those of the dataset, and new classes get the
    next numbers. A bad sample ends the append. Readers see the earlier version until the append is published, and those
    that opened it keep reading it. To resume an interrupted append, repeat the call: it writes the same bytes.

    Raises `FieldError` if the fields differ, `SourceError` for the source, `DestinationError` if another append is in
    progress or was published in the meantime, `UsageError` for other arguments and for samples that are too large for
    the shards of the dataset, the errors of `open` for the dataset, and `StorageError`.
    """
    source_options = default_options(source_options, src, storage_options, url)
    run_options = job.RunOptions(workers, "raise", progress or job.ignore, parse_engine(engine))
    root = open_store(url, storage_options)
    opened = open_root(root, split)
    run_options.listener(job.Progress("scan", detail=f"reading {redact(os.fspath(src))}"))
    # bytes fields of any encoding are selected: `_matching` checks the encoding after images are re-encoded
    fields = without_index({name: layout.field for name, layout in opened.manifest.fields.items()})
    types = {name: field if field.kind != "bytes" or field.is_video else None for name, field in fields.items()}
    selection = FieldSelection.from_provenance(types, opened.manifest.provenance)
    recode, mapper = parse_recode(resize, quality), parse_map(map, map_batch, cache_key=cache_key)
    transforms = job.TransformOptions(selection, recode, mapper, shuffle=shuffle)
    name, source = open_source(src, format, source_options, transforms.source_selection)
    if splits := source.notes.get("splits"):
        problem = f"{source.url} has the splits {', '.join(splits)} of its own"
        raise UsageError(problem, "append each of its folders to the split that it belongs to")
    run_options.check(transforms, source.url, opened.store.url)
    _check_arrays(opened, source)
    source = relabel(source, class_names(opened.manifest.provenance))
    source = _matching(transforms.apply(source), opened.manifest)
    report = _Append(root, opened, split, name, source, transforms, run_options).run()
    run_options.listener(job.Progress("finish", report.added, report.added))
    return report


def abandon(
    url: str | os.PathLike[str], *, split: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> bool:
    """End an interrupted append and restore the dataset to the byte. Returns False if there is no append to end.

    Call it only while no append is running. Raises the errors of `open`, `DestinationError` if shards were overwritten
    to erase deleted samples, and `FormatError` if a shard to be restored is damaged.
    """
    opened = open_root(open_store(url, storage_options), split)
    store, base = opened.store, opened.manifest
    try:
        claim = read_claim(store)
    except FormatError:  # it cannot be resumed
        claim = {"generation": base.generation + 1}
    if claim is None:
        return False
    if claim["generation"] <= base.generation:
        end_published(store, claim, base)
        return True
    if store.head(BEGUN) is not None:
        problem = f"the bytes of deleted samples of {store.url} are being erased, which cannot be undone"
        raise DestinationError(problem, "run streamloader delete again with the same arguments to finish it")
    fields = claim.get("fields")
    tables = _tables_added(opened) if claim.get("by") == LENGTHS else ()
    publish.undo_extension(store, base, split is not None, fields if isinstance(fields, list) else (), tables)
    publish.clean_append(store)
    return True


def _tables_added(opened: Opened) -> set[str]:
    """Return the fields of which no version has a table of lengths, so that any pages are of the one to be ended."""
    base = opened.manifest
    names = {*base.fields} - {*base.lengths}
    for version in range(1, base.generation):
        with suppress(UsageError):  # whose manifest was not kept
            names -= {*read_version(opened, version).lengths}
    return names


def end_published(store: Store, claim: Mapping[str, Any], manifest: Manifest) -> None:
    """End an append that published `manifest`, or an earlier version: remove its temporary objects and its claim."""
    if claim.get("erase"):
        publish.drop_versions(store, manifest)
    publish.clean_append(store)


def _check_arrays(opened: Opened, source: RowSource) -> None:
    """Raise `FieldError` if the coordinates and attributes beside the fields are not those of the dataset."""
    beside = source.beside() if "beside" in opened.manifest.provenance else {}
    differ = [path for path, data in beside.items() if opened.store.get(path) != data]
    if differ:
        problem = f"{source.url} has other coordinates, units or attributes than {opened.store.url}/{differ[0]}"
        raise FieldError(problem, "write it with those of the dataset, or convert all samples again")


def merged_classes(dataset: Classes, source: Classes) -> dict[str, list[str]]:
    """Return the class names of the dataset by field, each list followed by the new names of the source."""
    return {key: [*names, *(new for new in source.get(key, ()) if new not in names)] for key, names in dataset.items()}


def without_rows(
    url: str | os.PathLike[str],
    split: str | None,
    storage_options: Mapping[str, Any] | None,
    format: str,  # noqa: A002 - the name in `AppendReport`
    progress: job.Listener = job.ignore,
) -> tuple[Store, Opened, str | None, str, RowSource, job.TransformOptions, job.RunOptions]:
    """Open a dataset or split; return the fields of an `Addition` to it that adds no rows."""
    root = open_store(url, storage_options)
    opened = open_root(root, split)
    source = RowSource(opened.store.url, (), {}, 0, {}, _no_rows)
    run_options = job.RunOptions(0, "raise", progress, parse_engine("local"))
    return root, opened, split, format, source, job.TransformOptions(), run_options


def _no_rows(_rows: RowNumbers) -> Any:
    raise AssertionError("what adds no rows reads none")


def relabel(source: RowSource, classes: Classes) -> RowSource:
    """Return the source with the class numbers of a dataset that has the `classes`; new classes get the next numbers.

    Raises `FieldError` for a field that is not a class number, or cannot hold the number of classes, and for a class
    that shares its name with another one, because its number in the dataset is then unknown.
    """
    source_classes = class_names(source.notes)
    merged = merged_classes(classes, source_classes)
    tables: dict[str, NDArray[Any]] = {}
    for name, names in source_classes.items():
        if name not in classes or name not in source.fields or names == list(merged[name][: len(names)]):
            continue
        field = source.fields[name]
        if field.dtype not in INTS or (not field.fixed and field.shape):
            raise FieldError(f"the classes of {name!r} differ and {field} is not a class number", _AGAIN)
        counts = Counter(names) | Counter(merged[name])
        ambiguous = next((class_name for class_name in names if counts[class_name] > 1), None)
        if ambiguous is not None:
            problem = f"the classes of {name!r} differ, and several of them are called {ambiguous!r}"
            raise FieldError(problem, "give them different names in the source, or convert all samples again")
        numbers = [merged[name].index(class_name) for class_name in names]
        if max(numbers, default=0) > np.iinfo(field.dtype).max:
            raise FieldError(f"{len(merged[name])} classes of {name!r} do not fit {field}", _AGAIN)
        tables[name] = np.array(numbers, field.stored_dtype)
    return transform_source(source, partial(_relabel, tables)) if tables else source


def _relabel(tables: Mapping[str, NDArray[Any]], columns: Columns, _: Bad) -> Columns:
    """Return the columns with new class numbers; other numbers, such as -1, are kept."""
    for name, table in tables.items():
        column = columns[name]
        if isinstance(column, np.ndarray):
            columns[name] = _look_up(column, table)
        else:
            columns[name] = [_renumbered(item, table) for item in column]
    return columns


def _renumbered(item: Any, table: NDArray[Any]) -> Any:
    if isinstance(item, bytes):
        return _look_up(np.frombuffer(item, table.dtype), table).tobytes()
    return item if item is None else _look_up(np.asarray(item), table)[()]  # a value for a map function


def _look_up(values: NDArray[Any], table: NDArray[Any]) -> NDArray[Any]:
    known = (values >= 0) & (values < len(table))
    return np.where(known, table[np.where(known, values, 0)], values).astype(values.dtype)


def read_claim(store: Store) -> dict[str, Any] | None:
    """Return the claim of the append in progress, or None. Raises `FormatError` if it is damaged."""
    remedy = "end the append: streamloader append --abandon"
    try:
        return read_object(store, publish.CLAIM, remedy, "a claim", lambda claim: type(claim.get("generation")) is int)
    except NotFoundError:
        return None


def check_claim(store: Store, claim: Mapping[str, Any]) -> None:
    """Raise `DestinationError` if the claim was removed or replaced: a run that lost it must not write."""
    if all(found != claim for found in reads(lambda: read_claim(store))):
        raise DestinationError(f"another run ended the append to {store.url}", "check the dataset, then append again")


@dataclass(frozen=True, eq=False, kw_only=True)
class AppendTask(Task):
    """Writes new rows to one shard of all fields, which may exist already. Gives the same bytes each time."""

    extension: publish.Extension
    claim: Mapping[str, Any]

    def encode(self, columns: Mapping[str, Column]) -> Callable[[], Outcome]:
        """Return a function that encodes and writes the columns; it also reads the existing samples of the shard."""
        return partial(self._write, columns)

    def _write(self, columns: Mapping[str, Column]) -> Outcome:
        check_claim(self.store, self.claim)
        return publish.prepare_shard(self.store, self.geometry, self.shard, dict(columns), extension=self.extension)()


@dataclass(frozen=True, eq=False)
class Addition(ABC):
    """An addition to a dataset, as a new version: the samples of `source`, or its fields."""

    root: Store
    opened: Opened
    split: str | None
    format: str
    source: RowSource
    transforms: job.TransformOptions
    run_options: job.RunOptions

    @property
    @abstractmethod
    def details(self) -> Mapping[str, Any]:
        """The keys of the claim that tell whether it is of the same addition."""

    @property
    def adds(self) -> bool:
        """Whether there is anything to publish."""
        return True

    @property
    @abstractmethod
    def provenance(self) -> dict[str, Any]:
        """The provenance of the new manifest."""

    @abstractmethod
    def plan(self) -> Callable[[], publish.Extension]:
        """Check what is added, before anything is written; return a function that plans how to write it."""

    @abstractmethod
    def finish(self, extension: publish.Extension, receipts: publish.Receipts) -> Manifest:
        """Write the objects beside the shards; return the new manifest."""

    @abstractmethod
    def report(self, manifest: Manifest) -> AppendReport:
        """Return the report of an addition that made this manifest."""

    @cached_property
    def source_info(self) -> dict[str, Any]:
        """The description of the source for claim and provenance."""
        return job.describe_source(self.source, self.format)

    @cached_property
    def claim(self) -> dict[str, Any]:
        """The claim: the version, the source and the options."""
        base = self.opened.manifest
        claim = {"base": base.digest, "generation": base.generation + 1, **self.details}
        return dict(json.loads(json.dumps(claim)))  # equal to the value that `read_claim` returns

    def run(self) -> AppendReport:
        """Write, publish and clean up, unless there is nothing to add, or an earlier run has published the same.

        Another run may have the same claim at the same time: both write the same bytes.
        """
        base, store = self.opened.manifest, self.opened.store
        claim = read_claim(store)
        if claim is not None and claim["generation"] <= base.generation:  # killed after publishing
            end_published(store, claim, base)
            if all(claim.get(key) == self.claim[key] for key in self.details):
                return self.report(base)
        if not self.adds:
            return AppendReport(store.url, self.format, base, base.num_remaining)
        planned = self.plan()
        self._take_claim()
        try:
            self._check_base()
            extension = planned()
            receipts, kept = self._write(extension)
            self.run_options.listener(job.Progress("finish", extension.added, extension.added))
            check_claim(store, self.claim)
            manifest = self.finish(extension, receipts)
            publish.publish(store, base.digest, manifest)
            if self.split is not None:
                publish.publish_split(self.root, self.split, base.digest, manifest)
        except (DestinationError, FormatError):
            current = open_root(self.root, self.split).manifest
            if current.generation != base.generation + 1 or current.provenance != self.provenance:
                raise
            return self.report(current)  # another run with the same claim published it
        end_published(store, self.claim, manifest)
        return replace(self.report(manifest), shards_kept=kept)

    def _take_claim(self) -> None:
        """Take the claim, or resume the same append. Raises `DestinationError` if another append has the claim."""
        store = self.opened.store
        try:
            store.create(publish.CLAIM, json.dumps(self.claim, sort_keys=True, indent=1).encode())
        except ObjectExistsError as error:
            if read_claim(store) != self.claim:
                problem = f"another append to {store.url} is in progress, or was interrupted"
                remedy = "run the same append again to resume it, or end it with streamloader append --abandon"
                raise DestinationError(problem, remedy) from error

    def _check_base(self) -> None:
        """Raise `DestinationError` if another append was published before this one took the claim."""
        base, now = self.opened.manifest, open_root(self.root, self.split).manifest
        if now.digest == base.digest:
            return
        if self.claim["generation"] <= now.generation:
            end_published(self.opened.store, self.claim, now)
        problem = f"{self.opened.store.url} was changed by another run: {base.digest} became {now.digest}"
        raise DestinationError(problem, "run the append again")

    def kept_receipts(self, shards: range) -> dict[int, publish.Receipt]:
        """Return the receipts of those of the shards that an earlier run wrote, and that are as it left them."""
        receipts = publish.read_receipts(self.opened.store, f"{publish.APPEND}/receipts")
        for shard in {*receipts} - {*shards} | {*publish.check_receipts(self.opened.store, receipts)}:
            del receipts[shard]
        return receipts

    def _write(self, extension: publish.Extension) -> tuple[dict[int, publish.Receipt], int]:
        """Write shards until none is missing; return the receipts, and the number that an earlier run left."""
        store, options = self.opened.store, self.run_options
        rows = SampleRows.of(range(self.source.num_samples), self.transforms.shuffle)
        receipts = self.kept_receipts(extension.shards)
        kept, done = len(receipts), sum(receipt.num_samples for receipt in receipts.values())
        count = job.counter(job.Progress("write", done, extension.added, kept=done), options.listener)

        def note(task: Task, outcome: Outcome) -> None:
            assert isinstance(outcome, publish.Receipt)
            receipts[task.shard] = outcome
            count(outcome.num_samples, sum(written.size for written in outcome.objects.values()))

        def task(shard: int) -> Task:
            new, fields = rows.read(*extension.samples(shard)), {"extension": extension, "claim": self.claim}
            return AppendTask.of(self.source, new, store, extension.geometry, shard, **fields)

        count(0)
        for _ in range(ROUNDS):
            missing = [shard for shard in extension.shards if shard not in receipts]
            if not missing:
                return receipts, kept
            workers = min(options.num_processes(self.source.url, store.url), len(missing))
            with open_executor(options.engine, workers) as executor:
                run_tasks(executor, (task(shard) for shard in missing), note)
            for shard in publish.check_receipts(store, receipts):
                count(-receipts.pop(shard).num_samples)
        problem = f"objects at {store.url} change while they are written"
        raise DestinationError(problem, "stop other writers, and run the append again")


class _Append(Addition):
    """An append of the samples of a source to a dataset."""

    @cached_property
    def details(self) -> Mapping[str, Any]:
        """The source and the options of the append."""
        options = self.transforms.options()
        source = {**self.source_info, "samples": self.source.num_samples}
        return {
            "by": "append",
            "source": source,
            "options": {key: options[key] for key in ("recode", "map", "shuffle")},
        }

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the old manifest, with the source and its new classes."""
        old = self.opened.manifest.provenance
        classes = merged_classes(class_names(old), class_names(self.source.notes))
        added = {"source": self.source_info, "num_samples": self.source.num_samples}
        if self.transforms.shuffle is not None:
            added["shuffle"] = {"seed": self.transforms.shuffle}
        return {**with_entry(old, "appended", added), **({"classes": classes} if classes else {})}

    @property
    def adds(self) -> bool:
        """Whether the source has samples."""
        return self.source.num_samples > 0

    def plan(self) -> Callable[[], publish.Extension]:
        """Check the size of the samples; return a function that reads the last pages of the chunk tables."""
        target = _target(self.opened.manifest, self.source)
        return partial(publish.plan_extension, self.opened.store, target, self.source.num_samples)

    def finish(self, extension: publish.Extension, receipts: publish.Receipts) -> Manifest:
        """Write small fields and tables."""
        return publish.finish_extension(self.opened.store, extension, receipts, self.provenance)

    def report(self, manifest: Manifest) -> AppendReport:
        """Return the report of the append that made this manifest."""
        added, size = self.source.num_samples, manifest.samples_per_shard
        shards = -(-manifest.num_samples // size) - (manifest.num_samples - added) // size
        before = manifest.num_remaining - added
        return AppendReport(self.opened.store.url, self.format, manifest, before, added, shards, shards)


def with_entry(provenance: Mapping[str, Any], key: str, entry: Any) -> dict[str, Any]:
    """Return the provenance with one more entry in the list at `key`."""
    return {**provenance, key: [*entries(provenance, key), entry]}


def entries(provenance: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list at `key`, empty for anything else."""
    found = provenance.get(key)
    return found if isinstance(found, list) else []


def _target(base: Manifest, source: RowSource) -> Manifest:
    """Return the manifest whose layout the new samples get: a new layout if the dataset is empty, else that of `base`.

    Raises `DestinationError` if the resident fields would exceed the limit of readers, and `UsageError` if the new
    samples are too large for the dataset's shards.
    """
    total = base.num_samples + source.num_samples
    if not base.num_samples:
        options = Layout()
        schema = job.probe(source, options, False)
        sizes = {name: round(size * total) for name, size in schema.sizes.items()}
        geometry = schema.geometry(total, options)
        bulk = [name for name, layout in geometry.layouts.items() if not layout.resident]
        final = settle(geometry, total, sizes, round(sum(schema.decoded[name] for name in bulk) * total))
        return replace(base, samples_per_shard=final.samples_per_shard, fields=final.layouts, order=final.order)
    resident = sum(layout.field.item_bytes * total for layout in base.fields.values() if layout.resident)
    if resident > RESIDENT_TOTAL:
        problem = f"{total} samples have {resident} bytes in small fields, readers hold at most {RESIDENT_TOTAL}"
        raise DestinationError(problem, "convert all samples again: these fields are then streamed")
    if not all(layout.field.fixed for layout in base.fields.values()):
        _check_decoded(base, source)
    return base


def _check_decoded(base: Manifest, source: RowSource) -> None:
    """Raise `UsageError` if a shard of new samples decodes to too many bytes, because a worker holds it in memory.

    Measures some of the samples, as a conversion does before it chooses its samples per shard.
    """
    layout, count = Layout(), min(base.samples_per_shard, source.num_samples)
    for name, size in job.probe(source, layout, False).decoded.items():
        base_size = base.fields[name].nbytes / base.num_samples
        limit = GROWTH * max(EXPANSION * layout.shard_size, base_size * base.samples_per_shard)
        if count > 1 and size * count > limit:  # any layout has to hold a single sample
            sizes = f"{size:.0f} bytes per sample in {source.url}, and {base_size:.0f} in the dataset"
            problem = f"a shard of {count} samples would decode to {size * count:.0f} bytes, the limit is {limit:.0f}"
            remedy = "convert them to a dataset of their own and use a Mixture of both, or convert all samples again"
            raise UsageError(f"field {name!r} has {sizes}: {problem}", remedy)


def _matching(source: RowSource, base: Manifest) -> RowSource:
    """Return the source with exactly the dataset's fields. Raises `FieldError` if an encoding differs."""
    fields = {name: layout.field for name, layout in base.fields.items()}
    for name, field in fields.items():
        encoding = source.fields[name].encoding
        if field.encoding not in ("", encoding) and not (field.encoding == MIXED and encoding):
            problem = f"field {name!r} is {source.fields[name]} in {source.url}, the dataset has {field}"
            raise FieldError(problem, "use the same encoding (quality= makes JPEGs), or convert all samples again")
    return choose(source, FieldSelection(fields))
