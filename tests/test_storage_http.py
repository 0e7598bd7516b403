"""S3 over plain sockets: connections are used again, signatures too, and a proxy is left to those who know them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from faulty import faulty_server

from streamloader.errors import ForkError, ThrottledError, TransientError
from streamloader.storage import open_store
from streamloader.storage.http_pool import Pool
from streamloader.storage.http_reader import HttpReader
from streamloader.storage.location import parse_location
from streamloader.storage.s3 import S3Client, open_s3

CONTENT = bytes(range(256)) * 16


class Server(ThreadingHTTPServer):
    """Answers every ranged GET; counts connections; `last` closes the connection after the answer, unannounced."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        self.last = False
        self.wait = ""  # a 503 with this Retry-After
        self.closed = threading.Event()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed.set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.server.wait:
            self.send_response(503)
            self.send_header("Retry-After", self.server.wait)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start, stop = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = CONTENT[start : stop + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.server.last

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def endpoint(url: str) -> S3Client:
    return open_s3(parse_location("s3://bucket", {"endpoint_url": url, "key": "k", "secret": "s"}))


def reader_of(server: Server) -> HttpReader:
    return HttpReader(Pool(endpoint(f"http://127.0.0.1:{server.server_port}")), "", "s3://bucket", "the test wants it")


def test_one_thread_needs_one_connection(server: Server) -> None:
    reader = reader_of(server)
    for start in range(0, 1000, 10):
        assert bytes(reader.read("x", start, start + 10)) == CONTENT[start : start + 10]
    assert server.connections == 1


def test_a_connection_that_the_server_closed_while_idle_costs_no_request(server: Server) -> None:
    reader = reader_of(server)
    server.last = True
    for round_ in range(1, 4):
        assert bytes(reader.read("x", 0, 10)) == CONTENT[:10]
        assert server.closed.wait(20)
        server.closed.clear()
        assert server.connections == round_


@pytest.mark.parametrize(
    ("said", "wait"), [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0)]
)
def test_what_the_store_asks_to_wait_is_heard(server: Server, said: str, wait: float) -> None:
    server.wait = said
    with pytest.raises(ThrottledError) as caught:
        reader_of(server).read("x", 0, 10)
    assert caught.value.retry_after == wait


def test_a_body_that_breaks_off_is_no_body_and_its_connection_is_not_used_again() -> None:
    with faulty_server(CONTENT) as server:
        server.faults.append("truncate")
        pool = Pool(endpoint(server.endpoint))
        reader = HttpReader(pool, "", "s3://bucket", "the test wants it")
        with pytest.raises(TransientError):
            reader.read("x", 0, 1000)
        assert not pool._idle
        assert bytes(reader.read("x", 0, 1000)) == CONTENT[:1000]


def test_connections_of_another_process_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(server)
    reader.read("x", 0, 10)
    monkeypatch.setattr("streamloader.storage.http_pool.os.getpid", lambda: -1)
    with pytest.raises(ForkError, match="of another process"):
        reader.read("x", 0, 10)


def test_idle_connections_end_with_their_pool(server: Server) -> None:
    reader = reader_of(server)
    reader.read("x", 0, 10)
    del reader
    assert server.closed.wait(20)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
def test_s3_behind_a_proxy_is_left_to_obstore(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv(variable, f"http://127.0.0.1:{port}")
        options = {"key": "k", "secret": "s", "endpoint_url": "http://store.example:9000"}
        assert open_store("s3://bucket", options).reader().kind == "obstore"
        monkeypatch.setenv("NO_PROXY", "store.example")
        assert open_store("s3://bucket", options).reader().kind == "http"
