"""When a failed request is sent again, and how long to wait first. No I/O, no client.

Failures are errors of our own first. fsspec's backends keep the HTTP status and the store's error code in the exception
or in its cause; obstore keeps them only in its text. Both are read here and nowhere else (`storage_error`).

Only failures that may pass are retried: those whose `attempts` are not limited, `TransientError` (with
`ThrottledError`) and, once the endpoint has responded, `EndpointError`; others up to their `attempts`, which is mostly
one. A wrong endpoint thus fails at once, and a server that restarts does not.
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
from typing import NamedTuple, NoReturn, TypeVar

from streamloader.errors import (
    AccessError,
    EndpointError,
    NotFoundError,
    ObjectExistsError,
    StorageError,
    ThrottledError,
    TransientError,
    UnsupportedError,
)
from streamloader.options import RetryPolicy
from streamloader.storage.url import NO_SECRETS, Location, Secrets

MAX_CHAIN = 20  # causes of an exception that are searched for secrets

CHECK_SERVER = "look at the server, and at a proxy or cache before it"
# S3's error codes for credentials that were valid once
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})

# module, class: the roots of the exceptions that clients raise besides OSError
_CLIENT_ROOTS = (
    ("http.client", "HTTPException"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("botocore.parsers", "ResponseParserError"),
    ("aiohttp", "ClientError"),
    ("obstore.exceptions", "BaseError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
    ("requests", "RequestException"),
    ("fsspec.exceptions", "FSTimeoutError"),
)


class _Rule(NamedTuple):
    """One of our errors, and the codes, HTTP statuses and names of exception classes that it is raised for.

    `attempts` limits how often a request is sent; None: as the error's class has it.
    """

    kind: type[StorageError]
    problem: str
    remedy: str
    signs: str
    attempts: int | None = None


_THROTTLED = (
    "429 503 SlowDown ServiceUnavailable Throttling ThrottlingException RequestLimitExceeded TooManyRequests ServerBusy"
)
_ELSEWHERE = "301 307 308 PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed RecursionError"
_FULL = "507 QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded ENOSPC EDQUOT"
_DENIED = (
    "401 403 InvalidToken InvalidAccessKeyId SignatureDoesNotMatch AccessDenied PermissionError NoCredentialsError "
    "PartialCredentialsError CredentialRetrievalError ProfileNotFound TokenRetrievalError SSOTokenLoadError "
    "UnauthorizedSSOTokenError UnauthenticatedError DefaultCredentialsError RefreshError ClientAuthenticationError "
    "PermissionDeniedError"
)
_UNREACHABLE = (
    "Unreachable EndpointConnectionError ConnectTimeoutError ProxyConnectionError SSLError gaierror "
    "ClientConnectorError ConnectionRefusedError ServiceRequestError InvalidURL"
)
_EXISTS = "412 PreconditionFailed BlobAlreadyExists FileExistsError AlreadyExistsError"
_MISSING = "404 NoSuchKey NoSuchUpload BlobNotFound FileNotFoundError IsADirectoryError NotADirectoryError"
_UNSUPPORTED = "405 501 NotImplementedError NotSupportedError"
_PASSING = (
    "408 409 5xx Interrupted InternalError RequestTimeout OperationAborted ConditionalRequestConflict BadDigest "
    "XAmzContentSHA256Mismatch HTTPClientError ResponseParserError ClientPayloadError ClientConnectionError "
    "FSTimeoutError TimeoutError IncompleteRead ConnectionError TransportError ServiceResponseError JoinError "
    "HTTPException HttpProcessingError"
)

_CERTIFICATE = "check the certificate, the clocks and endpoint_url; set AWS_CA_BUNDLE or verify= for a CA of your own"
_REGION = "set client_kwargs={'region_name': ...} or endpoint_url in storage_options"
_WRITABLE = "check who may write or read there (owner, mode, mount), or choose another place"
_CREDENTIALS = "check the credentials (storage_options, AWS_PROFILE or the environment) and what they may do"
_NETWORK = "check endpoint_url, the network and, for https, the certificate (verify or AWS_CA_BUNDLE)"
_HEALTH = "try again; look at the store's health, its free space and the network"

# The first rule that fits wins. A response that contradicts its request is mostly a fault of one transfer: 3 attempts.
# What the store responded counts before the names of exceptions, which are names so that no client needs to be imported
# to recognise another's.
_RULES = (
    _Rule(EndpointError, "the server's certificate is not trusted", _CERTIFICATE, "CertificateVerifyFailed", 1),
    _Rule(TransientError, "the server sent another range than was requested", CHECK_SERVER, "WrongRange", 3),
    _Rule(UnsupportedError, "the server ignores ranges", "use a server with ranged reads", "RangeNotSupported", 3),
    _Rule(TransientError, "the server's response is malformed", CHECK_SERVER, "Malformed", 3),
    _Rule(NotFoundError, "its bucket does not exist", "check its name, or create it", "NoSuchBucket ContainerNotFound"),
    _Rule(ThrottledError, "the store asks to slow down", "send fewer requests at once", _THROTTLED),
    _Rule(AccessError, "the credentials have expired", "renew them", " ".join(sorted(EXPIRED))),
    _Rule(AccessError, "this machine's clock is wrong", "set the clock", "RequestTimeTooSkewed"),
    _Rule(EndpointError, "the bucket is in another region or at another endpoint", _REGION, _ELSEWHERE, 1),
    _Rule(StorageError, "no space is left", "make room there, or choose another place", _FULL),
    _Rule(StorageError, "the file is larger than it may be there", "raise the limit (ulimit -f)", "EFBIG"),
    _Rule(AccessError, "no permission", _WRITABLE, "EACCES EPERM EROFS"),
    _Rule(AccessError, "no permission", _CREDENTIALS, _DENIED),
    _Rule(EndpointError, "the endpoint cannot be reached", _NETWORK, _UNREACHABLE),
    _Rule(ObjectExistsError, "the object exists already", "choose another name or delete it", _EXISTS),
    _Rule(NotFoundError, "it does not exist", "check the URL", _MISSING),
    _Rule(UnsupportedError, "the server cannot do that", "use another server", _UNSUPPORTED),
    _Rule(TransientError, "the store failed or the transfer broke off", _HEALTH, _PASSING),
)


class HttpError(OSError):
    """What went wrong: HTTP status (0 without a response), the store's own code where it has one, and its message.

    `headers` are those of the response.
    """

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = code
        self.headers = headers or {}


# what this module and the readers call what has no code of the store
_OWN_CODES = frozenset(
    {"CertificateVerifyFailed", "WrongRange", "RangeNotSupported", "Malformed", "Unreachable", "Interrupted"}
)


def client_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that the clients loaded so far can raise, for an `except` clause."""
    roots = [getattr(sys.modules.get(module), name, None) for module, name in _CLIENT_ROOTS]
    # RecursionError: botocore asks an endpoint that redirects everything for the bucket's region, again and again
    return (OSError, NotImplementedError, RecursionError, *(root for root in roots if root is not None))


