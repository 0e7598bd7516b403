"""Late requests are sent again: by a rule about time, within a budget, and against real servers that stall."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import pytest
from conversions import wait_for
from datasets import numbers
from folder_server import FolderServer, folder_server
from hypothesis import given
from hypothesis import strategies as st

from streamloader.engine import memory, pace
from streamloader.engine.pace import LEAST_SAMPLES, LEAST_SECONDS, MARGIN, REQUESTS_A_HEDGE, Hedging
from streamloader.options import Cache, RetryPolicy, Shuffle
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.storage import cache

pytestmark = pytest.mark.alone

FIELDS = ["x", "name", "label"]
COUNT = 6000  # about 500 blocks of two streamed fields
STALL_SECONDS = 12.0


@pytest.fixture(scope="module")
def folder(data: Any) -> Path:
    return Path(data(COUNT, *FIELDS))


@pytest.fixture
def server(folder: Path) -> Iterator[FolderServer]:
    with folder_server(folder) as server:
        yield server
    datasets.assert_threads_end()


def opened(server: FolderServer, **more: Any) -> StreamingDataset:
    return StreamingDataset(server.url, batch_size=100, with_index=True, **more)


def read(ds: StreamingDataset, change: Callable[[int], Any] = lambda _: None, fields: Sequence[str] = FIELDS) -> float:
    """Read an epoch, assert that it is right and whole, return its seconds; `change(number)` is called per batch."""
    begin, seen = time.monotonic(), []
    for number, batch in enumerate(ds):
        datasets.check_batch(batch, fields)
        seen += numbers(batch)
        change(number)
    assert sorted(seen) == list(range(COUNT))
    return time.monotonic() - begin


def assert_load_is_limited(ds: StreamingDataset, server: FolderServer) -> None:
    wait_for(lambda: ds.stats().requests == server.gets)  # a second request may not have arrived yet
    stats = ds.stats()
    assert stats.hedges <= stats.requests / REQUESTS_A_HEDGE


@given(st.floats(0, 0.5), st.floats(1e6, 1e9), st.integers(0, 1000), st.data())
def test_only_what_takes_much_longer_than_usual_for_its_size_is_late(first_byte, rate, more, data):
    hedging = Hedging()
    sizes = data.draw(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=20))
    for i in range(LEAST_SAMPLES + more):
        if i < LEAST_SAMPLES:
            assert hedging.deadline(1 << 20) == float("inf")
        size = sizes[i % len(sizes)]
        hedging.completed(size, first_byte + size / rate)
    for size in sizes:  # whatever the store's first byte and rate are, the usual is not late
        if len(set(sizes)) == 1:
            usual = first_byte + size / rate
            assert hedging.deadline(size) == pytest.approx(max(LEAST_SECONDS, MARGIN * usual))
        assert LEAST_SECONDS <= hedging.deadline(size) < float("inf")


def test_what_stalls_now_and_then_does_not_move_the_deadline():
    hedging = Hedging()
    for i in range(2000):
        hedging.completed(1 << 22, 30.0 if i % 30 == 0 else 0.4)
    assert hedging.deadline(1 << 22) == pytest.approx(MARGIN * 0.4)
    for _ in range(1000):  # a store that became slow is learned
        hedging.completed(1 << 22, 1.0)
    assert hedging.deadline(1 << 22) == pytest.approx(MARGIN)


@given(st.lists(st.booleans(), max_size=600))
def test_thirty_requests_earn_one_hedge_whatever_is_asked(asks):
    hedging, came, sent = Hedging(), 0, 0
    for ask in asks:
        if ask:
            sent += hedging.withdraw()
        else:
            hedging.completed(1000, 0.1)
            came += 1
        assert sent <= came / REQUESTS_A_HEDGE + 1e-6


def test_one_stalled_request_in_fifty_does_not_slow_the_run(server, monkeypatch):
    monkeypatch.setattr(memory, "MAX_THREADS", 64)  # each request that stalls keeps a thread
    server.behave, server.every, server.seconds = "stall", 50, STALL_SECONDS
    ds = opened(server)
    assert read(ds) < STALL_SECONDS / 2
    assert ds.stats().hedges >= 5
    assert ds.stats().retries == 0
    assert_load_is_limited(ds, server)


def test_a_disk_that_stalls_while_a_cache_stores_is_no_late_response(server, monkeypatch, tmp_path):
    store, calls = cache._store, count()

    def store_slowly(*given: Any) -> None:
        time.sleep(1.2 * LEAST_SECONDS if next(calls) % 20 == 0 else 0.0)
        store(*given)

    monkeypatch.setattr(cache, "_store", store_slowly)
    ds = opened(server, cache=Cache(tmp_path))
    read(ds)
    assert next(calls) > 2 * LEAST_SAMPLES
    assert ds.stats().hedges == 0


def test_when_everything_becomes_slow_the_load_stays(server, monkeypatch):
    monkeypatch.setattr(memory, "MAX_THREADS", 64)
    fields = ["x", "label"]
    ds = opened(server, fields=fields)

    def slow_down(number: int) -> None:
        server.delay = 1.2 * LEAST_SECONDS if number >= 9 else 0.0

    read(ds, slow_down, fields)
    assert_load_is_limited(ds, server)


def test_stalls_that_are_usual_or_beyond_the_budget_are_waited_out(server):
    server.behave, server.every, server.seconds = "stall", 8, 1.2 * LEAST_SECONDS
    ds = opened(server)
    read(ds)
    assert_load_is_limited(ds, server)


def test_a_store_that_throttles_gets_no_second_requests(server, monkeypatch):
    monkeypatch.setattr(pace, "DECREASE_SECONDS", 60.0)  # it throttles, even if this process stands still
    options = {"retry": RetryPolicy(base_seconds=0.01, cap_seconds=0.05)}
    server.behave, server.every = "503", 5
    server.stall_every, server.seconds = 49, 1.2 * LEAST_SECONDS
    fields = ["x", "label"]
    ds = opened(server, fields=fields, storage_options=options)
    read(ds, fields=fields)
    assert ds.stats().retries > 10
    assert ds.stats().hedges == 0


def test_a_damaged_body_is_fetched_again_and_counted(server):
    server.behave, server.every, server.times = "damage", 7, 2  # twice: three in a row would be damage at rest
    ds = opened(server)
    read(ds)
    assert ds.stats().retries == 2
    assert server.times == 0


def test_the_pieces_of_a_block_are_fetched_side_by_side(server):
    server.delay = 0.1
    fields = ["x", "name"]
    read(opened(server, fields=fields, shuffle=Shuffle(block=COUNT)), fields=fields)
    assert server.most_at_once > 4


def test_a_request_that_stalls_for_good_holds_neither_the_pass_nor_the_memory_of_the_next(server):
    server.behave, server.every, server.times = "stall", 300, 1
    ds = opened(server)
    read(ds)
    assert server.times == 0
    assert ds.stats().hedges >= 1
    assert ds._engine().core is not None
    arena = ds._engine().core.memory
    read(ds)
    assert ds._engine().core.memory is arena
    server.released.set()
    ds.close()
