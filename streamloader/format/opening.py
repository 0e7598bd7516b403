"""From a URL's root document to a manifest: one request, and a clear error for everything that can be there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from streamloader.errors import FieldError, FormatError, IncompleteError, NotADatasetError, NotFoundError
from streamloader.format.manifest import FORMAT, NAME, Manifest
from streamloader.format.parse import check_version, manifest_from_json, parse_json
from streamloader.storage.protocol import Store

Result = TypeVar("Result")

ROOT = "zarr.json"
JOB = "_streamloader/job.json"
RECEIPTS = "_streamloader/receipts"
# A damaged body is mostly a damaged transfer: fetched again this often before it counts as damaged at rest.
BODY_ATTEMPTS = 3
PIECE_BYTES = 4 << 20  # of what may be longer, and is read in pieces
MAX_ROOT = 64 << 20  # bytes of a root document, or of any other JSON document of a dataset


@dataclass(frozen=True)
class Opened:
    """An opened dataset: its manifest, the store below which its objects lie, and the names of the root's splits."""

    manifest: Manifest
    store: Store
    splits: tuple[str, ...]


def open_manifest(store: Store, split: str | None = None) -> tuple[Manifest, Store]:
    """Return the manifest of the dataset, or of its split, and the store below which its objects lie."""
    opened = open_root(store, split)
    return opened.manifest, opened.store


def reread(read: Callable[[], Result]) -> Result:
    """Return what `read` returns; what is damaged is mostly a damaged transfer, and is read three times in all.

    Raises the last `FormatError`, and at once one that says that an object is not there.
    """
    for _ in range(BODY_ATTEMPTS - 1):
        try:
            return read()
        except FormatError as error:
            if isinstance(error.__cause__, NotFoundError):
                raise
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
        problem = f"{store.url} says split {split!r} has digest {stated}, its manifest gives {manifest.digest}"
        raise FormatError(problem, "convert it again")
    return Opened(manifest, child, names)


def get_document(store: Store, path: str) -> bytes:
    """Return a JSON document, of which `MAX_ROOT` bytes and one more are asked for at most.

    Raises `NotFoundError`, and `FormatError` for a larger one.
    """
    data = store.get_range(path, 0, MAX_ROOT + 1)
    if len(data) > MAX_ROOT:
        raise FormatError(f"{store.url}/{path} has over {MAX_ROOT} bytes, no document of a dataset has", "delete it")
    return data


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


def read_root(store: Store) -> dict[str, Any]:
    """Return the root document. Raises `NotADatasetError`, `IncompleteError` or `FormatError`."""
    try:
        data = get_document(store, ROOT)
    except NotFoundError as error:
        raise _absent(store, error) from error
    try:
        document = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{store.url}/{ROOT} is damaged ({error})", "copy or convert the dataset again") from error
    if not isinstance(document, dict):
        raise FormatError(f"{store.url}/{ROOT} is damaged (not an object)", "copy or convert the dataset again")
    return document


def read_job(store: Store) -> dict[str, Any] | None:
    """Return the job of an unfinished conversion, or None where there is none. Raises `FormatError`."""
    try:
        data = get_document(store, JOB)
    except NotFoundError:
        return None
    try:  # apart from the request: a wrong storage option is a ValueError too
        job = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{store.url}/{JOB} is damaged ({error})", "convert again with overwrite") from error
    names = [job.get(key) or [] for key in ("fields", "splits")] if isinstance(job, dict) else []
    if not names or not all(isinstance(one, list) and all(_is_name(name) for name in one) for one in names):
        raise FormatError(f"{store.url}/{JOB} is damaged (not a job)", "convert again with overwrite")
    return dict(job)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and NAME.match(name) is not None


def _streamloader(document: Any, url: str) -> dict[str, Any]:
    attributes = document.get("attributes") if isinstance(document, dict) else None
    ours = attributes.get(FORMAT) if isinstance(attributes, dict) else None
    if not isinstance(ours, dict):
        remedy = "give the URL of a dataset that streamloader wrote"
        raise NotADatasetError(f"{url} is Zarr or JSON, but not a streamloader dataset", remedy)
    return ours


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
    return IncompleteError(problem, "run the same convert command again, it goes on from there")


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
