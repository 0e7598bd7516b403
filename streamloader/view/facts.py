"""What the pages say about a dataset: its fields, classes and versions, and the statistics of its fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.format.dataset import Dataset
from streamloader.show.cells import column_of

EXACT_BYTES = 64 << 20  # of a field that is read as a whole
EXACT_LENGTHS = 1 << 24  # lengths that are read as a whole
SAMPLED = 24  # places of a larger field, evenly spread, of which a chunk each is read
SAMPLED_STEPS = 8  # batches of what is no field of the dataset
BINS = 40
CLASSES = 60  # bars of the most frequent values, if these are numbers of classes


@dataclass(frozen=True)
class Histogram:
    """A histogram of what a field has: `of` says of what, and how many values were read.

    `bars`: (label, count). `ends`: the labels of the axis, "" if the bars are of classes. `numbers`: names and values,
    such as the mean.
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
        lengths = _lengths(value for part in parts for value in part)
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


def sampled_statistics(batches: Iterable[Mapping[str, Any]], name: str, classes: Sequence[str] = ()) -> Histogram:
    """Return the histogram of a column that no dataset stores as a field, of some batches."""
    columns: list[Any] = [column_of(batch, name) for batch in batches if name in batch]
    parts = [part for column in columns for part in ([column], column)[isinstance(column, list)]]
    samples = sum(map(len, columns))
    if any(isinstance(part, str | bytes) for part in parts):
        return histogram(name, _lengths(parts), f"lengths in bytes, of {samples:,} samples (sampled)")
    values = np.concatenate([np.asarray(part).reshape(-1) for part in parts]) if parts else np.zeros(0)
    return histogram(name, values, f"{values.size:,} values of {samples:,} samples (sampled)", classes)


def _lengths(values: Iterable[Any]) -> NDArray[np.int64]:
    """Return the lengths of values, of texts in bytes."""
    return np.fromiter((len(value.encode() if isinstance(value, str) else value) for value in values), np.int64)


def histogram(name: str, values: NDArray[Any], of: str, classes: Sequence[str] = ()) -> Histogram:
    """Return the histogram of values: of each class or few whole numbers, else in bins of equal width."""
    values = values.reshape(-1)
    if values.dtype.kind not in "biufc":
        return Histogram(name, of, (), ("", ""), (("values", f"{values.size:,}"),))
    if values.dtype.kind == "b":
        values = values.astype(np.uint8)
    if values.dtype.kind == "c":
        values, of = np.abs(values), f"{of}, magnitudes"
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        missing, values = int((~finite).sum()), values[finite]
    else:
        missing = 0
    if not values.size:
        return Histogram(name, of, (), ("", ""), (("values", "none"),))
    wide = values.astype(np.float64)
    numbers: dict[str, Any] = {}  # of numbers of classes, none of these says anything
    with np.errstate(over="ignore"):  # of sums and squares: infinite is shown
        if not classes:
            numbers = {"min": wide.min(), "max": wide.max(), "mean": wide.mean(), "std": wide.std()}
            numbers["median"] = np.median(wide)
    shown = [(label, f"{value:.6g}") for label, value in numbers.items()]
    shown += [("not finite", f"{missing:,}")] if missing else []
    bars = _bars(values, classes)
    of += "; a bar for each class, the most frequent first" if classes else ""
    of += f"; the {CLASSES} most frequent values are drawn" if len(bars) == CLASSES else ""
    ends = ("", "") if classes else (f"{wide.min():.6g}", f"{wide.max():.6g}")
    return Histogram(name, of, bars, ends, tuple(shown))


def with_saved(found: Histogram, saved: Mapping[str, Any]) -> Histogram:
    """Return a histogram with the exact statistics of its field that were saved in the dataset, if there are any."""
    of = saved.get(found.field)
    values = of.items() if isinstance(of, Mapping) else ()
    shown = tuple((f"saved {name}", f"{value:.6g}") for name, value in values if isinstance(value, int | float))
    return replace(found, numbers=found.numbers + shown)


def _bars(values: NDArray[Any], classes: Sequence[str]) -> tuple[tuple[str, int], ...]:
    low, high = values.min(), values.max()
    few = classes or (values.dtype.kind in "iu" and int(high) - int(low) < BINS)
    with suppress(ValueError):  # between numbers that are too close for so many bins
        if not few:
            counts, edges = np.histogram(values.astype(np.float64) / 4, BINS)  # a difference of floats may be infinite
            return tuple(
                (f"{4 * edge:.6g}", count) for edge, count in zip(edges.tolist(), counts.tolist(), strict=False)
            )
    numbers, counts = np.unique(values, return_counts=True)
    found = Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True))).most_common(CLASSES)
    pairs = found if classes else sorted(found)
    return tuple((str(classes[int(n)]) if 0 <= n < len(classes) else str(n), count) for n, count in pairs)
