"""Encoded images into uint8 arrays of height x width x channels."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from streamloader.errors import DecodeError, UsageError
from streamloader.options import Decode

# "mixed" is what an image folder has whose extensions name several of the others
ENCODINGS = frozenset(["jpeg", "jpg", "png", "webp", "gif", "bmp", "tiff", "ppm", "pgm", "jp2", "image", "mixed"])
_JPEG_MAGIC = b"\xff\xd8\xff"
# Above this an image is refused before it is decoded: a bomb, not a sample (Pillow's own limit is of this size).
MAX_PIXELS = 180_000_000


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes as `Decode` says; `fast` is whether simplejpeg takes the JPEGs."""

    options: Decode
    fast: bool

    @classmethod
    def choose(cls, options: Decode) -> ImageDecoder:
        """Return the decoder. Raises `UsageError` where simplejpeg is asked for and not installed."""
        installed = importlib.util.find_spec("simplejpeg") is not None
        if options.backend == "simplejpeg" and not installed:
            raise UsageError(
                "decode with simplejpeg, which is not installed", "pip install 'streamloader[jpeg]', or decode='pillow'"
            )
        return cls(options, installed and options.backend != "pillow")

    @property
    def channels(self) -> int:
        """Channels of every decoded image."""
        return 3 if self.options.mode == "RGB" else 1

    def shape(self, data: memoryview, sample: int) -> tuple[int, int, int]:
        """Return (height, width, channels) after decoding, from the header alone. Raises `DecodeError`."""
        if self.options.size is not None:
            return (*self.options.size, self.channels)
        try:
            with Image.open(io.BytesIO(data)) as image:
                return (image.height, image.width, self.channels)
        except (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise _bad(sample, data, error) from error

    def decode(self, data: memoryview, sample: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Return the image, in `out` of its very shape where given. Raises `DecodeError`, naming the sample."""
        try:
            pixels = self._pixels(data)
        except (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise _bad(sample, data, error) from error
        if out is None:
            return np.ascontiguousarray(pixels)
        if pixels.shape != out.shape:
            raise DecodeError(
                f"sample {sample} decodes to shape {pixels.shape}, others of its batch to {out.shape}",
                "give decode=Decode(size=(height, width)), or a transform that makes them alike",
            )
        np.copyto(out, pixels)
        return out

    def _pixels(self, data: memoryview) -> NDArray[np.uint8]:
        wanted = self.options
        if self.fast and data[:3] == _JPEG_MAGIC and wanted.size is None:
            try:
                return self._simplejpeg(data)
            except ValueError:  # it refuses what libjpeg only warns of; whether an image is good, Pillow decides
                pass
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}")
            if wanted.size is not None:
                image.draft(wanted.mode, (wanted.size[1], wanted.size[0]))  # JPEG: decode at a smaller DCT scale
            pixels = image.convert(wanted.mode)
        if wanted.size is not None:
            pixels = pixels.resize((wanted.size[1], wanted.size[0]), Image.Resampling.BILINEAR)
        array = np.asarray(pixels, np.uint8)
        return array if array.ndim == 3 else array[:, :, None]

    def _simplejpeg(self, data: memoryview) -> NDArray[np.uint8]:
        import simplejpeg

        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        if height * width > MAX_PIXELS:
            raise ValueError(f"{width} x {height} pixels are more than {MAX_PIXELS}")
        colorspace: Any = "RGB" if self.options.mode == "RGB" else "GRAY"
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colorspace=colorspace)
        return pixels


def _bad(sample: int, data: memoryview, error: BaseException) -> DecodeError:
    why = "no known format" if isinstance(error, UnidentifiedImageError) else str(error)
    begin = f" beginning {bytes(data[:4]).hex()}" if data else ""
    return DecodeError(
        f"sample {sample} does not decode as an image ({len(data)} bytes{begin}: {why})",
        "repair or drop it in the source and convert again, or take the field without decode=",
    )
