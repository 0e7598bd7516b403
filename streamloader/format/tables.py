"""The tables of a dataset, read page by page: the chunk table of each field, and the lengths of its samples.

`_streamloader/chunks/<field>` is a Zarr v3 array, u4 (shards, chunks, 2), with the codecs `bytes` and `crc32c`: the
stored size and checksum of each inner chunk. Its Zarr chunks are the pages: a page covers several whole shards. Readers
plan exact ranges from the table, so they need no index request for each shard.

`_streamloader/lengths/<field>` of a variable-length field is a Zarr v3 array, u4 (samples), with the codecs `bytes`,
`zstd` and `crc32c`: the bytes of every sample, one page for each shard. A page is written with its shard. An append
writes the page of the last shard again with more lengths, so readers of an earlier version, which use only the lengths
of their samples, can still read it.
"""

import hashlib
import math
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import crc32c
import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

from streamloader import errors
from streamloader.format.codecs import CRC_BYTES, ZSTD_LEVEL, Column, decompress_exactly, with_checksum
from streamloader.format.manifest import FieldLayout, Manifest, tables_path
from streamloader.format.opening import reread
from streamloader.options import MIB
from streamloader.storage.buffers import LRUCache
from streamloader.storage.process import run_all, wait_for
from streamloader.storage.store import Store

PAGE_BYTES = 1 << 20
CACHE_BYTES = 64 << 20
DAMAGED_SECONDS = 60.0  # how long a damaged page is not read again: long enough to end a run, short enough to wait for


def table_path(name: str, generation: int = 1) -> str:
    """Return the path of a table's array, relative to the dataset."""
    return f"{tables_path(generation)}/{name}"


def page_path(name: str, page: int, generation: int = 1) -> str:
    """Return the path of a page, relative to the dataset."""
    return f"{table_path(name, generation)}/c/{page}/0/0"


