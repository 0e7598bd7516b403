"""Datasets whose every value follows from the sample's number, so that a test can tell any sample from its content."""

import gc
import io
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from streamloader.engine.arena import Arena
from streamloader.format.manifest import Manifest
from streamloader.format.writer import Writer
from streamloader.options import Layout
from streamloader.order.epoch_order import EpochOrder, OrderParams

# small enough that a few hundred samples have many shards, blocks and lanes
SMALL = Layout(shard_size=1 << 16, block_size=1 << 14, chunk_size=1 << 12, codec="none")

# a program that Pillow has Ghostscript draw
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n"

FIELDS = {
    "x": "float32[300]",  # bulk: over 1 KiB a sample
    "wide": "uint16[20,30]",
    "flag": "bool",
    "count": "uint16",
    "half": "float16[3]",
    "label": "int64",
    "raw": "bytes",
    "name": "text",
    "tok": "ragged:int32",
    "pairs": "ragged:float32[2]",
}


def value(name: str, i: int) -> Any:
    """The value of a field of sample i."""
    values: dict[str, Callable[[], Any]] = {
        "x": lambda: np.full(300, i, np.float32) + np.arange(300, dtype=np.float32) / 512,
        "wide": lambda: ((np.arange(600) + i) % 65536).astype(np.uint16).reshape(20, 30),
        "flag": lambda: np.bool_(i % 3 == 0),
        "count": lambda: np.uint16(65535 - i % 60000),
        "half": lambda: np.array([i % 7, 0.5, -1], np.float16),
        "label": lambda: np.int64(i - 2**40),
        "raw": lambda: bytes([i % 256]) * (i % 11),
        "name": lambda: f"sample {i} \u00e4" if i % 5 else "",
        "tok": lambda: np.arange(i, i + i % 7, dtype=np.int32),
        "pairs": lambda: np.full((i % 4, 2), i, np.float32),
    }
    return values[name]()


def write(
    url: str | Path,
    num_samples: int,
    fields: Iterable[str] = FIELDS,
    layout: Layout = SMALL,
    options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a dataset of the fields above."""
    specs = {name: FIELDS[name] for name in fields}
    with Writer(url, specs, layout=layout, num_samples=num_samples, storage_options=options) as out:
        for i in range(num_samples):
            out.write({name: value(name, i) for name in specs})
    return out.close()


def numbers(batch: Mapping[str, Any]) -> list[int]:
    """The valid samples of a batch, in order; of a single sample, its number."""
    index = batch["index"].reshape(-1)
    return index[batch["valid"].reshape(-1)].tolist() if "valid" in batch else index.tolist()


def take(batches: Iterable[Mapping[str, Any]], count: int | None = None) -> list[list[int]]:
    """The valid samples of each of the next batches."""
    return [numbers(batch) for batch in islice(batches, count)]


def flat(batches: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def seen(batches: Iterable[Mapping[str, Any]]) -> list[int]:
    """The valid samples of all batches, in order."""
    return flat(take(batches))


def before_error(batches: Iterable[Mapping[str, Any]], kind: type[Exception], shown: str) -> tuple[list[int], Any]:
    """The valid samples of the batches before an error, and the error."""
    import pytest  # which ranks and workers that import this module do without

    found: list[int] = []
    with pytest.raises(kind, match=shown) as caught:
        for batch in batches:
            found += numbers(batch)
    return found, caught.value


def least_memory(url: Any, **arguments: Any) -> int:
    """The need that the error of a much too small memory= names."""
    from streamloader.errors import MemoryBudgetError
    from streamloader.pytorch.dataset import StreamingDataset

    _, error = before_error(StreamingDataset(url, memory=1, **arguments), MemoryBudgetError, "needs memory=")
    return int(str(error).split("needs memory=")[1].split()[0])


def planned(ds: Any, shuffle: bool = True, seed: int = 0, epoch: int = 0) -> list[int]:
    """The order of an epoch by the planner, from what the manifest pins."""
    pin, count = ds._datasets[0].manifest.order, ds.num_samples
    params = OrderParams(pin.block, pin.lanes, pin.window)
    return EpochOrder(count, params, seed, epoch, shuffle).samples_at(0, count).tolist()


@contextmanager
def within(limit: int) -> Iterator[None]:
    """Fail where `limit` bytes are allocated at once."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def check_batch(batch: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Assert that every row of the batch has exactly the content and dtype of the sample that `index` names."""
    index = batch["index"].tolist()
    for name in fields:
        expected = [value(name, i) for i in index]
        if name in ("raw", "name"):
            assert batch[name] == expected
        elif name in ("tok", "pairs"):
            offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in expected], dtype=np.int64)])
            assert batch[f"{name}_offsets"].dtype == torch.int64
            assert batch[f"{name}_offsets"].tolist() == offsets.tolist()
            equal(batch[name], np.concatenate(expected))
        else:
            equal(batch[name], np.stack(expected))


def assert_workers_refuse(loader: Any, kind: type[Exception], shown: str) -> None:
    """Assert that the workers of a DataLoader raise an error, and end them: torch waits 5 s for each that raised."""
    import pytest

    iterator = iter(loader)
    with pytest.raises(kind, match=shown):
        next(iterator)
    with patch("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1):
        iterator._shutdown_workers()


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("streamloader")]


def assert_threads_end() -> None:
    gc.collect()  # a cycle of an earlier test may hold a pass: torchdata's loaders make some (test_leaks goes without)
    until = time.monotonic() + 60
    while (left := our_threads()) and time.monotonic() < until:  # one may start another before it is told to end
        left[0].join(1)
    assert not our_threads(), [thread.name for thread in our_threads()]


def assert_free(arena: Arena, before: int) -> None:
    """Assert that no more memory is allocated than before, once jobs that nobody waits for have ended."""
    until = time.monotonic() + 60
    while arena.allocated > before and time.monotonic() < until:
        time.sleep(0.01)
    assert arena.allocated <= before


def equal(tensor: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """Assert the same dtype, shape and values."""
    assert tensor.numpy().dtype == array.dtype
    assert tensor.numpy().shape == array.shape
    assert np.array_equal(tensor.numpy(), array)


def picture(i: int, height: int = 24, width: int = 32) -> np.ndarray[Any, Any]:
    """A smooth image whose colours tell i; JPEG keeps it within a few steps of grey."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([(i * 7) % 256 + 0 * x, 255 * x // width, 255 * y // height], axis=2).astype(np.uint8)


def encoded(pixels: np.ndarray[Any, Any], kind: str) -> bytes:
    """The pixels as "jpeg" or "png"."""
    out = io.BytesIO()
    options: dict[str, Any] = {"quality": 95, "subsampling": 0} if kind == "jpeg" else {}
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def write_images(url: str | Path, images: Iterable[bytes], encoding: str = "jpeg") -> Manifest:
    """Write a dataset of encoded images and their numbers."""
    layout = Layout(shard_size=1 << 16, block_size=1 << 13, chunk_size=1 << 12, codec="none")
    with Writer(url, {"image": f"bytes:{encoding}", "label": "int64"}, layout=layout) as out:
        for i, image in enumerate(images):
            out.write({"image": image, "label": i})
    return out.close()
