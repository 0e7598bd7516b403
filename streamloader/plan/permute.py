"""The integer hash, the epoch's keys and the block permutation (rules 2 and 3 of the order contract).

Everything is arithmetic on unsigned 64-bit integers, so that an order never depends on a library's version.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockPermutation", "mix", "order_keys"]

_LABEL = b"streamloader/order/1"
_ROUNDS = 10
_ROUND_STRIDE = 0xD1B54A32D192ED03
_MASK64 = 2**64 - 1


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of splitmix64 (Steele, Lea and Flood 2014; Vigna's constants) for every element of `x`.

    Adds 0x9E3779B97F4A7C15 and applies the finalizer, modulo 2**64. Any shape; returns a new array.
    """
    with np.errstate(over="ignore"):  # numpy warns of the wrap for 0-d input only
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
        """The number of the block that is the `arrival`-th to arrive; any shape, each in [0, num_blocks)."""
        return self._walk(arrival, inverse=False)

    def inverse(self, block: NDArray[np.int64]) -> NDArray[np.int64]:
        """When the block with number `block` arrives; any shape, each in [0, num_blocks)."""
        return self._walk(block, inverse=True)

    def _walk(self, values: NDArray[np.int64], *, inverse: bool) -> NDArray[np.int64]:
        step = self._decipher if inverse else self._encipher
        x = step(values.astype(np.uint64).ravel())
        outside = np.flatnonzero(x >= np.uint64(self.num_blocks))
        while outside.size:
            x[outside] = step(x[outside])
            outside = outside[x[outside] >= np.uint64(self.num_blocks)]
        return x.astype(np.int64).reshape(values.shape)

    def _encipher(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half, mask = np.uint64(self._half_bits), np.uint64(2**self._half_bits - 1)
        left, right = x >> half, x & mask
        for key in self._round_keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        return (left << half) | right

    def _decipher(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half, mask = np.uint64(self._half_bits), np.uint64(2**self._half_bits - 1)
        left, right = x >> half, x & mask
        for key in self._round_keys[::-1]:
            left, right = right ^ (mix(left ^ key) & mask), left
        return (left << half) | right
