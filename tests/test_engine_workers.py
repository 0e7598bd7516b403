"""Batches, their order, errors and counts are the same for every number of workers: threads are the oracle."""

import gc
import hashlib
import random
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import worker_tasks
from amounts import covering, examples
from datasets import encoded, our_threads, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import uncollected
from test_bad_datasets import BAD, WRONG
from test_bad_datasets import EXPECTED as BAD_DATASETS
from test_targets import FIELDS as TARGETS
from test_targets import sample as target
from transform_tasks import Raising
from zarr_stores import url_of

import streamloader as sl
from streamloader.engine.executor import Executor
from streamloader.errors import CorruptError, DecodeError, StreamloaderError, TransformError
from streamloader.format.writer import Writer
from streamloader.loader.dataset import NumpyMixture
from streamloader.options import Layout, Pack

pytestmark = pytest.mark.usefixtures("two_workers")
N = 120
WORKERS = (1, 2, 3, 5)
ALL: dict[str, Any] = {"with_index": True, "seed": 3}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(lanes|blocks are read)")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets that read what the engine reads: by codec, of another size, of JPEGs, and of images with targets."""
    path = tmp_path_factory.mktemp("workers")
    for codec in ("none", "lz4", "zstd"):
        layout = Layout(shard_size=1 << 16, block_size=1 << 14, chunk_size=1 << 12, codec=codec)
        datasets.write(path / codec, N, layout=layout)
    datasets.write(path / "small", 60)
    datasets.write(path / "vectors", 2000, ["label", "half"])
    datasets.write_images(path / "jpeg", (encoded(picture(i), "jpeg") for i in range(60)))
    datasets.write_images(path / "sizes", (encoded(picture(i, 12 + i % 5, 20 + i % 3), "jpeg") for i in range(60)))
    with Writer(path / "targets", TARGETS, layout=Layout(block_size=1 << 12, chunk_size=1 << 11)) as out:
        for i in range(30):
            out.write(target(i))
    return path


def digest(value: Any, of: Any = None) -> str:
    """A digest of every byte, dtype, shape and key."""
    of = of or hashlib.blake2b()
    if isinstance(value, dict):
        for name, item in value.items():
            of.update(f"{name}:".encode())
            digest(item, of)
    elif isinstance(value, list | tuple):
        of.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            digest(item, of)
    elif isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1)
        of.update(f"{value.dtype}{tuple(value.shape)}".encode())
        of.update((flat.view(torch.uint8) if len(flat) else flat.byte()).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic):
        of.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    else:
        of.update(repr(value).encode())
    return of.hexdigest()


def digests(batches: Iterable[Any]) -> list[str]:
    return [digest(batch) for batch in batches]


def counts(ds: Any) -> dict[str, int]:
    """What does not depend on time."""
    stats = ds.stats()
    names = "samples", "batches", "bytes_decoded", "missing_chunks"
    requests = stats.requests - stats.retries - stats.hedges
    return {"requests": requests, **{name: getattr(stats, name) for name in names}}


Open = Callable[..., Any]
IMAGE = sl.Decode(size=(16, 16), crop="random", with_crop=True)
TARGET = sl.Decode(size=(40, 56), crop="random", boxes="boxes", keypoints="keypoints", masks="mask", with_crop=True)


def grid(name: str, kind: Open = sl.StreamingDataset, **options: Any) -> Open:
    arguments = {**ALL, "batch_size": 3, "sample_axis": "time", **options}
    return lambda _, **given: kind(url_of(name), **arguments, **given)


def plain(name: str, kind: Open = sl.StreamingDataset, **options: Any) -> Open:
    return lambda folder, **given: kind(folder / name, **{**ALL, "batch_size": 16, **options}, **given)


MIXED: dict[str, Any] = {"fields": ["wide", "label", "tok", "name"]}


def mixed(**options: Any) -> Open:
    def opened(folder: Path, **given: Any) -> sl.Mixture:
        inner = sl.Mixture({folder / "lz4": 1, folder / "zstd": 2}, batch_size=16)
        return sl.Mixture({inner: 2, folder / "small": 1}, **{**ALL, "batch_size": 16, **MIXED, **options}, **given)

    return opened


