"""The random resized crop that every contestant makes of a JPEG."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

CROP = 224
CROP_SCALE = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
# the usual ones of ImageNet
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def jpeg_transform(variant: str = "fast") -> Callable[[bytes], NDArray[Any]]:
    """Return what every contestant does to a JPEG: decode, random resized crop, normalise; float32 (224, 224, 3).

    "fast" (and ""): simplejpeg at the DCT scale that the crop allows, then OpenCV; what a tuned program does.
    "pillow": as the peers' pages show it. "uint8": "fast" without normalising. The function can be pickled, and each
    process draws crops of its own.
    """
    return {"pillow": _pillow_crop, "uint8": _uint8_crop}.get(variant, _fast_crop)


def random_crop(height: int, width: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of a random resized crop, drawn as torchvision does."""
    for _ in range(10):
        area = height * width * random.uniform(*CROP_SCALE)
        ratio = math.exp(random.uniform(math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def _fast_crop(data: bytes) -> NDArray[np.float32]:
    import cv2

    result: Any = cv2.LUT(_uint8_crop(data), _TABLE)
    return np.asarray(result, np.float32)


def _uint8_crop(data: bytes) -> NDArray[np.uint8]:
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)  # as advised for loaders: the workers are the parallelism
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    top, left, h, w = random_crop(height, width)
    scale = min(1.0, max(CROP / h, CROP / w))
    # scales between a half and the whole take longer than the whole
    least = (math.ceil(height * scale), math.ceil(width * scale)) if scale <= 0.5 else (height, width)
    image = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1], min_factor=1)
    down, right = image.shape[0] / height, image.shape[1] / width
    y, x = int(top * down), int(left * right)
    part = image[y : max(y + 1, round((top + h) * down)), x : max(x + 1, round((left + w) * right))]
    return np.asarray(cv2.resize(part, (CROP, CROP), interpolation=cv2.INTER_LINEAR), np.uint8)


def _pillow_crop(data: bytes) -> NDArray[np.float32]:
    import io

    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        top, left, h, w = random_crop(image.height, image.width)
        crop = image.convert("RGB").crop((left, top, left + w, top + h))
    pixels = np.asarray(crop.resize((CROP, CROP), Image.Resampling.BILINEAR), np.float32)
    return np.asarray((pixels / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32), np.float32)


def _normalising_table() -> NDArray[np.float32]:
    """Return (1, 256, 3): the normalised value of each byte in each channel."""
    values = np.arange(256, dtype=np.float32)[None, :, None] / 255
    return np.asarray((values - np.array(MEAN)) / np.array(STD), np.float32)


_TABLE = _normalising_table()
