"""The fault proxy, asked by plain sockets: each kind of fault is exactly what it says, and a seed replays."""

import contextlib
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
from faulty import QuietHandler, certified, faulty_server, serving
from hypothesis import given
from hypothesis import strategies as st

from streamloader.errors import NotFoundError, ObjectExistsError, UsageError
from streamloader.storage import open_store
from streamloader.testing import Fault, FaultProxy
from streamloader.testing.proxy import GARBAGE, KINDS, SLICED_BYTES, Request, is_chosen

CONTENT = bytes(range(256)) * 64
START, STOP = 100, 5101
BODY = CONTENT[START:STOP]
SIZE = len(BODY)
CHUNKS = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


class Client:
    """One connection of a client that speaks HTTP by hand, until the end of the test."""

    opened: ClassVar = []

    def __init__(self, endpoint, context=None):
        host, port = endpoint.rpartition("/")[2].split(":")
        self.socket = socket.create_connection((host, int(port)), 60)
        if context:
            self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self.opened.append(self.socket)

    def send(self, method="GET", path="/bucket/x", headers=(), body=b"", part=(START, STOP)):
        lines = [f"{method} {path} HTTP/1.1", "Host: somewhere.example", *headers]
        lines += [f"Range: bytes={part[0]}-{part[1] - 1}"] if part else []
        lines += [f"Content-Length: {len(body)}"] if method in ("PUT", "POST") else []
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return self

    def head(self):
        """The status and the headers of the response, the latter with names in lower case."""
        data = b""
        while not data.endswith(b"\r\n\r\n"):
            byte = self.socket.recv(1)
            assert byte, f"the connection ended after {data}"
            data += byte
        first, *lines = data.decode().strip().split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    def body(self, size):
        data = b""
        while len(data) < size and (piece := self.socket.recv(size - len(data))):
            data += piece
        return data

    def response(self):
        status, headers = self.head()
        return status, headers, self.body(int(headers["content-length"]))

    def end(self, seconds=60.0):
        """What the connection is now: "closed", "reset", or "open", where nothing comes within some seconds."""
        self.socket.settimeout(seconds)
        try:
            data = self.socket.recv(1)
        except ConnectionResetError:
            return "reset"
        except TimeoutError:
            return "open"
        assert data == b""
        return "closed"


@pytest.fixture(autouse=True)
def _closed():
    yield
    while Client.opened:
        Client.opened.pop().close()


@pytest.fixture(scope="module")
def server():
    with faulty_server(CONTENT) as server:
        yield server


@pytest.fixture(scope="module")
def running(server):
    with FaultProxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(running):
    running.faults = []
    return running


@pytest.fixture
def ask(proxy):
    """Send a request that gets a fault; the next one on a new connection gets none."""

    def asked(kind, **options):
        request = {name: options.pop(name) for name in ("method", "path", "headers", "body", "part") if name in options}
        proxy.faults = [Fault(kind, first=None if kind == "brown-out" else 1, **options)]
        before = proxy.counts
        client = Client(proxy.endpoint).send(**request)
        client.counted = lambda: proxy.counts[kind] - before[kind]
        return client

    return asked


def assert_right(client):
    """The connection serves the next request, or a new one does."""
    assert client.send().response()[::2] == (206, BODY)


def test_what_gets_no_fault_passes_unchanged_on_one_connection(proxy, server):
    client, connections = Client(proxy.endpoint), server.connections
    for _ in range(3):
        status, headers, body = client.send().response()
        assert (status, body, headers["content-range"]) == (206, BODY, f"bytes {START}-{STOP - 1}/{len(CONTENT)}")
    assert client.send(part=None).response()[::2] == (200, CONTENT)
    assert client.send("HEAD").head()[0] == 501  # the status of the server behind
    assert server.connections == connections + 1


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        *(("301", 301, "PermanentRedirect"), ("307", 307, "TemporaryRedirect"), ("400", 400, "RequestTimeout")),
        *(("403", 403, "ExpiredToken"), ("404", 404, "NoSuchKey"), ("429", 429, "TooManyRequests")),
        *(("500", 500, "InternalError"), ("503", 503, "SlowDown"), ("503-retry-after", 503, "SlowDown")),
    ],
)
def test_an_error_is_an_error_document_and_leaves_the_connection_open(kind, status, code, ask, server):
    gets = server.gets
    client = ask(kind)
    found, headers, body = client.response()
    assert (found, re.search(rb"<Code>(\w+)</Code>", body)[1].decode(), server.gets) == (status, code, gets)
    assert headers.get("retry-after") == ("1" if kind == "503-retry-after" else None)
    assert headers.get("location") == (f"{server.endpoint}/bucket/x" if kind == "307" else None)
    assert client.counted() == 1
    assert_right(client)


