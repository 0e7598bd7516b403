"""The groups and arrays of a Zarr store by their documents, found in its listing. See zarrstores.py."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamloader.errors import SourceError
from streamloader.format.manifest import FORMAT
from streamloader.storage.protocol import ObjectInfo, Store

MAX_DOCUMENT = 64 << 20
DOCUMENTS = ("zarr.json", ".zarray", ".zgroup")  # the third version's goes first where there are both
_AGAIN = "fetch or make it again"

Files = Mapping[str, ObjectInfo]


@dataclass(frozen=True)
class Node:
    """A group or array at `path`: its document, also as it is stored, and its attributes."""

    path: str
    version: int
    document: Mapping[str, Any]
    attributes: Mapping[str, Any]
    stored: tuple[str, bytes]

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def is_array(self) -> bool:
        """Whether it is an array."""
        return self.document.get("node_type") == "array" if self.version == 3 else self.stored[0] == ".zarray"

    @property
    def ours(self) -> bool:
        """Whether it is a dataset of streamloader, or a root of its splits."""
        return not self.is_array and isinstance(self.attributes.get(FORMAT), Mapping)

    @property
    def dimensions(self) -> tuple[str, ...] | None:
        """The names of an array's dimensions, as xarray writes them; None where it has none."""
        names = self.document.get("dimension_names") or self.attributes.get("_ARRAY_DIMENSIONS")
        shape = self.document.get("shape")
        if shape == []:
            return ()
        if not isinstance(names, list) or not isinstance(shape, list) or len(names) != len(shape):
            return None
        return tuple(names) if all(isinstance(name, str) for name in names) else None

    @property
    def told(self) -> Mapping[str, Any]:
        """Its attributes as netCDF knows them: in version 2 xarray writes `_FillValue` as Zarr's own, in version 3 that
        of floats in base64.
        """
        fill = self.document.get("fill_value") if self.version == 2 and self.dimensions else None
        written = self.attributes.get("_FillValue")
        if self.version == 3 and isinstance(written, str) and str(self.document.get("data_type")).startswith("float"):
            try:
                (fill,) = struct.unpack("<d", base64.b64decode(written, validate=True))
            except (ValueError, struct.error):
                return self.attributes
            return {**self.attributes, "_FillValue": fill}
        return self.attributes if fill is None else {"_FillValue": fill, **self.attributes}

    def check_codecs(self, where: str) -> None:
        """Raise `SourceError` where a codec of the array would unpickle what it reads."""
        todo: list[Any] = [self.document]
        while todo:
            one = todo.pop()
            if isinstance(one, Mapping):
                told = [one.get(key) for key in ("id", "name")]
                if any(isinstance(name, str) and name.rpartition(".")[2].lower() == "pickle" for name in told):
                    raise SourceError(f"{where} holds pickled objects, which are never read", "store plain values")
                todo.extend(one.values())
            elif isinstance(one, list):
                todo.extend(one)


def below(path: str, name: str) -> str:
    """Return the path of what is called `name` right in the group at `path`; the root's is empty."""
    return f"{path}/{name}" if path else name


def files_of(files: Files, path: str) -> tuple[ObjectInfo, ...]:
    """Return the files below a node: what it is made of."""
    return tuple(info for name, info in files.items() if not path or name.startswith(f"{path}/"))


def children(files: Files, path: str) -> list[str]:
    """Return the names of the nodes right in a group, ascending."""
    start = len(path) + 1 if path else 0
    parts = (info.path[start:].split("/") for info in files_of(files, path))
    return sorted({some[0] for some in parts if len(some) == 2 and some[1] in DOCUMENTS})


def node_at(store: Store, files: Files, path: str) -> Node | None:
    """Return what is at a path, None for nothing. Raises `SourceError` for a document that cannot be read."""
    name = next((name for name in DOCUMENTS if below(path, name) in files), None)
    if name is None:
        return None
    data, document = _read(store, files, below(path, name))
    if name == "zarr.json":
        attributes = document.get("attributes")
    else:
        beside = below(path, ".zattrs")
        attributes = _read(store, files, beside)[1] if beside in files else {}
    version = 3 if name == "zarr.json" else 2
    return Node(path, version, document, attributes if isinstance(attributes, dict) else {}, (name, data))


def _read(store: Store, files: Files, path: str) -> tuple[bytes, dict[str, Any]]:
    where = f"{store.url}/{path}"
    if files[path].size > MAX_DOCUMENT:
        raise SourceError(f"{where} has {files[path].size} bytes, which no document has", _AGAIN)
    data = store.get_range(path, 0, files[path].size)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is damaged: {error}", _AGAIN) from error
    if not isinstance(document, dict):
        raise SourceError(f"{where} is damaged: it is no object", _AGAIN)
    return data, document
