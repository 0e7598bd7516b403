"""The raw data of each workload in a cache folder: made once, the same on every machine (seeded).

`bench/peers/common.py` says which columns a workload has and reads them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.lib.format import open_memmap

from bench.photos import photographs, random_cut

SIDE, SMALL_SIDE = 224, 96
VOCABULARY = 50257  # of GPT-2; a document begins with this and its number, as `bench/peers/common.py` says
VERSION = 2  # of the raw data: older data is made again
JPEG_QUALITY = 90
PART = 256  # samples that one task makes: the parts, not the threads, decide the random numbers
WORDS = 4096

T = TypeVar("T")


def prepare(workload: str, count: int, data: Path) -> Path:
    """Return the folder with `count` samples of the workload, made now if it is not there."""
    folder = data / f"{workload}-{count}"
    if not _is_there(folder):
        shutil.rmtree(folder, ignore_errors=True)
        part = data / f"{workload}-{count}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        columns = _MAKERS[workload](part, count)
        size = sum(path.stat().st_size for path in part.iterdir() if not path.name.endswith("_offsets.npy"))
        meta = {"version": VERSION, "workload": workload, "samples": count, "bytes": size, "columns": columns}
        (part / "meta.json").write_text(json.dumps(meta, indent=1))
        part.rename(folder)
    return folder


def _is_there(folder: Path) -> bool:
    meta = folder / "meta.json"
    return meta.exists() and json.loads(meta.read_text()).get("version") == VERSION


def _images(folder: Path, count: int) -> dict[str, str]:
    _cuts(folder, count, SIDE)
    return {"image": "tensor", **_labels(folder, count)}


def _vectors(folder: Path, count: int) -> dict[str, str]:
    _normal(folder, count, 64)
    return {"vector": "tensor", **_labels(folder, count)}


def _wide(folder: Path, count: int) -> dict[str, str]:
    _normal(folder, count, 260)
    return {"vector": "tensor", **_labels(folder, count)}


def _jpeg(folder: Path, count: int) -> dict[str, str]:
    """Sizes differ as those of a photo collection do: 500 x 375 on average, a tenth more or less."""
    import simplejpeg

    photos = photographs(folder.parent / "photos")

    def make(start: int) -> list[bytes]:
        rng = np.random.default_rng([2, start])
        sides = [(int(375 * scale), int(500 * scale)) for scale in rng.uniform(0.9, 1.1, min(PART, count - start))]
        return [
            simplejpeg.encode_jpeg(random_cut(photos, rng, *side), JPEG_QUALITY, colorsubsampling="420")
            for side in sides
        ]

    _items(folder, "jpeg", (item for part in _in_parts(make, count) for item in part))
    return {"jpeg": "bytes", **_labels(folder, count)}


def _tokens(folder: Path, count: int) -> dict[str, str]:
    """200 to 4000 tokens, short documents being more frequent; ids by Zipf's law."""
    rng = np.random.default_rng(3)
    lengths = np.exp(rng.uniform(np.log(200), np.log(4001), count)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = open_memmap(folder / "tokens.npy", "w+", np.int32, (int(offsets[-1]),))
    for start in range(0, len(values), 1 << 24):
        part = values[start : start + (1 << 24)]
        part[:] = np.exp(rng.random(len(part), np.float32) * np.float32(np.log(VOCABULARY))).astype(np.int32) - 1
    values[offsets[:-1]] = VOCABULARY + np.arange(count)
    np.save(folder / "tokens_offsets.npy", offsets)
    return {"tokens": "ragged"}


def _mixed(folder: Path, count: int) -> dict[str, str]:
    _cuts(folder, count, SMALL_SIDE)
    _normal(folder, count, 16)
    rng = np.random.default_rng(4)
    words = ["".join(map(chr, rng.integers(97, 123, int(size)))) for size in rng.integers(2, 10, WORDS)]

    def captions() -> Iterator[bytes]:
        for _ in range(count):
            chosen = (WORDS ** rng.random(int(rng.integers(8, 40)))).astype(int) - 1
            yield " ".join(words[i] for i in chosen).encode()

    _items(folder, "text", captions())
    return {"image": "tensor", **_labels(folder, count), "vector": "tensor", "text": "text"}


def _cuts(folder: Path, count: int, side: int) -> None:
    photos = photographs(folder.parent / "photos")
    out = open_memmap(folder / "image.npy", "w+", np.uint8, (count, side, side, 3))

    def make(start: int) -> None:
        rng = np.random.default_rng([1, start])
        for i in range(start, min(start + PART, count)):
            out[i] = random_cut(photos, rng, side, side)

    for _ in _in_parts(make, count):
        pass


def _labels(folder: Path, count: int) -> dict[str, str]:
    np.save(folder / "label.npy", np.arange(count))  # numbers, so that batches show in what order samples come
    return {"label": "tensor"}


def _normal(folder: Path, count: int, width: int) -> None:
    rng = np.random.default_rng(6)
    out = open_memmap(folder / "vector.npy", "w+", np.float32, (count, width))
    for start in range(0, count, 1 << 18):
        part = out[start : start + (1 << 18)]
        part[:] = rng.standard_normal(part.shape, np.float32)


def _items(folder: Path, name: str, items: Iterator[bytes]) -> None:
    ends = [0]
    with (folder / f"{name}.bin").open("wb") as file:
        for item in items:
            file.write(item)
            ends.append(ends[-1] + len(item))
    np.save(folder / f"{name}_offsets.npy", np.array(ends, np.int64))


def _in_parts(make: Callable[[int], T], count: int) -> Iterator[T]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(make, range(0, count, PART))


_MAKERS: dict[str, Callable[[Path, int], dict[str, str]]] = {
    "images": _images,
    "vectors": _vectors,
    "wide": _wide,
    "jpeg": _jpeg,
    "tokens": _tokens,
    "mixed": _mixed,
}
