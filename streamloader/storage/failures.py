"""What a client's exception means: every one becomes an error of ours, with the URL and the remedy.

fsspec's backends keep the HTTP status and the store's error code in the exception or in its cause; obstore
keeps them only in its text. Both are read here and nowhere else.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

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
from streamloader.storage.location import NO_SECRETS, Secrets

MAX_CHAIN = 20  # causes of an exception that are searched for secrets

# A response that contradicts its request is mostly a fault of one transfer: it is asked for so often in all.
ANSWER_ATTEMPTS = 3
# S3's error codes for credentials that were valid once
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})

# module, class: the roots of the exceptions that clients raise besides OSError
_CLIENT_ROOTS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("obstore.exceptions", "BaseError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
    ("requests", "RequestException"),
    ("fsspec.exceptions", "FSTimeoutError"),
)


@dataclass(frozen=True)
class _Rule:
    """An error of ours, and by which codes, HTTP statuses or names of exception classes it is recognised."""

    kind: type[StorageError]
    problem: str
    remedy: str
    codes: frozenset[str] = frozenset()
    statuses: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()
    attempts: int | None = None  # None: those of the error's class


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The first rule that fits wins. What the store answered counts before the names of exceptions, which are
# names so that no client needs to be imported to recognise another's.
_RULES = (
    _Rule(
        EndpointError,
        "the server's certificate is not trusted",
        "check the host in endpoint_url and the server's clock and certificate; for a CA of your own set AWS_CA_BUNDLE "
        "or client_kwargs={'verify': file}",
        codes=_words("CertificateVerifyFailed"),
        attempts=1,
    ),
    _Rule(
        TransientError,
        "the server sent another range than was asked for",
        "look at the server, and at a proxy or cache before it",
        codes=_words("WrongRange"),
        attempts=ANSWER_ATTEMPTS,
    ),
    _Rule(
        UnsupportedError,
        "the server ignores ranges",
        "use a server with ranged reads",
        codes=_words("RangeNotSupported"),
        attempts=ANSWER_ATTEMPTS,
    ),
    _Rule(
        NotFoundError,
        "its bucket does not exist",
        "check the bucket's name and endpoint_url, or create it first",
        codes=_words("NoSuchBucket ContainerNotFound"),
    ),
    _Rule(
        ThrottledError,
        "the store asks to slow down",
        "send fewer requests at once",
        codes=_words(
            "SlowDown ServiceUnavailable Throttling ThrottlingException RequestLimitExceeded TooManyRequests ServerBusy"
        ),
        statuses=frozenset({429, 503}),
    ),
    _Rule(
        AccessError,
        "the credentials have expired",
        "renew them",
        codes=EXPIRED,
    ),
    _Rule(AccessError, "this machine's clock is wrong", "set the clock", codes=_words("RequestTimeTooSkewed")),
    _Rule(
        EndpointError,
        "the bucket is in another region or at another endpoint",
        "set client_kwargs={'region_name': ...} or endpoint_url in storage_options",
        codes=_words("PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed"),
        statuses=frozenset({301, 307, 308}),
        names=_words("RecursionError"),
        attempts=1,
    ),
    _Rule(
        StorageError,
        "no space is left",
        "make room there, or choose another place",
        codes=_words("QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded"),
        statuses=frozenset({507}),
        names=_words("ENOSPC EDQUOT"),
    ),
    _Rule(
        StorageError,
        "the file is larger than it may be there",
        "raise the limit (ulimit -f), choose another file system, or smaller shards",
        names=_words("EFBIG"),
    ),
    _Rule(
        AccessError,
        "no permission",
        "check who may write or read there (owner, mode, mount), or choose another place",
        names=_words("EACCES EPERM EROFS"),
    ),
    _Rule(
        AccessError,
        "no permission",
        "check the credentials (storage_options, AWS_PROFILE or the environment) and what they may do",
        codes=_words("InvalidToken InvalidAccessKeyId SignatureDoesNotMatch AccessDenied"),
        statuses=frozenset({401, 403}),
        names=_words(
            "PermissionError NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound "
            "TokenRetrievalError SSOTokenLoadError UnauthorizedSSOTokenError UnauthenticatedError "
            "DefaultCredentialsError RefreshError ClientAuthenticationError PermissionDeniedError"
        ),
    ),
    _Rule(
        EndpointError,
        "the endpoint cannot be reached",
        "check endpoint_url, the network and, for https, the certificate (verify or AWS_CA_BUNDLE)",
        codes=_words("Unreachable"),
        names=_words(
            "EndpointConnectionError ConnectTimeoutError ProxyConnectionError SSLError gaierror ClientConnectorError "
            "ClientConnectorDNSError ClientConnectorSSLError ConnectionRefusedError ServiceRequestError InvalidURL"
        ),
    ),
    _Rule(
        ObjectExistsError,
        "the object exists already",
        "choose another name or delete it",
        codes=_words("PreconditionFailed BlobAlreadyExists"),
        statuses=frozenset({412}),
        names=_words("FileExistsError AlreadyExistsError"),
    ),
    _Rule(
        NotFoundError,
        "it does not exist",
        "check the URL",
        codes=_words("NoSuchKey NoSuchUpload BlobNotFound"),
        statuses=frozenset({404}),
        names=_words("FileNotFoundError IsADirectoryError NotADirectoryError"),
    ),
    _Rule(
        UnsupportedError,
        "the server cannot do that",
        "use a server with all of S3's calls",
        statuses=frozenset({405, 501}),
        names=_words("NotImplementedError NotSupportedError"),
    ),
    _Rule(
        TransientError,
        "the store failed or the transfer broke off",
        "try again; look at the store's health, its free space and the network",
        codes=_words(
            "Interrupted InternalError RequestTimeout OperationAborted ConditionalRequestConflict "
            "BadDigest XAmzContentSHA256Mismatch"
        ),
        statuses=frozenset({408, 409, *range(500, 600)}),  # but for those of the rules above
        names=_words(
            "HTTPClientError ReadTimeoutError ConnectionClosedError ResponseStreamingError IncompleteReadError "
            "ResponseParserError ClientPayloadError ClientConnectionError FSTimeoutError TimeoutError IncompleteRead "
            "ConnectionError TransportError ServiceResponseError JoinError HTTPException HttpProcessingError"
        ),
    ),
)


class HttpError(OSError):
    """What went wrong: HTTP status (0 without an answer), the store's own code where it has one, and its message.

    `headers` are those of the answer, `region` is the bucket's where it names one.
    """

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None, region: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = code
        self.headers = headers or {}
        self.region = region


# what this module and the readers call what has no code of the store
_OWN_CODES = frozenset({"CertificateVerifyFailed", "WrongRange", "RangeNotSupported", "Unreachable", "Interrupted"})


def client_errors(*also: type[BaseException]) -> tuple[type[BaseException], ...]:
    """Return the exceptions that the clients loaded so far can raise, and `also`, for an `except` clause."""
    roots = [getattr(sys.modules.get(module), name, None) for module, name in _CLIENT_ROOTS]
    # RecursionError: aiobotocore asks an endpoint that redirects everything for the bucket's region, again and again
    return (OSError, NotImplementedError, RecursionError, *also, *(root for root in roots if root is not None))


@dataclass(frozen=True)
class Facts:
    """What an exception and its causes tell: HTTP status (0: none), error code, text, names of the classes.

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
    status, code, text, names, wait = 0, "", "", set[str](), 0.0
    link: BaseException | None = error
    for _ in range(8):
        if link is None:
            break
        names.update(kind.__name__ for kind in type(link).__mro__)
        if isinstance(link, OSError) and type(link).__module__ == "builtins":  # a client's own may be of a socket
            names.add(errno.errorcode.get(link.errno or 0, ""))
        response = getattr(link, "response", None)
        if isinstance(response, dict):  # botocore
            details = response.get("Error", {})
            status = status or response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code, text = code or str(details.get("Code", "")), text or str(details.get("Message", ""))
        code = code or str(getattr(link, "error_code", None) or "")  # azure
        status = status or _status_attribute(link)
        wait = wait or _retry_after(link)
        if type(link).__module__.startswith("obstore"):
            status, code, text = _obstore_facts(str(link), status, code, text)
        link = link.__cause__  # not its context: that may be what the caller was handling
    if "FileNotFoundError" in names and "Server returned non-2xx" in str(error):  # obstore raises the builtin
        status, code, text = _obstore_facts(str(error), status, code, text)
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


