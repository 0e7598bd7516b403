"""The data plane over obstore: ranged GETs in Rust, without the GIL, without a retry of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from streamloader.errors import ForkError, UnsupportedError
from streamloader.storage import fork
from streamloader.storage.failures import EXPIRED, beyond_the_end, cause_of, client_errors, facts_of, storage_error
from streamloader.storage.location import Location, Secrets, object_path
from streamloader.storage.protocol import Room
from streamloader.storage.translate import Target, azure_target, gcs_target, http_target, local_target

# obstore limits the time of a request by client: there is one for requests of up to so many bytes, 4 times more, ...
SMALLEST_CLASS = 64 << 10


class _Clients:
    """The obstore clients of one location, by how long their responses may take; made when first used."""

    def __init__(self, target: Target, location: Location) -> None:
        self._target, self._location = target, location
        self._made: dict[int, Any] = {}
        self._lock = threading.Lock()

    def for_size(self, size: int) -> Any:
        """Return the client for a request of so many bytes. Raises `UnsupportedError` for options that it refuses."""
        limit = SMALLEST_CLASS
        while limit < size:
            limit *= 4
        with self._lock:
            if limit not in self._made:
                self._made[limit] = _client(self._target, self._location, limit)
            return self._made[limit]

    def renew(self) -> bool:
        """Fetch credentials anew, where that is possible; return whether it is."""
        with self._lock:
            self._made.clear()  # each client keeps its credentials until they say that they expire
            return self._target.renew is not None and self._target.renew()


class ObjectReader:
    """A `RangeReader` over obstore. `prefix` is the store's key, `shown` its URL."""

    kind = "obstore"

    def __init__(self, clients: _Clients, prefix: str, shown: str, reason: str, secrets: Secrets) -> None:
        import obstore

        self._get_range = obstore.get_range
        self._clients = clients
        self._prefix = prefix
        self._shown = shown
        self._pid = os.getpid()
        self._secrets = secrets
        self.reason = reason

    def below(self, path: str) -> ObjectReader:
        """Return the reader of the folder `path`, with the same client."""
        if not path:
            return self
        prefix = f"{self._prefix}/{path}" if self._prefix else path
        return ObjectReader(self._clients, prefix, f"{self._shown}/{path}", self.reason, self._secrets)

    def read(self, path: str, start: int, stop: int, room: Room | None = None) -> memoryview:  # noqa: ARG002 - the client makes bodies of its own
        """Return bytes [start, stop) of the object, fewer where it ends before. One request; thread-safe."""
        if stop <= start:
            return memoryview(b"")
        if os.getpid() != self._pid:
            raise ForkError(f"{self._shown}: {fork.FORKED_REASON}", "ask the store for a reader in this process")
        fork.note_obstore_use()
        key = "/".join(filter(None, (self._prefix, object_path(path))))
        try:
            return memoryview(self._get(key, start, stop))
        except client_errors(ValueError) as error:  # ValueError: a name that obstore cannot parse
            if beyond_the_end(error):
                return memoryview(b"")
            raise storage_error(error, f"{self._shown}/{path}", self._secrets) from cause_of(error, self._secrets)

    def _get(self, key: str, start: int, stop: int) -> Any:
        """Return a range, with fresh credentials where they have expired."""
        try:
            return self._get_range(self._clients.for_size(stop - start), key, start=start, end=stop)
        except client_errors() as error:
            if facts_of(error).code not in EXPIRED or not self._clients.renew():
                raise
        return self._get_range(self._clients.for_size(stop - start), key, start=start, end=stop)


def open_object_reader(location: Location) -> ObjectReader:
    """Return the obstore reader of a URL.

    Raises `UnsupportedError` with the reason where obstore cannot stand in for the fsspec filesystem, and
    `AccessError` or `EndpointError` where its credentials or region cannot be found.
    """
    if location.is_chain:
        raise UnsupportedError("obstore knows no chained URLs")
    translate = _TARGETS.get(location.protocol)
    if translate is None:
        raise UnsupportedError(f"obstore does not know the protocol {location.protocol!r}")
    target = translate(location)
    clients, reason = _Clients(target, location), f"obstore knows {location.protocol}"
    clients.for_size(0)
    return ObjectReader(clients, target.prefix, location.shown, reason, location.secrets)


def obstore_knows(protocol: str) -> bool:
    """Return whether obstore has a client for the protocol at all."""
    return protocol in _TARGETS


def _s3_target(location: Location) -> Target:
    from streamloader.storage.s3 import s3_target  # botocore takes 0.1 s to import

    return s3_target(location)


def _client(target: Target, location: Location, size: int) -> Any:
    """Return a client for requests of up to `size` bytes."""
    from obstore import store
    from obstore.exceptions import BaseError

    if target.kind == "local":
        return store.LocalStore()
    policy, secrets = location.retry, location.secrets
    timed = {**target.client_options, "timeout": f"{round(policy.deadline(size) * 1000)}ms"}
    if target.kind != "s3":  # whose options have one
        timed["read_timeout"] = f"{round(policy.response_seconds * 1000)}ms"
    options: dict[str, Any] = {"client_options": timed, "retry_config": {"max_retries": 0}}
    kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore, "http": store.HTTPStore}
    if target.kind != "http":
        options["config"] = dict(target.config)
    if target.credentials is not None:
        options["credential_provider"] = target.credentials
    try:
        return kinds[target.kind](target.bucket, **options)
    except (ValueError, TypeError, BaseError) as error:
        detail = " ".join(secrets.redact(str(error)).split())[:200]
        raise UnsupportedError(f"obstore refuses the options: {detail}") from cause_of(error, secrets)


_TARGETS: Mapping[str, Callable[[Location], Target]] = {
    "s3": _s3_target,
    "gs": lambda location: gcs_target(location, os.environ),
    "az": lambda location: azure_target(location, os.environ),
    "http": http_target,
    "file": local_target,
}
