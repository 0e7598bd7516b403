"""Maps exceptions of storage clients to our errors, and retries failed requests. No I/O, no client.

fsspec's backends keep the HTTP status and the store's error code in the exception or in its cause; obstore keeps them
only in its text. Only this module reads them (`storage_error`).

Only temporary failures are retried: `TransientError` (with `ThrottledError`) and, once the endpoint has responded,
`EndpointError`. An error whose `attempts` is a number is retried up to that number, which is mostly one. A wrong
endpoint thus fails at once, while a server that restarts is waited for.
"""

from __future__ import annotations

import errno
import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import IncompleteRead
from typing import NamedTuple, TypeVar

from streamloader import errors
from streamloader.errors import NotFoundError, StorageError, TransientError, UnsupportedError
from streamloader.options import RetryPolicy
from streamloader.storage.buffers import RECEIVER, Receiver
from streamloader.storage.url import Location, proxies

MAX_CHAIN = 20  # exceptions of a chain of causes that are searched for secrets

# S3's error codes for credentials that have expired
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})

# The base classes of the exceptions that clients raise besides OSError
_CLIENT_ROOTS = (
    "http.client.HTTPException botocore.exceptions.BotoCoreError botocore.exceptions.ClientError "
    "botocore.parsers.ResponseParserError aiohttp.ClientError httpx.HTTPError httpx2.HTTPError "
    "obstore.exceptions.BaseError gcsfs.retry.HttpError google.auth.exceptions.GoogleAuthError "
    "azure.core.exceptions.AzureError requests.RequestException fsspec.exceptions.FSTimeoutError icechunk.IcechunkError"
)


class _Rule(NamedTuple):
    """One of our errors, and its `signs`: the error codes, HTTP statuses and exception classes that it is raised for.

    `attempts` limits how often a request is sent; None leaves the limit of the error's class.
    """

    kind: type[StorageError]
    problem: str
    remedy: str
    signs: str
    attempts: int | None = None


_THROTTLED = (
    "429 503 SlowDown ServiceUnavailable Throttling ThrottlingException RequestLimitExceeded TooManyRequests ServerBusy"
)
_OTHER_REGION = "301 307 308 PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed RecursionError"
_FULL = "507 QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded ENOSPC EDQUOT"
_DENIED = (
    "401 403 InvalidToken InvalidAccessKeyId SignatureDoesNotMatch AccessDenied PermissionError NoCredentialsError "
    "PartialCredentialsError CredentialRetrievalError ProfileNotFound TokenRetrievalError SSOTokenLoadError "
    "UnauthorizedSSOTokenError UnauthenticatedError DefaultCredentialsError RefreshError ClientAuthenticationError "
    "PermissionDeniedError"
)
_NO_REASON = ("", "403", "AccessDenied", "Forbidden")  # codes of a 403 that a missing object may get
_UNREACHABLE = (
    "Unreachable EndpointConnectionError ConnectTimeoutError ProxyConnectionError SSLError gaierror "
    "ClientConnectorError ConnectionRefusedError ConnectError ConnectTimeout ProxyError ServiceRequestError InvalidURL"
)
_EXISTS = "412 PreconditionFailed BlobAlreadyExists FileExistsError AlreadyExistsError"
_MISSING = "404 NoSuchKey NoSuchUpload BlobNotFound FileNotFoundError IsADirectoryError NotADirectoryError"
_UNSUPPORTED = "405 501 NotImplementedError NotSupportedError"
_TEMPORARY = (
    "408 409 5xx Interrupted InternalError RequestTimeout OperationAborted ConditionalRequestConflict BadDigest "
    "XAmzContentSHA256Mismatch HTTPClientError ResponseParserError ClientPayloadError ClientConnectionError "
    "FSTimeoutError TimeoutError IncompleteRead ConnectionError TransportError ServiceResponseError JoinError "
    "HTTPException HttpProcessingError"
)