def _status_attribute(error: BaseException) -> int:
    """Return the HTTP status that aiohttp, azure and gcsfs keep in an attribute; 0 where there is none."""
    for name in ("status", "status_code", "code"):  # aiohttp warns of its `code`, and has `status`
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return 0


def _retry_after(error: BaseException) -> float:
    """Return the seconds of a Retry-After header, where the client keeps headers; stores send no dates there."""
    response = getattr(error, "response", None)
    headers = getattr(error, "headers", None)
    if isinstance(response, dict):  # botocore
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    if not isinstance(headers, Mapping):
        return 0.0
    text = str(headers.get("retry-after") or headers.get("Retry-After") or "")
    return float(text) if re.fullmatch(r"\d{1,6}(\.\d+)?", text) else 0.0


def _obstore_facts(text: str, status: int, code: str, message: str) -> tuple[int, str, str]:
    summary, _, debug = text.partition("Debug source:")
    found = re.search(r"status code: (\d{3})", summary)
    if found:
        status = status or int(found[1])
    elif re.search(r"kind: Connect\b", debug) or "tcp connect" in debug or "dns error" in debug:
        code = code or "Unreachable"
    elif re.search(r"kind: (Timeout|Interrupted|Request|Decode|Body|Unknown)\b", debug):
        code = code or "Interrupted"
    elif "InvalidRange" in debug:
        status = status or 416
    elif re.search(r"source: (UnexpectedRange|\w+ContentRange)\b", debug):
        code = code or "WrongRange"
    elif "source: Header {" in debug:
        code = code or "Interrupted"
    elif "NotPartial" in debug or "RangeNotSupported" in debug:
        code = code or "RangeNotSupported"
    xml_code, xml_message = re.search(r"<Code>(.*?)</Code>", text), re.search(r"<Message>(.*?)</Message>", text)
    code = code or (xml_code[1] if xml_code else "")
    return status, code, message or (xml_message[1] if xml_message else summary)


