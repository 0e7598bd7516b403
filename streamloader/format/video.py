"""Videos: the index of a video's frames, which is stored beside it, and decoding of some frames from their bytes.

A field `video` (bytes with the encoding "video") has the files as they are, one in each chunk, uncompressed. Beside it
are `video_index`, `video_frames` and `video_seconds`. The index has the bytes of each frame in the file, so frames are
decoded without reading the container: see section 17 of SPEC.md.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError, FormatError
from streamloader.format.codecs import Column
from streamloader.format.keyframes import find_entries
from streamloader.format.manifest import Field
from streamloader.options import MAX_PIXELS
from streamloader.storage.optional import need

Ints = NDArray[np.int64]

BESIDE = {"index": Field("bytes"), "frames": Field("tensor", "int64"), "seconds": Field("tensor", "float64")}
KEY, HIDDEN = 1, 2  # flags of a frame: decoding can begin there; it is decoded, but not shown
CONTAINERS = ("mp4", "mov", "matroska", "webm")
HEADER_BYTES = 64  # Matroska has up to so many before the bytes of a frame
CHANGED = "new_extradata"  # of packets from which on a file states other parameters
# the columns of the index, one value for each frame
_COLUMNS = (("pts", "<i8"), ("starts", "<i8"), ("sizes", "<u4"), ("crcs", "<u4"), ("flags", "u1"))
# FFmpeg's own decoder of AV1 needs a GPU
_DECODERS = {"av1": "libdav1d"}
_TRAITS = ("width", "height", "color_range", "colorspace", "color_primaries", "color_trc")
# the least value of each number in the header of an index
_LEAST = {"size": 0, **dict.fromkeys(_TRAITS, 0), "width": 1, "height": 1, "rotation": 0, "frames": 1}


def with_index(fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return the fields with those that are stored beside each field of videos.

    Raises `FieldError` if there is another field of such a name.
    """
    found = dict(fields)
    for name in (name for name, field in fields.items() if field.is_video):
        for suffix, field in BESIDE.items():
            if found.setdefault(f"{name}_{suffix}", field) != field:
                problem = f"the field {name}_{suffix} is {found[f'{name}_{suffix}']}, and beside videos it is {field}"
                raise FieldError(problem, "rename one of the two fields")
    return found


