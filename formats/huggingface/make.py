"""Make `input/` and `expected.json` beside this file: python formats/huggingface/make.py (needs datasets, Pillow)."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Image, List, Value, load_from_disk
from PIL import Image as Pillow

HERE = Path(__file__).parent
CLASSES = ["cat", "dog"]
FEATURES = Features(
    {
        "image": Image(),
        "label": ClassLabel(names=CLASSES),
        "caption": Value("string"),
        "tokens": List(Value("int32")),
        "embedding": List(Value("float32"), length=3),
        "matrix": Array2D((2, 2), "float64"),
        "answer": {"text": Value("string"), "start": Value("int32")},
    }
)
FIELDS = {
    "image": "bytes:png",
    "label": "int64",
    "caption": "text",
    "tokens": "ragged:int32",
    "embedding": "float32[3]",
    "matrix": "float64[2,2]",
    "answer_text": "text",
    "answer_start": "int32",
}


def png(value: int) -> bytes:
    """Return a small image."""
    out = io.BytesIO()
    Pillow.fromarray(np.full((3, 4, 3), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


def row(n: int) -> dict[str, Any]:
    """Return one row."""
    return {
        "image": {"bytes": png(n), "path": f"{n}.png"},
        "label": n % 2,
        "caption": f"a caption, Nº {n}",
        "tokens": list(range(n)),
        "embedding": [n, n / 2, -n],
        "matrix": [[n, 1], [2, -n]],
        "answer": {"text": f"answer {n}", "start": n},
    }


def as_sample(found: dict[str, Any]) -> dict[str, Any]:
    """Return a row as `expected.json` writes it."""
    image = {"sha256": hashlib.sha256(found["image"]["bytes"]).hexdigest()}
    answer = {f"answer_{name}": value for name, value in found["answer"].items()}
    values = {**found, **answer, "image": image}
    return {name: values[name] for name in FIELDS}


def main() -> None:
    """Save two splits, one of them in two files, and write what the library reads back of that."""
    shutil.rmtree(HERE / "input", ignore_errors=True)
    train = Dataset.from_list([row(n) for n in range(7)], features=FEATURES)
    test = Dataset.from_list([row(n) for n in range(100, 102)], features=FEATURES)
    DatasetDict(train=train, test=test).save_to_disk(HERE / "input", num_shards={"train": 2, "test": 1})
    found = load_from_disk(HERE / "input" / "train").cast_column("image", Image(decode=False))
    expected = {"fields": FIELDS, "samples": [as_sample(one) for one in found], "classes": CLASSES}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
