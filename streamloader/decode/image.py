"""Encoded images into arrays of height x width x channels: uint8, or float32 where they are normalised."""

from __future__ import annotations

import importlib.util
import io
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from streamloader.decode.crop import DRAWS, Box, center_box, random_box, reduction, snapped
from streamloader.decode.draws import draws
from streamloader.decode.jpeg import first_rows
from streamloader.decode.resample import Normalizer, mirror, resample
from streamloader.errors import DecodeError, UsageError
from streamloader.options import CenterCrop, Decode, RandomResizedCrop

# "mixed" is what an image folder has whose extensions name several of the others
ENCODINGS = frozenset(["jpeg", "jpg", "png", "webp", "gif", "bmp", "tiff", "ppm", "pgm", "jp2", "image", "mixed"])
_JPEG_MAGIC = b"\xff\xd8\xff"
# Above this an image is refused before it is decoded: a bomb, not a sample (Pillow's own limit is of this size).
MAX_PIXELS = 180_000_000
# Rows below a box that are decoded too: those whose chroma is interpolated into the box, at most four rows a sample.
CHROMA_ROWS = 8

Pixels = NDArray[np.uint8]


class Scratch(threading.local):
    """Memory for images on their way, each thread's own and used again: fresh pages cost as much as a resize."""

    def __init__(self) -> None:
        self._rooms: dict[str, Pixels] = {}

    def room(self, name: str, *shape: int) -> Pixels:
        """Return an array of that shape; its content is whatever was there, good until the next of that name."""
        size = math.prod(shape)
        if name not in self._rooms or self._rooms[name].size < size:
            self._rooms[name] = np.empty(size, np.uint8)
        return self._rooms[name][:size].reshape(shape)


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes as `Decode` says; `fast` is whether simplejpeg takes the JPEGs, `opencv` whether OpenCV resizes."""

    options: Decode
    fast: bool
    opencv: bool
    crop: RandomResizedCrop | CenterCrop | None
    normalizer: Normalizer | None
    field: str = ""

    @classmethod
    def choose(cls, options: Decode, field: str = "") -> ImageDecoder:
        """Return the decoder; its errors name `field`. Raises `UsageError` where simplejpeg is needed and missing."""
        installed = importlib.util.find_spec("simplejpeg") is not None
        if options.backend == "simplejpeg" and not installed:
            raise UsageError(
                "decode with simplejpeg, which is not installed", "pip install simplejpeg, or decode='pillow'"
            )
        fast = installed and options.backend != "pillow"
        opencv = fast and importlib.util.find_spec("cv2") is not None
        normalizer = None if options.normalization is None else Normalizer.of(options.normalization)
        return cls(options, fast, opencv, options.box, normalizer, field)

    @property
    def channels(self) -> int:
        """Channels of every decoded image."""
        return self.options.channels

    @property
    def dtype(self) -> str:
        """What a decoded image is made of: "float32" where it is normalised, else "uint8"."""
        return "uint8" if self.normalizer is None else "float32"

    def draws(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> list[list[float]] | None:
        """Return the random numbers of each position for `decode`, None where no crop needs them."""
        if not isinstance(self.crop, RandomResizedCrop):
            return None
        numbers: list[list[float]] = draws(seed, epoch, positions, DRAWS).tolist()
        return numbers

    def shape(self, data: memoryview, sample: int) -> tuple[int, int, int]:
        """Return (height, width, channels) after decoding, from the header alone. Raises `DecodeError`."""
        if self.options.size is not None:
            return (*self.options.size, self.channels)
        try:
            return (*self._measure(data), self.channels)
        except Exception as error:
            raise self._bad(sample, data, error) from error

    def decode(
        self,
        data: memoryview,
        sample: int,
        out: NDArray[Any] | None = None,
        numbers: Sequence[float] | None = None,
        scratch: Scratch | None = None,
    ) -> NDArray[Any]:
        """Return the image, in `out` of its very shape and `dtype` where given.

        `numbers`: what `draws` gives for this sample, for a random crop; by default that of its number in epoch 0 of
        seed 0. `scratch`: one for all calls. Raises `DecodeError`, naming the sample.
        """
        scratch = scratch or Scratch()
        if numbers is None:
            numbers = (self.draws(0, 0, np.array([sample])) or [[]])[0]
        try:
            return self._decode(data, out, numbers, scratch)
        except _ShapeError as error:
            raise DecodeError(
                f"sample {sample} decodes to shape {error.args[0]}, others of its batch to {error.args[1]}",
                "give decode=Decode(size=(height, width)), or a transform that makes them alike",
            ) from None
        except Exception as error:
            raise self._bad(sample, data, error) from error

    def _bad(self, sample: int, data: memoryview, error: Exception) -> DecodeError:
        """Say why an image does not decode. Codecs raise whatever they like: Pillow's each another kind of error."""
        why = "no known format" if isinstance(error, UnidentifiedImageError) else f"{type(error).__name__}: {error}"
        begin = f" beginning {bytes(data[:4]).hex()}" if data else ""
        where = f"sample {sample} of field {self.field!r}" if self.field else f"sample {sample}"
        return DecodeError(
            f"{where} does not decode as an image ({len(data)} bytes{begin}: {why})",
            "lower memory= or batch_size, or free memory elsewhere"
            if isinstance(error, MemoryError)
            else "repair or drop it in the source and convert again, or take the field without decode=",
        )

    def _decode(
        self, data: memoryview, out: NDArray[Any] | None, numbers: Sequence[float], scratch: Scratch
    ) -> NDArray[Any]:
        height, width = self._measure(data)
        shape = (*(self.options.size or (height, width)), self.channels)
        if out is None:
            out = np.empty(shape, self.dtype)
        elif shape != out.shape:
            raise _ShapeError(shape, out.shape)
        pixels = out if self.normalizer is None else scratch.room("small", *shape)
        if self.options.size is None:
            self._read(data, 1, (height, width), pixels)
        else:
            box = self._box(height, width, numbers)
            k = reduction(box, self.options.size)
            box = snapped(box, k, height, width)
            source, k = self._read_box(data, k, box, (height, width), scratch)
            resample(source, k, box, pixels, opencv=self.opencv)
        if isinstance(self.crop, RandomResizedCrop) and numbers[0] < self.crop.flip:
            mirror(pixels, opencv=self.opencv)
        if self.normalizer is not None:
            self.normalizer.apply(pixels, out, opencv=self.opencv)
        return out

    def _box(self, height: int, width: int, numbers: Sequence[float]) -> Box:
        crop, size = self.crop, self.options.size
        if isinstance(crop, RandomResizedCrop):
            return random_box(height, width, crop, numbers)
        if isinstance(crop, CenterCrop) and size is not None:
            return center_box(height, width, crop, size)
        return Box(0, 0, height, width)

    def _measure(self, data: memoryview) -> tuple[int, int]:
        """Return height and width from the header; raises ValueError where they are too much to decode."""
        height, width = self._size(data)
        if height * width > MAX_PIXELS:
            raise ValueError(f"{width} x {height} pixels are more than {MAX_PIXELS}")
        return height, width

    def _size(self, data: memoryview) -> tuple[int, int]:
        if self.fast and data[:3] == _JPEG_MAGIC:
            import simplejpeg

            try:
                height, width, _, _ = simplejpeg.decode_jpeg_header(data)
                return int(height), int(width)
            except ValueError:  # as in `_read`
                pass
        with Image.open(io.BytesIO(data)) as image:
            return image.height, image.width

    def _read_box(
        self, data: memoryview, k: int, box: Box, whole: tuple[int, int], scratch: Scratch
    ) -> tuple[Pixels, int]:
        """Return the image, at least the rows of `box`, and by how much it is reduced; see `_read`."""
        height, width = whole
        rows = box.top + box.height + CHROMA_ROWS * k
        head = first_rows(data, rows) if self.fast and data[:3] == _JPEG_MAGIC and rows < height else None
        room = scratch.room("source", -(-(height if head is None else rows) // k), -(-width // k), self.channels)
        return self._read(data, k, whole, room, head)

    def _read(
        self, data: memoryview, k: int, whole: tuple[int, int], room: Pixels, head: bytearray | None = None
    ) -> tuple[Pixels, int]:
        """Return the image and by how much it is reduced: a JPEG by `k`, in `room`; other formats by 1.

        `whole` is its size, and `head` what `first_rows` made of the data, if only those are to be decoded.
        """
        if self.fast and data[:3] == _JPEG_MAGIC:
            import simplejpeg

            height, width, channels = room.shape
            colorspace = "RGB" if channels == 3 else "GRAY"
            try:
                return simplejpeg.decode_jpeg(
                    head or data, colorspace, min_height=height, min_width=width, buffer=room, strict=head is None
                ), k
            except ValueError:  # it refuses what libjpeg only warns of; whether an image is good, Pillow decides
                pass
        with Image.open(io.BytesIO(data)) as image:
            if (image.height, image.width) != whole:
                raise ValueError(f"it has {image.width} x {image.height} pixels, or {whole[1]} x {whole[0]}")
            if k > 1:
                image.draft(self.options.mode, (image.width // k, image.height // k))  # of a JPEG, the same reduction
            k = k if (image.height, image.width) != whole else 1
            array = np.asarray(image.convert(self.options.mode), np.uint8)
        array = array if array.ndim == 3 else array[:, :, None]
        if array.shape == room.shape:
            np.copyto(room, array)
        return array, k


class _ShapeError(Exception):
    """An image of another shape than its batch: both."""
