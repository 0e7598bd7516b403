"""Make `input/` and `expected.json` beside this file: python formats/tokens/make.py (needs NumPy)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
FIELDS = "tokens=uint16[8]"
LENGTHS = {"plain/train_000.bin": 27, "plain/train_001.bin": 16, "header/train_000.bin": 20}


def main() -> None:
    """Write files of 16-bit tokens, one with the header of llm.c, and read their rows of 8 back."""
    rng = np.random.default_rng(11)
    expected = {}
    for name, length in LENGTHS.items():
        path = HERE / "input" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        header = np.zeros(256 if name.startswith("header") else 0, "<i4")
        header[:3] = (20240520, 1, length)[: len(header)]
        with path.open("wb") as file:
            header.tofile(file)
            rng.integers(0, 50257, length).astype("<u2").tofile(file)
        values = np.fromfile(path, "<u2", offset=header.nbytes)
        rows = values[: length // 8 * 8].reshape(-1, 8)
        expected.setdefault(name.partition("/")[0], []).extend({"tokens": row.tolist()} for row in rows)
    told = {
        "wish": FIELDS,
        "fields": {"tokens": "uint16[8]"},
        "samples": expected["plain"],
        "header": expected["header"],
    }
    (HERE / "expected.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
