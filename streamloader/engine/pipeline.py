"""The pipeline: admits blocks in the order of first need, gathers batches, keeps a few ready.

    plans -> [assembler thread: admit -> wait for blocks -> gather -> release] -> stages -> ready -> consumer
                    |                        ^
                    v                        |
              [fetch threads: ranged read -> verify -> decode into the slot]

Only the assembler admits and releases, so slots and bytes need no lock. The threads hold `Assembler`; the
consumer holds `Pipeline`, and dropping that ends them.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from streamloader.engine.arena import Memory
from streamloader.engine.batch import Batch
from streamloader.engine.budget import READY_BATCHES, Budget
from streamloader.engine.crew import Crew
from streamloader.engine.fetch import Fetcher
from streamloader.engine.stages import Recipe, Stages
from streamloader.errors import EngineError, StreamloaderError
from streamloader.format.reader import FieldReader
from streamloader.plan.schedule import BatchPlan, BlockRef
from streamloader.stats import Counters
from streamloader.storage.protocol import RangeReader


@dataclass(frozen=True)
class Source:
    """Where blocks come from, the streamed fields and the data plane (opened on first use), and where they are put."""

    fields: Mapping[str, FieldReader]
    reader: Callable[[], RangeReader]
    memory: Memory

    def weight(self, ref: BlockRef) -> int:
        """Return about how many bytes the block's variable-size fields take in memory."""
        return sum(
            (run.stop - run.start) * max(1, field.layout.nbytes) // max(1, field.layout.stored)
            for field in self.fields.values()
            if not field.layout.field.fixed
            for run in field.runs(ref.start, ref.stop)
        )


