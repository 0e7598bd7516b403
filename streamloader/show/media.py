"""What a browser can show of values: images of arrays, and encoded images, audio and videos that it decodes itself."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 200_000  # of an encoded image: larger ones are sent smaller
THUMBNAIL = 640  # pixels of the longer side of those
MOST_PIXELS = 1 << 28  # of an image whose header is believed: a browser that decodes more may fail
LEAST_SIDE = 160  # a smaller heat map is enlarged, so that its elements can be seen
MOST_SIDE = 512  # a larger array is thinned out
# colours of a heat map, from low to high, that are told apart in grey too; between them it is linear
_COLOURS = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))
# the first bytes of files, and where they are
_AUDIO = ((0, b"fLaC", "audio/flac"), (0, b"OggS", "audio/ogg"), (0, b"ID3", "audio/mpeg"), (8, b"WAVE", "audio/wav"))
_MPEG_SYNC = (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")
_VIDEO = ((4, b"ftyp", "video/mp4"), (0, b"\x1aE\xdf\xa3", "video/webm"))
_IMAGES = ("JPEG", "PNG", "GIF", "WEBP", "BMP")  # that every browser shows
# Pillow's decoder of EPS runs Ghostscript, and that of WMF is one of Windows. Not every Pillow has AVIF, the last one
_FORMATS = (*_IMAGES, "DIB", "TIFF", "JPEG2000", "PPM", "ICO", "AVIF")
_ORIENTATION = 0x0112  # the tag of EXIF, and how its values turn an image
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# what Pillow's readers raise for damaged bytes
_ERRORS = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, struct.error)
_LARGE_PIXELS = 1 << 24


class Media(NamedTuple):
    """A file that a browser shows. `read` returns its bytes, which are made when it is asked for, of `nbytes` bytes.

    `memory`: the bytes that `read` takes meanwhile, if they are many.
    """

    type: str
    read: Callable[[], bytes]
    nbytes: int
    memory: int = 0


class ImageSize(NamedTuple):
    """The format of an encoded image, and its size in pixels as it is shown, turned by its EXIF orientation.

    `deep`: it has more than 8 bits in a channel, which are shown from the least to the largest value.
    """

    format: str
    width: int
    height: int
    deep: bool = False


def image_size(data: bytes) -> ImageSize | None:
    """Return the format and size of an encoded image by its header; None if it is none, or too large to be shown."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images: these are checked here
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                turned = image.getexif().get(_ORIENTATION, 1) >= 5
                width, height = image.size[::-1] if turned else image.size
                small = width * height <= MOST_PIXELS
                return ImageSize(image.format or "", width, height, image.mode[0] in "IF") if small else None
    except (*_ERRORS, Image.DecompressionBombError):
        return None


def encoded_image(data: bytes, of: ImageSize) -> Media:
    """Return an encoded image as it is, or, if it is large or in a format that browsers lack, a smaller copy."""
    pixels = of.width * of.height
    if of.format in _IMAGES and len(data) <= MOST_BYTES and pixels <= _LARGE_PIXELS and not of.deep:
        return Media(f"image/{of.format.lower()}", lambda: data, len(data))
    return Media("image/png", lambda: _thumbnail(data), len(data), 4 * pixels)


