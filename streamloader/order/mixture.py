"""The order of a mixture: turns of sources in given proportions, the part of a rank, and its schedule (rule 10).

Sources take turns that are spread evenly, in phases with different weights. A turn takes the next samples of the
source's stream, which has one epoch after the other, each in its own order. Like `schedule`, this is vectorised integer
arithmetic without I/O, and can start anywhere in the order.

A *position* counts the samples of the mixture; a *place* counts those of one source's stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm
from numbers import Rational
from typing import Literal, NamedTuple

import numpy as np

from streamloader.errors import MixtureError
from streamloader.options import Remainder
from streamloader.order.epoch_order import EpochOrder
from streamloader.order.schedule import (
    MAX_ROWS,
    BlockReads,
    Ints,
    Key,
    Need,
    Part,
    Share,
    Span,
    World,
    ahead_bytes,
    join_blocks,
    read_lanes,
    read_units,
)

# Maximum sum of whole weights, and so of the turns after which the order of sources repeats. Weights that need more are
# rounded.
MAX_PARTS = 4096
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

    @cached_property
    def _table(self) -> Ints:
        """The source of each turn of a period, as an index into `sources`. Then the sequence repeats."""
        count, period = len(self.weights), sum(self.weights)
        taken = [0] * count
        slack = max(1, 2 * sum(map(bool, self.weights)) - 2)
        table = np.empty(period, np.int64)
        for turn in range(period):
            # In units of 1 / (slack * period). A source is due if it is behind by one turn minus the bound. Of the
            # sources that are due, the next turn goes to the one that would be late first.
            behind = [slack * (weight * (turn + 1) - period * taken[i]) for i, weight in enumerate(self.weights)]
            due = [i for i in range(count) if self.weights[i] and behind[i] >= period]
            deadlines = [((slack - 1) * period - behind[i] << 40) // self.weights[i] for i in due]
            table[turn] = source = due[deadlines.index(min(deadlines))]
            taken[source] += 1
        return table

    @cached_property
    def _turns_before(self) -> Ints:
        """The number of turns of each source before each turn of a period; shape (period + 1, sources)."""
        one_hot = self._table[:, None] == np.arange(len(self.weights))
        return np.concatenate([np.zeros((1, len(self.weights)), np.int64), np.cumsum(one_hot, axis=0)])

    def counts(self, stop: int, count: int) -> Ints:
        """Return how many samples each of `count` sources has from the start of the phase to `stop`; shape (count,)."""
        periods, turn = divmod((stop - self.start) // self.unit, len(self._table))
        counts = np.zeros(count, np.int64)
        counts[list(self.sources)] = (periods * np.array(self.weights, np.int64) + self._turns_before[turn]) * self.unit
        return counts

    def turns(self, start: int, stop: int) -> Ints:
        """Return the source of each turn between two positions."""
        first, last = (start - self.start) // self.unit, (stop - self.start) // self.unit
        return np.array(self.sources)[self._table[np.arange(first, last) % len(self._table)]]

    def end_of(self, source: int, samples: int) -> int | None:
        """Return the end of the turn in which a source reaches `samples` (> 0) samples of the phase.

        None if the source has no weight.
        """
        if not self.weight(source):
            return None
        periods, turn = divmod(-(-samples // self.unit) - 1, self.weight(source))
        turns = periods * len(self._table) + int(np.flatnonzero(self._table == self.sources.index(source))[turn]) + 1
        return self.start + turns * self.unit


@dataclass(frozen=True)
class SourceOrder:
    """Consecutive phases of `count` sources. The first starts at position 0, the last has no end.

    Each phase ends where a turn ends.
    """

    phases: tuple[Phase, ...]
    count: int

    def phases_from(self, position: int, unit: int) -> tuple[Phase, ...]:
        """Return the phases from a position on, with turns of `unit` samples.

        The first one starts at the position, later ones at the next end of a turn. If several would start together, the
        last of them does.
        """
        by_start = {}
        for phase in self.phases:
            start = position + -(-max(0, phase.start - position) // unit) * unit
            by_start[start] = replace(phase, start=start, unit=unit)
        return tuple(by_start.values())

    def places(self, position: int) -> Ints:
        """Return the place of each source at a position at which a turn begins; shape (sources,)."""
        places = np.zeros(self.count, np.int64)
        for phase, stop in self._until(position):
            places += phase.counts(stop, self.count)
        return places

    def turns(self, start: int, stop: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return (source, place, position, size) of each turn between two positions at which turns begin."""
        places = self.places(start)
        parts = [(np.zeros(0, np.int64),) * 4]
        for phase, end in self._until(stop):
            begin = max(start, phase.start)
            if begin >= end:
                continue
            source = phase.turns(begin, end)
            place = np.empty(source.size, np.int64)
            for number in range(self.count):
                turns = np.flatnonzero(source == number)
                place[turns] = places[number] + np.arange(turns.size) * phase.unit
                places[number] += turns.size * phase.unit
            position = begin + np.arange(source.size) * phase.unit
            parts.append((source, place, position, np.full(source.size, phase.unit)))
        sources, starts, positions, sizes = map(np.concatenate, zip(*parts, strict=True))
        return sources, starts, positions, sizes

    def end_of(self, source: int, place: int) -> int | None:
        """Return the end of the turn in which a source reaches `place` (> 0).

        None if the source has no weight in the last phase.
        """
        if not self.phases[-1].weight(source):
            return None
        earlier = 0
        for phase, after in pairwise(self.phases):
            end = phase.end_of(source, place - earlier)
            if end is not None and end <= after.start:
                return end
            earlier += int(phase.counts(after.start, self.count)[source])
        return self.phases[-1].end_of(source, place - earlier)

    def _until(self, position: int) -> Iterator[tuple[Phase, int]]:
        """Yield the phases that begin before a position, with the end of each, or that position if it is earlier."""
        ends = (phase.start for phase in self.phases[1:])
        for phase, end in zip(self.phases, [*ends, position], strict=True):
            if phase.start < position:
                yield phase, min(end, position)


