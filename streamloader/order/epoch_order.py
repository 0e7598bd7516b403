"""The order of one epoch: a pure function of (seed, epoch, N, block, lanes, window), rules 1 to 6 and 8.

Everything is arithmetic on unsigned 64-bit integers, so that an order never depends on a library's version.

Words: an *arrival* is a sample's place in the stream of permuted blocks; a lane is a run of arrivals, shuffled
with a bounded delay; a *position* is a sample's place in the epoch (lane p mod L, index p div L).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError

HASHED_AT_ONCE = 1 << 15  # arrivals: their keys stay in a core's cache
MAX_LANES = 1 << 16  # the format's limit
BLOCKS_OF_A_LANE = 4  # at least, where lanes are added for more ranks: a window's worth


_LABEL = b"streamloader/order/1"
_ROUNDS = 10
_ROUND_STRIDE = 0xD1B54A32D192ED03
_MASK64 = 2**64 - 1


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of splitmix64 (Steele, Lea and Flood 2014; Vigna's constants) for every element of `x`.

    Adds 0x9E3779B97F4A7C15 and applies the finalizer, modulo 2**64. Shape (n,); returns a new array.
    """
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def order_keys(seed: int, epoch: int, num_samples: int, block: int, lanes: int) -> tuple[int, ...]:
    """The keys `w[0..7]` of one epoch: SHA-512 of a label and the five u64 little-endian, read as eight u64."""
    text = _LABEL + struct.pack("<5Q", seed, epoch, num_samples, block, lanes)
    return struct.unpack("<8Q", hashlib.sha512(text).digest())


