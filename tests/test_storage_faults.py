"""Servers that misbehave, for real: what each plane makes of it, and how many requests it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from faulty import GARBAGE, FaultyServer, faulty_server

from streamloader.errors import NotFoundError, StorageError, ThrottledError, TransientError, UnsupportedError
from streamloader.storage import NO_RETRY, RangeReader, RetryPolicy, Store, open_store
from streamloader.storage.object_reader import open_object_reader

CONTENT = bytes(range(256)) * 64
# what comes slower than 1 MB/s for a second is late
QUICK = RetryPolicy(
    outage_seconds=3.0, base_seconds=0.01, probe_seconds=0.1, response_seconds=1.0, min_bytes_per_second=1e6
)

# an option that only s3fs serves: the data plane is then fsspec
BY_FSSPEC = {"config_kwargs": {"read_timeout": 0.5, "proxies": {}}}
PLAIN = {"config_kwargs": {"read_timeout": 0.5}}
PLANES = {
    "s3-http": PLAIN,
    "s3-obstore": PLAIN,
    "s3-fsspec": BY_FSSPEC,
    "http-obstore": {},
    "http-fsspec": {"encoded": False},
}


@pytest.fixture(scope="module")
def running() -> Iterator[FaultyServer]:
    with faulty_server(CONTENT) as server:
        yield server


@pytest.fixture
def server(running: FaultyServer) -> FaultyServer:
    running.faults.clear()
    running.gets = 0
    return running


@pytest.fixture(scope="module", params=PLANES)
def store(request: pytest.FixtureRequest, running: FaultyServer) -> Store:
    protocol = request.param.split("-")[0]
    if protocol == "http":
        return open_store(f"{running.endpoint}/bucket", PLANES[request.param], QUICK)
    options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": running.endpoint, **PLANES[request.param]}
    return open_store("s3://bucket", options, QUICK)


@pytest.fixture
def reader(store: Any, request: pytest.FixtureRequest) -> RangeReader:
    plane = request.node.callspec.params["store"]
    reader: RangeReader = store.reader()
    if plane == "s3-obstore":  # what serves S3 where a proxy stands before it
        reader = open_object_reader(store._connection.location)
    assert reader.kind == plane.split("-")[1], reader.reason
    return reader


@pytest.mark.parametrize("fault", ["503", "500", "520", "599", "429", "truncate", "close", *GARBAGE])
def test_one_fault_costs_exactly_one_extra_request(
    server: FaultyServer, store: Store, reader: RangeReader, fault: str
) -> None:
    server.faults.append(fault)
    data = store.retries.call(lambda: reader.read("x", 100, 5000))
    assert bytes(data) == CONTENT[100:5000]
    assert server.gets == 2


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("503", ThrottledError),
        ("429", ThrottledError),
        ("500", TransientError),
        ("truncate", TransientError),
        ("404", NotFoundError),
        ("ignore-range", UnsupportedError),
    ],
)
def test_a_reader_asks_once_and_tells_the_kind_of_failure(
    server: FaultyServer, reader: RangeReader, store: Store, fault: str, kind: type[StorageError]
) -> None:
    server.faults.append(fault)
    with pytest.raises(kind) as raised:
        reader.read("x", 100, 200)
    assert type(raised.value) is kind
    assert server.gets == 1
    assert "bucket/x" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("wrong-range", TransientError, "the server sent another range than was asked for"),
        ("ignore-range", UnsupportedError, "the server ignores ranges"),
    ],
)
def test_a_response_that_contradicts_its_request_is_asked_for_three_times(
    server: FaultyServer, store: Store, reader: RangeReader, fault: str, kind: type[StorageError], words: str
) -> None:
    server.faults.extend([fault] * 2)
    assert bytes(store.retries.call(lambda: reader.read("x", 100, 200))) == CONTENT[100:200]
    assert server.gets == 3
    server.faults.extend([fault] * 99)
    with pytest.raises(kind, match=words):
        store.retries.call(lambda: reader.read("x", 100, 200))
    assert server.gets == 6


def test_a_trickling_response_is_late_and_repeated_on_a_new_connection(
    server: FaultyServer, store: Store, reader: RangeReader
) -> None:
    store.retries.call(lambda: reader.read("x", 0, 10))  # a connection is there
    connections, begin = server.connections, time.monotonic()
    for fault in ("trickle", "trickle-status"):
        server.faults.append(fault)
        assert bytes(store.retries.call(lambda: reader.read("x", 100, 300))) == CONTENT[100:300]
    server.faults.append("trickle")
    assert store.get_tail("x", 200) == CONTENT[-200:]
    server.faults.append("trickle")
    assert store.get("x") == CONTENT
    assert time.monotonic() - begin < 15  # each would take at least 99 s
    assert server.connections > connections
    assert server.gets == 9


def test_a_lasting_fault_ends_with_its_kind_after_the_policy(
    server: FaultyServer, store: Store, reader: RangeReader
) -> None:
    server.faults.extend(["503"] * 999)
    with pytest.raises(ThrottledError, match=r"attempts in [34]\.\d s"):
        store.retries.call(lambda: reader.read("x", 0, 10))
    assert 2 < server.gets < 80


@pytest.mark.parametrize("options", [PLAIN, BY_FSSPEC], ids=["http", "fsspec"])
def test_a_stalled_answer_is_given_up_and_asked_for_again(server: FaultyServer, options: dict[str, Any]) -> None:
    store = open_store("s3://bucket", {"key": "k", "secret": "s", "endpoint_url": server.endpoint, **options})
    server.faults.append("stall")
    data = store.retries.call(lambda: store.reader().read("x", 0, 10))
    assert bytes(data) == CONTENT[:10]
    assert server.gets == 2


def test_the_control_plane_retries_by_the_same_policy(server: FaultyServer, store: Store) -> None:
    server.faults.extend(["503", "close"])
    assert store.get_range("x", 5, 9) == CONTENT[5:9]
    assert server.gets == 3
    assert store.get_tail("x", 7) == CONTENT[-7:]
    assert server.gets == 4
    server.faults.extend(["503"] * 999)
    with pytest.raises(ThrottledError, match=r"attempts in [34]\.\d s"):
        store.get("x")


def test_http_is_read_only_and_says_so(server: FaultyServer) -> None:
    store = open_store(f"{server.endpoint}/folder", None, NO_RETRY)
    assert store.get("x") == CONTENT
    head = store.head("x")
    assert head is not None
    assert (head.size, head.etag) == (len(CONTENT), "abc")
    for ask in (lambda: store.put("x", b""), lambda: store.create("x", b""), lambda: store.delete(["x"])):
        with pytest.raises(UnsupportedError, match="read only"):
            ask()
    server.faults.append("404")
    with pytest.raises(NotFoundError):
        store.get("x")


def test_http_head_of_a_failing_server_is_no_absence(server: FaultyServer) -> None:
    store = open_store(f"{server.endpoint}/folder", None, NO_RETRY)
    server.faults.append("404")
    assert store.head("x") is None
    server.faults.append("500")
    with pytest.raises(TransientError):
        store.head("x")
