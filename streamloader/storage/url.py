"""Parses store URLs, redacts their secrets and checks object paths.

No I/O. Besides its arguments it reads the working directory, the home directory and environment variables with secrets.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies

from streamloader.errors import UnsupportedError, UsageError
from streamloader.options import RetryPolicy

# fsspec's other names of a protocol
ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "https": "http", "local": "file"}
# A URL of one of these without its :// is a typo, not a local path
_PROTOCOLS = {
    *(*ALIASES, *ALIASES.values(), "memory"),
    *("adl", "wasb", "wasbs", "oss", "oci", "hdfs", "webhdfs", "ftp", "sftp", "ssh", "hf"),
}
_FOLDERS = {"file", "local", "memory"}  # also usual names of folders: local//x is a path
_NO_SLASHES = re.compile(r"(\w+)(:/*|//+)(.*)", re.DOTALL)
_AZURE = {"az", "abfs", "abfss", "wasb", "wasbs", "adl"}  # the part before their @ is a container, not a user
# An AWS secret may contain slashes, which end the host in other URLs
_S3_USER = re.compile(r"\b(s3a?)://(?!arn:)[^/\s:@]+:[^\s@]+@")
# Up to the last @ before the path; a password may contain a slash, unless only digits precede it: that is a port
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
_TOKEN = re.compile(r"(<Token-\d+>)[^<]*")  # in S3's error document for an invalid session token
_SECRET_NAME = re.compile(
    "secret|token|pass|pwd?$|credential|private|auth|cookie|sas|sig(nature)?$|connection_string|api.?key|customerkey",
    re.IGNORECASE,
)
_KEY_NAME = re.compile(r"(^|_|-)key$", re.IGNORECASE)
_IDS = {"key", "aws_access_key_id"}  # access key ids, which are not secret unless they are part of a URL
_ANY_NAME = {"headers", "cookies", "params"}  # mappings whose names are free, so all of their values may be secret
_ENVIRONMENT = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_ACCOUNT_KEY"),
    *("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"),
)
# The options of s3fs, and the most common ones of the `client_kwargs` and `config_kwargs` that it passes on
S3_OPTIONS = (
    *("key", "secret", "token", "username", "password", "anon", "profile", "endpoint_url", "requester_pays"),
    *("client_kwargs", "config_kwargs", "s3_additional_kwargs", "use_ssl", "version_aware"),
    "credential_provider",  # ours
)
_OTHER_KEYS = ("key", "secret", "token", "username", "password", "anon", "profile")
S3_CLIENT_OPTIONS = ("region_name", "verify", "read_timeout", "connect_timeout", "signature_version", "s3")
# Options of fsspec's caches and event loop, which have no effect on our reads
FSSPEC_OPTIONS = (
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"),
    *("default_block_size", "default_fill_cache", "default_cache_type", "block_size", "cache_options", "batch_size"),
)
_REFERENCE = re.compile(r"(?P<protocol>reference|icechunk)(?:(?:://)?::(?P<url>.*)|://)", re.DOTALL)
REFERENCES = ("reference", "icechunk")  # protocols of stores whose objects are ranges of others: reference://::URL
CHAIN = "chain"  # our name for the protocol of chained URLs (simplecache::s3://...), whose options are per link
MIN_SECRET = 6  # characters; shorter values also occur in harmless words
MASK = "***"


def redact(text: str) -> str:
    """Return the text without the users, passwords and queries of its URLs, and with tokens and signatures masked."""
    text = _S3_USER.sub(r"\1://", text)
    text = _USER.sub(_without_user, text)
    text = _QUERY.sub(r"\1?...", text)
    text = _AUTHORIZATION.sub(rf"\1{MASK}", _TOKEN.sub(rf"\1{MASK}", text))
    return _PARAMETER.sub(rf"\1\2{MASK}", text)


def proxies() -> dict[str, str]:
    """Return the proxies of the environment by name, without users and passwords; they may have no `http://`."""
    start = "http://"
    return {
        name: redact(url) if "://" in url else redact(start + url).removeprefix(start)
        for name, url in sorted(getproxies().items())
    }


def _without_user(url: re.Match[str]) -> str:
    is_container = url[1].lower() in _AZURE and ":" not in url[2]
    return url[0] if is_container else f"{url[1]}://"


def _environment_secrets() -> tuple[str, ...]:
    proxies = {f"{name} url": f"{name}://{url.partition('://')[2] or url}" for name, url in getproxies().items()}
    return secrets_of("", {**{name: os.environ.get(name, "") for name in _ENVIRONMENT}, **proxies})


def secrets_of(url: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the values of options with secret names, and the users and passwords of all URLs."""
    secrets = set(_url_secrets(url))
    for name, value in _strings(options, ""):
        secrets.update(_url_secrets(value))
        secrets.update(parameter[3] for parameter in _PARAMETER.finditer(value))
        if name not in _IDS and (_SECRET_NAME.search(name) or _KEY_NAME.search(name)):
            # such as a connection string: "AccountName=...;AccountKey=..."
            parts = (part.partition("=")[2] for part in re.split(r"[&;]", value))
            secrets.update((value, value.rpartition(" ")[2], *(part for part in parts if len(part) > 2 * MIN_SECRET)))
    secrets.update([value.strip() for value in secrets])  # a secret read from a file may end with a line break
    secrets |= {form for value in secrets for form in (quote(value, safe=""), unquote(value), _base64(value))}
    return tuple(sorted((text for text in secrets if len(text) >= MIN_SECRET), key=len, reverse=True))


