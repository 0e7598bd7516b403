"""The state of a run: advanced by what was delivered; one further ahead leaves steps out."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from datasets import take
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streamloader.errors import StateError, UsageError, WorldError
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import Share, World
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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
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


def ahead(ds: StreamingDataset, batches: int) -> StreamingDataset:
    """The dataset, whose next pass leaves out the next batches."""
    ds.load_state_dict(json.loads(json.dumps(ds.state_dict(batches=batches))))
    return ds


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_state_further_ahead_leaves_steps_out_on_every_rank(url, size):
    for rank in range(size):
        every = take(iter(dataset(url, 64 // size, (rank, size))))
        before = dataset(url, 64 // size, (rank, size))
        assert take(iter(before), 3) == every[:3]
        after = dataset(url, 64 // size, (rank, size))
        after.load_state_dict(before.state_dict())
        assert take(iter(ahead(after, 2))) == every[5:]
        assert after.state_dict()["epoch"] == 1


def test_a_state_leaves_single_samples_out_too(url):
    assert take(iter(ahead(dataset(url, None), 300))) == take(iter(dataset(url, None)))[300:]


def test_a_state_gives_steps_again_with_their_random_numbers(url):
    ds = dataset(url, transform=with_noise)
    first, second = list(ds), list(ds)
    for epoch, batches, step in ((0, first, 30), (1, second, 7), (1, second, 8)):
        later = dataset(url, transform=with_noise)
        later.set_epoch(epoch)
        again = next(iter(ahead(later, step)))
        assert torch.equal(again["x"], batches[step]["x"])
        assert torch.equal(again["index"], ds.samples(epoch, step))


def with_noise(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {"x": sample["x"] + rng.random()}


def test_a_state_beyond_the_epoch_is_an_error(url):
    with pytest.raises(UsageError, match="past the end"):
        dataset(url).state_dict(batches=39)


def test_a_state_of_earlier_releases_may_tell_skipped_steps():
    assert CURSOR.resumed(CURSOR.to_dict() | {"skipped": [[0, 0, 8]]}) == CURSOR


# ---- which samples a step delivers


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