def beyond_the_end(error: BaseException) -> bool:
    """Return whether the store refused a range because the object ends before it."""
    facts = facts_of(error)
    return facts.status == 416 or facts.code == "InvalidRange"


def check_range(asked: str, sent: str | None) -> None:
    """Raise `HttpError` where a response says that it is another range than `asked` for, the value of `Range`."""
    wanted, found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked), re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", sent or "")
    if not wanted or not found:  # a server need not say it, and the bytes are checked
        return
    first, last, size = int(found[1]), int(found[2]), int(found[3]) if found[3] != "*" else None
    if wanted[1]:  # shorter where the object ends
        right = first == int(wanted[1]) and (
            last == int(wanted[2]) or (last < int(wanted[2]) and size in (None, last + 1))
        )
    else:
        right = size is None or (last == size - 1 and first == max(0, size - int(wanted[2])))
    if not right:
        raise HttpError(206, "WrongRange", f"asked for {asked}, the response has {sent}")


def storage_error(error: BaseException, url: str, secrets: Secrets = NO_SECRETS) -> StorageError:
    """Return the error of ours for what a client raised while it worked on `url` (shown, so without secrets).

    Raise it `from cause_of(error, secrets)`.
    """
    if isinstance(error, StorageError):
        return error
    facts = facts_of(error)
    detail = " ".join(secrets.redact(facts.text).split())[:200]
    if not facts.code.isdigit() and facts.code not in _OWN_CODES and facts.code not in detail:
        detail = f"{facts.code}: {detail}"
    detail = detail or type(error).__name__
    rule = _rule_for(facts)
    if rule is None:
        return StorageError(f"{url}: {detail}", "look at the store and at storage_options")
    found = rule.kind(f"{url}: {rule.problem} ({detail})", rule.remedy)
    found.retry_after = facts.wait
    if rule.attempts is not None:
        found.attempts = rule.attempts
    return found


def cause_of(error: BaseException, secrets: Secrets = NO_SECRETS) -> BaseException | None:
    """Return what to chain to an error of ours: `error` itself, or its redacted text where it or a cause of it has
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


class ClientError(Exception):
    """A storage client's exception without the secrets in its message."""


def _rule_for(facts: Facts) -> _Rule | None:
    by_answer = (rule for rule in _RULES if facts.code in rule.codes or facts.status in rule.statuses)
    by_name = (rule for rule in _RULES if facts.names & rule.names)
    return next(by_answer, None) or next(by_name, None)
