"""Erases deleted samples: writes the shards that have them again, with zeros or empty items in their place.

A receipt with the SHA-256 of the new object precedes each overwrite, so that a run that resumes can tell the shards
that are done from those that still are as the chunk table says. A CRC-32C of the object would not: it is the same for
other bytes of the same sizes, since each chunk ends with its own.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FormatError, NotFoundError, ObjectExistsError
from streamloader.format import codecs, publish, tables
from streamloader.format.codecs import Column
from streamloader.format.manifest import FieldLayout, Manifest
from streamloader.format.opening import get_document, read_object
from streamloader.format.publish import FieldReceipt, Receipt, StoredObject
from streamloader.format.reader import FieldReader
from streamloader.storage import Store
from streamloader.storage.buffers import body_crc32c
from streamloader.storage.process import run_all

THREADS = 2  # each holds the samples of a shard, and the new object
READ_THREADS = 4
BEGUN = f"{publish.APPEND}/erase.json"  # exists from before the first overwrite on

Ints = NDArray[np.int64]
Written = dict[str, dict[int, FieldReceipt]]


@dataclass(frozen=True, eq=False)
class Eraser:
    """Erases the samples `deleted`, by their numbers among the stored ones, from the shards of the version `base`.

    `check` raises an error if this run must not write any more.
    """

    store: Store
    base: Manifest
    deleted: Ints
    check: Callable[[], None]

    def run(self) -> tuple[Written, dict[str, str]]:
        """Overwrite shards and pages of lengths; return the receipts by field and shard, and the hashes of lengths.

        In a receipt `nbytes` is the number of bytes that were erased, and `lengths` the SHA-256 of the values; the etag
        of an object is its SHA-256. Raises a
        `FormatError` for a shard that is damaged, and `StorageError`.
        """
        with_lengths = self._begin()
        written: Written = {name: {} for name in self.base.fields}
        tasks = [(name, shard) for name in self.base.fields for shard in self._shards(name)]
        receipts = run_all(lambda task: self._erase(*task, with_lengths), tasks, THREADS)
        for (name, shard), receipt in zip(tasks, receipts, strict=True):
            if receipt is not None:
                written[name][shard] = receipt.fields[name]
        return written, {name: self._lengths_digest(name) for name in with_lengths}

    def verify(self, manifest: Manifest, written: Written) -> None:
        """Read the written shards by the tables of the new version.

        Raises `FormatError` if a deleted sample is not blank, or another sample is not what it was.
        """

        def check(task: tuple[str, int]) -> None:
            name, shard = task
            column, rows = self._read(manifest, name, shard)
            same = _digest(column) == written[name][shard].lengths
            if not same or not _is_blank(column, rows):
                path = manifest.fields[name].shard_key(name, shard)
                problem = f"{self.store.url}/{path} does not have the samples that were written"
                raise FormatError(problem, "stop other writers, and run the same command again")

        run_all(check, [(name, shard) for name, shards in written.items() for shard in shards], THREADS)

    def _begin(self) -> list[str]:
        """Return the fields whose tables of lengths match the manifest, or did before the first overwrite."""
        try:
            return list(read_object(self.store, BEGUN, what="a list of fields", is_valid=_has_lengths)["lengths"])
        except NotFoundError:
            pass
        names = []
        for name in self.base.lengths:
            try:
                tables.LengthTable(self.store, self.base, name).page_digests()
            except FormatError:  # the new version leaves the table out
                continue
            names.append(name)
        return names

    def _shards(self, name: str) -> list[int]:
        return list(dict.fromkeys((self.deleted // self.base.fields[name].shard).tolist()))

    def _read(self, manifest: Manifest, name: str, shard: int) -> tuple[Column, Ints]:
        """Return the samples of a shard, and which of them are deleted."""
        size = manifest.fields[name].shard
        start, stop = shard * size, min((shard + 1) * size, manifest.num_samples)
        values = FieldReader(self.store, manifest, name).read(start, stop, threads=READ_THREADS)
        low, high = np.searchsorted(self.deleted, [start, stop]).tolist()
        rows = self.deleted[low:high] - start
        if isinstance(values, np.ndarray):
            return values, rows
        return [bytes(items[i]) for _, items in values for i in range(len(items))], rows

    def _erase(self, name: str, shard: int, with_lengths: list[str]) -> Receipt | None:
        """Overwrite a shard, unless an earlier run did; return its receipt, or None if it has nothing to erase."""
        self.check()
        layout, folder = self.base.fields[name], f"{publish.APPEND}/erased/{name}"
        path = layout.shard_key(name, shard)
        receipt = self._receipt(publish.receipt_path(shard, folder))
        if receipt is None or hashlib.sha256(self.store.get(path)).hexdigest() != receipt.objects[path].etag:
            column, rows = self._read(self.base, name, shard)
            if _is_blank(column, rows) and not any(skip[0] == shard for skip in layout.skips):
                return None
            receipt, parts = _encode(layout, name, shard, column, rows)
            self.store.put(publish.receipt_path(shard, folder), receipt.to_json())
            with suppress(ObjectExistsError):
                self.store.create(BEGUN, json.dumps({"lengths": with_lengths}).encode())
            self.store.put(path, parts)
        if name in with_lengths:
            self._erase_lengths(name, shard)
        return receipt

    def _receipt(self, path: str) -> Receipt | None:
        try:
            return Receipt.from_json(get_document(self.store, path))
        except NotFoundError:
            return None

    def _erase_lengths(self, name: str, shard: int) -> None:
        layout = self.base.fields[name]
        lengths = tables.LengthTable(self.store, self.base, name).shard(shard)
        low, high = np.searchsorted(self.deleted, [shard * layout.shard, (shard + 1) * layout.shard]).tolist()
        lengths[self.deleted[low:high] - shard * layout.shard] = 0
        self.store.put(tables.lengths_path(name, shard), tables.encode_lengths(lengths, layout))

    def _lengths_digest(self, name: str) -> str:
        table, shards = tables.LengthTable(self.store, self.base, name), self.base.fields[name].num_shards
        pages = run_all(table.shard, range(shards(self.base.num_samples)), tables.THREADS)
        return tables.digest_of_pages(map(tables.lengths_digest, pages))


def _encode(layout: FieldLayout, name: str, shard: int, column: Column, rows: Ints) -> tuple[Receipt, list[Any]]:
    """Erase rows of a column; return the receipt of its shard, and the bytes of the object."""
    count, before = len(column), codecs.column_size(column)
    if isinstance(column, np.ndarray):
        column[rows] = 0
    else:
        column = list(column)
        for row in rows.tolist():
            column[row] = b""
    erased, digest = before - codecs.column_size(column), _digest(column)
    encoded = codecs.encode_shard(layout, column)
    sha256 = hashlib.sha256()
    for part in encoded.parts:
        sha256.update(part)
    stored = StoredObject(encoded.size, sha256.hexdigest(), body_crc32c(encoded.parts))
    fields = {name: FieldReceipt(erased, encoded.size, encoded.entries, digest)}
    return Receipt(shard, count, {layout.shard_key(name, shard): stored}, fields), list(encoded.parts)


def _has_lengths(document: dict[str, Any]) -> bool:
    return isinstance(document.get("lengths"), list)


def _is_blank(column: Column, rows: Ints) -> bool:
    if isinstance(column, np.ndarray):
        return not column[rows].view(np.uint8).any()
    return not any(column[row] for row in rows.tolist())


def _digest(column: Column) -> str:
    """Return the SHA-256 of the values of a column."""
    digest = hashlib.sha256()
    for item in [column] if isinstance(column, np.ndarray) else column:
        data = np.ascontiguousarray(item).view(np.uint8).data if isinstance(item, np.ndarray) else item
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
