"""The table of lengths of a variable-length field: the bytes of every sample, one page for each shard.

`_streamloader/lengths/<field>` is a Zarr v3 array, u4 (samples), with the codecs `bytes`, `zstd` and `crc32c`. A page
is written with its shard. An append writes the page of the last shard again with more lengths, so readers of an earlier
version, which use only the lengths of their samples, can still read it.
"""

import hashlib
from collections.abc import Iterable
from functools import partial

import crc32c
import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

from streamloader import errors
from streamloader.format.codecs import CRC_BYTES, ZSTD_LEVEL, Column, decompress_exactly, with_checksum
from streamloader.format.manifest import FieldLayout, Manifest
from streamloader.format.opening import reread
from streamloader.options import MIB
from streamloader.storage.process import run_all
from streamloader.storage.store import Store

LENGTHS = "_streamloader/lengths"
THREADS = 16
PAGES = 256  # read at once
BYTES = 64 * MIB  # of the pages that are read at once, unless one page is larger


def page_path(name: str, shard: int) -> str:
    """Return the path of the page of a shard, relative to the dataset."""
    return f"{LENGTHS}/{name}/c/{shard}"


def lengths_of(column: Column) -> NDArray[np.int64]:
    """Return the length in bytes of each item of a variable-length column."""
    return np.fromiter(map(len, column), np.int64, len(column))


def encode_page(lengths: NDArray[np.integer], layout: FieldLayout) -> bytes:
    """Return the stored page of a shard with these lengths, padded with zeros. The same lengths give the same bytes."""
    page = np.zeros(layout.shard, "<u4")
    page[: len(lengths)] = lengths
    return with_checksum(bytes(zstd.compress(page, ZSTD_LEVEL)))


def page_digest(lengths: NDArray[np.integer]) -> str:
    """Return the SHA-256 of the lengths of a shard's samples."""
    return hashlib.sha256(np.ascontiguousarray(lengths, "<u4").data).hexdigest()


def table_digest(pages: Iterable[str]) -> str:
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
        return reread(partial(self._load, index))

    def read(self) -> NDArray[np.int64]:
        """Return the length in bytes of every sample, int64 (samples). Raises as `page_digests`."""
        lengths = np.empty(self._num_samples, np.int64)
        self.page_digests(lengths)
        return lengths

    def page_digests(self, out: NDArray[np.int64] | None = None) -> list[str]:
        """Return the SHA-256 of each page, and write all lengths to `out`, if given.

        Raises `ModifiedError` if the table does not match the manifest, and as `shard`.
        """
        size, digests = self._layout.shard, list[str]()
        shards, step = range(self._layout.num_shards(self._num_samples)), max(1, min(PAGES, BYTES // (4 * size)))
        for first in shards[::step]:
            for number, page in enumerate(run_all(self.shard, shards[first : first + step], THREADS), first):
                digests.append(page_digest(page))
                if out is not None:
                    out[number * size :][: len(page)] = page
        self.check(digests)
        return digests

    def check(self, pages: Iterable[str]) -> None:
        """Raise `ModifiedError` if the SHA-256s of the pages do not match the manifest."""
        if table_digest(pages) != self._sha256:
            problem = f"the table of lengths {self._store.url}/{LENGTHS}/{self._name} is intact"
            problem = f"{problem}, but does not match the manifest"
            raise errors.ModifiedError(problem, "restore it, or convert the dataset again")

    def _load(self, index: int) -> NDArray[np.uint32]:
        path, page = page_path(self._name, index), np.empty(self._layout.shard, "<u4")
        where, remedy = f"the table of lengths {self._store.url}/{path}", "copy or convert the dataset again"
        limit = page.nbytes + page.nbytes // 128 + 64 + CRC_BYTES  # zstd adds less to data that it cannot compress
        try:
            data = memoryview(self._store.get_range(path, 0, limit + 1))  # the extra byte detects a longer object
            if crc32c.crc32c(data[:-CRC_BYTES]) != int.from_bytes(data[-CRC_BYTES:], "little"):
                raise errors.CorruptError("its checksum does not match")
            decompress_exactly("zstd", data[:-CRC_BYTES], page.view(np.uint8))
        except errors.NotFoundError as error:
            raise errors.MissingObjectError(f"{where} is missing", "convert the dataset again") from error
        except errors.CorruptError as error:
            raise errors.CorruptError(f"{where} is damaged: {error.problem}", remedy) from error
        return page[: self._num_samples - index * self._layout.shard].astype(np.uint32, copy=False)
