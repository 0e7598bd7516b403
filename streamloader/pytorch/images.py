"""Decodes the JPEGs of a batch on a device: whole pictures by nvJPEG, which it crops and resizes there.

Batches are complete before they are handed out, in memory that belongs to the stream that decodes: see `Transfers`.

With the device "cpu" the same steps run here, on whole pictures that are decoded by the CPU.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from streamloader.errors import UsageError
from streamloader.options import EXIF_HEADER, MIB

Ints = NDArray[np.int64]
# The decoded pictures, and the floats, that a device has at a time.
PART_BYTES = 256 * MIB
# The columns of crops, see `ImageDecoder.decode`.
TOP, LEFT, HEIGHT, WIDTH, FLIP, WHOLE_HEIGHT, WHOLE_WIDTH, SCALE, TURN, EXIF = range(10)


def check_device(device: str) -> None:
    """Raise `UsageError` unless images can be decoded on the device."""
    if torch.device(device).type == "cpu":
        return
    if not torch.cuda.is_available():
        raise UsageError(f"Decode(device={device!r}), and torch finds no GPU", "leave device= out to decode by the CPU")
    try:
        nvjpeg()
    except (ImportError, OSError, RuntimeError) as error:
        problem = f"Decode(device={device!r}) without TorchCodec or torchvision, which call nvJPEG: {error}"
        raise UsageError(problem, "pip install 'torchcodec>=0.16'") from error


@cache  # to import what does not load takes long
def nvjpeg() -> Callable[..., Sequence[torch.Tensor]]:
    """Return the batch call of TorchCodec, or else of torchvision: `call(files, mode="RGB" or "GRAY", device=)`.

    TorchCodec's takes the place of torchvision's, which is deprecated since 0.29. Raises `ImportError` without both,
    and what importing torchvision raises, such as `RuntimeError` if it was built for another torch.
    """
    try:
        from torchcodec.decoders import decode_jpeg as call  # since 0.16

        return call  # type: ignore[no-any-return]
    except (ImportError, OSError, RuntimeError):  # it is older, or built for another torch
        from torchvision.io import ImageReadMode, decode_jpeg

        return lambda files, mode, device: decode_jpeg(files, mode=ImageReadMode[mode], device=device)


def device_decoder(device: str) -> tuple[Callable[..., torch.Tensor], Callable[[], object]]:
    """Return a function that decodes batches on a device, and one that waits until these are complete.

    The first one is `decode(memory, (spans, pixels, crops))`: the files are at `spans` (first byte, size) of
    `memory`, and `crops` are those of `ImageDecoder.decode`, int64 of shape (images, 10). Images that the CPU decoded
    are taken from `pixels`, uint8 of shape (images, height, width, channels). It returns such a tensor. Raises
    `RuntimeError` if a file does not decode.

    Both are called in one thread, whose device and stream they set. Call this one in the thread that uses the batches:
    "cuda" is the device that is current there.
    """
    target = torch.device(device)
    if target.type == "cpu":
        return partial(_decode, target, _decode_here), bool
    return _gpu_decoder(torch.cuda.current_device() if target.index is None else target.index)


@cache  # torch keeps the free memory of each stream, so all datasets and passes have one
def _gpu_decoder(number: int) -> tuple[Callable[..., torch.Tensor], Callable[[], object]]:
    target = torch.device("cuda", number)
    streams: list[torch.cuda.Stream] = []

    def decode(*args: Any) -> torch.Tensor:
        torch.cuda.set_device(target)  # before anything else, which would begin to use device 0
        if not streams:
            streams.append(torch.cuda.Stream(target))  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(streams[0])
        return _decode(target, partial(_decode_by_nvjpeg, streams[0]), *args)

    def wait() -> None:
        for stream in streams:
            stream.synchronize()

    return decode, wait


Pictures = Callable[[list[torch.Tensor], torch.device, int], Sequence[torch.Tensor]]


def _decode_by_nvjpeg(
    stream: torch.cuda.Stream, files: list[torch.Tensor], device: torch.device, channels: int
) -> Sequence[torch.Tensor]:
    """Return whole pictures, uint8 of shape (channels, height, width). Raises `RuntimeError` if one does not decode."""
    # torchvision writes from a stream of its own to memory that this stream may still read
    stream.synchronize()
    return nvjpeg()(files, mode="RGB" if channels == 3 else "GRAY", device=device)


def _decode_here(files: list[torch.Tensor], _: torch.device, channels: int) -> Sequence[torch.Tensor]:
    """Do what `_decode_by_nvjpeg` does, by the CPU; like nvJPEG it repeats chroma and does not interpolate it."""
    fast = importlib.util.find_spec("simplejpeg") is not None
    pictures = []
    for file in files:
        data = file.numpy()
        try:
            if fast:
                import simplejpeg

                pixels = simplejpeg.decode_jpeg(data, "RGB" if channels == 3 else "GRAY", fastupsample=True)
            else:
                with Image.open(io.BytesIO(data.data)) as image:
                    pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
        except Exception as error:
            raise RuntimeError(f"JPEG of {len(data)} bytes: {error}") from error
        pictures.append(torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1))
    return pictures


def _decode(
    device: torch.device, decode: Pictures, memory: NDArray[np.uint8], images: tuple[Ints, NDArray[np.uint8], Ints]
) -> torch.Tensor:
    """See `device_decoder`. `decode`: returns the whole pictures of files."""
    spans, pixels, crops = images
    count, height, width, channels = pixels.shape
    out = torch.empty(pixels.shape, dtype=torch.uint8, device=device)
    on_cpu = np.flatnonzero(crops[:, TURN] == 0)
    if len(on_cpu) == count:
        out.copy_(torch.from_numpy(pixels))
    elif len(on_cpu):
        out[torch.from_numpy(on_cpu).to(device)] = torch.from_numpy(pixels[on_cpu]).to(device)
    files = torch.from_numpy(memory)
    for rows in _parts(np.flatnonzero(crops[:, TURN]), crops, (height, width), channels):
        own = [files[first : first + size] for first, size in spans[rows].tolist()]
        for number in np.flatnonzero(crops[rows, EXIF]):  # TorchCodec would turn pictures by what it reads there
            own[number] = own[number].clone()
            own[number].narrow(0, int(crops[rows[number], EXIF]), EXIF_HEADER).zero_()
        made = _resized(decode(own, device, channels), crops[rows], (height, width))
        if len(rows) == count:
            out.copy_(made)
        else:
            out[torch.from_numpy(rows).to(device)] = made
    return out


def _parts(rows: Ints, crops: Ints, size: tuple[int, int], channels: int) -> Iterator[Ints]:
    """Divide rows so that the pictures of each part, and the floats of their crops, have at most `PART_BYTES`."""
    pictures = channels * crops[rows, WHOLE_HEIGHT] * crops[rows, WHOLE_WIDTH]
    heights, widths = (-(-crops[rows, side] // crops[rows, SCALE]) for side in (HEIGHT, WIDTH))
    first = 0
    while first < len(rows):
        most_high, most_wide = (np.maximum.accumulate(sides[first:]) for sides in (heights, widths))
        floats = most_high * most_wide + most_high * size[1] + (most_high * size[0] + most_wide * size[1]) / channels
        floats = channels * (floats + size[0] * size[1]) * np.arange(1, len(floats) + 1)
        fits = (np.cumsum(pictures[first:]) <= PART_BYTES) & (4 * floats <= PART_BYTES)
        stop = first + max(1, int(np.count_nonzero(fits)))  # both grow with the rows
        yield rows[first:stop]
        first = stop


def _resized(pictures: Sequence[torch.Tensor], crops: Ints, size: tuple[int, int]) -> torch.Tensor:
    """Return the crops of pictures, uint8 of shape (channels, height, width), resized as by the CPU's decoder.

    The result is uint8 of shape (pictures, height, width, channels). A picture is scaled down by averaging first. Then
    two matrices for each take weighted sums of its rows and of its columns.
    """
    device, channels = pictures[0].device, len(pictures[0])
    scales, (flips_rows, flips_columns) = crops[:, SCALE], _flips(crops[:, TURN])
    high, wide = (-(-crops[:, side] // scales) for side in (HEIGHT, WIDTH))
    shape = len(crops), int(high.max()), channels, int(wide.max())
    source = torch.zeros(shape, dtype=torch.float32, device=device)
    top, left, height, width, _, *whole = crops[:, :SCALE].T
    top = np.where(flips_rows, whole[0] - top - height, top)
    left = np.where(flips_columns, whole[1] - left - width, left)
    boxes = np.stack([crops[:, TURN] > 4, scales, top, left, height, width, high, wide], axis=1)
    for picture, out, (swapped, k, y, x, h, w, rows, columns) in zip(
        pictures, source.unbind(), boxes.tolist(), strict=True
    ):
        part = (picture.transpose(1, 2) if swapped else picture).narrow(1, y, h).narrow(2, x, w)
        if k > 1:
            part = torch.nn.functional.avg_pool2d(part.float(), k, ceil_mode=True)
        out.narrow(0, 0, rows).narrow(2, 0, columns).copy_(part.transpose(0, 1))
    shrinks = np.stack([high / size[0], wide / size[1]])
    rules = np.where(shrinks.max(0) <= 2, _LINEAR, np.where(shrinks.min(0) >= 1, _AREA, _AREA_GROWS))
    by_row = _weights(high, size[0], rules, flips_rows, device)
    by_column = _weights(wide, size[1], rules, flips_columns ^ (crops[:, FLIP] > 0), device)
    count, most = source.shape[:2]
    narrow = torch.bmm(source.view(count, most * channels, -1), by_column.transpose(1, 2))
    made = torch.bmm(by_row, narrow.view(count, most, channels * size[1])).view(count, size[0], channels, size[1])
    return made.round_().to(torch.uint8).transpose(2, 3)


def _flips(turns: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return whether EXIF orientations flip (rows, columns), after these are exchanged by 5 to 8."""
    number = (turns - 1) % 4
    return number >= 2, (number == 1) | (number == 2)


