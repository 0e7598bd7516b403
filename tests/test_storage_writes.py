"""Bodies that are written over plain sockets: nothing that changed on its way is stored, whatever the server knows."""

import base64
import hashlib
import socket
import threading
from typing import ClassVar, NamedTuple

import crc32c
import pytest
from faulty import QuietHandler, serving
from servers import seaweedfs_server

from streamloader.storage import open_store
from streamloader.storage.s3 import CHECKSUM, S3Client
from streamloader.storage.url import parse_location


class Put(NamedTuple):
    """A PUT: its body, and what its headers say of it."""

    body: bytes
    sha256: str
    crc: str


class Handler(QuietHandler):
    """An S3 server that compares checksums, ignores their header, or does not accept it; `puts` are the requests."""

    protocol_version = "HTTP/1.1"
    kind = ""
    puts: ClassVar[list[Put]] = []

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        one = Put(body, self.headers["X-Amz-Content-SHA256"], self.headers.get(CHECKSUM, ""))
        self.puts.append(one)
        self.send_response(501 if self.kind == "rejects" and one.crc else 200)
        if one.crc and self.kind == "compares":
            self.send_header(CHECKSUM, one.crc)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def client(kind):
    Handler.kind = kind
    Handler.puts.clear()
    with serving(Handler) as server:
        options = {"key": "key", "secret": "secret", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        yield S3Client(parse_location("s3://bucket", options))


@pytest.mark.parametrize("kind", ["compares"])
def test_a_server_that_compares_checksums_gets_no_hashes(client):
    for body in (b"one", b"two"):
        client.put("a", body)
        crc = base64.b64encode(crc32c.crc32c(body).to_bytes(4, "big")).decode()
        assert Handler.puts.pop() == Put(body, "UNSIGNED-PAYLOAD", crc)
    assert not Handler.puts


@pytest.mark.parametrize("kind", ["ignores", "rejects"])
def test_a_server_that_does_not_compare_gets_signed_bodies_after_one_attempt(client):
    for body in (b"one", [b"t", b"wo"]):
        client.put("a", body)
    assert [one.body for one in Handler.puts] == [b"one", b"one", b"two"]
    signed = [one.sha256 == hashlib.sha256(one.body).hexdigest() for one in Handler.puts]
    assert signed == [False, True, True]
    assert not Handler.puts[-1].crc


def test_a_body_that_changed_on_its_way_is_not_stored_but_sent_again():
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


def _carry(line, endpoint, changes):
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


def _pump(source, target, text, changes):
    with source, target:
        try:
            while data := source.recv(1 << 16):
                if text and changes.is_set() and text in data:
                    data = data.replace(text, b"aftex!", 1)
                    changes.clear()
                target.sendall(data)
        except OSError:
            return
