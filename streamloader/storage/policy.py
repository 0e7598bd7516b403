"""When a failed request is sent again, and how long to wait first. No I/O, no client.

Only failures that may pass are retried: `TransientError` (with `ThrottledError`) and, once the endpoint has
answered, `EndpointError`. A wrong endpoint thus fails at once, and a server that restarts does not.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from streamloader.errors import (
    EndpointError,
    NotFoundError,
    ObjectExistsError,
    StorageError,
    ThrottledError,
    TransientError,
    UnsupportedError,
)
from streamloader.options import RetryPolicy

Result = TypeVar("Result")

# UnsupportedError: a server may ignore one range; `attempts` limits that
RETRYABLE: tuple[type[StorageError], ...] = (TransientError, EndpointError, UnsupportedError)
NO_RETRY = RetryPolicy(outage_seconds=0.0, request_seconds=0.0)

# An outage begins when no request has succeeded for so long: until then each request retries by itself.
OUTAGE_AFTER_SECONDS = 0.5
# How often a request that waits for another's probe looks whether the outage is over.
POLL_SECONDS = 0.1

_LOG = logging.getLogger("streamloader")


@dataclass(frozen=True)
class Timing:
    """The clock, sleep (both in seconds) and jitter in [0, 1) that a retry uses; tests give their own."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random


