"""Turns the bytes that a fuzzer draws into edits of valid documents and files.

A valid file with a few edits gets past the checks of its first bytes, and the input that says what to edit is short.
The same input always gives the same edits.
"""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

INTEGERS = [*range(-2, 18), 31, 64, 100, 127, 128, 255, 256, 1000, 4096, 65535, 65536]
INTEGERS += [sign * 2**bits + more for bits in (24, 31, 32, 53, 62, 63, 64) for sign in (1, -1) for more in (-1, 0, 1)]
INTEGERS += [10**30, -(10**30), 10**400]
OTHERS: list[Any] = [
    None,
    True,
    False,
    0.0,
    -0.0,
    1.5,
    -1e300,
    1e300,
    1e-320,
    float("nan"),
    float("inf"),
    float("-inf"),
]
OTHERS += ["", "x", "..", "../x", "/etc/passwd", "a/b", "é\u0000", "\ud800", "file:///etc/passwd", "memory://x", "NaN"]
OTHERS += ["[" * 3000, "0" * 5000, [], {}, [[]], [None], {"": None}, [0, 0], [1, -1], [2**63] * 3, ["a", "a"]]
MOST_EDITS = 12


class Draw:
    """Reads numbers, choices and bytes from the bytes of one input; behind its end everything is 0 or empty."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes, fewer at the end."""
        self._at += count
        return self._data[self._at - count : self._at]

    def rest(self) -> bytes:
        """Return all bytes that are left."""
        return self.take(max(0, len(self._data) - self._at))

    def below(self, limit: int) -> int:
        """Return a number from 0 to `limit` - 1; of one byte or as many as `limit` needs."""
        return int.from_bytes(self.take(max(1, ((limit - 1).bit_length() + 7) // 8)), "little") % max(1, limit)

    def choice(self, values: Any) -> Any:
        """Return one of the values."""
        return values[self.below(len(values))]

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def times(self, most: int = MOST_EDITS) -> Iterator[int]:
        """Count up to `most` edits, as long as there are bytes."""
        for number in range(most):
            if not self:
                return
            yield number

    def integer(self) -> int:
        """Return an integer at which something changes, or any of up to eight bytes."""
        kind = self.below(3)
        if kind == 0:
            return self.choice(INTEGERS)
        return int.from_bytes(self.take(8 if kind == 1 else 2), "little", signed=kind == 1)

    def value(self) -> Any:
        """Return any value of JSON."""
        kind = self.below(6)
        if kind < 2:
            return self.integer()
        if kind < 4:
            return copy.deepcopy(self.choice(OTHERS))
        if kind == 4:
            return self.take(self.below(40)).decode("latin-1")
        return [copy.deepcopy(self.choice(INTEGERS + OTHERS)) for _ in range(self.below(5))]


def edited_bytes(data: bytes, draw: Draw) -> bytes:
    """Return bytes with edits: replaced, inserted, removed, copied and repeated runs, other integers, a cut end."""
    out = bytearray(data)
    for _ in draw.times():
        kind, at = draw.below(9), draw.below(len(out) + 1)
        if kind == 0:
            new = draw.take(1 + draw.below(16))
            out[at : at + len(new)] = new
        elif kind == 1:
            out[at:at] = draw.take(1 + draw.below(32))
        elif kind == 2:
            del out[at : at + 1 + draw.below(256)]
        elif kind == 3:
            start = draw.below(len(out) + 1)
            part = out[start : start + 1 + draw.below(256)]
            out[at : at + len(part)] = part
        elif kind in (4, 5):
            width = draw.choice([1, 2, 4, 8])
            new = (draw.integer() % 2 ** (8 * width)).to_bytes(width, "little" if kind == 4 else "big")
            out[at : at + width] = new
        elif kind == 6:
            out[at : at + 1] = bytes(byte ^ 1 << draw.below(8) for byte in out[at : at + 1])
        elif kind == 7:
            out[at:at] = bytes(out[at : at + 1 + draw.below(64)]) * draw.below(64)
        elif draw.below(2):
            del out[at:]
        else:
            out[at:] = draw.take(draw.below(64))
    return bytes(out)


Place = tuple[Any, Any]  # a list or dict, and an index or key in it


def places(document: Any) -> Iterator[Place]:
    """Yield where each value of a document is."""
    keys = document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    for key, value in list(keys):
        yield document, key
        yield from places(value)


def edited_json(document: Any, draw: Draw, chosen: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a copy of a JSON document with edits: other values, keys and types, and parts removed or copied.

    `chosen` returns the part of the document in which edits are made.
    """
    document = json.loads(json.dumps(document))
    for _ in draw.times():
        found = list(places(chosen(document)))
        if not found:
            break
        kind, (inside, key) = draw.below(7), draw.choice(found)
        if kind < 3:
            inside[key] = draw.value()
        elif kind == 3:
            del inside[key]
        elif kind == 4:
            other, where = draw.choice(found)
            # a copy of what encloses it would double the document with each edit
            copied = (
                json.dumps(other[where]) if where in (other if isinstance(other, dict) else range(len(other))) else ""
            )
            if 0 < len(copied) < 4096:
                inside[key] = json.loads(copied)
        elif kind == 5 and isinstance(inside, dict):
            inside[draw.choice([str(draw.value()), *inside])] = inside[key]
        elif isinstance(inside, list):
            inside[draw.below(len(inside) + 1) : 0] = [draw.value() for _ in range(draw.below(4))]
        elif isinstance(inside[key], int):
            inside[key] += draw.choice([-1, 1, 2**32, inside[key]])
        else:
            inside[str(draw.value())] = draw.value()
    return document
