"""Decodes clips of videos, in the place of images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import DecodeError, FieldError, UsageError
from streamloader.format.clips import Clipped, clip_header, decode_clip
from streamloader.format.video import VideoIndex, count_frames, frame_size, index_video
from streamloader.images.decode import ImageDecoder
from streamloader.options import Decode

PICTURES = 24  # what a decoder holds of pictures: references, and those that it has not given back
REMEDY = (
    "repair or remove the video in the source and convert again, or go on without it in training with on_error='mask'"
)


class ClipSize(NamedTuple):
    """The size of a clip in frames and pixels."""

    frames: int
    height: int
    width: int

    @property
    def size(self) -> tuple[int, int, int]:
        """The (frames, height, width)."""
        return tuple(self)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class ClipDecoder(ImageDecoder):
    """Decodes the clips of the field `name` to uint8 (frames, height, width, 3); `expected`: their size."""

    expected: ClipSize = field(default=ClipSize(1, 1, 1))

    @property
    def part(self) -> int:
        """The number of clips that a thread decodes at least, one after another."""
        return 1

    @classmethod
    def of(cls, datasets: Sequence[Clipped]) -> ClipDecoder:
        """Return the decoder of the clips of some datasets, which are cut alike."""
        clips, name = datasets[0].clips, datasets[0].name
        largest = max((each.frame_size for each in datasets), key=math.prod)
        expected = ClipSize(clips.frames, *(clips.size or largest))
        return cls(Decode(size=clips.size), False, False, ((clips.size, None),), None, name, expected=expected)

    @property
    def columns(self) -> tuple[str, ...]:
        """The clips, the number of the first frame of each, and the time of each frame in seconds."""
        return self.name, f"{self.name}_start", f"{self.name}_times"

    @property
    def fixed_bytes(self) -> int | None:
        """The bytes of a decoded clip, without `Clips(size=)` of the largest videos that were measured."""
        return 3 * math.prod(self.expected)

    @property
    def is_sized(self) -> bool:
        """Whether clips have one size."""
        return self.options.size is not None

    def beside(self, items: Sequence[memoryview]) -> dict[str, NDArray[Any]]:
        """Return the columns beside that of clips, which are zeros for those that are bad."""
        starts = np.zeros(len(items), np.int64)
        times = np.zeros((len(items), self.expected.frames))
        for row, item in enumerate(items):
            with suppress(ValueError):
                header = clip_header(item)
                starts[row], times[row] = header["frames"][0], header["times"]
        return {f"{self.name}_start": starts, f"{self.name}_times": times}

    def shape(self, data: memoryview, sample: int) -> Any:
        """Return (frames, height, width, 3), from the header alone. Raises `DecodeError`."""
        return (*self.measure(data, sample).size, 3)

    def measure(self, data: memoryview, sample: int) -> Any:
        """Return the `ClipSize` of a clip. Raises `DecodeError`."""
        try:
            header = clip_header(data)
        except ValueError as error:
            raise self._error(sample, data, error) from error
        return self._size(header)

    def _size(self, header: Mapping[str, Any]) -> ClipSize:
        return ClipSize(len(header["frames"]), *(self.options.size or frame_size(header["video"])))

    def scratch_bytes(self, _data: memoryview, header: Any) -> int:
        """Return the bytes that decoding takes beside the result."""
        return int(PICTURES * 3 * math.prod(header.size[1:]))

    def decode(
        self,
        data: memoryview,
        sample: int,
        out: NDArray[Any] | None = None,
        numbers: Sequence[float] | None = None,  # noqa: ARG002 - of images
        crop: Any = None,  # noqa: ARG002
    ) -> NDArray[Any]:
        """Return the decoded clip, written to `out` if given. Raises as `ImageDecoder.decode`."""
        try:
            header = clip_header(data)
            shape = (*self._size(header), 3)
            if out is None or out.shape == shape:
                out = np.empty(shape, np.uint8) if out is None else out
                decode_clip(data, header, out)
                return out
        except Exception as error:
            raise self._error(sample, data, error) from error
        problem = f"a clip of sample {sample} has the shape {shape}, others of its batch {out.shape}"
        raise UsageError(problem, "give Clips(size=(height, width))")

    def _error(self, sample: int, data: memoryview, error: Exception) -> DecodeError:
        problem = f"a clip of sample {sample} of field {self.name!r} does not decode ({len(data)} bytes: {error})"
        return DecodeError(problem, REMEDY)


@dataclass(frozen=True, eq=False)
class VideoDecoder(ImageDecoder):
    """Decodes whole videos of the field `name`, to find those that do not decode."""

    def measure(self, data: memoryview, sample: int) -> Any:
        """Return the `ClipSize` of all frames. Raises `DecodeError` for a video that cannot be read."""
        try:
            index, frames, _ = index_video(self.name, bytes(data), sample)
        except FieldError as error:
            raise DecodeError(error.problem, error.remedy) from error
        return ClipSize(frames, *frame_size(VideoIndex.parse(index, "").header))

    def scratch_bytes(self, data: memoryview, header: Any) -> int:
        """Return the bytes that decoding takes."""
        return len(data) + int(PICTURES * 3 * math.prod(header.size[1:]))

    def check(self, data: memoryview, sample: int, header: Any) -> None:
        """Decode all frames. Raises `DecodeError` if one is missing."""
        try:
            found = count_frames(bytes(data))
        except ValueError as error:
            raise self._error(sample, data, error) from error
        if found != header.frames:
            problem = f"sample {sample} of field {self.name!r} decodes to {found} of {header.frames} frames"
            raise DecodeError(problem, REMEDY)

    def _error(self, sample: int, data: memoryview, error: Exception) -> DecodeError:
        problem = f"sample {sample} of field {self.name!r} does not decode as a video ({len(data)} bytes: {error})"
        return DecodeError(problem, REMEDY)
