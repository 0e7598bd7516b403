"""From encoded shards to a dataset, new or appended to: shards, receipts, tables, documents, and the root last.

Anyone may write a shard, as often as they like: the same samples give the same bytes. `finish` gathers the small fields
and publishes; nothing can be opened before its last step. After a crash at any moment, write the missing shards and
call `finish` again.

An append (`Extension`) adds samples on the grid of a dataset. New shards are new objects. The last shard, where it is
not full, is written again so that everything that an earlier version reads of it stays in place: first the bytes of its
chunks, then its last chunk once more where that was not full, then further chunks, then the index. A reader of an
earlier version uses its own table; a reader of the new one skips the stale chunk (`FieldLayout.skips`). The new object
is a function of the old table, the bytes that it covers and the new samples: writing it twice, also after a kill, gives
the same bytes. Until the root document is replaced everybody reads the version before; who opened that one can read it
afterwards too, since nothing that its manifest and tables name has changed. A new dataset is an append to an empty one.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import socket
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any, NamedTuple

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader import errors
from streamloader.format import chunk_table, codecs
from streamloader.format.geometry import Geometry, order_pin, settle
from streamloader.format.manifest import FORMAT, NAME, FieldLayout, Manifest, manifest_from_json, parse_json
from streamloader.format.metadata import dataset_documents, split_documents, to_bytes
from streamloader.format.opening import (
    JOB,
    RECEIPTS,
    ROOT,
    get_document,
    manifest_json,
    parse_object,
    read_job,
    read_object,
    reread,
)
from streamloader.format.reader import FieldReader
from streamloader.storage.process import run_all
from streamloader.storage.store import Buffer, Store, body_crc32c

THREADS = 16  # receipts are small: each is a round trip
FINISH_THREADS = 8  # as documents and pages of tables are; each may hold a part
OURS = "_streamloader"
PARTS = f"{OURS}/parts"
BAD = f"{OURS}/bad"  # what shards with bad samples leave in place of a receipt
APPEND = f"{OURS}/append"  # what an append leaves until it is published
CLAIM = f"{OURS}/append.json"  # who appends: there is one at a time
ROUNDS = 5  # other splits of one root may be appended to at the same time
_WAIT = "wait for the other run, or run this command again when it has ended"
_ARRAY_OBJECT = re.compile(r"zarr\.json|c/[0-9]+(/0)*")


class StoredObject(NamedTuple):
    """An object as it was written: size in bytes, etag (empty where unknown), crc32c of the whole."""

    size: int
    etag: str
    crc32c: int


@dataclass(frozen=True, eq=False)
class FieldReceipt:
    """A bulk field's part of one shard: decoded and encoded bytes, and the shard's rows of the chunk table."""

    nbytes: int
    stored: int
    entries: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Receipt:
    """One finished shard of all fields: its objects by path, and what the tables need of its bulk fields.

    `job` is the id of the conversion that it belongs to; empty where it does not matter.
    """

    shard: int
    num_samples: int
    objects: Mapping[str, StoredObject]
    fields: Mapping[str, FieldReceipt]
    job: str = ""

    def to_json(self) -> bytes:
        """Return the receipt as it is stored."""
        fields = {}
        for name, one in self.fields.items():
            fields[name] = {**vars(one), "entries": base64.b64encode(one.entries.astype("<u4").tobytes()).decode()}
        document = {**vars(self), "objects": dict(self.objects), "fields": fields}
        if not self.job:
            del document["job"]
        return json.dumps(document, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Receipt | None:
        """Return the receipt that `to_json` wrote, None for anything else."""
        fields, objects = dict[str, FieldReceipt](), dict[str, StoredObject]()
        try:
            raw = json.loads(data)
            for name, one in raw["fields"].items():
                entries = np.frombuffer(base64.b64decode(one["entries"]), "<u4").astype(np.uint32).reshape(-1, 2)
                fields[name] = FieldReceipt(int(one["nbytes"]), int(one["stored"]), entries)
            for path, (size, etag, crc) in raw["objects"].items():
                objects[path] = StoredObject(int(size), str(etag), int(crc))
            return cls(int(raw["shard"]), int(raw["num_samples"]), objects, fields, str(raw.get("job", "")))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None


Receipts = Mapping[int, Receipt]
Columns = dict[str, codecs.Column]


def receipt_path(shard: int, folder: str = OURS) -> str:
    """Return the path of a shard's receipt."""
    return f"{folder}/receipts/{shard}.json"


