"""Removes the objects of unfinished conversions, never a finished dataset."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from streamloader.conversion.job import FILES
from streamloader.errors import AccessError, DestinationError, IncompleteError, NotADatasetError
from streamloader.format.opening import JOB, open_root, read_job, read_root, split_names
from streamloader.format.publish import CLAIM, check_not_running, erasable, erase, temporary
from streamloader.storage import ObjectInfo, Store


@dataclass(frozen=True)
class Incomplete:
    """The state of a URL: nothing, an unfinished dataset, or a finished one with leftovers of killed writers.

    `objects` are those to be removed. Unfinished uploads and temporary files are not listed; they are found on removal.
    """

    url: str
    kind: Literal["nothing", "unfinished", "finished"]
    message: str
    objects: tuple[ObjectInfo, ...]

    @property
    def bytes(self) -> int:
        """The total size of the objects, in bytes."""
        return sum(info.size for info in self.objects)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        objects = [{"path": info.path, "size": info.size} for info in self.objects]
        return {**vars(self), "objects": objects, "bytes": self.bytes}


def find_incomplete(store: Store) -> Incomplete:
    """Find the objects of unfinished writes at a URL. Changes nothing.

    Raises `NotADatasetError` if streamloader did not write the objects at the URL, `FormatError` for a damaged job or
    manifest, `VersionError` for a later version, and `DestinationError` if an append has not finished.
    """
    try:
        root = read_root(store)
    except IncompleteError as error:
        return Incomplete(store.url, "unfinished", error.problem, _infos(store, erasable(store)))
    except NotADatasetError:
        existing = next(iter(store.list()), None)
        if existing is None:
            return Incomplete(store.url, "nothing", f"there is nothing at {store.url}", ())
        problem = f"{store.url} holds objects that streamloader did not write, such as {existing.path}"
        raise NotADatasetError(problem, "check the URL; nothing was changed") from None
    names = split_names(root)
    for name in names or (None,):
        dataset = open_root(store, name).store
        if dataset.head(CLAIM) is not None:
            problem = f"an append to {dataset.url} is in progress, or was interrupted"
            raise DestinationError(problem, "resume it, or end it with streamloader append --abandon")
    message = f"the dataset at {store.url} is finished, and stays"
    return Incomplete(store.url, "finished", message, _infos(store, _leftovers(store, names)))


def remove_incomplete(store: Store, found: Incomplete) -> int:
    """Remove the objects of `found`, and temporary files and unfinished uploads; return the number of the latter.

    Call it only while nothing writes to the URL. Raises `DestinationError` if a run writes to it on this machine, or
    if the URL's state has changed.
    """
    now = find_incomplete(store)
    check_not_running(store, read_job(store))
    if now.kind != found.kind:
        raise DestinationError(f"{store.url} changed in the meantime: {now.message}", "run the command again")
    if now.kind == "nothing":
        return 0
    try:
        leftovers = store.remove_leftovers()
    except AccessError:
        leftovers = 0  # credentials may lack permission to list uploads: a lifecycle rule of the bucket can remove them
    if now.kind == "unfinished":
        erase(store)
    else:
        store.delete([info.path for info in now.objects])
    return leftovers


def _leftovers(store: Store, names: Iterable[str]) -> set[str]:
    """Return the paths of temporary objects in a finished dataset and in its splits."""
    of_splits = {f"{name}/{path}" for name in names for path in (*temporary(store.child(name)), JOB)}
    return {*of_splits, *temporary(store), FILES, JOB}


def _infos(store: Store, paths: Container[str]) -> tuple[ObjectInfo, ...]:
    return tuple(info for info in store.list() if info.path in paths)
