"""Fits the mean and standard deviation of arrays, by which `normalize=` scales them: `streamloader stats`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError, UsageError
from streamloader.format.opening import STATISTICS
from streamloader.options import Sampling
from streamloader.pytorch.arguments import WhereChoice
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.storage import open_store

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
    def of(cls, values: NDArray[Any]) -> Moments:
        """Return the moments of the values that are not NaN."""
        wide = values.astype(np.float64, copy=False).reshape(-1)
        wide = wide[~np.isnan(wide)]
        if not wide.size:
            return cls()
        mean = float(wide.mean())
        return cls(wide.size, mean, float(np.square(wide - mean).sum()), float(wide.min()), float(wide.max()))

    def __add__(self, other: Moments) -> Moments:
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
    url: str,
    sampling: Sampling,
    *,
    fields: tuple[str, ...] | None = None,
    where: WhereChoice = None,
    storage_options: Mapping[str, Any] | None = None,
    memory: int | None = None,
) -> dict[str, dict[str, float | int]]:
    """Return count, mean, std, min and max of each array and channel, over the elements that `where` selects.

    Reads each chunk about once; NaN is left out. Raises the errors of `StreamingDataset`, and `FieldError` for values
    that are all NaN, `UsageError` for sparse matrices.
    """
    single = replace(sampling, windows=None, patches=None)
    options: dict[str, Any] = {**vars(single), "fields": fields, "where": where, "storage_options": storage_options}
    options |= {"shuffle": False, "remainder": "uneven", "memory": memory}
    probe = StreamingDataset(url, batch_size=1, **options)
    sparse = [name for name, field in probe.fields.items() if not field.fixed]
    if sparse:
        problem = f"{sparse[0]!r} is a sparse matrix, which normalize= does not scale"
        raise UsageError(problem, "name other arrays in fields=")
    size = sum(field.item_bytes for field in probe.fields.values())
    batch = max(1, min(probe.num_samples, BATCH_BYTES // max(1, size)))
    found: dict[str, Moments] = {}
    for columns in StreamingDataset(url, batch_size=batch, **options):
        for name, values in _arrays_of(columns, single):
            found[name] = found.get(name, Moments()) + Moments.of(values)
    empty = [name for name, moments in found.items() if not moments.count]
    if empty:
        raise FieldError(f"all values of {', '.join(empty)} are NaN", "leave them out")
    return {name: moments.to_dict() for name, moments in found.items()}


def document_of(url: str, where: str | slice | None, found: Mapping[str, Any]) -> str:
    """Return the JSON document of statistics, which `normalize=` reads."""
    shown = f"{where.start or ''}:{where.stop or ''}" if isinstance(where, slice) else where
    return json.dumps({"url": open_store(url).url, "where": shown, "statistics": found}, indent=1)


def save_in(url: str, document: str, storage_options: Mapping[str, Any] | None) -> None:
    """Save a document of statistics in the dataset at a URL, for `normalize=True`."""
    open_store(url, storage_options).put(STATISTICS, document.encode())


def _arrays_of(columns: Mapping[str, Any], sampling: Sampling) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the values of each array and channel of a batch."""
    for name, column in columns.items():
        if name in sampling.columns:
            for number, channel in enumerate(sampling.columns[name].names):
                yield channel, column[:, number].numpy()
        else:
            yield name, column.numpy()
