"""Random numbers of many samples at once, each sample's keyed by (seed, epoch, position) alone.

Row i of `draws(seed, epoch, positions, count)` is, bit for bit,

    key = np.array([seed, epoch], np.uint64)
    counter = np.array([0, 0, 1, positions[i]], np.uint64)
    np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)

computed for all rows together, since making a generator for each sample costs more than a small image's crop. A
transform's generator starts at counter [0, 0, 0, position], 2^128 blocks away: the two never share a number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), table 2 and section 3.3.
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_MASK = (1 << 64) - 1

Words = NDArray[np.uint64]


def draws(seed: int, epoch: int, positions: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return numbers in [0, 1), shape (positions, count); see the module for which."""
    blocks = -(-count // 4)
    rows = np.repeat(positions.astype(np.uint64), blocks)
    number = np.tile(np.arange(1, blocks + 1, dtype=np.uint64), len(positions))  # numpy counts before it draws
    words = [number, np.zeros_like(rows), np.ones_like(rows), rows]
    key = (seed, epoch)
    for step in range(_ROUNDS):
        keys = [np.uint64((part + step * weyl) & _MASK) for part, weyl in zip(key, _WEYL, strict=True)]
        high0, low0 = _multiply(words[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
    raw = np.stack(words, axis=1).reshape(len(positions), 4 * blocks)[:, :count]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _multiply(words: Words, by: int) -> tuple[Words, Words]:
    """Return the high and low 64 bits of each product of 128 bits."""
    half, low_mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b = words >> half, words & low_mask
    c, d = np.uint64(by >> 32), np.uint64(by & 0xFFFFFFFF)
    middle = a * d + (b * d >> half)  # each fits: (2^32 - 1)^2 + 2^32 - 1 < 2^64
    other = b * c + (middle & low_mask)
    return a * c + (middle >> half) + (other >> half), words * np.uint64(by)