MixKey = tuple[int, int, int, int]  # (source, epoch of the source, lane, ordinal of the block)
Stop = Literal["first", "last"]


@dataclass(frozen=True)
class Stream:
    """The epochs of one source, one after the other: place p is position p mod N of epoch p div N.

    `first`: the order of epoch 0. `base`: the number of its first sample in the mixture. `unit`: samples per fetch
    without shuffle.
    """

    first: EpochOrder
    base: int
    unit: int

    @property
    def num_samples(self) -> int:
        """The number of samples of an epoch."""
        return self.first.num_samples

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch of the source."""
        return replace(self.first, epoch=epoch)

    def samples(self, places: Ints) -> Ints:
        """Return the sample at each of some ascending places, numbered in the mixture."""
        samples = np.empty(places.size, np.int64)
        epochs = places // self.num_samples
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            positions = places[rows] - epoch * self.num_samples
            low = int(positions[0])
            samples[rows] = self.order(epoch).samples_at(low, int(positions[-1]) + 1)[positions - low]
        return samples + self.base


@dataclass(frozen=True)
class Mix:
    """Streams in the order of their turns.

    An epoch of the mixture ends when the first, or the last, of its sources completes another epoch of its own; the
    other sources continue. `anchor`: (epoch, position) from which these epochs count: 0, or where sources or weights
    were changed.
    """

    streams: tuple[Stream, ...]
    source_order: SourceOrder
    stop: Stop
    anchor: tuple[int, int] = (0, 0)

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
        places = self.source_order.places(self.anchor[1]).tolist()
        ends = [
            self.source_order.end_of(i, (places[i] // stream.num_samples + epochs) * stream.num_samples)
            for i, stream in enumerate(self.streams)
        ]
        endings = [end for end in ends if end is not None]
        return min(endings) if self.stop == "first" else max(endings)


class Rows(NamedTuple):
    """Rows of some steps in the order of the mixture: the source of each, its place, and its position in the epoch."""

    source: Ints
    place: Ints
    position: Ints


@dataclass(frozen=True)
class MixShare(Part):
    """The part of an epoch of a mixture that one rank reads. Positions count from the start of the epoch.

    "pad" fills the last step with the next samples, which are not valid and come again in the next epoch. Mixtures do
    not support the remainder "uneven".
    """

    mix: Mix
    epoch: int
    batch: int
    world: World
    remainder: Remainder

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """(begin, end) of the epoch, in positions of the whole run."""
        return self.mix.bounds(self.epoch)

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of the epoch."""
        return self.bounds[1] - self.bounds[0]

    @property
    def _lanes(self) -> list[int]:
        """The number of lanes of each stream."""
        return [stream.first.lanes for stream in self.mix.streams]

    @property
    def _fetch_blocks(self) -> list[int]:
        """The samples of a fetch of each stream."""
        return [stream.first.fetch_params(stream.unit).block for stream in self.mix.streams]

    @property
    def span_rows(self) -> int:
        """The maximum number of rows of this rank that are planned together; at least a batch is."""
        windows = [stream.first.fetch_params(stream.unit).window for stream in self.mix.streams]
        window_rows = sum(2 * window * lanes for window, lanes in zip(windows, self._lanes, strict=True))
        return min(window_rows // self.world.size, MAX_ROWS, self.num_samples // self.world.size + self.batch)

    @property
    def span_steps(self) -> int:
        """The maximum number of steps that are planned together."""
        return self.span_rows // self.batch

    @cached_property
    def divides(self) -> bool:
        """Whether the world size divides turns and lanes, so that every lane is read by one rank in an epoch."""
        units = [phase.unit for phase in self.mix.source_order.phases]
        return not any(size % self.world.size for size in units + self._lanes)

    def describe_rereads(self, *, fresh: bool, shuffle: bool) -> str:
        """Return a warning if several ranks read a block, else "". `fresh`: turns and lanes can still be chosen."""
        if self.divides or not shuffle:
            return ""
        size, unit = self.world.size, self.mix.source_order.phases[-1].unit
        remedy = f"; set unit= and shuffle=Shuffle(lanes=) to multiples of {size}" if fresh else ""
        sizes = f"turns of {unit} samples and {sorted(set(self._lanes))} lanes"
        return f"{size} consumers do not divide {sizes}: blocks are read more than once{remedy}"

    def rows(self, position: int, steps: int) -> Rows:
        """Return this rank's rows of `steps` steps from `position` on, `batch` rows for each step.

        If the world size divides the turns, rank r takes the places that are r modulo the size of each turn. Otherwise
        the positions of a step are sorted by lane, and the rank takes a run of them, as in a dataset.
        """
        begin = self.bounds[0] + position
        source, place, start, size = self.mix.source_order.turns(begin, begin + steps * self.global_batch)
        ranks, rank = self.world.size, self.world.rank
        shared = bool((size % ranks).any())
        counts = size if shared else size // ranks
        turn = np.repeat(np.arange(source.size), counts)
        row = np.arange(turn.size) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = row if shared else ((rank - place) % ranks)[turn] + row * ranks
        rows = Rows(source[turn], place[turn] + offset, start[turn] + offset - self.bounds[0])
        return self._run(rows, position, steps) if shared else rows

    def _run(self, rows: Rows, position: int, steps: int) -> Rows:
        """Return this rank's run of each step: `rows` has those of all ranks, which are sorted by lane / lanes."""
        lanes = np.array(self._lanes)[rows.source]
        lane = (rows.place % np.array([stream.num_samples for stream in self.mix.streams])[rows.source]) % lanes
        relative_lane = lane * (lcm(*self._lanes) // lanes)
        step = (rows.position - position) // self.global_batch
        ordered = np.lexsort((rows.position, rows.source, relative_lane, step)).reshape(steps, self.global_batch)
        run = np.sort(ordered[:, self.world.rank * self.batch : (self.world.rank + 1) * self.batch], axis=1).ravel()
        return Rows(rows.source[run], rows.place[run], rows.position[run])

    def slots_needed(self, steps_at_once: int = 1) -> int:
        """Return the maximum number of blocks that a schedule holds at once, the same on every rank.

        It is the sum over the streams of `Share.slots_needed`, and as much again for each epoch of a stream that may
        begin within a plan while the previous one ends.

        If the world size R does not divide turns and lanes, a rank may read all lanes, as a single rank does. But its
        rows are spread over all R * rows positions of the plan. So keys increase by up to (R - 1) * rows more, summed
        over streams, lanes and epochs: one more block for each B of them, the smallest of the streams' blocks.

        In any case a plan adds at most one block for each of its rows to those that are held when it begins.
        """
        rows, size = steps_at_once * self.batch, self.world.size if self.divides else 1
        held, added = 0, -(-(self.world.size - size) * rows // min(self._fetch_blocks))
        for stream in self.mix.streams:
            slots = Share(stream.first, rows, World(0, size), "pad", stream.unit).slots_needed()
            held += slots
            added += slots * (1 + self.world.size * rows // stream.num_samples)
        return held + min(rows, added)

    def at_epoch(self, epoch: int) -> MixShare:
        """Return the rank's part of another epoch."""
        return replace(self, epoch=epoch)

    def need(self, steps_at_once: int) -> Need:
        """Return the memory that a pass needs."""
        plan_bytes = ahead_bytes(self) + SPAN_BYTES * self.span_rows
        rows, slots = steps_at_once * self.batch, self.slots_needed(steps_at_once)
        return Need(max(self._fetch_blocks), slots, rows, plan_bytes, plan_bytes)

    def read_held(self, span: Span) -> list[tuple[Ints, Ints]]:
        """Return (positions, samples) of a span's rows, with samples numbered in the mixture."""
        rows = self.rows(span.begin, span.steps)
        samples = np.empty(rows.source.size, np.int64)
        for number, stream in enumerate(self.mix.streams):
            of_stream = rows.source == number
            samples[of_stream] = stream.samples(rows.place[of_stream])
        return [(rows.position, samples)]

    def read(self, span: Span, live: Mapping[MixKey, int]) -> tuple[BlockReads, list[Ints]]:
        """Return the blocks of a span over all streams and the `live` ones, and the positions of the span's rows."""
        rows = self.rows(span.begin, span.steps)
        before, after = (self.mix.source_order.places(self.bounds[0] + at).tolist() for at in (span.begin, span.end))
        parts: list[BlockReads] = []
        keys: list[MixKey] = []
        block, row = np.empty(rows.source.size, np.int64), np.empty(rows.source.size, np.int64)
        for number, stream in enumerate(self.mix.streams):
            of_stream = np.flatnonzero(rows.source == number)
            epochs = rows.place[of_stream] // stream.num_samples
            live_epochs = {key[1] for key in live if key[0] == number}
            for epoch in sorted(live_epochs | set(np.unique(epochs).tolist())):
                of_epoch = of_stream[epochs == epoch]
                first = epoch * stream.num_samples
                begin, end = max(0, before[number] - first), min(stream.num_samples, after[number] - first)
                part = span._replace(begin=begin, end=end, last=span.last or end == stream.num_samples)
                live_keys = [(key[2], key[3]) for key in live if key[:2] == (number, epoch)]
                reads = _read_stream(stream, epoch, rows.place[of_epoch] - first, part, live_keys)
                block[of_epoch], row[of_epoch] = reads.block + len(keys), reads.row
                keys += [(number, epoch, *key) for key in reads.keys]
                parts.append(reads._replace(start=reads.start + stream.base, stop=reads.stop + stream.base))
        return BlockReads(keys, *join_blocks(parts), block, row), [rows.position]


EpochShare = Share | MixShare


def _read_stream(stream: Stream, epoch: int, positions: Ints, span: Span, live: list[Key]) -> BlockReads:
    if span.begin >= span.end:  # the span has no turn of this stream, only live blocks
        no_samples, no_rows = np.zeros(len(live), np.int64), np.zeros(0, np.int64)
        return BlockReads(live, no_samples, no_samples, np.full(len(live), span.last), no_rows, no_rows)
    if stream.first.shuffle:
        return read_lanes(stream.order(epoch), lambda: iter([positions]), span, [key[0] for key in live])
    return read_units(stream.num_samples, stream.unit, positions, span.end, last=span.last, live=live)
