"""An .npz is a zip of .npy: read by range where it is stored, unpacked row after row where it is compressed."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import Range, read_range
from streamloader.conversion.sources.rangefile import open_file
from streamloader.conversion.sources.tensors.arrays import check_claim
from streamloader.conversion.sources.tensors.npyheader import (
    HEADER_BYTES,
    StoredArray,
    check_size,
    parse_header,
    read_array_header,
    row_field,
)
from streamloader.errors import SourceError, StreamloaderError
from streamloader.format.manifest import Field
from streamloader.storage.protocol import ObjectInfo, Store

_MAGIC = b"PK\3\4"  # of a member's header
_LOCAL_HEADER = 30  # bytes before a member's name; the lengths of name and extra stand in its last four
_PIECE = 4 << 20


@dataclass(frozen=True)
class PackedArray:
    """An array in a compressed member: each part unpacks it from its beginning, holding a few MiB at a time."""

    info: ObjectInfo
    member: str
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def field(self) -> Field:
        """The tensor field that holds it."""
        return row_field(self.dtype, self.shape)

    def read_rows(self, store: Store, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill `out` with the rows, which ascend. Raises `SourceError` for a damaged or truncated member."""
        size = self.field.item_bytes
        flat = out.reshape(-1).view(np.uint8).reshape(len(rows), size)
        per_piece = max(1, _PIECE // size)
        with _opened(store, self.info) as archive, archive.open(self.member) as file:
            file.read(self.start)
            last = int(rows[-1]) + 1 if len(rows) else 0
            for first in range(0, last, per_piece):
                stop = min(first + per_piece, last)
                data = file.read((stop - first) * size)
                if len(data) != (stop - first) * size:
                    raise SourceError(
                        f"{store.url}/{self.info.path}: {self.member} is truncated", "fetch or make it again"
                    )
                i, j = np.searchsorted(rows, (first, stop))
                flat[i:j] = np.frombuffer(data, np.uint8).reshape(-1, size)[rows[i:j] - first]


def npz_arrays(store: Store, info: ObjectInfo) -> dict[str, StoredArray | PackedArray]:
    """Return the arrays of an .npz by name. Raises `SourceError` for what is no zip of plain arrays."""
    arrays: dict[str, StoredArray | PackedArray] = {}
    with _opened(store, info) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith(".npy"):
                raise SourceError(
                    f"{store.url}/{info.path} holds {entry.filename!r}", "an .npz holds .npy members only"
                )
            name = entry.filename[: -len(".npy")]
            if entry.compress_type == zipfile.ZIP_STORED:
                start = _data_start(store, info, entry)
                arrays[name] = read_array_header(store, info, start, start + entry.file_size, f"{info.path}:{name}")
            else:
                where = f"{store.url}/{info.path}:{name}"
                with archive.open(entry) as file:
                    shape, dtype, length = parse_header(file.read(HEADER_BYTES), where)
                packed = PackedArray(info, entry.filename, length, dtype, shape)
                needed = length + packed.field.item_bytes * shape[0]
                check_size(needed, entry.file_size, where)
                check_claim(where, needed, entry.compress_size)
                arrays[name] = packed
    return arrays


def _data_start(store: Store, info: ObjectInfo, entry: zipfile.ZipInfo) -> int:
    start, stop = entry.header_offset, entry.header_offset + _LOCAL_HEADER
    header = read_range(store, Range(info.path, start, stop)) if 0 <= start < stop <= info.size else b""
    if header[:4] != _MAGIC:
        raise zipfile.BadZipFile(f"no member begins at byte {start}")
    name, extra = struct.unpack_from("<HH", header, _LOCAL_HEADER - 4)
    return int(entry.header_offset + _LOCAL_HEADER + name + extra)


@contextmanager
def _opened(store: Store, info: ObjectInfo) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(open_file(store, info)) as archive:
            yield archive
    except StreamloaderError:
        raise
    except Exception as error:  # zipfile and its decompressors have errors of many kinds for what is damaged
        problem = f"{store.url}/{info.path} is no .npz, or damaged: {str(error) or type(error).__name__}"
        raise SourceError(problem, "fetch or make it again") from error
