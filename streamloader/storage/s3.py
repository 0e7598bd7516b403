"""Requests to S3 as botocore's own client would send them.

botocore decides endpoint, region, addressing style, headers, credentials and signature; nothing of that is decided
here. Its client builds one request for each operation without sending it. All others differ in the key and, for a
body, in the digest: they reuse its URL and headers and are signed by the client's signer, which takes 0.1 ms where the
whole client takes 0.3. A range needs no signature, so that of a GET serves the whole object for a minute.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import botocore.session
from botocore import UNSIGNED, xform_name
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.httpsession import get_cert_path
from botocore.utils import percent_encode, validate_region_name

from streamloader.errors import AccessError, UnsupportedError
from streamloader.storage.failures import cause_of, client_errors, storage_error
from streamloader.storage.location import Location
from streamloader.storage.translate import (
    CONNECT_SECONDS,
    FSSPEC_ONLY,
    Target,
    client_options,
    refuse_unknown,
)

# botocore renews a session at least ten minutes before it ends, so what it gives is good for that long
TRUST = timedelta(minutes=10)
# a stage fetches with up to some hundred threads; botocore keeps 10 connections unless told otherwise
POOL_CONNECTIONS = 128
CHECKSUM = "x-amz-checksum-crc32c"
# S3 takes a signature for 15 minutes; a clock may be wrong by some of them
SIGNATURE_SECONDS = 60.0
MAX_SIGNATURES = 4096
EXPRESS = "v4-s3express"
_ANY_KEY = "key"
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")

# the bucket of a path may be an access point's ARN, whose name is behind a slash
_ARN = re.compile(r"arn:[^/]+?:(?:outpost[/:][^/:]+[/:])?(?:accesspoint|bucket)[/:][^/:]+")
_OPTIONS = {
    *("key", "secret", "token", "username", "password", "anon", "profile", "endpoint_url", "requester_pays"),
    *("client_kwargs", "config_kwargs", "s3_additional_kwargs", "use_ssl", "version_aware", "session"),
}
_NO_EFFECT = FSSPEC_ONLY | {"cache_regions", "max_concurrency", "fixed_upload_size", "local_expiry_check"}
_TRANSPORT = {"proxies", "proxies_config", "client_cert", "connector_args", "http_session_cls"}
# which answers botocore's client takes for another region's
_OTHER_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_REDIRECTS = (301, 302, 307)
AWS_DOMAINS = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws", ".api.amazonwebservices.com.cn")


class Origin(NamedTuple):
    """Where connections go to."""

    scheme: str
    host: str
    port: int | None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


@dataclass(frozen=True)
class _Template:
    """A request for `_ANY_KEY`, before its signature: `url` and `auth_path` end where the key begins."""

    method: str
    url: str
    auth_path: str | None
    headers: Mapping[str, str]
    context: Mapping[str, Any] = field(repr=False)
    signer: Any = field(repr=False)

    @cached_property
    def origin(self) -> Origin:
        """Where the request goes to."""
        return _origin(self.url)

    @property
    def scope(self) -> tuple[str, Any]:
        """Return what another region would change."""
        return self.url, self.context.get("signing")


@dataclass(frozen=True)
class SignedRequest:
    """A request to be sent now."""

    method: str
    url: str
    target: str  # path and query, as the first line has them
    headers: dict[str, str] = field(repr=False)
    template: _Template = field(repr=False)


class S3Client:
    """One bucket, as botocore's client addresses it. Thread-safe; for one process.

    `parameters` are the S3 parameters of every call, such as `RequestPayer`; each operation takes those it knows.
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
        parameters: Mapping[str, Any],
        verify: bool | str | None,
        make: Callable[[], Any] | None = None,
    ) -> None:
        self.bucket = bucket
        self._make = make
        self.verify = verify
        self.signs = client.meta.config.signature_version is not UNSIGNED
        self.connect_seconds = float(client.meta.config.connect_timeout)
        self.read_seconds = float(client.meta.config.read_timeout)
        self._client = client
        self._parameters = parameters
        self._lock = threading.RLock()
        self._templates: dict[str, _Template] = {}
        self._region = ""
        self._signed: dict[str, tuple[float, Any, SignedRequest]] = {}
        client.meta.events.register("before-endpoint-resolution.s3", self._use_region)

    def get(self, key: str, headers: Mapping[str, str] | None = None) -> SignedRequest:
        """Return a signed GET of an object, with `headers` that need no signature.

        A signature is used again for a minute, as long as credentials and region are the same.
        """
        template = self.template("GetObject")
        if template.context["auth_type"] == EXPRESS:  # its sessions are botocore's to renew
            return self.request("GetObject", key, headers)
        now, keys = time.monotonic(), self.keys()
        until, signed_by, signed = self._signed.get(key, (0.0, None, None))
        if signed is None or until <= now or signed_by != keys or signed.template is not template:
            if len(self._signed) >= MAX_SIGNATURES:
                self._signed.clear()
            signed = self.request("GetObject", key)
            self._signed[key] = (now + SIGNATURE_SECONDS, keys, signed)
        sent = {**signed.headers, **(headers or {})}
        return SignedRequest(signed.method, signed.url, signed.target, sent, template)

    def request(
        self,
        operation: str,
        key: str,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
        hashed: bool = True,
    ) -> SignedRequest:
        """Return a signed request: `operation` is `GetObject`, `HeadObject` or `PutObject`.

        `hashed`: whether the signature covers the digest of the `body`, unless the options say so. Raises what
        botocore raises.
        """
        template = self.template(operation)
        encoded = percent_encode(key, safe="/~")
        data = _Parts(body) if body else b""
        auth_path = None if template.auth_path is None else template.auth_path + encoded
        given = {**template.headers, **(headers or {})}
        request = AWSRequest(template.method, template.url + encoded, given, data, auth_path=auth_path)
        request.context = dict(template.context)  # the signer writes to it
        if not hashed:
            request.context["client_config"] = self._without_digest()
        template.signer.sign(operation, request)
        sent = {name: str(value) for name, value in request.headers.items()}
        parts = urlsplit(request.url)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        return SignedRequest(template.method, request.url, target, sent, template)

    def template(self, operation: str) -> _Template:
        """Return the operation's request for any key, which the client builds at the first call."""
        built = self._templates.get(operation)
        if built is not None:
            return built
        with self._lock:
            if operation not in self._templates:
                self._templates[operation] = self._build(operation)
            return self._templates[operation]

    @property
    def origin(self) -> Origin:
        """Where the bucket is, as far as is known."""
        return self.template("GetObject").origin

    def keys(self) -> Any:
        """Return the credentials valid now (`access_key`, `secret_key`, `token`); None where none are found."""
        return self.template("GetObject").signer.get_auth_instance("s3", "us-east-1", "s3v4").credentials

    def provide_keys(self) -> dict[str, Any]:
        """Return the current credentials as obstore takes them, which asks again when they have expired."""
        keys = self.keys()
        ends = getattr(self._client._request_signer._credentials, "_expiry_time", None)  # of those that botocore renews
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": min(datetime.now(UTC) + TRUST, ends.astimezone(UTC)) if ends else datetime.now(UTC) + TRUST,
        }

    def renew(self, used: SignedRequest | None = None) -> bool:
        """Look for credentials from the beginning, since the server says that they have expired.

        Return whether a request that `used` them should be sent again. Another thread may have renewed them already.
        """
        if self._make is None or not self.signs:
            return False
        with self._lock:
            if used is None or used.headers.get("X-Amz-Security-Token") == self.keys().token:
                self._client = self._make()
                self._client.meta.events.register("before-endpoint-resolution.s3", self._use_region)
                self._templates.clear()
        return True

    def find_region(self) -> str:
        """Return the region that requests are signed for, after botocore's client has asked AWS where the bucket is.

        Elsewhere, and where AWS does not say, it is the configured one.
        """
        with self._lock:
            if not self._region and self.origin.host.endswith(AWS_DOMAINS) and not self.bucket.startswith("arn:"):
                with contextlib.suppress(ClientError, BotoCoreError):
                    self._client.head_bucket(Bucket=self.bucket, **self._known("HeadBucket", {}))
                self._templates.clear()
            signing = self.template("GetObject").context.get("signing") or {}
            return signing.get("region") or ""

    def adopt_region(self, used: SignedRequest, operation: str, status: int, code: str, region: str) -> bool:
        """Return whether a request that was answered so should be sent again, since the bucket's region is known now.

        `region` is what the answer names, if it does. For an access point's ARN, which names its own, it is False.
        """
        if (status not in _REDIRECTS and code not in _OTHER_REGION) or self.bucket.startswith("arn:"):
            return False
        with self._lock:
            if self._templates.get(operation) is not used.template:
                return True  # another thread has done it
            if region:
                validate_region_name(region)  # it becomes part of a host's name
                self._region = region
            else:
                self.find_region()
            self._templates.clear()
            return self.template(operation).scope != used.template.scope

    def _use_region(self, builtins: dict[str, Any], **_: Any) -> None:
        if self._region:
            builtins["AWS::Region"] = self._region

    def _known(self, operation: str, more: Mapping[str, Any]) -> dict[str, Any]:
        members = self._client.meta.service_model.operation_model(operation).input_shape.members
        return {name: value for name, value in {**self._parameters, **more}.items() if name in members}

    def _build(self, operation: str) -> _Template:
        """Let the client build a request, and take it before it is signed and sent."""
        built: dict[str, Any] = {}

        def take(params: Mapping[str, Any], context: Mapping[str, Any], request_signer: Any, **_: Any) -> Any:
            built.update(params=params, context=context, signer=request_signer)
            return _Sent(), {}

        event, events = f"before-call.s3.{operation}", self._client.meta.events
        more = {"ChecksumCRC32C": "AAAAAA=="} if operation == "PutObject" else {}  # so that botocore adds none
        events.register_last(event, take)
        try:
            getattr(self._client, xform_name(operation))(
                Bucket=self.bucket, Key=_ANY_KEY, **self._known(operation, more)
            )
        finally:
            events.unregister(event, take)
        params, end = built["params"], -len(_ANY_KEY)
        auth_path = params.get("auth_path")
        return _Template(
            params["method"],
            params["url"][:end],
            auth_path[:end] if auth_path else None,
            {name: value for name, value in params["headers"].items() if name != CHECKSUM},
            built["context"],
            built["signer"],
        )

    def _without_digest(self) -> Config:
        config = self._client.meta.config
        return config.merge(Config(s3={"payload_signing_enabled": False, **(config.s3 or {})}))