def read_receipts(store: Store, folder: str = RECEIPTS, job: str = "") -> dict[int, Receipt]:
    """Return the receipts of all finished shards by shard number, without those that do not parse.

    With `job` only receipts of that job count. A shard without a receipt that counts is then done again, as if it had
    never been written. Raises `FormatError` for one that is larger than any document.
    """
    paths = [info.path for info in store.list(folder) if info.path.endswith(".json")]
    found = run_all(lambda path: Receipt.from_json(get_document(store, path)), paths, THREADS)
    return {receipt.shard: receipt for receipt in found if receipt is not None and job in ("", receipt.job)}


def check_receipts(store: Store, receipts: Receipts) -> list[int]:
    """Return the shards of which an object is missing or differs in size or etag, by one listing."""
    listed = {info.path: info for info in store.list()}

    def is_there(path: str, stored: StoredObject) -> bool:
        info = listed.get(path)
        etags = {info.etag, stored.etag, ""} if info is not None else set()
        return info is not None and info.size == stored.size and len(etags) <= 2

    return [shard for shard, one in sorted(receipts.items()) if not all(starmap(is_there, one.objects.items()))]


class Claim:
    """The right of one run to write at a destination: the key `run` of the job file names the run that has it.

    Whoever replaces the job file takes the right over; the run that had it stops at its next `check`. On Linux a run
    that is alive also holds a socket of its name, which the kernel closes with the process: that tells a running one
    on this machine from one that was killed.
    """

    def __init__(self, store: Store, job: Mapping[str, Any], before: bytes | None) -> None:
        """Write the job file, in place of the bytes `before`, or where there must be none.

        Raises `DestinationError` where another run wrote it meanwhile.
        """
        self._store, self._run, self._data = store, uuid.uuid4().hex, before
        self._checked = 0.0
        held = _hold(self._run)
        self._release = None if held is None else weakref.finalize(self, held.close)
        try:
            self.renew(job)
        except BaseException:
            self.close()
            raise

    def renew(self, job: Mapping[str, Any]) -> None:
        """Write another job into the job file. Raises `DestinationError` where it is another run's now."""
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
        """Raise `DestinationError` where another run took over, unless that was checked in the last `seconds`."""
        if self._checked and time.monotonic() - self._checked < seconds:
            return
        if not self.held():
            problem = f"another run writes to {self._store.url} now, or removed what this one wrote: this one stops"
            raise errors.DestinationError(problem, _WAIT)
        self._checked = time.monotonic()

    def held(self) -> bool:
        """Return whether this run still has the right to write."""
        try:
            return get_document(self._store, JOB) == self._data
        except (errors.NotFoundError, errors.FormatError):
            return False

    def close(self) -> None:
        """End the run's life. The job file stays."""
        if self._release is not None:
            self._release()


def check_not_running(store: Store, job: Mapping[str, Any] | None) -> None:
    """Raise `DestinationError` where the run that the job names is alive on this machine."""
    run = job.get("run") if job else None
    if not isinstance(run, dict) or not isinstance(run.get("id"), str) or not sys.platform.startswith("linux"):
        return
    held = _hold(run["id"])
    if held is not None:
        held.close()
        return
    problem = f"{store.url} is being written by another run, process {run.get('pid')} of this machine"
    raise errors.DestinationError(problem, "wait until it ends, or end it; then run this command again")


def _hold(run: str) -> socket.socket | None:
    """Return a socket that only one holder has until it is closed; None where there is a holder, or no such sockets."""
    if not sys.platform.startswith("linux"):
        return None
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0streamloader-run-{run[:64]}")  # an abstract name, in no file system
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return held  # this system does not say who holds it
        held.close()
        return None
    return held


