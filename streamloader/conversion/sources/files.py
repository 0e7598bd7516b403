"""The files that a source URL names: a file, a glob, a brace range, or a folder.

In local folders, links are followed that do not leave them, and modification times replace etags.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qsl

from streamloader.errors import AccessError, NotFoundError, SourceError, UnsupportedError
from streamloader.format.manifest import NAME
from streamloader.storage import ObjectInfo, Store, open_store
from streamloader.storage.url import redact


def local_path(store: Store) -> Path | None:
    """Return the folder of a store of local files, None for another store."""
    path = Path(store.url.removeprefix("file://"))
    return path if path.is_absolute() else None


_LINKS = (
    "copy the files into the folder, or convert the link's target; if you trust whoever made the links, give "
    "source_options={'follow_symlinks': True} (--source-option follow_symlinks=true)"
)
FOLLOW, DECODED = "follow_symlinks", "max_decoded"  # the options that are none of the store


def walk_files(
    root: Path, matches: Callable[[str], bool] = lambda _: True, *, follow: bool = False
) -> Iterator[ObjectInfo]:
    """Yield every file below `root`, nothing if the folder does not exist.

    Links to files and folders below `root` are followed, except links to a folder that contains them. Links that leave
    `root` raise `SourceError` if their path `matches` and is not hidden, unless these are to be followed too. Raises
    `SourceError` also for unreadable folders and broken links.
    """
    if not root.is_dir():
        return
    top = os.path.realpath(root)
    todo: list[tuple[str, frozenset[str]]] = [
        ("", frozenset([top]))
    ]  # folders, and the targets of the links on their paths
    while todo:
        folder, links = todo.pop()
        for entry in _entries(root / folder):
            path, targets = f"{folder}{entry.name}", links
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if target in links or _contains(target, os.path.realpath(root / folder)):
                    continue
                if not (follow or _contains(top, target)):
                    if matches(path) and "/." not in f"/{path}":
                        problem = f"{root / path} is a link to {target}, which is outside of {root}"
                        raise SourceError(problem, _LINKS)
                    continue
                targets = links | {target}
            if entry.is_dir():
                todo.append((f"{path}/", targets))
            elif info := file_info(root, path):
                yield info


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        _raise_local(error)


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def file_info(root: Path, path: str) -> ObjectInfo | None:
    """Return the regular file at `path` below `root`, with its modification time as etag; None for anything else."""
    try:
        status = os.stat(f"{root}/{path}")  # noqa: PTH116 - takes a third of the time of Path.stat
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not (root / path).is_symlink():
            return None
        _raise_local(error)
    return ObjectInfo(path, status.st_size, str(status.st_mtime_ns)) if stat.S_ISREG(status.st_mode) else None


def head(store: Store, path: str) -> ObjectInfo | None:
    """Return the file at `path`, None if it does not exist."""
    root = local_path(store)
    return store.head(path) if root is None else file_info(root, path)


def _raise_local(error: OSError) -> NoReturn:
    raise SourceError(f"{error.filename} cannot be read: {error.strerror}", "repair or remove it") from error


_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)\Z")
_MARKS = "*?{["
_MAX_EXPANDED = 1_000_000  # a typo such as {0..99999999999} must not fill the memory

_COMPRESSED = ("gz", "bz2", "xz", "zst", "zstd")
_SHORT = {"tgz": "tar", "tbz2": "tar", "txz": "tar", "tzst": "tar"}


@dataclass(frozen=True)
class Listing:
    """The files that a source URL names, with their paths below `store`, sorted.

    `url` is the user's URL, made absolute. `folder` tells whether it names a folder. `inner` is the path within the
    file that follows `::`, such as `/data` of `file.h5::/data`.
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
        """The visible files by extension, computed once: there may be millions, and every format needs its own."""
        groups: dict[str, list[ObjectInfo]] = {}
        for info in self.visible:
            groups.setdefault(extension(info.path), []).append(info)
        return {name: tuple(infos) for name, infos in groups.items()}

    def of(self, *extensions: str) -> tuple[ObjectInfo, ...]:
        """Return the visible files that have one of these extensions, sorted by path."""
        names = {*extensions} & self.by_extension.keys()
        return tuple(sorted(info for name in names for info in self.by_extension[name]))

    def of_inner(self, *extensions: str) -> tuple[ObjectInfo, ...]:
        """Return the visible files with these extensions, compressed or not, sorted by path."""
        candidates = self.of(*extensions, *_COMPRESSED, *_SHORT)
        return tuple(info for info in candidates if inner_extension(info.path) in extensions)

    def inner_extensions(self) -> set[str]:
        """Return the extensions of the visible files, without those of compressions."""
        plain = {_SHORT.get(name, name) for name in self.by_extension if name not in _COMPRESSED}
        return plain | {inner_extension(info.path) for info in self.of(*_COMPRESSED)}

    def top_folders(self) -> list[str]:
        """Return the names of the folders directly below, including empty ones if the store has them."""
        names = {info.path.split("/", 1)[0] for info in self.files if "/" in info.path}
        root = local_path(self.store)
        if self.folder and root is not None:  # the listing lacks empty folders
            names |= {entry.name for entry in _entries(root) if entry.is_dir()}
        return sorted(names)


