"""Memory of the engine: from `memory=` to slots and threads; slots and buffers that are held are never written again,
and what was dropped is used again.
"""

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrun import run_python

import streamloader as sl
from streamloader.engine.arena import Arena, Buffers, machine_memory
from streamloader.engine.budget import LIVE_BATCHES, MACHINE_SHARE, MAX_THREADS, Budget, Demand, allot, allowance
from streamloader.engine.memory import NO_SLOT, Memory
from streamloader.engine.residence import Chunks, Rows
from streamloader.errors import MemoryBudgetError
from streamloader.format.codecs import Items
from streamloader.format.manifest import Field
from streamloader.order.schedule import BlockRef
from streamloader.stats import Counters

ARENA = Arena(shared=False)
BLOCK = 4
FIELDS = (("x", Field.parse("int64[2]")), ("raw", Field.parse("bytes")))


def memory_of(slots: int, kept: int = 0) -> tuple[Memory, Rows, Chunks]:
    """The memory of two fields, and the residences of these."""
    readers: dict[str, Any] = {name: SimpleNamespace(layout=SimpleNamespace(field=field)) for name, field in FIELDS}
    memory = Memory(readers, BLOCK, Budget(slots, 1, 1 << 30, 1 << 30, kept_slots=kept), Counters(), ARENA)
    rows, chunks = memory.residences.values()
    assert isinstance(rows, Rows)
    assert isinstance(chunks, Chunks)
    return memory, rows, chunks


def items(values: list[bytes]) -> Items:
    ends = np.cumsum([len(value) for value in values], dtype=np.int64)
    starts = ends - [len(value) for value in values]
    return Items(memoryview(b"".join(values)), starts, ends)


def arena_items(values: list[bytes]) -> Items:
    """Items whose bytes are in the arena of the blocks, as those of bodies are."""
    found = items(values)
    memory = ARENA.allocate(max(1, found.buffer.nbytes))
    memory[: found.buffer.nbytes] = np.frombuffer(found.buffer, np.uint8)
    return Items(memory.data[: found.buffer.nbytes], found.starts, found.stops)


def fill(blocks: Memory, rows: Rows, chunks: Chunks, ticket: int, skip: int = 0) -> None:
    """Load a block whose values tell its ticket; `skip` samples of the first chunk come before it."""
    blocks.reserve(BlockRef(ticket, 0, BLOCK))
    slot = blocks.claim(ticket)
    rows.values[slot * BLOCK : (slot + 1) * BLOCK] = (ticket * BLOCK + np.arange(BLOCK))[:, None]
    values = [b"before"] * skip + [b"%d" % (ticket * BLOCK + row) for row in range(BLOCK)]
    for at in [*range(2, len(values), 2), 0]:  # in two requests, the later one first
        chunks.put(slot, at - skip, arena_items(values[at : at + 2]))


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_rows_are_those_of_their_tickets_whatever_was_claimed_and_released(data):
    slots = data.draw(st.integers(1, 6))
    arena, stored, chunks = memory_of(slots)
    live: list[int] = []
    ticket = 0
    for _ in range(data.draw(st.integers(1, 60))):
        ticket += data.draw(st.sampled_from((1, 1, 1, 1023, 1024)))  # tickets that would share a place in the table
        if len(live) == slots:
            arena.release(live.pop(data.draw(st.integers(0, slots - 1))))
        fill(arena, stored, chunks, ticket, skip=data.draw(st.integers(0, 1)))
        live.append(ticket)
        assert arena.free == slots - len(live)
        tickets = np.array(data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=9)), np.int64)
        rows = np.array([data.draw(st.integers(0, BLOCK - 1)) for _ in tickets], np.int64)
        out = np.empty((len(tickets), 2), np.int64)
        slot_rows = arena.locate(tickets, rows)
        np.take(stored.values, slot_rows, axis=0, out=out)
        assert out.tolist() == [[t * BLOCK + r] * 2 for t, r in zip(tickets, rows, strict=True)]
        assert [bytes(item) for item in chunks.items(slot_rows)] == [
            b"%d" % (t * BLOCK + r) for t, r in zip(tickets, rows, strict=True)
        ]
    arena.clear(arena.budget, 0)
    assert arena.free == slots


def test_a_slot_is_assigned_at_its_first_claim_and_not_after_its_release():
    arena, _, _ = memory_of(2)
    arena.reserve(BlockRef(5, 0, BLOCK))
    arena.reserve(BlockRef(6, 0, BLOCK))
    assert arena.free == 0
    slot = arena.claim(5)
    assert arena.claim(5) == slot != arena.claim(6)
    arena.release(6)
    arena.release(5)
    assert arena.free == 2
    assert arena.claim(5) == NO_SLOT
    arena.reserve(BlockRef(7, 0, BLOCK))
    assert arena.claim(7) == slot  # the one that was released last: its pages are touched
    arena.reserve(BlockRef(8, 0, BLOCK))
    arena.release(8)  # never claimed
    assert arena.free == 1


