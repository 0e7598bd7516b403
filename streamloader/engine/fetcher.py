"""Loads blocks from the store into their slots (ranged read, verify, decode) by jobs of the executor.

A block is divided into *pieces*, the runs of its fields. Each piece is one request, and requests run concurrently. A
piece is in flight, which `Pace` limits, until it is in its slot. If its request is late, a second one is sent. The
first response is decoded and the other is dropped on arrival: a blocking read cannot be cancelled, so it keeps its
thread until then. There are never more bodies in memory than threads.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import address
from streamloader.engine.dataset import Dataset, first_samples, numbers_among_all
from streamloader.engine.executor import Executor, Job, Threads
from streamloader.engine.faults import detached, is_bad_data
from streamloader.engine.kept import NO_SLOT
from streamloader.engine.ledger import Ledger
from streamloader.engine.memory import Memory
from streamloader.engine.messages import Callback, all_bytes, in_worker
from streamloader.engine.pace import Hedging, Pace
from streamloader.engine.regions import Regions
from streamloader.engine.residence import Chunks, RowIndex, Rows, locate_items
from streamloader.errors import (
    CorruptError,
    PassEndedError,
    StorageError,
    StreamloaderError,
    ThrottledError,
    TransientError,
    wrapped,
)
from streamloader.format.opening import BODY_ATTEMPTS, is_damage
from streamloader.format.reader import FieldReader, Run
from streamloader.order.schedule import BlockRef, Ints
from streamloader.storage.buffers import USE, Allocate, Buffer, Use
from streamloader.storage.retry import Request, Retrier
from streamloader.storage.store import Store
from streamloader.zarr.columns import ChunkPlaces, RegionReader
from streamloader.zarr.reader import ABSENT, ArrayRun

NEVER = float("inf")


@dataclass(slots=True, eq=False)
class LoadingBlock:
    """A block that is loading, numbered within its dataset. `left` pieces are missing; `error` is the first error.

    `expected`: the bytes of decoded chunks, an estimate from the chunk table. `runs`: the requests of the fields whose
    chunk tables were at hand, or the error of reading these. `documents`: those of packed rows, each of which is loaded
    once. `whole`: the samples [start, stop) of the block of the order that it is, or is a part of.
    """

    dataset: Dataset
    ref: BlockRef
    left: int
    expected: int = 0
    runs: dict[str, Any] = field(default_factory=dict)
    error: StreamloaderError | None = None
    documents: Ints | None = None
    whole: tuple[int, int] = (0, 0)

    @property
    def stop(self) -> int:
        """The end of the samples, or documents, that are loaded, counted from `ref.start`."""
        return self.ref.stop if self.documents is None else self.ref.start + len(self.documents)


@dataclass(slots=True, eq=False)
class Piece:
    """A run of a block that is loading: request number 0, and `hedges` more.

    `requests`: the numbers of those that are in flight or wait for a thread, the lowest of which is retried. `fresh`:
    none was sent yet. `sent`: when the latest was sent, or `NEVER` if none can be late. `writer`: the number of the
    request whose body is being decoded into the slot. `finished`: it is in its slot, or has failed.
    """

    block: LoadingBlock
    field: FieldReader | RegionReader
    run: Any
    requests: set[int]
    hedges: int = 0
    fresh: bool = True
    sent: float = NEVER
    writer: int | None = None
    finished: bool = False
    error: StreamloaderError | None = None

    @property
    def retries(self) -> Retrier:
        """The retries of its store."""
        return self.field.store.retries


@dataclass(slots=True, eq=False)
class Attempt:
    """A request of a piece, with its number.

    `memory`: of its body, and of what was decoded. `unpacked`: the decoded bytes, which the ledger counts.
    `damaged`: how often the body was.
    """

    piece: Piece
    number: int
    request: Request
    damaged: int = 0
    unpacked: int = 0
    memory: list[memoryview] = field(default_factory=list)


# How often a waiting consumer checks for late requests.
CHECK_SECONDS = 0.05
# A request that times out is not alone if others count as late only after this time.
SLOW_SECONDS = 5.0


def sleeper(closed: threading.Event) -> Callable[[float], None]:
    """Return a sleep function that raises `PassEndedError` once `closed` is set."""

    def sleep(seconds: float) -> None:
        if closed.wait(seconds):
            raise PassEndedError

    return sleep


class Fetcher:
    """Loads admitted blocks with up to `budget.threads` concurrent requests; one consumer waits for blocks.

    `blocks`: the samples in a block of each dataset, for those with a cache.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        names: Sequence[str],
        limits: tuple[Pace, Hedging],
        memory: Memory,
        executor: Executor,
        *,
        blocks: Sequence[int] = (),
    ) -> None:
        self._executor = executor
        self._shared = {
            (dataset, name): executor.share((dataset.readers[name], dataset.readers[name].store))
            for dataset in datasets
            for name in names
        }
        residences = memory.residences
        self._chunks = {name: chunks for name, chunks in residences.items() if isinstance(chunks, Chunks)}
        self._datasets, self._block_sizes = datasets, blocks
        self._starts = first_samples(datasets, selected=True)
        self._total = sum(dataset.num_samples for dataset in datasets)
        self._names = names
        self._memory, self._bodies = memory, memory.bodies
        self._budget = budget = memory.budget
        # rows of batches are counted as slots are, and memory that is kept apart
        counted = {} if budget.fills_batches or budget.keeps else residences
        self._counted = [name for name, residence in counted.items() if not isinstance(residence, Rows)]
        runtime = executor.runtime
        self.ledger, self._clock = Ledger(memory.bodies, budget, runtime.future), runtime.clock
        self._next_block: LoadingBlock | None = None
        self._counters = memory.counters
        self.pace, self._hedging = limits
        self.pace.allow(budget.threads)
        self._blocks: dict[int, LoadingBlock] = {}
        self._pieces: dict[Piece, None] = {}  # in the order of their blocks
        self._changed = runtime.condition()
        # not in flight yet: those of earlier blocks first, since later ones may wait for memory that these free
        self._pending: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = count()
        self._hedges: deque[Callable[[], object]] = deque()  # of pieces in flight, wait for a thread
        self._in_flight = self._busy = self._writers = 0  # pieces, threads, pieces being decoded
        self.delayed = 0  # requests that wait until they are sent again
        self._awaited = -1  # the ticket that the consumer waits for
        self._checked_at = 0.0
        self._failure: StreamloaderError | None = None
        self._closed = runtime.event()
        self.sleep = sleeper(self._closed)
        prepare = [(open_reader, source) for source in self._shared.values()][:1]
        self._requests = executor.jobs("fetch", budget.threads, self.fail, *prepare, begin_here=True)
        # what waits: for a chunk table, or before a retry
        requests = self._requests
        given = "plan", budget.threads, self.fail
        self._local = requests if isinstance(requests, Threads) else Threads(*given, runtime=runtime)

    def _next(self, ref: BlockRef) -> LoadingBlock:
        """Return the block to load next, with the estimated bytes of its decoded chunks."""
        if self._next_block is not None and self._next_block.ref.ticket == ref.ticket:
            return self._next_block
        self._next_block = block = LoadingBlock(*self._locate(ref), len(self._names))
        block.whole = self._whole(block, ref)
        if block.dataset.packed is not None:
            block.documents = block.dataset.documents(block.ref.start, block.ref.stop)
        for name in self._names:
            try:
                with block.dataset.readers[name].store.retries.waits_by(self.sleep):
                    self._count_field(block, name)
            except BaseException as error:  # noqa: BLE001 - it belongs to the batch that needs the block
                block.runs[name] = wrapped(error, f"reading the chunk table of field {name!r}")
        return block

    def _count_field(self, block: LoadingBlock, name: str) -> None:
        """Count the bytes of a field of a block, and plan its requests if that needs none, or if they tell the size."""
        # of a part, a cache gets all of the block, and so does memory
        runs, size = block.dataset.expected(name, *block.whole, counted=name in self._counted)
        block.expected += size
        if runs is not None and block.whole == (block.ref.start, block.ref.stop):
            block.runs[name] = runs

    def fits(self, ref: BlockRef, *, batches_grow: bool) -> bool:
        """Return whether a block of the expected size fits into memory.

        `batches_grow`: the size of later batches is unknown, so blocks ahead get a part of the memory only.
        """
        if self._memory.has(ref):
            return True
        expected = self._next(ref).expected  # without the lock, since it may read a chunk table
        with self._changed:
            return self.ledger.fits(expected, batches_grow=batches_grow)

    def check(self, ref: BlockRef) -> None:
        """Raise `MemoryBudgetError` if a block does not fit in addition to those in use."""
        if not self._memory.has(ref):
            self.ledger.check(self._next(ref).expected)

    def leave(self, size: int) -> int:
        """Leave `size` bytes to finished batches from now on; return the bytes of all blocks, loading ones included."""
        with self._changed:
            return self.ledger.leave(size)

    def load(self, ref: BlockRef) -> None:
        """Reserve a slot for a block, and begin to load it unless it is in memory."""
        held = self._memory.reserve(ref)
        if held is not None:
            with self._changed:
                self._blocks[ref.ticket] = LoadingBlock(*self._locate(ref), 0)
                self.ledger.open(ref.ticket, 0)
                self.ledger.hold(ref.ticket, held)
                self.ledger.complete(ref.ticket)
            return
        block, self._next_block = self._next(ref), None
        if block.documents is not None:
            self._memory.expect_documents(ref.ticket, block.documents)
        names = self._memory.incomplete(block.ref, block.dataset.region_readers)
        block.left = len(names)
        with self._changed:
            self._blocks[ref.ticket] = block
            self.ledger.open(ref.ticket, block.expected)
            if not names:
                self.ledger.complete(ref.ticket)
            if self._closed.is_set():
                return
            for name in names:
                runs = block.runs.pop(name, None)
                if isinstance(runs, StreamloaderError):
                    if tolerated := self._tolerates(runs):
                        self._mark(block, name, runs)
                    self._end_piece(block, None if tolerated else runs)
                elif runs is not None:
                    self._add_pieces(block, name, runs)
                else:
                    self._queue(ref.ticket, [partial(self._local.run, partial(self._load_field, block, name))])

    def wait(self, ticket: int) -> StreamloaderError | None:
        """Wait until the block is complete, then count it as in use. Return its error, once. Stops early when closed.

        The error is a `MemoryBudgetError` if the block does not fit in addition to the others.
        """
        with self._changed:
            block = self._blocks[ticket]
            self._awaited = ticket
            while block.left and not self._failure and not self._closed.is_set():
                self.ledger.grant(awaited=ticket)  # batches that are deleted free memory
                self._changed.wait(CHECK_SECONDS)
                self._hedge_late()
            self._awaited = -1
            if self._failure is not None:
                return self._failure
            held = self.ledger.use(ticket)
            error, block.error = block.error, None  # its traceback may hold the block
            if error is None and not self._closed.is_set():
                self._memory.complete(ticket, held)
            return error

    @property
    def loading(self) -> int:
        """The number of blocks that are being loaded."""
        with self._changed:
            return sum(block.left > 0 for block in self._blocks.values())

    def describe(self) -> str:
        """Return what a batch waits for, and the requests, in words."""
        with self._changed:
            now, block = self._clock(), self._blocks.get(self._awaited)
            pieces = [piece for piece in self._pieces if block is not None and piece.block is block]
            queued, limit = len(self._pending), self.pace.limit
            text = f"{self._in_flight} requests are in flight of {limit} that may be, {queued} wait for these"
            text += f", {waiting} for memory" if (waiting := self.ledger.waiting) else ""
        if block is None:
            return f"no block is awaited; {text}"
        parts = []
        for piece in pieces:
            sent = "is decoded, or was not sent" if piece.sent == NEVER else f"was sent {now - piece.sent:.0f} s ago"
            where = f"{piece.field.store.url}/{piece.run.path}"
            parts.append(f"field {piece.field.name!r}: the request for bytes {piece.run.start} of {where} {sent}")
        numbers = numbers_among_all([block.dataset])(np.array([block.ref.start, block.ref.stop - 1]))
        return f"samples {numbers[0]} to {numbers[1]} are read ({'; '.join(parts[:3]) or 'chunk tables'}); {text}"

    def release(self, ticket: int) -> None:
        """Release a block that was in use."""
        with self._changed:  # threads that wait for memory iterate over the blocks
            del self._blocks[ticket]
            self.ledger.close(ticket)
        self._memory.release(ticket)

    def fail(self, error: BaseException) -> None:
        """Record an error that belongs to no block: every `wait` returns it from now on."""
        with self._changed:
            self._failure = self._failure or wrapped(error, "reading the dataset")
            self._changed.notify_all()

    def close(self) -> None:
        """Let each thread end after its current request."""
        with self._changed:
            self._closed.set()
            self._pending.clear()
            self._hedges.clear()
            self.ledger.grant()
            self._changed.notify_all()
        self._local.close()
        self._requests.close()

    def join(self, seconds: float) -> bool:
        """After `close`, wait at most `seconds` until no thread writes to the arena; return whether none does.

        Does not wait for requests: their responses are dropped.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._writers, seconds)

    def _locate(self, ref: BlockRef) -> tuple[Dataset, BlockRef]:
        """Return the dataset of a block, and the block numbered within that dataset, as `Dataset.runs` needs it."""
        epoch, number = divmod(ref.start, self._total)  # epoch 0 unless samples are drawn by weights
        index = bisect_right(self._starts, number) - 1
        dataset = self._datasets[index]
        start = number - self._starts[index] + epoch * dataset.num_samples
        return dataset, ref._replace(start=start, stop=start + ref.stop - ref.start)

    def _whole(self, block: LoadingBlock, ref: BlockRef) -> tuple[int, int]:
        """Return the samples of the block of the order that contains one; `ref` has its number among all datasets."""
        start, stop, dataset = block.ref.start, block.ref.stop, block.dataset
        if ref.block < 0 or not self._block_sizes or dataset.weights_digest is not None:
            return start, stop
        first = start - (ref.start - ref.block)
        size = self._block_sizes[self._datasets.index(dataset)]
        return first, min(first + size, dataset.num_samples)

    def _queue(self, ticket: int, jobs: Iterable[Callable[[], object]]) -> None:
        """Queue the jobs of a block. Requires the lock."""
        for job in jobs:
            heappush(self._pending, (ticket, next(self._numbers), job))
        self._dispatch()

    def _dispatch(self) -> None:
        """Submit jobs while fewer are in flight than allowed, and threads are free. Requires the lock."""
        while self._busy < self._budget.threads and not self._closed.is_set():
            if self._hedges:
                job = self._hedges.popleft()
            elif self._pending and self._in_flight < self.pace.limit:
                job = heappop(self._pending)[2]
                self._in_flight += 1
            else:
                return
            self._busy += 1
            job()

    def _end_piece(self, block: LoadingBlock, error: StreamloaderError | None) -> None:
        """Count a piece that is in its slot or has failed. Requires the lock."""
        block.error = block.error or error
        block.left -= 1
        if not block.left:
            self.ledger.complete(block.ref.ticket)
            if self._awaited == block.ref.ticket:
                self._changed.notify_all()

    def _load_field(self, block: LoadingBlock, name: str) -> None:
        """Read the chunk table of a field for a block, and load its pieces."""
        runs: Sequence[Any] = ()
        problem = None
        try:
            reader = block.dataset.readers[name]
            with reader.store.retries.waits_by(self.sleep):
                part, chosen = (block.ref.start, block.ref.stop), self._choose(block, reader)
                runs = (
                    block.dataset.runs(name, *part, chosen)
                    if isinstance(reader, RegionReader)
                    else block.dataset.runs_of_part(name, part, block.whole)
                )
        except BaseException as error:  # noqa: BLE001 - a batch waits for the block, so it must finish
            problem = wrapped(error, f"reading the chunk table of field {name!r}")
        failed = problem is not None
        if problem is not None and self._tolerates(problem):
            self._mark(block, name, problem)
            problem = None
        with self._changed:
            self._busy -= 1
            self._in_flight -= 1
            if failed:
                self._end_piece(block, problem)
                self._dispatch()
            else:
                self._add_pieces(block, name, runs)
        del problem  # its traceback holds this frame

    def _choose(self, block: LoadingBlock, reader: FieldReader | RegionReader) -> list[ChunkPlaces] | None:
        """Return the chunks of arrays to read for a block; None for other fields, or for all."""
        with self._changed:
            if self._closed.is_set() or not isinstance(reader, RegionReader):
                return None
            self._writers += 1
        try:
            return self._memory.chunks_to_read(block.ref, reader, partial(self._allocate_region, block))
        finally:
            with self._changed:
                self._writers -= 1
                if self._closed.is_set():
                    self._changed.notify_all()

    def _add_pieces(self, block: LoadingBlock, name: str, runs: Sequence[Any]) -> None:
        """Divide a field of a block into pieces, and queue them. Requires the lock."""
        pieces = [Piece(block, block.dataset.readers[name], run, {0}) for run in runs]
        block.left += len(pieces) - 1
        self._pieces |= dict.fromkeys(pieces)
        if not self._closed.is_set():
            self._queue(block.ref.ticket, (partial(self._load_piece, piece, 0) for piece in pieces))

    def _load_piece(self, piece: Piece, number: int) -> None:
        self._send(Attempt(piece, number, piece.retries.request()))

    def _send(self, attempt: Attempt) -> None:
        """Send a request, unless it is not needed any more; in an outage later."""
        piece, hedge = attempt.piece, attempt.number and not attempt.request.attempts
        seconds = 0.0 if hedge else piece.retries.wait()
        if piece.finished or self._closed.is_set():
            self._end(attempt, PassEndedError())
        elif seconds:
            self._later(seconds, attempt)
        else:
            self._submit(attempt)

    def _submit(self, attempt: Attempt) -> None:
        piece = attempt.piece
        try:
            source, run = self._shared[piece.block.dataset, piece.field.name], piece.run
            target: Callback | memoryview = Callback(partial(self._allocate_body, attempt))
            if isinstance(piece.field, FieldReader) and self._executor.workers:  # saves a message
                first, stop, *_ = run.cached or (run.start, run.stop)
                target = self._allocate_body(attempt, stop - first)
            use, begin = self._use(attempt), partial(self._begin_request, attempt)
            send = Callback(partial(self._proceed, attempt))
            # with a cache, it is known later whether there is a request
            calls = begin if use is None else bool, partial(self._restart, attempt, counted=use is None)
            if piece.field.name in self._chunks:
                work = run, piece.block.ref.start, piece.block.stop, use
                given: Any = source, work, send, target, Callback(partial(self._reserve, attempt))
                job = Job(fetch_items, given, partial(self._received_items, attempt), *calls)
            else:
                if isinstance(piece.field, FieldReader):
                    # slow to send, and not needed to read
                    run = run._replace(sizes=None, crcs=None, picks=None, rows=None)
                job = Job(fetch_body, (source, (run, use), send, target), partial(self._received, attempt), *calls)
            self._requests.submit(job)
        except BaseException as error:  # noqa: BLE001 - a batch waits for the piece, so it must finish
            self._end(attempt, error)

    def _use(self, attempt: Attempt) -> Use | None:
        """Return how a cache of the field will be used again, None without a cache."""
        piece = attempt.piece
        if piece.field.store.cache is None:
            return None
        ref, content = piece.block.ref, piece.run.content if isinstance(piece.field, FieldReader) else ""
        return Use(ref.node_use, ref.now, wait=not attempt.number, fresh=attempt.damaged > 0, content=content)

    def _later(self, seconds: float, attempt: Attempt) -> None:
        """Send a request after some seconds."""

        def wait() -> None:
            with suppress(PassEndedError):  # which `_send` finds
                self.sleep(seconds)
            with self._changed:
                self.delayed -= 1
            self._send(attempt)

        with self._changed:
            self.delayed += 1

        self._local.run(wait)

    def _begin_request(self, attempt: Attempt) -> None:
        piece = attempt.piece
        self._counters.add(requests=int(piece.run.stop > 0), hedges=int(attempt.number > 0))
        piece.retries.sent(attempt.request)
        if attempt.number or piece.fresh:
            piece.fresh, piece.sent = False, self._clock()

    def _allocate_body(self, attempt: Attempt, size: int) -> memoryview:
        attempt.memory[:] = [self._bodies.allocate(size)]
        return attempt.memory[0]

    def _proceed(self, attempt: Attempt, step: Step) -> None:
        """Note the next step of a request."""
        if step == "sent":
            self._begin_request(attempt)
        elif step == "sent again":
            self._counters.add(requests=1)
        else:  # storing it is not a late response
            attempt.piece.sent = NEVER

    def _restart(self, attempt: Attempt, *, counted: bool) -> None:
        """Count a request that is sent again, if its job does not, and its decoded bytes anew."""
        if counted:
            self._counters.add(requests=1)
        del attempt.memory[1:]
        with self._changed:
            self._forget_decoded(attempt)

    def _received(self, attempt: Attempt, result: Fetched | None, error: BaseException | None) -> None:
        """Decode a response into the slot, unless another one is decoded already, or retry a request that failed."""
        if error is not None:
            self._retry(attempt, error)
            return
        assert result is not None
        self._count_response(attempt, *result)
        with self._changed:
            slot = self._claim(attempt)
        if slot == NO_SLOT:
            self._end(attempt, PassEndedError())
            return
        try:
            body = None if result[0] < 0 else part_of(attempt.piece.run, attempt.memory[0][: result[0]])
            self._decode(attempt, slot, body)
        except BaseException as problem:  # noqa: BLE001 - a batch waits for the piece, so it must finish
            self._end(attempt, problem)

    def _received_items(self, attempt: Attempt, result: Any, error: BaseException | None) -> None:
        """Put the items of a response into the slot, unless those of another one are there."""
        if error is not None:
            self._retry(attempt, error)
            return
        fetched, used, (rows, table), seconds = result
        self._count_response(attempt, *fetched)
        piece = attempt.piece
        chunks, kept = self._chunks[piece.field.name], [attempt.memory[number] for number in used]
        with self._changed:
            slot = self._claim(attempt)
            if slot != NO_SLOT:
                chunks.write(slot, rows, table, kept)
                self.ledger.hold(piece.block.ref.ticket, sum(part.nbytes for part in kept))
        if slot != NO_SLOT:
            field = piece.field.layout.field
            decoded = piece.run.num_samples * field.item_bytes if field.fixed else 0
            self._counters.add(unpack_seconds=seconds, bytes_decoded=decoded)
        self._end(attempt, PassEndedError() if slot == NO_SLOT else None)

    def _claim(self, attempt: Attempt) -> int:
        """Return the slot of a piece for a response to it, `NO_SLOT` if it needs none any more. Requires the lock."""
        piece, slot = attempt.piece, NO_SLOT
        if not (piece.finished or piece.writer is not None or self._closed.is_set()):
            slot = self._memory.claim(piece.block.ref.ticket)
        if slot != NO_SLOT:
            piece.writer = attempt.number
            self._writers += 1
        return slot

    def _count_response(self, attempt: Attempt, size: int, seconds: float, cached: bool) -> None:
        piece, count = attempt.piece, max(0, size)
        if cached:  # which says nothing about the store
            self._counters.add(cache_hits=1, cache_bytes=count)
            return
        piece.retries.succeeded()
        piece.sent = NEVER
        self._hedging.completed(count, seconds)
        self.pace.completed(count, seconds, bool(self._pending))
        self._counters.add(bytes_fetched=count, request_seconds=seconds)
        self._counters.note(in_flight=self.pace.limit)

    def _retry(self, attempt: Attempt, error: BaseException) -> None:
        piece = attempt.piece
        if isinstance(error, TransientError):
            # a timeout too, if others are slow as well: fewer requests leave each of them more of a slow connection
            usual = self._hedging.deadline(piece.run.stop - piece.run.start)
            late = isinstance(error.__cause__, TimeoutError) and usual > SLOW_SECONDS
            if late or isinstance(error, ThrottledError):
                self.pace.throttled()
        if not isinstance(error, StorageError):  # damaged bytes
            self._end(attempt, error)
            return
        with self._changed:
            hedge = attempt.number > min(piece.requests)
        if hedge:  # an earlier request goes on
            self._end(attempt, PassEndedError())
            return
        try:
            seconds = piece.retries.failed(attempt.request, error)
        except StorageError as last:
            self._end(attempt, last)
            return
        piece.sent = NEVER
        self._counters.add(retries=1)
        self._later(seconds, attempt)

    def _decode(self, attempt: Attempt, slot: int, body: memoryview | None) -> None:
        """Decode a body into what the residence of its field opens in the slot.

        That is opened only once a body has arrived: until then another request may complete the block, whose slot then
        goes to another one.
        """
        piece, block = attempt.piece, attempt.piece.block
        allocate = self._bodies.allocate if self._budget.fills_batches else partial(self._allocate_region, block)
        target = self._memory.open(slot, block.ref, piece.field, allocate)
        source = self._shared[block.dataset, piece.field.name]

        def end(result: Any, error: BaseException | None) -> None:
            if error is None:
                missing, decoded, seconds = result
                chunks = len(piece.run.chunks) if isinstance(piece.run, ArrayRun) else 0
                self._counters.add(unpack_seconds=seconds, bytes_decoded=decoded)
                self._counters.add(chunks_read=chunks, missing_chunks=missing)
            self._end(attempt, error)

        self._requests.submit(Job(decode, (source, piece.run, body, target, Callback(self._bodies.allocate)), end))

    def _allocate_region(self, block: LoadingBlock, size: int) -> memoryview:
        with self._changed:  # from now on, the memory in use includes it
            self.ledger.hold(block.ref.ticket, size, expected=True)
        return self._bodies.allocate(size)

    def _reserve(self, attempt: Attempt, size: int) -> Future[memoryview]:
        """Return memory to decode into, once it fits: only bodies state this size.

        The future's error is `PassEndedError` if the piece is finished or this is closed, or a `MemoryBudgetError`.
        """
        piece = attempt.piece

        def ended() -> PassEndedError | None:
            return PassEndedError() if piece.finished or self._closed.is_set() else None

        with self._changed:
            self._in_flight -= 1  # a later piece that waits here must not delay the request of an earlier one
            granted = self.ledger.reserve(size, piece.block.ref.ticket, ended, partial(self._reserved, attempt))
            self.ledger.grant()
            self._dispatch()
        return granted

    def _reserved(self, attempt: Attempt, memory: memoryview | None) -> None:
        self._in_flight += 1
        if memory is not None:
            attempt.memory.append(memory)
            attempt.unpacked += memory.nbytes

    def _forget_decoded(self, attempt: Attempt) -> None:
        """Count the decoded bytes of a request no more: they are counted as the slot's, or dropped."""
        self.ledger.hold(attempt.piece.block.ref.ticket, -attempt.unpacked)
        attempt.unpacked = 0

    def _end(self, attempt: Attempt, error: BaseException | None) -> None:
        """End a request whose piece is in its slot, that failed, or that is not needed any more (`PassEndedError`).

        Damaged bytes are requested again.
        """
        piece, loaded, problem = attempt.piece, error is None, None
        piece.retries.ended(attempt.request)
        with self._changed:
            self._forget_decoded(attempt)
            if piece.writer == attempt.number:
                piece.writer = None
                self._writers -= 1
                if self._closed.is_set():
                    self._changed.notify_all()
        if is_damage(error) and attempt.damaged < BODY_ATTEMPTS - 1:
            attempt.damaged += 1
            attempt.request = piece.retries.request()
            self._counters.add(retries=1)
            self._send(attempt)
            return
        if error is not None and not isinstance(error, PassEndedError):
            first, count = piece.run.first_sample, piece.run.num_samples
            problem = wrapped(error, f"reading field {piece.field.name!r} of samples {first} to {first + count - 1}")
        bad: StreamloaderError | None = None
        with self._changed:
            self._busy -= 1
            piece.requests.remove(attempt.number)
            if not piece.finished:
                piece.error = piece.error or problem
                if loaded or not piece.requests:
                    piece.finished = True
                    del self._pieces[piece]
                    self._in_flight -= 1
                    last = None if loaded else piece.error
                    piece.error = None  # its traceback may hold the piece
                    if last is not None and self._tolerates(last):
                        bad = last
                    else:
                        self._end_piece(piece.block, last)
                    del last
            self._dispatch()
        if bad is not None:
            self._leave_out(piece, bad)
        del error, problem, bad  # their tracebacks hold this frame

    def _tolerates(self, error: StreamloaderError) -> bool:
        """Return whether samples that cannot be read because of an error do not end the pass."""
        return self._memory.tolerant and is_bad_data(error)

    def _leave_out(self, piece: Piece, error: StreamloaderError) -> None:
        """Read each chunk of a damaged piece by itself; mark the samples of a single one as bad."""
        block, name = piece.block, piece.field.name
        runs: Sequence[Any] = piece.field.split(piece.run) if is_damage(error) else ()
        if len(runs) < 2:
            self._mark(block, name, error, piece.run)
        with self._changed:
            if len(runs) > 1:
                self._add_pieces(block, name, runs)
            else:
                self._end_piece(block, None)

    def _mark(self, block: LoadingBlock, name: str, error: StreamloaderError, run: Any = None) -> None:
        """Mark the samples of a block that need the chunks of a run, or all of them, as bad.

        Without the lock for arrays, whose regions it may open.
        """
        ref, reader, residence = block.ref, block.dataset.readers[name], self._memory.residences[name]
        slot = self._memory.claim(ref.ticket)
        if slot == NO_SLOT:
            return
        if isinstance(residence, Regions):
            self._memory.open(slot, ref, reader, partial(self._allocate_region, block))
            residence.mark_chunks(slot, run, detached(error))
            return
        rows = range(block.stop - ref.start) if run is None else reader.bad_rows(run, ref.start, block.stop)
        residence.mark([slot * self._memory.block + row for row in rows], detached(error))

    def _hedge_late(self) -> None:
        """Repeat late requests, the earliest first, as far as hedges are saved up. Requires the lock."""
        now = self._clock()
        if now - self._checked_at < CHECK_SECONDS or self.pace.throttling or self._closed.is_set():
            return
        self._checked_at = now
        late = [p for p in self._pieces if now - p.sent > self._hedging.deadline(p.run.stop - p.run.start)]
        for piece in sorted(late, key=lambda piece: piece.sent):
            if not self._hedging.withdraw():
                break
            piece.sent = NEVER
            piece.hedges += 1
            piece.requests.add(piece.hedges)
            self._hedges.append(partial(self._load_piece, piece, piece.hedges))
        self._dispatch()