def list_source(src: str | os.PathLike[str], options: Mapping[str, Any]) -> Listing:
    """Return the files that `src` names. Raises `SourceError` if there is none, or a `StorageError`.

    With the option `follow_symlinks`, local links are followed that leave the folder.
    """
    text = os.fspath(src)
    outer, separator, inner = text.rpartition("::/")  # in fsspec's own chains (`zip::s3://`) a protocol follows `::`
    if separator:
        listing = list_source(outer, options)
        return replace(listing, url=f"{listing.url}::/{inner}", inner=f"/{inner}")
    if re.match(r"https?://[^?]*\?.*=", text):  # a presigned URL; params= is an option of fsspec's http
        text, _, query = text.partition("?")
        options = {**options, "params": dict(parse_qsl(query, keep_blank_values=True))}
    if any(mark in text for mark in _MARKS) and not _exists(text, options):
        return _list_pattern(text, options)
    parent, _, name = text.rstrip("/").rpartition("/")
    in_bucket = "/" in text.partition("://")[2] if "://" in text else True  # s3://my.bucket is not a file
    if "." in name and not text.endswith("/") and in_bucket:
        store = _open(parent, text, options)
        info = head(store, name)
        if info is not None:
            return Listing(store, redact(f"{store.url}/{name}"), (info,), folder=False)
    store = _store(text, options)
    files = _list(store, options)
    if not files:
        raise SourceError(f"nothing exists at {store.url}", "check the path, and the bucket's name")
    return Listing(store, store.url, files, folder=True)


def _exists(text: str, options: Mapping[str, Any]) -> bool:
    """Return whether a file or folder has this name, with marks of patterns in it."""
    if "://" not in text:
        return Path(text).exists()
    host, slash, _ = text.partition("://")[2].partition("/")
    if not slash or any(mark in host for mark in _MARKS):
        return False
    parent, _, name = text.rstrip("/").rpartition("/")
    store = _open(parent, text, options)
    with suppress(NotFoundError, AccessError, UnsupportedError):
        return head(store, name) is not None or next(iter(store.list(name)), None) is not None
    return False


def _list_pattern(text: str, options: Mapping[str, Any]) -> Listing:
    parts = text.split("/")
    marked = (i for i, part in enumerate(parts) if any(mark in part for mark in _MARKS))
    # a folder with brackets in its name may be on the way to a pattern
    first = next(i for i in marked if "[" not in parts[i] or not _exists("/".join(parts[: i + 1]), options))
    if "://" in text and first < 3:
        raise SourceError(f"{redact(text)} has a pattern for its bucket or host", "name one, and patterns below it")
    parent, pattern = "/".join(parts[:first]), "/".join(parts[first:])
    store = _open(parent, text, options)
    files: dict[str, ObjectInfo] = {}
    listed: tuple[ObjectInfo, ...] | None = None
    for name in expand_braces(pattern):
        if _is_glob(name):
            if listed is None:
                listed = _list(store, options, partial(_may_match, list(filter(_is_glob, expand_braces(pattern)))))
            matching = [info for info in listed if _matches(info.path, name)]
        else:
            matching = list(filter(None, [head(store, name)]))
        if not matching:
            problem = f"no file exists at {redact(f'{store.url}/{name}')}, which {redact(text)} names"
            raise SourceError(problem, "check the pattern")
        files |= {info.path: info for info in matching}
    return Listing(store, f"{store.url}/{pattern}", tuple(files[path] for path in sorted(files)), folder=False)


