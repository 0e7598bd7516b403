"""Threads of the engine: items made ahead and jobs come in their order, errors are reported, and all of them end."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from amounts import longer
from hypothesis import given
from hypothesis import strategies as st

from streamloader.engine.engine import Planner
from streamloader.engine.executor import Threads

SECONDS = 300.0


def started(items: Iterator[int], most: int) -> tuple[Planner, threading.Thread]:
    ahead = Planner(items, most)
    thread = threading.Thread(target=ahead.run, daemon=True)
    thread.start()
    return ahead, thread


def taken(ahead: Planner) -> Iterator[int]:
    while ahead.has_next(wait=True):
        yield ahead.take()


@given(st.integers(0, 300), st.integers(1, 20))
def test_every_item_comes_once_in_order_and_few_are_made_ahead(count, most):
    made = 0

    def items() -> Iterator[int]:
        nonlocal made
        for made in range(1, count + 1):
            yield made - 1

    ahead, thread = started(items(), most)
    for number, item in enumerate(taken(ahead)):
        assert item == number
        assert made <= number + 1 + most + 1  # one more is in the hands of the thread
    assert made == count
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not ahead.has_next(wait=True)


def test_nothing_is_waited_for_unless_it_is_asked_for():
    go = threading.Event()

    def items() -> Iterator[int]:
        assert go.wait(SECONDS)
        yield 1

    ahead, _ = started(items(), 4)
    assert not ahead.has_next(wait=False)
    go.set()
    assert ahead.has_next(wait=True)
    assert ahead.take() == 1


@pytest.mark.parametrize("full", [True, False])
def test_closing_ends_the_thread_and_the_wait_for_items(full):
    waits, go = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        waits.set()
        if full:
            yield from range(100)
        else:
            assert go.wait(SECONDS)

    ahead, thread = started(items(), 3)
    assert waits.wait(SECONDS)
    results: list[list[int]] = []
    taker = threading.Thread(target=lambda: results.append(list(taken(ahead))), daemon=True)
    if not full:
        taker.start()
    ahead.close()
    go.set()
    if full:
        taker.start()
    for one in (taker, thread):
        one.join(SECONDS)
        assert not one.is_alive()
    assert results[0] == list(range(len(results[0])))
    assert len(results[0]) <= 3


def test_an_error_ends_the_items_and_is_raised_in_the_thread():
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    ahead = Planner(items(), 3)
    with pytest.raises(ValueError, match="no more"):
        ahead.run()
    assert list(taken(ahead)) == [1]


def test_jobs_run_in_order_and_an_error_is_reported():
    errors: list[BaseException] = []
    done: list[int] = []
    threads = Threads("order", 1, errors.append)
    for i in range(5):
        threads.run(lambda i=i: done.append(i) if i != 3 else 1 / 0)  # type: ignore[misc]
    over = threading.Event()
    threads.run(over.set)
    assert over.wait(300)
    threads.close()
    assert threads.join(300)
    assert done == [0, 1, 2, 4]
    assert [type(error) for error in errors] == [ZeroDivisionError]


# on a busy machine the interpreter does little but change threads: a round takes seconds
@pytest.mark.parametrize("rounds", [5, longer(100)])
def test_closing_from_several_threads_at_once_ends_all_threads(rounds):
    def close(threads: Threads) -> None:
        for _ in range(20):
            threads.close()

    raised: list[BaseException] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as the interpreter lets them
    try:
        with ThreadPoolExecutor(3) as closers:
            for _ in range(rounds):
                threads, begun = Threads("closed", 48, raised.append), threading.Barrier(49)
                for _ in range(48):
                    threads.run(begun.wait)
                begun.wait(300)
                list(closers.map(close, [threads] * 3))
                assert threads.join(300)
    finally:
        sys.setswitchinterval(before)
    assert not raised


def test_no_more_threads_start_than_may_run_and_a_thread_runs_next_what_its_function_has_submitted():
    threads, gate, raised = Threads("few", 3, print), threading.Event(), list[BaseException]()
    order: list[int] = []
    with ThreadPoolExecutor(8) as submitters:
        list(submitters.map(lambda _: threads.run(lambda: gate.wait(300)), range(50)))
    assert len(threads.threads) == 3
    gate.set()
    alone, begun, over = Threads("one", 1, raised.append), threading.Event(), threading.Event()

    def first() -> None:
        assert begun.wait(300)
        order.append(0)
        alone.run(lambda: order.append(1))

    alone.run(first)
    alone.run(lambda: order.append(2))
    alone.run(over.set)
    begun.set()
    assert over.wait(300)
    for each in (threads, alone):
        each.close()
        assert each.join(300)
    assert (raised, order) == ([], [0, 1, 2])
