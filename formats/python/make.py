"""Write what is expected of the dataset below: python formats/python/make.py (needs torch, Pillow and NumPy)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).parent
FIELDS = {
    "image": "bytes:png",
    "label": "int64",
    "vector_1": "float32[3]",
    "tokens": "ragged:int64",
    "caption": "text",
    "raw": "bytes",
    "meta_width": "int16",
    "meta_deep_ok": "bool",
}


class Things(Dataset[dict[str, Any]]):
    """A map-style dataset with each kind of value that a field can hold."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        pixels = np.random.default_rng(number).integers(0, 256, (2, 3 + number, 3), dtype=np.uint8)
        return {
            "image": Image.fromarray(pixels),
            "label": number * 10,
            "Vector-1": torch.arange(3, dtype=torch.float32) / (number + 1),
            "tokens": list(range(number)),
            "caption": f"thing Nº {number}",
            "raw": bytes([number] * number),
            "meta": {"width": np.int16(3 + number), "deep": {"ok": number % 2 == 0}},
        }


def main() -> None:
    """Write what torch reads."""
    samples = [
        {
            "image": {"pixels": np.asarray(sample["image"]).tolist()},  # the bytes of a PNG differ between encoders
            "label": sample["label"],
            "vector_1": sample["Vector-1"].tolist(),
            "tokens": list(sample["tokens"]),
            "caption": sample["caption"],
            "raw": {"sha256": hashlib.sha256(sample["raw"]).hexdigest()},
            "meta_width": int(sample["meta"]["width"]),
            "meta_deep_ok": sample["meta"]["deep"]["ok"],
        }
        for sample in DataLoader(Things(), batch_size=None)
    ]
    text = json.dumps({"fields": FIELDS, "samples": samples}, indent=1, ensure_ascii=False)
    (HERE / "expected.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