def test_retry_after_and_location_are_those_of_the_fault(ask):
    assert ask("503-retry-after", seconds=7).response()[1]["retry-after"] == "7"
    assert ask("429", seconds=2.5).response()[1]["retry-after"] == "2.5"
    assert ask("307", location="http://127.0.0.1:1").response()[1]["location"] == "http://127.0.0.1:1/bucket/x"


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["delay", "stall"])
def test_a_late_response_comes_whole_after_its_time(kind, ask):
    begin = time.monotonic()
    client = ask(kind, seconds=0.5)
    assert client.end(0.3) == "open"
    client.socket.settimeout(60)
    assert client.response()[::2] == (206, BODY)
    assert time.monotonic() - begin >= 0.5
    assert_right(client)


def test_a_client_that_gives_up_ends_a_stall(ask, proxy):
    client = ask("stall", seconds=600)
    assert client.end(0.2) == "open"
    client.socket.close()
    proxy.stop()  # waits for what the connections do
    assert proxy.start() == proxy.endpoint


def test_a_trickling_body_comes_byte_by_byte(ask):
    client = ask("trickle", bytes_per_second=20)
    assert client.head()[0] == 206
    begin, pieces = time.monotonic(), [client.socket.recv(100) for _ in range(10)]
    assert b"".join(pieces) == BODY[: len(b"".join(pieces))]
    assert time.monotonic() - begin >= 0.3
    assert len(b"".join(pieces)) < 100


