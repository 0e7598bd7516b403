"""Plans, runs and resumes conversions.

A `Job` is a function of the source and the options. The job file at the destination identifies the conversion that is
to be resumed, and receipts list its finished shards.
"""

import hashlib
import json
import sys
import threading
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
from streamloader.conversion.sources.base import RowSource, raise_bad_rows, spread_rows
from streamloader.conversion.sources.fields import FieldSelection, choose
from streamloader.conversion.sources.files import list_source
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.objects import NAME as PYTHON
from streamloader.conversion.sources.objects import open_object, pack, qualified_name
from streamloader.conversion.transforms import Mapper, Recode, index_source, map_source, recode_source
from streamloader.format import publish
from streamloader.format.codecs import Column, column_size
from streamloader.format.geometry import Geometry, Schema, settle
from streamloader.format.manifest import VERSION, Field, FieldLayout, Manifest, class_names
from streamloader.format.opening import ROOT, open_root, read_job, read_lines
from streamloader.format.tables import lengths_path
from streamloader.options import Layout, Option, is_whole
from streamloader.storage import ObjectInfo, Store
from streamloader.storage.process import cpu_count
from streamloader.storage.url import redact

FILES = "_streamloader/files"
SETTLED = f"{publish.BAD}/settled"  # exists once every sample was read, so that all bad samples are known
MAX_LINE = 1 << 20  # bytes per line of a file list: a path has up to 4 KiB, a signed URL more
PROBE_BYTES = 16 << 20  # maximum to read for choosing codecs, unless 16 samples are larger
PROBE_RUNS = 16  # places in the source: it is often sorted, and similar samples compress better together
PROBE_ROWS = 1 << 20
CLAIM_SECONDS = 1.0  # interval of checking the claim while tasks are submitted
ROUNDS = 5  # of writing again what others delete or overwrite; bad samples take two
_AGAIN = "start again with overwrite=True (--overwrite)"
_REMEDY = "choose another destination, or give overwrite=True (--overwrite)"
_DONE = f"it is finished: give resume=True (--resume) to accept it if this conversion made it, or {_REMEDY}"

Phase = Literal["scan", "write", "finish", "verify", "compare", "export", "copy"]


@dataclass(frozen=True)
class Preview:
    """What a conversion will write, estimated from some of its rows.

    By field, `codecs` are the codecs, `sizes` the mean stored bytes per sample, `details` the decoding or the unit of
    values, if any, and `classes` the class names. `splits` is the number of samples by split ("" for a dataset without
    splits), `shards` the number of shards of all splits, and `files` that of the source's files.
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
        """The number of samples in all splits."""
        return sum(self.splits.values())

    @property
    def stored(self) -> float:
        """The estimated stored size of all samples, in bytes."""
        return self.num_samples * sum(self.sizes.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the preview as JSON values."""
        fields = {name: str(kind) for name, kind in self.fields.items()}
        return {**asdict(self), "fields": fields, "num_samples": self.num_samples, "stored": round(self.stored)}


