"""Ways to use and drop a loader, and what is left in the process after many of them.

Imports little at the top: transform processes import this module.
"""

import _thread
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

KINDS = ["break", "close", "epochs", "load_state_dict", "samples", "transform", "failing transform", "images"]
KINDS += ["mixture", "replay"]
PIXELS = (64, 1024)
BATCH = 16
# A window of about 8 MB, so that a few that are left exceed this.
SAMPLES = 128
RSS_BYTES = 20e6
OBJECTS = 300  # a client that is left in a cycle has more


class Held(NamedTuple):
    """What the process holds: threads, file descriptors, slots of blocks, objects of the collector, resident bytes."""

    threads: int
    files: int
    slots: int
    objects: int
    rss: int


def write(folder: Path) -> None:
    """Write the datasets that the cycles read: `arrays`, and `images` of JPEGs."""
    import datasets

    from streamloader.format.writer import Writer
    from streamloader.options import Layout

    layout = Layout(shard_size=1 << 21, block_size=1 << 20, chunk_size=1 << 18, codec="none")
    with Writer(folder / "arrays", {"x": f"uint8[{PIXELS[0]},{PIXELS[1]}]", "label": "int64"}, layout=layout) as out:
        for i in range(SAMPLES):
            out.write({"x": np.full(PIXELS, i, np.uint8), "label": i})
    out.close()
    pictures = [datasets.encoded(datasets.picture(i, 480, 640), "jpeg") for i in range(8)]
    datasets.write_images(folder / "images", pictures * 8)


def mean(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform of whole arrays, with small results: what malloc keeps of a thread's is not ours to count."""
    return {"x": sample["x"][0] + 1, "mean": sample["x"].mean()}


def enlarge(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform whose arrays have up to 10 MB."""
    return {"x": np.repeat(sample["x"][None].astype(np.float32), 1 + sample["label"] % 40, 0).sum(0)}


def fails(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that raises before the end of the epoch."""
    if sample["label"] == SAMPLES // 2:
        raise KeyError("colour")
    return mean(sample)


class Trainer:
    """An object that holds its dataset, whose transform is a method of the object."""

    def __init__(self, url: Path) -> None:
        from streamloader.pytorch.dataset import StreamingDataset

        self.dataset = StreamingDataset(url, batch_size=BATCH, transform=self.augment)

    def augment(self, sample: dict[str, Any]) -> dict[str, Any]:
        return mean(sample)


def begin(ds: Any) -> None:
    """Take two batches."""
    for _ in islice(ds, 2):
        pass


def cycles(folder: Path) -> dict[str, Callable[[], None]]:
    """Return each kind of use by name, to be called again and again."""
    from torch.utils.data import DataLoader

    from streamloader.errors import TransformError
    from streamloader.pytorch.dataset import Mixture, StreamingDataset

    arrays, images = folder / "arrays", folder / "images"

    def dataset(**arguments: Any) -> StreamingDataset:
        return StreamingDataset(arrays, batch_size=BATCH, **arguments)

    def close() -> None:
        ds = dataset()
        iterator = iter(ds)
        next(iterator)
        ds.close()
        kept.append(ds)
        del kept[:-1]

    def epochs() -> None:
        ds = dataset()
        for _ in range(3):  # from the second on, the next one is loaded ahead
            assert sum(1 for _ in ds) == len(ds)

    def loaded() -> None:
        begin(one)
        one.load_state_dict(state)

    def failing() -> None:
        with suppress(TransformError):
            list(dataset(transform=fails))
            raise AssertionError("the transform did not fail")

    one, kept = dataset(), []  # type: ignore[var-annotated]
    state = one.state_dict()
    return {
        "break": lambda: begin(dataset()),
        "close": close,
        "epochs": epochs,
        "load_state_dict": loaded,
        "samples": lambda: begin(StreamingDataset(arrays, batch_size=None)),
        "transform": lambda: begin(dataset(transform=mean)),
        "large transform": lambda: begin(dataset(transform=enlarge)),
        "failing transform": failing,
        "transform workers": lambda: begin(dataset(transform=mean, num_workers=1)),
        "images": lambda: begin(StreamingDataset(images, batch_size=BATCH, decode=True)),
        "mixture": lambda: begin(Mixture({str(arrays): 1.0}, batch_size=BATCH)),
        "replay": lambda: begin(dataset().replay(0, [1, 3])),
        "DataLoader workers": lambda: begin(DataLoader(dataset(), batch_size=None, num_workers=2)),
    }


def held() -> Held:
    """Return what the process holds once our threads, processes and connections have ended, without a collection."""
    end = time.monotonic() + 60
    while (our_threads() or unnamed() or connections() or multiprocessing.active_children()) and time.monotonic() < end:
        time.sleep(0.01)
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(threading.active_count(), files, slots(), len(gc.get_objects()), rss)


def slots() -> int:
    """Return how many loaders have slots for blocks."""
    from streamloader.engine.memory import Memory

    return sum(type(one) is Memory for one in gc.get_objects())  # isinstance wakes proxies


def connections() -> list[str]:
    """Return the threads of servers in this process that serve a connection."""
    return [thread.name for thread in threading.enumerate() if "process_request" in thread.name]


def unnamed() -> int:
    """Return how many threads of finalizers there are, which are not objects."""
    return max(0, _thread._count() - threading.active_count() + 1 - OTHERS)


OTHERS = 0
OTHERS = unnamed()  # those of pytest-xdist, in Python 3.13


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("streamloader")]


@contextmanager
def uncollected() -> Iterator[None]:
    """What only a reference cycle holds stays in memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def growth(cycle: Callable[[], None], count: int, first: int = 3) -> Held:
    """Return what the process holds more after `count` cycles than after the `first`; nothing is collected.

    malloc keeps up to some MB for each of 8 heaps a core, which the threads of the first cycles fill.
    """
    for _ in range(first):
        cycle()
    with uncollected():
        before = held()
        for _ in range(count):
            cycle()
        after = held()
    return Held(*(b - a for a, b in zip(before, after, strict=True)))


def check_flat(found: Held) -> None:
    """Assert that nothing grew."""
    assert max(found.threads, found.files, found.slots) <= 0, found
    assert found.objects < OBJECTS, found
    assert found.rss < RSS_BYTES, found
