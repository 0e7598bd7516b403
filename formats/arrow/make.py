"""Make `input/` and `expected.json` beside this file: python formats/arrow/make.py (needs pyarrow)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc as ipc

HERE = Path(__file__).parent
JPEG = b"\xff\xd8\xff\xe0"  # enough for the encoding to be seen
SCHEMA = pa.schema(
    {
        "id": pa.uint32(),
        "flag": pa.bool_(),
        "picture": pa.large_binary(),
        "caption": pa.string_view(),
        "kind": pa.dictionary(pa.int8(), pa.string()),
        "tensor": pa.fixed_shape_tensor(pa.float32(), [2, 3]),
        "tokens": pa.large_list(pa.int64()),
        "meta": pa.struct({"inner": pa.struct({"x": pa.float64()})}),
    }
)
FIELDS = {
    "id": "uint32",
    "flag": "bool",
    "picture": "bytes:jpeg",
    "caption": "text",
    "kind": "text",
    "tensor": "float32[2,3]",
    "tokens": "ragged:int64",
    "meta_inner_x": "float64",
}


def batch(first: int, stop: int, kinds: Sequence[str] = ("cat", "dog")) -> pa.RecordBatch:
    """Return some rows; `kinds` is the dictionary, which may be another one in every batch of a stream."""
    rows = range(first, stop)
    tensor = pa.array([[n, 1, 2, 3, 4, -n] for n in rows], pa.list_(pa.float32(), 6))
    columns = [
        pa.array(list(rows), pa.uint32()),
        pa.array([n % 2 == 0 for n in rows]),
        pa.array([JPEG + bytes(range(n)) for n in rows], pa.large_binary()),
        pa.array([f"a caption that is longer than a view, Nº {n}" for n in rows], pa.string_view()),
        pa.DictionaryArray.from_arrays(pa.array([n % 2 for n in rows], pa.int8()), pa.array(kinds)),
        pa.ExtensionArray.from_storage(SCHEMA.field("tensor").type, tensor),
        pa.array([list(range(n)) for n in rows], pa.large_list(pa.int64())),
        pa.array([{"inner": {"x": n / 3}} for n in rows], SCHEMA.field("meta").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def as_sample(found: dict[str, Any]) -> dict[str, Any]:
    """Return a row as `expected.json` writes it."""
    flat = found["tensor"]
    values = {**found, "tensor": [flat[:3], flat[3:]], "meta_inner_x": found["meta"]["inner"]["x"]}
    return {name: plain(values[name]) for name in FIELDS}


def plain(value: Any) -> Any:
    """Return a value as JSON, bytes as their digest."""
    return {"sha256": hashlib.sha256(value).hexdigest()} if isinstance(value, bytes) else value


def read(path: Path) -> pa.Table:
    """Return what pyarrow reads."""
    with path.open("rb") as file:
        return ipc.open_stream(file).read_all() if path.suffix == ".ipc" else ipc.open_file(file).read_all()


def main() -> None:
    """Write a file, a Feather file and a stream, and what pyarrow reads from them."""
    folder = HERE / "input"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with ipc.new_file(folder / "a.arrow", SCHEMA) as writer:
        for first, stop in [(0, 2), (2, 2), (2, 5)]:
            writer.write_batch(batch(first, stop))
    feather.write_feather(pa.Table.from_batches([batch(5, 9)]), folder / "b.feather", compression="lz4", chunksize=3)
    options = ipc.IpcWriteOptions(compression="zstd")
    with ipc.new_stream(folder / "c.ipc", SCHEMA, options=options) as stream:
        stream.write_batch(batch(9, 10))
        stream.write_batch(batch(10, 13, ["dog", "mouse"]))
    samples = [as_sample(one) for path in sorted(folder.iterdir()) for one in read(path).to_pylist()]
    expected = {"fields": FIELDS, "samples": samples}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
