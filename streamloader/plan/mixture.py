"""One rank's part of a mixture: which rows, in which batches, and from which blocks.

A stream is a source, epoch after epoch, each in an order of its own. Turn by turn each source gives its next samples.
Pure and vectorised, as `schedule` is for one dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Literal

import numpy as np

from streamloader.errors import MixtureError
from streamloader.options import Remainder
from streamloader.plan.blend import Blend
from streamloader.plan.booking import BatchPlan, Placed, batches, book, book_nothing
from streamloader.plan.order import EpochOrder, OrderParams
from streamloader.plan.schedule import FIRST_STEPS, MAX_ROWS, slots_needed
from streamloader.plan.touch import Ints, Key, Span, Touched, touch_lanes, touch_nothing, touch_units
from streamloader.plan.world import Share, World

__all__ = ["Mix", "MixShare", "Rows", "Stop", "Stream", "mix_schedule"]

MixKey = tuple[int, int, int, int]  # (source, its epoch, lane, j)
Stop = Literal["first", "last"]


@dataclass(frozen=True)
class Stream:
    """The epochs of one source, one after the other: place p is position p mod N of epoch p div N.

    `base` is the number that its first sample has in the mixture; `unit`: samples fetched at once without shuffle.
    """

    num_samples: int
    params: OrderParams
    seed: int
    shuffle: bool
    base: int
    unit: int

    @property
    def lanes(self) -> int:
        """The lanes that positions go round: 1 without shuffle."""
        return self.params.lanes if self.shuffle else 1

    @property
    def fetched(self) -> OrderParams:
        """The order's block, lanes and window; without shuffle the fetch unit, in one lane."""
        return self.params if self.shuffle else OrderParams(self.unit, 1, 2 * self.unit)

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch of its own."""
        return EpochOrder(self.num_samples, self.params, self.seed, epoch, self.shuffle)

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
    through with one more epoch of its own; the others go on where they are.

    `anchor`: (epoch, position) where epochs begin to be counted so: 0, or where sources or weights were changed.
    """

    streams: tuple[Stream, ...]
    blend: Blend
    stop: Stop
    anchor: tuple[int, int] = (0, 0)

    def bounds(self, epoch: int) -> tuple[int, int]:
        """Return the positions [begin, end) of the whole run that an epoch has."""
        first, position = self.anchor
        if epoch < first:
            raise MixtureError(f"epoch {epoch} of a mixture that was changed in epoch {first}", "go on from there")
        return position if epoch == first else self._end(epoch - first), self._end(epoch - first + 1)

    def _end(self, epochs: int) -> int:
        """Where so many epochs from the anchor on are over; of the sources that have a weight to the end."""
        begun = self.blend.places(self.anchor[1]).tolist()
        ends = [
            self.blend.reached(i, (begun[i] // stream.num_samples + epochs) * stream.num_samples)
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
class MixShare:
    """One rank's part of an epoch of a mixture, in batches of `batch` rows.

    Positions count from the epoch's begin. The last step is filled up with the samples that come next, which are not
    valid and come again in the next epoch; with "drop" it is left out, and "uneven" is not for mixtures.
    """

    mix: Mix
    epoch: int
    batch: int
    world: World
    remainder: Remainder

    @property
    def global_batch(self) -> int:
        """G: the positions of a step, over all ranks."""
        return self.world.size * self.batch

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The epoch's positions in the whole run."""
        return self.mix.bounds(self.epoch)

    @property
    def num_samples(self) -> int:
        """The samples of the epoch."""
        return self.bounds[1] - self.bounds[0]

    def global_steps(self, position: int) -> int:
        """Steps left from a position of the epoch."""
        left = max(0, self.num_samples - position)
        return left // self.global_batch if self.remainder == "drop" else -(-left // self.global_batch)

    def num_steps(self, position: int) -> int:
        """The same: each rank has a row in each step."""
        return self.global_steps(position)

    @property
    def span_rows(self) -> int:
        """How many rows of this rank are planned together at most, where that is more than a batch."""
        together = sum(2 * stream.fetched.window * stream.lanes for stream in self.mix.streams)
        return min(together // self.world.size, MAX_ROWS, self.num_samples // self.world.size + self.batch)

    @cached_property
    def divides(self) -> bool:
        """Whether the world size divides turns and lanes, so that every lane is read by one rank in an epoch."""
        sizes = [phase.unit for phase in self.mix.blend.phases] + [stream.lanes for stream in self.mix.streams]
        return not any(size % self.world.size for size in sizes)

    def costs(self, *, fresh: bool, shuffle: bool) -> str:
        """Say that blocks are read by several ranks, where they are. `fresh`: turns and lanes may be chosen."""
        size, lanes = self.world.size, sorted({stream.lanes for stream in self.mix.streams})
        if self.divides or not shuffle:
            return ""
        remedy = f"; set unit= and shuffle=Shuffle(lanes=) to multiples of {size}" if fresh else ""
        unit = self.mix.blend.phases[-1].unit
        return (
            f"{size} consumers do not divide turns of {unit} samples and {lanes} lanes: blocks are read again{remedy}"
        )

    def rows(self, position: int, steps: int) -> Rows:
        """Return this rank's rows of some steps, `batch` for each.

        Where the world size divides the turns, rank r takes the places = r (mod size) of each turn. Otherwise the
        positions of a step are sorted by lane, and the rank takes a run of them, as for one dataset.
        """
        begin = self.bounds[0] + position
        source, place, at, size = self.mix.blend.turns(begin, begin + steps * self.global_batch)
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

    def samples(self, position: int) -> Ints:
        """Return the samples of the step that starts at a position, by their numbers in the mixture."""
        return self.numbers(self.rows(position, 1))

    def numbers(self, rows: Rows) -> Ints:
        """Return the samples of some rows, by their numbers in the mixture."""
        found = np.empty(rows.source.size, np.int64)
        for number, stream in enumerate(self.mix.streams):
            mine = rows.source == number
            found[mine] = stream.samples(rows.place[mine])
        return found

    def slots_needed(self, steps_at_once: int = 1) -> int:
        """How many blocks a schedule holds at once at most; the same on every rank.

        Those of each stream alone, as `plan.schedule.slots_needed` says, and as many again for each of its epochs that
        may begin within a plan, while the one before it ends: but not more than the plan has rows.
        """
        rows, total = steps_at_once * self.batch, 0
        for stream in self.mix.streams:
            size = self.world.size if self.divides else 1
            alone = slots_needed(stream.fetched, Share(stream.num_samples, stream.lanes, rows, World(0, size), "pad"))
            begun = 1 + self.world.size * rows // stream.num_samples
            total += alone + min(rows, begun * alone)
        return total


def mix_schedule(
    share: MixShare,
    position: int,
    stop: int | None = None,
    steps_at_once: int = 1,
    *,
    first_ticket: int = 0,
    held: bool = False,
) -> Iterator[BatchPlan]:
    """Yield the batches of the share's rank from a position of the epoch to its end, or to `stop`.

    Samples are numbered through all sources. `held`: every field is held whole, so plans name no blocks.
    """
    live: dict[MixKey, int] = {}
    tickets = first_ticket
    for span in _spans(share, position, stop, steps_at_once):
        rows = share.rows(span.begin, span.steps)
        touched = touch_nothing(share.numbers(rows)) if held else _touch(share, rows, span, live)
        booking = book_nothing() if held else book(touched, live, tickets)
        steps = range(span.first_step, span.first_step + span.steps, steps_at_once)
        placed = Placed(share.epoch, share.num_samples, [rows.position])
        yield from batches(touched, booking, steps_at_once * share.batch, placed, steps)
        tickets += booking.opened.size
        live = {} if held else booking.kept(touched)


def _touch(share: MixShare, rows: Rows, span: Span, live: Mapping[MixKey, int]) -> Touched[MixKey]:
    """The blocks that the rows of a span lie in, and those that are held for later ones, over all streams."""
    offset = share.bounds[0]
    before, after = (share.mix.blend.places(offset + at).tolist() for at in (span.begin, span.end))
    parts: list[Touched[Key]] = []
    keys: list[MixKey] = []
    block, row = np.empty(rows.source.size, np.int64), np.empty(rows.source.size, np.int64)
    for number, stream in enumerate(share.mix.streams):
        mine = np.flatnonzero(rows.source == number)
        epochs = rows.place[mine] // stream.num_samples
        held = {key[1] for key in live if key[0] == number}
        for epoch in sorted(held | set(np.unique(epochs).tolist())):
            here = mine[epochs == epoch]
            first = epoch * stream.num_samples
            begin, end = max(0, before[number] - first), min(stream.num_samples, after[number] - first)
            part = replace(span, begin=begin, end=end, last=span.last or end == stream.num_samples)
            kept = [(key[2], key[3]) for key in live if key[:2] == (number, epoch)]
            touched = _touch_stream(stream, epoch, rows.place[here] - first, part, kept)
            block[here], row[here] = touched.block + len(keys), touched.row
            keys += [(number, epoch, *key) for key in touched.keys]
            parts.append(replace(touched, start=touched.start + stream.base, stop=touched.stop + stream.base))
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("start", "stop", "finished")]
    return Touched(keys, joined[0], joined[1], joined[2], block, row)


def _touch_stream(stream: Stream, epoch: int, positions: Ints, span: Span, kept: list[Key]) -> Touched[Key]:
    if span.begin >= span.end:  # no turn is this stream's, but blocks of it are held
        nowhere, nothing = np.zeros(len(kept), np.int64), np.zeros(0, np.int64)
        return Touched(kept, nowhere, nowhere, np.full(len(kept), span.last), nothing, nothing)
    if stream.shuffle:
        return touch_lanes(stream.order(epoch), lambda: iter([positions]), span, kept)
    return touch_units(stream.num_samples, stream.unit, positions, span.end, last=span.last, live=kept)


def _spans(share: MixShare, position: int, stop: int | None, steps_at_once: int) -> Iterator[Span]:
    """Cut the steps into spans, short ones first: a stream is examined a window around its part of each."""
    longest = share.span_rows // share.batch
    most = max(1, longest // steps_at_once) * steps_at_once
    size = min(most, max(1, FIRST_STEPS // steps_at_once) * steps_at_once)
    steps = share.global_steps(position) if stop is None else (stop - position) // share.global_batch
    done = 0
    while done < steps:
        count = min(size, steps - done)
        begin = position + done * share.global_batch
        yield Span(done, count, begin, begin + count * share.global_batch, last=done + count == steps)
        done += count
        size = min(most, 2 * size)
