"""What the engine executes: the batches of one rank, with the blocks that each opens and closes. Pure, no I/O.

Vectorised: Python work is O(blocks) + O(batches). A schedule is planned in spans of steps. Each examines a window of
arrivals before and after it, so spans start short (the first batch is early) and grow to about two windows (then half
of the arithmetic is overlap).

First: which positions of an epoch a rank takes (`World`, `Part`, `Share`; rules 6, 7, 8 and 10).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import BatchError, UsageError, WorldError
from streamloader.options import REMAINDERS, Remainder
from streamloader.order.epoch_order import EpochOrder, OrderParams


@dataclass(frozen=True)
class World:
    """Rank `rank` of `size`. Raises WorldError for an invalid rank or size."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise WorldError(f"rank {self.rank} is invalid for world size {self.size}", "give 0 <= rank < size")

    def consumer(self, worker: int, workers: int) -> World:
        """What DataLoader worker `worker` of `workers` acts as: rank + size * worker of size * workers (rule 10)."""
        if workers < 1 or not 0 <= worker < workers:
            raise WorldError(f"worker {worker} is invalid for {workers} workers", "give 0 <= worker < workers")
        return World(self.rank + self.size * worker, self.size * workers)


class Part:
    """One rank's part of an epoch of `num_samples` positions: of a dataset (`Share`), or of a mixture.

    `batch`: rows of the rank in a step. `remainder`: what the last, incomplete step does: "pad" fills it with samples
    that came before (marked as not valid), "drop" leaves it out, "uneven" distributes what is left. Steps are counted
    from the position where a run starts.
    """

    num_samples: int
    epoch: int
    batch: int
    world: World
    remainder: Remainder

    @property
    def global_batch(self) -> int:
        """G: the positions of a step, over all ranks."""
        return self.world.size * self.batch

    def global_steps(self, position: int) -> int:
        """Steps left from a position, over all ranks."""
        left = max(0, self.num_samples - position)
        return left // self.global_batch if self.remainder == "drop" else -(-left // self.global_batch)

    def num_steps(self, position: int) -> int:
        """Steps left from a position in which this rank has a row."""
        return self.global_steps(position)

    @property
    def span_steps(self) -> int:
        """How many steps are planned together, at most."""
        raise NotImplementedError

    def read(self, span: Span, live: Mapping[Any, int]) -> tuple[BlockReads, Iterable[Ints]]:
        """Return the blocks of a span, those of `live` included; and the positions of its rows, some plans at a time.

        `live` has the tickets by key of the blocks that earlier spans opened and did not finish.
        """
        raise NotImplementedError

    def read_held(self, span: Span) -> Iterable[tuple[Ints, Ints]]:
        """Yield the positions and samples of a span's rows, those of some plans at a time."""
        raise NotImplementedError

    def samples(self, position: int) -> Ints:
        """Return the sample numbers of this rank's rows in the step that starts at a position, padded rows too.

        Shape (rows,): what `index` holds in that batch. O(G + window * lanes) for G positions of a step, at any place
        of the epoch. Raises `UsageError` where no step starts there.
        """
        if not position >= 0 or not self.global_steps(position):
            problem = (
                f"no step starts at position {position} of {self.num_samples} samples, {self.global_batch} at once"
            )
            raise UsageError(problem, f"ask for a step below {self.global_steps(0)}")
        span = Span(0, 1, 1, position, position + self.global_batch, last=False)
        return np.concatenate([samples for _, samples in self.read_held(span)])

    def plans(
        self, position: int, stop: int | None = None, steps_at_once: int = 1, ticket: int = 0, *, held: bool = False
    ) -> Iterator[BatchPlan]:
        """Yield the batches of the rank from a position to the end of the epoch, or to `stop`.

        Each plan holds the rows of `steps_at_once` steps, the last perhaps of fewer: for steps of a single sample.
        Tickets are numbered from `ticket` on, so that plans can follow one another. `held`: every field is resident,
        so plans name samples and no blocks.
        """
        steps = self.num_steps(position) if stop is None else (stop - position) // self.global_batch
        live: dict[Any, int] = {}
        rows = self.batch * steps_at_once
        for span in cut_spans(self, position, steps, steps_at_once):
            starts = range(span.first_step, span.first_step + span.steps, steps_at_once)
            if held:
                labels: Labels = zip(starts, repeat(()), repeat(()), strict=False)
                for positions, samples in self.read_held(span):
                    yield from self._cut(rows, (np.zeros(samples.size, np.int64), samples, samples, positions), labels)
                continue
            reads, parts = self.read(span, live)
            tickets, opened, labels = _assign_tickets(reads, live, ticket, starts, rows)
            done = 0
            for positions in parts:
                part = slice(done, done + positions.size)
                block, row = reads.block[part], reads.row[part].astype(np.int64)
                yield from self._cut(rows, (tickets[block], row, reads.start[block] + row, positions), labels)
                done += positions.size
            ticket += opened
            live = {reads.keys[i]: int(tickets[i]) for i in np.flatnonzero((tickets >= 0) & ~reads.finished)}

    def _cut(self, rows: int, columns: tuple[Ints, Ints, Ints, Ints], labels: Labels) -> Iterator[BatchPlan]:
        """Yield the plans of `rows` rows each; `columns` are tickets, rows, samples and positions of them all."""
        tickets, row, samples, positions = columns
        valid = positions < self.num_samples
        for first, (step, needs, done) in zip(range(0, valid.size, rows), labels, strict=False):
            at = slice(first, first + rows)
            yield BatchPlan(self.epoch, step, tickets[at], row[at], samples[at], positions[at], valid[at], needs, done)


