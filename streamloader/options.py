"""Options as small frozen values, checked when they are created. Docstrings give the reasons of the defaults."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from streamloader.errors import SelectionError, UsageError

if TYPE_CHECKING:  # the command line starts without numpy
    import numpy as np
    from numpy.typing import NDArray

MIB = 1 << 20
EXIF_HEADER = 14  # bytes of the Exif data of a JPEG before what they say: "Exif", two zeros, and the header of a TIFF

CodecChoice = Literal["auto", "none", "lz4", "zstd"]
Remainder = Literal["pad", "drop", "uneven"]
OnBadSample = Literal["raise", "mask", "replace"]

CODECS: tuple[CodecChoice, ...] = ("auto", "none", "lz4", "zstd")
REMAINDERS: tuple[Remainder, ...] = ("pad", "drop", "uneven")
PACKED_COLUMNS: tuple[Literal["documents", "positions", "cu_seqlens"], ...] = ("documents", "positions", "cu_seqlens")
ON_BAD_SAMPLE: tuple[OnBadSample, ...] = ("raise", "mask", "replace")


def _check(option: object, name: str, valid: bool, remedy: str) -> None:
    """Raise `UsageError`, which names the value of the attribute `name`, unless it is `valid`."""
    if not valid:
        raise UsageError(f"{type(option).__name__}({name}={getattr(option, name)!r})", remedy)


def is_whole(value: object, minimum: int = 1) -> bool:
    """Return whether the value is an integer, not a bool, and at least `minimum`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def whole(name: str, value: Any, minimum: int = 1) -> int:
    """Return an integer of any library, such as numpy's, as an int. Raises `UsageError` unless it is one."""
    if not is_whole(value, minimum):
        raise UsageError(f"{name}={value!r:.60}", f"give a whole number of at least {minimum}")
    return int(value)


def as_array(choice: Any, name: str, remedy: str) -> NDArray[Any]:
    """Return the argument `name` as an array of one axis. Raises `SelectionError`."""
    import numpy as np

    if np.ma.is_masked(choice):
        mask = choice.dtype == np.bool_
        other = f"fill them: {name}.filled(False)" if mask else f"leave them out: {name}.compressed()"
        raise SelectionError(f"{name}= has masked elements", other)
    try:
        values = np.asarray(choice)
    except (TypeError, ValueError) as error:  # rows of different lengths, a tensor on a GPU
        raise SelectionError(f"{name}= is not an array: {error}", remedy) from error
    if values.ndim != 1:
        raise SelectionError(f"{name}= has the shape {values.shape}", remedy)
    return values


def whole_numbers(choice: Any, name: str) -> NDArray[Any]:
    """Return the argument `name` as an array of whole numbers, of shape (numbers,). Raises `SelectionError`."""
    values = as_array(choice, name, remedy := "give sample numbers, or the path or URL of a file of them")
    if values.dtype.kind not in "iu" and values.size:
        raise SelectionError(f"{name}= has the dtype {values.dtype}", remedy)
    return values


def in_range(numbers: NDArray[Any], num_samples: int, name: str) -> NDArray[np.int64]:
    """Return sample numbers as int64. Raises `SelectionError` for one below 0, or not below `num_samples`."""
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < num_samples:
        problem = f"{name}= has sample numbers from {numbers.min()} to {numbers.max()}, the dataset has {num_samples}"
        raise SelectionError(problem, f"give numbers in [0, {num_samples})")
    return numbers.astype("int64")


def plain_integers(value: Any) -> Any:
    """Return numpy's integers as ints, also within tuples, lists and dicts; other values unchanged."""
    if type(value) in (tuple, list):
        return type(value)(item if type(item) is int else plain_integers(item) for item in value)  # may have millions
    if isinstance(value, dict):
        return {plain_integers(key): plain_integers(item) for key, item in value.items()}
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


