"""Removing what unfinished conversions left, and never a finished dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from streamloader.conversion.after.stored import split_names
from streamloader.conversion.destination import FILES
from streamloader.errors import AccessError, DestinationError, IncompleteError, NotADatasetError
from streamloader.format.destination import check_not_running, clean, erase
from streamloader.format.opening import open_root, read_job, read_root
from streamloader.format.publish import CLAIM
from streamloader.storage.policy import Retrier
from streamloader.storage.protocol import Body, Buffer, ObjectInfo, RangeReader, Store, body_bytes

Kind = Literal["nothing", "unfinished", "finished"]


@dataclass(frozen=True)
class Incomplete:
    """What is at a URL: nothing, an unfinished dataset, or a finished one with what killed writers left beside it.

    `objects` are those that are to be removed. Half-written files and unfinished uploads cannot be seen before.
    """

    url: str
    kind: Kind
    said: str
    objects: tuple[ObjectInfo, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the objects."""
        return sum(info.size for info in self.objects)


def find_incomplete(store: Store) -> Incomplete:
    """Look at what is there; nothing is changed.

    Raises `NotADatasetError` for what streamloader did not write, `FormatError` for a job or manifest that is damaged,
    `VersionError` for a later version's, `DestinationError` where something is being appended.
    """
    try:
        root = read_root(store)
    except IncompleteError as error:
        return Incomplete(store.url, "unfinished", error.problem, _rehearse(store, erase))
    except NotADatasetError:
        other = next(iter(store.list()), None)
        if other is None:
            return Incomplete(store.url, "nothing", f"there is nothing at {store.url}", ())
        problem = f"nothing that streamloader wrote is at {store.url} ({other.path} is there)"
        raise NotADatasetError(problem, "check the URL; nothing was touched") from None
    names = split_names(root)
    for name in names or (None,):
        below = open_root(store, name).store
        if below.head(CLAIM) is not None:
            problem = f"an append to {below.url} is under way, or was broken off"
            raise DestinationError(problem, "go on with it, or end it with streamloader append --abandon")
    said = f"the dataset at {store.url} is finished, and stays"
    return Incomplete(store.url, "finished", said, _rehearse(store, lambda one: _clean(one, names)))


def remove_incomplete(store: Store, found: Incomplete) -> int:
    """Remove what was found, and the half-written files and unfinished uploads below; return how many those were.

    Only while nobody writes there. Raises `DestinationError` where it is no longer what was found.
    """
    now = find_incomplete(store)
    check_not_running(store, read_job(store))
    if now.kind != found.kind:
        raise DestinationError(f"what is at {store.url} changed meanwhile: {now.said}", "look at it again")
    if now.kind == "nothing":
        return 0
    try:
        leftovers = store.remove_leftovers()
    except AccessError:
        leftovers = 0  # who may write may not always list uploads: then the bucket's lifecycle rule removes them
    if now.kind == "unfinished":
        erase(store)
    else:
        _clean(store, split_names(read_root(store)))
    return leftovers


def _clean(store: Store, names: Iterable[str]) -> None:
    """Remove what only a conversion needs, from a dataset or from all of its splits."""
    for name in names:
        clean(store.child(name))
    store.delete([FILES])
    clean(store)


def _rehearse(store: Store, act: Callable[[Store], None]) -> tuple[ObjectInfo, ...]:
    """Return the objects that `act` would delete."""
    stage = Rehearsal(store)
    act(stage)
    return tuple(info for info in store.list() if info.path in stage.deleted)


class Rehearsal:
    """A store on which nothing changes: it remembers what was to be deleted. What it is asked is true."""

    def __init__(self, store: Store, folder: str = "", deleted: set[str] | None = None) -> None:
        self._store, self._folder = store, folder
        self.deleted: set[str] = set() if deleted is None else deleted

    @property
    def url(self) -> str:
        """The URL of the real one."""
        return self._store.url

    @property
    def retries(self) -> Retrier:
        """What retries requests to the real one."""
        return self._store.retries

    def child(self, path: str) -> Rehearsal:
        """Return the one below `path`; it remembers in the same place."""
        return Rehearsal(self._store.child(path), f"{self._folder}{path}/", self.deleted)

    def get(self, path: str) -> bytes:
        """Return the object."""
        return self._store.get(path)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        return self._store.get_range(path, start, stop)

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last bytes."""
        return self._store.get_tail(path, size)

    def head(self, path: str) -> ObjectInfo | None:
        """Return size and etag."""
        return self._store.head(path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder `prefix`."""
        return self._store.list(prefix)

    def put(self, path: str, data: Body) -> ObjectInfo:
        """Write nothing."""
        return ObjectInfo(path, body_bytes(data))

    def create(self, path: str, data: Buffer) -> ObjectInfo:
        """Write nothing."""
        return self.put(path, data)

    def replace(self, path: str, data: Buffer, before: Buffer) -> ObjectInfo:  # noqa: ARG002 - the seam has it
        """Write nothing."""
        return self.put(path, data)

    def delete(self, paths: Iterable[str]) -> None:
        """Remember the paths."""
        self.deleted.update(f"{self._folder}{path}" for path in paths)

    def remove_leftovers(self) -> int:
        """Remove nothing."""
        return 0

    def reader(self) -> RangeReader:
        """Return the real data plane."""
        return self._store.reader()