# botocore reads AWS_CA_BUNDLE; OpenSSL (fsspec, gcsfs, adlfs) and rustls (obstore) read SSL_CERT_FILE
_CERTIFICATE = (
    "check the certificate, the clocks and the URL or endpoint_url; for your own CA, set AWS_CA_BUNDLE or verify= (S3) "
    "or SSL_CERT_FILE (https, gs, az)"
)
_REGION = "set client_kwargs={'region_name': ...} or endpoint_url in storage_options"
_PERMISSIONS = "check its permissions (owner, mode, mount), or choose another location"
_CREDENTIALS = "check the credentials (storage_options, AWS_PROFILE or the environment) and their permissions"
_NETWORK = "check the URL or endpoint_url, the network and, for https, the server's certificate"
_HEALTH = "try again; check the store's health, its free space and the network"
_SERVER = "check the server, and any proxy or cache in front of it"

# The first rule that matches is used. A response that contradicts its request is mostly a fault of one transfer: 3
# attempts. Codes and statuses in the response are matched before the names of exception classes, which are strings so
# that no client has to be imported.
_RULES = (
    _Rule(errors.EndpointError, "the server's certificate is not trusted", _CERTIFICATE, "CertificateVerifyFailed", 1),
    _Rule(TransientError, "the server sent another range than the requested one", _SERVER, "WrongRange", 3),
    _Rule(UnsupportedError, "the server ignores ranges", "use a server with ranged reads", "RangeNotSupported", 3),
    _Rule(TransientError, "the server's response is malformed", _SERVER, "Malformed 203 204 205", 3),
    _Rule(NotFoundError, "its bucket does not exist", "check its name, or create it", "NoSuchBucket ContainerNotFound"),
    _Rule(errors.ThrottledError, "the store asks to slow down", "send fewer requests at once", _THROTTLED),
    _Rule(errors.AccessError, "the credentials have expired", "renew them", " ".join(sorted(EXPIRED))),
    _Rule(errors.AccessError, "this machine's clock is wrong", "set the clock", "RequestTimeTooSkewed"),
    _Rule(errors.EndpointError, "the bucket is in another region or at another endpoint", _REGION, _OTHER_REGION, 3),
    _Rule(StorageError, "no space is left", "free some space, or choose another location", _FULL),
    _Rule(StorageError, "the file is larger than the limit", "raise the limit (ulimit -f)", "EFBIG"),
    _Rule(errors.AccessError, "no permission", _PERMISSIONS, "EACCES EPERM EROFS"),
    _Rule(errors.AccessError, "no permission", _CREDENTIALS, _DENIED),
    _Rule(errors.EndpointError, "the endpoint cannot be reached", _NETWORK, _UNREACHABLE),
    _Rule(errors.ObjectExistsError, "the object exists already", "choose another name or delete it", _EXISTS),
    _Rule(NotFoundError, "it does not exist", "check the URL", _MISSING),
    _Rule(UnsupportedError, "the server does not support this request", "use another server", _UNSUPPORTED),
    _Rule(TransientError, "the store failed or the transfer broke off", _HEALTH, _TEMPORARY),
)


class HttpError(OSError):
    """A failed request: HTTP status (0 without a response), the error code (the store's or ours) and a message.

    `headers` are those of the response.
    """

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = code
        self.headers = headers or {}


# Our codes for failures without an error code of the store
_OUR_CODES = {"CertificateVerifyFailed", "WrongRange", "RangeNotSupported", "Malformed", "Unreachable", "Interrupted"}


