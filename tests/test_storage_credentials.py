"""Keys, endpoints and regions: both planes find what botocore finds, on a server that checks signatures."""

from __future__ import annotations

import json
import re
import ssl
import stat
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from faulty import FaultyServer, faulty_server
from servers import S3Server

from streamloader.errors import AccessError, EndpointError
from streamloader.storage import open_store
from streamloader.storage.location import parse_location
from streamloader.storage.object_reader import open_object_reader
from streamloader.storage.s3 import open_s3

CONTENT = b"0123456789"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start from an environment that knows nothing."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "REGION", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.fixture
def url(seaweedfs: S3Server) -> str:
    url = seaweedfs.url()
    open_store(url, seaweedfs.storage_options).put("a", CONTENT)
    return url


def assert_every_plane_reads(store: Any) -> None:
    assert store.get("a") == CONTENT
    reader = store.reader()
    assert reader.kind == "http", reader.reason
    assert bytes(reader.read("a", 2, 5)) == b"234"
    by_obstore = open_object_reader(store._connection.location).below(store._folder)
    assert bytes(by_obstore.read("a", 2, 5)) == b"234"


def test_the_environment_is_enough(url: str, seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in seaweedfs.env.items():
        monkeypatch.setenv(name, value)
    assert_every_plane_reads(open_store(url))


def test_an_option_outranks_the_environment(url: str, seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    assert_every_plane_reads(open_store(url, seaweedfs.storage_options))


def test_a_profile_gives_keys_and_endpoint(url: str, seaweedfs: S3Server, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        f"[ours]\naws_access_key_id = {seaweedfs.key}\naws_secret_access_key = {seaweedfs.secret}\n"
    )
    (tmp_path / "config").write_text(f"[profile ours]\nregion = us-east-1\nendpoint_url = {seaweedfs.endpoint}\n")
    assert_every_plane_reads(open_store(url, {"profile": "ours"}))


def test_aws_profile_counts_as_the_option_does(
    url: str, seaweedfs: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text(
        f"[ours]\naws_access_key_id = {seaweedfs.key}\naws_secret_access_key = {seaweedfs.secret}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "ours")
    assert_every_plane_reads(open_store(url, {"endpoint_url": seaweedfs.endpoint}))


def test_keys_that_expire_are_renewed(url: str, seaweedfs: S3Server, tmp_path: Path) -> None:
    """A profile's credential_process gives keys that end in a second: each use must ask for new ones."""
    program = tmp_path / "keys.py"
    program.write_text(
        f"#!{sys.executable}\nimport json, pathlib\n"
        f"with pathlib.Path({str(tmp_path / 'asked')!r}).open('a') as log: log.write('x')\n"
        f"print({json.dumps(json.dumps(expiring_keys(seaweedfs)))})\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config").write_text(f"[profile ours]\ncredential_process = {program}\n")
    provider = open_s3(parse_location("s3://bucket", {"profile": "ours"})).provide_keys
    first, second = provider(), provider()
    assert first["access_key_id"] == second["access_key_id"] == seaweedfs.key
    assert len((tmp_path / "asked").read_text()) >= 2
    assert timedelta(0) < first["expires_at"] - datetime.now(UTC) <= timedelta(minutes=10)
    assert_every_plane_reads(open_store(url, {"profile": "ours", "endpoint_url": seaweedfs.endpoint}))


def expiring_keys(server: S3Server) -> dict[str, Any]:
    soon = datetime.now(UTC) + timedelta(seconds=30)
    return {
        "Version": 1,
        "AccessKeyId": server.key,
        "SecretAccessKey": server.secret,
        "Expiration": soon.isoformat(),
    }


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody trusts, with its key in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "streamloader test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return tmp_path / "cert.pem"


@pytest.fixture
def tls_server(certificate: Path) -> Iterator[FaultyServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with faulty_server(CONTENT, context) as server:
        yield server


def test_a_private_certificate_is_trusted_where_told(
    tls_server: FaultyServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": tls_server.endpoint}
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    stranger = open_store("s3://bucket", options)
    for ask in (lambda: stranger.get("a"), lambda: stranger.reader().read("a", 0, 1)):
        with pytest.raises(EndpointError, match="certificate"):
            ask()
    for verify in (str(certificate), False):
        assert_every_plane_reads(open_store("s3://bucket", {**options, "client_kwargs": {"verify": verify}}))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    assert_every_plane_reads(open_store("s3://bucket", options))


def signed_certificate(folder: Path, address: str, days: tuple[int, int]) -> ssl.SSLContext:
    """Return a server's settings with a certificate for `address` of a CA of its own, `ca.pem` in the folder."""
    now, keys = datetime.now(UTC), [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in ("test CA", "test server")]
    for number, name in enumerate(["ca", "server"]):
        builder = (
            x509.CertificateBuilder(names[0], names[number], keys[number].public_key(), x509.random_serial_number())
            .not_valid_before(now + timedelta(days=days[0]))
            .not_valid_after(now + timedelta(days=days[1] if number else 1))
            .add_extension(x509.BasicConstraints(ca=not number, path_length=None), critical=True)
        )
        if number:
            alternative = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
            builder = builder.add_extension(alternative, critical=False)
        pem = builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        (folder / f"{name}.pem").write_bytes(pem)
    coding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(keys[1].private_bytes(*coding))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return context


ASKS = {
    "sockets": lambda store: store.reader().read("a", 0, 1),
    "obstore": lambda store: open_object_reader(store._connection.location).read("a", 0, 1),
    "s3fs": lambda store: store.head("a"),
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize(
    ("address", "days", "trusted", "reason"),
    [
        ("127.0.0.1", (-2, 1), False, "issuer"),
        ("127.0.0.2", (-2, 1), True, "mismatch|NotValidForName"),
        ("127.0.0.1", (-2, -1), True, "expired"),
    ],
    ids=["unknown CA", "other host", "expired"],
)
def test_a_certificate_that_is_not_trusted_is_final_with_its_reason(
    tmp_path: Path, ask: str, address: str, days: tuple[int, int], trusted: bool, reason: str
) -> None:
    with faulty_server(CONTENT, signed_certificate(tmp_path, address, days)) as server:
        options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": server.endpoint}
        options["client_kwargs"] = {
            "region_name": "us-east-1",
            **({"verify": str(tmp_path / "ca.pem")} if trusted else {}),
        }
        store: Any = open_store("s3://bucket", options)
        store.retries.reached = True  # a run that was going on
        begin = time.monotonic()
        with pytest.raises(EndpointError, match="certificate is not trusted") as raised:
            store.retries.call(lambda: ASKS[ask](store))
        assert re.search(f"certificate verify failed: .*({reason})", str(raised.value), re.IGNORECASE)
        assert server.connections == 1
        assert time.monotonic() - begin < 10


def session_keys(token: str) -> str:
    return json.dumps({"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s", "SessionToken": token})


@pytest.mark.parametrize("ask", ["sockets", "obstore", "s3fs", "get"])
def test_expired_credentials_are_fetched_anew_once(tmp_path: Path, ask: str) -> None:
    asks = {**ASKS, "get": lambda store: store.get("a")}
    (tmp_path / "keys.json").write_text(session_keys("old"))
    (tmp_path / "config").write_text(f"[profile ours]\ncredential_process = cat {tmp_path / 'keys.json'}\n")
    with faulty_server(CONTENT) as server:
        server.token = "old"
        options = {"profile": "ours", "endpoint_url": server.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
        store: Any = open_store("s3://bucket", options)
        asks[ask](store)
        server.token, before = "new", server.gets
        (tmp_path / "keys.json").write_text(session_keys("new"))
        asks[ask](store)
        assert server.gets - before <= 2
        server.token, before = "newer", server.gets
        with pytest.raises(AccessError, match="the credentials have expired"):
            asks[ask](store)
        assert server.gets - before == 2
