"""Make `input/` and `expected.json` beside this file: python formats/hdf5/make.py (needs h5py)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

HERE = Path(__file__).parent
ROWS = 7
FIELDS = {
    "images": "uint8[2,3]",
    "labels": "int64",
    "mask": "bool[4]",
    "half_size": "float16",
    "title": "text",
    "code": "text",
    "tokens": "ragged:int32",
}


def write(group: h5py.Group, first: int, stop: int) -> None:
    """Write the rows [first, stop): contiguous, chunked, compressed, big-endian, and of variable size."""
    rng = np.random.default_rng(5)
    rows = slice(first, stop)
    images = rng.integers(0, 256, (ROWS, 2, 3), dtype=np.uint8)
    group.create_dataset("Images", data=images[rows], chunks=(2, 1, 3), compression="gzip", shuffle=True)
    group["labels"] = (np.arange(ROWS, dtype=">i8") * 1000)[rows]
    group["mask"] = rng.integers(0, 2, (ROWS, 4)).astype(bool)[rows]
    group.create_dataset("half-size", data=rng.standard_normal(ROWS).astype("f2")[rows], chunks=(2,), fletcher32=True)
    group["title"] = [f"Nº {n}" * n for n in range(ROWS)][rows]
    group["code"] = np.array([f"c{n}".encode() for n in range(ROWS)], "S4")[rows]
    tokens = group.create_dataset("tokens", (stop - first,), h5py.vlen_dtype(np.dtype(">i4")))
    for n in range(first, stop):
        tokens[n - first] = tokens_of(n)


def tokens_of(row: int) -> Any:
    """Return the tokens of a row."""
    return np.arange(row) * row


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray) and value.dtype.kind == "i" and value.ndim == 1:  # what is ragged
        return {"sha256": hashlib.sha256(value.astype("<i4").tobytes()).hexdigest()}
    return value.tolist()


def read(group: h5py.Group, first: int = 0) -> list[dict[str, Any]]:
    """Return the rows as h5py reads them, and the tokens as they were written: h5py swaps their bytes."""
    names = dict(zip(FIELDS, ["Images", "labels", "mask", "half-size", "title", "code"], strict=False))
    rows = range(len(group["labels"]))
    samples = [{field: plain(group[name][row]) for field, name in names.items()} for row in rows]
    return [sample | {"tokens": plain(tokens_of(first + row))} for row, sample in zip(rows, samples, strict=True)]


def main() -> None:
    """Write one file with a group of a group, and the same rows as two files, and read them back."""
    (HERE / "input" / "parts").mkdir(parents=True, exist_ok=True)
    with h5py.File(HERE / "input" / "nested.h5", "w", libver="latest") as file:
        write(file.create_group("data/train"), 0, ROWS)
        file["data/notes"] = "one value beside the group"
    for path, first, stop in (("a.h5", 0, 3), ("b.hdf5", 3, ROWS)):
        with h5py.File(HERE / "input" / "parts" / path, "w") as file:
            write(file, first, stop)
    with h5py.File(HERE / "input" / "nested.h5") as file:
        samples = read(file["data/train"])
    for path, first, stop in (("a.h5", 0, 3), ("b.hdf5", 3, ROWS)):
        with h5py.File(HERE / "input" / "parts" / path) as file:
            assert read(file, first) == samples[first:stop]
    order = sorted(FIELDS, key=lambda name: "Images" if name == "images" else name)
    fields = {name: FIELDS[name] for name in order}
    (HERE / "expected.json").write_text(json.dumps({"fields": fields, "samples": samples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
