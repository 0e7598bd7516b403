"""A proxy in front of an S3 server that makes requests fail, in the ways in which networks and stores do.

    with FaultProxy("http://127.0.0.1:9000", [Fault("503", rate=0.05), Fault("stall", rate=0.01)], seed=1) as proxy:
        train(storage_options={"endpoint_url": proxy.endpoint, ...})
        print(proxy.counts)

Which request gets which fault depends on the seed, the kind of fault, the request's method, path and range, and how
often the same request was sent before: the same requests get the same faults, in whichever order they arrive. Bodies
are streamed. The header Host is passed on unchanged, since signatures cover it: the server must accept any host name,
as servers do that take the bucket from the path.

As a process of its own: `python -m streamloader.testing.proxy --behind http://127.0.0.1:9000 --fault stall:0.01`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from streamloader.errors import UsageError

if sys.platform != "win32":
    import fcntl
    import termios

# What each kind does. Those of `_INSTEAD` do not reach the server; the others change its response.
KINDS = {
    "delay": "the response begins `seconds` later (0.2)",
    "stall": "the same, for so long that clients give up (60); then the response passes",
    "trickle": "the body arrives byte by byte, `bytes_per_second` (2)",
    "slices": "the head and the first 200 bytes of the body arrive in packets of one byte",
    "reset": "the connection is reset before the request reaches the server",
    "reset-body": "half of the body arrives, then the connection is reset",
    "half-open": "half of the body arrives, then nothing; the connection stays open",
    "truncate": "half of the body arrives, then the connection is closed; Content-Length is that of the whole",
    "short": "half of the body arrives, and Content-Length says so",
    "flip": "one bit of the body is inverted",
    "wrong-range": "another range than the requested one arrives, one byte later, and Content-Range says so",
    "200": "status 200 with the whole object in response to a range (with the range alone where a signature covers it)",
    "301": "PermanentRedirect",
    "307": "TemporaryRedirect to `location`, by default the server behind",
    "400": "RequestTimeout: the server takes the connection for idle",
    "403": "ExpiredToken",
    "404": "NoSuchKey",
    "429": "TooManyRequests, with Retry-After where `seconds` is given",
    "500": "InternalError",
    "503": "SlowDown",
    "503-retry-after": "SlowDown with Retry-After: `seconds` (1)",
    "garbled": "the status line is no HTTP",
    "long-header": "a header of 700 kB",
    "many-headers": "500 headers",
    "lost": "the server executes the request, then the connection is closed without a response",
    "bandwidth": "all responses with this fault share `bytes_per_second` (1,000,000)",
    "brown-out": "for periods of `seconds` (2), which take the share `rate` of the time, half of all requests get 503, "
    "and the response to the others begins up to as much later",
}
GARBAGE = {
    "garbled": b"HTTZ/1.1 2x6 ??\r\n\r\n",
    "long-header": b"HTTP/1.1 206 Partial Content\r\nX-A: " + b"a" * 700_000 + b"\r\nContent-Length: 0\r\n\r\n",
    "many-headers": b"HTTP/1.1 206 Partial Content\r\n" + b"X-A: a\r\n" * 500 + b"Content-Length: 0\r\n\r\n",
}
# kind: status and code, which its description begins with
_ERRORS = {kind: (int(kind[:3]), re.split(r"\W", text)[0]) for kind, text in KINDS.items() if kind[0] in "345"}
_INSTEAD = {*_ERRORS, *GARBAGE, "reset"}
_HALF = {"reset-body", "half-open", "truncate", "short"}
_OF_BODY = {*_HALF, "trickle", "flip", "wrong-range", "bandwidth"}  # they need one
_SECONDS = {"delay": 0.2, "stall": 60.0, "503-retry-after": 1.0, "brown-out": 2.0}
_BYTES_PER_SECOND = {"trickle": 2.0, "bandwidth": 1e6}

MAX_HEAD = 1 << 18
PIECE_BYTES = 1 << 18
SLICED_BYTES = 200
BACKLOG = 512
CONTROL_SECONDS = 60.0
BANDWIDTH_STEP_SECONDS = 0.02
_END = b"\r\n\r\n"  # of a head


@dataclass(frozen=True)
class Fault:
    """A kind of fault (see `KINDS`), and the requests that get it.

    Of the requests whose method is `method` (such as "PUT" or "GET|HEAD"; default all), whose path with its query
    matches the regular expression `path` anywhere, and that have the header `header` if one is given, each gets the
    fault with the probability `rate`. With `first=n`, only the first n of those with the same method, path and range
    may get it: the n-th repeat then succeeds. `times` is how many get it in all: those that arrive first. `seconds`,
    `bytes_per_second` and `location` are those of the kind.

    Raises `UsageError` for an unknown kind and for values out of range.
    """

    kind: str
    rate: float = 1.0
    path: str = ""
    method: str = ""
    header: str = ""
    first: int | None = None
    times: int | None = None
    seconds: float | None = None
    bytes_per_second: float | None = None
    location: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"there is no fault {self.kind!r}", f"use one of {', '.join(KINDS)}")
        for name, least in (("rate", 0), ("first", 1), ("times", 1), ("seconds", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UsageError(f"{name}={value!r} of the fault {self.kind!r}", f"give at least {least}")
        if self.rate > 1 or (self.bytes_per_second is not None and not self.bytes_per_second > 0):
            raise UsageError(f"{self!r} is out of range", "give a rate of 0 to 1, and bytes_per_second above 0")
        try:
            re.compile(self.path)
        except re.error as error:
            raise UsageError(f"path={self.path!r} is no regular expression: {error}", "fix the expression") from error

    @property
    def pause(self) -> float:
        """The seconds of this fault, or the default of its kind."""
        return _SECONDS.get(self.kind, 0.0) if self.seconds is None else self.seconds

    @property
    def speed(self) -> float:
        """The bytes per second of this fault, or the default of its kind."""
        return self.bytes_per_second or _BYTES_PER_SECOND.get(self.kind, 0.0)

    def selects(self, request: Request) -> bool:
        """Return whether a request may get this fault."""
        methods = self.method.upper().split("|") if self.method else [request.method]
        found = request.method in methods and re.search(self.path, request.target)
        return bool(found) and (not self.header or self.header.lower() in request.headers)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault that a text such as "stall:0.01,path=/c/,seconds=3" describes: kind, rate, and the others.

        Raises `UsageError` for anything else.
        """
        first, *more = text.split(",")
        kind, _, rate = first.partition(":")
        given = dict(pair.partition("=")[::2] for pair in more)
        kinds: dict[str, Callable[[str], Any]] = {"first": int, "times": int, "seconds": float}
        kinds["bytes_per_second"] = float
        try:
            values = {name: kinds.get(name, str)(value) for name, value in given.items()}
            return cls(kind, float(rate or 1), **values)
        except (ValueError, TypeError) as error:
            problem = f"the fault {text!r} cannot be read: {error}"
            raise UsageError(problem, "write it as stall:0.01,path=/c/,seconds=3") from error


