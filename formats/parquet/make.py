"""Make `input/` and `expected.json` beside this file: python formats/parquet/make.py (needs pyarrow)."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
PNG = b"\x89PNG\r\n\x1a\n"  # enough for the encoding to be seen
SCHEMA = pa.schema(
    {
        "Id": pa.int64(),
        "flag": pa.bool_(),
        "half": pa.float16(),
        "small": pa.uint8(),
        "picture": pa.binary(),
        "caption": pa.string(),
        "kind": pa.dictionary(pa.int32(), pa.string()),
        "digest": pa.binary(4),
        "box": pa.list_(pa.float32(), 4),
        "grid": pa.list_(pa.list_(pa.int16(), 3), 2),
        "tokens": pa.list_(pa.int32()),
        "points": pa.large_list(pa.list_(pa.float64(), 2)),
        "meta": pa.struct({"source": pa.large_string(), "score": pa.float32()}),
    }
)
FIELDS = {
    "id": "int64",
    "flag": "bool",
    "half": "float16",
    "small": "uint8",
    "picture": "bytes:png",
    "caption": "text",
    "kind": "text",
    "digest": "bytes",
    "box": "float32[4]",
    "grid": "int16[2,3]",
    "tokens": "ragged:int32",
    "points": "ragged:float64[2]",
    "meta_source": "text",
    "meta_score": "float32",
}


def row(n: int) -> dict[str, Any]:
    """Return one row."""
    return {
        "Id": 1000 * n,
        "flag": n % 2 == 0,
        "half": n / 4,
        "small": 250 + n % 6,
        "picture": PNG + bytes(range(n)),
        "caption": f"a caption, Nº {n}",
        "kind": ["cat", "dog"][n % 2],
        "digest": bytes([n] * 4),
        "box": [n, n + 0.5, n + 1, -n],
        "grid": [[n, 1, 2], [3, 4, -n]],
        "tokens": list(range(n)),
        "points": [[i, n] for i in range(n % 3)],
        "meta": {"source": f"page {n}", "score": n / 8},
    }


def as_sample(found: dict[str, Any]) -> dict[str, Any]:
    """Return a row as `expected.json` writes it."""
    values = {**found, **{f"meta_{name}": value for name, value in found["meta"].items()}, "id": found["Id"]}
    return {name: plain(values[name]) for name in FIELDS}


def plain(value: Any) -> Any:
    """Return a value as JSON, bytes as their digest."""
    return {"sha256": hashlib.sha256(value).hexdigest()} if isinstance(value, bytes) else value


def main() -> None:
    """Write three files, the second of them empty, and what pyarrow reads from them."""
    folder = HERE / "input"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, (first, stop, codec) in enumerate([(0, 5, "snappy"), (5, 5, "none"), (5, 9, "zstd")]):
        table = pa.Table.from_pylist([row(n) for n in range(first, stop)], schema=SCHEMA)
        path = folder / f"part-{number}.parquet"
        pq.write_table(table, path, row_group_size=2, compression=codec, write_page_checksum=True)
    samples = [as_sample(one) for path in sorted(folder.iterdir()) for one in pq.read_table(path).to_pylist()]
    expected = {"fields": FIELDS, "samples": samples}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
