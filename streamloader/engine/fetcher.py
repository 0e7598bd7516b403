"""Blocks from the store into their slots: ranged read, verify, decode, on daemon threads.

A block is cut in *pieces*, the runs of its fields: each is one request, and they are sent side by side. A piece holds
one of the places that `Pace` allows until it is in its slot. Where its request is late, a second one is sent in its
place. The first that completes is decoded, and the other is dropped when it comes: a blocking read cannot be cancelled,
so it keeps its thread till then. There are never more bodies in memory than threads.

How many requests may be in flight, and which are late, is decided without threads and I/O:

`Pace`: more requests while that pays, half as many after a 503. A *round* measures one limit: the requests that were
begun under the limit before are skipped, the next ones give bytes per second and mean seconds. A step up is kept if it
pays (`_pays`), else undone and tried again half as long; when no step pays, the limit holds for a while. Rounds count
only while requests wait for a place: a limit that is not reached gives no measurement.

`Hedging`: Dean and Barroso, The Tail at Scale (2013): a second request after the 95th percentile of the usual time
costs little and cuts the tail. Requests differ in size, so times are compared after division by the time that the size
explains: first byte + bytes / rate is proportional to FIRST_BYTE + bytes, with FIRST_BYTE in bytes.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from streamloader.engine.dataset import Dataset
from streamloader.engine.memory import NO_SLOT, TOLERANCE_BYTES, Budget, Memory
from streamloader.engine.stages import Job, WorkerThreads
from streamloader.errors import EngineError, StorageError, StreamloaderError, ThrottledError, TransientError, wrapped
from streamloader.format.reader import FieldReader, Run
from streamloader.order.schedule import BlockRef
from streamloader.stats import Counters

NEVER = float("inf")


@dataclass(slots=True, eq=False)
class LoadingBlock:
    """A block that is loading, in its dataset's numbers: `left` pieces are missing; `error` is the first that failed.

    `expected` bytes of variable-size fields are estimated from the chunk table, `held` are there.
    """

    dataset: Dataset
    ref: BlockRef
    left: int
    expected: int = 0
    held: int = 0
    error: StreamloaderError | None = None


@dataclass(slots=True, eq=False)
class Piece:
    """A run of a block that is loading, by its first request, number 0, and `hedges` more where that is late.

    `requests` are under way or wait for a thread. `fresh`: none was sent yet. `sent`: when the latest went out, `NEVER`
    where there is none to be late. `writer`: the number of the one whose body is being decoded, since `body_at`, in
    processor time of its thread. `unpacked`: bytes that it was decoded to so far, which `LoadingBlock.held` includes.
    `over`: it is in its slot, or has failed.
    """

    block: LoadingBlock
    field: FieldReader
    run: Run
    requests: int = 1
    hedges: int = 0
    fresh: bool = True
    sent: float = NEVER
    body_at: float = 0.0
    unpacked: int = 0
    writer: int | None = None
    over: bool = False
    error: StreamloaderError | None = None


# How often a waiting consumer looks for late requests.
LOOK_SECONDS = 0.05


class Dropped(EngineError):  # noqa: N818 - no failure
    """Ends a request that is of no use any more: another was faster, or the pass was ended."""

    def __init__(self) -> None:
        super().__init__("this pass was ended while it read the dataset", "iterate one pass at a time")


def sleeper(closed: threading.Event) -> Callable[[float], None]:
    """Return a sleep that raises `Dropped` once `closed` is set; it holds nothing else."""

    def sleep(seconds: float) -> None:
        if closed.wait(seconds):
            raise Dropped

    return sleep


class Fetcher:
    """Loads admitted blocks by up to `threads` requests, and lets one consumer wait for the block it needs."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        names: Sequence[str],
        limits: tuple[Pace, Hedging],
        memory: Memory,
        *,
        budget: Budget,
        counters: Counters,
    ) -> None:
        self._datasets = datasets
        self._starts = list(accumulate((one.num_samples for one in datasets[:-1]), initial=0))
        self._names = names
        self._variable = [name for name in names if not datasets[0].fields[name].fixed]
        self._arena, self._bodies = memory.arena, memory.bodies
        self._threads = budget.threads
        self._budget = budget
        self.needed = 0  # bytes of the blocks in use: batches have waited for them, and later ones still need them
        self._weighed = -1, 0  # the ticket of the block that comes next, and its weight
        self._expected = 0  # bytes of blocks that are loading
        self._unpacking: list[int] = []  # tickets of the pieces that ask for memory to decode into
        self._counters = counters
        self._pace, self._hedging = limits
        self._pace.allow(budget.threads)
        self._blocks: dict[int, LoadingBlock] = {}
        self._pieces: set[Piece] = set()
        self._changed = threading.Condition()
        self._pending: deque[Job] = deque()  # wait for a place
        self._hedges: deque[Job] = deque()  # have one, wait for a thread
        self._places = self._busy = self._writers = 0  # places taken, threads at work, slots written to
        self._awaited = -1
        self._looked = 0.0
        self._failure: StreamloaderError | None = None
        self._closed = threading.Event()
        self.sleep = sleeper(self._closed)
        self._workers = WorkerThreads("fetch", budget.threads, started=0)

    @property
    def limit(self) -> int:
        """The requests that may be in flight now."""
        return self._pace.limit

    def _weight(self, ref: BlockRef) -> int:
        """Return about how many bytes the block's variable-size fields take in memory."""
        if not self._variable or self._weighed[0] == ref.ticket:
            return self._weighed[1]
        dataset, own = self._find(ref)
        layouts, weight = dataset.layouts, 0
        try:
            with dataset.store.retries.waits_by(self.sleep):
                for name in self._variable:
                    stored = sum(
                        int((run.stop - run.start) * run.share) for run in dataset.runs(name, own.start, own.stop)
                    )
                    weight += stored * max(1, layouts[name].nbytes) // max(1, layouts[name].stored)
        except StreamloaderError:
            weight = 0  # loading it fails too: the error belongs to the batch that needs it
        self._weighed = ref.ticket, weight
        return weight

    def fits(self, ref: BlockRef, *, batches_grow: bool) -> bool:
        """Return whether a block of the expected size fits into memory.

        `batches_grow`: the size of later batches is unknown, so blocks ahead get a part of the memory only.
        """
        most = self._bodies.most
        if batches_grow:
            most = min(most, self.needed + ahead_bytes(most))
        return self._bodies.used + self._expected + self._weight(ref) <= most

    def reserve_for_batches(self, size: int) -> int:
        """Leave `size` bytes to finished batches from now on; return the bytes of all blocks, loading ones included."""
        self._bodies.limit(min(self._bodies.most, self._budget.body_bytes - size))
        return max(self.needed, self._bodies.used + self._expected)

    def check(self, ref: BlockRef) -> None:
        """Raise `MemoryBudgetError` where a block does not fit beside those in use."""
        self._budget.check(self.needed + self._weight(ref))

    def load(self, ref: BlockRef) -> None:
        """Begin to load a block, for which a slot was reserved."""
        weight = self._weight(ref)
        block = LoadingBlock(*self._find(ref), len(self._names), weight)
        with self._changed:
            self._blocks[ref.ticket] = block
            if self._closed.is_set():
                return
            self._expected += weight
            self._pending.extend(partial(self._load_field, block, name) for name in self._names)
            self._dispatch()

    def wait(self, ticket: int) -> StreamloaderError | None:
        """Wait until the block is complete; return its error, if it has one, once. Stops early when closed.

        It is in use from then on. Where it does not fit beside the others, the error is a `MemoryBudgetError`.
        """
        with self._changed:
            block = self._blocks[ticket]
            self._awaited = ticket
            if self._unpacking:
                self._changed.notify_all()
            while block.left and not self._failure and not self._closed.is_set():
                self._changed.wait(LOOK_SECONDS)
                self._hedge_late()
            self._awaited = -1
            if self._failure is not None:
                return self._failure
            self.needed += block.held
            error, block.error = block.error, None  # its traceback may hold the block
            return error

    def forget(self, ticket: int) -> None:
        """Drop the bookkeeping of a block that was in use and is released."""
        self.needed -= self._blocks.pop(ticket).held

    def fail(self, error: BaseException) -> None:
        """Take an error that belongs to no block: every wait returns it from now on."""
        with self._changed:
            self._failure = self._failure or wrapped(error, "reading the dataset")
            self._changed.notify_all()

    def close(self) -> None:
        """Let the threads end after the request each of them is in."""
        with self._changed:
            self._closed.set()
            self._pending.clear()
            self._hedges.clear()
            self._changed.notify_all()
        self._workers.close()

    def join(self, seconds: float) -> bool:
        """Wait, once closed, until no thread writes to the arena any more; return whether that is so.

        A thread in a request that stalls does not matter: what it brings is dropped.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._writers, seconds)

    def _find(self, ref: BlockRef) -> tuple[Dataset, BlockRef]:
        """Return the dataset of a block, and the block in the numbers of that dataset."""
        found = bisect_right(self._starts, ref.start) - 1
        first = self._starts[found]
        return self._datasets[found], ref._replace(start=ref.start - first, stop=ref.stop - first)

    def _dispatch(self) -> None:
        """Give jobs to threads, as far as places and threads go. Holds the lock."""
        while self._busy < self._threads and not self._closed.is_set():
            if self._hedges:
                job = self._hedges.popleft()
            elif self._pending and self._places < self._pace.limit:
                job = self._pending.popleft()
                self._places += 1
            else:
                return
            self._busy += 1
            self._workers.grow(self._busy)
            self._workers.submit(job, self.fail)

    def _settle(self, block: LoadingBlock, error: StreamloaderError | None) -> None:
        """A piece of the block is there, or has failed: its place is free. Holds the lock."""
        self._places -= 1
        block.error = block.error or error
        block.left -= 1
        if not block.left:
            self._expected -= block.expected
        if not block.left and (self._unpacking or self._awaited == block.ref.ticket):
            self._changed.notify_all()

    def _load_field(self, block: LoadingBlock, name: str) -> None:
        """Cut the field's part of a block in pieces, and load the first."""
        try:
            with block.dataset.store.retries.waits_by(self.sleep):
                runs = block.dataset.runs(name, block.ref.start, block.ref.stop)
        except BaseException as error:  # noqa: BLE001 - a batch waits for the block, whatever happens to it
            with self._changed:
                self._busy -= 1
                self._settle(block, wrapped(error, f"reading the chunk table of field {name!r}"))
                self._dispatch()
            return
        pieces = [Piece(block, block.dataset.readers[name], run) for run in runs]
        with self._changed:
            block.left += len(pieces) - 1
            self._pieces.update(pieces)
            if not self._closed.is_set():
                self._pending.extendleft(partial(self._load_piece, piece, 0) for piece in reversed(pieces[1:]))
                self._dispatch()
        self._load_piece(pieces[0], 0)

    def _load_piece(self, piece: Piece, number: int) -> None:
        done, error = False, None
        try:
            with piece.block.dataset.store.retries.waits_by(self.sleep):
                self._fill(piece, number)
            done = True
        except Dropped:
            pass
        except BaseException as problem:  # noqa: BLE001 - a batch waits for the piece, whatever happens to it
            first, count = piece.run.first_sample, piece.run.num_samples
            error = wrapped(problem, f"reading field {piece.field.name!r} of samples {first} to {first + count - 1}")
        with self._changed:
            self._busy -= 1
            piece.requests -= 1
            if piece.writer == number:
                self._put_down(piece)
            if not piece.over:
                piece.error = piece.error or error
                if done or not piece.requests:
                    piece.over = True
                    self._pieces.remove(piece)
                    self._settle(piece.block, None if done else piece.error)
                    piece.error = None  # its traceback may hold the piece
            self._dispatch()

    def _fill(self, piece: Piece, number: int) -> None:
        """Fetch a piece and decode it into its slot."""
        name, ref, layout = piece.field.name, piece.block.ref, piece.field.layout
        fixed = layout.field.fixed
        slot = self._arena.claim(ref.ticket)
        if slot == NO_SLOT:
            raise Dropped
        rows = self._arena.slot_rows(name, slot, ref.stop - ref.start) if fixed else None
        items = piece.field.load(
            piece.run,
            partial(self._fetch, piece, number),
            rows,
            ref.start,
            allocate=partial(self._allocate, piece),
            on_damage=partial(self._damaged, piece),
        )
        if items is not None:
            items = [(row, replace(some, buffer=self._bodies.adopt(some.buffer))) for row, some in items]
            self._arena.keep(name, slot, items)
            with self._changed:
                piece.block.held += sum(some.buffer.nbytes for _, some in items) - piece.unpacked
                piece.unpacked = 0
        self._counters.add(
            unpack_seconds=time.thread_time() - piece.body_at,
            bytes_decoded=piece.run.num_samples * layout.field.item_bytes if fixed else 0,
        )

    def _allocate(self, piece: Piece, size: int) -> memoryview:
        """Return memory to decode into, whose size only the body tells: for blocks ahead once it fits, in their order.

        A block that a batch waits for gets it at once. Raises `Dropped` once closed, and `MemoryBudgetError`.
        """
        block = piece.block
        ticket = block.ref.ticket
        with self._changed:
            self._unpacking.append(ticket)
            self._places -= 1  # a later piece that waits here must not keep an earlier one from being asked for
            while not (ticket <= self._awaited or self._closed.is_set()):
                if ticket == min(self._unpacking) and self._fits_ahead(ticket, size):
                    break
                self._dispatch()
                self._changed.wait(LOOK_SECONDS)
            self._unpacking.remove(ticket)
            self._places += 1
            if self._closed.is_set():
                raise Dropped
            if ticket <= self._awaited:
                self._budget.check(self.needed + block.held + size)
            piece.unpacked += size
            block.held += size
            return self._bodies.allocate(size)

    def _fits_ahead(self, ticket: int, size: int) -> bool:
        """Return whether a block ahead may decode `size` bytes now. Holds the lock.

        How much an earlier block decodes to is unknown until its body arrives: most of the memory is left for it.
        """
        if self._bodies.used + size > self._bodies.most:
            return False
        oldest = min((number for number, block in self._blocks.items() if block.left), default=ticket)
        later = sum(block.held for number, block in self._blocks.items() if number > oldest)
        return not self._budget.exact or ticket <= oldest or later + size <= ahead_bytes(self._bodies.most)

    def _damaged(self, piece: Piece) -> None:
        with self._changed:
            self._put_down(piece)
        self._counters.add(retries=1, unpack_seconds=time.thread_time() - piece.body_at)

    def _put_down(self, piece: Piece) -> None:
        """The piece's body is decoded or given up. Holds the lock."""
        piece.writer = None
        piece.block.held -= piece.unpacked
        piece.unpacked = 0
        self._writers -= 1
        if self._closed.is_set():
            self._changed.notify_all()

    def _fetch(self, piece: Piece, number: int) -> memoryview:
        """Return the piece's body, for the caller alone to decode; raises `Dropped` where that is of no use."""
        request = partial(self._request, piece, number)
        retries = piece.block.dataset.store.retries
        body = request() if number else retries.call(request, on_retry=partial(self._count_retry, piece))
        with self._changed:
            if piece.over or piece.writer is not None or self._closed.is_set():
                raise Dropped
            piece.writer = number
            self._writers += 1
            piece.body_at = time.thread_time()
        return body

    def _request(self, piece: Piece, number: int) -> memoryview:
        """Return the response to one request, and learn from how long it took."""
        if piece.over or self._closed.is_set():
            raise Dropped
        self._counters.add(requests=1, hedges=int(number > 0))
        begin = time.perf_counter()
        if number or piece.fresh:
            piece.fresh, piece.sent = False, begin
        try:
            body = piece.field.fetch(piece.block.dataset.store.reader(), piece.run, self._bodies.allocate)
        except TransientError as error:
            # late: fewer requests leave each of them more of a slow connection
            if isinstance(error, ThrottledError) or isinstance(error.__cause__, TimeoutError):
                self._pace.throttled()
            raise
        piece.sent = NEVER
        seconds = time.perf_counter() - begin
        self._hedging.completed(len(body), seconds)
        self._pace.completed(len(body), seconds, bool(self._pending))
        self._counters.add(bytes_fetched=len(body), request_seconds=seconds)
        self._counters.note(in_flight=self._pace.limit)
        return body

    def _count_retry(self, piece: Piece, _error: StorageError, _delay: float) -> None:
        piece.sent = NEVER
        self._counters.add(retries=1)

    def _hedge_late(self) -> None:
        """Send late requests once more, the earliest first, within the budget. Holds the lock."""
        now = time.perf_counter()
        if now - self._looked < LOOK_SECONDS or self._pace.throttling or self._closed.is_set():
            return
        self._looked = now
        late = [p for p in self._pieces if now - p.sent > self._hedging.deadline(p.run.stop - p.run.start)]
        for piece in sorted(late, key=lambda piece: piece.sent):
            if not self._hedging.withdraw():
                break
            piece.sent = NEVER
            piece.requests += 1
            piece.hedges += 1
            self._hedges.append(partial(self._load_piece, piece, piece.hedges))
        self._dispatch()


