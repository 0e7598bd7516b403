"""States: what was delivered and nothing else; any world size goes on from there, exactly."""

import copy
import json
import shutil
from typing import Any

import datasets
import numpy as np
import pytest
from amounts import examples
from datasets import flat, planned, seen, take
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import streamloader as sl
from streamloader.errors import FormatError, StateError, UsageError
from streamloader.loader.arguments import Source
from streamloader.options import Layout, Shuffle
from streamloader.pytorch.dataset import Mixture, StreamingDataset

N = 603
FIELDS = ["x", "label"]


@pytest.fixture(scope="module")
def path(data: Any) -> str:
    return data(N, *FIELDS)


def open_rank(path: str, batch: int | None = 8, world: tuple[int, int] = (0, 1), **arguments: Any) -> StreamingDataset:
    return StreamingDataset(path, batch_size=batch, world=world, with_index=True, **arguments)


def resumed(path: str, state: dict[str, Any], *arguments: Any, **options: Any) -> StreamingDataset:
    ds = open_rank(path, *arguments, **options)
    ds.load_state_dict(json.loads(json.dumps(state)))
    return ds


@pytest.mark.quick(1)
@pytest.mark.parametrize("steps", [0, 1, 5, 75])
def test_a_state_goes_on_after_the_last_batch_handed_out(path, steps):
    whole = take(open_rank(path))
    ds = open_rank(path)
    iterator = iter(ds)
    assert take(iterator, steps) == whole[:steps]
    state = ds.state_dict()  # whatever was prefetched meanwhile
    assert state["position"] == 8 * steps
    other = resumed(path, state)
    assert other.state_dict() == state
    assert take(other) == whole[steps:]
    assert other.epoch == 1
    assert take(iterator) == whole[steps:]


def test_after_the_last_batch_the_state_is_the_next_epoch(path):
    ds = open_rank(path)
    iterator = iter(ds)
    assert len(take(iterator, len(ds))) == len(ds)
    state = ds.state_dict()  # StopIteration was not seen yet
    assert (state["epoch"], state["position"]) == (1, 0)
    assert next(iterator, None) is None
    assert ds.state_dict() == state
    assert seen(resumed(path, state)) == planned(ds, epoch=1)


def test_set_epoch_chooses_an_earlier_epoch(path):
    ds = open_rank(path, batch=64)
    seen(ds)
    seen(ds)
    ds.set_epoch(1)
    assert ds.epoch == 1
    assert seen(ds) == planned(ds, epoch=1)
    assert ds.epoch == 2


def test_a_pass_that_is_left_early_does_not_advance_the_epoch(path):
    ds = open_rank(path)
    begin = take(iter(ds), 3)
    assert ds.epoch == 0
    with pytest.warns(UserWarning, match=r"epoch 0 begins anew: .*steps_per_epoch= .*set_epoch\(\).* load a state"):
        assert take(iter(ds), 3) == begin
    ds.set_epoch(0)
    with pytest.warns(UserWarning, match="begins anew"):
        assert take(iter(ds), 3) == begin
    ds.set_epoch(1)
    take(iter(ds), 1)
    take(iter(ds), 1)  # a look at the data
    with pytest.warns(UserWarning, match="epoch 1 begins anew"):
        take(iter(ds), 1)
    ds.load_state_dict(ds.state_dict())
    assert len(take(ds)) == len(ds) - 1
    take(iter(ds), 3)


def test_set_epoch_during_a_pass_is_for_the_next_one(path):
    ds = open_rank(path, batch=64)
    iterator = iter(ds)
    begin = take(iterator, 2)
    ds.set_epoch(5)
    assert flat(begin) + seen(iterator) == planned(ds)
    assert ds.epoch == 5
    assert seen(ds) == planned(ds, epoch=5)


