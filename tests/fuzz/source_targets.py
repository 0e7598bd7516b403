"""Fuzzing of what reads other formats: a target for each source format, and for arrays and references in place.

A target writes the input files of formats/NAME, one of them edited, opens them as a source, and reads every row.
"""

import bz2
import gzip
import io
import lzma
import os
import shutil
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import crc32c
import h5py
import numpy as np
from sources import CASES, FORMATS, Case, opened, read, samples_of

import streamloader as sl
from fuzz.edits import Draw, edited_bytes
from fuzz.targets import TARGETS, Target, allowed, temporary_folder
from streamloader.conversion.sources.fields import FieldSelection
from streamloader.conversion.sources.formats import open_source

MOST_ROWS = 500


def _zip(data: bytes, change: Callable[[bytes], bytes], draw: Draw) -> bytes:
    """Change a member of a zip file, whose checksum fits."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        changed = draw.below(len(old.infolist()))
        for number, info in enumerate(old.infolist()):
            body = old.read(info)
            new.writestr(info, change(body) if number == changed else body)
    return out.getvalue()


def _tar(data: bytes, change: Callable[[bytes], bytes], _draw: Draw) -> bytes:
    """Change a tar, and let the checksum of each header fit."""
    out = bytearray(change(data))
    for at in range(0, len(out) - 511, 512):
        if out[at + 257 : at + 262] == b"ustar":
            out[at + 148 : at + 156] = b" " * 8
            out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out)


def _records(data: bytes, change: Callable[[bytes], bytes], draw: Draw) -> bytes:
    """Change a record of a TFRecord file, whose checksums fit."""
    records, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        records.append(data[at + 12 : at + 12 + size])
        at += 16 + size
    changed = draw.below(len(records))
    records[changed] = change(records[changed])
    return b"".join(_masked(len(record).to_bytes(8, "little")) + _masked(record) for record in records)


def _masked(data: bytes) -> bytes:
    crc = crc32c.crc32c(data)
    return data + ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


COMPRESSED = {".gz": (gzip.decompress, gzip.compress), ".xz": (lzma.decompress, lzma.compress)}
COMPRESSED |= {".bz2": (bz2.decompress, bz2.compress)}


def edited_file(name: str, data: bytes, draw: Draw) -> bytes:
    """Return a file with edits: as it is, or inside its compression or checksums; or new bytes in its place."""
    kind = draw.below(8)
    if kind == 0:
        return draw.rest()

    def change(body: bytes) -> bytes:
        return edited_bytes(body, draw)

    suffix = Path(name).suffix
    if kind < 5 and suffix in COMPRESSED:
        unpack, pack = COMPRESSED[suffix]
        return pack(edited_file(name.removesuffix(suffix), unpack(data), draw))
    if kind < 5 and suffix == ".npz":
        return _zip(data, change, draw)
    if kind < 5 and suffix == ".tar":
        return _tar(data, change, draw)
    if kind < 5 and ".tfrecord" in name:
        return _records(data, change, draw)
    return change(data)


@cache
def copied(folder: str) -> Path:
    """Return a copy of a folder below formats/, for this process to change."""
    path = temporary_folder() / "it"
    shutil.copytree(FORMATS / folder, path)
    return path


@cache
def files_of(folder: str) -> dict[str, bytes]:
    """Return the files of a folder below formats/."""
    return {path.relative_to(FORMATS / folder).as_posix(): path.read_bytes()
            for path in sorted((FORMATS / folder).rglob("*")) if path.is_file()}  # fmt: skip


class Edited:
    """A folder below formats/ with one file edited, while the block lasts."""

    def __init__(self, folder: str, draw: Draw, names: Callable[[str], bool] = lambda name: True) -> None:
        given = {name: data for name, data in files_of(folder).items() if names(name)}
        self.name = draw.choice(sorted(given))
        self.path, self._data = copied(folder), given[self.name]
        self._edited = edited_file(self.name, self._data, draw)
        self.same = self._edited == self._data

    def __enter__(self) -> "Edited":
        (self.path / self.name).write_bytes(self._edited)
        return self

    def __exit__(self, *_: object) -> None:
        (self.path / self.name).write_bytes(self._data)


def read_source(src: str, case: Case, edited: Edited) -> None:
    """Open and read a source: all rows, and a few again."""
    with allowed():
        source = opened(src, case.fields, case.format)
        assert source.num_samples >= 0
        rows = np.arange(min(source.num_samples, MOST_ROWS))
        if not source.num_samples:
            return
        bad: list[Any] = []
        columns = read(source, rows, bad.append)
        assert {len(column) for column in columns.values()} == {len(rows) - len(bad)}
        assert all(0 <= one.position < len(rows) and one.problem for one in bad)
        with allowed():
            samples = samples_of(source, columns)
            if not bad and len(rows) > 2:
                assert repr(samples_of(source, read(source, rows[1:3]))) == repr(samples[1:3])


def source_target(name: str) -> Callable[[Draw], None]:
    """Return the target of a source format."""
    cases = {src: case for src, case in CASES.items() if case.format == name and "{" not in src}

    def run(draw: Draw) -> None:
        src, case = draw.choice(sorted(cases.items()))
        folder = "/".join(src.split("::")[0].split("/")[:2])
        with Edited(folder, draw) as edited:
            read_source(f"{edited.path}{src.removeprefix(folder)}", case, edited)

    return run


@cache
def hdf5_of_records(layout: int) -> tuple[bytes, Path]:
    """Return an HDF5 file with what only a map function gets, in one of three layouts, and a path for changed ones."""
    text, items = h5py.string_dtype(), h5py.vlen_dtype(np.dtype(">i2"))
    inner = np.dtype([("a", "<i4"), ("text", text, (2,))])
    dtype = np.dtype([("n", "<i2"), ("items", items), ("inner", inner), ("x", "<f4", (3,))])
    path = temporary_folder() / f"records{layout}.h5"
    options = ({}, {"chunks": True}, {"chunks": True, "compression": "gzip", "shuffle": True})[layout]
    with h5py.File(path, "w") as file:
        records = file.create_dataset("records", (9,), dtype, **options)
        table = file.create_dataset("table", (9, 2), items, **options)
        references = file.create_dataset("references", (9,), h5py.ref_dtype, **options)
        for row in range(9):
            records[row] = (row, np.arange(row), (row, ["a", f"text {row}"]), [1, 2, 3])
            table[row] = [np.arange(2), np.arange(row)]
            references[row] = table.ref
    return path.read_bytes(), path


def hdf5_records(draw: Draw) -> None:
    """Records, tables of variable length and references of HDF5, as a map function gets them."""
    data, path = hdf5_of_records(draw.below(3))
    path.write_bytes(edited_bytes(data, draw))
    with allowed():
        _, source = open_source(path, "hdf5", {}, FieldSelection(mapped=True))
        for rows in (np.arange(min(source.num_samples, MOST_ROWS)), np.arange(min(source.num_samples, 2))):
            if len(rows):
                bad: list[Any] = []
                columns = read(source, rows, bad.append)
                assert {len(column) for column in columns.values()} == {len(rows) - len(bad)}


def arrays(draw: Draw) -> None:
    """A Zarr store that others wrote, read in place: its documents and its chunks."""
    folder, fields = draw.choice(
        [("zarr/input", None), ("zarr/stores/xarray2.zarr", ["z"]), ("zarr/stores/zarrs3.zarr", ["z"])]
    )
    documents = draw.below(2)
    names = (".zarray", ".zattrs", ".zmetadata", ".zgroup", "zarr.json")
    with Edited(folder, draw, lambda name: not documents or name.endswith(names)) as edited:
        url = edited.path if fields else edited.path / edited.name.split("/")[0]
        axis = "time" if fields else None
        read_arrays(str(url), fields, axis)


def read_arrays(url: str, fields: Any, axis: str | None) -> None:
    """Read arrays in place: all batches, and everything that they are asked for."""
    with allowed():
        loader = sl.NumpyDataset(url, batch_size=4, fields=fields, sample_axis=axis, shuffle=False)
        for number, batch in enumerate(loader):
            assert len({len(column) for column in batch.values()}) == 1
            if number > 50:
                break
        loader.close()


def parquet_references(draw: Draw) -> None:
    """A folder of references as Parquet pages."""
    with Edited("zarr/stores/kerchunk.parquet", draw) as edited:
        linked = edited.path.parent / "packed.nc"
        if not linked.exists():
            shutil.copytree(FORMATS / "zarr/stores", linked.parent, dirs_exist_ok=True, ignore=_no_store)
        read_arrays(str(edited.path), ["z"], "time")


def _no_store(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if os.path.isdir(f"{folder}/{name}")]  # noqa: PTH112


def register() -> None:
    """Add a target for each source format, and for what is read in place."""
    for name in sorted({case.format for case in CASES.values()}):
        function = source_target(name)
        TARGETS[f"source_{name}"] = Target(lambda data, function=function: function(Draw(data)), (b"", b"\0\0\1"))
    for function in (arrays, hdf5_records, parquet_references):
        TARGETS[function.__name__] = Target(lambda data, function=function: function(Draw(data)))


register()
