"""A double of what gives out session tokens, in front of an S3 server that accepts only the present one.

with session_tokens(moto, folder, lives=50) as server:      # each token is good for 50 requests
    options = server.options("web identity", monkeypatch)   # where the client finds its keys
    server.tokens, server.asked, server.refused             # how many there were, were given out, came too late
"""

import contextlib
import hashlib
import json
import re
import threading
import urllib.request
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from faulty import EXPIRED, QuietHandler, QuietServer
from servers import S3Server

KINDS = ("function", "process", "container", "web identity", "sso")
START_URL = "https://start.example.org"
ROLE = "arn:aws:iam::123456789012:role/reader"
HOP_BY_HOP = ("transfer-encoding", "connection", "date", "server")


def ask(endpoint: str) -> dict[str, Any]:
    """A `credential_provider` that other processes can load."""
    with urllib.request.urlopen(f"{endpoint}/container", timeout=10) as response:
        return dict(json.load(response))


class SessionTokens(QuietServer):
    """Passes requests with the present token on to `behind`; a token ends after `lives` of them."""

    def __init__(self, behind: str, folder: Path, lives: int) -> None:
        super().__init__(_Handler)
        self.behind, self.folder, self.lives = behind, folder, lives
        self.lock = threading.Lock()
        self.tokens = self.asked = self.refused = self.left = 0
        self.broken = False  # whether nobody is given a token
        self.seconds = 3600.0  # until tokens expire, as they say
        self.next_token()

    @property
    def token(self) -> str:
        """The token that is accepted."""
        return f"token-{self.tokens}"

    def next_token(self) -> None:
        """Let the present token end; files with what is needed for the next one are replaced."""
        self.tokens, self.left = self.tokens + 1, self.lives
        for name, text in (("web-identity", f"web-{self.tokens}"), ("keys.json", json.dumps(self.keys()))):
            beside = self.folder / f"{name}.new"
            beside.write_text(text)
            beside.replace(self.folder / name)

    def keys(self) -> dict[str, Any]:
        """The keys of the present token, as containers and processes give them."""
        until = (datetime.now(UTC) + timedelta(seconds=self.seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = {"AccessKeyId": "key", "SecretAccessKey": "secret", "Token": self.token, "SessionToken": self.token}
        return {"Version": 1, **keys, "Expiration": until}

    def accepts(self, token: str) -> bool:
        """Whether a request with this token is passed on, which takes one of its lives."""
        with self.lock:
            if self.left == 0:
                self.next_token()
            self.left -= token == self.token
            self.refused += token != self.token
            return token == self.token

    def options(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Prepare environment and files for a kind of credentials; return the storage options."""
        config = self.folder / "config"
        options: dict[str, Any] = {"endpoint_url": self.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
        if kind == "function":
            return {**options, "credential_provider": partial(ask, self.endpoint)}
        if kind == "process":
            cat = f"sh -c 'echo asked >> {self.folder / 'asked'}; cat {self.folder / 'keys.json'}'"
            config.write_text(f"[default]\ncredential_process = {cat}\n")
        elif kind == "container":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{self.endpoint}/container")
        elif kind == "web identity":
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(self.folder / "web-identity"))
            monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"{self.endpoint}/sts")
        elif kind == "sso":
            lines = [f"sso_start_url = {START_URL}", "sso_region = us-east-1", "sso_account_id = 123456789012"]
            config.write_text("\n".join(["[default]", *lines, "sso_role_name = reader", ""]))
            cache = self.folder / ".aws" / "sso" / "cache"
            cache.mkdir(parents=True)
            token = {"accessToken": "sso", "expiresAt": "2999-01-01T00:00:00Z", "startUrl": START_URL}
            (cache / f"{hashlib.sha1(START_URL.encode()).hexdigest()}.json").write_text(json.dumps(token))
            # botocore has read HOME when it was imported
            monkeypatch.setattr("botocore.credentials.SSOProvider._SSO_TOKEN_CACHE_DIR", str(cache))
            monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", self.endpoint)
        return options

    @property
    def given(self) -> int:
        """How often somebody has asked for a token."""
        asked = self.folder / "asked"
        return self.asked + (len(asked.read_text().split()) if asked.exists() else 0)


class _Handler(QuietHandler):
    server: SessionTokens

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if path in ("/container", "/sts", "/sts/", "/federation/credentials"):
            self.server.asked += 1
            if self.server.broken:
                self.respond(500, b"out of order")
            else:
                self._give(path, body)
        elif not self.server.accepts(self.headers.get("X-Amz-Security-Token", "")):
            self.respond(400, EXPIRED)
        else:
            self._pass_on(body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _give(self, path: str, body: bytes) -> None:
        keys = self.server.keys()
        if path == "/container":
            self.respond(200, json.dumps(keys).encode(), {"Content-Type": "application/json"})
        elif path == "/federation/credentials":
            assert self.headers["x-amz-sso_bearer_token"] == "sso"
            until = datetime.fromisoformat(keys["Expiration"]).timestamp() * 1000
            role = {"accessKeyId": "key", "secretAccessKey": "secret", "sessionToken": keys["Token"]}
            self.respond(200, json.dumps({"roleCredentials": {**role, "expiration": int(until)}}).encode())
        else:
            identity = parse_qs(body.decode())["WebIdentityToken"][0]
            if identity != f"web-{self.server.tokens}":
                self.respond(400, b"<ErrorResponse><Error><Code>InvalidIdentityToken</Code></Error></ErrorResponse>")
                return
            names = ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
            inner = "".join(f"<{name}>{keys[name]}</{name}>" for name in names)
            action = "AssumeRoleWithWebIdentity"
            result = f"<{action}Result><Credentials>{inner}</Credentials></{action}Result>"
            xmlns = "https://sts.amazonaws.com/doc/2011-06-15/"
            self.respond(200, f'<{action}Response xmlns="{xmlns}">{result}</{action}Response>'.encode())

    def _pass_on(self, body: bytes) -> None:
        sent = {name: value for name, value in self.headers.items() if not re.match("x-amz-sec|expect", name, 2)}
        status, content, headers = self.passed(self.server.behind, body, sent)
        self.respond(status, content, {k: v for k, v in headers.items() if k.lower() not in HOP_BY_HOP})

    def respond(self, status: int, body: bytes = b"", headers: Any = None) -> None:
        if self.command == "HEAD" and status < 400:  # the length is that of the object
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            return
        super().respond(status, body, headers)


def session_tokens(behind: S3Server, folder: Path, lives: int) -> contextlib.AbstractContextManager[SessionTokens]:
    """Run the server in a thread until the block ends."""
    return SessionTokens(behind.endpoint, folder, lives).running()
