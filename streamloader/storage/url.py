"""URLs: where a store is, how it is shown, and which paths below it are allowed. Pure but for `~` and the cwd."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from urllib.request import getproxies

from streamloader.errors import UnsupportedError, UsageError
from streamloader.options import RetryPolicy

# fsspec's spellings of one protocol
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "adl", "https": "http", "local": "file"}
# what begins like a URL of these without its // is a slip, and no local path
_PROTOCOLS = {
    *(*_ALIASES, *_ALIASES.values(), "memory"),
    *("wasb", "wasbs", "oss", "oci", "hdfs", "webhdfs", "ftp", "sftp", "ssh", "hf"),
}
_NO_SLASHES = re.compile(r"(\w+)(:/*|//+)(.*)", re.DOTALL)
_AZURE = {"az", "abfs", "abfss", "wasb", "wasbs", "adl"}  # what stands before their @ is a container
# an AWS secret may hold slashes; elsewhere the host ends at the first
_S3_USER = re.compile(r"\b(s3a?)://(?!arn:)[^/\s:@]+:[^\s@]+@")
# up to the last @ before the path; a password may hold a slash where no port ends
_USER = re.compile(r"\b([a-zA-Z][\w+.-]*)://([^/\s]*|(?!arn:)[^/\s:@\[]+:(?!\d*/)[^\s@]+)@")
_QUERY = re.compile(r"(https?://[^\s?]*)\?[^\s'\"<>]*")
_PARAMETER = re.compile(
    r"\b(x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|token|access_token|accountkey"
    r"|sharedaccesssignature|aws_secret_access_key|aws_session_token|secret|password|api_?key)"
    r"(['\"]?\s*[=:]\s*(?:b?['\"])?)([^&\s;,'\"<>]{8,})",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(
    r"\b((?:authorization|cookie)['\"]?\s*[:=]\s*(?:b?['\"])?(?:(?:basic|bearer|token)\s+)?)[^\s'\",]+", re.IGNORECASE
)
_TOKEN = re.compile(r"(<Token-\d+>)[^<]*")  # S3's response to a session token that is not valid
_SECRET_NAME = re.compile(
    "secret|token|pass|pwd?$|credential|private|auth|cookie|sas|sig(nature)?$|connection_string|api.?key|customerkey",
    re.IGNORECASE,
)
_KEY_NAME = re.compile(r"(^|_|-)key$", re.IGNORECASE)
_IDS = {"key", "aws_access_key_id"}  # public names of keys, as long as no URL holds them
# options that hold values of the user's own names
_ANY_NAME = {"headers", "cookies", "params"}
_ENVIRONMENT = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_ACCOUNT_KEY"),
    *("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"),
)
# of s3fs; the client that takes `client_kwargs` and `config_kwargs` has more than these
S3_OPTIONS = (
    *("key", "secret", "token", "username", "password", "anon", "profile", "endpoint_url", "requester_pays"),
    *("client_kwargs", "config_kwargs", "s3_additional_kwargs", "use_ssl", "version_aware"),
)
S3_CLIENT_OPTIONS = ("region_name", "verify", "read_timeout", "connect_timeout", "signature_version", "s3")
# of fsspec's own caches: no effect on what is read here
FSSPEC_OPTIONS = (
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"),
    *("default_block_size", "default_fill_cache", "default_cache_type", "block_size", "cache_options", "batch_size"),
)
CHAIN = "chain"  # the protocol of fsspec's chained URLs, simplecache::s3://...: options belong to their links
MIN_SECRET = 6  # shorter values are found in harmless words
MASK = "***"


def redact(text: str) -> str:
    """Return the text without user and password in its URLs, without signed queries and without signatures."""
    text = _S3_USER.sub(r"\1://", text)
    text = _USER.sub(_without_user, text)
    text = _QUERY.sub(r"\1?...", text)
    text = _AUTHORIZATION.sub(rf"\1{MASK}", _TOKEN.sub(rf"\1{MASK}", text))
    return _PARAMETER.sub(rf"\1\2{MASK}", text)


def _without_user(found: re.Match[str]) -> str:
    keep = found[1].lower() in _AZURE and ":" not in found[2]
    return found[0] if keep else f"{found[1]}://"


@dataclass(frozen=True)
class Secrets:
    """Values that no text may show: those of the storage options, of the URL and of the environment."""

    values: tuple[str, ...] = field(default=(), repr=False)

    def redact(self, text: str) -> str:
        """Return the text without these values, and without what `redact` takes out of any text."""
        for value in (*self.values, *_environment_secrets()):
            text = text.replace(value, MASK)
        return redact(text)


NO_SECRETS = Secrets()


def _environment_secrets() -> tuple[str, ...]:
    proxies = {f"{name} url": f"{name}://{url.partition('://')[2] or url}" for name, url in getproxies().items()}
    return secrets_of("", {**{name: os.environ.get(name, "") for name in _ENVIRONMENT}, **proxies}).values


def secrets_of(url: str, options: Mapping[str, Any]) -> Secrets:
    """Return the secrets in storage options, whose names tell them, and in the users and passwords of URLs."""
    found = set(_url_secrets(url))
    for name, value in _strings(options, ""):
        found.update(_url_secrets(value))
        found.update(parameter[3] for parameter in _PARAMETER.finditer(value))
        if name not in _IDS and (_SECRET_NAME.search(name) or _KEY_NAME.search(name)):
            fields = (part.partition("=")[2] for part in re.split(r"[&;]", value))
            found.update((value, value.rpartition(" ")[2], *(part for part in fields if len(part) > 2 * MIN_SECRET)))
    found.update([value.strip() for value in found])  # of files with a line break at the end
    forms = found | {form for value in found for form in (quote(value, safe=""), unquote(value), _base64(value))}
    return Secrets(tuple(sorted((text for text in forms if len(text) >= MIN_SECRET), key=len, reverse=True)))


def _strings(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str | bytes):
        yield name, value if isinstance(value, str) else value.decode("latin-1")
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _strings(item, "secret" if name in _ANY_NAME else str(inner))
    elif isinstance(value, tuple) and len(value) == 2 and name in _ANY_NAME:
        yield from _strings(value[1], "secret")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, name)


def _url_secrets(text: str) -> Iterator[str]:
    for found in (*_S3_USER.finditer(text), *_USER.finditer(text)):
        if redact(found[0]) != found[0]:
            user = found[0].split("://", 1)[1][:-1]
            for form in {user, unquote(user)}:
                yield from (form, *form.split(":", 1), _base64(form if ":" in form else f"{form}:"))


@dataclass(frozen=True, repr=False)
class Location:
    """A URL and its storage options. `target` is what fsspec is given, `shown` what people may read."""

    target: str
    protocol: str
    options: Mapping[str, Any]
    secrets: Secrets = NO_SECRETS  # of the URL and the options as they were given
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def __repr__(self) -> str:
        return f"Location({self.shown!r})"

    @property
    def shown(self) -> str:
        """Return the URL without credentials and without a trailing slash."""
        return redact(self.target)

    @property
    def path(self) -> str:
        """Return what follows `://`: a path where the protocol has no host, else host or bucket first."""
        return self.target.split("://", 1)[-1]

    def child(self, path: str) -> Location:
        """Return the location of `path` below this one."""
        path = checked_path(path)
        return replace(self, target=_join(self.target, path)) if path else self


def parse_location(url: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Location:
    """Read a URL of any fsspec protocol, or a local path, and the `retry` policy in its options.

    User and password in an S3 or HTTP URL become the options that they stand for, so that no text of a client
    holds them. Raises `UsageError` or `UnsupportedError`.
    """
    options = dict(options or {})
    retry = _retry_policy(options.pop("retry", None))
    return replace(_parse(url, options), retry=retry)


def _retry_policy(value: RetryPolicy | Mapping[str, Any] | None) -> RetryPolicy:
    if isinstance(value, RetryPolicy):
        return value
    known = [item.name for item in fields(RetryPolicy)]
    if not isinstance(value or {}, Mapping) or not set(value or {}) <= set(known):
        raise UsageError(f"storage option retry={value!r:.200}", f"give a RetryPolicy, with {', '.join(known)}")
    return RetryPolicy(**(value or {}))


def _parse(url: str | os.PathLike[str], options: dict[str, Any]) -> Location:
    target = os.fspath(url)
    if not isinstance(target, str) or not target.strip():
        raise UsageError(f"{url!r} is not a URL", "give a URL such as s3://bucket/folder, or a local path")
    secrets = secrets_of(target, options)
    if "::" not in target and "://" not in target:
        _check_slashes(target)
        return Location(_absolute(target), "file", options, secrets)
    if "::" in target:
        return Location(target, CHAIN, options, secrets)
    scheme, rest = target.split("://", 1)
    scheme = scheme.lower()
    protocol, target = _ALIASES.get(scheme, scheme), f"{scheme}://{rest}"
    _check_endpoint(options)
    if protocol == "file":
        return Location(f"file://{_absolute(rest or '/')}", protocol, options, secrets)
    if protocol == "http" and "?" in target:
        problem = f"{redact(target)} has a query, so no path can be put below it"
        raise UnsupportedError(problem, "give the folder's URL without it, with the credentials in storage_options")
    if protocol in ("s3", "http"):
        target, options = _user_as_options(target, protocol, options)
    if protocol == "s3":
        options = _without_users(options)
    bare = target.rstrip("/")
    return Location(target if bare.endswith(":") else bare, protocol, options, secrets)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _check_slashes(target: str) -> None:
    """Raise `UsageError` for a URL that lacks its colon or a slash: it is no local path."""
    found = _NO_SLASHES.match(target)
    if found and found[1].lower() in _PROTOCOLS:
        scheme, marks, path = found.groups()
        root = "/" if "/" in marks and _ALIASES.get(scheme.lower(), scheme.lower()) == "file" else ""
        meant = redact(f"{scheme.lower()}://{root}{path}")
        shown = scheme + meant[len(scheme) :].replace(f"://{root}", marks, 1)
        missing = f"a // is missing behind {scheme}:" if ":" in marks else f"a : is missing behind {scheme}"
        remedy = f"write {meant}, or ./{shown} for a local path of that name"
        raise UsageError(f"{shown!r} is not a URL: {missing}", remedy)


def _check_endpoint(options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an endpoint without its scheme."""
    client = options.get("client_kwargs")
    for given in (options, client if isinstance(client, Mapping) else {}):
        endpoint = given.get("endpoint_url")
        if isinstance(endpoint, str) and endpoint and not re.match(r"https?://", endpoint, re.IGNORECASE):
            host = re.sub(r"^(https?|[a-z][a-z0-9+.-]*:)?/+", "", endpoint, flags=re.IGNORECASE)
            shown = redact(f"http://{host}").removeprefix("http://")
            start = endpoint[: len(endpoint) - len(host)]
            problem = f"storage option endpoint_url={start + shown!r} does not begin with http:// or https://"
            raise UsageError(problem, f"write http://{shown}, or https://{shown} where the server has a certificate")


