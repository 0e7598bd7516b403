"""Options as small frozen values, checked when they are made. Each default has its reason next to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from streamloader.errors import UsageError

MIB = 1 << 20

CodecChoice = Literal["auto", "none", "lz4", "zstd"]
Remainder = Literal["pad", "drop", "uneven"]

CODECS: tuple[CodecChoice, ...] = ("auto", "none", "lz4", "zstd")
REMAINDERS: tuple[Remainder, ...] = ("pad", "drop", "uneven")


def _check(option: object, *rules: tuple[bool, str, str]) -> None:
    """Raise `UsageError` for the first rule, (whether it holds, name of the value, remedy), that is broken."""
    for holds, name, remedy in rules:
        if not holds:
            raise UsageError(f"{type(option).__name__}({name}={getattr(option, name)!r})", remedy)


def is_whole(value: object, least: int = 1) -> bool:
    """Return whether the value is a whole number, of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Shuffle:
    """How samples are mixed. None takes what the manifest pins; a given value overrides it.

    `window`: samples a lane may delay one by; a multiple of `block`, at least two of them. Larger mixes
    better and needs more memory. `lanes`: streams that are interleaved; at least the number of ranks, so
    that each block is read by one rank. `block`: samples fetched together; larger makes fewer, longer requests.
    """

    window: int | None = None
    lanes: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check(self, (value is None or is_whole(value), name, f"give {name} as a whole number of at least 1"))


@dataclass(frozen=True)
class RetryPolicy:
    """How long requests are retried, and when a response is late; times in seconds.

    Pass it as `storage_options={"retry": RetryPolicy(...)}` wherever storage options are accepted. Retries are limited
    by time, not by attempts, and for all requests of a process to a URL together: how many are in flight, or how fast
    connections are refused, does not change how long an outage may last.

    `outage_seconds`: how long every request may fail before the run ends. 5 minutes outlast the restart of a server or
    a load balancer; a rank still fails with a clear error before NCCL's default timeout of 10 minutes ends the others.
    `request_seconds`: how long one request may fail while others succeed. `base_seconds`, `cap_seconds`: its wait
    before retry n (from 0) is uniform in [0, min(cap, base * 2^n)] ("full jitter"), so that clients that failed
    together do not return together; what the store asks for with Retry-After comes before that, up to the cap.
    `probe_seconds`: during an outage one request every 0.5 to 1 times as long tests the endpoint and the others wait; a
    run thus resumes within 2 s of the server's return, without a storm of requests. `report_seconds`: when an outage is
    logged (on stderr unless logging is configured otherwise) and shown in `stats().waiting_for`.
    `first_contact_attempts`: for an endpoint that has never responded, so that a wrong URL does not look like a hang.

    `response_seconds`, `min_bytes_per_second`: a response may take `response_seconds + bytes / min_bytes_per_second`,
    and may not fall behind that rate by more than `response_seconds` at any time; then its connection is closed and the
    request is repeated on a new one. A cloud store sends its first byte within 0.2 s, and 50-90 MB/s after that: 10 s
    leave room for servers with a queue, and 64 KiB/s for a home connection of 10 Mbit/s that 16 requests share. Raise
    `response_seconds` for stores that read from tape.
    """

    outage_seconds: float = 300.0
    request_seconds: float = 120.0
    base_seconds: float = 0.2
    cap_seconds: float = 20.0
    probe_seconds: float = 1.0
    report_seconds: float = 10.0
    first_contact_attempts: int = 3
    response_seconds: float = 10.0
    min_bytes_per_second: float = 65536.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check(self, (_is_number(value) and value >= 0, name, f"give {name} as a number of at least 0"))
        if self.first_contact_attempts < 1 or min(self.response_seconds, self.min_bytes_per_second) <= 0:
            raise UsageError(f"{self!r} lets no request succeed", "give values above 0")

    def delay(self, retry: int, jitter: float) -> float:
        """Return the wait before the retry numbered `retry` from 0, with `jitter` in [0, 1)."""
        return jitter * min(self.cap_seconds, self.base_seconds * 2.0 ** min(retry, 60))

    def deadline(self, size: int) -> float:
        """Return how long a response of `size` bytes may take."""
        return self.response_seconds + size / self.min_bytes_per_second