LEVELS = {"fields": ["0", "1", "2"], "sample_axis": "c"}
CHANNELS = sl.Channels("z@500", "t2m", "orog", "lat", "time_of_day")
CASES: dict[str, Open] = {
    **{codec: plain(codec) for codec in ("none", "lz4", "zstd")},
    "several batches at once": plain("vectors", batch_size=8),
    "arrays of numpy": plain("zstd", sl.NumpyDataset),
    "in order": plain("lz4", shuffle=False, fields=["tok", "x", "half"]),
    "single samples": plain("none", batch_size=None),
    "condition": plain("zstd", where="count > 65400", batch_size=5),
    "slice": plain("none", where=slice(20, 150, 3), batch_size=5),
    "packed": plain("lz4", pack={"tok": Pack(16, pad=-1)}),
    "rank": plain("zstd", world=(1, 3), batch_size=4),
    "uneven": plain("none", world=(0, 2), remainder="uneven"),
    "mixture": mixed(),
    "homogeneous mixture": mixed(batches="homogeneous"),
    "mixture of numpy": lambda folder, **given: NumpyMixture(
        {folder / "lz4": 1, folder / "small": 1}, batch_size=16, **MIXED, **given
    ),
    "images": plain("jpeg", decode=IMAGE),
    "images of their sizes": plain("sizes", batch_size=None, decode=True),
    "normalised images": plain("jpeg", decode=sl.Decode(size=(16, 16), normalize="imagenet")),
    "boxes and masks": plain("targets", batch_size=5, decode=TARGET),
    "transformed images": plain("sizes", sl.NumpyDataset, decode=True, transform=worker_tasks.summed_image),
    "transform": plain("zstd", sl.NumpyDataset, transform=worker_tasks.drawing_own),
    "transform of samples": plain("none", sl.NumpyDataset, batch_size=None, transform=worker_tasks.drawing_own),
    "large arrays of a transform": plain("zstd", sl.NumpyDataset, batch_size=15, transform=worker_tasks.large),
    "large arrays of a transform of samples": plain(
        "none", sl.NumpyDataset, batch_size=None, transform=worker_tasks.large
    ),
    "windows": grid("xarray3.zarr", windows=sl.Window(3)),
    "windows of numpy": grid(
        "xarray2.zarr", sl.NumpyDataset, windows=sl.Window(history=2, lead=1), fields=["z", "t2m"]
    ),
    "references": grid("kerchunk.json", windows=sl.Window(2)),
    "patches": grid("multiscale3.zarr", **LEVELS, patches=sl.Patch({"y": 16, "x": 16}, random=True)),
    "channels": grid("xarray3.zarr", channels={"x": CHANNELS}, windows=sl.Window(history="12h", lead="6h")),
    "missing chunks": grid("xarray2.zarr", fields=["count"]),
    "CSR rows": grid("anndata3.zarr", sample_axis=0, fields=["X", "layers/counts", "obs/depth"]),
    "transformed regions": grid(
        "xarray3.zarr", sl.NumpyDataset, fields=["t2m", "z"], transform=worker_tasks.mean_of_region
    ),
}


