"""`Mixture.set_weights`: new weights at run time are a phase of the run, as those of a schedule are."""

import json
import pickle
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from datasets import SMALL, flat
from torch.utils.data import DataLoader

from streamloader import errors
from streamloader.format.writer import Writer
from streamloader.loader.dataset import NumpyMixture
from streamloader.pytorch.dataset import Mixture

COUNTS = (300, 203)
STEPS = 40


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two datasets of documents of 4 and of 2 tokens."""
    folder = tmp_path_factory.mktemp("weights")
    for name, count, length in (("a", COUNTS[0], 4), ("b", COUNTS[1], 2)):
        with Writer(folder / name, {"tokens": "ragged:int32"}, layout=SMALL, num_samples=count) as out:
            for number in range(count):
                out.write({"tokens": np.full(length, number, np.int32)})
    return str(folder / "a"), str(folder / "b")


Rows = list[tuple[int, int]]


def opened(urls: tuple[str, str], batch: int = 24, cls: type[Any] = NumpyMixture, **options: Any) -> Any:
    given: dict[str, Any] = {"stop": "last", "with_index": True, "num_workers": 0, "steps_per_epoch": STEPS}
    weights = dict(zip(urls, (2, 1), strict=True))
    return cls(weights, batch_size=batch, **given | {"schedule": {30: {urls[0]: 1}}} | options)


def rows(batch: dict[str, Any]) -> Rows:
    return list(zip(batch["source"].tolist(), batch["index"].tolist(), strict=True))


def take(batches: Iterable[dict[str, Any]], count: int | None = None) -> list[Rows]:
    return [rows(batch) for batch in islice(batches, count)]


def planned(urls: tuple[str, str], at: int, **options: Any) -> Any:
    """A mixture that has the weights 1 and 3 in its schedule from the beginning."""
    return opened(urls, **options, schedule={at: dict(zip(urls, (1, 3), strict=True)), 30: {urls[0]: 1}})


def later(urls: tuple[str, str]) -> dict[str, float]:
    return dict(zip(urls, (1, 3), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "at"), [(0, 0), (0, 7), (9, 9), (9, 20), (9, None)])
def test_weights_that_are_set_give_the_run_that_had_them_in_its_schedule(urls, workers, before, at):
    whole = take(planned(urls, 9 if at is None else at))
    ds = opened(urls, num_workers=workers)
    iterator = iter(ds)
    begun = take(iterator, before)
    assert ds.set_weights(later(urls), at=at) == (9 if at is None else at)
    assert begun + take(iterator) == whole
    assert take(ds) == take(planned_on(urls, 9 if at is None else at))


def planned_on(urls: tuple[str, str], at: int) -> Any:
    ds = planned(urls, at)
    take(ds)
    return ds


@pytest.mark.long
@pytest.mark.parametrize(("by", "at"), [("steps", 12), ("samples", 290), ("tokens", 1000)])
@pytest.mark.filterwarnings("ignore:3 consumers")
def test_any_ranks_agree_and_states_from_before_and_after_the_change_resume_exactly(urls, by, at):
    options = {"schedule": None, "schedule_by": by}
    whole = take(opened(urls, **options | {"schedule": {at: later(urls)}}))
    ranks = [opened(urls, 12, world=(rank, 2), **options) for rank in range(2)]
    iterators = [iter(rank) for rank in ranks]
    steps = [[take(iterator, 8) for iterator in iterators]]
    assert {rank.set_weights(later(urls), at=at) for rank in ranks} == {at}
    states = []
    for count in (2, 6):
        steps.append([take(iterator, count) for iterator in iterators])
        states.append(ranks[0].state_dict())
        assert ranks[1].state_dict() == states[-1]
    assert [step for parts in steps for step in together(parts)] == [sorted(step) for step in whole[:16]]
    for state, done in zip(states, (10, 16), strict=True):
        resumed = [opened(urls, 8, world=(rank, 3), **options) for rank in range(3)]
        for rank in resumed:
            rank.load_state_dict(json.loads(json.dumps(state)))
        assert together([take(rank, 12) for rank in resumed]) == [sorted(step) for step in whole[done : done + 12]]
    assert len(json.dumps(states[-1])) < 1500


def together(parts: list[list[Rows]]) -> list[Rows]:
    """The global batches of the batches of each rank."""
    return [sorted(flat(step)) for step in zip(*parts, strict=True)]


@pytest.mark.long
def test_passes_that_end_with_the_epoch_go_on_with_the_weights(urls):
    options: dict[str, Any] = {"steps_per_epoch": None, "schedule": None}
    whole = opened(urls, **options | {"schedule": {12: later(urls)}})
    ds = opened(urls, **options)
    iterator = iter(ds)
    begun = take(iterator, 5)
    ds.set_weights(later(urls), at=12)
    assert len(ds) == len(whole)
    first = begun + take(iterator)
    assert first == take(whole)
    assert (ds.epoch, take(ds)) == (1, take(whole))
    other = opened(urls, **options)
    other.load_state_dict(ds.state_dict())
    assert take(other) == take(whole)
    found = ds.samples(0, 7)
    assert list(zip(found["source"].tolist(), found["index"].tolist(), strict=True)) == first[7]
    assert take(ds.replay(0, [3, 14])) == [first[3], first[14]]


@pytest.mark.long
def test_a_state_of_batches_that_were_trained_has_the_weights(urls):
    ds, whole = opened(urls), take(planned(urls, 12))
    iterator = iter(ds)
    begun = take(iterator, 6)
    ds.set_weights(later(urls), at=12)
    begun += take(iterator, 4)
    other = opened(urls)
    other.load_state_dict(ds.state_dict(batches=5))  # a framework has prefetched a batch when it set the weights
    assert begun[:5] + take(other) == whole


@pytest.mark.long
def test_set_weights_twice_and_with_samples_that_come_singly(urls):
    schedule = {10: later(urls), 20: {urls[1]: 1}}
    whole = take(opened(urls, schedule=schedule))
    ds = opened(urls, schedule=None)
    iterator = iter(ds)
    ds.set_weights({urls[1]: 1}, at=20)
    begun = take(iterator, 3)
    ds.set_weights(later(urls), at=10)
    assert begun + take(iterator) == whole
    single: dict[str, Any] = {"schedule_by": "samples", "steps_per_epoch": None}
    samples = [rows_of(each) for each in islice(opened(urls, None, schedule={80: later(urls)}, **single), 200)]
    ds = opened(urls, None, schedule=None, **single)
    iterator = iter(ds)
    begun_singly = [rows_of(each) for each in islice(iterator, 21)]  # of the 64 that are made together
    assert ds.set_weights(later(urls), at=80) == 80
    assert begun_singly + [rows_of(each) for each in islice(iterator, 179)] == samples


def rows_of(sample: dict[str, Any]) -> tuple[int, int]:
    return int(sample["source"]), int(sample["index"])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("stop", "kept"), [("first", 1), ("last", 0)])  # the other one ends the epochs
def test_a_source_that_is_dropped_in_a_later_epoch_loses_and_repeats_no_sample(urls, stop, kept):
    ds = opened(urls, 8, schedule=None, stop=stop, remainder="drop", steps_per_epoch=None)
    take(ds)
    assert ds.epoch == 1
    iterator = iter(ds)
    take(iterator, 9)
    ds.set_weights({urls[kept]: 1})
    with pytest.raises(errors.StateError, match=r"state_dict\(batches=2\) is before set_weights\(\), after 9 batches"):
        ds.state_dict(batches=2)
    after = take(iterator, 1)
    assert ds.state_dict(batches=10) == ds.state_dict()
    assert {source for source, _ in flat(after)} == {kept}
    state = ds.state_dict()
    other = opened(urls, 8, schedule=None, stop=stop, remainder="drop", steps_per_epoch=None)
    other.load_state_dict(json.loads(json.dumps(state)))
    rest = take(iterator)
    assert take(other) == rest
    mix, indexes = ds._at.state.mix(), [index for _, index in flat(after + rest)]
    begin = mix.counts(state["anchor"][1])[kept]
    expected = mix.samples(kept, np.arange(begin, begin + len(indexes))) - mix.firsts[kept]
    assert indexes == expected.tolist()


@pytest.mark.long
def test_what_cannot_be_set_is_an_error_and_changes_nothing(urls):
    ds = opened(urls)
    iterator = iter(ds)
    begun = take(iterator, 5)
    inner = opened(urls)
    cases: list[tuple[Any, Any, str]] = [
        (later(urls), 4, r"set_weights\(at=4\): batches up to steps 5 were returned; give at=5 or later"),
        ({"elsewhere": 1}, None, "weights of the mixture's own sources"),
        ([1, 3], None, "weights of the mixture's own sources"),
        (later(urls), 9.5, "whole steps"),
        ({urls[0]: 0}, None, "all 0"),
        ({urls[0]: -1}, None, "negative"),
    ]
    for weights, at, shown in cases:
        with pytest.raises(errors.MixtureError, match=shown):
            ds.set_weights(weights, at=at)
    assert begun + take(iterator) == take(opened(urls))
    with pytest.raises(errors.MixtureError, match="nested mixture that has a schedule"):
        NumpyMixture({inner: 1}, batch_size=8).set_weights({inner: 2})


@pytest.mark.quick(1)
@pytest.mark.parametrize("nested", [False, True])
def test_an_unpickled_mixture_takes_weights_as_the_original_does(urls, nested):
    ds = NumpyMixture({opened(urls, schedule=None): 1}, batch_size=24, with_index=True) if nested else opened(urls)
    copied = pickle.loads(pickle.dumps(ds))
    if nested:
        with pytest.raises(errors.MixtureError, match="in a copy"):
            copied.set_weights(dict.fromkeys(ds._keys, 1))
    both = {}
    for each, keys in ((ds, ds.sources), (copied, copied.sources if nested else urls)):
        iterator = iter(each)
        both[each] = take(iterator, 5)
        assert each.set_weights(dict(zip(keys, (1, 3), strict=True))) == 5
        both[each] += take(iterator)
    assert both[ds] == both[copied]
    assert nested or both[ds] == take(planned(urls, 5))


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["set_epoch", "load_state_dict"])
def test_workers_that_live_on_never_go_on_with_the_weights_before(urls, how):
    given: dict[str, Any] = {"cls": Mixture, "steps_per_epoch": None, "schedule": None}
    options: dict[str, Any] = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}
    ds = opened(urls, **given)
    loader = DataLoader(ds, persistent_workers=True, **options)
    take(loader, 2)
    if how == "set_epoch":
        ds.set_epoch(2)
    else:
        ds.load_state_dict(ds.state_dict(batches=2, workers=1))
    ds.set_weights(later(urls))
    expected = opened(urls, **given)
    expected.load_state_dict(ds.state_dict())
    with pytest.raises(errors.StateError, match=r"set_weights\(\).*make a new DataLoader"):
        take(loader)
    assert take(DataLoader(ds, **options)) == take(expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("by", "before", "at"), [("steps", 11, 12), ("samples", 280, 290), ("tokens", 960, 1000)])
def test_shares_are_those_of_the_weights_in_force_at_a_step_also_after_a_resume(urls, by, before, at):
    options = {"schedule": {3000: {urls[0]: 1}}, "schedule_by": by}
    ds, other = opened(urls, **options), opened(urls, **options)
    iterator = iter(ds)
    take(iterator, 2)
    ds.set_weights(later(urls), at=at)
    other.load_state_dict(ds.state_dict())
    for each in (ds, other):
        assert [rounded(each.shares(step=step)) for step in (0, before, at, 3200)] == [
            [0.67, 0.33],
            [0.67, 0.33],
            [0.25, 0.75],
            [1, 0],
        ]
        assert rounded(each.shares("tokens", step=at)) == [0.4, 0.6]
    assert rounded(opened(urls, **options).shares(step=at)) == [0.67, 0.33]


def rounded(shares: dict[Any, float]) -> list[float]:
    return [round(share, 2) for share in shares.values()]


@pytest.mark.long
@pytest.mark.parametrize(("stop", "kept"), [("first", 1), ("last", 0)])
def test_steps_are_skipped_once_where_an_epoch_begins_again(urls, stop, kept):
    options: dict[str, Any] = {"schedule": None, "stop": stop, "remainder": "drop", "steps_per_epoch": None}

    def run(skips: list[int], resume: int | None = None) -> list[Rows]:
        ds = opened(urls, 8, **options, skip_steps={1: skips} if skips else None)
        ds.set_epoch(1)
        iterator = iter(ds)
        found = take(iterator, 5 - sum(step < 5 for step in skips))
        for weights in ({urls[kept]: 2, urls[1 - kept]: 1}, {urls[kept]: 1}):  # the second one begins the epoch again
            ds.set_weights(weights)
        assert ds.state_dict()["anchor"][0] == 1
        if resume is not None:
            found += take(iterator, resume)
            state = json.loads(json.dumps(ds.state_dict()))
            iterator = ds = opened(urls, 8, **options, skip_steps={1: skips})
            ds.load_state_dict(state)
        return found + take(iterator)

    whole = run([])
    assert len(whole) > 9
    for skips in ([3], [1, 2, 6, 8]):
        expected = [batch for step, batch in enumerate(whole) if step not in skips]
        for resume in (None, 0, 2):
            assert run(skips, resume) == expected


def test_weights_are_set_between_two_batches_of_a_process_that_plans(urls):
    def set_weights(_: object) -> None:
        ds.set_weights(later(urls))

    ds = opened(urls, on_batch=set_weights)
    with pytest.raises(errors.UsageError, match="while a batch is being returned; call it between two"):
        next(iter(ds))
    torch = opened(urls, cls=Mixture, steps_per_epoch=None)
    loader = DataLoader(torch, batch_size=None, num_workers=1, multiprocessing_context="fork")
    next(iter(loader))
    with pytest.raises(errors.UsageError, match="give num_workers= to the dataset"):
        torch.set_weights(later(urls))
