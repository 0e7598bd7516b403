"""Encoded images into arrays of height x width x channels: uint8, or float32 where they are normalised.

JPEGs are decoded by simplejpeg, pixels resized, mirrored and normalised by OpenCV, where these are installed; else
Pillow and numpy do it. OpenCV's own threads stay out of it: below 2^16 target pixels it resizes in the calling thread,
and its number of threads, which belongs to the whole process, is never changed here.

First: which part of an image is taken, and the random numbers that choose it.
"""

from __future__ import annotations

import importlib.util
import io
import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from streamloader.errors import DecodeError, UsageError
from streamloader.options import CenterCrop, Decode, Normalization, RandomResizedCrop

# Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), table 2 and section 3.3.
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_MASK = (1 << 64) - 1

Words = NDArray[np.uint64]


def draws(seed: int, epoch: int, positions: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return random numbers in [0, 1), shape (positions, count), each sample's keyed by (seed, epoch, position) alone.

    Row i is, bit for bit,

        key = np.array([seed, epoch], np.uint64)
        counter = np.array([0, 0, 1, positions[i]], np.uint64)
        np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)

    computed for all rows together, since making a generator for each sample costs more than a small image's crop. A
    transform's generator starts at counter [0, 0, 0, position], 2^128 blocks away: the two never share a number.
    """
    blocks = -(-count // 4)
    rows = np.repeat(positions.astype(np.uint64), blocks)
    number = np.tile(np.arange(1, blocks + 1, dtype=np.uint64), len(positions))  # numpy counts before it draws
    words = [number, np.zeros_like(rows), np.ones_like(rows), rows]
    key = (seed, epoch)
    for step in range(_ROUNDS):
        keys = [np.uint64((part + step * weyl) & _MASK) for part, weyl in zip(key, _WEYL, strict=True)]
        high0, low0 = _multiply(words[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
    raw = np.stack(words, axis=1).reshape(len(positions), 4 * blocks)[:, :count]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _multiply(words: Words, by: int) -> tuple[Words, Words]:
    """Return the high and low 64 bits of each product of 128 bits."""
    half, low_mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b = words >> half, words & low_mask
    c, d = np.uint64(by >> 32), np.uint64(by & 0xFFFFFFFF)
    middle = a * d + (b * d >> half)  # each fits: (2^32 - 1)^2 + 2^32 - 1 < 2^64
    other = b * c + (middle & low_mask)
    return a * c + (middle >> half) + (other >> half), words * np.uint64(by)


ATTEMPTS = 10
# one number for the mirror, two for the place, two for each attempt at a size and shape
DRAWS = 3 + 2 * ATTEMPTS
# libjpeg reduces by any n/8, but only these are cheaper than the whole image (measured: 7/8 takes 1.5 times as long)
_REDUCTIONS = (8, 4, 2)


class Box(NamedTuple):
    """A part of an image in pixels: rows [top, top + height), columns [left, left + width)."""

    top: int
    left: int
    height: int
    width: int


def random_box(height: int, width: int, crop: RandomResizedCrop, draws: Sequence[float]) -> Box:
    """Return the box for an image, from `DRAWS` numbers in [0, 1): the rule of torchvision's RandomResizedCrop.

    Attempt k has the area `scale` says by number 3 + 2k, and the ratio by number 4 + 2k; the first that lies within the
    image is taken, its top by number 1, its left by number 2. If none does, the largest box in the middle whose ratio
    is within the bounds. (Number 0 is for the mirror.)
    """
    (least, most), bounds = crop.scale, crop.ratio
    low, high = math.log(bounds[0]), math.log(bounds[1])
    for k in range(3, DRAWS, 2):
        area = height * width * (least + (most - least) * draws[k])
        ratio = math.exp(low + (high - low) * draws[k + 1])
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return Box(int(draws[1] * (height - h + 1)), int(draws[2] * (width - w + 1)), h, w)
    return _middle(height, width, min(max(width / height, bounds[0]), bounds[1]), 1.0)


def center_box(height: int, width: int, crop: CenterCrop, size: tuple[int, int]) -> Box:
    """Return `crop.part` of the largest box in the middle that has the shape of `size`, (height, width)."""
    return _middle(height, width, size[1] / size[0], crop.part)


def reduction(box: Box, size: tuple[int, int]) -> int:
    """Return by how much a JPEG may be reduced while it is decoded: 1, 2, 4 or 8.

    The greatest for which the box still has at least the pixels of `size`, (height, width), in both directions.
    """
    for k in _REDUCTIONS:
        if box.height >= k * size[0] and box.width >= k * size[1]:
            return k
    return 1


def snapped(box: Box, k: int, height: int, width: int) -> Box:
    """Return the box with its edges moved to whole pixels of the image reduced by `k`: by half of one at most.

    Whatever decodes and resizes an image then takes the same pixels of it.
    """
    top, left, bottom, right = (
        (2 * edge + k) // (2 * k) * k for edge in (box.top, box.left, box.top + box.height, box.left + box.width)
    )
    return Box(top, left, min(height, bottom) - top, min(width, right) - left)


def _middle(height: int, width: int, ratio: float, part: float) -> Box:
    h = max(1, min(height, round(part * min(height, width / ratio))))
    w = max(1, min(width, round(part * min(width, height * ratio))))
    return Box((height - h) // 2, (width - w) // 2, h, w)


_SOF = (0xC0, 0xC1)  # one pass over the image, Huffman coded; others may need the whole file for any row
_OTHER_SOF = frozenset({0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_SOS = 0xDA
_EOI = b"\xff\xd9"


def first_rows(data: memoryview, rows: int) -> bytearray | None:
    """Return a copy whose header says that the image ends after `rows` rows: a decoder then stops there.

    None where the rows are not stored one after another, or the file does not end as a complete one does. A
    decoder of the result reports that bytes are left over. Pixels near the new end may differ: chroma is interpolated.
    """
    frame, at = 0, 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in _OTHER_SOF:
            return None
        if marker in _SOF:
            frame = at
        elif marker == _SOS:
            one_scan = frame and data[at + 4] == data[frame + 9]  # it holds all components
            if not one_scan or data[-2:] != _EOI:
                return None
            copy = bytearray(data)
            copy[frame + 5 : frame + 7] = rows.to_bytes(2, "big")
            return copy
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


# "mixed" is what an image folder has whose extensions name several of the others
ENCODINGS = frozenset(["jpeg", "jpg", "png", "webp", "gif", "bmp", "tiff", "ppm", "pgm", "jp2", "image", "mixed"])
_JPEG_MAGIC = b"\xff\xd8\xff"
# Above this an image is refused before it is decoded: a bomb, not a sample (Pillow's own limit is of this size).
MAX_PIXELS = 180_000_000
# Rows below a box that are decoded too: those whose chroma is interpolated into the box, at most four rows a sample.
CHROMA_ROWS = 8

Pixels = NDArray[np.uint8]


class Scratch(threading.local):
    """Memory for images on their way, each thread's own and used again: fresh pages cost as much as a resize.

    Pickles without them.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Pixels] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (Scratch, ())

    def array(self, name: str, *shape: int) -> Pixels:
        """Return an array of that shape; its content is whatever was there, good until the next of that name."""
        size = math.prod(shape)
        if name not in self._arrays or self._arrays[name].size < size:
            self._arrays[name] = np.empty(size, np.uint8)
        return self._arrays[name][:size].reshape(shape)


