"""Objects of a store: what is known of each, their paths, runs of their ranges, and what a client has for a store."""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UnsupportedError, UsageError
from streamloader.storage.buffers import Body, Buffer, Receiver

TEMPORARY_SUFFIX = ".streamloader-tmp"


class ObjectInfo(NamedTuple):
    """One stored object: its path relative to the store, its size in bytes, and its etag, empty if unknown."""

    path: str
    size: int
    etag: str = ""


Page = tuple[Sequence[ObjectInfo], str | None]  # objects of a listing, and the token of its next page


def etag_of(response: Any) -> str:
    """Return the etag in a client's response, without quotes; empty if it has none."""
    if not isinstance(response, dict):
        return ""
    return str(response.get("ETag") or response.get("etag") or "").strip('"')


def join_path(root: str, path: str) -> str:
    """Return the path below the folder `root`; either may be empty."""
    return f"{root.rstrip('/')}/{path}" if root and path else root or path


def checked_path(path: str) -> str:
    """Return a relative path without trailing slashes. Raises `UsageError` for a path that could leave its store."""
    path = path.rstrip("/") if path != "/" else path
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise UsageError(f"{path!r} is not a path below a store", "give a relative path without '', '.' and '..' parts")
    return path


def object_path(path: str) -> str:
    """Return the relative path of an object. Raises `UsageError` if it is empty or could leave its store."""
    if not path or path.endswith("/"):
        raise UsageError(f"{path!r} does not name an object", "name the object below its store")
    return checked_path(path)


class Client(Protocol):
    """Requests to the objects of one location, by the paths of its protocol; `root` is that of the store's URL.

    `put`, `create` and `replace` return the etag, or "" if it is unknown; `replace` returns the content, or as much as
    tells it from what was expected, if another writer changed it.
    """

    root: str

    def get(self, path: str, /) -> bytes: ...
    def get_range(self, path: str, start: int, stop: int, receiver: Receiver = ..., /) -> Buffer: ...
    def get_tail(self, path: str, size: int, /) -> bytes: ...
    def info(self, path: str, /) -> ObjectInfo | None: ...
    def modified(self, path: str, /) -> datetime | None: ...
    def list_page(self, folder: str, token: str | None, /) -> Page: ...
    def folders(self, folder: str, /) -> list[str]: ...
    def put(self, path: str, data: Body, /) -> str: ...
    def create(self, path: str, data: Buffer, /) -> str: ...
    def replace(self, path: str, data: Buffer, before: Buffer, /) -> str | bytes: ...
    def delete(self, paths: Sequence[str], /) -> None: ...
    def remove_leftovers(self, folder: str, /) -> int: ...


class ReadOnlyClient(Client):
    """A client of a store whose objects are ranges of other objects, which are not listed.

    Subclasses have `get_range`, `info` and `folders`.
    """

    root = ""

    def get(self, path: str) -> bytes:
        """Return the object."""
        return bytes(self.get_range(path, 0, 2**62))

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes, fewer if the object is smaller."""
        info = self.info(path)
        if info is None:
            raise FileNotFoundError(path)
        return bytes(self.get_range(path, max(0, info.size - size), info.size))

    def modified(self, _path: str) -> None:
        """Return None: the times of such objects are unknown."""

    def list_page(self, folder: str, _token: str | None) -> NoReturn:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"{folder}: the chunks of such a store are not listed", "read its arrays")

    def put(self, path: Any, *_: Any) -> NoReturn:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"{path}: such a store is read only", "write to a bucket or a local folder")

    create = replace = delete = put

    def remove_leftovers(self, _folder: str) -> int:
        """Return 0: there are no partial writes."""
        return 0


def cut_runs(starts: NDArray[np.int64], stops: NDArray[np.int64], gap: int, longest: int) -> list[tuple[int, int]]:
    """Return the index ranges [i, j) of ascending byte ranges that are read by one request each.

    Neighbours are joined over gaps of at most `gap` bytes, up to `longest` bytes from first start to last stop.
    """
    if len(starts) and not gap and stops[-1] - starts[0] <= min(longest, (stops - starts).sum()):
        return [(0, len(starts))]  # fast, for the usual case
    breaks = [*(np.flatnonzero(starts[1:] - stops[:-1] > gap) + 1).tolist(), len(starts)]
    runs: list[tuple[int, int]] = []
    first = 0
    while first < len(starts):
        before_gap = breaks[bisect_right(breaks, first)]
        within_longest = int(stops.searchsorted(starts[first] + longest, side="right"))
        end = max(first + 1, min(before_gap, within_longest))
        runs.append((first, end))
        first = end
    return runs