FieldSource = tuple[Any, Store]  # a `FieldReader` or a `RegionReader`, and its store


def open_reader(source: FieldSource) -> None:
    """Import what reading needs, and open the client."""
    source[1].reader()


# of a request; without a cache, only the second one is reported: its response was late
Step = Literal["sent", "sent again", "received"]
# the bytes of a body, -1 if the object is missing, the seconds of its request, and whether a cache had it instead
Fetched = tuple[int, float, bool]


def fetch_body(
    source: FieldSource, work: tuple[Any, Use | None], on_step: Callable[[Step], object], target: Any
) -> Fetched:
    """Read the bytes of a run into a target, memory or a function `allocate(size)`: by one request, or from a cache.

    `work`: the run, and for a cache how it is used again. `on_step(step)` is called at each step of a request.
    """
    body, seconds, cached = _read(source, *work, on_step, target)
    return -1 if body is None else body.nbytes, seconds, cached


def _read(
    source: FieldSource, run: Any, use: Use | None, on_step: Callable[[Step], object], target: Any
) -> tuple[memoryview | None, float, bool]:
    field, store = source
    store.retries.reached = True  # the manifest was read from this store, maybe in another process
    memory, seconds = list[memoryview](), list[float]()

    def send(request: Callable[[], Buffer]) -> Buffer:
        if use is not None:
            on_step("sent")
        begin = time.perf_counter()
        try:
            body = request()
        finally:
            seconds.append(time.perf_counter() - begin)
        if use is not None:
            on_step("received")
        return body

    reader = replace(store.reader(), on_repeat=partial(on_step, "sent again"), use=use or USE, call=send)
    if cached := getattr(run, "cached", None):
        run = run._replace(start=cached[0], stop=cached[1])

    def keep(size: int) -> memoryview:
        memory.append(memoryview(target(size)) if callable(target) else target[:size])
        return memory[-1]

    body = field.fetch(reader, run, keep)
    fetched = sum(seconds), use is not None and not seconds and body is not ABSENT
    if body is ABSENT:
        return None, *fetched
    if not memory or address(body) != address(memory[-1]):  # the client allocated it
        part = keep(body.nbytes)
        if len(part) < body.nbytes:
            raise CorruptError(f"{body.nbytes} bytes of {run.path} were received, expected {len(part)}")
        part[:] = body
    return memory[-1][: body.nbytes], *fetched


