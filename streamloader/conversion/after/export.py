"""Export of a dataset to files of another format: sample for sample, in order, piece by piece."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streamloader.conversion.after.exports import npz, parquet, webdataset, zarr
from streamloader.conversion.after.exports.base import Exporter, Piece, Task
from streamloader.conversion.after.stored import StoredColumns
from streamloader.errors import DestinationError, FieldError, UsageError
from streamloader.format.manifest import FieldLayout, Manifest
from streamloader.format.opening import open_root
from streamloader.format.threads import run_all
from streamloader.options import MIB
from streamloader.storage import open_store
from streamloader.storage.location import parse_location
from streamloader.storage.protocol import Store

THREADS = 2  # one piece is read while another is written: both are in memory, and the file of one
# of a file: shards are mostly between the two
FEW_BYTES = 64 * MIB
MOST_BYTES = 128 * MIB


@dataclass(frozen=True)
class ExportFormat:
    """`plan` says whether the fields can be held, and how; `overhead` are the bytes of a value beside its data."""

    plan: Callable[[Task], Exporter]
    overhead: int


FORMATS: Mapping[str, ExportFormat] = {
    "webdataset": ExportFormat(webdataset.plan, webdataset.OVERHEAD),
    "parquet": ExportFormat(parquet.plan, parquet.OVERHEAD),
    "npz": ExportFormat(npz.plan, npz.OVERHEAD),
    "zarr": ExportFormat(zarr.plan, zarr.OVERHEAD),
}


@dataclass(frozen=True)
class Exported:
    """Where an export stands: `done` of `total` samples, `bytes` written in `files`."""

    url: str
    done: int
    total: int
    files: int
    bytes: int


def export(
    url: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str,  # noqa: A002 - as the command's option is called
    fields: Iterable[str] | None = None,
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    progress: Callable[[Exported], None] | None = None,
) -> Exported:
    """Write the samples of the dataset at `url`, or of one split of it, into the empty folder or URL `dst`.

    `format` is one of `FORMATS`; `fields` chooses some. Each piece of the dataset, about a shard, becomes files that
    appear whole; what a killed export leaves is to be removed by hand. `target_options` default to `storage_options`
    where both URLs have one protocol.

    Raises `UsageError`, `FieldError` for fields that the format does not hold, `DestinationError` where `dst` is not
    empty, `FormatError` or `DecodeError` for a damaged dataset, and what the stores refuse.
    """
    if format not in FORMATS:
        raise UsageError(f"format {format!r}", f"choose one of {', '.join(FORMATS)}")
    opened = open_root(open_store(url, storage_options), split)
    layouts = _choose(opened.manifest, opened.store.url, fields)
    piece = _piece(opened.manifest, layouts, FORMATS[format].overhead)
    exporter = FORMATS[format].plan(Task(layouts, opened.manifest.num_samples, piece))
    if target_options is None and parse_location(url, None).protocol == parse_location(dst, None).protocol:
        target_options = storage_options
    target = _empty(dst, target_options, opened.store.url)
    run = _Run(exporter, StoredColumns(opened, layouts), target, opened.manifest.num_samples, progress)
    starts = range(0, max(1, opened.manifest.num_samples), piece)  # one piece too of a dataset without samples
    run_all(lambda number: run.write(number, starts[number], starts[number] + piece), range(len(starts)), THREADS)
    return run.finish()


def _choose(manifest: Manifest, url: str, fields: Iterable[str] | None) -> dict[str, FieldLayout]:
    names = list(manifest.fields) if fields is None else list(fields)
    unknown = next((name for name in names if name not in manifest.fields), None)
    if unknown is not None or not names:
        problem = "no field was chosen" if unknown is None else f"{url} has no field {unknown!r}"
        raise FieldError(problem, f"its fields are {', '.join(manifest.fields)}")
    return {name: manifest.fields[name] for name in names}


def _piece(manifest: Manifest, layouts: Mapping[str, FieldLayout], overhead: int) -> int:
    """Return the samples of a piece: a shard, halved where that would make too large a file, or doubled too small."""
    decoded = sum(layout.nbytes for layout in layouts.values()) / max(1, manifest.num_samples)
    size, piece = decoded + overhead * len(layouts), manifest.samples_per_shard
    while piece % 2 == 0 and piece * size > MOST_BYTES:
        piece //= 2
    while piece < manifest.num_samples and 2 * piece * size <= FEW_BYTES:
        piece *= 2
    return piece


def _empty(dst: str | os.PathLike[str], options: Mapping[str, Any] | None, source: str) -> Store:
    """Return the store below `dst`. Raises `DestinationError` where anything is there, or it lies in the dataset."""
    target = open_store(dst, options)
    if f"{target.url}/".removeprefix("file://").startswith(f"{source}/".removeprefix("file://")):
        raise DestinationError(f"{target.url} lies in the dataset {source}", "choose another destination")
    other = next(iter(target.list()), None)
    if other is not None:
        problem = f"{target.url} is not empty ({other.path} is there)"
        raise DestinationError(problem, "choose another destination; remove it if an export was broken off there")
    return target


class _Run:
    """One export while it runs; pieces are written from several threads."""

    def __init__(
        self,
        exporter: Exporter,
        stored: StoredColumns,
        target: Store,
        num_samples: int,
        progress: Callable[[Exported], None] | None,
    ) -> None:
        self._exporter, self._stored, self._target = exporter, stored, target
        self._total, self._progress = num_samples, progress
        self._done = self._files = self._bytes = 0
        self._lock = threading.Lock()

    def write(self, number: int, start: int, stop: int) -> None:
        """Read and write the samples [start, stop), or as many as there are."""
        stop = min(stop, self._total)
        piece = Piece(number, start, self._stored.read(start, stop))
        sizes = [self._target.put(path, data).size for path, data in self._exporter.files(piece)]
        self._count(stop - start, sizes)

    def finish(self) -> Exported:
        """Write what comes last, and return what was done."""
        self._count(0, [self._target.put(path, data).size for path, data in self._exporter.last_files()])
        return self._state()

    def _count(self, samples: int, sizes: list[int]) -> None:
        with self._lock:
            self._done, self._files, self._bytes = (
                self._done + samples,
                self._files + len(sizes),
                self._bytes + sum(sizes),
            )
            if self._progress is not None:
                self._progress(self._state())

    def _state(self) -> Exported:
        return Exported(self._target.url, self._done, self._total, self._files, self._bytes)
