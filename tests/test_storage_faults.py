"""Servers that misbehave, for real: what each plane makes of it, and how many requests it costs."""

import asyncio
import contextlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import fsspec
import pytest
from faulty import NO_RETRY, QuietHandler, faulty_server, serving
from fsspec.asyn import AsyncFileSystem
from servers import STORE_CALLS

from streamloader.errors import NotFoundError, StorageError, ThrottledError, TransientError, UnsupportedError
from streamloader.options import RetryPolicy
from streamloader.storage import open_store
from streamloader.testing.proxy import GARBAGE

CONTENT = bytes(range(256)) * 64
# what comes slower than 1 MB/s for a second is late
QUICK = RetryPolicy(
    outage_seconds=3.0, base_seconds=0.01, probe_seconds=0.1, response_seconds=1.0, min_bytes_per_second=1e6
)

# and with this one no response, if the process stands still for a while
PATIENT = replace(QUICK, outage_seconds=60.0, response_seconds=30.0)

PLANES = {
    "s3-http": {"key": "k", "secret": "s", "config_kwargs": {"read_timeout": 0.5}},
    "http-obstore": {},
    "http-fsspec": {"encoded": False},  # an option that obstore does not support
}


@pytest.fixture(scope="module")
def running():
    with faulty_server(CONTENT) as server:
        yield server


@pytest.fixture
def server(running):
    running.faults.clear()
    running.gets = 0
    running.asked_at.clear()
    return running


def opened(plane, endpoint, policy):
    protocol, kind = plane.split("-")
    url, more = ("s3://bucket", {"endpoint_url": endpoint}) if protocol == "s3" else (f"{endpoint}/bucket", {})
    store = open_store(url, {**PLANES[plane], **more, "retry": policy})
    assert store.reader().kind == kind, store.reader().reason
    return store


@pytest.fixture(scope="module", params=PLANES)
def store(request, running):
    return opened(request.param, running.endpoint, QUICK)


@pytest.fixture
def reader(store):
    return store.reader()


@pytest.fixture(params=PLANES)
def patient_store(request, running, patient, monkeypatch):
    monkeypatch.setitem(PLANES["s3-http"], "config_kwargs", {"read_timeout": 30.0})
    return opened(request.param, running.endpoint, PATIENT)


def assert_one_fault_costs_one_request(fault, server, store):
    server.faults.append(fault)
    data = store.retries.call(lambda: store.reader().read("x", 100, 5000))
    assert bytes(data) == CONTENT[100:5000]
    assert server.gets == 2


@pytest.mark.quick(11)
@pytest.mark.parametrize("fault", ["503", "500", "520", "599", "429", "204", "truncate", "close", *GARBAGE])
def test_one_fault_costs_exactly_one_extra_request(server, patient_store, fault):
    assert_one_fault_costs_one_request(fault, server, patient_store)


@pytest.mark.quick(1)
def test_a_response_that_stalls_costs_exactly_one_extra_request(server, store):
    assert_one_fault_costs_one_request("stall", server, store)


@pytest.mark.quick(12)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        *(("503", ThrottledError), ("429", ThrottledError), ("500", TransientError), ("truncate", TransientError)),
        *(("404", NotFoundError), ("ignore-range", UnsupportedError)),
    ],
)
def test_a_reader_asks_once_and_raises_the_kind_of_failure(server, patient_store, fault, kind):
    server.faults.append(fault)
    with pytest.raises(kind) as raised:
        patient_store.reader().read("x", 100, 200)
    assert type(raised.value) is kind
    assert server.gets == 1
    assert "bucket/x" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("wrong-range", TransientError, "the server sent another range than the requested one"),
        ("ignore-range", UnsupportedError, "the server ignores ranges"),
    ],
)
def test_a_response_that_contradicts_its_request_is_asked_for_three_times(server, patient_store, fault, kind, words):
    store, reader = patient_store, patient_store.reader()
    server.faults.extend([fault] * 2)
    assert bytes(store.retries.call(lambda: reader.read("x", 100, 200))) == CONTENT[100:200]
    assert server.gets == 3
    server.faults.extend([fault] * 99)
    with pytest.raises(kind, match=words):
        store.retries.call(lambda: reader.read("x", 100, 200))
    assert server.gets == 6