def test_slices_are_packets_of_one_byte(server, tmp_path):
    context = certified(tmp_path, ["127.0.0.1"])
    assert context is not None
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    files = str(tmp_path / "ca.pem"), str(tmp_path / "key.pem")
    with FaultProxy(server.endpoint, [Fault("slices", first=1)], tls=files) as proxy:
        assert proxy.endpoint.startswith("https://")
        client = Client(proxy.endpoint, trusting).send()
        pieces = []  # over TLS, each packet is a record
        while not b"".join(pieces).endswith(BODY):
            pieces.append(client.socket.recv(1 << 16))
            assert pieces[-1]
        head = b"".join(pieces).index(b"\r\n\r\n") + 4
        assert {len(piece) for piece in pieces[: head + SLICED_BYTES - SLICED_BYTES // 2]} == {1}
        assert_right(client)


def test_a_reset_comes_before_the_request_reaches_the_server(ask, server):
    gets = server.gets
    client = ask("reset")
    assert (client.end(), server.gets) == ("reset", gets)


def test_a_lost_response_is_one_to_a_request_that_was_executed(ask, server):
    gets = server.gets
    client = ask("lost")
    assert (client.end(), server.gets) == ("closed", gets + 1)


@pytest.mark.parametrize(("kind", "end"), [("reset-body", "reset"), ("half-open", "open"), ("truncate", "closed")])
def test_half_of_a_body_comes_and_then(kind, end, ask):
    client = ask(kind)
    status, headers = client.head()
    assert (status, headers["content-length"]) == (206, str(SIZE))
    assert client.body(SIZE // 2) == BODY[: SIZE // 2]
    assert client.end(0.5 if end == "open" else 60) == end


def test_a_short_body_has_the_length_that_its_head_says(ask):
    client = ask("short")
    assert client.response()[::2] == (206, BODY[: SIZE // 2])
    assert_right(client)


def test_one_bit_is_flipped(ask):
    body = ask("flip").response()[2]
    changed = [(a, b) for a, b in zip(BODY, body, strict=True) if a != b]
    assert [(a ^ b).bit_count() for a, b in changed] == [1]


def test_a_wrong_range_says_which_one_it_is(ask):
    status, headers, body = ask("wrong-range").response()
    assert (status, body) == (206, BODY[1:] + b"\0")
    assert headers["content-range"].startswith(f"bytes {START + 1}-{STOP}/")


def test_the_whole_object_comes_for_a_range_unless_the_signature_covers_it(ask):
    status, headers, body = ask("200").response()
    assert (status, body, "content-range" in headers) == (200, CONTENT, False)
    signed = ["Authorization: AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host;range, Signature=b"]
    assert ask("200", headers=signed).response()[::2] == (200, BODY)


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_sent_as_it_stands(kind, ask):
    client = ask(kind)
    assert client.body(len(GARBAGE[kind])) == GARBAGE[kind]
    assert client.end() == "closed"


def test_responses_share_the_bandwidth(proxy):
    proxy.faults = [Fault("bandwidth", bytes_per_second=4 * SIZE)]
    begin = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        bodies = list(threads.map(lambda _: Client(proxy.endpoint).send().response()[2], range(4)))
    assert bodies == [BODY] * 4
    assert 0.9 <= time.monotonic() - begin < 10


def test_in_a_brown_out_requests_are_slow_or_fail_for_its_time_only(proxy):
    proxy.faults = [Fault("brown-out", rate=1.0, seconds=0.2)]
    found = Counter(Client(proxy.endpoint).send().response()[0] for _ in range(20))
    assert set(found) == {206, 503}
    proxy.faults = [Fault("brown-out", rate=0.5, seconds=0.05)]
    begin, seen = time.monotonic(), []
    while time.monotonic() < begin + 3 and not {True, False} <= set(seen):
        before = proxy.counts["brown-out"]
        Client(proxy.endpoint).send().response()
        seen.append(proxy.counts["brown-out"] > before)
    assert {True, False} <= set(seen)


def test_all_kinds_are_tried_here():
    text = Path(__file__).read_text()
    assert not [kind for kind in KINDS if f'"{kind}"' not in text and kind not in GARBAGE]


def test_a_response_that_a_fault_cannot_change_passes_and_is_not_counted(ask):
    client = ask("flip", method="HEAD")
    assert (client.head()[0], client.counted()) == (501, 0)
    client = ask("wrong-range", part=None)
    assert (client.response()[2], client.counted()) == (CONTENT, 0)


@pytest.mark.parametrize("kind", [None, "flip"])
def test_bodies_in_chunks_and_without_a_length_pass(kind):
    class Handler(QuietHandler):
        def do_GET(self):
            self.send_response(200)
            if self.path == "/chunks":
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(CHUNKS)
            else:
                self.close_connection = True
                self.end_headers()
                self.wfile.write(b"to the end")

    with serving(Handler) as server, FaultProxy(server.endpoint, [Fault(kind)] if kind else []) as proxy:
        client = Client(proxy.endpoint).send(path="/chunks", part=None)
        status, headers = client.head()
        if kind:
            assert (status, headers["content-length"], "transfer-encoding" in headers) == (200, "5", False)
            assert sum((a ^ b).bit_count() for a, b in zip(b"abcde", client.body(5), strict=True)) == 1
        else:
            assert client.body(len(CHUNKS)) == CHUNKS
        client.send(path="/end", part=None).head()
        assert client.body(100) == b"to the end"
        assert client.end() == "closed"


def test_a_server_that_is_down_refuses_and_resets_until_it_is_up_at_the_same_port(proxy):
    client = Client(proxy.endpoint)
    assert_right(client)
    proxy.stop()
    assert client.end() == "reset"
    with pytest.raises(ConnectionRefusedError):
        Client(proxy.endpoint)
    assert proxy.start() == proxy.endpoint
    assert_right(Client(proxy.endpoint))


def test_a_fault_hits_only_the_paths_methods_headers_and_repeats_that_it_names(proxy):
    proxy.faults = [Fault("503", path=r"/c/\d", method="GET|PUT", header="If-Match", first=2)]
    cases = [
        ("GET", "/b/c/1", ["If-Match: a"], 503),
        ("GET", "/b/c/x", ["If-Match: a"], 206),
        ("POST", "/b/c/1", ["If-Match: a"], 501),
        ("GET", "/b/c/1", [], 206),
        ("GET", "/b/c/1", ["if-match: a"], 503),
        ("GET", "/b/c/1", ["If-Match: a"], 206),
        ("GET", "/b/c/2?c=/c/1", ["If-Match: a"], 503),
    ]
    for method, path, headers, status in cases:
        client = Client(proxy.endpoint).send(method, path, headers)
        assert client.head()[0] == status, (method, path, headers)


def test_a_fault_that_has_hit_as_often_as_it_may_leaves_requests_to_the_next_one(proxy):
    proxy.faults = [Fault("503", path="/b/", times=2), Fault("500", path="/b/", times=1)]
    found = [Client(proxy.endpoint).send(path=f"/{path}").response()[0] for path in ("b/1", "c/1", "b/2", "b/1", "b/3")]
    assert found == [503, 206, 503, 500, 206]


@given(st.integers(0, 2**63), st.sampled_from(sorted(set(KINDS) - {"brown-out"})), st.floats(0, 1), st.integers(0, 9))
def test_the_choice_is_a_pure_function_and_a_higher_rate_only_adds_requests(seed, kind, rate, number):
    request = Request("GET", "/b/x?a=1", {"range": "bytes=0-9"}, b"")
    low, high = Fault(kind, rate=rate / 2), Fault(kind, rate=rate)
    assert is_chosen(high, seed, request, number) == is_chosen(high, seed, request, number)
    assert is_chosen(low, seed, request, number) <= is_chosen(high, seed, request, number)
    other = request._replace(target="/b/x?a=2", headers={"range": "bytes=0-9", "date": "today"})
    assert is_chosen(high, seed, request, number) == is_chosen(high, seed, other, number)
    assert not is_chosen(Fault(kind, first=1), seed, request, number) or number == 0


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_a_rate_is_the_share_of_requests(rate):
    requests = [Request("GET", f"/b/{i}", {"range": f"bytes={i}-"}, b"") for i in range(20_000)]
    count = sum(is_chosen(Fault("503", rate=rate), 1, request, 0) for request in requests)
    assert abs(count / len(requests) - rate) < 4 * (rate / len(requests)) ** 0.5


@pytest.mark.long
def test_a_seed_replays_the_same_faults_in_any_order_of_requests_in_a_thread_and_a_process(server):
    def run(seed, process, paths):
        with FaultProxy(
            server.endpoint, [Fault("500", rate=0.3), Fault("503", rate=0.3)], seed=seed, process=process
        ) as it:
            client = Client(it.endpoint)
            found = {path: [client.send(path=path).response()[0] for _ in range(3)] for path in paths}
            assert it.counts["requests"] == 3 * len(paths)
            return found

    paths = [f"/b/{i}" for i in range(30)]
    first = run(1, False, paths)
    assert first == run(1, True, paths[::-1]) != run(2, False, paths)
    assert {status for found in first.values() for status in found} == {206, 500, 503}


def test_signed_requests_pass_to_a_server_that_checks_signatures_and_bodies_are_streamed(seaweedfs):
    url, body = seaweedfs.url("proxied"), zlib.compress(CONTENT) * 50_000
    with FaultProxy(seaweedfs.endpoint, process=True) as proxy:
        store = open_store(url, {**seaweedfs.storage_options, "endpoint_url": proxy.endpoint})
        store.put("a", body)
        assert bytes(store.read("a", 5, len(body))) == body[5:]
        assert [entry.path for entry in store.list()] == ["a"]
        store.create("b", b"1")
        store.replace("b", b"2", b"1")
        store.delete(["a"])
        with pytest.raises(NotFoundError):
            store.get("a")
        client = seaweedfs.client()
        client.meta.config.s3["addressing_style"] = "path"
        assert proxy.counts["requests"] >= 8
        client.close()


def test_a_lost_response_of_a_put_leaves_the_object_there(seaweedfs):
    url = seaweedfs.url("lost")
    with FaultProxy(seaweedfs.endpoint, [Fault("lost", method="PUT", first=1)]) as proxy:
        options = {**seaweedfs.storage_options, "endpoint_url": proxy.endpoint, "retry": {"base_seconds": 0.01}}
        store = open_store(url, options)
        store.create("a", b"1")
        assert proxy.counts["lost"] == 1
    assert open_store(url, seaweedfs.storage_options).get("a") == b"1"


def test_a_response_with_fewer_bytes_than_its_range_is_incomplete_and_repeated_until_it_is_whole(seaweedfs):
    url = seaweedfs.url("short")
    open_store(url, seaweedfs.storage_options).create("a", bytes(range(100)))
    with FaultProxy(seaweedfs.endpoint, [Fault("short", method="GET", times=5)]) as proxy:
        options = {**seaweedfs.storage_options, "endpoint_url": proxy.endpoint, "retry": {"base_seconds": 0.01}}
        store = open_store(url, options)
        store.retries.reached = True
        assert bytes(store.retries.call(lambda: store.reader().read("a", 10, 60))) == bytes(range(10, 60))
        assert (proxy.counts["short"], proxy.counts["requests"]) == (5, 6)


def test_a_damaged_response_is_no_change_by_another_writer(seaweedfs):
    url = seaweedfs.url("replaced")
    open_store(url, seaweedfs.storage_options).create("a", b"before")
    with FaultProxy(seaweedfs.endpoint, [Fault("flip", method="GET", times=2)]) as proxy:
        store = open_store(url, {**seaweedfs.storage_options, "endpoint_url": proxy.endpoint})
        store.replace("a", b"after", b"before")
        assert proxy.counts["flip"] == 2
        assert store.get("a") == b"after"
        with pytest.raises(ObjectExistsError, match="was changed by another writer"):
            store.replace("a", b"more", b"before")


def test_the_command_prints_its_endpoint_and_at_the_end_its_counters(server):
    command = [sys.executable, "-m", "streamloader.testing.proxy", "--behind", server.endpoint, "--seed", "3"]
    command += ["--fault", "503:1,path=/never/", "--fault", "404:1.0,first=1,method=GET"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        client = Client(process.stdout.readline().strip())
        assert [client.send().response()[0] for _ in range(2)] == [404, 206]
        process.send_signal(signal.SIGTERM)
        assert json.loads(process.stdout.readline()) == {"requests": 2, "404": 1}
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("stal", "no fault 'stal'"),
        ("stall:2", "rate of 0 to 1"),
        ("stall:x", "cannot be read"),
        ("stall,path=(", "no regular expression"),
        ("stall,speed=1", "cannot be read"),
        *(("stall,first=0", "give at least 1"), ("stall,times=0", "give at least 1")),
        ("trickle,bytes_per_second=0", "bytes_per_second above 0"),
    ],
)
def test_a_fault_that_cannot_be_is_an_error_that_says_why(text, shown):
    with pytest.raises(UsageError, match=shown):
        Fault.parse(text)


@pytest.mark.parametrize("process", [False, True])
def test_a_proxy_that_cannot_run_is_an_error(process, proxy):
    with pytest.raises(UsageError, match="is no endpoint"), FaultProxy("127.0.0.1:1", process=process):
        pass
    port = int(proxy.endpoint.rpartition(":")[2])
    with contextlib.ExitStack() as stack, pytest.raises((OSError, UsageError), match="address"):
        stack.enter_context(FaultProxy("http://127.0.0.1:1", process=process, port=port))
    with pytest.raises(UsageError, match="does not run"):
        FaultProxy("http://127.0.0.1:1").stop()


def test_a_server_that_is_not_there_is_a_reset(tmp_path):
    with FaultProxy("http://127.0.0.1:1") as proxy:
        client = Client(proxy.endpoint).send()
        assert client.end() == "reset"


def test_the_page_lists_every_kind_as_the_module_does():
    page = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()
    assert dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", page, re.M)).items() >= KINDS.items()
