"""Bad samples: damaged in the store, undecodable, or such that the transform raises; and what a batch has instead.

With `on_error="raise"` the first one ends the pass. Otherwise `Batch.faults` has them by row, and `Batch.blank` the
rows that have no values. At the end `fill` makes these zeros ("mask"), or copies of other rows of the step ("replace").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.transform import Ragged
from streamloader.errors import FormatError, StreamloaderError
from streamloader.order.epoch_order import mix
from streamloader.order.schedule import BatchPlan, Ints

# The number of a bad sample, the field that is bad, "" for the transform, the error, and whether it counts: of the
# packed rows that a bad document is cut into only the first one does.
Fault = tuple[int, str, StreamloaderError, bool]
# Errors by slot row (see `residence.py`) of the samples that a residence has no values of.
BadRows = dict[int, StreamloaderError]


def is_bad_data(error: BaseException | None) -> bool:
    """Return whether an error is one of stored bytes, which no retry mends, and not of the store."""
    return isinstance(error, FormatError)


def detached(error: StreamloaderError) -> StreamloaderError:
    """Return a copy of an error that holds no frames, and so no memory of a batch."""
    return type(error)(*error.args)


def forget(bad: BadRows, first: int, stop: int) -> None:
    """Remove the slot rows [first, stop)."""
    for row in [row for row in list(bad) if first <= row < stop] if bad else ():  # a copy: other threads add some
        del bad[row]


def replacements(plan: BatchPlan, blank: Collection[int], seed: int) -> Ints:
    """Return the row that each row takes its sample from: itself, or for a `blank` one another row of its step.

    That is row `hash % n` of the n rows of the step that are not blank, where hash is splitmix64 of the seed, the epoch
    and the position in turn. A blank row of a step without others keeps its own.
    """
    source = np.arange(len(plan.rows))
    empty = np.zeros(len(source), np.bool_)
    empty[list(blank)] = True
    for first in range(0, len(source), plan.step_rows):
        rows = source[first : first + plan.step_rows]
        good, bad = rows[~empty[rows]], rows[empty[rows]]
        if good.size and bad.size:
            source[bad] = good[(_hashed(seed, plan.epoch, plan.positions[bad]) % np.uint64(good.size)).astype(np.int64)]
    return source


def _hashed(seed: int, epoch: int, positions: Ints) -> NDArray[np.uint64]:
    key = mix(mix(np.array([seed], np.uint64)) ^ np.uint64(epoch))
    return mix(key ^ positions.astype(np.uint64))


def fill(columns: Mapping[str, Any], source: Ints, blank: Sequence[int]) -> dict[str, Any]:
    """Return the columns of a batch in which each row is that of its `source`, and those of `blank` are zeros.

    Lists get empty values of the type of the others. Packed columns, which have no rows of samples, are left as they
    are. Arrays and tensors are changed in place. A tuple has a column for each step, whose rows have sources in it.
    """
    return {name: _filled(column, source, blank) for name, column in columns.items()}


def fill_samples(samples: Sequence[Mapping[str, Any]], blank: Sequence[int]) -> list[dict[str, Any]]:
    """Return samples, each given as the columns of a batch of one, with zeros and empty values in the `blank` ones."""
    one = np.zeros(1, np.int64)
    return [fill(sample, one, [0]) if row in blank else dict(sample) for row, sample in enumerate(samples)]


def _filled(column: Any, source: Ints, blank: Sequence[int]) -> Any:
    if isinstance(column, Ragged):
        return _filled_ragged(column, source, blank)
    if isinstance(column, tuple):
        return _filled_steps(column, source, blank)
    moved = np.flatnonzero(source != np.arange(len(source)))
    if not isinstance(column, list):
        if moved.size:
            column[moved] = column[source[moved]]
        if blank:
            column[list(blank)] = 0
        return column
    rows = [column[row] if row == at else deepcopy(column[row]) for at, row in enumerate(source.tolist())]
    other = next((value for row, value in enumerate(rows) if row not in {*blank} and value is not None), None)
    for row in blank:
        rows[row] = empty_like(rows[row] if other is None else other)
    return rows


def _filled_steps(columns: tuple[Any, ...], source: Ints, blank: Sequence[int]) -> tuple[Any, ...]:
    out, first = [], 0
    for column in columns:
        stop = first + (len(column.offsets) - 1 if isinstance(column, Ragged) else len(column))
        of_step = [row - first for row in blank if first <= row < stop]
        out.append(_filled(column, source[first:stop] - first, of_step))
        first = stop
    return tuple(out)


def _filled_ragged(column: Ragged, source: Ints, blank: Sequence[int]) -> Ragged:
    packed = len(column.values) != column.offsets[-1]  # rows of one length, which have no rows of samples
    if packed:
        return column
    sizes = np.diff(column.offsets)[source]
    sizes[list(blank)] = 0
    edges = np.concatenate([[0], np.cumsum(sizes)])
    parts = [column.values[begin : begin + size] for begin, size in zip(column.offsets[source], sizes, strict=True)]
    return Ragged(np.concatenate([column.values[:0], *parts]), edges)


def empty_like(value: Any) -> Any:
    """Return zeros in the shape of an array or a tensor, and for others the empty value of their type: 0, "", []."""
    if isinstance(value, np.ndarray | np.generic):
        return np.zeros_like(value)
    if hasattr(value, "new_zeros"):
        return value.new_zeros(value.shape)
    return None if value is None else type(value)()
