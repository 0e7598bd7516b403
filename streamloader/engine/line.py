"""The line to a store: how many requests it takes, and how long they last."""

from __future__ import annotations

import time
from collections.abc import Callable

from streamloader.engine.hedge import Hedging
from streamloader.engine.pace import FIRST, Pace
from streamloader.errors import ThrottledError, TransientError
from streamloader.stats import Counters


class Line:
    """What requests to one store share; thread-safe. Kept from pass to pass, the next one starts at full speed."""

    def __init__(self) -> None:
        self.pace = Pace(FIRST)
        self.hedging = Hedging()

    def request(self, read: Callable[[], memoryview], waiting: Callable[[], bool], counters: Counters) -> memoryview:
        """Return what `read` returns, and learn from how long it took; `waiting`: others want its place."""
        begin = time.perf_counter()
        try:
            body = read()
        except TransientError as error:
            # late: fewer requests leave each of them more of a slow connection
            if isinstance(error, ThrottledError) or isinstance(error.__cause__, TimeoutError):
                self.pace.throttled()
            raise
        seconds = time.perf_counter() - begin
        self.hedging.came(len(body), seconds)
        self.pace.came(len(body), seconds, waiting())
        counters.add(bytes_fetched=len(body), request_seconds=seconds)
        counters.note(in_flight=self.pace.limit)
        return body
