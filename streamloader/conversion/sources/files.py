"""Files of this machine as a source: links within it are followed, and times stand in for the etags they lack.

Which files a source URL names: one file, a glob, a brace range, or a folder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from streamloader.errors import NotFoundError, SourceError
from streamloader.format.manifest import NAME
from streamloader.storage import open_store
from streamloader.storage.store import ObjectInfo, Store
from streamloader.storage.url import redact


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
                        problem = f"{root / path} is a link to {target}, which is outside of {root}"
                        raise SourceError(problem, "copy the files into the folder, or convert what it links to")
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
        _raise_local(error)


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def file_info(root: Path, path: str) -> ObjectInfo | None:
    """Return the regular file at `path` below `root`, with its modification time as etag; None for anything else."""
    try:
        found = os.stat(f"{root}/{path}")  # noqa: PTH116 - a third of the time of a Path's
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not (root / path).is_symlink():
            return None
        _raise_local(error)
    return ObjectInfo(path, found.st_size, str(found.st_mtime_ns)) if stat.S_ISREG(found.st_mode) else None


def _raise_local(error: OSError) -> NoReturn:
    raise SourceError(f"{error.filename} cannot be read: {error.strerror}", "repair or remove it") from error


_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)\Z")
_MARKS = "*?{["
_MAX_EXPANDED = 1_000_000  # a typo such as {0..99999999999} must not fill the memory


@dataclass(frozen=True)
class Listing:
    """The files below `store`, sorted by path. `url` is what the user gave, made absolute; `inner` is what stood behind
    `::`, a path within the file, such as `/data` of `file.h5::/data`.
    """

    store: Store
    url: str
    files: tuple[ObjectInfo, ...]
    folder: bool
    inner: str = ""

    @cached_property
    def visible(self) -> tuple[ObjectInfo, ...]:
        """The files that are not hidden."""
        return tuple(info for info in self.files if not hidden(info.path))

    @cached_property
    def by_extension(self) -> Mapping[str, tuple[ObjectInfo, ...]]:
        """The visible files by extension: there may be millions, and every format asks for its own."""
        found: dict[str, list[ObjectInfo]] = {}
        for info in self.visible:
            found.setdefault(extension(info.path), []).append(info)
        return {name: tuple(infos) for name, infos in found.items()}

    def of(self, *extensions: str) -> tuple[ObjectInfo, ...]:
        """Return the visible files that have one of these extensions, sorted by path."""
        found = [self.by_extension[name] for name in {*extensions} & self.by_extension.keys()]
        return tuple(sorted(chain.from_iterable(found), key=attrgetter("path")))

    def top_folders(self) -> list[str]:
        """Return the names of the folders right below, those without files too where the store has such."""
        names = {info.path.split("/", 1)[0] for info in self.files if "/" in info.path}
        root = local_path(self.store)
        if self.folder and root is not None:  # no listing has an empty folder
            names |= {entry.name for entry in _entries(root) if entry.is_dir()}
        return sorted(names)


def list_source(src: str | os.PathLike[str], options: Mapping[str, Any]) -> Listing:
    """Return the files that `src` names. Raises `SourceError` where there is none, or a `StorageError`."""
    text = os.fspath(src)
    outer, marks, inner = text.rpartition("::/")  # fsspec's own chains (`zip::s3://`) have a protocol there
    if marks:
        listing = list_source(outer, options)
        return replace(listing, url=f"{listing.url}::/{inner}", inner=f"/{inner}")
    if any(mark in text for mark in _MARKS) and ("://" in text or not Path(text).exists()):
        return _list_pattern(text, options)
    head, _, name = text.rstrip("/").rpartition("/")
    in_bucket = "/" in text.partition("://")[2] if "://" in text else True  # s3://my.bucket is no file
    if "." in name and not text.endswith("/") and in_bucket:
        store = _open(head, text, options)
        info = _head(store, name)
        if info is not None:
            return Listing(store, redact(f"{store.url}/{name}"), (info,), folder=False)
    store = open_store(text, options)
    files = _list(store)
    if not files:
        raise SourceError(f"nothing is at {store.url}", "check the path, and the bucket's name")
    return Listing(store, store.url, files, folder=True)


def _list_pattern(text: str, options: Mapping[str, Any]) -> Listing:
    parts = text.split("/")
    first = next(i for i, part in enumerate(parts) if any(mark in part for mark in _MARKS))
    if "://" in text and first < 3:
        raise SourceError(f"{redact(text)} has a pattern for its bucket or host", "name one, and patterns below it")
    head, pattern = "/".join(parts[:first]), "/".join(parts[first:])
    store = _open(head, text, options)
    found: dict[str, ObjectInfo] = {}
    listed: tuple[ObjectInfo, ...] | None = None
    for one in expand_braces(pattern):
        if _is_glob(one):
            if listed is None:
                listed = _list(store, partial(_leads_to, list(filter(_is_glob, expand_braces(pattern)))))
            matching = [info for info in listed if _matches(info.path, one)]
        else:
            matching = list(filter(None, [_head(store, one)]))
        if not matching:
            problem = f"no file is {redact(f'{store.url}/{one}')}, which {redact(text)} names"
            raise SourceError(problem, "check the pattern")
        found |= {info.path: info for info in matching}
    return Listing(store, f"{store.url}/{pattern}", tuple(found[path] for path in sorted(found)), folder=False)


def _open(head: str, text: str, options: Mapping[str, Any]) -> Store:
    return open_store(head or ("/" if text.startswith("/") else "."), options)


def _list(store: Store, wanted: Callable[[str], bool] = lambda _: True) -> tuple[ObjectInfo, ...]:
    root = local_path(store)
    try:
        return tuple(sorted(store.list() if root is None else walk_files(root, wanted), key=attrgetter("path")))
    except NotFoundError:
        return ()


def _head(store: Store, path: str) -> ObjectInfo | None:
    root = local_path(store)
    return store.head(path) if root is None else file_info(root, path)


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield the names of `{000..003}` (zero-padded as its first number) and of `{a,b}`.

    Raises `SourceError` for a range that runs backwards or has more than a million names.
    """
    found = _BRACES.search(pattern)
    if found is None:
        yield pattern
        return
    bounds = _RANGE.match(found[1])
    choices = found[1].split(",")
    if bounds:
        first, last = int(bounds[1]), int(bounds[2])
        if not 0 <= last - first < _MAX_EXPANDED:
            raise SourceError(f"the range {found[0]} of {pattern}", "write it ascending, with at most a million names")
        choices = [str(number).zfill(len(bounds[1])) for number in range(first, last + 1)]
    for choice in choices:
        yield from expand_braces(pattern[: found.start()] + choice + pattern[found.end() :])