@dataclass(frozen=True)
class Share(Part):
    """One rank's part of the epoch of a dataset. `unit`: samples fetched at once without shuffle."""

    order: EpochOrder
    batch: int
    world: World
    remainder: Remainder
    unit: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise BatchError(f"a batch of {self.batch} samples is invalid", "set batch_size= to 1 or more")
        if self.remainder not in REMAINDERS:
            raise UsageError(f"remainder={self.remainder!r}", f"choose one of {', '.join(REMAINDERS)}")

    @cached_property
    def num_samples(self) -> int:  # type: ignore[override]
        """The positions of the epoch."""
        return self.order.num_samples

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The number of the epoch."""
        return self.order.epoch

    @cached_property
    def lanes(self) -> int:
        """The lanes that positions go round: 1 without shuffle."""
        return self.order.lanes

    def at_epoch(self, epoch: int) -> Share:
        """Return the share of another epoch."""
        return replace(self, order=replace(self.order, epoch=epoch))

    @cached_property
    def divides(self) -> bool:
        """Whether the world size divides the lanes, so that every lane is read by one rank."""
        return self.lanes % self.world.size == 0

    def num_steps(self, position: int) -> int:
        """Steps left from a position in which this rank has a row: with "uneven" perhaps not the last."""
        steps = self.global_steps(position)
        if self.remainder == "uneven" and steps:
            return steps - (self.positions(position + (steps - 1) * self.global_batch)[0].size == 0)
        return steps

    def costs(self, *, fresh: bool, shuffle: bool) -> str:
        """Say how often blocks are read; nothing where each lane is read by one rank. `fresh`: lanes may be chosen."""
        size, lanes = self.world.size, self.lanes
        if self.divides or not shuffle or (lanes == 1 and self.global_steps(0) < 2):
            return ""
        if not fresh or size <= lanes:
            return f"{size} consumers do not divide {lanes} lanes: blocks are read about {self.read_factor:.1f} times"
        return (
            f"{size} consumers share {lanes} lanes: blocks are read about {self.read_factor:.1f} times; "
            f"set shuffle=Shuffle(lanes={-(-lanes // size) * size})"
        )

    def positions(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(p, valid): the positions of this rank's rows in the step that starts at `position`.

        A padded row keeps its own p >= N and is not valid; `source` tells which position it repeats.
        """
        count = min(self.global_batch, max(0, self.num_samples - position))
        if self.remainder == "pad" and count:
            count = self.global_batch
        elif self.remainder == "drop" and count < self.global_batch:
            count = 0
        p = self._strided(position, count) if self.divides else self._run(position, count)
        return p, p < self.num_samples

    def positions_of_steps(self, position: int, steps: int) -> NDArray[np.int64]:
        """The positions of this rank's rows in `steps` steps from `position` on, one step after the other."""
        full = max(0, steps - 1) if self.divides else 0
        parts = [self._strided(position, full * self.global_batch)]
        parts += [self.positions(position + i * self.global_batch)[0] for i in range(full, steps)]
        return np.concatenate(parts)

    def _strided(self, position: int, count: int) -> NDArray[np.int64]:
        """The positions = rank (mod size) of [position, position + count)."""
        size = self.world.size
        first = position + (self.world.rank - position) % size
        return np.arange(first, max(first, position + count), size, dtype=np.int64)

    def _run(self, position: int, count: int) -> NDArray[np.int64]:
        """This rank's run of the positions [position, position + count) in the order of (p mod lanes, p)."""
        first = position + (np.arange(self.lanes, dtype=np.int64) - position) % self.lanes
        ends = np.cumsum(_per_lane(position, count, self.lanes))
        run = np.arange(self.world.rank * self.batch, min((self.world.rank + 1) * self.batch, count), dtype=np.int64)
        lane = np.searchsorted(ends, run, side="right")
        before = np.concatenate(([0], ends))[lane]
        return first[lane] + (run - before) * self.lanes

    def source(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position whose sample stands at each of `positions`: itself, or the one that a padded row repeats."""
        n, step = self.num_samples, self.global_batch
        return np.where(positions < n, positions, positions % n if n < step else positions - step)

    @cached_property
    def _lanes_by_rank(self) -> NDArray[np.int64]:
        """How many neighbouring lanes each rank reads in full steps, wherever they start; shape (size,)."""
        if self.divides:
            return np.full(self.world.size, self.lanes // self.world.size, np.int64)
        first_row = np.arange(self.world.size, dtype=np.int64) * self.batch
        lowest = np.full(self.world.size, self.lanes, np.int64)
        highest = np.zeros(self.world.size, np.int64)
        for start in range(self.lanes):
            ends = np.cumsum(_per_lane(start, self.global_batch, self.lanes))
            np.minimum(lowest, np.searchsorted(ends, first_row, side="right"), out=lowest)
            np.maximum(highest, np.searchsorted(ends, first_row + self.batch - 1, side="right"), out=highest)
        return highest - lowest + 1

    @property
    def lanes_read(self) -> int:
        """The most lanes that any rank reads: L / R where R divides L. The same on every rank."""
        return int(self._lanes_by_rank.max())

    @property
    def read_factor(self) -> float:
        """About how often a block is read, over all ranks: 1.0 where the world size divides the lanes."""
        return 1.0 if self.divides else float(self._lanes_by_rank.sum()) / self.lanes

    @property
    def fetched(self) -> OrderParams:
        """The order's block, lanes and window; without shuffle the fetch unit, in one lane."""
        return self.order.fetched(self.unit)

    @property
    def _rows_of_a_lane(self) -> int:
        """How many rows of a lane are planned together, at most."""
        least = _MIN_ROWS if self.order.shuffle else PART_ROWS
        return min(max(2 * self.fetched.window, least), MAX_ROWS // self.lanes_read)

    @property
    def span_steps(self) -> int:
        """How many steps are planned together, at most."""
        rows = self._rows_of_a_lane
        return rows * self.lanes // self.global_batch if self.order.shuffle else rows // self.batch

    def _positions(self, span: Span) -> Iterator[Ints]:
        """Yield the positions of a span's rows, those of some plans at a time: temporary arrays fit into a cache."""
        some = max(1, PART_ROWS // (self.batch * span.steps_at_once)) * span.steps_at_once
        for done in range(0, span.steps, some):
            yield self.positions_of_steps(span.begin + done * self.global_batch, min(some, span.steps - done))

    def _sources(self, span: Span) -> Positions:
        """Return a function of the positions whose samples the rows of a span have."""
        return lambda: map(self.source, self._positions(span))

    def read(self, span: Span, live: Mapping[Key, int]) -> tuple[BlockReads, Iterable[Ints]]:
        """Return the blocks of a span, those of `live` included, and the positions of its rows."""
        sources = self._sources(span)
        if self.order.shuffle:
            reads = read_lanes(self.order, sources, span, live)
        else:
            onward = span.end + self.world.rank * self.batch  # where this rank's next rows begin
            rows = np.concatenate([*sources()])
            reads = read_units(self.num_samples, self.unit, rows, onward, last=span.last)
        return reads, self._positions(span)

    def read_held(self, span: Span) -> Iterable[tuple[Ints, Ints]]:
        """Yield the positions and samples of a span's rows, those of some plans at a time."""
        sources = self._sources(span)
        samples = lane_samples(self.order, sources, span) if self.order.shuffle else sources()
        return zip(self._positions(span), samples, strict=True)

    def slots_needed(self, steps_at_once: int = 1) -> int:
        """How many blocks a schedule holds at once at most, from `needs` until `done`; the same on every rank.

        A lane holds a block from its smallest key to its largest. The keys of the arrivals [s, s + B) lie in
        [s, s + B + W), so at key T only blocks with T - B - W < s < T are held: at most W / B + 1, and one more in the
        lane of the short block. A batch holds what any of its keys [T0, T1] holds: W / B + 2 + (T1 - T0) / B, and
        T1 - T0 is about the batch's rows in that lane: chance stretches it, but by little against a block, and against
        the lanes without the short block; one slot more is for a single lane. (Replays of thousands of schedules
        came up to the count without it, never above.)
        Padding makes the last step the last G positions in another order. Where N < G or R does not divide L, the last
        step may touch other lanes, one block for each row at most.
        """
        lanes, params = self.lanes_read, self.fetched
        per_lane = params.window // params.block + 2
        batch = steps_at_once * self.batch
        rows = -(-lanes * self.world.size * batch // self.lanes)  # of a plan, over all ranks, in the lanes one reads
        slots = lanes * per_lane + -(-rows // params.block) + 1
        if not self.divides or self.num_samples < self.global_batch:
            slots = max(slots, min(batch, self.lanes * per_lane))
        return min(slots, max(1, -(-self.num_samples // params.block) + self.lanes - 1))

    def need(self, steps_at_once: int = 1) -> Need:
        """Return what a pass needs of memory."""
        ahead, together = ahead_bytes(self), self._rows_of_a_lane * self.lanes_read
        rows = min(together, self.num_samples // self.world.size + self.batch)
        plans = ahead + SPAN_BYTES * rows, ahead + HELD_SPAN_BYTES * rows
        return Need(self.fetched.block, self.slots_needed(steps_at_once), steps_at_once * self.batch, *plans)


def _per_lane(position: int, count: int, lanes: int) -> NDArray[np.int64]:
    """How many of the positions [position, position + count) fall on each lane; shape (lanes,)."""
    turn = (np.arange(lanes, dtype=np.int64) - position) % lanes
    return count // lanes + (turn < count % lanes)


Ints = NDArray[np.int64]
# yields some of a span's rows at a time; a function, since they are gone through more than once
Positions = Callable[[], Iterator[Ints]]
Key = tuple[int, int]  # (lane, j): the j-th block to arrive; (0, j): the j-th unit
Item = TypeVar("Item")

MAX_ROWS = 2**22  # rows of a span, for which memory is needed: see `Need`
PART_ROWS = 2**15  # rows of it whose positions are computed together
FIRST_STEPS = 64  # steps of the first span at most: what the first batch waits for
_MIN_ROWS = 2**12  # rows of a lane below which a longer span costs little
# Rows in the queue of plans, and rows whose blocks are looked for ahead of the batch that is assembled.
PLANNED_ROWS = 1 << 18
LOOK_AHEAD_ROWS = 1 << 20
# Bytes of a row that is planned; of a row in the making, with the span before it: peaks of processes that planned
# 20 million rows in spans of 4 million.
ROW_BYTES = 33
SPAN_BYTES = 40
HELD_SPAN_BYTES = 12


class Span(NamedTuple):
    """`steps` steps from `first_step` on, over the positions [begin, end); `last` when no step follows them.

    A plan holds `steps_at_once` of them.
    """

    first_step: int
    steps: int
    steps_at_once: int
    begin: int
    end: int
    last: bool


def cut_spans(share: Part, position: int, steps: int, steps_at_once: int) -> Iterator[Span]:
    """Cut steps into spans of about `share.span_steps` steps at most, short ones first.

    The last two steps are in one span, since padding repeats rows of the one before.
    """
    most = max(1, share.span_steps // steps_at_once) * steps_at_once
    size = min(most, max(1, FIRST_STEPS // steps_at_once) * steps_at_once)
    done = 0
    while done < steps:
        count = steps - done if steps - done <= size + 1 else size
        begin = position + done * share.global_batch
        yield Span(done, count, steps_at_once, begin, begin + count * share.global_batch, last=done + count == steps)
        done += count
        size = min(most, 2 * size)


class BlockReads(NamedTuple):
    """The blocks that the rows of a span are read from. `block` and `row` have an entry for each row."""

    keys: list[Any]
    start: Ints  # first sample of each block, or of the part of it that is the lane's
    stop: Ints
    finished: NDArray[np.bool_]  # no later step uses the block
    block: NDArray[Any]  # integers: index into the above
    row: NDArray[Any]  # counted from that start


def read_lanes(order: EpochOrder, positions: Positions, span: Span, live: Collection[Key]) -> BlockReads:
    """Return the blocks of a shuffled order at the positions of a span, those of `live` included.

    Every lane with a row or a live block is examined from the span's first position to its end.
    """
    used, low, count = _used_lanes(order, positions, span)
    used[[key[0] for key in live]] = True
    lanes = np.flatnonzero(used)
    stops = -((lanes - min(span.end, order.num_samples)) // order.lanes)
    width = int(stops.max()) - low
    dtype = np.int32 if order.params.block < 2**31 else np.int64
    table = np.empty((2, lanes.size * width), dtype)
    keys: list[Key] = []
    parts: list[BlockReads] = []
    for begin, number, stop in zip(range(0, table[0].size, width), lanes.tolist(), stops.tolist(), strict=True):
        part = _read_lane(order, number, low, stop)
        np.add(part.block, len(keys), out=table[0, begin : begin + stop - low], casting="same_kind")
        table[1, begin : begin + stop - low] = part.row
        keys += part.keys
        parts.append(part)
    offsets = (np.cumsum(used) - 1) * width - low
    found, done = np.empty((2, count), dtype), 0
    for some in positions():
        at = offsets[some % order.lanes] + some // order.lanes
        for values, out in zip(table, found[:, done : done + at.size], strict=True):
            np.take(values, at, out=out, mode="clip")
        done += at.size
    start, end, finished = join_blocks(parts)
    first = order.block_numbers(np.array([key[1] for key in keys], np.int64)) * order.params.block
    return BlockReads(keys, first + start, first + end, finished | span.last, found[0], found[1])


def join_blocks(parts: Sequence[BlockReads]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return `start`, `stop` and `finished` of the blocks of all parts."""
    start, stop, finished = zip(*((part.start, part.stop, part.finished) for part in parts), strict=True)
    return np.concatenate(start), np.concatenate(stop), np.concatenate(finished)


def _used_lanes(order: EpochOrder, positions: Positions, span: Span) -> tuple[NDArray[np.bool_], int, int]:
    """Return the lanes that some positions are in, the first index among them, and how many there are."""
    used, low, count = np.zeros(order.lanes, np.bool_), span.begin // order.lanes, 0
    for some in positions():
        used[some % order.lanes] = True
        low = min(low, int(some.min(initial=span.begin)) // order.lanes)  # padding may repeat what came before
        count += some.size
    return used, low, count


def lane_samples(order: EpochOrder, positions: Positions, span: Span) -> Iterator[Ints]:
    """Yield the samples of a shuffled order at the positions of a span; only the lanes in use are computed."""
    used, low, _ = _used_lanes(order, positions, span)
    lanes = np.flatnonzero(used)
    width = -(-min(span.end, order.num_samples) // order.lanes) - low
    emitted = np.zeros(lanes.size * width, np.int64)
    for begin, number in zip(range(0, emitted.size, max(1, width)), lanes.tolist(), strict=True):
        stop = min(low + width, order.lane_bounds(number)[1])
        emitted[begin : begin + stop - low] = order.emit(number, low, stop)
    offsets = (np.cumsum(used) - 1) * width - low
    for some in positions():
        yield order.samples(emitted[offsets[some % order.lanes] + some // order.lanes])


def _read_lane(order: EpochOrder, lane: int, low: int, stop: int) -> BlockReads:
    """The indexes [low, stop) of a lane. A block is finished unless an arrival of it is emitted at `stop` or later.

    Where a block belongs to two lanes, each reads its own part of it. `start` and `stop` count from the block's start.
    """
    found = order.examine(lane, low, stop)
    begin, length = order.lane_bounds(lane)
    start = begin + found.first
    end = start + found.later.size
    first_block, last_block = order.locate(np.array([start, end - 1]))[0].tolist()
    edges = order.first_arrivals(np.arange(first_block, last_block + 2))
    of_lane = edges.clip(begin, begin + length)
    later = np.logical_or.reduceat(found.later, edges[:-1].clip(start) - start)
    emitted = found.offsets + start
    block = order.locate(emitted)[0] - first_block
    return BlockReads(
        keys=[(lane, number) for number in range(first_block, last_block + 1)],
        start=(of_lane - edges)[:-1],
        stop=of_lane[1:] - edges[:-1],
        finished=~later & (of_lane[1:] <= end),
        block=block,
        row=emitted - of_lane[block],
    )


def read_units(
    num_samples: int, unit: int, positions: Ints, onward: int, *, last: bool, live: Collection[Key] = ()
) -> BlockReads:
    """Return the units of `unit` consecutive samples at some positions, where a position is a sample; and live ones.

    Later rows of this rank begin at the position `onward`, unless these steps are the `last`.
    """
    held = np.fromiter((key[1] for key in live), np.int64, len(live))
    units, block = np.unique(np.concatenate([positions // unit, held]), return_inverse=True)
    block = block[: positions.size]
    start = units * unit
    stop = np.minimum(start + unit, num_samples)
    keys = [(0, number) for number in units.tolist()]
    return BlockReads(keys, start, stop, (stop <= onward) | last, block, positions - start[block])


class BlockRef(NamedTuple):
    """One fetch: the samples [start, stop). Tickets count up, one for each, in order of first need by this rank.

    A block that two lanes share has a ticket for each, of its own part: no sample is fetched twice.
    """

    ticket: int
    start: int
    stop: int


class BatchPlan(NamedTuple):
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


Labels = Iterator[tuple[int, tuple[BlockRef, ...], tuple[int, ...]]]  # step, needs and done of each plan


def _assign_tickets(
    reads: BlockReads, live: Mapping[Any, int], next_ticket: int, steps: range, plan_rows: int
) -> tuple[Ints, int, Labels]:
    """Give a ticket to each block that is needed for the first time; `live` ones keep theirs.

    Returns the ticket of each block (-1: not used yet), the number of new ones, and what plans open and close.
    """
    rows = np.arange(reads.block.size, dtype=np.int32 if reads.block.size < 2**31 else np.int64)
    first = np.full(len(reads.keys), rows.size)
    first[reads.block[::-1]] = rows[::-1]  # of an index that repeats, numpy keeps the last assignment
    last = np.full(len(reads.keys), -1)
    last[reads.block] = rows
    tickets = np.array([live.get(key, -1) for key in reads.keys], np.int64)
    opened = np.flatnonzero((last >= 0) & (tickets < 0))
    opened = opened[np.argsort(first[opened])]
    tickets[opened] = next_ticket + np.arange(opened.size)
    closed = np.flatnonzero(reads.finished & (tickets >= 0))
    closed = closed[np.argsort(last[closed], kind="stable")]
    refs = list(map(BlockRef, *(column[opened].tolist() for column in (tickets, reads.start, reads.stop))))
    edges = np.arange(len(steps) + 1) * plan_rows
    needs = _grouped(refs, first[opened], edges)
    done = _grouped(tickets[closed].tolist(), np.maximum(last[closed], 0), edges)
    return tickets, opened.size, zip(steps, needs, done, strict=True)


def _grouped(items: list[Item], rows: Ints, edges: Ints) -> Iterator[tuple[Item, ...]]:
    """Yield the items between neighbouring edges; `rows`, ascending, says where each is."""
    return (tuple(items[low:high]) for low, high in pairwise(np.searchsorted(rows, edges).tolist()))


class Need(NamedTuple):
    """What a pass needs at once: `slots` blocks of at most `block` samples, and plans of `rows` rows.

    Planning takes `plan_bytes`, and `held_plan_bytes` where every field is resident.
    """

    block: int
    slots: int
    rows: int
    plan_bytes: int
    held_plan_bytes: int


def ahead_bytes(share: Part) -> int:
    """Return the bytes of the plans that are made ahead."""
    return ROW_BYTES * min(PLANNED_ROWS + LOOK_AHEAD_ROWS, 2 * (share.num_samples // share.world.size + share.batch))
