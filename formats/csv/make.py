"""Make `input/` and `expected.json` beside this file: python formats/csv/make.py (needs Python alone)."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEADER = ["Id", "score", "ok", "2nd text", "day", "zip"]
TEXTS = ["plain", 'says "hi"', "two\nlines", "a, b; c|d\te", "", "Größe Nº 4", "\r\n", '"']
READ: list[Callable[[str], Any]] = [int, float, lambda word: word == "true", str, str, str]
TYPES = ["int64", "float64", "bool", "text", "text", "text"]
NAMES = ["id", "score", "ok", "f_2nd_text", "day", "zip"]


def rows(first: int) -> list[list[str]]:
    """Return eight rows, numbered from `first` on."""
    return [
        [str(n - 3), repr(n / 7), "true" if n % 3 else "false", text, f"2024-02-{n + 1:02}", f"{n * 37:05}"]
        for n, text in enumerate(TEXTS, first)
    ]


def written(first: int, delimiter: str, end: str, quoting: Any = csv.QUOTE_MINIMAL) -> bytes:
    """Return the rows as the csv module writes them."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerow(HEADER)
    writer.writerows(rows(first))
    return out.getvalue().encode()


def read(data: bytes, delimiter: str) -> list[dict[str, Any]]:
    """Return the samples as the csv module reads them."""
    lines = [row for row in csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), delimiter=delimiter) if row]
    assert lines[0] == HEADER
    return [{name: kind(cell) for name, kind, cell in zip(NAMES, READ, row, strict=True)} for row in lines[1:]]


def main() -> None:
    """Write the same kind of table in several dialects and compressions."""
    folder = HERE / "input"
    folder.mkdir(exist_ok=True)
    two = gzip.compress(written(24, ",", "\n")[:200], mtime=0) + gzip.compress(written(24, ",", "\n")[200:], mtime=0)
    files = {
        "a-lf.csv": (written(0, ",", "\n")[:-1], ","),  # without a last line end
        "b-crlf.csv": (b"\xef\xbb\xbf" + written(8, ";", "\r\n", csv.QUOTE_ALL), ";"),
        "c-tabs.tsv": (written(16, "\t", "\n") + b"\n\n", "\t"),
    }
    packed = {
        "d-two-members.csv.gz": (two, gzip.decompress, ","),
        "e-bars.csv.bz2": (bz2.compress(written(32, "|", "\n")), bz2.decompress, "|"),
        "f-tabs.tsv.xz": (lzma.compress(written(40, "\t", "\r\n")), lzma.decompress, "\t"),
    }
    samples: list[dict[str, Any]] = []
    for name, (data, delimiter) in files.items():
        (folder / name).write_bytes(data)
        samples += read((folder / name).read_bytes(), delimiter)
    for name, (data, unpack, delimiter) in packed.items():
        (folder / name).write_bytes(data)
        samples += read(unpack((folder / name).read_bytes()), delimiter)
    expected = {"fields": dict(zip(NAMES, TYPES, strict=True)), "samples": samples}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
