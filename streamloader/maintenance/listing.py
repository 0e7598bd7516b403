"""Finds the datasets below a URL, by listings of single folders: the objects of a dataset are not listed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from streamloader.errors import (
    AccessError,
    FormatError,
    IncompleteError,
    NotADatasetError,
    NotFoundError,
    StreamloaderError,
    UnsupportedError,
    VersionError,
)
from streamloader.format import opening
from streamloader.format.manifest import Manifest
from streamloader.storage import Store, open_store
from streamloader.storage.objects import join_path
from streamloader.storage.process import run_all
from streamloader.zarr.metadata import read_group

THREADS = 16  # folders that are looked into at the same time
DEPTH = 4  # of folders below the URL
ZARR_2 = (".zgroup", ".zarray")  # documents of Zarr version 2


@dataclass(frozen=True)
class Listed:
    """What is at the `path` below the URL; "" is the URL itself.

    `kind`: a dataset, one that is unfinished, damaged, or of a format version that is not supported here; or Zarr that
    others wrote. Of a dataset, `num_samples` is the number of samples, `stored` the size of all shards in bytes,
    `version` the number of the last version, the highest of all splits, and `splits` the samples by split. Of Zarr,
    `arrays` is the number of arrays. `problem` says why it cannot be opened.
    """

    path: str
    url: str
    kind: Literal["dataset", "unfinished", "zarr", "unsupported", "damaged"]
    num_samples: int | None = None
    stored: int | None = None
    version: int | None = None
    splits: Mapping[str, int] = field(default_factory=dict)
    arrays: int | None = None
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON values."""
        return {**vars(self), "splits": dict(self.splits)}


def list_datasets(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> list[Listed]:
    """Return what is at `url` or in folders below it, sorted by path.

    Looks into folders that are neither, at most `DEPTH` deep. That takes a listing and three small requests for each
    folder, and one for each dataset. Raises `StorageError`.
    """
    store = open_store(url, storage_options)
    found: list[Listed] = []
    folders = [""]
    for depth in range(DEPTH + 1):
        looked = run_all(lambda path: _look(store, path, first=not path), folders, THREADS)
        found += [each for each in looked if isinstance(each, Listed)]
        folders = [path for paths in looked if not isinstance(paths, Listed) for path in paths]
        if depth == DEPTH or not folders:
            break
    return sorted(found, key=lambda each: each.path)


def _look(root: Store, path: str, *, first: bool) -> Listed | list[str]:
    """Return what is in a folder, or the paths of the folders in it if that is nothing."""
    store = root.child(path)
    try:
        document = opening.read_object(store, opening.ROOT)
        return _zarr(store, path) if opening.manifest_json(document) is None else _dataset(store, path, document)
    except FormatError as error:
        later = isinstance(error, VersionError)
        return Listed(path, store.url, "unsupported" if later else "damaged", problem=error.problem)
    except (
        NotFoundError,
        AccessError,
    ):  # a store that must not be listed says of a missing object that it is forbidden
        pass
    try:
        names = store.children()
        if "_streamloader" in names:
            opening.read_root(store)
        if any(store.head(name) is not None for name in ZARR_2):
            return _zarr(store, path)
        return [join_path(path, name) for name in names]
    except IncompleteError as error:
        return Listed(path, store.url, "unfinished", problem=error.problem)
    except (NotADatasetError, NotFoundError, AccessError, UnsupportedError):
        if first:
            raise
        return []


def _dataset(store: Store, path: str, document: dict[str, Any]) -> Listed:
    names = opening.split_names(document)
    manifests: dict[str, Manifest] = {}
    for name in names or ("",):
        manifests[name] = opening.open_document(store, document, name or None).manifest
    samples = {name: manifest.num_remaining for name, manifest in manifests.items()}
    layouts = [layout for manifest in manifests.values() for layout in manifest.fields.values()]
    version = max(manifest.generation for manifest in manifests.values())
    splits = samples if names else {}
    stored = sum(layout.stored for layout in layouts)
    return Listed(path, store.url, "dataset", sum(samples.values()), stored, version, splits)


def _zarr(store: Store, path: str) -> Listed:
    with suppress(StreamloaderError):
        return Listed(path, store.url, "zarr", arrays=len(read_group(store).arrays))
    return Listed(path, store.url, "zarr")
