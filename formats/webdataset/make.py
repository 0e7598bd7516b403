"""Make all that lies beside this file but MAPPING.md: python formats/webdataset/make.py (needs webdataset)."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds

HERE = Path(__file__).parent
PER_TAR = 3


def main() -> None:
    """Write two tars with webdataset, and what webdataset reads from them."""
    rng = np.random.default_rng(7)
    (HERE / "input").mkdir(exist_ok=True)
    paths = []
    for tar in range(2):
        path = HERE / "input" / f"shard-{tar:03}.tar"
        paths.append(str(path))
        with wds.TarWriter(str(path), mtime=0, user="", group="") as writer:
            for number in range(PER_TAR):
                writer.write(
                    {
                        "__key__": f"sub/{tar}{number}",
                        "png": rng.integers(0, 256, (4, 5 + number, 3), dtype=np.uint8),
                        "cls": 10 * tar + number,
                        "txt": f"a caption, Nº {number}",
                        "json": {"tar": tar, "number": number},
                        "vec.npy": rng.standard_normal((2, 3)).astype("float32"),
                        "bin": rng.bytes(5 * number),
                    }
                )
    (HERE / "compressed").mkdir(exist_ok=True)
    packed = [HERE / "compressed" / f"{Path(path).name}.gz" for path in paths]
    for path, target in zip(paths, packed, strict=True):
        target.write_bytes(gzip.compress(Path(path).read_bytes(), mtime=0))
    samples = read(paths)
    assert samples == read([str(path) for path in packed])
    fields = {"bin": "bytes:bin", "cls": "int64", "json": "text", "png": "bytes:png", "txt": "text"}
    expected = {"fields": fields | {"vec_npy": "float32[2,3]"}, "samples": samples}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def read(paths: list[str]) -> list[dict[str, Any]]:
    """Return what webdataset reads from tars."""
    samples = []
    for sample in wds.WebDataset(paths, shardshuffle=False, empty_check=False):
        samples.append(
            {
                "png": {"sha256": hashlib.sha256(sample["png"]).hexdigest()},
                "cls": int(sample["cls"]),
                "txt": sample["txt"].decode(),
                "json": sample["json"].decode(),
                "vec_npy": array(sample["vec.npy"]),
                "bin": {"sha256": hashlib.sha256(sample["bin"]).hexdigest()},
            }
        )
    return samples


def array(data: bytes) -> Any:
    """Return the values of an .npy as lists."""
    import io

    return np.load(io.BytesIO(data)).tolist()


if __name__ == "__main__":
    main()
