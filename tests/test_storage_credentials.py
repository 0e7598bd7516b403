"""Keys, endpoints and regions: both planes find what botocore finds, on a server that checks signatures."""

import json
import re
import time
from datetime import UTC, datetime, timedelta

import pytest
from faulty import certified, faulty_server
from servers import STORE_CALLS
from torchrun import run_python

from streamloader.errors import AccessError, EndpointError
from streamloader.storage import open_store
from streamloader.storage.s3 import S3Client
from streamloader.storage.url import parse_location
from streamloader.testing import Fault, FaultProxy

CONTENT = b"0123456789"
pytestmark = pytest.mark.usefixtures("no_keys", "patient")


@pytest.fixture
def url(seaweedfs):
    url = seaweedfs.url()
    open_store(url, seaweedfs.storage_options).put("a", CONTENT)
    return url


def assert_every_plane_reads(store):
    assert store.get("a") == CONTENT
    reader = store.reader()
    assert reader.kind == "http", reader.reason
    assert bytes(reader.read("a", 2, 5)) == b"234"


def test_an_option_outranks_the_environment(url, seaweedfs, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert_every_plane_reads(open_store(url, seaweedfs.storage_options))


@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_profile_gives_keys_and_endpoint(by, url, seaweedfs, tmp_path, monkeypatch):
    keys = f"[ours]\naws_access_key_id = {seaweedfs.key}\naws_secret_access_key = {seaweedfs.secret}\n"
    (tmp_path / "credentials").write_text(keys)
    (tmp_path / "config").write_text(f"[profile ours]\nregion = us-east-1\nendpoint_url = {seaweedfs.endpoint}\n")
    if by == "variable":
        monkeypatch.setenv("AWS_PROFILE", "ours")
    assert_every_plane_reads(open_store(url, {"profile": "ours"} if by == "option" else {}))


def test_keys_that_expire_are_renewed(url, seaweedfs, tmp_path):
    """A profile's credential_process gives keys that end in 30 s: each client asks for new ones."""
    soon = (datetime.now(UTC) + timedelta(seconds=30)).isoformat()
    write_keys(tmp_path, seaweedfs.key, seaweedfs.secret, Expiration=soon)
    s3 = S3Client(parse_location("s3://bucket", {"profile": "ours"}))
    assert s3.keys().access_key == s3.keys().access_key == seaweedfs.key
    assert len((tmp_path / "asked").read_text().split()) >= 2
    assert_every_plane_reads(open_store(url, {"profile": "ours", "endpoint_url": seaweedfs.endpoint}))


def write_keys(folder, key, secret, **more):
    """Write a profile `ours`, whose process returns these keys and appends a line to `asked`."""
    keys = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, **more}
    (folder / "keys.json").write_text(json.dumps(keys))
    process = f"sh -c 'echo asked >> {folder / 'asked'}; cat {folder / 'keys.json'}'"
    (folder / "config").write_text(f"[profile ours]\ncredential_process = {process}\n")


def test_a_private_certificate_is_trusted_where_an_option_or_a_variable_names_it(tmp_path, monkeypatch):
    with faulty_server(CONTENT, certified(tmp_path, ["127.0.0.1"])) as server:
        options = {"key": "k", "secret": "s", "endpoint_url": server.endpoint}
        for verify in (str(tmp_path / "ca.pem"), False):
            assert_every_plane_reads(open_store("s3://bucket", {**options, "client_kwargs": {"verify": verify}}))
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        assert_every_plane_reads(open_store("s3://bucket", options))


ASKS = ("read", "head", "get")


@pytest.mark.quick(5)
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize(
    ("address", "days", "trusted", "reason"),
    [
        ("127.0.0.1", (-2, 1), False, "self.signed"),
        ("127.0.0.2", (-2, 1), True, "mismatch|NotValidForName"),
        ("127.0.0.1", (-2, -1), True, "expired"),
    ],
    ids=["unknown certificate", "other host", "expired"],
)
def test_a_certificate_that_is_not_trusted_is_final_with_its_reason(tmp_path, ask, address, days, trusted, reason):
    with faulty_server(CONTENT, certified(tmp_path, [address], days)) as server:
        client = {"region_name": "us-east-1", **({"verify": str(tmp_path / "ca.pem")} if trusted else {})}
        options = {"key": "k", "secret": "s", "endpoint_url": server.endpoint, "client_kwargs": client}
        store = open_store("s3://bucket", options)
        store.retries.reached = True  # a run that was going on
        begin = time.monotonic()
        with pytest.raises(EndpointError, match="certificate is not trusted") as raised:
            store.retries.call(lambda: STORE_CALLS[ask](store))
        assert re.search(f"certificate verify failed: .*({reason})", str(raised.value), re.IGNORECASE)
        assert server.connections == 1
        assert time.monotonic() - begin < 60


@pytest.mark.parametrize("ask", ["read", "get", "list"])
@pytest.mark.parametrize("options", [{}, {"encoded": False}], ids=["obstore", "fsspec"])
def test_a_certificate_that_is_not_trusted_is_final_over_https_too(tmp_path, options, ask):
    with faulty_server(CONTENT, certified(tmp_path, ["127.0.0.1"])) as server:
        store = open_store(f"{server.endpoint}/folder", options)
        store.retries.reached = True
        with pytest.raises(EndpointError, match=r"not trusted \(certificate verify failed: \w.*SSL_CERT_FILE \(https"):
            store.retries.call(lambda: STORE_CALLS[ask](store))
        assert server.connections == 1


READ_OVER_HTTPS = """
import sys
from streamloader.storage import open_store

for options in ({}, {"encoded": False}):
    store = open_store(sys.argv[1], options)
    print(store.reader().kind, *map(len, (store.read("a", 0, 2), store.get("a"))))
"""


@pytest.mark.long
def test_the_variable_in_the_remedy_makes_https_trust_a_private_certificate(tmp_path):
    """In a process of its own, since aiohttp reads it once."""
    with faulty_server(CONTENT, certified(tmp_path, ["127.0.0.1"])) as server:
        certificate = str(tmp_path / "ca.pem")
        done = run_python("-c", READ_OVER_HTTPS, f"{server.endpoint}/folder", SSL_CERT_FILE=certificate)
    assert done.stdout.splitlines() == [f"{kind} 2 {len(CONTENT)}" for kind in ("obstore", "fsspec")]


@pytest.mark.quick(4)
@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("ask", ASKS)
def test_expired_credentials_are_renewed_once(tmp_path, monkeypatch, ask, status):
    monkeypatch.setattr("faulty.EXPIRED_STATUS", status)
    write_keys(tmp_path, "k", "s", SessionToken="old")
    with faulty_server(CONTENT) as server:
        server.token = "old"
        options = {"profile": "ours", "endpoint_url": server.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
        store = open_store("s3://bucket", options)
        STORE_CALLS[ask](store)
        server.token, before = "new", server.gets
        write_keys(tmp_path, "k", "s", SessionToken="new")
        STORE_CALLS[ask](store)
        assert server.gets - before <= 2
        server.token, before = "newer", server.gets
        with pytest.raises(AccessError, match="the credentials have expired"):
            STORE_CALLS[ask](store)
        assert server.gets - before == 2


def test_an_object_that_is_missing_is_none_also_while_keys_are_renewed(moto):
    with FaultProxy(moto.endpoint, [Fault("403", method="HEAD", times=1)]) as proxy:
        store = open_store(moto.url(), {**moto.storage_options, "endpoint_url": proxy.endpoint})
        assert store.head("missing") is None
        assert proxy.counts["403"] == 1
