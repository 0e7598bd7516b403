"""S3 through botocore's client, whose requests go over our own sockets.

botocore decides endpoint, region, addressing style, headers, credentials and signature; nothing of that is decided
here. Ranged GETs are many: their client builds one request without sending it, and the others differ in the key alone,
reuse its URL and headers, and are signed by the client's signer, which takes 0.1 ms where its client takes 0.3. A
range needs no signature, so that of a GET serves all ranges of the object for a minute.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import botocore.loaders
import botocore.session
from botocore import UNSIGNED, xform_name
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.utils import percent_encode
from urllib3 import HTTPResponse

from streamloader.errors import AccessError
from streamloader.storage.retry import (
    EXPIRED,
    HttpError,
    beyond_the_end,
    check_range,
    client_errors,
    facts_of,
    xml_error,
)
from streamloader.storage.s3_http import PIECE_BYTES, Pool
from streamloader.storage.store import (
    Allocate,
    Body,
    Buffer,
    ObjectInfo,
    Page,
    body_crc32c,
    buffers_of,
    empty_buffer,
    etag_of,
    larger_than,
)
from streamloader.storage.url import FSSPEC_OPTIONS, S3_OPTIONS, Location

CONNECT_SECONDS = 5.0  # s3fs's own default
CHECKSUM = "x-amz-checksum-crc32c"
# S3 takes a signature for 15 minutes; a clock may be wrong by some of them
SIGNATURE_SECONDS = 60.0
MAX_SIGNATURES = 4096
MAX_RESENDS = 3  # of one request: two changes of region, and fresh credentials
EXPRESS = "v4-s3express"
_ANY_KEY = "key"
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")

# the bucket of a path may be an access point's ARN, whose name is behind a slash
_ARN = re.compile(r"arn:[^/]+?:(?:outpost[/:][^/:]+[/:])?(?:accesspoint|bucket)[/:][^/:]+")
_IGNORED = {*FSSPEC_OPTIONS, "cache_regions", "max_concurrency", "fixed_upload_size", "local_expiry_check"}
# the responses that botocore's client takes for another region's
_OTHER_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_REDIRECTS = (301, 302, 307)
PART_BYTES = 512 << 20  # from two parts on, an object goes up in parts (S3 takes 5 GiB, but a failed PUT starts again)
SMALL_BYTES = 64 << 10  # smaller buffers are joined: each would be a packet
KEYS_PER_DELETE = 1000  # S3's limit


@dataclass(frozen=True, eq=False)
class _Template:
    """A GET for `_ANY_KEY`, before its signature: `url` and `auth_path` end where the key begins."""

    url: str
    auth_path: str | None
    headers: Mapping[str, str]
    context: Mapping[str, Any] = field(repr=False)
    signer: Any = field(repr=False)

    @property
    def scope(self) -> tuple[str, Any]:
        """Return what another region would change."""
        return self.url, self.context.get("signing")


@dataclass(frozen=True)
class SignedGet:
    """A GET to be sent now."""

    url: str
    headers: dict[str, str] = field(repr=False)
    template: _Template = field(repr=False)


class S3Client:
    """One bucket of S3. Thread-safe; for one process. Paths are keys, `root` is that of the store's URL.

    `put` and `create` return the etag; `replace` None where the object is another one than it should be.
    Making it makes no request. Raises `AccessError`, `UsageError` or what botocore raises where options, credentials,
    certificates or the endpoint are missing or wrong.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self.bucket, self.root = split_bucket(location.path)
        self._lock = threading.RLock()
        self._signed = lru_cache(MAX_SIGNATURES)(_sign)
        self._connect()
        # whether the server compares the checksums of bodies; None until it is known
        self._compares: bool | None = None
        if self.client.meta.config.signature_version is not UNSIGNED and self.keys() is None:
            raise AccessError(
                f"{location.shown}: no credentials found",
                "give key and secret (or anon=True) in storage_options, or set AWS_PROFILE or AWS_ACCESS_KEY_ID",
            )

    def _connect(self) -> None:
        """Make the client, which looks for credentials from the beginning."""
        self.client, verify = _botocore_client(self._location)
        self._template: _Template | None = None
        config, events = self.client.meta.config, self.client.meta.events
        self._pool = Pool(self._location.retry, config, verify)
        # the client is part of a cycle: connections must not wait for its collection
        events.register("before-send.s3", partial(_send, weakref.ref(self._pool)))
        unsigned = config.merge(Config(s3={"payload_signing_enabled": False, **(config.s3 or {})}))
        events.register("before-sign.s3", partial(_skip_digest, unsigned))
        events.register("before-call.s3.HeadBucket", _end_redirects)

    # requests

    def call(self, operation: str, **parameters: Any) -> Any:
        """Return what botocore's client returns for an operation on the bucket, with fresh credentials where they have
        expired.
        """
        members = self.client.meta.service_model.operation_model(operation).input_shape.members
        options = self._location.options
        payer = {"RequestPayer": "requester"} if options.get("requester_pays") else {}
        parameters = {"Bucket": self.bucket, **payer, **(options.get("s3_additional_kwargs") or {}), **parameters}
        known = {name: value for name, value in parameters.items() if name in members}
        for renewed in (False, True):
            client = self.client
            try:
                if "Body" in known:
                    known["Body"].seek(0)
                return _Reply(getattr(client, xform_name(operation))(**known))
            except ClientError as error:
                if renewed or facts_of(error).code not in EXPIRED:
                    raise
            except ValueError as error:
                if type(error) is not ValueError:  # of the key
                    raise
                raise HttpError(200, "Malformed", str(error)) from error  # a number or a date for botocore's parser
            self._renew(client)
        raise AssertionError("unreachable")

    def _renew(self, used: Any) -> None:
        """Replace the client `used`, whose credentials have expired. Another thread may have done so already."""
        with self._lock:
            if used is self.client:
                self._connect()

    # ranged reads

    @contextlib.contextmanager
    def _get(self, key: str, wanted: str) -> Iterator[http.client.HTTPResponse]:
        """Ask for the `Range` that is wanted, or for the object where that is empty.

        Sent again where the response shows that the bucket is in another region, and once with fresh credentials where
        they have expired. Raises `HttpError`, also for another range than was asked for.
        """
        renewed = False
        for attempt in range(MAX_RESENDS + 1):
            client, signed = self.client, self.sign(key)
            headers = {**signed.headers, "Range": wanted} if wanted else signed.headers
            with self._pool.request("GET", signed.url, headers) as response:
                # some servers say 200 to a range of an empty object
                if response.status == (206 if wanted else 200) or (response.status == 200 and response.length == 0):
                    if wanted:
                        check_range(wanted, response.headers.get("Content-Range"))
                    yield response
                    return
                failure = _failure(response)
            again = attempt < MAX_RESENDS
            if again and failure.error_code in EXPIRED and not renewed:
                renewed = True
                self._renew(client)
            elif not (again and self._learn_region(key, signed.template, failure)):
                try:
                    raise failure
                finally:
                    del failure  # a cycle with its traceback would keep the callers' objects until they are collected

    def get(self, path: str) -> bytes:
        """Return the object."""
        with self._get(path, "") as response:
            return response.read()

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes, fewer where the object is smaller."""
        try:
            with self._get(path, f"bytes=-{size}") as response:
                return response.read()
        except HttpError as error:
            if not beyond_the_end(error):
                raise
            return b""

    def get_range(self, path: str, start: int, stop: int, allocate: Allocate | None = None) -> memoryview:
        """Return bytes [start, stop) of the object, fewer where it ends before; in `allocate(size)` where given."""
        try:
            with self._get(path, f"bytes={start}-{stop - 1}") as response:
                if response.length is None:
                    return memoryview(response.read(stop - start))
                body = (allocate or empty_buffer)(min(stop - start, response.length))  # the object may end before
                return body[: _fill(response, body)]
        except HttpError as error:
            if not beyond_the_end(error):
                raise
            return empty_buffer(0)

    def sign(self, key: str) -> SignedGet:
        """Return a signed GET of an object, for any range.

        A signature is used again for up to a minute, as long as credentials and region are the same.
        """
        template = self.template()
        if template.context["auth_type"] == EXPRESS:  # its sessions are botocore's to renew
            return _sign(key, template)
        return self._signed(key, template, self.keys(), time.monotonic() // SIGNATURE_SECONDS)

    def keys(self) -> Any:
        """Return the credentials valid now (`access_key`, `secret_key`, `token`); None where none are found."""
        return self.template().signer.get_auth_instance("s3", "us-east-1", "s3v4").credentials

    def template(self) -> _Template:
        """Return the GET of any key, which the client builds at the first call, and which is not sent."""
        if self._template is not None:
            return self._template
        built: dict[str, Any] = {}

        def take(params: Mapping[str, Any], context: Mapping[str, Any], request_signer: Any, **_: Any) -> Any:
            built.update(params=params, context=context, signer=request_signer)
            return SimpleNamespace(status_code=200), {}  # a response, without a request

        with self._lock:
            self.client.meta.events.register_last("before-call.s3.GetObject", take)
            try:
                self.call("GetObject", Key=_ANY_KEY)
            finally:
                self.client.meta.events.unregister("before-call.s3.GetObject", take)
            params, end = built["params"], -len(_ANY_KEY)
            auth_path = params.get("auth_path")
            auth_path = auth_path[:end] if auth_path else None
            self._template = _Template(
                params["url"][:end], auth_path, params["headers"], built["context"], built["signer"]
            )
            return self._template

    def _learn_region(self, key: str, used: _Template, failure: HttpError) -> bool:
        """Return whether a refused request should be sent again, since the region of the bucket is known now.

        botocore's client asks for the object itself, follows the response to the region and remembers it.
        """
        if failure.status not in _REDIRECTS and failure.error_code not in _OTHER_REGION:
            return False
        with self._lock:
            if self._template is used:
                with contextlib.suppress(*client_errors()):
                    self.call("GetObject", Key=key, Range="bytes=0-0")
                self._template = None
            return self.template().scope != used.scope

    # everything else

    def info(self, path: str) -> ObjectInfo | None:
        """Return size and etag of an object, None where there is none."""
        try:
            found = self.call("HeadObject", Key=path)
        except ClientError as error:
            status = facts_of(error).status
            if status == 404:
                return None
            if status not in (400, 403):
                raise
            self.get_range(path, 0, 1)  # the response to a HEAD has no body, so no reason; that to a GET has one
            found = self.call("HeadObject", Key=path)  # with fresh credentials
        return ObjectInfo(path, found["ContentLength"], etag_of(found))

    def list_page(self, folder: str, token: str | None) -> Page:
        """Return objects below a folder, and the token of the next page."""
        more = {"ContinuationToken": token} if token else {}
        found = self.call("ListObjectsV2", Prefix=f"{folder}/" if folder else "", **more)
        objects = [
            ObjectInfo(entry["Key"], entry["Size"], etag_of(entry))
            for entry in map(_Reply, found.get("Contents", ()))
            if not entry["Key"].endswith("/")  # consoles mark folders so
        ]
        return objects, found["NextContinuationToken"] if found["IsTruncated"] else None

    def put(self, path: str, data: Body) -> str:
        """Write the object, and let the server compare its CRC-32C, which takes an eighth of the time of the SHA-256 in
        a signature. A server that refuses it, or without TLS does not confirm it, gets signatures of bodies.
        """
        body = _Upload(buffers_of(data))
        if len(body) >= 2 * PART_BYTES:
            return self._put_in_parts(path, body)
        if self._compares is not False:
            crc = base64.b64encode(body_crc32c(data).to_bytes(4, "big")).decode()
            try:
                sent = self.call("PutObject", Key=path, Body=body, ChecksumCRC32C=crc)
            except ClientError as error:
                facts = facts_of(error)
                if self._compares or facts.status not in (400, 403, 501) or facts.code in EXPIRED:
                    raise
                self._compares = False  # it may not know the header: then it refuses or ignores it
            else:
                secure = self.template().url.startswith("https:")
                self._compares = secure or CHECKSUM in sent["ResponseMetadata"]["HTTPHeaders"]
                if self._compares:
                    return etag_of(sent)
        return etag_of(self.call("PutObject", Key=path, Body=body))

    def _put_in_parts(self, path: str, body: _Upload) -> str:
        upload = {"Key": path, "UploadId": self.call("CreateMultipartUpload", Key=path)["UploadId"]}
        try:
            parts = []
            for number, part in enumerate(body.split(PART_BYTES), 1):
                sent = self.call("UploadPart", **upload, PartNumber=number, Body=part)
                parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            return etag_of(self.call("CompleteMultipartUpload", **upload, MultipartUpload={"Parts": parts}))
        except BaseException:
            self.call("AbortMultipartUpload", **upload)
            raise

    def create(self, path: str, data: Buffer) -> str:
        """Write the object where there is none."""
        return etag_of(self.call("PutObject", Key=path, Body=_Upload(buffers_of(data)), IfNoneMatch="*"))

    def replace(self, path: str, data: Buffer, before: Buffer) -> str | None:
        """Write the object where it is `before`."""
        size = larger_than(data, before)
        with self._get(path, "") as response:
            there, etag = response.read(size), response.headers["ETag"]
        if there == data:
            return ""
        if there != before:
            return None
        try:
            return etag_of(self.call("PutObject", Key=path, Body=_Upload(buffers_of(data)), IfMatch=etag))
        except ClientError as error:
            status = facts_of(error).status
            if status == 501:  # a server without conditional writes: the look just before has to do
                return self.put(path, data)
            if status not in (404, 412):
                raise
        return "" if self.get_range(path, 0, size) == data else None

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the objects, and ignore those that are not there."""
        for first in range(0, len(paths), KEYS_PER_DELETE):
            keys = [{"Key": key} for key in paths[first : first + KEYS_PER_DELETE]]
            done = self.call("DeleteObjects", Delete={"Objects": keys, "Quiet": True})
            for problem in done.get("Errors", ()):
                if problem.get("Code") != "NoSuchKey":
                    raise ClientError({"Error": problem}, "DeleteObjects")

    def remove_leftovers(self, folder: str) -> int:
        """Abort the unfinished uploads below a folder; return how many there were."""
        removed = 0
        while True:  # each round removes what it has seen, so the next page comes to the front
            found = self.call("ListMultipartUploads", Prefix=f"{folder}/" if folder else "")
            uploads = found.get("Uploads", ())
            for upload in uploads:
                self.call("AbortMultipartUpload", Key=upload["Key"], UploadId=upload["UploadId"])
            removed += len(uploads)
            if not uploads or not found.get("IsTruncated"):
                return removed


