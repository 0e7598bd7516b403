"""An opened dataset, the plans of a pass over datasets, and loading of resident fields."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.faults import detached
from streamloader.errors import FormatError, StreamloaderError
from streamloader.format.clips import Clipped, ClipReader
from streamloader.format.deleted import Remaining
from streamloader.format.manifest import Field, FieldLayout, Manifest
from streamloader.format.reader import FieldReader, Run
from streamloader.order.epoch_order import OrderParams
from streamloader.order.schedule import BatchPlan, Compute, EpochShare, Ints
from streamloader.stats import Counters
from streamloader.storage.buffers import RESIDENT, Buffer, Use
from streamloader.storage.process import run_all
from streamloader.storage.store import Store
from streamloader.zarr.columns import ArrayFields, ChunkPlaces, RegionReader

if TYPE_CHECKING:  # imported when a dataset needs it
    from streamloader.order.packing import Packed
    from streamloader.order.weights import Selection

THREADS = 8
LATEST_BLOCKS = 16  # of which the documents are kept
PIECE = 1 << 22  # samples of a resident field that are requested together: those that remain have numbers


@dataclass(frozen=True, eq=False)
class Dataset:
    """An opened dataset: its store, manifest, names of the fields to read, and selected samples (None: all of them).

    `arrays`: the columns and samples of arrays that others wrote, or whose samples are windows or patches. `excluded`:
    the number of samples that `exclude=` leaves out. `remaining`: those of a version with deleted samples. `packed`:
    the rows that the selected samples, which are documents, are packed into. They take the place of samples then.
    `joined`: datasets that have some of the fields, see `side`. `renamed`: the names in the manifest of those fields
    that have other ones in batches.

    `readers` are created on first use. They belong to a process: after a fork, use a copy (`dataclasses.replace`).
    """

    store: Store
    manifest: Manifest
    names: tuple[str, ...]
    selection: Selection | Clipped | None = None
    arrays: ArrayFields | None = None
    excluded: int = 0
    remaining: Remaining | None = None
    lengths: NDArray[np.uint32] | None = None
    packed: Packed | None = None
    joined: tuple[tuple[Dataset, Ints | None], ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    def side(self, name: str) -> tuple[Dataset, Ints | None, str]:
        """Return the dataset that has a field, the number there of each sample of this one, and the field's name there.

        None instead of numbers: the same.
        """
        found = ((right, rows, right.renamed.get(name, name)) for right, rows in self.joined if name in right.names)
        return next(found, (self, None, name))

    @property
    def stores(self) -> tuple[Store, ...]:
        """The stores of all fields."""
        return (self.store, *(right.store for right, _ in self.joined))

    @cached_property
    def readers(self) -> dict[str, FieldReader | RegionReader]:
        """The reader of each field."""
        if self.arrays is None:
            found: dict[str, FieldReader | RegionReader] = {}
            for name in self.names:
                side, _, stored = self.side(name)
                given = side.store, side.manifest, stored, side.remaining
                clips = self.selection if isinstance(self.selection, Clipped) and self.selection.name == name else None
                found[name] = FieldReader(*given) if clips is None else ClipReader(*given, clips)
                found[name].name = name
            return found
        layouts = self.layouts
        return {name: RegionReader(self.store, name, layouts[name], self.arrays) for name in self.names}

    @cached_property
    def region_readers(self) -> dict[str, RegionReader]:
        """The readers of fields of arrays."""
        return {name: reader for name, reader in self.readers.items() if isinstance(reader, RegionReader)}

    @property
    def fields(self) -> dict[str, Field]:
        """The fields by name."""
        return {name: layout.field for name, layout in self.layouts.items()}

    @property
    def layouts(self) -> dict[str, FieldLayout]:
        """The layouts of the fields by name."""
        return {name: side.manifest.fields[stored] for name in self.names for side, _, stored in [self.side(name)]}

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The class names of fields, by field."""
        found = dict(self.manifest.classes)
        for right, _ in self.joined:
            classes = right.manifest.classes
            stored = {name: right.renamed.get(name, name) for name in right.names}
            found |= {name: classes[own] for name, own in stored.items() if own in classes}
        return found

    @property
    def output_names(self) -> tuple[str, ...]:
        """The columns of a batch that arrays add to those of the fields."""
        columns = () if self.arrays is None else self.arrays.columns.values()
        return tuple(output.name for column in columns for output in column.outputs[1:])

    @property
    def num_samples(self) -> int:
        """The number of selected samples, or of rows that they are packed into."""
        return self.num_documents if self.packed is None else len(self.packed)

    @cached_property
    def documents(self) -> Callable[[int, int], Ints]:
        """The documents of the packed rows [start, stop), which loading a block asks for several times."""
        assert self.packed is not None
        return lru_cache(LATEST_BLOCKS)(self.packed.documents)

    @property
    def num_documents(self) -> int:
        """The number of selected samples, also if they are packed into rows."""
        return self.manifest.num_remaining if self.selection is None else len(self.selection)

    @property
    def num_numbers(self) -> int:
        """How many numbers its samples have: those that are not selected have one too. Packed rows count from 0."""
        return self.manifest.num_remaining if self.packed is None else len(self.packed)

    @cached_property
    def selection_digest(self) -> str | None:
        """The SHA-256 of the selected samples, which a saved state has, however they were selected.

        For all samples but some it is that of minus the number of all samples, and those that are excluded.
        """
        if isinstance(self.selection, Clipped):
            return self.selection.sha256
        numbers: Any = getattr(self.selection, "drawn_from", self.selection)
        if numbers is None:
            return None
        if not isinstance(numbers, np.ndarray):
            numbers = np.append(-numbers.num_samples, numbers.excluded)
        return hashlib.sha256(numbers.astype("<i8", copy=False).data).hexdigest()

    @property
    def weights_digest(self) -> str | None:
        """The SHA-256 of the weights by which epochs draw their samples; None without weights."""
        return getattr(self.selection, "digest", None)

    @cached_property
    def bucket_digest(self) -> str | None:
        """The SHA-256 of the lengths by which samples are put in buckets; None without buckets."""
        if self.packed is not None:
            return None if self.packed.costs is None else self.packed.digest
        return None if self.lengths is None else hashlib.sha256(self.lengths.astype("<u4", copy=False).data).hexdigest()

    @cached_property
    def joined_digests(self) -> tuple[tuple[str, int, str], ...]:
        """The digest and the version of each joined dataset, and the SHA-256 of the numbers of its samples, or ""."""
        return tuple(
            (
                right.manifest.digest,
                right.manifest.generation,
                "" if rows is None else hashlib.sha256(rows.astype("<i8", copy=False).data).hexdigest(),
            )
            for right, rows in self.joined
        )

    def lengths_of(self, numbers: Ints) -> NDArray[Any]:
        """Return the lengths of samples, numbered among the selected ones; of packed rows what attention costs."""
        if self.packed is not None:
            return self.packed.costs_of(numbers)
        assert self.lengths is not None
        samples = numbers if self.selection is None else self.selection[numbers]
        return self.lengths[samples]

    @property
    def selection_bytes(self) -> int:
        """The bytes of the numbers of selected, deleted and joined samples, draws, packed rows, and lengths."""
        chosen = self.selection if self.packed is None else self.packed  # which counts the selection
        joined = [numbers for right, rows in self.joined for numbers in (rows, right.remaining)]
        kept = (chosen, self.remaining, self.lengths, *joined)
        return sum(numbers.nbytes for numbers in kept if numbers is not None)

    def unit(self, params: OrderParams) -> int:
        """Return the number of samples that are fetched together without shuffle: those of the largest chunk.

        Of packed rows and joins a block.

        With a selection at least a block: selected samples begin anywhere in a chunk, so two units may read one chunk.
        """
        if self.packed is not None or self.joined:
            return params.block
        chunk = max((layout.chunk for layout in self.layouts.values() if not layout.resident), default=1024)
        return chunk if self.selection is None and self.remaining is None else max(chunk, params.block)

    def object_of(self, name: str, sample: int) -> str:
        """Return the URL of the object that has a sample of a field, by its number among all.

        Of arrays and packed rows, which may need several objects, that of the folder.
        """
        if self.arrays is not None or self.packed is not None:
            return self.store.url
        (side, rows, name), stored = self.side(name), np.array([sample])
        stored = stored if rows is None else rows[stored]
        stored = stored if side.remaining is None else side.remaining[stored]
        layout = side.manifest.fields[name]
        return f"{side.store.url}/{layout.shard_key(name, int(stored[0]) // layout.shard)}"

    def runs_of_part(self, name: str, part: tuple[int, int], block: tuple[int, int]) -> Sequence[Any]:
        """Return the requests for a field of a part [start, stop) of a block.

        What a cache gets are the bytes of the requests for the whole block: other epochs divide it elsewhere. If these
        are cut at other places, it gets those of the part.
        """
        runs, store = self.runs(name, *part), self.side(name)[0].store
        if part == block or store.cache is None or not all(isinstance(run, Run) for run in runs):
            return runs  # those of arrays and clips have places of their own in the objects
        whole = self.runs(name, *block)
        return [run._replace(cached=_bytes_around(run, whole)) for run in runs]

    def runs(self, name: str, start: int, stop: int, chosen: Sequence[ChunkPlaces] | None = None) -> Sequence[Any]:
        """Return the requests for a field of the samples [start, stop), numbered among the selected samples.

        With weights, the draws of each epoch have numbers of their own: see `Drawn`. Of packed rows, it is those for
        their documents.

        `chosen`: the chunks of arrays to read, by default all.
        """
        reader = self.readers[name]
        if isinstance(reader, RegionReader):
            return reader.runs(start, stop, chosen)
        rows = self.side(name)[1]
        if self.packed is not None:
            documents = self.documents(start, stop)
            return reader.runs_of(documents, start) if rows is None else reader.runs_at(rows[documents], start)
        if rows is not None:
            numbers = slice(start, stop) if self.selection is None else self.selection[start:stop]
            return reader.runs_at(rows[numbers], start)
        if self.selection is None:
            return reader.runs(start, stop)
        return reader.runs_of(self.selection[start:stop], start)

    def expected(self, name: str, start: int, stop: int, *, counted: bool) -> tuple[Sequence[Any] | None, int]:
        """Return the requests for a field of samples, and the estimated bytes that they decode to, 0 unless `counted`.

        None instead of requests that `counted` does not need, unless it is simple to tell that planning sends none.
        """
        reader = self.readers[name]
        if isinstance(reader, RegionReader | ClipReader):  # clips are planned by the indexes of their videos
            return None, reader.block_bytes(start, stop) if counted else 0
        planned = self.selection is None and self.packed is None and self.side(name)[1] is None
        if not counted and (not planned or not reader.knows_runs(start, stop)):
            return None, 0
        runs = self.runs(name, start, stop)
        return runs, reader.decoded_size(runs) if counted else 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the readers, and the documents of the latest blocks."""
        kept = self.__dict__.items()
        return {name: value for name, value in kept if not name.endswith("readers") and name != "documents"}


def _bytes_around(run: Run, others: Sequence[Run]) -> tuple[int, int, str] | None:
    """Return the bytes of the first of some requests that reads those of a run too, and their content; None if none."""
    found = ((each.start, each.stop, each.content) for each in others if each.path == run.path)
    return next((each for each in found if each[0] <= run.start and run.stop <= each[1]), None)


def share_readers(datasets: Sequence[Dataset]) -> None:
    """Let datasets of one version have the same readers, and so one copy of its chunk tables; not those of clips."""
    first: dict[Any, Dataset] = {}
    for dataset in datasets:
        if dataset.arrays is None and not isinstance(dataset.selection, Clipped):
            sides = (dataset, *(right for right, _ in dataset.joined))
            key = tuple((side.store.url, side.manifest.digest, side.names, *side.renamed.items()) for side in sides)
            same = first.setdefault(key, dataset)
            if [of.location for of in same.stores] == [of.location for of in dataset.stores]:  # the same credentials
                dataset.__dict__["readers"] = same.readers


def table_bytes(datasets: Sequence[Dataset]) -> int:
    """Return the bytes of the cached chunk tables of datasets."""
    readers = {id(reader): reader for dataset in datasets for reader in dataset.readers.values()}
    return sum(reader.kept_bytes for reader in readers.values())


def index_bytes(datasets: Sequence[Dataset]) -> int:
    """Return the bytes of the cached chunk tables, selections and lengths of datasets."""
    return table_bytes(datasets) + sum(dataset.selection_bytes for dataset in datasets)


def first_samples(datasets: Sequence[Dataset], *, selected: bool) -> tuple[int, ...]:
    """Return the number of the first sample of each of concatenated datasets, among `selected` samples or among all."""
    counts = (dataset.num_samples if selected else dataset.num_numbers for dataset in datasets[:-1])
    return tuple(accumulate(counts, initial=0))


def numbers_among_all(datasets: Sequence[Dataset]) -> Callable[[Ints], Ints]:
    """Return a function from numbers among the selected samples of concatenated datasets to those among all samples.

    Samples that epoch e draws by weights have numbers from e times the number of selected samples on.
    """
    selections = [dataset.selection if dataset.packed is None else None for dataset in datasets]
    weighted = [dataset.weights_digest is not None for dataset in datasets]
    total = sum(dataset.num_samples for dataset in datasets)
    selected_from, all_from = (np.array(first_samples(datasets, selected=each)) for each in (True, False))

    def among_all(samples: Ints) -> Ints:
        if all(selection is None for selection in selections):
            return samples
        epochs, samples = np.divmod(samples, total) if any(weighted) else (np.zeros(0, np.int64), samples)
        source = np.searchsorted(selected_from, samples, side="right") - 1
        numbers = samples - selected_from[source]
        for index, selection in enumerate(selections):
            if selection is not None:
                rows = source == index
                before = epochs[rows] * len(selection) if weighted[index] else 0
                numbers[rows] = selection[numbers[rows] + before]
        return np.asarray(numbers + all_from[source], np.int64)

    return among_all


def rows_of(datasets: Sequence[Dataset], name: str) -> Callable[[Ints], Ints]:
    """Return a function from numbers among all samples to rows of a resident field of concatenated datasets."""
    sides = [dataset.side(name)[:2] for dataset in datasets]
    firsts = np.array(first_samples(datasets, selected=False))
    starts = list(accumulate((side.manifest.num_remaining for side, _ in sides[:-1]), initial=0))

    def rows(samples: Ints) -> Ints:
        if all(side is dataset for (side, _), dataset in zip(sides, datasets, strict=True)):
            return samples
        found, source = np.empty_like(samples), np.searchsorted(firsts, samples, side="right") - 1
        for number, (start, (_, among)) in enumerate(zip(starts, sides, strict=True)):
            at = source == number
            numbers = samples[at] - firsts[number]
            found[at] = start + (numbers if among is None else among[numbers])
        return found

    return rows


def plans(
    share: EpochShare,
    position: int,
    datasets: Sequence[Dataset],
    steps_at_once: int = 1,
    compute: Compute | None = None,
    *,
    resident: bool = False,
    endless: bool = False,
) -> Iterator[BatchPlan | None]:
    """Yield the plans of a pass over an epoch from `position` on, then None. If `endless`, the next epoch follows.

    `samples` are numbers among all samples of the datasets. `steps_at_once`, `resident`, `compute`: as in
    `EpochShare.plans`.

    Each part between gaps has its own schedule, so a block on both sides of a gap is read twice.
    """
    ticket, among_all = 0, numbers_among_all(datasets)
    while True:
        for start, stop in share.parts(position):
            given = min(start, share.num_samples), stop, steps_at_once, ticket
            for plan in share.plans(*given, resident=resident, compute=compute):
                ticket += len(plan.needs)
                samples = among_all(plan.samples)
                yield plan if samples is plan.samples else plan._replace(samples=samples)
        yield None
        if not endless:
            return
        share, position = share.at_epoch(share.epoch + 1), 0


def counted(
    field: FieldReader, run: Run, counters: Counters, on_retry: Callable[..., None]
) -> Callable[[], memoryview]:
    """Return a function that fetches the bytes of a run of a resident field, with retries, and counts that.

    It is called again if these are damaged, and then does not take them from a cache.
    """
    store, reads, count_request = field.store, count(), partial(counters.add, requests=1)

    def fetch() -> memoryview:
        sent = False

        def call(request: Callable[[], Buffer]) -> Buffer:
            def send() -> Buffer:
                nonlocal sent
                sent = True
                count_request()
                return request()

            return store.retries.call(send, on_retry=on_retry)

        use = Use(RESIDENT, fresh=next(reads) > 0, content=run.content)
        body = field.fetch(replace(store.reader(), on_repeat=count_request, call=call, use=use), run)
        if sent:
            counters.add(bytes_fetched=len(body))
        else:
            counters.add(cache_hits=1, cache_bytes=len(body))
        return body

    return fetch


def load_field(
    field: FieldReader,
    out: NDArray[Any],
    counters: Counters,
    sleep: Callable[[float], None],
    *,
    on_bad: Callable[[Sequence[int], StreamloaderError], object] | None = None,
) -> None:
    """Read all samples of a fixed-shape field into `out`, of shape (samples, *shape).

    Calls `sleep` to wait before a retry. `on_bad` gets the samples of each damaged chunk, with its error; without it,
    format errors are raised. Raises storage errors, and exceptions of `sleep`.
    """
    store = field.store

    def count_retry(*_: object) -> None:
        counters.add(retries=1)

    def load(run: Run) -> None:
        left = [run]  # not by recursion: a function that calls itself holds itself, until a collection
        while left:
            part = left.pop(0)
            fetch = counted(field, part, counters, count_retry)
            with store.retries.waits_by(sleep):
                try:
                    field.load(part, fetch, out, 0, on_damage=count_retry)
                except FormatError as error:
                    if on_bad is None:
                        raise
                    parts = field.split(part)
                    if len(parts) > 1:
                        left += parts
                    else:
                        on_bad(field.bad_rows(part, 0, field.num_samples), detached(error))

    with store.retries.waits_by(sleep):
        for start in range(0, field.num_samples, PIECE):
            run_all(load, field.runs(start, min(start + PIECE, field.num_samples)), THREADS)
