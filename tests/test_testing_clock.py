"""The virtual clock: time passes while everything waits, and only then."""

import threading
import time
from math import inf

import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.testing.clock import DeadlockError, VirtualClock

SECONDS = st.floats(0, 1e6)


@given(st.lists(SECONDS, max_size=9))
def test_sleep_returns_at_once_and_its_time_has_passed(naps):
    clock, begin = VirtualClock(start=5.0), time.monotonic()
    expected = 5.0
    for seconds in naps:
        clock.sleep(seconds)
        expected += seconds
        assert clock.time() == expected
    assert time.monotonic() - begin < 60


@given(st.lists(st.tuples(SECONDS, st.booleans()), max_size=20))
def test_timers_are_called_once_in_the_order_of_time_and_never_after_a_cancel(given_):
    clock, called = VirtualClock(), []
    timers = [
        clock.call_later(seconds, lambda n=n: called.append((clock.time(), n))) for n, (seconds, _) in enumerate(given_)
    ]
    for timer, (_, cancelled) in zip(timers, given_, strict=True):
        if cancelled:
            timer.cancel()
    expected = sorted((seconds, n) for n, (seconds, cancelled) in enumerate(given_) if not cancelled)
    assert clock.next_time == (expected[0][0] if expected else inf)
    while clock.advance():
        pass
    assert called == expected


def test_a_timer_may_set_the_next_one():
    clock, ticks = VirtualClock(), []

    def tick():
        ticks.append(clock.time())
        clock.call_later(2.0, tick)

    clock.call_later(1.0, tick)
    clock.sleep(8.0)
    assert ticks == [1.0, 3.0, 5.0, 7.0]
    assert clock.time() == 8.0


@settings(max_examples=examples(100))
@given(st.lists(st.lists(st.integers(0, 50), max_size=4), min_size=1, max_size=5))
def test_threads_that_sleep_wake_in_the_order_of_time(naps):
    clock, woken, lock = VirtualClock(), [], threading.Lock()

    def run(number):
        for seconds in naps[number]:
            clock.sleep(seconds)
            with lock:
                woken.append((clock.time(), number))

    threads = [clock.start(run, number) for number in range(len(naps))]
    assert clock.wait(lambda: all(one.done() for one in threads))
    expected = [(sum(each[: i + 1]), n) for n, each in enumerate(naps) for i in range(len(each))]
    assert sorted(woken) == sorted(expected)
    assert [when for when, _ in woken] == sorted(when for when, _ in woken)
    assert clock.time() == max(sum(each) for each in naps)


def test_time_stands_still_while_a_thread_of_the_clock_works():
    clock, working, go_on = VirtualClock(), threading.Event(), threading.Event()

    def work():
        working.set()
        assert go_on.wait(60)
        return clock.time()

    def sleep():
        clock.sleep(1.0)

    worker, sleeper = clock.start(work), clock.start(sleep)
    assert working.wait(60)
    outside = threading.Thread(target=go_on.set)
    clock.call_later(0.5, lambda: None)
    outside.start()
    assert clock.wait(worker.done) and worker.result() == 0.0
    assert clock.wait(sleeper.done) and clock.time() == 1.0
    outside.join()


def test_a_wait_ends_with_what_another_thread_does_or_with_its_time():
    clock, found = VirtualClock(), []

    def producer():
        for number in range(3):
            clock.sleep(10.0)
            found.append(number)

    clock.start(producer)
    assert not clock.wait(lambda: found, 9.5)
    assert clock.time() == 9.5
    assert clock.wait(lambda: len(found) == 2, 100.0)
    assert clock.time() == 20.0
    assert clock.wait(lambda: len(found) == 3)
    assert clock.time() == 30.0


def test_threads_that_wait_for_each_other_get_an_error_instead_of_waiting_without_end():
    clock = VirtualClock()
    both = [clock.start(clock.wait, lambda: False) for _ in range(2)]
    with pytest.raises(DeadlockError, match=r"threads wait at 0 s, and there is no timer"):
        clock.wait(lambda: False)
    assert clock.wait(lambda: all(one.done() for one in both))
    assert [type(one.exception()) for one in both] == [DeadlockError] * 2


def test_an_error_of_a_thread_is_in_its_result():
    clock = VirtualClock()
    future = clock.start(int, "one")
    clock.wait(future.done)
    with pytest.raises(ValueError, match="one"):
        future.result()


def test_a_thread_that_another_library_started_may_wait_too():
    clock, seen = VirtualClock(), []

    def run():
        clock.sleep(3.0)
        seen.append(clock.time())

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        clock.sleep(1.0)
    assert seen[0] >= 3.0