@dataclass(frozen=True)
class BlockPermutation:
    """A keyed permutation of [0, num_blocks) in O(1) memory: a balanced Feistel network, cycle-walked.

    The network permutes [0, 4**h), at most four times `num_blocks`; a value outside [0, num_blocks) is permuted again
    until it falls inside (Black and Rogaway 2002).
    """

    num_blocks: int
    key: int

    @cached_property
    def _half_bits(self) -> int:
        return (max(2, max(self.num_blocks - 1, 0).bit_length()) + 1) // 2

    @cached_property
    def _round_keys(self) -> NDArray[np.uint64]:
        raw = [(self.key + i * _ROUND_STRIDE) & _MASK64 for i in range(_ROUNDS)]
        return mix(np.array(raw, np.uint64))

    def forward(self, arrival: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the block that is the `arrival`-th to arrive; shape (n,), each in [0, num_blocks)."""
        return self._walk(arrival, inverse=False)

    def inverse(self, block: NDArray[np.int64]) -> NDArray[np.int64]:
        """When the block with number `block` arrives; shape (n,), each in [0, num_blocks)."""
        return self._walk(block, inverse=True)

    def _walk(self, values: NDArray[np.int64], *, inverse: bool) -> NDArray[np.int64]:
        x = self._network(values.astype(np.uint64), inverse=inverse)
        outside = np.flatnonzero(x >= np.uint64(self.num_blocks))
        while outside.size:
            x[outside] = self._network(x[outside], inverse=inverse)
            outside = outside[x[outside] >= np.uint64(self.num_blocks)]
        return x.astype(np.int64)

    def _network(self, x: NDArray[np.uint64], *, inverse: bool) -> NDArray[np.uint64]:
        """All rounds. The inverse is the same with the halves exchanged and the keys in reverse."""
        half, mask = np.uint64(self._half_bits), np.uint64(2**self._half_bits - 1)
        one, other = (x & mask, x >> half) if inverse else (x >> half, x & mask)
        for key in self._round_keys[:: -1 if inverse else 1]:
            one, other = other, one ^ (mix(other ^ key) & mask)
        return (other << half) | one if inverse else (one << half) | other


@dataclass(frozen=True)
class OrderParams:
    """What pins an order besides seed and epoch; all in samples but `lanes`.

    `block` is what is fetched at once. More `lanes` mix more distant blocks into a batch and let more ranks share
    the dataset without reading twice. A wider `window` (per lane) mixes better and costs memory in proportion.
    Raises UsageError for values that rule 1 does not allow.
    """

    block: int
    lanes: int
    window: int

    def __post_init__(self) -> None:
        for name in ("block", "lanes", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r} is not a whole number of 1 or more", f"set {name}= to one")
        if self.window % self.block or self.window < 2 * self.block:
            problem = f"window={self.window} is not a multiple of block={self.block} that is at least twice it"
            raise UsageError(problem, f"set window={max(2, -(-self.window // self.block)) * self.block}")
        if self.window >= 2**31:
            raise UsageError(f"window={self.window} samples is not below 2**31", "set a smaller window=")


def lanes_for_world(num_samples: int, params: OrderParams, world_size: int) -> int:
    """Return the lanes of a run that begins on so many ranks.

    Those of `params`; where there are more ranks than these, the next power of two >= `world_size`, so that each block
    is read by one rank, or as many as leave `BLOCKS_OF_A_LANE` blocks to each lane.
    """
    if world_size <= params.lanes:
        return params.lanes
    allowed = min(MAX_LANES, -(-num_samples // params.block) // BLOCKS_OF_A_LANE)
    return max(params.lanes, 1 << min((world_size - 1).bit_length(), max(1, allowed).bit_length() - 1))


class Emitted(NamedTuple):
    """What a lane emits at some indexes: `offsets` count from the `first` arrival of the lane that was examined.

    `later` has an entry for each examined arrival: whether it is emitted behind these indexes. Arrivals before them
    were emitted earlier or at these indexes, those behind them come later.
    """

    first: int
    offsets: NDArray[np.int64]
    later: NDArray[np.bool_]


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch; a value: nothing is computed before it is asked for, nothing is kept but the keys.

    Raises UsageError where a number does not fit an unsigned 64-bit integer.
    """

    num_samples: int
    params: OrderParams
    seed: int
    epoch: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name, limit in (("seed", 2**64), ("epoch", 2**64), ("num_samples", 2**62)):
            value = getattr(self, name)
            if not 0 <= value < limit:
                raise UsageError(f"{name}={value} is not in [0, {limit})", f"set {name}= inside that range")

    @property
    def lanes(self) -> int:
        """The lanes that positions go round: 1 without shuffle."""
        return self.params.lanes if self.shuffle else 1

    def fetched(self, unit: int) -> OrderParams:
        """Block, lanes and window of what is fetched; without shuffle `unit` samples at once, in one lane."""
        return self.params if self.shuffle else OrderParams(unit, 1, 2 * unit)

    @property
    def num_blocks(self) -> int:
        """ceil(N / B): the last block may be short."""
        return -(-self.num_samples // self.params.block)

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        return order_keys(self.seed, self.epoch, self.num_samples, self.params.block, self.params.lanes)

    @cached_property
    def _permutation(self) -> BlockPermutation:
        return BlockPermutation(self.num_blocks, self._keys[0])

    @cached_property
    def _short(self) -> tuple[int, int]:
        """(j, m): the j-th block to arrive lacks m samples of a full block; (num_blocks, 0) if none does."""
        missing = self.num_blocks * self.params.block - self.num_samples
        if not missing or not self.shuffle:
            return self.num_blocks, 0
        return int(self._permutation.inverse(np.array([self.num_blocks - 1]))[0]), missing

    def lane_bounds(self, lane: int) -> tuple[int, int]:
        """(first arrival, number of arrivals) of a lane: the first N mod L lanes have one more."""
        each, longer = divmod(self.num_samples, self.lanes)
        return lane * each + min(lane, longer), each + (lane < longer)

    def examine(self, lane: int, start: int, stop: int) -> Emitted:
        """Return what a lane emits at the indexes [start, stop), and which of the arrivals around them come later.

        Keys are uniform, so the key at an index is known to within a few standard deviations: arrivals are hashed
        where their key may fall between two such bounds, counted below them, and sorted between them. The counts show
        whether the bounds hold; if not, they are set further apart. O(stop - start + W), and at the beginning of a
        lane less. A sample whose key lies in [a', a' + W) leaves less than W away from index a'.
        """
        length, spread = self.lane_bounds(lane)[1], min(self.params.window, self.lane_bounds(lane)[1])
        margin = 64 + 8 * isqrt(spread // 4)
        while True:
            found = self._between(lane, start, stop, margin)
            if found is not None:
                return found
            margin = min(4 * margin, length)  # at the length, the bounds are the ends of the lane

    def _between(self, lane: int, start: int, stop: int, margin: int) -> Emitted | None:
        """The same, if these indexes lie between the keys expected `margin` indexes before and after them."""
        begin, length = self.lane_bounds(lane)
        window, whole = self.params.window, length <= self.params.window
        lowest, highest = (_expected(index, length, window) for index in (start - margin, stop + margin))
        first, last = (0, length) if whole else (max(0, lowest - window), min(length, highest))
        if last - first + window > 2**32:
            problem = f"{last - first} arrivals with window={window} do not fit 64-bit keys"
            raise UsageError(problem, "ask for fewer indexes at once, or set a smaller window=")
        low, high = ((key - (0 if whole else first)) << 32 for key in (lowest, highest))
        low, high = max(0, low), min(high, 2**64 - 1)
        before, later = first, np.empty(last - first, np.bool_)
        offsets, keys = [], []
        for at in range(0, last - first, HASHED_AT_ONCE):
            arrival = np.arange(at, min(last - first, at + HASHED_AT_ONCE), dtype=np.uint64)
            noise = mix(mix(arrival + np.uint64(begin + first)) ^ np.uint64(self._keys[1])) >> np.uint64(32)
            key = (
                (noise << np.uint64(32)) | arrival if whole else (arrival << np.uint64(32)) + noise * np.uint64(window)
            )
            later[at : at + arrival.size] = beyond = key > np.uint64(high)
            reached = key >= np.uint64(low)
            near = np.flatnonzero(reached & ~beyond)
            before += int(arrival.size - np.count_nonzero(reached))
            offsets.append(near + at)
            keys.append(key[near])
        offset = np.concatenate(offsets) if offsets else np.zeros(0, np.int64)
        if before > start or before + offset.size < stop:
            return None
        ordered = offset[_stable_argsort(np.concatenate(keys))] if offset.size else offset
        later[ordered[: stop - before]] = False
        later[ordered[stop - before :]] = True
        return Emitted(first, ordered[start - before : stop - before], later)

    def emit(self, lane: int, start: int, stop: int) -> NDArray[np.int64]:
        """The arrivals that a lane emits at the indexes [start, stop), in O(stop - start + W)."""
        begin = self.lane_bounds(lane)[0]
        if not self.shuffle:
            return np.arange(begin + start, begin + stop, dtype=np.int64)
        found = self.examine(lane, start, stop)
        return found.offsets + (begin + found.first)

    def locate(self, arrivals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(j, row): each arrival is row `row` of the j-th block to arrive."""
        block = self.params.block
        short, missing = self._short
        full = np.where(arrivals < (short + 1) * block - missing, arrivals, arrivals + missing)
        arrived = full // block
        return arrived, full - arrived * block

    def first_arrivals(self, arrived: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first arrival of the j-th block to arrive, for each j in `arrived`; N for j = num_blocks."""
        short, missing = self._short
        return np.minimum(arrived * self.params.block - np.where(arrived > short, missing, 0), self.num_samples)

    def block_numbers(self, arrived: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the j-th block to arrive, for each j in `arrived`; block n starts at sample n * block."""
        return self._permutation.forward(arrived) if self.shuffle else arrived

    def samples(self, arrivals: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample number of each arrival."""
        arrived, row = self.locate(arrivals)
        if not arrived.size:
            return arrived
        low, high = int(arrived.min()), int(arrived.max()) + 1
        if high - low <= arrived.size:  # one permutation step for a block, not for each of its samples
            number = self.block_numbers(np.arange(low, high))[arrived - low]
        else:
            number = self.block_numbers(arrived)
        return number * self.params.block + row

    def samples_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """The sample number at each global position of [start, stop), in O(stop - start + W * lanes)."""
        arrivals = np.empty(stop - start, np.int64)
        for lane in range(self.lanes):
            first = (lane - start) % self.lanes
            part = arrivals[first :: self.lanes]
            if part.size:
                index = (start + first) // self.lanes
                part[:] = self.emit(lane, index, index + part.size)
        return self.samples(arrivals)


def _expected(index: int, length: int, window: int) -> int:
    """The key, in units of 2**32, that so many of a lane's keys are expected to be below; at the ends, all or none."""
    if index <= 0 or not length:
        return 0
    if length <= window:  # keys spread evenly over [0, 2**32)
        return min(index, length) * 2**32 // length
    if index >= length:
        return length + window
    if 2 * index <= window:  # the window fills: index = key**2 / (2 W)
        return isqrt(2 * window * index)
    if 2 * (length - index) <= window:  # and empties
        return length + window - isqrt(2 * window * (length - index))
    return index + window // 2


def _stable_argsort(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """numpy's vectorised quicksort, then ties put right: several times faster than its stable sort."""
    order = np.argsort(keys)
    ranked = keys[order]
    equal = ranked[1:] == ranked[:-1]
    if equal.any():
        tied = np.zeros(keys.size, np.bool_)
        tied[1:] = equal
        tied[:-1] |= equal
        members = order[tied]
        order[tied] = members[np.lexsort((members, ranked[tied]))]
    return order
