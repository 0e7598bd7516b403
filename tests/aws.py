"""A stand-in for AWS on loopback: every S3 endpoint of every region, over TLS, in front of a server that keeps objects.

with standing_in_for_aws(moto.endpoint, {"photos": "eu-central-1"}, folder) as aws:
    aws.requests        # (host, method, status)
"""

import contextlib
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from faulty import QuietHandler, QuietServer, certified

DOMAIN = "amazonaws.com"
HOP_BY_HOP = ("host", "expect", "transfer-encoding", "connection", "date")
REGIONS = ("us-east-1", "us-west-2", "eu-west-1", "eu-central-1")


def own(headers: Mapping[str, str]) -> dict[str, str]:
    """Those headers that are not of one connection."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


class Aws(QuietServer):
    """Answers as S3 does where a bucket or the scope of a signature is elsewhere; else `behind` answers."""

    def __init__(self, behind: str, regions: Mapping[str, str], context: ssl.SSLContext) -> None:
        super().__init__(_Handler, tls=context)
        self.behind = behind
        self.regions = regions
        self.requests: list[tuple[str, str, int]] = []


class _Handler(QuietHandler):
    server: Aws

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
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

    def _refuse(self, status: int, code: str, message: str, region: str) -> None:
        where = f"<Region>{region}</Region>" if status == 400 else ""
        body = f"<Error><Code>{code}</Code><Message>{message}</Message>{where}</Error>".encode()
        self.respond(status, body, {"x-amz-bucket-region": region} if status == 301 or self.command == "HEAD" else {})

    def _pass_on(self, path: str, body: bytes) -> None:
        status, content, headers = self.passed(self.server.behind, body, own(self.headers), path=path)
        self.respond(status, content, own(headers))

    def respond(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.server.requests.append((self.headers["Host"], self.command, status))
        super().respond(status, body, headers)


@contextlib.contextmanager
def standing_in_for_aws(behind: str, regions: Mapping[str, str], folder: Path) -> Iterator[Aws]:
    """Run the stand-in; this process resolves AWS's names to it and trusts its certificates meanwhile."""
    hosts = [f"{bucket}s3.{region}{DOMAIN}" for bucket in ("", "*.") for region in ("", *(f"{r}." for r in REGIONS))]
    context = certified(folder, hosts)
    resolve = socket.getaddrinfo
    with Aws(behind, regions, context).running() as server:

        def to_loopback(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            name = host.decode() if isinstance(host, bytes) else host
            if name and name.endswith(f".{DOMAIN}"):
                return resolve("127.0.0.1", server.server_port, *args, **kwargs)
            return resolve(host, port, *args, **kwargs)

        environment = {"AWS_CA_BUNDLE": str(folder / "ca.pem")}
        with mock.patch.object(socket, "getaddrinfo", to_loopback), mock.patch.dict("os.environ", environment):
            yield server
