"""Whatever a loader held is free once it is dropped, without waiting for a collection; see also integrations/."""

import gc
import operator
import signal
import threading
import weakref
from _thread import interrupt_main
from collections import deque
from functools import partial
from typing import Any

import leaks
import pytest
from amounts import longer
from datasets import write
from folder_server import folder_server, location
from torchrun import run_python

from streamloader.pytorch.dataset import StreamingDataset


@pytest.mark.long
def test_an_owner_whose_method_is_the_transform_is_collected(cycled):
    trainer = leaks.Trainer(cycled / "arrays")
    for _ in range(3):  # after the third, threads load a fourth
        for _ in trainer.dataset:
            pass
    assert leaks.our_threads()
    gone = threading.Event()
    weakref.finalize(trainer, gone.set)
    del trainer
    for _ in range(100):  # a thread may be inside the transform
        gc.collect()
        if gone.wait(0.1):
            break
    assert gone.is_set()
    assert leaks.held().slots == 0
    assert not leaks.our_threads()


# of the others, make test-long looks what two hundred cycles leave
QUICK = ("close", "epochs", "failing transform", "mixture")


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind if kind in QUICK else longer(kind) for kind in leaks.KINDS])
def test_what_is_dropped_leaves_nothing(cycled, kind):
    leaks.check_flat(leaks.growth(leaks.cycles(cycled)[kind], 8))


@pytest.mark.long
def test_closing_a_dataset_that_is_kept_frees_its_memory(cycled):
    ds = StreamingDataset(cycled / "arrays", batch_size=leaks.BATCH)
    iterator = iter(ds)
    next(iterator)
    assert leaks.slots() == 1
    ds.close()
    assert leaks.held().slots == 0
    assert sum(1 for _ in ds) == len(ds)


@pytest.mark.long
@pytest.mark.parametrize("plane", ["http", "fsspec", "s3"])
def test_a_dropped_dataset_leaves_no_client(tmp_path, plane):
    write(tmp_path / "data", 64, ["label"])
    with folder_server(tmp_path) as server:
        url, options = location(server.endpoint, plane)
        grown = leaks.growth(lambda: leaks.begin(StreamingDataset(url, batch_size=8, storage_options=options)), 5)
    # botocore's clients have cycles of their own, 0.2 MB each, which a collection frees
    leaks.check_flat(grown._replace(objects=0) if plane == "s3" else grown)


FORK = """
import gc, os, sys
from streamloader.storage import open_store

store = open_store(sys.argv[1], {"encoded": False})
read = store.get("data/zarr.json")
child = os.fork()
if not child:
    del store
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
assert store.get("data/zarr.json") == read
"""


def test_a_child_that_drops_a_store_leaves_its_parent_the_connection(tmp_path):
    write(tmp_path / "data", 8, ["label"])
    with folder_server(tmp_path) as server:
        run_python("-c", FORK, server.url)
        assert server.connections == 1


class PreemptedError(Exception):
    """What the signal handler of a framework raises."""


def delete_when_a_signal_comes(held: list[Any]) -> None:
    """Delete the items between the arrival of a signal and the next Python code of the main thread."""

    def preempt(*_: object) -> None:
        raise PreemptedError

    before = signal.signal(signal.SIGALRM, preempt)
    steps = [partial(interrupt_main, signal.SIGALRM), held.clear]
    try:
        # a callback in Python would get it, and the interpreter drop it, as it does in what a collection calls
        with leaks.uncollected(), pytest.raises(PreemptedError):
            deque(map(operator.call, steps), maxlen=0)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.long
def test_what_a_signal_handler_raises_reaches_the_loop_whatever_is_deleted_then(tmp_path):
    write(tmp_path / "data", 64, ["label"])
    with folder_server(tmp_path) as server:
        url, options = location(server.endpoint, "s3")
        ds = StreamingDataset(url, batch_size=8, storage_options=options)
        iterator = iter(ds)
        batches = [next(iterator) for _ in range(2)]
        delete_when_a_signal_comes(batches)  # their memory is used again
        assert len(list(iterator)) == len(ds) - 2
        del iterator
        held = [iter(ds)]
        delete_when_a_signal_comes(held)  # its threads end
        held, ds = [ds], None  # type: ignore[assignment]
        delete_when_a_signal_comes(held)  # its connections end
        leaks.held()
        assert not leaks.our_threads() + leaks.connections()
