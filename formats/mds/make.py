"""Make `input/` and `expected.json` beside this file: python formats/mds/make.py (needs mosaicml-streaming)."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from streaming import LocalDataset, MDSWriter

HERE = Path(__file__).parent
SAMPLES = 6
COLUMNS = {
    "caption": "str",
    "count": "int",
    "fixed": "ndarray:float32:2,3",
    "half": "float16",
    "image": "png",
    "meta": "json",
    "pixels": "pil",
    "points": "ndarray:int16",
    "price": "str_float",
    "raw": "bytes",
    "small": "uint8",
    "tokens": "ndarray",
    "views": "str_int",
}
FIELDS = {
    "caption": "text",
    "count": "int64",
    "fixed": "float32[2,3]",
    "half": "float16",
    "image": "bytes:png",
    "meta": "text",
    "pixels": "bytes:png",
    "points": "ragged:int16[2]",
    "price": "float64",
    "raw": "bytes",
    "small": "uint8",
    "tokens": "ragged:uint32",
    "views": "int64",
}


def main() -> None:
    """Write the samples plain and compressed, and what streaming reads from them."""
    for name, compression in (("plain", None), ("zstd", "zstd:7")):
        folder = HERE / "input" / name
        shutil.rmtree(folder, ignore_errors=True)
        rng = np.random.default_rng(7)
        with MDSWriter(out=str(folder), columns=COLUMNS, compression=compression, size_limit=1300) as writer:
            for number in range(SAMPLES):
                writer.write(sample(rng, number))
    dataset = LocalDataset(str(HERE / "input" / "plain"))
    samples = [{name: plain(value) for name, value in one.items()} for one in (dataset[i] for i in range(len(dataset)))]
    expected = {"fields": FIELDS, "samples": samples}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def sample(rng: np.random.Generator, number: int) -> dict[str, Any]:
    """Return one sample."""
    return {
        "caption": f"a caption, Nº {number}",
        "count": 1000 * number - 1,
        "fixed": rng.standard_normal((2, 3)).astype("float32"),
        "half": number / 4,
        "image": Image.fromarray(rng.integers(0, 256, (3, 4 + number, 3), dtype=np.uint8)),
        "meta": {"number": number, "tags": ["a", "b"]},
        "pixels": Image.fromarray(rng.integers(0, 256, (2, 3, 3), dtype=np.uint8)),
        "points": rng.integers(-100, 100, (number + 1, 2)).astype("int16"),
        "price": number / 3,
        "raw": rng.bytes(5 * number),
        "small": 200 + number,
        "tokens": rng.integers(0, 50_000, 3 * number + 1).astype("uint32"),
        "views": 10**12 + number,
    }


def plain(value: Any) -> Any:
    """Return a value as JSON has it: an image as what is stored, or as its pixels, and JSON as its text."""
    if isinstance(value, Image.Image) and hasattr(value, "fp"):
        value = value.fp.getvalue()
    if isinstance(value, Image.Image):
        value = np.asarray(value)
    if isinstance(value, bytes):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, dict):
        return json.dumps(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


if __name__ == "__main__":
    main()
