"""Clients over fsspec's filesystems. They take the filesystem's own paths and do not translate its exceptions.

`FsspecClient` works with every filesystem; its subclasses replace methods for one protocol. S3 has a client of its own
in `s3.py`.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from html import unescape
from inspect import iscoroutinefunction, signature
from itertools import starmap
from pathlib import Path
from types import FunctionType
from typing import Any
from urllib.parse import quote, urljoin

from fsspec.asyn import sync
from fsspec.core import url_to_fs

from streamloader.errors import AccessError
from streamloader.options import RetryPolicy
from streamloader.storage.buffers import RECEIVER, Body, Buffer, Receiver, body_bytes, buffers_of
from streamloader.storage.objects import TEMPORARY_SUFFIX, ObjectInfo, Page, etag_of
from streamloader.storage.process import Finalizer
from streamloader.storage.retry import HttpError, Patience, Progress, check_range, client_errors, facts_of, is_past_end
from streamloader.storage.url import CHAIN, Location, redact

if sys.platform != "win32":
    import fcntl

# Metadata services of AWS (IPv6), Alibaba, Oracle and Azure, whose addresses are not link-local
METADATA_ADDRESSES = ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16")
UNKNOWN_BYTES = 64 << 20  # the assumed size of an object or a listing of unknown size
SMALL_BYTES = 1 << 20  # most manifests and receipts are smaller
_LINK = re.compile(r"""<a\b[^>]*?\bhref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""", re.IGNORECASE)
# Where Windows refuses to replace a file, since a reader has it open: seconds until it is tried again
_REPLACED_AGAIN = (0.01, 0.1, 1.0) if sys.platform == "win32" else ()
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # exFAT, SMB and some FUSE have no hard links


def open_fsspec_client(location: Location) -> FsspecClient:
    """Return the client of a location."""
    protocol, options = location.protocol, dict(location.options)
    if protocol != CHAIN:
        options["skip_instance_cache"] = True
    if protocol in ("gs", "az", "http"):  # the filesystems with a listings cache
        options["use_listings_cache"] = False
    if protocol == "http":
        options = checked_redirects(options, same_host=False)
    fs, root = url_to_fs(location.target, **options)
    client = _CLIENTS.get(protocol, FsspecClient)(fs, location.retry, root or fs.root_marker)
    if protocol != CHAIN:  # a filesystem of our own
        Finalizer(client, _release, fs).atexit = False
    return client


def _release(fs: Any) -> None:
    """Free a filesystem without a garbage collection, which closes its session.

    fsspec binds synchronous methods to an asynchronous filesystem, each a cycle. In a forked child, `Finalizer` keeps
    it: closing the session would remove the parent's connections from the epoll instance that both processes share.
    """
    for name, value in list(vars(fs).items()):
        if isinstance(value, FunctionType):
            delattr(fs, name)


class FsspecClient:
    """A `Client` of any filesystem."""

    def __init__(self, fs: Any, policy: RetryPolicy, root: str) -> None:
        self.fs, self.policy, self.root = fs, policy, root

    def get(self, path: str) -> bytes:
        """Return the object."""
        data = self._read_range(path, 0, SMALL_BYTES)  # most objects, with a short deadline
        return data if len(data) != SMALL_BYTES else bytes(self._timed("cat_file", path, UNKNOWN_BYTES))

    def _timed(self, method: str, path: str, size: int, *values: Any, **options: Any) -> Any:
        """Call a method with the deadline of a response of `size` bytes, if the filesystem is asynchronous.

        `values` have other names in some filesystems.
        """
        coroutine = getattr(self.fs, f"_{method}", None)
        # fsspec sets a blocking copy of each asynchronous method, and a cache shows those of the class below it
        if method not in vars(self.fs) or not iscoroutinefunction(coroutine):
            return getattr(self.fs, method)(path, *values, **options)
        return sync(self.fs.loop, coroutine, path, *values, timeout=self.policy.deadline(size), **options)

    def get_range(self, path: str, start: int, stop: int, receiver: Receiver = RECEIVER) -> Buffer:
        """Return bytes [start, stop), fewer if the object ends before `stop`."""
        data = self._read_range(path, start, stop, receiver)
        if len(data) > stop - start:
            raise HttpError(200, "RangeNotSupported", f"received {len(data)} bytes for a range of {stop - start}")
        return data

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes, fewer if the object is smaller."""
        data = self._read_range(path, -size, None)
        if len(data) > size:
            raise HttpError(200, "RangeNotSupported", f"received {len(data)} bytes for the last {size}")
        return data

    def _read_range(self, path: str, start: int, stop: int | None, receiver: Receiver = RECEIVER) -> bytes:
        try:
            return self._cat(path, start, stop, receiver)
        except client_errors() as error:
            if not is_past_end(error):
                raise
            return b""

    def _cat(self, path: str, start: int, stop: int | None, _receiver: Receiver) -> bytes:
        return self._timed("cat_file", path, (stop or 0) - start, start=start, end=stop)  # type: ignore[no-any-return]

    def info(self, path: str) -> ObjectInfo | None:
        """Return size and etag of an object, or None if it does not exist."""
        info = self._info(path)
        return None if info is None else _object_info(path, info)

    def modified(self, path: str) -> datetime | None:
        """Return when the object was last written, or None if it does not exist or the filesystem does not tell."""
        info = self._info(path) or {}
        times = (info.get(key) for key in ("mtime", "last_modified", "Last-Modified", "created"))
        time = next((time for time in times if time), None)
        if isinstance(time, str):  # of a web server
            time = parsedate_to_datetime(time)
        return datetime.fromtimestamp(time, UTC) if isinstance(time, int | float) else time

    def _info(self, path: str) -> dict[str, Any] | None:
        """Return what fsspec knows about an object, or None if it does not exist."""
        self.fs.invalidate_cache()
        try:
            info = self._timed("info", path, 0)
        except (FileNotFoundError, NotADirectoryError) as error:
            # fsspec's HTTP raises it for every failure
            if error.__cause__ is not None and facts_of(error).status != 404:
                raise error.__cause__ from None
            return None
        return info if info["type"] == "file" else None

    def _found(self, path: str) -> dict[str, Any]:
        """Return what fsspec knows about an object. Raises FileNotFoundError if it does not exist."""
        info = self._info(path)
        if info is None:
            raise FileNotFoundError(path)
        return info

    def list_page(self, folder: str, token: str | None) -> Page:  # noqa: ARG002 - only S3 has pages
        """Return the objects below a folder, and no token of another page."""
        self.fs.invalidate_cache()
        infos = self._timed("find", folder, UNKNOWN_BYTES, detail=True)
        infos = infos if isinstance(infos, dict) else {}  # adlfs returns a list if there is no folder
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        files = {path: info for path, info in infos.items() if info["type"] == "file" and path.startswith(prefix)}
        return list(starmap(_object_info, files.items())), None

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly below a folder."""
        self.fs.invalidate_cache()
        infos = self._timed("ls", folder, UNKNOWN_BYTES, detail=True)
        return [info["name"].rstrip("/").rpartition("/")[2] for info in infos if info["type"] == "directory"]

    def put(self, path: str, data: Body) -> str:
        """Write the object and return its etag."""
        return etag_of(self._timed("pipe_file", path, body_bytes(data), _joined(data)))

    def create(self, path: str, data: Buffer) -> str:
        """Write the object; raises FileExistsError if it exists."""
        with self._lock(path):
            return etag_of(self._timed("pipe_file", path, body_bytes(data), _joined(data), mode="create"))

    def replace(self, path: str, data: Buffer, before: Buffer) -> str | bytes:
        """Write the object if its content is `before`; if not, return what it has, as much as tells."""
        size = max(body_bytes(data), body_bytes(before)) + 1  # notices a longer object
        with self._lock(path):
            write = self._write_over(path)
            current = self.get_range(path, 0, size)
            if current == data:  # a retry after a lost response
                return ""
            if current != before:
                return bytes(current)
            try:
                return write(data)
            except client_errors() as error:
                if facts_of(error).status != 412 and not isinstance(error, FileExistsError):
                    raise
            current = self.get_range(path, 0, size)  # another writer's, or ours after a lost response
            return "" if current == data else bytes(current)

    def _write_over(self, path: str) -> Callable[[Buffer], str]:
        """Return what writes the object: on stores with conditions, only if nobody has written it since this call."""
        return partial(self.put, path)

    def _lock(self, path: str) -> AbstractContextManager[Any]:  # noqa: ARG002 - most stores have no locks
        """Return a lock for one writer of the object at a time."""
        return nullcontext()

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the objects, and ignore those that do not exist."""
        for path in paths:
            with suppress(FileNotFoundError):
                self._timed("rm_file", path, 0)

    def remove_leftovers(self, folder: str) -> int:  # noqa: ARG002 - most stores keep no partial writes
        """Remove the temporary files of killed writers below a folder, and return their number."""
        return 0