def client_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that the clients loaded so far can raise, for an `except` clause."""
    names = (path.rpartition(".") for path in _CLIENT_ROOTS.split())
    roots = [getattr(sys.modules.get(module), name, None) for module, _, name in names]
    # RecursionError: botocore follows an endpoint that redirects every request, while it looks for the bucket's region
    return (OSError, NotImplementedError, RecursionError, *(root for root in roots if root is not None))


class Facts(NamedTuple):
    """The facts about a failure in an exception and its causes.

    `status` is the HTTP status, or 0; `names` are those of the exception classes and of an operating system's errno,
    such as "ENOSPC"; `wait` is the seconds of the header Retry-After, or 0.
    """

    status: int
    code: str
    text: str
    names: frozenset[str]
    wait: float


def facts_of(error: BaseException) -> Facts:
    """Collect the facts from an exception and the chain of its causes; the first value of each kind is used."""
    names, links = set[str](), list[tuple[int, str, str, float]]()
    link: BaseException | None = error
    while link is not None and len(links) < 8:
        names.update(kind.__name__ for kind in type(link).__mro__)
        if isinstance(link, OSError) and type(link).__module__ == "builtins":  # in a client's class, errno may differ
            names.add(errno.errorcode.get(link.errno or 0, ""))
        links.append(_facts_of_link(link))
        link = link.__cause__  # not its __context__, which may be an unrelated exception that the caller handles
    status, code, text, wait = (next(filter(None, values), values[0]) for values in zip(*links, strict=True))
    if untrusted := _certificate_problem(error):
        code, text = "CertificateVerifyFailed", untrusted
    return Facts(status, code, text or str(error), frozenset(names), wait)


def _certificate_problem(error: BaseException) -> str:
    """Return the reason of OpenSSL or rustls for rejecting a certificate; empty for any other failure."""
    text = f"{error} {error.__cause__ or ''}"
    openssl = re.search(r"certificate verify failed:? *([^(\])\n]*)", text)
    rustls = re.search(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)", text)
    reason = openssl[1].strip(" .") if openssl else rustls[1].removesuffix("Context") if rustls else ""
    return f"certificate verify failed: {reason}" if reason else ""


def _facts_of_link(error: BaseException) -> tuple[int, str, str, float]:
    """Return the HTTP status, error code, text and requested wait of one exception, without its causes."""
    # obstore raises builtin exceptions too
    if type(error).__module__.startswith("obstore") or "Server returned non-2xx" in str(error):
        return (*_obstore_facts(str(error)), 0.0)
    response, headers = getattr(error, "response", None), getattr(error, "headers", None)
    # aiohttp, azure and gcsfs, in this order: `code` is deprecated in aiohttp
    values = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    status = next((value for value in values if isinstance(value, int)), 0)
    code, text = str(getattr(error, "error_code", None) or ""), ""
    if isinstance(response, dict):  # botocore
        details, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
        code, text = str(details.get("Code", "")), str(details.get("Message", ""))
        status, headers = metadata.get("HTTPStatusCode", 0), metadata.get("HTTPHeaders")
    wait = (headers.get("retry-after") or headers.get("Retry-After")) if isinstance(headers, Mapping) else None
    seconds = re.fullmatch(r"\d{1,6}(\.\d+)?", str(wait))  # stores do not send dates
    return status, code, text, float(seconds[0]) if seconds else 0.0


# Patterns in obstore's text for failures without an error code
_OBSTORE_CODES = (
    (r"kind: Connect\b|tcp connect|dns error", "Unreachable"),
    (r"kind: (Timeout|Interrupted|Request|Decode|Body|Unknown)\b|source: Header \{", "Interrupted"),
    (r"InvalidRange", "InvalidRange"),
    (r"source: (UnexpectedRange|\w+ContentRange)\b", "WrongRange"),
    (r"NotPartial|RangeNotSupported", "RangeNotSupported"),
)


def xml_error(text: str) -> tuple[str, str]:
    """Return the code and the message of an error document of S3; each is empty if it is missing."""
    code, message = (re.search(f"<{name}>(.*?)</{name}>", text) for name in ("Code", "Message"))
    return code[1] if code else "", message[1] if message else ""


def _obstore_facts(text: str) -> tuple[int, str, str]:
    summary, _, debug = text.partition("Debug source:")
    status, (code, message) = re.search(r"status code: (\d{3})", summary), xml_error(text)
    causes = []
    if status is None:
        code = next((name for pattern, name in _OBSTORE_CODES if re.search(pattern, debug)), code)
        causes = re.findall(r'\b(?:error|message): "([^"]+)"', debug)  # of the operating system: the summary has none
    return int(status[1]) if status else 0, code, message or (causes[-1] if causes else summary)


def is_past_end(error: BaseException) -> bool:
    """Return whether the store rejected a range because it begins after the end of the object."""
    facts = facts_of(error)
    return facts.status == 416 or facts.code == "InvalidRange"


def check_range(requested: str, content_range: str | None, length: int | None) -> None:
    """Raise `HttpError` if a response has another range than the requested one, `IncompleteRead` if it has not all.

    `requested` is the request's header Range, `bytes=first-last` or `bytes=-size`, `content_range` the response's
    header Content-Range, and `length` its Content-Length, None without one.
    """
    asked = re.fullmatch(r"bytes=(\d*)-(\d+)", requested)
    sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", content_range or "")
    if not asked or not sent:  # the header is optional, and the bytes are checked
        return
    first, last = int(sent[1]), int(sent[2])
    end = int(sent[3]) - 1 if sent[3] != "*" else None  # the last byte of the object
    if asked[1]:  # a range may end before the requested last byte, at the end of the object
        matches = first == int(asked[1]) and (last == int(asked[2]) or (last < int(asked[2]) and end in (None, last)))
    else:
        matches = end is None or (last == end and first == max(0, end + 1 - int(asked[2])))
    if not matches:
        raise HttpError(206, "WrongRange", f"requested {requested}, the response has {content_range}")
    size = (last if end is None else min(last, end)) + 1 - first  # some servers state the last byte as it was requested
    if length is not None and length != size:
        raise IncompleteRead(b"", size - length)


def storage_error(error: BaseException, location: Location) -> StorageError:
    """Return our error for a client's exception at a location. Raise it `from cause_of(error, location)`."""
    if isinstance(error, StorageError):
        return error
    facts, url = facts_of(error), location.shown
    detail = " ".join(location.redact(facts.text).split())[:200]
    path = str(getattr(error, "filename", None) or "")
    if path and path in url:  # the operating system's text repeats it
        detail = detail.replace(f": {path!r}", "")
    if not facts.code.isdigit() and facts.code not in _OUR_CODES and facts.code not in detail:
        detail = f"{facts.code}: {detail}"
    detail = detail or type(error).__name__
    responded = {facts.code, str(facts.status), f"{facts.status // 100}xx"}
    rules = (rule for signs in (responded, facts.names) for rule in _RULES if signs & set(rule.signs.split()))
    rule = next(rules, None)
    if rule is None:
        return StorageError(f"{url}: {detail}", "check the store and storage_options")
    remedy, named = rule.remedy, [f"{name}_proxy={proxy}" for name, proxy in proxies().items() if name != "no"]
    if rule.signs == _UNREACHABLE and named:
        remedy += f"; the environment names proxies: {', '.join(named)}"
    ours = rule.kind(f"{url}: {rule.problem} ({detail})", remedy)
    ours.retry_after = facts.wait
    if isinstance(ours, errors.AccessError):
        ours.may_be_missing = facts.status == 403 and facts.code in _NO_REASON
    if rule.attempts is not None:
        ours.attempts = rule.attempts
    return ours