class Option:
    """The base of frozen option values. Integers may be numpy's."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain_integers(value))
        self._validate()

    def _validate(self) -> None:
        raise NotImplementedError


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_pair(value: object, valid: Callable[[object], bool] = _is_number) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(valid, value))


@dataclass(frozen=True)
class Shuffle(Option):
    """How samples are shuffled. None keeps the value in the dataset's manifest.

    `window`: the number of samples within which a lane is shuffled, a multiple of `block` and at least two blocks; a
    larger window shuffles better and needs more memory. `lanes`: the number of lanes, from which batches take samples
    in turn; use at least the number of ranks, so that only one rank reads each block. `block`: the number of
    consecutive samples that are fetched together; a larger block makes fewer and longer requests.

    Raises `UsageError` for a value that is not an integer of at least 1.
    """

    window: int | None = None
    lanes: int | None = None
    block: int | None = None

    def _validate(self) -> None:
        for name, value in vars(self).items():
            _check(self, name, value is None or is_whole(value), f"give {name} as a whole number of at least 1")


@dataclass(frozen=True)
class RetryPolicy(Option):
    """How long requests are retried, and when a response is late; times in seconds.

    Pass it as `storage_options={"retry": RetryPolicy(...)}` wherever storage options are accepted. Retries are limited
    by time, not by attempts, and for all requests of a process to a URL together: how long an outage may last depends
    neither on the number of requests in flight nor on how fast connections are refused.

    `outage_seconds`: how long every request may fail before the run ends. 5 minutes outlast the restart of a server or
    a load balancer; a rank still fails with a clear error before NCCL's default timeout of 10 minutes ends the others.
    `request_seconds`: how long one request may fail while others succeed. `base_seconds`, `cap_seconds`: the wait
    before retry n (from 0, of throttled requests from 1) is uniform in [0, min(cap, base * 2^n)] ("full jitter"), so
    that clients that failed together do not return together. `retry_after_seconds`: the longest wait that the store may
    ask for (Retry-After), which is added, and shown in `stats().waiting_for`. `probe_seconds`: during an outage one
    request tests the endpoint every 0.5 to 1 times this long, and all others wait; a run thus resumes within 2 s of the
    server's return, without a storm of requests. `report_seconds`: after this time an outage is logged (on stderr
    unless logging is configured otherwise) and shown in `stats().waiting_for`.
    `first_contact_attempts`: the number of attempts for an endpoint that has never responded, so that a wrong URL does
    not look like a hang.

    `response_seconds`, `min_bytes_per_second`: a response may take `response_seconds + bytes / min_bytes_per_second`,
    and may not fall behind that rate by more than `response_seconds` at any time; if it does, its connection is closed
    and the request is repeated on a new one. A read that is much later than others were, but at least 1 s, is repeated
    sooner, once (S3, http, gs and az by obstore). A cloud store sends its first byte within 0.2 s, and 50-90 MB/s after
    that: 10 s allow for servers with a queue, and 64 KiB/s for a home connection of 10 Mbit/s that 16 requests share.
    Raise `response_seconds` for stores that read from tape.

    Raises `UsageError` for a value that is not a number of at least 0, or with which no request could succeed.
    """

    outage_seconds: float = 300.0
    request_seconds: float = 120.0
    base_seconds: float = 0.1
    cap_seconds: float = 20.0
    retry_after_seconds: float = 30.0
    probe_seconds: float = 1.0
    report_seconds: float = 10.0
    first_contact_attempts: int = 3
    response_seconds: float = 10.0
    min_bytes_per_second: float = 65536.0

    def _validate(self) -> None:
        for name, value in vars(self).items():
            _check(self, name, _is_number(value) and value >= 0, f"give {name} as a number of at least 0")
        whole("first_contact_attempts", self.first_contact_attempts)
        if min(self.response_seconds, self.min_bytes_per_second) <= 0:
            raise UsageError(f"{self!r} lets no request succeed", "give values above 0")

    def delay(self, retry: int, jitter: float) -> float:
        """Return the seconds to wait before retry number `retry` (from 0); `jitter` is in [0, 1)."""
        return jitter * min(self.cap_seconds, self.base_seconds * 2.0 ** min(retry, 60))

    def deadline(self, size: int) -> float:
        """Return the seconds that a response of `size` bytes may take."""
        return self.response_seconds + size / self.min_bytes_per_second


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crops a box of random area, aspect ratio and position, which is resized: torchvision's `RandomResizedCrop`.

    `scale`: (least, greatest) area of the box as a fraction of the image's area. `ratio`: (least, greatest) width /
    height of the box, drawn uniformly on a logarithmic scale. `flip`: the probability of a horizontal flip. The random
    numbers depend only on the sample's seed, epoch and position. Raises `UsageError` for values out of range.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.0

    def __post_init__(self) -> None:
        scale, ratio = self.scale, self.ratio
        is_scale = _is_pair(scale) and 0 < scale[0] <= scale[1] <= 1
        _check(self, "scale", is_scale, "give (least, greatest) above 0, at most 1")
        is_ratio = _is_pair(ratio) and 0 < ratio[0] <= ratio[1] < math.inf
        _check(self, "ratio", is_ratio, "give (least, greatest) above 0")
        _check(self, "flip", _is_number(self.flip) and 0 <= self.flip <= 1, "give a probability from 0 to 1")


@dataclass(frozen=True)
class CenterCrop:
    """Crops the largest centered box with the aspect ratio of the target, its sides multiplied by `part`.

    This is for evaluation. 0.875 corresponds to resizing the shorter side to 256 and cropping 224, the usual
    counterpart of `RandomResizedCrop`. Raises `UsageError` unless 0 < `part` <= 1.
    """

    part: float = 0.875

    def __post_init__(self) -> None:
        _check(self, "part", _is_number(self.part) and 0 < self.part <= 1, "give a part above 0, at most 1")


Crop = RandomResizedCrop | CenterCrop
CropChoice = Literal["random", "center"] | Crop | None


class _Cropped(Option):
    """The base of options with a `crop`."""

    crop: CropChoice

    @property
    def box(self) -> Crop | None:
        """The crop, with a name replaced by its object."""
        if isinstance(self.crop, str):
            return RandomResizedCrop() if self.crop == "random" else CenterCrop()
        return self.crop

    def _validate_crop(self) -> None:
        is_crop = self.crop in (None, "random", "center") or isinstance(self.crop, Crop)
        _check(self, "crop", is_crop, "choose 'random', 'center', RandomResizedCrop(...), CenterCrop(...) or None")


@dataclass(frozen=True)
class View(_Cropped):
    """Crops of an image that `Decode(views=)` makes: `count` of them, each resized to `size`, (height, width).

    `crop`: as in `Decode`; None is the whole image. Raises `UsageError` for invalid values.
    """

    size: tuple[int, int]
    crop: CropChoice = None
    count: int = 1

    def _validate(self) -> None:
        _check(self, "size", _is_pair(self.size, is_whole), "give size as (height, width), both at least 1")
        self._validate_crop()
        _check(self, "count", is_whole(self.count), "give count as a whole number of at least 1")


Normalization = tuple[tuple[float, ...], tuple[float, ...]]
# Of an image: 13,400 x 13,400, about where Pillow refuses it too. Decoding to RGB takes 540 MB.
MAX_PIXELS = 180_000_000
# (mean, std) of ImageNet's training images, with channels from 0 to 1, as torchvision's models expect
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Decode(_Cropped):
    """How encoded images become tensors: uint8 (height, width, channels), or, with `normalize`, float32 (channels,
    height, width), as torch's models take them.

    `backend`: "pillow" decodes every format; "simplejpeg" decodes JPEG two to three times as fast and leaves others to
    Pillow; "auto" is "simplejpeg" if it is installed, and then OpenCV resizes if it is installed. `mode`: "RGB" (3
    channels) or "L" (1 channel). `size`: the (height, width) to resize to, bilinear; None keeps the size of each image,
    and then all images of a batch must have the same size, or a transform must make them so. A dict has sizes that
    change, by the samples that all ranks have had in all epochs: `{0: (128, 128), 500_000: (192, 192)}`. `crop`: the
    part that is resized to `size`: None, the whole image; "random" or `RandomResizedCrop(...)`; "center" or
    `CenterCrop(...)`. `normalize`: (mean, std), one number per channel, for (x / 255 - mean) / std; "imagenet" is
    `IMAGENET`. `layout`: "CHW" or "HWC"; None is "CHW" with `normalize`, else "HWC". In both layouts the channels of a
    pixel are adjacent in memory: a "CHW" batch has torch's `channels_last` memory format. A transform gets "HWC".
    `orientation`: images are turned as their EXIF orientation says, before they are cropped; False leaves pixels as
    they are stored, except of TIFF, which Pillow turns itself.

    Fields that are cropped, resized and flipped with their image: `boxes`, four numbers for each box (`box_format`:
    "xywh" for x, y, width, height; "xyxy" for two corners); `keypoints`, x and y, or x, y and visibility, for each;
    `masks`, an image of class numbers. A batch then has `boxes_valid` and `keypoints_valid` (by the names of the
    fields): False for what is cut away. `with_crop`: a batch has the column `image_crop` (by the name of the field):
    top, left, height and width of each crop in pixels of the whole image, and 1 if the result is flipped.

    `device`: decodes JPEG there, "cuda" or "cuda:1" by nvJPEG (TorchCodec's call, or torchvision's), and crops,
    resizes and normalises all images of a batch together: the batch has a tensor on the device. "cpu" does the same
    steps on the CPU, for tests. It needs `size`. Pixels differ slightly from those of the CPU's decoder, which decodes
    what nvJPEG cannot.

    `max_pixels`: an image whose header says that it has more is a bad sample, and is not decoded: a file of 100 KB may
    say that it has 60,000 x 60,000 pixels, which take 11 GB. More than the default also raises Pillow's own limit,
    `PIL.Image.MAX_IMAGE_PIXELS`, in the processes that decode.

    `views`: several crops of each image, which is decoded once. A batch has the column `image_name` (by the names of
    the field and of the view) in place of `image`, of shape (batch, count, height, width, channels), or with "CHW"
    (batch, count, channels, height, width), for each view: `{"local": View((96, 96), "random", count=8)}`.

    Raises `UsageError` for invalid values.
    """

    backend: Literal["auto", "pillow", "simplejpeg"] = "auto"
    mode: Literal["RGB", "L"] = "RGB"
    size: tuple[int, int] | Mapping[int, tuple[int, int]] | None = None
    crop: CropChoice = None
    normalize: Literal["imagenet"] | Normalization | None = None
    layout: Literal["CHW", "HWC"] | None = None
    orientation: bool = True
    boxes: str | None = None
    box_format: Literal["xywh", "xyxy"] = "xywh"
    keypoints: str | None = None
    masks: str | None = None
    with_crop: bool = False
    views: Mapping[str, View] | None = None
    device: str | None = None
    max_pixels: int = MAX_PIXELS

    def _validate(self) -> None:
        _check(self, "max_pixels", is_whole(self.max_pixels), "give max_pixels as a whole number of at least 1")
        is_backend = self.backend in ("auto", "pillow", "simplejpeg")
        _check(self, "backend", is_backend, "choose 'auto', 'pillow' or 'simplejpeg'")
        _check(self, "mode", self.mode in ("RGB", "L"), "choose 'RGB' or 'L'")
        _check(self, "layout", self.layout in (None, "CHW", "HWC"), "choose 'CHW', 'HWC' or None")
        for name in ("orientation", "with_crop"):
            _check(self, name, isinstance(getattr(self, name), bool), "choose True or False")
        for name in ("boxes", "keypoints", "masks"):
            _check(self, name, isinstance(getattr(self, name), str | None), "give the name of a field")
        _check(self, "box_format", self.box_format in ("xywh", "xyxy"), "choose 'xywh' or 'xyxy'")
        sizes = self.sizes
        is_size = self.size is None or (0 in sizes and all(_is_pair(size, is_whole) for size in sizes.values()))
        remedy = "give size as (height, width), both at least 1, or as {0: (128, 128), samples: (192, 192)}"
        _check(self, "size", is_size and all(is_whole(samples, 0) for samples in sizes), remedy)
        self._validate_crop()
        _check(self, "crop", self.crop is None or self.size is not None, "a crop needs size=(height, width)")
        is_normalization = self.normalize is None or _is_normalization(self.normalization, self.channels)
        remedy = f"give (mean, std), each of {self.channels} numbers, std not 0; or 'imagenet' for mode='RGB'"
        _check(self, "normalize", is_normalization, remedy)
        self._validate_device()
        self._validate_views()

    def _validate_device(self) -> None:
        if self.device is None:
            return
        kind, _, number = self.device.partition(":") if isinstance(self.device, str) else ("", "", "")
        known = kind in ("cpu", "cuda") and (not number or number.isdecimal()) and not self.device.endswith(":")
        _check(self, "device", known, "choose 'cuda', 'cuda:1' or another number, or 'cpu'")
        _check(self, "device", self.views is None, "leave it or views= out: each image has one crop on a device")
        _check(self, "device", self.size is not None, "give size=(height, width): images of a batch become one tensor")

    def _validate_views(self) -> None:
        views = self.views
        if views is None:
            return
        are_views = isinstance(views, Mapping) and bool(views) and all(isinstance(of, View) for of in views.values())
        named = are_views and all(isinstance(name, str) and name for name in views)
        _check(self, "views", named, "give a View(size, crop, count) for each name, or leave it out")
        for name in ("size", "crop"):
            remedy = f"leave it out: each View has a {name} of its own"
            _check(self, name, getattr(self, name) is None, remedy)
        for name in ("boxes", "keypoints", "masks", "with_crop"):
            remedy = "leave it or views= out: what belongs to an image is moved with one crop of it only"
            _check(self, name, not getattr(self, name), remedy)

    @property
    def sizes(self) -> Mapping[int, Any]:
        """The size from so many samples of the run on."""
        return self.size if isinstance(self.size, Mapping) else {0: self.size}

    @property
    def channels(self) -> int:
        """The number of channels of every decoded image."""
        return 3 if self.mode == "RGB" else 1

    @property
    def channels_first(self) -> bool:
        """Whether tensors have the layout "CHW"."""
        return self.layout == "CHW" or (self.layout is None and self.normalize is not None)

    @property
    def normalization(self) -> Normalization | None:
        """The (mean, std) of the channels, with a name replaced by its values."""
        return IMAGENET if self.normalize == "imagenet" else self.normalize


def _is_normalization(value: Any, channels: int) -> bool:
    def of_channels(part: object) -> bool:
        return isinstance(part, tuple | list) and len(part) == channels and all(map(_is_number, part))

    return _is_pair(value, of_channels) and all(value[1])


MAX_PACKED = 1 << 30  # elements of a row, for sums of 32 bits


@dataclass(frozen=True)
class Pack(Option):
    """How documents become rows of `length` values. `pad` fills the rest of a row.

    `fit="best"`: rows are the samples, and `batch_size` counts them, so each batch has the shape (batch_size, length).
    Neighbouring documents share rows, each in the one that it fills best. A document that is longer than a row is cut
    into full rows and the rest, or left out with `split=False`. `balance="attention"`: all rows of a step, on all
    ranks, take a similar time in attention, by the sum of the squares of the lengths of their documents. `columns`: the
    columns that a batch has beside the rows; leave out those that you do not need.

    Without `fit`, `batch_size` counts documents: those of a batch are concatenated and cut every `length` values, so
    the number of rows varies, and only the last one is padded. Raises `UsageError` for invalid values.
    """

    length: int
    pad: int | float = 0
    fit: Literal["best"] | None = None
    split: bool = True
    balance: Literal["attention"] | None = None
    columns: tuple[Literal["documents", "positions", "cu_seqlens"], ...] = PACKED_COLUMNS

    def _validate(self) -> None:
        is_pad = isinstance(self.pad, int | float) and not isinstance(self.pad, bool)
        valid = is_whole(self.length) and self.length <= MAX_PACKED
        _check(self, "length", valid, f"give length as a whole number from 1 to {MAX_PACKED}")
        _check(self, "pad", is_pad, "give pad as a number")
        _check(self, "fit", self.fit in (None, "best"), "choose 'best' or None")
        _check(self, "split", isinstance(self.split, bool), "choose True or False")
        _check(self, "balance", self.balance in (None, "attention"), "choose 'attention' or None")
        known = isinstance(self.columns, tuple) and all(name in PACKED_COLUMNS for name in self.columns)
        _check(self, "columns", known, f"give a tuple of some of {', '.join(map(repr, PACKED_COLUMNS))}")
        remedy = "give fit='best' too: without it a batch has whole documents, in a number of rows that varies"
        _check(self, "split", self.split or self.fit is not None, remedy)
        _check(self, "balance", self.balance is None or self.fit is not None, remedy)
        _check(self, "columns", self.columns == PACKED_COLUMNS or self.fit is not None, remedy)


@dataclass(frozen=True)
class Clips(Option):
    """The clips that videos are cut into: each is a sample of `frames` frames, `stride` apart.

    A clip begins every `step` frames or seconds (as `unit` says) of a video, by default where the one before it ends.
    With `unit="seconds"`, `stride` and `step` are seconds, and the frames of a clip are those that are shown at its
    times. Clips lie within their video: one that is shorter than a clip has none. `size`: the (height, width) to
    resize frames to, bilinear; None keeps their size, and then all videos must have the same. Raises `UsageError` for
    invalid values.
    """

    frames: int = 16
    stride: int | float = 1
    step: int | float | None = None
    unit: Literal["frames", "seconds"] = "frames"
    size: tuple[int, int] | None = None

    def _validate(self) -> None:
        _check(self, "frames", is_whole(self.frames), "give a whole number of at least 1")
        _check(self, "unit", self.unit in ("frames", "seconds"), "choose 'frames' or 'seconds'")
        for name in ("stride",) if self.step is None else ("stride", "step"):
            value = getattr(self, name)
            valid = is_whole(value) if self.unit == "frames" else _is_number(value) and 0 < value < math.inf
            kind = "a whole number of frames, at least 1" if self.unit == "frames" else "seconds above 0"
            _check(self, name, valid, f"give {name} as {kind}")
        is_size = self.size is None or _is_pair(self.size, is_whole)
        _check(self, "size", is_size, "give size as (height, width), both at least 1")

    @property
    def starts_every(self) -> int | float:
        """How many frames or seconds after a clip the next one begins."""
        return self.frames * self.stride if self.step is None else self.step


@dataclass(frozen=True)
class Pad(Option):
    """How values of different lengths become one array: each is filled up to the longest of its batch.

    `value` fills the rest, on the `side` "right" (after the values) or "left". `to`: lengths are rounded up to a
    multiple of a number, or to the next of ascending edges, such as (128, 256, 512), so that there are few shapes;
    with `truncate` longer values are cut after the last edge, else they are an error. `mask`: adds the column
    `name_mask`, True for the elements of values. `axes`: how many leading axes differ, 2 for masks and images.
    A batch has the column `name_lengths`. Raises `UsageError` for invalid values.
    """

    value: int | float = 0
    side: Literal["right", "left"] = "right"
    to: int | tuple[int, ...] | None = None
    truncate: bool = False
    mask: bool = False
    axes: int = 1

    def _validate(self) -> None:
        number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        _check(self, "value", number, "give a number")
        _check(self, "side", self.side in ("right", "left"), "choose 'right' or 'left'")
        edges = self.to if isinstance(self.to, tuple | list) else ()
        ascending = bool(edges) and all(map(is_whole, edges)) and all(a < b for a, b in pairwise(edges))
        remedy = "give a number of at least 1, or ascending edges like (128, 256)"
        _check(self, "to", self.to is None or is_whole(self.to) or ascending, remedy)
        for name in ("truncate", "mask"):
            _check(self, name, isinstance(getattr(self, name), bool), "choose True or False")
        _check(self, "truncate", bool(edges) or not self.truncate, "give to=(..., longest) to cut values")
        _check(self, "axes", is_whole(self.axes), "give the number of leading axes that differ, at least 1")

    def padded(self, longest: int) -> int | None:
        """Return the length that values of up to `longest` are padded to, None beyond the last edge."""
        if self.to is None:
            return longest
        if isinstance(self.to, int):
            return -(-longest // self.to) * self.to
        return next((edge for edge in self.to if edge >= longest), self.to[-1] if self.truncate else None)


# how the values of a field form a batch: padded, as a list, or as a nested tensor
Collate = Literal["pad", "list", "nested"] | Pad
# the mean and the standard deviation of each array or channel; a path or URL of these; True: they are in the dataset
Normalize = (
    Mapping[str, "tuple[float, float] | Normalization | Mapping[str, Any] | Literal['imagenet']"]
    | str
    | os.PathLike[str]
    | bool
    | None
)
Extent = int | str  # a number of elements, or a duration along a time coordinate: "6h"


def _is_extent(value: object) -> bool:
    return isinstance(value, str) or is_whole(value)


@dataclass(frozen=True)
class Window(Option):
    """The elements of a sample along the sample axis. Each is a number of elements, or a duration such as "6h".

    `length`: the elements of a window. `stride`: from one window to the next. `step`: from one element of a window to
    the next. In place of `length`, for forecasts: `history`, the elements up to the present one, and `lead`, the
    elements after it, or a tuple of offsets after the present element; a batch then has the columns `name` and
    `name_target`. `group`: the name of an array with one number per element; a window has elements of one group.

    Windows never cross a border: that of a group, of the elements that `where=` selects, or a gap in the coordinate.
    Raises `UsageError` for invalid values.
    """

    length: Extent | None = None
    stride: Extent = 1
    step: Extent = 1
    history: Extent | None = None
    lead: Extent | tuple[Extent, ...] | None = None
    group: str | None = None

    def _validate(self) -> None:
        for name in ("stride", "step"):
            _check(self, name, _is_extent(getattr(self, name)), f"give {name} in elements, at least 1, or as '6h'")
        forecast = self.history is not None and self.lead is not None
        if (self.length is None) is not forecast or (self.history is None) is not (self.lead is None):
            raise UsageError(f"{self!r}", "give either length, or both history and lead")
        for name in ("length", "history"):
            value = getattr(self, name)
            _check(self, name, value is None or _is_extent(value), f"give {name} in elements, at least 1, or as '6h'")
        leads = self.lead if isinstance(self.lead, tuple) else (1 if self.lead is None else self.lead,)
        valid = bool(leads) and all(map(_is_extent, leads))
        _check(self, "lead", valid, "give elements or a duration, or a tuple of offsets, each at least 1 element")


@dataclass(frozen=True)
class Patch(Option):
    """A box of a sample along named axes, in elements of the first field: `Patch({"y": 256, "x": 256})`.

    `stride`: from one patch to the next, a number or one for each axis; the size by default, so that patches tile the
    axes. `random`: as many patches, each at a random place of its part of the array, a new one in each epoch; all
    places are equally likely. `margin`: elements that are read on each side of a patch, inside the array, in addition
    to its size. Other fields may have another resolution: they get the same region. Raises `UsageError` for invalid
    values.
    """

    size: Mapping[str, int]
    stride: Mapping[str, int] | int | None = None
    random: bool = False
    margin: Mapping[str, int] | int = 0

    def _validate(self) -> None:
        sizes = isinstance(self.size, Mapping) and bool(self.size) and all(map(is_whole, self.size.values()))
        named = sizes and all(isinstance(axis, str) for axis in self.size)
        _check(self, "size", named, "give a number of elements for each axis by name, like {'y': 256, 'x': 256}")
        for name, minimum in (("stride", 1), ("margin", 0)):
            value = getattr(self, name)
            numbers = list(value.values()) if isinstance(value, Mapping) else [minimum if value is None else value]
            known = not isinstance(value, Mapping) or set(value) <= set(self.size)
            valid = known and all(is_whole(number, minimum) for number in numbers)
            _check(self, name, valid, f"give a whole number of at least {minimum}, or one for each axis of size")

    def along(self, axis: str) -> tuple[int, int, int]:
        """Return the size, the stride and the margin along an axis."""
        size, stride, margin = self.size[axis], self.stride, self.margin
        stride = stride.get(axis, size) if isinstance(stride, Mapping) else size if stride is None else stride
        return size, stride, margin.get(axis, 0) if isinstance(margin, Mapping) else margin or 0


@dataclass(frozen=True, init=False)
class Channels:
    """Arrays that are stacked into one tensor, along a new axis before all but the sample axis.

    `Channels("z@500", "z@850", "t2m")`: an array, or its slice at a value of one of its other coordinates;
    `"z@level=500"` names the coordinate. Arrays without the sample axis, such as "orography", are repeated, and so are
    coordinates, such as "lat". "time_of_day" and "time_of_year" are fractions from 0 to 1, of the sample axis's times.
    Raises `UsageError` for names that are not texts.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)
        valid = bool(names) and all(isinstance(name, str) and name for name in names)
        _check(self, "names", valid and len(set(names)) == len(names), "give different names of arrays")


