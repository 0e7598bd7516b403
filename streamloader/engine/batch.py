"""One batch on its way through the stages: gathered, decoded, transformed, ready."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.format.manifest import Field
from streamloader.format.values import from_bytes
from streamloader.plan.schedule import BatchPlan


@dataclass(frozen=True)
class Ragged:
    """Ragged samples of a batch, end to end: sample i is `values[offsets[i]:offsets[i + 1]]`.

    `values` has shape (sum of lengths, *inner), `offsets` is int64 of shape (samples + 1,).
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]


@dataclass
class Batch:
    """`columns` by field: ndarray, list, or `Ragged`; complete once `finished`, or failed with `error`."""

    plan: BatchPlan
    columns: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the batch as complete, or as failed."""
        self.error = self.error or error
        self._done.set()

    @property
    def finished(self) -> bool:
        """Whether the batch can be handed out without waiting."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait for the batch, interruptibly."""
        self._done.wait()


def items_to_column(name: str, kind: Field, items: Sequence[memoryview], samples: NDArray[np.int64]) -> Any:
    """Return the batch column of a variable-size field: list of bytes or str, or `Ragged`.

    Raises `DecodeError`, which names the sample, for bytes that are not of that kind.
    """
    try:
        if kind.kind == "bytes":
            return [bytes(item) for item in items]
        if kind.kind == "text":
            return [str(item, "utf-8") for item in items]
        return _ragged(kind, items)
    except ValueError:
        for item, sample in zip(items, samples.tolist(), strict=True):
            from_bytes(name, kind, item, sample)  # raises for the one that is to blame
        raise


def _ragged(kind: Field, items: Sequence[memoryview]) -> Ragged:
    offsets = np.zeros(len(items) + 1, np.int64)
    np.cumsum([len(item) // kind.item_bytes for item in items], out=offsets[1:])
    raw = np.frombuffer(bytearray().join(items), np.dtype(kind.dtype).newbyteorder("<"))
    return Ragged(raw.astype(kind.dtype, copy=False).reshape(int(offsets[-1]), *kind.shape), offsets)


def rows_of(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return a batch as samples: dicts of numpy scalars and arrays, bytes and str."""
    split = {name: _split(column) for name, column in columns.items()}
    return [{name: column[i] for name, column in split.items()} for i in range(count)]


def _split(column: Any) -> Any:
    if isinstance(column, Ragged):
        return [column.values[a:b] for a, b in pairwise(column.offsets.tolist())]
    return column
