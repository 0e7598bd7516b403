"""A conversion as a value, and its run: what is decided before a byte is written, what is missing, and the finish.

A job is a function of the source and the options. Its file at the destination tells an interrupted conversion that is
resumed from another one; the receipts there tell which of its shards are done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamloader import errors
from streamloader.conversion.executors import EngineChoice, Executor, open_executor, run_tasks
from streamloader.conversion.row_order import SEED, SampleRows, Splits, assign, own_rows
from streamloader.conversion.shard_task import ON_ERROR, OnError, Outcome, Quarantine, SkippedSample, Task, read_skipped
from streamloader.conversion.sources.base import Source, raise_bad_rows, spread_rows
from streamloader.conversion.sources.fields import FieldSelection, choose
from streamloader.conversion.sources.files import list_source
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.objects import NAME as PYTHON
from streamloader.conversion.sources.objects import open_object, pack, qualified_name
from streamloader.conversion.transforms import Mapper, Recode, map_source, recode_source
from streamloader.format import publish
from streamloader.format.codecs import Column, column_size, encode_chunk, measure_codec
from streamloader.format.geometry import Geometry, choose_layouts, settle
from streamloader.format.manifest import VERSION, Field, FieldLayout, Manifest, class_names, parse_json
from streamloader.format.opening import ROOT, get_document, open_root, read_job, read_lines, read_pieces
from streamloader.options import Layout
from streamloader.storage.process import cpu_count
from streamloader.storage.store import ObjectInfo, Store
from streamloader.storage.url import redact

FILES = "_streamloader/files"
RECORD = "_streamloader/conversion.json"  # of a finished dataset: how it was made, where the manifest does not say it
SETTLED = f"{publish.BAD}/settled"  # every sample was looked at: the bad ones are known
MAX_LINE = 1 << 20  # bytes of a file list's line: a path has 4 KiB, a signed URL some more
PROBE_BYTES = 16 << 20  # what choosing codecs reads at most, unless 16 samples are more
PROBE_RUNS = 16  # places in the source: it is often sorted, and neighbours compress together
PROBE_ROWS = 1 << 20
CLAIM_SECONDS = 1.0  # how often the claim is checked while tasks are handed out
ROUNDS = 5  # what others delete or overwrite while we write is done again, but not for ever; bad samples take two
_REMEDY = "choose another destination, or give --overwrite"
_DONE = "it is finished: use --resume to accept it if this conversion made it, --overwrite, or another destination"

Phase = Literal["scan", "write", "finish", "verify", "compare", "export"]


@dataclass(frozen=True)
class Preview:
    """What a conversion is going to write, from a sample of its rows.

    `sizes` are the stored bytes of a sample, `codecs` how they are compressed, by field; `splits` the samples of each
    split ("" where there is none) and `shards` the number of shards of all of them. `details` are how the values of a
    field were decoded, or their unit, where there is something to say; `classes` the names of the classes, by field.
    """

    url: str
    format: str
    files: int
    fields: Mapping[str, Field]
    codecs: Mapping[str, str]
    sizes: Mapping[str, float]
    splits: Mapping[str, int]
    shards: int
    details: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """The samples of all splits."""
        return sum(self.splits.values())

    @property
    def stored(self) -> float:
        """The bytes of all samples, as they will be stored."""
        return self.num_samples * sum(self.sizes.values())


@dataclass(frozen=True)
class Progress:
    """How far the work is, in samples; in the phase "verify" in bytes. An earlier run wrote `kept` of the `done`; this
    one stored `bytes`.

    In the phase "scan" `total` is 0, since it is not known yet; its last report has the `preview`. `detail` is one line
    of text.
    """

    phase: Phase
    done: int = 0
    total: int = 0
    kept: int = 0
    bytes: int = 0
    detail: str = ""
    preview: Preview | None = None


Listener = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """Listen to nothing."""


@dataclass(frozen=True)
class Report:
    """What a conversion made. `manifests` by split; without splits the one name is "".

    `shards_kept` of the `shards` were finished by an earlier, interrupted run. `left_out` are the bad samples that this
    run found or met again, `num_left_out` all. `preview` is what was planned: after a dry run there is nothing else.
    """

    url: str
    format: str
    preview: Preview
    manifests: Mapping[str, Manifest]
    shards: int
    shards_kept: int
    left_out: Mapping[str, tuple[SkippedSample, ...]] = field(default_factory=dict)
    num_left_out: int = 0

    @classmethod
    def of_iterable(cls, url: str, source: str, manifest: Manifest, bad: tuple[SkippedSample, ...]) -> Report:
        """Return what the iterable `source` became, for which nothing can be planned."""
        layouts, count = manifest.fields, manifest.num_samples
        fields = {name: layout.field for name, layout in layouts.items()}
        codecs = {name: layout.codec for name, layout in layouts.items()}
        sizes = {name: layout.stored / max(1, count) for name, layout in layouts.items()}
        shards = -(-count // manifest.samples_per_shard)
        preview = Preview(source, PYTHON, 0, fields, codecs, sizes, {"": count}, shards)
        return cls(url, PYTHON, preview, {"": manifest}, shards, 0, {"": bad}, len(bad))

    @property
    def num_samples(self) -> int:
        """The samples of all splits."""
        return sum(manifest.num_samples for manifest in self.manifests.values())


@dataclass(frozen=True)
class TransformOptions:
    """What decides which bytes are written. `shuffle` is the seed of a random order, None keeps the source's."""

    selection: FieldSelection = field(default_factory=FieldSelection)
    recode: Recode | None = None
    mapper: Mapper | None = None
    splits: Splits = field(default_factory=dict)
    shuffle: int | None = None
    layout: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        if self.shuffle is not None and not 0 <= self.shuffle < 1 << 63:
            raise errors.UsageError(f"shuffle={self.shuffle}", "give a seed from 0 to 2^63 - 1")

    @property
    def opening(self) -> FieldSelection:
        """What the source itself is asked for: with a function behind it, all of its fields."""
        return replace(self.selection, fields={}, mapped=True) if self.mapper else self.selection

    @property
    def shares(self) -> str:
        """All splits with their shares, in the order that decides which rows are whose: `train=9/10,val=1/10`."""
        return ",".join(f"{name}={share}" for name, share in self.splits.items())

    def apply(self, source: Source) -> Source:
        """Return the source with images re-encoded, mapped, and with the selected fields. Reads some rows."""
        if self.recode is not None:
            source = recode_source(source, self.recode)
        if self.mapper is not None:
            selection = FieldSelection(self.selection.fields)  # missing values were filled before
            return choose(map_source(source, self.mapper, selection), selection)
        return source

    def options(self) -> Mapping[str, Any]:
        """Return the options as JSON values: an interrupted conversion is resumed with the same ones only."""
        return {
            "fields": {name: str(kind) if kind else None for name, kind in self.selection.fields.items()},
            **self.selection.notes,
            "recode": self.recode.options() if self.recode else None,
            "map": self.mapper.options() if self.mapper else None,
            "split": self.shares,
            "shuffle": self.shuffle,
            **asdict(self.layout),
        }


