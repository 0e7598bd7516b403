"""The order of a mixture: turns of sources in given proportions, one rank's part of it, and its schedule.

Sources take turns, spread evenly, in phases whose weights differ. Each turn of a source is of its next samples: of its
stream, epoch after epoch, each in an order of its own. Pure and vectorised, as `schedule` is for one dataset; whole
numbers only, and any place of the order is computed directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm
from numbers import Rational
from typing import Literal

import numpy as np

from streamloader.errors import MixtureError
from streamloader.options import Remainder
from streamloader.order.epoch_order import EpochOrder, OrderParams
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

# Turns after which the order of sources repeats, at most: weights that need more are rounded to so many parts.
MOST_PARTS = 4096
SPAN_BYTES = 140  # of a row that is planned, as `schedule.SPAN_BYTES`


def whole_weights(weights: Sequence[float | Rational]) -> tuple[int, ...]:
    """Return whole numbers in the proportions of `weights`, without a common divisor, whose sum is at most MOST_PARTS.

    0.7 means 7/10. What needs more parts is rounded by the largest remainder, to at least one part for each that is
    above 0, so that shares are off by about 1/MOST_PARTS. Raises `MixtureError` for a weight that is negative or no
    number, and where all are 0.
    """
    exact = exact_shares(weights)
    parts = lcm(*(share.denominator for share in exact))
    if parts > MOST_PARTS:
        shares = [share * MOST_PARTS for share in exact]
        whole = [max(int(share), int(share > 0)) for share in shares]
        by_rest = sorted(range(len(shares)), key=lambda i: whole[i] - shares[i])
        for i in by_rest[: max(0, MOST_PARTS - sum(whole))]:
            whole[i] += 1
    else:
        whole = [int(share * parts) for share in exact]
    divisor = gcd(*whole)
    return tuple(one // divisor for one in whole)


def exact_shares(weights: Sequence[float | Rational]) -> list[Fraction]:
    """Return the share of each weight, together 1. Raises as `whole_weights`."""
    exact = [_fraction(weight) for weight in weights]
    total = sum(exact)
    if not total:
        raise MixtureError(f"the weights {list(weights)} are all 0", "give one that is above 0")
    return [one / total for one in exact]


def _fraction(weight: float | Rational) -> Fraction:
    try:
        found = Fraction(str(weight)) if isinstance(weight, float) else Fraction(weight)
    except (TypeError, ValueError, OverflowError) as error:
        raise MixtureError(f"the weight {weight!r} is not a number", "give a number of at least 0") from error
    if found < 0:
        raise MixtureError(f"the weight {weight!r} is negative", "give a number of at least 0")
    return found


@dataclass(frozen=True)
class Phase:
    """From the position `start` of the mixture on: turns of `unit` samples each, in proportion to `weights`.

    `weights[i]` is that of the source `sources[i]`: in the order in which they were first mixed, on which turns depend.

    Of every sum(weights) turns, weights[i] are of source i. Of any first n turns, it has had n * weights[i] /
    sum(weights), less or more by less than one: Tijdeman's solution of the chairman assignment problem (Discrete
    Mathematics 32, 1980). So in any window the shares are exact to less than two turns.
    """

    start: int
    unit: int
    weights: tuple[int, ...]
    sources: tuple[int, ...]

    @classmethod
    def of_all(cls, start: int, unit: int, weights: tuple[int, ...]) -> Phase:
        """Return a phase with a weight for every source."""
        return cls(start, unit, weights, tuple(range(len(weights))))

    def weight(self, source: int) -> int:
        """Return the weight of a source, 0 for one that was not there yet."""
        return self.weights[self.sources.index(source)] if source in self.sources else 0

    @cached_property
    def _table(self) -> Ints:
        """The source of each turn of a period, after which the sequence repeats; an index into `sources`."""
        count, period = len(self.weights), sum(self.weights)
        had = [0] * count
        slack = max(1, 2 * sum(map(bool, self.weights)) - 2)
        out = np.empty(period, np.int64)
        for turn in range(period):
            # all in units of 1 / (slack * period); a source is due if it is behind by a turn less the bound, and of
            # those that are due the one is next that would be the first to be late
            behind = [
                slack * (weight * (turn + 1) - period * one) for weight, one in zip(self.weights, had, strict=True)
            ]
            due = [i for i in range(count) if self.weights[i] and behind[i] >= period]
            late = [((slack - 1) * period - behind[i] << 40) // self.weights[i] for i in due]
            chosen = due[late.index(min(late))]
            had[chosen] += 1
            out[turn] = chosen
        return out

    @cached_property
    def _before(self) -> Ints:
        """How often each source had a turn before each turn of a period; shape (period + 1, sources)."""
        one_hot = self._table[:, None] == np.arange(len(self.weights))
        return np.concatenate([np.zeros((1, len(self.weights)), np.int64), np.cumsum(one_hot, axis=0)])

    def counts(self, stop: int, count: int) -> Ints:
        """Return how many samples each of `count` sources gave from the phase's start to a position."""
        periods, rest = divmod((stop - self.start) // self.unit, len(self._table))
        found = np.zeros(count, np.int64)
        found[list(self.sources)] = (periods * np.array(self.weights, np.int64) + self._before[rest]) * self.unit
        return found

    def turns(self, start: int, stop: int) -> Ints:
        """Return the source of each turn between two positions."""
        first, last = (start - self.start) // self.unit, (stop - self.start) // self.unit
        return np.array(self.sources)[self._table[np.arange(first, last) % len(self._table)]]

    def reached(self, source: int, samples: int) -> int | None:
        """Return the first position before which a source gave so many samples of the phase; None if it never does."""
        if samples <= 0:
            return self.start
        if not self.weight(source):
            return None
        periods, rest = divmod(-(-samples // self.unit) - 1, self.weight(source))
        turns = periods * len(self._table) + int(np.flatnonzero(self._table == self.sources.index(source))[rest]) + 1
        return self.start + turns * self.unit


@dataclass(frozen=True)
class SourceOrder:
    """Phases one after the other, the first from position 0, the last without end; each ends where a turn does.

    A position counts the samples of the mixture, a place those of one of its `count` sources: its epochs one after the
    other.
    """

    phases: tuple[Phase, ...]
    count: int

    def places(self, position: int) -> Ints:
        """Return how many samples each source gave before a position, at which a turn begins; shape (sources,)."""
        found = np.zeros(self.count, np.int64)
        for phase, stop in self._until(position):
            found += phase.counts(stop, self.count)
        return found

    def turns(self, start: int, stop: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return (source, place, position, size) of each turn between two positions at which turns begin."""
        places = self.places(start)
        parts: list[tuple[Ints, Ints, Ints, Ints]] = []
        for phase, end in self._until(stop):
            begin = max(start, phase.start)
            if begin >= end:
                continue
            source = phase.turns(begin, end)
            place = np.empty(source.size, np.int64)
            for number in range(len(places)):
                mine = np.flatnonzero(source == number)
                place[mine] = places[number] + np.arange(mine.size) * phase.unit
                places[number] += mine.size * phase.unit
            position = begin + np.arange(source.size) * phase.unit
            parts.append((source, place, position, np.full(source.size, phase.unit)))
        empty = np.zeros(0, np.int64)
        return tuple(map(np.concatenate, zip(*parts, strict=True))) if parts else (empty,) * 4  # type: ignore[return-value]

    def reached(self, source: int, place: int) -> int | None:
        """Return the first position before which a source has given `place` samples; None if it never does."""
        if not self.phases[-1].weight(source):
            return None
        given = 0
        for phase, stop in self._ends:
            found = phase.reached(source, place - given) if phase.weight(source) else None
            if found is not None and (stop is None or found <= stop):
                return found
            if stop is not None:
                given += int(phase.counts(stop, self.count)[source])
        return None

    @cached_property
    def _ends(self) -> tuple[tuple[Phase, int | None], ...]:
        ends = [after.start for _, after in pairwise(self.phases)]
        return tuple(zip(self.phases, [*ends, None], strict=True))

    def _until(self, position: int) -> Iterator[tuple[Phase, int]]:
        """Yield the phases that begin before a position, each with where it ends, that position at most."""
        for phase, end in self._ends:
            if phase.start < position:
                yield phase, position if end is None else min(end, position)


MixKey = tuple[int, int, int, int]  # (source, its epoch, lane, j)
Stop = Literal["first", "last"]


@dataclass(frozen=True)
class Stream:
    """The epochs of one source, one after the other: place p is position p mod N of epoch p div N.

    `base` is the number that its first sample has in the mixture; `unit`: samples fetched at once without shuffle.
    """

    first: EpochOrder  # the order of epoch 0
    base: int
    unit: int

    @property
    def num_samples(self) -> int:
        """The samples of an epoch."""
        return self.first.num_samples

    @property
    def lanes(self) -> int:
        """The lanes that positions go round: 1 without shuffle."""
        return self.first.lanes

    @property
    def fetched(self) -> OrderParams:
        """Block, lanes and window of what is fetched."""
        return self.first.fetched(self.unit)

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch of its own."""
        return replace(self.first, epoch=epoch)

    def samples(self, places: Ints) -> Ints:
        """Return the sample at each place, by its number in the mixture; places ascend."""
        found = np.empty(places.size, np.int64)
        epochs = places // self.num_samples
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            positions = places[here] - epoch * self.num_samples
            low = int(positions[0])
            found[here] = self.order(epoch).samples_at(low, int(positions[-1]) + 1)[positions - low]
        return found + self.base


@dataclass(frozen=True)
class Mix:
    """Streams, and how they are mixed. An epoch of the mixture is over when the first, or the last, of its sources is
    through with one more epoch of its own; the others continue.

    `anchor`: (epoch, position) where epochs begin to be counted so: 0, or where sources or weights were changed.
    """

    streams: tuple[Stream, ...]
    source_order: SourceOrder
    stop: Stop
    anchor: tuple[int, int] = (0, 0)

    def bounds(self, epoch: int) -> tuple[int, int]:
        """Return the positions [begin, end) of the whole run that an epoch has."""
        first, position = self.anchor
        if epoch < first:
            raise MixtureError(f"epoch {epoch} of a mixture that was changed in epoch {first}", "resume from there")
        return position if epoch == first else self._end(epoch - first), self._end(epoch - first + 1)

    def _end(self, epochs: int) -> int:
        """Where so many epochs from the anchor on are over; of the sources that have a weight to the end."""
        begun = self.source_order.places(self.anchor[1]).tolist()
        ends = [
            self.source_order.reached(i, (begun[i] // stream.num_samples + epochs) * stream.num_samples)
            for i, stream in enumerate(self.streams)
        ]
        found = [end for end in ends if end is not None]  # not so where the last phase has no weight for it
        return min(found) if self.stop == "first" else max(found)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of some steps, in the order of the mixture: whose, at which place of its stream, at which position."""

    source: Ints
    place: Ints
    position: Ints


@dataclass(frozen=True)
class MixShare(Part):
    """One rank's part of an epoch of a mixture, in batches of `batch` rows.

    Positions count from the epoch's begin. The last step is filled up with the samples that come next, which are not
    valid and come again in the next epoch; with "drop" it is left out, and "uneven" is not for mixtures.
    """

    mix: Mix
    epoch: int
    batch: int
    world: World
    remainder: Remainder

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The epoch's positions in the whole run."""
        return self.mix.bounds(self.epoch)

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The samples of the epoch."""
        return self.bounds[1] - self.bounds[0]

    @property
    def span_rows(self) -> int:
        """How many rows of this rank are planned together at most, where that is more than a batch."""
        together = sum(2 * stream.fetched.window * stream.lanes for stream in self.mix.streams)
        return min(together // self.world.size, MAX_ROWS, self.num_samples // self.world.size + self.batch)

    @property
    def span_steps(self) -> int:
        """How many steps are planned together, at most."""
        return self.span_rows // self.batch

    @cached_property
    def divides(self) -> bool:
        """Whether the world size divides turns and lanes, so that every lane is read by one rank in an epoch."""
        sizes = [phase.unit for phase in self.mix.source_order.phases] + [stream.lanes for stream in self.mix.streams]
        return not any(size % self.world.size for size in sizes)

    def costs(self, *, fresh: bool, shuffle: bool) -> str:
        """Say that blocks are read by several ranks, where they are. `fresh`: turns and lanes may be chosen."""
        size, lanes = self.world.size, sorted({stream.lanes for stream in self.mix.streams})
        if self.divides or not shuffle:
            return ""
        remedy = f"; set unit= and shuffle=Shuffle(lanes=) to multiples of {size}" if fresh else ""
        unit = self.mix.source_order.phases[-1].unit
        return (
            f"{size} consumers do not divide turns of {unit} samples and {lanes} lanes: blocks are read again{remedy}"
        )

    def rows(self, position: int, steps: int) -> Rows:
        """Return this rank's rows of some steps, `batch` for each.

        Where the world size divides the turns, rank r takes the places = r (mod size) of each turn. Otherwise the
        positions of a step are sorted by lane, and the rank takes a run of them, as for one dataset.
        """
        begin = self.bounds[0] + position
        source, place, at, size = self.mix.source_order.turns(begin, begin + steps * self.global_batch)
        ranks, rank = self.world.size, self.world.rank
        shared = bool((size % ranks).any())
        each = size if shared else size // ranks
        turn = np.repeat(np.arange(source.size), each)
        nth = np.arange(turn.size) - np.repeat(np.cumsum(each) - each, each)
        offset = nth if shared else ((rank - place) % ranks)[turn] + nth * ranks
        found = Rows(source[turn], place[turn] + offset, at[turn] + offset - self.bounds[0])
        return self._run(found, position, steps) if shared else found

    def _run(self, rows: Rows, position: int, steps: int) -> Rows:
        """This rank's run of each step, of rows that are all ranks'; the lanes of all streams side by side."""
        lanes = np.array([stream.lanes for stream in self.mix.streams])[rows.source]
        lane = (rows.place % np.array([stream.num_samples for stream in self.mix.streams])[rows.source]) % lanes
        part = lane * (lcm(*(stream.lanes for stream in self.mix.streams)) // lanes)
        step = (rows.position - position) // self.global_batch
        ordered = np.lexsort((rows.position, rows.source, part, step)).reshape(steps, self.global_batch)
        mine = np.sort(ordered[:, self.world.rank * self.batch : (self.world.rank + 1) * self.batch], axis=1).ravel()
        return Rows(rows.source[mine], rows.place[mine], rows.position[mine])

    def numbers(self, rows: Rows) -> Ints:
        """Return the samples of some rows, by their numbers in the mixture."""
        found = np.empty(rows.source.size, np.int64)
        for number, stream in enumerate(self.mix.streams):
            mine = rows.source == number
            found[mine] = stream.samples(rows.place[mine])
        return found

    def slots_needed(self, steps_at_once: int = 1) -> int:
        """How many blocks a schedule holds at once at most; the same on every rank.

        Those of each stream alone, as `Share.slots_needed` says, and as many again for each of its epochs that
        may begin within a plan, while the one before it ends: but not more than the plan has rows.
        """
        rows, total = steps_at_once * self.batch, 0
        for stream in self.mix.streams:
            size = self.world.size if self.divides else 1
            alone = Share(stream.first, rows, World(0, size), "pad", stream.unit).slots_needed()
            begun = 1 + self.world.size * rows // stream.num_samples
            total += alone + min(rows, begun * alone)
        return total

    def at_epoch(self, epoch: int) -> MixShare:
        """Return the part of another epoch."""
        return replace(self, epoch=epoch)

    def need(self, steps_at_once: int) -> Need:
        """Return what a pass needs of memory."""
        block = max(stream.fetched.block for stream in self.mix.streams)
        plans = ahead_bytes(self) + SPAN_BYTES * self.span_rows
        return Need(block, self.slots_needed(steps_at_once), steps_at_once * self.batch, plans, plans)

    def read_held(self, span: Span) -> list[tuple[Ints, Ints]]:
        """Return the positions of a span's rows, and the samples by their numbers in the mixture."""
        rows = self.rows(span.begin, span.steps)
        return [(rows.position, self.numbers(rows))]

    def read(self, span: Span, live: Mapping[MixKey, int]) -> tuple[BlockReads, list[Ints]]:
        """Return the blocks of a span over all streams, those of `live` included, and the positions of its rows."""
        rows = self.rows(span.begin, span.steps)
        before, after = (self.mix.source_order.places(self.bounds[0] + at).tolist() for at in (span.begin, span.end))
        parts: list[BlockReads] = []
        keys: list[MixKey] = []
        block, row = np.empty(rows.source.size, np.int64), np.empty(rows.source.size, np.int64)
        for number, stream in enumerate(self.mix.streams):
            mine = np.flatnonzero(rows.source == number)
            epochs = rows.place[mine] // stream.num_samples
            held = {key[1] for key in live if key[0] == number}
            for epoch in sorted(held | set(np.unique(epochs).tolist())):
                here = mine[epochs == epoch]
                first = epoch * stream.num_samples
                begin, end = max(0, before[number] - first), min(stream.num_samples, after[number] - first)
                part = span._replace(begin=begin, end=end, last=span.last or end == stream.num_samples)
                kept = [(key[2], key[3]) for key in live if key[:2] == (number, epoch)]
                reads = _read_stream(stream, epoch, rows.place[here] - first, part, kept)
                block[here], row[here] = reads.block + len(keys), reads.row
                keys += [(number, epoch, *key) for key in reads.keys]
                parts.append(reads._replace(start=reads.start + stream.base, stop=reads.stop + stream.base))
        return BlockReads(keys, *join_blocks(parts), block, row), [rows.position]


EpochShare = Share | MixShare


def _read_stream(stream: Stream, epoch: int, positions: Ints, span: Span, kept: list[Key]) -> BlockReads:
    if span.begin >= span.end:  # no turn is this stream's, but blocks of it are held
        nowhere, nothing = np.zeros(len(kept), np.int64), np.zeros(0, np.int64)
        return BlockReads(kept, nowhere, nowhere, np.full(len(kept), span.last), nothing, nothing)
    if stream.first.shuffle:
        return read_lanes(stream.order(epoch), lambda: iter([positions]), span, kept)
    return read_units(stream.num_samples, stream.unit, positions, span.end, last=span.last, live=kept)
