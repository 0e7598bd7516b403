"""Adds the samples of a source behind those of a finished dataset: scan, check, write, publish.

A claim, one object beside the dataset, keeps two appends apart: only its holder writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.api import for_python, protocol_of
from streamloader.conversion.executors import open_executor, parse_engine, run_tasks
from streamloader.conversion.job import Listener, Progress, RunOptions, TransformOptions, files_digest, ignore, probe
from streamloader.conversion.row_order import SampleRows
from streamloader.conversion.shard_task import Outcome, Task
from streamloader.conversion.sources.base import BadSample, Source
from streamloader.conversion.sources.fields import FieldSelection, choose, transform_source
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.transforms import parse_map, parse_recode
from streamloader.errors import DestinationError, FieldError, FormatError, NotFoundError, ObjectExistsError, UsageError
from streamloader.format import publish
from streamloader.format.codecs import Column
from streamloader.format.geometry import settle
from streamloader.format.manifest import INTS, RESIDENT_TOTAL, Manifest, class_names
from streamloader.format.opening import Opened, open_root, read_object
from streamloader.options import Layout
from streamloader.storage import open_store
from streamloader.storage.store import Store
from streamloader.storage.url import redact

ROUNDS = 5  # shards that others delete or overwrite meanwhile are written again, but not for ever
MIXED = "mixed"  # the encoding of a field whose images have several: any other may join them

Classes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class AppendReport:
    """What an append made: the new manifest, of the split that was asked for.

    `added` samples follow the `before` that were there; `added` is 0 where the source is empty. An earlier, interrupted
    run wrote `shards_kept` of the `shards`.
    """

    url: str
    format: str
    manifest: Manifest
    before: int
    added: int
    shards: int
    shards_kept: int


@for_python()
def append(
    url: str | os.PathLike[str],
    src: str | os.PathLike[str],
    *,
    split: str | None = None,
    format: str | None = None,  # noqa: A002 - as `convert` calls it
    map: str | Callable[[dict[str, Any]], Any] | None = None,  # noqa: A002 - likewise
    map_batch: int | None = None,
    resize: str | int | tuple[int, int] | None = None,
    quality: int | None = None,
    shuffle: int | None = None,
    engine: str = "local",
    workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    progress: Listener | None = None,
) -> AppendReport:
    """Add the samples of `src` behind those of the finished dataset at `url`, or of one `split` of it.

    `format`, `map`, `map_batch`, `resize`, `quality`, `shuffle`, `engine`, `workers` and the options of the stores are
    those of `convert`. The source must have every field of the dataset, in a type that can be cast without loss; other
    fields are left out. Class numbers become those of the dataset, new classes follow. A bad sample ends the append.
    Readers see the earlier version until the append is published; those who opened it keep reading it. Call it again
    in the same way to resume an interrupted append: it writes the same bytes.

    Raises `FieldError` where the fields differ, `SourceError` for the source, `DestinationError` while another append
    is under way or was published meanwhile, what opening the dataset raises, and `StorageError`.
    """
    run_options = RunOptions(workers, "raise", progress or ignore, parse_engine(engine))
    root = open_store(url, storage_options)
    opened = open_root(root, split)
    run_options.listener(Progress("scan", detail=f"looking at {redact(os.fspath(src))}"))
    if source_options is None and protocol_of(src) == protocol_of(url):
        source_options = storage_options
    # bytes of any encoding: what they are is checked at the end, when images are re-encoded
    fields = {name: one.field for name, one in opened.manifest.fields.items()}
    kinds = {name: None if field.kind == "bytes" else field for name, field in fields.items()}
    selection = FieldSelection.from_provenance(kinds, opened.manifest.provenance)
    recode, mapper = parse_recode(resize, quality), parse_map(map, map_batch)
    transforms = TransformOptions(selection, recode, mapper, shuffle=shuffle)
    name, source = open_source(src, format, source_options or {}, transforms.opening)
    own = source.notes.get("splits")
    if own:
        problem = f"{source.url} has the splits {', '.join(own)} of its own"
        raise UsageError(problem, "append each of its folders to the split that it belongs to")
    run_options.check(transforms, source.url, opened.store.url)
    source = relabel(source, class_names(opened.manifest.provenance))
    source = _matching(transforms.apply(source), opened.manifest)
    report = _Append(root, opened, split, name, source, transforms, run_options).run()
    run_options.listener(Progress("finish", report.added, report.added))
    return report


def abandon(
    url: str | os.PathLike[str], *, split: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> bool:
    """End an interrupted append: the dataset is again what it was, to the byte. Returns False where there is none.

    Call it only while no append runs. Raises what opening raises, and what is wrong with shards that it restores.
    """
    root = open_store(url, storage_options)
    opened = open_root(root, split)
    store, base = opened.store, opened.manifest
    try:
        claim = read_claim(store)
    except FormatError:  # it cannot be resumed
        claim = {"generation": base.generation + 1}
    if claim is None:
        return False
    if claim["generation"] > base.generation:
        publish.undo_extension(store, base, split is not None)
    publish.clean_append(store)
    return True


def merged_classes(there: Classes, new: Classes) -> dict[str, list[str]]:
    """Return the class names of the dataset, each list followed by the new ones."""
    return {name: [*names, *(one for one in new.get(name, ()) if one not in names)] for name, names in there.items()}


def relabel(source: Source, there: Classes) -> Source:
    """Return the source with the class numbers of a dataset that has the classes `there`; new classes follow them.

    Raises `FieldError` for a field that cannot hold so many classes.
    """
    here = class_names(source.notes)
    merged = merged_classes(there, here)
    numbers: dict[str, NDArray[Any]] = {}
    for name, names in here.items():
        if name not in there or name not in source.fields or names == list(merged[name][: len(names)]):
            continue
        field = source.fields[name]
        if field.dtype not in INTS or (not field.fixed and field.shape):
            raise FieldError(f"the classes of {name!r} differ and {field} is not a class number", "use --map")
        found = [merged[name].index(one) for one in names]
        if max(found, default=0) > np.iinfo(field.dtype).max:
            raise FieldError(f"{len(merged[name])} classes of {name!r} do not fit {field}", "convert all samples again")
        numbers[name] = np.array(found, field.stored_dtype)
    if not numbers:
        return source
    return transform_source(source, partial(_relabel, numbers))


def _relabel(
    numbers: Mapping[str, NDArray[Any]], columns: dict[str, Column], _: dict[int, BadSample]
) -> dict[str, Column]:
    """Return the columns with new numbers of classes; numbers that are no class, such as -1, stay as they are."""
    for name, table in numbers.items():
        column = columns[name]
        if isinstance(column, np.ndarray):
            columns[name] = _replaced(column, table)
        else:
            columns[name] = [_replaced(np.frombuffer(item, table.dtype), table).tobytes() for item in column]
    return columns


def _replaced(values: NDArray[Any], table: NDArray[Any]) -> NDArray[Any]:
    known = (values >= 0) & (values < len(table))
    return np.where(known, table[np.where(known, values, 0)], values).astype(values.dtype)


def read_claim(store: Store) -> dict[str, Any] | None:
    """Return what is being appended, or None where nothing is. Raises `FormatError`."""
    remedy = "end the append: streamloader append --abandon"
    try:
        claim = read_object(store, publish.CLAIM, remedy)
    except NotFoundError:
        return None
    if type(claim.get("generation")) is not int:
        raise FormatError(f"{store.url}/{publish.CLAIM} is damaged (not a claim)", remedy)
    return claim


def check_claim(store: Store, claim: Mapping[str, Any]) -> None:
    """Raise `DestinationError` unless the claim is still there: a run that lost it must not write."""
    if read_claim(store) != claim:
        raise DestinationError(f"another run ended the append to {store.url}", "check the dataset, then append again")


@dataclass(frozen=True, eq=False, kw_only=True)
class AppendTask(Task):
    """New rows fill, or go into, one shard of all fields. The same bytes every time, as of any task."""

    extension: publish.Extension
    claim: Mapping[str, Any]

    def encode(self, columns: Mapping[str, Column]) -> Callable[[], Outcome]:
        """Return what encodes and writes the columns: what is there already is read when they are written."""
        return partial(self._write, columns)

    def _write(self, columns: Mapping[str, Column]) -> Outcome:
        check_claim(self.store, self.claim)
        return publish.prepare_shard(self.store, self.geometry, self.shard, dict(columns), extension=self.extension)()


@dataclass(frozen=True, eq=False)
class _Append:
    """One append: a dataset, and the source of the samples that are added."""

    root: Store
    opened: Opened
    split: str | None
    format: str
    source: Source
    transforms: TransformOptions
    run_options: RunOptions

    @cached_property
    def about(self) -> dict[str, Any]:
        """The source, as the provenance describes it."""
        files = self.source.files
        return {"format": self.format, "url": self.source.url, "files": len(files), "digest": files_digest(files)}

    @cached_property
    def claim(self) -> dict[str, Any]:
        """The claim: what is appended to which version."""
        base, options = self.opened.manifest, self.transforms.options()
        claim = {
            "by": "append",
            "base": base.digest,
            "generation": base.generation + 1,
            "source": {**self.about, "samples": self.source.num_samples},
            "options": {key: options[key] for key in ("recode", "map", "shuffle")},
        }
        return dict(json.loads(json.dumps(claim)))  # as it is read again

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the new manifest: that of the old one, the new classes, and the source of the samples."""
        old = self.opened.manifest.provenance
        classes = merged_classes(class_names(old), class_names(self.source.notes))
        added = {"source": self.about, "num_samples": self.source.num_samples}
        if self.transforms.shuffle is not None:
            added["shuffle"] = {"seed": self.transforms.shuffle}
        before = old.get("appended")
        appended = [*(before if isinstance(before, list) else []), added]
        return {**old, "appended": appended, **({"classes": classes} if classes else {})}

    def run(self) -> AppendReport:
        """Write, publish and clean up, unless there is nothing to add or an earlier run has published it.

        A run with the same claim may work beside this one: both write the same bytes.
        """
        base, store = self.opened.manifest, self.opened.store
        if not self.source.num_samples:
            return AppendReport(store.url, self.format, base, base.num_samples, 0, 0, 0)
        found = read_claim(store)
        if found is not None and found["generation"] <= base.generation:  # killed after publishing
            publish.clean_append(store)
            if all(found.get(key) == self.claim[key] for key in ("source", "options")):
                return self._published(base)
        target = _target(base, self.source)
        self._take_claim()
        try:
            self._check_base()
            extension = publish.plan_extension(store, target, self.source.num_samples)
            receipts, kept = self._write(extension)
            self.run_options.listener(Progress("finish", extension.added, extension.added))
            check_claim(store, self.claim)
            manifest = publish.finish_extension(store, extension, receipts, self.provenance)
            publish.publish(store, base.digest, manifest)
            if self.split is not None:
                publish.publish_split(self.root, self.split, base.digest, manifest)
        except (DestinationError, FormatError):
            twin = open_root(self.root, self.split).manifest
            if twin.generation != base.generation + 1 or twin.provenance != self.provenance:
                raise
            return self._published(twin)
        publish.clean_append(store)
        return replace(self._published(manifest), shards_kept=kept)

    def _take_claim(self) -> None:
        """Take the claim, or resume the same append. Raises `DestinationError` while another append is under way."""
        store = self.opened.store
        try:
            store.create(publish.CLAIM, json.dumps(self.claim, sort_keys=True, indent=1).encode())
        except ObjectExistsError as error:
            if read_claim(store) != self.claim:
                problem = f"{store.url} is being appended to by another run, or one was interrupted"
                remedy = "run the same append again to resume it, or end it with streamloader append --abandon"
                raise DestinationError(problem, remedy) from error

    def _check_base(self) -> None:
        """Raise `DestinationError` where another append was published before this one took the claim."""
        base, now = self.opened.manifest, open_root(self.root, self.split).manifest
        if now.digest == base.digest:
            return
        if self.claim["generation"] <= now.generation:
            publish.clean_append(self.opened.store)
        problem = f"{self.opened.store.url} was changed by another run: {base.digest} became {now.digest}"
        raise DestinationError(problem, "run the append again")

    def _published(self, manifest: Manifest) -> AppendReport:
        added, size = self.source.num_samples, manifest.samples_per_shard
        before = manifest.num_samples - added
        shards = -(-manifest.num_samples // size) - before // size
        return AppendReport(self.opened.store.url, self.format, manifest, before, added, shards, shards)

    def _write(self, extension: publish.Extension) -> tuple[dict[int, publish.Receipt], int]:
        """Write the missing shards until none is missing; return the receipts, and how many an earlier run left."""
        store, options = self.opened.store, self.run_options
        rows = SampleRows.of(range(self.source.num_samples), self.transforms.shuffle)
        found = publish.read_receipts(store, f"{publish.APPEND}/receipts")
        receipts = {shard: one for shard, one in found.items() if shard in extension.shards}
        progress, kept = Progress("write", 0, extension.added), 0

        def note(task: Task, outcome: Outcome) -> None:
            nonlocal progress
            assert isinstance(outcome, publish.Receipt)
            receipts[task.shard] = outcome
            stored = progress.bytes + sum(one.size for one in outcome.objects.values())
            progress = replace(progress, done=progress.done + outcome.num_samples, bytes=stored)
            options.listener(progress)

        def task(shard: int) -> Task:
            new, more = rows.read(*extension.samples(shard)), {"extension": extension, "claim": self.claim}
            return AppendTask.of(self.source, new, store, extension.geometry, shard, **more)

        for attempt in range(ROUNDS):
            for shard in publish.check_receipts(store, receipts):
                del receipts[shard]
            progress = replace(progress, done=sum(one.num_samples for one in receipts.values()))
            if not attempt:
                kept, progress = len(receipts), replace(progress, kept=progress.done)
                options.listener(progress)
            todo = [shard for shard in extension.shards if shard not in receipts]
            if not todo:
                return receipts, kept
            workers = min(options.processes(self.source.url, store.url), len(todo))
            with open_executor(options.engine, workers) as executor:
                run_tasks(executor, (task(shard) for shard in todo), note)
        problem = f"objects at {store.url} change while it is written"
        raise DestinationError(problem, "let nothing else write there, and run again")


def _target(base: Manifest, source: Source) -> Manifest:
    """Return the manifest whose grid takes the samples: an empty dataset has no object yet, and gets a new grid.

    Raises `DestinationError` where the resident fields would be more than readers hold.
    """
    total = base.num_samples + source.num_samples
    if not base.num_samples:
        options = Layout()
        schema = probe(source, options, False)
        sizes = {name: round(size * total) for name, size in schema.sizes.items()}
        geometry = schema.geometry(total, options)
        bulk = [name for name, layout in geometry.layouts.items() if not layout.resident]
        cut = settle(geometry, total, sizes, round(sum(schema.decoded[name] for name in bulk) * total))
        return replace(base, samples_per_shard=cut.samples_per_shard, fields=cut.layouts, order=cut.order)
    held = sum(layout.field.item_bytes * total for layout in base.fields.values() if layout.resident)
    if held > RESIDENT_TOTAL:
        problem = f"{total} samples have {held} bytes in small fields, readers hold at most {RESIDENT_TOTAL}"
        raise DestinationError(problem, "convert all samples again: these fields are then streamed")
    return base


def _matching(source: Source, base: Manifest) -> Source:
    """Return the source with exactly the dataset's fields. Raises `FieldError`, which names the first difference."""
    wanted = {name: layout.field for name, layout in base.fields.items()}
    for name, field in wanted.items():
        have = source.fields[name]
        if field.encoding not in ("", have.encoding) and not (field.encoding == MIXED and have.encoding):
            problem = f"field {name!r} is {have} in {source.url}, the dataset has {field}"
            raise FieldError(problem, "encode it alike (--quality makes JPEGs), or convert all samples again")
    return choose(source, FieldSelection(wanted))
