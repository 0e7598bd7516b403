"""The chunk table of a field, checked: every page, its entries, and the hash of all of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.after.problems import samples_text
from streamloader.conversion.after.subject import StoredField
from streamloader.errors import FormatError
from streamloader.format.codecs import CRC_BYTES
from streamloader.format.shard import ABSENT
from streamloader.format.table import open_table, table_path


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a shard that hold a sample: where each begins, its bytes, and its checksum, None where no table
    tells it.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crcs: NDArray[np.uint32] | None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def stops(self) -> NDArray[np.int64]:
        """Where each ends."""
        return self.starts + self.sizes

    def index(self, chunks: int) -> NDArray[np.uint64]:
        """Return the index of their shard, which has so many inner chunks."""
        index = np.full((chunks, 2), ABSENT, np.uint64)
        index[: len(self), 0] = self.starts
        index[: len(self), 1] = self.sizes
        return index


class TableCheck:
    """Checks a table, and then tells where the chunks of each shard are."""

    def __init__(self, field: StoredField) -> None:
        manifest = field.subject.manifest
        self._field = field
        self._sha256 = manifest.tables[field.name]
        self._table = open_table(field.subject.store, manifest, field.name)
        self._doubtful: set[int] = set()  # pages that cannot be used
        self._other = False  # the whole table is another one

    def check(self) -> None:
        """Read every page, and compare the hash of the whole table with the manifest's."""
        field, digest = self._field, hashlib.sha256()
        for page in range(field.num_pages):
            if field.subject.problems.full:
                return
            first, stop = page * field.page_shards, min((page + 1) * field.page_shards, field.num_shards)
            try:
                for shard in range(first, stop):
                    digest.update(self._entries(shard))
            except FormatError as error:
                samples = field.samples(first, stop)
                problem = f"{error.problem} ({samples_text(*samples)})"
                field.add(problem, field.page_path(page), samples=samples)
                self._doubtful.add(page)
        if not self._doubtful and digest.hexdigest() != self._sha256:
            path = table_path(field.name, field.subject.manifest.generation)
            problem = f"the chunk table {field.url(path)} is intact, but not the one that the manifest was written for"
            field.add(f"{problem}: its SHA-256 is {digest.hexdigest()}", path)
            self._other = True

    def chunks(self, shard: int) -> Chunks | None:
        """Return the chunks of a shard, by the table; None where that cannot be used."""
        if self._other or shard // self._field.page_shards in self._doubtful:
            return None
        offsets, crcs = self._table.shard(shard)
        used = self._field.chunks(shard)
        starts = offsets[:used].copy()
        for chunk, size in self._table.skips(shard):  # what earlier versions of the dataset left there
            starts[chunk:] += size
        return Chunks(starts, np.diff(offsets)[:used], crcs[:used])

    def _entries(self, shard: int) -> bytes:
        """Return a shard's rows of the table. Raises `FormatError`, also for sizes that no writer writes."""
        offsets, crcs = self._table.shard(shard)
        entries = np.stack([np.diff(offsets), crcs], axis=1).astype("<u4")
        used = self._field.chunks(shard)
        if np.any(entries[:used, 0] <= CRC_BYTES) or np.any(entries[used:]):
            where = self._field.url(self._field.page_path(shard // self._field.page_shards))
            raise FormatError(f"the chunk table {where} has a size for a chunk of shard {shard} that cannot be")
        return entries.tobytes()
