"""From a URL's root document to a manifest: one request, and a clear error for everything that can be there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from streamloader.errors import FieldError, FormatError, IncompleteError, NotADatasetError, NotFoundError
from streamloader.format.manifest import FORMAT, NAME, Manifest, check_version, manifest_from_json, parse_json
from streamloader.storage.store import Store

Result = TypeVar("Result")

ROOT = "zarr.json"
JOB = "_streamloader/job.json"
RECEIPTS = "_streamloader/receipts"
# A damaged body is mostly a damaged transfer: fetched again this often before it counts as damaged at rest.
BODY_ATTEMPTS = 3
PIECE_BYTES = 4 << 20  # of what may be longer, and is read in pieces
MAX_ROOT = 64 << 20  # bytes of a root document, or of any other JSON document of a dataset


class Opened(NamedTuple):
    """An opened dataset: its manifest, the store below which its objects lie, and the names of the root's splits."""

    manifest: Manifest
    store: Store
    splits: tuple[str, ...]


def reread(read: Callable[[], Result], on_damage: Callable[[], None] | None = None) -> Result:
    """Return what `read` returns, in up to three attempts: damaged data is mostly a damaged transfer.

    `on_damage` is called before each further attempt. Raises the last `FormatError`, and at once one that says that an
    object is missing.
    """
    for _ in range(BODY_ATTEMPTS - 1):
        try:
            return read()
        except FormatError as error:
            if isinstance(error.__cause__, NotFoundError):
                raise
            if on_damage is not None:
                on_damage()
    return read()


def open_root(store: Store, split: str | None = None) -> Opened:
    """Open a dataset, or one split of it, by one request.

    Raises `NotADatasetError`, `IncompleteError`, `VersionError`, `FormatError`; `FieldError` where the split is
    not one of the root's, or where there are splits and none is asked for.
    """
    return reread(lambda: _open_root(store, split))


def _open_root(store: Store, split: str | None) -> Opened:
    document = read_root(store)
    attributes = _streamloader(document, store.url)
    check_version(attributes, store.url)
    listed = attributes.get("splits")
    if listed is None:
        if split is not None:
            raise FieldError(f"{store.url} has no splits, asked for {split!r}", "leave split out")
        return Opened(manifest_from_json(attributes, store.url), store, ())
    if not isinstance(listed, Mapping) or not all(NAME.match(name) for name in listed):
        raise FormatError(f"the splits of {store.url} are damaged", "convert it again")
    names = tuple(listed)
    if split is None or split not in listed:
        asked = "none was asked for" if split is None else f"{split!r} is not one of them"
        raise FieldError(f"{store.url} has the splits {', '.join(names)}; {asked}", f"open it with split={names[0]!r}")
    child = store.child(split)
    try:
        node = document["consolidated_metadata"]["metadata"][split]
        stated = listed[split]["digest"]
    except (KeyError, TypeError) as error:
        raise FormatError(f"the root of {store.url} does not hold its split {split!r}", "convert it again") from error
    manifest = manifest_from_json(_streamloader(node, child.url), child.url)
    if manifest.digest != stated:
        problem = f"{store.url} states digest {stated} for split {split!r}, its manifest gives {manifest.digest}"
        raise FormatError(problem, "convert it again")
    return Opened(manifest, child, names)


def get_document(store: Store, path: str) -> bytes:
    """Return a JSON document. Raises `NotFoundError`, and `FormatError` for one of over `MAX_ROOT` bytes."""
    data = store.get_range(path, 0, PIECE_BYTES)
    if len(data) < PIECE_BYTES:
        return data
    if store.get_range(path, MAX_ROOT, MAX_ROOT + 1):
        raise FormatError(f"{store.url}/{path} has over {MAX_ROOT} bytes, no document of a dataset has", "delete it")
    return store.get_range(path, 0, MAX_ROOT)  # by one request: it may be replaced between two


def read_pieces(store: Store, path: str) -> Iterator[bytes]:
    """Yield an object that may have any size, `PIECE_BYTES` at a time. Raises `NotFoundError`."""
    for start in itertools.count(0, PIECE_BYTES):
        piece = store.get_range(path, start, start + PIECE_BYTES)
        yield piece
        if len(piece) < PIECE_BYTES:
            return