class _Sent:
    """The answer that a client gets to a request that is not sent."""

    status_code = 200


class _Parts:
    """A body of several buffers as botocore's signer reads it."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self._next: Iterator[memoryview] = iter(parts)

    def tell(self) -> int:
        """Return 0: it is read from the start."""
        return 0

    def seek(self, *_: int) -> None:
        """Go back to the start."""
        self._next = iter(self._parts)

    def read(self, *_: int) -> memoryview | bytes:
        """Return the next buffer."""
        return next(self._next, b"")


def split_bucket(path: str) -> tuple[str, str]:
    """Return bucket, which may be an ARN, and key of what follows `s3://`."""
    arn = _ARN.match(path)
    bucket = arn[0] if arn else path.partition("/")[0]
    return bucket, path[len(bucket) + 1 :]


def client_config(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the `config_kwargs` of a client: only our policy retries, and there are connections for all threads."""
    return {"max_pool_connections": POOL_CONNECTIONS, "retries": {"max_attempts": 0}, **(given or {})}


def open_s3(location: Location) -> S3Client:
    """Return the client of an S3 URL. Makes no request.

    Raises `UnsupportedError` for an option of s3fs that only s3fs can serve, and `AccessError` or `EndpointError`
    where credentials, certificates or the endpoint are missing or wrong.
    """
    try:
        client, verify = _botocore_client(location)
        bucket, make = split_bucket(location.path)[0], partial(_botocore_client, location)
        s3 = S3Client(client, bucket, _parameters(location.options), verify, lambda: make()[0])
        if s3.signs and s3.keys() is None:
            raise AccessError(
                f"{location.shown}: no credentials found",
                "give key and secret (or anon=True) in storage_options, or set AWS_PROFILE or AWS_ACCESS_KEY_ID",
            )
    except ValueError as error:  # botocore's for an endpoint without a scheme, for example
        problem = location.secrets.redact(f"botocore refuses the options: {error}")
        raise UnsupportedError(problem) from cause_of(error, location.secrets)
    except client_errors() as error:
        raise storage_error(error, location.shown, location.secrets) from cause_of(error, location.secrets)
    return s3