class Outage:
    """The failures of one endpoint since its last success, and which request may test it. No threads, no clock.

    Requests that are sent while others fail do not form a storm: as long as none succeeds, one request at a time is
    admitted as a probe, at random intervals of 0.5 to 1 times `probe_seconds`, whether or not the one before has ended.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._since: float | None = None
        self._succeeded_at = self.ended_at = float("-inf")
        self._probe_at = 0.0
        self.declared = False
        self.error = ""

    def seconds(self, now: float) -> float:
        """Return for how long no request has succeeded; 0 where the last one did."""
        return 0.0 if self._since is None else now - self._since

    def failed(self, sent: float, now: float, jitter: float, error: str) -> None:
        """A request sent at `sent` has failed."""
        if self._since is None:
            self._since = max(sent, self._succeeded_at)
        self.error = error
        if not self.declared and self.seconds(now) >= OUTAGE_AFTER_SECONDS:
            self.declared = True
            self._next_probe(now, jitter)

    def succeeded(self, now: float) -> None:
        """A request has succeeded: the outage is over."""
        if self.declared:
            self.ended_at = now
        self._since, self._succeeded_at, self.declared = None, now, False

    def forget(self) -> None:
        """No request waits for the end of the outage any more."""
        self._since, self.declared = None, False

    def wait(self, now: float, jitter: float) -> float:
        """Return how long the next request waits before it asks again; 0: it is sent now."""
        if not self.declared or self.seconds(now) >= self._policy.outage_seconds:
            return 0.0
        if now < self._probe_at:
            return self._probe_at - now
        self._next_probe(now, jitter)
        return 0.0

    def _next_probe(self, now: float, jitter: float) -> None:
        self._probe_at = now + self._policy.probe_seconds * (0.5 + 0.5 * jitter)


class Progress:
    """How far a response is ahead of the slowest one that the policy allows.

    It begins `response_seconds` ahead; each byte earns 1 / `min_bytes_per_second`, up to `response_seconds`. A response
    of n bytes thus takes `policy.deadline(n)` at most, and one that nearly stops is late `response_seconds` after that.
    """

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._late_at = clock() + policy.response_seconds

    def received(self, size: int) -> None:
        """Count bytes that have arrived."""
        latest = self._clock() + self._policy.response_seconds
        self._late_at = min(latest, self._late_at + size / self._policy.min_bytes_per_second)

    def seconds_left(self) -> float:
        """Return how long the next bytes may take. Raises `TimeoutError` where the response is late already."""
        left = self._late_at - self._clock()
        if left <= 0:
            rate, seconds = self._policy.min_bytes_per_second, self._policy.response_seconds
            raise TimeoutError(f"the response was more than {seconds:g} s behind {rate:g} bytes/s")
        return left


class Retrier:
    """Sends the requests of one process to one endpoint, again where they fail; shared by all of them. Thread-safe.

    `name` is what messages call the endpoint. Not for use across a fork.
    """

    def __init__(self, policy: RetryPolicy, name: str = "the store", timing: Timing | None = None) -> None:
        self.policy = policy
        self._name = name
        self._timing = timing or Timing()
        self._lock = threading.Lock()
        self._outage = Outage(policy)
        self._reported = False
        self._waiting = 0  # requests that have failed and not ended
        self._thread = threading.local()
        self.reached = False

    @contextmanager
    def waits_by(self, sleep: Callable[[float], None]) -> Iterator[None]:
        """Let the calls of this thread wait by `sleep(seconds)` until the block ends; what it raises ends them."""
        self._thread.sleep = sleep
        try:
            yield
        finally:
            del self._thread.sleep

    def call(
        self,
        call: Callable[[], Result],
        *,
        on_retry: Callable[[StorageError, float], None] | None = None,
        retryable: tuple[type[StorageError], ...] = RETRYABLE,
    ) -> Result:
        """Return what `call` returns, calling it again after a failure of a `retryable` kind.

        `on_retry` is called with the failure and the wait in seconds before each retry. Raises the last failure, of its
        own type, with the number of attempts and the time.
        """
        request = _Request(self._timing.clock())
        try:
            return self._attempts(request, call, on_retry, retryable)
        finally:
            if request.attempts:
                self._leave()

    def _attempts(
        self,
        request: _Request,
        call: Callable[[], Result],
        on_retry: Callable[[StorageError, float], None] | None,
        retryable: tuple[type[StorageError], ...],
    ) -> Result:
        sleep = getattr(self._thread, "sleep", self._timing.sleep)
        while True:
            self._wait_for_turn(sleep)
            sent = self._timing.clock()
            try:
                result = call()
            except retryable as error:
                delay = self._delay(request, sent, error)
                if on_retry is not None:
                    on_retry(error, delay)
                sleep(delay)
            except (NotFoundError, ObjectExistsError):
                self._succeeded()  # it answered
                raise
            else:
                self._succeeded()
                return result

    @property
    def waiting_for(self) -> str:
        """The endpoint, for how long and why requests wait for it; empty where no outage has lasted long enough."""
        with self._lock:
            seconds = self._outage.seconds(self._timing.clock())
            if not self._outage.declared or seconds < self.policy.report_seconds:
                return ""
            return f"no request to {self._name} has succeeded for {seconds:.0f} s; last error: {self._outage.error}"

    def _delay(self, request: _Request, sent: float, error: StorageError) -> float:
        """Count a failure and return how long its request waits. Raises the error where it is not sent again."""
        timing, policy = self._timing, self.policy
        now, jitter = timing.clock(), timing.jitter()
        request.attempts += 1
        if request.attempts == 1:
            with self._lock:
                self._waiting += 1
        request.failed_at = min(request.failed_at, sent)
        if error.attempts is not None:
            request.limited += 1
            if request.limited >= error.attempts:
                self._give_up(request, error, now)
        with self._lock:
            outage = self._outage
            outage.failed(sent, now, jitter, error.problem)
            alone = now - max(request.failed_at, outage.ended_at)
            over = outage.seconds(now) >= policy.outage_seconds
            over |= not outage.declared and alone >= policy.request_seconds
            over |= now - request.failed_at >= policy.outage_seconds + policy.request_seconds
            asked = min(policy.cap_seconds, error.retry_after)
            delay = asked if outage.declared else asked + policy.delay(request.backoffs, jitter)
            request.backoffs += not outage.declared
        if over or not (self.reached or isinstance(error, ThrottledError) or self._first_contact(request, error)):
            self._give_up(request, error, now)
        self._report()
        return delay

    def _leave(self) -> None:
        """A request that has failed ends, one way or the other; an outage in which nobody waits is forgotten."""
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._outage.forget()
                self._reported = False

    def _first_contact(self, request: _Request, error: StorageError) -> bool:
        if error.attempts is not None:
            return True
        return isinstance(error, TransientError) and request.attempts < self.policy.first_contact_attempts

    def _give_up(self, request: _Request, error: StorageError, now: float) -> NoReturn:
        if request.attempts == 1:
            raise error
        problem = f"{error.problem} ({request.attempts} attempts in {now - request.begin:.1f} s)"
        raise type(error)(problem, error.remedy) from error

    def _wait_for_turn(self, sleep: Callable[[float], None]) -> None:
        while self._outage.declared:
            with self._lock:
                wait = self._outage.wait(self._timing.clock(), self._timing.jitter())
            if wait <= 0:
                return
            self._report()
            sleep(min(wait, POLL_SECONDS))

    def _succeeded(self) -> None:
        now = self._timing.clock()
        with self._lock:
            self.reached = True
            seconds, reported = self._outage.seconds(now), self._reported
            self._outage.succeeded(now)
            self._reported = False
        if reported:
            _LOG.warning("streamloader goes on: requests to %s succeed again after %.0f s", self._name, seconds)

    def _report(self) -> None:
        """Log an outage once, when it has lasted for `report_seconds`."""
        if self._reported or not (text := self.waiting_for):
            return
        with self._lock:
            first, self._reported = not self._reported, True
        if first:
            _LOG.warning("streamloader retries for up to %.0f s: %s", self.policy.outage_seconds, text)


@dataclass(slots=True)
class _Request:
    """One request: when it began and first failed, its failures, and how many of them are limited in number."""

    begin: float
    attempts: int = 0
    limited: int = 0
    backoffs: int = 0
    failed_at: float = float("inf")