def without_index(fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return the fields without those that are stored beside fields of videos."""
    beside = {f"{name}_{suffix}" for name, field in fields.items() if field.is_video for suffix in BESIDE}
    return {name: field for name, field in fields.items() if name not in beside}


def unindexed(fields: Mapping[str, Field]) -> list[str]:
    """Return the names of the fields of videos without those that are stored beside them."""
    beside = [(name, [f"{name}_{suffix}" for suffix in BESIDE]) for name, field in fields.items() if field.is_video]
    return [name for name, names in beside if not fields.keys() >= set(names)]


def index_columns(name: str, videos: Column, samples: Sequence[object]) -> dict[str, Column]:
    """Return the columns to store beside a column of videos, the `samples` of some numbers. Raises as `index_video`."""
    made = [index_video(name, data, sample) for data, sample in zip(videos, samples, strict=True)]
    frames, seconds = (np.array([each[place] for each in made], kind) for place, kind in ((1, "int64"), (2, "float64")))
    return {f"{name}_index": [each[0] for each in made], f"{name}_frames": frames, f"{name}_seconds": seconds}


def index_video(name: str, data: bytes, sample: object) -> tuple[bytes, int, float]:
    """Return the index of a video, the number of its frames, and its duration in seconds.

    Its first frames are decoded, and of others only the container is read. Raises `FieldError`, which names the field
    and the sample, for data that are no video, for a video that is shown mirrored, and for a container that does not
    have the bytes of frames in one piece.
    """
    av = need("av")
    where = f"field {name!r} of sample {sample}"
    remedy = "repair it, or remux it with ffmpeg -i IN -c copy OUT.mp4"
    try:
        with av.open(io.BytesIO(data)) as container:
            if not set(container.format.name.split(",")) & set(CONTAINERS):
                kinds = ", ".join(CONTAINERS)
                raise FieldError(f"{where} is a video in {container.format.name}, and not in {kinds}", remedy)
            stream = next(iter(container.streams.video), None)
            if stream is None or stream.codec_context is None:
                raise FieldError(f"{where} has no video stream of a known codec", "leave it out")
            packets = [packet for packet in container.demux(stream) if packet.size]
            header, begin = _describe(stream, packets, data, where)
            columns = _columns(header, packets, data, where, remedy)
            skipped = (columns["pts"] < begin[-1]) & ~np.isin(columns["pts"], begin)
            columns["flags"][skipped] |= HIDDEN
            last = max(packets, key=lambda packet: packet.pts)
            unit, duration = stream.time_base, last.duration  # while the container is open: then they are gone
    except (av.FFmpegError, ValueError) as error:
        raise FieldError(f"{where} is no video that can be read: {error}", remedy) from error
    times = np.sort(columns["pts"][columns["flags"] & HIDDEN == 0])
    if not times.size or not columns["flags"][0] & KEY or np.any(times[1:] == times[:-1]):
        raise FieldError(f"{where} has no frames, no first key frame, or two frames at one time", remedy)
    count = int(times.size)
    duration = duration or (int(times[-1] - times[0]) // max(1, count - 1))
    seconds = (int(times[-1] - times[0]) + duration) * unit.numerator / unit.denominator
    packed = b"".join(columns[key].astype(kind).tobytes() for key, kind in _COLUMNS)
    index = (json.dumps({**header, "frames": len(packets)}) + "\n").encode() + packed
    return index, count, seconds


def _describe(stream: Any, packets: Sequence[Any], data: bytes, where: str) -> tuple[dict[str, Any], list[int]]:
    """Return what decoding needs beside the bytes of frames, as JSON values, and the times that the video begins with.

    These are of frames that a decoder shows, up to the first one that is not before the first packet. It skips leading
    pictures of frames that the file does not have, and frames before the end of an intra refresh.
    """
    context = stream.codec_context
    header = {
        "codec": context.codec.canonical_name,
        "extradata": (context.extradata or b"").hex(),
        "time_base": [stream.time_base.numerator, stream.time_base.denominator],
        "size": len(data),
        **{name: int(getattr(context, name)) for name in _TRAITS},
    }
    times, rotation = list[int](), 0
    with need("av").open(io.BytesIO(data)) as container:
        for frame in _decode_all(container):
            rotation = int(frame.rotation)
            if _is_mirrored(frame):
                raise FieldError(f"{where} is shown mirrored", "encode it again: ffmpeg -i IN OUT.mp4")
            if None in (frame.pts, packets[0].pts):
                raise ValueError("a frame has no time")
            times.append(frame.pts)
            if frame.pts >= packets[0].pts:
                break
    if not times or rotation % 90:
        raise ValueError(f"it is turned by {rotation} degrees" if times else "no frame is shown")
    return {**header, "rotation": rotation % 360}, times


def _is_mirrored(frame: Any) -> bool:
    """Return whether a frame is flipped to be shown, which `rotation` does not tell."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return False
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    return bool(a * d < b * c)  # a negative determinant


def _columns(
    header: Mapping[str, Any], packets: Sequence[Any], data: bytes, where: str, remedy: str
) -> dict[str, NDArray[Any]]:
    """Return the columns of the index."""
    rows, parts = [], ((bytes(packet), packet.is_keyframe) for packet in packets)
    extradata = bytes.fromhex(header["extradata"])
    entries = find_entries(header["codec"], extradata, parts)
    for number, (packet, entry) in enumerate(zip(packets, entries, strict=True)):
        body = bytes(packet)
        start = -1 if packet.pos is None else data.find(body, packet.pos, packet.pos + packet.size + HEADER_BYTES)
        if start < 0 or packet.pts is None:
            raise FieldError(f"{where} does not have frame {number} in one piece, or no time of it", remedy)
        if packet.has_sidedata(CHANGED) and bytes(packet.get_sidedata(CHANGED)) != extradata:
            raise FieldError(
                f"{where} has other parameters from frame {number} on", "encode it again: ffmpeg -i IN OUT.mp4"
            )
        flags = KEY * entry + HIDDEN * packet.is_discard
        rows.append((packet.pts, start, packet.size, crc32c.crc32c(body), flags))
    return {name: np.array([row[at] for row in rows], kind) for at, (name, kind) in enumerate(_COLUMNS)}


@dataclass(frozen=True, eq=False)
class VideoIndex:
    """The index of a video. Its columns have a value for each stored frame, in the order of decoding.

    `pts`: when it is shown, in units of `time_base`. `starts`, `sizes`: its bytes. `flags`: `KEY`, `HIDDEN`.
    `where`: what errors call it.
    """

    header: Mapping[str, Any]
    pts: Ints
    starts: Ints
    sizes: Ints
    crcs: Ints
    flags: Ints
    where: str

    @classmethod
    def parse(cls, data: bytes, where: str) -> VideoIndex:
        """Return the index that `index_video` wrote. Raises `FormatError`, which names it, for other bytes."""
        try:
            end = data.index(b"\n") + 1
            header = _checked(json.loads(data[:end]))
            count, columns = header["frames"], {}
            for name, kind in _COLUMNS:
                values = np.frombuffer(data, kind, count, end)
                columns[name], end = values.astype(np.int64), end + values.nbytes
            inside = columns["starts"] <= header["size"] - columns["sizes"]  # their sum may be more than int64 holds
            if end != len(data) or not inside.all() or int(columns["starts"].min()) < 0:
                raise ValueError(f"{len(data)} bytes for {count} frames")
            if np.all(columns["flags"] & HIDDEN):
                raise ValueError(f"none of {count} frames is shown")
            return cls(header, **columns, where=where)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"{where} is not an index of a video: {error}", "convert the dataset again") from error

    @cached_property
    def shown(self) -> Ints:
        """The stored number of each frame that is shown, in the order of showing."""
        visible = np.flatnonzero(self.flags & HIDDEN == 0)
        return visible[np.argsort(self.pts[visible], kind="stable")]

    @cached_property
    def times(self) -> NDArray[np.float64]:
        """The time of each frame that is shown, in seconds after the first one."""
        pts = self.pts[self.shown]
        numerator, denominator = self.header["time_base"]
        return np.asarray((pts - pts[0]) * numerator / denominator, np.float64)

    def groups(self, frames: Ints) -> dict[int, tuple[int, list[int]]]:
        """Return what to decode for some shown frames: by each stored key frame the end of what follows it, and frames.

        A frame needs the last key frame that is stored before it and not shown after it.
        """
        keys = np.flatnonzero(self.flags & KEY)
        found: dict[int, tuple[int, list[int]]] = {}
        for frame in dict.fromkeys(frames.tolist()):
            stored = int(self.shown[frame])
            before = keys[(keys <= stored) & (self.pts[keys] <= self.pts[stored])]
            stop, group = found.get(first := int(before[-1]) if before.size else 0, (0, []))
            found[first] = max(stop, stored + 1), [*group, frame]
        return found