def _strings(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield each string in nested options, with the name of its option."""
    if isinstance(value, str | bytes):
        yield name, value if isinstance(value, str) else value.decode("latin-1")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, "secret" if name in _ANY_NAME else str(key))
    elif isinstance(value, tuple) and len(value) == 2 and name in _ANY_NAME:
        yield from _strings(value[1], "secret")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, name)


def _url_secrets(text: str) -> Iterator[str]:
    """Yield user and password of each URL in a text, separately and together, as written, unquoted and in Base64."""
    for url in (*_S3_USER.finditer(text), *_USER.finditer(text)):
        if redact(url[0]) != url[0]:
            user = url[0].split("://", 1)[1][:-1]
            for form in {user, unquote(user)}:
                yield from (form, *form.split(":", 1), _base64(form if ":" in form else f"{form}:"))


@dataclass(frozen=True, repr=False)
class CredentialProvider:
    """The function of the option `credential_provider`. Each process that it is sent to calls it for itself."""

    function: Callable[[], Any]

    def __call__(self) -> Any:
        """Return what the function returns."""
        return self.function()

    def __reduce__(self) -> tuple[Any, ...]:
        if problem := self.problem:
            remedy = "define it in a module, a .py file, that you import, or use workers=0"
            raise UsageError(f"other processes cannot load the credential_provider: {problem}", remedy)
        return (CredentialProvider, (self.function,))

    @property
    def problem(self) -> str:
        """Why other processes cannot load the function; empty if they can."""
        try:
            data = pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return str(error)
        return "it is defined in the program that runs, __main__" if b"__main__" in data else ""


@dataclass(frozen=True, repr=False)
class Location:
    """A parsed URL and its storage options. `target` is the URL for fsspec, `shown` the one for messages."""

    target: str
    protocol: str
    options: Mapping[str, Any]
    secrets: tuple[str, ...] = ()  # of the URL and options before parsing
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def __repr__(self) -> str:
        return f"Location({self.shown!r})"

    @property
    def shown(self) -> str:
        """Return the URL without credentials and without a trailing slash."""
        return redact(self.target)

    @property
    def is_private(self) -> bool:
        """Return whether only this process can use the options: others cannot load the `credential_provider`."""
        provider = self.options.get("credential_provider")
        return isinstance(provider, CredentialProvider) and bool(provider.problem)

    @property
    def path(self) -> str:
        """Return the URL after `://`: the host or bucket, if the protocol has one, and the path."""
        return self.target.split("://", 1)[-1]

    def redact(self, text: str) -> str:
        """Return the text without the secrets of the storage options, the URL and the environment, as by `redact`."""
        for value in (*self.secrets, *_environment_secrets()):
            text = text.replace(value, MASK)
        return redact(text)

    def child(self, path: str) -> Location:
        """Return the location of `path` below this one; in a chained URL, below its first link with a path."""
        if not path:
            return self
        links = self.target.split("::")
        if self.protocol in REFERENCES:  # shown only
            return replace(self, target=f"{self.target}::/{path}")
        index = next((index for index, link in enumerate(links) if "://" in link), -1)
        links[index] += path if links[index].endswith("/") else "/" + path
        return replace(self, target="::".join(links))


def parse_location(url: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Location:
    """Parse a URL of any fsspec protocol, or a local path, and the `retry` policy in its options.

    User and password of an S3 or HTTP URL are moved to the equivalent options, so that clients do not repeat them in
    their messages. Raises `UsageError` or `UnsupportedError`.
    """
    options = dict(options or {})
    retry = _retry_policy(options.pop("retry", None))
    provider = options.get("credential_provider")
    if provider is not None and not isinstance(provider, CredentialProvider):
        options["credential_provider"] = _provider(provider, options)
    location = replace(_parse(url, options), retry=retry)
    if provider is not None and location.protocol in ("gs", "az", "http"):
        problem = f"{location.shown}: credential_provider is an option of S3"
        raise UnsupportedError(problem, "leave it out: the clients of gs and az renew credentials themselves")
    return location


def _provider(function: Any, options: Mapping[str, Any]) -> CredentialProvider:
    if not callable(function):
        problem = f"storage option credential_provider is a {type(function).__name__}"
        raise UsageError(problem, "give a function without arguments that returns a dict")
    if given := [name for name in _OTHER_KEYS if options.get(name)]:
        raise UsageError(f"storage options credential_provider and {given[0]}", "give one of them")
    return CredentialProvider(function)


def _retry_policy(value: RetryPolicy | Mapping[str, Any] | None) -> RetryPolicy:
    try:
        return value if isinstance(value, RetryPolicy) else RetryPolicy(**(value or {}))
    except TypeError:
        remedy = f"give a RetryPolicy, with {', '.join(option.name for option in fields(RetryPolicy))}"
        raise UsageError(f"invalid storage option retry={value!r:.200}", remedy) from None


def url_text(url: object) -> str:
    """Return a URL or a path as text. Raises `UsageError` for other values."""
    target = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(target, str) or not target.strip():
        given = repr(url) if isinstance(url, str | bytes | int | None) else f"a {type(url).__qualname__}"
        remedy = "give a URL such as s3://bucket/folder, or a local path; sl.Mixture reads several"
        raise UsageError(f"{given} is not a URL", remedy)
    return target


def _parse(url: str | os.PathLike[str], options: dict[str, Any]) -> Location:
    target = url_text(url)
    secrets = secrets_of(target, options)
    if reference := _REFERENCE.match(target):
        protocol, rest = reference["protocol"], (reference["url"] or "").rstrip("/")
        if not rest:
            remedy = f"write {protocol}://:: and its URL: {protocol}://::s3://bucket/name"
            raise UsageError(f"{redact(target)} names no store", remedy)
        return Location(f"{protocol}://::{rest}", protocol, options, secrets)
    if "::" in target:
        return Location(target, CHAIN, options, secrets)
    if "://" not in target:
        _check_slashes(target)
        return Location(_absolute(target), "file", options, secrets)
    scheme, rest = target.split("://", 1)
    scheme = scheme.lower()
    protocol, target = ALIASES.get(scheme, scheme), f"{scheme}://{rest}"
    _check_endpoint(options)
    if protocol == "file":
        return Location(f"file://{_absolute(rest or '/')}", protocol, options, secrets)
    if protocol == "http" and "?" in target:
        problem = f"{redact(target)} has a query, so no path can be appended to it"
        raise UnsupportedError(problem, "give the folder's URL without the query, and credentials in storage_options")
    if protocol in ("s3", "http"):
        target, options = _user_as_options(target, protocol, options)
    if protocol == "http":
        _check_address(target)
    if protocol == "s3":
        options = _without_users(options)
    bare = target.rstrip("/")
    return Location(target if bare.endswith(":") else bare, protocol, options, secrets)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _check_slashes(target: str) -> None:
    """Raise `UsageError` for a URL without its colon or with less than two slashes, instead of taking it for a path."""
    parts = _NO_SLASHES.match(target)
    is_folder = parts and ":" not in parts[2] and parts[1].lower() in _FOLDERS
    if parts and parts[1].lower() in _PROTOCOLS and not is_folder:
        scheme, marks, path = parts.groups()
        root = "/" if "/" in marks and ALIASES.get(scheme.lower(), scheme.lower()) == "file" else ""
        url = redact(f"{scheme.lower()}://{root}{path}")
        shown = scheme + url[len(scheme) :].replace(f"://{root}", marks, 1)
        missing = f"a // is missing after {scheme}:" if ":" in marks else f"a : is missing after {scheme}"
        remedy = f"write {url}, or ./{shown} for a local path of that name"
        raise UsageError(f"{shown!r} is not a URL: {missing}", remedy)


def _check_endpoint(options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an `endpoint_url` without http:// or https://."""
    client = options.get("client_kwargs")
    for mapping in (options, client if isinstance(client, Mapping) else {}):
        endpoint = mapping.get("endpoint_url")
        if isinstance(endpoint, str) and endpoint and not re.match(r"https?://", endpoint, re.IGNORECASE):
            host = re.sub(r"^(https?|[a-z][a-z0-9+.-]*:)?/+", "", endpoint, flags=re.IGNORECASE)
            shown = redact(f"http://{host}").removeprefix("http://")
            start = endpoint.removesuffix(host)
            problem = f"storage option endpoint_url={start + shown!r} does not begin with http:// or https://"
            raise UsageError(problem, f"write http://{shown}, or https://{shown} if the server has a certificate")


def _check_address(target: str) -> None:
    """Raise `UsageError` for a host or a port that no address has, since clients raise anything for them."""
    try:
        parts = urlsplit(target)
        _ = parts.port, (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UsageError(
            f"{redact(target)}: {error}", "write https://host/folder, or https://host:port/folder"
        ) from None


def _user_as_options(target: str, protocol: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the URL without user and password, and the options with them."""
    start = (_S3_USER if protocol == "s3" else _USER).match(target)
    if not start:
        return target, options
    scheme, user = start[0].split("://", 1)
    name, _, password = (unquote(part) for part in user[:-1].partition(":"))
    if protocol == "s3":
        options = {"key": name, "secret": password, **options}
    else:
        basic = f"Basic {_base64(f'{name}:{password}')}"
        options["headers"] = {"Authorization": basic, **(options.get("headers") or {})}
    return f"{scheme}://{target[start.end() :]}", options


def _without_users(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return s3fs's options without user and password in `endpoint_url`: S3 requests are signed instead."""
    clean = dict(options)
    if isinstance(options.get("endpoint_url"), str):
        clean["endpoint_url"] = redact(options["endpoint_url"])
    if isinstance(options.get("client_kwargs"), Mapping):
        clean["client_kwargs"] = _without_users(options["client_kwargs"])
    return clean


def _absolute(path: str) -> str:
    # with slashes on Windows too, as fsspec has them
    return os.path.normpath(Path(path).expanduser().absolute()).replace(os.sep, "/")
