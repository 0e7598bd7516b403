"""The engine with a store, workers and a consumer that a seeded scheduler runs, and the laws of each schedule.

`Run(seed).run()` reads some epochs of a small dataset, by threads or by workers. The seed also chooses the order's
parameters, the memory, which requests fail, are damaged or late, which workers are killed, and when somebody closes.
"""

import gc
import signal
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from scheduler import Queue, Scheduler, Task, Violation

import streamloader as sl
from streamloader.engine import budget, engine, executor, ledger, messages, stages, workers
from streamloader.engine.arena import Arena, MappedMemory
from streamloader.engine.dataset import Dataset
from streamloader.engine.engine import Engine
from streamloader.engine.executor import Executor
from streamloader.engine.pace import LEAST_SAMPLES
from streamloader.engine.stages import LoaderConfig, split_steps
from streamloader.errors import (
    CorruptError,
    EngineError,
    MissingObjectError,
    NotFoundError,
    StreamloaderError,
    ThrottledError,
    TransientError,
)
from streamloader.format.opening import open_root
from streamloader.format.reader import FieldReader
from streamloader.options import RetryPolicy
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import BatchPlan, Share, World
from streamloader.stats import Counters
from streamloader.storage import open_store
from streamloader.storage.buffers import Allocate, Receiver, empty_buffer
from streamloader.storage.retry import Retrier, Timing
from streamloader.storage.store import RangeReader, Store
from streamloader.testing.order import Order, samples, steps

COUNT = 16
SHARD = 8  # samples
FIELDS = {"x": "float32[257]", "s": "bytes", "z": "ragged:int32"}
POLICY = RetryPolicy(base_seconds=0.05, cap_seconds=0.5, outage_seconds=60, request_seconds=60, probe_seconds=0.3)


def value(name: str, sample: int) -> Any:
    """Return the value of a sample of a field."""
    if name == "s":
        return bytes([sample]) * (10 + 37 * sample % 90)
    size = 257 if name == "x" else 1 + 31 * sample % 300
    return np.arange(size, dtype="float32" if name == "x" else "int32") // 50 + 1000 * sample


VALUES = {name: [value(name, sample) for sample in range(COUNT)] for name in FIELDS}


# ---- the store


class VirtualReader(RangeReader):
    """A reader whose client raises our errors."""

    def read(self, path: str, start: int, stop: int, allocate: Allocate = empty_buffer) -> memoryview:
        return memoryview(self.fetch(path, start, stop, Receiver(allocate, self.on_repeat)))


class VirtualStore(Store):
    """A store in memory, whose requests and retries are those of the present `Run`."""

    run: Any = None
    objects: dict[str, bytes]

    def __init__(self, folder: str) -> None:
        super().__init__(open_store(folder).location)
        root = Path(folder)
        self.objects = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    @property
    def retries(self) -> Retrier:
        return self._retries if self.run is None else self.run.retrier  # type: ignore[no-any-return]

    _retries = Retrier(POLICY, "the store")

    def reader(self) -> RangeReader:
        return VirtualReader("test", "", self.fetch, "", self.location)

    def get(self, path: str) -> bytes:
        return self.objects[path]

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        return self.objects[path][start:stop]

    def get_tail(self, path: str, size: int) -> bytes:
        return self.objects[path][-size:]

    def fetch(self, path: str, start: int, stop: int, receiver: Receiver) -> Any:
        body = self.objects[path][start:stop]
        return body if self.run is None else self.run.transport.respond(path, start, body, receiver)

    def __reduce__(self) -> Any:
        return store, ()


class Reader(FieldReader):
    """A reader whose chunk table is read by a request, if the present `Run` says so."""

    def knows_runs(self, start: int, stop: int) -> bool:
        run = self.store.run  # type: ignore[attr-defined]
        return not (run and run.reads_tables) and super().knows_runs(start, stop)

    def runs(self, start: int, stop: int, *more: Any) -> Any:
        run = self.store.run  # type: ignore[attr-defined]
        if run and run.reads_tables:
            self.store.retries.call(run.transport.answer)
        return super().runs(start, stop, *more)

    def __reduce__(self) -> Any:
        return reader_of, (self.name,)


@cache
def store() -> VirtualStore:
    """Return the store, with a dataset."""
    with TemporaryDirectory() as folder:
        layout = sl.Layout(chunk_size=4112, block_size=1 << 15, samples_per_shard=SHARD)
        with sl.Writer(folder, FIELDS, layout=layout, num_samples=COUNT) as out:
            for sample in range(COUNT):
                out.write({name: values[sample] for name, values in VALUES.items()})
        return VirtualStore(folder)


