"""What the golden datasets hold, by formulas in plain Python: no line of the package is used here.

`DATASETS[name]` is a dict of fields, each a spec such as `int16[2,3]` and its values as JSON: nested lists of
numbers ("nan", "inf" and "-inf" for what JSON lacks), strings for text, base64 for bytes.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from math import prod
from typing import Any

Values = list[Any]
Fields = dict[str, tuple[str, Values]]

# Two JPEG images of 16 x 8 pixels and a grey one of 8 x 8, made once: an encoder of another version writes other bytes.
JPEGS = [
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDACgcHiMeGSgjISMtKygwPGRBPDc3PHtYXUlkkYCZlo+AjIqgtObDoKrarYqMyP/L2u71////m8H////6"
    "/+b9//j/2wBDASstLTw1PHZBQXb4pYyl+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj/wAARCAAIABAD"
    "ASIAAhEBAxEB/8QAFgABAQEAAAAAAAAAAAAAAAAAAAME/8QAGxAAAgIDAQAAAAAAAAAAAAAAABIBAxMyQTH/xAAVAQEBAAAAAAAAAAAAAAAAAAADBP"
    "/EABcRAQEBAQAAAAAAAAAAAAAAABEAAQL/2gAMAwEAAhEDEQA/AMFmZ5TXnhStkh9ugBNdnJq3/9k=",
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDACgcHiMeGSgjISMtKygwPGRBPDc3PHtYXUlkkYCZlo+AjIqgtObDoKrarYqMyP/L2u71////m8H////6"
    "/+b9//j/wAALCAAIAAgBAREA/8QAFAABAAAAAAAAAAAAAAAAAAAAAP/EABcQAAMBAAAAAAAAAAAAAAAAAAACBWL/2gAIAQEAAD8AJMyf/9k=",
]
WORDS = [
    "",
    "plain",
    "naïve café",
    "日本語",
    "🙂👩‍🚀",
    "e\u0301 combining",
    "שלום",
    "a\x00b",
    "two\nlines",
    '"quoted" \\',
]
INTS = {f"{sign}int{bits}": (bits, sign == "") for sign in ("", "u") for bits in (8, 16, 32, 64)}


def shaped(flat: list[Any], shape: tuple[int, ...]) -> Any:
    """Return the flat values as nested lists of this shape, in C order."""
    if not shape:
        return flat[0]
    step = len(flat) // shape[0]
    return [shaped(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def number(dtype: str, k: int) -> Any:
    """Return the k-th value of a dtype: its extremes first, then small values that every float holds exactly."""
    if dtype == "bool":
        return k % 3 == 1
    if dtype in INTS:
        bits, signed = INTS[dtype]
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return [low, high][k] if k < 2 else (k * 37) % 120 - (60 if signed else 0)
    tiny = {"float16": 2.0**-24, "float32": 2.0**-149, "float64": 2.0**-1074}[dtype]
    special = ["nan", "inf", "-inf", -0.0, tiny]
    return special[k] if k < len(special) else (k * 29 % 256 - 128) / 8


def tensor(dtype: str, shape: tuple[int, ...], count: int) -> Values:
    """Return `count` samples of a tensor field."""
    size = prod(shape)
    return [shaped([number(dtype, i * size + j) for j in range(size)], shape) for i in range(count)]


def ragged(dtype: str, inner: tuple[int, ...], count: int) -> Values:
    """Return `count` samples of a ragged field, with 0 to 4 rows each."""
    size, at, out = prod(inner), 0, []
    for i in range(count):
        rows = (i * 3 + 2) % 5
        out.append([shaped([number(dtype, at + r * size + j) for j in range(size)], inner) for r in range(rows)])
        at += rows * size
    return out


def png(i: int) -> str:
    """Return a grey PNG of 4 x 3 pixels with a stored deflate block: every zlib agrees on its bytes."""
    rows = b"".join(b"\0" + bytes((i * 20 + 16 * x + 64 * y) % 256 for x in range(4)) for y in range(3))
    stored = struct.pack("<BHH", 1, len(rows), len(rows) ^ 0xFFFF) + rows
    data = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(rows))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 4, 3, 8, 0, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")]
    packed = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(packed)).decode()


def blob(i: int) -> str:
    """Return bytes of another length for each sample, one of them empty."""
    return base64.b64encode(bytes((i * 7 + j) % 256 for j in range((i * 5) % 17))).decode()


def text(i: int) -> str:
    """Return a string; the first ten are the odd ones."""
    return WORDS[i] if i < len(WORDS) else f"sample {i} " * (i % 4)


def each(make: Callable[[int], Any], count: int, first: int = 0) -> Values:
    """Return `count` values, made from the sample numbers `first`, `first` + 1, ..."""
    return [make(first + i) for i in range(count)]


def tensors(count: int) -> Fields:
    """Every dtype, with shapes of no, one and two axes."""
    shapes = [(), (3,), (2, 2)]
    dtypes = ["bool", *INTS, "float16", "float32", "float64"]
    specs = {dtype: (dtype, shapes[i % 3]) for i, dtype in enumerate(dtypes)}
    return {f"a_{name}": (spec(dtype, shape), tensor(dtype, shape, count)) for name, (dtype, shape) in specs.items()}


def spec(dtype: str, shape: tuple[int, ...]) -> str:
    """Return the spec of a tensor field."""
    return f"{dtype}[{','.join(map(str, shape))}]" if shape else dtype


def variable(count: int) -> Fields:
    """Every kind whose samples differ in size."""
    return {
        "blob": ("bytes", each(blob, count)),
        "photo": ("bytes:jpeg", each(lambda i: JPEGS[i % 2], count)),
        "icon": ("bytes:png", each(png, count)),
        "caption": ("text", each(text, count)),
        "boxes": ("ragged:float32[2]", ragged("float32", (2,), count)),
        "tokens": ("ragged:uint16", ragged("uint16", (), count)),
        "flags": ("ragged:bool[2,2]", ragged("bool", (2, 2), count)),
    }


def mixed(count: int, first: int = 0) -> Fields:
    """Fields that are large enough to be bulk beside fields that are small enough to be resident."""
    signal = [[(first + i) * (x % 8 - 4) for x in range(132)] for i in range(count)]
    return {
        "signal": ("int64[132]", signal),
        "caption": ("text", each(text, count, first)),
        "label": ("int64", [(first + i) * 1_000_003 % 10 - 3 for i in range(count)]),
        "vector": ("float32[4]", [[(first + i) / 4, -0.0, 1.5, j] for i in range(count) for j in [i % 5]]),
    }


def every_kind(count: int) -> Fields:
    """One field of each kind: resident and bulk tensor, bytes, text, ragged."""
    chosen = {name: value for name, value in mixed(count).items() if name in ("signal", "label")}
    return chosen | {name: value for name, value in variable(count).items() if name in ("icon", "caption", "boxes")}


def only_resident(count: int) -> Fields:
    """Fields that are all small."""
    return {
        "label": ("int64", [i * i - 50 for i in range(count)]),
        "score": ("float32", [i / 8 for i in range(count)]),
        "seen": ("bool", [i % 3 == 0 for i in range(count)]),
    }


def free(count: int) -> Fields:
    """Few fields, for a geometry that no writer of ours chooses."""
    return {
        "wave": ("int16[3]", tensor("int16", (3,), count)),
        "blob": ("bytes:png", each(png, count)),
        "label": ("uint32", [i * 11 for i in range(count)]),
    }


def appended(count: int) -> Fields:
    """A field of each kind but bytes, for chunks that are filled up later."""
    return {
        "wave": ("int16[3]", tensor("int16", (3,), count)),
        "caption": ("text", each(text, count)),
        "boxes": ("ragged:float32[2]", ragged("float32", (2,), count)),
        "label": ("uint32", [i * 13 for i in range(count)]),
    }


DATASETS: dict[str, Fields] = {
    "tensors": tensors(5),
    "variable": variable(11),
    "mixed": mixed(21),
    "only_resident": only_resident(37),
    "empty": every_kind(0),
    "one": every_kind(1),
    "splits/train": mixed(6),
    "splits/val": mixed(3, first=6),
    "free": free(20),
    "appended": appended(20),
    "lengths": appended(9),
}
