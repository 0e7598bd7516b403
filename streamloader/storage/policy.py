"""When a failed request is tried again, and how long to wait first. No I/O, no client.

Only failures that may pass are retried: `TransientError` (with `ThrottledError`) and, once the endpoint has
answered, `EndpointError`. A wrong endpoint thus fails at once, and a server that restarts does not.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from streamloader.errors import (
    EndpointError,
    NotFoundError,
    ObjectExistsError,
    StorageError,
    ThrottledError,
    TransientError,
    UsageError,
)

Result = TypeVar("Result")

RETRYABLE: tuple[type[StorageError], ...] = (TransientError, EndpointError)


@dataclass(frozen=True)
class RetryPolicy:
    """How patient a request is; times in seconds.

    `attempts` and `total_seconds` bound one request, whichever comes first: ten attempts outlast an outage
    of half a minute. The wait before retry n (from 0) is uniform in [0, min(cap, base * 2^n)], which AWS
    calls full jitter: clients that failed together do not return together; what the store asks to wait comes
    before that, up to the cap. An endpoint that has never
    answered gets `first_contact_attempts`, so that a wrong URL does not look like a hang.
    """

    attempts: int = 10
    base_seconds: float = 0.2
    cap_seconds: float = 20.0
    total_seconds: float = 120.0
    first_contact_attempts: int = 3

    def __post_init__(self) -> None:
        if min(self.attempts, self.first_contact_attempts) < 1:
            raise UsageError(f"{self!r} makes no attempt at all", "give attempts of at least 1")
        if min(self.base_seconds, self.cap_seconds, self.total_seconds) < 0:
            raise UsageError(f"{self!r} has a negative time", "give times of at least 0")

    def delay(self, retry: int, jitter: float) -> float:
        """Return the wait before the retry numbered `retry` from 0, with `jitter` in [0, 1)."""
        return jitter * min(self.cap_seconds, self.base_seconds * 2.0 ** min(retry, 60))

    def attempts_for(self, error: StorageError, reached: bool) -> int:
        """Return how many attempts a request is given that fails like this."""
        if reached or isinstance(error, ThrottledError):
            return self.attempts
        return self.first_contact_attempts if isinstance(error, TransientError) else 1


NO_RETRY = RetryPolicy(attempts=1, first_contact_attempts=1)


@dataclass(frozen=True)
class Timing:
    """The clock, sleep (both in seconds) and jitter in [0, 1) that a retry uses; tests give their own."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random


class RetryBudget:
    """What requests to one endpoint share: whether it ever answered, and how many early retries are left.

    A success earns a tenth of a retry. While the budget is empty a retry still happens, but only after the
    policy's longest wait: an outage then costs each request in flight one try per `cap_seconds`.
    Thread-safe; not for use across a fork.
    """

    def __init__(self, capacity: float = 100.0, earned_per_success: float = 0.1) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity
        self._earned = earned_per_success
        self._left = capacity
        self._reached = False

    @property
    def reached(self) -> bool:
        """Return whether any request has succeeded."""
        return self._reached

    def success(self) -> None:
        """Count a request that succeeded."""
        with self._lock:
            self._reached = True
            self._left = min(self._capacity, self._left + self._earned)

    def withdraw(self) -> bool:
        """Take one early retry; False where none is left."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True


def call_with_retry(
    call: Callable[[], Result],
    policy: RetryPolicy,
    budget: RetryBudget | None = None,
    *,
    timing: Timing | None = None,
    on_retry: Callable[[StorageError, float], None] | None = None,
    retryable: tuple[type[StorageError], ...] = RETRYABLE,
) -> Result:
    """Return what `call` returns, calling it again after a failure of a `retryable` kind.

    `on_retry` is told the failure and the wait in seconds before each retry. Without a `budget` the endpoint
    counts as reached. Raises the last failure, of its own type, with the number of attempts and the time.
    """
    timing = timing or Timing()
    budget = budget or _reached_budget()
    started = timing.clock()
    attempt = 0
    while True:
        attempt += 1
        try:
            result = call()
        except retryable as error:
            elapsed = timing.clock() - started
            delay = policy.delay(attempt - 1, timing.jitter()) + min(policy.cap_seconds, error.retry_after)
            if attempt < policy.attempts_for(error, budget.reached) and not budget.withdraw():
                delay = policy.cap_seconds
            if attempt >= policy.attempts_for(error, budget.reached) or elapsed + delay > policy.total_seconds:
                if attempt == 1:
                    raise
                raise type(error)(f"{error.problem} ({attempt} attempts in {elapsed:.1f} s)", error.remedy) from error
            if on_retry is not None:
                on_retry(error, delay)
            timing.sleep(delay)
        except (NotFoundError, ObjectExistsError):
            budget.success()  # it answered
            raise
        else:
            budget.success()
            return result


def _reached_budget() -> RetryBudget:
    budget = RetryBudget()
    budget.success()
    return budget
