"""A small HTTP server that behaves badly on demand: it answers ranged GETs of one object, S3 or plain HTTP.

with faulty_server(b"...") as server:
    server.faults += ["503", "truncate"]     # the next two GETs fail so, all later ones succeed
    server.endpoint, server.gets
"""

import contextlib
import re
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"

EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
GARBAGE = {
    "garbled": b"HTTZ/1.1 2x6 ??\r\n\r\n",
    "long-header": b"HTTP/1.1 206 Partial Content\r\nX-A: " + b"a" * 700_000 + b"\r\nContent-Length: 0\r\n\r\n",
    "many-headers": b"HTTP/1.1 206 Partial Content\r\n"
    + b"".join(b"X-%d: a\r\n" % number for number in range(500))
    + b"Content-Length: 0\r\n\r\n",
}


Server = TypeVar("Server", bound=ThreadingHTTPServer)


class QuietHandler(BaseHTTPRequestHandler):
    """Handles requests without a log."""

    server: Any

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Run a server in a thread until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> AbstractContextManager[ThreadingHTTPServer]:
    """Run a server with this handler on a free port until the block ends."""
    return running(ThreadingHTTPServer(("127.0.0.1", 0), handler))


class RangeServer(ThreadingHTTPServer):
    """Serves bytes by range until it is `released`; counts connections; `closed` is set when one ends."""

    request_queue_size = 128  # the loader connects with all its threads at once
    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: "type[RangeHandler]", port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.connections = 0
        self.closed, self.released = threading.Event(), threading.Event()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed.set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients may hang up."""

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Run the server in a thread until the block ends, and let no request wait any longer then."""
        with running(self):
            try:
                yield self
            finally:
                self.released.set()


class RangeHandler(QuietHandler):
    """Responds with a range of some content; with `trickle` a byte of it a second."""

    protocol_version = "HTTP/1.1"
    trickle = False

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # a client that does not trust us hangs up
            super().handle()

    def respond_range(self, content: bytes, shift: int = 0, truncate: bool = False) -> None:
        """Send what `Range` asks for; `shift`: say that it begins so many bytes earlier."""
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self.respond(200, content)
            return
        first = int(wanted[1]) if wanted[1] else max(0, len(content) - int(wanted[2]))
        stop = min(len(content), int(wanted[2]) + 1) if wanted[1] and wanted[2] else len(content)
        if first >= len(content):
            self.respond(416, b"")
            return
        sent = first - shift
        headers = {"Content-Range": f"bytes {sent}-{sent + stop - first - 1}/{len(content)}"}
        self.respond(206, content[sent : sent + stop - first], headers, truncate)

    def respond(self, status: int, body: bytes, headers: dict[str, str] | None = None, truncate: bool = False) -> None:
        self.send_response(status)
        common = {"Content-Length": str(len(body)), "ETag": '"abc"', "Last-Modified": "Fri, 20 Nov 2026 12:00:00 GMT"}
        for name, value in {**common, "Accept-Ranges": "bytes", **(headers or {})}.items():
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


class FaultyServer(RangeServer):
    """`faults` are used up one for each GET: a status such as "503", one of `GARBAGE`, "truncate", "trickle" (a byte of
    the body a second), "trickle-status" (of the status line), "stall", "close", "last" (right, then the connection is
    closed unannounced), "ignore-range", "wrong-range", "expired" (credentials).

    With `token` only requests that carry this session token succeed, also HEAD. `retry_after` is sent with a 503.
    """

    def __init__(self, content: bytes, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(_Handler)
        self.scheme = "https" if tls else "http"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.content = content
        self.faults: deque[str] = deque()
        self.gets = 0
        self.token = self.retry_after = ""

    @property
    def endpoint(self) -> str:
        """Return the server's URL."""
        return f"{self.scheme}://127.0.0.1:{self.server_port}"


class _Handler(RangeHandler):
    server: FaultyServer

    def do_HEAD(self) -> None:
        if not self.server.token:
            self.respond(501, b"")
            return
        expired = self.server.token not in self.headers.get("X-Amz-Security-Token", "")
        self.respond(400 if expired else 200, self.server.content)

    def do_GET(self) -> None:
        self.server.gets += 1
        fault = self.server.faults.popleft() if self.server.faults else ""
        self.close_connection = fault in (*GARBAGE, "stall", "close", "last", "trickle-status")
        self.trickle = fault == "trickle"
        if fault == "expired" or self.server.token not in self.headers.get("X-Amz-Security-Token", ""):
            self.respond(400, EXPIRED)
        elif fault in GARBAGE:
            self.wfile.write(GARBAGE[fault])
        elif fault.isdigit():
            headers = {"Retry-After": self.server.retry_after} if self.server.retry_after else {}
            self.respond(int(fault), SLOW_DOWN if fault == "503" else b"", headers)
        elif fault == "stall":
            self.server.released.wait()
        elif fault == "trickle-status":
            for byte in b"HTTP/1.1 206 Partial Content\r\nX-A: " + b"a" * 99:
                self.wfile.write(bytes([byte]))
                if self.server.released.wait(0.5):
                    break
        elif fault == "ignore-range":
            self.respond(200, self.server.content)
        elif fault != "close":
            self.respond_range(self.server.content, fault == "wrong-range", fault == "truncate")


def signed_certificate(folder: Path, hosts: Iterable[str], days: tuple[float, float] = (-2, 1)) -> ssl.SSLContext:
    """Return a server's settings with a certificate for these names and addresses of a CA of its own, `ca.pem`."""
    now, keys = datetime.now(UTC), [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in ("test CA", "test server")]
    for number, name in enumerate(["ca", "server"]):
        builder = (
            x509.CertificateBuilder(names[0], names[number], keys[number].public_key(), x509.random_serial_number())
            .not_valid_before(now + timedelta(days=days[0]))
            .not_valid_after(now + timedelta(days=days[1] if number else 1))
            .add_extension(x509.BasicConstraints(ca=not number, path_length=None), critical=True)
        )
        if number:
            places = [x509.IPAddress(ip_address(one)) if one[0].isdigit() else x509.DNSName(one) for one in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(places), critical=False)
        pem = builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        (folder / f"{name}.pem").write_bytes(pem)
    coding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(keys[1].private_bytes(*coding))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return context


def faulty_server(content: bytes, tls: ssl.SSLContext | None = None) -> AbstractContextManager[FaultyServer]:
    """Run the server in a thread until the block ends."""
    return FaultyServer(content, tls).running()
