"""What a store can be asked, in terms of one fsspec filesystem; raises the client's own exceptions.

`PlainCalls` works with every filesystem. `LocalCalls` and `HttpCalls` (here) and `S3Calls` replace what a
protocol does better or not at all. Paths are the filesystem's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from streamloader.errors import UnsupportedError
from streamloader.options import RetryPolicy
from streamloader.storage.failures import EXPIRED, HttpError, beyond_the_end, check_range, client_errors, facts_of
from streamloader.storage.location import redact
from streamloader.storage.policy import Progress
from streamloader.storage.protocol import Body, Buffer, ObjectInfo, buffers_of

Result = TypeVar("Result")

UNKNOWN_BYTES = 64 << 20  # what a whole object is taken for where its size is not known
TEMPORARY_SUFFIX = ".streamloader-tmp"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # exFAT, SMB and some FUSE have no hard links


class Page(NamedTuple):
    """Some objects of a listing, and what to ask for the next ones (empty: these were the last)."""

    objects: Sequence[ObjectInfo]
    token: str


class Calls(Protocol):
    """The questions that `FsspecStore` asks."""

    def get(self, path: str) -> bytes: ...
    def get_range(self, path: str, start: int, stop: int) -> bytes: ...
    def get_tail(self, path: str, size: int) -> bytes: ...
    def info(self, path: str) -> ObjectInfo | None: ...
    def list_page(self, folder: str, token: str) -> Page: ...
    def put(self, path: str, data: Body) -> str: ...
    def create(self, path: str, data: Buffer) -> str: ...
    def replace(self, path: str, data: Buffer, before: Buffer) -> str | None: ...
    def delete(self, paths: Sequence[str]) -> None: ...
    def remove_leftovers(self, folder: str) -> int: ...
    def renew(self) -> bool: ...


def larger_than(*bodies: Buffer) -> int:
    """Return the bytes to read of an object that is compared with these: one more than the longest has."""
    return 1 + max(memoryview(body).nbytes for body in bodies)


def with_fresh_credentials(calls: Calls, ask: Callable[[], Result]) -> Result:
    """Return what `ask` returns; where the credentials have expired, ask once more with fresh ones."""
    try:
        return ask()
    except client_errors() as error:
        if facts_of(error).code not in EXPIRED or not calls.renew():
            raise
    return ask()


class PlainCalls:
    """Any filesystem, by the interface that all share. `put` and `create` return the etag or nothing; `replace` None
    where the object is another one than it should be.
    """

    def __init__(self, fs: Any, policy: RetryPolicy) -> None:
        self.fs = fs
        self.policy = policy

    def get(self, path: str) -> bytes:
        return bytes(self._timed("cat_file", path, UNKNOWN_BYTES))

    def _timed(self, method: str, path: str, size: int, **options: Any) -> Any:
        """Ask within the time that a response of `size` bytes may take, where the filesystem can be told."""
        if method not in vars(self.fs):  # the twin that fsspec makes of an asynchronous method
            return getattr(self.fs, method)(path, **options)
        from fsspec.asyn import sync  # it is there, with the filesystem

        asked = getattr(self.fs, f"_{method}")
        return sync(self.fs.loop, asked, path, timeout=self.policy.deadline(size), **options)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self._ranged(path, start, stop)

    def get_tail(self, path: str, size: int) -> bytes:
        return self._ranged(path, -size, None)

    def info(self, path: str) -> ObjectInfo | None:
        self.fs.invalidate_cache()
        try:
            found = self._timed("info", path, 0)
        except (FileNotFoundError, NotADirectoryError) as error:
            if error.__cause__ is not None:  # fsspec's HTTP says "not found" for whatever went wrong
                raise error.__cause__ from None
            return None
        return _object_info(path, found) if found["type"] == "file" else None

    def list_page(self, folder: str, token: str) -> Page:  # noqa: ARG002 - S3 needs it
        self.fs.invalidate_cache()
        found = self.fs.find(folder, detail=True)
        objects = [_object_info(path, info) for path, info in found.items() if info["type"] == "file"]
        return Page([entry for entry in objects if entry.path.startswith(folder.rstrip("/") + "/")], "")

    def put(self, path: str, data: Body) -> str:
        return etag_of(self.fs.pipe_file(path, owned(data)))

    def create(self, path: str, data: Buffer) -> str:
        return etag_of(self.fs.pipe_file(path, owned(data), mode="create"))

    def replace(self, path: str, data: Buffer, before: Buffer) -> str | None:
        there = self.get_range(path, 0, larger_than(data, before))
        if there == data:  # a second try after a lost answer
            return ""
        return self.put(path, data) if there == before else None

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(path)

    def remove_leftovers(self, folder: str) -> int:  # noqa: ARG002 - most stores keep nothing unfinished
        return 0

    def renew(self) -> bool:
        """Fetch credentials anew; return whether that can be done."""
        return False

    def _ranged(self, path: str, start: int, stop: int | None) -> bytes:
        size = UNKNOWN_BYTES if stop is None and start >= 0 else (stop or 0) - start
        try:
            data = self._timed("cat_file", path, size, start=start, end=stop)
        except client_errors() as error:
            if not beyond_the_end(error):
                raise
            return b""
        if stop is not None and len(data) > stop - start:
            raise HttpError(200, "RangeNotSupported", f"{len(data)} bytes came for {stop - start}")
        return data  # type: ignore[no-any-return]


class MemoryCalls(PlainCalls):
    """fsspec's memory filesystem, whose check for an existing file is not atomic by itself."""

    _creating = threading.Lock()

    def create(self, path: str, data: Buffer) -> str:
        with self._creating:
            return super().create(path, data)

    def replace(self, path: str, data: Buffer, before: Buffer) -> str | None:
        with self._creating:
            return super().replace(path, data, before)


