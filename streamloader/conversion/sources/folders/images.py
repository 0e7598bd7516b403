"""Encoded images: which files are images, and a cheap test that one is whole."""

from __future__ import annotations

import io
import struct

ENCODINGS = {
    "jpg": "jpeg",
    "jpeg": "jpeg",
    "png": "png",
    "webp": "webp",
    "gif": "gif",
    "bmp": "bmp",
    "tif": "tiff",
    "tiff": "tiff",
    "ppm": "ppm",
    "pgm": "pgm",
    "jp2": "jp2",
}  # by lower-case extension


def image_problem(data: bytes) -> str:
    """Return why `data` cannot be an image that decodes, or nothing.

    Headers and PNG checksums are read, pixels are not: some ten microseconds an image. The extension may lie
    about the encoding: ImageNet has such files, and decoders look at the bytes.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            image.verify()
    except UnidentifiedImageError:
        return f"its {len(data)} bytes have no known image header"
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        return str(error)
    if data[:2] == b"\xff\xd8" and data.rfind(b"\xff\xd9") < 0:  # Pillow's verify() does not look so far
        return f"its {len(data)} bytes lack the end marker of a JPEG: it is truncated"
    return ""
