"""Objects and byte ranges below one URL: adds relative paths, retries and our errors to the client of its protocol.

Each process makes its own clients: see `process.py`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, TypeVar

from streamloader.errors import ObjectExistsError, StorageError, UnsupportedError, UsageError
from streamloader.options import Cache
from streamloader.storage.buffers import RESIDENT, USE, Allocate, Body, Buffer, Receiver, Use, body_bytes, empty_buffer
from streamloader.storage.cache import WAIT_SECONDS, RangeCache, range_cache
from streamloader.storage.objects import TEMPORARY_SUFFIX, Client, ObjectInfo, checked_path, join_path, object_path
from streamloader.storage.process import PerProcess
from streamloader.storage.retry import OnRetry, Retrier, cause_of, translated
from streamloader.storage.url import REFERENCES, S3_CLIENT_OPTIONS, S3_OPTIONS, Location, parse_location, redact

Result = TypeVar("Result")
_READERS = {  # by protocol: `kind` and `reason` of a `RangeReader` over the store's client
    "s3": ("http", "S3: bodies are read into their final buffers"),
    "file": ("file", "local files: bodies are read into their final buffers"),
    **{protocol: (protocol, "ranges of other objects") for protocol in REFERENCES},
}
READ_ONLY = ("http", *REFERENCES)  # protocols
COMPARISONS = 8  # of an object with what it had: if every fifth response is damaged, all are once in 400,000 times
_NOT_OF_FSSPEC = ("s3", "file", "memory", *REFERENCES)  # or always installed


def reads(read: Callable[[], Result]) -> Iterator[Result]:
    """Yield what `read()` returns, until it has returned something twice, or `COMPARISONS` times.

    For the content of an object that should be known: a response that is damaged on its way is not another content,
    and no two are damaged alike.
    """
    found: list[Result] = []
    for _ in range(COMPARISONS):
        found.append(read())
        yield found[-1]
        if found[-1] in found[:-1]:
            return


def _call(request: Callable[[], Buffer]) -> Buffer:
    return request()


@dataclass
class RangeReader:
    """The data plane: blocking ranged reads below the folder `root`, without retries. Thread-safe; for one process.

    `kind` is the client's name (`http`, `file`, `obstore` or `fsspec`), `reason` says why it was chosen, and
    `fetch(path, start, stop, receiver)` is its function. `on_repeat()` is called when a request is sent again because
    its response is late.

    `cache` has ranges on local disk, if there is one; `use` tells it of the next use, and `call(request)` sends the
    requests for others, for example with retries.
    """

    kind: str
    reason: str
    fetch: Callable[[str, int, int, Receiver], Buffer]
    root: str
    location: Location
    on_repeat: Callable[[], object] = bool
    cache: RangeCache | None = None
    use: Use = USE
    call: Callable[[Callable[[], Buffer]], Buffer] = _call

    def below(self, path: str) -> RangeReader:
        """Return a reader of the folder `path`, which shares the connections, but not the cache."""
        path = checked_path(path)
        if not path:
            return self
        return replace(self, root=join_path(self.root, path), location=self.location.child(path), cache=None)

    def read(self, path: str, start: int, stop: int, allocate: Allocate = empty_buffer) -> memoryview:
        """Return bytes [start, stop) of the object, fewer if it ends before `stop`.

        That takes one request, two if the first one is late, and none if the cache has them.

        `allocate(size)` returns the memory to read into; clients that allocate their own buffers do not call it.
        Raises a `StorageError`: `NotFoundError`, `AccessError`, `EndpointError`, `ThrottledError`, or
        `TransientError` for other temporary failures.
        """
        if stop <= start:
            return empty_buffer(0)
        receiver = Receiver(allocate, self.on_repeat)

        def fetch() -> Buffer:
            with translated(self.location, path):
                return self.fetch(join_path(self.root, object_path(path)), start, stop, receiver)

        if self.cache is None:
            return memoryview(self.call(fetch))
        request = partial(self.call, fetch)
        return memoryview(self.cache.read(request, path, start, stop, receiver=receiver, use=self.use)[0])


@dataclass(eq=False, repr=False)
class Store:
    """The control plane: objects below the folder `folder` of a location. Paths are relative and use `/`.

    A store is cheap, opens no connection before its first call, and is pickled as its URL and options. Every failure
    is a `StorageError` that names the URL. Temporary failures are retried by the location's policy; the clients' own
    retries are disabled if possible.

    `cache`: of the objects of a dataset, which never change: see `cached`.
    """

    location: Location
    folder: str = ""
    cache: RangeCache | None = None
    _retriers: PerProcess[Retrier] = field(default_factory=PerProcess)
    _clients: PerProcess[Client] = field(default_factory=PerProcess)
    _readers: PerProcess[RangeReader] = field(default_factory=PerProcess)
    _key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def url(self) -> str:
        """The URL of the store, without a trailing slash and credentials."""
        return self._shown("")

    @property
    def retries(self) -> Retrier:
        """The retries of this process's requests to the store; reads by `reader` should use it too."""
        return self._retriers.get(self._new_retrier)

    def child(self, path: str) -> Store:
        """Return the store below `path`; it shares this one's clients, but not its cache."""
        return replace(self, folder=self._below(path), cache=None)

    def cached(self, cache: Cache | None, digest: str, *, versions: bool = False) -> Store:
        """Return the same store with a cache for the data plane, and for `get_fixed`; without one for None.

        `digest` identifies the content of the objects that these read, or of those of one of several `versions`, if
        `Use.content` does so for ranges that these share.
        """
        given = cache, digest, self.url, WAIT_SECONDS, self.url if versions else ""
        return replace(self, cache=None if cache is None else range_cache(*given))

    def get(self, path: str) -> bytes:
        """Return the object. Raises `NotFoundError` if it does not exist."""
        return self._ask(object_path(path), lambda client, full: client.get(full))

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), fewer if the object ends before `stop`; one request."""
        if not 0 <= start <= stop:
            raise UsageError(f"invalid range [{start}, {stop}) of {path!r}", "give 0 <= start <= stop")
        if start == stop:
            return b""
        return self._ask(object_path(path), lambda client, full: bytes(client.get_range(full, start, stop)))

    def get_fixed(self, path: str, size: int, *, fresh: bool = False) -> memoryview:
        """Return the first `size` bytes of an object that never changes, fewer if it is smaller; one request.

        None if the cache has them, unless `fresh`.
        """

        def get() -> Buffer:
            return self.get_range(path, 0, size)

        if self.cache is None:
            return memoryview(get())
        return memoryview(self.cache.read(get, path, 0, size, use=Use(RESIDENT, fresh=fresh))[0])

    def read(self, path: str, start: int, stop: int, allocate: Allocate = empty_buffer) -> memoryview:
        """Return bytes [start, stop) by the data plane, with retries; see `RangeReader.read`."""
        return replace(self.reader(), call=self.retries.call).read(path, start, stop, allocate)

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes, fewer if the object is smaller; one request."""
        return b"" if size < 1 else self._ask(object_path(path), lambda client, full: client.get_tail(full, size))

    def head(self, path: str) -> ObjectInfo | None:
        """Return the object's size and etag, or None if it does not exist."""
        info = self._ask(object_path(path), lambda client, full: client.info(full))
        return info._replace(path=path) if info else None

    def modified(self, path: str) -> datetime | None:
        """Return when the object was last written, or None if it does not exist or the store does not tell."""
        time = self._ask(object_path(path), lambda client, full: client.modified(full))
        return time if time is None or time.tzinfo else time.replace(tzinfo=UTC)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder `prefix`, recursively, in unspecified order."""
        token: str | None = None
        while True:
            objects, token = self._ask(prefix, lambda client, full: client.list_page(full, token))  # noqa: B023
            root = join_path(self._client().root, self.folder)
            start = len(f"{root.rstrip('/')}/") if root else 0
            for entry in objects:
                if not entry.path.endswith(TEMPORARY_SUFFIX):
                    yield entry._replace(path=entry.path[start:])
            if not token:
                return

    def children(self) -> Sequence[str]:
        """Return the sorted names of the folders directly below the store."""
        return sorted(self._ask("", lambda client, full: client.folders(full)))

    def put(self, path: str, data: Body) -> ObjectInfo:
        """Write the object, on S3 with one request below 1 GiB. Readers see the complete object or none."""
        etag = self._ask(self._written(path), lambda client, full: client.put(full, data))
        return ObjectInfo(path, body_bytes(data), etag)

    def create(self, path: str, data: Buffer) -> ObjectInfo:
        """Write the object. Raises `ObjectExistsError` if it exists.

        Atomic on S3, Google Cloud, Azure, local files and memory. After a lost response, a retry may find the object of
        an earlier attempt: an object with the content `data` then counts as that.
        """
        failures: list[StorageError] = []
        try:
            create = partial(self._ask, self._written(path), lambda client, full: client.create(full, data))
            etag = create(lambda error, _: failures.append(error))
        except ObjectExistsError:
            size = body_bytes(data) + 1  # notices a longer object
            if not failures or all(found != data for found in reads(lambda: self.get_range(path, 0, size))):
                raise
            etag = ""
        return ObjectInfo(path, body_bytes(data), etag)

    def replace(self, path: str, data: Buffer, before: Buffer) -> ObjectInfo:
        """Write the object if its content is `before` or already `data`. Raises `ObjectExistsError` if it is not.

        Atomic on S3 servers that support `If-Match`, Google Cloud, Azure, in local files and in memory. Elsewhere, a
        write of another process between our read and write is lost. Raises `NotFoundError` if there is no object.
        """
        replace = partial(self._ask, self._written(path), lambda client, full: client.replace(full, data, before))
        for found in reads(replace):
            if isinstance(found, str):
                return ObjectInfo(path, body_bytes(data), found)
        raise ObjectExistsError(f"{self._shown(path)} was changed by another writer", "read it again")

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects, and ignore those that do not exist."""
        below = [self._below(self._written(path)) for path in paths]
        if below:
            self._ask("", lambda client, _: client.delete([join_path(client.root, path) for path in below]))

    def remove_leftovers(self) -> int:
        """Remove unfinished uploads and temporary files of killed writers, and return their number.

        Call it only while no other process writes to this store: its writes in progress would fail.
        """
        return self._ask("", lambda client, full: client.remove_leftovers(full))

    def reader(self) -> RangeReader:
        """Return the data plane of this process, which the first call opens."""
        with translated(self.location):
            reader = self._readers.get(self._open_reader).below(self.folder)
            return reader if self.cache is None else replace(reader, cache=self.cache)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self.location, self.folder, self._key, self.retries.reached, self.cache))

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def _written(self, path: str) -> str:
        """Return the path of an object to write. Raises `UnsupportedError` if the store is read only."""
        if self.location.protocol in READ_ONLY:
            problem = f"{self._shown(path)}: web servers and stores of references are read only"
            raise UnsupportedError(problem, "write to a bucket or a local folder")
        return object_path(path)

    def _below(self, path: str) -> str:
        return join_path(self.folder, checked_path(path))

    def _shown(self, path: str) -> str:
        return self.location.child(self._below(path)).shown

    def _ask(self, path: str, call: Callable[[Client, str], Result], on_retry: OnRetry = None) -> Result:
        """Return `call(client, full path)` for this process's client, with retries and our errors."""
        below = self._below(path)

        def ask() -> Result:
            with translated(self.location, below):
                client = self._client()
                return call(client, join_path(client.root, below))

        return self.retries.call(ask, on_retry=on_retry)

    def _client(self) -> Client:
        return self._clients.get(lambda: _open_client(self.location))

    def _new_retrier(self) -> Retrier:
        endpoint = self.location.options.get("endpoint_url")
        name = self.location.shown + (f" at {redact(endpoint)}" if isinstance(endpoint, str) else "")
        retrier = Retrier(self.location.retry, name)
        retrier.reached = any(inherited.reached for inherited in self._retriers.all())  # by the parent, before a fork
        return retrier

    def _open_reader(self) -> RangeReader:
        """Return a reader over the client of S3 or local files, over obstore, or over fsspec if obstore cannot read."""
        location = self.location
        kind, reason = _READERS.get(location.protocol, ("fsspec", ""))
        if not reason:
            from streamloader.storage.object_store import ObstoreClient

            try:
                obstore, reason = ObstoreClient(location), f"obstore supports {location.protocol}"
                return RangeReader("obstore", reason, obstore.get_range, obstore.root, location)
            except UnsupportedError as error:
                reason = error.problem
        client = self._client()
        return RangeReader(kind, reason, client.get_range, client.root, location)