class Facts(NamedTuple):
    """What an exception and its causes have of a failure: HTTP status (0: none), error code, text, names of classes.

    The names of an error of the system are also that of its errno: "ENOSPC". `wait`: the seconds that the store
    asked to wait, 0 where it did not.
    """

    status: int
    code: str
    text: str
    names: frozenset[str]
    wait: float


def facts_of(error: BaseException) -> Facts:
    """Collect the facts from an exception and the chain of its causes; what comes first counts."""
    names, links = set[str](), list[tuple[int, str, str, float]]()
    link: BaseException | None = error
    while link is not None and len(links) < 8:
        names.update(kind.__name__ for kind in type(link).__mro__)
        if isinstance(link, OSError) and type(link).__module__ == "builtins":  # a client's own may be of a socket
            names.add(errno.errorcode.get(link.errno or 0, ""))
        links.append(_facts_of_one(link))
        link = link.__cause__  # not its context: that may be what the caller was handling
    status, code, text, wait = (next(filter(None, found), found[0]) for found in zip(*links, strict=True))
    if untrusted := _certificate_problem(error):
        code, text = "CertificateVerifyFailed", untrusted
    return Facts(status, code, text or str(error), frozenset(names), wait)


def _certificate_problem(error: BaseException) -> str:
    """Return why a certificate is refused, as OpenSSL or rustls has it; empty where that is not what happened."""
    text = f"{error} {error.__cause__ or ''}"
    openssl = re.search(r"certificate verify failed:? *([^(\])\n]*)", text)
    rustls = re.search(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)", text)
    reason = openssl[1].strip(" .") if openssl else rustls[1].removesuffix("Context") if rustls else ""
    return f"certificate verify failed: {reason}" if reason else ""


