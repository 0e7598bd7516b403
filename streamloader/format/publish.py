"""Writes and publishes a dataset or an append: shards and receipts, then tables and documents, and the root last.

Any process can write a shard, even several times: the same samples give the same bytes. `finish` gathers the small
fields and publishes the dataset, which cannot be opened before the last step. After a crash at any point, write the
missing shards and call `finish` again.

An append (`Extension`) adds samples with the layout of the dataset. New shards are new objects. If the last shard is
not full, it is rewritten so that everything an earlier version reads stays in place: first the bytes of its chunks,
then its last chunk again if that was not full, then new chunks, then the index. Readers of an earlier version use their
own table; readers of the new version skip the stale chunk (`FieldLayout.skips`). The new object depends only on the old
table, the bytes that it covers and the new samples, so writing it again, even after a kill, gives the same bytes.
Readers see the earlier version until the root document is replaced. Those that opened it can still read it afterwards,
because nothing that its manifest and tables refer to has changed. A new dataset is an append to an empty one, and so
are new fields of a dataset: all of its samples are appended to fields that have none yet.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any, NamedTuple

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader import errors
from streamloader.format import codecs, opening, tables
from streamloader.format.geometry import Geometry, order_pin, settle
from streamloader.format.manifest import (
    FORMAT,
    NAME,
    FieldLayout,
    Manifest,
    deleted_path,
    manifest_path,
    read_manifest,
    tables_path,
)
from streamloader.format.metadata import dataset_documents, split_documents, to_bytes
from streamloader.format.opening import JOB, RECEIPTS, ROOT, get_document
from streamloader.format.reader import FieldReader
from streamloader.storage.buffers import Buffer, body_crc32c
from streamloader.storage.process import Finalizer, lock_name, run_all
from streamloader.storage.store import Store, reads

THREADS = 16  # for receipts: they are small, so reading one takes a round trip
PUT_THREADS = 8  # for the objects of a shard
FINISH_THREADS = 8  # for documents, pages and parts: each thread may hold a part in memory
INTERNAL = "_streamloader"
PARTS = f"{INTERNAL}/parts"
BAD = f"{INTERNAL}/bad"  # lists of bad samples, which tasks write instead of a receipt
APPEND = f"{INTERNAL}/append"  # receipts and parts of an append until it is published
CLAIM = f"{INTERNAL}/append.json"  # the claim of the append that is in progress: there is at most one
ATTEMPTS = 5  # to replace a root document, which appends to other splits may change at the same time
_WAIT = "wait for the other run, or run this command again when it has ended"
_ARRAY_OBJECT = re.compile(r"zarr\.json|c/[0-9]+(/0)*")


class StoredObject(NamedTuple):
    """A written object: size in bytes, etag (empty if unknown), and the CRC-32C of all its bytes."""

    size: int
    etag: str
    crc32c: int


@dataclass(frozen=True, eq=False)
class FieldReceipt:
    """One shard of one field: decoded and encoded bytes, and its entries of the chunk table.

    `lengths` is the SHA-256 of its page of lengths, or empty if it has none.
    """

    nbytes: int
    stored: int
    entries: NDArray[np.uint32]
    lengths: str = ""


@dataclass(frozen=True, eq=False)
class Receipt:
    """The record that one shard is complete in all fields: its objects by path, and its bulk fields by name.

    `job` is the id of the conversion that wrote it, or empty.
    """

    shard: int
    num_samples: int
    objects: Mapping[str, StoredObject]
    fields: Mapping[str, FieldReceipt]
    job: str = ""

    def to_json(self) -> bytes:
        """Return the stored form of the receipt."""
        fields = {}
        for name, written in self.fields.items():
            entries = base64.b64encode(written.entries.astype("<u4").tobytes()).decode()
            fields[name] = {**vars(written), "entries": entries}
        document = {**vars(self), "objects": dict(self.objects), "fields": fields}
        if not self.job:
            del document["job"]
        return json.dumps(document, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Receipt | None:
        """Return the receipt that `to_json` wrote, or None for other data."""
        fields, objects = dict[str, FieldReceipt](), dict[str, StoredObject]()
        try:
            raw = json.loads(data)
            for name, written in raw["fields"].items():
                entries = np.frombuffer(base64.b64decode(written["entries"]), "<u4").astype(np.uint32).reshape(-1, 2)
                sizes, digest = (int(written["nbytes"]), int(written["stored"])), str(written.get("lengths", ""))
                fields[name] = FieldReceipt(*sizes, entries, digest)
            for path, (size, etag, crc) in raw["objects"].items():
                objects[path] = StoredObject(int(size), str(etag), int(crc))
            return cls(int(raw["shard"]), int(raw["num_samples"]), objects, fields, str(raw.get("job", "")))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None


Receipts = Mapping[int, Receipt]
Columns = dict[str, codecs.Column]


def receipt_path(shard: int, folder: str = INTERNAL) -> str:
    """Return the path of a shard's receipt."""
    return f"{folder}/receipts/{shard}.json"


def read_receipts(store: Store, folder: str = RECEIPTS, job: str = "") -> dict[int, Receipt]:
    """Return the receipts of all finished shards by shard number.

    Receipts that do not parse, or belong to another `job` if one is given, are ignored: their shards are written again.
    Raises `FormatError` for a receipt that is larger than any document.
    """
    paths = [info.path for info in store.list(folder) if info.path.endswith(".json")]
    receipts = run_all(lambda path: Receipt.from_json(get_document(store, path)), paths, THREADS)
    return {receipt.shard: receipt for receipt in receipts if receipt is not None and job in ("", receipt.job)}


