"""Laws of an iterator that runs ahead: every item once and in order, never more than so many, and an end for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamloader.engine.ahead import Ahead

SECONDS = 30.0


def taken(ahead: Ahead[int]) -> Iterator[int]:
    while ahead.there(wait=True):
        yield ahead.take()


@given(st.integers(0, 300), st.integers(1, 20))
def test_every_item_comes_once_in_order_and_few_are_made_ahead(count: int, most: int) -> None:
    made = 0

    def items() -> Iterator[int]:
        nonlocal made
        for made in range(1, count + 1):
            yield made - 1

    ahead = Ahead(items(), most)
    thread = threading.Thread(target=ahead.run, daemon=True)
    thread.start()
    for number, item in enumerate(taken(ahead)):
        assert item == number
        assert made <= number + 1 + most + 1  # one more is in the hands of the thread
    assert made == count
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not ahead.there(wait=True)


def test_nothing_is_waited_for_unless_it_is_asked_for() -> None:
    go = threading.Event()

    def items() -> Iterator[int]:
        assert go.wait(SECONDS)
        yield 1

    ahead = Ahead(items(), 4)
    thread = threading.Thread(target=ahead.run, daemon=True)
    thread.start()
    assert not ahead.there(wait=False)
    go.set()
    assert ahead.there(wait=True)
    assert ahead.take() == 1


@pytest.mark.parametrize("full", [True, False])
def test_closing_ends_the_thread_and_whoever_waits(full: bool) -> None:
    waits, go = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        waits.set()
        if full:
            yield from range(100)
        else:
            assert go.wait(SECONDS)

    ahead = Ahead(items(), 3)
    thread = threading.Thread(target=ahead.run, daemon=True)
    thread.start()
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


def test_an_error_ends_what_is_taken_and_belongs_to_the_thread() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    ahead = Ahead(items(), 3)
    with pytest.raises(ValueError, match="no more"):
        ahead.run()
    assert list(taken(ahead)) == [1]
