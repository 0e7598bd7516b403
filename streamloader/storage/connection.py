"""The clients of one URL, made in the process that uses them, and never those of another process.

A client that was used before a fork must not be touched after it: obstore hangs, s3fs raises. Everything
here is therefore kept by process id, and what a child inherits stays where it is, unused.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from streamloader.errors import UnsupportedError, UsageError
from streamloader.options import RetryPolicy
from streamloader.storage import fork
from streamloader.storage.calls import Calls, HttpCalls, LocalCalls, MemoryCalls, PlainCalls
from streamloader.storage.failures import cause_of
from streamloader.storage.file_reader import open_file_reader
from streamloader.storage.fsspec_reader import FsspecReader
from streamloader.storage.location import Location, redact
from streamloader.storage.object_reader import obstore_knows, open_object_reader
from streamloader.storage.policy import Retrier
from streamloader.storage.protocol import RangeReader

if TYPE_CHECKING:
    from streamloader.storage.http_reader import HttpReader
    from streamloader.storage.http_writer import HttpWriter
    from streamloader.storage.s3 import S3Client

Made = TypeVar("Made")
_REQUIRED = {"s3", "file", "memory"}  # these are there, and s3fs takes 0.15 s to import
# those of s3fs and of its client that are mistyped now and then
_OPTIONS = (
    *("key", "secret", "token", "anon", "profile", "endpoint_url", "use_ssl", "requester_pays", "version_aware"),
    *("client_kwargs", "config_kwargs", "s3_additional_kwargs", "region_name", "verify", "read_timeout"),
    *("connect_timeout", "signature_version", "s3"),
)
_KNOW_LISTINGS_CACHE = {"s3", "gs", "az", "http"}


@dataclass(frozen=True)
class Session:
    """One process's filesystem: `root` is the filesystem's own path of the store's URL."""

    calls: Calls
    root: str

    def path(self, relative: str) -> str:
        """Return the filesystem's own path of a path below the store."""
        return f"{self.root.rstrip('/')}/{relative}" if relative else self.root


class Connection:
    """The clients of one URL in every process that uses it. Cheap until the first call."""

    def __init__(self, location: Location) -> None:
        self.location = location
        # a lock of each process, too: a child may inherit one that was held
        self._locks: dict[int, threading.RLock] = {}
        self._retriers: dict[int, Retrier] = {}
        self._sessions: dict[int, Session] = {}
        self._readers: dict[int, RangeReader] = {}
        self._s3_clients: dict[int, S3Client] = {}

    @property
    def retries(self) -> Retrier:
        """What sends this process's requests, again where they fail."""
        pid = os.getpid()
        if pid not in self._retriers:
            endpoint = self.location.options.get("endpoint_url")
            name = self.location.shown + (f" at {redact(endpoint)}" if isinstance(endpoint, str) else "")
            retrier = Retrier(self.location.retry, name)
            retrier.reached = any(other.reached for other in self._retriers.values())  # by the parent, before a fork
            self._retriers.setdefault(pid, retrier)
        return self._retriers[pid]

    def session(self) -> Session:
        """Return this process's filesystem, made at the first call."""
        return self._once(self._sessions, lambda: _open_session(self.location, self._region()))

    def reader(self) -> RangeReader:
        """Return this process's data plane for the whole URL, made at the first call."""
        return self._once(self._readers, self._open_reader)

    def http(self) -> HttpReader | None:
        """Return the data plane where it can fetch whole objects too, at a fraction of s3fs's start; else None."""
        if self.location.protocol != "s3" or self.location.is_chain:
            return None
        from streamloader.storage.http_reader import HttpReader

        reader = self.reader()
        return reader if isinstance(reader, HttpReader) else None

    def http_writer(self, size: int) -> HttpWriter | None:
        """Return what puts an object of so many bytes without s3fs; None where it goes up in parts."""
        reader = self.http()
        if reader is None:
            return None
        from streamloader.storage import s3_calls

        return reader.writer() if size < 2 * s3_calls.PART_BYTES else None

    def _once(self, made: dict[int, Made], make: Callable[[], Made]) -> Made:
        pid = os.getpid()
        with self._locks.setdefault(pid, threading.RLock()):
            if pid not in made:
                made[pid] = make()
        return made[pid]

    def _open_reader(self) -> RangeReader:
        """Open the first plane that can serve this URL; fsspec, which can serve all, says why none of them could."""
        reason = ""
        for opener in (open_file_reader, self._open_http, self._open_obstore):
            try:
                return opener(self.location)
            except UnsupportedError as error:
                reason = error.problem
        session = self.session()
        return FsspecReader(session.calls, session.root, self.location.shown, reason, self.location.secrets)

    def _open_http(self, location: Location) -> RangeReader:
        s3 = self._s3()
        from streamloader.storage.http_reader import open_http_reader

        return open_http_reader(location, s3)

    def _s3(self) -> S3Client:
        if self.location.protocol != "s3" or self.location.is_chain:
            raise UnsupportedError("only S3 is read over plain sockets")
        # botocore takes 0.1 s and 10 MB, which those who only use local files do not need
        from streamloader.storage.s3 import open_s3

        return self._once(self._s3_clients, lambda: open_s3(self.location))

    def _region(self) -> str:
        """Return the region of an S3 bucket for s3fs, whose PUTs end when AWS redirects them; else nothing."""
        try:
            return self._s3().find_region()
        except UnsupportedError:
            return ""

    def _open_obstore(self, location: Location) -> RangeReader:
        if not fork.obstore_is_forbidden():
            return open_object_reader(location)
        if obstore_knows(location.protocol):
            fork.warn_forked()
        raise UnsupportedError(fork.FORKED_REASON)


