"""DataLoader workers: the same samples, epochs that advance, states that resume; and processes that fork by hand."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from datasets import flat
from folder_server import folder_server
from torch.utils.data import DataLoader
from torchrun import run_python

from streamloader.pytorch.dataset import StreamingDataset
from streamloader.pytorch.distributed import shared_epochs

N = 603


@pytest.fixture(scope="module")
def url(data: Any) -> str:
    return data(N, "x", "label", "name")


def open_dataset(url: str, **arguments: Any) -> StreamingDataset:
    return StreamingDataset(url, **{"batch_size": 16, "fields": ["x", "label"], "with_index": True, **arguments})


def forked(ds: StreamingDataset, workers: int = 2, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(ds, batch_size=None, num_workers=workers, multiprocessing_context="fork", **arguments)


# A process that has not used obstore yet: what forks from it may. Each case prints one JSON line.
SCRIPT = """
import itertools, json, os, pickle, sys, warnings
import torch
import datasets
from datasets import flat
from test_workers import N, forked, open_dataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
url = sys.argv[1]

def take(batches, count=None):
    found = list(itertools.islice(batches, count))
    for batch in found:
        datasets.check_batch(batch, ["x", "label"])
    return datasets.take(found)

def show(name, value):
    print(json.dumps([name, value]), flush=True)
"""

EPOCHS = """
ds = open_dataset(url)
loader = forked(ds)
show("epochs", [take(loader) for _ in range(2)])
show("epoch", ds.epoch)
loader = forked(open_dataset(url), persistent_workers=True)
show("persistent", [take(loader) for _ in range(2)])
loader.dataset.set_epoch(7)
show("persistent 7", take(loader))
for count in (33, 34, 35):  # one worker may be through by then, and the other not
    loader = forked(early := open_dataset(url), persistent_workers=True)
    begun = take(iterator := iter(loader), count)
    del iterator
    show(f"after {count}", [begun, take(loader), early.epoch])
small = open_dataset(url, batch_size=64)
for workers in (3, 2, 4, 3, 1):
    assert sorted(flat(take(forked(small, workers)))) == list(range(N))
show("small", small.epoch)
del loader
show("three", take(forked(open_dataset(url), 3)))
samples = DataLoader(open_dataset(url, batch_size=None), batch_size=20, num_workers=2, multiprocessing_context="fork")
show("samples", flat(take(samples)))
ds = open_dataset(url)
ds.set_epoch(7)
show("plain 7", take(ds))
"""

STATES = """
def state_after(k):
    return open_dataset(url).state_dict(batches=k, workers=2)

whole = take(forked(open_dataset(url)))
show("whole", whole)
for k in (0, 1, 7, 8, len(whole)):
    ds = open_dataset(url)
    ds.load_state_dict(state_after(k))
    show(f"rest {k}", take(forked(ds)))
for workers in (2, 0):
    def loader():
        options = {"multiprocessing_context": "fork"} if workers else {}
        return StatefulDataLoader(open_dataset(url), batch_size=None, num_workers=workers, **options)
    first = loader()
    iterator = iter(first)
    begin = take(iterator, 7)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    ahead = take(iterator)
    second = loader()
    second.load_state_dict(state)
    show(f"stateful {workers}", [begin, ahead, take(second), take(second)])
lasting = forked(open_dataset(url), persistent_workers=True)
show("lasting whole", take(lasting))
for k in (7, 8, 0, 31):  # they run: the parent's state has to reach them
    lasting.dataset.load_state_dict(state_after(k))
    show(f"lasting {k}", [take(lasting), lasting.dataset.epoch])