class ChainClient(FsspecClient):
    """Chained filesystems. Reads of a file are serial: simplecache opens one that another thread still downloads."""

    def __init__(self, fs: Any, policy: RetryPolicy, root: str) -> None:
        super().__init__(fs, policy, root)
        self._reading: dict[str, threading.Lock] = {}

    def _cat(self, path: str, start: int, stop: int | None, receiver: Receiver) -> bytes:
        with self._reading.setdefault(path, threading.Lock()):
            if start >= 0:
                return super()._cat(path, start, stop, receiver)
            with self.fs.open(path, "rb") as file:  # cat_file needs the attribute size of a file, which some lack
                file.seek(max(0, file.seek(0, os.SEEK_END) + start))
                return bytes(file.read())


class AzureClient(FsspecClient):
    """adlfs, which reads no tails, and of an empty object no range."""

    def _write_over(self, path: str) -> Callable[[Buffer], str]:
        from azure.core import MatchConditions

        condition = {"etag": f'"{etag_of(self._found(path))}"', "match_condition": MatchConditions.IfNotModified}
        return lambda data: etag_of(self._timed("pipe_file", path, body_bytes(data), _joined(data), **condition))

    def _cat(self, path: str, start: int, stop: int | None, receiver: Receiver) -> bytes:
        if stop is None:
            size = _object_info(path, self._found(path)).size
            start, stop = max(0, size + start), size
        try:
            return super()._cat(path, start, stop, receiver)
        except ValueError:
            info = self.info(path)
            if info is None or info.size:
                raise
            return b""


