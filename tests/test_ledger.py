"""The ledger of memory: blocks get their memory in their order; the budget is kept, or the need is an error."""

from concurrent.futures import Future

import numpy as np
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.engine.arena import Arena, Buffers
from streamloader.engine.budget import TOLERANCE_BYTES, Budget
from streamloader.engine.ledger import Ledger
from streamloader.errors import EngineError, MemoryBudgetError
from streamloader.options import MIB
from streamloader.stats import Counters

ARENA = Arena(shared=False)
MOST = 32 * MIB


def new_ledger() -> tuple[Ledger, Buffers]:
    bodies = Buffers(ARENA, Counters(), most=MOST)
    return Ledger(bodies, Budget(slots=8, threads=8, bytes=MOST, body_bytes=MOST, exact=True)), bodies


@settings(max_examples=examples(100))
@given(
    blocks=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    live=st.integers(1, 3),
)
def test_bodies_that_arrive_in_any_order_decode_within_the_budget(blocks, order, live):
    ledger, bodies = new_ledger()
    arrivals = [(ticket, size * MIB) for ticket, sizes in enumerate(blocks) for size in sizes]
    order.shuffle(arrivals)
    for ticket in range(len(blocks)):
        ledger.open(ticket, 0)
    granted: dict[int, list[Future[memoryview]]] = {ticket: [] for ticket in range(len(blocks))}
    for ticket, size in arrivals:
        granted[ticket].append(ledger.reserve(size, ticket, lambda: None))
        ledger.grant()
        done = [future for futures in granted.values() for future in futures if future.done()]
        assert sum(future.result().nbytes for future in done) <= MOST, "nobody waits, so nothing exceeds the memory"
        del done
    for ticket in range(len(blocks)):
        ledger.grant(awaited=ticket)
        assert all(future.done() for future in granted[ticket]), "a block that a batch waits for gets its memory"
        if any(future.exception() for future in granted[ticket]):
            assert any(isinstance(future.exception(), MemoryBudgetError) for future in granted[ticket])
            kept = sum(sum(blocks[earlier]) for earlier in range(max(0, ticket - live + 1), ticket + 1)) * MIB
            assert kept > MOST + TOLERANCE_BYTES, "an error is raised only for a need that is larger"
            return
        ledger.complete(ticket)
        ledger.use(ticket)
        if ticket >= live - 1:
            del granted[ticket - live + 1]
            ledger.close(ticket - live + 1)
    granted.clear()
    assert bodies.used == 0


@settings(max_examples=examples(100))
@given(st.permutations(range(6)))
def test_blocks_ahead_are_granted_in_their_order(tickets):
    ledger, _ = new_ledger()
    for ticket in range(6):
        ledger.open(ticket, 0)
    futures = {ticket: ledger.reserve(3 * MIB, ticket, lambda: None) for ticket in tickets}
    ledger.grant()
    done = [futures[ticket].done() for ticket in range(6)]
    assert done[0]
    assert done == sorted(done, reverse=True)


def test_what_blocks_ahead_hold_leaves_memory_for_the_oldest():
    ledger, _ = new_ledger()
    for ticket in range(3):
        ledger.open(ticket, 0)
    ahead = [ledger.reserve(size, 1 + number, lambda: None) for number, size in enumerate((TOLERANCE_BYTES, MIB))]
    ledger.grant()
    assert [future.done() for future in ahead] == [True, False]
    first = ledger.reserve(MOST - TOLERANCE_BYTES, 0, lambda: None)
    ledger.grant()
    assert first.done()
    assert not ahead[1].done()


def test_a_reservation_that_is_not_needed_any_more_ends_and_lets_others_on():
    ledger, bodies = new_ledger()
    ended = EngineError("the pass ended", "iterate again")
    for ticket in range(3):
        ledger.open(ticket, 0)
    first = ledger.reserve(MOST, 0, lambda: None)
    ledger.grant()
    stopped, last = ledger.reserve(MOST, 1, lambda: ended), ledger.reserve(MIB, 2, lambda: None)
    ledger.grant()
    assert stopped.exception() is ended
    assert not last.done()
    del first
    ledger.complete(0)
    ledger.use(0)
    ledger.close(0)
    assert last.done()
    assert bodies.used >= MIB


def test_expected_bytes_count_until_a_block_is_loaded_or_held():
    ledger, _ = new_ledger()
    ledger.open(0, MOST // 2)
    assert ledger.fits(MOST // 2, batches_grow=False)
    assert not ledger.fits(MOST // 2 + 1, batches_grow=False)
    assert not ledger.fits(TOLERANCE_BYTES, batches_grow=True), "a part of the memory is left for batches"
    ledger.hold(0, MOST // 4, expected=True)  # whose memory is allocated elsewhere
    assert ledger.fits(MOST // 2 + MOST // 4, batches_grow=False)
    ledger.complete(0)
    assert ledger.fits(MOST, batches_grow=False)
    ledger.use(0)
    assert ledger.needed == MOST // 4
    with pytest.raises(MemoryBudgetError, match=f"memory={MOST // 4 + 2 * MOST}"):
        ledger.check(2 * MOST)
    ledger.close(0)
    ledger.hold(0, 1)  # a late response to a block that is released
    assert ledger.needed == 0


def test_memory_is_writable():
    ledger, _ = new_ledger()
    ledger.open(0, 0)
    future = ledger.reserve(5, 0, lambda: None)
    ledger.grant()
    np.frombuffer(future.result(), np.uint8)[:] = 7
    assert bytes(future.result()) == b"\7" * 5


def test_memory_is_counted_before_the_thread_that_waits_for_it_continues():
    ledger, _ = new_ledger()
    ledger.open(0, 0)
    seen: list[tuple[int, bool]] = []
    future = ledger.reserve(MIB, 0, lambda: None, lambda memory: seen.append((len(memory or b""), future.done())))
    failed = ledger.reserve(MIB, 0, lambda: EngineError("closed"), lambda memory: seen.append((memory is None, False)))
    ledger.grant()
    assert seen == [(MIB, False), (True, False)]
    assert future.done() and isinstance(failed.exception(), EngineError)
