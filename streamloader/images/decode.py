"""Decodes images into arrays of shape (height, width, channels): uint8, or float32 if they are normalised.

If they are installed, simplejpeg decodes JPEGs, and OpenCV resizes, flips and normalises; otherwise Pillow and numpy
do. OpenCV resizes to less than 2^16 pixels in the calling thread. Its number of threads is a setting of the whole
process and is never changed here.

The first half chooses the crop of an image, and makes the random numbers for that.
"""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from streamloader.errors import DecodeError, UsageError
from streamloader.format.values import AUDIO, sniff
from streamloader.images.pillow import class_numbers, eight_bits, image_orientation, open_image, orientation
from streamloader.options import EXIF_HEADER, MAX_PIXELS, CenterCrop, Crop, Decode, Normalization, RandomResizedCrop

Ints = NDArray[np.int64]
Pixels = NDArray[np.uint8]


def draws(seed: int, epoch: int, positions: Ints, count: int, views: int = 1) -> NDArray[np.float64]:
    """Return random numbers in [0, 1) of shape (positions, views * count): pure functions of seed, epoch and position.

    Row i has `count` numbers for each view of an image in turn, with exactly the bits of

        key = np.array([seed, epoch], np.uint64)
        counter = np.array([0, view, 1, positions[i]], np.uint64)
        np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)

    so that view 0 has the numbers of an image without views, however many there are.

    Only the raw stream of a bit generator is the same in all versions of numpy (NEP 19), so it is converted here. One
    generator is set to each counter, which takes 2 us, since creating one takes 8 us. That of a transform starts at
    counter [0, 0, 0, position], and that of a batch at [0, rank, 2, position], 2^128 blocks away: they never share a
    number.
    """
    philox = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    state, raw = philox.state, np.empty((len(positions), views, count), np.uint64)
    for rows, position in zip(raw, positions.tolist(), strict=True):
        for view, row in enumerate(rows):
            state["state"]["counter"][:] = 0, view, 1, position
            philox.state = state
            row[:] = philox.random_raw(count)
    return (raw.reshape(len(positions), views * count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


ATTEMPTS = 10
# random numbers of a crop: one for the flip, two for the position, two for each attempt at an area and a ratio
DRAWS = 3 + 2 * ATTEMPTS
# libjpeg scales by any n/8, but only these are faster than full size (measured: 7/8 takes 1.5 times as long)
_REDUCTIONS = (8, 4, 2)


class Box(NamedTuple):
    """A rectangle of an image in pixels: rows [top, top + height), columns [left, left + width)."""

    top: int
    left: int
    height: int
    width: int


class Header(NamedTuple):
    """The size of a stored image in pixels, and the EXIF orientation that decoding applies, 1 for none."""

    height: int
    width: int
    turn: int

    @property
    def size(self) -> tuple[int, int]:
        """The (height, width) of the image after it is turned."""
        return (self.width, self.height) if self.turn > 4 else (self.height, self.width)


# whether orientations 1 to 4 flip (rows, columns); 5 to 8 do the same after rows and columns are exchanged
_FLIPS = ((False, False), (False, True), (True, True), (True, False))


def turned(pixels: Pixels, turn: int) -> Pixels:
    """Return stored pixels (height, width, channels), turned by an EXIF orientation: a copy, unless it is 1."""
    rows, columns = _FLIPS[(turn - 1) % 4]
    view = pixels.swapaxes(0, 1) if turn > 4 else pixels
    return np.ascontiguousarray(view[:: -1 if rows else 1, :: -1 if columns else 1])


def random_box(height: int, width: int, crop: RandomResizedCrop, draws: Sequence[float]) -> Box:
    """Choose the box in an image from `DRAWS` numbers in [0, 1), by the rule of torchvision's `RandomResizedCrop`.

    Number 3 + 2k is for the area of attempt k, and number 4 + 2k for its ratio. The first box that fits in the image is
    taken; number 1 is for its top, and number 2 for its left. If none fits, it is the largest centered box whose ratio
    is within the bounds. (Number 0 is for the flip.)
    """
    (least, greatest), bounds = crop.scale, crop.ratio
    low, high = math.log(bounds[0]), math.log(bounds[1])
    for k in range(3, DRAWS, 2):
        area = height * width * (least + (greatest - least) * draws[k])
        ratio = math.exp(low + (high - low) * draws[k + 1])
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return Box(int(draws[1] * (height - h + 1)), int(draws[2] * (width - w + 1)), h, w)
    return _centered(height, width, min(max(width / height, bounds[0]), bounds[1]), 1.0)


def center_box(height: int, width: int, crop: CenterCrop, size: tuple[int, int]) -> Box:
    """Return `crop.part` of the largest centered box with the aspect ratio of `size`, (height, width)."""
    return _centered(height, width, size[1] / size[0], crop.part)


def reduction(box: Box, size: tuple[int, int]) -> int:
    """Return the factor, 1, 2, 4 or 8, by which a JPEG may be scaled down while it is decoded.

    It is the greatest for which the box still has at least `size`, (height, width), pixels in both directions.
    """
    return next((k for k in _REDUCTIONS if box.height >= k * size[0] and box.width >= k * size[1]), 1)


def snapped(box: Box, k: int, height: int, width: int) -> Box:
    """Return the box with its edges rounded to whole pixels of the image scaled down by `k`.

    So all backends resize the same pixels of an image.
    """
    top, left, bottom, right = (
        (2 * edge + k) // (2 * k) * k for edge in (box.top, box.left, box.top + box.height, box.left + box.width)
    )
    return Box(top, left, min(height, bottom) - top, min(width, right) - left)


def _centered(height: int, width: int, ratio: float, part: float) -> Box:
    h = max(1, min(height, round(part * min(height, width / ratio))))
    w = max(1, min(width, round(part * min(width, height * ratio))))
    return Box((height - h) // 2, (width - w) // 2, h, w)


_SOF = (0xC0, 0xC1)  # sequential, Huffman coded; other kinds may need the whole file for any row
_OTHER_SOF = frozenset({0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_SOS = 0xDA
_EOI = b"\xff\xd9"


def first_rows(data: memoryview, rows: int) -> bytearray | None:
    """Return a copy of a JPEG whose header states a height of `rows`, so that a decoder stops there.

    Return None if rows are not stored in order, or if the file is incomplete. A decoder warns about the extra bytes.
    Pixels near the new end may differ, since chroma is interpolated.
    """
    frame = 0
    for marker, at in _segments(data):
        if marker in _OTHER_SOF:
            return None
        if marker in _SOF:
            frame = at
        elif marker == _SOS:
            is_only_scan = frame and data[at + 4] == data[frame + 9]  # it has all components
            if not is_only_scan or data[-2:] != _EOI:
                return None
            copy = bytearray(data)
            copy[frame + 5 : frame + 7] = rows.to_bytes(2, "big")
            return copy
    return None


def is_sequential(data: memoryview) -> bool:
    """Return whether a JPEG is decoded row by row; otherwise the decoder holds all coefficients."""
    return next((marker for marker, _ in _segments(data) if marker in _SOF or marker in _OTHER_SOF), 0) in _SOF


def _metadata(data: memoryview) -> list[bytes]:
    """Return the EXIF data and the XMP of a JPEG, empty if it has none."""
    starts = [at for marker, at in _segments(data) if marker == _APP1]
    parts = [bytes(data[at + 4 : at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")]) for at in starts]
    heads = (b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0")
    return [next((part for part in parts if part.startswith(head)), b"") for head in heads]


def _segments(data: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the marker and the position of each segment of a JPEG header."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        if data[at + 1] == 0xFF:  # a fill byte
            at += 1
            continue
        yield data[at + 1], at
        if data[at + 1] == _SOS:  # data follow it, not a segment
            return
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")


# The sampling factors of Y, Cb and Cr that nvJPEG knows: 4:4:4, 4:2:2, 4:2:0, 4:4:0 and 4:1:1.
_SAMPLINGS = frozenset(bytes([luma, 0x11, 0x11]) for luma in (0x11, 0x21, 0x22, 0x12, 0x41))
_BASELINE, _PROGRESSIVE, _APP1, _APP14 = 0xC0, 0xC2, 0xE1, 0xEE


def device_exif(data: memoryview) -> int | None:
    """Return where Exif data begin in a file that nvJPEG decodes as the CPU does, 0 without any; None of other files.

    It is a complete JPEG of 8 bits, gray or YCbCr, baseline with one scan, or progressive, with one segment of Exif
    data at most. What is damaged inside is not found here.
    """
    components, progressive, exif = 0, False, 0
    if data[:3] != _JPEG_MAGIC or data[-2:] != _EOI:
        return None
    for marker, at in _segments(data):
        if marker == _APP14 and bytes(data[at + 4 : at + 9]) == b"Adobe" and not any(data[at + 15 : at + 16]):
            return None  # RGB
        if marker == _APP1 and _has_exif(data, at):
            if exif:
                return None
            exif = at + 4
        elif marker in (_BASELINE, _PROGRESSIVE):
            components, progressive = data[at + 9], marker == _PROGRESSIVE
            table = bytes(data[at + 10 : at + 10 + 3 * components])
            ycbcr = table[1::3] in _SAMPLINGS and table[::3] != b"RGB"
            if data[at + 4] != 8 or not (components == 1 or ycbcr):
                return None
        elif marker == _SOS:
            return exif if components > 0 and (progressive or data[at + 4] == components) else None
    return None


def _has_exif(data: memoryview, at: int) -> bool:
    """Return whether a segment has Exif data that may say an orientation."""
    size = int.from_bytes(data[at + 2 : at + 4], "big") - 2
    return size >= EXIF_HEADER and bytes(data[at + 4 : at + 10]) == b"Exif\0\0"


# "mixed" is for an image folder with several of the others
ENCODINGS = frozenset(["jpeg", "jpg", "png", "webp", "gif", "bmp", "tiff", "ppm", "pgm", "jp2", "image", "mixed"])
_JPEG_MAGIC = b"\xff\xd8\xff"
# Rows below a box that are decoded too, since their chroma is interpolated into it: at most four for each chroma row.
CHROMA_ROWS = 8
PART_IMAGES = 16


class Scratch(threading.local):
    """Reusable memory for intermediate images, separate for each thread: touching new pages costs as much as a resize.

    It is pickled without its content.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Pixels] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (Scratch, ())

    def array(self, name: str, *shape: int) -> Pixels:
        """Return an uninitialised uint8 array, which is valid until the next call with the same name."""
        size = math.prod(shape)
        if name not in self._arrays or self._arrays[name].size < size:
            self._arrays[name] = np.empty(size, np.uint8)
        return self._arrays[name][:size].reshape(shape)


def resample(source: Pixels, k: int, box: Box, out: Pixels, *, opencv: bool, nearest: bool = False) -> None:
    """Resize a box of an image into `out`, bilinear; images have the shape (height, width, channels).

    `nearest`: each pixel is that of the nearest one, without OpenCV.

    `box` is in pixels of the full-size image, and `source` is that image scaled down by `k`; the edges of the box are
    `snapped` to it. When shrinking to less than half, all pixels are averaged. Between half and full size, OpenCV
    interpolates the four nearest pixels and Pillow averages all: detailed photographs differ by 2 to 5 of 255 on
    average.
    """
    top, left = box.top // k, box.left // k
    bottom, right = -(-(box.top + box.height) // k), -(-(box.left + box.width) // k)
    size = (out.shape[1], out.shape[0])
    if not opencv:
        image = Image.fromarray(source if source.shape[2] == 3 else source[:, :, 0])
        filter_ = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR
        np.copyto(out, np.asarray(image.resize(size, filter_, box=(left, top, right, bottom))).reshape(out.shape))
        return
    import cv2

    part, target = source[top:bottom, left:right], out
    if out.shape[2] == 1:  # OpenCV drops the channel axis of length 1
        part, target = part[:, :, 0], out[:, :, 0]
    shrink = max(part.shape[0] / out.shape[0], part.shape[1] / out.shape[1])
    cv2.resize(part, size, dst=target, interpolation=cv2.INTER_AREA if shrink > 2 else cv2.INTER_LINEAR)


def allow_pixels(count: int) -> None:
    """Raise Pillow's limit of this process, twice which is an error, to this number of pixels if that is above ours."""
    if count > MAX_PIXELS and Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, count)


def mirror(pixels: Pixels, *, opencv: bool) -> None:
    """Flip the image horizontally, in place."""
    if opencv:
        import cv2

        cv2.flip(pixels, 1, dst=pixels)
    else:
        pixels[:] = pixels[:, ::-1].copy()


def normalized_values(normalization: Normalization) -> NDArray[np.float32]:
    """Return (x / 255 - mean) / std for the 256 values of x, of shape (256, 1, channels)."""
    mean, std = np.asarray(normalization, np.float64)
    return np.asarray((np.arange(256)[:, None, None] / 255 - mean) / std, np.float32)


def normalize(pixels: Pixels, values: NDArray[np.float32], out: NDArray[Any], *, opencv: bool) -> None:
    """Write the `normalized_values` of pixels to `out`, float32 of the same shape. Both ways give the same bits."""
    if opencv:
        import cv2

        cv2.LUT(pixels, values, dst=out)
        return
    for channel in range(pixels.shape[2]):
        np.take(values[:, 0, channel], pixels[:, :, channel], out=out[:, :, channel], mode="clip")


@dataclass(frozen=True, eq=False)
class ImageDecoder:
    """Decodes the images of the field `name` according to `options`.

    `fast`: simplejpeg decodes JPEGs. `opencv`: OpenCV resizes. `crops`: the (size, crop) of each view of an image, a
    single one without views. `values`: the `normalized_values`, None without normalisation. `mask`: the pixels are
    numbers of classes, as stored. `by_samples`: if the size changes, the decoder from so many samples of the run on;
    this one has the largest size.

    With `Decode(device=)`, `decode` leaves what the device decodes to it.
    """

    options: Decode
    fast: bool
    opencv: bool
    crops: tuple[tuple[tuple[int, int] | None, Crop | None], ...]
    values: NDArray[np.float32] | None
    name: str = ""
    mask: bool = False
    scratch: Scratch = field(default_factory=Scratch, repr=False)
    by_samples: tuple[tuple[int, ImageDecoder], ...] = ()

    @classmethod
    def choose(cls, options: Decode, name: str = "", *, mask: bool = False) -> ImageDecoder:
        """Return the decoder of the field `name`, which may have masks.

        Raises `UsageError` if simplejpeg is required and not installed.
        """
        if isinstance(options.size, Mapping):
            sizes = sorted(options.size.items())
            decoders = [(samples, cls.choose(replace(options, size=size), name, mask=mask)) for samples, size in sizes]
            _, largest = max(decoders, key=lambda pair: pair[1].fixed_bytes or 0)
            shared = ((samples, replace(decoder, scratch=largest.scratch)) for samples, decoder in decoders)
            return replace(largest, by_samples=tuple(shared))
        installed = importlib.util.find_spec("simplejpeg") is not None
        if options.backend == "simplejpeg" and not installed:
            raise UsageError("simplejpeg is not installed", "pip install simplejpeg, or give decode='pillow'")
        fast = installed and options.backend != "pillow" and not mask
        opencv = fast and importlib.util.find_spec("cv2") is not None
        values = None if options.normalization is None else normalized_values(options.normalization)
        crops = [(view.size, view.box) for view in (options.views or {}).values() for _ in range(view.count)]
        return cls(options, fast, opencv, tuple(crops or [(options.size, options.box)]), values, name, mask)

    @property
    def part(self) -> int:
        """The number of images that a thread decodes at least, one after another."""
        return PART_IMAGES

    def beside(self, _items: Sequence[memoryview]) -> dict[str, NDArray[Any]]:
        """Return columns that are made of the encoded images of a batch: none."""
        return {}

    @property
    def on_cpu(self) -> ImageDecoder:
        """The decoder that leaves nothing to a device."""
        return replace(self, options=replace(self.options, device=None))

    @property
    def dtype(self) -> str:
        """The dtype of decoded images: "float32" with normalisation, else "uint8"."""
        return "uint8" if self.values is None else "float32"

    @property
    def view_shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """The shape (count, height, width, channels) of each column of views, by name; empty without views."""
        views = (self.options.views or {}).items()
        return {f"{self.name}_{name}": (view.count, *view.size, self.options.channels) for name, view in views}

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that the images become."""
        return tuple(self.view_shapes) or (self.name,)

    @property
    def fixed_bytes(self) -> int | None:
        """The bytes that each image becomes, with all its views; None if they depend on its size."""
        pixels = [math.prod(size) for size, _ in self.crops if size is not None]
        return sum(pixels) * self.options.channels * np.dtype(self.dtype).itemsize or None

    @property
    def is_sized(self) -> bool:
        """Whether each image becomes `fixed_bytes`; otherwise these, if any, are estimated."""
        return self.fixed_bytes is not None

    def draws(self, seed: int, epoch: int, positions: Ints) -> list[list[float]] | None:
        """Return the random numbers that `decode` needs, a list for each position; None without a random crop."""
        if not any(isinstance(crop, RandomResizedCrop) for _, crop in self.crops):
            return None
        numbers: list[list[float]] = draws(seed, epoch, positions, DRAWS, len(self.crops)).tolist()
        return numbers

    def shape(self, data: memoryview, sample: int) -> tuple[int, int, int]:
        """Return (height, width, channels) of the decoded image, from the header alone. Raises `DecodeError`."""
        return (*(self.options.size or self.measure(data, sample).size), self.options.channels)

    def measure(self, data: memoryview, sample: int) -> Header:
        """Return the size and the orientation of the encoded image, from its header alone. Raises `DecodeError`."""
        try:
            return self._measure(data)
        except Exception as error:
            raise self._error(sample, data, error) from error

    def scratch_bytes(self, data: memoryview, header: Header) -> int:
        """Return the bytes that decoding an image with this header takes at most beside the result.

        It includes the image before it is resized or turned. A JPEG that is not sequential takes coefficients of 2
        bytes; Pillow an image and a converted copy of 4 bytes a pixel each, and the copy as bytes, in pieces and
        joined, of 3 bytes a pixel each.
        """
        source = self.options.channels * ((self.fixed_bytes is not None) + 2 * (header.turn > 1))
        if not (self.fast and data[:3] == _JPEG_MAGIC):
            return header.height * header.width * (source + 14)
        return header.height * header.width * (source + (0 if is_sequential(data) else 6))

    def decode(
        self,
        data: memoryview,
        sample: int,
        out: NDArray[Any] | None = None,
        numbers: Sequence[float] | None = None,
        crop: Ints | None = None,
    ) -> NDArray[Any]:
        """Return the decoded image, written to `out` if given, an array of its shape and `dtype`.

        `numbers`: the `draws` of this sample, for a random crop; by default those of position `sample` with seed 0 and
        epoch 0. `crop`: gets the top, left, height and width of the crop, 1 if the result is flipped, and the size of
        the image that it is of; a mask is cropped as it says. With `Decode(device=)` it has three numbers more: if the
        device is to decode the image, by how much that is scaled down first, its EXIF orientation, and where its Exif
        data begin or 0, else zeros.
        Raises `DecodeError`, which names the sample, and `UsageError` for an image of another shape than `out`: which
        ones these are depends on the batch, so none of them is bad.
        """
        if numbers is None:
            numbers = (self.draws(0, 0, np.array([sample])) or [[]])[0]
        try:
            header = self._measure(data)
            shape = (*(self.options.size or header.size), self.options.channels)
            fits = not self.mask or crop is None or header.size == tuple(crop[5:7])
            if fits and (out is None or shape == out.shape):
                out, left = np.empty(shape, self.dtype) if out is None else out, (0, 0, 0)
                on_device = self.options.device is not None and crop is not None
                if on_device and (exif := device_exif(data)) is not None:
                    ((box, flip),), k = self._views(header, [out], numbers)
                    left = k, header.turn, exif
                else:
                    ((box, flip),) = self._decode(data, header, [out], numbers, crop if self.mask else None)
                if crop is not None and not self.mask:
                    crop[:] = (*box, flip, *header.size, *left)[: len(crop)]
                return out
        except Exception as error:
            raise self._error(sample, data, error) from error
        if not fits or out is None:
            problem = f"sample {sample}: {self.name!r} differs in size from its image"
            raise DecodeError(problem, "store masks of the size of their image, as it is after it is turned")
        problem = f"{self.name!r} of sample {sample} decodes to shape {shape}, others of its batch to {out.shape}"
        raise UsageError(
            problem, 'give Decode(size=(height, width)), collate="pad" or a transform that returns one shape'
        )

    def check(self, data: memoryview, sample: int, _header: Header) -> None:
        """Decode an image that has this header, in memory of its own. Raises `DecodeError`."""
        replace(self, scratch=Scratch()).decode(data, sample)

    def decode_views(
        self, data: memoryview, sample: int, outs: Sequence[NDArray[Any]], numbers: Sequence[float]
    ) -> None:
        """Decode an image once, and write its views to arrays of the `view_shapes`.

        `numbers`: the `draws` of this sample. Raises `DecodeError`, which names the sample.
        """
        try:
            self._decode(data, self._measure(data), [view for out in outs for view in out], numbers)
        except Exception as error:
            raise self._error(sample, data, error) from error

    def _error(self, sample: int, data: memoryview, error: Exception) -> DecodeError:
        """Return the error of an image for which a codec raised `error`, which may be of any class."""
        reason = "no known format" if isinstance(error, UnidentifiedImageError) else f"{type(error).__name__}: {error}"
        begin = f" beginning {bytes(data[:4]).hex()}" if data else ""
        image = f"sample {sample} of field {self.name!r}" if self.name else f"sample {sample}"
        remedy = (
            "repair or remove it in the source and convert again, go on without it in training with "
            "on_error='mask', or read the field without decode="
        )
        if sniff(bytes(data[:12])) in AUDIO:
            remedy = "it is audio: leave decode= out, or name the fields of images, decode={'image': True}"
        if isinstance(error, MemoryError):
            remedy = "lower memory= or batch_size, or free memory elsewhere"
        return DecodeError(f"{image} does not decode as an image ({len(data)} bytes{begin}: {reason})", remedy)

    def _decode(
        self,
        data: memoryview,
        header: Header,
        outs: Sequence[NDArray[Any]],
        numbers: Sequence[float],
        crop: Ints | None = None,
    ) -> list[tuple[Box, bool]]:
        """Decode the views of an image into `outs`; return the crop of each, and whether the result is flipped.

        `crop`: what the only view is, instead of a crop of its own.
        """
        stored, upright = (header.height, header.width), header.turn == 1
        views, k = self._views(header, outs, numbers, crop)
        source: Pixels | None = None
        if self.fixed_bytes is not None or not upright:
            bottom = max(box.top + box.height for box, _ in views) if upright else header.height
            source, k = self._read_rows(data, k, bottom, stored)
            source = turned(source, header.turn)
        for (box, flip), out in zip(views, outs, strict=True):
            pixels = out if self.values is None else self.scratch.array("small", *out.shape)
            if source is None:
                self._read(data, 1, stored, pixels)
            else:
                resample(source, k, box, pixels, opencv=self.opencv, nearest=self.mask)
            if flip:
                mirror(pixels, opencv=self.opencv)
            if self.values is not None:
                normalize(pixels, self.values, out, opencv=self.opencv)
        return views

    def _views(
        self, header: Header, outs: Sequence[NDArray[Any]], numbers: Sequence[float], crop: Ints | None = None
    ) -> tuple[list[tuple[Box, bool]], int]:
        """Return the crop of each view, and whether that is flipped; and by how much the image is scaled down first."""
        views = self._crops(header.size, numbers) if crop is None else [(Box(*crop[:4].tolist()), bool(crop[4]))]
        k = min(reduction(box, out.shape[:2]) for (box, _), out in zip(views, outs, strict=True))
        if header.turn > 1:  # the last reduced pixel may be cut by the edge, and would be the first after a flip
            k = math.gcd(k, header.height, header.width)
        if crop is None:
            views = [(snapped(box, k, *header.size), flip) for box, flip in views]
        return views, k

    def _crops(self, size: tuple[int, int], numbers: Sequence[float]) -> list[tuple[Box, bool]]:
        """Return the crop of each view of an image of this (height, width), and whether the result is flipped."""
        views = []
        for number, (target, crop) in enumerate(self.crops):
            own = numbers[number * DRAWS : (number + 1) * DRAWS]
            if isinstance(crop, RandomResizedCrop):
                views.append((random_box(*size, crop, own), own[0] < crop.flip))
            elif isinstance(crop, CenterCrop) and target is not None:
                views.append((center_box(*size, crop, target), False))
            else:
                views.append((Box(0, 0, *size), False))
        return views

    def _measure(self, data: memoryview) -> Header:
        """Return the header. Raises `ValueError` if the image is too large."""
        size: tuple[int, int] | None = None
        turn, most = 1, self.options.max_pixels
        if self.fast and data[:3] == _JPEG_MAGIC:
            import simplejpeg

            with suppress(ValueError):  # as in `_read`
                size = simplejpeg.decode_jpeg_header(data)[:2]
                turn = orientation(*_metadata(data)) if self.options.orientation else 1
        if size is None:
            allow_pixels(most)
            with open_image(data) as image:
                size = (image.height, image.width)
                if self.options.orientation and size[0] * size[1] <= most:
                    turn = image_orientation(image, data)
        if size[0] * size[1] > most:
            raise ValueError(f"{size[1]} x {size[0]} pixels are more than Decode(max_pixels={most})")
        return Header(*size, turn)

    def _read_rows(self, data: memoryview, k: int, bottom: int, size: tuple[int, int]) -> tuple[Pixels, int]:
        """Decode at least the first `bottom` rows; return the image and its scale as `_read` does."""
        height, width = size
        rows = bottom + CHROMA_ROWS * k
        head = first_rows(data, rows) if self.fast and data[:3] == _JPEG_MAGIC and rows < height else None
        decoded_rows = height if head is None else rows
        out = self.scratch.array("source", -(-decoded_rows // k), -(-width // k), self.options.channels)
        return self._read(data, k, size, out, head)

    def _read(
        self, data: memoryview, k: int, size: tuple[int, int], out: Pixels, head: bytearray | None = None
    ) -> tuple[Pixels, int]:
        """Return the image and the factor by which it is scaled down: `k` for a JPEG, in `out`; 1 for other formats.

        `size`: the (height, width) of the image. `head`: the result of `first_rows`, to decode only those.
        """
        if self.fast and data[:3] == _JPEG_MAGIC:
            import simplejpeg

            height, width, channels = out.shape
            colorspace = "RGB" if channels == 3 else "GRAY"
            options = {"min_height": height, "min_width": width, "buffer": out, "strict": head is None}
            with suppress(ValueError):  # also raised for warnings of libjpeg: Pillow decides if the image is valid
                return simplejpeg.decode_jpeg(head or data, colorspace, **options), k
        allow_pixels(self.options.max_pixels)
        with open_image(data) as image:
            if (image.height, image.width) != size:
                raise ValueError(f"headers disagree: {image.width} x {image.height} or {size[1]} x {size[0]} pixels")
            if k > 1 and not self.mask:
                image.draft(self.options.mode, (image.width // k, image.height // k))  # scales a JPEG by k
            k = k if (image.height, image.width) != size else 1
            array = class_numbers(image) if self.mask else np.asarray(eight_bits(image, self.options.mode))
        array = array if array.ndim == 3 else array[:, :, None]
        if array.shape == out.shape:
            np.copyto(out, array)
        return array, k