def _is_glob(pattern: str) -> bool:
    return any(mark in pattern for mark in "*?[")


def _matches(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and _leads_to([pattern], path)


def _leads_to(patterns: Sequence[str], path: str) -> bool:
    """Return whether a path, or something below it, can be what one of the patterns names."""
    names = path.split("/")
    parts = (pattern.split("/") for pattern in patterns)
    return any(len(names) <= len(one) and all(map(fnmatchcase, names, one)) for one in parts)


def hidden(path: str) -> bool:
    """Return whether the file or a folder above it is hidden, by its dot or as what macOS puts into archives."""
    return "/." in f"/{path}" or "/__MACOSX/" in f"/{path}/"


def extension(path: str) -> str:
    """Return the lower-case last extension, without its dot; empty where there is none."""
    name = path.rpartition("/")[2]
    return name.rpartition(".")[2].lower() if "." in name else ""


def field_names(originals: list[str], where: str) -> dict[str, str]:
    """Return a field name for each original: lower case, others than a-z, 0-9 become `_`, no digit in front.

    Raises `SourceError` where two originals would share one name.
    """
    made: dict[str, str] = {}  # the original of each name
    for original in originals:
        name = re.sub(r"[^a-z0-9]+", "_", original.lower()).strip("_")
        name = name if NAME.match(name) else f"f_{name}".rstrip("_")
        if name in made:
            raise SourceError(f"{made[name]!r} and {original!r} of {where} both make the field {name!r}", "rename one")
        made[name] = original
    return {original: name for name, original in made.items()}


_PACKED = ("gz", "bz2", "xz", "zst", "zstd")
_SHORT = {"tgz": "tar", "tbz2": "tar", "txz": "tar", "tzst": "tar"}


def inner_extension(path: str) -> str:
    """Return the extension of what a file holds, by its name: `csv` of `a.csv.gz`, `tar` of `b.tgz`."""
    last = extension(path)
    return extension(path[: -len(last) - 1]) if last in _PACKED else _SHORT.get(last, last)


def holding(listing: Listing, *kinds: str) -> tuple[ObjectInfo, ...]:
    """Return the visible files that hold one of these kinds, compressed ones too, sorted by path."""
    return tuple(info for info in listing.of(*kinds, *_PACKED, *_SHORT) if inner_extension(info.path) in kinds)


def required(files: tuple[ObjectInfo, ...], listing: Listing, *kinds: str) -> tuple[ObjectInfo, ...]:
    """Return the files. Raises `SourceError`, which names the extensions that a format has, where there is none."""
    if not files:
        raise SourceError(f"{listing.url} holds no .{' or .'.join(kinds)}", "give a file, a folder or a glob of such")
    return files


def kinds_in(listing: Listing) -> set[str]:
    """Return the extensions of what the visible files hold."""
    plain = {_SHORT.get(name, name) for name in listing.by_extension if name not in _PACKED}
    return plain | {inner_extension(info.path) for info in listing.of(*_PACKED)}