def _user_as_options(target: str, protocol: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    found = (_S3_USER if protocol == "s3" else _USER).match(target)
    if not found:
        return target, options
    scheme, user = found[0].split("://", 1)
    name, _, password = (unquote(part) for part in user[:-1].partition(":"))
    if protocol == "s3":
        options = {"key": name, "secret": password, **options}
    else:
        basic = f"Basic {_base64(f'{name}:{password}')}"
        options["headers"] = {"Authorization": basic, **(options.get("headers") or {})}
    return f"{scheme}://{target[found.end() :]}", options


def _without_users(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return s3fs's options without user and password in `endpoint_url`, which S3's signatures leave no place for."""
    clean = dict(options)
    if isinstance(options.get("endpoint_url"), str):
        clean["endpoint_url"] = redact(options["endpoint_url"])
    if isinstance(options.get("client_kwargs"), Mapping):
        clean["client_kwargs"] = _without_users(options["client_kwargs"])
    return clean


def checked_path(path: str) -> str:
    """Return a relative path without a trailing slash. Raises `UsageError` for one that could leave its store."""
    path = path.rstrip("/") if path != "/" else path
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise UsageError(f"{path!r} is not a path below a store", "give a relative path without '', '.' and '..' parts")
    return path


def object_path(path: str) -> str:
    """Return the relative path of an object. Raises `UsageError` for one that could leave its store, and for none."""
    if not path or path.endswith("/"):
        raise UsageError(f"{path!r} does not name an object", "name the object below its store")
    return checked_path(path)


def _absolute(path: str) -> str:
    return os.path.normpath(Path(path).expanduser().absolute())


def _join(url: str, path: str) -> str:
    """Put the path below the first link of a chained URL that has a path of its own."""
    links = url.split("::")
    place = next((i for i, link in enumerate(links) if "://" in link), 0)
    links[place] += path if links[place].endswith("/") else "/" + path
    return "::".join(links)