LISTING = (
    "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a</Key><Size>3</Size></Contents>"
    "</ListBucketResult>"
)
MALFORMED = [
    *(("head", "Content-Length: three"), ("head", "Server: a proxy")),
    *(("head", "Content-Length: 3\r\nLast-Modified: yesterday"), ("list", LISTING.replace("3", "three"))),
    *(("list", text) for text in ("", "<html>Sign in</html>", LISTING.replace("<Size>3</Size>", ""))),
]


@pytest.mark.quick(6)
@pytest.mark.parametrize(("ask", "text"), MALFORMED)
def test_a_malformed_response_of_s3_is_asked_for_three_times(ask, text):
    responses = []

    class Handler(QuietHandler):
        def do_GET(self):
            self.close_connection = True
            head, body = (responses.pop(), "") if ask == "head" else ("Server: a proxy", responses.pop())
            self.wfile.write(f"HTTP/1.1 200 OK\r\nConnection: close\r\n{head}\r\n\r\n{body}".encode())

        do_HEAD = do_GET

    with serving(Handler) as server:
        store = open_store(
            "s3://bucket", {"key": "k", "secret": "s", "endpoint_url": server.endpoint, "retry": PATIENT}
        )
        responses += [LISTING if ask == "list" else "Content-Length: 3", text, text]
        (info,) = [store.head("a")] if ask == "head" else list(store.list())
        assert (info.path, info.size) == ("a", 3)
        responses += [text] * 4
        with pytest.raises(TransientError, match="response is malformed"):
            STORE_CALLS[ask](store)
        assert len(responses) == 1


@pytest.mark.quick(10)
@pytest.mark.parametrize("size", [2**40, 2**62, 2**70])
@pytest.mark.parametrize("ask", ["get", "list", "head", "read", "get_tail"])
@pytest.mark.parametrize("plane", PLANES)
def test_a_content_length_beyond_reason_is_no_raw_memory_error(plane, ask, size):
    class Handler(QuietHandler):
        def do_GET(self):
            self.close_connection = True
            self.send_response(206 if self.headers.get("Range") else 200)
            self.send_header("Content-Length", size)
            self.end_headers()
            self.wfile.write(b"short")

        do_HEAD = do_GET

    with serving(Handler) as server:
        store = opened(plane, server.endpoint, RetryPolicy(**NO_RETRY))
        with pytest.raises(StorageError) if ask == "get" else contextlib.suppress(StorageError):
            STORE_CALLS[ask](store)


@pytest.mark.quick(1)
def test_a_trickling_response_is_late_and_repeated_on_a_new_connection(server, store, reader):
    store.retries.call(lambda: reader.read("x", 0, 10))  # a connection is there
    connections, begin = server.connections, time.monotonic()
    for fault in ("trickle", "trickle-status"):
        server.faults.append(fault)
        assert bytes(store.retries.call(lambda: reader.read("x", 100, 300))) == CONTENT[100:300]
    server.faults.append("trickle")
    assert store.get_tail("x", 200) == CONTENT[-200:]
    server.faults.append("trickle")
    assert store.get("x") == CONTENT
    assert time.monotonic() - begin < 60  # each would take at least 99 s
    assert server.connections > connections
    assert server.gets == 9


@pytest.mark.quick(1)
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("fault", ["stall", "trickle", "trickle-status", "continue"])
def test_a_read_that_is_much_later_than_usual_is_repeated_at_once(server, plane, fault):
    """The policy alone would wait for a minute; "100 Continue" without end would be waited for without end."""
    with patch.dict(PLANES["s3-http"], {"config_kwargs": {"read_timeout": 60.0}}):
        store = opened(plane, server.endpoint, replace(QUICK, response_seconds=60.0))
    for _ in range(9):
        assert bytes(store.reader().read("x", 0, 9)) == CONTENT[:9]
    server.faults.append(fault)
    begin = time.monotonic()
    repeats = []
    reader = replace(store.reader(), on_repeat=lambda: repeats.append(1))
    assert bytes(reader.read("x", 100, 5000)) == CONTENT[100:5000]
    assert time.monotonic() - begin < 30
    assert (server.gets, repeats) == (11, [1])


def test_a_late_read_of_the_object_of_a_reference_is_counted(server, tmp_path):
    (tmp_path / "refs.json").write_text(json.dumps({"a": [f"{server.endpoint}/bucket/x", 100, 5000]}))
    options = {"allow": server.endpoint, "remote_options": {}, "retry": replace(QUICK, response_seconds=60.0)}
    repeats = []
    store = open_store(f"reference://::{tmp_path}/refs.json", options)
    reader = replace(store.reader(), on_repeat=lambda: repeats.append(1))
    for _ in range(9):
        assert bytes(reader.read("a", 0, 9)) == CONTENT[100:109]
    server.faults.append("stall")
    assert bytes(reader.read("a", 0, 5000)) == CONTENT[100:5100]
    assert (server.gets, repeats) == (11, [1])


