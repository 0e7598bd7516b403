"""Whose turn it is: sources in given proportions, spread evenly, entered anywhere; in whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from numbers import Rational

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import MixtureError

__all__ = ["MOST_PARTS", "Turns", "exact_shares", "whole_weights"]

Ints = NDArray[np.int64]

# Turns after which the order of sources repeats, at most: weights that need more are rounded to so many parts.
MOST_PARTS = 4096


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
        raise MixtureError(f"the weight {weight!r} is no number", "give a number of at least 0") from error
    if found < 0:
        raise MixtureError(f"the weight {weight!r} is negative", "give a number of at least 0")
    return found


@dataclass(frozen=True)
class Turns:
    """An endless sequence of sources: of every sum(weights) turns, weights[i] are of source i.

    Of any first n turns, source i has had n * weights[i] / sum(weights), less or more by less than one: Tijdeman's
    solution of the chairman assignment problem (Discrete Mathematics 32, 1980). So in any window the shares are exact
    to less than two turns.
    """

    weights: tuple[int, ...]

    @property
    def period(self) -> int:
        """Turns after which the sequence repeats."""
        return sum(self.weights)

    @cached_property
    def _table(self) -> Ints:
        """The source of each turn of a period."""
        count, period = len(self.weights), self.period
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

    def counts(self, turn: int) -> Ints:
        """Return how often each source had a turn before this one."""
        periods, rest = divmod(turn, self.period)
        found: Ints = periods * np.array(self.weights, np.int64) + self._before[rest]
        return found

    def sources(self, start: int, stop: int) -> Ints:
        """Return whose the turns [start, stop) are."""
        return self._table[np.arange(start, stop) % self.period]

    def reached(self, source: int, count: int) -> int | None:
        """Return before which turn a source first has had `count` turns; None where it never has one."""
        if count <= 0:
            return 0
        weight = self.weights[source]
        if not weight:
            return None
        periods, rest = divmod(count - 1, weight)
        return periods * self.period + int(np.flatnonzero(self._table == source)[rest]) + 1
