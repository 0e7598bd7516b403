"""Which files a source URL names: one file, a glob, a brace range, or a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from streamloader.conversion.sources.localfiles import file_info, folders, local_path, walk_files
from streamloader.errors import NotFoundError, SourceError
from streamloader.format.manifest import NAME
from streamloader.storage import open_store
from streamloader.storage.location import redact
from streamloader.storage.protocol import ObjectInfo, Store

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
        if len(found) == 1:
            return found[0]
        return tuple(sorted(chain.from_iterable(found), key=attrgetter("path")))

    def top_folders(self) -> list[str]:
        """Return the names of the folders right below, those without files too where the store has such."""
        names = {info.path.split("/", 1)[0] for info in self.files if "/" in info.path}
        root = local_path(self.store)
        if self.folder and root is not None:  # an empty folder stands in no listing
            names |= folders(root)
        return sorted(names)


def list_source(src: str | os.PathLike[str], options: Mapping[str, Any]) -> Listing:
    """Return the files that `src` names. Raises `SourceError` where there is none, or a `StorageError`."""
    text, inner = _split_inner(os.fspath(src))
    if inner:
        listing = list_source(text, options)
        return replace(listing, url=f"{listing.url}::{inner}", inner=inner)
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


def _split_inner(text: str) -> tuple[str, str]:
    """Split `file.h5::/path` at its last `::/`; fsspec's own chains (`zip::s3://`) have a protocol there."""
    outer, marks, inner = text.rpartition("::/")
    return (outer, f"/{inner}") if marks else (text, "")


def _list_pattern(text: str, options: Mapping[str, Any]) -> Listing:
    parts = text.split("/")
    first = next(i for i, part in enumerate(parts) if any(mark in part for mark in _MARKS))
    if "://" in text and first < 3:
        raise SourceError(
            f"{redact(text)} has a pattern for its bucket or host", "name one bucket, and patterns below it"
        )
    head, pattern = "/".join(parts[:first]), "/".join(parts[first:])
    store = _open(head, text, options)
    found: dict[str, ObjectInfo] = {}
    listed: tuple[ObjectInfo, ...] | None = None
    for one in expand_braces(pattern):
        if any(mark in one for mark in "*?["):
            listed = _list(store, _prefix_of(pattern)) if listed is None else listed
            matching = [info for info in listed if _matches(info.path, one)]
        else:
            info = _head(store, one)
            matching = [info] if info is not None else []
        if not matching:
            raise SourceError(
                f"no file is {redact(f'{store.url}/{one}')}, which {redact(text)} names", "check the pattern"
            )
        found |= {info.path: info for info in matching}
    return Listing(store, f"{store.url}/{pattern}", tuple(found[path] for path in sorted(found)), folder=False)


def _open(head: str, text: str, options: Mapping[str, Any]) -> Store:
    return open_store(head or ("/" if text.startswith("/") else "."), options)


def _prefix_of(pattern: str) -> Callable[[str], bool]:
    """Return whether a path, or something below it, can be what the pattern names."""
    patterns = [one.split("/") for one in expand_braces(pattern) if any(mark in one for mark in "*?[")]

    def matches(path: str) -> bool:
        names = path.split("/")
        return any(len(names) <= len(one) and all(map(fnmatchcase, names, one)) for one in patterns)

    return matches


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
    choices: list[str] = found[1].split(",")
    if bounds:
        first, last = int(bounds[1]), int(bounds[2])
        if not 0 <= last - first < _MAX_EXPANDED:
            raise SourceError(f"the range {found[0]} of {pattern}", "write it ascending, with at most a million names")
        choices = [str(number).zfill(len(bounds[1])) for number in range(first, last + 1)]
    for choice in choices:
        yield from expand_braces(pattern[: found.start()] + choice + pattern[found.end() :])


def _matches(path: str, pattern: str) -> bool:
    names, patterns = path.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


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
    names: dict[str, str] = {}
    for original in originals:
        name = re.sub(r"[^a-z0-9]+", "_", original.lower()).strip("_")
        name = name if NAME.match(name) else f"f_{name}".rstrip("_")
        other = next((key for key, taken in names.items() if taken == name), None)
        if other is not None:
            raise SourceError(
                f"{other!r} and {original!r} of {where} both make the field {name!r}", "rename one of them"
            )
        names[original] = name
    return names
