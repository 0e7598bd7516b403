"""The order of a mixture: turns of sources in given proportions, the part of a rank, and its schedule (rule 10).

Sources take turns that are spread evenly, in phases with different weights. A turn takes the next samples of the
source's stream, which has one epoch after the other, each in its own order. Like `schedule`, this is vectorised integer
arithmetic without I/O, and can start anywhere in the order.

A *position* counts the samples of the mixture; a *source position* counts those of one source's stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import ceil, gcd, lcm
from numbers import Rational
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import MixtureError
from streamloader.options import Remainder
from streamloader.order.budget import Budget
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.groups import Lengths, exchanged_in_lanes, number_steps
from streamloader.order.schedule import (
    MAX_ROWS,
    BlockReads,
    EpochShare,
    Gap,
    Ints,
    Key,
    Share,
    Span,
    World,
    ahead_bytes,
    budget_bytes,
    join_blocks,
    read_lanes,
    read_units,
)
from streamloader.samples import distinct

# Maximum sum of whole weights, and so of the turns after which the order of sources repeats. Weights that need more are
# rounded.
MAX_PARTS = 4096
MAX_SHARED_ROWS = 2**20  # rows of all ranks that are planned together where a rank's are not known without the others
SPAN_BYTES = 140  # per row of a span that is being planned, like `schedule.SPAN_BYTES`


def whole_weights(weights: Sequence[float | Rational]) -> tuple[int, ...]:
    """Return integers in the proportions of `weights`, without a common divisor.

    0.7 means 7/10. Weights whose integers would have a sum above `MAX_PARTS` are rounded by the largest remainder, to
    at least one part for each weight above 0, so that shares are off by about 1/MAX_PARTS. Raises `MixtureError` for a
    weight that is negative or not a number, and if all weights are 0.
    """
    shares = exact_shares(weights)
    parts = min(MAX_PARTS, lcm(*(share.denominator for share in shares)))
    exact = [share * parts for share in shares]
    whole = [max(int(part), int(part > 0)) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: max(0, parts - sum(whole))]:
        whole[i] += 1
    divisor = gcd(*whole)
    return tuple(weight // divisor for weight in whole)


def exact_shares(weights: Sequence[float | Rational]) -> list[Fraction]:
    """Return each weight divided by their sum. Raises `MixtureError` as `whole_weights` does."""
    exact = [_fraction(weight) for weight in weights]
    total = sum(exact)
    if not total:
        raise MixtureError(f"the weights {list(weights)} are all 0", "give at least one weight above 0")
    return [weight / total for weight in exact]


def _fraction(weight: float | Rational) -> Fraction:
    try:
        fraction = Fraction(str(weight)) if isinstance(weight, float | np.floating) else Fraction(weight)
    except (TypeError, ValueError, OverflowError) as error:
        raise MixtureError(f"the weight {weight!r} is not a number", "give a number of at least 0") from error
    if fraction < 0:
        raise MixtureError(f"the weight {weight!r} is negative", "give a number of at least 0")
    return fraction


# the first position of each phase, and the weight of each source
WeightsFrom = Sequence[tuple[int, Sequence[int]]]


def elements_before(position: int, phases: WeightsFrom, means: Sequence[Fraction]) -> Fraction:
    """Return about how many elements of a field the samples before a position have.

    `means`: the mean number in a sample of each source.
    """
    return sum(((min(position, end) - begin) * mean for begin, end, mean in _in_phases(phases, means, position)), _NONE)


def position_after(elements: int, phases: WeightsFrom, means: Sequence[Fraction]) -> int:
    """Return the first position before which there are about `elements` elements: see `elements_before`.

    Raises `MixtureError` if no later sample has one.
    """
    left = Fraction(elements)
    for begin, end, mean in _in_phases(phases, means, None):
        if left <= 0:
            return begin
        if mean and (end is None or left <= (end - begin) * mean):
            return begin + ceil(left / mean)
        left -= mean * (0 if end is None else end - begin)
    problem = f"the schedule has weights after {elements} elements, and no sample has one after {elements - left}"
    raise MixtureError(problem, "let schedule_by= name another field, or count steps or samples")


_NONE = Fraction(0)


def _in_phases(phases: WeightsFrom, means: Sequence[Fraction], last: Any) -> Iterator[tuple[int, Any, Fraction]]:
    """Yield (begin, end, mean number of elements in a sample) of each phase; the last one ends at `last`."""
    ends = [*(begin for begin, _ in phases[1:]), last]
    for (begin, weights), end in zip(phases, ends, strict=True):
        if last is not None and begin >= last:
            return
        total = sum((weight * mean for weight, mean in zip(weights, means, strict=True)), _NONE)
        yield begin, end, total / sum(weights)


def first_turns(weights: tuple[int, ...], count: int) -> NDArray[np.uint16]:
    """Return the source of each of the first `count` turns of a period, as an index into `weights`.

    A source is due from the turn at which it is behind by one turn minus the bound. Of the sources that are due, the
    next turn goes to the one that would be late first: the earliest deadline, of equal ones the first source.
    """
    period, slack = sum(weights), max(1, 2 * sum(map(bool, weights)) - 2)
    taken, turns = [0] * len(weights), np.empty(count, np.uint16)
    waiting = [(-(-period // (slack * weight)) - 1, source) for source, weight in enumerate(weights) if weight]
    heapify(waiting)
    due: list[tuple[int, int]] = []  # by deadline, in units of 2**-40 / slack turns, which are exact enough
    for turn in range(count):
        while waiting and waiting[0][0] <= turn:
            _, source = heappop(waiting)
            deadline = (slack * (taken[source] + 1) - 1) * period
            heappush(due, ((deadline << 40) // weights[source], source))
        _, source = heappop(due)
        turns[turn] = source
        taken[source] += 1
        heappush(waiting, (-(-period * (1 + slack * taken[source]) // (slack * weights[source])) - 1, source))
    return turns


@lru_cache(16)  # of the phases that a run is in, or that its epochs end in
def _period(weights: tuple[int, ...]) -> NDArray[np.uint16]:
    return first_turns(weights, sum(weights))


@lru_cache(1 << 12)  # of the phases that are over
def _counts_of(weights: tuple[int, ...], turns: int) -> tuple[int, ...]:
    return tuple(np.bincount(first_turns(weights, turns), minlength=len(weights)).tolist())


@dataclass(frozen=True)
class Phase:
    """Turns of `unit` samples from the position `start` of the mixture on, in proportion to `weights`.

    `weights[i]` is the weight of the source `sources[i]`. Turns depend on the order of the sources, which is that in
    which they were first mixed.

    Of every sum(weights) turns, source i has weights[i]. Of the first n turns, it has n * weights[i] / sum(weights),
    give or take less than one: Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980).
    So in any window the shares are exact to less than two turns.
    """

    start: int
    unit: int
    weights: tuple[int, ...]
    sources: tuple[int, ...]

    @classmethod
    def of_all(cls, start: int, unit: int, weights: tuple[int, ...]) -> Phase:
        """Return a phase with a weight for every source, in the order of the sources."""
        return cls(start, unit, weights, tuple(range(len(weights))))

    def weight(self, source: int) -> int:
        """Return the weight of a source, 0 if the phase does not have it."""
        return self.weights[self.sources.index(source)] if source in self.sources else 0

    @property
    def _table(self) -> NDArray[np.uint16]:
        """The source of each turn of a period, as an index into `sources`. Then the sequence repeats."""
        return _period(self.weights)

    def counts(self, stop: int, count: int, *, over: bool = False) -> Ints:
        """Return how many samples each of `count` sources has from the start of the phase to `stop`; shape (count,).

        `over`: the phase ends there, so its table is not kept.
        """
        periods, turn = divmod((stop - self.start) // self.unit, sum(self.weights))
        turns = _counts_of(self.weights, turn) if over else np.bincount(self._table[:turn], minlength=len(self.weights))
        counts = np.zeros(count, np.int64)
        counts[list(self.sources)] = (periods * np.array(self.weights, np.int64) + turns) * self.unit
        return counts

    def turns(self, start: int, stop: int) -> Ints:
        """Return the source of each turn between two positions."""
        first, last = (start - self.start) // self.unit, (stop - self.start) // self.unit
        return np.array(self.sources)[self._table[np.arange(first, last) % sum(self.weights)]]

    def end_of(self, source: int, samples: int) -> int | None:
        """Return the end of the turn in which a source reaches `samples` (> 0) samples of the phase.

        None if the source has no weight.
        """
        if not self.weight(source):
            return None
        periods, turn = divmod(-(-samples // self.unit) - 1, self.weight(source))
        turns = periods * sum(self.weights) + int(np.flatnonzero(self._table == self.sources.index(source))[turn]) + 1
        return self.start + turns * self.unit


def phases_from(phases: Sequence[Phase], position: int, unit: int) -> tuple[Phase, ...]:
    """Return consecutive phases from a position on, with turns of `unit` samples.

    The first one starts at the position, later ones at the next end of a turn. If several would start together, the
    last of them does.
    """
    by_start = {}
    for phase in phases:
        start = position + -(-max(0, phase.start - position) // unit) * unit
        by_start[start] = replace(phase, start=start, unit=unit)
    return tuple(by_start.values())


Times = NDArray[np.float64]
MixKey = tuple[int, int, int, int]  # (source, epoch of the source, lane, ordinal of the block)
Stop = Literal["first", "last"]


@dataclass(frozen=True)
class Mix:
    """The order of a mixture: sources take turns, in consecutive phases.

    `orders`: that of the epoch 0 of each source; source position p is position p mod N of its epoch p div N. `units`:
    the samples of a fetch of each source without shuffle. `phases`: the first starts at position 0, each ends where a
    turn ends, and the last has no end.

    An epoch of the mixture ends when the first, or the last, of its sources completes another epoch of its own; the
    other sources continue. `anchor`: (epoch, position) from which these epochs count: 0, or where sources or weights
    were changed.
    """

    orders: tuple[EpochOrder, ...]
    units: tuple[int, ...]
    phases: tuple[Phase, ...]
    stop: Stop
    anchor: tuple[int, int] = (0, 0)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The number in the mixture of the first sample of each source."""
        return tuple(accumulate((order.num_samples for order in self.orders[:-1]), initial=0))

    @property
    def fetches(self) -> list[OrderParams]:
        """The block, lanes and window of the fetches of each source."""
        return [order.fetch_params(unit) for order, unit in zip(self.orders, self.units, strict=True)]

    def bounds(self, epoch: int) -> tuple[int, int]:
        """Return (begin, end) of an epoch, in positions of the whole run.

        Raises `MixtureError` for an epoch before the mixture was last changed.
        """
        first, position = self.anchor
        if epoch < first:
            problem = f"epoch {epoch} is before epoch {first}, in which the mixture was changed"
            raise MixtureError(problem, f"resume from epoch {first} or later")
        return position if epoch == first else self._end(epoch - first), self._end(epoch - first + 1)

    def _end(self, epochs: int) -> int:
        """Return the end of the last of `epochs` epochs from the anchor on."""
        counts = self.counts(self.anchor[1]).tolist()
        ends = [
            self.end_of(source, (counts[source] // order.num_samples + epochs) * order.num_samples)
            for source, order in enumerate(self.orders)
        ]
        endings = [end for end in ends if end is not None]
        return min(endings) if self.stop == "first" else max(endings)

    @cached_property
    def _before(self) -> Ints:
        """How many samples each source has before each phase; shape (phases, sources)."""
        ended = [phase.counts(after.start, len(self.orders), over=True) for phase, after in pairwise(self.phases)]
        return np.cumsum([np.zeros(len(self.orders), np.int64), *ended], axis=0)

    def _phase_at(self, position: int) -> int:
        return bisect_right(self.phases, position, key=attrgetter("start")) - 1

    def counts(self, position: int) -> Ints:
        """Return how many samples each source has before a position at which a turn begins; shape (sources,)."""
        number = self._phase_at(position)
        counts: Ints = self._before[number] + self.phases[number].counts(position, len(self.orders))
        return counts

    def turns(self, start: int, stop: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return (source, source position, position, size) of each turn between two positions at which turns begin."""
        counts = self.counts(start)
        parts = [(np.zeros(0, np.int64),) * 4]
        first, last = self._phase_at(start), self._phase_at(max(start, stop - 1))
        ends = (phase.start for phase in self.phases[first + 1 : last + 1])
        for phase, end in zip(self.phases[first : last + 1], [*ends, stop], strict=True):
            begin = max(start, phase.start)
            source = phase.turns(begin, end)
            source_position = np.empty(source.size, np.int64)
            for number in range(len(self.orders)):
                turns = np.flatnonzero(source == number)
                source_position[turns] = counts[number] + np.arange(turns.size) * phase.unit
                counts[number] += turns.size * phase.unit
            position = begin + np.arange(source.size) * phase.unit
            parts.append((source, source_position, position, np.full(source.size, phase.unit)))
        sources, source_positions, positions, sizes = map(np.concatenate, zip(*parts, strict=True))
        return sources, source_positions, positions, sizes

    def end_of(self, source: int, samples: int) -> int | None:
        """Return the end of the turn in which a source reaches `samples` (> 0) samples.

        None if the source has no weight in the last phase.
        """
        if not self.phases[-1].weight(source):
            return None
        before = self._before[:, source]
        number = int(np.searchsorted(before[1:], samples))  # the phase in which it does
        return self.phases[number].end_of(source, samples - int(before[number]))

    def samples(self, source: int, source_positions: Ints) -> Ints:
        """Return the samples, numbered in the mixture, at some positions of a source."""
        order = self.orders[source]
        samples = np.empty(source_positions.size, np.int64)
        epochs = source_positions // order.num_samples
        for epoch in distinct(epochs).tolist():
            rows = epochs == epoch
            positions = source_positions[rows] - epoch * order.num_samples
            low, high = int(positions.min()), int(positions.max()) + 1
            samples[rows] = replace(order, epoch=epoch).samples_at(low, high)[positions - low]
        return samples + self.firsts[source]


@dataclass(frozen=True)
class MixShare(EpochShare):
    """The part of an epoch of a mixture that one rank reads. Positions count from the start of the epoch.

    "pad" fills the last step with the next samples, which are not valid and come again in the next epoch. Mixtures do
    not support the remainder "uneven". `bucket`: how steps get samples of like length, by those of each source.
    """

    mix: Mix
    epoch: int
    batch: int
    world: World
    remainder: Remainder
    gaps: tuple[Gap, ...] = ()
    bucket: tuple[int, int, tuple[Lengths, ...]] | None = None
    budget: Budget | None = None
    origin: int = 0

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """(begin, end) of the epoch, in positions of the whole run."""
        return self.mix.bounds(self.epoch)

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of the epoch."""
        return self.bounds[1] - self.bounds[0]

    @property
    def samples_before(self) -> int:
        """The samples of all earlier epochs, over all ranks: the position in the run."""
        return self.bounds[0]

    @property
    def _lanes(self) -> list[int]:
        """The number of lanes of each source."""
        return [order.lanes for order in self.mix.orders]

    @property
    def span_rows(self) -> int:
        """The maximum number of rows of this rank that are planned together; at least a batch is."""
        window_rows = sum(2 * params.window * params.lanes for params in self.mix.fetches)
        most = MAX_ROWS if self.divides else MAX_SHARED_ROWS // self.world.size
        return min(window_rows // self.world.size, most, self.num_samples // self.world.size + self.batch)

    @property
    def span_steps(self) -> int:
        """The maximum number of steps that are planned together."""
        return self.span_rows // self.batch

    @cached_property
    def divides(self) -> bool:
        """Whether the world size divides turns and lanes, so that every lane is read by one rank in an epoch."""
        units = [phase.unit for phase in self.mix.phases]
        return not any(size % self.world.size for size in units + self._lanes)

    def describe_rereads(self, *, shuffle: bool) -> str:
        """Return a warning if several ranks read a block, else ""."""
        if self.divides or not shuffle:
            return ""
        units, lanes = sorted({phase.unit for phase in self.mix.phases}), sorted(set(self._lanes))
        problem = f"do not divide turns of {units} samples and {lanes} lanes: blocks are read more than once"
        return self._describe_rereads(problem, units, lanes)

    def rows(self, position: int, steps: int) -> tuple[Ints, Ints, Ints]:
        """Return (source, source position, position in the epoch) of this rank's rows of `steps` steps from `position`.

        The source position is that whose sample the row has. If the world size divides the turns, rank r takes the
        source positions that are r modulo the size of each turn. Otherwise the positions of a step are sorted by lane,
        and the rank takes a run of them, as in a dataset.
        """
        end = self.after(position, steps)
        first, last = self._turn_edges(position, end)
        source, source_position, start, size = self.mix.turns(self.bounds[0] + first, self.bounds[0] + last)
        ranks, rank = self.world.size, self.world.rank
        shared = bool((size % ranks).any())
        counts = size if shared else size // ranks
        turn = np.repeat(np.arange(source.size), counts)
        row = np.arange(turn.size) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = row if shared else ((rank - source_position) % ranks)[turn] + row * ranks
        rows = source[turn], source_position[turn] + offset, start[turn] + offset - self.bounds[0]
        if (first, last) != (position, end):
            inside = np.flatnonzero((rows[2] >= position) & (rows[2] < end))
            rows = rows[0][inside], rows[1][inside], rows[2][inside]
        if shared:
            run = self._run(*rows, position)
            rows = rows[0][run], rows[1][run], rows[2][run]
        return rows if self.bucket is None else (rows[0], self._exchanged(*rows), rows[2])

    def _turn_edges(self, begin: int, end: int) -> tuple[int, int]:
        """Return where the first turn of some steps begins, and their last one ends: those of a budget cut turns."""
        if self.budget is None:
            return begin, end
        assert self.bucket is not None
        group = self.bucket[1]
        return begin // group * group, -(-end // group) * group

    def _exchanged(self, source: Ints, source_position: Ints, position: Ints) -> Ints:
        """Return the source positions whose samples some rows get in buckets."""
        assert self.bucket is not None
        steps, group, lengths = self.bucket
        out, rows = source_position.copy(), np.flatnonzero(position < self.num_samples)
        if not rows.size:
            return out
        keys = EpochOrder(1, OrderParams(1, 1, 2), self.mix.orders[0].seed, self.epoch)
        begin, numbers = number_steps(self.bucket, keys, self.num_samples, position[rows])
        first = self.bounds[0] + begin
        of_turn, at, starts, sizes = self.mix.turns(first, min(first + numbers.size * group, self.bounds[1]))
        for number in distinct(source[rows]).tolist():
            turns, mine = np.flatnonzero(of_turn == number), rows[source[rows] == number]
            begins, offsets = at[turns], starts[turns] - at[turns] - first

            def step(places: Ints, begins: Ints = begins, offsets: Ints = offsets) -> Ints:
                found: Ints = numbers[(places + offsets[np.searchsorted(begins, places, side="right") - 1]) // group]
                return found

            windows = int(begins[0]), int(begins[-1] + sizes[turns[-1]]), step, steps
            out[mine], _ = exchanged_in_lanes(self._alone(number), lengths[number], windows, source_position[mine])
        return out

    def _run(self, source: Ints, source_position: Ints, position: Ints, first: int) -> Ints:
        """Return which of the rows of all ranks, from a step at `first` on, are this rank's, sorted by lane / lanes."""
        lanes = np.array(self._lanes)[source]
        lane = (source_position % np.array([order.num_samples for order in self.mix.orders])[source]) % lanes
        relative_lane = lane * (lcm(*self._lanes) // lanes)
        if self.budget is None:
            step = (position - first) // self.global_batch
        else:
            step = np.searchsorted(self.starts_from(first), position, side="right")
        ordered = np.lexsort((position, source, relative_lane, step))
        edges = np.append(np.flatnonzero(np.diff(step, prepend=-1)), step.size)
        runs = ((begin, self.run_of(end - begin)) for begin, end in pairwise(edges.tolist()))
        parts = [np.sort(ordered[begin + low : begin + high]) for begin, (low, high) in runs]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def slots_needed(self, steps_at_once: int = 1) -> int:
        """Return the maximum number of blocks that a schedule holds at once, the same on every rank.

        It is the sum over the sources of `Share.slots_needed`, and as much again for each epoch of a source that may
        begin within a plan while the previous one ends.

        If the world size R does not divide turns and lanes, a rank may read all lanes, as a single rank does. But its
        rows are spread over all R * rows positions of the plan. So keys increase by up to (R - 1) * rows more, summed
        over sources, lanes and epochs: one more block for each B of them, the smallest of the sources' blocks.

        In any case a plan adds at most one block for each of its rows to those that are held when it begins.

        Buckets hold the blocks of all epochs of a source that have positions in a window of steps, and the one before.
        """
        rows, size = steps_at_once * self.batch, self.world.size if self.divides else 1
        at_once, added = 0, -(-(self.world.size - size) * rows // min(params.block for params in self.mix.fetches))
        for number, (order, unit) in enumerate(zip(self.mix.orders, self.mix.units, strict=True)):
            share = Share(order, rows, World(0, size), "pad", unit)
            slots = held = share.slots_needed()
            if self.bucket is not None:
                most = self._most_in_window(number)
                share = replace(share, bucket=(1, most, self.bucket[2][number]))
                held = share.slots_needed(epochs=2 + 2 * most // order.num_samples)
            at_once += held
            added += slots * (1 + self.world.size * rows // order.num_samples)
        return at_once + min(rows, added)

    def _most_in_window(self, source: int) -> int:
        """Return a bound on the positions of a source in a window of buckets: each phase is exact to two turns."""
        assert self.bucket is not None
        size, phases = self.bucket[0] * self.bucket[1], self.mix.phases
        share = max(phase.weight(source) / sum(phase.weights) for phase in phases)
        return min(size, ceil(size * share) + sum(2 * phase.unit for phase in phases))

    def at_epoch(self, epoch: int) -> MixShare:
        """Return the rank's part of another epoch."""
        return replace(self, epoch=epoch, origin=self.origin * (epoch == self.epoch))

    @property
    def blocks(self) -> tuple[int, ...]:
        """The most samples of each dataset that are fetched together."""
        return tuple(params.block for params in self.mix.fetches)

    def plan_bytes(self, _resident: bool) -> int:
        """Return the memory of planning, whether or not every field is resident."""
        rows = max(self.span_rows, self.batch) * (1 if self.divides else self.world.size)
        return ahead_bytes(self) + budget_bytes(self) + SPAN_BYTES * rows

    def read_samples(self, span: Span) -> list[tuple[Ints, Ints]]:
        """Return (positions, samples) of a span's rows, with samples numbered in the mixture."""
        sources, source_positions, positions = self.rows(span.begin, span.steps)
        samples = np.empty(sources.size, np.int64)
        for source in range(len(self.mix.orders)):
            of_source = sources == source
            samples[of_source] = self.mix.samples(source, source_positions[of_source])
        return [(positions, samples)]

    def row_lengths(self, position: int, steps: int) -> Ints:
        """Return the lengths by which this rank's rows of some steps from a position on are in buckets."""
        assert self.bucket is not None
        sources, source_positions, _ = self.rows(position, steps)
        found = np.empty(sources.size, np.int64)
        for number in distinct(sources).tolist():
            of_source, alone = sources == number, self._alone(number)
            mix = replace(self.mix, orders=(alone,))
            found[of_source] = self.bucket[2][number](mix.samples(0, source_positions[of_source]))
        return found

    def _alone(self, source: int) -> EpochOrder:
        """Return the order of a source whose samples have the numbers of the source alone."""
        order = self.mix.orders[source]
        return replace(order, stride=order.num_samples * bool(order.stride))

    def read(self, span: Span, live: Mapping[MixKey, int]) -> tuple[BlockReads, list[Ints]]:
        """Return the blocks of a span over all sources and the `live` ones, and the positions of the span's rows."""
        sources, source_positions, positions = self.rows(span.begin, span.steps)
        begin, end = self._turn_edges(span.begin, span.end)
        # padding may end the last step of a budget inside of a turn
        edges = begin, end, *(end if at == span.end else at for at in self._within(span))
        before, after, *within = (self.mix.counts(self.bounds[0] + at).tolist() for at in edges)
        parts: list[BlockReads] = []
        keys: list[MixKey] = []
        block, row = np.empty(sources.size, np.int64), np.empty(sources.size, np.int64)
        columns = zip(self.mix.orders, self.mix.units, self.mix.firsts, strict=True)
        for source, (order, unit, first_sample) in enumerate(columns):
            of_source = np.flatnonzero(sources == source)
            epochs = source_positions[of_source] // order.num_samples
            live_epochs = {key[1] for key in live if key[0] == source}
            for epoch in sorted(live_epochs | set(distinct(epochs).tolist())):
                of_epoch = of_source[epochs == epoch]
                first = epoch * order.num_samples
                begin, end = max(0, before[source] - first), min(order.num_samples, after[source] - first)
                reach = tuple(min(max(0, counts[source] - first), order.num_samples) for counts in within)
                part = span._replace(begin=begin, end=end, last=span.last or end == order.num_samples, within=reach)
                live_keys = [(key[2], key[3]) for key in live if key[:2] == (source, epoch)]
                at = source_positions[of_epoch] - first
                reads = _read_source(replace(order, epoch=epoch), unit, at, part, live_keys)
                block[of_epoch], row[of_epoch] = reads.block + len(keys), reads.row
                keys += [(source, epoch, *key) for key in reads.keys]
                parts.append(reads._replace(start=reads.start + first_sample, stop=reads.stop + first_sample))
        return BlockReads(keys, *join_blocks(parts), block, row), [positions]

    @property
    def time(self) -> float:
        """The position in the run."""
        return self.bounds[0]

    def next_uses(self, keys: Sequence[MixKey], start: Ints) -> tuple[Ints, *tuple[Times, ...]]:
        """Return the first sample of some blocks, and when their source's next epoch reads them.

        That is about the position in the run, from the weights of the last phase. The times of the node are these by
        the samples of all sources.
        """
        begin, weights, node = self.bounds[0], self.mix.phases[-1], self.world.node
        counts, first = self.mix.counts(begin).tolist(), start.copy()
        uses = [np.full(start.size, np.inf) for _ in range(3 if node else 1)]
        columns = np.array(keys, np.int64).reshape(-1, 4)
        for source, epoch in sorted(set(map(tuple, columns[:, :2].tolist()))):
            of_epoch = np.flatnonzero((columns[:, 0] == source) & (columns[:, 1] == epoch))
            order = replace(self.mix.orders[source], epoch=epoch)
            size = self.world.size if self.divides else 1
            ranks = [(rank - (epoch + 1) * order.num_samples) % size for rank in (self.world.rank, *node)]
            share = Share(order, self.batch, World(ranks[0], size, tuple(ranks[1:])), "pad", self.mix.units[source])
            at, *times = share.next_uses((), start[of_epoch] - self.mix.firsts[source])
            first[of_epoch] = at + self.mix.firsts[source]
            if weight := weights.weight(source):
                for column, each in zip(uses, times, strict=True):
                    turns = (each * order.num_samples - counts[source]) * sum(weights.weights) / weight
                    column[of_epoch] = begin + turns
        shown: list[Times] = [uses[0], *(column / self._all_samples for column in uses[1:])]
        return first, *shown

    @property
    def epochs(self) -> float:
        """The position in the run by the samples of all sources."""
        return self.bounds[0] / self._all_samples

    @property
    def _all_samples(self) -> int:
        return sum(order.num_samples for order in self.mix.orders)


def _read_source(order: EpochOrder, unit: int, positions: Ints, span: Span, live: list[Key]) -> BlockReads:
    if span.begin >= span.end:  # the span has no turn of this source, only live blocks
        no_samples, no_rows = np.zeros(len(live), np.int64), np.zeros(0, np.int64)
        return BlockReads(live, no_samples, no_samples, np.full(len(live), span.last), no_rows, no_rows)
    if order.shuffle:
        return read_lanes(order, lambda: iter([positions]), span, [key[0] for key in live])
    return read_units(order, unit, positions, span.end, last=span.last, live=live)
