"""The control plane: whole objects below a URL, through any fsspec filesystem; on S3 they are read without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from streamloader.errors import ObjectExistsError, StorageError, ThrottledError, UsageError
from streamloader.storage.calls import TEMPORARY_SUFFIX, Calls, Page, with_fresh_credentials
from streamloader.storage.connection import Connection
from streamloader.storage.failures import cause_of, client_errors, storage_error
from streamloader.storage.location import Location, checked_path, object_path
from streamloader.storage.policy import RETRYABLE, Retrier
from streamloader.storage.protocol import Body, Buffer, ObjectInfo, RangeReader, body_bytes

if TYPE_CHECKING:
    from streamloader.storage.http_reader import HttpReader

Result = TypeVar("Result")


class FsspecStore:
    """A `Store` over fsspec: the folder `folder` below a connection's URL.

    Failures that may pass are retried by the location's policy; the clients' own retries are off where they can be.
    """

    def __init__(self, connection: Connection, folder: str) -> None:
        self._connection = connection
        self._folder = folder

    @property
    def url(self) -> str:
        """The URL that the paths are below, without a trailing slash and without credentials."""
        return self._shown("")

    @property
    def retries(self) -> Retrier:
        """What sends this process's requests to the store, again where they fail."""
        return self._connection.retries

    def child(self, path: str) -> FsspecStore:
        """Return the store below `path`; it shares this one's connection."""
        return FsspecStore(self._connection, self._below(path))

    def get(self, path: str) -> bytes:
        """Return the whole object. Raises `NotFoundError` where there is none."""
        return self._read(path, lambda http, key: http.get(key), lambda calls, full: calls.get(full))

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), fewer where the object ends before; one request."""
        if not 0 <= start <= stop:
            raise UsageError(f"bytes [{start}, {stop}) of {path!r} are no range", "give 0 <= start <= stop")
        if start == stop:
            return b""
        return self._read(
            path,
            lambda http, key: bytes(http.read(key, start, stop)),
            lambda calls, full: calls.get_range(full, start, stop),
        )

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes, fewer where the object is smaller; one request."""
        if size < 1:
            return b""
        return self._read(
            path, lambda http, key: http.get_tail(key, size), lambda calls, full: calls.get_tail(full, size)
        )

    def head(self, path: str) -> ObjectInfo | None:
        """Return the object's size and etag, or None where there is none."""
        found = self._ask(object_path(path), lambda calls, full: calls.info(full))
        return ObjectInfo(path, found.size, found.etag) if found else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder `prefix`, recursively, in no promised order."""
        token: str | None = ""
        while token is not None:
            page = self._ask(prefix, _next_page(token))
            root = len(self._connection.session().path(self._folder).rstrip("/")) + 1
            for entry in page.objects:
                if not entry.path.endswith(TEMPORARY_SUFFIX):
                    yield ObjectInfo(entry.path[root:], entry.size, entry.etag)
            token = page.token or None

    def put(self, path: str, data: Body) -> ObjectInfo:
        """Write the object, on S3 in one request below 1 GiB; it appears whole or not at all."""
        size = body_bytes(data)
        http = self._guard(path, lambda: self._connection.http_writer(size))
        if http is None:
            etag = self._ask(object_path(path), lambda calls, full: calls.put(full, data))
        else:
            below = self._below(object_path(path))
            etag = self.retries.call(lambda: http.put(below, data))
        return ObjectInfo(path, size, etag)

    def create(self, path: str, data: Buffer) -> ObjectInfo:
        """Write the object unless there is one: then raise `ObjectExistsError`.

        Atomic on S3, Google Cloud, Azure, local files and memory. Retried only where the store refused to
        act: after a lost answer a second try could meet the object of the first.
        """
        etag = self._ask(object_path(path), lambda calls, full: calls.create(full, data), (ThrottledError,))
        return ObjectInfo(path, memoryview(data).nbytes, etag)

    def replace(self, path: str, data: Buffer, before: Buffer) -> ObjectInfo:
        """Write the object if it still is `before`, or is `data` already: else raise `ObjectExistsError`.

        Atomic on S3 servers that know `If-Match`, in local files and in memory. Elsewhere what another writes in the
        moment between the look and the write is lost. Raises `NotFoundError` where there is none.
        """
        etag = self._ask(object_path(path), lambda calls, full: calls.replace(full, data, before))
        if etag is None:
            raise ObjectExistsError(f"{self._shown(path)} is not what it was: another wrote it", "read it again")
        return ObjectInfo(path, memoryview(data).nbytes, etag)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects; those that are not there are passed over."""
        below = [self._below(object_path(path)) for path in paths]
        if below:
            session = self._guard("", self._connection.session)
            full = [session.path(path) for path in below]
            self._ask("", lambda calls, _: calls.delete(full))

    def remove_leftovers(self) -> int:
        """Remove what killed writers left below this store, and return how many: unfinished uploads, temporary files.

        Only for who knows that nobody else is writing here: a write in progress would be broken off.
        """
        return self._ask("", lambda calls, full: calls.remove_leftovers(full))

    def reader(self) -> RangeReader:
        """Return this process's data plane, started at the first call."""
        return self._guard("", self._connection.reader).below(self._folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self._connection.location, self._folder, self.retries.reached))

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    def _below(self, path: str) -> str:
        path = checked_path(path)
        return f"{self._folder}/{path}" if self._folder and path else self._folder or path

    def _shown(self, path: str) -> str:
        return self._connection.location.child(self._below(path)).shown

    def _read(
        self, path: str, by_http: Callable[[HttpReader, str], bytes], by_fsspec: Callable[[Calls, str], bytes]
    ) -> bytes:
        """Read one object: over plain sockets where they serve it, for fsspec's S3 takes 0.2 s to start."""
        below = self._below(object_path(path))
        http = self._guard(path, self._connection.http)
        if http is None:
            return self._ask(path, by_fsspec)
        return self.retries.call(lambda: by_http(http, below))

    def _ask(
        self,
        path: str,
        call: Callable[[Calls, str], Result],
        retryable: tuple[type[StorageError], ...] = RETRYABLE,
    ) -> Result:
        """Ask about one path with retries; every failure becomes an error of ours with its URL."""
        below = self._below(path)
        session = self._guard(path, self._connection.session)
        full = session.path(below)
        ask = partial(with_fresh_credentials, session.calls, lambda: call(session.calls, full))
        return self.retries.call(lambda: self._guard(path, ask), retryable=retryable)

    def _guard(self, path: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except client_errors() as error:
            secrets = self._connection.location.secrets
            raise storage_error(error, self._shown(path), secrets) from cause_of(error, secrets)


def _next_page(token: str) -> Callable[[Calls, str], Page]:
    return lambda calls, folder: calls.list_page(folder, token)


def _restore(location: Location, folder: str, reached: bool) -> FsspecStore:
    store = FsspecStore(Connection(location), folder)
    store.retries.reached = reached
    return store