def check_free(store: Store, remedy: str = "choose another destination, or overwrite it") -> None:
    """Raise `DestinationError` for a dataset, finished or not; `remedy` is the advice for a finished one."""
    if _root(store) is not None:
        raise errors.DestinationError(f"{store.url} holds a dataset", remedy)
    job = read_job(store)
    if job is not None:
        check_not_running(store, job)
        raise errors.DestinationError(f"{store.url} holds an unfinished dataset", "finish it, or overwrite it")


def begin(store: Store, job: Mapping[str, Any], overwrite: bool = False) -> Claim:
    """Write the job file of a new dataset: until it is published, there is an unfinished one. Return the claim.

    `job` has the keys of `job_document`, and the writer's own. `overwrite` removes the dataset that is here, finished
    or not, while the job file names what is being removed. Raises `DestinationError` for a dataset without `overwrite`,
    for one that another run is writing, and for a Zarr that streamloader did not write in any case.
    """
    if not overwrite:
        check_free(store)
        return Claim(store, job, None)
    document, found = _root(store), _job(store)
    try:
        before: bytes | None = get_document(store, JOB)
    except errors.NotFoundError:
        before = None
    check_not_running(store, found)
    fields, splits = _contents(document, found)
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
    """Return what every job file has. `by` "convert" can be resumed, "writer" cannot.

    `shards` is the total over all splits, where it is known.
    """
    return {"by": by, "fields": sorted(fields), "splits": sorted(splits), "shards": shards}


def take_over(store: Store, job: Mapping[str, Any]) -> Claim:
    """Resume the job that is here, which another run began. Raises `DestinationError` where that is alive."""
    before = get_document(store, JOB)
    next(iter(store.list(RECEIPTS)), None)  # without permission to list this raises before anything is changed
    check_not_running(store, parse_json(before))
    return Claim(store, {key: value for key, value in job.items() if key != "run"}, before)


def erase(store: Store) -> None:
    """Delete the dataset that is here, finished or not, and nothing else: its manifest first, its job last.

    What belongs to it stands in its manifest or its job, so that other things below the same URL stay. A crash
    in the middle leaves a job, from which the next call resumes.
    """
    document = _root(store)
    names = _contents(document, _job(store))
    if document is not None:
        store.put(JOB, json.dumps(job_document("writer", *names)).encode())
    for paths in _objects(store, *names):
        store.delete(paths)
    store.delete([JOB])


def erasable(store: Store) -> set[str]:
    """Return the paths of what `erase` deletes."""
    names = _contents(_root(store), _job(store))
    return {JOB}.union(*_objects(store, *names))


def _objects(store: Store, fields: Iterable[str], splits: Iterable[str]) -> Iterator[list[str]]:
    """Yield the objects of these fields and splits, the manifest first, and our own objects but the job file."""
    yield [ROOT]
    groups = ["", *(f"{split}/" for split in splits)]
    yield [f"{group}{ROOT}" for group in groups]
    for group in groups:
        for name in fields:
            below = f"{group}{name}"
            found = [info.path for info in store.list(below)]
            yield [path for path in found if _ARRAY_OBJECT.fullmatch(path, len(below) + 1)]
        yield [info.path for info in store.list(f"{group}{OURS}") if info.path != JOB]


def clean(store: Store, claim: Claim | None = None) -> None:
    """Remove what only an unfinished dataset needs. Safe to repeat, also after a crash.

    Raises `DestinationError` where the `claim` is lost: what is there is another run's.
    """
    if claim is not None:
        claim.check()
    store.delete(temporary(store))
    store.delete([JOB])


def temporary(store: Store) -> list[str]:
    """Return the paths of what only an unfinished dataset needs, besides its job file."""
    return [info.path for folder in (PARTS, RECEIPTS, BAD) for info in store.list(folder)]


def _root(store: Store) -> dict[str, Any] | None:
    try:
        document = read_object(store, ROOT)
    except errors.NotFoundError:
        return None
    except errors.FormatError as error:
        problem = f"{store.url}/{ROOT} is damaged, so its fields are unknown"
        raise errors.DestinationError(problem, "delete it yourself") from error
    if manifest_json(document) is None:
        problem = f"{store.url} holds a Zarr that streamloader did not write"
        raise errors.DestinationError(problem, "choose another destination")
    return document