def check_protocol(location: Location) -> None:
    """Raise `UnsupportedError` for a protocol that fsspec does not know or whose package is missing."""
    if location.protocol in _REQUIRED and not location.is_chain:
        return
    links = location.target.split("::")
    for protocol in (link.split("://", 1)[0] for link in links if location.is_chain or "://" in link):
        try:
            importlib.import_module("fsspec").get_filesystem_class(protocol)
        except ValueError:
            raise UnsupportedError(
                f"{location.shown}: fsspec knows no protocol {protocol!r}",
                "use one such as s3, gs, az, https, file or memory",
            ) from None
        except ImportError as error:
            package = _missing_package(error, protocol)
            raise UnsupportedError(
                f"{location.shown}: the protocol {protocol!r} needs the package {package}", f"pip install {package}"
            ) from error


def _missing_package(error: ImportError, protocol: str) -> str:
    cause = error.__cause__
    if isinstance(cause, ImportError) and cause.name:
        return cause.name.split(".")[0]
    registry = importlib.import_module("fsspec.registry").known_implementations
    return str(registry[protocol]["class"]).split(".", maxsplit=1)[0]


def _open_session(location: Location, region: str) -> Session:
    protocol = "" if location.is_chain else location.protocol  # a chain's options belong to its links
    options: dict[str, Any] = dict(location.options)
    if protocol:
        options["skip_instance_cache"] = True
    if protocol == "s3":
        from streamloader.storage.s3 import client_config

        options["config_kwargs"] = client_config(options.get("config_kwargs"))
        if region:
            options["client_kwargs"] = {**(options.get("client_kwargs") or {}), "region_name": region}
    if protocol in _KNOW_LISTINGS_CACHE:
        options["use_listings_cache"] = False
    from fsspec.core import url_to_fs  # 0.05 s to import, which those who only read and write S3's objects do not need

    try:
        fs, root = url_to_fs(location.target, **options)
        if protocol == "s3":
            fs.retries = 1  # our policy is the only one that retries
            fs.connect()
    except (TypeError, ValueError) as error:
        raise _wrong_option(location, error) from cause_of(error, location.secrets)
    return Session(_calls_for(protocol, fs, location.retry), root)


def _wrong_option(location: Location, error: Exception) -> UsageError:
    """Return the error for what a client does not take, with the name of the option where it says so."""
    detail = location.secrets.redact(str(error))
    remedy = "see the parameters of the protocol's fsspec filesystem"
    name = re.search(r"unexpected keyword argument '(\w+)'", detail)
    if name is not None:
        alike = difflib.get_close_matches(name[1], _OPTIONS, 1)
        meant = f"did you mean {alike[0]!r}? Or " if alike else ""
        return UsageError(f"{location.shown}: there is no storage option {name[1]!r}", f"{meant}{remedy}")
    if detail.startswith("Invalid endpoint"):
        where = "endpoint_url in storage_options, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the AWS configuration"
        return UsageError(f"{location.shown}: {detail}", f"begin it with http:// or https://; it comes from {where}")
    options = sorted(location.options)
    return UsageError(f"{location.shown}: storage_options {options} do not fit the protocol: {detail}", remedy)


def _calls_for(protocol: str, fs: Any, policy: RetryPolicy) -> Calls:
    if protocol == "s3":
        from streamloader.storage.s3_calls import S3Calls

        return S3Calls(fs, policy)
    known: dict[str, type[PlainCalls]] = {"file": LocalCalls, "http": HttpCalls, "memory": MemoryCalls}
    return known.get(protocol, PlainCalls)(fs, policy)