@dataclass(frozen=True)
class Progress:
    """The progress of a command: `done` of `total` samples, in the phases "verify" and "copy" bytes.

    An earlier run wrote `kept` of the `done` samples, and this one has stored `bytes`. In the phase "scan", `total` is
    0 because it is unknown, and the last report has the `preview`. `detail` is a line of text.
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
    """Do nothing: the default listener."""


def counter(progress: Progress, listener: Listener | None) -> Callable[..., int]:
    """Return a thread-safe function that adds to `done` and `bytes`, reports both, and returns its first argument."""
    lock, listener = threading.Lock(), listener or ignore

    def count(done: int, size: int = 0) -> int:
        nonlocal progress
        with lock:
            progress = replace(progress, done=progress.done + done, bytes=progress.bytes + size)
            listener(progress)
        return done

    return count


@dataclass(frozen=True)
class Report:
    """The result of a conversion: the `manifests` by split ("" for a dataset without splits), and the plan, `preview`.

    An earlier, interrupted run wrote `shards_kept` of the `shards`. `left_out` are the bad samples, by split, that this
    run skipped or read from an earlier run; `num_left_out` counts all. After a dry run there are no manifests.
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
    def of_iterable(cls, url: str, source: str, manifest: Manifest, bad: tuple[SkippedSample, ...]) -> "Report":
        """Return the report for an iterable, which cannot be planned; its preview is made from the manifest."""
        layouts, count = manifest.fields, manifest.num_samples
        fields = {name: layout.field for name, layout in layouts.items()}
        codecs = {name: layout.codec for name, layout in layouts.items()}
        sizes = {name: layout.stored / max(1, count) for name, layout in layouts.items()}
        shards = -(-count // manifest.samples_per_shard)
        preview = Preview(source, PYTHON, 0, fields, codecs, sizes, {"": count}, shards)
        return cls(url, PYTHON, preview, {"": manifest}, shards, 0, {"": bad}, len(bad))

    @property
    def num_samples(self) -> int:
        """The number of samples in all splits."""
        return sum(manifest.num_samples for manifest in self.manifests.values())

    @property
    def stored(self) -> int:
        """The stored size of all samples, in bytes."""
        return sum(layout.stored for manifest in self.manifests.values() for layout in manifest.fields.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        left_out = [
            {"split": split, "name": sample.name, "problem": sample.problem}
            for split, samples in self.left_out.items()
            for sample in samples
        ]
        return {
            **{name: getattr(self, name) for name in ("url", "format", "num_samples", "stored", "shards")},
            "shards_kept": self.shards_kept,
            "splits": {name: manifest.num_samples for name, manifest in self.manifests.items()},
            "digests": {name: manifest.digest for name, manifest in self.manifests.items()},
            "num_left_out": self.num_left_out,
            "left_out": left_out,
            "preview": self.preview.to_dict(),
        }


@dataclass(frozen=True)
class TransformOptions(Option):
    """The options that determine the written bytes. `shuffle` is the seed of a random order, or None."""

    selection: FieldSelection = field(default_factory=FieldSelection)
    recode: Recode | None = None
    mapper: Mapper | None = None
    splits: Splits = field(default_factory=dict)
    shuffle: int | None = None
    layout: Layout = field(default_factory=Layout)

    def _validate(self) -> None:
        if self.shuffle is not None and not (is_whole(self.shuffle, 0) and self.shuffle < 1 << 63):
            raise errors.UsageError(f"shuffle={self.shuffle!r}", "give a seed from 0 to 2^63 - 1")

    @property
    def source_selection(self) -> FieldSelection:
        """The selection with which to open the source."""
        return replace(self.selection, fields=self.selection.columns, mapped=True) if self.mapper else self.selection

    @property
    def split_text(self) -> str:
        """The splits as text, `train=9/10,val=1/10`. Their order determines the assignment of rows."""
        return ",".join(f"{name}={share}" for name, share in self.splits.items())

    def apply(self, source: RowSource) -> RowSource:
        """Return the source with images re-encoded, mapped, with the selected fields, and with videos indexed.

        A map reads some rows.
        """
        if self.recode is not None:
            source = recode_source(source, self.recode)
        if self.mapper is not None:
            selection = FieldSelection(self.selection.fields)  # the source has filled missing values
            source = choose(map_source(source, self.mapper, selection), selection)
        return index_source(source)

    def options(self) -> Mapping[str, Any]:
        """Return the options as JSON values; only equal options resume an interrupted conversion."""
        fields = {name: str(kind) if kind else None for name, kind in self.selection.fields.items()}
        changes = {"recode": self.recode and self.recode.options(), "map": self.mapper and self.mapper.options()}
        order = {"split": self.split_text, "shuffle": self.shuffle}
        return {"fields": fields, **self.selection.notes, **changes, **order, **asdict(self.layout)}


@dataclass(frozen=True)
class RunOptions(Option):
    """The options that do not change the written bytes.

    `workers` is the number of processes; None is one per core, or all slots of a cluster.
    """

    workers: int | None
    on_error: OnError
    listener: Listener
    engine: EngineChoice

    def _validate(self) -> None:
        if self.on_error not in ON_ERROR:
            raise errors.UsageError(f"on_error={self.on_error!r}", f"choose one of {', '.join(ON_ERROR)}")
        if self.workers is not None and not is_whole(self.workers, 0):
            raise errors.UsageError(f"workers={self.workers!r}", "give the number of processes, 0 for this one")

    @property
    def keep_bad(self) -> bool:
        """Whether bad samples are skipped; otherwise the first one ends the conversion."""
        return self.on_error != "raise"

    def num_processes(self, *urls: str) -> int:
        """Return the number of processes; 0 for this process, in which stores at memory:// URLs are.

        On Windows too, where no other process inherits a socket by its number.
        """
        here = sys.platform == "win32" or any(url.startswith("memory:") for url in urls)
        if self.engine.name == "local" and here:
            return 0
        if self.workers is None:
            return 0 if self.engine.address else cpu_count()
        return self.workers

    def uses_processes(self, *urls: str) -> bool:
        """Return whether other processes run the tasks."""
        return self.engine.name != "local" or self.num_processes(*urls) > 0

    def check(self, transforms: TransformOptions, *urls: str) -> None:
        """Raise `UsageError` for URLs and functions that the workers cannot reach or load."""
        for url in urls:
            if self.engine.name != "local" and url.startswith("memory:"):
                problem = f"{url} is in the memory of this process: workers of {self.engine.name} cannot reach it"
                raise errors.UsageError(problem, "use the local engine, or another store")
        if transforms.mapper is not None and self.uses_processes(*urls):
            pack(transforms.mapper.function, f"function {transforms.mapper.name.removeprefix('__main__:')}")


def probe(source: RowSource, options: Layout, keep_bad: bool) -> Schema:
    """Read some rows, and choose the codecs; the same source gives the same schema.

    `keep_bad` ignores bad samples, which the tasks of their shards will find; otherwise the first is a `SourceError`.
    Raises the errors of the source.
    """

    def read(rows: NDArray[np.int64]) -> dict[str, Column]:
        return source.fragment(rows)((lambda _: None) if keep_bad else raise_bad_rows(rows))

    few = spread_rows(source.num_samples, PROBE_RUNS)
    columns = read(few)
    row_bytes = sum(column_size(column) for column in columns.values()) / max(len(few), 1)
    rows = spread_rows(source.num_samples, int(min(PROBE_ROWS, PROBE_BYTES / max(row_bytes, 1.0))))
    if len(rows) > len(few):
        columns = read(rows)
    return Schema.measure(source.fields, columns, options.codec)


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """The plan of a split, or of a dataset without splits, whose `name` is "": source rows of samples, and geometry."""

    name: str
    rows: SampleRows
    geometry: Geometry
    provenance: Mapping[str, Any]

    @property
    def num_shards(self) -> int:
        """The number of shards, which is also that of tasks."""
        return -(-self.rows.count // self.geometry.samples_per_shard)

    def shard_rows(self, shard: int) -> NDArray[np.int64]:
        """Return the source rows of one shard, in the order of its samples."""
        size = self.geometry.samples_per_shard
        return self.rows.read(shard * size, (shard + 1) * size)

    def without(self, bad_rows: Collection[int]) -> "SplitPlan":
        """Return the plan without these rows of the source; their number goes to the provenance."""
        left_out = {"left_out": len(bad_rows)} if bad_rows else {}
        return replace(self, rows=self.rows.without(bad_rows), provenance={**self.provenance, **left_out})


@dataclass(frozen=True, eq=False)
class Job:
    """A planned conversion. `document` is the content of the job file."""

    source: RowSource
    preview: Preview
    splits: tuple[SplitPlan, ...]
    document: Mapping[str, Any]

    @cached_property
    def id(self) -> str:
        """The SHA-256 of the document: of source, options and geometry, which determine all written bytes."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()


def make_job(source: RowSource, format_name: str, transforms: TransformOptions, keep_bad: bool) -> Job:
    """Plan a conversion; the same source and options give the same job. Reads some rows.

    Raises `UsageError` for a split without samples, and as `probe`.
    """
    schema, described = probe(source, transforms.layout, keep_bad), describe_source(source, format_name)
    order = {} if transforms.shuffle is None else {"shuffle": {"seed": transforms.shuffle}}
    provenance = {"source": described, **source.notes, **transforms.selection.notes, **order}
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
        "source": {"files": described["files"], "samples": source.num_samples, "digest": described["digest"]},
        "plans": {plan.name: {"num_samples": plan.rows.count, **plan.geometry.to_json()} for plan in plans},
    }
    details = {} if "map" in source.notes else {**source.notes.get("decoded", {}), **source.notes.get("units", {})}
    classes = {name: names for name, names in class_names(source.notes).items() if name in schema.fields}
    splits = {plan.name: plan.rows.count for plan in plans}
    measured = schema.fields, schema.codecs, schema.sizes
    preview = Preview(source.url, format_name, len(source.files), *measured, splits, shards, details, classes)
    return Job(source, preview, tuple(plans), json.loads(json.dumps(document)))  # equal to the document when read


def _split_rows(
    source: RowSource, transforms: TransformOptions
) -> Iterator[tuple[str, NDArray[np.int64] | range, Mapping[str, Any] | None]]:
    """Yield the name, the rows and the provenance of each split: of the given splits, or else of the source's own."""
    own = source.notes.get("splits") or {}
    if transforms.splits and own:
        given = f"split={transforms.split_text!r} is given"
        problem = f"{source.url} has the splits {', '.join(own)} of its own, and {given}"
        raise errors.UsageError(problem, "leave split out, or convert one of its folders")
    if transforms.splits:
        for name, rows in assign(source.num_samples, transforms.splits).items():
            share = str(transforms.splits[name])
            yield name, rows, {"name": name, "share": share, "of": transforms.split_text, "seed": SEED}
    elif own:
        for name in own:
            yield name, own_rows(own, name), {"name": name}
    else:
        yield "", range(source.num_samples), None


def describe_source(source: RowSource, format_name: str) -> dict[str, Any]:
    """Return the entry of a source in the provenance, with the SHA-256 of its files' paths, sizes and etags."""
    digest = hashlib.sha256(list_files(source.files)).hexdigest()
    return {"format": format_name, "url": source.url, "files": len(source.files), "digest": digest}


def list_files(files: Sequence[ObjectInfo]) -> bytes:
    """Return the file list, with one line of JSON per file: it tells which file of a source has changed."""
    return b"".join(json.dumps([info.path, info.size, info.etag]).encode() + b"\n" for info in files)


def read_files(store: Store, path: str) -> Iterator[ObjectInfo]:
    """Yield the files of a stored list of any length, which is read in pieces.

    Raises `NotFoundError`, and `FormatError` if `list_files` did not write it.
    """
    try:
        for line in read_lines(store, path, MAX_LINE):
            name, size, etag = json.loads(line)
            yield ObjectInfo(str(name), int(size), str(etag))
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.FormatError(f"{store.url}/{path} is damaged ({error})", _AGAIN) from error


def first_change(before: Iterable[ObjectInfo], files: Sequence[ObjectInfo]) -> str:
    """Describe the first difference between `files` and an earlier list; "" if there is none.

    The earlier list is not kept in memory.
    """
    current = {info.path: info for info in files}
    for info in before:
        file = current.pop(info.path, None)
        if file is None:
            return f"{info.path} is gone"
        if file.size != info.size:
            return f"{info.path} had {info.size} bytes and has {file.size}"
        if file.etag != info.etag:
            return f"{info.path} was written again (its size is still {info.size} bytes)"
    return next((f"{path} is new" for path in current), "")


def find_job(store: Store, overwrite: bool, resume: bool) -> Mapping[str, Any] | None:
    """Return the job of the unfinished conversion at the destination, or None if a new one may begin.

    A new one may begin at an empty destination, with `overwrite` at any, and with `resume` also if there is a finished
    dataset, which `read_finished` checks. Changes nothing. Raises `DestinationError` otherwise, and if another run is
    writing to the destination.
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
    existing = next(iter(store.list()), None)
    if existing is None:
        return None
    if read_job(store) is not None or store.head(ROOT) is not None:  # another run has begun in the meantime
        return find_job(store, overwrite, resume)
    raise errors.DestinationError(f"{store.url} is not empty: it has {existing.path}", _REMEDY)


def read_finished(store: Store, job: Job) -> dict[str, Manifest] | None:
    """Return the manifests, by split, of the finished dataset at the destination; None if there is no dataset.

    Raises `DestinationError` if the dataset has another source or other options than the job, and names them.
    """
    if store.head(ROOT) is None:
        return None
    manifests: dict[str, Manifest] = {}
    for plan in job.splits:
        manifests[plan.name] = manifest = open_root(store, plan.name or None).manifest
        provenance = {key: value for key, value in manifest.provenance.items() if key != "left_out"}
        fields = {name: layout.field for name, layout in manifest.fields.items()}
        planned_fields = {**plan.provenance, "fields": job.preview.fields}
        differences = compare_documents({**provenance, "fields": fields}, planned_fields)
        if not differences:  # compare with the layout that the plan gives to as many samples and stored bytes
            bulk = [name for name, layout in plan.geometry.layouts.items() if not layout.resident]
            planned = settle(plan.geometry, manifest.num_samples, {name: manifest.fields[name].stored for name in bulk})
            differences = compare_documents(_sizes(manifest, manifest.fields), _sizes(planned, planned.layouts))
        if differences:
            problem = f"{store.url} holds a finished dataset of another source, or made with other options"
            raise errors.DestinationError(f"{problem}: {', '.join(differences)} differ", _REMEDY)
    return manifests


def _sizes(dataset: Manifest | Geometry, layouts: Mapping[str, FieldLayout]) -> dict[str, Any]:
    keys = ("chunk", "shard", "codec", "resident")
    fields = {name: {key: getattr(layout, key) for key in keys} for name, layout in layouts.items()}
    return {"samples_per_shard": dataset.samples_per_shard, "block": dataset.order.block, **fields}


def compare_documents(stored: Any, expected: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the pairs of values that differ between two documents, by keys joined with dots; None if missing."""
    if isinstance(stored, list) and isinstance(expected, list) and len(stored) == len(expected):
        stored, expected = dict(enumerate(stored)), dict(enumerate(expected))
    if not isinstance(stored, Mapping) or not isinstance(expected, Mapping):
        return {} if stored == expected else {name: (stored, expected)}
    differences: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*stored, *expected}):
        differences |= compare_documents(stored.get(key), expected.get(key), f"{name}.{key}".lstrip("."))
    return differences


def claim_destination(store: Store, job: Job, existing: Mapping[str, Any] | None, overwrite: bool) -> publish.Claim:
    """Resume the job if it is the `existing` one at the destination, otherwise begin it. Return the claim.

    `overwrite` erases another job. Raises `DestinationError` if the existing job has other options, and
    `SourceChangedError`, which names the file.
    """
    stored = {key: value for key, value in (existing or {}).items() if key != "run"}
    if stored == job.document:
        claim = publish.take_over(store, stored)
        if store.head(FILES) is not None:  # it is missing after a kill right after the job file was written
            return claim
    elif stored and not overwrite:
        raise _other_job_error(store, job, stored)
    else:
        claim = publish.begin(store, job.document, overwrite)
    store.put(FILES, list_files(job.source.files))
    return claim


def _other_job_error(store: Store, job: Job, stored: Mapping[str, Any]) -> errors.StreamloaderError:
    """Return the error for a destination with the unfinished job `stored`, which is not `job`."""
    differences = compare_documents(stored.get("options"), job.document["options"])
    if not differences and stored.get("source") != job.document["source"]:
        try:
            change = first_change(read_files(store, FILES), job.source.files) or "its files are in another order"
        except errors.NotFoundError:
            change = "it has other files"
        problem = f"the source {job.source.url} changed since the conversion to {store.url} began: {change}"
        return errors.SourceChangedError(problem, f"restore the source, or {_AGAIN}")
    differences = differences or compare_documents(stored, job.document)  # another version plans other sizes
    texts = [f"{name} is {there!r} there and {here!r} here" for name, (there, here) in list(differences.items())[:3]]
    problem = f"{store.url} holds the unfinished conversion of another job ({'; '.join(texts)})"
    return errors.DestinationError(problem, f"give the same options to resume it, or {_AGAIN}")


class SplitRun:
    """A split while it is written: the receipts of its shards, and its bad samples.

    At first every shard is written as if no sample were bad; the task of a shard with bad samples writes a list of them
    instead. When all bad samples are known, the plan is settled: rows from the end replace them, so that the content of
    a shard depends on the source only. Then the shards that had bad samples, and the last ones, are written again.
    """

    def __init__(self, plan: SplitPlan, store: Store, keep_bad: bool, job: str) -> None:
        self.store = store
        self.skipped: dict[int, SkippedSample] = read_skipped(store, job, plan.geometry.samples_per_shard)
        if self.skipped and not keep_bad:
            first = self.skipped[min(self.skipped)]
            problem = f"{first.name}: {first.problem} (an earlier run left out {len(self.skipped)} such samples)"
            remedy = f'give on_error="skip" (--on-error skip), or repair the source and {_AGAIN}'
            raise errors.SourceError(problem, remedy)
        self.plan = self._base = plan  # `plan` has no bad samples once it is settled
        if self.skipped and store.head(SETTLED) is not None:
            self._settle()
        self.receipts = publish.read_receipts(store, job=job)
        self.drop_stale()
        self._prune()

    def missing(self) -> list[int]:
        """Return the shards to write now; none if the split is complete. May settle the plan."""
        holes = self._prune()
        if self.plan is self._base and self.skipped and len(holes | self.receipts.keys()) == self._base.num_shards:
            self.store.put(SETTLED, b"")
            self._settle()
            holes = self._prune()
        return [shard for shard in range(self.plan.num_shards) if shard not in self.receipts and shard not in holes]

    def record(self, shard: int, outcome: Outcome) -> None:
        """Record the outcome of a shard's task."""
        if isinstance(outcome, publish.Receipt):
            self.receipts[shard] = outcome
            return
        if self.plan is not self._base:  # this row was good before: the source is not stable, so read all rows again
            self.plan = self._base
            self.store.delete([SETTLED])
        self.skipped |= {sample.row: sample for sample in outcome}

    def drop_stale(self) -> int:
        """Drop the receipts of shards whose objects are missing or differ; return their number of samples."""
        return sum(self.receipts.pop(shard).num_samples for shard in publish.check_receipts(self.store, self.receipts))

    def remove_surplus(self) -> None:
        """Delete the shards at the end that are no longer needed without the bad samples."""
        bulk = {name: layout for name, layout in self._base.geometry.layouts.items() if not layout.resident}
        for shard in range(self.plan.num_shards, self._base.num_shards):
            paths = [path(name, shard) for name, layout in bulk.items() for path in (layout.shard_key, lengths_path)]
            self.store.delete([*paths, f"{publish.PARTS}/{shard}", publish.receipt_path(shard)])

    def _settle(self) -> None:
        self.plan = self._base.without(self.skipped)
        if not self.plan.rows.count:
            first = self.skipped[min(self.skipped)]
            problem = f"all {len(self.skipped)} samples are bad; {first.name}: {first.problem}"
            raise errors.SourceError(problem, "repair the source, or choose another format")

    def _prune(self) -> set[int]:
        """Drop the receipts of shards that the current plan changes; return the shards that have bad samples."""
        holes: set[int] = set()
        if self.skipped and self.plan is self._base:
            holes = set(np.unique(self._base.rows.find(self.skipped) // self._base.geometry.samples_per_shard).tolist())
        for shard, receipt in list(self.receipts.items()):
            planned = shard in range(self.plan.num_shards) and shard not in holes
            if not planned or receipt.num_samples != len(self.plan.shard_rows(shard)):
                del self.receipts[shard]
        return holes


class JobRun:
    """Writes the missing shards of a job and publishes its datasets, while it holds the claim."""

    def __init__(self, job: Job, claim: publish.Claim, store: Store, options: RunOptions) -> None:
        self._job, self._claim, self._store, self._options = job, claim, store, options
        stores = {plan.name: store.child(plan.name) if plan.name else store for plan in job.splits}
        self._manifests = {name: open_root(split).manifest for name, split in stores.items() if split.head(ROOT)}
        unpublished = [plan for plan in job.splits if plan.name not in self._manifests]
        self._published = [stores[name] for name in self._manifests]
        self._splits = [SplitRun(plan, stores[plan.name], options.keep_bad, job.id) for plan in unpublished]
        kept = [receipt.num_samples for split in self._splits for receipt in split.receipts.values()]
        self._kept_shards = len(kept) + sum(plan.num_shards for plan in job.splits if plan.name in self._manifests)
        self._kept = self._done = sum(kept) + sum(manifest.num_samples for manifest in self._manifests.values())
        self._stored = 0

    def complete(self, executor: Executor, check_source: Callable[[], None]) -> Report:
        """Write the missing shards, publish every dataset, and return the report.

        `check_source` raises `SourceChangedError` if the source changed since the job was made.
        """
        job, store, splits, manifests = self._job, self._store, self._splits, self._manifests
        self._write(executor)
        self._report_progress("finish")
        check_source()
        self._claim.check()
        with suppress(errors.AccessError):  # credentials may lack permission to list uploads
            store.remove_leftovers()  # of killed runs and workers: nothing else writes to the destination now
        store.delete([FILES])  # before the job file is deleted, so that a kill leaves no file list behind
        left_out = {split.plan.name: tuple(sample for _, sample in sorted(split.skipped.items())) for split in splits}
        if self._options.on_error == "quarantine":
            quarantine = Quarantine(store, job.id)
            for split in splits:
                quarantine.add_all(split.plan.name, split.store, split.skipped)
            quarantine.flush()
        beside = job.source.beside()
        for split in splits:
            split.remove_surplus()
            for path, data in beside.items():
                split.store.put(path, data)
            plan = split.plan
            manifest = publish.finish(split.store, plan.geometry, split.receipts, plan.provenance, self._claim)
            manifests[plan.name] = manifest
        manifests = {plan.name: manifests[plan.name] for plan in job.splits}
        for published in self._published:  # by an earlier run, which may have been killed before its last step
            publish.clean(published, self._claim)
        if "" not in manifests:
            publish.write_split_root(store, manifests, self._claim)
        bad = sum(int(manifest.provenance.get("left_out", 0)) for manifest in manifests.values())
        shards = job.preview.shards
        return Report(store.url, job.preview.format, job.preview, manifests, shards, self._kept_shards, left_out, bad)

    def _write(self, executor: Executor) -> None:
        """Run the tasks of missing shards until none is missing."""
        by_url = {split.store.url: split for split in self._splits}

        def on_done(task: Task, outcome: Outcome) -> None:
            by_url[task.store.url].record(task.shard, outcome)
            if isinstance(outcome, publish.Receipt):
                self._done += outcome.num_samples
                self._stored += sum(written.size for written in outcome.objects.values())
            self._report_progress("write")

        self._report_progress("write")
        for _ in range(ROUNDS):
            missing = [(split, split.plan, shard) for split in self._splits for shard in split.missing()]
            if not missing:
                return
            run_tasks(executor, self._tasks(missing), on_done)
            self._done -= sum(split.drop_stale() for split in self._splits)
        problem = f"objects at {self._store.url} change while they are written"
        raise errors.DestinationError(problem, "stop other writers, and run the same command again")

    def _tasks(self, shards: list[tuple[SplitRun, SplitPlan, int]]) -> Iterator[Task]:
        options = {"keep_bad": self._options.keep_bad, "job": self._job.id}
        for split, plan, shard in shards:  # one at a time: a fragment of an image folder holds its paths
            self._claim.check(CLAIM_SECONDS)
            yield Task.of(self._job.source, plan.shard_rows(shard), split.store, plan.geometry, shard, **options)

    def _report_progress(self, phase: Phase) -> None:
        total = self._job.preview.num_samples
        self._options.listener(Progress(phase, min(self._done, total), total, self._kept, self._stored))


@dataclass(frozen=True)
class Conversion:
    """A call of `convert` with samples that have numbers. `path` is the URL of the source; "" for a Python object."""

    src: Any
    path: str
    format: str | None
    source_options: Mapping[str, Any]
    store: Store
    transforms: TransformOptions
    options: RunOptions

    def convert(self, overwrite: bool, resume: bool, dry_run: bool) -> Report:
        """Convert, or resume; write nothing with `dry_run`."""
        store, options = self.store, self.options
        options.check(self.transforms, self.path, store.url)
        if dry_run:
            preview = self.plan().preview
            return Report(store.url, preview.format, preview, {}, preview.shards, 0)
        existing = find_job(store, overwrite, resume)
        with open_executor(options.engine, options.num_processes(self.path, store.url)) as executor:
            job = self.plan()  # while the workers start
            manifests = read_finished(store, job) if resume and existing is None else None
            if manifests is not None:
                preview = job.preview
                return Report(store.url, preview.format, preview, manifests, preview.shards, preview.shards)
            with closing(claim_destination(store, job, existing, overwrite)) as claim:
                return JobRun(job, claim, store, options).complete(executor, partial(self._check_source, job))

    def plan(self) -> Job:
        """Open the source and plan the job."""
        shown = redact(self.path) if self.path else f"a {qualified_name(self.src)}"
        self.options.listener(Progress("scan", detail=f"reading {shown}"))
        selection = self.transforms.source_selection
        if self.path:
            name, source = open_source(self.src, self.format, self.source_options, selection)
        else:
            name, source = PYTHON, open_object(self.src, selection, self.options.uses_processes(self.store.url))
        if f"{self.store.url}/".removeprefix("file://").startswith(f"{source.url}/".removeprefix("file://")):
            problem = f"the destination {self.store.url} is inside the source {source.url}"
            raise errors.DestinationError(problem, "choose another destination")
        job = make_job(self.transforms.apply(source), name, self.transforms, self.options.keep_bad)
        self.options.listener(Progress("scan", preview=job.preview))
        return job

    def _check_source(self, job: Job) -> None:
        """Raise `SourceChangedError` if a file of the source changed since the job was made."""
        if not self.path:
            return
        paths = {info.path for info in job.source.files}
        files = [info for info in list_source(self.src, self.source_options).files if info.path in paths]
        change = first_change(job.source.files, files)
        if change:
            problem = f"the source {job.source.url} changed while it was converted: {change}"
            raise errors.SourceChangedError(problem, f"do not change it during the conversion, and {_AGAIN}")
