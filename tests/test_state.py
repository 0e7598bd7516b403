"""The state of a run: advanced by what was delivered, over steps that are left out; the other steps are as ever."""

import json
from dataclasses import replace
from typing import Any

import datasets
import pytest
import torch
from amounts import examples
from datasets import flat, take
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import Engine, runs
from torch.utils.data import DataLoader

from streamloader.engine.dataset import plans
from streamloader.errors import StateError, UsageError, WorldError
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import Gap, Share, World, skip_steps
from streamloader.order.state import STATE_FORMAT, RunState, SourceIdentity
from streamloader.pytorch.dataset import StreamingDataset

SOURCE = SourceIdentity("abc", "train", None, 10, OrderParams(4, 2, 8))
CURSOR = RunState(sources=(SOURCE,), shuffle=True, remainder="pad", seed=3, fresh=False)


def changed(**values: object) -> RunState:
    """The run with other values, of its source or of its own."""
    source = {name: values.pop(name) for name in tuple(values) if hasattr(SOURCE, name)}
    return replace(CURSOR, sources=(SOURCE._replace(**source),), **values)


def share_of(num_samples: int, *rest: Any) -> Share:
    return Share(EpochOrder(num_samples, SOURCE.params, 0, 0), *rest)


@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**50), st.integers(1, 9), st.none() | st.text()
)
def test_state_survives_json(seed, epoch, position, workers, split):
    run = {"seed": seed, "split": split, "num_samples": 2**50}
    cursor = changed(**run, epoch=epoch, position=position, workers=workers, extra=workers - 1)
    state = json.loads(json.dumps(cursor.to_dict()))
    assert state["format"] == STATE_FORMAT == 1
    assert changed(**run).resumed(state) == cursor


OTHERS = [
    ({"digest": "def"}, ("'abc'", "'def'")),
    ({"params": OrderParams(4, 4, 8)}, ("lanes=2", "lanes=4")),
    ({"split": None}, ("'train'", "None")),
]


@pytest.mark.parametrize(("change", "both"), OTHERS)
def test_a_state_of_another_source_is_an_error_with_both_values(change, both):
    with pytest.raises(StateError) as raised:
        changed(**change).resumed(CURSOR.to_dict())
    assert all(value in raised.value.problem for value in both)
    assert raised.value.remedy


def test_position_and_epoch_are_not_compared():
    later = replace(CURSOR, epoch=5, position=9, workers=3, extra=1)
    assert later.resumed(CURSOR.to_dict()) == CURSOR
    earlier = {name: value for name, value in later.to_dict().items() if name != "samples"}  # of earlier releases
    with pytest.raises(StateError, match="position 9, but its epoch has 8 samples"):
        changed(num_samples=8).resumed(earlier)


def test_force_passes_another_digest_and_nothing_else():
    copy = changed(digest="def")
    assert copy.resumed(CURSOR.to_dict(), force=True) == copy
    with pytest.raises(StateError, match="num_samples 10 instead of 11"):
        changed(digest="def", num_samples=11).resumed(CURSOR.to_dict(), force=True)
    with pytest.raises(StateError, match="seed 3"):
        changed(digest="def", seed=4).resumed(CURSOR.to_dict(), force=True)


def test_force_needs_the_number_of_samples_that_states_of_earlier_releases_do_not_have():
    earlier = {name: value for name, value in CURSOR.to_dict().items() if name != "samples"}
    assert CURSOR.resumed(earlier, force=True) == CURSOR
    for force in (False, True):
        with pytest.raises(StateError, match="digest 'abc' instead of 'def'") as raised:
            changed(digest="def", num_samples=11).resumed(earlier, force=force)
        assert "force" not in raised.value.remedy


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 200), st.integers(1, 5), st.integers(1, 8), st.sampled_from(("pad", "drop", "uneven")), st.data())
def test_advancing_step_by_step_reaches_the_next_epoch_after_the_last_step(num_samples, size, batch, remainder, data):
    share = share_of(num_samples, batch, World(0, size), remainder)
    steps = share.global_steps(0)
    cursor = CURSOR
    for step in range(steps):
        assert cursor == CURSOR.advance(step, share)
        assert (cursor.epoch, cursor.position) == (0, step * share.global_batch)
        cursor = cursor.advance(1, share)
    if steps:
        assert cursor == CURSOR.advance(steps, share) == CURSOR.next_epoch()
        assert (cursor.epoch, cursor.position) == (1, 0)
    with pytest.raises(UsageError, match="past the end"):
        CURSOR.advance(steps + 1, share)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 300), st.integers(1, 4), st.data())