class Request(NamedTuple):
    """The head of a request: `headers` have names in lower case, and `raw` is what was sent."""

    method: str
    target: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells equal requests: the method, the path without its query, and the range."""
        return self.method, self.target.partition("?")[0], self.headers.get("range", "")


def draw(seed: int, *parts: object) -> float:
    """Return a number in [0, 1) that depends on the arguments alone."""
    text = "\0".join(map(str, (seed, *parts)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def is_chosen(fault: Fault, seed: int, request: Request, number: int, seconds: float = 0.0) -> bool:
    """Return whether the request gets the fault: a pure function.

    `number` counts the earlier requests with the same key that the fault selects; `seconds` have passed since the
    faults were set, which only brown-outs depend on.
    """
    if fault.kind == "brown-out":
        return draw(seed, fault.kind, int(seconds / max(fault.pause, 1e-3))) < fault.rate
    if fault.first is not None and number >= fault.first:
        return False
    return draw(seed, fault.kind, *request.key, number) < fault.rate


class FaultProxy:
    """A proxy on a free port of this machine, in front of the S3 server at the URL `behind`, until the block ends.

    `faults` may be replaced at any time, which begins to count equal requests anew; of several faults that would hit a
    request, the first does. `tls`: the files of a certificate and its key, with which the proxy serves https.
    `process=True` runs it in a process of its own, so that it does not compete with the client for the interpreter;
    also, a fork of this process then does not inherit its socket. `host` and `port` are what it listens at.
    """

    def __init__(
        self,
        behind: str,
        faults: Iterable[Fault] = (),
        *,
        seed: int = 0,
        tls: tuple[str, str] | None = None,
        process: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._faults = tuple(faults)
        self._options = {"behind": behind, "seed": seed, "tls": tls, "host": host, "port": port}
        self._own_process = process
        self._running = contextlib.ExitStack()
        self._call: Callable[[str, Any], Any] = _not_running
        self.endpoint = ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._call = (_process if self._own_process else _thread)(self._options, stack)
            self.faults = self._faults
            self.endpoint = self.start()
            self._running = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
        self._call = _not_running

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults that requests get from now on."""
        return self._faults

    @faults.setter
    def faults(self, faults: Iterable[Fault]) -> None:
        """Replace the faults, and begin to count equal requests anew."""
        self._faults = tuple(faults)
        self._call("set_faults", [asdict(fault) for fault in self._faults])

    @property
    def counts(self) -> Counter[str]:
        """How many requests got each kind of fault, and under "requests" how many came in all."""
        return Counter(self._call("counted", None))

    def stop(self) -> None:
        """Reset all connections, and refuse new ones: the server is down."""
        self._call("stop", None)

    def start(self) -> str:
        """Accept connections, after `stop` at the same port; return the endpoint."""
        return str(self._call("start", None))


