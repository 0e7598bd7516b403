"""The order of one epoch: a pure function of (seed, epoch, N, block, lanes, window).

It implements rules 1 to 6 and 8 of section 8 of SPEC.md; the other modules of this package cite rules by number too.

All arithmetic is on unsigned 64-bit integers, so the order does not depend on the version of any library.

Terms: an *arrival* is the index of a sample in the stream of permuted blocks. The *ordinal* of a block is its index in
that stream. A *lane* is a run of consecutive arrivals, shuffled with a bounded delay. A *position* is the index of a
sample in the epoch: position p is index p div L of lane p mod L.
"""

import hashlib
import struct
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError

FEW_KEYS = 1 << 11
HASHED_AT_ONCE = 1 << 15  # arrivals whose keys are computed together: they fit in a core's cache
MAX_LANES = 1 << 16  # limit of the format
MIN_BLOCKS_PER_LANE = 4  # when lanes are added for more ranks: as many as a window has by default

_LABEL = b"streamloader/order/1"
_ROUNDS = 10
_ROUND_STRIDE = 0xD1B54A32D192ED03
_MASK64 = 2**64 - 1


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64 of each element (Steele, Lea and Flood 2014; Vigna's constants), as a new array of shape (n,).

    Adds 0x9E3779B97F4A7C15 and applies the finalizer, modulo 2**64.
    """
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def permute(values: NDArray[np.int64], size: int, key: int, *, inverse: bool = False) -> NDArray[np.int64]:
    """Return a keyed permutation of [0, size), or its inverse, at some values; shape (n,). O(1) memory.

    It is a balanced Feistel network with cycle walking. The network permutes [0, 4**h), which is at most four times
    `size`. Values outside [0, size) are permuted again until they fall inside (Black and Rogaway 2002).
    """
    half_bits = (max(2, max(size - 1, 0).bit_length()) + 1) // 2
    round_keys = mix(np.array([(key + i * _ROUND_STRIDE) & _MASK64 for i in range(_ROUNDS)], np.uint64))
    network = partial(_network, half_bits=half_bits, round_keys=round_keys, inverse=inverse)
    x = network(values.astype(np.uint64))
    outside = np.flatnonzero(x >= np.uint64(size))
    small = outside.size and 4**half_bits <= FEW_KEYS  # then all of it takes hardly longer than one value
    again = network(np.arange(4**half_bits, dtype=np.uint64)).__getitem__ if small else network
    while outside.size:
        x[outside] = again(x[outside])
        outside = outside[x[outside] >= np.uint64(size)]
    return x.astype(np.int64)


def _network(
    x: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64], *, inverse: bool
) -> NDArray[np.uint64]:
    """Apply all rounds. The inverse exchanges the halves and reverses the keys."""
    half, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = (x & mask, x >> half) if inverse else (x >> half, x & mask)
    for key in round_keys[:: -1 if inverse else 1]:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (right << half) | left if inverse else (left << half) | right


@dataclass(frozen=True)
class OrderParams:
    """The parameters of an order besides seed and epoch.

    `block`: samples that are fetched together. `lanes`: more of them mix more distant blocks into a batch, and let more
    ranks share the dataset without reading a block twice. `window`: samples within which a lane is shuffled; a wider
    one mixes better and needs proportionally more memory. Raises `UsageError` for values that rule 1 does not allow.
    """

    block: int
    lanes: int
    window: int

    def __post_init__(self) -> None:
        for name in ("block", "lanes", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r} is not a positive integer", f"set {name}= to 1 or more")
        if self.window % self.block or self.window < 2 * self.block:
            problem = f"window={self.window} with block={self.block} is not a whole number of blocks, at least 2"
            raise UsageError(problem, f"set window={max(2, -(-self.window // self.block)) * self.block}")
        if self.window >= 2**31:
            raise UsageError(f"window={self.window} samples is not below 2**31", "set a smaller window=")
        if self.lanes > MAX_LANES:
            raise UsageError(f"lanes={self.lanes} is above the limit of {MAX_LANES}", "set a smaller lanes=")


def params_for_world(num_samples: int, params: OrderParams, world_size: int) -> OrderParams:
    """Return the parameters with the number of lanes for a new run on `world_size` ranks.

    It changes only if there are more ranks than lanes. Then it is the next power of two >= `world_size`, so that each
    block is read by one rank, limited so that each lane keeps `MIN_BLOCKS_PER_LANE` blocks.
    """
    if world_size <= params.lanes:
        return params
    limit = min(MAX_LANES, -(-num_samples // params.block) // MIN_BLOCKS_PER_LANE)
    lanes = 1 << min((world_size - 1).bit_length(), max(1, limit).bit_length() - 1)
    return replace(params, lanes=max(params.lanes, lanes))


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch, computed on demand: only the keys are kept.

    `stride`: by how much the numbers of the same samples differ from epoch to epoch, 0 unless each epoch has samples of
    its own. Raises `UsageError` if `seed` or `epoch` is not in [0, 2**64), or a number of a sample not in [0, 2**62).
    """

    num_samples: int
    params: OrderParams
    seed: int
    epoch: int
    shuffle: bool = True
    stride: int = 0

    def __post_init__(self) -> None:
        epochs = 2**62 // self.stride if self.stride else 2**64
        for name, limit in (("seed", 2**64), ("epoch", epochs), ("num_samples", 2**62)):
            value = getattr(self, name)
            if not 0 <= value < limit:
                raise UsageError(f"{name}={value} is not in [0, {limit})", f"set {name}= in that range")

    @property
    def first_sample(self) -> int:
        """The number of the first sample: those of the epoch count from it on."""
        return self.epoch * self.stride

    @property
    def lanes(self) -> int:
        """The number of lanes that positions take turns in: 1 without shuffle."""
        return self.params.lanes if self.shuffle else 1

    def fetch_params(self, unit: int) -> OrderParams:
        """Return block, lanes and window of the fetches. Without shuffle, fetches are `unit` samples, in one lane."""
        return self.params if self.shuffle else OrderParams(unit, 1, 2 * unit)

    @property
    def num_blocks(self) -> int:
        """The number of blocks, ceil(N / B). The last one may be short."""
        return -(-self.num_samples // self.params.block)

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        """The keys `w[0..7]`: SHA-512 of a label and five values as little-endian u64, read as eight u64."""
        values = (self.seed, self.epoch, self.num_samples, self.params.block, self.params.lanes)
        return struct.unpack("<8Q", hashlib.sha512(_LABEL + struct.pack("<5Q", *values)).digest())

    def group_key(self, window: int) -> int:
        """Return the key by which the steps of a window are permuted: see `groups.py`."""
        return (self._keys[2] + window) & _MASK64

    @cached_property
    def _short(self) -> tuple[int, int]:
        """(ordinal, m) of the block that is m samples short of a full one; (num_blocks, 0) if all are full."""
        missing = self.num_blocks * self.params.block - self.num_samples
        if not missing or not self.shuffle:
            return self.num_blocks, 0
        last = np.array([self.num_blocks - 1])
        return int(permute(last, self.num_blocks, self._keys[0], inverse=True)[0]), missing

    def lane_bounds(self, lane: int) -> tuple[int, int]:
        """Return (first arrival, number of arrivals) of a lane. The first N mod L lanes have one more."""
        length, longer = divmod(self.num_samples, self.lanes)
        return lane * length + min(lane, longer), length + (lane < longer)

    def examine(self, lane: int, start: int, stop: int) -> tuple[int, NDArray[np.int64], NDArray[np.bool_]]:
        """Return (first, offsets, later): what a lane emits at the indexes [start, stop), in O(stop - start + W).

        `first` is the first examined arrival, numbered in the epoch, and `offsets` count from it. `later[i]` is whether
        arrival `first + i` is emitted after these indexes. All arrivals of the lane before the examined ones are
        emitted before `stop`, all after them later.

        Keys are uniform, so the key at an index is known to within a few standard deviations. Arrivals are hashed if
        their key may lie between two such bounds; the keys below the bounds are counted, those between them sorted. The
        counts show whether the bounds hold; if they do not, they are widened. A sample whose key lies in [a', a' + W)
        is emitted less than W indexes away from a'.
        """
        length = self.lane_bounds(lane)[1]
        margin = 64 + 8 * isqrt(min(self.params.window, length) // 4)
        while (emitted := self._examine_within(margin, lane, start, stop)) is None:
            margin = min(4 * margin, length)  # with a margin of the length, the bounds are the ends of the lane
        return emitted

    def _examine_within(
        self, margin: int, lane: int, start: int, stop: int
    ) -> tuple[int, NDArray[np.int64], NDArray[np.bool_]] | None:
        """Examine with the keys expected `margin` indexes before and after as bounds; None if they do not hold."""
        begin, length = self.lane_bounds(lane)
        window, short_lane = self.params.window, length <= self.params.window
        lowest, highest = (_expected_key(index, length, window) for index in (start - margin, stop + margin))
        first, last = (0, length) if short_lane else (max(0, lowest - window), min(length, highest))
        if last - first + window > 2**32:
            problem = f"{last - first} arrivals with window={window} do not fit 64-bit keys"
            raise UsageError(problem, "ask for fewer indexes at once, or set a smaller window=")
        key_base = 0 if short_lane else first
        low, high = max(0, (lowest - key_base) << 32), min((highest - key_base) << 32, 2**64 - 1)
        before, later = first, np.empty(last - first, np.bool_)
        offset_parts, key_parts = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        for part in range(0, last - first, HASHED_AT_ONCE):
            arrivals = np.arange(part, min(last - first, part + HASHED_AT_ONCE), dtype=np.uint64)
            noise = mix(mix(arrivals + np.uint64(begin + first)) ^ np.uint64(self._keys[1])) >> np.uint64(32)
            if short_lane:
                keys = (noise << np.uint64(32)) | arrivals
            else:
                keys = (arrivals << np.uint64(32)) + noise * np.uint64(window)
            later[part : part + arrivals.size] = above = keys > np.uint64(high)
            not_below = keys >= np.uint64(low)
            between = np.flatnonzero(not_below & ~above)
            before += int(arrivals.size - np.count_nonzero(not_below))
            offset_parts.append(between + part)
            key_parts.append(keys[between])
        offsets = np.concatenate(offset_parts)
        if before > start or before + offsets.size < stop:
            return None
        ordered = offsets[_stable_argsort(np.concatenate(key_parts))]
        later[ordered[: stop - before]] = False
        later[ordered[stop - before :]] = True
        return begin + first, ordered[start - before : stop - before], later

    def emit(self, lane: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the arrivals, numbered in the epoch, that a lane emits at the indexes [start, stop)."""
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        first, offsets, _ = self.examine(lane, start, stop)
        return offsets + first

    def locate(self, arrivals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (ordinal, row) of each arrival: the ordinal of its block, and its row in that block."""
        block = self.params.block
        short, missing = self._short
        padded = np.where(arrivals < (short + 1) * block - missing, arrivals, arrivals + missing)
        ordinals = padded // block
        return ordinals, padded - ordinals * block

    def first_arrivals(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first arrival of the block at each ordinal; N for ordinal num_blocks."""
        short, missing = self._short
        return np.minimum(ordinals * self.params.block - np.where(ordinals > short, missing, 0), self.num_samples)

    def block_numbers(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the block at each ordinal. Block n starts at sample n * block."""
        return permute(ordinals, self.num_blocks, self._keys[0]) if self.shuffle else ordinals

    def first_uses(self, numbers: NDArray[np.int64], lanes: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return when the first of some `lanes` of a shuffled order reads each block; infinity if none does.

        From 0 for the start of the epoch to 1: where its first arrival in a lane is. `numbers`: of the blocks. `lanes`:
        whether each lane counts.
        """
        ordinals = permute(numbers, self.num_blocks, self._keys[0], inverse=True)
        lane, first = self._in_lanes(self.first_arrivals(ordinals))
        end, _ = self._in_lanes(self.first_arrivals(ordinals + 1) - 1)
        counts = np.concatenate([[0], np.cumsum(lanes)])
        # a block that continues in a later lane is what that lane begins with
        uses = np.where(counts[end + 1] > counts[lane + 1], 0.0, np.inf)
        return np.where(lanes[lane], np.minimum(uses, first), uses)

    def uses_of_parts(
        self, numbers: NDArray[np.int64], rows: NDArray[np.int64], lanes: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return when parts of blocks are read, and when the lane in which their block begins reads that.

        `rows`: the first row of each part. The lane reads it after the lanes in which it continues; infinity for a part
        that is there, and for a lane that does not count. Times and `lanes` are as in `first_uses`.
        """
        first = self.first_arrivals(permute(numbers, self.num_blocks, self._keys[0], inverse=True))
        (lane, begin), (_, now) = self._in_lanes(first), self._in_lanes(first + rows)
        return now, np.where(lanes[lane] & (rows > 0), begin, np.inf)

    def visits(self, lanes: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the numbers of the blocks that some lanes of a shuffled order read, or parts of them, and the times.

        In the order of these. Times and `lanes` are as in `first_uses`; each part is one visit.
        """
        ordinals = np.arange(self.num_blocks)
        lane, first = self._in_lanes(self.first_arrivals(ordinals))
        end, _ = self._in_lanes(self.first_arrivals(ordinals + 1) - 1)
        parts = end - lane + 1
        block = np.repeat(ordinals, parts)
        lane_of = np.repeat(lane, parts) + np.arange(block.size) - np.repeat(np.cumsum(parts) - parts, parts)
        times = np.where(lane_of == lane[block], first[block], 0.0)
        counted = np.flatnonzero(lanes[lane_of])
        counted = counted[np.argsort(times[counted], kind="stable")]
        return self.block_numbers(block[counted]), times[counted]

    def _in_lanes(self, arrivals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the lane of each arrival, and where it is there, from 0 to 1."""
        length, longer = divmod(self.num_samples, self.lanes)
        begins = np.arange(self.lanes + 1) * length + np.minimum(np.arange(self.lanes + 1), longer)
        lane = np.searchsorted(begins, arrivals, side="right") - 1
        return lane, (arrivals - begins[lane]) / max(1, length)

    def samples(self, arrivals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample number of each arrival."""
        ordinals, rows = self.locate(arrivals)
        if not ordinals.size:
            return ordinals
        low, high = int(ordinals.min()), int(ordinals.max()) + 1
        if high - low <= ordinals.size:  # permute each block once, rather than for each of its samples
            numbers = self.block_numbers(np.arange(low, high))[ordinals - low]
        else:
            numbers = self.block_numbers(ordinals)
        samples = numbers * self.params.block + rows
        return samples + self.first_sample if self.stride else samples

    def samples_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample number at each position of [start, stop), in O(stop - start + W * lanes)."""
        arrivals = np.empty(stop - start, np.int64)
        for lane in range(self.lanes):
            first = (lane - start) % self.lanes
            part = arrivals[first :: self.lanes]
            if part.size:
                index = (start + first) // self.lanes
                part[:] = self.emit(lane, index, index + part.size)
        return self.samples(arrivals)


def _expected_key(index: int, length: int, window: int) -> int:
    """Return the expected key at an index of a lane, in units of 2**32; a bound of all keys for an index outside it."""
    if index <= 0 or not length:
        return 0
    if length <= window:  # keys are uniform in [0, 2**32)
        return min(index, length) * 2**32 // length
    if index >= length:
        return length + window
    if 2 * index <= window:  # the window fills: index = key**2 / (2 W)
        return isqrt(2 * window * index)
    if 2 * (length - index) <= window:  # the window empties
        return length + window - isqrt(2 * window * (length - index))
    return index + window // 2


def _stable_argsort(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Sort by the 32 leading bits, in two passes of numpy's radix sort, which has 16 bits; then sort ties again.

    Several times faster than numpy's sorts of 64 bits, except for a few keys.
    """
    if keys.size < FEW_KEYS:
        return np.argsort(keys, kind="stable")
    unused = np.uint64(max(0, int(keys.max(initial=0)).bit_length() - 32))
    leading = (keys >> unused).astype(np.uint32)
    order = np.argsort(leading.astype(np.uint16), kind="stable")
    order = order[np.argsort((leading >> np.uint32(16)).astype(np.uint16)[order], kind="stable")]
    ranked = leading[order]
    equal = ranked[1:] == ranked[:-1]
    if unused and equal.any():
        tied = np.zeros(keys.size, np.bool_)
        tied[1:] = equal
        tied[:-1] |= equal
        members = order[tied]
        order[tied] = members[np.lexsort((members, keys[members]))]
    return order
