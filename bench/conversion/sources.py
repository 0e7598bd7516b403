"""The raw data of a workload as people have it: what `streamloader convert` reads. Made once, beside the raw data.

Arrays are the .npy files themselves. JPEGs become a folder of files. Tokens stay as they are and are read through
`Documents`, a map-style dataset, as the peers' writers read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

NPY_GB = 1.0
CLASSES = 16


def image_folder(raw: Path) -> Path:
    """Return the folder `<class>/<number>.jpg` with the images of the raw data."""
    folder = raw.parent / f"{raw.name}-folder"
    if folder.exists():
        return folder
    part = raw.parent / f"{folder.name}.part"
    data = np.memmap(raw / "jpeg.bin", np.uint8, "r")
    edges = np.load(raw / "jpeg_offsets.npy").tolist()
    for number in range(len(edges) - 1):
        path = part / f"c{number % CLASSES:02}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[edges[number] : edges[number + 1]].tobytes())
    return part.rename(folder)


def one_array(data: Path) -> Path:
    """Return a folder with one .npy of a GB: rows of 8 KiB that do not compress."""
    folder = data / "npy-1gb"
    if not (folder / "rows.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        part, rows = folder / "rows.part", int(NPY_GB * 1e9) // 8192
        out, rng = open_memmap(part, "w+", np.uint8, (rows, 8192)), np.random.default_rng(9)
        for start in range(0, rows, 4096):
            out[start : start + 4096] = rng.integers(0, 256, out[start : start + 4096].shape, np.uint8)
        out.flush()
        part.rename(folder / "rows.npy")
    return folder


class Documents:
    """Token documents by number, read from two mapped files: picklable, as a torch dataset has to be."""

    def __init__(self, raw: str) -> None:
        self._raw = raw
        self._open()

    def _open(self) -> None:
        self._tokens = np.load(f"{self._raw}/tokens.npy", mmap_mode="r")
        self._edges = np.load(f"{self._raw}/tokens_offsets.npy")

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": np.asarray(self._tokens[self._edges[index] : self._edges[index + 1]])}

    def __getstate__(self) -> dict[str, Any]:
        return {"_raw": self._raw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