class GoogleClient(FsspecClient):
    """gcsfs, whose writes have no condition but that there is no object."""

    def _write_over(self, path: str) -> Callable[[Buffer], str]:
        generation = self._found(path)["generation"]
        seconds = self.policy.deadline
        return lambda data: etag_of(
            sync(self.fs.loop, self._upload, path, data, generation, timeout=seconds(body_bytes(data)))
        )

    async def _upload(self, path: str, data: Buffer, generation: str) -> Any:
        """Write the object if its generation is that one.

        Source: https://docs.cloud.google.com/storage/docs/json_api/v1/objects/insert
        """
        bucket, name, _ = self.fs.split_path(path)
        url = f"{self.fs.base.removesuffix('storage/v1/')}upload/storage/v1/b/{quote(bucket)}/o"
        edge = uuid.uuid4().hex
        parts = (("application/json", json.dumps({"name": name}).encode()), ("application/octet-stream", _joined(data)))
        body = b"".join(f"--{edge}\r\nContent-Type: {kind}\r\n\r\n".encode() + part + b"\r\n" for kind, part in parts)
        return await self.fs._call(
            "POST",
            url,
            headers={"Content-Type": f"multipart/related; boundary={edge}"},
            data=body + f"--{edge}--".encode(),
            json_out=True,
            ifGenerationMatch=generation,
            uploadType="multipart",
        )


class MemoryClient(FsspecClient):
    """fsspec's memory filesystem, whose check for an existing file is not atomic."""

    _writing = threading.Lock()

    def _lock(self, path: str) -> AbstractContextManager[Any]:  # noqa: ARG002
        return self._writing