@dataclass(frozen=True, eq=False, kw_only=True)
class Sampling(Option):
    """How the arrays of a Zarr group become samples; see `StreamingDataset`."""

    sample_axis: str | int | None = None
    windows: Window | None = None
    patches: Patch | None = None
    channels: Channels | Mapping[str, Channels] | None = None
    decode_cf: bool | Mapping[str, bool] = True
    strict: bool | None = None
    normalize: Normalize = None
    zarr_format: int | None = None

    def _validate(self) -> None:
        if self.zarr_format not in (None, 2, 3):
            raise UsageError(f"zarr_format={self.zarr_format!r:.60}", "give 2 or 3")
        given = self.channels.values() if isinstance(self.channels, Mapping) else ()
        several = Mapping if given and all(isinstance(value, Channels) for value in given) else Channels
        for name, kind, remedy in (
            ("windows", Window, "give a Window(...)"),
            ("patches", Patch, "give a Patch(...)"),
            ("channels", several, "give Channels(...), or a dict of these by name"),
            ("normalize", Mapping | str | os.PathLike | bool, "give (mean, std) by name in a dict, a path, or True"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"{name}={value!r:.60}", remedy)
        each = self.decode_cf.items() if isinstance(self.decode_cf, Mapping) else [("", self.decode_cf)]
        if not all(isinstance(name, str) and isinstance(value, bool) for name, value in each):
            raise UsageError(f"decode_cf={self.decode_cf!r:.60}", "give True, False, or a dict of these by array")
        if not (self.sample_axis is None or isinstance(self.sample_axis, str) or is_whole(self.sample_axis, 0)):
            raise UsageError(f"sample_axis={self.sample_axis!r:.60}", "give the name or the number of a dimension")

    @property
    def used(self) -> bool:
        """Whether samples are declared or normalised, so that the URL is opened as arrays."""
        declared = (self.sample_axis, self.windows, self.patches, self.channels, self.normalize or None)
        return any(value is not None for value in declared)

    @property
    def columns(self) -> dict[str, Channels]:
        """The columns of stacked arrays, by name; a single one is called `channels`."""
        if isinstance(self.channels, Channels):
            return {"channels": self.channels}
        return dict(self.channels or {})

    @property
    def patch_dims(self) -> tuple[str, ...]:
        """The names of the dimensions that patches are cut from."""
        return () if self.patches is None else tuple(self.patches.size)


@dataclass(frozen=True, eq=False)
class Join(Option):
    """Two datasets whose samples are joined when they are read. Give it to `StreamingDataset` in place of a URL.

    Samples, order and blocks are those of `left`, and `right` gives each of them more fields. Both are URLs or
    `Source`s; `left` may also be a join. `on`: the field whose values join them (one number, text or bytes for each
    sample), or a pair of names for left and right; "index" is the number of a sample, unless there is such a field;
    None joins sample i to sample i, of datasets of the same size. `fields`: the fields of `right` to add, by default
    all but the key; `{"caption": "caption_en"}` also renames them. `missing`: "raise" an error if `right` lacks
    the key of a selected sample, or "drop" the sample. Several samples of `left` may have the same key, those of
    `right` may not.

    Raises `UsageError` for other values. Opening raises `FieldError` for keys that are missing or not unique, for a
    field that both datasets have, and for different numbers of samples.
    """

    left: Any
    right: Any
    on: str | tuple[str, str] | None = None
    fields: Sequence[str] | Mapping[str, str] | None = None
    missing: Literal["raise", "drop"] = "raise"

    def _validate(self) -> None:
        valid = self.on is None or isinstance(self.on, str) or _is_pair(self.on, lambda name: isinstance(name, str))
        _check(self, "on", valid, 'give the name of a field, or a pair of names: on=("id", "image_id")')
        names = [*self.fields.values()] if isinstance(self.fields, Mapping) else []
        listed = not isinstance(self.fields, str) and all(isinstance(name, str) for name in names)
        _check(self, "fields", listed, 'give a list of names, or a dict like {"caption": "caption_en"}')
        _check(self, "fields", len({*names}) == len(names), "give each field a name of its own")
        _check(self, "missing", self.missing in ("raise", "drop"), 'choose "raise" or "drop"')
        _check(self, "missing", self.missing == "raise" or self.on is not None, "give on=, or leave it out")
        nested = isinstance(getattr(self.right, "url", self.right), Join)  # also in a Source
        _check(self, "right", not nested, "join one after the other: Join(Join(a, b), c)")

    @property
    def keys(self) -> tuple[str, ...]:
        """The key fields of left and right; empty without."""
        return (self.on, self.on) if isinstance(self.on, str) else tuple(self.on or ())


@dataclass(frozen=True)
class Layout(Option):
    """How a dataset is divided and compressed when it is written; sizes in bytes.

    `shard_size`: of one object of the largest field; 64 MiB keeps the number of objects low and a lost upload cheap.
    `block_size`: the stored bytes of a block over all fields that are not held in memory; one request to a cloud store
    moves 50-90 MB/s, so 4 MiB hide its first-byte latency without a large window. `chunk_size`: of the unit of
    compression and checksums; 1 MiB fits a core's cache. `codec`: "auto" measures a sample of the data.
    `samples_per_shard`: replaces `shard_size` with a number of samples, which is rounded up to a power of two.

    Raises `UsageError` for invalid values.
    """

    shard_size: int = 64 * MIB
    block_size: int = 4 * MIB
    chunk_size: int = 1 * MIB
    codec: CodecChoice = "auto"
    samples_per_shard: int | None = None

    def _validate(self) -> None:
        for name in ("shard_size", "block_size", "chunk_size"):
            _check(self, name, is_whole(getattr(self, name)), f"give {name} in bytes, at least 1")
        _check(self, "codec", self.codec in CODECS, f"choose one of {', '.join(CODECS)}")
        is_count = self.samples_per_shard is None or is_whole(self.samples_per_shard)
        _check(self, "samples_per_shard", is_count, "give 1 or more")


@dataclass(frozen=True)
class Cache(Option):
    """A cache of encoded ranges on local disk, which the processes of a machine share: `cache=sl.Cache("/nvme")`.

    `path`: a local folder; the cache is in its folder `streamloader-cache`. `limit`: the most bytes that the cache
    takes on disk. `free`: the bytes that it leaves free there, by evicting ranges when other files fill the disk; 5 GiB
    are room for checkpoints and logs. Both are sizes like "200GiB", or numbers of bytes. `arrays`: True also caches
    Zarr that others wrote, which may be overwritten under the same metadata: it states that these arrays do not change.

    Raises `UsageError` for a URL, and for values that are not sizes.
    """

    path: str | os.PathLike[str]
    limit: str | int = "100GiB"
    free: str | int = "5GiB"
    arrays: bool = False

    def _validate(self) -> None:
        path = os.fspath(self.path) if isinstance(self.path, str | os.PathLike) else ""
        local = isinstance(path, str) and bool(path) and "://" not in path
        _check(self, "path", local, "give a folder on a local disk, like '/nvme/cache'")
        # workers may have another working directory
        object.__setattr__(self, "path", str(Path(path).expanduser().absolute()))
        for name in ("limit", "free"):
            given = getattr(self, name)
            valid = isinstance(given, str) or is_whole(given, 0)
            _check(self, name, valid, "give a size like '200GiB', or a number of bytes")
            nothing = name == "free" and str(given).strip() == "0"
            object.__setattr__(self, name, 0 if nothing else parse_size(given, f"Cache({name}=): "))
        _check(self, "arrays", isinstance(self.arrays, bool), "choose True or False")


def parse_size(text: str | int, name: str = "") -> int:
    """Parse "64MiB", "64MB", "512KiB", "1.5GiB" or a number into bytes. Raises `UsageError`; `name` begins its text."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units |= {letter: 1 << 10 * power, f"{letter}ib": 1 << 10 * power, f"{letter}b": 1000**power}
    raw = str(text).strip().lower().replace("_", "")
    number = raw.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = raw[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise UsageError(f"{name}{text!r} is not a size", "write it like 64MiB, 512KiB, 2GB or a number of bytes")
    return size
