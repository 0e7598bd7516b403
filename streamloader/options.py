"""Options as small frozen values, checked when they are made. Each default has its reason beside it."""

from __future__ import annotations

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
class Decode:
    """How encoded images become tensors: uint8, height x width x channels.

    `backend`: "pillow" knows every format; "simplejpeg" decodes JPEG four times as fast and leaves other
    formats to Pillow; "auto" is simplejpeg where it is installed. `mode`: "RGB" (3 channels), "L" (1) .
    `size`: (height, width) to resize to, bilinear; None keeps each image's own size, and then all images of
    a batch must have one, or a transform must make it so.
    """

    backend: Literal["auto", "pillow", "simplejpeg"] = "auto"
    mode: Literal["RGB", "L"] = "RGB"
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "pillow", "simplejpeg"):
            raise UsageError(f"Decode(backend={self.backend!r})", "choose 'auto', 'pillow' or 'simplejpeg'")
        if self.mode not in ("RGB", "L"):
            raise UsageError(f"Decode(mode={self.mode!r})", "choose 'RGB' or 'L'")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise UsageError(f"Decode(size={self.size!r})", "give size as (height, width), both at least 1")


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
