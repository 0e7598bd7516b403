"""Retries: how often, how long, and never for what does not pass. On a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamloader.errors import (
    AccessError,
    EndpointError,
    NotFoundError,
    StorageError,
    ThrottledError,
    TransientError,
    UsageError,
)
from streamloader.storage import NO_RETRY, RetryBudget, RetryPolicy, Timing, call_with_retry


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self, jitter: float = 0.5) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.timing = Timing(clock=lambda: self.now, sleep=self.sleep, jitter=lambda: jitter)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def failing(*errors: StorageError) -> tuple[Callable[[], str], list[int]]:
    """A call that raises the errors one after another, then returns; and the list of its calls."""
    calls: list[int] = []
    left: Iterator[StorageError] = iter(errors)

    def call() -> str:
        calls.append(len(calls))
        error = next(left, None)
        if error is not None:
            raise error
        return "done"

    return call, calls


@pytest.mark.parametrize("kind", [TransientError, ThrottledError, EndpointError])
def test_one_passing_failure_makes_exactly_one_extra_call(kind: type[StorageError]) -> None:
    call, calls = failing(kind("it broke", "wait"))
    clock = Clock()
    assert call_with_retry(call, RetryPolicy(), timing=clock.timing) == "done"
    assert (len(calls), clock.slept) == (2, [0.1])


@pytest.mark.parametrize("kind", [NotFoundError, AccessError, StorageError])
def test_what_does_not_pass_is_not_tried_again(kind: type[StorageError]) -> None:
    call, calls = failing(kind("no", "never"))
    clock = Clock()
    with pytest.raises(kind):
        call_with_retry(call, RetryPolicy(), timing=clock.timing)
    assert (len(calls), clock.slept) == (1, [])


def test_an_endpoint_that_never_answered_is_not_tried_again() -> None:
    call, calls = failing(EndpointError("refused"))
    with pytest.raises(EndpointError):
        call_with_retry(call, RetryPolicy(), RetryBudget(), timing=Clock().timing)
    assert len(calls) == 1


@pytest.mark.parametrize("answer", [[], [NotFoundError("no")]])
def test_an_endpoint_that_answered_once_is_waited_for(answer: list[StorageError]) -> None:
    budget = RetryBudget()
    first, _ = failing(*answer)
    try:
        call_with_retry(first, RetryPolicy(), budget, timing=Clock().timing)
    except NotFoundError:
        assert answer
    call, calls = failing(*[EndpointError("refused")] * 3)
    assert call_with_retry(call, RetryPolicy(), budget, timing=Clock().timing) == "done"
    assert len(calls) == 4


def test_the_last_failure_tells_attempts_and_time_and_keeps_its_type() -> None:
    call, calls = failing(*[ThrottledError("s3://b/k: slow down", "send less")] * 99)
    with pytest.raises(ThrottledError, match=r"s3://b/k: slow down \(4 attempts in 0.7 s\); send less") as raised:
        call_with_retry(call, RetryPolicy(attempts=4), timing=Clock().timing)
    assert raised.value.remedy == "send less"
    assert len(calls) == 4


def test_no_retry_raises_the_failure_itself() -> None:
    error = TransientError("once")
    with pytest.raises(TransientError) as raised:
        call_with_retry(failing(error)[0], NO_RETRY, timing=Clock().timing)
    assert raised.value is error


@given(st.integers(1, 12), st.floats(0, 1, exclude_max=True), st.floats(0, 60), st.floats(0, 5), st.floats(0, 30))
def test_waits_stay_within_the_policy(attempts: int, jitter: float, total: float, base: float, cap: float) -> None:
    policy = RetryPolicy(attempts=attempts, base_seconds=base, cap_seconds=cap, total_seconds=total)
    clock = Clock(jitter)
    call, calls = failing(*[TransientError("broke")] * 50)
    with pytest.raises(TransientError):
        call_with_retry(call, policy, timing=clock.timing)
    assert len(calls) <= attempts
    assert clock.now <= total
    for retry, delay in enumerate(clock.slept):
        assert 0 <= delay <= min(cap, base * 2**retry)


@pytest.mark.parametrize(("asked", "slept"), [(0.0, 0.1), (7.0, 7.1), (3600.0, 20.1)])
def test_what_the_store_asks_to_wait_is_waited_up_to_the_cap(asked: float, slept: float) -> None:
    error = ThrottledError("slow down")
    error.retry_after = asked
    call, _ = failing(error)
    clock = Clock()
    call_with_retry(call, RetryPolicy(), timing=clock.timing)
    assert clock.slept == [pytest.approx(slept)]


def test_an_empty_budget_makes_retries_rare_not_impossible() -> None:
    budget = RetryBudget(capacity=1.0)
    budget.success()
    clock = Clock()
    told: list[float] = []
    call, _ = failing(*[ThrottledError("slow down")] * 3)
    call_with_retry(call, RetryPolicy(), budget, timing=clock.timing, on_retry=lambda _, delay: told.append(delay))
    assert clock.slept == told == [0.1, 20.0, 20.0]


def test_successes_earn_retries_up_to_the_capacity() -> None:
    budget = RetryBudget(capacity=2.0, earned_per_success=0.5)
    for _ in range(10):
        budget.success()
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    budget.success()
    budget.success()
    assert [budget.withdraw() for _ in range(2)] == [True, False]


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first_contact_attempts": 0}, {"base_seconds": -1.0}])
def test_impossible_policies_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