@cache
def reader_of(name: str) -> Reader:
    reader = Reader(store(), open_root(store()).manifest, name)
    FieldReader.runs(reader, 0, COUNT)
    return reader


@cache
def dataset_of(names: tuple[str, ...]) -> Dataset:
    dataset = Dataset(store(), open_root(store()).manifest, names)
    dataset.__dict__["readers"] = {name: reader_of(name) for name in names}
    return dataset


@dataclass(frozen=True)
class Faults:
    """How often responses are other than expected: probabilities, and the seconds of an outage."""

    throttled: float = 0.0
    reset: float = 0.0
    damaged: float = 0.0
    short: float = 0.0
    stalled: float = 0.0
    outage: tuple[float, float] = (0.0, 0.0)


class Transport:
    """Responds to requests after some virtual time, with errors and damage as a seed says.

    `lost`: samples of fields whose chunk is missing or damaged for good.
    """

    MOST = 2  # faults of one range: then it is read

    def __init__(self, scheduler: Scheduler, faults: Faults, lost: dict[str, tuple[int, int, bool]]) -> None:
        self._scheduler, self._random, self.faults = scheduler, Random(scheduler.random.random()), faults
        self._lost = lost  # by path: the first and the last byte, and whether the object is missing
        self._had: dict[tuple[str, int], int] = {}
        self.late = 0

    def answer(self) -> None:
        """Respond without a body."""
        self._scheduler.sleep(0.02 * self._random.random())
        begin, end = self.faults.outage
        if begin <= self._scheduler.clock.time() < end:
            raise TransientError("the store is away", "wait")

    def respond(self, path: str, start: int, body: bytes, receiver: Receiver) -> Any:
        """Respond with the bytes of a range, by the memory of the receiver or by the client's own."""
        draw, faults = self._random.random, self.faults
        self.answer()
        if draw() < faults.stalled:
            self._scheduler.sleep(0.6 + 0.6 * draw())
            self.late += 1
        fault, had = draw(), self._had.get((path, start), 0)
        kinds = ("throttled", "reset", "damaged", "short") if had < self.MOST else ()
        for kind in kinds:
            if fault < getattr(faults, kind):
                self._had[path, start] = had + 1
                return self._fail(kind, body, receiver)
            fault -= getattr(faults, kind)
        first, last, missing = self._lost.get(path, (0, 0, False))
        if start < last and first < start + len(body):
            if missing:
                raise NotFoundError(f"{path} does not exist", "restore it")
            at = max(first, start) - start
            body = body[:at] + bytes([body[at] ^ 255]) + body[at + 1 :]
        if draw() < 0.3:
            return body
        return self._receive(body, receiver, len(body))

    def _receive(self, body: bytes, receiver: Receiver, size: int) -> memoryview:
        memory, half = receiver.allocate(len(body)), size // 2
        memory[:half] = body[:half]
        self._scheduler.point()  # a worker may be killed here
        memory[half:size] = body[half:size]
        return memory[:size]

    def _fail(self, kind: str, body: bytes, receiver: Receiver) -> Any:
        size = int(len(body) * self._random.random())
        if kind == "throttled":
            raise ThrottledError("503", "wait")
        if kind == "reset":
            self._receive(body, receiver, size)
            raise TransientError("reset", "retry") from TimeoutError()
        if kind == "damaged":
            body = body[:size] + bytes([body[size] ^ 1]) + body[size + 1 :]
            return self._receive(body, receiver, len(body))
        return self._receive(body, receiver, size)


# ---- workers

WORKERS = "a worker", "the thread that receives"


