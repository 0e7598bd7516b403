"""One table: what the storage options of gcsfs, adlfs and fsspec's HTTP mean to obstore. Pure.

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

FSSPEC_ONLY = {
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"),
    *("default_block_size", "default_fill_cache", "default_cache_type", "block_size", "cache_options", "batch_size"),
}
_GCS_PASSED_OVER = FSSPEC_ONLY | {"project", "access", "consistency", "cache_timeout", "default_location", "timeout"}
_AZURE_PASSED_OVER = FSSPEC_ONLY | {"max_concurrency", "blocksize", "assume_container_exists", "location_mode"}


@dataclass(frozen=True)
class Target:
    """What a client is made of. `bucket` is a container or a base URL elsewhere, `prefix` a key."""

    kind: str
    bucket: str
    prefix: str
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    credentials: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)
    renew: Callable[[], bool] | None = field(default=None, repr=False)


def client_options(
    connect_seconds: float = CONNECT_SECONDS, read_seconds: float = READ_SECONDS, allow_http: bool = False
) -> dict[str, Any]:
    """Return obstore's HTTP options with explicit timeouts."""
    return {
        "connect_timeout": f"{round(connect_seconds * 1000)}ms",
        "read_timeout": f"{round(read_seconds * 1000)}ms",
        "allow_http": allow_http,
    }


def gcs_target(location: Location, env: Mapping[str, str]) -> Target:
    """Translate gcsfs's options. Raises `UnsupportedError` that names what has no counterpart."""
    options = location.options
    refuse_unknown("gcsfs", options, _GCS_PASSED_OVER | {"token", "endpoint_url"})
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
    refuse_unknown("adlfs", options, _AZURE_PASSED_OVER | set(names) | {"anon"})
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
    refuse_unknown("fsspec's http", options, FSSPEC_ONLY | {"headers", "client_kwargs"})
    client = dict(options.get("client_kwargs") or {})
    refuse_unknown("fsspec's http client_kwargs", client, {"headers"})
    http = client_options(allow_http=location.target.startswith("http://"))
    headers = {**dict(options.get("headers") or {}), **dict(client.get("headers") or {})}
    if headers:
        http["default_headers"] = {str(name): str(value) for name, value in headers.items()}
    return Target("http", location.target, "", {}, http)


def local_target(location: Location) -> Target:
    """Translate a local path."""
    refuse_unknown("fsspec's local files", location.options, FSSPEC_ONLY | {"auto_mkdir"})
    return Target("local", "", location.path.lstrip("/"))


def refuse_unknown(what: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `UnsupportedError` that names the options which are set and not `known`."""
    unknown = sorted(name for name, value in options.items() if name not in known and value is not None)
    if unknown:
        raise UnsupportedError(f"obstore has no counterpart of {what} option {', '.join(map(repr, unknown))}")
