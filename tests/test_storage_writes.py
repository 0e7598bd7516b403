"""Bodies that are written over plain sockets: nothing that changed on its way is stored, whatever the server knows."""

from __future__ import annotations

import base64
import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import crc32c
import pytest
from servers import seaweedfs_server

from streamloader.storage import open_store
from streamloader.storage.http_pool import Pool
from streamloader.storage.http_writer import HttpWriter
from streamloader.storage.location import parse_location
from streamloader.storage.s3 import CHECKSUM, open_s3

Kind = Literal["compares", "ignores", "refuses"]


@dataclass
class Seen:
    """One PUT that came: what was said of its body, and whether it was so."""

    sha256: str
    crc: str
    body: bytes = field(repr=False)

    @property
    def signed(self) -> bool:
        return self.sha256 == hashlib.sha256(self.body).hexdigest()

    @property
    def summed(self) -> bool:
        return self.crc == base64.b64encode(crc32c.crc32c(self.body).to_bytes(4, "big")).decode()


class Server(ThreadingHTTPServer):
    """An S3 server that knows the checksum header, or not; `seen` are its PUTs."""

    daemon_threads = True

    def __init__(self, kind: Kind) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind = kind
        self.seen: list[Seen] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        one = Seen(self.headers["X-Amz-Content-SHA256"], self.headers.get(CHECKSUM, ""), body)
        self.server.seen.append(one)
        refused = self.server.kind == "refuses" and one.crc
        self.send_response(501 if refused else 200)
        if one.crc and self.server.kind == "compares":
            self.send_header(CHECKSUM, one.crc)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def writer_of(server: Server) -> HttpWriter:
    url = f"http://127.0.0.1:{server.server_port}"
    s3 = open_s3(parse_location("s3://bucket", {"key": "key", "secret": "secret", "endpoint_url": url}))
    return HttpWriter(Pool(s3), "", url)


@pytest.mark.parametrize("server", ["compares"], indirect=True)
def test_a_server_that_compares_checksums_gets_no_hashes(server: Server) -> None:
    writer = writer_of(server)
    for body in (b"one", b"two"):
        writer.put("a", body)
    assert [(one.sha256, one.summed) for one in server.seen] == [("UNSIGNED-PAYLOAD", True)] * 2


@pytest.mark.parametrize("server", ["ignores", "refuses"], indirect=True)
def test_a_server_that_does_not_compare_gets_signed_bodies_after_one_attempt(server: Server) -> None:
    writer = writer_of(server)
    for body in (b"one", [b"t", b"wo"]):
        writer.put("a", body)
    assert [one.body for one in server.seen] == [b"one", b"one", b"two"]
    assert [one.signed for one in server.seen] == [False, True, True]
    assert not server.seen[-1].crc


def test_a_body_that_changed_on_its_way_is_not_stored_but_sent_again() -> None:
    with seaweedfs_server() as real, socket.create_server(("127.0.0.1", 0)) as line:
        changes = threading.Event()
        threading.Thread(target=_carry, args=(line, real.endpoint, changes), daemon=True).start()
        url = real.url()
        there = open_store(url, real.storage_options)
        address = f"http://127.0.0.1:{line.getsockname()[1]}"
        through = open_store(url, {**real.storage_options, "endpoint_url": address})
        through.put("a", b"before" * 1000)
        changes.set()
        through.put("a", b"after!" * 1000)
        assert not changes.is_set(), "nothing was changed"
        assert there.get("a") == b"after!" * 1000


def _carry(line: socket.socket, endpoint: str, changes: threading.Event) -> None:
    """Carry bytes between clients of `line` and the server; where `changes` is set, one letter becomes another."""
    host, port = endpoint.removeprefix("http://").split(":")
    while True:
        try:
            client, _ = line.accept()
        except OSError:
            return
        server = socket.create_connection((host, int(port)))
        for source, target, text in ((client, server, b"after!"), (server, client, b"")):
            threading.Thread(target=_pump, args=(source, target, text, changes), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, text: bytes, changes: threading.Event) -> None:
    with source, target:
        try:
            while data := source.recv(1 << 16):
                if text and changes.is_set() and text in data:
                    data = data.replace(text, b"aftex!", 1)
                    changes.clear()
                target.sendall(data)
        except OSError:
            return
