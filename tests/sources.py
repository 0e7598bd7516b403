"""Sources for the tests: what formats/ holds, short ways to open and read one, and to write images, tars and arrays."""

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from streamloader.conversion.sources import ranged_io
from streamloader.conversion.sources.base import BadSample, RowSource, raise_bad
from streamloader.conversion.sources.fields import parse_selection
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.ranged_io import read_range
from streamloader.errors import SourceError
from streamloader.format.values import from_bytes

FORMATS = Path(__file__).parent.parent / "formats"


@dataclass(frozen=True)
class Case:
    """A source below formats/: its format, the fields that it asks for, and where its expected values are."""

    format: str
    needs: str = ""
    """The package without which it cannot be read."""
    fields: str | None = None
    file: str = "expected.json"
    keys: tuple[str, str] = ("fields", "samples")
    again: bool = False
    """Whether another source is read with the same requests."""

    def expected(self) -> dict[str, Any]:
        """Return the document of expected values, with the keys `fields` and `samples`."""
        found: dict[str, Any] = json.loads((FORMATS / self.format / self.file).read_text())
        fields, samples = self.keys
        return {**found, "fields": found[fields], "samples": found[samples]}


TOKENS = "tokens=uint16[8]"
COCO = "coco/input::/annotations/{}_train2017.json"
XARRAY = ("xarray_fields", "xarray")
CASES = {
    "imagefolder/input": Case("imagefolder"),
    "webdataset/input": Case("webdataset"),
    "webdataset/input/*.tar": Case("webdataset"),
    "webdataset/input/shard-{000..001}.tar": Case("webdataset", again=True),
    "webdataset/compressed": Case("webdataset"),
    "webdataset/compressed/shard-{000..001}.tar.gz": Case("webdataset", again=True),
    "npy/input/folder": Case("npy", again=True),
    "npy/input/stored.npz": Case("npy"),
    "npy/input/compressed.npz": Case("npy"),
    "csv/input": Case("csv", "pyarrow"),
    "csv/input/*": Case("csv", "pyarrow", again=True),
    "jsonl/input": Case("jsonl"),
    "jsonl/input/{a.jsonl,b.ndjson,c.jsonl.gz,d.ndjson.xz}": Case("jsonl", again=True),
    "tfrecord/input": Case("tfrecord"),
    "tfrecord/input/*.tfrecord-*": Case("tfrecord", again=True),
    "mds/input/plain": Case("mds"),
    "mds/input/zstd": Case("mds", "zstandard", again=True),
    "hdf5/input/nested.h5::/data/train": Case("hdf5", "h5py"),
    "hdf5/input/parts": Case("hdf5", "h5py", again=True),
    "hdf5/input/parts/{a.h5,b.hdf5}": Case("hdf5", "h5py", again=True),
    "netcdf/input/netcdf4.nc": Case("netcdf", "h5py", again=True),
    "netcdf/input/classic.nc": Case("netcdf", again=True),
    "netcdf/input/fixed.nc": Case("netcdf", again=True),
    "netcdf/input/data.cdf": Case("netcdf", again=True),
    "netcdf/input/parts": Case("netcdf"),
    "zarr/input/v2.zarr": Case("zarr", again=True),
    "zarr/input/v3.zarr": Case("zarr", again=True),
    "zarr/input/xarray2.zarr": Case("zarr", keys=XARRAY),
    "zarr/input/xarray3.zarr": Case("zarr", keys=XARRAY, again=True),
    "zarr/input::/xarray3.zarr": Case("zarr", keys=XARRAY, again=True),
    "tokens/input/plain": Case("tokens", fields=TOKENS),
    "tokens/input/header/train_000.bin": Case("tokens", fields=TOKENS, keys=("fields", "header"), again=True),
    "parquet/input": Case("parquet", "pyarrow"),
    "parquet/input/*.parquet": Case("parquet", "pyarrow", again=True),
    "arrow/input": Case("arrow", "pyarrow"),
    "huggingface/input/train": Case("huggingface", "pyarrow"),
    COCO.format("instances"): Case("coco"),
    COCO.format("person_keypoints"): Case("coco", file="expected-person_keypoints.json", again=True),
    COCO.format("captions"): Case("coco", file="expected-captions.json", again=True),
    "audiofolder/input": Case("audiofolder"),
    "videofolder/input": Case("videofolder"),
}
READABLE = [src for src, case in CASES.items() if not case.needs or find_spec(case.needs)]


def opened(src: Path | str, fields: Any = None, name: str | None = None, storage: Any = None, **how: Any) -> RowSource:
    """Open a source with a selection of fields, which may be given its `fill` and `raw`."""
    return open_source(src, name, storage or {}, parse_selection(fields, **how))[1]


def read(source: RowSource, rows: Any = None, on_bad: Callable[[BadSample], None] = raise_bad) -> dict[str, Any]:
    """Read the columns of some rows, or of all."""
    return source.fragment(np.arange(source.num_samples) if rows is None else np.array(rows, np.int64))(on_bad)