def _facts_of_one(error: BaseException) -> tuple[int, str, str, float]:
    """Return HTTP status, error code, text and the wait that the store asked for, as far as this exception has them."""
    if type(error).__module__.startswith("obstore") or "Server returned non-2xx" in str(error):  # or a builtin one
        return (*_obstore_facts(str(error)), 0.0)
    response, headers = getattr(error, "response", None), getattr(error, "headers", None)
    # aiohttp, azure and gcsfs; aiohttp warns of its `code`
    values = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    status = next((value for value in values if isinstance(value, int)), 0)
    code, text = str(getattr(error, "error_code", None) or ""), ""
    if isinstance(response, dict):  # botocore
        details, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
        code, text = str(details.get("Code", "")), str(details.get("Message", ""))
        status, headers = metadata.get("HTTPStatusCode", 0), metadata.get("HTTPHeaders")
    wait = (headers.get("retry-after") or headers.get("Retry-After")) if isinstance(headers, Mapping) else None
    seconds = re.fullmatch(r"\d{1,6}(\.\d+)?", str(wait))  # stores send no dates
    return status, code, text, float(seconds[0]) if seconds else 0.0


# what obstore's text shows of a failure without a response
_OBSTORE_CODES = (
    (r"kind: Connect\b|tcp connect|dns error", "Unreachable"),
    (r"kind: (Timeout|Interrupted|Request|Decode|Body|Unknown)\b", "Interrupted"),
    (r"InvalidRange", "InvalidRange"),
    (r"source: (UnexpectedRange|\w+ContentRange)\b", "WrongRange"),
    (r"source: Header \{", "Interrupted"),
    (r"NotPartial|RangeNotSupported", "RangeNotSupported"),
)


def xml_error(text: str) -> tuple[str, str]:
    """Return the code and the message in an error document of S3; empty where it has none."""
    code, message = (re.search(f"<{name}>(.*?)</{name}>", text) for name in ("Code", "Message"))
    return code[1] if code else "", message[1] if message else ""


def _obstore_facts(text: str) -> tuple[int, str, str]:
    summary, _, debug = text.partition("Debug source:")
    status, (code, message) = re.search(r"status code: (\d{3})", summary), xml_error(text)
    if status is None:
        code = next((name for pattern, name in _OBSTORE_CODES if re.search(pattern, debug)), code)
    return int(status[1]) if status else 0, code, message or summary


def beyond_the_end(error: BaseException) -> bool:
    """Return whether the store refused a range because the object ends before it."""
    facts = facts_of(error)
    return facts.status == 416 or facts.code == "InvalidRange"


def check_range(asked: str, sent: str | None) -> None:
    """Raise `HttpError` where a response is for another range than `asked` for, the value of `Range`."""
    wanted, found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked), re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", sent or "")
    if not wanted or not found:  # the header is optional, and the bytes are checked
        return
    first, last, size = int(found[1]), int(found[2]), int(found[3]) if found[3] != "*" else None
    if wanted[1]:  # shorter where the object ends
        right = first == int(wanted[1]) and (
            last == int(wanted[2]) or (last < int(wanted[2]) and size in (None, last + 1))
        )
    else:
        right = size is None or (last == size - 1 and first == max(0, size - int(wanted[2])))
    if not right:
        raise HttpError(206, "WrongRange", f"requested {asked}, the response has {sent}")


def storage_error(error: BaseException, url: str, secrets: Secrets = NO_SECRETS) -> StorageError:
    """Return our error for an exception of a client that worked on `url` (redacted).

    Raise it `from cause_of(error, secrets)`.
    """
    if isinstance(error, StorageError):
        return error
    facts = facts_of(error)
    detail = " ".join(secrets.redact(facts.text).split())[:200]
    if not facts.code.isdigit() and facts.code not in _OWN_CODES and facts.code not in detail:
        detail = f"{facts.code}: {detail}"
    detail = detail or type(error).__name__
    responded = {facts.code, str(facts.status), f"{facts.status // 100}xx"}
    rules = (rule for found in (responded, facts.names) for rule in _RULES if found & set(rule.signs.split()))
    rule = next(rules, None)
    if rule is None:
        return StorageError(f"{url}: {detail}", "look at the store and at storage_options")
    found = rule.kind(f"{url}: {rule.problem} ({detail})", rule.remedy)
    found.retry_after = facts.wait
    if rule.attempts is not None:
        found.attempts = rule.attempts
    return found


def cause_of(error: BaseException, secrets: Secrets = NO_SECRETS) -> BaseException | None:
    """Return what to chain to one of our errors: `error` itself, or its redacted text where it or a cause of it has
    a secret in its message.
    """
    if isinstance(error, StorageError):
        return error.__cause__
    texts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(texts) < MAX_CHAIN:
        texts += [str(link), *getattr(link, "__notes__", ())]
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    if link is None and all(secrets.redact(text) == text for text in texts):
        return error
    text = " ".join(secrets.redact(texts[0]).split())
    return ClientError(f"{type(error).__name__}: {text}").with_traceback(error.__traceback__)