def check_receipts(store: Store, receipts: Receipts) -> list[int]:
    """Return the shards with an object that is missing or differs in size or etag. Lists the store once."""
    listed = {info.path: info for info in store.list()}

    def exists(path: str, stored: StoredObject) -> bool:
        info = listed.get(path)
        return info is not None and info.size == stored.size and len({info.etag, stored.etag, ""}) <= 2

    return [shard for shard, receipt in sorted(receipts.items()) if not all(starmap(exists, receipt.objects.items()))]


class Claim:
    """The exclusive right of one run to write to a destination: the key `run` of the job file identifies the run.

    A run that replaces the job file takes the claim over, and the earlier run stops at its next `check`. On Linux, a
    run also holds a socket with its id, which the kernel closes with the process. This distinguishes a run that is
    alive on this machine from one that was killed.
    """

    def __init__(self, store: Store, job: Mapping[str, Any], before: bytes | None) -> None:
        """Write the job file: replace the content `before`, or create the file if that is None.

        Raises `DestinationError` if another run wrote it in the meantime.
        """
        self._store, self._run, self._data = store, uuid.uuid4().hex, before
        self._checked = 0.0
        lock = lock_name(f"run-{self._run}")
        self._release = None if lock is None else Finalizer(self, lock.close)
        try:
            self.renew(job)
        except BaseException:
            self.close()
            raise

    def renew(self, job: Mapping[str, Any]) -> None:
        """Write another job to the job file. Raises `DestinationError` if another run took over."""
        run = {"id": self._run, "host": socket.gethostname(), "pid": os.getpid()}
        data = json.dumps({**job, "run": run}, sort_keys=True, indent=1).encode()
        try:
            if self._data is None:
                self._store.create(JOB, data)
            else:
                self._store.replace(JOB, data, self._data)
        except (errors.ObjectExistsError, errors.NotFoundError) as error:
            problem = f"{self._store.url} is being written by another run, or holds an unfinished dataset"
            raise errors.DestinationError(problem, _WAIT) from error
        self._data = data

    def check(self, seconds: float = 0.0) -> None:
        """Raise `DestinationError` if another run took over. Skipped if the last check was less than `seconds` ago."""
        if self._checked and time.monotonic() - self._checked < seconds:
            return
        if not self.held():
            problem = f"another run writes to {self._store.url} now, or removed what was written: this one stops"
            raise errors.DestinationError(problem, _WAIT)
        self._checked = time.monotonic()

    def held(self) -> bool:
        """Return whether this run still has the right to write."""
        try:
            return any(data == self._data for data in reads(lambda: get_document(self._store, JOB)))
        except (errors.NotFoundError, errors.FormatError):
            return False

    def close(self) -> None:
        """Close the run's socket. The job file stays."""
        if self._release is not None:
            self._release()


def check_not_running(store: Store, job: Mapping[str, Any] | None) -> None:
    """Raise `DestinationError` if the run of the job is alive on this machine."""
    run = job.get("run") if job else None
    if not isinstance(run, dict) or not isinstance(run.get("id"), str):
        return
    lock = lock_name(f"run-{run['id'][:64]}")
    if lock is not None:
        lock.close()
        return
    problem = f"{store.url} is being written by another run, process {run.get('pid')} of this machine"
    raise errors.DestinationError(problem, "wait until it ends, or end it; then run this command again")


def check_free(store: Store, remedy: str = "choose another destination, or overwrite it") -> None:
    """Raise `DestinationError` if there is a dataset, finished or not; `remedy` is for a finished one."""
    if _root(store) is not None:
        raise errors.DestinationError(f"{store.url} holds a dataset", remedy)
    job = opening.read_job(store)
    if job is not None:
        check_not_running(store, job)
        raise errors.DestinationError(f"{store.url} holds an unfinished dataset", "finish or overwrite it")


def begin(store: Store, job: Mapping[str, Any], overwrite: bool = False) -> Claim:
    """Write the job file of a new dataset, which marks it as unfinished until it is published. Return the claim.

    `job` has the keys of `job_document` and any others of the caller. `overwrite` first removes an existing dataset,
    finished or not; meanwhile the job file names its fields and splits. Raises `DestinationError` if there is a dataset
    and `overwrite` is False, if another run is writing it, or if there is Zarr data that streamloader did not write.
    """
    if not overwrite:
        check_free(store)
        return Claim(store, job, None)
    try:  # before the checks: a run that begins after them has written another
        before: bytes | None = get_document(store, JOB)
    except errors.NotFoundError:
        before = None
    document, old_job = _root(store), _job(store)
    check_not_running(store, old_job)
    fields, splits = _contents(document, old_job)
    claim = Claim(store, job_document("writer", fields, splits), before)
    try:
        for paths in _objects(store, fields, splits):
            store.delete(paths)
        claim.renew(job)
    except BaseException:
        claim.close()
        raise
    return claim


