"""`Writer`: samples in, a dataset out, in parallel and with bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from streamloader.errors import FieldError, StorageError, UsageError
from streamloader.format.codecs import measure_codec
from streamloader.format.destination import erase, prepare, write_job
from streamloader.format.geometry import Geometry, choose_layouts
from streamloader.format.manifest import Field, Manifest, check_name
from streamloader.format.rows import Rows
from streamloader.format.sink import finish
from streamloader.format.threads import cpu_count
from streamloader.format.uploads import Uploads
from streamloader.format.values import check_names, column_size, row_bytes, to_columns, to_value
from streamloader.options import MIB, Layout
from streamloader.storage import open_store

PROBE_BYTES = 16 * MIB  # decoded bytes of the first samples, from which codecs and sizes are chosen


class Writer:
    """Writes a dataset; nothing can be opened until it is closed cleanly.

        with Writer("s3://bucket/data", {"image": "bytes:jpeg", "label": "int64"}) as out:
            out.write({"image": data, "label": 3})

    `workers` threads encode and upload; at most `workers + 1` shards are in memory, and `write` waits when they
    are all busy. An exception in the `with` block removes what was written. `num_samples`, where it is known,
    must be right: it lets a small dataset be cut finer. Not thread-safe: one writer, one thread.

    Raises `FieldError` for fields or values that do not fit, `DestinationError` where there is a dataset and
    not `overwrite`, `StorageError` (also of an earlier shard's upload) from `write` and `close`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        fields: Mapping[str, str | Field],
        *,
        layout: Layout | None = None,
        num_samples: int | None = None,
        workers: int | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        if not fields:
            raise FieldError("a dataset without fields", "name at least one")
        for name in fields:
            check_name(name)
        if (workers is not None and workers < 1) or (num_samples is not None and num_samples < 0):
            raise UsageError(f"workers={workers}, num_samples={num_samples}", "give at least 1 worker and 0 samples")
        try:
            json.dumps(dict(provenance or {}), allow_nan=False)  # said now, not when everything is written
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"provenance is not JSON ({error})", "give text, finite numbers, lists and dicts"
            ) from error
        self._fields = {name: Field.parse(spec) for name, spec in fields.items()}
        self._layout = layout or Layout()
        self._declared = num_samples
        self._provenance = dict(provenance or {})
        self._geometry: Geometry | None = None
        self._manifest: Manifest | None = None
        self._closed = False
        self._count = 0
        self._probed = 0
        self._rows = Rows(self._fields, 64)
        self._store = open_store(url, storage_options)
        self._claim = write_job(self._store, "writer", self._fields, claim=prepare(self._store, overwrite))
        self._uploads = Uploads(self._store, workers or cpu_count())

    @property
    def fields(self) -> dict[str, Field]:
        """The fields, by name."""
        return dict(self._fields)

    def __len__(self) -> int:
        """Return the number of samples that were written so far."""
        return self._count

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample. One that does not fit raises `FieldError` and is not added."""
        self._check_open(1)
        check_names(self._fields, sample, f"sample {self._count}")
        values = {name: to_value(name, field, sample[name], self._count) for name, field in self._fields.items()}
        self._rows.add(values)
        self._count += 1
        if self._geometry is None:
            self._probed += sum(
                value.nbytes if isinstance(value, np.ndarray) else len(value) for value in values.values()
            )
            if self._probed >= PROBE_BYTES:
                self._decide()
        elif self._rows.full:
            self._cut()

    def write_batch(self, columns: Mapping[str, Any]) -> None:
        """Add a batch: for each field one array (samples, *shape), or one list of values."""
        count, checked = to_columns(self._fields, columns, self._count)
        self._check_open(count)
        at = 0
        if self._geometry is None:
            sums = self._probed + np.cumsum(row_bytes(self._fields, checked))
            at = min(int(np.searchsorted(sums, PROBE_BYTES)) + 1, count)
            self._rows.extend(checked, 0, at)
            self._probed = int(sums[at - 1]) if at else self._probed
            if self._probed >= PROBE_BYTES:
                self._decide()
        while at < count:
            stop = min(count, at + self._rows.room)
            self._rows.extend(checked, at, stop)
            at = stop
            if self._rows.full:
                self._cut()
        self._count += count

    def close(self) -> Manifest:
        """Write the last shard and publish the dataset; a second call returns the same manifest.

        A failure removes what was written, as `abort` does.
        """
        if self._manifest is not None:
            return self._manifest
        self._check_open(0)
        try:
            if self._declared not in (None, self._count):
                problem = f"{self._count} samples were written, num_samples={self._declared}"
                raise UsageError(problem, "give the number that is written, or none")
            geometry = self._decide() if self._geometry is None else self._geometry
            if len(self._rows):
                self._cut()
            self._closed = True
            receipts = self._uploads.join()
            workers = self._uploads.workers
            self._manifest = finish(self._store, geometry, receipts, self._provenance, workers, claim=self._claim)
            self._claim.close()
        except BaseException:
            self.abort()
            raise
        return self._manifest

    def abort(self) -> None:
        """End the threads and remove what was written. Does nothing to a dataset that is closed already, or that
        another writer took over.
        """
        if self._manifest is not None:
            return
        self._closed = True
        self._uploads.stop()
        with self._claim:
            if self._claim.held():
                erase(self._store)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.abort()
        except StorageError as problem:  # the first error is the one to hear of
            error.add_note(f"what was written could not be removed: {problem}")

    def _check_open(self, more: int) -> None:
        if self._closed:
            raise UsageError(f"the writer of {self._store.url} is closed", "make a new one")
        if self._declared is not None and self._count + more > self._declared:
            raise UsageError(
                f"sample {self._declared} of num_samples={self._declared}", "give the right number, or none"
            )
        self._uploads.check()

    def _decide(self) -> Geometry:
        """Choose codecs and geometry from the first samples, and go on in shards."""
        probe = self._rows.columns()
        codecs, sizes = {}, {}
        for name, field in self._fields.items():
            codecs[name], sizes[name] = measure_codec(self._layout.codec, field, probe[name])
        decoded = {name: column_size(column) / max(1, len(column)) for name, column in probe.items()}
        self._geometry = choose_layouts(self._fields, sizes, codecs, self._declared, self._layout, decoded=decoded)
        rows = len(self._rows)
        self._rows = Rows(self._fields, self._geometry.samples_per_shard, fixed=True)
        for start in range(0, rows, self._geometry.samples_per_shard):
            self._rows.extend(probe, start, min(rows, start + self._geometry.samples_per_shard))
            if self._rows.full:
                self._cut()
        return self._geometry

    def _cut(self) -> None:
        assert self._geometry is not None
        self._uploads.submit(self._geometry, self._rows.columns())
        self._rows = Rows(self._fields, self._geometry.samples_per_shard, fixed=True)
