"""From `memory=` to slots and threads: the need is named exactly, and nothing is spent beyond the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamloader.engine.memory import (
    CONNECTION_BYTES,
    LIVE_BATCHES,
    MACHINE_SHARE,
    MAX_THREADS,
    Demand,
    allot,
    allowance,
    machine_memory,
)
from streamloader.errors import MemoryBudgetError

demands = st.builds(
    Demand,
    slots=st.integers(1, 500),
    slot_bytes=st.integers(0, 1 << 24),
    batch_bytes=st.integers(0, 1 << 26),
    request_bytes=st.integers(1, 1 << 24),
    blocks=st.integers(0, 2000),
    variable_bytes=st.just(0),
    resident_bytes=st.integers(0, 1 << 28),
    index_bytes=st.integers(0, 1 << 28),
)


@given(demands, st.integers(0, 1 << 34))
def test_a_budget_never_spends_more_than_the_limit(demand, more):
    budget = allot(demand, demand.least_bytes + more)
    assert budget.bytes == demand.least_bytes + more
    assert budget.slots >= demand.slots
    assert 1 <= budget.threads <= min(MAX_THREADS, budget.slots)
    others = demand.resident_bytes + demand.index_bytes + LIVE_BATCHES * demand.batch_bytes
    in_flight = budget.threads * (demand.thread_bytes - demand.slot_bytes)
    assert others + in_flight + budget.slots * demand.slot_bytes <= budget.bytes
    fixed = budget.slots * (demand.slot_bytes - demand.variable_bytes)
    connections = budget.threads * CONNECTION_BYTES
    assert budget.body_bytes + fixed + others + connections == budget.bytes


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


def test_without_a_limit_ranks_share_the_machine():
    assert 4 * allowance(None, 4) <= machine_memory() * MACHINE_SHARE <= machine_memory()
    assert allowance(123, 4) == 123
    small = Demand(slots=4, slot_bytes=1000, batch_bytes=10, request_bytes=1000, blocks=100)
    assert allot(small, None).bytes == small.least_bytes + (MAX_THREADS - 1) * small.thread_bytes
    assert allot(small, None).threads == MAX_THREADS
    huge = Demand(slots=4, slot_bytes=machine_memory(), batch_bytes=10, request_bytes=1000, blocks=100)
    with pytest.raises(MemoryBudgetError, match="but the machine allows it"):
        allot(huge, None)
