"""The pipeline: admits blocks in the order of first need, gathers batches, keeps a few ready.

    [planner thread] -> [assembler thread: admit -> wait for blocks -> gather -> release] -> stages -> ready -> consumer
                    |                        ^
                    v                        |
              [fetch threads: ranged read -> verify -> decode into the slot]

Only the assembler admits and releases, so bytes need no lock. The threads hold `Assembler`; its owners
hold `Engine`, and dropping that ends them. A consumer iterates over one pass, a `Pipeline`; one that it drops halfway
ends the engine, one that it completes leaves it to the next pass, if the engine was made for more than one.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from streamloader.engine.ahead import Ahead
from streamloader.engine.batch import Batch
from streamloader.engine.budget import LIVE_BATCHES, READY_BATCHES, TOLERANCE_BYTES, Budget, check_need
from streamloader.engine.crew import Crew
from streamloader.engine.fetch import Fetcher
from streamloader.engine.passes import LOOK_AHEAD_ROWS, PLANNED_ROWS, Course, plans
from streamloader.engine.source import Source
from streamloader.engine.stages import Recipe, Stages
from streamloader.engine.transform import HeldTransform
from streamloader.errors import EngineError, ForkError, MemoryBudgetError, StreamloaderError, wrapped
from streamloader.format.threads import SIGNAL_SECONDS, take
from streamloader.plan.booking import BatchPlan, BlockRef
from streamloader.stats import Counters

# Blocks ahead of the batch that is assembled, for each request that may be in flight: one on its way, one there.
AHEAD = 2
# Batches that are planned ahead: plans are made in spans, the next one while the batches of the last are gathered.
PLANNED = 256


class Engine:
    """The threads of one pass, or of pass after pass: then the next one is loaded while the present one drains.

    Never leaves anything outside this process.
    """

    def __init__(
        self, source: Source, recipe: Recipe, first: Course, budget: Budget, counters: Counters, *, endless: bool
    ) -> None:
        self.counters = counters
        self.passes = 0  # completed by their consumers
        planned = Ahead(plans(first, endless=endless), min(PLANNED, max(2, PLANNED_ROWS // first.need.rows)))
        self.core = Assembler(source, recipe, planned, budget, counters)
        self._endless = endless
        assembler, planner = (Crew(name, 1) for name in ("assemble", "plan"))
        self._close = weakref.finalize(self, _end, self.core, (assembler, planner), os.getpid())
        assembler.submit(self.core.run, self.core.fail)
        planner.submit(self.core.plans.run, self.core.fail)

    @property
    def alive(self) -> bool:
        """Whether a next pass can be had."""
        return self._endless and self._close.alive

    def close(self) -> None:
        """End the threads; those in a request end after it."""
        self._close()


def _end(core: Assembler, crews: Sequence[Crew], process: int) -> None:
    if os.getpid() == process:  # in a forked child the threads are not, and their locks may be held for ever
        core.close()
        for crew in crews:
            crew.close()


class Pipeline:
    """Iterates over the finished batches of an engine's next pass, in their order.

    An error surfaces at the batch it belongs to; `completed` says whether the last batch was handed out. Close
    it, or drop it, before that, and the engine ends. One thread at a time may ask for batches; any may close.
    """

    def __init__(self, engine: Engine, transform: HeldTransform | None) -> None:
        self._engine = engine
        self._transform = transform  # the engine's threads do not hold it
        self._close = weakref.finalize(self, engine.close)
        self._process = os.getpid()
        self._next: Batch | None = None  # where Ctrl-C ended the wait for it, the batch that the next call returns
        self._over = False
        self.completed = False

    def __iter__(self) -> Pipeline:
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Raises its error, StopIteration after the last, or `EngineError` once closed."""
        if self._over:
            raise StopIteration
        if os.getpid() != self._process:
            raise ForkError(
                "this pass is of the process that was forked", "begin a pass in this process: iter(dataset)"
            )
        asked = time.perf_counter()
        try:
            self._next = batch = self._next or self._engine.core.next_ready()
            if batch is None:
                self._complete()
                raise StopIteration
            self._finish(batch)
        except StreamloaderError:
            self._over = True
            self.close()
            raise
        self._next = None
        self._engine.counters.delivered(len(batch.plan.samples), asked)
        return batch

    def close(self) -> None:
        """End a pass that is not complete, and its engine; a thread that waits for a batch gets an `EngineError`."""
        self._close()

    def _complete(self) -> None:
        self.completed = self._over = True
        self._engine.passes += 1
        if self._engine.alive:
            self._close.detach()
        self.close()

    def _finish(self, batch: Batch) -> None:
        """Wait for the batch, and raise its error."""
        if not batch.finished:
            core = self._engine.core
            name = "transform_wait_seconds" if core.transforms else "decode_wait_seconds"
            with self._engine.counters.timed(name):
                while not batch.wait(SIGNAL_SECONDS):
                    core.check_open()
        error = batch.take_error()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame


