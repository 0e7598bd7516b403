"""A web server of a folder, with ranges, that stalls, throttles or dies on demand when data files are asked for.

with folder_server(path) as server:
    server.behave = "stall"      # or "503", "close", "damage", ""; for requests of shards, not for paths with `spare`
    server.every = 50            # only each 50th of them; a "stall" lasts `seconds`, for ever without
    server.faults["/zarr.json"] = ["trickle", "flip", "503"]   # of the next GETs of a path
    StreamingDataset(server.url, ...)
"""

import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from faulty import QuietHandler, QuietServer


class FolderServer(QuietServer):
    """Treats the next `times` requests for data badly; `gets` counts them all, `met` is set once one was."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(_Handler, port)
        self.url = self.endpoint
        self.faults: dict[str, list[str]] = {}
        self.contents: dict[str, list[bytes]] = {}  # in place of those of the next GETs of a path
        self.paths: list[str] = []
        self.ranges: list[tuple[str, str]] = []  # of the GETs of paths
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


class _Handler(QuietHandler):
    server: FolderServer

    def do_HEAD(self) -> None:
        self._file("")

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.now += 1
            self.server.ranges.append((self.path, self.headers.get("Range", "")))
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
        if behaviour == "stall":
            behaviour = "close" if self.server.released.wait(self.server.seconds) else ""
        self._file(behaviour or self.server.fault(self.path))

    def _file(self, fault: str) -> None:
        path = self.server.folder / self.path.split("?")[0].lstrip("/")
        if path.is_file():
            contents = [one for text, one in self.server.contents.items() if text in self.path and one]
            self.respond_badly(fault, contents[0].pop(0) if contents else path.read_bytes())
        else:
            self.respond(404)


def folder_server(folder: Path) -> AbstractContextManager[FolderServer]:
    """Run the server in a thread until the block ends."""
    return FolderServer(folder).running()


def location(endpoint: str, plane: str, name: str = "data") -> tuple[str, dict[str, Any]]:
    """Return the URL and storage options by which a plane reads a dataset."""
    if plane != "s3":
        return f"{endpoint}/{name}", {} if plane == "http" else {"encoded": False}  # an option that only fsspec knows
    s3 = {"key": "k", "secret": "s", "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    return f"s3://{name}", s3


if __name__ == "__main__":  # a server that can be killed: folder, port
    FolderServer(Path(sys.argv[1]), int(sys.argv[2])).serve_forever()
