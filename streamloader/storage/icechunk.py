"""Read-only client of Icechunk repositories: `icechunk://::URL`, read by the package of that name."""

import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fsspec.asyn import get_loop, sync

from streamloader.errors import AccessError, UnsupportedError
from streamloader.storage.buffers import RECEIVER, Buffer, Receiver
from streamloader.storage.objects import ObjectInfo, ReadOnlyClient
from streamloader.storage.optional import need
from streamloader.storage.process import finished_before_exit, forked_after_obstore, note_obstore_use
from streamloader.storage.retry import client_errors
from streamloader.storage.url import ALIASES, Location

_SNAPSHOT_OPTIONS = ("branch", "tag", "snapshot_id")


class IcechunkClient(ReadOnlyClient):
    """A client of one snapshot of an Icechunk repository, by the package of that name, which reads its chunks.

    The storage options `branch`, `tag` or `snapshot_id` choose the snapshot, the branch `main` by default; the others
    are those of icechunk's storage. Chunks in other objects are read below the URLs in `authorize_virtual_chunk_access`
    and `credentials` only, anonymously (Azure not) unless there are `credentials` for one: whoever wrote the repository
    chose them.
    """

    def __init__(self, location: Location) -> None:
        if forked_after_obstore():  # its runtime is like that of obstore
            problem = f"{location.shown}: this process was forked after an Icechunk repository was used"
            raise UnsupportedError(problem, "start processes with forkserver or spawn")
        icechunk = need("icechunk")
        options = dict(location.options)
        chosen = {name: options.pop(name) for name in _SNAPSHOT_OPTIONS if name in options}
        access = _virtual_access(icechunk, options)
        with finished_before_exit():
            storage = _icechunk_storage(icechunk, location, options)
            repository = icechunk.Repository.open(storage, authorize_virtual_chunk_access=access)
            session = repository.readonly_session(**(chosen or {"branch": "main"}))
        note_obstore_use()
        self._store = session.store

    def get_range(self, path: str, start: int, stop: int, receiver: Receiver = RECEIVER) -> Buffer:  # noqa: ARG002
        """Return bytes [start, stop), fewer if the object ends before `stop`."""
        if path.rpartition("/")[2] == "zarr.json":  # icechunk does not clip a range of metadata
            return self._read(path, None)[start:stop]
        return self._read(path, (start, stop))

    def info(self, path: str) -> ObjectInfo | None:
        """Return the size of an object, or None if it does not exist."""
        try:
            return ObjectInfo(path, _run(self._store.getsize, path))
        except FileNotFoundError:
            return None

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly below a folder."""

        async def collect() -> list[str]:
            return [name async for name in self._store.list_dir(folder)]

        return [name for name in _run(collect) if name != "zarr.json"]

    def _read(self, path: str, byte_range: tuple[int, int] | None) -> bytes:
        from zarr.abc.store import RangeByteRequest
        from zarr.core.buffer import default_buffer_prototype

        requested = None if byte_range is None else RangeByteRequest(*byte_range)
        try:
            buffer = _run(self._store.get, path, default_buffer_prototype(), requested)
        except client_errors() as error:
            denied = re.search(r"url prefix (\S+?),\s.*authorize", str(error), re.DOTALL)  # it is wrapped
            if denied is None:
                raise
            remedy = f"if you trust it, give storage_options={{'authorize_virtual_chunk_access': [{denied[1]!r}]}}"
            problem = f"the chunk {path} is in another object, below {denied[1]}"
            raise AccessError(problem, f"{remedy}, and credentials= if it needs any") from error
        if buffer is None:
            raise FileNotFoundError(path)
        return bytes(buffer.to_bytes())


def _run(function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
    """Return the result of a coroutine function, on fsspec's loop: another may run in this thread, as in a notebook."""
    with finished_before_exit():  # icechunk's threads call the loop
        return sync(get_loop(), function, *arguments)


def _virtual_access(icechunk: Any, options: dict[str, Any]) -> Any:
    """Return icechunk's credentials by URL prefix, and remove the options that describe them. Raises TypeError."""
    authorized = options.pop("authorize_virtual_chunk_access", None) or ()
    if not isinstance(authorized, Mapping):
        names = [authorized] if isinstance(authorized, str) else authorized
        authorized = {name: {"anonymous": True} for name in names}
    given = {**authorized, **(options.pop("credentials", None) or {})}
    return icechunk.containers_credentials({name: _credentials(icechunk, name, each) for name, each in given.items()})


def _credentials(icechunk: Any, url: str, options: Any) -> Any:
    """Return icechunk's credentials for a URL, None for a web server or local files, which need none."""
    scheme = url.partition("://")[0]
    kind = {"s3": "s3", "gs": "gcs", "az": "azure"}.get(ALIASES.get(scheme, scheme))
    if not isinstance(options, Mapping):
        return options  # icechunk's own; None allows those of the environment
    if kind == "azure" and "anonymous" in options:
        remedy = f"give its credentials: storage_options={{'credentials': {{{url!r}: {{'sas_token': ...}}}}}}"
        raise UnsupportedError(f"icechunk does not read chunks below {url} anonymously", remedy)
    return None if kind is None else getattr(icechunk, f"{kind}_credentials")(**_renamed(options))


def _renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with icechunk's names of those of s3fs."""
    names = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token", "anon": "anonymous"}
    return {names.get(name, name): value for name, value in options.items()}


def _icechunk_storage(icechunk: Any, location: Location, options: dict[str, Any]) -> Any:
    """Return icechunk's storage of a URL. Raises `UnsupportedError` for another protocol, TypeError for an option."""
    url = location.target.split("::", 1)[1]
    protocol, _, path = url.rpartition("://")
    if protocol in ("", "file", "local"):
        return icechunk.local_filesystem_storage(path, **options)
    bucket, _, prefix = path.partition("/")
    if protocol in ("s3", "s3a"):
        options = _renamed(options)
        if str(options.get("endpoint_url", "")).startswith("http://"):
            options = {"allow_http": True, "force_path_style": True, **options}
        if "access_key_id" not in options and "anonymous" not in options:
            options["from_env"] = True
        return icechunk.s3_storage(bucket=bucket, prefix=prefix, **options)
    if protocol in ("gs", "gcs"):
        return icechunk.gcs_storage(bucket=bucket, prefix=prefix, **options)
    problem = f"{location.shown}: the protocol {protocol!r} of an Icechunk repository"
    raise UnsupportedError(problem, "use s3, gs or a local folder")