def read_lines(pieces: Iterable[bytes], limit: int, url: str) -> Iterator[bytes]:
    """Yield the lines of the pieces of the object `url`, without line ends.

    Raises `FormatError` for a line that is longer than `limit` bytes and a piece.
    """
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > limit:
            raise FormatError(f"{url} has a line of over {limit} bytes, which streamloader does not write", "delete it")
    if rest:
        yield rest


def read_object(store: Store, path: str, remedy: str = "copy or convert the dataset again") -> dict[str, Any]:
    """Return a JSON document that is an object. Raises `NotFoundError`, and `FormatError` for a damaged one."""
    return parse_object(get_document(store, path), f"{store.url}/{path}", remedy)


def parse_object(data: bytes, url: str, remedy: str = "copy or convert the dataset again") -> dict[str, Any]:
    """Return the JSON object of the document `url`. Raises `FormatError`."""
    try:
        document = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{url} is damaged ({error})", remedy) from error
    if not isinstance(document, dict):
        raise FormatError(f"{url} is damaged (not an object)", remedy)
    return document


def read_root(store: Store) -> dict[str, Any]:
    """Return the root document. Raises `NotADatasetError`, `IncompleteError` or `FormatError`."""
    try:
        return read_object(store, ROOT)
    except NotFoundError as error:
        raise _absent(store, error) from error


def manifest_json(document: Any) -> dict[str, Any] | None:
    """Return the attribute `streamloader` of a root document, or None where there is none."""
    attributes = document.get("attributes") if isinstance(document, dict) else None
    ours = attributes.get(FORMAT) if isinstance(attributes, dict) else None
    return ours if isinstance(ours, dict) else None


def split_names(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the splits that a root document lists; none for a dataset without splits."""
    listed = (manifest_json(document) or {}).get("splits")
    return tuple(listed) if isinstance(listed, dict) else ()


def read_job(store: Store) -> dict[str, Any] | None:
    """Return the job of an unfinished conversion, or None where there is none. Raises `FormatError`."""
    remedy = "convert again with overwrite"
    try:
        job = read_object(store, JOB, remedy)
    except NotFoundError:
        return None
    for names in (job.get("fields") or [], job.get("splits") or []):
        if not isinstance(names, list) or not all(isinstance(name, str) and NAME.match(name) for name in names):
            raise FormatError(f"{store.url}/{JOB} is damaged (not a job)", remedy)
    return job


def _streamloader(document: Any, url: str) -> dict[str, Any]:
    found = manifest_json(document)
    if found is None:
        remedy = "give the URL of a dataset that streamloader wrote"
        raise NotADatasetError(f"{url} is Zarr or JSON, but not a streamloader dataset", remedy)
    return found


def _absent(store: Store, error: NotFoundError) -> NotADatasetError | IncompleteError:
    """Say why there is no root document: nothing at all, a conversion in its middle, or something else."""
    job = read_job(store)
    if job is None:
        remedy = "check the URL and the storage_options, or convert something to it"
        return NotADatasetError(f"there is no dataset at {store.url} ({error.problem})", remedy)
    finished = _finished_shards(store, job)
    total = job.get("shards")
    done = f"{finished} of {total} shards" if isinstance(total, int) else f"{finished} shards"
    if job.get("by") == "writer":
        problem = f"writing of {store.url} was not closed: it has {done}"
        return IncompleteError(problem, "write it again with overwrite=True; what is there cannot be resumed")
    problem = f"the conversion of {store.url} is unfinished: it has {done}"
    return IncompleteError(problem, "run the same convert command again to resume it")


def _finished_shards(store: Store, job: Mapping[str, Any]) -> int:
    """Count the shards of an unfinished conversion: by receipts, which a split that is finished has no longer."""
    count = sum(1 for _ in store.list(RECEIPTS))
    for split in job.get("splits") or ():
        child = store.child(split)
        if child.head(ROOT) is None:
            count += sum(1 for _ in child.list(RECEIPTS))
        else:
            manifest = open_root(child).manifest
            count += -(-manifest.num_samples // manifest.samples_per_shard)
    return count
