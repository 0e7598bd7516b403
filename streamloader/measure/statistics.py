"""Fits the mean and standard deviation of arrays and images, which `normalize=` takes: `streamloader stats`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError, UsageError
from streamloader.format.opening import STATISTICS
from streamloader.images.decode import ENCODINGS
from streamloader.loader.arguments import Source
from streamloader.loader.dataset import NumpyDataset
from streamloader.options import Join, Sampling
from streamloader.storage import open_store, references_url

BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Moments:
    """Count, mean, and sum of squared differences from the mean of some values; merged as by Chan et al. (1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = np.inf
    high: float = -np.inf

    @classmethod
    def of(cls, values: NDArray[Any]) -> "Moments":
        """Return the moments of the values that are not NaN."""
        wide = values.astype(np.float64, copy=False).reshape(-1)
        wide = wide[~np.isnan(wide)]
        if not wide.size:
            return cls()
        mean = float(wide.mean())
        return cls(wide.size, mean, float(np.square(wide - mean).sum()), float(wide.min()), float(wide.max()))

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        if not count:
            return self
        difference = other.mean - self.mean
        mean = self.mean + difference * other.count / count
        squares = self.squares + other.squares + difference**2 * self.count * other.count / count
        return Moments(count, mean, squares, min(self.low, other.low), max(self.high, other.high))

    def to_dict(self) -> dict[str, float | int]:
        """Return JSON values."""
        std = float(np.sqrt(self.squares / max(1, self.count)))
        return {"count": self.count, "mean": self.mean, "std": std, "min": self.low, "max": self.high}


def fit(
    source: str | os.PathLike[str] | Join | Source, *, fields: Sequence[str] | None = None, memory: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return count, mean, std, min and max of each array, channel and image, as `normalize=` takes them.

    `source`: the URL of a dataset, or a `Source`, whose `where`, `exclude`, `sample_axis`, `channels` and `decode_cf`
    say of which samples or elements; its windows, patches and weights do not count. `fields`: their names, default all.
    `memory`: for the loader, in bytes, default what it needs.

    Those of images are lists, a number for each channel from 0 to 1, as `Decode(normalize=)` takes them. Reads each
    chunk about once; NaN is left out. Raises the errors of `StreamingDataset`, `FieldError` for values that are all
    NaN, and `UsageError` for a dataset without samples, and for fields without numbers if they are given, or if there
    are no others.
    """
    single = source if isinstance(source, Source) else Source(source)
    single = replace(single, windows=None, patches=None, normalize=None, weights=None)
    options = {**vars(single), "shuffle": False, "remainder": "uneven", "memory": memory, "fields": fields}
    probe = NumpyDataset(batch_size=1, **options)
    if not probe.num_samples:
        raise UsageError(f"{single.url} has no samples", "give a dataset with samples")
    numbers = {name: field for name, field in probe.fields.items() if field.fixed}
    images = [name for name, field in probe.fields.items() if field.kind == "bytes" and field.encoding in ENCODINGS]
    others = {name: field for name, field in probe.fields.items() if name not in {*numbers, *images}}
    if others and (fields or single.used or not (numbers or images)):
        name, field = next(iter(others.items()))
        kind = "a sparse matrix" if single.used else str(field)
        raise UsageError(f"{name!r} is {kind}, which has no mean", "name arrays of numbers and images in fields=")
    found: dict[str, list[Moments]] = {}
    if numbers:
        size = sum(field.item_bytes for field in numbers.values())
        batch = max(1, min(probe.num_samples, BATCH_BYTES // max(1, size)))
        chosen = options if single.used else {**options, "fields": list(numbers)}
        for columns in NumpyDataset(batch_size=batch, **chosen):
            _add(found, {name: [values] for name, values in _arrays_of(columns, single)})
    if images:
        for sample in NumpyDataset(batch_size=None, decode=True, **{**options, "fields": images}):
            _add(found, {name: list(sample[name].reshape(-1, 3).T / 255) for name in images})
    empty = [name for name, moments in found.items() if not moments[0].count]
    if empty:
        raise FieldError(f"all values of {', '.join(empty)} are NaN", "leave them out")
    described = {name: [each.to_dict() for each in moments] for name, moments in found.items()}
    return {
        name: {key: [each[key] for each in of] if name in images else of[0][key] for key in of[0]}
        for name, of in described.items()
    }


def _add(found: dict[str, list[Moments]], values: Mapping[str, list[NDArray[Any]]]) -> None:
    """Add the moments of the values of each channel."""
    for name, channels in values.items():
        before = found.get(name, [Moments()] * len(channels))
        found[name] = [moments + Moments.of(of) for moments, of in zip(before, channels, strict=True)]


def fit_document(
    url: str,
    sampling: Sampling,
    *,
    fields: tuple[str, ...] | None,
    split: str | None,
    where: str | None,
    exclude: str | None,
    storage_options: Mapping[str, Any],
    memory: int | None,
) -> str:
    """Return the JSON document of statistics, which `normalize=` reads. Raises as `fit`."""
    source = Source(url, split, where, storage_options, exclude=exclude, **vars(sampling))
    shown = open_store(references_url(url), storage_options).url
    found = {"url": shown, "split": split, "where": where, "statistics": fit(source, fields=fields, memory=memory)}
    return json.dumps(found, indent=1)


def save_in(url: str, document: str, storage_options: Mapping[str, Any] | None) -> None:
    """Save a document of statistics in the dataset at a URL, for `normalize=True`, also of its splits."""
    open_store(url, storage_options).put(STATISTICS, document.encode())


def _arrays_of(columns: Mapping[str, Any], sampling: Sampling) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the values of each array and channel of a batch."""
    for name, column in columns.items():
        if name in sampling.columns:
            for number, channel in enumerate(sampling.columns[name].names):
                yield channel, column[:, number]
        else:
            yield name, column
