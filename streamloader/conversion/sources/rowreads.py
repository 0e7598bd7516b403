"""Rows of one size at known bytes of a file: read by large requests, straight into place where they lie together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import base
from streamloader.errors import SourceChangedError
from streamloader.format.threads import run_all
from streamloader.storage.protocol import Store


@dataclass(frozen=True, eq=False)
class _Request:
    """Bytes from `start` on into `out`: all of them in order, or the rows that begin `at` these bytes of it."""

    start: int
    size: int
    out: NDArray[np.uint8]
    at: NDArray[np.int64] | None = None


def read_rows(store: Store, path: str, starts: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Fill `out` (rows, bytes of a row), C-contiguous, with the rows that begin at the ascending bytes `starts`
    and do not overlap.

    Several requests are under way at once; only those of rows that do not lie together take memory of their own, 8 MiB
    each. Raises `SourceChangedError` where the file is now too short, or a `StorageError`.
    """
    size = out.shape[1]
    requests: list[_Request] = []
    for i, j in base.cut_runs(starts, starts + size, base.GAP_BYTES, base.REQUEST_BYTES) if len(starts) else []:
        first, total = int(starts[i]), int(starts[j - 1] - starts[i]) + size
        if total > size * (j - i):
            requests.append(_Request(first, total, out[i:j], starts[i:j] - first))
            continue
        flat = out[i:j].reshape(-1)
        for at in range(0, total, base.REQUEST_BYTES):  # one row may be longer than a request
            piece = flat[at : at + base.REQUEST_BYTES]
            requests.append(_Request(first + at, len(piece), piece))
    run_all(lambda request: _fetch(store, path, request), requests, base.READ_THREADS)


def _fetch(store: Store, path: str, request: _Request) -> None:
    if request.at is None:
        read_into(store, path, request.start, request.out)
        return
    block = np.empty(request.size, np.uint8)
    read_into(store, path, request.start, block)
    rows = np.lib.stride_tricks.sliding_window_view(block, request.out.shape[1])
    request.out[...] = rows[request.at]  # np.take would copy every window


def read_into(store: Store, path: str, start: int, out: NDArray[np.uint8]) -> None:
    """Fill `out`, of one axis, with the bytes of a file from `start` on. Raises as `read_rows`."""
    if not len(out):
        return
    reader, stop = store.reader(), start + len(out)
    place = memoryview(out)  # type: ignore[arg-type]
    given: list[int] = []

    def room(size: int) -> memoryview:
        given.append(size)
        return place[:size]

    data = store.retries.call(lambda: reader.read(path, start, stop, room))
    if len(data) != len(out):
        raise SourceChangedError(
            f"{store.url}/{path} ends at byte {start + len(data)}, when it was listed it had at least {stop}",
            "leave the source alone while it is converted, and start again with --overwrite",
        )
    if not given:  # a plane whose client makes bodies of its own
        place[:] = data
