"""Writes samples as a dataset, with parallel uploads and bounded memory: `Writer`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError, StorageError, UsageError
from streamloader.format.codecs import Column
from streamloader.format.geometry import Geometry, Schema
from streamloader.format.manifest import Field, Manifest, check_name
from streamloader.format.publish import Receipt, begin, erase, finish, job_document, write_shard
from streamloader.format.values import check_names, row_bytes, to_columns, to_value
from streamloader.format.video import index_columns, unindexed, with_index
from streamloader.options import MIB, Layout, whole
from streamloader.storage import Store, open_store
from streamloader.storage.process import SIGNAL_SECONDS, cpu_count, in_thread, result_of, wait_for


class RowBuffer:
    """Collects the samples of a shard. The operating system provides the reserved memory only as rows are written.

    With `lists`, every column is a list, which may hold any values.
    """

    def __init__(self, fields: Mapping[str, Field], capacity: int, lists: bool = False) -> None:
        self._capacity = capacity
        self._count = 0
        fixed = [(name, field) for name, field in fields.items() if field.fixed and not lists]
        self._arrays = {name: np.empty((capacity, *field.shape), field.dtype) for name, field in fixed}
        self._lists: dict[str, list[bytes]] = {name: [] for name in fields if name not in self._arrays}
        self.list_bytes = 0  # of the texts and bytes in lists, whose sizes the fields do not tell

    def __len__(self) -> int:
        return self._count

    def add(self, values: Mapping[str, NDArray[Any] | bytes]) -> None:
        """Copy one sample."""
        self._reserve(1)
        for name, array in self._arrays.items():
            array[self._count] = values[name]
        for name, items in self._lists.items():
            items.append(values[name])  # type: ignore[arg-type]
            self.list_bytes += _size(values[name])
        self._count += 1

    def extend(self, columns: Mapping[str, Column], start: int, stop: int) -> None:
        """Copy the samples [start, stop) of the columns."""
        self._reserve(stop - start)
        for name, array in self._arrays.items():
            array[self._count : self._count + stop - start] = columns[name][start:stop]
        for name, items in self._lists.items():
            items.extend(columns[name][start:stop])
            self.list_bytes += sum(map(_size, items[self._count :]))
        self._count += stop - start

    def columns(self) -> dict[str, Column]:
        """Return the samples as columns; arrays are views."""
        columns: dict[str, Column] = {name: array[: self._count] for name, array in self._arrays.items()}
        return columns | self._lists

    def _reserve(self, rows: int) -> None:
        if self._count + rows <= self._capacity:
            return
        self._capacity = max(2 * self._capacity, self._count + rows)
        for name, old in self._arrays.items():
            self._arrays[name] = np.empty((self._capacity, *old.shape[1:]), old.dtype)
            self._arrays[name][: self._count] = old[: self._count]


def _size(value: Any) -> int:
    return len(value) if isinstance(value, bytes | str) else getattr(value, "nbytes", 0)


class Uploads:
    """Encodes and uploads shards in threads; at most `workers` shards are in progress."""

    def __init__(self, store: Store, workers: int) -> None:
        self._store, self._workers = store, workers
        self._shards: list[Future[Receipt]] = []
        self._running: list[Future[Receipt]] = []  # and those that failed

    def check(self) -> None:
        """Raise the error of a failed upload."""
        for future in [future for future in self._running if future.done()]:
            result_of(future)
            self._running.remove(future)

    def submit(self, geometry: Geometry, columns: dict[str, Column]) -> None:
        """Submit the next shard. Waits until a worker is free."""
        self.check()
        while len(self._running) >= self._workers:
            wait(self._running, SIGNAL_SECONDS, FIRST_COMPLETED)
            self.check()
        number = len(self._shards)
        work = partial(write_shard, self._store, geometry, number, columns)
        self._shards.append(in_thread(work, f"streamloader-write-{number}"))
        self._running.append(self._shards[-1])

    def join(self) -> None:
        """Wait for all shards."""
        wait_for(lambda seconds: not wait(self._running, seconds).not_done)

    def receipts(self) -> dict[int, Receipt]:
        """Return the receipts of all shards, which have been uploaded."""
        return {number: future.result() for number, future in enumerate(self._shards)}


PROBE_BYTES = 16 * MIB  # decoded bytes of the first samples, which determine codecs and sizes


class Writer:
    """Writes samples as a dataset, which can be opened once the writer is closed.

        with Writer("s3://bucket/data", {"image": "bytes:jpeg", "label": "int64"}) as out:
            out.write({"image": data, "label": 3})

    `workers` threads (default: one per CPU core) encode and upload shards. At most `workers + 1` shards are in memory;
    `write` waits while all workers are busy. An exception in the `with` block removes what was written. If you know the
    number of samples, pass `num_samples`: a small dataset then gets smaller shards and blocks. `provenance` are JSON
    values that are stored in the manifest. Not thread-safe.

    Raises `UsageError` and `FieldError` for invalid arguments, `DestinationError` if there is a dataset and `overwrite`
    is False, and `StorageError`. `write` and `close` also raise the errors of earlier uploads.
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
            raise FieldError("a dataset needs at least one field", "name at least one")
        for name in fields:
            check_name(name)
        workers = None if workers is None else whole("workers", workers)
        num_samples = None if num_samples is None else whole("num_samples", num_samples, 0)
        try:
            json.dumps(dict(provenance or {}), allow_nan=False)  # fail now, not after everything is written
        except (TypeError, ValueError) as error:
            raise UsageError(f"provenance is not JSON ({error})", "give text, finite numbers, lists, dicts") from error
        self._given = {name: Field.parse(spec) for name, spec in fields.items()}
        self._fields, self._videos = with_index(self._given), unindexed(self._given)
        self._layout = layout or Layout()
        self._declared = num_samples
        self._provenance = dict(provenance or {})
        self._geometry: Geometry | None = None
        self._manifest: Manifest | None = None
        self._closed = False
        self._count = 0
        self._probed = 0
        self._rows = RowBuffer(self._fields, 64)
        self._store = open_store(url, storage_options)
        self._claim = begin(self._store, job_document("writer", self._fields), overwrite)
        self._uploads = Uploads(self._store, workers or cpu_count())

    @property
    def fields(self) -> dict[str, Field]:
        """The fields, by name, with those that are made for videos."""
        return dict(self._fields)

    def __len__(self) -> int:
        """Return the number of samples written so far."""
        return self._count

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample, with a value for each field. An invalid sample raises `FieldError` and is not added."""
        check_names(self._given, sample, f"sample {self._count}")
        values = {name: to_value(name, field, sample[name], self._count) for name, field in self._given.items()}
        self._add({n: v[None] if isinstance(v, np.ndarray) else [v] for n, v in values.items()}, 1)

    def write_batch(self, columns: Mapping[str, Any]) -> None:
        """Add a batch of samples: for each field an array (samples, *shape) or a list of values.

        An invalid batch raises `FieldError`, and none of its samples is added.
        """
        count, checked = to_columns(self._given, columns, self._count)
        self._add(checked, count)

    def close(self) -> Manifest:
        """Write the last shard, publish the dataset and return its manifest, also when called again.

        An error removes what was written, as `abort` does.
        """
        if self._manifest is not None:
            return self._manifest
        self._check_open(0)
        try:
            if self._declared not in (None, self._count):
                problem = f"{self._count} samples were written, num_samples={self._declared}"
                raise UsageError(problem, "give the number of samples that you write, or none")
            geometry = self._geometry or self._choose_geometry()
            if len(self._rows):
                self._submit_shard()
            self._closed = True
            self._uploads.join()
            self._uploads.check()
            self._manifest = finish(self._store, geometry, self._uploads.receipts(), self._provenance, self._claim)
            self._claim.close()
        except BaseException:
            self.abort()
            raise
        return self._manifest

    def abort(self) -> None:
        """End the threads and remove what was written.

        Does nothing after `close`, and removes nothing if another run took over the destination.
        """
        if self._manifest is not None:
            return
        self._closed = True
        self._uploads.join()
        with closing(self._claim):
            if self._claim.held():
                erase(self._store)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.abort()
        except StorageError as problem:  # the first error is raised
            error.add_note(f"what was written could not be removed: {problem}")

    def _add(self, columns: Mapping[str, Column], count: int) -> None:
        """Add checked samples: the first ones determine the geometry, and full shards are submitted."""
        self._check_open(count)
        start = 0
        for name in self._videos:
            columns = {**columns, **index_columns(name, columns[name], range(self._count, self._count + count))}
        if self._geometry is None:
            sums = self._probed + np.cumsum(row_bytes(self._fields, columns))
            start = min(int(np.searchsorted(sums, PROBE_BYTES)) + 1, count)
            self._rows.extend(columns, 0, start)
            self._probed = int(sums[start - 1]) if start else self._probed
            if self._probed >= PROBE_BYTES:
                self._choose_geometry()
        if self._geometry is not None:
            self._fill(self._geometry, columns, start, count)
        self._count += count

    def _check_open(self, count: int) -> None:
        """Raise `UsageError` if `count` more samples cannot be written, or the error of an earlier upload."""
        if self._closed:
            raise UsageError(f"the writer of {self._store.url} is closed", "make a new one")
        if self._declared is not None and self._count + count > self._declared:
            problem = f"sample {self._declared} exceeds num_samples={self._declared}"
            raise UsageError(problem, "give the number of samples that you write, or none")
        self._uploads.check()

    def _choose_geometry(self) -> Geometry:
        """Choose codecs and geometry from the first samples, and move them into shards."""
        probe = self._rows.columns()
        schema = Schema.measure(self._fields, probe, self._layout.codec)
        self._geometry = schema.geometry(self._declared, self._layout)
        rows = len(self._rows)
        self._rows = RowBuffer(self._fields, self._geometry.samples_per_shard)
        self._fill(self._geometry, probe, 0, rows)
        return self._geometry

    def _fill(self, geometry: Geometry, columns: Mapping[str, Column], start: int, stop: int) -> None:
        """Add the samples [start, stop) of the columns, and submit each full shard."""
        while start < stop:
            end = min(stop, start + geometry.samples_per_shard - len(self._rows))
            self._rows.extend(columns, start, end)
            start = end
            if len(self._rows) == geometry.samples_per_shard:
                self._submit_shard()

    def _submit_shard(self) -> None:
        assert self._geometry is not None
        self._uploads.submit(self._geometry, self._rows.columns())
        self._rows = RowBuffer(self._fields, self._geometry.samples_per_shard)
