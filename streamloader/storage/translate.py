"""One table: what the storage options of s3fs, gcsfs, adlfs and fsspec's HTTP mean to obstore. Pure.

An option that is not in the table has no counterpart: the data plane is then fsspec, and the reason says
which option it was. Options that only concern writing, listing or fsspec's own caches are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamloader.errors import UnsupportedError
from streamloader.storage.location import Location

CONNECT_SECONDS = 5.0  # s3fs's own defaults
READ_SECONDS = 15.0
TOTAL_SECONDS = 300  # for one request; obstore's own limit of 30 s would end large reads on slow lines

_FSSPEC_ONLY = {
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"),
    *("default_block_size", "default_fill_cache", "default_cache_type", "block_size", "cache_options", "batch_size"),
}
_S3_PASSED_OVER = _FSSPEC_ONLY | {"cache_regions", "max_concurrency", "fixed_upload_size", "local_expiry_check"}
_S3_WRITE_ONLY = {"ServerSideEncryption", "SSEKMSKeyId", "StorageClass", "ACL", "BucketKeyEnabled", "Tagging"}
_GCS_PASSED_OVER = _FSSPEC_ONLY | {"project", "access", "consistency", "cache_timeout", "default_location", "timeout"}
_AZURE_PASSED_OVER = _FSSPEC_ONLY | {"max_concurrency", "blocksize", "assume_container_exists", "location_mode"}


@dataclass(frozen=True)
class Target:
    """What a client is made of. `bucket` is a container or a base URL elsewhere, `prefix` a key.

    `endpoint` (a URL) and `verify` (False, or the file of the certificates to trust) are known for S3.
    """

    kind: str
    bucket: str
    prefix: str
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    credentials: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)
    endpoint: str = ""
    verify: bool | str | None = None


@dataclass(frozen=True)
class S3Options:
    """The options of s3fs that matter to reading, by their meaning; times in seconds."""

    key: str | None = None
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    anon: bool = False
    profile: str | None = None
    endpoint_url: str | None = None
    region: str | None = None
    verify: bool | str | None = None
    connect_seconds: float = CONNECT_SECONDS
    read_seconds: float = READ_SECONDS
    virtual_hosted: bool = False
    requester_pays: bool = False


def s3_options(options: Mapping[str, Any]) -> S3Options:
    """Read the options of s3fs. Raises `UnsupportedError` that names the one without a counterpart."""
    known = {"key", "secret", "token", "username", "password", "anon", "profile", "endpoint_url", "requester_pays"}
    known |= {"client_kwargs", "config_kwargs", "s3_additional_kwargs", "use_ssl", "version_aware", "session"}
    _refuse_unknown("s3fs", options, known | _S3_PASSED_OVER)
    if options.get("use_ssl", True) is not True or options.get("version_aware") or options.get("session"):
        raise UnsupportedError("obstore has no counterpart of s3fs's use_ssl=False, version_aware and session")
    _refuse_unknown("s3fs's s3_additional_kwargs", options.get("s3_additional_kwargs") or {}, _S3_WRITE_ONLY)
    client = dict(options.get("client_kwargs") or {})
    credentials = {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
    _refuse_unknown("s3fs's client_kwargs", client, credentials | {"endpoint_url", "region_name", "verify"})
    config = dict(options.get("config_kwargs") or {})
    passed_over = {"max_pool_connections", "retries", "user_agent_extra", "tcp_keepalive"}
    passed_over |= {"request_checksum_calculation", "response_checksum_validation"}
    used = {"connect_timeout", "read_timeout", "region_name", "s3", "signature_version"}
    _refuse_unknown("s3fs's config_kwargs", config, used | passed_over)
    unsigned = config.get("signature_version")
    if not isinstance(unsigned, str) and unsigned is not None:
        anonymous = True  # botocore.UNSIGNED, an object of its own
    elif unsigned in (None, "s3v4", "v4"):
        anonymous = bool(options.get("anon"))
    else:
        raise UnsupportedError(f"obstore has no counterpart of the signature version {unsigned!r}")
    style = dict(config.get("s3") or {})
    _refuse_unknown("s3fs's config_kwargs['s3']", style, {"addressing_style"})
    return S3Options(
        key=options.get("key") or options.get("username") or client.get("aws_access_key_id"),
        secret=options.get("secret") or options.get("password") or client.get("aws_secret_access_key"),
        token=options.get("token") or client.get("aws_session_token"),
        anon=anonymous,
        profile=options.get("profile"),
        endpoint_url=options.get("endpoint_url") or client.get("endpoint_url"),
        region=client.get("region_name") or config.get("region_name"),
        verify=client.get("verify"),
        connect_seconds=float(config.get("connect_timeout", CONNECT_SECONDS)),
        read_seconds=float(config.get("read_timeout", READ_SECONDS)),
        virtual_hosted=style.get("addressing_style") == "virtual",
        requester_pays=bool(options.get("requester_pays")),
    )


def s3_config(options: S3Options, endpoint: str | None, region: str) -> dict[str, Any]:
    """Return obstore's configuration: `endpoint` is None for AWS itself, and a custom one uses path style."""
    if options.virtual_hosted and endpoint:
        raise UnsupportedError("obstore has no counterpart of virtual addressing at a custom endpoint")
    config: dict[str, Any] = {"region": region, "virtual_hosted_style_request": options.virtual_hosted}
    if endpoint:
        config["endpoint"] = endpoint
    if options.anon:
        config["skip_signature"] = True
    if options.requester_pays:
        config["request_payer"] = True
    return config


