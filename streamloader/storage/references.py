"""Read-only clients of stores whose objects are ranges of other objects: kerchunk references and Icechunk repositories.

`reference://::URL` is a file of references, JSON or a Parquet folder, as kerchunk and VirtualiZarr write them. A URL in
it may be relative to the file. `icechunk://::URL` is an Icechunk repository.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from streamloader.errors import NotFoundError, StorageError, UnsupportedError
from streamloader.storage.buffers import Allocate, Body, Buffer
from streamloader.storage.generic import FsspecClient
from streamloader.storage.process import forked_after_obstore, note_obstore_use, run_all
from streamloader.storage.store import ObjectInfo, Page, RangeReader, Store, join_path
from streamloader.storage.url import Location

Result = TypeVar("Result")
OpenStore = Callable[[str, Mapping[str, Any] | None], Store]
_REPOSITORY_OPTIONS = ("branch", "tag", "snapshot_id")
_READ_ONLY = "a store of references is read only"


class ReferenceClient(FsspecClient):
    """A client of a file of references, which fsspec parses. Ranges are read by the clients of the URLs in it.

    The storage options are those of the file and of the objects that it refers to, unless there are `target_options`
    for the file and `remote_options` for the objects.
    """

    def __init__(self, location: Location, open_store: OpenStore) -> None:
        url = location.target.split("::", 1)[1]
        options = dict(location.options)
        target, remote = (options.pop(name, None) for name in ("target_options", "remote_options"))
        self._options = {**(options if remote is None else remote), "retry": location.retry}
        target = options if target is None else target
        super().__init__(None, location.retry, "")
        self._references = _read_references(url, target)
        self._folder = url.rpartition("/")[0]
        self._open_store = open_store
        self._readers: dict[str, RangeReader] = {}
        self._opening = threading.Lock()

    def get(self, path: str) -> bytes:
        """Return the object."""
        return bytes(self.get_range(path, 0, 2**62))

    def get_range(self, path: str, start: int, stop: int, allocate: Allocate | None = None) -> Buffer:
        """Return bytes [start, stop), fewer if the object ends before `stop`."""
        reference = self._reference(path)
        if isinstance(reference, bytes):
            return reference[start:stop]
        url, begin, end = reference[0], start, stop
        if len(reference) > 1:
            begin, end = reference[1] + start, reference[1] + min(stop, reference[2])
        reader, name = self._reader(url)
        try:
            return reader.read(name, begin, end, allocate)
        except NotFoundError as error:  # no missing chunk: that has no reference
            remedy = "restore it, or correct the URL in the references"
            raise StorageError(
                f"{path} is a range of {url}, which cannot be found ({error.problem})", remedy
            ) from error

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes, fewer if the object is smaller."""
        reference = self._reference(path)
        if isinstance(reference, bytes):
            return reference[-size:]
        if len(reference) == 1:
            raise UnsupportedError(f"{path} refers to a whole object", "write references with offsets and lengths")
        return bytes(self.get_range(path, max(0, reference[2] - size), reference[2]))

    def info(self, path: str) -> ObjectInfo | None:
        """Return the size of an object, or None if it does not exist."""
        try:
            reference = self._reference(path)
        except FileNotFoundError:
            return None
        size = len(reference) if isinstance(reference, bytes) else reference[2] if len(reference) > 1 else 0
        return ObjectInfo(path, size)

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly below a folder."""
        start = f"{folder}/" if folder else ""
        below = (key[len(start) :] for key in self._references if key.startswith(start))
        return list({key.partition("/")[0]: None for key in below if "/" in key})

    def put(self, path: str, data: Body) -> str:  # noqa: ARG002
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"{path}: {_READ_ONLY}", "write to a bucket or a local folder")

    create = put

    def _reference(self, path: str) -> Any:
        """Return the bytes of an object, or (URL,) or (URL, offset, size). Raises `FileNotFoundError`."""
        try:
            value = self._references[path]
        except KeyError as error:
            raise FileNotFoundError(path) from error
        if isinstance(value, str):
            return base64.b64decode(value[7:]) if value.startswith("base64:") else value.encode()
        if isinstance(value, bytes):
            return value
        if not isinstance(value[0], str):  # Parquet has NaN for a chunk that does not exist
            raise FileNotFoundError(path)
        return (value[0], *map(int, value[1:]))  # which Parquet has as numpy's

    def _reader(self, url: str) -> tuple[RangeReader, str]:
        """Return a reader of the folder of a URL, and the name of the object in it."""
        if "://" not in url and not url.startswith("/"):
            url = join_path(self._folder, url)
        folder, _, name = url.rpartition("/")
        with self._opening:
            if folder not in self._readers:
                self._readers[folder] = self._open_store(folder or "/", self._options).reader()
            return self._readers[folder], name


def _read_references(url: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the references of a JSON file, or of a Parquet folder, whose parts are read when they are needed."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.reference import LazyReferenceMapper, ReferenceFileSystem

    if url.endswith(".json"):
        # it is only used to parse the file, so its remote filesystem does not matter
        parsed = ReferenceFileSystem(url, target_options=options, remote_protocol="memory", skip_instance_cache=True)
        return parsed.references  # type: ignore[no-any-return]
    fs, path = url_to_fs(url, **options)
    return LazyReferenceMapper(path, fs=fs, engine="pyarrow")  # type: ignore[no-any-return]


class IcechunkClient(FsspecClient):
    """A client of one snapshot of an Icechunk repository, by the package of that name, which reads its chunks.

    The storage options `branch`, `tag` or `snapshot_id` choose the snapshot, the branch `main` by default; the others
    are those of icechunk's storage.
    """

    def __init__(self, location: Location) -> None:
        if forked_after_obstore():  # its runtime is like that of obstore
            problem = f"{location.shown}: this process was forked after an Icechunk repository was used"
            raise UnsupportedError(problem, "start processes with forkserver or spawn")
        icechunk = importlib.import_module("icechunk")
        super().__init__(None, location.retry, "")
        chosen = {name: value for name, value in location.options.items() if name in _REPOSITORY_OPTIONS}
        repository = icechunk.Repository.open(_icechunk_storage(icechunk, location))
        session = repository.readonly_session(**(chosen or {"branch": "main"}))
        note_obstore_use()
        self._store = session.store

    def get(self, path: str) -> bytes:
        """Return the object."""
        return self._read(path, None)

    def get_range(self, path: str, start: int, stop: int, allocate: Allocate | None = None) -> Buffer:  # noqa: ARG002
        """Return bytes [start, stop), fewer if the object ends before `stop`."""
        return self._read(path, None)[:stop] if start == 0 else self._read(path, (start, stop))

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes, fewer if the object is smaller."""
        return self._read(path, None)[-size:]

    def info(self, path: str) -> ObjectInfo | None:
        """Return the size of an object, or None if it does not exist."""
        try:
            return ObjectInfo(path, _run(self._store.getsize(path)))
        except FileNotFoundError:
            return None

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly below a folder."""

        async def collect() -> list[str]:
            return [name async for name in self._store.list_dir(folder)]

        return [name for name in _run(collect()) if name != "zarr.json"]

    def list_page(self, folder: str, token: str | None) -> Page:  # noqa: ARG002
        """Raise `UnsupportedError`: chunks are not listed."""
        raise UnsupportedError(f"{folder}: the chunks of a repository are not listed", "read its arrays")

    def put(self, path: str, data: Body) -> str:  # noqa: ARG002
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"{path}: {_READ_ONLY}", "write it by icechunk")

    create = put

    def _read(self, path: str, byte_range: tuple[int, int] | None) -> bytes:
        from zarr.abc.store import RangeByteRequest
        from zarr.core.buffer import default_buffer_prototype

        requested = None if byte_range is None else RangeByteRequest(*byte_range)

        async def read() -> Any:
            return await self._store.get(path, default_buffer_prototype(), requested)

        buffer = _run(read())
        if buffer is None:
            raise FileNotFoundError(path)
        return bytes(buffer.to_bytes())


def _run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine, in a thread if a loop runs in this one, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return run_all(asyncio.run, [coroutine], 2)[0]


def _icechunk_storage(icechunk: Any, location: Location) -> Any:
    """Return icechunk's storage of a URL. Raises `UnsupportedError` for another protocol, TypeError for an option."""
    options = {name: value for name, value in location.options.items() if name not in _REPOSITORY_OPTIONS}
    url = location.target.split("::", 1)[1]
    protocol, _, path = url.rpartition("://")
    if protocol in ("", "file", "local"):
        return icechunk.local_filesystem_storage(path, **options)
    bucket, _, prefix = path.partition("/")
    if protocol in ("s3", "s3a"):
        names = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token", "anon": "anonymous"}
        options = {names.get(name, name): value for name, value in options.items()}
        if str(options.get("endpoint_url", "")).startswith("http://"):
            options = {"allow_http": True, "force_path_style": True, **options}
        if "access_key_id" not in options and "anonymous" not in options:
            options["from_env"] = True
        return icechunk.s3_storage(bucket=bucket, prefix=prefix, **options)
    if protocol in ("gs", "gcs"):
        return icechunk.gcs_storage(bucket=bucket, prefix=prefix, **options)
    problem = f"{location.shown}: the protocol {protocol!r} of an Icechunk repository"
    raise UnsupportedError(problem, "use s3, gs or a local folder")
