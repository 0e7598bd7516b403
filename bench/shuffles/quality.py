"""What an order of sample numbers is worth: pure measures of a permutation, cut in batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """Of an epoch in batches of one size, of data that was stored in the order of its classes.

    `resident`: samples of the units that are needed now and were needed before, at most, so what a loader holds that
    drops each unit after its last use. `units`, `runs`: distinct units, and runs of one length, in a batch.
    `formula`: the design effect that the runs of a batch give if samples of one run are alike, 1 + the number of others
    of its run that a sample meets (Kish, Survey Sampling, 1965). `measured`: the variance of a class's share of a batch
    over that of independent draws. `correlation`: of a sample's place in the epoch and its number (Spearman).
    """

    resident: int
    units: float
    runs: float
    formula: float
    measured: float
    correlation: float


def quality(ids: Ids, *, batch: int, unit: int, run: int, classes: int) -> Quality:
    """Measure an epoch: `ids` are its sample numbers, each of [0, len(ids)) once. A last, short batch is left out."""
    rows = ids[: len(ids) // batch * batch].reshape(-1, batch)
    runs, sharing = _shared(rows // run)
    return Quality(
        resident=resident(ids, unit),
        units=_shared(rows // unit)[0],
        runs=runs,
        formula=1 + sharing,
        measured=_variance_ratio(rows * classes // len(ids), classes),
        correlation=float(np.corrcoef(np.arange(len(ids)), ids)[0, 1]),
    )


def resident(ids: Ids, unit: int) -> int:
    """Return the samples of all units that are between their first and their last use at once, at most."""
    units = ids // unit
    count, places = int(units.max()) + 1, np.arange(len(ids))
    first, last = np.full(count, len(ids)), np.full(count, -1)
    np.minimum.at(first, units, places)
    np.maximum.at(last, units, places)
    change = np.zeros(len(ids) + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, last + 1, -1)
    return int(np.cumsum(change).max()) * unit


def _shared(of: Ids) -> tuple[float, float]:
    """(distinct values in a row, with how many others of its row an entry shares its value); means over the rows."""
    ordered = np.sort(of, axis=1)
    starts = np.ones(ordered.shape, np.bool_)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    sizes = np.diff(np.append(np.flatnonzero(starts), ordered.size))
    return float(starts.sum(axis=1).mean()), float((sizes * (sizes - 1)).sum() / ordered.size)


def _variance_ratio(labels: Ids, classes: int) -> float:
    counts = np.stack([np.bincount(row, minlength=classes) for row in labels])
    share = 1 / classes
    return float(counts.var(axis=0).mean() / (labels.shape[1] * share * (1 - share)))