def part_of(run: Any, body: memoryview) -> memoryview:
    """Return the bytes of a run in what was read for it: a cache reads all of a block."""
    cached = getattr(run, "cached", None)
    return body if cached is None else body[run.start - cached[0] : run.stop - cached[0]]


def decode(
    source: FieldSource, run: Any, body: memoryview | None, target: Any, allocate: Allocate
) -> tuple[int, int, float]:
    """Decode a body into what its block opened; return the missing chunks, the decoded bytes, and the processor time.

    `allocate`: returns memory to decode into first what is copied from there.
    """
    begin = time.thread_time()
    missing, decoded = source[0].write(run, ABSENT if body is None else body, target, allocate)
    return missing, decoded, time.thread_time() - begin


def fetch_items(
    source: FieldSource,
    work: tuple[Run, int, int, Use | None],
    on_step: Callable[[Step], object],
    target: Any,
    allocate: Allocate,
) -> tuple[Fetched, list[int], tuple[RowIndex, NDArray[np.int64]], float]:
    """Read the bytes of a run as `fetch_body`, and decode them into memory from `allocate`.

    `work`: the run, the first sample of its block, the block's end, and how the run is used again. Return the result of
    `fetch_body`, which of (the body, *the allocated memory) have the items, the rows of the block that the run has,
    with the address and the size of their items, and the processor time of decoding.
    """
    (run, start, stop, use), (field, _) = work, source
    body, seconds, cached = _read(source, run, use, on_step, target)
    assert body is not None
    fetched, body, begin = (body.nbytes, seconds, cached), part_of(run, body), time.thread_time()
    parts, left = [body], memoryview(bytearray())
    if in_worker() and (total := field.decoded_bytes(run, body)):  # one message instead of one for each chunk
        parts.append(left := memoryview(allocate(total)))

    def keep(size: int) -> memoryview:
        nonlocal left
        if size <= len(left):
            taken, left = left[:size], left[size:]
            return taken
        parts.append(memoryview(allocate(size)))
        return parts[-1]

    table = np.zeros((stop - start, 2), np.int64)
    used, rows = set(), []
    for row, items in field.decode(run, body, None, start, keep) or ():
        locate_items(all_bytes(), table, row, items)
        if run.rows is None:
            rows += [max(row, 0), min(row + len(items), len(table))]
        at = address(items.buffer)
        used |= {number for number, part in enumerate(parts) if 0 <= at - address(part) < part.nbytes}
    written: RowIndex = slice(min(rows, default=0), max(rows, default=0)) if run.rows is None else run.rows - start
    return fetched, sorted(used), (written, table[written]), time.thread_time() - begin
