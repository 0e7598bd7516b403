"""Deleted samples: a version leaves them out, and the shards still have them. Section 16 of SPEC.md.

Shards, tables and the table of lengths count the samples that are *stored*. A version has those that remain, and counts
these from 0: sample j of it is the j-th stored sample that is not deleted.
"""

import hashlib
from collections.abc import Iterator
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FormatError, ModifiedError
from streamloader.format.manifest import Deleted, Manifest, deleted_path
from streamloader.format.opening import reread
from streamloader.format.tables import LengthTable, encode_page, read_page
from streamloader.samples import AllBut
from streamloader.storage.store import Store

Ints = NDArray[np.int64]


# The samples of a version: the stored ones but those that it deleted.
Remaining = AllBut


def read_remaining(store: Store, manifest: Manifest) -> Remaining | None:
    """Return the samples of a version, or None if none was deleted. Reads the object of its deleted samples.

    Raises `MissingObjectError`, `CorruptError` or `ModifiedError`, which name the object, or `StorageError`.
    """
    if manifest.deleted is None:
        return None
    return Remaining(manifest.num_samples, reread(partial(_read, store, manifest, manifest.deleted, count())))


def read_lengths(store: Store, manifest: Manifest, name: str, remaining: Remaining | None) -> Ints:
    """Return the length in bytes of each sample of a version, by the table of lengths of a field.

    Raises as `LengthTable.read`.
    """
    lengths = LengthTable(store, manifest, name).read()
    return lengths if remaining is None else np.delete(lengths, remaining.excluded)


def write_deleted(store: Store, generation: int, numbers: Ints) -> Deleted:
    """Write the numbers of all samples that version `generation` leaves out, ascending; return the manifest's value."""
    values = numbers.astype("<u8")
    store.put(deleted_path(generation), encode_page(values))
    return Deleted(generation, numbers.size, hashlib.sha256(values.data).hexdigest())


def _read(store: Store, manifest: Manifest, deleted: Deleted, reads: Iterator[int]) -> Ints:
    path, numbers = deleted_path(deleted.generation), np.empty(deleted.count, "<u8")
    where, remedy = f"the list of deleted samples {store.url}/{path}", "copy or convert the dataset again"
    read_page(store, path, "list of deleted samples", numbers, fresh=next(reads) > 0)
    if hashlib.sha256(numbers.data).hexdigest() != deleted.sha256:
        raise ModifiedError(f"{where} is intact, but does not match the manifest", remedy)
    if numbers[-1] >= manifest.num_samples or np.any(numbers[1:] <= numbers[:-1]):
        raise FormatError(f"{where} does not ascend below {manifest.num_samples}", remedy)
    return numbers.astype(np.int64)
