"""The line to a store: how many requests it takes, how long they last, which of them are tried again."""

from __future__ import annotations

import time
from collections.abc import Callable

from streamloader.engine.hedge import Hedging
from streamloader.engine.pace import FIRST, Pace
from streamloader.errors import ThrottledError
from streamloader.stats import Counters
from streamloader.storage.policy import RetryBudget, RetryPolicy


class Line:
    """What requests to one store share; thread-safe. Kept from pass to pass, the next one starts at full speed."""

    def __init__(self) -> None:
        self.pace = Pace(FIRST)
        self.hedging = Hedging()
        self.policy = RetryPolicy()
        self.retries = RetryBudget()
        self.retries.success()  # the manifest came from there

    def request(self, read: Callable[[], memoryview], waiting: Callable[[], bool], counters: Counters) -> memoryview:
        """Return what `read` returns, and learn from how long it took; `waiting`: others want its place."""
        begin = time.perf_counter()
        try:
            body = read()
        except ThrottledError:
            self.pace.throttled()
            raise
        seconds = time.perf_counter() - begin
        self.hedging.came(len(body), seconds)
        self.pace.came(len(body), seconds, waiting())
        counters.add(bytes_fetched=len(body), request_seconds=seconds)
        counters.note(in_flight=self.pace.limit)
        return body
