"""A web server of a folder, with ranges, that stalls, throttles or dies on demand when data files are asked for.

with folder_server(path) as server:
    server.behave = "stall"      # or "503", "close", "damage", ""; for requests of shards, not for paths with `spare`
    server.every = 50            # only each 50th of them; a "stall" lasts `seconds`, for ever without
    server.faults["/zarr.json"] = ["trickle", "flip", "short", "shift", "close", "503"]   # of the next GETs of a path
    StreamingDataset(server.url, ...)
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FolderServer(ThreadingHTTPServer):
    """Treats the next `times` requests for data badly; `gets` counts them all, `met` is set once one was."""

    request_queue_size = 128  # the loader connects with all its threads at once
    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.faults: dict[str, list[str]] = {}
        self.paths: list[str] = []
        self.folder = folder
        self.behave = ""
        self.spare = "nothing"
        self.times = 10**9
        self.every = 1
        self.seconds: float | None = None
        self.delay = 0.0  # seconds before every answer
        self.stall_every = 0  # besides, each so many requests wait for `seconds`
        self.now = self.most_at_once = 0
        self.gets = 0
        self.lock = threading.Lock()
        self.met = threading.Event()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        """The URL of the folder."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients may hang up."""

    def fault(self, path: str) -> str:
        """What to do with any GET; empty for what is right."""
        with self.lock:
            self.paths.append(path)
            queues = [faults for text, faults in self.faults.items() if text in path and faults]
            return queues[0].pop(0) if queues else ""

    def behaviour(self, path: str) -> str:
        """What to do with a request for data; empty for what is right."""
        with self.lock:
            self.gets += 1
            if not self.behave or self.spare in path or self.times <= 0 or self.gets % self.every:
                return ""
            self.times -= 1
        self.met.set()
        return self.behave


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FolderServer
    trickle = False

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.now += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.now)
        try:
            self._get()
        finally:
            with self.server.lock:
                self.server.now -= 1

    def _get(self) -> None:
        index = self.headers.get("Range", "").startswith("bytes=-")  # of a shard, asked for when a body is damaged
        data = "/c/" in self.path and "_streamloader" not in self.path and not index
        behaviour = self.server.behaviour(self.path) if data else ""
        if data and self.server.delay:
            self.server.released.wait(self.server.delay)
        if data and self.server.stall_every and self.server.gets % self.server.stall_every == 0:
            self.server.released.wait(self.server.seconds)
        if (behaviour == "stall" and self.server.released.wait(self.server.seconds)) or behaviour == "close":
            self.close_connection = True
        elif behaviour == "503":
            self._answer(503, b"slow down", {"Retry-After": "0"})
        else:
            self._file(body=True, damage=behaviour == "damage", fault=self.server.fault(self.path))

    def _file(self, body: bool, damage: bool = False, fault: str = "") -> None:
        if fault == "close":
            self.close_connection = True
            return
        if fault == "503":
            self._answer(503, b"slow down", {"Retry-After": "0"})
            return
        path = self.server.folder / self.path.split("?")[0].lstrip("/")
        if not path.is_file():
            self._answer(404, b"")
            return
        content = path.read_bytes()
        if damage:
            content = bytes(byte ^ 1 for byte in content)
        if fault == "flip":  # in the middle: a digit of a number, an entry of a table
            content = (
                content[: len(content) // 2]
                + bytes([content[len(content) // 2] ^ 1])
                + content[len(content) // 2 + 1 :]
            )
        elif fault == "short":
            content = content[: len(content) // 2]
        elif fault == "shift":  # another range, of the right length, without a word
            content = content[-1:] + content[:-1]
        self.trickle = fault == "trickle"
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        if not wanted:
            self._answer(200, content, {}, body)
            return
        low, high = wanted.split("-")
        start = int(low) if low else max(0, len(content) - int(high))
        stop = min(len(content), int(high) + 1) if low and high else len(content)
        if start >= len(content):
            self._answer(416, b"")
            return
        self._answer(206, content[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}, body)

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None, body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", "Fri, 20 Nov 2026 12:00:00 GMT")
        self.send_header("Accept-Ranges", "bytes")
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        if body:
            with contextlib.suppress(ConnectionError):
                for number in range(len(content) if self.trickle else 0):
                    self.wfile.write(content[number : number + 1])
                    if self.server.released.wait(1.0):
                        return
                self.wfile.write(content)


@contextlib.contextmanager
def folder_server(folder: Path) -> Iterator[FolderServer]:
    """Run the server in a thread until the block ends."""
    server = FolderServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":  # a server that can be killed: folder, port
    FolderServer(Path(sys.argv[1]), int(sys.argv[2])).serve_forever()