def cause_of(error: BaseException, location: Location) -> BaseException | None:
    """Return the cause to chain to our error: `error`, or a `ClientError` with its redacted text if a message in its
    chain contains a secret.
    """
    if isinstance(error, StorageError):
        return error.__cause__
    texts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(texts) < MAX_CHAIN:
        texts += [str(link), *getattr(link, "__notes__", ())]
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    if link is None and all(location.redact(text) == text for text in texts):
        return error
    text = " ".join(location.redact(texts[0]).split())
    return ClientError(f"{type(error).__name__}: {text}").with_traceback(error.__traceback__)


class translated:  # noqa: N801 - read as a function
    """Raise the exceptions of clients in the block as our errors, which name `path` below `location`.

    From a generator, `contextmanager` would make a reference cycle of them in Python 3.12 and later.
    """

    def __init__(self, location: Location, path: str = "") -> None:
        self._location, self._path = location, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and isinstance(error, client_errors()):
            raise storage_error(error, self._location.child(self._path)) from cause_of(error, self._location)


class ClientError(Exception):
    """A storage client's exception without the secrets in its message."""


Result = TypeVar("Result")
OnRetry = Callable[[StorageError, float], None] | None  # gets the error, and the seconds until the retry

# An outage is declared after this time without a success; until then, each request retries independently
OUTAGE_AFTER_SECONDS = 0.5
# How often a waiting request checks whether another's probe has ended the outage
POLL_SECONDS = 0.1
# Responses may pause for this long: shorter pauses occur in every network
LEAST_PATIENCE = 1.0