def _job(store: Store) -> dict[str, Any]:
    try:
        return read_job(store) or {}
    except errors.FormatError:
        return {}


def _contents(document: Mapping[str, Any] | None, job: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of fields and splits in the manifest or the job."""
    fields, splits = set(job.get("fields") or ()), set(job.get("splits") or ())
    if document is not None:
        try:
            nodes = document["consolidated_metadata"]["metadata"]
            splits |= set(document["attributes"][FORMAT].get("splits") or ())
            fields |= {path.rpartition("/")[2] for path, node in nodes.items() if node["node_type"] == "array"}
        except (KeyError, TypeError, AttributeError) as error:
            problem = "the manifest here does not list its contents"
            raise errors.NotADatasetError(problem, "delete it yourself") from error
    return _names(fields), _names(splits)


def _names(raw: Iterable[Any]) -> list[str]:
    return sorted(name for name in raw if isinstance(name, str) and NAME.match(name))


def write_shard(store: Store, geometry: Geometry, index: int, columns: Mapping[str, codecs.Column]) -> Receipt:
    """Write one shard of all fields and then its receipt; `columns` are its samples, in order.

    Raises `FieldError` or `StorageError`.
    """
    return prepare_shard(store, geometry, index, dict(columns))()


def prepare_shard(
    store: Store, geometry: Geometry, index: int, columns: Columns, *, job: str = "", extension: Extension | None = None
) -> Callable[[], Receipt]:
    """Encode one shard of all fields; return what writes it, and then its receipt, which names the job.

    Takes the columns out of `columns`, so that what is encoded can be freed. One object for each bulk field, behind
    what it holds already with an `extension`; and one part with the rows of all small fields, field after field in the
    order of their names. Raises `FieldError`; the writing raises `StorageError`.
    """
    num_samples, folder = check_columns(geometry, columns), APPEND if extension else OURS
    objects: dict[str, Sequence[Buffer]] = {}
    fields: dict[str, FieldReceipt] = {}
    part: list[Buffer] = []
    for name, layout in sorted(geometry.layouts.items()):
        column = columns.pop(name)
        if layout.resident:
            part.append(np.asarray(column, layout.field.stored_dtype).tobytes())
            continue
        nbytes = codecs.column_size(column)
        if isinstance(column, list):
            column = column.copy()  # others may hold the list, and then its items too
        encoded = _encode(store, layout, column, extension.tail(name, index) if extension else None)
        objects[layout.shard_key(name, index)] = encoded.parts
        fields[name] = FieldReceipt(nbytes, encoded.size, encoded.entries)
    if part:
        objects[_part_path(index, folder)] = part

    def write() -> Receipt:
        written = {}
        for path, parts in objects.items():
            info = store.put(path, parts)
            written[path] = StoredObject(info.size, info.etag, body_crc32c(parts))
        receipt = Receipt(index, num_samples, written, fields, job)
        store.put(receipt_path(index, folder), receipt.to_json())
        return receipt

    return write


def check_columns(geometry: Geometry, columns: Mapping[str, codecs.Column]) -> int:
    """Return the number of samples; `FieldError` where a column would be stored as something else."""
    if set(columns) != set(geometry.layouts):
        remedy = f"give exactly {', '.join(geometry.layouts)}"
        raise errors.FieldError(f"the columns {sorted(columns)} of a shard", remedy)
    lengths = {name: len(column) for name, column in columns.items()}
    num_samples = next(iter(lengths.values()))
    if set(lengths.values()) != {num_samples} or not 0 < num_samples <= geometry.samples_per_shard:
        problem = f"the columns of a shard of {geometry.samples_per_shard} samples have lengths {lengths}"
        raise errors.FieldError(problem, "give as many values for each field, and no more than a shard has")
    for name, column in columns.items():
        field = geometry.layouts[name].field
        if field.fixed and (np.dtype(field.dtype), field.shape) != (np.asarray(column).dtype, np.shape(column)[1:]):
            problem = f"the column of {name!r} has {np.asarray(column).dtype} {np.shape(column)[1:]}"
            raise errors.FieldError(f"{problem}, the field is {field}", f"give {field}")
    return num_samples


@dataclass(frozen=True, eq=False)
class Tail:
    """A field's last shard where it is not full, in the version `base`, and its rows of the chunk table."""

    base: Manifest
    name: str
    entries: NDArray[np.uint32]

    @property
    def layout(self) -> FieldLayout:
        """The layout of the field."""
        return self.base.fields[self.name]

    @property
    def shard(self) -> int:
        """The number of the shard."""
        return self.base.num_samples // self.layout.shard

    @property
    def samples(self) -> int:
        """How many samples the shard holds."""
        return self.base.num_samples % self.layout.shard

    @property
    def skips(self) -> dict[int, int]:
        """By chunk, ascending, the bytes of earlier versions that stand before it."""
        return {chunk: size for shard, chunk, size in self.layout.skips if shard == self.shard}

    @property
    def size(self) -> int:
        """The bytes of the object."""
        index = codecs.index_size(self.layout.chunks_per_shard)
        return int(self.entries[:, 0].sum(dtype=np.int64)) + sum(self.skips.values()) + index

    @property
    def next_skips(self) -> dict[int, int]:
        """The skips of the shard when samples were added: a last chunk that was not full is stale then."""
        (chunk, rest), skips = divmod(self.samples, self.layout.chunk), self.skips
        if rest:
            skips[chunk] = skips.get(chunk, 0) + int(self.entries[chunk, 0])  # the last chunk comes last
        return skips


@dataclass(frozen=True, eq=False)
class Extension:
    """An append, before it is done: the dataset as it is (of its manifest all but the provenance), how many samples
    come behind it, and the last shards that are not full, by field.
    """

    base: Manifest
    added: int
    tails: Mapping[str, Tail] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """The samples of the dataset that is being made."""
        return self.base.num_samples + self.added

    @property
    def folder(self) -> str:
        """Where receipts and parts are."""
        return APPEND if self.base.generation else OURS

    @property
    def geometry(self) -> Geometry:
        """How the dataset is cut."""
        return Geometry(self.base.samples_per_shard, self.base.order, self.base.fields)

    @property
    def shards(self) -> range:
        """The shards of the bulk fields that samples are added to, the first of them perhaps to what it holds."""
        size = self.base.samples_per_shard
        return range(self.base.num_samples // size, -(-self.num_samples // size)) if self.added else range(0)

    def samples(self, shard: int) -> tuple[int, int]:
        """Return [start, stop) of the new samples of a shard, counted from the first new one."""
        size, before = self.base.samples_per_shard, self.base.num_samples
        return max(0, shard * size - before), min(self.added, (shard + 1) * size - before)

    def tail(self, name: str, shard: int) -> Tail | None:
        """Return what the field's shard holds already; None where it is new."""
        tail = self.tails.get(name)
        return tail if tail is not None and tail.shard == shard else None


def plan_extension(store: Store, base: Manifest, added: int) -> Extension:
    """Return the append of so many samples. Reads the last pages of the chunk tables. Raises what they raise."""
    base, tails = replace(base, provenance={}), dict[str, Tail]()
    for name, layout in base.fields.items():
        shard, samples = divmod(base.num_samples, layout.shard)
        if samples:
            tails[name] = Tail(base, name, chunk_table.ChunkTable(store, base, name).entries(shard, samples))
    return Extension(base, added, tails)


def _part_path(shard: int, folder: str) -> str:
    return f"{folder}/parts/{shard}"


def _encode(store: Store, layout: FieldLayout, column: codecs.Column, tail: Tail | None) -> codecs.EncodedShard:
    """Encode one shard object of one field: the samples that it holds already, if any, and the new ones."""
    if tail is None:
        return codecs.encode_shard(layout, column)
    old, last = read_tail(store, tail)
    full, rest = divmod(tail.samples, layout.chunk)
    if rest:
        column = np.concatenate([last, column]) if isinstance(last, np.ndarray) else [*last, *column]
    return codecs.encode_shard(layout, column, old=old, entries=tail.entries, first=full, skips=tail.next_skips)


def read_tail(store: Store, tail: Tail) -> tuple[memoryview, codecs.Column]:
    """Return the bytes of the shard up to the end of its last chunk, and the samples of that chunk.

    Every chunk is checked. Raises as `FieldReader.read`.
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

    return reread(read), last[0]


def finish(
    store: Store, geometry: Geometry, receipts: Receipts, provenance: Mapping[str, Any], claim: Claim | None = None
) -> Manifest:
    """Gather the small fields, write tables, array documents and last the root; then remove parts and receipts.

    A lost `claim` ends it before the root is written, with a `DestinationError`.

    Holds the resident fields (256 MB at most) and a part for each thread. Raises `IncompleteError` where a
    shard is missing, `MissingObjectError` or `FormatError` where a part is not what was written.
    """
    num_samples = sum(receipt.num_samples for receipt in receipts.values())
    bulk = [name for name, layout in geometry.layouts.items() if not layout.resident]
    stored = {name: sum(receipt.fields[name].stored for receipt in receipts.values()) for name in bulk}
    decoded = sum(receipt.fields[name].nbytes for receipt in receipts.values() for name in bulk)
    final = settle(geometry, num_samples, stored, decoded)
    empty = Manifest(0, final.samples_per_shard, final.layouts, final.order, provenance=provenance, generation=0)
    manifest = _assemble(store, Extension(empty, num_samples), receipts)
    root = _put_documents(store, manifest)
    if claim is not None:
        claim.check()
    store.put(ROOT, root)
    clean(store, claim)
    return manifest


def finish_extension(store: Store, extension: Extension, receipts: Receipts, provenance: Mapping[str, Any]) -> Manifest:
    """Write the small fields' shards and the tables; return the new manifest, which is not published yet.

    Holds the new rows of the resident fields (256 MB at most) and whole tables. Raises as `finish`, and `FormatError`
    for more than a reader would open.
    """
    base = extension.base
    manifest = _assemble(store, extension, receipts)
    wide = base.order.window > 4 * base.order.block  # a small dataset, whose windows are whole lanes
    decoded = sum(layout.nbytes for layout in manifest.fields.values()) if wide else None
    order = order_pin(extension.num_samples, base.order.block, decoded)
    manifest = replace(manifest, order=order, provenance=provenance)
    return manifest_from_json(manifest.to_json(), store.url)  # what readers would refuse is never published


def _assemble(store: Store, extension: Extension, receipts: Receipts) -> Manifest:
    """Write the shards of the small fields, whose rows are in parts, and all tables; return the new manifest."""
    counts = {shard: stop - start for shard in extension.shards for start, stop in [extension.samples(shard)]}
    if {shard: receipt.num_samples for shard, receipt in receipts.items()} != counts:
        problem = f"{store.url} has the shards {sorted(receipts)[:20]} of {extension.shards}, or shards that are short"
        raise errors.IncompleteError(problem, "write the missing shards first")
    base, generation = extension.base, extension.base.generation + 1
    bulk = {name for receipt in receipts.values() for name in receipt.fields}
    written = {name: {shard: receipt.fields[name] for shard, receipt in receipts.items()} for name in bulk}
    written |= _gather(store, extension, receipts)
    tables: dict[str, str] = {}
    for name, layout in base.fields.items():
        entries = np.zeros((layout.num_shards(extension.num_samples), layout.chunks_per_shard, 2), np.uint32)
        before = chunk_table.ChunkTable(store, base, name).read()
        entries[: len(before)] = before
        for shard, one in written[name].items():
            entries[shard] = one.entries
        rows = chunk_table.rows_per_page(layout, extension.num_samples)
        pages = enumerate(chunk_table.encode_pages(entries, rows))
        objects = [(chunk_table.page_path(name, number, generation), page) for number, page in pages]
        run_all(lambda one: store.put(*one), objects, FINISH_THREADS)
        tables[name] = chunk_table.table_digest(entries)
    layouts = {name: _grown(extension, name, written[name]) for name in base.fields}
    return replace(base, num_samples=extension.num_samples, fields=layouts, tables=tables, generation=generation)


def _gather(store: Store, extension: Extension, receipts: Receipts) -> dict[str, dict[int, FieldReceipt]]:
    """Turn the parts into shards of the small fields; return their rows of the tables by field and shard.

    Small fields are those that no receipt has.
    """
    before, bulk = extension.base.num_samples, {name for receipt in receipts.values() for name in receipt.fields}
    layouts = {name: layout for name, layout in sorted(extension.base.fields.items()) if name not in bulk}
    out: dict[str, dict[int, FieldReceipt]] = {name: {} for name in layouts}
    small = {name: layout.field for name, layout in layouts.items() if layout.resident}
    resident = {name: np.empty((extension.added, *kind.shape), kind.stored_dtype) for name, kind in small.items()}

    def write(name: str, shard: int, rows: NDArray[Any]) -> None:
        encoded = _encode(store, layouts[name], rows, extension.tail(name, shard))
        info = store.put(layouts[name].shard_key(name, shard), encoded.parts)
        out[name][shard] = FieldReceipt(rows.nbytes, info.size, encoded.entries)

    def take(receipt: Receipt) -> None:
        data = _read_part(store, _part_path(receipt.shard, extension.folder), receipt, layouts.values())
        at, (start, stop) = 0, extension.samples(receipt.shard)
        for name, layout in layouts.items():
            count = (stop - start) * layout.field.item_bytes // layout.field.stored_dtype.itemsize
            rows = np.frombuffer(data, layout.field.stored_dtype, count, at).reshape(-1, *layout.field.shape)
            at += rows.nbytes
            if name in resident:
                resident[name][start:stop] = rows
            else:  # too large to be resident after all
                write(name, receipt.shard, rows)

    def write_resident(task: tuple[str, int]) -> None:
        name, shard = task
        size = layouts[name].shard
        write(name, shard, resident[name][max(0, shard * size - before) : (shard + 1) * size - before])

    if layouts:
        run_all(take, receipts.values(), FINISH_THREADS)
    shards = {
        name: range(before // layouts[name].shard, layouts[name].num_shards(extension.num_samples)) for name in resident
    }
    run_all(write_resident, [(name, shard) for name, some in shards.items() for shard in some], FINISH_THREADS)
    return out


def _read_part(store: Store, path: str, receipt: Receipt, layouts: Iterable[FieldLayout]) -> bytes:
    """Return the rows of a shard's small fields, whose size the layouts give: no more than that is read.

    Raises `MissingObjectError` or `FormatError` where the object is not what the receipt says.
    """
    remedy = "run the same command again"
    size = receipt.num_samples * sum(layout.field.item_bytes for layout in layouts)
    try:
        data = store.get_range(path, 0, size + 1)
    except errors.NotFoundError as error:
        raise errors.MissingObjectError(f"{store.url}/{path} is missing", remedy) from error
    written = receipt.objects.get(path)
    if written is None or not size == len(data) == written.size or crc32c.crc32c(data) != written.crc32c:
        raise errors.FormatError(f"{store.url}/{path} is not what was written", remedy)
    return data


def _grown(extension: Extension, name: str, written: Mapping[int, FieldReceipt]) -> FieldLayout:
    """Return the layout of a field with its new sizes and skips."""
    layout, tail = extension.base.fields[name], extension.tails.get(name)
    nbytes = layout.nbytes + sum(one.nbytes for one in written.values())
    stored = layout.stored + sum(one.stored for one in written.values())
    if tail is None:
        return replace(layout, nbytes=nbytes, stored=stored)
    skips = tuple(skip for skip in layout.skips if skip[0] != tail.shard)
    skips += tuple((tail.shard, chunk, size) for chunk, size in tail.next_skips.items())
    return replace(layout, nbytes=nbytes, stored=stored - tail.size, skips=skips)


def _put_documents(store: Store, manifest: Manifest) -> bytes:
    """Write all documents of a dataset but the root, and return that."""
    documents = dataset_documents(manifest)
    root = documents.pop("")
    run_all(lambda path: store.put(f"{path}/{ROOT}", to_bytes(documents[path])), documents, FINISH_THREADS)
    return to_bytes(root)


def publish(store: Store, base: str, manifest: Manifest) -> None:
    """Write the documents of the new version, and last its root in place of that with the digest `base`.

    Safe to repeat. Raises `DestinationError` where another version was published meanwhile.
    """
    before = get_document(store, ROOT)
    there = _ours(store, before)[1].get("digest")
    if there not in (base, manifest.digest):
        raise _lost(store, there, base)
    root = _put_documents(store, manifest)
    try:
        store.replace(ROOT, root, before)
    except errors.ObjectExistsError:
        raise _lost(store, _ours(store, get_document(store, ROOT))[1].get("digest"), base) from None


def write_split_root(store: Store, manifests: Mapping[str, Manifest], claim: Claim | None = None) -> None:
    """Publish the finished datasets of the child groups as splits; then remove the job file.

    Raises `DestinationError` where the `claim` is lost.
    """
    if claim is not None:
        claim.check()
    store.put(ROOT, to_bytes(split_documents(manifests)))
    clean(store, claim)


def publish_split(root: Store, split: str, base: str, manifest: Manifest) -> None:
    """Let the root of splits list the new version of a split, in place of that with the digest `base`.

    Safe to repeat, and safe beside appends to other splits. Raises `DestinationError` as `publish`.
    """
    fresh = split_documents({split: manifest})
    for _ in range(ROUNDS):
        before = get_document(root, ROOT)
        document, ours = _ours(root, before)
        there = ours.get("splits", {}).get(split, {}).get("digest")
        if there not in (base, manifest.digest):
            raise _lost(root, there, base)
        nodes = document["consolidated_metadata"]["metadata"]
        others = {path: node for path, node in nodes.items() if path.partition("/")[0] != split}
        nodes = others | fresh["consolidated_metadata"]["metadata"]
        document["consolidated_metadata"]["metadata"] = dict(sorted(nodes.items()))
        ours["splits"] |= fresh["attributes"][FORMAT]["splits"]
        try:
            root.replace(ROOT, to_bytes(document), before)
        except errors.ObjectExistsError:
            continue
        return
    raise errors.DestinationError(f"the root of {root.url} keeps changing", "run the same append again")


def clean_append(store: Store) -> None:
    """Remove what only an append under way needs. Safe to repeat: the claim goes last."""
    store.delete([info.path for info in store.list(APPEND)])
    store.delete([CLAIM])


def undo_extension(store: Store, base: Manifest, split: bool) -> None:
    """Put everything back as it was before an append that was not published, to the byte; `clean_append` comes next.

    `base` is the version that is to stay; the root document of a `split` may have been replaced already. Only while no
    append is running.
    """
    tails = plan_extension(store, base, 0).tails
    for name, layout in base.fields.items():
        if tail := tails.get(name):
            path = layout.shard_key(name, tail.shard)
            info = store.head(path)
            if info is None or info.size != tail.size:  # it only ever grows
                store.put(path, [read_tail(store, tail)[0], codecs.encode_index(tail.entries, tail.skips)])
        keep = {layout.shard_key(name, shard) for shard in range(layout.num_shards(base.num_samples))}
        store.delete([info.path for info in store.list(f"{name}/c") if info.path not in keep])
    documents = dataset_documents(base)
    for name in base.fields:
        store.put(f"{name}/{ROOT}", to_bytes(documents[name]))
    if split:
        store.put(ROOT, to_bytes(documents[""]))
    store.delete([info.path for info in store.list(chunk_table.tables_path(base.generation + 1))])


def _ours(store: Store, root: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a root document and our attribute in it. Raises `FormatError`."""
    document = parse_object(root, f"{store.url}/{ROOT}")
    return document, manifest_json(document) or {}


def _lost(store: Store, there: Any, base: str) -> errors.DestinationError:
    problem = f"{store.url} was changed by another run: it has the digest {there}, the append was made for {base}"
    return errors.DestinationError(problem, "run the append again")
