"""Threads that turn columns into finished shards."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

from streamloader.format.codecs import Column
from streamloader.format.geometry import Geometry
from streamloader.format.sink import Receipt, write_shard
from streamloader.format.threads import join, wait_for
from streamloader.storage.protocol import Store


class Uploads:
    """Threads that encode and upload shards; at most `workers` shards are with them at once."""

    def __init__(self, store: Store, workers: int) -> None:
        self.workers = workers
        self._store = store
        self._todo: SimpleQueue[tuple[Geometry, int, dict[str, Column]] | None] = SimpleQueue()
        self._free = threading.Semaphore(workers)
        self._receipts: dict[int, Receipt] = {}
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._next = 0

    def check(self) -> None:
        """Raise what a shard's upload raised."""
        if self._failure is not None:
            raise self._failure

    def submit(self, geometry: Geometry, columns: dict[str, Column]) -> None:
        """Hand over the next shard, once there is a free worker."""
        wait_for(lambda seconds: self._free.acquire(timeout=seconds))
        self.check()
        if len(self._threads) < self.workers:
            thread = threading.Thread(target=self._work, name=f"streamloader-write-{self._next}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._todo.put((geometry, self._next, columns))
        self._next += 1

    def join(self) -> dict[int, Receipt]:
        """Wait for all shards and return their receipts."""
        for _ in self._threads:
            self._todo.put(None)
        join(self._threads)
        self.check()
        return self._receipts

    def stop(self) -> None:
        """Drop the shards that have not begun, and wait for the others."""
        with suppress(Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)
        join(self._threads)

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            geometry, index, columns = task
            try:
                if self._failure is None:
                    self._receipts[index] = write_shard(self._store, geometry, index, columns)
            except BaseException as error:  # noqa: BLE001 - raised by the next write or close, whatever it is
                self._failure = self._failure or error
            del task, columns  # a waiting thread must not keep its last shard alive
            self._free.release()