def job_document(
    by: str, fields: Iterable[str], splits: Iterable[str] = (), shards: int | None = None
) -> dict[str, Any]:
    """Return the common keys of job files. A job `by` "convert" can be resumed, one by "writer" cannot.

    `shards` is the total over all splits, or None if unknown.
    """
    return {"by": by, "fields": sorted(fields), "splits": sorted(splits), "shards": shards}


def take_over(store: Store, job: Mapping[str, Any]) -> Claim:
    """Claim a destination to resume the `job` of another run. Raises `DestinationError` if that run is alive."""
    try:
        before, old_job = opening.reread(lambda: _read_document(store, JOB))
    except errors.NotFoundError as error:
        raise errors.DestinationError(f"another run has ended what is resumed at {store.url}", _WAIT) from error
    next(iter(store.list(RECEIPTS)), None)  # without permission to list, this raises before anything is changed
    check_not_running(store, old_job)
    return Claim(store, {key: value for key, value in job.items() if key != "run"}, before)


def erase(store: Store) -> None:
    """Delete a dataset, finished or not: its manifest first, its job file last.

    Only objects of the fields and splits in its manifest or job file are deleted; other objects below the URL stay. A
    crash leaves the job file, from which the next call continues.
    """
    document = _root(store)
    names = _contents(document, _job(store))
    if document is not None:
        store.put(JOB, json.dumps(job_document("writer", *names)).encode())
    for paths in _objects(store, *names):
        store.delete(paths)
    store.delete([JOB])


def erasable(store: Store) -> set[str]:
    """Return the paths that `erase` deletes."""
    names = _contents(_root(store), _job(store))
    return {JOB}.union(*_objects(store, *names))


def _objects(store: Store, fields: Iterable[str], splits: Iterable[str]) -> Iterator[list[str]]:
    """Yield the paths to delete, in order: the root document, those of splits, fields, and our own but the job file."""
    yield [ROOT]
    groups = ["", *(f"{split}/" for split in splits)]
    yield [f"{group}{ROOT}" for group in groups]
    for group in groups:
        for name in {*fields, *_claimed_fields(store, f"{group}{CLAIM}")}:
            yield _array_objects(store, f"{group}{name}")
        yield [info.path for info in store.list(f"{group}{INTERNAL}") if info.path != JOB]


def _array_objects(store: Store, array: str) -> list[str]:
    """Return the paths of the objects of an array: its document and its chunks."""
    return [info.path for info in store.list(array) if _ARRAY_OBJECT.fullmatch(info.path, len(array) + 1)]


def _claimed_fields(store: Store, path: str) -> list[str]:
    """Return the fields that are being added to a dataset, from the claim at `path`."""
    try:
        fields = opening.read_object(store, path).get("fields")
    except (errors.NotFoundError, errors.FormatError):
        return []
    return _names(fields) if isinstance(fields, list) else []


def clean(store: Store, claim: Claim | None = None) -> None:
    """Remove the temporary objects of an unfinished dataset, and its job file. Safe to repeat, even after a crash.

    Raises `DestinationError` if the `claim` is lost: the objects then belong to another run.
    """
    if claim is not None:
        claim.check()
    store.delete(temporary(store))
    store.delete([JOB])


def temporary(store: Store) -> list[str]:
    """Return the paths of the temporary objects of an unfinished dataset, without its job file."""
    return [info.path for folder in (PARTS, RECEIPTS, BAD) for info in store.list(folder)]


def _root(store: Store) -> dict[str, Any] | None:
    try:
        document = opening.read_object(store, ROOT)
    except errors.NotFoundError:
        return None
    except errors.FormatError as error:
        problem = f"{store.url}/{ROOT} is damaged, so its fields are unknown"
        raise errors.DestinationError(problem, "delete it yourself") from error
    if opening.manifest_json(document) is None:
        problem = f"{store.url} holds Zarr data that streamloader did not write"
        raise errors.DestinationError(problem, "choose another destination")
    return document


def _job(store: Store) -> dict[str, Any]:
    try:
        return opening.read_job(store) or {}
    except errors.FormatError:
        return {}


