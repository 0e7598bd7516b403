"""URLs: what is shown never holds a secret, and paths stay below their store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamloader as sl
from streamloader.errors import UnsupportedError, UsageError
from streamloader.storage import open_store
from streamloader.storage.location import checked_path, parse_location, redact


@pytest.mark.parametrize(
    ("url", "protocol", "child"),
    [
        ("s3://bucket", "s3", "s3://bucket/a/b"),
        ("s3a://bucket/x/", "s3", "s3a://bucket/x/a/b"),
        ("gcs://bucket/x", "gs", "gcs://bucket/x/a/b"),
        ("abfs://box@account.dfs.core.windows.net/x", "az", "abfs://box@account.dfs.core.windows.net/x/a/b"),
        ("https://host/x//", "http", "https://host/x/a/b"),
        ("memory://", "memory", "memory://a/b"),
        ("file:///", "file", "file:///a/b"),
        ("/", "file", "/a/b"),
        ("/x/../y/", "file", "/y/a/b"),
        ("simplecache::s3://bucket/x", "simplecache", "simplecache::s3://bucket/x/a/b"),
    ],
)
def test_urls_and_what_is_below_them(url: str, protocol: str, child: str) -> None:
    location = parse_location(url, None)
    assert (location.protocol, location.child("a/b").shown) == (protocol, child)


@given(st.text("abcXYZ09+/=_-", min_size=6, max_size=30).filter(lambda secret: "/" not in secret))
def test_no_secret_is_ever_shown(secret: str) -> None:
    location = parse_location(f"https://user:{secret}@host/x", {"token": secret + "!"})
    assert location.shown == "https://host/x"
    assert f":{secret}@" not in repr(open_store(location.target)) + redact(f"GET {location.target} failed")
    assert secret + "!" not in repr(location)


@pytest.mark.parametrize("url", ["", "   "])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


@pytest.mark.parametrize(
    "url", ["s3:/bucket/x", "S3:/bucket/x", "s3:bucket/x", "gs:/bucket/x", "https:/host/x", "file:/x"]
)
def test_a_url_that_lacks_a_slash_is_no_local_path(url: str) -> None:
    scheme, rest = url.lower().split(":")
    with pytest.raises(UsageError, match=f"a // is missing .*; write {scheme}://{rest.lstrip('/')}, or ./{url} for"):
        open_store(Path(url))
    assert parse_location(f"./{url}", None).protocol == "file"
    assert parse_location("a:/b", None).protocol == "file"


def test_schemes_are_read_in_any_case() -> None:
    assert parse_location("S3://Bucket/X", None).target == "s3://Bucket/X"


@pytest.mark.parametrize("options", [{"endpoint_url": "h:9000"}, {"client_kwargs": {"endpoint_url": "h:9000"}}])
@pytest.mark.parametrize(
    "opened",
    [sl.open, partial(sl.StreamingDataset, batch_size=1), lambda url, **more: sl.convert("x", url, **more)],
    ids=["open", "stream", "convert"],
)
def test_an_endpoint_without_a_scheme_is_told(opened: Any, options: dict[str, Any]) -> None:
    told = "endpoint_url='h:9000' does not begin with http:// or https://; write http://h:9000, or https://h:9000"
    with pytest.raises(UsageError, match=told):
        opened("s3://bucket/x", storage_options=options)


@pytest.mark.parametrize("endpoint", ["ftp://me:hidden@h:9", "//me:hidden@h:9", "http:/me:hidden@h:9"])
def test_an_endpoint_with_another_scheme_is_told(endpoint: str) -> None:
    with pytest.raises(UsageError, match=r"does not begin with .*; write http://h:9, or https://h:9 where") as caught:
        sl.open("s3://bucket/x", storage_options={"endpoint_url": endpoint})
    assert "hidden" not in str(caught.value)


def test_an_endpoint_of_the_environment_without_a_scheme_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "h:9000")
    told = r"s3://bucket/x: Invalid endpoint: h:9000; begin it with http:// or https://; .* AWS_ENDPOINT_URL"
    with pytest.raises(UsageError, match=told):
        sl.open("s3://bucket/x", storage_options={"key": "k", "secret": "s"})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"endpoint_ur": "http://h"}, "there is no storage option 'endpoint_ur'; did you mean 'endpoint_url'"),
        (
            {"client_kwargs": {"regoin_name": "x"}},
            "there is no storage option 'regoin_name'; did you mean 'region_name'",
        ),
    ],
)
def test_a_mistyped_storage_option_is_named_and_nothing_is_advised_to_be_overwritten(
    options: dict[str, Any], told: str
) -> None:
    for call in (sl.open, lambda url, **more: sl.convert(Path(__file__).parent, url, **more)):
        with pytest.raises(UsageError, match=told) as raised:
            call("s3://bucket/x", storage_options={"key": "k", "secret": "s", **options})
        assert "overwrite" not in str(raised.value) and "damaged" not in str(raised.value)


def test_a_signed_url_cannot_hold_a_dataset() -> None:
    with pytest.raises(UnsupportedError) as raised:
        open_store("https://host/x?sig=topsecret")
    assert "topsecret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://bucket/x", "pip install gcsfs"),
        ("abfs://box/x", "pip install adlfs"),
        ("nosuch://x/y", "knows no protocol 'nosuch'"),
        ("simplecache::nosuch://x/y", "knows no protocol 'nosuch'"),
    ],
)
def test_an_unknown_protocol_or_missing_package_is_named(url: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        open_store(url)


@given(st.lists(st.text("ab._ ü", min_size=1, max_size=4), min_size=1, max_size=4))
def test_checked_paths_are_plain_descents(parts: list[str]) -> None:
    path = "/".join(parts)
    if any(part in (".", "..") for part in parts):
        with pytest.raises(UsageError):
            checked_path(path)
    else:
        assert checked_path(path) == path
