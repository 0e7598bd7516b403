"""A clock for tests, whose time passes only while everything waits: hours of retries take milliseconds.

clock = VirtualClock()
clock.call_later(2.0, server.recover)
retrier = Retrier(policy, "s3://bucket", Timing(clock.time, clock.sleep))
"""

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeadlockError(AssertionError):
    """Every thread waits for something that no timer will bring."""


class Timer:
    """A call that the clock makes at `at` seconds of its time, once, unless it is cancelled before."""

    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.at = at
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Never make the call. Has no effect after it."""
        self.call = None


class VirtualClock:
    """Seconds that begin at `start`, and pass when every thread of the clock waits in `sleep` or `wait`.

    The time then becomes that of the next timer. The threads of the clock are the one that made it, those that its
    `start` began, and any other one while it waits. Code in one thread needs nothing else: its `sleep` returns at once,
    and time has passed. A scheduler that runs code itself moves the time by `advance`. Timers of the same time are
    called in the order in which they were set. Thread-safe; holds no lock while it calls functions.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._changes = 0  # of anything that `ready` of a waiting thread may depend on
        self._members = {threading.current_thread()}
        self._running = 1  # members that do not wait
        self._waiting = 0
        self._settled = 0  # threads that wait and have seen the last change

    def time(self) -> float:
        """Return the time, in seconds; in place of `time.monotonic`."""
        return self._now

    def call_later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call `call()` after `seconds`, in the thread that moves the time, where it must not wait for the clock."""
        timer = Timer(self._now + max(0.0, seconds), call)
        with self._changed:
            heapq.heappush(self._timers, (timer.at, next(self._order), timer))
        return timer

    @property
    def next_time(self) -> float:
        """The time of the next timer; infinity if there is none."""
        with self._changed:
            while self._timers and self._timers[0][2].call is None:
                heapq.heappop(self._timers)
            return self._timers[0][0] if self._timers else inf

    def advance(self) -> bool:
        """Move the time to the next timer and make its call. Return False if there is no timer."""
        if self.next_time == inf:
            return False
        with self._changed:
            at, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, at)
            call, timer.call = timer.call, None
        if call is not None:
            call()
        self.notify()
        return True

    def sleep(self, seconds: float) -> None:
        """Wait until `seconds` have passed; in place of `time.sleep`."""
        self.wait(lambda: False, seconds)

    def wait(self, ready: Callable[[], object], seconds: float = inf) -> bool:
        """Wait until `ready()`, and return True; or False after `seconds`.

        `ready`, which must not wait, is called again whenever a thread of the clock begins to wait or ends, after each
        timer, and after `notify`. Raises `DeadlockError` if nothing can change any more.
        """
        timer = self.call_later(seconds, bool) if seconds < inf else None
        deadline = self._now + seconds
        member = threading.current_thread() in self._members
        with self._changed:
            self._running -= member
            self._waiting += 1
        self.notify()
        try:
            while True:
                seen = self._changes
                if ready():
                    return True
                if self._now >= deadline:
                    return False
                if self._settle(seen) and not self.advance():
                    raise DeadlockError(f"{self._waiting} threads wait at {self._now:g} s, and there is no timer")
        finally:
            if timer is not None:
                timer.cancel()
            with self._changed:
                self._running += member
                self._waiting -= 1
            if not member:  # nothing waits for this thread any more
                self.notify()

    def _settle(self, seen: int) -> bool:
        """Wait for a change after `seen`, and return False; or True at once in the last thread to wait for one."""
        with self._changed:
            if self._changes != seen:
                return False
            self._settled += 1
            if not self._running and self._settled == self._waiting:
                self._settled -= 1  # this thread goes on, alone
                return True
            self._changed.wait_for(lambda: self._changes != seen)
            return False

    def notify(self) -> None:
        """Let the threads that wait call `ready` again, after a change by code that does not wait for the clock."""
        with self._changed:
            self._changes += 1
            self._settled = 0
            self._changed.notify_all()

    def start(self, call: Callable[..., Result], *args: Any) -> Future[Result]:
        """Return the future result of `call(*args)` in a thread of the clock: `wait(future.done)` waits for it."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001 - the future has it
                future.set_exception(error)
            finally:
                with self._changed:
                    self._members.remove(thread)
                    self._running -= 1
                self.notify()

        thread = threading.Thread(target=run, daemon=True)
        with self._changed:
            self._members.add(thread)
            self._running += 1
        thread.start()
        return future
