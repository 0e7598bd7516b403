"""S3 through botocore's client, whose requests are sent over our own connections.

botocore decides endpoint, region, addressing style, headers, credentials and signature. Only the many ranged GETs do
not call its client: it builds one request, without sending it, whose URL and headers are reused with other keys. The
client's signer signs them, which takes 0.1 ms instead of the client's 0.3 ms. A signature does not cover the header
Range, so it is reused for all ranges of the object for a minute.
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
from datetime import datetime
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import botocore.loaders
import botocore.session
from botocore import UNSIGNED, xform_name
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.hooks import first_non_none_response
from botocore.utils import percent_encode
from urllib3 import HTTPResponse

from streamloader.errors import AccessError, EndpointError, TransientError
from streamloader.storage.buffers import RECEIVER, Body, Buffer, Receiver, body_bytes, body_crc32c, buffers_of
from streamloader.storage.credentials import SERVICES, renew_credentials
from streamloader.storage.objects import ObjectInfo, Page, etag_of
from streamloader.storage.process import run_all
from streamloader.storage.retry import (
    EXPIRED,
    HttpError,
    check_range,
    client_errors,
    facts_of,
    is_past_end,
    storage_error,
    xml_error,
)
from streamloader.storage.s3_http import PIECE_BYTES, Pool
from streamloader.storage.url import FSSPEC_OPTIONS, S3_OPTIONS, Location, parse_location

CONNECT_SECONDS = 5.0  # s3fs's own default
CHECKSUM = "x-amz-checksum-crc32c"
# S3 accepts a signature for 15 minutes, which include the error of this machine's clock
SIGNATURE_SECONDS = 60.0
MAX_SIGNATURES = 4096
MAX_RESENDS = 3  # of one GET: for two changes of region and new credentials
EXPRESS = "v4-s3express"
_ANY_KEY = "key"
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")

# A bucket may be the ARN of an access point, which contains a slash
_ARN = re.compile(r"arn:[^/]+?:(?:outpost[/:][^/:]+[/:])?(?:accesspoint|bucket)[/:][^/:]+")
_IGNORED = {*FSSPEC_OPTIONS, "cache_regions", "max_concurrency", "fixed_upload_size", "local_expiry_check"}
# Errors that botocore's client takes for a bucket in another region
_OTHER_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_REDIRECTS = (301, 302, 307)
_REPEATED = (TransientError, EndpointError)
_OF_BODY = {"BadDigest", "XAmzContentSHA256Mismatch"}  # also of servers without checksums or unsigned bodies
PART_BYTES = 512 << 20  # from two parts on, uploads are multipart: S3 accepts PUTs of 5 GiB, but retries start again
SMALL_BYTES = 64 << 10  # smaller buffers are joined, as each would be a packet
KEYS_PER_DELETE = 1000  # S3's limit
DELETING_THREADS = 16  # of objects one by one


@dataclass(frozen=True, eq=False)
class _Template:
    """An unsigned GET without its key: `url` and `auth_path` end before it."""

    url: str
    auth_path: str | None
    headers: Mapping[str, str]
    context: Mapping[str, Any] = field(repr=False)
    signer: Any = field(repr=False)

    @property
    def scope(self) -> tuple[str, Any]:
        """Return the parts that depend on the region of the bucket."""
        return self.url, self.context.get("signing")


@dataclass(frozen=True)
class SignedGet:
    """A GET that is ready to be sent."""

    url: str
    headers: dict[str, str] = field(repr=False)
    template: _Template = field(repr=False)


class S3Client:
    """A `Client` of one S3 bucket. Thread-safe; for one process. Paths are keys.

    The constructor makes no request. It raises `AccessError`, `UsageError` or botocore's exceptions if options,
    credentials or the endpoint are missing or wrong.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self.bucket, self.root = split_bucket(location.path)
        self._lock = threading.RLock()
        self._signed = lru_cache(MAX_SIGNATURES)(_sign)
        self._connect()
        # whether the server checks the CRC-32C of bodies; None until the first PUT
        self._checks_crc: bool | None = None
        if self.client.meta.config.signature_version is not UNSIGNED and self.keys() is None:
            remedy = "give key and secret (or anon=True) in storage_options, or set AWS_PROFILE or AWS_ACCESS_KEY_ID"
            raise AccessError(f"{location.shown}: no credentials found", remedy)

    def _connect(self) -> None:
        """Create botocore's client, which looks up the credentials again."""
        self.client, verify = _botocore_client(self._location)
        self._template: _Template | None = None
        self._served: _Template | None = None  # that of the last GET, if it had a response with data
        config, events = self.client.meta.config, self.client.meta.events
        self._pool = Pool(self._location.retry, config, verify)
        # weak, since the client is in a reference cycle, which would keep the connections open until it is collected
        send = partial(_send, weakref.ref(self._pool))
        self.client._endpoint.http_session = SimpleNamespace(send=send, close=lambda: None)
        unsigned = config.merge(Config(s3={"payload_signing_enabled": False, **(config.s3 or {})}))
        events.register("before-sign.s3", partial(_skip_digest, unsigned))
        events.register("before-call.s3.HeadBucket", _end_redirects)

    # requests

    def call(self, operation: str, **parameters: Any) -> Any:
        """Return the response of botocore's client for an operation on the bucket.

        Repeated once with new credentials if they have expired.
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
                return _Response(getattr(client, xform_name(operation))(**known))
            except ClientError as error:
                if renewed or facts_of(error).code not in EXPIRED:
                    raise
            except ValueError as error:
                if type(error) is not ValueError:  # a subclass is raised for the key
                    raise
                raise HttpError(200, "Malformed", str(error)) from error  # botocore cannot parse a number or a date
            self._renew(client)
        raise AssertionError("unreachable")

    def _renew(self, used: Any) -> None:
        """Replace the client `used`, whose credentials have expired, unless another thread has replaced it already."""
        with self._lock:
            if used is self.client:
                self._connect()

    # ranged reads

    @contextlib.contextmanager
    def _get(self, key: str, byte_range: str, seconds: float | None = None) -> Iterator[http.client.HTTPResponse]:
        """Request the `Range`, or the object if `byte_range` is empty, whose response may take `seconds` to begin.

        Repeated if the response shows that the bucket is in another region, and once with new credentials if they have
        expired. Raises `HttpError`, also for another range than the requested one.
        """
        renewed = False
        for attempt in range(MAX_RESENDS + 1):
            client, signed = self.client, self.sign(key)
            headers = {**signed.headers, "Range": byte_range} if byte_range else signed.headers
            begin, pool = time.monotonic(), self._pool
            # stubs, such as moto's mock_aws, respond to this event of botocore's client instead of the server
            request = AWSRequest("GET", signed.url, headers).prepare()
            stub = first_non_none_response(client.meta.events.emit("before-send.s3.GetObject", request=request))
            sent: Any = contextlib.nullcontext(_Stub(stub)) if stub else None
            with sent or pool.request("GET", signed.url, headers, seconds=seconds) as response:
                pool.patience.began(time.monotonic() - begin)
                # some servers respond to a range of an empty object with 200
                if response.status == (206 if byte_range else 200) or (response.status == 200 and response.length == 0):
                    if byte_range:
                        check_range(byte_range, response.headers.get("Content-Range"), response.length)
                    self._served = signed.template
                    yield response
                    return
                failure = _failure(response)
            can_resend = attempt < MAX_RESENDS
            if can_resend and failure.error_code in EXPIRED and not renewed:
                renewed = True
                self._renew(client)
            elif not (can_resend and self._learn_region(key, signed.template, failure)):
                try:
                    raise failure
                finally:
                    del failure  # its traceback has this frame: a cycle that would keep the callers' objects

    def get(self, path: str) -> bytes:
        """Return the object."""

        def read(seconds: float) -> bytes:
            with self._get(path, "", seconds) as response:
                return _read_all(response)

        return self._pool.patience.call(read)

    def get_tail(self, path: str, size: int) -> bytes:
        """Return the last `size` bytes, fewer if the object is smaller."""
        return bytes(self._read_range(path, f"bytes=-{size}", size))

    def get_range(self, path: str, start: int, stop: int, receiver: Receiver = RECEIVER) -> memoryview:
        """Return bytes [start, stop) of the object, fewer if it ends before `stop`; in `receiver.allocate(size)`."""
        return self._read_range(path, f"bytes={start}-{stop - 1}", stop - start, receiver)

    def _read_range(self, path: str, byte_range: str, size: int, receiver: Receiver = RECEIVER) -> memoryview:
        def read(seconds: float) -> memoryview:
            with self._get(path, byte_range, seconds) as response:
                if response.length is None:
                    return memoryview(response.read(size))
                body = receiver.allocate(min(size, response.length))  # the object may end before
                return body[: _read_into(response, body)]

        try:
            return self._pool.patience.call(read, receiver)
        except HttpError as error:
            if not is_past_end(error):
                raise
            return memoryview(b"")

    def sign(self, key: str) -> SignedGet:
        """Return a signed GET of an object, for any range.

        A signature is reused for up to a minute, as long as credentials and region do not change.
        """
        template = self.template()
        if template.context["auth_type"] == EXPRESS:  # botocore renews its sessions when it signs
            return _sign(key, template)
        return self._signed(key, template, self.keys(), time.monotonic() // SIGNATURE_SECONDS)

    def keys(self) -> Any:
        """Return the current credentials (`access_key`, `secret_key`, `token`), or None if none are found."""
        return self.template().signer.get_auth_instance("s3", "us-east-1", "s3v4").credentials

    def template(self) -> _Template:
        """Return the GET without its key, which the client builds at the first call and does not send."""
        if self._template is not None:
            return self._template
        built: list[_Template] = []

        def take(params: Mapping[str, Any], context: Mapping[str, Any], request_signer: Any, **_: Any) -> Any:
            url, auth_path = params["url"].removesuffix(_ANY_KEY), params.get("auth_path") or None
            auth_path = auth_path and auth_path.removesuffix(_ANY_KEY)
            built.append(_Template(url, auth_path, params["headers"], context, request_signer))
            return SimpleNamespace(status_code=200), {}  # a response, so that no request is sent

        with self._lock:
            self.client.meta.events.register_last("before-call.s3.GetObject", take)
            try:
                self.call("GetObject", Key=_ANY_KEY)
            finally:
                self.client.meta.events.unregister("before-call.s3.GetObject", take)
            self._template = built[-1]
            return self._template

    def _learn_region(self, key: str, used: _Template, failure: HttpError) -> bool:
        """Return whether a failed GET should be repeated: botocore's client, which follows redirects, had more success.

        It also remembers the region of the bucket. One redirect between GETs with data is no change of the region.
        """
        if failure.status not in _REDIRECTS and failure.error_code not in _OTHER_REGION:
            return False
        if self._served is used:
            self._served = None
            return True
        found = False
        with self._lock:
            if self._template is used:
                with contextlib.suppress(*client_errors()):
                    self.call("GetObject", Key=key, Range="bytes=0-0")
                    found = True
                self._template = None
            return found or self.template().scope != used.scope

    # other operations

    def info(self, path: str) -> ObjectInfo | None:
        """Return size and etag of an object, or None if it does not exist."""
        head = self._head(path)
        return None if head is None else ObjectInfo(path, head["ContentLength"], etag_of(head))

    def modified(self, path: str) -> datetime | None:
        """Return when the object was last written, or None if it does not exist."""
        head = self._head(path)
        return None if head is None else head["LastModified"]

    def _head(self, path: str) -> _Response | None:
        try:
            return self.call("HeadObject", Key=path)  # type: ignore[no-any-return]
        except ClientError as error:
            status = facts_of(error).status
            if status == 404:
                return None
            if status not in (400, 403):
                raise
        try:
            self.get_range(path, 0, 1)  # raises the reason, which a response to HEAD lacks, or renews the credentials
        except HttpError as error:
            if error.error_code != "NoSuchKey":
                raise
            return None
        return self.call("HeadObject", Key=path)  # type: ignore[no-any-return]

    def list_page(self, folder: str, token: str | None) -> Page:
        """Return objects below a folder, and the token of the next page."""
        options = {"ContinuationToken": token} if token else {}
        page = self.call("ListObjectsV2", Prefix=f"{folder}/" if folder else "", **options)
        objects = [
            ObjectInfo(entry["Key"], entry["Size"], etag_of(entry))
            for entry in map(_Response, page.get("Contents", ()))
            if not entry["Key"].endswith("/")  # a console's marker of a folder
        ]
        return objects, page["NextContinuationToken"] if page["IsTruncated"] else None

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly below a folder."""
        names: list[str] = []
        token: str | None = None
        while True:
            options = {"ContinuationToken": token} if token is not None else {}
            page = self.call("ListObjectsV2", Prefix=f"{folder}/" if folder else "", Delimiter="/", **options)
            names += [entry["Prefix"].rstrip("/").rpartition("/")[2] for entry in page.get("CommonPrefixes", ())]
            if not page["IsTruncated"]:
                return names
            token = page["NextContinuationToken"]

    def put(self, path: str, data: Body) -> str:
        """Write the object, with its CRC-32C for the server to check, which takes an eighth of the time of SHA-256.

        If the server rejects the checksum, or does not confirm it without TLS, the signature covers the body instead.
        """
        body = _Upload(data)
        if len(body) >= 2 * PART_BYTES:
            return self.put_in_parts(path, data, PART_BYTES)
        if self._checks_crc is not False:
            crc = base64.b64encode(body_crc32c(data).to_bytes(4, "big")).decode()
            try:
                response = self.call("PutObject", Key=path, Body=body, ChecksumCRC32C=crc)
            except ClientError as error:
                if self._checks_crc or not self._rejects(error, 400, 403, 501):
                    raise
                self._checks_crc = False  # a server that does not support the header rejects or ignores it
            else:
                secure = self.template().url.startswith("https:")
                self._checks_crc = secure or CHECKSUM in response["ResponseMetadata"]["HTTPHeaders"]
                if self._checks_crc:
                    return etag_of(response)
        return etag_of(self.call("PutObject", Key=path, Body=body))

    def _rejects(self, error: ClientError, *statuses: int) -> bool:
        """Return whether a response with one of these statuses may say that the server does not support the request.

        Not if its code says that the request may succeed when it is repeated: a 400 may be `RequestTimeout`.
        """
        facts, ours = facts_of(error), storage_error(error, self._location)
        again = facts.code in EXPIRED or (isinstance(ours, _REPEATED) and facts.code not in _OF_BODY)
        return facts.status in statuses and not again

    def put_in_parts(self, path: str, data: Body, part_bytes: int) -> str:
        """Write the object by parts of `part_bytes`, all but the last: Cloudflare's R2 takes no others."""
        upload = {"Key": path, "UploadId": self.call("CreateMultipartUpload", Key=path)["UploadId"]}
        try:
            parts = []
            for number, part in enumerate(_Upload(data).split(part_bytes), 1):
                response = self.call("UploadPart", **upload, PartNumber=number, Body=part)
                parts.append({"PartNumber": number, "ETag": response["ETag"]})
            return etag_of(self.call("CompleteMultipartUpload", **upload, MultipartUpload={"Parts": parts}))
        except BaseException:
            with contextlib.suppress(*client_errors()):  # it may be complete, its response lost
                self.call("AbortMultipartUpload", **upload)
            raise

    def create(self, path: str, data: Buffer) -> str:
        """Write the object; an error of status 412 if it exists.

        Some servers ignore the condition or reject it with status 501, so it is not what tells that an object exists,
        but which one of several writers at once is the first.
        """
        if self.info(path) is not None:
            raise HttpError(412, "PreconditionFailed", "the object exists")
        try:
            return etag_of(self.call("PutObject", Key=path, Body=_Upload(data), IfNoneMatch="*"))
        except ClientError as error:
            if facts_of(error).status != 501:
                raise
        return self.put(path, data)

    def replace(self, path: str, data: Buffer, before: Buffer) -> str | bytes:
        """Write the object if its content is `before`; if not, return what it has, as much as tells."""
        size = max(body_bytes(data), body_bytes(before)) + 1  # notices a longer object
        with self._get(path, "") as response:
            current, etag = response.read(size), response.headers["ETag"]
            if len(current) < size and response.length:  # `read` returns what came before the connection ended
                raise http.client.IncompleteRead(b"", response.length)
        if current == data:
            return ""
        if current != before:
            return current
        try:
            return etag_of(self.call("PutObject", Key=path, Body=_Upload(data), IfMatch=etag))
        except ClientError as error:
            status = facts_of(error).status
            if status == 501:  # a server without conditional writes: the comparison has to suffice
                return self.put(path, data)
            if status not in (404, 412):
                raise
        current = bytes(self.get_range(path, 0, size))
        return "" if current == data else current

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the objects, and ignore those that do not exist."""
        for first in range(0, len(paths), KEYS_PER_DELETE):
            keys = paths[first : first + KEYS_PER_DELETE]
            try:
                response = self.call("DeleteObjects", Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True})
            except ClientError as error:
                if not self._rejects(error, 400, 405, 501):
                    raise
                # some servers require MD5, which botocore no longer sends, or do not support the request
                run_all(self._delete, keys, DELETING_THREADS)
                continue
            for failure in response.get("Errors", ()):
                if failure.get("Code") != "NoSuchKey":
                    raise ClientError({"Error": failure}, "DeleteObjects")

    def _delete(self, path: str) -> None:
        try:
            self.call("DeleteObject", Key=path)
        except ClientError as error:
            if facts_of(error).status != 404:  # Google's, of a missing object
                raise

    def remove_leftovers(self, folder: str) -> int:
        """Abort the unfinished uploads below a folder, and return their number."""
        removed = 0
        while True:  # the uploads of a page are removed, so the next page becomes the first
            page = self.call("ListMultipartUploads", Prefix=f"{folder}/" if folder else "")
            uploads = page.get("Uploads", ())
            for upload in uploads:
                self.call("AbortMultipartUpload", Key=upload["Key"], UploadId=upload["UploadId"])
            removed += len(uploads)
            if not uploads or not page.get("IsTruncated"):
                return removed


def _sign(key: str, template: _Template, *_: Any) -> SignedGet:
    encoded = percent_encode(key, safe="/~")
    auth_path = None if template.auth_path is None else template.auth_path + encoded
    request = AWSRequest("GET", template.url + encoded, dict(template.headers), b"", auth_path=auth_path)
    request.context = dict(template.context)  # the signer writes to it
    template.signer.sign("GetObject", request)
    return SignedGet(request.url, {name: str(value) for name, value in request.headers.items()}, template)


def _end_redirects(params: dict[str, Any], **_: Any) -> None:
    """Keep botocore from following the redirect of the HEAD by which it looks up the region of a bucket."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _send(pool: weakref.ref[Pool], request: AWSPreparedRequest) -> AWSResponse:
    """Send a request of botocore's client over our connections, as its own have no deadline for a response.

    In place of the `send` of its session, so that stubs come first.
    """
    headers = {
        name: value.decode() if isinstance(value, bytes) else str(value)
        for name, value in request.headers.items()
        if name.lower() != "expect"
    }
    body = io.BytesIO(request.body) if isinstance(request.body, bytes | bytearray) else request.body
    pieces = iter(partial(body.read, PIECE_BYTES), b"") if request.body else None
    connections = pool()
    assert connections is not None  # held by the caller
    with connections.request(request.method, request.url, headers, pieces) as response:
        content = io.BytesIO(_read_all(response))
    raw = HTTPResponse(content, preload_content=False)
    return AWSResponse(request.url, response.status, dict(response.headers), raw)


