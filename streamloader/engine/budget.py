"""How many bytes go where: pure arithmetic from `memory=` to slots and threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from streamloader.errors import MemoryBudgetError
from streamloader.format.threads import cpu_count
from streamloader.options import MIB

# Requests in flight at most: 49 of 8 MB fill 25 Gbit/s of a store that answers after 30 ms and moves 85 MB/s on each
# connection. How many there are follows what pays (`pace.py`); memory may lower it.
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
# The part of the machine's memory that a loader may take without being told how much.
MACHINE_SHARE = 0.8


@dataclass(frozen=True)
class Demand:
    """What the plan needs; sizes in bytes.

    `slots`: blocks that must be resident at once. `slot_bytes`: one decoded block of all streamed fields, of
    which `variable_bytes` are the mean of the variable-size ones. `resident_bytes`: fields held whole.
    `index_bytes`: cached chunk tables, numbers of selected samples, and planning. `batch_bytes`: one finished batch.
    `request_bytes`: the largest single request. `blocks`: blocks of the epoch, beyond which a slot is of no use.
    """

    slots: int
    slot_bytes: int
    batch_bytes: int
    request_bytes: int
    blocks: int
    variable_bytes: int = 0
    resident_bytes: int = 0
    index_bytes: int = 0

    @property
    def window_bytes(self) -> int:
        """The shuffle window alone."""
        return self.slots * self.slot_bytes

    @property
    def thread_bytes(self) -> int:
        """One request in flight: a slot of its own, the body, the connection.

        The body counts half more: measured peaks were 1.0 of the bytes in flight over plain sockets, 1.4 with obstore.
        """
        return self.slot_bytes + self.request_bytes + self.request_bytes // 2 + CONNECTION_BYTES

    @property
    def least_bytes(self) -> int:
        """The least `memory` that runs at all: the window, resident fields, indexes, batches and one request."""
        held = self.resident_bytes + self.index_bytes + LIVE_BATCHES * self.batch_bytes
        return self.window_bytes + held + self.thread_bytes


@dataclass(frozen=True)
class Budget:
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


def check_need(budget: Budget, blocks: int, batches: int = 0) -> None:
    """Raise `MemoryBudgetError` where `memory=` is too little for blocks of `blocks` bytes, which are needed at once.

    `batches`: bytes of variable-size columns of the batches that exist then, of which some are counted already.
    """
    excess = blocks + max(0, batches - LIVE_BATCHES * budget.batch_bytes) - budget.body_bytes
    if budget.exact and excess > TOLERANCE_BYTES:
        need = budget.bytes + excess
        raise MemoryBudgetError(
            f"the samples are uneven: here the shuffle window needs memory={need} bytes (blocks of {blocks}, batches "
            f"of {batches}), but memory={budget.bytes}",
            f"give memory={need + need // 4} or more, since later samples may need more, or leave memory= out, or use "
            "a smaller shuffle=Shuffle(window=, lanes=)",
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
    held = demand.resident_bytes + demand.index_bytes + LIVE_BATCHES * demand.batch_bytes + threads * CONNECTION_BYTES
    bodies = limit - held - slots * (demand.slot_bytes - demand.variable_bytes)
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