def client_options(
    connect_seconds: float = CONNECT_SECONDS, read_seconds: float = READ_SECONDS, allow_http: bool = False
) -> dict[str, Any]:
    """Return obstore's HTTP options with explicit timeouts."""
    return {
        "connect_timeout": f"{round(connect_seconds * 1000)}ms",
        "read_timeout": f"{round(read_seconds * 1000)}ms",
        "timeout": f"{TOTAL_SECONDS}s",
        "allow_http": allow_http,
    }


def gcs_target(location: Location, env: Mapping[str, str]) -> Target:
    """Translate gcsfs's options. Raises `UnsupportedError` that names what has no counterpart."""
    options = location.options
    _refuse_unknown("gcsfs", options, _GCS_PASSED_OVER | {"token", "endpoint_url"})
    endpoint = options.get("endpoint_url") or env.get("STORAGE_EMULATOR_HOST")
    token = options.get("token")
    config: dict[str, Any] = {"base_url": endpoint} if endpoint else {}
    if token == "anon":
        config["skip_signature"] = True
    elif isinstance(token, Mapping) and token.get("type") == "service_account":
        config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str) and token not in ("google_default", "cloud", "browser", "cache"):
        config["application_credentials"] = str(Path(token).expanduser())
    elif token not in (None, "google_default"):
        raise UnsupportedError("obstore has no counterpart of this kind of gcsfs token")
    bucket, _, prefix = location.path.partition("/")
    http = client_options(allow_http=bool(endpoint and endpoint.startswith("http://")))
    return Target("gs", bucket, prefix, config, http)


def azure_target(location: Location, env: Mapping[str, str]) -> Target:
    """Translate adlfs's options. Raises `UnsupportedError` that names what has no counterpart."""
    options = location.options
    names = {"account_name": "account_name", "account_key": "account_key", "sas_token": "sas_key"}
    names |= {"client_id": "client_id", "client_secret": "client_secret", "tenant_id": "tenant_id"}
    _refuse_unknown("adlfs", options, _AZURE_PASSED_OVER | set(names) | {"anon"})
    if env.get("AZURE_STORAGE_CONNECTION_STRING"):
        raise UnsupportedError("obstore has no counterpart of AZURE_STORAGE_CONNECTION_STRING")
    place, _, prefix = location.path.partition("/")
    container, _, host = place.partition("@")
    config = {ours: options[theirs] for theirs, ours in names.items() if options.get(theirs)}
    for theirs, ours in names.items():  # adlfs reads the same variables
        config.setdefault(ours, env.get(f"AZURE_STORAGE_{theirs.upper()}"))
    config = {name: value for name, value in config.items() if value}
    if host:
        config["account_name"] = host.split(".", maxsplit=1)[0]
    if "account_name" not in config:
        raise UnsupportedError("obstore needs the option account_name for Azure")
    if not config.keys() & {"account_key", "sas_key", "client_secret"}:
        if options.get("anon") is False:
            raise UnsupportedError("obstore has no counterpart of Azure's default credential chain")
        config["skip_signature"] = True
    return Target("az", container, prefix, config, client_options())


def http_target(location: Location) -> Target:
    """Translate the options of fsspec's HTTP filesystem."""
    options = location.options
    _refuse_unknown("fsspec's http", options, _FSSPEC_ONLY | {"headers", "client_kwargs"})
    client = dict(options.get("client_kwargs") or {})
    _refuse_unknown("fsspec's http client_kwargs", client, {"headers"})
    if location.shown != location.target:
        raise UnsupportedError("obstore has no counterpart of credentials in an http URL")
    http = client_options(allow_http=location.target.startswith("http://"))
    headers = {**dict(options.get("headers") or {}), **dict(client.get("headers") or {})}
    if headers:
        http["default_headers"] = {str(name): str(value) for name, value in headers.items()}
    return Target("http", location.target, "", {}, http)


def local_target(location: Location) -> Target:
    """Translate a local path."""
    _refuse_unknown("fsspec's local files", location.options, _FSSPEC_ONLY | {"auto_mkdir"})
    return Target("local", "", location.path.lstrip("/"))


def _refuse_unknown(what: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = sorted(name for name, value in options.items() if name not in known and value is not None)
    if unknown:
        raise UnsupportedError(f"obstore has no counterpart of {what} option {', '.join(map(repr, unknown))}")
