"""The memory that a pass needs, and how `memory=` is divided between slots, requests and batches. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamloader.engine.arena import machine_memory
from streamloader.errors import MemoryBudgetError
from streamloader.options import MIB
from streamloader.storage.process import cpu_count

# The maximum number of requests in flight: 49 of 8 MB fill 25 Gbit/s from a store with a latency of 30 ms and 85 MB/s
# per connection. `Pace` adapts the actual number; `memory=` may lower it.
MAX_THREADS = 64
# Batches at once: the consumer has one, one is ready, one is being made.
READY_BATCHES = 3
# A loop holds its batch until it has the next one.
LIVE_BATCHES = READY_BATCHES + 1
# The memory of an open connection besides the body.
CONNECTION_BYTES = MIB // 2
# A small excess over `memory=` does not end a run. It is part of the 60 MB by which a process may exceed `memory=`.
TOLERANCE_BYTES = 16 << 20
# The share of the machine's memory that loaders may take without `memory=`.
MACHINE_SHARE = 0.8
# The share of that which a loader may take without `memory=` to keep decoded arrays for later epochs.
KEPT_SHARE = 0.5
# All blocks are kept if so many requests in flight fit beside them; otherwise more of these have precedence.
KEPT_THREADS = 16


SUMMED = ("slot_bytes", "item_bytes", "batch_bytes", "resident_bytes", "kept_bytes", "uneven_bytes")


@dataclass(frozen=True)
class Demand:
    """The memory that a pass needs, or that one field adds to it; sizes in bytes.

    `slots`: blocks that must be in memory at once. `slot_bytes`: one decoded block of all streamed fields, of
    which `item_bytes` is the mean of the fields that are not in slots. `resident_bytes`: resident fields, and batches
    that are copied to a device beside the usual ones. `pieces`: requests of a block. `most_threads`: requests in flight
    without `memory`.
    `index_bytes`: cached chunk tables, numbers of selected samples, and plans. `batch_bytes`: one finished batch.
    `request_bytes`: the largest single request. `blocks`: blocks of the epoch, the most slots that are useful.
    `scratch_bytes`: the buffers of a decoding thread besides the slot. `fills_batches`: slots are rows of batches.
    `kept_bytes`: everything that an epoch reads, if it can be kept for later ones instead of the slots, else 0.
    `uneven_bytes`: sparse rows of a block, all of which may be in one batch. `reused`: epochs have the same blocks.
    """

    slots: int = 0
    slot_bytes: int = 0
    batch_bytes: int = 0
    request_bytes: int = 0
    blocks: int = 0
    item_bytes: int = 0
    resident_bytes: int = 0
    index_bytes: int = 0
    scratch_bytes: int = 0
    pieces: int = 0
    most_threads: int = MAX_THREADS
    fills_batches: bool = False
    kept_bytes: int = 0
    uneven_bytes: int = 0
    reused: bool = True

    @classmethod
    def of(cls, fields: Sequence[Demand], slots: int, blocks: int, index_bytes: int) -> Demand:
        """Return the demand of a pass over these fields."""
        total = {name: sum(getattr(field, name) for field in fields) for name in SUMMED}
        fills_batches = bool(fields) and all(field.fills_batches for field in fields)
        if fills_batches:
            total["batch_bytes"] += total["batch_bytes"] // LIVE_BATCHES  # one more, some of whose rows are slots
        return cls(
            slots=slots,
            blocks=blocks,
            index_bytes=index_bytes,
            request_bytes=max((field.request_bytes for field in fields), default=0) or MIB,
            scratch_bytes=max((field.scratch_bytes for field in fields), default=0),
            pieces=max(1, sum(field.pieces for field in fields)),
            most_threads=min((field.most_threads for field in fields), default=MAX_THREADS),
            fills_batches=fills_batches,
            **total,
        )

    @property
    def connection_bytes(self) -> int:
        """The memory of a fetch thread besides a slot and a body."""
        return CONNECTION_BYTES + self.scratch_bytes

    @property
    def flight_bytes(self) -> int:
        """One request in flight: the body and the connection.

        The body counts 1.5 times: measured peaks were 1.0 of the bytes in flight with plain sockets, 1.4 with obstore.
        """
        return self.request_bytes + self.request_bytes // 2 + self.connection_bytes

    @property
    def thread_bytes(self) -> int:
        """One request in flight and its part of a slot."""
        return -(-self.slot_bytes // self.pieces) + self.flight_bytes

    @property
    def held_bytes(self) -> int:
        """Resident fields, indexes and batches, which do not depend on the numbers of slots and threads."""
        return self.resident_bytes + self.index_bytes + LIVE_BATCHES * self.batch_bytes

    @property
    def window_bytes(self) -> int:
        """The memory for the window, resident fields, indexes, batches and one request."""
        return self.slots * self.slot_bytes + self.held_bytes + self.thread_bytes

    @property
    def keeping_bytes(self) -> float:
        """The memory for the same with everything that is kept instead of the window."""
        least = self.kept_bytes + self.uneven_bytes + self.held_bytes + self.flight_bytes
        return least if self.kept_bytes else math.inf

    @property
    def least_bytes(self) -> int:
        """The minimum `memory`."""
        return int(min(self.window_bytes, self.keeping_bytes))


class Budget(NamedTuple):
    """The resources of an engine: `slots` for blocks, `threads` that fetch, `cores` for decoding, `bytes` in total.

    `body_bytes` of these are for bodies in flight and decoded chunks of blocks. `batch_bytes`: a mean batch.
    `exact`: `bytes` is the user's `memory=`, so a larger need is an error. `fills_batches`: as of `Demand`.
    `keeps`: what was read is kept for later epochs, in `Demand.kept_bytes`. `kept_slots`: else the blocks that are.
    """

    slots: int
    threads: int
    bytes: int
    body_bytes: int = 0
    batch_bytes: int = 0
    exact: bool = False
    cores: int = 1
    fills_batches: bool = False
    keeps: bool = False
    kept_slots: int = 0

    @property
    def shape(self) -> tuple[int, bool, bool, int]:
        """What the memory of blocks depends on."""
        return self.slots, self.fills_batches, self.keeps, self.kept_slots

    @property
    def reuses_blocks(self) -> bool:
        """Whether what has been loaded is used again: without `memory=` each run sends the requests that are planned.

        Rows of batches are not, since a consumer may change them.
        """
        return self.exact and not self.keeps and not self.fills_batches

    @property
    def usual_bytes(self) -> int:
        """The largest size of a batch that counts as one batch."""
        return self.batch_bytes + TOLERANCE_BYTES // LIVE_BATCHES

    def unplanned(self, batches: int) -> int:
        """Return by how much `batches` bytes of finished batches exceed the planned bytes."""
        return max(0, batches - LIVE_BATCHES * self.batch_bytes)

    def check(self, blocks: int, batches: int = 0, scratch: int = 0) -> None:
        """Raise `MemoryBudgetError` if `memory=` is too small for `blocks` bytes of blocks that are needed at once.

        `batches`: bytes of the variable-size columns of the batches in memory. `scratch`: bytes for decoding images.
        """
        excess = blocks + self.unplanned(batches) + scratch - self.body_bytes
        if self.exact and excess > TOLERANCE_BYTES:
            need = self.bytes + excess
            raise MemoryBudgetError(
                f"the samples need more memory than planned: memory={need} bytes for blocks of {blocks} and batches of "
                f"{batches + scratch}, but memory={self.bytes}",
                f"give memory={need + need // 4} or more, since later samples may need more, or leave memory= out, "
                "or use a smaller batch_size or shuffle=Shuffle(window=, lanes=)",
            )


def allot(demand: Demand, memory: int | None, ranks_here: int = 1) -> Budget:
    """Return the budget. Raises `MemoryBudgetError`, which states the need, if the window does not fit.

    Without `memory`, the window and all `Demand.most_threads` threads get the memory that they need, as long as all
    ranks of this machine together stay below 80 % of its memory. Arrays are kept if all that is read of them fits: into
    `memory`, or without it into `KEPT_SHARE` of the limit. Otherwise, with `memory`, blocks are kept: all if they fit
    beside `KEPT_THREADS` requests, else as many as fit beside all requests.
    """
    limit, most = allowance(memory, ranks_here), demand.most_threads if memory is None else MAX_THREADS
    least, thread, flight = demand.window_bytes, demand.thread_bytes, demand.flight_bytes
    # of the requests that there would be without keeping
    requests = min((most - 1) * flight, -(-max(0, limit - least) * flight // thread))
    share = KEPT_SHARE if memory is None else 1
    keeps = demand.keeping_bytes <= max(least, limit * share - requests)
    if keeps:
        least, thread = int(demand.keeping_bytes), flight
    if memory is None:
        limit = min(limit, least + (most - 1) * thread)
    if least > limit:
        raise MemoryBudgetError(
            f"the shuffle window needs memory={least} bytes for each rank ({demand.slots} blocks of "
            f"{demand.slot_bytes} bytes, {LIVE_BATCHES} batches of {demand.batch_bytes}, resident fields and copies of "
            f"{demand.resident_bytes}, indexes and plans of {demand.index_bytes}, one request), "
            f"but {'memory=' if memory is not None else 'the machine allows it '}{limit}",
            f"give memory={least} or more, or a smaller batch_size or shuffle=Shuffle(window=, lanes=)",
        )
    fills_batches = demand.fills_batches and not keeps
    keeps_blocks = memory is not None and not keeps and not fills_batches and demand.slot_bytes > 0 and demand.reused
    every = demand.blocks * demand.slot_bytes
    kept_bytes = every if keeps_blocks and least + every + (KEPT_THREADS - 1) * thread <= limit else 0
    threads = min(MAX_THREADS, 1 + (limit - least - kept_bytes) // thread)
    # at least as many as the plan needs, which may exceed the number of blocks: two lanes may hold the same one
    slots = max(1, demand.slots, min(demand.slots + threads // demand.pieces, demand.blocks + 1))
    cores = max(1, cpu_count() // ranks_here)
    threads = min(threads, slots * demand.pieces)
    left = limit - demand.held_bytes - slots * demand.slot_bytes - threads * flight
    kept = max(0, min(demand.blocks, left // demand.slot_bytes)) if keeps_blocks else 0
    outside = demand.slot_bytes - (0 if fills_batches else demand.item_bytes)  # of bodies
    fixed = threads * demand.connection_bytes + (demand.kept_bytes if keeps else (slots + kept) * outside)
    fixed += threads * demand.request_bytes // 2 if kept else 0  # clients' memory, which kept blocks must not take
    bodies, exact = limit - demand.held_bytes - fixed, memory is not None
    return Budget(slots, threads, limit, bodies, demand.batch_bytes, exact, cores, fills_batches, keeps, kept)


def allowance(memory: int | None, ranks_here: int) -> int:
    """Return the bytes that one rank may use: `memory`, or its share of 80 % of the machine's memory."""
    return int(machine_memory() * MACHINE_SHARE / ranks_here) if memory is None else memory