def _restore(location: Location, folder: str, key: str, reached: bool, cache: RangeCache | None) -> Store:
    store = Store(location, folder, cache, *_shared(key), key)
    store.retries.reached |= reached
    return store


@lru_cache(8)
def _shared(key: str) -> tuple[PerProcess[Retrier], PerProcess[Client], PerProcess[RangeReader]]:  # noqa: ARG001
    """Return what all copies of a store share: a worker has a copy for each task, and a client takes 0.1 s."""
    return PerProcess(), PerProcess(), PerProcess()


def open_store(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Store:
    """Return the store of `url`, an fsspec URL or a local path, with the `storage_options` of its fsspec filesystem.

    The option `retry` is the `RetryPolicy` of all requests. The data plane (`Store.reader`) does not retry; call it
    through `Store.retries`. Raises `UsageError` if `url` is not a URL, and `UnsupportedError` for a protocol that is
    unknown or whose package is not installed.
    """
    location = parse_location(url, options)
    _check_protocol(location)
    return Store(location)


def _check_protocol(location: Location) -> None:
    """Raise `UnsupportedError` for a protocol that is unknown to fsspec or whose package is not installed."""
    if location.protocol in _NOT_OF_FSSPEC:
        return
    links = location.target.split("::")
    for protocol in (link.partition("://")[0] for link in links if "://" in link or link.isidentifier()):
        if protocol in REFERENCES:  # fsspec's own would evaluate what is in the file
            problem = f"{location.shown}: references are not supported inside a chain"
            raise UnsupportedError(problem, f"begin the URL with {protocol}://::")
        try:
            importlib.import_module("fsspec").get_filesystem_class(protocol)
        except ValueError:
            problem = f"{location.shown}: fsspec has no protocol {protocol!r}"
            raise UnsupportedError(problem, "use one such as s3, gs, az, https, file or memory") from None
        except ImportError as error:  # its text names the package, which may differ from the missing module
            problem = f"{location.shown}: the protocol {protocol!r} needs a package that is not installed"
            raise UnsupportedError(problem, str(error)) from error


def _open_client(location: Location) -> Client:
    try:
        if location.protocol == "s3":
            # imported when needed: botocore takes 0.1 s and 10 MB
            from streamloader.storage.s3 import S3Client

            return S3Client(location)
        if location.protocol in REFERENCES:
            from streamloader.storage.icechunk import IcechunkClient
            from streamloader.storage.references import ReferenceClient

            is_icechunk = location.protocol == "icechunk"
            return IcechunkClient(location) if is_icechunk else ReferenceClient(location, open_store)
        # fsspec takes 0.05 s
        from streamloader.storage.generic import open_fsspec_client

        return open_fsspec_client(location)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        raise wrong_option(location, error) from cause_of(error, location)


def wrong_option(location: Location, error: Exception) -> UsageError:
    """Return the error for options that a client rejects, with the name of the wrong option if it is known."""
    detail = location.redact(str(error))
    remedy = "see the parameters of the protocol's fsspec filesystem"
    name = re.search(r"unexpected keyword argument '(\w+)'", detail)
    if name is not None:
        known = (*S3_OPTIONS, *S3_CLIENT_OPTIONS) if location.protocol == "s3" else ()
        matches = difflib.get_close_matches(name[1], known, 1)
        suggestion = f"did you mean {matches[0]!r}? Or " if matches else ""
        return UsageError(f"{location.shown}: there is no storage option {name[1]!r}", f"{suggestion}{remedy}")
    if detail.startswith("Invalid endpoint"):
        origin = "endpoint_url in storage_options, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the AWS configuration"
        return UsageError(f"{location.shown}: {detail}", f"begin it with http:// or https://; it comes from {origin}")
    options = sorted(location.options)
    return UsageError(f"{location.shown}: storage_options {options} do not fit the protocol: {detail}", remedy)
