"""An opened dataset, the plan of a pass over datasets, and loading of resident fields."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.format.manifest import Field, FieldLayout, Manifest
from streamloader.format.reader import FieldReader, Run
from streamloader.order.epoch_order import OrderParams
from streamloader.order.schedule import BatchPlan, Compute, EpochShare, Ints
from streamloader.stats import Counters
from streamloader.storage.process import run_all
from streamloader.storage.store import Store
from streamloader.zarr.columns import ArrayFields, ChunkPlaces, RegionReader

THREADS = 8


@dataclass(frozen=True, eq=False)
class Dataset:
    """An opened dataset: its store, manifest, names of the fields to read, and selected samples (None: all of them).

    `arrays`: the columns and samples of arrays that others wrote, or whose samples are windows or patches.

    `readers` are created on first use. They belong to a process: after a fork, use a copy (`dataclasses.replace`).
    """

    store: Store
    manifest: Manifest
    names: tuple[str, ...]
    selection: Ints | None = None
    arrays: ArrayFields | None = None

    @cached_property
    def readers(self) -> dict[str, FieldReader | RegionReader]:
        """The reader of each field."""
        if self.arrays is None:
            return {name: FieldReader(self.store, self.manifest, name) for name in self.names}
        layouts = self.layouts
        return {name: RegionReader(self.store, name, layouts[name], self.arrays) for name in self.names}

    @cached_property
    def region_readers(self) -> dict[str, RegionReader]:
        """The readers of fields of arrays."""
        return {name: reader for name, reader in self.readers.items() if isinstance(reader, RegionReader)}

    @property
    def fields(self) -> dict[str, Field]:
        """The fields by name."""
        return {name: self.manifest.fields[name].field for name in self.names}

    @property
    def layouts(self) -> dict[str, FieldLayout]:
        """The layouts of the fields by name."""
        return {name: self.manifest.fields[name] for name in self.names}

    @property
    def output_names(self) -> tuple[str, ...]:
        """The columns of a batch that arrays add to those of the fields."""
        columns = () if self.arrays is None else self.arrays.columns.values()
        return tuple(output.name for column in columns for output in column.outputs[1:])

    @property
    def num_samples(self) -> int:
        """The number of selected samples."""
        return self.manifest.num_samples if self.selection is None else len(self.selection)

    @cached_property
    def selection_digest(self) -> str | None:
        """The SHA-256 of the selected samples, which a saved state has, however they were selected."""
        if self.selection is None:
            return None
        return hashlib.sha256(self.selection.astype("<i8", copy=False).data).hexdigest()

    @property
    def index_bytes(self) -> int:
        """The bytes of cached chunk tables and of the numbers of selected samples."""
        selected = 0 if self.selection is None else self.selection.nbytes
        return selected + sum(self.readers[name].kept_bytes for name in self.names)

    def unit(self, params: OrderParams) -> int:
        """Return the number of samples that are fetched together without shuffle: those of the largest chunk.

        With a selection at least a block: selected samples begin anywhere in a chunk, so two units may read one chunk.
        """
        chunk = max((layout.chunk for layout in self.layouts.values() if not layout.resident), default=1024)
        return chunk if self.selection is None else max(chunk, params.block)

    def runs(self, name: str, start: int, stop: int, chosen: Sequence[ChunkPlaces] | None = None) -> Sequence[Any]:
        """Return the requests for a field of the samples [start, stop), numbered among the selected samples.

        `chosen`: the chunks of arrays to read, by default all.
        """
        reader = self.readers[name]
        if isinstance(reader, RegionReader):
            return reader.runs(start, stop, chosen)
        if self.selection is None:
            return reader.runs(start, stop)
        return reader.runs_of(self.selection[start:stop], start)

    def expected(self, name: str, start: int, stop: int, *, counted: bool) -> tuple[Sequence[Any] | None, int]:
        """Return the requests for a field of samples, and the estimated bytes that they decode to, 0 unless `counted`.

        None instead of requests that `counted` does not need, unless it is simple to tell that planning sends none.
        """
        reader = self.readers[name]
        if isinstance(reader, RegionReader):
            return None, reader.block_bytes(start, stop) if counted else 0
        if not counted and (self.selection is not None or not reader.knows_runs(start, stop)):
            return None, 0
        runs = self.runs(name, start, stop)
        return runs, reader.decoded_size(runs) if counted else 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the readers."""
        return {name: value for name, value in self.__dict__.items() if not name.endswith("readers")}


