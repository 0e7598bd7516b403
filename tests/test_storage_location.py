"""URLs: what is shown never holds a secret, and paths stay below their store."""

from functools import partial
from pathlib import Path

import pytest

import streamloader as sl
from streamloader.errors import UnsupportedError, UsageError
from streamloader.storage import open_store
from streamloader.storage.object_store import ObstoreClient, target_of
from streamloader.storage.url import parse_location

AZURE_CLIENT = {"client_id": "i", "client_secret": "c", "tenant_id": "t"}


@pytest.mark.parametrize(
    ("url", "protocol", "child"),
    [
        ("s3://bucket", "s3", "s3://bucket/a/b"),
        ("S3://Bucket/X", "s3", "s3://Bucket/X/a/b"),
        ("s3a://bucket/x/", "s3", "s3a://bucket/x/a/b"),
        ("gcs://bucket/x", "gs", "gcs://bucket/x/a/b"),
        ("abfs://box@account.dfs.core.windows.net/x", "az", "abfs://box@account.dfs.core.windows.net/x/a/b"),
        ("https://host/x//", "http", "https://host/x/a/b"),
        ("memory://", "memory", "memory://a/b"),
        ("file:///", "file", "file:///a/b"),
        ("/", "file", "/a/b"),
        ("/x/../y/", "file", "/y/a/b"),
        ("simplecache::s3://bucket/x", "chain", "simplecache::s3://bucket/x/a/b"),
    ],
)
def test_urls_and_what_is_below_them(url, protocol, child):
    location = parse_location(url, None)
    assert (location.protocol, location.child("a/b").shown) == (protocol, child)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/bucket/x", "s3://bucket/x"),
        ("S3:/bucket/x", "s3://bucket/x"),
        ("s3:bucket/x", "s3://bucket/x"),
        ("s3//bucket/x", "s3://bucket/x"),
        ("gs:/b/x", "gs://b/x"),
        ("https:/h/x", "https://h/x"),
        ("file:/x", "file:///x"),
        ("file:x", "file://x"),
    ],
)
def test_a_url_that_lacks_a_slash_or_the_colon_is_no_local_path(url, meant):
    missing = "a // is missing" if ":" in url else "a : is missing"
    with pytest.raises(UsageError, match=f"{missing} after .*; write {meant}, or ./{url} for a local path"):
        open_store(Path(url) if ":" in url else url)
    assert parse_location(f"./{url}", None).protocol == "file"
    assert parse_location("a:/b", None).protocol == parse_location("s3/b", None).protocol == "file"
    assert parse_location("local//b", None).target == parse_location("local/b", None).target


@pytest.mark.parametrize(
    "endpoint", ["h:9", "ftp://me:hidden@h:9", "//me:hidden@h:9", "http:/me:hidden@h:9", "http//h:9"]
)
@pytest.mark.parametrize("name", ["endpoint_url", "client_kwargs"])
@pytest.mark.parametrize(
    "opened",
    [sl.open, partial(sl.StreamingDataset, batch_size=1), lambda url, **more: sl.convert("x", url, **more)],
    ids=["open", "stream", "convert"],
)
def test_an_endpoint_that_is_no_http_url_is_an_error(opened, name, endpoint):
    message = "endpoint_url='.*h:9' does not begin with http:// or https://; write http://h:9, or https://h:9 if"
    options = {"endpoint_url": endpoint}
    with pytest.raises(UsageError, match=message) as caught:
        opened("s3://bucket/x", storage_options=options if name == "endpoint_url" else {name: options})
    assert "hidden" not in str(caught.value)


def test_an_endpoint_of_the_environment_without_a_scheme_is_an_error(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "h:9000")
    message = r"s3://bucket/x: Invalid endpoint: h:9000; begin it with http:// or https://; .* AWS_ENDPOINT_URL"
    with pytest.raises(UsageError, match=message):
        sl.open("s3://bucket/x", storage_options={"key": "k", "secret": "s"})


@pytest.mark.parametrize(
    ("options", "wrong", "right"),
    [
        ({"endpoint_ur": "http://h"}, "endpoint_ur", "endpoint_url"),
        ({"client_kwargs": {"regoin_name": "x"}}, "regoin_name", "region_name"),
    ],
)
def test_a_mistyped_storage_option_is_named_and_nothing_is_advised_to_be_overwritten(options, wrong, right):
    message = f"there is no storage option '{wrong}'; did you mean '{right}'"
    for call in (sl.open, lambda url, **more: sl.convert(Path(__file__).parent, url, **more)):
        with pytest.raises(UsageError, match=message) as raised:
            call("s3://bucket/x", storage_options={"key": "k", "secret": "s", **options})
        assert "overwrite" not in str(raised.value) and "damaged" not in str(raised.value)