@contextmanager
def translated(location: Location, path: str = "") -> Iterator[None]:
    """Raise exceptions of clients in the block as our errors, which name the path below `location`."""
    try:
        yield
    except client_errors() as error:
        secrets = location.secrets
        raise storage_error(error, location.child(path).shown, secrets) from cause_of(error, secrets)


class ClientError(Exception):
    """A storage client's exception without the secrets in its message."""


Result = TypeVar("Result")

# An outage begins when no request has succeeded for so long: until then each request retries by itself.
OUTAGE_AFTER_SECONDS = 0.5
# How often a request that waits for another's probe looks whether the outage is over.
POLL_SECONDS = 0.1

_LOG = logging.getLogger("streamloader")


class Timing(NamedTuple):
    """The clock, sleep (both in seconds) and jitter in [0, 1) that a retry uses; tests give their own."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random


class Outage:
    """The failures of one endpoint since its last success, and which request may test it. No threads, no clock.

    Requests that are sent while others fail do not form a storm: as long as none succeeds, one request at a time is
    admitted as a probe, at random intervals of 0.5 to 1 times `probe_seconds`, whether or not the one before has ended.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._since: float | None = None
        self._succeeded_at = self.ended_at = float("-inf")
        self._probe_at = 0.0
        self.declared = False
        self.error = ""

    def seconds(self, now: float) -> float:
        """Return for how long no request has succeeded; 0 where the last one did."""
        return 0.0 if self._since is None else now - self._since

    def failed(self, sent: float, now: float, jitter: float, error: str) -> None:
        """A request sent at `sent` has failed."""
        if self._since is None:
            self._since = max(sent, self._succeeded_at)
        self.error = error
        if not self.declared and self.seconds(now) >= OUTAGE_AFTER_SECONDS:
            self.declared = True
            self._next_probe(now, jitter)

    def succeeded(self, now: float) -> None:
        """A request has succeeded: the outage is over."""
        if self.declared:
            self.ended_at = now
        self._since, self._succeeded_at, self.declared = None, now, False

    def forget(self) -> None:
        """No request waits for the end of the outage any more."""
        self._since, self.declared = None, False

    def wait(self, now: float, jitter: float) -> float:
        """Return how long the next request waits before it asks again; 0: it is sent now."""
        if not self.declared or self.seconds(now) >= self._policy.outage_seconds:
            return 0.0
        if now < self._probe_at:
            return self._probe_at - now
        self._next_probe(now, jitter)
        return 0.0

    def _next_probe(self, now: float, jitter: float) -> None:
        self._probe_at = now + self._policy.probe_seconds * (0.5 + 0.5 * jitter)


class Progress:
    """How far a response is ahead of the slowest one that the policy allows.

    It begins `response_seconds` ahead; each byte earns 1 / `min_bytes_per_second`, up to `response_seconds`. A response
    of n bytes thus takes `policy.deadline(n)` at most, and one that nearly stops is late `response_seconds` after that.
    """

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._late_at = clock() + policy.response_seconds

    def received(self, size: int) -> None:
        """Count bytes that have arrived."""
        latest = self._clock() + self._policy.response_seconds
        self._late_at = min(latest, self._late_at + size / self._policy.min_bytes_per_second)

    def seconds_left(self) -> float:
        """Return how long the next bytes may take. Raises `TimeoutError` where the response is late already."""
        left = self._late_at - self._clock()
        if left <= 0:
            rate, seconds = self._policy.min_bytes_per_second, self._policy.response_seconds
            raise TimeoutError(f"the response was more than {seconds:g} s behind {rate:g} bytes/s")
        return left


