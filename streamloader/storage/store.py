"""Objects and byte ranges below one URL: adds paths, retries and our errors to the client of its protocol.

Clients are made in the process that uses them, and never those of another process: see `process.py`.
"""

from __future__ import annotations

import difflib
import importlib
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import ObjectExistsError, StorageError, ThrottledError, UnsupportedError, UsageError
from streamloader.storage.process import PerProcess
from streamloader.storage.retry import Retrier, cause_of, translated
from streamloader.storage.url import S3_CLIENT_OPTIONS, S3_OPTIONS, Location, checked_path, object_path, redact

if TYPE_CHECKING:
    from streamloader.storage.generic import FsspecClient
    from streamloader.storage.s3 import S3Client

    Client: TypeAlias = FsspecClient | S3Client

Result = TypeVar("Result")
Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]  # several buffers are one object, end to end
Allocate = Callable[[int], memoryview]

TEMPORARY_SUFFIX = ".streamloader-tmp"
_ALWAYS_THERE = {"s3", "file", "memory"}  # protocols whose packages this one requires


class ObjectInfo(NamedTuple):
    """One stored object: `path` is relative to its store, `size` in bytes, `etag` empty where unknown."""

    path: str
    size: int
    etag: str = ""


Page = tuple[Sequence[ObjectInfo], str | None]  # some objects of a listing, and the token of the next page


def empty_buffer(size: int) -> memoryview:
    """Return writable memory of so many bytes, not cleared; none for a negative size."""
    return memoryview(np.empty(max(0, size), np.uint8))  # type: ignore[arg-type]


def buffers_of(body: Body) -> list[memoryview]:
    """Return the buffers of a body as bytes, without the empty ones."""
    parts = [body] if isinstance(body, Buffer) else body
    return [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]


def body_bytes(body: Body) -> int:
    """Return the size of a body."""
    return sum(part.nbytes for part in buffers_of(body))


def body_crc32c(body: Body) -> int:
    """Return the CRC-32C of a body."""
    crc = 0
    for part in buffers_of(body):
        crc = crc32c.crc32c(part, crc)
    return crc


def larger_than(*bodies: Buffer) -> int:
    """Return the bytes to read of an object that is compared with these: one more than the longest has."""
    return 1 + max(map(body_bytes, bodies))


def etag_of(response: Any) -> str:
    """Return the etag in what a client returned, without quotes; empty where there is none."""
    if not isinstance(response, dict):
        return ""
    return str(response.get("ETag") or response.get("etag") or "").strip('"')


def join_path(root: str, path: str) -> str:
    """Return the path below the folder `root`; either may be empty."""
    return f"{root.rstrip('/')}/{path}" if root and path else root or path


@dataclass
class RangeReader:
    """The data plane: blocking ranged reads below the folder `root`, from any thread, without a retry of its own.

    `kind` names the client (`http`, `file`, `obstore` or `fsspec`), `reason` says why it was chosen; `fetch(path,
    start, stop, allocate)` is its function.
    """

    kind: str
    reason: str
    fetch: Callable[[str, int, int, Allocate | None], Buffer]
    root: str
    location: Location

    def below(self, path: str) -> RangeReader:
        """Return the reader of the folder `path`, over the same connections."""
        return replace(self, root=join_path(self.root, path), location=self.location.child(path))

    def read(self, path: str, start: int, stop: int, allocate: Allocate | None = None) -> memoryview:
        """Return bytes [start, stop) of the object by one request; shorter where the object ends before `stop`.

        `allocate` returns writable memory of a size, for a client that reads in place; one that makes
        buffers of its own does not call it. Raises a `StorageError`: `NotFoundError`, `AccessError`,
        `EndpointError`, `ThrottledError`, or `TransientError` for what may pass.
        """
        if stop <= start:
            return empty_buffer(0)
        with translated(self.location, path):
            return memoryview(self.fetch(join_path(self.root, object_path(path)), start, stop, allocate))


