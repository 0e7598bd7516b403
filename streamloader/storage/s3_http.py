"""HTTP connections for S3, which read a body from the socket into its final buffer.

A client that returns bodies allocates memory for each, which is then copied once more. Read in place, the same ranges
took half of the processor time of obstore (0.4 s/GB against 0.8 to 1.0, with the copy into a slot) and no memory. HTTP
is the standard library's `http.client`, whose `readinto` releases the GIL; botocore signs.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.httpsession import ProxyConfiguration, get_cert_path
from botocore.utils import get_environ_proxies
from urllib3.util import wait_for_read

from streamloader.errors import AccessError, UnsupportedError
from streamloader.options import RetryPolicy
from streamloader.storage.buffers import Buffer
from streamloader.storage.process import Finalizer, Owner
from streamloader.storage.retry import HttpError, Patience, Progress

MAX_IDLE = 128
MAX_IDLE_SECONDS = 20.0  # servers and load balancers close idle connections after 60 s, some after 30 s
# A dead peer, or a NAT that dropped the connection, is detected after 20 s + 3 * 10 s
KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
# Bodies are sent in pieces, as a socket's timeout is for one call
PIECE_BYTES = 1 << 20


class Origin(NamedTuple):
    """The scheme, host and port of a server."""

    scheme: str
    host: str
    port: int | None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


class Proxy(NamedTuple):
    """The proxy of an origin, and the headers that it requires."""

    host: str
    port: int
    headers: dict[str, str]


class _Idle(NamedTuple):
    """An open connection without a request, since a time of the monotonic clock."""

    origin: Origin
    connection: http.client.HTTPConnection
    since: float


class Pool:
    """A pool of connections. Thread-safe; for one process.

    `verify` and `config` are those of botocore's client. The config has timeouts, the client's certificate and
    proxies; without proxies, those of the environment are used.
    """

    def __init__(self, policy: RetryPolicy, config: Config, verify: bool | str | None) -> None:
        self.policy, self._config = replace(policy, response_seconds=float(config.read_timeout)), config
        self.patience = Patience(self.policy)
        self._tls = lru_cache(1)(partial(_tls_context, verify, config.client_cert))  # takes 0.04 s
        self._idle: deque[_Idle] = deque()
        self._lock = threading.Lock()
        self._owner = Owner("connections")
        self._proxies: dict[Origin, Proxy | None] = {}
        Finalizer(self, _close_all, self._idle)

    @contextmanager
    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Iterator[Buffer] | None = None,
        seconds: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, whose `body` is an iterator of pieces, and yield the response.

        The response may take `seconds` to begin, by default those of the policy. The connection is reused if the block
        reads the response to its end. Raises `ForkError` in a forked child, which shares the sockets with its parent.
        """
        self._owner.check()
        parts = urlsplit(url)
        origin = Origin(parts.scheme, parts.hostname or "", parts.port)
        target, headers = f"{parts.path}?{parts.query}" if parts.query else parts.path, dict(headers)
        if origin not in self._proxies:
            self._proxies[origin] = self._proxy(url)
        proxy = self._proxies[origin]
        if proxy and origin.scheme == "http":
            target, headers = url, {**headers, **proxy.headers}
        connection, response = self._take(origin, proxy), None
        keep = False
        try:
            _send(connection, method, target, body, headers)
            reader = _TimedReader(connection.sock, self.policy, seconds)
            connection.response_class = partial(_response, reader)  # type: ignore[assignment]
            response = connection.getresponse()
            reader.in_body = True
            yield response
            keep = response.isclosed() and connection.sock is not None
        finally:
            if keep and len(self._idle) < MAX_IDLE:
                self._idle.append(_Idle(origin, connection, time.monotonic()))
            else:
                if response is not None:  # one that ends its connection holds the socket by itself
                    response.close()
                connection.close()

    def _take(self, origin: Origin, proxy: Proxy | None) -> http.client.HTTPConnection:
        """Return a connection to `origin`: the last used one, unless it is old or the server has closed it."""
        with self._lock:
            while self._idle and time.monotonic() - self._idle[0].since >= MAX_IDLE_SECONDS:
                self._idle.popleft().connection.close()
            idle = self._idle.pop() if self._idle else None
        if idle is None:
            return self._connect(origin, proxy)
        # the origin changes when the bucket is found in another region; the server has closed what is readable
        if idle.origin == origin and not wait_for_read(idle.connection.sock, timeout=0):
            idle.connection.sock.settimeout(self.policy.response_seconds)
            return idle.connection
        idle.connection.close()
        return self._take(origin, proxy)

    def _connect(self, origin: Origin, proxy: Proxy | None) -> http.client.HTTPConnection:
        """Return a new connection. Raises `HttpError` if the server cannot be reached."""
        host, port = (proxy.host, proxy.port) if proxy else (origin.host, origin.port)
        seconds = float(self._config.connect_timeout)
        if origin.scheme == "http":
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls())
            if proxy:
                connection.set_tunnel(origin.host, origin.port, proxy.headers)
        try:
            connection.connect()
        except OSError as error:  # differs from a failure of a request, whose server was reachable
            by = f" by the proxy {proxy.host}:{proxy.port}" if proxy else ""
            raise HttpError(0, "Unreachable", f"{origin}{by}: {error}") from error
        connection.sock.settimeout(self.policy.response_seconds)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):  # not on all platforms
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return connection

    def _proxy(self, url: str) -> Proxy | None:
        proxies, scheme = self._config.proxies, urlsplit(url).scheme
        if proxies is None:
            proxies = get_environ_proxies(url)
        settings = ProxyConfiguration({scheme: proxies.get(scheme) or proxies.get("all")})
        proxy_url = settings.proxy_url_for(url)
        if not proxy_url:
            return None
        parts = urlsplit(proxy_url)
        if parts.scheme != "http" or self._config.proxies_config:
            raise UnsupportedError(f"unsupported proxy {parts.scheme}://{parts.hostname}", "use one at http://, for S3")
        return Proxy(parts.hostname or "", parts.port or 80, settings.proxy_headers_for(proxy_url))


