"""Clients of fsspec's filesystems, which raise what the filesystem raises. Paths are the filesystem's own.

`FsspecClient` works with every filesystem; the others replace what a protocol does better or not at all. S3 needs none:
see `s3.py`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from html import unescape
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any
from urllib.parse import urljoin

from fsspec.asyn import sync
from fsspec.core import url_to_fs

from streamloader.errors import UnsupportedError
from streamloader.options import RetryPolicy
from streamloader.storage.process import Owner, keep
from streamloader.storage.retry import HttpError, Progress, beyond_the_end, check_range, client_errors, facts_of
from streamloader.storage.store import (
    TEMPORARY_SUFFIX,
    Allocate,
    Body,
    Buffer,
    ObjectInfo,
    Page,
    body_bytes,
    buffers_of,
    empty_buffer,
    etag_of,
    larger_than,
)
from streamloader.storage.url import CHAIN, Location, redact

UNKNOWN_BYTES = 64 << 20  # what an object or a listing is taken for where its size is not known
SMALL_BYTES = 1 << 20  # most manifests and receipts are smaller
_LINK = re.compile(r"""<a\b[^>]*?\bhref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""", re.IGNORECASE)
_HAVE_LISTINGS_CACHE = {"gs", "az", "http"}
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # exFAT, SMB and some FUSE have no hard links


def open_fsspec_client(location: Location) -> FsspecClient:
    """Return the client of a location."""
    protocol, options = location.protocol, dict(location.options)
    if protocol != CHAIN:
        options["skip_instance_cache"] = True
    if protocol in _HAVE_LISTINGS_CACHE:
        options["use_listings_cache"] = False
    fs, root = url_to_fs(location.target, **options)
    kinds: dict[str, type[FsspecClient]] = {CHAIN: ChainClient, "file": LocalClient, "http": HttpClient}
    kinds["memory"] = MemoryClient
    client = kinds.get(protocol, FsspecClient)(fs, location.retry, root)
    if protocol != CHAIN:  # a filesystem of our own
        weakref.finalize(client, _release, Owner("sessions"), fs).atexit = False
    return client


def _release(owner: Owner, fs: Any) -> None:
    """Free a filesystem without a garbage collection, which closes its session.

    fsspec binds synchronous methods to an asynchronous filesystem, each a cycle. In a forked child, closing the session
    would remove the parent's connections from the epoll instance that both processes share.
    """
    if not owner.here:
        keep(fs)
        return
    for name, value in list(vars(fs).items()):
        if isinstance(value, FunctionType):
            delattr(fs, name)


class FsspecClient:
    """Any filesystem, by the interface that all share; `root` is its path of the store's URL.

    `put` and `create` return the etag or nothing; `replace` None where the object is another one than it should be.
    """

    def __init__(self, fs: Any, policy: RetryPolicy, root: str) -> None:
        self.fs, self.policy, self.root = fs, policy, root

    def get(self, path: str) -> bytes:
        """Return the object."""
        data = self._ranged(path, 0, SMALL_BYTES)  # which has an early deadline
        return data if len(data) != SMALL_BYTES else bytes(self._timed("cat_file", path, UNKNOWN_BYTES))

    def _timed(self, method: str, path: str, size: int, **options: Any) -> Any:
        """Ask within the time that a response of `size` bytes may take, where the filesystem takes a timeout."""
        if method not in vars(self.fs):  # the twin that fsspec makes of an asynchronous method
            return getattr(self.fs, method)(path, **options)
        asked = getattr(self.fs, f"_{method}")
        return sync(self.fs.loop, asked, path, timeout=self.policy.deadline(size), **options)

    def get_range(self, path: str, start: int, stop: int, allocate: Allocate | None = None) -> Buffer:  # noqa: ARG002 - the client makes bodies of its own
        """Return bytes [start, stop), fewer where the object ends before."""
        data = self._ranged(path, start, stop)
        if len(data) > stop - start:
            raise HttpError(200, "RangeNotSupported", f"received {len(data)} bytes for a range of {stop - start}")
        return data

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last bytes."""
        return self._ranged(path, -size, None)

    def _ranged(self, path: str, start: int, stop: int | None) -> bytes:
        try:
            return self._cat(path, start, stop)
        except client_errors() as error:
            if not beyond_the_end(error):
                raise
            return b""

    def _cat(self, path: str, start: int, stop: int | None) -> bytes:
        return self._timed("cat_file", path, (stop or 0) - start, start=start, end=stop)  # type: ignore[no-any-return]

    def info(self, path: str) -> ObjectInfo | None:
        """Return size and etag of an object, None where there is none."""
        self.fs.invalidate_cache()
        try:
            found = self._timed("info", path, 0)
        except (FileNotFoundError, NotADirectoryError) as error:
            # fsspec's HTTP raises it whatever went wrong
            if error.__cause__ is not None and facts_of(error).status != 404:
                raise error.__cause__ from None
            return None
        return _object_info(path, found) if found["type"] == "file" else None

    def list_page(self, folder: str, token: str | None) -> Page:  # noqa: ARG002 - S3 needs it
        """Return objects below a folder, and the token of the next page."""
        self.fs.invalidate_cache()
        found = self._timed("find", folder, UNKNOWN_BYTES, detail=True)
        objects = [_object_info(path, info) for path, info in found.items() if info["type"] == "file"]
        return [entry for entry in objects if entry.path.startswith(folder.rstrip("/") + "/")], None

    def put(self, path: str, data: Body) -> str:
        """Write the object and return its etag."""
        return etag_of(self._timed("pipe_file", path, body_bytes(data), value=_joined(data)))

    def create(self, path: str, data: Buffer) -> str:
        """Write the object where there is none."""
        with self._lock(path):
            return etag_of(self._timed("pipe_file", path, body_bytes(data), value=_joined(data), mode="create"))

    def replace(self, path: str, data: Buffer, before: Buffer) -> str | None:
        """Write the object where it is `before`."""
        with self._lock(path):
            there = self.get_range(path, 0, larger_than(data, before))
            if there == data:  # a second try after a lost response
                return ""
            return self.put(path, data) if there == before else None

    def _lock(self, path: str) -> AbstractContextManager[Any]:  # noqa: ARG002 - most stores have none
        """Return what only one writer at a time can enter."""
        return nullcontext()

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the objects, and ignore those that are not there."""
        for path in paths:
            with suppress(FileNotFoundError):
                self._timed("rm_file", path, 0)

    def remove_leftovers(self, folder: str) -> int:  # noqa: ARG002 - most stores keep nothing unfinished
        """Remove what killed writers left below a folder; return how many."""
        return 0


class ChainClient(FsspecClient):
    """Chained filesystems, of which simplecache returns a file to one thread while it downloads it for another."""

    def __init__(self, fs: Any, policy: RetryPolicy, root: str) -> None:
        super().__init__(fs, policy, root)
        self._reading: dict[str, threading.Lock] = {}

    def _cat(self, path: str, start: int, stop: int | None) -> bytes:
        with self._reading.setdefault(path, threading.Lock()):
            if start >= 0:
                return super()._cat(path, start, stop)
            with self.fs.open(path, "rb") as file:  # cat_file asks for the size of a file, which some do not have
                file.seek(max(0, file.seek(0, os.SEEK_END) + start))
                return bytes(file.read())


class MemoryClient(FsspecClient):
    """fsspec's memory filesystem, whose check for an existing file is not atomic by itself."""

    _writing = threading.Lock()

    def _lock(self, path: str) -> AbstractContextManager[Any]:  # noqa: ARG002
        return self._writing