@dataclass(eq=False, repr=False)
class Store:
    """The control plane: objects below the folder `folder` of a location. Paths are relative, with `/`.

    A store is cheap, holds no connection until its first call, and pickles as its URL and options.
    Every failure is a `StorageError` that names the URL. Failures that may pass are retried by the location's
    policy; the clients' own retries are off where they can be.
    """

    location: Location
    folder: str = ""
    _retriers: PerProcess[Retrier] = field(default_factory=PerProcess)
    _clients: PerProcess[Client] = field(default_factory=PerProcess)
    _readers: PerProcess[RangeReader] = field(default_factory=PerProcess)
    _key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def url(self) -> str:
        """The URL that the paths are below, without a trailing slash and without credentials."""
        return self._shown("")

    @property
    def retries(self) -> Retrier:
        """What sends this process's requests to the store, again where they fail; for those of `reader` too."""
        return self._retriers.get(self._new_retrier)

    def child(self, path: str) -> Store:
        """Return the store below `path`; it shares this one's clients."""
        return replace(self, folder=self._below(path))

    def get(self, path: str) -> bytes:
        """Return the object. Raises `NotFoundError` where there is none."""
        return self._ask(object_path(path), lambda client, full: client.get(full))

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), fewer where the object ends before; one request."""
        if not 0 <= start <= stop:
            raise UsageError(f"bytes [{start}, {stop}) of {path!r} are not a range", "give 0 <= start <= stop")
        if start == stop:
            return b""
        return self._ask(object_path(path), lambda client, full: bytes(client.get_range(full, start, stop)))

    def read(self, path: str, start: int, stop: int, allocate: Allocate | None = None) -> memoryview:
        """Return bytes [start, stop) by the data plane, with retries; see `RangeReader.read`."""
        reader = self.reader()
        return self.retries.call(lambda: reader.read(path, start, stop, allocate))

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes, fewer where the object is smaller; one request."""
        return b"" if size < 1 else self._ask(object_path(path), lambda client, full: client.get_tail(full, size))

    def head(self, path: str) -> ObjectInfo | None:
        """Return the object's size and etag, or None where there is none."""
        found = self._ask(object_path(path), lambda client, full: client.info(full))
        return found._replace(path=path) if found else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder `prefix`, recursively, in no promised order."""
        token: str | None = None
        while True:
            objects, token = self._ask(prefix, lambda client, full: client.list_page(full, token))  # noqa: B023
            root = join_path(self._client().root, self.folder).rstrip("/")
            for entry in objects:
                if not entry.path.endswith(TEMPORARY_SUFFIX):
                    yield entry._replace(path=entry.path[len(root) + 1 if root else 0 :])
            if not token:
                return

    def put(self, path: str, data: Body) -> ObjectInfo:
        """Write the object, on S3 in one request below 1 GiB; readers see all of it or nothing."""
        etag = self._ask(object_path(path), lambda client, full: client.put(full, data))
        return ObjectInfo(path, body_bytes(data), etag)

    def create(self, path: str, data: Buffer) -> ObjectInfo:
        """Write the object unless there is one: then raise `ObjectExistsError`.

        Atomic on S3, Google Cloud, Azure, local files and memory. Retried only where the store refused to
        act: after a lost response a second try could meet the object of the first.
        """
        etag = self._ask(object_path(path), lambda client, full: client.create(full, data), ThrottledError)
        return ObjectInfo(path, body_bytes(data), etag)

    def replace(self, path: str, data: Buffer, before: Buffer) -> ObjectInfo:
        """Write the object if it still is `before`, or is `data` already: else raise `ObjectExistsError`.

        Atomic on S3 servers that know `If-Match`, in local files and in memory. Elsewhere what another writes in the
        moment between the look and the write is lost. Raises `NotFoundError` where there is none.
        """
        etag = self._ask(object_path(path), lambda client, full: client.replace(full, data, before))
        if etag is None:
            raise ObjectExistsError(f"{self._shown(path)} was changed by another writer", "read it again")
        return ObjectInfo(path, body_bytes(data), etag)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects, and ignore those that are not there."""
        below = [self._below(object_path(path)) for path in paths]
        if below:
            self._ask("", lambda client, _: client.delete([join_path(client.root, path) for path in below]))

    def remove_leftovers(self) -> int:
        """Remove what killed writers left below this store, and return how many: unfinished uploads, temporary files.

        Only while no other process writes here: a write in progress would be interrupted.
        """
        return self._ask("", lambda client, full: client.remove_leftovers(full))

    def reader(self) -> RangeReader:
        """Return this process's data plane, started at the first call."""
        with translated(self.location):
            return self._readers.get(self._open_reader).below(self.folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self.location, self.folder, self._key, self.retries.reached))

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def _below(self, path: str) -> str:
        return join_path(self.folder, checked_path(path))

    def _shown(self, path: str) -> str:
        return self.location.child(self._below(path)).shown

    def _ask(
        self, path: str, call: Callable[[Client, str], Result], retryable: type[StorageError] = StorageError
    ) -> Result:
        """Return what `call` returns for this process's client and its own path, with retries and our errors."""
        below = self._below(path)

        def ask() -> Result:
            with translated(self.location, below):
                client = self._client()
                return call(client, join_path(client.root, below))

        return self.retries.call(ask, retryable=retryable)

    def _client(self) -> Client:
        return self._clients.get(lambda: _open_client(self.location))

    def _new_retrier(self) -> Retrier:
        endpoint = self.location.options.get("endpoint_url")
        name = self.location.shown + (f" at {redact(endpoint)}" if isinstance(endpoint, str) else "")
        retrier = Retrier(self.location.retry, name)
        retrier.reached = any(other.reached for other in self._retriers.all())  # by the parent, before a fork
        return retrier

    def _open_reader(self) -> RangeReader:
        """Open the best client that can read this URL; fsspec, which can read all, says why no other could."""
        location = self.location
        direct = {"s3": ("http", "S3"), "file": ("file", "local files")}.get(location.protocol)
        if direct:
            kind, reason = direct[0], f"{direct[1]}: bodies are read straight into place"
        else:
            from streamloader.storage.object_store import open_obstore_client

            try:
                obstore, root = open_obstore_client(location)
                return RangeReader("obstore", f"obstore supports {location.protocol}", obstore.read, root, location)
            except UnsupportedError as error:
                kind, reason = "fsspec", error.problem
        client = self._client()
        return RangeReader(kind, reason, client.get_range, client.root, location)