def ahead_bytes(most: float) -> float:
    """Return the bytes of `most` that blocks ahead may take if an earlier block or batch may be larger than planned."""
    return max(TOLERANCE_BYTES, most // 4)


# In flight at first: saturates a server on the same machine; three rounds later it may be 64.
FIRST = 16
# The least a round measures, so that neither one slow request nor one short moment decides.
ROUND_REQUESTS = 16
ROUND_SECONDS = 0.1
# A step pays without more ado if it brings this part of what it would bring where every request has its own speed.
OWN_SPEED = 0.7
# It also pays if it brings this much more, unless requests take this many times as long as they did at best: then
# half of them queue, as at twice the bandwidth-delay product (Cardwell et al., BBR, 2016), and what one rank gains
# another loses.
LEAST_GAIN = 0.05
MOST_QUEUEING = 2.0
# Rounds without an attempt after none paid; a round is about three times as long as a request takes.
HOLD_ROUNDS = 16
# Halving more often would react to one burst of 503s many times; it also is how long a store counts as throttling.
DECREASE_SECONDS = 1.0
# After a 503 the limit stays this far below where it came, for so long.
BELOW_THROTTLE = 0.9
THROTTLE_MEMORY_SECONDS = 30.0


class Pace:
    """The limit of requests in flight, from 1 to `most`. Thread-safe; survives a pass, so that the next starts well.

    Increase by measured steps, multiplicative decrease (Chiu and Jain, 1989) at most once a second.
    """

    def __init__(self, most: int, first: int = FIRST, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._most = most
        self._first = first
        self._limit = min(first, most)
        self._kept = self._limit  # the limit that the last step started from, and its bytes per second
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
        """The requests that may be in flight now."""
        return self._limit

    @property
    def throttling(self) -> bool:
        """Whether the store has throttled a request within the last second."""
        return self._clock() - self._throttled_at < DECREASE_SECONDS

    def allow(self, most: int) -> None:
        """Set the most that memory allows from now on."""
        with self._lock:
            self._most = most
            if self._limit > most:
                self._settle(most)

    def completed(self, size: int, seconds: float, waiting: bool) -> None:
        """A request of `size` bytes succeeded after `seconds`; `waiting`: others wait for its place."""
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
        """The store throttled a request: allow half as many, at most once a second.

        Not again before one has succeeded: the failures of an outage do not show how many requests the store takes.
        """
        with self._lock:
            now = self._throttled_at = self._clock()
            if not self._succeeded or now - self._decreased_at < DECREASE_SECONDS:
                return
            self._decreased_at, self._succeeded = now, False
            self._ceiling = max(1, int(self._limit * BELOW_THROTTLE))
            self._settle(max(1, self._limit // 2))
            self._step = max(1, self._limit // 2)
            self._new_round()

    def _new_round(self) -> None:
        self._skipped = 0
        self._begin = 0.0
        self._count = 0
        self._bytes = 0
        self._seconds = 0.0

    def _judge(self, rate: float, seconds: float) -> None:
        """End a round: keep or undo the step that it measured, and try the next."""
        if self._limit >= self._first:
            self._best_seconds = min(self._best_seconds, seconds)
        if self._limit == self._kept:
            self._kept_rate = max(1.0, rate)
            self._hold = max(0, self._hold - 1)
            if not self._hold:
                self._raise()
        elif self._pays(rate, seconds):
            self._settle(self._limit)
            self._kept_rate = max(1.0, rate)
            self._step *= 2
            self._raise()
        else:
            self._settle(self._kept)
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

    def _raise(self) -> None:
        most = self._most
        if self._clock() - self._decreased_at < THROTTLE_MEMORY_SECONDS:
            most = min(most, self._ceiling)
        self._limit = max(self._kept, min(most, self._kept + self._step))

    def _settle(self, limit: int) -> None:
        self._limit = self._kept = limit


# Bytes that a connection moves while another waits for its first: 30 ms at 70 MB/s. Where it is less or more, small
# requests, or large ones, wait longer before they are late, never shorter than they should.
FIRST_BYTE = 2 << 20
# Samples before anything is late, and how many of the latest are kept.
LEAST_SAMPLES = 100
SAMPLES = 512
# How many samples come before the quantile is computed again.
REFRESH = 32
QUANTILE = 0.95
# By definition 5 % of all requests exceed the quantile: hedged, they would take the whole budget from those that stall.
MARGIN = 2.0
# A shorter delay is this machine's, not the store's.
LEAST_SECONDS = 0.5
# So many requests earn one hedge; so many may be saved up.
REQUESTS_A_HEDGE = 30
MOST_SAVED = 10.0


class Hedging:
    """The usual time of a request and the budget of second ones; thread-safe, survives a pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[float] = deque(maxlen=SAMPLES)  # seconds / (FIRST_BYTE + bytes)
        self._count = 0
        self._usual = float("inf")
        self._saved = 0.0

    def completed(self, size: int, seconds: float) -> None:
        """A request of `size` bytes succeeded after `seconds`."""
        with self._lock:
            self._samples.append(seconds / (FIRST_BYTE + size))
            self._count += 1
            self._saved = min(MOST_SAVED, self._saved + 1 / REQUESTS_A_HEDGE)
            if self._count == LEAST_SAMPLES or (self._count > LEAST_SAMPLES and self._count % REFRESH == 0):
                self._usual = sorted(self._samples)[int(QUANTILE * len(self._samples))]

    def deadline(self, size: int) -> float:
        """Return after how many seconds a request of `size` bytes is late; infinity before 100 samples."""
        return max(LEAST_SECONDS, MARGIN * self._usual * (FIRST_BYTE + size))

    def withdraw(self) -> bool:
        """Take one hedge; False where none is saved."""
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            return True
