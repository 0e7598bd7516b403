"""An opened dataset, ready to run: which fields are streamed, which are resident, and within how much memory."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.decode.image import ImageDecoder
from streamloader.engine.arena import ITEM_BYTES, Arena, BatchBuffers, Bodies, Memory
from streamloader.engine.budget import LIVE_BATCHES, MAX_THREADS, TOLERANCE_BYTES, Budget, Demand, allot, allowance
from streamloader.engine.fetch import sleeper
from streamloader.engine.line import Line
from streamloader.engine.passes import Course, Need
from streamloader.engine.pipeline import Engine, Pipeline
from streamloader.engine.resident import load_whole
from streamloader.engine.source import Source, Stored
from streamloader.engine.stages import Recipe
from streamloader.engine.transform import HeldTransform, Tensors, Transform
from streamloader.format.manifest import FieldLayout
from streamloader.format.reader import MAX_REQUEST, FieldReader
from streamloader.options import MIB, Pack
from streamloader.plan.order import OrderParams
from streamloader.plan.selection import Selection
from streamloader.stats import Counters
from streamloader.storage.protocol import Store

# How many times its encoded size a photograph takes decoded: a JPEG of usual quality spends 2 to 3 bits a pixel.
IMAGE_EXPANSION = 10

# How long a new pass waits for the threads of the one before it; then it leaves them their memory and takes its own.
JOIN_SECONDS = 0.2


@dataclass(frozen=True)
class Wish:
    """What the caller wants of the samples, and within how many bytes (`memory`, None for the need).

    `tensors` knows the tensors that a transform may return.
    """

    decoders: Mapping[str, ImageDecoder] = field(default_factory=dict)
    packs: Mapping[str, Pack] = field(default_factory=dict)
    transform: Transform | None = None
    transform_workers: int = 0
    memory: int | None = None
    ranks_here: int = 1
    tensors: Tensors | None = None


@dataclass(frozen=True)
class Opened:
    """A dataset: readers of the wanted fields over its store, and which samples take part (None: all)."""

    store: Store
    readers: Mapping[str, FieldReader]
    num_samples: int
    selection: Selection | None = None

    @property
    def count(self) -> int:
        """The samples that take part."""
        return self.num_samples if self.selection is None else len(self.selection)

    @property
    def chunk(self) -> int:
        """Samples of the largest chunk over the bulk fields."""
        layouts = (reader.layout for reader in self.readers.values())
        return max((layout.chunk for layout in layouts if not layout.resident), default=1024)

    def unit(self, params: OrderParams) -> int:
        """Return the samples that are fetched at once without shuffle.

        Selected samples begin anywhere in a chunk, which is then read for both units that it belongs to.
        """
        return self.chunk if self.selection is None else max(self.chunk, params.block)


@dataclass
class _Running:
    """An engine, what it works in, and the pass that it delivers next."""

    engine: Engine
    memory: Memory
    upcoming: Course
    transform: HeldTransform | None
    begun: int = 0

    def expects(self, wanted: Course) -> bool:
        """Return whether the engine goes on with just this pass, the one before it being complete."""
        return self.engine.alive and self.engine.passes == self.begun and self.upcoming == wanted

    def go_on(self) -> Pipeline:
        """Begin the upcoming pass."""
        self.begun += 1
        self.upcoming = self.upcoming.following()
        return Pipeline(self.engine, self.transform)


class Session:
    """Opened datasets of the same fields. Resident fields are loaded once, at the first start."""

    def __init__(self, opened: Sequence[Opened], wish: Wish) -> None:
        self.opened = tuple(opened)
        self._names = tuple(opened[0].readers)
        self._wish = wish
        self.counters = Counters()
        self._resident: dict[str, NDArray[Any]] = {}
        self._running: _Running | None = None
        self._closed = threading.Event()  # ends the reads of `start`
        self._transform = None if wish.transform is None else HeldTransform(wish.transform)
        self._line = Line()
        retriers = [one.store.retries for one in opened]
        for retrier in retriers:
            retrier.reached = True  # the manifest came from there, maybe in another process
        self.counters.describe_outages(lambda: [retrier.waiting_for for retrier in retriers])

    def start(self, wanted: Course) -> Pipeline:
        """Return the running pipeline of a pass. Raises `MemoryBudgetError` before any sample is read."""
        running = self._running
        if running is not None and running.expects(wanted):
            return running.go_on()
        # A second pass says that more will come: from then on the next is loaded while the present one drains.
        endless = running is not None and running.engine.passes > 0
        if running is not None:
            running.engine.close()
        need = wanted.need
        resident, budget = self.plan_memory(need)
        self._closed = threading.Event()
        sleep = sleeper(self._closed)
        for name in resident:
            if name not in self._resident:
                parts = [load_whole(one.readers[name], one.store, self.counters, sleep=sleep) for one in self.opened]
                self._resident[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        reader = self.opened[0].store.reader()
        self.counters.describe_client(f"{reader.kind}: {reader.reason}")
        streamed = [name for name in self._names if name not in resident]
        layouts = {name: self.opened[0].readers[name].layout for name in streamed}
        memory = self._memory(layouts, budget, need.block)
        starts = [0, *accumulate(one.count for one in self.opened)]
        stored = tuple(
            Stored({name: one.readers[name] for name in streamed}, one.store, start, one.selection)
            for one, start in zip(self.opened, starts, strict=False)
        )
        recipe = self._recipe(layouts, resident, wanted.seed, alike=wanted.steps_at_once == 1)
        source = Source(stored, self._line, memory)
        planned = wanted if streamed else wanted.without_blocks()
        engine = Engine(source, recipe, planned, budget, self.counters, endless=endless)
        self._running = _Running(engine, memory, wanted, self._transform)
        return self._running.go_on()

    def close(self) -> None:
        """End the threads of the last pass, and of one that is loaded ahead, and give their memory back.

        A thread that is in `start` and waits for the store gets an `EngineError`.
        """
        self._closed.set()
        running, self._running = self._running, None
        if running is not None:
            running.engine.close()

    def _recipe(self, streamed: Mapping[str, FieldLayout], resident: list[str], seed: int, *, alike: bool) -> Recipe:
        return Recipe(
            names=self._names,
            streamed=streamed,
            resident={name: self._resident[name] for name in resident},
            decoders=self._wish.decoders,
            packs=self._wish.packs,
            alike=alike and self._wish.transform is None,
            transform=None if self._transform is None else weakref.ref(self._transform),
            transform_workers=self._wish.transform_workers,
            seed=seed,
            tensors=self._wish.tensors,
        )

    def _memory(self, layouts: Mapping[str, FieldLayout], budget: Budget, block: int) -> Memory:
        """Return the last pass's memory if it fits and no thread of that pass can still write to it, else new."""
        if self._running is not None:
            core, memory = self._running.engine.core, self._running.memory
            self._running = None
            if memory.arena.shape == (layouts, budget.slots, block) and core.join(JOIN_SECONDS):
                memory.arena.clear()
                return memory
        # A transform may keep slices of what it was given; only memory that nobody sees again is recycled.
        most = LIVE_BATCHES * budget.batch_bytes + TOLERANCE_BYTES if budget.exact else math.inf
        buffers = BatchBuffers(self.counters, recycle=self._wish.transform is None, most=most)
        bodies = Bodies(budget.slots + MAX_THREADS, budget.body_bytes)
        return Memory(bodies, Arena(layouts, budget.slots, block), buffers)

    def plan_memory(self, need: Need) -> tuple[list[str], Budget]:
        """Return the fields to hold whole, and the budget.

        Of the manifest's resident fields, smallest first, as many are held as leave room for the window; the
        others are streamed. Raises `MemoryBudgetError`, with the least need of all, where no choice fits.
        """
        choices, allowed = self._choices(need), allowance(self._wish.memory, self._wish.ranks_here)
        fitting = [choice for choice in choices if choice[1].least_bytes <= allowed]
        resident, demand = fitting[0] if fitting else min(choices, key=lambda choice: choice[1].least_bytes)
        return resident, allot(demand, self._wish.memory, self._wish.ranks_here)

    def least_memory(self, need: Need) -> int:
        """Return the least `memory`, in bytes, that `plan_memory` accepts."""
        return min(demand.least_bytes for _, demand in self._choices(need))

    def _choices(self, need: Need) -> list[tuple[list[str], Demand]]:
        """The fields that may be held, small ones in every dataset, most of them first, and what is needed then."""
        small = [name for name in self._names if all(reader.layout.resident for reader in self._readers(name))]
        small.sort(key=lambda name: sum(reader.layout.nbytes for reader in self._readers(name)))
        # chunks of many blocks are no unit to stream in: a dataset in blocks of one sample is held whole
        least = len(small) if need.block == 1 and len(small) == len(self._names) else 0
        return [(small[:count], self._demand(small[:count], need)) for count in range(len(small), least - 1, -1)]

    def _readers(self, name: str) -> list[FieldReader]:
        return [one.readers[name] for one in self.opened]

    def _demand(self, resident: list[str], need: Need) -> Demand:
        """What is needed with these fields held whole."""
        block = need.block
        mean = {name: max(map(_mean_bytes, self._readers(name))) for name in self._names}
        streamed = [(name, reader) for name in self._names if name not in resident for reader in self._readers(name)]
        requests = [
            max(reader.layout.chunk * mean[name], min(MAX_REQUEST, block * mean[name])) for name, reader in streamed
        ]
        fixed = {name: reader.layout.field.fixed for name, reader in streamed}
        variable = sum(int(block * mean[name]) for name in fixed if not fixed[name])
        return Demand(
            slots=need.slots,
            slot_bytes=variable + sum(block * (int(mean[name]) if fixed[name] else ITEM_BYTES) for name in fixed),
            batch_bytes=int(need.rows * sum(self._finished_bytes(name, size) for name, size in mean.items())),
            request_bytes=int(max(requests, default=MIB)),
            blocks=sum(-(-one.count // block) for one in self.opened),
            variable_bytes=variable,
            resident_bytes=sum(reader.num_samples * int(mean[n]) for n in resident for reader in self._readers(n)),
            index_bytes=sum(map(_index_bytes, self.opened))
            + (need.held_plan_bytes if len(resident) == len(self._names) else need.plan_bytes),
        )

    def _finished_bytes(self, name: str, stored: float) -> float:
        """The bytes of one sample in a finished batch."""
        decoder = self._wish.decoders.get(name)
        if decoder is None:
            return stored
        itemsize = np.dtype(decoder.dtype).itemsize
        if decoder.options.size is None:
            return stored * IMAGE_EXPANSION * itemsize
        return float(math.prod(decoder.options.size) * decoder.channels * itemsize)


def _index_bytes(opened: Opened) -> int:
    """Return the bytes of the pages of chunk tables that are kept, and of the numbers of selected samples."""
    selected = 0 if opened.selection is None else opened.selection.samples.nbytes
    return selected + sum(reader.table_bytes for reader in opened.readers.values())


def _mean_bytes(reader: FieldReader) -> float:
    if reader.layout.field.fixed:
        return float(reader.layout.field.item_bytes)
    return reader.layout.nbytes / max(1, reader.num_samples)
