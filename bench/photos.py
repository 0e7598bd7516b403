"""Real photographs, and random cuts of them: the images of the bench look like what people train on.

Two come with scikit-learn, eight with scikit-image, of which only the data files are used: its wheel is unpacked
into the data folder and never imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

WHEEL = "scikit-image==0.26.0"
OF_SKLEARN = ("china.jpg", "flower.jpg")
OF_SKIMAGE = (
    *("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png"),
    *("motorcycle_right.png", "hubble_deep_field.jpg", "ihc.png"),
)

Image8 = NDArray[np.uint8]


def photographs(folder: Path) -> list[Image8]:
    """Return the photographs as RGB arrays; `folder` is where scikit-image's wheel is unpacked, once."""
    import sklearn.datasets

    skimage = folder / "skimage" / "data"
    if not (skimage / OF_SKIMAGE[-1]).exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), WHEEL]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"the photographs need {WHEEL}, which pip did not get: repair that, and start again")
    sklearn_images = Path(sklearn.datasets.__file__).parent / "images"
    paths = [*(sklearn_images / name for name in OF_SKLEARN), *(skimage / name for name in OF_SKIMAGE)]
    return [np.asarray(Image.open(path).convert("RGB")) for path in paths]


def random_cut(photos: list[Image8], rng: np.random.Generator, height: int, width: int) -> Image8:
    """Return (height, width, 3): a cut of a random photograph, 0.4 to 1 of what fits, perhaps mirrored."""
    photo = photos[int(rng.integers(len(photos)))]
    scale = rng.uniform(0.4, 1.0) * min(photo.shape[0] / height, photo.shape[1] / width)
    h, w = int(height * scale), int(width * scale)
    top, left = int(rng.integers(photo.shape[0] - h + 1)), int(rng.integers(photo.shape[1] - w + 1))
    cut = photo[top : top + h, left : left + w]
    if rng.random() < 0.5:
        cut = cut[:, ::-1]
    method = cv2.INTER_AREA if h > height else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(cut, (width, height), interpolation=method), np.uint8)
