"""What `Crew` promises: jobs in their order, errors told, and an end, whoever closes and how often."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from queue import Empty

import pytest

from streamloader.engine.crew import Crew


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_jobs_run_in_order_and_an_error_is_told() -> None:
    errors: list[BaseException] = []
    done: list[int] = []
    crew = Crew("order", 1)
    for i in range(5):
        crew.submit(lambda i=i: done.append(i) if i != 3 else 1 / 0, errors.append)  # type: ignore[misc]
    over = threading.Event()
    crew.submit(over.set, errors.append)
    assert over.wait(20)
    crew.close()
    assert crew.join(20)
    assert done == [0, 1, 2, 4]
    assert [type(error) for error in errors] == [ZeroDivisionError]


@pytest.mark.usefixtures("hasty")
def test_closing_from_several_threads_at_once_ends_all_threads() -> None:
    errors: list[BaseException] = []

    def close(crew: Crew) -> None:
        try:
            for _ in range(20):
                crew.close()
        except Empty as error:
            errors.append(error)

    for _ in range(100):
        crew = Crew("closed", 48)
        closers = [threading.Thread(target=close, args=(crew,)) for _ in range(3)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        assert crew.join(20)
    assert errors == []