class LocalClient(FsspecClient):
    """Local files, which are written under a temporary name in the same folder, then renamed or linked."""

    _writing = threading.Lock()

    def get_range(self, path: str, start: int, stop: int, receiver: Receiver = RECEIVER) -> memoryview:
        """Return bytes [start, stop), fewer if the file ends before `stop`; in `receiver.allocate(size)`."""
        count = 0
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            body = receiver.allocate(max(0, min(stop, os.fstat(file.fileno()).st_size) - start))
            if len(body):
                file.seek(start)
            while count < len(body) and (size := file.readinto(body[count:])):
                count += size
        return body[:count]

    def put(self, path: str, data: Body) -> str:
        """Write the file."""
        with _written_beside(path, data) as temporary:
            if Path(path).is_dir():  # left empty by deleted objects: buckets have no folders
                for folder, _, _ in os.walk(path, topdown=False):
                    Path(folder).rmdir()
            _move(temporary, path)
        return ""

    def create(self, path: str, data: Buffer) -> str:
        """Write the object; raises FileExistsError if it exists."""
        with _written_beside(path, data) as temporary:
            try:
                os.link(temporary, path)  # atomic, and fails if the file exists
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                Path(path).touch(exist_ok=False)
                _move(temporary, path)
        return ""

    @contextmanager
    def _lock(self, path: str) -> Iterator[None]:
        if sys.platform == "win32":  # no folder can be opened, so other processes are not locked out
            with self._writing:
                yield
        else:
            folder = os.open(Path(path).parent, os.O_RDONLY)
            try:
                with suppress(OSError):  # some network filesystems have no locks
                    fcntl.flock(folder, fcntl.LOCK_EX)  # on the folder, so that a kill leaves no lock file
                yield
            finally:
                os.close(folder)

    def remove_leftovers(self, folder: str) -> int:
        """Remove the temporary files of killed writers below a folder, and return their number."""
        leftovers = list(Path(folder).rglob(f"*{TEMPORARY_SUFFIX}"))
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe without waiting for who writes to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _move(temporary: Path, path: str) -> None:
    """Replace a file by a complete one."""
    for seconds in _REPLACED_AGAIN:
        with suppress(PermissionError):
            temporary.replace(path)
            return
        time.sleep(seconds)
    temporary.replace(path)


@contextmanager
def _written_beside(path: str, data: Body) -> Iterator[Path]:
    """Write the data to a temporary file in the folder of `path`, which is removed unless the block moves it."""
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
    """Plain HTTP servers, which are read only. An ignored range and a late response are errors."""

    def __init__(self, fs: Any, policy: RetryPolicy, root: str) -> None:
        """Raise TypeError for an option that is not an argument of a request."""
        from aiohttp import ClientSession

        signature(ClientSession._request).bind(None, "GET", "", **fs.kwargs)
        super().__init__(fs, policy, root)
        self._patience = Patience(policy)

    def get(self, path: str) -> bytes:
        """Return the object."""
        return self._patience.call(lambda seconds: self._read(path, "", seconds))

    def _cat(self, path: str, start: int, stop: int | None, receiver: Receiver) -> bytes:
        byte_range = f"bytes={start}" if stop is None else f"bytes={start}-{stop - 1}"
        return self._patience.call(lambda seconds: self._read(path, byte_range, seconds), receiver)

    def _read(self, path: str, byte_range: str, seconds: float) -> bytes:
        return bytes(sync(self.fs.loop, self._read_async, path, byte_range, seconds))

    async def _read_async(self, path: str, byte_range: str, seconds: float) -> bytes:
        """Return the bytes of a `Range`, or the object if `byte_range` is empty. Raises `TimeoutError`."""
        options = dict(self.fs.kwargs)
        headers = {"Accept-Encoding": "identity", **({"Range": byte_range} if byte_range else {})}
        options["headers"] = {**options.get("headers", {}), **headers}
        session, progress, parts = await self.fs.set_session(), Progress(self.policy, seconds=seconds), []
        begin = time.monotonic()
        async with (
            asyncio.timeout(progress.seconds_left()) as limit,
            session.get(self.fs.encode_url(path), **options) as response,
        ):
            self._patience.began(time.monotonic() - begin)
            self.fs._raise_not_found_for_status(response, path)
            if byte_range and response.status != 206:
                raise HttpError(200, "RangeNotSupported", f"HTTP status {response.status} for {byte_range}")
            if byte_range:
                check_range(byte_range, response.headers.get("Content-Range"), response.content_length)
            while part := await response.content.readany():
                progress.received(len(part))
                limit.reschedule(asyncio.get_running_loop().time() + progress.seconds_left())
                parts.append(part)
            return b"".join(parts)

    def list_page(self, folder: str, token: str | None) -> Page:  # noqa: ARG002
        """Return the files that the index pages of a folder link to, with a request for each page and each file.

        fsspec's own listing has no deadline, and omits folders whose requests fail.
        """
        pages, files = [folder + "/"], list[str]()
        while pages:
            page = pages.pop()
            with suppress(FileNotFoundError):
                for url in _links_below(page, self.get(page)):
                    (pages if url.endswith("/") else files).append(url)
        return [info for info in map(self.info, files) if info is not None], None


