"""Encoded audio: which files are clips, and a cheap test that one is whole, from its bytes alone: nothing is decoded.

The layouts are those of RIFF and AIFF chunks, RFC 9639 (FLAC), RFC 3533 (Ogg), ISO 14496-12 (MP4 boxes) and ISO 11172-3
(MPEG audio frames). The extension may lie: what a clip is, its first bytes tell.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

ENCODINGS = {
    "wav": "wav",
    "flac": "flac",
    "mp3": "mp3",
    "ogg": "ogg",
    "oga": "ogg",
    "opus": "opus",
    "m4a": "m4a",
    "aiff": "aiff",
    "aif": "aiff",
}  # by lower-case extension

_STREAMED = 0x7FFFF000  # a length that was not known when its header was written is this or more: no sample is so long
_MANY = 10_000  # chunks, blocks or candidates in front of what is looked for: only a hostile file has more
_SEARCHED = 1 << 16  # bytes after an ID3 tag in which the first MPEG frame must begin


def audio_problem(data: bytes) -> str:
    """Return why `data` cannot be a whole clip of a known kind, or nothing: some microseconds a clip.

    Also tells a clip that was cut off, where its headers say how long it is: those of MP3s often do not.
    """
    at = _after_id3(data)
    try:
        return _kind(data, at)(data, at)
    except (struct.error, IndexError):
        return f"its {len(data)} bytes end within a header: it is truncated"


def _kind(data: bytes, at: int) -> Callable[[bytes, int], str]:
    """Return the test for what begins at byte `at`."""
    first, form = data[at : at + 4], data[at + 8 : at + 12]
    if first in (b"RIFF", b"RIFX", b"RF64") and form == b"WAVE":
        return partial(_chunks_problem, order=">" if first == b"RIFX" else "<", wanted={b"fmt ", b"data"})
    if first == b"FORM" and form in (b"AIFF", b"AIFC"):
        return partial(_chunks_problem, order=">", wanted={b"COMM", b"SSND"})
    if data[at + 4 : at + 8] == b"ftyp":
        return _mp4_problem
    return {b"fLaC": _flac_problem, b"OggS": _ogg_problem}.get(first, _mp3_problem)


def _after_id3(data: bytes) -> int:
    """Return where the bytes after the ID3v2 tags in front begin; their lengths have 7 bits a byte."""
    at = 0
    while data[at : at + 3] == b"ID3" and len(data) >= at + 10:
        size = sum((data[at + 6 + i] & 0x7F) << 7 * (3 - i) for i in range(4))
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    return at


def _truncated(data: bytes, what: str, end: int) -> str:
    return f"{what} goes on to byte {end}, it has {len(data)}: it is truncated"


def _chunks_problem(data: bytes, at: int, order: str, wanted: set[bytes]) -> str:
    """Look for the chunks of a RIFF, RF64 or AIFF; numbers are in the byte `order`."""
    (size,) = struct.unpack_from(f"{order}I", data, at + 4)
    if data[at + 12 : at + 16] == b"ds64":  # RF64: the length of 64 bits is kept there
        size = min(_STREAMED - 1, *struct.unpack_from("<Q", data, at + 20))
    if size < _STREAMED and at + 8 + size > len(data) + 1:  # some writers count a last byte of padding
        return _truncated(data, "its outer chunk", at + 8 + size)
    missing, here = set(wanted), at + 12
    for _ in range(_MANY):
        if here + 8 > len(data):
            break
        name, length = struct.unpack_from(f"{order}4sI", data, here)
        here += 8
        missing.discard(name)
        if length < _STREAMED and here + length > len(data):
            return _truncated(data, f"its chunk {name.decode('latin-1')!r}", here + length)
        if not missing:
            return ""
        here += length + length % 2
    return f"it has no chunk {min(missing).decode('latin-1')!r}"


def _flac_problem(data: bytes, at: int) -> str:
    here, last = at + 4, False
    for number in range(_MANY):
        kind, length = data[here] & 0x7F, int.from_bytes(data[here + 1 : here + 4], "big")
        if number == 0 and (kind, length) != (0, 34):
            return "it does not begin with its STREAMINFO"
        last = data[here] >= 0x80
        here += 4 + length
        if here > len(data):
            return _truncated(data, "its metadata", here)
        if last:
            break
    return _flac_frames_problem(data, here, data[at + 8 : at + 8 + 34]) if last else "its metadata do not end"


def _flac_frames_problem(data: bytes, here: int, info: bytes) -> str:
    """Compare the last frame with the STREAMINFO `info`; frames begin at byte `here`."""
    block, smallest = int.from_bytes(info[2:4], "big"), int.from_bytes(info[4:7], "big")
    total = int.from_bytes(info[13:18], "big") & 0xF_FFFF_FFFF
    sync = data[here : here + 2]
    if sync not in (b"\xff\xf8", b"\xff\xf9") and (total or here < len(data)):
        return "no frame follows its metadata"
    if not total:  # not known: it was written to a pipe
        return ""
    frame = len(data)
    for _ in range(_MANY):
        frame = data.rfind(sync, here, frame + 1)
        end = _flac_frame_end(data[frame : frame + 16], block) if frame >= 0 else 0
        if end is not None:
            break
    else:
        end = 0
    if end < total:
        return f"its last frame ends at sample {end} of {total}: it is truncated"
    if len(data) - frame < smallest:
        return f"its last frame has {len(data) - frame} bytes, the smallest has {smallest}: it is truncated"
    return ""


def _flac_frame_end(header: bytes, block: int) -> int | None:
    """Return the number of the sample behind the frame of this header; None where it is none, by its checksum.

    `block` is the number of samples of every frame but the last, where frames are numbered and not samples.
    """
    ones = f"{header[4]:08b}".find("0") if len(header) > 4 else 1  # the bytes of the number, coded as in UTF-8
    if ones in (-1, 1):
        return None
    extra, number = max(0, ones - 1), header[4] & (0x7F >> ones)
    for byte in header[5 : 5 + extra]:
        number = number << 6 | byte & 0x3F
    at, code, rate = 5 + extra, header[2] >> 4, header[2] & 0xF
    wide = {6: 1, 7: 2}.get(code, 0)
    samples = int.from_bytes(header[at : at + wide], "big") + 1
    if not wide:
        samples = 192 if code == 1 else 576 << code - 2 if 2 <= code <= 5 else 256 << code - 8 if code >= 8 else 0
    at += wide + {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if not samples or rate == 0xF or at >= len(header) or _crc8(header[:at]) != header[at]:
        return None
    return (number if header[1] & 1 else number * block) + samples


def _crc8(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc << 1 ^ (0x107 if crc & 0x80 else 0)
    return crc


def _ogg_problem(data: bytes, at: int) -> str:
    flags = 0
    while at < len(data):
        if data[at : at + 4] != b"OggS"[: len(data) - at]:
            return f"no page begins at byte {at}: it is damaged"
        flags, count = data[at + 5], data[at + 26]
        end = at + 27 + count + sum(data[at + 27 : at + 27 + count])
        if end > len(data):
            return _truncated(data, "its last page", end)
        at = end
    return "" if flags & 4 else "its last page does not end the stream: it is truncated"


def _mp4_problem(data: bytes, at: int) -> str:
    boxes = set()
    while at < len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        size = struct.unpack_from(">Q", data, at + 8)[0] if size == 1 else size or len(data) - at
        if size < 8:
            return f"its box at byte {at} has {size} bytes: it is damaged"
        boxes.add(name)
        at += size
        if at > len(data):
            return _truncated(data, f"its box {name.decode('latin-1')!r}", at)
    missing = {b"moov", b"mdat"} - boxes
    return f"it has no box {min(missing).decode()!r}" if missing else ""


def _mp3_problem(data: bytes, start: int) -> str:
    at, stop = start, min(len(data), start + _SEARCHED)
    while (at := data.find(b"\xff", at, stop)) >= 0:
        length = _mp3_frame_bytes(data[at : at + 4])
        end = at + length
        if length and at == start and end > len(data):
            return _truncated(data, "its first frame", end)
        if length and (end == len(data) or _mp3_frame_bytes(data[end : end + 4])):
            return _xing_problem(data, at)
        at += 1
    return f"its {len(data)} bytes have no known audio header"


_RATES = (44100, 48000, 32000)
_KBITS_1 = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_KBITS_2 = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)


def _mp3_frame_bytes(header: bytes) -> int:
    """Return the length of the layer III frame with this header; 0 where it is none, or of a free bit rate."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2:
        return 0
    version, kbits, rate = header[1] >> 3 & 3, header[2] >> 4, header[2] >> 2 & 3
    if version == 1 or kbits in (0, 15) or rate == 3:
        return 0
    hertz = _RATES[rate] >> {3: 0, 2: 1, 0: 2}[version]
    bits = 1000 * (_KBITS_1 if version == 3 else _KBITS_2)[kbits - 1]
    return (144 if version == 3 else 72) * bits // hertz + (header[2] >> 1 & 1)


def _xing_problem(data: bytes, at: int) -> str:
    """Compare with the number of bytes that the first frame tells, where an encoder left it there."""
    mono, first = data[at + 3] >> 6 == 3, data[at + 1] >> 3 & 3 == 3
    tag = at + 4 + ((17 if mono else 32) if first else (9 if mono else 17))
    if data[tag : tag + 4] not in (b"Xing", b"Info"):
        return ""
    (flags,) = struct.unpack_from(">I", data, tag + 4)
    if not flags & 2:
        return ""
    (told,) = struct.unpack_from(">I", data, tag + 8 + 4 * (flags & 1))
    return _truncated(data, "its audio", at + told) if at + told > len(data) else ""
