"""The schedule of a rank: its positions of an epoch, its batches, and the blocks that each batch opens and closes.

`World`, `EpochShare` and `Share` implement rules 6, 7, 8 and 10 of the order. There is no I/O. numpy does the work per
row; Python work is O(blocks) + O(batches).

A schedule is planned in spans of steps. Each span also examines a window of arrivals before and after it. So the first
spans are short, which makes the first batch early, and later ones grow to about two windows, when half of the
arithmetic is overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise, repeat, starmap, tee
from math import inf
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import BatchError, UsageError, WorldError
from streamloader.options import REMAINDERS, Remainder
from streamloader.order.budget import Budget, cut
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.groups import Bucket, exchanged, window_bounds


@dataclass(frozen=True)
class World:
    """Rank `rank` of `size` ranks. Raises `WorldError` for an invalid rank or size.

    `node`: the ranks that share a cache with this one, itself included; () without a cache.
    """

    rank: int
    size: int
    node: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise WorldError(f"rank {self.rank} is invalid for world size {self.size}", "give 0 <= rank < size")

    def consumer(self, worker: int, workers: int) -> World:
        """Return the rank of a DataLoader worker: rank + size * worker of size * workers.

        Raises `WorldError` for an invalid number of a worker, or of workers.
        """
        if workers < 1 or not 0 <= worker < workers:
            raise WorldError(f"worker {worker} is invalid for {workers} workers", "give 0 <= worker < workers")
        node = tuple(rank + self.size * number for number in range(workers) for rank in self.node)
        return World(self.rank + self.size * worker, self.size * workers, node)

    def lanes(self, count: int, ranks: Collection[int]) -> NDArray[np.bool_]:
        """Return whether some ranks read each of `count` lanes in turn: all if the size does not divide them."""
        return np.isin(np.arange(count) % self.size, tuple(ranks)) | (count % self.size > 0)


class Gap(NamedTuple):
    """The positions [start, stop) of an epoch that a run skips: whole steps of that run."""

    epoch: int
    start: int
    stop: int


def skip_steps(share: EpochShare, steps: Collection[int], offset: int) -> tuple[Gap, ...]:
    """Return gaps that skip these steps of the epoch of a share. Step 0 starts at `offset`."""
    gaps: list[Gap] = []
    for step in sorted(set(steps)):
        start, stop = share.after(offset, step), share.after(offset, step + 1)
        if gaps and gaps[-1].stop == start:
            start = gaps.pop().start
        gaps.append(Gap(share.epoch, start, stop))
    return tuple(gaps)


class EpochShare:
    """The part of an epoch that one rank reads; the base of `Share` for a dataset and `MixShare` for a mixture.

    `num_samples`: positions of the epoch. `batch`: rows of the rank in a step. `remainder`: how the last, incomplete
    step ends. "pad" fills it with earlier samples, marked as not valid; "drop" leaves it out; "uneven" distributes its
    samples. Steps count from the position where a run starts. `gaps`: what the run skips of this epoch and others, in
    order, with at least one step between two gaps of an epoch.

    A step has G positions, those of `batch` rows on each rank. With a `budget`, the steps of the `bucket` are cut into
    parts of at most as many that fit into it, see `cut`; the world size divides the steps of the bucket. `origin`:
    where the run began in this epoch, perhaps inside of such a step, which other ranks or another budget cut.

    Raises `BatchError` or `UsageError` for an invalid `batch` or `remainder`.
    """

    num_samples: int
    epoch: int
    batch: int
    world: World
    remainder: Remainder
    gaps: tuple[Gap, ...]
    bucket: tuple[int, int, Any] | None = None
    budget: Budget | None = None
    origin: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise BatchError(f"a batch of {self.batch} samples is invalid", "set batch_size= to 1 or more")
        if self.remainder not in REMAINDERS:
            raise UsageError(f"remainder={self.remainder!r}", f"choose one of {', '.join(REMAINDERS)}")

    def at_epoch(self, epoch: int) -> EpochShare:
        """Return the rank's part of another epoch."""
        raise NotImplementedError

    def skipping(self, gaps: tuple[Gap, ...]) -> Self:
        """Return the same part with these gaps."""
        return replace(self, gaps=gaps)  # type: ignore[type-var] # a dataclass

    @property
    def blocks(self) -> tuple[int, ...]:
        """The most samples of each dataset that are fetched together."""
        raise NotImplementedError

    @property
    def block(self) -> int:
        """The most samples that are fetched together."""
        return max(self.blocks)

    @property
    def samples_before(self) -> int:
        """The samples of all earlier epochs, over all ranks."""
        return self.epoch * self.num_samples

    def slots_needed(self, steps_at_once: int = 1) -> int:
        """Return the maximum number of blocks that a schedule holds at once."""
        raise NotImplementedError

    def plan_bytes(self, resident: bool) -> int:
        """Return the memory of planning. `resident`: every field is, so plans have no blocks."""
        raise NotImplementedError

    def describe_rereads(self, *, shuffle: bool) -> str:
        """Return a warning if blocks are read more than once, else ""."""
        raise NotImplementedError

    def _describe_rereads(self, problem: str, units: Collection[int], lanes: Collection[int]) -> str:
        """Return a warning, with the samples of turns and the lanes, or the fewer consumers, that end the problem."""
        size = self.world.size
        begun = [f"unit={size}"] if any(unit % size for unit in units) else []
        if any(each % size for each in lanes):
            begun.append(f"shuffle=Shuffle(lanes={-(-max(lanes) // size) * size})")
        other = next(fewer for fewer in range(size, 0, -1) if not any(each % fewer for each in (*units, *lanes)))
        return f"{size} consumers {problem}; begin a run with {', '.join(begun)}, or use {other}"

    def gaps_after(self, position: int) -> Iterator[Gap]:
        """Yield the gaps of the epoch that end after a position."""
        return (gap for gap in self.gaps if gap.epoch == self.epoch and gap.stop > position)

    def parts(self, position: int) -> Iterator[tuple[int, int | None]]:
        """Yield (start, stop) of each part between gaps, from a position to the end of the epoch (None)."""
        for gap in self.gaps_after(position):
            if position < gap.start:
                yield position, gap.start
            position = gap.stop
        yield position, None  # beyond the end of the epoch if its last step is skipped

    def walk(self, position: int, steps: int) -> int:
        """Return the start of the next step after `steps` steps from a position on.

        It is the end of the epoch or more if no step follows.
        """
        for gap in self.gaps_after(position):
            before = self.steps_between(position, max(position, gap.start))
            if steps < before:
                break
            steps -= before
            position = gap.stop
        return self.after(position, steps)

    def count_steps(self, position: int) -> int:
        """Return the number of steps from a position on, without those in gaps, in which this rank has a row."""
        return sum(self.num_steps(start, stop) for start, stop in self.parts(position))

    @property
    def global_batch(self) -> int:
        """The number of positions of a step over all ranks, G."""
        return self.world.size * self.batch

    @cached_property
    def _starts(self) -> Ints:
        """Where the steps by a budget start, and where the last one ends."""
        assert self.budget is not None
        every = self.budget[2](self)
        if not self.origin:
            return every
        return np.concatenate([every[every < self.origin], self._starts_after(self.origin, every)])

    def budget_starts(self) -> Ints:
        """Return where the steps by a budget of a run start that begins with the epoch, and where the last one ends.

        O(samples of the epoch). Raises `BatchError` if the world size does not divide the steps of the buckets.
        """
        assert self.bucket is not None
        group, size, count = self.bucket[1], self.world.size, self.num_samples
        if group % size:
            problem = f"{size} ranks with max_tokens= do not divide the {group} samples that steps are cut from"
            raise BatchError(problem, f"take a number of ranks that divides {group}, or begin a run without the state")
        starts, number = [np.zeros(0, np.int64)], 0
        for longest in self._longest(0, -(-count // group)):
            starts.append(self._cut_rows(number, longest))
            number += len(longest)
        end = {"drop": count // size * size, "uneven": count, "pad": -(-count // size) * size}[self.remainder]
        every = np.concatenate(starts)
        return np.append(every[every < end], end)

    def _cut_rows(self, number: int, longest: Ints, first: int = 0) -> Ints:
        """Return where the parts of steps of the buckets from a number on start, from the row `first` on."""
        assert self.bucket is not None
        assert self.budget is not None
        piece, row = cut(longest[:, first:], self.budget[0], self.batch)
        return (number + piece) * self.bucket[1] + (first + row) * self.world.size

    def _longest(self, first: int, last: int) -> Iterator[Ints]:
        """Yield the length to which the rows of all ranks up to each one are padded, in some steps of the buckets.

        Shape (steps, rows of a rank).
        """
        assert self.bucket is not None
        assert self.budget is not None
        group, size = self.bucket[1], self.world.size
        one = {"batch": group, "world": World(0, 1), "remainder": "pad", "gaps": (), "budget": None, "origin": 0}
        every: EpochShare = replace(self, **one)  # type: ignore[type-var] # a dataclass
        steps = max(1, LENGTHS_AT_ONCE // group)
        for number in range(first, last, steps):
            lengths = every.row_lengths(number * group, min(steps, last - number))
            rows = lengths.reshape(-1, group // size, size).max(axis=2)
            yield np.maximum.accumulate(self.budget[1](rows.astype(np.int64)), axis=1)

    def starts_from(self, position: int) -> Ints:
        """Return where steps by a budget start, from a position on, at which one does, and where the last one ends.

        The position may be inside a step of the buckets, after fewer or more parts than this world has there.
        """
        return self._starts_after(position, self._starts)

    def _starts_after(self, position: int, every: Ints) -> Ints:
        """Return what `starts_from` does, from the starts of `every` step of a run that begins with the epoch."""
        at = int(np.searchsorted(every, position))
        if at == every.size or every[at] == position:
            return every[at:]
        assert self.bucket is not None
        number, inside = divmod(position, self.bucket[1])
        (longest,) = self._longest(number, number + 1)
        first = self._cut_rows(number, longest, inside // self.world.size)
        first[0] = position
        others = every[np.searchsorted(every, (number + 1) * self.bucket[1]) :]
        return np.concatenate([first[first < every[-1]], others if others.size else every[-1:]])

    def after(self, position: int, steps: int) -> int:
        """Return the position after `steps` steps from a position on, without regard to gaps.

        With a budget, at most the end of the epoch.
        """
        if self.budget is None:
            return position + steps * self.global_batch
        starts = self.starts_from(position)
        return int(starts[min(steps, starts.size - 1)]) if starts.size else position

    def steps_between(self, position: int, stop: int) -> int:
        """Return the number of whole steps from a position, at which one starts, to a later one, also over gaps."""
        if self.budget is None:
            return (stop - position) // self.global_batch
        return int(np.searchsorted(self.starts_from(position), stop, side="right")) - 1

    def whole_steps(self, position: int, first: int, count: int) -> int:
        """Return how many steps from the number `first` on, at least `count`, have all parts of the last one's step."""
        if self.budget is None:
            return count
        assert self.bucket is not None
        starts, group = self.starts_from(position), self.bucket[1]
        end = -(-int(starts[first + count]) // group) * group
        if end + group > self.num_samples:  # padding repeats samples of the step before
            return starts.size - 1 - first
        return int(np.searchsorted(starts[:-1], end)) - first

    @property
    def steps_before(self) -> int:
        """The steps of all earlier epochs, in which this rank has a row; 0 with a budget, since they differ."""
        return 0 if self.budget is not None else self.epoch * self.num_steps(0)

    def first_start(self, position: int) -> int:
        """Return where step 0 of an epoch starts for a run that begins at a position: steps count from there."""
        return position % self.global_batch if self.budget is None else 0

    def global_steps(self, position: int) -> int:
        """Return the number of steps from a position to the end of the epoch, over all ranks."""
        if self.budget is not None:
            return max(0, self.starts_from(position).size - 1)
        remaining = max(0, self.num_samples - position)
        return remaining // self.global_batch if self.remainder == "drop" else -(-remaining // self.global_batch)

    @property
    def reads_each_lane(self) -> bool:
        """Whether every span examines all lanes of this rank, so that it depends on no other span."""
        return False

    def num_steps(self, position: int, stop: int | None = None) -> int:
        """Return the number of steps from a position to `stop`, or to the end, in which this rank has a row."""
        return self.global_steps(position) if stop is None else self.steps_between(position, stop)

    @property
    def span_steps(self) -> int:
        """The maximum number of steps that are planned together."""
        raise NotImplementedError

    def read(self, span: Span, live: Mapping[Any, int]) -> tuple[BlockReads, Iterable[Ints] | None]:
        """Return the blocks of a span and the `live` ones, and the positions of the span's rows in parts.

        `live` maps the key of each block that earlier spans opened and did not finish to its ticket. Each part has the
        rows of one or more plans. None: they are `positions_of_span`, which are fast to compute.
        """
        raise NotImplementedError

    def positions_of_span(self, span: Span) -> Iterable[Ints]:
        """Return the positions of a span's rows in parts."""
        raise NotImplementedError

    @property
    def time(self) -> float:
        """When the epoch begins, as one of the times that `next_uses` returns."""
        raise NotImplementedError

    @property
    def epochs(self) -> float:
        """When the epoch begins, as one of the times of the node."""
        return self.time

    def next_uses(self, keys: Sequence[Any], start: Ints) -> tuple[Ints, *tuple[Times, ...]]:
        """Return the first sample of some blocks, which parts of a block share, and when they are read after the epoch.

        `keys` and `start`: as in `BlockReads`. The times of a run can be compared with one another; infinity: the next
        epoch of this rank does not read the block.

        If the world has a `node`, also return when this rank reads each part, and when one of the ranks of the node
        reads the block next: in the rest of this epoch if the part is not its first one, or in the next. In epochs.
        """
        raise NotImplementedError

    def read_samples(self, span: Span) -> Iterable[tuple[Ints, Ints]]:
        """Yield (positions, samples) of a span's rows in parts, each with the rows of one or more plans."""
        raise NotImplementedError

    def samples(self, position: int) -> Ints:
        """Return the sample numbers of this rank's rows in the step that starts at a position, padded rows included.

        Shape (rows,), equal to `index` of that batch. O(G + window * lanes), wherever in the epoch the step starts.
        Raises `UsageError` if no step starts at the position.
        """
        if position < 0 or not self.global_steps(position):
            steps = f"{self.num_samples} samples in steps of {'up to ' * bool(self.budget)}{self.global_batch}"
            problem = f"no step starts at position {position}: the epoch has {steps}"
            raise UsageError(problem, f"ask for a step below {self.global_steps(0)}")
        span = Span(0, 1, 1, position, self.after(position, 1), last=False)
        return np.concatenate([samples for _, samples in self.read_samples(span)])

    def row_lengths(self, position: int, steps: int) -> Ints:
        """Return the lengths by which this rank's rows of some steps from a position on are in buckets."""
        raise NotImplementedError

    def run_of(self, count: int) -> tuple[int, int]:
        """Return which of the sorted positions of a step are those of this rank, if lanes have several ranks."""
        rank, size = self.world.rank, self.world.size
        if self.budget is None:
            return rank * self.batch, min((rank + 1) * self.batch, count)
        return rank * count // size, (rank + 1) * count // size

    def _within(self, span: Span) -> tuple[int, int, int]:
        """Return where the positions whose samples a span has begin and end, and before which none is left."""
        if self.bucket is None:
            return span.begin, span.end, span.end
        sizes = *self.bucket[:2], self.num_samples
        begin, _ = window_bounds(*sizes, span.begin)
        left, end = window_bounds(*sizes, max(span.begin, span.end - 1))
        return (begin, end, left) if end > span.end else (begin, span.end, span.end)

    def plans(
        self,
        position: int,
        stop: int | None = None,
        steps_at_once: int = 1,
        ticket: int = 0,
        *,
        resident: bool = False,
        compute: Compute | None = None,
    ) -> Iterator[BatchPlan]:
        """Yield the plans of the rank's batches from a position to `stop`, or to the end of the epoch.

        A plan has the rows of `steps_at_once` steps, the last one of a span perhaps of fewer; more than one for steps
        of a single sample. Tickets count from `ticket`, so that schedules can follow one another. `resident`: every
        field is resident, so plans name samples and no blocks. `compute(function, arguments, ahead)` yields the result
        of `function` for each of the arguments, of which other processes may compute `ahead` at once: most of the work,
        unless `resident`.
        """
        live: dict[Any, int] = {}
        rows = self.batch * steps_at_once
        spans, again = tee(cut_spans(self, position, self.num_steps(position, stop), steps_at_once))
        arguments = ((self, span, {} if self.reads_each_lane else live) for span in again)  # that of its moment
        if compute is None or self.bucket is not None:  # whose lengths are of this process
            compute = call_each
        reading = compute(read_span, arguments, SPANS_AT_ONCE if self.reads_each_lane else 1)
        for span in spans:
            starts = range(span.first_step, span.first_step + span.steps, steps_at_once)
            if resident:
                labels: Labels = zip(starts, repeat(()), repeat(()), strict=False)
                for positions, samples in self.read_samples(span):  # in parts: together they would take more memory
                    columns = np.zeros(samples.size, np.int64), samples, samples, positions
                    yield from self._cut(self._edges(span, rows, positions), columns, labels)
                continue
            used, parts = next(reading)
            parts = self.positions_of_span(span) if parts is None else parts
            if self.budget is not None:
                parts = [np.concatenate(list(parts))]  # whose steps are known then
            edges = np.arange(len(starts) + 1) * rows if self.budget is None else self._edges(span, rows, parts[0])
            tickets, opened, labels = _assign_tickets(self, used, live, ticket, (starts, edges))
            reads = used[0]
            begin = 0
            for positions in parts:
                part = slice(begin, begin + positions.size)
                block, row = reads.block[part], reads.row[part].astype(np.int64)
                columns = tickets[block], row, reads.start[block] + row, positions
                yield from self._cut(self._edges(span, rows, positions), columns, labels)
                begin += positions.size
            ticket += opened
            live = {reads.keys[i]: int(tickets[i]) for i in np.flatnonzero((tickets >= 0) & ~reads.finished)}

    def _edges(self, span: Span, rows: int, positions: Ints) -> Ints:
        """Return where the plans of some rows of a span start, and where the last one ends, as indexes of rows."""
        if self.budget is None:
            return np.append(np.arange(0, positions.size, rows), positions.size)
        steps = np.searchsorted(self.starts_from(span.begin), positions, side="right")
        return np.concatenate([[0], np.flatnonzero(np.diff(steps)) + 1, [positions.size]])

    def _cut(self, edges: Ints, columns: tuple[Ints, Ints, Ints, Ints], labels: Labels) -> Iterator[BatchPlan]:
        """Yield plans of the rows between edges. `columns`: the tickets, rows, samples and positions of all rows."""
        tickets, row, samples, positions = columns
        valid = positions < self.num_samples
        whole = BatchPlan(self.epoch, 0, self.batch, tickets, row, samples, positions, valid, (), ())
        for (first, stop), (step, needs, done) in zip(pairwise(edges.tolist()), labels, strict=False):
            yield whole.part(first, stop, step, needs, done)


@dataclass(frozen=True)
class Share(EpochShare):
    """The part of an epoch of a dataset that one rank reads.

    `unit`: samples per fetch without shuffle. `bucket`: how steps get samples of like length.
    """

    order: EpochOrder
    batch: int
    world: World
    remainder: Remainder
    unit: int = 1
    gaps: tuple[Gap, ...] = ()
    bucket: Bucket | None = None
    budget: Budget | None = None
    origin: int = 0

    @cached_property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of positions of the epoch."""
        return self.order.num_samples

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The number of the epoch."""
        return self.order.epoch

    def at_epoch(self, epoch: int) -> Share:
        """Return the share of another epoch."""
        origin = self.origin * (epoch == self.epoch)
        return replace(self, order=replace(self.order, epoch=epoch), origin=origin)

    @cached_property
    def divides(self) -> bool:
        """Whether the world size divides the lanes, so that every lane is read by one rank."""
        return self.order.lanes % self.world.size == 0

    @property
    def reads_each_lane(self) -> bool:
        """Whether every span examines all lanes of this rank: they are its own if the world size divides them."""
        return self.order.shuffle and self.divides

    def num_steps(self, position: int, stop: int | None = None) -> int:
        """Return the number of steps as `EpochShare` does. With "uneven", this rank may have no row in the last one."""
        steps = super().num_steps(position, stop)
        if stop is None and steps and self.remainder == "uneven":
            return steps - (self.positions(self.after(position, steps - 1)).size == 0)
        return steps

    def describe_rereads(self, *, shuffle: bool) -> str:
        """Return a warning if blocks are read more than once, else ""."""
        lanes = self.order.lanes
        if self.divides or not shuffle or (lanes == 1 and self.global_steps(0) < 2):
            return ""
        verb = "do not divide" if self.world.size <= lanes else "share"
        problem = f"{verb} {lanes} lanes: blocks are read about {self.read_factor:.1f} times"
        return self._describe_rereads(problem, (), [lanes])

    def positions(self, position: int) -> Ints:
        """Return the positions of this rank's rows in the step that starts at `position`; shape (rows,).

        The positions of padded rows are N or more; `source` maps them to the positions that they repeat.
        """
        limit = self.num_samples - position if self.remainder == "uneven" else self.global_batch
        count = min(self.after(position, 1) - position, limit) if self.global_steps(position) else 0
        return self._strided(position, count) if self.divides else self._run(position, count)

    def positions_of_steps(self, position: int, steps: int) -> Ints:
        """Return the positions of this rank's rows in `steps` steps from `position` on, step by step."""
        full = max(0, steps - 1) if self.divides else 0
        parts = [self._strided(position, self.after(position, full) - position)]
        parts += [self.positions(self.after(position, i)) for i in range(full, steps)]
        return np.concatenate(parts)

    def _strided(self, position: int, count: int) -> Ints:
        """Return the positions of [position, position + count) that are congruent to the rank modulo the world size."""
        size = self.world.size
        first = position + (self.world.rank - position) % size
        return np.arange(first, max(first, position + count), size, dtype=np.int64)

    def _run(self, position: int, count: int) -> Ints:
        """Return this rank's run of the positions [position, position + count), sorted by (p mod lanes, p)."""
        lanes = self.order.lanes
        first = position + (np.arange(lanes, dtype=np.int64) - position) % lanes
        ends = np.cumsum(_rows_by_lane(position, count, lanes))
        run = np.arange(*self.run_of(count), dtype=np.int64)
        lane = np.searchsorted(ends, run, side="right")
        before = np.concatenate(([0], ends))[lane]
        return first[lane] + (run - before) * lanes

    def source(self, positions: Ints) -> Ints:
        """Return the position whose sample each row has: its own, or the one that a padded row repeats."""
        own = self._own(positions)
        return own if self.bucket is None else exchanged(self.bucket, self.order, own)[0]

    def _own(self, positions: Ints) -> Ints:
        """Return the position of each row, or the one that a padded row repeats."""
        n, step = self.num_samples, self.bucket[1] if self.bucket and self.budget else self.global_batch
        return np.where(positions < n, positions, positions % n if n < step else positions - step)

    @cached_property
    def _lanes_by_rank(self) -> Ints:
        """The number of neighbouring lanes that each rank reads in full steps, wherever they start; shape (size,)."""
        size, lanes = self.world.size, self.order.lanes
        if self.divides or self.budget is not None:
            return np.full(size, lanes // size if self.divides else lanes, np.int64)
        first_row = np.arange(size, dtype=np.int64) * self.batch
        lowest, highest = np.full(size, lanes, np.int64), np.zeros(size, np.int64)
        for start in range(lanes):
            ends = np.cumsum(_rows_by_lane(start, self.global_batch, lanes))
            np.minimum(lowest, np.searchsorted(ends, first_row, side="right"), out=lowest)
            np.maximum(highest, np.searchsorted(ends, first_row + self.batch - 1, side="right"), out=highest)
        return highest - lowest + 1

    @property
    def lanes_read(self) -> int:
        """The maximum number of lanes that a rank reads, the same on every rank: L / R if R divides L."""
        return int(self._lanes_by_rank.max())

    @property
    def read_factor(self) -> float:
        """How often a block is read on average, over all ranks: 1.0 if the world size divides the lanes."""
        return 1.0 if self.divides else float(self._lanes_by_rank.sum()) / self.order.lanes

    @property
    def fetch_params(self) -> OrderParams:
        """The order's block, lanes and window; without shuffle, one lane whose block is `unit`."""
        return self.order.fetch_params(self.unit)

    @property
    def _span_rows_per_lane(self) -> int:
        """The maximum number of rows of a lane that are planned together."""
        least = _MIN_ROWS if self.order.shuffle else PART_ROWS
        return min(max(2 * self.fetch_params.window, least), MAX_ROWS // self.lanes_read)

    @property
    def span_steps(self) -> int:
        """The maximum number of steps that are planned together."""
        rows = self._span_rows_per_lane
        return rows * self.order.lanes // self.global_batch if self.order.shuffle else rows // self.batch

    def positions_of_span(self, span: Span) -> Iterator[Ints]:
        """Yield the positions of a span's rows in parts of whole plans, so that temporary arrays fit in a cache."""
        part = PART_ROWS if self.bucket is None else 4 * PART_ROWS  # fewer windows that two parts have in common
        steps = max(1, part // (self.batch * span.steps_at_once)) * span.steps_at_once
        for first in range(0, span.steps, steps):
            yield self.positions_of_steps(self.after(span.begin, first), min(steps, span.steps - first))

    def _sources(self, span: Span) -> Positions:
        """Return a function that yields the positions whose samples the rows of a span have."""
        if self.bucket is not None:
            parts = list(map(self.source, self.positions_of_span(span)))  # which takes long
            return lambda: iter(parts)
        return lambda: map(self.source, self.positions_of_span(span))

    def read(self, span: Span, live: Mapping[Key, int]) -> tuple[BlockReads, None]:
        """Return the blocks of a span and the `live` ones."""
        sources = self._sources(span)
        if self.order.shuffle:
            size = self.world.size
            every = range(self.world.rank, self.order.lanes, size) if self.reads_each_lane else [key[0] for key in live]
            reads = read_lanes(self.order, sources, span._replace(within=self._within(span)), every)
        else:
            next_position = span.end + self.world.rank * self.batch
            positions = np.concatenate([*sources()])
            reads = read_units(self.order, self.unit, positions, next_position, last=span.last)
        return reads, None

    @cached_property
    def _next_order(self) -> EpochOrder:
        """The order of the next epoch."""
        return replace(self.order, epoch=self.epoch + 1)

    @property
    def time(self) -> float:
        """The number of the epoch."""
        return self.epoch

    def next_uses(self, _keys: Sequence[Key], start: Ints) -> tuple[Ints, *tuple[Times, ...]]:
        """Return the first sample of some blocks, and when they are read in the next epoch: its number and a part."""
        order, epoch, shares = self._next_order, self.epoch, bool(self.world.node)
        if order.stride:
            never = np.full(start.size, inf)
            return (start, never, np.full(start.size, float(epoch)), never) if shares else (start, never)
        if not order.shuffle:
            now = epoch + start / self.num_samples
            return (start, now + 1, now, now + 1) if shares else (start, now + 1)
        numbers = start // order.params.block
        first, lanes = numbers * order.params.block, partial(self.world.lanes, order.lanes)
        uses = epoch + 1 + order.first_uses(numbers, lanes([self.world.rank]))
        if not shares:
            return first, uses
        of_node = lanes(self.world.node)
        now, later = self.order.uses_of_parts(numbers, start - first, of_node)
        next_epoch = epoch + 1 + order.first_uses(numbers, of_node)
        after = np.where((now < later) & (later < inf), epoch + later, next_epoch)
        return first, uses, epoch + now, after

    def read_samples(self, span: Span) -> Iterable[tuple[Ints, Ints]]:
        """Yield (positions, samples) of a span's rows in parts."""
        sources = self._sources(span)
        unshuffled = (part + self.order.first_sample for part in sources())
        within = span._replace(within=self._within(span))
        samples = lane_samples(self.order, sources, within) if self.order.shuffle else unshuffled
        return zip(self.positions_of_span(span), samples, strict=True)

    def row_lengths(self, position: int, steps: int) -> Ints:
        """Return the lengths by which this rank's rows of some steps from a position on are in buckets."""
        assert self.bucket is not None
        return exchanged(self.bucket, self.order, self._own(self.positions_of_steps(position, steps)))[1]

    def slots_needed(self, steps_at_once: int = 1, epochs: int = 1) -> int:
        """Return the maximum number of blocks that a schedule holds at once, from `needs` until `done`.

        `epochs`: so many, one after the other, have positions in a window of buckets. The number is the same on every
        rank. A lane holds a block from its smallest key to its largest. The keys of the arrivals [s, s + B) lie in
        [s, s + B + W). So at key T only blocks with T - B - W < s < T are held: at most W / B + 1, and one more in the
        lane of the short block.

        A batch with the keys [T0, T1] holds all blocks that any of these keys holds: W / B + 2 + (T1 - T0) / B. T1 - T0
        is about the number of the batch's rows in that lane. Chance increases it, but by little compared with a block,
        and with the lanes without the short block; one more slot covers the case of a single lane. (Replays of
        thousands of schedules reached the count without that slot, and never exceeded it.)

        Padding makes the last step the last G positions in another order. If N < G, or R does not divide L, the last
        step may use other lanes: at most one block for each row.

        Buckets hold the blocks of a window of steps, and of the one before until the next plan is made. Each epoch that
        begins in them adds a window of the shuffle, and blocks at both its ends.

        A block of one sample is held for one plan, or for two by padding. Without shuffle there is no window: a plan
        holds the units of its rows, and padding repeats rows of the last full step, which has the same units or more.
        """
        lanes, params = self.lanes_read, self.fetch_params
        ahead = 0 if self.bucket is None else -(-self.bucket[0] * self.bucket[1] // self.order.lanes)
        per_lane = -(-(epochs * params.window + 2 * ahead) // params.block) + 2 * epochs if self.order.shuffle else 1
        batch = steps_at_once * self.batch
        # the rows of a plan, over all ranks, in the lanes that one rank reads
        rows = -(-lanes * self.world.size * batch // self.order.lanes)
        slots = lanes * per_lane + -(-rows // params.block) + 1
        if not self.divides or self.num_samples < self.global_batch:
            slots = max(slots, min(batch, self.order.lanes * per_lane))
        if params.block == 1 and self.bucket is None:
            slots = min(slots, 2 * batch)
        return min(slots, epochs * max(1, -(-self.num_samples // params.block) + self.order.lanes - 1))

    @property
    def blocks(self) -> tuple[int, ...]:
        """The most samples of each dataset that are fetched together."""
        return (self.fetch_params.block,)

    def plan_bytes(self, resident: bool) -> int:
        """Return the memory of planning, which is less if every field is resident."""
        rows = min(self._span_rows_per_lane * self.lanes_read, self.num_samples // self.world.size + self.batch)
        return ahead_bytes(self) + budget_bytes(self) + (RESIDENT_SPAN_BYTES if resident else SPAN_BYTES) * rows


def call_each(function: Callable[..., Any], arguments: Iterable[Sequence[Any]], _ahead: int) -> Iterator[Any]:
    """Yield `function(*args)` for each of the arguments."""
    return starmap(function, arguments)


def read_span(share: EpochShare, span: Span, live: Mapping[Any, int]) -> tuple[UsedBlocks, Iterable[Ints] | None]:
    """Return what `share.read(span, live)` does, with the first and the last row of each block."""
    reads, parts = share.read(span, live)
    rows = np.arange(reads.block.size, dtype=np.int32 if reads.block.size < 2**31 else np.int64)
    first, last = np.full(len(reads.keys), rows.size), np.full(len(reads.keys), -1)
    first[reads.block[::-1]] = rows[::-1]  # numpy keeps the last assignment to an index
    last[reads.block] = rows
    return (reads, first, last), parts


Compute = Callable[..., Any]


def _rows_by_lane(position: int, count: int, lanes: int) -> Ints:
    """Return how many of the positions [position, position + count) are in each lane; shape (lanes,)."""
    turn = (np.arange(lanes, dtype=np.int64) - position) % lanes
    return count // lanes + (turn < count % lanes)


Ints = NDArray[np.int64]
Times = NDArray[np.float64]
# Yields positions of a span's rows in parts; a function, since they are iterated more than once.
Positions = Callable[[], Iterator[Ints]]
Key = tuple[int, int]  # (lane, ordinal of the block); without shuffle (0, number of the unit)
Item = TypeVar("Item")

MAX_ROWS = 2**22  # rows of a span, which bound the memory of planning: see `plan_bytes`
PART_ROWS = 2**15  # rows whose positions are computed together
LENGTHS_AT_ONCE = 2**20  # rows whose lengths are, since each time costs as much as the shuffle's window is long
SPANS_AT_ONCE = 2  # that workers compute
FIRST_STEPS = 64  # maximum steps of the first span, for which the first batch waits
_MIN_ROWS = 2**12  # rows of a lane below which a longer span costs little
PLANNED_ROWS = 1 << 18  # in the queue of plans
LOOK_AHEAD_ROWS = 1 << 20  # whose blocks are requested before the batch that needs them is assembled
# Bytes per row of a finished plan, and of a span that is being planned, with the span before it. Measured as peaks of
# processes that planned 20 million rows in spans of 4 million.
ROW_BYTES = 33
SPAN_BYTES = 40
RESIDENT_SPAN_BYTES = 12
LENGTH_BYTES = 100  # per row whose length is computed, likewise


class Span(NamedTuple):
    """`steps` steps from `first_step` on, over the positions [begin, end). Plans have `steps_at_once` steps each.

    `last` is true if no step follows. `within`: where the positions whose samples it has begin and end, and before
    which no later span needs any; () for (begin, end, end).
    """

    first_step: int
    steps: int
    steps_at_once: int
    begin: int
    end: int
    last: bool
    within: tuple[int, ...] = ()


def cut_spans(share: EpochShare, position: int, steps: int, steps_at_once: int) -> Iterator[Span]:
    """Yield spans of `steps` steps, short ones first, then of about `share.span_steps` steps.

    The last two steps are in one span, since padding repeats rows of the last but one.
    """
    limit = max(1, share.span_steps // steps_at_once) * steps_at_once
    size = min(limit, max(1, FIRST_STEPS // steps_at_once) * steps_at_once)
    first = 0
    while first < steps:
        count = steps - first if steps - first <= size + 1 else size
        count = min(share.whole_steps(position, first, count), steps - first)
        begin, end = share.after(position, first), share.after(position, first + count)
        yield Span(first, count, steps_at_once, begin, end, last=first + count == steps)
        first += count
        size = min(limit, 2 * size)


class BlockReads(NamedTuple):
    """The blocks that the rows of a span are read from, and the `block` and `row` of each row."""

    keys: list[Any]
    start: Ints  # first sample of each block, or of the part of it that belongs to the lane
    stop: Ints
    finished: NDArray[np.bool_]  # whether no later step uses the block
    block: NDArray[Any]  # integers: indexes into the columns above
    row: NDArray[Any]  # integers, counted from `start`


UsedBlocks = tuple[BlockReads, Ints, Ints]  # with the first and the last row of each block, -1 if it has none


def read_lanes(order: EpochOrder, positions: Positions, span: Span, others: Sequence[int]) -> BlockReads:
    """Return the blocks of a shuffled order at the positions of a span, and those of other lanes, which may be live.

    Each of these lanes is examined over the whole span.
    """
    used, low, count = _used_lanes(order, positions, span)
    used[others] = True
    lanes = np.flatnonzero(used)
    _, reach, left = span.within or (span.begin, span.end, span.end)
    stops, lefts = (-((lanes - min(at, order.num_samples)) // order.lanes) for at in (reach, left))
    width = int(stops.max()) - low
    dtype = np.int32 if order.params.block < 2**31 else np.int64
    table = np.empty((2, lanes.size * width), dtype)
    keys: list[Key] = []
    parts: list[BlockReads] = []
    # the width is 0 if this rank has no row of the span, only live blocks
    begins = (np.arange(lanes.size) * width).tolist()
    for begin, lane, stop, done in zip(begins, lanes.tolist(), stops.tolist(), lefts.tolist(), strict=True):
        part = _read_lane(order, lane, low, stop, done)
        np.add(part.block, len(keys), out=table[0, begin : begin + stop - low], casting="same_kind")
        table[1, begin : begin + stop - low] = part.row
        keys += part.keys
        parts.append(part)
    offsets = (np.cumsum(used) - 1) * width - low
    rows, begin = np.empty((2, count), dtype), 0
    for part_positions in positions():
        indexes = offsets[part_positions % order.lanes] + part_positions // order.lanes
        for column, out in zip(table, rows[:, begin : begin + indexes.size], strict=True):
            np.take(column, indexes, out=out, mode="clip")
        begin += indexes.size
    start, end, finished = join_blocks(parts)
    first = order.block_numbers(np.array([key[1] for key in keys], np.int64)) * order.params.block + order.first_sample
    return BlockReads(keys, first + start, first + end, finished | span.last, *rows)


def join_blocks(parts: Sequence[BlockReads]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return `start`, `stop` and `finished` of the blocks of all parts, concatenated."""
    start, stop, finished = zip(*((part.start, part.stop, part.finished) for part in parts), strict=True)
    return np.concatenate(start), np.concatenate(stop), np.concatenate(finished)


def _used_lanes(order: EpochOrder, positions: Positions, span: Span) -> tuple[NDArray[np.bool_], int, int]:
    """Return (whether each lane has a position, the lowest index of a position in its lane, number of positions)."""
    begin = span.within[0] if span.within else span.begin
    used, low, count = np.zeros(order.lanes, np.bool_), begin // order.lanes, 0
    for part in positions():
        used[part % order.lanes] = True
        low = min(low, int(part.min(initial=begin)) // order.lanes)  # padding may repeat earlier positions
        count += part.size
    return used, low, count


def lane_samples(order: EpochOrder, positions: Positions, span: Span) -> Iterator[Ints]:
    """Yield the samples of a shuffled order at the positions of a span, in the same parts.

    Only the lanes in use are computed.
    """
    used, low, _ = _used_lanes(order, positions, span)
    lanes = np.flatnonzero(used)
    end = span.within[1] if span.within else span.end
    width = -(-min(end, order.num_samples) // order.lanes) - low
    emitted = np.zeros(lanes.size * width, np.int64)
    for begin, lane in zip(range(0, emitted.size, max(1, width)), lanes.tolist(), strict=True):
        stop = min(low + width, order.lane_bounds(lane)[1])
        emitted[begin : begin + stop - low] = order.emit(lane, low, stop)
    offsets = (np.cumsum(used) - 1) * width - low
    for part in positions():
        yield order.samples(emitted[offsets[part % order.lanes] + part // order.lanes])


def _read_lane(order: EpochOrder, lane: int, low: int, stop: int, done: int) -> BlockReads:
    """Return the blocks at the indexes [low, stop) of a lane, with `start` and `stop` counted from the block's start.

    A block is finished unless one of its arrivals is emitted at index `done` or later. If a block belongs to two lanes,
    each reads its own part.
    """
    start, offsets, later = order.examine(lane, low, stop)
    later[offsets[max(0, done - low) :]] = True
    begin, length = order.lane_bounds(lane)
    end = start + later.size
    first_block, last_block = order.locate(np.array([start, end - 1]))[0].tolist()
    edges = order.first_arrivals(np.arange(first_block, last_block + 2))
    lane_edges = edges.clip(begin, begin + length)
    unfinished = np.logical_or.reduceat(later, edges[:-1].clip(start) - start)
    emitted = offsets + start
    block = order.locate(emitted)[0] - first_block
    return BlockReads(
        keys=[(lane, ordinal) for ordinal in range(first_block, last_block + 1)],
        start=(lane_edges - edges)[:-1],
        stop=lane_edges[1:] - edges[:-1],
        finished=~unfinished & (lane_edges[1:] <= end),
        block=block,
        row=emitted - lane_edges[block],
    )


def read_units(
    order: EpochOrder, unit: int, positions: Ints, next_position: int, *, last: bool, live: Collection[Key] = ()
) -> BlockReads:
    """Return the units of `unit` consecutive samples at unshuffled positions, and the `live` ones.

    This rank's next rows begin at `next_position`, unless the steps are the `last` ones.
    """
    live_units = np.fromiter((key[1] for key in live), np.int64, len(live))
    units, block = np.unique(np.concatenate([positions // unit, live_units]), return_inverse=True)
    block = block[: positions.size]
    start = units * unit
    stop = np.minimum(start + unit, order.num_samples)
    keys = [(0, number) for number in units.tolist()]
    finished, rows, first = (stop <= next_position) | last, positions - start[block], order.first_sample
    return BlockReads(keys, start + first, stop + first, finished, block, rows)


class BlockRef(NamedTuple):
    """The fetch of the samples [start, stop). Tickets number the fetches of a rank in order of first need.

    A block that two lanes share is two fetches, each of its lane's part: no sample is fetched twice.

    `block`: the first sample of the block that it is a part of. `next_use`: when that is read after this epoch, which
    can be compared with that of other blocks. `now` and `node_use`: when this rank reads it, and when one of the ranks
    that share a cache reads the block next: see `EpochShare.next_uses`.
    """

    ticket: int
    start: int
    stop: int
    block: int = -1
    next_use: float = inf
    now: float = 0.0
    node_use: float = inf


class BatchPlan(NamedTuple):
    """The rows of one rank's batch, or of several steps at once. Arrays have an entry for each row.

    `step`: the first step of the plan, counted from the start of the schedule of this `epoch`. `step_rows`: the rows of
    a step; the last one may have fewer. `tickets`: the block of each row. `rows`: its row in that block, counted from
    the start of the fetch. `samples`: its sample number. `positions`: its position in the epoch, N or more for a padded
    row. `valid`: false for padded rows.

    `needs`: the blocks that no earlier plan needs, in order of first need. `done`: the tickets of the blocks that no
    later plan of the schedule needs. Each ticket is in exactly one `needs` and one `done`.
    """

    epoch: int
    step: int
    step_rows: int
    tickets: NDArray[np.int64]
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    positions: NDArray[np.int64]
    valid: NDArray[np.bool_]
    needs: tuple[BlockRef, ...]
    done: tuple[int, ...]

    def part(
        self, first: int, stop: int, step: int, needs: tuple[BlockRef, ...] = (), done: tuple[int, ...] = ()
    ) -> BatchPlan:
        """Return the plan of the rows [first, stop), of which `step` is the first step."""
        at = slice(first, stop)
        arrays = self.tickets[at], self.rows[at], self.samples[at], self.positions[at]
        return BatchPlan(self.epoch, step, self.step_rows, *arrays, self.valid[at], needs, done)

    def steps(self) -> Iterator[BatchPlan]:
        """Yield a plan for each step, with no `needs` and no `done`."""
        for number, first in enumerate(range(0, len(self.rows), self.step_rows)):
            yield self.part(first, first + self.step_rows, self.step + number)


Labels = Iterator[tuple[int, tuple[BlockRef, ...], tuple[int, ...]]]  # (step, needs, done) of each plan


def _assign_tickets(
    share: EpochShare, used: UsedBlocks, live: Mapping[Any, int], next_ticket: int, plans: tuple[range, Ints]
) -> tuple[Ints, int, Labels]:
    """Assign tickets to the blocks that are needed for the first time; `live` blocks keep their tickets.

    `plans`: the first steps of the plans, and the edges of their rows.

    Returns the ticket of each block (-1 if it is not used yet), the number of new tickets, and the labels of the plans.
    """
    (reads, first, last), (steps, edges) = used, plans
    tickets = np.array([live.get(key, -1) for key in reads.keys], np.int64)
    opened = np.flatnonzero((last >= 0) & (tickets < 0))
    opened = opened[np.argsort(first[opened])]
    tickets[opened] = next_ticket + np.arange(opened.size)
    closed = np.flatnonzero(reads.finished & (tickets >= 0))
    closed = closed[np.argsort(last[closed], kind="stable")]
    keys = [reads.keys[number] for number in opened.tolist()]
    columns = [column[opened] for column in (tickets, reads.start, reads.stop)]
    refs = list(map(BlockRef, *(column.tolist() for column in (*columns, *share.next_uses(keys, columns[1])))))
    needs = _grouped(refs, first[opened], edges)
    done = _grouped(tickets[closed].tolist(), np.maximum(last[closed], 0), edges)
    return tickets, opened.size, zip(steps, needs, done, strict=True)


def _grouped(items: list[Item], rows: Ints, edges: Ints) -> Iterator[tuple[Item, ...]]:
    """Yield the items between each pair of neighbouring edges. `rows` has the ascending row of each item."""
    return (tuple(items[low:high]) for low, high in pairwise(np.searchsorted(rows, edges).tolist()))


def budget_bytes(share: EpochShare) -> int:
    """Return the bytes of finding where the steps by a budget start, and of the starts of the latest two epochs."""
    if share.budget is None or share.bucket is None:
        return 0
    rows = min(max(LENGTHS_AT_ONCE, share.bucket[1]), share.num_samples)
    return LENGTH_BYTES * rows + 2 * 8 * (share.global_steps(0) + 1)


def ahead_bytes(share: EpochShare) -> int:
    """Return the bytes of the plans that are made before their batches are assembled."""
    return ROW_BYTES * min(PLANNED_ROWS + LOOK_AHEAD_ROWS, 2 * (share.num_samples // share.world.size + share.batch))
