"""The order contract, rule by rule, in plain Python integers: slow, obvious, and sharing no code with the package.

Tests use it as the oracle. `python tests/reference_order.py` writes formats/streamloader/v1/orders.json.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import floor, frexp
from pathlib import Path
from typing import Any

ORDERS = Path(__file__).resolve().parent.parent / "formats" / "streamloader" / "v1" / "orders.json"
U64 = 2**64


@dataclass(frozen=True)
class Case:
    """What pins an order."""

    name: str
    num_samples: int
    block: int
    lanes: int
    window: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True


def mix(x: int) -> int:
    """Rule 2: the splitmix64 step."""
    z = (x + 0x9E3779B97F4A7C15) % U64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % U64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % U64
    return z ^ (z >> 31)


def keys(case: Case) -> list[int]:
    """Rule 2: w[0..7]."""
    text = b"streamloader/order/1"
    for number in (case.seed, case.epoch, case.num_samples, case.block, case.lanes):
        text += number.to_bytes(8, "little")
    digest = hashlib.sha512(text).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(8)]


def permuted(j: int, num_blocks: int, key: int) -> int:
    """Rule 3: the number of the j-th block to arrive."""
    bits = max(2, (num_blocks - 1).bit_length())
    half = (bits + 1) // 2
    x = j
    while True:
        left, right = x >> half, x % 2**half
        for i in range(10):
            round_key = mix((key + i * 0xD1B54A32D192ED03) % U64)
            left, right = right, left ^ (mix(right ^ round_key) % 2**half)
        x = left * 2**half + right
        if x < num_blocks:
            return x


def arrivals(case: Case) -> list[int]:
    """Rule 3: the samples in the order in which they arrive."""
    n, block = case.num_samples, case.block
    num_blocks = (n + block - 1) // block
    key = keys(case)[0]
    out: list[int] = []
    for j in range(num_blocks):
        number = permuted(j, num_blocks, key)
        out.extend(range(number * block, min(n, (number + 1) * block)))
    return out


def lane_orders(case: Case) -> list[list[int]]:
    """Rules 4 and 5: the arrivals of each lane as the lane emits them."""
    key = keys(case)[1]
    lanes = []
    begin = 0
    for lane in range(case.lanes):
        length = case.num_samples // case.lanes + (1 if lane < case.num_samples % case.lanes else 0)
        keyed = []
        for a in range(begin, begin + length):
            noise = mix(key ^ mix(a)) >> 32
            keyed.append((noise if length <= case.window else (a - begin) * 2**32 + noise * case.window, a))
        lanes.append([a for _, a in sorted(keyed)])
        begin += length
    return lanes


def samples(case: Case) -> list[int]:
    """Rules 6 and 8: the sample at each global position."""
    if not case.shuffle:
        return list(range(case.num_samples))
    arrived, lanes = arrivals(case), lane_orders(case)
    return [arrived[lanes[p % case.lanes][p // case.lanes]] for p in range(case.num_samples)]


def steps(case: Case, batch: int, size: int, remainder: str, start: int) -> list[list[list[int]]]:
    """Rules 6, 7 and 8: the positions of every rank in every step from `start`; p >= N marks a padded row."""
    n, lanes, step = case.num_samples, case.lanes if case.shuffle else 1, batch * size
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
    """Rule 7: the position whose sample stands at `position`."""
    if position < num_samples:
        return position
    return position % num_samples if num_samples < step else position - step


@dataclass(frozen=True)
class Weighted:
    """What pins the draws of an epoch: weights of samples, or of classes if there is the class of each sample."""

    name: str
    weights: tuple[float, ...]
    classes: tuple[int, ...] | None = None
    replacement: bool = True
    seed: int = 0
    epoch: int = 0


def whole(weights: tuple[float, ...]) -> list[int]:
    """Rule 11: weights as integers."""
    exponent = frexp(max(weights))[1]
    exact = [Fraction(weight) for weight in weights]
    total = len(weights) + sum(floor(weight * Fraction(2) ** (31 - exponent)) for weight in exact)
    return [round(weight * Fraction(2) ** (78 - exponent - total.bit_length())) for weight in exact]


def num_draws(case: Weighted) -> int:
    """Rule 11: N."""
    a = whole(case.weights)
    if case.classes is None:
        return len(a) if case.replacement else sum(a) // max(a)
    sizes = [case.classes.count(c) for c in range(len(a))]
    least = min(sizes[c] * sum(a) // a[c] for c in range(len(a)) if a[c])
    return len(case.classes) if case.replacement else least


def draws(case: Weighted) -> list[int]:
    """Rule 11: the samples of an epoch, ascending, as often as they come."""
    n = len(case.classes or case.weights)
    text = b"streamloader/weights/1" + case.seed.to_bytes(8, "little") + n.to_bytes(8, "little")
    digest = hashlib.sha512(text).digest()
    permutation, offset = (int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(2))
    line = [permuted(j, n, permutation) for j in range(n)]
    a, length = whole(case.weights), 2**24 * num_draws(case)
    lies = {}
    if case.classes is None:
        for place, i in enumerate(line):
            before = sum(a[other] for other in line[:place])
            lies[i] = (length * before // sum(a), length * (before + a[i]) // sum(a))
    for c in range(len(a)) if case.classes else ():
        start, stop = (length * sum(a[:end]) // sum(a) for end in (c, c + 1))
        members = [i for i in line if case.classes and case.classes[i] == c]
        for r, i in enumerate(members):
            lies[i] = tuple(start + (stop - start) * end // len(members) for end in (r, r + 1))
    point = (offset + case.epoch * 0x9E3779) % 2**24
    out: list[int] = []
    for i, (begin, end) in sorted(lies.items()):
        out += [i] * ((end + point) // 2**24 - (begin + point) // 2**24)
    return out


@dataclass(frozen=True)
class Packing:
    """What pins rows of documents."""

    name: str
    lengths: tuple[int, ...]
    length: int
    split: bool = True


def groups(case: Packing) -> list[list[int]]:
    """Rule 13: the documents of each group."""
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
    """Rule 13: the (document, piece) of each row."""
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


CASES = [
    Case("empty", 0, 4, 2, 8),
    Case("one sample", 1, 4, 2, 8, seed=3),
    Case("fewer samples than a block", 5, 8, 2, 16, seed=1),
    Case("lanes shorter than the window", 61, 4, 4, 16, seed=1),
    Case("more lanes than samples", 3, 2, 8, 4, seed=2),
    Case("short last block", 131, 8, 2, 16, seed=1),
    Case("short last block, next epoch", 131, 8, 2, 16, seed=1, epoch=1),
    Case("whole blocks", 128, 8, 2, 16, seed=1),
    Case("blocks of one sample", 40, 1, 1, 2, seed=9),
    Case("three lanes", 100, 5, 3, 10, seed=4, epoch=2),
    Case("window of three blocks", 150, 6, 4, 18, seed=12),
    Case("seed above 2^32", 90, 6, 2, 12, seed=2**40 + 7, epoch=2**33),
    Case("largest seed", 90, 6, 2, 12, seed=2**64 - 1),
    Case("no shuffle", 20, 4, 4, 8, seed=1, shuffle=False),
    Case("large", 100_003, 128, 16, 512, seed=42, epoch=5),
]

SHARES = [  # case, batch, ranks, remainder, first position
    ("short last block", 8, 2, "pad", 0),
    ("short last block", 8, 2, "drop", 0),
    ("short last block", 8, 2, "uneven", 0),
    ("short last block", 8, 2, "pad", 48),
    ("lanes shorter than the window", 5, 3, "pad", 0),
    ("lanes shorter than the window", 5, 3, "uneven", 7),
    ("lanes shorter than the window", 2, 8, "drop", 0),
    ("fewer samples than a block", 4, 2, "pad", 0),
    ("more lanes than samples", 4, 4, "pad", 0),
    ("one sample", 2, 2, "pad", 0),
    ("one sample", 2, 2, "drop", 0),
    ("empty", 2, 2, "pad", 0),
    ("no shuffle", 3, 2, "pad", 0),
    ("no shuffle", 3, 2, "uneven", 1),
]

CLASSES = (0, 1, 1, -1, 0, 0, 0, 2, 0, 1, 0, 0, 3, 0, 2, 0, 1, 0, 0, 0, 0, 0, 2, 0)
WEIGHTED = [
    Weighted("weights of samples", (0.5, 1, 3, 0, 0.25, 7, 1, 1, 1, 2), seed=1),
    Weighted("weights of samples, next epoch", (0.5, 1, 3, 0, 0.25, 7, 1, 1, 1, 2), seed=1, epoch=1),
    Weighted("weights of samples without replacement", (3, 1, 2, 0.1, 3, 3, 1e-9, 2), replacement=False, seed=2),
    Weighted("one sample has all the weight", (0, 1, 0), seed=2**64 - 1, epoch=2**40),
    Weighted("equal weights", (1,) * 9),
    Weighted("balanced classes", (1, 1, 1, 0), CLASSES, seed=5),
    Weighted("balanced classes, next epoch", (1, 1, 1, 0), CLASSES, seed=5, epoch=1),
    Weighted("classes without replacement", (2, 1, 1, 0), CLASSES, replacement=False, seed=6, epoch=3),
    Weighted("shares that are no fractions of two", (0.7, 0.2, 0.1, 0.4), CLASSES, seed=7),
]


LENGTHS = tuple(permuted(j, 400, 3) ** 2 // 1000 for j in range(400))  # 0 to 159, most of them short
SHORT = tuple(permuted(j, 1000, 5) % 4 for j in range(1000))
PACKINGS = [
    Packing("one document", (7,), 8),
    Packing("a document of a whole row", (8,), 8),
    Packing("documents that fit, and an empty one", (3, 5, 0, 4, 4, 1, 6), 8),
    Packing("documents that are longer than a row", (3, 8, 20, 9, 16, 0, 2), 8),
    Packing("documents that are longer than a row are left out", (3, 8, 20, 9, 16, 0, 2), 8, split=False),
    Packing("a document longer than a group", (1, 2100, 1, 1), 8),
    Packing("several groups", LENGTHS, 60),
    Packing("several groups without documents longer than a row", SHORT, 2, split=False),
    Packing("rows of one element", (2, 0, 1, 3), 1),
]


def sha256(numbers: list[int]) -> str:
    """Of the numbers as u64, little-endian."""
    return hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in numbers)).hexdigest()


def document() -> dict[str, Any]:
    """Everything that orders.json pins."""
    orders = []
    for case in CASES:
        order = samples(case)
        pinned = {"samples": order} if len(order) <= 200 else {"samples_u64le_sha256": sha256(order)}
        orders.append({**asdict(case), "keys": [f"{key:016x}" for key in keys(case)], **pinned})
    by_name = {case.name: case for case in CASES}
    shares = []
    for name, batch, ranks, remainder, start in SHARES:
        case, order = by_name[name], samples(by_name[name])
        positions = steps(case, batch, ranks, remainder, start)
        taken = [
            [[order[repeated(p, case.num_samples, batch * ranks)] for p in rows] for rows in step] for step in positions
        ]
        shares.append(
            {"order": name, "batch": batch, "ranks": ranks, "remainder": remainder, "position": start}
            | {"positions": positions, "samples": taken}
        )
    drawn = [{**asdict(case), "draws": draws(case)} for case in WEIGHTED]
    packed = [{**asdict(case), "rows": rows(case)} for case in PACKINGS]
    return {
        "about": "Golden orders of order version 1, made by tests/reference_order.py. keys: w[0..7] in hexadecimal. "
        "samples: the sample at each global position. shares: positions and samples by step, rank and row; a position "
        "of num_samples or more is a padded row. weights: the samples that an epoch draws by weights, ascending. "
        "packing: the [document, piece] of each row. Integers may exceed 2^53.",
        "version": 1,
        "mix": [[f"{x:016x}", f"{mix(x):016x}"] for x in (0, 1, 0x9E3779B97F4A7C15, U64 - 1)],
        "blocks": [
            {"num_blocks": n, "key": f"{key:016x}", "arriving": [permuted(j, n, key) for j in range(n)]}
            for n, key in ((1, 7), (2, 7), (5, 7), (16, 7), (17, 7), (33, U64 - 1))
        ],
        "orders": orders,
        "shares": shares,
        "weights": drawn,
        "packing": packed,
    }


def text() -> str:
    """orders.json: one line for each entry of a list."""
    lines = []
    for name, value in document().items():
        if isinstance(value, list):
            entries = ",\n  ".join(json.dumps(entry) for entry in value)
            lines.append(f'"{name}": [\n  {entries}\n ]')
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    return "{\n " + ",\n ".join(lines) + "\n}\n"


if __name__ == "__main__":
    ORDERS.write_text(text(), encoding="utf-8")
