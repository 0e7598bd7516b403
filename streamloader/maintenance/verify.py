"""Verifies a finished dataset: documents, chunk tables, and every shard, chunk and item; optionally also its source.

The chunks of a shard are located by the chunk table, or by the shard's own index if the page of the table is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from heapq import merge
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader import errors
from streamloader.conversion.api import default_options
from streamloader.conversion.job import FILES, Listener, Progress, compare_documents, counter
from streamloader.conversion.row_order import SampleRows, assign, own_rows, parse_splits
from streamloader.conversion.shard_task import QUARANTINE
from streamloader.conversion.sources.base import BadSample, RowSource
from streamloader.conversion.sources.fields import FieldSelection
from streamloader.conversion.sources.formats import open_source
from streamloader.errors import DecodeError, FieldError, FormatError, NotFoundError, UsageError
from streamloader.format import opening, tables
from streamloader.format.codecs import ABSENT, CRC_BYTES, Column, Items, index_size
from streamloader.format.deleted import Remaining, read_remaining
from streamloader.format.manifest import NAME, TABLES, Manifest, deleted_path, parse_json, tables_path
from streamloader.format.metadata import dataset_documents, split_documents
from streamloader.format.opening import ROOT, STATISTICS
from streamloader.format.publish import APPEND, BAD, CLAIM, INTERNAL, PARTS
from streamloader.format.reader import FieldReader, Placed, Run, bad_items, read_columns, read_index
from streamloader.maintenance.columns import added_fields
from streamloader.options import MIB, Decode
from streamloader.storage import Store, open_beside, open_store
from streamloader.storage.objects import cut_runs
from streamloader.storage.process import Quota, cpu_count, finished_before_exit, run_all
from streamloader.zarr.metadata import ARRAYS, read_group
from streamloader.zarr.reader import ArrayReader

if TYPE_CHECKING:
    from streamloader.images.decode import ImageDecoder

MAX_PROBLEMS = 1000  # further problems are usually of the same kind
MAX_BAD_VALUES = 100_000  # each takes about 1 KB
MAX_BAD_LINES = 1_000_000  # of a list of bad samples, about 300 MB
DECODE_BYTES = 256 * MIB  # that images take while they are decoded, unless one takes more
PIECE_BYTES = 8 * MIB  # of a shard that a thread reads and decodes at once, unless one chunk is larger
THREADS = 16  # each waits for the network, checks and decodes; together they hold about 300 MB
COMPARE_THREADS = 4  # each holds the samples of a shard twice: from the dataset and from the source
TASKS = 10_000  # shards planned at once: a hostile manifest may list more shards than fit in memory
OLD_NOTES = "_streamloader/conversion.json"  # written by conversions of earlier releases
LEFTOVERS = (opening.JOB, FILES, CLAIM, *(f"{folder}/" for folder in (PARTS, opening.RECEIPTS, BAD, APPEND)))
# these errors are raised, because there is nothing to verify; other format errors are problems of the dataset
_NOT_VERIFIABLE = (errors.NotADatasetError, errors.IncompleteError, errors.VersionError)
# compressor settings that may differ: a decoder does not need them
_FREE_SETTINGS = {"zstd": ("level", "checksum"), "blosc": ("clevel", "shuffle", "typesize", "blocksize")}
_TABLES = re.compile(rf"{re.escape(TABLES)}(\.(?P<generation>[1-9][0-9]{{0,18}}))?/")
_NUMBERED = re.compile(r"(?P<name>[a-z][a-z0-9_]*)/c/(?P<number>0|[1-9][0-9]{0,18})(/0)*")

Samples = tuple[int, int]  # [first, stop)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """One problem of a dataset; `problem` describes it in a sentence that names object, chunk and samples.

    `path` is the affected object, relative to the URL, or empty; `chunk` is the number of the inner chunk in that
    object, and `samples` are the numbers [first, stop) of the affected samples.
    """

    problem: str
    path: str = ""
    split: str = ""
    field: str = ""
    chunk: int | None = None
    samples: Samples | None = None


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    `samples` is the number of samples by split ("" for a dataset without splits); `objects` and `bytes` are the number
    and size of the shards that were read; `compared` is the number of samples compared with the source. `leftovers` of
    killed writers and `others`, objects that do not belong to the dataset, are counted but are not problems. If
    `listed` is False, the store does not list its objects and orphaned ones were not detected. If `appending`, an
    append is in progress or was interrupted, and documents and the ends of shards were not checked. Verification stops
    after 1000 `problems`; those of single values do not count, of which 100,000 are reported with `decode=True`. If
    `complete` is False, one of these limits was reached, and there may be more. `decoded` is the number of images that
    were decoded or found to be undecodable.
    """

    url: str
    samples: Mapping[str, int]
    objects: int
    bytes: int
    compared: int
    leftovers: int
    others: int
    listed: bool
    appending: bool
    problems: tuple[Problem, ...]
    decoded: int = 0
    complete: bool = True

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "num_samples": sum(self.samples.values()), "ok": self.ok}

    @property
    def bad(self) -> int:
        """The number of samples that problems name, counted once for each problem."""
        return sum(stop - first for first, stop in (p.samples for p in self.problems if p.samples))

    def write_bad(self, target: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> int:
        """Write a line of JSON for each of the `bad` samples to a file, as `exclude=` of `StreamingDataset` reads them.

        `target` is its path or URL; `storage_options` are those of the dataset, and hold for the same protocol. Returns
        the number of lines, at most 1,000,000. Lines ascend by split and sample.
        """
        folder, name = open_beside(open_store(self.url, storage_options), target)
        named = [(p.split, p.samples, number) for number, p in enumerate(self.problems) if p.samples]
        lines = merge(*(zip(repeat(split), range(*samples), repeat(number)) for split, samples, number in named))
        folder.put(name, "".join(map(self._bad_line, islice(lines, MAX_BAD_LINES))).encode())
        return min(self.bad, MAX_BAD_LINES)

    def _bad_line(self, line: tuple[str, int, int]) -> str:
        split, sample, number = line
        problem = self.problems[number]
        values = {"sample": sample, "split": split or None, "field": problem.field, "error": problem.problem}
        return json.dumps({**values, "object": problem.path}) + "\n"


def verify(
    url: str | os.PathLike[str],
    *,
    split: str | None = None,
    decode: bool = False,
    against: str | os.PathLike[str] | None = None,
    format: str | None = None,  # noqa: A002 - the name in `convert`
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    progress: Listener | None = None,
) -> VerifyReport:
    """Read the whole dataset at `url`, or one split of it, and report all problems.

    `decode`: also decode every video and encoded image, as training does by default, and report each text and ragged
    value that is invalid, not the first of each chunk.

    `against` is the source of the conversion, with which every sample is compared; `format` and `source_options` are
    those of the source, as for `convert`. `progress` counts bytes of shards in the phase "verify", and samples in the
    phase "compare".

    Raises `NotADatasetError`, `IncompleteError`, `VersionError`, `FieldError` for an unknown split, `StorageError`, and
    the errors of the source.
    """
    if against is None and (format or source_options):
        raise UsageError("format and source_options need a source", "give the source with against=")
    options = {} if against is None else default_options(source_options, against, storage_options, url)
    store, problems = open_store(url, storage_options), Problems()
    datasets, names = problems.confirmed(lambda: _open(store, split, problems))
    sizes = _list(store)
    views = [_view(name, opened, sizes, problems) for name, opened in datasets.items()]
    for view in views:
        if not view.appending:
            check_documents(view)
        check_arrays(view)
    leftovers, others = _check_paths(store, views, names, sizes or {}, problems)
    objects, size, decoded = _check_fields(views, problems, progress, Images() if decode else None)
    compared, samples = 0, {view.split: view.manifest.num_remaining for view in views}
    if against is not None:
        count = counter(Progress("compare", total=sum(samples.values())), progress)
        compared = sum(_compare(view, (against, format, options), count) for view in views)
    flags = sizes is not None, any(view.appending for view in views)
    found = *flags, problems.sorted(), decoded, problems.complete
    return VerifyReport(store.url, samples, objects, size, compared, leftovers, others, *found)


def _open(store: Store, split: str | None, problems: Problems) -> tuple[dict[str, opening.Opened], tuple[str, ...]]:
    """Return the datasets that can be opened, by split, and the names of all splits; report the others."""
    try:
        root = opening.read_root(store)
        names = opening.split_names(root)
    except _NOT_VERIFIABLE:
        raise
    except FormatError as error:
        problems.add(Problem(error.problem, ROOT))
        return {}, ()
    datasets: dict[str, opening.Opened] = {}
    damaged = False
    fatal = errors.VersionError if names else _NOT_VERIFIABLE  # a split that is no dataset means a damaged root
    for name in names if split is None and names else (split or "",):
        try:
            datasets[name] = opening.open_root(store, name or None)
        except fatal:
            raise
        except FormatError as error:
            damaged = True
            problems.add(Problem(error.problem, ROOT, name))
            with suppress(FormatError):  # the split has a manifest, too
                if NAME.match(name):
                    datasets[name] = opening.open_root(store.child(name))
    manifests = {name: opened.manifest for name, opened in datasets.items()}
    mismatch = check_split_root(root, manifests, names) if names else ""
    if mismatch and not damaged:
        problems.add(Problem(f"{store.url}/{ROOT} does not match its splits: {mismatch}", ROOT))
    return datasets, names


def _list(store: Store) -> dict[str, int] | None:
    """Return the sizes of all objects by path, or None if the store or the credentials do not allow to list them."""
    try:
        sizes = {info.path: info.size for info in store.list()}
    except (errors.AccessError, NotFoundError, errors.UnsupportedError):
        return None
    return sizes if ROOT in sizes else None


def _check_paths(
    store: Store, views: Sequence[DatasetView], names: Sequence[str], sizes: Iterable[str], problems: Problems
) -> tuple[int, int]:
    """Report orphaned objects: those in the dataset's folders that no manifest lists.

    Returns the numbers of leftovers of writers and of other objects. Splits that are not verified are skipped.
    """
    by_split = {view.split: view for view in views}
    leftovers = others = 0
    for path in sizes if views or names else ():
        first, _, below = path.partition("/")
        split, inner = (first, below) if first in names else ("", path)
        view = by_split.get(split)
        known = inner in (ROOT, OLD_NOTES, STATISTICS) or inner.startswith(QUARANTINE.removesuffix(".jsonl"))
        if known or (view.owns(inner) if view else split):
            continue
        in_dataset = inner.partition("/")[0] in {INTERNAL, *(view.manifest.fields if view else ())}
        if inner.startswith(LEFTOVERS) or (view and view.appending and in_dataset):
            leftovers += 1
        elif in_dataset:
            problems.add(Problem(f"{store.url}/{path} is orphaned: no manifest of the dataset lists it", path))
        else:
            others += 1
    return leftovers, others


def _check_fields(
    views: Sequence[DatasetView], problems: Problems, listener: Listener | None, images: Images | None
) -> tuple[int, int, int]:
    """Check tables, shards and totals of all fields, and `images` if given.

    Returns the number and the total size of the shards that were read, and the number of images.
    """
    checks = [FieldCheck(view, name, images) for view in views for name in view.manifest.fields]
    run_all(lambda field: problems.confirmed(field.check_table), checks, THREADS)
    count = counter(Progress("verify", total=sum(field.layout.stored for field in checks)), listener)
    tasks = ((field, shard) for field in checks for shard in range(field.num_shards))

    def check(task: tuple[FieldCheck, int]) -> int:
        field, shard = task
        return count(0 if problems.full else problems.confirmed(lambda: field.check_shard(shard)))

    objects = total = 0
    while not problems.full and (batch := list(islice(tasks, TASKS))):
        sizes = run_all(check, batch, THREADS)
        objects, total = objects + sum(size > 0 for size in sizes), total + sum(sizes)
    damaged = {(problem.split, problem.field) for problem in problems.sorted()}
    for field in checks:
        field.check_lengths()
        if (field.view.split, field.name) not in damaged:
            field.check_totals()
    return objects, total, sum(field.num_decoded for field in checks)


class Images:
    """Decodes the images and videos of all fields to find those that do not decode; thread-safe.

    Those that are decoded at the same time take at most `DECODE_BYTES`, unless a single one takes more.
    """

    def __init__(self) -> None:
        self._quota = Quota(DECODE_BYTES)

    def decoder(self, name: str, encoding: str) -> ImageDecoder | None:
        """Return the decoder of a field of bytes, None if its encoding is not of images or videos."""
        from streamloader.images.clips import VideoDecoder
        from streamloader.images.decode import ENCODINGS, ImageDecoder

        if encoding == "video":
            return VideoDecoder.choose(Decode(), name)
        return ImageDecoder.choose(Decode(), name) if encoding in ENCODINGS else None

    def problem(self, decoder: ImageDecoder, data: memoryview, sample: int) -> str:
        """Return why the image of a sample does not decode, empty if it does."""
        try:
            header = decoder.measure(data, sample)
            size = header.height * header.width * decoder.options.channels + decoder.scratch_bytes(data, header)
            with self._quota.reserved(size), finished_before_exit():  # OpenCV must not end with the interpreter
                decoder.check(data, sample, header)
        except DecodeError as error:
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from None
            return error.problem
        return ""


class Problems:
    """Collects up to `MAX_PROBLEMS` problems, and `MAX_BAD_VALUES` of single values; thread-safe."""

    def __init__(self) -> None:
        self._by_text: dict[str, Problem] = {}
        self._values: dict[str, Problem] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()  # has the problems `unconfirmed` while `confirmed` runs

    def confirmed(self, check: Callable[[], Result]) -> Result:
        """Return `check()`, which is repeated once if it adds a problem or raises `FormatError`.

        Most damage occurs in transfer, and a store may respond once that an object is missing.
        """
        self._thread.unconfirmed = unconfirmed = list[Problem]()
        try:
            result = check()
            if not unconfirmed:
                return result
        except FormatError:
            pass
        finally:
            del self._thread.unconfirmed
        return check()

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return len(self._by_text) + len(getattr(self._thread, "unconfirmed", ())) >= MAX_PROBLEMS

    @property
    def complete(self) -> bool:
        """Whether no limit is reached."""
        return not self.full and len(self._values) < MAX_BAD_VALUES

    def add_value(self, problem: Problem) -> None:
        """Add a problem of a value in a chunk whose checksum matches, which needs no confirmation."""
        with self._lock:
            if len(self._values) < MAX_BAD_VALUES:
                self._values.setdefault(problem.problem, problem)

    def add(self, problem: Problem) -> None:
        """Add a problem, unless one with the same text was added or the limit is reached."""
        if hasattr(self._thread, "unconfirmed"):
            if not self.full:
                self._thread.unconfirmed.append(problem)
            return
        with self._lock:
            if not self.full:
                self._by_text.setdefault(problem.problem, problem)

    def sorted(self) -> tuple[Problem, ...]:
        """Return the problems by split, field and sample, independent of the order of threads."""
        with self._lock:
            problems = [*self._by_text.values(), *self._values.values()]
        return tuple(sorted(problems, key=lambda p: (p.split, p.field, *(p.samples or (-1, -1)), p.path)))


@dataclass(frozen=True, eq=False)
class DatasetView:
    """A dataset, or the split `split` of one, to verify.

    `sizes` has the size in bytes of every object below the root, by path; None if the store does not list its objects.
    `remaining`: the samples that are not deleted, if some are. Problems have the numbers of these.
    """

    split: str
    manifest: Manifest
    store: Store
    sizes: Mapping[str, int] | None
    problems: Problems
    remaining: Remaining | None = None

    def numbers(self, stored: Samples) -> Samples:
        """Return the numbers of the samples among the stored ones [first, stop)."""
        return stored if self.remaining is None else self.remaining.within(*stored)

    @property
    def appending(self) -> bool:
        """Whether an append is in progress or was interrupted: shards and documents may be ahead of the manifest."""
        return self.size(CLAIM) is not None

    def below_root(self, path: str) -> str:
        """Return a path of the dataset relative to the root."""
        return f"{self.split}/{path}" if self.split else path

    def size(self, path: str) -> int | None:
        """Return the size of an object in bytes, or None if it is missing."""
        if self.sizes is not None:
            return self.sizes.get(self.below_root(path))
        info = self.store.head(path)
        return None if info is None else info.size

    def add(
        self,
        problem: str,
        path: str,
        field: str = "",
        *,
        chunk: int | None = None,
        samples: Samples | None = None,
        value: bool = False,
    ) -> None:
        """Report a problem of the object at `path`. `value`: see `Problems.add_value`. No `samples`: deleted ones."""
        samples = samples if samples and samples[0] < samples[1] else None
        add = self.problems.add_value if value else self.problems.add
        add(Problem(problem, self.below_root(path), self.split, field, chunk, samples))

    def owns(self, path: str) -> bool:
        """Return whether the manifest lists the object at `path`, or it belongs to the table of an earlier version."""
        manifest, chunk_tables = self.manifest, tables_path(self.manifest.generation)
        if self._owns_more(path):
            return True
        folder, _, name = path.rpartition("/")
        within = f"{tables.LENGTHS if path.startswith(tables.LENGTHS) else chunk_tables}/"
        if name == ROOT:
            groups = ("", INTERNAL, chunk_tables, tables.LENGTHS)
            return folder in groups or folder.removeprefix(within) in manifest.fields
        match = _NUMBERED.fullmatch(path.removeprefix(within))
        if match is None or match["name"] not in manifest.fields:
            return False
        field, number = match["name"], int(match["number"])
        layout = manifest.fields[field]
        shards = layout.num_shards(manifest.num_samples)
        pages = -(-shards // tables.rows_per_page(layout, manifest.num_samples))
        if path in (layout.shard_key(field, number), tables.lengths_path(field, number)):
            return number < shards  # an append or a resumed conversion may leave pages of lengths without a table
        return number < pages and path == tables.page_path(field, number, manifest.generation)

    def _owns_more(self, path: str) -> bool:
        """Return whether an object is beside the fields, of an earlier version, or a list of deleted samples."""
        manifest, earlier = self.manifest, _TABLES.match(path)
        if path.startswith(f"{ARRAYS}/") and "beside" in manifest.provenance:
            return True
        if manifest.deleted and path in map(deleted_path, range(2, manifest.deleted.generation + 1)):
            return True
        return earlier is not None and int(earlier["generation"] or 1) < manifest.generation


def _view(split: str, opened: opening.Opened, sizes: Mapping[str, int] | None, problems: Problems) -> DatasetView:
    """Return the view of a dataset or split; report a list of deleted samples that is damaged."""
    view = DatasetView(split, opened.manifest, opened.store, sizes, problems)
    try:
        return replace(view, remaining=read_remaining(view.store, view.manifest))
    except FormatError as error:
        assert view.manifest.deleted
        view.add(error.problem, deleted_path(view.manifest.deleted.generation))
        return view


def check_arrays(view: DatasetView) -> None:
    """Read the arrays that `--rechunk` stored beside the fields."""
    folder, names = view.store.child(ARRAYS), view.manifest.provenance.get("beside")
    if not isinstance(names, list):
        return
    try:
        group = read_group(folder, names)
        for name in names:
            ArrayReader(folder, group.array(name), strict=True).read_all()
    except (FormatError, FieldError) as error:
        view.add(error.problem, ARRAYS)


def check_documents(view: DatasetView) -> None:
    """Compare every Zarr document of a dataset or split with the one that the manifest determines."""
    documents = dataset_documents(view.manifest)

    def check(node: str) -> None:
        view.problems.confirmed(lambda: check_once(node))

    def check_once(node: str) -> None:
        path = f"{node}/{ROOT}" if node else ROOT
        url, name = f"{view.store.url}/{path}", node.rpartition("/")[2]
        try:
            mismatch = difference(documents[node], parse_json(opening.get_document(view.store, path)))
            problem = f"{url} does not match the manifest: {mismatch}" if mismatch else ""
        except NotFoundError:
            problem = f"{url} is missing; Zarr readers need it"
        except (FormatError, ValueError, RecursionError) as error:
            problem = f"{url} is damaged ({error})"
        if problem:
            view.add(problem, path, name if name in view.manifest.fields else "")

    run_all(check, documents, THREADS)


def check_split_root(root: Mapping[str, Any], manifests: Mapping[str, Manifest], names: Sequence[str]) -> str:
    """Return how the root document of the splits `names` differs from their `manifests`; empty if it matches.

    Splits without a manifest are not compared.
    """
    consolidated = root.get("consolidated_metadata")
    nodes = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    if isinstance(consolidated, dict) and isinstance(nodes, dict):
        unknown = {*names} - {*manifests}
        nodes = {path: node for path, node in nodes.items() if path.partition("/")[0] not in unknown}
        root = {**root, "consolidated_metadata": {**consolidated, "metadata": nodes}}
    return difference(split_documents(manifests), root)


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return a description of the first difference of two documents; empty if they are equivalent.

    Below `attributes`, additional keys are ignored, as readers of the manifest do.
    """
    documents = [json.loads(json.dumps(document), object_hook=_normalise) for document in (found, expected)]
    for path, values in compare_documents(*documents).items():
        shown, wanted = (text if len(text) <= 60 else f"{text[:60]}..." for text in map(repr, values))
        if values[1] is not None:
            return f"{path} is missing" if values[0] is None else f"{path} is {shown}, expected {wanted}"
        if "attributes" not in path.split("."):
            return f"{path} is unexpected"
    return ""


def _normalise(node: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a document without settings that may differ."""
    free, configuration = _FREE_SETTINGS.get(str(node.get("name")), ()), node.get("configuration")
    if isinstance(configuration, dict):
        node["configuration"] = {key: value for key, value in configuration.items() if key not in free}
    if node.get("data_type") == "bytes":  # another name of the same type
        node["data_type"] = "variable_length_bytes"
    return node


@dataclass(frozen=True, eq=False)
class _Shard:
    """A shard object, its samples, and the byte ranges and checksums of its chunks.

    `crcs` is None if the table is damaged and the chunks are located by the shard's own index. `lengths` has the
    lengths of the samples, if the field has a table of lengths and its page is whole.
    """

    number: int
    path: str
    samples: Samples
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    crcs: NDArray[np.uint32] | None
    lengths: NDArray[np.uint32] | None = None

    def matches(self, index: NDArray[np.uint64]) -> bool:
        """Return whether `index` has the same byte ranges."""
        expected = np.full_like(index, ABSENT)
        expected[: len(self.starts)] = np.stack([self.starts, self.stops - self.starts], axis=1)
        return np.array_equal(index, expected)


class FieldCheck:
    """Checks one field: first its table, then its shards, in any order and from any thread, and last the totals.

    With `images`, also decodes its images, and reports each of its invalid values.
    """

    def __init__(self, view: DatasetView, name: str, images: Images | None = None) -> None:
        self.view, self.name, self._images = view, name, images
        self.layout, self._num_samples = view.manifest.fields[name], view.manifest.num_samples
        self.num_shards = self.layout.num_shards(self._num_samples)
        self._rows = tables.rows_per_page(self.layout, self._num_samples)
        self._table = tables.ChunkTable(view.store, view.manifest, name)
        self._reader = FieldReader(view.store, view.manifest, name, view.remaining)
        self._damaged: set[int] = set()  # pages of the table
        # the bytes of each shard, and its images
        self._stored, self._decoded, self._pictures = dict[int, int](), dict[int, int](), dict[int, int]()
        field = self.layout.field
        self._decoder = images.decoder(name, field.encoding) if images and field.kind == "bytes" else None
        self._lengths, self._pages = tables.LengthTable(view.store, view.manifest, name), dict[int, str]()

    def check_table(self) -> None:
        """Read every page of the chunk table, and compare the SHA-256 of the table with the manifest."""
        manifest, digest = self.view.manifest, hashlib.sha256()
        self._table = tables.ChunkTable(self.view.store, manifest, self.name)  # the one before remembers damage
        self._damaged = set()
        pages = range(-(-self.num_shards // self._rows))
        for page in pages:
            if self.view.problems.full:
                return
            first, stop = page * self._rows, min((page + 1) * self._rows, self.num_shards)
            path = tables.page_path(self.name, page, manifest.generation)
            try:
                for shard in range(first, stop):
                    low, high = self._samples(shard, shard + 1)
                    digest.update(self._table.entries(shard, high - low).astype("<u4").tobytes())
            except FormatError as error:
                self._add(error.problem, path, self._samples(first, stop))
                self._damaged.add(page)
        if not self._damaged and digest.hexdigest() != manifest.tables[self.name]:
            path = tables.table_path(self.name, manifest.generation)
            problem = f"the chunk table {self._url(path)} is intact, but does not match the manifest"
            self.view.add(f"{problem}: its SHA-256 is {digest.hexdigest()}", path, self.name)
            self._damaged.update(pages)

    def check_shard(self, number: int) -> int:
        """Check one shard object, and return its size in bytes; 0 if it is missing."""
        path, samples = self.layout.shard_key(self.name, number), self._samples(number, number + 1)
        self._stored[number] = self._decoded[number] = self._pictures[number] = 0
        size = self.view.size(path)
        if size is None:
            self._add(f"{self._url(path)} is missing, but the manifest lists it", path, samples)
            return 0
        index = read_index(self.view.store, path, self.layout.chunks_per_shard)
        counted, lengths = size, None
        if self.name in self.view.manifest.lengths:
            try:
                lengths = self._lengths.shard(number)
                self._pages[number] = tables.lengths_digest(lengths)
            except FormatError as error:
                self._add(error.problem, tables.lengths_path(self.name, number), samples)
        shard = self._by_table(number, path, samples) or self._by_index(number, path, samples, size, index)
        if shard is None:
            problem = f"the index of {self._url(path)} and the chunk table are damaged: its chunks cannot be located"
            self._add(problem, path, samples)
        else:
            shard = replace(shard, lengths=lengths)
            expected = int(shard.stops.max(initial=0)) + index_size(self.layout.chunks_per_shard)
            if number == self.num_shards - 1 and self.view.appending and size > expected:
                self._check_chunks(shard, len(shard.starts))  # an append has added chunks after these
                counted = expected
            else:
                self._check(shard, size, expected, index)
        self._stored[number] = counted
        return size

    @property
    def num_decoded(self) -> int:
        """The number of images that were decoded."""
        return sum(self._pictures.values())

    def check_totals(self) -> None:
        """Compare the total size of all shards with the manifest, for a field without other problems."""
        decoded = self.layout.nbytes if self.layout.field.fixed else sum(self._decoded.values())
        totals = ("stored", self.layout.stored, sum(self._stored.values())), ("nbytes", self.layout.nbytes, decoded)
        for key, expected, actual in totals:
            if expected != actual:
                problem = f"the manifest of {self.view.store.url} has {key} {expected} of {self.name!r}"
                self.view.add(f"{problem}, its shards have {actual}", ROOT, self.name)

    def check_lengths(self) -> None:
        """Compare the table of lengths with the manifest, if `check_shard` has read every page."""
        if self.name in self.view.manifest.lengths and len(self._pages) == self.num_shards:
            try:
                self._lengths.check(digest for _, digest in sorted(self._pages.items()))
            except errors.ModifiedError as error:
                self.view.add(error.problem, f"{tables.LENGTHS}/{self.name}", self.name)

    def _url(self, path: str) -> str:
        return f"{self.view.store.url}/{path}"

    def _samples(self, first: int, stop: int) -> Samples:
        """Return the samples of the shards [first, stop)."""
        return first * self.layout.shard, min(stop * self.layout.shard, self._num_samples)

    def _used(self, samples: Samples) -> int:
        """Return the number of inner chunks that these samples of a shard fill."""
        return -(-(samples[1] - samples[0]) // self.layout.chunk)

    def _add(self, problem: str, path: str, samples: Samples, chunk: int | None = None) -> None:
        first, stop = numbers = self.view.numbers(samples)
        text = f"sample {first}" if first == stop - 1 else f"samples {first} to {stop - 1}"
        text = text if first < stop else "deleted samples"
        self.view.add(f"{problem} ({text})", path, self.name, chunk=chunk, samples=numbers)

    def _by_table(self, number: int, path: str, samples: Samples) -> _Shard | None:
        """Return a shard located by the chunk table; None if the page is damaged."""
        if number // self._rows in self._damaged:
            return None
        (starts, stops, crcs), used = self._table.shard(number), self._used(samples)
        return _Shard(number, path, samples, starts[:used], stops[:used], crcs[:used])

    def _by_index(
        self, number: int, path: str, samples: Samples, size: int, index: NDArray[np.uint64] | None
    ) -> _Shard | None:
        """Return a shard located by its own index; None if that is damaged, too."""
        used = self._used(samples)
        if index is None or np.any(index[:used] > size) or np.any(index[:used, 1] <= CRC_BYTES):
            return None
        starts, sizes = index[:used].astype(np.int64).T
        shard = _Shard(number, path, samples, starts, starts + sizes, None)
        return shard if np.all(shard.starts[1:] >= shard.stops[:-1]) and shard.matches(index) else None

    def _check(self, shard: _Shard, size: int, expected: int, index: NDArray[np.uint64] | None) -> None:
        """Check a shard object of `size` bytes; `index` is its own index, or None if that is damaged."""
        url, count = self._url(shard.path), len(shard.starts)
        replaced = index is not None and not shard.matches(index)
        if size != expected and not replaced:
            self._check_chunks(shard, self._wrong_size(shard, size, expected))
            return
        if size != expected:
            problem = f"{url} was modified after the conversion: its index is intact, but of another object"
        else:
            bad = self._check_chunks(shard, count, silent=replaced)
            if index is None:
                problem = f"the index of {url} is damaged: its checksum does not match"
            elif bad:
                problem = f"{url} was modified after the conversion: its index and {bad} of its {count} chunks differ"
            else:
                problem = f"the index of {url} is intact, but does not match its chunks"
        if index is None or replaced:
            self._add(problem, shard.path, shard.samples)

    def _wrong_size(self, shard: _Shard, size: int, expected: int) -> int:
        """Report an object that is too short or too long, and return the number of chunks that it holds."""
        complete, count = int(np.searchsorted(shard.stops, size, side="right")), len(shard.starts)
        problem = f"{self._url(shard.path)} has {size} bytes, its chunks and index have {expected}"
        if complete < count:
            samples = shard.samples[0] + complete * self.layout.chunk, shard.samples[1]
            self._add(f"{problem}: the chunks {complete} to {count - 1} are cut off", shard.path, samples, complete)
        else:
            reason = "its index is cut off" if size < expected else "something was appended"
            self._add(f"{problem}: {reason}", shard.path, shard.samples)
        return complete

    def _check_chunks(self, shard: _Shard, count: int, silent: bool = False) -> int:
        """Check the first `count` chunks, in runs of at most about `PIECE_BYTES`, both encoded and decoded.

        Reports bad chunks unless `silent`, and returns their number.
        """
        mean = self.layout.nbytes / max(1, self._num_samples)
        most, bad = max(1, int(PIECE_BYTES // max(1.0, mean * self.layout.chunk))), 0
        for low, high in cut_runs(shard.starts[:count], shard.stops[:count], 0, PIECE_BYTES):
            for first in range(low, high, most):
                bad += self._check_run(shard, first, min(first + most, high), silent)
        return bad

    def _check_run(self, shard: _Shard, low: int, high: int, silent: bool) -> int:
        """Read and decode the chunks [low, high), one by one if that fails; return the number of bad chunks."""
        crcs = np.zeros(high - low, np.uint32) if shard.crcs is None else shard.crcs[low:high]
        run = self._reader.plan_run(shard.number, low, shard.starts[low:high], shard.stops[low:high], crcs)
        try:
            self._read(run, shard)
        except errors.MissingObjectError as error:  # deleted since the store was listed
            self._add(error.problem, shard.path, shard.samples)
            return 1
        except FormatError as error:
            if high - low > 1:
                return sum(self._check_run(shard, chunk, chunk + 1, silent) for chunk in range(low, high))
            if not silent:
                samples = self.view.numbers((run.first_sample, run.first_sample + run.num_samples))
                self.view.add(error.problem, shard.path, self.name, chunk=low, samples=samples)
            return 1
        return 0

    def _read(self, run: Run, shard: _Shard) -> None:
        """Fetch and decode a run, and report invalid items. Raises `FormatError` if a chunk is damaged."""
        field, fetch = self.layout.field, self._reader.request(run)
        if shard.crcs is None:  # the only checksum is the one at the end of each chunk; 0 if the data end before it
            data, stops = fetch(), np.cumsum(run.sizes).tolist()
            crcs = [int.from_bytes(data[stop - CRC_BYTES : stop], "little") for stop in stops]
            run = run._replace(crcs=np.array(crcs, np.uint32))
        out = np.empty((run.num_samples, *field.shape), field.dtype) if field.fixed else None
        placed = self._reader.load(run, fetch, out) or []
        most = 1 if self._images is None else None  # of each chunk
        bad = [(row + item, reason) for row, items in placed for item, reason in islice(bad_items(field, items), most)]
        if out is not None and field.dtype == "bool":
            bad_rows = np.flatnonzero(out.view(np.uint8).reshape(run.num_samples, -1).max(axis=1) > 1)
            bad += [(int(row), "it is neither 0 nor 1") for row in bad_rows[:most]]
        for row, reason in bad:
            first, stop = self.view.numbers((run.first_sample + row, run.first_sample + row + 1))
            if first < stop:
                self._add_value(run, row, f"field {self.name!r} of sample {first}", f", is not {field}: {reason}")
        for row, items in placed if self._decoder else ():
            self._check_images(run, row, items)
        if shard.lengths is not None:
            self._compare_lengths(run, placed, shard.lengths[run.first_sample - shard.samples[0] :])
        self._decoded[run.shard] += sum(int((items.stops - items.starts).sum()) for _, items in placed)

    def _check_images(self, run: Run, row: int, items: Items) -> None:
        """Report the images of a chunk that do not decode. `row`: of the first of them in the run."""
        assert self._images
        assert self._decoder
        self._pictures[run.shard] += len(items)
        for number in range(len(items)):
            sample, stop = self.view.numbers((run.first_sample + row + number, run.first_sample + row + number + 1))
            if sample < stop and (problem := self._images.problem(self._decoder, items[number], sample)):
                self._add_value(run, row + number, problem)

    def _add_value(self, run: Run, row: int, problem: str, reason: str = "") -> None:
        """Report a value of a run, in a chunk that is not damaged."""
        sample, chunk = run.first_sample + row, run.chunk + row // self.layout.chunk
        samples = self.view.numbers((sample, sample + 1))
        text, all_values = f"{problem}, in chunk {chunk} of {self._url(run.path)}{reason}", self._images is not None
        self.view.add(text, run.path, self.name, chunk=chunk, samples=samples, value=all_values)

    def _compare_lengths(self, run: Run, placed: Sequence[Placed], lengths: NDArray[np.uint32]) -> None:
        """Report the first sample of each chunk that differs in size from `lengths`, those of the run's samples."""
        path = tables.lengths_path(self.name, run.shard)
        for row, items in placed:
            sizes = items.stops - items.starts
            for i in np.flatnonzero(lengths[row : row + len(sizes)] != sizes)[:1].tolist():
                samples = self.view.numbers((run.first_sample + row + i, run.first_sample + row + i + 1))
                which = f"sample {samples[0]}" if samples[0] < samples[1] else "a deleted sample"
                problem = f"the table of lengths {self._url(path)} gives {which} {lengths[row + i]} bytes"
                self.view.add(f"{problem}, it has {sizes[i]}", path, self.name, samples=samples)


def rows_of(manifest: Manifest, num_samples: int) -> SampleRows:
    """Return for each sample its row in a source of `num_samples` rows, as if no row had been skipped.

    The rows follow from the manifest's provenance. Raises `UsageError` if that is incomplete.
    """
    rows: NDArray[np.int64] | range = range(num_samples)
    split, shuffle, source_splits = (manifest.provenance.get(key) for key in ("split", "shuffle", "splits"))
    if isinstance(source_splits, Mapping) and isinstance(split, Mapping) and split.get("name") in source_splits:
        if sum(source_splits.values()) == num_samples:
            rows = own_rows(source_splits, split["name"])
    elif split is not None:
        splits, seed = parse_splits(_provenance(split, "of", str)), _provenance(split, "seed", int)
        rows = _provenance(assign(num_samples, splits, seed), _provenance(split, "name", str), np.ndarray)
    return SampleRows.of(rows, None if shuffle is None else _provenance(shuffle, "seed", int))


def _provenance(values: Any, key: str, kind: type) -> Any:
    value = values.get(key) if isinstance(values, Mapping) else None
    if not isinstance(value, kind):
        problem = f"the manifest does not record the source rows of its samples: its provenance has no {key!r}"
        raise UsageError(problem, "compare only datasets that streamloader convert made")
    return value


def _compare(view: DatasetView, against: tuple[Any, str | None, Mapping[str, Any]], count: Callable[[int], int]) -> int:
    """Report every sample that differs from its row of the source, and return the number of compared samples.

    Samples in damaged chunks are skipped, because these chunks are reported. `count` is called with numbers of samples.
    """
    manifest, url = view.manifest, view.store.url
    added = added_fields(manifest.provenance)  # from other sources
    fields = {name: layout.field for name, layout in manifest.fields.items() if name not in added}
    try:
        source = open_source(*against, FieldSelection.from_provenance(fields, manifest.provenance))[1]
    except FieldError as error:
        view.add(f"{url} differs from {against[0]}: {error.problem}", "")
        return 0
    for name, field in list(fields.items()):
        source_field = source.fields.get(name)
        # an encoding is only a hint
        if source_field is None or replace(source_field, encoding="") != replace(field, encoding=""):
            view.add(f"field {name!r} is {field} in {url}, and {source_field} in {source.url}", "", name)
            del fields[name]
    rows, size = rows_of(manifest, source.num_samples), manifest.samples_per_shard
    if manifest.provenance.get("left_out"):
        rows = rows.without(_bad_rows(source, rows, size))
    if rows.count != manifest.num_samples:
        split = f" for the split {view.split!r}" if view.split else ""
        view.add(f"{url} has {manifest.num_samples} samples, {source.url} has {rows.count}{split}", "")
        if {"split", "shuffle"} & set(manifest.provenance):
            return 0  # the samples come from other rows, so every one would differ
    readers = {name: FieldReader(view.store, manifest, name, view.remaining) for name in fields}
    stop = min(rows.count, manifest.num_samples)

    def check(start: int) -> int:
        if view.problems.full:
            return count(0)
        return count(_compare_samples(view, source, rows, readers, samples=(start, min(start + size, stop))))

    return sum(run_all(check, range(0, stop, size), min(cpu_count(), COMPARE_THREADS)))


def _bad_rows(source: RowSource, rows: SampleRows, size: int) -> set[int]:
    """Return the rows that cannot be converted. Reads all rows, `size` at a time."""
    bad_rows: set[int] = set()
    for start in range(0, rows.count, size):
        numbers, bad = np.sort(rows.read(start, start + size)), list[BadSample]()
        source.fragment(numbers)(bad.append)
        bad_rows.update(int(numbers[sample.position]) for sample in bad)
    return bad_rows


def _compare_samples(
    view: DatasetView, source: RowSource, rows: SampleRows, readers: Mapping[str, FieldReader], *, samples: Samples
) -> int:
    """Report which of the stored samples [start, stop) differ from their source rows; return the number compared."""
    numbers, url, bad = rows.read(*samples), view.store.url, list[BadSample]()
    if view.remaining is not None:
        numbers, samples = numbers[view.remaining.find(np.arange(*samples))[1]], view.numbers(samples)
    if not len(numbers):
        return 0
    ascending = np.sort(numbers)
    columns = source.fragment(ascending)(bad.append)
    for bad_sample in bad:
        row = int(ascending[bad_sample.position])
        sample = samples[0] + int(np.flatnonzero(numbers == row)[0])
        problem = f"sample {sample} of {url}: row {row} of {source.url} is bad ({bad_sample.problem})"
        view.add(problem, "", samples=(sample, sample + 1))
    good = np.delete(ascending, [bad_sample.position for bad_sample in bad])
    indexes = np.flatnonzero(np.isin(numbers, good))
    source_indexes = np.searchsorted(good, numbers[indexes])
    try:
        stored = read_columns(readers, *samples)
    except (FormatError, errors.SampleError):
        return 0  # a damaged chunk, which is already reported
    for name, column in stored.items():
        pairs = zip(_items(column, indexes), _items(columns[name], source_indexes), strict=True)
        for i in [i for i, (value, source_value) in enumerate(pairs) if value != source_value]:
            sample, row = samples[0] + int(indexes[i]), int(numbers[indexes[i]])
            problem = f"field {name!r} of sample {sample} of {url} differs from row {row} of {source.url}"
            view.add(problem, "", name, samples=(sample, sample + 1))
    return len(indexes)


def _items(column: Column, rows: NDArray[np.int64]) -> Iterator[bytes]:
    """Return an iterator over the stored bytes of these rows."""
    if isinstance(column, np.ndarray):
        return (row.tobytes() for row in column[rows].astype(column.dtype.newbyteorder("<"), copy=False))
    return (column[row] for row in rows.tolist())
