"""Deletes samples of a finished dataset: a new version leaves them out.

The steps are those of an append, of no fields.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SelectionError, UsageError
from streamloader.format import publish
from streamloader.format.conditions import Condition, matching_samples, number_files, parse_lines
from streamloader.format.deleted import Remaining, read_remaining, write_deleted
from streamloader.format.manifest import Manifest
from streamloader.format.opening import Opened
from streamloader.maintenance.append import Addition, AppendReport, check_claim, entries, with_entry, without_rows
from streamloader.maintenance.erase import Eraser
from streamloader.options import in_range, whole_numbers
from streamloader.samples import distinct, parse_range
from streamloader.zarr.coordinates import time_labels

FORMAT = "numbers"  # of the "source" of a deletion
DELETED = "deleted"  # in the provenance

Ints = NDArray[np.int64]


def delete(
    url: str | os.PathLike[str],
    *,
    where: str | None = None,
    ids: Any = None,
    version: int | None = None,
    erase: bool = False,
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> AppendReport:
    """Delete samples of the finished dataset at `url`, or of one `split` of it: a new version leaves them out.

    `where` is a condition on fields, as `where=` of `StreamingDataset` takes. `ids` are sample numbers of the current
    version, or the path or URL of a file, or of a folder of `*.jsonl`, of them as `exclude=` takes. The samples that
    remain are numbered from 0. So give the `version` that the numbers are of: then they are an error in a later one,
    in which other samples have them. Nothing is published if no sample matches `where`; the report has how many were
    `deleted`. Their bytes stay in the shards, for earlier versions. Readers see the earlier version until the deletion
    is published, and those that opened it keep reading it. To resume an interrupted deletion, repeat the call.

    `erase` overwrites the bytes of all deleted samples, also of earlier deletions (then `where` and `ids` may be left
    out), reads the shards again to verify it, and removes all earlier versions. End what reads the dataset before: it
    goes on with the samples that it holds in memory, also with erased ones, and gets a `ModifiedError` for the shards
    that had such samples, or a `MissingObjectError` for the tables of an earlier version.

    Raises `SelectionError` for an invalid condition, and for numbers that are invalid or of another version;
    `UsageError` for other arguments and if no sample would remain; `DestinationError` if an append or a deletion is in
    progress or was published in the meantime; the errors of `open`; and `StorageError`.
    """
    if (where is not None and ids is not None) or (not erase and where is ids is None):
        raise UsageError("delete takes where= or ids=", "give one of them")
    common = without_rows(url, split, storage_options, FORMAT)
    return _Delete(*common, _Chosen(where, ids, split, common[1], version), erase).run()


@dataclass(frozen=True, eq=False)
class _Chosen:
    """The samples to delete, as they were given: a condition, or numbers or their files."""

    where: str | None
    ids: Any
    split: str | None
    opened: Opened
    version: int | None

    @cached_property
    def _files(self) -> list[tuple[str, bytes]]:
        """The names and the contents of the files of sample numbers."""
        return list(number_files(self.opened.store, self.ids, "ids"))

    @cached_property
    def _given(self) -> NDArray[Any]:
        """The numbers that were given. Raises `SelectionError`."""
        return whole_numbers(self.ids, "ids")

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of what was given. It does not depend on the version, so that a published deletion is known."""
        parts = [(self.where or "").encode()]
        if isinstance(self.ids, str | os.PathLike):
            parts = [data for _, data in self._files]
        elif self.ids is not None:
            parts = [np.sort(self._given).astype(np.int64).tobytes()]
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def samples(self, remaining: Remaining | None) -> Ints:
        """Return the samples to delete, by their ascending numbers in the opened version. Raises `SelectionError`."""
        manifest, store, _ = self.opened
        count, current = manifest.num_remaining, manifest.generation
        if self.version not in (None, current):
            problem = f"ids= of version {self.version}: {store.url} is version {current} by now"
            remedy = "see streamloader log; if it was not this deletion, find the samples again, or delete by where="
            raise SelectionError(problem, remedy)
        if self.where is self.ids is None:
            return np.zeros(0, np.int64)
        if self.where is not None:
            if parse_range(self.where) is not None:
                remedy = "write a condition on a field, or name a file of the numbers with ids= (--ids)"
                raise SelectionError(f"where={self.where!r} is a range of samples", remedy)
            condition, times = Condition.parse(self.where), time_labels(manifest)
            return matching_samples(condition, store, manifest, remaining, times=times)
        if isinstance(self.ids, str | os.PathLike):
            own = {"split": self.split, "source": store.url}
            return distinct(np.concatenate([parse_lines(data, name, count, own, "ids") for name, data in self._files]))
        return distinct(in_range(self._given, count, "ids"))


