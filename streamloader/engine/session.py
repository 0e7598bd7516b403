"""An opened dataset, ready to run: which fields are streamed, which are resident, and within how much memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.decode.image import ImageDecoder
from streamloader.engine.arena import Arena, BatchBuffers, Bodies, Memory
from streamloader.engine.budget import MAX_THREADS, Budget, Demand, allot, allowance
from streamloader.engine.line import Line
from streamloader.engine.passes import PassPlan
from streamloader.engine.pipeline import Engine, Pipeline
from streamloader.engine.resident import load_whole
from streamloader.engine.source import Source
from streamloader.engine.stages import Recipe
from streamloader.engine.transform import Transform
from streamloader.format.manifest import FieldLayout
from streamloader.format.reader import MAX_REQUEST, FieldReader
from streamloader.options import MIB, Pack
from streamloader.plan.gaps import NO_GAPS, Gaps
from streamloader.plan.order import EpochOrder, OrderParams
from streamloader.plan.schedule import slots_needed
from streamloader.plan.selection import Selection
from streamloader.plan.world import Share
from streamloader.stats import Counters
from streamloader.storage.protocol import Store

# How many times its encoded size a photograph takes decoded: a JPEG of usual quality spends 2 to 3 bits a pixel.
IMAGE_EXPANSION = 10

# How long a new pass waits for the threads of the one before it; then it leaves them their memory and takes its own.
JOIN_SECONDS = 0.2


@dataclass(frozen=True)
class Wish:
    """What the caller wants of which samples (None: all), and within how many bytes (`memory`, None for the need)."""

    decoders: Mapping[str, ImageDecoder] = field(default_factory=dict)
    packs: Mapping[str, Pack] = field(default_factory=dict)
    transform: Transform | None = None
    transform_workers: int = 0
    memory: int | None = None
    ranks_here: int = 1
    selection: Selection | None = None


@dataclass
class _Running:
    """An engine, what it works in, and the pass that it delivers next."""

    engine: Engine
    memory: Memory
    upcoming: PassPlan
    begun: int = 0

    def expects(self, wanted: PassPlan) -> bool:
        """Return whether the engine goes on with just this pass, the one before it being complete."""
        return self.engine.alive and self.engine.passes == self.begun and self.upcoming == wanted

    def go_on(self) -> Pipeline:
        """Begin the upcoming pass."""
        self.begun += 1
        self.upcoming = self.upcoming.following()
        return Pipeline(self.engine)


class Session:
    """Readers of the wanted fields over one store. Resident fields are loaded once, at the first start."""

    def __init__(self, store: Store, readers: Mapping[str, FieldReader], num_samples: int, wish: Wish) -> None:
        self._store = store
        self._readers = dict(readers)
        self._num_samples = num_samples if wish.selection is None else len(wish.selection)
        self._wish = wish
        self.counters = Counters()
        self._resident: dict[str, NDArray[Any]] = {}
        self._running: _Running | None = None
        self._line = Line()

    @property
    def chunk(self) -> int:
        """Samples of the largest chunk over the bulk fields: the fetch unit without shuffle."""
        layouts = (reader.layout for reader in self._readers.values())
        return max((layout.chunk for layout in layouts if not layout.resident), default=1024)

    def fetched(self, order: EpochOrder) -> OrderParams:
        """Return the order's block, lanes and window; without shuffle the fetch unit, in one lane."""
        if order.shuffle:
            return order.params
        # selected samples begin anywhere in a chunk, which is then read for both units that it belongs to
        unit = self.chunk if self._wish.selection is None else max(self.chunk, order.params.block)
        return OrderParams(unit, 1, 2 * unit)

    def start(
        self, order: EpochOrder, share: Share, position: int, steps_at_once: int = 1, gaps: Gaps = NO_GAPS
    ) -> Pipeline:
        """Return the running pipeline of an epoch from a global position; each batch holds `steps_at_once` steps.

        `gaps` are left out. Raises `MemoryBudgetError` before any sample is read.
        """
        params = self.fetched(order)
        block = params.block
        selection = self._wish.selection
        unit = None if order.shuffle else block
        wanted = PassPlan(order, share, position, unit, steps_at_once, selection=selection, gaps=gaps)
        running = self._running
        if running is not None and running.expects(wanted):
            return running.go_on()
        # A second pass says that more will come: from then on the next is loaded while the present one drains.
        endless = running is not None and running.engine.passes > 0
        self.close()
        resident, budget = self.plan_memory(params, share, steps_at_once)
        for name in resident:
            if name not in self._resident:
                self._resident[name] = load_whole(self._readers[name], self._store.reader(), self.counters)
        self.counters.describe_client(f"{self._store.reader().kind}: {self._store.reader().reason}")
        streamed = {name: reader for name, reader in self._readers.items() if name not in resident}
        memory = self._memory({name: reader.layout for name, reader in streamed.items()}, budget.slots, block)
        source = Source(streamed, self._store.reader, self._line, memory, selection)
        recipe = self._recipe(resident, order.seed, alike=steps_at_once == 1)
        engine = Engine(source, recipe, wanted, budget, self.counters, endless=endless)
        self._running = _Running(engine, memory, wanted)
        return self._running.go_on()

    def close(self) -> None:
        """End the threads of the last pass, and of one that is loaded ahead."""
        if self._running is not None:
            self._running.engine.close()

    def _recipe(self, resident: list[str], seed: int, *, alike: bool) -> Recipe:
        return Recipe(
            names=tuple(self._readers),
            streamed={name: reader.layout for name, reader in self._readers.items() if name not in resident},
            resident={name: self._resident[name] for name in resident},
            decoders=self._wish.decoders,
            packs=self._wish.packs,
            alike=alike and self._wish.transform is None,
            transform=self._wish.transform,
            transform_workers=self._wish.transform_workers,
            seed=seed,
        )

    def _memory(self, layouts: Mapping[str, FieldLayout], slots: int, block: int) -> Memory:
        """Return the last pass's memory if it fits and no thread of that pass can still write to it, else new."""
        if self._running is not None:
            core, memory = self._running.engine.core, self._running.memory
            self._running = None
            if memory.arena.shape == (layouts, slots, block) and core.join(JOIN_SECONDS):
                memory.arena.clear()
                return memory
        # A transform may keep slices of what it was given; only memory that nobody sees again is recycled.
        buffers = BatchBuffers(self.counters, recycle=self._wish.transform is None)
        return Memory(Bodies(slots + MAX_THREADS), Arena(layouts, slots, block), buffers)

    def plan_memory(self, params: OrderParams, share: Share, steps_at_once: int = 1) -> tuple[list[str], Budget]:
        """Return the fields to hold whole, and the budget.

        Of the manifest's resident fields, smallest first, as many are held as leave room for the window; the
        others are streamed. Raises `MemoryBudgetError`, with the least need of all, where no choice fits.
        """
        choices, allowed = (
            self._choices(params, share, steps_at_once),
            allowance(self._wish.memory, self._wish.ranks_here),
        )
        fitting = [choice for choice in choices if choice[1].least_bytes <= allowed]
        resident, demand = fitting[0] if fitting else min(choices, key=lambda choice: choice[1].least_bytes)
        return resident, allot(demand, self._wish.memory, self._wish.ranks_here)

    def least_memory(self, params: OrderParams, share: Share) -> int:
        """Return the least `memory`, in bytes, that `plan_memory` accepts."""
        return min(demand.least_bytes for _, demand in self._choices(params, share, 1))

    def _choices(self, params: OrderParams, share: Share, steps_at_once: int) -> list[tuple[list[str], Demand]]:
        """The manifest's resident fields that may be held, most of them first, and what is needed then."""
        small = [name for name, reader in self._readers.items() if reader.layout.resident]
        small.sort(key=lambda name: self._readers[name].layout.nbytes)
        slots = slots_needed(params, share, steps_at_once)
        return [
            (small[:count], self._demand(small[:count], params.block, slots, steps_at_once * share.batch))
            for count in range(len(small), -1, -1)
        ]

    def _demand(self, resident: list[str], block: int, slots: int, rows: int) -> Demand:
        """What is needed with these fields held whole; `rows` are the samples of a batch."""
        streamed = {name: reader for name, reader in self._readers.items() if name not in resident}
        mean = {name: _mean_bytes(reader) for name, reader in self._readers.items()}
        requests = [
            max(reader.layout.chunk * mean[name], min(MAX_REQUEST, block * mean[name]))
            for name, reader in streamed.items()
        ]
        variable = sum(int(block * mean[name]) for name, r in streamed.items() if not r.layout.field.fixed)
        return Demand(
            slots=slots,
            slot_bytes=variable + sum(block * int(mean[n]) for n, r in streamed.items() if r.layout.field.fixed),
            batch_bytes=int(rows * sum(self._finished_bytes(name, size) for name, size in mean.items())),
            request_bytes=int(max(requests, default=MIB)),
            blocks=-(-self._num_samples // block),
            variable_bytes=variable,
            resident_bytes=sum(self._readers[name].num_samples * int(mean[name]) for name in resident),
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


def _mean_bytes(reader: FieldReader) -> float:
    if reader.layout.field.fixed:
        return float(reader.layout.field.item_bytes)
    return reader.layout.nbytes / max(1, reader.num_samples)
