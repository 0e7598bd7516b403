"""Make `input/` and `expected.json` beside this file: python formats/litdata/make.py (needs litdata, zstd, pyarrow)."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import torch
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.serializers import BytesSerializer
from litdata.streaming.writer import BinaryWriter
from PIL import Image

HERE = Path(__file__).parent
SAMPLES = 5
FIELDS = {
    "count": "int64",
    "image": "bytes:jpeg",
    "matrix": "float32[2,3]",
    "nested_left": "int64",
    "nested_right_0": "float64",
    "nested_right_1": "bool",
    "number": "float16",
    "pixels": "bytes:png",
    "points": "ragged:int16[2]",
    "raw": "bytes",
    "text": "text",
    "tokens": "ragged:int64",
    "vector": "ragged:uint8",
}
ROWS = {"ids": "ragged:int64", "meta": "text", "nested_left": "int64", "score": "float64", "text": "text"}
KINDS = {
    "plain": {},
    "frames": {"compression": "zstd", "compression_batch_size": 2},
    "samples": {"compression": "zstd:5", "compression_level": "sample"},
    "chunks": {"compression": "zstd", "compression_level": "chunk"},
}


def main() -> None:
    """Write samples with LitData in each way of compression, rows of plain values, and tokens; and what it reads."""
    folder = HERE / "input"
    shutil.rmtree(folder, ignore_errors=True)
    for name, options in KINDS.items():
        write(folder / name, sample, **options)
    write(folder / "rows", row)
    write(folder / "tokens", document, item_loader=TokensLoader())
    tokens = [{"data": document(number).tolist()} for number in range(SAMPLES)]
    check_tokens(folder / "tokens", tokens)
    expected: dict[str, Any] = {"fields": FIELDS, "samples": read(folder / "plain")}
    expected["rows"] = {"fields": ROWS, "samples": read(folder / "rows")}
    expected["tokens"] = {"fields": {"data": "ragged:int64"}, "samples": tokens}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def write(folder: Path, make: Callable[[int], Any], **options: Any) -> None:
    """Write samples, at most two a chunk; LitData would put the time of day into the index."""
    size = {"chunk_bytes": 64} if "item_loader" in options else {"chunk_size": 2}
    writer = BinaryWriter(str(folder), **size, **options)
    for number in range(SAMPLES):
        writer[number] = make(number)
    writer.done()
    writer.merge()
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "updated_at": "0"}, sort_keys=True))


def read(folder: Path) -> list[dict[str, Any]]:
    """Return what LitData reads: the samples under the names of the fields."""
    with tempfile.TemporaryDirectory() as cache:
        as_stored = {"jpeg": BytesSerializer()}  # not decoded
        dataset = litdata.StreamingDataset(str(folder), cache_dir=cache, serializers=as_stored)
        return [{name: plain(value) for name, value in leaves(dataset[i])} for i in range(len(dataset))]


def leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a sample with their names; lists under `ids` and `meta` are leaves themselves."""
    if name in ("ids", "meta") or not isinstance(value, dict | tuple):
        return [(name, json.dumps(value) if name == "meta" else value)]
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, one in pairs for leaf in leaves(one, f"{name}_{key}".strip("_"))]


def check_tokens(folder: Path, documents: list[dict[str, Any]]) -> None:
    """Check that LitData reads the same tokens: it reads them in blocks, from each chunk on its own."""
    with tempfile.TemporaryDirectory() as cache:
        dataset = litdata.StreamingDataset(str(folder), cache_dir=cache, item_loader=TokensLoader(block_size=1))
        found = [int(dataset[i]) for i in range(len(dataset))]
    assert found == [token for document in documents for token in document["data"]]


def sample(number: int) -> dict[str, Any]:
    """Return a sample with a leaf of every kind."""
    rng = np.random.default_rng(number)
    jpeg = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (8, 8 + number, 3), dtype=np.uint8)).save(jpeg, "JPEG")
    return {
        "count": 1000 * number - 1,
        "image": Image.open(jpeg),
        "matrix": rng.standard_normal((2, 3)).astype("float32"),
        "nested": {"left": number, "right": (number / 3, number % 2 == 1)},
        "number": torch.tensor(number / 4, dtype=torch.float16),
        "pixels": Image.fromarray(rng.integers(0, 256, (2, 3, 3), dtype=np.uint8)),
        "points": torch.from_numpy(rng.integers(-100, 100, (number + 1, 2)).astype("int16")),
        "raw": rng.bytes(5 * number),
        "text": f"a text, Nº {number}",
        "tokens": torch.from_numpy(rng.integers(0, 50_000, 3 * number)),
        "vector": rng.integers(0, 256, number + 1, dtype=np.uint8),
    }


def row(number: int) -> dict[str, Any]:
    """Return a sample of plain values only: LitData stores these as rows of Arrow, where it has that package."""
    return {
        "ids": list(range(number)),
        "meta": [{"tag": "a", "number": number}],
        "nested": {"left": number},
        "score": number / 3,
        "text": f"a text, Nº {number}",
    }


def document(number: int) -> torch.Tensor:
    """Return the tokens of a document."""
    return torch.arange(number, 2 * number + 1)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: an image as what is stored, or as its pixels."""
    if isinstance(value, Image.Image):
        return np.asarray(value).tolist()
    if isinstance(value, bytes | memoryview):
        return {"sha256": hashlib.sha256(bytes(value)).hexdigest()}
    return value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value


if __name__ == "__main__":
    main()
