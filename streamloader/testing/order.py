"""The order of samples, rule by rule of SPEC.md, in plain Python integers: slow, obvious, independent of the loader.

It imports nothing of streamloader, so that a mistake is not made twice. Compare another implementation of the format
with it, or what a training loop got:

    order = Order.of_state(dataset.state_dict())
    check_epoch(order, [indexes of rank 0, indexes of rank 1], batch=32)
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from math import floor, frexp
from typing import Any

U64 = 2**64


class OrderError(AssertionError):
    """Batches are not those of the order. The message has the first differences, and what is missing or repeated."""


@dataclass(frozen=True)
class Order:
    """What determines the order of an epoch. `block` and `window` count samples.

    With `where=`, `exclude=` or `weights=`, the order is that of the numbers within the selected or drawn samples.
    """

    num_samples: int
    block: int
    lanes: int
    window: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Order":
        """Return the order of the epoch of a state that a `StreamingDataset` or `NumpyDataset` returned."""
        return cls(state["samples"], **state["order"], **{key: state[key] for key in ("seed", "epoch", "shuffle")})


def mix(x: int) -> int:
    """Return the splitmix64 step of an unsigned 64-bit integer (rule 2)."""
    z = (x + 0x9E3779B97F4A7C15) % U64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % U64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % U64
    return z ^ (z >> 31)


def keys(order: Order) -> list[int]:
    """Return the eight keys of the epoch, w[0..7] (rule 2)."""
    text = b"streamloader/order/1"
    for number in (order.seed, order.epoch, order.num_samples, order.block, order.lanes):
        text += number.to_bytes(8, "little")
    digest = hashlib.sha512(text).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(8)]


def permuted(j: int, num_blocks: int, key: int) -> int:
    """Return the number of the j-th block to arrive (rule 3)."""
    bits = max(2, (num_blocks - 1).bit_length())
    half = (bits + 1) // 2
    side = 1 << half
    x = j
    while True:
        left, right = x >> half, x % side
        for i in range(10):
            round_key = mix((key + i * 0xD1B54A32D192ED03) % U64)
            left, right = right, left ^ (mix(right ^ round_key) % side)
        x = left * side + right
        if x < num_blocks:
            return x


def arrivals(order: Order) -> list[int]:
    """Return the samples in the order in which they arrive (rule 3)."""
    n, block = order.num_samples, order.block
    num_blocks = (n + block - 1) // block
    key = keys(order)[0]
    out: list[int] = []
    for j in range(num_blocks):
        number = permuted(j, num_blocks, key)
        out.extend(range(number * block, min(n, (number + 1) * block)))
    return out


def lane_orders(order: Order) -> list[list[int]]:
    """Return the arrivals of each lane, in the order in which the lane emits them (rules 4 and 5)."""
    key = keys(order)[1]
    lanes = []
    begin = 0
    for lane in range(order.lanes):
        length = order.num_samples // order.lanes + (1 if lane < order.num_samples % order.lanes else 0)
        keyed = []
        for a in range(begin, begin + length):
            noise = mix(key ^ mix(a)) >> 32
            keyed.append((noise if length <= order.window else (a - begin) * 2**32 + noise * order.window, a))
        lanes.append([a for _, a in sorted(keyed)])
        begin += length
    return lanes


def samples(order: Order) -> list[int]:
    """Return the sample at each global position of the epoch (rules 6 and 8)."""
    if not order.shuffle:
        return list(range(order.num_samples))
    arrived, lanes = arrivals(order), lane_orders(order)
    return [arrived[lanes[p % order.lanes][p // order.lanes]] for p in range(order.num_samples)]


def steps(order: Order, batch: int, size: int, remainder: str, start: int) -> list[list[list[int]]]:
    """Return `[step][rank]`: the positions of each rank in each step from position `start` (rules 6, 7 and 8).

    `batch` is the number of samples of a rank in a step, `size` the number of ranks. A position of N or more is a
    padded row, of which `repeated` returns the position that it repeats.
    """
    n, lanes, step = order.num_samples, order.lanes if order.shuffle else 1, batch * size
    out = []
    for begin in range(start, n, step):
        rows = range(begin, begin + step)
        if begin + step > n:
            if remainder == "drop":
                break
            if remainder == "uneven":
                rows = range(begin, n)
        if lanes % size == 0:
            out.append([[p for p in rows if p % size == rank] for rank in range(size)])
        else:
            ranked = sorted(rows, key=lambda p: (p % lanes, p))
            out.append([ranked[rank * batch : (rank + 1) * batch] for rank in range(size)])
    return out


def repeated(position: int, num_samples: int, step: int) -> int:
    """Return the position whose sample is at `position`, which may be a padded row; `step` is batch * size (rule 7)."""
    if position < num_samples:
        return position
    return position % num_samples if num_samples < step else position - step


@dataclass(frozen=True)
class Weighted:
    """What determines the draws of an epoch: weights of samples, or of classes if `classes` has that of each sample."""

    weights: tuple[float, ...]
    classes: tuple[int, ...] | None = None
    replacement: bool = True
    seed: int = 0
    epoch: int = 0


def whole(weights: tuple[float, ...]) -> list[int]:
    """Return the weights as integers (rule 11)."""
    exponent = frexp(max(weights))[1]
    exact = [Fraction(weight) for weight in weights]
    total = len(weights) + sum(floor(weight * Fraction(2) ** (31 - exponent)) for weight in exact)
    return [round(weight * Fraction(2) ** (78 - exponent - total.bit_length())) for weight in exact]


def num_draws(case: Weighted) -> int:
    """Return N, the number of samples that an epoch draws (rule 11)."""
    a = whole(case.weights)
    if case.classes is None:
        return len(a) if case.replacement else sum(a) // max(a)
    sizes = [case.classes.count(c) for c in range(len(a))]
    least = min(sizes[c] * sum(a) // a[c] for c in range(len(a)) if a[c])
    return len(case.classes) if case.replacement else least


def draws(case: Weighted) -> list[int]:
    """Return the samples that an epoch draws, ascending, each as often as it is drawn (rule 11)."""
    n = len(case.classes or case.weights)
    text = b"streamloader/weights/1" + case.seed.to_bytes(8, "little") + n.to_bytes(8, "little")
    digest = hashlib.sha512(text).digest()
    permutation, offset = (int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(2))
    line = [permuted(j, n, permutation) for j in range(n)]
    a, length = whole(case.weights), 2**24 * num_draws(case)
    lies: dict[int, tuple[int, int]] = {}
    if case.classes is None:
        for place, i in enumerate(line):
            before = sum(a[other] for other in line[:place])
            lies[i] = (length * before // sum(a), length * (before + a[i]) // sum(a))
    for c in range(len(a)) if case.classes else ():
        start, stop = (length * sum(a[:end]) // sum(a) for end in (c, c + 1))
        members = [i for i in line if case.classes and case.classes[i] == c]
        for r, i in enumerate(members):
            lies[i] = (start + (stop - start) * r // len(members), start + (stop - start) * (r + 1) // len(members))
    point = (offset + case.epoch * 0x9E3779) % 2**24
    out: list[int] = []
    for i, (begin, end) in sorted(lies.items()):
        out += [i] * ((end + point) // 2**24 - (begin + point) // 2**24)
    return out


@dataclass(frozen=True)
class Packing:
    """What determines the rows that documents are packed into: their lengths, and the length of a row."""

    lengths: tuple[int, ...]
    length: int
    split: bool = True


def groups(case: Packing) -> list[list[int]]:
    """Return the documents of each group (rule 13)."""
    out: list[list[int]] = [[]]
    elements = 0
    for document, size in enumerate(case.lengths):
        out[-1].append(document)
        elements += size if case.split or size <= case.length else 0
        if elements >= 256 * case.length or len(out[-1]) == 65536:
            out.append([])
            elements = 0
    return out


def rows(case: Packing) -> list[list[tuple[int, int]]]:
    """Return the (document, piece) pairs of each row (rule 13)."""
    out: list[list[tuple[int, int]]] = []
    for group in groups(case):
        rests = []
        for document in group:
            size = case.lengths[document]
            if size <= case.length or case.split:
                out += [[(document, piece)] for piece in range(size // case.length)]
                rests.append((size % case.length, document))
        others: list[list[tuple[int, int]]] = []
        free: list[tuple[int, int]] = []  # the free space of each row, and when it got its last document, from late on
        for turn, (size, document) in enumerate(sorted(rests, key=lambda rest: (-rest[0], rest[1]))):
            if size:
                fits = [(space, since, row) for row, (space, since) in enumerate(free) if space >= size]
                space, _, row = min(fits, default=(case.length, 0, len(others)))
                if row == len(others):
                    others.append([])
                    free.append((0, 0))
                others[row].append((document, case.lengths[document] // case.length))
                free[row] = space - size, -turn
        out += sorted(sorted(row) for row in others)
    return out


def rank_batches(
    order: Order, batch: int, size: int, remainder: str = "pad", start: int = 0
) -> list[list[list[tuple[int, bool]]]]:
    """Return `[step][rank]`: the samples of a batch, each with whether it is valid, so no padding.

    `batch` is the number of samples of a rank in a step, `size` the number of ranks, `remainder` "pad", "drop" or
    "uneven", and `start` the first position, such as that of a state. With "uneven", a batch of the last step may be
    empty: a loader leaves it out.
    """
    sample_at, n = samples(order), order.num_samples
    positions = steps(order, batch, size, remainder, start)
    return [[[(sample_at[repeated(p, n, batch * size)], p < n) for p in rank] for rank in step] for step in positions]


def check_epoch(
    order: Order, ranks: Sequence[Iterable[Any]], *, batch: int, remainder: str = "pad", start: int = 0
) -> None:
    """Raise `OrderError` unless the batches of all ranks are those of the order: each sample once, in its place.

    `ranks[r]` has the batches of rank r from position `start` to the end of the epoch: dicts with the column `index` of
    `with_index=True` and perhaps `valid`, or arrays, tensors or lists of the numbers of samples.
    """
    expected = rank_batches(order, batch, len(ranks), remainder, start)
    found = [[_rows(each) for each in batches] for batches in ranks]
    wrong = []
    for rank, batches in enumerate(found):
        mine = [each[rank] for each in expected if each[rank]]  # the last step may have no samples for it
        for step, (rows, right) in enumerate(zip_longest(batches, mine)):
            if rows is None or right is None:
                wrong.append(f"rank {rank} has {len(batches)} batches instead of {len(mine)}")
                break
            if not _same(rows, right):
                wrong.append(f"rank {rank}, batch {step}: {_text(rows)} instead of {_text(right)}")
    came = Counter(sample for batches in found for rows in batches for sample, valid in rows if valid is not False)
    due = Counter(sample for step in expected for rows in step for sample, valid in rows if valid)
    pads = Counter(sample for step in expected for rows in step for sample, valid in rows if not valid)
    if wrong:
        lost = sorted((due - came).elements())
        more = sorted((came - due - pads).elements())
        counts = f"{len(lost)} samples are missing {lost[:9]}, {len(more)} come too often {more[:9]}"
        raise OrderError("; ".join([*wrong[:3], f"{len(wrong)} differences in all", counts]))


def _rows(batch: Any) -> list[tuple[int, bool | None]]:
    """Return the samples of a batch, each with whether it is valid, None if the batch does not tell."""
    columns = batch if isinstance(batch, Mapping) else {"index": batch}
    index, valid = (
        getattr(each, "tolist", lambda each=each: each)() for each in (columns["index"], columns.get("valid"))
    )
    return list(zip(index, [None] * len(index) if valid is None else valid, strict=True))


def _same(rows: list[tuple[int, bool | None]], right: list[tuple[int, bool]]) -> bool:
    """Return whether a batch is the right one."""
    return len(rows) == len(right) and all(
        sample == other and valid in (None, flag) for (sample, valid), (other, flag) in zip(rows, right, strict=True)
    )


def _text(rows: Sequence[tuple[int, bool | None]]) -> str:
    """Return the samples of a batch for a message; padding is in parentheses."""
    shown = [f"({sample})" if valid is False else str(sample) for sample, valid in rows[:12]]
    return f"[{', '.join(shown)}{', ...' if len(rows) > 12 else ''}]"