def plain(value: Any) -> Any:
    """Return a value as expected.json writes it."""
    if isinstance(value, bytes):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def samples_of(source: RowSource, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples that columns hold, with the values that a dataset gives."""
    assert set(columns) == set(source.fields)
    assert len({len(column) for column in columns.values()}) == 1
    values = {
        name: [one if field.fixed else from_bytes(name, field, memoryview(one), 0) for one in columns[name]]
        for name, field in source.fields.items()
    }
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def written_as(samples: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return samples as these of expected.json are written: an image by its pixels, long ragged rows by a digest."""

    def one(name: str, value: Any, wanted: Any) -> Any:
        if name == "pixels" and isinstance(value, bytes):
            value = np.asarray(Image.open(io.BytesIO(value)))
        digested = isinstance(value, np.ndarray) and isinstance(wanted, dict)
        return plain(value.tobytes() if digested else value)

    pairs = zip(samples, expected, strict=True)
    return [{name: one(name, value, wanted.get(name)) for name, value in sample.items()} for sample, wanted in pairs]


def rows_of(source: RowSource, rows: Any = None, on_bad: Any = raise_bad, part: Any = None) -> list[dict[str, Any]]:
    """Read some rows, or all, or those of a part, as expected.json writes them."""
    samples = samples_of(source, part(on_bad) if part else read(source, rows, on_bad))
    return written_as(samples, [{}] * len(samples))


def bad_rows(source: RowSource, rows: Any = None) -> tuple[list[dict[str, Any]], list[BadSample]]:
    """Read some rows, or all; return the good ones, and what is bad."""
    bad: list[BadSample] = []
    return rows_of(source, rows, bad.append), bad


def kinds_of(source: Any) -> dict[str, str]:
    """Return the types of the fields of a source or a dataset."""
    return {name: str(field) for name, field in source.fields.items()}


BadCase = tuple[Callable[[Path], Any], str]


def assert_error(kind: Any, message: str, src: RowSource | Path | str, chosen: Any = None, **how: Any) -> None:
    """Opening a source (with the fields `chosen`), or reading an open one (these rows), must fail with this error."""
    with pytest.raises(kind, match=message):
        opened(src, chosen, **how) if isinstance(src, Path | str) else read(src, chosen)


def assert_refused(case: BadCase, folder: Path, kind: Any = SourceError, name: str = "", **how: Any) -> None:
    """Make a bad source in a folder; opening the folder, or a file in it, must fail with the case's message."""
    make, message = case
    make(folder)
    assert_error(kind, message, folder / name, **how)


def files(contents: Mapping[str, bytes]) -> Callable[[Path], None]:
    """Return what writes these files below a folder; a name that ends with / is an empty folder."""

    def make(root: Path) -> None:
        for name, data in contents.items():
            path = root / name
            (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_bytes(data)

    return make


def image_bytes(size: int = 4, encoding: str = "png") -> bytes:
    """Return an encoded square image."""
    out = io.BytesIO()
    Image.fromarray(np.arange(size * size * 3, dtype=np.uint8).reshape(size, size, 3)).save(out, encoding)
    return out.getvalue()


def png(path: Path, size: int = 4) -> None:
    """Write a square image."""
    files({path.name: image_bytes(size)})(path.parent)


def tar_bytes(members: Mapping[str, bytes], kind: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of these members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def tar(path: Path, members: Mapping[str, bytes], kind: int = tarfile.PAX_FORMAT) -> None:
    """Write a tar of these members."""
    path.write_bytes(tar_bytes(members, kind))


def write_table(folder: Path, table: Any, form: str = "parquet", rows: int | None = None) -> Path:
    """Write a table as Parquet, or an Arrow file or stream, with so many rows in each block; return its path."""
    import pyarrow.parquet as pq
    from pyarrow import ipc

    if form == "parquet":
        pq.write_table(table, folder / "it.parquet", row_group_size=rows, data_page_size=64)
        return folder / "it.parquet"
    legacy = form == "legacy"
    options = ipc.IpcWriteOptions(compression=None if legacy else "lz4", use_legacy_format=legacy)
    make = ipc.new_file if form == "file" else ipc.new_stream
    with make(folder / "it.arrow", table.schema, options=options) as writer:
        writer.write_table(table.unify_dictionaries(), max_chunksize=rows)
    return folder / "it.arrow"


class Reads(list[Any]):
    """The ranges that are read."""

    def drain(self) -> int:
        """Return how many bytes the ranges have, those that threads read ahead included, and forget them."""
        for thread in [thread for thread in threading.enumerate() if thread.name == "streamloader-io"]:
            thread.join()
        found = sum(one.stop - one.start for one in self)
        self.clear()
        return found


def recorded(patch: pytest.MonkeyPatch, module: Any = ranged_io) -> Reads:
    """Return a list that gets every range which the module reads."""
    seen = Reads()
    patch.setattr(module, "read_range", lambda store, wanted: seen.append(wanted) or read_range(store, wanted))
    return seen


def npy_bytes(array: Any) -> bytes:
    """Return an array as .npy, objects pickled."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()