class LocalClient(FsspecClient):
    """Local files: written beside their place under a temporary name, then renamed or linked into it."""

    def get_range(self, path: str, start: int, stop: int, allocate: Allocate | None = None) -> memoryview:
        """Return bytes [start, stop), fewer where the object ends before."""
        count = 0
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            there = min(stop, os.fstat(file).st_size)  # the object may end before
            body = (allocate or empty_buffer)(max(0, there - start))
            while count < len(body) and (more := os.preadv(file, [body[count:]], start + count)):
                count += more
        finally:
            os.close(file)
        return body[:count]

    def put(self, path: str, data: Body) -> str:
        """Write the object and return its etag."""
        with _written_beside(path, data) as temporary:
            try:
                temporary.replace(path)
            except IsADirectoryError:  # empty, where the objects in it were deleted: buckets have no such folders
                for folder, _, _ in os.walk(path, topdown=False):
                    Path(folder).rmdir()
                temporary.replace(path)
        return ""

    def create(self, path: str, data: Buffer) -> str:
        """Write the object where there is none."""
        with _written_beside(path, data) as temporary:
            try:
                os.link(temporary, path)  # fails where there is a file, at once for all who try
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                Path(path).touch(exist_ok=False)
                temporary.replace(path)
        return ""

    @contextmanager
    def _lock(self, path: str) -> Iterator[None]:
        folder = os.open(Path(path).parent, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network filesystems have no locks
                fcntl.flock(folder, fcntl.LOCK_EX)  # on the folder: no file of a lock is left by a kill
            yield
        finally:
            os.close(folder)

    def remove_leftovers(self, folder: str) -> int:
        """Remove what killed writers left below a folder; return how many."""
        leftovers = list(Path(folder).rglob(f"*{TEMPORARY_SUFFIX}"))
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)