def _restore(location: Location, folder: str, key: str, reached: bool) -> Store:
    store = Store(location, folder, *_shared(key), key)
    store.retries.reached |= reached
    return store


@lru_cache(8)
def _shared(key: str) -> tuple[PerProcess[Retrier], PerProcess[Client], PerProcess[RangeReader]]:  # noqa: ARG001
    """Return the clients of all copies of one store: each task of a worker has a copy, and a client takes 0.1 s."""
    return PerProcess(), PerProcess(), PerProcess()


def check_protocol(location: Location) -> None:
    """Raise `UnsupportedError` for a protocol that fsspec does not know or whose package is missing."""
    if location.protocol in _ALWAYS_THERE:
        return
    for protocol in (link.split("://", 1)[0] for link in location.target.split("::")):
        try:
            importlib.import_module("fsspec").get_filesystem_class(protocol)
        except ValueError:
            problem = f"{location.shown}: fsspec has no protocol {protocol!r}"
            raise UnsupportedError(problem, "use one such as s3, gs, az, https, file or memory") from None
        except ImportError as error:  # fsspec's text names the package, which may differ from the missing module
            problem = f"{location.shown}: the protocol {protocol!r} needs a package that is not installed"
            raise UnsupportedError(problem, str(error)) from error


def _open_client(location: Location) -> Client:
    try:
        if location.protocol == "s3":
            # botocore takes 0.1 s and 10 MB, which those who only use local files do not need
            from streamloader.storage.s3 import S3Client

            return S3Client(location)
        # fsspec takes 0.05 s, which those who use S3 do not need
        from streamloader.storage.generic import open_fsspec_client

        return open_fsspec_client(location)
    except (TypeError, ValueError) as error:
        raise _wrong_option(location, error) from cause_of(error, location.secrets)


def _wrong_option(location: Location, error: Exception) -> UsageError:
    """Return the error for options that a client rejects, with the name of the option where it is known."""
    detail = location.secrets.redact(str(error))
    remedy = "see the parameters of the protocol's fsspec filesystem"
    name = re.search(r"unexpected keyword argument '(\w+)'", detail)
    if name is not None:
        known = (*S3_OPTIONS, *S3_CLIENT_OPTIONS) if location.protocol == "s3" else ()
        alike = difflib.get_close_matches(name[1], known, 1)
        meant = f"did you mean {alike[0]!r}? Or " if alike else ""
        return UsageError(f"{location.shown}: there is no storage option {name[1]!r}", f"{meant}{remedy}")
    if detail.startswith("Invalid endpoint"):
        where = "endpoint_url in storage_options, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the AWS configuration"
        return UsageError(f"{location.shown}: {detail}", f"begin it with http:// or https://; it comes from {where}")
    options = sorted(location.options)
    return UsageError(f"{location.shown}: storage_options {options} do not fit the protocol: {detail}", remedy)


def cut_runs(starts: NDArray[np.int64], stops: NDArray[np.int64], gap: int, longest: int) -> list[tuple[int, int]]:
    """Return index ranges [i, j) of ascending ranges that are worth one request each.

    Neighbours are joined over at most `gap`, up to `longest` from the first start to the last stop.
    """
    breaks = [*(np.flatnonzero(starts[1:] - stops[:-1] > gap) + 1).tolist(), len(starts)]
    runs: list[tuple[int, int]] = []
    first = 0
    while first < len(starts):
        near = breaks[bisect_right(breaks, first)]
        short = int(stops.searchsorted(starts[first] + longest, side="right"))
        last = max(first + 1, min(near, short))
        runs.append((first, last))
        first = last
    return runs
