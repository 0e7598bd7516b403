"""DataLoader workers: the same samples, epochs that advance, states that resume; and processes that fork by hand."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from folder_server import folder_server
from torch.utils.data import DataLoader
from torchrun import run_python

from streamloader.pytorch.dataset import StreamingDataset

N = 603


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("workers") / "data"
    datasets.write(path, N, ["x", "label", "name"])
    return str(path)


def open_dataset(url: str, **arguments: Any) -> StreamingDataset:
    return StreamingDataset(url, **{"batch_size": 16, "fields": ["x", "label"], "with_index": True, **arguments})


def forked(ds: StreamingDataset, workers: int = 2, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(ds, batch_size=None, num_workers=workers, multiprocessing_context="fork", **arguments)


# A process that has not used obstore yet: what forks from it may. Each case prints one JSON line.
SCRIPT = """
import json, os, pickle, sys, warnings
import torch
import datasets
from datasets import numbers
from test_workers import N, forked, open_dataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
url = sys.argv[1]

def take(iterator, count=10**6):
    out = []
    for _ in range(count):
        batch = next(iterator, None)
        if batch is None:
            break
        datasets.check_batch(batch, ["x", "label"])
        out.append(numbers(batch))
    return out

def say(name, value):
    print(json.dumps([name, value]), flush=True)
"""

EPOCHS = """
ds = open_dataset(url)
loader = forked(ds)
say("epochs", [take(iter(loader)) for _ in range(2)])
say("epoch", ds.epoch)
loader = forked(open_dataset(url), persistent_workers=True)
say("persistent", [take(iter(loader)) for _ in range(2)])
loader.dataset.set_epoch(7)
say("persistent 7", take(iter(loader)))
for count in (33, 34, 35):  # one worker may be through by then, and the other not
    loader = forked(early := open_dataset(url), persistent_workers=True)
    begun = take(iterator := iter(loader), count)
    del iterator
    say(f"after {count}", [begun, take(iter(loader)), early.epoch])
small = open_dataset(url, batch_size=64)
for workers in (3, 2, 4, 3, 1):
    assert sorted(i for part in take(iter(forked(small, workers))) for i in part) == list(range(N))
say("small", small.epoch)
del loader
say("three", take(iter(forked(open_dataset(url), 3))))
say("samples", [i for part in take(iter(DataLoader(open_dataset(url, batch_size=None), batch_size=20, num_workers=2,
    multiprocessing_context="fork"))) for i in part])
ds = open_dataset(url)
ds.set_epoch(7)
say("plain 7", take(iter(ds)))
"""

STATES = """
def state_after(k):
    return open_dataset(url).state_dict(batches=k, workers=2)

whole = take(iter(forked(open_dataset(url))))
say("whole", whole)
for k in (0, 1, 7, 8, len(whole)):
    ds = open_dataset(url)
    ds.load_state_dict(state_after(k))
    say(f"rest {k}", take(iter(forked(ds))))
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
    say(f"stateful {workers}", [begin, ahead, take(iter(second)), take(iter(second))])
lasting = forked(open_dataset(url), persistent_workers=True)
say("lasting whole", take(iter(lasting)))
for k in (7, 8, 0, 31):  # they run: the parent's state has to reach them
    lasting.dataset.load_state_dict(state_after(k))
    say(f"lasting {k}", [take(iter(lasting)), lasting.dataset.epoch])
