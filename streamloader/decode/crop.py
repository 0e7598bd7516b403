"""Which part of an image is taken: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from streamloader.options import CenterCrop, RandomResizedCrop

ATTEMPTS = 10
# one number for the mirror, two for the place, two for each attempt at a size and shape
DRAWS = 3 + 2 * ATTEMPTS
# libjpeg reduces by any n/8, but only these are cheaper than the whole image (measured: 7/8 takes 1.5 times as long)
_REDUCTIONS = (8, 4, 2)


class Box(NamedTuple):
    """A part of an image in pixels: rows [top, top + height), columns [left, left + width)."""

    top: int
    left: int
    height: int
    width: int


def random_box(height: int, width: int, crop: RandomResizedCrop, draws: Sequence[float]) -> Box:
    """Return the box for an image, from `DRAWS` numbers in [0, 1): the rule of torchvision's RandomResizedCrop.

    Attempt k has the area `scale` says by number 3 + 2k, and the ratio by number 4 + 2k; the first that lies within the
    image is taken, its top by number 1, its left by number 2. If none does, the largest box in the middle whose ratio
    is within the bounds. (Number 0 is for the mirror.)
    """
    (least, most), bounds = crop.scale, crop.ratio
    low, high = math.log(bounds[0]), math.log(bounds[1])
    for k in range(3, DRAWS, 2):
        area = height * width * (least + (most - least) * draws[k])
        ratio = math.exp(low + (high - low) * draws[k + 1])
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return Box(int(draws[1] * (height - h + 1)), int(draws[2] * (width - w + 1)), h, w)
    return _middle(height, width, min(max(width / height, bounds[0]), bounds[1]), 1.0)


def center_box(height: int, width: int, crop: CenterCrop, size: tuple[int, int]) -> Box:
    """Return `crop.part` of the largest box in the middle that has the shape of `size`, (height, width)."""
    return _middle(height, width, size[1] / size[0], crop.part)


def reduction(box: Box, size: tuple[int, int]) -> int:
    """Return by how much a JPEG may be reduced while it is decoded: 1, 2, 4 or 8.

    The greatest for which the box still has at least the pixels of `size`, (height, width), in both directions.
    """
    for k in _REDUCTIONS:
        if box.height >= k * size[0] and box.width >= k * size[1]:
            return k
    return 1


def snapped(box: Box, k: int, height: int, width: int) -> Box:
    """Return the box with its edges moved to whole pixels of the image reduced by `k`: by half of one at most.

    Whatever decodes and resizes an image then takes the same pixels of it.
    """
    top, left, bottom, right = (
        (2 * edge + k) // (2 * k) * k for edge in (box.top, box.left, box.top + box.height, box.left + box.width)
    )
    return Box(top, left, min(height, bottom) - top, min(width, right) - left)


def _middle(height: int, width: int, ratio: float, part: float) -> Box:
    h = max(1, min(height, round(part * min(height, width / ratio))))
    w = max(1, min(width, round(part * min(width, height * ratio))))
    return Box((height - h) // 2, (width - w) // 2, h, w)