def _send(connection: http.client.HTTPConnection, method: str, target: str, body: Any, headers: dict[str, str]) -> None:
    """Send a request. Raises `HttpError` for an invalid header."""
    try:
        connection.request(method, target, body, headers, encode_chunked="Transfer-Encoding" in headers)
    except (BrokenPipeError, ConnectionResetError):
        if not body:  # else the server may have rejected the request before it read the body, and responded
            raise
    except ValueError as error:  # an invalid header, such as a token with a line break
        raise HttpError(0, "", str(error)) from error


def _tls_context(verify: bool | str | None, certificate: Any) -> ssl.SSLContext:
    """Return the TLS settings for botocore's `verify` (False, a file of certificates, or None for botocore's default)
    and its `client_cert` (one file, or a certificate and its key).
    """
    ca_file = verify if isinstance(verify, str) else str(get_cert_path(True))
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if certificate:
            context.load_cert_chain(*([certificate] if isinstance(certificate, str) else certificate))
    except OSError as error:
        problem = f"the certificates of {ca_file} cannot be read: {error}"
        raise AccessError(problem, "check verify= or AWS_CA_BUNDLE") from error
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _response(reader: _TimedReader, sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
    """Return a response with a deadline: the socket's timeout is for one `recv`, so a byte per second prevents it."""
    response = http.client.HTTPResponse(sock, *args, **options)
    response.fp.close()
    response.fp = io.BufferedReader(reader)
    return response


class _TimedReader(io.RawIOBase):
    """Reads a socket. Raises `TimeoutError` if the bytes arrive more slowly than the policy allows.

    Only those of the body, `in_body`, gain time: a server may send "100 Continue" without end.
    """

    def __init__(self, sock: socket.socket, policy: RetryPolicy, seconds: float | None) -> None:
        self._sock, self._timeout = sock, policy.response_seconds
        self._file = sock.makefile("rb", buffering=0)
        self._progress = Progress(policy, seconds=seconds)
        self.in_body = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        timeout = self._progress.seconds_left()
        if not timeout <= self._timeout <= 1.1 * timeout:  # avoids a system call for each part
            self._sock.settimeout(timeout)
            self._timeout = timeout
        count = self._file.readinto(buffer)
        if self.in_body:
            self._progress.received(count or 0)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _close_all(connections: deque[_Idle]) -> None:
    with suppress(IndexError):
        while True:  # at exit, other threads may still return connections
            connections.pop().connection.close()
