"""Reads the weights that samples are drawn by: `weights=` of a dataset or a source."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.dataset import Dataset
from streamloader.errors import MixtureError, NotFoundError, SelectionError
from streamloader.format.conditions import class_number
from streamloader.format.manifest import Manifest
from streamloader.format.reader import FieldReader, read_columns
from streamloader.loader.arguments import PIECE_BYTES, Source, WeightsChoice
from streamloader.options import as_array
from streamloader.order.mixture import exact_shares
from streamloader.order.schedule import Ints
from streamloader.order.weights import Drawn
from streamloader.samples import AllBut
from streamloader.storage import open_beside
from streamloader.storage.store import Store

BALANCED = "balanced:"


def draw_by_weights(source: Source, dataset: Dataset, selection: Ints | AllBut | None, seed: int) -> Drawn:
    """Return the samples that epochs draw from a selection (None: all) by `weights=`, which is in `WeightsChoice`.

    A field that it names is read; the options of `store` hold for a file if both have the same protocol. Raises
    `SelectionError` for weights that are invalid or do not fit the dataset, and errors of reading.
    """
    choice, replacement, manifest = source.weights, source.replacement, dataset.manifest
    count = manifest.num_remaining if selection is None else len(selection)
    given: dict[str, Any] = {"drawn_from": selection, "replacement": replacement}
    chosen = slice(None) if selection is None else selection[:]
    if isinstance(choice, str) and choice.startswith(BALANCED):
        values = _read(choice.removeprefix(BALANCED), dataset, f"weights={choice!r}")[chosen]
        names, classes = np.unique(values, return_inverse=True)
        return Drawn(count, np.ones(names.size), seed, classes.astype(np.int64), **given)
    if isinstance(choice, Mapping):
        return Drawn(count, *_of_classes(choice, chosen, dataset, seed), **given)
    if isinstance(choice, str) and choice in manifest.fields:
        return Drawn(count, _read(choice, dataset, f"weights={choice!r}", texts=False)[chosen], seed, **given)
    name = f"weights={choice}" if isinstance(choice, str | os.PathLike) else "weights="
    loaded: Any = _read_file(choice, manifest, dataset.store) if isinstance(choice, str | os.PathLike) else choice
    numbers = as_array(loaded, "weights", remedy := "give a number for each sample of the dataset")
    if numbers.dtype.kind not in "biuf" or numbers.size != manifest.num_remaining:
        samples = f"{manifest.num_remaining} samples"
        problem = f"{name} has {numbers.size} values of {numbers.dtype}, the dataset has {samples}"
        raise SelectionError(problem, f"{remedy}, also if where= or exclude= leaves some out")
    return Drawn(count, numbers[chosen], seed, **given)


def class_shares(choice: WeightsChoice, dataset: Dataset, samples: Ints) -> dict[str, float]:
    """Return the share of each class in some samples, by name if it has one; {} unless `weights=` is of classes."""
    manifest = dataset.manifest
    if isinstance(choice, str) and choice.startswith(BALANCED):
        field = choice.removeprefix(BALANCED)
    elif isinstance(choice, Mapping):
        field = next(iter(choice))
    else:
        return {}
    values, counts = np.unique(_read(field, dataset, "")[samples], return_counts=True)
    names = manifest.classes.get(field, ())
    shown = [value.decode(errors="replace") if isinstance(value, bytes) else int(value) for value in values]
    labels = [names[value] if isinstance(value, int) and value < len(names) else str(value) for value in shown]
    return dict(zip(labels, (counts / samples.size).tolist(), strict=True))


def _of_classes(
    choice: Mapping[str, Any], chosen: slice | Ints, dataset: Dataset, seed: int
) -> tuple[NDArray[np.float64], int, Ints]:
    """Return the weight of each named class, the seed, and the class of each sample: -1 for one that is not named."""
    shown = f"weights={choice!r:.80}"
    remedy = "name a field, and the weights of its classes: {'label': {'cat': 2, 'dog': 1}}"
    if all(isinstance(key, int) for key in choice):
        remedy += "; weights that change are a schedule of sl.Mixture with a Source(url, weights=) for each"
    if len(choice) != 1 or not isinstance(by_class := next(iter(choice.values())), Mapping) or not by_class:
        raise SelectionError(shown, remedy)
    field = next(iter(choice))
    values = _read(field, dataset, shown)[chosen]
    classes = {_value(key, field, values, dataset.manifest, shown): key for key in by_class}
    if len(classes) < len(by_class):
        raise SelectionError(f"{shown} has a class twice", "name each class once")
    named = sorted(classes)
    try:
        shares = exact_shares([by_class[classes[value]] for value in named])
    except MixtureError as error:
        raise SelectionError(f"{shown}: {error.problem}", error.remedy) from error
    parts = lcm(*(share.denominator for share in shares))
    kinds = np.array(named, values.dtype)
    at = np.minimum(np.searchsorted(kinds, values), kinds.size - 1)
    at[kinds[at] != values] = -1
    present = np.bincount(at + 1, minlength=kinds.size + 1)[1:]
    for value, share, size in zip(named, shares, present.tolist(), strict=True):
        if share and not size:
            problem = f"{shown} has {classes[value]!r}, and none of {values.size} samples is of this class"
            raise SelectionError(problem, "leave the class out")
    return np.array([float(share * parts) for share in shares]), seed, at


def _value(key: Any, field: str, values: NDArray[Any], manifest: Manifest, shown: str) -> Any:
    """Return the value of a field that a class has in `weights=`."""
    if values.dtype == object:
        if not isinstance(key, str):
            raise SelectionError(f"{shown} has the class {key!r} of a field of texts", "name classes by text")
        return key.encode("utf-8", "surrogatepass")
    if isinstance(key, str):
        return class_number(key, tuple(manifest.classes.get(field, ())), f"{shown} names {key!r}")
    if not isinstance(key, int | np.integer | np.bool_):
        raise SelectionError(f"{shown} has the class {key!r}", "name classes by text or by whole number")
    return int(key)


def _read(name: str, dataset: Dataset, shown: str, *, texts: bool = True) -> NDArray[Any]:
    """Return all values of a field with one number (or text, as bytes) per sample. Raises `SelectionError`."""
    manifest = dataset.manifest
    usable = _usable(manifest, texts=texts)
    if name not in usable:
        description = f"is {manifest.fields[name].field}" if name in manifest.fields else "is not a field"
        kind = "a whole number or a text" if texts else "a number"
        problem = f"{shown} uses {name!r}, which {description}"
        raise SelectionError(problem, f"fields with {kind} per sample are {', '.join(usable) or 'none'}")
    layout, count = manifest.fields[name], manifest.num_remaining
    readers = {name: FieldReader(dataset.store, manifest, name, dataset.remaining)}
    piece = max(1, PIECE_BYTES * count // max(1, layout.nbytes + 64 * count))
    columns = [read_columns(readers, at, min(at + piece, count))[name] for at in range(0, count, piece)]
    if layout.field.fixed:
        return np.concatenate(columns) if columns else np.zeros(0, layout.field.dtype)
    values = np.empty(count, object)
    values[:] = [text for column in columns for text in column]
    return values


def _usable(manifest: Manifest, *, texts: bool) -> list[str]:
    fields = {name: layout.field for name, layout in manifest.fields.items()}
    numbers = {name: np.dtype(field.dtype).kind for name, field in fields.items() if field.fixed and not field.shape}
    usable = [name for name, kind in numbers.items() if kind in ("biu" if texts else "biuf")]
    return usable + [name for name, field in fields.items() if texts and field.kind == "text"]


def _read_file(choice: str | os.PathLike[str], manifest: Manifest, store: Store) -> NDArray[Any]:
    """Return the numbers in a file. Raises `SelectionError` if there is none, or something else is in it."""
    try:
        folder, name = open_beside(store, choice)
        data = bytes(folder.get(name))
    except NotFoundError as error:
        usable = ", ".join(_usable(manifest, texts=False)) or "none"
        problem = f"weights={os.fspath(choice)!r} is neither a field with a number per sample nor a file"
        raise SelectionError(problem, f"such fields are {usable}; or write 'balanced:label'") from error
    try:
        if data.startswith(b"\x93NUMPY"):
            return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))
        return np.array(data.split(), np.float64)
    except ValueError as error:
        problem = f"weights={os.fspath(choice)} cannot be read: {error}"
        raise SelectionError(problem, "write an array as .npy, or text with a number in each line") from error
