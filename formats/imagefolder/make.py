"""Make `input/` and `expected.json` beside this file: python formats/imagefolder/make.py (needs Pillow and NumPy)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).parent
IMAGES = {  # path: (height, width); in the order of the dataset
    "Zebra/a.png": (4, 6),  # upper case sorts before lower case
    "ant/2.PNG": (5, 5),
    "ant/deep/er/1.png": (3, 7),
    "bee/photo.jpg": (16, 8),
    "bee/photo.png": (2, 2),
}
OTHERS = {"ant/notes.txt": b"no image", ".hidden/x.png": b"hidden", "bee/.thumb.png": b"hidden", "readme.md": b"text"}


def main() -> None:
    """Write every file."""
    rng = np.random.default_rng(7)
    samples = []
    classes = sorted({path.split("/")[0] for path in IMAGES})
    for path, (height, width) in IMAGES.items():
        file = HERE / "input" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        samples.append({"image": {"sha256": digest}, "label": classes.index(path.split("/")[0])})
    for path, data in OTHERS.items():
        file = HERE / "input" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    expected = {
        "fields": {"image": "bytes:mixed", "label": "int64"},
        "classes": classes,
        "passed_over": len(OTHERS),
        "samples": samples,
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
