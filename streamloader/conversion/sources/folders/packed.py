"""Items of several lengths as one piece of bytes: what a source keeps of many small values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Packed:
    """Items of several lengths behind each other; item n is the bytes [offsets[n], offsets[n + 1])."""

    data: bytes
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, items: Iterable[bytes]) -> Packed:
        """Pack the items."""
        kept = list(items)
        return cls(b"".join(kept), edges(np.fromiter(map(len, kept), np.int64, len(kept))))

    def rows(self, rows: NDArray[np.int64]) -> Packed:
        """Return these items."""
        starts, stops = self.offsets[rows].tolist(), self.offsets[rows + 1].tolist()
        return Packed.of(self.data[start:stop] for start, stop in zip(starts, stops, strict=True))

    def column(self) -> list[bytes]:
        """Return the items one by one."""
        return [self.data[start:stop] for start, stop in pairwise(self.offsets.tolist())]


Values = NDArray[Any] | Packed  # one for each row


def edges(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of so many sizes begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def take(values: Values, rows: NDArray[np.int64]) -> Values:
    """Return the values of these rows."""
    return values.rows(rows) if isinstance(values, Packed) else values[rows]
