"""Removes what unfinished conversions left: never a finished dataset."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal

from streamloader.conversion.job import FILES
from streamloader.errors import AccessError, DestinationError, IncompleteError, NotADatasetError
from streamloader.format.opening import JOB, open_root, read_job, read_root, split_names
from streamloader.format.publish import CLAIM, check_not_running, erasable, erase, temporary
from streamloader.storage.store import ObjectInfo, Store


@dataclass(frozen=True)
class Incomplete:
    """What is at a URL: nothing, an unfinished dataset, or a finished one with what killed writers left beside it.

    `objects` are those that are to be removed. Half-written files and unfinished uploads cannot be seen before.
    """

    url: str
    kind: Literal["nothing", "unfinished", "finished"]
    message: str
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
        return Incomplete(store.url, "unfinished", error.problem, _infos(store, erasable(store)))
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
            problem = f"an append to {below.url} is under way, or was interrupted"
            raise DestinationError(problem, "resume it, or end it with streamloader append --abandon")
    message = f"the dataset at {store.url} is finished, and stays"
    return Incomplete(store.url, "finished", message, _infos(store, _leftovers(store, names)))


def remove_incomplete(store: Store, found: Incomplete) -> int:
    """Remove what was found, and the half-written files and unfinished uploads below; return how many those were.

    Only while nobody writes there. Raises `DestinationError` where it is no longer what was found.
    """
    now = find_incomplete(store)
    check_not_running(store, read_job(store))
    if now.kind != found.kind:
        raise DestinationError(f"what is at {store.url} changed meanwhile: {now.message}", "look at it again")
    if now.kind == "nothing":
        return 0
    try:
        leftovers = store.remove_leftovers()
    except AccessError:
        leftovers = 0  # some keys may write but not list uploads: then the bucket's lifecycle rule removes them
    if now.kind == "unfinished":
        erase(store)
    else:
        store.delete([info.path for info in now.objects])
    return leftovers


def _leftovers(store: Store, names: Iterable[str]) -> set[str]:
    """Return the paths of what only a conversion needs, in a dataset and in its splits."""
    below = {f"{name}/{path}" for name in names for path in (*temporary(store.child(name)), JOB)}
    return {*below, *temporary(store), FILES, JOB}


def _infos(store: Store, paths: Container[str]) -> tuple[ObjectInfo, ...]:
    return tuple(info for info in store.list() if info.path in paths)
