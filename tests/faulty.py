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

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class FaultyServer(ThreadingHTTPServer):
    """`faults` are used up one for each GET: a status such as "503", "truncate", "stall", "close", "ignore-range"."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, content: bytes, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "https" if tls else "http"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.content = content
        self.faults: deque[str] = deque()
        self.gets = 0
        self.released = threading.Event()

    @property
    def endpoint(self) -> str:
        """Return the server's URL."""
        return f"{self.scheme}://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # a client that does not trust us hangs up
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self.server.gets += 1
        fault = self.server.faults.popleft() if self.server.faults else ""
        if fault.isdigit():
            self._answer(int(fault), SLOW_DOWN if fault == "503" else b"")
        elif fault == "stall":
            self.server.released.wait()
            self.close_connection = True
        elif fault == "close":
            self.close_connection = True
        else:
            self._content(fault)

    def _content(self, fault: str) -> None:
        content, wanted = self.server.content, re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted or fault == "ignore-range":
            self._answer(200, content)
            return
        first = int(wanted[1]) if wanted[1] else max(0, len(content) - int(wanted[2]))
        stop = min(len(content), int(wanted[2]) + 1) if wanted[1] and wanted[2] else len(content)
        if first >= len(content):
            self._answer(416, b"")
            return
        headers = {"Content-Range": f"bytes {first}-{stop - 1}/{len(content)}"}
        self._answer(206, content[first:stop], headers, truncate=fault == "truncate")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, truncate: bool = False) -> None:
        self.send_response(status)
        common = {"Content-Length": str(len(body)), "ETag": '"abc"', "Last-Modified": "Fri, 20 Nov 2026 12:00:00 GMT"}
        for name, value in {**common, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
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
