"""The blocks of a pass in memory: slots, each with the samples of a block, and the residences of their fields."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import Arena, Buffers
from streamloader.engine.budget import LIVE_BATCHES, MAX_THREADS, READY_BATCHES, TOLERANCE_BYTES, Budget
from streamloader.engine.kept import NO_SLOT, KeptBlocks
from streamloader.engine.packing import FindItems
from streamloader.engine.regions import BatchRow, BatchRows, Regions
from streamloader.engine.residence import LARGE_ROW, Chunks, Rows
from streamloader.errors import EngineError
from streamloader.format.reader import FieldReader
from streamloader.options import Pack, Pad
from streamloader.order.packing import locate
from streamloader.order.schedule import BatchPlan, BlockRef, Ints
from streamloader.stats import Counters
from streamloader.storage.buffers import Allocate
from streamloader.zarr.columns import ChunkPlaces, RegionReader

# The number of the document in a slot row.
KEY_BYTES = 8
NO_DOCUMENT = (1 << 63) - 1  # after all others
NO_PACKS: Mapping[str, Pack | Pad] = {}
Residence = Rows | Chunks | Regions


def residence_of(reader: FieldReader | RegionReader) -> type[Rows | Chunks | Regions]:
    """Return the kind of residence of the field that a reader reads."""
    if isinstance(reader, RegionReader):
        return Regions
    field = reader.layout.field
    return Rows if field.fixed and field.item_bytes < LARGE_ROW else Chunks


class Memory:
    """The memory of a pass: slots for blocks of `block` samples, residences of their fields, and buffers.

    `readers`: of the fields; `packs`: how some are packed or padded. `bodies`: of responses, and of what is decoded
    from them. `buffers`: of batches. `tolerant`: samples that cannot be read are marked, and do not end the pass. The
    next pass reuses it, with the blocks that are kept and pages that have been touched.

    Slots of packed rows hold documents: `block` is then the most that a block of rows needs. `rows`: their items, the
    most segments of one, and the dtype of the numbers of documents, see `packing.py`.
    """

    def __init__(
        self,
        readers: Mapping[str, FieldReader | RegionReader],
        block: int,
        budget: Budget,
        counters: Counters,
        arena: Arena,
        *,
        packs: Mapping[str, Pack | Pad] = NO_PACKS,
        tolerant: bool = False,
        rows: tuple[FindItems, int, str] | None = None,
    ) -> None:
        self.tolerant, self.rows = tolerant, rows
        self.block, self.budget, self.counters = block, budget, counters
        most = LIVE_BATCHES * budget.batch_bytes + TOLERANCE_BYTES if budget.exact else math.inf
        columns_alive = len(readers) * (LIVE_BATCHES + READY_BATCHES + (budget.slots if budget.fills_batches else 1))
        self.buffers = Buffers(arena, counters, keep=columns_alive, most=most)
        slots = budget.slots + budget.kept_slots
        self.residences: dict[str, Residence] = {
            name: residence_of(reader)(name, reader.layout.field, arena, (slots, block), packs.get(name))
            for name, reader in readers.items()
        }
        self._lock = threading.Lock()
        self._kept = KeptBlocks(budget.kept_slots)
        self._free = list(range(slots))
        self._free_slot = free = partial(_free_slot, self._free, self.residences.values())
        in_bodies = any(not isinstance(each, Rows) for each in self.residences.values())
        self.bodies = Buffers(
            arena,
            Counters(),
            keep=budget.slots + MAX_THREADS,
            most=budget.body_bytes,
            give_up=partial(_drop_kept, self._lock, self._kept, free) if in_bodies else bool,
        )
        kept = self.residences.items() if budget.keeps else ()
        self._kept_arrays = {name: each for name, each in kept if isinstance(each, Regions)}
        self._batch_rows: dict[int, BatchRow] = {}  # by ticket
        self._documents: dict[int, Ints] = {}  # of packed rows, by ticket, until they have a slot
        # of packed rows, the document in each slot row: they ascend within a slot
        self._in_slots = np.full(slots * block if rows is not None else 0, NO_DOCUMENT)
        self._slots: dict[int, int] = {}  # by ticket
        self._refs: dict[int, BlockRef] = {}  # by ticket
        self._first_row = np.zeros(1024, np.int64)  # of the block of each ticket, modulo the length of this array

    def is_for(self, names: Sequence[str], block: int, budget: Budget) -> bool:
        """Return whether it has the fields, the blocks and the slots that a pass with this budget needs."""
        has = (*self.residences,), self.block, *self.budget.shape
        return has == ((*names,), block, *budget.shape)

    def clear(self, budget: Budget, time: float) -> None:
        """Release every slot, for a pass with this budget that begins at a `time`: see `EpochShare.time`.

        The threads of the last pass must have ended.
        """
        self.budget = budget
        for ticket in list(self._slots):
            self.release(ticket)
        self._batch_rows.clear()
        with self._lock:
            self._kept.begin(time)

    @property
    def free(self) -> int:
        """The number of slots that can be reserved."""
        return self.budget.slots - len(self._slots)

    def expect(self, plan: BatchPlan) -> None:
        """Prepare the batch of a plan before its blocks are reserved, if blocks fill rows of batches."""
        if self.budget.fills_batches:
            batch = BatchRows(plan, self.buffers)
            self._batch_rows |= {ticket: (batch, row) for ticket, row in batch.rows.items()}

    def has(self, ref: BlockRef) -> bool:
        """Return whether a block is in memory, where the next use of another one may end it."""
        with self._lock:
            return ref in self._kept

    def reserve(self, ref: BlockRef) -> int | None:
        """Reserve a slot for a block; return its bytes if it is in memory.

        Else return None; `claim` assigns a slot when the first bytes arrive.
        """
        with self._lock:
            ticket = ref.ticket
            oldest = next(iter(self._slots), ticket)
            self._slots[ticket], self._refs[ticket] = NO_SLOT, ref
            if ticket - oldest >= len(self._first_row):
                self._grow(ticket - oldest)
            if ref not in self._kept:
                return None
            slot, row, size = self._kept.use(ref)
            self._assign(ticket, slot, row)
            return size

    def claim(self, ticket: int) -> int:
        """Return the slot of a ticket, or `NO_SLOT` if it has been released. Thread-safe."""
        with self._lock:
            slot = self._slots.get(ticket)
            if slot is None:
                return NO_SLOT
            if slot == NO_SLOT:
                slot = self._free.pop()  # the one released last: its pages have been touched
                self._assign(ticket, slot)
                if (documents := self._documents.pop(ticket, None)) is not None:
                    first, end = slot * self.block, slot * self.block + len(documents)
                    self._in_slots[first:end], self._in_slots[end : first + self.block] = documents, NO_DOCUMENT
            return slot

    def _assign(self, ticket: int, slot: int, row: int = 0) -> None:
        self._slots[ticket] = slot
        self._first_row[ticket & (len(self._first_row) - 1)] = slot * self.block + row

    def complete(self, ticket: int, size: int = 0) -> None:
        """Let other tickets use a block that has been loaded, of `size` bytes in `bodies`, if blocks are used again."""
        slot = self.claim(ticket)
        for regions in self._kept_arrays.values():
            regions.complete(slot)
        if self.budget.reuses_blocks:
            with self._lock:
                self._free_slot(self._kept.add(slot, self._refs[ticket], size))

    def release(self, ticket: int) -> None:
        """Free the ticket's slot, unless its block is kept; items that a batch still holds stay valid."""
        with self._lock:
            self._batch_rows.pop(ticket, None)
            self._documents.pop(ticket, None)
            slot, ref = self._slots.pop(ticket), self._refs.pop(ticket)
            if not self._kept.release(slot, ref):
                self._free_slot(slot)
            while self._kept.unused > self._kept.most:
                self._free_slot(self._kept.drop())

    def open(self, slot: int, ref: BlockRef, reader: FieldReader | RegionReader, allocate: Allocate) -> Any:
        """Return what the `write` of a reader decodes the responses for a block into, in the slot that it claimed."""
        memory = self._batch_rows.get(ref.ticket) or allocate
        residence: Any = self.residences[reader.name]
        return residence.open(slot, ref, reader, memory)

    def incomplete(self, ref: BlockRef, readers: Mapping[str, RegionReader]) -> list[str]:
        """Return the fields to read for a block: all, or those of which memory that is kept does not have all."""
        if not self._kept_arrays:
            return [*self.residences]
        slot = self.claim(ref.ticket)
        kept = self._kept_arrays.items()
        return [name for name, each in kept if each.open_kept(slot, readers[name], ref.start, ref.stop)]

    def chunks_to_read(self, ref: BlockRef, reader: RegionReader, allocate: Allocate) -> list[ChunkPlaces] | None:
        """Return the chunks of arrays to read for a block, None for all that it needs.

        What other blocks in memory have is copied to the regions of the block, which `allocate` returns memory for.
        """
        regions = self.residences[reader.name]
        assert isinstance(regions, Regions)
        with self._lock:  # the arrays of a block hold its memory, should it be dropped now
            beside = regions.in_slots(self._kept.beside(ref.block, self.block, reader.reach(self.block)))
        if not beside and not self._kept_arrays:
            return None
        slot = self.claim(ref.ticket)
        if slot == NO_SLOT:
            return None
        return regions.claims(slot) if self._kept_arrays else regions.fill_from(slot, ref, (reader, allocate), beside)

    def locate(self, tickets: NDArray[np.int64], rows: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Return the slot row of each row of the blocks with these tickets."""
        table = self._first_row  # another thread may replace it with a larger one
        slot_rows: NDArray[np.int64] = table[tickets & (len(table) - 1)]
        slot_rows += rows
        return slot_rows

    def expect_documents(self, ticket: int, documents: NDArray[np.int64]) -> None:
        """State which documents the slot of a block of packed rows will hold, ascending, before it is claimed."""
        with self._lock:
            self._documents[ticket] = documents

    def locate_documents(self, tickets: Ints, edges: Ints, documents: Ints) -> Ints:
        """Return the slot row of each document: those of packed row i, whose block has a ticket, are edges[i:i + 2]."""
        slot_rows = np.empty_like(documents)
        firsts = self.locate(tickets, 0) // self.block * self.block
        missing = locate(self._in_slots, self.block, (firsts, edges, documents), slot_rows)
        if missing >= 0:
            problem = f"document {documents[missing]} of packed rows is not in the slot of its block"
            raise EngineError(problem, "report this with the dataset's manifest")
        return slot_rows

    def _grow(self, span: int) -> None:
        table, old = np.zeros(2 << span.bit_length(), np.int64), self._first_row
        tickets = np.array([*self._slots], np.int64)
        table[tickets & (len(table) - 1)] = old[tickets & (len(old) - 1)]
        self._first_row = table


def _free_slot(free: list[int], residences: Collection[Residence], slot: int) -> None:
    if slot != NO_SLOT:
        for residence in residences:
            residence.drop(slot)
        free.append(slot)


def _drop_kept(lock: threading.Lock, kept: KeptBlocks, free: Callable[[int], None]) -> bool:
    """Free the block that is kept and whose next use is latest; return whether there was one.

    A function, since buffers that held the memory that has them would form a cycle.
    """
    with lock:
        slot = kept.drop()
        free(slot)
        return slot != NO_SLOT
