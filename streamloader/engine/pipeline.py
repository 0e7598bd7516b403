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

from streamloader.engine.ahead import Ahead
from streamloader.engine.batch import Batch
from streamloader.engine.budget import READY_BATCHES, Budget
from streamloader.engine.crew import Crew
from streamloader.engine.fetch import Fetcher
from streamloader.engine.passes import Course, plans
from streamloader.engine.source import Source
from streamloader.engine.stages import Recipe, Stages
from streamloader.errors import EngineError, StreamloaderError
from streamloader.format.threads import take
from streamloader.plan.booking import BatchPlan, BlockRef
from streamloader.stats import Counters

# Blocks ahead of the batch that is assembled, for each request that may be in flight: one on its way, one there.
AHEAD = 2
# Batches that are planned ahead: plans are made in spans, the next one while the batches of the last are gathered.
# Few of large ones: a row of a plan takes 40 bytes, and `memory=` does not count it.
PLANNED = 256
PLANNED_ROWS = 1 << 18


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
        assembler, planner = (Crew(name, 1, self.core.fail) for name in ("assemble", "plan"))
        self._close = weakref.finalize(self, _end, self.core, (assembler, planner), os.getpid())
        for job in (self.core.run, self.core.shut):
            assembler.submit(job)
        planner.submit(self.core.plans.run)

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
    it, or drop it, before that, and the engine ends.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._close = weakref.finalize(self, engine.close)
        self._over = False
        self.completed = False

    def __iter__(self) -> Pipeline:
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Raises its error, or StopIteration after the last."""
        if self._over:
            raise StopIteration
        core = self._engine.core
        asked = time.perf_counter()
        batch = core.next_ready()
        if isinstance(batch, Batch):
            self._finish(batch)
            if batch.error is None:
                self._engine.counters.delivered(len(batch.plan.samples), asked)
                return batch
            batch = batch.error
        self.completed = batch is None and not self._over
        if self.completed:
            self._engine.passes += 1
        if self.completed and self._engine.alive:
            self._close.detach()
        self.close()
        raise batch or StopIteration

    def close(self) -> None:
        """End a pass that is not complete, and its engine."""
        self._over = True
        self._close()

    def _finish(self, batch: Batch) -> None:
        if not batch.finished:
            core = self._engine.core
            name = "transform_wait_seconds" if core.transforms else "decode_wait_seconds"
            with self._engine.counters.timed(name):
                batch.wait()


class Assembler:
    """What the threads share; see the module's picture."""

    def __init__(
        self, source: Source, recipe: Recipe, plans: Ahead[BatchPlan | None], budget: Budget, counters: Counters
    ) -> None:
        self._source = source
        self.plans = plans
        self._counters = counters
        # Blocks of a variable-size field differ: slots bound their number, this their bytes.
        self._most_held = budget.variable_bytes
        self._held = 0
        self._weights: dict[int, int] = {}
        self._ahead = 0  # blocks that were admitted and that no batch has waited for yet
        self._slots = budget.slots
        self._arena = source.memory.arena
        # first, since it may refuse the transform: no thread may be left then
        self._stages = Stages(recipe, source.memory, budget.cores, counters, self.fail)
        self._fetcher = Fetcher(source, budget.threads, counters)
        self.transforms = recipe.transform is not None
        self._planned: deque[BatchPlan | None] = deque()  # None: a pass ends here
        self._ends = 0  # of passes, among the planned
        self._wanted: deque[BlockRef] = deque()
        self._ready: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        self._places = threading.Semaphore(READY_BATCHES)
        self._taken = False  # a batch, whose place is free only once the next one is asked for
        self._closed = False
        self._ended = threading.Event()

    def run(self) -> None:
        """Assemble until the plan ends, a batch fails, or the pipeline is closed."""
        while not self._closed:
            with self._counters.timed("gather_seconds"):
                self._look_ahead()
            if not self._planned or not self._place():
                return
            plan = self._planned.popleft()
            self._ends -= plan is None
            batch = None if plan is None else self._assemble(plan)
            if not self._closed:
                self._ready.put(batch)
            if batch is not None and batch.error is not None:
                return

    def _assemble(self, plan: BatchPlan) -> Batch:
        batch = Batch(plan)
        error = self._load(plan)
        if error is None:
            self._gather(batch)
        else:
            batch.finish(error)
        return batch

    def shut(self) -> None:
        """Run after `run`, however that ended: nothing is planned or fetched any more."""
        self.plans.close()
        self._fetcher.close()
        self._ended.set()

    def next_ready(self) -> Batch | BaseException | None:
        """Return the next batch, which may not be finished yet; an error of no batch; None after the last."""
        if self._closed:
            return None
        if self._taken:
            self._places.release()
        batch = take(self._ready)
        self._taken = True
        return batch

    def fail(self, error: BaseException) -> None:
        """Take an error that belongs to no batch: whoever waits gets it."""
        self._fetcher.fail(error)
        self._ready.put(error)

    def close(self) -> None:
        """Let all threads end."""
        self._closed = True
        self.plans.close()
        self._places.release()
        self._fetcher.close()
        self._stages.close()
        self._ready.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the threads of a closed pipeline, `seconds` at most for each; return whether all are done."""
        return self._ended.wait(seconds) and self._fetcher.join(seconds) and self._stages.join(seconds)

    def _look_ahead(self) -> None:
        """Plan until as many blocks wait as there are slots: admission then never waits for the plan.

        Not beyond the end of the next pass: passes without a block would never fill the slots.
        """
        while not self._planned or (len(self._wanted) < self._slots and self._ends < 2):
            if not self.plans.there(wait=not self._planned):
                break
            plan = self.plans.take()
            self._planned.append(plan)
            if plan is None:
                self._ends += 1
            else:
                self._wanted.extend(plan.needs)
        self._admit()

    def _admit(self) -> None:
        """Begin to load what comes next, as far as slots and bytes go, and what can be on its way goes.

        A slot that nothing fills yet costs nothing, and one that was used before costs less than a new one.
        """
        most_ahead = AHEAD * self._source.line.pace.limit
        while self._wanted and self._arena.free and self._ahead < most_ahead:
            if self._held and self._held + self._next_weight() > self._most_held:
                return
            self._admit_next()

    def _next_weight(self) -> int:
        """Return what the block that comes next weighs; asked for with each batch until there is room for it."""
        ref = self._wanted[0]
        if ref.ticket not in self._weights:
            self._weights[ref.ticket] = self._source.weight(ref)
        return self._weights[ref.ticket]

    def _admit_next(self) -> None:
        weight = self._next_weight()
        ref = self._wanted.popleft()
        self._ahead += 1
        self._held += weight
        self._arena.reserve(ref.ticket)
        self._fetcher.load(ref)

    def _load(self, plan: BatchPlan) -> BaseException | None:
        """Wait until every block that this batch is the first to need is there; return the first error."""
        for ref in plan.needs:
            while self._wanted and self._wanted[0].ticket <= ref.ticket:  # needed now: whatever it weighs
                if not self._arena.free:
                    return EngineError(
                        f"block {ref.start}:{ref.stop} finds none of {self._slots} slots free",
                        "report this with the dataset's manifest: the plan needs more slots than it says",
                    )
                self._admit_next()
            with self._counters.timed("fetch_wait_seconds"):
                error = self._fetcher.wait(ref.ticket)
            if error is not None:
                return error
            if self._closed:
                break
            self._ahead -= 1
            self._admit()
        return None

    def _gather(self, batch: Batch) -> None:
        if self._closed:
            return
        try:
            with self._counters.timed("gather_seconds"):
                self._stages.start(batch)
        except StreamloaderError as error:
            batch.finish(error)
        for ticket in batch.plan.done:
            self._fetcher.forget(ticket)
            self._arena.release(ticket)
            self._held -= self._weights.pop(ticket)
        self._admit()

    def _place(self) -> bool:
        """Wait until there are fewer than READY_BATCHES, the consumer's included; return whether to go on."""
        begin = time.perf_counter()
        self._places.acquire()
        self._counters.add(full_seconds=time.perf_counter() - begin)
        return not self._closed