@dataclass(frozen=True)
class SampleNumbers:
    """The sample numbers of concatenated datasets.

    `selected_from` and `all_from`: the first number of each dataset, among the selected samples and among all samples.
    """

    selections: tuple[Ints | None, ...] = (None,)
    selected_from: tuple[int, ...] = (0,)
    all_from: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, datasets: Sequence[Dataset]) -> SampleNumbers:
        """Return the sample numbers of these datasets."""
        selected = accumulate((dataset.num_samples for dataset in datasets[:-1]), initial=0)
        every = accumulate((dataset.manifest.num_samples for dataset in datasets[:-1]), initial=0)
        return cls(tuple(dataset.selection for dataset in datasets), tuple(selected), tuple(every))

    def among_all(self, samples: Ints) -> Ints:
        """Convert numbers among the selected samples to numbers among all samples."""
        if all(selection is None for selection in self.selections):
            return samples
        source = np.searchsorted(self.selected_from, samples, side="right") - 1
        numbers = samples - np.array(self.selected_from)[source]
        for index, selection in enumerate(self.selections):
            if selection is not None:
                rows = source == index
                numbers[rows] = selection[numbers[rows]]
        return np.asarray(numbers + np.array(self.all_from)[source], np.int64)


class EpochPlan(NamedTuple):
    """One rank's pass over an epoch from `position` on, `steps_at_once` steps in each plan.

    `seed` keys the random numbers of crops and transforms, with epoch and position. `resident`: every field is, so
    plans contain no blocks.
    """

    share: EpochShare
    position: int
    seed: int
    steps_at_once: int = 1
    numbers: SampleNumbers = SampleNumbers()
    resident: bool = False

    def following(self) -> EpochPlan:
        """Return the pass over the next epoch."""
        return self._replace(share=self.share.at_epoch(self.share.epoch + 1), position=0)

    def batches(self, first_ticket: int = 0, compute: Compute | None = None) -> Iterator[BatchPlan]:
        """Yield the plans of the pass, with tickets from `first_ticket` on; `samples` are numbers among all samples.

        `compute`: as in `EpochShare.plans`.

        Each part between gaps has its own schedule, so a block on both sides of a gap is read twice.
        """
        ticket = first_ticket
        for start, stop in self.share.parts(self.position):
            begin = min(start, self.share.num_samples)
            given = begin, stop, self.steps_at_once, ticket
            for plan in self.share.plans(*given, resident=self.resident, compute=compute):
                ticket += len(plan.needs)
                samples = self.numbers.among_all(plan.samples)
                yield plan if samples is plan.samples else plan._replace(samples=samples)


def plans(first: EpochPlan, compute: Compute, *, endless: bool) -> Iterator[BatchPlan | None]:
    """Yield the plans of a pass, then None. If `endless`, continue with the next epoch, and so on."""
    tickets = 0
    epoch = first
    while True:
        for plan in epoch.batches(tickets, compute):
            tickets += len(plan.needs)
            yield plan
        yield None
        if not endless:
            return
        epoch = epoch.following()


def load_field(
    field: FieldReader, store: Store, out: NDArray[Any], counters: Counters, sleep: Callable[[float], None]
) -> None:
    """Read all samples of a fixed-shape field into `out`, of shape (samples, *shape).

    Calls `sleep` to wait before a retry. Raises storage and format errors, and exceptions of `sleep`.
    """
    reader = replace(store.reader(), on_repeat=partial(counters.add, requests=1))

    def request(run: Run) -> memoryview:
        counters.add(requests=1)
        body = field.fetch(reader, run)
        counters.add(bytes_fetched=len(body))
        return body

    def count_retry(*_: object) -> None:
        counters.add(retries=1)

    def load(run: Run) -> None:
        fetch = partial(store.retries.call, partial(request, run), on_retry=count_retry)
        with store.retries.waits_by(sleep):
            field.load(run, fetch, out, 0, on_damage=count_retry)

    with store.retries.waits_by(sleep):
        runs = field.runs(0, field.num_samples)
    run_all(load, runs, THREADS)