class Assembler:
    """What the threads share; see the module's picture."""

    def __init__(
        self, source: Source, recipe: Recipe, plans: Ahead[BatchPlan | None], budget: Budget, counters: Counters
    ) -> None:
        self._source = source
        self.plans = plans
        self._counters = counters
        # Blocks of a variable-size field differ: slots bound their number, the fetcher their bytes.
        self._budget = budget
        self._weights: dict[int, int] = {}
        self._needed = 0  # bytes of the blocks that batches have waited for, and that later ones still use
        self._last_bytes = 0  # of the variable-size columns of the batch before
        self._ahead = 0  # blocks that were admitted and that no batch has waited for yet
        self._slots = budget.slots
        self._arena = source.memory.arena
        # first, since it may refuse the transform: no thread may be left then
        self._stages = Stages(recipe, source.memory, budget.cores, counters)
        self._fetcher = Fetcher(source, budget, counters)
        self.transforms = recipe.transform is not None
        self._planned: deque[BatchPlan | None] = deque()  # None: a pass ends here
        self._planned_rows = 0
        self._ends = 0  # of passes, among the planned
        self._wanted: deque[BlockRef] = deque()
        self._ready: queue.SimpleQueue[Batch | StreamloaderError | None] = queue.SimpleQueue()
        self._places = threading.Semaphore(READY_BATCHES)
        self._taken = 0  # places of the batch that was taken last, which are free once the next one is asked for
        self._closed = False
        self._ended = threading.Event()

    def run(self) -> None:
        """Assemble until the plan ends, a batch fails, or the pipeline is closed; then plan and fetch no more."""
        try:
            with self._source.waits_by(self._fetcher.sleep):
                self._run()
        finally:
            self.plans.close()
            self._fetcher.close()
            self._ended.set()

    def _run(self) -> None:
        while not self._closed:
            with self._counters.timed("gather_seconds"):
                self._look_ahead()
            if not self._planned or not self._place():
                return
            plan = self._planned.popleft()
            self._ends -= plan is None
            self._planned_rows -= 0 if plan is None else len(plan.rows)
            batch = None if plan is None else self._assemble(plan)
            self._ready.put(batch)
            if self._closed:
                _drop(batch)
            if batch is not None and batch.error is not None:
                return

    def _assemble(self, plan: BatchPlan) -> Batch:
        batch = Batch(plan)
        try:
            error = self._load(plan)
            if error is None and not self._closed and self._budget.exact:
                self._take_places(batch)
        except MemoryBudgetError as problem:
            error = problem
        if error is None:
            self._gather(batch)
        else:
            batch.fail(error)
            del error  # its traceback may have this frame
        return batch

    def next_ready(self) -> Batch | None:
        """Return the next batch, which may not be finished yet; None after the last.

        Raises an error that belongs to no batch, and `EngineError` once closed.
        """
        self.check_open()
        if self._taken:
            self._places.release(self._taken)
            self._taken = 0
        batch = take(self._ready)
        self.check_open()
        if isinstance(batch, StreamloaderError):
            try:
                raise batch
            finally:
                del batch  # as in `Pipeline._finish`
        self._taken = batch.places if batch else 1
        return batch

    def check_open(self) -> None:
        """Raise `EngineError` once closed: nobody finishes a batch any more."""
        if self._closed:
            raise EngineError(
                "this pass was ended by a later iter(), load_state_dict() or close()", "iterate one pass at a time"
            )

    def fail(self, error: BaseException) -> None:
        """Take an error that belongs to no batch: whoever waits gets it."""
        error = wrapped(error, "the loader")
        self._fetcher.fail(error)
        self._ready.put(error)

    def close(self) -> None:
        """Let all threads end."""
        self._closed = True
        self.plans.close()
        self._places.release()
        self._fetcher.close()
        self._stages.close()
        with suppress(queue.Empty):
            while True:
                _drop(self._ready.get_nowait())
        self._ready.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the threads of a closed pipeline, `seconds` at most for each; return whether all are done."""
        return self._ended.wait(seconds) and self._fetcher.join(seconds) and self._stages.join(seconds)

    def _look_ahead(self) -> None:
        """Plan until as many blocks wait as there are slots: admission then never waits for the plan.

        Not beyond the end of the next pass, nor beyond `LOOK_AHEAD_ROWS`: plans may have many rows, and few blocks.
        """
        while not self._planned or (
            len(self._wanted) < self._slots and self._ends < 2 and self._planned_rows < LOOK_AHEAD_ROWS
        ):
            if not self.plans.there(wait=not self._planned):
                break
            plan = self.plans.take()
            self._planned.append(plan)
            if plan is None:
                self._ends += 1
            else:
                self._wanted.extend(plan.needs)
                self._planned_rows += len(plan.rows)
        self._admit()

    def _admit(self) -> None:
        """Begin to load what comes next, as far as slots and bytes go, and what can be on its way goes.

        A slot that nothing fills yet costs nothing, and one that was used before costs less than a new one.
        """
        most_ahead = AHEAD * self._source.line.pace.limit
        while self._wanted and self._arena.free and self._ahead < most_ahead:
            if not self._fetcher.fits(self._next_weight()):
                return
            self._admit_next()

    def _next_weight(self) -> int:
        """Return what the block that comes next weighs; asked for with each batch until there is room for it."""
        ref = self._wanted[0]
        if ref.ticket not in self._weights:
            try:
                self._weights[ref.ticket] = self._source.weight(ref)
            except StreamloaderError:  # loading it fails too: the error belongs to the batch that needs it
                self._weights[ref.ticket] = 0
        return self._weights[ref.ticket]

    def _admit_next(self) -> None:
        weight = self._next_weight()
        ref = self._wanted.popleft()
        self._ahead += 1
        self._arena.reserve(ref.ticket)
        self._fetcher.load(ref, weight)

    def _load(self, plan: BatchPlan) -> StreamloaderError | None:
        """Wait until every block that this batch is the first to need is there; return the first error."""
        for ref in plan.needs:
            while self._wanted and self._wanted[0].ticket <= ref.ticket:  # needed now: whatever it weighs
                if not self._arena.free:
                    return EngineError(
                        f"block {ref.start}:{ref.stop} finds none of {self._slots} slots free",
                        "report this with the dataset's manifest: the plan needs more slots than it says",
                    )
                check_need(self._budget, self._needed + self._next_weight())
                self._admit_next()
            with self._counters.timed("fetch_wait_seconds"):
                error = self._fetcher.wait(ref.ticket, self._needed)
            if error is not None:
                return error
            if self._closed:
                break
            self._ahead -= 1
            self._weights[ref.ticket] = self._fetcher.held(ref.ticket)
            self._needed += self._weights[ref.ticket]
            self._admit()
        return None

    def _take_places(self, batch: Batch) -> None:
        """Wait until the batch's bytes fit: one much larger than the mean waits until fewer others are there.

        Raises `MemoryBudgetError` where it does not fit at all.
        """
        size = self._stages.variable_bytes(batch.plan)
        check_need(self._budget, self._needed, size + self._last_bytes)
        self._last_bytes = size
        usual = self._budget.batch_bytes + TOLERANCE_BYTES // LIVE_BATCHES
        while batch.places < min(READY_BATCHES, -(-size // usual)) and self._place():
            batch.places += 1

    def _gather(self, batch: Batch) -> None:
        if self._closed:
            return
        try:
            with self._counters.timed("gather_seconds"):
                self._stages.start(batch)
        except BaseException as error:  # noqa: BLE001 - the consumer waits for the batch, whatever happens to it
            batch.fail(error)
        for ticket in batch.plan.done:
            self._fetcher.forget(ticket)
            self._arena.release(ticket)
            self._needed -= self._weights.pop(ticket)
        self._admit()

    def _place(self) -> bool:
        """Wait until there are fewer than READY_BATCHES, the consumer's included; return whether to go on."""
        begin = time.perf_counter()
        self._places.acquire()
        self._counters.add(full_seconds=time.perf_counter() - begin)
        return not self._closed


def _drop(ready: Batch | StreamloaderError | None) -> None:
    if isinstance(ready, Batch):
        ready.drop()
