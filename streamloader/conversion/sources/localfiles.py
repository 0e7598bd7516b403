"""Files of this machine as a source: links are followed, and times stand in for the etags that they lack."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from streamloader.errors import SourceError
from streamloader.storage.protocol import ObjectInfo, Store


def local_path(store: Store) -> Path | None:
    """Return the folder that a store of local files stands for, else None."""
    path = Path(store.url.removeprefix("file://"))
    return path if path.is_absolute() else None


def walk_files(root: Path) -> Iterator[ObjectInfo]:
    """Yield every file below `root`; nothing where there is no such folder.

    Links are followed, since datasets are often made of them, but for those to a folder above themselves. Raises
    `SourceError` for what cannot be read and for links that lead nowhere.
    """
    if not root.is_dir():
        return
    for folder, names, files in os.walk(root, followlinks=True, onerror=_refuse):
        names[:] = [name for name in names if not _leads_up(Path(folder), name)]
        inside = os.path.relpath(folder, root)
        for name in files:
            info = file_info(root, name if inside == "." else f"{inside}/{name}")
            if info is not None:
                yield info


def _leads_up(folder: Path, name: str) -> bool:
    return (folder / name).is_symlink() and folder.resolve().is_relative_to((folder / name).resolve())


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
