"""Reads the manifest of a URL by one request, and explains anything else at the URL by a clear error."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from streamloader.errors import FieldError, FormatError, IncompleteError, NotADatasetError, NotFoundError, UsageError
from streamloader.format.manifest import FORMAT, NAME, Manifest, check_version, manifest_path, parse_json, read_manifest
from streamloader.options import is_whole
from streamloader.storage.store import Store

Result = TypeVar("Result")

ROOT = "zarr.json"
JOB = "_streamloader/job.json"
RECEIPTS = "_streamloader/receipts"
COPY = "copy"  # who writes, in the job file of a copy
STATISTICS = "_streamloader/statistics.json"  # the mean and standard deviation of fields, which are no part of the data
_AGAIN = "copy or convert the dataset again"
_IN_PLACE = "give the URL of a dataset that streamloader wrote, or read its arrays in place with sample_axis="
BODY_ATTEMPTS = 3  # reads of damaged data before the object counts as damaged: most damage occurs in transfer
PIECE_BYTES = 4 << 20  # per request for an object of unbounded size
MAX_ROOT = 64 << 20  # bytes of any JSON document of a dataset


class Opened(NamedTuple):
    """An opened dataset or split: its manifest, the store of its objects, and the names of all splits at the URL."""

    manifest: Manifest
    store: Store
    splits: tuple[str, ...]


def reread(read: Callable[[], Result], on_damage: Callable[[], None] | None = None) -> Result:
    """Return the result of `read`, which is repeated after a `FormatError`, up to `BODY_ATTEMPTS` calls in total.

    `on_damage` is called before each further attempt. Raises the last `FormatError`. The error of a missing object is
    raised at once.
    """
    for _ in range(BODY_ATTEMPTS - 1):
        try:
            return read()
        except FormatError as error:
            if not is_damage(error):
                raise
            if on_damage is not None:
                on_damage()
    return read()


def is_damage(error: BaseException | None) -> bool:
    """Return whether an error is one of bytes, which may be right when they are read again."""
    return isinstance(error, FormatError) and not isinstance(error.__cause__, NotFoundError)


def open_root(store: Store, split: str | None = None, version: int | None = None) -> Opened:
    """Open a dataset, or one split of it, by one request; by two for an earlier `version` than the last.

    Raises `NotADatasetError`, `IncompleteError`, `VersionError` or `FormatError`; `FieldError` for an unknown split, or
    if the dataset has splits and `split` is None; and `UsageError` for an unknown version.
    """
    opened = reread(lambda: _open_root(store, split))
    if version is None or version == opened.manifest.generation:
        return opened
    return opened._replace(manifest=read_version(opened, version))


def read_version(opened: Opened, version: int) -> Manifest:
    """Return the manifest of an earlier version, which the append after it kept.

    Raises `UsageError` if there is none, and `FormatError`.
    """
    store, last = opened.store, opened.manifest.generation
    if not is_whole(version) or version > last:
        remedy = f"give a version from 1 to {last}, or leave it out for the last one"
        raise UsageError(f"there is no version {version!r} of {store.url}, which has {last}", remedy)
    path = manifest_path(version)
    try:
        manifest = reread(lambda: read_manifest(_read_once(store, path), f"{store.url}/{path}"))
    except NotFoundError as error:
        problem = f"the manifest of version {version} of {store.url} was not kept: it is not at {path}"
        raise UsageError(
            problem, f"open version {last}: erasing samples removes earlier versions, and early releases kept none"
        ) from error
    if manifest.generation != version:
        raise FormatError(f"{store.url}/{path} is the manifest of version {manifest.generation}", "restore it")
    return manifest


def _open_root(store: Store, split: str | None) -> Opened:
    return open_document(store, _read_root_once(store), split)


def open_document(store: Store, document: dict[str, Any], split: str | None = None) -> Opened:
    """Open a dataset, or one split of it, by its root document. Raises as `open_root`."""
    attributes = _dataset_attributes(document, store.url)
    check_version(attributes, store.url)
    splits = attributes.get("splits")
    if splits is None:
        if split is not None:
            raise FieldError(f"{store.url} has no splits, but split={split!r} was given", "leave split out")
        return Opened(read_manifest(attributes, store.url), store, ())
    if not isinstance(splits, Mapping) or not splits or not all(NAME.match(name) for name in splits):
        raise FormatError(f"the splits of {store.url} are damaged", "convert it again")
    names = tuple(splits)
    if split is None or split not in splits:
        reason = "no split was given" if split is None else f"{split!r} is not one of them"
        raise FieldError(f"{store.url} has the splits {', '.join(names)}; {reason}", f"open it with split={names[0]!r}")
    child = store.child(split)
    try:
        node = document["consolidated_metadata"]["metadata"][split]
        digest = splits[split]["digest"]
    except (KeyError, TypeError) as error:
        raise FormatError(f"the root of {store.url} does not hold its split {split!r}", "convert it again") from error
    manifest = read_manifest(_dataset_attributes(node, child.url), child.url)
    if manifest.digest != digest:
        problem = f"{store.url} states digest {digest} for split {split!r}, its manifest gives {manifest.digest}"
        raise FormatError(problem, "convert it again")
    return Opened(manifest, child, names)


def get_document(store: Store, path: str) -> bytes:
    """Return the bytes of a JSON document, by one request if it has less than `PIECE_BYTES`.

    Raises `NotFoundError`, and `FormatError` for over `MAX_ROOT` bytes.
    """
    data = store.get_range(path, 0, PIECE_BYTES)
    if len(data) < PIECE_BYTES:
        return data
    if store.get_range(path, MAX_ROOT, MAX_ROOT + 1):
        problem = f"{store.url}/{path} has over {MAX_ROOT} bytes, the limit for documents of a dataset"
        raise FormatError(problem, "delete it")
    return store.get_range(path, 0, MAX_ROOT)  # by one request: it may be replaced between two


def read_lines(store: Store, path: str, limit: int) -> Iterator[bytes]:
    """Yield the lines of an object of any size, without line ends; it is read `PIECE_BYTES` at a time.

    Raises `NotFoundError`, and `FormatError` for a line that exceeds `limit` by more than one piece. Memory is bounded
    by the same size.
    """
    partial = b""
    for start in itertools.count(0, PIECE_BYTES):
        piece = store.get_range(path, start, start + PIECE_BYTES)
        *lines, partial = (partial + piece).split(b"\n")
        yield from lines
        if len(partial) > limit:
            problem = f"{store.url}/{path} has a line of over {limit} bytes, which streamloader does not write"
            raise FormatError(problem, "delete it")
        if len(piece) < PIECE_BYTES:
            break
    if partial:
        yield partial


def read_object(
    store: Store,
    path: str,
    remedy: str = _AGAIN,
    what: str = "an object",
    is_valid: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> dict[str, Any]:
    """Return the JSON object at `path`. Raises `NotFoundError`, and `FormatError` if it is damaged, or is not valid."""

    def read() -> dict[str, Any]:
        document = _read_once(store, path, remedy)
        if not is_valid(document):
            raise FormatError(f"{store.url}/{path} is damaged (not {what})", remedy)
        return document

    return reread(read)


def _read_once(store: Store, path: str, remedy: str = _AGAIN) -> dict[str, Any]:
    return parse_object(get_document(store, path), f"{store.url}/{path}", remedy)


def parse_object(data: bytes, url: str, remedy: str = _AGAIN) -> dict[str, Any]:
    """Return the JSON object in `data`, the document at `url`. Raises `FormatError`."""
    try:
        document = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{url} is damaged ({error})", remedy) from error
    if not isinstance(document, dict):
        raise FormatError(f"{url} is damaged (not an object)", remedy)
    return document


def read_root(store: Store) -> dict[str, Any]:
    """Return the root document. Raises `NotADatasetError`, `IncompleteError` or `FormatError`."""
    return reread(lambda: _read_root_once(store))


def _read_root_once(store: Store) -> dict[str, Any]:
    try:
        return _read_once(store, ROOT)
    except NotFoundError as error:
        raise _missing_root_error(store, error) from error


def manifest_json(document: Any) -> dict[str, Any] | None:
    """Return the attribute `streamloader` of a root document, or None if the document does not have it."""
    attributes = document.get("attributes") if isinstance(document, dict) else None
    manifest = attributes.get(FORMAT) if isinstance(attributes, dict) else None
    return manifest if isinstance(manifest, dict) else None


def split_names(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the splits in a root document; empty for a dataset without splits."""
    splits = (manifest_json(document) or {}).get("splits")
    return tuple(splits) if isinstance(splits, dict) else ()


