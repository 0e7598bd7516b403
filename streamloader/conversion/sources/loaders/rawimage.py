"""Images as MDS and LitData store them: encoded ones as they are, those of Pillow as their pixels."""

from __future__ import annotations

import struct
from typing import Any

from streamloader.conversion.sources.folders.images import image_problem

_HEAD = struct.Struct("<III")
_BYTES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "I;16": 2}  # of a pixel, for the modes that a PNG keeps as they are
_MAX_SIDE = (1 << 31) - 1


def image(data: bytes) -> bytes:
    """Return an encoded image. Raises ValueError for one that cannot be decoded."""
    problem = image_problem(data)
    if problem:
        raise ValueError(f"the image cannot be decoded: {problem}")
    return data


def raw_image(data: bytes) -> Any:
    """Return a Pillow image from u32 width, height and length of the mode, the mode, and its pixels.

    Raises ValueError for a damaged one, and for a mode that no PNG holds without loss.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"the image has {len(data)} bytes, too few for its header")
    width, height, length = _HEAD.unpack_from(data)
    mode = bytes(data[_HEAD.size : _HEAD.size + length]).decode("ascii", "replace") if length <= 8 else "?"
    if mode not in (*_BYTES, "1"):
        raise ValueError(f"the image has the mode {mode!r}, only {', '.join((*_BYTES, '1'))} become PNG without loss")
    pixels = data[_HEAD.size + length :]
    needed = height * ((width + 7) // 8 if mode == "1" else width * _BYTES[mode])
    if len(pixels) != needed or not 0 < width <= _MAX_SIDE or not 0 < height <= _MAX_SIDE:
        raise ValueError(f"the image of {width} x {height} pixels needs {needed} bytes, it has {len(pixels)}")
    from PIL import Image

    return Image.frombytes(mode, (width, height), bytes(pixels))