lasting.dataset.load_state_dict(state_after(7))
lasting.dataset.set_epoch(0)
show("lasting set", take(lasting))
show("lasting next", take(lasting))
del lasting
ds = open_dataset(url)
ds.load_state_dict(state_after(7))
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    show("other", take(ds))
show("warned", [str(one.message) for one in warned])
"""


def run(url: str, code: str, warned: int = 0) -> dict[str, Any]:
    """What a fresh process shows; `warned`: how many of it and its children warn that they were forked too late."""
    done = run_python("-W", "ignore::UserWarning", "-c", SCRIPT + code, url)
    assert done.stderr.count("RuntimeWarning: this process was forked after obstore was used") == warned
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def shown(url: str) -> dict[str, Any]:
    """What one process shows in all cases: to start it takes longer than most of them."""
    return run(url, EPOCHS + STATES + POSITIONS + LENGTHS + FORKS + PARENTS)


def test_workers_deliver_each_epoch_once_and_the_parent_knows_the_epoch(shown):
    for name in ("epochs", "persistent"):
        first, second = shown[name]
        assert sorted(flat(first)) == sorted(flat(second)) == list(range(N))
        assert flat(first) != flat(second)
    assert shown["persistent"] == shown["epochs"]
    assert shown["epoch"] == 2
    assert sorted(flat(shown["persistent 7"])) == list(range(N))
    for count in (33, 34, 35):
        begun, again, epoch = shown[f"after {count}"]
        assert len(begun) == count
        assert sorted(flat(again)) == list(range(N))
        assert epoch == 1 if begun == again[:count] else epoch == 2
    assert shown["small"] == 5
    # the steps of two workers are pairs of batches: over the pair, the samples are those of a rank without workers
    with_workers, without = shown["persistent 7"], shown["plain 7"]
    for k in range(0, 36, 2):
        assert sorted(flat(with_workers[k : k + 2])) == sorted(flat(without[k : k + 2]))
    assert sorted(flat(shown["three"])) == list(range(N))
    assert sorted(shown["samples"]) == list(range(N))


def test_states_of_workers_resume_exactly(shown):
    whole = shown["whole"]
    for k in (0, 1, 7, 8):
        assert shown[f"rest {k}"] == whole[k:]
    assert sorted(flat(shown[f"rest {len(whole)}"])) == list(range(N))  # the next epoch
    assert shown[f"rest {len(whole)}"] != whole
    assert shown["lasting whole"] == whole
    for k in (7, 8, 0, 31):
        assert shown[f"lasting {k}"] == [whole[k:], 1]
    assert shown["lasting set"] == whole[7:]  # the epoch that it is at already
    assert sorted(flat(shown["lasting next"])) == list(range(N))
    # without workers the run goes on from the last complete pair: one batch comes again
    assert sorted(flat(whole[:6]) + flat(shown["other"])) == list(range(N))
    assert any("1 batches of each rank are repeated" in text for text in shown["warned"])
    for workers in (0, 2):
        begin, ahead, rest, following = shown[f"stateful {workers}"]
        assert len(begin) == 7
        assert rest == ahead
        assert sorted(flat(begin) + flat(rest)) == list(range(N))
        assert sorted(flat(following)) == list(range(N))
        assert following != begin + rest


POSITIONS = """
from streamloader.loader.arguments import Source
from streamloader.pytorch.dataset import Mixture

def stateful(ds):
    return StatefulDataLoader(ds, batch_size=None, num_workers=3, multiprocessing_context="fork")

def following(loader, passes):
    return [batch["index"].tolist() for _ in range(passes) for batch in loader]

kinds = {
    "pad": lambda: open_dataset(url, batch_size=100, fields=["label"]),
    "uneven": lambda: open_dataset(url, batch_size=16, where=slice(5, 130), fields=["label"], remainder="uneven"),
    "mixture": lambda: Mixture(
        {Source(url, where=slice(0, 70)): 0.7, Source(url, where=slice(100, 200)): 0.3},
        **{"batch_size": 16, "fields": ["label"], "with_index": True, "remainder": "drop"},
    ),
}
for kind, opened in kinds.items():
    loader = stateful(opened())
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(batch["index"].tolist())
        states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    whole += following(loader, 1)
    wrong = []
    for k, state in enumerate(states):
        (again := stateful(opened())).load_state_dict(state)
        rest = following(again, 1 + (k + 4 > len(states)))
        if rest[:len(whole) - k] != whole[k:k + len(rest)] or len(rest) < len(states) - 1 - k:
            wrong.append([k, len(rest)])
    show(f"positions {kind}", [len(states), wrong])
"""


@pytest.mark.parametrize("kind", ["pad", "uneven", "mixture"])
def test_a_state_of_workers_resumes_at_every_position_of_an_epoch(shown, kind):
    count, wrong = shown[f"positions {kind}"]
    assert count > 6
    assert wrong == []


LENGTHS = """
lengths = {}
for workers, world in ((0, (0, 1)), (2, (1, 2)), (3, (0, 1))):
    for remainder in ("pad", "drop", "uneven"):
        for batch, size, drop_last in ((16, None, False), (None, 20, False), (None, 20, True)):
            ds = open_dataset(url, batch_size=batch, fields=["label"], remainder=remainder, world=world)
            options = {"multiprocessing_context": "fork"} if workers else {}
            options |= {"drop_last": True} if drop_last else {}
            loader = DataLoader(ds, batch_size=size, num_workers=workers, **options)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                counts = [len(loader), sum(1 for _ in loader)]
            wrong = [str(one.message) for one in warned if "was reported to be" in str(one.message)]
            lengths[f"{workers} {remainder} {batch} {drop_last}"] = [*counts, wrong]
