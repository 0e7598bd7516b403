"""Files of this machine as a source: links within it are followed, and times stand in for the etags they lack."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from streamloader.errors import SourceError
from streamloader.storage.protocol import ObjectInfo, Store


def local_path(store: Store) -> Path | None:
    """Return the folder that a store of local files stands for, else None."""
    path = Path(store.url.removeprefix("file://"))
    return path if path.is_absolute() else None


def walk_files(root: Path, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[ObjectInfo]:
    """Yield every file below `root`; nothing where there is no such folder.

    Links to files and folders below `root` are followed, but for those to a folder that holds them. One that leads out
    of `root` is never followed: it is a `SourceError` where `wanted` of its path is true, unless it is hidden. Raises
    `SourceError` also for what cannot be read and for links that lead nowhere.
    """
    if not root.is_dir():
        return
    top = os.path.realpath(root)
    todo: list[tuple[str, frozenset[str]]] = [("", frozenset())]  # folders, and the links on the way there
    while todo:
        folder, links = todo.pop()
        for entry in _entries(root / folder):
            path, passed = f"{folder}{entry.name}", links
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if target in links or _holds(target, os.path.realpath(root / folder)):
                    continue
                if not _holds(top, target):
                    if wanted(path) and "/." not in f"/{path}":
                        problem = f"{root / path} is a link to {target}, which lies outside of {root}"
                        raise SourceError(
                            problem, "copy the files into the folder (cp -rL), or convert what it links to"
                        )
                    continue
                passed = links | {target}
            if entry.is_dir():
                todo.append((f"{path}/", passed))
                continue
            info = file_info(root, path)
            if info is not None:
                yield info


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        _refuse(error)


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def file_info(root: Path, path: str) -> ObjectInfo | None:
    """Return the regular file at `path` below `root`, with its modification time as etag; None for anything else."""
    try:
        found = os.stat(f"{root}/{path}")  # noqa: PTH116 - a third of the time of a Path's
    except FileNotFoundError as error:
        if (root / path).is_symlink():
            _refuse(error)
        return None
    except OSError as error:
        _refuse(error)
    return ObjectInfo(path, found.st_size, str(found.st_mtime_ns)) if stat.S_ISREG(found.st_mode) else None


def folders(root: Path) -> set[str]:
    """Return the names of the folders right below `root`. Raises `SourceError`."""
    try:
        return {entry.name for entry in root.iterdir() if entry.is_dir()}
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise SourceError(f"{error.filename} cannot be read: {error.strerror}", "repair or remove it") from error