@contextmanager
def _written_beside(path: str, data: Body) -> Iterator[Path]:
    """Write the data to a temporary file in the folder of `path`, which is removed at the end if it is still there."""
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        with temporary.open("wb") as file:
            file.writelines(buffers_of(data))
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


class HttpClient(FsspecClient):
    """Plain HTTP servers: they are read only, a range that they ignore is noticed, and so is a late response."""

    def __init__(self, fs: Any, policy: RetryPolicy, root: str) -> None:
        """Raise TypeError for an option that a request does not have."""
        from aiohttp import ClientSession

        signature(ClientSession._request).bind(None, "GET", "", **fs.kwargs)
        super().__init__(fs, policy, root)

    def get(self, path: str) -> bytes:
        """Return the object."""
        return bytes(sync(self.fs.loop, self._read, path, ""))

    def _cat(self, path: str, start: int, stop: int | None) -> bytes:
        wanted = f"bytes={start}" if stop is None else f"bytes={start}-{stop - 1}"
        return bytes(sync(self.fs.loop, self._read, path, wanted))

    async def _read(self, path: str, wanted: str) -> bytes:
        """Return the bytes of a `Range`, or all where `wanted` is empty, as long as they come in time."""
        options = dict(self.fs.kwargs)
        ranged = {"Range": wanted} if wanted else {}
        options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity", **ranged}
        session, progress, parts = await self.fs.set_session(), Progress(self.policy), []
        async with (
            asyncio.timeout(progress.seconds_left()) as limit,
            session.get(self.fs.encode_url(path), **options) as response,
        ):
            self.fs._raise_not_found_for_status(response, path)
            if wanted and response.status != 206:
                raise HttpError(200, "RangeNotSupported", f"HTTP status {response.status} for {wanted}")
            if wanted:
                check_range(wanted, response.headers.get("Content-Range"))
            while part := await response.content.readany():
                progress.received(len(part))
                limit.reschedule(asyncio.get_running_loop().time() + progress.seconds_left())
                parts.append(part)
            return b"".join(parts)

    def list_page(self, folder: str, token: str | None) -> Page:  # noqa: ARG002
        """Return what the index pages of a folder link to, by a request for each page and each file.

        fsspec's own listing has no deadline, and leaves out folders that fail.
        """
        pages, files = [folder + "/"], list[str]()
        while pages:
            page = pages.pop()
            with suppress(FileNotFoundError):
                for url in links_below(page, self.get(page)):
                    (pages if url.endswith("/") else files).append(url)
        return [entry for entry in map(self.info, files) if entry is not None], None

    def put(self, path: str, data: Body) -> str:  # noqa: ARG002
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"{redact(path)}: HTTP servers are read only", "write to a bucket or a local folder")

    create = put

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the objects, and ignore those that are not there."""
        self.put(paths[0], b"")


def links_below(page: str, html: bytes) -> list[str]:
    """Return the URLs below an index page that it links to, sorted; those with a query or fragment are not objects."""
    links = _LINK.findall(html.decode("utf-8", "replace"))
    urls = {urljoin(page, unescape("".join(link))) for link in links}
    return sorted(url for url in urls if url.startswith(page) and url != page and not set("?#") & set(url))


def _joined(data: Body) -> bytes | bytearray:
    return data if isinstance(data, bytes | bytearray) else b"".join(buffers_of(data))


def _object_info(path: str, info: dict[str, Any]) -> ObjectInfo:
    etag = etag_of(info) or str(info.get("Last-Modified", ""))  # some web servers send no etag
    return ObjectInfo(path, int(info["size"] or 0), etag)
