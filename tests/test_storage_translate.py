"""The table of options: each one has a counterpart in obstore, no meaning for reading, or is named as unknown."""

from __future__ import annotations

from typing import Any

import pytest

from streamloader.errors import UnsupportedError
from streamloader.storage.location import parse_location
from streamloader.storage.object_reader import open_object_reader
from streamloader.storage.translate import (
    Target,
    azure_target,
    gcs_target,
    http_target,
    local_target,
)


def gcs(url: str, options: dict[str, Any], env: dict[str, str] | None = None) -> Target:
    return gcs_target(parse_location(url, options), env or {})


def azure(url: str, options: dict[str, Any], env: dict[str, str] | None = None) -> Target:
    return azure_target(parse_location(url, options), env or {})


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {}),
        ({"token": "google_default", "project": "p", "access": "read_only"}, {}),
        ({"token": "anon"}, {"skip_signature": True}),
        ({"token": "/key.json"}, {"application_credentials": "/key.json"}),
        (
            {"token": {"type": "service_account", "a": 1}},
            {"service_account_key": '{"type": "service_account", "a": 1}'},
        ),
        ({"endpoint_url": "https://gcs.example"}, {"base_url": "https://gcs.example"}),
    ],
)
def test_options_of_gcsfs_have_their_meaning(options: dict[str, Any], config: dict[str, Any]) -> None:
    target = gcs("gs://bucket/a/b", options)
    assert (target.kind, target.bucket, target.prefix, dict(target.config)) == ("gs", "bucket", "a/b", config)


@pytest.mark.parametrize("options", [{"token": "cloud"}, {"token": {"type": "user"}}, {"requester_pays": True}])
def test_an_option_of_gcsfs_without_counterpart_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="no counterpart"):
        gcs("gs://bucket/a", options)


@pytest.mark.parametrize(
    ("url", "options", "config"),
    [
        ("az://box/a/b", {"account_name": "n", "account_key": "k"}, {"account_name": "n", "account_key": "k"}),
        ("abfs://box/a/b", {"account_name": "n", "sas_token": "s"}, {"account_name": "n", "sas_key": "s"}),
        ("az://box/a/b", {"account_name": "n", "anon": True}, {"account_name": "n", "skip_signature": True}),
        ("abfss://box@n.dfs.core.windows.net/a/b", {"account_key": "k"}, {"account_name": "n", "account_key": "k"}),
        (
            "az://box/a/b",
            {"account_name": "n", "client_id": "i", "client_secret": "c", "tenant_id": "t"},
            {"account_name": "n", "client_id": "i", "client_secret": "c", "tenant_id": "t"},
        ),
    ],
)
def test_options_of_adlfs_have_their_meaning(url: str, options: dict[str, Any], config: dict[str, Any]) -> None:
    target = azure(url, options)
    assert (target.kind, target.bucket, target.prefix, dict(target.config)) == ("az", "box", "a/b", config)


def test_azure_takes_the_variables_that_adlfs_takes() -> None:
    env = {"AZURE_STORAGE_ACCOUNT_NAME": "n", "AZURE_STORAGE_ACCOUNT_KEY": "k"}
    assert dict(azure("az://box/a", {}, env).config) == {"account_name": "n", "account_key": "k"}


@pytest.mark.parametrize(
    ("options", "env"),
    [
        ({"account_name": "n", "anon": False}, {}),
        ({"account_name": "n", "connection_string": "x"}, {}),
        ({"account_name": "n"}, {"AZURE_STORAGE_CONNECTION_STRING": "x"}),
        ({}, {}),
    ],
)
def test_azure_credentials_without_counterpart_are_refused(options: dict[str, Any], env: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError):
        azure("az://box/a", options, env)


def test_http_carries_headers_and_passwords() -> None:
    target = http_target(
        parse_location("http://host/x", {"headers": {"A": "b"}, "client_kwargs": {"headers": {"C": 1}}})
    )
    assert target.bucket == "http://host/x"
    assert target.client_options["default_headers"] == {"A": "b", "C": "1"}
    assert target.client_options["allow_http"] is True
    with pytest.raises(UnsupportedError, match="encoded"):
        http_target(parse_location("https://host/x", {"encoded": True}))
    with_user = http_target(parse_location("https://us%40er:pass@host/x", {}))
    assert with_user.bucket == "https://host/x"
    assert with_user.client_options["default_headers"] == {"Authorization": "Basic dXNAZXI6cGFzcw=="}


def test_local_paths_need_no_options() -> None:
    assert local_target(parse_location("/a/b", {"auto_mkdir": True})).prefix == "a/b"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/a", {"token": "anon"}),
        ("az://box/a", {"account_name": "n", "account_key": "a2V5"}),
        ("https://host/x", {"headers": {"A": "b"}}),
        ("/a/b", {}),
    ],
)
def test_obstore_accepts_what_the_table_gives(url: str, options: dict[str, Any]) -> None:
    assert open_object_reader(parse_location(url, options)).kind == "obstore"