class LocalCalls(PlainCalls):
    """Local files: written beside their place under a temporary name, then renamed or linked into it."""

    def put(self, path: str, data: Body) -> str:
        temporary = _write_beside(path, data)
        try:
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return ""

    def create(self, path: str, data: Buffer) -> str:
        temporary = _write_beside(path, data)
        try:
            os.link(temporary, path)  # fails where there is a file, at once for all who try
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with Path(path).open("xb") as file:  # raises where there is one: it must not be removed below
                try:
                    file.write(data)
                    file.flush()
                except OSError:
                    Path(path).unlink(missing_ok=True)
                    raise
        finally:
            temporary.unlink(missing_ok=True)
        return ""

    def replace(self, path: str, data: Buffer, before: Buffer) -> str | None:
        folder = os.open(Path(path).parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network filesystems have no locks
                fcntl.flock(folder, fcntl.LOCK_EX)  # on the folder: no file of a lock is left by a kill
            return super().replace(path, data, before)
        finally:
            os.close(folder)

    def remove_leftovers(self, folder: str) -> int:
        leftovers = list(Path(folder).rglob(f"*{TEMPORARY_SUFFIX}"))
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)


class StreamedCalls(PlainCalls):
    """Clients whose responses are read part by part: one that is late is given up, and its range is compared."""

    def get(self, path: str) -> bytes:
        return self._asked(path, "")

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self._asked(path, f"bytes={start}-{stop - 1}")

    def get_tail(self, path: str, size: int) -> bytes:
        return self._asked(path, f"bytes=-{size}")

    def _asked(self, path: str, wanted: str) -> bytes:
        from fsspec.asyn import sync  # it is there, with the filesystem

        try:
            return bytes(sync(self.fs.loop, self._partial, path, wanted))
        except client_errors() as error:
            if not wanted or not beyond_the_end(error):
                raise
            return b""

    async def _partial(self, path: str, wanted: str) -> bytes:
        """Return the bytes of a `Range`, or all where `wanted` is empty."""
        raise NotImplementedError

    @staticmethod
    async def _collect(read: Callable[[], Awaitable[bytes]], progress: Progress, limit: asyncio.Timeout) -> bytes:
        """Return what `read` returns until that is nothing, as long as it comes in time."""
        parts: list[bytes] = []
        while part := await read():
            progress.received(len(part))
            limit.reschedule(asyncio.get_running_loop().time() + progress.seconds_left())
            parts.append(part)
        return b"".join(parts)


class HttpCalls(StreamedCalls):
    """Plain HTTP servers: they are read only, and a range that they ignore is noticed."""

    def info(self, path: str) -> ObjectInfo | None:
        try:
            return super().info(path)
        except client_errors() as error:
            if facts_of(error).status == 404:
                return None
            raise

    def list_page(self, folder: str, token: str) -> Page:  # noqa: ARG002
        found = self.fs.find(folder + "/", detail=False)
        entries = [self.info(path) for path in found if path.startswith(folder + "/")]
        return Page([entry for entry in entries if entry is not None], "")

    def put(self, path: str, data: Body) -> str:  # noqa: ARG002
        raise _read_only(path)

    def create(self, path: str, data: Buffer) -> str:  # noqa: ARG002
        raise _read_only(path)

    def delete(self, paths: Sequence[str]) -> None:
        if paths:
            raise _read_only(paths[0])

    async def _partial(self, path: str, wanted: str) -> bytes:
        options = dict(self.fs.kwargs)
        options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity"}
        if wanted:
            options["headers"]["Range"] = wanted
        session, progress = await self.fs.set_session(), Progress(self.policy)
        async with (
            asyncio.timeout(progress.seconds_left()) as limit,
            session.get(self.fs.encode_url(path), **options) as response,
        ):
            self.fs._raise_not_found_for_status(response, path)
            if wanted and response.status != 206:
                raise HttpError(200, "RangeNotSupported", f"HTTP status {response.status} for {wanted}")
            if wanted:
                check_range(wanted, response.headers.get("Content-Range"))
            return await self._collect(response.content.readany, progress, limit)


def _read_only(url: str) -> UnsupportedError:
    return UnsupportedError(f"{redact(url)}: HTTP servers are read only", "write to a bucket or a local folder")


def _write_beside(path: str, data: Body) -> Path:
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        with temporary.open("wb") as file:
            file.writelines(buffers_of(data))
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def owned(data: Body) -> bytes | bytearray:
    """Return the data as what botocore takes: one piece, and no memoryview."""
    return data if isinstance(data, bytes | bytearray) else b"".join(buffers_of(data))


def _object_info(path: str, info: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(path, int(info["size"] or 0), etag_of(info))


def etag_of(answer: Any) -> str:
    """Return the etag in what a filesystem answered, without quotes; empty where there is none."""
    if not isinstance(answer, dict):
        return ""
    return str(answer.get("ETag") or answer.get("etag") or "").strip('"')
