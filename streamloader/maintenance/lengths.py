"""Adds the tables of lengths that a finished dataset lacks, as a new version: earlier releases wrote none.

The steps are those of an append, of no samples. The length of each item stands before it in its chunk, so every chunk
of the fields is read, and its checksum compared, once.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion import job
from streamloader.format import publish, tables
from streamloader.format.manifest import Manifest
from streamloader.format.publish import APPEND, FieldReceipt, Receipt, StoredObject
from streamloader.format.reader import COLUMN_REQUEST, FieldReader, Run
from streamloader.maintenance.append import LENGTHS, Addition, AppendReport, check_claim, with_entry, without_rows
from streamloader.storage.process import run_all

FORMAT = "streamloader"
ADDED = "lengths_added"  # in the provenance
SHARDS = 4  # that are read at the same time
THREADS = 4  # for each of them; each holds the bytes of a request, and a decoded chunk


def add_lengths(
    url: str | os.PathLike[str],
    *,
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: job.Listener | None = None,
) -> AppendReport:
    """Add the tables of lengths of all variable-length fields that have none, as a new version.

    The dataset is the finished one at `url`, or one `split` of it. Its samples, their order and all other objects stay.
    Reads every chunk of these fields once, and nothing else. To resume an interrupted call, repeat it: shards that are
    done are not read again. The report has the `fields`; there are none, and no new version, if no table is missing.

    Raises `DestinationError` if an append is in progress or was published in the meantime, `FormatError` for a damaged
    chunk, the errors of `open`, and `StorageError`.
    """
    return _Lengths(*without_rows(url, split, storage_options, FORMAT, progress or job.ignore)).run()


@dataclass(frozen=True, eq=False)
class _Lengths(Addition):
    """An addition of tables of lengths."""

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """The fields that get a table."""
        base = self.opened.manifest
        lacking = [name for name, layout in base.fields.items() if layout.can_have_lengths and name not in base.lengths]
        return tuple(lacking) if base.num_samples else ()

    @cached_property
    def details(self) -> Mapping[str, Any]:
        """What the claim is for; not the fields, so that an addition that was published is known by it."""
        return {"by": LENGTHS}

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the old manifest, with the fields."""
        base = self.opened.manifest
        return with_entry(base.provenance, ADDED, {"fields": list(self._names), "generation": base.generation + 1})

    @property
    def adds(self) -> bool:
        """Whether a table is missing."""
        return bool(self._names)

    def plan(self) -> Callable[[], publish.Extension]:
        """Return a function that plans to write no shard."""
        return partial(publish.nothing_new, self.opened.manifest)

    def finish(self, extension: publish.Extension, _receipts: publish.Receipts) -> Manifest:
        """Write the pages that are missing, then copies of the chunk tables; return a manifest with the same order."""
        base, pages = self.opened.manifest, self._write_pages()
        digests = {
            name: tables.digest_of_pages(receipt.fields[name].lengths for _, receipt in sorted(pages.items()))
            for name in self._names
        }
        with_lengths = replace(base, lengths={**base.lengths, **digests})
        manifest = publish.finish_fields(self.opened.store, with_lengths, extension, {}, self.provenance)
        return replace(manifest, order=base.order)

    def _write_pages(self) -> dict[int, Receipt]:
        """Write the pages of all shards, except those that an earlier run wrote; return the receipts of all."""
        store, base = self.opened.store, self.opened.manifest
        readers = {name: FieldReader(store, base, name) for name in self._names}
        shards = range(-(-base.num_samples // base.samples_per_shard))
        receipts = self.kept_receipts(shards)
        kept = sum(receipt.num_samples for receipt in receipts.values())
        count = job.counter(job.Progress("write", kept, base.num_samples, kept=kept), self.run_options.listener)

        def write(shard: int) -> Receipt:
            receipt = self._write_shard(readers, shard)
            count(receipt.num_samples)
            return receipt

        missing = [shard for shard in shards if shard not in receipts]
        receipts |= dict(zip(missing, run_all(write, missing, SHARDS), strict=True))
        check_claim(store, self.claim)
        return receipts

    def _write_shard(self, readers: Mapping[str, FieldReader], shard: int) -> Receipt:
        """Write the pages of a shard, then their receipt. Raises `DestinationError` if the claim is lost."""
        store, base = self.opened.store, self.opened.manifest
        start, stop = shard * base.samples_per_shard, min((shard + 1) * base.samples_per_shard, base.num_samples)
        lengths = {name: _read_lengths(reader, start, stop) for name, reader in readers.items()}
        check_claim(store, self.claim)
        objects, fields = {}, {}
        for name, page in lengths.items():
            info = store.put(tables.lengths_path(name, shard), tables.encode_lengths(page, base.fields[name]))
            objects[info.path] = StoredObject(info.size, info.etag, 0)
            fields[name] = FieldReceipt(0, 0, np.zeros((0, 2), np.uint32), tables.lengths_digest(page))
        receipt = Receipt(shard, stop - start, objects, fields)
        store.put(publish.receipt_path(shard, APPEND), receipt.to_json())
        return receipt

    def report(self, manifest: Manifest) -> AppendReport:
        """Return the report of the addition that made this manifest."""
        names, count = tuple(manifest.provenance[ADDED][-1]["fields"]), manifest.num_remaining
        return AppendReport(self.opened.store.url, self.format, manifest, count, fields=names)


def _read_lengths(reader: FieldReader, start: int, stop: int) -> NDArray[np.int64]:
    """Return the length in bytes of the stored samples [start, stop). Raises as `FieldReader.read`."""

    def lengths(run: Run) -> NDArray[np.int64]:
        chunks = reader.load(run, reader.request(run)) or []
        return np.concatenate([items.stops - items.starts for _, items in chunks])[: run.num_samples]

    return np.concatenate(run_all(lengths, reader.runs(start, stop, COLUMN_REQUEST), THREADS))