def test_items_that_a_batch_holds_outlive_their_slot():
    arena, rows, chunks = memory_of(1)
    fill(arena, rows, chunks, 0)
    slot_rows = arena.locate(np.zeros(1, np.int64), np.array([3]))
    items, leases = chunks.items(slot_rows), chunks.leases(slot_rows)
    arena.release(0)
    fill(arena, rows, chunks, 1)
    assert bytes(items[0]) == b"3"
    del leases


def leased(buffers: Buffers, value: int) -> torch.Tensor:
    array: np.ndarray[Any, Any] = buffers.lease((8, 16), "float32")
    array[:] = value
    return torch.from_numpy(array)


@pytest.mark.long
def test_a_buffer_comes_back_only_when_nothing_sees_it_any_more():
    counters = Counters()
    buffers = Buffers(ARENA, counters)
    first = leased(buffers, 1)
    row, flat = first[3], first.view(-1)
    del first
    gc.collect()
    second = leased(buffers, 2)
    assert (row == 1).all()
    assert (flat == 1).all()
    assert counters.snapshot().buffers_allocated == 2
    address = row.untyped_storage().data_ptr()
    del row, flat
    gc.collect()
    third = leased(buffers, 3)
    assert third.untyped_storage().data_ptr() == address
    assert counters.snapshot().buffers_allocated == 2
    assert (second == 2).all()


def test_as_many_buffers_as_an_ordinary_loop_holds_are_made_first_and_no_more():
    counters = Counters()
    buffers = Buffers(ARENA, counters)
    for _ in range(9):
        buffers.lease((8, 16), "float32", usual=3)  # dropped at once
    assert counters.snapshot().buffers_allocated == 3
    held = [buffers.lease((8, 16), "float32", usual=3) for _ in range(4)]
    assert counters.snapshot().buffers_allocated == 4
    assert len({array.ctypes.data for array in held}) == 4


EXIT = """
import threading, weakref
from streamloader.engine.arena import Arena
from streamloader.engine.arena import Buffers
from streamloader.order.schedule import BlockRef
from streamloader.stats import Counters

class Watched:
    pass

begun, buffers = threading.Event(), Buffers(Arena(shared=False), Counters())
def lease():
    while True:
        buffers.lease((64,), "uint8"), buffers.allocate(1 << 20), begun.set()

watched = [Watched() for _ in range(200_000)]
for one in watched:
    weakref.finalize(one, int).atexit = False  # the exit iterates over all of them, and threads run meanwhile
weakref.finalize(watched[0], print, "ended")
threading.Thread(target=lease, daemon=True).start()
begun.wait()
"""


@pytest.mark.long
def test_leases_while_the_process_ends_do_not_keep_the_finalizers_of_others_from_running():
    done = run_python("-c", EXIT)
    assert (done.stdout, done.stderr) == ("ended\n", "")


EXIT_AND_END = """
import threading, weakref
from streamloader.storage.process import Finalizer

class Watched:
    pass

begun, watched = threading.Event(), [Watched() for _ in range(200_000)]
for one in watched:
    weakref.finalize(one, int).atexit = False
last = Watched(), Watched()
Finalizer(last[0], print, "ended")
Finalizer(last[1], print, "not ended").atexit = False
Finalizer(last[0], print, "ended first")
Finalizer(last[0], int, "no number")

def end():
    while True:
        Finalizer(Watched(), begun.set)

threading.Thread(target=end, daemon=True).start()
begun.wait()
"""


@pytest.mark.long
def test_objects_that_are_finalized_while_the_process_ends_keep_no_finalizers_from_running():
    done = run_python("-c", EXIT_AND_END)
    assert done.stdout == "ended first\nended\n"
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: invalid literal for int()") == 1


def test_buffers_of_another_size_or_dtype_are_not_mixed_up():
    buffers = Buffers(ARENA, Counters())
    for shape, dtype in (((4,), "float32"), ((2, 2), "float32"), ((4,), "int32"), ((3,), "bool"), ((0, 5), "uint8")):
        array = buffers.lease(shape, dtype)
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        del array
        assert buffers.lease(shape, dtype).dtype == np.dtype(dtype)


