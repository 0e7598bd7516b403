"""Blocks from the store into their slots: ranged read, verify, decode, on daemon threads.

A block is cut in *pieces*, the runs of its fields: each is one request, and all of them are asked for side by side. A
piece holds one of the places that `Pace` allows until it is in its slot. Where its request is late, a second one is
sent in the same place; the first whose body is whole is decoded, and the other is dropped when it comes: a blocking
read cannot be called off, so it keeps its thread till then. Bodies in memory are never more than threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from streamloader.engine.arena import NO_SLOT
from streamloader.engine.budget import TOLERANCE_BYTES, Budget, check_need
from streamloader.engine.crew import Crew, Job
from streamloader.engine.pieces import NEVER, LoadingBlock, Piece
from streamloader.engine.source import Source
from streamloader.errors import EngineError, StorageError, StreamloaderError, wrapped
from streamloader.plan.booking import BlockRef
from streamloader.stats import Counters

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
        source: Source,
        budget: Budget,
        counters: Counters,
    ) -> None:
        threads = budget.threads
        self._source = source
        self._names = source.names
        self._arena = source.memory.arena
        self._bodies = source.memory.bodies
        self._threads = threads
        self._budget = budget
        self._needed = 0  # bytes of the blocks that the batch has beside the awaited one
        self._expected = 0  # bytes of blocks on their way
        self._unpacking: list[int] = []  # tickets of the pieces that ask for memory to decode into
        self._counters = counters
        self._line = source.line
        self._line.pace.allow(threads)
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
        self._crew = Crew("fetch", threads, started=0)

    def fits(self, weight: int) -> bool:
        """Return whether there is memory for a block of about `weight` bytes of variable-size fields."""
        return self._bodies.used + self._expected + weight <= self._budget.body_bytes

    def load(self, ref: BlockRef, weight: int) -> None:
        """Begin to load a block, for which a slot was reserved; `weight` is what is expected of its size."""
        block = LoadingBlock(*self._source.find(ref), len(self._names), weight)
        with self._changed:
            self._blocks[ref.ticket] = block
            if self._closed.is_set():
                return
            self._expected += weight
            self._pending.extend(partial(self._load_field, block, name) for name in self._names)
            self._dispatch()

    def wait(self, ticket: int, needed: int) -> StreamloaderError | None:
        """Wait until the block is whole; return its error, if it has one, once. Stops early when closed.

        Blocks of `needed` bytes are there and cannot be dropped: where this one does not fit beside them, the error is
        a `MemoryBudgetError`.
        """
        with self._changed:
            block = self._blocks[ticket]
            self._awaited, self._needed = ticket, needed
            if self._unpacking:
                self._changed.notify_all()
            while block.left and not self._failure and not self._closed.is_set():
                self._changed.wait(LOOK_SECONDS)
                self._hedge_late()
            self._awaited = -1
            if self._failure is not None:
                return self._failure
            error, block.error = block.error, None  # its traceback may hold the block
            return error

    def held(self, ticket: int) -> int:
        """Return the bytes of a block's variable-size fields."""
        return self._blocks[ticket].held

    def forget(self, ticket: int) -> None:
        """Drop the bookkeeping of a block that was released."""
        del self._blocks[ticket]

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
        self._crew.close()

    def join(self, seconds: float) -> bool:
        """Wait, once closed, until no thread writes to the arena any more; return whether that is so.

        A thread in a request that stalls does not matter: what it brings is dropped.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._writers, seconds)

    def _dispatch(self) -> None:
        """Give jobs to threads, as far as places and threads go. Holds the lock."""
        limit = self._line.pace.limit
        while self._busy < self._threads and not self._closed.is_set():
            if self._hedges:
                job = self._hedges.popleft()
            elif self._pending and self._places < limit:
                job = self._pending.popleft()
                self._places += 1
            else:
                return
            self._busy += 1
            self._crew.grow(self._busy)
            self._crew.submit(job, self.fail)

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
        field = block.stored.fields[name]
        try:
            with block.stored.store.retries.waits_by(self.sleep):
                runs = block.stored.runs(name, block.ref)
        except BaseException as error:  # noqa: BLE001 - a batch waits for the block, whatever happens to it
            with self._changed:
                self._busy -= 1
                self._settle(block, wrapped(error, f"reading the chunk table of field {name!r}"))
                self._dispatch()
            return
        pieces = [Piece(block, field, run) for run in runs]
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
            with piece.block.stored.store.retries.waits_by(self.sleep):
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

    def _hedge(self, piece: Piece, number: int) -> None:
        if piece.over:
            self._line.hedging.give_back()
        else:
            self._counters.add(hedges=1)
        self._load_piece(piece, number)

    def _fill(self, piece: Piece, number: int) -> None:
        """Fetch a piece and decode it into its slot."""
        name, ref, layout = piece.field.name, piece.block.ref, piece.field.layout
        fixed = layout.field.fixed
        slot = self._arena.claim(ref.ticket)
        if slot == NO_SLOT:
            raise Dropped
        rows = self._arena.room(name, slot, ref.stop - ref.start) if fixed else None
        fetch, damaged = partial(self._fetch, piece, number), partial(self._damaged, piece)
        room = partial(self._unpack_room, piece)
        items = piece.field.load(piece.run, fetch, rows, ref.start, room=room, on_damage=damaged)
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

    def _unpack_room(self, piece: Piece, size: int) -> memoryview:
        """Return memory to decode into, whose size only the body says: of blocks ahead once it fits, in their order.

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
                check_need(self._budget, self._needed + block.held + size)
            piece.unpacked += size
            block.held += size
            return self._bodies.room(size)

    def _fits_ahead(self, ticket: int, size: int) -> bool:
        """Return whether a block ahead may decode `size` bytes now. Holds the lock.

        How much an earlier block decodes to is unknown until its body arrives: most of the memory is left for it.
        """
        if self._bodies.used + size > self._budget.body_bytes:
            return False
        oldest = min((number for number, block in self._blocks.items() if block.left), default=ticket)
        most = max(TOLERANCE_BYTES, self._budget.body_bytes // 4)
        later = sum(block.held for number, block in self._blocks.items() if number > oldest)
        return not self._budget.exact or ticket <= oldest or later + size <= most

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
        if number:
            body = request()
        else:
            again = partial(self._again, piece)
            body = piece.block.stored.store.retries.call(request, on_retry=again)
        with self._changed:
            if piece.over or piece.writer is not None or self._closed.is_set():
                raise Dropped
            piece.writer = number
            self._writers += 1
            piece.body_at = time.thread_time()
        return body

    def _request(self, piece: Piece, number: int) -> memoryview:
        if piece.over or self._closed.is_set():
            raise Dropped
        self._counters.add(requests=1)
        if number or piece.fresh:
            piece.fresh, piece.sent = False, time.perf_counter()
        read = partial(piece.field.fetch, piece.block.stored.store.reader(), piece.run, self._bodies.room)
        body = self._line.request(read, self._waiting, self._counters)
        piece.sent = NEVER
        return body

    def _waiting(self) -> bool:
        return bool(self._pending)

    def _again(self, piece: Piece, _error: StorageError, _delay: float) -> None:
        piece.sent = NEVER
        self._counters.add(retries=1)

    def _hedge_late(self) -> None:
        """Send late requests once more, the earliest first, within the budget. Holds the lock."""
        now = time.perf_counter()
        if now - self._looked < LOOK_SECONDS or not self._line.pace.calm or self._closed.is_set():
            return
        self._looked = now
        hedging = self._line.hedging
        late = [p for p in self._pieces if now - p.sent > hedging.deadline(p.run.stop - p.run.start)]
        for piece in sorted(late, key=lambda piece: piece.sent):
            if not hedging.withdraw():
                break
            piece.sent = NEVER
            piece.requests += 1
            piece.hedges += 1
            self._hedges.append(partial(self._hedge, piece, piece.hedges))
        self._dispatch()
