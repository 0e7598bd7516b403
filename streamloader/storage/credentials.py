"""Credentials of S3 that expire: they are renewed before that, once for all threads of a process.

They come from the storage option `credential_provider`, a function of the user's, or from botocore's chain:
environment, profiles, `credential_process`, SSO, web identity, containers, the machine's role. Near their end, botocore
itself would ask for new ones at each request if those that it gets live less than 15 minutes.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from typing import Any, NamedTuple

import botocore.credentials
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials

from streamloader.errors import AccessError, StorageError, message
from streamloader.storage.process import in_thread, wait_for
from streamloader.storage.url import Location

RENEW_SECONDS = 30.0  # that requests wait for new credentials when the present ones have expired
# botocore renews from 15 minutes before the end on, so that its sources do when they are asked
BEFORE_SECONDS = 14 * 60.0
RETRY_SECONDS = 1.0  # the shortest time from one renewal to the next, unless the credentials have expired
# of botocore's clients of STS and SSO: two attempts take `RENEW_SECONDS` at most
SERVICES = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})
_NAMES = {  # our names, which are those of the storage options, and those of obstore, of STS and boto3
    "key": ("key", "access_key_id", "AccessKeyId"),
    "secret": ("secret", "secret_access_key", "SecretAccessKey"),
    "token": ("token", "session_token", "SessionToken"),
    "expires_at": ("expires_at", "Expiration"),
}
_REMEDY = "return {'key': ..., 'secret': ..., 'token': ..., 'expires_at': a datetime}, as credentials of STS are"
_LOG = logging.getLogger("streamloader")


class Keys(NamedTuple):
    """Credentials, None without any; when they expire, and when they are renewed, in seconds since 1970."""

    frozen: ReadOnlyCredentials | None
    expiry: float = math.inf
    due: float = math.inf


class Renewed(Credentials):  # type: ignore[misc]
    """Credentials of botocore's client, which a thread renews by `ask()`; `location` is for messages.

    Until they expire, requests are signed with the present ones: a source that fails for a while does no harm. Then
    they wait for `RENEW_SECONDS` at most. Raises `AccessError` with the reason.
    """

    method, account_id = "streamloader", None

    def __init__(self, ask: Callable[[], Keys], location: Location) -> None:
        self._ask, self._location = ask, location
        self._lock = threading.Lock()
        self._keys = Keys(None, expiry=-math.inf)
        self._renewal: Future[str] | None = None

    def get_frozen_credentials(self) -> ReadOnlyCredentials | None:
        """Return the present credentials."""
        now = time.time()
        with self._lock:
            keys, renewal = self._keys, self._renewal
            if renewal is None and now >= min(keys.due, keys.expiry):
                renewal = self._renewal = in_thread(self._renew, "streamloader-credentials")
        if now < keys.expiry or renewal is None:
            return keys.frozen
        end = time.monotonic() + RENEW_SECONDS
        wait_for(lambda seconds: bool(wait([renewal], seconds).done) or time.monotonic() > end)
        problem = renewal.result() if renewal.done() else f"no response for {RENEW_SECONDS:g} s"
        if problem:
            remedy = "check their source: storage_options, AWS_PROFILE, the environment or the machine's role"
            raise AccessError(f"{self._location.shown}: no valid credentials ({problem})", remedy)
        return self._keys.frozen

    def _renew(self) -> str:
        """Ask for credentials, and return the problem if there is one."""
        problem, keys = "", self._keys
        try:
            keys = self._ask()
            if keys.expiry <= time.time():
                problem = f"those that were given expired at {datetime.fromtimestamp(keys.expiry, UTC):%F %T} UTC"
        except Exception as error:  # noqa: BLE001 - functions of the user's and of plugins may raise anything
            text = error.problem if isinstance(error, StorageError) else f"{type(error).__name__}: {message(error)}"
            problem = " ".join(self._location.redact(text).split())[:200]
        now = time.time()
        due = max(now + RETRY_SECONDS, keys.expiry - min(BEFORE_SECONDS, (keys.expiry - now) / 2))
        if problem and now < keys.expiry:
            minutes = (keys.expiry - now) / 60
            _LOG.warning(
                "%s: renewing credentials failed, they expire in %.1f minutes: %s",
                self._location.shown,
                minutes,
                problem,
            )
        with self._lock:
            self._keys, self._renewal = keys._replace(due=due), None
        return problem


class Resolver:
    """In the place of a botocore session's own: its credentials are those of `ask`."""

    def __init__(self, ask: Callable[[], Keys], location: Location) -> None:
        self._renewed = Renewed(ask, location)

    def load_credentials(self) -> Renewed:
        """Return the credentials."""
        return self._renewed


def renew_credentials(session: Any, location: Location) -> None:
    """Make a session of botocore renew the credentials of its clients as this module does."""
    session.set_default_client_config(SERVICES)
    provider = location.options.get("credential_provider")
    ask = _asking(session.get_component("credential_provider")) if provider is None else lambda: keys_of(provider())
    session.register_component("credential_provider", Resolver(ask, location))


def _asking(chain: botocore.credentials.CredentialResolver) -> Callable[[], Keys]:
    """Return a function that asks botocore's chain, which is searched at the first call."""
    found: list[Any] = []

    def ask() -> Keys:
        if not found:
            found.append(chain.load_credentials())
        if found[0] is None:
            return Keys(None)
        frozen = found[0].get_frozen_credentials()
        expiry = getattr(found[0], "_expiry_time", None)  # of what botocore renews
        return Keys(frozen, math.inf if expiry is None else expiry.timestamp())

    return ask


def keys_of(given: Any) -> Keys:
    """Return the credentials that a `credential_provider` has returned. Raises `AccessError`, without their values."""
    if not isinstance(given, Mapping):
        raise AccessError(f"credential_provider returned a {type(given).__name__}, not a dict", _REMEDY)
    values = {name: next((given[each] for each in names if each in given), None) for name, names in _NAMES.items()}
    for name in ("key", "secret", "token"):
        value = values[name]
        if not (isinstance(value, str) and value) and (name != "token" or value is not None):
            problem = f"credential_provider returned no text for {name!r}, but a {type(value).__name__}"
            raise AccessError(problem, _REMEDY)
    expiry = values["expires_at"]
    if isinstance(expiry, str):
        expiry = datetime.fromisoformat(expiry)
    if isinstance(expiry, datetime):
        expiry = (expiry if expiry.tzinfo else expiry.replace(tzinfo=UTC)).timestamp()
    if not isinstance(expiry, int | float | None):
        raise AccessError(f"credential_provider returned a {type(expiry).__name__} as 'expires_at'", _REMEDY)
    frozen = ReadOnlyCredentials(values["key"], values["secret"], values["token"])
    return Keys(frozen, math.inf if expiry is None else expiry)