def test_a_view_of_a_view_keeps_the_lease():
    counters = Counters()
    buffers = Buffers(ARENA, counters)
    views = [buffers.lease((4, 3), "int64")[1:].T[:2] for _ in range(5)]
    for i, view in enumerate(views):
        view[:] = i
    assert [np.unique(view).tolist() for view in views] == [[i] for i in range(5)]
    assert counters.snapshot().buffers_allocated == 5
    del views[2], view
    buffers.lease((4, 3), "int64")
    assert counters.snapshot().buffers_allocated == 5


demands = st.builds(
    Demand,
    slots=st.integers(1, 500),
    slot_bytes=st.integers(0, 1 << 24),
    batch_bytes=st.integers(0, 1 << 26),
    request_bytes=st.integers(1, 1 << 24),
    blocks=st.integers(0, 2000),
    item_bytes=st.just(0),
    resident_bytes=st.integers(0, 1 << 28),
    index_bytes=st.integers(0, 1 << 28),
    scratch_bytes=st.integers(0, 1 << 23),
    pieces=st.integers(1, 100),
    most_threads=st.integers(1, MAX_THREADS),
    fills_batches=st.booleans(),
    kept_bytes=st.one_of(st.just(0), st.integers(0, 1 << 33)),
    uneven_bytes=st.integers(0, 1 << 30),
)


@given(demands, st.integers(0, 1 << 34))
def test_a_budget_never_spends_more_than_the_limit(demand, more):
    budget = allot(demand, demand.least_bytes + more)
    assert budget.bytes == demand.least_bytes + more
    assert budget.slots >= demand.slots
    assert 1 <= budget.threads <= min(MAX_THREADS, budget.slots * demand.pieces)
    others = demand.resident_bytes + demand.index_bytes + LIVE_BATCHES * demand.batch_bytes
    in_flight = budget.threads * (demand.thread_bytes - -(-demand.slot_bytes // demand.pieces))
    slots = budget.slots + budget.kept_slots
    blocks = demand.kept_bytes if budget.keeps else slots * demand.slot_bytes
    assert others + in_flight + blocks + demand.uneven_bytes * budget.keeps <= budget.bytes
    fixed = demand.kept_bytes if budget.keeps else slots * (demand.slot_bytes - demand.item_bytes)
    connections = budget.threads * demand.connection_bytes
    connections += budget.threads * demand.request_bytes // 2 if budget.kept_slots else 0
    assert budget.body_bytes + fixed + others + connections == budget.bytes


@settings(max_examples=examples(100))
@given(demands, st.data())
def test_what_is_too_little_names_the_least_that_works(demand, data):
    memory = data.draw(st.integers(0, demand.least_bytes - 1))
    with pytest.raises(MemoryBudgetError, match=rf"needs memory={demand.least_bytes} .*but memory={memory};") as caught:
        allot(demand, memory)
    assert f"give memory={demand.least_bytes} or more" in str(caught.value)
    assert allot(demand, demand.least_bytes).threads == 1


@given(demands, st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_more_memory_never_gives_less(demand, some, more):
    small = allot(demand, demand.least_bytes + some)
    large = allot(demand, demand.least_bytes + some + more)
    assert large.slots >= small.slots
    assert large.threads >= small.threads
    assert large.keeps >= small.keeps


def test_without_a_limit_ranks_share_the_machine():
    assert 4 * allowance(None, 4) <= machine_memory() * MACHINE_SHARE <= machine_memory()
    assert allowance(123, 4) == 123
    small = Demand(slots=4, slot_bytes=1000, batch_bytes=10, request_bytes=1000, blocks=100, pieces=1)
    assert allot(small, None).bytes == small.least_bytes + (MAX_THREADS - 1) * small.thread_bytes
    assert allot(small, None).threads == MAX_THREADS
    huge = Demand(slots=4, slot_bytes=machine_memory(), batch_bytes=10, request_bytes=1000, blocks=100, pieces=1)
    with pytest.raises(MemoryBudgetError, match="but the machine allows it"):
        allot(huge, None)


def test_what_each_field_needs_is_computed_a_few_times_however_many_fields_there_are(tmp_path, monkeypatch):
    calls, demand = [], Rows.demand
    monkeypatch.setattr(Rows, "demand", staticmethod(lambda *given: calls.append(1) or demand(*given)))
    fields = {f"f{number}": "float32" for number in range(40)}
    with sl.Writer(tmp_path / "d", fields) as writer:
        for _ in range(64):
            writer.write(dict.fromkeys(fields, 0.0))
    dataset = sl.NumpyDataset(tmp_path / "d", batch_size=8, shuffle=False, num_workers=0)
    next(iter(dataset))
    dataset.close()
    assert len(fields) <= len(calls) <= 4 * len(fields), "not for each set of fields that memory may hold"
