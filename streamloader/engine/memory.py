"""Blocks in memory: slots that are allocated once and used again, and batch buffers likewise.

A page that was touched before costs nothing; a new one costs three times the copy into it.

How many bytes go where: pure arithmetic from `memory=` to slots and threads.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import MemoryBudgetError
from streamloader.format.codecs import Items
from streamloader.format.manifest import FieldLayout
from streamloader.options import MIB
from streamloader.stats import Counters
from streamloader.storage.process import cpu_count

Column = NDArray[Any]
NO_SLOT = -1
# What a slot holds of each variable-size item beside its bytes: chunk, start and stop.
ITEM_BYTES = 3 * 4
# Smaller buffers come from malloc, which reuses them; from the other size on, as numpy does, in huge pages.
MAPPED_BYTES = 1 << 18
HUGE_BYTES = 1 << 22


class Arena:
    """`slots` blocks of `block` samples: one array for each fixed-shape field, chunks with offsets for the others."""

    def __init__(self, layouts: Mapping[str, FieldLayout], slots: int, block: int) -> None:
        self.block = block
        self.shape = (dict(layouts), slots, block)
        self._count = slots
        self._free = list(range(slots))
        self._fixed: dict[str, Column] = {
            name: np.empty((slots * block, *layout.field.shape), layout.field.dtype)
            for name, layout in layouts.items()
            if layout.field.fixed
        }
        self._variable = {name: _Chunks(slots, block) for name, layout in layouts.items() if not layout.field.fixed}
        # ticket -> slot, also as an array, so that a batch translates its rows in one take
        self._slots: dict[int, int] = {}
        self._slot_of = np.full(1024, NO_SLOT, np.int64)
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Release every slot: the pass that held them is over, and its threads are."""
        for ticket in list(self._slots):
            self.release(ticket)

    @property
    def free(self) -> int:
        """Slots that can be reserved."""
        return self._count - len(self._slots)

    def reserve(self, ticket: int) -> None:
        """Hold a slot for `ticket`; it is assigned when its first bytes come."""
        with self._lock:
            oldest = next(iter(self._slots), ticket)
            self._slots[ticket] = NO_SLOT
            if ticket - oldest >= len(self._slot_of):
                self._grow(ticket - oldest)

    def claim(self, ticket: int) -> int:
        """Return the slot of a ticket; `NO_SLOT` where it was released meanwhile. Thread-safe."""
        with self._lock:
            slot = self._slots.get(ticket)
            if slot is None:
                return NO_SLOT
            if slot == NO_SLOT:
                slot = self._free.pop()  # the one that was released last: its pages are touched
                self._slots[ticket] = self._slot_of[ticket & (len(self._slot_of) - 1)] = slot
            return slot

    def release(self, ticket: int) -> None:
        """Give the ticket's slot back; items that a batch still holds stay alive with it."""
        with self._lock:
            slot = self._slots.pop(ticket)
            if slot != NO_SLOT:
                for chunks in self._variable.values():
                    chunks.drop(slot)
                self._free.append(slot)

    def slot_rows(self, name: str, slot: int, rows: int) -> Column:
        """Return the first `rows` rows of a slot, to be decoded into."""
        return self._fixed[name][slot * self.block : slot * self.block + rows]

    def keep(self, name: str, slot: int, chunks: Sequence[tuple[int, Items]]) -> None:
        """Hold decoded chunks of a variable-size field, each with the row of the block where its first item belongs.

        Items before the block's first row, or behind its last, are of other blocks. Other parts of the block may come
        before or after.
        """
        self._variable[name].keep(slot, chunks, self._lock)

    def take(self, name: str, tickets: NDArray[np.int64], rows: NDArray[np.int64], out: Column) -> None:
        """Gather fixed-shape rows into `out`: one copy, no allocation of the batch's size."""
        slots = self._translate(tickets)
        np.take(self._fixed[name], slots * self.block + rows, axis=0, out=out, mode="clip")

    def items(self, name: str, tickets: NDArray[np.int64], rows: NDArray[np.int64]) -> list[memoryview]:
        """Return the encoded bytes of each row; views that keep their chunk alive."""
        return self._variable[name].items(self._translate(tickets), rows)

    def item_bytes(self, name: str, tickets: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
        """Return the encoded bytes of these rows together."""
        return self._variable[name].item_bytes(self._translate(tickets), rows)

    def _translate(self, tickets: NDArray[np.int64]) -> NDArray[np.int64]:
        table = self._slot_of  # another thread may put a larger one in its place
        slots: NDArray[np.int64] = table[tickets & (len(table) - 1)]
        return slots

    def _grow(self, span: int) -> None:
        table = np.full(2 << span.bit_length(), NO_SLOT, np.int64)
        for ticket, slot in self._slots.items():
            table[ticket & (len(table) - 1)] = slot
        self._slot_of = table


class _Chunks:
    """A variable-size field in all slots: decoded chunks, and where in which of them each row of a block lies."""

    def __init__(self, slots: int, block: int) -> None:
        self._block = block
        self._buffers: list[list[memoryview]] = [[] for _ in range(slots)]
        self._chunk = np.empty(slots * block, np.int32)
        self._starts = np.empty(slots * block, np.int32)  # a chunk has less than 2 GiB
        self._stops = np.empty(slots * block, np.int32)

    def keep(self, slot: int, chunks: Sequence[tuple[int, Items]], lock: threading.Lock) -> None:
        """Hold the buffers, and note where the items are."""
        buffers = self._buffers[slot]
        with lock:
            first = len(buffers)
            buffers.extend(items.buffer for _, items in chunks)
        base = slot * self._block
        for number, (row, items) in enumerate(chunks, first):
            low, high = max(row, 0), min(row + len(items), self._block)
            self._chunk[base + low : base + high] = number
            self._starts[base + low : base + high] = items.starts[low - row : high - row]
            self._stops[base + low : base + high] = items.stops[low - row : high - row]

    def drop(self, slot: int) -> None:
        self._buffers[slot] = []

    def item_bytes(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
        places = slots * self._block + rows
        return int((self._stops[places] - self._starts[places]).sum(dtype=np.int64))

    def items(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> list[memoryview]:
        places = slots * self._block + rows
        parts = (slots.tolist(), *(what[places].tolist() for what in (self._chunk, self._starts, self._stops)))
        return [self._buffers[slot][chunk][start:stop] for slot, chunk, start, stop in zip(*parts, strict=True)]


class Buffers:
    """Arrays that come back once their last view is dropped: batches, bodies, and what they are decoded to.

    It never waits: with none free it allocates and counts. A lease ends with the ndarray
    that `lease` returned, so hand out only what keeps that object alive (a tensor made from it does, a numpy
    slice does not). Of each size `keep` at most are kept for the next lease; unused ones are freed where all buffers
    together would exceed `most` bytes. Thread-safe.
    """

    def __init__(self, counters: Counters, *, recycle: bool = True, keep: int = 8, most: float = math.inf) -> None:
        self._free: dict[tuple[int, str], deque[NDArray[np.uint8]]] = {}
        self._made: Counter[tuple[int, str]] = Counter()
        self._counters = counters
        self._recycle = recycle
        self._keep = keep
        self.most = most
        self._allocated = 0
        self._freed: deque[int] = deque()  # sizes; finalizers append, which needs no lock
        self._lock = threading.RLock()

    @property
    def used(self) -> int:
        """Bytes of the buffers that are leased now."""
        with self._lock:
            return self._alive() - sum(size * len(free) for (size, _), free in self._free.items())

    def lease(self, shape: tuple[int, ...], dtype: str, usual: int = 1) -> Column:
        """Return an array of that shape; its content is whatever was there.

        `usual`: how many of it live at once in an ordinary loop. So many are made before one is used again: memory is
        at its peak after the first batches, not whenever the consumer first falls behind.
        """
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        capacity = _capacity(count * np.dtype(dtype).itemsize)
        with self._lock:
            base, free = self._spare(capacity, dtype, usual)
        view = np.frombuffer(base.data, dtype, count).reshape(shape)
        if self._recycle:
            # a deque's append is atomic: the finalizer may run in any thread, also within `lease`
            weakref.finalize(view, free.append, base).atexit = False
        return view

    def _spare(self, capacity: int, dtype: str, usual: int) -> tuple[NDArray[np.uint8], deque[NDArray[np.uint8]]]:
        """Return memory, and where it comes back to: of the next size where this one has none, else new."""
        for size in (capacity, _capacity(capacity + 1)):
            free = self._free.setdefault((size, dtype), deque(maxlen=self._keep))
            if size == capacity and self._made[size, dtype] < usual:
                break
            try:
                return free.pop(), free
            except IndexError:
                continue
        self._trim(capacity)
        self._made[capacity, dtype] += 1
        self._counters.add(buffers_allocated=1)
        return self._count(_pages(capacity)), self._free[capacity, dtype]

    def limit(self, most: float) -> None:
        """Set the bytes within which unused buffers are kept."""
        with self._lock:
            self.most = most
            self._trim(0)

    def allocate(self, size: int) -> memoryview:
        """Lease writable memory of so many bytes."""
        return memoryview(self.lease((size,), "uint8"))  # type: ignore[arg-type]

    def adopt(self, body: memoryview) -> memoryview:
        """Return a body with its bytes counted as used, also where its memory is the client's own."""
        if isinstance(body.obj, np.ndarray) or not body.nbytes:
            return body
        return memoryview(self._count(np.frombuffer(body, np.uint8)))  # type: ignore[arg-type]

    def _count(self, made: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Count an array as used until it is dropped, and return it."""
        with self._lock:
            self._allocated += made.nbytes
        weakref.finalize(made, self._freed.append, made.nbytes).atexit = False
        return made

    def _alive(self) -> int:
        while self._freed:
            self._allocated -= self._freed.popleft()
        return self._allocated

    def _trim(self, more: int) -> None:
        """Free unused buffers, the largest first, until `more` bytes fit."""
        for _, free in sorted(self._free.items(), key=lambda entry: entry[0], reverse=True):
            while free and self._alive() + more > self.most:
                free.popleft()


def _pages(nbytes: int) -> NDArray[np.uint8]:
    """Return memory that the system gets back when it is dropped.

    What malloc gives to the threads of a pass, and of the next, stays with it: some MB for each of 8 heaps a core.
    """
    if nbytes < MAPPED_BYTES:
        return np.empty(nbytes, np.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _capacity(nbytes: int) -> int:
    """Round up to 1, 1.25, 1.5 or 1.75 times a power of two: batches whose size varies share their buffers."""
    step = 1 << max(6, nbytes.bit_length() - 3)
    return -(-nbytes // step) * step


# Requests in flight at most: 49 of 8 MB fill 25 Gbit/s of a store that answers after 30 ms and moves 85 MB/s on each
# connection. How many there are follows what pays (`Pace`); memory may lower it.
MAX_THREADS = 64
# Batches at once: the consumer has one, one waits, one is in the making.
READY_BATCHES = 3
# A loop holds its batch until it has the next one.
LIVE_BATCHES = READY_BATCHES + 1
# What an open connection costs beside its body.
CONNECTION_BYTES = MIB // 2
# By how much the blocks of uneven samples may exceed what `memory=` leaves for them: less than the allowance of 60 MB
# within which the peak of a process stays, and so small excesses do not end a run.
TOLERANCE_BYTES = 16 << 20
# The part of the machine's memory that a loader may take without `memory=`.
MACHINE_SHARE = 0.8


class Demand(NamedTuple):
    """What the plan needs; sizes in bytes.

    `slots`: blocks that must be resident at once. `slot_bytes`: one decoded block of all streamed fields, of
    which `variable_bytes` are the mean of the variable-size ones. `resident_bytes`: resident fields.
    `index_bytes`: cached chunk tables, numbers of selected samples, and planning. `batch_bytes`: one finished batch.
    `request_bytes`: the largest single request. `blocks`: blocks of the epoch, beyond which a slot is of no use.
    `scratch_bytes`: what a thread decodes in, beside the slot.
    """

    slots: int
    slot_bytes: int
    batch_bytes: int
    request_bytes: int
    blocks: int
    variable_bytes: int = 0
    resident_bytes: int = 0
    index_bytes: int = 0
    scratch_bytes: int = 0

    @property
    def connection_bytes(self) -> int:
        """What a thread holds beside a slot and a body."""
        return CONNECTION_BYTES + self.scratch_bytes

    @property
    def thread_bytes(self) -> int:
        """One request in flight: a slot of its own, the body, the connection.

        The body counts half more: measured peaks were 1.0 of the bytes in flight over plain sockets, 1.4 with obstore.
        """
        return self.slot_bytes + self.request_bytes + self.request_bytes // 2 + self.connection_bytes

    @property
    def least_bytes(self) -> int:
        """The least `memory` that runs at all: the window, resident fields, indexes, batches and one request."""
        held = self.resident_bytes + self.index_bytes + LIVE_BATCHES * self.batch_bytes
        return self.slots * self.slot_bytes + held + self.thread_bytes


class Budget(NamedTuple):
    """What the engine may use: `slots` of a block, `threads` that fetch, `bytes` in all.

    `body_bytes` of them are for bodies in flight and blocks of variable-size fields. `batch_bytes` are those of a mean
    batch. `exact`: `bytes` were asked for, so that a need beyond them is an error. `cores` are for decoding.
    """

    slots: int
    threads: int
    bytes: int
    body_bytes: int = 0
    batch_bytes: int = 0
    exact: bool = False
    cores: int = 1

    @property
    def usual_bytes(self) -> int:
        """The bytes of a batch that is not much larger than the mean."""
        return self.batch_bytes + TOLERANCE_BYTES // LIVE_BATCHES

    def unplanned(self, batches: int) -> int:
        """Return by how much `batches` bytes of finished batches exceed those planned for."""
        return max(0, batches - LIVE_BATCHES * self.batch_bytes)

    def check(self, blocks: int, batches: int = 0) -> None:
        """Raise `MemoryBudgetError` if `memory=` is too little for blocks of `blocks` bytes, needed at once.

        `batches`: bytes of variable-size columns of the batches that exist then, of which some are counted already.
        """
        excess = blocks + self.unplanned(batches) - self.body_bytes
        if self.exact and excess > TOLERANCE_BYTES:
            need = self.bytes + excess
            raise MemoryBudgetError(
                f"the samples need more memory than planned: memory={need} bytes for blocks of {blocks} and batches of "
                f"{batches}, but memory={self.bytes}",
                f"give memory={need + need // 4} or more, since later samples may need more, or leave memory= out, "
                "or use a smaller batch_size or shuffle=Shuffle(window=, lanes=)",
            )


class Memory(NamedTuple):
    """Memory that bodies, blocks and batches are put into. It outlives a pass: the next one finds its pages touched."""

    bodies: Buffers
    arena: Arena
    buffers: Buffers

    @classmethod
    def of(
        cls, layouts: Mapping[str, FieldLayout], block: int, budget: Budget, counters: Counters, *, recycle: bool
    ) -> Memory:
        """Return memory for blocks of `block` samples; `recycle`: no part of a finished batch is kept."""
        most = LIVE_BATCHES * budget.batch_bytes + TOLERANCE_BYTES if budget.exact else math.inf
        return cls(
            bodies=Buffers(Counters(), keep=budget.slots + MAX_THREADS, most=budget.body_bytes),
            arena=Arena(layouts, budget.slots, block),
            buffers=Buffers(counters, recycle=recycle, most=most),
        )


def allot(demand: Demand, memory: int | None, ranks_here: int = 1) -> Budget:
    """Return the budget. Raises `MemoryBudgetError`, which names the need, where the window does not fit.

    Without `memory` the window gets what it needs and every thread its request, as long as all ranks of
    this machine together stay below 80 % of its memory.
    """
    limit = allowance(memory, ranks_here)
    if memory is None:
        limit = min(limit, demand.least_bytes + (MAX_THREADS - 1) * demand.thread_bytes)
    if demand.least_bytes > limit:
        raise MemoryBudgetError(
            f"the shuffle window needs memory={demand.least_bytes} bytes for each rank ({demand.slots} blocks of "
            f"{demand.slot_bytes} bytes, {LIVE_BATCHES} batches of {demand.batch_bytes}, resident fields of "
            f"{demand.resident_bytes}, indexes and plans of {demand.index_bytes}, one request), "
            f"but {'memory=' if memory is not None else 'the machine allows it '}{limit}",
            f"give memory={demand.least_bytes} or more, or a smaller shuffle=Shuffle(window=, lanes=)",
        )
    spare = (limit - demand.least_bytes) // demand.thread_bytes
    threads = min(MAX_THREADS, 1 + spare)
    # never fewer than the plan needs, which may be more than there are blocks: two lanes may hold one each
    slots = max(1, demand.slots, min(demand.slots + threads, demand.blocks + 1))
    cores = max(1, cpu_count() // ranks_here)
    threads = max(1, min(threads, slots))
    held = demand.resident_bytes + demand.index_bytes + LIVE_BATCHES * demand.batch_bytes
    bodies = limit - held - threads * demand.connection_bytes - slots * (demand.slot_bytes - demand.variable_bytes)
    return Budget(slots, threads, limit, bodies, demand.batch_bytes, memory is not None, cores)


def allowance(memory: int | None, ranks_here: int) -> int:
    """Return the bytes that one rank may use: `memory`, or its part of 80 % of the machine's."""
    return int(machine_memory() * MACHINE_SHARE / ranks_here) if memory is None else memory


def machine_memory() -> int:
    """Return the bytes of memory that this process may have: the machine's, or the control group's if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
