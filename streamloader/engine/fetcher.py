"""Loads blocks from the store into their slots (ranged read, verify, decode) on daemon threads.

A block is divided into *pieces*, the runs of its fields. Each piece is one request, and requests run concurrently. A
piece holds one of the places that `Pace` allows until it is in its slot. If its request is late, a second one is sent
under the same place. The first response is decoded and the other is dropped on arrival: a blocking read cannot be
cancelled, so it keeps its thread until then. There are never more bodies in memory than threads.

Two classes without threads and I/O decide how many requests may be in flight, and which are late:

`Pace` allows more requests while that pays, and half as many after a 503. A *round* measures one limit: requests that
began under the previous limit are skipped, the next ones give bytes per second and mean seconds. An increase is kept if
it pays (`_pays`), else undone and retried with half the step; if no step pays, the limit stays for a while. Rounds
count only while requests wait for a place, since a limit that is not reached cannot be measured.

`Hedging` follows Dean and Barroso, The Tail at Scale (2013): a second request after the 95th percentile of the usual
time costs little and cuts the tail. Requests differ in size, so times are divided by the expected time of the size:
first byte + bytes / rate is proportional to FIRST_BYTE + bytes, with FIRST_BYTE in bytes.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import address
from streamloader.engine.dataset import Dataset, SampleNumbers
from streamloader.engine.executor import Callback, Executor, all_bytes, arena_bytes, in_worker
from streamloader.engine.memory import NO_SLOT, TOLERANCE_BYTES, Memory, in_slots, place_items
from streamloader.engine.regions import BlockRegions
from streamloader.engine.stages import Job, WorkerThreads
from streamloader.errors import (
    CorruptError,
    EngineError,
    StorageError,
    StreamloaderError,
    ThrottledError,
    TransientError,
    wrapped,
)
from streamloader.format.opening import reread
from streamloader.format.reader import FieldReader, Run
from streamloader.order.schedule import BlockRef
from streamloader.storage.buffers import Allocate
from streamloader.storage.store import Store
from streamloader.zarr.columns import BlockArrays, RegionReader
from streamloader.zarr.reader import ABSENT, ArrayRun

NEVER = float("inf")


@dataclass(slots=True, eq=False)
class LoadingBlock:
    """A block that is loading, numbered within its dataset. `left` pieces are missing; `error` is the first error.

    Bytes of decoded chunks: `expected` is an estimate from the chunk table, `held` is in memory.
    """

    dataset: Dataset
    ref: BlockRef
    left: int
    expected: int = 0
    held: int = 0
    error: StreamloaderError | None = None


@dataclass(slots=True, eq=False)
class Piece:
    """A run of a block that is loading: request number 0, and `hedges` more.

    `requests`: the number that are in flight or wait for a thread. `fresh`: none was sent yet. `sent`: when the latest
    was sent, or `NEVER` if none can be late. `writer`: the number of the request whose body is being decoded.
    `unpacked`: the bytes decoded so far, which `LoadingBlock.held` includes. `finished`: it is in its
    slot, or has failed.
    """

    block: LoadingBlock
    field: FieldReader | RegionReader
    run: Any
    requests: int = 1
    hedges: int = 0
    fresh: bool = True
    sent: float = NEVER
    unpacked: int = 0
    writer: int | None = None
    finished: bool = False
    error: StreamloaderError | None = None


# How often a waiting consumer checks for late requests.
CHECK_SECONDS = 0.05
# A request that times out is not alone if others count as late only after this time.
SLOW_SECONDS = 5.0


class PassEnded(EngineError):  # noqa: N818 - no failure
    """The pass was ended. Within the fetcher it also ends a request that another one was faster than."""

    def __init__(self) -> None:
        super().__init__(
            "this pass was ended by a later iter(), load_state_dict() or close()", "iterate one pass at a time"
        )


def sleeper(closed: threading.Event) -> Callable[[float], None]:
    """Return a sleep function that raises `PassEnded` once `closed` is set."""

    def sleep(seconds: float) -> None:
        if closed.wait(seconds):
            raise PassEnded

    return sleep


class Fetcher:
    """Loads admitted blocks with up to `budget.threads` concurrent requests; one consumer waits for blocks."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        names: Sequence[str],
        limits: tuple[Pace, Hedging],
        memory: Memory,
        executor: Executor,
    ) -> None:
        self._executor = executor
        self._shared = {
            (dataset, name): (executor.share(dataset.reader(name)), executor.share(dataset.store))
            for dataset in datasets
            for name in names
        }
        self._tables = {name: executor.share(rows) for name, rows in memory.blocks.fixed.items()} | {
            name: executor.share(chunks.table) for name, chunks in memory.blocks.chunks.items()
        }
        self._datasets = datasets
        self._starts = SampleNumbers.of(datasets).selected_from
        self._names = names
        self._memory, self._bodies = memory.blocks, memory.bodies
        # rows of batches are counted as slots are, and memory that is kept apart
        counted = [] if self._memory.fills_batches or self._memory.keeps else names
        self._by_items = [name for name in counted if not in_slots(datasets[0].layouts[name])]
        self._budget = budget = memory.budget
        self.needed = 0  # bytes of the blocks in use: a batch has waited for them, and later ones still need them
        self._last_weight = -1, 0  # the ticket of the next block, and its weight
        self._expected = 0  # bytes of blocks that are loading
        self._unpacking: list[int] = []  # tickets of the pieces that wait for memory to decode into
        self._counters = memory.counters
        self.pace, self._hedging = limits
        self.pace.allow(budget.threads)
        self._blocks: dict[int, LoadingBlock] = {}
        self._pieces: set[Piece] = set()
        self._changed = threading.Condition()
        # wait for a place: those of earlier blocks first, since later ones may wait for memory that these free
        self._pending: list[tuple[int, int, Job]] = []
        self._numbers = count()
        self._hedges: deque[Job] = deque()  # have a place, wait for a thread
        self._places = self._busy = self._writers = 0  # places taken, busy threads, pieces being decoded
        self._awaited = -1  # the ticket that the consumer waits for
        self._checked_at = 0.0
        self._failure: StreamloaderError | None = None
        self._closed = threading.Event()
        self.sleep = sleeper(self._closed)
        self._workers = WorkerThreads("fetch", budget.threads, started=0)

    def _weight(self, ref: BlockRef) -> int:
        """Return the estimated bytes of the block's decoded chunks in memory."""
        if not self._by_items or self._last_weight[0] == ref.ticket:
            return self._last_weight[1]
        dataset, block = self._locate(ref)
        weight = 0
        try:
            with dataset.store.retries.waits_by(self.sleep):
                for name in self._by_items:
                    weight += dataset.block_bytes(name, block.start, block.stop)
        except StreamloaderError:
            weight = 0  # loading fails too, and then the error belongs to the batch that needs the block
        self._last_weight = ref.ticket, weight
        return weight

    def fits(self, ref: BlockRef, *, batches_grow: bool) -> bool:
        """Return whether a block of the expected size fits into memory.

        `batches_grow`: the size of later batches is unknown, so blocks ahead get a part of the memory only.
        """
        most = self._bodies.most
        if batches_grow:
            most = min(most, self.needed + ahead_limit(most))
        return self._bodies.used + self._expected + self._weight(ref) <= most

    def reserve_for_batches(self, size: int) -> int:
        """Leave `size` bytes to finished batches from now on; return the bytes of all blocks, loading ones included."""
        self._bodies.limit(min(self._bodies.most, self._budget.body_bytes - size))
        with self._changed:  # `used` includes bodies of loading blocks, so `_expected` would count these twice
            blocks = sum(max(block.held, block.expected if block.left else 0) for block in self._blocks.values())
        return max(blocks, self._bodies.used)

    def check(self, ref: BlockRef) -> None:
        """Raise `MemoryBudgetError` if a block does not fit in addition to those in use."""
        self._budget.check(self.needed + self._weight(ref))

    def load(self, ref: BlockRef) -> None:
        """Begin to load a block whose slot has been reserved."""
        weight = self._weight(ref)
        dataset, local = self._locate(ref)
        names = self._memory.open_kept(local, dataset.region_readers) if self._memory.keeps else self._names
        block = LoadingBlock(dataset, local, len(names), weight)
        with self._changed:
            self._blocks[ref.ticket] = block
            if self._closed.is_set() or not names:
                return
            self._expected += weight
            self._queue(ref.ticket, (partial(self._load_field, block, name) for name in names))

    def wait(self, ticket: int) -> StreamloaderError | None:
        """Wait until the block is complete, then count it as in use. Return its error, once. Stops early when closed.

        The error is a `MemoryBudgetError` if the block does not fit in addition to the others.
        """
        with self._changed:
            block = self._blocks[ticket]
            self._awaited = ticket
            if self._unpacking:
                self._changed.notify_all()
            while block.left and not self._failure and not self._closed.is_set():
                self._changed.wait(CHECK_SECONDS)
                self._hedge_late()
            self._awaited = -1
            if self._failure is not None:
                return self._failure
            self.needed += block.held
            error, block.error = block.error, None  # its traceback may hold the block
            if error is None and not self._closed.is_set():
                self._memory.complete(ticket)
            return error

    def forget(self, ticket: int) -> None:
        """Remove a block that was in use and is released."""
        with self._changed:  # threads that wait for memory iterate over the blocks
            self.needed -= self._blocks.pop(ticket).held

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
            self._changed.notify_all()
        self._workers.close()

    def join(self, seconds: float) -> bool:
        """After `close`, wait at most `seconds` until no thread writes to the arena; return whether none does.

        Does not wait for requests: their responses are dropped.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._writers, seconds)

    def _locate(self, ref: BlockRef) -> tuple[Dataset, BlockRef]:
        """Return the dataset of a block, and the block numbered within that dataset."""
        index = bisect_right(self._starts, ref.start) - 1
        first = self._starts[index]
        return self._datasets[index], ref._replace(start=ref.start - first, stop=ref.stop - first)

    def _queue(self, ticket: int, jobs: Iterable[Job]) -> None:
        """Queue the jobs of a block. Requires the lock."""
        for job in jobs:
            heappush(self._pending, (ticket, next(self._numbers), job))
        self._dispatch()

    def _dispatch(self) -> None:
        """Submit jobs while places and threads are free. Requires the lock."""
        while self._busy < self._budget.threads and not self._closed.is_set():
            if self._hedges:
                job = self._hedges.popleft()
            elif self._pending and self._places < self.pace.limit:
                job = heappop(self._pending)[2]
                self._places += 1
            else:
                return
            self._busy += 1
            self._workers.grow(self._busy)
            self._workers.submit(job, self.fail)

    def _end_piece(self, block: LoadingBlock, error: StreamloaderError | None) -> None:
        """Free the place of a piece that is in its slot or has failed. Requires the lock."""
        self._places -= 1
        block.error = block.error or error
        block.left -= 1
        if not block.left:
            self._expected -= block.expected
            if self._unpacking or self._awaited == block.ref.ticket:
                self._changed.notify_all()

    def _load_field(self, block: LoadingBlock, name: str) -> None:
        """Divide a field of a block into pieces, queue them, and load the first."""
        try:
            with block.dataset.store.retries.waits_by(self.sleep):
                claims = self._memory.claims(name, block.ref.ticket)
                runs = block.dataset.runs(name, block.ref.start, block.ref.stop, claims)
        except BaseException as error:  # noqa: BLE001 - a batch waits for the block, so it must finish
            with self._changed:
                self._busy -= 1
                self._end_piece(block, wrapped(error, f"reading the chunk table of field {name!r}"))
                self._dispatch()
            return
        pieces = [Piece(block, block.dataset.reader(name), run) for run in runs]
        with self._changed:
            block.left += len(pieces) - 1
            self._pieces.update(pieces)
            if not self._closed.is_set():
                self._queue(block.ref.ticket, (partial(self._load_piece, piece, 0) for piece in pieces[1:]))
        self._load_piece(pieces[0], 0)

    def _load_piece(self, piece: Piece, number: int) -> None:
        loaded, error = False, None
        try:
            with piece.block.dataset.store.retries.waits_by(self.sleep):
                self._fill(piece, number)
            loaded = True
        except PassEnded:
            pass
        except BaseException as problem:  # noqa: BLE001 - a batch waits for the piece, so it must finish
            first, count = piece.run.first_sample, piece.run.num_samples
            error = wrapped(problem, f"reading field {piece.field.name!r} of samples {first} to {first + count - 1}")
        with self._changed:
            self._busy -= 1
            piece.requests -= 1
            if piece.writer == number:
                self._end_decoding(piece)
            if not piece.finished:
                piece.error = piece.error or error
                if loaded or not piece.requests:
                    piece.finished = True
                    self._pieces.remove(piece)
                    self._end_piece(piece.block, None if loaded else piece.error)
                    piece.error = None  # its traceback may hold the piece
            self._dispatch()
        del error  # its traceback holds this frame

    def _fill(self, piece: Piece, number: int) -> None:
        """Fetch a piece and decode it into its slot."""
        slot = self._memory.claim(piece.block.ref.ticket)
        if slot == NO_SLOT:
            raise PassEnded
        decode = self._decode_regions if isinstance(piece.field, RegionReader) else self._decode_rows
        reread(lambda: decode(piece, slot, self._fetch(piece, number)), partial(self._damaged, piece))

    def _decode_rows(self, piece: Piece, slot: int, body: memoryview | None) -> None:
        """Decode a body into the rows of a slot, or into chunks to which these refer."""
        name, ref, layout = piece.field.name, piece.block.ref, piece.field.layout
        assert body is not None
        field, _ = self._shared[piece.block.dataset, name]
        low, memory = slot * self._memory.block, [body]
        place = (*self._memory.arena.span(body), low, low + ref.stop - ref.start, ref.start)
        given = field, piece.run, place, self._tables[name]
        if in_slots(layout):
            seconds = self._executor.call(decode_rows, *given)
        else:
            allocate = Callback(partial(self._allocate, piece, memory))
            restart = partial(self._restart_decoding, piece, memory)
            used, seconds = self._executor.call(decode_chunks, *given, allocate, on_repeat=restart)
            kept = [memory[number] for number in used]
            self._memory.chunks[name].keep(slot, kept)
            with self._changed:
                piece.block.held += sum(part.nbytes for part in kept) - piece.unpacked
                piece.unpacked = 0
        decoded = piece.run.num_samples * layout.field.item_bytes if layout.field.fixed else 0
        self._counters.add(unpack_seconds=seconds, bytes_decoded=decoded)

    def _decode_regions(self, piece: Piece, slot: int, body: memoryview | None) -> None:
        """Decode the chunks of a body into the regions of their block.

        Their size is known before, so the block is admitted only if they fit. They are opened only once a body has
        arrived: until then another request may complete the block, whose slot then goes to another one.
        """
        block, ref, reader = piece.block, piece.block.ref, piece.field
        assert isinstance(reader, RegionReader)
        allocate = self._bodies.allocate if self._memory.fills_batches else partial(self._allocate_region, block)
        opened = partial(BlockRegions, reader, ref.start, ref.stop, allocate)
        regions, first = self._memory.open_regions(reader.name, ref.ticket, slot, opened)
        if first:  # the block is complete only after this piece
            reader.write_constants(BlockArrays(regions.arrays, regions.bounds))
            self._memory.keep_rows(reader.name, slot, regions)
        field, _ = self._shared[block.dataset, reader.name]
        given = field, piece.run, body, regions.targets, Callback(self._bodies.allocate)
        missing, decoded, seconds = self._executor.call(decode_regions, *given)
        self._counters.add(unpack_seconds=seconds, bytes_decoded=decoded, missing_chunks=missing)

    def _allocate_region(self, block: LoadingBlock, size: int) -> memoryview:
        with self._changed:  # from now on, the memory in use includes it
            block.held += size
            block.expected -= size
            self._expected -= size
        return self._bodies.allocate(size)

    def _allocate(self, piece: Piece, memory: list[memoryview], size: int) -> memoryview:
        """Return memory to decode into, and append it to `memory`.

        Blocks ahead wait, in their order, until it fits: only bodies state this size.

        A block that a batch waits for gets it at once. Raises `PassEnded` once closed, and `MemoryBudgetError`.
        """
        block = piece.block
        ticket = block.ref.ticket
        with self._changed:
            self._unpacking.append(ticket)
            self._places -= 1  # a later piece that waits here must not delay the request of an earlier one
            while not (ticket <= self._awaited or self._closed.is_set()):
                if ticket == min(self._unpacking) and self._fits_ahead(ticket, size):
                    break
                self._dispatch()
                self._changed.wait(CHECK_SECONDS)
            self._unpacking.remove(ticket)
            self._places += 1
            if self._closed.is_set():
                raise PassEnded
            if ticket <= self._awaited:
                self._budget.check(self.needed + block.held + size)
            piece.unpacked += size
            block.held += size
            memory.append(self._bodies.allocate(size))
            return memory[-1]

    def _fits_ahead(self, ticket: int, size: int) -> bool:
        """Return whether a block ahead may decode `size` bytes now. Requires the lock.

        Most of the memory is left for an earlier block, whose decoded size is unknown until its body arrives.
        """
        if self._bodies.used + size > self._bodies.most:
            return False
        oldest = min((number for number, block in self._blocks.items() if block.left), default=ticket)
        later = sum(block.held for number, block in self._blocks.items() if number > oldest)
        return not self._budget.exact or ticket <= oldest or later + size <= ahead_limit(self._bodies.most)

    def _damaged(self, piece: Piece) -> None:
        with self._changed:
            self._end_decoding(piece)
        self._counters.add(retries=1)

    def _restart_decoding(self, piece: Piece, memory: list[memoryview]) -> None:
        """Count the decoded bytes of a piece anew, since its decoding is repeated."""
        del memory[1:]
        with self._changed:
            piece.block.held -= piece.unpacked
            piece.unpacked = 0

    def _end_decoding(self, piece: Piece) -> None:
        """Record that the body of a piece is decoded or discarded. Requires the lock."""
        piece.writer = None
        piece.block.held -= piece.unpacked
        piece.unpacked = 0
        self._writers -= 1
        if self._closed.is_set():
            self._changed.notify_all()

    def _fetch(self, piece: Piece, number: int) -> memoryview | None:
        """Return the body of a piece, None if its object is missing, and make the caller its only decoder.

        Raises `PassEnded` if it is not needed.
        """
        request = partial(self._request, piece, number)
        retries = piece.block.dataset.store.retries
        body = request() if number else retries.call(request, on_retry=partial(self._count_retry, piece))
        with self._changed:
            if piece.finished or piece.writer is not None or self._closed.is_set():
                raise PassEnded
            piece.writer = number
            self._writers += 1
        return body

    def _request(self, piece: Piece, number: int) -> memoryview | None:
        """Return the response to one request, and record its time."""
        if piece.finished or self._closed.is_set():
            raise PassEnded
        self._counters.add(requests=int(piece.run.stop > 0), hedges=int(number > 0))
        field, store = self._shared[piece.block.dataset, piece.field.name]
        self._executor.prepare(open_reader, field, store)
        begin = time.perf_counter()
        if number or piece.fresh:
            piece.fresh, piece.sent = False, begin
        try:
            memory: list[memoryview] = []
            run, on_repeat = piece.run, Callback(partial(self._counters.add, requests=1))
            target: Callback | memoryview = Callback(partial(self._allocate_body, memory))
            if isinstance(piece.field, FieldReader):
                run = run._replace(sizes=None, crcs=None, picks=None)  # slow to send, and not needed to read
                if self._executor.workers:  # saves a message
                    target = self._allocate_body(memory, run.stop - run.start)
            size = self._executor.call(fetch_body, field, store, run, on_repeat, target)
        except TransientError as error:
            # a timeout too, if others are slow as well: fewer requests leave each of them more of a slow connection
            usual = self._hedging.deadline(piece.run.stop - piece.run.start)
            late = isinstance(error.__cause__, TimeoutError) and usual > SLOW_SECONDS
            if late or isinstance(error, ThrottledError):
                self.pace.throttled()
            raise
        piece.sent = NEVER
        seconds = time.perf_counter() - begin
        count = size or 0
        self._hedging.completed(count, seconds)
        self.pace.completed(count, seconds, bool(self._pending))
        self._counters.add(bytes_fetched=count, request_seconds=seconds)
        self._counters.note(in_flight=self.pace.limit)
        return None if size is None else memory[-1][:size]

    def _allocate_body(self, memory: list[memoryview], size: int) -> memoryview:
        memory.append(self._bodies.allocate(size))
        return memory[-1]

    def _count_retry(self, piece: Piece, _error: StorageError, _delay: float) -> None:
        piece.sent = NEVER
        self._counters.add(retries=1)

    def _hedge_late(self) -> None:
        """Repeat late requests, the earliest first, as far as hedges are saved up. Requires the lock."""
        now = time.perf_counter()
        if now - self._checked_at < CHECK_SECONDS or self.pace.throttling or self._closed.is_set():
            return
        self._checked_at = now
        late = [p for p in self._pieces if now - p.sent > self._hedging.deadline(p.run.stop - p.run.start)]
        for piece in sorted(late, key=lambda piece: piece.sent):
            if not self._hedging.withdraw():
                break
            piece.sent = NEVER
            piece.requests += 1
            piece.hedges += 1
            self._hedges.append(partial(self._load_piece, piece, piece.hedges))
        self._dispatch()


def open_reader(_field: FieldReader | RegionReader, store: Store) -> None:
    """Import what reading needs, and open the client."""
    store.reader()


def fetch_body(
    field: FieldReader | RegionReader, store: Store, run: Any, on_repeat: Callable[[], None], target: Any
) -> int | None:
    """Read the bytes of a run by one request into a target, memory or a function `allocate(size)`.

    Return their number, None if the object is missing.
    """
    store.retries.reached = True  # the manifest was read from this store, maybe in another process
    reader = replace(store.reader(), on_repeat=on_repeat)
    memory: list[memoryview] = []

    def keep(size: int) -> memoryview:
        memory.append(memoryview(target(size)) if callable(target) else target[:size])
        return memory[-1]

    body = field.fetch(reader, run, keep)
    if body is ABSENT:
        return None
    if not memory or address(body) != address(memory[-1]):  # the client allocated it
        part = keep(body.nbytes)
        if len(part) < body.nbytes:
            raise CorruptError(f"{body.nbytes} bytes of {run.path} were received, expected {len(part)}")
        part[:] = body
    return body.nbytes


# A body's first byte in the arena and its size; the first row of its slot and the end, in the arrays of all slots; and
# the number of the slot's first sample.
Place = tuple[int, int, int, int, int]


def decode_rows(field: FieldReader, run: Run, place: Place, out: NDArray[Any]) -> float:
    """Decode a body into the rows of a slot; return the processor time."""
    begin, (start, size, low, high, first) = time.thread_time(), place
    field.decode(run, arena_bytes(start, size), out[low:high], first)
    return time.thread_time() - begin


def decode_chunks(
    field: FieldReader, run: Run, place: Place, table: NDArray[np.int64], allocate: Allocate
) -> tuple[list[int], float]:
    """Decode a body into memory from `allocate`, and write where its items are to the rows of a slot.

    Return which of (the body, *the allocated memory) have the items, and the processor time.
    """
    begin, (start, size, low, high, first) = time.thread_time(), place
    parts, left = [arena_bytes(start, size)], memoryview(bytearray())
    if in_worker() and (total := field.decoded_bytes(run, parts[0])):  # one message instead of one for each chunk
        parts.append(left := memoryview(allocate(total)))

    def keep(size: int) -> memoryview:
        nonlocal left
        if size <= len(left):
            taken, left = left[:size], left[size:]
            return taken
        parts.append(memoryview(allocate(size)))
        return parts[-1]

    used = set()
    for row, items in field.decode(run, parts[0], None, first, keep) or ():
        place_items(all_bytes(), table[low:high], row, items)
        at = address(items.buffer)
        used |= {number for number, part in enumerate(parts) if 0 <= at - address(part) < part.nbytes}
    return sorted(used), time.thread_time() - begin


def decode_regions(
    field: RegionReader, run: ArrayRun, body: memoryview | None, block: BlockArrays, allocate: Allocate
) -> tuple[int, int, float]:
    """Decode the chunks of a body into the regions of its block; return (missing, decoded bytes, processor time)."""
    begin = time.thread_time()
    missing, decoded = field.write(run, ABSENT if body is None else body, block, allocate)
    return missing, decoded, time.thread_time() - begin


def ahead_limit(most: float) -> float:
    """Return the bytes of `most` that blocks ahead may take if an earlier block or batch may be larger than planned."""
    return max(TOLERANCE_BYTES, most // 4)


# The initial limit saturates a server on the same machine; three rounds later it may be 64.
FIRST = 16
# The minimum of a round, so that neither one slow request nor one short moment decides.
ROUND_REQUESTS = 16
ROUND_SECONDS = 0.1
# A step pays if it gains this share of what it would gain if requests did not share bandwidth.
OWN_SPEED = 0.7
# It also pays if it gains this much, unless requests take this many times their shortest mean time: then half of them
# queue, as at twice the bandwidth-delay product (Cardwell et al., BBR, 2016), and one rank gains what another loses.
LEAST_GAIN = 0.05
MOST_QUEUEING = 2.0
# Rounds without an attempt after no step paid; a round takes about three times as long as a request.
HOLD_ROUNDS = 16
# The minimum time between two decreases, so that a burst of 503s counts once. A store counts as throttling for as long.
DECREASE_SECONDS = 1.0
# After a 503 the limit stays below this share of the limit that caused it, for this many seconds.
BELOW_THROTTLE = 0.9
THROTTLE_MEMORY_SECONDS = 30.0


class Pace:
    """The limit of requests in flight, from 1 to `most`. Thread-safe; passes share it, so the next one starts well.

    Increases by measured steps, decreases multiplicatively (Chiu and Jain, 1989) at most once a second.
    """

    def __init__(self, most: int, first: int = FIRST, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._most = most
        self._first = first
        self._limit = min(first, most)
        self._kept = self._limit  # the limit before the present step, and its bytes per second
        self._kept_rate = 1.0
        self._step = self._limit
        self._hold = 0
        self._best_seconds = float("inf")
        self._decreased_at = self._throttled_at = -THROTTLE_MEMORY_SECONDS
        self._ceiling = most
        self._succeeded = True  # since the last decrease
        self._new_round()

    @property
    def limit(self) -> int:
        """The number of requests that may be in flight."""
        return self._limit

    @property
    def throttling(self) -> bool:
        """Whether the store throttled a request within the last second."""
        return self._clock() - self._throttled_at < DECREASE_SECONDS

    def allow(self, most: int) -> None:
        """Set the maximum that memory allows."""
        with self._lock:
            self._most = most
            if self._limit > most:
                self._set_limit(most)

    def completed(self, size: int, seconds: float, waiting: bool) -> None:
        """Record a request of `size` bytes that took `seconds`; `waiting`: others wait for its place."""
        with self._lock:
            self._succeeded = True
            if not waiting:
                self._new_round()
                return
            if self._skipped < self._limit:
                self._skipped += 1
                self._begin = self._clock()
                return
            self._bytes += size
            self._seconds += seconds
            self._count += 1
            elapsed = self._clock() - self._begin
            if self._count >= max(ROUND_REQUESTS, 2 * self._limit) and elapsed >= ROUND_SECONDS:
                self._judge(self._bytes / elapsed, self._seconds / self._count)
                self._new_round()

    def throttled(self) -> None:
        """Halve the limit after a throttled request, at most once a second.

        Not again before a request succeeds: failures of an outage do not show how many requests the store accepts.
        """
        with self._lock:
            now = self._throttled_at = self._clock()
            if not self._succeeded or now - self._decreased_at < DECREASE_SECONDS:
                return
            self._decreased_at, self._succeeded = now, False
            self._ceiling = max(1, int(self._limit * BELOW_THROTTLE))
            self._set_limit(max(1, self._limit // 2))
            self._step = max(1, self._limit // 2)
            self._new_round()

    def _new_round(self) -> None:
        self._skipped = 0
        self._begin = 0.0
        self._count = 0
        self._bytes = 0
        self._seconds = 0.0

    def _judge(self, rate: float, seconds: float) -> None:
        """End a round: keep or undo the step that it measured, and begin the next step."""
        if self._limit >= self._first:
            self._best_seconds = min(self._best_seconds, seconds)
        if self._limit == self._kept:
            self._kept_rate = max(1.0, rate)
            self._hold = max(0, self._hold - 1)
            if not self._hold:
                self._increase()
        elif self._pays(rate, seconds):
            self._set_limit(self._limit)
            self._kept_rate = max(1.0, rate)
            self._step *= 2
            self._increase()
        else:
            self._set_limit(self._kept)
            self._step //= 2
            if self._step < max(1, self._kept // 8):
                self._hold = HOLD_ROUNDS
                self._step = max(1, self._kept // 4)

    def _pays(self, rate: float, seconds: float) -> bool:
        if self._limit <= self._first:
            return True
        gain = rate / self._kept_rate - 1
        if gain >= OWN_SPEED * (self._limit / self._kept - 1):
            return True
        return gain >= LEAST_GAIN and seconds <= MOST_QUEUEING * self._best_seconds

    def _increase(self) -> None:
        most = self._most
        if self._clock() - self._decreased_at < THROTTLE_MEMORY_SECONDS:
            most = min(most, self._ceiling)
        self._limit = max(self._kept, min(most, self._kept + self._step))

    def _set_limit(self, limit: int) -> None:
        self._limit = self._kept = limit


# The latency in bytes of transfer: 30 ms at 70 MB/s. For a store with a lower or higher value, small or large requests
# count as late later than they should, never earlier.
FIRST_BYTE = 2 << 20
# The number of times before any request counts as late, and the number of recent times that are kept.
LEAST_SAMPLES = 100
SAMPLES = 512
# The quantile is computed again after this many times.
REFRESH = 32
QUANTILE = 0.95
# By definition 5 % of all requests exceed the quantile; hedging these would leave no hedges for requests that stall.
MARGIN = 2.0
# Shorter delays come from this machine, not from the store.
LEAST_SECONDS = 0.5
# This many requests earn one hedge, and at most this many hedges are saved up.
REQUESTS_A_HEDGE = 30
MOST_SAVED = 10.0


class Hedging:
    """The usual time of a request, and the number of hedges saved up. Thread-safe; passes share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[float] = deque(maxlen=SAMPLES)  # seconds / (FIRST_BYTE + bytes)
        self._count = 0
        self._usual = float("inf")
        self._saved = 0.0

    def completed(self, size: int, seconds: float) -> None:
        """Record a request of `size` bytes that took `seconds`."""
        with self._lock:
            self._samples.append(seconds / (FIRST_BYTE + size))
            self._count += 1
            self._saved = min(MOST_SAVED, self._saved + 1 / REQUESTS_A_HEDGE)
            if self._count == LEAST_SAMPLES or (self._count > LEAST_SAMPLES and self._count % REFRESH == 0):
                self._usual = sorted(self._samples)[int(QUANTILE * len(self._samples))]

    def deadline(self, size: int) -> float:
        """Return the seconds after which a request of `size` bytes is late; infinity before 100 requests."""
        return max(LEAST_SECONDS, MARGIN * self._usual * (FIRST_BYTE + size))

    def withdraw(self) -> bool:
        """Use one hedge; return False if none is saved up."""
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            return True
