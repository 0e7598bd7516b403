"""The `zarr.json` documents of a dataset, checked: each must be what the manifest implies, where it stands too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamloader.conversion.after.subject import Subject
from streamloader.errors import FormatError, NotFoundError
from streamloader.format.manifest import Manifest
from streamloader.format.metadata import dataset_documents, split_documents
from streamloader.format.opening import MAX_ROOT, ROOT, get_document
from streamloader.format.parse import parse_json
from streamloader.format.threads import run_all

_THREADS = 8
# what a compressor may be told in another way, since what it writes says how to read it
_FREE = {"zstd": ("level", "checksum"), "blosc": ("clevel", "shuffle", "typesize", "blocksize")}


def check_documents(subject: Subject) -> None:
    """Compare every document of a dataset or split with the manifest; a missing one is a problem too."""
    documents = dataset_documents(subject.manifest)

    def check(path: str) -> None:
        place = f"{path}/{ROOT}" if path else ROOT
        url = f"{subject.store.url}/{place}"
        field = path.rpartition("/")[2] if path.rpartition("/")[2] in subject.manifest.fields else ""
        size = subject.size(place)
        if size is None or size > MAX_ROOT:
            what = "is missing" if size is None else f"has {size} bytes"
            subject.add(f"{url} {what}; Zarr readers need it", place, field)
            return
        try:
            found = parse_json(get_document(subject.store, place))
        except (NotFoundError, FormatError, ValueError, RecursionError) as error:
            subject.add(f"{url} is damaged ({error})", place, field)
            return
        wrong = difference(documents[path], found)
        if wrong:
            subject.add(f"{url} is not what the manifest implies: {wrong}", place, field)

    run_all(check, documents, _THREADS)


def check_split_root(root: Mapping[str, Any], manifests: Mapping[str, Manifest], names: tuple[str, ...]) -> str:
    """Return what is wrong with the root document of the splits `names`, as far as `manifests` tell."""
    expected = split_documents(manifests)
    unknown = [name for name in names if name not in manifests]
    nodes = _at(root, "consolidated_metadata", "metadata")
    kept = {path: node for path, node in nodes.items() if path.split("/", 1)[0] not in unknown}
    consolidated = _at(root, "consolidated_metadata") | {"metadata": kept}
    return difference(expected, {**root, "consolidated_metadata": consolidated})


def _at(document: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    found: Any = document
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def difference(expected: Any, found: Any) -> str:
    """Return the first difference of two documents in words; empty where they say the same.

    Below `attributes` there may be more than is expected: readers of the manifest ignore keys that they do not know.
    """
    return _difference(_plain(expected), _plain(found), "", strict=True)


def _plain(document: Any) -> Any:
    """Return a document without what a writer is free to choose."""
    if isinstance(document, list):
        return [_plain(one) for one in document]
    if not isinstance(document, dict):
        return document
    plain = {key: _plain(value) for key, value in document.items()}
    free = _FREE.get(str(document.get("name")), ())
    if isinstance(plain.get("configuration"), dict):
        plain["configuration"] = {key: value for key, value in plain["configuration"].items() if key not in free}
    if plain.get("data_type") == "bytes":  # two names of one type
        plain["data_type"] = "variable_length_bytes"
    return plain


def _difference(expected: Any, found: Any, where: str, strict: bool) -> str:
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return next(filter(None, (_difference(*pair, f"{where}[{i}]", strict) for i, pair in pairs)), "")
    if not isinstance(expected, dict) or not isinstance(found, dict):
        return "" if expected == found else f"{where} is {_short(found)}, expected {_short(expected)}"
    for key, value in expected.items():
        place = f"{where}.{key}".lstrip(".")
        if key not in found:
            return f"{place} is missing"
        wrong = _difference(value, found[key], place, strict and key != "attributes")
        if wrong:
            return wrong
    more = next((key for key in found if key not in expected), None)
    return f"{where}.{more}".lstrip(".") + " does not belong there" if more is not None and strict else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
