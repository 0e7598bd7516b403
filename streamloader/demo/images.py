"""Real images as files in class folders: scikit-learn's handwritten digits, and crops of its two photographs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

DIGIT_SCALE = 4
CROP = 160
CROP_STEP = 40


def write_digits(folder: Path) -> int:
    """Write the 1797 digits as `<folder>/<digit>/<number>.png`, grey, 32 x 32; return how many.

    They are 8 x 8 with values 0-16 as they ship.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    for number, (values, label) in enumerate(zip(data.images, data.target, strict=True)):
        pixels = np.minimum(values * 16, 255).astype(np.uint8)
        large = pixels.repeat(DIGIT_SCALE, axis=0).repeat(DIGIT_SCALE, axis=1)
        _save(Image.fromarray(large), folder / str(label) / f"{number:04d}.png")
    return len(data.target)


def write_photographs(folder: Path) -> int:
    """Write overlapping crops as `<folder>/<photograph>/<y>-<x>.jpg`, 160 x 160; return how many."""
    from sklearn.datasets import load_sample_images

    data = load_sample_images()
    count = 0
    for name, pixels in zip(data.filenames, data.images, strict=True):
        height, width, _ = pixels.shape
        for y in range(0, height - CROP + 1, CROP_STEP):
            for x in range(0, width - CROP + 1, CROP_STEP):
                crop = Image.fromarray(np.ascontiguousarray(pixels[y : y + CROP, x : x + CROP]))
                _save(crop, folder / Path(name).stem / f"{y:03d}-{x:03d}.jpg")
                count += 1
    return count


def _save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