def _thumbnail(data: bytes) -> bytes:
    """Return a smaller image as PNG; what does not decode is an image of one grey pixel."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            image.draft("RGB", (THUMBNAIL, THUMBNAIL))  # of JPEG, which decodes fewer pixels
            image.load()
            # not by ImageOps.exif_transpose, which writes the EXIF data again and fails for odd ones
            turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
            small = Image.fromarray(_to_bytes(np.asarray(image))) if image.mode[0] in "IF" else image
            small.thumbnail((THUMBNAIL, THUMBNAIL))
            small = small if turn is None else small.transpose(Image.Transpose[turn])
            return _png(small if small.mode in ("L", "RGB", "RGBA") else small.convert("RGB"))
    except (*_ERRORS, Image.DecompressionBombError):
        return _png(Image.new("L", (1, 1), 128))


def media_type(data: bytes) -> str:
    """Return the type of encoded audio or video by its first bytes, "" for anything else."""
    head = data[:12]
    if head[:4] == b"RIFF" and head[8:12] != b"WAVE":
        return ""
    found = [kind for at, sign, kind in (*_AUDIO, *_VIDEO) if head[at : at + len(sign)] == sign]
    return found[0] if found else "audio/mpeg" if head[:2] in _MPEG_SYNC else ""


def pixels(values: NDArray[Any]) -> Media:
    """Return an image of pixels, (height, width) or (height, width, channels) with 1, 3 or 4 channels.

    uint8 as it is; others from their least to their largest value.
    """
    return Media("image/png", lambda: _png_of(_to_bytes(values)), values.nbytes)


def _to_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    if values.dtype == np.uint8:
        return values
    scaled = _scaled(values, value_range(values)) * 255
    return np.nan_to_num(scaled, nan=0, posinf=255, neginf=0).clip(0, 255).astype(np.uint8)


def value_range(values: NDArray[Any]) -> tuple[float, float]:
    """Return the least and the largest finite value, or magnitude of complex ones; (0, 0) if there is none."""
    values = np.abs(values) if values.dtype.kind == "c" else values
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _scaled(values: NDArray[Any], limits: tuple[float, float]) -> NDArray[np.float64]:
    """Return where values are between the limits: 0 at the lower, 1 at the upper one."""
    low, high = (each / 2 for each in limits)  # the difference of two floats may be infinite
    position: NDArray[np.float64] = (values.astype(np.float64) / 2 - low) / ((high - low) or 1)
    return position


def heat_map(values: NDArray[Any], limits: tuple[float, float] | None = None) -> Media:
    """Return an image of a 2-D array in colours from low to high; NaN and infinity are transparent.

    `limits`: the values of the first and the last colour, by default the least and the largest. Of a large array, only
    the elements that are shown are kept.
    """
    steps = (max(1, -(-length // MOST_SIDE)) for length in values.shape)
    thin = values[tuple(slice(None, None, step) for step in steps)].copy()
    found = value_range(values) if limits is None else limits
    return Media("image/png", lambda: _heat_png(thin, found), thin.nbytes)


def _heat_png(thin: NDArray[Any], limits: tuple[float, float]) -> bytes:
    position = _scaled(thin, limits)
    finite = np.isfinite(position)
    places = np.linspace(0, 1, len(_COLOURS))
    table = np.array(_COLOURS, np.float64).T
    position = np.where(finite, position, 0)
    colours = [np.interp(position, places, channel) for channel in table]
    image = np.stack([*colours, np.where(finite, 255, 0)], -1).astype(np.uint8)
    factor = max(1, LEAST_SIDE // max(1, *image.shape[:2]))
    return _png_of(image.repeat(factor, 0).repeat(factor, 1))


def _png_of(values: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    values = values[..., 0] if values.ndim == 3 and values.shape[-1] == 1 else values
    return _png(Image.fromarray(np.ascontiguousarray(values)))


def _png(image: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def polyline(values: NDArray[Any], width: float = 240, height: float = 60) -> str:
    """Return the points of an SVG polyline of a vector, at most two for each pixel of its width.

    Values that are not finite have no point.
    """
    scaled = _scaled(values, value_range(values))
    pieces = np.array_split(scaled, min(len(values), int(width)))
    points: list[str] = []
    for number, piece in enumerate(pieces):
        x, finite = number * width / max(1, len(pieces) - 1), piece[np.isfinite(piece)]
        ends = finite if len(finite) < 2 else (finite.min(), finite.max())
        points += [f"{x:.1f},{height - float(each) * height:.1f}" for each in ends]
    return " ".join(points)
