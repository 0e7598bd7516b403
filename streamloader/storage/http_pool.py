"""Connections to one S3 endpoint, and the signatures that its requests carry."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import select
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from streamloader.errors import ForkError

# S3 takes a signature for 15 minutes; a clock may be wrong by some of them
SIGNATURE_SECONDS = 60.0
MAX_SIGNATURES = 4096
MAX_IDLE = 128
# of an answer that is no body: enough for S3's error document
ERROR_BYTES = 4096


class HttpError(OSError):
    """What went wrong: HTTP status (0 without an answer), the store's own code where it has one, and its message.

    `headers` are those of the answer.
    """

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = code
        self.headers = headers or {}


@dataclass(frozen=True)
class Endpoint:
    """One bucket at one server: where it is, and how patient we are (seconds)."""

    url: str
    bucket: str
    region: str
    connect_seconds: float
    read_seconds: float
    tls: ssl.SSLContext | None = None
    credentials: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)

    def target(self, key: str) -> str:
        """Return the request target of an object: path style, percent-encoded as S3 signs it."""
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base}/{quote(self.bucket, safe='')}/{quote(key, safe='/~')}"

    def address(self, target: str) -> str:
        """Return the URL of a request target."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{target}"

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection with its socket open."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        connection = (
            http.client.HTTPConnection(host, parts.port, timeout=self.connect_seconds)
            if self.tls is None
            else http.client.HTTPSConnection(host, parts.port, timeout=self.connect_seconds, context=self.tls)
        )
        try:
            connection.connect()
        except OSError as error:  # that of a request is another matter: the server was there
            raise HttpError(0, "Unreachable", f"{parts.netloc}: {error}") from error
        connection.sock.settimeout(self.read_seconds)
        return connection


class Signer:
    """Signs GETs of whole objects: the range is not part of a signature, so one serves an object for a minute."""

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._signed: dict[str, tuple[float, dict[str, str]]] = {}

    def headers(self, target: str) -> dict[str, str]:
        """Return the headers that a GET of this target needs."""
        if self._endpoint.credentials is None:
            return dict(self._endpoint.headers)
        now = self._clock()
        signed = self._signed.get(target)
        if signed is None or signed[0] <= now:
            if len(self._signed) >= MAX_SIGNATURES:
                self._signed.clear()
            signed = self._signed[target] = (now + SIGNATURE_SECONDS, self._sign(target, self._endpoint.credentials()))
        return dict(signed[1])

    def _sign(self, target: str, keys: Mapping[str, Any]) -> dict[str, str]:
        request = AWSRequest("GET", self._endpoint.address(target), headers=dict(self._endpoint.headers))
        credentials = Credentials(keys["access_key_id"], keys["secret_access_key"], keys["token"])
        S3SigV4Auth(credentials, "s3", self._endpoint.region).add_auth(request)
        return {name: str(value) for name, value in request.headers.items()}


class Pool:
    """Open connections to one endpoint; thread-safe, for one process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.signer = Signer(endpoint)
        self.compares: bool | None = None  # whether the server compares the checksums of bodies; None until it is known
        self._idle: deque[http.client.HTTPConnection] = deque(maxlen=MAX_IDLE)
        self._lock = threading.Lock()
        self._process = os.getpid()
        weakref.finalize(self, _close_all, self._idle)

    def take(self) -> http.client.HTTPConnection:
        """Return an open connection: the one used last, unless the server has closed it meanwhile.

        Raises `ForkError` in a forked child, whose parent goes on with the same sockets.
        """
        if os.getpid() != self._process:
            problem = f"the connections to {self.endpoint.url} are of another process"
            raise ForkError(problem, "ask the store for a reader in this process")
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self.endpoint.connect()
            if not _readable(connection.sock):
                return connection
            connection.close()

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose answer was read to its end."""
        with self._lock:
            if connection.sock is not None and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def refusal(answer: http.client.HTTPResponse) -> HttpError:
    """Return what an answer says that is not the one that was asked for."""
    if answer.status == 200:
        return HttpError(200, "RangeNotSupported", "the whole object came")
    text = answer.read(ERROR_BYTES).decode("utf-8", "replace")
    code, message = re.search(r"<Code>(.*?)</Code>", text), re.search(r"<Message>(.*?)</Message>", text)
    status = answer.status
    said = message[1] if message else f"HTTP status {status}"
    return HttpError(status, code[1] if code else "", said, dict(answer.headers))


def _close_all(connections: deque[http.client.HTTPConnection]) -> None:
    with contextlib.suppress(IndexError):
        while True:  # at exit, threads may still come to give theirs back
            connections.pop().close()


def _readable(sock: Any) -> bool:
    """Return whether an idle connection has something to say: it can only be its end."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
