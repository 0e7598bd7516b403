"""An opened dataset, ready to run: which fields are streamed, which are resident, and within how much memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.decode.image import ImageDecoder
from streamloader.engine.budget import MIB, Budget, Demand, allot
from streamloader.engine.pipeline import Pipeline, Source
from streamloader.engine.resident import load_whole
from streamloader.engine.stages import Recipe
from streamloader.engine.transform import Transform
from streamloader.format.reader import MAX_REQUEST, FieldReader
from streamloader.plan.order import EpochOrder, OrderParams
from streamloader.plan.schedule import schedule, slots_needed
from streamloader.plan.world import Share
from streamloader.stats import Counters
from streamloader.storage.protocol import Store

# What resident fields may take of `memory` before they are streamed instead, block by block.
RESIDENT_SHARE = 0.5


@dataclass(frozen=True)
class Wish:
    """What the caller wants of each sample, and within how many bytes (`memory`, None for what it needs)."""

    decoders: Mapping[str, ImageDecoder] = field(default_factory=dict)
    transform: Transform | None = None
    transform_workers: int = 0
    memory: int | None = None
    ranks_here: int = 1


class Session:
    """Readers of the wanted fields over one store. Resident fields are loaded once, at the first start."""

    def __init__(self, store: Store, readers: Mapping[str, FieldReader], num_samples: int, wish: Wish) -> None:
        self._store = store
        self._readers = dict(readers)
        self._num_samples = num_samples
        self._wish = wish
        self.counters = Counters()
        self._resident: dict[str, NDArray[Any]] = {}

    @property
    def chunk(self) -> int:
        """Samples of the largest chunk over the streamed fields: the fetch unit without shuffle."""
        return max((reader.layout.chunk for reader in self._streamed().values()), default=1024)

    def start(self, order: EpochOrder, share: Share, position: int, steps_at_once: int = 1) -> Pipeline:
        """Return the running pipeline of an epoch from a global position; each batch holds `steps_at_once` steps.

        Raises `MemoryBudgetError` before any sample is read.
        """
        block = order.params.block if order.shuffle else self.chunk
        params = order.params if order.shuffle else OrderParams(block, 1, 2 * block)
        budget = self._budget(params, share, steps_at_once)
        self._load_resident()
        self.counters.describe_client(f"{self._store.reader().kind}: {self._store.reader().reason}")
        recipe = Recipe(
            names=tuple(self._readers),
            streamed={name: reader.layout for name, reader in self._streamed().items()},
            resident=self._resident,
            decoders=self._wish.decoders,
            transform=self._wish.transform,
            transform_workers=self._wish.transform_workers,
            seed=order.seed,
            epoch=order.epoch,
        )
        source = Source(self._streamed(), self._store.reader, block)
        plans = schedule(order, share, position, None if order.shuffle else block, steps_at_once)
        return Pipeline(source, recipe, plans, budget, self.counters)

    def _streamed(self) -> dict[str, FieldReader]:
        return {name: reader for name, reader in self._readers.items() if name not in self._resident_names()}

    def _resident_names(self) -> list[str]:
        """The manifest's resident fields, the smallest first, as long as they fit their share of `memory`."""
        room = np.inf if self._wish.memory is None else self._wish.memory * RESIDENT_SHARE
        names = []
        for name, reader in sorted(self._readers.items(), key=lambda item: item[1].layout.nbytes):
            room -= self._num_samples * reader.layout.field.item_bytes
            if reader.layout.resident and room >= 0:
                names.append(name)
        return names

    def _load_resident(self) -> None:
        for name in self._resident_names():
            if name not in self._resident:
                self._resident[name] = load_whole(self._readers[name], self._store.reader(), self.counters)

    def _budget(self, params: OrderParams, share: Share, steps_at_once: int) -> Budget:
        block = params.block
        streamed = self._streamed()
        fixed = sum(block * r.layout.field.item_bytes for r in streamed.values() if r.layout.field.fixed)
        per_sample = {name: _mean_bytes(reader, self._num_samples) for name, reader in streamed.items()}
        variable = sum(int(block * per_sample[name]) for name, r in streamed.items() if not r.layout.field.fixed)
        request = max((min(MAX_REQUEST, int(block * size)) for size in per_sample.values()), default=MIB)
        resident = sum(
            self._num_samples * self._readers[name].layout.field.item_bytes for name in self._resident_names()
        )
        sample = sum(per_sample.values()) + sum(
            self._readers[n].layout.field.item_bytes for n in self._resident_names()
        )
        demand = Demand(
            slots=slots_needed(params, share, steps_at_once),
            slot_bytes=fixed + variable,
            batch_bytes=int(steps_at_once * share.batch * sample),
            request_bytes=request,
            blocks=-(-self._num_samples // block),
            variable_bytes=variable,
            resident_bytes=resident,
        )
        return allot(demand, self._wish.memory, self._wish.ranks_here)


def _mean_bytes(reader: FieldReader, num_samples: int) -> float:
    if reader.layout.field.fixed:
        return float(reader.layout.field.item_bytes)
    return reader.layout.nbytes / max(1, num_samples)
