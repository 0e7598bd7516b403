"""Make `input/` and `expected.json` beside this file: python formats/jsonl/make.py (needs Python alone)."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TYPES = {
    "id": "int64",
    "score": "float64",
    "ok": "bool",
    "text": "text",
    "tokens": "ragged:int64",
    "box": "float64[2,2]",
    "meta_source": "text",
    "meta_size_w": "int64",
}


def lines(first: int) -> list[dict[str, Any]]:
    """Return four objects, numbered from `first` on."""
    return [
        {
            "ID": n - 2,
            "score": n / 7,
            "ok": n % 2 == 0,
            "text": ["plain", "two\nlines", "", "Größe \U0001f600"][n % 4],
            "tokens": list(range(n % 4)),
            "box": [[0, n], [n / 2, 1.5]],
            "meta": {"source": f"s{n}", "size": {"w": n * 10}},
        }
        for n in range(first, first + 4)
    ]


def written(first: int, end: str = "\n", ascii_only: bool = True) -> bytes:
    """Return the lines as the json module writes them."""
    return "".join(json.dumps(line, ensure_ascii=ascii_only) + end for line in lines(first)).encode()


def sample(line: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a line as the json module has read it."""
    meta = line["meta"]
    plain = {key.lower(): value for key, value in line.items() if key != "meta"}
    return plain | {"meta_source": meta["source"], "meta_size_w": meta["size"]["w"]}


def main() -> None:
    """Write lines in several ways, and what the json module reads from them."""
    folder = HERE / "input"
    folder.mkdir(exist_ok=True)
    members = written(8).splitlines(keepends=True)
    files = {
        "a.jsonl": written(0)[:-1],  # without a last line end
        "b.ndjson": b"\xef\xbb\xbf\n" + written(4, " \r\n\n", ascii_only=False),
        "c.jsonl.gz": b"".join(gzip.compress(line, mtime=0) for line in members),
        "d.ndjson.xz": lzma.compress(written(12)),
    }
    unpack = {"gz": gzip.decompress, "xz": lzma.decompress}
    samples = []
    for name, data in files.items():
        (folder / name).write_bytes(data)
        stored = (folder / name).read_bytes()
        text = unpack.get(name.rpartition(".")[2], bytes)(stored).decode("utf-8-sig")
        samples += [sample(json.loads(line)) for line in text.split("\n") if line.strip()]
    expected = {"fields": TYPES, "samples": samples}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
