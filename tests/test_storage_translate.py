"""The table of options: each one has a counterpart in obstore, no meaning for reading, or is named as unknown."""

from __future__ import annotations

from typing import Any

import botocore
import pytest

from streamloader.errors import UnsupportedError
from streamloader.storage.location import parse_location
from streamloader.storage.object_reader import open_object_reader
from streamloader.storage.translate import (
    S3Options,
    Target,
    azure_target,
    gcs_target,
    http_target,
    local_target,
    s3_config,
    s3_options,
)


def gcs(url: str, options: dict[str, Any], env: dict[str, str] | None = None) -> Target:
    return gcs_target(parse_location(url, options), env or {})


def azure(url: str, options: dict[str, Any], env: dict[str, str] | None = None) -> Target:
    return azure_target(parse_location(url, options), env or {})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, S3Options()),
        ({"key": "k", "secret": "s", "token": "t"}, S3Options(key="k", secret="s", token="t")),
        ({"username": "k", "password": "s"}, S3Options(key="k", secret="s")),
        ({"client_kwargs": {"aws_access_key_id": "k", "aws_secret_access_key": "s"}}, S3Options(key="k", secret="s")),
        ({"anon": True}, S3Options(anon=True)),
        ({"config_kwargs": {"signature_version": botocore.UNSIGNED}}, S3Options(anon=True)),
        ({"config_kwargs": {"signature_version": "s3v4"}}, S3Options()),
        ({"profile": "p"}, S3Options(profile="p")),
        ({"endpoint_url": "http://h:1"}, S3Options(endpoint_url="http://h:1")),
        ({"client_kwargs": {"endpoint_url": "http://h:1"}}, S3Options(endpoint_url="http://h:1")),
        ({"client_kwargs": {"region_name": "eu-west-1"}}, S3Options(region="eu-west-1")),
        ({"client_kwargs": {"verify": False}}, S3Options(verify=False)),
        ({"client_kwargs": {"verify": "/ca.pem"}}, S3Options(verify="/ca.pem")),
        (
            {"config_kwargs": {"connect_timeout": 1, "read_timeout": 2.5}},
            S3Options(connect_seconds=1, read_seconds=2.5),
        ),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, S3Options(virtual_hosted=True)),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, S3Options()),
        ({"requester_pays": True}, S3Options(requester_pays=True)),
        ({"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, S3Options()),
        ({"use_listings_cache": True, "default_block_size": 5, "max_concurrency": 3}, S3Options()),
        ({"config_kwargs": {"max_pool_connections": 3, "retries": {"max_attempts": 3}}}, S3Options()),
    ],
)
def test_options_of_s3fs_have_their_meaning(given: dict[str, Any], meant: S3Options) -> None:
    assert s3_options(given) == meant


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"fancy": 1}, "'fancy'"),
        ({"client_kwargs": {"use_dualstack": 1}}, "'use_dualstack'"),
        ({"config_kwargs": {"proxies": {"http": "p"}}}, "'proxies'"),
        ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "'use_accelerate_endpoint'"),
        ({"config_kwargs": {"signature_version": "s3"}}, "'s3'"),
        ({"s3_additional_kwargs": {"SSECustomerKey": "x"}}, "'SSECustomerKey'"),
        ({"version_aware": True}, "version_aware"),
        ({"use_ssl": False}, "use_ssl"),
    ],
)
def test_an_option_without_counterpart_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        s3_options(given)


def test_a_custom_endpoint_is_addressed_by_path_and_aws_by_region() -> None:
    custom = s3_config(S3Options(), "http://h:1", "us-east-1")
    assert custom == {"region": "us-east-1", "virtual_hosted_style_request": False, "endpoint": "http://h:1"}
    assert "endpoint" not in s3_config(S3Options(), None, "eu-west-1")
    assert s3_config(S3Options(anon=True), None, "eu-west-1")["skip_signature"] is True
    assert s3_config(S3Options(requester_pays=True), None, "eu-west-1")["request_payer"] is True
    with pytest.raises(UnsupportedError, match="virtual"):
        s3_config(S3Options(virtual_hosted=True), "http://h:1", "us-east-1")


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


def test_http_carries_headers_and_refuses_passwords() -> None:
    target = http_target(
        parse_location("http://host/x", {"headers": {"A": "b"}, "client_kwargs": {"headers": {"C": 1}}})
    )
    assert target.bucket == "http://host/x"
    assert target.client_options["default_headers"] == {"A": "b", "C": "1"}
    assert target.client_options["allow_http"] is True
    for url, refused in (("https://u:p@host/x", {}), ("https://host/x", {"encoded": True})):
        with pytest.raises(UnsupportedError):
            http_target(parse_location(url, refused))


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
