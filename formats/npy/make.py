"""Make `input/` and `expected.json` beside this file: python formats/npy/make.py (needs NumPy)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def main() -> None:
    """Write a folder of .npy, and the same arrays as .npz, stored and compressed."""
    rng = np.random.default_rng(7)
    arrays = {
        "Images": rng.integers(0, 256, (6, 2, 3), dtype=np.uint8),
        "labels-1": np.arange(6, dtype=">i8") * 1000,
        "2nd": rng.standard_normal(6).astype("float16"),
        "mask": rng.integers(0, 2, (6, 4)).astype(bool),
    }
    folder = HERE / "input" / "folder"
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(HERE / "input" / "stored.npz", **arrays)
    np.savez_compressed(HERE / "input" / "compressed.npz", **arrays)
    names = {"Images": "images", "labels-1": "labels_1", "2nd": "f_2nd", "mask": "mask"}
    samples = [{names[name]: array[row].tolist() for name, array in arrays.items()} for row in range(6)]
    fields = {"images": "uint8[2,3]", "labels_1": "int64", "f_2nd": "float16", "mask": "bool[4]"}
    (HERE / "expected.json").write_text(json.dumps({"fields": fields, "samples": samples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