show("lengths", lengths)
"""


def test_the_length_of_a_dataloader_is_what_its_workers_yield(shown):
    assert len(shown["lengths"]) == 3 * 3 * 3
    assert {name: counts for name, counts in shown["lengths"].items() if counts[0] != counts[1] or counts[2]} == {}


FORKS = """
ds = open_dataset(url)
iterator = iter(ds)
begin = take(iterator, 3)
pid = os.fork()
if pid == 0:
    try:
        next(iterator)
    except Exception as error:
        show("inherited", str(error))
    show("child", [take(ds), ds.stats().client])
    show("child again", take(open_dataset(url)))
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
show("parent", begin + take(iterator))
show("workers", take(forked(ds)))
show("copy", take(pickle.loads(pickle.dumps(ds))))
"""


@pytest.mark.parametrize("plane", ["file", "http"])
def test_a_fork_in_the_middle_of_a_pass_reads_on_without_a_hang(url, shown, plane):
    if plane == "http":
        with folder_server(Path(url)) as server:
            shown = run(server.url, FORKS, warned=3)
    assert "this pass belongs to the process that was forked" in shown["inherited"]
    child, client = shown["child"]
    assert client.startswith("fsspec: forked after obstore was used" if plane == "http" else "file: ")
    for seen in (child, shown["child again"], shown["parent"]):
        assert sorted(flat(seen)) == list(range(N))
    assert child == shown["child again"] == shown["parent"]
    assert sorted(flat(shown["workers"])) == sorted(flat(shown["copy"])) == list(range(N))


PARENTS = """
ds = open_dataset(url)
show("before", ds.state_dict()["position"])
for batch in forked(ds):
    pass
for count, batch in enumerate(forked(ds), 1):
    if count == 3:
        break
try:
    ds.state_dict()
except Exception as error:
    show("refused", str(error))
state = ds.state_dict(batches=3, workers=2)
show("state", [state["epoch"], state["position"], state["extra"], state["workers"]])
resumed = open_dataset(url)
resumed.load_state_dict(state)
again = open_dataset(url)
again.set_epoch(1)
show("second epoch", take(forked(again)))
show("rest of it", take(forked(resumed)))
pickle.loads(pickle.dumps(ds := open_dataset(url)))
show("pickled and read here", [len(take(ds)), ds.state_dict()["epoch"]])
"""


def test_a_parent_of_workers_does_not_invent_a_state(shown):
    assert shown["before"] == 0
    assert "save state_dict(batches=<trained>, workers=<num_workers>)" in shown["refused"]
    assert shown["state"] == [1, 32, 1, 2]  # two workers have delivered a batch of 16 each, and one of them another
    assert shown["rest of it"] == shown["second epoch"][3:]
    assert shown["pickled and read here"] == [-(-N // 16), 1]


def test_workers_choose_one_epoch_although_one_completes_the_last_pass_meanwhile():
    epochs, chosen = shared_epochs(), list[int]()
    for number in (0, 1):
        epochs.begin(number, 2, 1)
    epochs.complete(0, 1)

    def second() -> None:
        epochs.complete(1, 1)  # the last of the pass that the consumer left early
        with epochs.choosing(2):
            chosen.append(epochs.next_epoch())

    thread = threading.Thread(target=second, daemon=True)
    with epochs.choosing(2):
        epoch = epochs.next_epoch()
        thread.start()
        thread.join(0.2)  # it must wait
        epochs.begin(0, 2, epoch)
    thread.join(30)
    assert chosen == [epoch] == [1]


def test_a_state_that_is_loaded_while_workers_complete_its_epoch_is_where_the_next_pass_begins():
    epochs = shared_epochs()
    for number in (0, 1):
        epochs.begin(number, 2, 3)
    epochs.choose(3)
    for number in (0, 1):
        epochs.complete(number, 3)
    assert epochs.next_epoch() == 3


COMPUTES = """
import os, signal, threading
from streamloader.order import epoch_order
from streamloader.order.epoch_order import EpochOrder, OrderParams, permute
from streamloader.pytorch import dataset

begun, go, parent = threading.Event(), threading.Event(), os.getpid()

def slow(*arguments, **options):
    if os.getpid() == parent:
        begun.set()
        go.wait()
    return permute(*arguments, **options)

def order():
    return EpochOrder(1001, OrderParams(8, 2, 16), 0, 0)

epoch_order.permute = slow
threading.Thread(target=lambda: order()._short).start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    order()._short
    os._exit(0)
status = os.waitpid(child, 0)[1]
go.set()
assert status == 0, status
"""


@pytest.mark.long
def test_a_child_computes_what_a_thread_of_its_parent_was_computing():
    run_python("-W", "ignore", "-c", COMPUTES)
