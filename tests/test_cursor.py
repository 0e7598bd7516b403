"""The state of a run: plain values, refused when they belong elsewhere, advanced by what was delivered."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import StateError, UsageError
from streamloader.plan.cursor import STATE_FORMAT, Cursor
from streamloader.plan.order import OrderParams
from streamloader.plan.world import Share, World

CURSOR = Cursor(digest="abc", params=OrderParams(4, 2, 8), split="train", shuffle=True, remainder="pad", seed=3)


@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**50), st.integers(1, 9), st.none() | st.text()
)
def test_state_survives_json(seed: int, epoch: int, position: int, workers: int, split: str | None) -> None:
    cursor = replace(CURSOR, seed=seed, epoch=epoch, position=position, workers=workers, extra=workers - 1, split=split)
    state = json.loads(json.dumps(cursor.to_dict()))
    assert state["format"] == STATE_FORMAT == 1
    assert Cursor.from_dict(state) == cursor


@pytest.mark.parametrize("key", sorted(CURSOR.to_dict()))
def test_state_without_a_key_is_refused_by_name(key: str) -> None:
    state = CURSOR.to_dict()
    del state[key]
    with pytest.raises(StateError, match=key):
        Cursor.from_dict(state)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "format 2, this version reads 1"),
        ({"position": "7"}, "position is '7', not of type int"),
        ({"position": True}, "position is True, not of type int"),
        ({"position": -1}, "'position': -1"),
        ({"extra": 1}, "'extra': 1"),
        ({"split": 4}, "split is 4, not of type str or NoneType"),
        ({"remainder": "wrap"}, "remainder is 'wrap', not one of pad, drop, uneven"),
        ({"order": {"block": 4, "lanes": 2}}, "no 'window'"),
        ({"order": {"block": 4, "lanes": 2, "window": 9}}, "window=9 "),
    ],
)
def test_impossible_state_is_refused_with_the_value(change: dict[str, object], problem: str) -> None:
    with pytest.raises(StateError, match=problem):
        Cursor.from_dict({**CURSOR.to_dict(), **change})


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"digest": "def"}, ("'abc'", "'def'")),
        ({"params": OrderParams(4, 4, 8)}, ("lanes=2", "lanes=4")),
        ({"split": None}, ("'train'", "None")),
        ({"shuffle": False}, ("True", "False")),
        ({"remainder": "drop"}, ("'pad'", "'drop'")),
        ({"seed": 4}, ("seed 3", "not 4")),
    ],
)
def test_state_of_another_run_is_refused_with_both_values(change: dict[str, object], both: tuple[str, str]) -> None:
    with pytest.raises(StateError) as refused:
        CURSOR.check(replace(CURSOR, **change), 10)
    assert all(value in refused.value.problem for value in both)
    assert refused.value.remedy


def test_position_and_epoch_are_not_compared() -> None:
    CURSOR.check(replace(CURSOR, epoch=5, position=9, workers=3, extra=1), 9)


def test_force_passes_another_digest_and_nothing_else() -> None:
    CURSOR.check(replace(CURSOR, digest="def"), 10, force=True)
    with pytest.raises(StateError, match="seed 3"):
        CURSOR.check(replace(CURSOR, digest="def", seed=4), 10, force=True)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.integers(1, 5), st.integers(1, 8), st.sampled_from(("pad", "drop", "uneven")), st.data())
def test_advancing_step_by_step_reaches_the_next_epoch_after_the_last_step(
    num_samples: int, size: int, batch: int, remainder: str, data: st.DataObject
) -> None:
    share = Share(num_samples, 4, batch, World(0, size), remainder)
    steps = share.global_steps(0)
    cursor = CURSOR
    for step in range(steps):
        assert cursor == CURSOR.advance(step, share)
        assert (cursor.epoch, cursor.position) == (0, step * share.global_batch)
        cursor = cursor.advance(1, share)
    if steps:
        assert cursor == CURSOR.advance(steps, share) == CURSOR.next_epoch()
        assert (cursor.epoch, cursor.position) == (1, 0)
    with pytest.raises(UsageError, match="pass the end"):
        CURSOR.advance(steps + 1, share)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4), st.data())
def test_workers_advance_in_rounds_and_another_number_repeats_the_round(
    num_samples: int, workers: int, data: st.DataObject
) -> None:
    share = Share(num_samples, 4, 3, World(0, 2 * workers), "pad")
    start = replace(CURSOR, workers=workers)
    batches = share.global_steps(0) * workers
    with pytest.raises(UsageError, match="pass the end"):
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


def test_a_state_of_one_worker_is_for_the_same_round_alone() -> None:
    cursor = replace(CURSOR, workers=2, inside=True, ranks=2, batch=8)
    assert Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor
    assert cursor.with_workers(2, 2, 8) == (cursor, 0)
    with pytest.raises(StateError, match="inside one of 2 DataLoader workers"):
        cursor.with_workers(2, 1, 16)


def test_no_worker_is_refused() -> None:
    with pytest.raises(UsageError, match="0 consumers"):
        CURSOR.with_workers(0, 1, 8)