def test_set_epoch_after_a_load_must_agree_until_a_batch_was_taken(path):
    ds = open_rank(path)
    ds.load_state_dict({**ds.state_dict(batches=4), "epoch": 3})
    ds.set_epoch(3)
    with pytest.raises(StateError, match=r"set_epoch\(0\) right after a state of epoch 3 was loaded"):
        ds.set_epoch(0)
    assert take(iter(ds), 1)[0] == planned(ds, epoch=3)[32:40]  # set_epoch(3) did not go back to its beginning
    ds.set_epoch(0)
    assert ds.epoch == 0
    ds.set_epoch(3)
    assert take(iter(ds), 1)[0] == planned(ds, epoch=3)[:8]


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_sample_comes_once_through_any_changes_of_the_world(path, data):
    """Legs of a run, each with its own ranks and batch size, saved and loaded in between."""
    remainder = data.draw(st.sampled_from(("pad", "uneven")))
    found: list[int] = []
    state = open_rank(path, remainder=remainder).state_dict()
    while state["epoch"] == 0:
        size, batch = data.draw(st.sampled_from((1, 2, 4))), data.draw(st.sampled_from((7, 16, 40)))
        steps = data.draw(st.integers(1, max(2, 300 // (size * batch))))
        states = []
        for rank in range(size):
            ds = resumed(path, state, batch, (rank, size), remainder=remainder, fields=["label"])
            found += flat(take(iter(ds), steps))
            states.append(ds.state_dict())
            ds.close()
        if remainder == "pad":
            assert states == [states[0]] * size
        # with "uneven" a rank may have no row in the last step, and then does not know that the others took it
        state = max(states, key=lambda one: (one["epoch"], one["position"]))
    assert sorted(found) == list(range(N))


def test_state_dict_of_k_batches_is_the_state_after_them(path):
    ds = open_rank(path, world=(1, 2))
    states = [ds.state_dict(), *(ds.state_dict() for _ in ds)]
    fresh = open_rank(path, world=(1, 2))
    running = iter(fresh)
    take(running, 5)
    assert [fresh.state_dict(batches=k) for k in range(len(states))] == states
    with pytest.raises(UsageError, match="past the end"):
        fresh.state_dict(batches=len(states))
    fresh.load_state_dict(states[4])
    assert fresh.state_dict(batches=3) == states[7]


def test_samples_taken_singly_can_be_resumed_singly(path):
    ds = open_rank(path, None, fields=["label"])
    begin = flat(take(iter(ds), 101))
    assert ds.state_dict()["position"] == 101
    assert begin + seen(resumed(path, ds.state_dict(), None, fields=["label"])) == planned(ds)


def test_shuffle_false_resumes_too(path):
    ds = open_rank(path, shuffle=False, world=(1, 2))
    take(iter(ds), 5)
    assert seen(resumed(path, ds.state_dict(), 20, shuffle=False)) == list(range(80, N))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seed": 4}, "seed 0 instead of 4"),
    ({"shuffle": False}, "shuffle True instead of False"),
    ({"remainder": "drop"}, "remainder 'pad' instead of 'drop'"),
    ({"shuffle": Shuffle(window=1024)}, r"window=\d+.* instead of .*window=1024"),
    ({"shuffle": Shuffle(lanes=3)}, r"lanes=\d+.* instead of .*lanes=3"),
]


@pytest.mark.parametrize(("arguments", "shown"), REFUSED)
def test_a_state_of_another_order_is_refused_with_both_values(path, arguments, shown):
    state = open_rank(path).state_dict()
    for force in (False, True):
        with pytest.raises(StateError, match=shown):
            open_rank(path, **arguments).load_state_dict(state, force=force)


def test_a_state_of_another_dataset_is_an_error_unless_forced(path, data, tmp_path):
    state = open_rank(path).state_dict()
    datasets.write(tmp_path / "copy", N, FIELDS)
    resumed(tmp_path / "copy", state)  # the same bytes have the same digest
    datasets.write(tmp_path / "other", N, FIELDS, Layout(codec="none"))
    other = open_rank(str(tmp_path / "other"), shuffle=Shuffle(**state["order"]))
    digest = other._datasets[0].manifest.digest
    with pytest.raises(StateError, match=f"digest '{state['digest']}' instead of '{digest}'"):
        other.load_state_dict(state)
    other.load_state_dict(state, force=True)
    assert other.state_dict()["digest"] == digest
    assert take(iter(other), 1)
    longer = open_rank(data(N + 1, *FIELDS), shuffle=Shuffle(**state["order"]))
    with pytest.raises(StateError, match=f"num_samples {N} instead of {N + 1}"):
        longer.load_state_dict(state, force=True)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """A dataset that was appended to twice, and what `runs` of each version delivered."""
    folder = tmp_path_factory.mktemp("grown")
    url = str(folder / "data")
    datasets.write(url, 61, ["label"])
    delivered = [preempted(url)]
    for start, stop in ((61, 100), (100, 130)):
        (folder / f"new{start}").mkdir()
        np.save(folder / f"new{start}" / "label.npy", np.arange(start, stop) - 2**40)
        sl.append(url, folder / f"new{start}", workers=0)
        delivered.append(preempted(url))
    return url, delivered


def runs(url: str) -> dict[str, Any]:
    """Runs over a dataset, as a job opens them."""
    options: dict[str, Any] = {"batch_size": 8, "with_index": True, "world": (0, 1)}
    weights = {"label": {i - 2**40: 1 + i % 3 for i in range(0, 60, 2)}}
    mixture = {Source(url, where=slice(0, 30)): 1, Source(url, where="label % 2 == 0"): 2}
    return {
        "dataset": lambda: StreamingDataset(url, **options),
        "where": lambda: StreamingDataset(url, where="label % 3 == 0", **options),
        "weights": lambda: StreamingDataset(url, weights=weights, **options),
        "mixture": lambda: Mixture(mixture, **options),
    }


def preempted(url: str) -> dict[str, Any]:
    """The state of each run after two batches, and the batches of that epoch and the next."""
    found = {}
    for kind, opened in runs(url).items():
        iterator = iter(ds := opened())
        begun, state = take(iterator, 2), json.loads(json.dumps(ds.state_dict()))
        found[kind] = state, begun + take(iterator) + take(ds)
    return found


def test_a_state_of_an_earlier_release_has_no_version_and_no_number_of_samples(path):
    whole, ds = take(open_rank(path)), open_rank(path)
    take(iter(ds), 3)
    state = {name: value for name, value in ds.state_dict().items() if name not in ("samples", "version")}
    assert take(resumed(path, state)) == whole[3:]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["dataset", "where", "mixture"])
def test_a_run_resumes_on_the_version_of_its_state_however_often_the_dataset_grew(grown, kind):
    url, delivered = grown
    for version, found in enumerate(delivered, 1):
        state, whole = found[kind]
        ds = runs(url)[kind]()
        take(iter(ds), 1)
        before = ds.state_dict()
        with pytest.raises(StateError):
            ds.load_state_dict({**state, "position": 10**9})
        assert ds.state_dict() == before
        ds.load_state_dict(state)
        assert take(ds) + take(ds) == whole[2:]
        assert (ds.state_dict().get("sources") or [ds.state_dict()])[0]["version"] == version
        ds.load_state_dict(delivered[-1][kind][0])  # and back to the last one
        assert take(ds) == delivered[-1][kind][1][2 : len(runs(url)[kind]())]
    with pytest.raises(StateError, match=r"instead of|none of this run's"):
        runs(url)[kind]().load_state_dict(delivered[0][kind][0], force=True)


def test_every_version_of_a_dataset_can_be_opened(grown):
    url, delivered = grown
    for version, stop in ((1, 61), (2, 100), (3, 130), (None, 130)):
        ds = sl.open(url, version=version)
        assert ds.read("label", 0, len(ds)).tolist() == [i - 2**40 for i in range(stop)]
        loader = StreamingDataset(url, batch_size=8, with_index=True, world=(0, 1), version=version)
        assert take(loader) == delivered[(version or 3) - 1]["dataset"][1][: len(loader)]
    loader = StreamingDataset(url, batch_size=8, version=2)
    with pytest.raises(StateError, match="digest"):  # the caller chose the version
        loader.load_state_dict(delivered[0]["dataset"][0])
    for version in (0, 4, True, "1"):
        with pytest.raises(UsageError, match=r"there is no version .* which has 3; give a version from 1 to 3"):
            sl.open(url, version=version)
    with pytest.raises(UsageError, match="version=1 of arrays in place"):
        StreamingDataset(url, batch_size=8, version=1, sample_axis="sample")
    assert not sl.verify(url).problems


def test_a_dataset_whose_earlier_manifest_was_not_kept_says_so(grown, tmp_path):
    url, delivered = grown
    copied = shutil.copytree(url, tmp_path / "copied")
    (copied / "_streamloader/chunks/manifest.json").unlink()
    with pytest.raises(UsageError, match=r"manifest of version 1 .* was not kept"):
        sl.open(copied, version=1)
    with pytest.raises(StateError, match="digest"):
        runs(str(copied))["dataset"]().load_state_dict(delivered[0]["dataset"][0])
    shutil.copy(copied / "_streamloader/chunks.2/manifest.json", copied / "_streamloader/chunks/manifest.json")
    with pytest.raises(FormatError, match="is the manifest of version 2"):
        sl.open(copied, version=1)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"format": 2}, "format 2"),
    ({"position": -1}, "is invalid"),
    ({"position": "8"}, "position is '8', not of type int"),
    ({"position": True}, "position is True, not of type int"),
    ({"split": 4}, "split is 4, not of type str or NoneType"),
    ({"order": {"block": 8, "lanes": 8}}, "no 'window'"),
    ({"position": N + 9}, f"position {N + 9}"),
    ({"extra": 1}, "is invalid"),
    ({"epoch": True}, "epoch is True"),
    ({"order": {"block": 8, "lanes": 8, "window": 9}}, "window=9"),
    ({"order": None}, "order is None"),
    ({"remainder": "some"}, "remainder is 'some'"),
]


