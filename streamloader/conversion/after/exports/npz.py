"""Export to NumPy's .npz: a file for each piece, an array for each field."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from streamloader.conversion.after.exports.base import File, Piece, Task
from streamloader.errors import FieldError

OVERHEAD = 0


@dataclass(frozen=True)
class NpzExport:
    """Writes the fields as they are."""

    def files(self, piece: Piece) -> Iterator[File]:
        """Yield one .npz, not compressed; the same samples give the same bytes."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
            for name, column in sorted(piece.columns.items()):
                # a ZipInfo of its own has no time; np.savez knows no array called `file`
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.ascontiguousarray(column), allow_pickle=False)
        yield f"part-{piece.number:05}.npz", out.getbuffer()

    def last_files(self) -> Iterator[File]:
        """Yield nothing."""
        yield from ()


def plan(task: Task) -> NpzExport:
    """Return the exporter. Raises `FieldError` for a field without a fixed shape: an .npz would have to pickle it."""
    for name, field in task.fields.items():
        if not field.fixed:
            fixed = ",".join(other for other, one in task.fields.items() if one.fixed)
            choose = f"leave it out with --fields {fixed}, or " if fixed else ""
            raise FieldError(f"field {name!r} is {field}, an .npz holds arrays of fixed shape", f"{choose}take parquet")
    return NpzExport()