def _sign(key: str, template: _Template, *_: Any) -> SignedGet:
    encoded = percent_encode(key, safe="/~")
    auth_path = None if template.auth_path is None else template.auth_path + encoded
    request = AWSRequest("GET", template.url + encoded, dict(template.headers), b"", auth_path=auth_path)
    request.context = dict(template.context)  # the signer writes to it
    template.signer.sign("GetObject", request)
    return SignedGet(request.url, {name: str(value) for name, value in request.headers.items()}, template)


def _end_redirects(params: dict[str, Any], **_: Any) -> None:
    """Keep botocore, which asks for the region of a redirected bucket by this request, from following its redirect."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _send(pool: weakref.ref[Pool], request: AWSPreparedRequest, **_: Any) -> AWSResponse:
    """Send a request of botocore's client, whose own connections have no deadline for a response."""
    headers = {
        name: value.decode() if isinstance(value, bytes) else str(value)
        for name, value in request.headers.items()
        if name.lower() != "expect"
    }
    body = io.BytesIO(request.body) if isinstance(request.body, bytes | bytearray) else request.body
    pieces = iter(partial(body.read, PIECE_BYTES), b"") if request.body else None
    connections = pool()
    assert connections is not None  # its owner made the call
    with connections.request(request.method, request.url, headers, pieces) as response:
        content = io.BytesIO(response.read())
    raw = HTTPResponse(content, preload_content=False)
    return AWSResponse(request.url, response.status, dict(response.headers), raw)