def _contents(document: Mapping[str, Any] | None, job: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the fields and of the splits in the root document or the job."""
    fields, splits = set(job.get("fields") or ()), set(job.get("splits") or ())
    if document is not None:
        try:
            nodes = document["consolidated_metadata"]["metadata"]
            splits |= set(document["attributes"][FORMAT].get("splits") or ())
            fields |= {path.rpartition("/")[2] for path, node in nodes.items() if node["node_type"] == "array"}
        except (KeyError, TypeError, AttributeError) as error:
            raise errors.NotADatasetError("the manifest does not list its contents", "delete it yourself") from error
    return _names(fields), _names(splits)


def _names(raw: Iterable[Any]) -> list[str]:
    return sorted(name for name in raw if isinstance(name, str) and NAME.match(name))


def write_shard(store: Store, geometry: Geometry, index: int, columns: Mapping[str, codecs.Column]) -> Receipt:
    """Write shard `index` of all fields, then its receipt. `columns` are its samples, in order.

    Raises `FieldError` or `StorageError`.
    """
    return prepare_shard(store, geometry, index, dict(columns))()


def prepare_shard(
    store: Store, geometry: Geometry, index: int, columns: Columns, *, job: str = "", extension: Extension | None = None
) -> Callable[[], Receipt]:
    """Encode shard `index` of all fields; return a function that writes it, then its receipt with the id `job`.

    Removes the columns from `columns`, to free their memory as they are encoded. Each bulk field becomes one object;
    with an `extension`, the samples are added to the existing shard. The rows of all small fields become one part,
    field after field in the order of their names. Raises `FieldError`; the returned function raises `StorageError`.
    """
    num_samples, folder = check_columns(geometry, columns), APPEND if extension else INTERNAL
    objects: dict[str, Sequence[Buffer]] = {}
    fields: dict[str, FieldReceipt] = {}
    part: list[Buffer] = []
    for name, layout in sorted(geometry.layouts.items()):
        column = columns.pop(name)
        if layout.resident:
            part.append(np.asarray(column, layout.field.stored_dtype).tobytes())
            continue
        nbytes, tail = codecs.column_size(column), extension.tail(name, index) if extension else None
        digest = ""
        if layout.can_have_lengths and (extension is None or extension.has_lengths(name)):
            with suppress(errors.FormatError):  # the existing page is damaged: the new version leaves the table out
                page = _page_lengths(store, column, tail)
                objects[tables.lengths_path(name, index)] = [tables.encode_lengths(page, layout)]
                digest = tables.lengths_digest(page)
        if isinstance(column, list):
            column = column.copy()  # encoding empties the list, and the caller may still use it
        encoded = _encode(store, layout, column, tail)
        objects[layout.shard_key(name, index)] = encoded.parts
        fields[name] = FieldReceipt(nbytes, encoded.size, encoded.entries, digest)
    if part:
        objects[_part_path(index, folder)] = part

    def put(path: str) -> StoredObject:
        info = store.put(path, objects[path])
        return StoredObject(info.size, info.etag, body_crc32c(objects[path]))

    def write() -> Receipt:
        # together, since each takes at least the latency of the store
        written = dict(zip(objects, run_all(put, objects, PUT_THREADS), strict=True))
        receipt = Receipt(index, num_samples, written, fields, job)
        store.put(receipt_path(index, folder), receipt.to_json())
        return receipt

    return write


def check_columns(geometry: Geometry, columns: Mapping[str, codecs.Column]) -> int:
    """Return the number of samples of a shard. Raises `FieldError` if a column does not have its field's type."""
    if set(columns) != set(geometry.layouts):
        remedy = f"give exactly {', '.join(geometry.layouts)}"
        raise errors.FieldError(f"a shard has the columns {sorted(columns)}", remedy)
    lengths = {name: len(column) for name, column in columns.items()}
    num_samples = next(iter(lengths.values()))
    if set(lengths.values()) != {num_samples} or not 0 < num_samples <= geometry.samples_per_shard:
        problem = f"the columns of a shard of {geometry.samples_per_shard} samples have lengths {lengths}"
        raise errors.FieldError(problem, "give the same number of values for each field, at most one shard")
    for name, column in columns.items():
        field = geometry.layouts[name].field
        if field.fixed and (np.dtype(field.dtype), field.shape) != (np.asarray(column).dtype, np.shape(column)[1:]):
            problem = f"the column of {name!r} has {np.asarray(column).dtype} {np.shape(column)[1:]}"
            raise errors.FieldError(f"{problem}, the field is {field}", f"give {field}")
    return num_samples


@dataclass(frozen=True, eq=False)
class Tail:
    """The last `shard` of a field in the version `base`, if it is not full: it has `samples`.

    `entries` are those of the chunk table.
    """

    base: Manifest
    name: str
    layout: FieldLayout
    shard: int
    samples: int
    entries: NDArray[np.uint32]

    @property
    def skips(self) -> dict[int, int]:
        """The number of stale bytes before each chunk that has any, in ascending order."""
        return {chunk: size for shard, chunk, size in self.layout.skips if shard == self.shard}

    @property
    def size(self) -> int:
        """The size of the object, in bytes."""
        index = codecs.index_size(self.layout.chunks_per_shard)
        return int(self.entries[:, 0].sum(dtype=np.int64)) + sum(self.skips.values()) + index

    @property
    def next_skips(self) -> dict[int, int]:
        """The skips of the shard once samples are added: its last chunk is stale if it is not full."""
        (chunk, partial), skips = divmod(self.samples, self.layout.chunk), self.skips
        if partial:
            skips[chunk] = skips.get(chunk, 0) + int(self.entries[chunk, 0])  # the last chunk stays last in the dict
        return skips


@dataclass(frozen=True, eq=False)
class Extension:
    """A planned append of `added` samples to the version `base`, a manifest without provenance.

    `tails` has the last shards that are not full, by field.
    """

    base: Manifest
    added: int
    tails: Mapping[str, Tail] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """The number of samples after the append."""
        return self.base.num_samples + self.added

    def has_lengths(self, name: str) -> bool:
        """Return whether the append writes the table of lengths of a field: it extends a table, or has all samples."""
        return name in self.base.lengths or not self.base.num_samples

    @property
    def folder(self) -> str:
        """The folder of receipts and parts."""
        return APPEND if self.base.generation else INTERNAL

    @property
    def geometry(self) -> Geometry:
        """The sizes with which shards are written."""
        return Geometry(self.base.samples_per_shard, self.base.order, self.base.fields)

    @property
    def shards(self) -> range:
        """The shards of the bulk fields that get samples; the first one may exist already."""
        size = self.base.samples_per_shard
        return range(self.base.num_samples // size, -(-self.num_samples // size)) if self.added else range(0)

    def samples(self, shard: int) -> tuple[int, int]:
        """Return the new samples of a shard as [start, stop), counted from the first new sample."""
        size, before = self.base.samples_per_shard, self.base.num_samples
        return max(0, shard * size - before), min(self.added, (shard + 1) * size - before)

    def tail(self, name: str, shard: int) -> Tail | None:
        """Return the existing part of the field's shard, or None if the shard is new."""
        tail = self.tails.get(name)
        return tail if tail is not None and tail.shard == shard else None


def nothing_new(base: Manifest) -> Extension:
    """Return the extension of a version that gets no samples and no fields."""
    return Extension(replace(base, fields={}, tables={}, lengths={}), 0)


def plan_extension(store: Store, base: Manifest, added: int) -> Extension:
    """Plan an append of `added` samples. Reads the last pages of the chunk tables; raises as `ChunkTable.entries`."""
    base, tails = replace(base, provenance={}), dict[str, Tail]()
    for name, layout in base.fields.items():
        shard, samples = divmod(base.num_samples, layout.shard)
        if samples:
            entries = tables.ChunkTable(store, base, name).entries(shard, samples)
            tails[name] = Tail(base, name, layout, shard, samples, entries)
    return Extension(base, added, tails)


def _part_path(shard: int, folder: str) -> str:
    return f"{folder}/parts/{shard}"


def _encode(store: Store, layout: FieldLayout, column: codecs.Column, tail: Tail | None) -> codecs.EncodedShard:
    """Encode one shard object of one field: the samples of `column`, after those of `tail` if the shard exists."""
    if tail is None:
        return codecs.encode_shard(layout, column)
    old, last = read_tail(store, tail)
    first, partial = divmod(tail.samples, layout.chunk)
    if partial:
        column = np.concatenate([last, column]) if isinstance(last, np.ndarray) else [*last, *column]
    return codecs.encode_shard(layout, column, old=old, entries=tail.entries, first=first, skips=tail.next_skips)


def _page_lengths(store: Store, column: codecs.Column, tail: Tail | None) -> NDArray[np.integer]:
    """Return the lengths of the samples of a shard: of `column`, after those of `tail` if the shard exists."""
    old = [] if tail is None else [tables.LengthTable(store, tail.base, tail.name).shard(tail.shard)]
    return np.concatenate([*old, tables.lengths_of(column)])


def read_tail(store: Store, tail: Tail) -> tuple[memoryview, codecs.Column]:
    """Return the bytes of the shard up to the end of its last chunk, and the column of that chunk.

    Checks every chunk. Raises as `FieldReader.read`.
    """
    reader, field, stop = FieldReader(store, tail.base, tail.name), tail.layout.field, tail.base.num_samples
    runs, last = reader.runs(stop - tail.samples, stop, 1), list[codecs.Column]()
    fetch = reader.request(runs[-1]._replace(start=0))

    def read() -> memoryview:
        data = fetch()
        for run in runs:  # one chunk each
            out = np.empty((run.num_samples, *field.shape), field.dtype) if field.fixed else None
            placed = reader.decode(run, data[run.start : run.stop], out) or []
            last[:] = [[bytes(items[i]) for i in range(len(items))] for _, items in placed] if out is None else [out]
        return data

    return opening.reread(read), last[0]


def finish(
    store: Store, geometry: Geometry, receipts: Receipts, provenance: Mapping[str, Any], claim: Claim | None = None
) -> Manifest:
    """Publish a dataset: write the small fields, tables, array documents, then the root; remove parts and receipts.

    Holds the resident fields (at most 256 MB) and one part per thread in memory. Raises `IncompleteError` if a shard is
    missing, `MissingObjectError` or `FormatError` if a part differs from its receipt, and `DestinationError`, before
    the root is written, if the `claim` is lost.
    """
    num_samples = sum(receipt.num_samples for receipt in receipts.values())
    bulk = [name for name, layout in geometry.layouts.items() if not layout.resident]
    stored = {name: sum(receipt.fields[name].stored for receipt in receipts.values()) for name in bulk}
    decoded = sum(receipt.fields[name].nbytes for receipt in receipts.values() for name in bulk)
    final = settle(geometry, num_samples, stored, decoded)
    empty = Manifest(0, final.samples_per_shard, final.layouts, final.order, provenance=provenance, generation=0)
    manifest = _assemble(store, Extension(empty, num_samples), receipts)
    _publish_root(store, _put_documents(store, manifest), claim)
    return manifest


def finish_extension(store: Store, extension: Extension, receipts: Receipts, provenance: Mapping[str, Any]) -> Manifest:
    """Write the shards of the small fields and the tables of an append; return its manifest, to be published.

    Holds the new rows of the resident fields (at most 256 MB) and whole tables in memory. Raises as `finish`, and
    `FormatError` if readers would refuse the new manifest.
    """
    base, manifest = extension.base, _assemble(store, extension, receipts)
    return _checked(store, manifest, base.order.window > 4 * base.order.block, provenance)


def finish_fields(
    store: Store, base: Manifest, extension: Extension, receipts: Receipts, provenance: Mapping[str, Any]
) -> Manifest:
    """Write the tables of all fields, and the shards of new small fields; return the manifest, to be published.

    `extension` appends the samples of `base` to the new fields, which have none. Raises as `finish_extension`.
    """
    new = _assemble(store, extension, receipts)
    for name, layout in base.fields.items():
        _put_table(store, name, layout, new, tables.ChunkTable(store, base, name).read())
    fields = dict(sorted({**base.fields, **new.fields}.items()))
    lengths = {**base.lengths, **new.lengths}
    manifest = replace(new, fields=fields, tables={**base.tables, **new.tables}, lengths=lengths, deleted=base.deleted)
    in_memory = all(layout.resident for layout in base.fields.values())  # `base` had no blocks, so no window to keep
    return _checked(store, manifest, in_memory or base.order.window > 4 * base.order.block, provenance)


def finish_erased(
    store: Store,
    base: Manifest,
    written: Mapping[str, Mapping[int, FieldReceipt]],
    lengths: Mapping[str, str],
    provenance: Mapping[str, Any],
) -> Manifest:
    """Write the tables of all fields, some of whose shards were `written` again; return the manifest, to be published.

    `base` has the deleted samples of the new version. In a receipt `nbytes` is the number of decoded bytes that were
    erased. Raises as `finish_extension`.
    """
    manifest, layouts, hashes = replace(base, generation=base.generation + 1), dict[str, FieldLayout](), {}
    for name, layout in base.fields.items():
        entries, stored, nbytes = tables.ChunkTable(store, base, name).read(), layout.stored, layout.nbytes
        for shard, receipt in written[name].items():
            stored += receipt.stored - Tail(base, name, layout, shard, 0, entries[shard]).size
            nbytes -= receipt.nbytes
            entries[shard] = receipt.entries
        skips = tuple(skip for skip in layout.skips if skip[0] not in written[name])
        layouts[name] = replace(layout, nbytes=nbytes, stored=stored, skips=skips)
        hashes[name] = _put_table(store, name, layout, manifest, entries)
    manifest = replace(manifest, fields=layouts, tables=hashes, lengths=lengths)
    return _checked(store, manifest, base.order.window > 4 * base.order.block, provenance)


def _checked(store: Store, manifest: Manifest, whole_lanes: bool, provenance: Mapping[str, Any]) -> Manifest:
    """Return the manifest with its final order and provenance. `whole_lanes`: windows are whole lanes, if possible."""
    count, decoded = manifest.num_remaining, sum(layout.nbytes for layout in manifest.fields.values())
    decoded = decoded * count // max(1, manifest.num_samples)
    order = order_pin(count, manifest.order.block, decoded if whole_lanes else None)
    manifest = replace(manifest, order=order, provenance=provenance)
    return read_manifest(manifest.to_json(), store.url)  # the checks of readers


def _assemble(store: Store, extension: Extension, receipts: Receipts) -> Manifest:
    """Write the shards of the small fields, from the parts, and all tables; return the new manifest."""
    counts = {shard: stop - start for shard in extension.shards for start, stop in [extension.samples(shard)]}
    if {shard: receipt.num_samples for shard, receipt in receipts.items()} != counts:
        problem = f"{store.url} has the shards {sorted(receipts)[:20]} of {extension.shards}, or shards that are short"
        raise errors.IncompleteError(problem, "write the missing shards first")
    base = extension.base
    bulk = {name for receipt in receipts.values() for name in receipt.fields}
    written = {name: {shard: receipt.fields[name] for shard, receipt in receipts.items()} for name in bulk}
    written |= _gather(store, extension, receipts)
    layouts = {name: _extended_layout(extension, name, written[name]) for name in base.fields}
    manifest = replace(base, num_samples=extension.num_samples, fields=layouts, generation=base.generation + 1)
    hashes: dict[str, str] = {}
    for name, layout in layouts.items():
        entries = np.zeros((layout.num_shards(extension.num_samples), layout.chunks_per_shard, 2), np.uint32)
        before = tables.ChunkTable(store, base, name).read()
        entries[: len(before)] = before
        for shard, receipt in written[name].items():
            entries[shard] = receipt.entries
        hashes[name] = _put_table(store, name, layout, manifest, entries)
    digests = {name: _lengths_digest(store, extension, name, written[name]) for name in base.fields}
    return replace(manifest, tables=hashes, lengths={name: digest for name, digest in digests.items() if digest})


def _put_table(store: Store, name: str, layout: FieldLayout, manifest: Manifest, entries: NDArray[np.uint32]) -> str:
    """Write the chunk table of a field of the new version `manifest`; return its SHA-256."""
    pages = enumerate(tables.encode_pages(entries, tables.rows_per_page(layout, manifest.num_samples)))
    objects = [(tables.page_path(name, number, manifest.generation), page) for number, page in pages]
    run_all(lambda page: store.put(*page), objects, FINISH_THREADS)
    return tables.table_digest(entries)


def _lengths_digest(store: Store, extension: Extension, name: str, written: Mapping[int, FieldReceipt]) -> str:
    """Return the SHA-256 of the field's table of lengths with these shards; empty if it has none, or not all pages.

    A page is missing if an earlier release wrote its shard, or if an append found the old page damaged.
    """
    base = extension.base
    new = {shard: receipt.lengths for shard, receipt in written.items()}
    if not base.fields[name].can_have_lengths or not extension.has_lengths(name) or not all(new.values()):
        return ""
    old: list[str] = []
    if base.num_samples:
        try:
            old = tables.LengthTable(store, base, name).page_digests()
        except errors.FormatError:  # a table that does not match its manifest is not extended
            return ""
    pages = dict(enumerate(old)) | new  # the last old one may be written again
    return tables.digest_of_pages(pages[shard] for shard in sorted(pages))


def _gather(store: Store, extension: Extension, receipts: Receipts) -> dict[str, dict[int, FieldReceipt]]:
    """Write the shards of the small fields, which are those without receipts, from the parts.

    Returns their receipts by field and shard.
    """
    before, bulk = extension.base.num_samples, {name for receipt in receipts.values() for name in receipt.fields}
    layouts = {name: layout for name, layout in sorted(extension.base.fields.items()) if name not in bulk}
    written: dict[str, dict[int, FieldReceipt]] = {name: {} for name in layouts}
    small = {name: layout.field for name, layout in layouts.items() if layout.resident}
    resident = {name: np.empty((extension.added, *kind.shape), kind.stored_dtype) for name, kind in small.items()}

    def write(name: str, shard: int, rows: NDArray[Any]) -> None:
        encoded = _encode(store, layouts[name], rows, extension.tail(name, shard))
        info = store.put(layouts[name].shard_key(name, shard), encoded.parts)
        written[name][shard] = FieldReceipt(rows.nbytes, info.size, encoded.entries)

    def unpack(receipt: Receipt) -> None:
        data = _read_part(store, _part_path(receipt.shard, extension.folder), receipt, layouts.values())
        offset, (start, stop) = 0, extension.samples(receipt.shard)
        for name, layout in layouts.items():
            count = (stop - start) * layout.field.item_bytes // layout.field.stored_dtype.itemsize
            rows = np.frombuffer(data, layout.field.stored_dtype, count, offset).reshape(-1, *layout.field.shape)
            offset += rows.nbytes
            if name in resident:
                resident[name][start:stop] = rows
            else:  # it became a bulk field in `settle`
                write(name, receipt.shard, rows)

    def write_resident(task: tuple[str, int]) -> None:
        name, shard = task
        size = layouts[name].shard
        write(name, shard, resident[name][max(0, shard * size - before) : (shard + 1) * size - before])

    if layouts:
        run_all(unpack, receipts.values(), FINISH_THREADS)
    count = extension.num_samples
    shards = {name: range(before // layouts[name].shard, layouts[name].num_shards(count)) for name in resident}
    run_all(write_resident, [(name, shard) for name, numbers in shards.items() for shard in numbers], FINISH_THREADS)
    return written


def _read_part(store: Store, path: str, receipt: Receipt, layouts: Iterable[FieldLayout]) -> bytes:
    """Return the part of a shard: the rows of its small fields. At most the size given by the layouts is read.

    Raises `MissingObjectError`, or `FormatError` if the object differs from the receipt.
    """
    remedy = "run the same command again"
    size = receipt.num_samples * sum(layout.field.item_bytes for layout in layouts)
    try:
        data = store.get_range(path, 0, size + 1)
    except errors.NotFoundError as error:
        raise errors.MissingObjectError(f"{store.url}/{path} is missing", remedy) from error
    written = receipt.objects.get(path)
    if written is None or not size == len(data) == written.size or crc32c.crc32c(data) != written.crc32c:
        raise errors.FormatError(f"{store.url}/{path} differs from its receipt", remedy)
    return data


def _extended_layout(extension: Extension, name: str, written: Mapping[int, FieldReceipt]) -> FieldLayout:
    """Return the layout of a field with the sizes and skips after the append."""
    layout, tail = extension.base.fields[name], extension.tails.get(name)
    nbytes = layout.nbytes + sum(receipt.nbytes for receipt in written.values())
    stored = layout.stored + sum(receipt.stored for receipt in written.values())
    if tail is None:
        return replace(layout, nbytes=nbytes, stored=stored)
    skips = tuple(skip for skip in layout.skips if skip[0] != tail.shard)
    skips += tuple((tail.shard, chunk, size) for chunk, size in tail.next_skips.items())
    return replace(layout, nbytes=nbytes, stored=stored - tail.size, skips=skips)


def _put_documents(store: Store, manifest: Manifest) -> bytes:
    """Write all documents of a dataset except the root document; return the bytes of that."""
    documents = dataset_documents(manifest)
    root = documents.pop("")
    run_all(lambda path: store.put(f"{path}/{ROOT}", to_bytes(documents[path])), documents, FINISH_THREADS)
    return to_bytes(root)


def publish(store: Store, base: str, manifest: Manifest) -> None:
    """Keep the manifest of the version `base`, write the documents of the new one, then replace the root document.

    The root document must have the digest `base`. Safe to repeat. Raises `DestinationError` if another version was
    published in the meantime.
    """
    problem = _keeps_changing(store)
    for _ in range(ATTEMPTS):
        before, _, attributes = _read_root(store)
        digest = attributes.get("digest")
        if digest not in (base, manifest.digest):  # or the response was damaged
            problem = _changed_error(store, digest, base)
            continue
        if digest == base:
            store.put(manifest_path(manifest.generation - 1), to_bytes(attributes))
        root = _put_documents(store, manifest)
        try:
            store.replace(ROOT, root, before)
        except errors.ObjectExistsError:  # by another version, or a response was damaged
            continue
        return
    raise problem


def write_split_root(store: Store, manifests: Mapping[str, Manifest], claim: Claim | None = None) -> None:
    """Publish the finished datasets of the child groups as splits, then remove the job file.

    Raises `DestinationError` if the `claim` is lost.
    """
    _publish_root(store, to_bytes(split_documents(manifests)), claim)


def _publish_root(store: Store, root: bytes, claim: Claim | None) -> None:
    """Write the root document of a new dataset, then remove the temporary objects."""
    if claim is not None:
        claim.check()
    store.put(ROOT, root)
    clean(store, claim)


def publish_split(root: Store, split: str, base: str, manifest: Manifest) -> None:
    """List the new version of a split in the root document of all splits, which must list the digest `base`.

    Safe to repeat, and safe during appends to other splits. Raises `DestinationError` as `publish`.
    """
    new, problem = split_documents({split: manifest}), _keeps_changing(root)
    for _ in range(ATTEMPTS):
        before, document, attributes = _read_root(root)
        digest = attributes.get("splits", {}).get(split, {}).get("digest")
        if digest not in (base, manifest.digest):
            problem = _changed_error(root, digest, base)
            continue
        nodes = document["consolidated_metadata"]["metadata"]
        nodes = {path: node for path, node in nodes.items() if path.partition("/")[0] != split}
        nodes |= new["consolidated_metadata"]["metadata"]
        document["consolidated_metadata"]["metadata"] = dict(sorted(nodes.items()))
        attributes["splits"] |= new["attributes"][FORMAT]["splits"]
        try:
            root.replace(ROOT, to_bytes(document), before)
        except errors.ObjectExistsError:
            continue
        return
    raise problem


def clean_append(store: Store) -> None:
    """Remove the temporary objects of an append, and last its claim. Safe to repeat."""
    store.delete([info.path for info in store.list(APPEND)])
    store.delete([CLAIM])


def drop_versions(store: Store, last: Manifest) -> None:
    """Remove the tables, the manifests and the lists of deleted samples of all versions before the `last` one."""
    for generation in range(1, last.generation):
        store.delete([info.path for info in store.list(tables_path(generation))])
    kept = last.deleted.generation if last.deleted else last.generation
    store.delete([deleted_path(generation) for generation in range(2, kept)])


def undo_extension(
    store: Store, base: Manifest, split: bool, fields: Iterable[Any] = (), with_lengths: Iterable[str] = ()
) -> None:
    """Restore the version `base` to the byte after an append that was not published; call `clean_append` afterwards.

    `fields` are the names of the fields that were to be added, from a claim, which anyone may have written;
    `with_lengths` those of fields of `base` whose tables of lengths were. The root document of a `split` may have been
    replaced already. Call it only while no append is running.
    """
    tails = plan_extension(store, base, 0).tails
    for name, layout in base.fields.items():
        if tail := tails.get(name):
            path = layout.shard_key(name, tail.shard)
            info = store.head(path)
            if info is None or info.size != tail.size:  # an append always makes it larger
                store.put(path, [read_tail(store, tail)[0], codecs.encode_index(tail.entries, tail.skips)])
        numbers = range(layout.num_shards(base.num_samples))
        keep = {path(name, shard) for shard in numbers for path in (layout.shard_key, tables.lengths_path)}
        folders = f"{name}/c", f"{tables.LENGTHS}/{name}/c"
        store.delete([info.path for folder in folders for info in store.list(folder) if info.path not in keep])
        if tail and name in base.lengths:
            with suppress(errors.FormatError):  # a damaged page was not rewritten
                page = tables.LengthTable(store, base, name).shard(tail.shard)
                store.put(tables.lengths_path(name, tail.shard), tables.encode_lengths(page, layout))
    documents = dataset_documents(base)
    added = set(_names(fields)) - {*base.fields}
    for array in (*added, *(f"{tables.LENGTHS}/{name}" for name in (*added, *with_lengths))):
        store.delete(_array_objects(store, array))
    if not base.lengths and [info.path for info in store.list(tables.LENGTHS)] == [f"{tables.LENGTHS}/{ROOT}"]:
        store.delete([f"{tables.LENGTHS}/{ROOT}"])
    for name in base.fields:
        for node in {name, f"{tables.LENGTHS}/{name}"} & documents.keys():
            store.put(f"{node}/{ROOT}", to_bytes(documents[node]))
    if split:
        store.put(ROOT, to_bytes(documents[""]))
    store.delete([info.path for info in store.list(tables_path(base.generation + 1))])
    store.delete([deleted_path(base.generation + 1), manifest_path(base.generation)])


def _read_root(store: Store) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """Return the bytes of the root document, the document, and its attribute `streamloader`. Raises `FormatError`."""
    root, document = opening.reread(lambda: _read_document(store, ROOT))
    return root, document, opening.manifest_json(document) or {}


def _read_document(store: Store, path: str) -> tuple[bytes, dict[str, Any]]:
    data = get_document(store, path)
    return data, opening.parse_object(data, f"{store.url}/{path}")


def _keeps_changing(store: Store) -> errors.DestinationError:
    return errors.DestinationError(f"the root of {store.url} keeps changing", "run the same append again")


def _changed_error(store: Store, digest: Any, base: str) -> errors.DestinationError:
    problem = f"{store.url} was changed by another run: it has the digest {digest}, the append was made for {base}"
    return errors.DestinationError(problem, "run the append again")