@dataclass(frozen=True)
class RunOptions:
    """How a job is run: nothing here changes a byte of what is written.

    `workers` None is a process for each core, on a cluster as many as it has slots.
    """

    workers: int | None
    on_error: OnError
    listener: Listener
    engine: EngineChoice

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise errors.UsageError(f"on_error={self.on_error!r}", f"choose one of {', '.join(ON_ERROR)}")
        if self.workers is not None and self.workers < 0:
            raise errors.UsageError(f"workers={self.workers}", "give the number of processes; 0 works in this one")

    @property
    def keep_bad(self) -> bool:
        """Whether bad samples are left out; else the first ends the conversion."""
        return self.on_error != "raise"

    def processes(self, *urls: str) -> int:
        """Return the number of processes; 0 works in this one, as it must where a store lives in its memory."""
        if self.engine.name == "local" and any(url.startswith("memory:") for url in urls):
            return 0
        if self.workers is None:
            return 0 if self.engine.address else cpu_count()
        return self.workers

    def apart(self, *urls: str) -> bool:
        """Return whether tasks are done in other processes."""
        return self.engine.name != "local" or self.processes(*urls) > 0

    def check(self, transforms: TransformOptions, *urls: str) -> None:
        """Raise `UsageError` for what other processes cannot reach or load."""
        for url in urls:
            if self.engine.name != "local" and url.startswith("memory:"):
                problem = f"{url} is in the memory of this process, where the workers of {self.engine.name} cannot"
                raise errors.UsageError(f"{problem} reach it", "use the local engine, or another store")
        if transforms.mapper is not None and self.apart(*urls):
            pack(transforms.mapper.function, f"function {transforms.mapper.name}")


