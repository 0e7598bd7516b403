"""What an append writes: the claim that only one of them holds, and the tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.engines.engine import run_tasks
from streamloader.conversion.means import Means
from streamloader.conversion.progress import Progress
from streamloader.conversion.rows import SampleRows
from streamloader.conversion.schema import probe
from streamloader.conversion.sources.base import BadSample, Part, Source, refuse_all
from streamloader.conversion.task import Outcome, Task
from streamloader.errors import DestinationError, FormatError, NotFoundError, ObjectExistsError, SourceError
from streamloader.format.codecs import Column
from streamloader.format.extend import APPEND, Extension, write_extension
from streamloader.format.geometry import RESIDENT_TOTAL, settle
from streamloader.format.manifest import Manifest
from streamloader.format.opening import get_document
from streamloader.format.parse import parse_json
from streamloader.format.publish import CLAIM, clean_append
from streamloader.format.receipts import Receipt, check_receipts, read_receipts
from streamloader.options import Layout
from streamloader.storage.protocol import Store

ROUNDS = 5  # what others delete or overwrite while we write is done again, but not for ever


def read_claim(store: Store) -> dict[str, Any] | None:
    """Return what is being appended, or None where nothing is. Raises `FormatError`."""
    try:
        data = get_document(store, CLAIM)
    except NotFoundError:
        return None
    try:
        claim = parse_json(data)
        if not isinstance(claim, dict) or type(claim["generation"]) is not int:
            raise TypeError("not a claim")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{store.url}/{CLAIM} is damaged ({error})", "end it: streamloader append --abandon"
        ) from error
    return claim


def is_published(claim: Mapping[str, Any], manifest: Manifest) -> bool:
    """Return whether the dataset has what the claim is for: only its traces are left."""
    return bool(claim["generation"] <= manifest.generation)


def take_claim(store: Store, claim: Mapping[str, Any], base: Manifest) -> bytes:
    """Become the one that appends, or go on with the same append; return the claim as it is stored.

    Raises `DestinationError` where another append is under way.
    """
    found = read_claim(store)
    if found is not None and is_published(found, base):
        clean_append(store)  # killed after its last step but one
    data = json.dumps(claim, sort_keys=True, indent=1).encode()
    try:
        store.create(CLAIM, data)
    except ObjectExistsError as error:
        if read_claim(store) != json.loads(data):
            raise DestinationError(
                f"{store.url} is being appended to by another run, or one was interrupted",
                "run the same append again to go on with it, or end it with streamloader append --abandon",
            ) from error
    return data


def check_claim(store: Store, claim: bytes) -> None:
    """Raise `DestinationError` unless the claim is still there: who lost it must not write."""
    try:
        held = get_document(store, CLAIM) == claim
    except NotFoundError:
        held = False
    if not held:
        raise DestinationError(
            f"the append to {store.url} was ended by another run", "look at the dataset, then repeat it"
        )


def fitting_base(base: Manifest, source: Source) -> Manifest:
    """Return the manifest on whose grid the samples go: an empty dataset has no object yet, and is cut anew.

    Raises `DestinationError` where the resident fields would be more than readers hold.
    """
    total = base.num_samples + source.num_samples
    if not base.num_samples:
        options = Layout()
        schema = probe(source, options, False)
        sizes = {name: round(size * total) for name, size in schema.sizes.items()}
        geometry = schema.geometry(total, options)
        bulk = [name for name, layout in geometry.layouts.items() if not layout.resident]
        cut = settle(geometry, total, sizes, round(sum(schema.decoded[name] for name in bulk) * total))
        return replace(base, samples_per_shard=cut.samples_per_shard, fields=cut.layouts, order=cut.order)
    held = sum(layout.field.item_bytes * total for layout in base.fields.values() if layout.resident)
    if held > RESIDENT_TOTAL:
        problem = f"{total} samples have {held} bytes in small fields, readers hold at most {RESIDENT_TOTAL}"
        raise DestinationError(problem, "convert all of it anew: then these fields are streamed")
    return base


@dataclass(frozen=True, eq=False)
class AppendTask:
    """New rows become, or go into, one shard of all fields. As `Task`: picklable, and the same bytes every time."""

    part: Part
    store: Store
    extension: Extension
    shard: int
    rows: NDArray[np.int64]
    order: NDArray[np.int64] | None
    claim: bytes

    def run(self) -> Outcome:
        """Read, encode and write. Raises what the source or the store raise."""
        return self.prepare()()

    def prepare(self) -> Callable[[], Outcome]:
        """Read the new samples; return what encodes and writes them, and raises what the store raises.

        Raises what the source raises.
        """
        columns = self.part.read(self._refuse)
        if self.order is not None:
            columns = {name: _ordered(column, self.order) for name, column in columns.items()}
        return partial(self._write, columns)

    def _write(self, columns: Mapping[str, Column]) -> Receipt:
        check_claim(self.store, self.claim)
        return write_extension(self.store, self.extension, self.shard, columns)

    def _refuse(self, bad: BadSample) -> None:
        if bad.name:
            refuse_all(bad)
        raise SourceError(f"row {self.rows[bad.position]} of the source: {bad.problem}", bad.remedy)


@dataclass(frozen=True, eq=False)
class Appending:
    """One append under way: the source's rows, where they go, and who does it."""

    source: Source
    rows: SampleRows
    store: Store
    extension: Extension
    claim: bytes

    def write(self, means: Means) -> tuple[dict[int, Receipt], int]:
        """Do the tasks that are missing, until none is; return the receipts, and how many shards were there before."""
        found = read_receipts(self.store, f"{APPEND}/receipts")
        receipts = {shard: one for shard, one in found.items() if shard in self.extension.shards}
        for shard in check_receipts(self.store, receipts):
            del receipts[shard]
        kept = len(receipts)
        before, stored = sum(one.num_samples for one in receipts.values()), 0

        def note(task: Task, outcome: Outcome) -> None:
            nonlocal stored
            assert isinstance(outcome, Receipt)
            receipts[task.shard] = outcome
            stored += sum(one.size for one in outcome.objects.values())
            tell()

        def tell() -> None:
            done = sum(one.num_samples for one in receipts.values())
            means.listener(Progress("write", done, self.extension.added, before, stored))

        tell()
        for _ in range(ROUNDS):
            todo = [shard for shard in self.extension.shards if shard not in receipts]
            if not todo:
                return receipts, kept
            workers = min(means.processes(self.source.url, self.store.url), len(todo))
            tasks = cast("Iterator[Task]", (self._task(shard) for shard in todo))  # an engine only runs them
            run_tasks(means.engine, tasks, workers, note)
            for shard in check_receipts(self.store, receipts):
                del receipts[shard]
        raise DestinationError(
            f"objects at {self.store.url} change while it is written", "let nothing else write there, and run again"
        )

    def _task(self, shard: int) -> AppendTask:
        rows = self.rows.read(*self.extension.samples(shard))
        order = None if bool(np.all(rows[1:] > rows[:-1])) else np.argsort(np.argsort(rows))
        ascending = rows if order is None else np.sort(rows)
        part = self.source.part(ascending)
        return AppendTask(part, self.store, self.extension.for_shard(shard), shard, ascending, order, self.claim)


def _ordered(column: Column, order: NDArray[np.int64]) -> Column:
    return column[order] if isinstance(column, np.ndarray) else [column[row] for row in order.tolist()]
