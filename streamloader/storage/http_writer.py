"""Whole objects written to S3 over plain sockets: a tenth of the processor time of s3fs, and no copy of the body."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
from collections.abc import Iterator, Sequence

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from streamloader.storage.failures import client_errors, storage_error
from streamloader.storage.http_pool import Endpoint, HttpError, Pool, refusal
from streamloader.storage.location import object_path
from streamloader.storage.protocol import Body, body_crc32c, buffers_of

# A socket's timeout is for all of one call: a large body goes piece by piece, so that it is for each
PIECE_BYTES = 1 << 20
SMALL_BYTES = 64 << 10  # what is smaller is copied: each would be a packet
UNSIGNED = "UNSIGNED-PAYLOAD"
CHECKSUM = "x-amz-checksum-crc32c"


class HttpWriter:
    """Puts over one pool. `prefix` is the store's key, `shown` its URL.

    Over TLS a body is not hashed: as botocore has it, the line is trusted then. Else the server compares its CRC-32C,
    which takes an eighth of the time of the SHA-256 in a signature, on both sides; a server that does not say that it
    has done so gets signatures.
    """

    def __init__(self, pool: Pool, prefix: str, shown: str) -> None:
        self._pool, self._prefix, self._shown = pool, prefix, shown

    def put(self, path: str, data: Body) -> str:
        """Write the object by one request, and return its etag. Thread-safe. Raises a `StorageError`."""
        key = "/".join(filter(None, (self._prefix, object_path(path))))
        try:
            return self._put(self._pool.endpoint.target(key), buffers_of(data))
        except client_errors(http.client.HTTPException) as error:
            raise storage_error(error, f"{self._shown}/{path}") from error

    def _put(self, target: str, body: Sequence[memoryview]) -> str:
        pool, endpoint = self._pool, self._pool.endpoint
        if endpoint.tls is not None:
            return self._send(target, body, signed_put(endpoint, target, UNSIGNED))[0]
        if pool.compares is not False:
            try:
                etag, pool.compares = self._send(target, body, signed_put(endpoint, target, UNSIGNED, checksum(body)))
            except HttpError as error:
                if pool.compares or error.status not in (400, 403, 501):
                    raise
                pool.compares = False  # it may not know the header: then it answers so or ignores it
            if pool.compares:
                return etag
        digest = hashlib.sha256()
        for part in body:
            digest.update(part)
        return self._send(target, body, signed_put(endpoint, target, digest.hexdigest()))[0]

    def _send(self, target: str, body: Sequence[memoryview], headers: dict[str, str]) -> tuple[str, bool]:
        """Return the object's etag, and whether the server compared its checksum."""
        headers["Content-Length"] = str(sum(part.nbytes for part in body))
        connection = self._pool.take()
        whole = False
        try:
            # a server that refuses does not wait for the body: its answer is there
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("PUT", target, body=_pieces(body), headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise refusal(answer)
            answer.read()
            whole = answer.isclosed()
            return answer.headers.get("ETag", "").strip('"'), answer.headers.get(CHECKSUM) is not None
        finally:
            if whole:
                self._pool.give_back(connection)
            else:
                connection.close()


def checksum(body: Sequence[memoryview]) -> str:
    """Return the CRC-32C of a body as S3 writes it."""
    return base64.b64encode(body_crc32c(body).to_bytes(4, "big")).decode()


def signed_put(endpoint: Endpoint, target: str, digest: str, crc: str = "") -> dict[str, str]:
    """Return the headers of a PUT with the body's SHA-256 `digest`, or `UNSIGNED`, and its checksum if one is given."""
    headers = {**endpoint.headers, **({CHECKSUM: crc} if crc else {})}
    if endpoint.credentials is None:
        return headers
    request = AWSRequest("PUT", endpoint.address(target), headers=headers)
    keys = endpoint.credentials()
    credentials = Credentials(keys["access_key_id"], keys["secret_access_key"], keys["token"])
    _Auth(digest, credentials, endpoint.region).add_auth(request)
    return {name: str(value) for name, value in request.headers.items()}


class _Auth(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Signs with a digest that is known."""

    def __init__(self, digest: str, credentials: Credentials, region: str) -> None:
        super().__init__(credentials, "s3", region)
        self._digest = digest

    def payload(self, request: AWSRequest) -> str:  # noqa: ARG002 - botocore's hook
        """Return the digest of the body."""
        return self._digest


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