@dataclass(frozen=True, eq=False)
class _Delete(Addition):
    """A deletion, which adds no rows and no fields."""

    chosen: _Chosen
    erase: bool

    @cached_property
    def _remaining(self) -> Remaining | None:
        """The samples that remain before the deletion, None if all do."""
        return read_remaining(self.opened.store, self.opened.manifest)

    @cached_property
    def _samples(self) -> Ints:
        """The samples to delete, by their numbers in the opened version."""
        return self.chosen.samples(self._remaining)

    @cached_property
    def _stored(self) -> Ints:
        """All samples that the new version leaves out, by their numbers among the stored ones."""
        if self._remaining is None:
            return self._samples
        return np.union1d(self._remaining.excluded, self._remaining[self._samples])

    @cached_property
    def details(self) -> Mapping[str, Any]:
        """What was given."""
        chosen = self.chosen
        given = {"by": "delete", "where": chosen.where, "ids": chosen.digest, "erase": self.erase}
        return given | ({} if chosen.version is None else {"version": chosen.version})

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the old manifest, with the condition and the number of deleted samples."""
        where = {"where": self.chosen.where} if self.chosen.where is not None else {}
        entry = {"num_samples": self._samples.size, "digest": self.chosen.digest, **where}
        if self.erase:
            entry |= {"erased": self._stored.size, "generation": self.opened.manifest.generation + 1}
        return with_entry(self.opened.manifest.provenance, DELETED, entry)

    @property
    def adds(self) -> bool:
        """Whether there are samples to delete, or to erase."""
        return bool(self._stored.size if self.erase else self._samples.size)

    def plan(self) -> Callable[[], publish.Extension]:
        """Check that samples remain; return a function that plans to write nothing."""
        base, count = self.opened.manifest, self._samples.size
        if count and count == base.num_remaining:
            problem = f"all {count} samples of {self.opened.store.url} would be deleted"
            raise UsageError(problem, "delete fewer, or the objects of the dataset")
        return partial(publish.nothing_new, base)

    def finish(self, extension: publish.Extension, receipts: publish.Receipts) -> Manifest:
        """Write the list of deleted samples, and the tables of all fields; first overwrite shards if `erase`."""
        base, store = self.opened.manifest, self.opened.store
        base = replace(base, deleted=write_deleted(store, base.generation + 1, self._stored))
        if self.erase:
            eraser = Eraser(store, self.opened.manifest, self._stored, partial(check_claim, store, self.claim))
            written, lengths = eraser.run()
            manifest = publish.finish_erased(store, base, written, lengths, self.provenance)
            eraser.verify(manifest, written)
            return manifest
        return publish.finish_fields(store, base, extension, receipts, self.provenance)

    def report(self, manifest: Manifest) -> AppendReport:
        """Return the report of the deletion that made this manifest."""
        entry = manifest.provenance[DELETED][-1]
        count, erased = int(entry["num_samples"]), int(entry.get("erased", 0))
        before = manifest.num_remaining + count
        return AppendReport(self.opened.store.url, self.format, manifest, before, deleted=count, erased=erased)


def erased_by(manifest: Manifest) -> tuple[int, int]:
    """Return how many samples a version that erased bytes deleted, and of how many it erased them, 0 of any other."""
    last: dict[str, Any] = next(reversed(entries(manifest.provenance, DELETED)), {})
    erased = int(last.get("erased", 0)) if last.get("generation") == manifest.generation else 0
    return (int(last["num_samples"]), erased) if erased else (0, 0)
