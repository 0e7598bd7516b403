"""The golden orders, by the independent functions of `streamloader.testing.order`.

`python tests/reference_order.py` writes formats/streamloader/v1/orders.json.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamloader.testing.order import (
    U64,
    Order,
    Packing,
    Weighted,
    draws,
    keys,
    mix,
    permuted,
    repeated,
    rows,
    samples,
    steps,
)

ORDERS = Path(__file__).resolve().parent.parent / "formats" / "streamloader" / "v1" / "orders.json"

CASES = {
    "empty": Order(0, 4, 2, 8),
    "one sample": Order(1, 4, 2, 8, seed=3),
    "fewer samples than a block": Order(5, 8, 2, 16, seed=1),
    "lanes shorter than the window": Order(61, 4, 4, 16, seed=1),
    "more lanes than samples": Order(3, 2, 8, 4, seed=2),
    "short last block": Order(131, 8, 2, 16, seed=1),
    "short last block, next epoch": Order(131, 8, 2, 16, seed=1, epoch=1),
    "whole blocks": Order(128, 8, 2, 16, seed=1),
    "blocks of one sample": Order(40, 1, 1, 2, seed=9),
    "three lanes": Order(100, 5, 3, 10, seed=4, epoch=2),
    "window of three blocks": Order(150, 6, 4, 18, seed=12),
    "seed above 2^32": Order(90, 6, 2, 12, seed=2**40 + 7, epoch=2**33),
    "largest seed": Order(90, 6, 2, 12, seed=2**64 - 1),
    "no shuffle": Order(20, 4, 4, 8, seed=1, shuffle=False),
    "large": Order(100_003, 128, 16, 512, seed=42, epoch=5),
}

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
WEIGHTED = {
    "weights of samples": Weighted((0.5, 1, 3, 0, 0.25, 7, 1, 1, 1, 2), seed=1),
    "weights of samples, next epoch": Weighted((0.5, 1, 3, 0, 0.25, 7, 1, 1, 1, 2), seed=1, epoch=1),
    "weights of samples without replacement": Weighted((3, 1, 2, 0.1, 3, 3, 1e-9, 2), replacement=False, seed=2),
    "one sample has all the weight": Weighted((0, 1, 0), seed=2**64 - 1, epoch=2**40),
    "equal weights": Weighted((1,) * 9),
    "balanced classes": Weighted((1, 1, 1, 0), CLASSES, seed=5),
    "balanced classes, next epoch": Weighted((1, 1, 1, 0), CLASSES, seed=5, epoch=1),
    "classes without replacement": Weighted((2, 1, 1, 0), CLASSES, replacement=False, seed=6, epoch=3),
    "shares that are no fractions of two": Weighted((0.7, 0.2, 0.1, 0.4), CLASSES, seed=7),
}


LENGTHS = tuple(permuted(j, 400, 3) ** 2 // 1000 for j in range(400))  # 0 to 159, most of them short
SHORT = tuple(permuted(j, 1000, 5) % 4 for j in range(1000))
PACKINGS = {
    "one document": Packing((7,), 8),
    "a document of a whole row": Packing((8,), 8),
    "documents that fit, and an empty one": Packing((3, 5, 0, 4, 4, 1, 6), 8),
    "documents that are longer than a row": Packing((3, 8, 20, 9, 16, 0, 2), 8),
    "documents that are longer than a row are left out": Packing((3, 8, 20, 9, 16, 0, 2), 8, split=False),
    "a document longer than a group": Packing((1, 2100, 1, 1), 8),
    "several groups": Packing(LENGTHS, 60),
    "several groups without documents longer than a row": Packing(SHORT, 2, split=False),
    "rows of one element": Packing((2, 0, 1, 3), 1),
}


def sha256(numbers: list[int]) -> str:
    """Of the numbers as u64, little-endian."""
    return hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in numbers)).hexdigest()


def document() -> dict[str, Any]:
    """Everything that orders.json pins."""
    orders = []
    for name, case in CASES.items():
        order = samples(case)
        pinned = {"samples": order} if len(order) <= 200 else {"samples_u64le_sha256": sha256(order)}
        orders.append({"name": name, **asdict(case), "keys": [f"{key:016x}" for key in keys(case)], **pinned})
    shares = []
    for name, batch, ranks, remainder, start in SHARES:
        case, order = CASES[name], samples(CASES[name])
        positions = steps(case, batch, ranks, remainder, start)
        taken = [
            [[order[repeated(p, case.num_samples, batch * ranks)] for p in rows] for rows in step] for step in positions
        ]
        shares.append(
            {"order": name, "batch": batch, "ranks": ranks, "remainder": remainder, "position": start}
            | {"positions": positions, "samples": taken}
        )
    drawn = [{"name": name, **asdict(case), "draws": draws(case)} for name, case in WEIGHTED.items()]
    packed = [{"name": name, **asdict(case), "rows": rows(case)} for name, case in PACKINGS.items()]
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
