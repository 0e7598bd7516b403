"""URLs: where a store is, how it is shown, and which paths below it are allowed. Pure but for `~` and the cwd."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamloader.errors import UnsupportedError, UsageError

# fsspec's spellings of one protocol
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "adl", "https": "http", "local": "file"}
_SECRET = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")


def redact(text: str) -> str:
    """Return the text without any `user:password@` in its URLs and without signed queries."""
    text = _SECRET.sub("", text)
    return re.sub(r"(https?://[^\s?]*)\?[^\s]*", r"\1?...", text)


@dataclass(frozen=True)
class Location:
    """A URL and its storage options. `target` is what fsspec is given, `shown` what people may read."""

    target: str
    protocol: str
    options: Mapping[str, Any] = field(repr=False)

    @property
    def shown(self) -> str:
        """Return the URL without credentials and without a trailing slash."""
        return redact(self.target)

    @property
    def is_chain(self) -> bool:
        """Return whether this is one of fsspec's chained URLs (`simplecache::s3://...`)."""
        return "::" in self.target

    @property
    def path(self) -> str:
        """Return what follows `://`: a path where the protocol has no host, else host or bucket first."""
        return self.target.split("://", 1)[-1]

    def child(self, path: str) -> Location:
        """Return the location of `path` below this one."""
        path = checked_path(path)
        return Location(_join(self.target, path), self.protocol, self.options) if path else self


def parse_location(url: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Location:
    """Read a URL of any fsspec protocol, or a local path. Raises `UsageError` or `UnsupportedError`."""
    target = os.fspath(url)
    if not isinstance(target, str) or not target.strip():
        raise UsageError(f"{url!r} is not a URL", "give a URL such as s3://bucket/folder, or a local path")
    options = dict(options or {})
    if "::" not in target and "://" not in target:
        return Location(_absolute(target), "file", options)
    protocol = target.split("://", 1)[0].split("::", 1)[0].lower()
    protocol = _ALIASES.get(protocol, protocol)
    if "::" in target:
        return Location(target, protocol, options)
    if protocol == "file":
        return Location(f"file://{_absolute(target.split('://', 1)[1] or '/')}", protocol, options)
    if protocol == "http" and "?" in target:
        raise UnsupportedError(
            f"{redact(target)} has a query, so no path can be put below it",
            "give the folder's URL without a query, with the credentials in storage_options",
        )
    bare = target.rstrip("/")
    return Location(target if bare.endswith(":") else bare, protocol, options)


def checked_path(path: str) -> str:
    """Return a relative path without a trailing slash. Raises `UsageError` for one that could leave its store."""
    path = path.rstrip("/") if path != "/" else path
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise UsageError(f"{path!r} is not a path below a store", "give a relative path without '', '.' and '..' parts")
    return path


def object_path(path: str) -> str:
    """Return the relative path of an object. Raises `UsageError` for one that could leave its store, and for none."""
    if not path or path.endswith("/"):
        raise UsageError(f"{path!r} names no object", "name the object below its store")
    return checked_path(path)


def _absolute(path: str) -> str:
    return os.path.normpath(Path(path).expanduser().absolute())


def _join(url: str, path: str) -> str:
    """Put the path below the first link of a chained URL that has a path of its own."""
    links = url.split("::")
    place = next((i for i, link in enumerate(links) if "://" in link), 0)
    links[place] += path if links[place].endswith("/") else "/" + path
    return "::".join(links)
