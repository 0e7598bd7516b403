"""Plain daemon threads that run jobs in the order they were given.

Not a `ThreadPoolExecutor`: interpreter exit joins its threads, and so waits for a stalled request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

Job = Callable[[], None]


class Crew:
    """Up to `count` daemon threads over one queue, `started` of them now. They hold the queue, never their owner."""

    def __init__(
        self, name: str, count: int, on_error: Callable[[BaseException], None], started: int | None = None
    ) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._name = name
        self._count = count
        self._on_error = on_error
        self._threads: list[threading.Thread] = []
        self.grow(count if started is None else started)

    def grow(self, count: int) -> None:
        """Start threads until there are `count`, or as many as the crew may have. For one caller at a time."""
        while len(self._threads) < min(count, self._count):
            name = f"streamloader-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_run, args=(self._jobs, self._on_error), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; it should handle the errors that belong to its data."""
        self._jobs.put(job)

    def close(self) -> None:
        """Drop the jobs that have not begun and let the threads end; does not wait for a stalled request.

        Several threads may close at once: each puts an end for every thread after all that it has taken.
        """
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the threads to end, `seconds` at most for each; return whether all have."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)


def _run(jobs: SimpleQueue[Job | None], on_error: Callable[[BaseException], None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - a thread's last line: the consumer must hear of it, whatever it is
            on_error(error)
        del job  # an idle thread must not keep the last job's data alive
