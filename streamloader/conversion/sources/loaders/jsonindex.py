"""An index.json beside the files that it names: formats that are known by it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamloader.conversion.sources.base import Range, read_range
from streamloader.conversion.sources.files import Listing
from streamloader.errors import SourceError
from streamloader.storage.protocol import ObjectInfo

INDEX = "index.json"
MAX_INDEX_BYTES = 256 << 20  # some 300,000 shards


@dataclass(frozen=True)
class Index:
    """A parsed index: `document` is what it says, `files` what really is in its folder, by path."""

    where: str
    info: ObjectInfo
    document: Mapping[str, Any]
    files: Mapping[str, ObjectInfo]

    def file(self, name: Any) -> ObjectInfo:
        """Return the file of that name. Raises `SourceError` where it is not there, or not in the index's folder."""
        if not isinstance(name, str) or name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise self.wrong(f"names the file {name!r}: only files in its own folder can be meant")
        if name not in self.files:
            raise self.wrong(f"names the file {name!r}, which is not there")
        return self.files[name]

    def wrong(self, what: str) -> SourceError:
        """Return the error that says what is wrong with the index."""
        return SourceError(f"{self.where} {what}", "fetch or make the dataset again")


def has_index(listing: Listing, named: re.Pattern[str]) -> bool:
    """Return whether there is an index, and a file of such a name; both may lie in folders below."""
    if all(_name(info) != INDEX for info in listing.of("json")):
        return False
    return any(named.search(_name(info)) for info in listing.visible)


def _name(info: ObjectInfo) -> str:
    return info.path.rpartition("/")[2]


def read_index(listing: Listing) -> Index:
    """Return the index right in the folder. Raises `SourceError` where there is none, or where it is no JSON object."""
    files = {info.path: info for info in listing.files}
    if not listing.folder or INDEX not in files:
        raise SourceError(*_missing(listing))
    info = files[INDEX]
    where = f"{listing.store.url}/{INDEX}"
    if info.size > MAX_INDEX_BYTES:
        raise SourceError(f"{where} has {info.size} bytes, at most {MAX_INDEX_BYTES} are read", "merge fewer shards")
    try:
        document = json.loads(bytes(read_range(listing.store, Range(INDEX, 0, info.size))))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is no JSON ({error})", "fetch or make the dataset again") from None
    if not isinstance(document, dict):
        raise SourceError(f"{where} is no JSON object", "fetch or make the dataset again")
    return Index(where, info, document, files)


def _missing(listing: Listing) -> tuple[str, str]:
    if not listing.folder:
        return f"{listing.url} is no folder", f"name the folder that holds {INDEX}"
    folders = [info.path[: -len(INDEX) - 1] for info in listing.files if info.path.endswith(f"/{INDEX}")]
    if not folders:
        return f"{listing.url} holds no {INDEX}", "check the path: the index is written when the writer is closed"
    named = ", ".join(folders[:5]) + (", ..." if len(folders) > 5 else "")
    return f"{listing.url} holds no {INDEX}, its folders {named} do", f"convert each: {listing.url}/{folders[0]}"


def sorted_files(index: Index, files: Sequence[ObjectInfo]) -> tuple[ObjectInfo, ...]:
    """Return the index and the files, sorted by path. Raises `SourceError` for one that is named twice."""
    by_path = {index.info.path: index.info}
    for info in files:
        if info.path in by_path:
            raise index.wrong(f"names the file {info.path!r} twice")
        by_path[info.path] = info
    return tuple(by_path[path] for path in sorted(by_path))