def test_a_mistyped_storage_option_of_a_web_server_is_named():
    with pytest.raises(UsageError, match="there is no storage option 'heders'; see the parameters of"):
        sl.open("http://127.0.0.1:9/x", storage_options={"heders": {"X-Key": "1"}})
    open_store("http://127.0.0.1:9/x", {"headers": {"X-Key": "1"}, "proxy": "http://127.0.0.1:9"})


def test_an_option_that_is_no_url_is_reported_as_such(tmp_path):
    with pytest.raises(UsageError, match=r"^'s3:/b' is not a URL: a // is missing after s3:; write s3://b"):
        open_store(f"reference://::{tmp_path}/x.json", {"allow": ["s3:/b"]}).get("a")


def test_empty_and_signed_urls_cannot_hold_a_dataset():
    for url in ("", "   "):
        with pytest.raises(UsageError):
            open_store(url)
    with pytest.raises(UnsupportedError) as raised:
        open_store("https://host/x?sig=topsecret")
    assert "topsecret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://bucket/x", "'gs' needs a package that is not installed; .*gcsfs"),
        ("abfs://box/x", "'abfs' needs a package that is not installed; .*adlfs"),
        ("smb://h/x", "'smb' needs a package that is not installed; [^']*smbprotocol"),  # its module is smbclient
        ("nosuch://x/y", "fsspec has no protocol 'nosuch'"),
        ("simplecache::nosuch://x/y", "fsspec has no protocol 'nosuch'"),
    ],
)
def test_an_unknown_protocol_or_missing_package_is_named(url, words):
    with pytest.raises(UnsupportedError, match=words):
        open_store(url)


# What the options mean to obstore: each has a counterpart, no meaning for reading, or is named as unknown.


@pytest.mark.parametrize(
    ("url", "options", "config"),
    [
        ("gs://b/k/x", {}, {}),
        ("gs://b/k/x", {"token": "google_default", "project": "p", "access": "read_only"}, {}),
        ("gs://b/k/x", {"token": "anon"}, {"skip_signature": True}),
        ("gs://b/k/x", {"token": "/key.json"}, {"application_credentials": "/key.json"}),
        ("gs://b/k/x", {"token": {"type": "service_account"}}, {"service_account_key": '{"type": "service_account"}'}),
        ("gs://b/k/x", {"endpoint_url": "https://gcs.example"}, {"base_url": "https://gcs.example"}),
        ("az://b/k/x", {"account_name": "n", "account_key": "k"}, {"account_name": "n", "account_key": "k"}),
        ("abfs://b/k/x", {"account_name": "n", "sas_token": "s"}, {"account_name": "n", "sas_token": "s"}),
        ("az://b/k/x", {"account_name": "n", "anon": True}, {"account_name": "n", "skip_signature": True}),
        ("abfss://b@n.dfs.core.windows.net/k/x", {"account_key": "k"}, {"account_name": "n", "account_key": "k"}),
        ("az://b/k/x", {"account_name": "n", **AZURE_CLIENT}, {"account_name": "n", **AZURE_CLIENT}),
    ],
)
def test_options_of_gcsfs_and_adlfs_keep_their_meaning(url, options, config):
    target = target_of(parse_location(url, options))
    assert (target.bucket, target.prefix, dict(target.config)) == ("b", "k/x", config)


def test_azure_takes_the_variables_that_adlfs_takes(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "n")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "k")
    assert dict(target_of(parse_location("az://b/k", {})).config) == {"account_name": "n", "account_key": "k"}
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "x")
    with pytest.raises(UnsupportedError):
        target_of(parse_location("az://b/k", {}))


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://b/k", {"token": "cloud"}),
        ("gs://b/k", {"token": {"type": "user"}}),
        ("gs://b/k", {"requester_pays": True}),
        ("az://b/k", {"account_name": "n", "anon": False}),
        ("az://b/k", {"account_name": "n", "connection_string": "x"}),
        ("az://b/k", {}),
        ("https://host/x", {"encoded": True}),
    ],
)
def test_an_option_without_counterpart_is_an_error(url, options):
    with pytest.raises(
        UnsupportedError, match=r"no counterpart of .*(token|'\w+'|chain)|needs the option account_name"
    ):
        target_of(parse_location(url, options))


def test_http_carries_headers():
    options = {"headers": {"A": "b"}, "client_kwargs": {"headers": {"C": 1}}}
    target = target_of(parse_location("http://host/x", options))
    assert target.bucket == "http://host/x"
    assert target.http == {"default_headers": {"A": "b", "C": "1"}, "allow_http": True}


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/a", {"token": "anon"}),
        ("az://box/a", {"account_name": "n", "account_key": "a2V5"}),
        ("https://host/x", {"headers": {"A": "b"}}),
    ],
)
def test_obstore_accepts_what_the_table_gives(url, options):
    assert ObstoreClient(parse_location(url, options)).root == ("" if url.startswith("https") else "a")
