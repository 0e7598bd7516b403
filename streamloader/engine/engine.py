"""The engine of a process: plans ahead, admits blocks in the order of first need, and keeps a few batches ready.

    [planner thread] -> [assembler thread: admit -> wait for blocks -> gather -> release] -> stages -> ready -> consumer
                    |                        ^
                    v                        |
              [fetch jobs: ranged read -> verify -> decode into the slot]

Only the assembler admits and releases blocks, so memory accounting needs no lock. Threads hold the `Assembler`, and
deleting the `Engine` ends them. A consumer iterates over one pass, a `Pipeline`. Deleting an incomplete pipeline ends
the threads too; after a complete one, those of an endless engine continue with the next pass.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

from streamloader.engine.budget import READY_BATCHES, Budget, Demand, allot, allowance
from streamloader.engine.dataset import Dataset, index_bytes, load_field, plans, rows_of, share_readers
from streamloader.engine.executor import Executor, Threads, close_all
from streamloader.engine.fetcher import Fetcher, sleeper
from streamloader.engine.memory import KEY_BYTES, Memory, residence_of
from streamloader.engine.pace import FIRST, Hedging, Pace
from streamloader.engine.packing import element_bytes, row_items
from streamloader.engine.residence import ITEM_BYTES, Chunks, Rows
from streamloader.engine.stages import Batch, LoaderConfig, Stages
from streamloader.errors import EngineError, ForkError, MemoryBudgetError, PassEndedError, StreamloaderError, wrapped
from streamloader.options import MIB
from streamloader.order.schedule import LOOK_AHEAD_ROWS, PLANNED_ROWS, BatchPlan, BlockRef, EpochShare, Share
from streamloader.stats import Counters
from streamloader.storage.process import RUNTIME, SIGNAL_SECONDS, Finalizer, Owner, Runtime, take, trim_heaps
from streamloader.zarr.columns import wider_block

# How long a new pass waits for the threads of the previous pass before it allocates its own memory.
JOIN_SECONDS = 0.2
# Blocks that are admitted ahead for each request that may be in flight: one is loading, one is complete.
AHEAD = 2
# Batches that are gathered together: they fit in a core's cache, and their columns share a buffer. With workers, they
# are divided among them.
GATHERED_BYTES = 2 * MIB
MAX_STEPS_AT_ONCE = 16
SHARED_BYTES = 16 * MIB
MAX_SHARED_STEPS = 64
LEAST_GROUPS = 16  # in an epoch: the first batch must not wait for much of it
# Units of several chunks may take so much more memory than units of one chunk, if `memory=` is not given.
UNITS_BYTES = 2048 * MIB
# The maximum number of batches planned ahead: plans are made in spans, each while the batches of the last are gathered.
PLANNED = 256


class Engine:
    """Reads datasets with the same fields, in the process that created it. Loads resident fields once, in `start`.

    `executor`: by default one with as many workers as the configuration says.
    """

    def __init__(
        self, datasets: Sequence[Dataset], config: LoaderConfig, counters: Counters, executor: Executor | None = None
    ) -> None:
        self.datasets = tuple(datasets)
        share_readers(self.datasets)
        self.owner = Owner("threads of a loader")
        self.counters = counters
        if executor is None:
            assert isinstance(config.workers, int)
            executor = Executor(config.workers, partial(counters.add, workers_replaced=1))
        self.executor, self._runtime = executor, executor.runtime
        self.core: Assembler | None = None  # of the last pass
        self._end_threads: Finalizer | None = None
        self._begun = 0  # passes of these threads
        self._upcoming: tuple[Any, ...] = ()  # the arguments of `start` for the pass after the last one
        self._names = datasets[0].names
        # A transform of its own, of which `Stages` have a weak reference: it may be a method of the dataset's owner.
        transform, collate = (each and partial(each) for each in (config.transform, config.collate))
        self._config = replace(config, transform=transform, collate=collate)
        self._resident: dict[str, Rows] = {}
        self._closed = self._runtime.event()  # ends `start`
        # kept, so that the next pass starts at full speed
        self._pace, self._hedging = Pace(FIRST, clock=self._runtime.clock), Hedging()
        retriers = [store.retries for dataset in datasets for store in dataset.stores]
        for retrier in retriers:
            retrier.reached = True  # the manifest was read from this store, maybe in another process
        self.counters.outages = lambda: [retrier.waiting_for for retrier in retriers]

    def start(self, share: EpochShare, position: int, seed: int, steps_at_once: int) -> Pipeline:
        """Start a pass over an epoch from `position` on, and return its pipeline.

        `seed` keys the random numbers of crops and transforms, with epoch and position. Plans have `steps_at_once`
        steps. Raises `MemoryBudgetError` before any sample is read, and `EngineError` if another thread closes.
        """
        closed = self._closed = self._runtime.event()
        core, following = self.core, (share.at_epoch(share.epoch + 1), 0, seed, steps_at_once)
        asked = share, position, seed, steps_at_once
        if core is not None and core.endless and core.passes == self._begun and self._upcoming == asked:
            return self._next_pass(core, following)
        # After a second pass more are likely: from then on the next pass is loaded while the current one drains.
        endless = core is not None and core.passes > 0
        self._end()
        self.executor.start()
        resident, budget = self.plan_memory(share, steps_at_once)
        self._load_resident(resident)
        reader = self.datasets[0].store.reader()
        self.counters.client = f"{reader.kind}: {reader.reason}"
        arrays = [each for dataset in self.datasets for each in dataset.region_readers.values()]
        self.counters.note(chunks=sum(each.num_chunks for each in arrays))
        streamed = tuple(name for name in self._names if name not in resident)
        memory = self._memory(streamed, budget, share)
        # before other threads start, since it raises for an invalid transform
        cached = any(store.cache is not None for dataset in self.datasets for store in dataset.stores)
        limits, blocks = (self._pace, self._hedging), share.blocks if cached else ()
        fetcher = Fetcher(self.datasets, streamed, limits, memory, self.executor, blocks=blocks)
        stages = Stages(
            self._config,
            self._names,
            memory,
            self.executor,
            fetcher.fail,
            resident={name: (self._resident[name], rows_of(self.datasets, name)) for name in resident},
            seed=seed,
            batched=steps_at_once == 1,
        )
        stages.samples_before = partial(_samples_before, share, position, lru_cache(2)(share.at_epoch))
        given = share, position, self.datasets, steps_at_once, self.executor.map
        planned = plans(*given, resident=not streamed, endless=endless)
        most = min(PLANNED, max(2, PLANNED_ROWS // (share.batch * steps_at_once)))
        planner = Planner(planned, most, self._runtime)
        self.core = core = Assembler(planner, fetcher, stages, memory, endless=endless, steps=steps_at_once)
        threads = Threads("assemble", 2, core.fail, runtime=self._runtime)
        self._end_threads = Finalizer(self, _close, core, threads)
        self._begun = 0
        threads.run(core.run)
        threads.run(planner.run)
        if closed.is_set():  # perhaps before there was what ends these threads
            self.close()
            raise PassEndedError
        return self._next_pass(core, following)

    def _next_pass(self, core: Assembler, following: tuple[Any, ...]) -> Pipeline:
        assert self._end_threads is not None
        self._begun += 1
        self._upcoming = following
        return Pipeline(self, core, self._end_threads)

    def current(self, returned: int) -> dict[str, int]:
        """Return the values of `Stats` that are of this moment. `returned`: batches that the consumer got and keeps."""
        values, core = {"memory_bytes": self.executor.arena.allocated}, self.core
        return values if core is None else values | core.current(returned)

    def close(self) -> None:
        """End the threads of the last pass and of a pass that is loaded ahead, and free their memory.

        A thread that is in `start` gets an `EngineError`.
        """
        self._closed.set()
        self.core = None
        self._end()

    def _end(self) -> None:
        if self._end_threads is not None:
            self._end_threads()

    def _load_resident(self, names: Sequence[str]) -> None:
        sleep = sleeper(self._closed)
        for name in names:
            if name not in self._resident:
                readers = self._readers(name)
                ends = list(accumulate(reader.num_samples for reader in readers))
                rows = Rows(name, readers[0].layout.field, self.executor.arena, (1, ends[-1]))
                for reader, end in zip(readers, ends, strict=True):
                    first = end - reader.num_samples
                    mark = partial(_mark_resident, rows, first) if self._config.tolerant else None
                    load_field(reader, rows.values[first:end], self.counters, sleep, on_bad=mark)
                self._resident[name] = rows

    def _memory(self, names: Sequence[str], budget: Budget, share: EpochShare) -> Memory:
        """Return the memory of the last run if it fits and no thread can still write to it, else new memory."""
        core, self.core = self.core, None
        if core is not None:
            memory = core.memory
            ended = memory.is_for(names, self._slot_rows(share), budget) and core.join(JOIN_SECONDS)
            if budget.exact:
                trim_heaps()  # of the thread that made bytes and texts, which another one replaces
            if ended:
                memory.clear(budget, share.time)
                return memory
        readers = {name: self.datasets[0].readers[name] for name in names}
        options: dict[str, Any] = {
            "packs": {**self._config.packs, **self._config.pads},
            "tolerant": self._config.tolerant,
            "rows": row_items(self.datasets) if self._config.rows else None,
        }
        memory = Memory(readers, self._slot_rows(share), budget, self.counters, self.executor.arena, **options)
        memory.buffers.prepare = self._config.page_lock
        return memory

    def plan_memory(self, share: EpochShare, steps_at_once: int = 1) -> tuple[list[str], Budget]:
        """Return the fields to hold in memory, and the budget.

        Holds as many of the manifest's resident fields, smallest first, as leave memory for the window, and streams the
        others. Raises `MemoryBudgetError`, which states the smallest need, if no choice fits.
        """
        choices, allowed = self._choices(share, steps_at_once), allowance(self._config.memory, self._config.ranks_here)
        fitting = [choice for choice in choices if choice[1].least_bytes <= allowed]
        resident, demand = fitting[0] if fitting else min(choices, key=lambda choice: choice[1].least_bytes)
        return resident, allot(demand, self._config.memory, self._config.ranks_here)

    def steps_at_once(self, share: EpochShare) -> int:
        """Return the number of steps to plan and gather together: several if their batches are small.

        They are as many as have `GATHERED_BYTES`, at most 1/16 of the epoch, as long as they need no more slots than
        one. One for batches that are decoded or transformed, which takes longer than gathering them, and if `memory`
        does not suffice for more.
        """
        config = self._config
        if share.budget is not None or config.decoders or config.transform is not None or config.collate is not None:
            return 1
        size = share.batch * sum(max(reader.sample_bytes for reader in self._readers(name)) for name in self._names)
        shared = self.executor.workers > 0
        if config.rows:  # in one process as many tokens as without packing, so that a gather costs each as much
            size = self._row_bytes(beside=shared) * share.batch
        most = min(MAX_SHARED_STEPS if shared else MAX_STEPS_AT_ONCE, share.num_steps(0) // LEAST_GROUPS)
        steps = max(1, min(most, int((SHARED_BYTES if shared else GATHERED_BYTES) / max(1.0, size))))
        held = all(reader.layout.resident for name in self._names for reader in self._readers(name))
        while steps > 1 and not held and share.slots_needed(steps) > share.slots_needed():
            steps //= 2
        fits = self.least_memory(share, steps) <= allowance(config.memory, config.ranks_here)
        return steps if fits else 1

    def widened(self, share: EpochShare) -> EpochShare:
        """Return the share with wider units, if it is not shuffled and windows of arrays reach beyond its units.

        They take up to three quarters of the memory, without `memory=` up to `UNITS_BYTES` more. With several ranks,
        each of which reads whole units, they divide the batches.
        """
        readers = self.datasets[0].region_readers.values()
        if not readers or not isinstance(share, Share) or share.order.shuffle or self.plan_memory(share)[1].keeps:
            return share
        most = allowance(self._config.memory, self._config.ranks_here) * 3 // 4
        if self._config.memory is None:
            most = min(most, self.least_memory(share) + UNITS_BYTES)

        def allowed(unit: int) -> bool:
            divides = share.world.size == 1 or share.batch % unit == 0
            return divides and self.least_memory(replace(share, unit=unit)) <= most

        return replace(share, unit=wider_block(readers, share.unit, allowed))

    def least_memory(self, share: EpochShare, steps_at_once: int = 1) -> int:
        """Return the minimum `memory`, in bytes, that `plan_memory` accepts."""
        return min(demand.least_bytes for _, demand in self._choices(share, steps_at_once))

    def _choices(self, share: EpochShare, steps_at_once: int) -> list[tuple[list[str], Demand]]:
        """Return sets of fields to hold, the largest set first, each with its demand.

        Fields are held only if they are resident in every dataset.
        """
        small = [name for name in self._names if all(reader.layout.resident for reader in self._readers(name))]
        small.sort(key=lambda name: sum(reader.layout.nbytes for reader in self._readers(name)))
        # if blocks have one sample, a chunk has many blocks, so streaming would fetch each chunk many times
        least = len(small) if share.block == 1 and len(small) == len(self._names) else 0
        sets = [small[:count] for count in range(len(small), least - 1, -1)]
        block, rows = share.block, steps_at_once * share.batch
        decoders, readers = self._config.decoders, {name: self._readers(name) for name in self._names}
        # once for each field, not for each set
        held = {name: Rows.resident_demand(readers[name], block, rows, decoders.get(name)) for name in small}
        streamed = {
            name: residence_of(each[0]).demand(each, block, rows, decoders.get(name)) for name, each in readers.items()
        }
        return [
            (each, self._demand({name: held[name] for name in each}, streamed, share, steps_at_once)) for each in sets
        ]

    def _readers(self, name: str) -> list[Any]:
        return [dataset.readers[name] for dataset in self.datasets]

    def _slot_rows(self, share: EpochShare) -> int:
        """Return the samples in a slot: of a block, or the documents that the rows of a block need."""
        pairs = zip(self.datasets, share.blocks, strict=True)
        documents = (data.packed.most_items(block) for data, block in pairs if data.packed is not None)
        return max([share.block, *documents])

    def _row_bytes(self, *, beside: bool = True) -> int:
        """Return the bytes of a packed row, with those of the columns `beside` it."""
        rows = self._config.rows
        element = sum(int(reader.layout.field.item_bytes) for name in rows for reader in self._readers(name)[:1])
        return max(pack.length * (element + beside * element_bytes(pack)) for pack in rows.values())

    def _demand_of_rows(self, share: EpochShare, rows: int) -> list[Demand]:
        """Return the demand of each packed field."""
        fields, slot_rows = [], self._slot_rows(share)
        for name in self._names:
            readers, documents = self._readers(name), 1.0
            for data, reader, block in zip(self.datasets, readers, share.blocks, strict=True):
                assert data.packed is not None
                of_row = reader.layout.field.item_bytes * data.packed.real / len(data.packed)
                documents = max(documents, block * of_row / max(1.0, reader.sample_bytes))
            demand = Chunks.demand(readers, math.ceil(documents), 0)
            fields.append(replace(demand, slot_bytes=demand.item_bytes + slot_rows * ITEM_BYTES))
        keys = slot_rows * KEY_BYTES
        return [*fields, replace(fields[0], slot_bytes=keys, item_bytes=0, batch_bytes=rows * self._row_bytes())]

    def _demand(
        self, resident: Mapping[str, Demand], streamed: Mapping[str, Demand], share: EpochShare, steps_at_once: int
    ) -> Demand:
        """Return the demand with these fields resident and the others streamed."""
        index, fields = share.plan_bytes(len(resident) == len(self._names)), [*{**streamed, **resident}.values()]
        if self._config.rows:
            fields = self._demand_of_rows(share, steps_at_once * share.batch)
        whole = Demand.of(
            fields,
            slots=share.slots_needed(steps_at_once),
            blocks=sum(-(-dataset.num_samples // share.block) for dataset in self.datasets),
            index_bytes=index + index_bytes(self.datasets),
        )
        # batches that are being copied to a device, beside that of the consumer, and the one which its loop would hold
        copied = max(0, self._config.ahead - 2) * whole.batch_bytes
        reused = any(dataset.weights_digest is None for dataset in self.datasets)
        return replace(whole, resident_bytes=whole.resident_bytes + copied, reused=reused)


def _samples_before(share: EpochShare, begin: int, at_epoch: Callable[[int], EpochShare], plan: BatchPlan) -> int:
    """Return how many samples all ranks have had before the step of a plan, with those of earlier epochs.

    The run begins at the position `begin` of the epoch of `share`, and later epochs (`at_epoch`) at 0.
    """
    of_epoch, position = at_epoch(plan.epoch), int(plan.positions[0])
    begin *= plan.epoch == share.epoch
    # where all ranks begin the step
    return of_epoch.samples_before + of_epoch.after(begin, of_epoch.steps_between(begin, position))


def _mark_resident(rows: Rows, first: int, samples: Sequence[int], error: StreamloaderError) -> None:
    rows.mark([first + sample for sample in samples], error)


class Planner:
    """Makes up to `most` plans ahead. One thread runs it, another one takes plans, and any thread may close it."""

    def __init__(self, plans: Iterator[BatchPlan | None], most: int, runtime: Runtime = RUNTIME) -> None:
        self._plans = plans
        self._most = most
        self._ready: deque[BatchPlan | None] = deque()
        self._ended = False
        self._changed = runtime.condition()

    def run(self) -> None:
        """Make plans until the iterator ends or this is closed. Raises the iterator's exceptions."""
        try:
            for plan in self._plans:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._most or self._ended)
                    if self._ended:
                        return
                    self._ready.append(plan)
                    self._changed.notify_all()
        finally:
            self.close()

    def has_next(self, *, wait: bool) -> bool:
        """Return whether a plan is ready. With `wait`, wait for one; False then means that no more will come."""
        if wait and not self._ready:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended)
        return bool(self._ready)

    def take(self) -> BatchPlan | None:
        """Return the next plan, once `has_next` returned True."""
        plan = self._ready.popleft()
        # Waking the other thread costs as much as a plan, so it is woken once half of them are taken. No other thread
        # takes plans, so the number passes the middle whenever the queue was full.
        if len(self._ready) == self._most // 2:
            with self._changed:
                self._changed.notify_all()
        return plan

    def close(self) -> None:
        """Make no more plans; those that are ready can still be taken."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _close(core: Assembler, threads: Threads) -> None:
    core.close()
    close_all(threads)


class Pipeline:
    """Iterates over the finished batches of a pass, in their order.

    An error is raised at the batch that it belongs to. `completed`: the last batch was returned. `close()`, or deleting
    the pipeline, before that ends the threads; a thread that waits for a batch gets an `EngineError`. One thread at a
    time may ask for batches; any thread may close.
    """

    def __init__(self, engine: Engine, core: Assembler, end_threads: Finalizer) -> None:
        self._engine, self._core = engine, core  # threads have a weak reference to the engine's transform
        self.close = Finalizer(self, end_threads)
        self._owner = Owner("threads of this pass")
        self._next: Batch | None = None  # if Ctrl-C ended the wait for a batch, the next call returns it
        self._failed = False
        self.completed, self.counters = False, core.counters

    def __next__(self) -> Batch:
        """Return the next batch. Raises its error, StopIteration after the last, `EngineError` if closed or failed."""
        if self.completed:
            raise StopIteration
        if self._failed:  # StopIteration would look like the end of the epoch, to other threads of the loop too
            raise EngineError("this pass ended with an error, which was raised before", "fix it, and iterate again")
        self.check_process()
        self._core.asked = self._core.clock()
        try:
            self._next = batch = self._next or self._core.next_ready()
            if batch is None:
                self.completed = True
                self._core.passes += 1
                if self._core.endless:
                    self.close.detach()
                self.close()
                raise StopIteration
            self._finish(batch)
        except StreamloaderError:
            self._failed = True
            self.close()
            raise
        self._next = None
        return batch

    def count(self, batch: Batch, asked: float) -> None:
        """Count the steps of a batch that was asked for at a time (`time.perf_counter`) and is returned."""
        samples = len(batch.plan.samples)
        self.counters.delivered(samples, -(-samples // batch.plan.step_rows), asked)

    def is_ready(self) -> bool:
        """Return whether `next` returns a batch, or raises its error, without waiting."""
        if self._next is None:
            return self._core.is_ready()
        return self._next.finished.is_set()

    def check_process(self) -> None:
        """Raise `ForkError` in a forked child."""
        if not self._owner.here:
            raise ForkError("this pass belongs to the process that was forked", "call iter(dataset) in this one")

    def _finish(self, batch: Batch) -> None:
        """Wait for the batch, and raise its error."""
        core = self._core
        if not batch.copied.is_set():
            with core.counters.timed("gather_seconds"):
                while not batch.copied.wait(SIGNAL_SECONDS):
                    core.check_waiting(batch)
        if not batch.finished.is_set():
            name = "transform_wait_seconds" if core.stages.transforms else "decode_wait_seconds"
            with core.counters.timed(name):
                while not batch.finished.wait(SIGNAL_SECONDS):
                    core.check_waiting(batch)
        # the traceback's frames hold the batch, so a batch that holds the error would form a cycle
        error, batch.error = batch.error, None
        if error is not None:
            try:
                core.check_open()
                raise error
            finally:
                del error  # its traceback holds this frame


class Assembler:
    """Assembles batches on its own thread; the other threads hold it too. See the diagram of the module.

    `steps`: the number of batches in a plan.
    """

    def __init__(
        self, plans: Planner, fetcher: Fetcher, stages: Stages, memory: Memory, *, endless: bool, steps: int
    ) -> None:
        self.plans, self._steps = plans, steps
        self.endless = endless  # one pass after the other, until this is closed
        self.stages = stages
        self.memory = memory
        self.passes = 0  # that their consumers completed
        self.counters = memory.counters
        self._fetcher = fetcher
        stages.needed = lambda: fetcher.ledger.needed
        # Slots bound the number of blocks. The bytes of decoded chunks differ, so the fetcher bounds these.
        self._budget = memory.budget
        # With `memory=`, the headers of images give their size.
        self._measures_images = self._budget.exact and stages.decodes
        self._last_bytes = 0  # of the variable-size columns of the previous plan's batch
        self._ahead = 0  # blocks that were admitted and that no batch has waited for yet
        self._planned: deque[BatchPlan | None] = deque()  # None: the end of a pass
        self._planned_rows = 0
        self._planned_ends = 0  # None values in `_planned`
        self._waiting: deque[BlockRef] = deque()  # blocks of the planned batches, to be admitted
        runtime = stages.runtime
        self.clock, self._event = runtime.clock, runtime.event
        self._ready: queue.SimpleQueue[Batch | StreamloaderError | None] = runtime.queue()
        self._seen: list[Batch | StreamloaderError | None] = []  # what `is_ready` took of `_ready`
        self._assembled: deque[Batch] = deque()  # the batches of both, for `current`: a queue cannot be looked into
        self._copying: deque[tuple[Batch, BatchPlan]] = deque()  # whose blocks are still needed
        self._unfinished: list[threading.Event] = []  # of batches in the making: the events keep no columns
        permits = READY_BATCHES + (0 if self._budget.exact else stages.more_batches)
        self._permits, self._most_ready = runtime.semaphore(permits), permits - 1  # training has one
        self._taken = 0  # permits of the last batch returned; asking for the next one releases them
        self.asked = math.inf  # when the consumer began to wait; infinity once it was reported
        self._closed = False
        self._ended = runtime.event()

    def run(self) -> None:
        """Assemble until the plans end, a batch fails, or this is closed; then stop planning and fetching."""
        try:
            self._run()
        finally:
            self.plans.close()
            self._fetcher.close()
            self._ended.set()

    def _run(self) -> None:
        while not self._closed:
            with self.counters.timed("gather_seconds"):
                self._release_copied()
                self._look_ahead()
            if not self._planned or not self._acquire_permit():
                return
            plan = self._planned.popleft()
            self._planned_ends -= plan is None
            self._planned_rows -= 0 if plan is None else len(plan.rows)
            for batch in [None] if plan is None else self._assemble(plan):
                if batch is not None:
                    self._assembled.append(batch)
                self._ready.put(batch)
                if self._closed:
                    _drop(batch)
                    self._assembled.clear()
                if batch is not None and batch.error is not None:
                    return

    def _assemble(self, plan: BatchPlan) -> Iterator[Batch]:
        """Yield the batch of a plan; if it fails, those of its steps up to the one that fails. One has a permit.

        A plan of several steps also fails if their padding is too large.
        """
        failed_ticket, error = self._load(plan)
        batch = self._new_batch(plan)
        if error is None and self._make(batch):
            self._copying.append((batch, plan))
            self._release_copied(wait=self._budget.exact)
            yield batch
            return
        if len(plan.rows) <= plan.step_rows:
            if error is not None:
                batch.fail(error)
            del error  # its traceback may hold this frame
            yield batch
            return
        batch.drop()
        self._permits.release(batch.permits)
        for step in plan.steps():
            if not self._acquire_permit():
                return
            batch = self._new_batch(step)
            if error is not None and step.tickets.max() >= failed_ticket:
                batch.fail(error)
                del error
            else:
                self._make(batch)
                self._wait_for_copies(batch)
            failed = batch.error is not None  # before the consumer takes the error
            yield batch
            if failed:
                return
        self._release(plan)

    def _new_batch(self, plan: BatchPlan) -> Batch:
        batch = Batch(plan, copied=self._event(), finished=self._event())
        self._unfinished.append(batch.finished)
        return batch

    def _release_copied(self, *, wait: bool = False) -> None:
        """Release the blocks of batches whose rows are copied; `wait` for the first of them."""
        while self._copying and (wait or self._copying[0][0].copied.is_set()):
            batch, plan = self._copying.popleft()
            self._wait_for_copies(batch)
            self._release(plan)
            wait = False

    def _wait_for_copies(self, batch: Batch) -> None:
        while not self._closed and not batch.copied.wait(SIGNAL_SECONDS):
            pass

    def _make(self, batch: Batch) -> bool:
        """Gather a batch whose blocks are loaded; return whether that succeeded. Later stages may still fail."""
        if self._closed:
            return True
        try:
            if self._budget.exact:
                self._take_permits(batch)
            with self.counters.timed("gather_seconds"):
                self.stages.start(batch)
        except BaseException as error:  # noqa: BLE001 - the consumer waits for the batch, so it must finish
            batch.fail(error)
            return False
        return True

    def next_ready(self) -> Batch | None:
        """Return the next batch, perhaps unfinished, or None after the last one of a pass.

        Raises an error that belongs to no batch, and `EngineError` once closed.
        """
        self.check_open()
        if self._taken:
            self._permits.release(self._taken)
            self._taken = 0
        batch = self._seen.pop() if self._seen else take(self._ready, self.check_waiting)
        self.check_open()
        if isinstance(batch, StreamloaderError):
            try:
                raise batch
            finally:
                del batch  # see `Pipeline._finish`
        self._taken = batch.permits if batch else 1
        if batch is not None:
            with suppress(IndexError):  # another thread may close
                self._assembled.popleft()
        return batch

    def is_ready(self) -> bool:
        """Return whether `next_ready` has what it returns or raises, and a batch is finished."""
        with suppress(queue.Empty):
            if not self._seen:
                self._seen.append(self._ready.get_nowait())
        return any(not isinstance(batch, Batch) or batch.finished.is_set() for batch in self._seen)

    def current(self, returned: int) -> dict[str, int]:
        """Return how many batches and blocks are ready, and how many may be: see `Stats`.

        `returned`: batches that the consumer got and keeps.
        """
        finished = [batch for batch in self._assembled.copy() if batch.finished.is_set()]
        batches = sum(-(-len(batch.plan.samples) // batch.plan.step_rows) for batch in finished)
        return {
            "ready_batches": returned + batches,
            "ready_batches_limit": (self._most_ready + 1) * self._steps - 1,  # training has one
            "ready_blocks": max(0, self._ahead - self._fetcher.loading),
            "ready_blocks_limit": self._budget.slots,
            "memory_limit": self._budget.bytes,
        }

    def check_open(self) -> None:
        """Raise `EngineError` once closed: no more batches are finished."""
        if self._closed:
            raise PassEndedError

    def check_waiting(self, batch: Batch | None = None) -> None:
        """Raise `EngineError` once closed. Report a wait of `stall_seconds` for a batch, once."""
        self.check_open()
        seconds = self.clock() - self.asked
        if seconds < self.stages.stall_seconds:
            return
        self.asked = math.inf
        if batch is None:
            where = f"{self._fetcher.describe()}; {len(self._planned)} batches are planned"
            where += f", {len(self._copying)} are being copied" if self._copying else ""
        else:
            where = self.stages.describe(batch)
        outages = "".join(f"; {outage}" for outage in self.counters.outages() if outage)
        text = "rank %d has waited for a batch for %.0f s: %s%s"
        logging.getLogger("streamloader").warning(text, self.stages.rank, seconds, where, outages)

    def fail(self, error: BaseException) -> None:
        """Record an error that belongs to no batch; the consumer's thread raises it."""
        error = wrapped(error, "the loader")
        self._fetcher.fail(error)
        self._ready.put(error)

    def close(self) -> None:
        """Let the threads end."""
        self._closed, self.endless = True, False
        self.plans.close()
        self._permits.release()
        self._fetcher.close()
        self.stages.close()
        with suppress(queue.Empty):
            while True:
                _drop(self._seen.pop() if self._seen else self._ready.get_nowait())
        self._assembled.clear()
        self._ready.put(None)

    def join(self, seconds: float) -> bool:
        """After `close`, wait at most `seconds` for each thread; return whether all have ended."""
        return self._ended.wait(seconds) and self._fetcher.join(seconds) and self.stages.join(seconds)

    def _look_ahead(self) -> None:
        """Take plans until as many blocks wait as there are slots, so that admission never waits for plans.

        Stops at the end of the next pass, and at `LOOK_AHEAD_ROWS`: plans may have many rows and few blocks.
        """
        while not self._planned or (
            len(self._waiting) < self._budget.slots and self._planned_ends < 2 and self._planned_rows < LOOK_AHEAD_ROWS
        ):
            if not self.plans.has_next(wait=not self._planned):
                break
            plan = self.plans.take()
            self._planned.append(plan)
            if plan is None:
                self._planned_ends += 1
            else:
                self.memory.expect(plan)
                self._waiting.extend(plan.needs)
                self._planned_rows += len(plan.rows)
        self._admit()

    def _admit(self) -> None:
        """Begin to load the next blocks, limited by slots, bytes, and `AHEAD` blocks per request in flight.

        The last limit leaves slots unused, which cost nothing until their first use. It is for a store that responds:
        while requests wait until they are repeated, what is read ahead lasts longer without it.
        """
        most_ahead = math.inf if self._fetcher.delayed else AHEAD * self._fetcher.pace.limit
        while self._waiting and self.memory.free and self._ahead < most_ahead:
            if not self._fetcher.fits(self._waiting[0], batches_grow=self._measures_images):
                return
            self._admit_next()

    def _admit_next(self) -> None:
        ref = self._waiting.popleft()
        self._fetcher.load(ref)
        self._ahead += 1  # after it, so that `current` does not take it for loaded

    def _load(self, plan: BatchPlan) -> tuple[int, StreamloaderError | None]:
        """Wait until all new blocks of a plan are loaded; return the first error, with the ticket of its block."""
        for ref in plan.needs:
            while self._waiting and self._waiting[0].ticket <= ref.ticket:  # needed now, so `fits` does not matter
                if not self.memory.free and self._copying:
                    self._release_copied(wait=True)
                    continue
                if not self.memory.free:
                    problem = f"none of {self._budget.slots} slots is free for block {ref.start}:{ref.stop}"
                    remedy = "report this with the dataset's manifest: the plan needs more slots than it declares"
                    return ref.ticket, EngineError(problem, remedy)
                try:
                    self._fetcher.check(self._waiting[0])
                except MemoryBudgetError as too_little:
                    return ref.ticket, too_little
                self._admit_next()
            with self.counters.timed("fetch_wait_seconds"):
                error = self._fetcher.wait(ref.ticket)
            if error is not None:
                return ref.ticket, error
            if self._closed:
                break
            self._ahead -= 1
            self._admit()
        return 0, None

    def _take_permits(self, batch: Batch) -> None:
        """Wait until the batch fits: one that is much larger than the mean takes several permits.

        Raises `MemoryBudgetError` if it never fits, and `DecodeError`.
        """
        size, scratch = self.stages.variable_bytes(batch.plan)
        batches, blocks = size + self._last_bytes, self._fetcher.ledger.needed
        if self._measures_images:
            batches = size + (self._last_bytes or size)  # a first batch has successors of about its size
        batches = max(batches, self.stages.padded_bytes())
        if self._measures_images:
            blocks = self._fetcher.leave(self._budget.unplanned(batches) + scratch)
        self._budget.check(blocks, batches, scratch)
        self._last_bytes = size
        while batch.permits < min(READY_BATCHES, -(-size // self._budget.usual_bytes)) and self._acquire_permit():
            batch.permits += 1

    def _release(self, plan: BatchPlan) -> None:
        """Release the blocks that no later plan needs."""
        if self._closed:
            return
        for ticket in plan.done:
            self._fetcher.release(ticket)
        self._admit()

    def _acquire_permit(self) -> bool:
        """Wait until fewer than `READY_BATCHES` exist, including the consumer's; return whether this is still open."""
        begin = self.clock()
        self._permits.acquire()
        end = self.clock()
        self._unfinished = [finished for finished in self._unfinished if not finished.is_set()]
        if not self._unfinished:  # otherwise batches were decoded or transformed all this time
            self.counters.add(full_seconds=max(0.0, end - max(begin, self.stages.finished_at)))
        return not self._closed


def _drop(ready: Batch | StreamloaderError | None) -> None:
    if isinstance(ready, Batch):
        ready.drop()