class Pipeline:
    """Iterates over the finished batches of a schedule, in its order.

    An error surfaces at the batch it belongs to; `completed` says whether the last batch was handed out. Close
    it, or drop it, to end its threads; it never leaves anything outside this process.
    """

    def __init__(
        self, source: Source, recipe: Recipe, plans: Iterator[BatchPlan], budget: Budget, counters: Counters
    ) -> None:
        self._counters = counters
        self.core = Assembler(source, recipe, plans, budget, counters)
        self._crew = Crew("assemble", 1, self.core.fail)
        self._crew.submit(self.core.run)
        self._crew.submit(self.core.shut)
        self._close = weakref.finalize(self, _end, self.core, self._crew)
        self._over = False
        self.completed = False

    def __iter__(self) -> Pipeline:
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Raises its error, or StopIteration after the last."""
        if self._over:
            raise StopIteration
        asked = time.perf_counter()
        batch = self.core.next_ready()
        if isinstance(batch, Batch):
            self._finish(batch)
        error = batch.error if isinstance(batch, Batch) else batch
        if error is not None or not isinstance(batch, Batch):
            self.completed = error is None and not self._over
            self.close()
            raise error or StopIteration
        self._counters.delivered(len(batch.plan.samples), asked)
        return batch

    def close(self) -> None:
        """End the threads; those in a request end after it."""
        self._over = True
        self._close()

    def _finish(self, batch: Batch) -> None:
        if not batch.finished:
            with self._counters.timed("transform_wait_seconds" if self.core.transforms else "decode_wait_seconds"):
                batch.wait()


def _end(core: Assembler, crew: Crew) -> None:
    core.close()
    crew.close()


class Assembler:
    """What the threads share; see the module's picture."""

    def __init__(
        self, source: Source, recipe: Recipe, plans: Iterator[BatchPlan], budget: Budget, counters: Counters
    ) -> None:
        self._source = source
        self._plans = plans
        self._counters = counters
        # Blocks of a variable-size field differ: slots bound their number, this their bytes.
        self._most_held = budget.variable_bytes
        self._held = 0
        self._weights: dict[int, int] = {}
        self._slots = budget.slots
        self._arena = source.memory.arena
        # first, since it may refuse the transform: no thread may be left then
        self._stages = Stages(recipe, source.memory, budget.cores, counters, self.fail)
        self._fetcher = Fetcher(source.fields, source.reader, self._arena, budget.threads, counters)
        self.transforms = recipe.transform is not None
        self._planned: deque[BatchPlan] = deque()
        self._wanted: deque[BlockRef] = deque()
        self._ready: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        self._places = threading.Semaphore(READY_BATCHES)
        self._closed = False
        self._ended = threading.Event()

    def run(self) -> None:
        """Assemble until the plan ends, a batch fails, or the pipeline is closed."""
        while not self._closed:
            self._look_ahead()
            if not self._planned:
                break
            batch = Batch(self._planned.popleft())
            error = self._load(batch.plan)
            if error is None:
                self._gather(batch)
            else:
                batch.finish(error)
            if not self._hand_over(batch) or error is not None:
                return
        self._ready.put(None)

    def shut(self) -> None:
        """Run after `run`, however that ended: nothing is fetched any more."""
        self._fetcher.close()
        self._ended.set()

    def next_ready(self) -> Batch | BaseException | None:
        """Return the next batch, which may not be finished yet; an error of no batch; None after the last."""
        if self._closed:
            return None
        begin = time.perf_counter()
        batch = self._ready.get()
        self._counters.add(fetch_wait_seconds=time.perf_counter() - begin)
        self._places.release()
        return batch

    def fail(self, error: BaseException) -> None:
        """Take an error that belongs to no batch: whoever waits gets it."""
        self._fetcher.fail(error)
        self._ready.put(error)

    def close(self) -> None:
        """Let all threads end."""
        self._closed = True
        self._places.release()
        self._fetcher.close()
        self._stages.close()
        self._ready.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the threads of a closed pipeline, `seconds` at most for each; return whether all are done."""
        return self._ended.wait(seconds) and self._fetcher.join(seconds) and self._stages.join(seconds)

    def _look_ahead(self) -> None:
        """Plan until as many blocks wait as there are slots: admission then never waits for the plan."""
        while len(self._wanted) < self._slots or not self._planned:
            plan = next(self._plans, None)
            if plan is None:
                break
            self._planned.append(plan)
            self._wanted.extend(plan.needs)
        self._admit()

    def _admit(self) -> None:
        """Begin to load what comes next, as far as slots and bytes go."""
        while self._wanted and self._arena.free:
            weight = self._source.weight(self._wanted[0])
            if self._held and self._held + weight > self._most_held:
                return
            self._admit_next(weight)

    def _admit_next(self, weight: int) -> None:
        ref = self._wanted.popleft()
        self._weights[ref.ticket] = weight
        self._held += weight
        self._fetcher.load(ref, self._arena.claim(ref.ticket))

    def _load(self, plan: BatchPlan) -> BaseException | None:
        """Wait until every block that this batch is the first to need is there; return the first error."""
        for ref in plan.needs:
            while self._wanted and self._wanted[0].ticket <= ref.ticket:  # needed now: whatever it weighs
                if not self._arena.free:
                    return EngineError(
                        f"block {ref.start}:{ref.stop} finds none of {self._slots} slots free",
                        "report this with the dataset's manifest: the plan needs more slots than it says",
                    )
                self._admit_next(self._source.weight(self._wanted[0]))
            error = self._fetcher.wait(ref.ticket)
            if error is not None:
                return error
            if self._closed:
                break
        return None

    def _gather(self, batch: Batch) -> None:
        if self._closed:
            return
        try:
            self._stages.start(batch)
        except StreamloaderError as error:
            batch.finish(error)
        for ticket in batch.plan.done:
            self._fetcher.forget(ticket)
            self._arena.release(ticket)
            self._held -= self._weights.pop(ticket)
        self._admit()

    def _hand_over(self, batch: Batch) -> bool:
        """Put the batch where the consumer takes it, once fewer than READY_BATCHES are ahead of it."""
        begin = time.perf_counter()
        self._places.acquire()
        self._counters.add(full_seconds=time.perf_counter() - begin)
        if not self._closed:
            self._ready.put(batch)
        return not self._closed
