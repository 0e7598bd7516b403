"""How many requests are in flight: as many as pay against any store, half after a 503, never more than allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from line_sim import SIZE, Race, Store

from streamloader.engine.pace import DECREASE_SECONDS, FIRST, THROTTLE_MEMORY_SECONDS, Pace

CLOUD = Store(latency=0.03, own=85e6)
SLOW = Store(latency=0.15, own=17e6)
FAR = Store(latency=0.2, own=50e6, jitter=0.6)
BUSY = Store(latency=0.03, own=85e6, shared=1.2e9)
NEAR = Store(latency=0.0005, shared=1e9)  # the server's cores are the limit
LATENCY = Store(latency=0.05)

SEEDS = range(3)


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("store", [CLOUD, FAR, BUSY, NEAR, LATENCY])
def test_the_best_rate_is_reached_within_400_requests_and_kept(store, seed):
    race = Race(store, seed=seed)
    race.run(400)
    assert race.run(400) >= 0.9 * store.best(64)
    assert race.run(2000) >= 0.95 * store.best(64)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("store", "most"), [(NEAR, 16), (BUSY, 56)])
def test_the_limit_does_not_grow_beyond_what_pays(store, most, seed):
    race = Race(store, seed=seed)
    race.run(600)
    limits = []
    for _ in range(40):
        race.run(50)
        limits.append(race.paces[0].limit)
    assert sorted(limits)[len(limits) // 2] <= most
    assert max(limits) <= 1.3 * most


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_throttles_is_used_just_below_its_limit(seed):
    store = Store(latency=0.03, own=85e6, most=20)
    race = Race(store, seed=seed)
    race.run(1000)
    assert race.run(2000) >= 0.85 * store.best(64)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_503_the_rate_comes_back(seed):
    race = Race(SLOW, seed=seed)
    race.run(600)
    assert race.paces[0].limit == 64
    race.paces[0].throttled()
    assert race.paces[0].limit == 32
    for _ in range(60):  # an outage
        race.now += 1.01 * DECREASE_SECONDS
        race.paces[0].throttled()
    assert race.paces[0].limit == 32
    race.paces[0].completed(SIZE, 0.1, waiting=True)
    race.now += 1.01 * DECREASE_SECONDS
    race.paces[0].throttled()
    race.paces[0].throttled()
    assert race.paces[0].limit == 16
    end = race.now + THROTTLE_MEMORY_SECONDS + 15
    while race.now < end:
        race.run(100)
    race.run(2000)
    assert race.run(400) >= 0.95 * SLOW.best(64)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_server_do_not_drive_each_other_up(ranks, seed):
    race = Race(NEAR, most=(64,) * ranks, seed=seed)
    race.run(1000 * ranks)
    total = []
    for _ in range(40):
        race.run(50)
        total.append(sum(pace.limit for pace in race.paces))
    assert max(total) <= 2.5 * FIRST * ranks
    assert race.run(400) >= 0.95 * NEAR.best(64)


@pytest.mark.quick(2)
@pytest.mark.parametrize("most", [1, 2, 5, 64, 100])
def test_memory_limits_the_requests_in_flight(most):
    race = Race(LATENCY, most=(most,))
    for _ in range(100):
        race.run(50)
        assert len(race.flying) <= most
        assert race.paces[0].limit <= most
    assert race.paces[0].limit == most
    race.paces[0].allow(3)
    assert race.paces[0].limit <= 3
    race.paces[0].allow(64)
    race.run(1500)
    assert race.paces[0].limit == 64


def test_requests_that_nobody_waits_for_do_not_change_the_limit():
    now = [0.0]
    pace = Pace(64, clock=lambda: now[0])
    for i in range(1000):
        now[0] += 0.01
        pace.completed(SIZE, 0.1, waiting=i % 20 != 0)  # the consumer is the limit: now and then the queue runs dry
    assert pace.limit == FIRST


@given(st.integers(1, 64), st.lists(st.sampled_from(("good", "idle", "throttled", "second", "less")), max_size=400))
def test_the_limit_stays_between_one_and_the_most(most, events):
    now, decreased, succeeded = [0.0], -DECREASE_SECONDS, True
    pace = Pace(most, clock=lambda: now[0])
    for event in events:
        before = pace.limit
        if event == "throttled":
            pace.throttled()
            halved = succeeded and now[0] - decreased >= DECREASE_SECONDS
            assert pace.limit == (max(1, before // 2) if halved else before)
            assert pace.throttling
            if halved:
                decreased, succeeded = now[0], False
        elif event == "second":
            now[0] += 1.01 * DECREASE_SECONDS
            assert not pace.throttling
        elif event == "less":
            most = max(1, most - 1)
            pace.allow(most)
        else:
            now[0] += 0.01
            pace.completed(SIZE, 0.05, waiting=event == "good")
            succeeded = True
        assert 1 <= pace.limit <= most