class Sometimes(threading.Event):
    """Says now and then that no worker serves yet, as while workers start."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def is_set(self) -> bool:
        return self.random.random() < 0.5


@pytest.mark.quick(1)
@pytest.mark.parametrize(("case", "workers"), covering(CASES, WORKERS))
def test_the_bytes_order_and_counts_do_not_depend_on_the_number_of_workers(case, workers, folder, monkeypatch):
    opened = partial(CASES[case], folder)
    expected = digests(threads := opened(num_workers=0))
    assert len(set(expected)) > 1
    for number in (workers, 2):
        assert digests(ds := opened(num_workers=number)) == expected
        assert (ds.stats().workers, ds.stats().workers_replaced) == (number, 0)
        assert counts(ds) == counts(threads)
        monkeypatch.setattr(Executor(2)._pool, "serves", Sometimes())


@pytest.mark.long
def test_tensors_of_a_transform_do_not_depend_on_the_number_of_workers(folder):
    opened = partial(plain("lz4", transform=worker_tasks.tensors), folder)
    expected = digests(opened(num_workers=0))
    assert digests(opened(num_workers=2)) == expected  # each imports torch, which takes long
    large = partial(plain("lz4", batch_size=15, transform=worker_tasks.large_tensors), folder)
    expected = digests(large(num_workers=0))
    assert all(digests(large(num_workers=workers)) == expected for workers in (1, 2))


@pytest.mark.long
def test_global_numbers_of_numpy_and_python_do_not_depend_on_the_number_of_workers(folder):
    """In threads of this process they are not seeded: others draw from them as well."""
    opened = partial(plain("zstd", sl.NumpyDataset, transform=worker_tasks.drawing), folder)
    expected = digests(opened(num_workers=1))
    assert all(digests(opened(num_workers=workers)) == expected for workers in WORKERS[1:])


@pytest.mark.long
@settings(max_examples=8)
@given(st.data())
def test_a_run_goes_on_with_another_number_of_workers(folder, data):
    opened = partial(CASES[data.draw(st.sampled_from(sorted(CASES)))], folder)
    first, second = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    before = opened(num_workers=first)
    steps = data.draw(st.integers(1, len(before) - 1))
    iterator = iter(before)
    begun = digests(islice(iterator, steps))
    after = opened(num_workers=second)
    after.load_state_dict(before.state_dict())
    rest = digests(iterator)
    assert digests(after) == rest
    assert begun + rest == digests(opened(num_workers=0))
    assert digests(after) == digests(before)  # the next epoch


@settings(max_examples=examples(8))
@given(st.data())
def test_any_configuration_gives_the_bytes_of_threads(folder, data):
    fields = data.draw(st.lists(st.sampled_from(sorted(datasets.FIELDS)), min_size=1, unique=True))
    size = data.draw(st.integers(1, 4))
    options = {
        "fields": fields,
        "batch_size": data.draw(st.sampled_from([1, 7, 15, None])),
        "shuffle": data.draw(st.one_of(st.booleans(), st.just(sl.Shuffle(block=8)))),
        "seed": data.draw(st.integers(0, 2**63)),
        "world": (data.draw(st.integers(0, size - 1)), size),
        "where": data.draw(st.sampled_from([None, slice(3, 110), list(range(0, N, 2))])),
        "remainder": data.draw(st.sampled_from(["pad", "drop", "uneven"])),
        "with_index": data.draw(st.booleans()),
    }
    if options["batch_size"] and "tok" in fields and data.draw(st.booleans()):
        options["pack"] = {"tok": data.draw(st.integers(1, 50))}
    url = folder / data.draw(st.sampled_from(["none", "lz4", "zstd"]))
    found = [digests(sl.StreamingDataset(url, **options, num_workers=n)) for n in (0, data.draw(st.integers(1, 3)))]
    assert found[0] == found[1]


def outcome(ds: Any) -> tuple[Any, ...]:
    """The batches of an epoch, and the error that ends it."""
    found: list[str] = []
    try:
        for batch in ds:
            found.append(digest(batch))
    except StreamloaderError as error:
        return found, type(error), error.code, str(error), type(error.__cause__)
    return found, None


def flip(path: Path) -> None:
    """Change a byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("field", "damage"), [("x", flip), ("name", flip), ("tok", Path.unlink), ("x", Path.unlink)])
def test_a_damaged_or_missing_object_is_the_same_error_at_the_same_batch(field, damage, folder, tmp_path):
    shutil.copytree(folder / "none", tmp_path / "d")
    shards = sorted(path for path in (tmp_path / "d" / field).rglob("*") if "/c/" in str(path) and path.is_file())
    damage(shards[-1])
    options = {**ALL, "batch_size": 8, "fields": [field, "label"], "shuffle": False}
    expected = outcome(sl.StreamingDataset(tmp_path / "d", num_workers=0, **options))
    assert len(expected[0]) > 0
    assert issubclass(expected[1], StreamloaderError)
    assert outcome(sl.StreamingDataset(tmp_path / "d", num_workers=2, **options)) == expected
    datasets.assert_threads_end()


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_of_a_damaged_chunk_holds_no_memory_once_it_is_gone(workers, folder, tmp_path):
    shutil.copytree(folder / "none", tmp_path / "d")
    flip(next(path for path in sorted((tmp_path / "d" / "x").rglob("*"))[::-1] if "/c/" in str(path)))
    arena = Executor(workers).arena
    with uncollected():
        before = arena.allocated
        assert outcome(sl.NumpyDataset(tmp_path / "d", batch_size=8, num_workers=workers))[1] is CorruptError
        while our_threads():
            our_threads()[0].join(1)
        datasets.assert_free(arena, before)


@pytest.mark.quick(34)
@pytest.mark.parametrize("name", WRONG)
def test_a_bad_dataset_gives_the_same_error_at_the_same_batch(name):
    wrong = BAD_DATASETS[name]
    decode = "pillow" if wrong["when"] == "decode" else None
    options = {"batch_size": 1, "split": wrong.get("split"), "shuffle": False, "decode": decode}
    with suppress(StreamloaderError):  # when it is opened
        found = [outcome(sl.StreamingDataset((BAD / name).as_uri(), **options, num_workers=n)) for n in (0, 2)]
        assert found[0][1] is not None
        # of several bad chunks, any may be the first to be read
        threads, workers = ([*each[:3], re.sub("[0-9]+", "", each[3]), each[4]] for each in found)
        assert workers == threads