def is_cloud_service(host: str) -> bool:
    """Return whether a host may have the address of a cloud's metadata service, or is link-local: also if unknown.

    Raises `HttpError` while no resolver answers.
    """
    try:
        found = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(host, None)]
    except (OSError, ValueError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            raise HttpError(0, "Unreachable", f"{host}: {error}") from error
        return True
    addresses = [getattr(each, "ipv4_mapped", None) or each for each in found]
    return any(each.is_link_local or str(each) in METADATA_ADDRESSES for each in addresses)


def checked_redirects(options: Mapping[str, Any], *, same_host: bool) -> dict[str, Any]:
    """Return options of fsspec's HTTP with which a redirect to a metadata service or from https to http is an error.

    With `same_host`, so is one to another scheme, host or port, since clients send headers of the user to the host of a
    redirect too: obstore has no such option, and is not used then. The error is an `AccessError`.
    """
    import aiohttp
    from yarl import URL

    async def check(_session: Any, _context: Any, request: aiohttp.TraceRequestRedirectParams) -> None:
        headers = request.response.headers
        try:
            target = request.url.join(URL(headers.get("Location") or headers.get("URI") or ""))
            if target.origin() == request.url.origin():
                return
            downgraded = (request.url.scheme, target.scheme) == ("https", "http")
        except ValueError:
            target, downgraded = URL(), True
        if not (same_host or downgraded or await asyncio.to_thread(is_cloud_service, target.host or "")):
            return
        request.response.close()
        problem = f"{redact(str(request.url))} redirects to another host, {redact(str(target))!r}"
        raise AccessError(problem, "if you trust that, give its URL instead of the one that redirects")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check)
    client = dict(options.get("client_kwargs") or {})
    return {**options, "client_kwargs": {**client, "trace_configs": [*client.get("trace_configs", ()), trace]}}


_CLIENTS = {
    CHAIN: ChainClient,
    "az": AzureClient,
    "file": LocalClient,
    "gs": GoogleClient,
    "http": HttpClient,
    "memory": MemoryClient,
}


def _links_below(page: str, html: bytes) -> list[str]:
    """Return the linked URLs below an index page, sorted, without those that have a query or a fragment."""
    urls = {urljoin(page, unescape("".join(link))) for link in _LINK.findall(html.decode("utf-8", "replace"))}
    return sorted(url for url in urls if url.startswith(page) and url != page and not set("?#") & set(url))


def _joined(data: Body) -> bytes:
    """Return the body as bytes: adlfs writes nothing else."""
    return data if isinstance(data, bytes) else b"".join(buffers_of(data))


def _object_info(path: str, info: dict[str, Any]) -> ObjectInfo:
    etag = etag_of(info) or str(info.get("Last-Modified", ""))  # some web servers send no etag
    return ObjectInfo(path, int(info["size"] or 0), etag)