class _Stub(io.BytesIO):
    """The response of a stub, with the attributes of a response that `_get` uses."""

    def __init__(self, response: AWSResponse) -> None:
        super().__init__(response.content)
        self.status, self.headers = response.status_code, response.headers

    @property
    def length(self) -> int:
        """The number of bytes that are left."""
        return self.getbuffer().nbytes - self.tell()


def _skip_digest(unsigned: Config, request: AWSRequest, **_: Any) -> None:
    """Sign a body that has a checksum without its SHA-256, unless the options require it."""
    if CHECKSUM in request.headers:
        request.context["client_config"] = unsigned


class _Response(dict[str, Any]):
    """A response of botocore's client. A missing key is an error: not every response of status 200 is by a store."""

    def __missing__(self, name: str) -> Any:
        raise HttpError(200, "Malformed", f"the response has no {name}")


class _Upload:
    """A body as a file-like object, which reads its buffers without joining them."""

    def __init__(self, body: Body) -> None:
        self._parts = buffers_of(body)
        self._next = _pieces(self._parts)

    def __len__(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def tell(self) -> int:
        """Return 0: botocore calls it before a read from the start, to seek back afterwards."""
        return 0

    def seek(self, *_: int) -> None:
        """Go back to the start."""
        self._next = _pieces(self._parts)

    def read(self, size: int = -1) -> Buffer:
        """Return the next piece, whatever its size, or everything that is left; empty at the end."""
        return next(self._next, b"") if size >= 0 else b"".join(self._next)

    def split(self, size: int) -> Iterator[_Upload]:
        """Yield the body in parts of `size` bytes, without copies."""
        for start in range(0, len(self), size):
            parts, at = [], 0
            for part in self._parts:
                parts.append(part[max(0, start - at) : max(0, start + size - at)])
                at += part.nbytes
            yield _Upload(parts)


def _pieces(body: Sequence[memoryview]) -> Iterator[Buffer]:
    """Yield the body in pieces of up to 1 MiB; small buffers are joined."""
    joined = bytearray()
    for part in body:
        is_small = part.nbytes < SMALL_BYTES
        if is_small:
            joined += part
        if joined and (len(joined) >= SMALL_BYTES or not is_small):
            yield joined
            joined = bytearray()
        if not is_small:
            yield from (part[at : at + PIECE_BYTES] for at in range(0, part.nbytes, PIECE_BYTES))
    if joined:
        yield joined


def _read_all(response: http.client.HTTPResponse) -> bytes:
    """Return the body, whose memory grows as it arrives: Content-Length may be beyond reason."""
    body = b"".join(iter(partial(response.read, PIECE_BYTES), b""))
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return body


def _read_into(response: http.client.HTTPResponse, body: memoryview) -> int:
    """Read the response into `body`, and return the number of bytes. Raises IncompleteRead if the connection ends."""
    expected, count = response.length, 0
    while count < len(body) and (size := response.readinto(body[count:])):
        count += size
    if count < len(body) and expected is not None and count < expected:
        raise http.client.IncompleteRead(b"", expected - count)
    return count


def _failure(response: http.client.HTTPResponse) -> HttpError:
    """Return the error for a response without the requested bytes."""
    if response.status == 200:
        return HttpError(200, "RangeNotSupported", "received the whole object")
    code, message = xml_error(response.read(1 << 12).decode("utf-8", "replace"))  # S3's error documents are shorter
    return HttpError(response.status, code, message or f"HTTP status {response.status}", dict(response.headers))


def split_bucket(path: str) -> tuple[str, str]:
    """Return the bucket, which may be an ARN, and the key in the part of a URL after `s3://`."""
    arn = _ARN.match(path)
    bucket = arn[0] if arn else path.partition("/")[0]
    return bucket, path[len(bucket) + 1 :]


# What botocore reads to make a client: 0.2 s and 12 MB, kept in cycles. Sessions share it, as clients of one do.
_service_models = lru_cache(botocore.loaders.create_loader)


def load_models() -> None:
    """Read what botocore needs to make a client, which processes that are forked later share."""
    with contextlib.suppress(*client_errors(), TypeError, ValueError):  # a configuration that no client may need
        _botocore_client(parse_location("s3://bucket", {"anon": True, "client_kwargs": {"region_name": "us-east-1"}}))


class Access(NamedTuple):
    """How a location is accessed: endpoint and region, by what connections, and where the credentials come from."""

    endpoint: str
    region: str
    pool: Pool
    credentials: str  # "" without any


def access_of(location: Location) -> Access:
    """Return how a location is accessed. Looks for credentials, for which botocore may ask a metadata service."""
    client, verify = _botocore_client(location)
    pool, options = Pool(location.retry, client.meta.config, verify), location.options
    region = client.meta.region_name or ""
    if options.get("anon"):
        source = "anon: requests are not signed"
    elif options.get("credential_provider"):
        source = "the function credential_provider"
    elif options.get("key") or options.get("username") or (options.get("client_kwargs") or {}).get(_KEYS[0]):
        source = "storage options"
    else:
        session = botocore.session.Session(profile=options.get("profile"))
        session.set_default_client_config(SERVICES)
        try:
            found = session.get_credentials()
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # of a credential_process, for one
            problem = f"{location.shown}: a source of credentials returns no credentials ({type(error).__name__})"
            remedy = "check credential_process in the profile, or AWS_PROFILE"
            raise AccessError(problem, remedy) from None  # the text of the error may have what it returned
        source = "" if found is None else _SOURCES.get(found.method, found.method)
        if source and session.profile and found.method not in _NO_PROFILE:
            source = f"{source}, profile {session.profile}"
    return Access(client.meta.endpoint_url, region, pool, source)


# botocore's names of what provides credentials
_SOURCES = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the credentials file",
    "config-file": "the configuration file",
    "assume-role": "an assumed role",
    "assume-role-with-web-identity": "a web identity (AWS_WEB_IDENTITY_TOKEN_FILE)",
    "sso": "SSO",
    "custom-process": "credential_process",
    "container-role": "the role of the container",
    "iam-role": "the role of the instance",
}
_NO_PROFILE = ("env", "container-role", "iam-role")


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
    if "aws_access_key_id" not in given or given["aws_access_key_id"] is None:
        renew_credentials(session, location)
    verify = given.get("verify")
    if verify is None:
        verify = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    return session.create_client("s3", config=Config(**config), **given), verify
