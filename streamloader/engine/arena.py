"""Blocks in memory: slots that are allocated once and used again, and batch buffers likewise.

A page that was touched before costs nothing; a new one costs three times the copy into it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.format.codecs import Items
from streamloader.format.manifest import FieldLayout
from streamloader.stats import Counters

Column = NDArray[Any]


class Arena:
    """`slots` blocks of `block` samples: one array for each fixed-shape field, chunk lists for the others."""

    def __init__(self, layouts: Mapping[str, FieldLayout], slots: int, block: int) -> None:
        self.block = block
        self.shape = (dict(layouts), slots, block)
        self._free = list(range(slots))
        self._layouts = dict(layouts)
        self._fixed: dict[str, Column] = {
            name: np.empty((slots * block, *layout.field.shape), layout.field.dtype)
            for name, layout in layouts.items()
            if layout.field.fixed
        }
        self._items: dict[str, list[list[Items]]] = {
            name: [[] for _ in range(slots)] for name, layout in layouts.items() if not layout.field.fixed
        }
        self._skip = {name: np.zeros(slots, np.int64) for name in self._items}
        # ticket -> slot as an array, so that a batch translates its rows in one take
        self._slot_of = np.full(1024, -1, np.int64)
        self._ticket_of: dict[int, int] = {}

    def clear(self) -> None:
        """Release every slot: the pass that held them is over, and its threads are."""
        for ticket in list(self._ticket_of.values()):
            self.release(ticket)

    @property
    def free(self) -> int:
        """Slots that can be claimed."""
        return len(self._free)

    def claim(self, ticket: int) -> int:
        """Return a free slot, now held for `ticket`."""
        slot = self._free.pop()  # the one that was released last: its pages are touched
        while self._slot_of[ticket & (len(self._slot_of) - 1)] != -1:
            self._grow()
        self._slot_of[ticket & (len(self._slot_of) - 1)] = slot
        self._ticket_of[slot] = ticket
        return slot

    def release(self, ticket: int) -> None:
        """Give the ticket's slot back; items that a batch still holds stay alive with it."""
        at = ticket & (len(self._slot_of) - 1)
        slot = int(self._slot_of[at])
        self._slot_of[at] = -1
        del self._ticket_of[slot]
        for held in self._items.values():
            held[slot] = []
        self._free.append(slot)

    def room(self, name: str, slot: int, rows: int) -> Column:
        """Return the first `rows` rows of a slot, to be decoded into."""
        return self._fixed[name][slot * self.block : slot * self.block + rows]

    def keep(self, name: str, slot: int, chunks: Sequence[Items], skip: int) -> None:
        """Append decoded chunks of a variable-size field, in order of their samples.

        `skip`: the samples of the first chunk that come before the block's first row.
        """
        if not self._items[name][slot]:
            self._skip[name][slot] = skip
        self._items[name][slot].extend(chunks)

    def take(self, name: str, tickets: NDArray[np.int64], rows: NDArray[np.int64], out: Column) -> None:
        """Gather fixed-shape rows into `out`: one copy, no allocation of the batch's size."""
        slots = self._slot_of[tickets & (len(self._slot_of) - 1)]
        np.take(self._fixed[name], slots * self.block + rows, axis=0, out=out, mode="clip")

    def items(self, name: str, tickets: NDArray[np.int64], rows: NDArray[np.int64]) -> list[memoryview]:
        """Return the encoded bytes of each row; views that keep their chunk alive."""
        held = self._items[name]
        slots = self._slot_of[tickets & (len(self._slot_of) - 1)]
        chunk, within = np.divmod(rows + self._skip[name][slots], self._layouts[name].chunk)
        return [held[s][c][i] for s, c, i in zip(slots.tolist(), chunk.tolist(), within.tolist(), strict=True)]

    def _grow(self) -> None:
        size = 2 * len(self._slot_of)
        self._slot_of = np.full(size, -1, np.int64)
        for slot, ticket in self._ticket_of.items():
            self._slot_of[ticket & (size - 1)] = slot


class BatchBuffers:
    """Batch-sized arrays that come back by themselves once the consumer has dropped them.

    It never waits for the consumer: with none free it allocates and counts. A lease ends with the ndarray
    that `lease` returned, so hand out only what keeps that object alive (a tensor made from it does, a numpy
    slice does not).
    """

    def __init__(self, counters: Counters, *, recycle: bool = True) -> None:
        self._free: dict[tuple[int, str], deque[NDArray[np.uint8]]] = {}
        self._counters = counters
        self._recycle = recycle

    def lease(self, shape: tuple[int, ...], dtype: str) -> Column:
        """Return an array of that shape; its content is whatever was there."""
        nbytes = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        free = self._free.setdefault((nbytes, dtype), deque(maxlen=8))
        try:
            base = free.pop()
        except IndexError:
            base = np.empty(nbytes, np.uint8)
            self._counters.add(buffers_allocated=1)
        view = np.frombuffer(base.data, dtype=dtype).reshape(shape) if nbytes else np.empty(shape, dtype)
        if self._recycle and nbytes:
            # a deque's append is atomic: the finalizer may run in any thread, also within `lease`
            weakref.finalize(view, free.append, base).atexit = False
        return view


@dataclass(frozen=True)
class Memory:
    """What blocks are kept in and batches are put into. It outlives a pass: the next one finds its pages touched."""

    arena: Arena
    buffers: BatchBuffers