_LOG = logging.getLogger("streamloader")


class Timing(NamedTuple):
    """The clock, sleep (both in seconds) and jitter in [0, 1) that retries use; tests replace them."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random


class Outage:
    """The failures of one endpoint since its last success, and when a request may probe it. No threads, no clock.

    The retries of many requests do not add up to a flood: as long as none succeeds, one request at a time is admitted
    as a probe, at random intervals of 0.5 to 1 times `probe_seconds`, whether or not the previous one has ended.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._since: float | None = None
        self._succeeded_at = self.ended_at = float("-inf")
        self._probe_at = 0.0
        self.declared = self.reported = False
        self.error = ""

    def seconds(self, now: float) -> float:
        """Return for how long no request has succeeded; 0 if the last one succeeded."""
        return 0.0 if self._since is None else now - self._since

    def failed(self, sent: float, now: float, jitter: float, error: str) -> None:
        """Record the failure of a request that was sent at `sent`."""
        if self._since is None:
            self._since = max(sent, self._succeeded_at)
        self.error = error
        if not self.declared and self.seconds(now) >= OUTAGE_AFTER_SECONDS:
            self.declared = True
            self._next_probe(now, jitter)

    def succeeded(self, now: float) -> None:
        """Record a success, which ends the outage."""
        if self.declared:
            self.ended_at = now
        self._succeeded_at = now
        self.forget()

    def forget(self) -> None:
        """Discard the outage; the next failure begins another one."""
        self._since, self.declared, self.reported = None, False, False

    def wait(self, now: float, jitter: float) -> float:
        """Return how long the next request has to wait, in seconds, before it calls this again; 0 admits it."""
        if not self.declared or self.seconds(now) >= self._policy.outage_seconds:
            return 0.0
        if now < self._probe_at:
            return self._probe_at - now
        self._next_probe(now, jitter)
        return 0.0

    def _next_probe(self, now: float, jitter: float) -> None:
        self._probe_at = now + self._policy.probe_seconds * (0.5 + 0.5 * jitter)


class Progress:
    """The deadline of a response, which its bytes move.

    It begins `response_seconds` from now. Each byte adds 1 / `min_bytes_per_second`, up to `response_seconds` from its
    arrival. A response of n bytes thus takes at most `policy.deadline(n)`, and one that nearly stops is late
    `response_seconds` afterwards.
    """

    def __init__(
        self, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic, seconds: float | None = None
    ) -> None:
        self._policy, self._clock = policy, clock
        self._seconds = seconds or policy.response_seconds
        self._late_at = clock() + self._seconds

    def received(self, size: int) -> None:
        """Count bytes of the body that have arrived."""
        latest = self._clock() + self._seconds
        self._late_at = min(latest, self._late_at + size / self._policy.min_bytes_per_second)

    def seconds_left(self) -> float:
        """Return how many seconds the next bytes may take. Raises `TimeoutError` if the response is late already."""
        left = self._late_at - self._clock()
        if left <= 0:
            rate = self._policy.min_bytes_per_second
            raise TimeoutError(f"the response was more than {self._seconds:g} s behind {rate:g} bytes/s")
        return left


