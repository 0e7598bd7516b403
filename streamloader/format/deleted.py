"""Deleted samples: a version leaves them out, and the shards still have them. Section 16 of SPEC.md.

Shards, tables and the table of lengths count the samples that are *stored*. A version has those that remain, and counts
these from 0: sample j of it is the j-th stored sample that is not deleted.
"""

import hashlib
from bisect import bisect_left
from functools import partial

import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

from streamloader.errors import CorruptError, FormatError, ModifiedError
from streamloader.format.codecs import ZSTD_LEVEL, decompress_exactly, with_checksum
from streamloader.format.manifest import Deleted, Manifest, deleted_path
from streamloader.format.opening import reread
from streamloader.format.tables import LengthTable, get_page
from streamloader.storage.store import Store

Ints = NDArray[np.int64]


class Remaining:
    """The samples of a version that remain of `num_stored`, without those in `deleted`, ascending and distinct.

    It takes 8 bytes for each deleted sample.
    """

    def __init__(self, num_stored: int, deleted: Ints) -> None:
        self.num_stored = num_stored
        self._before = deleted - np.arange(deleted.size)  # the number of remaining samples before each deleted one

    def __len__(self) -> int:
        return self.num_stored - self._before.size

    @property
    def deleted(self) -> Ints:
        """The deleted samples, by their numbers among the stored ones."""
        return self._before + np.arange(self._before.size)

    def stored(self, samples: Ints) -> Ints:
        """Return the numbers among the stored samples of these samples of the version."""
        return samples + np.searchsorted(self._before, samples, side="right")

    def count(self, start: int, stop: int) -> tuple[int, int]:
        """Return which samples of the version, as [first, stop), are among the stored ones [start, stop)."""
        return start - self._deleted_before(start), stop - self._deleted_before(stop)

    def find(self, stored: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the samples of the version among these stored ones, ascending, and which of these remain."""
        deleted = np.append(self.deleted, -1)
        before = np.searchsorted(deleted[:-1], stored)
        left = deleted[before] != stored
        return (stored - before)[left], left

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return self._before.nbytes

    def _deleted_before(self, stored: int) -> int:
        """Return the number of deleted samples before a stored one."""
        return bisect_left(range(self._before.size), stored, key=lambda index: int(self._before[index]) + index)


def read_remaining(store: Store, manifest: Manifest) -> Remaining | None:
    """Return the samples of a version, or None if none was deleted. Reads the object of its deleted samples.

    Raises `MissingObjectError`, `CorruptError` or `ModifiedError`, which name the object, or `StorageError`.
    """
    if manifest.deleted is None:
        return None
    return Remaining(manifest.num_samples, reread(partial(_read, store, manifest, manifest.deleted)))


def read_lengths(store: Store, manifest: Manifest, name: str, remaining: Remaining | None) -> Ints:
    """Return the length in bytes of each sample of a version, by the table of lengths of a field.

    Raises as `LengthTable.read`.
    """
    lengths = LengthTable(store, manifest, name).read()
    return lengths if remaining is None else np.delete(lengths, remaining.deleted)


def write_deleted(store: Store, generation: int, numbers: Ints) -> Deleted:
    """Write the numbers of all samples that version `generation` leaves out, ascending; return the manifest's value."""
    data = numbers.astype("<u8").tobytes()
    store.put(deleted_path(generation), with_checksum(bytes(zstd.compress(data, ZSTD_LEVEL))))
    return Deleted(generation, numbers.size, hashlib.sha256(data).hexdigest())


def _read(store: Store, manifest: Manifest, deleted: Deleted) -> Ints:
    path, numbers = deleted_path(deleted.generation), np.empty(deleted.count, "<u8")
    where, remedy = f"the list of deleted samples {store.url}/{path}", "copy or convert the dataset again"
    data = get_page(store, path, "list of deleted samples", numbers.nbytes + numbers.nbytes // 128 + 64)
    try:
        decompress_exactly("zstd", data, numbers.view(np.uint8))
    except CorruptError as error:
        raise CorruptError(f"{where} is damaged: {error.problem}", remedy) from error
    if hashlib.sha256(numbers.data).hexdigest() != deleted.sha256:
        raise ModifiedError(f"{where} is intact, but does not match the manifest", remedy)
    if numbers[-1] >= manifest.num_samples or np.any(numbers[1:] <= numbers[:-1]):
        raise FormatError(f"{where} does not ascend below {manifest.num_samples}", remedy)
    return numbers.astype(np.int64)
