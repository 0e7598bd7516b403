"""Options as small frozen values, checked when they are made. Each default has its reason beside it."""

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
        for name in ("window", "lanes", "block"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"Shuffle({name}={value!r})", f"give {name} as a whole number of at least 1")


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
    `first_contact_attempts`: for an endpoint that has never answered, so that a wrong URL does not look like a hang.

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
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0:
                raise UsageError(f"RetryPolicy({name}={value!r})", f"give {name} as a number of at least 0")
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
        if not (len(self.scale) == 2 and 0 < self.scale[0] <= self.scale[1] <= 1):
            raise UsageError(f"RandomResizedCrop(scale={self.scale!r})", "give (least, greatest) above 0, at most 1")
        if not (len(self.ratio) == 2 and 0 < self.ratio[0] <= self.ratio[1] < math.inf):
            raise UsageError(f"RandomResizedCrop(ratio={self.ratio!r})", "give (least, greatest) above 0")
        if not 0 <= self.flip <= 1:
            raise UsageError(f"RandomResizedCrop(flip={self.flip!r})", "give a probability from 0 to 1")


@dataclass(frozen=True)
class CenterCrop:
    """The largest box of the target's shape in the middle of the image, times `part`: for evaluation.

    0.875 is what resizing the short side to 256 and cropping 224 gives, the usual partner of `RandomResizedCrop`.
    """

    part: float = 0.875

    def __post_init__(self) -> None:
        if not 0 < self.part <= 1:
            raise UsageError(f"CenterCrop(part={self.part!r})", "give a part above 0, at most 1")


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
        if self.backend not in ("auto", "pillow", "simplejpeg"):
            raise UsageError(f"Decode(backend={self.backend!r})", "choose 'auto', 'pillow' or 'simplejpeg'")
        if self.mode not in ("RGB", "L"):
            raise UsageError(f"Decode(mode={self.mode!r})", "choose 'RGB' or 'L'")
        if self.layout not in (None, "CHW", "HWC"):
            raise UsageError(f"Decode(layout={self.layout!r})", "choose 'CHW', 'HWC' or None")
        if self.size is not None and not _is_size(self.size):
            raise UsageError(f"Decode(size={self.size!r})", "give size as (height, width), both at least 1")
        if self.crop not in (None, "random", "center") and not isinstance(self.crop, RandomResizedCrop | CenterCrop):
            raise UsageError(f"Decode(crop={self.crop!r})", "choose 'random', 'center', or a value of their classes")
        if self.crop is not None and self.size is None:
            raise UsageError(f"Decode(crop={self.crop!r}) without size", "give size=(height, width)")
        if self.normalize is not None and not _is_normalization(self.normalization, self.channels):
            raise UsageError(
                f"Decode(normalize={self.normalize!r}, mode={self.mode!r})",
                f"give (mean, std), each of {self.channels} numbers, std not 0; or 'imagenet' for RGB",
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
    numbers = [number for part in value for number in part]
    return all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) and all(value[1])


@dataclass(frozen=True)
class Pack:
    """How the documents of a batch become rows of one length: end to end, cut every `length` values.

    `pad` fills the last row of the batch, the only one that may not be full.
    """

    length: int
    pad: int | float = 0

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise UsageError(f"Pack(length={self.length!r})", "give length as a whole number of at least 1")
        if isinstance(self.pad, bool) or not isinstance(self.pad, (int, float)):
            raise UsageError(f"Pack(pad={self.pad!r})", "give pad as a number")


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
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}", f"give {name} in bytes, at least 1")
        if self.codec not in CODECS:
            raise UsageError(f"codec={self.codec!r}", f"choose one of {', '.join(CODECS)}")
        if self.samples_per_shard is not None and self.samples_per_shard < 1:
            raise UsageError(f"samples_per_shard={self.samples_per_shard}", "give at least 1")


def parse_size(text: str | int) -> int:
    """Return bytes for "64MiB", "64MB", "512KiB", "1.5GiB" or a plain number. Raises `UsageError`."""
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    units |= {f"{unit}ib": size for unit, size in units.items() if len(unit) == 1 and unit != "b"}
    units |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    raw = str(text).strip().lower().replace("_", "")
    number = raw.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = raw[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a size", "write it like 64MiB, 512KiB, 2GB or a number of bytes") from None
    if size < 1:
        raise UsageError(f"{text!r} is not a size", "give at least one byte")
    return size
