"""The order of one epoch: a pure function of (seed, epoch, N, block, lanes, window), rules 1 to 6 and 8.

Words: an *arrival* is a sample's place in the stream of permuted blocks; a lane is a run of arrivals, shuffled
with a bounded delay; a *position* is a sample's place in the epoch (lane p mod L, index p div L).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError
from streamloader.plan.permute import BlockPermutation, mix, order_keys

__all__ = ["EpochOrder", "OrderParams", "lanes_for_world"]

MAX_LANES = 1 << 16  # the format's limit
BLOCKS_OF_A_LANE = 4  # at least, where lanes are added for more ranks: a window's worth


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
            raise UsageError(
                f"window={self.window} is not a multiple of block={self.block} that is at least twice it",
                f"set window={max(2, -(-self.window // self.block)) * self.block}",
            )
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

    def examine(self, lane: int, start: int, stop: int) -> tuple[int, NDArray[np.int64]]:
        """What a lane emits from index `start` on, as far as the arrivals show that decide indexes below `stop`.

        Returns (first, offsets): offsets[i] counts from the `first` arrival of the lane that was examined. Exact for
        the first stop - start entries; behind them comes, in no meaningful order, every other arrival that was
        examined, all still to be emitted. A sample whose key lies in [a', a' + W) leaves less than W away from
        index a', so arrivals before start - W are gone and those from stop + W on come later.
        """
        begin, length = self.lane_bounds(lane)
        window = self.params.window
        if not self.shuffle:
            return start, np.arange(stop - start, dtype=np.int64)
        low, high = (0, length) if length <= window else (max(0, start - window), min(length, stop + window))
        if high - low + window > 2**32:
            raise UsageError(
                f"{high - low} arrivals with window={window} do not fit 64-bit keys",
                "ask for fewer indexes at once, or set a smaller window=",
            )
        noise = mix(mix(np.arange(begin + low, begin + high, dtype=np.uint64)) ^ np.uint64(self._keys[1]))
        noise >>= np.uint64(32)
        arrival = np.arange(high - low, dtype=np.uint64)
        if length <= window:
            keys = (noise << np.uint64(32)) | arrival
        else:
            keys = (arrival << np.uint64(32)) + noise * np.uint64(window)
        return low, _stable_argsort(keys)[start - low :]

    def emit(self, lane: int, start: int, stop: int) -> NDArray[np.int64]:
        """The arrivals that a lane emits at the indexes [start, stop), in O(stop - start + W)."""
        first, offsets = self.examine(lane, start, stop)
        return offsets[: stop - start] + (self.lane_bounds(lane)[0] + first)

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
