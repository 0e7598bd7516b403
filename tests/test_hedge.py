"""Late requests are sent again: by a rule about time, within a budget, and against real servers that stall."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from datasets import numbers
from folder_server import FolderServer, folder_server
from hypothesis import given
from hypothesis import strategies as st

from streamloader.engine import budget
from streamloader.engine.hedge import LEAST_SAMPLES, LEAST_SECONDS, MARGIN, REQUESTS_A_HEDGE, Hedging
from streamloader.errors import EngineError
from streamloader.options import RetryPolicy, Shuffle
from streamloader.torch_dataset import StreamingDataset

FIELDS = ["x", "name", "label"]
COUNT = 6000  # about 500 blocks of two streamed fields
STALL_SECONDS = 12.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hedge") / "data"
    datasets.write(path, COUNT, FIELDS)
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[FolderServer]:
    with folder_server(folder) as server:
        yield server
    for thread in threading.enumerate():
        if thread.name.startswith("streamloader"):
            thread.join(20)
            assert not thread.is_alive()


def read(ds: StreamingDataset) -> float:
    """Read an epoch, assert that it is right and whole, return its seconds."""
    begin, seen = time.monotonic(), []
    for batch in ds:
        datasets.check_batch(batch, FIELDS)
        seen += numbers(batch)
    assert sorted(seen) == list(range(COUNT))
    return time.monotonic() - begin


@given(st.floats(0, 0.5), st.floats(1e6, 1e9), st.integers(0, 1000), st.data())
def test_only_what_takes_much_longer_than_usual_for_its_size_is_late(
    first_byte: float, rate: float, more: int, data: st.DataObject
) -> None:
    hedging = Hedging()
    sizes = data.draw(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=20))
    for i in range(LEAST_SAMPLES + more):
        if i < LEAST_SAMPLES:
            assert hedging.deadline(1 << 20) == float("inf")
        size = sizes[i % len(sizes)]
        hedging.came(size, first_byte + size / rate)
    for size in sizes:  # whatever the store's first byte and rate are, the usual is not late
        if len(set(sizes)) == 1:
            usual = first_byte + size / rate
            assert hedging.deadline(size) == pytest.approx(max(LEAST_SECONDS, MARGIN * usual))
        assert LEAST_SECONDS <= hedging.deadline(size) < float("inf")


def test_what_stalls_now_and_then_does_not_move_the_deadline() -> None:
    hedging = Hedging()
    for i in range(2000):
        hedging.came(1 << 22, 30.0 if i % 30 == 0 else 0.4)
    assert hedging.deadline(1 << 22) == pytest.approx(MARGIN * 0.4)
    for _ in range(1000):  # a store that became slow is learned
        hedging.came(1 << 22, 1.0)
    assert hedging.deadline(1 << 22) == pytest.approx(MARGIN)


@given(st.lists(st.booleans(), max_size=600))
def test_thirty_requests_earn_one_hedge_whatever_is_asked(asks: list[bool]) -> None:
    hedging, came, sent = Hedging(), 0, 0
    for ask in asks:
        if ask:
            sent += hedging.withdraw()
        else:
            hedging.came(1000, 0.1)
            came += 1
        assert sent <= came / REQUESTS_A_HEDGE + 1e-6


def test_one_stalled_request_in_fifty_does_not_show(server: FolderServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_THREADS", 64)  # each request that stalls keeps a thread
    server.behave, server.every, server.seconds = "stall", 50, STALL_SECONDS
    ds = StreamingDataset(server.url, batch_size=100, with_index=True)
    assert read(ds) < STALL_SECONDS / 2
    stats = ds.stats()
    assert stats.hedges >= 5
    assert stats.hedges <= stats.requests / REQUESTS_A_HEDGE
    assert stats.retries == 0
    assert stats.requests == server.gets


def test_when_everything_becomes_slow_the_load_stays(server: FolderServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_THREADS", 64)
    ds = StreamingDataset(server.url, batch_size=100, with_index=True, fields=["x", "label"])
    batches = iter(ds)
    seen = [i for _ in range(10) for i in numbers(next(batches))]
    server.delay = 1.2 * LEAST_SECONDS
    seen += [i for batch in batches for i in numbers(batch)]
    assert sorted(seen) == list(range(COUNT))
    stats = ds.stats()
    assert stats.requests == server.gets
    assert stats.hedges <= stats.requests / REQUESTS_A_HEDGE


def test_stalls_that_are_usual_or_beyond_the_budget_are_waited_out(server: FolderServer) -> None:
    server.behave, server.every, server.seconds = "stall", 8, 1.2 * LEAST_SECONDS
    ds = StreamingDataset(server.url, batch_size=100, with_index=True)
    read(ds)
    stats = ds.stats()
    assert stats.hedges <= stats.requests / REQUESTS_A_HEDGE
    assert stats.requests == server.gets


def test_a_store_that_throttles_gets_no_second_requests(server: FolderServer) -> None:
    options = {"retry": RetryPolicy(base_seconds=0.01, cap_seconds=0.05)}
    server.delay = 0.1  # not all is there before the store throttles
    ds = StreamingDataset(server.url, batch_size=100, with_index=True, fields=["x", "label"], storage_options=options)
    batches = iter(ds)
    seen = [i for _ in range(2) for i in numbers(next(batches))]
    assert ds.stats().hedges == 0
    server.behave, server.every = "503", 5
    while not server.met.is_set():
        seen += numbers(next(batches))
    server.stall_every, server.seconds = 49, 1.2 * LEAST_SECONDS
    seen += [i for batch in batches for i in numbers(batch)]
    assert sorted(seen) == list(range(COUNT))
    assert ds.stats().retries > 10
    assert ds.stats().hedges == 0


def test_a_damaged_body_is_fetched_again_and_counted(server: FolderServer) -> None:
    server.behave, server.every, server.times = "damage", 7, 2  # twice: three in a row would be damage at rest
    ds = StreamingDataset(server.url, batch_size=100, with_index=True)
    read(ds)
    assert ds.stats().retries == 2
    assert server.times == 0


def test_the_pieces_of_a_block_are_fetched_side_by_side(server: FolderServer) -> None:
    server.delay = 0.02
    fields = ["x", "name"]
    whole = Shuffle(block=COUNT)
    ds = StreamingDataset(server.url, batch_size=100, with_index=True, fields=fields, shuffle=whole)
    seen = []
    for batch in ds:
        datasets.check_batch(batch, fields)
        seen += numbers(batch)
    assert sorted(seen) == list(range(COUNT))
    assert server.most_at_once > 4


def test_a_request_that_stalls_for_good_holds_neither_the_pass_nor_the_memory_of_the_next(server: FolderServer) -> None:
    server.behave, server.every, server.times = "stall", 300, 1
    ds = StreamingDataset(server.url, batch_size=100, with_index=True)
    read(ds)
    assert server.times == 0
    assert ds.stats().hedges >= 1
    assert ds._session.here()._running is not None
    memory = ds._session.here()._running.memory
    read(ds)
    assert ds._session.here()._running.memory is memory
    server.released.set()
    ds.close()


@pytest.mark.parametrize("policy", [RetryPolicy(base_seconds=60, cap_seconds=60), RetryPolicy(probe_seconds=60)])
def test_threads_that_wait_to_try_again_end_with_the_pass(server: FolderServer, policy: RetryPolicy) -> None:
    server.behave, server.spare = "503", "/label/"
    ds = StreamingDataset(server.url, batch_size=100, storage_options={"retry": policy})

    def consume() -> None:
        with pytest.raises(EngineError, match="this pass was ended"):
            list(ds)

    consumer = threading.Thread(target=consume)
    consumer.start()
    while not ds.stats().retries:  # how many wait depends on how soon the first 503 lowers the pace
        server.released.wait(0.01)
    ds.close()
    for thread in [consumer, *threading.enumerate()]:
        if thread is consumer or thread.name.startswith("streamloader"):
            thread.join(5)
            assert not thread.is_alive()
