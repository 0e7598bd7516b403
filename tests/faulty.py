"""A small HTTP server that behaves badly on demand: it answers ranged GETs of one object, S3 or plain HTTP.

with faulty_server(b"...") as server:
    server.faults += ["503", "truncate"]     # the next two GETs fail so, all later ones succeed
    server.endpoint, server.gets
"""

import contextlib
import gzip
import re
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from streamloader.testing.proxy import GARBAGE

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"

EXPIRED_STATUS = 400  # AWS's; other servers send 403
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"

NO_RETRY = {"outage_seconds": 0.0, "request_seconds": 0.0}  # the option `retry`


class QuietHandler(BaseHTTPRequestHandler):
    """Handles requests without a log; with `trickle` a response is sent byte by byte, one in a second."""

    protocol_version = "HTTP/1.1"
    server: Any
    trickle = truncate = False

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def respond(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        common = {"Content-Length": str(len(body)), "ETag": '"abc"', "Last-Modified": "Fri, 20 Nov 2026 12:00:00 GMT"}
        for name, value in {**common, "Accept-Ranges": "bytes", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for number in range(len(body) if self.trickle else 0):
            self.wfile.write(body[number : number + 1])
            if self.server.released.wait(1.0):
                return
        self.wfile.write(body[: len(body) // 2] if self.truncate else body)
        self.close_connection |= self.truncate

    def passed(
        self, behind: str, body: bytes, headers: Mapping[str, str], command: str = "", path: str = ""
    ) -> tuple[int, bytes, dict[str, str]]:
        """Send this request to the server at `behind`, with these headers; return status, body and headers."""
        with contextlib.closing(HTTPConnection(behind.removeprefix("http://"))) as server:
            skip = {"skip_host": "host" in map(str.lower, headers), "skip_accept_encoding": True}
            server.putrequest(command or self.command, path or self.path, **skip)
            for name, value in headers.items():
                server.putheader(name, value)
            server.endheaders(body)
            response = server.getresponse()
            return response.status, response.read(), dict(response.headers)

    def respond_range(self, content: bytes, shift: int = 0) -> None:
        """Send what `Range` asks for, or what is `shift` bytes before that."""
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self.respond(200, content)
            return
        first = int(wanted[1]) if wanted[1] else max(0, len(content) - int(wanted[2]))
        stop = min(len(content), int(wanted[2]) + 1) if wanted[1] and wanted[2] else len(content)
        if first >= len(content):
            self.respond(416)
            return
        first, stop = first - shift, stop - shift
        self.respond(206, content[first:stop], {"Content-Range": f"bytes {first}-{stop - 1}/{len(content)}"})

    def respond_badly(self, fault: str, content: bytes) -> None:
        """Respond to a GET of some content with a fault (see `FaultyServer`), or rightly where that is empty."""
        half = len(content) // 2
        self.close_connection |= fault in (*GARBAGE, "stall", "close", "last", "trickle-status", "continue")
        self.trickle, self.truncate = fault == "trickle", fault == "truncate"
        if fault in GARBAGE:
            self.wfile.write(GARBAGE[fault])
        elif fault == "expired":
            self.respond(EXPIRED_STATUS, EXPIRED)
        elif fault.isdigit():
            self.respond(int(fault), SLOW_DOWN if fault == "503" else b"", self.server.error_headers)
        elif fault == "stall":
            self.server.released.wait()
        elif fault == "continue":
            while not self.server.released.is_set():
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
        elif fault == "trickle-status":
            for byte in b"HTTP/1.1 206 Partial Content\r\nX-A: " + b"a" * 99:
                self.wfile.write(bytes([byte]))
                if self.server.released.wait(0.5):
                    break
        elif fault == "ignore-range":
            self.respond(200, content)
        elif fault != "close":
            changes = {"damage": lambda: bytes(byte ^ 1 for byte in content), "short": lambda: content[:half]}
            changes |= {"zero": lambda: bytes(len(content)), "empty": bytes, "gzip": lambda: gzip.compress(content)}
            changes["flip"] = lambda: content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
            changes["shift"] = lambda: content[-1:] + content[:-1]
            self.respond_range(changes[fault]() if fault in changes else content, fault == "wrong-range")


class QuietServer(ThreadingHTTPServer):
    """A server whose clients may hang up; over TLS where `tls` is given.

    It counts connections; `closed` is set when one ends. A request that waits waits until the server is `released`.
    """

    request_queue_size = 128  # the loader connects with all its threads at once

    def __init__(
        self, handler: Callable[..., BaseHTTPRequestHandler], port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.server_port}"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.connections = 0
        self.error_headers: dict[str, str] = {}
        self.closed, self.released = threading.Event(), threading.Event()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed.set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Run the server in a thread until the block ends, and let no request wait any longer then."""
        with self:
            thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                yield self
            finally:
                self.released.set()
                self.shutdown()
                thread.join()


def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> AbstractContextManager[QuietServer]:
    """Run a server with this handler on a free port until the block ends."""
    return QuietServer(handler).running()


class FaultyServer(QuietServer):
    """`faults` are used up one for each GET.

    A fault is a status such as "503" (sent with `error_headers`), one of `GARBAGE`, "truncate", "trickle" (a byte of
    the body a second), "trickle-status" (of the status line), "continue" ("100 Continue" without end), "stall",
    "close", "last" (right, then the connection is closed unannounced), "ignore-range", "wrong-range" (with its header),
    "shift" (without), "damage" (of all bytes), "zero", "empty", "gzip", "flip" (of one in the middle: a digit of a
    number, an entry of a table), "short", "expired" (credentials).
    With `token` only requests that carry this session token succeed, also HEAD.
    """

    def __init__(self, content: bytes, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(_Handler, tls=tls)
        self.content = content
        self.faults: deque[str] = deque()
        self.gets = 0
        self.asked_at: list[float] = []  # when, by the monotonic clock
        self.token = ""


class _Handler(QuietHandler):
    server: FaultyServer

    @property
    def expired(self) -> bool:
        return self.server.token not in self.headers.get("X-Amz-Security-Token", "")

    def do_HEAD(self) -> None:
        self.respond((EXPIRED_STATUS if self.expired else 200) if self.server.token else 501, self.server.content)

    def do_GET(self) -> None:
        self.server.gets += 1
        self.server.asked_at.append(time.monotonic())
        fault = self.server.faults.popleft() if self.server.faults else ""
        self.respond_badly("expired" if self.expired else fault, self.server.content)


def certified(folder: Path, hosts: Iterable[str], days: tuple[float, float] = (-2, 1)) -> ssl.SSLContext:
    """Return a server's settings with a certificate of its own for these names and addresses, `ca.pem`."""
    now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test server")])
    first, last = (now + timedelta(days=number) for number in days)
    places = [x509.IPAddress(ip_address(one)) if one[0].isdigit() else x509.DNSName(one) for one in hosts]
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), first, last)
    signed = builder.add_extension(x509.SubjectAlternativeName(places), critical=False).sign(key, hashes.SHA256())
    coding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(signed.public_bytes(coding[0]))
    (folder / "key.pem").write_bytes(key.private_bytes(*coding))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    return context


def faulty_server(content: bytes, tls: ssl.SSLContext | None = None) -> AbstractContextManager[FaultyServer]:
    """Run the server in a thread until the block ends."""
    return FaultyServer(content, tls).running()
