"""Export to WebDataset tars: a member for each field of each sample, keys are sample numbers."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from streamloader.conversion.after.exports.base import File, Piece, Task
from streamloader.conversion.sources.files import field_names
from streamloader.conversion.sources.folders.images import ENCODINGS
from streamloader.conversion.sources.tars.wdsfields import INTEGERS, TEXTS
from streamloader.errors import FieldError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field

OVERHEAD = 1024  # bytes of a member beside its data: header and padding
_KEY_DIGITS = 9

Bytes = Callable[[Column, int], bytes]


@dataclass(frozen=True)
class WebDatasetExport:
    """`members` gives each field the suffix of its members."""

    task: Task
    members: Mapping[str, str]

    def files(self, piece: Piece) -> Iterator[File]:
        """Yield one tar; the same samples give the same bytes."""
        fields = self.task.fields
        digits = max(_KEY_DIGITS, len(str(self.task.num_samples)))
        encoders = [(suffix, piece.columns[name], _encoder(fields[name])) for name, suffix in self.members.items()]
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for row in range(len(piece)):
                for suffix, column, encode in encoders:
                    data = encode(column, row)
                    member = tarfile.TarInfo(f"{piece.first + row:0{digits}}.{suffix}")  # no owner, time 0, mode 644
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        yield f"shard-{piece.number:06}.tar", out.getbuffer()

    def last_files(self) -> Iterator[File]:
        """Yield nothing."""
        yield from ()


def plan(task: Task) -> WebDatasetExport:
    """Return the exporter. Raises `FieldError` for two fields whose members would have one name."""
    members: dict[str, str] = {}
    for name, field in sorted(task.fields.items()):
        suffix = suffix_of(name, field)
        other = next((key for key, taken in members.items() if taken == suffix), None)
        if other is not None:
            problem = f"the fields {other!r} and {name!r} would both have members .{suffix}"
            raise FieldError(problem, "export one of them at a time, with --fields")
        members[name] = suffix
    return WebDatasetExport(task, dict(sorted(members.items(), key=lambda item: item[1])))


def suffix_of(name: str, field: Field) -> str:
    """Return the suffix of a field's members.

    It is one that names the field again when the tar is converted: `jpg`, `seg.png` for `seg_png`. Where there is none,
    `label.cls` for `label`, which then becomes `label_cls`.
    """
    head, _, tail = name.rpartition("_")
    for suffix in (name, f"{head}.{tail}" if head else ""):
        last = suffix.rpartition(".")[2]
        if suffix and _holds(last, field) and field_names([suffix], "")[suffix] == name:
            return suffix
    return f"{name}.{_extension(field)}"


def _holds(extension: str, field: Field) -> bool:
    """Return whether members of this extension are read as such a field again."""
    if extension in INTEGERS:
        return field == Field("tensor", "int64")
    if extension in TEXTS:
        return field.kind == "text"
    if extension == "npy":
        return field.kind in ("tensor", "ragged")
    return field.kind == "bytes" and field.encoding == ENCODINGS.get(extension, extension)


def _extension(field: Field) -> str:
    if field.kind in ("tensor", "ragged"):
        return "cls" if field == Field("tensor", "int64") else "npy"
    if field.kind == "text":
        return "txt"
    encoding = "jpg" if field.encoding == "jpeg" else field.encoding
    return encoding if encoding.isalnum() and _holds(encoding, field) else "bin"


def _encoder(field: Field) -> Bytes:
    if field == Field("tensor", "int64"):
        return lambda column, row: str(int(column[row])).encode()
    if field.kind == "tensor":
        return lambda column, row: _npy(column[row])
    return partial(_ragged, field) if field.kind == "ragged" else lambda column, row: column[row]


def _ragged(field: Field, column: Column, row: int) -> bytes:
    return _npy(np.frombuffer(column[row], np.dtype(field.dtype).newbyteorder("<")).reshape(-1, *field.shape))


def _npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(array), allow_pickle=False)
    return out.getvalue()