def _checked(header: Any) -> dict[str, Any]:
    """Return the values of an index's header that are used. Raises `ValueError`, `KeyError` or `TypeError`."""
    numerator, denominator = header["time_base"]
    numbers = [(name, header[name], least) for name, least in _LEAST.items()]
    for name, value, least in [*numbers, ("time_base", numerator, 1), ("time_base", denominator, 1)]:
        if type(value) is not int or not least <= value < 2 ** (63 if name == "size" else 31):
            raise ValueError(f"{name} is {value!r:.40}")
    if not isinstance(header["codec"], str):
        raise TypeError(f"codec is {header['codec']!r:.40}")
    bytes.fromhex(header["extradata"])
    return {name: header[name] for name in ("codec", "extradata", "time_base", *_LEAST)}


def decode_frames(
    header: Mapping[str, Any], packets: Iterator[tuple[int, memoryview]], wanted: Mapping[int, NDArray[np.uint8]]
) -> None:
    """Decode a group of frames, (time, bytes) in the order of storage from a key frame on.

    Those at the times `wanted` are written as RGB to these arrays, (height, width, 3), to whose size they are resized.
    Raises `ValueError` if one of these is missing, and errors of FFmpeg.
    """
    av = need("av")
    context = av.CodecContext.create(_DECODERS.get(header["codec"], header["codec"]), "r")
    context.thread_count = 1  # clips are decoded in as many threads or processes as there are cores
    _set_options(context)
    if header["extradata"]:
        context.extradata = bytes.fromhex(header["extradata"])
    for name in _TRAITS:
        setattr(context, name, header[name])
    left = set(wanted)

    def put(frames: Sequence[Any]) -> None:
        for frame in frames:
            if frame.pts in left:
                left.remove(frame.pts)
                turned = wanted[frame.pts] if not header["rotation"] else np.rot90(wanted[frame.pts], -turns)
                height, width = turned.shape[:2]
                turned[...] = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BILINEAR")

    turns = header["rotation"] // 90
    for time, data in packets:
        packet = av.Packet(len(data))  # a copy, with the zeros after it that FFmpeg's decoders read
        packet.update(data)
        packet.pts = time
        put(context.decode(packet))
    put(context.decode(None))
    if left:
        raise ValueError(f"{len(left)} of {len(wanted)} frames are not decoded")


def _set_options(context: Any) -> None:
    """Limit the pixels of a frame; a decoder of H.264 shows all frames also of a stream without limit of reordering."""
    strict = {"strict": "strict"} if context.name == "h264" else {}
    context.options = {"max_pixels": str(MAX_PIXELS), **strict}


def _decode_all(container: Any) -> Iterator[Any]:
    """Return the frames of the first video stream of a container."""
    _set_options(container.streams.video[0].codec_context)
    frames: Iterator[Any] = container.decode(video=0)
    return frames


def count_frames(data: bytes) -> int:
    """Return the number of frames that a video decodes to. Raises `ValueError` if it does not decode."""
    av = need("av")
    try:
        with av.open(io.BytesIO(data)) as container:
            return sum(1 for _ in _decode_all(container))
    except av.FFmpegError as error:
        raise ValueError(str(error)) from error


def frame_size(header: Mapping[str, Any]) -> tuple[int, int]:
    """Return the (height, width) of a video's frames as they are shown."""
    size = int(header["height"]), int(header["width"])
    return size[::-1] if header["rotation"] % 180 else size