def rows_per_page(layout: FieldLayout, num_samples: int) -> int:
    """Return the number of shards in one page: as many as fit 1 MiB, at least 1, at most the shards of the dataset."""
    return max(1, min(max(1, PAGE_BYTES // (8 * layout.chunks_per_shard)), layout.num_shards(num_samples)))


def encode_pages(entries: NDArray[np.uint32], rows: int) -> Iterator[bytes]:
    """Yield the encoded pages of `rows` shards each. Zeros pad the last page.

    `entries` is the table, uint32 (shards, chunks, 2).
    """
    for start in range(0, len(entries), rows):
        page = np.zeros((rows, *entries.shape[1:]), "<u4")
        shards = entries[start : start + rows]
        page[: len(shards)] = shards
        yield with_checksum(page.tobytes())


def table_digest(entries: NDArray[np.uint32]) -> str:
    """Return the SHA-256 of the table's little-endian C-order bytes, in hexadecimal, without padding."""
    return hashlib.sha256(entries.astype("<u4").tobytes()).hexdigest()


class _Page:
    """A cached page, or the error that loading it raised. After `expires` the next thread loads it again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loads = 0
        self.outcome: NDArray[np.uint32] | errors.StreamloaderError | None = None
        self.expires = 0.0


def _without_traceback(error: errors.StreamloaderError) -> errors.StreamloaderError:
    """Return a copy of an error without its traceback, which would keep the variables of its frames alive."""
    return type(error)(error.problem, error.remedy)


class ChunkTable:
    """The chunk table of one field, read lazily; thread-safe. Caches up to 64 MiB of pages.

    Most tables have a single page; such a page is also compared with the table's SHA-256 in the manifest.
    """

    def __init__(self, store: Store, manifest: Manifest, name: str) -> None:
        layout, num_samples = manifest.fields[name], manifest.num_samples
        self._store, self._manifest, self.name, self._layout = store, manifest, name, layout
        self._shards = layout.num_shards(num_samples)
        self._page_shape = rows_per_page(layout, num_samples), layout.chunks_per_shard, 2
        self._rows, self._page_bytes = self._page_shape[0], 4 * math.prod(self._page_shape)
        self._num_pages = -(-self._shards // self._rows)
        self._skips: dict[int, list[tuple[int, int]]] = {}
        for shard, chunk, size in layout.skips:
            self._skips.setdefault(shard, []).append((chunk, size))
        self._pages = LRUCache[int, _Page](CACHE_BYTES, 2)

    @property
    def kept_bytes(self) -> int:
        """The maximum size of the cached pages, in bytes: the whole table if it is small."""
        return min(max(2, CACHE_BYTES // self._page_bytes), self._num_pages) * self._page_bytes

    def shard(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
        """Return the byte range of each inner chunk of a shard, and its checksum.

        The arrays are starts and stops within the shard object (int64), and the CRC-32C (uint32). Raises `IndexError`;
        and `MissingObjectError`, `CorruptError`, `ModifiedError` or `FormatError`, which name the page.
        """
        if not 0 <= index < self._shards:
            raise IndexError(f"shard {index} is out of range: the field has {self._shards}")
        page = self._page(index // self._rows)
        row = page[index % self._rows]
        sizes = row[:, 0].astype(np.int64)
        stops = sizes.cumsum()
        for chunk, size in self._skips.get(index, ()):
            stops[chunk:] += size
        if stops[-1] > self._layout.stored:
            problem = f"the chunk table {self._url(index // self._rows)} gives shard {index} {stops[-1]} bytes"
            problem = f"{problem}, the whole field has {self._layout.stored}"
            raise errors.FormatError(problem, "convert the dataset again")
        return stops - sizes, stops, row[:, 1]

    def is_cached(self, index: int) -> bool:
        """Return whether `shard` needs no request."""
        page = self._pages.get(index // self._rows)
        return page is not None and isinstance(page.outcome, np.ndarray)

    def entries(self, index: int, samples: int) -> NDArray[np.uint32]:
        """Return the table's entries for a shard that holds `samples` samples: uint32 (chunks, 2), size and checksum.

        Raises as `shard`, and `FormatError` if a size is invalid.
        """
        starts, stops, crcs = self.shard(index)
        entries = np.stack([stops - starts, crcs], axis=1).astype(np.uint32)
        used = -(-samples // self._layout.chunk)
        if np.any(entries[:used, 0] <= CRC_BYTES) or np.any(entries[used:]):
            url = self._url(index // self._rows)
            problem = f"the chunk table {url} has an invalid size for a chunk of shard {index}"
            raise errors.FormatError(problem, "convert the dataset again")
        return entries

    def read(self) -> NDArray[np.uint32]:
        """Return the whole table, uint32 (shards, chunks, 2), and check its SHA-256. Raises as `shard`."""
        pages = [reread(partial(self._load, number, count())) for number in range(self._num_pages)]
        table = np.concatenate([np.zeros((0, *self._page_shape[1:]), np.uint32), *pages])[: self._shards]
        self._check_digest(table, f"{self._store.url}/{table_path(self.name, self._manifest.generation)}")
        return table

    def _page(self, number: int) -> NDArray[np.uint32]:
        """Return a page. One thread loads it while others wait, so a damaged page is read three times in total."""
        page = self._pages.add(number, _Page(), self._page_bytes)
        loads = page.loads
        wait_for(lambda seconds: page.lock.acquire(timeout=seconds))
        try:
            if page.loads == loads and time.monotonic() >= page.expires:
                self._fill(number, page)
            outcome = page.outcome
        finally:
            page.lock.release()
        if isinstance(outcome, errors.StreamloaderError):
            raise _without_traceback(outcome)
        assert outcome is not None
        return outcome

    def _fill(self, number: int, page: _Page) -> None:
        """Load a page, or record the error. Other exceptions are not recorded, so another thread loads the page."""
        try:
            page.outcome, page.expires = reread(partial(self._load, number, count())), math.inf
        except (errors.FormatError, errors.StorageError) as error:
            page.outcome = _without_traceback(error)
            page.expires = time.monotonic() + DAMAGED_SECONDS if isinstance(error, errors.FormatError) else 0.0
        page.loads += 1

    def _load(self, number: int, reads: Iterator[int]) -> NDArray[np.uint32]:
        path, size = page_path(self.name, number, self._manifest.generation), self._page_bytes
        data = get_page(self._store, path, "chunk table", size, exact=True, fresh=next(reads) > 0)
        page = np.frombuffer(data, "<u4").astype(np.uint32).reshape(self._page_shape)
        if self._num_pages == 1:
            self._check_digest(page[: self._shards], self._url(number))
        return page

    def _check_digest(self, table: NDArray[np.uint32], url: str) -> None:
        if self._manifest.tables.get(self.name) not in (None, table_digest(table)):
            problem = f"the chunk table {url} is intact, but does not match the manifest"
            raise errors.ModifiedError(problem, REOPEN)

    def _url(self, number: int) -> str:
        return f"{self._store.url}/{page_path(self.name, number, self._manifest.generation)}"


LENGTHS = "_streamloader/lengths"
# what to do if an object is not that of the version which was opened
REOPEN = "open the dataset again if samples were erased; otherwise restore the object, or convert the dataset again"
ADD_LENGTHS = "run streamloader lengths URL, then open the dataset again"  # what to do if a field has no table
THREADS = 16
PAGES = 256  # read at once
READ_BYTES = 64 * MIB  # of the pages that are read at once, unless one page is larger


def lengths_path(name: str, shard: int) -> str:
    """Return the path of the page of a shard, relative to the dataset."""
    return f"{LENGTHS}/{name}/c/{shard}"


def lengths_of(column: Column) -> NDArray[np.int64]:
    """Return the length in bytes of each item of a variable-length column."""
    return np.fromiter(map(len, column), np.int64, len(column))


def encode_lengths(lengths: NDArray[np.integer], layout: FieldLayout) -> bytes:
    """Return the stored page of a shard with these lengths, padded with zeros. The same lengths give the same bytes."""
    page = np.zeros(layout.shard, "<u4")
    page[: len(lengths)] = lengths
    return encode_page(page)


def lengths_digest(lengths: NDArray[np.integer]) -> str:
    """Return the SHA-256 of the lengths of a shard's samples."""
    return hashlib.sha256(np.ascontiguousarray(lengths, "<u4").data).hexdigest()


def digest_of_pages(pages: Iterable[str]) -> str:
    """Return the SHA-256 of a table of lengths: that of the SHA-256s of its pages, as bytes."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, pages))).hexdigest()


class LengthTable:
    """Reads the table of lengths of one field, of the version `manifest`; thread-safe, keeps nothing."""

    def __init__(self, store: Store, manifest: Manifest, name: str) -> None:
        self._store, self._name, self._layout = store, name, manifest.fields[name]
        self._num_samples, self._sha256 = manifest.num_samples, manifest.lengths.get(name)

    def shard(self, index: int) -> NDArray[np.uint32]:
        """Return the lengths in bytes of the samples of a shard, uint32 (samples).

        Raises `MissingObjectError` or `CorruptError`, which name the page, or `StorageError`.
        """
        return reread(partial(self._load, index, count()))

    def read(self) -> NDArray[np.int64]:
        """Return the length in bytes of every sample, int64 (samples). Raises as `page_digests`."""
        lengths = np.empty(self._num_samples, np.int64)
        self.page_digests(lengths)
        return lengths

    def page_digests(self, out: NDArray[np.int64] | None = None) -> list[str]:
        """Return the SHA-256 of each page, and write all lengths to `out`, if given.

        Raises `ModifiedError` if the table does not match the manifest, `FormatError` if the lengths are not those of
        all samples together, and as `shard`.
        """
        digests = list[str]()
        for number, page in enumerate(self.pages(digests)):
            if out is not None:
                out[number * self._layout.shard :][: len(page)] = page
        return digests

    def pages(self, digests: list[str] | None = None) -> Iterator[NDArray[np.uint32]]:
        """Yield the lengths in bytes of the samples of each shard; append the SHA-256 of each to `digests`, if given.

        Raises as `page_digests`, `ModifiedError` and `FormatError` after the last one.
        """
        size, found, total = self._layout.shard, list[str]() if digests is None else digests, 0
        shards, step = range(self._layout.num_shards(self._num_samples)), max(1, min(PAGES, READ_BYTES // (4 * size)))
        for first in shards[::step]:
            for page in run_all(self.shard, shards[first : first + step], THREADS):
                found.append(lengths_digest(page))
                total += int(page.sum(dtype=np.int64))
                yield page
        self.check(found)
        if total != self._layout.nbytes:
            problem = f"the lengths in {self._store.url}/{LENGTHS}/{self._name} are {total} bytes in all"
            remedy = "copy or convert the dataset again"
            raise errors.FormatError(f"{problem}, the samples have {self._layout.nbytes}", remedy)

    def check(self, pages: Iterable[str]) -> None:
        """Raise `ModifiedError` if the SHA-256s of the pages do not match the manifest."""
        if digest_of_pages(pages) != self._sha256:
            problem = f"the table of lengths {self._store.url}/{LENGTHS}/{self._name} is intact"
            problem = f"{problem}, but does not match the manifest"
            raise errors.ModifiedError(problem, REOPEN)

    def _load(self, index: int, reads: Iterator[int]) -> NDArray[np.uint32]:
        page = np.empty(self._layout.shard, "<u4")
        read_page(self._store, lengths_path(self._name, index), "table of lengths", page, fresh=next(reads) > 0)
        return page[: self._num_samples - index * self._layout.shard].astype(np.uint32, copy=False)


def encode_page(values: NDArray[Any]) -> bytes:
    """Return the stored form of a page that is compressed. The same values give the same bytes."""
    return with_checksum(bytes(zstd.compress(values, ZSTD_LEVEL)))


def read_page(store: Store, path: str, noun: str, out: NDArray[Any], *, fresh: bool = False) -> None:
    """Read and decompress a page of a table to `out`. Raises as `get_page`."""
    limit = out.nbytes + out.nbytes // 128 + 64  # zstd adds less to data that it cannot compress
    data = get_page(store, path, noun, limit, fresh=fresh)
    try:
        decompress_exactly("zstd", data, out.view(np.uint8))
    except errors.CorruptError as error:
        raise _damaged(f"the {noun} {store.url}/{path}", error.problem) from error


def get_page(store: Store, path: str, noun: str, limit: int, *, exact: bool = False, fresh: bool = False) -> memoryview:
    """Return the bytes of a page of a table before their checksum: about `limit` at most, or exactly so many.

    `fresh`: not from a cache, since it was damaged. Raises `MissingObjectError` or `CorruptError`, which name the page,
    or `StorageError`.
    """
    where, size = f"the {noun} {store.url}/{path}", limit + CRC_BYTES
    try:
        data = store.get_fixed(path, size + 1, fresh=fresh)  # the extra byte detects a longer object
    except errors.NotFoundError as error:
        raise errors.MissingObjectError(f"{where} is missing", REOPEN) from error
    if exact and len(data) != size:
        raise _damaged(where, f"it has {len(data)} bytes, expected {size}")
    if crc32c.crc32c(data[:-CRC_BYTES]) != int.from_bytes(data[-CRC_BYTES:], "little"):
        raise _damaged(where, "its checksum does not match")
    return data[:-CRC_BYTES]


def _damaged(where: str, detail: str) -> errors.CorruptError:
    return errors.CorruptError(f"{where} is damaged: {detail}", "copy or convert the dataset again")