def _open(parent: str, text: str, options: Mapping[str, Any]) -> Store:
    return _store(parent or ("/" if text.startswith("/") else "."), options)


def _store(url: str, options: Mapping[str, Any]) -> Store:
    return open_store(url, {name: value for name, value in options.items() if name not in (FOLLOW, DECODED)})


def _list(
    store: Store, options: Mapping[str, Any], matches: Callable[[str], bool] = lambda _: True
) -> tuple[ObjectInfo, ...]:
    root, follow = local_path(store), bool(options.get(FOLLOW))
    try:
        return tuple(sorted(store.list() if root is None else walk_files(root, matches, follow=follow)))
    except NotFoundError:
        return ()


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield the names that `{000..003}` (zero-padded like its first number) and `{a,b}` stand for.

    Raises `SourceError` for a range that descends or has more than a million names.
    """
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    bounds = _RANGE.match(braces[1])
    choices = braces[1].split(",")
    if bounds:
        first, last = int(bounds[1]), int(bounds[2])
        if not 0 <= last - first < _MAX_EXPANDED:
            raise SourceError(f"the range {braces[0]} of {pattern}", "write it ascending, with at most a million names")
        choices = [str(number).zfill(len(bounds[1])) for number in range(first, last + 1)]
    for choice in choices:
        yield from expand_braces(pattern[: braces.start()] + choice + pattern[braces.end() :])


def _is_glob(pattern: str) -> bool:
    return any(mark in pattern for mark in "*?[")


def _matches(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and _may_match([pattern], path)


def _may_match(patterns: Sequence[str], path: str) -> bool:
    """Return whether a path, or a path below it, can match one of the patterns."""
    names = path.split("/")
    split = (pattern.split("/") for pattern in patterns)
    return any(len(names) <= len(parts) and all(map(fnmatchcase, names, parts)) for parts in split)


def hidden(path: str) -> bool:
    """Return whether a file or a folder on its path begins with a dot, or is the one that macOS adds to archives."""
    return "/." in f"/{path}" or "/__MACOSX/" in f"/{path}/"


def extension(path: str) -> str:
    """Return the last extension in lower case, without its dot; empty if there is none."""
    name = path.rpartition("/")[2]
    return name.rpartition(".")[2].lower() if "." in name else ""


def field_names(originals: list[str], where: str) -> dict[str, str]:
    """Return a field name for each original: lower case, other characters than a-z and 0-9 as `_`, no leading digit.

    Raises `SourceError` if two originals give the same name.
    """
    by_name: dict[str, str] = {}
    for original in originals:
        name = re.sub(r"[^a-z0-9]+", "_", original.lower()).strip("_")
        name = name if NAME.match(name) else f"f_{name}".rstrip("_")
        if name in by_name:
            problem = f"{by_name[name]!r} and {original!r} of {where} both make the field {name!r}"
            raise SourceError(problem, "rename one")
        by_name[name] = original
    return {original: name for name, original in by_name.items()}


def inner_extension(path: str) -> str:
    """Return the extension of a file before its compression: `csv` for `a.csv.gz`, `tar` for `b.tgz`."""
    last = extension(path)
    return extension(path[: -len(last) - 1]) if last in _COMPRESSED else _SHORT.get(last, last)


def require(files: tuple[ObjectInfo, ...], listing: Listing, *extensions: str) -> tuple[ObjectInfo, ...]:
    """Return the files. Raises `SourceError`, which names the format's extensions, if there is none."""
    if not files:
        remedy = "give a file, a folder or a glob of such"
        raise SourceError(f"{listing.url} holds no .{' or .'.join(extensions)}", remedy)
    return files