class Connection:
    """One end of a connection, which the other end, or the death of a worker, may have ended."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.received = Queue(scheduler)
        self.other: Connection
        self.arrived: Callable[[], None] = bool  # after a message or the end has arrived
        self.ended = False  # at the other end

    def fileno(self) -> int:
        return id(self)

    def send_bytes(self, data: bytes) -> None:
        if self.ended:
            raise BrokenPipeError
        self.other.received.put(data)
        self.other.arrived()

    def recv_bytes(self) -> bytes:
        data = self.received.get()
        if data is None:
            self.received.put(None)
            raise EOFError
        return data  # type: ignore[no-any-return]

    def end(self) -> None:
        """End the connection: each end reads what was sent, and then the end."""
        for each in (self, self.other):
            if not each.ended:
                each.ended = True
                each.received.put(None)
                each.arrived()

    def close(self) -> None:
        self.end()


class Worker:
    """A worker process: threads that serve connections until it is killed."""

    def __init__(self) -> None:
        self.killed = False
        self.threads: list[tuple[Task, Connection]] = []


class VirtualPool(workers.Pool):
    """The pool, with workers that are threads of the scheduler and connections that are queues."""

    def __init__(self, scheduler: Scheduler, arena: Arena) -> None:
        self._scheduler, self.arena = scheduler, arena
        self._mapped = MappedMemory(arena._map)
        self.serves = scheduler.runtime.event()
        self._workers: list[Any] = []
        self._functions, self._receivers = {}, {}
        self._deaths = deque(maxlen=workers.MAX_DEATHS)
        self._lock = threading.Lock()  # type: ignore[assignment]
        self._ended = False
        self._arrived = Queue(scheduler)
        self._receiver: Task | None = None

    def grow(self, count: int) -> None:
        self._workers += [Worker() for _ in range(count - len(self._workers))]

    def _renew(self, index: int) -> int:
        self._workers[index] = Worker()
        return -signal.SIGKILL

    def connect(self, number: int) -> Any:
        worker, ours, theirs = self._workers[number], Connection(self._scheduler), Connection(self._scheduler)
        ours.other, theirs.other = theirs, ours
        ours.arrived = lambda: self._arrived.put(ours)
        if worker.killed:
            ours.ended = theirs.ended = True
            ours.received.put(None)
        else:
            thread = Task(self._scheduler, self._serve, (theirs,), WORKERS[0])
            worker.threads.append((thread, theirs))
            thread.start()
        return worker, ours

    def _serve(self, connection: Any) -> None:
        try:
            workers._serve(connection, self._mapped)
        finally:
            messages._LOCAL.__dict__.clear()  # the thread of the system may be one of the parent's next

    def kill(self, worker: Worker) -> None:
        """Kill a worker wherever its threads are."""
        worker.killed = True
        for thread, connection in worker.threads:
            self._scheduler.kill(thread)
            connection.end()

    def watch(self, connection: Any, receive: Callable[[], None]) -> None:
        self._receivers[connection.fileno()] = receive
        if self._receiver is None:
            self._receiver = Task(self._scheduler, self._receive, (), WORKERS[1])
            self._receiver.start()
        self._arrived.put(connection)  # what it received before

    def _receive(self) -> None:
        while (connection := self._arrived.get()) is not None:
            if connection.fileno() in self._receivers and not connection.received.empty():
                self._receivers[connection.fileno()]()
                self._arrived.put(connection)

    def receive(self, connection: Any) -> bytes:  # type: ignore[override]
        return connection.recv_bytes()  # type: ignore[no-any-return]

    def shut(self, connection: Any) -> None:
        connection.end()

    def forget(self, connection: Any) -> None:
        del self._receivers[connection.fileno()]

    def end(self) -> None:
        """End the workers and the thread that receives, as the end of the process does."""
        self._ended = True
        for worker in self._workers:
            self.kill(worker)
        self._arrived.put(None)


# ---- the runs


@cache
def arena() -> Arena:
    return Arena(shared=False)


class CachedShare(Share):
    """A share whose plans are computed once, unless workers are to compute them."""

    def plans(self, position: int, stop: Any = None, steps_at_once: int = 1, ticket: int = 0, **given: Any) -> Any:
        if store().run.plan.plans_by_workers:
            return super().plans(position, stop, steps_at_once, ticket, **given)
        return plans_of(self, position, stop, steps_at_once, ticket)


@cache
def plans_of(share: Share, *given: Any) -> list[BatchPlan]:
    return list(Share.plans(share, *given))


@cache
def share_of(order: OrderParams, batch: int, world: tuple[int, int], remainder: Any, epoch: int) -> CachedShare:
    return CachedShare(EpochOrder(COUNT, order, 0, epoch), batch, World(*world), remainder)


@cache
def expected(order: Order, batch: int, world: tuple[int, int], remainder: str) -> list[list[int]]:
    """Return the samples of each step of a rank."""
    numbers = samples(order)
    rank, size = world
    found = []
    for step in steps(order, batch, size, remainder, 0):
        positions = step[rank]
        found.append([numbers[p if p < COUNT else p - batch * size] for p in positions])
    return [step for step in found if step]  # an uneven last step may have none of a rank


@dataclass(frozen=True)
class Plan:
    """What a seed chooses."""

    names: tuple[str, ...]
    block: int
    lanes: int
    window: int
    batch: int
    world: tuple[int, int]
    remainder: str
    steps: int  # at once
    epochs: int
    more_memory: int | None
    tight: int  # bytes of blocks, 0 for as many as the engine plans
    workers: int
    kills: int
    reads_tables: bool
    plans_by_workers: bool
    faults: Faults
    lost: tuple[str, int, bool] | None
    closes_after: int | None  # batches, or by another thread after at most as many times 0.01 s if negative
    keeps: int  # batches that the consumer holds

    @classmethod
    def of(cls, seed: int) -> "Plan":
        random = Random(seed)
        choose, chance = random.choice, lambda p: random.random() < p
        lost = (choose(("x", "s")), random.randrange(COUNT), chance(0.3)) if chance(0.15) else None
        names = choose((("x",), ("x",), ("s",), ("z",), ("x", "s"), ("x", "z")))
        lost = None if lost is None else (choose(names), *lost[1:])
        rates = {kind: choose((0.0, 0.05, 0.2)) for kind in ("throttled", "reset", "damaged", "short", "stalled")}
        begin = 0.2 * random.random()
        faulty = Faults(**rates, outage=(begin, begin + choose((0.0, 0.0, 0.0, 1.0))))  # type: ignore[arg-type]
        block = choose((4, 8))
        workers = choose((0, 0, 1, 2))
        return cls(
            names=names,
            block=block,
            lanes=1 if lost else choose((1, 2)),
            window=block * choose((2, 3)),
            batch=choose((3, 4, 8)),
            world=choose(((0, 1), (0, 1), (1, 2))),
            remainder=choose(("pad", "drop", "uneven")),
            steps=choose((1, 1, 2)),
            epochs=choose((1, 1, 1, 2, 3)),
            more_memory=choose((None, 0, 1 << 12, 1 << 20)),
            tight=choose((0, 0, 256, 1024)),
            workers=workers,
            kills=choose((0, 1, 1, 2)) if workers else 0,
            reads_tables=chance(0.2),
            plans_by_workers=chance(0.1),
            faults=faulty if chance(0.7) else Faults(),
            lost=lost,
            closes_after=None if chance(0.7) else choose((0, 1, 2, 3, -1, -10, -30, -100)),
            keeps=choose((1, 1, 2, 4)),
        )


class Run:
    """The reads of some epochs under one schedule."""

    def __init__(self, seed: int, plan: Plan | None = None, **engines: Any) -> None:
        self.plan = plan = plan or Plan.of(seed)
        self.scheduler = scheduler = Scheduler(seed, self.check)
        self.reads_tables = plan.reads_tables
        jitter = Random(seed).random
        self.retrier = Retrier(POLICY, "the store", Timing(scheduler.clock.time, scheduler.sleep, jitter))
        self.transport = Transport(scheduler, plan.faults, self._lost_bytes())
        self.pool = VirtualPool(scheduler, arena()) if plan.workers else None
        self.finalizers: list[Any] = []
        store().run, self._before = self, arena().allocated
        counters, jobs = Counters(), Executor(plan.workers, bool, scheduler.runtime, self.pool)
        jobs.arena = arena()
        config = LoaderConfig(memory=self._memory(counters, jobs))
        self.engine = Engine([dataset_of(plan.names)], config, counters, jobs)
        if plan.tight:
            self.engine.plan_memory = self._plan_memory  # type: ignore[method-assign]
        for _ in range(LEAST_SAMPLES + 20):  # requests can be late from the beginning
            self.engine._hedging.completed(1 << 10, 0.02)
        self.held: deque[tuple[Any, list[int]]] = deque(maxlen=plan.keeps)
        self.delivered, self.pipelines, self.closing = 0, list[Any](), False
        self.passes, self.closed = 0, 0  # that began, and the one in which another thread has closed

    def _memory(self, counters: Counters, jobs: Executor) -> int | None:
        plan = self.plan
        if plan.more_memory is None:
            return None
        least = Engine([dataset_of(plan.names)], LoaderConfig(), counters, jobs).least_memory
        return least(self.share(0), plan.steps) + plan.more_memory

    def _plan_memory(self, *given: Any) -> tuple[list[str], budget.Budget]:
        """Return a budget for which blocks that are loaded ahead have too little memory now and then."""
        resident, planned = Engine.plan_memory(self.engine, *given)
        return resident, planned._replace(body_bytes=self.plan.tight)

    def share(self, epoch: int) -> Share:
        plan = self.plan
        return share_of(OrderParams(plan.block, plan.lanes, plan.window), plan.batch, plan.world, plan.remainder, epoch)

    def _lost_bytes(self) -> dict[str, tuple[int, int, bool]]:
        if self.plan.lost is None:
            return {}
        name, sample, missing = self.plan.lost
        (run,) = reader_of(name)._runs(sample, sample + 1, 1)
        return {run.path: (0, 1 << 30, True) if missing else (run.start, run.stop, False)}

    def lost(self, sample: int) -> bool:
        """Return whether the block of a sample cannot be read."""
        plan = self.plan
        if plan.lost is None:
            return False
        _, lost, missing = plan.lost
        size = SHARD if missing else plan.block
        block = sample // plan.block * plan.block
        return block // size == lost // size

    def run(self) -> None:
        """Run the schedule. Raises `Violation`, or what the engine raises though it should not."""
        try:
            self.scheduler.run(self._consume)
            self._check_end()
        finally:
            store().run = None

    # ---- the consumer

    def _consume(self) -> None:
        plan = self.plan
        if self.pool is not None and plan.kills:
            Task(self.scheduler, self._kill, (), "the killer").start()
        if plan.closes_after is not None and plan.closes_after < 0:
            Task(self.scheduler, self._close, (), "a thread that closes").start()
        try:
            for epoch in range(plan.epochs):
                if not self._read(epoch):
                    break
        finally:
            self.engine.close()
            if self.pool is not None:
                while threads := [task for task in self.scheduler.tasks if task.name not in WORKERS]:
                    threads[0].join()
                self.pool.end()

    def _kill(self) -> None:
        for _ in range(self.plan.kills):
            self.scheduler.sleep(0.1 * self.scheduler.random.random())
            for _ in range(int(60 * self.scheduler.random.random())):
                self.scheduler.point()
            if self.pool is not None and self.pool._workers:
                self.pool.kill(self.scheduler.random.choice(self.pool._workers))

    def _close(self) -> None:
        random = self.scheduler.random.random
        if random() < 0.5:  # otherwise among the first steps
            self.scheduler.sleep(-0.01 * (self.plan.closes_after or 0) * random())
        for _ in range(int(40 * random())):
            self.scheduler.point()
        self.closing, began = True, self.passes
        self.engine.close()
        self.closed = began  # a pass that started meanwhile may go on

    def _read(self, epoch: int) -> bool:
        """Read an epoch, and return whether it ended."""
        plan = self.plan
        wanted = expected(self._order(epoch), plan.batch, plan.world, plan.remainder)
        steps = iter(wanted)
        self.passes += 1
        try:
            pipeline = self.engine.start(self.share(epoch), 0, 0, plan.steps)
        except EngineError:
            if self.closing:
                return False
            raise
        self.pipelines.append(pipeline)
        while True:
            if plan.closes_after == self.delivered:
                pipeline.close()
            closed = self.closed == self.passes
            try:
                batch = next(pipeline, None)
            except StreamloaderError as error:
                self._check_error(error, next(steps, None), pipeline)
                return False
            if batch is None:
                break
            if closed or (plan.closes_after is not None and 0 <= plan.closes_after <= self.delivered):
                raise Violation("a batch after the end")
            parts = list(split_steps(batch))
            for part, columns in parts:
                self._check_batch(part, columns, next(steps, None))
            self.held.append((parts, []))
            self.delivered += 1
            for parts, _ in self.held:
                for part, columns in parts:
                    self._check_values(part.samples.tolist(), columns)
            self.scheduler.point()
        if next(steps, None) is not None:
            raise Violation(f"epoch {epoch} ended early")
        return True

    def _order(self, epoch: int) -> Order:
        return Order(COUNT, self.plan.block, self.plan.lanes, self.plan.window, 0, epoch)

    def _check_batch(self, part: Any, columns: Any, wanted: list[int] | None) -> None:
        got = part.samples.tolist()
        if got != wanted:
            raise Violation(f"batch {self.delivered} has the samples {got}, not {wanted}")
        if any(map(self.lost, got)):
            raise Violation(f"batch {self.delivered} has lost samples: {got}")

    def _check_values(self, numbers: list[int], columns: Any) -> None:
        for name in self.plan.names:
            column, values = columns[name], VALUES[name]
            for row, sample in enumerate(numbers):
                got = column[row] if name != "z" else column.values[column.offsets[row] : column.offsets[row + 1]]
                if not (got == values[sample] if name == "s" else np.array_equal(got, values[sample])):
                    raise Violation(f"sample {sample} of {name} is wrong in batch {self.delivered}")

    def _check_error(self, error: StreamloaderError, wanted: list[int] | None, pipeline: Any) -> None:
        """Check that an error is raised where it belongs, and not again."""
        plan = self.plan
        closed = self.closing or (plan.closes_after is not None and 0 <= plan.closes_after <= self.delivered)
        lost = wanted is not None and any(map(self.lost, wanted))
        deaths = self.pool is not None and len(self.pool._deaths) == workers.MAX_DEATHS and "ended" in str(error)
        if not (
            (closed and type(error).__name__ == "PassEndedError")
            or (lost and isinstance(error, MissingObjectError if plan.lost and plan.lost[2] else CorruptError))
            or deaths
        ):
            raise Violation(f"{error!r} in place of batch {self.delivered}") from error
        try:
            next(pipeline)
        except EngineError as again:
            if again is error or type(again) is not EngineError:
                raise Violation(f"{again!r} is raised twice") from error
        else:
            raise Violation("a batch after an error")

    # ---- the laws

    def check(self) -> None:
        """Check between two steps that slots and bytes are conserved."""
        core = self.engine.core
        if core is None:
            return
        memory, fetcher = core.memory, core._fetcher
        kept, slots = memory._kept, memory.budget.slots + memory.budget.kept_slots
        used = {slot for slot in memory._slots.values() if slot >= 0}
        free, unused = memory._free, kept._unused
        if len(free) + len(used) + len(unused) != slots or len(used.union(free, unused)) != slots:
            raise Violation(f"slots: {free} free, {used} used, {[*unused]} kept, of {slots}")
        if not fetcher._changed.free:
            return
        of = fetcher.ledger
        if of.needed != sum(of._used.values()) or min(of._held.values(), default=0) < 0:
            raise Violation(f"bytes: {of.needed} needed, {of._used} used, {of._held} held")
        if of._held.keys() != fetcher._blocks.keys() or not of._loading.keys() <= of._held.keys():
            raise Violation(f"blocks: {[*fetcher._blocks]}, {[*of._held]} held, {[*of._loading]} loading")
        left = sum(block.left for block in fetcher._blocks.values())
        pieces = len(fetcher._pieces)
        if not 0 <= fetcher._busy <= memory.budget.threads or fetcher._writers < 0 or left < pieces:
            raise Violation(f"{fetcher._busy} busy, {fetcher._writers} writing, {left} left, {pieces} pieces")

    def _check_end(self) -> None:
        """Check that nothing is held once all threads have ended."""
        self.held.clear()
        self.pipelines.clear()
        pool, self.pool = self.pool, None
        del self.engine, pool
        for finalizer in self.finalizers:
            finalizer.detach()
        self.finalizers.clear()
        gc.collect()
        gc.freeze()  # what is cached now
        if (more := arena().allocated - self._before) > 0:
            raise Violation(f"{more} bytes are held after the end")


def finalize_by_hand(_: object, call: Callable[..., None], *held: Any) -> Any:
    """Return what calls a function if it is called: in no thread of its own, which the scheduler would not know."""
    run = store().run
    finalizer = weakref.finalize(run, call, *held)
    run.finalizers.append(finalizer)
    return finalizer


@contextmanager
def one_machine() -> Iterator[None]:
    """Let schedules be the same on each machine, and collect no garbage in the middle of one."""
    gc.collect()
    gc.freeze()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of workers that were replaced
        patch.setattr(budget, "machine_memory", lambda: 8 << 30)
        patch.setattr(budget, "cpu_count", lambda: 2)
        patch.setattr(engine, "PLANNED", 4)
        patch.setattr(ledger, "TOLERANCE_BYTES", 1 << 10)  # blocks of this dataset are small
        for module in (engine, executor, stages):
            patch.setattr(module, "Finalizer", finalize_by_hand)
        try:
            yield
        finally:
            gc.enable()
            gc.unfreeze()


def try_seeds(seeds: Iterable[int], **given: Any) -> None:
    """Run the schedules of seeds. Raises an error that says how to repeat the one that fails."""
    with one_machine():
        for seed in seeds:
            try:
                Run(seed, **given).run()
            except Exception as error:
                raise AssertionError(f"schedule {seed}: {error}") from error