def _botocore_client(location: Location) -> tuple[Any, bool | str | None]:
    """Return the client that s3fs makes of its options, and its `verify`."""
    options = location.options
    refuse_unknown("s3fs", options, _OPTIONS | _NO_EFFECT)
    if options.get("version_aware") or options.get("session"):
        raise UnsupportedError("only s3fs knows the options version_aware and session")
    config = dict(options.get("config_kwargs") or {})
    refuse_unknown("s3fs's config_kwargs", config, config.keys() - _TRANSPORT)
    config = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": location.retry.response_seconds,
        **client_config(config),
    }
    given = {
        "aws_access_key_id": options.get("key") or options.get("username"),
        "aws_secret_access_key": options.get("secret") or options.get("password"),
        "aws_session_token": options.get("token"),
        "endpoint_url": options.get("endpoint_url"),
        "use_ssl": options.get("use_ssl", True),
        **(options.get("client_kwargs") or {}),
    }
    if options.get("anon"):
        config["signature_version"] = UNSIGNED
        given = {name: value for name, value in given.items() if name not in _KEYS}
    session = botocore.session.Session(profile=options.get("profile"))
    verify = given.get("verify")
    if verify is None:
        verify = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    try:
        return session.create_client("s3", config=Config(**config), **given), verify
    except TypeError as error:
        raise UnsupportedError(f"botocore does not know an option: {error}") from None


