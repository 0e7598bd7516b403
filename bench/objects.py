"""What lies in the store: sizes, removal, a copy in a folder; and what a log says was asked of it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.servers import Endpoint

BUCKET = "bench"
READERS = 4


@dataclass(frozen=True)
class Requests:
    """What clients asked of a server: successful GETs and all other requests, and the bytes of the bodies."""

    gets: int = 0
    others: int = 0
    bytes: int = 0


def make_bucket(endpoint: Endpoint) -> None:
    """Create the bucket if it is not there."""
    with contextlib.closing(endpoint.client()) as client:
        if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=BUCKET)


def entries(client: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the key and size of every object of the folder `prefix`."""
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/"):
        for entry in page.get("Contents", ()):
            yield entry["Key"], entry["Size"]


def stored(endpoint: Endpoint, prefix: str) -> tuple[int, int]:
    """Return (objects, bytes) of the folder."""
    with contextlib.closing(endpoint.client()) as client:
        sizes = [size for _, size in entries(client, prefix)]
    return len(sizes), sum(sizes)


def stored_in(folder: Path, prefix: str) -> int:
    """Return the bytes of the mirror of the folder `prefix`."""
    return sum(path.stat().st_size for path in (folder / BUCKET / prefix).rglob("*") if path.is_file())


def recall(endpoint: Endpoint, prefix: str, mirrored: Path | None = None) -> None:
    """Read every object of the folder once, or its mirror: machines put files that were idle out of memory."""
    if mirrored is not None:
        for path in (mirrored / BUCKET / prefix).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    _drain(file)
        return
    with contextlib.closing(endpoint.client()) as client, ThreadPoolExecutor(READERS) as pool:
        keys = [key for key, _ in entries(client, prefix)]
        for _ in pool.map(lambda key: _drain(client.get_object(Bucket=BUCKET, Key=key)["Body"]), keys):
            pass


def _drain(body: Any) -> None:
    while body.read(1 << 20):
        pass


def erase(endpoint: Endpoint, prefix: str) -> None:
    """Delete every object of the folder."""
    with contextlib.closing(endpoint.client()) as client:
        for key, _ in list(entries(client, prefix)):
            client.delete_object(Bucket=BUCKET, Key=key)


def mirror(endpoint: Endpoint, prefix: str, folder: Path) -> None:
    """Copy every object to `folder`/<bucket>/<key>, as a server of static files wants them, and nothing else."""
    shutil.rmtree(folder / BUCKET / prefix, ignore_errors=True)
    with contextlib.closing(endpoint.client()) as client:
        for key, _ in entries(client, prefix):
            path = folder / BUCKET / key
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for piece in client.get_object(Bucket=BUCKET, Key=key)["Body"].iter_chunks(1 << 20):
                    file.write(piece)


def counted(log: Path, offset: int = 0) -> Requests:
    """Return what nginx's log says from the byte `offset` on."""
    gets = others = size = 0
    with log.open("rb") as file:
        file.seek(offset)
        for line in file:
            method, status, body = line.split(b"\t")[:3]
            if method == b"GET" and status in (b"200", b"206"):
                gets, size = gets + 1, size + int(body)
            else:
                others += 1
    return Requests(gets, others, size)