class Retrier:
    """Sends the requests of one process to one endpoint, again where they fail; shared by all of them. Thread-safe.

    `name` is what messages call the endpoint. Not for use across a fork.
    """

    def __init__(self, policy: RetryPolicy, name: str = "the store", timing: Timing | None = None) -> None:
        self.policy = policy
        self._name = name
        self._timing = timing or Timing()
        self._lock = threading.Lock()
        self._outage = Outage(policy)
        self._reported = False
        self._waiting = 0  # requests that have failed and not ended
        self._thread = threading.local()
        self.reached = False

    @contextmanager
    def waits_by(self, sleep: Callable[[float], None]) -> Iterator[None]:
        """Let the calls of this thread wait by `sleep(seconds)` until the block ends; what it raises ends them."""
        self._thread.sleep = sleep
        try:
            yield
        finally:
            del self._thread.sleep

    def call(
        self,
        call: Callable[[], Result],
        *,
        on_retry: Callable[[StorageError, float], None] | None = None,
        retryable: type[StorageError] = StorageError,
    ) -> Result:
        """Return what `call` returns, calling it again after a failure of a `retryable` kind.

        `on_retry` is called with the failure and the wait in seconds before each retry. Raises the last failure, of its
        own type, with the number of attempts and the time.
        """
        request = _Request(self._timing.clock())
        sleep = getattr(self._thread, "sleep", self._timing.sleep)
        try:
            while True:
                self._wait_for_turn(sleep)
                sent = self._timing.clock()
                try:
                    result = call()
                except (NotFoundError, ObjectExistsError):
                    self._succeeded()  # it responded
                    raise
                except retryable as error:
                    delay = self._delay(request, sent, error)
                    if on_retry is not None:
                        on_retry(error, delay)
                    sleep(delay)
                else:
                    self._succeeded()
                    return result
        finally:
            if request.attempts:
                self._leave()

    @property
    def waiting_for(self) -> str:
        """The endpoint, for how long and why requests wait for it; empty where no outage has lasted long enough."""
        with self._lock:
            seconds = self._outage.seconds(self._timing.clock())
            if not self._outage.declared or seconds < self.policy.report_seconds:
                return ""
            return f"no request to {self._name} has succeeded for {seconds:.0f} s; last error: {self._outage.error}"

    def _delay(self, request: _Request, sent: float, error: StorageError) -> float:
        """Count a failure and return how long its request waits. Raises the error where it is not sent again."""
        timing, policy = self._timing, self.policy
        now, jitter = timing.clock(), timing.jitter()
        request.attempts += 1
        if request.attempts == 1:
            with self._lock:
                self._waiting += 1
        request.failed_at = min(request.failed_at, sent)
        if error.attempts is not None:
            request.limited += 1
            if request.limited >= error.attempts:
                self._give_up(request, error, now)
        with self._lock:
            outage = self._outage
            outage.failed(sent, now, jitter, error.problem)
            alone = now - max(request.failed_at, outage.ended_at)
            over = outage.seconds(now) >= policy.outage_seconds
            over |= not outage.declared and alone >= policy.request_seconds
            over |= now - request.failed_at >= policy.outage_seconds + policy.request_seconds
            asked = min(policy.cap_seconds, error.retry_after)
            delay = asked if outage.declared else asked + policy.delay(request.backoffs, jitter)
            request.backoffs += not outage.declared
        may_pass = self.reached or isinstance(error, ThrottledError) or error.attempts is not None
        may_pass |= isinstance(error, TransientError) and request.attempts < policy.first_contact_attempts
        if over or not may_pass:
            self._give_up(request, error, now)
        self._report()
        return delay

    def _leave(self) -> None:
        """End a request that has failed; an outage that no request waits for is forgotten."""
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._outage.forget()
                self._reported = False

    def _give_up(self, request: _Request, error: StorageError, now: float) -> NoReturn:
        if request.attempts == 1:
            try:
                raise error
            finally:
                del error  # its traceback has this frame
        problem = f"{error.problem} ({request.attempts} attempts in {now - request.begin:.1f} s)"
        raise type(error)(problem, error.remedy) from error

    def _wait_for_turn(self, sleep: Callable[[float], None]) -> None:
        while self._outage.declared:
            with self._lock:
                wait = self._outage.wait(self._timing.clock(), self._timing.jitter())
            if wait <= 0:
                return
            self._report()
            sleep(min(wait, POLL_SECONDS))

    def _succeeded(self) -> None:
        now = self._timing.clock()
        with self._lock:
            self.reached = True
            seconds, reported = self._outage.seconds(now), self._reported
            self._outage.succeeded(now)
            self._reported = False
        if reported:
            _LOG.warning("streamloader resumes: requests to %s succeed again after %.0f s", self._name, seconds)

    def _report(self) -> None:
        """Log an outage once, when it has lasted for `report_seconds`."""
        if self._reported or not (text := self.waiting_for):
            return
        with self._lock:
            first, self._reported = not self._reported, True
        if first:
            _LOG.warning("streamloader retries for up to %.0f s: %s", self.policy.outage_seconds, text)


@dataclass(slots=True)
class _Request:
    """One request: when it began and first failed, its failures, and how many of them are limited in number."""

    begin: float
    attempts: int = 0
    limited: int = 0
    backoffs: int = 0
    failed_at: float = float("inf")