def _parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    payer = {"RequestPayer": "requester"} if options.get("requester_pays") else {}
    return {**payer, **(options.get("s3_additional_kwargs") or {})}


def _origin(url: str) -> Origin:
    parts = urlsplit(url)
    return Origin(parts.scheme, parts.hostname or "", parts.port)


def refuse_proxy(s3: S3Client) -> None:
    """Raise `UnsupportedError` where a proxy stands before the bucket."""
    origin = s3.origin
    proxies = urllib.request.getproxies()
    if {origin.scheme, "all"} & proxies.keys() and not urllib.request.proxy_bypass(origin.host):
        raise UnsupportedError(f"a proxy stands before {origin.host}")


def tls_context(verify: bool | str | None) -> ssl.SSLContext:
    """Return the TLS settings for botocore's `verify`: False, a file of certificates, or None for botocore's own."""
    trusted = verify if isinstance(verify, str) else str(get_cert_path(True))
    try:
        context = ssl.create_default_context(cafile=trusted)
    except OSError as error:
        problem = f"the certificates of {trusted} cannot be read: {error}"
        raise AccessError(problem, "check verify= or AWS_CA_BUNDLE") from error
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def s3_target(location: Location) -> Target:
    """Return what obstore's client for the bucket is made of: botocore's URL of the bucket and its signing region.

    obstore follows no bucket to its region, so at AWS one request asks for it. Raises what `open_s3` raises.
    """
    s3 = open_s3(location)
    region = s3.find_region()
    template = s3.template("GetObject")
    payer = location.options.get("requester_pays")
    own = {name for name in template.headers if name.lower().startswith("x-amz-server-side")}
    if own or template.context["auth_type"] not in (None, "v4", "s3v4", UNSIGNED):
        raise UnsupportedError("obstore does not know customer-provided keys, S3 Express and signatures but version 4")
    endpoint = template.url.rstrip("/")
    # told that the bucket stands in the endpoint's host, obstore takes the endpoint as it is
    config: dict[str, Any] = {"endpoint": endpoint, "virtual_hosted_style_request": True}
    config["region"] = region or "us-east-1"
    if "AWS_ENDPOINT_URL_S3" in os.environ:
        config["aws_endpoint_url_s3"] = endpoint  # to obstore the variable outranks `endpoint`
    config |= {"request_payer": True} if payer else {}
    config |= {} if s3.signs else {"skip_signature": True}
    http = client_options(s3.connect_seconds, s3.read_seconds, endpoint.startswith("http://"))
    if s3.verify is False:
        http["allow_invalid_certificates"] = True
    elif isinstance(s3.verify, str) and not http["allow_http"]:
        http["root_certificate"] = Path(s3.verify).read_bytes()
    bucket, prefix = split_bucket(location.path)
    return Target("s3", bucket, prefix, config, http, s3.provide_keys if s3.signs else None, s3.renew)
