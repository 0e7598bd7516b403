"""A stand-in for AWS on loopback: every S3 endpoint of every region, over TLS, in front of a server that keeps objects.

with standing_in_for_aws(moto.endpoint, {"photos": "eu-central-1"}, folder) as aws:
    aws.requests        # (host, method, status)
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DOMAIN = "amazonaws.com"
HOP_BY_HOP = ("host", "expect", "transfer-encoding", "connection")
REGIONS = ("us-east-1", "us-west-2", "eu-west-1", "eu-central-1")


class Aws(ThreadingHTTPServer):
    """Answers as S3 does where a bucket or the scope of a signature is elsewhere; else `behind` answers."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, behind: str, regions: Mapping[str, str], context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.behind = urlsplit(behind).netloc
        self.regions = regions
        self.requests: list[tuple[str, str, int]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Aws

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        body = self._body()
        host = self.headers["Host"]
        found = re.fullmatch(rf"(?:([a-z0-9-]+)\.)?s3(?:\.([a-z]+-[a-z]+-\d))?\.{DOMAIN}", host)
        assert found, host
        at = found[2] or ""
        path = self.path if found[1] is None else f"/{found[1]}{self.path}"
        home = self.server.regions[re.split("[/?]", path)[1]]
        scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/s3/", self.headers.get("Authorization", ""))
        if at not in ("", home) or (not at and found[1] is None and home != "us-east-1"):
            self._refuse(301, "PermanentRedirect", "must be addressed using the specified endpoint", home)
        elif scope and scope[1] != home:
            self._refuse(400, "AuthorizationHeaderMalformed", f"expecting '{home}'", home)
        else:
            self._pass_on(path, body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _refuse(self, status: int, code: str, message: str, region: str) -> None:
        where = f"<Region>{region}</Region>" if status == 400 else ""
        body = f"<Error><Code>{code}</Code><Message>{message}</Message>{where}</Error>".encode()
        headers = {"x-amz-bucket-region": region} if status == 301 or self.command == "HEAD" else {}
        self._answer(status, {**headers, "Content-Length": str(len(body))}, b"" if self.command == "HEAD" else body)

    def _pass_on(self, path: str, body: bytes) -> None:
        behind = http.client.HTTPConnection(self.server.behind)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        behind.request(self.command, path, body, headers)
        answer = behind.getresponse()
        content = answer.read()
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in ("connection", "date")}
        if "Content-Length" not in kept:
            kept["Content-Length"] = str(len(content))
        kept.pop("Transfer-Encoding", None)
        behind.close()
        self._answer(answer.status, kept, content)

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.server.requests.append((self.headers["Host"], self.command, status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _certificates(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Write a CA of the tests' own, and return it with a server's settings for every endpoint of S3."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("test CA", "S3")]
    hosts = [f"{bucket}s3.{region}{DOMAIN}" for bucket in ("", "*.") for region in ("", *(f"{r}." for r in REGIONS))]
    now = datetime.now(UTC)
    for which, (key, name) in enumerate(zip(keys, names, strict=True)):
        builder = (
            x509.CertificateBuilder(names[0], name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=which == 0, path_length=None), critical=True)
        )
        if which == 1:
            builder = builder.add_extension(x509.SubjectAlternativeName([*map(x509.DNSName, hosts)]), critical=False)
        (folder / f"{which}.pem").write_bytes(
            builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
    (folder / "key.pem").write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "1.pem", folder / "key.pem")
    return folder / "0.pem", context


@contextlib.contextmanager
def standing_in_for_aws(behind: str, regions: Mapping[str, str], folder: Path) -> Iterator[Aws]:
    """Run the stand-in; this process resolves AWS's names to it and trusts its certificates meanwhile."""
    authority, context = _certificates(folder)
    resolve = socket.getaddrinfo
    with Aws(behind, regions, context) as server:

        def to_loopback(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            name = host.decode() if isinstance(host, bytes) else host
            if name and name.endswith(f".{DOMAIN}"):
                return resolve("127.0.0.1", server.server_port, *args, **kwargs)
            return resolve(host, port, *args, **kwargs)

        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        environment = {"AWS_CA_BUNDLE": str(authority)}
        with mock.patch.object(socket, "getaddrinfo", to_loopback), mock.patch.dict("os.environ", environment):
            yield server
        server.shutdown()
