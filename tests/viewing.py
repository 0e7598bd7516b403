"""A viewer's server on a port of this machine, and a browser without JavaScript that asks it."""

import asyncio
import io
import re
import threading
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from http.client import HTTPConnection
from http.cookies import SimpleCookie
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from streamloader.view.server import Server
from streamloader.view.viewer import Viewer, ViewOptions

SOURCE = re.compile(r'(?:src|href)="([^"#]+)')


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()

    @property
    def addresses(self) -> list[str]:
        """What the page links, and the images and sounds that it shows."""
        return [unescape(each) for each in SOURCE.findall(self.text)]

    @property
    def media(self) -> list[str]:
        """The images and sounds that the page shows."""
        return [each for each in self.addresses if each.startswith("/media/")]


class Client:
    """Asks one server, with the cookie that its link sets. `link`: what the command prints."""

    def __init__(self, link: str) -> None:
        parts = urlsplit(link)
        self.host, self.port, self.cookie = parts.hostname or "", parts.port or 0, ""
        first = self.get(f"{parts.path}?{parts.query}")
        assert first.status == 303, first.text
        self.cookie = next(iter(SimpleCookie(first.headers["Set-Cookie"]).items()))[1].OutputString().split(";")[0]
        self.first = first.headers["Location"]

    def get(self, path: str, **headers: str) -> Answer:
        """Ask for a page. Names of `headers` have "_" for "-"."""
        given = {"Host": f"{self.host}:{self.port}", "Cookie": self.cookie}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("GET", path, headers={name: value for name, value in given.items() if value})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()


@contextmanager
def serving(options: ViewOptions) -> Iterator[Client]:
    """Serve a viewer's pages in a thread."""
    server, loop = Server(Viewer(options), "127.0.0.1", 0), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
        yield Client(server.address())
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def sound(pitch: float, seconds: float = 0.25) -> bytes:
    """A tone as WAV."""
    out, rate = io.BytesIO(), 8000
    samples = 9000 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return out.getvalue()


HOSTILE = "<script>document.title='hacked'</script>\"'><img src=x onerror=alert(1)> & \N{RIGHT-TO-LEFT OVERRIDE}"
FIELDS = {
    "image": "bytes:jpeg",
    "boxes": "ragged:float32[4]",
    "clip": "bytes:wav",
    "caption": "text",
    "tokens": "ragged:int32",
    "vector": "float32[128]",
    "plane": "float32[24,36]",
    "frames": "float32[4,16,16]",
    "label": "int64",
    "flag": "bool",
    "raw": "bytes",
}


def value(i: int) -> dict[str, Any]:
    """The values of sample i, of every kind that is shown."""
    from datasets import encoded, picture

    return {
        "image": encoded(picture(i, 90, 120), "jpeg"),
        "boxes": np.array([[10, 10, 40, 30], [60, 20, 30, 50]], np.float32)[: i % 3],
        "clip": sound(200 + i),
        "caption": f"{HOSTILE} {i}",
        "tokens": np.arange(i % 90, dtype=np.int32) + 32,
        "vector": np.sin(np.arange(128) / 9 + i).astype(np.float32),
        "plane": np.add.outer(np.arange(24), np.arange(36)).astype(np.float32) * i,
        "frames": np.full((4, 16, 16), i, np.float32),
        "label": i % 3,
        "flag": i % 2 == 0,
        "raw": bytes(range(i % 256)),
    }