def test_a_broken_state_is_an_error_and_changes_nothing(path):
    ds = open_rank(path)
    before = ds.state_dict()
    broken: list[tuple[Any, str | None]] = [({**before, **change}, shown) for change, shown in BROKEN]
    broken += [
        ({key: value for key, value in before.items() if key != name}, name)
        for name in before.keys() - {"samples", "version"}
    ]
    for state, shown in [*broken, *((other, None) for other in (None, [], "state", 3))]:
        with pytest.raises(StateError, match=shown):
            ds.load_state_dict(state)
    assert ds.state_dict() == before
    assert take(iter(ds), 1)


def test_changing_a_state_does_not_change_the_dataset(path):
    ds = open_rank(path)
    iterator = iter(ds)
    take(iterator, 2)
    state = ds.state_dict()
    kept = copy.deepcopy(state)
    take(iterator, 3)
    assert state == kept
    state["order"]["block"] = 999
    assert ds.state_dict()["order"]["block"] != 999


STEPS = 50  # of 76 in an epoch


def epochs(ds: Any, count: int) -> list[list[int]]:
    """The batches of the next epochs."""
    return [batch for _ in range(count) for batch in take(ds)]


@pytest.mark.long
def test_steps_per_epoch_yields_that_many_batches_across_the_epochs_of_the_data(path):
    whole = epochs(open_rank(path), 4)
    ds = open_rank(path, steps_per_epoch=STEPS)
    for number in range(6):
        assert (len(ds), ds.epoch) == (STEPS, number)
        assert take(ds) == whole[number * STEPS : (number + 1) * STEPS]
    assert ds.state_dict()["epoch"] == 3
    assert ds.stats().batches < 6 * STEPS + 20  # the pass went on: nothing was fetched twice
    long = open_rank(path, steps_per_epoch=200)
    assert take(long) + take(iter(long), 60) == whole[:260]


