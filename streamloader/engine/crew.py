"""Plain daemon threads that run jobs in the order they were given.

Not a `ThreadPoolExecutor`: interpreter exit joins its threads, and so waits for a stalled request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

Job = Callable[[], None]
OnError = Callable[[BaseException], None]


class Crew:
    """Up to `count` daemon threads over one queue, `started` of them now.

    Idle threads hold the queue and nothing else, and a closed queue is empty: a finalizer may hold a `Crew`.
    """

    def __init__(self, name: str, count: int, started: int | None = None) -> None:
        self._jobs: SimpleQueue[tuple[Job, OnError] | None] = SimpleQueue()
        self._name = name
        self._count = count
        self._closed = False
        self._threads: list[threading.Thread] = []
        self.grow(count if started is None else started)

    def grow(self, count: int) -> None:
        """Start threads until there are `count`, or as many as the crew may have. For one caller at a time."""
        while len(self._threads) < min(count, self._count):
            name = f"streamloader-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, job: Job, on_error: OnError) -> None:
        """Queue a job; `on_error` gets whatever it raises, in its thread. A closed crew drops both."""
        self._jobs.put((job, on_error))
        if self._closed:
            self.close()

    def close(self) -> None:
        """Drop the jobs that have not begun and let the threads end; does not wait for a stalled request.

        Takes no lock: a finalizer may call it in a thread that is inside `submit`. Several threads may close at once:
        each puts an end for every thread after all that it has taken.
        """
        self._closed = True
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


def _run(jobs: SimpleQueue[tuple[Job, OnError] | None]) -> None:
    while (entry := jobs.get()) is not None:
        job, on_error = entry
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must get it
            on_error(error)
        del entry, job, on_error  # an idle thread must not keep the last job's data alive
