"""A small HTTP server that behaves badly on demand: it answers ranged GETs of one object, S3 or plain HTTP.

with faulty_server(b"...") as server:
    server.faults += ["503", "truncate"]     # the next two GETs fail so, all later ones succeed
    server.endpoint, server.gets
"""

from __future__ import annotations

import contextlib
import re
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"

EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
GARBAGE = {
    "garbled": b"HTTZ/1.1 2x6 ??\r\n\r\n",
    "long-header": b"HTTP/1.1 206 Partial Content\r\nX-A: " + b"a" * 700_000 + b"\r\nContent-Length: 0\r\n\r\n",
    "many-headers": b"HTTP/1.1 206 Partial Content\r\n"
    + b"".join(b"X-%d: a\r\n" % number for number in range(500))
    + b"Content-Length: 0\r\n\r\n",
}


class FaultyServer(ThreadingHTTPServer):
    """`faults` are used up one for each GET: a status such as "503", one of `GARBAGE`, "truncate", "trickle" (a byte of
    the body a second), "trickle-status" (of the status line), "stall", "close",
    "ignore-range", "wrong-range", "expired" (credentials).

    With `token` only requests that carry this session token succeed, also HEAD.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, content: bytes, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "https" if tls else "http"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.content = content
        self.faults: deque[str] = deque()
        self.gets = self.connections = 0
        self.token = ""
        self.released = threading.Event()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    @property
    def endpoint(self) -> str:
        """Return the server's URL."""
        return f"{self.scheme}://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer
    trickle = False

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # a client that does not trust us hangs up
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        if not self.server.token:
            self._answer(501, b"")
            return
        expired = self.server.token not in self.headers.get("X-Amz-Security-Token", "")
        self._answer(400 if expired else 200, self.server.content)

    def do_GET(self) -> None:
        self.server.gets += 1
        fault = self.server.faults.popleft() if self.server.faults else ""
        if fault == "expired" or self.server.token not in self.headers.get("X-Amz-Security-Token", ""):
            self._answer(400, EXPIRED)
        elif fault in GARBAGE:
            self.wfile.write(GARBAGE[fault])
            self.close_connection = True
        elif fault.isdigit():
            self._answer(int(fault), SLOW_DOWN if fault == "503" else b"")
        elif fault == "stall":
            self.server.released.wait()
            self.close_connection = True
        elif fault == "close":
            self.close_connection = True
        elif fault == "trickle-status":
            with contextlib.suppress(ConnectionError):
                for byte in b"HTTP/1.1 206 Partial Content\r\nX-A: " + b"a" * 99:
                    self.wfile.write(bytes([byte]))
                    if self.server.released.wait(0.5):
                        break
            self.close_connection = True
        else:
            self._content(fault)

    def _content(self, fault: str) -> None:
        content, wanted = self.server.content, re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        self.trickle = fault == "trickle"
        if not wanted or fault == "ignore-range":
            self._answer(200, content)
            return
        first = int(wanted[1]) if wanted[1] else max(0, len(content) - int(wanted[2]))
        stop = min(len(content), int(wanted[2]) + 1) if wanted[1] and wanted[2] else len(content)
        if first >= len(content):
            self._answer(416, b"")
            return
        sent = first - 1 if fault == "wrong-range" else first
        headers = {"Content-Range": f"bytes {sent}-{sent + stop - first - 1}/{len(content)}"}
        self._answer(206, content[sent : sent + stop - first], headers, truncate=fault == "truncate")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, truncate: bool = False) -> None:
        self.send_response(status)
        common = {"Content-Length": str(len(body)), "ETag": '"abc"', "Last-Modified": "Fri, 20 Nov 2026 12:00:00 GMT"}
        for name, value in {**common, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            for number in range(len(body) if self.trickle else 0):
                self.wfile.write(body[number : number + 1])
                if self.server.released.wait(1.0):
                    return
            self.wfile.write(body[: len(body) // 2] if truncate else body)
        self.close_connection = self.close_connection or truncate


@contextlib.contextmanager
def faulty_server(content: bytes, tls: ssl.SSLContext | None = None) -> Iterator[FaultyServer]:
    """Run the server in a thread until the block ends."""
    server = FaultyServer(content, tls)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
