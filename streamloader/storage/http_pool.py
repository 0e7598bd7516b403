"""Connections to the server of one S3 bucket."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import re
import select
import socket
import ssl
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamloader.errors import ForkError
from streamloader.options import RetryPolicy
from streamloader.storage.failures import EXPIRED, HttpError, check_range
from streamloader.storage.policy import Progress
from streamloader.storage.s3 import Origin, S3Client, SignedRequest, tls_context

MAX_IDLE = 128
MAX_RESENDS = 3  # of one request: two changes of region, and fresh credentials
# of an answer that is no body: enough for S3's error document
ERROR_BYTES = 4096


@dataclass(frozen=True)
class Upload:
    """A body to send in `pieces`; `hashed`: whether its digest belongs to the signature."""

    buffers: Sequence[memoryview]
    pieces: Callable[[], Iterator[bytes | memoryview]]
    hashed: bool


class Pool:
    """Open connections to one bucket's server; thread-safe, for one process."""

    def __init__(self, s3: S3Client, policy: RetryPolicy | None = None) -> None:
        self.s3 = s3
        self._policy = replace(policy or RetryPolicy(), response_seconds=s3.read_seconds)
        self.compares: bool | None = None  # whether the server compares the checksums of bodies; None until it is known
        self.tls: ssl.SSLContext | None = tls_context(s3.verify) if s3.origin.scheme == "https" else None
        self._idle: deque[http.client.HTTPConnection] = deque(maxlen=MAX_IDLE)
        self._lock = threading.Lock()
        self._process = os.getpid()
        weakref.finalize(self, _close_all, self._idle)

    def ask(
        self,
        operation: str,
        key: str,
        expected: int,
        headers: Mapping[str, str] | None = None,
        body: Upload | None = None,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send one request and return the connection with its answer, whose status is `expected`.

        It is sent again where the answer shows that the bucket is in another region, and once with fresh credentials
        where they have expired. Raises `HttpError` for other answers, also for another range than was asked for, and
        `ForkError` in a forked child, whose parent goes on with the same sockets.
        """
        if os.getpid() != self._process:
            problem = f"the connections to bucket {self.s3.bucket} are of another process"
            raise ForkError(problem, "ask the store for a reader in this process")
        renewed = False
        for attempt in range(MAX_RESENDS + 1):
            request = (
                self.s3.get(key, headers)
                if body is None
                else self.s3.request(operation, key, headers, body.buffers, body.hashed)
            )
            connection = self._take(request.template.origin)
            try:
                answer = _exchange(connection, request, body)
                if answer.status == expected or (answer.status == 200 and answer.length == 0):  # some say so to a range
                    if expected == 206 and headers:
                        check_range(headers["Range"], answer.headers.get("Content-Range"))
                    return connection, answer
                failure = refusal(answer)
            except BaseException:
                connection.close()
                raise
            connection.close()
            said = (failure.status, failure.error_code, failure.region)
            expired = failure.error_code in EXPIRED and not renewed
            renewed |= expired
            again = self.s3.renew(request) if expired else self.s3.adopt_region(request, operation, *said)
            if attempt == MAX_RESENDS or not again:
                raise failure
        raise AssertionError("the loop ends by itself")

    def _take(self, origin: Origin) -> http.client.HTTPConnection:
        """Return an open connection to `origin`: the one used last, unless the server has closed it meanwhile."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(origin)
            if connection.host == origin.host and not _readable(connection.sock):  # a bucket's region may be learnt
                connection.sock.settimeout(self.s3.read_seconds)
                return connection
            connection.close()

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose answer was read to its end."""
        with self._lock:
            if connection.sock is not None and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, origin: Origin) -> http.client.HTTPConnection:
        """Return a connection with its socket open."""
        seconds = self.s3.connect_seconds
        connection = (
            http.client.HTTPConnection(origin.host, origin.port, timeout=seconds)
            if self.tls is None
            else http.client.HTTPSConnection(origin.host, origin.port, timeout=seconds, context=self.tls)
        )
        try:
            connection.connect()
        except OSError as error:  # that of a request is another matter: the server was there
            raise HttpError(0, "Unreachable", f"{origin}: {error}") from error
        connection.sock.settimeout(self.s3.read_seconds)
        connection.response_class = partial(_Response, self._policy)  # type: ignore[assignment]
        return connection


class _Response(http.client.HTTPResponse):
    """A response that is late as a whole: a socket's timeout is for each `recv`, which one byte a second satisfies."""

    def __init__(self, policy: RetryPolicy, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(_Timed(sock, policy), *args, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Timed:
    """What `HTTPResponse` asks of a socket."""

    sock: socket.socket
    policy: RetryPolicy

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 - "rb"
        return io.BufferedReader(_TimedReader(self.sock, self.policy))


class _TimedReader(io.RawIOBase):
    """Reads a socket; raises `TimeoutError` where the bytes come slower than the policy allows."""

    def __init__(self, sock: socket.socket, policy: RetryPolicy) -> None:
        self._sock, self._timeout = sock, policy.response_seconds
        self._file = sock.makefile("rb", buffering=0)
        self._progress = Progress(policy)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        timeout = self._progress.seconds_left()
        if not timeout <= self._timeout <= 1.1 * timeout:  # a system call: not for each part that comes in time
            self._sock.settimeout(timeout)
            self._timeout = timeout
        count = self._file.readinto(buffer)
        self._progress.received(count or 0)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _exchange(
    connection: http.client.HTTPConnection, request: SignedRequest, body: Upload | None
) -> http.client.HTTPResponse:
    if body is None:
        connection.request(request.method, request.target, headers=request.headers)
    else:
        headers = {**request.headers, "Content-Length": str(sum(part.nbytes for part in body.buffers))}
        # a server that refuses does not wait for the body: its answer is there
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(request.method, request.target, body=body.pieces(), headers=headers)
    return connection.getresponse()


def refusal(answer: http.client.HTTPResponse) -> HttpError:
    """Return what an answer says that is not the one that was asked for."""
    if answer.status == 200:
        return HttpError(200, "RangeNotSupported", "the whole object came")
    text = answer.read(ERROR_BYTES).decode("utf-8", "replace")
    code, message, region = (re.search(f"<{name}>(.*?)</{name}>", text) for name in ("Code", "Message", "Region"))
    status = answer.status
    said = message[1] if message else f"HTTP status {status}"
    home = answer.headers.get("x-amz-bucket-region") or (region[1] if region else "")
    return HttpError(status, code[1] if code else "", said, dict(answer.headers), home)


def _close_all(connections: deque[http.client.HTTPConnection]) -> None:
    with contextlib.suppress(IndexError):
        while True:  # at exit, threads may still come to give theirs back
            connections.pop().close()


def _readable(sock: Any) -> bool:
    """Return whether an idle connection has something to say: it can only be its end."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
