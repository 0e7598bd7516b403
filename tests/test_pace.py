"""The gate for requests: never more than the limit, half after a throttle, back step by step."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from streamloader.engine.pace import DECREASE_SECONDS, Pace


@given(st.integers(1, 64), st.lists(st.sampled_from(("good", "throttled", "second")), max_size=80))
def test_the_limit_stays_between_one_and_the_most(most: int, events: list[str]) -> None:
    now = [0.0]
    pace = Pace(most, clock=lambda: now[0])
    for event in events:
        before = pace.limit
        if event == "good":
            pace.succeeded()
            assert before <= pace.limit <= before + 1
        elif event == "throttled":
            pace.throttled()
            assert pace.limit in (before, max(1, before // 2), max(1, (before + 1) // 2))
        else:
            now[0] += DECREASE_SECONDS
        assert 1 <= pace.limit <= most


def test_a_burst_of_503_halves_once_and_each_round_of_successes_gives_one_back() -> None:
    now = [100.0]
    pace = Pace(16, clock=lambda: now[0])
    for _ in range(10):
        pace.throttled()
    assert pace.limit == 8
    now[0] += DECREASE_SECONDS
    pace.throttled()
    assert pace.limit == 4
    for _ in range(5):
        pace.succeeded()
    assert pace.limit == 5
    for _ in range(200):
        pace.succeeded()
    assert pace.limit == 16


def test_no_more_requests_fly_than_the_limit_and_all_get_their_turn() -> None:
    pace = Pace(16)
    pace.throttled()
    lock, flying, most, done = threading.Lock(), [0], [0], [0]

    def request() -> None:
        for _ in range(20):
            with pace.flight():
                with lock:
                    flying[0] += 1
                    most[0] = max(most[0], flying[0])
                with lock:
                    flying[0] -= 1
                    done[0] += 1

    threads = [threading.Thread(target=request) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done[0] == 320
    assert most[0] <= 8


def test_a_failed_request_gives_its_place_back() -> None:
    pace = Pace(1)
    for _ in range(3):
        try:
            with pace.flight():
                raise OSError
        except OSError:
            pass
    with pace.flight():
        assert pace.limit == 1