@pytest.mark.parametrize("decode", [True, sl.Decode(size=(8, 8), crop="random"), "pillow"])
def test_an_image_that_cannot_be_decoded_is_the_same_error_at_the_same_batch(decode, tmp_path):
    images = [b"this is no image" if i == 41 else encoded(picture(i), "jpeg") for i in range(60)]
    datasets.write_images(tmp_path / "d", images)
    options = {"batch_size": 8, "decode": decode, "shuffle": False}
    expected = outcome(sl.NumpyDataset(tmp_path / "d", num_workers=0, **options))
    assert (len(expected[0]), expected[1]) == (5, DecodeError)
    assert outcome(sl.NumpyDataset(tmp_path / "d", num_workers=2, **options)) == expected


@pytest.mark.quick(1)
@pytest.mark.parametrize("arguments", [(KeyError, "colour"), (ValueError,), (SystemExit, 3), (OSError, 2, "none")])
def test_an_error_of_a_transform_is_the_same_at_the_same_batch(arguments, folder):
    options = {"batch_size": 8, "shuffle": False, "transform": Raising(*arguments)}
    expected = outcome(sl.NumpyDataset(folder / "none", num_workers=0, **options))
    assert (len(expected[0]), expected[1]) == (7, TransformError)
    assert outcome(sl.NumpyDataset(folder / "none", num_workers=2, **options)) == expected


WAYS = ["shape", "dtype", "other dtype", "object", "masked", "integers masked", "none", "text", "number", "list"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("how", "batch_size", "workers"), covering([*WAYS, "keys", "missing"], [8, 5, 1], [1, 2, 3]))
def test_a_large_array_that_differs_from_others_of_its_batch_gives_what_threads_give(how, batch_size, workers, folder):
    options = {"shuffle": False, "transform": worker_tasks.Differing(how), "batch_size": batch_size}
    expected = outcome(sl.NumpyDataset(folder / "none", num_workers=0, **options))
    assert outcome(sl.NumpyDataset(folder / "none", num_workers=workers, **options)) == expected


@pytest.mark.long
def test_large_arrays_of_a_transform_are_in_shared_memory_and_stay_as_they_are(folder):
    options = {"transform": worker_tasks.large, "num_workers": 2}
    arena = Executor(2).arena
    kept = list(plain("zstd", sl.NumpyDataset, **options)(folder))
    expected = digests(kept)
    for batch in kept:
        for name in ("x", "transposed", "mask", "complex"):
            assert arena.offset(batch[name]) is not None
    lists = [batch["optional"] for batch in kept]
    del kept, batch
    again = list(plain("zstd", sl.NumpyDataset, **options)(folder))
    assert digests(again) == expected
    assert digests(lists) == digests(batch["optional"] for batch in again)


KINDS = ["none", "images", "transform of samples", "windows", "mixture"]


@pytest.mark.long
@pytest.mark.parametrize(("case", "begun"), covering(KINDS, [0, 1, 3]))
def test_closing_in_the_middle_leaves_no_thread_and_no_memory(case, begun, folder):
    gc.collect()
    arena = Executor(2).arena
    before = arena.allocated
    ds = CASES[case](folder, num_workers=2)
    iterator = iter(ds)
    digests(islice(iterator, begun))
    ds.close()
    datasets.assert_threads_end()
    del iterator, ds
    gc.collect()
    datasets.assert_free(arena, before)


@pytest.mark.long
def test_few_threads_of_the_process_wait_for_workers(folder):
    ds = CASES["none"](folder, num_workers=2)
    for _ in range(2):
        iterator, most = iter(ds), 0
        for _ in iterator:
            most = max(most, len([thread for thread in our_threads() if "plan" not in thread.name]))
        assert 0 < most <= 2  # one plans, one assembles
    batches = iter(ds)
    next(batches)
    assert not [thread for thread in our_threads() if "plan" in thread.name]  # the chunk tables are cached
    del batches


@pytest.mark.long
def test_deleting_an_iterator_frees_its_memory(folder):
    arena, before = Executor(2).arena, 0
    datasets.assert_threads_end()
    datasets.assert_free(arena, before)  # of the tests before
    with uncollected():
        for _ in range(3):
            ds = CASES["none"](folder, num_workers=2)
            iterator = iter(ds)
            batch = next(iterator)
            assert arena.offset(batch["x"].numpy()) is not None  # a batch is in the arena, without a copy
            assert arena.allocated > before
            del iterator, ds, batch
            while our_threads():
                our_threads()[0].join(1)
            datasets.assert_free(arena, before)


@pytest.mark.long
def test_batches_that_are_kept_are_not_written_again(folder):
    kept = list(plain("lz4")(folder, num_workers=2))
    again = list(plain("lz4")(folder, num_workers=2))
    for batch in kept:
        datasets.check_batch(batch, datasets.FIELDS)
    assert digests(again) == digests(kept)
