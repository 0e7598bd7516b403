"""Exports a dataset to files of another format, with the same samples in the same order.

The dataset is divided into pieces of consecutive samples. Each format has a function that plans an export: it checks
the fields, and returns a function that makes the complete files of a piece from its number, the number of its first
sample, and its columns. That function is called for pieces in any order and from any thread.
"""

import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from streamloader.conversion.api import default_options
from streamloader.conversion.job import Listener, Progress, counter
from streamloader.conversion.sources.files import field_names
from streamloader.conversion.sources.media import IMAGE_ENCODINGS
from streamloader.conversion.sources.tar import INTEGERS, TEXTS
from streamloader.errors import DestinationError, FieldError, UsageError
from streamloader.format.codecs import Column, encode_chunk
from streamloader.format.deleted import read_remaining
from streamloader.format.manifest import Field, FieldLayout, Manifest
from streamloader.format.metadata import field_document, group_document, to_bytes
from streamloader.format.opening import ROOT, open_root
from streamloader.format.reader import FieldReader, read_columns
from streamloader.options import MIB
from streamloader.storage import Store, open_store
from streamloader.storage.buffers import Buffer
from streamloader.storage.optional import need
from streamloader.storage.process import run_all

THREADS = 2  # one piece is read while another is written: memory holds both, and the file of one
# size of a file; most shards are in this range
MIN_BYTES = 64 * MIB
MAX_BYTES = 128 * MIB
GROUP_BYTES = 32 * MIB  # decoded size of a Parquet row group, which readers hold to read any of its rows
CHUNK_BYTES = 16 * MIB  # decoded size of a Zarr chunk, which readers load for a single sample
_KEY_DIGITS = 9

File = tuple[str, Buffer]  # the path below the destination, and the bytes


@dataclass(frozen=True)
class Task:
    """The fields to export, with their layouts in the dataset; the number of samples, and the samples per piece."""

    layouts: Mapping[str, FieldLayout]
    num_samples: int
    piece: int


Columns = Mapping[str, Column]
Files = Callable[[int, int, Columns], Iterator[File]]


@dataclass(frozen=True)
class ExportFormat:
    """A format of files: `plan` checks the fields and returns the function that makes the files of a piece.

    `last` makes the files to write after all pieces. `overhead` is the size of a value in bytes, without its data.
    """

    plan: Callable[[Task], Files]
    overhead: int
    last: Callable[[Task], Iterator[File]] | None = None


def plan_npz(task: Task) -> Files:
    """Plan an .npz file for each piece. Raises `FieldError` for a field without a fixed shape: it would be pickled."""
    fixed = ",".join(name for name, layout in task.layouts.items() if layout.field.fixed)
    choose = f'leave it out with fields="{fixed}", or ' if fixed else ""
    for name, layout in task.layouts.items():
        if not layout.field.fixed:
            problem = f"field {name!r} is {layout.field}, an .npz holds arrays of fixed shape"
            raise FieldError(problem, f"{choose}use parquet")
    return _npz_files


