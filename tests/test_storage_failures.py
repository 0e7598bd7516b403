"""Wrong names, keys and endpoints, on real servers: one line that names the URL and the remedy, and soon."""

import errno
import re
import socket
import sys
import time
from types import SimpleNamespace

import pytest
from faulty import QuietHandler, serving
from servers import STORE_CALLS

from streamloader.errors import (
    AccessError,
    EndpointError,
    NotFoundError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from streamloader.storage import open_store
from streamloader.storage.retry import storage_error, translated
from streamloader.storage.url import parse_location

FIRST_CONTACT_SECONDS = 60

ASKS = ("get", "list", "put", "read")


def message_of(store, ask, kind):
    """Ask, and return the one line of the error that it must raise soon."""
    started = time.monotonic()
    with pytest.raises(kind) as raised:
        STORE_CALLS[ask](store)
    assert time.monotonic() - started < FIRST_CONTACT_SECONDS
    line = str(raised.value)
    assert raised.value.remedy
    assert store.url in line
    assert "\n" not in line
    assert len(line) < 500
    return line


@pytest.fixture
def full_port():
    """A port whose queue of connections is full: connecting to it hangs, as with a firewall."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.mark.quick(1)
def test_a_bucket_that_does_not_exist_is_named(s3):
    store = open_store("s3://no-such-bucket-of-ours/x", s3.storage_options)
    for ask in ("get", "list", "read"):
        assert "its bucket does not exist" in message_of(store, ask, NotFoundError)


@pytest.mark.parametrize("wrong", [{"secret": "wrong"}, {"key": "wrong"}])
def test_wrong_keys_are_an_error_that_does_not_show_them(seaweedfs, wrong):
    store = open_store(seaweedfs.url(), {**seaweedfs.storage_options, **wrong})
    for ask in ASKS:
        line = message_of(store, ask, AccessError)
        assert "streamloader-secret" not in line
        assert "storage_options" in line


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "endpoint",
    ["http://127.0.0.1:9", "http://no.such.host.invalid", "https://127.0.0.1:9", "https to http", "full port"],
)
def test_an_endpoint_that_cannot_be_reached_is_an_error_at_once(endpoint, moto, full_port):
    endpoint = endpoint.replace("https to http", moto.endpoint.replace("http:", "https:"))
    endpoint = endpoint.replace("full port", f"http://127.0.0.1:{full_port}")
    options = {"key": "k", "secret": "s", "endpoint_url": endpoint}
    store = open_store("s3://bucket/x", {**options, "config_kwargs": {"connect_timeout": 0.25}})
    for ask in ASKS:
        assert "the endpoint cannot be reached" in message_of(store, ask, EndpointError)


@pytest.mark.parametrize("url", ["s3://bucket/x", "https://example.invalid/x"])
def test_a_proxy_of_the_environment_that_cannot_be_reached_is_named_without_its_password(url, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hidden-password@127.0.0.1:9")
    options = {"key": "k", "secret": "s", "client_kwargs": {"region_name": "us-east-1"}} if url[:2] == "s3" else {}
    with pytest.raises(EndpointError, match=r"https_proxy=http://127\.0\.0\.1:9") as raised:
        open_store(url, options).read("x", 0, 9)
    assert "hidden" not in str(raised.value)


def test_a_connection_error_of_httpx_is_an_unreachable_endpoint(monkeypatch):
    """By it `hf://` ends, which huggingface_hub reads: its class is no OSError."""
    kind = type("ConnectError", (type("HTTPError", (Exception,), {}),), {"__module__": "httpx2"})
    monkeypatch.setitem(sys.modules, "httpx2", SimpleNamespace(HTTPError=kind.__mro__[1]))
    with pytest.raises(EndpointError, match="cannot be reached"), translated(parse_location("hf://datasets/a/b", {})):
        raise kind("[Errno -2] Name or service not known")


@pytest.mark.usefixtures("no_keys")
@pytest.mark.parametrize("ask", ["get", "read"])
def test_missing_credentials_are_an_error(ask):
    store = open_store("s3://bucket/x", {"endpoint_url": "http://127.0.0.1:9"})
    assert "credentials" in message_of(store, ask, AccessError)
    store = open_store("s3://bucket/x", {"endpoint_url": "http://127.0.0.1:9", "profile": "none-such"})
    assert "none-such" in message_of(store, ask, AccessError)


def test_a_local_folder_without_permission_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    message_of(open_store(tmp_path / "file"), "get", NotFoundError)
    message_of(open_store("/proc/1/no-such-folder"), "put", StorageError)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.ENOSPC, "No space left"), StorageError, "no space is left .*; free some space"),
        (OSError(errno.EDQUOT, "Quota exceeded"), StorageError, "no space is left .*; free some space"),
        (OSError(errno.EFBIG, "Too large"), StorageError, "the file is larger .*; raise the limit"),
        (OSError(errno.EACCES, "Denied"), AccessError, "no permission .*; check its permissions"),
        (OSError(errno.EROFS, "Read-only"), AccessError, "no permission .*; check its permissions"),
        (PermissionError("no"), AccessError, "no permission .*; check the credentials"),
        (TimeoutError("slow"), TransientError, "the store failed or the transfer broke off"),
        (ConnectionResetError("gone"), TransientError, "the store failed or the transfer broke off"),
        (ConnectionRefusedError("no"), EndpointError, "the endpoint cannot be reached"),
        (socket.gaierror("no name"), EndpointError, "the endpoint cannot be reached"),
        (NotImplementedError("cannot"), UnsupportedError, "the server does not support this request"),
    ],
)
def test_builtin_exceptions_have_their_kind_and_remedy(error, kind, words):
    found = storage_error(error, parse_location("/disk/it", {}))
    assert type(found) is kind
    assert re.match(f"/disk/it: {words}", str(found))
    assert str(error) in str(found)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        (b"Content-Range: bytes 0-3/10\r\nLast-Modified: yesterday\r\n", "the transfer broke off"),
        (b"Content-Range: bytes 0-3/10\r\nLast-Modified: \xff\xfe\r\n", "the transfer broke off"),
        (b"Content-Range: bytes four\r\n", "another range"),
        (b"", "another range"),
    ],
)
def test_headers_that_obstore_cannot_read_are_a_temporary_failure(headers, words):
    class Handler(QuietHandler):
        def do_GET(self):
            self.wfile.write(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\n" + headers + b"\r\nabcd")

    with serving(Handler) as server:
        reader = open_store(server.endpoint).reader()
        assert reader.kind == "obstore"
        with pytest.raises(TransientError, match=words):
            reader.read("a", 0, 4)


def test_a_storage_error_is_returned_unchanged_and_the_context_of_an_exception_is_ignored():
    assert storage_error(known := NotFoundError("x"), parse_location("s3://b/k", {})) is known
    error = TimeoutError("slow")
    error.__context__ = PermissionError("another matter")
    assert type(storage_error(error, parse_location("s3://b/k", {}))) is TransientError
