"""S3 through s3fs, one request for each question. s3fs itself asks HEAD or LIST first in many places."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from streamloader.storage.calls import Page, StreamedCalls, etag_of, larger_than, owned
from streamloader.storage.failures import HttpError, check_range, client_errors, facts_of
from streamloader.storage.policy import Progress
from streamloader.storage.protocol import Body, Buffer, ObjectInfo

# s3fs sends one PUT for less than two parts: here below 1 GiB (S3 takes 5 GiB, but a failed PUT starts anew)
PART_BYTES = 512 << 20
PART_READ = 1 << 20  # at most so many bytes of a response at once
KEYS_PER_DELETE = 1000  # S3's limit


class S3Calls(StreamedCalls):
    """An `s3fs.S3FileSystem`."""

    async def _partial(self, path: str, wanted: str) -> bytes:
        """Ask once: `cat_file` of s3fs may ask for the size first, and drops what the response says of its range."""
        bucket, key, version = self.fs.split_path(path)
        parameters: dict[str, Any] = {"Bucket": bucket, "Key": key, "Range": wanted, "VersionId": version}
        progress = Progress(self.policy)
        async with asyncio.timeout(progress.seconds_left()) as limit:
            answer = await self.fs._call_s3("get_object", **{name: text for name, text in parameters.items() if text})
            with contextlib.closing(answer["Body"]) as body:
                if wanted and answer["ResponseMetadata"]["HTTPStatusCode"] != 206 and answer["ContentLength"]:
                    raise HttpError(200, "RangeNotSupported", f"the whole object came for {wanted}")
                if wanted:
                    check_range(wanted, answer.get("ContentRange"))
                return await self._collect(partial(body.read, PART_READ), progress, limit)

    def info(self, path: str) -> ObjectInfo | None:
        bucket, key = self._split(path)
        try:
            found = self._call("head_object", 0, Bucket=bucket, Key=key)
        except OSError as error:
            status = facts_of(error).status
            if status in (400, 403):  # the response to a HEAD has no body, so no reason: that to a GET says it
                self.get_range(path, 0, 1)
            if status != 404:
                raise
            return None
        return ObjectInfo(path, found["ContentLength"], etag_of(found))

    def list_page(self, folder: str, token: str) -> Page:
        bucket, key = self._split(folder)
        prefix = f"{key}/" if key else ""
        more: dict[str, Any] = {"ContinuationToken": token} if token else {}
        answer = self._call("list_objects_v2", Bucket=bucket, Prefix=prefix, **more)
        objects = [
            ObjectInfo(f"{bucket}/{entry['Key']}", entry["Size"], etag_of(entry))
            for entry in answer.get("Contents", ())
            if not entry["Key"].endswith("/")  # consoles mark folders so
        ]
        return Page(objects, answer.get("NextContinuationToken", "") if answer.get("IsTruncated") else "")

    def put(self, path: str, data: Body) -> str:
        return etag_of(self.fs.pipe_file(path, owned(data), chunksize=PART_BYTES))

    def create(self, path: str, data: Buffer) -> str:
        return etag_of(self.fs.pipe_file(path, owned(data), chunksize=PART_BYTES, mode="create"))

    def replace(self, path: str, data: Buffer, before: Buffer) -> str | None:
        seen = self.info(path)  # asked before the bytes, so that what is written between the two is noticed
        size = larger_than(data, before)
        there = self.get_range(path, 0, size)
        if there == data:
            return ""
        if seen is None or there != before:
            return None
        try:
            return etag_of(self.fs.pipe_file(path, owned(data), chunksize=PART_BYTES, IfMatch=f'"{seen.etag}"'))
        except client_errors() as error:
            status = facts_of(error).status
            if status == 501:  # a server without conditional writes: the look just before has to do
                return self.put(path, data)
            if status not in (404, 412):
                raise
        return "" if self.get_range(path, 0, size) == data else None

    def delete(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), KEYS_PER_DELETE):
            split = [self._split(path) for path in paths[first : first + KEYS_PER_DELETE]]
            keys = {"Objects": [{"Key": key} for _, key in split], "Quiet": True}
            answer = self._call("delete_objects", Bucket=split[0][0], Delete=keys)
            for problem in answer.get("Errors", ()):
                if problem.get("Code") != "NoSuchKey":
                    raise ClientError({"Error": problem}, "DeleteObjects")

    def remove_leftovers(self, folder: str) -> int:
        bucket, key = self._split(folder)
        removed = 0
        while True:  # each round removes what it has seen, so the next page comes to the front
            answer = self._call("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "")
            uploads = answer.get("Uploads", ())
            for upload in uploads:
                self._call("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
            removed += len(uploads)
            if not uploads or not answer.get("IsTruncated"):
                return removed

    def _call(self, method: str, size: int = 1 << 20, **parameters: Any) -> Any:
        """Ask within the time that a response of `size` bytes may take: a page of a listing has less than a MiB."""
        from fsspec.asyn import sync  # it is there, with the filesystem

        return sync(self.fs.loop, self.fs._call_s3, method, timeout=self.policy.deadline(size), **parameters)

    def renew(self) -> bool:
        self.fs.connect(refresh=True)  # a new session looks for credentials from the beginning
        return True

    def _split(self, path: str) -> tuple[str, str]:
        bucket, key, _ = self.fs.split_path(path)
        return bucket, key
