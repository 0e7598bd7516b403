"""From touched blocks to batches: tickets in the order of first need, and which blocks open and close where."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.plan.touch import Ints, Touched

__all__ = ["BatchPlan", "BlockRef", "Booking", "Placed", "batches", "book", "book_nothing"]

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class BlockRef:
    """One fetch: the samples [start, stop). Tickets count up, one for each, in order of first need by this rank.

    A block that two lanes share has a ticket for each, of its own part: no sample is fetched twice.
    """

    ticket: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """One batch of one rank, or several steps at once; arrays have an entry for each row.

    `step`, the first that it holds, counts from where the schedule of this `epoch` starts.
    `tickets` says which block a row comes from, `rows` which row of that block (counted from the block's start),
    `samples` the sample number, `positions` the global position (a padded row keeps its own p >= N), `valid` is
    false for padded rows. `needs` are the blocks that are needed here for the first time, in order of first need;
    `done` the tickets that no later batch of the schedule uses: each ticket is in one `needs` and in one `done`.
    """

    epoch: int
    step: int
    tickets: NDArray[np.int64]
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    positions: NDArray[np.int64]
    valid: NDArray[np.bool_]
    needs: tuple[BlockRef, ...]
    done: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Booking:
    """The tickets of a span: one for each touched block (-1: not used yet), and which blocks open and close where.

    `opened` and `closed` are indexes of blocks, ordered by the rows `opened_at` and `closed_at`.
    """

    ticket: Ints
    opened: Ints
    opened_at: Ints
    closed: Ints
    closed_at: Ints

    def kept(self, touched: Touched[K]) -> dict[K, int]:
        """Return the tickets of blocks that later spans use, by their keys."""
        kept = np.flatnonzero((self.ticket >= 0) & ~touched.finished)
        return {touched.keys[i]: int(self.ticket[i]) for i in kept}


def book_nothing() -> Booking:
    """Return the booking of rows that are taken from no block: nothing opens and nothing closes."""
    nothing = np.zeros(0, np.int64)
    return Booking(np.zeros(1, np.int64), nothing, nothing, nothing, nothing)


@dataclass(frozen=True, eq=False)
class Placed:
    """Where the rows of a span stand in their epoch of `num_samples` positions: those from there on are padding.

    `parts` yields the positions, those of some whole plans at a time.
    """

    epoch: int
    num_samples: int
    parts: Iterable[Ints]


def book(touched: Touched[K], live: Mapping[K, int], next_ticket: int) -> Booking:
    """Give a ticket to each block that is needed for the first time, from `next_ticket` on; `live` ones keep theirs."""
    rows = np.arange(touched.block.size, dtype=np.int32 if touched.block.size < 2**31 else np.int64)
    first = np.full(len(touched.keys), rows.size)
    first[touched.block[::-1]] = rows[::-1]  # of an index that repeats, numpy keeps the last assignment
    last = np.full(len(touched.keys), -1)
    last[touched.block] = rows
    ticket = np.array([live.get(key, -1) for key in touched.keys], np.int64)
    opened = np.flatnonzero((last >= 0) & (ticket < 0))
    opened = opened[np.argsort(first[opened])]
    ticket[opened] = next_ticket + np.arange(opened.size)
    closed = np.flatnonzero(touched.finished & (ticket >= 0))
    closed = closed[np.argsort(last[closed], kind="stable")]
    return Booking(ticket, opened, first[opened], closed, np.maximum(last[closed], 0))


def batches(touched: Touched[K], booking: Booking, rows: int, placed: Placed, steps: range) -> Iterator[BatchPlan]:
    """Yield the plans of a span, of `rows` rows each: `steps` are the first steps of each."""
    begins = np.arange(len(steps) + 1) * rows
    opened_from = np.searchsorted(booking.opened_at, begins).tolist()
    closed_from = np.searchsorted(booking.closed_at, begins).tolist()
    opened, closed = booking.opened, booking.closed
    refs = [
        BlockRef(*ref)
        for ref in zip(
            booking.ticket[opened].tolist(), touched.start[opened].tolist(), touched.stop[opened].tolist(), strict=True
        )
    ]
    done = booking.ticket[closed].tolist()
    i = 0
    for positions in placed.parts:
        part = slice(i * rows, i * rows + positions.size)
        block, row = touched.block[part], touched.row[part].astype(np.int64)
        tickets, samples, valid = booking.ticket[block], touched.start[block] + row, positions < placed.num_samples
        for first in range(0, positions.size, rows):
            cut = slice(first, first + rows)
            yield BatchPlan(
                epoch=placed.epoch,
                step=steps[i],
                tickets=tickets[cut],
                rows=row[cut],
                samples=samples[cut],
                positions=positions[cut],
                valid=valid[cut],
                needs=tuple(refs[opened_from[i] : opened_from[i + 1]]),
                done=tuple(done[closed_from[i] : closed_from[i + 1]]),
            )
            i += 1