@pytest.mark.quick(1)
@pytest.mark.parametrize("plane", PLANES)
def test_a_large_response_that_trickles_is_late_long_before_its_deadline(server, plane):
    policy = replace(QUICK, outage_seconds=60.0, response_seconds=3.0, min_bytes_per_second=100.0)
    store = opened(plane, server.endpoint, policy)
    server.faults.append("trickle")
    begin = time.monotonic()
    assert bytes(store.retries.call(lambda: store.reader().read("x", 0, len(CONTENT)))) == CONTENT
    assert time.monotonic() - begin < 60  # 16 KB may take 167 s
    assert server.gets == 2


@pytest.mark.quick(1)
@pytest.mark.parametrize("fault", ["stall", "trickle", "trickle-status", "503", "close"])
def test_a_listing_over_http_is_retried_and_has_a_deadline(fault):
    page = (
        b'<a href="../">up</a> <a href="x">x</a> <a href="/folder/y">y</a> <a href="?C=N">Name</a> <a href="/z">z</a>'
    )
    with faulty_server(page) as server:
        store = open_store(f"{server.endpoint}/folder", {"retry": QUICK})
        assert store.get("x") == page  # the endpoint has responded once
        server.faults.append(fault)
        begin = time.monotonic()
        assert [info.path for info in store.list()] == ["x", "y"]
        assert time.monotonic() - begin < 60


class SilentFileSystem(AsyncFileSystem):
    """A client whose requests never end."""

    protocol = "silent"
    cachable = False

    async def _forever(self, *_, **__):
        await asyncio.Event().wait()

    _cat_file = _info = _find = _pipe_file = _rm_file = _forever


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("ask", "arguments"),
    [
        *(("get", ["x"]), ("head", ["x"]), ("get_range", ["x", 0, 9]), ("get_tail", ["x", 9]), ("list", [])),
        *(("put", ["x", b"1"]), ("create", ["x", b"1"]), ("replace", ["x", b"1", b"2"]), ("delete", [["x"]])),
    ],
)
def test_each_request_of_an_asynchronous_client_has_a_deadline(ask, arguments):
    fsspec.register_implementation("silent", SilentFileSystem, clobber=True)
    policy = RetryPolicy(outage_seconds=0, request_seconds=0, response_seconds=0.2, min_bytes_per_second=1e9)
    store = open_store("silent://bucket", {"retry": policy})
    begin = time.monotonic()
    with pytest.raises(TransientError):
        list(getattr(store, ask)(*arguments) or ())
    assert time.monotonic() - begin < 60


@pytest.mark.long
def test_a_lasting_fault_ends_with_its_kind_after_the_policy(server, store, reader):
    server.faults.extend(["503"] * 999)
    seconds, begun = [], []

    def ask(function):
        begun.append(time.monotonic())
        return function()

    with ThreadPoolExecutor(2) as pool:
        by_data_plane = pool.submit(ask, lambda: store.retries.call(lambda: reader.read("x", 0, 10)))
        by_control_plane = pool.submit(ask, lambda: store.get("x"))
        for future in (by_data_plane, by_control_plane):
            with pytest.raises(ThrottledError, match=r"attempts in \d+\.\d s") as raised:
                future.result(300)
            seconds.append(float(re.search(r"in (\d+\.\d) s", str(raised.value))[1]))
    assert 3.0 <= max(seconds) < 5.0  # of the one that began first
    assert 2 < server.gets < 160
    assert sum(at > max(begun) + 3.0 for at in server.asked_at) <= 2  # the last attempt of each


def test_http_is_read_only_and_objects_are_missing_only_where_the_server_responds_so(server):
    store = open_store(f"{server.endpoint}/folder", {"retry": NO_RETRY})
    assert store.get("x") == CONTENT
    head = store.head("x")
    assert (head.size, head.etag) == (len(CONTENT), "abc")
    for ask in (lambda: store.put("x", b""), lambda: store.create("x", b""), lambda: store.delete(["x"])):
        with pytest.raises(UnsupportedError, match="read only"):
            ask()
    server.faults.extend(["404", "404", "500"])
    with pytest.raises(NotFoundError):
        store.get("x")
    assert store.head("x") is None
    with pytest.raises(TransientError):
        store.head("x")