def resample(source: Pixels, k: int, box: Box, out: Pixels, *, opencv: bool) -> None:
    """Resize a box of an image into `out`, bilinear; both of shape (height, width, channels).

    `box` is in the pixels of the whole image, of which `source` is reduced by `k`; its edges are `snapped` to that.
    Where the box is shrunk to less than half, every one of its pixels counts. Between half and whole OpenCV takes the
    four nearest, Pillow all: photographs of much detail differ by 2 to 5 of 255 on average.
    """
    top, left = box.top // k, box.left // k
    bottom, right = -(-(box.top + box.height) // k), -(-(box.left + box.width) // k)
    size = (out.shape[1], out.shape[0])
    if not opencv:
        image = Image.fromarray(source if source.shape[2] == 3 else source[:, :, 0])
        resized = np.asarray(image.resize(size, Image.Resampling.BILINEAR, box=(left, top, right, bottom)))
        np.copyto(out, resized.reshape(out.shape))
        return
    import cv2

    part, target = source[top:bottom, left:right], out
    if out.shape[2] == 1:  # OpenCV drops an axis of one channel
        part, target = part[:, :, 0], out[:, :, 0]
    shrink = max(part.shape[0] / out.shape[0], part.shape[1] / out.shape[1])
    cv2.resize(part, size, dst=target, interpolation=cv2.INTER_AREA if shrink > 2 else cv2.INTER_LINEAR)


def mirror(pixels: Pixels, *, opencv: bool) -> None:
    """Exchange left and right in place."""
    if opencv:
        import cv2

        cv2.flip(pixels, 1, dst=pixels)
    else:
        pixels[:] = pixels[:, ::-1].copy()


def normalized_values(normalization: Normalization) -> NDArray[np.float32]:
    """Return (x / 255 - mean) / std for each of the 256 values of x, shape (256, 1, channels); channels from 0 to 1."""
    mean, std = np.asarray(normalization, np.float64)
    values: NDArray[np.float32] = ((np.arange(256)[:, None, None] / 255 - mean) / std).astype(np.float32)
    return values


def normalize(pixels: Pixels, values: NDArray[np.float32], out: NDArray[Any], *, opencv: bool) -> None:
    """Write the `normalized_values` of pixels to `out`, float32 of the same shape: the same bits either way."""
    if opencv:
        import cv2

        cv2.LUT(pixels, values, dst=out)
        return
    for channel in range(pixels.shape[2]):
        np.take(values[:, 0, channel], pixels[:, :, channel], out=out[:, :, channel], mode="clip")


@dataclass(frozen=True, eq=False)
class ImageDecoder:
    """Decodes as `Decode` says; `fast` is whether simplejpeg takes the JPEGs, `opencv` whether OpenCV resizes.

    `values` are those of normalised pixels, if they are to be normalised.
    """

    options: Decode
    fast: bool
    opencv: bool
    crop: RandomResizedCrop | CenterCrop | None
    values: NDArray[np.float32] | None
    name: str = ""
    scratch: Scratch = field(default_factory=Scratch, repr=False)

    @classmethod
    def choose(cls, options: Decode, name: str = "") -> ImageDecoder:
        """Return the decoder of the field `name`. Raises `UsageError` where simplejpeg is needed and missing."""
        installed = importlib.util.find_spec("simplejpeg") is not None
        if options.backend == "simplejpeg" and not installed:
            remedy = "pip install simplejpeg, or decode='pillow'"
            raise UsageError("decode with simplejpeg, which is not installed", remedy)
        fast = installed and options.backend != "pillow"
        opencv = fast and importlib.util.find_spec("cv2") is not None
        values = None if options.normalization is None else normalized_values(options.normalization)
        return cls(options, fast, opencv, options.box, values, name)

    @property
    def dtype(self) -> str:
        """What a decoded image is made of: "float32" where it is normalised, else "uint8"."""
        return "uint8" if self.values is None else "float32"

    def draws(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> list[list[float]] | None:
        """Return the random numbers of each position for `decode`, None where no crop needs them."""
        if not isinstance(self.crop, RandomResizedCrop):
            return None
        numbers: list[list[float]] = draws(seed, epoch, positions, DRAWS).tolist()
        return numbers

    def shape(self, data: memoryview, sample: int) -> tuple[int, int, int]:
        """Return (height, width, channels) after decoding, from the header alone. Raises `DecodeError`."""
        if self.options.size is not None:
            return (*self.options.size, self.options.channels)
        try:
            return (*self._measure(data), self.options.channels)
        except Exception as error:
            raise self._bad(sample, data, error) from error

    def scratch_bytes(self, data: memoryview, shape: tuple[int, int, int]) -> int:
        """Return the bytes that decoding to `shape` takes at most beside the result, without `Decode(size=)`.

        A progressive JPEG takes coefficients of 2 bytes; Pillow an image and a converted copy of 4 bytes a pixel each,
        and these as bytes, in pieces and joined.
        """
        return shape[0] * shape[1] * (6 if self.fast and data[:3] == _JPEG_MAGIC else 8 + 2 * shape[2])

    def decode(
        self, data: memoryview, sample: int, out: NDArray[Any] | None = None, numbers: Sequence[float] | None = None
    ) -> NDArray[Any]:
        """Return the image, in `out` of its very shape and `dtype` where given.

        `numbers`: what `draws` gives for this sample, for a random crop; by default that of its number in epoch 0 of
        seed 0. Raises `DecodeError`, naming the sample.
        """
        if numbers is None:
            numbers = (self.draws(0, 0, np.array([sample])) or [[]])[0]
        try:
            size = self._measure(data)
            shape = (*(self.options.size or size), self.options.channels)
            if out is None or shape == out.shape:
                return self._decode(data, size, np.empty(shape, self.dtype) if out is None else out, numbers)
        except Exception as error:
            raise self._bad(sample, data, error) from error
        remedy = "give decode=Decode(size=(height, width)), or a transform that makes them alike"
        raise DecodeError(f"sample {sample} decodes to shape {shape}, others of its batch to {out.shape}", remedy)

    def _bad(self, sample: int, data: memoryview, error: Exception) -> DecodeError:
        """Return why an image does not decode. Each codec raises errors of its own."""
        why = "no known format" if isinstance(error, UnidentifiedImageError) else f"{type(error).__name__}: {error}"
        begin = f" beginning {bytes(data[:4]).hex()}" if data else ""
        where = f"sample {sample} of field {self.name!r}" if self.name else f"sample {sample}"
        remedy = "repair or drop it in the source and convert again, or take the field without decode="
        if isinstance(error, MemoryError):
            remedy = "lower memory= or batch_size, or free memory elsewhere"
        return DecodeError(f"{where} does not decode as an image ({len(data)} bytes{begin}: {why})", remedy)

    def _decode(
        self, data: memoryview, size: tuple[int, int], out: NDArray[Any], numbers: Sequence[float]
    ) -> NDArray[Any]:
        """Return the image, which has that size before it is cropped, in `out`."""
        pixels = out if self.values is None else self.scratch.array("small", *out.shape)
        if self.options.size is None:
            self._read(data, 1, size, pixels)
        else:
            box = self._box(*size, numbers)
            k = reduction(box, self.options.size)
            box = snapped(box, k, *size)
            source, k = self._read_box(data, k, box, size)
            resample(source, k, box, pixels, opencv=self.opencv)
        if isinstance(self.crop, RandomResizedCrop) and numbers[0] < self.crop.flip:
            mirror(pixels, opencv=self.opencv)
        if self.values is not None:
            normalize(pixels, self.values, out, opencv=self.opencv)
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
        size: tuple[int, int] | None = None
        if self.fast and data[:3] == _JPEG_MAGIC:
            import simplejpeg

            with suppress(ValueError):  # as in `_read`
                size = simplejpeg.decode_jpeg_header(data)[:2]
        if size is None:
            with Image.open(io.BytesIO(data)) as image:
                size = image.height, image.width
        if size[0] * size[1] > MAX_PIXELS:
            raise ValueError(f"{size[1]} x {size[0]} pixels are more than {MAX_PIXELS}")
        return size

    def _read_box(self, data: memoryview, k: int, box: Box, size: tuple[int, int]) -> tuple[Pixels, int]:
        """Return the image, at least the rows of `box`, and by how much it is reduced; see `_read`."""
        height, width = size
        rows = box.top + box.height + CHROMA_ROWS * k
        head = first_rows(data, rows) if self.fast and data[:3] == _JPEG_MAGIC and rows < height else None
        out = self.scratch.array(
            "source", -(-(height if head is None else rows) // k), -(-width // k), self.options.channels
        )
        return self._read(data, k, size, out, head)

    def _read(
        self, data: memoryview, k: int, size: tuple[int, int], out: Pixels, head: bytearray | None = None
    ) -> tuple[Pixels, int]:
        """Return the image and by how much it is reduced: a JPEG by `k`, in `out`; other formats by 1.

        `size` is that of the image, and `head` what `first_rows` made of the data, if only those are to be decoded.
        """
        if self.fast and data[:3] == _JPEG_MAGIC:
            import simplejpeg

            height, width, channels = out.shape
            colorspace = "RGB" if channels == 3 else "GRAY"
            options = {"min_height": height, "min_width": width, "buffer": out, "strict": head is None}
            with suppress(ValueError):  # for what libjpeg only warns of: whether an image is good, Pillow decides
                return simplejpeg.decode_jpeg(head or data, colorspace, **options), k
        with Image.open(io.BytesIO(data)) as image:
            if (image.height, image.width) != size:
                raise ValueError(f"it has {image.width} x {image.height} pixels, or {size[1]} x {size[0]}")
            if k > 1:
                image.draft(self.options.mode, (image.width // k, image.height // k))  # of a JPEG, the same reduction
            k = k if (image.height, image.width) != size else 1
            array = np.asarray(image.convert(self.options.mode), np.uint8)
        array = array if array.ndim == 3 else array[:, :, None]
        if array.shape == out.shape:
            np.copyto(out, array)
        return array, k
