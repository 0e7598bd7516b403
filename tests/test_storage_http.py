"""S3 over plain sockets: connections are used again, and proxies are passed."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from faulty import NO_RETRY, QuietHandler, certified, faulty_server, serving

from streamloader.errors import EndpointError, ThrottledError, UnsupportedError
from streamloader.storage import open_store
from streamloader.storage.s3_http import MAX_IDLE_SECONDS

CONTENT = bytes(range(256)) * 16
pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def server():
    with faulty_server(CONTENT) as server:
        yield server


def reader_of(server):
    return open_store("s3://bucket", {"endpoint_url": server.endpoint, "key": "k", "secret": "s"}).reader()


def test_one_thread_needs_one_connection(server):
    reader = reader_of(server)
    for start in range(0, 100, 10):
        assert bytes(reader.read("x", start, start + 10)) == CONTENT[start : start + 10]
    assert server.connections == 1


def test_a_connection_that_the_server_closed_while_idle_costs_no_request(server):
    reader = reader_of(server)
    server.faults.extend(["last"] * 3)
    for round_ in range(1, 4):
        assert bytes(reader.read("x", 0, 10)) == CONTENT[:10]
        assert server.closed.wait(300)
        server.closed.clear()
        assert server.connections == round_


@pytest.mark.parametrize(("header", "wait"), [("7", 7), ("0.5", 0.5), ("-3", 0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0)])
def test_the_wait_that_a_response_asks_for_is_in_its_error(server, header, wait):
    server.error_headers = {"Retry-After": header}
    server.faults.append("503")
    with pytest.raises(ThrottledError) as caught:
        reader_of(server).read("x", 0, 10)
    assert caught.value.retry_after == wait


def test_a_time_stands_in_for_an_etag_that_a_server_does_not_send():
    """By it a conversion knows that its source changed."""

    class Handler(QuietHandler):
        def do_HEAD(self):
            self.respond(200, b"data", {"ETag": "", "Last-Modified": next(times)})

        do_GET = do_HEAD

    times = iter(["Fri, 20 Nov 2026 12:00:00 GMT", "Fri, 20 Nov 2026 12:00:01 GMT"])
    with serving(Handler) as server:
        found = [open_store(f"{server.endpoint}/folder").head("x") for _ in range(2)]
    assert [info.size for info in found] == [4, 4]
    assert found[0].etag != found[1].etag


def test_a_connection_that_was_idle_for_long_is_not_used_again(server, monkeypatch):
    reader = reader_of(server)
    reader.read("x", 0, 10)
    (idle,) = reader.fetch.__self__._pool._idle
    assert idle.connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    later = time.monotonic() + MAX_IDLE_SECONDS
    monkeypatch.setattr("streamloader.storage.s3_http.time", SimpleNamespace(monotonic=lambda: later))
    assert bytes(reader.read("x", 0, 10)) == CONTENT[:10]
    assert server.connections == 2
    assert server.closed.wait(300)


def test_idle_connections_end_with_their_pool(server):
    reader = reader_of(server)
    reader.read("x", 0, 10)
    del reader
    assert server.closed.wait(300)


class Ending(QuietHandler):
    """Responds to a GET, and ends the connection."""

    def do_GET(self):
        self.respond(200, CONTENT, {"Connection": "close"})


def test_a_response_that_ends_its_connection_holds_no_socket_where_reading_it_fails():
    with serving(Ending) as server:
        pool = reader_of(server).fetch.__self__._pool
        with pytest.raises(KeyError), pool.request("GET", f"{server.endpoint}/x", {}) as response:
            raise KeyError
        assert response.isclosed()


class Proxy(QuietHandler):
    """Responds to a GET itself, and connects to `there` whatever host is asked for; `seen` are target and user."""

    there: tuple[str, int]
    seen: set[tuple[str, str]]

    def do_GET(self):
        self.seen.add((self.path, self.headers.get("Proxy-Authorization", "")))
        self.respond_range(CONTENT)

    def do_CONNECT(self):
        self.seen.add((self.path, self.headers.get("Proxy-Authorization", "")))
        self.send_response(200)
        self.end_headers()
        with socket.create_connection(self.there) as upstream:
            thread = threading.Thread(target=copy_bytes, args=(upstream, self.connection), daemon=True)
            thread.start()
            copy_bytes(self.connection, upstream)
            thread.join()
        self.close_connection = True


def copy_bytes(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.quick(2)
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("given", ["variable", "ALL_PROXY", "option"])
def test_s3_is_read_through_a_proxy(tmp_path, monkeypatch, scheme, given):
    tls = certified(tmp_path, ["127.0.0.1"]) if scheme == "https" else None
    with faulty_server(CONTENT, tls) as server, serving(Proxy) as proxy:
        Proxy.there, Proxy.seen = ("127.0.0.1", server.server_port), set()
        url = f"http://us%40er:pass@127.0.0.1:{proxy.server_port}"
        options = {"key": "k", "secret": "s", "endpoint_url": f"{scheme}://store.example:9000"}
        options["client_kwargs"] = {"verify": False}
        if given == "option":
            options["config_kwargs"] = {"proxies": {scheme: url}}
        else:
            monkeypatch.setenv(f"{scheme}_proxy" if given == "variable" else given, url)
        store = open_store("s3://bucket", options)
        assert bytes(store.reader().read("x", 5, 9)) == CONTENT[5:9]
        assert store.get("x") == CONTENT
        target = "http://store.example:9000/bucket/x" if scheme == "http" else "store.example:9000"
        assert Proxy.seen == {(target, "Basic dXNAZXI6cGFzcw==")}
        if given != "option":
            monkeypatch.setenv("NO_PROXY", "store.example")
            with pytest.raises(EndpointError):
                open_store("s3://bucket", {**options, "retry": NO_RETRY}).get("x")


def test_a_proxy_that_speaks_tls_is_an_error():
    options = {"key": "k", "secret": "s", "config_kwargs": {"proxies": {"https": "https://127.0.0.1:9"}}}
    with pytest.raises(UnsupportedError, match="proxy"):
        open_store("s3://bucket", options).get("x")
