"""The engine of a process: plans ahead, admits blocks in the order of first need, gathers batches, keeps a few ready.

    [planner thread] -> [assembler thread: admit -> wait for blocks -> gather -> release] -> stages -> ready -> consumer
                    |                        ^
                    v                        |
              [fetch threads: ranged read -> verify -> decode into the slot]

Only the assembler admits and releases, so bytes need no lock. The threads hold `Assembler`; its owners hold `Run`, and
dropping that ends them. A consumer iterates over one pass, a `Pipeline`; one that it drops halfway ends the run, one
that it completes leaves it to the next pass, if the run was made for more than one.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.dataset import Dataset, EpochPlan, load_field, plans
from streamloader.engine.fetcher import FIRST, Fetcher, Hedging, Pace, sleeper
from streamloader.engine.memory import ITEM_BYTES, READY_BATCHES, Budget, Demand, Memory, allot, allowance
from streamloader.engine.stages import Batch, LoaderConfig, StageOptions, Stages, WorkerThreads
from streamloader.engine.transform import HeldTransform
from streamloader.errors import EngineError, ForkError, StreamloaderError, wrapped
from streamloader.format.codecs import scratch_bytes
from streamloader.format.manifest import FieldLayout
from streamloader.format.reader import MAX_REQUEST, FieldReader
from streamloader.options import MIB
from streamloader.order.schedule import LOOK_AHEAD_ROWS, PLANNED_ROWS, BatchPlan, BlockRef, Need
from streamloader.stats import Counters
from streamloader.storage.process import SIGNAL_SECONDS, Owner, finalize, take

T = TypeVar("T")

# How many times its encoded size a photograph takes decoded: a JPEG of usual quality spends 2 to 3 bits a pixel.
IMAGE_EXPANSION = 10
# How long a new pass waits for the threads of the one before it; then it leaves them their memory and takes its own.
JOIN_SECONDS = 0.2
# Blocks ahead of the batch that is assembled, for each request that may be in flight: one on its way, one there.
AHEAD = 2
# Batches that are planned ahead: plans are made in spans, the next one while the batches of the last are gathered.
PLANNED = 256


class Engine:
    """Reads datasets of the same fields in the process that made it. Loads resident fields once, at the first start."""

    def __init__(self, datasets: Sequence[Dataset], config: LoaderConfig) -> None:
        self.datasets = tuple(datasets)
        self.owner = Owner("threads of a loader")
        self.counters = Counters()
        self.run: Run | None = None
        self._names = datasets[0].names
        # Threads hold the options of their stages, and may not keep the transform's owner alive.
        self._config = replace(config, transform=None)
        self._transform = None if config.transform is None else HeldTransform(config.transform)
        self._resident: dict[str, NDArray[Any]] = {}
        self._closed = threading.Event()  # ends the reads of `start`
        self._pace, self._hedging = Pace(FIRST), Hedging()  # kept, so that the next pass starts at full speed
        retriers = [one.store.retries for one in datasets]
        for retrier in retriers:
            retrier.reached = True  # the manifest came from there, maybe in another process
        self.counters.outages = lambda: [retrier.waiting_for for retrier in retriers]

    def start(self, plan: EpochPlan) -> Pipeline:
        """Return the running pipeline of a pass. Raises `MemoryBudgetError` before any sample is read."""
        run = self.run
        if run is not None and run.expects(plan):
            return run.next_pass()
        # After a second pass more are likely: from then on the next is loaded while the present one drains.
        endless = run is not None and run.passes > 0
        if run is not None:
            run.close()
        resident, budget = self.plan_memory(plan.need)
        self._load_resident(resident)
        reader = self.datasets[0].store.reader()
        self.counters.client = f"{reader.kind}: {reader.reason}"
        streamed = {name: layout for name, layout in self.datasets[0].layouts.items() if name not in resident}
        memory = self._memory(streamed, budget, plan.need.block)
        options = StageOptions(
            config=self._config,
            names=self._names,
            streamed=streamed,
            resident={name: self._resident[name] for name in resident},
            stack_images=plan.steps_at_once == 1 and self._transform is None,
            transform=None if self._transform is None else weakref.ref(self._transform),
            seed=plan.seed,
        )
        # first, since it may refuse the transform: no thread may be left then
        stages = Stages(options, memory, budget.cores, self.counters)
        limits = self._pace, self._hedging
        fetcher = Fetcher(self.datasets, tuple(streamed), limits, memory, budget=budget, counters=self.counters)
        planned = plans(plan._replace(held=not streamed), endless=endless)
        most = min(PLANNED, max(2, PLANNED_ROWS // plan.need.rows))
        core = Assembler(Prefetcher(planned, most), fetcher, stages, memory, budget=budget, counters=self.counters)
        self.run = Run(core, plan, self._transform, endless=endless)
        return self.run.next_pass()

    def close(self) -> None:
        """End the threads of the last pass, and of one that is loaded ahead, and give their memory back.

        A thread that is in `start` and waits for the store gets an `EngineError`.
        """
        self._closed.set()
        run, self.run = self.run, None
        if run is not None:
            run.close()

    def _load_resident(self, names: Sequence[str]) -> None:
        self._closed = threading.Event()
        sleep = sleeper(self._closed)
        for name in names:
            if name not in self._resident:
                parts = [load_field(one.readers[name], one.store, self.counters, sleep) for one in self.datasets]
                self._resident[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _memory(self, layouts: Mapping[str, FieldLayout], budget: Budget, block: int) -> Memory:
        """Return the last run's memory if it fits and no thread of that run can still write to it, else new."""
        run, self.run = self.run, None
        if run is not None:
            memory = run.core.memory
            if memory.arena.shape == (layouts, budget.slots, block) and run.core.join(JOIN_SECONDS):
                memory.arena.clear()
                return memory
        # A transform may keep slices of what it was given; only memory without other references is recycled.
        return Memory.of(layouts, block, budget, self.counters, recycle=self._transform is None)

    def plan_memory(self, need: Need) -> tuple[list[str], Budget]:
        """Return the resident fields, and the budget.

        Of the manifest's resident fields, smallest first, as many are held as leave memory for the window; the
        others are streamed. Raises `MemoryBudgetError`, with the least need of all, where no choice fits.
        """
        choices, allowed = self._choices(need), allowance(self._config.memory, self._config.ranks_here)
        fitting = [choice for choice in choices if choice[1].least_bytes <= allowed]
        resident, demand = fitting[0] if fitting else min(choices, key=lambda choice: choice[1].least_bytes)
        return resident, allot(demand, self._config.memory, self._config.ranks_here)

    def least_memory(self, need: Need) -> int:
        """Return the least `memory`, in bytes, that `plan_memory` accepts."""
        return min(demand.least_bytes for _, demand in self._choices(need))

    def _choices(self, need: Need) -> list[tuple[list[str], Demand]]:
        """The fields that may be held, small ones in every dataset, most of them first, and what is needed then."""
        small = [name for name in self._names if all(reader.layout.resident for reader in self._readers(name))]
        small.sort(key=lambda name: sum(reader.layout.nbytes for reader in self._readers(name)))
        # chunks of many blocks are no unit to stream in: a dataset in blocks of one sample is resident
        least = len(small) if need.block == 1 and len(small) == len(self._names) else 0
        return [(small[:count], self._demand(small[:count], need)) for count in range(len(small), least - 1, -1)]

    def _readers(self, name: str) -> list[FieldReader]:
        return [one.readers[name] for one in self.datasets]

    def _demand(self, resident: list[str], need: Need) -> Demand:
        """What is needed with these fields resident."""
        block = need.block
        mean = {name: max(map(_mean_bytes, self._readers(name))) for name in self._names}
        streamed = [(name, reader) for name in self._names if name not in resident for reader in self._readers(name)]
        requests = [
            max(reader.layout.chunk * mean[name], min(MAX_REQUEST, block * mean[name])) for name, reader in streamed
        ]
        scratch = [scratch_bytes(reader.layout, int(reader.layout.chunk * mean[name])) for name, reader in streamed]
        fixed = {name: reader.layout.field.fixed for name, reader in streamed}
        variable = sum(int(block * mean[name]) for name in fixed if not fixed[name])
        return Demand(
            slots=need.slots,
            slot_bytes=variable + sum(block * (int(mean[name]) if fixed[name] else ITEM_BYTES) for name in fixed),
            batch_bytes=int(need.rows * sum(self._finished_bytes(name, size) for name, size in mean.items())),
            request_bytes=int(max(requests, default=MIB)),
            blocks=sum(-(-one.num_samples // block) for one in self.datasets),
            variable_bytes=variable,
            resident_bytes=sum(reader.num_samples * int(mean[n]) for n in resident for reader in self._readers(n)),
            index_bytes=sum(one.index_bytes for one in self.datasets)
            + (need.held_plan_bytes if len(resident) == len(self._names) else need.plan_bytes),
            scratch_bytes=max(scratch, default=0),
        )

    def _finished_bytes(self, name: str, stored: float) -> float:
        """The bytes of one sample in a finished batch."""
        decoder = self._config.decoders.get(name)
        if decoder is None:
            return stored
        itemsize = np.dtype(decoder.dtype).itemsize
        if decoder.options.size is None:
            return stored * IMAGE_EXPANSION * itemsize
        return float(math.prod(decoder.options.size) * decoder.options.channels * itemsize)


def _mean_bytes(reader: FieldReader) -> float:
    if reader.layout.field.fixed:
        return float(reader.layout.field.item_bytes)
    return reader.layout.nbytes / max(1, reader.num_samples)


def pass_ended() -> EngineError:
    """Return the error for a request of a batch from a pass that was ended."""
    return EngineError(
        "this pass was ended by a later iter(), load_state_dict() or close()", "iterate one pass at a time"
    )


class Prefetcher(Generic[T]):
    """The items of an iterator, up to `most` of them made ahead. One thread runs it, one takes, any may close."""

    def __init__(self, items: Iterator[T], most: int) -> None:
        self._items = items
        self._most = most
        self._made: deque[T] = deque()
        self._over = False
        self._changed = threading.Condition()

    def run(self) -> None:
        """Make items until there is no more, or until closed. Raises what the iterator raises."""
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._made) < self._most or self._over)
                    if self._over:
                        return
                    self._made.append(item)
                    self._changed.notify_all()
        finally:
            self.close()

    def has_next(self, *, wait: bool) -> bool:
        """Return whether an item is ready; with `wait`, False says that none will come."""
        if wait and not self._made:
            with self._changed:
                self._changed.wait_for(lambda: self._made or self._over)
        return bool(self._made)

    def take(self) -> T:
        """Return the next item, once `has_next` returned True."""
        item = self._made.popleft()
        # Not after each: to wake a thread costs as much as what it makes. Only this side takes away, so that the number
        # passes the middle whenever it was full.
        if len(self._made) == self._most // 2:
            with self._changed:
                self._changed.notify_all()
        return item

    def close(self) -> None:
        """Make no more; what was made can still be taken."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Run:
    """The threads of one pass, or of pass after pass: then the next one is loaded while the present one drains.

    Never leaves anything outside this process.
    """

    def __init__(self, core: Assembler, first: EpochPlan, transform: HeldTransform | None, *, endless: bool) -> None:
        self.core = core
        self.passes = 0  # completed by their consumers
        self._begun = 0
        self._upcoming = first
        self._transform = transform  # the threads do not hold it
        self._endless = endless
        assembler, planner = (WorkerThreads(name, 1) for name in ("assemble", "plan"))
        self.close = finalize(self, _end, core, assembler, planner)
        assembler.submit(core.run, core.fail)
        planner.submit(core.plans.run, core.fail)

    @property
    def alive(self) -> bool:
        """Whether there can be a next pass."""
        return self._endless and self.close.alive

    def expects(self, plan: EpochPlan) -> bool:
        """Return whether this pass is the next one, and the one before it is complete."""
        return self.alive and self.passes == self._begun and self._upcoming == plan

    def next_pass(self) -> Pipeline:
        """Begin the next pass."""
        self._begun += 1
        self._upcoming = self._upcoming.following()
        return Pipeline(self)


def _end(core: Assembler, *workers: WorkerThreads) -> None:
    core.close()
    for one in workers:
        one.close()


class Pipeline:
    """Iterates over the finished batches of a run's next pass, in their order.

    An error surfaces at the batch it belongs to; `completed` says whether the last batch was handed out. Close
    it, or drop it, before that, and the run ends. One thread at a time may ask for batches; any may close.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._close = weakref.finalize(self, run.close)
        self._owner = Owner("threads of this pass")
        self._next: Batch | None = None  # where Ctrl-C ended the wait for it, the batch that the next call returns
        self._over = False
        self.completed = False

    def __iter__(self) -> Pipeline:
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Raises its error, StopIteration after the last, or `EngineError` once closed."""
        if self._over:
            raise StopIteration
        if not self._owner.here:
            raise ForkError("this pass belongs to the process that was forked", "begin one here: iter(dataset)")
        asked = time.perf_counter()
        try:
            self._next = batch = self._next or self._run.core.next_ready()
            if batch is None:
                self.completed = self._over = True
                self._run.passes += 1
                if self._run.alive:
                    self._close.detach()
                self.close()
                raise StopIteration
            self._finish(batch)
        except StreamloaderError:
            self._over = True
            self.close()
            raise
        self._next = None
        self._run.core.counters.delivered(len(batch.plan.samples), asked)
        return batch

    def close(self) -> None:
        """End a pass that is not complete, and its run; a thread that waits for a batch gets an `EngineError`."""
        self._close()

    def _finish(self, batch: Batch) -> None:
        """Wait for the batch, and raise its error."""
        core = self._run.core
        if not batch.finished.is_set():
            name = "transform_wait_seconds" if core.stages.transforms else "decode_wait_seconds"
            with core.counters.timed(name):
                while not batch.finished.wait(SIGNAL_SECONDS):
                    core.check_open()
        # the frames of its traceback hold the batch, and a cycle would keep its memory
        error, batch.error = batch.error, None
        if error is not None:
            try:
                core.check_open()  # a process of the transform that ends with the pass fails its batch
                raise error
            finally:
                del error  # its traceback has this frame


class Assembler:
    """What the threads share; see the module's picture."""

    def __init__(
        self,
        plans: Prefetcher[BatchPlan | None],
        fetcher: Fetcher,
        stages: Stages,
        memory: Memory,
        *,
        budget: Budget,
        counters: Counters,
    ) -> None:
        self.plans = plans
        self.stages = stages
        self.memory = memory
        self.counters = counters
        self._fetcher = fetcher
        self._arena = memory.arena
        # Blocks of a variable-size field differ: slots bound their number, the fetcher their bytes.
        self._budget = budget
        # Images without `Decode(size=)` are measured by their headers.
        self._measures_images = budget.exact and bool(stages.unsized)
        self._last_bytes = 0  # of the variable-size columns of the batch before
        self._ahead = 0  # blocks that were admitted and that no batch has waited for yet
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
            self._run()
        finally:
            self.plans.close()
            self._fetcher.close()
            self._ended.set()

    def _run(self) -> None:
        while not self._closed:
            with self.counters.timed("gather_seconds"):
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
        except StreamloaderError as problem:
            error = problem
        if error is None:
            self._gather(batch)
        else:
            batch.fail(error)
            del error  # its traceback may have this frame
        return batch

    def next_ready(self) -> Batch | None:
        """Return the next batch, perhaps unfinished; None after the last.

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
        """Raise `EngineError` once closed: no batch is finished any more."""
        if self._closed:
            raise pass_ended()

    def fail(self, error: BaseException) -> None:
        """Record an error that belongs to no batch: it is raised in the waiting thread."""
        error = wrapped(error, "the loader")
        self._fetcher.fail(error)
        self._ready.put(error)

    def close(self) -> None:
        """Let all threads end."""
        self._closed = True
        self.plans.close()
        self._places.release()
        self._fetcher.close()
        self.stages.close()
        with suppress(queue.Empty):
            while True:
                _drop(self._ready.get_nowait())
        self._ready.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the threads of a closed pipeline, `seconds` at most for each; return whether all are done."""
        return self._ended.wait(seconds) and self._fetcher.join(seconds) and self.stages.join(seconds)

    def _look_ahead(self) -> None:
        """Plan until as many blocks wait as there are slots: admission then never waits for the plan.

        Not beyond the end of the next pass, nor beyond `LOOK_AHEAD_ROWS`: plans may have many rows, and few blocks.
        """
        while not self._planned or (
            len(self._wanted) < self._budget.slots and self._ends < 2 and self._planned_rows < LOOK_AHEAD_ROWS
        ):
            if not self.plans.has_next(wait=not self._planned):
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
        most_ahead = AHEAD * self._fetcher.limit
        while self._wanted and self._arena.free and self._ahead < most_ahead:
            if not self._fetcher.fits(self._wanted[0], batches_grow=self._measures_images):
                return
            self._admit_next()

    def _admit_next(self) -> None:
        ref = self._wanted.popleft()
        self._ahead += 1
        self._arena.reserve(ref.ticket)
        self._fetcher.load(ref)

    def _load(self, plan: BatchPlan) -> StreamloaderError | None:
        """Wait until every block that this batch is the first to need is there; return the first error."""
        for ref in plan.needs:
            while self._wanted and self._wanted[0].ticket <= ref.ticket:  # needed now: whatever it weighs
                if not self._arena.free:
                    return EngineError(
                        f"block {ref.start}:{ref.stop} finds no free slot among {self._budget.slots}",
                        "report this with the dataset's manifest: the plan needs more slots than it declares",
                    )
                self._fetcher.check(self._wanted[0])
                self._admit_next()
            with self.counters.timed("fetch_wait_seconds"):
                error = self._fetcher.wait(ref.ticket)
            if error is not None:
                return error
            if self._closed:
                break
            self._ahead -= 1
            self._admit()
        return None

    def _take_places(self, batch: Batch) -> None:
        """Wait until the batch's bytes fit: one much larger than the mean waits until fewer others are there.

        Raises `MemoryBudgetError` where it does not fit at all.
        """
        size, scratch = self.stages.variable_bytes(batch.plan)
        batches, blocks = size + self._last_bytes, self._fetcher.needed
        if self._measures_images:
            batches = size + (self._last_bytes or size) + scratch  # a first batch has successors of about its size
            blocks = self._fetcher.reserve_for_batches(self._budget.unplanned(batches))
        self._budget.check(blocks, batches)
        self._last_bytes = size
        while batch.places < min(READY_BATCHES, -(-size // self._budget.usual_bytes)) and self._place():
            batch.places += 1

    def _gather(self, batch: Batch) -> None:
        if self._closed:
            return
        try:
            with self.counters.timed("gather_seconds"):
                self.stages.start(batch)
        except BaseException as error:  # noqa: BLE001 - the consumer waits for the batch, whatever happens to it
            batch.fail(error)
        for ticket in batch.plan.done:
            self._fetcher.forget(ticket)
            self._arena.release(ticket)
        self._admit()

    def _place(self) -> bool:
        """Wait until there are fewer than READY_BATCHES, the consumer's included; return whether this is still open."""
        begin = time.perf_counter()
        self._places.acquire()
        self.counters.add(full_seconds=time.perf_counter() - begin)
        return not self._closed


def _drop(ready: Batch | StreamloaderError | None) -> None:
    if isinstance(ready, Batch):
        ready.drop()