class Patience:
    """How long the response to a read may take to begin, by how long others took: `seconds`.

    It is the retransmission timer of TCP (RFC 6298): the smoothed mean plus four times the smoothed deviation. Later
    pauses of the response may take as long, and one that takes longer counts as that.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._most = self._mean = policy.response_seconds
        self._deviation, self._first = 0.0, True

    def call(self, read: Callable[[float], Result], receiver: Receiver = RECEIVER) -> Result:
        """Return `read(seconds)`, which is repeated once with the policy's time: a wrong estimate costs one request."""
        seconds = max(LEAST_PATIENCE, self._mean + 4 * self._deviation)
        if seconds < self._most:
            try:
                return read(seconds)
            except TimeoutError:
                self.began(seconds)  # it took that long at least: of a store that often pauses, this learns
                receiver.on_repeat()
        return read(self._most)

    def began(self, seconds: float) -> None:
        """Record a response that began after `seconds`."""
        if self._first:
            self._first, self._mean, self._deviation = False, seconds, seconds / 2
        self._deviation += (abs(seconds - self._mean) - self._deviation) / 4
        self._mean += (seconds - self._mean) / 8


class Retrier:
    """Retries the requests of one process to one endpoint. Thread-safe; not for use after a fork.

    `name` is the endpoint's name in messages. `reached` is whether it has ever responded.
    """

    def __init__(self, policy: RetryPolicy, name: str, timing: Timing | None = None) -> None:
        self.policy = policy
        self._name = name
        self._timing = timing or Timing()
        self._lock = threading.Lock()
        self._outage = Outage(policy)
        self._failing = 0  # requests that have failed at least once and have not ended
        self._asked = float("-inf"), ""  # until when the store has asked to wait, in words
        self._thread = threading.local()
        self.reached: bool = False

    @contextmanager
    def waits_by(self, sleep: Callable[[float], None]) -> Iterator[None]:
        """Make the calls of this thread in the block wait by `sleep(seconds)`; what it raises ends the call."""
        self._thread.sleep = sleep
        try:
            yield
        finally:
            del self._thread.sleep

    def call(self, call: Callable[[], Result], *, on_retry: OnRetry = None) -> Result:
        """Return the result of `call`, which is repeated after temporary failures.

        `on_retry(error, seconds)` is called before the wait for each retry. Raises an error of the last failure's type,
        with the number of attempts and the total time.
        """
        request = self.request()
        sleep = getattr(self._thread, "sleep", self._timing.sleep)
        try:
            while True:
                while seconds := self.wait():
                    sleep(seconds)
                self.sent(request)
                try:
                    result = call()
                except StorageError as error:
                    delay = self.failed(request, error)
                    if on_retry is not None:
                        on_retry(error, delay)
                    sleep(delay)
                else:
                    self.succeeded()
                    return result
        finally:
            self.ended(request)

    def request(self) -> Request:
        """Return a request that is sent now: `call` without its loop, for those who do not wait.

        The caller sends it once `wait` returns 0, calls `sent` each time, reports every attempt by `succeeded` or
        `failed`, and then calls `ended`.
        """
        now = self._timing.clock()
        return Request(now, now)

    def sent(self, request: Request) -> None:
        """Record that a request is sent now."""
        request.sent = self._timing.clock()

    def failed(self, request: Request, error: StorageError) -> float:
        """Record a failed attempt, and return the seconds to wait before the next one.

        Raises an error of the same type, with the number of attempts and the total time, if there is none.
        """
        try:
            if isinstance(error, (NotFoundError, errors.ObjectExistsError)):
                self.succeeded()  # the endpoint has responded
                raise error
            delay = self._delay(request, error)
            if delay is None and request.attempts == 1:
                raise error
            if delay is None:
                seconds = self._timing.clock() - request.begin
                problem = f"{error.problem} ({request.attempts} attempts in {seconds:.1f} s)"
                raise type(error)(problem, error.remedy) from error
            return delay
        finally:
            del error  # its traceback holds this frame

    def ended(self, request: Request) -> None:
        """End a request, and forget the outage if no other one that has failed waits for its end."""
        if not request.attempts:
            return
        with self._lock:
            self._failing -= 1
            if not self._failing:
                self._outage.forget()

    @property
    def waiting_for(self) -> str:
        """The endpoint, duration and last error of an outage that has lasted for `report_seconds`, or a wait that the
        store has asked for; else empty.
        """
        with self._lock:
            return self._long_outage() or (self._asked[1] if self._timing.clock() < self._asked[0] else "")

    def _long_outage(self) -> str:
        """Return the words for an outage of at least `report_seconds`, else nothing. The caller has the lock."""
        seconds = self._outage.seconds(self._timing.clock())
        if not self._outage.declared or seconds < self.policy.report_seconds:
            return ""
        return f"no request to {self._name} has succeeded for {seconds:.0f} s; last error: {self._outage.error}"

    def _delay(self, request: Request, error: StorageError) -> float | None:
        """Record a failure, and return the seconds to wait before the retry, None if there is none."""
        timing, policy, sent = self._timing, self.policy, request.sent
        now, jitter = timing.clock(), timing.jitter()
        request.attempts += 1
        if request.attempts == 1:
            with self._lock:
                self._failing += 1
        request.failed_at = min(request.failed_at, sent)
        if error.attempts is not None:
            request.limited += 1
            if request.limited >= error.attempts:
                return None
        with self._lock:
            outage = self._outage
            outage.failed(sent, now, jitter, error.problem)
            alone = now - max(request.failed_at, outage.ended_at)
            over = outage.seconds(now) >= policy.outage_seconds
            over |= not outage.declared and alone >= policy.request_seconds
            over |= now - request.failed_at >= policy.outage_seconds + policy.request_seconds
            requested = min(policy.retry_after_seconds, error.retry_after)
            first, asked = now >= self._asked[0], ""
            if requested >= policy.report_seconds:
                asked = f"{self._name} asks to wait {error.retry_after:g} s (Retry-After); the wait is {requested:g} s"
                self._asked = now + requested, asked
            retry = request.backoffs + isinstance(error, errors.ThrottledError)
            delay = requested if outage.declared else requested + policy.delay(retry, jitter)
            request.backoffs += not outage.declared
        if asked and first:  # without the lock: a handler of the log may ask what is waited for
            _LOG.warning("streamloader: %s", asked)
        temporary = self.reached or isinstance(error, errors.ThrottledError) or error.attempts is not None
        temporary |= isinstance(error, TransientError) and request.attempts < policy.first_contact_attempts
        if over or not temporary:
            return None
        self._report()
        return delay

    def wait(self) -> float:
        """Return how many seconds a request waits, in an outage, before it asks again; 0 if it may be sent now."""
        if not self._outage.declared:
            return 0.0
        with self._lock:
            wait = self._outage.wait(self._timing.clock(), self._timing.jitter())
        if wait <= 0:
            return 0.0
        self._report()
        return min(wait, POLL_SECONDS)

    def succeeded(self) -> None:
        """Record a response of the endpoint, which ends an outage."""
        now = self._timing.clock()
        with self._lock:
            self.reached = True
            seconds, reported = self._outage.seconds(now), self._outage.reported
            self._outage.succeeded(now)
            self._asked = self._asked[0], ""
        if reported:
            _LOG.warning("streamloader resumes: requests to %s succeed again after %.0f s", self._name, seconds)

    def _report(self) -> None:
        """Log an outage once, after it has lasted for `report_seconds`."""
        with self._lock:
            text = "" if self._outage.reported else self._long_outage()
            self._outage.reported |= bool(text)
        if text:
            _LOG.warning("streamloader retries for up to %.0f s: %s", self.policy.outage_seconds, text)


@dataclass(slots=True)
class Request:
    """A request to the store, with the times of its first attempt, its last one, and its first failed one."""

    begin: float
    sent: float
    attempts: int = 0
    limited: int = 0  # failures whose error limits the attempts
    backoffs: int = 0  # retries outside of a declared outage
    failed_at: float = float("inf")
