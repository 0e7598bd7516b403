"""Zarr stores, version 2 and 3: the arrays right in a group are the fields. See formats/zarr/MAPPING.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamloader.conversion.sources.base import READ_THREADS
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.tensors.arrays import ArraySource, one_length, pick, stack
from streamloader.conversion.sources.tensors.dimensions import along, decoded, sample_dimension
from streamloader.conversion.sources.tensors.recut import Recut
from streamloader.conversion.sources.tensors.zarrarrays import ZarrArray, ZarrArrays, describe, open_array, zarr_errors
from streamloader.conversion.sources.tensors.zarrnodes import DOCUMENTS, Files, Node, below, children, files_of, node_at
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import FieldError, SourceError
from streamloader.format.opening import open_manifest
from streamloader.format.threads import run_all

NAME = "zarr"


def matches(listing: Listing) -> bool:
    """Return whether a document of Zarr lies right in the folder, or where `::/` leads."""
    wanted = {below(place, name) for place in (listing.inner.strip("/"), "") for name in DOCUMENTS}
    return listing.folder and any(info.path in wanted for info in listing.files)


def open_source(listing: Listing, wish: Wish) -> ArraySource:
    """Return the source: the arrays of a group, one array, or a dataset of streamloader.

    Raises `SourceError` for documents that are damaged, arrays that no field holds, and arrays of unequal lengths;
    `FieldError` for a wished field that is not there; a `FormatError` for a damaged dataset of streamloader.
    """
    files = {info.path: info for info in listing.files}
    inner = listing.inner.strip("/")
    node = node_at(listing.store, files, inner)
    if node is None:
        raise SourceError(
            f"{listing.url} is no Zarr group or array", "name a folder with a zarr.json, .zgroup or .zarray"
        )
    if node.ours:
        return _recut(listing, files, inner, wish)
    head, _, name = inner.rpartition("/")
    above = node_at(listing.store, files, head) if inner else None
    if above is not None and above.ours and node.is_array:  # one field of a dataset
        return _recut(listing, files, head, Wish(wish.fields or {name: None}))
    own = name or listing.store.url.rpartition("/")[2].removesuffix(".zarr")
    members = {own: inner} if node.is_array else {child: below(inner, child) for child in children(files, inner)}
    named = pick(members, wish, listing.url)
    nodes = run_all(lambda field: node_at(listing.store, files, members[named[field]]), named, READ_THREADS)
    found = {field: one for field, one in zip(named, nodes, strict=True) if one is not None and one.is_array}
    groups = [named[field] for field in named if field not in found]
    if not found or (groups and wish.fields):
        held = f"the groups {', '.join(groups[:10])}" if groups else "no array"
        raise SourceError(f"{listing.url} holds {held}", "name the group that holds arrays, as in store.zarr::/group")
    names = {field: named[field] for field in found}
    found, notes = _along_samples(found, names, bool(wish.fields), listing.url)
    passed_over = [*notes.pop("passed_over", ()), *groups]
    notes |= {"passed_over": passed_over} if passed_over else {}
    mine = files_of(files, inner)
    container = _container(listing, found, sum(info.size for info in mine))
    one_length({names[field]: array.length for field, array in container.arrays.items()}, listing.url)
    raw = wish.raw or any(one.dimensions is None for one in found.values())  # not as xarray writes
    whole, said = decoded(container, {field: one.told for field, one in found.items()}, raw)
    return stack(listing.url, mine, [whole], {**notes, "arrays": {field: names[field] for field in found}, **said})


def _along_samples(
    found: Mapping[str, Node], names: Mapping[str, str], wished: bool, where: str
) -> tuple[dict[str, Node], dict[str, Any]]:
    """Return the arrays along the samples' dimension, where they name their dimensions; else all."""
    dimensions = {names[field]: one.dimensions for field, one in found.items()}
    if None in dimensions.values() or not any(dimensions.values()):
        return dict(found), {}
    known = {name: own or () for name, own in dimensions.items()}
    dimension = sample_dimension(known, where)
    kept, others = along(known, dimension, wished, where)
    return (
        {field: one for field, one in found.items() if names[field] in kept},
        {"dimension": dimension, "passed_over": others},
    )


def _container(listing: Listing, found: Mapping[str, Node], stored: int) -> ZarrArrays:
    """Return the arrays as they are read; `stored` are the bytes of the whole store."""
    documents = {below(one.path, one.stored[0]): one.stored[1] for one in found.values()}
    arrays: dict[str, ZarrArray] = {}
    for field, one in found.items():
        where = f"{listing.store.url}/{one.path}".rstrip("/")
        one.check_codecs(where)
        with zarr_errors(f"the array {where} cannot be opened"):
            opened = open_array(listing.store, documents, one.path, one.version)
            arrays[field] = describe(opened, one, where, stored)
    return ZarrArrays(listing.store, documents, arrays)


def _recut(listing: Listing, files: Files, path: str, wish: Wish) -> ArraySource:
    store = listing.store.child(path) if path else listing.store
    try:
        manifest, store = open_manifest(store)
    except FieldError as error:  # a root of splits
        raise SourceError(error.problem.partition(";")[0], f"name one of them, as in {store.url}::/NAME") from error
    names = tuple(pick(manifest.fields, wish, store.url))
    classes = {key: value for key, value in manifest.provenance.items() if key == "classes"}
    notes = {**classes, "recut": {"digest": manifest.digest, "provenance": dict(manifest.provenance)}}
    return stack(listing.url, files_of(files, path), [Recut(store, manifest, names)], notes)
