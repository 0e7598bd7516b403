"""Copies a dataset to another store: all of its splits and versions, object by object, the root document last.

The objects follow from the manifests that are read at the beginning, so a version that is published meanwhile does not
change the copy: of a shard, the bytes before the end of the last chunk are read, and the index is made from the chunk
table. A job file at the destination marks an unfinished copy, and receipts list its shards, so that the same call
resumes it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import crc32c
import numpy as np

from streamloader.conversion.api import default_options
from streamloader.conversion.job import Listener, Progress, counter
from streamloader.errors import (
    AccessError,
    CorruptError,
    DestinationError,
    FormatError,
    IncompleteError,
    MissingObjectError,
    NotADatasetError,
    NotFoundError,
    SourceChangedError,
    UsageError,
)
from streamloader.format import codecs, opening, publish, tables
from streamloader.format.codecs import CRC_BYTES
from streamloader.format.deleted import read_remaining
from streamloader.format.manifest import MAX_CHUNK_BYTES, Manifest, deleted_path, manifest_path, parse_json
from streamloader.format.metadata import dataset_documents, to_bytes
from streamloader.format.opening import COPY, JOB, RECEIPTS, ROOT, STATISTICS, Opened
from streamloader.maintenance.verify import difference
from streamloader.options import MIB
from streamloader.storage import ObjectInfo, Store, open_store
from streamloader.storage.buffers import Allocate, Buffer, empty_buffer
from streamloader.storage.objects import join_path
from streamloader.storage.process import Quota, run_all
from streamloader.storage.store import reads
from streamloader.zarr.metadata import ARRAYS, read_group

THREADS = 16
MEMORY = 256 * MIB  # of the shards that are copied at the same time, unless one is larger
PIECE_BYTES = 16 * MIB  # of a shard that one request reads
ROUNDS = 3  # of copying again what others delete or overwrite at the destination
CLAIM_SECONDS = 5.0  # between two checks that no other run copies to the destination
VERSIONS = 256  # earlier ones that are looked for at once; if none is there, there are no others
SMALL_BYTES = 4 * MIB  # of one request; most objects but shards have less
RECEIPT_SHARDS = 64  # of one receipt
RECEIPT_SECONDS = 5.0  # after which one is written for fewer
_DAMAGED = "restore the object, or convert the dataset again"
_ELSEWHERE = "choose another destination, or remove what is there"


@dataclass(frozen=True)
class CopyReport:
    """The result of a copy to `url`: the `samples` and the `digests` by split ("" for a dataset without splits).

    `objects` and `bytes` are the number and the size of the objects that this run wrote, without those that an earlier
    run had written, `kept_objects` and `kept_bytes`.
    """

    url: str
    samples: Mapping[str, int]
    digests: Mapping[str, str]
    objects: int = 0
    bytes: int = 0
    kept_objects: int = 0
    kept_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        counts = {"num_samples": sum(self.samples.values()), "samples": dict(self.samples)}
        return {**vars(self), **counts, "digests": dict(self.digests)}


def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    progress: Listener | None = None,
) -> CopyReport:
    """Copy the dataset at `src`, with all splits and versions, to the empty folder or URL `dst`.

    The checksum of each chunk is compared with the chunk table, and other objects are read until two reads agree;
    damage in transfer is read again, and damaged sources are errors. The copy has the same digest, and cannot be opened
    before it is complete. Repeat the call to resume an interrupted copy. If `dst` has the dataset already, nothing is
    copied. A version that is published meanwhile is not copied. `target_options` are the storage options of `dst`, by
    default `storage_options` if both URLs have the same protocol. `progress` counts bytes of shards.

    Raises the errors of `open` for `src`, `FormatError` if it is damaged, `SourceChangedError` if deleted samples were
    erased meanwhile, `DestinationError` if `dst` has something else or another run copies to it, and `StorageError`.
    """
    source = open_store(src, storage_options)
    target = open_store(dst, default_options(target_options, dst, storage_options, src))
    if _is_inside(target, source):
        raise DestinationError(f"{target.url} is inside the dataset {source.url}", "choose another destination")
    root, datasets = _read(source, target)
    digests = {each.split: each.manifest.digest for each in datasets}
    report = CopyReport(target.url, {each.split: each.manifest.num_remaining for each in datasets}, digests)
    if _is_there(target, digests):
        return report
    claim = _claim(target, source.url, datasets)
    try:
        count = counter(Progress("copy", total=sum(each.stored for each in datasets)), progress)
        return _Copy(source, target, claim, datasets, root, _Receipts(target), count).run(report)
    except FormatError as error:
        if opening.get_document(source, ROOT) == root:
            raise
        problem = f"{source.url} was changed while it was copied: {error.problem}"
        raise SourceChangedError(problem, "run the same command again") from error
    finally:
        claim.close()


def _is_inside(target: Store, source: Store) -> bool:
    """Return whether a store is in a folder of another, which may have several names: links, or other cases."""
    if target.location.protocol == source.location.protocol == "file":
        folder, above = Path(source.location.path), Path(target.location.path).resolve().parents
        return folder.exists() and any(each.exists() and each.samefile(folder) for each in above)
    return target.url != source.url and f"{target.url}/".startswith(f"{source.url}/")


_Range = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class _Shard:
    """A shard object: the `ranges` of its chunks with their checksums, the end of the last one, and its index."""

    path: str
    ranges: Sequence[_Range]
    stop: int
    index: bytes

    @property
    def size(self) -> int:
        """The size of the object in bytes."""
        return self.stop + len(self.index)

    @property
    def mark(self) -> int:
        """A checksum of the checksums."""
        return crc32c.crc32c(self.index, crc32c.crc32c(np.array(self.ranges, "<i8").tobytes()))

    def read(self, store: Store, stop: int) -> memoryview:
        """Return the bytes of the object before `stop`, whose chunks are intact.

        Raises `MissingObjectError` and `CorruptError`.
        """
        where = f"{store.url}/{self.path}"
        try:
            size = stop if stop <= PIECE_BYTES else self._size(store)  # a damaged table may state any
            data = empty_buffer(min(stop, size))
            for start in range(0, len(data), PIECE_BYTES):
                piece = store.read(self.path, start, min(start + PIECE_BYTES, stop), _part(data, start))
                if piece.obj is not data.obj:  # of a client that allocates by itself
                    data[start : start + len(piece)] = piece
                if len(piece) < min(PIECE_BYTES, stop - start):
                    size = start + len(piece)
                    break
        except NotFoundError as error:
            problem = f"{where} is missing, but the manifest lists it"
            raise MissingObjectError(problem, _DAMAGED) from error
        if size < stop:
            raise CorruptError(f"{where} has {size} bytes, its chunks and index have {self.size}", _DAMAGED)
        for first, end, crc in self.ranges:
            computed, stored = crc32c.crc32c(data[first : end - CRC_BYTES]), data[end - CRC_BYTES : end]
            if not computed == int.from_bytes(stored, "little") == crc:
                problem = f"the chunk at byte {first} of {where} is damaged: its crc32c is {computed:08x}"
                raise CorruptError(f"{problem}, the chunk table has {crc:08x}", _DAMAGED)
        return data

    def _size(self, store: Store) -> int:
        info = store.head(self.path)
        if info is None:
            raise NotFoundError(f"{store.url}/{self.path} does not exist")
        return info.size

    def is_at(self, store: Store) -> bool:
        """Return whether a store has the object, by reading it."""
        try:
            return self.read(store, self.size)[self.stop :] == self.index
        except FormatError:
            return False


def _part(data: memoryview, start: int) -> Allocate:
    """Return a function that returns the part of `data` of a size from `start` on."""
    return lambda size: data[start : start + size]


@dataclass(frozen=True, eq=False)
class _Dataset:
    """A dataset or the split `split` of one: its stores, and the manifests that are kept, the newest first."""

    split: str
    store: Store
    target: Store
    versions: tuple[Manifest, ...]
    chunk_tables: dict[tuple[int, str], tables.ChunkTable] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the last version."""
        return self.versions[0]

    @property
    def stored(self) -> int:
        """The size of all shards in bytes."""
        return sum(layout.stored for layout in self.manifest.fields.values())

    def documents(self) -> dict[str, dict[str, Any]]:
        """Return the documents of all versions by path; those of fields are of the last version."""
        nodes: dict[str, dict[str, Any]] = {}
        for manifest in self.versions:
            nodes = {**dataset_documents(manifest), **nodes}
        return {join_path(node, ROOT): document for node, document in nodes.items()}

    def others(self) -> Iterator[tuple[str, bool]]:
        """Yield the paths of the other objects but shards, and whether each must exist."""
        last, had = self.manifest, set[str]()
        for manifest in self.versions:
            if manifest is not last:
                yield manifest_path(manifest.generation), True
            for name, layout in manifest.fields.items():
                shards = layout.num_shards(manifest.num_samples)
                pages = -(-shards // tables.rows_per_page(layout, manifest.num_samples))
                yield from ((tables.page_path(name, page, manifest.generation), True) for page in range(pages))
                if name in manifest.lengths and name not in had:
                    had.add(name)
                    yield from ((tables.lengths_path(name, shard), manifest is last) for shard in range(shards))
        lists = {manifest.deleted.generation for manifest in self.versions if manifest.deleted}
        yield from ((deleted_path(generation), True) for generation in sorted(lists))
        yield from ((path, False) for path in self._arrays())

    def shard(self, name: str, number: int) -> _Shard:
        """Return what a shard of a field must have. Raises as `ChunkTable.shard`."""
        layout, manifest = self.manifest.fields[name], self.manifest
        path, ranges = layout.shard_key(name, number), self._ranges(manifest, name, number)
        skips = {chunk: size for shard, chunk, size in layout.skips if shard == number}
        chunks = {each[:2] for each in ranges}
        stale: list[_Range] = []
        for version in self.versions[1:] if skips else ():  # the bytes that only earlier versions read
            if name in version.fields and number < version.fields[name].num_shards(version.num_samples):
                stale += [each for each in self._ranges(version, name, number) if each[:2] not in chunks]
        entries = np.zeros((layout.chunks_per_shard, 2), np.uint32)
        entries[: len(ranges)] = [(stop - start, crc) for start, stop, crc in ranges]
        return _Shard(path, [*ranges, *stale], ranges[-1][1], codecs.encode_index(entries, skips))

    def _ranges(self, manifest: Manifest, name: str, number: int) -> list[_Range]:
        """Return start, stop and checksum of each chunk of a shard, as a version has them."""
        layout, key = manifest.fields[name], (manifest.generation, name)
        table = self.chunk_tables.setdefault(key, tables.ChunkTable(self.store, manifest, name))
        used = -(-min(layout.shard, manifest.num_samples - number * layout.shard) // layout.chunk)
        columns = (column[:used].tolist() for column in table.shard(number))
        return list(zip(*columns, strict=True))

    def _arrays(self) -> Iterator[str]:
        """Yield the paths of the objects of the arrays beside the fields."""
        names = self.manifest.provenance.get("beside")
        if not isinstance(names, list):
            return
        yield f"{ARRAYS}/{ROOT}"
        for array in read_group(self.store.child(ARRAYS), names).arrays.values():
            yield join_path(ARRAYS, join_path(array.path, ROOT))
            yield join_path(ARRAYS, array.object_key((0,) * len(array.shape)))  # each is one chunk


def _read(source: Store, target: Store) -> tuple[bytes, tuple[_Dataset, ...]]:
    """Return the bytes of the root document, and its datasets, all of the same state of the source."""
    opening.read_root(source)  # its error says what there is instead of a dataset
    root = _settled(source, ROOT, partial(opening.get_document, source))
    document = opening.parse_object(root, f"{source.url}/{ROOT}")

    def dataset(split: str) -> _Dataset:
        opened = opening.open_document(source, document, split or None)
        return _Dataset(split, opened.store, target.child(split), (opened.manifest, *_earlier(opened)))

    return root, tuple(map(dataset, opening.split_names(document) or ("",)))


def _earlier(opened: Opened) -> list[Manifest]:
    """Return the manifests of earlier versions that were kept, the newest first.

    Raises `FormatError` if one has more samples or other shards than the last, which bounds what is copied.
    """

    def read(number: int) -> Manifest | None:
        with suppress(UsageError):
            return opening.read_version(opened, number)
        return None

    last, found = opened.manifest, list[Manifest]()
    for stop in range(last.generation, 1, -VERSIONS):  # who erases samples removes all earlier ones
        batch = [each for each in run_all(read, range(stop - 1, max(0, stop - 1 - VERSIONS), -1), THREADS) if each]
        found += batch
        if not batch:
            break
    for each in found:
        shards = {name: (layout.chunk, layout.shard) for name, layout in each.fields.items()}
        same = {name: (last.fields[name].chunk, last.fields[name].shard) for name in shards if name in last.fields}
        if each.num_samples and (each.num_samples > last.num_samples or shards != same):
            path = manifest_path(each.generation)
            raise FormatError(f"{opened.store.url}/{path} is not of an earlier version of the dataset", "delete it")
    return found


def _settled(store: Store, path: str, read: Callable[[str], bytes]) -> bytes:
    """Return the content that two reads of an object have. Raises `CorruptError` if no two agree."""
    found: list[bytes] = []
    for data in reads(lambda: read(path)):
        if data in found:
            return data
        found.append(data)
    problem = f"{store.url}/{path} differs whenever it is read"
    raise CorruptError(problem, "check the server, and any proxy or cache in front of it")


def _is_there(target: Store, digests: Mapping[str, str]) -> bool:
    """Return whether the destination has a dataset with these digests, and end a copy that was killed after its end.

    Raises `DestinationError` if it has another one.
    """
    try:
        document = opening.read_root(target)
        if opening.manifest_json(document) is None:
            raise DestinationError(f"{target.url} holds Zarr data that streamloader did not write", _ELSEWHERE)
        names = opening.split_names(document) or ("",)
        found = {name: opening.open_document(target, document, name or None).manifest.digest for name in names}
    except (NotADatasetError, IncompleteError):
        return False
    except FormatError as error:
        raise DestinationError(error.problem, _ELSEWHERE) from error
    if found != digests:
        problem = f"{target.url} holds another dataset, or another version: its digest is {_shown(found)}"
        raise DestinationError(f"{problem}, that of the source {_shown(digests)}", _ELSEWHERE)
    job = opening.read_job(target)
    if job is not None and job.get("by") == COPY:
        publish.check_not_running(target, job)
        _clean(target)
    return True


def _clean(target: Store, claim: publish.Claim | None = None) -> None:
    """Remove what only unfinished copies have: temporary objects, the parts of files and uploads of killed ones."""
    with suppress(AccessError):  # credentials may lack permission to list uploads
        target.remove_leftovers()
    publish.clean(target, claim)


def _shown(digests: Mapping[str, str]) -> str:
    return ", ".join(f"{split} {digest[:12]}".strip() for split, digest in digests.items())


def _claim(target: Store, url: str, datasets: Sequence[_Dataset]) -> publish.Claim:
    """Write the job file of a copy, or take over that of an interrupted copy of the same dataset.

    Raises `DestinationError` if the destination has anything else, or another run copies to it.
    """
    splits = [each.split for each in datasets if each.split]
    names = {name for each in datasets for name in each.manifest.fields}
    digests = {each.split: each.manifest.digest for each in datasets}
    job = {**publish.job_document(COPY, names, splits), "source": url, "digests": digests}
    before = opening.read_job(target)
    if before is None:
        existing = next(iter(target.list()), None)
        if existing is not None:
            raise DestinationError(f"{target.url} is not empty: it has {existing.path}", _ELSEWHERE)
        return publish.begin(target, job)
    known = {each.split: {manifest.digest for manifest in each.versions} for each in datasets}
    begun = before.get("digests")
    begun = begun if isinstance(begun, dict) and begun.keys() == known.keys() else {}
    same = before.get("source") == url or all(begun.get(split) in digests for split, digests in known.items())
    if before.get("by") != COPY or not same:
        problem = f"{target.url} holds another unfinished dataset"
        raise DestinationError(problem, "finish it, or remove it with streamloader rm-incomplete")
    return publish.take_over(target, job)


Task = Callable[[ObjectInfo | None], None]  # copies an object, unless that which is there is right


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy: `run` writes all objects, checks the tables, and writes the root documents.

    `there` are the objects at the destination that are right, of which an earlier run wrote those in `kept`; `absent`
    are optional ones that the source lacks. Paths are below the destination.
    """

    source: Store
    target: Store
    claim: publish.Claim
    datasets: tuple[_Dataset, ...]
    root: bytes
    receipts: _Receipts
    count: Callable[..., int]
    quota: Quota = field(default_factory=lambda: Quota(MEMORY))
    there: dict[str, ObjectInfo] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)

    def run(self, report: CopyReport) -> CopyReport:
        """Copy, and return the report with the objects that were written."""
        self.count(0)
        for dataset in self.datasets:
            _check_tables(dataset.store, dataset.manifest)
        try:
            self._write(dict(self._tasks()))
        finally:
            self.receipts.flush()
        for dataset in self.datasets:
            _check_tables(dataset.target, dataset.manifest)
        self._publish(report.digests)
        sizes = {path: info.size for path, info in self.there.items()}
        kept = [sizes.pop(path) for path in self.kept]
        report = replace(report, objects=len(sizes), bytes=sum(sizes.values()))
        return replace(report, kept_objects=len(kept), kept_bytes=sum(kept))

    def _tasks(self) -> Iterator[tuple[str, Task]]:
        """Yield the path of each object but the root documents, and the function that copies it."""
        yield STATISTICS, self._object_task(STATISTICS, partial(self._read_object, self.source, STATISTICS, False))
        for dataset in self.datasets:
            for path, document in dataset.documents().items():
                if path != ROOT:
                    below = join_path(dataset.split, path)
                    yield below, self._object_task(below, partial(_read_document, dataset.store, path, document))
            for path, required in dataset.others():
                below = join_path(dataset.split, path)
                yield below, self._object_task(below, partial(self._read_object, dataset.store, path, required))
            for name, layout in dataset.manifest.fields.items():
                for number in range(layout.num_shards(dataset.manifest.num_samples)):
                    below = join_path(dataset.split, layout.shard_key(name, number))
                    yield below, partial(self._copy_shard, below, dataset, name, number)

    def _object_task(self, path: str, read: Callable[[], bytes | None]) -> Task:
        return partial(self._copy_object, path, read)

    def _write(self, tasks: Mapping[str, Task]) -> None:
        """Copy objects until all are there as they should be."""
        for _ in range(ROUNDS + 1):
            listed = {info.path: info for info in self.target.list()}
            left = [path for path in tasks if path not in self.absent and not self._is_right(listed.get(path), path)]
            if not left:
                if self.kept:  # an earlier run may have copied a version that the source has no more
                    roots = {ROOT, *(join_path(each.split, ROOT) for each in self.datasets)}
                    temporary = {*publish.temporary(self.target), JOB}
                    self.target.delete(publish.erasable(self.target) - tasks.keys() - roots - temporary)
                return
            run_all(lambda path: tasks[path](listed.get(path)), left, THREADS)  # noqa: B023
        problem = f"objects at {self.target.url} change while they are written"
        raise DestinationError(problem, "stop other writers, and run the same command again")

    def _is_right(self, info: ObjectInfo | None, path: str) -> bool:
        written = self.there.get(path)
        if info is None or written is None:
            return False
        return info.size == written.size and len({info.etag, written.etag, ""}) <= 2

    def _read_object(self, store: Store, path: str, required: bool) -> bytes | None:
        """Return the content of an object, None if it does not exist and is not required."""
        try:
            return _settled(store, path, partial(self._get, store))
        except NotFoundError as error:
            if not required:
                return None
            raise MissingObjectError(f"{store.url}/{path} is missing", _DAMAGED) from error

    def _get(self, store: Store, path: str) -> bytes:
        data = store.get_range(path, 0, SMALL_BYTES)
        if len(data) < SMALL_BYTES:
            return data
        with self.quota.reserved(MEMORY):  # one at a time
            data = store.get_range(path, 0, MAX_CHUNK_BYTES + 1)
        if len(data) > MAX_CHUNK_BYTES:
            raise CorruptError(
                f"{store.url}/{path} has over {MAX_CHUNK_BYTES} bytes, the limit of the format", _DAMAGED
            )
        return data

    def _copy_object(self, path: str, read: Callable[[], bytes | None], found: ObjectInfo | None) -> None:
        data = read()
        if data is None:
            self.absent.add(path)
        elif found is not None and found.size == len(data) and self.target.get(path) == data:
            self._keep(found)
        else:
            self._put(path, [data])

    def _copy_shard(self, path: str, dataset: _Dataset, name: str, number: int, found: ObjectInfo | None) -> None:
        shard = dataset.shard(name, number)
        with self.quota.reserved(shard.size):
            if found is not None and found.size == shard.size:
                known = found.etag and self.receipts.found.get(path) == (shard.size, found.etag, shard.mark)
                if known or shard.is_at(dataset.target):
                    if path not in self.there:
                        self.count(shard.size)
                    self._keep(found)
                    return
            data = opening.reread(lambda: shard.read(dataset.store, shard.stop))
            if path not in self.there:
                self.count(shard.size, shard.size)
            self.receipts.add(path, self._put(path, [data, shard.index]), shard.mark)

    def _keep(self, info: ObjectInfo) -> None:
        if info.path not in self.there:
            self.kept.add(info.path)
        self.there[info.path] = info

    def _put(self, path: str, body: Sequence[Buffer]) -> ObjectInfo:
        self.claim.check(CLAIM_SECONDS)
        self.there[path] = info = self.target.put(path, body)
        self.kept.discard(path)
        return info

    def _publish(self, digests: Mapping[str, str]) -> None:
        """Write the root documents, that of the dataset last, and remove the temporary objects."""
        for dataset in self.datasets:
            if dataset.split:
                document = dataset_documents(dataset.manifest)[""]
                self._put(f"{dataset.split}/{ROOT}", [_read_document(dataset.store, ROOT, document)])
        self.claim.check()
        self._put(ROOT, [self.root])
        _clean(self.target, self.claim)
        for split, digest in digests.items():
            found = opening.open_root(self.target, split or None).manifest.digest
            if found != digest:
                problem = f"{self.target.url} has the digest {found} after the copy, the source {digest}"
                raise DestinationError(problem, "another run has written there: verify it")


def _check_tables(store: Store, manifest: Manifest) -> None:
    """Compare the chunk tables, the tables of lengths and the list of deleted samples with a manifest.

    Raises `FormatError`.
    """
    for name in manifest.fields:
        tables.ChunkTable(store, manifest, name).read()
    for name in manifest.lengths:
        tables.LengthTable(store, manifest, name).page_digests()
    read_remaining(store, manifest)


def _read_document(store: Store, path: str, document: Mapping[str, Any]) -> bytes:
    """Return a document as the source has it, or as the manifest says if it has another or none.

    It has another one of a field if a version was published meanwhile.
    """
    with suppress(NotFoundError, ValueError, RecursionError, FormatError):
        data = _settled(store, path, partial(opening.get_document, store))
        if not difference(document, parse_json(data)):
            return data
    return to_bytes(dict(document))


class _Receipts:
    """The shards that are at the destination, by path: size, etag and mark. Those of earlier runs are in `found`."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._new: dict[str, tuple[int, str, int]] = {}
        self._flushed = time.monotonic()
        paths = [info.path for info in store.list(RECEIPTS)]
        self.found: dict[str, tuple[int, str, int]] = {}
        for receipt in run_all(self._read, paths, THREADS):
            self.found |= receipt

    def _read(self, path: str) -> dict[str, tuple[int, str, int]]:
        """Return the shards of a receipt; none if it is damaged."""
        try:
            objects = json.loads(opening.get_document(self._store, path))["objects"]
            return {str(name): (int(size), str(etag), int(mark)) for name, (size, etag, mark) in objects.items()}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, NotFoundError, FormatError):
            return {}

    def add(self, path: str, info: ObjectInfo, mark: int) -> None:
        """Add a shard that was written; write a receipt now and then."""
        with self._lock:
            self._new[path] = (info.size, info.etag, mark)
            late = time.monotonic() - self._flushed >= RECEIPT_SECONDS
            full = len(self._new) >= RECEIPT_SHARDS
        if late or full:
            self.flush()

    def flush(self) -> None:
        """Write a receipt for the shards since the last one."""
        with self._lock:
            new, self._new, self._flushed = self._new, {}, time.monotonic()
        if new:
            self._store.put(f"{RECEIPTS}/{uuid.uuid4().hex}.json", json.dumps({"objects": new}).encode())
