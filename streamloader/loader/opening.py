"""Opens what a `Source` names: a dataset, arrays in place, or a join, with the samples that its arguments select."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from streamloader.engine.dataset import Dataset
from streamloader.errors import FieldError, FormatError, UsageError
from streamloader.format.deleted import Remaining, read_remaining
from streamloader.format.manifest import Manifest
from streamloader.format.opening import open_root
from streamloader.loader.arguments import Source, check_names, choose_fields, choose_names, sides_of
from streamloader.options import Cache, Join, in_range, whole_numbers
from streamloader.order.schedule import Ints
from streamloader.order.state import SourceIdentity
from streamloader.samples import AllBut, Numbers, distinct, parse_range
from streamloader.storage import open_store, references_url
from streamloader.storage.store import Store
from streamloader.zarr.coordinates import time_labels
from streamloader.zarr.sampling import open_arrays

OTHER_LINES = "exclude={}: all lines are of other datasets, so no sample of {} is left out"


def open_dataset(
    source: Source,
    fields: Sequence[str] | None = None,
    *,
    columns: Sequence[str] = (),
    memory: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    cache: Cache | None = None,
) -> Dataset:
    """Open a dataset; `memory` limits the numbers of the samples that `where=` selects.

    `columns`: the names of the batch's columns other than fields. `shuffle`: as in `Anchors.aligned`. `seed`: that of
    draws by weights. Raises `UsageError` for arguments that do not fit what the URL has, and errors of reading.
    """
    if isinstance(source.url, Join):
        return _open_join(source, source.url, fields, columns, memory=memory, seed=seed, cache=cache)
    where: Any = source.where
    if isinstance(where, str):  # parsed before anything is opened
        from streamloader.format.conditions import Condition

        where = parse_range(where) or Condition.parse(where)
    if source.used:
        return _open_arrays(source, where, fields, columns, memory=memory, shuffle=shuffle, cache=cache)
    manifest, store, _ = open_root(open_store(source.url, source.storage_options), source.split, source.version)
    store = store.cached(cache, manifest.digest, versions=True)
    names = choose_fields(manifest.fields, fields, columns)
    remaining = read_remaining(store, manifest)
    chosen = _select(where, manifest, store, memory, remaining)
    left = _exclude(source, chosen, manifest.num_remaining, store)
    count = 0 if left is None else (manifest.num_remaining if chosen is None else len(chosen)) - len(left)
    return draw(source, Dataset(store, manifest, names, left, excluded=count, remaining=remaining), seed)


def _open_arrays(
    source: Source,
    where: Any,
    fields: Sequence[str] | None,
    columns: Sequence[str],
    *,
    memory: int | None,
    shuffle: bool,
    cache: Cache | None,
) -> Dataset:
    """Open arrays in place; the arguments are those of `open_dataset`, with `where` parsed."""
    if source.version is not None:
        raise UsageError(f"version={source.version} of arrays in place", "leave it out, or leave sample_axis= out")
    if source.exclude is not None:
        raise UsageError("exclude= of arrays in place", "select the other elements of the sample axis with where=")
    if source.weights is not None:
        remedy = "mix a Source(where=) of each part with sl.Mixture, or convert the arrays to a dataset"
        raise UsageError("weights= of arrays in place", remedy)
    url: Any = source.url  # of no join: these are opened before
    root = open_store(references_url(url), source.storage_options)
    store = root if source.split is None else root.child(source.split)
    names = fields if fields is None else choose_names(fields)
    options: dict[str, Any] = {"aligned": shuffle, "memory": memory, "statistics": root}
    opened = None
    with suppress(FieldError, FormatError):  # twice: no checksum shows whether metadata were damaged in transfer
        opened = open_arrays(store, source, names, where, **options)
    store, manifest, arrays = opened or open_arrays(store, source, names, where, **options)
    if cache is not None:
        store = _with_cache(store, cache, manifest.digest)
    dataset = Dataset(store, manifest, tuple(arrays.columns), arrays=arrays)
    check_names(manifest.fields, [*dataset.names, *dataset.output_names], columns)
    return dataset


def _with_cache(store: Store, cache: Cache, digest: str) -> Store:
    """Return a store of arrays with the cache. Raises `UsageError` unless it is for these, or they are a snapshot."""
    if not cache.arrays and store.location.protocol != "icechunk":
        problem = f"cache= of {store.url}, whose arrays are read in place and may be overwritten"
        raise UsageError(problem, "give Cache(..., arrays=True) if they do not change, or leave cache= out")
    # of other metadata than those of the URL
    return store.cached(cache, sha256(f"{store.url} {digest}".encode()).hexdigest())


def _open_join(
    source: Source,
    join: Join,
    fields: Sequence[str] | None,
    columns: Sequence[str],
    *,
    memory: int | None,
    seed: int,
    cache: Cache | None,
) -> Dataset:
    """Open both datasets of a join; the arguments are those of `open_dataset`. Raises as `Join`."""
    from streamloader.loader.join import join_datasets

    sides = sides_of(source, join)
    for side in sides:
        if side.used:
            remedy = "convert the arrays to a dataset with streamloader convert"
            raise UsageError(f"a Join with {side.url} read as arrays in place", remedy)
    if sides[1].weights is not None:
        raise UsageError(f"weights= of {sides[1].url}, the right side of a Join", "give weights= to the left side")
    nested = isinstance(sides[0].url, Join)
    left = open_dataset(replace(sides[0], weights=None), None if nested else (), memory=memory, cache=cache)
    right = open_dataset(sides[1], (), memory=memory, cache=cache)
    return draw(sides[0], join_datasets(join, left, right, fields, columns), seed)


def choose_versions(
    sources: Sequence[Source], datasets: Sequence[Dataset], saved: Sequence[SourceIdentity]
) -> list[Source]:
    """Return the sources, those of which a state has another version than `datasets` with that version."""
    opened = {each.manifest.digest for dataset in datasets for each in (dataset, *(side[0] for side in dataset.joined))}
    versions = [(each.digest, each.version) for each in saved]
    versions += [(digest, version) for each in saved for digest, version, _ in each.joined]
    missing = [(digest, version) for digest, version in versions if version and digest not in opened]
    return [_at_version(source, dataset, missing) for source, dataset in zip(sources, datasets, strict=True)]


def _at_version(source: Source, dataset: Dataset, missing: Sequence[tuple[str, int]]) -> Source:
    """Return a source with the version that has one of the `missing` digests, if it has one."""
    if isinstance(source.url, Join):
        sides = sides_of(source, source.url)
        opened = replace(dataset, joined=dataset.joined[:-1]), dataset.joined[-1][0]
        left, right = (_at_version(side, each, missing) for side, each in zip(sides, opened, strict=True))
        return source if (left, right) == sides else Source(replace(source.url, left=left, right=right))
    for digest, version in missing:
        if source.version is None and dataset.arrays is None and version != dataset.manifest.generation:
            store = open_store(source.url, source.storage_options)
            with suppress(UsageError):  # a version whose manifest was not kept
                if open_root(store, source.split, version).manifest.digest == digest:
                    return replace(source, version=version)
    return source


def _select(
    where: Any, manifest: Manifest, store: Store, memory: int | None, remaining: Remaining | None = None
) -> Ints | None:
    """Return the selection of `where`: `Condition`, `Numbers`, or as in `WhereChoice` but for texts; None: all samples.

    A condition reads its fields, which have one number or text per sample, in pieces; its class names and units of
    times are those of the manifest. Raises `SelectionError` for an unknown or unsuitable field, before anything is
    read, and for an empty selection; `MemoryBudgetError` if the numbers of the samples take more than `memory` bytes.
    """
    if where is None:
        return None
    from streamloader.format.conditions import Condition, matching_samples
    from streamloader.order.selection import check_fits, check_some, select

    if not isinstance(where, Condition):
        where = where.chosen if isinstance(where, Numbers) else where
        return select(where, manifest.num_remaining, memory)
    times, check = time_labels(manifest), partial(check_fits, memory=memory)
    samples = matching_samples(where, store, manifest, remaining, times=times, check=check)
    return check_some(samples, manifest.num_remaining)


def _exclude(source: Source, selection: Ints | None, num_samples: int, store: Store) -> Ints | AllBut | None:
    """Return a selection of a source's samples (None: all) without those in `exclude=`, which may name files of them.

    Raises as `number_files`, and `SelectionError` for other values
    than sample numbers, for a line of a file without one, and if no sample is left; `NotFoundError` without a file.
    """
    choice: Any = source.exclude
    if choice is None:
        return selection
    from streamloader.format.conditions import number_files, parse_lines
    from streamloader.order.selection import exclude

    if isinstance(choice, str | os.PathLike):
        own = {"split": source.split, "source": store.url}
        files = list(number_files(store, choice, "exclude"))
        choice = np.concatenate([parse_lines(data, name, num_samples, own) for name, data in files])
        if not choice.size and any(data.strip() for _, data in files):
            warnings.warn(OTHER_LINES.format(source.exclude, store.url), stacklevel=2)
    excluded = distinct(in_range(whole_numbers(choice, "exclude"), num_samples, "exclude"))
    return exclude(selection, excluded, num_samples)


def draw(source: Source, dataset: Dataset, seed: int) -> Dataset:
    """Return a dataset with the samples that epochs draw from its selection, if the source has `weights=`."""
    if source.weights is None:
        return dataset
    from streamloader.loader.weights import draw_by_weights

    return replace(dataset, selection=draw_by_weights(source, dataset, dataset.selection, seed))  # type: ignore[arg-type]