@dataclass(frozen=True)
class Schema:
    """What the sampled rows say: each field's codec, and its mean stored and decoded bytes a sample."""

    fields: Mapping[str, Field]
    codecs: Mapping[str, str]
    sizes: Mapping[str, float]
    decoded: Mapping[str, float]

    def geometry(self, num_samples: int, options: Layout) -> Geometry:
        """Return how a dataset of so many of these samples is cut."""
        return choose_layouts(self.fields, self.sizes, self.codecs, num_samples, options, decoded=self.decoded)


def probe(source: Source, options: Layout, keep_bad: bool) -> Schema:
    """Read some rows and choose; the same source gives the same schema.

    With `keep_bad` bad samples are left to the shards that they belong to; else the first is a `SourceError`, now.
    Raises what reading raises.
    """

    def read(rows: NDArray[np.int64]) -> dict[str, Column]:
        return source.fragment(rows)((lambda _: None) if keep_bad else raise_bad_rows(rows))

    few = spread_rows(source.num_samples, PROBE_RUNS)
    columns = read(few)
    row_bytes = sum(column_size(column) for column in columns.values()) / max(len(few), 1)
    rows = spread_rows(source.num_samples, int(min(PROBE_ROWS, PROBE_BYTES / max(row_bytes, 1.0))))
    if len(rows) > len(few):
        columns = read(rows)
    codecs, sizes, decoded = dict[str, str](), dict[str, float](), dict[str, float]()
    for name, kind in source.fields.items():
        column, count = columns[name], len(columns[name])
        codecs[name], _ = measure_codec(options.codec, kind, column)
        layout = FieldLayout(kind, chunk=count, shard=count, codec=codecs[name], resident=False)
        sizes[name] = len(encode_chunk(layout, column)) / count if count else float(kind.item_bytes)
        decoded[name] = column_size(column) / max(1, count)
    return Schema(source.fields, codecs, sizes, decoded)


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """One dataset of the job: the source row of each of its samples, and how it is cut. `name` "" is the root."""

    name: str
    rows: SampleRows
    geometry: Geometry
    provenance: Mapping[str, Any]

    @property
    def num_shards(self) -> int:
        """The number of shards, and so of tasks."""
        return -(-self.rows.count // self.geometry.samples_per_shard)

    def shard_rows(self, shard: int) -> NDArray[np.int64]:
        """Return the source rows of one shard, in the order of its samples."""
        size = self.geometry.samples_per_shard
        return self.rows.read(shard * size, (shard + 1) * size)

    def without(self, bad_rows: Collection[int]) -> SplitPlan:
        """Return the plan that leaves out these rows of the source, and says how many."""
        left_out = {"left_out": len(bad_rows)} if bad_rows else {}
        return replace(self, rows=self.rows.without(bad_rows), provenance={**self.provenance, **left_out})


@dataclass(frozen=True, eq=False)
class Job:
    """A conversion: its source, what it makes of it, and its datasets. `document` is the job file."""

    source: Source
    preview: Preview
    splits: tuple[SplitPlan, ...]
    document: Mapping[str, Any]

    @cached_property
    def id(self) -> str:
        """The SHA-256 of the document: the source, the options and the geometry, and so every byte that is written."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()

    @property
    def record(self) -> Mapping[str, Any]:
        """The options that decide which bytes are written, and of which the manifest does not tell."""
        options = self.document["options"]
        return {key: options[key] for key in ("map", "fill", "raw") if options.get(key)}

    @property
    def unknown(self) -> str:
        """Why it is unknown whether the map function is the same in another run; empty where it is known."""
        function = self.document["options"]["map"] or {}
        if "unknown" not in function:
            return ""
        return f"it is unknown whether its map function is still {function['function']}, since {function['unknown']}"


def make_job(source: Source, format_name: str, transforms: TransformOptions, keep_bad: bool) -> Job:
    """Decide everything; the same source and options give the same job.

    Raises `UsageError` for a split without samples, and what reading some rows raises; `keep_bad` skips bad ones.
    """
    schema = probe(source, transforms.layout, keep_bad)
    digest, files = files_digest(source.files), len(source.files)
    provenance = {
        "source": {"format": format_name, "url": source.url, "files": files, "digest": digest},
        **source.notes,
        **transforms.selection.notes,
        **({} if transforms.shuffle is None else {"shuffle": {"seed": transforms.shuffle}}),
    }
    plans: list[SplitPlan] = []
    for name, numbers, split in _split_rows(source, transforms):
        rows = SampleRows.of(numbers, transforms.shuffle)
        geometry = schema.geometry(rows.count, transforms.layout)
        plans.append(SplitPlan(name, rows, geometry, {**provenance, **({"split": split} if split else {})}))
    shards = sum(plan.num_shards for plan in plans)
    document = {
        **publish.job_document("convert", schema.fields, [plan.name for plan in plans if plan.name], shards),
        "version": VERSION,
        "options": {"source": source.url, "format": format_name, **transforms.options()},
        "source": {"files": files, "samples": source.num_samples, "digest": digest},
        "plans": {plan.name: {"num_samples": plan.rows.count, **plan.geometry.to_json()} for plan in plans},
    }
    details = {} if "map" in source.notes else {**source.notes.get("decoded", {}), **source.notes.get("units", {})}
    named = class_names(source.notes)
    classes = {name: named[name] for name in schema.fields if name in named}
    splits = {plan.name: plan.rows.count for plan in plans}
    about = (source.url, format_name, files, schema.fields, schema.codecs, schema.sizes, splits, shards)
    preview = Preview(*about, details, classes)
    return Job(source, preview, tuple(plans), json.loads(json.dumps(document)))  # as when it is read back


def _split_rows(
    source: Source, transforms: TransformOptions
) -> Iterator[tuple[str, NDArray[np.int64] | range, Mapping[str, Any] | None]]:
    """Yield the name, the rows and the provenance of each split: those that are asked for, or the source's own."""
    own = source.notes.get("splits") or {}
    if transforms.splits and own:
        problem = f"{source.url} has the splits {', '.join(own)} of its own, and split={transforms.shares!r} is given"
        raise errors.UsageError(problem, "leave split out, or convert one of its folders")
    if transforms.splits:
        for name, rows in assign(source.num_samples, transforms.splits).items():
            share = str(transforms.splits[name])
            yield name, rows, {"name": name, "share": share, "of": transforms.shares, "seed": SEED}
    elif own:
        for name in own:
            yield name, own_rows(own, name), {"name": name}
    else:
        yield "", range(source.num_samples), None


def files_digest(files: Sequence[ObjectInfo]) -> str:
    """Return the SHA-256 of the files' paths, sizes and etags, in order."""
    return hashlib.sha256(list_files(files)).hexdigest()


def list_files(files: Sequence[ObjectInfo]) -> bytes:
    """Return the file list, a line for each file: by its digest a change is known, by the lines the file is named."""
    return b"".join(json.dumps([info.path, info.size, info.etag]).encode() + b"\n" for info in files)


def read_files(store: Store, path: str) -> Iterator[ObjectInfo]:
    """Yield the files of a stored list, which may be of any length: it is read a piece at a time.

    Raises `NotFoundError`, and `FormatError` for what `list_files` does not write.
    """
    try:
        for line in read_lines(read_pieces(store, path), MAX_LINE, f"{store.url}/{path}"):
            name, size, etag = json.loads(line)
            yield ObjectInfo(str(name), int(size), str(etag))
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.FormatError(f"{store.url}/{path} is damaged ({error})", "start again with --overwrite") from error


def first_change(before: Iterable[ObjectInfo], files: Sequence[ObjectInfo]) -> str:
    """Return what differs first from an earlier list, in words; nothing where nothing does.

    Of the earlier list nothing is kept.
    """
    now = {info.path: info for info in files}
    for info in before:
        found = now.pop(info.path, None)
        if found is None:
            return f"{info.path} is gone"
        if found.size != info.size:
            return f"{info.path} had {info.size} bytes and has {found.size}"
        if found.etag != info.etag:
            return f"{info.path} was written again (its size is still {info.size} bytes)"
    return next((f"{new} is new" for new in now), "")


def find_job(store: Store, overwrite: bool, resume: bool) -> Mapping[str, Any] | None:
    """Return the job of the unfinished conversion at the destination, or None where a new one may begin.

    Without `overwrite` that is an empty place only; `resume` also passes a finished dataset, see `finished`. Raises
    `DestinationError`, also where another run is at work here; nothing is changed.
    """
    if overwrite and resume:
        raise errors.UsageError("overwrite and resume together", "give one of them")
    try:
        job = read_job(store)
    except errors.FormatError:
        if not overwrite:
            raise
        job = None
    publish.check_not_running(store, job)
    if job is not None and job.get("by") == "convert":
        return job
    if overwrite or (resume and store.head(ROOT) is not None):
        return None
    publish.check_free(store, _DONE)
    other = next(iter(store.list()), None)
    if other is None:
        return None
    if read_job(store) is not None or store.head(ROOT) is not None:  # of another run, which began meanwhile
        return find_job(store, overwrite, resume)
    raise errors.DestinationError(f"{store.url} is not empty ({other.path} is there)", _REMEDY)


def finished(store: Store, job: Job) -> dict[str, Manifest] | None:
    """Return the manifests by split of the dataset that is here, if this job made it; None where there is none.

    Raises `DestinationError` for a dataset of another source, or made in another way, which it names.
    """
    if store.head(ROOT) is None:
        return None
    if job.unknown:
        raise errors.DestinationError(f"{store.url} holds a finished dataset, and {job.unknown}", _REMEDY)
    try:
        record = parse_json(get_document(store, RECORD))
    except (errors.NotFoundError, ValueError, RecursionError):
        record = {}  # its options are not known
    found: dict[str, Manifest] = {}
    for plan in job.splits:
        found[plan.name] = manifest = open_root(store, plan.name or None).manifest
        provenance = {key: value for key, value in manifest.provenance.items() if key != "left_out"}
        fields = {name: layout.field for name, layout in manifest.fields.items()}
        there = {**provenance, "options": record, "fields": fields}
        here = {**plan.provenance, "options": job.record, "fields": dict(job.preview.fields)}
        differing = _differing(there, here)
        if not differing:  # how would the plan cut a dataset with the samples and the stored bytes of this one?
            bulk = [name for name, layout in plan.geometry.layouts.items() if not layout.resident]
            stored = {name: manifest.fields[name].stored for name in bulk}
            wanted = settle(plan.geometry, manifest.num_samples, stored)
            differing = _differing(_cut(manifest, manifest.fields), _cut(wanted, wanted.layouts))
        if differing:
            problem = f"{store.url} holds a finished dataset of another source, or made with other options"
            raise errors.DestinationError(f"{problem}: {', '.join(differing)} differ", _REMEDY)
    return found


def _cut(dataset: Manifest | Geometry, layouts: Mapping[str, FieldLayout]) -> dict[str, Any]:
    keys = ("chunk", "shard", "codec", "resident")
    cuts = {name: {key: getattr(layout, key) for key in keys} for name, layout in layouts.items()}
    return {"samples_per_shard": dataset.samples_per_shard, "block": dataset.order.block, **cuts}


def _differing(there: Any, here: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the values that differ between two nested documents, by key with the keys above it."""
    if not isinstance(there, Mapping) and not isinstance(here, Mapping):
        return {} if there == here else {name: (there, here)}
    one, other = (each if isinstance(each, Mapping) else {"": each} for each in (there, here))
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*one, *other}):
        found |= _differing(one.get(key), other.get(key), f"{name}.{key}".strip("."))
    return found


def take(store: Store, job: Job, found: Mapping[str, Any] | None, overwrite: bool) -> publish.Claim:
    """Begin the job here, or resume it; another job is erased with `overwrite` only.

    Raises `DestinationError` for other options and `SourceChangedError`, which names the file.
    """
    problem = None if found is None else _difference(store, job, found)
    if found is not None and problem is None:
        claim = publish.take_over(store, found)
        if store.head(FILES) is None:  # killed right after the job file was written
            store.put(FILES, list_files(job.source.files))
        return claim
    try:
        if problem is not None and not overwrite:
            raise problem
    finally:
        del problem  # its traceback has this frame
    claim = publish.begin(store, job.document, overwrite)
    store.put(FILES, list_files(job.source.files))
    return claim


def _difference(store: Store, job: Job, found: Mapping[str, Any]) -> errors.StreamloaderError | None:
    wanted = job.document
    found = {key: value for key, value in found.items() if key != "run"}
    if found == wanted:
        return None
    if job.unknown:
        problem = f"the unfinished conversion at {store.url} cannot be resumed: {job.unknown}"
        remedy = "make it a function without such state, or start again with --overwrite"
        return errors.DestinationError(problem, remedy)
    differing = _differing(found.get("options"), wanted["options"])
    if not differing and found.get("source") != wanted["source"]:
        try:
            change = first_change(read_files(store, FILES), job.source.files) or "its files are in another order"
        except errors.NotFoundError:
            change = "its files are others"
        problem = f"the source {job.source.url} changed since the conversion to {store.url} began: {change}"
        return errors.SourceChangedError(problem, "put it back as it was, or start again with --overwrite")
    differing = differing or _differing(found, wanted)  # the same options, but another version decides otherwise
    some = [f"{name} is {there!r} there and {here!r} here" for name, (there, here) in list(differing.items())[:3]]
    problem = f"{store.url} holds the unfinished conversion of another job ({'; '.join(some)})"
    return errors.DestinationError(problem, "give the same options to resume it, or --overwrite to start again")


class SplitRun:
    """One dataset while it is written: the receipts of its shards, and its bad samples.

    First every shard is done as if no sample were bad; one that has bad samples leaves a list of them instead of a
    receipt. Only when all are known do the last rows move into the holes, so that what each shard holds is a function
    of the source alone. Then the shards with holes, and the last ones, are done again.
    """

    def __init__(self, plan: SplitPlan, store: Store, keep_bad: bool, job: str) -> None:
        self.store = store
        self.skipped: dict[int, SkippedSample] = read_skipped(store, job, plan.geometry.samples_per_shard)
        if self.skipped and not keep_bad:
            first = self.skipped[min(self.skipped)]
            problem = f"{first.name}: {first.problem} (an earlier run left out {len(self.skipped)} such samples)"
            raise errors.SourceError(problem, "resume with --on-error skip or quarantine, or repair it and --overwrite")
        self.plan = self._base = plan  # without the bad samples, as soon as all of them are known: it is settled
        if self.skipped and store.head(SETTLED) is not None:
            self._settle()
        self.receipts = publish.read_receipts(store, job=job)
        self.drop_wrong()
        self._prune()

    def missing(self) -> list[int]:
        """Return the shards that are to be done now; none when the split is written. May settle the bad samples."""
        holes = self._prune()
        if self.plan is self._base and self.skipped and len(holes | self.receipts.keys()) == self._base.num_shards:
            self.store.put(SETTLED, b"")
            self._settle()
            holes = self._prune()
        return [shard for shard in range(self.plan.num_shards) if shard not in self.receipts and shard not in holes]

    def note(self, shard: int, outcome: Outcome) -> None:
        """Take the outcome of a shard's task."""
        if isinstance(outcome, publish.Receipt):
            self.receipts[shard] = outcome
            return
        if self.plan is not self._base:  # a row that was good before: its source is not steady, so look at all again
            self.plan = self._base
            self.store.delete([SETTLED])
        self.skipped |= {one.row: one for one in outcome}

    def drop_wrong(self) -> int:
        """Forget the receipts of shards whose objects are not as they say; return how many samples that were."""
        found = [self.receipts.pop(shard) for shard in publish.check_receipts(self.store, self.receipts)]
        return sum(receipt.num_samples for receipt in found)

    def remove_surplus(self) -> None:
        """Delete the shards at the end that bad samples made superfluous."""
        for i in range(self.plan.num_shards, self._base.num_shards):
            paths = [one.shard_key(name, i) for name, one in self._base.geometry.layouts.items() if not one.resident]
            self.store.delete([*paths, f"{publish.PARTS}/{i}", publish.receipt_path(i)])

    def _settle(self) -> None:
        self.plan = self._base.without(self.skipped)
        if not self.plan.rows.count:
            first = self.skipped[min(self.skipped)]
            problem = f"all {len(self.skipped)} samples are bad; {first.name}: {first.problem}"
            raise errors.SourceError(problem, "repair the source, or choose another format")

    def _prune(self) -> set[int]:
        """Forget receipts of shards that the present plan cuts otherwise; return the shards that hold bad samples."""
        holes: set[int] = set()
        if self.skipped and self.plan is self._base:
            holes = set(np.unique(self._base.rows.find(self.skipped) // self._base.geometry.samples_per_shard).tolist())
        for shard, receipt in list(self.receipts.items()):
            wanted = shard in range(self.plan.num_shards) and shard not in holes
            if not wanted or receipt.num_samples != len(self.plan.shard_rows(shard)):
                del self.receipts[shard]
        return holes


class Run:
    """Does what is missing of a job, as long as it holds the claim."""

    def __init__(self, job: Job, claim: publish.Claim, store: Store, options: RunOptions) -> None:
        self._job, self._claim, self._store, self._options = job, claim, store, options
        stores = {plan.name: store.child(plan.name) if plan.name else store for plan in job.splits}
        self._manifests = {name: open_root(below).manifest for name, below in stores.items() if below.head(ROOT)}
        todo = [plan for plan in job.splits if plan.name not in self._manifests]
        self._splits = [SplitRun(plan, stores[plan.name], options.keep_bad, job.id) for plan in todo]
        kept = [receipt.num_samples for split in self._splits for receipt in split.receipts.values()]
        shards = [plan.num_shards for plan in job.splits if plan.name in self._manifests]
        self._kept_shards = len(kept) + sum(shards)
        self._kept = self._done = sum(kept) + sum(manifest.num_samples for manifest in self._manifests.values())
        self._stored = 0

    def complete(self, executor: Executor, check_source: Callable[[], None]) -> Report:
        """Write what is missing, publish every dataset, and return the report.

        `check_source` raises `SourceChangedError` where the source is not what it was when the job was made.
        """
        job, store, splits, manifests = self._job, self._store, self._splits, self._manifests
        self._write(executor)
        self._tell("finish")
        check_source()
        self._claim.check()
        with suppress(errors.AccessError):  # who may write may not always list uploads: then a lifecycle rule acts
            store.remove_leftovers()  # of killed runs and workers: nothing writes here now
        store.delete([FILES])  # before the job file goes, so that nothing of it can stay
        left_out = {split.plan.name: tuple(one for _, one in sorted(split.skipped.items())) for split in splits}
        if self._options.on_error == "quarantine":
            quarantine = Quarantine(store, job.id)
            for split in splits:
                quarantine.add_all(split.plan.name, split.store, split.skipped)
            quarantine.flush()
        if job.record:
            store.put(RECORD, json.dumps(job.record, sort_keys=True).encode())
        for split in splits:
            split.remove_surplus()
            plan = split.plan
            done = publish.finish(split.store, plan.geometry, split.receipts, plan.provenance, self._claim)
            manifests[plan.name] = done
        manifests = {plan.name: manifests[plan.name] for plan in job.splits}
        if "" not in manifests:
            publish.write_split_root(store, manifests, self._claim)
        elif not splits:  # a run that was killed after its last step but one
            publish.clean(store, self._claim)
        bad = sum(int(manifest.provenance.get("left_out", 0)) for manifest in manifests.values())
        shards = job.preview.shards
        return Report(store.url, job.preview.format, job.preview, manifests, shards, self._kept_shards, left_out, bad)

    def _write(self, executor: Executor) -> None:
        """Do the tasks that are missing, until none is."""
        by_url = {split.store.url: split for split in self._splits}

        def note(task: Task, outcome: Outcome) -> None:
            by_url[task.store.url].note(task.shard, outcome)
            if isinstance(outcome, publish.Receipt):
                self._done += outcome.num_samples
                self._stored += sum(one.size for one in outcome.objects.values())
            self._tell("write")

        self._tell("write")
        for _ in range(ROUNDS):
            todo = [(split, split.plan, shard) for split in self._splits for shard in split.missing()]
            if not todo:
                return
            run_tasks(executor, self._tasks(todo), note)
            self._done -= sum(split.drop_wrong() for split in self._splits)
        problem = f"objects at {self._store.url} change while it is written"
        raise errors.DestinationError(problem, "let nothing else write there, and run again")

    def _tasks(self, todo: list[tuple[SplitRun, SplitPlan, int]]) -> Iterator[Task]:
        job, keep_bad = self._job, self._options.keep_bad
        for split, plan, shard in todo:  # one at a time: a part of an image folder holds its paths
            self._claim.check(CLAIM_SECONDS)
            rows, more = plan.shard_rows(shard), {"keep_bad": keep_bad, "job": job.id}
            yield Task.of(job.source, rows, split.store, plan.geometry, shard, **more)

    def _tell(self, phase: Phase) -> None:
        total = self._job.preview.num_samples
        self._options.listener(Progress(phase, min(self._done, total), total, self._kept, self._stored))


@dataclass(frozen=True)
class Conversion:
    """One call of `convert` with samples that have numbers. `path` is that of the source; empty for a Python object."""

    src: Any
    path: str
    format: str | None
    source_options: Mapping[str, Any]
    store: Store
    transforms: TransformOptions
    options: RunOptions

    def convert(self, overwrite: bool, resume: bool, dry_run: bool) -> Report:
        """Write what is missing at the destination; nothing with `dry_run`."""
        store, options = self.store, self.options
        if dry_run:
            preview = self.plan().preview
            return Report(store.url, preview.format, preview, {}, preview.shards, 0)
        found = find_job(store, overwrite, resume)
        with open_executor(options.engine, options.processes(self.path, store.url)) as executor:
            job = self.plan()  # the workers start meanwhile
            done = finished(store, job) if resume and found is None else None
            if done is not None:
                preview = job.preview
                return Report(store.url, preview.format, preview, done, preview.shards, preview.shards)
            with closing(take(store, job, found, overwrite)) as claim:
                return Run(job, claim, store, options).complete(executor, partial(self._check_source, job))

    def plan(self) -> Job:
        """Open the source, and decide everything."""
        what = redact(self.path) if self.path else f"a {qualified_name(self.src)}"
        self.options.listener(Progress("scan", detail=f"looking at {what}"))
        selection = self.transforms.opening
        if self.path:
            name, source = open_source(self.src, self.format, self.source_options, selection)
        else:
            name, source = PYTHON, open_object(self.src, selection, self.options.apart(self.store.url))
        if f"{self.store.url}/".removeprefix("file://").startswith(f"{source.url}/".removeprefix("file://")):
            problem = f"the destination {self.store.url} is inside the source {source.url}"
            raise errors.DestinationError(problem, "choose another destination")
        job = make_job(self.transforms.apply(source), name, self.transforms, self.options.keep_bad)
        self.options.listener(Progress("scan", preview=job.preview))
        return job

    def _check_source(self, job: Job) -> None:
        """Raise `SourceChangedError` where a file of the source is not what it was when the job was made."""
        if not self.path:
            return
        known = {info.path for info in job.source.files}
        now = [info for info in list_source(self.src, self.source_options).files if info.path in known]
        change = first_change(job.source.files, now)
        if change:
            problem = f"the source {job.source.url} changed while it was converted: {change}"
            remedy = "leave it alone while it is converted, and start again with --overwrite"
            raise errors.SourceChangedError(problem, remedy)
