"""One netCDF file of a classic format as columns: rows at a distance of each other, those of records interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.rowreads import read_rows
from streamloader.conversion.sources.tensors.arrays import LEAVE_OUT, Into, Note, add_texts, tensor_field
from streamloader.conversion.sources.tensors.netcdf3 import Variable
from streamloader.errors import SourceError
from streamloader.format.manifest import Field
from streamloader.storage.protocol import ObjectInfo, Store

RECORDS_BYTES = 32 << 20  # of records that are read together at once


@dataclass(frozen=True)
class ClassicFile:
    """The variables of one file, by field, all along one dimension."""

    store: Store
    info: ObjectInfo
    variables: Mapping[str, Variable]

    @property
    def where(self) -> str:
        """The URL, for messages."""
        return f"{self.store.url}/{self.info.path}"

    @property
    def num_samples(self) -> int:
        """The length of the samples' dimension."""
        return next(iter(self.variables.values())).shape[0]

    @property
    def fields(self) -> Mapping[str, Field]:
        """One field for each variable; characters are text."""
        return {name: variable_field(variable, self.where) for name, variable in self.variables.items()}

    def read(self, rows: NDArray[np.int64], into: Into, note: Note) -> None:
        """Fill the columns; see `Container`."""
        raw = {
            name: np.empty((len(rows), variable.row_bytes), np.uint8) if isinstance(column, list) else _bytes_of(column)
            for name, variable in self.variables.items()
            for column in (into[name],)
        }
        for group in self._groups():
            self._read_group(group, rows, raw)
        for name, variable in self.variables.items():
            column = into[name]
            if isinstance(column, list):
                texts = raw[name].view(f"S{max(1, variable.row_bytes)}").reshape(-1)
                add_texts(name, texts.tolist(), column, note)
            elif variable.dtype.byteorder == ">":
                column.byteswap(inplace=True)

    def _groups(self) -> list[list[str]]:
        """Return the fields that are read together: those of the records, where most of their bytes are wanted."""
        records = [name for name, variable in self.variables.items() if variable.record]
        alone = [name for name in self.variables if name not in records]
        starts, stops = self._ends(records)
        wanted = sum(self.variables[name].row_bytes for name in records)
        together = bool(records) and 2 * wanted >= stops - starts
        return [[name] for name in alone] + ([records] if together else [[name] for name in records])

    def _ends(self, names: list[str]) -> tuple[int, int]:
        some = [self.variables[name] for name in names]
        stop = max((variable.start + variable.row_bytes for variable in some), default=0)
        return min((variable.start for variable in some), default=0), stop

    def _read_group(self, names: list[str], rows: NDArray[np.int64], raw: Mapping[str, NDArray[np.uint8]]) -> None:
        start, stop = self._ends(names)
        starts = start + rows * self.variables[names[0]].stride
        if len(names) == 1:
            read_rows(self.store, self.info.path, starts, raw[names[0]])
            return
        some = max(1, RECORDS_BYTES // (stop - start))
        for first in range(0, len(rows), some):
            records = np.empty((min(some, len(rows) - first), stop - start), np.uint8)
            read_rows(self.store, self.info.path, starts[first : first + some], records)
            for name in names:
                at = self.variables[name].start - start
                raw[name][first : first + some] = records[:, at : at + self.variables[name].row_bytes]


def _bytes_of(column: NDArray[Any]) -> NDArray[np.uint8]:
    return column.reshape(len(column), -1).view(np.uint8) if column.size else np.empty((0, 1), np.uint8)


def variable_field(variable: Variable, where: str) -> Field:
    """Return the field of a variable's rows. Raises `SourceError`, which names `where`, for what no field holds."""
    if variable.dtype.kind != "S":
        return tensor_field(variable.dtype, variable.shape, where)
    if len(variable.shape) > 2:
        raise SourceError(
            f"{where} holds characters in the shape {variable.shape}, a field has one text a sample", LEAVE_OUT
        )
    tensor_field(np.dtype(np.uint8), variable.shape, where)  # for its sizes
    return Field("text")