@pytest.mark.long
def test_a_loop_of_steps_resumes_with_the_rest_of_its_steps(path):
    whole = epochs(open_rank(path), 3)
    ds = open_rank(path, steps_per_epoch=STEPS)
    assert take(iter(ds), 20) == whole[:20]
    assert take(ds) == whole[20:STEPS]
    assert take(iter(ds), 30) == whole[STEPS:80]
    state = ds.state_dict()
    assert (state["epoch"], state["position"], state["steps"], ds.epoch) == (1, 8 * 4, 80, 1)
    assert ds.state_dict(batches=30) == state
    assert epochs(resumed(path, state, steps_per_epoch=STEPS), 2) == whole[80:150]
    assert ds.state_dict(batches=0)["position"] == 8 * STEPS
    both = [take(resumed(path, state, 4, (rank, 2), steps_per_epoch=STEPS)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*both, strict=True)] == [sorted(batch) for batch in whole[80:100]]
    assert take(resumed(path, state)) == whole[80:152]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_steps_per_epoch_in_frameworks(path):
    ds = open_rank(path, steps_per_epoch=STEPS)
    for number in range(3):  # as torch's examples do
        ds.set_epoch(number)
        assert sum(1 for _ in DataLoader(ds, batch_size=None)) == STEPS
    with pytest.raises(UsageError, match=r"steps_per_epoch=50 before iteration 3; call set_epoch\(3\)"):
        ds.set_epoch(7)
    loader = StatefulDataLoader(open_rank(path, steps_per_epoch=STEPS), batch_size=None)
    iterator = iter(loader)
    begun = take(iterator, 20)
    again = StatefulDataLoader(open_rank(path, steps_per_epoch=STEPS), batch_size=None)
    again.load_state_dict(loader.state_dict())
    assert begun + take(again) == take(open_rank(path), STEPS)
    workers = DataLoader(ds, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert len(workers) == STEPS
    datasets.assert_workers_refuse(workers, UsageError, "steps_per_epoch=50 with DataLoader workers")


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"steps_per_epoch": 0}, "steps_per_epoch=0; give a whole number"),
    ({"steps_per_epoch": 1.5}, "steps_per_epoch=1.5"),
    ({"steps_per_epoch": 5, "remainder": "uneven"}, "with remainder='uneven'; choose 'pad' or 'drop'"),
    ({"steps_per_epoch": 5, "batch": None}, "a step is a batch"),
]


@pytest.mark.parametrize(("arguments", "shown"), IMPOSSIBLE)
def test_an_impossible_steps_per_epoch_is_an_error(path, arguments, shown):
    with pytest.raises(UsageError, match=shown):
        open_rank(path, **arguments)