def _skip_digest(unsigned: Config, request: AWSRequest, **_: Any) -> None:
    """Leave the digest of a body with a checksum out of the signature, unless the options say otherwise."""
    if CHECKSUM in request.headers:
        request.context["client_config"] = unsigned


class _Reply(dict[str, Any]):
    """What a server responded. Not everything with status 200 comes from a store: a part may be missing."""

    def __missing__(self, name: str) -> Any:
        raise HttpError(200, "Malformed", f"the response has no {name}")


class _Upload:
    """A body of several buffers as a file."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self._next = _pieces(parts)

    def __len__(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def tell(self) -> int:
        """Return 0: it is read from the start."""
        return 0

    def seek(self, *_: int) -> None:
        """Go back to the start."""
        self._next = _pieces(self._parts)

    def read(self, *_: int) -> memoryview | bytes:
        """Return the next bytes."""
        return next(self._next, b"")

    def split(self, size: int) -> Iterator[_Upload]:
        """Return bodies of `size` bytes that are this one."""
        for start in range(0, len(self), size):
            parts, at = [], 0
            for part in self._parts:
                parts.append(part[max(0, start - at) : max(0, start + size - at)])
                at += part.nbytes
            yield _Upload(parts)


def _pieces(body: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the body in pieces of up to a MiB; small buffers go together."""
    waiting: list[memoryview] = []
    size = 0
    for part in body:
        small = part.nbytes < SMALL_BYTES
        if small:
            waiting.append(part)
            size += part.nbytes
        if waiting and (size >= SMALL_BYTES or not small):
            yield b"".join(waiting)
            waiting, size = [], 0
        if not small:
            yield from (part[at : at + PIECE_BYTES] for at in range(0, part.nbytes, PIECE_BYTES))
    if waiting:
        yield b"".join(waiting)


