"""Bodies that are written over plain sockets: nothing that changed on its way is stored, whatever the server knows."""

import base64
import hashlib
import threading
from collections import namedtuple
from typing import ClassVar

import crc32c
import pytest
from faulty import QuietHandler, serving

from streamloader.storage import open_store
from streamloader.storage.s3 import CHECKSUM, S3Client
from streamloader.storage.url import parse_location

# a PUT: its body, and its headers
Put = namedtuple("Put", "body sha256 crc")


class Handler(QuietHandler):
    """An S3 server that compares checksums, ignores their header, or does not accept it; `puts` are the requests."""

    kind = ""
    puts: ClassVar[list[Put]] = []

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        one = Put(body, self.headers["X-Amz-Content-SHA256"], self.headers.get(CHECKSUM, ""))
        self.puts.append(one)
        compares = one.crc and self.kind == "compares"
        self.respond(501 if self.kind == "rejects" and one.crc else 200, b"", {CHECKSUM: one.crc} if compares else {})


@pytest.fixture
def client(kind):
    Handler.kind = kind
    Handler.puts.clear()
    with serving(Handler) as server:
        options = {"key": "key", "secret": "secret", "endpoint_url": server.endpoint}
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


def test_a_body_that_changed_on_its_way_is_not_stored_but_sent_again(seaweedfs):
    class Changing(QuietHandler):
        """Passes requests on to the server; where `changes` is set, one letter of a body becomes another."""

        def do_PUT(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if changes.is_set():
                body = body.replace(b"after!", b"aftex!", 1)
                changes.clear()
            self.respond(*self.passed(seaweedfs.endpoint, body, self.headers))

    changes = threading.Event()
    url, options = seaweedfs.url(), seaweedfs.storage_options
    with serving(Changing) as line:
        through = open_store(url, {**options, "endpoint_url": line.endpoint})
        through.put("a", b"before" * 1000)
        changes.set()
        through.put("a", b"after!" * 1000)
        assert not changes.is_set(), "nothing was changed"
        assert open_store(url, options).get("a") == b"after!" * 1000
