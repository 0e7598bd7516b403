"""Ranged reads of gs, az and http by obstore: in Rust, without the GIL and without retries.

The storage options of gcsfs, adlfs and fsspec's HTTP are translated to obstore's. An option without a counterpart is an
error that names it, and the URL is then read by fsspec. Options of writing, listing and fsspec's caches are ignored.
"""

import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from streamloader.errors import UnsupportedError
from streamloader.storage import process
from streamloader.storage.buffers import RECEIVER, Allocate, Buffer, Receiver
from streamloader.storage.retry import HttpError, Patience, Progress, cause_of, client_errors, is_past_end
from streamloader.storage.url import FSSPEC_OPTIONS, Location

_GCS_IGNORED = {*FSSPEC_OPTIONS, "project", "access", "consistency", "cache_timeout", "default_location", "timeout"}
HURRIED_SECONDS = 2.0
# Options of adlfs and obstore, which adlfs also reads from the environment
_AZURE_OPTIONS = ("account_name", "account_key", "sas_token", "client_id", "client_secret", "tenant_id")
_AZURE_IGNORED = {*FSSPEC_OPTIONS, "max_concurrency", "blocksize", "assume_container_exists", "location_mode"}


@dataclass(frozen=True)
class Target:
    """obstore's arguments for a location. `bucket` is a bucket, container or base URL, `prefix` a path in it."""

    bucket: str
    prefix: str
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    http: Mapping[str, Any] = field(default_factory=dict, repr=False)


def _gcs_target(location: Location) -> Target:
    options = location.options
    _refuse_unknown("gcsfs", options, _GCS_IGNORED | {"token", "endpoint_url"})
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
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
    return Target(bucket, prefix, config, {"allow_http": bool(endpoint and endpoint.startswith("http://"))})


def _azure_target(location: Location) -> Target:
    options = location.options
    _refuse_unknown("adlfs", options, _AZURE_IGNORED | {*_AZURE_OPTIONS, "anon"})
    if os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
        raise UnsupportedError("obstore has no counterpart of AZURE_STORAGE_CONNECTION_STRING")
    netloc, _, prefix = location.path.partition("/")
    container, _, host = netloc.partition("@")
    values = {name: options.get(name) or os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _AZURE_OPTIONS}
    config = {name: value for name, value in values.items() if value}
    if host:
        config["account_name"] = host.split(".", maxsplit=1)[0]
    if "account_name" not in config:
        raise UnsupportedError("obstore needs the option account_name for Azure")
    if not config.keys() & {"account_key", "sas_token", "client_secret"}:
        if options.get("anon") is False:
            raise UnsupportedError("obstore has no counterpart of Azure's default credential chain")
        config["skip_signature"] = True
    return Target(container, prefix, config)


def _http_target(location: Location) -> Target:
    options = location.options
    _refuse_unknown("fsspec's http", options, {*FSSPEC_OPTIONS, "headers", "client_kwargs"})
    client = dict(options.get("client_kwargs") or {})
    _refuse_unknown("fsspec's http client_kwargs", client, {"headers"})
    http: dict[str, Any] = {"allow_http": location.target.startswith("http://")}
    headers = {**dict(options.get("headers") or {}), **dict(client.get("headers") or {})}
    if headers:
        http["default_headers"] = {str(name): str(value) for name, value in headers.items()}
    return Target(location.target, "", {}, http)


def _refuse_unknown(filesystem: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `UnsupportedError` with the names of the options that are set and not `known`."""
    unknown = sorted(name for name, value in options.items() if name not in known and value is not None)
    if unknown:
        raise UnsupportedError(f"obstore has no counterpart of {filesystem} option {', '.join(map(repr, unknown))}")


class ObstoreClient:
    """Ranged reads of one location by obstore; `root` is the path of the location's URL. Thread-safe; for one process.

    The constructor raises `UnsupportedError` with the reason if obstore cannot replace the fsspec filesystem.
    """

    def __init__(self, location: Location) -> None:
        if location.protocol not in _TARGETS:
            raise UnsupportedError(f"obstore does not support the protocol {location.protocol!r}")
        if process.forked_after_obstore():
            raise UnsupportedError("forked after obstore was used; use forkserver or spawn")
        try:
            import obstore
        except ModuleNotFoundError as error:
            raise UnsupportedError("obstore is not installed: fsspec reads ranges, more slowly") from error

        target = target_of(location)
        self.root = target.prefix
        self._policy = location.retry
        # its timeouts are those of a client: that of the hurried one is used for whatever is usually there by then
        self._hurried = min(HURRIED_SECONDS, self._policy.response_seconds)
        self._get, self._store = obstore.get, _new_store(target, location, self._policy.response_seconds)
        self._hurried_store = _new_store(target, location, self._hurried)
        self._patience = Patience(self._policy)
        self._owner = process.Owner("clients")

    def get_range(self, path: str, start: int, stop: int, receiver: Receiver = RECEIVER) -> Buffer:
        """Return bytes [start, stop) of an object, fewer if it ends before `stop`; in `receiver.allocate(size)`.

        Raises `TimeoutError` if they arrive more slowly than the policy allows.
        """
        self._owner.check()
        process.note_obstore_use()
        return self._patience.call(partial(self._read, path, start, stop, receiver.allocate), receiver)

    def _read(self, path: str, start: int, stop: int, allocate: Allocate, seconds: float) -> Buffer:
        hurried, begin = seconds <= self._hurried, time.monotonic()
        progress, count = Progress(self._policy, seconds=seconds), 0
        try:
            response = self._get(
                self._hurried_store if hurried else self._store, path, options={"range": (start, stop)}
            )
            self._patience.began(time.monotonic() - begin)
        except client_errors() as error:
            if hurried and "kind: Timeout" in str(error):
                raise TimeoutError from error
            if not is_past_end(error):
                raise
            return b""
        except ValueError as error:
            raise OSError(f"obstore cannot parse the name: {error}") from error
        body = allocate(response.range[1] - response.range[0])
        for part in response.stream(min_chunk_size=1):  # as they arrive, about 300 KB each
            if count + len(part) > len(body):
                raise HttpError(206, "WrongRange", f"received more than the {len(body)} bytes of the range")
            body[count : count + len(part)] = part
            count += len(part)
            progress.received(len(part))
            progress.seconds_left()
        return body[:count]


def _new_store(target: Target, location: Location, seconds: float) -> Any:
    """Return obstore's store. Raises `UnsupportedError` for options that it rejects."""
    from obstore import store
    from obstore.exceptions import BaseError

    timeouts = {
        "timeout": "1d",  # of a complete response, whose deadline `ObstoreClient.get_range` checks
        "connect_timeout": "5s",
        "read_timeout": f"{round(seconds * 1000)}ms",
    }
    options: dict[str, Any] = {"client_options": {**timeouts, **target.http}, "retry_config": {"max_retries": 0}}
    classes: dict[str, Any] = {"gs": store.GCSStore, "az": store.AzureStore, "http": store.HTTPStore}
    try:
        return classes[location.protocol](target.bucket, **options, **target.config)
    except (ValueError, TypeError, BaseError) as error:
        detail = " ".join(location.redact(str(error)).split())[:200]
        raise UnsupportedError(f"obstore rejects the options: {detail}") from cause_of(error, location)


_TARGETS = {"gs": _gcs_target, "az": _azure_target, "http": _http_target}


def target_of(location: Location) -> Target:
    """Translate options and environment. Raises `UnsupportedError` for an option without a counterpart in obstore."""
    return _TARGETS[location.protocol](location)