def _fill(response: http.client.HTTPResponse, body: memoryview) -> int:
    """Read the response into `body`; fewer bytes where the object ends before. Raises IncompleteRead."""
    expected, count = response.length, 0
    while count < len(body):
        more = response.readinto(body[count:])
        if not more:
            if expected is not None and count < expected:
                raise http.client.IncompleteRead(b"", expected - count)
            break
        count += more
    return count


def _failure(response: http.client.HTTPResponse) -> HttpError:
    """Return the error for a response that is not the one requested."""
    if response.status == 200:
        return HttpError(200, "RangeNotSupported", "received the whole object")
    code, message = xml_error(response.read(1 << 12).decode("utf-8", "replace"))  # enough for S3's error document
    return HttpError(response.status, code, message or f"HTTP status {response.status}", dict(response.headers))


def split_bucket(path: str) -> tuple[str, str]:
    """Return bucket, which may be an ARN, and key of what follows `s3://`."""
    arn = _ARN.match(path)
    bucket = arn[0] if arn else path.partition("/")[0]
    return bucket, path[len(bucket) + 1 :]


# What botocore reads to make a client: 0.2 s and 12 MB, kept in cycles. Sessions share it, as clients of one do.
_service_models = lru_cache(botocore.loaders.create_loader)


def _botocore_client(location: Location) -> tuple[Any, bool | str | None]:
    """Return the client that s3fs makes of its options, and its `verify`."""
    options = location.options
    for name, value in options.items():
        if name not in _IGNORED and name not in S3_OPTIONS and value is not None:
            raise TypeError(f"unexpected keyword argument {name!r}")
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": location.retry.response_seconds,
        "retries": {"max_attempts": 0},  # only our policy retries
        "request_checksum_calculation": "when_required",
        **(options.get("config_kwargs") or {}),
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
    session.register_component("data_loader", _service_models(session.get_config_variable("data_path")))
    verify = given.get("verify")
    if verify is None:
        verify = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    client = session.create_client("s3", config=Config(**config), **given)
    weakref.finalize(client, _take_apart, type(client), client.meta.service_model, session).atexit = False
    return client, verify


def _take_apart(kind: type, model: Any, session: Any) -> None:
    """Free the class, the service model and the session of a client, 0.3 MB in cycles, without a garbage collection."""
    for name, value in list(vars(kind).items()):
        if callable(value):
            delattr(kind, name)
    vars(model).clear()
    vars(session).clear()