def _npz_files(number: int, _: int, columns: Columns) -> Iterator[File]:
    """Yield one uncompressed .npz file; the same samples give the same bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, column in sorted(columns.items()):
            # not np.savez, which writes the time of day and refuses an array named `file`
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(column), allow_pickle=False)
    yield f"part-{number:05}.npz", out.getvalue()


def plan_parquet(task: Task) -> Files:
    """Plan a Parquet file for each piece, in row groups. Raises `UsageError` if pyarrow is missing."""
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    decoded = sum(layout.nbytes for layout in task.layouts.values()) / max(1, task.num_samples)
    rows = max(1, int(GROUP_BYTES / max(1.0, decoded)))

    def files(number: int, _: int, columns: Columns) -> Iterator[File]:
        table = {name: _arrow_column(arrow, task.layouts[name].field, column) for name, column in columns.items()}
        sink = arrow.BufferOutputStream()
        parquet.write_table(arrow.table(table), sink, row_group_size=rows, compression="zstd")
        yield f"part-{number:05}.parquet", memoryview(sink.getvalue())

    return files


def _arrow_column(arrow: Any, field: Field, column: Column) -> Any:
    """Return a column as an Arrow array: numbers, nested fixed-size lists, lists, binary or string."""

    def shaped(values: Any) -> Any:
        for axis in reversed(field.shape):
            values = arrow.FixedSizeListArray.from_arrays(values, axis)
        return values

    if field.fixed:
        return shaped(arrow.array(np.ascontiguousarray(column).reshape(-1)))
    if field.kind in ("bytes", "text"):
        binary = arrow.array(column, arrow.binary())  # chunked if it has 2 GiB or more
        return binary.cast(arrow.string()) if field.kind == "text" else binary
    stops = np.cumsum([0, *(len(item) // field.item_bytes for item in column)], dtype=np.int64)
    values = shaped(arrow.array(np.frombuffer(b"".join(column), field.stored_dtype)))
    if stops[-1] < 2**31:
        return arrow.ListArray.from_arrays(arrow.array(stops.astype(np.int32)), values)
    return arrow.LargeListArray.from_arrays(arrow.array(stops), values)


def plan_webdataset(task: Task) -> Files:
    """Plan a tar file for each piece, with a member for each field of each sample; the key is the sample's number.

    Raises `FieldError` if the members of two fields would have the same name.
    """
    members: dict[str, str] = {}
    for name, layout in sorted(task.layouts.items()):
        suffix = suffix_of(name, layout.field)
        if suffix in members:
            problem = f"the fields {members[suffix]!r} and {name!r} would both have members named .{suffix}"
            raise FieldError(problem, "export one of them at a time, with fields=")
        members[suffix] = name
    return partial(_tar_files, task, sorted(members.items()))


def _tar_files(task: Task, members: list[tuple[str, str]], number: int, first: int, columns: Columns) -> Iterator[File]:
    """Yield one tar file; the same samples give the same bytes."""
    digits, out = max(_KEY_DIGITS, len(str(task.num_samples))), io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for row in range(len(next(iter(columns.values())))):
            for suffix, name in members:
                data = _member(task.layouts[name].field, columns[name][row])
                member = tarfile.TarInfo(f"{first + row:0{digits}}.{suffix}")  # no owner, time 0, mode 644
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    yield f"shard-{number:06}.tar", out.getvalue()


def suffix_of(name: str, field: Field) -> str:
    """Return the suffix of a field's members in a tar file.

    If possible, converting the tar file gives the field its name again: `jpg`, or `seg.png` for `seg_png`. Otherwise
    the suffix has an extension, such as `label.cls` for `label`, which is converted to `label_cls`.
    """
    head, _, tail = name.rpartition("_")
    for suffix in (name, f"{head}.{tail}" if head else ""):
        last = suffix.rpartition(".")[2]
        if suffix and _can_hold(last, field) and field_names([suffix], "")[suffix] == name:
            return suffix
    return f"{name}.{_extension(field)}"


def _can_hold(extension: str, field: Field) -> bool:
    """Return whether a conversion reads members with this extension as such a field."""
    if extension in INTEGERS:
        return field == Field("tensor", "int64")
    if extension in TEXTS:
        return field.kind == "text"
    if extension == "npy":
        return field.kind in ("tensor", "ragged")
    return field.kind == "bytes" and field.encoding == IMAGE_ENCODINGS.get(extension, extension)


def _extension(field: Field) -> str:
    encoding = "jpg" if field.encoding == "jpeg" else field.encoding
    candidates = ("cls", "npy", "txt", *([encoding] if encoding.isalnum() else []))
    return next((extension for extension in candidates if _can_hold(extension, field)), "bin")


def _member(field: Field, value: Any) -> bytes:
    """Return the bytes of a member: decimal digits for an int64, an .npy file for other arrays, else the value."""
    if field == Field("tensor", "int64"):
        return str(int(value)).encode()
    if field.kind not in ("tensor", "ragged"):
        return bytes(value)
    if field.kind == "ragged":
        value = np.frombuffer(value, field.stored_dtype).reshape(-1, *field.shape)
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(value), allow_pickle=False)
    return out.getvalue()


def _zarr_layouts(task: Task) -> dict[str, FieldLayout]:
    """Return layouts with chunks of about `CHUNK_BYTES` that divide a piece, and without shards."""
    layouts: dict[str, FieldLayout] = {}
    for name, layout in task.layouts.items():
        chunk = task.piece
        while chunk % 2 == 0 and chunk * layout.nbytes > CHUNK_BYTES * max(1, task.num_samples):
            chunk //= 2
        layouts[name] = replace(layout, chunk=chunk, shard=chunk)
    return layouts


def plan_zarr(task: Task) -> Files:
    """Plan a plain Zarr v3 group: an array for each field, in chunks of samples, without shards."""
    layouts = _zarr_layouts(task)

    def files(_: int, first: int, columns: Columns) -> Iterator[File]:
        for name, layout in layouts.items():
            for start in range(0, len(columns[name]), layout.chunk):
                path = layout.shard_key(name, (first + start) // layout.chunk)
                yield path, encode_chunk(layout, columns[name][start : start + layout.chunk])

    return files


def _zarr_documents(task: Task) -> Iterator[File]:
    """Yield the documents of the arrays, then that of the group, without which the group does not open."""
    nodes = {name: field_document(name, layout, task.num_samples) for name, layout in _zarr_layouts(task).items()}
    for name, document in nodes.items():  # replace the sharding codec by the codecs of its chunks
        document["codecs"] = document["codecs"][0]["configuration"]["codecs"]
        yield f"{name}/{ROOT}", to_bytes(document)
    yield ROOT, to_bytes(group_document({}, nodes))


FORMATS: Mapping[str, ExportFormat] = {
    "webdataset": ExportFormat(plan_webdataset, 1024),  # header and padding of a tar member
    "parquet": ExportFormat(plan_parquet, 16),
    "npz": ExportFormat(plan_npz, 0),
    "zarr": ExportFormat(plan_zarr, 16, _zarr_documents),
}


@dataclass(frozen=True)
class ExportReport:
    """The result of an export to `url`: the number of samples and of files, and the total size of the files."""

    url: str
    num_samples: int
    files: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dict(vars(self))


def export(
    url: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str,  # noqa: A002 - the name of the command's option
    fields: str | Iterable[str] | None = None,
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    progress: Listener | None = None,
) -> ExportReport:
    """Export the samples of the dataset at `url`, or of one split of it, to the empty folder or URL `dst`.

    `format` is "webdataset", "parquet", "npz" or "zarr". `fields` selects fields by name, as an iterable or separated
    by commas. Each piece of the dataset, about one shard, becomes files that appear only when they are complete; after
    a killed export, remove its files yourself. `target_options` are the storage options of `dst`, by default
    `storage_options` if both URLs have the same protocol.

    Raises `UsageError`, `FieldError` for fields that the format cannot hold, `DestinationError` if `dst` is not empty,
    `FormatError` or `DecodeError` for a damaged dataset, and `StorageError`.
    """
    if format not in FORMATS:
        raise UsageError(f"format {format!r}", f"choose one of {', '.join(FORMATS)}")
    kind, (manifest, store, _) = FORMATS[format], open_root(open_store(url, storage_options), split)
    names = fields.split(",") if isinstance(fields, str) else manifest.fields if fields is None else fields
    remaining = read_remaining(store, manifest)
    readers = {name.strip(): FieldReader(store, manifest, name.strip(), remaining) for name in names}
    if not readers:
        raise FieldError("no field is selected", f"the dataset has {', '.join(manifest.fields)}")
    layouts, total = {name: reader.layout for name, reader in readers.items()}, manifest.num_remaining
    task = Task(layouts, total, _piece_size(manifest, layouts, kind.overhead))
    make_files = kind.plan(task)
    target = _open_empty(dst, default_options(target_options, dst, storage_options, url), store.url)
    count = counter(Progress("export", total=total), progress)

    def put(files: Iterable[File], samples: int) -> list[int]:
        sizes = [target.put(path, data).size for path, data in files]
        count(samples, sum(sizes))
        return sizes

    def write(number: int) -> list[int]:
        start = number * task.piece
        stop = min(start + task.piece, total)
        return put(make_files(number, start, read_columns(readers, start, stop)), stop - start)

    pieces = range(max(1, -(-total // task.piece)))  # an empty dataset has one
    sizes = [size for written in run_all(write, pieces, THREADS) for size in written]
    sizes += put(kind.last(task) if kind.last else (), 0)
    return ExportReport(target.url, total, len(sizes), sum(sizes))


def _piece_size(manifest: Manifest, layouts: Mapping[str, FieldLayout], overhead: int) -> int:
    """Return the samples per piece: those of a shard, halved or doubled until files have a suitable size."""
    decoded = sum(layout.nbytes for layout in layouts.values()) / max(1, manifest.num_samples)
    size, piece = decoded + overhead * len(layouts), manifest.samples_per_shard
    while piece % 2 == 0 and piece * size > MAX_BYTES:
        piece //= 2
    while piece < manifest.num_samples and 2 * piece * size <= MIN_BYTES:
        piece *= 2
    return piece


def _open_empty(dst: str | os.PathLike[str], options: Mapping[str, Any] | None, source: str) -> Store:
    """Return the store of `dst`. Raises `DestinationError` if it is not empty, or inside the dataset at `source`."""
    target = open_store(dst, options)
    if f"{target.url}/".removeprefix("file://").startswith(f"{source}/".removeprefix("file://")):
        raise DestinationError(f"{target.url} is inside the dataset {source}", "choose another destination")
    existing = next(iter(target.list()), None)
    if existing is not None:
        problem = f"{target.url} is not empty: it has {existing.path}"
        raise DestinationError(problem, "choose another destination, or remove the files of an interrupted export")
    return target
