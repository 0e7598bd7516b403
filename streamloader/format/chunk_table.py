"""The chunk table of a field: what each inner chunk's stored size and checksum are, read page by page.

`_streamloader/chunks/<field>` is a Zarr v3 array, u4 (shards, chunks, 2), in pages: regular chunks along the
shards, codecs `bytes` and `crc32c`. A reader plans exact ranges from it, without one index request a shard.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader import errors
from streamloader.format.codecs import CRC_BYTES
from streamloader.format.manifest import FieldLayout, Manifest
from streamloader.format.opening import reread
from streamloader.storage.process import wait_for
from streamloader.storage.store import Store

PAGE_BYTES = 1 << 20
CACHE_BYTES = 64 << 20
DAMAGED_SECONDS = 60.0  # long enough to end a run, short enough to wait for after the page is restored
TABLES = "_streamloader/chunks"


def tables_path(generation: int = 1) -> str:
    """Return the path of the group of all tables; those of a later generation have one of their own."""
    return TABLES if generation == 1 else f"{TABLES}.{generation}"


def table_path(name: str, generation: int = 1) -> str:
    """Return the path of the table's array below the dataset."""
    return f"{tables_path(generation)}/{name}"


def page_path(name: str, page: int, generation: int = 1) -> str:
    """Return the path of a page of the table."""
    return f"{table_path(name, generation)}/c/{page}/0/0"


