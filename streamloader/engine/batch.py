"""One batch on its way through the stages: gathered, decoded, transformed, ready."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import BatchBuffers
from streamloader.errors import StreamloaderError, wrapped
from streamloader.format.manifest import Field
from streamloader.format.values import from_bytes
from streamloader.options import Pack
from streamloader.plan.booking import BatchPlan


@dataclass(frozen=True)
class Ragged:
    """Ragged samples of a batch, end to end: sample i is `values[offsets[i]:offsets[i + 1]]`.

    `values` has shape (sum of lengths, *inner), `offsets` is int64 of shape (samples + 1,). Packed, `values` has shape
    (rows, length), and the offsets count in it row by row; what follows the last one is padding.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]


@dataclass
class Batch:
    """`columns` by field: ndarray, list, or `Ragged`; complete once `finished`, or failed with `error`.

    `places`: how many of the `READY_BATCHES` it counts as; more than one where it is much larger than the mean.
    """

    plan: BatchPlan
    columns: dict[str, Any] = field(default_factory=dict)
    error: StreamloaderError | None = None
    places: int = 1
    _done: threading.Event = field(default_factory=threading.Event)
    _dropped: bool = False

    def finish(self) -> None:
        """Mark the batch as complete."""
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Finish the batch with its first error; other parts of it may still be under way."""
        first = ", ".join(map(str, self.plan.samples[:3].tolist()))
        self.error = self.error or wrapped(error, f"making the batch of samples {first}, ...")
        if self._dropped:
            self.error = None
        self._done.set()

    def take_error(self) -> StreamloaderError | None:
        """Return the error and forget it: the frames of its traceback hold the batch, and a cycle keeps its memory."""
        error, self.error = self.error, None
        return error

    def drop(self) -> None:
        """Forget an error, also one that is still to come: nobody will take the batch."""
        self._dropped = True
        self.error = None

    @property
    def finished(self) -> bool:
        """Whether the batch can be handed out without waiting."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the batch, up to so many seconds; return whether it is finished."""
        return self._done.wait(seconds)


def items_to_column(
    name: str,
    kind: Field,
    items: Sequence[memoryview],
    samples: NDArray[np.int64],
    buffers: BatchBuffers,
    *,
    pack: Pack | None = None,
) -> Any:
    """Return the batch column of a variable-size field: list of bytes or str, or `Ragged`, packed where asked.

    Raises `DecodeError`, which names the sample, for bytes that are not of that kind.
    """
    try:
        if kind.kind == "bytes":
            return [bytes(item) for item in items]
        if kind.kind == "text":
            return [str(item, "utf-8") for item in items]
        return _end_to_end(kind, items, buffers, pack)
    except ValueError:
        for item, sample in zip(items, samples.tolist(), strict=True):
            from_bytes(name, kind, item, sample)  # raises for the one that is to blame
        raise


def _end_to_end(kind: Field, items: Sequence[memoryview], buffers: BatchBuffers, pack: Pack | None) -> Ragged:
    edges = np.zeros(len(items) + 1, np.int64)  # in bytes
    np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=edges[1:])
    offsets, odd = np.divmod(edges, kind.item_bytes)
    if odd.any():
        raise ValueError("a sample ends within a row")
    count = int(offsets[-1])
    if pack is None:
        values = buffers.lease((count, *kind.shape), kind.dtype)
    else:
        values = buffers.lease((-(-count // pack.length), pack.length), kind.dtype)
        values.reshape(-1)[count:] = pack.pad
    into = values.reshape(-1).view(np.uint8).data
    # Slices of memoryviews: those of arrays take half as long again, and an index of every value five times.
    for item, (begin, end) in zip(items, pairwise(edges.tolist()), strict=True):
        into[begin:end] = item
    return Ragged(values, offsets)


def rows_of(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return a batch as samples: dicts of numpy scalars and arrays, bytes and str."""
    split = {name: _split(column) for name, column in columns.items()}
    return [{name: column[i] for name, column in split.items()} for i in range(count)]


def _split(column: Any) -> Any:
    if isinstance(column, Ragged):
        return [column.values[a:b] for a, b in pairwise(column.offsets.tolist())]
    return column