lasting.dataset.load_state_dict(state_after(7))
lasting.dataset.set_epoch(0)
say("lasting set", take(iter(lasting)))
say("lasting next", take(iter(lasting)))
del lasting
ds = open_dataset(url)
ds.load_state_dict(state_after(7))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    say("other", take(iter(ds)))
say("said", [str(one.message) for one in said])
"""


def run(url: str, code: str, warned: int = 0) -> dict[str, Any]:
    """What a fresh process says; so many of it and its children have to say that they were forked too late."""
    done = run_python("-W", "ignore::UserWarning", "-c", SCRIPT + code, url)
    assert done.stderr.count("RuntimeWarning: this process was forked after obstore was used") == warned
    return dict(json.loads(line) for line in done.stdout.splitlines())


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def test_workers_deliver_each_epoch_once_and_the_parent_knows_the_epoch(url):
    said = run(url, EPOCHS)
    for name in ("epochs", "persistent"):
        first, second = said[name]
        assert sorted(flat(first)) == sorted(flat(second)) == list(range(N))
        assert flat(first) != flat(second)
    assert said["persistent"] == said["epochs"]
    assert said["epoch"] == 2
    assert sorted(flat(said["persistent 7"])) == list(range(N))
    for count in (33, 34, 35):
        begun, again, epoch = said[f"after {count}"]
        assert len(begun) == count
        assert sorted(flat(again)) == list(range(N))
        assert epoch == 1 if begun == again[:count] else epoch == 2
    assert said["small"] == 5
    # the steps of two workers are pairs of batches: over the pair, the samples are those of a rank without workers
    with_workers, without = said["persistent 7"], said["plain 7"]
    for k in range(0, 36, 2):
        assert sorted(flat(with_workers[k : k + 2])) == sorted(flat(without[k : k + 2]))
    assert sorted(flat(said["three"])) == list(range(N))
    assert sorted(said["samples"]) == list(range(N))


def test_states_of_workers_resume_exactly(url):
    said = run(url, STATES)
    whole = said["whole"]
    for k in (0, 1, 7, 8):
        assert said[f"rest {k}"] == whole[k:]
    assert sorted(flat(said[f"rest {len(whole)}"])) == list(range(N))  # the next epoch
    assert said[f"rest {len(whole)}"] != whole
    assert said["lasting whole"] == whole
    for k in (7, 8, 0, 31):
        assert said[f"lasting {k}"] == [whole[k:], 1]
    assert said["lasting set"] == whole[7:]  # the epoch that it is at already
    assert sorted(flat(said["lasting next"])) == list(range(N))
    # without workers the run goes on from the last complete pair: one batch comes again
    assert sorted(flat(whole[:6]) + flat(said["other"])) == list(range(N))
    assert any("1 batches of each rank come again" in text for text in said["said"])
    for workers in (0, 2):
        begin, ahead, rest, following = said[f"stateful {workers}"]
        assert len(begin) == 7
        assert rest == ahead
        assert sorted(flat(begin) + flat(rest)) == list(range(N))
        assert sorted(flat(following)) == list(range(N))
        assert following != begin + rest


LENGTHS = """
warnings.simplefilter("always")
for workers, world in ((0, (0, 1)), (2, (1, 2)), (3, (0, 1))):
    for remainder in ("pad", "drop", "uneven"):
        for batch, size, drop_last in ((16, None, False), (None, 20, False), (None, 20, True)):
            ds = open_dataset(url, batch_size=batch, fields=["label"], remainder=remainder, world=world)
            options = {"multiprocessing_context": "fork"} if workers else {}
            options |= {"drop_last": True} if drop_last else {}
            loader = DataLoader(ds, batch_size=size, num_workers=workers, **options)
            with warnings.catch_warnings(record=True) as said:
                counts = [len(loader), sum(1 for _ in loader)]
            told = [str(one.message) for one in said if "was reported to be" in str(one.message)]
            say(f"{workers} {remainder} {batch} {drop_last}", [*counts, told])
"""


def test_the_length_of_a_dataloader_is_what_its_workers_yield(url):
    said = run(url, LENGTHS)
    assert len(said) == 3 * 3 * 3
    assert {name: counts for name, counts in said.items() if counts[0] != counts[1] or counts[2]} == {}


FORKS = """
ds = open_dataset(url)
iterator = iter(ds)
begin = take(iterator, 3)
pid = os.fork()
if pid == 0:
    try:
        next(iterator)
    except Exception as error:
        say("inherited", str(error))
    say("child", [take(iter(ds)), ds.stats().client])
    say("child again", take(iter(open_dataset(url))))
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
say("parent", begin + take(iterator))
say("workers", take(iter(forked(ds))))
say("copy", take(iter(pickle.loads(pickle.dumps(ds)))))
"""


@pytest.mark.parametrize(("plane", "warned"), [("file", 0), ("http", 3)])
def test_a_fork_in_the_middle_of_a_pass_reads_on_without_a_hang(url, plane, warned):
    with folder_server(Path(url)) as server:
        said = run(server.url if plane == "http" else url, FORKS, warned=warned)
    assert "this pass belongs to the process that was forked" in said["inherited"]
    child, client = said["child"]
    assert client.startswith("fsspec: forked after obstore was used" if plane == "http" else "file: ")
    for seen in (child, said["child again"], said["parent"]):
        assert sorted(flat(seen)) == list(range(N))
    assert child == said["child again"] == said["parent"]
    assert sorted(flat(said["workers"])) == sorted(flat(said["copy"])) == list(range(N))


PARENTS = """
ds = open_dataset(url)
say("before", ds.state_dict()["position"])
for batch in forked(ds):
    pass
for count, batch in enumerate(forked(ds), 1):
    if count == 3:
        break
try:
    ds.state_dict()
except Exception as error:
    say("refused", str(error))
state = ds.state_dict(batches=3, workers=2)
say("state", [state["epoch"], state["position"], state["extra"], state["workers"]])
resumed = open_dataset(url)
resumed.load_state_dict(state)
again = open_dataset(url)
again.set_epoch(1)
say("second epoch", take(iter(forked(again))))
say("rest of it", take(iter(forked(resumed))))
pickle.loads(pickle.dumps(ds := open_dataset(url)))
say("pickled and read here", [len(take(iter(ds))), ds.state_dict()["epoch"]])
"""


def test_a_parent_of_workers_does_not_invent_a_state(url):
    said = run(url, PARENTS)
    assert said["before"] == 0
    assert "save state_dict(batches=<trained>, workers=<num_workers>)" in said["refused"]
    assert said["state"] == [1, 32, 1, 2]  # two workers have delivered a batch of 16 each, and one of them another
    assert said["rest of it"] == said["second epoch"][3:]
    assert said["pickled and read here"] == [-(-N // 16), 1]
