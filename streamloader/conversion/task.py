"""One task: fixed rows of the source become one shard of one split. Pure but for the two stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.refused import Refusal, RefusedSample, packed
from streamloader.conversion.sources.base import BadSample, Part, refuse_rows
from streamloader.format.codecs import Column
from streamloader.format.geometry import Geometry
from streamloader.format.sink import Receipt, prepare_shard, put_shard
from streamloader.storage.protocol import Store

Outcome = Receipt | Refusal


@dataclass(frozen=True, eq=False)
class Task:
    """What a worker needs, picklable. Doing it twice writes the same bytes. `store` is the split's.

    `part` holds the `rows`, ascending; the samples of the shard, in order, are its rows `order`, or all as they come.
    With `keep_bad` a shard that holds bad samples is not written,
    but says which; else the first of them is an error. What is left of the shard names the `job`.
    """

    part: Part
    store: Store
    geometry: Geometry
    shard: int
    rows: NDArray[np.int64] | range
    order: NDArray[np.int64] | None = None
    keep_bad: bool = False
    job: str = ""

    def run(self) -> Outcome:
        """Read, encode and write the shard. Raises what the source or the store raise."""
        return self.prepare()()

    def prepare(self) -> Callable[[], Outcome]:
        """Read and encode the shard; return what writes it, and raises what the store raises.

        Raises what the source raises.
        """
        bad: list[BadSample] = []
        columns = self.part.read(bad.append if self.keep_bad else refuse_rows(self.rows))
        if bad:
            return partial(Refusal(self.shard, tuple(map(self._refused, bad)), self.job).write, self.store)
        if self.order is not None:
            for name in columns:  # one after another: a field twice is held, not all of them
                columns[name] = _ordered(columns[name], self.order)
        return partial(put_shard, self.store, prepare_shard(self.geometry, self.shard, columns), self.job)

    def _refused(self, bad: BadSample) -> RefusedSample:
        row = int(self.rows[bad.position])
        return RefusedSample(row, bad.name or f"row {row}", bad.problem, packed(bad.data))


def _ordered(column: Column, order: NDArray[np.int64]) -> Column:
    return column[order] if isinstance(column, np.ndarray) else [column[row] for row in order.tolist()]