def _not_running(*_: object) -> Any:
    raise UsageError("the proxy does not run", "use it as `with FaultProxy(...) as proxy:`")


def _thread(options: Mapping[str, Any], stack: contextlib.ExitStack) -> Callable[[str, Any], Any]:
    """Run the server's loop in a thread until the stack closes; return the function that calls the server."""
    server, loop = _Server(**options), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fault-proxy", daemon=True)

    def call(name: str, value: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(server.call(name, value), loop).result(CONTROL_SECONDS)

    def end() -> None:
        call("stop", None)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(asyncio.sleep(0.01))  # until transports have closed their sockets
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread.start()
    stack.callback(end)
    return call


def _process(options: Mapping[str, Any], stack: contextlib.ExitStack) -> Callable[[str, Any], Any]:
    """Run the server in a process until the stack closes; return the function that calls the server.

    Each line of its input is a call, and each line of its output the result.
    """
    _Server(**options)  # raises for what is wrong with them
    command = [sys.executable, "-m", __name__, "--control", json.dumps(options)]
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    stack.callback(process.kill)
    lock = threading.Lock()

    def call(name: str, value: Any) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        with lock:
            process.stdin.write(json.dumps([name, value]).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], CONTROL_SECONDS)
            answer = process.stdout.readline() if ready else b""
        if not answer:
            raise UsageError("the proxy's process does not answer", "see its error output")
        result, error = json.loads(answer)
        if error:
            raise UsageError(f"the proxy cannot {name}: {error}", "check behind=, tls=, host= and port=")
        return result

    return call


def _controlled(options: Mapping[str, Any]) -> None:
    """Run the server until standard input ends."""
    with contextlib.ExitStack() as stack:
        call = _thread(options, stack)
        for line in sys.stdin:
            try:
                result, problem = call(*json.loads(line)), ""
            except (OSError, UsageError) as error:
                result, problem = None, str(error)
            _write(json.dumps([result, problem]))