# How an image is resized: OpenCV's INTER_LINEAR; INTER_AREA if no side grows, and if one does.
_LINEAR, _AREA, _AREA_GROWS = range(3)


def _weights(lengths: Ints, size: int, rules: Ints, flips: NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    """Return the weights of the first `lengths` pixels in each of `size` results, of shape (images, size, pixels)."""
    own = torch.from_numpy(np.stack([lengths, rules, flips]).astype(np.float64)).to(device)
    length, rule, flip = own[:, :, None, None]
    result = torch.arange(size, device=device, dtype=torch.float64)[:, None]
    result = torch.where(flip > 0, size - 1 - result, result)
    step = length / size
    begin = result * step
    after = (result + 1 - (begin.floor() + 1) / step).clamp(min=0)
    middle = torch.where(rule == _AREA_GROWS, begin.floor() + after % 1, (begin + step / 2 - 0.5).clamp(min=0))
    middle, begin, end = (each.float() for each in (torch.minimum(middle, length - 1), begin, begin + step))
    pixel = torch.arange(int(lengths.max()), device=device, dtype=torch.float32)
    covered = (torch.minimum(end, pixel + 1) - torch.maximum(begin, pixel)).clamp(min=0) / step.float()
    nearest = (1 - (middle - pixel).abs()).clamp(min=0)
    return torch.where(rule == _AREA, covered, nearest)