def rows_per_page(layout: FieldLayout, num_samples: int) -> int:
    """Return the shards of one page: 1 MiB at most, no more than the dataset has, and at least one."""
    rows = max(1, PAGE_BYTES // (8 * layout.chunks_per_shard))
    return max(1, min(rows, layout.num_shards(num_samples)))


def encode_pages(entries: NDArray[np.uint32], rows: int) -> Iterator[bytes]:
    """Yield the stored pages of `rows` shards each; `entries` is uint32 (shards, chunks, 2). 0 pads the last one."""
    for start in range(0, len(entries), rows):
        page = np.zeros((rows, *entries.shape[1:]), "<u4")
        part = entries[start : start + rows]
        page[: len(part)] = part
        data = page.tobytes()
        yield data + crc32c.crc32c(data).to_bytes(CRC_BYTES, "little")


def table_digest(entries: NDArray[np.uint32]) -> str:
    """Return the SHA-256 of the table's little-endian C-order bytes, without the padding of its last page."""
    return hashlib.sha256(entries.astype("<u4").tobytes()).hexdigest()


class _Page:
    """A page of the table, or why it could not be loaded; after `expires` one thread at a time loads it again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loads = 0
        self.outcome: NDArray[np.uint32] | errors.StreamloaderError | None = None
        self.expires = 0.0


def _without_frames(error: errors.StreamloaderError) -> errors.StreamloaderError:
    """Return a copy of an error for another thread: a traceback holds what its frames held."""
    return type(error)(error.problem, error.remedy)


class ChunkTable:
    """The table of one field of the dataset below `store`, read lazily; thread-safe. Holds up to 64 MB of pages.

    The manifest's SHA-256 of the whole table is compared where the table is one page, as most are.
    """

    def __init__(self, store: Store, manifest: Manifest, name: str) -> None:
        layout, num_samples = manifest.fields[name], manifest.num_samples
        self._store = store
        self._name = name
        self._generation = manifest.generation
        self._chunk, self._chunks = layout.chunk, layout.chunks_per_shard
        self._shards = layout.num_shards(num_samples)
        self._rows = rows_per_page(layout, num_samples)
        self._limit = layout.stored
        self._sha256 = manifest.tables.get(name, "")
        self._skips: dict[int, list[tuple[int, int]]] = {}
        for shard, chunk, size in layout.skips:
            self._skips.setdefault(shard, []).append((chunk, size))
        self._pages: OrderedDict[int, _Page] = OrderedDict()
        self._keep = max(2, CACHE_BYTES // (8 * self._rows * self._chunks))
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """The most bytes of pages that are kept: the whole table where it is small."""
        return min(self._keep, -(-self._shards // self._rows)) * 8 * self._rows * self._chunks

    def shard(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
        """Return where each inner chunk of a shard begins and ends in the object (int64), and its crc (uint32).

        Raises `MissingObjectError`, `CorruptError`, `ModifiedError` or `FormatError`, which name the table's page.
        """
        if not 0 <= index < self._shards:
            raise IndexError(f"shard {index} of {self._shards}")
        page = self._page(index // self._rows)
        row = page[index % self._rows]
        sizes = row[:, 0].astype(np.int64)
        stops = sizes.cumsum()
        for chunk, size in self._skips.get(index, ()):
            stops[chunk:] += size
        if stops[-1] > self._limit:
            problem = f"the chunk table of {self._url(index // self._rows)} gives shard {index} {stops[-1]} bytes"
            raise errors.FormatError(f"{problem}, the whole field has {self._limit}", "convert the dataset again")
        return stops - sizes, stops, row[:, 1]

    def entries(self, index: int, samples: int) -> NDArray[np.uint32]:
        """Return the rows of the table, uint32 (chunks, 2), of a shard that holds so many samples.

        Raises as `shard`, and `FormatError` for sizes that no writer writes.
        """
        starts, stops, crcs = self.shard(index)
        entries = np.stack([stops - starts, crcs], axis=1).astype(np.uint32)
        used = -(-samples // self._chunk)
        if np.any(entries[:used, 0] <= CRC_BYTES) or np.any(entries[used:]):
            url = self._url(index // self._rows)
            problem = f"the chunk table {url} has an invalid size for a chunk of shard {index}"
            raise errors.FormatError(problem, "convert the dataset again")
        return entries

    def read(self) -> NDArray[np.uint32]:
        """Return the whole table, uint32 (shards, chunks, 2), compared with its SHA-256. Raises as `shard`."""
        pages = [reread(partial(self._load, number)) for number in range(-(-self._shards // self._rows))]
        empty = np.zeros((0, self._chunks, 2), np.uint32)
        table = np.concatenate(pages)[: self._shards] if pages else empty
        self._check_digest(table, f"{self._store.url}/{table_path(self._name, self._generation)}")
        return table

    def _page(self, number: int) -> NDArray[np.uint32]:
        """Return a page. One thread loads it while others wait, so that a damaged one is read three times in all."""
        with self._lock:
            page = self._pages.setdefault(number, _Page())
            self._pages.move_to_end(number)
            while len(self._pages) > self._keep:
                self._pages.popitem(last=False)
        loads = page.loads
        wait_for(lambda seconds: page.lock.acquire(timeout=seconds))
        try:
            if page.loads == loads and time.monotonic() >= page.expires:
                self._fill(number, page)
            outcome = page.outcome
        finally:
            page.lock.release()
        if isinstance(outcome, errors.StreamloaderError):
            raise _without_frames(outcome)
        assert outcome is not None
        return outcome

    def _fill(self, number: int, page: _Page) -> None:
        """Load a page, or note why that fails. A thread that is to end notes nothing: another one tries."""
        try:
            page.outcome, page.expires = reread(partial(self._load, number)), math.inf
        except (errors.FormatError, errors.StorageError) as error:
            page.outcome = _without_frames(error)
            page.expires = time.monotonic() + DAMAGED_SECONDS if isinstance(error, errors.FormatError) else 0.0
        page.loads += 1

    def _load(self, number: int) -> NDArray[np.uint32]:
        url, path = self._url(number), page_path(self._name, number, self._generation)
        size = 8 * self._rows * self._chunks
        try:
            data = self._store.get_range(path, 0, size + CRC_BYTES + 1)  # one byte more shows a longer object
        except errors.NotFoundError as error:
            raise errors.MissingObjectError(f"the chunk table {url} is missing", "convert the dataset again") from error
        if len(data) != size + CRC_BYTES:
            problem = f"the chunk table {url} has {len(data)} bytes, expected {size + CRC_BYTES}"
            raise errors.CorruptError(problem, "copy or convert the dataset again")
        if crc32c.crc32c(data[:size]) != int.from_bytes(data[size:], "little"):
            problem = f"the checksum of the chunk table {url} does not match"
            raise errors.CorruptError(problem, "copy or convert it again")
        page = np.frombuffer(data, "<u4", size // 4).astype(np.uint32).reshape(self._rows, self._chunks, 2)
        if self._shards <= self._rows:
            self._check_digest(page[: self._shards], url)
        return page

    def _check_digest(self, table: NDArray[np.uint32], url: str) -> None:
        if self._sha256 and table_digest(table) != self._sha256:
            problem = f"the chunk table {url} is intact, but not the one that the manifest was written for"
            raise errors.ModifiedError(problem, "restore it, or convert the dataset again")

    def _url(self, number: int) -> str:
        return f"{self._store.url}/{page_path(self._name, number, self._generation)}"