def test_workers_advance_in_rounds_and_another_number_repeats_the_round(num_samples, workers, data):
    share = share_of(num_samples, 3, World(0, 2 * workers), "pad")
    start = replace(CURSOR, workers=workers)
    batches = share.global_steps(0) * workers
    with pytest.raises(UsageError, match="past the end"):
        start.advance(batches + 1, share)
    one, two = sorted(data.draw(st.tuples(st.integers(0, batches), st.integers(0, batches))))
    cursor = start.advance(one, share)
    if one < batches:
        assert (cursor.position, cursor.extra) == (one // workers * share.global_batch, one % workers)
        assert cursor.advance(two - one, share) == start.advance(two, share)
    assert cursor.with_workers(workers, 2, 3) == (cursor, 0)
    for number, ranks, batch in ((workers + 1, 2, 3), (workers, 3, 2), (workers, 2, 4)):
        other, repeated = cursor.with_workers(number, ranks, batch)
        assert repeated == cursor.extra <= workers - 1
        assert other == replace(cursor, workers=number, extra=0, ranks=0, batch=0)


def test_a_state_of_one_worker_is_for_the_same_round_alone():
    cursor = replace(CURSOR, workers=2, inside=True, ranks=2, batch=8)
    assert CURSOR.resumed(json.loads(json.dumps(cursor.to_dict()))) == cursor
    assert cursor.with_workers(2, 2, 8) == (cursor, 0)
    with pytest.raises(StateError, match="inside one of 2 DataLoader workers"):
        cursor.with_workers(2, 1, 16)
    with pytest.raises(UsageError, match="workers=0 is invalid"):
        cursor.with_workers(0, 1, 8)


N = 603


@pytest.fixture(scope="module")
def url(data: Any) -> str:
    return data(N, "x", "label")


def dataset(url: str, batch_size: int | None = 16, world: tuple[int, int] = (0, 1), **more: object) -> StreamingDataset:
    return StreamingDataset(url, batch_size=batch_size, fields=["x"], with_index=True, world=world, **more)  # type: ignore[arg-type]


@st.composite
def gapped(draw: st.DrawFn) -> tuple[Share, int, set[int]]:
    """A run, and steps of its epoch to leave out: those that `position` is a step of."""
    share, position = draw(runs())
    count = share.global_steps(position)
    left_out = draw(st.sets(st.integers(0, max(0, count - 1)), max_size=min(count, 12))) if count else set()
    return share.skipping(skip_steps(share, left_out, position)), position, left_out


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(gapped(), st.integers(1, 5))
def test_the_steps_that_are_left_have_the_same_rows_within_the_same_slots(run, at_once):
    share, position, left_out = run
    wanted = [plan.samples.tolist() for step, plan in enumerate(share.plans(position)) if step not in left_out]
    engine = Engine()
    *made, end = plans(share, position, ())
    assert end is None
    assert [plan.samples.tolist() for plan in engine.run(made)] == wanted
    assert engine.most_live <= share.slots_needed()
    assert share.count_steps(position) == len(wanted)
    *made, end = plans(share, position, (), at_once)
    assert flat([plan.samples.tolist() for plan in made]) == flat(wanted)


@settings(max_examples=examples(150), deadline=None)
@given(gapped())
def test_a_state_passes_gaps_and_records_them(run):
    share, position, left_out = run
    run = changed(num_samples=share.num_samples)
    start = replace(run, epoch=share.epoch, position=position)
    left = [step for step in range(share.global_steps(position)) if step not in left_out]
    cursor = start
    for taken in range(1, len(left) + 1):
        cursor = cursor.advance(1, share)
        assert cursor == start.advance(taken, share)
        if taken < len(left):
            assert (cursor.epoch, cursor.position) == (share.epoch, position + left[taken] * share.global_batch)
    assert run.resumed(json.loads(json.dumps(cursor.to_dict()))) == cursor
    if left:
        assert (cursor.epoch, cursor.position, cursor.skipped) == (share.epoch + 1, 0, share.gaps)
    with pytest.raises(UsageError, match="past the end"):
        start.advance(len(left) + 1, share)


def test_a_run_that_begins_within_a_gap_begins_after_it():
    share = share_of(100, 10, World(0, 1), "pad")
    assert list(share.parts(7)) == [(7, None)]
    share = share.skipping((Gap(0, 10, 30), Gap(0, 40, 50), Gap(1, 0, 10)))
    assert list(share.parts(20)) == [(30, 40), (50, None)]
    assert share.walk(20, 0) == 30
    assert share.walk(20, 1) == 50
    assert list(share.at_epoch(1).parts(0)) == [(10, None)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_are_left_out_on_every_rank(url, size):
    skips = {0: [0, 3, 4], 1: range(2)}
    batch = 64 // size
    for rank in range(size):
        plain, skipping = dataset(url, batch, (rank, size)), dataset(url, batch, (rank, size), skip_steps=skips)
        for epoch in range(3):
            assert len(skipping) == len(plain) - len(skips.get(epoch, ()))
            every = take(iter(plain))
            left = [batch for step, batch in enumerate(every) if step not in skips.get(epoch, ())]
            assert take(iter(skipping)) == left
            for step in skips.get(epoch, ()):
                assert skipping.samples(epoch, step, rank).tolist() == every[step]
        assert skipping.state_dict()["skipped"] == [[0, 0, 64], [0, 192, 320], [1, 0, 128]]
        assert "skipped" not in plain.state_dict()


@pytest.mark.long
def test_a_run_resumes_over_a_gap_from_any_step_at_another_world_size(url):
    skips = {0: range(3, 6)}
    every = take(iter(dataset(url, 32, skip_steps=skips)))
    for taken in range(1, len(every)):
        before = dataset(url, 32, skip_steps=skips)
        assert take(iter(before), taken) == every[:taken]
        state = json.loads(json.dumps(before.state_dict()))
        assert state == before.state_dict(batches=taken)
        assert state.get("skipped", []) == ([[0, 96, 192]] if taken >= 3 else [])
        ranks = [dataset(url, 16, (rank, 2), skip_steps=skips) for rank in range(2)]
        for ds in ranks:
            ds.load_state_dict(state)
        together = [sorted(one + two) for one, two in zip(*map(take, ranks), strict=True)]
        assert together == [sorted(batch) for batch in every[taken:]]


def test_steps_can_be_left_out_when_a_state_is_loaded(url):
    before = dataset(url, 32)
    every = take(iter(before), 2)
    after = dataset(url, 32, skip_steps={0: range(4, 7)})
    after.load_state_dict(before.state_dict())
    every += take(iter(after))
    assert every == [batch for step, batch in enumerate(take(iter(dataset(url, 32)))) if step not in (4, 5, 6)]
    later = after.state_dict()
    assert (later["epoch"], later["position"], later["skipped"]) == (1, 0, [[0, 128, 224]])


def test_steps_of_single_samples_are_left_out_too(url):
    one = take(dataset(url, None))
    assert take(dataset(url, None, skip_steps={0: range(100, 300)})) == one[:100] + one[300:]


def test_replay_repeats_steps_and_keeps_the_state(url):
    ds = dataset(url, transform=with_noise)
    batches = list(ds)
    iterator = iter(ds)
    next(iterator)
    state = ds.state_dict()
    again = list(ds.replay(0, [30, 7, 8]))
    assert len(again) == 3
    for step, batch in zip((7, 8, 30), again, strict=True):
        assert torch.equal(batch["x"], batches[step]["x"])
        assert torch.equal(batch["index"], ds.samples(0, step))
    assert ds.state_dict() == state
    with pytest.raises(Exception, match="this pass was ended"):
        next(iterator)
    ds.load_state_dict(state)
    assert next(iter(ds))["index"].equal(ds.samples(1, 1))


def with_noise(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {"x": sample["x"] + rng.random()}


INVALID: list[tuple[Any, str]] = [
    ([3, 4], r"skip_steps=\[3, 4\]"),
    ({0: 5}, "skip_steps={0: 5}"),
    ({0: [1.5]}, r"skip_steps={0: \[1.5\]}"),
    *(({epoch: [step]}, "whole numbers") for epoch, step in ((0, True), (-1, 0), (0, -1))),
]


@pytest.mark.parametrize(("skips", "shown"), INVALID)
def test_invalid_skip_steps_are_an_error_before_anything_is_opened(tmp_path, skips, shown):
    with pytest.raises(UsageError, match=shown):
        dataset(str(tmp_path / "nothing"), skip_steps=skips)


def test_unknown_steps_are_an_error_before_anything_is_read(url):
    late, all_of_it = dataset(url, skip_steps={0: [38]}), dataset(url, skip_steps={2: range(38)})
    with pytest.raises(UsageError, match="skip_steps names step 38 of epoch 0, which has 38"):
        iter(late)
    with pytest.raises(UsageError, match="leaves nothing of epoch 2"):
        len(all_of_it)
    for steps in ([38], [], [-1]):
        with pytest.raises(UsageError):
            late.replay(0, steps)
    assert late.stats().requests == 0
    workers = DataLoader(dataset(url, skip_steps={0: [3]}), batch_size=None, num_workers=2)
    datasets.assert_workers_refuse(workers, UsageError, "skip_steps with 2 DataLoader workers")


@pytest.mark.parametrize("skipped", [3, [3], [[0, 1]], [[0, 1, -2]], [[0, 1, 2.0]], [[0, 1, True]]])
def test_a_state_with_invalid_gaps_is_an_error(skipped):
    with pytest.raises(StateError, match="skipped"):
        CURSOR.resumed(CURSOR.to_dict() | {"skipped": skipped})


# ---- which samples a step delivers


@pytest.mark.quick(1)
@pytest.mark.parametrize("remainder", ["pad", "uneven"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_samples_names_the_rows_of_every_batch_on_every_rank(url, size, remainder):
    ranks = [dataset(url, world=(rank, size), remainder=remainder) for rank in range(size)]
    for epoch in range(2):
        passes = [list(ds) for ds in ranks]
        for step, batches in enumerate(zip(*passes, strict=False)):
            for rank, batch in enumerate(batches):
                assert torch.equal(ranks[0].samples(epoch, step, rank), batch["index"])
            together = torch.cat([batch["index"] for batch in batches])
            assert torch.equal(ranks[-1].samples(epoch, step), together)


def test_samples_reads_no_data(url):
    ds = dataset(url)
    assert ds.samples(10**6, 5).shape == (16,)
    assert ds.stats().requests == 0
    assert ds.epoch == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.* DataLoader workers on each rank")
def test_samples_names_the_batches_of_workers(url):
    ds = dataset(url, world=(1, 2))
    for step, batch in enumerate(DataLoader(ds, batch_size=None, num_workers=2)):
        assert torch.equal(ds.samples(0, step, 1, workers=2), batch["index"])


def test_samples_after_a_resume_at_another_batch_size(url):
    before = dataset(url, batch_size=10)
    take(iter(before), 3)
    after = dataset(url, batch_size=16)
    after.load_state_dict(before.state_dict())
    for step, batch in enumerate(after, 30 // 16):  # it begins within the second step of the epoch
        assert torch.equal(after.samples(0, step), batch["index"])


def test_samples_of_an_unknown_step_rank_or_epoch_are_an_error(url):
    ds = dataset(url, world=(0, 2))
    assert len(ds) == 19
    for step in (19, 10**12):
        with pytest.raises(UsageError, match=r"no step starts at position .* ask for a step below 19"):
            ds.samples(0, step)
    with pytest.raises(UsageError, match="step=-1"):
        ds.samples(0, -1)
    with pytest.raises(WorldError, match="rank 2 is invalid for world size 2"):
        ds.samples(0, 0, 2)
    with pytest.raises(UsageError, match="workers=0; give a whole number of at least 1"):
        ds.samples(0, 0, workers=0)
    with pytest.raises(UsageError, match="epoch=-1"):
        ds.samples(-1, 0)


def test_workers_can_tell_another_version_by_the_pin():
    assert changed(digest="def").pin != CURSOR.pin == replace(CURSOR, epoch=3, position=4).pin