def test_a_mixture_takes_steps_per_epoch_too(path):
    def mixed(**arguments: Any) -> Mixture:
        sources = {Source(path, where="label % 2 == 0"): 1, Source(path, where="label % 2 == 1"): 2}
        return Mixture(sources, batch_size=8, fields=["label"], with_index=True, **arguments)

    whole = epochs(mixed(), 4)
    ds = mixed(steps_per_epoch=STEPS)
    assert [take(ds) for _ in range(3)] == [whole[i * STEPS : (i + 1) * STEPS] for i in range(3)]
    take(iter(ds), 7)
    other = mixed(steps_per_epoch=STEPS)
    other.load_state_dict(ds.state_dict())
    assert take(other) == whole[157:200]
    assert ds.state_dict(batches=7) == ds.state_dict()


@pytest.mark.quick(1)
@pytest.mark.parametrize("steps", [3, STEPS, 1])
def test_a_dataset_between_two_loops_of_steps_ends_its_threads_when_it_is_dropped(path, steps):
    ds = open_rank(path, steps_per_epoch=steps)
    take(ds)
    del ds
    datasets.assert_threads_end()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*consumers do not divide")
def test_a_run_on_more_ranks_than_lanes_takes_more_lanes_and_keeps_them(path):
    size = 2 * open_rank(path)._datasets[0].manifest.order.lanes
    with pytest.warns(UserWarning, match=rf"Shuffle\(lanes={size}\)"):
        ranks = [iter(open_rank(path, world=(rank, size))) for rank in range(size)]
    begin = [i for one in ranks for batch in take(one, 2) for i in batch]
    ds = open_rank(path, world=(0, size))
    steps = [ds.samples(0, step).tolist() for step in range(2)]
    assert sorted(begin) == sorted(flat(steps))
    state = ds.state_dict(batches=2)
    assert state["order"]["lanes"] == size
    for other in (1, 2, size):
        rest = []
        for rank in range(other):
            ds = open_rank(path, 8 * size // other, (rank, other))
            assert len(ds) == -(-N // (8 * size))
            ds.load_state_dict(state)
            rest += seen(ds)
            assert ds.state_dict()["order"]["lanes"] == size
        assert sorted(begin + rest) == list(range(N))
    alone = open_rank(path, batch=8 * size, shuffle=Shuffle(lanes=size))
    assert sorted(alone.samples(0, 1).tolist()) == sorted(steps[1])


def test_a_given_number_of_lanes_stays_whatever_the_ranks_are(path):
    assert open_rank(path, shuffle=Shuffle(lanes=2), world=(0, 16)).state_dict()["order"]["lanes"] == 2


@pytest.mark.filterwarnings("ignore:2 DataLoader workers on each rank")
@pytest.mark.filterwarnings("ignore:.* lanes")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_take_the_lanes_of_the_ranks_and_those_of_a_state(path):
    size = 2 * open_rank(path)._datasets[0].manifest.order.lanes
    ds = open_rank(path, world=(0, size), fields=["label"])
    planned_steps = [ds.samples(0, step, rank=0, workers=2).tolist() for step in range(4)]
    loader = DataLoader(ds, batch_size=None, num_workers=2, persistent_workers=True)
    assert take(iter(loader), 4) == planned_steps
    assert ds.state_dict(batches=0, workers=2)["order"]["lanes"] == size
    ds.load_state_dict(open_rank(path, world=(0, 2)).state_dict())  # of a run on fewer ranks, and fewer lanes
    planned_steps = [ds.samples(0, step, rank=0, workers=2).tolist() for step in range(4)]
    assert take(iter(loader), 4) == planned_steps


def test_a_mixture_on_more_ranks_than_lanes_takes_more_and_keeps_them(path):
    size = 2 * open_rank(path)._datasets[0].manifest.order.lanes

    def mixture(count: int, **options: Any) -> Mixture:
        return Mixture(
            {path: 1}, batch_size=16 * size // count, unit=16 * size, with_index=True,
            world=(0, count), **options,
        )  # fmt: skip

    ds = mixture(size)
    state = json.loads(json.dumps(ds.state_dict(batches=1)))
    assert [source["order"]["lanes"] for source in state["sources"]] == [size]
    planned_steps = sorted(ds.samples(0, 1)["index"].tolist())
    one = mixture(1)
    one.load_state_dict(state)
    assert sorted(next(iter(one))["index"].tolist()) == planned_steps
    with pytest.raises(StateError, match="none of"):
        mixture(1, shuffle=Shuffle(lanes=1)).load_state_dict(state)
