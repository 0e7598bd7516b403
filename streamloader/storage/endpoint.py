"""The endpoint of a URL for `streamloader doctor`: credentials, region, whether it responds, how fast, its clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from streamloader.errors import UsageError
from streamloader.storage.retry import cause_of, translated
from streamloader.storage.store import wrong_option
from streamloader.storage.url import Location

REQUESTS = 5
GOOGLE = "https://storage.googleapis.com"
AZURE = "https://{}.blob.core.windows.net"
_AZURE_KEYS = ("account_key", "sas_token", "client_secret", "connection_string", "credential")


class Endpoint(NamedTuple):
    """An endpoint: its URL, the region of S3 or "", the connections to it, and where the credentials come from."""

    url: str
    region: str
    pool: Any
    credentials: str  # "" if none are found


class Answer(NamedTuple):
    """How a server has answered: the status, the seconds of each request, and by how many its clock is behind ours.

    The first of `seconds` includes the connection. `skew` is None if the server states no time.
    """

    status: int
    seconds: tuple[float, ...]
    skew: float | None


def endpoint_of(location: Location) -> Endpoint | None:
    """Return the endpoint of a location, None for one without a network or with an unknown one.

    Raises `StorageError` and `UsageError` for options, profiles and sources of credentials that are wrong.
    """
    with _translated(location):
        if location.protocol == "s3":
            from streamloader.storage.s3 import access_of

            return Endpoint(*access_of(location))
        url = _urls(location).get(location.protocol, "")
        if not url:
            return None
        from botocore.config import Config

        from streamloader.storage.s3_http import Pool

        config = Config(connect_timeout=5, read_timeout=location.retry.response_seconds)
        pool = Pool(location.retry, config, os.environ.get("SSL_CERT_FILE"))
        return Endpoint(url, "", pool, _credentials(location.protocol, location.options, os.environ))


def ask(endpoint: Endpoint, location: Location) -> Answer:
    """Send small requests to an endpoint. Raises `StorageError` if it cannot be reached, `UsageError` for its URL."""
    seconds, skew, status = [], None, 0
    with _translated(location):
        for _ in range(REQUESTS):
            begin, now = time.perf_counter(), time.time()
            with endpoint.pool.request("HEAD", endpoint.url.rstrip("/") + "/", {}) as response:
                seconds.append(time.perf_counter() - begin)
                status, headers = response.status, response.headers
                response.read()
            skew = clock_skew(headers, now + seconds[-1] / 2)
    return Answer(status, tuple(seconds), skew)


@contextmanager
def _translated(location: Location) -> Iterator[None]:
    """Raise what clients raise as our errors, also for options that they reject."""
    try:
        with translated(location):
            yield
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        raise wrong_option(location, error) from cause_of(error, location)


def clock_skew(headers: Mapping[str, str], now: float) -> float | None:
    """Return by how many seconds the time `now` is ahead of the server's; None if it states no time."""
    try:
        date = parsedate_to_datetime(headers.get("Date") or "")
        age = float(headers.get("Age") or 0)  # of a response that a cache has kept
    except (TypeError, ValueError):
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return round((datetime.fromtimestamp(now, UTC) - date).total_seconds() - age, 1)


def _urls(location: Location) -> dict[str, str]:
    options = location.options
    google = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST") or GOOGLE
    container, _, host = location.path.partition("/")[0].partition("@")
    account = host.partition(".")[0] or options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    parts = urlsplit(location.target)
    return {
        "gs": google if "://" in google else f"http://{google}",
        "az": options.get("account_host") or (AZURE.format(account) if account and container else ""),
        "http": f"{parts.scheme}://{parts.netloc}",
    }


def _credentials(protocol: str, options: Mapping[str, Any], env: Mapping[str, str]) -> str:
    """Return where the credentials of Google, Azure or a web server come from, "" if none are found."""
    if protocol == "http":
        headers = {**(options.get("headers") or {}), **((options.get("client_kwargs") or {}).get("headers") or {})}
        return "the URL or storage options" if any(name.lower() == "authorization" for name in headers) else ""
    if protocol == "az":
        given = [name for name in _AZURE_KEYS if options.get(name)]
        named = [name for name in _AZURE_KEYS if env.get(f"AZURE_STORAGE_{name.upper()}")]
        return f"storage options ({given[0]})" if given else f"the environment ({named[0]})" if named else ""
    token = options.get("token")
    if token is not None:
        return "anon: requests are not signed" if token == "anon" else "storage options (token)"
    if env.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return "the environment (GOOGLE_APPLICATION_CREDENTIALS)"
    default = Path("~/.config/gcloud/application_default_credentials.json").expanduser()
    return "gcloud's application default credentials" if default.exists() else ""
