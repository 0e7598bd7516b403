"""What the pages say about a dataset: its fields, classes and versions, and the statistics of its fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.format.dataset import Dataset
from streamloader.loader.base import Loader
from streamloader.show.cells import to_numpy

EXACT_BYTES = 64 << 20  # of a field that is read as a whole
EXACT_LENGTHS = 1 << 24  # lengths that are read as a whole
SAMPLED = 24  # places of a larger field, evenly spread, of which a chunk each is read
SAMPLED_STEPS = 8  # batches of arrays that are read in place
BINS = 40
CLASSES = 60  # bars of the most frequent values, if these are numbers of classes


@dataclass(frozen=True)
class Histogram:
    """A histogram of what a field has: `of` says of what, and how many values were read.

    `bars`: (label, count). `ends`: the labels of the axis. `numbers`: names and values, such as the mean.
    """

    field: str
    of: str
    bars: tuple[tuple[str, int], ...]
    ends: tuple[str, str]
    numbers: tuple[tuple[str, str], ...]

    @property
    def most(self) -> int:
        """The largest count, at least 1."""
        return max((count for _, count in self.bars), default=1) or 1


def field_rows(dataset: Dataset) -> list[dict[str, Any]]:
    """Return what is known of each field by the manifest."""
    count = dataset.manifest.num_samples
    return [
        {
            "name": name,
            "type": str(layout.field),
            "codec": layout.codec,
            "decoded": layout.nbytes,
            "stored": layout.stored,
            "chunk": layout.chunk,
            "shards": layout.num_shards(count),
            "lengths": name in dataset.manifest.lengths,
            "in memory": layout.resident,
        }
        for name, layout in dataset.manifest.fields.items()
    ]


def statistics(dataset: Dataset, name: str) -> Histogram:
    """Return the histogram of a field: of its values, or of the lengths of its samples. Reads them, or some."""
    layout, count = dataset.manifest.fields[name], len(dataset)
    if not layout.field.fixed:
        unit = "elements" if layout.field.kind == "ragged" else "bytes"
        if name in dataset.manifest.lengths and count <= EXACT_LENGTHS:
            return histogram(name, dataset.lengths(name), f"lengths in {unit}, of all {count:,} samples (exact)")
        parts = _sampled(dataset, name, count)
        lengths = np.array([len(value) for part in parts for value in part], np.int64)
        return histogram(name, lengths, f"lengths in {unit}, of {lengths.size:,} samples of {count:,} (sampled)")
    if layout.nbytes <= EXACT_BYTES:
        values = dataset.read(name, 0, count)
        return histogram(name, values, f"all {values.size:,} values (exact)", dataset.classes.get(name, ()))
    values = np.concatenate([np.asarray(part).reshape(-1) for part in _sampled(dataset, name, count)])
    about = f"{values.size:,} values of {count:,} samples, at places that are spread evenly (sampled)"
    return histogram(name, values, about, dataset.classes.get(name, ()))


def _sampled(dataset: Dataset, name: str, count: int) -> list[Any]:
    layout = dataset.manifest.fields[name]
    chunk, size = layout.chunk, layout.nbytes / max(1, dataset.manifest.num_samples)
    places = min(SAMPLED, max(1, int(EXACT_BYTES / max(1.0, size * chunk))))
    starts = np.unique(np.linspace(0, max(0, count - chunk), places).astype(np.int64) // chunk * chunk)
    return [dataset.read(name, int(start), min(count, int(start) + chunk)) for start in starts]


def sampled_statistics(loader: Loader, name: str) -> Histogram:
    """Return the histogram of a column of arrays that are read in place, of some batches."""
    steps = np.unique(np.linspace(0, len(loader) - 1, SAMPLED_STEPS).astype(np.int64)).tolist()
    batches = list(loader.replay(0, steps))
    columns: list[Any] = [to_numpy(batch[name]) for batch in batches if name in batch]
    parts = [
        np.asarray(part).reshape(-1) for column in columns for part in ([column], column)[isinstance(column, list)]
    ]
    values = np.concatenate(parts) if parts else np.zeros(0)
    samples = sum(map(len, columns))
    return histogram(name, values, f"{values.size:,} values of {samples:,} samples (sampled)")


def histogram(name: str, values: NDArray[Any], of: str, classes: Sequence[str] = ()) -> Histogram:
    """Return the histogram of values: of each class or few whole numbers, else in bins of equal width."""
    values = values.reshape(-1)
    if values.dtype.kind == "b":
        values = values.astype(np.uint8)
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        missing, values = int((~finite).sum()), values[finite]
    else:
        missing = 0
    if not values.size:
        return Histogram(name, of, (), ("", ""), (("values", "none"),))
    wide = values.astype(np.float64)
    numbers = {"min": wide.min(), "max": wide.max(), "mean": wide.mean(), "std": wide.std(), "median": np.median(wide)}
    shown = [(label, f"{value:.6g}") for label, value in numbers.items()]
    shown += [("not finite", f"{missing:,}")] if missing else []
    bars = _bars(values, classes)
    ends = (bars[0][0], bars[-1][0]) if classes else (f"{wide.min():.6g}", f"{wide.max():.6g}")
    return Histogram(name, of, bars, ends, tuple(shown))


def with_saved(found: Histogram, saved: Mapping[str, Any]) -> Histogram:
    """Return a histogram with the exact statistics of its field that were saved in the dataset, if there are any."""
    of = saved.get(found.field)
    values = of.items() if isinstance(of, Mapping) else ()
    shown = tuple((f"saved {name}", f"{value:.6g}") for name, value in values if isinstance(value, int | float))
    return replace(found, numbers=found.numbers + shown)


def _bars(values: NDArray[Any], classes: Sequence[str]) -> tuple[tuple[str, int], ...]:
    low, high = values.min(), values.max()
    whole = values.dtype.kind in "iu"
    if classes or (whole and int(high) - int(low) < BINS):
        numbers, counts = np.unique(values, return_counts=True)
        found = Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True))).most_common(CLASSES)
        pairs = sorted(found) if not classes else found
        return tuple((str(classes[n]) if 0 <= n < len(classes) else str(n), count) for n, count in pairs)
    counts, edges = np.histogram(values.astype(np.float64), BINS)
    return tuple((f"{edge:.6g}", count) for edge, count in zip(edges.tolist(), counts.tolist(), strict=False))