@dataclass(frozen=True)
class RandomResizedCrop:
    """A box of random size, shape and place, resized to the target: the usual augmentation of photographs.

    `scale`: the least and greatest part of the image's area; `ratio`: of width to height, drawn evenly on a
    logarithmic scale. `flip`: how probably the result is mirrored, from 0 to 1. The random numbers belong to the
    sample's seed, epoch and position.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.0

    def __post_init__(self) -> None:
        scale, ratio = self.scale, self.ratio
        _check(
            self,
            (len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1, "scale", "give (least, greatest) above 0, at most 1"),
            (len(ratio) == 2 and 0 < ratio[0] <= ratio[1] < math.inf, "ratio", "give (least, greatest) above 0"),
            (0 <= self.flip <= 1, "flip", "give a probability from 0 to 1"),
        )


@dataclass(frozen=True)
class CenterCrop:
    """The largest box of the target's shape in the middle of the image, times `part`: for evaluation.

    0.875 is what resizing the short side to 256 and cropping 224 gives, the usual partner of `RandomResizedCrop`.
    """

    part: float = 0.875

    def __post_init__(self) -> None:
        _check(self, (0 < self.part <= 1, "part", "give a part above 0, at most 1"))


Normalization = tuple[tuple[float, ...], tuple[float, ...]]
# mean and standard deviation of ImageNet's training images, channels from 0 to 1: what torchvision's models expect
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Decode:
    """How encoded images become tensors: uint8 (height, width, channels); with `normalize` float32 (channels,
    height, width), as torch's models take them.

    `backend`: "pillow" knows every format; "simplejpeg" decodes JPEG four times as fast and leaves other formats to
    Pillow; "auto" is simplejpeg where it is installed, and then OpenCV resizes where that is. `mode`: "RGB" (3
    channels), "L" (1). `size`: (height, width) to resize to, bilinear; None keeps each image's own size, and then
    all images of a batch must have one, or a transform must make it so. `crop`: what is resized to `size`: None, the
    whole image; "random" or `RandomResizedCrop(...)`; "center" or `CenterCrop(...)`. `normalize`: (mean, std), one
    number for each channel, gives (x / 255 - mean) / std; "imagenet" stands for `IMAGENET`. `layout`: "CHW" or "HWC";
    None is "CHW" with `normalize`, else "HWC". Either way the values of a pixel are neighbours in memory: a "CHW" batch
    is in torch's `channels_last` memory format. A transform gets "HWC". An EXIF orientation is not applied: the pixels
    come as they are stored.
    """

    backend: Literal["auto", "pillow", "simplejpeg"] = "auto"
    mode: Literal["RGB", "L"] = "RGB"
    size: tuple[int, int] | None = None
    crop: Literal["random", "center"] | RandomResizedCrop | CenterCrop | None = None
    normalize: Literal["imagenet"] | Normalization | None = None
    layout: Literal["CHW", "HWC"] | None = None

    def __post_init__(self) -> None:
        crop = self.crop in (None, "random", "center") or isinstance(self.crop, RandomResizedCrop | CenterCrop)
        means = f"give (mean, std), each of {self.channels} numbers, std not 0; or 'imagenet' for mode='RGB'"
        _check(
            self,
            (self.backend in ("auto", "pillow", "simplejpeg"), "backend", "choose 'auto', 'pillow' or 'simplejpeg'"),
            (self.mode in ("RGB", "L"), "mode", "choose 'RGB' or 'L'"),
            (self.layout in (None, "CHW", "HWC"), "layout", "choose 'CHW', 'HWC' or None"),
            (self.size is None or _is_size(self.size), "size", "give size as (height, width), both at least 1"),
            (crop, "crop", "choose 'random', 'center', or a value of their classes"),
            (
                self.crop is None or self.size is not None,
                "crop",
                "a crop without size=(height, width) is impossible: give it",
            ),
            (self.normalize is None or _is_normalization(self.normalization, self.channels), "normalize", means),
        )

    @property
    def channels(self) -> int:
        """Channels of every decoded image."""
        return 3 if self.mode == "RGB" else 1

    @property
    def channels_first(self) -> bool:
        """Whether tensors have the channels before height and width."""
        return self.layout == "CHW" or (self.layout is None and self.normalize is not None)

    @property
    def box(self) -> RandomResizedCrop | CenterCrop | None:
        """The crop as a value."""
        if isinstance(self.crop, str):
            return RandomResizedCrop() if self.crop == "random" else CenterCrop()
        return self.crop

    @property
    def normalization(self) -> Normalization | None:
        """Mean and standard deviation of each channel."""
        return IMAGENET if self.normalize == "imagenet" else self.normalize


def _is_size(size: object) -> bool:
    return isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(n, int) and n >= 1 for n in size)


def _is_normalization(value: object, channels: int) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    if any(not isinstance(part, tuple | list) or len(part) != channels for part in value):
        return False
    return all(_is_number(number) for part in value for number in part) and all(value[1])


@dataclass(frozen=True)
class Pack:
    """How the documents of a batch become rows of one length: end to end, cut every `length` values.

    `pad` fills the last row of the batch, the only one that may not be full.
    """

    length: int
    pad: int | float = 0

    def __post_init__(self) -> None:
        pad = isinstance(self.pad, int | float) and not isinstance(self.pad, bool)
        _check(self, (is_whole(self.length), "length", "give length as a whole number of at least 1"))
        _check(self, (pad, "pad", "give pad as a number"))


@dataclass(frozen=True)
class Layout:
    """How a dataset is cut and compressed when it is written; sizes in bytes.

    `shard_size`: one object of the largest field; 64 MiB keeps object counts low and a lost upload cheap.
    `block_size`: the stored bytes of a block over all bulk fields; one request moves 50-90 MB/s on a cloud
    store, so 4 MiB hides its first-byte latency without a large window. `chunk_size`: the unit of
    decompression and checksum; 1 MiB fits a core's cache. `codec`: "auto" measures a sample of the data.
    `samples_per_shard`: overrides `shard_size` with a number of samples, rounded up to a power of two.
    """

    shard_size: int = 64 * MIB
    block_size: int = 4 * MIB
    chunk_size: int = 1 * MIB
    codec: CodecChoice = "auto"
    samples_per_shard: int | None = None

    def __post_init__(self) -> None:
        for name in ("shard_size", "block_size", "chunk_size"):
            _check(self, (getattr(self, name) >= 1, name, f"give {name} in bytes, at least 1"))
        _check(self, (self.codec in CODECS, "codec", f"choose one of {', '.join(CODECS)}"))
        _check(
            self, (self.samples_per_shard is None or self.samples_per_shard >= 1, "samples_per_shard", "give 1 or more")
        )


def parse_size(text: str | int, name: str = "") -> int:
    """Return bytes for "64MiB", "64MB", "512KiB", "1.5GiB" or a plain number.

    Raises `UsageError`, which begins with `name`.
    """
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
