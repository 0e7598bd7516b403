"""Hugging Face datasets that were saved by `save_to_disk`. See formats/huggingface/MAPPING.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamloader.conversion.sources.arrow.arrowfields import read_json
from streamloader.conversion.sources.arrow.arrowfiles import IPC
from streamloader.conversion.sources.arrow.arrowopen import open_tables
from streamloader.conversion.sources.arrow.arrowtables import Tables
from streamloader.conversion.sources.base import Range, read_range
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "huggingface"
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_JSON_BYTES = 64 << 20  # more than any description has; it is read whole
_AGAIN = "save the dataset again with save_to_disk"


def matches(listing: Listing) -> bool:
    """Return whether the folder is a saved dataset, or several saved as splits."""
    paths = {info.path for info in listing.files}
    return listing.folder and ({_STATE, _INFO} <= paths or _SPLITS in paths)


def open_source(listing: Listing, wish: Wish) -> Tables:
    """Return the source, with the headers of every record batch read; rows are in the order of the dataset.

    Raises `SourceError` for a folder of splits, naming them, for files that are missing or damaged, and for a dataset
    that is a selection of what is stored; `FieldError` for columns that no field holds.
    """
    files = {info.path: info for info in listing.files}
    if _STATE not in files:
        splits = sorted(path.split("/")[0] for path in files if path.endswith(f"/{_STATE}") and path.count("/") == 1)
        if not splits:
            raise SourceError(f"{listing.url} holds no {_STATE}", "give a folder that save_to_disk has written")
        raise SourceError(
            f"{listing.url} holds the splits {', '.join(splits)}", f"convert one: {listing.url}/{splits[0]}"
        )
    state = _read(listing.store, files[_STATE])
    if any(state.get(key) for key in ("_indices_data_files", "_indices_files")):
        problem = f"{listing.url} is a selection of the rows that are stored"
        raise SourceError(problem, "save dataset.flatten_indices() instead")
    names = _data_files(state)
    if not names:
        raise SourceError(f"{listing.store.url}/{_STATE} names no files", _AGAIN)
    missing = next((name for name in names if name not in files), None)
    if missing is not None:
        raise SourceError(f"{listing.url} lacks the file {missing!r}, which its {_STATE} names", _AGAIN)
    described = [files[name] for name in (_STATE, _INFO) if name in files]
    features = _read(listing.store, files[_INFO]).get("features") if _INFO in files else None
    source = open_tables(listing, [files[name] for name in names], IPC, wish, features)
    identity = tuple(sorted([*source.files, *described], key=lambda info: info.path))
    notes = {key: value for key, value in source.notes.items() if key != "passed_over"}
    return replace(source, files=identity, notes=notes)


def _data_files(state: Mapping[str, Any]) -> list[str]:
    told = state.get("_data_files")
    names = [one.get("filename") for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    return [str(name) for name in names]


def _read(store: Store, info: ObjectInfo) -> Mapping[str, Any]:
    where = f"{store.url}/{info.path}"
    if info.size > _JSON_BYTES:
        raise SourceError(f"{where} has {info.size} bytes", f"a description has at most {_JSON_BYTES}; {_AGAIN}")
    found = read_json(bytes(read_range(store, Range(info.path, 0, info.size))))
    if not isinstance(found, dict):
        raise SourceError(f"{where} is no JSON object", _AGAIN)
    return found