class _Server:
    """The proxy within an event loop."""

    def __init__(self, behind: str, seed: int, tls: Sequence[str] | None, host: str, port: int) -> None:
        parts = urlsplit(behind)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise UsageError(f"behind={behind!r} is no endpoint", "give one such as http://127.0.0.1:9000")
        self.behind, self.seed = behind.rstrip("/"), seed
        self.upstream = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.upstream_tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.tls: ssl.SSLContext | None = None
        if tls:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(*tls)
        self.host, self.port = host, port
        self.counts: Counter[str] = Counter()
        self.listener: asyncio.Server | None = None
        self.connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.set_faults([])

    async def call(self, name: str, value: Any) -> Any:
        """Call one of the methods below."""
        if name == "start":
            return await self.start()
        if name == "stop":
            return await self.stop()
        return self.set_faults(value) if name == "set_faults" else dict(self.counts)

    def set_faults(self, faults: Iterable[Mapping[str, Any]]) -> None:
        """Replace the faults."""
        self.faults = [Fault(**fault) for fault in faults]
        self.numbers: Counter[tuple[int, ...]] = Counter()
        self.hits: Counter[int] = Counter()  # of each fault
        self.free_at: dict[Fault, float] = {}
        self.begin = time.monotonic()

    async def start(self) -> str:
        """Listen, and return the endpoint."""
        if self.listener is None:
            self.listener = await asyncio.start_server(
                self._accept, self.host, self.port, ssl=self.tls, backlog=BACKLOG, limit=MAX_HEAD
            )
            self.port = self.listener.sockets[0].getsockname()[1]
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    async def stop(self) -> None:
        """Refuse connections, and reset those that are open."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        for task, writer in list(self.connections.items()):
            reset(writer)
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    def choose(self, request: Request) -> tuple[Fault | None, float]:
        """Return the fault that a request gets, if any, with a number in [0, 1); and count the request."""
        self.counts["requests"] += 1
        key, chosen, place = hash(request.key), None, 0.0
        for index, fault in enumerate(self.faults):
            if fault.selects(request):
                number = self.numbers[index, key]
                self.numbers[index, key] += 1
                if chosen is not None or (fault.times is not None and self.hits[index] >= fault.times):
                    continue
                if is_chosen(fault, self.seed, request, number, time.monotonic() - self.begin):
                    self.hits[index] += 1
                    chosen, place = fault, draw(self.seed, "place", *request.key, number)
        return chosen, place

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections[task] = writer
        connection = _Connection(self, reader, writer)
        try:
            while await connection.exchange():
                pass
        # the client has gone, or the server, or one of them speaks no HTTP
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            reset(writer)
        except asyncio.CancelledError:  # by `stop`, which resets the connection
            pass
        finally:
            del self.connections[task]
            connection.disconnect()
            writer.close()


class _Connection:
    """A connection of a client, and the one to the server that serves it."""

    def __init__(self, server: _Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server, self._reader, self._writer = server, reader, writer
        self._behind: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        writer.transport.set_write_buffer_limits(1, 0)  # what was sent before a reset has left this process

    def disconnect(self) -> None:
        """Close the connection to the server."""
        if self._behind is not None:
            self._behind[1].close()
            self._behind = None

    async def exchange(self) -> bool:
        """Serve the next request; return whether the connection can be used again."""
        try:
            raw = await self._reader.readuntil(_END)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return False
        request = _parsed(raw)
        fault, place = self._server.choose(request)
        if fault is not None and fault.kind == "brown-out":
            self._server.counts[fault.kind] += 1
            pause = fault.pause * (2 * place - 1)
            fault = Fault("503") if pause < 0 else Fault("delay", seconds=pause)
        if fault is not None and fault.kind in _INSTEAD:
            return await self._respond_instead(fault, request)
        if fault is not None and fault.kind == "200":
            request = _without_range(request)
        head, body = await self._pass_on(request)
        async with contextlib.aclosing(body):
            stays = await self._respond(fault, place, request, head, body)
        if _says_close(head):
            self.disconnect()
        return stays and not _says_close(head) and not _says_close(request.raw)

    # the server

    async def _pass_on(self, request: Request) -> tuple[bytes, Pieces]:
        """Send a request to the server; return the head of its response, and the pieces of the body as they arrive.

        A GET whose connection the server has closed in the meantime is sent again on a new one.
        """
        reused = self._behind is not None
        try:
            return await self._pass_on_once(request)
        except (OSError, EOFError):
            if not reused or request.method not in ("GET", "HEAD"):
                raise
            self.disconnect()
            return await self._pass_on_once(request)

    async def _pass_on_once(self, request: Request) -> tuple[bytes, Pieces]:
        if self._behind is not None and self._behind[0].at_eof():
            self.disconnect()
        if self._behind is None:
            server = self._server
            self._behind = await asyncio.open_connection(*server.upstream, ssl=server.upstream_tls, limit=MAX_HEAD)
        reader, writer = self._behind
        writer.write(_with_headers(request.raw, {"Expect": None}))
        with contextlib.suppress(ConnectionError):  # the server may respond before it has read the body
            async for piece in self._body(request):
                writer.write(piece)
                await writer.drain()
        head = b"HTTP/1.1 100 "
        while head[9:10] == b"1":
            head = await reader.readuntil(_END)
        has_body = request.method != "HEAD" and head[9:12] not in (b"204", b"304")
        return head, _pieces(reader, _headers(head) if has_body else {}, to_end=has_body)

    async def _body(self, request: Request) -> Pieces:
        """Yield the body of a request."""
        if "expect" in request.headers:
            await self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        async for piece in _pieces(self._reader, request.headers, to_end=False):
            yield piece

    # the client

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def _pause(self, seconds: float | None) -> None:
        """Wait. Raises `ConnectionResetError` once the client closes the connection."""
        closed = asyncio.ensure_future(self._reader.read(1))
        try:
            done, _ = await asyncio.wait({closed}, timeout=seconds)
        finally:
            closed.cancel()
        await asyncio.wait({closed})
        if done:
            raise ConnectionResetError

    async def _respond_instead(self, fault: Fault, request: Request) -> bool:
        """Respond in place of the server, once the request was read; return whether the connection stays open."""
        self._server.counts[fault.kind] += 1
        if fault.kind == "reset":
            reset(self._writer)
            return False
        async for _ in self._body(request):
            pass
        if fault.kind in GARBAGE:
            await self._send(GARBAGE[fault.kind])
            return False
        await self._send(_error_response(fault, request, self._server.behind))
        return not _says_close(request.raw)

    async def _respond(self, fault: Fault | None, place: float, request: Request, head: bytes, body: Pieces) -> bool:
        """Send the server's response with a fault; return whether the connection stays open.

        A response that the fault cannot change, such as one without a body whose bit would be inverted, passes and is
        not counted.
        """
        headers = _headers(head)
        if fault is not None and fault.kind in _OF_BODY and "chunked" in headers.get("transfer-encoding", ""):
            content = _unchunked(b"".join([piece async for piece in body]))  # of a listing or an error: it is short
            head = _with_headers(head, {"Transfer-Encoding": None, "Content-Length": str(len(content))})
            headers, body = _headers(head), _once(content)
        size = 0 if request.method == "HEAD" else int(headers.get("content-length", 0))
        if fault is None or not _can_change(fault.kind, head, size):
            await self._send(head)
            async for piece in body:
                await self._send(piece)
            return True
        self._server.counts[fault.kind] += 1
        if fault.kind in ("delay", "stall"):
            await self._pause(fault.pause)
        if fault.kind == "lost":
            async for _ in body:
                pass
            return False
        head, sent = _changed_head(fault.kind, head, size), 0
        await self._send_at_pace(fault, head, -len(head))
        async for piece in _changed_body(fault.kind, body, size, place):
            await self._send_at_pace(fault, piece, sent)
            sent += len(piece)
        return await self._end(fault.kind)

    async def _send_at_pace(self, fault: Fault, data: bytes, sent: int) -> None:
        """Send a piece of a body of which `sent` bytes were sent before; it is negative for the head."""
        single = len(data) if fault.kind == "trickle" and sent >= 0 else 0
        if fault.kind == "slices":
            single = max(0, min(len(data), SLICED_BYTES - sent))
        for at in range(single):
            await self._send(data[at : at + 1])
            if fault.kind == "trickle":
                await self._pause(1 / fault.speed)
        step = PIECE_BYTES if fault.kind != "bandwidth" else max(1, int(fault.speed * BANDWIDTH_STEP_SECONDS))
        for at in range(single, len(data), step):
            part = data[at : at + step]
            if fault.kind == "bandwidth":
                now, free_at = time.monotonic(), self._server.free_at
                free_at[fault] = max(now, free_at.get(fault, now)) + len(part) / fault.speed
                await self._pause(free_at[fault] - now)
            await self._send(part)

    async def _end(self, kind: str) -> bool:
        """End a response; return whether the connection stays open."""
        if kind in _HALF:
            self.disconnect()  # the other half is not read
        if kind == "reset-body":
            await self._acknowledged()
            reset(self._writer)
        if kind == "half-open":
            await self._pause(None)
        return kind not in ("reset-body", "half-open", "truncate")

    async def _acknowledged(self) -> None:
        """Wait, at most a second, until the client's machine has received what was sent, which a reset would drop."""
        sock = self._writer.get_extra_info("socket")
        for _ in range(200):
            unsent = bytearray(b"?")
            if sys.platform != "win32":  # which does not tell
                unsent = bytearray(4)
                fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, unsent)
            if not any(unsent):
                return
            await asyncio.sleep(0.005)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection by a reset."""
    sock = writer.get_extra_info("socket")
    if sock is not None:  # else it is closed already
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# HTTP

Pieces = AsyncGenerator[bytes, None]


def _parsed(raw: bytes) -> Request:
    """Return the request with this head. Raises `ValueError` for anything else."""
    method, target, _ = raw.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    return Request(method, target, _headers(raw), raw)


def _headers(head: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:-2])
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _with_headers(head: bytes, changes: Mapping[str, str | None]) -> bytes:
    """Return a head in which headers have other values, or, for None, are missing."""
    first, *lines = head.removesuffix(_END).decode("latin-1").split("\r\n")
    changed = {name.lower() for name in changes}
    lines = [line for line in lines if line.partition(":")[0].strip().lower() not in changed]
    lines += [f"{name}: {value}" for name, value in changes.items() if value is not None]
    return "\r\n".join([first, *lines]).encode("latin-1") + _END


def _says_close(head: bytes) -> bool:
    """Return whether the connection ends after this request or response."""
    first, headers = head.partition(b"\r\n")[0], _headers(head)
    is_old = b"HTTP/1.0" in first and headers.get("connection", "").lower() != "keep-alive"
    to_end = first.startswith(b"HTTP/") and not {"content-length", "transfer-encoding"} & set(headers)
    has_body = to_end and first[9:12] not in (b"204", b"304")
    return is_old or has_body or headers.get("connection", "").lower() == "close"


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str], *, to_end: bool) -> Pieces:
    """Yield a body as it is sent, chunk sizes included; without a length, nothing, or what comes to the end."""
    if "chunked" in headers.get("transfer-encoding", ""):
        size = -1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.partition(b";")[0], 16)
            yield line
            async for piece in _exactly(reader, size):
                yield piece
            if size:
                yield await reader.readexactly(2)
        line = b""
        while line != b"\r\n":  # trailers
            line = await reader.readuntil(b"\r\n")
            yield line
    elif "content-length" in headers:
        async for piece in _exactly(reader, int(headers["content-length"])):
            yield piece
    elif to_end:
        while piece := await reader.read(PIECE_BYTES):
            yield piece


async def _exactly(reader: asyncio.StreamReader, size: int) -> Pieces:
    while size:
        piece = await reader.read(min(size, PIECE_BYTES))
        if not piece:
            raise EOFError
        size -= len(piece)
        yield piece


async def _once(content: bytes) -> Pieces:
    yield content


def _unchunked(body: bytes) -> bytes:
    """Return the content of a body that was sent in chunks."""
    content = b""
    while True:
        line, _, body = body.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        if not size:
            return content
        content, body = content + body[:size], body[size + 2 :]


def _without_range(request: Request) -> Request:
    """Return the request for the whole object, unless its signature covers the range."""
    signed = re.search(r"SignedHeaders=([^,]*)", request.headers.get("authorization", ""))
    if signed and "range" in signed[1].lower().split(";"):
        return request
    return request._replace(raw=_with_headers(request.raw, {"Range": None}))


# what faults change


def _error_response(fault: Fault, request: Request, behind: str) -> bytes:
    """Return a response with the error document of a fault."""
    status, code = _ERRORS[fault.kind]
    body = f"<Error><Code>{code}</Code><Message>by the fault proxy</Message></Error>".encode()
    headers = {"Content-Type": "application/xml", "Content-Length": str(len(body))}
    if status == 301:
        headers["x-amz-bucket-region"] = "us-east-1"
    if status == 307:
        headers["Location"] = (fault.location or behind) + request.target
    if fault.kind == "503-retry-after" or fault.seconds is not None:
        headers["Retry-After"] = f"{fault.pause:g}"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n".encode()
    return head if request.method == "HEAD" else head + body


def _can_change(kind: str, head: bytes, size: int) -> bool:
    """Return whether a response can have a fault."""
    if kind in ("wrong-range", "200"):
        return size > 0 and (kind == "200" or head[9:12] == b"206")
    return kind not in _OF_BODY or size > 0


def _changed_head(kind: str, head: bytes, size: int) -> bytes:
    if kind == "short":
        return _with_headers(head, {"Content-Length": str(size // 2)})
    if kind == "200":
        head = b"HTTP/1.1 200 OK" + head[head.index(b"\r\n") :]
        return _with_headers(head, {"Content-Range": None})
    if kind == "wrong-range":
        first, last, total = re.findall(r"\d+|\*", _headers(head).get("content-range", "0-0/*"))
        shifted = f"bytes {int(first) + 1}-{int(last) + 1}/{int(total) + 1 if total.isdigit() else total}"
        return _with_headers(head, {"Content-Range": shifted})
    return head


async def _changed_body(kind: str, body: Pieces, size: int, place: float) -> Pieces:
    """Yield a body of `size` bytes with a fault; `place` is in [0, 1)."""
    left, flipped = size // 2 if kind in _HALF else size, int(place * size)
    at = 0
    async for piece in body:
        if kind == "flip" and at <= flipped < at + len(piece):
            changed = bytearray(piece)
            changed[flipped - at] ^= 1 << int(place * 8 * size) % 8
            piece = bytes(changed)  # noqa: PLW2901
        if kind == "wrong-range" and not at:
            yield piece[1:]
        else:
            yield piece[: left - at] if kind in _HALF else piece
        at += len(piece)
        if kind in _HALF and at >= left:
            return
    if kind == "wrong-range":
        yield b"\0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a proxy until it is interrupted; print its endpoint, and at the end its counters as JSON."""
    parser = argparse.ArgumentParser(prog="python -m streamloader.testing.proxy", description=_usage())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--behind", metavar="URL", help="the endpoint of the S3 server")
    parser.add_argument("--fault", action="append", default=[], metavar="KIND[:RATE][,NAME=VALUE...]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: this machine only)")
    parser.add_argument("--port", type=int, default=0, help="the port to listen at (default: a free one)")
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="serve https, with these files")
    parser.add_argument("--control", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.control:
        _controlled(json.loads(given.control))
        return 0
    options = {name: getattr(given, name) for name in ("seed", "tls", "host", "port")}
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # in all threads
    try:
        with FaultProxy(given.behind or "", map(Fault.parse, given.fault), **options) as proxy:
            _write(proxy.endpoint)
            signal.sigwait(ends)
            _write(json.dumps(proxy.counts))
    except UsageError as error:
        parser.error(str(error))
    return 0


def _usage() -> str:
    kinds = "\n".join(f"  {kind:16} {what}" for kind, what in KINDS.items())
    return f"A proxy in front of an S3 server that makes requests fail.\n\nkinds of faults:\n{kinds}"


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
