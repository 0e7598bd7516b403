"""Compressed bytes into plain ones, a block at a time: what a file claims to hold is never held whole."""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from streamloader.conversion.sources.needs import need
from streamloader.errors import SourceError

BLOCK = 1 << 20  # what is unpacked at once
MAGIC_BYTES = 16
_FEED = 64 << 10  # zlib hands back what it did not need: small pieces are copied less
_FEED_ZSTD = 512  # its package bounds no output, but a block of 128 KiB takes four bytes: so 16 MiB at most
_XZ_MEMORY = 256 << 20  # xz -9 needs 65 MiB, a header may ask for 4 GiB
_ZSTD_WINDOW = 128 << 20  # as much as the zstd tool itself accepts unasked

_MAGIC = (
    ("gzip", re.compile(rb"\x1f\x8b\x08")),
    ("bzip2", re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")),  # "BZh" alone may be text
    ("xz", re.compile(rb"\xfd7zXZ\0")),
    ("zstd", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")),  # the second is a frame to be skipped
)

# what was unpacked, what of the input is left, and whether it wants more input before it gives more
_Stepped = tuple[bytes, bytes, bool]


@dataclass(frozen=True)
class _Codec:
    """`new` begins one of the members that a file may have several of; `step` feeds it, and may raise `error`."""

    new: Callable[[], Any]
    step: Callable[[Any, bytes], _Stepped]
    error: type[BaseException]
    feed: int = _FEED


def packing_of(head: bytes) -> str:
    """Return how the file that begins with these `MAGIC_BYTES` is compressed, such as "gzip"; "" where it is not."""
    return next((name for name, magic in _MAGIC if magic.match(head)), "")


def unpacked(packing: str, pieces: Iterable[memoryview], where: str) -> Iterator[bytes]:
    """Yield the plain bytes of a file, all of its members, in blocks of about a MiB and never more than 18.

    Raises `SourceError`, which says how far it got, where the file is truncated or damaged; `UsageError` where the
    package for zstd is missing.
    """
    if not packing:
        yield from _cut(pieces, BLOCK)
        return
    gathered: list[bytes] = []
    size = 0
    for out in _members(_codec(packing), packing, pieces, where):
        gathered.append(out)
        size += len(out)
        if size >= BLOCK:
            yield b"".join(gathered)
            gathered, size = [], 0
    if size:
        yield b"".join(gathered)


def _cut(pieces: Iterable[memoryview], size: int) -> Iterator[bytes]:
    return (bytes(piece[at : at + size]) for piece in pieces for at in range(0, len(piece), size))


def _members(codec: _Codec, packing: str, pieces: Iterable[memoryview], where: str) -> Iterator[bytes]:
    decoder = None
    fed = given = members = 0
    for data in _cut(pieces, codec.feed):
        fed += len(data)
        rest, hungry = data, True
        while rest or not hungry:
            if decoder is None:
                rest = rest.lstrip(b"\0") if members else rest  # files may be padded, to whole blocks of a tape
                if not rest:
                    break
                decoder, members = codec.new(), members + 1
            try:
                out, rest, hungry = codec.step(decoder, rest)
            except codec.error as error:
                problem = f"{where} is damaged, or not {packing} to its end, within its first {fed} bytes"
                raise SourceError(f"{problem}, {given} unpacked: {error}", "fetch or make it again") from error
            given += len(out)
            if decoder.eof:
                decoder, hungry = None, True
            if out:
                yield out
    if decoder is not None:
        problem = f"{where} is truncated: its {packing} data break off after {fed} bytes, {given} unpacked"
        raise SourceError(problem, "fetch or make it again")


def _codec(packing: str) -> _Codec:
    if packing == "gzip":
        return _Codec(lambda: zlib.decompressobj(wbits=31), _step_zlib, zlib.error)
    if packing == "bzip2":
        return _Codec(bz2.BZ2Decompressor, _step_hungry, OSError)
    if packing == "xz":
        new = lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)  # noqa: E731
        return _Codec(new, _step_hungry, lzma.LZMAError)
    zstandard = need("zstandard", "zstd")
    frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    return _Codec(frames.decompressobj, _step_zstd, zstandard.ZstdError, _FEED_ZSTD)


def _step_zlib(decoder: Any, data: bytes) -> _Stepped:
    out = decoder.decompress(data, BLOCK)
    rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    return out, rest, not rest


def _step_hungry(decoder: Any, data: bytes) -> _Stepped:
    out = decoder.decompress(data, BLOCK)
    return out, decoder.unused_data if decoder.eof else b"", decoder.needs_input


def _step_zstd(decoder: Any, data: bytes) -> _Stepped:
    out = decoder.decompress(data)
    return out, decoder.unused_data if decoder.eof else b"", True
