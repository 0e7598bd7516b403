"""How a mixture goes on: turns of sources, in phases whose weights differ. Pure, and entered anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from streamloader.plan.turns import Ints, Turns

__all__ = ["Blend", "Phase"]


@dataclass(frozen=True)
class Phase:
    """From the position `start` of the mixture on: turns of `unit` samples each, in proportion to `weights`.

    `weights[i]` is that of the source `sources[i]`: in the order in which they were first mixed, on which turns depend.
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

    def counts(self, stop: int, count: int) -> Ints:
        """Return how many samples each of `count` sources gave from the phase's start to a position."""
        found = np.zeros(count, np.int64)
        found[list(self.sources)] = self.turns.counts((stop - self.start) // self.unit) * self.unit
        return found

    @cached_property
    def turns(self) -> Turns:
        """Whose turn it is in this phase."""
        return Turns(self.weights)


@dataclass(frozen=True)
class Blend:
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
            first, last = (begin - phase.start) // phase.unit, (end - phase.start) // phase.unit
            source = np.array(phase.sources)[phase.turns.sources(first, last)]
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
        """Return the first position before which a source has given `place` samples; None where it does not go on."""
        if not self.phases[-1].weight(source):
            return None
        given = 0
        for phase, stop in self._ends:
            if phase.weight(source):
                turns = -(-(place - given) // phase.unit)
                turn = phase.turns.reached(phase.sources.index(source), turns)
                if turn is not None and (stop is None or phase.start + turn * phase.unit <= stop):
                    return phase.start + turn * phase.unit
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