def read_job(store: Store) -> dict[str, Any] | None:
    """Return the job file of an unfinished dataset, or None if there is none. Raises `FormatError`."""
    try:
        return read_object(store, JOB, "convert again with overwrite", "a job", _has_names)
    except NotFoundError:
        return None


def _has_names(job: dict[str, Any]) -> bool:
    lists = job.get("fields") or [], job.get("splits") or []
    return all(isinstance(names, list) and all(map(_is_name, names)) for names in lists)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and NAME.match(value) is not None


def _dataset_attributes(document: Any, url: str) -> dict[str, Any]:
    attributes = manifest_json(document)
    if attributes is None:
        raise NotADatasetError(f"{url} is Zarr or JSON, but not a streamloader dataset", _IN_PLACE)
    return attributes


def _missing_root_error(store: Store, error: NotFoundError) -> NotADatasetError | IncompleteError:
    """Return the error for a URL without a root document: there is no dataset, or an unfinished one."""
    job = read_job(store)
    if job is None and any(store.head(name) is not None for name in (".zmetadata", ".zgroup", ".zarray")):
        return NotADatasetError(f"{store.url} is Zarr, but not a streamloader dataset", _IN_PLACE)
    if job is None:
        remedy = "check the URL and the storage_options, or convert something to it"
        found = error.problem.removeprefix(f"{store.url}/")
        return NotADatasetError(f"there is no dataset at {store.url} ({found})", remedy)
    if job.get("by") == COPY:
        return IncompleteError(f"the copy to {store.url} is unfinished", "run the same cp command again to resume it")
    finished = _finished_shards(store, job)
    total = job.get("shards")
    done = f"{finished} of {total} shards" if isinstance(total, int) else f"{finished} shards"
    if job.get("by") == "writer":
        problem = f"the Writer of {store.url} was not closed: it has {done}"
        return IncompleteError(problem, "write it again with overwrite=True; it cannot be resumed")
    problem = f"the conversion of {store.url} is unfinished: it has {done}"
    return IncompleteError(problem, "run the same convert command again to resume it")


def _finished_shards(store: Store, job: Mapping[str, Any]) -> int:
    """Count the finished shards of an unfinished conversion, by receipts; those of a finished split are removed."""
    count = sum(1 for _ in store.list(RECEIPTS))
    for split in job.get("splits") or ():
        child = store.child(split)
        if child.head(ROOT) is None:
            count += sum(1 for _ in child.list(RECEIPTS))
        else:
            manifest = open_root(child).manifest
            count += -(-manifest.num_samples // manifest.samples_per_shard)
    return count
