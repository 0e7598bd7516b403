"""Samples drawn by weights (`weights=`): how often an epoch has each one is a function of seed, epoch and weights.

It implements rule 11 of section 8 of SPEC.md. Sample i has the *mass* E_i, how many times an epoch is expected to have
it. The masses lie side by side on a line, in units of 2**-24, in a random order in which the samples of a class
are together. Of points on the line that are 1 apart, each draws the sample that it meets (systematic resampling). So an
epoch has sample i floor(E_i) or ceil(E_i) times, and the same holds for each class. From epoch to epoch the points move
by the golden ratio, so that the samples come in turn.

All arithmetic is on integers, so the draws are the same on every machine.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SelectionError
from streamloader.order.epoch_order import permute
from streamloader.samples import distinct

if TYPE_CHECKING:
    from streamloader.samples import AllBut

Ints = NDArray[np.int64]
Units = NDArray[np.uint64]
Draws = tuple[NDArray[Any], Ints]  # how often each sample comes, in rows of `GROUP`; the draws before each row, and all

UNIT_BITS = 24
GROUP = 64
PIECE = 1 << 16  # samples that are computed together
MAX_SAMPLES = 1 << 36
SMALL_BYTES = 1 << 16  # of the draws of short epochs, many of which are planned ahead

_LABEL = b"streamloader/weights/1"
_STEP = 0x9E3779  # the golden ratio, in units
_SUM_BITS = 47


def scale_weights(weights: NDArray[Any]) -> Units:
    """Return integers in the proportions of some weights, with a sum below 2**48; shape (n,).

    Each is the float64 times a power of two, rounded to the nearest integer, of two the even one. So one that is less
    than 2**-48 of the sum is 0. Raises `SelectionError` for a weight that is negative or not finite, and if all are 0.
    """
    values = weights.astype(np.float64)
    invalid = np.flatnonzero(~(values >= 0) | np.isinf(values))
    if invalid.size:
        problem = f"weights= has {values[invalid[0]]} at {invalid[0]}"
        raise SelectionError(problem, "give finite numbers of at least 0")
    if not values.any():
        raise SelectionError(f"weights= has {values.size} weights, and all are 0", "give at least one above 0")
    up = 31 - int(np.frexp(values.max())[1])
    total = int(np.ldexp(values, up).astype(np.uint64).sum()) + values.size
    return np.rint(np.ldexp(values, up + _SUM_BITS - total.bit_length())).astype(np.uint64)


def _part_of(total: int | Units, part: Units, whole: int | Units) -> Units:
    """Return floor(total * part / whole) for part <= whole < 2**48 and total < 2**60, by digits of 15 bits."""
    quotient, rest = np.zeros(part.shape, np.uint64), np.zeros(part.shape, np.uint64)
    total, whole, digit_bits = np.asarray(total, np.uint64), np.asarray(whole, np.uint64), np.uint64(15)
    for shift in (45, 30, 15, 0):
        digit = (total >> np.uint64(shift)) & np.uint64(2**15 - 1)
        rest = (rest << digit_bits) + digit * part
        quotient = (quotient << digit_bits) + rest // whole
        rest %= whole
    return quotient


class Drawn:
    """The samples that epochs draw by weights from `drawn_from`, or from all `num_samples` if it is None.

    It is what an array of selected samples is to its users: it has a length, the draws of an epoch, and returns the
    samples at a slice within an epoch, or at an array of indexes, where draw d of epoch e is at e * len + d. Samples
    ascend within an epoch.

    `weights`: of each of the samples; or of each class, if `classes` has the class of each of them, from 0 on, or -1
    for one that is not drawn. Without `replacement`, an epoch has each sample at most once, and as many as that allows.

    It takes 8 bytes for each sample, or 12 if it expects one 256 times or more; and for each epoch in use about 1.1.
    Raises `SelectionError` for invalid weights, and for a class with a weight above 0 that has no sample.
    """

    def __init__(
        self,
        num_samples: int,
        weights: NDArray[Any],
        seed: int,
        classes: Ints | None = None,
        drawn_from: Ints | AllBut | None = None,
        *,
        replacement: bool = True,
    ) -> None:
        if num_samples >= MAX_SAMPLES:
            raise SelectionError(f"weights= of {num_samples} samples", f"select fewer than {MAX_SAMPLES}")
        self.drawn_from, scaled = drawn_from, scale_weights(weights)
        sizes = None if classes is None else np.bincount(classes[classes >= 0], minlength=scaled.size)
        if sizes is not None and np.any(empty := (sizes == 0) & (scaled > 0)):
            raise SelectionError(f"class {int(empty.argmax())} of weights= has no sample", "leave it out")
        self._count = num_samples if replacement else _most_draws(scaled, sizes)
        digest = hashlib.sha256(_LABEL + struct.pack("<2Q", num_samples, self._count) + scaled.astype("<u8").tobytes())
        digest.update(b"" if classes is None else classes.astype("<i8").tobytes())
        self.digest = digest.hexdigest()
        keys = hashlib.sha512(_LABEL + struct.pack("<2Q", seed, num_samples)).digest()
        permutation, self._first_point = struct.unpack_from("<2Q", keys)
        places = permute(np.arange(num_samples, dtype=np.int64), num_samples, permutation)
        if classes is not None:
            placed = classes[places]
            places = places[np.argsort(placed, kind="stable")[np.count_nonzero(placed < 0) :]]
        self._begins, masses = np.zeros(num_samples, np.uint32), np.zeros(num_samples, np.uint64)
        for samples, begins, ends in _lines(places, scaled, sizes, self._count << UNIT_BITS):
            self._begins[samples] = begins & np.uint64(2**UNIT_BITS - 1)
            masses[samples] = ends - begins
        most = int(masses.max())
        self._masses = masses.astype(np.uint32) if most < 2**32 else masses
        self._dtype = np.min_scalar_type((most >> UNIT_BITS) + 1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: slice | Ints) -> Ints:
        if isinstance(key, slice):
            samples = self._in_epoch(key.start or 0, self._count if key.stop is None else key.stop)
            return samples if self.drawn_from is None else self.drawn_from[samples]
        samples, epochs = np.empty(key.size, np.int64), key // self._count
        for epoch in distinct(epochs).tolist():
            rows = np.flatnonzero(epochs == epoch)
            samples[rows] = _drawn_at(self.draws(epoch), key[rows] - epoch * self._count)
        return samples if self.drawn_from is None else self.drawn_from[samples]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the draws of epochs."""
        return {name: value for name, value in self.__dict__.items() if name != "_draws"}

    @property
    def nbytes(self) -> int:
        """The bytes that it takes, with those of the epochs in use."""
        before = 0 if self.drawn_from is None else self.drawn_from.nbytes
        return before + self._begins.nbytes + self._masses.nbytes + self._epochs_kept * self._epoch_bytes

    def draws(self, epoch: int) -> Draws:
        """Return the draws of an epoch; they are kept for a few epochs."""
        return self._draws((self._first_point + epoch * _STEP) % 2**UNIT_BITS)

    @property
    def _epoch_bytes(self) -> int:
        return -(-self._begins.size // GROUP) * (GROUP * self._dtype.itemsize + 8)

    @property
    def _epochs_kept(self) -> int:
        """The epochs whose draws are kept: the one that is read, the next one, and more if they are short."""
        return 2 + SMALL_BYTES // self._epoch_bytes

    @cached_property
    def _draws(self) -> Callable[[int], Draws]:
        return lru_cache(self._epochs_kept)(partial(_draw, self._begins, self._masses, self._dtype))

    def _in_epoch(self, start: int, stop: int) -> Ints:
        """Return the samples, by their place in `drawn_from`, of the draws [start, stop) up to the end of an epoch."""
        epoch, start = divmod(start, self._count)
        stop = min(stop - epoch * self._count, self._count)
        if stop <= start:
            return np.zeros(0, np.int64)
        times, before = self.draws(epoch)
        low, high = (np.searchsorted(before, [start, stop - 1], side="right") - 1).tolist()
        found = np.repeat(np.arange(low * GROUP, (high + 1) * GROUP), times[low : high + 1].reshape(-1))
        return found[start - before[low] : stop - before[low]]


if TYPE_CHECKING:
    Selection = Ints | AllBut | Drawn


def _most_draws(weights: Units, sizes: Ints | None) -> int:
    """Return the most draws of which no sample is expected more than once; `sizes`: of classes, else 1."""
    total = int(weights.sum())
    if sizes is None:
        return total // int(weights.max())
    pairs: list[tuple[int, int]] = list(zip(sizes.tolist(), weights.tolist(), strict=True))
    return min(size * total // weight for size, weight in pairs if weight)


def _lines(places: Ints, weights: Units, sizes: Ints | None, length: int) -> Iterator[tuple[Ints, Units, Units]]:
    """Yield (samples, begins, ends) of samples side by side on a line of `length` units, in the order of `places`.

    They share it by their weights; or their classes do, whose samples have equal parts, if there are `sizes` of these.
    """
    total, weight_before = int(weights.sum()), np.uint64(0)
    if sizes is not None:
        edges = _part_of(length, np.concatenate([[0], np.cumsum(weights)]).astype(np.uint64), total)
        last = np.cumsum(sizes)
    for first in range(0, places.size, PIECE):
        samples = places[first : first + PIECE]
        if sizes is None:
            sums = np.concatenate([[np.uint64(0)], np.cumsum(weights[samples])]) + weight_before
            weight_before = sums[-1]
            at = _part_of(length, sums, total)
            yield samples, at[:-1], at[1:]
        else:
            numbers = np.arange(first, first + samples.size)
            kind = np.searchsorted(last, numbers, side="right")
            size, ranks = sizes[kind].astype(np.uint64), (numbers - last[kind] + sizes[kind]).astype(np.uint64)
            begins, ends = (_part_of(np.diff(edges)[kind], ranks + np.uint64(end), size) for end in (0, 1))
            yield samples, edges[kind] + begins, edges[kind] + ends


def _draw(begins: NDArray[np.uint32], masses: NDArray[Any], dtype: np.dtype[Any], point: int) -> Draws:
    """Return how often each sample is drawn if the points on the line are `point` units before whole draws."""
    times = np.zeros((-(-begins.size // GROUP), GROUP), dtype)
    flat, bits = times.reshape(-1), np.uint64(UNIT_BITS)
    for first in range(0, begins.size, PIECE):
        part = slice(first, min(begins.size, first + PIECE))
        begin = begins[part].astype(np.uint64) + np.uint64(point)
        flat[part] = ((begin + masses[part]) >> bits) - (begin >> bits)
    return times, np.concatenate([[0], np.cumsum(times.sum(axis=1, dtype=np.int64))])


def _drawn_at(draws: Draws, numbers: Ints) -> Ints:
    """Return the sample of each draw of an epoch."""
    times, before = draws
    samples = np.empty(numbers.size, np.int64)
    for first in range(0, numbers.size, PIECE // GROUP):
        part = slice(first, first + PIECE // GROUP)
        row = np.searchsorted(before, numbers[part], side="right") - 1
        sums = np.cumsum(times[row], axis=1, dtype=np.int64)
        samples[part] = row * GROUP + np.count_nonzero(sums <= (numbers[part] - before[row])[:, None], axis=1)
    return samples
