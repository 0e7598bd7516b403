"""Blocks from the store into their slots: ranged read, verify, decode, on daemon threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from streamloader.engine.arena import Arena
from streamloader.engine.crew import Crew
from streamloader.engine.pace import Pace
from streamloader.errors import CorruptError, StorageError, StreamloaderError, ThrottledError
from streamloader.format.reader import FieldReader, Run
from streamloader.plan.schedule import BlockRef
from streamloader.stats import Counters
from streamloader.storage.policy import RetryBudget, RetryPolicy, call_with_retry
from streamloader.storage.protocol import RangeReader

# A damaged body is mostly a damaged transfer: fetched again this often before it counts as damaged at rest.
BODY_ATTEMPTS = 3


class LoadingBlock:
    """A block on its way: `left` fields are missing; `error` is the first that failed."""

    __slots__ = ("error", "left", "slot")

    def __init__(self, slot: int, left: int) -> None:
        self.slot = slot
        self.left = left
        self.error: BaseException | None = None


class Fetcher:
    """Loads admitted blocks, and lets one consumer wait for the block it needs."""

    def __init__(
        self,
        fields: Mapping[str, FieldReader],
        reader: Callable[[], RangeReader],
        arena: Arena,
        threads: int,
        counters: Counters,
    ) -> None:
        self._fields = fields
        self._open_reader = reader
        self._arena = arena
        self._counters = counters
        self._pace = Pace(threads)
        self._policy = RetryPolicy()
        self._retries = RetryBudget()
        self._retries.success()  # the manifest came from there
        self._blocks: dict[int, LoadingBlock] = {}
        self._changed = threading.Condition()
        self._awaited = -1
        self._failure: BaseException | None = None
        self._closed = False
        self._crew = Crew("fetch", threads, self.fail)

    def load(self, ref: BlockRef, slot: int) -> None:
        """Begin to load a block into a slot that was claimed for it."""
        block = LoadingBlock(slot, len(self._fields))
        self._blocks[ref.ticket] = block
        for name in self._fields:
            self._crew.submit(partial(self._load_field, ref, block, name))

    def wait(self, ticket: int) -> BaseException | None:
        """Wait until the block is whole; return its error, if it has one. Stops early when closed."""
        with self._changed:
            block = self._blocks[ticket]
            self._awaited = ticket
            while block.left and not self._failure and not self._closed:
                self._changed.wait()
            self._awaited = -1
            if self._failure is not None:
                return self._failure
            return block.error

    def forget(self, ticket: int) -> None:
        """Drop the bookkeeping of a block that was released."""
        del self._blocks[ticket]

    def fail(self, error: BaseException) -> None:
        """Take an error that belongs to no block: every wait returns it from now on."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """Let the threads end after the request each of them is in."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._crew.close()

    def join(self, seconds: float) -> bool:
        """Wait for the threads; return whether all have ended."""
        return self._crew.join(seconds)

    def _load_field(self, ref: BlockRef, block: LoadingBlock, name: str) -> None:
        error: BaseException | None = None
        if not self._closed:
            try:
                for run in self._fields[name].runs(ref.start, ref.stop):
                    self._load_run(self._fields[name], run, ref, block.slot)
            except StreamloaderError as problem:
                error = problem
        with self._changed:
            block.error = block.error or error
            block.left -= 1
            if not block.left and self._awaited == ref.ticket:
                self._changed.notify_all()

    def _load_run(self, field: FieldReader, run: Run, ref: BlockRef, slot: int) -> None:
        for attempt in range(BODY_ATTEMPTS):
            body = self._read(field, run)
            begin = time.perf_counter()
            try:
                self._unpack(field, run, body, ref, slot)
            except CorruptError:
                if attempt + 1 == BODY_ATTEMPTS:
                    raise
                self._counters.add(retries=1)
                continue
            finally:
                self._counters.add(unpack_seconds=time.perf_counter() - begin)
            return

    def _read(self, field: FieldReader, run: Run) -> memoryview:
        reader = self._open_reader()
        begin = time.perf_counter()

        def once() -> memoryview:
            self._counters.add(requests=1)
            with self._pace.flight():
                return field.fetch(reader, run)

        def again(error: StorageError, _delay: float) -> None:
            self._counters.add(retries=1)
            if isinstance(error, ThrottledError):
                self._pace.throttled()

        body = call_with_retry(once, self._policy, self._retries, on_retry=again)
        self._pace.succeeded()
        self._counters.add(bytes_fetched=len(body), request_seconds=time.perf_counter() - begin)
        return body

    def _unpack(self, field: FieldReader, run: Run, body: memoryview, ref: BlockRef, slot: int) -> None:
        if not field.layout.field.fixed:
            chunks = field.decode(run, body)
            assert chunks is not None
            self._arena.keep(field.name, slot, chunks, max(0, ref.start - run.first_sample))
            return
        room = self._arena.room(field.name, slot, ref.stop - ref.start)
        field.decode(run, body, room, ref.start)
        self._counters.add(bytes_decoded=run.num_samples * field.layout.field.item_bytes)
